//! A queue over any [`Driver`]: descriptor ring, event pool, launches and completion.
//!
//! Three things say that work is over. The *word* of a submission, in pinned memory, is stored by
//! the device at its end, by its only launch where that can be: completion is read without a call.
//! The *end event* is what a consumer's stream waits for and what tells a lost device from a slow one;
//! it is recorded when somebody asks for it, or when other work is about to follow on the stream,
//! which for most submissions is never.
//! A *slot event* behind each launch but the last frees its ring slot early, when a submission needs
//! more than there are.
//!
//! A submission with a producer, or behind others that run, gets a stream of its own for as long as
//! it waits, so that it holds up nobody else.

mod claims;
mod launch;
mod progress;
mod slots;
mod stages;
mod words;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::claims::{Claiming, TABLES, Table, Tables};
use self::launch::few_list;
use self::words::Words;
use crate::compact::CompactDescriptor;
use crate::driver::{Driver, Pinned};
use crate::error::{Error, Left, Result, SubmitError};
use crate::gpu::GpuDevice;
use crate::kernel::{COMPACT_DESCRIPTORS, EndWord, Entry, grid};
use crate::loss::Loss;
use crate::queue::{
    Completions, Consumer, CopyDescriptor, Fence, Producer, Queue, QueueOptions, Ticket, Work,
};

/// Submissions in flight are bounded by their completion words, those that wait by half of them; beyond
/// it, submit waits.
const MAX_IN_FLIGHT: usize = 4096;

/// How long a full ring is polled without giving the processor away.
const SPIN: Duration = Duration::from_micros(50);

/// How often a wait asks the driver whether the device still works.
const CHECK: Duration = Duration::from_millis(1);

/// A submission that is not known to be done.
#[derive(Debug)]
struct InFlight<D: Driver> {
    ticket: Ticket,
    /// Where its last work is, its word.
    stream: D::Stream,
    /// Once it is recorded. Until then nothing else follows on the stream.
    end: Option<D::Event>,
    /// Of an ungated one: how many of the queue's `slots_in_use` are its own.
    slots: usize,
    gate: Option<Gate<D>>,
}

/// A stream that submissions share.
#[derive(Debug)]
struct SharedStream<D: Driver> {
    handle: D::Stream,
    /// The submission that ended on it last, if its end event may be missing.
    ended: Option<Ticket>,
}

/// The end event of a submission, lent so many times, and so not used for anything else.
#[derive(Debug)]
struct Lent<D: Driver> {
    ticket: Ticket,
    times: usize,
    /// The event, once the submission is done.
    ended: Option<D::Event>,
}

/// What a submission that waits holds for itself.
#[derive(Debug)]
struct Gate<D: Driver> {
    stream: D::Stream,
    /// For every other step of staged work.
    second: Option<D::Stream>,
    /// Fires when what it waits for is done.
    event: D::Event,
    slots: Vec<SlotInUse<D>>,
    /// It has been seen open, so that the submission runs.
    is_open: bool,
}

#[derive(Debug)]
struct SlotInUse<D: Driver> {
    slot: usize,
    /// Behind the launches that read it. Where there is none, the slot is free with its submission.
    event: Option<D::Event>,
    /// As well, where they are on two streams.
    other: Option<D::Event>,
}

/// The submission that is being made.
#[derive(Debug)]
struct Open<D: Driver> {
    /// Something may have been started.
    started: bool,
    /// Streams with work of it, as a bit set; unused with a gate.
    streams: u64,
    /// All of it runs on one stream, in order.
    in_order: bool,
    /// Which of its two streams takes a step of staged work now.
    turn: Option<usize>,
    /// The two, by their positions; unused with a gate.
    turns: [Option<usize>; 2],
    last_stream: usize,
    slots: usize,
    gate: Option<Gate<D>>,
    /// Taken last.
    slot: Option<usize>,
    /// The stream of a launch that reads it.
    reader: Option<D::Stream>,
    max_grid_blocks: u32,
    /// Whether destinations overlap is found out on the way.
    claiming: Option<Claiming>,
    /// For the last launch, if nothing else runs beside or behind it.
    end: Option<EndWord>,
    /// That launch stores the word.
    ends: bool,
}

/// Of nothing yet.
impl<D: Driver> Default for Open<D> {
    fn default() -> Self {
        Self {
            started: false,
            streams: 0,
            in_order: false,
            turn: None,
            turns: [None; 2],
            last_stream: 0,
            slots: 0,
            gate: None,
            slot: None,
            reader: None,
            max_grid_blocks: 1,
            claiming: None,
            end: None,
            ends: false,
        }
    }
}

#[derive(Debug)]
pub(crate) struct GpuQueue<D: Driver> {
    device: Arc<GpuDevice<D>>,
    options: QueueOptions,
    /// Blocks that each kernel may have, by [`Entry`].
    grids: [u32; Entry::ALL.len()],
    streams: Vec<SharedStream<D>>,
    next_stream: usize,
    /// For submissions that wait; made when needed, kept for the next.
    idle_gate_streams: Vec<D::Stream>,
    ring: Pinned,
    free_slots: Vec<usize>,
    /// Slots of ungated submissions, in their order.
    slots_in_use: VecDeque<SlotInUse<D>>,
    gated_slots: usize,
    words: Arc<Words<D>>,
    verdicts: Arc<Tables<D>>,
    tables: [Table; TABLES],
    /// Words that nobody waits for, each with the last value that it was given.
    free_words: Vec<Ticket>,
    /// For descriptors of a launch that are not in the ring: kept, so that no submission touches
    /// more memory than it fills.
    few_list: Vec<CopyDescriptor>,
    compact_list: Vec<CompactDescriptor>,
    idle_events: Vec<D::Event>,
    /// Without a gate, in submission order; reaped from the front.
    in_flight: VecDeque<InFlight<D>>,
    /// With a gate, in any order.
    gated: Vec<InFlight<D>>,
    /// End events that somebody borrowed.
    lent: Vec<Lent<D>>,
    loss: Loss,
    /// Submissions, or launches of one, were seen done since the device was last asked after.
    moved_on: bool,
    /// Since when something has been seen running, and nothing done.
    still_since: Option<Instant>,
}

impl<D: Driver> GpuQueue<D> {
    pub(crate) fn new(device: Arc<GpuDevice<D>>, mut options: QueueOptions) -> Result<Self> {
        options.streams = options.streams.clamp(1, u64::BITS as usize);
        options.ring_slots = options.ring_slots.max(1);
        options.slot_descriptors = options.slot_descriptors.clamp(1, u32::MAX as usize);
        options.max_grid_blocks = options.max_grid_blocks.max(1);
        let driver = &device.driver;
        let scope = driver.enter()?;
        let words = Words::new(&device)?;
        let verdicts = Tables::new(&device)?;
        let bytes = options.ring_slots * options.slot_descriptors * size_of::<CopyDescriptor>();
        let ring = driver.allocate_pinned(bytes as u64)?;
        // SAFETY: the ring is `bytes` long, ours alone, and nothing reads it yet. Zeroing makes
        // every slot a valid `[CopyDescriptor]`.
        unsafe { ring.host.write_bytes(0, bytes) };
        let events = options.ring_slots + options.streams + 1;
        // From here on `Drop` cleans up what a failure leaves.
        let mut queue = Self {
            grids: Entry::ALL
                .map(|entry| options.max_grid_blocks.min(driver.resident_blocks(entry))),
            streams: Vec::with_capacity(options.streams),
            next_stream: 0,
            idle_gate_streams: Vec::new(),
            ring,
            free_slots: (0..options.ring_slots).rev().collect(),
            slots_in_use: VecDeque::with_capacity(options.ring_slots),
            gated_slots: 0,
            words,
            verdicts,
            tables: Default::default(),
            free_words: (0..MAX_IN_FLIGHT as u32)
                .rev()
                .map(|word| Ticket { word, value: 0 })
                .collect(),
            few_list: few_list(),
            compact_list: Vec::with_capacity(COMPACT_DESCRIPTORS),
            idle_events: Vec::with_capacity(events),
            in_flight: VecDeque::with_capacity(MAX_IN_FLIGHT),
            gated: Vec::new(),
            lent: Vec::new(),
            loss: options.siblings.as_ref().map_or_else(Loss::default, |it| it.loss().clone()),
            moved_on: false,
            still_since: None,
            device: Arc::clone(&device),
            options,
        };
        for _ in 0..queue.options.streams {
            let stream = driver.create_stream(queue.options.high_priority)?;
            queue.streams.push(SharedStream { handle: stream, ended: None });
        }
        // One event a slot, one a stream and one to join streams, so that few transfers create any.
        for _ in 0..events {
            let event = driver.create_event()?;
            queue.idle_events.push(event);
        }
        drop(scope);
        Ok(queue)
    }

    /// Blocks of a launch of so many units.
    fn blocks(&self, open: &Open<D>, entry: Entry, units: u32) -> u32 {
        let most = self.grids[entry as usize].min(open.max_grid_blocks);
        grid(units, self.device.driver.warp_lanes(), most)
    }

    /// The word for the last launch, whose stream `use_stream` gave, if all of the submission is there.
    fn end_for(&self, open: &Open<D>) -> Option<EndWord> {
        let alone = open.gate.is_some() || open.streams.is_power_of_two();
        open.end.filter(|_| alone && open.claiming.is_none())
    }

    /// The stream for the next launch or copy.
    fn use_stream(&mut self, open: &mut Open<D>) -> Result<D::Stream> {
        if let Some(gate) = &open.gate {
            open.started = true;
            return Ok(match open.turn {
                Some(1) => gate.second.unwrap_or(gate.stream),
                _ => gate.stream,
            });
        }
        let at = if let Some(at) = open.turn.and_then(|turn| open.turns[turn]) {
            at
        } else if open.in_order && open.streams != 0 {
            open.last_stream
        } else {
            self.next_stream = (self.next_stream + 1) % self.streams.len();
            self.next_stream
        };
        let stream = self.shared_stream(at)?;
        open.started = true;
        open.streams |= 1 << at;
        open.last_stream = at;
        Ok(stream)
    }

    /// A stream that something will be put on, behind the end of what is there.
    fn shared_stream(&mut self, at: usize) -> Result<D::Stream> {
        if let Some(ticket) = self.streams[at].ended {
            self.end_of(ticket)?;
            self.streams[at].ended = None;
        }
        Ok(self.streams[at].handle)
    }

    fn take_event(&mut self) -> Result<D::Event> {
        match self.idle_events.pop() {
            Some(event) => Ok(event),
            None => self.device.driver.create_event(),
        }
    }

    fn record(&mut self, stream: D::Stream) -> Result<D::Event> {
        let event = self.take_event()?;
        if let Err(error) = self.device.driver.record(event, stream) {
            self.idle_events.push(event);
            return Err(error);
        }
        Ok(event)
    }

    /// A submission that is not known to be done. It is mostly one of the last.
    fn find(&mut self, ticket: Ticket) -> Option<&mut InFlight<D>> {
        let mut all = self.in_flight.iter_mut().rev().chain(&mut self.gated);
        all.find(|submission| submission.ticket == ticket)
    }

    /// The end event of a submission, recorded now if it was not; none if the submission is done.
    fn end_of(&mut self, ticket: Ticket) -> Result<Option<D::Event>> {
        // Where it ended something else may be on the stream already.
        if self.words.done(ticket) {
            return Ok(None);
        }
        let (stream, end) = match self.find(ticket) {
            Some(submission) => (submission.stream, submission.end),
            None => return Ok(None),
        };
        if end.is_some() {
            return Ok(end);
        }
        let event = self.record(stream)?;
        if let Some(submission) = self.find(ticket) {
            submission.end = Some(event);
        }
        Ok(Some(event))
    }

    /// Gives an event back to the pool, or to whoever borrowed it.
    fn end_event(&mut self, ticket: Ticket, event: Option<D::Event>) {
        let Some(event) = event else { return };
        match self.lent.iter_mut().find(|lent| lent.ticket == ticket) {
            Some(lent) => lent.ended = Some(event),
            None => self.idle_events.push(event),
        }
    }

    /// Makes a stream wait for the producer and for other submissions, and nothing else wait with it.
    ///
    /// Behind an error there is a gate if the stream may wait for something already.
    fn open_gate(
        &mut self,
        producer: Option<Producer>,
        work: &Work<'_>,
    ) -> Result<Gate<D>, (Option<Gate<D>>, Error)> {
        // Before anything waits.
        let fences =
            work.behind.iter().map(|fence| self.event_of(fence)).collect::<Result<Vec<_>>>();
        let fences = fences.map_err(|error| (None, error))?;
        let stream = match self.idle_gate_streams.pop() {
            Some(stream) => stream,
            None => {
                let stream = self.device.driver.create_stream(self.options.high_priority);
                stream.map_err(|error| (None, error))?
            }
        };
        let event = match self.take_event() {
            Ok(event) => event,
            Err(error) => {
                self.idle_gate_streams.push(stream);
                return Err((None, error));
            }
        };
        let gate = Gate { stream, second: None, event, slots: Vec::new(), is_open: false };
        let device = Arc::clone(&self.device);
        let driver = &device.driver;
        let waits = producer
            .map_or(Ok(()), |producer| driver.wait_producer(stream, producer.0, event))
            .and_then(|()| {
                let staged = work.staged.as_ref().map_or(&[][..], |staged| staged.behind);
                self.wait_behind(stream, staged)
            })
            .and_then(|()| fences.iter().try_for_each(|&event| driver.wait(stream, event)));
        // Behind the waits, and so in our own stream: the producer's handle may go.
        let recorded = driver.record(event, stream);
        match waits.and(recorded) {
            Ok(()) => Ok(gate),
            Err(error) => Err((Some(gate), error)),
        }
    }

    /// Ends the submission: its word is stored when all of its streams, or with `all` every stream
    /// that a failure may have left something on, have come so far.
    fn close(&mut self, open: &mut Open<D>, ticket: Ticket, all: bool) -> Result<()> {
        let stream = match &open.gate {
            Some(gate) => gate.stream,
            None => self.shared_stream(open.last_stream)?,
        };
        if let Some(second) = open.gate.as_ref().and_then(|gate| gate.second) {
            let event = self.record(second)?;
            let waits = self.device.driver.wait(stream, event);
            self.idle_events.push(event);
            waits?;
        }
        if open.gate.is_none() {
            let every = u64::MAX >> (u64::BITS as usize - self.streams.len());
            let streams = if all { every } else { open.streams };
            for index in 0..self.streams.len() {
                if index != open.last_stream && streams >> index & 1 == 1 {
                    let event = self.record(self.streams[index].handle)?;
                    let waits = self.device.driver.wait(stream, event);
                    // The wait is for what was recorded, whatever is recorded next.
                    self.idle_events.push(event);
                    waits?;
                }
            }
        }
        // The table is cleared behind the end.
        let end = if open.claiming.is_some() { Some(self.record(stream)?) } else { None };
        if !open.ends {
            let word = self.words.address(ticket);
            // SAFETY: the word lies in memory that is freed after the last submission is done, or never.
            let stored = unsafe { self.device.driver.store(stream, word, ticket.value) };
            if let Err(error) = stored {
                self.idle_events.extend(end);
                return Err(error);
            }
        }
        if let Some(slot) = open.slot.take() {
            self.put_in_use(open, SlotInUse { slot, event: None, other: None });
        }
        if let Some(claiming) = open.claiming.take() {
            self.end_claims(stream, claiming);
        }
        let gate = open.gate.take();
        let gated = gate.is_some();
        let in_flight = InFlight { ticket, stream, end, slots: open.slots, gate };
        if gated {
            self.gated.push(in_flight)
        } else {
            self.in_flight.push_back(in_flight);
            self.streams[open.last_stream].ended = Some(ticket);
        }
        Ok(())
    }

    /// Ends a submission that failed with `error`.
    fn fail(&mut self, mut open: Open<D>, ticket: Ticket, error: Error) -> SubmitError {
        if matches!(error, Error::Lost { .. } | Error::Stalled { .. }) {
            self.lose(&error);
        }
        if !open.started {
            self.return_slot(&mut open);
            if open.gate.is_none() {
                self.free_words.push(Ticket { value: ticket.value.wrapping_sub(1), ..ticket });
            } else if let Err(fence) = self.close(&mut open, ticket, false) {
                // Its stream waits for the producer and must not be given to another one: it is
                // kept as if a submission without copies ran on it.
                self.lose(&fence);
            }
            return SubmitError { error, left: Left::Nothing };
        }
        let left = match self.close(&mut open, ticket, true) {
            Ok(()) => Left::Until(ticket),
            Err(fence) => {
                tracing::error!(error = %fence, "nobody knows when a submission that failed ends");
                self.lose(&error);
                Left::Unknown
            }
        };
        SubmitError { error, left }
    }
}

impl<D: Driver> Queue for GpuQueue<D> {
    unsafe fn submit(&mut self, work: &mut Work<'_>) -> Result<Ticket, SubmitError> {
        let nothing = |error| SubmitError { error, left: Left::Nothing };
        self.loss.check().map_err(nothing)?;
        let device = Arc::clone(&self.device);
        let _scope = device.driver.enter().map_err(nothing)?;
        let mut open = Open {
            in_order: work.one_stream || !(work.first.is_empty() && work.last.is_empty()),
            last_stream: self.next_stream,
            max_grid_blocks: work.max_grid_blocks.max(1),
            ..Open::default()
        };
        self.reap();
        let waits = work.after.is_some() || !work.behind.is_empty();
        // The other half stays for submissions that wait for nobody.
        let most = if waits { MAX_IN_FLIGHT / 2 } else { usize::MAX };
        let has_word =
            |queue: &Self, _: &Open<D>| queue.gated.len() < most && !queue.free_words.is_empty();
        if let Err(error) = self.wait_until(&mut open, has_word) {
            return Err(nothing(self.lose(&error)));
        }
        let word = self.free_words.pop().expect("the wait ends only with a free word");
        let ticket = Ticket { value: word.value.wrapping_add(1), ..word };
        if waits {
            match self.open_gate(work.after, work) {
                Ok(gate) => open.gate = Some(gate),
                Err((gate, error)) => {
                    open.gate = gate;
                    return Err(self.fail(open, ticket, error));
                }
            }
        }
        if work.large.is_empty() && work.last.is_empty() && work.staged.is_none() {
            open.end = self.words.for_launch(ticket);
        }
        // SAFETY: the caller's contract; the scope is entered.
        let enqueued = unsafe { self.enqueue(&mut open, work) };
        match enqueued.and_then(|()| self.close(&mut open, ticket, false)) {
            Ok(()) => Ok(ticket),
            Err(error) => Err(self.fail(open, ticket, error)),
        }
    }

    fn signal(&mut self, ticket: Ticket, consumer: Consumer) -> Result<()> {
        let device = Arc::clone(&self.device);
        let _scope = device.driver.enter()?;
        match self.end_of(ticket)? {
            None => Ok(()),
            Some(end) => device.driver.signal_consumer(consumer, end),
        }
    }

    fn lend(&mut self, ticket: Ticket) -> Result<Option<Fence>> {
        if self.words.done(ticket) {
            return Ok(None);
        }
        let device = Arc::clone(&self.device);
        let _scope = device.driver.enter()?;
        let Some(event) = self.end_of(ticket)? else { return Ok(None) };
        match self.lent.iter_mut().find(|lent| lent.ticket == ticket) {
            Some(lent) => lent.times += 1,
            None => self.lent.push(Lent { ticket, times: 1, ended: None }),
        }
        let device = device.driver.info().uuid;
        Ok(Some(Fence { device, ticket, event: Box::new(event) }))
    }

    fn take_back(&mut self, fence: Fence) {
        let Some(at) = self.lent.iter().position(|lent| lent.ticket == fence.ticket) else {
            return;
        };
        self.lent[at].times -= 1;
        if self.lent[at].times == 0 {
            let lent = self.lent.swap_remove(at);
            self.idle_events.extend(lent.ended);
        }
    }

    fn check(&mut self) -> Result<()> {
        self.loss.check()?;
        if self.in_flight.is_empty() && self.gated.is_empty() {
            return Ok(());
        }
        let device = Arc::clone(&self.device);
        let asked = device.driver.enter().and_then(|_scope| self.ask(None));
        asked.map_err(|error| self.lose(&error))
    }

    fn completions(&self) -> Arc<dyn Completions> {
        Arc::clone(&self.words) as _
    }

    fn pinned_bytes(&self) -> u64 {
        self.ring.len + self.words.memory.len + self.verdicts.pinned_bytes()
    }
}

impl<D: Driver> Drop for GpuQueue<D> {
    fn drop(&mut self) {
        let device = Arc::clone(&self.device);
        let driver = &device.driver;
        let Ok(_scope) = driver.enter() else { return };
        let mut none = Open::default();
        let ended =
            |queue: &Self, _: &Open<D>| queue.in_flight.is_empty() && queue.gated.is_empty();
        let quiet = !self.loss.is_lost() && self.wait_until(&mut none, ended).is_ok();
        // Behind the end of a submission its table is cleared, in moments if the device works.
        let start = Instant::now();
        let patience = self.options.stall_timeout;
        let clear = move |queue: &Self, _: &Open<D>| {
            queue.tables_are_clear() || start.elapsed() >= patience
        };
        let quiet = quiet && self.wait_until(&mut none, clear).is_ok() && self.tables_are_clear();
        if !quiet {
            // The device may still read the ring and store words: leaking them is the only safe end.
            tracing::error!(device = %driver.info(), bytes = self.pinned_bytes(), "a queue was dropped with work that did not end; its ring is leaked");
            std::mem::forget((Arc::clone(&self.words), Arc::clone(&self.verdicts)));
            return;
        }
        for event in self.idle_events.drain(..) {
            let _ = driver.destroy_event(event);
        }
        let shared = self.streams.drain(..).map(|stream| stream.handle);
        for stream in shared.chain(self.idle_gate_streams.drain(..)) {
            let _ = driver.destroy_stream(stream);
        }
        let _ = driver.free_pinned(self.ring);
        self.free_tables();
    }
}
