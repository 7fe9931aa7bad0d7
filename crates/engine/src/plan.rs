//! From ranges to pieces: bounds, overlaps, merging, and the split into small and large.
//!
//! [`check`] reads the list once and decides whether all of it may run; [`Pieces`] reads it again
//! while the device's ring is packed, so no copy of the list is ever made. Both are on the hot
//! path: no allocation, lock or call per range.

use kvferry_device::{CopyDescriptor, CopySource};

use crate::error::{RangeError, Side};

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
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Pieces up to this many bytes are small.
    pub small_max_bytes: u64,
    /// Bytes that one descriptor of a small piece holds at most.
    pub tile_bytes: u64,
}

/// Memory that a check needs, kept from one batch to the next.
#[derive(Debug, Default)]
pub struct Scratch {
    /// One bit per granule of the destination.
    bitmap: Vec<u8>,
    /// Which windows a list uses: a bit each.
    touched_local: Vec<u64>,
    touched_remote: Vec<u64>,
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

/// Checks every range of the list: inside a window at both ends, no destination written twice,
/// and, where both ends share an address space, no source that is also a destination.
///
/// Windows are sorted and do not overlap.
pub fn check(
    op: Op,
    ranges: &[Range],
    local: &[Window],
    remote: &[Window],
    one_space: bool,
    limits: &Limits,
    scratch: &mut Scratch,
) -> Result<Checked, RangeError> {
    reset(&mut scratch.touched_local, local.len());
    reset(&mut scratch.touched_remote, remote.len());
    let (checked, extent) = match op {
        Op::Write => sweep_or_scan::<true>(ranges, local, remote, limits, scratch)?,
        Op::Read => sweep_or_scan::<false>(ranges, local, remote, limits, scratch)?,
    };
    if !extent.ascending && overlap_is_possible(op, ranges, &extent, &mut scratch.bitmap) {
        find_overlap(op, ranges)?;
    }
    if one_space {
        find_overwritten_source(op, ranges)?;
    }
    Ok(checked)
}

/// Where the destinations lie.
#[derive(Debug)]
struct Extent {
    low: u64,
    high: u64,
    /// Union of all lengths and of all offsets from the first destination: its low zero bits are
    /// the alignment that both ends of every destination share.
    union: u64,
    /// Each destination begins at or behind the end of the one before.
    ascending: bool,
}

fn sweep_or_scan<const WRITE: bool>(
    ranges: &[Range],
    local: &[Window],
    remote: &[Window],
    limits: &Limits,
    scratch: &mut Scratch,
) -> Result<(Checked, Extent), RangeError> {
    let windows = plain_windows(ranges, local, remote, scratch);
    match windows.and_then(|(local, remote)| sweep::<WRITE>(ranges, local, remote, limits)) {
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

/// Ranges that are swept together: their bytes stay in the first-level cache between the loops.
const BLOCK: usize = 512;

/// Checks a plain list; `None` if it is not one, for whatever reason.
fn sweep<const WRITE: bool>(
    ranges: &[Range],
    local: Window,
    remote: Window,
    limits: &Limits,
) -> Option<(Checked, Extent)> {
    let longest = limits.small_max_bytes.min(limits.tile_bytes);
    let first = ranges.first().map_or(0, destination::<WRITE>);
    // The loops tell less from greater by the sign of a difference.
    let halves = [local.start, local.len, remote.start, remote.len, longest];
    if halves.into_iter().any(|value| value > i64::MAX as u64) {
        return None;
    }
    let mut swept = Swept { low: i64::MAX, ..Swept::default() };
    let mut start = 0;
    for block in ranges.chunks(BLOCK) {
        // From the last of the block before, so that every pair of neighbours is seen.
        let with_last = &ranges[start - usize::from(start > 0)..start + block.len()];
        sweep_inside(block, local, remote, longest, &mut swept);
        match WRITE {
            true => sweep_writes(block, with_last, first, &mut swept),
            false => sweep_reads(block, with_last, first, &mut swept),
        }
        if swept.outside < 0 || swept.joins {
            return None;
        }
        start += block.len();
    }
    let Swept { union, low, high, descends, bytes, .. } = swept;
    let extent = Extent { low: low as u64, high: high as u64, union, ascending: descends >= 0 };
    Some((Checked { bytes, small: ranges.len(), large: 0, plain: true }, extent))
}

/// What the loops of [`sweep`] gather. Negative means yes where a field says so: a sign is or-ed
/// from a difference without a comparison, which not every processor has for vectors.
#[derive(Debug, Default)]
struct Swept {
    /// Negative: a range is empty, too long, or leaves its window.
    outside: i64,
    /// Negative: a destination begins before the end of the one before.
    descends: i64,
    joins: bool,
    union: u64,
    low: i64,
    high: i64,
    bytes: u64,
}

/// Or-s into `outside` the signs of everything that must not be negative. In this order no
/// difference wraps without one before it being negative.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn sweep_inside(block: &[Range], local: Window, remote: Window, longest: u64, swept: &mut Swept) {
    let mut outside = 0;
    for range in block {
        let here = range.local.wrapping_sub(local.start);
        let there = range.remote.wrapping_sub(remote.start);
        let (left_here, left_there) =
            (local.len.wrapping_sub(here), remote.len.wrapping_sub(there));
        outside |= range.len.wrapping_sub(1) | longest.wrapping_sub(range.len);
        outside |= here | left_here | left_here.wrapping_sub(range.len);
        outside |= there | left_there | left_there.wrapping_sub(range.len);
    }
    swept.outside |= outside as i64;
}

#[multiversion::multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn sweep_writes(block: &[Range], with_last: &[Range], first: u64, swept: &mut Swept) {
    sweep_extent::<true>(block, with_last, first, swept);
}

#[multiversion::multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn sweep_reads(block: &[Range], with_last: &[Range], first: u64, swept: &mut Swept) {
    sweep_extent::<false>(block, with_last, first, swept);
}

#[inline(always)]
fn sweep_extent<const WRITE: bool>(
    block: &[Range],
    with_last: &[Range],
    first: u64,
    swept: &mut Swept,
) {
    let Swept { mut descends, mut joins, mut union, mut low, mut high, mut bytes, .. } = *swept;
    for range in block {
        let start = destination::<WRITE>(range);
        union |= start.wrapping_sub(first) | range.len;
        low = low.min(start as i64);
        high = high.max(start.wrapping_add(range.len) as i64);
        bytes = bytes.wrapping_add(range.len);
    }
    for pair in with_last.windows(2) {
        let (one, next) = (&pair[0], &pair[1]);
        let gap_here = next.local.wrapping_sub(one.local).wrapping_sub(one.len);
        let gap_there = next.remote.wrapping_sub(one.remote).wrapping_sub(one.len);
        joins |= gap_here | gap_there == 0;
        descends |= if WRITE { gap_there } else { gap_here } as i64;
    }
    *swept = Swept { outside: swept.outside, descends, joins, union, low, high, bytes };
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
    let mut extent = Extent { low: first, high: first, union: 0, ascending: true };
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
        extent.low = extent.low.min(start);
        extent.high = extent.high.max(destination_end);
        checked.bytes = checked.bytes.wrapping_add(range.len);
    }
    checked.count(run, limits);
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

/// A bitmap with more words than this per range costs more than sorting.
const BITMAP_WORDS_PER_RANGE: u64 = 24;

/// Marks every destination in a bitmap whose granule is their common alignment, so that a bit set
/// twice is a byte written twice. `true` also when the bitmap would be too large to be worth it.
fn overlap_is_possible(op: Op, ranges: &[Range], extent: &Extent, bitmap: &mut Vec<u8>) -> bool {
    let granule = extent.union.trailing_zeros();
    // Destinations are multiples of the granule away from each other, so from the lowest, too.
    let words = ((extent.high - extent.low) >> granule).div_ceil(64);
    if words > BITMAP_WORDS_PER_RANGE * ranges.len() as u64 {
        return true;
    }
    // A word more, because a range is marked with eight bytes at whichever byte it begins.
    bitmap.clear();
    bitmap.resize(words as usize * 8 + 8, 0);
    match op {
        Op::Write => mark_writes(ranges, extent.low, granule, bitmap),
        Op::Read => mark_reads(ranges, extent.low, granule, bitmap),
    }
}

/// Bits that surely fit into eight bytes from the byte that the first one is in.
const QUICK_BITS: u64 = 57;

// Shifts by a variable are a third of the work and one instruction only with BMI2.
#[multiversion::multiversion(targets("x86_64+bmi1+bmi2"))]
fn mark_writes(ranges: &[Range], low: u64, granule: u32, bitmap: &mut [u8]) -> bool {
    mark::<true>(ranges, low, granule, bitmap)
}

#[multiversion::multiversion(targets("x86_64+bmi1+bmi2"))]
fn mark_reads(ranges: &[Range], low: u64, granule: u32, bitmap: &mut [u8]) -> bool {
    mark::<false>(ranges, low, granule, bitmap)
}

/// Returns whether a bit was set twice.
#[inline(always)]
fn mark<const WRITE: bool>(ranges: &[Range], low: u64, granule: u32, bitmap: &mut [u8]) -> bool {
    let mut twice = 0;
    for range in ranges {
        let mut first = destination::<WRITE>(range).wrapping_sub(low) >> granule;
        let mut count = range.len >> granule;
        if count == 0 {
            continue;
        }
        if count <= QUICK_BITS {
            twice |= mark_bits(bitmap, first / 8, first % 8, count);
            continue;
        }
        // Longer ones go from word to word: words that overlapped would be slow, since a load is
        // not served from a store in flight that holds only a part of it.
        while count > 0 {
            let now = count.min(64 - first % 64);
            twice |= mark_bits(bitmap, first / 64 * 8, first % 64, now);
            first += now;
            count -= now;
        }
    }
    twice != 0
}

/// Sets `count` bits, from bit `shift` of the eight bytes at `byte` on; returns those that were
/// set already.
#[inline(always)]
fn mark_bits(bitmap: &mut [u8], byte: u64, shift: u64, count: u64) -> u64 {
    let mask = (u64::MAX >> (64 - count)) << shift;
    let Some(place) = bitmap[byte as usize..].first_chunk_mut::<8>() else {
        unreachable!("the bitmap ends a word behind its last bit")
    };
    let before = u64::from_le_bytes(*place);
    *place = (before | mask).to_le_bytes();
    before & mask
}

/// The exact answer, by sorting: only for lists that the quick ways could not clear.
#[cold]
fn find_overlap(op: Op, ranges: &[Range]) -> Result<(), RangeError> {
    let (start, side): (fn(&Range) -> u64, _) = match op {
        Op::Write => (destination::<true>, Side::Remote),
        Op::Read => (destination::<false>, Side::Local),
    };
    let order = order_by(ranges, start);
    for pair in order.windows(2) {
        let (low, high) = (&ranges[pair[0]], &ranges[pair[1]]);
        if start(low) + low.len > start(high) {
            let (first, second) = (pair[0].min(pair[1]), pair[0].max(pair[1]));
            return Err(RangeError::DestinationsOverlap { first, second, side, addr: start(high) });
        }
    }
    Ok(())
}

/// Whether any range reads what a range writes; destinations are known not to overlap.
fn find_overwritten_source(op: Op, ranges: &[Range]) -> Result<(), RangeError> {
    let (local, remote) =
        (destination::<false> as fn(&Range) -> u64, destination::<true> as fn(&Range) -> u64);
    let (destination, source) = match op {
        Op::Write => (remote, local),
        Op::Read => (local, remote),
    };
    let low = |of: fn(&Range) -> u64| {
        ranges.iter().filter(|range| range.len > 0).map(of).min().unwrap_or(0)
    };
    let high = |of: fn(&Range) -> u64| {
        ranges
            .iter()
            .filter(|range| range.len > 0)
            .map(|range| of(range) + range.len)
            .max()
            .unwrap_or(0)
    };
    if high(source) <= low(destination) || high(destination) <= low(source) {
        return Ok(());
    }
    let writers = order_by(ranges, destination);
    for (reader, range) in ranges.iter().enumerate().filter(|(_, range)| range.len > 0) {
        let end = source(range) + range.len;
        // The last writer that begins before the source ends is the only one that can reach in:
        // writers do not overlap each other.
        let before = writers.partition_point(|&writer| destination(&ranges[writer]) < end);
        let Some(&writer) = writers[..before].last() else { continue };
        let written = &ranges[writer];
        if destination(written) + written.len > source(range) {
            let addr = source(range).max(destination(written));
            return Err(RangeError::SourceOverwritten { reader, writer, addr });
        }
    }
    Ok(())
}

/// Positions of the non-empty ranges, sorted by an address of theirs.
fn order_by(ranges: &[Range], addr: fn(&Range) -> u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..ranges.len()).filter(|&index| ranges[index].len > 0).collect();
    order.sort_unstable_by_key(|&index| addr(&ranges[index]));
    order
}

/// Makes `bits` hold at least that many bits, all zero.
fn reset(bits: &mut Vec<u64>, count: usize) {
    bits.clear();
    bits.resize(count.div_ceil(64), 0);
}

fn ones(bits: &[u64]) -> impl Iterator<Item = usize> {
    bits.iter().enumerate().flat_map(|(at, &word)| {
        (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| at * 64 + bit)
    })
}

/// Which pieces of a list to hand out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Those that the copy kernel takes.
    Small,
    /// Those that DMA takes.
    Large,
    /// All.
    All,
}

/// Hands out a checked list as descriptors of the executing device: merged, relocated, and split
/// into tiles.
#[derive(Debug)]
pub struct Pieces<'a> {
    op: Op,
    ranges: &'a [Range],
    next: usize,
    local: Lookup<'a>,
    remote: Lookup<'a>,
    /// Per remote window: what to add to an address of the target to get ours.
    relocations: &'a [u64],
    want: Want,
    plain: bool,
    small_max_bytes: u64,
    tile_bytes: u64,
    /// What is left of the piece that is being handed out.
    rest: CopyDescriptor,
}

impl<'a> Pieces<'a> {
    /// Of a list that [`check`] accepted with the same windows.
    #[expect(clippy::too_many_arguments, reason = "one call, and all of it is the list's")]
    pub fn new(
        op: Op,
        ranges: &'a [Range],
        local: &'a [Window],
        remote: &'a [Window],
        relocations: &'a [u64],
        want: Want,
        checked: &Checked,
        limits: &Limits,
    ) -> Self {
        Self {
            op,
            ranges,
            next: 0,
            local: Lookup::new(local),
            remote: Lookup::new(remote),
            relocations,
            want,
            plain: checked.plain && want != Want::Large,
            small_max_bytes: limits.small_max_bytes,
            tile_bytes: if want == Want::Small { limits.tile_bytes } else { u64::MAX },
            rest: CopyDescriptor::default(),
        }
    }

    /// Every range of a plain list is a piece.
    fn fill_plain(&mut self, slot: &mut [CopyDescriptor]) -> usize {
        let Some(first) = self.ranges.get(self.next) else { return 0 };
        if self.remote.at == usize::MAX {
            turn_checked(&mut self.remote, first.remote);
        }
        let relocation = self.relocations[self.remote.at];
        let ranges = &self.ranges[self.next..];
        let count = ranges.len().min(slot.len());
        let pairs = slot[..count].iter_mut().zip(&ranges[..count]);
        match self.op {
            Op::Write => pairs.for_each(|(place, &Range { local, remote, len })| {
                *place = CopyDescriptor { src: local, dst: remote.wrapping_add(relocation), len };
            }),
            Op::Read => pairs.for_each(|(place, &Range { local, remote, len })| {
                *place = CopyDescriptor { src: remote.wrapping_add(relocation), dst: local, len };
            }),
        }
        self.next += count;
        count
    }

    /// Takes the next piece into `rest`; `false` at the end of the list.
    #[inline]
    fn advance(&mut self) -> bool {
        while let Some(range) = self.ranges.get(self.next) {
            self.next += 1;
            if range.len == 0 {
                continue;
            }
            if !self.remote.holds(range.remote, range.len) {
                turn_checked(&mut self.remote, range.remote);
            }
            let mut len = range.len;
            while let Some(follower) = self.ranges.get(self.next) {
                let joins =
                    follower.local == range.local + len && follower.remote == range.remote + len;
                if follower.len > 0 && !(joins && self.one_window(range, len + follower.len)) {
                    break;
                }
                len += follower.len;
                self.next += 1;
            }
            let wanted = match self.want {
                Want::Small => len <= self.small_max_bytes,
                Want::Large => len > self.small_max_bytes,
                Want::All => true,
            };
            if wanted {
                let remote = range.remote.wrapping_add(self.relocations[self.remote.at]);
                let (src, dst) = match self.op {
                    Op::Write => (range.local, remote),
                    Op::Read => (remote, range.local),
                };
                self.rest = CopyDescriptor { src, dst, len };
                return true;
            }
        }
        false
    }

    /// Whether `len` bytes from the beginning of `range` stay in one window at both ends.
    fn one_window(&mut self, range: &Range, len: u64) -> bool {
        if !self.local.holds(range.local, range.len) {
            turn_checked(&mut self.local, range.local);
        }
        self.local.holds(range.local, len) && self.remote.holds(range.remote, len)
    }
}

/// Moves to the window of an address that was found there before.
#[cold]
#[inline(never)]
fn turn_checked(lookup: &mut Lookup<'_>, addr: u64) {
    let at = lookup.find(addr).expect("the list was checked against the same windows");
    lookup.go(at);
}

impl CopySource for Pieces<'_> {
    fn fill(&mut self, slot: &mut [CopyDescriptor]) -> usize {
        if self.plain {
            return self.fill_plain(slot);
        }
        let mut count = 0;
        for place in slot {
            if self.rest.len == 0 && !self.advance() {
                break;
            }
            let len = self.rest.len.min(self.tile_bytes);
            *place = CopyDescriptor { len, ..self.rest };
            self.rest.src += len;
            self.rest.dst += len;
            self.rest.len -= len;
            count += 1;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits { small_max_bytes: 1000, tile_bytes: 300 };

    fn all(windows: &[(u64, u64)]) -> Vec<Window> {
        windows.iter().map(|&(start, len)| Window { start, len }).collect()
    }

    fn ranges(list: &[(u64, u64, u64)]) -> Vec<Range> {
        list.iter().map(|&(local, remote, len)| Range { local, remote, len }).collect()
    }

    fn check_in(
        op: Op,
        list: &[Range],
        local: &[Window],
        remote: &[Window],
    ) -> Result<Checked, RangeError> {
        check(op, list, local, remote, false, &LIMITS, &mut Scratch::default())
    }

    fn pieces(
        list: &[Range],
        local: &[Window],
        remote: &[Window],
        want: Want,
    ) -> Vec<CopyDescriptor> {
        let relocations = vec![0; remote.len()];
        let checked = check_in(Op::Write, list, local, remote).expect("a good list");
        let mut source =
            Pieces::new(Op::Write, list, local, remote, &relocations, want, &checked, &LIMITS);
        let mut out = Vec::new();
        let mut slot = [CopyDescriptor::default(); 3];
        loop {
            let count = source.fill(&mut slot);
            out.extend_from_slice(&slot[..count]);
            if count == 0 {
                return out;
            }
        }
    }

    #[test]
    fn a_range_that_leaves_its_region_by_one_byte_is_refused_with_index_and_region() {
        let local = all(&[(1000, 100), (2000, 100)]);
        let remote = all(&[(5000, 1000)]);
        let good = (2000, 5000, 100);
        for (bad, expected) in [
            (
                (2000, 5000, 101),
                "range 1: local [0x7d0, 0x7d0 + 101) leaves the registered region [0x7d0, 0x7d0 + 100) by 1 bytes",
            ),
            ((1999, 5000, 2), "range 1: local address 0x7cf (2 bytes) is in no registered region"),
            (
                (1000, 5990, 11),
                "range 1: remote [0x1766, 0x1766 + 11) leaves the registered region [0x1388, 0x1388 + 1000) by 1 bytes",
            ),
            (
                (1000, 4999, 1),
                "range 1: remote address 0x1387 (1 bytes) is in no registered region",
            ),
            (
                (u64::MAX, 5000, 2),
                "range 1: local address 0xffffffffffffffff + 2 bytes passes the end of the address space",
            ),
            (
                (1050, u64::MAX - 5, u64::MAX),
                "range 1: local address 0x41a + 18446744073709551615 bytes passes the end of the address space",
            ),
        ] {
            let error = check_in(Op::Write, &ranges(&[good, bad]), &local, &remote)
                .expect_err("out of bounds");
            assert_eq!(error.to_string(), expected);
        }
    }

    #[test]
    fn zero_length_ranges_are_dropped_wherever_they_point() {
        let list =
            ranges(&[(0, 0, 0), (1000, 5000, 10), (u64::MAX, u64::MAX, 0), (1010, 5010, 10)]);
        let (local, remote) = (all(&[(1000, 100)]), all(&[(5000, 100)]));
        let checked = check_in(Op::Write, &list, &local, &remote).expect("fine");
        assert_eq!(checked, Checked { bytes: 20, small: 1, large: 0, plain: false });
        assert_eq!(
            pieces(&list, &local, &remote, Want::All),
            [CopyDescriptor { src: 1000, dst: 5000, len: 20 }]
        );
    }

    #[test]
    fn neighbours_merge_only_inside_one_window_at_both_ends() {
        let local = all(&[(1000, 100), (1100, 100)]);
        let remote = all(&[(5000, 1000)]);
        let list = ranges(&[(1000, 5000, 50), (1050, 5050, 50), (1100, 5100, 50)]);
        let checked = check_in(Op::Write, &list, &local, &remote).expect("fine");
        assert_eq!(checked.small, 2);
        assert_eq!(
            pieces(&list, &local, &remote, Want::All),
            [
                CopyDescriptor { src: 1000, dst: 5000, len: 100 },
                CopyDescriptor { src: 1100, dst: 5100, len: 50 },
            ]
        );
    }

    #[test]
    fn small_pieces_are_split_into_tiles_and_large_ones_are_not() {
        let (local, remote) = (all(&[(0, 10_000)]), all(&[(50_000, 10_000)]));
        let list = ranges(&[(0, 50_000, 700), (2000, 52_000, 1001)]);
        assert_eq!(
            check_in(Op::Write, &list, &local, &remote).map(|c| (c.small, c.large)),
            Ok((1, 1))
        );
        let lens = |want| {
            pieces(&list, &local, &remote, want).iter().map(|piece| piece.len).collect::<Vec<_>>()
        };
        assert_eq!(lens(Want::Small), [300, 300, 100]);
        assert_eq!(lens(Want::Large), [1001]);
    }

    #[test]
    fn two_writers_of_one_byte_are_named() {
        let (local, remote) = (all(&[(0, 10_000)]), all(&[(50_000, 10_000)]));
        let list = ranges(&[(0, 50_100, 64), (64, 50_000, 64), (128, 50_063, 64)]);
        assert_eq!(
            check_in(Op::Write, &list, &local, &remote),
            Err(RangeError::DestinationsOverlap {
                first: 1,
                second: 2,
                side: Side::Remote,
                addr: 50_063
            })
        );
        // Shared sources are fine.
        assert!(
            check_in(Op::Read, &ranges(&[(0, 50_000, 64), (64, 50_000, 64)]), &local, &remote)
                .is_ok()
        );
        assert!(
            check_in(Op::Read, &ranges(&[(64, 50_000, 64), (64, 50_100, 64)]), &local, &remote)
                .is_err()
        );
    }

    #[test]
    fn in_one_address_space_a_source_that_is_also_written_is_refused() {
        let windows = all(&[(0, 10_000)]);
        let list = ranges(&[(0, 2000, 100), (2050, 4000, 10)]);
        let one_space = |list: &[Range]| {
            check(Op::Write, list, &windows, &windows, true, &LIMITS, &mut Scratch::default())
        };
        assert_eq!(
            one_space(&list),
            Err(RangeError::SourceOverwritten { reader: 1, writer: 0, addr: 2050 })
        );
        assert_eq!(
            one_space(&ranges(&[(0, 100, 164)])),
            Err(RangeError::SourceOverwritten { reader: 0, writer: 0, addr: 100 })
        );
        assert!(one_space(&ranges(&[(0, 100, 100), (300, 200, 100)])).is_ok());
    }

    /// Ranges on a coarse grid, so that overlaps and neighbours are common.
    fn lists() -> impl Strategy<Value = (u64, Vec<(u64, u64, u64)>)> {
        let granules = prop_oneof![Just(1u64), Just(4), Just(132), Just(4096)];
        granules.prop_flat_map(|granule| {
            let range = (0u64..200, 0u64..200, 0u64..6);
            (Just(granule), prop::collection::vec(range, 0..60))
        })
    }

    proptest! {
        #[test]
        fn overlap_is_found_exactly_when_a_byte_is_written_twice((granule, list) in lists(), write: bool) {
            let span = 1000 * granule;
            let (local, remote) = (all(&[(7, span)]), all(&[(3 + span, span)]));
            let list: Vec<Range> = list.iter().map(|&(l, r, n)| Range {
                local: 7 + l * granule, remote: 3 + span + r * granule, len: n * granule,
            }).collect();
            let op = if write { Op::Write } else { Op::Read };
            let start = |range: &Range| if write { range.remote } else { range.local };
            let brute = list.iter().enumerate().any(|(i, a)| list[..i].iter().any(|b| {
                a.len > 0 && b.len > 0 && start(a) < start(b) + b.len && start(b) < start(a) + a.len
            }));
            let found = check_in(op, &list, &local, &remote);
            prop_assert_eq!(found.is_err(), brute, "{:?}", found);
        }

        #[test]
        fn a_plain_list_gets_the_same_answer_the_quick_way(
            list in prop::collection::vec((0u64..60, 0u64..60, 1u64..6), 1..40), write: bool,
        ) {
            let window = |start| Window { start, len: 60 * 8 };
            let list: Vec<Range> = list.iter().map(|&(l, r, n)| Range {
                local: 1000 + l * 8, remote: 9000 + r * 8, len: n * 8 - 3,
            }).collect();
            let quick = if write { sweep::<true> } else { sweep::<false> };
            let general = if write { scan::<true> } else { scan::<false> };
            let mut scratch = Scratch { touched_local: vec![0], touched_remote: vec![0], ..Scratch::default() };
            let exact = general(&list, &[window(1000)], &[window(9000)], &LIMITS, &mut scratch);
            let Some((checked, extent)) = quick(&list, window(1000), window(9000), &LIMITS) else { return Ok(()) };
            let (exact, exact_extent) = exact.expect("what is plain is good");
            prop_assert_eq!(checked, Checked { plain: true, ..exact });
            prop_assert_eq!(format!("{extent:?}"), format!("{exact_extent:?}"));
            let window = [window(1000), window(9000)];
            let drain = |checked: &Checked| {
                let op = if write { Op::Write } else { Op::Read };
                let mut source = Pieces::new(op, &list, &window[..1], &window[1..], &[77], Want::Small, checked, &LIMITS);
                let mut slot = [CopyDescriptor::default(); 7];
                let mut all = Vec::new();
                loop {
                    match source.fill(&mut slot) {
                        0 => break all,
                        count => all.extend_from_slice(&slot[..count]),
                    }
                }
            };
            prop_assert_eq!(drain(&checked), drain(&exact));
        }

        #[test]
        fn pieces_move_every_byte_of_every_range_exactly_once((granule, list) in lists()) {
            let span = 1000 * granule;
            // Several windows a side, some of them neighbours.
            let local = all(&[(0, span / 2), (span / 2, span), (span * 2, span)]);
            let remote = all(&[(span * 10, span / 4), (span * 10 + span / 4, span * 2)]);
            let mut next = 0;
            let list: Vec<Range> = list.iter().map(|&(l, _, n)| {
                let range = Range { local: l * granule, remote: span * 10 + next, len: n * granule };
                next += n * granule;
                range
            }).collect();
            let mut scratch = Scratch::default();
            let Ok(checked) = check(Op::Write, &list, &local, &remote, false, &LIMITS, &mut scratch) else { return Ok(()) };
            let relocations = [1 << 40, 1 << 41];
            let bytes = |want| {
                let mut source = Pieces::new(Op::Write, &list, &local, &remote, &relocations, want, &checked, &LIMITS);
                let mut slot = [CopyDescriptor::default(); 7];
                let mut bytes = Vec::new();
                loop {
                    let count = source.fill(&mut slot);
                    if count == 0 { return bytes; }
                    for piece in &slot[..count] {
                        bytes.extend((0..piece.len).map(|at| (piece.dst + at, piece.src + at)));
                    }
                }
            };
            let expected: Vec<_> = list.iter().flat_map(|range| (0..range.len).map(|at| {
                let remote = range.remote + at;
                let relocation = if range.remote < span * 10 + span / 4 { 1u64 << 40 } else { 1 << 41 };
                (remote + relocation, range.local + at)
            })).collect();
            prop_assert_eq!(&bytes(Want::All), &expected);
            let mut split = bytes(Want::Small);
            split.extend(bytes(Want::Large));
            split.sort_unstable();
            let mut sorted = expected.clone();
            sorted.sort_unstable();
            prop_assert_eq!(split, sorted);
            prop_assert_eq!(checked.bytes, expected.len() as u64);
        }
    }
}
