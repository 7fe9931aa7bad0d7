//! Shared libraries of a few lines, and this program started again, for tests.
//!
//! Needs a C++ compiler (`CXX`, else `c++`); without one there is a SKIP line and nothing is tested,
//! or every test fails if `KVFERRY_TEST_REQUIRE` contains `cxx`.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::process::Command;

use crate::conformance::skip;

/// Builds `file` in `directory` from C declarations and functions; `None` if nothing can.
pub(super) fn build(directory: &Path, file: &str, soname: &str, source: &str) -> Option<()> {
    let path = directory.join(file);
    let text = directory.join(format!("{file}.cpp"));
    fs::write(&text, format!("extern \"C\" {{\n{source}\n}}\n")).expect("room for the source");
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let built = Command::new(compiler)
        .args(["-shared", "-fPIC", "-w", &format!("-Wl,-soname,{soname}"), "-o"])
        .args([&path, &text])
        .output();
    match built {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(())
        }
        Err(error) => {
            skip("cxx", &error);
            None
        }
    }
}

/// Runs a test as the only one of a new process, with more in its environment. `test` is the
/// start of its path, and of no other's.
pub(super) fn again(test: &str, environment: &[(&str, &OsStr)], body: impl FnOnce()) {
    const AGAIN: &str = "KVFERRY_TEST_AGAIN";
    if std::env::var(AGAIN).is_ok_and(|name| name == test) {
        return body();
    }
    // Not the path of this program: it may run on a loader of its own (ci/with-rocm-root.sh), which
    // is at the start of the command line and nowhere else.
    let line = fs::read("/proc/self/cmdline").expect("Linux tells it");
    let words = line.split(|&byte| byte == 0).map(|word| OsString::from_vec(word.to_vec()));
    let mut program: Vec<_> = words.collect();
    let own = std::env::args_os().next().expect("this program's name");
    let end = program.iter().position(|word| *word == own).expect("it is in the command line");
    program.truncate(end + 1);
    let output = Command::new(&program[0])
        .args(&program[1..])
        .args([test, "--nocapture", "--test-threads=1"])
        .env(AGAIN, test)
        .envs(environment.iter().copied())
        .output()
        .expect("it can be started");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    // Zero tests would be a success, too.
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{}: {said}{complained}",
        output.status
    );
}
