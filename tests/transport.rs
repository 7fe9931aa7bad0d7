//! The transport conformance suite: two processes move bytes between their registered memory, the
//! receiver checks every byte and every guard, and ends of processes at any moment cost no more
//! than the batches of that peer. The same cases run on host memory, on the simulated GPU and,
//! with `--features cuda`, on a GPU; the numbers in comments are those of the project's list of
//! public failures.
//!
//! Contents and moments are random. Each case prints its seed, and `KVFERRY_TEST_SEED` repeats it.

mod peer_process;

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Barrier, PoisonError, RwLock};
use std::time::{Duration, Instant};

use kvferry::device::Error as DeviceError;
use kvferry::node::NodeError;
use kvferry::{BatchId, Error, Op, Range, RangeError, Side as End, State, Target};
use kvferry_device::sim::{self, Live, SimControl};
use peer_process::{
    Answer, Image, Kind, Layout, Move, Obey, Order, PATIENCE, PeerProcess, Piece, Side, Usage,
    config, eventually,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// Not a case: what a peer process runs.
#[test]
fn peer_process() {
    peer_process::serve();
}

/// One `#[test]` per case and device, so that no device loses a case. Cases of the second list
/// count what the process holds, so each of them runs while no other case does.
macro_rules! transport_conformance {
    (on { $( $(#[$when:meta])* $name:ident: $kind:expr; )* }
     together $together:tt alone $alone:tt) => {
        $( $(#[$when])* mod $name { transport_conformance!(@cases $kind, $together, $alone); } )*
    };
    (@cases $kind:expr, { $($together:ident)* }, { $($alone:ident)* }) => {
        $(#[test]
        fn $together() {
            let _others = super::ALONE.read();
            super::run($kind, super::$together);
        })*
        $(#[test]
        fn $alone() {
            let _alone = super::ALONE.write().unwrap_or_else(super::PoisonError::into_inner);
            super::run($kind, super::$alone);
        })*
    };
}

static ALONE: RwLock<()> = RwLock::new(());

transport_conformance! {
    on {
        host_memory: super::Kind::Host;
        simulated_gpu: super::Kind::Sim;
        #[cfg(feature = "cuda")]
        cuda_gpu: super::Kind::Cuda;
    }
    together {
        thousands_of_scattered_pages_arrive_whole_and_alone
        lengths_from_a_byte_to_three_mebibytes_at_odd_offsets_arrive
        more_pieces_than_the_ring_holds_arrive
        views_of_one_allocation_are_read_and_written_at_their_own_offsets
        memory_that_was_freed_and_allocated_again_is_never_read_stale
        a_peer_that_is_opened_again_maps_the_same_memory_again
        every_step_works_on_a_thread_of_its_own
        what_completed_stays_completed_when_the_peer_ends
        a_peer_that_restarts_under_its_name_is_told_from_the_old_one
        ranges_that_the_peer_did_not_register_are_refused_by_index
        memory_that_the_peer_withdrew_is_refused
        both_processes_move_both_ways_at_the_same_time
    }
    alone {
        threads_that_race_to_the_first_use_all_succeed
        mappings_and_descriptors_end_with_the_peer
        a_peer_killed_at_any_moment_ends_every_batch_and_leaves_nothing
        an_initiator_killed_while_it_writes_here_leaves_this_side_working
    }
}

// What only a simulated GPU can be made to do.
transport_conformance! {
    on { simulated_gpu_faults: super::Kind::Sim; }
    together {
        memory_that_another_library_has_mapped_is_refused_by_name_until_it_lets_go
        a_batch_that_runs_when_its_peer_dies_fails_once_it_is_quiet
        nothing_is_complete_before_its_bytes_are_at_the_peer
    }
    alone {}
}

fn run(kind: Kind, case: fn(Kind, &mut SmallRng)) {
    if kind == Kind::Cuda
        && let Err(error) = kind.open(&config())
    {
        return kvferry_device::conformance::skip("cuda", &error);
    }
    let given = std::env::var("KVFERRY_TEST_SEED").ok();
    let seed = given.map_or_else(rand::random, |seed| seed.parse().expect("a number"));
    println!("KVFERRY_TEST_SEED={seed}");
    case(kind, &mut SmallRng::seed_from_u64(seed));
}

/// A side here and one in another process, each opened by the other.
struct Pair {
    here: Side,
    there: PeerProcess,
}

impl Pair {
    fn start(kind: Kind) -> Self {
        let mut here = Side::start(kind, None).expect("a side");
        let mut there = PeerProcess::start(kind);
        here.done(Order::Open { name: there.name.clone() });
        there.done(Order::Open { name: here.node.name().to_owned() });
        Self { here, there }
    }

    /// Moves the layout once; `by_peer` says who submits. The receiver verifies every byte, and
    /// the source that it was only read.
    fn moves(&mut self, by_peer: bool, op: Op, layout: &Layout, random: &mut SmallRng) {
        let write = op == Op::Write;
        let (source_seed, guard_seed) = (random.random(), random.random());
        let (source_len, destination_len) = layout.extents();
        let (here, there): (&mut dyn Obey, &mut dyn Obey) = (&mut self.here, &mut self.there);
        let (initiator, other) = if by_peer { (there, here) } else { (here, there) };
        let mine = if write { (source_len, source_seed) } else { (destination_len, guard_seed) };
        let its = if write { (destination_len, guard_seed) } else { (source_len, source_seed) };
        let (local, remote) = (initiator.filled(mine.0, mine.1), other.filled(its.0, its.1));
        let layout = layout.clone();
        let once = Move { write, local, remote, layout: layout.clone(), threads: 1, times: 1 };
        initiator.done(Order::Move(vec![once]));
        let moved = Image { layout, source_seed, guard_seed };
        let source = Image::untouched(source_seed);
        let (mine, its) = if write { (source, moved) } else { (moved, source) };
        other.verify(remote, its);
        initiator.verify(local, mine);
        initiator.done(Order::Free { addr: local });
        other.done(Order::Free { addr: remote });
    }

    fn moves_all_ways(&mut self, layout: &Layout, random: &mut SmallRng) {
        for by_peer in [false, true] {
            for op in [Op::Write, Op::Read] {
                println!("{op:?}, by the peer: {by_peer}");
                self.moves(by_peer, op, layout, random);
            }
        }
    }

    fn target(&self) -> &Target {
        self.here.peer().target()
    }
}

fn lost(error: &Error) -> bool {
    matches!(error, Error::PeerLost { .. })
}

/// Submits until the target counts as lost.
fn submits_until_lost(side: &Side, target: &Target, op: Op, ranges: &[Range]) {
    eventually("submissions end in PeerLost", || match side.run(target, op, ranges) {
        Ok(()) => false,
        Err(error) => {
            assert!(lost(&error) || before_notice(&error), "{error}");
            target.lost().is_some() && lost(&error)
        }
    });
}

/// What a first use may meet between the peer's death and our notice of it: nobody answers, or a
/// handle of a process that is gone.
fn before_notice(error: &Error) -> bool {
    matches!(
        error,
        Error::ExportRefused { .. }
            | Error::Device(DeviceError::BadExport { .. } | DeviceError::Call { .. })
    )
}

fn thousands_of_scattered_pages_arrive_whole_and_alone(kind: Kind, random: &mut SmallRng) {
    let mut pair = Pair::start(kind);
    // 5000 go to the kernel; 7 are too few for it.
    for count in [5000, 7] {
        let layout = Layout::Scattered { count, len: 2112, seed: random.random() };
        pair.moves_all_ways(&layout, random);
    }
}

fn lengths_from_a_byte_to_three_mebibytes_at_odd_offsets_arrive(kind: Kind, random: &mut SmallRng) {
    let mut pair = Pair::start(kind);
    for count in [6, 500] {
        pair.moves_all_ways(&Layout::Mixed { count, seed: random.random() }, random);
    }
}

fn more_pieces_than_the_ring_holds_arrive(kind: Kind, random: &mut SmallRng) {
    let options = kvferry::device::QueueOptions::default();
    let count = options.ring_slots * options.slot_descriptors + 5000;
    let layout = Layout::Scattered { count, len: 64, seed: random.random() };
    Pair::start(kind).moves(false, Op::Write, &layout, random);
}

fn views_of_one_allocation_are_read_and_written_at_their_own_offsets(
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

fn memory_that_was_freed_and_allocated_again_is_never_read_stale(
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

fn threads_that_race_to_the_first_use_all_succeed(kind: Kind, random: &mut SmallRng) {
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
        let shared = here.node.open(&there.name).expect("opens");
        let barrier = Barrier::new(THREADS as usize);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (here, there, shared, barrier) = (&here, &there, &shared, &barrier);
                scope.spawn(move || {
                    let own = own_handles.then(|| here.node.open(&there.name).expect("opens"));
                    let target = own.as_ref().unwrap_or(shared).target();
                    let offset = thread * PART;
                    let range = Range { local: local + offset, remote: remote + offset, len: PART };
                    barrier.wait();
                    here.run(target, Op::Read, &[range]).expect("reads");
                    // Nobody closes the mapping before the last one used it.
                    barrier.wait();
                });
            }
        });
        here.verify(local, Image::untouched(theirs));
        if kind == Kind::Sim {
            assert_eq!(opened(&here) - before, 1, "round {round}: one open");
        }
        drop(shared);
        here.done(Order::Free { addr: local });
        there.done(Order::Free { addr: remote });
    }
    drop(there);
    eventually("all mappings are closed", || {
        here.control.as_ref().is_none_or(|control| control.live(Live::Mappings) == 0)
    });
}

fn a_peer_that_is_opened_again_maps_the_same_memory_again(kind: Kind, random: &mut SmallRng) {
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

fn memory_that_another_library_has_mapped_is_refused_by_name_until_it_lets_go(
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
        let bytes = LEN;
        let expected = DeviceError::AlreadyMapped { device: "sim:0".into(), bytes };
        assert_eq!(refused, Err(Error::Device(expected)));
        assert_eq!(pair.target().open_count(), 0);
    }
    let_go();
    pair.here.run(pair.target(), Op::Read, &[range]).expect("reads");
    pair.here.verify(local, Image::untouched(theirs));
}

fn mappings_and_descriptors_end_with_the_peer(kind: Kind, random: &mut SmallRng) {
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

/// What a side holds once its ended connections are gone: the same for a while.
fn settled(side: &mut Side) -> Usage {
    let mut last = (side.usage(), Instant::now());
    eventually("what is held settles", || {
        let now = side.usage();
        if now != last.0 {
            last = (now, Instant::now());
        }
        last.1.elapsed() > Duration::from_millis(100)
    });
    last.0
}

fn every_step_works_on_a_thread_of_its_own(kind: Kind, random: &mut SmallRng) {
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

fn a_peer_killed_at_any_moment_ends_every_batch_and_leaves_nothing(
    kind: Kind,
    random: &mut SmallRng,
) {
    // B44: the sender's batches end, in whatever way, and so does everything that was mapped.
    let layout = Layout::Scattered { count: 2000, len: 4096, seed: random.random() };
    let (source_len, destination_len) = layout.extents();
    let len = source_len.max(destination_len);
    let mut here = Side::start(kind, None).expect("a side");
    let local = here.filled(len, 0);
    let mut before = None;
    // How long a transfer takes, first use included, is about how long to wait at most.
    let mut longest = Duration::from_millis(1);
    for round in 0..51 {
        let mut there = PeerProcess::start(kind);
        let remote = there.address(Order::Allocate { len });
        let peer = here.node.open(&there.name).expect("opens");
        let write = round % 2 == 0;
        let one = Move { write, local, remote, layout: layout.clone(), threads: 1, times: 1 };
        let (op, ranges) = (one.op(), one.ranges());
        let moment = longest.mul_f64(random.random_range(0.0..1.5));
        let barrier = Barrier::new(2);
        std::thread::scope(|scope| {
            let killer = scope.spawn(|| {
                barrier.wait();
                let start = Instant::now();
                while start.elapsed() < moment {
                    std::hint::spin_loop();
                }
                there.kill();
            });
            barrier.wait();
            let start = Instant::now();
            let first = here.run(peer.target(), op, &ranges);
            // Round 0 kills nearly at once; later ones know.
            longest = longest.max(start.elapsed()).min(Duration::from_millis(50));
            if let Err(error) = first {
                assert!(lost(&error) || before_notice(&error), "round {round}: {error}");
            }
            submits_until_lost(&here, peer.target(), op, &ranges);
            killer.join().expect("kills");
        });
        assert!(peer.target().lost().is_some_and(|error| lost(&error)));
        assert_eq!(peer.target().open_count(), 0, "round {round}");
        drop((peer, there));
        let before = *before.get_or_insert_with(|| settled(&mut here));
        eventually("nothing of a killed peer is left", || here.usage().within(&before));
    }
    // And this side works as ever.
    let mut pair = Pair::start(kind);
    pair.moves_all_ways(&layout, random);
    let mut there = PeerProcess::start(kind);
    let theirs = random.random();
    let remote = there.filled(len, theirs);
    here.done(Order::Open { name: there.name.clone() });
    here.run(here.peer().target(), Op::Read, &[Range { local, remote, len }]).expect("reads");
    here.verify(local, Image::untouched(theirs));
    // No batch holds its region.
    here.done(Order::Free { addr: local });
}

fn an_initiator_killed_while_it_writes_here_leaves_this_side_working(
    kind: Kind,
    random: &mut SmallRng,
) {
    let layout = Layout::Scattered { count: 2000, len: 4096, seed: random.random() };
    let (source_len, destination_len) = layout.extents();
    let len = source_len.max(destination_len);
    let mut here = Side::start(kind, None).expect("a side");
    let mut before = None;
    for round in 0..16 {
        let mut there = PeerProcess::start(kind);
        let ours = here.filled(len, 0);
        there.done(Order::Open { name: here.node.name().to_owned() });
        let theirs = there.filled(len, 1);
        let mut one = Move {
            write: round % 4 < 2,
            local: theirs,
            remote: ours,
            layout: layout.clone(),
            threads: 2,
            times: 1,
        };
        // Once to the end, then until it dies.
        there.done(Order::Move(vec![one.clone()]));
        one.times = 1_000_000;
        there.send(&Order::Move(vec![one]));
        let moment = Duration::from_millis(random.random_range(0..20));
        let start = Instant::now();
        while start.elapsed() < moment {
            std::hint::spin_loop();
        }
        there.kill();
        drop(there);
        here.done(Order::Free { addr: ours });
        let before = *before.get_or_insert_with(|| settled(&mut here));
        eventually("nothing of a killed peer is left", || here.usage().within(&before));
    }
    Pair::start(kind).moves_all_ways(&layout, random);
}

fn what_completed_stays_completed_when_the_peer_ends(kind: Kind, random: &mut SmallRng) {
    const LEN: u64 = 100_000;
    // In order; by exit, with no destructor run; by a crash.
    for how in [None, Some(Some(1)), Some(None)] {
        let mut pair = Pair::start(kind);
        let theirs = random.random();
        let remote = pair.there.filled(LEN, theirs);
        let local = pair.here.filled(LEN, 0);
        pair.here.peer().refresh().expect("it answers");
        let engine = &pair.here.engine;
        let range = Range { local, remote, len: LEN };
        let ids: Vec<BatchId> = (0..3)
            .map(|_| {
                let id = engine.submit(pair.target(), Op::Read, &[range]).expect("submits");
                let status = engine.wait(id, PATIENCE).expect("known");
                assert_eq!((status.state, status.bytes), (State::Completed, LEN));
                id
            })
            .collect();
        match how {
            None => pair.there.end(),
            Some(code) => pair.there.end_at_once(code),
        }
        submits_until_lost(&pair.here, pair.target(), Op::Read, &[range]);
        assert_eq!(pair.target().open_count(), 0);
        for id in ids {
            let status = pair.here.engine.poll(id).expect("known");
            assert_eq!((status.state, status.bytes), (State::Completed, LEN));
            pair.here.engine.release(id).expect("it ended");
        }
        pair.here.verify(local, Image::untouched(theirs));
        let gone = pair.here.peer().refresh();
        assert!(matches!(gone, Err(NodeError::Handshake { .. })), "{gone:?}");
        pair.here.done(Order::Free { addr: local });
    }
}

fn a_peer_that_restarts_under_its_name_is_told_from_the_old_one(kind: Kind, random: &mut SmallRng) {
    // B43: killed, then the same name, other contents, fewer buffers.
    const LEN: u64 = 100_000;
    let mut pair = Pair::start(kind);
    let local = pair.here.filled(LEN, 0);
    let old = pair.there.filled(LEN, random.random());
    pair.there.filled(LEN, random.random());
    pair.here.peer().refresh().expect("it answers");
    let range = |remote| Range { local, remote, len: LEN };
    pair.here.run(pair.target(), Op::Read, &[range(old)]).expect("reads");
    let name = pair.there.name.clone();
    let listen: SocketAddr = name.parse().expect("an address");
    pair.there.kill();

    // Its port may be another process's for a moment, as any ephemeral one.
    let deadline = Instant::now() + PATIENCE;
    let mut again = loop {
        match PeerProcess::start_on(kind, Some(listen)) {
            Ok(again) => break again,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
    };
    assert_eq!(again.name, name);
    let theirs = random.random();
    let new = again.filled(LEN, theirs);
    let expected = pair.target().incarnation().to_string();
    for _ in 0..2 {
        let refreshed = pair.here.peer().refresh();
        assert!(
            matches!(&refreshed, Err(NodeError::PeerRestarted { peer, expected: was, found })
                if *peer == name && *was == expected && *found != expected),
            "{refreshed:?}"
        );
        for remote in [old, new] {
            let refused = pair.here.engine.submit(pair.target(), Op::Read, &[range(remote)]);
            assert!(matches!(&refused, Err(error) if lost(error)), "{refused:?}");
        }
        assert_eq!(pair.target().open_count(), 0);
    }
    pair.here.done(Order::Open { name });
    assert_ne!(pair.target().incarnation().to_string(), expected);
    pair.here.run(pair.target(), Op::Read, &[range(new)]).expect("reads");
    pair.here.verify(local, Image::untouched(theirs));
    pair.here.peer().refresh().expect("the right one answers");
}

fn ranges_that_the_peer_did_not_register_are_refused_by_index(kind: Kind, random: &mut SmallRng) {
    const LEN: u64 = 8 << 20;
    const VIEW: u64 = 1 << 20;
    let mut pair = Pair::start(kind);
    let (ours, theirs) = (random.random(), random.random());
    let views = vec![(VIEW, VIEW), (4 * VIEW + 5, 1001)];
    let memory = pair.there.address(Order::AllocateViews { len: LEN, views });
    pair.there.done(Order::Fill { addr: memory, seed: theirs });
    let local = pair.here.filled(LEN, ours);
    pair.here.peer().refresh().expect("it answers");
    let good = |at: u64| Range { local: local + at, remote: memory + VIEW + at, len: 100 };
    let (side, index) = (End::Remote, 2);
    let not_registered = |addr: u64, len: u64| RangeError::NotRegistered { index, side, addr, len };
    let outside = |addr: u64, len: u64, start: u64, region: u64, beyond: u64| {
        RangeError::OutOfBounds { index, side, addr, len, start, region, beyond }
    };
    let cases = [
        not_registered(memory, 10),
        not_registered(memory + VIEW - 1, 10),
        not_registered(memory + 2 * VIEW, 1),
        not_registered(memory + 4 * VIEW + 4, 1),
        not_registered(memory + LEN, 64),
        outside(memory + 2 * VIEW - 9, 10, memory + VIEW, VIEW, 1),
        outside(memory + VIEW, VIEW + 1, memory + VIEW, VIEW, 1),
        outside(memory + 4 * VIEW + 5, 4096, memory + 4 * VIEW + 5, 1001, 3095),
        RangeError::Overflow { index, side, addr: u64::MAX - 3, len: 8 },
    ];
    for expected in cases {
        let (RangeError::NotRegistered { addr, len, .. }
        | RangeError::OutOfBounds { addr, len, .. }
        | RangeError::Overflow { addr, len, .. }) = expected
        else {
            unreachable!("the list has no other")
        };
        let bad = Range { local: local + VIEW, remote: addr, len };
        for op in [Op::Write, Op::Read] {
            let refused =
                pair.here.engine.submit(pair.target(), op, &[good(0), good(300), bad, good(600)]);
            assert_eq!(refused, Err(Error::Range(expected.clone())), "{op:?}");
        }
    }
    assert_eq!(pair.target().open_count(), 0, "a refused list opens nothing");
    // Nothing of any refused list moved.
    pair.there.verify(memory, Image::untouched(theirs));
    pair.here.verify(local, Image::untouched(ours));
    // The last byte of a region is inside.
    let last = Range { local, remote: memory + 2 * VIEW - 1, len: 1 };
    pair.here.run(pair.target(), Op::Write, &[last, good(100)]).expect("writes");
}

fn memory_that_the_peer_withdrew_is_refused(kind: Kind, random: &mut SmallRng) {
    const LEN: u64 = 4 << 20;
    const VIEW: u64 = 1 << 20;
    let mut pair = Pair::start(kind);
    let theirs = random.random();
    let views = vec![(0, VIEW), (2 * VIEW, VIEW)];
    let memory = pair.there.address(Order::AllocateViews { len: LEN, views });
    let own = pair.there.filled(VIEW, theirs);
    let unused = pair.there.filled(VIEW, theirs);
    let local = pair.here.filled(VIEW, 0);
    let range = |remote| Range { local, remote, len: 64 };
    pair.here.peer().refresh().expect("it answers");
    for remote in [memory, memory + 2 * VIEW, own] {
        pair.here.run(pair.target(), Op::Read, &[range(remote)]).expect("reads");
    }
    assert_eq!(pair.target().open_count(), 2);

    // Gone before we used it or heard of it: the peer itself refuses, and no batch begins.
    pair.there.done(Order::Free { addr: unused });
    let refused = pair.here.engine.submit(pair.target(), Op::Read, &[range(unused)]);
    assert!(matches!(refused, Err(Error::ExportRefused { .. })), "{refused:?}");
    assert!(pair.here.peer().is_alive(), "a refusal is no death");

    pair.there.done(Order::Withdraw { addr: memory });
    pair.there.done(Order::Free { addr: own });
    pair.here.peer().refresh().expect("it answers");
    for addr in [memory, own, unused] {
        let list = [range(memory + 2 * VIEW), Range { local: local + 64, ..range(addr) }];
        let refused = pair.here.engine.submit(pair.target(), Op::Read, &list);
        let expected = RangeError::NotRegistered { index: 1, side: End::Remote, addr, len: 64 };
        assert_eq!(refused, Err(Error::Range(expected)));
    }
    // The other view of that allocation is still there, and so is its mapping.
    pair.here.run(pair.target(), Op::Read, &[range(memory + 2 * VIEW)]).expect("reads");
    assert_eq!(pair.target().open_count(), 1);
}

fn both_processes_move_both_ways_at_the_same_time(kind: Kind, random: &mut SmallRng) {
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

/// What makes the simulated GPU of this side misbehave.
fn control(side: &Side) -> &SimControl {
    side.control.as_ref().expect("a simulated GPU")
}

fn a_batch_that_runs_when_its_peer_dies_fails_once_it_is_quiet(kind: Kind, random: &mut SmallRng) {
    // B44: nothing that the device may still touch goes away under it.
    const LEN: u64 = 100_000;
    for op in [Op::Write, Op::Read] {
        let mut pair = Pair::start(kind);
        let remote = pair.there.filled(LEN, random.random());
        let local = pair.here.filled(LEN, random.random());
        pair.here.peer().refresh().expect("it answers");
        let (engine, device) = (&pair.here.engine, control(&pair.here));
        device.hold();
        let range = Range { local, remote, len: LEN };
        let id = engine.submit(pair.target(), op, &[range]).expect("submits");
        pair.there.kill();
        eventually("the peer is lost", || pair.target().lost().is_some());
        assert_eq!(engine.poll(id).map(|status| status.state), Ok(State::Running));
        assert_eq!(device.live(Live::Mappings), 1, "its copies still run");
        let refused = engine.submit(pair.target(), op, &[range]);
        assert!(matches!(&refused, Err(error) if lost(error)), "{refused:?}");
        device.release();
        let status = engine.wait(id, PATIENCE).expect("known");
        assert!(matches!(&status.state, State::Failed(error) if lost(error)), "{status:?}");
        assert_eq!(status.bytes, 0);
        assert_eq!(device.live(Live::Mappings), 0);
        engine.release(id).expect("it ended");
    }
}

fn nothing_is_complete_before_its_bytes_are_at_the_peer(kind: Kind, random: &mut SmallRng) {
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
