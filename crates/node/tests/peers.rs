//! Nodes that open each other, in one process and in two.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use common::{PATIENCE, Side, answering, eventually, impostor, impostors};
use kvferry_engine::{Config, Engine, Error, Op, Range, RangeError, State, Strided};
use kvferry_node::{Node, NodeError, NodeOptions, TransferState};
use kvferry_wire::handshake::{Kind, encode};
use kvferry_wire::{Id, Uuid};

#[test]
fn bytes_move_both_ways_between_two_nodes_of_one_process() {
    let (here, there) = (Side::new(8192), Side::new(8192));
    let peer = here.node.open(there.node.name()).unwrap();
    assert_eq!(peer.name(), there.node.name());
    assert_eq!(peer.target().incarnation(), there.engine.incarnation());

    here.buffer.write(0, b"from here").unwrap();
    let remote = there.buffer.addr();
    assert_eq!(here.transfer(peer.target(), Op::Write, remote, 9), Ok(State::Completed));
    let mut bytes = [0; 9];
    there.buffer.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"from here");

    there.buffer.write(0, b"and back!").unwrap();
    assert_eq!(here.transfer(peer.target(), Op::Read, remote, 9), Ok(State::Completed));
    here.buffer.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"and back!");
}

#[test]
fn a_node_opens_itself() {
    let side = Side::new(8192);
    let peer = side.node.open(side.node.name()).unwrap();
    side.buffer.write(0, b"self").unwrap();
    assert_eq!(
        side.transfer(peer.target(), Op::Write, side.buffer.addr() + 4096, 4),
        Ok(State::Completed)
    );
    let mut bytes = [0; 4];
    side.buffer.read(4096, &mut bytes).unwrap();
    assert_eq!(&bytes, b"self");
    assert!(peer.is_alive());
}

/// FAILURES.md B43.
#[test]
fn memory_that_a_peer_registers_later_is_asked_for_by_the_transfer_that_names_it() {
    let here = Side::new(4096);
    let mut other = OtherProcess::start();
    let peer = here.node.open(&other.name).unwrap();
    let late = other.ask("register").parse().unwrap();
    assert_eq!(here.transfer(peer.target(), Op::Write, late, 16), Ok(State::Completed));
    let late: u64 = other.ask("register").parse().unwrap();
    let form = [Strided {
        local: here.buffer.addr(),
        remote: late,
        len: 16,
        count: 4,
        local_stride: 16,
        remote_stride: 32,
    }];
    let id = here.engine.submit(peer.target(), Op::Write, &form).unwrap();
    assert_eq!(here.engine.wait(id, PATIENCE).unwrap().state, State::Completed);

    let mut config = Config::default();
    config.force_tcp = true;
    let far = Side::configured(4096, config, &NodeOptions::default());
    let peer = far.node.open(&other.name).unwrap();
    let late = other.ask("register").parse().unwrap();
    assert_eq!(far.transfer(peer.target(), Op::Write, late, 16), Ok(State::Completed));
    assert_eq!((here.engine.statistics().refused, far.engine.statistics().refused), (0, 0));
}

/// FAILURES.md B43.
#[test]
fn unknown_memory_makes_a_transfer_ask_once_and_is_refused_as_before() {
    let (here, there) = (Side::new(4096), Side::new(4096));
    let mut descriptor = there.descriptor();
    descriptor.kvferry.as_mut().unwrap().host = Uuid([9; 16]);
    let before = impostors(&[descriptor.clone(), descriptor.clone(), descriptor]);
    let peer = here.node.open(&before.name).unwrap();
    let known = there.buffer.addr();
    assert_eq!(here.transfer(peer.target(), Op::Write, known, 4096), Ok(State::Completed));
    assert_eq!(before.asked(), 1, "to open it");
    for (asked, (addr, len)) in (2..).zip([(64, 16), (known + 4000, 97)]) {
        let refused = here.transfer(peer.target(), Op::Write, addr, len);
        assert!(matches!(refused, Err(Error::Range(_))), "{refused:?}");
        assert_eq!(before.asked(), asked);
    }
    // One that answers no more.
    let refused = here.transfer(peer.target(), Op::Write, 64, 16);
    let expected = RangeError::NotRegistered {
        index: 0,
        side: kvferry_engine::Side::Remote,
        addr: 64,
        len: 16,
    };
    assert_eq!(refused, Err(Error::Range(expected)));
    assert!(peer.is_alive());
    assert_eq!(here.transfer(peer.target(), Op::Write, known, 4096), Ok(State::Completed));
}

#[test]
fn a_peer_that_does_not_answer_delays_one_transfer_of_unknown_memory_and_no_other() {
    let (here, there) = (Side::new(4096), Side::new(4096));
    let mut descriptor = there.descriptor();
    descriptor.kvferry.as_mut().unwrap().host = Uuid([9; 16]);
    let answered = impostors(std::slice::from_ref(&descriptor));
    let peer = here.node.open(&answered.name).unwrap();
    eventually("its port is free", || answered.ended());
    // It takes connections, as the system does for it, and says nothing.
    let _silent = TcpListener::bind(&answered.name).unwrap();
    let submit = || {
        let began = Instant::now();
        let refused = here.transfer(peer.target(), Op::Write, 64, 16);
        assert!(matches!(refused, Err(Error::Range(_))), "{refused:?}");
        began.elapsed()
    };
    let (first, second) = (submit(), submit());
    assert!(first > 2 * second, "{first:?}, {second:?}");
}

/// FAILURES.md B43.
#[test]
fn a_transfer_that_asks_and_finds_a_restarted_peer_fails_for_that() {
    let (here, there) = (Side::new(4096), Side::new(4096));
    let mut descriptor = there.descriptor();
    descriptor.kvferry.as_mut().unwrap().host = Uuid([9; 16]);
    let mut later = descriptor.clone();
    later.kvferry.as_mut().unwrap().incarnation = Id([7; 16]);
    let peer = here.node.open(&impostors(&[descriptor, later]).name).unwrap();
    let refused = here.transfer(peer.target(), Op::Write, 64, 16);
    let Err(Error::PeerLost { reason, .. }) = &refused else { panic!("{refused:?}") };
    assert!(reason.contains(&Id([7; 16]).to_string()), "{reason}");
    assert!(!peer.is_alive());
}

#[test]
fn a_node_that_closes_is_noticed() {
    let (here, there) = (Side::new(4096), Side::new(4096));
    let peer = here.node.open(there.node.name()).unwrap();
    assert!(peer.is_alive());
    drop(there.node);
    eventually("the peer is lost", || !peer.is_alive());
    let refused = here.transfer(peer.target(), Op::Write, there.buffer.addr(), 16);
    assert!(matches!(refused, Err(Error::PeerLost { .. })), "{refused:?}");
}

#[test]
fn a_peer_works_as_long_as_it_is_kept_whatever_becomes_of_the_node_that_opened_it() {
    let (one, there) = (Side::new(4096), Side::new(4096));
    let mut far = Config::default();
    far.force_tcp = true;
    let other = Side::configured(4096, far, &NodeOptions::default());
    let peers = [&one, &other].map(|side| side.node.open(there.node.name()).unwrap());
    let sides = [one, other].map(|Side { node, engine, buffer }| {
        assert_eq!(Arc::strong_count(&node), 1);
        drop(node);
        (engine, buffer)
    });
    there.buffer.write(0, &[7; 4096]).unwrap();
    for ((engine, buffer), peer) in sides.iter().zip(&peers) {
        assert!(peer.is_alive());
        peer.refresh().unwrap();
        let range = [Range { local: buffer.addr(), remote: there.buffer.addr(), len: 4096 }];
        let id = engine.submit(peer.target(), Op::Read, &range).unwrap();
        assert_eq!(engine.wait(id, PATIENCE).unwrap().state, State::Completed);
        let mut found = [0; 4096];
        buffer.read(0, &mut found).unwrap();
        assert_eq!(found, [7; 4096]);
    }
    // Its death is still noticed, where it would be with a node.
    drop(there.node);
    eventually("the peer is lost", || !peers[0].is_alive());
}

#[test]
fn a_restarted_peer_is_told_from_the_one_that_was_opened() {
    let here = Side::new(4096);
    let first = Side::new(4096);
    let name = first.node.name().to_owned();
    let peer = here.node.open(&name).unwrap();
    drop(first);
    let second = Side::restarted(4096, &name);
    let error = peer.refresh().unwrap_err();
    let expected = NodeError::PeerRestarted {
        peer: name.clone(),
        expected: peer.target().incarnation().to_string(),
        found: second.engine.incarnation().to_string(),
    };
    assert_eq!(error, expected);
    assert!(!peer.is_alive());
    let again = here.node.open(&name).unwrap();
    assert_eq!(
        here.transfer(again.target(), Op::Write, second.buffer.addr(), 16),
        Ok(State::Completed)
    );
}

/// FAILURES.md B41.
#[test]
fn a_stale_descriptor_does_not_reach_another_engine() {
    let (here, there) = (Side::new(4096), Side::new(4096));
    // As if the engine had restarted between its descriptor and our connection.
    let mut stale = there.descriptor();
    stale.kvferry.as_mut().unwrap().incarnation = Id([7; 16]);
    let error = here.node.open(&impostor(&stale)).unwrap_err();
    let NodeError::Exports { reason, .. } = &error else { panic!("{error}") };
    assert!(reason.contains(&Id([7; 16]).to_string()), "{reason}");
    assert!(reason.contains(&there.engine.incarnation().to_string()), "{reason}");
    assert_eq!(there.node.rejected(), 1);
}

/// FAILURES.md B11.
#[test]
fn a_peer_on_another_host_is_reached_by_tcp_or_both_hosts_are_named() {
    let (here, there) = (Side::new(4096), Side::new(4096));
    let mut distant = there.descriptor();
    let ours = distant.kvferry.as_ref().unwrap().host.to_string();
    distant.kvferry.as_mut().unwrap().host = Uuid([9; 16]);
    let by_tcp = here.node.open(&impostor(&distant)).unwrap();
    assert_eq!(
        here.transfer(by_tcp.target(), Op::Write, there.buffer.addr(), 4096),
        Ok(State::Completed)
    );

    distant.kvferry.as_mut().unwrap().batch = None;
    let peer = impostor(&distant);
    let theirs = Uuid([9; 16]).to_string();
    let error = here.node.open(&peer).unwrap_err();
    assert!(
        matches!(&error, NodeError::Unreachable { peer: p, ours: o, theirs: t, .. }
            if (p, o, t) == (&peer, &ours, &theirs)),
        "{error}"
    );
    assert!(error.to_string().contains("batch protocol"), "{error}");
}

#[test]
fn a_stock_mooncake_peer_is_refused_with_the_call_that_opens_it() {
    let (here, there) = (Side::new(4096), Side::new(4096));
    let mut stock = there.descriptor();
    let ours = stock.kvferry.take().expect("a node").host.to_string();
    let error = here.node.open(&impostor(&stock)).unwrap_err();
    assert!(
        matches!(&error, NodeError::Unreachable { ours: named, .. } if *named == ours),
        "{error}"
    );
    assert!(error.to_string().contains("Node::open_mooncake"), "{error}");
    assert!(!error.to_string().contains("batch"), "{error}");
    // And that call does.
    let peer = here.node.open_mooncake(&impostor(&stock)).unwrap();
    let range = Range { local: here.buffer.addr(), remote: there.buffer.addr(), len: 4096 };
    let moved = peer.submit(Op::Write, &[range]).unwrap().wait(PATIENCE);
    assert_eq!(moved, TransferState::Completed);
}

#[test]
fn a_peer_says_which_way_it_is_reached_and_why_not_a_better_one() {
    let (here, there) = (Side::new(4096), Side::new(4096));
    assert_eq!(here.node.open(there.node.name()).unwrap().way().to_string(), "mapped");
    let other = OtherProcess::start();
    let peer = here.node.open(&other.name).unwrap();
    assert_eq!(peer.way().to_string(), "mapped");
    let mut distant = there.descriptor();
    distant.kvferry.as_mut().unwrap().host = Uuid([9; 16]);
    let way = here.node.open(&impostor(&distant)).unwrap().way();
    assert_eq!((way.mapped, way.tcp, way.reasons.len()), (false, true, 1));
    assert!(way.to_string().contains(&Uuid([9; 16]).to_string()), "{way}");
    let mut config = Config::default();
    config.force_tcp = true;
    let forced = Side::configured(4096, config, &NodeOptions::default());
    let way = forced.node.open(there.node.name()).unwrap().way();
    assert_eq!(way.to_string(), "TCP: MC_FORCE_TCP is set");
}

/// FAILURES.md B11.
#[test]
fn the_boot_id_and_no_name_says_whether_a_peer_is_on_this_host() {
    // Two names of one host.
    let (here, there) = (Side::new(4096), Side::new(4096));
    let port = there.node.name().rsplit_once(':').unwrap().1;
    for name in [there.node.name().to_owned(), format!("localhost:{port}")] {
        let peer = here.node.open(&name).unwrap();
        assert_eq!(peer.target().incarnation(), there.engine.incarnation());
        assert_eq!(
            here.transfer(peer.target(), Op::Write, there.buffer.addr(), 16),
            Ok(State::Completed)
        );
    }
    // One name of two hosts: the peer says that it is called as we are, at our own address, and
    // names a socket that is here.
    let mut distant = there.descriptor();
    distant.name = here.node.name().to_owned();
    distant.kvferry.as_mut().unwrap().host = Uuid([9; 16]);
    distant.kvferry.as_mut().unwrap().batch = None;
    let error = here.node.open(&impostor(&distant)).unwrap_err();
    assert!(matches!(error, NodeError::Unreachable { .. }), "{error}");
}

#[test]
fn peers_that_answer_nonsense_are_refused_by_name() {
    let here = Side::new(4096);
    for answer in [
        b"".to_vec(),
        b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
        encode(Kind::Probe, b"{}"),
        vec![9, 0, 0],
    ] {
        let peer = answering(answer);
        let error = here.node.open(&peer).unwrap_err();
        assert!(
            matches!(&error, NodeError::Handshake { peer: named, .. } if *named == peer),
            "{error}"
        );
    }
    let peer = answering(encode(Kind::Metadata, b"{\"name\":1}"));
    assert!(
        matches!(here.node.open(&peer), Err(NodeError::Descriptor { peer: named, .. }) if named == peer)
    );
}

/// FAILURES.md B41.
#[test]
fn a_taken_port_is_refused_with_its_number() {
    let side = Side::new(4096);
    let listen: SocketAddr = side.node.name().parse().unwrap();
    let error =
        Node::start(Arc::clone(&side.engine), &NodeOptions { listen, ..NodeOptions::default() })
            .unwrap_err();
    assert!(matches!(error, NodeError::Listen { .. }), "{error}");
    assert!(error.to_string().contains(&listen.to_string()), "{error}");
}

#[test]
fn a_node_on_all_addresses_needs_a_name() {
    let side = Side::new(4096);
    let listen: SocketAddr = "0.0.0.0:0".parse().unwrap();
    let start = |name: Option<&str>| {
        Node::start(
            Arc::clone(&side.engine),
            &NodeOptions { listen, name: name.map(str::to_owned), ..NodeOptions::default() },
        )
    };
    assert_eq!(start(None).unwrap_err(), NodeError::NameMissing { listen });
    assert!(matches!(start(Some("localhost")), Err(NodeError::BadAddress { .. })));
    let node = start(Some("localhost:0")).unwrap();
    assert!(side.node.open(node.name()).unwrap().is_alive(), "{}", node.name());
}

/// FAILURES.md B42.
#[test]
fn an_ipv6_node_is_opened_by_its_bracketed_name() {
    let listen: SocketAddr = "[::1]:0".parse().unwrap();
    if let Err(error) = TcpListener::bind(listen) {
        eprintln!("SKIP no IPv6 here: {error}");
        return;
    }
    let side = Side::with(4096, &NodeOptions { listen, ..NodeOptions::default() });
    assert!(side.node.name().starts_with("[::1]:"));
    let peer = side.node.open(side.node.name()).unwrap();
    assert!(peer.is_alive());
}

/// FAILURES.md B41.
#[test]
fn many_nodes_start_at_once_and_each_has_its_own_port() {
    let engine = Side::new(4096).engine;
    let start = |engine: Arc<Engine>| Node::start(engine, &NodeOptions::default()).unwrap();
    let threads: Vec<_> = (0..32)
        .map(|_| {
            std::thread::spawn({
                let engine = Arc::clone(&engine);
                move || start(engine)
            })
        })
        .collect();
    let nodes: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    let names: std::collections::HashSet<_> = nodes.iter().map(|node| node.name()).collect();
    assert_eq!(names.len(), 32);
}

#[test]
fn bytes_move_between_two_processes_and_a_killed_peer_is_noticed() {
    let here = Side::new(8192);
    let mut other = OtherProcess::start();
    let peer = here.node.open(&other.name).unwrap();
    // The other process filled its buffer with its letters.
    assert_eq!(here.transfer(peer.target(), Op::Read, other.addr, 5), Ok(State::Completed));
    let mut bytes = [0; 5];
    here.buffer.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"other");

    here.buffer.write(0, b"hello").unwrap();
    assert_eq!(here.transfer(peer.target(), Op::Write, other.addr, 5), Ok(State::Completed));
    assert_eq!(other.ask("read"), "hello");
    assert_eq!(peer.target().open_count(), 1);

    other.process.kill().unwrap();
    eventually("the peer is lost", || !peer.is_alive());
    let refused = here.transfer(peer.target(), Op::Write, other.addr, 5);
    assert!(matches!(refused, Err(Error::PeerLost { .. })), "{refused:?}");
    assert_eq!(peer.target().open_count(), 0);
    assert!(matches!(here.node.open(&other.name), Err(NodeError::Handshake { .. })));
}

/// Not a test of its own: what [`OtherProcess`] runs.
#[test]
fn other_process() {
    if std::env::var_os(OTHER).is_none() {
        return;
    }
    let side = Side::new(8192);
    side.buffer.write(0, b"other").unwrap();
    println!("\nkvferry {} {}", side.node.name(), side.buffer.addr());
    let mut later = Vec::new();
    for order in std::io::stdin().lines() {
        if order.unwrap() == "register" {
            later.push(side.engine.allocate(&side.engine.devices()[0], 4096).unwrap());
            println!("\nkvferry {}", later[later.len() - 1].addr());
        } else {
            let mut bytes = [0; 5];
            side.buffer.read(0, &mut bytes).unwrap();
            println!("\nkvferry {}", String::from_utf8_lossy(&bytes));
        }
    }
}

const OTHER: &str = "KVFERRY_TEST_OTHER_PROCESS";

/// A node in a process of its own.
struct OtherProcess {
    process: Child,
    output: BufReader<std::process::ChildStdout>,
    name: String,
    addr: u64,
}

impl OtherProcess {
    fn start() -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "other_process", "--nocapture"])
            .env(OTHER, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let mut other = Self { process, output, name: String::new(), addr: 0 };
        let line = other.line();
        let (name, addr) = line.split_once(' ').unwrap();
        (other.name, other.addr) = (name.to_owned(), addr.parse().unwrap());
        other
    }

    /// `read` gives the first letters of its buffer, `register` the address of a new one.
    fn ask(&mut self, order: &str) -> String {
        writeln!(self.process.stdin.as_mut().unwrap(), "{order}").unwrap();
        self.line()
    }

    fn line(&mut self) -> String {
        let lines = self.output.by_ref().lines();
        let said = lines
            .map(Result::unwrap)
            .find_map(|line| line.strip_prefix("kvferry ").map(str::to_owned));
        said.expect("the other process ended")
    }
}

impl Drop for OtherProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
