//! The layout of a model's KV cache.

use std::num::NonZeroU64;

use rand::SeedableRng;
use rand::rngs::SmallRng;

use super::{Layout, Piece, RESERVE, permutation};
use crate::forms::{PagedEnd, PagedPieces, PagedTensor};
use crate::model::{HeadSlice, KvModel};

impl Layout {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::tests::assert_sound;

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
