//! What the windows of a load and its transfers say: how much each loses by the other.

use std::fmt;

use super::window::WindowRan;
use super::{LoadName, PATTERNS, PRIORITIES, Session};
use crate::bench::percentile;
use crate::report::InterferenceRow;

/// A load by itself.
pub(super) struct LoadFacts {
    pub(super) load: LoadName,
    pub(super) about: String,
    /// Steps a second with each step timed, and only counted.
    pub(super) timed: f64,
    pub(super) untimed: f64,
}

impl LoadFacts {
    fn timing_cost_percent(&self) -> f64 {
        percent_less(self.untimed, self.timed)
    }
}

impl fmt::Display for LoadFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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

/// What the sessions say of one load, pattern and priority; the work's own fields stay empty.
pub(super) fn row(
    sessions: &[Session],
    fact: &LoadFacts,
    pattern: usize,
    priority: usize,
) -> InterferenceRow {
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

/// By how many percent `part` is less than `whole`.
fn percent_less(whole: f64, part: f64) -> f64 {
    if whole > 0.0 { 100.0 * (1.0 - part / whole) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
