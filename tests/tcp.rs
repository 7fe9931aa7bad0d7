//! The transport conformance suite over TCP: two processes of this host that are told to map nothing
//! of each other. Lanes, slots and slices are small, so that requests are cut and slots are short.

#[allow(dead_code, unused_imports, reason = "some cases are of mappings alone")]
mod cases;
#[allow(dead_code, reason = "some orders are of mappings alone")]
mod peer_process;

use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant};

use kvferry::{Consumer, Error, Op, Part, Producer, Range, State, SubmitOptions};
use peer_process::{Kind, Layout, Move, Obey, Order, PATIENCE, PeerProcess, Side, config};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// What both processes set.
const KNOBS: &[(&str, &str)] = &[
    ("MC_FORCE_TCP", "1"),
    ("MC_TCP_LANES_PER_PEER", "3"),
    ("MC_TCP_SLICE_SIZE", "64K"),
    ("MC_TCP_GPU_STAGING_SLOT_MB", "1"),
    ("MC_TCP_GPU_STAGING_SLOTS", "2"),
    ("MC_TCP_STATUS_TIMEOUT_SEC", "3"),
    ("MC_KVFERRY_TCP_THREADS", "2"),
];

/// Not a case: what a peer process runs.
#[test]
fn peer_process() {
    peer_process::serve();
}

/// Orders hold streams, and a stream that is held may hold up others of the process: each of them runs
/// while no other case does.
static ALONE: RwLock<()> = RwLock::new(());

macro_rules! over_tcp {
    (on { $( $(#[$when:meta])* $name:ident: $kind:expr; )* } $from:ident $cases:tt) => {
        $( $(#[$when])* mod $name { over_tcp!(@cases $kind, $from, $cases); } )*
    };
    (@cases $kind:expr, orders, { $($case:ident)* }) => {
        $(#[test]
        fn $case() {
            let _alone = super::ALONE.write().unwrap_or_else(super::PoisonError::into_inner);
            super::run($kind, super::orders::$case);
        })*
    };
    (@cases $kind:expr, $from:ident, { $($case:ident)* }) => {
        $(#[test]
        fn $case() {
            let _others = super::ALONE.read();
            super::run($kind, super::$from::$case);
        })*
    };
}

over_tcp! {
    on {
        host_memory: super::Kind::Host;
        simulated_gpu: super::Kind::Sim;
        #[cfg(feature = "cuda")]
        cuda_gpu: super::Kind::Cuda;
        #[cfg(feature = "rocm")]
        rocm_gpu: super::Kind::Rocm;
    }
    cases {
        thousands_of_scattered_pages_arrive_whole_and_alone
        lengths_from_a_byte_to_three_mebibytes_at_odd_offsets_arrive
        more_pieces_than_the_ring_holds_arrive
        an_address_that_is_valid_in_both_processes_means_the_peers_memory
        every_step_works_on_a_thread_of_its_own
        ranges_that_the_peer_did_not_register_are_refused_by_index
        both_processes_move_both_ways_at_the_same_time
        compact_forms_move_what_their_pieces_would
        one_batch_for_several_peers_reaches_each_whole
    }
}

over_tcp! {
    on {
        host_memory_ends: super::Kind::Host;
        simulated_gpu_ends: super::Kind::Sim;
        #[cfg(feature = "cuda")]
        cuda_gpu_ends: super::Kind::Cuda;
        #[cfg(feature = "rocm")]
        rocm_gpu_ends: super::Kind::Rocm;
    }
    ends {
        a_peer_killed_at_any_moment_ends_every_batch_with_a_reason
        a_stopped_peer_ends_its_batches_within_the_deadline_and_works_again
        a_peer_that_stops_for_less_than_the_deadline_ends_no_batch
        a_cancelled_batch_of_a_stopped_peer_is_not_moved_when_the_peer_goes_on
        a_killed_initiator_leaves_memory_that_can_be_freed
        a_peer_that_restarts_under_its_name_is_not_taken_for_the_old_one
    }
}

over_tcp! {
    on {
        simulated_gpu_orders: super::Kind::Sim;
        #[cfg(feature = "cuda")]
        cuda_gpu_orders: super::Kind::Cuda;
        #[cfg(feature = "rocm")]
        rocm_gpu_orders: super::Kind::Rocm;
    }
    orders {
        a_transfer_waits_for_the_applications_stream
        the_applications_stream_is_refused_a_transfer_until_it_has_ended
    }
}

mod orders {
    use super::*;
    pub(crate) use crate::cases::a_transfer_waits_for_the_applications_stream;

    pub(crate) fn the_applications_stream_is_refused_a_transfer_until_it_has_ended(
        kind: Kind,
        random: &mut SmallRng,
    ) {
        const LEN: u64 = 2 << 20;
        let mut here = Side::start(kind, None).expect("a side");
        let mut there = PeerProcess::start(kind);
        let local = here.filled(LEN, 1);
        let remote = there.filled(LEN, 2);
        let peer = here.node.open(&there.name).expect("opens");
        let range = [Range { local, remote, len: LEN }];
        let (before, behind) = (here.application_stream(), here.application_stream());
        before.hold();
        // SAFETY: the streams live longer than the calls.
        let (after, consumer) =
            unsafe { (Producer::stream(before.handle()), Consumer::stream(behind.handle())) };
        let options = SubmitOptions { after: Some(after), ..SubmitOptions::default() };
        let part = Part { target: peer.target(), op: Op::Read, copies: (&range).into() };
        let id = here.engine.submit_parts(&[part], &options).expect("submits");
        let refused = here.engine.signal(id, consumer);
        before.open();
        assert_eq!(refused, Err(Error::NotAllSubmitted(id)));
        let status = here.engine.wait(id, PATIENCE).expect("known");
        assert_eq!(status.state, State::Completed);
        here.engine.signal(id, consumer).expect("it has ended");
        here.engine.release(id).expect("it ended");
        let byte = random.random();
        // SAFETY: nothing else writes there any more.
        unsafe { behind.fill(local, byte, LEN) };
        let (filled, start) = (behind.record(), Instant::now());
        while !behind.has_fired(filled) {
            assert!(start.elapsed() < PATIENCE, "the stream does not go on");
            std::thread::yield_now();
        }
        let mut found = vec![0; LEN as usize];
        here.read(local, &mut found);
        assert!(found.iter().all(|found| *found == byte), "the transfer was not over");
    }
}

mod ends {
    use super::*;

    const LEN: u64 = 3 << 20;

    /// Of TCP, and with a reason.
    fn is_reasoned(error: &Error) -> bool {
        matches!(error, Error::Tcp { reason, .. } if !reason.is_empty())
            || matches!(error, Error::PeerLost { .. })
    }

    pub(crate) fn a_peer_killed_at_any_moment_ends_every_batch_with_a_reason(
        kind: Kind,
        random: &mut SmallRng,
    ) {
        // B44, B45.
        let mut here = Side::start(kind, None).expect("a side");
        let local = here.filled(LEN, 1);
        for round in 0..12 {
            let mut there = PeerProcess::start(kind);
            let remote = there.address(Order::Allocate { len: LEN });
            let peer = here.node.open(&there.name).expect("opens");
            let op = if round % 2 == 0 { Op::Write } else { Op::Read };
            let range = [Range { local, remote, len: LEN }];
            here.run(peer.target(), op, &range).expect("the peer lives");
            let engine = &here.engine;
            let submit = |_| engine.submit(peer.target(), op, &range).expect("submits");
            let ids: Vec<_> = (0..4).map(submit).collect();
            let moment = Duration::from_micros(random.random_range(0..8000));
            let start = Instant::now();
            while start.elapsed() < moment {
                std::hint::spin_loop();
            }
            there.kill();
            for id in ids {
                match engine.wait(id, PATIENCE).expect("known").state {
                    State::Completed => {}
                    State::Failed(error) => assert!(is_reasoned(&error), "{error}"),
                    State::Running => panic!("round {round}: a batch does not end"),
                }
            }
            let error = here.run(peer.target(), op, &range).expect_err("nobody is there");
            assert!(is_reasoned(&error), "{error}");
        }
        // No batch holds its region, and no slice is lost.
        let mut there = PeerProcess::start(kind);
        let remote = there.filled(LEN, 9);
        let peer = here.node.open(&there.name).expect("opens");
        here.run(peer.target(), Op::Read, &[Range { local, remote, len: LEN }]).expect("reads");
        here.verify(local, peer_process::Image::untouched(9));
        here.done(Order::Free { addr: local });
    }

    pub(crate) fn a_stopped_peer_ends_its_batches_within_the_deadline_and_works_again(
        kind: Kind,
        _random: &mut SmallRng,
    ) {
        let mut here = Side::start(kind, None).expect("a side");
        let local = here.filled(LEN, 1);
        let mut there = PeerProcess::start(kind);
        let remote = there.address(Order::Allocate { len: LEN });
        let peer = here.node.open(&there.name).expect("opens");
        let range = [Range { local, remote, len: LEN }];
        here.run(peer.target(), Op::Write, &range).expect("it runs");
        there.signal(rustix::process::Signal::STOP);
        let start = Instant::now();
        for op in [Op::Write, Op::Read] {
            let error = here.run(peer.target(), op, &range).expect_err("it is stopped");
            assert!(is_reasoned(&error), "{error}");
        }
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
        there.signal(rustix::process::Signal::CONT);
        let start = Instant::now();
        while let Err(error) = here.run(peer.target(), Op::Write, &range) {
            assert!(start.elapsed() < PATIENCE, "it does not come back: {error}");
        }
        there.verify(remote, peer_process::Image::untouched(1));
    }

    pub(crate) fn a_peer_that_stops_for_less_than_the_deadline_ends_no_batch(
        kind: Kind,
        random: &mut SmallRng,
    ) {
        // B44. The deadline is 3 seconds.
        use rustix::process::Signal;
        const LEN: u64 = 8 << 20;
        const STOP: Duration = Duration::from_secs(1);
        let mut here = Side::start(kind, None).expect("a side");
        let local = here.filled(LEN, 1);
        let mut there = PeerProcess::start(kind);
        let remote = there.filled(LEN, 2);
        let peer = here.node.open(&there.name).expect("opens");
        let range = [Range { local, remote, len: LEN }];
        here.run(peer.target(), Op::Read, &range).expect("the peer lives");
        for (op, seed) in [(Op::Write, 3), (Op::Read, 4), (Op::Write, 5), (Op::Read, 6)] {
            match op {
                Op::Write => here.done(Order::Fill { addr: local, seed }),
                Op::Read => there.done(Order::Fill { addr: remote, seed }),
            }
            // Before its first byte, or somewhere in it.
            let moment = (seed > 4).then(|| Duration::from_micros(random.random_range(0..5000)));
            if moment.is_none() {
                there.signal(Signal::STOP);
            }
            let id = here.engine.submit(peer.target(), op, &range).expect("submits");
            if let Some(moment) = moment {
                let start = Instant::now();
                while start.elapsed() < moment {
                    std::hint::spin_loop();
                }
                there.signal(Signal::STOP);
            }
            let status = here.engine.wait(id, STOP).expect("known");
            assert!(moment.is_some() || status.state == State::Running, "{op:?}: {status:?}");
            there.signal(Signal::CONT);
            let status = here.engine.wait(id, PATIENCE).expect("known");
            assert_eq!(status.state, State::Completed, "{op:?}, stopped at {moment:?}");
            here.engine.release(id).expect("it ended");
            match op {
                Op::Write => there.verify(remote, peer_process::Image::untouched(seed)),
                Op::Read => here.verify(local, peer_process::Image::untouched(seed)),
            }
        }
    }

    pub(crate) fn a_cancelled_batch_of_a_stopped_peer_is_not_moved_when_the_peer_goes_on(
        kind: Kind,
        _random: &mut SmallRng,
    ) {
        use rustix::process::Signal;
        const LEN: u64 = 24 << 20;
        // One lane begins nearly all of it at once.
        let mut here =
            Side::start_with(kind, None, &[("MC_TCP_LANES_PER_PEER", "1")]).expect("a side");
        let local = here.filled(LEN, 1);
        let mut there = PeerProcess::start(kind);
        let remote = there.address(Order::Allocate { len: LEN });
        let peer = here.node.open(&there.name).expect("opens");
        let back = here.address(Order::Allocate { len: LEN });
        let range = [Range { local, remote, len: LEN }];
        here.run(peer.target(), Op::Write, &range).expect("the peer lives");
        let cancelled = State::Failed(Error::Cancelled);
        for op in [Op::Write, Op::Read] {
            for goes_on in [true, false] {
                println!("{op:?}, the peer goes on: {goes_on}");
                there.done(Order::Fill { addr: remote, seed: 5 });
                here.done(Order::Fill { addr: local, seed: 1 });
                there.signal(Signal::STOP);
                let id = here.engine.submit(peer.target(), op, &range).expect("submits");
                // The lane fills its socket.
                std::thread::sleep(Duration::from_millis(100));
                let start = Instant::now();
                here.engine.cancel(id).expect("known");
                let state = || here.engine.poll(id).expect("known").state;
                assert_eq!(state(), State::Running, "its requests were begun");
                if goes_on {
                    there.signal(Signal::CONT);
                }
                let ended = here.engine.wait(id, PATIENCE).expect("known").state;
                assert!(start.elapsed() < PATIENCE / 2, "after {:?}", start.elapsed());
                if goes_on {
                    assert_eq!(ended, cancelled);
                } else {
                    let State::Failed(error) = ended else { panic!("{ended:?}") };
                    assert!(is_reasoned(&error) || error == Error::Cancelled, "{error}");
                    there.signal(Signal::CONT);
                }
                // Another connection of the lane is opened when nothing of this one moves any more.
                let (destination, source) = match op {
                    Op::Read => (local, 5),
                    Op::Write => {
                        let all = [Range { local: back, remote, len: LEN }];
                        let start = Instant::now();
                        while let Err(error) = here.run(peer.target(), Op::Read, &all) {
                            assert!(start.elapsed() < PATIENCE, "it does not come back: {error}");
                        }
                        (back, 1)
                    }
                };
                let mut found = vec![0; LEN as usize];
                here.read(destination, &mut found);
                let source = peer_process::pattern(source, LEN);
                let blocks = found.chunks(4096).zip(source.chunks(4096));
                let moved = 4096 * blocks.filter(|(found, source)| found == source).count() as u64;
                assert!(moved < LEN / 2, "{moved} bytes were moved");
            }
        }
        here.run(peer.target(), Op::Write, &range).expect("it goes on");
    }

    pub(crate) fn a_killed_initiator_leaves_memory_that_can_be_freed(
        kind: Kind,
        random: &mut SmallRng,
    ) {
        let layout = Layout::Scattered { count: 300, len: 4096, seed: random.random() };
        let (source_len, destination_len) = layout.extents();
        let len = source_len.max(destination_len);
        let mut here = Side::start(kind, None).expect("a side");
        for round in 0..6 {
            let mut there = PeerProcess::start(kind);
            let remote = here.filled(len, 0);
            there.done(Order::Open { name: here.node.name().to_owned() });
            let local = there.filled(len, 1);
            let (write, layout) = (round % 2 == 0, layout.clone());
            let mut one = Move { write, local, remote, layout, threads: 2, times: 1 };
            there.done(Order::Move(vec![one.clone()]));
            one.times = 1_000_000;
            there.send(&Order::Move(vec![one]));
            let moment = Duration::from_millis(random.random_range(0..20));
            let start = Instant::now();
            while start.elapsed() < moment {
                std::hint::spin_loop();
            }
            there.kill();
            here.done(Order::Free { addr: remote });
        }
    }

    pub(crate) fn a_peer_that_restarts_under_its_name_is_not_taken_for_the_old_one(
        kind: Kind,
        _random: &mut SmallRng,
    ) {
        // B43.
        let mut here = Side::start(kind, None).expect("a side");
        let local = here.filled(LEN, 1);
        let mut there = PeerProcess::start(kind);
        let remote = there.address(Order::Allocate { len: LEN });
        let peer = here.node.open(&there.name).expect("opens");
        let range = [Range { local, remote, len: LEN }];
        here.run(peer.target(), Op::Write, &range).expect("it runs");
        let listen = there.name.parse().expect("an address");
        there.kill();
        drop(there);
        let start = Instant::now();
        let mut again = loop {
            match PeerProcess::start_on(kind, Some(listen)) {
                Ok(again) => break again,
                Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
            }
        };
        let remote = again.filled(LEN, 5);
        peer.refresh().expect_err("it is another engine");
        assert!(peer.target().lost().is_some());
        let peer = here.node.open(&again.name).expect("opens");
        here.run(peer.target(), Op::Read, &[Range { local, remote, len: LEN }]).expect("reads");
        here.verify(local, peer_process::Image::untouched(5));
    }
}

fn run(kind: Kind, case: fn(Kind, &mut SmallRng)) {
    if kind.has_driver()
        && let Err(error) = kind.open(&config())
    {
        let name = if kind == Kind::Rocm { "rocm" } else { "cuda" };
        return kvferry_device::conformance::skip(name, &error);
    }
    let given = std::env::var("KVFERRY_TEST_SEED").ok();
    let seed = given.map_or_else(rand::random, |seed| seed.parse().expect("a number"));
    println!("KVFERRY_TEST_SEED={seed}");
    case(kind, &mut SmallRng::seed_from_u64(seed));
}
