//! `kvferry bench --peer mooncake`: with the real wheel, if ci/mooncake.sh installed it, and with
//! stand-ins that fail in every way.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// Runs the bench with the wheel of a folder. Output, and the lines of JSON.
fn bench(wheel: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> (Output, Vec<Value>) {
    let directory = tempfile::tempdir().expect("a folder");
    let json = directory.path().join("out.jsonl");
    let output = Command::new(env!("CARGO_BIN_EXE_kvferry"))
        .args(["bench", "--transport", "tcp", "--peer", "mooncake", "--iterations", "2"])
        .args(arguments)
        .arg("--json")
        .arg(&json)
        .env("KVFERRY_MOONCAKE_PATH", wheel)
        .envs(environment.iter().copied())
        .output()
        .expect("the command starts");
    let lines = std::fs::read_to_string(&json).unwrap_or_default();
    let rows = lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    (output, rows)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Where ci/mooncake.sh installs the wheel, unless the environment says another place; none, and a
/// line that says so, if it is not there.
fn wheel() -> Option<PathBuf> {
    let given = std::env::var_os("KVFERRY_TEST_MOONCAKE").map(PathBuf::from);
    let usual = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/mooncake");
    let folder = given.unwrap_or_else(usual);
    if folder.join("mooncake").is_dir() {
        return Some(folder);
    }
    kvferry_device::conformance::skip("mooncake", &"ci/mooncake.sh installs Mooncake's wheel");
    None
}

#[test]
fn the_wheels_transfers_are_verified_and_compared_both_ways() {
    let Some(wheel) = wheel() else { return };
    let arguments = ["--shape", "R4", "--op", "both", "--lanes", "3"];
    let (output, rows) = bench(&wheel, &arguments, &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(rows.len(), 2);
    for row in &rows {
        let mooncake = &row["mooncake"];
        let rate = |of: &Value| of["gbps"].as_f64().unwrap_or_else(|| panic!("no rate in {of}"));
        let over = mooncake["over"].as_f64().expect("a ratio");
        assert!((over - rate(row) / rate(mooncake)).abs() < 1e-6, "{row}");
        assert!(mooncake["wheel"].as_str().is_some_and(|name| name.contains("0.3")), "{row}");
        let attempts = mooncake["attempts"].as_array().expect("a list");
        assert!(attempts.iter().any(|it| it["lanes"] == 3), "as many lanes as ours: {row}");
        assert!(attempts.iter().any(|it| it["pieces_per_call"] == 4096), "in short calls: {row}");
        let best = attempts.iter().filter_map(|it| it["gbps"].as_f64()).fold(0.0, f64::max);
        assert_eq!(best, rate(mooncake), "{row}");
        assert!(attempts.iter().all(|it| it["failure"].is_null()), "{row}");
    }
    let said = text(&output.stdout);
    assert!(said.contains("over Mooncake") && said.contains("the best of several"), "{said}");
}

/// What every stand-in has.
const STAND_IN: &str = r#"
import os
class TransferEngine:
    def initialize(self, *arguments): return 0
    def get_rpc_port(self): return 1
    def register_memory(self, *arguments): return 0
    def unregister_memory(self, *arguments): return 0
    def batch_transfer_sync_write(self, *arguments):
        return {"lies": lambda: 0, "refuses": lambda: -1, "dies": lambda: os._exit(3)}[os.environ["STAND_IN"]]()
"#;

#[test]
fn what_the_peer_does_wrong_is_told_and_our_numbers_stand() {
    let wheel = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(wheel.path().join("mooncake")).expect("made");
    std::fs::write(wheel.path().join("mooncake/engine.py"), STAND_IN).expect("written");
    for (deed, expected) in
        [("lies", "wrong bytes: "), ("refuses", "returned -1"), ("dies", "its process ended: exit")]
    {
        let arguments = ["--shape", "R2", "--lanes", "2"];
        let (output, rows) = bench(wheel.path(), &arguments, &[("STAND_IN", deed)]);
        assert!(output.status.success(), "{deed}: {}", text(&output.stderr));
        let [row] = &rows[..] else { panic!("{deed}: one line") };
        assert_eq!(row["verified"], true, "{deed}");
        let mooncake = &row["mooncake"];
        assert!(mooncake["gbps"].is_null() && mooncake["over"].is_null(), "{deed}: {row}");
        let attempts = mooncake["attempts"].as_array().expect("a list");
        assert_eq!(attempts.len(), 3, "{deed}");
        for attempt in attempts {
            let failure = attempt["failure"].as_str().unwrap_or_default();
            assert!(failure.contains(expected), "{deed}: {attempt}");
        }
        let said = text(&output.stdout);
        assert!(said.contains("Mooncake did not move R2") && said.contains("failed"), "{said}");
    }
}
