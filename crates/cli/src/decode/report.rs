//! What `--interference decode` found.

use std::path::Path;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::Failure;
use crate::bench::percentile;
use crate::offload::distinct;
use crate::plot::{self, Bars, Panel};

/// What a window saw.
#[derive(Clone, Debug, Default)]
pub(super) struct Measured {
    pub(super) seconds: f64,
    pub(super) bytes: u64,
    /// Nanoseconds of each burst.
    pub(super) bursts: Vec<u64>,
    /// Nanoseconds of each step.
    pub(super) steps: Vec<u64>,
    pub(super) paths: Vec<String>,
    /// What the engine chose, and why.
    pub(super) choices: Vec<String>,
    /// Of `auto`: the policy, and whether it was told of the decoder's steps.
    pub(super) policy: String,
}

/// One line: the decoder beside one way to move bytes, or alone. Times are microseconds, over the
/// steps of all runs; percent are against the decoder alone in the same process and the same runs,
/// and absent where no step ended in the windows.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Row {
    /// What a step of the decoder does.
    pub(super) decoder: String,
    pub(super) device: String,
    /// Where the decoder runs: in the `same` process as the transfers, or in an`other`.
    pub(super) process: &'static str,
    /// `no transfer`, `direct`, `kernel full`, `kernel bounded`, `chunked`, `staged`, `auto`.
    pub(super) mode: &'static str,
    /// What makes the mode, beside its name.
    pub(super) knobs: String,
    pub(super) cache: String,
    /// `strided` or `shuffled`; empty without transfers, as are the next ones.
    pub(super) layout: &'static str,
    pub(super) form: &'static str,
    pub(super) op: &'static str,
    pub(super) path: String,
    /// Of `auto`: what it chose, in each direction and as the steps went, and why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<String>,
    /// Of `auto`: its policy, and whether it was told of the decoder's steps.
    pub(super) policy: String,
    pub(super) target_gib_per_s: f64,
    pub(super) gib_per_s: f64,
    pub(super) burst_bytes: u64,
    pub(super) bursts: usize,
    pub(super) burst_p50_us: f64,
    pub(super) burst_p99_us: f64,
    pub(super) runs: u64,
    pub(super) window_ms: u64,
    pub(super) steps: usize,
    pub(super) mean_us: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) max_us: f64,
    pub(super) mean_percent: Option<f64>,
    pub(super) p50_percent: Option<f64>,
    pub(super) p99_percent: Option<f64>,
    pub(super) max_percent: Option<f64>,
    /// The largest p99 of a run less the smallest, in percent of the decoder's alone: how much of
    /// `p99_percent` is noise.
    pub(super) p99_spread_percent: f64,
    pub(super) verified: bool,
}

/// Of steps, in microseconds.
struct Times {
    count: usize,
    mean: f64,
    p50: f64,
    p99: f64,
    max: f64,
}

impl Times {
    fn of(measured: &[Measured]) -> Self {
        let all: Vec<u64> = measured.iter().flat_map(|run| &run.steps).copied().collect();
        let at = |percent| percentile(&all, percent) as f64 / 1e3;
        let mean = all.iter().sum::<u64>() as f64 / 1e3 / all.len().max(1) as f64;
        Self { count: all.len(), mean, p50: at(50), p99: at(99), max: at(100) }
    }
}

impl Row {
    /// Sets what follows from the runs, and from those without transfers.
    pub(super) fn set_times(&mut self, measured: &[Measured], alone: &[Measured]) {
        let (times, alone) = (Times::of(measured), Times::of(alone));
        // Without a step on either side there is nothing to compare.
        let compares = times.count > 0 && alone.count > 0;
        let more = |time: f64, alone: f64| compares.then(|| 100.0 * (time / alone - 1.0));
        self.steps = times.count;
        (self.mean_us, self.mean_percent) = (times.mean, more(times.mean, alone.mean));
        (self.p50_us, self.p50_percent) = (times.p50, more(times.p50, alone.p50));
        (self.p99_us, self.p99_percent) = (times.p99, more(times.p99, alone.p99));
        (self.max_us, self.max_percent) = (times.max, more(times.max, alone.max));
        let of_run = |run: &Measured| Times::of(std::slice::from_ref(run)).p99;
        let (least, most) = measured
            .iter()
            .map(of_run)
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), p99| {
                (least.min(p99), most.max(p99))
            });
        self.p99_spread_percent =
            if alone.p99 > 0.0 && most >= least { 100.0 * (most - least) / alone.p99 } else { 0.0 };
        let bursts: Vec<u64> = measured.iter().flat_map(|run| &run.bursts).copied().collect();
        self.bursts = bursts.len();
        self.burst_p50_us = percentile(&bursts, 50) as f64 / 1e3;
        self.burst_p99_us = percentile(&bursts, 99) as f64 / 1e3;
        let bytes: u64 = measured.iter().map(|run| run.bytes).sum();
        let seconds: f64 = measured.iter().map(|run| run.seconds).sum();
        self.gib_per_s =
            if seconds > 0.0 { bytes as f64 / f64::from(1 << 30) / seconds } else { 0.0 };
        let paths = distinct(measured.iter().flat_map(|run| &run.paths).cloned());
        self.path = paths.join(", ");
        let choices = distinct(measured.iter().flat_map(|run| &run.choices).cloned());
        self.policy = measured.last().map(|run| run.policy.clone()).unwrap_or_default();
        self.reason = (self.mode == "auto" && !choices.is_empty()).then(|| choices.join("; "));
    }
}

/// The table at the end of a run.
pub(super) fn table(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header([
        "process",
        "layout",
        "op",
        "mode",
        "path",
        "GiB/s",
        "burst ms p50/p99",
        "steps",
        "mean us",
        "p50 us",
        "p99 us",
        "max us",
        "mean %",
        "p99 %",
        "+-",
        "max %",
        "bytes",
    ]);
    let percent = |percent: Option<f64>| percent.map_or("-".into(), |more| format!("{more:+.1}"));
    for row in rows {
        let moved = row.bursts > 0;
        table.add_row([
            row.process.to_owned(),
            row.layout.to_owned(),
            row.op.to_owned(),
            row.mode.to_owned(),
            row.path.clone(),
            if moved { format!("{:.2}", row.gib_per_s) } else { String::new() },
            match moved {
                true => format!("{:.2}/{:.2}", row.burst_p50_us / 1e3, row.burst_p99_us / 1e3),
                false => String::new(),
            },
            row.steps.to_string(),
            format!("{:.0}", row.mean_us),
            format!("{:.0}", row.p50_us),
            format!("{:.0}", row.p99_us),
            format!("{:.0}", row.max_us),
            percent(row.mean_percent),
            percent(row.p99_percent),
            format!("{:.1}", row.p99_spread_percent / 2.0),
            percent(row.max_percent),
            match (moved, row.verified) {
                (false, _) => String::new(),
                (true, true) => "verified".to_owned(),
                (true, false) => "WRONG".to_owned(),
            },
        ]);
    }
    for column in table.column_iter_mut().skip(5).take(11) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// A chart for each process and layout: by how much each mode lengthens the slowest steps.
pub(super) fn draw(path: &Path, rows: &[Row]) -> Result<(), Failure> {
    let moving: Vec<_> = rows.iter().filter(|row| row.bursts > 0).collect();
    let mut panels = Vec::new();
    for (process, layout) in distinct(moving.iter().map(|row| (row.process, row.layout))) {
        let of_place =
            || moving.iter().filter(|row| (row.process, row.layout) == (process, layout));
        let modes = distinct(of_place().map(|row| row.mode));
        let ops = distinct(of_place().map(|row| row.op));
        let value = |op: &str, mode: &str| {
            of_place().find(|row| (row.op, row.mode) == (op, mode)).and_then(|row| row.p99_percent)
        };
        let series = ops
            .iter()
            .map(|op| ((*op).to_owned(), modes.iter().map(|mode| value(op, mode)).collect()));
        panels.push(Panel::Bars(Bars {
            title: format!(
                "decoder in the {process} process, {layout}: p99 of its steps against alone"
            ),
            unit: "percent more",
            series: series.collect(),
            groups: modes.iter().map(|mode| (*mode).to_owned()).collect(),
        }));
    }
    plot::draw(path, &panels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_compares_all_steps_of_all_runs_with_those_alone() {
        let run = |steps: &[u64], bursts: &[u64]| Measured {
            seconds: 1.0,
            bytes: (1 << 29) * bursts.len() as u64,
            bursts: bursts.to_vec(),
            steps: steps.to_vec(),
            paths: vec!["dma".to_owned(), "staged".to_owned()],
            choices: Vec::new(),
            policy: String::new(),
        };
        let alone = [run(&[100_000; 50], &[]), run(&[100_000; 50], &[])];
        let mut slow = vec![100_000; 49];
        slow.push(160_000);
        let beside = [run(&slow, &[2_000_000, 4_000_000]), run(&slow, &[2_000_000, 2_000_000])];
        let mut row = Row::default();
        row.set_times(&beside, &alone);
        assert_eq!((row.steps, row.bursts), (100, 4));
        assert_eq!((row.p50_us, row.p99_us, row.max_us), (100.0, 160.0, 160.0));
        let close = |percent: Option<f64>, expected: f64| {
            assert!(percent.is_some_and(|it| (it - expected).abs() < 1e-9), "{percent:?}");
        };
        close(row.p50_percent, 0.0);
        close(row.p99_percent, 60.0);
        close(row.mean_percent, 1.2);
        assert!((row.gib_per_s - 1.0).abs() < 1e-9, "{}", row.gib_per_s);
        assert_eq!((row.burst_p50_us, row.burst_p99_us), (2000.0, 4000.0));
        assert_eq!(row.path, "dma, staged");
        assert!(table(&[row]).contains("+60.0"));
        let mut nothing = Row::default();
        nothing.set_times(&[run(&[], &[1])], &alone);
        assert_eq!((nothing.p99_percent, nothing.steps), (None, 0));
    }
}
