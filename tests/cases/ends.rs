//! Processes end in order, crash, are killed and come back.

use std::net::SocketAddr;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use kvferry::node::NodeError;
use kvferry::{BatchId, Op, Range, State};
use kvferry_device::sim::Live;
use rand::Rng;
use rand::rngs::SmallRng;

use super::{
    Pair, before_notice, control, lost, proves_once, settled, submits_until_lost, uses_tcp,
};
use crate::peer_process::{
    Image, Kind, Layout, Move, Obey, Order, PATIENCE, PeerProcess, Side, eventually,
};

pub(crate) fn a_peer_killed_at_any_moment_ends_every_batch_and_leaves_nothing(
    kind: Kind,
    random: &mut SmallRng,
) {
    // B44: the sender's batches end, in whatever way, and so does everything that was mapped.
    let layout = Layout::Scattered { count: 2000, len: 4096, seed: random.random() };
    let (source_len, destination_len) = layout.extents();
    let len = source_len.max(destination_len);
    let mut here = Side::start(kind, None).expect("a side");
    proves_once(&mut here, kind);
    // An export of a peer that just died cannot be opened, and then TCP is tried.
    uses_tcp(&mut here);
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
            println!(
                "killed after {moment:?}; the first batch ended after {:?}: {first:?}",
                start.elapsed()
            );
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

pub(crate) fn an_initiator_killed_while_it_writes_here_leaves_this_side_working(
    kind: Kind,
    random: &mut SmallRng,
) {
    let layout = Layout::Scattered { count: 500, len: 4096, seed: random.random() };
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

pub(crate) fn what_completed_stays_completed_when_the_peer_ends(kind: Kind, random: &mut SmallRng) {
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

pub(crate) fn a_batch_that_runs_when_its_peer_dies_fails_once_it_is_quiet(
    kind: Kind,
    random: &mut SmallRng,
) {
    // B44: nothing that the device may still touch goes away under it.
    const LEN: u64 = 100_000;
    for op in [Op::Write, Op::Read] {
        let mut pair = Pair::start(kind);
        let remote = pair.there.filled(LEN, random.random());
        let local = pair.here.filled(LEN, random.random());
        pair.prove();
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
        // Whoever declared the peer lost lets go of it behind that.
        eventually("the mapping closes", || device.live(Live::Mappings) == 0);
        engine.release(id).expect("it ended");
    }
}

pub(crate) fn a_peer_that_restarts_under_its_name_is_told_from_the_old_one(
    kind: Kind,
    random: &mut SmallRng,
) {
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
