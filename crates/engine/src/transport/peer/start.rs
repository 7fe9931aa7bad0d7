//! Starting plans: by the ways between a GPU and host memory, or by the lane of the device.

use std::sync::PoisonError;

use kvferry_device::{Capabilities, Vendor};
use smallvec::smallvec;

use super::{Peer, Submitted};
use crate::batch::{Holds, OverlapVerdict};
use crate::ended::Fallback;
use crate::error::{Error, Result, Side};
use crate::mostly_one::MostlyOne;
use crate::plan::{Op, Strides};
use crate::request::SubmitOptions;
use crate::transport::fences::{Behind, Order};
use crate::transport::lane::Lane;
use crate::transport::load::Load;
use crate::transport::offload::{Direction, Parts, Request};
use crate::transport::overlaps::Overlaps;
use crate::transport::place::Plan;

impl Peer {
    /// Starts plans of one device. `strides` belong to the parts, and so to the plans, by position; `all` has
    /// nothing yet.
    pub(super) fn start(
        &self,
        plans: MostlyOne<Plan<'_>>,
        strides: &[&Strides],
        options: &SubmitOptions<'_>,
        behind: &Behind,
        overlaps: &mut Overlaps<'_>,
        all: &mut Submitted,
    ) -> Result<()> {
        let parts: MostlyOne<_> = plans.iter().zip(strides.iter().copied()).collect();
        let fences = behind.fences()?;
        let order = Order { after: options.after, behind: fences.list(), paced: &behind.paced };
        let mut is_first = true;
        for direction in [None, Some(Direction::Store), Some(Direction::Load)] {
            let goes = |(plan, _): &&(&Plan<'_>, &Strides)| plan.direction() == direction;
            let some: MostlyOne<_> = parts.iter().filter(goes).copied().collect();
            if some.is_empty() {
                continue;
            }
            if std::mem::take(&mut is_first) {
                self.start_some(direction, &some, options, order, overlaps, all)?;
            } else {
                let mut more = Submitted::nothing();
                match self.start_some(direction, &some, options, order, overlaps, &mut more) {
                    Ok(()) => all.join(more),
                    Err(error) if all.is_nothing() => return Err(error),
                    Err(error) => all.failure = Some(error),
                }
            }
            if all.failure.is_some() {
                break;
            }
        }
        drop(parts);
        all.holds = holds(plans);
        Ok(())
    }

    /// Starts plans that all are of one direction between a GPU and host memory, or all are not. Behind an
    /// error nothing runs, whatever is in `submitted`.
    fn start_some(
        &self,
        direction: Option<Direction>,
        parts: &Parts<'_>,
        options: &SubmitOptions<'_>,
        order: Order<'_>,
        overlaps: &mut Overlaps<'_>,
        submitted: &mut Submitted,
    ) -> Result<()> {
        let device = parts.first().map_or(0, |(plan, _)| plan.device());
        let lane = &self.lanes[device];
        if let Some(direction) = direction {
            let fall_back = || self.fall_back(lane, parts);
            let device = (device, &lane.device);
            let request = Request { direction, parts, options, order };
            if self.offload.start(device, request, overlaps, fall_back, submitted)? {
                return Ok(());
            }
        }
        overlaps.check_before()?;
        let wanted = self.kernel && !options.without_kernel;
        let kernel = wanted && lane.device.info().capabilities.contains(Capabilities::KERNEL);
        let batch_min = lane.tuning.values.batch_min;
        let wants = |(plan, strides): &(&Plan<'_>, &Strides)| plan.wants_kernel(strides, batch_min);
        if wanted && !kernel && parts.iter().any(wants) {
            self.fall_back(lane, parts)?;
            submitted.fallback = Some(Fallback::NoKernel);
        }
        if self.offload.is_rated() || !order.paced.is_empty() {
            return self.offload.pace_others(device, lane, kernel, parts, order, submitted);
        }
        let loads = parts.iter().map(|(plan, strides)| Load::of(plan, strides, kernel, batch_min));
        submitted.bytes = parts.iter().map(|(plan, _)| plan.bytes()).sum();
        let grid = lane.tuning.values.max_grid_blocks;
        let loads = Load::joined(loads.collect());
        let mut destinations = match (parts, &loads[..]) {
            ([(Plan::Ranges(plan), _)], [load]) if kernel && load.is_pieces() => {
                let on_gpu = lane.device.info().vendor != Vendor::Host;
                (on_gpu && overlaps.suit_device()).then(|| plan.destinations()).flatten()
            }
            _ => None,
        };
        // SAFETY: every copy was found inside registered memory, which its registrant keeps; the holds
        // keep regions registered and peers mapped until the queue says that this is done.
        unsafe {
            Load::submit(loads, lane, kernel, grid, order, destinations.as_mut(), submitted)
        }?;
        let verdict = destinations.and_then(|destinations| destinations.verdict);
        if let (Some(verdict), Some((plan, _))) = (verdict, parts.first()) {
            overlaps.leave_to_device();
            let side = match plan.op() {
                Op::Write => Side::Remote,
                Op::Read => Side::Local,
            };
            submitted.overlap = Some(OverlapVerdict { verdict, side });
        }
        Ok(())
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
}

fn holds(plans: MostlyOne<Plan<'_>>) -> Holds {
    let mut places = plans.into_iter().map(Plan::into_place);
    let Some(first) = places.next() else { return Holds::default() };
    let mut holds = Holds {
        targets: smallvec![first.target],
        _locks: first.locks,
        _pins: first.pins,
        _mappings: first.mappings,
    };
    for place in places {
        holds.targets.push(place.target);
        holds._locks.extend(place.locks);
        holds._pins.extend(place.pins);
        holds._mappings.extend(place.mappings);
    }
    holds
}
