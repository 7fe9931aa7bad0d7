//! `--interference decode`: what transfers between a GPU and host memory do to a decoder's steps.
//!
//! The decoder runs on the GPU that the transfers use, in this process or in another one. Bursts
//! move a KV cache at a target rate, page by page with strides, or the same bytes in random order.
//! Every way to move them has an engine of its own, with the knobs that make it. A run measures each
//! of them for one window, and the decoder alone beside them; the next run begins somewhere else in
//! the list, so that a clock or a temperature that drifts does not look like a cost.

mod contenders;
pub(crate) mod program;
mod report;
mod steps;

use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use kvferry_engine::{Config, Engine, OffloadMode, Policy};

use self::contenders::Contender;
use self::report::{Measured, Row, draw, table};
use self::steps::Decoder;
use crate::Failure;
use crate::bench::{self, Transport};
use crate::case::Direction;
use crate::forms::{Form, Request};
use crate::interference::{BURST_PERIOD, Pace, window};
use crate::layout::Layout;
use crate::offload::{
    Cache, Case, Devices, HostLayout, Lane, Ways, config_with, distinct, transfer,
};
use crate::report::JsonLines;

#[derive(Args, Debug)]
#[command(next_help_heading = "Options of --interference decode")]
#[group(skip)]
pub(crate) struct Options {
    /// Where the decoder runs, separated by commas: in the process that moves, or in another one on
    /// the same GPU [default: both]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PROCESS")]
    process: Vec<Process>,
    /// How the pieces lie, separated by commas [default: both]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "LAYOUT")]
    layout: Vec<Arrangement>,
    /// Runs of each measurement, in rotated order [default: 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100))]
    runs: Option<u64>,
    /// The decoder of the other process, a shell command that prints its steps as
    /// crates/cli/programs/decode_qwen3.py does [default: kvferry's own]
    #[arg(long, value_name = "COMMAND")]
    decode_program: Option<String>,
}

impl Options {
    /// Whether any of them was given.
    pub(crate) fn are_given(&self) -> bool {
        !self.process.is_empty()
            || !self.layout.is_empty()
            || self.runs.is_some()
            || self.decode_program.is_some()
    }

    fn processes(&self) -> Vec<Process> {
        match self.process[..] {
            [] => Process::ALL.to_vec(),
            _ => distinct(self.process.iter().copied()),
        }
    }

    fn arrangements(&self) -> Vec<Arrangement> {
        match self.layout[..] {
            [] => Arrangement::ALL.to_vec(),
            _ => distinct(self.layout.iter().copied()),
        }
    }

    fn runs(&self) -> u64 {
        self.runs.unwrap_or(RUNS)
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Process {
    Same,
    Other,
}

impl Process {
    const ALL: [Self; 2] = [Self::Same, Self::Other];

    fn name(self) -> &'static str {
        match self {
            Self::Same => "same",
            Self::Other => "other",
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Arrangement {
    /// Pages whose layers have constant strides
    Strided,
    /// The same pieces in random order on the host
    Shuffled,
}

impl Arrangement {
    const ALL: [Self; 2] = [Self::Strided, Self::Shuffled];

    fn name(self) -> &'static str {
        match self {
            Self::Strided => "strided",
            Self::Shuffled => "shuffled",
        }
    }

    /// Page numbers where there are pages, as a page store submits them.
    fn form(self) -> Form {
        match self {
            Self::Strided => Form::Paged,
            Self::Shuffled => Form::Ranges,
        }
    }

    fn layout(self, cache: Cache, seed: u64) -> Layout {
        let case = match self {
            Self::Strided => Case::Cache(cache),
            Self::Shuffled => Case::Shuffled(cache),
        };
        case.layout(HostLayout::Packed, seed)
    }
}

/// What moves without another word: 64 MiB each way.
const CACHE: &str = "256x64x4096";
/// GiB a second, of all directions together.
const RATE: f64 = 2.5;
const RUNS: u64 = 3;

pub(crate) fn run(options: &bench::Options) -> Result<(), Failure> {
    if options.transport == Transport::Tcp || options.peer_device.is_some() {
        return Err("--interference decode moves bytes between one device and host memory: leave --transport and --peer-device out".into());
    }
    if options.in_flight.get() > 1 || options.head_slice.is_some() {
        return Err("--in-flight and --head-slice are of transfers between two processes".into());
    }
    if options.decode.decode_program.is_some()
        && !options.decode.processes().contains(&Process::Other)
    {
        return Err(
            "--decode-program is the decoder of the other process: add --process other".into()
        );
    }
    let names_shapes = options.shape.is_some() || !options.model.is_empty();
    if names_shapes || options.model_config.is_some() {
        return Err("--interference decode moves a KV cache: use --cache PAGESxLAYERSxBYTES".into());
    }
    options.offload.refuse_for_decode()?;
    let config = Config::from_env()?;
    run_on(options, Devices::open(options.device, &config)?)
}

fn run_on(options: &bench::Options, devices: Devices) -> Result<(), Failure> {
    let cache = match options.offload.cache[..] {
        [] => CACHE.parse()?,
        [cache] => cache,
        _ => return Err("--interference decode moves one --cache".into()),
    };
    let ways = Ways::of(options.op)?;
    let mut json = options.json.as_deref().map(JsonLines::create).transpose()?;
    let bench = Bench::new(options, devices, cache, &ways);
    let info = bench.devices.gpu.info();
    eprintln!("{info} ({}) and host memory; kernel: {}", info.name, info.kernel);

    let processes = options.decode.processes();
    let runs = options.decode.runs() as usize;
    let progress = ProgressBar::new((processes.len() * runs * bench.windows.len()) as u64);
    progress.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}")?);
    let mut rows = Vec::new();
    for process in processes {
        let decoder = bench.decoder(process)?;
        progress.suspend(|| eprintln!("{} process: {}", process.name(), decoder.about()));
        for row in bench.measure(process, &decoder, &progress)? {
            if let Some(json) = &mut json {
                json.write(&row)?;
            }
            rows.push(row);
        }
    }
    progress.finish_and_clear();
    println!("{}", table(&rows));
    for row in &rows {
        if let Some(reason) = &row.reason {
            let Row { process, layout, op, policy, .. } = row;
            println!("auto, {process} process, {layout} {op}, policy {policy}: {reason}");
        }
    }
    if let Some(path) = &options.offload.plot {
        draw(path, &rows)?;
        println!("drawn: {}", path.display());
    }
    Ok(())
}

struct Bench<'a> {
    options: &'a bench::Options,
    devices: Devices,
    cache: Cache,
    arrangements: Vec<Arrangement>,
    contenders: Vec<Contender>,
    windows: Vec<Window>,
    /// Bytes a second, of all directions together.
    rate: f64,
}

/// A way to move bytes, with an engine and memory of its own.
struct Mover {
    contender: Contender,
    engine: Arc<Engine>,
    /// For each arrangement, what is loaded and what is stored.
    lanes: Vec<[Lane; 2]>,
}

/// One thing that is measured in every run: a mover, or the decoder alone, on one arrangement.
#[derive(Clone, Copy, Debug)]
struct Window {
    arrangement: usize,
    mover: Option<usize>,
    ways: Ways,
}

impl<'a> Bench<'a> {
    fn new(options: &'a bench::Options, devices: Devices, cache: Cache, ways: &[Ways]) -> Self {
        let arrangements = options.decode.arrangements();
        let contenders = contenders::of_modes(&options.offload.modes());
        let mut windows = Vec::new();
        for arrangement in 0..arrangements.len() {
            windows.push(Window { arrangement, mover: None, ways: Ways::BOTH });
            for &ways in ways {
                let of_mover = |mover| Window { arrangement, mover: Some(mover), ways };
                windows.extend((0..contenders.len()).map(of_mover));
            }
        }
        let rate = options.rate.unwrap_or(RATE) * f64::from(1 << 30);
        Self { options, devices, cache, arrangements, contenders, windows, rate }
    }

    /// New ones for each decoder: what a policy learnt beside one says nothing about another.
    fn movers(&self) -> Result<Vec<Mover>, Failure> {
        let seed = self.options.seed;
        let layouts: Vec<_> =
            self.arrangements.iter().map(|how| how.layout(self.cache, seed)).collect();
        let mover = |contender: &Contender| {
            let engine = self.devices.engine(config_with(&contender.knobs())?)?;
            let lane = |layout, direction| {
                Lane::new(&engine, &self.devices, direction, layout, None, seed.wrapping_add(1))
            };
            let lanes = layouts
                .iter()
                .map(|layout| Ok([lane(layout, Direction::Read)?, lane(layout, Direction::Write)?]))
                .collect::<Result<Vec<_>, Failure>>()?;
            Ok(Mover { contender: contender.clone(), engine, lanes })
        };
        self.contenders.iter().map(mover).collect()
    }

    fn decoder(&self, process: Process) -> Result<Decoder, Failure> {
        match process {
            Process::Same => Decoder::here(self.devices.gpu.info()),
            Process::Other => {
                Decoder::program(self.options.decode.decode_program.as_deref(), self.options.device)
            }
        }
    }

    fn measure(
        &self,
        process: Process,
        decoder: &Decoder,
        progress: &ProgressBar,
    ) -> Result<Vec<Row>, Failure> {
        let movers = self.movers()?;
        // Page locks, first launches and pools; and the decoder's clock comes up.
        for window in &self.windows {
            if let Some(mover) = window.mover {
                let requests =
                    movers[mover].requests(window, self.arrangements[window.arrangement].form())?;
                movers[mover].burst(&requests, 1)?;
            }
        }
        let mut measured: Vec<Vec<Measured>> = vec![Vec::new(); self.windows.len()];
        let mut order: Vec<_> = (0..self.windows.len()).collect();
        let runs = self.options.decode.runs() as usize;
        for run in 0..runs {
            for &index in &order {
                let window = &self.windows[index];
                progress.set_message(format!("{} process, {}", process.name(), self.name(window)));
                let guard_seed = self.options.seed.wrapping_add(100 + (run * order.len()) as u64);
                measured[index].push(self.window(
                    window,
                    &movers,
                    decoder,
                    guard_seed + index as u64,
                )?);
                progress.inc(1);
            }
            let part = 1 + order.len() / runs;
            order.rotate_left(part.min(self.windows.len()));
        }
        let alone: Vec<_> = self
            .windows
            .iter()
            .zip(&measured)
            .filter(|(window, _)| window.mover.is_none())
            .flat_map(|(_, measured)| measured.clone())
            .collect();
        let mut rows = vec![self.row(process, decoder, None, &alone, &alone)];
        for (window, measured) in self.windows.iter().zip(&measured) {
            if window.mover.is_some() {
                rows.push(self.row(process, decoder, Some(window), measured, &alone));
            }
        }
        Ok(rows)
    }

    fn name(&self, window: &Window) -> String {
        match window.mover {
            None => "no transfer".to_owned(),
            Some(mover) => format!(
                "{} {} {}",
                self.arrangements[window.arrangement].name(),
                window.ways.name(),
                self.contenders[mover].name
            ),
        }
    }

    /// Bytes of one transfer, in all directions.
    fn bytes(&self, ways: Ways) -> u64 {
        self.cache.bytes() * ways.0.len() as u64
    }

    /// Transfers that make a burst: as many as the rate allows in a period, but at least one.
    fn transfers(&self, ways: Ways) -> usize {
        let allowed = self.rate * BURST_PERIOD.as_secs_f64() / self.bytes(ways) as f64;
        (allowed.round() as usize).max(1)
    }

    /// Measures one window and verifies what it moved.
    fn window(
        &self,
        measured: &Window,
        movers: &[Mover],
        decoder: &Decoder,
        guard_seed: u64,
    ) -> Result<Measured, Failure> {
        let length = Duration::from_millis(self.options.window);
        let Some(mover) = measured.mover.map(|mover| &movers[mover]) else {
            decoder.restart()?;
            let took = window(Pace::Nothing, length, 0, || Ok(()))?;
            let steps = decoder.steps()?;
            return Ok(Measured { seconds: took.as_secs_f64(), steps, ..Measured::default() });
        };
        let lanes = mover.lanes_of(measured);
        for lane in &lanes {
            lane.guard(guard_seed)?;
        }
        let requests = mover.requests(measured, self.arrangements[measured.arrangement].form())?;
        let transfers = self.transfers(measured.ways);
        let bytes = self.bytes(measured.ways) * transfers as u64;
        let pace = Pace::Bursts { bytes_per_second: self.rate };
        let mut found = Measured::default();

        let policy = mover.engine.config().policy;
        if mover.contender.mode == OffloadMode::Auto {
            let feeds = policy == Policy::Tail;
            let fed = decoder.feed(feeds.then(|| Arc::clone(&mover.engine)));
            let steps = if fed { ", fed with steps" } else { "" };
            found.policy = format!("{policy:?}{steps}").to_lowercase();
        }
        decoder.restart()?;
        let took = window(pace, length, bytes, || {
            let burst = mover.burst(&requests, transfers)?;
            found.bursts.push(burst.nanoseconds);
            found.paths.extend(burst.paths);
            found.choices.extend(burst.choices);
            Ok(())
        });
        decoder.feed(None);
        found.paths = distinct(found.paths);
        found.choices = distinct(found.choices);
        found.seconds = took?.as_secs_f64();
        found.steps = decoder.steps()?;
        found.bytes = bytes * found.bursts.len() as u64;
        for lane in &lanes {
            lane.verify(&self.name(measured), guard_seed)?;
        }
        Ok(found)
    }

    fn row(
        &self,
        process: Process,
        decoder: &Decoder,
        window: Option<&Window>,
        measured: &[Measured],
        alone: &[Measured],
    ) -> Row {
        let mut row = Row {
            decoder: decoder.about().to_owned(),
            device: self.options.device.to_string(),
            process: process.name(),
            mode: "no transfer",
            cache: self.cache.to_string(),
            target_gib_per_s: self.rate / f64::from(1 << 30),
            runs: self.options.decode.runs(),
            window_ms: self.options.window,
            verified: true,
            ..Row::default()
        };
        if let Some(Window { arrangement, mover: Some(mover), ways }) = window {
            let contender = &self.contenders[*mover];
            row.mode = contender.name;
            row.knobs = contender.knobs_text();
            row.layout = self.arrangements[*arrangement].name();
            row.form = self.arrangements[*arrangement].form().name();
            row.op = ways.name();
            row.burst_bytes = self.bytes(*ways) * self.transfers(*ways) as u64;
        }
        row.set_times(measured, alone);
        row
    }
}

/// The requests of a burst: steps that follow each other, each a request for each lane.
type Steps<'a> = Vec<Vec<(&'a Lane, Request<'a>)>>;

/// What a burst did.
#[derive(Default)]
struct Burst {
    nanoseconds: u64,
    paths: Vec<String>,
    choices: Vec<String>,
}

impl Mover {
    fn lanes_of(&self, window: &Window) -> Vec<&Lane> {
        let lanes = self.lanes[window.arrangement].iter();
        lanes.filter(|lane| window.ways.0.contains(&lane.direction)).collect()
    }

    /// One step, or as many as the contender's chunks make.
    fn requests(&self, window: &Window, form: Form) -> Result<Steps<'_>, Failure> {
        let lanes = self.lanes_of(window);
        let pieces = lanes.iter().map(|lane| lane.layout.pieces.len()).max().unwrap_or(0);
        let steps = self.contender.chunk_pieces.map_or(1, |chunk| pieces.div_ceil(chunk));
        let mut requests: Steps<'_> = Vec::new();
        requests.resize_with(steps, Vec::new);
        for lane in lanes {
            let shares = lane.request(form)?.split(steps);
            for (step, share) in requests.iter_mut().zip(shares) {
                step.push((lane, share));
            }
        }
        Ok(requests)
    }

    /// Moves so many transfers at once, step by step: a step begins when the one before has landed.
    fn burst(&self, steps: &Steps<'_>, transfers: usize) -> Result<Burst, Failure> {
        let mut burst = Burst::default();
        for step in steps {
            let parts: Vec<_> = step.iter().map(|(lane, request)| lane.part(request)).collect();
            let parts = parts.repeat(transfers);
            let outcome = transfer(&self.engine, &parts, self.contender.mode)?;
            burst.nanoseconds += outcome.sample.whole_ns;
            burst.paths.push(outcome.path);
            burst.choices.extend(outcome.choices);
        }
        Ok(burst)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use kvferry_engine::DeviceName;
    use kvferry_engine::device::sim::{SimOptions, sim};
    use serde_json::Value;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: bench::Options,
    }

    #[test]
    fn every_way_is_measured_beside_a_decoder_in_this_process_in_every_direction() {
        let folder = tempfile::tempdir().expect("a folder");
        let [json, plot] = ["out.jsonl", "out.svg"].map(|name| folder.path().join(name));
        let arguments = "bench --interference decode --process same --cache 8x4x4096 --window 60 --runs 2 --rate 0.01";
        let files =
            ["--json", json.to_str().expect("text"), "--plot", plot.to_str().expect("text")];
        let line = Line::try_parse_from(arguments.split(' ').chain(files));
        let options = line.unwrap_or_else(|error| panic!("{error}")).options;
        let (gpu, _) = sim(&SimOptions::default()).expect("always there");
        let config = Config::from_lookup(|_| None).expect("defaults");
        let host = kvferry_engine::open_device(DeviceName::Host, &config).expect("always there");
        run_on(&options, Devices { gpu, host }).expect("it measures");

        let text = std::fs::read_to_string(&json).expect("written");
        let rows: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!(rows.len(), 1 + 2 * 6 * 3, "alone; layouts, ways, directions");
        assert_eq!((&rows[0]["mode"], &rows[0]["bursts"]), (&"no transfer".into(), &0.into()));
        for row in &rows[1..] {
            assert_eq!((&row["verified"], &row["runs"]), (&true.into(), &2.into()), "{row}");
            assert!(row["bursts"].as_u64().is_some_and(|bursts| bursts >= 2), "{row}");
            assert!(row["gib_per_s"].as_f64().is_some_and(|rate| rate > 0.0), "{row}");
        }
        let find = |layout: &str, op: &str, mode: &str| {
            let is_it =
                |row: &&Value| row["layout"] == layout && row["op"] == op && row["mode"] == mode;
            rows.iter().find(is_it).expect("measured")
        };
        assert_eq!(find("strided", "h2d", "direct")["path"], "dma");
        assert_eq!(find("shuffled", "both", "kernel bounded")["path"], "kernel");
        assert_eq!(find("shuffled", "d2h", "staged")["path"], "staged");
        for row in &rows {
            assert_eq!(row["reason"].is_string(), row["mode"] == "auto", "{row}");
        }
        let knobs = find("shuffled", "d2h", "chunked")["knobs"].clone();
        assert_eq!(knobs, "MC_KVFERRY_MAX_GRID_BLOCKS=64 2048 pieces at a time");
        let steps: u64 = rows.iter().filter_map(|row| row["steps"].as_u64()).sum();
        assert!(steps > 0, "the decoder did nothing");
        let chart = std::fs::read_to_string(&plot).expect("drawn");
        for word in ["same process, strided", "same process, shuffled", "kernel full", "chunked"] {
            assert!(chart.contains(word), "{word} is not in the chart");
        }
    }
}
