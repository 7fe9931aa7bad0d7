//! Takes the samples of a question: pieces of one length, copied between two memories.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_device::{
    Completions, CopyDescriptor, Device, Memory, Queue, QueueOptions, SliceSource, Work,
};

use super::{Effort, KIB, MIB, Question, Sample, WARM_UP, Way};
use crate::config::{Config, MAX_GRID_BLOCKS};
use crate::error::{Error, Result};
use crate::profile::Values;

pub(super) const TILES: [u64; 5] = [4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB];
/// Pieces, and bytes of each: many tiles for each warp, and few.
pub(super) const TILE_SHAPES: [(usize, u64); 2] = [(64, MIB), (4, MIB)];
pub(super) const GRIDS: [u32; 13] = [16, 24, 32, 48, 64, 96, 128, 192, 264, 384, 528, 792, 1056];
/// Few long pieces, and many short ones.
pub(super) const GRID_SHAPES: [(usize, u64); 2] = [(64, MIB), (8192, 8 * KIB)];
pub(super) const FEW: [usize; 8] = [1, 2, 3, 4, 6, 8, 12, 16];
pub(super) const FEW_SIZES: [u64; 2] = [4 * KIB, 64 * KIB];
pub(super) const SIZES: [u64; 14] = [
    4 * KIB,
    8 * KIB,
    16 * KIB,
    32 * KIB,
    64 * KIB,
    128 * KIB,
    256 * KIB,
    512 * KIB,
    MIB,
    2 * MIB,
    4 * MIB,
    8 * MIB,
    16 * MIB,
    32 * MIB,
];
const SIZE_COUNTS: [usize; 3] = [4, 16, 64];

/// How often a run that takes long asks the driver whether the device still works.
const CHECK: Duration = Duration::from_millis(100);

/// A queue, and what it copies between.
pub(super) struct Bench {
    /// Dropped first, which waits for its copies.
    queue: Option<Box<dyn Queue>>,
    completions: Arc<dyn Completions>,
    src: Option<Memory>,
    dst: Option<Memory>,
    to: String,
    effort: Effort,
    descriptors: Vec<CopyDescriptor>,
}

impl Bench {
    pub(super) fn open(
        config: &Config,
        device: &Arc<dyn Device>,
        other: &Arc<dyn Device>,
        effort: Effort,
    ) -> Result<Self> {
        let options = QueueOptions {
            streams: config.streams,
            // Each submission has its own.
            max_grid_blocks: *MAX_GRID_BLOCKS.end() as u32,
            high_priority: config.high_priority,
            stall_timeout: config.stall_timeout,
            ..QueueOptions::default()
        };
        let src = Arc::clone(device).allocate(effort.bytes)?;
        let dst = Arc::clone(other).allocate(effort.bytes)?;
        let queue = Arc::clone(device).queue(&options)?;
        Ok(Self {
            completions: queue.completions(),
            queue: Some(queue),
            src: Some(src),
            dst: Some(dst),
            to: other.info().to_string(),
            effort,
            descriptors: Vec::new(),
        })
    }

    /// Takes all samples of a question; what it does not vary is as in `values`.
    pub(super) fn ask(&mut self, question: Question, values: &Values) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        let room = self.effort.bytes;
        let mut take = |way, pieces: usize, piece_bytes: u64, tile_bytes, max_grid_blocks| {
            // A small memory has the same pieces, shorter.
            let piece_bytes = piece_bytes.min(room / pieces as u64).max(1);
            let mut sample = Sample {
                question,
                to: self.to.clone(),
                way,
                pieces,
                piece_bytes,
                tile_bytes,
                max_grid_blocks,
                nanoseconds: 0,
            };
            sample.nanoseconds = self.median(&sample)?;
            samples.push(sample);
            Ok::<_, Error>(())
        };
        let &Values { tile_bytes: tile, max_grid_blocks: grid, .. } = values;
        match question {
            Question::Tile => {
                for (pieces, bytes) in TILE_SHAPES {
                    for tile in TILES {
                        take(Way::Kernel, pieces, bytes, tile, grid)?;
                    }
                }
            }
            Question::Grid => {
                for (pieces, bytes) in GRID_SHAPES {
                    for grid in GRIDS {
                        take(Way::Kernel, pieces, bytes, tile, grid)?;
                    }
                }
            }
            Question::Few => {
                for (pieces, bytes) in FEW.into_iter().flat_map(|n| FEW_SIZES.map(|b| (n, b))) {
                    for way in [Way::Kernel, Way::Dma] {
                        take(way, pieces, bytes, tile, grid)?;
                    }
                }
            }
            Question::Size => {
                for (bytes, pieces) in SIZES.into_iter().flat_map(|b| SIZE_COUNTS.map(|n| (b, n))) {
                    if bytes * pieces as u64 <= room {
                        for way in [Way::Kernel, Way::Dma] {
                            take(way, pieces, bytes, tile, grid)?;
                        }
                    }
                }
            }
            // An engine's own.
            Question::HostLink => {}
        }
        Ok(samples)
    }

    /// Runs a sample, and returns the median in nanoseconds.
    fn median(&mut self, sample: &Sample) -> Result<u64> {
        self.lay_out(sample);
        let mut took = Vec::with_capacity(self.effort.runs);
        for run in 0..WARM_UP + self.effort.runs.max(1) {
            let one = self.run(sample).inspect_err(|_| self.abandon())?;
            if run >= WARM_UP {
                took.push(one.as_nanos() as u64);
            }
        }
        let middle = took.len() / 2;
        Ok(*took.select_nth_unstable(middle).1)
    }

    /// Spreads the pieces over both memories, cut into tiles for the kernel.
    fn lay_out(&mut self, sample: &Sample) {
        let addr = |memory: &Option<Memory>| memory.as_ref().map_or(0, Memory::addr);
        let (src, dst) = (addr(&self.src), addr(&self.dst));
        // Aligned as pages of a cache are, unless they are shorter.
        let apart = self.effort.bytes / sample.pieces as u64;
        let apart = (apart & !255).max(sample.piece_bytes);
        let tile = match sample.way {
            Way::Kernel => sample.tile_bytes,
            _ => sample.piece_bytes,
        };
        self.descriptors.clear();
        for first in (0..sample.pieces as u64).map(|piece| piece * apart) {
            for at in (0..sample.piece_bytes).step_by(tile as usize) {
                let len = tile.min(sample.piece_bytes - at);
                let (src, dst) = (src + first + at, dst + first + at);
                self.descriptors.push(CopyDescriptor { src, dst, len });
            }
        }
    }

    fn run(&mut self, sample: &Sample) -> Result<Duration> {
        let queue = self.queue.as_mut().expect("it is there until a run fails");
        let mut pieces = SliceSource(&self.descriptors);
        let mut nothing = SliceSource(&[]);
        let mut work = match sample.way {
            Way::Kernel => {
                let max_grid_blocks = sample.max_grid_blocks;
                Work { max_grid_blocks, ..Work::pieces(&mut pieces) }
            }
            _ => Work { large: &self.descriptors, ..Work::pieces(&mut nothing) },
        };
        let start = Instant::now();
        let mut asked = Duration::ZERO;
        // SAFETY: `lay_out` put every piece inside the two memories, at places of its own; both are
        // ours alone, and stay allocated until the submission is done, because `abandon` keeps them
        // for the life of the process where nobody knows whether it is.
        let submitted = unsafe { queue.submit(&mut work) };
        let ticket = submitted.map_err(|error| error.error)?;
        while !self.completions.done(ticket) {
            std::hint::spin_loop();
            let waited = start.elapsed();
            if waited - asked > CHECK {
                queue.check()?;
                asked = waited;
            }
        }
        Ok(start.elapsed())
    }

    /// Copies may still run: lets the queue wait for them, and keeps the memories for ever, as it
    /// does not say whether it could.
    fn abandon(&mut self) {
        self.queue = None;
        std::mem::forget((self.src.take(), self.dst.take()));
    }
}
