//! The host's work for a batch allocates as often for a hundred pieces as for a hundred thousand, and hardly
//! at all.

mod common;

use std::sync::Arc;
use std::time::Duration;

use kvferry_engine::{Config, Copies, Engine, Op, Paged, Pages, Range, State, Strided, Target};

use common::NoExports;

/// Allocations of this thread from the submission to the batch's end.
fn allocations(engine: &Engine, target: &Target, copies: Copies<'_>) -> u64 {
    allocation_counter::measure(|| {
        let id = engine.submit(target, Op::Write, copies).expect("submits");
        let status = engine.wait(id, Duration::from_secs(60)).expect("known");
        assert_eq!(status.state, State::Completed);
        engine.release(id).expect("it ended");
    })
    .count_total
}

#[test]
fn a_batch_allocates_no_more_for_more_pieces() {
    // Not the simulated GPU, which allocates for every call that it counts.
    let device = kvferry_device::host().expect("always there");
    let open = || Engine::new(Config::default(), vec![Arc::clone(&device)]).expect("an engine");
    let (engine, peer) = (open(), open());
    const LEN: u64 = 64 << 20;
    let local = engine.allocate(&device, LEN).expect("memory");
    let remote = peer.allocate(&device, LEN).expect("memory");
    let target = engine.open("peer", peer.segment(), Arc::new(NoExports)).expect("opens");
    let scattered = |count: u64| -> Vec<Range> {
        let place = |at: u64| {
            let slot = at * 7919 % count;
            let (local, remote) = (local.addr() + slot * 128, remote.addr() + at * 31 % count * 64);
            Range { local, remote, len: 64 }
        };
        (0..count).map(place).collect()
    };
    let strided = |count| {
        [Strided {
            local: local.addr(),
            remote: remote.addr(),
            len: 16,
            count,
            local_stride: 64,
            remote_stride: 32,
        }]
    };
    let numbers: Vec<u32> = (0..10_000).rev().collect();
    let paged = |count: usize| {
        let end = |addr| Pages::whole(addr, &numbers[..count], 64, 64 * 10_000);
        [Paged::whole_pages(end(local.addr()), end(remote.addr()), 4, 64)]
    };
    let (few, many) = (scattered(1000), scattered(100_000));
    // A launch, and so a piece of deferred work, takes 8192 descriptors.
    let launches = 100_000 / 8192 + 1;
    // What is kept from one batch to the next has grown to its size after the largest.
    for _ in 0..2 {
        allocations(&engine, &target, (&many).into());
        allocations(&engine, &target, (&paged(10_000)).into());
    }
    let least = allocations(&engine, &target, (&few).into());
    let most = allocations(&engine, &target, (&many).into());
    assert!(most <= least + launches, "{least} for 1000 ranges, {most} for 100,000");
    assert!(
        least < 8,
        "{least} allocations for a batch: what is known of one part has none of its own"
    );
    let few = allocations(&engine, &target, (&strided(100)).into());
    let many = allocations(&engine, &target, (&strided(1_000_000)).into());
    assert_eq!(few, many, "allocations of a strided form");
    let few = allocations(&engine, &target, (&paged(10)).into());
    let many = allocations(&engine, &target, (&paged(10_000)).into());
    assert_eq!(few, many, "allocations of a paged form");
    assert!(few < 4, "{few} allocations for a form");
}
