//! What a bench found: one JSON object a line for programs, a table for people.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::mooncake::Compared;

/// One measured case. Times are microseconds, rates 10^9 bytes a second.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) shape: String,
    pub(crate) transport: String,
    pub(crate) device: String,
    pub(crate) peer_device: String,
    pub(crate) op: String,
    /// `ranges`, `strided` or `paged`.
    pub(crate) form: String,
    /// Batches that were submitted before any was waited for; `bytes`, `p50_us` and what follows
    /// from them are those of all of them, `submit_us` and `descriptors` of one.
    pub(crate) in_flight: usize,
    pub(crate) descriptors: u64,
    pub(crate) bytes: u64,
    pub(crate) iterations: usize,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) gbps: f64,
    /// One contiguous copy of the same bytes in the same run; of `tcp`, the same bytes over as many
    /// bare sockets.
    pub(crate) ceiling_gbps: f64,
    pub(crate) ratio: f64,
    /// Median host time of submitting a batch.
    pub(crate) submit_us: f64,
    pub(crate) submit_ns_per_descriptor: f64,
    /// Median cost of asking a running batch, in nanoseconds; absent where none ran long enough.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) poll_ns: Option<f64>,
    /// Median cost of asking a batch that has ended, in nanoseconds.
    pub(crate) ended_poll_ns: f64,
    /// The very first transfer of this case, mappings included.
    pub(crate) cold_us: f64,
    /// One launch of packed descriptors, without the engine; only with `--bare`, on a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bare_us: Option<f64>,
    /// What the engine adds to the bare launch, in nanoseconds per descriptor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) over_bare_ns_per_descriptor: Option<f64>,
    pub(crate) path: String,
    pub(crate) verified: bool,
    /// Bytes that both processes had registered, at most.
    pub(crate) registered_bytes: u64,
    /// Most resident bytes of the process that moved the bytes; on host memory this counts the
    /// peer's memory that it has mapped.
    pub(crate) peak_rss_bytes: u64,
    /// Resident bytes of that process that are its own, neither registered nor mapped.
    pub(crate) private_rss_bytes: u64,
    pub(crate) pinned_bytes: u64,
    /// Private resident bytes that the process gained in the timed transfers over just before
    /// them, looked at between transfers and while batches run. The caller's list is no part.
    pub(crate) heap_bytes: u64,
    /// The same of the first transfer: mappings, and what the engine keeps for lists as long.
    pub(crate) cold_heap_bytes: u64,
    /// The same pieces moved by stock Mooncake in the same run; only with `--peer mooncake`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mooncake: Option<Compared>,
}

/// One case of `--interference`: a shape moved beside a load, and both of them alone. Times are
/// microseconds, rates 10^9 bytes a second, losses percent. Percentiles are over all transfers, or
/// all steps, of all runs.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct InterferenceRow {
    pub(crate) load: String,
    /// What a step of the load does.
    pub(crate) load_about: String,
    pub(crate) shape: String,
    pub(crate) transport: String,
    pub(crate) device: String,
    pub(crate) peer_device: String,
    pub(crate) op: String,
    /// `back_to_back`, or `paced` in bursts at `target_gbps`.
    pub(crate) pattern: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) target_gbps: Option<f64>,
    /// `MC_KVFERRY_STREAM_PRIORITY` of the process that moves; without effect on host memory.
    pub(crate) priority: String,
    pub(crate) descriptors: u64,
    pub(crate) bytes: u64,
    pub(crate) runs: usize,
    pub(crate) window_ms: u64,
    /// Transfers without the load, and beside it.
    pub(crate) idle_transfers: usize,
    pub(crate) transfers: usize,
    pub(crate) idle_p50_us: f64,
    pub(crate) idle_p99_us: f64,
    pub(crate) idle_max_us: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) max_us: f64,
    /// `p99_us` over `idle_p99_us`.
    pub(crate) starved: f64,
    pub(crate) idle_gbps: f64,
    pub(crate) gbps: f64,
    /// Steps of the load a second without transfers, and beside them.
    pub(crate) load_alone_per_s: f64,
    pub(crate) load_per_s: f64,
    /// Mean over the runs, each against the load alone of the same run; below 0 is noise.
    pub(crate) loss_percent: f64,
    /// Largest loss of a run less the smallest: how much of the mean is noise.
    pub(crate) loss_spread_percent: f64,
    pub(crate) loss_percent_per_gbps: f64,
    pub(crate) step_alone_p50_us: f64,
    pub(crate) step_alone_p99_us: f64,
    pub(crate) step_alone_max_us: f64,
    pub(crate) step_p50_us: f64,
    pub(crate) step_p99_us: f64,
    pub(crate) step_max_us: f64,
    /// What timing each step costs the load alone.
    pub(crate) timing_cost_percent: f64,
    pub(crate) path: String,
    pub(crate) verified: bool,
}

/// The table at the end of `--interference`.
pub(crate) fn interference_table(rows: &[InterferenceRow]) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header([
        "load",
        "shape",
        "op",
        "pattern",
        "priority",
        "idle us p50/p99/max",
        "beside us p50/p99/max",
        "starved",
        "GB/s idle/beside",
        "steps/s alone/beside",
        "loss %",
        "+-",
        "loss % per GB/s",
        "step us alone p50/p99/max",
        "step us beside p50/p99/max",
        "bytes",
    ]);
    let three = |p50, p99, max| format!("{p50:.0}/{p99:.0}/{max:.0}");
    for row in rows {
        table.add_row([
            row.load.clone(),
            row.shape.clone(),
            row.op.clone(),
            match row.target_gbps {
                Some(target) => format!("{} {target:.2}", row.pattern),
                None => row.pattern.clone(),
            },
            row.priority.clone(),
            three(row.idle_p50_us, row.idle_p99_us, row.idle_max_us),
            three(row.p50_us, row.p99_us, row.max_us),
            format!("{:.2}", row.starved),
            format!("{:.2}/{:.2}", row.idle_gbps, row.gbps),
            format!("{:.0}/{:.0}", row.load_alone_per_s, row.load_per_s),
            format!("{:.2}", row.loss_percent),
            format!("{:.2}", row.loss_spread_percent / 2.0),
            format!("{:.3}", row.loss_percent_per_gbps),
            three(row.step_alone_p50_us, row.step_alone_p99_us, row.step_alone_max_us),
            three(row.step_p50_us, row.step_p99_us, row.step_max_us),
            if row.verified { "verified" } else { "WRONG" }.to_owned(),
        ]);
    }
    for column in table.column_iter_mut().skip(5).take(10) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// Writes the rows as JSON lines.
pub(crate) struct JsonLines(BufWriter<File>);

impl JsonLines {
    pub(crate) fn create(path: &Path) -> std::io::Result<Self> {
        Ok(Self(BufWriter::new(File::create(path)?)))
    }

    pub(crate) fn write(&mut self, row: &impl Serialize) -> std::io::Result<()> {
        serde_json::to_writer(&mut self.0, row)?;
        self.0.write_all(b"\n")?;
        self.0.flush()
    }
}

/// The table at the end of a run.
pub(crate) fn table(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    let compared = rows.iter().any(|row| row.mooncake.is_some());
    let mut header = vec![
        "shape",
        "op",
        "form",
        "pieces",
        "MB",
        "p50 us",
        "p99 us",
        "GB/s",
        match rows.first() {
            Some(row) if row.transport == "tcp" => "of sockets",
            _ => "of contiguous",
        },
        "submit us",
        "submit ns/piece",
        "cold us",
        "path",
        "bytes",
    ];
    if compared {
        header.extend(["Mooncake GB/s", "over Mooncake"]);
    }
    table.set_header(header);
    for row in rows {
        let mut cells = vec![
            match row.in_flight {
                1 => row.shape.clone(),
                batches => format!("{} x {batches}", row.shape),
            },
            row.op.clone(),
            row.form.clone(),
            row.descriptors.to_string(),
            format!("{:.1}", row.bytes as f64 / 1e6),
            format!("{:.1}", row.p50_us),
            format!("{:.1}", row.p99_us),
            format!("{:.2}", row.gbps),
            format!("{:.2}", row.ratio),
            format!("{:.1}", row.submit_us),
            format!("{:.1}", row.submit_ns_per_descriptor),
            format!("{:.0}", row.cold_us),
            row.path.clone(),
            if row.verified { "verified" } else { "WRONG" }.to_owned(),
        ];
        if let Some(mooncake) = &row.mooncake {
            let number = |rate: Option<f64>, failed: &str| {
                rate.map_or_else(|| failed.to_owned(), |rate| format!("{rate:.2}"))
            };
            cells.extend([number(mooncake.gbps, "failed"), number(mooncake.over, "")]);
        }
        table.add_row(cells);
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        if (3..12).contains(&index) || index >= 14 {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.to_string()
}

/// What the table leaves out: polls and memory, the worst of all rows, and whose wheel it was.
pub(crate) fn note(rows: &[Row]) -> String {
    let most = |number: fn(&Row) -> f64| rows.iter().map(number).fold(0.0, f64::max);
    let mooncake =
        rows.iter().find_map(|row| row.mooncake.as_ref()).map_or_else(String::new, |it| {
            format!("\nMooncake: {}, the best of several settings for each line", it.wheel)
        });
    format!(
        "poll: {:.0} ns while running, {:.0} ns after the end; private memory grew by {:.1} MB, \
         {:.1} MB pinned (medians and growth of the worst line){mooncake}",
        most(|row| row.poll_ns.unwrap_or(0.0)),
        most(|row| row.ended_poll_ns),
        most(|row| row.heap_bytes as f64 / 1e6),
        most(|row| row.pinned_bytes as f64 / 1e6),
    )
}
