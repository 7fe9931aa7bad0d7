//! Copies between this process's memory and a peer's on the same host, mapped here: the device
//! writes to or reads from the peer directly. Submission runs on the caller's thread.
//!
//! The device of the local end copies. Host memory reaches no GPU, so between host memory here and
//! a GPU's there a GPU of this engine copies: host memory is page-locked for it in place, and seen
//! at an address of its own. The processor never touches a GPU's memory.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};

use kvferry_device::{
    Capabilities, CompactCopy, CompactEnd, Completions, Consumer, CopyDescriptor, CopySource,
    Device, DeviceUuid, Left, Queue, QueueOptions, Ticket, Vendor, Work, host_uuid,
};
use rustix::time::{ClockId, clock_gettime};

use crate::batch::{Holds, Path, Pending};
use crate::config::{Config, OverlapCheck};
use crate::error::{Error, RangeError, Result};
use crate::mapping::OpenMapping;
use crate::plan::{
    Checked, Extent, Form, Grid, Limits, Op, Pages, Pieces, Range, Relocations, Scratch, Strides,
    Want, Window, check_bounds, check_form_bounds, check_form_overlaps, check_overlaps,
    find_strides,
};
use crate::profile::{Tuning, Values};
use crate::registry::{HostLock, Pin, Registry, Table};
use crate::request::{Copies, Part, SubmitOptions};
use crate::segment::AllocationKey;
use crate::target::{RemoteTable, Target};

/// Descriptors that a batch takes from one target before it turns to the next: about a fiftieth of
/// the warps of a launch, so that all targets are written at any moment.
const TURN: usize = 64;

/// The peer transport of one engine.
#[derive(Debug)]
pub(crate) struct Peer {
    lanes: Vec<Lane>,
    /// Whether the kernel is wanted where there is one.
    kernel: bool,
    /// Whether to refuse what a kernel that is missing should take.
    strict: bool,
    overlap_check: OverlapCheck,
    /// Memory of submissions that are not running now.
    scratch: Mutex<Vec<Scratches>>,
}

/// What planning one part needs, kept from one batch to the next.
#[derive(Debug, Default)]
struct Scratches {
    scratch: Scratch,
    strides: Strides,
}

/// One device and its queue.
#[derive(Debug)]
struct Lane {
    device: Arc<dyn Device>,
    tuning: Tuning,
    /// Peers that a batch went to by a fallback.
    fell_back: Mutex<HashSet<String>>,
    queue: Mutex<Box<dyn Queue>>,
    completions: Arc<dyn Completions>,
    /// Why nothing that runs will complete.
    lost: OnceLock<kvferry_device::Error>,
    /// When the driver was last asked, by [`milliseconds`].
    asked: AtomicU64,
}

/// A batch that was handed to a device.
#[derive(Debug)]
pub(crate) struct Submitted {
    pub(crate) pending: Vec<Pending>,
    /// Why it will have failed once it is quiet.
    pub(crate) failure: Option<Error>,
    pub(crate) bytes: u64,
    pub(crate) path: Path,
    pub(crate) holds: Holds,
}

/// A checked list of ranges and where its bytes are for the device that copies them.
pub(crate) struct RangePlan<'a> {
    op: Op,
    ranges: &'a [Range],
    place: Place,
    pub(crate) checked: Checked,
    /// What it was checked with.
    limits: Limits,
    extent: Extent,
    pub(crate) device: usize,
}

/// A checked list of forms, relocated.
struct FormPlan<'a> {
    copies: Vec<CompactCopy<'a>>,
    bytes: u64,
    device: usize,
    place: Place,
}

/// The windows of both ends, as they were when the list was checked, and what keeps them. Locks
/// end before the pins that keep their memory registered.
struct Place {
    local: Arc<Table>,
    remote: RemoteWindows,
    local_relocations: Vec<u64>,
    remote_relocations: Vec<u64>,
    target: Target,
    locks: Vec<Arc<HostLock>>,
    pins: Vec<Pin>,
    mappings: Vec<Arc<OpenMapping>>,
}

enum Plan<'a> {
    Ranges(RangePlan<'a>),
    Forms(FormPlan<'a>),
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

/// The window that holds an address of a checked list.
fn window_of(windows: &[Window], addr: u64) -> Option<usize> {
    windows.partition_point(|window| window.start <= addr).checked_sub(1)
}

impl Place {
    fn relocations(&self) -> Relocations<'_> {
        Relocations { local: &self.local_relocations, remote: &self.remote_relocations }
    }

    /// What to add to the addresses of a local and of a remote window.
    fn shift(&self, local: usize, remote: usize) -> Shift {
        let local = self.local_relocations.get(local).copied().unwrap_or(0);
        Shift { local, remote: self.remote_relocations[remote] }
    }
}

/// What to add to the addresses of one form to get where the device that copies sees them.
#[derive(Clone, Copy, Debug, Default)]
struct Shift {
    local: u64,
    remote: u64,
}

impl RangePlan<'_> {
    /// The pieces of the list, as descriptors for the plan's device.
    pub(crate) fn pieces(&self, want: Want) -> Pieces<'_> {
        self.pieces_of(self.ranges, want)
    }

    /// The pieces of a part of the list.
    fn pieces_of<'b>(&'b self, ranges: &'b [Range], want: Want) -> Pieces<'b> {
        let (local, remote) = (&self.place.local.windows, self.place.remote.windows());
        let relocations = self.place.relocations();
        Pieces::new(self.op, ranges, local, remote, relocations, want, &self.checked, &self.limits)
    }

    /// Runs that were found in the list, which is plain and so has one window a side.
    fn compact<'b>(&self, strides: &'b Strides) -> impl Iterator<Item = CompactCopy<'b>> {
        let shift = self.ranges.first().and_then(|first| {
            let local = window_of(&self.place.local.windows, first.local)?;
            let remote = window_of(self.place.remote.windows(), first.remote)?;
            Some(self.place.shift(local, remote))
        });
        let (op, shift) = (self.op, shift.unwrap_or_default());
        strides.runs.iter().flat_map(move |run| compact_copies(op, run.grid(), shift))
    }
}

/// A form in bounds, as the device copies it: one copy, or several where the rows are more than 32
/// bits count.
fn compact_copies(op: Op, grid: Grid<'_>, shift: Shift) -> impl Iterator<Item = CompactCopy<'_>> {
    const ROWS: u64 = u32::MAX as u64;
    (0..grid.rows.div_ceil(ROWS)).map(move |part| {
        let first = part * ROWS;
        let end = |pages: &Pages<'_>, shift: u64| {
            let addr = pages.addr.wrapping_add(shift);
            CompactEnd {
                addr: addr.wrapping_add(first.wrapping_mul(pages.row_stride)),
                row_stride: pages.row_stride,
                layer_stride: pages.layer_stride,
                page_stride: pages.page_stride,
                pages: &[],
            }
        };
        let mut local = CompactEnd { pages: grid.local.numbers, ..end(&grid.local, shift.local) };
        let mut remote =
            CompactEnd { pages: grid.remote.numbers, ..end(&grid.remote, shift.remote) };
        for end in [&mut local, &mut remote] {
            // One page needs no list, and so no slot of the ring.
            if let &[number] = end.pages {
                end.addr = end.addr.wrapping_add(u64::from(number).wrapping_mul(end.page_stride));
                end.pages = &[];
            }
        }
        let (src, dst) = match op {
            Op::Write => (local, remote),
            Op::Read => (remote, local),
        };
        CompactCopy {
            src,
            dst,
            len: grid.len,
            rows: (grid.rows - first).min(ROWS) as u32,
            layers: grid.layers as u32,
            pages: grid.local.numbers.len() as u32,
        }
    })
}

impl Plan<'_> {
    fn device(&self) -> usize {
        match self {
            Self::Ranges(plan) => plan.device,
            Self::Forms(plan) => plan.device,
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Ranges(plan) => plan.checked.bytes,
            Self::Forms(plan) => plan.bytes,
        }
    }

    /// Of a list of ranges, for its check of overlaps.
    fn extent(&self) -> Option<Extent> {
        match self {
            Self::Ranges(plan) => Some(plan.extent),
            Self::Forms(_) => None,
        }
    }

    /// Both ends are addresses of this process.
    fn one_space(&self) -> bool {
        match self {
            Self::Ranges(plan) => plan.place.remote.is_direct(),
            Self::Forms(plan) => plan.place.remote.is_direct(),
        }
    }

    /// Whether the kernel, if there is one, has something to do. `strides` are those of the plan.
    fn wants_kernel(&self, strides: &Strides, batch_min: u64) -> bool {
        match self {
            Self::Forms(plan) => !plan.copies.is_empty(),
            Self::Ranges(plan) => {
                !strides.runs.is_empty() || plan.checked.small as u64 >= batch_min
            }
        }
    }

    fn place(&self) -> &Place {
        match self {
            Self::Ranges(plan) => &plan.place,
            Self::Forms(plan) => &plan.place,
        }
    }

    fn into_place(self) -> Place {
        match self {
            Self::Ranges(plan) => plan.place,
            Self::Forms(plan) => plan.place,
        }
    }
}

impl Peer {
    pub(crate) fn new(config: &Config, devices: &[Arc<dyn Device>]) -> Result<Self> {
        let lane = |device: &Arc<dyn Device>| Lane::open(Arc::clone(device), config);
        Ok(Self {
            lanes: devices.iter().map(lane).collect::<Result<_>>()?,
            kernel: config.kernel,
            strict: config.strict,
            overlap_check: config.overlap_check,
            scratch: Mutex::default(),
        })
    }

    pub(crate) fn tunings(&self) -> impl Iterator<Item = &Tuning> {
        self.lanes.iter().map(|lane| &lane.tuning)
    }

    pub(crate) fn tuning(&self, device: usize) -> &Tuning {
        &self.lanes[device].tuning
    }

    /// What is small and what is large on a device.
    fn limits(&self, device: usize) -> Limits {
        // An engine without devices has no regions, and refuses every list, whatever is small.
        let none = Limits { small_max_bytes: u64::MAX, tile_bytes: u64::MAX };
        self.lanes.get(device).map_or(none, |lane| {
            let Values { small_max_bytes, tile_bytes, .. } = lane.tuning.values;
            Limits { small_max_bytes, tile_bytes }
        })
    }

    pub(crate) fn device(&self, index: usize) -> &Arc<dyn Device> {
        &self.lanes[index].device
    }

    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.lock().pinned_bytes()).sum()
    }

    /// Checks the parts, opens what they need, and starts them. `None`: they have no bytes to move.
    pub(crate) fn submit(
        &self,
        registry: &Registry,
        parts: &[Part<'_>],
        options: &SubmitOptions,
    ) -> Result<Option<Submitted>> {
        if let Some(lost) = parts.iter().find_map(|part| part.target.lost()) {
            return Err(lost);
        }
        // An empty part is wrong in nothing, whatever it names.
        let parts: Vec<_> = parts.iter().filter(|part| !part.copies.are_empty()).collect();
        if parts.is_empty() {
            return Ok(None);
        }
        let mut scratches = self.take_scratches(parts.len());
        let submitted = self.submit_with(&mut scratches, registry, &parts, options);
        self.scratches().append(&mut scratches);
        submitted.map(Some)
    }

    fn submit_with(
        &self,
        scratches: &mut [Scratches],
        registry: &Registry,
        parts: &[&Part<'_>],
        options: &SubmitOptions,
    ) -> Result<Submitted> {
        let plans = parts.iter().zip(&mut *scratches);
        let plans = plans.map(|(part, scratches)| self.plan(scratches, registry, part));
        let plans = plans.collect::<Result<Vec<_>>>()?;
        self.one_device_for_all(&plans)?;
        let beside = self.overlap_check == OverlapCheck::Beside;
        let late: Vec<_> = match beside {
            true => plans.iter().map(|plan| (plan.extent(), plan.one_space())).collect(),
            false => Vec::new(),
        };
        let strides: Vec<_> =
            scratches.iter_mut().map(|s| std::mem::take(&mut s.strides)).collect();
        let submitted = self.start(plans, &strides, options);
        for (scratches, strides) in scratches.iter_mut().zip(strides) {
            scratches.strides = strides;
        }
        let mut submitted = submitted?;
        for ((part, scratches), (extent, one_space)) in parts.iter().zip(scratches).zip(late) {
            if submitted.failure.is_none() {
                let checked = check_part_overlaps(part, extent, one_space, &mut scratches.scratch);
                submitted.failure = checked.err();
            }
        }
        Ok(submitted)
    }

    fn plan<'a>(
        &self,
        scratches: &mut Scratches,
        registry: &Registry,
        part: &Part<'a>,
    ) -> Result<Plan<'a>> {
        let Scratches { scratch, strides } = scratches;
        let &Part { target, op, copies } = part;
        match copies {
            Copies::Ranges(ranges) => {
                let plan = self.plan_ranges(scratch, registry, target, op, ranges)?;
                // Runs are found in plain lists only: one window a side, so one relocation.
                if !(plan.checked.plain && find_strides(ranges, strides)) {
                    strides.runs.clear();
                }
                Ok(Plan::Ranges(plan))
            }
            Copies::Strided(forms) => self.plan_forms(scratch, registry, part, forms),
            Copies::Paged(forms) => self.plan_forms(scratch, registry, part, forms),
        }
    }

    /// Checks a list and finds out where its bytes are; opens mappings at first use.
    pub(crate) fn plan_ranges<'a>(
        &self,
        scratch: &mut Scratch,
        registry: &Registry,
        target: &Target,
        op: Op,
        ranges: &'a [Range],
    ) -> Result<RangePlan<'a>> {
        let remote = RemoteWindows::of(target)?;
        let local = registry.table();
        // Most lists are copied by the device that they begin on.
        let first = ranges.iter().find(|range| range.len > 0).map_or(0, |range| range.local);
        let begins_on = if local.windows.is_empty() { 0 } else { local.device_at(first) };
        let mut limits = self.limits(begins_on);
        let (mut checked, extent) =
            check_bounds(op, ranges, &local.windows, remote.windows(), &limits, scratch)?;
        if self.overlap_check == OverlapCheck::Before {
            check_overlaps(op, ranges, &extent, remote.is_direct(), scratch)?;
        }
        let device = self.one_device(&local, scratch, || {
            ranges
                .iter()
                .enumerate()
                .filter(|(_, range)| range.len > 0)
                .map(|(at, r)| (at, r.local))
        })?;
        let device = self.executor(device, &remote, scratch, target)?;
        if self.limits(device) != limits {
            // A GPU copies for host memory, and has a profile of its own.
            limits = self.limits(device);
            (checked, _) =
                check_bounds(op, ranges, &local.windows, remote.windows(), &limits, scratch)?;
        }
        let place = self.place(scratch, registry, target, local, remote, device)?;
        Ok(RangePlan { op, ranges, place, checked, limits, extent, device })
    }

    fn plan_forms<'a, F: Form>(
        &self,
        scratch: &mut Scratch,
        registry: &Registry,
        part: &Part<'_>,
        forms: &'a [F],
    ) -> Result<Plan<'a>> {
        let &Part { target, op, .. } = part;
        let remote = RemoteWindows::of(target)?;
        let local = registry.table();
        let checked = check_form_bounds(forms, &local.windows, remote.windows(), scratch)?;
        if self.overlap_check == OverlapCheck::Before {
            check_form_overlaps(op, forms, remote.is_direct(), scratch)?;
        }
        let device = self.one_device(&local, scratch, || {
            scratch.forms().iter().map(|form| (form.form, form.local.low))
        })?;
        let device = self.executor(device, &remote, scratch, target)?;
        let place = self.place(scratch, registry, target, local, remote, device)?;
        let mut copies = Vec::with_capacity(scratch.forms().len());
        for placed in scratch.forms() {
            let shift = place.shift(placed.local.window, placed.remote.window);
            copies.extend(compact_copies(op, forms[placed.form].grid(), shift));
        }
        Ok(Plan::Forms(FormPlan { copies, bytes: checked.bytes, device, place }))
    }

    /// Pins and maps, for the device that copies, the windows that the last checked list uses.
    fn place(
        &self,
        scratch: &Scratch,
        registry: &Registry,
        target: &Target,
        local: Arc<Table>,
        remote: RemoteWindows,
        device: usize,
    ) -> Result<Place> {
        let executor = &self.lanes[device].device;
        // Host memory of this process that a GPU copies.
        let in_place = |owner: DeviceUuid| owner == host_uuid() && executor.info().uuid != owner;
        let mut pins = registry.pin(&local, scratch.local_windows())?;
        if let RemoteWindows::Direct(registry, table) = &remote {
            pins.extend(registry.pin(table, scratch.remote_windows())?);
        }
        let mut local_relocations = Vec::new();
        let mut remote_relocations = vec![0; remote.windows().len()];
        let (mut locks, mut mappings) = (Vec::new(), Vec::new());
        for window in scratch.local_windows() {
            let key = local.allocations[window];
            // All local ends lie on one device, so all of them are locked or none.
            if !in_place(key.device) {
                break;
            }
            let lock = registry.lock_host(key, executor)?;
            local_relocations.resize(local.windows.len(), 0);
            local_relocations[window] = lock.relocation();
            locks.push(lock);
        }
        for window in scratch.remote_windows() {
            match &remote {
                RemoteWindows::Mapped(table) => {
                    let allocation = table.allocation(window);
                    let mapping = target.mapping(allocation, device, executor)?;
                    remote_relocations[window] = mapping.addr().wrapping_sub(allocation.base);
                    mappings.push(mapping);
                }
                RemoteWindows::Direct(registry, table) => {
                    let key = table.allocations[window];
                    if in_place(key.device) {
                        let lock = registry.lock_host(key, executor)?;
                        remote_relocations[window] = lock.relocation();
                        locks.push(lock);
                    }
                }
            }
        }
        let target = target.clone();
        Ok(Place {
            local,
            remote,
            local_relocations,
            remote_relocations,
            target,
            locks,
            pins,
            mappings,
        })
    }

    /// The one device that all local ends lie on. `ends` gives each item's position and an address.
    fn one_device<I: Iterator<Item = (usize, u64)>>(
        &self,
        local: &Table,
        scratch: &Scratch,
        ends: impl Fn() -> I,
    ) -> Result<usize> {
        let first = ends().next().map_or(0, |(_, addr)| local.device_at(addr));
        if scratch.local_windows().all(|window| local.devices[window] == first) {
            return Ok(first);
        }
        let mut devices = ends().map(|(index, addr)| (index, local.device_at(addr)));
        let (index, device) = devices
            .find(|&(_, device)| device != first)
            .expect("a window of another device was touched by something");
        let (device, first) = (self.name(device), self.name(first));
        Err(RangeError::MixedDevices { index, device, first }.into())
    }

    fn one_device_for_all(&self, plans: &[Plan<'_>]) -> Result<()> {
        let Some(first) = plans.first().map(Plan::device) else { return Ok(()) };
        match plans.iter().map(Plan::device).enumerate().find(|&(_, device)| device != first) {
            None => Ok(()),
            Some((part, device)) => {
                let (device, first) = (self.name(device), self.name(first));
                Err(Error::MixedParts { part, device, first })
            }
        }
    }

    fn name(&self, device: usize) -> String {
        self.lanes[device].device.info().to_string()
    }

    /// The device that copies what lies on `home` here: `home` itself or, for host memory, a GPU if
    /// `home` does not reach every remote end.
    fn executor(
        &self,
        home: usize,
        windows: &RemoteWindows,
        scratch: &Scratch,
        target: &Target,
    ) -> Result<usize> {
        let owners = || scratch.remote_windows().map(|window| windows.allocation(window).device);
        let reaches = |device: usize, owner| self.lanes[device].device.reaches(&owner);
        let Some(unreached) = owners().find(|&owner| !reaches(home, owner)) else {
            return Ok(home);
        };
        let info = self.lanes[home].device.info();
        if info.vendor == Vendor::Host {
            let reaches_all = |&device: &usize| {
                reaches(device, info.uuid) && owners().all(|owner| reaches(device, owner))
            };
            // The remote memory's own GPU, if it is here too: then one end is its own.
            let is_other = |&device: &usize| self.lanes[device].device.info().uuid != unreached;
            let able = (0..self.lanes.len()).filter(reaches_all).min_by_key(is_other);
            if let Some(device) = able {
                return Ok(device);
            }
        }
        Err(Error::Unreachable {
            device: info.to_string(),
            peer: target.name().to_owned(),
            remote: unreached.to_string(),
        })
    }

    /// Starts plans of one device. `strides` belong to the parts, and so to the plans, by position.
    fn start(
        &self,
        plans: Vec<Plan<'_>>,
        strides: &[Strides],
        options: &SubmitOptions,
    ) -> Result<Submitted> {
        let device = plans.first().map_or(0, Plan::device);
        let lane = &self.lanes[device];
        let wanted = self.kernel && !options.without_kernel;
        let kernel = wanted && lane.device.info().capabilities.contains(Capabilities::KERNEL);
        let batch_min = lane.tuning.values.batch_min;
        let mut parts = plans.iter().zip(strides);
        if wanted && !kernel && parts.any(|(plan, strides)| plan.wants_kernel(strides, batch_min)) {
            self.fall_back(lane, &plans)?;
        }
        let bytes = plans.iter().map(Plan::bytes).sum();
        let mut loads: Vec<_> = plans
            .iter()
            .zip(strides)
            .map(|(plan, strides)| Self::load(plan, strides, kernel, batch_min))
            .collect();
        // Lists of ranges are interleaved in the launches that they share; forms are expanded by
        // launches of their own, which run side by side if each is small enough.
        if loads.iter().all(|load| load.compact.is_empty()) {
            loads = vec![Load::interleaved(loads)];
        }
        let vendor = lane.device.info().vendor;
        let path = loads.iter().map(|load| load.path(vendor, kernel)).reduce(Path::and);
        let max_grid_blocks =
            (lane.tuning.values.max_grid_blocks / loads.len().max(1) as u32).max(1);
        let mut pending = Vec::with_capacity(loads.len());
        let mut failure = None;
        let mut queue = lane.lock();
        for mut load in loads {
            let mut work = Work {
                compact: &load.compact,
                large: &load.large,
                kernel,
                after: options.after,
                max_grid_blocks,
                ..Work::pieces(&mut *load.pieces)
            };
            // SAFETY: the check of bounds found every copy inside registered memory, which its
            // registrant promised to keep until it is unregistered; `holds` below keeps regions
            // registered and peers mapped until the batch ends, and it ends only once the queue says
            // that this submission is done.
            match unsafe { queue.submit(&mut work) } {
                Ok(ticket) => pending.push(Pending { device, ticket }),
                Err(error) => {
                    match error.left {
                        Left::Nothing if pending.is_empty() => return Err(error.error.into()),
                        Left::Nothing => {}
                        Left::Until(ticket) => pending.push(Pending { device, ticket }),
                        // Nothing says when it ends: the batch does, once somebody asks the device.
                        Left::Unknown => {
                            lane.lose(&error.error);
                            pending.push(Pending { device, ticket: Ticket::NEVER });
                        }
                    }
                    failure = Some(error.error.into());
                    break;
                }
            }
        }
        drop(queue);
        let path = path.unwrap_or(Path::None);
        Ok(Submitted { pending, failure, bytes, path, holds: holds(plans) })
    }

    /// What a queue gets of one plan.
    fn load<'a>(
        plan: &'a Plan<'_>,
        strides: &'a Strides,
        kernel: bool,
        batch_min: u64,
    ) -> Load<'a> {
        let plan = match plan {
            Plan::Forms(plan) => {
                return Load { compact: plan.copies.clone(), ..Load::default() };
            }
            Plan::Ranges(plan) => plan,
        };
        if !strides.runs.is_empty() {
            let rest = Rest { plan, slices: strides.rest.iter(), now: None };
            let compact = plan.compact(strides).collect();
            let pieces: Box<dyn CopySource> = match strides.rest.is_empty() {
                true => nothing(),
                false => Box::new(rest),
            };
            return Load { pieces, has_pieces: !strides.rest.is_empty(), compact, large: vec![] };
        }
        let Checked { small, large, .. } = plan.checked;
        if !kernel {
            // The queue makes every descriptor a DMA.
            let pieces = Box::new(plan.pieces(Want::All));
            return Load { pieces, has_pieces: true, ..Load::default() };
        }
        // A few small pieces are quicker as DMAs than as a launch.
        let small_by_kernel = small as u64 >= batch_min;
        let (want, count) =
            if small_by_kernel { (Want::Large, large) } else { (Want::All, large + small) };
        let mut large = vec![CopyDescriptor::default(); count];
        if count > 0 {
            let filled = plan.pieces(want).fill(&mut large);
            debug_assert_eq!(filled, count);
        }
        let pieces: Box<dyn CopySource> = match small_by_kernel {
            true => Box::new(plan.pieces(Want::Small)),
            false => nothing(),
        };
        Load { pieces, has_pieces: small_by_kernel, compact: Vec::new(), large }
    }

    /// Refuses plans that the kernel should take on a device without one, or says once per peer
    /// that they go another way.
    fn fall_back(&self, lane: &Lane, plans: &[Plan<'_>]) -> Result<()> {
        let info = lane.device.info();
        let path = Load::default().path(info.vendor, false);
        let peers = plans.iter().map(|plan| plan.place().target.name());
        if self.strict {
            let (device, reason) = (info.to_string(), info.kernel.clone());
            let mut peers: Vec<_> = peers.collect();
            peers.dedup();
            return Err(Error::Fallback { device, peer: peers.join(", "), path, reason });
        }
        let mut fell_back = lane.fell_back.lock().unwrap_or_else(PoisonError::into_inner);
        for peer in peers {
            if !fell_back.contains(peer) {
                fell_back.insert(peer.to_owned());
                tracing::warn!(device = %info, peer, %path, reason = info.kernel, "no copy kernel: batches that it should take go a slower way");
            }
        }
        Ok(())
    }

    /// Whether all that is waited for has ended. Does not block, and asks the driver only now and
    /// then.
    pub(crate) fn ended(&self, pending: &[Pending]) -> Result<bool, kvferry_device::Error> {
        for Pending { device, ticket } in pending {
            let lane = &self.lanes[*device];
            if !lane.completions.done(*ticket) {
                return lane.check().map(|()| false);
            }
        }
        Ok(true)
    }

    pub(crate) fn signal(&self, pending: &[Pending], consumer: Consumer) -> Result<()> {
        for Pending { device, ticket } in pending {
            self.lanes[*device].lock().signal(*ticket, consumer)?;
        }
        Ok(())
    }

    fn take_scratches(&self, count: usize) -> Vec<Scratches> {
        let mut pool = self.scratches();
        let kept = pool.len().saturating_sub(count);
        let mut taken = pool.split_off(kept);
        taken.resize_with(count, Scratches::default);
        taken
    }

    fn scratches(&self) -> MutexGuard<'_, Vec<Scratches>> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn check_part_overlaps(
    part: &Part<'_>,
    extent: Option<Extent>,
    one_space: bool,
    scratch: &mut Scratch,
) -> Result<()> {
    match (part.copies, extent) {
        (Copies::Ranges(ranges), Some(extent)) => {
            check_overlaps(part.op, ranges, &extent, one_space, scratch)?
        }
        (Copies::Ranges(_), None) => {}
        (Copies::Strided(forms), _) => check_form_overlaps(part.op, forms, one_space, scratch)?,
        (Copies::Paged(forms), _) => check_form_overlaps(part.op, forms, one_space, scratch)?,
    }
    Ok(())
}

fn holds(plans: Vec<Plan<'_>>) -> Holds {
    let mut holds =
        Holds { targets: Vec::new(), _locks: Vec::new(), _pins: Vec::new(), _mappings: Vec::new() };
    for plan in plans {
        let mut place = plan.into_place();
        holds.targets.push(place.target);
        holds._locks.append(&mut place.locks);
        holds._pins.append(&mut place.pins);
        holds._mappings.append(&mut place.mappings);
    }
    holds
}

fn nothing<'a>() -> Box<dyn CopySource + 'a> {
    Box::new(kvferry_device::SliceSource(&[]))
}

/// What one submission to a queue is made of.
struct Load<'a> {
    pieces: Box<dyn CopySource + 'a>,
    has_pieces: bool,
    compact: Vec<CompactCopy<'a>>,
    large: Vec<CopyDescriptor>,
}

impl Default for Load<'_> {
    fn default() -> Self {
        Self { pieces: nothing(), has_pieces: false, compact: Vec::new(), large: Vec::new() }
    }
}

impl<'a> Load<'a> {
    /// One load of several that have no forms.
    fn interleaved(mut loads: Vec<Self>) -> Self {
        if loads.len() == 1 {
            return loads.remove(0);
        }
        let has_pieces = loads.iter().any(|load| load.has_pieces);
        // One of each by turns, too.
        let longest = loads.iter().map(|load| load.large.len()).max().unwrap_or(0);
        let by_turns = |at| loads.iter().filter_map(move |load| load.large.get(at).copied());
        let large = (0..longest).flat_map(by_turns).collect();
        let sources = loads.into_iter().map(|load| load.pieces).collect();
        let pieces = Box::new(Interleaved { sources, turn: 0 });
        Self { pieces, has_pieces, compact: Vec::new(), large }
    }

    fn path(&self, vendor: Vendor, kernel: bool) -> Path {
        let launched = self.has_pieces || !self.compact.is_empty();
        match (vendor, kernel && launched, self.large.is_empty()) {
            (Vendor::Host, ..) => Path::Memcpy,
            (_, true, true) => Path::Kernel,
            (_, true, false) => Path::Mixed,
            (_, false, _) => Path::Dma,
        }
    }
}

/// Takes turns between the pieces of several targets.
struct Interleaved<'a> {
    sources: Vec<Box<dyn CopySource + 'a>>,
    turn: usize,
}

impl CopySource for Interleaved<'_> {
    fn fill(&mut self, slot: &mut [CopyDescriptor]) -> usize {
        let mut count = 0;
        while count < slot.len() && !self.sources.is_empty() {
            let turn = self.turn % self.sources.len();
            let room = (slot.len() - count).min(TURN);
            match self.sources[turn].fill(&mut slot[count..count + room]) {
                0 => drop(self.sources.remove(turn)),
                more => {
                    count += more;
                    self.turn = turn + 1;
                }
            }
        }
        count
    }
}

/// The pieces of a list that lie in none of its runs.
struct Rest<'a> {
    plan: &'a RangePlan<'a>,
    slices: std::slice::Iter<'a, std::ops::Range<usize>>,
    now: Option<Pieces<'a>>,
}

impl CopySource for Rest<'_> {
    fn fill(&mut self, slot: &mut [CopyDescriptor]) -> usize {
        loop {
            if let Some(now) = &mut self.now {
                let count = now.fill(slot);
                if count > 0 {
                    return count;
                }
            }
            let Some(slice) = self.slices.next() else { return 0 };
            let ranges = &self.plan.ranges[slice.clone()];
            self.now = Some(self.plan.pieces_of(ranges, Want::Small));
        }
    }
}

impl Lane {
    fn open(device: Arc<dyn Device>, config: &Config) -> Result<Self> {
        let tuning = Tuning::of_device(config, device.info());
        let options = QueueOptions {
            streams: config.streams,
            max_grid_blocks: tuning.values.max_grid_blocks,
            tile_bytes: tuning.values.tile_bytes,
            high_priority: config.high_priority,
            stall_timeout: config.stall_timeout,
            ..QueueOptions::default()
        };
        let queue = Arc::clone(&device).queue(&options)?;
        let completions = queue.completions();
        Ok(Self {
            device,
            tuning,
            fell_back: Mutex::default(),
            queue: Mutex::new(queue),
            completions,
            lost: OnceLock::new(),
            asked: AtomicU64::new(0),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Box<dyn Queue>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lose(&self, error: &kvferry_device::Error) {
        let _ = self.lost.set(error.clone());
    }

    /// Asks the driver whether the device still works, if nobody did lately. Does not wait for a
    /// thread that submits.
    fn check(&self) -> Result<(), kvferry_device::Error> {
        if let Some(lost) = self.lost.get() {
            return Err(lost.clone());
        }
        let now = milliseconds();
        if now == self.asked.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut queue = match self.queue.try_lock() {
            Ok(queue) => queue,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        self.asked.store(now, Ordering::Relaxed);
        queue.check().inspect_err(|error| self.lose(error))
    }
}

/// A clock that moves once in one to ten milliseconds, as the system is configured, and costs a
/// quarter of the exact one: a poll of something that runs asks the driver no more often.
fn milliseconds() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}
