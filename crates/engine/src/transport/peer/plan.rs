//! Planning: checks a part, chooses the device that copies, and finds where its bytes are.

use std::sync::Arc;

use kvferry_device::{Device, DeviceUuid, Vendor, host_uuid};
use smallvec::{SmallVec, smallvec};

use super::{Peer, Scratches};
use crate::error::{Error, RangeError, Result, Side};
use crate::mostly_one::MostlyOne;
use crate::plan::{
    Form, Limits, Op, Range, Scratch, check_bounds, check_bounds_and_mark, check_form_bounds,
    find_strides,
};
use crate::profile::Values;
use crate::registry::{Registry, Table};
use crate::request::{Copies, Part};
use crate::segment::AllocationKey;
use crate::target::Target;
use crate::transport::place::{FormPlan, Place, Plan, RangePlan, RemoteWindows, compact_copies};

impl Peer {
    pub(super) fn plan<'a>(
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
        let overlaps_too = self.overlap_check.is_before(ranges.len());
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
    ) -> Result<Box<Place>> {
        let executor = &self.lanes[device].device;
        // Host memory of this process that a GPU copies.
        let in_place = |owner: DeviceUuid| owner == host_uuid() && executor.info().uuid != owner;
        let mut pins = SmallVec::new();
        registry.pin(&local, scratch.local_windows(), &mut pins)?;
        if let RemoteWindows::Direct(registry, table) = &remote {
            registry.pin(table, scratch.remote_windows(), &mut pins)?;
        }
        let mut local_relocations = SmallVec::new();
        let mut remote_relocations = smallvec![0; remote.windows().len()];
        let (mut locks, mut mappings) = (MostlyOne::new(), MostlyOne::new());
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
        let (mut local_starts, mut remote_starts) = (SmallVec::new(), SmallVec::new());
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
        Ok(Box::new(Place {
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
        }))
    }

    /// The one device that all local ends lie on. `ends` gives each item's position and an address.
    pub(in crate::transport) fn one_device<I: Iterator<Item = (usize, u64)>>(
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

    pub(super) fn one_device_for_all(&self, plans: &[Plan<'_>]) -> Result<()> {
        let Some(first) = plans.first().map(Plan::device) else { return Ok(()) };
        match plans.iter().map(Plan::device).enumerate().find(|&(_, device)| device != first) {
            None => Ok(()),
            Some((part, device)) => {
                let (device, first) = (self.name(device), self.name(first));
                Err(Error::MixedParts { part, device, first })
            }
        }
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

    fn name(&self, device: usize) -> String {
        self.lanes[device].device.info().to_string()
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
