//! Measures what each way between a device and host memory costs, by which `auto` chooses.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_device::{Device, Vendor, host};

use super::answers::good_enough;
use super::{Effort, KIB, MIB, Question, Sample, WARM_UP, Way};
use crate::batch::State;
use crate::buffer::Buffer;
use crate::config::Config;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::plan::{Op, Range};
use crate::profile::{HostLink, Values};
use crate::request::{Copies, OffloadMode, Part, SubmitOptions};
use crate::target::Target;

const PAGE: u64 = 4 * KIB;
/// Bytes of a piece of which many fill the link.
const PIECE: u64 = 16 * KIB;
/// More than the first, so that what each call costs is seen.
const CALLS: u64 = 64;
/// Pieces of a launch that is over in a moment.
const FEW: u64 = 32;
const GRIDS: [u32; 7] = [16, 32, 48, 64, 96, 128, 192];

/// Longer than any transfer here takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Measures a device with a kernel. `None` on the processor, which needs no such choice.
pub(super) fn measure(
    config: &Config,
    device: &Arc<dyn Device>,
    values: &Values,
    effort: Effort,
    samples: &mut Vec<Sample>,
) -> Result<Option<HostLink>> {
    if device.info().vendor == Vendor::Host {
        return Ok(None);
    }
    let host = host()?;
    let room = effort.bytes.min(64 * MIB);
    let sample = |bench: &Bench, way, pieces: u64, piece_bytes, grid| {
        Ok::<_, Error>(Sample {
            question: Question::HostLink,
            to: host.info().to_string(),
            way,
            pieces: pieces as usize,
            piece_bytes,
            tile_bytes: values.tile_bytes,
            max_grid_blocks: grid,
            nanoseconds: bench.median(way, pieces, piece_bytes, effort.runs)?,
        })
    };
    let many = (room / PIECE).max(1);
    let mut of_grids = Vec::with_capacity(GRIDS.len());
    for grid in GRIDS {
        let bench = Bench::open(config, device, &host, values, grid, room)?;
        of_grids.push(sample(&bench, Way::Kernel, many, PIECE, grid)?);
    }
    // The fewer the blocks, the more is left for the model.
    let good = good_enough(&of_grids, |sample| sample.max_grid_blocks);
    let grid = good.into_iter().min().unwrap_or(HostLink::default().grid_blocks);
    samples.append(&mut of_grids);

    let bench = Bench::open(config, device, &host, values, grid, room)?;
    let mut time = |way, pieces, piece_bytes| {
        let sample = sample(&bench, way, pieces, piece_bytes, grid)?;
        let nanoseconds = sample.nanoseconds;
        samples.push(sample);
        Ok::<_, Error>(nanoseconds)
    };
    let rows = (room / (2 * PAGE)).clamp(1, 4096);
    let staged = (room / PAGE).clamp(1, 256);
    let times = Times {
        small: time(Way::Dma, 1, PAGE)?,
        whole: (room, time(Way::Dma, 1, room)?),
        calls: time(Way::Dma, CALLS, PAGE)?,
        rows: (rows, time(Way::Rows, rows, PAGE)?),
        kernel_small: time(Way::Kernel, FEW, PAGE)?,
        kernel_whole: (many * PIECE, time(Way::Kernel, many, PIECE)?),
        staged: time(Way::Staged, staged, PAGE)?,
        unstaged: time(Way::Dma, 1, staged * PAGE)?,
    };
    Ok(Some(times.costs(grid)))
}

/// What was measured, in nanoseconds, some of it with how much of what it is for.
#[derive(Clone, Copy, Debug)]
struct Times {
    /// One DMA of one page.
    small: u64,
    /// One DMA of so many bytes.
    whole: (u64, u64),
    calls: u64,
    /// One 2-D DMA of so many rows, each a page.
    rows: (u64, u64),
    kernel_small: u64,
    /// Of so many bytes.
    kernel_whole: (u64, u64),
    /// A few pages through a buffer.
    staged: u64,
    /// As many bytes in one DMA.
    unstaged: u64,
}

impl Times {
    fn costs(self, grid_blocks: u32) -> HostLink {
        let rate = |bytes: u64, nanoseconds: u64| (bytes * 1000 / nanoseconds.max(1)).max(1);
        let link = rate(self.whole.0, self.whole.1.saturating_sub(self.small));
        let (few, (bytes, whole)) = (FEW * PAGE, self.kernel_whole);
        let kernel_link = rate(bytes.saturating_sub(few), whole.saturating_sub(self.kernel_small));
        let call_ns = self.calls.saturating_sub(self.small) / (CALLS - 1);
        let (rows, time) = self.rows;
        let beside_bytes =
            time.saturating_sub(self.small).saturating_sub(rows * PAGE * 1000 / link);
        // One DMA is counted as twice its call.
        let launch = (self.kernel_small + 2 * call_ns).saturating_sub(self.small);
        HostLink {
            link,
            row_ns: beside_bytes / rows,
            call_ns: call_ns.max(1),
            staging_ns: self.staged.saturating_sub(self.unstaged),
            kernel_link,
            launch_ns: launch.saturating_sub(few * 1000 / kernel_link),
            grid_blocks,
        }
    }
}

/// An engine, and memory at both ends.
struct Bench {
    engine: Arc<Engine>,
    target: Target,
    gpu: Buffer,
    host: Buffer,
}

impl Bench {
    fn open(
        config: &Config,
        device: &Arc<dyn Device>,
        host: &Arc<dyn Device>,
        values: &Values,
        grid: u32,
        room: u64,
    ) -> Result<Self> {
        // A bound that the program sets holds on host memory, too.
        let mut config = config.clone();
        config.max_grid_blocks = grid;
        config.tile_bytes = values.tile_bytes;
        (config.cache_directory, config.max_rate) = (None, None);
        let engine = Engine::new(config, vec![Arc::clone(device), Arc::clone(host)])?;
        let (gpu, host) = (engine.allocate(device, 2 * room)?, engine.allocate(host, room)?);
        Ok(Self { target: engine.local()?, engine, gpu, host })
    }

    /// Pieces in order in host memory; on the device a piece apart, in order as rows and else not.
    fn ranges(&self, way: Way, pieces: u64, piece_bytes: u64) -> Vec<Range> {
        // Has no divisor with a power of two, nor with any other count that is used here.
        const STEP: u64 = 7919;
        let step = if way == Way::Rows { 1 } else { STEP };
        let range = |at| Range {
            local: self.gpu.addr() + at * step % pieces * 2 * piece_bytes,
            remote: self.host.addr() + at * piece_bytes,
            len: piece_bytes,
        };
        (0..pieces).map(range).collect()
    }

    /// The median of stores, from the submission until the bytes have landed.
    fn median(&self, way: Way, pieces: u64, piece_bytes: u64, runs: usize) -> Result<u64> {
        // A small memory has the same pieces, shorter.
        let piece_bytes = piece_bytes.min(self.host.len() / pieces).max(1);
        let ranges = self.ranges(way, pieces, piece_bytes);
        let offload = match way {
            Way::Kernel => OffloadMode::Kernel,
            Way::Dma | Way::Rows => OffloadMode::Direct,
            Way::Staged => OffloadMode::Staged,
        };
        let options = SubmitOptions { offload, ..SubmitOptions::default() };
        let part = Part { target: &self.target, op: Op::Write, copies: Copies::Ranges(&ranges) };
        let mut took = Vec::with_capacity(runs);
        for run in 0..WARM_UP + runs.max(1) {
            let start = Instant::now();
            let id = self.engine.submit_parts(&[part], &options)?;
            let status = self.engine.wait(id, PATIENCE)?;
            let time = start.elapsed().as_nanos() as u64;
            if let State::Failed(error) = status.state {
                return Err(error);
            }
            self.engine.release(id)?;
            if run >= WARM_UP {
                took.push(time);
            }
        }
        let middle = took.len() / 2;
        Ok(*took.select_nth_unstable(middle).1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_follow_from_times_as_an_h200_takes_them() {
        // 55 GB/s, 13 us a DMA of which 2.5 are each further one's; 50 GB/s by the kernel.
        let times = Times {
            small: 13_000,
            whole: (64 * MIB, 13_000 + 64 * MIB / 55),
            calls: 13_000 + 63 * 2500,
            rows: (4096, 13_000 + 4096 * PAGE / 55 + 4096 * 60),
            kernel_small: 16_500 + FEW * PAGE / 50,
            kernel_whole: (64 * MIB, 16_500 + 64 * MIB / 50),
            staged: 60_000,
            unstaged: 36_000,
        };
        let costs = times.costs(48);
        let near = |value: u64, expected: u64| value.abs_diff(expected) * 100 <= expected;
        assert!(near(costs.link, 55_000) && near(costs.kernel_link, 50_000), "{costs:?}");
        assert!(near(costs.row_ns, 60) && near(costs.call_ns, 2500), "{costs:?}");
        assert!(near(costs.launch_ns, 8500) && near(costs.staging_ns, 24_000), "{costs:?}");
        assert_eq!(costs.grid_blocks, 48);
    }

    #[test]
    fn times_that_make_no_sense_give_costs_that_a_choice_can_be_made_by() {
        let times = Times {
            small: 9,
            whole: (1, 1),
            calls: 1,
            rows: (1, 1),
            kernel_small: 1,
            kernel_whole: (1, 1),
            staged: 1,
            unstaged: 2,
        };
        let costs = times.costs(1);
        assert!(costs.link > 0 && costs.kernel_link > 0 && costs.call_ns > 0, "{costs:?}");
    }
}
