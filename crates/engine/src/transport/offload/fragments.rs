//! What a batch between a GPU and host memory copies, piece by piece, as its device sees it.

use std::slice;

use kvferry_device::{CompactCopy, CopyDescriptor, CopySource, Rows};

use crate::plan::{Op, Want};
use crate::transport::place::Plan;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Direction {
    /// From a GPU to host memory.
    Store,
    /// From host memory to a GPU.
    Load,
}

impl Direction {
    /// The end in host memory.
    pub(super) fn host(self, piece: &CopyDescriptor) -> u64 {
        match self {
            Self::Store => piece.dst,
            Self::Load => piece.src,
        }
    }

    /// The end in the GPU's memory.
    pub(super) fn device(self, piece: &CopyDescriptor) -> u64 {
        match self {
            Self::Store => piece.src,
            Self::Load => piece.dst,
        }
    }
}

/// Where the windows of one end begin, in order. A DMA does not cross from one into the next, even
/// if they touch: they may be two allocations.
#[derive(Debug, Default)]
pub(super) struct Windows(Vec<u64>);

impl Windows {
    pub(super) fn new(starts: impl Iterator<Item = u64>) -> Self {
        let mut starts: Vec<_> = starts.collect();
        starts.sort_unstable();
        Self(starts)
    }

    fn of(&self, addr: u64) -> usize {
        self.0.partition_point(|&start| start <= addr)
    }

    /// Where the next one begins behind an address.
    pub(super) fn end_of(&self, addr: u64) -> u64 {
        match self.0.len() {
            0 | 1 => u64::MAX,
            _ => self.0.get(self.of(addr)).copied().unwrap_or(u64::MAX),
        }
    }

    /// Whether two addresses lie in the same.
    pub(super) fn same(&self, one: u64, other: u64) -> bool {
        self.0.len() < 2 || self.of(one) == self.of(other)
    }
}

/// The windows of both ends of a copy.
#[derive(Debug, Default)]
pub(super) struct Borders {
    pub(super) src: Windows,
    pub(super) dst: Windows,
}

impl Borders {
    /// Of all windows that plans use, which all are of one direction.
    pub(super) fn of(plans: &[&Plan<'_>]) -> Self {
        Self { src: Self::of_end(plans, Op::Write), dst: Self::of_end(plans, Op::Read) }
    }

    fn of_end(plans: &[&Plan<'_>], op_that_has_it_here: Op) -> Windows {
        Windows::new(plans.iter().flat_map(|plan| {
            let place = plan.place();
            let local = plan.op() == op_that_has_it_here;
            if local { &place.local_starts } else { &place.remote_starts }.iter().copied()
        }))
    }

    fn same(&self, rows: &Rows, piece: &CopyDescriptor) -> bool {
        self.src.same(rows.src, piece.src) && self.dst.same(rows.dst, piece.dst)
    }
}

/// Puts a piece behind a list of blocks of rows: into the last if it continues it.
pub(super) fn append(blocks: &mut Vec<Rows>, piece: CopyDescriptor, borders: &Borders) {
    if let Some(last) = blocks.last_mut()
        && borders.same(last, &piece)
    {
        let CopyDescriptor { src, dst, len } = piece;
        let steps = (src.wrapping_sub(last.src), dst.wrapping_sub(last.dst));
        if last.count == 1 {
            if steps == (last.len, last.len) {
                last.len += len;
                return;
            }
            // Upwards at both ends, without an overlap.
            let pitches = len..=i64::MAX as u64;
            if last.len == len && pitches.contains(&steps.0) && pitches.contains(&steps.1) {
                *last = Rows { src_pitch: steps.0, dst_pitch: steps.1, count: 2, ..*last };
                return;
            }
        } else if last.len == len
            && last.count < u32::MAX.into()
            && steps.0 == last.src_pitch.wrapping_mul(last.count)
            && steps.1 == last.dst_pitch.wrapping_mul(last.count)
        {
            last.count += 1;
            return;
        }
    }
    close(blocks, borders);
    let CopyDescriptor { src, dst, len } = piece;
    blocks.push(Rows { src, dst, len, src_pitch: 0, dst_pitch: 0, count: 1 });
}

/// The last block is whole: perhaps it lies beside the one before, and both are one of wider rows.
pub(super) fn close(blocks: &mut Vec<Rows>, borders: &Borders) {
    if let [.., before, last] = &mut blocks[..] {
        let begin = CopyDescriptor { src: last.src, dst: last.dst, len: last.len };
        if borders.same(before, &begin) && before.join(last) {
            blocks.pop();
        }
    }
}

/// Pieces that are looked at before all are: enough to tell what kind of list it is.
pub(super) const LOOK: usize = 256;

/// The pieces of all plans of one direction, one after the other.
pub(super) struct Fragments<'a> {
    pub(super) plans: &'a [&'a Plan<'a>],
    pub(super) direction: Direction,
    pub(super) bytes: u64,
    /// How many there are, about.
    pub(super) count: u64,
    /// The first ones, if they were looked at.
    head: Vec<CopyDescriptor>,
    given: usize,
    /// The plan whose pieces are taken now, and those that come after it.
    now: Option<Box<dyn CopySource + 'a>>,
    next: slice::Iter<'a, &'a Plan<'a>>,
}

impl<'a> Fragments<'a> {
    pub(super) fn of(plans: &'a [&'a Plan<'a>], direction: Direction) -> Self {
        let count = |plan: &&Plan<'_>| match plan {
            Plan::Ranges(plan) => (plan.checked.small + plan.checked.large) as u64,
            Plan::Forms(plan) => plan.copies.iter().map(CompactCopy::count).sum(),
        };
        let count = plans.iter().map(count).sum();
        let bytes = plans.iter().map(|plan| plan.bytes()).sum();
        let next = plans.iter();
        Self { plans, direction, bytes, count, head: Vec::new(), given: 0, now: None, next }
    }

    pub(super) fn borders(&self) -> Borders {
        Borders::of(self.plans)
    }

    /// Without those of device memory, where a buffer is instead.
    pub(super) fn host_borders(&self) -> Borders {
        match self.direction {
            Direction::Store => {
                Borders { dst: Borders::of_end(self.plans, Op::Read), ..Borders::default() }
            }
            Direction::Load => {
                Borders { src: Borders::of_end(self.plans, Op::Write), ..Borders::default() }
            }
        }
    }

    /// Looks at the first ones, before any is taken.
    pub(super) fn look(&mut self) -> &Self {
        if !self.head.is_empty() {
            return self;
        }
        let mut head = vec![CopyDescriptor::default(); LOOK];
        let mut filled = 0;
        while filled < LOOK {
            match self.fill(&mut head[filled..]) {
                0 => break,
                more => filled += more,
            }
        }
        head.truncate(filled);
        self.head = head;
        self
    }

    /// The first ones.
    pub(super) fn head(&self) -> &[CopyDescriptor] {
        &self.head
    }

    /// All of them, into `list`.
    pub(super) fn drain_into(&mut self, list: &mut Vec<CopyDescriptor>) {
        // What was in it is overwritten.
        let most = (self.count as usize).max(LOOK) + 1;
        if list.len() < most {
            list.resize(most, CopyDescriptor::default());
        }
        let mut filled = 0;
        loop {
            if filled == list.len() {
                list.resize(filled * 2, CopyDescriptor::default());
            }
            match self.fill(&mut list[filled..]) {
                0 => break,
                more => filled += more,
            }
        }
        list.truncate(filled);
    }
}

impl CopySource for Fragments<'_> {
    fn fill(&mut self, slot: &mut [CopyDescriptor]) -> usize {
        if self.given < self.head.len() {
            let rest = &self.head[self.given..];
            let count = rest.len().min(slot.len());
            slot[..count].copy_from_slice(&rest[..count]);
            self.given += count;
            return count;
        }
        loop {
            if let Some(now) = &mut self.now {
                let count = now.fill(slot);
                if count > 0 {
                    return count;
                }
            }
            let Some(plan) = self.next.next() else { return 0 };
            self.now = Some(match plan {
                Plan::Ranges(plan) => Box::new(plan.pieces(Want::All)),
                Plan::Forms(plan) => {
                    Box::new(Expanded(plan.copies.iter().flat_map(CompactCopy::pieces)))
                }
            });
        }
    }
}

/// The pieces of forms.
struct Expanded<I>(I);

impl<I: Iterator<Item = CopyDescriptor>> CopySource for Expanded<I> {
    fn fill(&mut self, slot: &mut [CopyDescriptor]) -> usize {
        let mut count = 0;
        for (place, piece) in slot.iter_mut().zip(&mut self.0) {
            *place = piece;
            count += 1;
        }
        count
    }
}
