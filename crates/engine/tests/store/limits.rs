//! What bounds a store: copies, bytes in flight, memory, and what its options may be. Seen on a
//! simulated GPU, which can be held.

use kvferry_device::sim::{Fault, Live, SimOptions, sim};
use kvferry_engine::{
    Engine, Error, OffloadMode, PageShape, PageStore, StoreError, StoreOptions, WhenFull,
};

use crate::bench::{Bench, Kind, MOMENT, PATIENCE, key, options, shape, simulated};
use crate::common::config;

#[test]
fn neighbours_are_one_copy_each_way_and_single_pages_one_each() {
    let bench = simulated(shape(4096));
    let offload = OffloadMode::Direct;
    let store =
        bench.store(StoreOptions { offload, longest_group: Some(8), ..options(&bench, 64) });
    let copies = || bench.control().calls("copy_rows");
    let start = copies();
    store
        .page_out(&(8..16).map(|page| (page, key(page.into()))).collect::<Vec<_>>(), None)
        .expect("goes out");
    assert_eq!(copies() - start, 1, "eight neighbours");
    store.page_out(&[20, 22, 24].map(|page| (page, key(page.into()))), None).expect("goes out");
    assert_eq!(copies() - start, 4, "three alone");
    let back = [9, 10, 11].map(|from| (key(from), from as u32 + 21));
    store.page_in(&back, None).expect("comes in");
    assert_eq!(copies() - start, 5, "three neighbours of a group");
    store.page_in(&[(key(12), 40), (key(20), 41)], None).expect("comes in");
    assert_eq!(copies() - start, 7, "two of different groups");
    store.drain(PATIENCE).expect("all well");
}

#[test]
fn what_is_in_flight_is_bounded_and_the_caller_chooses_what_happens_then() {
    let bench = simulated(shape(4096));
    let page = bench.page_bytes();
    let refuse = StoreOptions { in_flight_bytes: 4 * page, ..options(&bench, 64) };
    let store = bench.store(refuse);
    let held = bench.hold();
    let out = |first: u32, count: u32| {
        let pages: Vec<_> = (first..first + count).map(|page| (page, key(page.into()))).collect();
        store.page_out(&pages, None)
    };
    out(0, 3).expect("fits");
    let full = out(3, 2);
    let Err(StoreError::Full { in_flight, bytes, limit, .. }) = full else { panic!("{full:?}") };
    assert_eq!((in_flight, bytes, limit), (3 * page, 2 * page, 4 * page));
    assert_eq!(store.contains(key(3)), Ok(false));
    out(3, 1).expect("fits");
    drop(held);
    store.drain(PATIENCE).expect("all well");
    out(5, 20).expect("one call alone may have more");
    drop(store);
    let wait = WhenFull::Wait(MOMENT);
    let store = bench.store(StoreOptions { when_full: wait, ..refuse });
    let held = bench.hold();
    store.page_out(&[0, 1, 2, 3].map(|page| (page, key(page.into()))), None).expect("fits");
    let full = store.page_out(&[(4, key(4))], None);
    assert!(matches!(full, Err(StoreError::Full { waited, .. }) if waited >= MOMENT), "{full:?}");
    drop(held);
    store.drain(PATIENCE).expect("all well");
    drop(store);
    // One that waits goes on as soon as copies end.
    let wait = WhenFull::Wait(PATIENCE);
    let store = bench.store(StoreOptions { when_full: wait, ..refuse });
    let held = bench.hold();
    store.page_out(&[0, 1, 2, 3].map(|page| (page, key(page.into()))), None).expect("fits");
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| store.page_out(&[(4, key(4))], None));
        std::thread::sleep(MOMENT);
        assert!(!waits.is_finished());
        // Others are not held up meanwhile.
        assert_eq!(store.contains(key(1)), Ok(true));
        store.page_in(&[(key(1), 9)], None).expect("comes in");
        drop(held);
        waits.join().expect("no panic").expect("goes out");
    });
    store.drain(PATIENCE).expect("all well");
}

#[test]
fn memory_that_copies_still_use_is_waited_for_or_refused_and_never_reused_before() {
    let bench = simulated(shape(4096));
    let store = bench.store(options(&bench, 1));
    bench.fill_all(|page| u64::from(page) + 1);
    let held = bench.hold();
    store.page_out(&[(0, key(0))], None).expect("goes out");
    store.page_in(&[(key(0), 10)], None).expect("comes in");
    store.forget(key(0)).expect("there");
    assert_eq!(store.forget(key(0)), Err(StoreError::NotStored { key: key(0) }));
    let spent = store.page_out(&[(1, key(1))], None);
    let Err(StoreError::BudgetSpent { free: 0, ending: 1, .. }) = spent else {
        panic!("{spent:?}")
    };
    drop(held);
    store.drain(PATIENCE).expect("all well");
    store.page_out(&[(1, key(1))], None).expect("there is room");
    bench.check(10, 1);
}

#[test]
fn b48_a_piece_that_is_refused_takes_all_others_back_and_says_what_to_do() {
    let bench = simulated(shape(4096));
    let slot = bench.page_bytes();
    let options = StoreOptions { piece_bytes: 10 * slot, ..options(&bench, 45) };
    let regions = bench.engine.segment().regions.len();
    for piece in 0..5 {
        bench.control().fail("map_host", piece, Fault::OutOfMemory);
        let refused = PageStore::new(&bench.engine, 0, bench.shape, options).err();
        bench.control().forget_failures();
        let Some(StoreError::NotPinned { piece: which, pieces: 5, bytes, budget, .. }) = &refused
        else {
            panic!("{refused:?}")
        };
        assert_eq!(*which as u64, piece);
        assert_eq!((*bytes, *budget), (if piece == 4 { 5 } else { 10 } * slot, 45 * slot));
        let said = refused.as_ref().expect("refused").to_string();
        for what in ["sim:0", "ulimit -l", &bytes.to_string(), "make the store smaller"] {
            assert!(said.contains(what), "{what} in {said}");
        }
        assert_eq!(bench.control().live(Live::HostMappings), 0);
        assert_eq!(bench.engine.segment().regions.len(), regions);
    }
    let store = PageStore::new(&bench.engine, 0, bench.shape, options).expect("a store");
    assert_eq!(store.pieces().count(), 5);
    assert_eq!(bench.control().live(Live::HostMappings), 5);
    assert_eq!(bench.engine.pinned_account().used(), 45 * slot);
}

#[test]
fn pieces_beyond_the_budget_of_the_engine_are_refused_and_given_back() {
    let bench = Bench::open_with(Kind::Sim, shape(4096), &[("MC_KVFERRY_PINNED_MB", "1")]);
    let bench = bench.expect("always there");
    let (slot, account) = (bench.page_bytes(), bench.engine.pinned_account());
    // Fifty-one pages fit.
    let options = StoreOptions { piece_bytes: 10 * slot, ..options(&bench, 60) };
    let refused = PageStore::new(&bench.engine, 0, bench.shape, options).err();
    let Some(StoreError::NotPinned { piece: 5, error, .. }) = &refused else {
        panic!("{refused:?}")
    };
    assert!(matches!(**error, Error::PinnedBudget { .. }), "{error}");
    assert_eq!((account.used(), bench.control().live(Live::HostMappings)), (0, 0));
    let fits = StoreOptions { budget_bytes: 51 * slot, ..options };
    let store = PageStore::new(&bench.engine, 0, bench.shape, fits).expect("a store");
    assert_eq!(account.used(), 51 * slot);
    drop(store);
    assert_eq!(account.used(), 0);
}

#[test]
fn options_and_engines_that_make_no_store_are_refused_by_name() {
    let bench = simulated(shape(4096));
    let slot = bench.page_bytes();
    let good = options(&bench, 4);
    let made = |options| PageStore::new(&bench.engine, 0, bench.shape, options).err();
    for (bad, name) in [
        (StoreOptions { budget_bytes: slot - 1, ..good }, "budget_bytes"),
        (StoreOptions { budget_bytes: u64::MAX, ..good }, "budget_bytes"),
        (StoreOptions { piece_bytes: slot - 1, ..good }, "piece_bytes"),
        (StoreOptions { piece_bytes: (64 << 30) + 1, ..good }, "piece_bytes"),
        (StoreOptions { longest_group: Some(3), ..good }, "longest_group"),
        (StoreOptions { longest_group: Some(128), ..good }, "longest_group"),
    ] {
        let refused = made(bad);
        let Some(StoreError::BadOption { option, .. }) = &refused else { panic!("{refused:?}") };
        assert_eq!(*option, name);
    }
    let none = PageStore::new(&bench.engine, 2, bench.shape, good).err();
    assert!(matches!(none, Some(StoreError::BadOption { option: "device", .. })), "{none:?}");
    let shape = PageShape { page_bytes: 5000, ..bench.shape };
    let bad = PageStore::new(&bench.engine, 0, shape, good).err();
    assert!(matches!(bad, Some(StoreError::BadShape { .. })), "{bad:?}");
    // Pages that are not registered are found out by the first call.
    let shape = PageShape { addr: 4096, ..bench.shape };
    let store = PageStore::new(&bench.engine, 0, shape, good).expect("a store");
    let refused = store.page_out(&[(0, key(0))], None).err();
    assert!(matches!(refused, Some(StoreError::Engine(Error::Form(_)))), "{refused:?}");
    assert_eq!(store.statistics().expect("here").free_pages, 4);
    let (device, _) = sim(&SimOptions { ordinal: 1, ..SimOptions::default() }).expect("there");
    let without = Engine::new(config(&[]), vec![device]).expect("an engine");
    let refused = PageStore::new(&without, 0, bench.shape, good).err();
    assert_eq!(refused, Some(StoreError::NoHostMemory));
}
