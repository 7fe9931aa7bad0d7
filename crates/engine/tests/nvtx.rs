//! Batches on the time line of NVIDIA's tools. A library of the same functions stands for NVTX, which
//! does nothing without a tool.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use kvferry_engine::{Config, Engine, Op, Range, State};

use common::NoExports;

/// Writes what it is called with to the file LOG.
const LIBRARY: &str = r#"
#include <stdint.h>
#include <stdio.h>
static uint64_t started;
static void note(const char *what, uint64_t id, const char *name) {
    FILE *file = fopen(LOG, "a");
    fprintf(file, "%s %llu %s\n", what, (unsigned long long)id, name);
    fclose(file);
}
uint64_t nvtxRangeStartA(const char *name) { note("start", ++started, name); return started; }
void nvtxRangeEnd(uint64_t id) { note("end", id, ""); }
"#;

fn library(folder: &Path) -> Option<PathBuf> {
    let (source, library) = (folder.join("nvtx.c"), folder.join("libnvtx3interop.so.1"));
    std::fs::write(&source, LIBRARY).expect("written");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(format!("-DLOG=\"{}\"", folder.join("log").display()))
        .arg(&source)
        .status();
    match built {
        Ok(status) => {
            assert!(status.success(), "it compiles");
            Some(library)
        }
        Err(error) => {
            kvferry_device::conformance::skip("cxx", &error);
            None
        }
    }
}

/// Moves 64 bytes in two pieces.
fn move_some(nvtx: &str) {
    let lookup = |asked: &str| match asked {
        "MC_KVFERRY_NVTX" => Some(nvtx.into()),
        "MC_KVFERRY_CACHE_DIR" => Some("off".into()),
        _ => None,
    };
    let config = Config::from_lookup(lookup).expect("good knobs");
    let device = kvferry_device::host().expect("always there");
    let engine = Engine::new(config, vec![device]).expect("an engine");
    let memory = engine.allocate(&engine.devices()[0], 4096).expect("memory");
    let target = engine.open("it", engine.segment(), Arc::new(NoExports)).expect("opens");
    let range =
        |at| Range { local: memory.addr() + at, remote: memory.addr() + 1024 + at, len: 32 };
    let id = engine.submit(&target, Op::Write, &[range(0), range(100)]).expect("submits");
    let status = engine.wait(id, Duration::from_secs(60)).expect("known");
    assert_eq!(status.state, State::Completed);
}

#[test]
fn a_batch_is_a_range_from_its_submission_to_its_end_if_the_knob_asks_for_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(library) = library(folder.path()) else { return };
    move_some("off");
    assert!(!folder.path().join("log").exists());
    move_some(library.to_str().expect("text"));
    let log = std::fs::read_to_string(folder.path().join("log")).expect("it was called");
    let expected = "start 1 kvferry write by peer: 2 pieces, 64 bytes\nend 1 \n";
    assert_eq!(log, expected);
}

#[test]
fn a_library_that_is_missing_is_no_reason_not_to_move() {
    move_some("/nowhere/libnvtx3interop.so.1");
}
