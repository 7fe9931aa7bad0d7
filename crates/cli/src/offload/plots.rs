//! Charts of offload: W11's grid as a map of ratios, W10's sweep as curves, other shapes as bars.

use std::path::Path;

use super::lane::distinct;
use super::report::Row;
use crate::Failure;
use crate::plot::{self, Bars, Lines, Map, Panel};

/// Draws all rows into a file.
pub(super) fn draw(path: &Path, rows: &[Row]) -> Result<(), Failure> {
    let ops = distinct(rows.iter().map(|row| row.op.to_owned()));
    let modes = distinct(rows.iter().map(|row| row.mode.to_owned()));
    let mut panels = Vec::new();
    for op in &ops {
        let of_op: Vec<_> = rows.iter().filter(|row| row.op == *op).collect();
        let with = |is_so: fn(&Row) -> bool| -> Vec<&Row> {
            of_op.iter().copied().filter(|row| is_so(row)).collect()
        };
        panels.extend(bars(op, &modes, &with(|row| !row.of_a_sweep)));
        panels.extend(sweep(op, &modes, &with(|row| row.shape.starts_with("W10 "))));
        let grid = with(|row| row.shape.starts_with("W11 "));
        panels.extend(modes.iter().filter_map(|mode| map(op, mode, &grid)));
    }
    plot::draw(path, &panels)
}

fn bars(op: &str, modes: &[String], rows: &[&Row]) -> Option<Panel> {
    let groups = distinct(rows.iter().map(|row| row.shape.clone()));
    let value = |shape: &String, mode: &String| {
        rows.iter().find(|row| row.shape == *shape && row.mode == *mode).map(|row| row.ratio)
    };
    let series = modes
        .iter()
        .map(|mode| (mode.clone(), groups.iter().map(|shape| value(shape, mode)).collect()));
    let series = series.collect();
    let title = format!("{op}: rate as a part of one contiguous DMA");
    (!groups.is_empty()).then_some(Panel::Bars(Bars {
        title,
        unit: "of contiguous",
        groups,
        series,
    }))
}

fn sweep(op: &str, modes: &[String], rows: &[&Row]) -> Option<Panel> {
    let points = |mode: &String| {
        let rows = rows.iter().filter(|row| row.mode == *mode);
        rows.map(|row| (row.piece_bytes as f64, row.gbps)).collect()
    };
    let mut series: Vec<(String, Vec<(f64, f64)>)> =
        modes.iter().map(|mode| (mode.clone(), points(mode))).collect();
    let first = modes.first()?;
    let ceiling = rows.iter().filter(|row| row.mode == *first);
    let ceiling = ceiling.map(|row| (row.piece_bytes as f64, row.ceiling_gbps)).collect();
    series.push(("contiguous".to_owned(), ceiling));
    let title = format!("{op}: W10, items of 512 to 1600 bytes");
    let lines = Lines { title, across: "bytes of an item", unit: "GB/s", series };
    (!rows.is_empty()).then_some(Panel::Lines(lines))
}

fn map(op: &str, mode: &str, rows: &[&Row]) -> Option<Panel> {
    let rows: Vec<_> = rows.iter().filter(|row| row.mode == mode).collect();
    // Pieces of both directions together are counted in one.
    let count = |row: &Row| row.pieces / if row.op == "both" { 2 } else { 1 };
    let lengths = distinct(rows.iter().map(|row| row.piece_bytes));
    let counts = distinct(rows.iter().map(|row| count(row)));
    let fields = rows.iter().filter_map(|row| {
        let column = lengths.iter().position(|length| *length == row.piece_bytes)?;
        Some((column, counts.iter().position(|known| *known == count(row))?, row.ratio))
    });
    let map = Map {
        title: format!("{op}, {mode}: W11, rate as a part of one contiguous DMA"),
        across: "bytes of a piece",
        along: "pieces",
        fields: fields.collect(),
        columns: lengths.iter().map(|length| format!("{} KiB", length >> 10)).collect(),
        rows: counts.iter().map(u64::to_string).collect(),
    };
    (!rows.is_empty()).then_some(Panel::Map(map))
}
