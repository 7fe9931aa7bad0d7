//! Mooncake's TCP transport on a GPU's memory, which goes over in chunks. The GPU is simulated.

mod common;

use std::sync::Arc;

use common::{PATIENCE, Side};
use kvferry_device::sim::{Fault, SimControl, SimOptions, sim};
use kvferry_engine::{Config, Engine, Op, Range};
use kvferry_node::{Node, NodeOptions, TransferError, TransferState};

const BYTES: u64 = 2 << 20;

/// Bytes on both sides of a chunk's, and of none.
const LENS: [u64; 5] = [1, 255, 256 << 10, (256 << 10) + 1, 700_003];

fn gpu_side() -> (Side, Arc<SimControl>) {
    let (device, control) = sim(&SimOptions::default()).unwrap();
    let engine = Engine::new(Config::default(), vec![device]).unwrap();
    let buffer = engine.allocate(&engine.devices()[0], BYTES).unwrap();
    let node = Node::start(Arc::clone(&engine), &NodeOptions::default()).unwrap();
    (Side { buffer, engine, node }, control)
}

fn bytes(side: &Side) -> Vec<u8> {
    let mut bytes = vec![0; BYTES as usize];
    side.buffer.read(0, &mut bytes).unwrap();
    bytes
}

/// Moves `[(local, remote, len)]`, offsets in the two buffers.
fn transfer(here: &Side, there: &Side, op: Op, pieces: &[(u64, u64, u64)]) -> TransferState {
    let peer = here.node.open_mooncake(there.node.name()).unwrap();
    let (local, remote) = (here.buffer.addr(), there.buffer.addr());
    let range = |&(at, to, len): &_| Range { local: local + at, remote: remote + to, len };
    let ranges: Vec<_> = pieces.iter().map(range).collect();
    peer.submit(op, &ranges).unwrap().wait(PATIENCE)
}

/// FAILURES.md B46.
#[test]
fn memory_of_a_gpu_is_served_and_moved_both_ways() {
    let ((gpu, _control), host) = (gpu_side(), Side::new(BYTES));
    let pattern: Vec<u8> = (0..BYTES).map(|at| (at % 251) as u8).collect();
    let mut next = 0;
    let pieces = LENS.map(|len| {
        let at = next;
        next += len + 9;
        (at + 3, at + 7, len)
    });
    for (here, there) in [(&host, &gpu), (&gpu, &host)] {
        for op in [Op::Write, Op::Read] {
            let (source, destination) = if op == Op::Write { (here, there) } else { (there, here) };
            source.buffer.write(0, &pattern).unwrap();
            destination.buffer.write(0, &[0xee; BYTES as usize]).unwrap();
            assert_eq!(transfer(here, there, op, &pieces), TransferState::Completed);
            let mut expected = vec![0xee; BYTES as usize];
            for (local, remote, len) in pieces {
                let (from, to) = if op == Op::Write { (local, remote) } else { (remote, local) };
                let (from, to, len) = (from as usize, to as usize, len as usize);
                expected[to..to + len].copy_from_slice(&pattern[from..from + len]);
            }
            let device = here.engine.devices()[0].info().to_string();
            assert!(bytes(destination) == expected, "{op:?} by {device}");
            assert!(bytes(source) == pattern, "{op:?} by {device}");
        }
    }
}

#[test]
fn a_copy_that_fails_on_the_gpu_fails_its_transfer_alone() {
    let ((gpu, control), host) = (gpu_side(), Side::new(BYTES));
    let pieces = [(0, 0, 600_000)];
    for (here, there) in [(&host, &gpu), (&gpu, &host)] {
        for op in [Op::Write, Op::Read] {
            let to_gpu = (op == Op::Write) == std::ptr::eq(there, &gpu);
            // Of the second chunk: the first is in its place by then.
            control.fail(if to_gpu { "write" } else { "read" }, 1, Fault::Refused);
            let TransferState::Failed(error) = transfer(here, there, op, &pieces) else {
                panic!("{op:?} to the GPU {to_gpu}: it did not fail")
            };
            let by_device = matches!(error, TransferError::Device { index: 0, .. });
            assert_eq!(by_device, std::ptr::eq(here, &gpu), "{error:?}");
            assert_eq!(transfer(here, there, op, &pieces), TransferState::Completed);
        }
    }
    assert_eq!(gpu.node.rejected(), 0, "its own failures are nobody else's");
}
