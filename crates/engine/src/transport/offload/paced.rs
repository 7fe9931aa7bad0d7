//! Batches that are submitted step by step: for the tail policy, each step behind the end of the one
//! before and behind a pause (a chunk that is only enqueued bounds nothing, LAB.md), and for a byte
//! rate.
//!
//! One worker a device takes the steps of its batches by turns. It sleeps until something comes in,
//! until the next step is due, or, as no vendor's event wakes a thread, for moments while steps run.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvferry_device::{CopyDescriptor, Ticket};

use super::lock;
use crate::batch::Pending;
use crate::error::{Error, Result};
use crate::mostly_one::MostlyOne;
use crate::transport::lane::Lane;
use crate::wait::punctual_naps;

/// A batch that a worker submits, as whoever waits for it sees it.
#[derive(Debug)]
pub(crate) struct Paced {
    progress: Mutex<Progress>,
    cancelled: AtomicBool,
    /// The worker's.
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Progress {
    /// Steps that were submitted and are not known to be done.
    pending: Vec<Pending>,
    all_submitted: bool,
    ended: bool,
    failure: Option<Error>,
    /// Nobody knows whether its steps are quiet.
    lost: Option<kvferry_device::Error>,
}

impl Paced {
    /// Whether it has ended.
    ///
    /// # Errors
    /// If its device is lost.
    pub(crate) fn ended(&self) -> Result<bool, kvferry_device::Error> {
        let progress = lock(&self.progress);
        match &progress.lost {
            Some(lost) => Err(lost.clone()),
            None => Ok(progress.ended),
        }
    }

    /// Why it failed, once it has ended.
    pub(crate) fn failure(&self) -> Option<Error> {
        lock(&self.progress).failure.clone()
    }

    /// Submits nothing more of it; what runs ends.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        self.shared.call();
    }

    /// What it waits for, if all of it is submitted.
    pub(crate) fn submissions(&self) -> Option<Vec<Pending>> {
        let progress = lock(&self.progress);
        progress.all_submitted.then(|| progress.pending.clone())
    }
}

/// Submits a step's pieces; what may run is in the list, also behind an error.
pub(super) type Submit =
    Box<dyn FnMut(&[CopyDescriptor], &mut MostlyOne<Pending>) -> Result<()> + Send>;

/// A batch for a worker.
pub(super) struct Job {
    pub(super) lane: Arc<Lane>,
    /// Done once the batch's producer is.
    pub(super) gate: Option<Ticket>,
    /// Batches that have to end before the first step.
    pub(super) behind: Vec<Arc<Paced>>,
    pub(super) pieces: Vec<CopyDescriptor>,
    /// Most bytes and pieces of a step.
    pub(super) step_bytes: u64,
    pub(super) step_pieces: usize,
    /// Most bytes of steps that run at a time; one step may be more.
    pub(super) most_in_flight: u64,
    /// After a step nothing begins for so many times as long as it took, for all jobs that say so.
    pub(super) pause: u32,
    pub(super) submit: Submit,
}

/// A step that was submitted.
struct Step {
    pending: MostlyOne<Pending>,
    bytes: u64,
    since: Instant,
}

/// A job under way.
struct Running {
    job: Job,
    paced: Arc<Paced>,
    /// First piece that is not submitted.
    next: usize,
    /// In their order.
    in_flight: VecDeque<Step>,
    failure: Option<Error>,
}

impl Running {
    fn has_next(&self) -> bool {
        self.failure.is_none() && self.next < self.job.pieces.len()
    }

    fn in_flight_bytes(&self) -> u64 {
        self.in_flight.iter().map(|step| step.bytes).sum()
    }

    /// The next step; a piece that is longer is cut.
    fn take_step(&mut self) -> (Vec<CopyDescriptor>, u64) {
        let (mut step, mut bytes) = (Vec::new(), 0);
        while let Some(piece) = self.job.pieces.get_mut(self.next) {
            let room = self.job.step_bytes.saturating_sub(bytes);
            if room == 0 || step.len() == self.job.step_pieces {
                break;
            }
            let len = piece.len.min(room);
            step.push(CopyDescriptor { len, ..*piece });
            bytes += len;
            piece.src += len;
            piece.dst += len;
            piece.len -= len;
            if piece.len == 0 {
                self.next += 1;
            }
        }
        (step, bytes)
    }

    /// Tells whoever waits how far it is. Steps leave their list before the batch ends.
    fn publish(&self, ended: bool) {
        let mut progress = lock(&self.paced.progress);
        progress.pending.clear();
        progress
            .pending
            .extend(self.in_flight.iter().flat_map(|step| step.pending.iter().cloned()));
        progress.all_submitted = !self.has_next();
        if ended {
            progress.failure.clone_from(&self.failure);
            progress.ended = true;
        }
    }
}

/// When the next step of a device may begin.
#[derive(Debug)]
struct Pace {
    /// Over any time that is longer than a step takes.
    bytes_a_second: Option<u64>,
    /// By the rate.
    due: Instant,
    /// For jobs that pause.
    pause_ends: Instant,
}

impl Pace {
    fn due(&self, job: &Job) -> Instant {
        if job.pause > 0 { self.due.max(self.pause_ends) } else { self.due }
    }

    fn begins(&mut self, bytes: u64, now: Instant) {
        if let Some(rate) = self.bytes_a_second {
            self.due = self.due.max(now) + Duration::from_secs_f64(bytes as f64 / rate as f64);
        }
    }

    fn ended(&mut self, job: &Job, since: Instant, now: Instant) {
        let pause = now.duration_since(since).saturating_mul(job.pause);
        self.pause_ends = self.pause_ends.max(now + pause.min(LONGEST_PAUSE));
    }
}

/// However long a step took.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Bytes of a step under a rate: a hundredth of a second's, in reason.
pub(super) fn step_bytes(chunk_bytes: u64, rate: Option<u64>) -> u64 {
    rate.map_or(chunk_bytes, |rate| chunk_bytes.min((rate / 100).max(4096)))
}

#[derive(Default)]
struct Inbox {
    jobs: Vec<Running>,
    stop: bool,
    /// Something is to be looked at before the worker rests.
    called: bool,
}

#[derive(Default)]
struct Shared {
    inbox: Mutex<Inbox>,
    woken: Condvar,
}

impl Shared {
    fn call(&self) {
        lock(&self.inbox).called = true;
        self.woken.notify_one();
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

/// The worker of one device.
pub(super) struct Worker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}

impl Worker {
    pub(super) fn start(name: &str, rate: Option<u64>) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let now = Instant::now();
        let pace = Pace { bytes_a_second: rate, due: now, pause_ends: now };
        let thread = std::thread::Builder::new()
            .name(format!("kvferry-{name}"))
            .spawn({
                let shared = Arc::clone(&shared);
                move || run(&shared, pace)
            })
            .map_err(|error| Error::System { call: "thread", reason: error.to_string() })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub(super) fn add(&self, job: Job) -> Arc<Paced> {
        let paced = Arc::new(Paced {
            progress: Mutex::default(),
            cancelled: AtomicBool::new(false),
            shared: Arc::clone(&self.shared),
        });
        let running = Running {
            job,
            paced: Arc::clone(&paced),
            next: 0,
            in_flight: VecDeque::new(),
            failure: None,
        };
        lock(&self.shared.inbox).jobs.push(running);
        self.shared.woken.notify_one();
        paced
    }

    /// Nothing more is submitted; what runs ends.
    pub(super) fn stop(&self) {
        lock(&self.shared.inbox).stop = true;
        self.shared.woken.notify_one();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// How long it polls before it naps: about a small step's time.
const SPIN: Duration = Duration::from_micros(50);
const NAP: Duration = Duration::from_micros(20);
/// Between looks at a producer that does not come.
const LONG_NAP: Duration = Duration::from_millis(1);

fn run(shared: &Shared, mut pace: Pace) {
    punctual_naps();
    let mut jobs: VecDeque<Running> = VecDeque::new();
    let mut last_progress = Instant::now();
    loop {
        let mut inbox = lock(&shared.inbox);
        while inbox.jobs.is_empty() && jobs.is_empty() {
            if inbox.stop {
                return;
            }
            inbox = shared.woken.wait(inbox).unwrap_or_else(PoisonError::into_inner);
        }
        if !inbox.jobs.is_empty() {
            last_progress = Instant::now();
            jobs.extend(inbox.jobs.drain(..));
        }
        let stop = inbox.stop;
        inbox.called = false;
        drop(inbox);

        let now = Instant::now();
        let mut moved = false;
        // By turns: whoever submitted a step goes to the end.
        for _ in 0..jobs.len() {
            let Some(mut job) = jobs.pop_front() else { break };
            if stop && job.has_next() {
                job.failure = Some(Error::Stopped);
            }
            if job.has_next() && job.paced.cancelled.load(Ordering::Acquire) {
                job.failure = Some(Error::Cancelled);
            }
            match advance(&mut job, &mut pace, now) {
                Advance::Ended => moved = true,
                Advance::Moved => {
                    moved = true;
                    jobs.push_back(job);
                }
                Advance::Waits => jobs.push_back(job),
            }
        }
        if moved {
            last_progress = Instant::now();
            continue;
        }
        rest(shared, &jobs, &pace, last_progress.elapsed());
    }
}

enum Advance {
    Ended,
    Moved,
    Waits,
}

fn advance(running: &mut Running, pace: &mut Pace, now: Instant) -> Advance {
    let mut moved = false;
    let lane = Arc::clone(&running.job.lane);
    let done = |pending: &Pending| pending.lane.completions.done(pending.ticket);
    while let Some(step) = running.in_flight.front() {
        if !step.pending.iter().all(done) {
            break;
        }
        pace.ended(&running.job, step.since, now);
        running.in_flight.pop_front();
        moved = true;
    }
    if !running.has_next() && running.in_flight.is_empty() {
        running.publish(true);
        return Advance::Ended;
    }
    if let Some(gate) = running.job.gate {
        match lane.completions.done(gate) {
            true => running.job.gate = None,
            false => return check(running, &lane, moved),
        }
    }
    let mut unknown = None;
    running.job.behind.retain(|before| match before.ended() {
        Ok(ended) => !ended,
        Err(lost) => {
            unknown.get_or_insert(lost);
            false
        }
    });
    if let Some(lost) = unknown {
        // Nobody knows when it ends what this is behind.
        running.failure = Some(lost.into());
        return check(running, &lane, true);
    }
    if !running.job.behind.is_empty() {
        return check(running, &lane, moved);
    }
    if running.has_next()
        && pace.due(&running.job) <= now
        && (running.in_flight.is_empty()
            || running.in_flight_bytes() + running.job.step_bytes <= running.job.most_in_flight)
    {
        let (step, bytes) = running.take_step();
        let mut pending = MostlyOne::new();
        let submitted = (running.job.submit)(&step, &mut pending);
        pace.begins(bytes, now);
        if let Err(error) = submitted {
            running.failure = Some(error);
        }
        running.in_flight.push_back(Step { pending, bytes, since: now });
        moved = true;
    }
    check(running, &lane, moved)
}

/// Asks whether the device works where nothing has moved.
fn check(running: &mut Running, lane: &Arc<Lane>, moved: bool) -> Advance {
    if moved {
        running.publish(false);
        return Advance::Moved;
    }
    let waits_for_device = !running.in_flight.is_empty() || running.job.gate.is_some();
    if let Some(lost) = waits_for_device.then(|| lane.check().err()).flatten() {
        // Its steps and their buffers stay as they are: the batch's holds are leaked by whoever
        // ends it.
        lock(&running.paced.progress).lost = Some(lost);
        return Advance::Ended;
    }
    Advance::Waits
}

fn rest(shared: &Shared, jobs: &VecDeque<Running>, pace: &Pace, waited: Duration) {
    let runs = jobs.iter().any(|job| !job.in_flight.is_empty());
    let gated = jobs.iter().any(|job| job.job.gate.is_some() || !job.job.behind.is_empty());
    let next = jobs.iter().filter(|job| job.has_next()).map(|job| pace.due(&job.job)).min();
    let due = next.map(|next| next.saturating_duration_since(Instant::now()));
    let nap = match (runs, gated) {
        (true, _) if waited < SPIN => return std::hint::spin_loop(),
        (true, _) => NAP,
        (false, true) if waited < SPIN => return std::hint::spin_loop(),
        (false, true) => waited.clamp(NAP, LONG_NAP),
        // Only the pace holds them up.
        (false, false) => due.unwrap_or(NAP).max(NAP),
    };
    let inbox = lock(&shared.inbox);
    if inbox.jobs.is_empty() && !inbox.called && !(inbox.stop && jobs.iter().any(Running::has_next))
    {
        let _ = shared.woken.wait_timeout(inbox, nap);
    }
}
