//! Kinds of memory that the driver does not hand out by one handle: chunks of a virtual memory API,
//! pools, and host memory that a GPU uses in place.

use kvferry::{Error, Op, Range};
use kvferry_device::sim::{Fault, Live};
use rand::Rng;
use rand::rngs::SmallRng;

use super::{Pair, control};
use crate::peer_process::{Answer, Image, Kind, Layout, Move, Obey, Order, Piece, Side};

/// Memory of that many chunks, all shareable.
fn of_chunks(chunks: usize) -> Order {
    Order::AllocateChunks { chunks, private: None, hole: None }
}

fn refusal(side: &mut dyn Obey, order: Order) -> String {
    let asked = format!("{order:?}");
    match side.ask(order) {
        Answer::Failed(reason) => reason,
        other => panic!("{asked}: {other:?}"),
    }
}

/// Bytes of all buffers here: not more than two chunks, wherever a chunk is at least 64 KiB.
pub(super) const LEN: u64 = 2 * (64 << 10);

/// Reads the peer's memory at `remote + at`, then writes it, and checks both ends whole.
pub(super) fn both_ways(pair: &mut Pair, remote: u64, at: u64, whole: u64, random: &mut SmallRng) {
    let (ours, theirs): (u64, u64) = (random.random(), random.random());
    pair.there.done(Order::Fill { addr: remote, seed: theirs });
    let local = pair.here.filled(LEN, ours);
    // One piece over the border, and a hundred around it.
    let mut lengths = vec![LEN / 4];
    lengths.extend((1..=100).map(|len| len * 7));
    let mut pieces = Vec::new();
    let mut offset = 0;
    for len in lengths {
        pieces.push((offset, len));
        offset += len + 5;
    }
    let list = |write: bool| -> Vec<Piece> {
        let piece = |&(offset, len): &(u64, u64)| match write {
            true => Piece { source: offset, destination: at + offset, len },
            false => Piece { source: at + offset, destination: offset, len },
        };
        pieces.iter().map(piece).collect()
    };
    let once = |write, layout| Move { write, local, remote, layout, threads: 1, times: 1 };
    let reads = Layout::List(list(false));
    pair.here.done(Order::Move(vec![once(false, reads.clone())]));
    let read = Image { layout: reads, source_seed: theirs, guard_seed: ours };
    pair.here.verify(local, read);
    pair.there.verify(remote, Image::untouched(theirs));

    pair.here.done(Order::Fill { addr: local, seed: ours });
    let writes = Layout::List(list(true));
    pair.here.done(Order::Move(vec![once(true, writes.clone())]));
    pair.there.verify(remote, Image { layout: writes, source_seed: ours, guard_seed: theirs });
    pair.here.verify(local, Image::untouched(ours));
    pair.here.done(Order::Free { addr: local });
    assert!(at + offset <= whole, "the case itself left its memory");
}

/// Bytes of a chunk of that kind of device's smallest size, found by asking for one.
fn chunk_len(side: &mut Side) -> u64 {
    let addr = side.address(of_chunks(1));
    let len =
        side.engine.segment().regions.iter().find(|region| region.addr == addr).map(|r| r.len);
    side.done(Order::Free { addr });
    len.expect("it was registered")
}

pub(crate) fn memory_of_several_chunks_arrives_whole_across_their_borders(
    kind: Kind,
    random: &mut SmallRng,
) {
    // B07 (c). 70 chunks take two messages.
    for chunks in [1, 2, 3, 70] {
        let mut pair = Pair::start(kind);
        let chunk = chunk_len(&mut pair.here);
        let remote = pair.there.address(of_chunks(chunks));
        let whole = chunk * chunks as u64;
        for border in [0, chunk, 2 * chunk, whole - chunk] {
            let at = border.saturating_sub(LEN / 8).min(whole - chunk.min(LEN));
            if at + LEN <= whole {
                both_ways(&mut pair, remote, at, whole, random);
            }
        }
        // All of it as one range, into chunks of our own.
        let (ours, theirs) = (random.random(), random.random());
        let local = pair.here.address(of_chunks(chunks));
        pair.here.done(Order::Fill { addr: local, seed: ours });
        pair.there.done(Order::Fill { addr: remote, seed: theirs });
        pair.here.peer().refresh().expect("it answers");
        let all = Range { local, remote, len: whole };
        pair.here.run(pair.target(), Op::Read, &[all]).expect("reads");
        pair.here.verify(local, Image::untouched(theirs));
        pair.here.done(Order::Fill { addr: local, seed: ours });
        pair.here.run(pair.target(), Op::Write, &[all]).expect("writes");
        pair.there.verify(remote, Image::untouched(ours));
        assert_eq!(pair.target().open_count(), 1, "one unit is one mapping");
        pair.there.done(Order::Free { addr: remote });
        pair.here.peer().refresh().expect("it answers");
        assert_eq!(pair.target().open_count(), 0);
        if kind == Kind::Sim {
            assert_eq!(control(&pair.here).live(Live::Mappings), 0);
        }
    }
}

pub(crate) fn chunks_that_are_replaced_are_never_read_stale(kind: Kind, random: &mut SmallRng) {
    // B04 for chunks: freed and made again, often at the same address.
    let mut pair = Pair::start(kind);
    let chunk = chunk_len(&mut pair.here);
    let local = pair.here.address(of_chunks(2));
    for round in 0..20 {
        let theirs = random.random();
        let remote = pair.there.address(of_chunks(2));
        pair.there.done(Order::Fill { addr: remote, seed: theirs });
        pair.here.peer().refresh().expect("it answers");
        let all = Range { local, remote, len: 2 * chunk };
        pair.here.run(pair.target(), Op::Read, &[all]).expect("reads");
        pair.here.verify(local, Image::untouched(theirs));
        assert_eq!(pair.target().open_count(), 1, "round {round}: mappings pile up");
        pair.there.done(Order::Free { addr: remote });
    }
}

pub(crate) fn memory_that_cannot_be_shared_is_refused_at_registration_with_the_remedy(
    kind: Kind,
    random: &mut SmallRng,
) {
    // B07: never at the first transfer.
    let mut here = Side::start(kind, None).expect("a side");
    for private in [0, 2] {
        let order = Order::AllocateChunks { chunks: 3, private: Some(private), hole: None };
        let reason = refusal(&mut here, order);
        assert!(reason.contains("expandable_segments:False"), "{reason}");
    }
    let order = Order::AllocateChunks { chunks: 3, private: None, hole: Some(1) };
    let reason = refusal(&mut here, order);
    assert!(reason.contains("leaves its allocation"), "{reason}");
    assert_eq!(here.engine.segment().regions, [], "nothing of it stays");
    // And the device still works.
    let seed = random.random();
    let addr = here.filled(LEN, seed);
    here.verify(addr, Image::untouched(seed));
}

pub(crate) fn a_gpu_reads_and_writes_host_memory_of_another_process(
    kind: Kind,
    random: &mut SmallRng,
) {
    // H13, B18.
    let mut pair = Pair::of(kind, Kind::Host, &[]);
    for len in [LEN, LEN + 1, 3 * LEN + 4097] {
        let remote = pair.there.address(Order::Allocate { len });
        both_ways(&mut pair, remote, len - LEN, len, random);
        pair.there.done(Order::Free { addr: remote });
    }
    pair.here.peer().refresh().expect("it answers");
    assert_eq!(pair.target().open_count(), 0);
    if kind == Kind::Sim {
        assert_eq!(control(&pair.here).live(Live::Mappings), 0);
    }
}

pub(crate) fn host_and_gpu_memory_of_two_processes_are_copied_both_ways_whichever_end_is_which(
    kind: Kind,
    random: &mut SmallRng,
) {
    // H13, B18. Each layout moves both ways and by either side.
    let host = kind.behind_host_memory();
    for (here, there) in [(host, host), (host, kind), (kind, kind), (kind, host)] {
        let mut pair = Pair::of(here, there, &[]);
        // The few go by DMA, the others to the kernel.
        for layout in [
            Layout::Mixed { count: 6, seed: random.random() },
            Layout::Mixed { count: 300, seed: random.random() },
            Layout::Scattered { count: 3000, len: 1, seed: random.random() },
        ] {
            println!("{here:?} with {there:?}");
            pair.moves_all_ways(&layout, random);
        }
        let across = (here == host) != (there == host);
        if here == Kind::HostBesideSim {
            let control = control(&pair.here);
            assert_eq!(control.calls("map_host") > 0, across, "who copies");
            assert_eq!(control.live(Live::HostMappings), 0, "all memory was freed");
        }
        pair.here.peer().refresh().expect("it answers");
        assert_eq!(pair.target().open_count(), 0);
    }
}

pub(crate) fn host_memory_without_a_gpu_and_a_gpu_there_are_refused_by_name(
    kind: Kind,
    random: &mut SmallRng,
) {
    let mut pair = Pair::of(Kind::Host, kind, &[("MC_KVFERRY_STRICT", "1")]);
    let (ours, theirs) = (random.random(), random.random());
    let (local, remote) = (pair.here.filled(LEN, ours), pair.there.filled(LEN, theirs));
    pair.here.peer().refresh().expect("it answers");
    // One GPU has one identity in both processes.
    let gpu = Side::start(kind, None).expect("a side").device.info().uuid.to_string();
    for op in [Op::Write, Op::Read] {
        let all = Range { local, remote, len: LEN };
        let refused = pair.here.run(pair.target(), op, &[all]);
        let Err(Error::Unreachable { device, remote, .. }) = &refused else {
            panic!("{refused:?}")
        };
        assert_eq!((&**device, remote), ("host:0", &gpu));
    }
    pair.here.verify(local, Image::untouched(ours));
    pair.there.verify(remote, Image::untouched(theirs));
}

pub(crate) fn a_peer_without_descriptors_says_so_and_serves_when_it_has_some(
    kind: Kind,
    random: &mut SmallRng,
) {
    let mut pair = Pair::start(kind);
    let chunk = chunk_len(&mut pair.here);
    let theirs = random.random();
    let remote = pair.there.address(of_chunks(100));
    pair.there.done(Order::Fill { addr: remote, seed: theirs });
    let local = pair.here.address(of_chunks(100));
    pair.here.peer().refresh().expect("it answers");
    let all = Range { local, remote, len: 100 * chunk };
    pair.there.done(Order::LimitDescriptors { spare: Some(30) });
    for _ in 0..3 {
        let refused = pair.here.engine.submit(pair.target(), Op::Read, &[all]);
        let Err(Error::ExportRefused { reason, .. }) = refused else { panic!("{refused:?}") };
        assert!(reason.contains("ulimit -n"), "{reason}");
    }
    assert!(pair.here.peer().is_alive(), "a refusal is no death");
    pair.there.done(Order::LimitDescriptors { spare: None });
    pair.here.run(pair.target(), Op::Read, &[all]).expect("reads");
    pair.here.verify(local, Image::untouched(theirs));
}

pub(crate) fn an_opener_without_descriptors_says_so_and_opens_when_it_has_some(
    kind: Kind,
    random: &mut SmallRng,
) {
    // The other process opens here, because the limit is one of a whole process.
    let mut pair = Pair::start(kind);
    let chunk = chunk_len(&mut pair.here);
    let ours = random.random();
    let local = pair.here.address(of_chunks(100));
    pair.here.done(Order::Fill { addr: local, seed: ours });
    let remote = pair.there.address(of_chunks(100));
    let whole = vec![Piece { source: 0, destination: 0, len: 100 * chunk }];
    let layout = Layout::List(whole);
    let once = Move { write: false, local: remote, remote: local, layout, threads: 1, times: 1 };
    pair.there.done(Order::LimitDescriptors { spare: Some(30) });
    for _ in 0..3 {
        let reason = refusal(&mut pair.there, Order::Move(vec![once.clone()]));
        assert!(reason.contains("ulimit -n"), "{reason}");
    }
    pair.there.done(Order::LimitDescriptors { spare: None });
    pair.there.done(Order::Move(vec![once]));
    pair.there.verify(remote, Image::untouched(ours));
}

pub(crate) fn an_import_that_fails_at_any_chunk_leaves_nothing_and_can_be_tried_again(
    kind: Kind,
    random: &mut SmallRng,
) {
    let mut pair = Pair::start(kind);
    let chunk = chunk_len(&mut pair.here);
    let theirs = random.random();
    let remote = pair.there.address(of_chunks(5));
    pair.there.done(Order::Fill { addr: remote, seed: theirs });
    let local = pair.here.address(of_chunks(5));
    pair.here.peer().refresh().expect("it answers");
    let all = Range { local, remote, len: 5 * chunk };
    for nth in 0..5 {
        control(&pair.here).fail("import", nth, Fault::OutOfMemory);
        let refused = pair.here.engine.submit(pair.target(), Op::Read, &[all]);
        assert!(matches!(refused, Err(Error::Device(_))), "{refused:?}");
        assert_eq!(control(&pair.here).live(Live::Mappings), 0, "chunk {nth}");
        assert_eq!(pair.target().open_count(), 0);
    }
    pair.here.run(pair.target(), Op::Read, &[all]).expect("reads");
    pair.here.verify(local, Image::untouched(theirs));
}

#[cfg(feature = "cuda")]
pub(crate) fn memory_of_a_pool_that_may_be_shared_arrives_whole(kind: Kind, random: &mut SmallRng) {
    let mut pair = Pair::start(kind);
    for round in 0..5 {
        let len = LEN * (round + 1) + round;
        let remote = pair.there.address(Order::AllocateFromPool { len, shareable: true });
        both_ways(&mut pair, remote, len - LEN, len, random);
        assert_eq!(pair.target().open_count(), 1, "round {round}: mappings pile up");
        pair.there.done(Order::Free { addr: remote });
    }
    pair.here.peer().refresh().expect("it answers");
    assert_eq!(pair.target().open_count(), 0);
}

#[cfg(feature = "cuda")]
pub(crate) fn memory_of_the_default_pool_is_refused_at_registration_with_the_remedy(
    kind: Kind,
    _random: &mut SmallRng,
) {
    let mut here = Side::start(kind, None).expect("a side");
    let reason = refusal(&mut here, Order::AllocateFromPool { len: LEN, shareable: false });
    assert!(reason.contains("allocate with cudaMalloc"), "{reason}");
    assert_eq!(here.engine.segment().regions, [], "nothing of it stays");
}
