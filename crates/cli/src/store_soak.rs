//! Random operations of a page store from several threads for as long as asked, every page verified,
//! and a look at what a leak would show in.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use kvferry_engine::{
    Buffer, Config, DeviceName, Engine, OffloadMode, PageBatch, PageKey, PageShape, PageStore,
    State, StoreError, StoreOptions, WhenFull, open_device,
};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::Failure;
use crate::pattern::{guard_fill, source_fill};
use crate::soak::Health;
use crate::transfer::PATIENCE;

/// Stores before the first look at memory.
const WARM_UP: u64 = 4;
/// Private memory that is no leak: glibc keeps up to 64 MiB at the end of a heap once it has given away
/// blocks of 32 MiB, and a store's threads have heaps of their own. Growth was 5 to 120 MB from store to
/// store, and 10 MB over six minutes on host memory with `MALLOC_MMAP_THRESHOLD_=65536`.
const KEPT_BY_MALLOC: u64 = 128 << 20;
/// A store is used for so long at most before another one takes its place.
const STORE: Duration = Duration::from_secs(5);
/// Operations of a thread between two looks at all of its pages.
const OPERATIONS: usize = 40;
/// What is in cleared pages.
const ZEROS: u64 = 0;

/// What a soak is to do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) device: DeviceName,
    pub(crate) threads: usize,
    pub(crate) time: Duration,
    /// Bytes of the device's pages, at most.
    pub(crate) most_bytes: u64,
    pub(crate) seed: u64,
}

/// What was done.
#[derive(Clone, Copy, Debug, Default)]
struct Done {
    stores: u64,
    rounds: u64,
    out: u64,
    back: u64,
    cleared: u64,
    bytes: u64,
    full: u64,
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stores, rounds, out, back, cleared, bytes, full } = self;
        write!(
            f,
            "{rounds} rounds verified in {stores} stores: {out} pages out, {back} in, {cleared} cleared, {bytes} bytes; {full} times the budget was spent; 0 mismatches"
        )
    }
}

pub(crate) fn run(plan: &Plan) -> Result<(), Failure> {
    let Plan { device, time, seed, .. } = *plan;
    let config = Config::from_env()?;
    let host = open_device(DeviceName::Host, &config)?;
    let devices = match device {
        DeviceName::Host => vec![host],
        gpu => vec![open_device(gpu, &config)?, host],
    };
    eprintln!("soak of a page store of {}, seed {seed}", devices[0].info());
    let engine = Engine::new(config, devices)?;
    let progress = ProgressBar::new(time.as_secs().max(1));
    progress.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} s {msg}")?);
    let mut random = SmallRng::seed_from_u64(seed);
    let mut done = Done::default();
    let mut one_store = |done: &mut Done, time| {
        let seed = random.random();
        one_store(&engine, plan, seed, time, done)
            .map_err(|error| format!("store {} of seed {seed}: {error}", done.stores))
    };
    for _ in 0..WARM_UP {
        one_store(&mut done, Duration::from_millis(200))?;
    }
    let start = Health::here(0)?;
    let begin = Instant::now();
    while begin.elapsed() < time {
        one_store(&mut done, (time - begin.elapsed()).min(STORE))?;
        progress.set_position(begin.elapsed().as_secs());
        progress.set_message(format!("{} rounds, {} MB", done.rounds, done.bytes / 1_000_000));
    }
    let end = Health::here(0)?;
    progress.finish_and_clear();
    println!("{done}");
    println!("{start} -> {end}");
    match end.leaks(&start, KEPT_BY_MALLOC) {
        leaks if leaks.is_empty() => Ok(()),
        leaks => Err(leaks.join("; ").into()),
    }
}

/// A random shape of at most so many bytes, with gaps.
fn shape(random: &mut SmallRng, most_bytes: u64) -> PageShape {
    let sizes = [1, 64, 512, 656, 1152, 2112, 4096, 16 << 10];
    let page_bytes = *sizes.choose(random).expect("there are some");
    let layers = random.random_range(1..=64);
    let gap = *[0, 0, 16, page_bytes].choose(random).expect("there are some");
    let step = page_bytes + gap;
    let pages = (most_bytes / (step * u64::from(layers))).clamp(16, 1024) as u32;
    let (layer_stride, page_stride) = match random.random_ratio(1, 4) {
        // All layers of a page side by side.
        true => (step, step * u64::from(layers)),
        false => (step * u64::from(pages) + gap, step),
    };
    PageShape { addr: 0, pages, page_bytes, layers, layer_stride, page_stride }
}

/// The pages of a device and what they have to hold.
struct Device<'a> {
    memory: &'a Buffer,
    shape: PageShape,
}

impl Device<'_> {
    fn rows(&self, page: u32) -> impl Iterator<Item = (u32, u64)> {
        let PageShape { layers, layer_stride, page_stride, .. } = self.shape;
        let row = move |layer| u64::from(layer) * layer_stride + u64::from(page) * page_stride;
        (0..layers).map(move |layer| (layer, row(layer)))
    }

    /// Contents of a row depend on the seed and on the layer, wherever the page is.
    fn row(&self, layer: u32, seed: u64) -> Vec<u8> {
        let mut bytes = vec![0; self.shape.page_bytes as usize];
        if seed != ZEROS {
            let before = u64::from(layer) * self.shape.page_bytes.next_multiple_of(8);
            source_fill(before, &mut bytes, seed);
        }
        bytes
    }

    fn fill(&self, page: u32, seed: u64) -> Result<(), Failure> {
        for (layer, offset) in self.rows(page) {
            self.memory.write(offset, &self.row(layer, seed))?;
        }
        Ok(())
    }

    fn check(&self, page: u32, seed: u64) -> Result<(), Failure> {
        let mut found = vec![0; self.shape.page_bytes as usize];
        for (layer, offset) in self.rows(page) {
            self.memory.read(offset, &mut found)?;
            let expected = self.row(layer, seed);
            if let Some(at) = (0..found.len()).find(|&at| found[at] != expected[at]) {
                return Err(format!(
                    "page {page}, layer {layer}, byte {at} is {:#04x} in the place of {:#04x} of seed {seed}",
                    found[at], expected[at]
                )
                .into());
            }
        }
        Ok(())
    }

    /// Checks that all bytes between pages are what they were at first.
    fn check_gaps(&self, seed: u64) -> Result<(), Failure> {
        let mut expected = vec![0; self.memory.len() as usize];
        guard_fill(0, &mut expected, seed);
        let mut found = vec![0; expected.len()];
        self.memory.read(0, &mut found)?;
        for page in 0..self.shape.pages {
            for (_, offset) in self.rows(page) {
                let row = offset as usize..(offset + self.shape.page_bytes) as usize;
                expected[row.clone()].fill(0);
                found[row].fill(0);
            }
        }
        match (0..found.len()).find(|&at| found[at] != expected[at]) {
            Some(at) => Err(format!("byte {at} of the device, between pages, was written").into()),
            None => Ok(()),
        }
    }
}

fn one_store(
    engine: &Arc<Engine>,
    plan: &Plan,
    seed: u64,
    time: Duration,
    done: &mut Done,
) -> Result<(), Failure> {
    let mut random = SmallRng::seed_from_u64(seed);
    let shape = shape(&mut random, plan.most_bytes);
    let PageShape { pages, page_bytes, layers, layer_stride, page_stride, .. } = shape;
    let len =
        layer_stride * u64::from(layers - 1) + page_stride * u64::from(pages - 1) + page_bytes;
    let memory = engine.allocate(&engine.devices()[0], len)?;
    let mut guards = vec![0; len as usize];
    guard_fill(0, &mut guards, seed);
    memory.write(0, &guards)?;
    let device = Device { memory: &memory, shape: PageShape { addr: memory.addr(), ..shape } };
    let page = (page_bytes + 64) * u64::from(layers);
    let options = StoreOptions {
        in_flight_bytes: page * random.random_range(8..=256),
        when_full: WhenFull::Wait(PATIENCE),
        longest_group: *[None, Some(1), Some(4), Some(16)].choose(&mut random).expect("some"),
        piece_bytes: page * random.random_range(8..=1024),
        offload: *OffloadMode::ALL.choose(&mut random).expect("some"),
        ..StoreOptions::with_budget(page * u64::from(pages) * random.random_range(1..=3))
    };
    let store = PageStore::new(engine, 0, device.shape, options)?;
    let threads = plan.threads.clamp(1, pages as usize / 4);
    let share = pages / threads as u32;
    let end = Instant::now() + time;
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads as u32)
            .map(|thread| {
                let pages = (thread * share..(thread + 1) * share).collect();
                let random = SmallRng::seed_from_u64(seed ^ u64::from(thread + 1));
                let (store, device) = (&store, &device);
                scope.spawn(move || Thread::new(store, device, thread, pages, random)?.run(end))
            })
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined.map(|it| it.unwrap_or_else(|_| Err("a thread panicked".into()))).collect()
    });
    for outcome in outcomes {
        let Done { rounds, out, back, cleared, full, .. } = outcome?;
        done.rounds += rounds;
        done.out += out;
        done.back += back;
        done.cleared += cleared;
        done.full += full;
        done.bytes += (out + back + cleared) * page_bytes * u64::from(layers);
    }
    device.check_gaps(seed)?;
    store.reset(PATIENCE)?;
    let now = store.statistics()?;
    if now.free_pages != now.capacity_pages || now.failures > 0 {
        return Err(format!("after a reset: {now:?}").into());
    }
    done.stores += 1;
    Ok(())
}

/// A thread with pages and keys of its own.
struct Thread<'a> {
    store: &'a PageStore,
    device: &'a Device<'a>,
    random: SmallRng,
    next: u64,
    pages: Vec<u32>,
    /// What each page has to hold once all operations are done.
    holds: HashMap<u32, u64>,
    stored: Vec<(PageKey, u64)>,
    batches: Vec<PageBatch>,
    done: Done,
}

impl<'a> Thread<'a> {
    fn new(
        store: &'a PageStore,
        device: &'a Device<'a>,
        thread: u32,
        pages: Vec<u32>,
        random: SmallRng,
    ) -> Result<Self, Failure> {
        let next = u64::from(thread + 1) << 40;
        let (holds, stored, batches) = Default::default();
        let done = Done::default();
        let mut this = Self { store, device, random, next, pages, holds, stored, batches, done };
        for page in this.pages.clone() {
            this.renew(page)?;
        }
        Ok(this)
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Gives a page that nothing uses new contents.
    fn renew(&mut self, page: u32) -> Result<(), Failure> {
        let seed = self.number();
        self.device.fill(page, seed)?;
        self.holds.insert(page, seed);
        Ok(())
    }

    fn run(mut self, end: Instant) -> Result<Done, Failure> {
        loop {
            for _ in 0..OPERATIONS {
                self.operation()?;
            }
            for batch in self.batches.drain(..) {
                match self.store.wait(&batch, PATIENCE)? {
                    State::Completed => {}
                    state => return Err(format!("an operation is {state:?}").into()),
                }
            }
            for (&page, &seed) in &self.holds {
                self.device.check(page, seed)?;
            }
            self.done.rounds += 1;
            if Instant::now() >= end {
                return Ok(self.done);
            }
            for page in self.some() {
                self.renew(page)?;
            }
        }
    }

    /// Some of the thread's pages: neighbours, or any.
    fn some(&mut self) -> Vec<u32> {
        let count = self.random.random_range(1..=self.pages.len().min(24));
        if self.random.random() {
            let first = self.random.random_range(0..=self.pages.len() - count);
            return self.pages[first..first + count].to_vec();
        }
        self.pages.choose_multiple(&mut self.random, count).copied().collect()
    }

    fn operation(&mut self) -> Result<(), Failure> {
        let some = self.some();
        match self.random.random_range(0..8) {
            0..3 => self.page_out(&some),
            3 => {
                self.batches.push(self.store.clear(&some, None)?);
                self.done.cleared += some.len() as u64;
                self.holds.extend(some.iter().map(|&page| (page, ZEROS)));
                Ok(())
            }
            4..7 if !self.stored.is_empty() => {
                let mut list = Vec::with_capacity(some.len());
                // From anywhere, or what went out together.
                let mut at = self.random.random_range(0..self.stored.len());
                for &page in &some {
                    if self.random.random_ratio(1, 4) {
                        at = self.random.random_range(0..self.stored.len());
                    }
                    list.push((self.stored[at].0, page));
                    self.holds.insert(page, self.stored[at].1);
                    at = (at + 1) % self.stored.len();
                }
                self.batches.push(self.store.page_in(&list, None)?);
                self.done.back += list.len() as u64;
                Ok(())
            }
            _ => self.forget(),
        }
    }

    fn page_out(&mut self, pages: &[u32]) -> Result<(), Failure> {
        let mut list = Vec::with_capacity(pages.len());
        for &page in pages {
            list.push((page, PageKey(self.number().into())));
        }
        match self.store.page_out(&list, None) {
            Ok(batch) => self.batches.push(batch),
            Err(StoreError::BudgetSpent { .. }) => {
                self.done.full += 1;
                return self.forget();
            }
            Err(error) => return Err(error.into()),
        }
        self.done.out += list.len() as u64;
        self.stored.extend(list.iter().map(|&(page, key)| (key, self.holds[&page])));
        Ok(())
    }

    /// Forgets about a third of what is stored.
    fn forget(&mut self) -> Result<(), Failure> {
        let mut kept = Vec::with_capacity(self.stored.len());
        for (key, seed) in std::mem::take(&mut self.stored) {
            if self.random.random_ratio(1, 3) {
                self.store.forget(key)?;
            } else {
                kept.push((key, seed));
            }
        }
        self.stored = kept;
        Ok(())
    }
}
