//! A worker process as the one that started it sees it: asked, answered, ended.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use kvferry_engine::DeviceName;

use crate::Failure;
use crate::case::Work;
use crate::transfer::Ran;
use crate::worker::{Answer, Command, Ready, Side};

/// One of the two processes.
pub(crate) struct Worker {
    role: &'static str,
    child: Child,
    /// Taken when the worker is told to end.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    pub(crate) ready: Ready,
}

impl Worker {
    pub(crate) fn start(role: &'static str, device: DeviceName) -> Result<Self, Failure> {
        Self::start_with(role, device, &[])
    }

    /// As [`Self::start`], with these environment variables in place of those of this process.
    pub(crate) fn start_with(
        role: &'static str,
        device: DeviceName,
        knobs: &[(&str, &str)],
    ) -> Result<Self, Failure> {
        Self::start_behind(role, device, knobs, None)
    }

    /// As [`Self::start_with`]; peers are told this port for the batch protocol, where something has
    /// to forward to the worker's own.
    pub(crate) fn start_behind(
        role: &'static str,
        device: DeviceName,
        knobs: &[(&str, &str)],
        batch_port: Option<u16>,
    ) -> Result<Self, Failure> {
        let batch_port = batch_port.map(|port| ["--batch-port".to_owned(), port.to_string()]);
        let mut child = std::process::Command::new(std::env::current_exe()?)
            .args(["worker", "--device", &device.to_string()])
            .args(batch_port.iter().flatten())
            .envs(knobs.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("a worker has no pipes".into());
        };
        let mut output = BufReader::new(output);
        let mut line = String::new();
        output.read_line(&mut line)?;
        if line.is_empty() {
            return Err(
                format!("the {role} process ended before it was ready: {}", child.wait()?).into()
            );
        }
        Ok(Self { role, child, input: Some(input), output, ready: serde_json::from_str(&line)? })
    }

    pub(crate) fn ask(&mut self, command: &Command) -> Result<Answer, Failure> {
        let mut line = serde_json::to_string(command)?;
        line.push('\n');
        let sent = match &mut self.input {
            Some(input) => input.write_all(line.as_bytes()),
            None => return Err(format!("the {} process was told to end", self.role).into()),
        };
        let mut answer = String::new();
        if sent.is_ok() {
            self.output.read_line(&mut answer)?;
        }
        if answer.is_empty() {
            return Err(format!("the {} process ended: {}", self.role, self.child.wait()?).into());
        }
        match serde_json::from_str(&answer)? {
            Answer::Failed(error) => Err(format!("{} process: {error}", self.role).into()),
            answer => Ok(answer),
        }
    }

    pub(crate) fn open(&mut self, other: &Self) -> Result<(), Failure> {
        self.ask(&Command::Open { name: other.ready.name.clone() }).map(|_| ())
    }

    /// Address of the buffer, pieces, bytes.
    pub(crate) fn prepare(
        &mut self,
        work: &Work,
        side: Side,
        seed: u64,
    ) -> Result<(u64, u64, u64), Failure> {
        self.prepare_anew(work, side, seed, false)
    }

    /// As [`Self::prepare`]; a `fresh` buffer is freed and allocated again.
    pub(crate) fn prepare_anew(
        &mut self,
        work: &Work,
        side: Side,
        seed: u64,
        fresh: bool,
    ) -> Result<(u64, u64, u64), Failure> {
        match self.ask(&Command::Prepare { work: work.clone(), side, seed, fresh })? {
            Answer::Prepared { addr, descriptors, bytes } => Ok((addr, descriptors, bytes)),
            other => Err(self.unexpected(&other)),
        }
    }

    pub(super) fn run(&mut self, command: &Command) -> Result<Ran, Failure> {
        match self.ask(command)? {
            Answer::Ran(ran) => Ok(ran),
            other => Err(self.unexpected(&other)),
        }
    }

    pub(crate) fn verify(
        &mut self,
        label: &str,
        source_seed: u64,
        guard_seed: u64,
    ) -> Result<(), Failure> {
        self.verify_without(label, source_seed, guard_seed, Vec::new())
    }

    /// As [`Self::verify`], without the pieces that begin in these runs of bytes: start, length.
    pub(crate) fn verify_without(
        &mut self,
        label: &str,
        source_seed: u64,
        guard_seed: u64,
        undefined: Vec<(u64, u64)>,
    ) -> Result<(), Failure> {
        match self.ask(&Command::Verify { source_seed, guard_seed, undefined })? {
            Answer::Verified { .. } => Ok(()),
            Answer::Mismatch(what) => Err(format!("WRONG BYTES in {label}: {what}").into()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Registered, peak resident, private resident and pinned bytes.
    pub(super) fn usage(&mut self) -> Result<(u64, u64, u64, u64), Failure> {
        match self.ask(&Command::Usage)? {
            Answer::Usage { registered, peak, peak_private, pinned } => {
                Ok((registered, peak, peak_private, pinned))
            }
            other => Err(self.unexpected(&other)),
        }
    }

    pub(crate) fn unexpected(&self, answer: &Answer) -> Failure {
        format!("the {} process answered {answer:?}", self.role).into()
    }

    /// Closes its input, which ends it, and waits.
    pub(crate) fn end(mut self) -> Result<(), Failure> {
        self.input = None;
        let status = self.child.wait()?;
        if status.success() {
            Ok(())
        } else {
            Err(format!("the {} process ended with {status}", self.role).into())
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // After `end` it is gone already; after a failure nobody waits for its work.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
