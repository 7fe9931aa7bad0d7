//! The command as its users run it.

use std::process::{Command, Output};

use serde_json::Value;

fn kvferry(arguments: &[&str], knobs: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvferry"))
        .args(arguments)
        .envs(knobs.iter().copied())
        .output()
        .expect("the command starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_bench_between_two_processes_verifies_every_line_and_writes_json() {
    let directory = tempfile::tempdir().expect("a folder");
    let json = directory.path().join("out.jsonl");
    let path = json.to_str().expect("text");
    let arguments = [
        "bench",
        "--shape",
        "R2,w18,contiguous",
        "--op",
        "both",
        "--iterations",
        "2",
        "--json",
        path,
    ];
    let output = kvferry(&arguments, &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let lines = std::fs::read_to_string(&json).expect("written");
    let rows: Vec<Value> =
        lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let cases: Vec<_> =
        rows.iter().map(|row| (row["shape"].as_str(), row["op"].as_str())).collect();
    let expected = ["R2 dsa-index", "W18", "R5 contiguous"].map(Some);
    let expected: Vec<_> = expected
        .into_iter()
        .flat_map(|shape| [(shape, Some("write")), (shape, Some("read"))])
        .collect();
    assert_eq!(cases, expected);
    for row in &rows {
        assert_eq!(row["verified"], true);
        assert_eq!(row["path"], "memcpy");
        for number in
            ["p50_us", "p99_us", "gbps", "ceiling_gbps", "ratio", "submit_ns_per_descriptor"]
        {
            assert!(row[number].as_f64().is_some_and(|value| value > 0.0), "{number} in {row}");
        }
    }
    assert!(text(&output.stdout).contains("verified"), "a table for people");
    assert!(!text(&output.stderr).contains("WARN"), "{}", text(&output.stderr));
}

#[test]
fn transfers_are_measured_beside_a_load_at_both_priorities_and_paces() {
    let directory = tempfile::tempdir().expect("a folder");
    let json = directory.path().join("out.jsonl");
    let path = json.to_str().expect("text");
    for op in ["write", "read"] {
        let arguments = ["bench", "--interference", "memory", "--device", "host", "--shape", "R2"];
        let more = ["--op", op, "--rate", "0.05", "--window", "30", "--json", path];
        let output = kvferry(&[&arguments[..], &more[..]].concat(), &[]);
        assert!(output.status.success(), "{op}: {}", text(&output.stderr));
        let lines = std::fs::read_to_string(&json).expect("written");
        let rows: Vec<Value> =
            lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let cases: Vec<_> =
            rows.iter().map(|row| (row["pattern"].as_str(), row["priority"].as_str())).collect();
        let expected = [
            ("back_to_back", "high"),
            ("back_to_back", "normal"),
            ("paced", "high"),
            ("paced", "normal"),
        ];
        assert_eq!(cases, expected.map(|(pattern, priority)| (Some(pattern), Some(priority))));
        for row in &rows {
            assert_eq!((&row["load"], &row["op"]), (&"memory".into(), &op.into()));
            assert_eq!((&row["verified"], &row["runs"]), (&true.into(), &3.into()));
            assert_eq!(row["target_gbps"].is_number(), row["pattern"] == "paced", "{row}");
            for number in [
                "idle_p99_us",
                "p50_us",
                "p99_us",
                "max_us",
                "starved",
                "idle_gbps",
                "gbps",
                "load_alone_per_s",
                "step_alone_p50_us",
            ] {
                assert!(row[number].as_f64().is_some_and(|value| value > 0.0), "{number} in {row}");
            }
            for number in ["loss_percent", "loss_percent_per_gbps", "timing_cost_percent"] {
                assert!(row[number].is_number(), "{number} in {row}");
            }
        }
        let said = text(&output.stdout);
        assert!(said.contains("verified") && said.contains("timing costs"), "{said}");
    }
}

#[test]
fn a_models_cache_moves_by_name_and_by_its_configuration_file() {
    let directory = tempfile::tempdir().expect("a folder");
    let config = directory.path().join("config.json");
    let facts = r#"{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "torch_dtype": "bfloat16", "model_type": "tiny"}"#;
    std::fs::write(&config, facts).expect("written");
    let path = config.to_str().expect("text");
    for model in [["--model", "qwen2.5-7b"], ["--model-config", path]] {
        let arguments =
            ["bench", model[0], model[1], "--tokens", "100", "--page", "16", "--iterations", "2"];
        let output = kvferry(&arguments, &[]);
        assert!(output.status.success(), "{model:?}: {}", text(&output.stderr));
        assert!(text(&output.stdout).contains("100 tokens, page 16"), "{}", text(&output.stdout));
    }
}

#[test]
fn every_level_of_tokens_is_moved_over_tcp_three_times_and_verified() {
    let directory = tempfile::tempdir().expect("a folder");
    let config = directory.path().join("config.json");
    let facts = r#"{"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8,
        "torch_dtype": "fp8", "model_type": "tiny"}"#;
    std::fs::write(&config, facts).expect("written");
    let json = directory.path().join("out.jsonl");
    let (config, path) = (config.to_str().expect("text"), json.to_str().expect("text"));
    let arguments = ["bench", "--transport", "tcp", "--lanes", "2", "--tokens", "levels"];
    let more = ["--model-config", config, "--json", path];
    let output = kvferry(&[&arguments[..], &more[..]].concat(), &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let rows = rows(&json);
    assert_eq!(rows.len(), 16);
    assert_eq!(rows[0]["shape"], "tiny 64 tokens, page 64");
    assert_eq!(rows[15]["shape"], "tiny 131072 tokens, page 64");
    for pair in rows.windows(2) {
        assert!(pair[0]["bytes"].as_u64() < pair[1]["bytes"].as_u64(), "levels rise");
    }
    for row in &rows {
        assert_eq!((&row["verified"], &row["iterations"]), (&true.into(), &3.into()));
        assert_eq!((&row["transport"], &row["path"]), (&"tcp".into(), &"tcp".into()));
    }
}

#[test]
fn levels_beyond_this_machines_memory_are_left_out_with_the_reason() {
    let directory = tempfile::tempdir().expect("a folder");
    let config = directory.path().join("config.json");
    // A page of 64 tokens is 2^40 bytes and more.
    let facts = r#"{"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 17179869184,
        "torch_dtype": "fp8", "model_type": "huge"}"#;
    std::fs::write(&config, facts).expect("written");
    let config = config.to_str().expect("text");
    let output = kvferry(&["bench", "--model-config", config, "--tokens", "levels"], &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    assert_eq!(said.matches("skipped huge ").count(), 16, "{said}");
    assert!(said.contains("MB of host memory, "), "{said}");
}

#[test]
fn several_models_are_measured_one_after_the_other() {
    let directory = tempfile::tempdir().expect("a folder");
    let json = directory.path().join("out.jsonl");
    let path = json.to_str().expect("text");
    let arguments = ["bench", "--model", "kimi-k3,deepseek-v3", "--tokens", "100"];
    let output = kvferry(&[&arguments[..], &["--iterations", "2", "--json", path]].concat(), &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let rows = rows(&json);
    let shapes: Vec<_> = rows.iter().filter_map(|row| row["shape"].as_str()).collect();
    assert_eq!(shapes, ["kimi-k3 100 tokens, page 64", "deepseek-v3 100 tokens, page 64"]);
}

fn rows(path: &std::path::Path) -> Vec<Value> {
    let lines = std::fs::read_to_string(path).expect("written");
    lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn a_compact_form_moves_the_same_verified_bytes_and_says_what_it_cost_the_host() {
    let directory = tempfile::tempdir().expect("a folder");
    let json = directory.path().join("out.jsonl");
    let path = json.to_str().expect("text");
    for (case, expected) in [
        (&["--shape", "W07a", "--form", "strided", "--bare"][..], &["strided"][..]),
        (&["--shape", "W07b,R2", "--form", "paged"], &["paged", "paged"]),
        (&["--shape", "W07a,W07b,W18", "--form", "auto"], &["strided", "paged", "ranges"]),
        (&["--model", "deepseek-v3", "--tokens", "100", "--form", "paged"], &["paged"]),
        (&["--model", "qwen2.5-7b", "--tokens", "100", "--head-slice", "3/4"], &["ranges"]),
        (
            &["--model", "qwen2.5-7b", "--tokens", "100", "--head-slice", "3/4", "--form", "auto"],
            &["paged"],
        ),
    ] {
        for op in ["write", "read"] {
            let more = ["--iterations", "2", "--op", op, "--json", path];
            let output = kvferry(&[&["bench"], case, &more].concat(), &[]);
            assert!(output.status.success(), "{case:?}: {}", text(&output.stderr));
            let rows = rows(&json);
            let forms: Vec<_> = rows.iter().map(|row| row["form"].as_str()).collect();
            let expected: Vec<_> = expected.iter().copied().map(Some).collect();
            assert_eq!(forms, expected, "{case:?}");
            for row in &rows {
                assert_eq!(row["verified"], true, "{case:?}");
                for number in ["submit_us", "ended_poll_ns", "heap_bytes", "pinned_bytes"] {
                    assert!(row[number].is_number(), "{number} in {row}");
                }
            }
            assert!(text(&output.stdout).contains("ns after the end"), "{}", text(&output.stdout));
        }
    }
}

#[test]
fn batches_in_flight_are_counted_together_and_verified() {
    let directory = tempfile::tempdir().expect("a folder");
    let json = directory.path().join("out.jsonl");
    let path = json.to_str().expect("text");
    let arguments = ["bench", "--shape", "R2", "--in-flight", "5", "--iterations", "2"];
    let output = kvferry(&[&arguments[..], &["--json", path]].concat(), &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("R2 dsa-index x 5"), "{}", text(&output.stdout));
    let [row] = &rows(&json)[..] else { panic!("one line") };
    assert_eq!((&row["in_flight"], &row["bytes"]), (&5.into(), &(5 * 8_110_080).into()));
    assert!(row["poll_ns"].as_f64().is_some_and(|poll| poll > 0.0), "the first is waited for");
}

#[test]
fn offload_is_measured_in_every_mode_on_host_memory_and_drawn() {
    let directory = tempfile::tempdir().expect("a folder");
    let [json, plot] = ["out.jsonl", "out.svg"].map(|name| directory.path().join(name));
    let [json_path, plot_path] = [&json, &plot].map(|path| path.to_str().expect("text"));
    let arguments =
        "bench --transport offload --shape R6 --cache 8x4x1024 --most-pieces 100 --iterations 2";
    let files = ["--json", json_path, "--plot", plot_path];
    let output = kvferry(&[&arguments.split(' ').collect::<Vec<_>>()[..], &files].concat(), &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let rows = rows(&json);
    assert_eq!(rows.len(), 2 * 3 * 4, "shapes, directions, modes");
    assert!(rows.iter().all(|row| row["verified"] == true && row["device"] == "host"));
    let said = text(&output.stdout);
    assert!(said.contains("kv 8x4x1024") && said.contains("of the shortest p50"), "{said}");
    assert!(std::fs::read_to_string(&plot).expect("drawn").contains("staged"));
}

#[test]
fn a_decoder_is_measured_in_both_processes_and_may_be_a_program_of_the_users() {
    let directory = tempfile::tempdir().expect("a folder");
    let json = directory.path().join("out.jsonl");
    let path = json.to_str().expect("text");
    let common = "bench --interference decode --cache 8x4x4096 --mode direct,auto --op both --layout strided --window 300 --runs 1 --rate 0.01";
    let common: Vec<_> = common.split(' ').chain(["--json", path]).collect();
    let output = kvferry(&common, &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let measured = rows(&json);
    let processes: Vec<_> = measured.iter().map(|row| row["process"].as_str()).collect();
    assert_eq!(
        processes,
        [Some("same"); 3].into_iter().chain([Some("other"); 3]).collect::<Vec<_>>()
    );
    assert!(measured.iter().all(|row| row["verified"] == true));
    let steps = |rows: &[Value]| rows.iter().filter_map(|row| row["steps"].as_u64()).sum::<u64>();
    assert!(steps(&measured[..3]) > 0 && steps(&measured[3..]) > 0, "{measured:?}");

    // Any program that prints such lines will do, through any shell command.
    let program = directory.path().join("decoder.sh");
    let own = env!("CARGO_BIN_EXE_kvferry");
    let script = format!("{own} decoder --device host | sed -u s/reads/users/\n");
    std::fs::write(&program, script).expect("written");
    let command = format!("sh {}", program.display());
    let more = ["--process", "other", "--decode-program", &command];
    let output = kvferry(&[&common[..], &more].concat(), &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let measured = rows(&json);
    assert!(measured.len() == 3 && steps(&measured) > 0, "{measured:?}");
    for row in &measured {
        assert!(row["decoder"].as_str().is_some_and(|it| it.starts_with("users ")), "{row}");
    }
}

#[test]
fn a_soak_verifies_random_rounds_and_reports_what_grew() {
    let arguments = ["soak", "--minutes", "0.03", "--most-mib", "1", "--seed", "11"];
    let output = kvferry(&[&arguments[..], &["--threads", "3"]].concat(), &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("seed 11"), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    assert!(said.contains(" completed\n") && said.lines().count() == 2, "{said}");
    let rounds =
        said.split_once(" rounds verified").and_then(|(rounds, _)| rounds.parse::<u64>().ok());
    assert!(rounds.is_some_and(|rounds| rounds > 24), "more than the warm-up: {said}");
    for what in ["mappings", "maps", "fds", "MB ->"] {
        assert!(said.contains(what), "{what} is missing: {said}");
    }
}

#[test]
fn a_mistake_of_the_user_is_answered_with_what_would_be_right() {
    for (arguments, knobs, expected) in [
        (&["bench", "--shape", "R33"][..], &[][..], "R33"),
        (&["bench", "--device", "gpu:0"], &[], "expected host, cuda:N or rocm:N"),
        (&["bench", "--model", "gpt"], &[], "deepseek-v3"),
        (&["bench", "--interference", "fan"], &[], "blocks"),
        (&["bench", "--interference", "gemm", "--rate", "0"], &[], "more than 0"),
        (&["bench", "--rate", "1"], &[], "--interference"),
        (&["bench", "--shape", "R2", "--form", "strided"], &[], "use --form paged"),
        (&["bench", "--shape", "R3", "--form", "paged"], &[], "R3 head-sliced has no paged form"),
        (&["bench", "--shape", "R2", "--head-slice", "1/4"], &[], "add --model"),
        (&["bench", "--model", "deepseek-v3", "--head-slice", "1/4"], &[], "one latent"),
        (&["bench", "--model", "qwen2.5-7b", "--head-slice", "5/4"], &[], "K from 1 to N"),
        (&["bench", "--in-flight", "0"], &[], "--in-flight"),
        (&["bench", "--tokens", "levels"], &[], "add --model"),
        (&["bench", "--model", "kimi-k3", "--tokens", "0"], &[], "or levels"),
        (&["bench", "--model", "kimi-k3,gpt"], &[], r#"no model "gpt""#),
        (&["bench", "--peer", "mooncake"], &[], "add --transport tcp"),
        (&["bench", "--peer", "nixl"], &[], "mooncake"),
        (
            &["bench", "--transport", "tcp", "--peer", "mooncake", "--device", "rocm:0"],
            &[],
            "not rocm:0",
        ),
        (
            &["bench", "--transport", "tcp", "--peer", "mooncake"],
            &[("KVFERRY_MOONCAKE_PYTHON", "/nowhere/python3")],
            "KVFERRY_MOONCAKE_PYTHON names another interpreter, KVFERRY_MOONCAKE_PATH a folder",
        ),
        (&["bench", "--mode", "staged"], &[], "of --transport offload"),
        (&["bench", "--op", "h2d"], &[], "of --transport offload"),
        (&["bench", "--transport", "offload", "--op", "write"], &[], "h2d, d2h, both or all"),
        (&["bench", "--transport", "offload", "--mode", "fast"], &[], "staged"),
        (&["bench", "--transport", "offload", "--cache", "4x4"], &[], "PAGESxLAYERSxBYTES"),
        (&["bench", "--transport", "offload", "--samples", "4"], &[], "--json"),
        (&["bench", "--transport", "offload", "--model", "qwen3-4b"], &[], "use --cache"),
        (&["bench", "--transport", "offload", "--bare"], &[], "leave --peer-device, --bare"),
        (
            &["bench", "--transport", "offload", "--grid", "--most-pieces", "3"],
            &[],
            "16 pieces or more",
        ),
        (
            &["bench", "--transport", "offload", "--interference", "gemm"],
            &[],
            "beside --interference decode",
        ),
        (&["bench", "--interference", "decode", "--shape", "R6"], &[], "use --cache"),
        (&["bench", "--interference", "decode", "--sweep"], &[], "without --interference"),
        (&["bench", "--interference", "decode", "--cache", "1x1x1,2x2x2"], &[], "one --cache"),
        (&["bench", "--interference", "decode", "--runs", "0"], &[], "--runs"),
        (&["bench", "--interference", "gemm", "--runs", "2"], &[], "of --interference decode"),
        (&["bench", "--transport", "offload", "--process", "same"], &[], "of --interference"),
        (
            &["bench", "--interference", "decode", "--process", "same", "--decode-program", "x"],
            &[],
            "add --process other",
        ),
        (&["bench", "--transport", "offload", "--head-slice", "1/4"], &[], "--head-slice"),
        (&["bench", "--interference", "decode", "--transport", "tcp"], &[], "--transport"),
        (
            &[
                "bench",
                "--interference",
                "decode",
                "--cache",
                "1x1x64",
                "--process",
                "other",
                "--decode-program",
                "echo hello",
            ],
            &[],
            "no step",
        ),
        (&["soak", "--minutes", "0"], &[], "more than 0"),
        (&["soak", "--transport", "offload"], &[], "possible values: peer, tcp"),
        (&["soak", "--lanes", "2"], &[], "add --transport tcp"),
        (&["bench", "--shape", "R2", "--device", "cuda:999"], &[], "no device cuda:999"),
        (
            &["bench", "--shape", "R2"],
            &[("MC_KVFERRY_STREAMS", "many")],
            "MC_KVFERRY_STREAMS=\"many\"",
        ),
        (&["doctor"], &[("MC_KVFERRY_TILE_BYTES", "1")], "expected 256 to 1G bytes"),
        (&["doctor", "--device", "host"], &[], "--calibrate"),
        (
            &["doctor", "--calibrate", "--device", "host"],
            &[("MC_KVFERRY_CACHE_DIR", "off")],
            "set MC_KVFERRY_CACHE_DIR",
        ),
    ] {
        let output = kvferry(arguments, knobs);
        assert!(!output.status.success(), "{arguments:?} was accepted");
        let said = text(&output.stderr);
        let missing_library = expected.contains("cuda:999") && said.contains("cannot load libcuda");
        assert!(said.contains(expected) || missing_library, "{arguments:?}: {said}");
        assert!(!said.contains("panicked"), "{said}");
    }
}

#[test]
fn the_doctor_works_without_any_gpu_and_shows_every_knob_with_its_source() {
    let output = kvferry(&["doctor"], &[("MC_KVFERRY_STREAMS", "7"), ("MC_KVFERRY_STREAM", "7")]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report = text(&output.stdout);
    let line = report.lines().find(|line| line.contains("MC_KVFERRY_STREAMS")).expect("the knob");
    assert!(line.contains("| 7 ") && line.contains("environment"), "{line}");
    for expected in [
        "host:0",
        "host memory",
        "MC_KVFERRY_CACHE_DIR",
        "default",
        "boot id",
        "| host:0 | memcpy |",
        "host:0: TCP, host memory in place",
        "| memfd_create ",
        "| open files ",
        "MC_KVFERRY_STREAM is not a knob of this version; was MC_KVFERRY_STREAMS meant?",
    ] {
        assert!(report.contains(expected), "{expected} is missing:\n{report}");
    }
    assert!(
        text(&output.stderr).contains("MC_KVFERRY_STREAM is not a knob"),
        "a typo is pointed out"
    );
}

#[cfg(feature = "rocm")]
#[test]
fn the_doctor_says_of_rocm_devices_how_bytes_go_and_why_not_by_the_kernel() {
    let report = text(&kvferry(&["doctor"], &[]).stdout);
    if !report.contains("\n| rocm:0 ") {
        let reason = report.lines().find(|line| line.contains("not available"));
        return kvferry_device::conformance::skip("rocm", &reason.unwrap_or("no AMD GPU"));
    }
    assert!(report.contains("hipRTC: "), "the compiler that was found:\n{report}");
    assert!(report.contains("rocm:0: TCP, staged through 8 pinned slots of 16 MiB"), "{report}");
    let report = text(&kvferry(&["doctor"], &[("MC_KVFERRY_KERNEL", "off")]).stdout);
    let line = report.lines().find(|line| line.contains("rocm:0 to rocm:0")).unwrap_or_default();
    assert!(line.contains("rocm:0 has no copy kernel: none: turned off"), "{report}");
    assert!(report.contains("rocm:0: DMA alone; rocm:0 has no copy kernel"), "{report}");
}

#[test]
fn a_report_is_one_file_with_the_profiles_that_are_used_and_without_secrets() {
    let folder = tempfile::tempdir().expect("a folder");
    let (cache, key) = (folder.path().join("cache"), folder.path().join("key"));
    std::fs::write(&key, "hunter2-in-the-file-of-the-key").expect("written");
    let file = folder.path().join("report.txt");
    let file = file.to_str().expect("text");
    let knobs = [
        ("MC_KVFERRY_CACHE_DIR", cache.to_str().expect("text")),
        ("MC_KVFERRY_AUTH_KEY_FILE", key.to_str().expect("text")),
        ("MC_KVFERRY_AUTH_TOKEN", "hunter3"),
        ("CUDA_API_KEY", "hunter4"),
        ("PASSWORD", "hunter5"),
        ("ROCR_VISIBLE_DEVICES", "0"),
    ];
    let arguments = ["doctor", "--calibrate", "--device", "host", "--report", file];
    let output = kvferry(&arguments, &knobs);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report = std::fs::read_to_string(file).expect("written");
    for expected in [
        "Devices",
        "Libraries and compilers",
        "Between two processes",
        "System",
        "Knobs",
        "Machine",
        "ROCR_VISIBLE_DEVICES: 0",
        "MC_KVFERRY_AUTH_TOKEN is not a knob",
        "Profile of host:0",
        "\"batch_min\"",
    ] {
        assert!(report.contains(expected), "{expected} is missing:\n{report}");
    }
    assert!(!report.contains("hunter"), "a secret:\n{report}");
}

#[test]
fn the_doctor_calibrates_a_device_and_shows_what_is_in_force_and_why() {
    let folder = tempfile::tempdir().expect("a folder");
    let cache = ("MC_KVFERRY_CACHE_DIR", folder.path().to_str().expect("text"));
    let of = |report: &str, knob: &str| -> String {
        let mut lines = report.lines().map(String::from);
        lines.find(|line| line.contains("host:0") && line.contains(knob)).expect("the knob")
    };
    let report = text(&kvferry(&["doctor"], &[cache]).stdout);
    assert!(of(&report, "MC_KVFERRY_TILE_BYTES").contains("default"), "{report}");

    let arguments = ["doctor", "--calibrate", "--device", "host"];
    let calibrated = kvferry(&arguments, &[cache, ("MC_KVFERRY_TILE_BYTES", "2K")]);
    assert!(calibrated.status.success(), "{}", text(&calibrated.stderr));
    let report = text(&calibrated.stdout);
    let tile = of(&report, "MC_KVFERRY_TILE_BYTES");
    assert!(tile.contains("2K") && tile.contains("environment"), "{tile}");
    assert!(of(&report, "MC_KVFERRY_MAX_GRID_BLOCKS").contains("profile of 20"), "{report}");

    let profiles: Vec<_> =
        std::fs::read_dir(folder.path().join("profiles")).expect("made").collect();
    assert_eq!(profiles.len(), 1);
    let file = profiles[0].as_ref().expect("a file").path();
    let kept: Value =
        serde_json::from_slice(&std::fs::read(&file).expect("readable")).expect("JSON");
    assert!(kept["profile"]["values"]["batch_min"].as_u64().is_some(), "{kept}");

    std::fs::write(&file, "{}").expect("ours");
    let altered = kvferry(&["doctor"], &[cache]);
    let report = text(&altered.stdout);
    assert!(of(&report, "MC_KVFERRY_MAX_GRID_BLOCKS").contains("default"), "{report}");
    assert!(report.contains("is not used: it is not a profile"), "{report}");
    assert!(report.contains("doctor --calibrate --device host"), "{report}");
}
