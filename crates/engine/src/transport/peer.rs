//! Copies between this process's memory and a peer's on the same host, mapped here: the device
//! writes to or reads from the peer directly. Submission runs on the caller's thread.
//!
//! The device of the local end copies. Host memory reaches no GPU, so between host memory here and
//! a GPU's there a GPU of this engine copies: host memory is page-locked for it in place, and seen
//! at an address of its own. The processor never touches a GPU's memory.

mod plan;
mod start;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvferry_device::{Consumer, Device};

use super::fences::Behind;
use super::lane::{DeviceLanes, Lane};
use super::offload::{Choice, Offload, Paced};
use super::overlaps::{Bounded, Overlaps};
use crate::batch::{Holds, OverlapVerdict, Path, Pending};
use crate::config::{Config, OverlapCheck};
use crate::ended::Fallback;
use crate::error::{Error, Result};
use crate::mostly_one::MostlyOne;
use crate::plan::{Scratch, Strides};
use crate::profile::Tuning;
use crate::registry::Registry;
use crate::request::{Part, SubmitOptions};

/// The peer transport of one engine.
#[derive(Debug)]
pub(crate) struct Peer {
    devices: Vec<Arc<DeviceLanes>>,
    lanes: Vec<Arc<Lane>>,
    /// Whether the kernel is wanted where there is one.
    kernel: bool,
    /// Whether to refuse what a kernel that is missing should take.
    strict: bool,
    overlap_check: OverlapCheck,
    offload: Offload,
    /// Memory of submissions that are not running now.
    scratch: Mutex<Idle>,
}

/// What planning one part needs, kept from one batch to the next.
#[derive(Debug, Default)]
struct Scratches {
    scratch: Scratch,
    strides: Strides,
}

/// Boxed, since batches take some out and put them back, and they are large.
type Idle = Vec<Box<Scratches>>;

/// A batch that was handed to a device.
#[derive(Debug)]
pub(crate) struct Submitted {
    pub(crate) pending: MostlyOne<Pending>,
    /// Submitted step by step.
    pub(crate) paced: Vec<Arc<Paced>>,
    /// Why it will have failed once it is quiet.
    pub(crate) failure: Option<Error>,
    pub(crate) bytes: u64,
    pub(crate) path: Path,
    /// How it goes between a GPU and host memory, if it does.
    pub(crate) choice: Option<Choice>,
    pub(crate) fallback: Option<Fallback>,
    pub(crate) holds: Holds,
    /// Whether destinations overlap, if the device finds out.
    pub(crate) overlap: Option<OverlapVerdict>,
}

impl Submitted {
    /// Of a batch that no device of this engine moves.
    pub(crate) fn nothing() -> Self {
        let holds = Holds::default();
        let (pending, paced) = (MostlyOne::new(), Vec::new());
        let (failure, path, choice, fallback, overlap) = (None, Path::None, None, None, None);
        Self { pending, paced, failure, bytes: 0, path, choice, fallback, holds, overlap }
    }

    /// Whether nothing runs, or will.
    pub(crate) fn is_nothing(&self) -> bool {
        self.pending.is_empty() && self.paced.is_empty()
    }

    fn join(&mut self, more: Self) {
        self.pending.extend(more.pending);
        self.paced.extend(more.paced);
        self.failure = self.failure.take().or(more.failure);
        self.bytes += more.bytes;
        self.path = self.path.and(more.path);
        self.choice = self.choice.or(more.choice);
        self.fallback = self.fallback.or(more.fallback);
        self.overlap = self.overlap.take().or(more.overlap);
    }
}

impl Peer {
    pub(crate) fn new(config: &Config, devices: &[Arc<dyn Device>]) -> Result<Self> {
        let devices: Vec<_> = devices.iter().map(DeviceLanes::new).collect();
        Ok(Self {
            lanes: devices.iter().map(|it| Lane::open(it, config)).collect::<Result<_>>()?,
            kernel: config.kernel,
            strict: config.strict,
            overlap_check: config.overlap_check,
            offload: Offload::new(config, &devices),
            scratch: Mutex::default(),
            devices,
        })
    }

    pub(crate) fn tunings(&self) -> impl Iterator<Item = &Tuning> {
        self.lanes.iter().map(|lane| &lane.tuning)
    }

    pub(crate) fn record_step(&self, device: usize, time: Duration) {
        if let Some(lane) = self.lanes.get(device) {
            self.offload.record_step(device, &lane.device, time);
        }
    }

    pub(crate) fn tuning(&self, device: usize) -> &Tuning {
        &self.lanes[device].tuning
    }

    pub(crate) fn device(&self, index: usize) -> &Arc<dyn Device> {
        &self.lanes[index].device
    }

    /// Whether nobody knows what the copies of a device do.
    pub(crate) fn is_lost(&self, device: usize) -> bool {
        self.devices[device].is_lost()
    }

    /// The devices, for whoever opens more lanes.
    pub(crate) fn devices(&self) -> &[Arc<DeviceLanes>] {
        &self.devices
    }

    pub(super) fn lane(&self, index: usize) -> &Arc<Lane> {
        &self.lanes[index]
    }

    pub(crate) fn pinned_bytes(&self) -> u64 {
        let lanes: u64 = self.lanes.iter().map(|lane| lane.pinned_bytes).sum();
        lanes + self.offload.pinned_bytes()
    }

    /// Submits nothing more of batches that are submitted step by step.
    pub(crate) fn stop(&self) {
        self.offload.stop();
    }

    /// Leaves queues, buffers and threads as they are, in a fork of their process.
    pub(crate) fn abandon(&mut self) {
        std::mem::forget(std::mem::take(&mut self.lanes));
        self.offload.abandon();
    }

    pub(crate) fn bounce_bytes(&self) -> u64 {
        self.offload.bounce_bytes()
    }

    /// Checks the parts, opens what they need, and starts them; what is started is put into `all`, which
    /// has nothing yet. Whether they have bytes to move. Behind an error nothing runs.
    pub(crate) fn submit(
        &self,
        registry: &Registry,
        parts: &[Part<'_>],
        options: &SubmitOptions<'_>,
        behind: &Behind,
        all: &mut Submitted,
    ) -> Result<bool> {
        if let Some(lost) = parts.iter().find_map(|part| part.target.lost()) {
            return Err(lost);
        }
        // An empty part is wrong in nothing, whatever it names.
        let parts: MostlyOne<_> = parts.iter().filter(|part| !part.copies.are_empty()).collect();
        if parts.is_empty() {
            return Ok(false);
        }
        let mut scratches = self.take_scratches(parts.len());
        let submitted = self.submit_with(&mut scratches, registry, &parts, options, behind, all);
        self.scratches().extend(scratches);
        submitted.map(|()| true)
    }

    fn submit_with(
        &self,
        scratches: &mut [Box<Scratches>],
        registry: &Registry,
        parts: &[&Part<'_>],
        options: &SubmitOptions<'_>,
        behind: &Behind,
        all: &mut Submitted,
    ) -> Result<()> {
        let mut plans = MostlyOne::with_capacity(parts.len());
        for (part, scratches) in parts.iter().zip(&mut *scratches) {
            plans.push(self.plan(scratches, registry, part)?);
        }
        self.one_device_for_all(&plans)?;
        let (mut strides, mut bounded) = (MostlyOne::new(), MostlyOne::new());
        for ((part, plan), scratches) in parts.iter().zip(&plans).zip(scratches) {
            let Scratches { scratch, strides: its } = &mut **scratches;
            let (extent, one_space) = (plan.extent(), plan.one_space());
            bounded.push(Bounded { part, extent, one_space, scratch });
            strides.push(&*its);
        }
        let mut overlaps = Overlaps::new(self.overlap_check, bounded);
        self.start(plans, &strides, options, behind, &mut overlaps, all)?;
        if all.failure.is_none() {
            all.failure = overlaps.check_beside().err();
        }
        Ok(())
    }

    /// Whether all that is waited for has ended. Does not block, and asks the driver only now and
    /// then.
    pub(crate) fn ended(&self, pending: &[Pending]) -> Result<bool, kvferry_device::Error> {
        for Pending { lane, ticket } in pending {
            if !lane.completions.done(*ticket) {
                return lane.check().map(|()| false);
            }
        }
        Ok(true)
    }

    pub(crate) fn signal(&self, pending: &[Pending], consumer: Consumer) -> Result<()> {
        for Pending { lane, ticket } in pending {
            lane.refuse_lost(*ticket)?;
            lane.lock().signal(*ticket, consumer)?;
        }
        Ok(())
    }

    fn take_scratches(&self, count: usize) -> MostlyOne<Box<Scratches>> {
        let mut pool = self.scratches();
        (0..count).map(|_| pool.pop().unwrap_or_default()).collect()
    }

    fn scratches(&self) -> MutexGuard<'_, Idle> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
