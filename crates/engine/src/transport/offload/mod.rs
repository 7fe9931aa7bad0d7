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
mod image;
mod paced;
mod sort;
mod stages;
mod steps;
mod submit;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use foldhash::HashSet;
use kvferry_device::{
    Capabilities, CopyDescriptor, CopySource, Device, QueueOptions, SliceSource, Vendor,
};

use self::bounce::Bounce;
use self::choice::{Calls, Costs, Shape};
pub use self::choice::{Choice, Reason};
pub(super) use self::fragments::Direction;
use self::fragments::{Borders, Fragments};
use self::image::Image;
pub(crate) use self::paced::Paced;
use self::paced::{Job, Worker};
use self::stages::Division;
use self::steps::Steps;
use self::submit::{
    Passing, host_grid, start_direct, start_kernel, start_staged, step_without_buffers,
};
use super::fences::{Order, wait_for};
use super::lane::{DeviceLanes, Lane};
use super::overlaps::Overlaps;
use super::peer::Submitted;
use super::place::Plan;
use crate::batch::Path;
use crate::config::{Config, Policy};
use crate::error::{Error, Result};
use crate::mostly_one::MostlyOne;
use crate::plan::Strides;
use crate::request::{OffloadMode, SubmitOptions};

/// The offload transport of one engine.
#[derive(Debug)]
pub(crate) struct Offload {
    config: Config,
    devices: Vec<Arc<DeviceLanes>>,
    /// Per device, one for each direction; made when a batch first needs it.
    ways: Vec<[Mutex<Option<Arc<Way>>>; 2]>,
    /// Per device; started when a batch is first submitted step by step.
    workers: Vec<Mutex<Option<Arc<Worker>>>>,
    /// Per device.
    steps: Vec<Mutex<Steps>>,
    /// Of each device, whether it was warned that it has no memory to stage in.
    without_bounce: Vec<AtomicBool>,
    /// Choices that were logged.
    logged: Mutex<HashSet<(usize, Direction, Choice)>>,
}

/// One direction of one device.
#[derive(Debug)]
struct Way {
    // First, so that its copies have ended when the memory goes.
    lane: Arc<Lane>,
    bounce: Mutex<Bounce>,
    /// Bytes of its buffers. Known beside it: a thread that submits has it for as long.
    bounce_bytes: Arc<AtomicU64>,
    /// Of batches that are not planned now.
    memory: Mutex<Vec<ListMemory>>,
}

/// What a list of pieces needs, kept from one batch to the next.
#[derive(Debug, Default)]
struct ListMemory {
    list: Vec<CopyDescriptor>,
    sort: sort::Memory,
}

/// Descriptors of a launch, at most: the fewer launches, the fewer time slices of the GPU a batch takes
/// from another process, and 32,768 pieces of 2 KiB fill a buffer.
const SLOT_DESCRIPTORS: usize = 32_768;

/// What is to be started.
pub(super) struct Request<'a> {
    pub(super) direction: Direction,
    pub(super) parts: &'a Parts<'a>,
    pub(super) options: &'a SubmitOptions<'a>,
    pub(super) order: Order<'a>,
}

/// Some plans of one direction and their strides.
pub(super) type Parts<'a> = [(&'a Plan<'a>, &'a Strides)];

impl Offload {
    pub(super) fn new(config: &Config, devices: &[Arc<DeviceLanes>]) -> Self {
        let steps = || Mutex::new(Steps::new(config.tail_budget_percent));
        Self {
            config: config.clone(),
            devices: devices.to_vec(),
            ways: devices.iter().map(|_| Default::default()).collect(),
            workers: devices.iter().map(|_| Mutex::default()).collect(),
            steps: devices.iter().map(|_| steps()).collect(),
            without_bounce: devices.iter().map(|_| AtomicBool::new(false)).collect(),
            logged: Mutex::default(),
        }
    }

    fn way(&self, index: usize, direction: Direction) -> Result<Arc<Way>> {
        let mut place = lock(&self.ways[index][direction as usize]);
        if let Some(way) = &*place {
            return Ok(Arc::clone(way));
        }
        let options = QueueOptions {
            streams: 2,
            ring_slots: 8,
            slot_descriptors: SLOT_DESCRIPTORS,
            ..QueueOptions::default()
        };
        let lane = Lane::open_with(&self.devices[index], &self.config, &options)?;
        let completions = Arc::clone(&lane.completions);
        let bounce = Bounce::new(Arc::clone(&lane.device), completions, &self.config);
        let bounce_bytes = bounce.made();
        let (bounce, memory) = (Mutex::new(bounce), Mutex::default());
        let way = Arc::new(Way { lane, bounce, bounce_bytes, memory });
        Ok(Arc::clone(place.insert(way)))
    }

    fn worker(&self, index: usize, device: &Arc<dyn Device>) -> Result<Arc<Worker>> {
        let mut place = lock(&self.workers[index]);
        if let Some(worker) = &*place {
            return Ok(Arc::clone(worker));
        }
        let worker = Worker::start(&device.info().to_string(), self.config.max_rate)?;
        Ok(Arc::clone(place.insert(Arc::new(worker))))
    }

    /// Submits nothing more of batches that are submitted step by step.
    pub(super) fn stop(&self) {
        for worker in &self.workers {
            if let Some(worker) = &*lock(worker) {
                worker.stop();
            }
        }
    }

    /// As [`Peer::abandon`](super::peer::Peer::abandon).
    pub(super) fn abandon(&mut self) {
        std::mem::forget((std::mem::take(&mut self.ways), std::mem::take(&mut self.workers)));
        std::mem::forget(std::mem::take(&mut self.steps));
    }

    /// Whether there is a byte rate.
    pub(super) fn is_rated(&self) -> bool {
        self.config.max_rate.is_some()
    }

    /// Whether batches may be submitted step by step.
    pub(super) fn may_pace(&self) -> bool {
        self.is_rated() || self.config.policy == Policy::Tail
    }

    fn open_ways(&self) -> impl Iterator<Item = Arc<Way>> {
        self.ways.iter().flatten().filter_map(|way| lock(way).clone())
    }

    /// A step of the model on a device took so long.
    pub(super) fn record_step(&self, index: usize, device: &Arc<dyn Device>, time: Duration) {
        if self.config.policy != Policy::Tail {
            return;
        }
        if let Some((throttle, percent)) = lock(&self.steps[index]).record(time) {
            let (percent, share) = (percent.round(), 1 << throttle);
            tracing::info!(device = %device.info(), percent, "transfers lengthened the model's slowest steps by so much: they may take one {share}th of the time now");
        }
    }

    /// Bytes of pinned memory of the queues.
    pub(super) fn pinned_bytes(&self) -> u64 {
        self.open_ways().map(|way| way.lane.pinned_bytes).sum()
    }

    /// Bytes of device memory that staged copies pass through, made so far.
    pub(super) fn bounce_bytes(&self) -> u64 {
        self.open_ways().map(|way| way.bounce_bytes.load(Ordering::Relaxed)).sum()
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

    /// Starts plans of one device and direction, once no overlaps are found. `false`: nobody asked for
    /// anything, and the processor copies, which is not for here.
    ///
    /// `fall_back` refuses plans for lack of a kernel, or says that they go a slower way.
    pub(super) fn start(
        &self,
        (index, device): (usize, &Arc<dyn Device>),
        request: Request<'_>,
        overlaps: &mut Overlaps<'_>,
        fall_back: impl FnOnce() -> Result<()>,
        submitted: &mut Submitted,
    ) -> Result<bool> {
        let Request { direction, parts, options, order } = request;
        let asked = self.asked(direction, options);
        let info = device.info();
        if asked.is_none() && info.vendor == Vendor::Host {
            return Ok(false);
        }
        let way = self.way(index, direction)?;
        let batch_min = way.lane.tuning.values.batch_min;
        let costs = Costs::of(&way.lane.tuning.host_link);
        let plans: MostlyOne<_> = parts.iter().map(|&(plan, _)| plan).collect();
        let direct = |reason| Choice { mode: OffloadMode::Direct, in_steps: false, reason };
        let wants = |asked: Option<Choice>| match asked.map(|asked| asked.mode) {
            Some(OffloadMode::Direct) => false,
            Some(_) => true,
            None => parts.iter().any(|(plan, strides)| plan.wants_kernel(strides, batch_min)),
        };
        let mut fragments = Fragments::of(&plans, direction);
        let mut memory = lock(&way.memory).pop().unwrap_or_default();
        let (mut listed, mut throttle) = (None, 0);
        let mut choice = if !self.config.kernel && wants(asked) {
            direct(Reason::WithoutKernel)
        } else if !info.capabilities.contains(Capabilities::KERNEL) && wants(asked) {
            fall_back()?;
            direct(Reason::NoKernel)
        } else if let Some(asked) = asked {
            if asked.mode == OffloadMode::Staged
                && choice::is_scattered(
                    &costs,
                    &Shape::of(&mut fragments).with_staged(&mut fragments),
                )
            {
                listed = Some(List::of(&mut fragments, &mut memory));
            }
            asked
        } else {
            let shape = Shape::of(&mut fragments);
            throttle = lock(&self.steps[index]).throttle();
            let policy = self.config.policy;
            choice::choose_at_once(policy, throttle, &shape).unwrap_or_else(|| {
                let shape = shape.with_staged(&mut fragments);
                choice::choose(policy, throttle, &costs, shape, || {
                    let list = *listed.insert(List::of(&mut fragments, &mut memory));
                    list.calls(&memory.list, &fragments)
                })
            })
        };
        if choice.mode == OffloadMode::Staged {
            match lock(&way.bounce).prepare(order.waits()) {
                Err(error) if asked.is_some() || !is_out_of_memory(&error) => return Err(error),
                Err(error) => {
                    self.without_bounce(index, device, parts, &error)?;
                    choice =
                        Choice { mode: OffloadMode::Kernel, reason: Reason::NoBounce, ..choice };
                }
                Ok(()) => {}
            }
        }
        let paced = choice.in_steps || self.is_rated() || !order.paced.is_empty();
        let is_staged = matches!(choice.mode, OffloadMode::Staged | OffloadMode::Auto);
        // What passes a buffer is checked while it does, unless that may take any time.
        if paced || !is_staged || order.waits() {
            overlaps.check_before()?;
        }
        if paced {
            if listed.is_none() {
                fragments.drain_into(&mut memory.list);
            }
            let pieces = std::mem::take(&mut memory.list);
            let borders = match choice.mode {
                OffloadMode::Staged => fragments.host_borders(),
                _ => fragments.borders(),
            };
            // Whoever submits is told now, and not the batch later.
            way.lane.check()?;
            let worker = self.worker(index, device)?;
            let throttle = if choice.in_steps { throttle } else { 0 };
            let batch = StepByStep { pieces, borders, direction, mode: choice.mode, throttle };
            self.pace(&worker, &way, batch, order, submitted)?;
        } else {
            match choice.mode {
                OffloadMode::Direct => start_direct(&way.lane, parts, order, submitted)?,
                OffloadMode::Kernel => start_kernel(&way.lane, parts, order, submitted)?,
                OffloadMode::Auto | OffloadMode::Staged => {
                    let borders = fragments.host_borders();
                    let (bytes, count) = (fragments.bytes, fragments.count);
                    let mut list = SliceSource(&memory.list);
                    let source: &mut dyn CopySource = match listed {
                        Some(_) => &mut list,
                        None => &mut fragments,
                    };
                    // Under the tail policy a batch takes as few launches as it can.
                    let division = match self.config.policy {
                        Policy::Tail => Division::NONE,
                        _ => Division::of(bytes, lock(&way.bounce).chunk, direction),
                    };
                    let borders = &borders;
                    let batch = Passing { direction, source, borders, bytes, count, division };
                    // A batch that is refused then is waited for, and this one may take any time.
                    let check = || match order.waits() {
                        true => overlaps.check_before(),
                        false => overlaps.check_in_time(),
                    };
                    start_staged(&way, batch, order, check, submitted)?;
                }
            }
        }
        lock(&way.memory).push(memory);
        if self.config.policy == Policy::Tail {
            lock(&self.steps[index]).moves(submitted);
        }
        submitted.bytes = parts.iter().map(|(plan, _)| plan.bytes()).sum();
        submitted.choice = Some(choice);
        self.log(index, device, direction, choice);
        Ok(true)
    }

    /// Refuses a batch for lack of memory to stage it in, or says once of the device that the kernel
    /// copies it in place.
    fn without_bounce(
        &self,
        index: usize,
        device: &Arc<dyn Device>,
        parts: &Parts<'_>,
        error: &Error,
    ) -> Result<()> {
        let (device, path) = (device.info(), Path::Kernel);
        if self.config.strict {
            let mut peers: Vec<_> =
                parts.iter().map(|(plan, _)| plan.place().target.name()).collect();
            peers.dedup();
            let (device, peer) = (device.to_string(), peers.join(", "));
            return Err(Error::NoDeviceMemory { device, peer, path, reason: error.to_string() });
        }
        if !self.without_bounce[index].swap(true, Ordering::Relaxed) {
            tracing::warn!(%device, %path, %error, "no device memory to stage in: batches that should be go a slower way");
        }
        Ok(())
    }

    /// Gives a batch to the worker.
    fn pace(
        &self,
        worker: &Worker,
        way: &Arc<Way>,
        batch: StepByStep,
        order: Order<'_>,
        submitted: &mut Submitted,
    ) -> Result<()> {
        let StepByStep { pieces, borders, direction, mode, throttle } = batch;
        let lane = Arc::clone(&way.lane);
        let submit: paced::Submit = match mode {
            OffloadMode::Staged => {
                let way = Arc::clone(way);
                submitted.path = Path::Staged;
                Box::new(move |step, pending| {
                    let mut started = Submitted::nothing();
                    let (source, count) = (&mut SliceSource(step), step.len() as u64);
                    let bytes = step.iter().map(|piece| piece.len).sum();
                    let (borders, division) = (&borders, Division::NONE);
                    let batch = Passing { direction, source, borders, bytes, count, division };
                    let (order, checked) = (Order::NONE, || Ok(()));
                    let begun = start_staged(&way, batch, order, checked, &mut started);
                    pending.append(&mut started.pending);
                    begun.and(started.failure.map_or(Ok(()), Err))
                })
            }
            OffloadMode::Kernel => {
                step_without_buffers(&lane, Some(host_grid(&lane)), borders, submitted)
            }
            _ => step_without_buffers(&lane, None, borders, submitted),
        };
        let step_bytes = lock(&way.bounce).chunk;
        let steps = (step_bytes, throttle);
        self.add_job(worker, &lane, pieces, steps, submit, order, submitted)
    }

    /// Starts plans that are not between a GPU and host memory, at the byte rate.
    pub(super) fn pace_others(
        &self,
        index: usize,
        lane: &Arc<Lane>,
        kernel: bool,
        parts: &Parts<'_>,
        order: Order<'_>,
        submitted: &mut Submitted,
    ) -> Result<()> {
        let plans: Vec<_> = parts.iter().map(|&(plan, _)| plan).collect();
        // Nothing here asks for the direction.
        let mut fragments = Fragments::of(&plans, Direction::Store);
        let mut pieces = Vec::new();
        fragments.drain_into(&mut pieces);
        submitted.bytes = fragments.bytes;
        let grid = kernel.then_some(lane.tuning.values.max_grid_blocks);
        let submit = step_without_buffers(lane, grid, fragments.borders(), submitted);
        let step_bytes = self.config.offload_chunk_bytes;
        lane.check()?;
        let worker = self.worker(index, &lane.device)?;
        self.add_job(&worker, lane, pieces, (step_bytes, 0), submit, order, submitted)
    }

    #[expect(clippy::too_many_arguments, reason = "two calls, and all of it is the job's")]
    fn add_job(
        &self,
        worker: &Worker,
        lane: &Arc<Lane>,
        pieces: Vec<CopyDescriptor>,
        (step_bytes, throttle): (u64, u32),
        submit: paced::Submit,
        order: Order<'_>,
        submitted: &mut Submitted,
    ) -> Result<()> {
        // The producer's handle may go once this returns.
        let gate = if order.waits() { Some(wait_for(lane, order)?) } else { None };
        let step_bytes = paced::step_bytes(step_bytes, self.config.max_rate);
        let most_in_flight = if throttle > 0 { step_bytes } else { 4 * step_bytes };
        let pause = (1 << throttle) - 1;
        let (lane, step_pieces) = (Arc::clone(lane), STEP_PIECES);
        let behind = order.paced.to_vec();
        let job = Job {
            lane,
            gate,
            behind,
            pieces,
            step_bytes,
            step_pieces,
            most_in_flight,
            pause,
            submit,
        };
        submitted.paced.push(worker.add(job));
        Ok(())
    }

    fn log(&self, index: usize, device: &Arc<dyn Device>, direction: Direction, choice: Choice) {
        if lock(&self.logged).insert((index, direction, choice)) {
            tracing::info!(device = %device.info(), ?direction, %choice, "host offload");
        }
    }
}

/// A batch for the worker, in the order of its steps.
struct StepByStep {
    pieces: Vec<CopyDescriptor>,
    borders: Borders,
    direction: Direction,
    mode: OffloadMode,
    /// As [`Steps::throttle`].
    throttle: u32,
}

/// Most pieces of a step: one launch. Beside decode many short launches lengthen its slowest steps more
/// than few long ones (H200, 2026-11-30: steps of 2048 pieces by 40%, one gather by 24%).
const STEP_PIECES: usize = SLOT_DESCRIPTORS / 2;

/// What is known of a batch whose pieces are all in the memory's list.
#[derive(Clone, Copy, Debug)]
enum List {
    /// As it came: no order helps.
    AsItCame,
    /// In order of host memory.
    Sorted,
    /// Sorted, and at a constant pitch.
    Image(Image),
}

impl List {
    /// Puts all pieces into the memory's list, in order of host memory if that helps.
    fn of(fragments: &mut Fragments<'_>, memory: &mut ListMemory) -> Self {
        let ListMemory { list, sort } = memory;
        let direction = fragments.direction;
        fragments.drain_into(list);
        if let Some(image) = Image::sort(list, direction, &mut sort.sorted) {
            return Self::Image(image);
        }
        if !sort::is_worth_it(list, direction, fragments.bytes) {
            return Self::AsItCame;
        }
        sort::by_host(list, direction, sort);
        Self::Sorted
    }

    /// The DMAs that host memory takes, if the list is better than it was.
    fn calls(&self, list: &[CopyDescriptor], fragments: &Fragments<'_>) -> Option<Calls> {
        match self {
            Self::AsItCame => None,
            Self::Sorted => Some(choice::host_calls(list, fragments)),
            // Windows are few.
            Self::Image(image) => Some(image.calls()),
        }
    }
}

fn is_out_of_memory(error: &Error) -> bool {
    matches!(error, Error::Device(kvferry_device::Error::OutOfMemory { .. }))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
