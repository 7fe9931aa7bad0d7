//! From parts of a batch to requests: checked, cut at regions and sizes, encoded.

use std::sync::Arc;

use kvferry_wire::batch::{self as wire, Encoder, Form as WireForm};
use kvferry_wire::segment::SegmentRef;

use super::Tcp;
use super::layout::{Grid as LocalGrid, Home, Layout, Run};
use super::session::Session;
use super::transfer::{Job, Transfer};
use crate::batch::{Holds, Path};
use crate::config::OverlapCheck;
use crate::error::{Error, Result};
use crate::plan::{
    Form, FormPieces, Grid, Limits, Op, Pages, PlacedForm, Range, Scratch, check_bounds,
    check_form_bounds, check_form_overlaps, check_overlaps,
};
use crate::registry::{Registry, Table};
use crate::request::{Copies, Part};
use crate::target::{RemoteRegion, RemoteTable, Target};
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
        if let Some(reason) = why_not {
            pool.fall_back(target.name(), &reason)?;
        }
        Ok(if pool.is_staged(Side::Send) { Path::TcpStaged } else { Path::Tcp })
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
            Copies::Strided(forms) => cutter.add_forms(forms, checked.scratch.forms())?,
            Copies::Paged(forms) => cutter.add_forms(forms, checked.scratch.forms())?,
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

    /// Adds forms that are in bounds, as forms where the peer can have them so.
    fn add_forms<F: Form>(&mut self, forms: &[F], placed: &[PlacedForm]) -> Result<()> {
        for placed in placed {
            let grid = forms[placed.form].grid();
            let region = self.region(placed.remote.low)?;
            let inside = placed.remote.len <= region.len - (placed.remote.low - region.addr);
            match grid.remote.addr.checked_sub(region.addr).filter(|_| inside) {
                Some(offset) if grid.rows <= u32::MAX.into() => {
                    self.flush()?;
                    self.add_grid(&grid, &region, offset)?;
                }
                // Pages before the first one of the region, or several regions.
                _ => FormPieces::of(grid).try_for_each(|piece| self.add(piece))?,
            }
        }
        Ok(())
    }

    /// Adds a form that lies in one region: in requests of whole pages or, of one page in one layer,
    /// of rows.
    fn add_grid(&mut self, grid: &Grid<'_>, region: &RemoteRegion, offset: u64) -> Result<()> {
        let pages = grid.local.numbers.len();
        let page_bytes = grid.len * grid.rows * grid.layers;
        let by_rows = pages == 1 && grid.layers == 1;
        let rows_at_once = if by_rows { (self.most / grid.len).max(1) } else { grid.rows };
        let pages_at_once = ((self.most / page_bytes) as usize).clamp(1, RANGES);
        for first_page in (0..pages).step_by(pages_at_once) {
            let chosen = first_page..pages.min(first_page + pages_at_once);
            let mut row = 0;
            while row < grid.rows {
                let rows = rows_at_once.min(grid.rows - row);
                let bytes = grid.len * rows * grid.layers * chosen.len() as u64;
                let skip = |end: &Pages<'_>| row.wrapping_mul(end.row_stride);
                let run = LocalGrid {
                    addr: grid.local.addr.wrapping_add(skip(&grid.local)),
                    len: grid.len,
                    rows: (grid.local.row_stride, rows),
                    layers: (grid.local.layer_stride, grid.layers),
                    page_stride: grid.local.page_stride,
                    pages: grid.local.numbers[chosen.clone()].to_vec(),
                };
                let remote = wire::Paged {
                    segment: 0,
                    offset: offset + skip(&grid.remote),
                    page_stride: grid.remote.page_stride,
                    layer_stride: grid.remote.layer_stride,
                    row_stride: grid.remote.row_stride,
                    row_bytes: grid.len,
                    layers: grid.layers as u32,
                    rows: rows as u32,
                };
                let names: Vec<_> = region.segment.into_iter().collect();
                let buffer = Vec::with_capacity(256 + chosen.len() * 4);
                let mut encoder = self.encoder(buffer, WireForm::Paged, &names);
                encoder.paged(remote, &grid.remote.numbers[chosen.clone()]);
                self.bytes = bytes;
                self.runs.push(Run::Grid(Box::new(run)));
                self.finish(encoder)?;
                row += rows;
            }
        }
        Ok(())
    }

    /// The region that holds an address.
    fn region(&mut self, addr: u64) -> Result<RemoteRegion> {
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
        let mut named: Vec<usize> = Vec::new();
        for &(at, ..) in &self.entries {
            if named.last() != Some(&at) {
                named.push(at);
            }
        }
        named.sort_unstable();
        named.dedup();
        let segments: Vec<_> =
            named.iter().filter_map(|&at| self.table.region(at).segment).collect();
        let buffer = Vec::with_capacity(64 + segments.len() * 16 + self.entries.len() * 16);
        let mut encoder = self.encoder(buffer, WireForm::Ranges, &segments);
        let mut last = (usize::MAX, 0);
        for &(at, offset, length) in &self.entries {
            if last.0 != at {
                last = (at, named.partition_point(|&it| it < at) as u32);
            }
            encoder.range(wire::Range { segment: last.1, offset, length });
        }
        self.entries.clear();
        self.finish(encoder)
    }

    fn encoder(&self, buffer: Vec<u8>, form: WireForm, segments: &[SegmentRef]) -> Encoder {
        let op = match self.op {
            Op::Write => wire::Op::Write,
            Op::Read => wire::Op::Read,
        };
        Encoder::new(buffer, op, form, wire::Part::whole(0), self.progress_ms, segments)
    }

    fn finish(&mut self, encoder: Encoder) -> Result<()> {
        let encoded = encoder.finish().map_err(|error| Error::Tcp {
            peer: self.target.name().to_owned(),
            reason: error.to_string(),
        })?;
        let (runs, length) = (std::mem::take(&mut self.runs), self.bytes);
        self.bytes = 0;
        self.done.push((encoded, Layout { runs, home: self.home, length, _pins: Vec::new() }));
        Ok(())
    }
}
