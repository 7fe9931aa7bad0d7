//! Proofs that forms touch no byte twice, from their strides and page numbers alone.
//!
//! Each proof is enough by itself and none is needed: where all fail, the pieces are compared.

use multiversion::multiversion;

/// Slots of [`Slots`], at most: 64 MiB, of which only what is marked is touched.
const MOST_SPREAD: u64 = 1 << 26;

/// Slots that are marked for one proof, at most: about what comparing all pieces may cost.
const MOST_SLOTS: u64 = 4 << 20;

/// One direction in which a form repeats.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Dim {
    /// Bytes from one to the next (for pages: to the next number).
    pub(super) stride: u64,
    /// Bytes from the lowest to the highest.
    pub(super) reach: u64,
    /// There is more than one.
    pub(super) many: bool,
    /// By page number.
    pub(super) paged: bool,
}

impl Dim {
    /// `count` times, at least once, and without gaps.
    #[inline]
    pub(super) fn even(stride: u64, count: u64) -> Self {
        Self { stride, reach: stride * (count - 1), many: count > 1, paged: false }
    }
}

/// One end of a form.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) form: usize,
    /// It is written, not read.
    pub(super) writes: bool,
    /// Its lowest byte. After [`Proofs::apart`] divided by a stride: the remainder.
    low: u64,
    /// Bytes from there to the end of its highest piece.
    len: u64,
    /// Those with more than one step come first, the larger stride before the smaller.
    dims: [Dim; 3],
    numbers: Numbers,
}

/// What is known of a block's page numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Numbers {
    pub(super) lowest: u32,
    /// All are a multiple of it above the lowest; the stride of pages is of so many.
    pub(super) step: u32,
}

impl Block {
    #[inline]
    pub(super) fn new(
        form: usize,
        writes: bool,
        (low, len): (u64, u64),
        mut dims: [Dim; 3],
        numbers: Numbers,
    ) -> Self {
        let key = |dim: &Dim| if dim.many { dim.stride } else { 0 };
        for (one, other) in [(0, 1), (1, 2), (0, 1)] {
            if key(&dims[one]) < key(&dims[other]) {
                dims.swap(one, other);
            }
        }
        Self { form, writes, low, len, dims, numbers }
    }

    /// Whether each stride is at least what is inside it long.
    #[inline]
    pub(super) fn nests(&self) -> bool {
        let mut inside = self.len - self.dims.iter().map(|dim| dim.reach).sum::<u64>();
        for dim in self.dims.iter().rev().filter(|dim| dim.many) {
            if dim.stride < inside {
                return false;
            }
            inside += dim.reach;
        }
        true
    }

    fn outer(&self) -> Dim {
        self.dims[0]
    }

    /// The same block without its outermost direction if that has this stride, seen as a remainder
    /// of the stride. `None` if it does not lie between two multiples of the stride.
    fn remainder(mut self, base: u64, stride: u64) -> Option<Self> {
        if self.outer().stride == stride && self.outer().many {
            self.len -= self.outer().reach;
            self.dims = [self.dims[1], self.dims[2], Dim::default()];
        }
        self.low = (self.low - base) % stride;
        (self.len <= stride - self.low).then_some(self)
    }
}

/// Memory of the proofs, kept from one list to the next.
#[derive(Debug, Default)]
pub(super) struct Proofs {
    /// All ends to be told apart.
    pub(super) blocks: Vec<Block>,
    slots: Slots,
}

impl Proofs {
    /// Whether it shows that no two pieces of the block touch: each stride is at least what is
    /// inside it long, and no page number comes twice. `unique`: that is known of the numbers.
    #[inline]
    pub(super) fn alone(&mut self, block: &Block, numbers: &[u32], unique: bool) -> bool {
        let paged = block.dims.iter().find(|dim| dim.paged);
        block.nests()
            && paged.is_none_or(|&dim| {
                unique
                    || monotone(numbers)
                    || self.slots.all_differ([Set::of(block, dim, 0, numbers)])
            })
    }

    /// Whether it shows that no block touches one that is written. [`Self::alone`] holds for each
    /// that is written.
    pub(super) fn apart<'a>(&mut self, numbers: impl Fn(&Block) -> &'a [u32] + Copy) -> bool {
        apart(&mut self.blocks, 0, numbers, &mut self.slots)
    }
}

/// Whether it shows that no block from this position on touches one that is written. More blocks
/// are put behind them and taken away again.
fn apart<'a>(
    blocks: &mut Vec<Block>,
    from: usize,
    numbers: impl Fn(&Block) -> &'a [u32] + Copy,
    slots: &mut Slots,
) -> bool {
    blocks[from..].sort_unstable_by_key(|block| block.low);
    let count = blocks.len();
    // A cluster is what hangs together by common bytes, or bytes between pieces.
    let mut cluster = from;
    let (mut written, mut read, mut clash) = (0, 0, false);
    for at in from..count {
        let Block { low, len, writes, .. } = blocks[at];
        if low >= written && low >= read {
            if clash && !cluster_is_apart(blocks, cluster..at, numbers, slots) {
                return false;
            }
            (cluster, clash) = (at, false);
        }
        clash |= low < written || writes && low < read;
        let end = if writes { &mut written } else { &mut read };
        *end = low.saturating_add(len).max(*end);
    }
    !clash || cluster_is_apart(blocks, cluster..count, numbers, slots)
}

/// The same for blocks whose pieces lie between each other: with the largest stride of all as the
/// divisor, either their remainders do not touch (the keys and the values of a page), or those that
/// do are in different multiples of the stride (pages with different numbers).
fn cluster_is_apart<'a>(
    blocks: &mut Vec<Block>,
    cluster: std::ops::Range<usize>,
    numbers: impl Fn(&Block) -> &'a [u32] + Copy,
    slots: &mut Slots,
) -> bool {
    let outer = blocks[cluster.clone()].iter().map(Block::outer).filter(|dim| dim.many);
    let Some(stride) = outer.map(|dim| dim.stride).max().filter(|&stride| stride > 0) else {
        return false;
    };
    let base = blocks[cluster.start].low;
    let count = blocks.len();
    for at in cluster.clone() {
        let Some(remainder) = blocks[at].remainder(base, stride) else {
            blocks.truncate(count);
            return false;
        };
        blocks.push(remainder);
    }
    let by_remainder = apart(blocks, count, numbers, slots);
    blocks.truncate(count);
    by_remainder
        || slots.all_differ(blocks[cluster].iter().map(|block| {
            let outer = block.outer();
            let dim = if outer.many && outer.stride == stride {
                outer
            } else {
                Dim { stride, ..Dim::default() }
            };
            Set::of(block, dim, base, numbers(block))
        }))
}

/// Multiples of a stride that a block uses.
#[derive(Clone, Copy, Debug)]
struct Set<'a> {
    first: u64,
    /// From the first to the last.
    span: u64,
    /// Those, or all if there are none.
    numbers: &'a [u32],
    known: Numbers,
    writes: bool,
}

impl<'a> Set<'a> {
    /// Of one direction of the block, counted from `base` on; for pages, `numbers` are theirs.
    fn of(block: &Block, dim: Dim, base: u64, numbers: &'a [u32]) -> Self {
        Self {
            // Without a base, only what is inside the block is compared.
            first: block.low.saturating_sub(base) / dim.stride,
            span: dim.reach / dim.stride,
            numbers: if dim.paged { numbers } else { &[] },
            known: block.numbers,
            writes: block.writes,
        }
    }

    fn count(&self) -> u64 {
        if self.numbers.is_empty() { self.span + 1 } else { self.numbers.len() as u64 }
    }
}

/// Slots are whole rows, which are cleared at once.
const LEAST_SLOTS: usize = 64;

/// A byte for each multiple, 1 or 0: unlike a bit it is set without being read. All are zero between
/// calls, so that their number costs nothing.
#[derive(Debug, Default)]
struct Slots {
    marks: Vec<u8>,
}

/// All slots are looked through if they are not more than so many for each that is marked: sixty-four
/// at a time cost as much as two or three that are found by number.
const LOOKED_THROUGH: u64 = 32;

impl Slots {
    /// Whether each multiple that is written is in no other set, and once in its own. `false` also
    /// when there are too many to mark.
    fn all_differ<'a>(&mut self, sets: impl IntoIterator<Item = Set<'a>, IntoIter: Clone>) -> bool {
        let sets = sets.into_iter();
        let first = sets.clone().map(|set| set.first).min().unwrap_or(0);
        let last = sets.clone().map(|set| set.first + set.span).max().unwrap_or(0);
        let count = sets.clone().fold(0u64, |sum, set| sum.saturating_add(set.count()));
        let spread = last - first + 1;
        if spread > MOST_SPREAD || count > MOST_SLOTS {
            return false;
        }
        let slots = (spread.next_power_of_two() as usize).max(LEAST_SLOTS);
        if self.marks.len() < slots {
            // Not grown: zeroes from the system are not written before they are used.
            self.marks = vec![0; slots];
        }
        let marks = &mut self.marks[..slots];
        let written = || sets.clone().filter(|set| set.writes);
        written().for_each(|set| mark(marks, &set, first));
        let missed = sets.clone().filter(|set| !set.writes).all(|set| miss(marks, &set, first));
        let marked = match slots as u64 / LOOKED_THROUGH <= count {
            true => take(marks),
            false => written().map(|set| take_of(marks, &set, first)).sum(),
        };
        missed && marked == written().map(|set| set.count()).sum::<u64>()
    }
}

/// Calls `each` with the slot of every multiple of the set, of so many, a power of two.
#[inline(always)]
fn for_each_slot(slots: usize, set: &Set<'_>, base: u64, mut each: impl FnMut(usize)) {
    // All are less, which the compiler need not know to see that this is inside.
    let mut at = |slot: u64| each(slot as usize & (slots - 1));
    let first = set.first - base;
    if set.numbers.is_empty() {
        for slot in first..first + set.span + 1 {
            at(slot);
        }
    } else if set.known.step == 1 {
        let shifted = first.wrapping_sub(set.known.lowest.into());
        for &number in set.numbers {
            at(shifted.wrapping_add(number.into()));
        }
    } else {
        let Numbers { lowest, step } = set.known;
        for &number in set.numbers {
            at(first + u64::from((number - lowest) / step));
        }
    }
}

/// The largest number that all distances from the lowest of these are multiples of; 0 if they are equal.
pub(super) fn common_step(numbers: &[u32], lowest: u32) -> u32 {
    let mut step = 0;
    for &number in numbers {
        let (mut divisor, mut rest) = (number - lowest, step);
        while rest > 0 {
            (divisor, rest) = (rest, divisor % rest);
        }
        step = divisor;
        if step == 1 {
            break;
        }
    }
    step
}

/// Marks the set.
fn mark(marks: &mut [u8], set: &Set<'_>, base: u64) {
    let slots = marks.len();
    if slots > 0 {
        for_each_slot(slots, set, base, |slot| marks[slot] = 1);
    }
}

/// Whether nothing of the set is marked.
fn miss(marks: &[u8], set: &Set<'_>, base: u64) -> bool {
    let mut hits = 0;
    if !marks.is_empty() {
        for_each_slot(marks.len(), set, base, |slot| hits |= marks[slot]);
    }
    hits == 0
}

/// Clears all marks; how many there were.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn take(marks: &mut [u8]) -> u64 {
    let (rows, _) = marks.as_chunks_mut::<LEAST_SLOTS>();
    let mut taken = 0;
    // As many rows as a byte counts.
    for rows in rows.chunks_mut(u8::MAX.into()) {
        let mut sums = [0u8; LEAST_SLOTS];
        for row in rows {
            for (sum, mark) in sums.iter_mut().zip(&*row) {
                *sum += mark;
            }
            *row = [0; LEAST_SLOTS];
        }
        taken += sums.iter().map(|&sum| u64::from(sum)).sum::<u64>();
    }
    taken
}

/// Clears the marks of the set; how many there were.
fn take_of(marks: &mut [u8], set: &Set<'_>, base: u64) -> u64 {
    let slots = marks.len();
    let mut taken = 0;
    if slots > 0 {
        for_each_slot(slots, set, base, |slot| {
            taken += u64::from(std::mem::take(&mut marks[slot]));
        });
    }
    taken
}

/// Whether the numbers only rise, or only fall.
fn monotone(numbers: &[u32]) -> bool {
    // The first that is out of order ends the search, a block at a time.
    let mut blocks = numbers.chunks(BLOCK).zip(numbers.get(1..).unwrap_or(&[]).chunks(BLOCK));
    match numbers {
        [first, second, ..] if first < second => blocks.all(|(block, next)| rises(block, next)),
        [first, second, ..] => first != second && blocks.all(|(block, next)| rises(next, block)),
        _ => true,
    }
}

/// Numbers that are looked at before it is decided whether to go on.
const BLOCK: usize = 256;

/// Whether each number is less than the one at the same position in the other list.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn rises(numbers: &[u32], greater: &[u32]) -> bool {
    let mut all = true;
    for (number, greater) in numbers.iter().zip(greater) {
        all &= number < greater;
    }
    all
}
