//! A peer's memory is mapped once, for what it is now, and let go.

use std::collections::HashSet;
use std::sync::Barrier;

use kvferry::{Error, Op, Range};
use kvferry_device::sim::{self, Live};
use rand::Rng;
use rand::rngs::SmallRng;

use super::{Pair, settled};
use crate::peer_process::{
    Answer, Image, Kind, Layout, Obey, Order, PeerProcess, Piece, Side, eventually,
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
            assert_eq!(opened(&here) - before, 1, "round {round}: one open");
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
        if kind != Kind::Cuda {
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
