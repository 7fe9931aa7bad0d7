//! Faults of other engines at the ports of a node: the numbers are those of the project's list of
//! failure cases. Mooncake's framing and the batch protocol are tried as strangers and as peers do.

mod common;

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use common::{PATIENCE, Side, eventually, garbage};
use kvferry_engine::{Config, Engine, Op, Range, State};
use kvferry_node::{MooncakeLimits, Node, NodeError, NodeOptions, Transfer, TransferState};

fn ranges(here: &Side, there: &Side, count: u64, len: u64) -> Vec<Range> {
    let range = |at: u64| Range {
        local: here.buffer.addr() + at * len,
        remote: there.buffer.addr() + at * len,
        len,
    };
    (0..count).map(range).collect()
}

fn pattern(len: u64, seed: u64) -> Vec<u8> {
    (0..len).map(|at| ((at + seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u8).collect()
}

fn bytes(side: &Side) -> Vec<u8> {
    let mut bytes = vec![0; side.buffer.len() as usize];
    side.buffer.read(0, &mut bytes).unwrap();
    bytes
}

/// FAILURES.md B30: nothing to move is moved at once, and what is empty among others changes
/// nothing.
#[test]
fn empty_and_zero_length_transfers_of_mooncakes_framing_complete_at_once() {
    let (here, there) = (Side::new(1 << 20), Side::new(1 << 20));
    let peer = here.node.open_mooncake(there.node.name()).unwrap();
    let zero = |local, remote| Range { local, remote, len: 0 };
    let (local, remote) = (here.buffer.addr(), there.buffer.addr());
    for list in [vec![], vec![zero(local, remote)], vec![zero(0, 0)], vec![zero(1, u64::MAX); 1000]]
    {
        for op in [Op::Write, Op::Read] {
            let transfer = peer.submit(op, &list).unwrap();
            assert_eq!(transfer.wait(Duration::ZERO), TransferState::Completed);
        }
    }
    let source = pattern(1 << 20, 1);
    here.buffer.write(0, &source).unwrap();
    let mut list = ranges(&here, &there, 1000, 64);
    list.iter_mut().step_by(3).for_each(|range| range.len = 0);
    assert_eq!(peer.submit(Op::Write, &list).unwrap().wait(PATIENCE), TransferState::Completed);
    for (at, (found, source)) in bytes(&there).chunks(64).zip(source.chunks(64)).enumerate() {
        let len = list.get(at).map_or(0, |range| range.len as usize);
        assert!(found[..len] == source[..len] && found[len..].iter().all(|&byte| byte == 0));
    }
    assert_eq!(there.node.rejected(), 0);
}

/// FAILURES.md B37: whatever is said to the port of the batch protocol ends its own connection, is
/// counted, and costs nobody else.
#[test]
fn garbage_on_the_batch_port_ends_only_its_own_connection() {
    let (here, there) = (Side::new(4096), Side::new(4096));
    let listener = there.engine.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.address();
    let target =
        here.engine.open_tcp("peer", there.engine.segment(), &address.to_string()).unwrap();
    for (count, (what, said)) in (1..).zip(garbage()) {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        // The first byte alone, then in halves; the listener may hang up at any of them.
        for part in [&said[..1], &said[1..said.len() / 2], &said[said.len() / 2..]] {
            let _ = stream.write_all(part);
        }
        let _ = stream.shutdown(Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
        eventually(what, || listener.rejected() == count);
        let moved = here.transfer(&target, Op::Write, there.buffer.addr(), 4096);
        assert_eq!(moved, Ok(State::Completed), "after {what}");
    }
}

/// FAILURES.md B37: a connection that says one byte and then nothing is ended, and spins nowhere.
#[test]
fn a_byte_and_then_silence_is_ended_in_time_at_every_port() {
    let mut config = Config::default();
    config.tcp_status_timeout = Duration::from_millis(500);
    let side = Side::configured(4096, config, &NodeOptions::default());
    let batch = side.node.batch_address().expect("it listens");
    let streams = [side.stranger(), side.data_stranger(), TcpStream::connect(batch).unwrap()];
    for mut stream in streams {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(&[0]).unwrap();
        let start = Instant::now();
        // A reset ends it as well; a read that times out does not.
        let ended = stream.read_to_end(&mut Vec::new());
        let ended = ended.map(drop).map_err(|error| error.kind());
        assert_ne!(ended, Err(std::io::ErrorKind::WouldBlock), "it is still open");
        assert!(start.elapsed() < PATIENCE / 2, "{:?}", start.elapsed());
    }
}

/// FAILURES.md B38: 3840 pieces at once, in one transfer and in one each, on new connections and on
/// ones that the peer closed for being idle.
#[test]
fn thousands_of_transfers_of_mooncakes_framing_wait_for_each_other_and_none_is_lost() {
    const COUNT: u64 = 3840;
    const LEN: u64 = 2112;
    // Long enough for a round, however busy the machine is: what is written on a connection that is just
    // being closed may be lost.
    let idle = Duration::from_secs(2);
    let mooncake = MooncakeLimits { idle, ..MooncakeLimits::default() };
    let there = Side::with(COUNT * LEN, &NodeOptions { mooncake, ..NodeOptions::default() });
    let here = Side::new(COUNT * LEN);
    let peer = here.node.open_mooncake(there.node.name()).unwrap();
    let list = ranges(&here, &there, COUNT, LEN);
    for (round, op) in (0..).zip([Op::Write, Op::Read, Op::Write]) {
        let (source, destination) = match op {
            Op::Write => (&here, &there),
            Op::Read => (&there, &here),
        };
        source.buffer.write(0, &pattern(COUNT * LEN, round)).unwrap();
        let one = |range: &Range| peer.submit(op, std::slice::from_ref(range)).unwrap();
        let transfers: Vec<Transfer> = match round {
            0 => vec![peer.submit(op, &list).unwrap()],
            _ => list.iter().map(one).collect(),
        };
        for transfer in transfers {
            assert_eq!(transfer.wait(PATIENCE), TransferState::Completed, "round {round}");
        }
        assert!(bytes(destination) == pattern(COUNT * LEN, round), "round {round}: wrong bytes");
        // The peer closes what is idle.
        std::thread::sleep(idle * 2);
    }
    assert_eq!(there.node.rejected(), 0);
}

/// FAILURES.md B39: Mooncake's framing takes a few connections a peer, however many transfers there
/// are, and none of them is left to wait after its end.
#[test]
fn thousands_of_transfers_of_mooncakes_framing_take_four_connections() {
    let (here, there) = (Side::new(64 << 10), Side::new(64 << 10));
    let peer = here.node.open_mooncake(there.node.name()).unwrap();
    let list = ranges(&here, &there, 10, 4096);
    let port = format!(":{:04X}", there.node.data_port().expect("it listens"));
    // Both ends' addresses, by which a connection is told from others in all of its states.
    let connections = || -> HashSet<[String; 2]> {
        let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
        let ends = |line: &str| {
            let mut fields = line.split_whitespace().skip(1);
            Some([fields.next()?, fields.next()?].map(str::to_owned))
        };
        table.lines().filter_map(ends).filter(|[_, remote]| remote.ends_with(&port)).collect()
    };
    // Whoever had the port before may have left some that wait after their end.
    let others = connections();
    let mut most = 0;
    for round in 0..1000 {
        let op = if round % 2 == 0 { Op::Write } else { Op::Read };
        let running: Vec<_> = list
            .iter()
            .map(|range| peer.submit(op, std::slice::from_ref(range)).unwrap())
            .collect();
        for transfer in running {
            assert_eq!(transfer.wait(PATIENCE), TransferState::Completed, "round {round}");
        }
        if round % 10 == 0 {
            most = connections().difference(&others).count().max(most);
        }
    }
    assert!((1..=4).contains(&most), "{most} connections in all states");
}

/// FAILURES.md B41: every port of a node is refused by its number where it is taken, and a node that
/// could not start leaves nothing behind.
#[test]
fn each_taken_port_of_a_node_is_refused_with_its_number_and_is_free_again_afterwards() {
    let engine = || {
        let devices = vec![kvferry_device::host().unwrap()];
        Engine::new(Config::default(), devices).unwrap()
    };
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let free: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let starts = [
        NodeOptions { listen: address, ..NodeOptions::default() },
        NodeOptions { listen: free, batch_listen: Some(address), ..NodeOptions::default() },
    ];
    for options in &starts {
        let refused = Node::start(engine(), options).map(drop);
        let Err(error) = refused else { panic!("a port has two owners") };
        assert!(matches!(error, NodeError::Listen { .. } | NodeError::Engine(_)), "{error:?}");
        assert!(error.to_string().contains(&address.port().to_string()), "{error}");
    }
    drop(taken);
    for options in &starts {
        // The port of the node before it was closed when that one was dropped.
        let started = || Node::start(engine(), options).is_ok();
        eventually("the port is free", started);
    }
}
