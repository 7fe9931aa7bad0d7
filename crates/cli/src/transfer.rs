//! Submits batches, waits for them, and measures what both cost the host.

use std::time::{Duration, Instant};

use kvferry_engine::{BatchId, BatchStatus, Copies, Engine, Op, State, Target};
use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::case::Direction;

/// Times of a run, in nanoseconds.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(crate) struct Ran {
    /// From the call of submit to completion, each time; of several batches in flight, from the
    /// first call to the last completion.
    pub(crate) whole: Vec<u64>,
    /// The call of submit alone, each time.
    pub(crate) submit: Vec<u64>,
    pub(crate) path: String,
    /// Median cost of asking a running batch; 0 where none ran long enough to be asked.
    pub(crate) poll: f64,
    /// Median cost of asking a batch that has ended.
    pub(crate) ended_poll: f64,
    /// Private memory that the process gained over just before.
    pub(crate) heap: u64,
}

/// A batch that does not end in this time is a failure of the bench.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);
/// Calls of poll that are timed together, because one is about as short as reading the clock.
const POLLS: u32 = 16;
/// Timings of polls that are kept: the last ones.
const KEPT: usize = 4096;

/// Moves one request again and again.
pub(crate) struct Mover<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) target: &'a Target,
    pub(crate) direction: Direction,
    pub(crate) copies: Copies<'a>,
    /// Batches that are submitted before any is waited for.
    pub(crate) in_flight: usize,
    /// The processor moves the bytes itself, so a wait gives it away.
    pub(crate) yields: bool,
}

/// What a [`Mover`] found, in memory that is allocated and touched before the first transfer.
pub(crate) struct Times {
    pub(crate) whole: Vec<u64>,
    submit: Vec<u64>,
    running: Samples,
    ended: Samples,
    batches: Vec<BatchId>,
    pub(crate) path: Option<kvferry_engine::Path>,
}

impl Times {
    pub(crate) fn new(times: usize, in_flight: usize) -> Self {
        Self {
            whole: touched(times),
            submit: touched(times * in_flight),
            running: Samples { list: touched(KEPT), count: 0 },
            ended: Samples { list: touched(KEPT), count: 0 },
            batches: Vec::with_capacity(in_flight),
            path: None,
        }
    }
}

fn touched(capacity: usize) -> Vec<u64> {
    let mut list = vec![1; capacity];
    list.clear();
    list
}

struct Samples {
    list: Vec<u64>,
    count: usize,
}

impl Samples {
    fn add(&mut self, took: Duration) {
        let took = nanoseconds(&took);
        match self.list.get_mut(self.count % KEPT) {
            Some(oldest) => *oldest = took,
            None => self.list.push(took),
        }
        self.count += 1;
    }

    /// Of one call.
    fn median(mut self) -> f64 {
        self.list.sort_unstable();
        let median = self.list.get(self.list.len() / 2).copied().unwrap_or(0);
        median as f64 / f64::from(POLLS)
    }
}

impl Mover<'_> {
    /// Moves it so many times, and once more untimed to look at memory while batches run.
    pub(crate) fn run(&self, times: usize) -> Result<Ran, Failure> {
        let mut found = Times::new(times + 1, self.in_flight);
        let before = private_memory()?;
        // Not looked at between them: that walks all of the process's mappings, and what submits next
        // would find its caches cold.
        for _ in 0..times {
            self.once(&mut found, || {})?;
        }
        let mut highest = private_memory()?;
        let Times { whole, submit, .. } = &found;
        let (whole, submit) = (whole.clone(), submit.clone());
        let mut during = Ok(0);
        self.once(&mut found, || during = private_memory())?;
        highest = highest.max(during?).max(private_memory()?).max(before);
        Ok(Ran {
            whole,
            submit,
            path: found.path.map(|path| path.to_string()).unwrap_or_default(),
            poll: found.running.median(),
            ended_poll: found.ended.median(),
            heap: highest - before,
        })
    }

    /// Moves it once; `submitted` is called when every batch is on its way.
    pub(crate) fn once(&self, found: &mut Times, submitted: impl FnOnce()) -> Result<(), Failure> {
        let op = op(self.direction);
        let start = Instant::now();
        let mut before = start;
        for _ in 0..self.in_flight {
            found.batches.push(self.engine.submit(self.target, op, self.copies)?);
            let after = Instant::now();
            found.submit.push(nanoseconds(&(after - before)));
            before = after;
        }
        submitted();
        let mut failure = None;
        for &batch in &found.batches {
            let status = self.wait(batch, &mut found.running)?;
            found.path = Some(status.path);
            if let State::Failed(error) = status.state {
                failure = Some(error);
            }
        }
        found.whole.push(nanoseconds(&start.elapsed()));
        for (index, batch) in found.batches.drain(..).enumerate() {
            if index == 0 {
                let before = Instant::now();
                for _ in 0..POLLS {
                    self.engine.poll(batch)?;
                }
                found.ended.add(before.elapsed());
            }
            self.engine.release(batch)?;
        }
        failure.map_or(Ok(()), |error| Err(error.into()))
    }

    fn wait(&self, batch: BatchId, running: &mut Samples) -> Result<BatchStatus, Failure> {
        let start = Instant::now();
        loop {
            let before = Instant::now();
            for _ in 0..POLLS {
                let status = self.engine.poll(batch)?;
                if status.state != State::Running {
                    return Ok(status);
                }
            }
            running.add(before.elapsed());
            if start.elapsed() > PATIENCE {
                return Err(format!("a batch did not end in {} s", PATIENCE.as_secs()).into());
            }
            if self.yields {
                std::thread::yield_now();
            }
        }
    }
}

pub(crate) fn op(direction: Direction) -> Op {
    match direction {
        Direction::Write => Op::Write,
        Direction::Read => Op::Read,
    }
}

pub(crate) fn nanoseconds(duration: &Duration) -> u64 {
    duration.as_nanos() as u64
}

/// Resident bytes of this process that are its own: neither files nor shared memory.
pub(crate) fn private_memory() -> Result<u64, Failure> {
    Ok(memory()?.1)
}

/// Most resident bytes of this process so far, and those now that are its own and not shared.
pub(crate) fn memory() -> Result<(u64, u64), Failure> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().trim_end_matches(" kB").trim().parse::<u64>().ok().map(|kib| kib << 10)
    };
    Ok((field("VmHWM:").unwrap_or(0), field("RssAnon:").unwrap_or(0)))
}
