//! From ranges to pieces: bounds, overlaps, merging, and the split into small and large.
//!
//! [`check_bounds`] and [`check_overlaps`] decide whether all of a list may run; [`Pieces`] reads
//! it again while the device's ring is packed, so no copy of the list is ever made. All are on the
//! hot path: no allocation, lock or call per range. [`check_form_bounds`] and
//! [`check_form_overlaps`] do the same for compact forms, at a cost that their pieces do not count in.

mod apart;
mod form_checks;
mod forms;
mod marking;
mod marks;
mod overlap;
mod pieces;
mod strides;
mod sweep;

pub use form_checks::{
    CheckedForms, PlacedEnd, PlacedForm, check_form_bounds, check_form_overlaps,
};
pub use forms::{Form, FormPieces, Grid, Paged, Pages, Strided};
pub use pieces::{Pieces, Relocations, Want};
pub use strides::{SHORTEST_RUN, Strides, find_strides};

use kvferry_device::Destinations;

use crate::error::{RangeError, Side};
use apart::Proofs;
use overlap::{find_overlap, find_overwritten_source, overlap_is_possible};
use sweep::sweep;

/// One copy between this engine's memory and the target's, in bytes. Addresses are the owner's:
/// `remote` is an address of the target's process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Range {
    /// First byte here.
    pub local: u64,
    /// First byte there.
    pub remote: u64,
    /// Bytes; zero copies nothing, wherever it points.
    pub len: u64,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// From local to remote.
    Write,
    /// From remote to local.
    Read,
}

/// A run of registered bytes that a range may lie in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// First byte.
    pub start: u64,
    /// Bytes.
    pub len: u64,
}

/// What is small and what is large.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Pieces up to this many bytes are small.
    pub small_max_bytes: u64,
    /// Bytes that one descriptor of a small piece holds at most.
    pub tile_bytes: u64,
}

/// Memory that a check needs, kept from one batch to the next.
#[derive(Debug, Default)]
pub struct Scratch {
    overlap: overlap::Memory,
    /// Which windows a list uses: a bit each.
    touched_local: Vec<u64>,
    touched_remote: Vec<u64>,
    /// Where the forms of the last checked list lie.
    forms: Vec<PlacedForm>,
    proofs: Proofs,
}

impl Scratch {
    /// Windows of the local table that the last checked list uses.
    pub fn local_windows(&self) -> impl Iterator<Item = usize> {
        ones(&self.touched_local)
    }

    /// Windows of the remote table that the last checked list uses.
    pub fn remote_windows(&self) -> impl Iterator<Item = usize> {
        ones(&self.touched_remote)
    }

    /// Where the forms of the last checked list lie, in its order, without those that are empty.
    pub fn forms(&self) -> &[PlacedForm] {
        &self.forms
    }
}

/// What a checked list holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Bytes of all ranges.
    pub bytes: u64,
    /// Small pieces, after merging.
    pub small: usize,
    /// Large pieces, after merging.
    pub large: usize,
    /// The list is its own list of pieces: one window a side, nothing empty, nothing to merge or
    /// to split. Most lists are, and both passes are several times faster for them.
    pub plain: bool,
}

/// Checks that every range of the list lies inside a window at both ends. Windows are sorted and
/// do not overlap.
pub fn check_bounds(
    op: Op,
    ranges: &[Range],
    local: &[Window],
    remote: &[Window],
    limits: &Limits,
    scratch: &mut Scratch,
) -> Result<(Checked, Extent), RangeError> {
    check(op, ranges, local, remote, limits, false, scratch)
}

/// The same before [`check_overlaps`]: does as much of that as can be done on the way, where it
/// reads the list once.
pub fn check_bounds_and_mark(
    op: Op,
    ranges: &[Range],
    local: &[Window],
    remote: &[Window],
    limits: &Limits,
    scratch: &mut Scratch,
) -> Result<(Checked, Extent), RangeError> {
    check(op, ranges, local, remote, limits, true, scratch)
}

fn check(
    op: Op,
    ranges: &[Range],
    local: &[Window],
    remote: &[Window],
    limits: &Limits,
    mark: bool,
    scratch: &mut Scratch,
) -> Result<(Checked, Extent), RangeError> {
    reset(&mut scratch.touched_local, local.len());
    reset(&mut scratch.touched_remote, remote.len());
    match op {
        Op::Write => sweep_or_scan::<true>(ranges, local, remote, limits, mark, scratch),
        Op::Read => sweep_or_scan::<false>(ranges, local, remote, limits, mark, scratch),
    }
}

/// Checks that no byte of a list that is in bounds is written twice and, where both ends share an
/// address space, that no source is also a destination.
pub fn check_overlaps(
    op: Op,
    ranges: &[Range],
    extent: &Extent,
    one_space: bool,
    scratch: &mut Scratch,
) -> Result<(), RangeError> {
    let possible = match extent.overlap {
        _ if extent.ascending => false,
        Some(overlap) => overlap,
        None => overlap_is_possible(op, ranges, extent, &mut scratch.overlap),
    };
    if possible {
        find_overlap(op, ranges)?;
    }
    if one_space { find_overwritten_source(op, ranges) } else { Ok(()) }
}

/// Where the destinations of a list lie.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    low: u64,
    high: u64,
    /// Union of all lengths and of all offsets from the first destination: its low zero bits are
    /// the alignment that both ends of every destination share.
    union: u64,
    /// Bytes of the longest range.
    longest: u64,
    /// Bytes of all ranges.
    bytes: u64,
    /// Each destination begins at or behind the end of the one before.
    ascending: bool,
    /// A byte is in two of them, if that was found out with the bounds.
    overlap: Option<bool>,
}

impl Extent {
    /// The same of a plain list, for a device that finds out whether destinations overlap and sees
    /// them `shift` further on. None if that is known.
    pub fn destinations(&self, pieces: usize, shift: u64) -> Option<Destinations> {
        let known = self.ascending || self.overlap.is_some() || self.union == 0;
        (!known).then(|| Destinations {
            low: self.low.wrapping_add(shift),
            high: self.high.wrapping_add(shift),
            granule: 1 << self.union.trailing_zeros(),
            bytes: self.bytes,
            pieces: pieces as u64,
            verdict: None,
        })
    }
}

fn sweep_or_scan<const WRITE: bool>(
    ranges: &[Range],
    local: &[Window],
    remote: &[Window],
    limits: &Limits,
    mark: bool,
    scratch: &mut Scratch,
) -> Result<(Checked, Extent), RangeError> {
    let windows = plain_windows(ranges, local, remote, scratch);
    let marks = mark.then_some(&mut scratch.overlap.marks);
    let swept =
        windows.and_then(|(local, remote)| sweep::<WRITE>(ranges, local, remote, limits, marks));
    match swept {
        Some(plain) => Ok(plain),
        None => scan::<WRITE>(ranges, local, remote, limits, scratch),
    }
}

/// The windows of the first range, marked as touched: a plain list has no other.
fn plain_windows(
    ranges: &[Range],
    local: &[Window],
    remote: &[Window],
    scratch: &mut Scratch,
) -> Option<(Window, Window)> {
    let first = ranges.first().filter(|range| range.len > 0)?;
    let of = |windows: &[Window], addr: u64, touched: &mut [u64]| {
        let at = Lookup::new(windows).find(addr)?;
        touched[at / 64] |= 1 << (at % 64);
        Some(windows[at])
    };
    let local = of(local, first.local, &mut scratch.touched_local)?;
    Some((local, of(remote, first.remote, &mut scratch.touched_remote)?))
}

fn scan<const WRITE: bool>(
    ranges: &[Range],
    local: &[Window],
    remote: &[Window],
    limits: &Limits,
    scratch: &mut Scratch,
) -> Result<(Checked, Extent), RangeError> {
    let mut local = Lookup::new(local);
    let mut remote = Lookup::new(remote);
    let first = ranges.iter().find(|range| range.len > 0).map_or(0, destination::<WRITE>);
    let mut extent = Extent {
        low: first,
        high: first,
        union: 0,
        longest: 0,
        bytes: 0,
        ascending: true,
        overlap: None,
    };
    let mut checked = Checked::default();
    let mut run = 0;
    let mut end = Range::default();
    let mut end_windows = (usize::MAX, usize::MAX);
    let mut destination_end = 0;
    for (index, range) in ranges.iter().enumerate() {
        if range.len == 0 {
            continue;
        }
        if !local.holds(range.local, range.len) {
            local.turn(index, Side::Local, range.local, range.len, &mut scratch.touched_local)?;
        }
        if !remote.holds(range.remote, range.len) {
            remote.turn(
                index,
                Side::Remote,
                range.remote,
                range.len,
                &mut scratch.touched_remote,
            )?;
        }
        let windows = (local.at, remote.at);
        if range.local == end.local && range.remote == end.remote && windows == end_windows {
            run += range.len;
        } else {
            checked.count(run, limits);
            run = range.len;
            end_windows = windows;
        }
        // Inside a window, so neither sum overflows.
        end = Range { local: range.local + range.len, remote: range.remote + range.len, len: 0 };
        let start = destination::<WRITE>(range);
        extent.ascending &= start >= destination_end;
        destination_end = start + range.len;
        extent.union |= start.wrapping_sub(first) | range.len;
        extent.longest = extent.longest.max(range.len);
        extent.low = extent.low.min(start);
        extent.high = extent.high.max(destination_end);
        extent.bytes = extent.bytes.wrapping_add(range.len);
    }
    checked.count(run, limits);
    checked.bytes = extent.bytes;
    Ok((checked, extent))
}

impl Checked {
    #[inline]
    fn count(&mut self, run: u64, limits: &Limits) {
        let large = usize::from(run > limits.small_max_bytes);
        self.large += large;
        self.small += usize::from(run > 0) - large;
    }
}

#[inline]
fn destination<const WRITE: bool>(range: &Range) -> u64 {
    if WRITE { range.remote } else { range.local }
}

/// A place in a table of windows; most lists stay in one window for long.
#[derive(Clone, Debug)]
struct Lookup<'a> {
    windows: &'a [Window],
    at: usize,
    now: Window,
}

impl<'a> Lookup<'a> {
    fn new(windows: &'a [Window]) -> Self {
        Self { windows, at: usize::MAX, now: Window { start: 0, len: 0 } }
    }

    /// Whether the current window holds all of `[addr, addr + len)`. `len` is at least 1.
    #[inline]
    fn holds(&self, addr: u64, len: u64) -> bool {
        let offset = addr.wrapping_sub(self.now.start);
        offset < self.now.len && len <= self.now.len - offset
    }

    /// Moves to the window that holds the range, and marks it in `touched`.
    #[cold]
    #[inline(never)]
    fn turn(
        &mut self,
        index: usize,
        side: Side,
        addr: u64,
        len: u64,
        touched: &mut [u64],
    ) -> Result<(), RangeError> {
        if addr.checked_add(len).is_none() {
            return Err(RangeError::Overflow { index, side, addr, len });
        }
        let Some(at) = self.find(addr) else {
            return Err(RangeError::NotRegistered { index, side, addr, len });
        };
        let Window { start, len: region } = self.windows[at];
        if len > region - (addr - start) {
            let beyond = len - (region - (addr - start));
            return Err(RangeError::OutOfBounds { index, side, addr, len, start, region, beyond });
        }
        self.go(at);
        touched[at / 64] |= 1 << (at % 64);
        Ok(())
    }

    fn find(&self, addr: u64) -> Option<usize> {
        let at = self.windows.partition_point(|window| window.start <= addr).checked_sub(1)?;
        (addr - self.windows[at].start < self.windows[at].len).then_some(at)
    }

    fn go(&mut self, at: usize) {
        self.at = at;
        self.now = self.windows[at];
    }
}

/// Makes `bits` hold at least that many bits, all zero.
fn reset(bits: &mut Vec<u64>, count: usize) {
    bits.clear();
    bits.resize(count.div_ceil(64), 0);
}

/// The positions of the bits that are set, which are few.
fn ones(bits: &[u64]) -> impl Iterator<Item = usize> {
    let some = |word: u64| (word != 0).then_some(word);
    bits.iter().enumerate().flat_map(move |(at, &word)| {
        let rests = std::iter::successors(some(word), move |rest| some(rest & (rest - 1)));
        rests.map(move |rest| at * 64 + rest.trailing_zeros() as usize)
    })
}

#[cfg(test)]
mod tests;
