//! Every byte arrives where it belongs, and is there when its batch completes.

use kvferry::{Op, Range, State};
use kvferry_device::sim;
use rand::Rng;
use rand::rngs::SmallRng;

use super::{Pair, control};
use crate::peer_process::{
    Answer, Image, Kind, Layout, Move, Obey, Order, PATIENCE, PeerProcess, Side,
};

pub(crate) fn thousands_of_scattered_pages_arrive_whole_and_alone(
    kind: Kind,
    random: &mut SmallRng,
) {
    let mut pair = Pair::start(kind);
    // 5000 go to the kernel; 7 are too few for it.
    for count in [5000, 7] {
        let layout = Layout::Scattered { count, len: 2112, seed: random.random() };
        pair.moves_all_ways(&layout, random);
    }
}

pub(crate) fn lengths_from_a_byte_to_three_mebibytes_at_odd_offsets_arrive(
    kind: Kind,
    random: &mut SmallRng,
) {
    let mut pair = Pair::start(kind);
    for count in [6, 500] {
        pair.moves_all_ways(&Layout::Mixed { count, seed: random.random() }, random);
    }
}

pub(crate) fn more_pieces_than_the_ring_holds_arrive(kind: Kind, random: &mut SmallRng) {
    let options = kvferry::device::QueueOptions::default();
    let count = options.ring_slots * options.slot_descriptors + 5000;
    let layout = Layout::Scattered { count, len: 64, seed: random.random() };
    Pair::start(kind).moves(false, Op::Write, &layout, random);
}

pub(crate) fn both_processes_move_both_ways_at_the_same_time(kind: Kind, random: &mut SmallRng) {
    let mut pair = Pair::start(kind);
    let mut ours = Vec::new();
    let mut theirs = Vec::new();
    let mut checks = Vec::new();
    for (by_peer, write) in [(false, true), (false, false), (true, true), (true, false)] {
        let layout = Layout::Scattered { count: 1500, len: 2112, seed: random.random() };
        let (source_seed, guard_seed) = (random.random(), random.random());
        let (source_len, destination_len) = layout.extents();
        let source_is_here = by_peer != write;
        let (source, destination) = if source_is_here {
            let source = pair.here.filled(source_len, source_seed);
            (source, pair.there.filled(destination_len, guard_seed))
        } else {
            let source = pair.there.filled(source_len, source_seed);
            (source, pair.here.filled(destination_len, guard_seed))
        };
        let (local, remote) = if write { (source, destination) } else { (destination, source) };
        let one = Move { write, local, remote, layout: layout.clone(), threads: 4, times: 5 };
        if by_peer { &mut theirs } else { &mut ours }.push(one);
        let moved = Image { layout, source_seed, guard_seed };
        checks.push((source_is_here, destination, moved));
        checks.push((!source_is_here, source, Image::untouched(source_seed)));
    }
    pair.there.send(&Order::Move(theirs));
    pair.here.done(Order::Move(ours));
    let answer = pair.there.receive();
    assert!(matches!(answer, Answer::Done), "{answer:?}");
    for (is_there, addr, image) in checks {
        if is_there {
            pair.there.verify(addr, image);
        } else {
            pair.here.verify(addr, image);
        }
    }
}

pub(crate) fn nothing_is_complete_before_its_bytes_are_at_the_peer(
    kind: Kind,
    random: &mut SmallRng,
) {
    // B19: with everything held, nothing moved and nothing says that it did.
    let mut pair = Pair::start(kind);
    for (count, len) in [(1, 64), (1, 4096), (1000, 2112)] {
        let layout = Layout::Scattered { count, len, seed: random.random() };
        let (source_seed, guard_seed) = (random.random(), random.random());
        let (source_len, destination_len) = layout.extents();
        let local = pair.here.filled(source_len, source_seed);
        let remote = pair.there.filled(destination_len, guard_seed);
        pair.here.peer().refresh().expect("it answers");
        let image = Image { layout: layout.clone(), source_seed, guard_seed };
        let one = Move { write: true, local, remote, layout, threads: 1, times: 1 };
        pair.prove();
        control(&pair.here).hold();
        let engine = &pair.here.engine;
        let id = engine.submit(pair.target(), Op::Write, &one.ranges()).expect("submits");
        pair.there.verify(remote, Image::untouched(guard_seed));
        let status = engine.poll(id).expect("known");
        assert_eq!((status.state, status.bytes), (State::Running, 0));
        control(&pair.here).release();
        assert_eq!(engine.wait(id, PATIENCE).map(|status| status.state), Ok(State::Completed));
        pair.there.verify(remote, image);
        engine.release(id).expect("it ended");
    }
}

pub(crate) fn every_step_works_on_a_thread_of_its_own(kind: Kind, random: &mut SmallRng) {
    // B10: no thread has touched the device before, and none has a current one afterwards.
    fn fresh<R: Send>(step: impl FnOnce() -> R + Send) -> R {
        let on_thread = || {
            let done = step();
            assert_eq!(sim::current_device(), None, "a step left a device current");
            done
        };
        std::thread::scope(|scope| scope.spawn(on_thread).join()).expect("works on a fresh thread")
    }
    const LEN: u64 = 100_000;
    let theirs = random.random();
    let mut there = PeerProcess::start(kind);
    let remote = there.filled(LEN, theirs);
    let mut here = fresh(|| Side::start(kind, None).expect("a side"));
    let local = fresh(|| here.filled(LEN, 0));
    for _ in 0..3 {
        let peer = fresh(|| here.node.open(&there.name).expect("opens"));
        fresh(|| peer.refresh().expect("refreshes"));
        let range = Range { local, remote, len: LEN };
        let id = fresh(|| here.engine.submit(peer.target(), Op::Read, &[range]).expect("submits"));
        let status = fresh(|| here.engine.wait(id, PATIENCE).expect("known"));
        assert_eq!(status.state, State::Completed);
        fresh(|| here.engine.release(id).expect("it ended"));
        fresh(|| here.verify(local, Image::untouched(theirs)));
        fresh(|| here.done(Order::Fill { addr: local, seed: 0 }));
        fresh(move || drop(peer));
    }
    fresh(|| here.done(Order::Free { addr: local }));
    fresh(move || drop(here));
}
