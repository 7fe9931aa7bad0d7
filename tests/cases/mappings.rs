//! A peer's memory is mapped once, for what it is now, and let go.

use std::collections::HashSet;
use std::sync::Barrier;
use std::time::Instant;

use kvferry::{Error, Op, Range, RangeError, State};
use kvferry_device::sim::{self, Live};
use rand::Rng;
use rand::rngs::SmallRng;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::{Pair, control, proves_once, settled};
use crate::peer_process::{
    Answer, Image, Kind, Layout, Obey, Order, PATIENCE, PeerProcess, Piece, Side, eventually,
};

pub(crate) fn views_of_one_allocation_are_read_and_written_at_their_own_offsets(
    kind: Kind,
    random: &mut SmallRng,
) {
    // B01: four views of a MiB, the tensors of a caching allocator, and some at odd bytes, two of
    // which touch.
    const MIB: u64 = 1 << 20;
    const LEN: u64 = 12 * MIB;
    let views = vec![
        (0, MIB),
        (MIB, MIB),
        (2 * MIB, MIB),
        (3 * MIB, MIB),
        (4 * MIB + 512, 64),
        (4 * MIB + 1024, 16 << 10),
        (5 * MIB, 128 << 10),
        (6 * MIB, 512 << 10),
        (7 * MIB, 4 * MIB),
        (11 * MIB + 1, 1),
        (11 * MIB + 13, 999),
        (11 * MIB + 13 + 999, 30_001),
        (12 * MIB - 7, 7),
    ];
    let mut pair = Pair::start(kind);
    let (ours, theirs): (u64, u64) = (random.random(), random.random());
    let remote = pair.there.address(Order::AllocateViews { len: LEN, views: views.clone() });
    pair.there.done(Order::Fill { addr: remote, seed: theirs });
    pair.here.peer().refresh().expect("it answers");
    let range = |local: u64, &(offset, len): &(u64, u64)| Range {
        local: local + offset,
        remote: remote + offset,
        len,
    };
    let in_place = |&(offset, len): &(u64, u64)| Piece { source: offset, destination: offset, len };
    let views_of = |source_seed, guard_seed| Image {
        layout: Layout::List(views.iter().map(in_place).collect()),
        source_seed,
        guard_seed,
    };

    // One batch a view, then all in one.
    for at_once in [false, true] {
        let local = pair.here.filled(LEN, ours);
        let ranges: Vec<Range> = views.iter().map(|view| range(local, view)).collect();
        for part in ranges.chunks(if at_once { ranges.len() } else { 1 }) {
            pair.here.run(pair.target(), Op::Read, part).expect("reads");
        }
        pair.here.verify(local, views_of(theirs, ours));
        assert_eq!(pair.target().open_count(), 1, "one allocation is one mapping");
        pair.here.done(Order::Free { addr: local });
    }
    for at_once in [false, true] {
        let local = pair.here.filled(LEN, ours);
        pair.there.done(Order::Fill { addr: remote, seed: theirs });
        let ranges: Vec<Range> = views.iter().map(|view| range(local, view)).collect();
        for part in ranges.chunks(if at_once { ranges.len() } else { 1 }) {
            pair.here.run(pair.target(), Op::Write, part).expect("writes");
        }
        pair.there.verify(remote, views_of(ours, theirs));
        pair.here.verify(local, Image::untouched(ours));
        pair.here.done(Order::Free { addr: local });
    }
}

pub(crate) fn small_allocations_that_may_share_a_block_are_told_apart(
    kind: Kind,
    random: &mut SmallRng,
) {
    // B01: a CUDA driver may cut small allocations from one block, and a handle may name the block.
    // Neighbours come and go, so mappings of one block open and close while others are in use.
    const LENGTHS: [u64; 10] = [64, 64, 4 << 10, 64, 16 << 10, 4 << 10, 1 << 20, 1, 16 << 10, 64];
    let mut pair = Pair::start(kind);
    let mut held: Vec<(u64, u64)> =
        LENGTHS.map(|len| (pair.there.address(Order::Allocate { len }), len)).into();
    for round in 0..6 {
        pair.here.peer().refresh().expect("it answers");
        reads_and_writes_each(&mut pair, &held, random);
        assert_eq!(pair.target().open_count(), held.len(), "round {round}");

        let (stay, go): (Vec<_>, Vec<_>) =
            held.iter().enumerate().partition(|(at, _)| at % 2 == round % 2);
        go.iter().for_each(|&(_, &(addr, _))| pair.there.done(Order::Free { addr }));
        let mut stay: Vec<(u64, u64)> = stay.into_iter().map(|(_, one)| *one).collect();
        pair.here.peer().refresh().expect("it answers");
        assert_eq!(pair.target().open_count(), stay.len(), "round {round}");
        reads_and_writes_each(&mut pair, &stay, random);

        for &(_, &(_, len)) in &go {
            stay.push((pair.there.address(Order::Allocate { len }), len));
        }
        held = stay;
        if round % 2 == 1 {
            pair.here.done(Order::Close);
            pair.here.done(Order::Open { name: pair.there.name.clone() });
        }
    }
}

pub(crate) fn memory_that_was_freed_and_allocated_again_is_never_read_stale(
    kind: Kind,
    random: &mut SmallRng,
) {
    // B04, B08: sizes that grow, shrink, stay and are random; now one buffer, now several where
    // one was, so that new ranges overlap old ones.
    const UNIT: u64 = 4096;
    let mut pair = Pair::start(kind);
    let mut known = HashSet::new();
    let mut reused = 0;
    for round in 0..100u64 {
        let units = match round / 25 {
            0 => round + 1,
            1 => 51 - round,
            2 => 10,
            _ => random.random_range(1..=60),
        };
        let len = units * UNIT;
        let mut held = Vec::new();
        for _ in 0..round % 3 + 1 {
            let seed = random.random();
            let remote = pair.there.filled(len, seed);
            reused += usize::from(!known.insert(remote));
            held.push((remote, seed));
        }
        pair.here.peer().refresh().expect("it answers");
        for &(remote, theirs) in &held {
            let ours = random.random();
            let local = pair.here.filled(len, ours);
            let range = Range { local, remote, len };
            pair.here.run(pair.target(), Op::Read, &[range]).expect("reads");
            pair.here.verify(local, Image::untouched(theirs));
            pair.here.done(Order::Fill { addr: local, seed: ours });
            pair.here.run(pair.target(), Op::Write, &[range]).expect("writes");
            pair.there.verify(remote, Image::untouched(ours));
            pair.here.done(Order::Free { addr: local });
        }
        assert_eq!(pair.target().open_count(), held.len(), "round {round}: mappings pile up");
        for (addr, _) in held {
            pair.there.done(Order::Free { addr });
        }
    }
    assert!(reused > 0, "no address was used again, so nothing was tested");
    pair.here.peer().refresh().expect("it answers");
    assert_eq!(pair.target().open_count(), 0);
}

pub(crate) fn threads_that_race_to_the_first_use_all_succeed(kind: Kind, random: &mut SmallRng) {
    // B09: through one peer handle, and each thread through its own.
    const THREADS: u64 = 32;
    const PART: u64 = 3001;
    const LEN: u64 = THREADS * PART;
    let mut here = Side::start(kind, None).expect("a side");
    let mut there = PeerProcess::start(kind);
    let opened = |here: &Side| here.control.as_ref().map_or(0, |control| control.calls("open"));
    for round in 0..10 {
        let own_handles = round % 2 == 1;
        let (ours, theirs) = (random.random(), random.random());
        let (local, remote) = (here.filled(LEN, ours), there.filled(LEN, theirs));
        let before = opened(&here);
        let handles = if own_handles { THREADS } else { 1 };
        let peers: Vec<_> =
            (0..handles).map(|_| here.node.open(&there.name).expect("opens")).collect();
        let barrier = Barrier::new(THREADS as usize);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (here, peers, barrier) = (&here, &peers, &barrier);
                scope.spawn(move || {
                    let target = peers[(thread % handles) as usize].target();
                    let offset = thread * PART;
                    let range = Range { local: local + offset, remote: remote + offset, len: PART };
                    barrier.wait();
                    here.run(target, Op::Read, &[range]).expect("reads");
                });
            }
        });
        here.verify(local, Image::untouched(theirs));
        if kind == Kind::Sim {
            // The first of all is that of the proof.
            let opens = if round == 0 { 2 } else { 1 };
            assert_eq!(opened(&here) - before, opens, "round {round}: one open");
        }
        drop(peers);
        here.done(Order::Free { addr: local });
        there.done(Order::Free { addr: remote });
    }
    drop(there);
    eventually("all mappings are closed", || {
        here.control.as_ref().is_none_or(|control| control.live(Live::Mappings) == 0)
    });
}

pub(crate) fn a_peer_that_is_opened_again_maps_the_same_memory_again(
    kind: Kind,
    random: &mut SmallRng,
) {
    // B02: connect, transfer, disconnect, connect to the same memory.
    const LEN: u64 = 100_000;
    let mut here = Side::start(kind, None).expect("a side");
    let mut there = PeerProcess::start(kind);
    let theirs = random.random();
    let remote = there.filled(LEN, theirs);
    let mut kept = None;
    for round in 0..6 {
        let local = here.filled(LEN, random.random());
        let peer = here.node.open(&there.name).expect("opens");
        let range = Range { local, remote, len: LEN };
        here.run(peer.target(), Op::Read, &[range])
            .unwrap_or_else(|error| panic!("round {round}: {error}"));
        here.verify(local, Image::untouched(theirs));
        here.done(Order::Free { addr: local });
        // From the fourth round on an older handle has it mapped all the while.
        if round == 2 {
            kept = Some(peer);
        }
    }
    assert_eq!(kept.map(|peer| peer.target().open_count()), Some(1));
}

pub(crate) fn memory_that_another_library_has_mapped_is_refused_by_name_until_it_lets_go(
    kind: Kind,
    random: &mut SmallRng,
) {
    // B02.
    const LEN: u64 = 100_000;
    let mut pair = Pair::start(kind);
    let theirs = random.random();
    let remote = pair.there.filled(LEN, theirs);
    let local = pair.here.filled(LEN, random.random());
    let Answer::Handle(handle) = pair.there.ask(Order::Export { addr: remote }) else {
        panic!("a simulated GPU has handles")
    };
    pair.here.peer().refresh().expect("it answers");
    let let_go = sim::map_as_another_library(&handle).expect("a good handle");
    let range = Range { local, remote, len: LEN };
    for _ in 0..3 {
        let refused = pair.here.engine.submit(pair.target(), Op::Read, &[range]);
        let Err(Error::MappedElsewhere { device, peer, pid, base, len }) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!((device.as_str(), base, len), ("sim:0", remote, LEN));
        assert_eq!((peer.as_str(), pid), (pair.target().name(), pair.there.pid()));
        assert_eq!(pair.target().open_count(), 0);
    }
    let_go();
    pair.here.run(pair.target(), Op::Read, &[range]).expect("reads");
    pair.here.verify(local, Image::untouched(theirs));
}

pub(crate) fn mappings_and_descriptors_end_with_the_peer(kind: Kind, random: &mut SmallRng) {
    // B06: the process ends first, or the handle is dropped first.
    const LEN: u64 = 1 << 20;
    let mut here = Side::start(kind, None).expect("a side");
    proves_once(&mut here, kind);
    let local = here.filled(LEN, 0);
    let mut before = None;
    for round in 0..51 {
        let mut there = PeerProcess::start(kind);
        let theirs = random.random();
        let remote = there.filled(LEN, theirs);
        let peer = here.node.open(&there.name).expect("opens");
        let idle = here.usage().mappings;
        here.run(peer.target(), Op::Read, &[Range { local, remote, len: LEN }]).expect("reads");
        here.verify(local, Image::untouched(theirs));
        if !kind.has_driver() {
            assert_eq!(here.usage().mappings, idle + 1, "round {round}");
        }
        if round % 2 == 0 {
            there.done(Order::Free { addr: remote });
            there.end();
            eventually("the mappings of a peer that ended close", || here.usage().mappings == idle);
            drop(peer);
        } else {
            drop(peer);
            eventually("the mappings of a dropped peer close", || here.usage().mappings == idle);
            there.end();
        }
        drop(there);
        // What the first round opened once and for all does not count.
        let before = *before.get_or_insert_with(|| settled(&mut here));
        eventually("descriptors stay flat", || here.usage().within(&before));
    }
}

pub(crate) fn an_address_that_is_valid_in_both_processes_means_the_peers_memory(
    kind: Kind,
    random: &mut SmallRng,
) {
    // B12: two processes of one host, both named 127.0.0.1; the peer's address is also one of ours.
    const LEN: u64 = 8 << 20;
    let mut pair = Pair::start(kind);
    assert!(pair.there.name.starts_with("127.0.0.1:"), "{}", pair.there.name);
    let (theirs, ours) = (random.random(), random.random());
    // A real GPU's driver gives two processes the same addresses by itself, now and then.
    let mut remote = pair.there.filled(LEN, theirs);
    let mut decoy = None;
    while !kind.has_driver() && decoy.is_none() {
        decoy = Decoy::at(remote, LEN);
        if decoy.is_none() {
            remote = pair.there.filled(LEN, theirs);
        }
    }
    let local = pair.here.filled(LEN, ours);
    pair.here.peer().refresh().expect("it answers");
    pair.here.run(pair.target(), Op::Read, &[Range { local, remote, len: LEN }]).expect("reads");
    pair.here.verify(local, Image::untouched(theirs));
    pair.here.done(Order::Fill { addr: local, seed: ours });
    pair.here.run(pair.target(), Op::Write, &[Range { local, remote, len: LEN }]).expect("writes");
    pair.there.verify(remote, Image::untouched(ours));
    assert!(decoy.is_none_or(|decoy| decoy.bytes().iter().all(|byte| *byte == Decoy::BYTE)));
}

/// Memory of this process at an address of another one's.
struct Decoy {
    at: *mut std::ffi::c_void,
    len: usize,
}

impl Decoy {
    const BYTE: u8 = 0xda;

    /// `None` if something is there already.
    fn at(addr: u64, len: u64) -> Option<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
        let (wanted, len) = (addr as *mut std::ffi::c_void, len as usize);
        // SAFETY: the kernel refuses to replace a mapping.
        let at = unsafe { mmap_anonymous(wanted, len, ProtFlags::READ | ProtFlags::WRITE, flags) };
        let decoy = Self { at: at.ok()?, len };
        // SAFETY: all of the mapping, which nobody else knows.
        unsafe { decoy.at.cast::<u8>().write_bytes(Self::BYTE, len) };
        (decoy.at == wanted).then_some(decoy)
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: as in `at`; whoever wrote to it by mistake has ended.
        unsafe { std::slice::from_raw_parts(self.at.cast(), self.len) }
    }
}

impl Drop for Decoy {
    fn drop(&mut self) {
        // SAFETY: mapped in `at`, and no slice of it lives longer.
        unsafe { munmap(self.at, self.len) }.expect("it is mapped");
    }
}

pub(crate) fn idle_mappings_beyond_the_bound_close_and_open_again(
    kind: Kind,
    random: &mut SmallRng,
) {
    // A peer with more allocations than mappings are kept: bytes stay right, mappings stay few.
    const LEN: u64 = 100_000;
    const BOUND: usize = 3;
    let mut pair = Pair::start_with(kind, &[("MC_KVFERRY_MAX_MAPPINGS", "3")]);
    let held: Vec<(u64, u64)> = (0..7)
        .map(|_| {
            let seed = random.random();
            (pair.there.filled(LEN, seed), seed)
        })
        .collect();
    let local = pair.here.filled(LEN, 0);
    pair.here.peer().refresh().expect("it answers");
    let live = |side: &Side| side.control.as_ref().map(|control| control.live(Live::Mappings));
    let mut opened = HashSet::new();
    for _ in 0..60 {
        let at = random.random_range(0..held.len());
        let (remote, theirs) = held[at];
        opened.insert(at);
        pair.here
            .run(pair.target(), Op::Read, &[Range { local, remote, len: LEN }])
            .expect("reads");
        pair.here.verify(local, Image::untouched(theirs));
        let open = pair.target().open_count();
        assert_eq!(open, opened.len().min(BOUND));
        assert!(live(&pair.here).is_none_or(|live| live == open as u64));
    }
    // One batch that needs them all has them all, and the next use comes back to the bound.
    let part = LEN / 10;
    let guard = random.random();
    let batch = pair.here.filled(LEN, guard);
    let offset = |at: usize| at as u64 * part;
    let all: Vec<Range> = (0..held.len())
        .map(|at| Range { local: batch + offset(at), remote: held[at].0 + offset(at), len: part })
        .collect();
    pair.here.run(pair.target(), Op::Read, &all).expect("reads");
    for (at, &(remote, theirs)) in held.iter().enumerate() {
        // The rest of the buffer as it would be after reading it all.
        let rest = |from: u64, to: u64| Range {
            local: batch + from,
            remote: remote + from,
            len: to - from,
        };
        let others = [rest(0, offset(at)), rest(offset(at + 1), LEN)];
        pair.here.run(pair.target(), Op::Read, &others).expect("reads");
        pair.here.verify(batch, Image::untouched(theirs));
        pair.here.run(pair.target(), Op::Read, &all).expect("reads");
    }
    let (remote, theirs) = held[0];
    pair.here.run(pair.target(), Op::Read, &[Range { local, remote, len: LEN }]).expect("reads");
    pair.here.verify(local, Image::untouched(theirs));
}

pub(crate) fn one_allocation_is_one_mapping_though_every_export_of_it_differs(
    kind: Kind,
    random: &mut SmallRng,
) {
    // B08.
    const LEN: u64 = 100_000;
    let mut pair = Pair::start(kind);
    let theirs = random.random();
    let remote = pair.there.filled(LEN, theirs);
    let mut handles = HashSet::new();
    for _ in 0..100 {
        let Answer::Handle(handle) = pair.there.ask(Order::Export { addr: remote }) else {
            panic!("a simulated GPU has handles")
        };
        handles.insert(handle);
    }
    assert_eq!(handles.len(), 100);
    pair.prove();
    let before = control(&pair.here).calls("open");
    let local = pair.here.filled(LEN, 0);
    let peers: Vec<_> = (0..100)
        .map(|_| {
            let peer = pair.here.node.open(&pair.there.name).expect("opens");
            let range = Range { local, remote, len: LEN };
            pair.here.run(peer.target(), Op::Read, &[range]).expect("reads");
            peer
        })
        .collect();
    assert!(peers.iter().all(|peer| peer.target().open_count() == 1));
    let device = control(&pair.here);
    assert_eq!((device.calls("open") - before, device.live(Live::Mappings)), (1, 1));
    drop(peers);
    assert_eq!(control(&pair.here).live(Live::Mappings), 0);
    pair.here.verify(local, Image::untouched(theirs));
}

pub(crate) fn memory_that_is_withdrawn_under_a_running_batch_is_kept_until_the_batch_ends(
    kind: Kind,
    random: &mut SmallRng,
) {
    // By the peer, whose memory stays mapped here, and by this side, which waits.
    const LEN: u64 = 100_000;
    let mut pair = Pair::start(kind);
    pair.prove();
    let theirs = random.random();
    let remote = pair.there.filled(LEN, theirs);
    let local = pair.here.filled(LEN, random.random());
    pair.here.peer().refresh().expect("it answers");
    let range = Range { local, remote, len: LEN };
    control(&pair.here).hold();
    let id = pair.here.engine.submit(pair.target(), Op::Read, &[range]).expect("submits");
    pair.there.done(Order::Free { addr: remote });
    pair.here.peer().refresh().expect("it answers");
    assert_eq!(pair.target().open_count(), 0);
    assert_eq!(control(&pair.here).live(Live::Mappings), 1, "the batch runs");
    let (engine, device) = (&pair.here.engine, control(&pair.here));
    let again = engine.submit(pair.target(), Op::Read, &[range]);
    assert!(matches!(again, Err(Error::Range(RangeError::NotRegistered { .. }))), "{again:?}");
    std::thread::scope(|scope| {
        let unregister = scope.spawn(|| engine.unregister(local));
        let start = Instant::now();
        while !engine.segment().regions.is_empty() {
            assert!(start.elapsed() < PATIENCE, "the region is withdrawn at once");
            std::thread::yield_now();
        }
        assert!(!unregister.is_finished(), "it returned while a batch was running");
        assert_eq!(engine.poll(id).map(|status| status.state), Ok(State::Running));
        device.release();
        unregister.join().expect("no panic").expect("the batch ended");
    });
    assert_eq!(engine.poll(id).map(|status| status.state), Ok(State::Completed));
    assert_eq!(device.live(Live::Mappings), 0);
    engine.release(id).expect("it ended");
    // Its bytes are there: what was mapped was still the memory of that time.
    pair.here.verify(local, Image::untouched(theirs));
    // The buffer's own end finds it unregistered otherwise, and leaks it.
    // SAFETY: it is the buffer's memory, which ends with the side.
    unsafe { pair.here.engine.register(local, LEN) }.expect("registers again");
}

/// Reads all of the peer's buffers, address and length, in one batch, then writes each in its own.
fn reads_and_writes_each(pair: &mut Pair, held: &[(u64, u64)], random: &mut SmallRng) {
    /// Where a buffer's bytes are in the local one, guards around them.
    const AT: u64 = 3;
    let one = |source, destination, len| Layout::List(vec![Piece { source, destination, len }]);
    let mut expected = Vec::new();
    let mut ranges = Vec::new();
    for &(remote, len) in held {
        let (theirs, ours) = (random.random(), random.random());
        pair.there.done(Order::Fill { addr: remote, seed: theirs });
        let local = pair.here.filled(len + 2 * AT, ours);
        ranges.push(Range { local: local + AT, remote, len });
        let image = Image { layout: one(0, AT, len), source_seed: theirs, guard_seed: ours };
        expected.push((local, image));
    }
    pair.here.run(pair.target(), Op::Read, &ranges).expect("reads");
    for (local, image) in expected {
        pair.here.verify(local, image);
        pair.here.done(Order::Free { addr: local });
    }

    let mut expected = Vec::new();
    for &(remote, len) in held {
        let ours = random.random();
        let local = pair.here.filled(len + 2 * AT, ours);
        let range = Range { local: local + AT, remote, len };
        pair.here.run(pair.target(), Op::Write, &[range]).expect("writes");
        pair.here.done(Order::Free { addr: local });
        expected
            .push((remote, Image { layout: one(AT, 0, len), source_seed: ours, guard_seed: 0 }));
    }
    // After the last write, because each buffer is the guard of its neighbours.
    for (remote, image) in expected {
        pair.there.verify(remote, image);
    }
}
