//! How each way hands a batch to its queue.

use std::borrow::Cow;
use std::slice;
use std::sync::Arc;

use kvferry_device::{
    CompactCopy, CopyDescriptor, CopySource, Rows, SliceSource, Staged, Vendor, Work,
};

use super::fragments::{Borders, Direction, append, close};
use super::paced;
use super::stages::{Buffers, Division, Packer};
use super::{Parts, Way, lock};
use crate::batch::Path;
use crate::config::Source;
use crate::error::Result;
use crate::plan::Want;
use crate::transport::fences::Order;
use crate::transport::lane::Lane;
use crate::transport::load::Load;
use crate::transport::peer::Submitted;
use crate::transport::place::Plan;

/// Pieces that pass a buffer.
pub(super) struct Passing<'a> {
    pub(super) direction: Direction,
    pub(super) source: &'a mut dyn CopySource,
    /// Of host memory.
    pub(super) borders: &'a Borders,
    pub(super) bytes: u64,
    /// Pieces, at most.
    pub(super) count: u64,
    pub(super) division: Division,
}

/// Starts what passes a buffer. `check` is asked once, beside what is in nobody's sight: nothing else
/// is written unless it finds the batch good.
pub(super) fn start_staged(
    way: &Way,
    batch: Passing<'_>,
    order: Order<'_>,
    check: impl FnOnce() -> Result<()>,
    submitted: &mut Submitted,
) -> Result<()> {
    let Passing { direction, source, borders, bytes, count, division } = batch;
    let gated = order.waits();
    let mut bounce = lock(&way.bounce);
    let taken = bounce.take(gated)?;
    let values = &way.lane.tuning.values;
    let tile = values.tile_bytes;
    let buffers = Buffers::of(taken.base, taken.bytes, bytes, count, tile);
    let mut stages = Packer::new(source, direction, borders, buffers, division, tile);
    let mut checked = Ok(());
    let mut check = Some(check);
    let mut may_leave = || {
        checked = check.take().map_or(Ok(()), |check| check());
        checked.is_ok()
    };
    let mut nothing = SliceSource(&[]);
    let behind = taken.behind.as_slice();
    let mut work = Work {
        staged: Some(Staged { stages: &mut stages, behind, may_leave: &mut may_leave }),
        after: order.after,
        behind: order.behind,
        max_grid_blocks: values.max_grid_blocks,
        ..Work::pieces(&mut nothing)
    };
    submitted.path = Path::Staged;
    // SAFETY: the caller keeps what it planned until the batch has ended; the buffers are this
    // submission's until it is done, which is what `used` says.
    let outcome = unsafe { way.lane.submit(&mut work, &mut submitted.pending) };
    if let Some(pending) = submitted.pending.last() {
        bounce.used(&taken, pending.ticket, gated);
    }
    if let Err(refused) = checked {
        // Whoever submitted may free its memory at once, which the buffer is filled from.
        return match way.lane.settle(&submitted.pending) {
            Ok(()) => Err(refused),
            Err(_) => {
                submitted.failure = Some(refused);
                Ok(())
            }
        };
    }
    match outcome {
        Err(error) if submitted.pending.is_empty() => return Err(error),
        outcome => submitted.failure = outcome.err(),
    }
    Ok(())
}

/// Submits steps by the kernel, with at most so many blocks, or by DMA alone.
pub(super) fn step_without_buffers(
    lane: &Arc<Lane>,
    kernel: Option<u32>,
    borders: Borders,
    submitted: &mut Submitted,
) -> paced::Submit {
    let vendor = lane.device.info().vendor;
    submitted.path = match (vendor, kernel) {
        (Vendor::Host, _) => Path::Memcpy,
        (_, Some(_)) => Path::Kernel,
        (_, None) => Path::Dma,
    };
    let lane = Arc::clone(lane);
    let tile_bytes = lane.tuning.values.tile_bytes;
    Box::new(move |step, pending| {
        let (mut tiles, mut compact, mut large) = (Vec::new(), Vec::new(), Vec::new());
        if kernel.is_some() {
            let in_tiles = |piece: &CopyDescriptor| {
                let CopyDescriptor { src, dst, len } = *piece;
                (0..len.div_ceil(tile_bytes)).map(move |tile| {
                    let at = tile * tile_bytes;
                    CopyDescriptor { src: src + at, dst: dst + at, len: tile_bytes.min(len - at) }
                })
            };
            tiles.extend(step.iter().flat_map(in_tiles));
        } else {
            let mut blocks = Vec::new();
            step.iter().for_each(|piece| append(&mut blocks, *piece, &borders));
            close(&mut blocks, &borders);
            split(blocks, &mut compact, &mut large);
        }
        let mut pieces = SliceSource(&tiles);
        let mut work = Work {
            compact: &compact,
            large: &large,
            kernel: kernel.is_some(),
            max_grid_blocks: kernel.unwrap_or(1),
            ..Work::pieces(&mut pieces)
        };
        // SAFETY: as in `start_staged`.
        unsafe { lane.submit(&mut work, pending) }
    })
}

/// Blocks of rows for 2-D DMAs, and pieces for plain ones.
fn split(blocks: Vec<Rows>, compact: &mut Vec<CompactCopy<'_>>, large: &mut Vec<CopyDescriptor>) {
    for block in blocks {
        match block {
            Rows { src, dst, len, count: 1, .. } => large.push(CopyDescriptor { src, dst, len }),
            rows => compact.push(rows.compact()),
        }
    }
}

/// A run of a list of ranges.
fn rows_of(run: &CompactCopy<'_>) -> Rows {
    Rows {
        src: run.src.addr,
        dst: run.dst.addr,
        len: run.len,
        src_pitch: run.src.row_stride,
        dst_pitch: run.dst.row_stride,
        count: run.rows.into(),
    }
}

fn append_all(blocks: &mut Vec<Rows>, pieces: &mut dyn CopySource, borders: &Borders) {
    let mut some = [CopyDescriptor::default(); 256];
    loop {
        let count = pieces.fill(&mut some);
        if count == 0 {
            break;
        }
        for piece in &some[..count] {
            append(blocks, *piece, borders);
        }
    }
    close(blocks, borders);
}

/// One DMA for each piece and block of rows.
pub(super) fn start_direct(
    lane: &Arc<Lane>,
    parts: &Parts<'_>,
    order: Order<'_>,
    submitted: &mut Submitted,
) -> Result<()> {
    let mut large = Vec::new();
    let mut compact = Cow::Borrowed(&[][..]);
    for &(plan, strides) in parts {
        match plan {
            Plan::Forms(plan) if compact.is_empty() => compact = Cow::Borrowed(&plan.copies),
            Plan::Forms(plan) => compact.to_mut().extend(&plan.copies),
            Plan::Ranges(ranges) => {
                let borders = Borders::of(&[plan]);
                let mut blocks: Vec<Rows> = Vec::new();
                // Runs were found already, and to look at each of their pieces again takes longer.
                for run in ranges.compact(strides) {
                    blocks.push(rows_of(&run));
                    close(&mut blocks, &borders);
                }
                let whole = 0..ranges.ranges.len();
                let rest = match strides.runs.is_empty() {
                    true => slice::from_ref(&whole),
                    false => &strides.rest[..],
                };
                for slice in rest {
                    let mut pieces = ranges.pieces_of(&ranges.ranges[slice.clone()], Want::All);
                    append_all(&mut blocks, &mut pieces, &borders);
                }
                split(blocks, compact.to_mut(), &mut large);
            }
        }
    }
    let mut nothing = SliceSource(&[]);
    let mut work = Work {
        compact: &compact,
        large: &large,
        kernel: false,
        one_stream: true,
        after: order.after,
        behind: order.behind,
        ..Work::pieces(&mut nothing)
    };
    submitted.path = Load::default().path(lane.device.info().vendor, false);
    // SAFETY: as in `start_staged`.
    match unsafe { lane.submit(&mut work, &mut submitted.pending) } {
        Err(error) if submitted.pending.is_empty() => return Err(error),
        outcome => submitted.failure = outcome.err(),
    }
    Ok(())
}

/// The kernel on host memory in place; DMA for pieces that are large.
pub(super) fn start_kernel(
    lane: &Arc<Lane>,
    parts: &Parts<'_>,
    order: Order<'_>,
    submitted: &mut Submitted,
) -> Result<()> {
    let batch_min = lane.tuning.values.batch_min;
    let loads = parts.iter().map(|&(plan, strides)| Load::of(plan, strides, true, batch_min));
    let loads = Load::joined(loads.collect());
    // SAFETY: as in `start_staged`.
    unsafe { Load::submit(loads, lane, true, host_grid(lane), order, None, submitted) }
}

/// Blocks of a launch on host memory: what the environment or the program says, if either does.
pub(super) fn host_grid(lane: &Lane) -> u32 {
    let most = lane.tuning.values.max_grid_blocks;
    let said = lane.tuning.settings().iter().any(|setting| {
        setting.name == "MC_KVFERRY_MAX_GRID_BLOCKS"
            && matches!(setting.source, Source::Environment | Source::Program)
    });
    if said { most } else { most.min(lane.tuning.host_link.grid_blocks) }
}
