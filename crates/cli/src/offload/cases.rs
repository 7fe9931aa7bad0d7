//! What `--transport offload` moves: shapes of the table, sweeps over them, and KV caches whose
//! pages have strides. In every layout here the GPU is the source and host memory the destination.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

use crate::forms::{Form, PagedEnd, PagedPieces, PagedTensor};
use crate::layout::{Layout, Piece, RESERVE, permutation};
use crate::shape::{Order, Part, Shape};

/// How host memory lies.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum HostLayout {
    /// One piece after the other, in the order of the list
    Packed,
    /// As the shape says; a KV cache's pages in random places
    Scattered,
}

impl HostLayout {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Packed => "packed",
            Self::Scattered => "scattered",
        }
    }
}

/// One thing to move.
#[derive(Clone, Debug)]
pub(crate) enum Case {
    /// A shape of the table, with no more than so many pieces.
    Shape { shape: Shape, most_pieces: u64 },
    /// Pages of all layers of a KV cache.
    Cache(Cache),
    /// The pieces of a cache in random order on the host: the same bytes without strides.
    Shuffled(Cache),
    /// W10 with items of so many bytes.
    Item { bytes: u64, count: u64 },
    /// A point of W11's grid.
    Point { count: u64, bytes: u64 },
}

/// Pages of a KV cache that lies layer by layer on the GPU and page by page on the host: there all
/// layers of a page are side by side, or of a run of neighbouring pages, `[layer][page][bytes]`, as
/// the page store keeps them: then a layer of the whole run is one row on both sides.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Cache {
    pub(crate) pages: u32,
    pub(crate) layers: u32,
    /// Bytes of a page in one layer.
    pub(crate) row: u64,
    /// Pages come in runs of so many neighbours.
    pub(crate) run: u32,
}

/// Not a cache.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no cache: expected PAGESxLAYERSxBYTES, such as 256x64x4096, with at most {MOST_PIECES} pieces and 64 GiB; a run of neighbouring pages is added as :4"
)]
pub(crate) struct BadCache(String);

/// Pieces of a cache or a shape, at most.
const MOST_PIECES: u64 = 1 << 22;
const MOST_BYTES: u64 = 64 << 30;

impl FromStr for Cache {
    type Err = BadCache;

    fn from_str(text: &str) -> Result<Self, BadCache> {
        let bad = || BadCache(text.to_owned());
        let (sizes, run) = text.split_once(':').unwrap_or((text, "1"));
        let numbers = sizes.split('x').map(|number| number.parse::<u64>().ok().filter(|&n| n > 0));
        let numbers = numbers.collect::<Option<Vec<_>>>().ok_or_else(bad)?;
        let [pages, layers, row] = numbers[..] else { return Err(bad()) };
        let run = run.parse::<u32>().ok().filter(|&run| run > 0).ok_or_else(bad)?;
        let pieces = pages.checked_mul(layers).filter(|&pieces| pieces <= MOST_PIECES);
        let bytes = pieces.and_then(|pieces| pieces.checked_mul(row));
        bytes.filter(|&bytes| bytes <= MOST_BYTES).ok_or_else(bad)?;
        // Both are at most `MOST_PIECES`.
        Ok(Self { pages: pages as u32, layers: layers as u32, row, run })
    }
}

impl fmt::Display for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}", self.pages, self.layers, self.row)?;
        if self.run > 1 { write!(f, ":{}", self.run) } else { Ok(()) }
    }
}

/// Item sizes of W10: from the table's smallest latent to its largest.
pub(crate) fn item_sizes() -> impl Iterator<Item = u64> {
    (512..=1600).step_by(16)
}

/// Counts and lengths of W11.
pub(crate) fn grid() -> impl Iterator<Item = (u64, u64)> {
    let lengths = [1, 2, 4, 8, 12, 16, 24, 28, 32].map(|kib| kib << 10);
    (4..=12)
        .map(|power| 1 << power)
        .flat_map(move |count| lengths.into_iter().map(move |bytes| (count, bytes)))
}

/// Bytes between two places of W11's grid, whatever the length.
const GRID_STRIDE: u64 = 32 << 10;

impl Case {
    /// What tables and JSON call it.
    pub(crate) fn label(&self) -> String {
        match self {
            Self::Shape { shape, .. } => shape.id.clone(),
            Self::Cache(cache) => format!("kv {cache}"),
            Self::Shuffled(cache) => format!("shuffled {cache}"),
            Self::Item { bytes, .. } => format!("W10 {bytes} B"),
            Self::Point { count, bytes } => format!("W11 {count} x {} KiB", bytes >> 10),
        }
    }

    /// Packed, unless how the host's memory lies is what the shape is about.
    pub(crate) fn usual_host_layout(&self) -> HostLayout {
        match self {
            Self::Shape { shape, .. } if host_is_source(shape) => HostLayout::Scattered,
            Self::Item { .. } => HostLayout::Scattered,
            _ => HostLayout::Packed,
        }
    }

    /// The form that such a request comes in: of a cache its page numbers, as from a page table.
    pub(crate) fn usual_form(&self) -> Form {
        match self {
            Self::Cache(_) => Form::Paged,
            _ => Form::Ranges,
        }
    }

    /// Part of a sweep, of which only its plot is looked at.
    pub(crate) fn is_of_a_sweep(&self) -> bool {
        matches!(self, Self::Item { .. } | Self::Point { .. })
    }

    /// From the GPU to the host.
    pub(crate) fn layout(&self, host: HostLayout, seed: u64) -> Layout {
        match self {
            Self::Shape { shape, most_pieces } => of_shape(&cut(shape, *most_pieces), host, seed),
            Self::Cache(cache) => cache.layout(host, seed),
            Self::Shuffled(cache) => cache.shuffled(seed),
            &Self::Item { bytes, count } => {
                let shape = shape_of("W10", Part { count, len: bytes }, Order::ScatterToPacked);
                of_shape(&Shape { src_stride: bytes, dst_stride: bytes, ..shape }, host, seed)
            }
            &Self::Point { count, bytes } => {
                // Every second place is taken on average: of twice as many, a random half.
                let part = Part { count: 2 * count, len: bytes };
                let shape = shape_of("W11", part, Order::Scatter);
                let strides = Shape { src_stride: GRID_STRIDE, dst_stride: GRID_STRIDE, ..shape };
                let mut layout = Layout::for_shape(&strides, seed);
                layout.pieces.truncate(count as usize);
                let Layout { pieces, source_bytes, destination_bytes, .. } = layout;
                let layout = Layout::new(pieces, source_bytes, destination_bytes);
                if host == HostLayout::Packed { layout.packed() } else { layout }
            }
        }
    }
}

fn shape_of(id: &str, part: Part, order: Order) -> Shape {
    Shape {
        id: id.to_owned(),
        name: None,
        parts: vec![part],
        order,
        src_stride: 0,
        dst_stride: 0,
        src_shift: 0,
        dst_shift: 0,
        align: 16,
        dir: "h2g".to_owned(),
        descriptors: part.count,
        bytes: part.count * part.len,
    }
}

/// The table has the host as the source of shapes that are about loads alone.
fn host_is_source(shape: &Shape) -> bool {
    !shape.dir.contains("g2")
        && matches!(shape.order, Order::ScatterToPacked | Order::StridedToScatter)
}

fn of_shape(shape: &Shape, host: HostLayout, seed: u64) -> Layout {
    let layout = Layout::for_shape(shape, seed);
    let layout = if host_is_source(shape) { layout.reversed() } else { layout };
    if host == HostLayout::Packed { layout.packed() } else { layout }
}

/// The shape with its parts shortened in proportion.
fn cut(shape: &Shape, most_pieces: u64) -> Shape {
    let mut shape = shape.clone();
    let all: u64 = shape.parts.iter().map(|part| part.count).sum();
    if all > most_pieces {
        for part in &mut shape.parts {
            part.count = (part.count * most_pieces / all).max(1);
        }
    }
    shape
}

impl Cache {
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.pages) * u64::from(self.layers) * self.row
    }

    fn layout(&self, host: HostLayout, seed: u64) -> Layout {
        let mut random = SmallRng::seed_from_u64(seed);
        let (layers, run, row) = (u64::from(self.layers), u64::from(self.run), self.row);
        let runs = self.pages.div_ceil(self.run);
        let at_source = permutation(runs as usize, &mut random);
        // Rows from one run of the host to the next.
        let (at_destination, spacing): (Vec<u32>, u64) = match host {
            HostLayout::Packed => ((0..runs).collect(), layers * run),
            HostLayout::Scattered => (permutation(runs as usize, &mut random), layers * run + 1),
        };
        // Between two runs of the GPU one page is somebody else's.
        let slots = u64::from(runs) * (run + 1);
        let layer_stride = (slots * row).next_multiple_of(RESERVE) + RESERVE;
        let end = |layer_stride| PagedEnd {
            start: RESERVE,
            page_stride: row,
            layer_stride,
            row_stride: 0,
        };
        let (source, destination) = (end(layer_stride), end(run * row));
        let (mut source_numbers, mut destination_numbers) = (Vec::new(), Vec::new());
        let mut pieces = Vec::with_capacity(self.pages as usize * self.layers as usize);
        for (&from, &to) in at_source.iter().zip(&at_destination) {
            let first = source_numbers.len();
            for page in 0..self.run.min(self.pages - from * self.run) {
                source_numbers.push(from * (self.run + 1) + page);
                destination_numbers.push((u64::from(to) * spacing) as u32 + page);
            }
            for layer in 0..layers {
                let pages = source_numbers[first..].iter().zip(&destination_numbers[first..]);
                pieces.extend(pages.map(|(&from, &to)| Piece {
                    source: source.row(from, 0) + layer * source.layer_stride,
                    destination: destination.row(to, 0) + layer * destination.layer_stride,
                    len: row,
                }));
            }
        }
        let tensor =
            PagedTensor { layers: self.layers, rows: 1, row_bytes: row, source, destination };
        Layout {
            pieces,
            source_bytes: RESERVE + layers * layer_stride + RESERVE,
            destination_bytes: RESERVE + u64::from(runs) * spacing * row + RESERVE,
            paged: Some(PagedPieces { source_numbers, destination_numbers, tensors: vec![tensor] }),
        }
    }

    /// The same pieces of the GPU, end to end on the host in random order.
    fn shuffled(&self, seed: u64) -> Layout {
        let mut layout = self.layout(HostLayout::Packed, seed);
        layout.pieces.shuffle(&mut SmallRng::seed_from_u64(seed.wrapping_add(1)));
        layout.packed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::tests::assert_sound;

    fn shape(id: &str) -> Shape {
        Shape::all().iter().find(|shape| shape.id == id).expect("in the table").clone()
    }

    #[test]
    fn every_layout_is_sound_and_packed_hosts_are_contiguous_in_list_order() {
        let cache = "12x4x48:4".parse::<Cache>().expect("a cache");
        let mut cases = vec![
            Case::Cache(cache),
            Case::Shuffled(cache),
            Case::Item { bytes: 656, count: 50 },
            Case::Point { count: 16, bytes: 12 << 10 },
        ];
        cases.extend(
            ["R6", "W09b", "W12a", "W12b", "W13"]
                .map(|id| Case::Shape { shape: shape(id), most_pieces: 100 }),
        );
        for case in cases {
            for host in [HostLayout::Packed, HostLayout::Scattered] {
                let layout = case.layout(host, 5);
                let label = case.label();
                assert!(layout.pieces.len() <= 104, "{label}: {}", layout.pieces.len());
                assert_sound(&layout, &label);
                assert_sound(&layout.clone().reversed(), &label);
                let contiguous = layout
                    .pieces
                    .windows(2)
                    .all(|pair| pair[0].destination_end() == pair[1].destination);
                if host == HostLayout::Packed {
                    assert!(contiguous, "{label}");
                }
            }
        }
    }

    #[test]
    fn a_page_of_a_cache_is_one_run_of_constant_strides_and_neighbours_stay_neighbours() {
        let runs = |layout: &Layout| {
            let runs = crate::forms::runs(&layout.pieces).map(|run| run.count);
            runs.max()
        };
        let page = "6x3x64".parse::<Cache>().expect("a cache").layout(HostLayout::Packed, 1);
        assert_eq!(runs(&page), Some(3), "the layers of a page");
        let cache = "5x3x64:2".parse::<Cache>().expect("a cache");
        for host in [HostLayout::Packed, HostLayout::Scattered] {
            let layout = cache.layout(host, 1);
            assert_sound(&layout, "the last run has one page");
            let together = layout.pieces.windows(2).filter(|pair| {
                let [one, next] = [pair[0], pair[1]];
                one.source + 64 == next.source && one.destination + 64 == next.destination
            });
            assert_eq!(together.count(), 2 * 3, "rows of two pages in two runs of three layers");
        }
        let layout = cache.layout(HostLayout::Packed, 1);
        let shuffled = cache.shuffled(1);
        let sorted = |layout: &Layout| {
            let mut sources: Vec<_> = layout.pieces.iter().map(|piece| piece.source).collect();
            sources.sort_unstable();
            sources
        };
        assert_eq!(sorted(&shuffled), sorted(&layout), "the same bytes of the GPU");
        assert_ne!(
            shuffled.pieces.iter().map(|piece| piece.source).collect::<Vec<_>>(),
            layout.pieces.iter().map(|piece| piece.source).collect::<Vec<_>>()
        );
    }

    #[test]
    fn a_reversed_layout_reads_what_was_written_in_every_form() {
        let cache = "5x3x32".parse::<Cache>().expect("a cache");
        let layout = cache.layout(HostLayout::Scattered, 3);
        let back = layout.clone().reversed();
        assert_eq!(back.clone().reversed(), layout);
        assert_eq!(
            (back.pieces[7].source, back.source_bytes),
            (layout.pieces[7].destination, layout.destination_bytes)
        );
        assert_eq!(
            back.paged.expect("pages").source_numbers,
            layout.paged.expect("pages").destination_numbers
        );
    }

    #[test]
    fn the_sweeps_have_the_points_of_the_shapes_list() {
        assert_eq!(item_sizes().count(), 69);
        assert!(item_sizes().any(|bytes| bytes == 656));
        assert_eq!(grid().count(), 81);
        assert_eq!(grid().max(), Some((4096, 32 << 10)));
    }

    #[test]
    fn what_is_no_cache_is_refused_quoting_it() {
        assert_eq!(
            "14x64x73728".parse::<Cache>().map(|cache| cache.to_string()).as_deref(),
            Ok("14x64x73728")
        );
        for bad in [
            "",
            "4",
            "1x2",
            "1x2x0",
            "1x2x3x4",
            "ax2x3",
            "1x2x3:0",
            "1x2x3:",
            "9999999x9999999x1",
            "1x1x99999999999999",
        ] {
            assert_eq!(bad.parse::<Cache>(), Err(BadCache(bad.to_owned())), "{bad}");
        }
    }
}
