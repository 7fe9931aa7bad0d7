//! The thread that submits a device's copies and notices their ends.
//!
//! A submission costs the host some 30 us, and the end of one has to be looked for. Lanes have sockets
//! to look after, so they list their copies, and this thread does the rest: what is listed goes
//! several slices at once, one launch for all of their pieces and a DMA for each.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvferry_device::{CopyDescriptor, CopySource, Left, Ticket, Work};
use tokio::sync::Notify;

use super::Slice;
use crate::error::{Error, Result};
use crate::transport::lane::Lane;

/// Slices and bytes of one submission, whose slices end together.
const GROUP: usize = 8;
const GROUP_BYTES: u64 = 4 << 20;

/// Chunks of one submission.
const CHUNKS: usize = 16;

/// How long the thread looks for news before it sleeps, or naps while the device works: waking it
/// takes longer than a copy does.
const SPIN: Duration = Duration::from_micros(200);
const NAP: Duration = Duration::from_micros(10);

/// The thread of one device.
#[derive(Debug)]
pub(super) struct Copier {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    lane: Arc<Lane>,
    kernel: bool,
    /// Copies that are listed, to see without the lock whether there are any.
    count: AtomicUsize,
    inbox: Mutex<Inbox>,
    woken: Condvar,
}

#[derive(Debug, Default)]
struct Inbox {
    /// By kind; those that send have the least bytes ahead of them first.
    listed: [VecDeque<Listed>; Kind::COUNT],
    /// The thread waits for `woken`.
    asleep: bool,
    /// There is something to look for soon.
    roused: bool,
    closed: bool,
}

/// What a copy does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Fills a chunk.
    Gather,
    /// Fills a slice.
    Send,
    /// Empties a slice.
    Receive,
    /// Empties a chunk.
    Scatter,
}

impl Kind {
    const COUNT: usize = 4;
    const ALL: [Self; Self::COUNT] = [Self::Gather, Self::Send, Self::Receive, Self::Scatter];
}

/// A copy that waits to be submitted. What it uses is kept by its lane or, once that has gone, by its
/// progress.
#[derive(Debug)]
pub(super) struct Listed {
    pub(super) progress: Arc<Progress>,
    pub(super) kind: Kind,
    pub(super) bytes: u64,
    /// Bytes that its socket has to do before.
    pub(super) ahead: u64,
    /// For the kernel or, where there is none, for DMA.
    pub(super) pieces: Vec<CopyDescriptor>,
    /// For DMA: behind the pieces when it sends, before them when it receives.
    pub(super) copies: Vec<CopyDescriptor>,
}

/// What a copy uses: the slice, if it is one's, and what keeps the pieces registered.
pub(super) type Held = (Option<Slice>, Arc<dyn Send + Sync>);

/// How far a copy is, for its lane.
#[derive(Debug, Default)]
pub(super) struct Progress(Mutex<State>);

#[derive(Default)]
struct State {
    end: Option<End>,
    /// Who sleeps until the end.
    watching: Option<Arc<Notify>>,
    /// Of a copy that its lane has given up.
    held: Option<Held>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("end", &self.end).finish_non_exhaustive()
    }
}

/// How a copy ended.
#[derive(Clone, Debug)]
pub(super) enum End {
    /// Nothing uses the slice and the pieces any more.
    Quiet(Result<()>),
    /// The device is lost, and may still use them.
    Lost(Error),
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Progress {
    /// The end, if it was reached.
    pub(super) fn end(&self) -> Option<End> {
        locked(&self.0).end.clone()
    }

    /// Has `wake` told of the end.
    pub(super) fn watch(&self, wake: &Arc<Notify>) {
        let mut state = locked(&self.0);
        if state.end.is_some() {
            drop(state);
            wake.notify_one();
        } else {
            state.watching.get_or_insert_with(|| Arc::clone(wake));
        }
    }

    /// Keeps what the copy uses until its end.
    pub(super) fn keep(&self, held: Held) {
        let mut state = locked(&self.0);
        match &state.end {
            None => state.held = Some(held),
            Some(end) => {
                let end = end.clone();
                drop(state);
                let_go(&end, held);
            }
        }
    }

    fn reach(&self, end: End) {
        let mut state = locked(&self.0);
        state.end = Some(end.clone());
        let (watching, held) = (state.watching.take(), state.held.take());
        drop(state);
        if let Some(wake) = watching {
            wake.notify_one();
        }
        if let Some(held) = held {
            let_go(&end, held);
        }
    }
}

fn let_go(end: &End, held: Held) {
    match end {
        End::Quiet(_) => drop(held),
        End::Lost(_) => std::mem::forget(held),
    }
}

impl Copier {
    pub(super) fn start(lane: Arc<Lane>, kernel: bool) -> Result<Self> {
        let shared = Arc::new(Shared {
            lane,
            kernel,
            count: AtomicUsize::new(0),
            inbox: Mutex::default(),
            woken: Condvar::new(),
        });
        let run = {
            let shared = Arc::clone(&shared);
            move || shared.run()
        };
        let thread = std::thread::Builder::new()
            .name("kvferry-copy".into())
            .spawn(run)
            .map_err(|error| Error::System { call: "thread", reason: error.to_string() })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub(super) fn lane(&self) -> &Arc<Lane> {
        &self.shared.lane
    }

    /// Lists a copy.
    ///
    /// # Safety
    /// Until its progress has an end that is quiet, its slice lives, its pieces are registered, and
    /// nobody else relies on those that are written.
    pub(super) unsafe fn list(&self, copy: Listed) {
        let mut inbox = locked(&self.shared.inbox);
        let listed = &mut inbox.listed[copy.kind as usize];
        let place = listed.partition_point(|it| it.ahead <= copy.ahead);
        listed.insert(place, copy);
        self.shared.count.fetch_add(1, Ordering::Release);
        self.shared.wake(&mut inbox);
    }

    /// Says that copies will be listed soon, so that the thread is awake by then.
    pub(super) fn rouse(&self) {
        let mut inbox = locked(&self.shared.inbox);
        inbox.roused = true;
        self.shared.wake(&mut inbox);
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        let mut inbox = locked(&self.shared.inbox);
        inbox.closed = true;
        self.shared.wake(&mut inbox);
        drop(inbox);
        let thread = self.thread.take();
        // The thread drops what it kept for others, which may have been the last to need this.
        if let Some(thread) = thread.filter(|it| it.thread().id() != std::thread::current().id()) {
            drop(thread.join());
        }
    }
}

/// Copies of one kind that were submitted together.
struct Group {
    ticket: Ticket,
    /// Why they are not whole, though they will end.
    failure: Option<Error>,
    copies: Vec<Arc<Progress>>,
}

impl Shared {
    fn wake(&self, inbox: &mut Inbox) {
        if std::mem::take(&mut inbox.asleep) {
            self.woken.notify_one();
        }
    }

    fn run(&self) {
        // Linux lets a nap last 50 us longer otherwise.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        let mut running: Vec<Group> = Vec::new();
        let mut last = Kind::Scatter;
        let mut news = Instant::now();
        loop {
            if let Some(group) = self.next_group(&mut last) {
                running.extend(self.submit(group));
                news = Instant::now();
            }
            let before = running.len();
            running.retain_mut(|group| !self.has_ended(group));
            if running.len() < before {
                news = Instant::now();
            } else if news.elapsed() < SPIN {
                std::thread::yield_now();
            } else if !running.is_empty() {
                std::thread::sleep(NAP);
            } else if self.sleep() {
                news = Instant::now();
            } else {
                return;
            }
        }
    }

    /// Sleeps until there is something to do. False if there will be nothing any more.
    fn sleep(&self) -> bool {
        let mut inbox = locked(&self.inbox);
        loop {
            if std::mem::take(&mut inbox.roused) || self.count.load(Ordering::Acquire) > 0 {
                return true;
            }
            if inbox.closed {
                return false;
            }
            inbox.asleep = true;
            inbox = self.woken.wait(inbox).unwrap_or_else(PoisonError::into_inner);
            inbox.asleep = false;
        }
    }

    /// The next copies of one kind; kinds take turns.
    fn next_group(&self, last: &mut Kind) -> Option<Vec<Listed>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut inbox = locked(&self.inbox);
        let turns = (1..=Kind::COUNT).map(|step| Kind::ALL[(*last as usize + step) % Kind::COUNT]);
        let kind = turns.into_iter().find(|&kind| !inbox.listed[kind as usize].is_empty())?;
        let (most, most_bytes) = match kind {
            Kind::Gather | Kind::Scatter => (CHUNKS, u64::MAX),
            Kind::Send | Kind::Receive => (GROUP, GROUP_BYTES),
        };
        let listed = &mut inbox.listed[kind as usize];
        let (mut group, mut bytes) = (Vec::with_capacity(GROUP), 0u64);
        while let Some(next) = listed.front() {
            let fits = group.len() < most && bytes + next.bytes <= most_bytes;
            if !(group.is_empty() || fits) {
                break;
            }
            bytes += next.bytes;
            group.extend(listed.pop_front());
        }
        self.count.fetch_sub(group.len(), Ordering::Relaxed);
        *last = kind;
        Some(group)
    }

    /// Submits copies of one kind as one. None if they have ended, because they were refused.
    fn submit(&self, group: Vec<Listed>) -> Option<Group> {
        let copies: Vec<_> = group.iter().flat_map(|it| it.copies.iter().copied()).collect();
        let mut pieces = Lists { lists: &group, at: 0, taken: 0 };
        let mut work = Work {
            kernel: self.kernel,
            max_grid_blocks: self.lane.tuning.values.max_grid_blocks,
            ..Work::pieces(&mut pieces)
        };
        match group.first().map(|first| first.kind) {
            Some(Kind::Receive) => work.first = &copies,
            _ => work.last = &copies,
        }
        // SAFETY: the contract of `Copier::list`.
        let submitted = unsafe { self.lane.lock().submit(&mut work) };
        let (ticket, failure) = match submitted {
            Ok(ticket) => (ticket, None),
            Err(error) => match error.left {
                Left::Nothing => {
                    let end = End::Quiet(Err(error.error.into()));
                    group.iter().for_each(|it| it.progress.reach(end.clone()));
                    return None;
                }
                Left::Until(ticket) => (ticket, Some(error.error.into())),
                Left::Unknown => {
                    self.lane.lose(&error.error);
                    (Ticket::NEVER, Some(error.error.into()))
                }
            },
        };
        let copies = group.into_iter().map(|it| it.progress).collect();
        Some(Group { ticket, failure, copies })
    }

    /// Tells the lanes of a group that has ended, if it has.
    fn has_ended(&self, group: &mut Group) -> bool {
        let end = if self.lane.completions.done(group.ticket) {
            End::Quiet(group.failure.take().map_or(Ok(()), Err))
        } else {
            match self.lane.check() {
                Ok(()) => return false,
                Err(error) => End::Lost(error.into()),
            }
        };
        group.copies.iter().for_each(|progress| progress.reach(end.clone()));
        true
    }
}

/// The pieces of one copy behind those of the other.
struct Lists<'a> {
    lists: &'a [Listed],
    at: usize,
    /// Pieces of the list at `at` that are behind.
    taken: usize,
}

impl CopySource for Lists<'_> {
    fn fill(&mut self, slot: &mut [CopyDescriptor]) -> usize {
        let mut filled = 0;
        while let Some(list) = self.lists.get(self.at).filter(|_| filled < slot.len()) {
            let left = &list.pieces[self.taken..];
            let count = left.len().min(slot.len() - filled);
            slot[filled..filled + count].copy_from_slice(&left[..count]);
            filled += count;
            self.taken += count;
            if count == left.len() {
                (self.at, self.taken) = (self.at + 1, 0);
            }
        }
        filled
    }
}

#[cfg(test)]
mod tests;
