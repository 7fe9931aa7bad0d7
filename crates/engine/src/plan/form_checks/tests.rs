use std::collections::HashSet;

use proptest::prelude::*;

use super::super::forms::{Paged, Strided};
use super::*;

const LOCAL: [Window; 1] = [Window { start: 1000, len: 1000 }];
const REMOTE: [Window; 2] = [Window { start: 5000, len: 1000 }, Window { start: 6000, len: 1000 }];

fn strided(local: (u64, u64), remote: (u64, u64), len: u64, count: u64) -> Strided {
    let ((local, local_stride), (remote, remote_stride)) = (local, remote);
    Strided { local, remote, len, count, local_stride, remote_stride }
}

fn bounds<F: Form>(forms: &[F]) -> Result<CheckedForms, FormError> {
    check_form_bounds(forms, &LOCAL, &REMOTE, &mut Scratch::default())
}

/// In windows that hold all memory.
fn overlaps<F: Form>(op: Op, forms: &[F], one_space: bool) -> Result<(), FormError> {
    let all = [Window { start: 0, len: u64::MAX }];
    let mut scratch = Scratch::default();
    check_form_bounds(forms, &all, &all, &mut scratch)?;
    check_form_overlaps(op, forms, one_space, &mut scratch)
}

#[test]
fn a_strided_form_that_leaves_its_region_by_one_byte_is_refused_and_named() {
    let good = strided((1000, 100), (5000, 10), 10, 10);
    assert_eq!(bounds(&[good]), Ok(CheckedForms { bytes: 100, pieces: 10 }));
    for (bad, expected) in [
        (
            strided((1091, 100), (5000, 10), 10, 10),
            "form 1: local [0x443, 0x443 + 910) leaves the registered region [0x3e8, 0x3e8 + 1000) by 1 bytes: correct the form, or split it so that each part lies in one region",
        ),
        (
            strided((1000, 10), (5900, 10), 10, 11),
            "form 1: remote [0x170c, 0x170c + 110) leaves the registered region [0x1388, 0x1388 + 1000) by 10 bytes: correct the form, or split it so that each part lies in one region",
        ),
        (
            strided((999, 100), (5000, 10), 10, 2),
            "form 1: local address 0x3e7 is in no registered region: register it, or correct the form's address and numbers",
        ),
        (
            strided((1000, 10), (5000, 1 << 60), 10, 17),
            "form 1: remote address 0x1388 and its strides pass the end of the address space: correct the form's counts and strides",
        ),
    ] {
        assert_eq!(bounds(&[good, bad]).expect_err("bad").to_string(), expected);
    }
    let shared = strided((1000, 0), (5000, 0), 1000, u64::MAX);
    let error = bounds(&[good, shared]).expect_err("too many bytes to count");
    assert_eq!(error, FormError::TooLarge { form: 1 });
    let largest = strided((1000, 0), (5000, 0), 1, u64::MAX);
    assert_eq!(bounds(&[largest, good]), Err(FormError::TooLarge { form: 1 }));
}

#[test]
fn a_page_outside_its_region_is_named_with_its_position() {
    fn form<'a>(local: &'a [u32], remote: &'a [u32]) -> [Paged<'a>; 1] {
        let local = Pages::whole(1000, local, 100, 10);
        let remote = Pages::whole(4800, remote, 100, 10);
        [Paged::whole_pages(local, remote, 10, 10)]
    }
    // Page 0 of the remote end would lie outside; only named pages count.
    assert_eq!(bounds(&form(&[0, 9, 3], &[2, 11, 5])), Ok(CheckedForms { bytes: 300, pieces: 30 }));
    for (local, remote, expected) in [
        (
            [0, 10, 3],
            [2, 3, 4],
            "form 0: local [0x3e8, 0x3e8 + 1100) (page 10, at position 1 of the list) leaves the registered region [0x3e8, 0x3e8 + 1000) by 100 bytes: correct the form, or split it so that each part lies in one region",
        ),
        (
            [0, 1, 2],
            [7, 3, 1],
            "form 0: remote address 0x1324 (page 1, at position 2 of the list) is in no registered region: register it, or correct the form's address and numbers",
        ),
    ] {
        let error = bounds(&form(&local, &remote)).expect_err("outside");
        assert_eq!(error.to_string(), expected);
    }
    assert_eq!(
        bounds(&form(&[1, 2], &[2])),
        Err(FormError::PageCounts { form: 0, local: 2, remote: 1 })
    );
    let far = Pages::whole(1000, &[7, u32::MAX], u64::MAX / 4, 0);
    let [near] = form(&[1, 2], &[2, 3]);
    assert_eq!(
        bounds(&[Paged { remote: far, ..near }]),
        Err(FormError::Overflow {
            form: 0,
            side: Side::Remote,
            addr: 1000,
            page: Some(FormPage { number: u32::MAX, position: 1 })
        })
    );
}

#[test]
fn empty_forms_are_dropped_wherever_they_point() {
    let nowhere = strided((u64::MAX, u64::MAX), (u64::MAX, 7), 10, 0);
    assert_eq!(
        bounds(&[nowhere, Strided { len: 0, count: 9, ..nowhere }]),
        Ok(CheckedForms::default())
    );
    let end = |numbers| Pages::whole(u64::MAX, numbers, u64::MAX, u64::MAX);
    let paged = Paged::whole_pages(end(&[1, 2]), end(&[3, 4]), 2, 8);
    let none = [
        Paged { local: end(&[]), remote: end(&[]), ..paged },
        Paged { layers: 0, ..paged },
        Paged { rows: 0, ..paged },
        Paged { row_bytes: 0, ..paged },
    ];
    assert_eq!(bounds(&none), Ok(CheckedForms::default()));
    assert!(none.iter().all(|form| form.pieces().next().is_none()));
}

#[test]
fn checked_forms_say_which_windows_they_use() {
    let forms = [
        strided((1000, 0), (6000, 10), 10, 10),
        strided((0, 0), (0, 0), 0, 1),
        strided((1200, 0), (5000, 10), 10, 10),
    ];
    let mut scratch = Scratch::default();
    check_form_bounds(&forms, &LOCAL, &REMOTE, &mut scratch).expect("good forms");
    let used = |form: &PlacedForm| (form.form, form.local.window, form.remote.window);
    assert_eq!(scratch.forms().iter().map(used).collect::<Vec<_>>(), [(0, 0, 1), (2, 0, 0)]);
    assert_eq!(scratch.remote_windows().collect::<Vec<_>>(), [0, 1]);
    check_form_bounds(&forms[..1], &LOCAL, &REMOTE, &mut scratch).expect("good forms");
    assert_eq!(scratch.remote_windows().collect::<Vec<_>>(), [1]);
}

#[test]
fn two_pieces_that_write_one_byte_are_named() {
    let first = strided((0, 10), (1000, 30), 10, 10);
    let second = strided((500, 10), (2000, 30), 10, 10);
    let clash = Strided { remote: 1099, ..second };
    let page = |position: u64, row: u64| position * 2 + row;
    let ends = |numbers| {
        let remote = Pages { addr: 0, numbers, page_stride: 64, layer_stride: 0, row_stride: 32 };
        Paged { local: remote, remote, layers: 1, rows: 2, row_bytes: 8 }
    };
    let at = |form, piece| FormPiece { form, piece };
    let overlap = |first, second, side, addr| {
        Err(FormError::DestinationsOverlap { first, second, side, addr })
    };
    assert_eq!(overlaps(Op::Write, &[first, second], false), Ok(()));
    assert_eq!(
        overlaps(Op::Write, &[first, clash], false),
        overlap(at(0, 3), at(1, 0), Side::Remote, 1099)
    );
    assert_eq!(overlaps(Op::Read, &[first, clash], false), Ok(()));
    assert_eq!(
        overlaps(Op::Read, &[first, Strided { local_stride: 9, ..second }], false),
        overlap(at(1, 0), at(1, 1), Side::Local, 509)
    );
    let twice = overlaps(Op::Write, &[ends(&[5, 1, 7, 1])], false).expect_err("a page twice");
    assert_eq!(Err(twice), overlap(at(0, page(1, 0)), at(0, page(3, 0)), Side::Remote, 64));
    assert_eq!(
        overlaps(Op::Write, &[strided((0, 10), (95, 10), 10, 10)], true),
        Err(FormError::SourceOverwritten { reader: at(0, 9), writer: at(0, 0), addr: 95 })
    );
}

/// More than [`MOST_COMPARED`] pieces, so that only a proof clears them.
const MANY: u32 = 3 << 20;

fn assert_proved<F: Form>(forms: &[F], one_space: bool) {
    assert_eq!(overlaps(Op::Write, forms, one_space), Ok(()));
    assert_eq!(overlaps(Op::Read, forms, one_space), Ok(()));
}

#[test]
fn layouts_of_real_caches_are_cleared_without_a_look_at_their_pieces() {
    let numbers: Vec<u32> = (0..2048).map(|at: u32| at * 37 % 4096).collect();
    let others: Vec<u32> = (0..2048).map(|at: u32| at * 37 % 4096 + 4096).collect();
    let paged = |addr, numbers, page_stride, layer_stride| {
        let end = Pages { addr, numbers, page_stride, layer_stride, row_stride: 64 };
        Paged { local: end, remote: end, layers: 1000, rows: 3, row_bytes: 48 }
    };
    let gap = 1 << 40;
    // [layer][page], [page][layer], keys and values in one page, two lists of pages of one
    // cache, and both at once.
    assert_proved(&[paged(gap, &numbers, 256, 256 << 13)], false);
    assert_proved(&[paged(gap, &numbers, 256 << 10, 256)], false);
    let keys_and_values =
        |numbers| [paged(gap, numbers, 512, 512 << 13), paged(gap + 256, numbers, 512, 512 << 13)];
    assert_proved(&keys_and_values(&numbers), false);
    assert_proved(
        &[paged(gap, &numbers, 256, 256 << 13), paged(gap, &others, 256, 256 << 13)],
        false,
    );
    let all = [keys_and_values(&numbers), keys_and_values(&others)].concat();
    assert_proved(&all, false);
    // Pages that are counted in rows: [page][layer][row], keys and values one after the other in a
    // page, pages of another list between them.
    let in_rows = |numbers: &[u32]| numbers.iter().map(|it| it * 1000 + 7).collect::<Vec<_>>();
    let (rows, more_rows) = (in_rows(&numbers), in_rows(&others));
    assert_proved(&[paged(gap, &rows, 256, 256)], false);
    let in_rows =
        |numbers| [paged(gap, numbers, 512, 256), paged(gap + 256_000, numbers, 512, 256)];
    assert_proved(&in_rows(&rows), false);
    assert_proved(&[in_rows(&rows), in_rows(&more_rows)].concat(), false);
    // Inside one cache, from some pages to others.
    let mut moved = paged(gap, &numbers, 256 << 10, 256);
    moved.remote.numbers = &others;
    assert_proved(&[moved], true);
    // The columns of one matrix.
    let columns = (0..4).map(|at| strided((at * 64, 256), (gap + at * 64, 256), 64, MANY.into()));
    assert_proved(&columns.collect::<Vec<_>>(), true);
}

#[test]
fn what_no_proof_clears_is_compared_or_refused_with_the_way_out() {
    // A sheared grid: nothing overlaps, but no stride nests in the other.
    let sheared = |rows| {
        let end = Pages {
            addr: 0,
            numbers: &[0],
            page_stride: 0,
            layer_stride: 10 * u64::from(rows / 2) + 5,
            row_stride: 10,
        };
        [Paged { local: end, remote: end, layers: 2, rows, row_bytes: 5 }]
    };
    assert_eq!(overlaps(Op::Write, &sheared(1000), false), Ok(()));
    let error = overlaps(Op::Write, &sheared(MANY), false).expect_err("too many");
    assert_eq!(
        error.to_string(),
        "whether any of 6291456 pieces overlap is not seen from their strides, and more than 4194304 are not compared one by one: split the list, or set MC_KVFERRY_OVERLAP_CHECK=off"
    );
}

/// An owned form.
#[derive(Clone, Debug)]
struct Owned {
    numbers: [Vec<u32>; 2],
    /// Address and strides of page, layer and row of either end.
    ends: [(u64, u64, u64, u64); 2],
    counts: (u32, u32, u64),
}

impl Owned {
    fn paged(&self) -> Paged<'_> {
        let end = |at: usize| {
            let (addr, page_stride, layer_stride, row_stride) = self.ends[at];
            Pages { addr, numbers: &self.numbers[at], page_stride, layer_stride, row_stride }
        };
        let (layers, rows, row_bytes) = self.counts;
        Paged { local: end(0), remote: end(1), layers, rows, row_bytes }
    }

    /// First bytes of all pieces of one end, the slow way, in numbers that do not overflow.
    fn starts(&self, side: usize) -> Vec<u128> {
        let (addr, page, layer, row) = self.ends[side];
        let (layers, rows, row_bytes) = self.counts;
        let mut starts = Vec::new();
        for &number in &self.numbers[side] {
            for l in 0..u128::from(layers) {
                for r in (0..u128::from(rows)).filter(|_| row_bytes > 0) {
                    let page = u128::from(page) * u128::from(number);
                    starts.push(
                        u128::from(addr) + page + l * u128::from(layer) + r * u128::from(row),
                    );
                }
            }
        }
        starts
    }
}

/// Forms whose strides often nest and whose pieces often lie between each other.
fn forms(addr: std::ops::Range<u64>) -> impl Strategy<Value = Owned> {
    let stride =
        || prop_oneof![Just(0u64), Just(4), Just(6), Just(8), Just(16), Just(32), 0..70u64];
    let end = move || (addr.clone(), stride(), stride(), stride());
    let pair = (0..5u32, 0..5u32);
    let numbers = prop_oneof![
        prop::collection::vec(pair, 0..5),
        prop::sample::subsequence((0..8u32).collect::<Vec<_>>(), 0..6)
            .prop_shuffle()
            .prop_map(|list| list.iter().map(|&one| (one, 7 - one)).collect()),
    ];
    // Of numbers that are multiples the stride is a fraction of a page.
    let unit = prop_oneof![Just(1u32), 1..5u32];
    (numbers, unit, end(), end(), (0..4u32, 0..4u32, 0..9u64)).prop_map(
        |(numbers, unit, here, there, counts)| Owned {
            numbers: [
                numbers.iter().map(|pair| pair.0 * unit).collect(),
                numbers.iter().map(|pair| pair.1 * unit).collect(),
            ],
            ends: [here, there],
            counts,
        },
    )
}

/// The forms, of which those with equal page lists name the same.
fn paged(list: &[Owned]) -> Vec<Paged<'_>> {
    let named = |form: &Owned, side: usize| {
        let mut lists = list.iter().map(move |other| &other.numbers[side]);
        lists.find(|other| **other == form.numbers[side]).expect("it is in the list")
    };
    let form = |form| {
        let mut paged = Owned::paged(form);
        (paged.local.numbers, paged.remote.numbers) = (named(form, 0), named(form, 1));
        paged
    };
    list.iter().map(form).collect()
}

/// Lists that share the strides of their first form more often than not, and its pages every second time.
fn lists(addr: std::ops::Range<u64>) -> impl Strategy<Value = Vec<Owned>> {
    (prop::collection::vec(forms(addr), 1..5), 0..4u8).prop_map(|(mut list, alike)| {
        let (first, rest) = list.split_first_mut().expect("at least one");
        for form in rest.iter_mut().filter(|_| alike > 0) {
            for (end, first) in form.ends.iter_mut().zip(&first.ends) {
                *end = (end.0, first.1, first.2, first.3);
            }
            form.counts = first.counts;
            if alike > 1 {
                form.numbers = first.numbers.clone();
            }
        }
        list
    })
}

fn extremes() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        Just(1),
        Just(64),
        Just(1 << 31),
        Just(1 << 32),
        Just(1 << 62),
        Just(u64::MAX),
        any::<u64>()
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_form_expands_page_by_page_layer_by_layer_row_by_row(form in forms(0..50)) {
        let pieces: Vec<Range> = form.paged().pieces().collect();
        let starts = |side| form.starts(side).into_iter().map(|start| start as u64);
        let len = form.counts.2;
        let naive = starts(0).zip(starts(1)).map(|(local, remote)| Range { local, remote, len });
        prop_assert_eq!(pieces, naive.collect::<Vec<_>>());
    }

    #[test]
    fn a_form_is_in_bounds_exactly_when_one_window_holds_all_its_pieces(form in forms(0..200)) {
        let windows = [Window { start: 10, len: 150 }, Window { start: 160, len: 100 }, Window { start: 300, len: 90 }];
        let inside = |side| {
            let starts = form.starts(side);
            starts.is_empty() || windows.iter().any(|window| starts.iter().all(|&start| {
                start >= window.start.into()
                    && start + u128::from(form.counts.2) <= u128::from(window.start + window.len)
            }))
        };
        let found = check_form_bounds(&[form.paged()], &windows, &windows, &mut Scratch::default());
        prop_assert_eq!(found.is_ok(), inside(0) && inside(1), "{:?}", found);
        let pieces = form.starts(0).len() as u64;
        if let Ok(checked) = found {
            prop_assert_eq!(checked, CheckedForms { bytes: pieces * form.counts.2, pieces });
        }
    }

    #[test]
    fn overlap_is_found_exactly_when_a_byte_is_written_twice_or_also_read(
        list in lists(0..120), write: bool, one_space: bool,
    ) {
        let (op, to, from) = if write { (Op::Write, 1, 0) } else { (Op::Read, 0, 1) };
        let bytes = |side: usize| list.iter().flat_map(move |form| {
            form.starts(side).into_iter().flat_map(|start| start..start + u128::from(form.counts.2))
        });
        let mut written = HashSet::new();
        let clean = bytes(to).all(|byte| written.insert(byte))
            && !(one_space && bytes(from).any(|byte| written.contains(&byte)));
        let forms = paged(&list);
        // The same memory again, to see that it is left clean.
        let mut scratch = Scratch::default();
        let all = [Window { start: 0, len: u64::MAX }];
        for _ in 0..2 {
            check_form_bounds(&forms, &all, &all, &mut scratch).expect("all memory");
            let found = check_form_overlaps(op, &forms, one_space, &mut scratch);
            prop_assert_eq!(found.is_ok(), clean, "{:?}", found);
        }
        // A strided form is a paged one with one page of one layer.
        let strided: Vec<Strided> = forms.iter().map(|form| strided(
            (form.local.addr, form.local.row_stride), (form.remote.addr, form.remote.row_stride),
            form.row_bytes, form.rows.into(),
        )).collect();
        let as_pages: Vec<Paged<'_>> = strided.iter().zip(&forms).map(|(one, form)| Paged {
            local: Pages { numbers: &[0], ..form.local },
            remote: Pages { numbers: &[0], ..form.remote },
            layers: 1, rows: one.count as u32, row_bytes: one.len,
        }).collect();
        prop_assert_eq!(overlaps(op, &strided, one_space), overlaps(op, &as_pages, one_space));
    }

    #[test]
    fn numbers_of_any_size_never_panic(
        (here, there) in ((extremes(), extremes(), extremes(), extremes()), (extremes(), extremes(), extremes(), extremes())),
        numbers in prop::collection::vec(any::<u32>(), 0..4),
        counts in (extremes(), extremes(), extremes()), write: bool, one_space: bool,
    ) {
        let form = Owned {
            numbers: [numbers.clone(), numbers.iter().rev().copied().collect()],
            ends: [here, there],
            counts: (counts.0 as u32, counts.1 as u32, counts.2),
        };
        let strided = strided((here.0, here.1), (there.0, there.1), counts.0, counts.1);
        let op = if write { Op::Write } else { Op::Read };
        let _ = overlaps(op, &[form.paged(), form.paged()], one_space);
        let _ = overlaps(op, &[strided, strided], one_space);
    }
}
