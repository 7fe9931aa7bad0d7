//! A store against a model of it: any calls in any order.

use kvferry_engine::{OffloadMode, PageKey, StoreError, StoreOptions};
use proptest::prelude::*;

use crate::bench::{Held, PAGES, PATIENCE, done, key, options, shape, simulated};

#[derive(Clone, Debug)]
enum Step {
    Out(Vec<u32>),
    In(Vec<(prop::sample::Index, u32)>),
    Clear(Vec<u32>),
    Forget(prop::sample::Index),
    Reset,
    Hold,
    Release,
    Check,
}

fn step() -> impl Strategy<Value = Step> {
    let pages = || {
        let run = (0..PAGES, 1..9u32)
            .prop_map(|(first, len)| (first..(first + len).min(PAGES)).collect());
        let some = prop::sample::subsequence((0..PAGES).collect::<Vec<_>>(), 1..8);
        prop_oneof![run, some]
    };
    prop_oneof![
        6 => pages().prop_map(Step::Out),
        6 => prop::collection::vec((any::<prop::sample::Index>(), 0..PAGES), 1..10).prop_map(Step::In),
        3 => pages().prop_map(Step::Clear),
        4 => any::<prop::sample::Index>().prop_map(Step::Forget),
        1 => Just(Step::Reset),
        2 => Just(Step::Hold),
        2 => Just(Step::Release),
        2 => Just(Step::Check),
    ]
}

/// Operations that wait for others before a submission waits for the first of them: half of the ring of
/// the offload's queues, if each needs a slot.
const QUEUE_TAKES: u32 = 4;

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Whatever is called in whatever order, while the device runs or is held, the pages are in the
    /// end what one operation after the other makes of them. A device that is held for ever is held
    /// for no more operations than its queue takes.
    #[test]
    fn the_store_does_what_its_model_does(
        steps in prop::collection::vec(step(), 1..60),
        longest in 0u32..4,
        offload in prop::sample::select(&OffloadMode::ALL[..]),
    ) {
        let bench = simulated(shape(200));
        let options = StoreOptions {
            offload, longest_group: Some(1 << longest), piece_bytes: 60_000, ..options(&bench, 50)
        };
        let store = bench.store(options);
        let _released_in_the_end = Held(bench.control());
        bench.fill_all(|page| u64::from(page) + 1);
        let mut device: Vec<u64> = (0..PAGES).map(|page| u64::from(page) + 1).collect();
        let mut stored: Vec<(PageKey, u64)> = Vec::new();
        // Operations since all of them were known to have ended.
        let (mut next, mut held, mut since) = (0, false, 0);
        for step in steps {
            if held && since >= QUEUE_TAKES {
                bench.control().release();
                store.drain(PATIENCE).expect("all well");
                (held, since) = (false, 0);
            }
            (held, since) = match step {
                Step::Hold => (true, since),
                Step::Release => (false, since),
                Step::Reset | Step::Check => (false, 0),
                _ => (held, since + 1),
            };
            match step {
                Step::Out(pages) => {
                    let list: Vec<_> = pages.iter().map(|&page| { next += 1; (page, key(next)) }).collect();
                    match store.page_out(&list, None) {
                        Ok(_) => stored.extend(
                            list.iter().map(|&(page, key)| (key, device[page as usize]))
                        ),
                        Err(StoreError::BudgetSpent { free, .. }) => {
                            prop_assert!((free as usize) < list.len());
                            list.iter().for_each(|&(_, key)| assert_eq!(store.contains(key), Ok(false)));
                        }
                        Err(error) => return Err(TestCaseError::fail(error.to_string())),
                    }
                }
                Step::In(list) if !stored.is_empty() => {
                    let mut list: Vec<_> =
                        list.iter().map(|(at, page)| (*page, stored[at.index(stored.len())])).collect();
                    list.sort_by_key(|&(page, _)| page);
                    list.dedup_by_key(|&mut (page, _)| page);
                    let pages: Vec<_> = list.iter().map(|&(page, (key, _))| (key, page)).collect();
                    store.page_in(&pages, None).expect("comes in");
                    list.iter().for_each(|&(page, (_, seed))| device[page as usize] = seed);
                }
                Step::Clear(pages) => {
                    store.clear(&pages, None).expect("clears");
                    pages.iter().for_each(|&page| device[page as usize] = 0);
                }
                Step::Forget(at) if !stored.is_empty() => {
                    let (key, _) = stored.swap_remove(at.index(stored.len()));
                    store.forget(key).expect("there");
                }
                Step::Reset => {
                    bench.control().release();
                    store.reset(PATIENCE).expect("all well");
                    stored.clear();
                    prop_assert_eq!(store.statistics().expect("here").free_pages, 50);
                }
                Step::Hold => bench.control().hold(),
                Step::Release => bench.control().release(),
                Step::Check => {
                    bench.control().release();
                    store.drain(PATIENCE).expect("all well");
                    bench.check_all(|page| device[page as usize]);
                }
                Step::In(_) | Step::Forget(_) => {}
            }
        }
        bench.control().release();
        store.drain(PATIENCE).expect("all well");
        bench.check_all(|page| device[page as usize]);
        prop_assert_eq!(store.statistics().expect("here").stored_pages, stored.len() as u64);
        for list in stored.chunks(PAGES as usize) {
            let pages: Vec<_> = list.iter().zip(0..).map(|(&(key, _), page)| (key, page)).collect();
            let batch = store.page_in(&pages, None).expect("comes in");
            done(&store, &batch);
            list.iter().zip(0..).for_each(|(&(_, seed), page)| bench.check(page, seed));
        }
    }
}
