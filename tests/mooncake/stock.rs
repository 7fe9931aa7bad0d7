//! A stock Mooncake process: the PyPI wheel, driven through its Python API.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use rustix::process::{Pid, Signal};
use serde::Deserialize;
use serde_json::{Value, json};

/// Environment of a process that speaks version 1 when it begins a transfer.
pub(crate) const VERSION_1: &[(&str, &str)] = &[("MC_TCP_PROTO", "1")];

/// Environment of a process that connects for each piece. The default keeps four connections.
pub(crate) const UNPOOLED: &[(&str, &str)] = &[("MC_TCP_ENABLE_CONNECTION_POOL", "0")];

/// A process with one registered buffer.
#[derive(Debug)]
pub(crate) struct Stock {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    ready: Ready,
    /// By which its bytes come and go.
    file: PathBuf,
}

#[derive(Debug, Deserialize)]
struct Ready {
    name: String,
    address: u64,
    length: u64,
}

/// One piece: offset in the process's buffer, address at the other side, bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) local: u64,
    pub(crate) remote: u64,
    pub(crate) len: u64,
}

impl Stock {
    /// Starts one; none, and a line that says why, where the wheel is not installed.
    pub(crate) fn start(bytes: u64, environment: &[(&str, &str)]) -> Option<Self> {
        static MISSING: OnceLock<Option<String>> = OnceLock::new();
        if let Some(reason) = MISSING.get_or_init(missing) {
            kvferry_device::conformance::skip("mooncake", reason);
            return None;
        }
        let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/mooncake/peer.py");
        let mut process = python()
            .arg(script)
            .arg(bytes.to_string())
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python starts");
        let input = process.stdin.take();
        let mut output = BufReader::new(process.stdout.take().expect("piped"));
        let ready = serde_json::from_value(line(&mut output)).expect("a first line");
        let file = std::env::temp_dir().join(format!("kvferry-{}", process.id()));
        Some(Self { process, input, output, ready, file })
    }

    /// What peers open.
    pub(crate) fn name(&self) -> &str {
        &self.ready.name
    }

    /// First byte of its buffer.
    pub(crate) fn addr(&self) -> u64 {
        self.ready.address
    }

    pub(crate) fn len(&self) -> u64 {
        self.ready.length
    }

    pub(crate) fn get(&mut self, offset: u64, len: u64) -> Vec<u8> {
        let order = json!({"do": "get", "offset": offset, "len": len, "file": self.file});
        self.ask(&order);
        std::fs::read(&self.file).expect("a file")
    }

    pub(crate) fn put(&mut self, offset: u64, bytes: &[u8]) {
        std::fs::write(&self.file, bytes).expect("a file");
        let order = json!({"do": "put", "offset": offset, "file": self.file});
        self.ask(&order);
    }

    /// Moves all pieces, `op` being `write` or `read`. Returns whether Mooncake says that it did.
    pub(crate) fn moves(&mut self, op: &str, peer: &str, pieces: &[Piece]) -> bool {
        self.begin(op, peer, pieces);
        self.answer() == 0
    }

    /// Begins to move them; what comes of it is the next answer.
    pub(crate) fn begin(&mut self, op: &str, peer: &str, pieces: &[Piece]) {
        let list = |of: fn(&Piece) -> u64| pieces.iter().map(of).collect::<Vec<_>>();
        let (local, remote) = (list(|piece| piece.local), list(|piece| piece.remote));
        let len = list(|piece| piece.len);
        self.order(&json!({"do": "move", "op": op, "peer": peer, "local": local, "remote": remote, "len": len}));
    }

    pub(crate) fn ask(&mut self, order: &Value) -> Value {
        self.order(order);
        self.answer()
    }

    fn order(&mut self, order: &Value) {
        let input = self.input.as_mut().expect("open while it lives");
        writeln!(input, "{order}").expect("it reads");
    }

    pub(crate) fn answer(&mut self) -> Value {
        line(&mut self.output)
    }

    /// Stops it as SIGSTOP does.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
    }

    pub(crate) fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let id = Pid::from_child(&self.process);
        rustix::process::kill_process(id, signal).expect("it runs");
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().expect("it runs");
        self.process.wait().expect("it ends");
    }
}

impl Drop for Stock {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_file(&self.file);
    }
}

fn line(output: &mut BufReader<ChildStdout>) -> Value {
    let mut line = String::new();
    output.read_line(&mut line).expect("it writes");
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error} in {line:?}"))
}

/// Where ci/mooncake.sh installs the wheel, unless the environment says another place.
fn python() -> Command {
    let folder = std::env::var_os("KVFERRY_TEST_MOONCAKE").map(PathBuf::from);
    let folder =
        folder.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/mooncake"));
    let mut command = Command::new("python3");
    command.env("PYTHONPATH", folder).env("MC_LOG_LEVEL", "ERROR");
    command
}

/// Why there is no wheel, if there is none.
fn missing() -> Option<String> {
    let output = python().args(["-c", "import mooncake.engine"]).output();
    match output {
        Ok(output) if output.status.success() => None,
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr);
            let last = text.trim_end().lines().last().unwrap_or("python3 failed").to_owned();
            Some(format!("ci/mooncake.sh installs Mooncake's wheel; now {last}"))
        }
        Err(error) => Some(format!("python3 does not start: {error}")),
    }
}
