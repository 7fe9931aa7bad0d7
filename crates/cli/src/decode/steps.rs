//! The decoder whose steps are timed: in this process, or a program that prints them.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvferry_engine::device::DeviceInfo;
use kvferry_engine::device::load::{Load, LoadKind, Loads, Progress};
use kvferry_engine::{DeviceName, Engine};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::Failure;

/// A step that ended.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct Step {
    /// When, by the system's monotonic clock, which all processes share; in nanoseconds.
    pub(super) end_ns: u64,
    /// How long it took.
    pub(super) step_ns: u64,
}

/// A line that a program prints: what its steps do, first; then each step.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(untagged)]
pub(super) enum Line {
    About { about: String },
    Step(Step),
}

/// Nanoseconds of the system's monotonic clock.
pub(super) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The steps of a reading. They follow each other, so each ended when the next began.
pub(super) fn steps_of(progress: &Progress) -> Vec<Step> {
    let mut end_ns = now_ns().saturating_sub(progress.at.elapsed().as_nanos() as u64);
    let mut steps: Vec<_> = (progress.durations.iter().rev())
        .map(|duration| {
            let step = Step { end_ns, step_ns: duration.as_nanos() as u64 };
            end_ns = end_ns.saturating_sub(step.step_ns);
            step
        })
        .collect();
    steps.reverse();
    steps
}

/// A decoder that runs until it is dropped.
pub(super) struct Decoder {
    about: String,
    source: Source,
    /// When the window began.
    began_ns: Mutex<u64>,
}

enum Source {
    Here { load: Load, fed: Fed },
    Program(Program),
}

/// The engine that is told of each step as it ends.
type Fed = Arc<Mutex<Option<Arc<Engine>>>>;

/// A program that prints no step in this time does not decode: loading a model takes a minute.
const START_TIMEOUT: Duration = Duration::from_secs(180);
/// A step that ends later than this after a window ended is not waited for.
const LATE: Duration = Duration::from_secs(2);

impl Decoder {
    /// The decode load on a thread of this process.
    pub(super) fn here(device: &DeviceInfo) -> Result<Self, Failure> {
        let fed = Fed::default();
        let told = Arc::clone(&fed);
        let tell = move |took| {
            if let Some(engine) = &*lock(&told) {
                // The GPU is the first device of every engine of this bench.
                engine.record_step(0, took);
            }
        };
        let load = Loads::open(device)?.start_told(LoadKind::Decode, Box::new(tell))?;
        let about = load.about().to_owned();
        Ok(Self { about, source: Source::Here { load, fed }, began_ns: Mutex::default() })
    }

    /// A program of the user's, or kvferry's own decode load in another process.
    pub(super) fn program(command: Option<&str>, device: DeviceName) -> Result<Self, Failure> {
        let program = Program::start(command, device)?;
        let about = program.wait_for_a_step()?;
        Ok(Self { about, source: Source::Program(program), began_ns: Mutex::default() })
    }

    /// What a step does.
    pub(super) fn about(&self) -> &str {
        &self.about
    }

    /// Tells an engine of each step from now on, or nobody; whether it is told. An engine cannot be
    /// told by a decoder of another process.
    pub(super) fn feed(&self, engine: Option<Arc<Engine>>) -> bool {
        match &self.source {
            Source::Here { fed, .. } => {
                let told = engine.is_some();
                *lock(fed) = engine;
                told
            }
            Source::Program(_) => false,
        }
    }

    /// Begins a window: only steps that begin from now on count.
    pub(super) fn restart(&self) -> Result<(), Failure> {
        match &self.source {
            Source::Here { load, .. } => drop(load.read()?),
            Source::Program(program) => program.forget()?,
        }
        *lock(&self.began_ns) = now_ns();
        Ok(())
    }

    /// Ends the window: nanoseconds of each step that lay in it.
    pub(super) fn steps(&self) -> Result<Vec<u64>, Failure> {
        let ended_ns = now_ns();
        let steps = match &self.source {
            Source::Here { load, .. } => steps_of(&load.read()?),
            Source::Program(program) => program.until(ended_ns)?,
        };
        let began_ns = *lock(&self.began_ns);
        Ok(within(&steps, began_ns, ended_ns))
    }
}

/// Nanoseconds of the steps that began and ended in a window.
fn within(steps: &[Step], began_ns: u64, ended_ns: u64) -> Vec<u64> {
    let lies = |step: &&Step| {
        step.end_ns <= ended_ns && step.end_ns.saturating_sub(step.step_ns) >= began_ns
    };
    steps.iter().filter(lies).map(|step| step.step_ns).collect()
}

/// A child process and what it has printed.
struct Program {
    command: String,
    child: Child,
    printed: Arc<(Mutex<Printed>, Condvar)>,
}

#[derive(Default)]
struct Printed {
    about: Option<String>,
    steps: Vec<Step>,
    /// Why there will be no more.
    ended: Option<String>,
}

impl Program {
    fn start(command: Option<&str>, device: DeviceName) -> Result<Self, Failure> {
        let mut process = match command {
            // So that ending the shell ends what it runs.
            Some(command) => {
                let mut shell = std::process::Command::new("sh");
                shell.args(["-c", &format!("exec {command}")]);
                shell
            }
            None => {
                let mut own = std::process::Command::new(std::env::current_exe()?);
                own.args(["decoder", "--device", &device.to_string()]);
                own
            }
        };
        let mut child = process.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let output = child.stdout.take().ok_or("a decoder has no pipe")?;
        let printed = Arc::new((Mutex::new(Printed::default()), Condvar::new()));
        let shared = Arc::clone(&printed);
        let read = move || {
            let ended = Self::read(BufReader::new(output), &shared);
            lock(&shared.0).ended = Some(ended);
            shared.1.notify_all();
        };
        std::thread::Builder::new().name("kvferry-steps".into()).spawn(read)?;
        let command = command.unwrap_or("kvferry decoder").to_owned();
        Ok(Self { command, child, printed })
    }

    /// Reads lines until there are no more; returns why.
    fn read(output: impl BufRead, shared: &(Mutex<Printed>, Condvar)) -> String {
        for line in output.lines() {
            let line = match line {
                Ok(line) => line,
                Err(error) => return error.to_string(),
            };
            match serde_json::from_str(&line) {
                Ok(Line::About { about }) => lock(&shared.0).about = Some(about),
                Ok(Line::Step(step)) => lock(&shared.0).steps.push(step),
                Err(_) => return format!("it printed {line:?}, which is no step"),
            }
            shared.1.notify_all();
        }
        "it ended".to_owned()
    }

    /// What its steps do, once there is one.
    fn wait_for_a_step(&self) -> Result<String, Failure> {
        let printed = self.wait(START_TIMEOUT, |printed| !printed.steps.is_empty())?;
        if printed.steps.is_empty() {
            let waited = START_TIMEOUT.as_secs();
            return Err(format!("{}: no step in {waited} s", self.command).into());
        }
        Ok(printed.about.clone().unwrap_or_else(|| self.command.clone()))
    }

    fn forget(&self) -> Result<(), Failure> {
        self.wait(Duration::ZERO, |_| true)?.steps.clear();
        Ok(())
    }

    /// The steps since the last call of `forget`, those until this time for sure.
    fn until(&self, end_ns: u64) -> Result<Vec<Step>, Failure> {
        let there =
            |printed: &Printed| printed.steps.last().is_some_and(|last| last.end_ns >= end_ns);
        Ok(std::mem::take(&mut self.wait(LATE, there)?.steps))
    }

    /// Waits, at most so long, until it has printed what is wanted.
    fn wait(
        &self,
        most: Duration,
        there: impl Fn(&Printed) -> bool,
    ) -> Result<MutexGuard<'_, Printed>, Failure> {
        let (printed, changed) = &*self.printed;
        let start = Instant::now();
        let mut printed = lock(printed);
        while !there(&printed) && printed.ended.is_none() && start.elapsed() < most {
            let left = most.saturating_sub(start.elapsed());
            printed = changed.wait_timeout(printed, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        match &printed.ended {
            Some(why) => Err(format!("the decoder {:?} is gone: {why}", self.command).into()),
            None => Ok(printed),
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Nothing of it is kept; after a failure it is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_steps_that_began_and_ended_in_the_window_count() {
        let step = |end_ns, step_ns| Step { end_ns, step_ns };
        let steps = [step(105, 10), step(110, 5), step(150, 40), step(205, 55)];
        assert_eq!(within(&steps, 100, 200), [5, 40]);
    }

    #[test]
    fn the_steps_of_a_reading_follow_each_other_up_to_its_end() {
        let durations = [10, 20, 30].map(Duration::from_micros).to_vec();
        let progress = Progress { steps: 3, at: Instant::now(), durations };
        let steps = steps_of(&progress);
        assert_eq!(
            steps.iter().map(|step| step.step_ns).collect::<Vec<_>>(),
            [10_000, 20_000, 30_000]
        );
        assert_eq!(steps[2].end_ns - steps[1].end_ns, 30_000);
        assert_eq!(steps[1].end_ns - steps[0].end_ns, 20_000);
        assert!(steps[2].end_ns <= now_ns());
    }

    #[test]
    fn a_program_is_read_line_by_line_and_its_end_or_its_nonsense_is_an_error() {
        let says = |lines: &str| format!("printf '{lines}'");
        let steps =
            r#"{"about": "tiny"}\n{"end_ns": 5, "step_ns": 2}\n{"end_ns": 9, "step_ns": 4}\n"#;
        let script = format!("sh -c \"{}; sleep 60\"", says(steps).replace('"', "\\\""));
        let program = Program::start(Some(&script), DeviceName::Host).expect("sh is there");
        assert_eq!(program.wait_for_a_step().expect("it prints"), "tiny");
        assert_eq!(program.until(9).expect("it runs").len(), 2);
        for (script, why) in [("true", "it ended"), ("echo hello", "no step")] {
            let program = Program::start(Some(script), DeviceName::Host).expect("sh is there");
            let error = program.wait_for_a_step().expect_err("no decoder").to_string();
            assert!(error.contains(why), "{script}: {error}");
        }
    }
}
