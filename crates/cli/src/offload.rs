//! `--transport offload`: copies between a GPU and host memory, in one process and one engine.
//!
//! Every line of the table is one shape, one direction (or both at once) and one mode, against one
//! contiguous copy of as many bytes by DMA, in the same direction and the same run. The clocks are
//! apart: submission (with packing in it, and packing alone beside it), execution and wait, and the
//! whole; the first transfer of each line is apart from the others. The modes of a case, and its
//! ceiling, are timed in turns. The first transfer of each is verified, and one after the timed ones.
//!
//! How long staging keeps multiprocessors busy is measured by its kernel alone: the pieces of the
//! GPU's side gathered into (or scattered from) contiguous memory of the GPU, several launches back
//! to back on one stream, divided by their number. The launch latency is hidden behind the launch
//! before, so what is left is the time of the kernel, with the gap between two.

mod cases;
mod lane;
mod options;
mod plots;
mod report;

use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use kvferry_engine::device::Vendor;
use kvferry_engine::{Config, Engine, OffloadMode, Op, Range, measure};

pub(crate) use self::cases::{Cache, Case, HostLayout};
use self::lane::{CLOCK_READINGS, Memory, Sample};
pub(crate) use self::lane::{Devices, Lane, Outcome, config_with, distinct, run as transfer};
pub(crate) use self::options::{Options, Ways};
use self::report::{Raw, Row, note, table};
use crate::Failure;
use crate::bench::{self, percentile};
use crate::case::Direction;
use crate::forms::{Form, Request};
use crate::report::JsonLines;

/// Transfers before the timed ones.
const WARM_UP: usize = 3;
/// A line whose transfers take long ends after so many nanoseconds, with fewer of them than were asked
/// for; if one takes half of it, the first one is all of the warm-up.
const LONG_LINE: u64 = 2_000_000_000;
/// Transfers that a line has at least.
const LEAST: usize = 3;
/// Of more bytes only the last transfer is verified, the first one not by itself.
const LARGE: u64 = 512 << 20;
/// Timings of what is measured beside the transfers: packing, and the kernel of staging.
const BESIDE_TIMES: usize = 9;

pub(crate) fn run(options: &bench::Options) -> Result<(), Failure> {
    if options.interference.is_some() {
        return Err("--transport offload is measured beside --interference decode alone".into());
    }
    if !options.model.is_empty() || options.model_config.is_some() {
        return Err("--transport offload moves shapes and caches: use --cache for a model's".into());
    }
    if options.peer_device.is_some() || options.bare || options.in_flight.get() > 1 {
        return Err("--transport offload has one device and host memory in one process, and one batch at a time: leave --peer-device, --bare and --in-flight out".into());
    }
    if options.head_slice.is_some() {
        return Err("--head-slice is of a model's KV cache between two processes".into());
    }
    let config = Config::from_env()?;
    let devices = Devices::open(options.device, &config)?;
    run_on(options, devices, config)
}

fn run_on(options: &bench::Options, devices: Devices, config: Config) -> Result<(), Failure> {
    let cases = options.offload.cases(options)?;
    let ways = Ways::of(options.op)?;
    let mut json = options.json.as_deref().map(JsonLines::create).transpose()?;
    let bench = Bench::new(options, devices, config)?;
    eprintln!("{}", bench.describe());

    let progress = ProgressBar::new((cases.len() * ways.len()) as u64);
    progress.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}")?);
    let mut rows = Vec::new();
    let mut kept = Kept::default();
    for case in &cases {
        for &ways in &ways {
            progress.set_message(format!("{} {}", case.label(), ways.name()));
            let measured = bench.measure(case, ways, &mut kept)?;
            for (row, raw) in measured {
                if let Some(json) = &mut json {
                    json.write(&row)?;
                    raw.iter().try_for_each(|raw| json.write(raw))?;
                }
                rows.push(row);
            }
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    // Hundreds of points are for a file.
    let for_a_file = json.is_some() || options.offload.plot.is_some();
    let shown: Vec<_> = rows.iter().filter(|row| !(for_a_file && row.of_a_sweep)).collect();
    println!("{}\n{}", table(&shown), note(&rows, bench.clock));
    for row in rows.iter().filter(|row| !row.of_a_sweep) {
        if let Some(reason) = &row.reason {
            println!("auto, {} {}: {reason}", row.shape, row.op);
        }
    }
    if let Some(path) = &options.offload.plot {
        plots::draw(path, &rows)?;
        println!("drawn: {}", path.display());
    }
    Ok(())
}

/// Memory of the last case, one entry for each direction.
#[derive(Default)]
struct Kept([Option<Memory>; 2]);

impl Kept {
    fn of(&mut self, direction: Direction) -> &mut Option<Memory> {
        &mut self.0[usize::from(direction == Direction::Write)]
    }
}

struct Bench<'a> {
    options: &'a bench::Options,
    devices: Devices,
    engine: Arc<Engine>,
    iterations: usize,
    /// Nanoseconds that reading the clock takes.
    clock: f64,
    /// Nanoseconds of a batch without a byte, from submit to release.
    empty_batch: u64,
}

impl<'a> Bench<'a> {
    fn new(options: &'a bench::Options, devices: Devices, config: Config) -> Result<Self, Failure> {
        let engine = devices.engine(config)?;
        let samples = options.offload.samples.map(|samples| samples.get() as usize);
        let iterations = samples.unwrap_or_else(|| options.iterations());
        let empty_batch = empty_batch(&engine)?;
        Ok(Self { options, devices, engine, iterations, clock: clock_cost(), empty_batch })
    }

    fn describe(&self) -> String {
        let info = self.devices.gpu.info();
        format!("{info} ({}) and host memory; kernel: {}", info.name, info.kernel)
    }

    /// One row for each mode, and its samples if they are wanted.
    fn measure(
        &self,
        case: &Case,
        ways: Ways,
        kept: &mut Kept,
    ) -> Result<Vec<(Row, Vec<Raw>)>, Failure> {
        let seed = self.options.seed;
        let host_layout =
            self.options.offload.host_layout.unwrap_or_else(|| case.usual_host_layout());
        let layout = case.layout(host_layout, seed);
        let label = case.label();
        let asked = self.options.form.unwrap_or_else(|| case.usual_form());
        let form = asked
            .of(&layout)
            .map_err(|why| format!("{label} has no {} form: {why}", asked.name()))?;
        let mut lanes = Vec::new();
        for &direction in ways.0 {
            let kept = kept.of(direction).take();
            let seed = seed.wrapping_add(1);
            lanes.push(Lane::new(&self.engine, &self.devices, direction, &layout, kept, seed)?);
        }
        let pieces = layout.pieces.len() as u64 * lanes.len() as u64;
        let bytes = layout.bytes() * lanes.len() as u64;

        let fresh = lanes.iter().any(|lane| lane.fresh);
        let contiguous: Vec<_> = lanes.iter().map(Lane::contiguous).collect();
        let ceiling = || self.transfer(&lanes, &contiguous, OffloadMode::Direct);
        let first = ceiling()?.sample;
        let pack_ns = if form == Form::Ranges { self.packing(&lanes)? } else { None };
        let gather_ns = self.gather(&lanes)?;

        let requests =
            lanes.iter().map(|lane| lane.request(form)).collect::<Result<Vec<_>, _>>()?;
        let mut guards = Guards { seed: seed.wrapping_add(100), lanes: &lanes, label: &label };
        let mut lines = Vec::new();
        for mode in self.options.offload.modes() {
            guards.fill()?;
            let cold = self.transfer(&lanes, &requests, mode)?.sample;
            if !case.is_of_a_sweep() && bytes <= LARGE {
                guards.verify()?;
            }
            let samples = Vec::with_capacity(self.iterations);
            lines.push(Line { mode, cold, samples, last: Outcome::default() });
        }
        for _ in 0..WARM_UP {
            for line in lines.iter().filter(|line| line.cold.whole_ns < LONG_LINE / 2) {
                self.transfer(&lanes, &requests, line.mode)?;
            }
            ceiling()?;
        }
        // In turns, so that whatever drifts, drifts for all.
        let mut ceilings = Vec::with_capacity(self.iterations);
        let counted = self.options.offload.samples.is_some();
        for round in 0..self.iterations {
            ceilings.push(ceiling()?.sample.whole_ns);
            for turn in 0..lines.len() {
                let turn = (round + turn) % lines.len();
                let line = &mut lines[turn];
                if counted || !line.is_long_enough() {
                    line.last = self.transfer(&lanes, &requests, line.mode)?;
                    line.samples.push(line.last.sample);
                }
            }
        }
        let ceiling_p50 = percentile(&ceilings, 50);
        let mut rows = Vec::new();
        for Line { mode, cold, samples, last } in lines {
            guards.fill()?;
            self.transfer(&lanes, &requests, mode)?;
            guards.verify()?;
            let chosen = mode == OffloadMode::Auto && !last.choices.is_empty();
            let mut row = Row {
                shape: label.clone(),
                device: self.options.device.to_string(),
                op: ways.name(),
                mode: mode.name(),
                policy: format!("{:?}", self.engine.config().policy).to_lowercase(),
                path: last.path,
                reason: chosen.then(|| last.choices.join("; ")),
                form: form.name(),
                host_layout: host_layout.name(),
                pieces,
                bytes,
                iterations: samples.len(),
                of_a_sweep: case.is_of_a_sweep(),
                piece_bytes: layout.pieces.first().map_or(0, |piece| piece.len),
                page_lock_us: fresh
                    .then_some(first.whole_ns.saturating_sub(ceiling_p50) as f64 / 1e3),
                cold_us: cold.whole_ns as f64 / 1e3,
                cold_submit_us: cold.submit_ns as f64 / 1e3,
                pack_us: pack_ns.map(|pack| pack as f64 / 1e3),
                empty_batch_ns: self.empty_batch,
                clock_cost_ns: self.clock * f64::from(CLOCK_READINGS),
                verified: true,
                ..Row::default()
            };
            row.set_times(&samples, ceiling_p50);
            if row.path.contains("staged") {
                row.sm_us_per_64_mib = gather_ns
                    .map(|gather| gather / 1e3 * f64::from(64 << 20) / bytes.max(1) as f64);
            }
            let raw = match self.options.offload.samples {
                None => Vec::new(),
                Some(_) => Raw::of(&row, cold, &samples),
            };
            rows.push((row, raw));
        }
        drop(requests);
        for lane in lanes {
            let direction = lane.direction;
            *kept.of(direction) = Some(lane.into_memory());
        }
        Ok(rows)
    }

    fn transfer(
        &self,
        lanes: &[Lane],
        requests: &[Request<'_>],
        mode: OffloadMode,
    ) -> Result<Outcome, Failure> {
        let parts: Vec<_> = lanes.iter().zip(requests).map(|(lane, it)| lane.part(it)).collect();
        transfer(&self.engine, &parts, mode)
    }

    /// Nanoseconds of checking and packing the lists without submitting them.
    fn packing(&self, lanes: &[Lane]) -> Result<Option<u64>, Failure> {
        let mut total = 0;
        for lane in lanes {
            let request = lane.request(Form::Ranges)?;
            let Request::Ranges(ranges) = &request else { return Ok(None) };
            let took =
                measure::packing(&self.engine, lane.target(), lane.op(), ranges, BESIDE_TIMES)?;
            total += median(&took);
        }
        Ok(Some(total))
    }

    /// Nanoseconds of the kernels that staging launches, by themselves; none without a kernel.
    fn gather(&self, lanes: &[Lane]) -> Result<Option<f64>, Failure> {
        let staged = [OffloadMode::Staged, OffloadMode::Auto];
        let wanted = self.options.offload.modes().iter().any(|mode| staged.contains(mode));
        if !wanted || self.devices.gpu.info().vendor == Vendor::Host {
            return Ok(None);
        }
        let mut total = 0.0;
        for lane in lanes {
            let request = lane.request(Form::Ranges)?;
            let bounce = self.engine.allocate(&self.devices.gpu, lane.layout.bytes().max(1))?;
            let mut end = bounce.addr();
            let mut packed = |range: &Range| {
                let remote = end;
                end += range.len;
                Range { remote, ..*range }
            };
            let Request::Ranges(ranges) = &request else { return Ok(None) };
            let ranges: Vec<_> = ranges.iter().map(&mut packed).collect();
            let took = measure::bare_kernel(
                &self.engine,
                lane.target(),
                lane.op(),
                &ranges,
                BESIDE_TIMES,
            )?;
            match took {
                Some(took) => total += median(&took) as f64,
                None => return Ok(None),
            }
        }
        Ok(Some(total))
    }
}

/// What one mode did.
struct Line {
    mode: OffloadMode,
    /// The first transfer.
    cold: Sample,
    /// The timed ones.
    samples: Vec<Sample>,
    last: Outcome,
}

impl Line {
    fn is_long_enough(&self) -> bool {
        let took: u64 = self.samples.iter().map(|sample| sample.whole_ns).sum();
        self.samples.len() >= LEAST && took > LONG_LINE
    }
}

/// Guard bytes of all destinations; every check has its own, so that none can pass on the bytes of
/// another.
struct Guards<'a> {
    seed: u64,
    lanes: &'a [Lane],
    label: &'a str,
}

impl Guards<'_> {
    fn fill(&mut self) -> Result<(), Failure> {
        self.seed = self.seed.wrapping_add(1);
        self.lanes.iter().try_for_each(|lane| lane.guard(self.seed))
    }

    fn verify(&self) -> Result<(), Failure> {
        self.lanes.iter().try_for_each(|lane| lane.verify(self.label, self.seed))
    }
}

fn median(times: &[Duration]) -> u64 {
    percentile(&times.iter().map(crate::transfer::nanoseconds).collect::<Vec<_>>(), 50)
}

/// Nanoseconds of one reading of the clock.
fn clock_cost() -> f64 {
    const READINGS: u32 = 10_000;
    let start = Instant::now();
    for _ in 0..READINGS {
        std::hint::black_box(Instant::now());
    }
    start.elapsed().as_nanos() as f64 / f64::from(READINGS)
}

/// Nanoseconds of a batch that has nothing to move.
fn empty_batch(engine: &Engine) -> Result<u64, Failure> {
    const BATCHES: usize = 1000;
    let target = engine.local()?;
    let mut took = Vec::with_capacity(BATCHES);
    for _ in 0..BATCHES {
        let start = Instant::now();
        let batch = engine.submit(&target, Op::Write, &[] as &[Range])?;
        engine.poll(batch)?;
        engine.release(batch)?;
        took.push(start.elapsed());
    }
    Ok(median(&took))
}

#[cfg(test)]
mod tests;
