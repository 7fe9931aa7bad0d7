//! Peers on this host whose memory this process may not map: they are reached over TCP, and that is
//! said.

mod common;

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use common::{Side, impostor, warnings};
use kvferry_engine::{Config, Op, Path, State};
use kvferry_node::{NodeError, NodeOptions};
use kvferry_wire::segment::Descriptor;

const LEN: u64 = 8192;

/// A descriptor of `there`, as if its exports were handed out at that socket.
fn with_exports_at(there: &Side, socket: &str) -> Descriptor {
    let mut descriptor = there.descriptor();
    descriptor.kvferry.as_mut().expect("a node").socket = socket.into();
    descriptor
}

/// Opens such a peer, moves bytes, and looks at what is said of it. `cause` is in the warning, and in
/// what is refused where there may or can be no fallback.
fn is_reached_by_tcp(descriptor: Descriptor, there: &Side, cause: &str) {
    let here = Side::new(LEN);
    let name = impostor(&descriptor);
    let (peer, lines) = warnings(|| here.node.open(&name).unwrap());
    assert_eq!(lines.len(), 1, "{lines:#?}");
    for word in ["WARN", &name, cause] {
        assert!(lines[0].contains(word), "{word} in {}", lines[0]);
    }
    let way = peer.way();
    assert!(!way.mapped && way.tcp && way.to_string().contains(cause), "{way}");
    here.buffer.write(0, &[7; LEN as usize]).unwrap();
    let (moved, lines) =
        warnings(|| here.transfer(peer.target(), Op::Write, there.buffer.addr(), LEN));
    assert_eq!((moved, lines), (Ok(State::Completed), Vec::new()));
    let mut found = vec![0; LEN as usize];
    there.buffer.read(0, &mut found).unwrap();
    assert!(found.iter().all(|&byte| byte == 7));
    let statistics = here.engine.statistics();
    assert_eq!((statistics.fallbacks, statistics.path(Path::Tcp).completed), (1, 1));

    let refuses = |side: &Side, descriptor: &Descriptor| {
        let refused = side.node.open(&impostor(descriptor)).unwrap_err();
        assert!(
            matches!(refused, NodeError::Exports { .. } | NodeError::OtherUser { .. }),
            "{refused}"
        );
        assert!(refused.to_string().contains(cause), "{refused}");
    };
    let mut strict = Config::default();
    strict.strict = true;
    refuses(&Side::configured(LEN, strict, &NodeOptions::default()), &descriptor);
    let mut silent = descriptor;
    silent.kvferry.as_mut().expect("a node").batch = None;
    refuses(&here, &silent);
}

#[test]
fn a_peer_in_another_network_namespace_is_reached_over_tcp_and_that_is_said_once() {
    let there = Side::new(LEN);
    // Nobody listens there, as it seems from another namespace.
    let descriptor = with_exports_at(&there, "kvferry-test-of-another-namespace");
    is_reached_by_tcp(descriptor, &there, "network namespace");
}

#[test]
fn a_peer_of_another_user_is_reached_over_tcp_and_that_is_said_once() {
    const OTHER: libc::uid_t = 12_345;
    let socket = format!("kvferry-test-of-another-user-{}", std::process::id());
    let bound = socket.clone();
    // The user of a socket is that of the thread which begins to listen.
    let listener = std::thread::spawn(move || {
        let keep: libc::uid_t = libc::uid_t::MAX;
        // SAFETY: the call alone, not the library's, changes this thread alone, which ends here.
        if unsafe { libc::syscall(libc::SYS_setresuid, keep, OTHER, keep) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        UnixListener::bind_addr(&SocketAddr::from_abstract_name(bound)?)
    });
    let listener = match listener.join().unwrap() {
        Ok(listener) => listener,
        Err(error) => return kvferry_device::conformance::skip("other-user", &error),
    };
    let there = Side::new(LEN);
    let descriptor = with_exports_at(&there, &socket);
    is_reached_by_tcp(descriptor, &there, &format!("user {OTHER}"));
    drop(listener);
}

#[test]
fn a_peer_that_is_told_to_go_by_tcp_is_no_fallback() {
    let there = Side::new(LEN);
    let mut config = Config::default();
    (config.force_tcp, config.strict) = (true, true);
    let here = Side::configured(LEN, config, &NodeOptions::default());
    let (peer, lines) = warnings(|| here.node.open(there.node.name()).unwrap());
    assert_eq!(lines, [""; 0]);
    let moved = here.transfer(peer.target(), Op::Write, there.buffer.addr(), LEN);
    assert_eq!(moved, Ok(State::Completed));
    assert_eq!(here.engine.statistics().fallbacks, 0);
}
