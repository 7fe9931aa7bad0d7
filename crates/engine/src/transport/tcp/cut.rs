//! From checked pieces to requests: cut at regions and sizes, encoded.
//!
//! A list of ranges is only divided where it is submitted. The lane that takes a share of it cuts and
//! encodes it, so that all lanes do that side by side and the first bytes leave early.

use std::sync::Arc;

use kvferry_wire::batch::{self as wire, Encoder, Form as WireForm};
use kvferry_wire::segment::SegmentRef;

use super::layout::{Grid as LocalGrid, Home, Layout, Run};
use super::transfer::Asked;
use crate::error::{Error, Result};
use crate::plan::{Form, FormPieces, Grid, Op, Pages, PlacedForm, Range};
use crate::target::{RemoteRegion, RemoteTable};

/// Ranges of one request. The wire's limit is 16,000, but each may lie in a segment of its own, and then
/// it takes 16 bytes twice of the 256 KiB that a frame has, with 48 bytes before them.
const RANGES: usize = 8190;

/// Bytes of one share, a whole number of the least: enough for a lane to be busy, few enough to share a
/// transfer among lanes, and whole extents.
const LEAST: u64 = 1 << 20;
const MOST: u64 = 16 << 20;

/// What all pieces of a part have in common.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) op: Op,
    /// The peer's name.
    pub(super) peer: String,
    pub(super) table: Arc<RemoteTable>,
    pub(super) home: Home,
    pub(super) progress_ms: u32,
}

/// Some ranges of a list, in bounds and not empty.
#[derive(Debug)]
pub(super) struct Share {
    order: Arc<Order>,
    ranges: Vec<Range>,
}

/// Bytes of the next request of so many that are left: large ones first, so that they are few, and
/// small ones last, so that the lanes end together. A transfer that is small for its lanes gives each
/// of them one.
pub(super) fn share_bytes(total: u64, left: u64, lanes: u64) -> u64 {
    let each = total.div_ceil(lanes).next_multiple_of(64 << 10);
    if each <= LEAST {
        return each;
    }
    (left / (2 * lanes)).next_multiple_of(LEAST).clamp(LEAST, MOST)
}

/// Divides a list that has `total` bytes.
pub(super) fn divide(
    order: &Arc<Order>,
    ranges: &[Range],
    total: u64,
    lanes: usize,
    mut give: impl FnMut(Share),
) {
    let lanes = lanes as u64;
    let (mut left, mut ranges) = (total, ranges.iter());
    // What the last share did not take of its last range.
    let mut rest = Range { local: 0, remote: 0, len: 0 };
    while left > 0 {
        let most = share_bytes(total, left, lanes);
        let expected = (ranges.len() as u64).saturating_mul(most) / left;
        let mut share = Vec::with_capacity((expected as usize + 2).min(RANGES));
        let mut room = most;
        while room > 0 && share.len() < RANGES {
            if rest.len == 0 {
                let Some(&next) = ranges.next() else { break };
                rest = next;
                continue;
            }
            let len = rest.len.min(room);
            share.push(Range { len, ..rest });
            rest =
                Range { local: rest.local + len, remote: rest.remote + len, len: rest.len - len };
            room -= len;
        }
        if share.is_empty() {
            return;
        }
        left = left.saturating_sub(most - room);
        give(Share { order: Arc::clone(order), ranges: share });
    }
}

/// Finds ranges, which are in bounds, that the peer lists and does not serve.
///
/// # Errors
/// [`Error::NotServed`].
pub(super) fn check_served(order: &Order, ranges: &[Range]) -> Result<()> {
    if order.table.serves_all() {
        return Ok(());
    }
    let mut scratch = Scratch::default();
    let mut cutter = Cutter::new(order, u64::MAX, &mut scratch);
    ranges.iter().try_for_each(|range| cutter.add(*range))
}

impl Share {
    /// The requests that it is: one, unless its ranges lie on several devices of the peer.
    ///
    /// # Errors
    /// As [`check_served`], and so none.
    pub(super) fn cut(self, scratch: &mut Scratch) -> Result<Vec<Asked>> {
        let mut cutter = Cutter::new(&self.order, u64::MAX, scratch);
        cutter.runs.reserve(self.ranges.len());
        self.ranges.iter().try_for_each(|range| cutter.add(*range))?;
        cutter.flush()?;
        Ok(cutter.done)
    }
}

/// Cuts forms of a part with so many bytes.
///
/// # Errors
/// [`Error::NotServed`].
pub(super) fn cut_forms<F: Form>(
    order: &Order,
    forms: &[F],
    placed: &[PlacedForm],
    total: u64,
    lanes: usize,
) -> Result<Vec<Asked>> {
    let mut scratch = Scratch::default();
    let most = share_bytes(total, total, lanes as u64);
    let mut cutter = Cutter::new(order, most, &mut scratch);
    cutter.add_forms(forms, placed)?;
    cutter.flush()?;
    Ok(cutter.done)
}

/// Memory that is used again for the next share.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Region, offset in it, bytes.
    entries: Vec<(usize, u64, u64)>,
    named: Vec<usize>,
    segments: Vec<SegmentRef>,
    /// For an encoded request.
    pub(super) buffer: Vec<u8>,
}

/// Cuts pieces into requests of at most so many bytes and ranges, each of regions of one device.
struct Cutter<'a> {
    order: &'a Order,
    most: u64,
    /// The region of the last piece.
    at: usize,
    region: RemoteRegion,
    runs: Vec<Run>,
    scratch: &'a mut Scratch,
    bytes: u64,
    done: Vec<Asked>,
}

impl<'a> Cutter<'a> {
    fn new(order: &'a Order, most: u64, scratch: &'a mut Scratch) -> Self {
        scratch.entries.clear();
        let region = RemoteRegion::NONE;
        let (runs, done) = (Vec::new(), Vec::with_capacity(1));
        Self { order, most, at: usize::MAX, region, runs, scratch, bytes: 0, done }
    }

    /// Adds a piece that is in bounds.
    fn add(&mut self, piece: Range) -> Result<()> {
        let Range { mut local, mut remote, mut len } = piece;
        while len > 0 {
            let offset = self.offset(remote)?;
            if self.bytes >= self.most || self.scratch.entries.len() >= RANGES {
                self.flush()?;
            }
            let share = len.min(self.region.len - offset).min(self.most - self.bytes);
            let goes_on = match (self.runs.last_mut(), self.scratch.entries.last_mut()) {
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
                self.scratch.entries.push((self.at, offset, share));
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
            self.offset(placed.remote.low)?;
            let region = self.region;
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
                self.scratch.segments.clear();
                self.scratch.segments.extend(region.segment);
                let mut encoder = self.encoder(256 + chosen.len() * 4, WireForm::Paged);
                encoder.paged(remote, &grid.remote.numbers[chosen.clone()]);
                self.bytes = bytes;
                self.runs.push(Run::Grid(Box::new(run)));
                self.finish(encoder)?;
                row += rows;
            }
        }
        Ok(())
    }

    /// Where an address lies in its region, which becomes the cutter's.
    #[inline]
    fn offset(&mut self, addr: u64) -> Result<u64> {
        match addr.checked_sub(self.region.addr).filter(|offset| *offset < self.region.len) {
            Some(offset) => Ok(offset),
            None => self.change_region(addr),
        }
    }

    fn change_region(&mut self, addr: u64) -> Result<u64> {
        let table = &self.order.table;
        let at = table.region_at(addr);
        let region = *table.region(at);
        if region.segment.is_none() {
            let peer = self.order.peer.clone();
            return Err(Error::NotServed { peer, addr: region.addr });
        }
        if let Some(&(before, ..)) = self.scratch.entries.last()
            && table.device_of(table.region(before)) != table.device_of(&region)
        {
            self.flush()?;
        }
        (self.at, self.region) = (at, region);
        Ok(addr - region.addr)
    }

    /// Ends the request that was begun, if one was.
    fn flush(&mut self) -> Result<()> {
        if self.scratch.entries.is_empty() {
            return Ok(());
        }
        let Scratch { entries, named, segments, .. } = &mut *self.scratch;
        named.clear();
        for &(at, ..) in entries.iter() {
            if named.last() != Some(&at) {
                named.push(at);
            }
        }
        named.sort_unstable();
        named.dedup();
        segments.clear();
        segments.extend(named.iter().filter_map(|&at| self.order.table.region(at).segment));
        let room = 64 + segments.len() * 16 + entries.len() * 16;
        let mut encoder = self.encoder(room, WireForm::Ranges);
        let Scratch { entries, named, .. } = &mut *self.scratch;
        let mut last = (usize::MAX, 0);
        for &(at, offset, length) in entries.iter() {
            if last.0 != at {
                last = (at, named.partition_point(|&it| it < at) as u32);
            }
            encoder.range(wire::Range { segment: last.1, offset, length });
        }
        entries.clear();
        self.finish(encoder)
    }

    /// Begins a request of about so many bytes that names the scratch's segments.
    fn encoder(&mut self, room: usize, form: WireForm) -> Encoder {
        let Order { op, progress_ms, .. } = *self.order;
        let op = match op {
            Op::Write => wire::Op::Write,
            Op::Read => wire::Op::Read,
        };
        let mut buffer = std::mem::take(&mut self.scratch.buffer);
        buffer.clear();
        buffer.reserve(room);
        let part = wire::Part::whole(0);
        Encoder::new(buffer, op, form, part, progress_ms, &self.scratch.segments)
    }

    fn finish(&mut self, encoder: Encoder) -> Result<()> {
        let encoded = encoder.finish().map_err(|error| Error::Tcp {
            peer: self.order.peer.clone(),
            reason: error.to_string(),
        })?;
        let (runs, length) = (std::mem::take(&mut self.runs), self.bytes);
        self.bytes = 0;
        let layout = Layout { runs, home: self.order.home, length, pins: Vec::new() };
        self.done.push(Asked { encoded, layout, is_write: self.order.op == Op::Write });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(total: u64, lanes: u64) -> Vec<u64> {
        let (mut left, mut found) = (total, Vec::new());
        while left > 0 {
            let bytes = share_bytes(total, left, lanes).min(left);
            left -= bytes;
            found.push(bytes);
        }
        found
    }

    #[test]
    fn shares_shrink_so_that_lanes_end_together() {
        let found = shares(64 << 20, 8);
        assert_eq!(found[0], 4 << 20);
        assert!(found.is_sorted_by(|before, after| before >= after), "{found:?}");
        assert!(found.iter().all(|bytes| bytes.is_multiple_of(LEAST)), "{found:?}");
        assert_eq!(found.last(), Some(&LEAST));
        assert!(found.len() < 40, "{}", found.len());
    }

    #[test]
    fn a_small_transfer_is_one_share_a_lane() {
        assert_eq!(shares(8_110_080, 8).len(), 8);
        assert_eq!(shares(1 << 20, 8).len(), 8);
        assert_eq!(shares(8 << 20, 8).len(), 8);
        assert_eq!(shares(10, 8).len(), 1);
    }

    #[test]
    fn a_list_is_divided_into_all_of_its_bytes_in_order() {
        let order = Arc::new(Order {
            op: Op::Write,
            peer: "peer".into(),
            table: Arc::default(),
            home: Home::Host,
            progress_ms: 0,
        });
        let mut ranges = vec![
            Range { local: 1, remote: 1 << 40, len: 40 << 20 },
            Range { local: 1 << 50, remote: 7, len: 0 },
        ];
        ranges.extend((0..20_000).map(|at| Range { local: at * 128, remote: at * 64, len: 64 }));
        let total = ranges.iter().map(|range| range.len).sum();
        let mut found: Vec<Range> = Vec::new();
        divide(&order, &ranges, total, 4, |share| {
            assert!((1..=RANGES).contains(&share.ranges.len()));
            for range in share.ranges {
                match found.last_mut() {
                    // What one share left of a range, and the next one has.
                    Some(last)
                        if last.local + last.len == range.local
                            && last.remote + last.len == range.remote =>
                    {
                        last.len += range.len;
                    }
                    _ => found.push(range),
                }
            }
        });
        ranges.retain(|range| range.len > 0);
        assert_eq!(found, ranges);
    }
}
