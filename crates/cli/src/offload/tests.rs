//! Every mode on a simulated GPU, and what is written of it.

use std::collections::BTreeSet;

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

/// A command line with `--json` and `--plot`, measured on a simulated GPU; its rows and chart.
fn rows(arguments: &str) -> (Vec<Value>, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let [json, plot] = ["out.jsonl", "out.svg"].map(|name| folder.path().join(name));
    let files = ["--json", json.to_str().expect("text"), "--plot", plot.to_str().expect("text")];
    let words = arguments.split(' ').chain(files);
    let line = Line::try_parse_from(std::iter::once("bench").chain(words));
    let options = line.unwrap_or_else(|error| panic!("{error}")).options;
    let config = Config::from_lookup(|_| None).expect("defaults");
    let (gpu, _) = sim(&SimOptions::default()).expect("always there");
    let host = kvferry_engine::open_device(DeviceName::Host, &config).expect("always there");
    run_on(&options, Devices { gpu, host }, config).expect("it measures");
    let text = std::fs::read_to_string(&json).expect("written");
    let rows = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    (rows, std::fs::read_to_string(&plot).expect("drawn"))
}

fn words(rows: &[Value], field: &str) -> BTreeSet<String> {
    rows.iter().filter_map(|row| row[field].as_str()).map(String::from).collect()
}

#[test]
fn every_mode_moves_verified_bytes_between_a_gpu_and_host_memory_in_every_direction() {
    let arguments = "--transport offload --shape R6,W12b,W13 --cache 9x4x4096:2 --most-pieces 300 --iterations 2";
    let (rows, chart) = rows(arguments);
    assert_eq!(rows.len(), 4 * 3 * 4, "shapes, directions, modes");
    assert_eq!(words(&rows, "op"), ["both", "d2h", "h2d"].map(String::from).into());
    let modes = ["auto", "direct", "kernel", "staged"].map(String::from);
    assert_eq!(words(&rows, "mode"), modes.clone().into());
    for row in &rows {
        assert_eq!(row["verified"], true, "{row}");
        for number in [
            "p50_us",
            "p99_us",
            "empty_batch_ns",
            "gbps",
            "ratio",
            "submit_us",
            "wait_us",
            "cold_us",
        ] {
            assert!(row[number].as_f64().is_some_and(|number| number >= 0.0), "{number}: {row}");
        }
        let packs = row["form"] == "ranges";
        assert_eq!(packs, row["pack_us"].as_f64().is_some_and(|time| time > 0.0), "{row}");
        if row["path"] == "staged" {
            assert!(row["sm_us_per_64_mib"].as_f64().is_some_and(|time| time > 0.0), "{row}");
        }
    }
    let form = |shape: &str| {
        let row = rows.iter().find(|row| row["shape"] == shape).expect("measured");
        row["form"].as_str().expect("text").to_owned()
    };
    assert_eq!((form("R6"), form("kv 9x4x4096:2")), ("ranges".into(), "paged".into()));
    let paths = |mode: &str| {
        let of_mode = rows.iter().filter(|row| row["mode"] == mode && row["shape"] == "R6");
        words(&of_mode.cloned().collect::<Vec<_>>(), "path")
    };
    assert_eq!(paths("direct"), ["dma".to_owned()].into());
    assert_eq!(paths("kernel"), ["kernel".to_owned()].into());
    assert_eq!(paths("staged"), ["staged".to_owned()].into());
    for row in &rows {
        assert_eq!(row["reason"].is_string(), row["mode"] == "auto", "{row}");
    }
    for word in modes.iter().map(String::as_str).chain(["kv 9x4x4096:2", "W13"]) {
        assert!(chart.contains(word), "{word} is not in the chart");
    }
}

#[test]
fn samples_are_written_one_a_line_with_the_cold_one_apart() {
    let arguments =
        "--transport offload --cache 4x4x4096 --op d2h --mode direct,staged --samples 3";
    let (lines, _) = rows(arguments);
    assert_eq!(lines.len(), 2 * (1 + 4));
    for (index, line) in lines.iter().enumerate() {
        match index % 5 {
            0 => assert_eq!(line["iterations"], 3, "{line}"),
            sample => {
                assert_eq!(line["sample"], sample - 1, "{line}");
                assert_eq!(line["cold"], sample == 1, "{line}");
                let times = ["submit_ns", "wait_ns", "whole_ns"]
                    .map(|field| line[field].as_u64().expect("a time"));
                assert!(times[0] + times[1] == times[2], "{line}");
            }
        }
    }
}

#[test]
fn sweeps_and_grids_are_drawn_against_their_sizes() {
    let arguments = "--transport offload --sweep --grid --op h2d --mode direct,kernel --most-pieces 32 --iterations 1";
    let (rows, chart) = rows(arguments);
    assert_eq!(rows.len(), 2 * (69 + 18), "counts of 16 and 32");
    for word in ["W10", "bytes of an item", "direct: W11", "32 KiB", "\n16\n"] {
        assert!(chart.contains(word), "{word} is not in the chart");
    }
}
