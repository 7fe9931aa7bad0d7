//! What anybody may say to a node's data port, and what it costs the node; and what a server that
//! is none may say to a transfer.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use common::{PATIENCE, Side, eventually};
use kvferry_engine::{Config, Op, Range};
use kvferry_node::{MooncakeLimits, NodeOptions, TransferError, TransferState};
use kvferry_wire::handshake::{Kind, encode};
use kvferry_wire::mooncake::{Header, Op as WireOp, Status, Version};
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Resource, getrlimit, setrlimit};

const BYTES: u64 = 1 << 20;
const VERSIONS: [Version; 2] = [Version::V1, Version::V2];

/// A side whose buffer holds sevens.
fn side(limits: MooncakeLimits) -> Side {
    side_with(Config::default(), limits)
}

fn side_with(config: Config, mooncake: MooncakeLimits) -> Side {
    let options = NodeOptions { mooncake, ..NodeOptions::default() };
    let side = Side::configured(BYTES, config, &options);
    side.buffer.write(0, &[7; BYTES as usize]).unwrap();
    side
}

/// Of a side that has little patience with peers that move nothing.
fn impatient() -> Config {
    let mut config = Config::default();
    config.tcp_status_timeout = Duration::from_millis(300);
    config
}

fn header(op: WireOp, version: Version, addr: u64, length: u64) -> [u8; 24] {
    Header { op, version, addr, length }.encode()
}

/// A good operation on a new connection.
fn serves(side: &Side) {
    assert_eq!(read(&mut side.data_stranger(), side.buffer.addr(), 3), [7; 3]);
}

fn read(stream: &mut TcpStream, addr: u64, length: usize) -> Vec<u8> {
    stream.write_all(&header(WireOp::Read, Version::V2, addr, length as u64)).unwrap();
    let mut answer = vec![0; 8 + length];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer[..8], Status::Done.encode());
    answer.split_off(8)
}

/// What comes until the node closes.
fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A reset ends it as well.
    let _ = stream.read_to_end(&mut bytes);
    bytes
}

fn bytes(side: &Side) -> Vec<u8> {
    let mut bytes = vec![0; BYTES as usize];
    side.buffer.read(0, &mut bytes).unwrap();
    bytes
}

/// FAILURES.md B37.
#[test]
fn every_truncation_of_a_write_ends_only_its_own_connection_and_is_counted() {
    let side = side(MooncakeLimits::default());
    let mut count = 0;
    for version in VERSIONS {
        let mut whole = header(WireOp::Write, version, side.buffer.addr() + 64, 16).to_vec();
        whole.extend([9; 16]);
        for length in 1..whole.len() {
            let mut stream = side.data_stranger();
            stream.write_all(&whole[..length]).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            assert_eq!(rest(&mut stream), b"", "{length} bytes");
            count += 1;
            eventually("it is counted", || side.node.rejected() == count);
        }
        // What arrived of the payload is in its place, and nothing is beside it.
        let bytes = bytes(&side);
        assert!(bytes[..64].iter().chain(&bytes[79..]).all(|&byte| byte == 7));
    }
    serves(&side);
}

#[test]
fn a_reader_that_leaves_at_any_byte_costs_only_its_connection() {
    let side = side_with(impatient(), MooncakeLimits::default());
    for version in VERSIONS {
        for taken in [0, 1, 7, 8, 9, 4096] {
            let mut stream = side.data_stranger();
            stream.write_all(&header(WireOp::Read, version, side.buffer.addr(), BYTES)).unwrap();
            stream.read_exact(&mut vec![0; taken]).unwrap();
        }
    }
    serves(&side);
    eventually("no lease is left", || side.engine.unregister(side.buffer.addr()).is_ok());
    // SAFETY: the buffer owns it, and unregisters it when it is dropped.
    unsafe { side.engine.register(side.buffer.addr(), BYTES) }.unwrap();
}

/// Address and length of requests that no region has.
fn impossible(side: &Side) -> Vec<(u64, u64)> {
    let (start, end) = (side.buffer.addr(), side.buffer.addr() + BYTES);
    vec![
        (start, 0),
        (start, BYTES + 1),
        (start - 1, 1),
        (end, 1),
        (end - 1, 2),
        // Fields swapped.
        (BYTES, start),
        (0, BYTES),
        (start, 1 << 63),
        (start, u64::MAX),
        (u64::MAX, 1),
        (u64::MAX - 1, 2),
        (1 << 63, 1 << 63),
        (u64::MAX - start, start),
    ]
}

/// FAILURES.md B37.
#[test]
fn impossible_ranges_are_rejected_as_each_version_does() {
    let side = side(MooncakeLimits::default());
    let mut count = 0;
    for (addr, length) in impossible(&side) {
        for op in [WireOp::Read, WireOp::Write] {
            for version in VERSIONS {
                let mut stream = side.data_stranger();
                stream.write_all(&header(op, version, addr, length)).unwrap();
                let expected = match version {
                    Version::V1 => vec![],
                    Version::V2 => Status::AddressRejected.encode().to_vec(),
                };
                let what = format!("{op:?} {version:?}: {length} bytes at {addr:#x}");
                assert_eq!(rest(&mut stream), expected, "{what}");
                count += 1;
                assert_eq!(side.node.rejected(), count, "counted before it is said: {what}");
            }
        }
    }
    serves(&side);
    assert!(bytes(&side).iter().all(|&byte| byte == 7));
}

#[test]
fn a_client_that_still_sends_hears_that_its_write_was_rejected() {
    let side = side(MooncakeLimits::default());
    let end = side.buffer.addr() + BYTES;
    // What no region has, and what no region could have.
    for (count, (addr, length)) in [(1, (end, 64 << 20)), (2, (u64::MAX - 1, 64 << 20))] {
        let mut stream = side.data_stranger();
        stream.write_all(&header(WireOp::Write, Version::V2, addr, length)).unwrap();
        let mut sending = stream.try_clone().unwrap();
        let sender = std::thread::spawn(move || sending.write_all(&vec![1; 64 << 20]).is_ok());
        let mut status = [0; 8];
        stream.read_exact(&mut status).unwrap();
        assert_eq!(status, Status::AddressRejected.encode());
        assert_eq!(side.node.rejected(), count);
        assert!(sender.join().unwrap(), "what it sent was taken, so nothing was reset");
    }
}

/// FAILURES.md B37.
#[test]
fn garbage_on_the_data_port_ends_only_its_own_connection() {
    let side = side(MooncakeLimits::default());
    for (count, (what, bytes)) in common::garbage().into_iter().enumerate() {
        let mut stream = side.data_stranger();
        // A length of zero in 8 bytes is the beginning of a header.
        let _ = stream.write_all(&bytes);
        let _ = stream.shutdown(Shutdown::Write);
        rest(&mut stream);
        eventually(what, || side.node.rejected() == count as u64 + 1);
        serves(&side);
    }
}

#[test]
fn operations_follow_each_other_on_one_connection_in_any_portions() {
    let side = side(MooncakeLimits::default());
    let at = side.buffer.addr();
    let mut said = Vec::new();
    for (offset, version) in [(0, Version::V1), (8, Version::V2)] {
        said.extend(header(WireOp::Write, version, at + offset, 4));
        said.extend([offset as u8 + 1; 4]);
        said.extend(header(WireOp::Read, version, at + offset, 6));
    }
    let mut answer = [1, 1, 1, 1, 7, 7].to_vec();
    answer.extend(Status::Done.encode());
    answer.extend(Status::Done.encode());
    answer.extend([9, 9, 9, 9, 7, 7]);
    for portion in [1, 3, 23, 24, 25, said.len()] {
        let mut stream = side.data_stranger();
        stream.set_nodelay(true).unwrap();
        said.chunks(portion).for_each(|part| stream.write_all(part).unwrap());
        let mut found = vec![0; answer.len()];
        stream.read_exact(&mut found).unwrap();
        assert_eq!(found, answer, "in portions of {portion}");
    }
    assert_eq!(side.node.rejected(), 0);
}

/// Whether the node ends its side within that time; it has nothing to say.
fn ends_within(stream: &TcpStream, time: Duration) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::IN)];
    let time = rustix::time::Timespec::try_from(time).unwrap();
    rustix::event::poll(&mut fds, Some(&time)).unwrap() > 0
}

/// FAILURES.md B40.
#[test]
fn a_client_that_dribbles_is_ended_at_the_progress_deadline() {
    let side = side_with(impatient(), MooncakeLimits::default());
    let write = header(WireOp::Write, Version::V2, side.buffer.addr(), BYTES);
    // In the header, and in the payload.
    for (before, said) in (0..).zip([&write[..10], &write[..]]) {
        let mut stream = side.data_stranger();
        stream.write_all(said).unwrap();
        let start = Instant::now();
        // A byte now and then is no progress.
        while stream.write_all(&[7]).is_ok() && !ends_within(&stream, Duration::from_millis(10)) {
            assert!(start.elapsed() < PATIENCE, "it is still served");
            if said.len() < 24 && start.elapsed() > Duration::from_millis(130) {
                break;
            }
        }
        assert_eq!(rest(&mut stream), b"");
        eventually("it is counted", || side.node.rejected() == before + 1);
    }
    // One that takes nothing of what it reads.
    let big = Side::configured(64 << 20, impatient(), &NodeOptions::default());
    let mut stream = big.data_stranger();
    stream.write_all(&header(WireOp::Read, Version::V2, big.buffer.addr(), 64 << 20)).unwrap();
    eventually("it is given up", || big.node.rejected() == 1);
}

#[test]
fn idle_connections_are_kept_for_a_while() {
    let idle = Duration::from_secs(60);
    let side = side(MooncakeLimits { idle, ..MooncakeLimits::default() });
    let mut stream = side.data_stranger();
    for _ in 0..5 {
        assert_eq!(read(&mut stream, side.buffer.addr(), 2), [7; 2]);
        assert!(!ends_within(&stream, Duration::from_millis(100)));
    }
    assert_eq!(side.node.rejected(), 0);
}

#[test]
fn idle_connections_are_closed_without_blame() {
    let idle = Duration::from_millis(300);
    let side = side(MooncakeLimits { idle, ..MooncakeLimits::default() });
    let mut stream = side.data_stranger();
    assert_eq!(rest(&mut stream), b"");
    assert_eq!(side.node.rejected(), 0);
}

/// FAILURES.md B40.
#[test]
fn a_thousand_connections_are_served_within_the_limit_and_idle_ones_make_room() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum.map(|most| most.min(8192));
    setrlimit(Resource::Nofile, limit).unwrap();
    let connections = 100;
    let side = side(MooncakeLimits { connections, ..MooncakeLimits::default() });
    let mut streams: Vec<_> = (0..1000).map(|_| side.data_stranger()).collect();
    // The newest ones are there, those before them gave way, and the next one is served.
    for stream in streams.iter_mut().rev().take(connections - 1) {
        assert_eq!(read(stream, side.buffer.addr(), 2), [7; 2]);
    }
    let given_up = streams.iter_mut().take(1000 - connections - 1);
    given_up.for_each(|stream| assert_eq!(rest(stream), b""));
    serves(&side);
    drop(streams);
    for _ in 0..1000 {
        serves(&side);
    }
    assert_eq!(side.node.rejected(), 0);
}

/// FAILURES.md B40.
#[test]
fn busy_connections_make_room_at_the_progress_deadline() {
    let side =
        side_with(impatient(), MooncakeLimits { connections: 2, ..MooncakeLimits::default() });
    let stuck: Vec<_> = (0..2)
        .map(|_| {
            let mut stream = side.data_stranger();
            let write = header(WireOp::Write, Version::V2, side.buffer.addr(), BYTES);
            stream.write_all(&write).unwrap();
            stream
        })
        .collect();
    serves(&side);
    eventually("both are counted", || side.node.rejected() == 2);
    drop(stuck);
}

#[test]
fn a_region_that_is_unregistered_takes_its_operations_with_it() {
    let side = side(MooncakeLimits::default());
    let mut stream = side.data_stranger();
    stream.write_all(&header(WireOp::Write, Version::V2, side.buffer.addr(), BYTES)).unwrap();
    stream.write_all(&[9; 4096]).unwrap();
    eventually("it is being written", || bytes(&side)[4095] == 9);
    std::thread::scope(|scope| {
        let unregister = scope.spawn(|| side.engine.unregister(side.buffer.addr()));
        // The next bytes find out, long before the progress deadline.
        let start = Instant::now();
        let pause = Duration::from_millis(1);
        while stream.write_all(&[9]).is_ok() && !ends_within(&stream, pause) {
            assert!(start.elapsed() < side.engine.config().tcp_status_timeout / 2, "it goes on");
        }
        unregister.join().unwrap().unwrap();
    });
    // SAFETY: the buffer owns it, and unregisters it when it is dropped.
    unsafe { side.engine.register(side.buffer.addr(), BYTES) }.unwrap();
    assert_eq!(read(&mut side.data_stranger(), side.buffer.addr(), 3), [9; 3]);
}

/// FAILURES.md B38.
#[test]
fn transfers_succeed_at_once_after_their_connections_were_closed_for_being_idle() {
    // Long enough for a batch, however busy the machine is: what is written on a connection that is just
    // being closed may be lost.
    let idle = Duration::from_secs(2);
    let there = side(MooncakeLimits { idle, ..MooncakeLimits::default() });
    let here = Side::new(BYTES);
    let peer = here.node.open_mooncake(there.node.name()).unwrap();
    let ranges: Vec<_> = (0..64)
        .map(|at| (here.buffer.addr() + at * 64, there.buffer.addr() + at * 64))
        .map(|(local, remote)| Range { local, remote, len: 64 })
        .collect();
    for op in [Op::Write, Op::Read, Op::Write] {
        let transfer = peer.submit(op, &ranges).unwrap();
        assert_eq!(transfer.wait(PATIENCE), TransferState::Completed);
        std::thread::sleep(idle * 2);
    }
}

/// Makes two regions of a side's buffer, which touch in its middle.
fn split(side: &Side) {
    let (addr, half) = (side.buffer.addr(), BYTES / 2);
    side.engine.unregister(addr).unwrap();
    // SAFETY: the buffer's memory lives as long as the side, and `join` comes before its end.
    unsafe { side.engine.register_all(&[(addr, half), (addr + half, half)]) }.unwrap();
}

fn join(side: &Side) {
    let (addr, half) = (side.buffer.addr(), BYTES / 2);
    for addr in [addr, addr + half] {
        side.engine.unregister(addr).unwrap();
    }
    // SAFETY: the buffer owns it, and unregisters it when it is dropped.
    unsafe { side.engine.register(addr, BYTES) }.unwrap();
}

#[test]
fn a_range_may_cross_regions_that_touch_though_an_operation_may_not() {
    let (here, there) = (side(MooncakeLimits::default()), side(MooncakeLimits::default()));
    split(&here);
    split(&there);
    let pattern: Vec<u8> = (0..BYTES).map(|at| (at % 251) as u8).collect();
    here.buffer.write(0, &pattern).unwrap();
    let peer = here.node.open_mooncake(there.node.name()).unwrap();
    let (local, remote) = (here.buffer.addr(), there.buffer.addr());
    let range = Range { local: local + 1, remote: remote + 100, len: BYTES - 100 };
    let state = peer.submit(Op::Write, &[range]).unwrap().wait(PATIENCE);
    assert_eq!(state, TransferState::Completed);
    let found = bytes(&there);
    assert!(found[..100] == [7; 100] && found[100..] == pattern[1..BYTES as usize - 99]);
    assert_eq!(there.node.rejected(), 0);

    let mut stream = there.data_stranger();
    let across = header(WireOp::Read, Version::V2, remote + BYTES / 2 - 1, 2);
    stream.write_all(&across).unwrap();
    assert_eq!(rest(&mut stream), Status::AddressRejected.encode());
    join(&here);
    join(&there);
}

/// A server with a descriptor of one buffer, whose data connections are answered with `answer` once
/// a header was read, and then closed.
fn server(version: u32, answer: Vec<u8>) -> String {
    let handshake = TcpListener::bind("127.0.0.1:0").unwrap();
    let data = TcpListener::bind("127.0.0.1:0").unwrap();
    let name = handshake.local_addr().unwrap().to_string();
    let port = data.local_addr().unwrap().port();
    let descriptor = format!(
        r#"{{"name":"{name}","protocol":"tcp","tcp_data_port":{port},"tcp_proto_version":{version},
        "buffers":[{{"name":"{name}","addr":4096,"length":1048576}}]}}"#
    );
    std::thread::spawn(move || {
        for mut stream in handshake.incoming().flatten() {
            let _ = stream.read(&mut [0; 64]);
            let _ = stream.write_all(&encode(Kind::Metadata, descriptor.as_bytes()));
        }
    });
    std::thread::spawn(move || {
        for mut stream in data.incoming().flatten() {
            let _ = stream.read_exact(&mut [0; 24]);
            let _ = stream.write_all(&answer);
        }
    });
    name
}

#[test]
fn a_server_that_says_the_wrong_thing_fails_the_transfer_and_nothing_else() {
    let side = side_with(impatient(), MooncakeLimits::default());
    let ok = Status::Done.encode();
    let payload = |length: usize| [&ok[..], &vec![1; length]].concat();
    for (version, op, answer, said) in [
        (2, Op::Write, b"not a st".to_vec(), "instead of a status"),
        (2, Op::Write, ok[..7].to_vec(), ""),
        (2, Op::Write, vec![], ""),
        (2, Op::Write, Status::AddressRejected.encode().to_vec(), "rejected"),
        (2, Op::Write, Status::Other(9).encode().to_vec(), "unknown code 9"),
        (2, Op::Read, b"not a st".to_vec(), "instead of a status"),
        (2, Op::Read, Status::AddressRejected.encode().to_vec(), "rejected"),
        (2, Op::Read, vec![], "closed the connection before the end"),
        (2, Op::Read, ok.to_vec(), "closed the connection before the end"),
        (2, Op::Read, payload(65535), "closed the connection before the end"),
        (1, Op::Read, vec![1; 65535], "closed the connection before the end"),
        (1, Op::Write, vec![], "closed the connection before the end"),
    ] {
        let peer = side.node.open_mooncake(&server(version, answer.clone())).unwrap();
        let range = Range { local: side.buffer.addr(), remote: 4096, len: 65536 };
        let what = format!("version {version} {op:?} answered by {} bytes", answer.len());
        match peer.submit(op, &[range]).unwrap().wait(PATIENCE) {
            TransferState::Failed(error) => {
                assert!(error.to_string().contains(said), "{what}: {error}");
            }
            other => panic!("{what}: {other:?}"),
        }
    }
    assert!(bytes(&side)[65536..].iter().all(|&byte| byte == 7), "nothing beside the destination");
}

#[test]
fn a_transfer_speaks_the_version_that_tcp_proto_says_to_a_server_of_the_newest() {
    let payload = vec![1; 65536];
    let with_status = [&Status::Done.encode()[..], &payload].concat();
    for (knob, answer) in [("1", payload), ("2", with_status)] {
        let lookup = |name: &str| match name {
            "MC_TCP_PROTO" => Some(knob.into()),
            "MC_KVFERRY_CACHE_DIR" => Some("off".into()),
            _ => None,
        };
        let config = Config::from_lookup(lookup).unwrap();
        let side = side_with(config, MooncakeLimits::default());
        let peer = side.node.open_mooncake(&server(2, answer)).unwrap();
        let range = Range { local: side.buffer.addr(), remote: 4096, len: 65536 };
        let state = peer.submit(Op::Read, &[range]).unwrap().wait(PATIENCE);
        assert_eq!(state, TransferState::Completed, "version {knob}");
        assert!(bytes(&side)[..65536] == [1; 65536], "version {knob}");
    }
}

#[test]
fn a_transfer_ends_when_its_node_is_dropped() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let side = side(MooncakeLimits::default());
    let name = {
        let handshake = TcpListener::bind("127.0.0.1:0").unwrap();
        let name = handshake.local_addr().unwrap().to_string();
        let descriptor = format!(
            r#"{{"name":"x:1","protocol":"tcp","tcp_data_port":{port},"tcp_proto_version":2,
            "buffers":[{{"name":"x","addr":4096,"length":1048576}}]}}"#
        );
        std::thread::spawn(move || {
            let (mut stream, _) = handshake.accept().unwrap();
            let _ = stream.read(&mut [0; 64]);
            let _ = stream.write_all(&encode(Kind::Metadata, descriptor.as_bytes()));
        });
        name
    };
    let peer = side.node.open_mooncake(&name).unwrap();
    let range = Range { local: side.buffer.addr(), remote: 4096, len: BYTES };
    let transfer = peer.submit(Op::Read, &[range]).unwrap();
    assert_eq!(transfer.wait(Duration::from_millis(50)), TransferState::Running);
    let Side { node, engine, buffer } = side;
    drop(node);
    assert_eq!(transfer.wait(PATIENCE), TransferState::Failed(TransferError::Closed));
    // Nothing holds the memory any more.
    drop(buffer);
    drop(engine);
}

/// FAILURES.md B42.
#[test]
fn a_node_on_all_addresses_is_reached_over_both_families() {
    let listen = "[::]:0".parse().unwrap();
    let name = Some("localhost:0".into());
    let side = Side::with(4096, &NodeOptions { listen, name, ..NodeOptions::default() });
    side.buffer.write(0, &[5; 64]).unwrap();
    let handshake = side.node.name().rsplit_once(':').unwrap().1.to_owned();
    let other = Side::new(4096);
    for host in ["127.0.0.1", "[::1]"] {
        let peer = other.node.open_mooncake(&format!("{host}:{handshake}")).unwrap();
        let range = Range { local: other.buffer.addr(), remote: side.buffer.addr(), len: 64 };
        let transfer = peer.submit(Op::Read, &[range]).unwrap();
        assert_eq!(transfer.wait(PATIENCE), TransferState::Completed, "{host}");
        let mut bytes = [0; 64];
        other.buffer.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [5; 64], "{host}");
        other.buffer.write(0, &[0; 64]).unwrap();
    }
}

#[test]
fn memory_of_any_origin_is_listed_read_and_written() {
    let side = side(MooncakeLimits::default());
    let mut heap = vec![5_u8; 5000];
    let (addr, length) = (heap.as_mut_ptr() as u64 + 1, 4321);
    // SAFETY: it is unregistered below, before its end.
    unsafe { side.engine.register(addr, length) }.unwrap();
    let listed = side.descriptor().buffers;
    assert!(listed.iter().any(|buffer| (buffer.addr, buffer.length) == (addr, length)));
    let mut stream = side.data_stranger();
    assert_eq!(read(&mut stream, addr, length as usize), vec![5; length as usize]);
    let mut write = header(WireOp::Write, Version::V2, addr + 4000, 321).to_vec();
    write.extend([9; 321]);
    stream.write_all(&write).unwrap();
    let mut status = [0; 8];
    stream.read_exact(&mut status).unwrap();
    assert_eq!(status, Status::Done.encode());
    assert_eq!(read(&mut stream, addr + 3999, 322), [&[5][..], &[9; 321]].concat());
    side.engine.unregister(addr).unwrap();
    assert_eq!(heap[4000..], [&[5][..], &[9; 321], &[5; 678]].concat());
}
