//! What one submission to a queue is made of: pieces, compact copies and large copies of one plan, or
//! of several by turns.

use std::borrow::Cow;
use std::sync::Arc;

use kvferry_device::{
    CompactCopy, CopyDescriptor, CopySource, Destinations, SliceSource, Vendor, Work,
};
use smallvec::smallvec;

use super::fences::Order;
use super::lane::Lane;
use super::peer::Submitted;
use super::place::{Plan, RangePlan};
use crate::batch::Path;
use crate::error::Result;
use crate::mostly_one::MostlyOne;
use crate::plan::{Checked, Pieces, Strides, Want};

/// Descriptors that a batch takes from one target before it turns to the next: about a fiftieth of
/// the warps of a launch, so that all targets are written at any moment.
const TURN: usize = 64;

/// What one submission to a queue is made of.
#[derive(Default)]
pub(super) struct Load<'a> {
    pieces: Option<Box<dyn CopySource + 'a>>,
    compact: Cow<'a, [CompactCopy<'a>]>,
    large: Vec<CopyDescriptor>,
}

impl<'a> Load<'a> {
    /// What a queue gets of one plan.
    pub(super) fn of(
        plan: &'a Plan<'_>,
        strides: &'a Strides,
        kernel: bool,
        batch_min: u64,
    ) -> Self {
        let plan = match plan {
            Plan::Forms(plan) => {
                return Self { compact: Cow::Borrowed(&plan.copies), ..Self::default() };
            }
            Plan::Ranges(plan) => plan,
        };
        if !strides.runs.is_empty() {
            let rest = Rest { plan, slices: strides.rest.iter(), now: None };
            let has_rest = !strides.rest.is_empty();
            return Self {
                pieces: has_rest.then(|| Box::new(rest) as _),
                compact: plan.compact(strides).collect(),
                large: Vec::new(),
            };
        }
        let Checked { small, large, .. } = plan.checked;
        if !kernel {
            // The queue makes every descriptor a DMA.
            let pieces = Box::new(plan.pieces(Want::All));
            return Self { pieces: Some(pieces), ..Self::default() };
        }
        // A few small pieces are quicker as DMAs than as a launch.
        let small_by_kernel = small as u64 >= batch_min;
        let (want, count) =
            if small_by_kernel { (Want::Large, large) } else { (Want::All, large + small) };
        let mut large = vec![CopyDescriptor::default(); count];
        if count > 0 {
            let filled = plan.pieces(want).fill(&mut large);
            debug_assert_eq!(filled, count);
        }
        let pieces = small_by_kernel.then(|| Box::new(plan.pieces(Want::Small)) as _);
        Self { pieces, large, ..Self::default() }
    }

    /// The submissions of several loads. Lists of ranges are interleaved in the launches that they
    /// share; forms are expanded by launches of their own, which run side by side if each is small
    /// enough.
    pub(super) fn joined(loads: MostlyOne<Self>) -> MostlyOne<Self> {
        match loads.iter().all(|load| load.compact.is_empty()) {
            true => smallvec![Self::interleaved(loads)],
            false => loads,
        }
    }

    /// Whether it is the pieces of a list and nothing else.
    pub(super) fn is_pieces(&self) -> bool {
        self.pieces.is_some() && self.compact.is_empty() && self.large.is_empty()
    }

    /// Submits loads of checked plans, whose memory the caller keeps until the batch ends.
    /// `destinations` are those of the one load, if the device is to look at them.
    ///
    /// # Errors
    /// If nothing was started; else the failure is in `submitted`.
    ///
    /// # Safety
    /// As [`Queue::submit`](kvferry_device::Queue::submit).
    pub(super) unsafe fn submit(
        loads: MostlyOne<Self>,
        lane: &Arc<Lane>,
        kernel: bool,
        max_grid_blocks: u32,
        order: Order<'_>,
        mut destinations: Option<&mut Destinations>,
        submitted: &mut Submitted,
    ) -> Result<()> {
        let vendor = lane.device.info().vendor;
        let path = loads.iter().map(|load| load.path(vendor, kernel)).reduce(Path::and);
        submitted.path = path.unwrap_or(Path::None);
        let max_grid_blocks = (max_grid_blocks / loads.len().max(1) as u32).max(1);
        for mut load in loads {
            let mut nothing = SliceSource(&[]);
            let pieces = match &mut load.pieces {
                Some(pieces) => &mut **pieces,
                None => &mut nothing,
            };
            let mut work = Work {
                compact: &load.compact,
                large: &load.large,
                kernel,
                after: order.after,
                behind: order.behind,
                max_grid_blocks,
                destinations: destinations.as_deref_mut(),
                ..Work::pieces(pieces)
            };
            // SAFETY: the caller's contract.
            match unsafe { lane.submit(&mut work, &mut submitted.pending) } {
                Ok(()) => {}
                Err(error) if submitted.pending.is_empty() => return Err(error),
                Err(error) => {
                    submitted.failure = Some(error);
                    break;
                }
            }
        }
        Ok(())
    }

    /// One load of several that have no forms.
    fn interleaved(mut loads: MostlyOne<Self>) -> Self {
        if loads.len() == 1 {
            return loads.remove(0);
        }
        // One of each by turns, too.
        let longest = loads.iter().map(|load| load.large.len()).max().unwrap_or(0);
        let by_turns = |at| loads.iter().filter_map(move |load| load.large.get(at).copied());
        let large = (0..longest).flat_map(by_turns).collect();
        let sources: Vec<_> = loads.into_iter().filter_map(|load| load.pieces).collect();
        let has_pieces = !sources.is_empty();
        let pieces = has_pieces.then(|| Box::new(Interleaved { sources, turn: 0 }) as _);
        Self { pieces, large, ..Self::default() }
    }

    pub(super) fn path(&self, vendor: Vendor, kernel: bool) -> Path {
        let launched = self.pieces.is_some() || !self.compact.is_empty();
        match (vendor, kernel && launched, self.large.is_empty()) {
            (Vendor::Host, ..) => Path::Memcpy,
            (_, true, true) => Path::Kernel,
            (_, true, false) => Path::Mixed,
            (_, false, _) => Path::Dma,
        }
    }
}

/// Takes turns between the pieces of several targets.
struct Interleaved<'a> {
    sources: Vec<Box<dyn CopySource + 'a>>,
    turn: usize,
}

impl CopySource for Interleaved<'_> {
    fn fill(&mut self, slot: &mut [CopyDescriptor]) -> usize {
        let mut count = 0;
        while count < slot.len() && !self.sources.is_empty() {
            let turn = self.turn % self.sources.len();
            let room = (slot.len() - count).min(TURN);
            match self.sources[turn].fill(&mut slot[count..count + room]) {
                0 => drop(self.sources.remove(turn)),
                more => {
                    count += more;
                    self.turn = turn + 1;
                }
            }
        }
        count
    }
}

/// The pieces of a list that lie in none of its runs.
struct Rest<'a> {
    plan: &'a RangePlan<'a>,
    slices: std::slice::Iter<'a, std::ops::Range<usize>>,
    now: Option<Pieces<'a>>,
}

impl CopySource for Rest<'_> {
    fn fill(&mut self, slot: &mut [CopyDescriptor]) -> usize {
        loop {
            if let Some(now) = &mut self.now {
                let count = now.fill(slot);
                if count > 0 {
                    return count;
                }
            }
            let Some(slice) = self.slices.next() else { return 0 };
            let ranges = &self.plan.ranges[slice.clone()];
            self.now = Some(self.plan.pieces_of(ranges, Want::Small));
        }
    }
}
