//! Whether compact forms lie in bounds, and whether their pieces overlap: without expanding them,
//! where that can be told.

use multiversion::multiversion;

use super::apart::{Block, Dim, Numbers, common_step};
use super::forms::{Form, FormPieces, Grid, Pages};
use super::overlap::{Memory, find_overlap, find_overwritten_source, overlap_is_possible};
use super::{Extent, Lookup, Op, Range, Scratch, Window, destination, reset};
use crate::error::{FormError, FormPage, FormPiece, RangeError, Side};

/// Pieces that are compared one by one, at most, where strides alone do not show that none overlap:
/// 128 MiB of memory and less than a second.
const MOST_COMPARED: u64 = 4 << 20;

/// What a checked list of forms holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckedForms {
    /// Bytes of all pieces.
    pub bytes: u64,
    /// Pieces of all forms.
    pub pieces: u64,
}

/// Where a form lies that is not empty and in bounds.
#[derive(Clone, Copy, Debug)]
pub struct PlacedForm {
    /// Position in the list.
    pub form: usize,
    /// Here.
    pub local: PlacedEnd,
    /// At the target.
    pub remote: PlacedEnd,
}

/// Where one end of a form lies.
#[derive(Clone, Copy, Debug)]
pub struct PlacedEnd {
    /// Position of its window in the table.
    pub window: usize,
    /// The lowest byte of all pieces.
    pub low: u64,
    /// Bytes from there to the end of the highest piece.
    pub len: u64,
    /// The lowest and the highest page number.
    numbers: (u32, u32),
}

/// The page list that a form named last, and its lowest and highest number: the next form often names
/// the same list, as the keys and the values of a cache do.
type LastList<'a> = (&'a [u32], (u32, u32));

/// Checks that each form of the list lies inside one window at both ends: from the lowest byte of
/// its expansion to the highest, what lies between its pieces included. Windows are sorted and do
/// not overlap.
pub fn check_form_bounds<F: Form>(
    forms: &[F],
    local: &[Window],
    remote: &[Window],
    scratch: &mut Scratch,
) -> Result<CheckedForms, FormError> {
    reset(&mut scratch.touched_local, local.len());
    reset(&mut scratch.touched_remote, remote.len());
    scratch.forms.clear();
    let mut local = Lookup::new(local);
    let mut remote = Lookup::new(remote);
    let mut last: [LastList<'_>; 2] = Default::default();
    let mut checked = CheckedForms::default();
    for (form, grid) in forms.iter().map(Form::grid).enumerate() {
        let (here, there) = (grid.local.numbers.len(), grid.remote.numbers.len());
        if here != there {
            return Err(FormError::PageCounts { form, local: here, remote: there });
        }
        if grid.is_empty() {
            continue;
        }
        let touched = &mut scratch.touched_local;
        let here = place(form, &grid, Side::Local, &mut local, touched, &mut last[0])?;
        let touched = &mut scratch.touched_remote;
        let there = place(form, &grid, Side::Remote, &mut remote, touched, &mut last[1])?;
        scratch.forms.push(PlacedForm { form, local: here, remote: there });
        checked = checked.with(&grid).ok_or(FormError::TooLarge { form })?;
    }
    Ok(checked)
}

impl CheckedForms {
    fn with(self, grid: &Grid<'_>) -> Option<Self> {
        let pieces = grid.pieces()?;
        let bytes = self.bytes.checked_add(pieces.checked_mul(grid.len)?)?;
        Some(Self { bytes, pieces: self.pieces.checked_add(pieces)? })
    }
}

/// Finds the window of one end of a form, and marks it in `touched` when it is another than before.
// Inlined, because its result is large and would be stored twice.
#[inline(always)]
fn place<'a>(
    form: usize,
    grid: &Grid<'a>,
    side: Side,
    windows: &mut Lookup<'_>,
    touched: &mut [u64],
    last: &mut LastList<'a>,
) -> Result<PlacedEnd, FormError> {
    let end = grid.end(side);
    let numbers = match end.numbers {
        &[only] => (only, only),
        list => {
            if !std::ptr::eq(last.0, list) {
                *last = (list, lowest_and_highest(list));
            }
            last.1
        }
    };
    let Some((low, len)) = hull(grid, end, numbers) else {
        let page = page_of(end, numbers.1);
        return Err(FormError::Overflow { form, side, addr: end.addr, page });
    };
    if !windows.holds(low, len) {
        turn(form, side, end, numbers, (low, len), windows)?;
        touched[windows.at / 64] |= 1 << (windows.at % 64);
    }
    Ok(PlacedEnd { window: windows.at, low, len, numbers })
}

/// Moves to the window that holds all from `addr` on.
#[cold]
#[inline(never)]
fn turn(
    form: usize,
    side: Side,
    end: &Pages<'_>,
    (lowest, highest): (u32, u32),
    (addr, len): (u64, u64),
    windows: &mut Lookup<'_>,
) -> Result<(), FormError> {
    let Some(at) = windows.find(addr) else {
        return Err(FormError::NotRegistered { form, side, addr, page: page_of(end, lowest) });
    };
    let Window { start, len: region } = windows.windows[at];
    let left = region - (addr - start);
    if len > left {
        let (page, beyond) = (page_of(end, highest), len - left);
        return Err(FormError::OutOfBounds { form, side, addr, len, page, start, region, beyond });
    }
    windows.go(at);
    Ok(())
}

/// First byte and bytes of the whole expansion, unless they pass the end of the address space.
#[inline]
fn hull(grid: &Grid<'_>, end: &Pages<'_>, (lowest, highest): (u32, u32)) -> Option<(u64, u64)> {
    let low = end.page_stride.checked_mul(lowest.into())?.checked_add(end.addr)?;
    let len = end
        .page_stride
        .checked_mul((highest - lowest).into())?
        .checked_add(end.layer_stride.checked_mul(grid.layers - 1)?)?
        .checked_add(end.row_stride.checked_mul(grid.rows - 1)?)?
        .checked_add(grid.len)?;
    low.checked_add(len)?;
    Some((low, len))
}

#[cold]
fn page_of(end: &Pages<'_>, number: u32) -> Option<FormPage> {
    let position = end.numbers.iter().position(|&one| one == number)?;
    // The one page of a strided form is not the caller's.
    (end.page_stride > 0).then_some(FormPage { number, position })
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn lowest_and_highest(numbers: &[u32]) -> (u32, u32) {
    let (mut low, mut high) = (u32::MAX, 0);
    for &number in numbers {
        low = low.min(number);
        high = high.max(number);
    }
    (low, high)
}

/// Checks that no byte of a list of forms that is in bounds is written twice and, where both ends
/// share an address space, that no source is also a destination. `scratch` is as
/// [`check_form_bounds`] left it.
///
/// Strides and page numbers show it for nearly every list. For the others all pieces are compared,
/// up to four million.
pub fn check_form_overlaps<F: Form>(
    op: Op,
    forms: &[F],
    one_space: bool,
    scratch: &mut Scratch,
) -> Result<(), FormError> {
    let Scratch { forms: placed, proofs, overlap, .. } = scratch;
    let (to, from) = match op {
        Op::Write => (Side::Remote, Side::Local),
        Op::Read => (Side::Local, Side::Remote),
    };
    proofs.blocks.clear();
    let mut proved = true;
    // Of which it is known that no number comes twice.
    let mut unique: &[u32] = &[];
    for form in placed.iter() {
        let grid = forms[form.form].grid();
        let mut written = block_of(form, &grid, to, true, 1);
        let numbers = grid.end(to).numbers;
        if !written.nests() {
            // Pages may be counted in something smaller than what lies in each, in rows or tokens.
            let lowest = placed_end(form, to).numbers.0;
            match common_step(numbers, lowest) {
                0 | 1 => {}
                step => written = block_of(form, &grid, to, true, step),
            }
        }
        proved = proved && proofs.alone(&written, numbers, std::ptr::eq(unique, numbers));
        if proved {
            unique = numbers;
        }
        proofs.blocks.push(written);
        if one_space {
            proofs.blocks.push(block_of(form, &grid, from, false, 1));
        }
    }
    let numbers = |block: &Block| {
        let side = if block.writes { to } else { from };
        forms[block.form].grid().end(side).numbers
    };
    if proved && proofs.apart(numbers) {
        return Ok(());
    }
    compare_all(op, forms, one_space, overlap)
}

fn placed_end(placed: &PlacedForm, side: Side) -> &PlacedEnd {
    match side {
        Side::Local => &placed.local,
        Side::Remote => &placed.remote,
    }
}

/// One end of a form as the proofs see it. All page numbers are a multiple of `step` above the lowest.
#[inline]
fn block_of(placed: &PlacedForm, grid: &Grid<'_>, side: Side, writes: bool, step: u32) -> Block {
    let end = grid.end(side);
    let at = placed_end(placed, side);
    let (lowest, highest) = at.numbers;
    let paged = end.numbers.len() > 1;
    // Products that are part of the hull, so none overflows.
    let dims = [
        Dim::even(end.row_stride, grid.rows),
        Dim::even(end.layer_stride, grid.layers),
        Dim {
            stride: end.page_stride * u64::from(step),
            reach: end.page_stride * u64::from(highest - lowest),
            many: paged,
            paged,
        },
    ];
    Block::new(placed.form, writes, (at.low, at.len), dims, Numbers { lowest, step })
}

/// The exact answer, from all pieces.
#[cold]
fn compare_all<F: Form>(
    op: Op,
    forms: &[F],
    one_space: bool,
    memory: &mut Memory,
) -> Result<(), FormError> {
    let mut counts = forms.iter().map(Form::grid).filter(|grid| !grid.is_empty());
    let pieces = counts.try_fold(0u64, |sum, grid| sum.checked_add(grid.pieces()?));
    let pieces = pieces.unwrap_or(u64::MAX);
    if pieces > MOST_COMPARED {
        return Err(FormError::TooManyPieces { pieces, limit: MOST_COMPARED });
    }
    let mut ranges = Vec::with_capacity(pieces as usize);
    let mut begins = Vec::with_capacity(forms.len());
    for form in forms {
        begins.push(ranges.len());
        ranges.extend(FormPieces::new(form.grid()));
    }
    let found = match overlap_is_possible(op, &ranges, &extent_of(op, &ranges), memory) {
        true => find_overlap(op, &ranges),
        false => Ok(()),
    };
    let found =
        found.and_then(|()| if one_space { find_overwritten_source(op, &ranges) } else { Ok(()) });
    let piece = |index: usize| {
        let form = begins.partition_point(|&begin| begin <= index) - 1;
        FormPiece { form, piece: (index - begins[form]) as u64 }
    };
    found.map_err(|error| match error {
        RangeError::DestinationsOverlap { first, second, side, addr } => {
            FormError::DestinationsOverlap {
                first: piece(first),
                second: piece(second),
                side,
                addr,
            }
        }
        RangeError::SourceOverwritten { reader, writer, addr } => {
            FormError::SourceOverwritten { reader: piece(reader), writer: piece(writer), addr }
        }
        other => unreachable!("only overlaps were looked for: {other}"),
    })
}

/// Where the destinations of non-empty ranges lie.
fn extent_of(op: Op, ranges: &[Range]) -> Extent {
    let start = match op {
        Op::Write => destination::<true>,
        Op::Read => destination::<false>,
    };
    let first = ranges.first().map_or(0, start);
    let mut extent = Extent {
        low: first,
        high: first,
        union: 0,
        longest: 0,
        bytes: 0,
        ascending: false,
        overlap: None,
    };
    for range in ranges {
        extent.low = extent.low.min(start(range));
        extent.high = extent.high.max(start(range) + range.len);
        extent.union |= start(range).wrapping_sub(first) | range.len;
        extent.longest = extent.longest.max(range.len);
        extent.bytes = extent.bytes.wrapping_add(range.len);
    }
    extent
}

#[cfg(test)]
mod tests;
