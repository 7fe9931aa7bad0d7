//! Layouts for the soak: whatever a seed gives, from one byte to megabytes, at any alignment.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::forms::{PagedEnd, PagedPieces, PagedTensor};
use crate::layout::{Layout, Piece, RESERVE, permutation};

/// Pieces of a layout, at most.
pub const MOST_PIECES: u64 = 50_000;
/// Bytes of a piece, at most.
pub const LONGEST: u64 = 3 << 20;

/// The layout of a seed. It moves at most `most_bytes`, which are at least one; its buffers may be
/// twice as large. The `largest` are those with as many pieces and bytes as there can be.
pub fn layout(seed: u64, most_bytes: u64, largest: bool) -> Layout {
    let mut random = SmallRng::seed_from_u64(seed);
    let count = if largest { MOST_PIECES } else { skewed(&mut random, MOST_PIECES) };
    let count = count.min(most_bytes);
    let longest = LONGEST.min(most_bytes / count);
    let len = if largest { longest } else { skewed(&mut random, longest) };
    match random.random_range(0..3) {
        0 => scattered(&mut random, count, most_bytes, largest),
        1 => strided(&mut random, count, len),
        _ => paged(&mut random, count, len),
    }
}

/// From 1 to `most`, every order of magnitude as likely as another.
fn skewed(random: &mut SmallRng, most: u64) -> u64 {
    let bits = random.random_range(0..=most.ilog2());
    random.random_range(1..=most.min((2 << bits) - 1))
}

/// Between pieces: often nothing, or a few bytes that take the next one off its alignment.
fn gap(random: &mut SmallRng) -> u64 {
    let most = [0, 0, 1, 7, 64][random.random_range(0..5)];
    random.random_range(0..=most)
}

fn shift(random: &mut SmallRng) -> u64 {
    if random.random() { RESERVE } else { RESERVE + random.random_range(0..64) }
}

/// Pieces of any length, in an order of its own on each side.
fn scattered(random: &mut SmallRng, count: u64, most_bytes: u64, largest: bool) -> Layout {
    let longest = if largest { LONGEST } else { skewed(random, LONGEST) }.min(most_bytes);
    let mut pieces = Vec::new();
    let mut left = most_bytes;
    while (pieces.len() as u64) < count && left > 0 {
        let len = skewed(random, longest).min(left);
        pieces.push(Piece { source: 0, destination: 0, len });
        left -= len;
    }
    let mut place = |side: fn(&mut Piece) -> &mut u64| {
        let mut end = shift(random);
        for index in permutation(pieces.len(), random) {
            let piece = &mut pieces[index as usize];
            *side(piece) = end;
            end += piece.len + gap(random);
        }
        end + RESERVE
    };
    let source_bytes = place(|piece| &mut piece.source);
    let destination_bytes = place(|piece| &mut piece.destination);
    Layout::new(pieces, source_bytes, destination_bytes)
}

/// Up to eight runs of constant strides.
fn strided(random: &mut SmallRng, count: u64, len: u64) -> Layout {
    let runs = random.random_range(1..=count.min(8));
    let (mut source, mut destination) = (shift(random), shift(random));
    let mut pieces = Vec::with_capacity(count as usize);
    for _ in 0..runs {
        let len = random.random_range(len.div_ceil(2)..=len);
        let (source_stride, destination_stride) = (len + gap(random), len + gap(random));
        for _ in 0..count / runs {
            pieces.push(Piece { source, destination, len });
            source += source_stride;
            destination += destination_stride;
        }
    }
    Layout::new(pieces, source + RESERVE, destination + RESERVE)
}

/// Pages of one or two tensors over some layers, whole or in rows, layers outside or inside.
fn paged(random: &mut SmallRng, count: u64, row_bytes: u64) -> Layout {
    let tensors = random.random_range(1..=count.min(2));
    let layers = skewed(random, (count / tensors).min(64));
    let rows = skewed(random, (count / tensors / layers).min(128));
    let pages = count / tensors / layers / rows;
    let mut numbers = || {
        // Some numbers are left out.
        let mut numbers = permutation((pages + pages / 8) as usize, random);
        numbers.truncate(pages as usize);
        numbers
    };
    let (source_numbers, destination_numbers) = (numbers(), numbers());
    let highest = pages + pages / 8;
    let mut side = || {
        let row_stride = row_bytes + gap(random);
        let page_bytes = row_stride * rows + gap(random);
        let page_first: bool = random.random();
        let (page_stride, layer_stride) = if page_first {
            (page_bytes * layers, page_bytes)
        } else {
            (page_bytes, page_bytes * highest + gap(random))
        };
        // Tensors lie one behind the other.
        let whole = if page_first { page_stride * highest } else { layer_stride * layers };
        let start = shift(random);
        let ends: Vec<_> = (0..tensors)
            .map(|tensor| PagedEnd {
                start: start + tensor * whole,
                page_stride,
                layer_stride,
                row_stride,
            })
            .collect();
        (ends, start + tensors * whole + RESERVE)
    };
    let ((sources, source_bytes), (destinations, destination_bytes)) = (side(), side());
    let mut pieces = Vec::with_capacity((pages * tensors * layers * rows) as usize);
    let mut paged = PagedPieces { source_numbers, destination_numbers, tensors: Vec::new() };
    for (source, destination) in sources.into_iter().zip(destinations) {
        for layer in 0..layers {
            for (&from, &to) in paged.source_numbers.iter().zip(&paged.destination_numbers) {
                pieces.extend((0..rows).map(|row| Piece {
                    source: source.row(from, row) + layer * source.layer_stride,
                    destination: destination.row(to, row) + layer * destination.layer_stride,
                    len: row_bytes,
                }));
            }
        }
        let (layers, rows) = (layers as u32, rows as u32);
        paged.tensors.push(PagedTensor { layers, rows, row_bytes, source, destination });
    }
    Layout { pieces, source_bytes, destination_bytes, paged: Some(paged) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::case::Direction;
    use crate::forms::{Ends, Form, Request};
    use crate::layout::tests::assert_sound;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn random_layouts_are_sound_and_have_the_same_pieces_in_every_form(
            seed: u64, most_bytes in 1u64..1 << 20, largest: bool,
        ) {
            let layout = layout(seed, most_bytes, largest);
            assert_sound(&layout, "random");
            prop_assert!((1..=most_bytes).contains(&layout.bytes()));
            prop_assert!((1..=MOST_PIECES as usize).contains(&layout.pieces.len()));
            let ends = Ends { local: 1 << 40, remote: 1 << 44, direction: Direction::Read };
            let sorted = |form| {
                let mut ranges = Request::new(&layout, form, ends).ok()?.expanded();
                ranges.sort_unstable_by_key(|range| range.local);
                Some(ranges)
            };
            let ranges = sorted(Form::Ranges);
            for form in [Form::Strided, Form::Paged] {
                let same = sorted(form);
                prop_assert!(same.is_none() || same == ranges, "{:?}", form);
            }
        }
    }

    #[test]
    fn the_largest_layouts_fill_what_they_may() {
        for seed in 0..20 {
            let layout = layout(seed, 32 << 20, true);
            assert!(layout.bytes() > 8 << 20, "seed {seed}: {} bytes", layout.bytes());
        }
    }

    #[test]
    fn a_seed_gives_one_layout_and_all_kinds_come() {
        let kinds: Vec<_> = (0..40)
            .map(|seed| {
                let layout = layout(seed, 1 << 20, false);
                assert_eq!(layout, super::layout(seed, 1 << 20, false));
                Form::Auto.of(&layout).unwrap()
            })
            .collect();
        for form in [Form::Ranges, Form::Strided, Form::Paged] {
            assert!(kinds.contains(&form), "{form:?}");
        }
    }
}
