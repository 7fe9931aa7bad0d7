//! What a bench found: one JSON object a line for programs, a table for people.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

/// One measured case. Times are microseconds, rates 10^9 bytes a second.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) shape: String,
    pub(crate) transport: String,
    pub(crate) device: String,
    pub(crate) peer_device: String,
    pub(crate) op: String,
    pub(crate) descriptors: u64,
    pub(crate) bytes: u64,
    pub(crate) iterations: usize,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) gbps: f64,
    /// One contiguous copy of the same bytes in the same run.
    pub(crate) ceiling_gbps: f64,
    pub(crate) ratio: f64,
    pub(crate) submit_ns_per_descriptor: f64,
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
}

/// Writes the rows as JSON lines.
pub(crate) struct JsonLines(BufWriter<File>);

impl JsonLines {
    pub(crate) fn create(path: &Path) -> std::io::Result<Self> {
        Ok(Self(BufWriter::new(File::create(path)?)))
    }

    pub(crate) fn write(&mut self, row: &Row) -> std::io::Result<()> {
        serde_json::to_writer(&mut self.0, row)?;
        self.0.write_all(b"\n")?;
        self.0.flush()
    }
}

/// The table at the end of a run.
pub(crate) fn table(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header([
        "shape",
        "op",
        "pieces",
        "MB",
        "p50 us",
        "p99 us",
        "GB/s",
        "of contiguous",
        "submit ns/piece",
        "cold us",
        "path",
        "bytes",
    ]);
    for row in rows {
        table.add_row([
            row.shape.clone(),
            row.op.clone(),
            row.descriptors.to_string(),
            format!("{:.1}", row.bytes as f64 / 1e6),
            format!("{:.1}", row.p50_us),
            format!("{:.1}", row.p99_us),
            format!("{:.2}", row.gbps),
            format!("{:.2}", row.ratio),
            format!("{:.1}", row.submit_ns_per_descriptor),
            format!("{:.0}", row.cold_us),
            row.path.clone(),
            if row.verified { "verified" } else { "WRONG" }.to_owned(),
        ]);
    }
    for column in table.column_iter_mut().skip(2).take(8) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}
