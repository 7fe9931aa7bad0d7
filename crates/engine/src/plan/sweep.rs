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
    // The loops tell less from greater by the sign of a difference.
    let halves = [local.start, local.len, remote.start, remote.len, longest];
    if halves.into_iter().any(|value| value > i64::MAX as u64) {
        return None;
    }
    let bounds = Bounds { local, remote, longest, first };
    let mut swept = Swept { low: i64::MAX, ..Swept::default() };
    let mut marker: Option<Marker<'_>> = None;
    let mut start = 0;
    for block in ranges.chunks(BLOCK) {
        sweep_block::<WRITE>(block, &bounds, &mut swept, marker.as_mut());
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
        if swept.outside < 0 {
            return None;
        }
        if start == 0 && ranges.len() >= FEWEST_TO_MARK && swept.scattered(block.len()) {
            marker = marks
                .take()
                .and_then(|marks| Marker::new(ranges.len(), first, &swept.extent(), marks));
            if marker.is_some() {
                // Once more, for the marks alone.
                sweep_block::<WRITE>(block, &bounds, &mut Swept::default(), marker.as_mut());
            }
        }
        start += block.len();
    }
    let mut extent = swept.extent();
    extent.overlap = marker.and_then(|marker| marker.finish(&extent));
    Some((Checked { bytes: extent.bytes, small: ranges.len(), large: 0, plain: true }, extent))
}

/// What every range of a plain list keeps to.
struct Bounds {
    local: Window,
    remote: Window,
    longest: u64,
    /// The first destination.
    first: u64,
}

/// What the loops gather. Negative means yes where a field says so: a sign is or-ed from a
/// difference without a comparison, which not every processor has for vectors.
#[derive(Debug, Default)]
struct Swept {
    /// Negative: a range is empty, too long, or leaves its window.
    outside: i64,
    /// Negative: a destination begins before the end of the one before.
    descends: i64,
    union: u64,
    longest: i64,
    low: i64,
    high: i64,
    bytes: u64,
}

impl Swept {
    fn extent(&self) -> Extent {
        let Self { union, longest, low, high, descends, bytes, .. } = *self;
        Extent {
            low: low as u64,
            high: high as u64,
            union,
            longest: longest as u64,
            bytes,
            ascending: descends >= 0,
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
    bounds: &Bounds,
    swept: &mut Swept,
    marker: Option<&mut Marker<'_>>,
) {
    match (marker, WRITE) {
        (None, true) => sweep_writes(block, bounds, swept),
        (None, false) => sweep_reads(block, bounds, swept),
        (Some(marker), true) => {
            marker.mark(block.len(), |room| sweep_writes_into(block, bounds, swept, room))
        }
        (Some(marker), false) => {
            marker.mark(block.len(), |room| sweep_reads_into(block, bounds, swept, room))
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn sweep_writes(block: &[Range], bounds: &Bounds, swept: &mut Swept) {
    sweep_loop::<true>(block, bounds, swept, None);
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn sweep_reads(block: &[Range], bounds: &Bounds, swept: &mut Swept) {
    sweep_loop::<false>(block, bounds, swept, None);
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn sweep_writes_into(block: &[Range], bounds: &Bounds, swept: &mut Swept, room: Room<'_>) {
    sweep_loop::<true>(block, bounds, swept, Some(room));
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn sweep_reads_into(block: &[Range], bounds: &Bounds, swept: &mut Swept, room: Room<'_>) {
    sweep_loop::<false>(block, bounds, swept, Some(room));
}

/// With room for the ends of none or of all ranges.
#[inline(always)]
fn sweep_loop<const WRITE: bool>(
    block: &[Range],
    bounds: &Bounds,
    swept: &mut Swept,
    room: Option<Room<'_>>,
) {
    let &Bounds { local, remote, longest: limit, first } = bounds;
    let Swept { descends, mut union, mut longest, mut low, mut high, mut bytes, .. } = *swept;
    let mut outside = 0;
    let mut sweep = |range: &Range| {
        let here = range.local.wrapping_sub(local.start);
        let there = range.remote.wrapping_sub(remote.start);
        let (left_here, left_there) =
            (local.len.wrapping_sub(here), remote.len.wrapping_sub(there));
        // In this order no difference wraps without one before it being negative.
        outside |= range.len.wrapping_sub(1) | limit.wrapping_sub(range.len);
        outside |= here | left_here | left_here.wrapping_sub(range.len);
        outside |= there | left_there | left_there.wrapping_sub(range.len);
        let start = destination::<WRITE>(range);
        union |= start.wrapping_sub(first) | range.len;
        longest = longest.max(range.len as i64);
        low = low.min(start as i64);
        high = high.max(start.wrapping_add(range.len) as i64);
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
    let outside = swept.outside | outside as i64;
    *swept = Swept { outside, descends, union, longest, low, high, bytes };
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
