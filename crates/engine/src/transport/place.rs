//! Checked requests and where their bytes are for the device that copies them: nothing here runs yet.

use std::sync::Arc;

use kvferry_device::{CompactCopy, CompactEnd, Destinations};
use smallvec::SmallVec;

use super::offload::Direction;
use crate::error::{Result, Side};
use crate::mapping::OpenMapping;
use crate::mostly_one::MostlyOne;
use crate::plan::{
    Checked, Extent, Form, Grid, Limits, Op, Pages, Pieces, Range, Relocations, Strides, Want,
    Window,
};
use crate::registry::{HostLock, Pin, Registry, Table};
use crate::segment::AllocationKey;
use crate::target::{RemoteTable, Target};

/// A checked list of ranges and where its bytes are for the device that copies them.
pub(crate) struct RangePlan<'a> {
    pub(super) op: Op,
    pub(super) ranges: &'a [Range],
    /// Boxed, like that of forms: it is large, and handed on.
    pub(super) place: Box<Place>,
    pub(crate) checked: Checked,
    /// What it was checked with.
    pub(super) limits: Limits,
    pub(super) extent: Extent,
    /// A piece may read what another one writes.
    pub(super) one_space: bool,
    pub(crate) device: usize,
}

/// A checked list of forms, relocated.
pub(super) struct FormPlan<'a> {
    pub(super) op: Op,
    pub(super) copies: Vec<CompactCopy<'a>>,
    pub(super) bytes: u64,
    /// A piece may read what another one writes.
    pub(super) one_space: bool,
    pub(super) device: usize,
    pub(super) place: Box<Place>,
}

/// The windows of both ends, as they were when the list was checked, and what keeps them. Locks
/// end before the pins that keep their memory registered.
pub(super) struct Place {
    pub(super) local: Arc<Table>,
    pub(super) remote: RemoteWindows,
    pub(super) local_relocations: SmallVec<[u64; 4]>,
    pub(super) remote_relocations: SmallVec<[u64; 4]>,
    pub(super) target: Target,
    /// The end that is host memory, if it is one of the two and all of it, or if the processor
    /// copies.
    pub(super) host: Option<Side>,
    /// Where the device that copies sees the windows begin that are used; only if `host` is one, or
    /// there is a byte rate.
    pub(super) local_starts: SmallVec<[u64; 2]>,
    pub(super) remote_starts: SmallVec<[u64; 2]>,
    pub(super) locks: MostlyOne<Arc<HostLock>>,
    pub(super) pins: SmallVec<[Pin; 2]>,
    pub(super) mappings: MostlyOne<Arc<OpenMapping>>,
}

pub(super) enum Plan<'a> {
    Ranges(RangePlan<'a>),
    Forms(FormPlan<'a>),
}

/// The windows that remote addresses are looked up in.
pub(super) enum RemoteWindows {
    /// Of another process.
    Mapped(Arc<RemoteTable>),
    /// Of an engine of this process: used directly, as drivers refuse to open a handle in the
    /// process that made it.
    Direct(Arc<Registry>, Arc<Table>),
}

impl RemoteWindows {
    pub(super) fn of(target: &Target) -> Result<Self> {
        Ok(match target.registry()? {
            None => Self::Mapped(target.table()),
            Some(registry) => {
                let table = registry.table();
                Self::Direct(registry, table)
            }
        })
    }

    /// Both ends of a range are addresses of this process.
    pub(super) fn is_direct(&self) -> bool {
        matches!(self, Self::Direct(..))
    }

    pub(super) fn windows(&self) -> &[Window] {
        match self {
            Self::Mapped(table) => &table.windows,
            Self::Direct(_, table) => &table.windows,
        }
    }

    /// The allocation that a window lies in.
    pub(super) fn allocation(&self, window: usize) -> AllocationKey {
        match self {
            Self::Mapped(table) => table.allocation(window).key,
            Self::Direct(_, table) => table.allocations[window],
        }
    }
}

/// The window that holds an address of a checked list.
fn window_of(windows: &[Window], addr: u64) -> Option<usize> {
    windows.partition_point(|window| window.start <= addr).checked_sub(1)
}

impl Place {
    pub(super) fn relocations(&self) -> Relocations<'_> {
        Relocations { local: &self.local_relocations, remote: &self.remote_relocations }
    }

    /// What to add to the addresses of a local and of a remote window.
    pub(super) fn shift(&self, local: usize, remote: usize) -> Shift {
        let local = self.local_relocations.get(local).copied().unwrap_or(0);
        Shift { local, remote: self.remote_relocations[remote] }
    }
}

/// What to add to the addresses of one form to get where the device that copies sees them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Shift {
    local: u64,
    remote: u64,
}

impl RangePlan<'_> {
    /// The pieces of the list, as descriptors for the plan's device.
    pub(crate) fn pieces(&self, want: Want) -> Pieces<'_> {
        self.pieces_of(self.ranges, want)
    }

    /// The pieces of a part of the list.
    pub(super) fn pieces_of<'b>(&'b self, ranges: &'b [Range], want: Want) -> Pieces<'b> {
        let (local, remote) = (&self.place.local.windows, self.place.remote.windows());
        let relocations = self.place.relocations();
        Pieces::new(self.op, ranges, local, remote, relocations, want, &self.checked, &self.limits)
    }

    /// What the device that copies needs to find out whether destinations overlap, if it can and nobody
    /// knows.
    pub(super) fn destinations(&self) -> Option<Destinations> {
        if !self.checked.plain || self.one_space {
            return None;
        }
        let Shift { local, remote } = self.shift()?;
        let shift = match self.op {
            Op::Write => remote,
            Op::Read => local,
        };
        self.extent.destinations(self.ranges.len(), shift)
    }

    /// Of a plain list.
    fn shift(&self) -> Option<Shift> {
        let first = self.ranges.first()?;
        let local = window_of(&self.place.local.windows, first.local)?;
        let remote = window_of(self.place.remote.windows(), first.remote)?;
        Some(self.place.shift(local, remote))
    }

    /// Runs that were found in the list, which is plain and so has one window a side.
    pub(super) fn compact<'b>(
        &self,
        strides: &'b Strides,
    ) -> impl Iterator<Item = CompactCopy<'b>> {
        let (op, shift) = (self.op, self.shift().unwrap_or_default());
        strides.runs.iter().flat_map(move |run| compact_copies(op, run.grid(), shift))
    }
}

/// A form in bounds, as the device copies it: one copy, or several where the rows are more than 32
/// bits count.
pub(super) fn compact_copies(
    op: Op,
    grid: Grid<'_>,
    shift: Shift,
) -> impl Iterator<Item = CompactCopy<'_>> {
    const ROWS: u64 = u32::MAX as u64;
    (0..grid.rows.div_ceil(ROWS)).map(move |part| {
        let first = part * ROWS;
        let end = |pages: &Pages<'_>, shift: u64| {
            let addr = pages.addr.wrapping_add(shift);
            CompactEnd {
                addr: addr.wrapping_add(first.wrapping_mul(pages.row_stride)),
                row_stride: pages.row_stride,
                layer_stride: pages.layer_stride,
                page_stride: pages.page_stride,
                pages: &[],
            }
        };
        let mut local = CompactEnd { pages: grid.local.numbers, ..end(&grid.local, shift.local) };
        let mut remote =
            CompactEnd { pages: grid.remote.numbers, ..end(&grid.remote, shift.remote) };
        for end in [&mut local, &mut remote] {
            // One page needs no list, and so no slot of the ring.
            if let &[number] = end.pages {
                end.addr = end.addr.wrapping_add(u64::from(number).wrapping_mul(end.page_stride));
                end.pages = &[];
            }
        }
        let (src, dst) = match op {
            Op::Write => (local, remote),
            Op::Read => (remote, local),
        };
        CompactCopy {
            src,
            dst,
            len: grid.len,
            rows: (grid.rows - first).min(ROWS) as u32,
            layers: grid.layers as u32,
            pages: grid.local.numbers.len() as u32,
        }
    })
}

impl Plan<'_> {
    pub(super) fn device(&self) -> usize {
        match self {
            Self::Ranges(plan) => plan.device,
            Self::Forms(plan) => plan.device,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Ranges(plan) => plan.checked.bytes,
            Self::Forms(plan) => plan.bytes,
        }
    }

    pub(super) fn op(&self) -> Op {
        match self {
            Self::Ranges(plan) => plan.op,
            Self::Forms(plan) => plan.op,
        }
    }

    /// Which way bytes go, where one end is host memory.
    pub(super) fn direction(&self) -> Option<Direction> {
        Some(match (self.place().host?, self.op()) {
            (Side::Remote, Op::Write) | (Side::Local, Op::Read) => Direction::Store,
            (Side::Remote, Op::Read) | (Side::Local, Op::Write) => Direction::Load,
        })
    }

    /// Of a list of ranges, for its check of overlaps.
    pub(super) fn extent(&self) -> Option<Extent> {
        match self {
            Self::Ranges(plan) => Some(plan.extent),
            Self::Forms(_) => None,
        }
    }

    /// A piece may read what another one writes.
    pub(super) fn one_space(&self) -> bool {
        match self {
            Self::Ranges(plan) => plan.one_space,
            Self::Forms(plan) => plan.one_space,
        }
    }

    /// Whether the kernel, if there is one, has something to do. `strides` are those of the plan.
    pub(super) fn wants_kernel(&self, strides: &Strides, batch_min: u64) -> bool {
        match self {
            Self::Forms(plan) => !plan.copies.is_empty(),
            Self::Ranges(plan) => {
                !strides.runs.is_empty() || plan.checked.small as u64 >= batch_min
            }
        }
    }

    pub(super) fn place(&self) -> &Place {
        match self {
            Self::Ranges(plan) => &plan.place,
            Self::Forms(plan) => &plan.place,
        }
    }

    pub(super) fn into_place(self) -> Box<Place> {
        match self {
            Self::Ranges(plan) => plan.place,
            Self::Forms(plan) => plan.place,
        }
    }
}
