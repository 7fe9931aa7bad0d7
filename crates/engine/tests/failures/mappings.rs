//! Mappings of what a peer exports: opened once, closed after the last use, never stale.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};

use kvferry_device::sim::Live;
use kvferry_device::{DeviceUuid, Export};
use kvferry_engine::{
    AllocationKey, Engine, Error, Exports, ExportsError, Identity, Loan, Mismatch, Op, Probe,
    Range, Segment, Target,
};

use crate::common::NoExports;
use crate::support::{bytes, engine_on, host_pair, pattern, simulated, transfer};

/// Hands out an engine's exports and counts them, without those of proofs.
#[derive(Debug)]
struct Counted {
    engine: Arc<Engine>,
    fetched: AtomicUsize,
    proven: AtomicUsize,
    loans: Mutex<Vec<Loan>>,
}

impl Counted {
    fn of(engine: &Arc<Engine>) -> Arc<Self> {
        Arc::new(Self {
            engine: Arc::clone(engine),
            fetched: AtomicUsize::new(0),
            proven: AtomicUsize::new(0),
            loans: Mutex::default(),
        })
    }

    fn lent(&self, key: AllocationKey) -> Option<usize> {
        let loans = self.loans.lock().expect("no panic");
        loans.iter().position(|loan| loan.probe().allocation == key)
    }
}

impl Exports for Counted {
    fn fetch(&self, key: AllocationKey) -> Result<Export, ExportsError> {
        let counts = usize::from(self.lent(key).is_none());
        self.fetched.fetch_add(counts, Ordering::SeqCst);
        Ok(self.engine.export(key)?)
    }

    fn probe(&self, device: DeviceUuid) -> Result<Probe, ExportsError> {
        let loan = self.engine.lend(device)?;
        let probe = loan.probe();
        self.loans.lock().expect("no panic").push(loan);
        Ok(probe)
    }

    fn prove(&self, key: AllocationKey, seed: u64) -> Result<Option<Mismatch>, ExportsError> {
        self.proven.fetch_add(1, Ordering::SeqCst);
        let at = self.lent(key).ok_or("not lent")?;
        let loan = self.loans.lock().expect("no panic").swap_remove(at);
        Ok(loan.compare(seed)?)
    }
}

/// The segment as if its engine ran in another process, so that it is mapped and not used
/// directly. Host memory allows that in one process.
fn foreign(segment: &Segment, incarnation: Identity) -> Segment {
    Segment { incarnation, process: incarnation, ..segment.clone() }
}

struct Foreign {
    target: Target,
    exports: Arc<Counted>,
    incarnation: Identity,
}

fn map_foreign(importer: &Engine, exporter: &Arc<Engine>) -> Foreign {
    let exports = Counted::of(exporter);
    let incarnation = Identity::random();
    let target = importer
        .open("foreign", foreign(&exporter.segment(), incarnation), exports.clone())
        .expect("opens");
    Foreign { target, exports, incarnation }
}

#[test]
fn b01_views_of_one_allocation_are_read_at_their_own_offsets() {
    let (importer, exporter, host) = host_pair();
    let memory = Arc::clone(&host).allocate(8 << 20).expect("memory");
    // Four views of a MiB; the small tensors of a caching allocator; one at an odd byte.
    let mib = 1 << 20;
    let views = [
        (0, mib),
        (mib, mib),
        (2 * mib, mib),
        (3 * mib, mib),
        (4 * mib, 64),
        (4 * mib + 512, 16 << 10),
        (5 * mib, 128 << 10),
        (6 * mib, 512 << 10),
        (7 * mib + 13, 999),
    ];
    for (at, &(offset, len)) in views.iter().enumerate() {
        // SAFETY: `memory` outlives both engines' use of it: regions are unregistered below.
        unsafe {
            host.write(memory.addr() + offset, &vec![at as u8 + 1; len as usize]).expect("writes");
            exporter.register(memory.addr() + offset, len).expect("registers");
        }
    }
    let Foreign { target, exports, .. } = map_foreign(&importer, &exporter);
    let local = importer.allocate(&host, mib).expect("memory");
    for (at, &(offset, len)) in views.iter().enumerate() {
        transfer(
            &importer,
            &target,
            Op::Read,
            &[Range { local: local.addr(), remote: memory.addr() + offset, len }],
        );
        assert_eq!(bytes(&local, 0, len as usize), vec![at as u8 + 1; len as usize], "view {at}");
    }
    assert_eq!(exports.fetched.load(Ordering::SeqCst), 1, "one mapping serves all views");
    // SAFETY: refused, so nothing is promised.
    let leaves = unsafe { exporter.register(memory.addr() + (8 << 20) - 10, 11) };
    assert!(matches!(leaves, Err(Error::LeavesAllocation { .. })), "{leaves:?}");
    drop(target);
    for (offset, _) in views {
        exporter.unregister(memory.addr() + offset).expect("idle");
    }
}

#[test]
fn b03_an_allocation_is_opened_once_for_many_reads_and_closed_after_the_last() {
    let (importer, exporter, host) = host_pair();
    let remote = exporter.allocate(&host, 64 << 16).expect("memory");
    remote.write(0, &pattern(64 << 16, 3)).expect("inside");
    let Foreign { target, exports, .. } = map_foreign(&importer, &exporter);
    let local = importer.allocate(&host, 64 << 16).expect("memory");
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (importer, target, local, remote) = (&importer, &target, &local, &remote);
            scope.spawn(move || {
                for at in (thread * 8)..(thread * 8 + 8) {
                    let range = Range {
                        local: local.addr() + (at << 16),
                        remote: remote.addr() + (at << 16),
                        len: 1 << 16,
                    };
                    transfer(importer, target, Op::Read, &[range]);
                }
            });
        }
    });
    assert_eq!(bytes(&local, 0, 64 << 16), pattern(64 << 16, 3));
    assert_eq!((exports.fetched.load(Ordering::SeqCst), target.open_count()), (1, 1));
}

#[test]
fn b04_memory_that_was_freed_and_reallocated_at_one_address_is_never_stale() {
    let (importer, exporter, host) = host_pair();
    let local = importer.allocate(&host, 8 << 20).expect("memory");
    let first = exporter.allocate(&host, 4096).expect("memory");
    let Foreign { target, incarnation, .. } = map_foreign(&importer, &exporter);
    drop(first);
    let mut reused = 0;
    let mut seen = HashSet::new();
    for round in 0..100u64 {
        let pages = match round {
            0..33 => round + 1,
            33..66 => 67 - round,
            _ => round.wrapping_mul(7919) % 37 + 1,
        };
        let len = pages * (64 << 10);
        let remote = exporter.allocate(&host, len).expect("memory");
        reused += usize::from(!seen.insert(remote.addr()));
        remote.write(0, &vec![round as u8; len as usize]).expect("inside");
        target.refresh(foreign(&exporter.segment(), incarnation)).expect("the same engine");
        transfer(
            &importer,
            &target,
            Op::Read,
            &[Range { local: local.addr(), remote: remote.addr(), len }],
        );
        assert_eq!(
            bytes(&local, 0, len as usize),
            vec![round as u8; len as usize],
            "round {round}"
        );
        assert_eq!(target.open_count(), 1, "the mapping of the round before is gone");
    }
    assert!(reused > 0, "no address came again: the test shows nothing");
}

#[test]
fn b09_thirty_two_threads_that_race_to_the_first_use_open_once() {
    let (importer, exporter, host) = host_pair();
    let remote = exporter.allocate(&host, 1 << 20).expect("memory");
    let local = importer.allocate(&host, 1 << 20).expect("memory");
    for round in 0..50 {
        let Foreign { target, exports, .. } = map_foreign(&importer, &exporter);
        let barrier = Barrier::new(32);
        std::thread::scope(|scope| {
            for thread in 0..32u64 {
                let (importer, target, barrier, local, remote) =
                    (&importer, &target, &barrier, &local, &remote);
                scope.spawn(move || {
                    barrier.wait();
                    let at = thread * 1024;
                    transfer(
                        importer,
                        target,
                        Op::Read,
                        &[Range {
                            local: local.addr() + at,
                            remote: remote.addr() + at,
                            len: 1024,
                        }],
                    );
                });
            }
        });
        let counts = [&exports.fetched, &exports.proven].map(|count| count.load(Ordering::SeqCst));
        assert_eq!(counts, [1, 1], "round {round}: one open and one proof");
    }
}

#[test]
fn a_peer_that_claims_to_be_this_process_does_not_get_its_addresses_used() {
    let (importer, exporter, host) = host_pair();
    let secret = exporter.allocate(&host, 4096).expect("memory");
    let local = importer.allocate(&host, 4096).expect("memory");
    // A forged segment: our process, an engine that does not exist, an address that is valid here.
    let forged = Segment { incarnation: Identity::random(), ..exporter.segment() };
    let target = importer.open("forger", forged, Arc::new(NoExports)).expect("opens");
    let range = Range { local: local.addr(), remote: secret.addr(), len: 4096 };
    let refused = importer.submit(&target, Op::Read, &[range]);
    assert!(matches!(refused, Err(Error::ProbeRefused { .. })), "{refused:?}");
}

#[test]
fn a_loan_that_was_given_back_is_lent_again_and_one_that_was_not_is_freed() {
    let (device, control) = simulated(0);
    let engine = engine_on(vec![device.clone()]);
    let uuid = device.info().uuid;
    let of_engine = control.live(Live::Allocations);
    let lend = || engine.lend(uuid).expect("lends");
    let first = lend();
    let Probe { allocation, seed } = first.probe();
    assert!(engine.export(allocation).is_ok());
    assert_eq!(engine.segment().allocations, [], "no peer may use it for a transfer");
    assert_eq!(first.compare(seed), Ok(None), "nobody wrote");
    let second = lend();
    assert_eq!(second.probe().allocation, allocation);
    assert_ne!(second.probe().seed, seed);
    let other = lend();
    assert_ne!(other.probe().allocation, allocation);
    assert_eq!(control.live(Live::Allocations), of_engine + 2);
    drop(second);
    assert_eq!(control.live(Live::Allocations), of_engine + 1);
    assert!(matches!(engine.export(allocation), Err(Error::UnknownAllocation { .. })));
    let wrong = other.compare(seed).expect("readable").expect("of another seed");
    assert_ne!(wrong.expected, wrong.found);
    let unknown = engine.lend(DeviceUuid([7; 16])).map(drop);
    assert!(
        matches!(&unknown, Err(Error::UnknownDevice { devices, .. }) if devices == "sim:0"),
        "{unknown:?}"
    );
    drop(engine);
    assert_eq!(control.live(Live::Allocations), 0);
}
