//! A GPU and host memory of one engine, with the bytes of one case on both sides.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use kvferry_engine::device::{Device, Vendor};
use kvferry_engine::{
    BatchId, Buffer, Config, DeviceName, Engine, OffloadMode, Op, Part, Range, State,
    SubmitOptions, Target, open_device,
};
use serde::Serialize;

use crate::Failure;
use crate::case::Direction;
use crate::forms::{Ends, Form, Request};
use crate::layout::Layout;
use crate::pattern::{Verifier, fill_buffer, guard_fill, source_fill};
use crate::transfer::{PATIENCE, nanoseconds, op};

/// The devices that a bench of offload opens once.
#[derive(Clone, Debug)]
pub(crate) struct Devices {
    pub(crate) gpu: Arc<dyn Device>,
    pub(crate) host: Arc<dyn Device>,
}

impl Devices {
    /// A device and host memory; on host memory both are the same.
    pub(crate) fn open(name: DeviceName, config: &Config) -> Result<Self, Failure> {
        let gpu = open_device(name, config)?;
        let host = match name {
            DeviceName::Host => Arc::clone(&gpu),
            _ => open_device(DeviceName::Host, config)?,
        };
        Ok(Self { gpu, host })
    }

    /// An engine with both.
    pub(crate) fn engine(&self, config: Config) -> Result<Arc<Engine>, Failure> {
        let mut devices = vec![Arc::clone(&self.gpu)];
        if !Arc::ptr_eq(&self.gpu, &self.host) {
            devices.push(Arc::clone(&self.host));
        }
        Ok(Engine::new(config, devices)?)
    }
}

/// Knobs of the environment, with some replaced.
pub(crate) fn config_with(knobs: &[(&str, &str)]) -> Result<Config, Failure> {
    let replaced = |name: &str| knobs.iter().find(|(knob, _)| *knob == name);
    Ok(Config::from_lookup(|name| match replaced(name) {
        Some((_, value)) => Some((*value).into()),
        None => std::env::var_os(name),
    })?)
}

/// Both sides of one direction of a case: memory, and what lies in it.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) direction: Direction,
    /// From source to destination: of a store from the GPU to the host, of a load the other way.
    pub(crate) layout: Layout,
    pub(crate) memory: Memory,
    /// Whether the memory is new, so that the first copy page-locks it.
    pub(crate) fresh: bool,
    target: Target,
    source_seed: u64,
}

/// Registered memory on both sides.
#[derive(Debug)]
pub(crate) struct Memory {
    gpu: Buffer,
    host: Buffer,
}

impl Lane {
    /// Lays out a case, whose source is the GPU, in one direction, and fills its source. Memory that
    /// is `kept` is used again if it is large enough.
    pub(crate) fn new(
        engine: &Arc<Engine>,
        devices: &Devices,
        direction: Direction,
        layout: &Layout,
        kept: Option<Memory>,
        source_seed: u64,
    ) -> Result<Self, Failure> {
        // Room for one contiguous copy of as many bytes, too.
        let (gpu, host) = (layout.source_bytes, layout.destination_bytes);
        let (gpu, host) = (gpu.max(layout.bytes()), host.max(layout.bytes()));
        let layout = match direction {
            Direction::Write => layout.clone(),
            Direction::Read => layout.clone().reversed(),
        };
        let fits = |memory: &Memory| memory.gpu.len() >= gpu && memory.host.len() >= host;
        let kept = kept.filter(fits);
        let fresh = kept.is_none();
        let memory = match kept {
            Some(memory) => memory,
            None => Memory {
                gpu: engine.allocate(&devices.gpu, gpu)?,
                host: engine.allocate(&devices.host, host)?,
            },
        };
        let target = engine.local()?;
        let lane = Self { direction, layout, memory, fresh, target, source_seed };
        let source = lane.source();
        fill_buffer(lane.layout.source_bytes, source_fill, source_seed, |offset, bytes| {
            source.write(offset, bytes)
        })?;
        Ok(lane)
    }

    fn source(&self) -> &Buffer {
        match self.direction {
            Direction::Write => &self.memory.gpu,
            Direction::Read => &self.memory.host,
        }
    }

    fn destination(&self) -> &Buffer {
        match self.direction {
            Direction::Write => &self.memory.host,
            Direction::Read => &self.memory.gpu,
        }
    }

    /// Fills the whole destination with guard bytes.
    pub(crate) fn guard(&self, guard_seed: u64) -> Result<(), Failure> {
        let destination = self.destination();
        Ok(fill_buffer(self.layout.destination_bytes, guard_fill, guard_seed, |offset, bytes| {
            destination.write(offset, bytes)
        })?)
    }

    /// Compares every byte of the destination, payload and guards.
    pub(crate) fn verify(&self, label: &str, guard_seed: u64) -> Result<(), Failure> {
        let destination = self.destination();
        let read = |offset, bytes: &mut [u8]| destination.read(offset, bytes);
        match Verifier::new(&self.layout).verify(self.source_seed, guard_seed, read)? {
            Ok(_) => Ok(()),
            Err(wrong) => {
                let direction = direction_name(self.direction);
                Err(format!("WRONG BYTES in {label} {direction}: {wrong}").into())
            }
        }
    }

    /// The pieces in a form.
    pub(crate) fn request(&self, form: Form) -> Result<Request<'_>, Failure> {
        let (local, remote) = (self.memory.gpu.addr(), self.memory.host.addr());
        Ok(Request::new(&self.layout, form, Ends { local, remote, direction: self.direction })?)
    }

    /// As many bytes in one piece: the ceiling.
    pub(crate) fn contiguous(&self) -> Request<'static> {
        let (local, remote) = (self.memory.gpu.addr(), self.memory.host.addr());
        Request::Ranges(vec![Range { local, remote, len: self.layout.bytes() }])
    }

    /// A request of this lane as a part of a batch.
    pub(crate) fn part<'a>(&'a self, request: &'a Request<'_>) -> Part<'a> {
        Part { target: &self.target, op: self.op(), copies: request.copies() }
    }

    pub(crate) fn op(&self) -> Op {
        op(self.direction)
    }

    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    pub(crate) fn into_memory(self) -> Memory {
        self.memory
    }
}

/// `d2h` for what leaves the GPU, `h2d` for what comes to it.
pub(crate) fn direction_name(direction: Direction) -> &'static str {
    match direction {
        Direction::Write => "d2h",
        Direction::Read => "h2d",
    }
}

/// One transfer by the clock, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Sample {
    /// The calls of submit: checking, planning, packing and handing over; of two threads the longer.
    pub(crate) submit_ns: u64,
    /// From the return of the last call until everything had landed.
    pub(crate) wait_ns: u64,
    /// From the first call until everything had landed.
    pub(crate) whole_ns: u64,
}

/// Readings of the clock that a sample takes.
pub(crate) const CLOCK_READINGS: u32 = 3;

/// How a transfer went.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) sample: Sample,
    /// What moved the bytes; where parts differ, all of it, joined by `+`.
    pub(crate) path: String,
    /// What the engine chose for each direction, and why; the same only once.
    pub(crate) choices: Vec<String>,
}

/// Submits each part as a batch of its own, and waits for all. Stores and loads have a thread each,
/// as in an inference engine, and begin together.
pub(crate) fn run(
    engine: &Engine,
    parts: &[Part<'_>],
    mode: OffloadMode,
) -> Result<Outcome, Failure> {
    let of =
        |op: Op| -> Vec<Part<'_>> { parts.iter().filter(|part| part.op == op).copied().collect() };
    let sides: Vec<_> = [of(Op::Read), of(Op::Write)]
        .into_iter()
        .filter(|side: &Vec<Part<'_>>| !side.is_empty())
        .collect();
    let here = AtomicUsize::new(0);
    let meet = || {
        here.fetch_add(1, Ordering::AcqRel);
        // A moment: every thread is here already, or on its way.
        while here.load(Ordering::Acquire) < sides.len() {
            std::thread::yield_now();
        }
    };
    let ran = match &sides[..] {
        [side] => vec![run_side(engine, side, mode, || {})?],
        _ => std::thread::scope(|scope| {
            let threads: Vec<_> = (sides.iter())
                .map(|side| scope.spawn(|| run_side(engine, side, mode, meet)))
                .collect();
            let ran = threads.into_iter().map(|thread| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            ran.collect::<Result<Vec<_>, _>>()
        })?,
    };
    let (Some(start), Some(submitted), Some(end)) = (
        ran.iter().map(|side| side.start).min(),
        ran.iter().map(|side| side.submitted).max(),
        ran.iter().map(|side| side.end).max(),
    ) else {
        return Ok(Outcome::default());
    };
    let sample = Sample {
        submit_ns: nanoseconds(&(submitted - start)),
        wait_ns: nanoseconds(&end.saturating_duration_since(submitted)),
        whole_ns: nanoseconds(&(end - start)),
    };
    let paths = distinct(ran.iter().flat_map(|side| side.paths.iter().cloned()));
    let choices = distinct(ran.iter().flat_map(|side| side.choices.iter().cloned()));
    Ok(Outcome { sample, path: paths.join("+"), choices })
}

/// What the batches of one thread did.
struct RanSide {
    start: Instant,
    submitted: Instant,
    end: Instant,
    paths: Vec<String>,
    choices: Vec<String>,
}

/// Submits all parts before any is waited for. `meet` waits for the other threads.
fn run_side(
    engine: &Engine,
    parts: &[Part<'_>],
    mode: OffloadMode,
    meet: impl FnOnce(),
) -> Result<RanSide, Failure> {
    let options = SubmitOptions { offload: mode, ..SubmitOptions::default() };
    let yields = engine.devices().iter().all(|device| device.info().vendor == Vendor::Host);
    let mut batches = Vec::with_capacity(parts.len());
    let mut statuses = Vec::with_capacity(parts.len());
    meet();
    let start = Instant::now();
    for part in parts {
        batches.push(engine.submit_parts(&[*part], &options)?);
    }
    let submitted = Instant::now();
    for &batch in &batches {
        statuses.push(loop {
            let status = engine.poll(batch)?;
            if status.state != State::Running {
                break status;
            }
            if submitted.elapsed() > PATIENCE {
                return Err(format!("a batch did not end in {} s", PATIENCE.as_secs()).into());
            }
            // The processor copies host memory itself, so a wait gives it away.
            if yields {
                std::thread::yield_now();
            }
        });
    }
    let end = Instant::now();
    let (mut paths, mut choices) = (Vec::new(), Vec::new());
    for (&batch, status) in batches.iter().zip(statuses) {
        choices.extend(choice(engine, batch));
        engine.release(batch)?;
        if let State::Failed(error) = status.state {
            return Err(error.into());
        }
        paths.push(status.path.to_string());
    }
    Ok(RanSide { start, submitted, end, paths, choices })
}

/// What the engine chose for a batch, and why; of two ends in host memory it chose nothing.
fn choice(engine: &Engine, batch: BatchId) -> Option<String> {
    engine.choice(batch).ok().flatten().map(|choice| choice.to_string())
}

/// Each once, in the order of the first.
pub(crate) fn distinct<T: PartialEq>(all: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut list = Vec::new();
    for one in all {
        if !list.contains(&one) {
            list.push(one);
        }
    }
    list
}
