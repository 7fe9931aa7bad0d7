//! A [`Side`] in a process of its own: this test binary, run again to be its test `peer_process`
//! alone. Orders go to its standard input as JSON lines, one answer each comes back; it ends with
//! its input, or when it is told or killed.

mod image;
mod side;

use std::io::{BufRead, Read, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde::{Deserialize, Serialize};

pub(crate) use image::{Image, Layout, Piece, pattern};
pub(crate) use side::{Answer, Failure, Kind, Move, Obey, Order, PATIENCE, Side, Usage, config};

/// How it is told what to be.
const PEER: &str = "KVFERRY_TEST_PEER_PROCESS";
/// Before each answer, because the test harness writes to the same output.
const MARK: &str = "kvferry-peer ";

#[derive(Debug, Deserialize, Serialize)]
struct Start {
    kind: Kind,
    listen: Option<SocketAddr>,
}

/// The other process's whole life; in the process of the cases, nothing.
pub(crate) fn serve() {
    let Ok(start) = std::env::var(PEER) else { return };
    let Start { kind, listen } = serde_json::from_str(&start).expect("written by start_on");
    let answer = |answer: &Answer| {
        // The harness left its line open.
        println!("\n{MARK}{}", serde_json::to_string(answer).expect("plain data"));
    };
    let mut side = match Side::start(kind, listen) {
        Ok(side) => side,
        Err(error) => return answer(&Answer::Failed(error.to_string())),
    };
    answer(&Answer::Ready { name: side.node.name().to_owned() });
    for line in std::io::stdin().lock().lines() {
        let order = serde_json::from_str(&line.expect("a line")).expect("written by send");
        answer(&side.ask(order));
    }
}

/// The other process. It is killed when this is dropped.
pub(crate) struct PeerProcess {
    process: Child,
    output: std::process::ChildStdout,
    /// Read and not yet used.
    pending: Vec<u8>,
    /// What the other side opens.
    pub(crate) name: String,
}

impl PeerProcess {
    pub(crate) fn start(kind: Kind) -> Self {
        Self::start_on(kind, None).expect("a peer process")
    }

    /// With its node on that address.
    ///
    /// # Errors
    /// Why its side did not start.
    pub(crate) fn start_on(kind: Kind, listen: Option<SocketAddr>) -> Result<Self, Failure> {
        let start = serde_json::to_string(&Start { kind, listen })?;
        let mut process = Command::new(std::env::current_exe()?)
            .args(["--exact", "peer_process", "--nocapture"])
            .env(PEER, start)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = process.stdout.take().expect("piped above");
        let mut peer = Self { process, output, pending: Vec::new(), name: String::new() };
        match peer.receive() {
            Answer::Ready { name } => peer.name = name,
            other => return Err(format!("{other:?}").into()),
        }
        Ok(peer)
    }

    /// The number of the process.
    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Orders without waiting; [`PeerProcess::receive`] gets the answer.
    pub(crate) fn send(&mut self, order: &Order) {
        let input = self.process.stdin.as_mut().expect("open until `end`");
        let line = serde_json::to_string(order).expect("plain data") + "\n";
        input.write_all(line.as_bytes()).expect("the peer process takes orders");
    }

    pub(crate) fn receive(&mut self) -> Answer {
        let answer = self.answer().expect("the peer process ended before it answered");
        serde_json::from_str(&answer).expect("written by serve")
    }

    /// Lets it end in order, and waits for that.
    pub(crate) fn end(&mut self) {
        drop(self.process.stdin.take());
        self.ended();
    }

    /// Kills it wherever it is, and does not wait for its end.
    pub(crate) fn kill(&mut self) {
        self.process.kill().expect("it is ours, and nobody waited for it");
    }

    /// Sends it a signal, and waits until it has stopped, if that is what the signal does.
    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.process);
        kill_process(pid, signal).expect("it is ours, and nobody waited for it");
        if signal == Signal::STOP {
            let stopped = waitpid(Some(pid), WaitOptions::UNTRACED).expect("it is ours");
            assert!(stopped.is_some_and(|(_, status)| status.stopped()), "{stopped:?}");
        }
    }

    /// Tells it to end without an answer.
    pub(crate) fn end_at_once(&mut self, code: Option<i32>) {
        self.send(&Order::End { code });
        self.ended();
    }

    fn ended(&mut self) {
        let process = &mut self.process;
        eventually("the peer process ends", || process.try_wait().expect("ours").is_some());
    }

    /// The next answer; `None` at the end of its output.
    fn answer(&mut self) -> Option<String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            while let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.pending.drain(..=end).collect();
                let line = String::from_utf8(line).expect("text");
                if let Some(answer) = line.trim_end().strip_prefix(MARK) {
                    return Some(answer.to_owned());
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: 0 };
            let mut fds = [PollFd::new(&self.output, PollFlags::IN)];
            let ready = poll(&mut fds, Some(&timeout)).expect("polls");
            assert!(ready > 0, "the peer process did not answer in {PATIENCE:?}");
            let mut bytes = [0; 4096];
            match self.output.read(&mut bytes).expect("reads") {
                0 => return None,
                count => self.pending.extend_from_slice(&bytes[..count]),
            }
        }
    }
}

impl Obey for PeerProcess {
    fn ask(&mut self, order: Order) -> Answer {
        self.send(&order);
        self.receive()
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        // It may have ended before.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Polls until it holds.
pub(crate) fn eventually(what: &str, holds: impl FnMut() -> bool) {
    within(PATIENCE, what, holds);
}

/// Polls until it holds, for at most that long.
pub(crate) fn within(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
