//! A bitmap of where destinations begin and end, which tells whether two of them overlap.

use multiversion::multiversion;

use super::{Range, destination};

/// Granules of a destination, from a common base: its first, and the first behind it.
pub(super) type Ends = [u32; 2];

/// How granules are counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    /// The address that they are counted from.
    pub(super) base: u64,
    /// Bits that a distance is shifted by.
    pub(super) granule: u32,
}

impl Scale {
    #[inline(always)]
    pub(super) fn ends<const WRITE: bool>(self, range: &Range) -> Ends {
        let first = destination::<WRITE>(range).wrapping_sub(self.base);
        [first, first.wrapping_add(range.len)].map(|end| (end >> self.granule) as u32)
    }
}

/// Bits of a word.
pub(super) const WORD: u64 = u64::BITS as u64;

/// A bit for each granule, flipped where a destination begins and where it ends: two bits however
/// long it is. Then a granule is covered an odd number of times exactly if an odd number of bits up
/// to its own are set, since each range around it has flipped one of them and any other range both
/// or none. Let `times(g)` be how many ranges cover granule `g`. The sum of `times` is the sum of all
/// lengths, and so many granules are odd exactly if no `times(g)` is above one: what is even but not
/// zero, or odd but not one, counts less than its `times`. So the two numbers are equal exactly if
/// no byte is written twice.
///
/// The bitmap is a ring: granules may be counted from anywhere, as long as all lie within its size.
#[derive(Debug, Default)]
pub(super) struct Marks {
    words: Vec<[u8; 8]>,
    /// How many are the ring: a power of two.
    size: usize,
    /// Those that may not be zero: the first, and how many from there on.
    used: (usize, usize),
}

impl Marks {
    /// Begins anew with so many words, a power of two.
    pub(super) fn begin(&mut self, words: usize) {
        let (first, count) = self.used;
        self.parts(first, count).into_iter().for_each(|part| part.fill([0; 8]));
        if self.words.len() < words {
            // New, and so of zero pages that are not there until they are touched.
            self.words = vec![[0; 8]; words];
        }
        // Until somebody knows better.
        (self.size, self.used) = (words, (0, words));
    }

    pub(super) fn flip(&mut self, ends: &[Ends]) {
        flip(ends, &mut self.words[..self.size]);
    }

    /// How many granules are covered an odd number of times. All bits lie in the granules from `low`
    /// up to and including `high`; what is below `low` is covered an even number of times.
    pub(super) fn count_odd(&mut self, (low, high): (u64, u64)) -> u64 {
        let (first, count) = self.place(low, high);
        self.used = (first, count);
        let mut before = 0;
        self.parts(first, count).into_iter().map(|part| count_odd(part, &mut before)).sum()
    }

    fn place(&self, low: u64, high: u64) -> (usize, usize) {
        let first = low / WORD;
        (first as usize & (self.size - 1), (high / WORD - first + 1) as usize)
    }

    /// The words from `first` on, around the end.
    fn parts(&mut self, first: usize, count: usize) -> [&mut [[u8; 8]]; 2] {
        let (wrapped, rest) = self.words[..self.size].split_at_mut(first);
        let behind = count.min(rest.len());
        [&mut rest[..behind], &mut wrapped[..count - behind]]
    }
}

// Shifts by a variable are a third of the work and one instruction only with BMI2.
#[multiversion(targets("x86_64+bmi1+bmi2"))]
fn flip(ends: &[Ends], words: &mut [[u8; 8]]) {
    if words.is_empty() {
        return;
    }
    for &granule in ends.as_flattened() {
        // The length is a power of two, which the compiler need not know to see that this is inside.
        let word = &mut words[(u64::from(granule) / WORD) as usize & (words.len() - 1)];
        *word = (u64::from_le_bytes(*word) ^ 1 << (u64::from(granule) % WORD)).to_le_bytes();
    }
}

/// How many bits have an odd number of set bits up to and including themselves, with `before` those
/// in front of the first.
#[multiversion(targets(
    "x86_64+avx512f+avx512dq+avx512vl+avx512bw+avx512vpopcntdq+popcnt",
    "x86_64+avx2+popcnt",
    "x86_64+popcnt"
))]
fn count_odd(words: &[[u8; 8]], before: &mut u64) -> u64 {
    let mut count = 0;
    for block in words.chunks(WORD as usize) {
        // Which words have an odd number of bits, and so before which it is odd: that is all that a
        // word has to know of the others.
        let odd = block.iter().enumerate().fold(0, |odd, (at, word)| {
            odd | u64::from(u64::from_le_bytes(*word).count_ones() & 1) << at
        });
        let odd_up_to = up_to(odd) ^ (0u64.wrapping_sub(*before));
        let odd_before = odd_up_to << 1 | *before;
        count += block
            .iter()
            .enumerate()
            .map(|(at, word)| {
                let odd_before = 0u64.wrapping_sub(odd_before >> at & 1);
                u64::from((up_to(u64::from_le_bytes(*word)) ^ odd_before).count_ones())
            })
            .sum::<u64>();
        *before = odd_up_to >> (block.len() - 1) & 1;
    }
    count
}

/// For each bit whether an odd number is set of those up to and including it.
#[inline(always)]
fn up_to(mut bits: u64) -> u64 {
    for distance in [1, 2, 4, 8, 16, 32] {
        bits ^= bits << distance;
    }
    bits
}
