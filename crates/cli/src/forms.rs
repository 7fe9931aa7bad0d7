//! The same pieces in each form that the engine takes: range by range, as strided runs, as pages.

use clap::ValueEnum;
use kvferry_engine::{Copies, Paged, Pages, Range, Strided};
use serde::{Deserialize, Serialize};

use crate::case::Direction;
use crate::layout::{Layout, Piece};

/// How a request says which bytes to move.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Form {
    /// A list with a range for every piece
    Ranges,
    /// A list of runs of pieces with constant strides
    Strided,
    /// Page numbers of both sides, and strides of pages, layers and rows
    Paged,
    /// The compact form where the case has one, else ranges
    Auto,
}

impl Form {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ranges => "ranges",
            Self::Strided => "strided",
            Self::Paged => "paged",
            Self::Auto => "auto",
        }
    }

    /// The form that this layout takes when this one is asked for; never `Auto`.
    ///
    /// # Errors
    /// Why its pieces do not have the form.
    pub(crate) fn of(self, layout: &Layout) -> Result<Self, NoForm> {
        let pieces = layout.pieces.len();
        match self {
            Self::Ranges => Ok(Self::Ranges),
            Self::Strided => match runs(&layout.pieces).count() {
                runs if runs * PIECES_PER_RUN <= pieces => Ok(Self::Strided),
                runs => Err(NoForm::Strided { pieces, runs }),
            },
            Self::Paged if layout.paged.is_some() => Ok(Self::Paged),
            Self::Paged => Err(NoForm::Paged),
            // A model's cache is pages, whatever strides it has beside.
            Self::Auto if layout.paged.as_ref().is_some_and(PagedPieces::has_layers) => {
                Ok(Self::Paged)
            }
            Self::Auto => {
                Self::Strided.of(layout).or_else(|_| Self::Paged.of(layout)).or(Ok(Self::Ranges))
            }
        }
    }
}

/// A run has so many pieces on average, or the strided form is not worth its name.
const PIECES_PER_RUN: usize = 16;

/// Why pieces do not have a form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoForm {
    #[error(
        "its {pieces} pieces are {runs} runs of constant strides, which are no list of a few: use --form paged, ranges or auto"
    )]
    Strided { pieces: usize, runs: usize },
    #[error(
        "its pieces are not equally long and whole strides apart, so they are no pages: use --form strided, ranges or auto"
    )]
    Paged,
}

/// Equally long pieces with constant strides on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) first: Piece,
    pub(crate) count: u64,
    /// Bytes from the beginning of one piece to that of the next, at the source and at the
    /// destination.
    pub(crate) strides: (u64, u64),
}

/// The pieces as runs, in order, each as long as it can be.
pub(crate) fn runs(pieces: &[Piece]) -> impl Iterator<Item = Run> {
    let mut rest = pieces;
    std::iter::from_fn(move || {
        let &first = rest.first()?;
        let step = |from: &Piece, to: &Piece| {
            let source = to.source.checked_sub(from.source)?;
            let destination = to.destination.checked_sub(from.destination)?;
            (from.len == to.len).then_some((source, destination))
        };
        let strides = rest.get(1).and_then(|second| step(&first, second));
        let goes_on = |pair: &&[Piece]| strides.is_some() && step(&pair[0], &pair[1]) == strides;
        let count = 1 + rest.windows(2).take_while(goes_on).count();
        rest = &rest[count..];
        Some(Run { first, count: count as u64, strides: strides.unwrap_or_default() })
    })
}

/// Pieces as pages by number: the page at a position of the one list is copied to the page at the
/// same position of the other, in every tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagedPieces {
    /// Pages of the source.
    pub source_numbers: Vec<u32>,
    /// Pages of the destination.
    pub destination_numbers: Vec<u32>,
    /// What a page has a part of.
    pub tensors: Vec<PagedTensor>,
}

/// A cache tensor of all layers. Of each page and layer it has `rows` rows of `row_bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedTensor {
    /// Layers.
    pub layers: u32,
    /// Rows of a page.
    pub rows: u32,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Where it lies in the source buffer.
    pub source: PagedEnd,
    /// Where it lies in the destination buffer.
    pub destination: PagedEnd,
}

/// Where a tensor lies in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedEnd {
    /// Offset of page 0.
    pub start: u64,
    /// Bytes from a page to the next number.
    pub page_stride: u64,
    /// Bytes from a page to the same page of the next layer.
    pub layer_stride: u64,
    /// Bytes from a row to the next.
    pub row_stride: u64,
}

impl PagedEnd {
    /// Offset of a row of a page of the first layer.
    pub(crate) fn row(&self, page: u32, row: u64) -> u64 {
        self.start + u64::from(page) * self.page_stride + row * self.row_stride
    }

    fn pages<'a>(&self, buffer: u64, numbers: &'a [u32]) -> Pages<'a> {
        let &Self { start, page_stride, layer_stride, row_stride } = self;
        Pages { addr: buffer + start, numbers, page_stride, layer_stride, row_stride }
    }
}

impl PagedPieces {
    /// One page a piece, if all are equally long and whole strides apart on each side.
    pub(crate) fn of_equal_pieces(pieces: &[Piece]) -> Option<Self> {
        let row_bytes = pieces.first()?.len;
        if pieces.iter().any(|piece| piece.len != row_bytes) {
            return None;
        }
        let end = |side: fn(&Piece) -> u64| {
            let start = pieces.iter().map(side).min()?;
            let stride =
                pieces.iter().fold(0, |stride, piece| common_divisor(stride, side(piece) - start));
            if pieces.len() > 1 && stride < row_bytes {
                return None;
            }
            let number = |piece| u32::try_from((side(piece) - start) / stride.max(1)).ok();
            let numbers = pieces.iter().map(number).collect::<Option<Vec<_>>>()?;
            Some((PagedEnd { start, page_stride: stride, layer_stride: 0, row_stride: 0 }, numbers))
        };
        let (source, source_numbers) = end(|piece| piece.source)?;
        let (destination, destination_numbers) = end(|piece| piece.destination)?;
        let tensor = PagedTensor { layers: 1, rows: 1, row_bytes, source, destination };
        Some(Self { source_numbers, destination_numbers, tensors: vec![tensor] })
    }

    /// The same pages, copied the other way.
    pub(crate) fn reverse(&mut self) {
        std::mem::swap(&mut self.source_numbers, &mut self.destination_numbers);
        for tensor in &mut self.tensors {
            std::mem::swap(&mut tensor.source, &mut tensor.destination);
        }
    }

    fn has_layers(&self) -> bool {
        self.tensors.iter().any(|tensor| tensor.layers > 1)
    }
}

fn common_divisor(mut one: u64, mut other: u64) -> u64 {
    while other > 0 {
        (one, other) = (other, one % other);
    }
    one
}

/// Where the two buffers begin, seen from the process that moves the bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends {
    pub(crate) local: u64,
    pub(crate) remote: u64,
    pub(crate) direction: Direction,
}

impl Ends {
    /// The local and the remote one of a source and a destination.
    fn local_and_remote<T>(&self, source: T, destination: T) -> (T, T) {
        match self.direction {
            Direction::Write => (source, destination),
            Direction::Read => (destination, source),
        }
    }

    /// Where a request writes: start and length, from the beginning of the destination.
    pub(crate) fn destinations(&self, request: &Request<'_>) -> Vec<(u64, u64)> {
        let ranges = request.expanded().into_iter();
        let destination = |range: Range| match self.direction {
            Direction::Write => (range.remote - self.remote, range.len),
            Direction::Read => (range.local - self.local, range.len),
        };
        ranges.map(destination).collect()
    }

    fn range(&self, piece: &Piece) -> Range {
        let (local, remote) = self.local_and_remote(piece.source, piece.destination);
        Range { local: self.local + local, remote: self.remote + remote, len: piece.len }
    }
}

/// What a caller hands to the engine.
#[derive(Clone, Debug)]
pub(crate) enum Request<'a> {
    Ranges(Vec<Range>),
    Strided(Vec<Strided>),
    Paged(Vec<Paged<'a>>),
}

impl<'a> Request<'a> {
    /// The pieces of a layout in a form.
    ///
    /// # Errors
    /// As [`Form::of`].
    pub(crate) fn new(layout: &'a Layout, form: Form, ends: Ends) -> Result<Self, NoForm> {
        Ok(match (form.of(layout)?, &layout.paged) {
            (Form::Paged, Some(paged)) => {
                let form = |tensor: &PagedTensor| {
                    let (local, remote) = ends.local_and_remote(
                        (&tensor.source, &paged.source_numbers),
                        (&tensor.destination, &paged.destination_numbers),
                    );
                    Paged {
                        local: local.0.pages(ends.local, local.1),
                        remote: remote.0.pages(ends.remote, remote.1),
                        layers: tensor.layers,
                        rows: tensor.rows,
                        row_bytes: tensor.row_bytes,
                    }
                };
                Self::Paged(paged.tensors.iter().map(form).collect())
            }
            (Form::Strided, _) => {
                let form = |run: Run| {
                    let Range { local, remote, len } = ends.range(&run.first);
                    let (local_stride, remote_stride) =
                        ends.local_and_remote(run.strides.0, run.strides.1);
                    Strided { local, remote, len, count: run.count, local_stride, remote_stride }
                };
                Self::Strided(runs(&layout.pieces).map(form).collect())
            }
            _ => Self::Ranges(layout.pieces.iter().map(|piece| ends.range(piece)).collect()),
        })
    }

    pub(crate) fn copies(&self) -> Copies<'_> {
        match self {
            Self::Ranges(list) => list.into(),
            Self::Strided(list) => list.into(),
            Self::Paged(list) => list.into(),
        }
    }

    /// The same pieces as ranges.
    pub(crate) fn expanded(&self) -> Vec<Range> {
        match self {
            Self::Ranges(list) => list.clone(),
            Self::Strided(list) => list.iter().flat_map(Strided::pieces).collect(),
            Self::Paged(list) => list.iter().flat_map(Paged::pieces).collect(),
        }
    }

    /// So many requests that have all the pieces between them; some may be empty.
    pub(crate) fn split(&self, shares: usize) -> Vec<Self> {
        let part = |count: usize, share| count * share / shares..count * (share + 1) / shares;
        let share = |share| match self {
            Self::Ranges(list) => Self::Ranges(list[part(list.len(), share)].to_vec()),
            Self::Strided(list) => {
                let form = |run: &Strided| {
                    let part = part(run.count as usize, share);
                    Strided {
                        local: run.local + part.start as u64 * run.local_stride,
                        remote: run.remote + part.start as u64 * run.remote_stride,
                        count: part.len() as u64,
                        ..*run
                    }
                };
                Self::Strided(list.iter().map(form).collect())
            }
            Self::Paged(list) => {
                let form = |form: &Paged<'a>| {
                    let part = part(form.local.numbers.len(), share);
                    let pages =
                        |end: Pages<'a>| Pages { numbers: &end.numbers[part.clone()], ..end };
                    Paged { local: pages(form.local), remote: pages(form.remote), ..*form }
                };
                Self::Paged(list.iter().map(form).collect())
            }
        };
        (0..shares).map(share).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;
    use crate::model::KvModel;
    use crate::shape::Shape;

    const ENDS: Ends = Ends { local: 1 << 40, remote: 1 << 44, direction: Direction::Write };

    fn shape(id: &str) -> Layout {
        Layout::for_shape(Shape::all().iter().find(|shape| shape.id == id).unwrap(), 7)
    }

    fn model(name: &str, slice: Option<&str>) -> Layout {
        let number = |number| NonZeroU64::new(number).unwrap();
        let slice = slice.map(|slice| slice.parse().unwrap());
        let model: KvModel = name.parse().unwrap();
        Layout::for_model(&model, number(300), number(16), slice, 7).unwrap()
    }

    fn sorted(mut ranges: Vec<Range>) -> Vec<Range> {
        ranges.sort_unstable_by_key(|range| (range.remote, range.local));
        ranges
    }

    #[test]
    fn every_form_has_the_pieces_of_the_layout_and_no_others() {
        let layouts = [
            ("W06", shape("W06"), Form::Strided),
            ("W07a", shape("W07a"), Form::Strided),
            ("W07b", shape("W07b"), Form::Paged),
            ("W08", shape("W08"), Form::Strided),
            ("W15", shape("W15"), Form::Paged),
            ("R3", shape("R3"), Form::Ranges),
            ("deepseek-v3", model("deepseek-v3", None), Form::Paged),
            ("qwen2.5-7b", model("qwen2.5-7b", None), Form::Paged),
            ("qwen2.5-7b 3/4", model("qwen2.5-7b", Some("3/4")), Form::Paged),
        ];
        for (name, layout, best) in layouts {
            assert_eq!(Form::Auto.of(&layout), Ok(best), "{name}");
            for direction in [Direction::Write, Direction::Read] {
                let ends = Ends { direction, ..ENDS };
                let ranges = Request::new(&layout, Form::Ranges, ends).unwrap();
                let expected = sorted(ranges.expanded());
                for form in [Form::Ranges, Form::Strided, Form::Paged] {
                    let Ok(request) = Request::new(&layout, form, ends) else { continue };
                    let what = format!("{name} {} {direction:?}", form.name());
                    assert!(sorted(request.expanded()) == expected, "{what}");
                    let shares = request.split(7);
                    let shares = shares.iter().flat_map(Request::expanded).collect();
                    assert!(sorted(shares) == expected, "{what}, split");
                }
            }
        }
    }

    #[test]
    fn a_compact_form_has_few_entries() {
        let entries = |layout: &Layout| match Request::new(layout, Form::Auto, ENDS).unwrap() {
            Request::Ranges(list) => list.len(),
            Request::Strided(list) => list.len(),
            Request::Paged(list) => list.len(),
        };
        for (layout, expected) in [
            (shape("W06"), 1),
            (shape("W07b"), 1),
            (shape("W08"), 1),
            (model("deepseek-v3", None), 1),
            (model("qwen2.5-7b", Some("1/4")), 2),
        ] {
            assert_eq!(entries(&layout), expected);
        }
    }

    #[test]
    fn pieces_without_the_form_are_refused_with_the_forms_they_may_have() {
        let error = Form::Strided.of(&shape("R2")).unwrap_err().to_string();
        assert!(error.starts_with("its 3840 pieces are "), "{error}");
        assert_eq!(Form::Paged.of(&shape("R3")), Err(NoForm::Paged));
        let pieces = [(300, 0, 8), (311, 100, 8), (322, 50, 8)]
            .map(|(source, destination, len)| Piece { source, destination, len });
        let paged =
            Layout::new(pieces.to_vec(), 600, 600).paged.expect("pages of strides 11 and 50");
        assert_eq!(paged.source_numbers, [0, 1, 2]);
        assert_eq!(paged.destination_numbers, [0, 2, 1]);
        let close = [(300, 0, 8), (308, 100, 8), (313, 50, 8)]
            .map(|(source, destination, len)| Piece { source, destination, len });
        assert_eq!(Layout::new(close.to_vec(), 600, 600).paged, None, "a stride of 1");
    }

    #[test]
    fn a_run_ends_where_a_length_or_a_stride_changes() {
        let pieces = [(0, 0, 4), (8, 16, 4), (16, 32, 4), (24, 47, 4), (32, 62, 5), (20, 80, 5)]
            .map(|(source, destination, len)| Piece { source, destination, len });
        let found: Vec<_> = runs(&pieces).map(|run| (run.count, run.strides)).collect();
        assert_eq!(found, [(3, (8, 16)), (1, (0, 0)), (1, (0, 0)), (1, (0, 0))]);
    }
}
