//! Registering and unregistering the same memory from several threads, while something uses it.

mod common;

use std::sync::Arc;

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
