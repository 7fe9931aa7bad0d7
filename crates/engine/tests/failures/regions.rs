//! Registering and unregistering.

use std::sync::{Arc, Barrier};

use kvferry_device::Memory;
use kvferry_device::sim::Fault;
use kvferry_engine::{Buffer, Error, Op, Range, RangeError, State};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

use crate::support::{direct, engine_on, host_pair, simulated};

#[test]
fn b08_one_allocation_is_exported_once_however_many_views_are_registered() {
    let (device, control) = simulated(0);
    let engine = engine_on(vec![device.clone()]);
    let memory = Arc::clone(&device).allocate(10_000 * 4096).expect("memory");
    let view = |at: u64| memory.addr() + at * 4096;
    for at in 0..10_000 {
        // SAFETY: unregistered before `memory` is dropped.
        unsafe { engine.register(view(at), 4096) }.expect("registers");
    }
    assert_eq!(control.calls("export"), 1);
    let key = engine.segment().allocations[0].key;
    for _ in 0..10_000 {
        engine.export(key).expect("hands out");
    }
    assert_eq!(control.calls("export"), 1, "peers get the export that was made once");
    (0..10_000).for_each(|at| engine.unregister(view(at)).expect("idle"));
    assert!(matches!(engine.export(key), Err(Error::UnknownAllocation { .. })));
}

#[test]
fn b33_a_region_that_is_registered_twice_is_refused_and_nothing_is_freed_twice() {
    let (_, engine, host) = host_pair();
    let memory = Arc::clone(&host).allocate(64 << 10).expect("memory");
    let (addr, len) = (memory.addr(), 32 << 10);
    // SAFETY: everything is unregistered before `memory` is dropped.
    let register = |addr, len| unsafe { engine.register(addr, len) };
    let twice = |new_addr: u64, new_len: u64| {
        Err(Error::AlreadyRegistered { addr: new_addr, len: new_len, start: addr, region: len })
    };
    assert_eq!(register(addr, len), Ok(()));
    assert_eq!(register(addr, len), twice(addr, len));
    assert_eq!(register(addr + 4096, 2048), twice(addr + 4096, 2048));
    assert_eq!(register(addr + len - 1, 2), twice(addr + len - 1, 2));
    assert_eq!(engine.unregister(addr), Ok(()));
    assert_eq!(engine.unregister(addr), Err(Error::UnknownRegion { addr }));
    assert_eq!(engine.unregister(addr + 1), Err(Error::UnknownRegion { addr: addr + 1 }));
    // Two threads at once: one wins.
    for _ in 0..100 {
        let barrier = Barrier::new(2);
        let wins = std::thread::scope(|scope| {
            let racers: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        barrier.wait();
                        register(addr, len).is_ok()
                    })
                })
                .collect();
            racers.into_iter().filter_map(|racer| racer.join().ok()).filter(|&won| won).count()
        });
        assert_eq!(wins, 1);
        assert_eq!(engine.unregister(addr), Ok(()));
    }
    assert_eq!(engine.segment().allocations, []);
}

#[test]
fn b34_a_list_of_regions_is_registered_whole_or_not_at_all() {
    let (device, control) = simulated(0);
    let engine = engine_on(vec![device.clone()]);
    let memories: Vec<Memory> =
        (0..10).map(|_| Arc::clone(&device).allocate(4096).expect("memory")).collect();
    let list: Vec<_> = memories.iter().map(|memory| (memory.addr(), 4096)).collect();
    control.fail("export", 6, Fault::Refused);
    // SAFETY: unregistered before the memories are dropped.
    let failed = unsafe { engine.register_all(&list) };
    assert!(matches!(&failed, Err(Error::RegionOfList { index: 6, .. })), "{failed:?}");
    assert_eq!(engine.segment().regions, []);
    // SAFETY: as above.
    unsafe { engine.register_all(&list) }.expect("works now");
    assert_eq!(engine.segment().regions.len(), 10);
    list.iter().for_each(|&(addr, _)| engine.unregister(addr).expect("idle"));
}

#[test]
fn b36_ten_thousand_views_register_and_unregister_in_any_order_with_one_export() {
    let (device, control) = simulated(0);
    let engine = engine_on(vec![device.clone()]);
    let memory = Arc::clone(&device).allocate(10_000 * 200_000).expect("memory");
    let mut views: Vec<u64> = (0..10_000).map(|at| memory.addr() + at * 200_000).collect();
    let mut random = SmallRng::seed_from_u64(1);
    for round in 0..9u64 {
        for &view in &views {
            // SAFETY: unregistered below, before `memory` is dropped.
            unsafe { engine.register(view, 200_000) }.expect("registers");
        }
        assert_eq!(control.calls("export"), round + 1);
        match round % 3 {
            0 => {}
            1 => views.reverse(),
            _ => views.shuffle(&mut random),
        }
        views.iter().for_each(|&view| engine.unregister(view).expect("idle"));
    }
}

#[test]
fn unregistering_waits_for_batches_in_flight_and_new_ones_do_not_find_the_region() {
    let (device, control) = simulated(0);
    let engine = engine_on(vec![device.clone()]);
    let (used, other) = (
        engine.allocate(&device, 8192).expect("memory"),
        engine.allocate(&device, 8192).expect("memory"),
    );
    let target = direct(&engine, &engine);
    let range =
        |buffer: &Buffer| Range { local: buffer.addr(), remote: buffer.addr() + 4096, len: 4096 };
    control.hold();
    let id = engine.submit(&target, Op::Write, &[range(&used)]).expect("submits");
    // A region that no batch uses goes at once.
    engine.unregister(other.addr()).expect("idle");
    std::thread::scope(|scope| {
        let unregister = scope.spawn(|| engine.unregister(used.addr()));
        while !engine.segment().regions.is_empty() {
            std::thread::yield_now();
        }
        assert!(matches!(
            engine.submit(&target, Op::Write, &[range(&used)]),
            Err(Error::Range(RangeError::NotRegistered { .. }))
        ));
        assert!(!unregister.is_finished(), "it returned while a batch was running");
        control.release();
        unregister.join().expect("no panic").expect("the batch ended");
    });
    assert_eq!(engine.poll(id).map(|status| status.state), Ok(State::Completed));
    // The buffers' own unregistration finds nothing; free what they leaked.
    for buffer in [&used, &other] {
        // SAFETY: the memory is theirs for the rest of the process.
        unsafe { engine.register(buffer.addr(), 8192) }.expect("registers again");
    }
}
