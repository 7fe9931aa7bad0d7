//! Registering and unregistering the same memory from several threads, while something uses it.

mod common;

use std::sync::Arc;

use kvferry_device::sim::{Live, SimOptions, sim};
use kvferry_device::{Device, Memory};
use kvferry_engine::{Engine, Error};

use common::config;

const LEN: u64 = 64 << 10;

fn memory_and_engine(unregister_timeout: &str) -> (Memory, Arc<Engine>) {
    let host: Arc<dyn Device> = kvferry_device::host().expect("always there");
    let memory = Arc::clone(&host).allocate(LEN).expect("memory");
    let knobs = [("MC_KVFERRY_UNREGISTER_TIMEOUT_SEC", unregister_timeout)];
    (memory, Engine::new(config(&knobs), vec![host]).expect("an engine"))
}

/// Until the region is withdrawn, or `unregister` has ended.
fn wait_for_the_withdrawal<T>(engine: &Engine, unregister: &std::thread::ScopedJoinHandle<'_, T>) {
    while engine.statistics().regions > 0 && !unregister.is_finished() {
        std::thread::yield_now();
    }
}

#[test]
fn memory_is_not_registered_again_until_its_unregistering_is_over() {
    for (timeout, ends) in [("60", true), ("1", false)] {
        let (memory, engine) = memory_and_engine(timeout);
        let addr = memory.addr();
        // SAFETY: everything is unregistered before the memory is dropped.
        let register = |addr, len| unsafe { engine.register(addr, len) };
        register(addr, LEN).expect("it is there");
        let lease = engine.lease(addr, 1).expect("registered");
        let beside = |addr, len| {
            Err(Error::AlreadyRegistered { addr, len, start: memory.addr(), region: LEN })
        };
        let ended = std::thread::scope(|scope| {
            let unregister = scope.spawn(|| engine.unregister(addr));
            wait_for_the_withdrawal(&engine, &unregister);
            let refused: Vec<_> = [(addr, LEN), (addr + LEN - 1, 1), (addr + 7, 8)]
                .map(|(addr, len)| (register(addr, len), beside(addr, len)))
                .into();
            if ends {
                drop(lease);
            }
            let ended = unregister.join().expect("no panic");
            refused.iter().for_each(|(refused, expected)| assert_eq!(refused, expected));
            ended
        });
        assert_eq!(engine.statistics().regions, u64::from(!ends));
        if ends {
            assert_eq!(ended, Ok(()));
            assert_eq!(register(addr, LEN), Ok(()));
        } else {
            assert!(matches!(ended, Err(Error::RegionBusy { .. })), "{ended:?}");
            assert_eq!(register(addr, LEN), beside(addr, LEN), "it is back");
        }
        assert_eq!(engine.unregister(addr), Ok(()));
        assert_eq!(register(addr + 64, 64), Ok(()));
        assert_eq!(engine.unregister(addr + 64), Ok(()));
    }
}

#[test]
fn a_list_that_fails_says_which_regions_before_it_stay_because_something_uses_them() {
    let (memory, engine) = memory_and_engine("0");
    let addr = memory.addr();
    let regions = LEN / 256;
    let used = addr + 7 * 256;
    let mut list: Vec<_> = (0..regions).map(|at| (addr + at * 256, 256)).collect();
    list.push((addr, 0));
    loop {
        // SAFETY: all of them are unregistered before the memory is dropped.
        let register = || unsafe { engine.register_all(&list) };
        let (failed, lease) = std::thread::scope(|scope| {
            let register = scope.spawn(register);
            let mut lease = engine.lease(used, 1);
            while lease.is_none() && !register.is_finished() {
                std::thread::yield_now();
                lease = engine.lease(used, 1);
            }
            (register.join().expect("no panic"), lease)
        });
        let stay: Vec<_> = lease.iter().map(|_| used).collect();
        assert_eq!(engine.statistics().regions, stay.len() as u64);
        let error = Box::new(Error::BadRegion { addr, len: 0 });
        let index = regions as usize;
        assert_eq!(failed, Err(Error::RegionOfList { index, error, stay }));
        // If the list had failed before the lease, once more.
        if lease.is_some() {
            let said = failed.expect_err("as above").to_string();
            assert!(said.contains("of 0 bytes") && said.contains(&format!("{used:#x}")), "{said}");
            drop(lease);
            assert_eq!(engine.unregister(used), Ok(()));
            return;
        }
    }
}

#[test]
fn memory_is_freed_when_nobody_uses_it_and_not_before() {
    for unregistered in [false, true] {
        let (device, control) = sim(&SimOptions::default()).expect("always there");
        let knobs = [("MC_KVFERRY_UNREGISTER_TIMEOUT_SEC", "0")];
        let engine = Engine::new(config(&knobs), vec![device.clone()]).expect("an engine");
        let before = control.live(Live::Allocations);
        let buffer = engine.allocate(&device, LEN).expect("memory");
        let addr = buffer.addr();
        let lease = engine.lease(addr, 1).expect("registered");
        let (buffer, busy) = *buffer.free().expect_err("it is leased");
        assert!(matches!(busy, Error::RegionBusy { .. }), "{busy:?}");
        assert_eq!(engine.statistics().regions, 1, "it is as it was");
        assert_eq!(control.live(Live::Allocations), before + 1);
        drop(lease);
        if unregistered {
            assert_eq!(engine.unregister(addr), Ok(()));
        }
        assert!(buffer.free().is_ok());
        assert_eq!(engine.statistics().regions, 0);
        assert_eq!(control.live(Live::Allocations), before, "unregistered: {unregistered}");
    }
}

#[test]
fn all_regions_are_ended_together_and_those_that_other_threads_are_ending_with_them() {
    let (memory, engine) = memory_and_engine("60");
    let [first, second] = [memory.addr(), memory.addr() + LEN / 2];
    for addr in [first, second] {
        // SAFETY: everything is unregistered before the memory is dropped.
        unsafe { engine.register(addr, LEN / 2) }.expect("it is there");
    }
    let leases = [first, second].map(|addr| engine.lease(addr, 1).expect("registered"));
    std::thread::scope(|scope| {
        let one = scope.spawn(|| engine.unregister(first));
        while engine.statistics().regions > 1 {
            std::thread::yield_now();
        }
        let twice = engine.unregister(first);
        assert!(matches!(twice, Err(Error::RegionBusy { .. })), "its memory is in use: {twice:?}");
        let all = scope.spawn(|| engine.unregister_all());
        wait_for_the_withdrawal(&engine, &all);
        let [of_first, of_second] = leases;
        drop(of_second);
        // Until the second one is over, whose memory may be registered again then.
        // SAFETY: as above.
        while unsafe { engine.register(second, LEN / 2) }.is_err() {
            std::thread::yield_now();
        }
        assert!(!all.is_finished(), "the first is in use");
        drop(of_first);
        assert_eq!(one.join().expect("no panic"), Ok(()));
        assert_eq!(all.join().expect("no panic"), Ok(()));
    });
    assert_eq!(engine.unregister_all(), Ok(()));
    assert_eq!(engine.statistics().regions, 0);
}

#[test]
fn regions_that_stay_in_use_are_waited_for_once_and_found_by_nobody_afterwards() {
    let (memory, engine) = memory_and_engine("1");
    let addrs: Vec<_> = (0..16).map(|at| memory.addr() + at * 256).collect();
    // SAFETY: the memory outlives the engine.
    addrs.iter().for_each(|&addr| unsafe { engine.register(addr, 256) }.expect("it is there"));
    let leases: Vec<_> = addrs.iter().map(|&addr| engine.lease(addr, 1)).collect();
    let Err(Error::RegionBusy { waited, .. }) = engine.unregister_all() else {
        panic!("they are leased")
    };
    // Each by itself would take 16 seconds.
    assert!(waited < std::time::Duration::from_secs(8), "{waited:?}");
    assert_eq!(engine.statistics().regions, 0);
    assert!(engine.lease(addrs[0], 1).is_none());
    drop(leases);
    assert_eq!(engine.unregister_all(), Ok(()), "nobody uses them any more");
}
