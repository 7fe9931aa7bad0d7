//! Calls that fail, devices that are lost, and stores that are dropped. Seen on a simulated GPU.

use std::time::Instant;

use kvferry_device::Error as DeviceError;
use kvferry_device::sim::{Fault, Live};
use kvferry_engine::{Error, OffloadMode, Producer, State, StoreError, StoreOptions};

use crate::bench::{Bench, Kind, MOMENT, PAGES, PATIENCE, done, key, options, shape, simulated};

#[test]
fn a_page_out_that_fails_is_not_stored_and_says_why_whichever_call_of_the_driver_fails() {
    for call in ["launch_compact", "copy_rows", "copy", "record", "store", "wait"] {
        for nth in 0..6 {
            let bench = simulated(shape(4096));
            let offload = if nth % 2 == 0 { OffloadMode::Direct } else { OffloadMode::Auto };
            let store = bench.store(StoreOptions { offload, ..options(&bench, 64) });
            bench.fill_all(|page| u64::from(page) + 1);
            bench.control().fail(call, nth, Fault::Refused);
            let mut model: Vec<u64> = (0..PAGES).map(|page| u64::from(page) + 1).collect();
            let mut undefined = Vec::new();
            let mut submitted = Vec::new();
            for page in [3, 9, 10] {
                let out = store.page_out(&[(page, key(page.into()))], None);
                let refused = out.is_err();
                assert!(store.contains(key(page.into())).is_ok());
                submitted.extend(out.ok().map(|batch| (page, batch)));
                if refused {
                    assert_eq!(
                        store.forget(key(page.into())),
                        Err(StoreError::NotStored { key: key(page.into()) })
                    );
                    continue;
                }
                match store.clear(&[page], None) {
                    Err(_) => {}
                    Ok(batch) => match store.wait(&batch, PATIENCE) {
                        Ok(State::Completed) => model[page as usize] = 0,
                        Ok(State::Failed(_)) => undefined.push(page),
                        other => panic!("{other:?}"),
                    },
                }
            }
            let mut failures = 0;
            for (page, batch) in submitted {
                let name = key(page.into());
                let seed = u64::from(page) + 1;
                match store.wait(&batch, PATIENCE).expect("here") {
                    State::Completed => {
                        let into = page + 20;
                        match store.page_in(&[(name, into)], None) {
                            Err(_) => {}
                            Ok(batch) => match store.wait(&batch, PATIENCE) {
                                Ok(State::Completed) => model[into as usize] = seed,
                                Ok(State::Failed(_)) => undefined.push(into),
                                other => panic!("{other:?}"),
                            },
                        }
                    }
                    State::Failed(why) => {
                        failures += 1;
                        assert_eq!(store.contains(name), Ok(false));
                        let refused = store.page_in(&[(name, 40)], None).err();
                        let error = Box::new(why);
                        assert_eq!(refused, Some(StoreError::PageOutFailed { key: name, error }));
                        store.forget(name).expect("what failed can be forgotten");
                    }
                    State::Running => panic!("it never ended"),
                }
            }
            bench.control().forget_failures();
            let drained = store.drain(PATIENCE);
            if failures > 0 {
                assert!(matches!(drained, Err(StoreError::Failed { .. })), "{drained:?}");
            }
            for page in (0..PAGES).filter(|page| !undefined.contains(page)) {
                assert!(bench.holds(page, model[page as usize]), "{call} {nth}: page {page}");
            }
            // Everything works again, and nothing was lost of the memory.
            assert!(matches!(store.reset(PATIENCE), Ok(())), "{call} {nth}");
            assert_eq!(store.statistics().expect("here").free_pages, 64, "{call} {nth}");
            let all: Vec<_> = (0..PAGES).map(|page| (page, key(page.into()))).collect();
            store.page_out(&all, None).expect("goes out");
            store.drain(PATIENCE).expect("all well");
        }
    }
}

#[test]
fn a_page_in_of_a_page_whose_page_out_fails_meanwhile_fails_with_it() {
    let bench = simulated(shape(4096));
    let offload = OffloadMode::Direct;
    let store =
        bench.store(StoreOptions { offload, longest_group: Some(1), ..options(&bench, 64) });
    let held = bench.hold();
    // The second of two DMAs fails, so the first one runs.
    bench.control().fail("copy_rows", 1, Fault::Refused);
    let out = store.page_out(&[(3, key(3)), (9, key(9))], None).expect("began");
    let back = store.page_in(&[(key(3), 20)], None).expect("began");
    drop(held);
    let State::Failed(why) = store.wait(&back, PATIENCE).expect("here") else {
        panic!("bytes that were never stored count as paged in")
    };
    assert_eq!(store.poll(&out), Ok(State::Failed(why.clone())));
    let failed = StoreError::Failed { operations: 2, error: Box::new(why) };
    assert_eq!(store.drain(PATIENCE), Err(failed));
    store.drain(PATIENCE).expect("it was said");
}

/// Page-outs are booked from the oldest on.
#[test]
fn a_page_whose_page_out_has_failed_goes_out_again_though_an_older_one_runs() {
    let bench = simulated(shape(4096));
    let store = bench.store(StoreOptions { offload: OffloadMode::Direct, ..options(&bench, 64) });
    let stream = bench.stream();
    stream.hold();
    // SAFETY: the stream lives longer than the submission.
    let after = Some(unsafe { Producer::stream(stream.handle()) });
    let older = store.page_out(&[(3, key(3))], after).expect("began");
    // The second of two DMAs fails, so the first one runs.
    bench.control().fail("copy_rows", 1, Fault::Refused);
    let pages = [(9, key(9)), (20, key(20))];
    store.page_out(&pages, None).expect("began");
    let start = Instant::now();
    let again = loop {
        match store.page_out(&pages, None) {
            // It runs, or so it says.
            Err(StoreError::AlreadyStored { .. }) if start.elapsed() < PATIENCE => {
                std::thread::yield_now();
            }
            other => break other,
        }
    };
    stream.open();
    done(&store, &again.expect("what has failed is not stored"));
    done(&store, &older);
}

#[test]
fn a_lost_device_fails_all_that_runs_and_its_memory_is_never_freed() {
    let bench = simulated(shape(4096));
    let store = bench.store(options(&bench, 64));
    let held = bench.hold();
    let out = store.page_out(&[(3, key(3)), (4, key(4))], None).expect("began");
    bench.control().lose();
    let State::Failed(Error::Device(DeviceError::Lost { .. })) =
        store.wait(&out, PATIENCE).expect("here")
    else {
        panic!("a lost device")
    };
    assert_eq!(store.contains(key(3)), Ok(false));
    let refused = store.page_out(&[(5, key(5))], None).err();
    assert!(
        matches!(refused, Some(StoreError::Engine(Error::Device(DeviceError::Lost { .. })))),
        "{refused:?}"
    );
    assert!(matches!(store.reset(PATIENCE), Err(StoreError::Failed { .. })));
    // The copies may still write there.
    assert_eq!(store.statistics().expect("here").ending_pages, 2);
    let (piece, _) = store.pieces().next().expect("a piece");
    drop(store);
    let registered = bench.engine.segment().regions.iter().any(|region| region.addr == piece);
    assert!(registered, "the memory of a lost device was freed");
    // So may those of the test's own memory.
    std::mem::forget(held);
    std::mem::forget(bench);
}

/// A page-in is behind the page-out on another queue of the device.
#[test]
fn a_page_in_behind_a_page_out_that_stalls_ends_with_it_and_the_store_can_be_dropped() {
    let knobs = [("MC_KVFERRY_STALL_TIMEOUT_SEC", "1"), ("MC_KVFERRY_UNREGISTER_TIMEOUT_SEC", "0")];
    let bench = Bench::open_with(Kind::Sim, shape(4096), &knobs).expect("always there");
    let store = bench.store(options(&bench, 64));
    let held = bench.hold();
    let out = store.page_out(&[(3, key(3))], None).expect("began");
    let back = store.page_in(&[(key(3), 20)], None).expect("began");
    for batch in [back, out] {
        let state = store.wait(&batch, PATIENCE).expect("here");
        let stalled = matches!(state, State::Failed(Error::Device(DeviceError::Stalled { .. })));
        assert!(stalled, "{state:?}");
    }
    let (told, dropped) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(store);
        told.send(()).expect("somebody waits");
    });
    dropped.recv_timeout(PATIENCE).expect("the store ends");
    // The copies may still use it.
    std::mem::forget(held);
    std::mem::forget(bench);
}

/// A device takes four page-ins by the kernel that wait for page-outs. Nobody else asks after these.
#[test]
fn a_call_that_waits_for_room_behind_a_page_out_that_stalls_ends_with_it() {
    let knobs = [("MC_KVFERRY_STALL_TIMEOUT_SEC", "1"), ("MC_KVFERRY_UNREGISTER_TIMEOUT_SEC", "0")];
    let bench = Bench::open_with(Kind::Sim, shape(4096), &knobs).expect("always there");
    let by_kernel = StoreOptions { offload: OffloadMode::Kernel, ..options(&bench, 64) };
    let store = bench.store(by_kernel);
    bench.control().hold();
    let [one, two, three] = [(3, key(3)), (9, key(9)), (20, key(20))];
    store.page_out(&[one, two, three], None).expect("began");
    let (told, called) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let back = [(one.1, 30), (two.1, 37), (three.1, 25)];
        let refused = (0..8).find_map(|_| store.page_in(&back, None).err());
        told.send(refused).expect("somebody waits");
    });
    let refused = called.recv_timeout(PATIENCE).expect("the call waits for ever");
    let stalled =
        matches!(refused, Some(StoreError::Engine(Error::Device(DeviceError::Stalled { .. }))));
    assert!(stalled, "{refused:?}");
    // The copies may still use it.
    std::mem::forget(bench);
}

#[test]
fn a_store_that_is_dropped_waits_for_its_copies_and_frees_everything() {
    let bench = simulated(shape(4096));
    let live = |what| bench.control().live(what);
    bench.fill_all(|page| u64::from(page) + 1);
    // The engine's own queues are there from the first copy of each direction on.
    let first = bench.store(options(&bench, 64));
    first.page_out(&[(3, key(3))], None).expect("goes out");
    first.page_in(&[(key(3), 3)], None).expect("comes in");
    drop(first);
    let before = (live(Live::HostMappings), live(Live::Allocations));
    let store = bench.store(options(&bench, 64));
    assert_eq!(live(Live::HostMappings), before.0 + 1, "locked when it is made");
    let held = bench.hold();
    store.page_out(&[(3, key(3))], None).expect("goes out");
    store.page_in(&[(key(3), 20)], None).expect("comes in");
    std::thread::scope(|scope| {
        let dropped = scope.spawn(move || drop(store));
        std::thread::sleep(MOMENT);
        assert!(!dropped.is_finished(), "copies still run");
        drop(held);
        dropped.join().expect("no panic");
    });
    bench.check(20, 4);
    assert_eq!((live(Live::HostMappings), live(Live::Allocations)), before);
}

#[test]
fn b49_a_fork_is_refused_at_once_and_harms_nothing() {
    let bench = simulated(shape(4096));
    let store = bench.store(options(&bench, 16));
    bench.fill_all(|page| u64::from(page) + 1);
    store.page_out(&[(3, key(3))], None).expect("goes out");
    // A lock that the child inherits held would stop it.
    let owner = std::process::id();
    // SAFETY: the child calls nothing but the store's methods, which look at the process first, and
    // ends without running what the parent's other threads left.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = |error: Option<StoreError>| error == Some(StoreError::OtherProcess { owner });
        let all = refused(store.page_out(&[(4, key(4))], None).err())
            && refused(store.page_in(&[(key(3), 4)], None).err())
            && refused(store.clear(&[4], None).err())
            && refused(store.contains(key(3)).err())
            && refused(store.forget(key(3)).err())
            && refused(store.drain(PATIENCE).err())
            && refused(store.reset(PATIENCE).err())
            && refused(store.statistics().err());
        drop(store);
        // SAFETY: it ends this process.
        unsafe { libc::_exit(if all { 42 } else { 1 }) };
    }
    assert!(child > 0);
    let mut status = 0;
    // SAFETY: the child above.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 42));
    let batch = store.page_in(&[(key(3), 30)], None).expect("comes in");
    done(&store, &batch);
    bench.check(30, 4);
}
