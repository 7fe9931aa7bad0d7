//! A pair of devices proves itself before traffic uses it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};

use kvferry::device::Error as DeviceError;
use kvferry::{Error, Op, Range};
use kvferry_device::sim::{Fault, Live};
use rand::Rng;
use rand::rngs::SmallRng;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use super::{Pair, control, lost};
use crate::peer_process::{Image, Kind, Obey, Order, PeerProcess, eventually};

const LEN: u64 = 100_000;

/// Without it what is refused here goes over TCP.
const STRICT: &[(&str, &str)] = &[("MC_KVFERRY_STRICT", "1")];

pub(crate) fn allocations_that_are_first_used_at_the_same_time_share_one_proof(
    kind: Kind,
    random: &mut SmallRng,
) {
    const THREADS: usize = 32;
    let mut pair = Pair::start(kind);
    let theirs: Vec<u64> = (0..THREADS).map(|_| random.random()).collect();
    let remotes: Vec<u64> = theirs.iter().map(|&seed| pair.there.filled(LEN, seed)).collect();
    let locals: Vec<u64> = (0..THREADS).map(|_| pair.here.filled(LEN, 0)).collect();
    pair.here.peer().refresh().expect("it answers");
    let barrier = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for (&local, &remote) in locals.iter().zip(&remotes) {
            let (pair, barrier) = (&pair, &barrier);
            scope.spawn(move || {
                barrier.wait();
                let range = Range { local, remote, len: LEN };
                pair.here.run(pair.target(), Op::Read, &[range]).expect("reads");
            });
        }
    });
    let device = control(&pair.here);
    assert_eq!(device.calls("open"), THREADS as u64 + 1, "one open each, and one of the proof");
    assert_eq!(device.live(Live::Mappings), THREADS as u64);
    for (local, seed) in locals.into_iter().zip(theirs) {
        pair.here.verify(local, Image::untouched(seed));
    }
}

pub(crate) fn devices_that_deliver_wrong_bytes_are_not_used_and_say_so_once(
    kind: Kind,
    random: &mut SmallRng,
) {
    // B16: every call succeeds.
    for reads in [true, false] {
        let mut pair = Pair::start_with(kind, STRICT);
        let (ours, theirs) = (random.random(), random.random());
        let (local, remote) = (pair.here.filled(LEN, ours), pair.there.filled(LEN, theirs));
        let range = Range { local, remote, len: LEN };
        pair.here.peer().refresh().expect("it answers");
        let seen = if reads {
            control(&pair.here).corrupt_peer_reads();
            "read from there, byte 0 of 64 bytes"
        } else {
            control(&pair.here).corrupt_peer_writes();
            "written there, byte 0 of 64 bytes"
        };
        let refused = refused_for_good(&pair, range, 1);
        let Error::Unproven { device, peer, what, .. } = &refused else { panic!("{refused}") };
        assert_eq!((device.as_str(), peer.as_str()), ("sim:0", pair.target().name()));
        assert!(what.starts_with(seen), "{what}");
        for word in ["sim:0", pair.target().name(), "IOMMU", "MC_KVFERRY_PROOF=off"] {
            assert!(refused.to_string().contains(word), "{refused}");
        }
        // Neither side's memory was touched, and the pair works with no later process's device.
        pair.here.verify(local, Image::untouched(ours));
        pair.there.verify(remote, Image::untouched(theirs));
        control(&pair.here).heal_peer_memory();
        assert_eq!(refused_for_good(&pair, range, 0), refused);
        let mut other = PeerProcess::start(kind);
        let remote = other.filled(LEN, theirs);
        let good = pair.here.node.open(&other.name).expect("opens");
        pair.here
            .run(good.target(), Op::Read, &[Range { local, remote, len: LEN }])
            .expect("reads");
        pair.here.verify(local, Image::untouched(theirs));
    }

    // At one's own risk: the fault is real, and nobody says so.
    let mut pair = Pair::start_with(kind, &[("MC_KVFERRY_PROOF", "off")]);
    let theirs = random.random();
    let (local, remote) = (pair.here.filled(LEN, theirs + 1), pair.there.filled(LEN, theirs));
    pair.here.peer().refresh().expect("it answers");
    control(&pair.here).corrupt_peer_writes();
    let range = Range { local, remote, len: LEN };
    pair.here.run(pair.target(), Op::Write, &[range]).expect("writes");
    pair.there.verify(remote, Image::untouched(theirs));
}

pub(crate) fn memory_that_cannot_be_opened_though_the_device_is_reachable_is_refused_and_said_once(
    kind: Kind,
    random: &mut SmallRng,
) {
    // B17: invalid device, and peer access unsupported.
    for code in [101, 217] {
        let mut pair = Pair::start_with(kind, STRICT);
        let theirs = random.random();
        let (local, remote) = (pair.here.filled(LEN, 0), pair.there.filled(LEN, theirs));
        pair.here.peer().refresh().expect("it answers");
        for nth in 0..10 {
            control(&pair.here).fail("open", nth, Fault::Code(code));
        }
        let refused = refused_for_good(&pair, Range { local, remote, len: LEN }, 1);
        assert!(refused.to_string().contains(&format!("({code})")), "{refused}");
        assert!(pair.here.peer().is_alive());
        // This side goes on, and the peer has its memory back.
        control(&pair.here).forget_failures();
        let mut other = PeerProcess::start(kind);
        let remote = other.filled(LEN, theirs);
        let good = pair.here.node.open(&other.name).expect("opens");
        pair.here
            .run(good.target(), Op::Read, &[Range { local, remote, len: LEN }])
            .expect("reads");
        pair.here.verify(local, Image::untouched(theirs));
    }
}

pub(crate) fn a_peer_that_dies_while_devices_are_tried_out_is_lost_and_they_are_not_blamed(
    kind: Kind,
    random: &mut SmallRng,
) {
    let mut pair = Pair::start(kind);
    let (local, remote) = (pair.here.filled(LEN, 0), pair.there.filled(LEN, random.random()));
    pair.here.peer().refresh().expect("it answers");
    control(&pair.here).hold();
    let range = Range { local, remote, len: LEN };
    std::thread::scope(|scope| {
        let (here, target) = (&pair.here, pair.here.peer().target());
        let first = scope.spawn(|| here.engine.submit(target, Op::Read, &[range]));
        eventually("the proof runs", || control(here).live(Live::Mappings) == 1);
        pair.there.kill();
        eventually("the peer is lost", || target.lost().is_some());
        assert!(!first.is_finished(), "its copies are held");
        control(here).release();
        let refused = first.join().expect("no panic");
        assert!(matches!(refused, Err(Error::ProbeRefused { .. })), "{refused:?}");
        let refused = here.engine.submit(target, Op::Read, &[range]);
        assert!(matches!(&refused, Err(error) if lost(error)), "{refused:?}");
    });
    assert_eq!(control(&pair.here).live(Live::Mappings), 0);
}

pub(crate) fn what_keeps_devices_from_being_tried_out_does_not_count_against_them(
    kind: Kind,
    random: &mut SmallRng,
) {
    // Out of memory here, at each allocation and open of a first use. The first allocation is for the
    // queue's counts, which it can do without.
    for (call, nth) in [("allocate_pinned", 0), ("allocate", 1), ("open", 0)] {
        let mut pair = Pair::start(kind);
        let theirs = random.random();
        let (local, remote) = (pair.here.filled(LEN, 0), pair.there.filled(LEN, theirs));
        pair.here.peer().refresh().expect("it answers");
        let range = Range { local, remote, len: LEN };
        control(&pair.here).fail(call, nth, Fault::OutOfMemory);
        let refused = pair.here.engine.submit(pair.target(), Op::Read, &[range]);
        assert!(
            matches!(refused, Err(Error::Device(DeviceError::OutOfMemory { .. }))),
            "{call}: {refused:?}"
        );
        pair.here.run(pair.target(), Op::Read, &[range]).expect("reads");
        pair.here.verify(local, Image::untouched(theirs));
        // A second peer handle tries nothing out again.
        let opens = control(&pair.here).calls("open");
        pair.here.done(Order::Close);
        pair.here.done(Order::Open { name: pair.there.name.clone() });
        pair.here.run(pair.target(), Op::Read, &[range]).expect("reads");
        assert_eq!(control(&pair.here).calls("open"), opens + 1);
    }
}

/// Submits several times, also through another handle of the same peer: all are refused with one
/// error, nothing is tried again, and that many warnings were written.
fn refused_for_good(pair: &Pair, range: Range, warned: usize) -> Error {
    let warnings = Arc::new(AtomicUsize::new(0));
    let again = pair.here.node.open(pair.target().name()).expect("opens");
    let attempts = [pair.target(), pair.target(), again.target(), pair.target()];
    let refused: Vec<Error> =
        tracing::subscriber::with_default(Warnings(Arc::clone(&warnings)), || {
            let mut opens = None;
            let submit = |target| {
                let refused = pair.here.engine.submit(target, Op::Write, &[range]);
                let now = control(&pair.here).calls("open");
                assert_eq!(*opens.get_or_insert(now), now, "tried again");
                refused.expect_err("an unproven pair")
            };
            attempts.into_iter().map(submit).collect()
        });
    assert_eq!(warnings.load(Ordering::SeqCst), warned, "warnings");
    assert!(refused.iter().all(|error| *error == refused[0]), "{refused:?}");
    assert!(matches!(refused[0], Error::Unproven { .. }), "{}", refused[0]);
    assert_eq!(pair.target().open_count(), 0);
    refused[0].clone()
}

/// Counts the warnings of the thread.
struct Warnings(Arc<AtomicUsize>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
