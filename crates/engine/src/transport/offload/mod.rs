//! Between a GPU's memory and host memory that it reaches: which way a batch goes, and how.
//!
//! - *direct*: one DMA for each piece, one 2-D DMA for each block of rows with strides;
//! - *kernel*: the copy kernel reads or writes host memory in place;
//! - *staged*: the kernel gathers into, or scatters from, a buffer in device memory, and one DMA for
//!   each run of host memory does the rest; buffers take turns, so that both go on side by side.
//!
//! Each direction of a device has a queue of its own, so that stores and loads share no stream.

mod bounce;
mod choice;
mod fragments;
mod sort;
mod stages;
mod steps;

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use kvferry_device::{
    Capabilities, CompactCopy, CopyDescriptor, CopySource, Device, QueueOptions, Rows, SliceSource,
    Staged, Vendor, Work,
};

use self::bounce::Bounce;
use self::choice::Shape;
pub use self::choice::{Choice, Reason};
use self::fragments::Borders;
pub(super) use self::fragments::Direction;
use self::fragments::{Fragments, append};
use self::stages::Packer;
use self::steps::Steps;
use super::fences::Order;
use super::lane::Lane;
use super::load::Load;
use super::peer::Submitted;
use super::place::Plan;
use crate::batch::Path;
use crate::config::{Config, Policy};
use crate::error::Result;
use crate::plan::{Strides, Want};
use crate::request::{OffloadMode, SubmitOptions};

/// The offload transport of one engine.
#[derive(Debug)]
pub(crate) struct Offload {
    config: Config,
    /// Per device, one for each direction.
    ways: Vec<[OnceLock<Result<Arc<Way>>>; 2]>,
    /// Per device.
    steps: Vec<Mutex<Steps>>,
    /// Choices that were logged.
    logged: Mutex<HashSet<(usize, Direction, Choice)>>,
}

/// One direction of one device.
#[derive(Debug)]
struct Way {
    // First, so that its copies have ended when the memory goes.
    lane: Arc<Lane>,
    bounce: Mutex<Bounce>,
    /// Of batches that are not planned now.
    memory: Mutex<Vec<ListMemory>>,
}

/// What a list of pieces needs, kept from one batch to the next.
#[derive(Debug, Default)]
struct ListMemory {
    list: Vec<CopyDescriptor>,
    sort: sort::Memory,
}

/// Some plans of one direction and their strides.
pub(super) type Parts<'a> = [(&'a Plan<'a>, &'a Strides)];

impl Offload {
    pub(super) fn new(config: &Config, devices: &[Arc<dyn Device>]) -> Self {
        let steps = || Mutex::new(Steps::new(config.tail_budget_percent));
        Self {
            config: config.clone(),
            ways: devices.iter().map(|_| Default::default()).collect(),
            steps: devices.iter().map(|_| steps()).collect(),
            logged: Mutex::default(),
        }
    }

    fn way(&self, index: usize, device: &Arc<dyn Device>, direction: Direction) -> Result<&Way> {
        let open = || {
            let options = QueueOptions { streams: 2, ..QueueOptions::default() };
            let lane = Lane::open_with(Arc::clone(device), &self.config, &options)?;
            let completions = Arc::clone(&lane.completions);
            let bounce = Bounce::new(Arc::clone(device), completions, &self.config);
            let (bounce, memory) = (Mutex::new(bounce), Mutex::default());
            Ok(Arc::new(Way { lane: Arc::new(lane), bounce, memory }))
        };
        let way = self.ways[index][direction as usize].get_or_init(open);
        way.as_ref().map(Arc::as_ref).map_err(Clone::clone)
    }

    fn open_ways(&self) -> impl Iterator<Item = &Arc<Way>> {
        self.ways.iter().flatten().filter_map(|way| way.get()?.as_ref().ok())
    }

    /// A step of the model on a device took so long.
    pub(super) fn record_step(&self, index: usize, device: &Arc<dyn Device>, time: Duration) {
        if self.config.policy != Policy::Tail {
            return;
        }
        if let Some((allowed, percent)) = lock(&self.steps[index]).record(time) {
            let percent = percent.round();
            tracing::info!(device = %device.info(), ?allowed, percent, "transfers lengthen the model's slowest steps: the tail policy allows something else");
        }
    }

    /// Whether nobody knows what the copies of a device do.
    pub(super) fn is_lost(&self, index: usize) -> bool {
        let mut ways = self.ways[index].iter().filter_map(|way| way.get()?.as_ref().ok());
        ways.any(|way| way.lane.is_lost())
    }

    /// Bytes of pinned memory of the queues.
    pub(super) fn pinned_bytes(&self) -> u64 {
        self.open_ways().map(|way| way.lane.lock().pinned_bytes()).sum()
    }

    /// Bytes of device memory that staged copies pass through, made so far.
    pub(super) fn bounce_bytes(&self) -> u64 {
        self.open_ways().map(|way| lock(&way.bounce).bytes()).sum()
    }

    /// What the submission or a knob asks for, if either does.
    fn asked(&self, direction: Direction, options: &SubmitOptions<'_>) -> Option<Choice> {
        let knob = match direction {
            Direction::Store => self.config.offload_store,
            Direction::Load => self.config.offload_load,
        };
        let (mode, reason) = match (options.offload, knob) {
            _ if options.without_kernel => (OffloadMode::Direct, Reason::WithoutKernel),
            (OffloadMode::Auto, OffloadMode::Auto) => return None,
            (OffloadMode::Auto, knob) => (knob, Reason::Knob),
            (asked, _) => (asked, Reason::Asked),
        };
        Some(Choice { mode, in_steps: false, reason })
    }

    /// Starts plans of one device and direction. `None`: nobody asked for anything, and the processor
    /// copies.
    ///
    /// `fall_back` refuses plans for lack of a kernel, or says that they go a slower way.
    pub(super) fn start(
        &self,
        (index, device): (usize, &Arc<dyn Device>),
        direction: Direction,
        parts: &Parts<'_>,
        options: &SubmitOptions<'_>,
        order: Order<'_>,
        fall_back: impl FnOnce() -> Result<()>,
    ) -> Result<Option<Submitted>> {
        let asked = self.asked(direction, options);
        let info = device.info();
        if asked.is_none() && info.vendor == Vendor::Host {
            return Ok(None);
        }
        let way = self.way(index, device, direction)?;
        let batch_min = way.lane.tuning.values.batch_min;
        let plans: Vec<_> = parts.iter().map(|&(plan, _)| plan).collect();
        let direct = |reason| Choice { mode: OffloadMode::Direct, in_steps: false, reason };
        let wants = |asked: Option<Choice>| match asked.map(|asked| asked.mode) {
            Some(OffloadMode::Direct) => false,
            Some(_) => true,
            None => parts.iter().any(|(plan, strides)| plan.wants_kernel(strides, batch_min)),
        };
        let mut fragments = Fragments::of(&plans, direction);
        let mut memory = lock(&way.memory).pop().unwrap_or_default();
        let mut listed = false;
        let mut choice = if !self.config.kernel && wants(asked) {
            direct(Reason::WithoutKernel)
        } else if !info.capabilities.contains(Capabilities::KERNEL) && wants(asked) {
            fall_back()?;
            direct(Reason::NoKernel)
        } else if let Some(asked) = asked {
            if asked.mode == OffloadMode::Staged && choice::is_scattered(&Shape::of(&fragments)) {
                listed = true;
                sort_if_it_helps(&mut fragments, &mut memory);
            }
            asked
        } else {
            let shape = Shape::of(&fragments);
            let allowed = lock(&self.steps[index]).allowed();
            choice::choose(self.config.policy, allowed, shape, || {
                listed = true;
                sort_if_it_helps(&mut fragments, &mut memory)
                    .then(|| choice::host_calls(&memory.list, &fragments))
            })
        };
        let mut submitted = Submitted::nothing();
        if choice.mode == OffloadMode::Staged {
            let mut list = SliceSource(&memory.list);
            let borders = std::mem::take(&mut fragments.host_borders);
            let source: &mut dyn CopySource = if listed { &mut list } else { &mut fragments };
            match self.start_staged(way, direction, source, &borders, order, &mut submitted) {
                Err(error) if asked.is_some() || !is_out_of_memory(&error) => return Err(error),
                Err(_) => {
                    choice = Choice {
                        mode: OffloadMode::Kernel,
                        in_steps: false,
                        reason: Reason::NoBounce,
                    }
                }
                Ok(()) => {}
            }
        }
        match choice.mode {
            OffloadMode::Direct => start_direct(way, parts, order, &mut submitted)?,
            OffloadMode::Kernel => start_kernel(way, parts, order, &mut submitted)?,
            OffloadMode::Auto | OffloadMode::Staged => {}
        }
        lock(&way.memory).push(memory);
        if self.config.policy == Policy::Tail {
            lock(&self.steps[index]).moves(&submitted.pending);
        }
        submitted.bytes = parts.iter().map(|(plan, _)| plan.bytes()).sum();
        submitted.choice = Some(choice);
        self.log(index, device, direction, choice);
        Ok(Some(submitted))
    }

    fn log(&self, index: usize, device: &Arc<dyn Device>, direction: Direction, choice: Choice) {
        if lock(&self.logged).insert((index, direction, choice)) {
            tracing::info!(device = %device.info(), ?direction, %choice, "host offload");
        }
    }

    fn start_staged(
        &self,
        way: &Way,
        direction: Direction,
        source: &mut dyn CopySource,
        borders: &Borders,
        order: Order<'_>,
        submitted: &mut Submitted,
    ) -> Result<()> {
        let gated = order.waits();
        let mut bounce = lock(&way.bounce);
        let taken = bounce.take(gated)?;
        let values = &way.lane.tuning.values;
        let (bytes, tile) = (bounce.buffer_bytes, values.tile_bytes);
        let mut stages = Packer::new(source, direction, borders, taken.buffers, bytes, tile);
        let mut nothing = SliceSource(&[]);
        let mut work = Work {
            staged: Some(Staged { stages: &mut stages, behind: taken.behind.as_slice() }),
            after: order.after,
            behind: order.behind,
            max_grid_blocks: values.max_grid_blocks,
            ..Work::pieces(&mut nothing)
        };
        submitted.path = Path::Staged;
        // SAFETY: the caller keeps what it planned until the batch has ended; the buffers are this
        // submission's until it is done, which is what `used` says.
        let outcome = unsafe { way.lane.submit(&mut work, &mut submitted.pending) };
        if let Some(pending) = submitted.pending.last() {
            bounce.used(&taken, pending.ticket, gated);
        }
        match outcome {
            Err(error) if submitted.pending.is_empty() => return Err(error),
            outcome => submitted.failure = outcome.err(),
        }
        Ok(())
    }
}

/// Puts all pieces into the memory's list, in order of host memory if that helps; whether it did.
fn sort_if_it_helps(fragments: &mut Fragments<'_>, memory: &mut ListMemory) -> bool {
    let ListMemory { list, sort } = memory;
    fragments.drain_into(list);
    let helps = sort::is_worth_it(list, fragments.direction, fragments.bytes);
    if helps {
        sort::by_host(list, fragments.direction, sort);
    }
    helps
}

fn is_out_of_memory(error: &crate::error::Error) -> bool {
    matches!(error, crate::error::Error::Device(kvferry_device::Error::OutOfMemory { .. }))
}

/// One DMA for each piece and block of rows.
fn start_direct(
    way: &Way,
    parts: &Parts<'_>,
    order: Order<'_>,
    submitted: &mut Submitted,
) -> Result<()> {
    let mut large = Vec::new();
    let mut compact: Vec<CompactCopy<'_>> = Vec::new();
    for &(plan, _) in parts {
        match plan {
            Plan::Forms(plan) => compact.extend(&plan.copies),
            Plan::Ranges(ranges) => {
                let borders = Borders::of(&[plan]);
                let mut pieces = ranges.pieces(Want::All);
                let mut some = [CopyDescriptor::default(); 256];
                let mut blocks: Vec<Rows> = Vec::new();
                loop {
                    let count = pieces.fill(&mut some);
                    if count == 0 {
                        break;
                    }
                    for piece in &some[..count] {
                        append(&mut blocks, *piece, &borders);
                    }
                }
                for block in blocks {
                    match block {
                        Rows { src, dst, len, count: 1, .. } => {
                            large.push(CopyDescriptor { src, dst, len });
                        }
                        rows => compact.push(rows.compact()),
                    }
                }
            }
        }
    }
    let mut nothing = SliceSource(&[]);
    let mut work = Work {
        compact: &compact,
        large: &large,
        kernel: false,
        after: order.after,
        behind: order.behind,
        ..Work::pieces(&mut nothing)
    };
    submitted.path = Load::default().path(way.lane.device.info().vendor, false);
    // SAFETY: as in `start_staged`.
    match unsafe { way.lane.submit(&mut work, &mut submitted.pending) } {
        Err(error) if submitted.pending.is_empty() => return Err(error),
        outcome => submitted.failure = outcome.err(),
    }
    Ok(())
}

/// The kernel on host memory in place; DMA for pieces that are large.
fn start_kernel(
    way: &Way,
    parts: &Parts<'_>,
    order: Order<'_>,
    submitted: &mut Submitted,
) -> Result<()> {
    let batch_min = way.lane.tuning.values.batch_min;
    let loads = parts.iter().map(|&(plan, strides)| Load::of(plan, strides, true, batch_min));
    let loads = Load::joined(loads.collect());
    // SAFETY: as in `start_staged`.
    unsafe { Load::submit(loads, &way.lane, true, GRID_BLOCKS, order, submitted) }
}

/// Most blocks of a launch on host memory: the link is full with far fewer bytes under way, and more
/// warps only take multiprocessors from the model (LAB.md: beside decode 64 blocks are quicker than
/// a full grid, and hurt less).
const GRID_BLOCKS: u32 = 64;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
