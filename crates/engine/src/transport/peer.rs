//! Copies between this process's memory and a peer's on the same host, mapped here: the device
//! writes to or reads from the peer directly. Submission runs on the caller's thread.
//!
//! The device of the local end copies. Host memory reaches no GPU, so between host memory here and
//! a GPU's there a GPU of this engine copies: host memory is page-locked for it in place, and seen
//! at an address of its own. The processor never touches a GPU's memory.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvferry_device::{Capabilities, Consumer, Device, DeviceUuid, Vendor, host_uuid};

use super::fences::{Behind, Fences, Order};
use super::lane::Lane;
use super::load::Load;
use super::offload::{Choice, Direction, Offload, Paced, Parts, Request};
use super::overlaps::{Bounded, Overlaps};
use super::place::{FormPlan, Place, Plan, RangePlan, RemoteWindows, compact_copies};
use crate::batch::{Holds, Path, Pending};
use crate::config::{Config, OverlapCheck};
use crate::ended::Fallback;
use crate::error::{Error, RangeError, Result, Side};
use crate::plan::{
    Form, Limits, Op, Range, Scratch, Strides, check_bounds, check_bounds_and_mark,
    check_form_bounds, find_strides,
};
use crate::profile::{Tuning, Values};
use crate::registry::{Registry, Table};
use crate::request::{Copies, Part, SubmitOptions};
use crate::segment::AllocationKey;
use crate::target::Target;

/// The peer transport of one engine.
#[derive(Debug)]
pub(crate) struct Peer {
    lanes: Vec<Arc<Lane>>,
    /// Whether the kernel is wanted where there is one.
    kernel: bool,
    /// Whether to refuse what a kernel that is missing should take.
    strict: bool,
    overlap_check: OverlapCheck,
    offload: Offload,
    /// Memory of submissions that are not running now.
    scratch: Mutex<Vec<Scratches>>,
}

/// What planning one part needs, kept from one batch to the next.
#[derive(Debug, Default)]
struct Scratches {
    scratch: Scratch,
    strides: Strides,
}

/// A batch that was handed to a device.
#[derive(Debug)]
pub(crate) struct Submitted {
    pub(crate) pending: Vec<Pending>,
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
}

impl Submitted {
    /// Of a batch that no device of this engine moves.
    pub(crate) fn nothing() -> Self {
        let holds = Holds::default();
        let (pending, paced) = (Vec::new(), Vec::new());
        let (failure, path, choice, fallback) = (None, Path::None, None, None);
        Self { pending, paced, failure, bytes: 0, path, choice, fallback, holds }
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
    }
}

impl Peer {
    pub(crate) fn new(config: &Config, devices: &[Arc<dyn Device>]) -> Result<Self> {
        let lane = |device: &Arc<dyn Device>| Lane::open(Arc::clone(device), config).map(Arc::new);
        Ok(Self {
            lanes: devices.iter().map(lane).collect::<Result<_>>()?,
            kernel: config.kernel,
            strict: config.strict,
            overlap_check: config.overlap_check,
            offload: Offload::new(config, devices),
            scratch: Mutex::default(),
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

    /// Whether nobody knows what the copies of a device do.
    pub(crate) fn is_lost(&self, device: usize) -> bool {
        self.lanes[device].is_lost() || self.offload.is_lost(device)
    }

    pub(super) fn lane(&self, index: usize) -> &Arc<Lane> {
        &self.lanes[index]
    }

    pub(crate) fn pinned_bytes(&self) -> u64 {
        let lanes: u64 = self.lanes.iter().map(|lane| lane.lock().pinned_bytes()).sum();
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

    /// Checks the parts, opens what they need, and starts them. `None`: they have no bytes to move.
    pub(crate) fn submit(
        &self,
        registry: &Registry,
        parts: &[Part<'_>],
        options: &SubmitOptions<'_>,
        behind: &Behind,
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
        let submitted = self.submit_with(&mut scratches, registry, &parts, options, behind);
        self.scratches().append(&mut scratches);
        submitted.map(Some)
    }

    fn submit_with(
        &self,
        scratches: &mut [Scratches],
        registry: &Registry,
        parts: &[&Part<'_>],
        options: &SubmitOptions<'_>,
        behind: &Behind,
    ) -> Result<Submitted> {
        let plans = parts.iter().zip(&mut *scratches);
        let plans = plans.map(|(part, scratches)| self.plan(scratches, registry, part));
        let plans = plans.collect::<Result<Vec<_>>>()?;
        self.one_device_for_all(&plans)?;
        let strides: Vec<_> =
            scratches.iter_mut().map(|s| std::mem::take(&mut s.strides)).collect();
        let mut bounded = Vec::with_capacity(parts.len());
        for ((part, plan), scratches) in parts.iter().zip(&plans).zip(&mut *scratches) {
            let (extent, one_space) = (plan.extent(), plan.one_space());
            bounded.push(Bounded { part, extent, one_space, scratch: &mut scratches.scratch });
        }
        let mut overlaps = Overlaps::new(self.overlap_check, bounded);
        let submitted = self.start(plans, &strides, options, behind, &mut overlaps);
        let submitted = submitted.map(|mut submitted| {
            if submitted.failure.is_none() {
                submitted.failure = overlaps.check_beside().err();
            }
            submitted
        });
        for (scratches, strides) in scratches.iter_mut().zip(strides) {
            scratches.strides = strides;
        }
        submitted
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

    /// Checks the bounds of a list and finds out where its bytes are; opens mappings at first use.
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
        let overlaps_too = self.overlap_check == OverlapCheck::Before;
        let check_bounds_now = if overlaps_too { check_bounds_and_mark } else { check_bounds };
        let (mut checked, extent) =
            check_bounds_now(op, ranges, &local.windows, remote.windows(), &limits, scratch)?;
        let one_space = share_memory(&local, &remote, scratch);
        let device = self.one_device(&local, scratch, || {
            ranges
                .iter()
                .enumerate()
                .filter(|(_, range)| range.len > 0)
                .map(|(at, r)| (at, r.local))
        })?;
        let home = device;
        let device = self.executor(home, &remote, scratch, target)?;
        if self.limits(device) != limits {
            // A GPU copies for host memory, and has a profile of its own.
            limits = self.limits(device);
            (checked, _) =
                check_bounds(op, ranges, &local.windows, remote.windows(), &limits, scratch)?;
        }
        let place = self.place(scratch, registry, target, local, remote, (home, device))?;
        Ok(RangePlan { op, ranges, place, checked, limits, extent, one_space, device })
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
        let one_space = share_memory(&local, &remote, scratch);
        let home = self.one_device(&local, scratch, || {
            scratch.forms().iter().map(|form| (form.form, form.local.low))
        })?;
        let device = self.executor(home, &remote, scratch, target)?;
        let place = self.place(scratch, registry, target, local, remote, (home, device))?;
        let mut copies = Vec::with_capacity(scratch.forms().len());
        for placed in scratch.forms() {
            let shift = place.shift(placed.local.window, placed.remote.window);
            copies.extend(compact_copies(op, forms[placed.form].grid(), shift));
        }
        Ok(Plan::Forms(FormPlan { op, copies, bytes: checked.bytes, one_space, device, place }))
    }

    /// Pins and maps, for the device that copies, the windows that the last checked list uses. The
    /// local ends lie on `home`.
    fn place(
        &self,
        scratch: &Scratch,
        registry: &Registry,
        target: &Target,
        local: Arc<Table>,
        remote: RemoteWindows,
        (home, device): (usize, usize),
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
                    let mapping = target.mapping(allocation, device, executor);
                    let mapping =
                        mapping.map_err(|error| self.leave(target, home, allocation.key, error))?;
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
        let host = host_end(executor, &local, &remote, scratch);
        let (mut local_starts, mut remote_starts) = (Vec::new(), Vec::new());
        if host.is_some() || self.offload.may_pace() {
            local_starts.extend(scratch.local_windows().map(|window| {
                let relocation = local_relocations.get(window).copied().unwrap_or(0);
                local.windows[window].start.wrapping_add(relocation)
            }));
            remote_starts.extend(scratch.remote_windows().map(|window| {
                remote.windows()[window].start.wrapping_add(remote_relocations[window])
            }));
        }
        let target = target.clone();
        Ok(Place {
            local,
            remote,
            local_relocations,
            remote_relocations,
            target,
            host,
            local_starts,
            remote_starts,
            locks,
            pins,
            mappings,
        })
    }

    /// The one device that all local ends lie on. `ends` gives each item's position and an address.
    pub(super) fn one_device<I: Iterator<Item = (usize, u64)>>(
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
        // What a GPU reaches alone needs only a list of its own.
        let reached_alone = |owner: &DeviceUuid| {
            let is_host = info.vendor == Vendor::Host;
            let able = |device| reaches(device, info.uuid) && reaches(device, *owner);
            reaches(home, *owner) || is_host && (0..self.lanes.len()).any(able)
        };
        let out_of_reach = owners().find(|owner| !reached_alone(owner));
        let error = Error::Unreachable {
            device: info.to_string(),
            peer: target.name().to_owned(),
            remote: out_of_reach.unwrap_or(unreached).to_string(),
        };
        if let Some(remote) = out_of_reach.filter(|_| !self.strict) {
            target.leave_to_tcp(home, remote, None, &error);
        }
        Err(error)
    }

    /// The error of a mapping. If it comes again each time, TCP takes what is not mapped from now on,
    /// where it can: the pair of devices, or the one allocation.
    fn leave(&self, target: &Target, home: usize, key: AllocationKey, error: Error) -> Error {
        let allocation = match error {
            Error::Unproven { .. } => None,
            Error::NotOpened { .. } => Some(key.id),
            _ => return error,
        };
        if !self.strict {
            target.leave_to_tcp(home, key.device, allocation, &error);
        }
        error
    }

    /// Starts plans of one device. `strides` belong to the parts, and so to the plans, by position.
    fn start(
        &self,
        plans: Vec<Plan<'_>>,
        strides: &[Strides],
        options: &SubmitOptions<'_>,
        behind: &Behind,
        overlaps: &mut Overlaps<'_>,
    ) -> Result<Submitted> {
        let parts: Vec<_> = plans.iter().zip(strides).collect();
        let fences = Fences::of(&behind.pending);
        let order = Order { after: options.after, behind: fences.list(), paced: &behind.paced };
        let mut all = Submitted::nothing();
        for direction in [None, Some(Direction::Store), Some(Direction::Load)] {
            let goes = |(plan, _): &&(&Plan<'_>, &Strides)| plan.direction() == direction;
            let some: Vec<_> = parts.iter().filter(goes).copied().collect();
            if some.is_empty() {
                continue;
            }
            match self.start_some(direction, &some, options, order, overlaps) {
                Ok(more) => all.join(more),
                Err(error) if all.is_nothing() => return Err(error),
                Err(error) => all.failure = Some(error),
            }
            if all.failure.is_some() {
                break;
            }
        }
        all.holds = holds(plans);
        Ok(all)
    }

    /// Starts plans that all are of one direction between a GPU and host memory, or all are not.
    fn start_some(
        &self,
        direction: Option<Direction>,
        parts: &Parts<'_>,
        options: &SubmitOptions<'_>,
        order: Order<'_>,
        overlaps: &mut Overlaps<'_>,
    ) -> Result<Submitted> {
        let device = parts.first().map_or(0, |(plan, _)| plan.device());
        let lane = &self.lanes[device];
        if let Some(direction) = direction {
            let fall_back = || self.fall_back(lane, parts);
            let device = (device, &lane.device);
            let request = Request { direction, parts, options, order };
            let started = self.offload.start(device, request, overlaps, fall_back)?;
            if let Some(submitted) = started {
                return Ok(submitted);
            }
        }
        overlaps.check_before()?;
        let wanted = self.kernel && !options.without_kernel;
        let kernel = wanted && lane.device.info().capabilities.contains(Capabilities::KERNEL);
        let batch_min = lane.tuning.values.batch_min;
        let wants = |(plan, strides): &(&Plan<'_>, &Strides)| plan.wants_kernel(strides, batch_min);
        let mut fallback = None;
        if wanted && !kernel && parts.iter().any(wants) {
            self.fall_back(lane, parts)?;
            fallback = Some(Fallback::NoKernel);
        }
        if self.offload.is_rated() || !order.paced.is_empty() {
            let paced = self.offload.pace_others(device, lane, kernel, parts, order)?;
            return Ok(Submitted { fallback, ..paced });
        }
        let loads = parts.iter().map(|(plan, strides)| Load::of(plan, strides, kernel, batch_min));
        let mut submitted = Submitted { fallback, ..Submitted::nothing() };
        submitted.bytes = parts.iter().map(|(plan, _)| plan.bytes()).sum();
        let grid = lane.tuning.values.max_grid_blocks;
        let loads = Load::joined(loads.collect());
        // SAFETY: every copy was found inside registered memory, which its registrant keeps; the holds
        // keep regions registered and peers mapped until the queue says that this is done.
        unsafe { Load::submit(loads, lane, kernel, grid, order, &mut submitted) }?;
        Ok(submitted)
    }

    /// Refuses plans that the kernel should take on a device without one, or says once per peer
    /// that they go another way.
    fn fall_back(&self, lane: &Lane, parts: &Parts<'_>) -> Result<()> {
        let info = lane.device.info();
        let path = Load::default().path(info.vendor, false);
        let peers = parts.iter().map(|(plan, _)| plan.place().target.name());
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
        for Pending { lane, ticket } in pending {
            if !lane.completions.done(*ticket) {
                return lane.check().map(|()| false);
            }
        }
        Ok(true)
    }

    pub(crate) fn signal(&self, pending: &[Pending], consumer: Consumer) -> Result<()> {
        for Pending { lane, ticket } in pending {
            lane.lock().signal(*ticket, consumer)?;
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

/// Whether a piece of a list in bounds may read what another one writes: both ends are addresses of
/// this process, and of one device. All local ends lie on one, or the list is refused.
fn share_memory(local: &Table, remote: &RemoteWindows, scratch: &Scratch) -> bool {
    let home = scratch.local_windows().next().map(|window| local.allocations[window].device);
    let mut owners = scratch.remote_windows().map(|window| remote.allocation(window).device);
    remote.is_direct() && owners.any(|owner| Some(owner) == home)
}

/// The end of a checked list that is host memory, if one is and the other is not, or if the processor
/// copies: then it is the remote one.
fn host_end(
    executor: &Arc<dyn Device>,
    local: &Table,
    remote: &RemoteWindows,
    scratch: &Scratch,
) -> Option<Side> {
    let host = host_uuid();
    if executor.info().uuid == host {
        return Some(Side::Remote);
    }
    let mut remote_hosts =
        scratch.remote_windows().map(|window| remote.allocation(window).device == host);
    let remote = remote_hosts.next()?;
    if remote_hosts.any(|other| other != remote) {
        return None;
    }
    // All local ends lie on one device.
    let window = scratch.local_windows().next()?;
    match (local.allocations[window].device == host, remote) {
        (false, true) => Some(Side::Remote),
        (true, false) => Some(Side::Local),
        _ => None,
    }
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
