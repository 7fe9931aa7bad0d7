//! From parts of a batch to requests: checked, cut at regions and sizes, encoded.

use std::sync::Arc;

use kvferry_wire::batch::{self as wire, Encoder, Form as WireForm};

use super::Tcp;
use super::layout::{Home, Layout, Run};
use super::session::Session;
use super::transfer::{Job, Transfer};
use crate::batch::{Holds, Path};
use crate::config::OverlapCheck;
use crate::error::{Error, Result};
use crate::plan::{
    Form, FormPieces, Limits, Op, Range, Scratch, check_bounds, check_form_bounds,
    check_form_overlaps, check_overlaps,
};
use crate::registry::{Registry, Table};
use crate::request::{Copies, Part};
use crate::target::{RemoteTable, Target};
use crate::transport::peer::Peer;
use crate::transport::staging::{OFF, Side};

/// Ranges of one request; the wire's limit is 16,000, and its frame has room for segments beside.
const RANGES: usize = 8192;

/// Bytes of one request: enough for a lane to be busy, few enough to share a transfer among lanes.
const LEAST: u64 = 256 << 10;
const MOST: u64 = 16 << 20;

/// Jobs that are ready.
pub(crate) struct Planned {
    pub(super) jobs: Vec<(Arc<Session>, Vec<Job>)>,
    pub(super) transfer: Arc<Transfer>,
    /// Whose queue can wait for a producer.
    pub(super) device: usize,
}

/// What a batch is told of its plan.
pub(crate) struct Summary {
    pub(crate) bytes: u64,
    pub(crate) path: Path,
    pub(crate) holds: Holds,
}

impl Tcp {
    /// Checks the parts, which have bytes to move, and cuts them.
    ///
    /// # Errors
    /// What is wrong with the first of them that is wrong. Nothing has moved.
    pub(crate) fn plan(
        &self,
        peer: &Peer,
        registry: &Registry,
        parts: &[&Part<'_>],
    ) -> Result<(Planned, Summary)> {
        let mut summary = Summary { bytes: 0, path: Path::None, holds: Holds::default() };
        let mut cut = Vec::with_capacity(parts.len());
        let mut device = 0;
        for part in parts {
            let checked = self.check(peer, registry, part)?;
            device = checked.device;
            summary.bytes += checked.bytes;
            summary.path = summary.path.and(self.path(checked.device, part.target)?);
            let requests = self.cut(part, &checked)?;
            summary.holds.targets.push(part.target.clone());
            let local = checked.local;
            summary.holds._pins.extend(registry.pin(&local, checked.scratch.local_windows())?);
            cut.push(requests);
        }
        let transfer = Transfer::new(cut.iter().map(Vec::len).sum());
        let mut jobs = Vec::with_capacity(parts.len());
        for (part, requests) in parts.iter().zip(cut) {
            let Some(session) = part.target.session() else { continue };
            let job = |(encoded, layout)| {
                Job::new(Arc::clone(&transfer), encoded, layout, part.op == Op::Write)
            };
            jobs.push((Arc::clone(session), requests.into_iter().map(job).collect()));
        }
        Ok((Planned { jobs, transfer, device }, summary))
    }

    fn check(&self, peer: &Peer, registry: &Registry, part: &Part<'_>) -> Result<Checked> {
        let (remote, local) = (part.target.table(), registry.table());
        let mut scratch = Scratch::default();
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

    /// How this side's bytes go.
    fn path(&self, device: usize, target: &Target) -> Result<Path> {
        let staging = &self.shared.staging;
        if staging.is_host(device) {
            return Ok(Path::Tcp);
        }
        let pool = staging.pool(device)?;
        let why_not = if !(pool.is_staged(Side::Send) && pool.is_staged(Side::Receive)) {
            Some(OFF.to_owned())
        } else if !pool.kernel() {
            Some(format!("there is no copy kernel: {}", staging.device(device).info().kernel))
        } else {
            None
        };
        match why_not {
            None => Ok(Path::TcpStaged),
            Some(reason) if self.strict => {
                let device = staging.device(device).info().to_string();
                Err(Error::NotStaged { device, peer: target.name().to_owned(), reason })
            }
            Some(_) if pool.is_staged(Side::Send) => Ok(Path::TcpStaged),
            Some(_) => Ok(Path::Tcp),
        }
    }

    fn cut(&self, part: &Part<'_>, checked: &Checked) -> Result<Vec<(wire::Encoded, Layout)>> {
        let most = checked.bytes.div_ceil(self.shared.lanes as u64).next_multiple_of(64 << 10);
        let mut cutter = Cutter {
            op: part.op,
            target: part.target,
            table: &checked.remote,
            home: match self.shared.staging.is_host(checked.device) {
                true => Home::Host,
                false => Home::Device(checked.device),
            },
            most: most.clamp(LEAST, MOST),
            progress_ms: self.shared.limits.progress_ms,
            at: usize::MAX,
            runs: Vec::new(),
            entries: Vec::new(),
            bytes: 0,
            done: Vec::new(),
        };
        match part.copies {
            Copies::Ranges(ranges) => ranges.iter().try_for_each(|range| cutter.add(*range))?,
            Copies::Strided(forms) => {
                forms.iter().flat_map(|form| form.pieces()).try_for_each(|it| cutter.add(it))?;
            }
            Copies::Paged(forms) => {
                let pieces = |form| -> FormPieces<'_> { crate::plan::Paged::pieces(form) };
                forms.iter().flat_map(pieces).try_for_each(|it| cutter.add(it))?;
            }
        }
        cutter.flush()?;
        Ok(cutter.done)
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

/// Cuts pieces into requests of at most so many bytes and ranges, each of regions of one device.
struct Cutter<'a> {
    op: Op,
    target: &'a Target,
    table: &'a RemoteTable,
    home: Home,
    most: u64,
    progress_ms: u32,
    /// The region of the last piece.
    at: usize,
    runs: Vec<Run>,
    /// Region, offset in it, bytes.
    entries: Vec<(usize, u64, u64)>,
    bytes: u64,
    done: Vec<(wire::Encoded, Layout)>,
}

impl Cutter<'_> {
    /// Adds a piece that is in bounds.
    fn add(&mut self, piece: Range) -> Result<()> {
        let Range { mut local, mut remote, mut len } = piece;
        while len > 0 {
            let region = self.region(remote)?;
            let offset = remote - region.addr;
            if self.bytes >= self.most || self.entries.len() >= RANGES {
                self.flush()?;
            }
            let share = len.min(region.len - offset).min(self.most - self.bytes);
            let goes_on = match (self.runs.last_mut(), self.entries.last_mut()) {
                (Some(Run::Piece { addr, len }), Some((at, start, bytes)))
                    if *addr + *len == local && *at == self.at && *start + *bytes == offset =>
                {
                    *len += share;
                    *bytes += share;
                    true
                }
                _ => false,
            };
            if !goes_on {
                self.runs.push(Run::Piece { addr: local, len: share });
                self.entries.push((self.at, offset, share));
            }
            self.bytes += share;
            (local, remote, len) = (local + share, remote + share, len - share);
        }
        Ok(())
    }

    /// The region that holds an address.
    fn region(&mut self, addr: u64) -> Result<crate::target::RemoteRegion> {
        if self.at < self.table.region_count() {
            let now = self.table.region(self.at);
            if addr.checked_sub(now.addr).is_some_and(|offset| offset < now.len) {
                return Ok(*now);
            }
        }
        let at = self.table.region_at(addr);
        let region = *self.table.region(at);
        if region.segment.is_none() {
            let peer = self.target.name().to_owned();
            return Err(Error::NotServed { peer, addr: region.addr });
        }
        if let Some(&(before, ..)) = self.entries.last()
            && self.table.device_of(self.table.region(before)) != self.table.device_of(&region)
        {
            self.flush()?;
        }
        self.at = at;
        Ok(region)
    }

    /// Ends the request that was begun, if one was.
    fn flush(&mut self) -> Result<()> {
        if self.entries.is_empty() {
            return Ok(());
        }
        let mut named: Vec<usize> = self.entries.iter().map(|(at, ..)| *at).collect();
        named.sort_unstable();
        named.dedup();
        let segments: Vec<_> =
            named.iter().filter_map(|&at| self.table.region(at).segment).collect();
        let op = match self.op {
            Op::Write => wire::Op::Write,
            Op::Read => wire::Op::Read,
        };
        let part = wire::Part::whole(0);
        let buffer = Vec::with_capacity(64 + segments.len() * 16 + self.entries.len() * 16);
        let mut encoder =
            Encoder::new(buffer, op, WireForm::Ranges, part, self.progress_ms, &segments);
        let mut last = (usize::MAX, 0);
        for &(at, offset, length) in &self.entries {
            if last.0 != at {
                last = (at, named.partition_point(|&it| it < at) as u32);
            }
            encoder.range(wire::Range { segment: last.1, offset, length });
        }
        let encoded = encoder.finish().map_err(|error| Error::Tcp {
            peer: self.target.name().to_owned(),
            reason: error.to_string(),
        })?;
        self.entries.clear();
        let (runs, length) = (std::mem::take(&mut self.runs), self.bytes);
        self.bytes = 0;
        self.done.push((encoded, Layout { runs, home: self.home, length, _pins: Vec::new() }));
        Ok(())
    }
}
