//! FAILURES.md B49. Alone in its process, since its child has the threads of no other test.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use common::{PATIENCE, Side, eventually};
use kvferry_engine::{Config, Error, Op, Range, State};
use kvferry_node::{Node, NodeError, NodeOptions, TransferError, TransferState};

/// What the child ends with if all was as it should be.
const WELL: i32 = 42;

#[test]
fn a_fork_that_drops_nodes_and_peers_and_ends_leaves_the_parents_alone() {
    let mut forced = Config::default();
    forced.force_tcp = true;
    let (here, there) = (Side::new(8192), Side::new(8192));
    let by_tcp = Side::configured(8192, forced, &NodeOptions::default());
    let peer = here.node.open(there.node.name()).unwrap();
    let far = by_tcp.node.open(there.node.name()).unwrap();
    let stock = here.node.open_mooncake(there.node.name()).unwrap();
    let range = [Range { local: here.buffer.addr(), remote: there.buffer.addr(), len: 4096 }];
    let all_move = || {
        let moved = here.transfer(peer.target(), Op::Write, there.buffer.addr(), 4096);
        assert_eq!(moved, Ok(State::Completed));
        let moved = by_tcp.transfer(far.target(), Op::Write, there.buffer.addr(), 4096);
        assert_eq!(moved, Ok(State::Completed));
        let moved = stock.submit(Op::Write, &range).unwrap().wait(PATIENCE);
        assert_eq!(moved, TransferState::Completed);
    };
    // Every connection is there when the process forks.
    all_move();
    let ended = stock.submit(Op::Write, &range).unwrap();
    assert_eq!(ended.wait(PATIENCE), TransferState::Completed);
    let owner = std::process::id();
    // SAFETY: the child calls what looks at the process first, drops what it has, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = |error: Option<NodeError>| {
            assert_eq!(error, Some(NodeError::Engine(Error::OtherProcess { owner })));
        };
        let well = catch_unwind(AssertUnwindSafe(move || {
            let name = there.node.name();
            refused(here.node.open(name).err());
            refused(here.node.open_mooncake(name).err());
            refused(here.node.segment().err());
            refused(here.node.open_segment(b"{}").err());
            refused(peer.refresh().err());
            refused(stock.refresh().err());
            let submitted = stock.submit(Op::Write, &range).map(drop);
            assert!(matches!(submitted, Err(TransferError::Descriptor(_))), "{submitted:?}");
            assert_eq!(ended.poll(), TransferState::Failed(TransferError::Closed));
            assert!(peer.is_alive(), "it is, for the parent");
            drop((ended, stock, far, peer, by_tcp, here, there));
        }));
        std::process::exit(if well.is_ok() { WELL } else { 1 });
    }
    assert!(child > 0);
    let mut status = 0;
    let ends = || {
        // SAFETY: the child above.
        unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) == child }
    };
    eventually("the child ends", ends);
    assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, WELL), "{status:#x}");
    all_move();
    assert!(peer.is_alive() && far.is_alive());
    for name in [here.node.name(), there.node.name(), by_tcp.node.name()] {
        let another = Node::open(&there.node, name).unwrap();
        assert!(another.is_alive());
    }
}
