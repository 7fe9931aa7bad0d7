//! From parts of a batch to jobs for lanes: checked, and divided.

use std::sync::{Arc, MutexGuard, PoisonError};

use super::Tcp;
use super::cut::{Order, check_served, cut_forms, divide};
use super::layout::Home;
use super::session::Session;
use super::transfer::{Asked, Job, Transfer, Work};
use crate::batch::{Holds, Path};
use crate::config::OverlapCheck;
use crate::ended::Fallback;
use crate::error::{Error, Result};
use crate::plan::{
    Form, Limits, Op, Scratch, check_bounds, check_form_bounds, check_form_overlaps, check_overlaps,
};
use crate::registry::{Registry, Table};
use crate::request::{Copies, Part};
use crate::target::{RemoteTable, Target};
use crate::transport::peer::Peer;
use crate::transport::staging::{OFF, Side};

/// Parts that may start.
pub(crate) struct Planned {
    parts: Vec<PlannedPart>,
    transfer: Arc<Transfer>,
    /// Whose queue can wait for a producer.
    pub(super) device: usize,
}

struct PlannedPart {
    session: Arc<Session>,
    order: Arc<Order>,
    bytes: u64,
    /// Of forms; a list of ranges is divided when it starts.
    requests: Vec<Asked>,
}

/// What a batch is told of its plan.
pub(crate) struct Summary {
    pub(crate) bytes: u64,
    pub(crate) path: Path,
    pub(crate) fallback: Option<Fallback>,
    pub(crate) holds: Holds,
}

impl Planned {
    pub(super) fn transfer(&self) -> &Arc<Transfer> {
        &self.transfer
    }

    /// Gives out the jobs one by one, so that lanes work on the first while others are still made.
    /// `parts` are those of the plan.
    pub(super) fn start(
        self,
        parts: &[&Part<'_>],
        lanes: usize,
        mut give: impl FnMut(&Arc<Session>, Job),
    ) {
        for (planned, part) in self.parts.into_iter().zip(parts) {
            let PlannedPart { session, order, bytes, requests } = planned;
            let mut job = |work| {
                give(&session, Job { claim: self.transfer.claim(session.owner()), work });
            };
            match part.copies {
                Copies::Ranges(ranges) => {
                    divide(&order, ranges, bytes, lanes, |share| job(Work::Cut(share)));
                }
                Copies::Strided(_) | Copies::Paged(_) => {
                    requests.into_iter().for_each(|asked| job(Work::Ask(asked)));
                }
            }
        }
    }
}

impl Tcp {
    /// Checks the parts, which have bytes to move.
    ///
    /// # Errors
    /// What is wrong with the first of them that is wrong. Nothing has moved.
    pub(crate) fn plan(
        &self,
        peer: &Peer,
        registry: &Registry,
        parts: &[&Part<'_>],
    ) -> Result<(Planned, Summary)> {
        let (path, holds) = (Path::None, Holds::default());
        let mut summary = Summary { bytes: 0, path, fallback: None, holds };
        let mut planned = Vec::with_capacity(parts.len());
        let mut device = 0;
        for part in parts {
            let Some(session) = part.target.session() else {
                let addr = part.target.table().first_private().unwrap_or(0);
                return Err(Error::NotServed { peer: part.target.name().to_owned(), addr });
            };
            let checked = self.check(peer, registry, part)?;
            device = checked.device;
            summary.bytes += checked.bytes;
            let (path, fallback) = self.path(checked.device, part.target)?;
            summary.path = summary.path.and(path);
            summary.fallback = summary.fallback.or(fallback);
            let order = Arc::new(self.order(part, &checked));
            let requests = self.requests(part, &checked, &order)?;
            summary.holds.targets.push(part.target.clone());
            let Checked { local, scratch, bytes, .. } = checked;
            registry.pin(&local, scratch.local_windows(), &mut summary.holds._pins)?;
            self.scratches().push(scratch);
            let session = Arc::clone(session);
            planned.push(PlannedPart { session, order, bytes, requests });
        }
        Ok((Planned { parts: planned, transfer: Arc::default(), device }, summary))
    }

    /// Finds what is wrong with a list of which only some goes over TCP.
    ///
    /// # Errors
    /// As [`Tcp::plan`], with positions in the whole list.
    pub(crate) fn check_whole(
        &self,
        peer: &Peer,
        registry: &Registry,
        part: &Part<'_>,
    ) -> Result<()> {
        let Checked { scratch, .. } = self.check(peer, registry, part)?;
        self.scratches().push(scratch);
        Ok(())
    }

    fn scratches(&self) -> MutexGuard<'_, Vec<Scratch>> {
        self.scratches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self, peer: &Peer, registry: &Registry, part: &Part<'_>) -> Result<Checked> {
        let (remote, local) = (part.target.table(), registry.table());
        let mut scratch = self.scratches().pop().unwrap_or_default();
        let before = self.overlap_check != OverlapCheck::Off;
        // Both ends are addresses of one process if the target's engine is in this one.
        let one_space = part.target.registry()?.is_some();
        let (bytes, device) = match part.copies {
            Copies::Ranges(ranges) => {
                let limits = Limits { small_max_bytes: u64::MAX, tile_bytes: u64::MAX };
                let (windows, there) = (&local.windows, &remote.windows);
                let (checked, extent) =
                    check_bounds(part.op, ranges, windows, there, &limits, &mut scratch)?;
                if before {
                    check_overlaps(part.op, ranges, &extent, one_space, &mut scratch)?;
                }
                let used = || ranges.iter().enumerate().filter(|(_, range)| range.len > 0);
                let ends = || used().map(|(at, range)| (at, range.local));
                (checked.bytes, peer.one_device(&local, &scratch, ends)?)
            }
            Copies::Strided(forms) => {
                check_forms(peer, part.op, forms, &local, &remote, before, one_space, &mut scratch)?
            }
            Copies::Paged(forms) => {
                check_forms(peer, part.op, forms, &local, &remote, before, one_space, &mut scratch)?
            }
        };
        Ok(Checked { local, remote, scratch, bytes, device })
    }

    /// How this side's bytes go, and whether they could go faster.
    fn path(&self, device: usize, target: &Target) -> Result<(Path, Option<Fallback>)> {
        let staging = &self.shared.staging;
        if staging.is_host(device) {
            return Ok((Path::Tcp, None));
        }
        let pool = staging.pool(device)?;
        let why_not = if !(pool.is_staged(Side::Send) && pool.is_staged(Side::Receive)) {
            Some(OFF.to_owned())
        } else if !pool.kernel() {
            Some(format!("there is no copy kernel: {}", staging.device(device).info().kernel))
        } else {
            None
        };
        if let Some(reason) = &why_not {
            pool.fall_back(target.name(), reason)?;
        }
        let path = if pool.is_staged(Side::Send) { Path::TcpStaged } else { Path::Tcp };
        Ok((path, why_not.map(|_| Fallback::NotStaged)))
    }

    fn order(&self, part: &Part<'_>, checked: &Checked) -> Order {
        Order {
            op: part.op,
            peer: part.target.name().to_owned(),
            table: Arc::clone(&checked.remote),
            home: match self.shared.staging.is_host(checked.device) {
                true => Home::Host,
                false => Home::Device(checked.device),
            },
            progress_ms: self.shared.limits.progress_ms,
        }
    }

    /// The requests of a part's forms. Of ranges, finds those that the peer does not serve.
    fn requests(&self, part: &Part<'_>, checked: &Checked, order: &Order) -> Result<Vec<Asked>> {
        let (placed, lanes) = (checked.scratch.forms(), self.shared.lanes);
        match part.copies {
            Copies::Ranges(ranges) => {
                check_served(order, ranges)?;
                Ok(Vec::new())
            }
            Copies::Strided(forms) => cut_forms(order, forms, placed, checked.bytes, lanes),
            Copies::Paged(forms) => cut_forms(order, forms, placed, checked.bytes, lanes),
        }
    }
}

struct Checked {
    local: Arc<Table>,
    remote: Arc<RemoteTable>,
    scratch: Scratch,
    bytes: u64,
    device: usize,
}

#[expect(clippy::too_many_arguments, reason = "one call for either kind of form")]
fn check_forms<F: Form>(
    peer: &Peer,
    op: Op,
    forms: &[F],
    local: &Table,
    remote: &RemoteTable,
    overlaps: bool,
    one_space: bool,
    scratch: &mut Scratch,
) -> Result<(u64, usize)> {
    let checked = check_form_bounds(forms, &local.windows, &remote.windows, scratch)?;
    if overlaps {
        check_form_overlaps(op, forms, one_space, scratch)?;
    }
    let ends = || scratch.forms().iter().map(|form| (form.form, form.local.low));
    Ok((checked.bytes, peer.one_device(local, scratch, ends)?))
}
