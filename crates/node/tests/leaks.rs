//! Alone in its process, since it counts what the whole process holds.

mod common;

use common::{PATIENCE, Side, eventually, exports_of, garbage, say_tcp, say_unix};
use kvferry_engine::{Op, Range, State};
use kvferry_node::TransferState;

const ROUNDS: usize = 40;

/// A node that comes, is used in every way, and goes.
fn round(here: &Side) {
    let there = Side::new(4096);
    let peers: Vec<_> = (0..4).map(|_| here.node.open(there.node.name()).unwrap()).collect();
    assert_eq!(
        here.transfer(peers[0].target(), Op::Write, there.buffer.addr(), 64),
        Ok(State::Completed)
    );
    let range = Range { local: here.buffer.addr(), remote: there.buffer.addr(), len: 64 };
    let stock = here.node.open_mooncake(there.node.name()).unwrap();
    for op in [Op::Write, Op::Read] {
        let moved = stock.submit(op, &[range]).unwrap().wait(PATIENCE);
        assert_eq!(moved, TransferState::Completed);
    }
    for (_, bytes) in garbage() {
        say_tcp(&there.stranger(), &bytes);
        say_tcp(&there.data_stranger(), &bytes);
        say_unix(&exports_of(&there.extension()), &bytes);
    }
    drop(peers);
    // A peer that outlives the node that opened it.
    let opener = Side::new(4096);
    let kept = opener.node.open(there.node.name()).unwrap();
    drop(opener);
    assert!(kept.is_alive());
}

#[test]
fn closed_connections_peers_and_nodes_leave_no_descriptor_and_no_thread() {
    let here = Side::new(4096);
    let held = |folder: &str| std::fs::read_dir(folder).unwrap().count();
    let all = || (held("/proc/self/fd"), held("/proc/self/task"));
    let before = all();
    for _ in 0..ROUNDS {
        round(&here);
    }
    // Something may begin or end for good once, but not in each round.
    eventually("everything is given back", || {
        let now = all();
        now.0 < before.0 + ROUNDS / 4 && now.1 < before.1 + ROUNDS / 4
    });
}
