//! Which way a batch goes between a GPU and host memory, and why.

use std::fmt::{self, Display};

use kvferry_device::{CopyDescriptor, Rows};

use super::fragments::{Direction, Fragments, append};
use crate::config::Policy;
use crate::ended::Fallback;
use crate::request::OffloadMode;

/// How a batch went, and why so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Choice {
    /// Not [`OffloadMode::Auto`].
    pub mode: OffloadMode,
    /// Step by step, with pauses: under [`Policy::Tail`], once the model's slowest steps were over the
    /// budget.
    pub in_steps: bool,
    /// Why.
    pub reason: Reason,
}

/// Why a batch went the way it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The submission said so.
    Asked,
    /// The knob of the direction said so.
    Knob,
    /// The kernel is not to run: `MC_KVFERRY_KERNEL` or the submission said so.
    WithoutKernel,
    /// The device has no kernel.
    NoKernel,
    /// `MC_KVFERRY_POLICY=strict`.
    Strict,
    /// The processor copies.
    Processor,
    /// The copy engine takes rows with strides as they are.
    Strides,
    /// Few pieces, or long ones: a DMA each costs little.
    LongPieces,
    /// Short pieces that lie together in host memory.
    TogetherInHostMemory,
    /// Short pieces that lie apart in host memory, where a DMA each would take far longer.
    ApartInHostMemory,
    /// Short pieces, too few of them for a buffer in between to pay.
    TooFewToStage,
    /// There is no device memory to stage in.
    NoBounce,
}

impl Reason {
    /// If the batch went a slower way than it could have: why.
    pub(crate) fn fallback(self) -> Option<Fallback> {
        match self {
            Self::NoKernel => Some(Fallback::NoKernel),
            Self::NoBounce => Some(Fallback::NoBounce),
            _ => None,
        }
    }
}

impl Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = if self.in_steps { " in steps" } else { "" };
        write!(f, "{}{steps}: {}", self.mode, self.reason)
    }
}

impl Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Asked => "the submission asked for it",
            Self::Knob => "the knob of the direction asks for it",
            Self::WithoutKernel => "without the kernel, as asked",
            Self::NoKernel => "the device has no copy kernel",
            Self::Strict => "the policy is strict",
            Self::Processor => "the processor copies",
            Self::Strides => "the copy engine takes rows with strides as they are",
            Self::LongPieces => "a DMA for each piece costs little",
            Self::TogetherInHostMemory => "short pieces that lie together in host memory",
            Self::ApartInHostMemory => "short pieces that lie apart in host memory",
            Self::TooFewToStage => "short pieces, too few for a buffer in between to pay",
            Self::NoBounce => "there is no device memory to stage in",
        })
    }
}

/// What a way of copying is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Calls {
    /// DMAs.
    pub(super) calls: f64,
    /// Rows of all of them.
    pub(super) rows: f64,
}

impl Calls {
    fn of(blocks: &[Rows]) -> Self {
        let rows = blocks.iter().map(|block| block.count as f64).sum();
        Self { calls: blocks.len() as f64, rows }
    }

    fn times(self, factor: f64) -> Self {
        Self { calls: self.calls * factor, rows: self.rows * factor }
    }
}

/// What a batch looks like to whoever chooses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) bytes: f64,
    pub(super) pieces: f64,
    /// A DMA for each piece or block of rows.
    pub(super) direct: Calls,
    /// DMAs between buffers and host memory, as the list is or sorted.
    pub(super) staged: Calls,
}

impl Shape {
    /// Judges by the first pieces, as they come. `staged` is as if the list is not sorted.
    pub(super) fn of(fragments: &Fragments<'_>) -> Self {
        let head = fragments.head();
        let mut blocks = Vec::new();
        for piece in head {
            append(&mut blocks, *piece, &fragments.borders);
        }
        let pieces = (fragments.count as f64).max(head.len() as f64);
        let whole = pieces / (head.len() as f64).max(1.0);
        let direct = Calls::of(&blocks).times(whole);
        let staged = host_calls(head, fragments).times(whole);
        Self { bytes: fragments.bytes as f64, pieces, direct, staged }
    }

    /// Bytes of a piece.
    fn mean(&self) -> f64 {
        self.bytes / self.pieces.max(1.0)
    }
}

/// The DMAs that host memory takes if the pieces lie side by side in device memory.
pub(super) fn host_calls(pieces: &[CopyDescriptor], fragments: &Fragments<'_>) -> Calls {
    let mut blocks = Vec::new();
    let mut staged = 0;
    for piece in pieces {
        let host = fragments.direction.host(piece);
        let (src, dst) = match fragments.direction {
            Direction::Store => (staged, host),
            Direction::Load => (host, staged),
        };
        staged += piece.len;
        let piece = CopyDescriptor { src, dst, len: piece.len };
        append(&mut blocks, piece, &fragments.host_borders);
    }
    Calls::of(&blocks)
}

// What was measured on one H200 (2026-11-29, LAB.md), in nanoseconds and bytes. Ratios are what
// counts, and they are much the same wherever a GPU is behind PCIe.

/// Bytes a nanosecond of one contiguous DMA.
const LINK: f64 = 55.0;
/// What a row of a 2-D DMA costs beside its bytes.
const ROW: f64 = 55.0;
/// What a DMA costs the host.
const CALL: f64 = 2500.0;
/// Until the first byte of a staged copy is on the link.
const STAGING: f64 = 10_000.0;
/// Bytes a nanosecond of the kernel on host memory.
const KERNEL_LINK: f64 = 50.0;
/// Until the kernel's first byte is on the link.
const LAUNCH: f64 = 5_000.0;

fn dma(bytes: f64, Calls { calls, rows }: Calls) -> f64 {
    (calls * CALL).max(bytes / LINK + (rows - 1.0).max(0.0) * ROW) + CALL
}

/// How long each way takes, about.
struct Times {
    direct: f64,
    staged: f64,
    kernel: f64,
}

impl Times {
    fn of(shape: &Shape) -> Self {
        Self {
            direct: dma(shape.bytes, shape.direct),
            staged: dma(shape.bytes, shape.staged) + STAGING,
            kernel: shape.bytes / KERNEL_LINK + LAUNCH,
        }
    }
}

/// The way that the policy takes for a shape, where nobody asked for one and there is a kernel.
/// `sorted` gives the DMAs of staging once the list is sorted, `None` if that helps little; it costs
/// the host time, and is asked only if it may matter.
pub(super) fn choose(
    policy: Policy,
    throttle: u32,
    mut shape: Shape,
    sorted: impl FnOnce() -> Option<Calls>,
) -> Choice {
    use OffloadMode::{Direct, Kernel, Staged};
    // Over the budget less moves at a time, in as few launches as ever: many short ones, or a DMA a
    // fragment, lengthen the model's steps more than one gather does (H200, 2026-11-30).
    let in_steps = policy == Policy::Tail && throttle > 0;
    let choice = |mode, reason| Choice { mode, in_steps, reason };
    if policy == Policy::Strict {
        return choice(Direct, Reason::Strict);
    }
    let strided = shape.direct.calls * 8.0 <= shape.pieces;
    let direct_reason = if strided { Reason::Strides } else { Reason::LongPieces };
    let times = Times::of(&shape);
    // Rows with strides leave the model all of its multiprocessors, and take the link at half its
    // rate and more from 4 KiB on.
    if strided && policy != Policy::Throughput {
        return choice(Direct, Reason::Strides);
    }
    let best = shape.bytes / LINK + STAGING;
    if times.direct <= best * 1.1 {
        return choice(Direct, direct_reason);
    }
    if times.staged > best * 1.3
        && let Some(calls) = sorted()
    {
        shape.staged = calls;
    }
    let Times { staged, kernel, direct } = Times::of(&shape);
    // A launch on host memory holds multiprocessors for as long as the link takes, thirty times as
    // long as staging does: worth waiting for, up to a point.
    const PATIENCE: f64 = 1.8;
    let patience = if policy == Policy::Throughput { 1.0 } else { PATIENCE };
    if direct <= staged.min(kernel) {
        choice(Direct, direct_reason)
    } else if staged <= kernel * patience {
        choice(Staged, Reason::TogetherInHostMemory)
    } else if staged <= kernel * PATIENCE {
        choice(Kernel, Reason::TooFewToStage)
    } else {
        choice(Kernel, Reason::ApartInHostMemory)
    }
}

/// Whether a list is worth sorting for staging as it is.
pub(super) fn is_scattered(shape: &Shape) -> bool {
    dma(shape.bytes, shape.staged) > shape.bytes / LINK * 1.1 + CALL && shape.mean() < 1e6
}
