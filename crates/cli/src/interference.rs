//! Transfers beside a compute load: what each costs the other.
//!
//! The load runs in the process that moves, on its GPU, because that is where stream priorities
//! count. Everything is measured in windows of equal length: the load alone, transfers alone, and
//! both together, three runs of each in rotated order, so that a clock or a temperature that drifts
//! does not look like a cost. The loss of a run is against the load alone of the same run.

use std::str::FromStr;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use kvferry_engine::device::load::LoadKind;
use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::bench::{Options, Worker, percentile};
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

/// How transfers follow each other.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) enum Pace {
    /// There are none.
    Nothing,
    /// The next begins when the last has ended.
    BackToBack,
    /// Back to back until as many bytes are sent as this rate allows, then none until the next
    /// burst is due.
    Bursts { bytes_per_second: f64 },
}

/// What a window saw.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct WindowRan {
    pub(crate) seconds: f64,
    pub(crate) bytes: u64,
    /// Nanoseconds of each transfer.
    pub(crate) whole: Vec<u64>,
    pub(crate) path: String,
    /// Steps of the load, and the time that they took together.
    pub(crate) steps: u64,
    pub(crate) step_seconds: f64,
    /// Nanoseconds of each step.
    pub(crate) step: Vec<u64>,
}

impl WindowRan {
    fn steps_per_second(&self) -> f64 {
        if self.step_seconds > 0.0 { self.steps as f64 / self.step_seconds } else { 0.0 }
    }
}

/// Time between the beginnings of two bursts.
pub(crate) const BURST_PERIOD: Duration = Duration::from_millis(50);
const RUNS: usize = 3;
const PRIORITIES: [&str; 2] = ["high", "normal"];
const PATTERNS: [&str; 2] = ["back_to_back", "paced"];
/// The paced rate as a part of what the shape reaches alone.
const DEFAULT_RATE: f64 = 0.1;

/// Reads a rate in GiB/s.
pub(crate) fn rate(text: &str) -> Result<f64, String> {
    match f64::from_str(text) {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        _ => Err("expected GiB a second, more than 0".into()),
    }
}

/// Runs `transfer`, which moves `bytes`, at a pace for about `length`; returns how long it was.
///
/// At least one transfer runs, and none is begun after the end.
pub(crate) fn window(
    pace: Pace,
    length: Duration,
    bytes: u64,
    mut transfer: impl FnMut() -> Result<(), Failure>,
) -> Result<Duration, Failure> {
    let start = Instant::now();
    // The clock is what is waited for, so nothing but the clock can end the wait.
    let sleep_until = |due: Duration| std::thread::sleep(due.saturating_sub(start.elapsed()));
    match pace {
        Pace::Nothing => sleep_until(length),
        Pace::BackToBack => loop {
            transfer()?;
            if start.elapsed() >= length {
                break;
            }
        },
        Pace::Bursts { bytes_per_second } => {
            let (mut sent, mut begins) = (0.0, Duration::ZERO);
            while begins < length {
                sleep_until(begins);
                begins = (begins + BURST_PERIOD).min(length);
                let due = bytes_per_second * begins.as_secs_f64();
                while sent < due && (sent == 0.0 || start.elapsed() < length) {
                    transfer()?;
                    sent += bytes.max(1) as f64;
                }
            }
            sleep_until(length);
        }
    }
    Ok(start.elapsed())
}

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

/// A load by itself.
struct LoadFacts {
    load: LoadName,
    about: String,
    /// Steps a second with each step timed, and only counted.
    timed: f64,
    untimed: f64,
}

impl LoadFacts {
    fn timing_cost_percent(&self) -> f64 {
        percent_less(self.untimed, self.timed)
    }
}

impl std::fmt::Display for LoadFacts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}: {}; alone {:.1} steps/s, {:.1} when steps are only counted: timing costs {:.2} %",
            self.load.kind(),
            self.about,
            self.timed,
            self.untimed,
            self.timing_cost_percent()
        )
    }
}

/// By how many percent `part` is less than `whole`.
fn percent_less(whole: f64, part: f64) -> f64 {
    if whole > 0.0 { 100.0 * (1.0 - part / whole) } else { 0.0 }
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

/// What the sessions say of one load, pattern and priority; the work's own fields stay empty.
fn row(sessions: &[Session], fact: &LoadFacts, pattern: usize, priority: usize) -> InterferenceRow {
    let of = |load| {
        sessions.iter().filter(move |session| session.priority == priority && session.load == load)
    };
    let moving = |load| of(load).map(move |session| &session.moving[pattern]).collect::<Vec<_>>();
    let (idle, beside) = (moving(None), moving(Some(fact.load)));
    let alone: Vec<_> = of(Some(fact.load)).map(|session| &session.alone).collect();
    let losses: Vec<f64> = alone
        .iter()
        .zip(&beside)
        .map(|(alone, beside)| percent_less(alone.steps_per_second(), beside.steps_per_second()))
        .collect();
    let (least, most) = losses
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), &x| (low.min(x), high.max(x)));
    let loss_percent = losses.iter().sum::<f64>() / losses.len().max(1) as f64;
    let idle_times = Times::of(idle.iter().map(|ran| &ran.whole));
    let times = Times::of(beside.iter().map(|ran| &ran.whole));
    let step_alone = Times::of(alone.iter().map(|ran| &ran.step));
    let step = Times::of(beside.iter().map(|ran| &ran.step));
    let rate = gbps(&beside);
    InterferenceRow {
        load: fact.load.kind().name().to_owned(),
        load_about: fact.about.clone(),
        shape: String::new(),
        transport: "peer".to_owned(),
        device: String::new(),
        peer_device: String::new(),
        op: String::new(),
        pattern: PATTERNS[pattern].to_owned(),
        target_gbps: None,
        priority: PRIORITIES[priority].to_owned(),
        descriptors: 0,
        bytes: 0,
        runs: beside.len(),
        window_ms: 0,
        idle_transfers: idle_times.count,
        transfers: times.count,
        idle_p50_us: idle_times.p50,
        idle_p99_us: idle_times.p99,
        idle_max_us: idle_times.max,
        p50_us: times.p50,
        p99_us: times.p99,
        max_us: times.max,
        starved: times.p99 / idle_times.p99,
        idle_gbps: gbps(&idle),
        gbps: rate,
        load_alone_per_s: steps_per_second(&alone),
        load_per_s: steps_per_second(&beside),
        loss_percent,
        loss_spread_percent: most - least,
        loss_percent_per_gbps: loss_percent / rate,
        step_alone_p50_us: step_alone.p50,
        step_alone_p99_us: step_alone.p99,
        step_alone_max_us: step_alone.max,
        step_p50_us: step.p50,
        step_p99_us: step.p99,
        step_max_us: step.max,
        timing_cost_percent: fact.timing_cost_percent(),
        path: beside.last().map(|ran| ran.path.clone()).unwrap_or_default(),
        verified: false,
    }
}

fn gbps(windows: &[&WindowRan]) -> f64 {
    let bytes: u64 = windows.iter().map(|ran| ran.bytes).sum();
    bytes as f64 / 1e9 / windows.iter().map(|ran| ran.seconds).sum::<f64>()
}

fn steps_per_second(windows: &[&WindowRan]) -> f64 {
    let rates = windows.iter().map(|ran| ran.steps_per_second());
    rates.sum::<f64>() / windows.len().max(1) as f64
}

/// Microseconds.
struct Times {
    count: usize,
    p50: f64,
    p99: f64,
    max: f64,
}

impl Times {
    fn of<'a>(runs: impl Iterator<Item = &'a Vec<u64>>) -> Self {
        let all: Vec<u64> = runs.flatten().copied().collect();
        let at = |percent| percentile(&all, percent) as f64 / 1e3;
        Self { count: all.len(), p50: at(50), p99: at(99), max: at(100) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transfers(pace: Pace, milliseconds: u64, bytes: u64) -> usize {
        let mut count = 0;
        let length = Duration::from_millis(milliseconds);
        let took = window(pace, length, bytes, || {
            count += 1;
            Ok(())
        });
        assert!(took.expect("no transfer fails") >= length);
        count
    }

    #[test]
    fn bursts_send_what_the_rate_allows_and_no_more_than_one_transfer_above() {
        // 20 bytes a millisecond: 1000 bytes a burst, 3000 in all.
        let pace = Pace::Bursts { bytes_per_second: 20_000.0 };
        assert_eq!(transfers(pace, 150, 100), 30);
        assert_eq!(transfers(pace, 150, 700), 5);
        let exact = Pace::Bursts { bytes_per_second: 2.5 * f64::from(1 << 30) };
        assert_eq!(transfers(exact, 400, 128 << 20), 8, "one a burst");
        assert_eq!(transfers(pace, 150, 1_000_000), 1, "a large transfer skips bursts");
        assert_eq!(transfers(pace, 10, 100), 2, "a window shorter than a burst");
        assert_eq!(transfers(Pace::Nothing, 10, 100), 0);
        assert!(transfers(Pace::BackToBack, 10, 100) > 1);
    }

    #[test]
    fn a_window_ends_with_the_first_transfer_that_fails() {
        for pace in [Pace::BackToBack, Pace::Bursts { bytes_per_second: 1e9 }] {
            let mut count = 0;
            let failed = window(pace, Duration::from_secs(60), 1, || {
                count += 1;
                if count == 3 { Err("lost".into()) } else { Ok(()) }
            });
            assert_eq!((failed.expect_err("it failed").to_string().as_str(), count), ("lost", 3));
        }
    }

    #[test]
    fn a_loss_is_against_the_load_alone_of_the_same_run() {
        let ran = |steps, whole: &[u64]| WindowRan {
            seconds: 1.0,
            bytes: 1_000_000_000 * whole.len() as u64,
            whole: whole.to_vec(),
            steps,
            step_seconds: 1.0,
            step: vec![1_000_000_000 / steps.max(1)],
            ..WindowRan::default()
        };
        let session = |load, alone, beside, whole: &[u64]| Session {
            load,
            priority: 0,
            alone: ran(alone, &[]),
            moving: [ran(beside, whole), ran(0, &[])],
        };
        let load = LoadName::Memory;
        let sessions = [
            session(None, 0, 0, &[1000, 2000]),
            session(Some(load), 100, 90, &[4000, 6000]),
            // The clock has fallen by half: still a loss of a tenth, or two.
            session(Some(load), 50, 40, &[2000, 3000]),
            Session { priority: 1, ..session(Some(load), 100, 1, &[9]) },
            session(Some(LoadName::Gemm), 100, 2, &[9]),
        ];
        let fact = LoadFacts { load, about: String::new(), timed: 99.0, untimed: 100.0 };
        let row = row(&sessions, &fact, 0, 0);
        let close = |value: f64, expected: f64| {
            assert!((value - expected).abs() < 1e-9, "{value}, expected {expected}");
        };
        close(row.loss_percent, 15.0);
        close(row.loss_spread_percent, 10.0);
        close(row.gbps, 2.0);
        close(row.loss_percent_per_gbps, 7.5);
        close(row.starved, 3.0);
        close(row.timing_cost_percent, 1.0);
        assert_eq!((row.runs, row.transfers, row.idle_transfers), (2, 4, 2));
        assert_eq!((row.p50_us, row.p99_us, row.max_us), (3.0, 6.0, 6.0));
    }

    #[test]
    fn a_rate_is_a_positive_number() {
        assert_eq!(rate("2.5"), Ok(2.5));
        for bad in ["0", "-1", "inf", "NaN", "fast", ""] {
            assert!(rate(bad).is_err(), "{bad}");
        }
    }
}
