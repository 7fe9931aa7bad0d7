//! Where every piece of a transfer lies: offsets into a source and a destination buffer.
//!
//! A layout depends on its arguments alone, so two processes that build it with the same seed
//! agree without talking. Destination pieces never overlap; the bytes that none covers are guards,
//! and at least [`RESERVE`] of them lie at either end of the buffer.

mod of_model;
mod of_shape;

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

pub use self::of_model::TooLarge;
use crate::forms::PagedPieces;

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

pub(crate) fn permutation(count: usize, random: &mut SmallRng) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..count as u32).collect();
    numbers.shuffle(random);
    numbers
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

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
}
