//! What the store knows: which pages are stored where, which operations run, and what they use.
//! Nothing here waits.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use foldhash::HashMap;

use super::runs::Runs;
use super::{PageKey, StoreError};
use crate::batch::{BatchId, State};
use crate::engine::Engine;
use crate::error::Error;
use crate::mostly_one::MostlyOne;

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Out,
    In,
    Clear,
}

/// How an operation ended, for all who ask after it.
#[derive(Debug)]
pub(super) struct Outcome {
    /// Grows from operation to operation; 0 is none.
    pub(super) number: u64,
    pub(super) batch: BatchId,
    pub(super) ended: OnceLock<Result<(), Error>>,
}

/// An operation that is not known to have ended.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) kind: Kind,
    pub(super) bytes: u64,
    pub(super) outcome: Arc<Outcome>,
    /// Of a page-out: what it stores.
    pub(super) keys: MostlyOne<PageKey>,
    /// First slots of the groups that it reads or writes, once for each use.
    pub(super) groups: MostlyOne<u32>,
    /// Page-outs of what it reads.
    pub(super) sources: MostlyOne<Arc<Outcome>>,
}

/// Neighbouring pages that were paged out together. Its memory is free again once none of them is
/// stored and no operation uses it.
#[derive(Debug)]
pub(super) struct Group {
    /// Binary logarithm of how many.
    pub(super) order: u32,
    stored: u32,
    /// Operations that use it.
    users: u32,
}

/// What a key names.
#[derive(Clone, Debug)]
pub(super) enum Entry {
    Page(Stored),
    /// Its page-out failed.
    Failed(Error),
}

/// Where a page is stored.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    /// First slot of its group.
    pub(super) group: u32,
    pub(super) position: u32,
    /// What stores it or stored it.
    pub(super) source: Arc<Outcome>,
}

/// Who last used a page of the device, by the numbers of operations.
#[derive(Clone, Debug, Default)]
struct Uses {
    writer: u64,
    /// Since that writer.
    readers: Vec<u64>,
}

/// What a store did and holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreStatistics {
    /// Pages that there is memory for.
    pub capacity_pages: u64,
    /// Pages that are stored, those on their way included.
    pub stored_pages: u64,
    /// Bytes of those.
    pub stored_bytes: u64,
    /// Pages that there is memory for now.
    pub free_pages: u64,
    /// Forgotten pages whose memory comes free with their last neighbour that is still stored.
    pub held_pages: u64,
    /// Forgotten pages whose memory comes free when copies end.
    pub ending_pages: u64,
    /// Operations that run.
    pub operations: usize,
    /// Bytes on their way to host memory.
    pub out_bytes: u64,
    /// Bytes on their way back.
    pub in_bytes: u64,
    /// Pages that were paged out, since the store was made.
    pub evictions: u64,
    /// Pages that were paged in.
    pub hits: u64,
    /// Keys to page in that were not stored.
    pub misses: u64,
    /// Pages that were cleared.
    pub cleared: u64,
    /// Operations that failed.
    pub failures: u64,
}

#[derive(Debug)]
pub(super) struct Books {
    /// Position of the device in the engine.
    device: usize,
    pub(super) runs: Runs,
    groups: HashMap<u32, Group>,
    pub(super) entries: HashMap<PageKey, Entry>,
    /// By number; those that ended are none, and gone from the front.
    operations: VecDeque<Option<Operation>>,
    /// Number of the front.
    first: u64,
    /// Of each page of the device.
    uses: Vec<Uses>,
    pub(super) statistics: StoreStatistics,
    page_bytes: u64,
    /// The device is lost: what its copies do, nobody knows.
    pub(super) lost: bool,
    /// Failures that nobody has asked for yet: how many, and the first.
    failed: Option<(u64, Error)>,
}

impl Books {
    pub(super) fn new(device: usize, runs: Runs, device_pages: u32, page_bytes: u64) -> Self {
        let capacity_pages = runs.free_slots();
        Self {
            device,
            runs,
            groups: HashMap::default(),
            entries: HashMap::default(),
            operations: VecDeque::new(),
            first: 1,
            uses: vec![Uses::default(); device_pages as usize],
            statistics: StoreStatistics { capacity_pages, ..StoreStatistics::default() },
            page_bytes,
            lost: false,
            failed: None,
        }
    }

    pub(super) fn next_number(&self) -> u64 {
        self.first + self.operations.len() as u64
    }

    fn running(&self, number: u64) -> Option<&Operation> {
        let index = number.checked_sub(self.first)?;
        self.operations.get(usize::try_from(index).ok()?)?.as_ref()
    }

    /// Looks at the oldest operations, until one runs: quick, and enough where they end in order.
    pub(super) fn look_at_oldest(&mut self, engine: &Engine) {
        while !self.operations.is_empty() && self.has_ended(engine, self.first) {}
    }

    /// Looks at every operation, and says how many run.
    pub(super) fn look_at_all(&mut self, engine: &Engine) -> usize {
        self.look_at_those_before(engine, self.next_number())
    }

    /// Looks at the operations with smaller numbers, and says how many run.
    pub(super) fn look_at_those_before(&mut self, engine: &Engine, end: u64) -> usize {
        // Those that end at the front move nothing else.
        (self.first..end).filter(|&number| !self.has_ended(engine, number)).count()
    }

    /// Whether the operation has ended, and all that it leaves is booked.
    pub(super) fn has_ended(&mut self, engine: &Engine, number: u64) -> bool {
        let Some(operation) = self.running(number) else { return true };
        let batch = operation.outcome.batch;
        let mut failure = match engine.poll(batch).map(|status| status.state) {
            Ok(State::Running) => return false,
            Ok(State::Completed) => None,
            Ok(State::Failed(error)) | Err(error) => Some(error),
        };
        // What it read had to be there first, so those have ended, too.
        let sources: MostlyOne<_> = operation.sources.iter().map(|it| it.number).collect();
        if !sources.iter().all(|&source| self.has_ended(engine, source)) && failure.is_none() {
            return false;
        }
        let index = (number - self.first) as usize;
        let Some(operation) = self.operations[index].take() else { return true };
        let of_source = |source: &Arc<Outcome>| source.ended.get()?.as_ref().err().cloned();
        failure = failure.or_else(|| operation.sources.iter().find_map(of_source));
        self.end(engine, operation, failure);
        // It was polled to its end, and nobody else knows its id.
        let _ = engine.release(batch);
        while let Some(None) = self.operations.front() {
            self.operations.pop_front();
            self.first += 1;
        }
        true
    }

    fn end(&mut self, engine: &Engine, operation: Operation, failure: Option<Error>) {
        let Operation { kind, bytes, outcome, keys, groups, .. } = operation;
        // A lost device may still run what it failed to.
        let quiet = failure.is_none() || !engine.peer().is_lost(self.device);
        self.lost |= !quiet;
        match kind {
            Kind::Out => self.statistics.out_bytes -= bytes,
            Kind::In => self.statistics.in_bytes -= bytes,
            Kind::Clear => {}
        }
        // What an operation of a lost device uses is never free again.
        for group in groups.into_iter().filter(|_| quiet) {
            self.let_go(group, |group| group.users -= 1);
        }
        if let Some(error) = &failure {
            tracing::warn!(%error, ?kind, bytes, "an operation of the page store failed");
            self.statistics.failures += 1;
            self.failed.get_or_insert_with(|| (0, error.clone())).0 += 1;
            for key in keys {
                let its = |entry: &Entry| matches!(entry, Entry::Page(page) if Arc::ptr_eq(&page.source, &outcome));
                if self.entries.get(&key).is_some_and(its) {
                    self.forget(key);
                    self.entries.insert(key, Entry::Failed(error.clone()));
                }
            }
        }
        let _ = outcome.ended.set(failure.map_or(Ok(()), Err));
    }

    /// Books an operation that was submitted.
    pub(super) fn begin(&mut self, operation: Operation) {
        match operation.kind {
            Kind::Out => self.statistics.out_bytes += operation.bytes,
            Kind::In => self.statistics.in_bytes += operation.bytes,
            Kind::Clear => {}
        }
        for group in &operation.groups {
            self.groups.entry(*group).and_modify(|group| group.users += 1);
        }
        self.operations.push_back(Some(operation));
    }

    pub(super) fn group_order(&self, first: u32) -> u32 {
        self.groups.get(&first).map_or(0, |group| group.order)
    }

    /// Stores a key's page in a group, which is new with its first page.
    pub(super) fn store(&mut self, key: PageKey, page: Stored, order: u32) {
        let new = Group { order, stored: 0, users: 0 };
        self.groups.entry(page.group).or_insert(new).stored += 1;
        self.entries.insert(key, Entry::Page(page));
        self.statistics.stored_pages += 1;
    }

    /// Forgets a key; its memory comes free once nothing uses it.
    pub(super) fn forget(&mut self, key: PageKey) -> bool {
        match self.entries.remove(&key) {
            None => false,
            Some(Entry::Failed(_)) => true,
            Some(Entry::Page(page)) => {
                self.statistics.stored_pages -= 1;
                self.let_go(page.group, |group| group.stored -= 1);
                true
            }
        }
    }

    pub(super) fn forget_all(&mut self) {
        let all: Vec<_> = self.entries.keys().copied().collect();
        for key in all {
            self.forget(key);
        }
    }

    fn let_go(&mut self, first: u32, of_what: impl FnOnce(&mut Group)) {
        let Some(group) = self.groups.get_mut(&first) else { return };
        of_what(group);
        if group.stored == 0 && group.users == 0 {
            let order = group.order;
            self.groups.remove(&first);
            self.runs.give_back(first, order);
        }
    }

    /// Who has to be done before a page of the device is read.
    pub(super) fn before_reading(&self, page: u32, behind: &mut MostlyOne<u64>) {
        behind.push(self.uses[page as usize].writer);
    }

    /// Who has to be done before a page of the device is written.
    pub(super) fn before_writing(&self, page: u32, behind: &mut MostlyOne<u64>) {
        let uses = &self.uses[page as usize];
        behind.push(uses.writer);
        behind.extend_from_slice(&uses.readers);
    }

    /// The next operation reads a page of the device.
    pub(super) fn reads(&mut self, page: u32, number: u64) {
        let first = self.first;
        let readers = &mut self.uses[page as usize].readers;
        readers.retain(|&reader| reader >= first);
        readers.push(number);
    }

    /// The next operation writes a page of the device, behind all others that use it.
    pub(super) fn writes(&mut self, page: u32, number: u64) {
        let uses = &mut self.uses[page as usize];
        uses.writer = number;
        uses.readers.clear();
    }

    /// The batches of those operations that may run.
    pub(super) fn batches(&self, mut numbers: MostlyOne<u64>) -> MostlyOne<BatchId> {
        numbers.sort_unstable();
        numbers.dedup();
        let running = numbers.into_iter().filter_map(|number| self.running(number));
        running.map(|operation| operation.outcome.batch).collect()
    }

    pub(super) fn statistics(&self) -> StoreStatistics {
        let (mut held_pages, mut ending_pages) = (0, 0);
        for group in self.groups.values() {
            let forgotten = (1u64 << group.order) - u64::from(group.stored);
            let pages = if group.stored > 0 { &mut held_pages } else { &mut ending_pages };
            *pages += forgotten;
        }
        StoreStatistics {
            stored_bytes: self.statistics.stored_pages * self.page_bytes,
            free_pages: self.runs.free_slots(),
            held_pages,
            ending_pages,
            operations: self.operations.iter().flatten().count(),
            ..self.statistics
        }
    }

    /// What failed since the last call.
    pub(super) fn take_failures(&mut self) -> Result<(), StoreError> {
        match self.failed.take() {
            None => Ok(()),
            Some((operations, error)) => {
                Err(StoreError::Failed { operations, error: Box::new(error) })
            }
        }
    }
}
