//! Pages of a device kept in host memory: paged out when the device's memory is full, paged in when
//! they are needed again.
//!
//! A store is a pool of page-locked host memory of fixed size, and books of what is in it
//! (`books.rs`). In the pool all layers of a page lie side by side, so that a page is one 2-D DMA.
//! Neighbouring pages of the device that are paged out by one call make a group, `[layer][page]`, so
//! that its rows are wider: the copy engine's time is by rows (LAB.md: 4 KiB pages in runs of 4
//! reach 48.8 GB/s where single ones reach 33).
//!
//! One rule orders all operations: out, then clear, then in, each in the order of the calls, for one
//! page of the device and for one key. The device keeps it, by [`SubmitOptions::behind`]; a call
//! waits for copies only where the device's queue has no room for more of them.

mod books;
mod error;
mod memory;
mod options;
mod runs;
mod shape;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use kvferry_device::{Capabilities, Consumer, MadeBy, Producer};

use self::books::{Books, Entry, Kind, Operation, Outcome, Stored};
use self::memory::StoreMemory;
use self::runs::Runs;
use self::shape::{Move, Numbers};
use crate::batch::{BatchId, State};
use crate::engine::Engine;
use crate::error::Error;
use crate::mostly_one::MostlyOne;
use crate::plan::{Op, Paged, Pages};
use crate::request::{Copies, OffloadMode, Part, SubmitOptions};
use crate::target::Target;
use crate::wait::Wait;

pub use self::books::StoreStatistics;
pub use self::error::StoreError;
pub use self::options::{PageKey, StoreOptions, WhenFull};
pub use self::shape::PageShape;

/// Names an operation of a page store.
#[derive(Clone, Debug)]
pub struct PageBatch(Option<Arc<Outcome>>);

/// Keeps pages of one device in host memory. Usable from any thread.
///
/// Pages of the device have numbers, stored ones have keys. The copies of one call have no order
/// among each other; those of different calls have the one of the calls where they use the same
/// page or key. They have none with the caller's own work, except through a [`Producer`] and
/// [`PageStore::signal`]: without a producer a page-out may read a page while a kernel still writes
/// it.
///
/// Peers can read the store's memory as any registered memory of the engine.
#[derive(Debug)]
pub struct PageStore {
    engine: Arc<Engine>,
    target: Target,
    device: usize,
    shape: PageShape,
    options: StoreOptions,
    longest: u32,
    memory: StoreMemory,
    /// Locked while an operation is submitted, because the order of submissions is the order that
    /// the device keeps.
    books: Mutex<Books>,
    /// A fork of the process that made the store must leave it alone.
    made_by: MadeBy,
}

type Result<T, E = StoreError> = std::result::Result<T, E>;

impl PageStore {
    /// Makes a store for pages of the device at that position in [`Engine::devices`]: allocates all
    /// of its host memory near the device, registers it and page-locks it for the device, which
    /// takes seconds for tens of GB.
    ///
    /// # Errors
    /// [`StoreError::BadShape`], [`StoreError::BadOption`], [`StoreError::NoHostMemory`],
    /// [`StoreError::NotPinned`]; then nothing stays allocated.
    pub fn new(
        engine: &Arc<Engine>,
        device: usize,
        shape: PageShape,
        options: StoreOptions,
    ) -> Result<Self> {
        let shape = shape.normal()?;
        let longest = options.longest_group(&shape)?;
        let memory = StoreMemory::new(engine, device, &shape, &options, 1 << longest)?;
        let slots = memory.slots.iter().copied();
        let runs = Runs::new(slots, memory.piece_stride, longest);
        let target = engine.local()?;
        Ok(Self {
            engine: Arc::clone(engine),
            target,
            device,
            shape,
            options,
            longest,
            memory,
            books: Mutex::new(Books::new(device, runs, shape.pages, shape.bytes())),
            made_by: MadeBy::this_process(),
        })
    }

    /// Stores pages of the device under keys, and returns without waiting for the copies. The caller
    /// may reuse a page of the device at once through this store, and for work of its own once the
    /// copy is done ([`PageStore::signal`]).
    ///
    /// With a producer the copies wait for it on the device; it is what makes the pages' contents.
    ///
    /// Where the kernel copies ([`OffloadMode::Kernel`] and `Staged`, not `Direct`), a device takes eight
    /// calls of a direction that have not ended, or four that wait for a producer or another call's
    /// copies; the next call waits for the oldest of them, and other threads' calls with it.
    ///
    /// # Errors
    /// [`StoreError::Full`] and [`StoreError::BudgetSpent`], at once or after [`WhenFull::Wait`];
    /// [`StoreError::AlreadyStored`], [`StoreError::KeyTwice`], [`StoreError::PageOutOfRange`], and
    /// the engine's. Nothing was begun then.
    pub fn page_out(&self, pages: &[(u32, PageKey)], after: Option<Producer>) -> Result<PageBatch> {
        self.check_pages(pages.iter().map(|&(page, _)| page))?;
        let mut keys: MostlyOne<_> = pages.iter().map(|&(_, key)| key).collect();
        keys.sort_unstable();
        if let Some(twice) = keys.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(StoreError::KeyTwice { key: twice[0] });
        }
        if pages.is_empty() {
            return Ok(PageBatch(None));
        }
        let mut books = self.wait_for_room(pages)?;
        let mut sorted = MostlyOne::from_slice(pages);
        sorted.sort_unstable();
        let mut moves = MostlyOne::with_capacity(pages.len());
        let mut rest = &sorted[..];
        while let Some(&(page, _)) = rest.first() {
            let run = neighbours(&self.shape, rest);
            let wanted = run.ilog2().min(self.longest);
            let taken = books.runs.take(wanted);
            // `wait_for_room` saw that there are enough slots, of whatever length their runs are.
            let (first, order) = taken.ok_or_else(|| self.budget_spent(&books, pages.len()))?;
            let (piece, slot) = self.memory.place(first);
            let group = 1 << order;
            moves.push((
                first,
                order,
                Move { piece, group, position: 0, count: group, slot, page },
            ));
            rest = &rest[group as usize..];
        }
        let mut behind = MostlyOne::new();
        pages.iter().for_each(|&(page, _)| books.before_reading(page, &mut behind));
        let mut places: MostlyOne<_> = moves.iter().map(|&(.., place)| place).collect();
        let bytes = self.bytes(pages.len());
        let submitted = self.submit(&books, Op::Write, &mut places, after, behind);
        let batch = submitted.inspect_err(|_| {
            moves.iter().for_each(|&(first, order, _)| books.runs.give_back(first, order));
        })?;
        let outcome = outcome(&books, batch);
        let number = outcome.number;
        let mut at = 0;
        for &(group, order, Move { count, .. }) in &moves {
            for position in 0..count {
                let (page, key) = sorted[at];
                at += 1;
                let source = Arc::clone(&outcome);
                books.store(key, Stored { group, position, source }, order);
                books.reads(page, number);
            }
        }
        books.statistics.evictions += pages.len() as u64;
        let groups = moves.iter().map(|&(first, ..)| first).collect();
        let (kind, sources) = (Kind::Out, MostlyOne::new());
        let its = Arc::clone(&outcome);
        books.begin(Operation { kind, bytes, outcome: its, keys, groups, sources });
        Ok(PageBatch(Some(outcome)))
    }

    /// Copies stored pages to pages of the device, and returns without waiting: one batch for a step
    /// of the model, for which its stream waits by [`PageStore::signal`]. The pages stay stored.
    ///
    /// With a producer the copies wait for it on the device; it is the caller's last work that uses
    /// what was in the pages.
    ///
    /// # Errors
    /// [`StoreError::NotStored`], [`StoreError::PageOutFailed`], [`StoreError::PageOutOfRange`],
    /// [`StoreError::PageTwice`], and the engine's. Nothing was begun then.
    pub fn page_in(&self, pages: &[(PageKey, u32)], after: Option<Producer>) -> Result<PageBatch> {
        self.check_pages(pages.iter().map(|&(_, page)| page))?;
        let mut books = self.books()?;
        books.look_at_oldest(&self.engine);
        let mut found = MostlyOne::with_capacity(pages.len());
        let mut behind = MostlyOne::new();
        let mut sources: MostlyOne<Arc<Outcome>> = MostlyOne::new();
        for &(key, page) in pages {
            let stored = self.find(&mut books, key);
            let stored = stored.inspect_err(|_| books.statistics.misses += 1)?;
            behind.push(stored.source.number);
            books.before_writing(page, &mut behind);
            if stored.source.ended.get().is_none() {
                sources.push(Arc::clone(&stored.source));
            }
            found.push((page, stored.group, stored.position));
        }
        if pages.is_empty() {
            return Ok(PageBatch(None));
        }
        sources.sort_unstable_by_key(|source| source.number);
        sources.dedup_by_key(|source| source.number);
        found.sort_unstable();
        if let Some(twice) = found.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(StoreError::PageTwice { page: twice[0].0 });
        }
        let follow = |one: &(u32, u32, u32), next: &(u32, u32, u32)| {
            self.shape.has_neighbours() && (one.0 + 1, one.1, one.2 + 1) == (next.0, next.1, next.2)
        };
        let mut moves: MostlyOne<_> = found
            .chunk_by(follow)
            .map(|run| {
                let (page, first, position) = run[0];
                let (piece, slot) = self.memory.place(first);
                let group = 1 << books.group_order(first);
                Move { piece, group, position, count: run.len() as u32, slot, page }
            })
            .collect();
        let bytes = self.bytes(pages.len());
        let batch = self.submit(&books, Op::Read, &mut moves, after, behind)?;
        let outcome = outcome(&books, batch);
        pages.iter().for_each(|&(_, page)| books.writes(page, outcome.number));
        books.statistics.hits += pages.len() as u64;
        let groups = found.into_iter().map(|(_, group, _)| group).collect();
        let (kind, keys) = (Kind::In, MostlyOne::new());
        let its = Arc::clone(&outcome);
        books.begin(Operation { kind, bytes, outcome: its, keys, groups, sources });
        Ok(PageBatch(Some(outcome)))
    }

    /// Fills pages of the device with zeros, and returns without waiting for it.
    ///
    /// # Errors
    /// [`StoreError::PageOutOfRange`], and the engine's. Nothing was begun then.
    pub fn clear(&self, pages: &[u32], after: Option<Producer>) -> Result<PageBatch> {
        self.check_pages(pages.iter().copied())?;
        let mut pages: MostlyOne<u32> = MostlyOne::from_slice(pages);
        pages.sort_unstable();
        pages.dedup();
        let mut books = self.books()?;
        books.look_at_oldest(&self.engine);
        if pages.is_empty() {
            return Ok(PageBatch(None));
        }
        let mut behind = MostlyOne::new();
        pages.iter().for_each(|&page| books.before_writing(page, &mut behind));
        let zeros: MostlyOne<u32> = MostlyOne::from_elem(0, pages.len());
        let PageShape { addr, page_bytes, layers, layer_stride, page_stride, .. } = self.shape;
        let form = Paged::whole_pages(
            Pages::whole(addr, &pages, page_stride, layer_stride),
            Pages::whole(self.memory.zeros(), &zeros, 0, page_bytes),
            layers,
            page_bytes,
        );
        let device = &self.engine.devices()[self.device];
        let has_kernel = device.info().capabilities.contains(Capabilities::KERNEL);
        let options = SubmitOptions {
            after,
            behind: &books.batches(behind),
            without_kernel: self.options.offload == OffloadMode::Direct || !has_kernel,
            ..SubmitOptions::default()
        };
        let part = Part { target: &self.target, op: Op::Read, copies: Copies::Paged(&[form]) };
        let batch = self.engine.submit_parts(&[part], &options)?;
        let outcome = outcome(&books, batch);
        pages.iter().for_each(|&page| books.writes(page, outcome.number));
        books.statistics.cleared += pages.len() as u64;
        let (kind, bytes) = (Kind::Clear, self.bytes(pages.len()));
        let (keys, groups, sources) = Default::default();
        let its = Arc::clone(&outcome);
        books.begin(Operation { kind, bytes, outcome: its, keys, groups, sources });
        Ok(PageBatch(Some(outcome)))
    }

    /// Whether a page is stored under that key, or on its way.
    ///
    /// # Errors
    /// [`StoreError::OtherProcess`].
    pub fn contains(&self, key: PageKey) -> Result<bool> {
        let mut books = self.books()?;
        Ok(self.find(&mut books, key).is_ok())
    }

    /// Forgets a key. Copies of its page that run go on; its memory is free again after them.
    ///
    /// # Errors
    /// [`StoreError::NotStored`].
    pub fn forget(&self, key: PageKey) -> Result<()> {
        let mut books = self.books()?;
        books.forget(key).then_some(()).ok_or(StoreError::NotStored { key })
    }

    /// Makes later work of a stream of the caller's wait for the operation, on the device. The host
    /// does not wait. How the operation ends the stream does not see: ask [`PageStore::poll`].
    ///
    /// # Errors
    /// As [`Engine::signal`]: [`Error::NotAllSubmitted`] if the operation is submitted step by step
    /// (`MC_KVFERRY_MAX_RATE`, `MC_KVFERRY_POLICY=tail`) and not all of it is: wait for it by
    /// [`PageStore::poll`] or [`PageStore::wait`], and launch the step then.
    pub fn signal(&self, batch: &PageBatch, consumer: Consumer) -> Result<()> {
        self.check_process()?;
        let Some(outcome) = &batch.0 else { return Ok(()) };
        match self.engine.signal(outcome.batch, consumer) {
            // It was released because it ended.
            Err(Error::UnknownBatch(_)) => Ok(()),
            signalled => Ok(signalled?),
        }
    }

    /// Where the operation is. Does not block.
    ///
    /// # Errors
    /// [`StoreError::OtherProcess`].
    pub fn poll(&self, batch: &PageBatch) -> Result<State> {
        let mut books = self.books()?;
        let Some(outcome) = &batch.0 else { return Ok(State::Completed) };
        books.has_ended(&self.engine, outcome.number);
        Ok(match outcome.ended.get() {
            None => State::Running,
            Some(Ok(())) => State::Completed,
            Some(Err(error)) => State::Failed(error.clone()),
        })
    }

    /// Polls until the operation ends or the time is over; then it is still `Running`.
    ///
    /// # Errors
    /// [`StoreError::OtherProcess`].
    pub fn wait(&self, batch: &PageBatch, timeout: Duration) -> Result<State> {
        let mut wait = Wait::begin();
        loop {
            let state = self.poll(batch)?;
            let waited = wait.waited();
            if state != State::Running || waited >= timeout {
                return Ok(state);
            }
            wait.rest();
        }
    }

    /// Waits until every operation has ended that was begun before.
    ///
    /// # Errors
    /// [`StoreError::Busy`] after the time; [`StoreError::Failed`] if operations failed since the
    /// last time that somebody asked.
    pub fn drain(&self, timeout: Duration) -> Result<()> {
        let mut wait = Wait::begin();
        let last = self.books()?.next_number();
        loop {
            let mut books = self.books()?;
            let operations = books.look_at_those_before(&self.engine, last);
            if operations == 0 {
                return books.take_failures();
            }
            drop(books);
            let waited = wait.waited();
            if waited >= timeout {
                return Err(StoreError::Busy { operations, waited });
            }
            wait.rest();
        }
    }

    /// Forgets all keys, then does as [`PageStore::drain`].
    ///
    /// # Errors
    /// As [`PageStore::drain`]; the keys are forgotten all the same.
    pub fn reset(&self, timeout: Duration) -> Result<()> {
        self.books()?.forget_all();
        self.drain(timeout)
    }

    /// What the store holds and did.
    ///
    /// # Errors
    /// [`StoreError::OtherProcess`].
    pub fn statistics(&self) -> Result<StoreStatistics> {
        let mut books = self.books()?;
        books.look_at_all(&self.engine);
        Ok(books.statistics())
    }

    /// Where the pages' host memory is: first byte and length of each piece.
    pub fn pieces(&self) -> impl Iterator<Item = (u64, u64)> {
        self.memory.pieces().iter().map(|piece| (piece.addr(), piece.len()))
    }

    fn submit(
        &self,
        books: &Books,
        op: Op,
        moves: &mut [Move],
        after: Option<Producer>,
        behind: MostlyOne<u64>,
    ) -> Result<BatchId> {
        let mut numbers = Numbers::default();
        let forms = self.shape.forms(moves, &self.memory.addrs, &mut numbers);
        let part = Part { target: &self.target, op, copies: Copies::Paged(&forms) };
        let offload = self.options.offload;
        let options = SubmitOptions {
            after,
            behind: &books.batches(behind),
            without_kernel: offload == OffloadMode::Direct,
            offload,
        };
        Ok(self.engine.submit_parts(&[part], &options)?)
    }

    /// Waits, as far as the options say, until nothing keeps the pages from being stored.
    fn wait_for_room(&self, pages: &[(u32, PageKey)]) -> Result<MutexGuard<'_, Books>> {
        let mut wait = Wait::begin();
        let bytes = self.bytes(pages.len());
        let mut quick = true;
        loop {
            let mut books = self.books()?;
            if quick {
                books.look_at_oldest(&self.engine);
            } else {
                books.look_at_all(&self.engine);
            }
            for (index, &(_, key)) in pages.iter().enumerate() {
                if let Some(Entry::Page(_)) = self.entry(&mut books, key) {
                    return Err(StoreError::AlreadyStored { index, key });
                }
            }
            let in_flight = books.statistics.out_bytes;
            let limit = self.options.in_flight_bytes;
            let full = in_flight > 0 && in_flight.saturating_add(bytes) > limit;
            let spent = (pages.len() as u64) > books.runs.free_slots();
            if !full && !spent {
                return Ok(books);
            }
            if std::mem::take(&mut quick) {
                // Before anybody waits or is refused.
                continue;
            }
            let waited = wait.waited();
            let patient = match self.options.when_full {
                WhenFull::Refuse => false,
                WhenFull::Wait(longest) => waited < longest,
            };
            let in_vain = spent && {
                let now = books.statistics();
                now.free_pages + now.ending_pages < pages.len() as u64
            };
            if spent && (in_vain || !patient) {
                return Err(self.budget_spent(&books, pages.len()));
            }
            if !patient {
                return Err(StoreError::Full { in_flight, bytes, limit, waited });
            }
            drop(books);
            wait.rest();
        }
    }

    fn budget_spent(&self, books: &Books, pages: usize) -> StoreError {
        let now = books.statistics();
        StoreError::BudgetSpent {
            budget: self.options.budget_bytes,
            needed: pages as u64,
            free: now.free_pages,
            held: now.held_pages,
            ending: now.ending_pages,
        }
    }

    /// What a key names now: its page-out may have failed since somebody looked.
    fn entry<'a>(&self, books: &'a mut Books, key: PageKey) -> Option<&'a Entry> {
        if let Entry::Page(stored) = books.entries.get(&key)? {
            let source = stored.source.number;
            books.has_ended(&self.engine, source);
        }
        books.entries.get(&key)
    }

    /// The place of a stored page.
    fn find(&self, books: &mut Books, key: PageKey) -> Result<Stored> {
        match self.entry(books, key) {
            Some(Entry::Page(stored)) => Ok(stored.clone()),
            Some(Entry::Failed(error)) => {
                Err(StoreError::PageOutFailed { key, error: Box::new(error.clone()) })
            }
            None => Err(StoreError::NotStored { key }),
        }
    }

    fn check_pages(&self, pages: impl Iterator<Item = u32>) -> Result<()> {
        let outside = |&(_, page): &(usize, u32)| page >= self.shape.pages;
        match pages.enumerate().find(outside) {
            None => Ok(()),
            Some((index, page)) => {
                Err(StoreError::PageOutOfRange { index, page, pages: self.shape.pages })
            }
        }
    }

    fn bytes(&self, pages: usize) -> u64 {
        self.shape.bytes() * pages as u64
    }

    /// A fork has a copy of the lock that may be held for ever, so it is not touched there.
    fn check_process(&self) -> Result<()> {
        match self.made_by.is_this_process() {
            true => Ok(()),
            false => Err(StoreError::OtherProcess { owner: self.made_by.process() }),
        }
    }

    fn books(&self) -> Result<MutexGuard<'_, Books>> {
        self.check_process()?;
        Ok(self.books.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// How many of the first pages of a sorted list are neighbours.
fn neighbours(shape: &PageShape, pages: &[(u32, PageKey)]) -> u32 {
    if !shape.has_neighbours() {
        return 1;
    }
    let follow = pages.windows(2).take_while(|pair| pair[0].0 + 1 == pair[1].0);
    1 + follow.count() as u32
}

fn outcome(books: &Books, batch: BatchId) -> Arc<Outcome> {
    Arc::new(Outcome { number: books.next_number(), batch, ended: OnceLock::new() })
}

impl Drop for PageStore {
    fn drop(&mut self) {
        if self.check_process().is_err() {
            // Nothing of the parent's is touched.
            self.memory.leak();
            std::mem::forget((Arc::clone(&self.engine), self.target.clone()));
            return;
        }
        let books = self.books.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Copies run into the store's memory until they are done. A device that hangs ends its
        // batches itself after the stall timeout.
        let mut wait = Wait::begin();
        while books.look_at_all(&self.engine) > 0 {
            wait.rest();
        }
        if books.lost {
            tracing::error!(
                bytes = self.memory.bytes(),
                "the device of a page store is lost, and its copies may still run: its memory is leaked"
            );
            self.memory.leak();
        }
    }
}
