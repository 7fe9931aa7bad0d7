//! What memory must hold: seeded patterns, and pieces of one pattern among guard bytes of another.

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, RngCore, SeedableRng};
use serde::{Deserialize, Serialize};

/// One copy, by offsets into the source's and the destination's buffer.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(crate) struct Piece {
    pub(crate) source: u64,
    pub(crate) destination: u64,
    pub(crate) len: u64,
}

/// The pieces of a transfer. Both processes make the same list of it.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) enum Layout {
    /// These.
    List(Vec<Piece>),
    /// `count` pieces of `len` bytes at random offsets.
    Scattered { count: usize, len: u64, seed: u64 },
    /// `count` pieces of 1 byte to 3 MiB at random offsets, the small ones the most.
    Mixed { count: usize, seed: u64 },
}

/// Most bytes between two pieces; at least one is, so that no two are merged or touch.
const GAP: u64 = 31;

impl Layout {
    pub(crate) fn pieces(&self) -> Vec<Piece> {
        match self {
            Self::List(pieces) => pieces.clone(),
            Self::Scattered { count, len, seed } => scatter(&vec![*len; *count], *seed),
            Self::Mixed { count, seed } => {
                let mut random = SmallRng::seed_from_u64(*seed);
                let mut lengths = vec![1, 2, 3, 1 << 20, (1 << 20) + 1, 3 << 20];
                let magnitude = |random: &mut SmallRng| 1 << random.random_range(1..16);
                lengths.resize_with(count.max(&lengths.len()).to_owned(), || {
                    let below: u64 = magnitude(&mut random);
                    random.random_range(1..=below)
                });
                lengths.shuffle(&mut random);
                scatter(&lengths, random.random())
            }
        }
    }

    /// Bytes of the source's and of the destination's buffer, a guard behind the last piece
    /// included.
    pub(crate) fn extents(&self) -> (u64, u64) {
        let ends = self.pieces().into_iter().map(|Piece { source, destination, len }| {
            (source + len + GAP, destination + len + GAP)
        });
        ends.fold((GAP, GAP), |(source, destination), (s, d)| (source.max(s), destination.max(d)))
    }
}

/// Destinations in order of the list, sources in a random one; gaps of 1 to [`GAP`] bytes around
/// every piece, so offsets have any alignment.
fn scatter(lengths: &[u64], seed: u64) -> Vec<Piece> {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.shuffle(&mut random);
    let mut pieces: Vec<Piece> =
        lengths.iter().map(|&len| Piece { source: 0, destination: 0, len }).collect();
    let mut end = 0;
    for index in order {
        pieces[index].source = end + random.random_range(1..=GAP);
        end = pieces[index].source + pieces[index].len;
    }
    end = 0;
    for piece in &mut pieces {
        piece.destination = end + random.random_range(1..=GAP);
        end = piece.destination + piece.len;
    }
    pieces
}

/// `len` random bytes that are the same for the same seed; a shorter pattern begins a longer one.
pub(crate) fn pattern(seed: u64, len: u64) -> Vec<u8> {
    // Whole words, because the generator makes the bytes of a last partial one differently.
    let mut bytes = vec![0; len.next_multiple_of(8) as usize];
    SmallRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    bytes.truncate(len as usize);
    bytes
}

/// A destination after its transfer: the source's pattern in the pieces, its own around them.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Image {
    pub(crate) layout: Layout,
    pub(crate) source_seed: u64,
    pub(crate) guard_seed: u64,
}

impl Image {
    /// Memory that no transfer has touched since it was filled.
    pub(crate) fn untouched(seed: u64) -> Self {
        Self { layout: Layout::List(Vec::new()), source_seed: 0, guard_seed: seed }
    }

    /// The first wrong byte, in words.
    pub(crate) fn mismatch(&self, found: &[u8]) -> Option<String> {
        let mut expected = pattern(self.guard_seed, found.len() as u64);
        let pieces = self.layout.pieces();
        let source = pattern(self.source_seed, self.layout.extents().0);
        for Piece { source: from, destination: to, len } in &pieces {
            let (from, to, len) = (*from as usize, *to as usize, *len as usize);
            expected[to..to + len].copy_from_slice(&source[from..from + len]);
        }
        if expected == found {
            return None;
        }
        let at = (0..found.len()).find(|&at| expected[at] != found[at])?;
        let holds = |piece: &&Piece| (at as u64).checked_sub(piece.destination) < Some(piece.len);
        let place = pieces
            .iter()
            .filter(|piece| piece.destination <= at as u64)
            .find(holds)
            .map_or("no piece: it is a guard".into(), |piece| format!("{piece:?}"));
        let (expected, found) = (expected[at], found[at]);
        Some(format!("byte {at} is {found:#04x}, not {expected:#04x}; it lies in {place}"))
    }
}
