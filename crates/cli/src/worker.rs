//! One of the two processes of a bench. Commands come as JSON lines on standard input, one answer
//! each goes to standard output; the process ends with its input.

use std::io::{BufRead, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use kvferry_engine::device::load::{Load, Loads};
use kvferry_engine::device::{Device, Vendor};
use kvferry_engine::{
    Buffer, Config, Copies, DeviceName, Engine, Range, Target, measure, open_device,
};
use kvferry_node::{Node, NodeOptions, Peer};
use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::case::{Direction, Work};
use crate::forms::{Ends, Form, Request};
use crate::interference::{LoadName, Pace, WindowRan, window};
use crate::layout::Layout;
use crate::pattern::{Verifier, fill_buffer, guard_fill, source_fill};
use crate::soak::{self, Health, Soaked};
use crate::sockets;
use crate::transfer::{Mover, Ran, Times, memory, nanoseconds, op};

/// How long a step of a load may take.
const LOAD_PATIENCE: Duration = Duration::from_secs(60);

#[derive(Args, Debug)]
pub(crate) struct Options {
    #[arg(long)]
    device: DeviceName,
    /// The port that peers are told for the batch protocol
    #[arg(long)]
    batch_port: Option<u16>,
}

/// What the bench asks of a worker.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) enum Command {
    /// Open the other worker's node.
    Open { name: String },
    /// Lay out the work, and make this side's buffer large enough for it; a `fresh` one is freed and
    /// allocated again.
    Prepare { work: Work, side: Side, seed: u64, fresh: bool },
    /// Fill the source with its pattern, or the destination with guard bytes.
    Fill { side: Side, seed: u64 },
    /// Move the prepared work. `peer` is the address of the other side's buffer.
    Run { direction: Direction, peer: u64, times: usize, in_flight: usize, what: What },
    /// Move the prepared work once, in shares of several forms and from several threads.
    Soak { direction: Direction, peer: u64, threads: usize, seed: u64 },
    /// Compare every byte of the destination with what it must be.
    /// Leaves out pieces that begin in one of the `undefined` runs of bytes: start, length.
    Verify { source_seed: u64, guard_seed: u64, undefined: Vec<(u64, u64)> },
    /// Start a compute load on the worker's device; `timing` reads how long each step takes.
    StartLoad { load: LoadName, timing: bool },
    /// End the load and wait for it.
    StopLoad,
    /// Move the prepared work at a pace for a while, and read the load before and after.
    Window { direction: Direction, peer: u64, pace: Pace, milliseconds: u64 },
    /// Receive on that many bare sockets.
    Receive { lanes: usize },
    /// Send to bare sockets of the other side.
    Send { port: u16, lanes: usize, bytes: u64, times: usize },
    /// Report memory use.
    Usage,
    /// Free the buffer and forget the work.
    Free,
    /// Report what a leak would show in.
    Health,
    /// Let go of the other worker, so that its end is no loss.
    Close,
}

/// Which end of the transfer a worker holds.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) enum Side {
    Source,
    Destination,
}

/// What a run moves, and through what.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) enum What {
    /// The pieces in a form, through the public API.
    Pieces(Form),
    /// As many bytes in one range, through the public API: the ceiling.
    Contiguous,
    /// The pieces, as one bare kernel launch of packed descriptors.
    BareLaunch,
}

#[derive(Debug, Deserialize, Serialize)]
pub(crate) enum Answer {
    Opened,
    Closed,
    Prepared {
        addr: u64,
        descriptors: u64,
        bytes: u64,
    },
    Filled,
    Receives {
        port: u16,
    },
    Ran(Ran),
    Soaked(Soaked),
    LoadStarted {
        /// What a step of it does.
        about: String,
    },
    LoadStopped,
    Window(WindowRan),
    Verified {
        bytes: u64,
    },
    Mismatch(String),
    Usage {
        registered: u64,
        peak: u64,
        peak_private: u64,
        pinned: u64,
    },
    Freed,
    Health(Health),
    Failed(String),
}

/// The first line a worker writes.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Ready {
    /// What the other worker opens.
    pub(crate) name: String,
    pub(crate) device: String,
    pub(crate) device_name: String,
    pub(crate) kernel: String,
    /// Where it listens for the batch protocol.
    pub(crate) batch: Option<SocketAddr>,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let config = Config::from_env()?;
    let device = open_device(options.device, &config)?;
    let engine = Engine::new(config, vec![Arc::clone(&device)])?;
    let node_options = NodeOptions { batch_port: options.batch_port, ..NodeOptions::default() };
    let node = Node::start(Arc::clone(&engine), &node_options)?;
    let info = device.info();
    let ready = Ready {
        name: node.name().to_owned(),
        device: info.to_string(),
        device_name: info.name.clone(),
        kernel: info.kernel.clone(),
        batch: node.batch_address(),
    };
    let mut worker = Worker {
        engine,
        node,
        device,
        peer: None,
        work: None,
        registered: 0,
        loads: None,
        load: None,
    };
    let mut output = std::io::stdout().lock();
    let mut answer = |line: String| -> Result<(), Failure> {
        output.write_all(line.as_bytes())?;
        output.write_all(b"\n")?;
        Ok(output.flush()?)
    };
    answer(serde_json::to_string(&ready)?)?;
    for line in std::io::stdin().lock().lines() {
        let command = serde_json::from_str(&line?)?;
        let done = worker.obey(command).unwrap_or_else(|error| Answer::Failed(error.to_string()));
        answer(serde_json::to_string(&done)?)?;
    }
    Ok(())
}

struct Worker {
    engine: Arc<Engine>,
    node: Arc<Node>,
    device: Arc<dyn Device>,
    peer: Option<Peer>,
    work: Option<Prepared>,
    /// The most bytes that were registered at once.
    registered: u64,
    /// Compiled when the first load is started.
    loads: Option<Loads>,
    load: Option<Load>,
}

struct Prepared {
    layout: Layout,
    buffer: Buffer,
}

impl Worker {
    fn obey(&mut self, command: Command) -> Result<Answer, Failure> {
        match command {
            Command::Open { name } => {
                self.peer = Some(self.node.open(&name)?);
                Ok(Answer::Opened)
            }
            Command::Prepare { work, side, seed, fresh } => self.prepare(&work, side, seed, fresh),
            Command::Fill { side, seed } => self.fill(side, seed),
            Command::Run { direction, peer, times, in_flight, what } => {
                self.run(direction, peer, times, in_flight, what)
            }
            Command::Soak { direction, peer, threads, seed } => {
                self.soak(direction, peer, threads, seed)
            }
            Command::StartLoad { load, timing } => self.start_load(load, timing),
            Command::StopLoad => {
                self.load = None;
                Ok(Answer::LoadStopped)
            }
            Command::Window { direction, peer, pace, milliseconds } => {
                self.window(direction, peer, pace, Duration::from_millis(milliseconds))
            }
            Command::Verify { source_seed, guard_seed, undefined } => {
                self.verify(source_seed, guard_seed, &undefined)
            }
            Command::Receive { lanes } => Ok(Answer::Receives { port: sockets::receive(lanes)? }),
            Command::Send { port, lanes, bytes, times } => {
                let whole = sockets::send(port, lanes, bytes, times)?;
                Ok(Answer::Ran(Ran { whole, ..Ran::default() }))
            }
            Command::Close => {
                self.peer = None;
                Ok(Answer::Closed)
            }
            Command::Usage => {
                let (peak, peak_private) = memory()?;
                let pinned = self.engine.pinned_bytes();
                Ok(Answer::Usage { registered: self.registered, peak, peak_private, pinned })
            }
            Command::Free => {
                self.work = None;
                Ok(Answer::Freed)
            }
            Command::Health => Health::of(self.target()?).map(Answer::Health),
        }
    }

    fn prepare(
        &mut self,
        work: &Work,
        side: Side,
        seed: u64,
        fresh: bool,
    ) -> Result<Answer, Failure> {
        if fresh {
            self.work = None;
        }
        let layout = work.layout(seed)?;
        let bytes = layout.bytes();
        // Room for the contiguous copy of as many bytes, too.
        let room = match side {
            Side::Source => layout.source_bytes.max(bytes),
            Side::Destination => layout.destination_bytes.max(bytes),
        };
        let kept = self.work.take().map(|old| old.buffer).filter(|buffer| buffer.len() >= room);
        let buffer = match kept {
            Some(buffer) => buffer,
            None => self.engine.allocate(&self.device, room)?,
        };
        self.registered = self.registered.max(buffer.len());
        let addr = buffer.addr();
        let descriptors = layout.pieces.len() as u64;
        self.work = Some(Prepared { layout, buffer });
        Ok(Answer::Prepared { addr, descriptors, bytes })
    }

    fn fill(&mut self, side: Side, seed: u64) -> Result<Answer, Failure> {
        let Prepared { layout, buffer } = self.prepared()?;
        let bytes = match side {
            Side::Source => layout.source_bytes,
            Side::Destination => layout.destination_bytes,
        };
        let fill = match side {
            Side::Source => source_fill,
            Side::Destination => guard_fill,
        };
        fill_buffer(bytes, fill, seed, |offset, part| buffer.write(offset, part))?;
        Ok(Answer::Filled)
    }

    fn run(
        &mut self,
        direction: Direction,
        peer: u64,
        times: usize,
        in_flight: usize,
        what: What,
    ) -> Result<Answer, Failure> {
        let Prepared { layout, buffer } = self.prepared()?;
        let target = self.target()?;
        let ends = Ends { local: buffer.addr(), remote: peer, direction };
        let form = match what {
            What::Contiguous => {
                let all = [Range { local: ends.local, remote: peer, len: layout.bytes() }];
                let mover = self.mover(target, direction, (&all).into(), in_flight);
                return mover.run(times).map(Answer::Ran);
            }
            What::BareLaunch => Form::Ranges,
            What::Pieces(form) => form,
        };
        let request = Request::new(layout, form, ends)?;
        if let (What::BareLaunch, Request::Ranges(ranges)) = (what, &request) {
            let whole = measure::bare_launches(&self.engine, target, op(direction), ranges, times)?;
            let whole = whole.unwrap_or_default().iter().map(nanoseconds).collect();
            return Ok(Answer::Ran(Ran { whole, ..Ran::default() }));
        }
        self.mover(target, direction, request.copies(), in_flight).run(times).map(Answer::Ran)
    }

    fn mover<'a>(
        &'a self,
        target: &'a Target,
        direction: Direction,
        copies: Copies<'a>,
        in_flight: usize,
    ) -> Mover<'a> {
        // Over TCP the processor moves the bytes, too, between memory and sockets.
        let over_tcp = self.engine.config().force_tcp;
        let yields = over_tcp || self.device.info().vendor == Vendor::Host;
        Mover { engine: &self.engine, target, direction, copies, in_flight, yields }
    }

    /// The other worker, with the memory that it has registered now.
    fn target(&self) -> Result<&Target, Failure> {
        let opened = self.peer.as_ref().ok_or("no peer was opened")?;
        opened.refresh()?;
        Ok(opened.target())
    }

    fn soak(
        &mut self,
        direction: Direction,
        peer: u64,
        threads: usize,
        seed: u64,
    ) -> Result<Answer, Failure> {
        let Prepared { layout, buffer } = self.prepared()?;
        let ends = Ends { local: buffer.addr(), remote: peer, direction };
        let target = self.target()?;
        soak::move_in_shares(&self.engine, target, layout, ends, threads, seed).map(Answer::Soaked)
    }

    fn start_load(&mut self, load: LoadName, timing: bool) -> Result<Answer, Failure> {
        // One at a time.
        self.load = None;
        let loads = match &mut self.loads {
            Some(loads) => loads,
            none => none.insert(Loads::open(self.device.info())?),
        };
        let load = self.load.insert(loads.start(load.kind(), timing)?);
        Ok(Answer::LoadStarted { about: load.about().to_owned() })
    }

    fn window(
        &mut self,
        direction: Direction,
        peer: u64,
        pace: Pace,
        length: Duration,
    ) -> Result<Answer, Failure> {
        let (bytes, list) = match (&self.work, pace) {
            (_, Pace::Nothing) => (0, Vec::new()),
            (Some(Prepared { layout, buffer }), _) => {
                let ends = Ends { local: buffer.addr(), remote: peer, direction };
                (layout.bytes(), Request::new(layout, Form::Ranges, ends)?.expanded())
            }
            (None, _) => return Err("nothing was prepared".into()),
        };
        let mover = self.mover(self.target()?, direction, (&list).into(), 1);
        let mut found = Times::new(0, 1);
        let before = self.load.as_ref().map(Load::read).transpose()?;
        let mut took = window(pace, length, bytes, || mover.once(&mut found, || {}))?;
        let mut after = self.load.as_ref().map(Load::read).transpose()?;
        // The load alone is seen at work, however busy the machine is: without a step it has no rate.
        while let (Pace::Nothing, Some(before), Some(now)) = (pace, &before, &after)
            && now.steps == before.steps
        {
            if took > LOAD_PATIENCE {
                return Err(format!("the load has done nothing for {took:?}").into());
            }
            took += window(pace, length, bytes, || Ok(()))?;
            after = self.load.as_ref().map(Load::read).transpose()?;
        }
        let mut answer = WindowRan {
            seconds: took.as_secs_f64(),
            bytes: bytes * found.whole.len() as u64,
            path: found.path.map(|path| path.to_string()).unwrap_or_default(),
            whole: found.whole,
            ..WindowRan::default()
        };
        if let (Some(before), Some(after)) = (before, after) {
            answer.steps = after.steps - before.steps;
            answer.step_seconds = (after.at - before.at).as_secs_f64();
            answer.step = after.durations.iter().map(nanoseconds).collect();
        }
        Ok(Answer::Window(answer))
    }

    fn verify(
        &mut self,
        source_seed: u64,
        guard_seed: u64,
        undefined: &[(u64, u64)],
    ) -> Result<Answer, Failure> {
        let Prepared { layout, buffer } = self.prepared()?;
        let read = |offset, bytes: &mut [u8]| buffer.read(offset, bytes);
        let verifier = Verifier::new(layout).without(undefined);
        Ok(match verifier.verify(source_seed, guard_seed, read)? {
            Ok(verified) => Answer::Verified { bytes: verified.piece_bytes + verified.guard_bytes },
            Err(mismatch) => Answer::Mismatch(mismatch.to_string()),
        })
    }

    fn prepared(&self) -> Result<&Prepared, Failure> {
        self.work.as_ref().ok_or_else(|| "nothing was prepared".into())
    }
}
