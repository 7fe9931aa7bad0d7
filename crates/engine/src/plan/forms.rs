//! Compact forms: many pieces described by strides and page numbers.

use super::Range;
use crate::error::Side;

/// `count` pieces of `len` bytes, each so many bytes after the one before, at both ends.
///
/// All pieces of one end lie in one registered region. A form without pieces, or with empty ones,
/// copies nothing, wherever it points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strided {
    /// First byte of the first piece here.
    pub local: u64,
    /// First byte of the first piece there: an address of the target's process.
    pub remote: u64,
    /// Bytes of a piece.
    pub len: u64,
    /// Pieces.
    pub count: u64,
    /// Bytes from the beginning of a piece here to the beginning of the next.
    pub local_stride: u64,
    /// Bytes from the beginning of a piece there to the beginning of the next.
    pub remote_stride: u64,
}

/// One end of a paged copy. Row `r` of layer `l` of page `n` begins at
/// `addr + n * page_stride + l * layer_stride + r * row_stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages<'a> {
    /// Where page 0 begins, or would begin: only pages that are named need be registered.
    pub addr: u64,
    /// Numbers of the pages to copy, in any order.
    pub numbers: &'a [u32],
    /// Bytes from a page to the page of the next number.
    pub page_stride: u64,
    /// Bytes from a page to the same page of the next layer.
    pub layer_stride: u64,
    /// Bytes from a row of a page to the next row.
    pub row_stride: u64,
}

/// The same pages of every layer, and of each page `rows` rows of `row_bytes`: a whole page is one
/// row, a slice of its heads is one row a token.
///
/// The page at position `i` of the one list is copied to the page at position `i` of the other, so
/// both lists are equally long. All pieces of one end lie in one registered region. A form without
/// pages, layers, rows or bytes copies nothing, wherever it points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paged<'a> {
    /// This end.
    pub local: Pages<'a>,
    /// The target's end.
    pub remote: Pages<'a>,
    /// Layers.
    pub layers: u32,
    /// Rows of a page.
    pub rows: u32,
    /// Bytes of a row.
    pub row_bytes: u64,
}

impl<'a> Pages<'a> {
    /// Pages that are copied whole, so that rows have no stride.
    pub fn whole(addr: u64, numbers: &'a [u32], page_stride: u64, layer_stride: u64) -> Self {
        Self { addr, numbers, page_stride, layer_stride, row_stride: 0 }
    }
}

impl<'a> Paged<'a> {
    /// `page_bytes` of every page, in one piece for each layer.
    pub fn whole_pages(local: Pages<'a>, remote: Pages<'a>, layers: u32, page_bytes: u64) -> Self {
        Self { local, remote, layers, rows: 1, row_bytes: page_bytes }
    }
}

/// What a strided and a paged form have in common: a strided one is one page of one layer whose
/// rows are the pieces.
#[derive(Clone, Copy, Debug)]
pub struct Grid<'a> {
    pub(crate) local: Pages<'a>,
    pub(crate) remote: Pages<'a>,
    pub(crate) layers: u64,
    pub(crate) rows: u64,
    pub(crate) len: u64,
}

impl<'a> Grid<'a> {
    pub(super) fn end(&self, side: Side) -> &Pages<'a> {
        match side {
            Side::Local => &self.local,
            Side::Remote => &self.remote,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.local.numbers.is_empty() || self.layers == 0 || self.rows == 0 || self.len == 0
    }

    /// Pieces; of more than 64 bits can count, as many as they can.
    pub(crate) fn count(&self) -> u64 {
        self.pieces().unwrap_or(u64::MAX)
    }

    pub(super) fn pieces(&self) -> Option<u64> {
        let of_a_page = self.layers.checked_mul(self.rows)?;
        of_a_page.checked_mul(self.local.numbers.len() as u64)
    }
}

/// A compact form.
pub trait Form {
    /// Its normal form.
    fn grid(&self) -> Grid<'_>;
}

impl Form for Strided {
    #[inline]
    fn grid(&self) -> Grid<'_> {
        let end = |addr, row_stride| Pages {
            addr,
            numbers: &[0],
            page_stride: 0,
            layer_stride: 0,
            row_stride,
        };
        Grid {
            local: end(self.local, self.local_stride),
            remote: end(self.remote, self.remote_stride),
            layers: 1,
            rows: self.count,
            len: self.len,
        }
    }
}

impl Form for Paged<'_> {
    #[inline]
    fn grid(&self) -> Grid<'_> {
        let &Paged { local, remote, layers, rows, row_bytes } = self;
        Grid { local, remote, layers: layers.into(), rows: rows.into(), len: row_bytes }
    }
}

impl Strided {
    /// The pieces, in order. Their addresses are right for a form that was checked.
    pub fn pieces(&self) -> FormPieces<'_> {
        FormPieces::new(self.grid())
    }
}

impl Paged<'_> {
    /// The pieces: page by page, of a page layer by layer, of a layer row by row. Their addresses
    /// are right for a form that was checked.
    pub fn pieces(&self) -> FormPieces<'_> {
        FormPieces::new(self.grid())
    }
}

/// The pieces of a form, one range each.
#[derive(Clone, Debug)]
pub struct FormPieces<'a> {
    grid: Grid<'a>,
    page: usize,
    layer: u64,
    row: u64,
}

impl<'a> FormPieces<'a> {
    /// The pieces of a form in its normal form.
    pub(crate) fn of(grid: Grid<'a>) -> Self {
        Self::new(grid)
    }

    pub(super) fn new(grid: Grid<'a>) -> Self {
        let page = if grid.is_empty() { grid.local.numbers.len() } else { 0 };
        Self { grid, page, layer: 0, row: 0 }
    }
}

impl Iterator for FormPieces<'_> {
    type Item = Range;

    #[inline]
    fn next(&mut self) -> Option<Range> {
        let Self { grid, page, layer, row } = self;
        let here = *grid.local.numbers.get(*page)?;
        let there = *grid.remote.numbers.get(*page)?;
        // A checked form wraps nowhere; what another one gives is not used.
        let addr = |end: &Pages<'_>, number: u32| {
            end.addr
                .wrapping_add(end.page_stride.wrapping_mul(number.into()))
                .wrapping_add(end.layer_stride.wrapping_mul(*layer))
                .wrapping_add(end.row_stride.wrapping_mul(*row))
        };
        let (local, remote) = (addr(&grid.local, here), addr(&grid.remote, there));
        *row += 1;
        if *row == grid.rows {
            *row = 0;
            *layer += 1;
            if *layer == grid.layers {
                *layer = 0;
                *page += 1;
            }
        }
        Some(Range { local, remote, len: grid.len })
    }
}
