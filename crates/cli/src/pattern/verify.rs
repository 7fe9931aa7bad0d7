//! The check of every byte of a destination.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;

use super::{CHUNK_BYTES, Pattern, threads};
use crate::layout::{Layout, Piece};

/// Checks destination buffers of one layout, as often as needed.
#[derive(Debug)]
pub struct Verifier {
    destination_bytes: u64,
    /// The pieces and their indices, by destination offset. Copies, because following an index
    /// into a shuffled list of a million pieces would cost more than comparing them.
    by_destination: Vec<(usize, Piece)>,
    /// Indices of pieces whose bytes may be anything.
    undefined: HashSet<usize>,
}

impl Verifier {
    /// Sorts the pieces of `layout`, whose destinations must not overlap.
    pub fn new(layout: &Layout) -> Self {
        let mut by_destination: Vec<_> = layout.pieces.iter().copied().enumerate().collect();
        by_destination.sort_unstable_by_key(|(_, piece)| piece.destination);
        let undefined = HashSet::new();
        Self { destination_bytes: layout.destination_bytes, by_destination, undefined }
    }

    /// Leaves out the pieces that begin in one of these runs of bytes of the destination, each a
    /// start and a length. Everything beside them is still checked.
    pub fn without(mut self, runs: &[(u64, u64)]) -> Self {
        let before =
            |offset| self.by_destination.partition_point(|(_, piece)| piece.destination < offset);
        for &(start, length) in runs {
            let pieces = &self.by_destination[before(start)..before(start + length)];
            self.undefined.extend(pieces.iter().map(|(index, _)| index));
        }
        self
    }

    /// Reads the whole destination buffer, a chunk at a time, and compares every byte; several
    /// threads share the work. `read` fills its slice from the offset that it gets; what it fails
    /// with comes back.
    pub fn verify<E: Send>(
        &self,
        seed: u64,
        guard_seed: u64,
        read: impl Fn(u64, &mut [u8]) -> Result<(), E> + Sync,
    ) -> Result<Result<Verified, Mismatch>, E> {
        self.verify_in_chunks(threads(), CHUNK_BYTES, seed, guard_seed, read)
    }

    fn verify_in_chunks<E: Send>(
        &self,
        parts: u64,
        chunk_bytes: u64,
        seed: u64,
        guard_seed: u64,
        read: impl Fn(u64, &mut [u8]) -> Result<(), E> + Sync,
    ) -> Result<Result<Verified, Mismatch>, E> {
        // About as many bytes each; a piece belongs to the part that it begins in.
        let cut = |part| {
            let offset = u128::from(self.destination_bytes) * u128::from(part) / u128::from(parts);
            self.by_destination.partition_point(|(_, piece)| u128::from(piece.destination) < offset)
        };
        let verify = |part| {
            let pieces = self.by_destination.len();
            // The last one has the guard behind all pieces, too.
            let (end, whole) = match part + 1 == parts {
                true => (pieces, Some(self.destination_bytes)),
                false => (cut(part + 1), None),
            };
            self.verify_part(cut(part)..end, whole, chunk_bytes, seed, guard_seed, &read)
        };
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let verify = &verify;
            let threads: Vec<_> =
                (0..parts).map(|part| scope.spawn(move || verify(part))).collect();
            threads
                .into_iter()
                .map(|thread| {
                    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                })
                .collect()
        });
        let mut verified = Verified { piece_bytes: 0, guard_bytes: 0 };
        for outcome in outcomes {
            match outcome? {
                Ok(part) => {
                    verified.piece_bytes += part.piece_bytes;
                    verified.guard_bytes += part.guard_bytes;
                }
                Err(mismatch) => return Ok(Err(mismatch)),
            }
        }
        Ok(Ok(verified))
    }

    /// Front to back, from the end of the piece before these to `end`, or to the end of the last.
    fn verify_part<E>(
        &self,
        pieces: Range<usize>,
        end: Option<u64>,
        chunk_bytes: u64,
        seed: u64,
        guard_seed: u64,
        read: &impl Fn(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<Result<Verified, Mismatch>, E> {
        let (source, guard) = (Pattern::source(seed), Pattern::guard(guard_seed));
        let before = pieces.start.checked_sub(1).map(|before| self.by_destination[before]);
        let last = self.by_destination[pieces.clone()].last().copied().or(before);
        let last_end = last.map_or(0, |(_, piece)| piece.destination_end());
        let total = end.unwrap_or(last_end);
        let mut buffer = Vec::new();
        let mut chunk = 0..0;
        let mut verified = Verified { piece_bytes: 0, guard_bytes: 0 };
        let is_defined = |region: &Region| match region.place {
            Place::Piece { index } => !self.undefined.contains(&index),
            Place::Guard { .. } => true,
        };
        for region in regions(before, &self.by_destination[pieces], total).filter(is_defined) {
            let (pattern, checked) = match region.place {
                Place::Piece { .. } => (&source, &mut verified.piece_bytes),
                Place::Guard { .. } => (&guard, &mut verified.guard_bytes),
            };
            *checked += region.range.end - region.range.start;
            let mut offset = region.range.start;
            while offset < region.range.end {
                if !chunk.contains(&offset) {
                    chunk = offset..total.min(offset + chunk_bytes);
                    buffer.resize((chunk.end - chunk.start) as usize, 0);
                    read(offset, &mut buffer)?;
                }
                let end = region.range.end.min(chunk.end);
                let found = &buffer[(offset - chunk.start) as usize..(end - chunk.start) as usize];
                let pattern_offset = region.pattern_offset + (offset - region.range.start);
                if let Some(wrong) = pattern.first_difference(pattern_offset, found) {
                    return Ok(Err(Mismatch {
                        offset: offset + wrong as u64,
                        expected: pattern.byte(pattern_offset + wrong as u64),
                        found: found[wrong],
                        place: region.place,
                    }));
                }
                offset = end;
            }
        }
        Ok(Ok(verified))
    }
}

/// A part of a destination buffer from front to back: a guard, which may be empty, before each
/// piece, and one after the last, up to `end`. It begins where the piece `before` them ends.
fn regions(
    before: Option<(usize, Piece)>,
    pieces: &[(usize, Piece)],
    end: u64,
) -> impl Iterator<Item = Region> {
    let mut guard_start = before.map_or(0, |(_, piece)| piece.destination_end());
    let mut after = before.map(|(index, _)| index);
    let last = pieces.last().copied().or(before);
    let rest = last.map_or(0, |(_, piece)| piece.destination_end())..end;
    let guards_and_pieces = pieces.iter().flat_map(move |&(index, piece)| {
        let guard = Region::guard(guard_start..piece.destination, after.replace(index));
        guard_start = piece.destination_end();
        [guard, Region::piece(index, piece)]
    });
    guards_and_pieces.chain([Region::guard(rest, last.map(|(index, _)| index))])
}

/// What a check covered; the two sums are the size of the destination buffer, unless something was
/// left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Bytes that held the source's bytes.
    pub piece_bytes: u64,
    /// Bytes that held the guard pattern.
    pub guard_bytes: u64,
}

/// The first wrong byte of a destination buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("destination byte {offset} is {found:#04x}, expected {expected:#04x}: {place}")]
pub struct Mismatch {
    /// From the start of the destination buffer.
    pub offset: u64,
    /// What belongs there.
    pub expected: u8,
    /// What is there.
    pub found: u8,
    /// What the byte is part of.
    pub place: Place,
}

/// A part of a destination buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The piece of this index in the layout.
    Piece {
        /// Index in the layout's list.
        index: usize,
    },
    /// Bytes that no piece covers.
    Guard {
        /// The piece that lies before them; `None` at the start of the buffer.
        after: Option<usize>,
    },
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Piece { index } => write!(formatter, "piece {index}"),
            Self::Guard { after: Some(index) } => write!(formatter, "guard after piece {index}"),
            Self::Guard { after: None } => write!(formatter, "guard before the first piece"),
        }
    }
}

/// A run of destination bytes that continue one pattern.
struct Region {
    range: Range<u64>,
    pattern_offset: u64,
    place: Place,
}

impl Region {
    fn guard(range: Range<u64>, after: Option<usize>) -> Self {
        Self { pattern_offset: range.start, range, place: Place::Guard { after } }
    }

    fn piece(index: usize, piece: Piece) -> Self {
        Self {
            range: piece.destination..piece.destination_end(),
            pattern_offset: piece.source,
            place: Place::Piece { index },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::pattern::{guard_fill, source_fill};
    use crate::shape::Shape;

    const SEED: u64 = 11;
    const GUARD_SEED: u64 = 12;

    fn layout(id: &str) -> Layout {
        Layout::for_shape(Shape::all().iter().find(|shape| shape.id == id).unwrap(), 3)
    }

    /// A small layout with odd lengths and offsets; some neighbours touch, some do not.
    fn odd_layout() -> Layout {
        let pieces =
            [(70, 300, 33), (8, 17, 21), (200, 100, 64), (3, 164, 1), (120, 340, 48), (20, 40, 8)]
                .map(|(source, destination, len)| Piece { source, destination, len })
                .to_vec();
        Layout::new(pieces, 300, 400)
    }

    /// The destination after the copies of `pieces`, as the patterns lay it out.
    fn destination_after(layout: &Layout, pieces: &[Piece]) -> Vec<u8> {
        let mut source = vec![0; layout.source_bytes as usize];
        let mut destination = vec![0; layout.destination_bytes as usize];
        source_fill(0, &mut source, SEED);
        guard_fill(0, &mut destination, GUARD_SEED);
        for piece in pieces {
            let from = &source[piece.source as usize..][..piece.len as usize];
            destination[piece.destination as usize..][..piece.len as usize].copy_from_slice(from);
        }
        destination
    }

    fn verify(layout: &Layout, destination: &[u8], chunk_bytes: u64) -> Result<Verified, Mismatch> {
        verify_in_parts(1, layout, destination, chunk_bytes)
    }

    fn verify_in_parts(
        parts: u64,
        layout: &Layout,
        destination: &[u8],
        chunk_bytes: u64,
    ) -> Result<Verified, Mismatch> {
        let Ok(outcome) = Verifier::new(layout).verify_in_chunks(
            parts,
            chunk_bytes,
            SEED,
            GUARD_SEED,
            reader(destination),
        );
        outcome
    }

    fn reader(buffer: &[u8]) -> impl Fn(u64, &mut [u8]) -> Result<(), Infallible> + Sync {
        |offset, bytes| {
            bytes.copy_from_slice(&buffer[offset as usize..][..bytes.len()]);
            Ok(())
        }
    }

    #[test]
    fn a_complete_transfer_of_a_real_shape_verifies() {
        for id in ["R2", "R6m", "W01c", "W07b"] {
            let layout = layout(id);
            let verified =
                verify(&layout, &destination_after(&layout, &layout.pieces), CHUNK_BYTES).unwrap();
            assert_eq!(verified.piece_bytes, layout.bytes(), "{id}");
            assert_eq!(
                verified.piece_bytes + verified.guard_bytes,
                layout.destination_bytes,
                "{id}"
            );
        }
    }

    #[test]
    fn a_flipped_bit_is_found_at_every_byte_and_chunk_size() {
        let layout = odd_layout();
        let mut destination = destination_after(&layout, &layout.pieces);
        for (parts, chunk_bytes) in [(1, 1), (1, 7), (1, 8), (2, 61), (3, 400), (7, 61)] {
            let verify =
                |destination: &[u8]| verify_in_parts(parts, &layout, destination, chunk_bytes);
            let verified = verify(&destination).expect("nothing is wrong yet");
            assert_eq!(verified.piece_bytes + verified.guard_bytes, 400, "{parts} parts");
            for offset in 0..destination.len() {
                let right = destination[offset];
                destination[offset] ^= 0x10;
                let mismatch = verify(&destination).unwrap_err();
                let index = layout.pieces.iter().position(|piece| {
                    (piece.destination..piece.destination_end()).contains(&(offset as u64))
                });
                let before = || {
                    let ended = layout
                        .pieces
                        .iter()
                        .filter(|piece| piece.destination_end() <= offset as u64);
                    let last = ended.max_by_key(|piece| piece.destination)?;
                    layout.pieces.iter().position(|piece| piece == last)
                };
                let place = index.map_or_else(
                    || Place::Guard { after: before() },
                    |index| Place::Piece { index },
                );
                let expected =
                    Mismatch { offset: offset as u64, expected: right, found: right ^ 0x10, place };
                assert_eq!(mismatch, expected, "{parts} parts, chunks of {chunk_bytes}");
                destination[offset] = right;
            }
        }
    }

    #[test]
    fn a_piece_that_never_arrived_is_named() {
        let layout = layout("R2");
        let destination = destination_after(&layout, &layout.pieces[..3839]);
        assert_eq!(
            verify(&layout, &destination, CHUNK_BYTES).unwrap_err().place,
            Place::Piece { index: 3839 }
        );
    }

    #[test]
    fn a_copy_shifted_on_either_side_is_found() {
        let layout = layout("R2");
        for shift in [1, 2, 4, 8, 16, 64] {
            for (source_shift, destination_shift) in [(shift, 0), (0, shift)] {
                let mut pieces = layout.pieces.clone();
                pieces[17].source += source_shift;
                pieces[17].destination += destination_shift;
                let destination = destination_after(&layout, &pieces);
                let mismatch = verify(&layout, &destination, CHUNK_BYTES).unwrap_err();
                assert_eq!(mismatch.place, Place::Piece { index: 17 }, "{:?}", pieces[17]);
            }
        }
    }

    #[test]
    fn two_swapped_pieces_are_found() {
        let layout = layout("R6");
        let mut pieces = layout.pieces.clone();
        let source = pieces[5].source;
        pieces[5].source = pieces[6].source;
        pieces[6].source = source;
        let mismatch =
            verify(&layout, &destination_after(&layout, &pieces), CHUNK_BYTES).unwrap_err();
        assert!([5, 6].map(|index| Place::Piece { index }).contains(&mismatch.place), "{mismatch}");
    }

    #[test]
    fn a_copy_one_byte_too_long_is_found_in_the_guard_behind() {
        let layout = layout("R6m");
        let mut pieces = layout.pieces.clone();
        pieces[9].len += 1;
        let mismatch =
            verify(&layout, &destination_after(&layout, &pieces), CHUNK_BYTES).unwrap_err();
        assert_eq!(mismatch.place, Place::Guard { after: Some(9) });
        assert_eq!(mismatch.offset, layout.pieces[9].destination_end());
    }

    #[test]
    fn a_piece_that_is_left_out_may_hold_anything_and_nothing_beside_it() {
        let layout = odd_layout();
        let mut destination = destination_after(&layout, &layout.pieces);
        let undefined = [0, 1, 3].map(|index: usize| {
            let piece = layout.pieces[index];
            destination[piece.destination as usize..piece.destination_end() as usize].fill(0xee);
            (piece.destination, piece.len)
        });
        for chunk_bytes in [1, 64, 4097, CHUNK_BYTES] {
            let check = |destination: &Vec<u8>| {
                let verifier = Verifier::new(&layout).without(&undefined);
                let read = reader(destination);
                let Ok(outcome) = verifier.verify_in_chunks(3, chunk_bytes, SEED, GUARD_SEED, read);
                outcome
            };
            let verified = check(&destination).unwrap();
            let left_out: u64 = undefined.iter().map(|(_, length)| length).sum();
            let whole = layout.destination_bytes - left_out;
            assert_eq!(verified.piece_bytes + verified.guard_bytes, whole);
            let ends = undefined.iter().flat_map(|(start, length)| [start - 1, start + length]);
            for beside in ends {
                let mut destination = destination.clone();
                destination[beside as usize] ^= 1;
                assert_eq!(check(&destination).unwrap_err().offset, beside);
            }
        }
    }

    #[test]
    fn a_stale_round_is_found_by_its_seed() {
        let layout = odd_layout();
        let destination = destination_after(&layout, &layout.pieces);
        let Ok(outcome) = Verifier::new(&layout).verify(SEED + 1, GUARD_SEED, reader(&destination));
        assert!(matches!(outcome.unwrap_err().place, Place::Piece { .. }));
    }

    #[test]
    fn a_failed_read_comes_back_as_it_is() {
        let outcome =
            Verifier::new(&odd_layout()).verify(SEED, GUARD_SEED, |offset, _| Err(offset));
        assert_eq!(outcome, Err(0));
    }

    #[test]
    fn a_mismatch_reads_as_one_line() {
        let mismatch = Mismatch {
            offset: 4123,
            expected: 0x3f,
            found: 0,
            place: Place::Guard { after: Some(17) },
        };
        assert_eq!(
            mismatch.to_string(),
            "destination byte 4123 is 0x00, expected 0x3f: guard after piece 17"
        );
    }
}
