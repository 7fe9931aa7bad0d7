//! Stock Mooncake over TCP, for comparison: two processes with its wheel that move the same pieces, in
//! the way that its users call it from Python.
//!
//! The memory of both is filled and checked here, through files without a name. On the host these are
//! the memory itself; a GPU's is copied from and to them.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use clap::ValueEnum;
use kvferry_engine::DeviceName;
use rustix::fs::MemfdFlags;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::Failure;
use crate::bench::percentile;
use crate::case::Direction;
use crate::layout::{Layout, Piece};
use crate::pattern::{Verifier, fill_buffer, guard_fill, source_fill};

/// Other engines that a bench can measure.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum PeerEngine {
    /// Mooncake's wheel, over TCP: its transfer engine, called from Python
    Mooncake,
}

/// The interpreter that has the wheel.
const PYTHON: &str = "KVFERRY_MOONCAKE_PYTHON";
/// A folder that the wheel was installed into, if the interpreter does not find it by itself.
const PATH: &str = "KVFERRY_MOONCAKE_PATH";

const SCRIPT: &str = include_str!("mooncake.py");

/// Mooncake's own limits of lanes, and of transfers that wait for one.
const MOST_LANES: u16 = 16;
const MOST_QUEUED: usize = 65_535;
/// The calls of its users are no longer than this. Shorter ones leave its queues in peace.
const SHORT_CALL: usize = 4096;
/// How long one attempt is timed, unless its transfers are over earlier.
const SECONDS: u64 = 2;
/// An answer that does not come in this time is a failure of Mooncake.
const PATIENCE: Duration = Duration::from_secs(120);

/// How its processes are set; the rest are Mooncake's defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Settings {
    lanes: u16,
    io_threads: u16,
    slice_bytes: u64,
}

impl Settings {
    /// Those that were best in some lab, with as many lanes as ours and with as many as it takes.
    fn to_try(lanes: u16) -> Vec<Self> {
        let settings = |lanes, slice_bytes| Self { lanes, io_threads: lanes, slice_bytes };
        let lanes = lanes.min(MOST_LANES);
        let mut all = vec![settings(lanes, 4 << 20), settings(lanes, 1 << 20)];
        if lanes < MOST_LANES {
            all.push(settings(MOST_LANES, 4 << 20));
        }
        all
    }

    fn environment(self) -> Vec<(&'static str, String)> {
        let most = MOST_QUEUED.to_string();
        vec![
            ("MC_FORCE_TCP", "1".into()),
            ("MC_LOG_LEVEL", "ERROR".into()),
            ("MC_TCP_ENABLE_CONNECTION_POOL", "1".into()),
            ("MC_TCP_LANES_PER_PEER", self.lanes.to_string()),
            ("MC_NUM_TCP_IO_THREADS", self.io_threads.to_string()),
            ("MC_TCP_SLICE_SIZE", self.slice_bytes.to_string()),
            ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", most.clone()),
            ("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", most),
        ]
    }
}

/// One of the ways that were tried. Times are microseconds, rates 10^9 bytes a second.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Attempt {
    #[serde(flatten)]
    settings: Settings,
    pieces_per_call: usize,
    iterations: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    p50_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gbps: Option<f64>,
    /// Why it does not count.
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
}

/// What Mooncake does with a case.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Compared {
    /// Name and version of the package.
    pub(crate) wheel: String,
    /// The best attempt of which every byte was verified; absent if none was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gbps: Option<f64>,
    /// Our rate over it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) over: Option<f64>,
    attempts: Vec<Attempt>,
}

impl Compared {
    fn new(wheel: String, ours: f64, attempts: Vec<Attempt>) -> Self {
        let best = attempts.iter().filter_map(|attempt| attempt.gbps).max_by(f64::total_cmp);
        Self { wheel, gbps: best, over: best.map(|best| ours / best), attempts }
    }

    /// Why there is no rate, if there is none.
    pub(crate) fn failure(&self) -> Option<&str> {
        let mut failures = self.attempts.iter().filter_map(|attempt| attempt.failure.as_deref());
        failures.next().filter(|_| self.gbps.is_none())
    }
}

/// The processes of all settings.
pub(crate) struct Mooncake {
    /// Of the source, and of the destination.
    devices: [DeviceName; 2],
    wheel: String,
    /// A pair that failed is started again when it is needed.
    pairs: Vec<(Settings, Option<[Process; 2]>)>,
}

impl Mooncake {
    /// Looks for the wheel and starts it in all settings, with memory on these devices: the source's
    /// and the destination's.
    pub(crate) fn start(devices: [DeviceName; 2], lanes: u16) -> Result<Self, Failure> {
        if let Some(rocm) = devices.iter().find(|device| matches!(device, DeviceName::Rocm(_))) {
            return Err(format!("--peer mooncake moves host and CUDA memory, not {rocm}").into());
        }
        look_for_wheel()?;
        let mut pairs = Vec::new();
        let mut wheel = String::new();
        for settings in Settings::to_try(lanes) {
            let pair = start_pair(settings, devices)?;
            wheel.clone_from(&pair[0].ready.wheel);
            pairs.push((settings, Some(pair)));
        }
        let on_gpu = devices.iter().any(|device| *device != DeviceName::Host);
        if on_gpu && wheel.contains("non-cuda") {
            let why = "is built without CUDA: install mooncake-transfer-engine-cuda13";
            return Err(format!("--peer mooncake with GPU memory: {wheel} {why}").into());
        }
        Ok(Self { devices, wheel, pairs })
    }

    /// Moves the pieces in every setting. What Mooncake fails at is part of the answer; `ours` is the
    /// rate to compare with.
    pub(crate) fn measure(
        &mut self,
        layout: &Layout,
        direction: Direction,
        iterations: usize,
        seed: u64,
        ours: f64,
    ) -> Result<Compared, Failure> {
        let room = layout.bytes();
        let files = [
            Memory::new(layout.source_bytes.max(room))?,
            Memory::new(layout.destination_bytes.max(room))?,
        ];
        let bytes = layout.source_bytes;
        fill_buffer(bytes, source_fill, seed, |at, part| files[0].0.write_all_at(part, at))?;
        let verifier = Verifier::new(layout);
        let mut guard_seed = seed;
        let mut attempts = Vec::new();
        let pieces = layout.pieces.len();
        let calls = [pieces.min(MOST_QUEUED), SHORT_CALL];
        for (settings, pair) in &mut self.pairs {
            for &pieces_per_call in &calls[..if pieces > SHORT_CALL { 2 } else { 1 }] {
                guard_seed = guard_seed.wrapping_add(1);
                let bytes = layout.destination_bytes;
                fill_buffer(bytes, guard_fill, guard_seed, |at, part| {
                    files[1].0.write_all_at(part, at)
                })?;
                let mut attempt = Attempt {
                    settings: *settings,
                    pieces_per_call,
                    iterations: 0,
                    p50_us: None,
                    gbps: None,
                    failure: None,
                };
                let run = Run { layout, direction, pieces_per_call, iterations };
                let moved = try_once(pair, *settings, self.devices, &files, &run);
                match moved.and_then(|took| {
                    let read = |at, bytes: &mut [u8]| files[1].0.read_exact_at(bytes, at);
                    match verifier.verify(seed, guard_seed, read)? {
                        Ok(_) => Ok(took),
                        Err(mismatch) => Err(format!("wrong bytes: {mismatch}").into()),
                    }
                }) {
                    Ok(took) => {
                        let p50 = percentile(&took, 50).max(1);
                        attempt.iterations = took.len();
                        attempt.p50_us = Some(p50 as f64 / 1e3);
                        attempt.gbps = Some(layout.bytes() as f64 / p50 as f64);
                    }
                    Err(error) => attempt.failure = Some(error.to_string()),
                }
                attempts.push(attempt);
            }
        }
        Ok(Compared::new(self.wheel.clone(), ours, attempts))
    }
}

/// One attempt's transfers.
struct Run<'a> {
    layout: &'a Layout,
    direction: Direction,
    pieces_per_call: usize,
    iterations: usize,
}

/// Nanoseconds of each time. Processes that failed are gone afterwards: what they still do, or hold,
/// nobody knows.
fn try_once(
    pair: &mut Option<[Process; 2]>,
    settings: Settings,
    devices: [DeviceName; 2],
    files: &[Memory; 2],
    run: &Run<'_>,
) -> Result<Vec<u64>, Failure> {
    let mut processes = match pair.take() {
        Some(processes) => processes,
        None => start_pair(settings, devices)?,
    };
    let took = run.by(&mut processes, files)?;
    *pair = Some(processes);
    Ok(took)
}

impl Run<'_> {
    fn by(&self, processes: &mut [Process; 2], files: &[Memory; 2]) -> Result<Vec<u64>, Failure> {
        let mut addresses = [0; 2];
        for ((process, file), address) in processes.iter_mut().zip(files).zip(&mut addresses) {
            let hold = json!({"do": "hold", "file": file.path(), "bytes": file.len()?});
            *address = process.ask(&hold)?.as_u64().ok_or("it has no address")?;
            process.ask(&json!({"do": "load"}))?;
        }
        let [source, destination] = processes;
        let [at_source, at_destination] = addresses;
        let list = |of: fn(&Piece) -> u64| self.layout.pieces.iter().map(of).collect::<Vec<_>>();
        let sources = list(|piece| piece.source);
        let destinations = list(|piece| piece.destination);
        let (mover, peer, address, local, remote) = match self.direction {
            Direction::Write => {
                (&mut *source, &destination.ready.name, at_destination, sources, destinations)
            }
            Direction::Read => {
                (&mut *destination, &source.ready.name, at_source, destinations, sources)
            }
        };
        let order = json!({
            "do": "move",
            "op": self.direction.name(),
            "peer": peer,
            "address": address,
            "local": local,
            "remote": remote,
            "lengths": list(|piece| piece.len),
            "pieces_per_call": self.pieces_per_call,
            "times": self.iterations,
            "seconds": SECONDS,
        });
        let moved: Moved = serde_json::from_value(mover.ask(&order)?)?;
        if let Some(failure) = moved.failure {
            return Err(failure.into());
        }
        destination.ask(&json!({"do": "store"}))?;
        for process in processes {
            process.ask(&json!({"do": "free"}))?;
        }
        Ok(moved.took)
    }
}

#[derive(Debug, Deserialize)]
struct Moved {
    took: Vec<u64>,
    failure: Option<String>,
}

/// Memory that other processes open as a file.
struct Memory(File);

impl Memory {
    fn new(bytes: u64) -> Result<Self, Failure> {
        let file = File::from(rustix::fs::memfd_create("kvferry-bench", MemfdFlags::CLOEXEC)?);
        file.set_len(bytes)?;
        Ok(Self(file))
    }

    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    fn len(&self) -> std::io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }
}

fn python() -> Command {
    let interpreter = std::env::var_os(PYTHON).unwrap_or_else(|| "python3".into());
    let mut command = Command::new(interpreter);
    if let Some(folder) = std::env::var_os(PATH) {
        let folders = std::env::var_os("PYTHONPATH").unwrap_or_default();
        let all = std::iter::once(folder.into()).chain(std::env::split_paths(&folders));
        // A folder with a colon in its name cannot be told to Python in any way.
        command.env("PYTHONPATH", std::env::join_paths(all).unwrap_or_default());
    }
    command
}

fn look_for_wheel() -> Result<(), Failure> {
    let found = python().args(["-c", "import mooncake.engine"]).output();
    let why = match found {
        Ok(output) if output.status.success() => return Ok(()),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            said.trim_end().lines().last().unwrap_or("it ended without a word").to_owned()
        }
        Err(error) => error.to_string(),
    };
    let python = python();
    let python = python.get_program().to_string_lossy();
    Err(format!(
        "--peer mooncake needs Mooncake's wheel, and {python} does not import it ({why}). Install it \
         with `{python} -m pip install mooncake-transfer-engine-non-cuda` for host memory, or \
         mooncake-transfer-engine-cuda13 for GPU memory; it wants the system's libibverbs1, libnuma1 \
         and libcurl4. {PYTHON} names another interpreter, {PATH} a folder that pip installed into \
         with --target"
    )
    .into())
}

fn start_pair(settings: Settings, devices: [DeviceName; 2]) -> Result<[Process; 2], Failure> {
    let [source, destination] = devices;
    Ok([Process::start(settings, source)?, Process::start(settings, destination)?])
}

/// A Mooncake process; dropping it kills it.
struct Process {
    child: Child,
    input: ChildStdin,
    answers: Receiver<std::io::Result<String>>,
    ready: Ready,
}

#[derive(Debug, Deserialize)]
struct Ready {
    name: String,
    wheel: String,
}

impl Process {
    fn start(settings: Settings, device: DeviceName) -> Result<Self, Failure> {
        let device = match device {
            DeviceName::Cuda(ordinal) => ordinal.to_string(),
            other => other.to_string(),
        };
        let mut child = python()
            .args(["-c", SCRIPT, &device])
            .envs(settings.environment())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("a Mooncake process has no pipes".into());
        };
        // A thread of its own, so that an answer can be waited for with a deadline.
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            let mut lines = BufReader::new(output).lines();
            lines.try_for_each(|line| sender.send(line))
        });
        let ready = Ready { name: String::new(), wheel: String::new() };
        let mut process = Self { child, input, answers, ready };
        process.ready = serde_json::from_str(&process.line()?)?;
        Ok(process)
    }

    fn ask(&mut self, order: &Value) -> Result<Value, Failure> {
        // A process that ended says so where its answer is missed.
        let _ = writeln!(self.input, "{order}");
        let mut answer: Value = serde_json::from_str(&self.line()?)?;
        match answer.get("error") {
            Some(error) => Err(error.as_str().unwrap_or("it failed").into()),
            None => Ok(answer["done"].take()),
        }
    }

    fn line(&mut self) -> Result<String, Failure> {
        match self.answers.recv_timeout(PATIENCE) {
            Ok(line) => Ok(line?),
            Err(RecvTimeoutError::Timeout) => {
                Err(format!("it did not answer in {} s", PATIENCE.as_secs()).into())
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err(format!("its process ended: {}", self.child.wait()?).into())
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_stay_within_what_mooncake_takes() {
        for lanes in [1, 8, 16, 64] {
            let all = Settings::to_try(lanes);
            assert!(all.iter().all(|settings| settings.lanes <= 16), "{all:?}");
            assert!(all.iter().all(|settings| settings.lanes >= lanes.min(16)), "{all:?}");
            assert_eq!(all[0].lanes, lanes.min(16), "the same as ours come first");
        }
        assert_eq!(Settings::to_try(64).len(), 2, "none is tried twice");
    }

    #[test]
    fn the_best_attempt_that_did_not_fail_is_compared_with() {
        let attempt = |gbps: Option<f64>| Attempt {
            settings: Settings { lanes: 1, io_threads: 1, slice_bytes: 1 },
            pieces_per_call: 1,
            iterations: 1,
            p50_us: gbps.map(|_| 1.0),
            gbps,
            failure: gbps.is_none().then(|| "call 1 of 1 returned -1".into()),
        };
        let compared = |rates: &[Option<f64>]| {
            let attempts = rates.iter().map(|&gbps| attempt(gbps)).collect();
            Compared::new("wheel 1".into(), 6.0, attempts)
        };
        let some = compared(&[Some(0.5), None, Some(2.0), Some(1.0)]);
        assert_eq!((some.gbps, some.over, some.failure()), (Some(2.0), Some(3.0), None));
        let none = compared(&[None]);
        let why = Some("call 1 of 1 returned -1");
        assert_eq!((none.gbps, none.over, none.failure()), (None, None, why));
    }
}
