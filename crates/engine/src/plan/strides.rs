//! Strides in a list of ranges: what a caller sent piece by piece and could have sent as a form.

use multiversion::multiversion;

use super::{Range, Strided};

/// Ranges of the shortest run that counts: enough that what a run costs beyond a range, on the host
/// and in the kernel, is lost in its pieces. Not yet measured on a device.
pub const SHORTEST_RUN: usize = 64;

/// Ranges outside of runs, beyond as many as lie in runs, after which a list is given up.
const PATIENCE: usize = 256;

/// Neighbours that are compared at a time.
const BLOCK: usize = 256;

/// What [`find_strides`] found.
#[derive(Debug, Default)]
pub struct Strides {
    /// Runs of at least [`SHORTEST_RUN`] ranges, in the order of the list.
    pub runs: Vec<Strided>,
    /// Positions of the ranges that are in none, in the order of the list.
    pub rest: Vec<std::ops::Range<usize>>,
}

/// Finds the maximal runs of equally long ranges with constant strides at both ends, in a checked
/// list with one window a side. Runs that fall at both ends are turned around; those that fall at
/// one end only do not count.
///
/// Returns whether it is worth to send the list as `found` says: not if, in any beginning of the
/// list, more than 256 ranges are outside of runs beyond as many as are inside. Then the search
/// ends there, and `found` is empty.
pub fn find_strides(ranges: &[Range], found: &mut Strides) -> bool {
    let Strides { runs, rest } = found;
    runs.clear();
    rest.clear();
    let (mut at, mut rest_begins, mut outside) = (0, 0, 0);
    while at < ranges.len() {
        let (end, run) = next_part(&ranges[at..]);
        let end = at + end;
        match run {
            Some(run) => {
                if rest_begins < at {
                    rest.push(rest_begins..at);
                }
                runs.push(run);
                rest_begins = end;
            }
            None => {
                outside += end - at;
                if outside > PATIENCE + (end - outside) {
                    runs.clear();
                    rest.clear();
                    return false;
                }
            }
        }
        at = end;
    }
    if rest_begins < ranges.len() {
        rest.push(rest_begins..ranges.len());
    }
    !runs.is_empty()
}

/// How many of the next ranges are one run that counts, or are in none.
#[inline]
fn next_part(ranges: &[Range]) -> (usize, Option<Strided>) {
    // A run that counts and begins before these three holds all of them. Where neighbours are
    // random, one look passes over many.
    let probe = SHORTEST_RUN - 3;
    match ranges.get(probe..probe + 3) {
        None => return (ranges.len(), None),
        Some(three) if end_of_run(three) < 3 => return (probe + 1, None),
        Some(_) => {}
    }
    let end = end_of_run(ranges);
    match (end >= SHORTEST_RUN).then(|| as_strided(&ranges[..end])).flatten() {
        Some(run) => (end, Some(run)),
        None if end == ranges.len() => (end, None),
        // The last of these may be the first of a longer run.
        None => ((end - 1).max(1), None),
    }
}

/// How many ranges, from the first on, are equally long and equally far from each other.
#[inline]
fn end_of_run(ranges: &[Range]) -> usize {
    let [first, second, ..] = ranges else { return ranges.len() };
    if first.len != second.len {
        return 1;
    }
    let step = step(first, second);
    // Random neighbours differ at once, and a block is too much to see that.
    if ranges.get(2).is_none_or(|third| self::step(second, third) != step) {
        return 2;
    }
    // Ranges up to this one belong to the run.
    let mut last = 2;
    while let Some(block) = ranges.get(last..=last + BLOCK) {
        if !all_follow(block, step) {
            break;
        }
        last += BLOCK;
    }
    let follows = |pair: &&[Range]| self::step(&pair[0], &pair[1]) == step;
    last + 1 + ranges[last..].windows(2).take_while(follows).count()
}

/// From one range to the next: the differences of both addresses and of the lengths.
#[inline]
fn step(one: &Range, next: &Range) -> (u64, u64, u64) {
    (
        next.local.wrapping_sub(one.local),
        next.remote.wrapping_sub(one.remote),
        next.len.wrapping_sub(one.len),
    )
}

/// Whether each range is this step behind the one before.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn all_follow(ranges: &[Range], (local_stride, remote_stride, _): (u64, u64, u64)) -> bool {
    // What is expected is counted up, so that each range is loaded once: twice as fast as a
    // comparison of neighbours.
    let Some(&Range { mut local, mut remote, len }) = ranges.first() else { return true };
    let mut differ = 0;
    for range in ranges {
        differ |= (range.local ^ local) | (range.remote ^ remote) | (range.len ^ len);
        local = local.wrapping_add(local_stride);
        remote = remote.wrapping_add(remote_stride);
    }
    differ == 0
}

/// A run of at least two ranges, in the order in which it rises.
fn as_strided(run: &[Range]) -> Option<Strided> {
    let rising = |first: &Range, second: &Range| {
        let (local_stride, remote_stride, _) = step(first, second);
        (local_stride as i64 >= 0 && remote_stride as i64 >= 0).then_some(Strided {
            local: first.local,
            remote: first.remote,
            len: first.len,
            count: run.len() as u64,
            local_stride,
            remote_stride,
        })
    };
    let [first, second, .., before, last] = run else { return None };
    rising(first, second).or_else(|| rising(last, before))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn list(first: (u64, u64), len: u64, count: u64, steps: (i64, i64)) -> Vec<Range> {
        let at = |first: u64, step: i64, at: u64| first.wrapping_add_signed(step * at as i64);
        let range =
            |n| Range { local: at(first.0, steps.0, n), remote: at(first.1, steps.1, n), len };
        (0..count).map(range).collect()
    }

    fn find(ranges: &[Range]) -> (bool, Strides) {
        let mut found = Strides::default();
        (find_strides(ranges, &mut found), found)
    }

    fn all_pieces(ranges: &[Range], found: &Strides) -> Vec<(u64, u64, u64)> {
        let rest = found.rest.iter().flat_map(|part| ranges[part.clone()].to_vec());
        let runs = found.runs.iter().flat_map(Strided::pieces);
        let mut pieces: Vec<_> =
            runs.chain(rest).map(|one| (one.local, one.remote, one.len)).collect();
        pieces.sort_unstable();
        pieces
    }

    #[test]
    fn a_strided_list_is_one_run_and_what_disturbs_it_is_left_over() {
        let one = list((100, 9000), 8, 1000, (64, 8));
        let (worth, found) = find(&one);
        let run = Strided {
            local: 100,
            remote: 9000,
            len: 8,
            count: 1000,
            local_stride: 64,
            remote_stride: 8,
        };
        assert!(worth);
        assert_eq!((found.runs, found.rest), (vec![run], vec![]));

        let mut two = one.clone();
        two[300].remote += 1;
        let (worth, found) = find(&two);
        assert!(worth);
        assert_eq!(found.runs.iter().map(|run| run.count).collect::<Vec<_>>(), [300, 699]);
        assert_eq!(found.rest, vec![300..301]);
    }

    #[test]
    fn a_run_begins_at_its_first_range_whatever_lies_before() {
        let odd = Range { local: 1, remote: 2, len: 8 };
        let (worth, found) = find(&[vec![odd], list((100, 9000), 8, 64, (64, 8))].concat());
        assert!(worth);
        assert_eq!((found.runs[0].local, found.runs[0].count), (100, 64));
        assert_eq!(found.rest, vec![0..1]);
        let (worth, _) = find(&list((100, 9000), 8, 63, (64, 8)));
        assert!(!worth, "too short to be worth it");
    }

    #[test]
    fn no_run_that_counts_is_passed_over_wherever_it_begins() {
        // Random neighbours, and runs too short to count.
        for short in [1, 2, 3, 5, 40] {
            let odd = |at: u64| {
                list((at * at * 4096, (1 << 40) + at * 37 % 101 * 4096), 8, short, (8, 16))
            };
            let before: Vec<Range> = (1..=200).flat_map(odd).take(200).collect();
            for count in 0..before.len() {
                let odd = before[before.len() - count..].to_vec();
                let (worth, found) = find(&[odd, list((100, 9000), 8, 64, (64, 8))].concat());
                assert!(worth, "{count} before in runs of {short}");
                assert_eq!((found.runs[0].local, found.runs[0].count), (100, 64));
                assert_eq!(found.rest.iter().cloned().flatten().count(), count);
            }
        }
    }

    #[test]
    fn a_falling_run_is_turned_around_and_one_that_falls_on_one_side_does_not_count() {
        let (worth, found) = find(&list((10_000, 90_000), 8, 100, (-64, -8)));
        assert!(worth);
        let (last_local, last_remote) = (10_000 - 99 * 64, 90_000 - 99 * 8);
        assert_eq!(
            found.runs,
            [Strided {
                local: last_local,
                remote: last_remote,
                len: 8,
                count: 100,
                local_stride: 64,
                remote_stride: 8
            }]
        );
        assert!(!find(&list((10_000, 90_000), 8, 100, (-64, 8))).0);
    }

    #[test]
    fn a_list_without_runs_is_given_up_with_nothing_found() {
        // Layers of pages: 61 of each, then a jump.
        let page = |at: u64| list(((at * 37 % 64) << 20, at << 20), 2112, 61, (4096, 4096));
        let pages: Vec<Range> = (0..64).flat_map(page).collect();
        let late = [pages, list((1 << 40, 1 << 41), 8, 1000, (64, 8))].concat();
        let (worth, found) = find(&late);
        assert!(!worth);
        assert!(found.runs.is_empty() && found.rest.is_empty());
    }

    proptest! {
        #[test]
        fn runs_and_rest_are_exactly_the_pieces_of_the_list(
            parts in prop::collection::vec((
                (100_000..100_003u64, 200_000..200_003u64), 1..3u64,
                prop_oneof![1..5u64, 60..70u64, 120..300u64], (-2..3i64, -2..3i64),
            ), 0..8),
        ) {
            let ranges: Vec<Range> = parts.iter()
                .flat_map(|&(first, len, count, steps)| list(first, len, count, steps)).collect();
            let (worth, found) = find(&ranges);
            if !worth {
                prop_assert!(found.runs.is_empty());
                return Ok(());
            }
            prop_assert!(found.runs.iter().all(|run| run.count >= SHORTEST_RUN as u64));
            let mut expected: Vec<_> = ranges.iter().map(|one| (one.local, one.remote, one.len)).collect();
            expected.sort_unstable();
            prop_assert_eq!(all_pieces(&ranges, &found), expected);
        }
    }
}
