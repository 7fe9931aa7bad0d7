//! The same copies without the engine: what a benchmark compares the engine with.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_device::{CopyDescriptor, CopySource, QueueOptions, Work};

use crate::engine::Engine;
use crate::error::Result;
use crate::plan::{Op, Range, Scratch, Want};
use crate::target::Target;

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
    let mut scratch = Scratch::default();
    let plan = engine.peer().plan_ranges(&mut scratch, engine.registry(), target, op, ranges)?;
    let device = engine.peer().device(plan.device);
    let kernel = device.info().capabilities.contains(kvferry_device::Capabilities::KERNEL);
    if !kernel || plan.checked.large > 0 {
        return Ok(None);
    }
    let mut descriptors = vec![CopyDescriptor::default(); ranges.len()];
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
    if count == 0 {
        return Ok(None);
    }
    let values = engine.peer().tuning(plan.device).values;
    let options = QueueOptions {
        ring_slots: 1,
        // One more than it holds, so that the queue sees the end without asking for another slot.
        slot_descriptors: count + 1,
        first_descriptors: count + 1,
        streams: 1,
        max_grid_blocks: values.max_grid_blocks,
        high_priority: engine.config().high_priority,
        stall_timeout: engine.config().stall_timeout,
        tile_bytes: values.tile_bytes,
    };
    let mut queue = Arc::clone(device).queue(&options)?;
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
