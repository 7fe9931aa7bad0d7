//! Measures on a device which values of its knobs are best, for its [`Profile`].
//!
//! Each question is one comparison of medians. What is asked first uses defaults, and later
//! questions use the answers of earlier ones: tile, grid, fewest pieces of a launch, largest small
//! piece.

mod host_link;

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use kvferry_device::{
    Capabilities, Completions, CopyDescriptor, Device, Memory, Queue, QueueOptions, SliceSource,
    Vendor, Work,
};
use serde::{Deserialize, Serialize};

use crate::config::{Config, MAX_GRID_BLOCKS};
use crate::error::{Error, Result};
use crate::profile::{Profile, Values};

/// What differs by less than this is taken as equal.
const NOISE: f64 = 1.02;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

const TILES: [u64; 5] = [4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB];
/// Pieces, and bytes of each: many tiles for each warp, and few.
const TILE_SHAPES: [(usize, u64); 2] = [(64, MIB), (4, MIB)];
const GRIDS: [u32; 13] = [16, 24, 32, 48, 64, 96, 128, 192, 264, 384, 528, 792, 1056];
/// Few long pieces, and many short ones.
const GRID_SHAPES: [(usize, u64); 2] = [(64, MIB), (8192, 8 * KIB)];
const FEW: [usize; 8] = [1, 2, 3, 4, 6, 8, 12, 16];
const FEW_SIZES: [u64; 2] = [4 * KIB, 64 * KIB];
const SIZES: [u64; 14] = [
    4 * KIB,
    8 * KIB,
    16 * KIB,
    32 * KIB,
    64 * KIB,
    128 * KIB,
    256 * KIB,
    512 * KIB,
    MIB,
    2 * MIB,
    4 * MIB,
    8 * MIB,
    16 * MIB,
    32 * MIB,
];
const SIZE_COUNTS: [usize; 3] = [4, 16, 64];

/// Runs that are not counted: clocks rise, caches of addresses fill.
const WARM_UP: usize = 3;

/// How often a run that takes long asks the driver whether the device still works.
const CHECK: Duration = Duration::from_millis(100);

/// How much a calibration does.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Bytes of each of the memories that it copies between.
    pub bytes: u64,
    /// Runs whose median is a sample.
    pub runs: usize,
}

impl Effort {
    /// A few seconds on that device: 128 MiB on a GPU, which is more than its caches hold.
    pub fn on(device: &dyn Device) -> Self {
        match device.info().vendor {
            Vendor::Host | Vendor::Sim => Self { bytes: 8 * MIB, runs: 5 },
            _ => Self { bytes: 128 * MIB, runs: 31 },
        }
    }
}

/// What a sample was taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Question {
    /// How long a tile is.
    Tile,
    /// How many blocks a launch has.
    Grid,
    /// From how many pieces on a launch is quicker.
    Few,
    /// From which length of a piece on DMA is quicker.
    Size,
    /// What each way to host memory costs.
    HostLink,
}

/// What copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// The copy kernel, in one submission.
    Kernel,
    /// One DMA a piece.
    Dma,
    /// One 2-D DMA, of which a piece is a row.
    Rows,
    /// A gather by the kernel, and one DMA.
    Staged,
}

/// One measured time: pieces of one length, scattered over two memories, from the submission until
/// the bytes have landed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// What it was taken for.
    pub question: Question,
    /// The device that was written to.
    pub to: String,
    /// What copied.
    pub way: Way,
    /// Pieces of the submission.
    pub pieces: usize,
    /// Bytes of each.
    pub piece_bytes: u64,
    /// Bytes of a tile.
    pub tile_bytes: u64,
    /// Most blocks of a launch; a device may run fewer at once.
    pub max_grid_blocks: u32,
    /// The median, in nanoseconds.
    pub nanoseconds: u64,
}

/// Measures on a device, between two memories of its own and, where `other` is a GPU in its reach,
/// from the one to the other: then the values are those of the link, which peers' memory is behind.
///
/// # Errors
/// [`Error::NoKernel`], as there is nothing to choose then, and the device's.
pub fn calibrate(
    config: &Config,
    device: &Arc<dyn Device>,
    other: Option<&Arc<dyn Device>>,
    effort: Effort,
) -> Result<Profile> {
    let info = device.info();
    if !info.capabilities.contains(Capabilities::KERNEL) {
        let (device, reason) = (info.to_string(), info.kernel.clone());
        return Err(Error::NoKernel { device, reason });
    }
    let mut samples = Vec::new();
    let mut values = run(config, device, device, effort, &mut samples)?;
    // Host memory would have to be mapped first, and no peer's GPU memory is behind that link.
    let in_reach = |other: &&Arc<dyn Device>| {
        other.info().vendor != Vendor::Host && device.reaches(&other.info().uuid)
    };
    if let Some(other) = other.filter(in_reach) {
        values = run(config, device, other, effort, &mut samples)?;
    }
    let host_link = host_link::measure(config, device, &values, effort, &mut samples)?;
    Ok(Profile {
        date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        name: info.name.clone(),
        uuid: info.uuid.to_string(),
        architecture: info.architecture.clone(),
        values,
        host_link,
        samples,
    })
}

/// Asks all questions of copies from `device` to `other`.
fn run(
    config: &Config,
    device: &Arc<dyn Device>,
    other: &Arc<dyn Device>,
    effort: Effort,
    samples: &mut Vec<Sample>,
) -> Result<Values> {
    let mut bench = Bench::open(config, device, other, effort)?;
    let mut answer = |question, values: &mut Values, choose: fn(&[Sample], &mut Values)| {
        let asked = bench.ask(question, values)?;
        choose(&asked, values);
        samples.extend(asked);
        Ok::<_, Error>(())
    };
    let mut values = Values::of(&Config::default());
    answer(Question::Tile, &mut values, |samples, values| {
        // The longer the tile, the fewer descriptors the host packs.
        let tiles = good_enough(samples, |sample| sample.tile_bytes);
        values.tile_bytes = tiles.into_iter().max().unwrap_or(values.tile_bytes);
    })?;
    answer(Question::Grid, &mut values, |samples, values| {
        // The fewer the blocks, the more is left for the model.
        let grids = good_enough(samples, |sample| sample.max_grid_blocks);
        values.max_grid_blocks = grids.into_iter().min().unwrap_or(values.max_grid_blocks);
    })?;
    answer(Question::Few, &mut values, |samples, values| {
        let counts = FEW.map(|count| (count as u64, ways(samples, |s| s.pieces == count)));
        let by_dma = split(counts.iter().map(|&(_, (kernel, dma))| (dma, kernel)));
        values.batch_min = counts.get(by_dma).map_or(FEW[FEW.len() - 1] as u64 + 1, |c| c.0);
    })?;
    answer(Question::Size, &mut values, |samples, values| {
        let known = |size: &u64| samples.iter().any(|sample| sample.piece_bytes == *size);
        let sizes: Vec<_> = SIZES.into_iter().filter(known).collect();
        let by_kernel = split(sizes.iter().map(|&size| ways(samples, |s| s.piece_bytes == size)));
        values.small_max_bytes = by_kernel.checked_sub(1).map_or(0, |last| sizes[last]);
    })?;
    Ok(values)
}

/// A queue, and what it copies between.
struct Bench {
    /// Dropped first, which waits for its copies.
    queue: Option<Box<dyn Queue>>,
    completions: Arc<dyn Completions>,
    src: Option<Memory>,
    dst: Option<Memory>,
    to: String,
    effort: Effort,
    descriptors: Vec<CopyDescriptor>,
}

impl Bench {
    fn open(
        config: &Config,
        device: &Arc<dyn Device>,
        other: &Arc<dyn Device>,
        effort: Effort,
    ) -> Result<Self> {
        let options = QueueOptions {
            streams: config.streams,
            // Each submission has its own.
            max_grid_blocks: *MAX_GRID_BLOCKS.end() as u32,
            high_priority: config.high_priority,
            stall_timeout: config.stall_timeout,
            ..QueueOptions::default()
        };
        let src = Arc::clone(device).allocate(effort.bytes)?;
        let dst = Arc::clone(other).allocate(effort.bytes)?;
        let queue = Arc::clone(device).queue(&options)?;
        Ok(Self {
            completions: queue.completions(),
            queue: Some(queue),
            src: Some(src),
            dst: Some(dst),
            to: other.info().to_string(),
            effort,
            descriptors: Vec::new(),
        })
    }

    /// Takes all samples of a question; what it does not vary is as in `values`.
    fn ask(&mut self, question: Question, values: &Values) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        let room = self.effort.bytes;
        let mut take = |way, pieces: usize, piece_bytes: u64, tile_bytes, max_grid_blocks| {
            // A small memory has the same pieces, shorter.
            let piece_bytes = piece_bytes.min(room / pieces as u64).max(1);
            let mut sample = Sample {
                question,
                to: self.to.clone(),
                way,
                pieces,
                piece_bytes,
                tile_bytes,
                max_grid_blocks,
                nanoseconds: 0,
            };
            sample.nanoseconds = self.median(&sample)?;
            samples.push(sample);
            Ok::<_, Error>(())
        };
        let &Values { tile_bytes: tile, max_grid_blocks: grid, .. } = values;
        match question {
            Question::Tile => {
                for (pieces, bytes) in TILE_SHAPES {
                    for tile in TILES {
                        take(Way::Kernel, pieces, bytes, tile, grid)?;
                    }
                }
            }
            Question::Grid => {
                for (pieces, bytes) in GRID_SHAPES {
                    for grid in GRIDS {
                        take(Way::Kernel, pieces, bytes, tile, grid)?;
                    }
                }
            }
            Question::Few => {
                for (pieces, bytes) in FEW.into_iter().flat_map(|n| FEW_SIZES.map(|b| (n, b))) {
                    for way in [Way::Kernel, Way::Dma] {
                        take(way, pieces, bytes, tile, grid)?;
                    }
                }
            }
            Question::Size => {
                for (bytes, pieces) in SIZES.into_iter().flat_map(|b| SIZE_COUNTS.map(|n| (b, n))) {
                    if bytes * pieces as u64 <= room {
                        for way in [Way::Kernel, Way::Dma] {
                            take(way, pieces, bytes, tile, grid)?;
                        }
                    }
                }
            }
            // An engine's own.
            Question::HostLink => {}
        }
        Ok(samples)
    }

    /// Runs a sample, and returns the median in nanoseconds.
    fn median(&mut self, sample: &Sample) -> Result<u64> {
        self.lay_out(sample);
        let mut took = Vec::with_capacity(self.effort.runs);
        for run in 0..WARM_UP + self.effort.runs.max(1) {
            let one = self.run(sample).inspect_err(|_| self.abandon())?;
            if run >= WARM_UP {
                took.push(one.as_nanos() as u64);
            }
        }
        let middle = took.len() / 2;
        Ok(*took.select_nth_unstable(middle).1)
    }

    /// Spreads the pieces over both memories, cut into tiles for the kernel.
    fn lay_out(&mut self, sample: &Sample) {
        let addr = |memory: &Option<Memory>| memory.as_ref().map_or(0, Memory::addr);
        let (src, dst) = (addr(&self.src), addr(&self.dst));
        // Aligned as pages of a cache are, unless they are shorter.
        let apart = self.effort.bytes / sample.pieces as u64;
        let apart = (apart & !255).max(sample.piece_bytes);
        let tile = match sample.way {
            Way::Kernel => sample.tile_bytes,
            _ => sample.piece_bytes,
        };
        self.descriptors.clear();
        for first in (0..sample.pieces as u64).map(|piece| piece * apart) {
            for at in (0..sample.piece_bytes).step_by(tile as usize) {
                let len = tile.min(sample.piece_bytes - at);
                let (src, dst) = (src + first + at, dst + first + at);
                self.descriptors.push(CopyDescriptor { src, dst, len });
            }
        }
    }

    fn run(&mut self, sample: &Sample) -> Result<Duration> {
        let queue = self.queue.as_mut().expect("it is there until a run fails");
        let mut pieces = SliceSource(&self.descriptors);
        let mut nothing = SliceSource(&[]);
        let mut work = match sample.way {
            Way::Kernel => {
                let max_grid_blocks = sample.max_grid_blocks;
                Work { max_grid_blocks, ..Work::pieces(&mut pieces) }
            }
            _ => Work { large: &self.descriptors, ..Work::pieces(&mut nothing) },
        };
        let start = Instant::now();
        let mut asked = Duration::ZERO;
        // SAFETY: `lay_out` put every piece inside the two memories, at places of its own; both are
        // ours alone, and stay allocated until the submission is done, because `abandon` keeps them
        // for the life of the process where nobody knows whether it is.
        let submitted = unsafe { queue.submit(&mut work) };
        let ticket = submitted.map_err(|error| error.error)?;
        while !self.completions.done(ticket) {
            std::hint::spin_loop();
            let waited = start.elapsed();
            if waited - asked > CHECK {
                queue.check()?;
                asked = waited;
            }
        }
        Ok(start.elapsed())
    }

    /// Copies may still run: lets the queue wait for them, and keeps the memories for ever, as it
    /// does not say whether it could.
    fn abandon(&mut self) {
        self.queue = None;
        std::mem::forget((self.src.take(), self.dst.take()));
    }
}

/// The values of one knob whose mean time, over all shapes, is about the best one's.
fn good_enough<T: Copy + PartialEq>(samples: &[Sample], knob: impl Fn(&Sample) -> T) -> Vec<T> {
    let mut means: Vec<(T, f64)> = Vec::new();
    for value in samples.iter().map(&knob) {
        if means.iter().all(|(known, _)| *known != value) {
            means.push((value, mean(samples.iter().filter(|sample| knob(sample) == value))));
        }
    }
    let best = means.iter().map(|(_, mean)| *mean).fold(f64::INFINITY, f64::min);
    let near = means.into_iter().filter(|(_, mean)| *mean <= best * NOISE);
    near.map(|(value, _)| value).collect()
}

/// The mean times by kernel and by DMA of the samples that count.
fn ways(samples: &[Sample], counts: impl Fn(&Sample) -> bool) -> (f64, f64) {
    let of = |way| mean(samples.iter().filter(|sample| sample.way == way && counts(sample)));
    (of(Way::Kernel), of(Way::Dma))
}

/// The geometric mean, in which a short shape counts as much as a long one.
fn mean<'a>(samples: impl Iterator<Item = &'a Sample>) -> f64 {
    let (mut sum, mut count) = (0.0, 0.0f64);
    for sample in samples {
        sum += (sample.nanoseconds.max(1) as f64).ln();
        count += 1.0;
    }
    (sum / count.max(1.0)).exp()
}

/// How many leading items go the first way, all later ones the second, so that the product of all
/// times is least: one odd sample moves no threshold. Of equals the fewest.
fn split(times: impl Iterator<Item = (f64, f64)>) -> usize {
    let (mut best, mut least, mut cost) = (0, 0.0, 0.0);
    for (index, (first, second)) in times.enumerate() {
        cost += (first / second).ln();
        if cost < least {
            (best, least) = (index + 1, cost);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use kvferry_device::sim::{Fault, SimOptions, sim};

    use super::*;

    const QUICK: Effort = Effort { bytes: MIB, runs: 1 };

    fn simulated(ordinal: u32, kernel: bool) -> Arc<dyn Device> {
        sim(&SimOptions { ordinal, kernel, ..SimOptions::default() }).expect("always there").0
    }

    fn sample(tile_bytes: u64, grid: u32, nanoseconds: u64) -> Sample {
        Sample {
            question: Question::Grid,
            to: "sim:0".into(),
            way: Way::Kernel,
            pieces: 1,
            piece_bytes: 1,
            tile_bytes,
            max_grid_blocks: grid,
            nanoseconds,
        }
    }

    #[test]
    fn values_within_two_percent_of_the_best_are_good_enough() {
        let samples = [(16, 2000), (32, 1019), (64, 1000), (128, 1021)];
        let samples = samples.map(|(grid, time)| sample(1, grid, time));
        assert_eq!(good_enough(&samples, |sample| sample.max_grid_blocks), [32, 64]);
    }

    #[test]
    fn every_shape_counts_as_much_as_another_however_long_it_takes() {
        // Twice as quick in the short shape outweighs a tenth in the long one.
        let samples = [(4, 100), (8, 200), (4, 110_000), (8, 100_000)];
        let samples = samples.map(|(tile, time)| sample(tile, 1, time));
        assert_eq!(good_enough(&samples, |sample| sample.tile_bytes), [4]);
    }

    #[test]
    fn a_threshold_is_where_the_ways_cross_and_one_odd_sample_does_not_move_it() {
        let at = |times: &[(f64, f64)]| split(times.iter().copied());
        assert_eq!(at(&[(1.0, 9.0), (2.0, 9.0), (9.0, 3.0), (9.0, 1.0)]), 2);
        assert_eq!(at(&[(1.0, 9.0), (9.1, 9.0), (1.0, 3.0), (9.0, 1.0)]), 3, "odd in the middle");
        assert_eq!(at(&[(2.0, 1.0), (3.0, 1.0)]), 0, "never the first way");
        assert_eq!(at(&[(1.0, 2.0), (1.0, 3.0)]), 2, "always the first way");
        assert_eq!(at(&[(1.0, 1.0)]), 0, "equal");
    }

    #[test]
    fn every_device_with_a_kernel_is_measured_in_every_way_and_gets_values_that_knobs_accept() {
        let config = Config::default();
        for device in [kvferry_device::host().expect("there"), simulated(0, true)] {
            let profile = calibrate(&config, &device, None, QUICK).expect("measures");
            let of = |question| profile.samples.iter().filter(move |s| s.question == question);
            assert_eq!(of(Question::Tile).count(), TILES.len() * TILE_SHAPES.len());
            assert_eq!(of(Question::Grid).count(), GRIDS.len() * GRID_SHAPES.len());
            assert_eq!(of(Question::Few).count(), 2 * FEW.len() * FEW_SIZES.len());
            assert!(of(Question::Size).any(|sample| sample.way == Way::Dma));
            assert!(profile.samples.iter().all(|sample| sample.nanoseconds > 0));
            let is_gpu = device.info().vendor != Vendor::Host;
            assert_eq!(profile.host_link.is_some(), is_gpu);
            assert_eq!(of(Question::HostLink).any(|s| s.way == Way::Staged), is_gpu);
            assert!(TILES.contains(&profile.values.tile_bytes), "{:?}", profile.values);
            assert!(GRIDS.contains(&profile.values.max_grid_blocks), "{:?}", profile.values);
            assert!((1..=17).contains(&profile.values.batch_min), "{:?}", profile.values);
            assert!(profile.date.ends_with('Z') && profile.date.len() == 20, "{}", profile.date);
        }
    }

    #[test]
    fn what_was_measured_is_what_an_engine_uses() {
        let folder = tempfile::tempdir().expect("a folder");
        let lookup = |asked: &str| (asked == "MC_KVFERRY_CACHE_DIR").then(|| folder.path().into());
        let config = Config::from_lookup(lookup).expect("good knobs");
        let device = simulated(0, true);
        let profile = calibrate(&config, &device, None, QUICK).expect("measures");
        profile.store(&config, device.info()).expect("stores").expect("kept");
        let engine = crate::Engine::new(config, vec![device]).expect("an engine");
        let tunings: Vec<_> = engine.tunings().collect();
        assert_eq!(tunings.len(), 1);
        assert_eq!(tunings[0].values, profile.values);
        assert_eq!(Some(tunings[0].host_link), profile.host_link);
        let sources = tunings[0].settings().iter().map(|setting| setting.source);
        assert!(sources.into_iter().all(|source| source == crate::Source::Profile));
    }

    #[test]
    fn a_second_gpu_is_measured_if_it_is_in_reach_and_host_memory_never_is() {
        let config = Config::default();
        let (device, other) = (simulated(0, true), simulated(1, true));
        let host = kvferry_device::host().expect("there");
        // Simulated GPUs reach host memory that is mapped for them, and not each other.
        for beyond in [&other, &host] {
            let profile = calibrate(&config, &device, Some(beyond), QUICK).expect("measures");
            let mut others = profile.samples.iter().filter(|s| s.question != Question::HostLink);
            assert!(others.all(|sample| sample.to == "sim:0"));
        }
        let mut samples = Vec::new();
        let values = run(&config, &device, &other, QUICK, &mut samples).expect("measures");
        assert!(samples.iter().all(|sample| sample.to == "sim:1"));
        samples.retain(|sample| sample.question == Question::Grid);
        let grids = good_enough(&samples, |sample| sample.max_grid_blocks);
        assert_eq!(grids.into_iter().min(), Some(values.max_grid_blocks));
    }

    #[test]
    fn a_device_without_a_kernel_or_with_a_failing_call_says_so() {
        let config = Config::default();
        let without = simulated(0, false);
        let reason = without.info().kernel.clone();
        assert_eq!(
            calibrate(&config, &without, None, QUICK),
            Err(Error::NoKernel { device: "sim:0".into(), reason })
        );
        let (device, control) = sim(&SimOptions::default()).expect("always there");
        control.fail("launch_inline", 5, Fault::Refused);
        let failed = calibrate(&config, &device, None, QUICK);
        assert!(matches!(failed, Err(Error::Device(_))), "{failed:?}");
    }
}
