//! Byte patterns that give a wrong copy away; `verify.rs` checks every byte of a destination.
//!
//! Each aligned 8-byte word of a buffer holds a hash of its own position and a seed, so a piece
//! that is shifted, swapped, stale or missing differs from what belongs there. Destinations start
//! as guard pattern; after a transfer the pieces must hold the source's bytes and all other bytes
//! must still be guard.

mod verify;

use std::sync::atomic::{AtomicU64, Ordering};

pub use self::verify::{Mismatch, Place, Verified, Verifier};

/// Fills `bytes`, which start at `buffer_offset` of a source buffer, with the pattern of `seed`.
pub fn source_fill(buffer_offset: u64, bytes: &mut [u8], seed: u64) {
    Pattern::source(seed).fill(buffer_offset, bytes);
}

/// Fills `bytes`, which start at `buffer_offset` of a destination buffer, with the guard pattern of
/// `guard_seed`; it differs from the source pattern of the same seed.
pub fn guard_fill(buffer_offset: u64, bytes: &mut [u8], guard_seed: u64) {
    Pattern::guard(guard_seed).fill(buffer_offset, bytes);
}

/// Fills a buffer of so many bytes with a pattern; several threads share the work. `write` takes
/// bytes and their offset, and what it fails with comes back.
pub(crate) fn fill_buffer<E: Send>(
    bytes: u64,
    fill: fn(u64, &mut [u8], u64),
    seed: u64,
    write: impl Fn(u64, &[u8]) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let next = AtomicU64::new(0);
    let fill_chunks = || {
        let mut chunk = vec![0; CHUNK_BYTES.min(bytes) as usize];
        loop {
            let offset = next.fetch_add(CHUNK_BYTES, Ordering::Relaxed);
            if offset >= bytes {
                return Ok(());
            }
            let part = &mut chunk[..CHUNK_BYTES.min(bytes - offset) as usize];
            fill(offset, part, seed);
            write(offset, part)?;
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads()).map(|_| scope.spawn(fill_chunks)).collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })
}

/// How many threads share the filling and the checking of a buffer.
pub(crate) fn threads() -> u64 {
    std::thread::available_parallelism().map_or(1, |threads| threads.get().min(8) as u64)
}

const CHUNK_BYTES: u64 = 8 << 20;

/// An endless byte sequence, made of little-endian words on every machine.
struct Pattern {
    key: u64,
    /// Bits to flip in every word.
    mask: u64,
}

impl Pattern {
    fn source(seed: u64) -> Self {
        Self { key: mix(seed), mask: 0 }
    }

    /// The complement of the source pattern, so that the two differ in every byte even at the same
    /// seed and offset.
    fn guard(seed: u64) -> Self {
        Self { key: mix(seed), mask: u64::MAX }
    }

    fn fill(&self, offset: u64, bytes: &mut [u8]) {
        let (head, rest) = bytes.split_at_mut(head_len(offset, bytes.len()));
        let (words, tail) = rest.as_chunks_mut::<8>();
        let first_word = offset.div_ceil(8);
        let tail_offset = 8 * (first_word + words.len() as u64);
        for (index, word) in (first_word..).zip(words) {
            *word = self.word(index);
        }
        head.copy_from_slice(&self.word(offset / 8)[(offset % 8) as usize..][..head.len()]);
        tail.copy_from_slice(&self.word(tail_offset / 8)[..tail.len()]);
    }

    /// Where `bytes` first differ from the pattern at `offset`.
    fn first_difference(&self, offset: u64, bytes: &[u8]) -> Option<usize> {
        // Whole words, because this runs over gigabytes; only a wrong word is looked at by bytes.
        let (head, rest) = bytes.split_at(head_len(offset, bytes.len()));
        let (words, tail) = rest.as_chunks::<8>();
        // `part` starts at `start` of `bytes` and lies inside one word.
        let in_part = |start: usize, part: &[u8]| {
            let offset = offset + start as u64;
            let expected = &self.word(offset / 8)[(offset % 8) as usize..][..part.len()];
            let wrong = part.iter().zip(expected).position(|(found, right)| found != right)?;
            Some(start + wrong)
        };
        let in_words = || {
            let wrong = (offset.div_ceil(8)..)
                .zip(words)
                .position(|(index, word)| *word != self.word(index))?;
            in_part(head.len() + 8 * wrong, &words[wrong])
        };
        in_part(0, head).or_else(in_words).or_else(|| in_part(bytes.len() - tail.len(), tail))
    }

    fn byte(&self, offset: u64) -> u8 {
        self.word(offset / 8)[(offset % 8) as usize]
    }

    fn word(&self, index: u64) -> [u8; 8] {
        (mix(index ^ self.key) ^ self.mask).to_le_bytes()
    }
}

/// Bytes before the first whole word of a run that starts at `offset`.
fn head_len(offset: u64, len: usize) -> usize {
    len.min((offset.next_multiple_of(8) - offset) as usize)
}

/// The finaliser of SplitMix64: every bit of the result depends on every bit of `word`, and no two
/// words have the same result.
fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SEED: u64 = 11;

    #[test]
    fn source_and_guard_differ_in_every_byte_at_the_same_seed() {
        let (mut source, mut guard) = ([0; 4096], [0; 4096]);
        source_fill(3, &mut source, SEED);
        guard_fill(3, &mut guard, SEED);
        assert!(source.iter().zip(&guard).all(|(source, guard)| source != guard));
    }

    proptest! {
        #[test]
        fn a_fill_in_parts_equals_one_fill(
            offset in 0u64..1 << 40, len in 0usize..200, split in 0usize..200, seed: u64,
        ) {
            let split = split.min(len);
            let (mut whole, mut parts) = (vec![0; len], vec![0; len]);
            source_fill(offset, &mut whole, seed);
            source_fill(offset, &mut parts[..split], seed);
            source_fill(offset + split as u64, &mut parts[split..], seed);
            prop_assert_eq!(whole, parts);
        }

        #[test]
        fn a_difference_is_found_where_it_is(
            offset in 0u64..1 << 40, len in 1usize..200, wrong in 0usize..200, flip in 1u8.., seed: u64,
        ) {
            let wrong = wrong % len;
            let pattern = Pattern::source(seed);
            let mut bytes = vec![0; len];
            pattern.fill(offset, &mut bytes);
            prop_assert_eq!(pattern.first_difference(offset, &bytes), None);
            bytes[wrong] ^= flip;
            prop_assert_eq!(pattern.first_difference(offset, &bytes), Some(wrong));
        }
    }
}
