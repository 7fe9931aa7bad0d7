//! The page store, on host memory, on the simulated GPU and, with `--features cuda` or `rocm`, on a
//! GPU. Cases whose names begin with `b` and a number are those of the project's list of public
//! failures.

mod common;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvferry_device::conformance::{ApplicationStream, one_at_a_time};
use kvferry_device::sim::{Fault, Live, SimControl, SimOptions, sim};
use kvferry_device::{Device, Error as DeviceError};
use kvferry_engine::{
    Buffer, Consumer, DeviceName, Engine, Error, OffloadMode, PageKey, PageShape, PageStore,
    Producer, State, StoreError, StoreOptions, WhenFull, open_device,
};
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use common::config;

const PATIENCE: Duration = Duration::from_secs(60);
/// For what is expected not to come.
const MOMENT: Duration = Duration::from_millis(20);

const PAGES: u32 = 48;
const LAYERS: u32 = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Host,
    Sim,
    #[cfg(feature = "cuda")]
    Cuda,
    #[cfg(feature = "rocm")]
    Rocm,
}

/// Pages of a device whose contents are told from their seeds.
struct Bench {
    engine: Arc<Engine>,
    memory: Buffer,
    shape: PageShape,
    control: Option<Arc<SimControl>>,
    stream: Option<Box<dyn Fn() -> Box<dyn ApplicationStream>>>,
}

struct Held<'a>(&'a SimControl);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// Of layers in which pages lie side by side.
fn shape(page_bytes: u64) -> PageShape {
    let layer_stride = u64::from(PAGES) * page_bytes + 320;
    let layers = LAYERS;
    PageShape { addr: 0, pages: PAGES, page_bytes, layers, layer_stride, page_stride: page_bytes }
}

impl Bench {
    /// `None` without such a device, and says so.
    fn open(kind: Kind, shape: PageShape) -> Option<Self> {
        Self::open_with(kind, shape, &[])
    }

    fn open_with(kind: Kind, shape: PageShape, knobs: &[(&str, &str)]) -> Option<Self> {
        let config = config(knobs);
        let host = kvferry_device::host().expect("always there");
        let gpu = |name| open_device(name, &config);
        let mut control = None;
        let mut stream: Option<Box<dyn Fn() -> Box<dyn ApplicationStream>>> = None;
        let device: Option<Result<_, DeviceError>> = match kind {
            Kind::Host => None,
            Kind::Sim => {
                let (device, its) = sim(&SimOptions::default()).expect("always there");
                control = Some(Arc::clone(&its));
                stream = Some(Box::new(move || Box::new(its.stream())));
                Some(Ok(device))
            }
            #[cfg(feature = "cuda")]
            Kind::Cuda => {
                use kvferry_device::cuda::application_stream;
                stream = Some(Box::new(|| Box::new(application_stream(0).expect("a stream"))));
                Some(gpu(DeviceName::Cuda(0)))
            }
            #[cfg(feature = "rocm")]
            Kind::Rocm => {
                use kvferry_device::rocm::application_stream;
                stream = Some(Box::new(|| Box::new(application_stream(0).expect("a stream"))));
                Some(gpu(DeviceName::Rocm(0)))
            }
        };
        let _ = (gpu, DeviceName::Host);
        let devices: Vec<Arc<dyn Device>> = match device {
            None => vec![host],
            Some(Ok(device)) => vec![device, host],
            Some(Err(error)) => {
                let name = format!("{kind:?}").to_lowercase();
                kvferry_device::conformance::skip(&name, &error);
                return None;
            }
        };
        let engine = Engine::new(config.clone(), devices).expect("an engine");
        let PageShape { pages, page_bytes, layers, layer_stride, page_stride, .. } = shape;
        let len =
            layer_stride * u64::from(layers - 1) + page_stride * u64::from(pages - 1) + page_bytes;
        let memory = engine.allocate(&engine.devices()[0], len).expect("memory");
        let shape = PageShape { addr: memory.addr(), ..shape };
        Some(Self { engine, memory, shape, control, stream })
    }

    fn store(&self, options: StoreOptions) -> PageStore {
        PageStore::new(&self.engine, 0, self.shape, options).expect("a store")
    }

    fn control(&self) -> &SimControl {
        self.control.as_ref().expect("simulated")
    }

    /// Nothing runs on the simulated GPU until the guard is dropped, be it by a failing test.
    fn hold(&self) -> Held<'_> {
        self.control().hold();
        Held(self.control())
    }

    fn stream(&self) -> Box<dyn ApplicationStream> {
        self.stream.as_ref().expect("a device with streams")()
    }

    /// Bytes of a page in all layers.
    fn page_bytes(&self) -> u64 {
        self.shape.page_bytes * u64::from(self.shape.layers)
    }

    /// Where a page's rows are in the memory.
    fn rows(&self, page: u32) -> impl Iterator<Item = (u32, u64)> {
        let PageShape { layers, layer_stride, page_stride, .. } = self.shape;
        (0..layers).map(move |layer| {
            (layer, u64::from(layer) * layer_stride + u64::from(page) * page_stride)
        })
    }

    /// Contents of the page as of a seed; 0 is zeros.
    fn fill(&self, page: u32, seed: u64) {
        for (layer, offset) in self.rows(page) {
            let bytes = row(seed, layer, self.shape.page_bytes);
            self.memory.write(offset, &bytes).expect("inside");
        }
    }

    fn fill_all(&self, seed: impl Fn(u32) -> u64) {
        (0..self.shape.pages).for_each(|page| self.fill(page, seed(page)));
    }

    fn holds(&self, page: u32, seed: u64) -> bool {
        self.rows(page).all(|(layer, offset)| {
            let mut found = vec![0; self.shape.page_bytes as usize];
            self.memory.read(offset, &mut found).expect("inside");
            found == row(seed, layer, self.shape.page_bytes)
        })
    }

    fn check(&self, page: u32, seed: u64) {
        assert!(self.holds(page, seed), "page {page} is not of seed {seed}");
    }

    fn check_all(&self, seed: impl Fn(u32) -> u64) {
        (0..self.shape.pages).for_each(|page| self.check(page, seed(page)));
    }
}

fn row(seed: u64, layer: u32, len: u64) -> Vec<u8> {
    let mix = |at: u64| (at + 1).wrapping_mul(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let byte = |at: u64| (mix(at + u64::from(layer) * 131) >> 32) as u8;
    (0..len).map(|at| if seed == 0 { 0 } else { byte(at) }).collect()
}

fn options(bench: &Bench, pages: u64) -> StoreOptions {
    // A slot is a page whose rows begin on borders of 64 bytes.
    let slot = bench.shape.page_bytes.next_multiple_of(64) * u64::from(bench.shape.layers);
    StoreOptions { when_full: WhenFull::Refuse, ..StoreOptions::with_budget(pages * slot) }
}

fn key(number: u64) -> PageKey {
    PageKey(u128::from(number) << 64 | 0xF00D)
}

fn done(store: &PageStore, batch: &kvferry_engine::PageBatch) {
    assert_eq!(store.wait(batch, PATIENCE), Ok(State::Completed));
}

/// One `#[test]` per case and device.
macro_rules! on_devices {
    (@kinds { $($(#[$when:meta])* $name:ident: $kind:expr;)* } $cases:tt) => {
        $($(#[$when])* mod $name { on_devices!(@cases $kind, $cases); })*
    };
    (@cases $kind:expr, { $($case:ident)* }) => {
        $(#[test]
        fn $case() {
            let _alone = super::one_at_a_time();
            super::$case($kind);
        })*
    };
    (all $all:tt streams $streams:tt) => {
        on_devices!(@kinds {
            host_memory: super::Kind::Host;
            simulated_gpu: super::Kind::Sim;
            #[cfg(feature = "cuda")]
            cuda_gpu: super::Kind::Cuda;
            #[cfg(feature = "rocm")]
            rocm_gpu: super::Kind::Rocm;
        } $all);
        on_devices!(@kinds {
            simulated_streams: super::Kind::Sim;
            #[cfg(feature = "cuda")]
            cuda_streams: super::Kind::Cuda;
            #[cfg(feature = "rocm")]
            rocm_streams: super::Kind::Rocm;
        } $streams);
    };
}

on_devices! {
    all {
        pages_go_out_are_cleared_and_come_back_wherever_they_are_wanted
        shapes_of_every_kind_come_back_whole
        an_operation_begins_when_those_before_it_on_the_page_are_done
        what_is_wrong_is_refused_by_name_and_changes_nothing
        the_memory_of_a_group_is_free_with_its_last_page
        threads_page_out_clear_and_page_in_at_the_same_time
        peers_reach_the_stores_memory
        b52_every_page_size_comes_back_whole_from_pieces_of_its_own
    }
    streams {
        b21_a_page_out_waits_for_its_producer_and_stores_what_it_wrote
        a_stream_waits_for_a_page_in_and_the_host_does_not
        a_stream_waits_for_a_page_out_before_it_writes_the_page
        operations_beside_a_capture_leave_its_graph_valid
    }
}

fn pages_go_out_are_cleared_and_come_back_wherever_they_are_wanted(kind: Kind) {
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

fn shapes_of_every_kind_come_back_whole(kind: Kind) {
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

fn an_operation_begins_when_those_before_it_on_the_page_are_done(kind: Kind) {
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

fn what_is_wrong_is_refused_by_name_and_changes_nothing(kind: Kind) {
    let Some(bench) = Bench::open(kind, shape(512)) else { return };
    let store = bench.store(options(&bench, 4));
    bench.fill_all(|page| u64::from(page) + 1);
    store.page_out(&[(0, key(0)), (1, key(1))], None).expect("goes out");
    store.drain(PATIENCE).expect("all well");
    let before = store.statistics();
    let outside = Err(StoreError::PageOutOfRange { index: 1, page: PAGES, pages: PAGES });
    let ended = |result: Result<kvferry_engine::PageBatch, StoreError>| result.map(|_| ());
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

fn the_memory_of_a_group_is_free_with_its_last_page(kind: Kind) {
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

fn threads_page_out_clear_and_page_in_at_the_same_time(kind: Kind) {
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

fn peers_reach_the_stores_memory(kind: Kind) {
    let Some(bench) = Bench::open(kind, shape(4096)) else { return };
    let store = bench.store(options(&bench, 3));
    let segment = bench.engine.segment();
    let mut pieces = 0;
    for (addr, len) in store.pieces() {
        pieces += 1;
        let its = |region: &&kvferry_engine::SegmentRegion| region.addr == addr;
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

fn b52_every_page_size_comes_back_whole_from_pieces_of_its_own(kind: Kind) {
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

/// The stream fills a row of a page with a byte.
fn write_row(bench: &Bench, stream: &dyn ApplicationStream, page: u32, byte: u8) {
    let addr = bench.memory.addr() + bench.rows(page).next().expect("a layer").1;
    // SAFETY: inside the bench's memory; what else uses the page is ordered with the stream.
    unsafe { stream.fill(addr, byte, bench.shape.page_bytes) };
}

fn first_row(bench: &Bench, page: u32) -> Vec<u8> {
    let mut found = vec![0; bench.shape.page_bytes as usize];
    bench.memory.read(bench.rows(page).next().expect("a layer").1, &mut found).expect("inside");
    found
}

fn b21_a_page_out_waits_for_its_producer_and_stores_what_it_wrote(kind: Kind) {
    let Some(bench) = Bench::open(kind, shape(4096)) else { return };
    let store = bench.store(options(&bench, 16));
    let stream = bench.stream();
    for (round, by_event) in [false, true].into_iter().enumerate() {
        bench.fill_all(|_| 0);
        stream.hold();
        write_row(&bench, &*stream, 5, 0xAB);
        let handle = if by_event { stream.record() } else { stream.handle() };
        // SAFETY: both live as long as the stream.
        let after =
            unsafe { if by_event { Producer::event(handle) } else { Producer::stream(handle) } };
        let name = key(round as u64);
        let out = store.page_out(&[(5, name)], Some(after)).expect("goes out");
        // Both are behind the page-out, and so behind the producer.
        store.clear(&[5], None).expect("clears");
        let back = store.page_in(&[(name, 6)], None).expect("comes in");
        assert_eq!(store.wait(&back, MOMENT), Ok(State::Running));
        assert_eq!(store.poll(&out), Ok(State::Running));
        assert!(matches!(store.drain(MOMENT), Err(StoreError::Busy { operations: 3, .. })));
        stream.open();
        done(&store, &back);
        store.drain(PATIENCE).expect("all well");
        assert_eq!(first_row(&bench, 6), vec![0xAB; 4096]);
        bench.check(5, 0);
    }
}

fn a_stream_waits_for_a_page_in_and_the_host_does_not(kind: Kind) {
    let Some(bench) = Bench::open(kind, shape(4096)) else { return };
    let store = bench.store(options(&bench, 16));
    let (gate, model) = (bench.stream(), bench.stream());
    bench.fill_all(|page| u64::from(page) + 1);
    store.page_out(&[(5, key(5))], None).expect("goes out");
    store.drain(PATIENCE).expect("all well");
    gate.hold();
    // SAFETY: the streams outlive the calls.
    let (after, consumer) =
        unsafe { (Producer::stream(gate.handle()), Consumer::stream(model.handle())) };
    let batch = store.page_in(&[(key(5), 6)], Some(after)).expect("comes in");
    store.signal(&batch, consumer).expect("signals");
    // The model's stream overwrites a row of what comes in.
    write_row(&bench, &*model, 6, 0xCD);
    let event = model.record();
    // What waits for nobody has passed.
    let other = store.page_in(&[(key(5), 7)], None).expect("comes in");
    done(&store, &other);
    assert!(!model.has_fired(event), "the model's stream did not wait");
    gate.open();
    while !model.has_fired(event) {
        std::thread::yield_now();
    }
    assert_eq!(store.poll(&batch), Ok(State::Completed));
    assert_eq!(first_row(&bench, 6), vec![0xCD; 4096]);
    // One that has ended is not waited for.
    store.signal(&batch, consumer).expect("signals");
}

fn a_stream_waits_for_a_page_out_before_it_writes_the_page(kind: Kind) {
    let Some(bench) = Bench::open(kind, shape(4096)) else { return };
    let store = bench.store(options(&bench, 16));
    let (gate, model) = (bench.stream(), bench.stream());
    bench.fill_all(|_| 0);
    gate.hold();
    // SAFETY: as above.
    let (after, consumer) =
        unsafe { (Producer::stream(gate.handle()), Consumer::stream(model.handle())) };
    let batch = store.page_out(&[(5, key(5))], Some(after)).expect("goes out");
    store.signal(&batch, consumer).expect("signals");
    write_row(&bench, &*model, 5, 0xEF);
    gate.open();
    let batch = store.page_in(&[(key(5), 6)], None).expect("comes in");
    done(&store, &batch);
    bench.check(6, 0);
}

fn operations_beside_a_capture_leave_its_graph_valid(kind: Kind) {
    let Some(bench) = Bench::open(kind, shape(4096)) else { return };
    let stream = bench.stream();
    bench.fill_all(|page| u64::from(page) + 1);
    stream.begin_capture();
    let store = bench.store(options(&bench, 16));
    store.page_out(&[(5, key(5)), (6, key(6))], None).expect("goes out");
    store.clear(&[5, 6], None).expect("clears");
    let batch = store.page_in(&[(key(5), 6)], None).expect("comes in");
    done(&store, &batch);
    // SAFETY: the stream outlives the calls.
    let (producer, consumer) =
        unsafe { (Producer::stream(stream.handle()), Consumer::stream(stream.handle())) };
    // What would become a part of the graph is refused.
    for refused in [
        store.signal(&store.clear(&[1], None).expect("clears"), consumer).err(),
        store.page_out(&[(7, key(7))], Some(producer)).err(),
    ] {
        assert!(
            matches!(
                refused,
                None | Some(StoreError::Engine(Error::Device(DeviceError::NotOrderable { .. })))
            ),
            "{refused:?}"
        );
    }
    store.drain(PATIENCE).expect("all well");
    drop(store);
    assert!(stream.end_capture(), "the graph is not valid");
    bench.check(6, 6);
}

// What only a simulated GPU can be made to do.

fn simulated(shape: PageShape) -> Bench {
    Bench::open(Kind::Sim, shape).expect("always there")
}

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

#[test]
fn a_store_that_is_dropped_waits_for_its_copies_and_frees_everything() {
    let bench = simulated(shape(4096));
    let live = |what| bench.control().live(what);
    let before = (live(Live::HostMappings), live(Live::Allocations));
    let store = bench.store(options(&bench, 64));
    assert_eq!(live(Live::HostMappings), before.0 + 1, "locked when it is made");
    bench.fill_all(|page| u64::from(page) + 1);
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
