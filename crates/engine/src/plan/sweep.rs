//! The quick check of plain lists: loops without branches that compilers turn into vectors.

use multiversion::multiversion;

use super::marking::{BLOCK, Marker, Room};
use super::marks::Marks;
use super::{Checked, Extent, Limits, Range, Window, destination};

/// Ranges of the shortest list whose destinations are marked on the way.
const FEWEST_TO_MARK: usize = 4 * BLOCK;

/// Checks a plain list; `None` if it is not one, for whatever reason. With `marks` it finds out
/// whether destinations overlap, too, if the list is long and scattered.
pub(super) fn sweep<const WRITE: bool>(
    ranges: &[Range],
    local: Window,
    remote: Window,
    limits: &Limits,
    mut marks: Option<&mut Marks>,
) -> Option<(Checked, Extent)> {
    let longest = limits.small_max_bytes.min(limits.tile_bytes);
    let first = ranges.first().map_or(0, destination::<WRITE>);
    let bounds = Bounds { local, remote, longest };
    let mut swept = Swept::new(first);
    let mut marker: Option<Marker<'_>> = None;
    let mut start = 0;
    for block in ranges.chunks(BLOCK) {
        sweep_block::<WRITE>(block, &mut swept, marker.as_mut());
        // Merging is worth while only where neighbours are common, so the first block tells. The
        // order matters as long as it ascends; a scattered list shows at once that it does not.
        if swept.descends >= 0 {
            // From the last of the block before, so that every pair of neighbours is seen.
            let with_last = &ranges[start - usize::from(start > 0)..start + block.len()];
            let joins = match WRITE {
                true => pairs_of_writes(with_last, &mut swept),
                false => pairs_of_reads(with_last, &mut swept),
            };
            if joins && start == 0 {
                return None;
            }
        }
        if !swept.is_within(&bounds) {
            return None;
        }
        if start == 0 && ranges.len() >= FEWEST_TO_MARK && swept.scattered(block.len()) {
            marker = marks.take().and_then(|marks| {
                Marker::new(ranges.len(), first, &swept.extent::<WRITE>(), marks)
            });
            if marker.is_some() {
                // Once more, for the marks alone.
                sweep_block::<WRITE>(block, &mut Swept::new(first), marker.as_mut());
            }
        }
        start += block.len();
    }
    let mut extent = swept.extent::<WRITE>();
    extent.overlap = marker.and_then(|marker| marker.finish(&extent));
    Some((Checked { bytes: extent.bytes, small: ranges.len(), large: 0, plain: true }, extent))
}

/// What every range of a plain list keeps to.
struct Bounds {
    local: Window,
    remote: Window,
    longest: u64,
}

/// What the loops gather. Addresses and lengths are signed: the least and the most of those are found
/// by every processor that has vectors.
#[derive(Debug)]
struct Swept {
    /// The first destination.
    first: u64,
    /// Negative: a range is empty, or ends beyond what a sign leaves room for.
    strange: i64,
    /// Negative: a destination begins before the end of the one before.
    descends: i64,
    union: u64,
    longest: i64,
    local: Span,
    remote: Span,
    bytes: u64,
}

/// The lowest and the highest address of one side.
#[derive(Clone, Copy, Debug)]
struct Span {
    low: i64,
    high: i64,
}

impl Span {
    const NOTHING: Self = Self { low: i64::MAX, high: 0 };

    /// Of a list that is not strange, and a window of which `sweep` saw that it is not.
    fn is_within(self, window: Window) -> bool {
        let (start, len) = (window.start as i64, window.len as i64);
        self.low >= start && self.high - start <= len
    }
}

impl Swept {
    fn new(first: u64) -> Self {
        let (local, remote) = (Span::NOTHING, Span::NOTHING);
        Self { first, strange: 0, descends: 0, union: 0, longest: 0, local, remote, bytes: 0 }
    }

    /// Whether every range so far keeps to the bounds. There is one.
    fn is_within(&self, bounds: &Bounds) -> bool {
        self.strange >= 0
            && self.longest as u64 <= bounds.longest
            && self.local.is_within(bounds.local)
            && self.remote.is_within(bounds.remote)
    }

    fn extent<const WRITE: bool>(&self) -> Extent {
        let Span { low, high } = if WRITE { self.remote } else { self.local };
        Extent {
            low: low as u64,
            high: high as u64,
            union: self.union,
            longest: self.longest as u64,
            bytes: self.bytes,
            ascending: self.descends >= 0,
            overlap: None,
        }
    }

    /// Neither in order nor equally long: there are quicker ways for such lists.
    fn scattered(&self, ranges: usize) -> bool {
        self.descends < 0 && self.bytes != self.longest as u64 * ranges as u64
    }
}

fn sweep_block<const WRITE: bool>(
    block: &[Range],
    swept: &mut Swept,
    marker: Option<&mut Marker<'_>>,
) {
    match (marker, WRITE) {
        (None, true) => sweep_writes(block, swept),
        (None, false) => sweep_reads(block, swept),
        (Some(marker), true) => {
            marker.mark(block.len(), |room| sweep_writes_into(block, swept, room))
        }
        (Some(marker), false) => {
            marker.mark(block.len(), |room| sweep_reads_into(block, swept, room))
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn sweep_writes(block: &[Range], swept: &mut Swept) {
    sweep_loop::<true>(block, swept, None);
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn sweep_reads(block: &[Range], swept: &mut Swept) {
    sweep_loop::<false>(block, swept, None);
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn sweep_writes_into(block: &[Range], swept: &mut Swept, room: Room<'_>) {
    sweep_loop::<true>(block, swept, Some(room));
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn sweep_reads_into(block: &[Range], swept: &mut Swept, room: Room<'_>) {
    sweep_loop::<false>(block, swept, Some(room));
}

/// With room for the ends of none or of all ranges.
#[inline(always)]
fn sweep_loop<const WRITE: bool>(block: &[Range], swept: &mut Swept, room: Option<Room<'_>>) {
    let &mut Swept { first, descends, .. } = swept;
    let Swept { mut strange, mut union, mut longest, mut local, mut remote, mut bytes, .. } =
        *swept;
    let mut sweep = |range: &Range| {
        let local_end = range.local.wrapping_add(range.len) as i64;
        let remote_end = range.remote.wrapping_add(range.len) as i64;
        // Where neither address nor length is negative, their sum is if it wraps. Whether an address
        // is, the lowest of them tells.
        strange |= range.len.wrapping_sub(1) as i64 | local_end | remote_end;
        local.low = local.low.min(range.local as i64);
        local.high = local.high.max(local_end);
        remote.low = remote.low.min(range.remote as i64);
        remote.high = remote.high.max(remote_end);
        union |= destination::<WRITE>(range).wrapping_sub(first) | range.len;
        longest = longest.max(range.len as i64);
        bytes = bytes.wrapping_add(range.len);
    };
    match room {
        None => block.iter().for_each(sweep),
        Some(Room { scale, ends }) => {
            for (range, ends) in block.iter().zip(ends) {
                sweep(range);
                *ends = scale.ends::<WRITE>(range);
            }
        }
    }
    *swept = Swept { first, strange, descends, union, longest, local, remote, bytes };
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn pairs_of_writes(ranges: &[Range], swept: &mut Swept) -> bool {
    sweep_pairs::<true>(ranges, swept)
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn pairs_of_reads(ranges: &[Range], swept: &mut Swept) -> bool {
    sweep_pairs::<false>(ranges, swept)
}

/// Notes whether destinations descend; returns whether any two neighbours could be merged.
#[inline(always)]
fn sweep_pairs<const WRITE: bool>(ranges: &[Range], swept: &mut Swept) -> bool {
    let (mut joins, mut descends) = (false, swept.descends);
    for pair in ranges.windows(2) {
        let (one, next) = (&pair[0], &pair[1]);
        let gap_here = next.local.wrapping_sub(one.local).wrapping_sub(one.len);
        let gap_there = next.remote.wrapping_sub(one.remote).wrapping_sub(one.len);
        joins |= gap_here | gap_there == 0;
        descends |= if WRITE { gap_there } else { gap_here } as i64;
    }
    swept.descends = descends;
    joins
}
