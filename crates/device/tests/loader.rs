//! Whatever libcuda a machine has, opening it ends in devices or in an error that says what is
//! wrong with it (FAILURES.md B29).
//!
//! Each case links a stand-in for libcuda and runs this binary again, as a child that finds the
//! stand-in first. Which functions the stand-in has comes from the table in `cuda/library.rs`.
//!
//! Needs a C++ compiler (`CXX`, else `c++`); without one there is a SKIP line and nothing is tested,
//! or every test fails if `KVFERRY_TEST_REQUIRE` contains `cxx`.

#![cfg(feature = "cuda")]

use std::fmt::{Debug, Display, Write};
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, OnceLock};

use kvferry_device::conformance::skip;
use kvferry_device::cuda::{CudaOptions, count, open};
use kvferry_device::{Chunk, Export};
use tempfile::TempDir;

/// Set for a child.
const CHILD: &str = "KVFERRY_LOADER_CHILD";

/// Functions of the stand-in that do more than succeed.
const SPEAKING: &str = r#"
#include <cstdlib>
#include <cstring>
using address = unsigned long long;
static int number(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}
static int give(address *place) { *place = 1 << 20; return 0; }
extern "C" {
int cuInit(unsigned) { return number("STAND_IN_INIT", 0); }
int cuDeviceGetCount(int *count) { *count = number("STAND_IN_COUNT", 1); return 0; }
int cuDeviceGetUuid(void *uuid, int) { memset(uuid, 1, 16); return 0; }
int cuDeviceGetUuid_v2(void *uuid, int) { memset(uuid, 2, 16); return 0; }
int cuMemAlloc_v2(address *place, size_t) { return give(place); }
int cuIpcOpenMemHandle_v2(address *place, ...) { return give(place); }
int cuMemAddressReserve(address *place, size_t, size_t, address, address) { return give(place); }
int cuMemPoolImportPointer(address *place, void *, void *) { return give(place); }
int cuPointerGetAttributes(unsigned count, int *names, void **values, address place) {
    for (unsigned i = 0; i < count; ++i) {
        if (names[i] == 11) *static_cast<address *>(values[i]) = place;
        if (names[i] == 12) *static_cast<size_t *>(values[i]) = 4096;
    }
    return 0;
}
int cuGetErrorName(int code, const char **name) {
    *name = nullptr;
    if (code == 35) *name = "CUDA_ERROR_INSUFFICIENT_DRIVER";
    if (code == 100) *name = "CUDA_ERROR_NO_DEVICE";
    if (code == 500) *name = "CUDA_ERROR_NOT_FOUND";
    if (code == 803) *name = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH";
    if (code == 999) *name = "CUDA_ERROR_UNKNOWN";
    return *name == nullptr;
}
}
"#;

/// What the table asks of libcuda.
#[derive(Debug, Default)]
struct Table {
    /// Each with the older name that will do, if there is one.
    needed: Vec<(&'static str, Option<&'static str>)>,
    optional: Vec<&'static str>,
}

impl Table {
    fn read() -> Self {
        let text = include_str!("../src/cuda/library.rs");
        let (_, text) = text.split_once("\n    Cuda from ").expect("the table of libcuda");
        let (text, _) = text.split_once("\n}\n").expect("the end of the table");
        let mut table = Self::default();
        let (mut older, mut optional) = (None, false);
        for line in text.lines().map(str::trim) {
            optional = (optional || line == "optional {") && !line.starts_with("unchecked {");
            let line = line.strip_prefix("unchecked { ").unwrap_or(line);
            if let Some(name) = line.strip_prefix("#[older = b\"") {
                older = name.strip_suffix("\\0\"]");
            } else if let Some((name, _)) = line.split_once('(').filter(|_| line.starts_with("cu"))
            {
                match optional {
                    true => table.optional.push(name),
                    false => table.needed.push((name, older.take())),
                }
            }
        }
        table
    }

    fn older(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        self.needed.iter().filter_map(|&(name, older)| Some((name, older?)))
    }

    fn names(&self) -> impl Iterator<Item = &'static str> {
        let older = self.older().map(|(_, older)| older);
        self.needed.iter().map(|&(name, _)| name).chain(older).chain(self.optional.iter().copied())
    }
}

/// A folder with libcuda in it, under every name that is looked for, so that no real one is found.
struct StandIn(TempDir);

impl StandIn {
    fn of_file(make: impl FnOnce(&PathBuf)) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let file = directory.path().join("stand-in");
        make(&file);
        for name in ["cuda", "nvcuda"].into_iter().flat_map(cudarc::get_lib_name_candidates) {
            // Two of the names may be one.
            let _ = std::os::unix::fs::symlink(&file, directory.path().join(name));
        }
        Self(directory)
    }

    /// Has all functions but these.
    fn without(object: &Object, hidden: &[&str]) -> Self {
        Self::of_file(|library| {
            let mut link = compiler();
            link.arg("-shared").arg(&object.0).arg("-o").arg(library);
            if !hidden.is_empty() {
                let script = library.with_extension("map");
                let script_text = format!("{{ local: {}; }};\n", hidden.join("; "));
                fs::write(&script, script_text).expect("a file in our own folder");
                link.arg(format!("-Wl,--version-script={}", script.display()));
            }
            run(&mut link);
        })
    }

    /// What a process answers that finds this libcuda; `settings` are variables for the stand-in.
    fn ask(&self, settings: &[(&str, i32)]) -> Answers {
        let mut child = Command::new(std::env::current_exe().expect("this binary"));
        child
            .args(["what_the_child_answers", "--exact", "--nocapture", "--test-threads=1"])
            .env(CHILD, "1")
            .env("LD_LIBRARY_PATH", self.0.path())
            .env_remove("LD_PRELOAD")
            .envs(settings.iter().map(|(name, value)| (name, value.to_string())));
        Answers(run(&mut child))
    }
}

/// One line each.
struct Answers(String);

impl Answers {
    fn to(&self, question: &str) -> &str {
        let mut lines = self.0.lines();
        lines.find_map(|line| line.strip_prefix(question)?.strip_prefix(": ")).unwrap_or_else(
            || {
                panic!("no answer to {question}:\n{}", self.0);
            },
        )
    }

    #[track_caller]
    fn check(&self, question: &str, words: &[&str]) {
        let answer = self.to(question);
        for word in words {
            assert!(answer.contains(word), "{question}: no {word:?} in {answer}");
        }
    }

    /// The devices are there; the given kinds of exports are not opened, because of that symbol.
    #[track_caller]
    fn check_works(&self, broken: &[(&str, &str)]) {
        self.check("count", &["Ok(1)"]);
        for question in ["open", "memory", "handle", "chunks", "pool"] {
            match broken.iter().find(|(broken, _)| *broken == question) {
                None => self.check(question, &["Ok("]),
                Some((_, symbol)) => self.check(question, &["Err(", symbol, "NOT_FOUND"]),
            }
        }
    }
}

/// The functions of the stand-in, compiled.
struct Object(PathBuf);

impl Object {
    /// `None`, with a line on stderr, where there is no C++ compiler.
    fn of(table: &Table) -> Option<&'static Self> {
        static OBJECT: OnceLock<Result<(Object, TempDir), String>> = OnceLock::new();
        let object = OBJECT.get_or_init(|| {
            let found = compiler().arg("--version").output();
            found.map_err(|error| {
                let reason = format!("cannot run the C++ compiler: {error}");
                skip("cxx", &reason);
                reason
            })?;
            let directory = tempfile::tempdir().expect("a temporary directory");
            let (source, object) =
                (directory.path().join("cuda.cc"), directory.path().join("cuda.o"));
            let mut text = SPEAKING.to_owned();
            for name in table.names().filter(|name| !SPEAKING.contains(&format!("int {name}("))) {
                writeln!(text, "extern \"C\" int {name}() {{ return 0; }}").expect("a string");
            }
            fs::write(&source, text).expect("a file in our own folder");
            run(compiler().args(["-std=c++17", "-fPIC", "-c"]).arg(&source).arg("-o").arg(&object));
            Ok((Self(object), directory))
        });
        object.as_ref().ok().map(|(object, _)| object)
    }
}

fn compiler() -> Command {
    Command::new(std::env::var("CXX").unwrap_or_else(|_| "c++".into()))
}

/// Standard error of a command that must succeed.
#[track_caller]
fn run(command: &mut Command) -> String {
    let output = command.output().expect("it can be started");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{command:?}: {}\n{text}", output.status);
    text
}

fn answer<T: Debug, E: Debug + Display>(question: &str, answer: &Result<T, E>) {
    match answer {
        Ok(value) => eprintln!("{question}: Ok({value:?})"),
        Err(error) => eprintln!("{question}: Err({error:?}), that is: {error}"),
    }
}

/// Not a test of its own: what a child of the others does.
#[test]
fn what_the_child_answers() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    answer("count", &count());
    let device = open(0, &CudaOptions { kernel: false, ..CudaOptions::default() });
    answer("open", &device.as_ref().map(|device| device.info().uuid.0[0]));
    let Ok(device) = device else { return };
    answer("memory", &Arc::clone(&device).allocate(4096).map(drop));
    let file = || File::open("/dev/null").expect("always there").into();
    let (bytes, len) = (vec![0; 80], 4096);
    for (question, export) in [
        ("handle", Export::Handle { bytes: bytes.clone(), len }),
        ("chunks", Export::Chunks { chunks: vec![Chunk { fd: file(), len }], len }),
        ("pool", Export::Pool { fd: file(), bytes, len }),
    ] {
        answer(question, &Arc::clone(&device).open(export).map(drop));
    }
}

#[test]
fn a_function_that_is_missing_is_named() {
    let table = Table::read();
    let Some(object) = Object::of(&table) else { return };
    StandIn::without(object, &[]).ask(&[]).check_works(&[]);
    assert!(table.needed.len() > 50, "{table:?}");
    for &(name, older) in &table.needed {
        let hidden: Vec<_> = [name].into_iter().chain(older).collect();
        let answers = StandIn::without(object, &hidden).ask(&[]);
        let missing = format!("symbol: \"{name}\"");
        for question in ["count", "open"] {
            answers.check(question, &["SymbolMissing", &missing, "driver is too old"]);
        }
    }
}

#[test]
fn a_driver_that_does_not_start_gives_no_device_and_its_own_word() {
    let Some(object) = Object::of(&Table::read()) else { return };
    let stand_in = StandIn::without(object, &[]);
    for (code, word) in [
        (100, "CUDA_ERROR_NO_DEVICE"),
        (35, "CUDA_ERROR_INSUFFICIENT_DRIVER"),
        (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        (999, "CUDA_ERROR_UNKNOWN"),
        // Newer than the bindings, and than the driver itself.
        (123_456, "unknown error"),
    ] {
        let answers = stand_in.ask(&[("STAND_IN_INIT", code)]);
        for question in ["count", "open"] {
            let reason = format!("cuInit failed: {word} ({code})");
            answers.check(question, &["NoDevice", &reason]);
        }
    }
}

#[test]
fn a_driver_that_sees_no_gpu_names_the_variable_that_hides_them() {
    let Some(object) = Object::of(&Table::read()) else { return };
    let stand_in = StandIn::without(object, &[]);
    for gpus in [0, -1] {
        let answers = stand_in.ask(&[("STAND_IN_COUNT", gpus)]);
        for question in ["count", "open"] {
            answers.check(question, &["NoDevice", "CUDA_VISIBLE_DEVICES"]);
        }
    }
}

#[test]
fn a_driver_that_has_only_the_older_names_works_by_them() {
    let table = Table::read();
    let Some(object) = Object::of(&table) else { return };
    let newer: Vec<_> = table.older().map(|(name, _)| name).collect();
    assert!(newer.contains(&"cuDeviceGetUuid_v2"), "{newer:?}");
    for (hidden, uuid) in [(&newer[..], "Ok(1)"), (&[], "Ok(2)")] {
        let answers = StandIn::without(object, hidden).ask(&[]);
        answers.check_works(&[]);
        answers.check("open", &[uuid]);
    }
}

#[test]
fn a_driver_without_an_optional_function_lacks_only_what_needs_it() {
    let table = Table::read();
    let Some(object) = Object::of(&table) else { return };
    assert!(table.optional.len() > 10, "{table:?}");
    let breaks = |name| match name {
        "cuMemAddressReserve"
        | "cuMemImportFromShareableHandle"
        | "cuMemMap"
        | "cuMemSetAccess" => Some(("chunks", name)),
        "cuMemPoolImportFromShareableHandle" | "cuMemPoolImportPointer" => Some(("pool", name)),
        // For the exporter, for the end of a mapping, or for a pool of another device.
        _ => None,
    };
    for &name in &table.optional {
        let broken = Vec::from_iter(breaks(name));
        StandIn::without(object, &[name]).ask(&[]).check_works(&broken);
    }
    let none = StandIn::without(object, &table.optional).ask(&[]);
    none.check_works(&[
        ("chunks", "cuMemAddressReserve"),
        ("pool", "cuMemPoolImportFromShareableHandle"),
    ]);
}

#[test]
fn a_file_that_is_no_library_is_a_missing_library() {
    for content in ["", "not a library, but longer than the header of one would be: 64 bytes"] {
        let stand_in = StandIn::of_file(|file| fs::write(file, content).expect("our own folder"));
        let answers = stand_in.ask(&[]);
        for question in ["count", "open"] {
            answers.check(question, &["LibraryMissing", "libcuda.so.1", "LD_LIBRARY_PATH"]);
        }
    }
}
