use kvferry_device::{CopyDescriptor, CopySource};
use proptest::prelude::*;

use super::*;

/// Ranges of several lengths with gaps, in a random order at both ends, on a grid of 16 bytes.
pub(super) fn scattered(count: usize) -> Vec<Range> {
    // A step that has no divisor with the count, so that it comes by every place.
    let step = (count * 5 / 8..).find(|step| gcd(*step, count) == 1).unwrap_or(1);
    let place = |at: usize| (at * step % count) as u64 * 256;
    let range = |at| Range {
        local: (1 << 20) + place(count - 1 - at),
        remote: (1 << 30) + place(at),
        len: 16 << (at % 4),
    };
    (0..count).map(range).collect()
}

fn gcd(one: usize, other: usize) -> usize {
    if other == 0 { one } else { gcd(other, one % other) }
}

const LIMITS: Limits = Limits { small_max_bytes: 1000, tile_bytes: 300 };

fn check(
    op: Op,
    ranges: &[Range],
    local: &[Window],
    remote: &[Window],
    one_space: bool,
) -> Result<Checked, RangeError> {
    let mut scratch = Scratch::default();
    let (checked, extent) = check_bounds(op, ranges, local, remote, &LIMITS, &mut scratch)?;
    check_overlaps(op, ranges, &extent, one_space, &mut scratch)?;
    Ok(checked)
}

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
    check(op, list, local, remote, false)
}

fn pieces(list: &[Range], local: &[Window], remote: &[Window], want: Want) -> Vec<CopyDescriptor> {
    let zero = vec![0; remote.len()];
    let relocations = Relocations { local: &[], remote: &zero };
    let checked = check_in(Op::Write, list, local, remote).expect("a good list");
    let mut source =
        Pieces::new(Op::Write, list, local, remote, relocations, want, &checked, &LIMITS);
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
        ((1000, 4999, 1), "range 1: remote address 0x1387 (1 bytes) is in no registered region"),
        (
            (u64::MAX, 5000, 2),
            "range 1: local address 0xffffffffffffffff + 2 bytes passes the end of the address space",
        ),
        (
            (1050, u64::MAX - 5, u64::MAX),
            "range 1: local address 0x41a + 18446744073709551615 bytes passes the end of the address space",
        ),
    ] {
        let error =
            check_in(Op::Write, &ranges(&[good, bad]), &local, &remote).expect_err("out of bounds");
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn zero_length_ranges_are_dropped_wherever_they_point() {
    let list = ranges(&[(0, 0, 0), (1000, 5000, 10), (u64::MAX, u64::MAX, 0), (1010, 5010, 10)]);
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
    assert_eq!(check_in(Op::Write, &list, &local, &remote).map(|c| (c.small, c.large)), Ok((1, 1)));
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
        check_in(Op::Read, &ranges(&[(0, 50_000, 64), (64, 50_000, 64)]), &local, &remote).is_ok()
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
    let one_space = |list: &[Range]| check(Op::Write, list, &windows, &windows, true);
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

#[test]
fn the_quick_way_takes_no_range_that_leaves_its_window() {
    let limits = Limits { small_max_bytes: u64::MAX >> 1, tile_bytes: u64::MAX >> 1 };
    // Around where windows begin and end, where numbers wrap, and where a sign appears.
    let middles = [0, 1000, 1480, (1 << 63) - 480, 1 << 63];
    let numbers: Vec<u64> = middles
        .iter()
        .flat_map(|middle: &u64| [-9, -1, 0, 1, 9].map(|by| middle.wrapping_add_signed(by)))
        .collect();
    let mut taken = 0;
    for start in [0, 1000, (1 << 63) - 480] {
        let window = Window { start, len: 480 };
        let good = Range { local: start + 7, remote: start + 5, len: 2 };
        let is_inside = |addr: u64, len| {
            addr >= start && addr.checked_add(len).is_some_and(|end| end <= start + 480)
        };
        for &local in &numbers {
            for &remote in &numbers {
                for &len in &numbers {
                    let list = [good, Range { local, remote, len }];
                    let inside = len > 0 && is_inside(local, len) && is_inside(remote, len);
                    let write = sweep::<true>(&list, window, window, &limits, None).is_some();
                    let read = sweep::<false>(&list, window, window, &limits, None).is_some();
                    assert!(inside || !(write || read), "{list:?} in {window:?}");
                    taken += usize::from(write && read);
                }
            }
        }
    }
    assert!(taken > 0);
}

proptest! {
    #[test]
    fn equally_long_ranges_overlap_exactly_when_a_byte_is_written_twice(
        len in 1u64..70, stride in 0u64..80, order in Just((0..24u64).collect::<Vec<_>>()).prop_shuffle(),
        shifts in prop::collection::vec(0u64..30, 24), jitter in 0u64..30, write: bool,
    ) {
        let (local, remote) = (all(&[(0, 10_000)]), all(&[(0, 10_000)]));
        let list: Vec<Range> = order.iter().zip(&shifts).map(|(at, shift)| {
            let start = 100 + at * (len.max(stride)) + shift % (jitter + 1);
            Range { local: start, remote: start, len }
        }).collect();
        let brute = list.iter().enumerate().any(|(i, a)| {
            list[..i].iter().any(|b| a.local < b.local + len && b.local < a.local + len)
        });
        let found = check_in(if write { Op::Write } else { Op::Read }, &list, &local, &remote);
        prop_assert_eq!(found.is_err(), brute, "{:?}", found);
    }

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
        list in prop::collection::vec((0u64..60, 0u64..60, 1u64..6), 1..40), write: bool, moved: bool,
    ) {
        let window = |start| Window { start, len: 60 * 8 };
        let list: Vec<Range> = list.iter().map(|&(l, r, n)| Range {
            local: 1000 + l * 8, remote: 9000 + r * 8, len: n * 8 - 3,
        }).collect();
        let sweep = |list: &[Range]| match write {
            true => sweep::<true>(list, window(1000), window(9000), &LIMITS, None),
            false => sweep::<false>(list, window(1000), window(9000), &LIMITS, None),
        };
        let general = if write { scan::<true> } else { scan::<false> };
        let mut scratch = Scratch { touched_local: vec![0], touched_remote: vec![0], ..Scratch::default() };
        let exact = general(&list, &[window(1000)], &[window(9000)], &LIMITS, &mut scratch);
        let Some((checked, extent)) = sweep(&list) else { return Ok(()) };
        let (exact, exact_extent) = exact.expect("what is plain is good");
        prop_assert_eq!(checked, Checked { plain: true, ..exact });
        prop_assert_eq!(format!("{extent:?}"), format!("{exact_extent:?}"));
        let window = [window(1000), window(9000)];
        let drain = |checked: &Checked| {
            let op = if write { Op::Write } else { Op::Read };
            let relocations = Relocations { local: if moved { &[55] } else { &[] }, remote: &[77] };
            let mut source = Pieces::new(op, &list, &window[..1], &window[1..], relocations, Want::Small, checked, &LIMITS);
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
    fn pieces_move_every_byte_of_every_range_exactly_once((granule, list) in lists(), moved: bool) {
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
        let Ok(checked) = check(Op::Write, &list, &local, &remote, false) else { return Ok(()) };
        // Where the device sees each window; it may own the local ones.
        let seen = [1 << 50, 1 << 51, 1 << 52];
        let relocations = Relocations {
            local: if moved { &seen } else { &[] },
            remote: &[1 << 40, 1 << 41],
        };
        let bytes = |want| {
            let mut source = Pieces::new(Op::Write, &list, &local, &remote, relocations, want, &checked, &LIMITS);
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
            let window = local.iter().rposition(|window| window.start <= range.local);
            let to_local = if moved { seen[window.expect("inside one")] } else { 0 };
            (remote + relocation, range.local + at + to_local)
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
