//! Marks where the destinations of a list begin and end, to tell whether two of them overlap: of a
//! list whose bounds are known, or while they are checked, so that its ranges are read once.

use multiversion::multiversion;

use super::marks::{Ends, Marks, Scale, WORD};
use super::{Extent, Op, Range};

/// A bitmap with more words than this per range costs more than sorting, except a small one.
const WORDS_PER_RANGE: usize = 2;

/// Words of a small one: 8 KiB.
const FEW_WORDS: usize = 1024;

/// Ranges whose ends are marked at a time, so that they stay in the first-level cache.
pub(super) const BLOCK: usize = 512;

/// Bits that a number of granules is shifted by: the common alignment of all that is in a union.
fn granule_of(union: u64) -> u32 {
    union.trailing_zeros().min(u64::BITS - 1)
}

/// Words of the largest bitmap that is worth it.
fn most_words(ranges: usize) -> usize {
    FEW_WORDS.max(ranges.saturating_mul(WORDS_PER_RANGE))
}

/// Whether a byte is written twice. `None` when the bitmap would be too large to be worth it.
pub(super) fn marks_overlap(
    op: Op,
    ranges: &[Range],
    extent: &Extent,
    marks: &mut Marks,
) -> Option<bool> {
    // Destinations are multiples of the granule away from each other, so from the lowest, too.
    let scale = Scale { base: extent.low, granule: granule_of(extent.union) };
    let granules = granules_of(extent, scale, ranges.len())?;
    marks.begin(most_words(ranges.len()).next_power_of_two());
    let mut room = [[0; 2]; BLOCK];
    for block in ranges.chunks(BLOCK) {
        let ends = &mut room[..block.len()];
        match op {
            Op::Write => ends_of_writes(block, scale, ends),
            Op::Read => ends_of_reads(block, scale, ends),
        }
        marks.flip(ends);
    }
    Some(written_twice(marks, granules, scale, extent))
}

/// The lowest granule, and the one behind the highest. `None` if so many are not worth it.
fn granules_of(extent: &Extent, scale: Scale, ranges: usize) -> Option<(u64, u64)> {
    let at = |addr: u64| addr.wrapping_sub(scale.base) >> scale.granule;
    let (low, high) = (at(extent.low), at(extent.high));
    let words = (high / WORD).checked_sub(low / WORD)? + 1;
    // So that the sum of all lengths is exact.
    let exact = extent.longest.checked_mul(ranges as u64).is_some();
    let worth = words <= most_words(ranges) as u64 && high <= u32::MAX.into();
    (worth && exact).then_some((low, high))
}

/// By the marks of all destinations.
fn written_twice(marks: &mut Marks, granules: (u64, u64), scale: Scale, extent: &Extent) -> bool {
    marks.count_odd(granules) != extent.bytes >> scale.granule
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn ends_of_writes(ranges: &[Range], scale: Scale, room: &mut [Ends]) {
    ranges.iter().zip(room).for_each(|(range, ends)| *ends = scale.ends::<true>(range));
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn ends_of_reads(ranges: &[Range], scale: Scale, room: &mut [Ends]) {
    ranges.iter().zip(room).for_each(|(range, ends)| *ends = scale.ends::<false>(range));
}

/// Marks the destinations of a list while its bounds are checked. What it needs to know of the list
/// it guesses from its first ranges; where that was wrong, it says nothing in the end.
#[derive(Debug)]
pub(super) struct Marker<'a> {
    scale: Scale,
    ranges: usize,
    marks: &'a mut Marks,
    ends: [Ends; BLOCK],
}

/// Room for the ends of more destinations, and how they are counted.
#[derive(Debug)]
pub(super) struct Room<'a> {
    pub(super) scale: Scale,
    pub(super) ends: &'a mut [Ends],
}

impl<'a> Marker<'a> {
    /// For a list of so many ranges, of which some first ones have this extent. `None` if the bitmap
    /// would be too large to be worth it.
    pub(super) fn new(
        ranges: usize,
        first: u64,
        extent: &Extent,
        marks: &'a mut Marks,
    ) -> Option<Self> {
        // The first destination in the middle of what 32 bits count.
        let granule = granule_of(extent.union).min(u32::BITS - 1);
        let scale = Scale { base: first.wrapping_sub(1 << (granule + u32::BITS - 1)), granule };
        granules_of(extent, scale, ranges)?;
        marks.begin(most_words(ranges).next_power_of_two());
        Some(Self { scale, ranges, marks, ends: [[0; 2]; BLOCK] })
    }

    /// Marks a block of destinations, whose ends `fill` finds.
    pub(super) fn mark(&mut self, count: usize, fill: impl FnOnce(Room<'_>)) {
        let ends = &mut self.ends[..count];
        fill(Room { scale: self.scale, ends });
        self.marks.flip(ends);
    }

    /// Whether a byte is written twice by a list of this extent. `None` if it is not as guessed.
    pub(super) fn finish(self, extent: &Extent) -> Option<bool> {
        let Self { scale, ranges, marks, .. } = self;
        let as_guessed = granule_of(extent.union) >= scale.granule;
        let granules = granules_of(extent, scale, ranges).filter(|_| as_guessed)?;
        Some(written_twice(marks, granules, scale, extent))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::overlap::find_overlap;
    use super::super::tests::scattered;
    use super::super::{Limits, Scratch, Window, check_bounds_and_mark, check_overlaps};
    use super::*;
    use crate::error::RangeError;

    /// What was found out with the bounds, and what both checks say in the end.
    fn check(op: Op, ranges: &[Range]) -> (Option<bool>, Result<(), RangeError>) {
        let limits = Limits { small_max_bytes: 1 << 20, tile_bytes: 1 << 20 };
        let windows = [Window { start: 0, len: 1 << 62 }];
        let mut scratch = Scratch::default();
        let bounds = check_bounds_and_mark(op, ranges, &windows, &windows, &limits, &mut scratch);
        let (_, extent) = bounds.expect("inside the window");
        (extent.overlap, check_overlaps(op, ranges, &extent, false, &mut scratch))
    }

    fn destination(op: Op, range: &mut Range) -> &mut u64 {
        match op {
            Op::Write => &mut range.remote,
            Op::Read => &mut range.local,
        }
    }

    #[test]
    fn a_long_scattered_list_is_marked_while_its_bounds_are_checked() {
        for op in [Op::Write, Op::Read] {
            let mut list = scattered(3000);
            assert_eq!(check(op, &list), (Some(false), Ok(())));
            // Behind the blocks that are guessed from, and in the one that is not whole.
            let other = *destination(op, &mut list[700]);
            *destination(op, &mut list[2999]) = other;
            let (overlap, error) = check(op, &list);
            assert_eq!(overlap, Some(true));
            let error = error.expect_err("a byte is written twice");
            let RangeError::DestinationsOverlap { first, second, addr, .. } = error else {
                panic!("{error}")
            };
            assert_eq!((first, second, addr), (700, 2999, other));
        }
    }

    #[test]
    fn a_list_that_is_not_as_its_first_ranges_is_checked_again() {
        let good = scattered(3000);
        for (at, shift) in [(2500, 1), (2500, 1 << 30), (513, 1 << 60)] {
            let mut list = good.clone();
            list[at].remote += shift;
            assert_eq!(check(Op::Write, &list), (None, Ok(())), "{at} by {shift}");
            list.push(Range { local: 1 << 50, ..list[at] });
            let (overlap, error) = check(Op::Write, &list);
            assert_eq!(overlap, None);
            assert!(
                matches!(error, Err(RangeError::DestinationsOverlap { first, second: 3000, .. })
                    if first == at),
                "{error:?}"
            );
        }
    }

    #[test]
    fn the_marks_of_one_list_are_not_seen_by_the_next() {
        let mut marks = Marks::default();
        let extent = |list: &[Range]| {
            let end = |range: &Range| range.remote + range.len;
            Extent {
                low: list.iter().map(|range| range.remote).min().unwrap(),
                high: list.iter().map(end).max().unwrap(),
                union: list[0].len,
                longest: list[0].len,
                bytes: list.iter().map(|range| range.len).sum(),
                ascending: false,
                overlap: None,
            }
        };
        for (first, len, count) in [(0, 64, 9000), (1 << 20, 64, 100), (64, 64, 5000), (0, 1, 64)] {
            let range = |at: u64| Range { local: 0, remote: first + at * 2 * len, len };
            let list: Vec<Range> = (0..count).map(range).collect();
            assert_eq!(marks_overlap(Op::Write, &list, &extent(&list), &mut marks), Some(false));
            // Given up in the middle, wherever its granules are.
            let guessed = Marker::new(list.len(), first + len, &extent(&list), &mut marks);
            let mut guessed = guessed.expect("worth it");
            guessed.mark(64, |Room { scale, ends }| ends_of_writes(&list[..64], scale, ends));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
        #[test]
        fn a_marked_list_is_refused_exactly_when_two_of_its_ranges_touch(
            count in 2048..5000usize, first in 0..1u64 << 40, granule in prop_oneof![Just(1u64), Just(8), Just(24)],
            moved in prop::collection::vec((any::<prop::sample::Index>(), -40..40i64), 0..4),
            write: bool,
        ) {
            let op = if write { Op::Write } else { Op::Read };
            let mut list = scattered(count);
            for range in &mut list {
                *destination(op, range) = first + *destination(op, range) / 16 * granule;
                range.len = range.len / 16 * granule;
            }
            for (index, granules) in moved {
                let start = destination(op, index.get_mut(&mut list));
                *start = start.wrapping_add_signed(granules * granule as i64);
            }
            let expected = find_overlap(op, &list);
            let (overlap, found) = check(op, &list);
            prop_assert_eq!(overlap, Some(expected.is_err()));
            prop_assert_eq!(found, expected);
        }
    }
}
