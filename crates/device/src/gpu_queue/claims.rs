//! Tables in device memory by which launches find out whether destinations of a submission overlap.
//!
//! A submission has a table for itself, which its device clears behind it. If none is free and clear,
//! or the destinations need a larger one, nobody looks: the verdict is missing, and whoever submits
//! looks himself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::{GpuQueue, Open};
use crate::driver::{Driver, Pinned};
use crate::error::Result;
use crate::gpu::GpuDevice;
use crate::kernel::{BLOCK_THREADS, Claims, Entry};
use crate::queue::{Destinations, Verdict, Verdicts};

/// Submissions that are looked at together.
pub(super) const TABLES: usize = 4;
/// Entries of a table: 4 MiB.
const LOG2: u32 = 19;
/// A table that is half full finds a place at once, mostly.
const ENTRIES_PER_BLOCK: u64 = 2;
const ENTRY: u64 = size_of::<u64>() as u64;
/// Of a launch with fewer blocks none are spared.
const FEWEST_BLOCKS: u32 = 8;
const APART: u32 = u32::MAX;

/// What the device writes and whoever waits reads: two words for each table.
#[derive(Debug)]
pub(super) struct Tables<D: Driver> {
    device: Arc<GpuDevice<D>>,
    memory: Pinned,
    lent: [AtomicBool; TABLES],
}

// SAFETY: the memory is only used as atomics; the device and the numbers are Sync themselves.
unsafe impl<D: Driver> Sync for Tables<D> {}

/// The words of a table, by their place.
#[derive(Clone, Copy)]
enum Word {
    /// How often it was cleared.
    Cleared,
    /// A piece that overlaps another.
    Verdict,
}

impl<D: Driver> Tables<D> {
    pub(super) fn new(device: &Arc<GpuDevice<D>>) -> Result<Arc<Self>> {
        let bytes = TABLES * 2 * size_of::<u32>();
        let memory = device.driver.allocate_pinned(bytes as u64)?;
        // SAFETY: the memory is `bytes` long, ours alone, and no device uses it yet.
        unsafe { memory.host.write_bytes(0, bytes) };
        let lent = [const { AtomicBool::new(false) }; TABLES];
        Ok(Arc::new(Self { device: Arc::clone(device), memory, lent }))
    }

    pub(super) fn pinned_bytes(&self) -> u64 {
        self.memory.len
    }

    fn word(&self, table: usize, word: Word) -> &AtomicU32 {
        // SAFETY: inside the memory, which is aligned and lives as long as `self`; the device stores
        // whole words.
        unsafe { &*self.memory.host.cast::<AtomicU32>().add(table * 2 + word as usize) }
    }

    fn address(&self, table: usize, word: Word) -> u64 {
        self.memory.device + ((table * 2 + word as usize) * size_of::<u32>()) as u64
    }
}

impl<D: Driver> Verdicts for Tables<D> {
    fn overlap(&self, table: usize) -> Option<u32> {
        let piece = self.word(table, Word::Verdict).load(Ordering::Acquire);
        (piece != APART).then_some(piece)
    }

    fn give_back(&self, table: usize) {
        self.lent[table].store(false, Ordering::Release);
    }
}

impl<D: Driver> Drop for Tables<D> {
    fn drop(&mut self) {
        let driver = &self.device.driver;
        if let Ok(_scope) = driver.enter() {
            let _ = driver.free_pinned(self.memory);
        }
    }
}

/// A table as its queue sees it.
#[derive(Debug, Default)]
pub(super) enum Table {
    #[default]
    Missing,
    /// There was no memory for it.
    Refused,
    /// Clear once its word says so many times.
    At { addr: u64, cleared: u32 },
}

/// The table of the submission that is being made.
#[derive(Debug)]
pub(super) struct Claiming {
    table: usize,
    claims: Claims,
}

impl<D: Driver> GpuQueue<D> {
    /// Lends a table to a submission whose pieces a kernel copies, if one is free.
    pub(super) fn begin_claims(
        &mut self,
        destinations: &mut Destinations,
        max_grid_blocks: u32,
    ) -> Option<Claiming> {
        let most = self.grids[Entry::Claimed as usize].min(max_grid_blocks);
        let (low, granule) = (destinations.low, destinations.granule);
        let block =
            granule.checked_mul(Destinations::BLOCK).filter(|_| granule.is_power_of_two())?;
        let span = destinations.high.checked_sub(low)? / block;
        let entries = destinations.blocks().checked_mul(ENTRIES_PER_BLOCK)?;
        let log2 = entries.max(1 << 8).checked_next_power_of_two()?.ilog2();
        // A block's number and one more have 32 bits, and so has the index of a piece.
        let fits = span < u64::from(u32::MAX) - 1 && destinations.pieces < u64::from(APART);
        if !fits || log2 > LOG2 || most < FEWEST_BLOCKS {
            return None;
        }
        let table = (0..TABLES).find(|&table| self.is_free(table))?;
        let Table::At { addr, .. } = self.tables[table] else {
            self.make_table(table);
            return None;
        };
        self.verdicts.word(table, Word::Verdict).store(APART, Ordering::Release);
        self.verdicts.lent[table].store(true, Ordering::Relaxed);
        let tables = Arc::clone(&self.verdicts) as Arc<dyn Verdicts>;
        destinations.verdict = Some(Verdict { tables, table });
        let verdict = self.verdicts.address(table, Word::Verdict);
        let shift = granule.ilog2();
        let claims = Claims { table: addr, verdict, low, log2, shift, first: 0, blocks: 0 };
        Some(Claiming { table, claims })
    }

    /// Whether a table may be lent, or made.
    fn is_free(&self, table: usize) -> bool {
        match self.tables[table] {
            Table::Missing => true,
            Table::Refused => false,
            Table::At { cleared, .. } => {
                self.verdicts.word(table, Word::Cleared).load(Ordering::Acquire) == cleared
                    && !self.verdicts.lent[table].load(Ordering::Acquire)
            }
        }
    }

    /// Makes a table for submissions to come.
    fn make_table(&mut self, table: usize) {
        let stream = self.shared_stream(0);
        let made =
            stream.and_then(|stream| Ok((stream, self.device.driver.allocate(ENTRY << LOG2)?)));
        match made {
            Ok((stream, addr)) => {
                self.tables[table] = Table::At { addr, cleared: 0 };
                self.clear_table(stream, table, ENTRY << LOG2);
            }
            Err(error) => {
                tracing::debug!(%error, "no table to find overlaps with");
                self.tables[table] = Table::Refused;
            }
        }
    }

    /// Clears a table behind all that uses it on the stream. One that is not cleared stays unused.
    fn clear_table(&mut self, stream: D::Stream, table: usize, bytes: u64) {
        let Table::At { addr, cleared } = &mut self.tables[table] else { return };
        *cleared = cleared.wrapping_add(1);
        let word = self.verdicts.address(table, Word::Cleared);
        let driver = &self.device.driver;
        // SAFETY: the table is ours, and lives with its words until the queue has nothing to do.
        let cleared = unsafe {
            driver.clear(stream, *addr, bytes).and_then(|()| driver.store(stream, word, *cleared))
        };
        if let Err(error) = cleared {
            tracing::debug!(%error, "a table to find overlaps with was not cleared");
            // Its memory stays: nobody knows what uses it.
            self.tables[table] = Table::Refused;
        }
    }

    /// Whether the device has cleared all that it is to clear.
    pub(super) fn tables_are_clear(&self) -> bool {
        let is_clear = |(table, state): (usize, &Table)| match *state {
            Table::Missing | Table::Refused => true,
            Table::At { cleared, .. } => {
                self.verdicts.word(table, Word::Cleared).load(Ordering::Acquire) == cleared
            }
        };
        self.tables.iter().enumerate().all(is_clear)
    }

    /// Launches a part of the pieces, whose destinations are claimed on the way.
    ///
    /// # Safety
    /// As [`Driver::launch`].
    pub(super) unsafe fn launch_claimed(
        &self,
        open: &mut Open<D>,
        stream: D::Stream,
        descriptors: u64,
        count: u32,
    ) -> Result<()> {
        let most = self.grids[Entry::Claimed as usize].min(open.max_grid_blocks);
        let Some(Claiming { claims, .. }) = &mut open.claiming else { return Ok(()) };
        claims.blocks = count.div_ceil(BLOCK_THREADS).min(most / 4);
        let copies =
            crate::kernel::grid(count, self.device.driver.warp_lanes(), most - claims.blocks);
        let blocks = claims.blocks + copies;
        // SAFETY: the caller's contract; the table is lent to this submission, and the words live as
        // long as the queue has something to do.
        unsafe { self.device.driver.launch_claimed(stream, descriptors, count, blocks, claims) }?;
        claims.first += count;
        Ok(())
    }

    /// Has the device clear the table of a submission, whose work is all before that on the stream.
    pub(super) fn end_claims(&mut self, stream: D::Stream, Claiming { table, claims }: Claiming) {
        // Nothing was claimed: it is clear.
        if claims.first > 0 {
            self.clear_table(stream, table, ENTRY << claims.log2);
        }
    }

    /// Frees the tables of a queue that has nothing to do.
    pub(super) fn free_tables(&mut self) {
        for table in std::mem::take(&mut self.tables) {
            if let Table::At { addr, .. } = table {
                let _ = self.device.driver.free(addr);
            }
        }
    }
}
