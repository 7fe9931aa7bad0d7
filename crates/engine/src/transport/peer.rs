//! Copies between this process's memory and a peer's on the same host, mapped here: the device
//! writes to or reads from the peer directly. Submission runs on the caller's thread.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use kvferry_device::{Capabilities, Device, Left, Queue, QueueOptions, Seq, Vendor, host_uuid};

use crate::batch::{Holds, Path, Pending};
use crate::config::{Config, OverlapCheck};
use crate::error::{Error, RangeError, Result};
use crate::plan::{
    Checked, Extent, Limits, Op, Pieces, Range, Scratch, Want, Window, check_bounds, check_overlaps,
};
use crate::registry::{Registry, Table};
use crate::segment::AllocationKey;
use crate::target::{RemoteTable, Target};

/// The peer transport of one engine.
#[derive(Debug)]
pub(crate) struct Peer {
    lanes: Vec<Lane>,
    limits: Limits,
    batch_min: usize,
    overlap_check: OverlapCheck,
    /// Scratch of submissions that are not running now.
    scratch: Mutex<Vec<Scratch>>,
}

/// One device and its queue.
#[derive(Debug)]
struct Lane {
    device: Arc<dyn Device>,
    queue: Mutex<Box<dyn Queue>>,
    /// The last number that the queue said is complete.
    completed: AtomicU64,
}

/// A batch that was handed to a device.
#[derive(Debug)]
pub(crate) struct Submitted {
    pub(crate) pending: Pending,
    /// Why it will have failed once it is quiet.
    pub(crate) failure: Option<Error>,
    pub(crate) bytes: u64,
    pub(crate) path: Path,
    pub(crate) holds: Holds,
}

/// A checked list and where its bytes are for the device that copies them.
pub(crate) struct Plan<'a> {
    op: Op,
    ranges: &'a [Range],
    local: Arc<Table>,
    remote: RemoteWindows,
    relocations: Vec<u64>,
    pub(crate) checked: Checked,
    extent: Extent,
    pub(crate) device: usize,
    holds: Holds,
}

/// The windows that remote addresses are looked up in.
enum RemoteWindows {
    /// Of another process.
    Mapped(Arc<RemoteTable>),
    /// Of an engine of this process: used directly, as drivers refuse to open a handle in the
    /// process that made it.
    Direct(Arc<Registry>, Arc<Table>),
}

impl RemoteWindows {
    fn of(target: &Target) -> Result<Self> {
        Ok(match target.registry()? {
            None => Self::Mapped(target.table()),
            Some(registry) => {
                let table = registry.table();
                Self::Direct(registry, table)
            }
        })
    }

    /// Both ends of a range are addresses of this process.
    fn is_direct(&self) -> bool {
        matches!(self, Self::Direct(..))
    }

    fn windows(&self) -> &[Window] {
        match self {
            Self::Mapped(table) => &table.windows,
            Self::Direct(_, table) => &table.windows,
        }
    }

    /// The allocation that a window lies in.
    fn allocation(&self, window: usize) -> AllocationKey {
        match self {
            Self::Mapped(table) => table.allocation(window).key,
            Self::Direct(_, table) => table.allocations[window],
        }
    }
}

impl Plan<'_> {
    /// The pieces of the list, as descriptors for the plan's device.
    pub(crate) fn pieces(&self, want: Want, limits: &Limits) -> Pieces<'_> {
        let (local, remote) = (&self.local.windows, self.remote.windows());
        Pieces::new(
            self.op,
            self.ranges,
            local,
            remote,
            &self.relocations,
            want,
            &self.checked,
            limits,
        )
    }
}

impl Peer {
    pub(crate) fn new(config: &Config, devices: &[Arc<dyn Device>]) -> Result<Self> {
        let options = QueueOptions {
            streams: config.streams,
            max_grid_blocks: config.max_grid_blocks,
            high_priority: config.high_priority,
            stall_timeout: config.stall_timeout,
            ..QueueOptions::default()
        };
        let lane = |device: &Arc<dyn Device>| {
            let queue = Mutex::new(Arc::clone(device).queue(&options)?);
            Ok(Lane { device: Arc::clone(device), queue, completed: AtomicU64::new(0) })
        };
        Ok(Self {
            lanes: devices.iter().map(lane).collect::<Result<_>>()?,
            limits: Limits {
                small_max_bytes: config.small_max_bytes,
                tile_bytes: config.tile_bytes,
            },
            overlap_check: config.overlap_check,
            batch_min: config.batch_min,
            scratch: Mutex::default(),
        })
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(crate) fn device(&self, index: usize) -> &Arc<dyn Device> {
        &self.lanes[index].device
    }

    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.lock().pinned_bytes()).sum()
    }

    /// Checks the list, opens what it needs, and starts it. `None`: it has no bytes to move.
    pub(crate) fn submit(
        &self,
        registry: &Registry,
        target: &Target,
        op: Op,
        ranges: &[Range],
    ) -> Result<Option<Submitted>> {
        if let Some(lost) = target.lost() {
            return Err(lost);
        }
        if ranges.iter().all(|range| range.len == 0) {
            return Ok(None);
        }
        let mut scratch = self.scratches().pop().unwrap_or_default();
        let submitted = self.submit_with(&mut scratch, registry, target, op, ranges);
        self.scratches().push(scratch);
        submitted.map(Some)
    }

    fn submit_with(
        &self,
        scratch: &mut Scratch,
        registry: &Registry,
        target: &Target,
        op: Op,
        ranges: &[Range],
    ) -> Result<Submitted> {
        let plan = self.plan(scratch, registry, target, op, ranges)?;
        let (extent, one_space) = (plan.extent, plan.remote.is_direct());
        let mut submitted = self.start(plan)?;
        if self.overlap_check == OverlapCheck::Beside && submitted.failure.is_none() {
            let checked = check_overlaps(op, ranges, &extent, one_space, scratch);
            submitted.failure = checked.err().map(Error::from);
        }
        Ok(submitted)
    }

    /// Checks the list and finds out where its bytes are; opens mappings at first use.
    pub(crate) fn plan<'a>(
        &self,
        scratch: &mut Scratch,
        registry: &Registry,
        target: &Target,
        op: Op,
        ranges: &'a [Range],
    ) -> Result<Plan<'a>> {
        let remote = RemoteWindows::of(target)?;
        let local = registry.table();
        let (checked, extent) =
            check_bounds(op, ranges, &local.windows, remote.windows(), &self.limits, scratch)?;
        if self.overlap_check == OverlapCheck::Before {
            check_overlaps(op, ranges, &extent, remote.is_direct(), scratch)?;
        }
        let mut pins = registry.pin(&local, scratch.local_windows())?;
        let device = self.one_device(ranges, &local, scratch)?;
        let mut relocations = vec![0; remote.windows().len()];
        let mut mappings = Vec::new();
        for window in scratch.remote_windows() {
            self.reach(device, &remote, window, target)?;
            if let RemoteWindows::Mapped(table) = &remote {
                let allocation = table.allocation(window);
                let mapping = target.mapping(allocation, device, &self.lanes[device].device)?;
                relocations[window] = mapping.addr().wrapping_sub(allocation.base);
                mappings.push(mapping);
            }
        }
        if let RemoteWindows::Direct(registry, table) = &remote {
            pins.extend(registry.pin(table, scratch.remote_windows())?);
        }
        let holds = Holds { target: target.clone(), _pins: pins, _mappings: mappings };
        Ok(Plan { op, ranges, local, remote, relocations, checked, extent, device, holds })
    }

    /// The one device that all local ends lie on.
    fn one_device(&self, ranges: &[Range], local: &Table, scratch: &Scratch) -> Result<usize> {
        let mut used = ranges.iter().enumerate().filter(|(_, range)| range.len > 0);
        let first = used.next().map_or(0, |(_, range)| local.device_at(range.local));
        if scratch.local_windows().all(|window| local.devices[window] == first) {
            return Ok(first);
        }
        let (index, device) = used
            .map(|(index, range)| (index, local.device_at(range.local)))
            .find(|&(_, device)| device != first)
            .expect("a window of another device was touched by a range");
        let name = |device: usize| self.lanes[device].device.info().to_string();
        Err(RangeError::MixedDevices { index, device: name(device), first: name(first) }.into())
    }

    fn reach(
        &self,
        device: usize,
        windows: &RemoteWindows,
        window: usize,
        target: &Target,
    ) -> Result<()> {
        let device = &self.lanes[device].device;
        let remote = windows.allocation(window).device;
        // Host memory of this process has no mapping here, and a GPU may not touch it without one.
        let unmapped = windows.is_direct() && remote == host_uuid() && device.info().uuid != remote;
        if device.reaches(&remote) && !unmapped {
            return Ok(());
        }
        Err(Error::Unreachable {
            device: device.info().to_string(),
            peer: target.name().to_owned(),
            remote: remote.to_string(),
        })
    }

    fn start(&self, plan: Plan<'_>) -> Result<Submitted> {
        let lane = &self.lanes[plan.device];
        let Checked { bytes, small, large, .. } = plan.checked;
        let kernel = lane.device.info().capabilities.contains(Capabilities::KERNEL);
        // A few small pieces are quicker as DMAs than as a launch.
        let small_by_kernel = kernel && small >= self.batch_min;
        let want_large = if small_by_kernel { Want::Large } else { Want::All };
        let mut large_pieces = Vec::new();
        if kernel && (large > 0 || !small_by_kernel) {
            let mut source = plan.pieces(want_large, &self.limits);
            large_pieces =
                vec![Default::default(); if small_by_kernel { large } else { large + small }];
            let filled = kvferry_device::CopySource::fill(&mut source, &mut large_pieces);
            debug_assert_eq!(filled, large_pieces.len());
        }
        let mut slots: Box<dyn kvferry_device::CopySource> = match (kernel, small_by_kernel) {
            (true, true) => Box::new(plan.pieces(Want::Small, &self.limits)),
            (true, false) => Box::new(kvferry_device::SliceSource(&[])),
            // Without a kernel the queue makes every descriptor a DMA, slot by slot.
            (false, _) => Box::new(plan.pieces(Want::All, &self.limits)),
        };
        let path = match (lane.device.info().vendor, small_by_kernel, large) {
            (Vendor::Host, ..) => Path::Memcpy,
            (_, true, 0) => Path::Kernel,
            (_, true, _) => Path::Mixed,
            (_, false, _) => Path::Dma,
        };
        let mut queue = lane.lock();
        // SAFETY: `check_bounds` found every range inside registered memory, which its registrant
        // promised to keep until it is unregistered; `holds` keeps regions registered and peers
        // mapped until the batch ends, and it ends only once the queue completes this number.
        let submitted = unsafe { queue.submit(&mut *slots, &large_pieces) };
        let last = queue.submitted();
        drop(queue);
        drop(slots);
        let (seq, failure) = match submitted {
            Ok(seq) => (seq, None),
            Err(error) => match error.left {
                Left::Nothing => return Err(error.error.into()),
                Left::Until(seq) => (seq, Some(error.error.into())),
                // The queue is lost: the batch ends as soon as somebody asks it.
                Left::Unknown => (last, Some(error.error.into())),
            },
        };
        let pending = Pending { device: plan.device, seq };
        Ok(Submitted { pending, failure, bytes, path, holds: plan.holds })
    }

    /// Whether what `pending` waits for has ended. Does not block: while another thread submits to
    /// the same device, the last known answer is given.
    pub(crate) fn ended(&self, pending: Pending) -> Result<bool, kvferry_device::Error> {
        let lane = &self.lanes[pending.device];
        let done = |completed: u64| Seq(completed) >= pending.seq;
        if done(lane.completed.load(Ordering::Acquire)) {
            return Ok(true);
        }
        let mut queue = match lane.queue.try_lock() {
            Ok(queue) => queue,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(false),
        };
        let Seq(completed) = queue.completed()?;
        lane.completed.fetch_max(completed, Ordering::AcqRel);
        Ok(done(completed))
    }

    fn scratches(&self) -> MutexGuard<'_, Vec<Scratch>> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lane {
    fn lock(&self) -> MutexGuard<'_, Box<dyn Queue>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
