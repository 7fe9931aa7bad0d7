//! Where every piece of a transfer lies: offsets into a source and a destination buffer.
//!
//! A layout depends on its arguments alone, so two processes that build it with the same seed
//! agree without talking. Destination pieces never overlap; the bytes that none covers are guards,
//! and at least [`RESERVE`] of them lie at either end of the buffer.

use std::num::NonZeroU64;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

use crate::forms::{PagedEnd, PagedPieces, PagedTensor};
use crate::model::{HeadSlice, KvModel};
use crate::shape::{Order, Shape};

/// Bytes at both ends of each buffer that no piece covers; a multiple of every shape's alignment.
pub const RESERVE: u64 = 256;

/// One copy of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte to read, from the start of the source buffer.
    pub source: u64,
    /// First byte to write, from the start of the destination buffer.
    pub destination: u64,
    /// Bytes.
    pub len: u64,
}

impl Piece {
    /// The byte after the last one that is written.
    pub fn destination_end(&self) -> u64 {
        self.destination + self.len
    }
}

/// The pieces of one request, in the order that a caller would hand them over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The pieces.
    pub pieces: Vec<Piece>,
    /// Size of the source buffer.
    pub source_bytes: u64,
    /// Size of the destination buffer.
    pub destination_bytes: u64,
    /// The same pieces as pages by number, in any order, where they are pages.
    pub paged: Option<PagedPieces>,
}

impl Layout {
    /// Pieces of which nothing else is known: they are pages if they are equally long.
    pub fn new(pieces: Vec<Piece>, source_bytes: u64, destination_bytes: u64) -> Self {
        let paged = PagedPieces::of_equal_pieces(&pieces);
        Self { pieces, source_bytes, destination_bytes, paged }
    }

    /// Lays out a shape of the built-in table.
    pub fn for_shape(shape: &Shape, seed: u64) -> Self {
        let mut random = SmallRng::seed_from_u64(seed);
        // Each part is a region of its own in both buffers; shuffled lengths share one.
        let mut regions: Vec<usize> = shape.parts.iter().map(|part| part.count as usize).collect();
        let mut pieces = Vec::with_capacity(regions.iter().sum());
        for part in &shape.parts {
            let unplaced = Piece { source: 0, destination: 0, len: part.len };
            pieces.resize(pieces.len() + part.count as usize, unplaced);
        }
        if shape.order == Order::ShuffledMix {
            pieces.shuffle(&mut random);
            regions = vec![pieces.len()];
        }
        let (source, destination) = sides(shape);
        let source_bytes = source.place(&mut pieces, &regions, &mut random);
        let destination_bytes = destination.place(&mut pieces, &regions, &mut random);
        if shape.order == Order::ScatterInterleaved {
            pieces = interleaved(&pieces, &regions);
        }
        Self::new(pieces, source_bytes, destination_bytes)
    }

    /// Lays out the KV cache of `tokens` tokens in pages of `page_tokens`, the last one rounded up.
    ///
    /// Each cache tensor of each layer is a region `[page][bytes]`. A page has the same number in
    /// every tensor, as in a block table, and the numbers are random on both sides. The list runs
    /// layer by layer, tensor by tensor, page by page, and for a slice of the heads token by token:
    /// the source then holds `[page][token][bytes of the slice]`, the destination the rows of all
    /// heads. The slice must be one of [`KvModel::slice_of_heads`].
    pub fn for_model(
        model: &KvModel,
        tokens: NonZeroU64,
        page_tokens: NonZeroU64,
        slice: Option<HeadSlice>,
        seed: u64,
    ) -> Result<Self, TooLarge> {
        let pages = tokens.get().div_ceil(page_tokens.get());
        let rows = if slice.is_some() { page_tokens.get() } else { 1 };
        let descriptors = pages
            .checked_mul(model.tensors.len() as u64)
            .and_then(|of_a_layer| of_a_layer.checked_mul(model.layers.get()))
            .and_then(|whole_pages| whole_pages.checked_mul(rows))
            .filter(|&descriptors| descriptors <= MOST_DESCRIPTORS)
            .ok_or(TooLarge)?;
        let mut random = SmallRng::seed_from_u64(seed);
        let source_numbers = permutation(pages as usize, &mut random);
        let destination_numbers = permutation(pages as usize, &mut random);

        let mut pieces = Vec::with_capacity(descriptors as usize);
        let mut tensors: Vec<PagedTensor> = Vec::with_capacity(model.tensors.len());
        let (mut source_start, mut destination_start) = (RESERVE, RESERVE);
        for layer in 0..model.layers.get() {
            for (index, &token_bytes) in model.tensors.iter().enumerate() {
                let page_bytes = token_bytes.checked_mul(page_tokens).ok_or(TooLarge)?.get();
                let token_bytes = token_bytes.get();
                let end = |start, page_stride, row_stride| PagedEnd {
                    start,
                    page_stride,
                    layer_stride: 0,
                    row_stride,
                };
                let (row_bytes, source, destination) = match slice {
                    None => {
                        let end = |start| end(start, page_bytes, 0);
                        (page_bytes, end(source_start), end(destination_start))
                    }
                    Some(slice) => {
                        let row_bytes = token_bytes / slice.of();
                        let inside = destination_start.checked_add(slice.index() * row_bytes);
                        let source = end(source_start, page_bytes / slice.of(), row_bytes);
                        (row_bytes, source, end(inside.ok_or(TooLarge)?, page_bytes, token_bytes))
                    }
                };
                source_start = region_after(source_start, source.page_stride, pages)?;
                destination_start = region_after(destination_start, page_bytes, pages)?;
                for (&source_number, &destination_number) in
                    source_numbers.iter().zip(&destination_numbers)
                {
                    pieces.extend((0..rows).map(|row| Piece {
                        source: source.row(source_number, row),
                        destination: destination.row(destination_number, row),
                        len: row_bytes,
                    }));
                }
                match layer {
                    0 => tensors.push(PagedTensor {
                        layers: model.layers.get() as u32,
                        rows: rows as u32,
                        row_bytes,
                        source,
                        destination,
                    }),
                    // Every layer is laid out as the first.
                    1 => {
                        let first = &mut tensors[index];
                        first.source.layer_stride = source.start - first.source.start;
                        first.destination.layer_stride =
                            destination.start - first.destination.start;
                    }
                    _ => {}
                }
            }
        }
        Ok(Self {
            pieces,
            source_bytes: source_start,
            destination_bytes: destination_start,
            paged: Some(PagedPieces { source_numbers, destination_numbers, tensors }),
        })
    }

    /// The same copies the other way: what was read is written.
    pub fn reversed(mut self) -> Self {
        std::mem::swap(&mut self.source_bytes, &mut self.destination_bytes);
        for piece in &mut self.pieces {
            std::mem::swap(&mut piece.source, &mut piece.destination);
        }
        if let Some(paged) = &mut self.paged {
            paged.reverse();
        }
        self
    }

    /// The same source, and the pieces end to end at the destination, in the order of the list.
    pub fn packed(mut self) -> Self {
        let mut end = RESERVE;
        for piece in &mut self.pieces {
            piece.destination = end;
            end += piece.len;
        }
        Self::new(self.pieces, self.source_bytes, end + RESERVE)
    }

    /// Bytes that the transfer moves.
    pub fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len).sum()
    }
}

/// The cache of so many tokens is beyond 64-bit addresses or 2^26 descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "so many tokens need more than {MOST_DESCRIPTORS} descriptors or more bytes than 64 bits can address"
)]
pub struct TooLarge;

/// Where the region after one of so many pages begins. Tensors are allocations of their own:
/// aligned, with a guard between them.
fn region_after(start: u64, page_bytes: u64, pages: u64) -> Result<u64, TooLarge> {
    page_bytes
        .checked_mul(pages)
        .and_then(|bytes| start.checked_add(bytes))
        .and_then(|end| end.checked_next_multiple_of(RESERVE))
        .and_then(|end| end.checked_add(RESERVE))
        .ok_or(TooLarge)
}

/// Forty times the largest shape; 1.5 GiB of pieces.
const MOST_DESCRIPTORS: u64 = 1 << 26;

/// How one side of a shape lies: slots one after the other, each with the pieces of one slot.
struct Side {
    field: fn(&mut Piece) -> &mut u64,
    /// Slots are visited in random order instead of list order.
    random: bool,
    /// Bytes between slots; 0 rounds a slot's own bytes up to the alignment and adds `gap`.
    stride: u64,
    align: u64,
    gap: u64,
    shift: u64,
    pieces_per_slot: usize,
    /// The buffer has at least so many slots, used or not.
    least_slots: usize,
}

fn sides(shape: &Shape) -> (Side, Side) {
    let (random_source, random_destination) = match shape.order {
        Order::Scatter | Order::ScatterInterleaved | Order::ShuffledMix | Order::SlotInPage => {
            (true, true)
        }
        Order::ScatterToPacked | Order::ScatterOf8192Blocks => (true, false),
        Order::StridedToScatter => (false, true),
        Order::Strided | Order::OneSegment => (false, false),
    };
    let side = |field, random, stride, shift| Side {
        field,
        random,
        stride,
        align: shape.align,
        gap: shape.align,
        shift,
        pieces_per_slot: if shape.order == Order::SlotInPage {
            (stride / shape.parts[0].len) as usize
        } else {
            1
        },
        least_slots: 0,
    };
    let mut source =
        side(|piece| &mut piece.source, random_source, shape.src_stride, shape.src_shift);
    let destination =
        side(|piece| &mut piece.destination, random_destination, shape.dst_stride, shape.dst_shift);
    match shape.order {
        Order::ScatterOf8192Blocks => source.least_slots = 8192,
        Order::OneSegment => source.gap = 0,
        _ => {}
    }
    (source, destination)
}

impl Side {
    /// Gives every piece its offset on this side and returns the size of the buffer. The pieces of
    /// one region, `regions` counts them, lie before those of the next.
    fn place(&self, mut pieces: &mut [Piece], regions: &[usize], random: &mut SmallRng) -> u64 {
        let mut end = RESERVE;
        for &count in regions {
            let region = pieces.split_off_mut(..count).expect("the regions count every piece once");
            end = self.place_region(region, end, random);
        }
        end + self.shift + RESERVE
    }

    fn place_region(&self, pieces: &mut [Piece], start: u64, random: &mut SmallRng) -> u64 {
        let slots = pieces.len().div_ceil(self.pieces_per_slot).max(self.least_slots);
        let visit =
            if self.random { permutation(slots, random) } else { (0..slots as u32).collect() };
        let mut slot_start = start;
        for slot in visit {
            let first = slot as usize * self.pieces_per_slot;
            let mut end = slot_start;
            for piece in pieces.iter_mut().skip(first).take(self.pieces_per_slot) {
                *(self.field)(piece) = end + self.shift;
                end += piece.len;
            }
            slot_start = match self.stride {
                0 => end.next_multiple_of(self.align) + self.gap,
                stride => slot_start + stride,
            };
        }
        slot_start
    }
}

/// The pieces of all regions by turns; a region that runs out is passed over.
fn interleaved(pieces: &[Piece], regions: &[usize]) -> Vec<Piece> {
    let mut rest = pieces.iter();
    let mut runs: Vec<_> = regions
        .iter()
        .map(|&count| {
            let run = rest.clone().take(count);
            rest = rest.as_slice()[count..].iter();
            run
        })
        .collect();
    let mut list = Vec::with_capacity(pieces.len());
    while list.len() < pieces.len() {
        list.extend(runs.iter_mut().filter_map(Iterator::next));
    }
    list
}

pub(crate) fn permutation(count: usize, random: &mut SmallRng) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..count as u32).collect();
    numbers.shuffle(random);
    numbers
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::shape::Part;

    fn shape(id: &str) -> &'static Shape {
        Shape::all().iter().find(|shape| shape.id == id).unwrap()
    }

    /// Panics where a piece leaves its buffer or its reserve, or two pieces share a byte.
    pub(crate) fn assert_sound(layout: &Layout, what: &str) {
        for (side, bytes) in [
            ((|piece| piece.source) as fn(&Piece) -> u64, layout.source_bytes),
            (|piece| piece.destination, layout.destination_bytes),
        ] {
            let mut ranges: Vec<_> =
                layout.pieces.iter().map(|piece| (side(piece), piece.len)).collect();
            ranges.sort_unstable();
            let mut end = RESERVE;
            for (start, len) in ranges {
                assert!(start >= end, "{what}: the piece at {start} overlaps what ends at {end}");
                end = start + len;
            }
            assert!(end + RESERVE <= bytes, "{what}: pieces end at {end} of {bytes}");
        }
    }

    #[test]
    fn every_shape_keeps_its_counts_and_stays_in_bounds_without_overlap() {
        for shape in Shape::all() {
            let layout = Layout::for_shape(shape, 7);
            assert_eq!(layout.pieces.len() as u64, shape.descriptors, "{}", shape.id);
            assert_eq!(layout.bytes(), shape.bytes, "{}", shape.id);
            for part in &shape.parts {
                let count = layout.pieces.iter().filter(|piece| piece.len == part.len).count();
                assert_eq!(count as u64, part.count, "{}: pieces of {} bytes", shape.id, part.len);
            }
            assert_sound(&layout, &shape.id);
        }
    }

    #[test]
    fn every_shape_keeps_its_alignment_beside_its_shift() {
        for shape in Shape::all() {
            for piece in Layout::for_shape(shape, 7).pieces {
                let offsets = (piece.source - shape.src_shift, piece.destination - shape.dst_shift);
                assert_eq!(
                    (offsets.0 % shape.align, offsets.1 % shape.align),
                    (0, 0),
                    "{}: {piece:?}",
                    shape.id
                );
            }
        }
    }

    #[test]
    fn the_seed_alone_decides_a_random_layout() {
        let shape = shape("R3");
        assert_eq!(Layout::for_shape(shape, 1), Layout::for_shape(shape, 1));
        assert_ne!(Layout::for_shape(shape, 1), Layout::for_shape(shape, 2));
    }

    #[test]
    fn packed_shapes_have_a_guard_between_any_two_pieces() {
        for shape in Shape::all().iter().filter(|shape| shape.dst_stride == 0) {
            let mut ranges: Vec<_> = Layout::for_shape(shape, 3)
                .pieces
                .iter()
                .map(|piece| (piece.destination, piece.len))
                .collect();
            ranges.sort_unstable();
            assert!(
                ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 < pair[1].0),
                "{}",
                shape.id
            );
        }
    }

    #[test]
    fn the_misaligned_shape_is_the_aligned_one_moved() {
        let aligned = Layout::for_shape(shape("R6"), 3);
        let misaligned = Layout::for_shape(shape("R6m"), 3);
        for (aligned, misaligned) in aligned.pieces.iter().zip(&misaligned.pieces) {
            assert_eq!(
                (aligned.source + 5, aligned.destination + 11),
                (misaligned.source, misaligned.destination)
            );
        }
    }

    #[test]
    fn scattered_pieces_follow_neither_side() {
        let pieces = Layout::for_shape(shape("R2"), 3).pieces;
        let neighbours = |side: fn(&Piece) -> u64| {
            pieces
                .windows(2)
                .filter(|pair| side(&pair[1]).abs_diff(side(&pair[0])) <= 2112 + 64)
                .count()
        };
        assert!(
            neighbours(|piece| piece.source) < 20 && neighbours(|piece| piece.destination) < 20
        );
    }

    #[test]
    fn interleaved_parts_alternate_in_the_list() {
        let lengths: Vec<u64> =
            Layout::for_shape(shape("W04"), 3).pieces[..4].iter().map(|piece| piece.len).collect();
        assert_eq!(lengths, [73_728, 8_448, 73_728, 8_448]);
    }

    #[test]
    fn slots_are_adjacent_on_both_sides_inside_a_page_only() {
        let pieces = Layout::for_shape(shape("W05b"), 3).pieces;
        let merged = 1 + pieces
            .windows(2)
            .filter(|pair| {
                pair[0].source + pair[0].len != pair[1].source
                    || pair[0].destination + pair[0].len != pair[1].destination
            })
            .count();
        // 4563 slots are 107 pages of 43; two pages may lie side by side on both sides by chance.
        assert!((105..=107).contains(&merged), "{merged}");
    }

    #[test]
    fn strided_and_packed_sides_follow_the_list() {
        let token_rows = Layout::for_shape(shape("W06"), 3).pieces;
        for (index, piece) in (0u64..).zip(&token_rows) {
            assert_eq!(
                (piece.source, piece.destination),
                (RESERVE + index * 4608, RESERVE + index * 576)
            );
        }
        for (index, piece) in (0u64..).zip(&Layout::for_shape(shape("W10"), 3).pieces) {
            assert_eq!(piece.destination, RESERVE + index * 656);
        }
        for (index, piece) in (0u64..).zip(&Layout::for_shape(shape("W12a"), 3).pieces) {
            assert_eq!(piece.source, RESERVE + index * 32_768);
        }
    }

    #[test]
    fn blocks_of_a_wide_stride_cross_4_gib() {
        let layout = Layout::for_shape(shape("W15"), 3);
        assert_eq!(layout.source_bytes, 8192 * 1_002_240 + 2 * RESERVE);
        assert!(layout.pieces.iter().any(|piece| piece.source > 1 << 32));
        assert!(layout.destination_bytes < 4096 * 8448 + 4096);
    }

    #[test]
    fn one_segment_is_contiguous_at_the_source_and_separate_at_the_destination() {
        let pieces = Layout::for_shape(shape("W18"), 3).pieces;
        assert!(pieces.windows(2).all(|pair| pair[0].source + pair[0].len == pair[1].source));
        assert!(
            pieces
                .windows(2)
                .all(|pair| pair[0].destination + pair[0].len + 64 == pair[1].destination)
        );
    }

    #[test]
    fn a_model_has_a_piece_for_every_layer_tensor_and_page() {
        let model: KvModel = "qwen2.5-7b".parse().unwrap();
        let page = NonZeroU64::new(16).unwrap();
        let layout =
            Layout::for_model(&model, NonZeroU64::new(1000).unwrap(), page, None, 5).unwrap();
        assert_eq!(layout.pieces.len(), 28 * 2 * 63);
        assert_eq!(layout.bytes(), 63 * 16 * model.bytes_per_token().unwrap());
        assert_sound(&layout, "qwen2.5-7b");
    }

    #[test]
    fn a_slice_of_the_heads_is_packed_at_the_source_and_between_the_others_at_the_destination() {
        let model: KvModel = "qwen2.5-7b".parse().unwrap();
        let number = |number| NonZeroU64::new(number).unwrap();
        let slice = "2/4".parse().unwrap();
        let layout = Layout::for_model(&model, number(40), number(16), Some(slice), 5).unwrap();
        assert_eq!(layout.pieces.len(), 28 * 2 * 3 * 16);
        assert_eq!(layout.bytes(), 3 * 16 * model.bytes_per_token().unwrap() / 4);
        assert_sound(&layout, "qwen2.5-7b 2/4");
        assert!(layout.pieces.iter().all(|piece| piece.len == 256));
        for piece in &layout.pieces[..3 * 16] {
            assert_eq!((piece.destination - RESERVE) % 1024, 256, "the second of four rows");
        }
        for page in layout.pieces.chunks(16) {
            for rows in page.windows(2) {
                let steps =
                    (rows[1].source - rows[0].source, rows[1].destination - rows[0].destination);
                assert_eq!(steps, (256, 1024));
            }
        }
        assert!(layout.source_bytes * 3 < layout.destination_bytes);
    }

    #[test]
    fn a_model_with_absurd_numbers_is_refused_before_memory_is_taken() {
        let number = |number| NonZeroU64::new(number).unwrap();
        let model = |layers, tensor| KvModel {
            name: String::new(),
            layers: number(layers),
            tensors: vec![number(tensor)],
            heads: None,
        };
        for (model, tokens, page) in [
            (model(1, 1), u64::MAX, 1),
            (model(u64::MAX, 1), 2, 1),
            (model(1 << 26, 1), 2, 1),
            (model(1, u64::MAX), 1, 2),
            (model(1, 1 << 60), 64, 1),
            (model(1, u64::MAX - 1), 1, 1),
            (model(2, u64::MAX / 2), 1, 1),
        ] {
            let layout = Layout::for_model(&model, number(tokens), number(page), None, 0);
            assert_eq!(layout, Err(TooLarge), "{model:?}, {tokens} tokens, {page} a page");
        }
    }

    proptest! {
        #[test]
        fn shapes_of_any_parts_and_order_are_sound(
            parts in prop::collection::vec((1u64..40, 1u64..5000).prop_map(|(count, len)| Part { count, len }), 1..4),
            align in prop::sample::select(vec![4u64, 16, 64, 256]),
            order in prop::sample::select(vec![
                Order::Scatter, Order::ScatterInterleaved, Order::ShuffledMix, Order::Strided,
                Order::ScatterToPacked, Order::StridedToScatter, Order::OneSegment,
            ]),
            shifts in (0u64..300, 0u64..300),
            seed: u64,
        ) {
            let shape = Shape {
                id: "drawn".to_owned(),
                name: None,
                descriptors: parts.iter().map(|part| part.count).sum(),
                bytes: parts.iter().map(|part| part.count * part.len).sum(),
                parts,
                order,
                src_stride: 0,
                dst_stride: 0,
                src_shift: shifts.0,
                dst_shift: shifts.1,
                align,
                dir: String::new(),
            };
            let layout = Layout::for_shape(&shape, seed);
            prop_assert_eq!(layout.pieces.len() as u64, shape.descriptors);
            prop_assert_eq!(layout.bytes(), shape.bytes);
            assert_sound(&layout, "drawn");
        }

        #[test]
        fn models_of_any_size_are_sound(
            layers in 1u64..5, tensors in prop::collection::vec(1u64..3000, 1..3),
            tokens in 1u64..200, page in 1u64..70, seed: u64,
        ) {
            let number = |number| NonZeroU64::new(number).unwrap();
            let model = KvModel {
                name: String::new(),
                layers: number(layers),
                tensors: tensors.into_iter().map(number).collect(),
                heads: None,
            };
            let layout = Layout::for_model(&model, number(tokens), number(page), None, seed).unwrap();
            let whole_pages = tokens.next_multiple_of(page);
            prop_assert_eq!(layout.bytes(), whole_pages * model.bytes_per_token().unwrap());
            assert_sound(&layout, "drawn");
        }
    }
}
