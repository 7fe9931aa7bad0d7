//! The same copies without the engine: what a benchmark compares the engine with.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_device::{Capabilities, CopyDescriptor, CopySource, Queue, QueueOptions, Work};

use crate::engine::Engine;
use crate::error::Result;
use crate::plan::{Op, Range, Scratch, Want};
use crate::target::Target;
use crate::transport::place::RangePlan;

/// Times a bare launch: the descriptors lie packed in the ring, one launch covers them all, and
/// each duration is from that launch to its completion. `None` where the device has no kernel, or
/// the engine would leave large pieces to DMA.
///
/// # Errors
/// As [`Engine::submit`].
pub fn bare_launches(
    engine: &Engine,
    target: &Target,
    op: Op,
    ranges: &[Range],
    times: usize,
) -> Result<Option<Vec<Duration>>> {
    let Some((plan, descriptors)) = prepare(engine, target, op, ranges)? else { return Ok(None) };
    let mut queue = open_queue(engine, plan.device, descriptors.len(), 1)?;
    let completions = queue.completions();
    let mut took = Vec::with_capacity(times);
    for _ in 0..times {
        let mut pieces = Prepacked { descriptors: &descriptors, at: 0, packed: !took.is_empty() };
        let start = Instant::now();
        // SAFETY: the plan was checked, and it holds its regions and mappings until it is dropped
        // at the end of this function, after the queue has completed everything.
        let submitted = unsafe { queue.submit(&mut Work::pieces(&mut pieces)) };
        let ticket = submitted.map_err(|error| error.error)?;
        while !completions.done(ticket) {
            std::hint::spin_loop();
            if start.elapsed() > engine.config().stall_timeout {
                queue.check()?;
            }
        }
        took.push(start.elapsed());
    }
    Ok(Some(took))
}

/// Times the kernel of such a list: one launch covers it all, so many follow each other on one
/// stream, and a duration is the time of a launch of such a row. Starting a launch is hidden behind
/// the one before. Where packing takes longer than the kernel, which it does for pieces of a few
/// hundred bytes, that is what is timed; so this is never less than what the kernel takes. `None`
/// as for [`bare_launches`].
///
/// # Errors
/// As [`Engine::submit`].
pub fn bare_kernel(
    engine: &Engine,
    target: &Target,
    op: Op,
    ranges: &[Range],
    times: usize,
) -> Result<Option<Vec<Duration>>> {
    let Some((plan, descriptors)) = prepare(engine, target, op, ranges)? else { return Ok(None) };
    let row = (ROW_DESCRIPTORS / descriptors.len()).clamp(2, 8);
    let mut queue = open_queue(engine, plan.device, descriptors.len(), row)?;
    let completions = queue.completions();
    let mut took = Vec::with_capacity(times);
    // The first row warms up.
    for repeat in 0..=times {
        let start = Instant::now();
        let mut last = None;
        for _ in 0..row {
            let mut pieces = Prepacked { descriptors: &descriptors, at: 0, packed: false };
            // SAFETY: as in `bare_launches`. Launches of a row write the same bytes to the same
            // places.
            let submitted = unsafe { queue.submit(&mut Work::pieces(&mut pieces)) };
            last = Some(submitted.map_err(|error| error.error)?);
        }
        while last.is_some_and(|ticket| !completions.done(ticket)) {
            std::hint::spin_loop();
            if start.elapsed() > engine.config().stall_timeout {
                queue.check()?;
            }
        }
        if repeat > 0 {
            took.push(start.elapsed() / row as u32);
        }
    }
    Ok(Some(took))
}

/// Descriptors of the launches of a row together, about: 48 MB of pinned memory.
const ROW_DESCRIPTORS: usize = 2_000_000;

/// Times checking and packing a list, without submitting it.
///
/// # Errors
/// As [`Engine::submit`].
pub fn packing(
    engine: &Engine,
    target: &Target,
    op: Op,
    ranges: &[Range],
    times: usize,
) -> Result<Vec<Duration>> {
    let mut scratch = Scratch::default();
    let mut descriptors = Vec::new();
    let mut took = Vec::with_capacity(times);
    for _ in 0..times {
        let start = Instant::now();
        let plan =
            engine.peer().plan_ranges(&mut scratch, engine.registry(), target, op, ranges)?;
        pack(&plan, ranges.len(), &mut descriptors);
        took.push(start.elapsed());
    }
    Ok(took)
}

/// Packs what a launch copies into `descriptors`, of which then there are no others.
fn pack(plan: &RangePlan<'_>, ranges: usize, descriptors: &mut Vec<CopyDescriptor>) {
    descriptors.resize(descriptors.len().max(ranges), CopyDescriptor::default());
    let mut pieces = plan.pieces(Want::Small);
    let mut count = 0;
    loop {
        if count == descriptors.len() {
            // Tiles can be more than ranges.
            descriptors.resize(count * 2 + 1, CopyDescriptor::default());
        }
        match pieces.fill(&mut descriptors[count..]) {
            0 => break,
            filled => count += filled,
        }
    }
    descriptors.truncate(count);
}

/// Checks a list and packs all that one launch of it copies; the plan holds what that touches. `None`
/// as for [`bare_launches`].
fn prepare<'a>(
    engine: &Engine,
    target: &Target,
    op: Op,
    ranges: &'a [Range],
) -> Result<Option<(RangePlan<'a>, Vec<CopyDescriptor>)>> {
    let mut scratch = Scratch::default();
    let plan = engine.peer().plan_ranges(&mut scratch, engine.registry(), target, op, ranges)?;
    let info = engine.peer().device(plan.device).info();
    if !info.capabilities.contains(Capabilities::KERNEL) || plan.checked.large > 0 {
        return Ok(None);
    }
    let mut descriptors = Vec::new();
    pack(&plan, ranges.len(), &mut descriptors);
    Ok((!descriptors.is_empty()).then_some((plan, descriptors)))
}

/// A queue of one stream, whose slots hold so many descriptors, each a launch.
fn open_queue(
    engine: &Engine,
    device: usize,
    descriptors: usize,
    slots: usize,
) -> Result<Box<dyn Queue>> {
    let values = engine.peer().tuning(device).values;
    let options = QueueOptions {
        ring_slots: slots,
        // One more than it holds, so that the queue sees the end without asking for another slot.
        slot_descriptors: descriptors + 1,
        first_descriptors: descriptors + 1,
        streams: 1,
        max_grid_blocks: values.max_grid_blocks,
        high_priority: engine.config().high_priority,
        stall_timeout: engine.config().stall_timeout,
        siblings: None,
        tile_bytes: values.tile_bytes,
    };
    Ok(Arc::clone(engine.peer().device(device)).queue(&options)?)
}

/// Packs the slot the first time. Afterwards the ring's only slot holds the descriptors already,
/// but for the first few, which the queue takes separately to see whether there are more.
struct Prepacked<'a> {
    descriptors: &'a [CopyDescriptor],
    at: usize,
    packed: bool,
}

impl CopySource for Prepacked<'_> {
    fn fill(&mut self, slot: &mut [CopyDescriptor]) -> usize {
        let rest = &self.descriptors[self.at..];
        let count = rest.len().min(slot.len());
        if self.at == 0 || !self.packed {
            slot[..count].copy_from_slice(&rest[..count]);
        }
        self.at += count;
        count
    }
}
