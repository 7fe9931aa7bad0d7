//! What a bench of offload found.

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use super::lane::Sample;
use crate::bench::percentile;

/// One line. Times are microseconds, rates 10^9 bytes a second.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Row {
    pub(crate) shape: String,
    pub(crate) device: String,
    /// `h2d`, `d2h`, or `both` at once: then bytes and pieces are those of both.
    pub(crate) op: &'static str,
    pub(crate) mode: &'static str,
    /// What `MC_KVFERRY_POLICY` was.
    pub(crate) policy: String,
    /// What moved the bytes; of both directions, where they differ, joined by `+`.
    pub(crate) path: String,
    /// Of `auto`: why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
    pub(crate) form: &'static str,
    pub(crate) host_layout: &'static str,
    pub(crate) pieces: u64,
    pub(crate) bytes: u64,
    pub(crate) iterations: usize,
    #[serde(skip)]
    pub(crate) of_a_sweep: bool,
    /// Of the first one.
    pub(crate) piece_bytes: u64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) gbps: f64,
    /// One contiguous copy of as many bytes by DMA, in the same direction and run; of both, one each
    /// way at once.
    pub(crate) ceiling_gbps: f64,
    pub(crate) ratio: f64,
    /// Median of the calls of submit: checking, planning, packing, handing over.
    pub(crate) submit_us: f64,
    pub(crate) submit_ns_per_piece: f64,
    /// Median of checking and packing the list alone, outside of the timed transfers; of ranges.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pack_us: Option<f64>,
    /// Median of the time from the return of submit until everything had landed.
    pub(crate) wait_us: f64,
    /// The first transfer of this line.
    pub(crate) cold_us: f64,
    pub(crate) cold_submit_us: f64,
    /// What the very first copy of new host memory took longer than the ceiling: it is page-locked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) page_lock_us: Option<f64>,
    /// Time of the gather and scatter kernels alone, on 64 MiB; where they were used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) sm_us_per_64_mib: Option<f64>,
    /// A batch that has nothing to move, from submit to release, in nanoseconds.
    pub(crate) empty_batch_ns: u64,
    /// What reading the clock costs a transfer, in nanoseconds.
    pub(crate) clock_cost_ns: f64,
    pub(crate) verified: bool,
}

impl Row {
    /// Sets what follows from the samples.
    pub(crate) fn set_times(&mut self, samples: &[Sample], ceiling_ns: u64) {
        let at = |field: fn(&Sample) -> u64, percent| {
            percentile(&samples.iter().map(field).collect::<Vec<_>>(), percent) as f64
        };
        let gbps = |nanoseconds: f64| self.bytes as f64 / nanoseconds.max(1.0);
        let p50 = at(|sample| sample.whole_ns, 50);
        self.gbps = gbps(p50);
        self.ceiling_gbps = gbps(ceiling_ns as f64);
        self.ratio = self.gbps / self.ceiling_gbps;
        self.p50_us = p50 / 1e3;
        self.p99_us = at(|sample| sample.whole_ns, 99) / 1e3;
        let submit = at(|sample| sample.submit_ns, 50);
        self.submit_us = submit / 1e3;
        self.submit_ns_per_piece = submit / self.pieces.max(1) as f64;
        self.wait_us = at(|sample| sample.wait_ns, 50) / 1e3;
    }
}

/// One timed transfer, in nanoseconds, with what names its line.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Raw {
    sample: usize,
    shape: String,
    op: &'static str,
    mode: &'static str,
    /// The first transfer of its line, which no percentile has.
    cold: bool,
    #[serde(flatten)]
    times: Sample,
}

impl Raw {
    pub(crate) fn of(row: &Row, cold: Sample, samples: &[Sample]) -> Vec<Self> {
        let raw = |sample, cold, times| Self {
            sample,
            shape: row.shape.clone(),
            op: row.op,
            mode: row.mode,
            cold,
            times,
        };
        let warm = samples.iter().enumerate().map(|(index, times)| raw(index + 1, false, *times));
        std::iter::once(raw(0, true, cold)).chain(warm).collect()
    }
}

/// The table at the end of a run.
pub(crate) fn table(rows: &[&Row]) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header([
        "shape",
        "op",
        "mode",
        "path",
        "pieces",
        "MB",
        "p50 us",
        "p99 us",
        "GB/s",
        "of contiguous",
        "submit us",
        "submit ns/piece",
        "cold us",
        "SM us/64 MiB",
        "bytes",
    ]);
    for row in rows {
        table.add_row([
            row.shape.clone(),
            row.op.to_owned(),
            row.mode.to_owned(),
            row.path.clone(),
            row.pieces.to_string(),
            format!("{:.1}", row.bytes as f64 / 1e6),
            format!("{:.1}", row.p50_us),
            format!("{:.1}", row.p99_us),
            format!("{:.2}", row.gbps),
            format!("{:.2}", row.ratio),
            format!("{:.1}", row.submit_us),
            format!("{:.1}", row.submit_ns_per_piece),
            format!("{:.0}", row.cold_us),
            row.sm_us_per_64_mib.map_or("-".into(), |time| format!("{time:.0}")),
            if row.verified { "verified" } else { "WRONG" }.to_owned(),
        ]);
    }
    for column in table.column_iter_mut().skip(4).take(10) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// What the table leaves out: page locks, what measuring costs, and how the time on
/// multiprocessors was measured.
pub(crate) fn note(rows: &[Row], clock_ns: f64) -> String {
    let shortest = rows.iter().map(|row| row.p50_us).fold(f64::INFINITY, f64::min);
    let lock = rows.iter().filter_map(|row| row.page_lock_us).fold(0.0, f64::max);
    let cost = rows.first().map_or(0.0, |row| row.clock_cost_ns);
    let empty = rows.first().map_or(0, |row| row.empty_batch_ns);
    let kernels = match rows.iter().any(|row| row.sm_us_per_64_mib.is_some()) {
        true => {
            "\nSM us/64 MiB: the kernels that staging launches, by themselves: launches back to \
             back on one stream, their time by their number"
        }
        false => "",
    };
    format!(
        "measuring: {cost:.0} ns of clock readings ({clock_ns:.0} ns each) in a transfer, \
         {:.3} % of the shortest p50; page lock of new host memory: {:.1} ms at most; \
         a batch without a byte: {empty} ns{kernels}",
        cost / 10.0 / shortest,
        lock / 1e3,
    )
}
