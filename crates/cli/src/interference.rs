//! Transfers beside a compute load: what each costs the other.
//!
//! The load runs in the process that moves, on its GPU, because that is where stream priorities
//! count. Everything is measured in windows of equal length: the load alone, transfers alone, and
//! both together, three runs of each in rotated order, so that a clock or a temperature that drifts
//! does not look like a cost. The loss of a run is against the load alone of the same run.

mod row;
mod window;

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use kvferry_engine::device::load::LoadKind;
use serde::{Deserialize, Serialize};

use self::row::{LoadFacts, row};
pub(crate) use self::window::{BURST_PERIOD, Pace, WindowRan, rate, window};
use crate::Failure;
use crate::bench::{Options, Worker};
use crate::case::{Direction, Work};
use crate::report::{InterferenceRow, JsonLines, interference_table};
use crate::worker::{Answer, Command, Side};

/// The loads that a user asked for.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Interference {
    /// A matrix product on tensor cores, as in a prefill
    Gemm,
    /// Short independent blocks of arithmetic, about 40 us each
    Blocks,
    /// Reading and writing device memory, as in a decode
    Memory,
    /// Gemm, blocks and memory, one after the other
    All,
    /// The steps of a decoder, beside copies between its GPU and host memory
    Decode,
}

impl Interference {
    fn loads(self) -> &'static [LoadName] {
        match self {
            Self::Gemm => &[LoadName::Gemm],
            Self::Blocks => &[LoadName::Blocks],
            Self::Memory => &[LoadName::Memory],
            Self::All => &[LoadName::Gemm, LoadName::Blocks, LoadName::Memory],
            // Measured by `decode.rs`, which has its own.
            Self::Decode => &[],
        }
    }
}

/// A load, as a command says it.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) enum LoadName {
    Gemm,
    Blocks,
    Memory,
}

impl LoadName {
    pub(crate) fn kind(self) -> LoadKind {
        match self {
            Self::Gemm => LoadKind::Gemm,
            Self::Blocks => LoadKind::Blocks,
            Self::Memory => LoadKind::Memory,
        }
    }
}

const RUNS: usize = 3;
const PRIORITIES: [&str; 2] = ["high", "normal"];
const PATTERNS: [&str; 2] = ["back_to_back", "paced"];
/// The paced rate as a part of what the shape reaches alone.
const DEFAULT_RATE: f64 = 0.1;

/// What was measured together: one run of one load (or none) at one priority.
struct Session {
    load: Option<LoadName>,
    priority: usize,
    /// The load alone.
    alone: WindowRan,
    /// In the order of [`PATTERNS`].
    moving: [WindowRan; 2],
}

pub(crate) fn run(
    options: &Options,
    interference: Interference,
    directions: &[Direction],
    works: &[(Work, String)],
    mut json: Option<&mut JsonLines>,
) -> Result<(), Failure> {
    let loads = interference.loads();
    let sessions = RUNS * PRIORITIES.len() * (loads.len() + 1);
    let progress = ProgressBar::new((directions.len() * works.len() * sessions) as u64);
    progress.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}")?);
    let mut rows = Vec::new();
    for &direction in directions {
        let mut bench = Bench::start(options, direction)?;
        progress.suspend(|| eprintln!("{}", bench.describe()));
        let mut facts = Vec::new();
        for &load in loads {
            progress.set_message(format!("{} alone", load.kind()));
            let fact = bench.load_facts(load)?;
            progress.suspend(|| println!("{fact}"));
            facts.push(fact);
        }
        for (work, label) in works {
            for row in bench.measure(work, label, loads, &facts, &progress)? {
                if let Some(json) = &mut json {
                    json.write(&row)?;
                }
                rows.push(row);
            }
        }
        bench.end()?;
    }
    progress.finish_and_clear();
    println!("{}", interference_table(&rows));
    Ok(())
}

/// One process for each priority that moves, and the one at the other end.
struct Bench<'a> {
    options: &'a Options,
    direction: Direction,
    movers: Vec<Worker>,
    other: Worker,
    guard_seed: u64,
}

impl<'a> Bench<'a> {
    fn start(options: &'a Options, direction: Direction) -> Result<Self, Failure> {
        let prefill = ("prefill", options.device);
        let decode = ("decode", options.peer_device.unwrap_or(options.device));
        let (mover, other) = match direction {
            Direction::Write => (prefill, decode),
            Direction::Read => (decode, prefill),
        };
        let other = Worker::start(other.0, other.1)?;
        let mut movers = Vec::new();
        for priority in PRIORITIES {
            let knobs = [("MC_KVFERRY_STREAM_PRIORITY", priority)];
            let mut worker = Worker::start_with(mover.0, mover.1, &knobs)?;
            worker.open(&other)?;
            movers.push(worker);
        }
        let guard_seed = options.seed.wrapping_add(100);
        Ok(Self { options, direction, movers, other, guard_seed })
    }

    fn describe(&self) -> String {
        let (mover, other) = (&self.movers[0].ready, &self.other.ready);
        format!(
            "{}: loads and transfers in one process on {} ({}), the other on {} ({}); kernel: {}; {} runs of {} ms",
            self.direction.name(),
            mover.device,
            mover.device_name,
            other.device,
            other.device_name,
            mover.kernel,
            RUNS,
            self.options.window
        )
    }

    /// The load without transfers, timed and not, in turns.
    fn load_facts(&mut self, load: LoadName) -> Result<LoadFacts, Failure> {
        let mut rates = [0.0; 2];
        let mut about = String::new();
        for run in 0..RUNS {
            for turn in 0..2 {
                let timing = (run + turn) % 2 == 0;
                about = self.start_load(0, load, timing)?;
                let alone = self.window(0, 0, Pace::Nothing)?;
                rates[usize::from(timing)] += alone.steps_per_second() / RUNS as f64;
                self.movers[0].ask(&Command::StopLoad)?;
            }
        }
        Ok(LoadFacts { load, about, timed: rates[1], untimed: rates[0] })
    }

    fn measure(
        &mut self,
        work: &Work,
        label: &str,
        loads: &[LoadName],
        facts: &[LoadFacts],
        progress: &ProgressBar,
    ) -> Result<Vec<InterferenceRow>, Failure> {
        let seed = self.options.seed;
        let source_seed = seed.wrapping_add(1);
        let (mover_side, other_side) = match self.direction {
            Direction::Write => (Side::Source, Side::Destination),
            Direction::Read => (Side::Destination, Side::Source),
        };
        let (peer, descriptors, bytes) = self.other.prepare(work, other_side, seed)?;
        for mover in &mut self.movers {
            mover.prepare(work, mover_side, seed)?;
        }
        match self.direction {
            Direction::Write => self.movers.iter_mut().collect::<Vec<_>>(),
            Direction::Read => vec![&mut self.other],
        }
        .into_iter()
        .try_for_each(|sender| {
            sender.ask(&Command::Fill { side: Side::Source, seed: source_seed }).map(drop)
        })?;

        // Mappings and first launches, and what the shape reaches alone.
        let mut alone = WindowRan::default();
        for mover in (0..self.movers.len()).rev() {
            alone = self.window(mover, peer, Pace::BackToBack)?;
        }
        let reached = alone.bytes as f64 / alone.seconds;
        let bytes_per_second = match self.options.rate {
            Some(rate) => rate * f64::from(1 << 30),
            None => reached * DEFAULT_RATE,
        };
        let paces = [Pace::BackToBack, Pace::Bursts { bytes_per_second }];

        let kinds: Vec<Option<LoadName>> =
            std::iter::once(None).chain(loads.iter().copied().map(Some)).collect();
        let mut cases: Vec<_> = kinds
            .iter()
            .flat_map(|&load| (0..PRIORITIES.len()).map(move |priority| (load, priority)))
            .collect();
        let mut sessions = Vec::new();
        for run in 0..RUNS {
            for &(load, priority) in &cases {
                let name = load.map_or("idle", |load| load.kind().name());
                progress.set_message(format!("{label} {} {name}", self.direction.name()));
                let guard_seed = self.guard(priority)?;
                if let Some(load) = load {
                    self.start_load(priority, load, true)?;
                }
                let mut session = Session {
                    load,
                    priority,
                    alone: WindowRan::default(),
                    moving: Default::default(),
                };
                for turn in 0..3 {
                    match (run + turn) % 3 {
                        0 if load.is_some() => {
                            session.alone = self.window(priority, 0, Pace::Nothing)?;
                        }
                        0 => {}
                        pattern => {
                            session.moving[pattern - 1] =
                                self.window(priority, peer, paces[pattern - 1])?;
                        }
                    }
                }
                self.movers[priority].ask(&Command::StopLoad)?;
                self.receiver(priority).verify(label, source_seed, guard_seed)?;
                sessions.push(session);
                progress.inc(1);
            }
            let third = 1 + cases.len() / RUNS;
            cases.rotate_left(third);
        }

        let mut rows = Vec::new();
        for fact in facts {
            for pattern in 0..PATTERNS.len() {
                for priority in 0..PRIORITIES.len() {
                    let mut row = row(&sessions, fact, pattern, priority);
                    row.shape = label.to_owned();
                    row.device = self.options.device.to_string();
                    row.peer_device =
                        self.options.peer_device.unwrap_or(self.options.device).to_string();
                    row.op = self.direction.name().to_owned();
                    row.target_gbps = (pattern == 1).then_some(bytes_per_second / 1e9);
                    row.descriptors = descriptors;
                    row.bytes = bytes;
                    row.window_ms = self.options.window;
                    row.verified = true;
                    rows.push(row);
                }
            }
        }
        Ok(rows)
    }

    /// Fills the destination with guard bytes that no other session has.
    fn guard(&mut self, priority: usize) -> Result<u64, Failure> {
        self.guard_seed = self.guard_seed.wrapping_add(1);
        let seed = self.guard_seed;
        self.receiver(priority).ask(&Command::Fill { side: Side::Destination, seed })?;
        Ok(seed)
    }

    fn receiver(&mut self, priority: usize) -> &mut Worker {
        match self.direction {
            Direction::Write => &mut self.other,
            Direction::Read => &mut self.movers[priority],
        }
    }

    /// Returns what a step of it does.
    fn start_load(
        &mut self,
        mover: usize,
        load: LoadName,
        timing: bool,
    ) -> Result<String, Failure> {
        let mover = &mut self.movers[mover];
        match mover.ask(&Command::StartLoad { load, timing })? {
            Answer::LoadStarted { about } => Ok(about),
            other => Err(mover.unexpected(&other)),
        }
    }

    fn window(&mut self, mover: usize, peer: u64, pace: Pace) -> Result<WindowRan, Failure> {
        let (direction, milliseconds) = (self.direction, self.options.window);
        let mover = &mut self.movers[mover];
        match mover.ask(&Command::Window { direction, peer, pace, milliseconds })? {
            Answer::Window(ran) => Ok(ran),
            other => Err(mover.unexpected(&other)),
        }
    }

    fn end(mut self) -> Result<(), Failure> {
        for mover in &mut self.movers {
            mover.ask(&Command::Close)?;
        }
        for mover in self.movers {
            mover.end()?;
        }
        self.other.end()
    }
}
