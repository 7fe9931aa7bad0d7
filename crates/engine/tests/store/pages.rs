//! Pages go out, are cleared and come back, on every kind of device.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use kvferry_engine::{
    OffloadMode, PageBatch, PageKey, PageShape, SegmentRegion, StoreError, StoreOptions, WhenFull,
};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::bench::{Bench, Kind, LAYERS, PAGES, PATIENCE, done, key, options, shape};

pub(crate) fn pages_go_out_are_cleared_and_come_back_wherever_they_are_wanted(kind: Kind) {
    let Some(bench) = Bench::open(kind, shape(4096)) else { return };
    for offload in OffloadMode::ALL {
        let store = bench.store(StoreOptions { offload, ..options(&bench, 64) });
        bench.fill_all(|page| page.into());
        // Runs, single pages, in any order.
        let out: Vec<u32> = vec![9, 3, 4, 5, 6, 7, 8, 30, 11, 40, 41, 42];
        let pages: Vec<_> = out.iter().map(|&page| (page, key(page.into()))).collect();
        store.page_out(&pages, None).expect("goes out");
        store.clear(&out, None).expect("clears");
        store.drain(PATIENCE).expect("all well");
        bench.check_all(|page| if out.contains(&page) { 0 } else { page.into() });
        // Neighbours of the store to neighbours here, and others.
        let back = [(3, 20), (4, 21), (5, 22), (8, 3), (9, 4), (41, 0), (30, 47)];
        let pages: Vec<_> = back.map(|(from, to)| (key(from), to)).into();
        let batch = store.page_in(&pages, None).expect("comes in");
        done(&store, &batch);
        bench.check_all(|page| match back.iter().find(|&&(_, to)| to == page) {
            Some(&(from, _)) => from,
            None if out.contains(&page) => 0,
            None => page.into(),
        });
        let now = store.statistics().expect("here");
        assert_eq!((now.evictions, now.hits, now.cleared, now.failures), (12, 7, 12, 0));
        assert_eq!((now.stored_pages, now.operations), (12, 0));
        assert_eq!(now.stored_bytes, 12 * bench.page_bytes());
        store.reset(PATIENCE).expect("all well");
        assert_eq!(store.statistics().expect("here").free_pages, 64);
    }
}

pub(crate) fn shapes_of_every_kind_come_back_whole(kind: Kind) {
    let page_first = |page_bytes: u64| PageShape {
        layer_stride: page_bytes,
        page_stride: page_bytes * u64::from(LAYERS),
        ..shape(page_bytes)
    };
    let apart = |page_bytes: u64| PageShape {
        page_stride: page_bytes + 48,
        layer_stride: u64::from(PAGES) * (page_bytes + 48),
        ..shape(page_bytes)
    };
    let padded = |page_bytes: u64| PageShape {
        layer_stride: page_bytes + 16,
        page_stride: (page_bytes + 16) * u64::from(LAYERS),
        ..shape(page_bytes)
    };
    let one_layer = PageShape { layers: 1, ..shape(656) };
    for shape in [page_first(640), apart(656), padded(1), apart(33), one_layer, shape(1152)] {
        let Some(bench) = Bench::open(kind, shape) else { return };
        let store = bench.store(options(&bench, PAGES.into()));
        bench.fill_all(|page| u64::from(page) + 1);
        let pages: Vec<_> = (0..PAGES).map(|page| (page, key(page.into()))).collect();
        store.page_out(&pages, None).expect("goes out");
        store.clear(&(0..PAGES).collect::<Vec<_>>(), None).expect("clears");
        // Every page to another place.
        let back: Vec<_> = pages.iter().map(|&(page, key)| (key, (page + 7) % PAGES)).collect();
        let batch = store.page_in(&back, None).expect("comes in");
        done(&store, &batch);
        bench.check_all(|page| u64::from((page + PAGES - 7) % PAGES) + 1);
        store.drain(PATIENCE).expect("all well");
    }
}

pub(crate) fn an_operation_begins_when_those_before_it_on_the_page_are_done(kind: Kind) {
    // Without a wait between: the device keeps the order, and nobody waits for copies.
    let Some(bench) = Bench::open(kind, shape(2112)) else { return };
    let store = bench.store(options(&bench, 200));
    bench.fill_all(|page| u64::from(page) + 100);
    // Nothing runs until all is submitted, so any wait for a copy would never end.
    let held = bench.control.is_some().then(|| bench.hold());
    // Page 0 goes through all of them; a third page gets what page 0 held at first.
    for round in 0..8u64 {
        store.page_out(&[(0, key(round)), (1, key(1000 + round))], None).expect("goes out");
        store.clear(&[0], None).expect("clears");
        store.page_out(&[(0, key(2000 + round))], None).expect("goes out");
        store.page_in(&[(key(1000 + round), 0)], None).expect("comes in");
        store.page_in(&[(key(round), 1), (key(2000 + round), 2)], None).expect("comes in");
        store.forget(key(1000 + round)).expect("there");
    }
    if let Some(held) = held {
        assert!(store.statistics().expect("here").operations > 0, "it is held");
        drop(held);
    }
    store.drain(PATIENCE).expect("all well");
    // The two pages change places every round, an even number of times.
    bench.check_all(|page| if page == 2 { 0 } else { u64::from(page) + 100 });
    for round in 0..8u64 {
        let first = if round % 2 == 0 { 100 } else { 101 };
        let batch = store.page_in(&[(key(round), 3), (key(2000 + round), 4)], None);
        done(&store, &batch.expect("comes in"));
        bench.check(3, first);
        bench.check(4, 0);
    }
}

pub(crate) fn what_is_wrong_is_refused_by_name_and_changes_nothing(kind: Kind) {
    let Some(bench) = Bench::open(kind, shape(512)) else { return };
    let store = bench.store(options(&bench, 4));
    bench.fill_all(|page| u64::from(page) + 1);
    store.page_out(&[(0, key(0)), (1, key(1))], None).expect("goes out");
    store.drain(PATIENCE).expect("all well");
    let before = store.statistics();
    let outside = Err(StoreError::PageOutOfRange { index: 1, page: PAGES, pages: PAGES });
    let ended = |result: Result<PageBatch, StoreError>| result.map(|_| ());
    assert_eq!(ended(store.page_out(&[(2, key(2)), (PAGES, key(3))], None)), outside);
    assert_eq!(ended(store.page_in(&[(key(0), 0), (key(1), PAGES)], None)), outside);
    assert_eq!(ended(store.clear(&[0, PAGES], None)), outside);
    assert_eq!(
        ended(store.page_out(&[(2, key(2)), (3, key(2))], None)),
        Err(StoreError::KeyTwice { key: key(2) })
    );
    assert_eq!(
        ended(store.page_out(&[(2, key(2)), (3, key(1))], None)),
        Err(StoreError::AlreadyStored { index: 1, key: key(1) })
    );
    assert_eq!(
        ended(store.page_in(&[(key(0), 5), (key(1), 5)], None)),
        Err(StoreError::PageTwice { page: 5 })
    );
    assert_eq!(store.statistics(), before, "nothing changed");
    let missing = StoreError::NotStored { key: key(9) };
    assert_eq!(ended(store.page_in(&[(key(0), 5), (key(9), 6)], None)), Err(missing.clone()));
    assert_eq!(store.statistics().expect("here").misses, 1);
    assert_eq!(store.forget(key(9)), Err(missing));
    assert_eq!(store.contains(key(9)), Ok(false));
    store.forget(key(1)).expect("there");
    assert_eq!(store.forget(key(1)), Err(StoreError::NotStored { key: key(1) }), "a second time");
    let many: Vec<_> = (10..15).map(|page| (page, key(page.into()))).collect();
    let spent = store.page_out(&many, None);
    let Err(StoreError::BudgetSpent { needed: 5, free, held, ending: 0, .. }) = spent else {
        panic!("{spent:?}")
    };
    // The forgotten page is held by its neighbour.
    assert_eq!((free, held), (2, 1));
    bench.check_all(|page| u64::from(page) + 1);
    // Nothing at all is fine.
    let nothing = store.page_out(&[], None).expect("nothing");
    done(&store, &nothing);
    done(&store, &store.page_in(&[], None).expect("nothing"));
    done(&store, &store.clear(&[], None).expect("nothing"));
    // And the store works.
    let batch = store.page_in(&[(key(0), 40)], None).expect("comes in");
    done(&store, &batch);
    bench.check(40, 1);
}

pub(crate) fn the_memory_of_a_group_is_free_with_its_last_page(kind: Kind) {
    let Some(bench) = Bench::open(kind, shape(4096)) else { return };
    let store = bench.store(StoreOptions { longest_group: Some(4), ..options(&bench, 16) });
    let pages: Vec<_> = (8..19).map(|page| (page, key(page.into()))).collect();
    bench.fill_all(|page| u64::from(page) + 1);
    store.page_out(&pages, None).expect("goes out");
    store.drain(PATIENCE).expect("all well");
    let free = || {
        let now = store.statistics().expect("here");
        (now.free_pages, now.held_pages)
    };
    assert_eq!(free(), (5, 0));
    // Groups: 8..12, 12..16, 16 and 17, 18.
    for (page, after) in [(18, (6, 0)), (9, (6, 1)), (8, (6, 2)), (16, (6, 3)), (11, (6, 4))] {
        store.forget(key(page)).expect("there");
        assert_eq!(free(), after, "page {page}");
    }
    store.forget(key(10)).expect("there");
    assert_eq!(free(), (10, 1));
    store.forget(key(17)).expect("there");
    assert_eq!(free(), (12, 0));
    // What is left is whole, beside new pages.
    store
        .page_out(&(20..32).map(|page| (page, key(page.into()))).collect::<Vec<_>>(), None)
        .expect("there is room");
    let back: Vec<_> = (12..16u32).map(|page| (key(page.into()), page + 20)).collect();
    let batch = store.page_in(&back, None).expect("comes in");
    done(&store, &batch);
    (12..16).for_each(|page| bench.check(page + 20, u64::from(page) + 1));
}

pub(crate) fn threads_page_out_clear_and_page_in_at_the_same_time(kind: Kind) {
    let Some(bench) = Bench::open(kind, shape(1152)) else { return };
    let wait = WhenFull::Wait(PATIENCE);
    let budget = options(&bench, 100);
    let limit = 16 * bench.page_bytes();
    let store = bench.store(StoreOptions { in_flight_bytes: limit, when_full: wait, ..budget });
    let threads = 4;
    let seed: u64 = rand::random();
    println!("seed {seed}");
    bench.fill_all(|page| u64::from(page) + 1);
    let share = PAGES / threads;
    let ends = Mutex::new(HashMap::new());
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (store, ends) = (&store, &ends);
            scope.spawn(move || {
                let mut random = SmallRng::seed_from_u64(seed + u64::from(thread));
                let pages: Vec<u32> = (thread * share..(thread + 1) * share).collect();
                let mut model: HashMap<u32, u64> =
                    pages.iter().map(|&page| (page, u64::from(page) + 1)).collect();
                let mut stored: HashMap<PageKey, u64> = HashMap::new();
                let mut next = u64::from(thread) << 32;
                for _ in 0..400 {
                    let count = random.random_range(1..=4);
                    let some: Vec<u32> =
                        pages.choose_multiple(&mut random, count).copied().collect();
                    match random.random_range(0..4) {
                        0 if stored.len() + count <= 10 => {
                            let list: Vec<_> = some
                                .iter()
                                .map(|&page| {
                                    next += 1;
                                    (page, key(next))
                                })
                                .collect();
                            store.page_out(&list, None).expect("goes out");
                            stored.extend(list.iter().map(|(page, key)| (*key, model[page])));
                        }
                        1 => {
                            store.clear(&some, None).expect("clears");
                            model.extend(some.iter().map(|&page| (page, 0)));
                        }
                        2 if !stored.is_empty() => {
                            let keys: Vec<_> = stored.keys().copied().collect();
                            let list: Vec<_> = some
                                .iter()
                                .map(|&page| (*keys.choose(&mut random).expect("some"), page))
                                .collect();
                            store.page_in(&list, None).expect("comes in");
                            model.extend(list.iter().map(|(key, page)| (*page, stored[key])));
                        }
                        _ => {
                            let Some(&key) = stored.keys().next() else { continue };
                            assert_eq!(store.contains(key), Ok(true));
                            store.forget(key).expect("there");
                            stored.remove(&key);
                        }
                    }
                }
                ends.lock().unwrap_or_else(PoisonError::into_inner).extend(model);
            });
        }
    });
    store.drain(PATIENCE).expect("all well");
    let ends = ends.into_inner().expect("no panic");
    bench.check_all(|page| ends[&page]);
    store.reset(PATIENCE).expect("all well");
    let now = store.statistics().expect("here");
    assert_eq!((now.free_pages, now.stored_pages, now.operations), (100, 0, 0));
}

pub(crate) fn peers_reach_the_stores_memory(kind: Kind) {
    let Some(bench) = Bench::open(kind, shape(4096)) else { return };
    let store = bench.store(options(&bench, 3));
    let segment = bench.engine.segment();
    let mut pieces = 0;
    for (addr, len) in store.pieces() {
        pieces += 1;
        let its = |region: &&SegmentRegion| region.addr == addr;
        let region = segment.regions.iter().find(its).expect("registered");
        assert_eq!(region.len, len);
        bench.engine.export(region.allocation).expect("can be exported");
    }
    assert_eq!(pieces, 1);
    let regions = segment.regions.len();
    drop(store);
    // The piece and the zeros.
    assert_eq!(bench.engine.segment().regions.len(), regions - 2);
}

pub(crate) fn b52_every_page_size_comes_back_whole_from_pieces_of_its_own(kind: Kind) {
    for page_bytes in (512..=1600).step_by(272) {
        let Some(bench) = Bench::open(kind, shape(page_bytes)) else { return };
        let slot = page_bytes.next_multiple_of(64) * u64::from(LAYERS);
        let options = StoreOptions { piece_bytes: slot * 5 + 7, ..options(&bench, 23) };
        let store = bench.store(options);
        let pieces: Vec<_> = store.pieces().collect();
        assert_eq!(pieces.len(), 5);
        assert!(pieces.iter().all(|(addr, _)| addr % 64 == 0), "{pieces:x?}");
        assert_eq!(pieces.iter().map(|(_, len)| len).sum::<u64>(), 23 * slot);
        bench.fill_all(|page| u64::from(page) + 1);
        let pages: Vec<_> = (0..23).map(|page| (page, key(page.into()))).collect();
        store.page_out(&pages, None).expect("goes out");
        let back: Vec<_> = pages.iter().map(|&(page, key)| (key, page + 24)).collect();
        let batch = store.page_in(&back, None).expect("comes in");
        done(&store, &batch);
        (0..23).for_each(|page| bench.check(page + 24, u64::from(page) + 1));
    }
}
