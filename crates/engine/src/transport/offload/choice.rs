//! Which way a batch goes between a GPU and host memory, and why.

use std::fmt::{self, Display};

use kvferry_device::{CompactCopy, CopyDescriptor, Rows};

use super::fragments::{Direction, Fragments, LOOK, append};
use crate::config::Policy;
use crate::ended::Fallback;
use crate::profile::HostLink;
use crate::request::OffloadMode;
use crate::transport::place::Plan;

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
        let mut calls = Self::default();
        blocks.iter().for_each(|block| calls.count(block));
        calls
    }

    fn count(&mut self, block: &Rows) {
        self.calls += 1.0;
        self.rows += block.count as f64;
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

/// Pieces or blocks of them that are looked at together.
const FEW: usize = 64;

/// Whether pieces are in hardly fewer blocks, which the first few show at once.
fn is_apart(blocks: usize, pieces: usize) -> bool {
    blocks * 4 > pieces * 3
}

impl Shape {
    /// Judges by the first pieces, as they come. What staging takes is not looked at.
    pub(super) fn of(fragments: &mut Fragments<'_>) -> Self {
        let forms = fragments.plans.iter().map(|plan| match plan {
            Plan::Forms(plan) => Some(&plan.copies[..]),
            Plan::Ranges(_) => None,
        });
        let (direct, seen) = match forms.clone().all(|forms| forms.is_some()) {
            true => calls_of_forms(forms.flatten().flatten()),
            false => calls_of_pieces(fragments.look()),
        };
        let seen = (seen as f64).max(1.0);
        let pieces = (fragments.count as f64).max(seen);
        let direct = direct.times(pieces / seen);
        Self { bytes: fragments.bytes as f64, pieces, direct, staged: Calls::default() }
    }

    /// The same with what staging takes, as if the list is not sorted.
    pub(super) fn with_staged(self, fragments: &mut Fragments<'_>) -> Self {
        let fragments = fragments.look();
        let head = fragments.head();
        let whole = self.pieces / (head.len() as f64).max(1.0);
        Self { staged: host_calls(head, fragments).times(whole), ..self }
    }

    /// Whether the copy engine takes it as rows.
    fn is_strided(&self) -> bool {
        self.direct.calls * 8.0 <= self.pieces
    }

    /// Bytes of a piece.
    fn mean(&self) -> f64 {
        self.bytes / self.pieces.max(1.0)
    }
}

/// The DMAs that the first pieces take, and how many of those were looked at.
fn calls_of_pieces(fragments: &Fragments<'_>) -> (Calls, usize) {
    let (head, borders) = (fragments.head(), fragments.borders());
    let mut blocks = Vec::with_capacity(head.len());
    let mut seen = 0;
    for part in head.chunks(FEW) {
        for piece in part {
            append(&mut blocks, *piece, &borders);
        }
        seen += part.len();
        if is_apart(blocks.len(), seen) {
            break;
        }
    }
    (Calls::of(&blocks), seen)
}

/// The same of forms, whose blocks need not be found piece by piece.
fn calls_of_forms<'a>(forms: impl Iterator<Item = &'a CompactCopy<'a>>) -> (Calls, usize) {
    let (mut calls, mut seen) = (Calls::default(), 0);
    // Counted when it takes in nothing more.
    let mut last: Option<Rows> = None;
    let blocks = forms.flat_map(|form| form.blocks().enumerate().map(move |it| (form, it)));
    for (looked, (form, (at, block))) in (1usize..).zip(blocks) {
        seen += (block.len * block.count / form.len) as usize;
        // The copy engine takes no two forms as one.
        if at == 0 || !last.as_mut().is_some_and(|last| last.join(&block)) {
            last.replace(block).iter().for_each(|whole| calls.count(whole));
        }
        let begun = calls.calls as usize + 1;
        if seen >= LOOK || looked.is_multiple_of(FEW) && is_apart(begun, seen) {
            break;
        }
    }
    last.iter().for_each(|last| calls.count(last));
    (calls, seen)
}

/// The DMAs that host memory takes if the pieces lie side by side in device memory.
pub(super) fn host_calls(pieces: &[CopyDescriptor], fragments: &Fragments<'_>) -> Calls {
    let (mut blocks, borders) = (Vec::new(), fragments.host_borders());
    let mut staged = 0;
    for piece in pieces {
        let host = fragments.direction.host(piece);
        let (src, dst) = match fragments.direction {
            Direction::Store => (staged, host),
            Direction::Load => (host, staged),
        };
        staged += piece.len;
        let piece = CopyDescriptor { src, dst, len: piece.len };
        append(&mut blocks, piece, &borders);
    }
    Calls::of(&blocks)
}

/// What listing and sorting a piece costs the host, before the first one is on its way, in
/// nanoseconds (W12b beside one H200, 2026-11-30).
const LISTING: f64 = 15.0;

/// What the ways of one device cost, in bytes and nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs {
    link: f64,
    row: f64,
    call: f64,
    staging: f64,
    kernel_link: f64,
    launch: f64,
}

impl Costs {
    pub(super) fn of(costs: &HostLink) -> Self {
        Self {
            link: costs.link as f64 / 1000.0,
            row: costs.row_ns as f64,
            call: costs.call_ns as f64,
            staging: costs.staging_ns as f64,
            kernel_link: costs.kernel_link as f64 / 1000.0,
            launch: costs.launch_ns as f64,
        }
    }

    fn dma(&self, bytes: f64, Calls { calls, rows }: Calls) -> f64 {
        let on_link = bytes / self.link + (rows - 1.0).max(0.0) * self.row;
        (calls * self.call).max(on_link) + self.call
    }

    /// How long each way takes, about.
    fn times(&self, shape: &Shape) -> Times {
        Times {
            direct: self.dma(shape.bytes, shape.direct),
            staged: self.dma(shape.bytes, shape.staged) + self.staging,
            kernel: shape.bytes / self.kernel_link + self.launch,
        }
    }
}

struct Times {
    direct: f64,
    staged: f64,
    kernel: f64,
}

/// The way that the policy takes for a shape, where nobody asked for one and there is a kernel, if
/// that does not depend on what staging takes.
pub(super) fn choose_at_once(policy: Policy, throttle: u32, shape: &Shape) -> Option<Choice> {
    let reason = match policy {
        Policy::Strict => Reason::Strict,
        // Rows with strides leave the model all of its multiprocessors, and take the link at half
        // its rate and more from 4 KiB on.
        Policy::Balanced | Policy::Tail if shape.is_strided() => Reason::Strides,
        _ => return None,
    };
    let in_steps = is_in_steps(policy, throttle);
    Some(Choice { mode: OffloadMode::Direct, in_steps, reason })
}

/// Over the budget less moves at a time, in as few launches as ever: many short ones, or a DMA a
/// fragment, lengthen the model's steps more than one gather does (H200, 2026-11-30).
fn is_in_steps(policy: Policy, throttle: u32) -> bool {
    policy == Policy::Tail && throttle > 0
}

/// The way that the policy takes for a shape where [`choose_at_once`] says nothing.
/// `sorted` gives the DMAs of staging once the list is sorted, `None` if that helps little; it costs
/// the host time, and is asked only if it may matter.
pub(super) fn choose(
    policy: Policy,
    throttle: u32,
    costs: &Costs,
    mut shape: Shape,
    sorted: impl FnOnce() -> Option<Calls>,
) -> Choice {
    use OffloadMode::{Direct, Kernel, Staged};
    let in_steps = is_in_steps(policy, throttle);
    let choice = |mode, reason| Choice { mode, in_steps, reason };
    let direct_reason = if shape.is_strided() { Reason::Strides } else { Reason::LongPieces };
    let times = costs.times(&shape);
    let best = shape.bytes / costs.link + costs.staging;
    if times.direct <= best.min(times.kernel) * 1.1 {
        return choice(Direct, direct_reason);
    }
    // A launch on host memory holds multiprocessors for as long as the link takes, thirty times as
    // long as staging does: worth waiting for, up to a point, unless it is but a moment.
    const PATIENCE: f64 = 1.8;
    const MOMENT: f64 = 30_000.0;
    let patience = match policy {
        Policy::Throughput => 1.0,
        Policy::Balanced if times.kernel <= MOMENT => 1.0,
        _ => PATIENCE,
    };
    // Where even the best order would not do, none is looked for.
    let listed = best + shape.pieces * LISTING;
    if times.staged > best * 1.3
        && listed <= times.kernel * patience
        && let Some(calls) = sorted()
    {
        shape.staged = calls;
    }
    let Times { staged, kernel, direct } = costs.times(&shape);
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
pub(super) fn is_scattered(costs: &Costs, shape: &Shape) -> bool {
    let together = shape.bytes / costs.link * 1.1 + costs.call;
    costs.dma(shape.bytes, shape.staged) > together && shape.mean() < 1e6
}

#[cfg(test)]
mod tests {
    use kvferry_device::CompactEnd;

    use super::*;

    /// Pieces of one length, of which none lies beside another on the GPU; in host memory they are so
    /// many runs.
    fn shape(pieces: f64, len: f64, runs: f64) -> Shape {
        let scattered = Calls { calls: pieces, rows: pieces };
        let staged = Calls { calls: runs, rows: runs };
        Shape { bytes: pieces * len, pieces, direct: scattered, staged }
    }

    fn mode(policy: Policy, shape: Shape, sorted: Option<Calls>) -> OffloadMode {
        let costs = Costs::of(&HostLink::default());
        let choose = || choose(policy, 0, &costs, shape, || sorted);
        choose_at_once(policy, 0, &shape).unwrap_or_else(choose).mode
    }

    /// Pages of 4 KiB in 64 layers, and those of the store, page by page.
    fn pages<'a>(pages: &'a [u32], stored: &'a [u32], layers: u32) -> CompactCopy<'a> {
        let end = |pages: &'a [u32], page_stride, layer_stride| CompactEnd {
            addr: 1 << 30,
            row_stride: 0,
            layer_stride,
            page_stride,
            pages,
        };
        let (src, dst) = (end(pages, 4096, 1 << 20), end(stored, 64 * 4096, 4096));
        CompactCopy { src, dst, len: 4096, rows: 1, layers, pages: pages.len() as u32 }
    }

    #[test]
    fn forms_are_judged_by_the_blocks_that_the_copy_engine_takes() {
        let (apart, stored) = ([7, 2, 11], [0, 1, 2]);
        let of = |forms: &[CompactCopy<'_>]| {
            let (Calls { calls, rows }, seen) = calls_of_forms(forms.iter());
            (calls as usize, rows as usize, seen)
        };
        assert_eq!(of(&[pages(&apart, &stored, 64)]), (3, 192, 192), "a block for each page");
        let end = CompactEnd { page_stride: 4096, layer_stride: 1 << 20, ..CompactEnd::default() };
        let beside = CompactCopy { src: end, dst: end, len: 4096, rows: 1, layers: 64, pages: 2 };
        assert_eq!(of(&[beside, beside]), (2, 128, 256), "pages side by side");
        let many: Vec<u32> = (0..1000).map(|page| page * 7 % 1000).collect();
        assert_eq!(of(&[pages(&many, &many, 64)]), (4, LOOK, LOOK), "no more than tell");
        assert_eq!(of(&[pages(&many, &many, 1)]), (FEW, FEW, FEW), "pieces that nothing follows");
        let nothing = CompactCopy { len: 0, ..beside };
        assert_eq!(of(&[nothing]), (0, 0, 0));
    }

    /// What was the quickest on one H200 (2026-11-30), or within a twentieth of it.
    #[test]
    fn the_quickest_way_of_what_was_measured_is_taken() {
        use OffloadMode::{Direct, Kernel, Staged};
        use Policy::{Balanced, Throughput};
        let whole = |pieces, len| shape(pieces, len, 1.0);
        let one = Some(Calls { calls: 1.0, rows: 1.0 });
        for policy in [Balanced, Throughput] {
            assert_eq!(mode(policy, whole(40_960.0, 8192.0), None), Staged, "W09b");
            assert_eq!(mode(policy, whole(65_536.0, 32_768.0), None), Staged, "W09a");
            for (pieces, len) in [(16.0, 1024.0), (256.0, 1024.0), (128.0, 4096.0)] {
                assert_eq!(
                    mode(policy, whole(pieces, len), None),
                    Kernel,
                    "{pieces} x {len} of W11"
                );
            }
            assert_eq!(mode(policy, whole(2.0, 32_768.0), None), Direct, "two DMAs");
            assert_eq!(mode(policy, whole(8.0, 16e6), None), Direct, "long pieces");
        }
        assert_eq!(mode(Balanced, whole(16_384.0, 4096.0), None), Staged, "R6");
        let any_order = shape(16_384.0, 4096.0, 11_000.0);
        assert_eq!(mode(Balanced, any_order, one), Staged, "R6, dense in any order");
        assert_eq!(mode(Balanced, any_order, None), Kernel, "R6, apart");
        // A moment of all multiprocessors is no more than what staging takes of them.
        let small = whole(1024.0, 4096.0);
        assert_eq!((mode(Throughput, small, None), mode(Balanced, small, None)), (Kernel, Staged));
    }

    #[test]
    fn no_order_is_looked_for_where_listing_the_pieces_takes_longer_than_the_kernel() {
        let rows = Calls { calls: 1.0, rows: 1_048_576.0 };
        let w12b = Shape { staged: rows, ..shape(1_048_576.0, 512.0, 1.0) };
        let costs = Costs::of(&HostLink::default());
        let choice =
            choose(Policy::Balanced, 0, &costs, w12b, || panic!("a second of 1,048,576 pieces"));
        assert_eq!(choice.mode, OffloadMode::Kernel);
    }

    #[test]
    fn a_device_whose_kernel_or_copy_engine_is_slower_goes_another_way() {
        let r6 = shape(16_384.0, 4096.0, 1.0);
        let at =
            |link: HostLink| choose(Policy::Throughput, 0, &Costs::of(&link), r6, || None).mode;
        let h200 = HostLink::default();
        assert_eq!(at(h200), OffloadMode::Staged);
        assert_eq!(
            at(HostLink { link: 20_000, ..h200 }),
            OffloadMode::Kernel,
            "a slow copy engine"
        );
        assert_eq!(at(HostLink { staging_ns: 900_000, ..h200 }), OffloadMode::Kernel);
        assert_eq!(at(HostLink { call_ns: 50, row_ns: 0, ..h200 }), OffloadMode::Direct);
    }
}
