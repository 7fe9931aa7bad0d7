//! Whether two ranges of a list touch one byte, at least one of them writing: quickly for lists
//! that are good, exactly for the others.

use multiversion::multiversion;

use super::marking::marks_overlap;
use super::marks::Marks;
use super::{Extent, Op, Range, destination};
use crate::error::{RangeError, Side};

/// Whether a byte may be written twice: exact, except that it is `true` also where the tables would
/// be too large to be worth it.
pub(super) fn overlap_is_possible(
    op: Op,
    ranges: &[Range],
    extent: &Extent,
    memory: &mut Memory,
) -> bool {
    let Memory { table, marks, sorted } = memory;
    equally_long_overlap(op, ranges, extent, table)
        .or_else(|| marks_overlap(op, ranges, extent, marks))
        .or_else(|| sorted_overlap(op, ranges, extent, sorted))
        .unwrap_or(true)
}

/// Memory of the quick ways, kept from one list to the next.
#[derive(Debug, Default)]
pub(super) struct Memory {
    table: Vec<u8>,
    pub(super) marks: Marks,
    sorted: [Vec<u64>; 2],
}

/// A table with more buckets than this per range costs more than the bitmap.
const BUCKETS_PER_RANGE: u64 = 4;

/// For ranges that are equally long: notes in a table where in its bucket each destination begins.
/// A bucket is at most one and more than half a range wide, so two that begin in one bucket
/// overlap, and one reaches into the next two buckets at most. `None` for other lists.
fn equally_long_overlap(
    op: Op,
    ranges: &[Range],
    extent: &Extent,
    table: &mut Vec<u8>,
) -> Option<bool> {
    let (len, count) = (extent.longest, ranges.len() as u64);
    let equal = len > 0 && len.checked_mul(count) == Some(extent.bytes);
    // So that sums of three buckets and the count of places fit into 32 bits.
    if !equal || len >= 1 << 30 || count >= 1 << 28 {
        return None;
    }
    let shift = len.ilog2();
    let buckets = ((extent.high - extent.low) >> shift) + 1;
    if buckets > BUCKETS_PER_RANGE * count {
        return None;
    }
    table.clear();
    // Two more, so that each bucket has two behind it.
    table.resize((buckets as usize + 2) * 4, 0);
    let (places, _) = table.as_chunks_mut::<4>();
    match op {
        Op::Write => note_writes(ranges, extent.low, shift, places),
        Op::Read => note_reads(ranges, extent.low, shift, places),
    }
    Some(!places_are_apart(places, len as u32, count as u32))
}

#[multiversion(targets("x86_64+bmi1+bmi2"))]
fn note_writes(ranges: &[Range], low: u64, shift: u32, places: &mut [[u8; 4]]) {
    note::<true>(ranges, low, shift, places);
}

#[multiversion(targets("x86_64+bmi1+bmi2"))]
fn note_reads(ranges: &[Range], low: u64, shift: u32, places: &mut [[u8; 4]]) {
    note::<false>(ranges, low, shift, places);
}

/// Only stores, where a bitmap must load before: nothing waits for a cache.
#[inline(always)]
fn note<const WRITE: bool>(ranges: &[Range], low: u64, shift: u32, places: &mut [[u8; 4]]) {
    let inside = (1 << shift) - 1;
    for range in ranges {
        let offset = destination::<WRITE>(range) - low;
        // Zero is an empty bucket.
        places[(offset >> shift) as usize] = ((offset & inside) as u32 + 1).to_le_bytes();
    }
}

/// Whether as many buckets are used as there are ranges, and each range ends before those begin
/// that are noted in the two buckets behind its own.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn places_are_apart(places: &[[u8; 4]], len: u32, count: u32) -> bool {
    let width = 1 << len.ilog2();
    let (mut used, mut near) = (0u32, false);
    for ((here, next), third) in places.iter().zip(&places[1..]).zip(&places[2..]) {
        let [here, next, third] = [here, next, third].map(|place| u32::from_le_bytes(*place));
        used += u32::from(here > 0);
        near |= (here > 0) & (next > 0) & (next + width - here < len);
        near |= (here > 0) & (third > 0) & (third + 2 * width - here < len);
    }
    used == count && !near
}

/// Bits of a digit of [`sort`].
const DIGIT: u32 = 11;

/// For lists that are scattered over much more memory than they fill: sorts where destinations begin
/// and how long they are, in granules, and compares neighbours. `None` for what does not fit into 32
/// bits each.
fn sorted_overlap(
    op: Op,
    ranges: &[Range],
    extent: &Extent,
    memory: &mut [Vec<u64>; 2],
) -> Option<bool> {
    let granule = extent.union.trailing_zeros().min(63);
    let span = (extent.high - extent.low) >> granule;
    if span.max(ranges.len() as u64) > u32::MAX.into() {
        return None;
    }
    let [keys, spare] = memory;
    keys.clear();
    let filled = ranges.iter().filter(|range| range.len > 0);
    match op {
        Op::Write => keys.extend(filled.map(|range| key::<true>(range, extent.low, granule))),
        Op::Read => keys.extend(filled.map(|range| key::<false>(range, extent.low, granule))),
    }
    sort(keys, spare, u64::BITS - span.leading_zeros());
    let ends_behind = |pair: &[u64]| (pair[0] >> 32) + u64::from(pair[0] as u32) > pair[1] >> 32;
    Some(keys.windows(2).any(ends_behind))
}

/// First granule in the high half, granules in the low one.
fn key<const WRITE: bool>(range: &Range, low: u64, granule: u32) -> u64 {
    (destination::<WRITE>(range) - low) >> granule << 32 | range.len >> granule
}

/// Sorts by the lowest `bits` of the high half, a digit at a time from the lowest: each pass keeps
/// the order of the one before among equal digits. Several times quicker than comparing.
// Inside its caller it is a tenth slower: its loops need all registers.
#[inline(never)]
fn sort(keys: &mut Vec<u64>, spare: &mut Vec<u64>, bits: u32) {
    let digits = bits.div_ceil(DIGIT);
    let digit = |key: u64, at: u32| (key >> (32 + at * DIGIT)) as usize % (1 << DIGIT);
    spare.resize(keys.len(), 0);
    for at in 0..digits {
        let mut places = [0u32; 1 << DIGIT];
        for &key in &*keys {
            places[digit(key, at)] += 1;
        }
        let mut next = 0;
        for place in &mut places {
            (*place, next) = (next, next + *place);
        }
        for &key in &*keys {
            let place = &mut places[digit(key, at)];
            spare[*place as usize] = key;
            *place += 1;
        }
        std::mem::swap(keys, spare);
    }
}

/// The exact answer, by sorting: only for lists that the quick ways could not clear.
#[cold]
pub(super) fn find_overlap(op: Op, ranges: &[Range]) -> Result<(), RangeError> {
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
pub(super) fn find_overwritten_source(op: Op, ranges: &[Range]) -> Result<(), RangeError> {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Limits, Scratch, Window, check_bounds};
    use super::*;

    /// What the bitmap and the sorted list say, beginning with memory that holds anything.
    fn both_say(op: Op, ranges: &[Range], garbage: usize) -> bool {
        let limits = Limits { small_max_bytes: 1 << 20, tile_bytes: 1 << 20 };
        let all = [Window { start: 0, len: 1 << 62 }];
        let mut scratch = Scratch::default();
        let (_, extent) =
            check_bounds(op, ranges, &all, &all, &limits, &mut scratch).expect("inside the window");
        let mut sorted = [vec![u64::MAX; garbage], vec![7; garbage / 2]];
        let mut marks = Marks::default();
        if garbage > 0 {
            let other = super::super::tests::scattered(garbage);
            let (_, extent) = check_bounds(op, &other, &all, &all, &limits, &mut scratch)
                .expect("inside the window");
            assert_eq!(marks_overlap(op, &other, &extent, &mut marks), Some(false));
        }
        let bits = marks_overlap(op, ranges, &extent, &mut marks).expect("worth it");
        let sorted = sorted_overlap(op, ranges, &extent, &mut sorted).expect("of 32 bits");
        assert_eq!(bits, sorted, "{ranges:?}");
        bits
    }

    fn ranges(op: Op, destinations: &[(u64, u64)]) -> Vec<Range> {
        let range = |&(start, len)| match op {
            Op::Write => Range { local: 0, remote: start, len },
            Op::Read => Range { local: start, remote: 0, len },
        };
        destinations.iter().map(range).collect()
    }

    #[test]
    fn ranges_that_touch_are_apart_and_those_that_share_a_granule_are_not() {
        let cases: [(&[(u64, u64)], bool); 13] = [
            (&[(100, 1)], false),
            (&[(101, 1), (100, 1)], false),
            (&[(150, 100), (100, 50), (250, 7)], false),
            (&[(63, 1), (0, 63), (64, 64)], false),
            (&[(1000, 300), (0, 1000)], false),
            (&[(100, 1), (100, 1)], true),
            (&[(100, 1), (100, 1), (100, 1)], true),
            (&[(100, 50), (100, 9)], true),
            (&[(100, 50), (141, 9)], true),
            (&[(100, 50), (120, 9)], true),
            (&[(100, 50), (149, 9)], true),
            (&[(100, 64), (163, 64), (227, 64)], true),
            // As many odd granules as two of the three ranges have.
            (&[(100, 8), (100, 8), (200, 8)], true),
        ];
        for (destinations, expected) in cases {
            for (op, granule) in [(Op::Write, 1), (Op::Read, 64)] {
                let scaled: Vec<_> =
                    destinations.iter().map(|(at, len)| (at * granule, len * granule)).collect();
                let says = both_say(op, &ranges(op, &scaled), 0);
                assert_eq!(says, expected, "{destinations:?}");
            }
        }
    }

    #[test]
    fn empty_ranges_overlap_nothing_wherever_they_point() {
        let destinations = [(500, 0), (100, 50), (110, 0), (u64::MAX, 0), (150, 5), (0, 0)];
        assert!(!both_say(Op::Write, &ranges(Op::Write, &destinations), 0));
    }

    #[test]
    fn ranges_of_huge_alignment_are_compared() {
        let at = 1 << 60;
        let destinations = [(2 * at, at), (at, at)];
        assert!(!both_say(Op::Write, &ranges(Op::Write, &destinations), 0));
        let destinations = [(2 * at, at), (at, 2 * at)];
        assert!(both_say(Op::Write, &ranges(Op::Write, &destinations), 0));
    }

    proptest! {
        #[test]
        fn overlap_is_said_exactly_when_a_byte_is_written_twice(
            granule in prop_oneof![Just(1u64), Just(64), Just(12)],
            pieces in prop::collection::vec((
                prop_oneof![Just(0u64), 0..4u64, 0..20u64],
                prop_oneof![Just(0u64), Just(1), 1..64u64, 60..70u64, 1..300u64],
                any::<u32>(),
            ), 1..120),
            // How far a few ranges are moved from where they overlap nothing.
            moved in prop::collection::vec((any::<prop::sample::Index>(), -3..4i64), 0..3),
            twice in prop::option::of(any::<prop::sample::Index>()),
            garbage in 0..5000usize, write: bool,
        ) {
            let mut next = 1000;
            let mut pieces: Vec<_> = pieces.iter().map(|&(gap, len, order)| {
                let start = next + gap;
                next = start + len;
                (order, start, len)
            }).collect();
            pieces.sort_unstable();
            let mut destinations: Vec<_> =
                pieces.iter().map(|&(_, start, len)| (start * granule, len * granule)).collect();
            for (index, granules) in moved {
                let start = &mut index.get_mut(&mut destinations).0;
                *start = start.wrapping_add_signed(granules * granule as i64);
            }
            if let Some(index) = twice {
                let copy = *index.get(&destinations);
                destinations.push(copy);
            }
            prop_assume!(destinations.iter().any(|&(_, len)| len > 0));
            let brute = destinations.iter().enumerate().any(|(at, &(start, len))| {
                destinations[..at].iter().any(|&(other, other_len)| {
                    len > 0 && other_len > 0 && start < other + other_len && other < start + len
                })
            });
            let op = if write { Op::Write } else { Op::Read };
            let says = both_say(op, &ranges(op, &destinations), garbage);
            prop_assert_eq!(says, brute, "{:?}", destinations);
        }
    }
}
