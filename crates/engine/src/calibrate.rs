//! Measures on a device which values of its knobs are best, for its [`Profile`].
//!
//! Each question is one comparison of medians. What is asked first uses defaults, and later
//! questions use the answers of earlier ones: tile, grid, fewest pieces of a launch, largest small
//! piece.

mod answers;
mod bench;
mod host_link;

use std::sync::Arc;
use std::time::SystemTime;

use kvferry_device::{Capabilities, Device, Vendor};
use serde::{Deserialize, Serialize};

use self::answers::{good_enough, split, ways};
use self::bench::{Bench, FEW, SIZES};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::profile::{Profile, Values};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Runs that are not counted: clocks rise, caches of addresses fill.
const WARM_UP: usize = 3;

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

#[cfg(test)]
mod tests {
    use kvferry_device::sim::{Fault, SimOptions, sim};

    use super::bench::{FEW_SIZES, GRID_SHAPES, GRIDS, TILE_SHAPES, TILES};
    use super::*;

    const QUICK: Effort = Effort { bytes: MIB, runs: 1 };

    fn simulated(ordinal: u32, kernel: bool) -> Arc<dyn Device> {
        sim(&SimOptions { ordinal, kernel, ..SimOptions::default() }).expect("always there").0
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
