//! A batch's share of what goes over TCP.

use std::fmt::{self, Debug};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kvferry_wire::batch::Encoded;

use super::cut::Share;
use super::layout::Layout;
use crate::error::Error;

/// What a batch waits for over TCP: all its requests, at all its peers.
#[derive(Default)]
pub(crate) struct Transfer {
    /// Whose memory it uses.
    device: usize,
    /// Claims that have not ended.
    remaining: AtomicUsize,
    failure: Mutex<Option<Error>>,
    fell_back: AtomicBool,
    cancelled: AtomicBool,
    /// What is done at the end.
    at_end: Mutex<Vec<Box<dyn FnOnce() + Send>>>,
}

impl Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (remaining, failure) = (&self.remaining, &self.failure);
        let mut debug = f.debug_struct("Transfer");
        debug.field("remaining", remaining).field("failure", failure).finish_non_exhaustive()
    }
}

impl Transfer {
    /// One that uses memory of that device of the engine.
    pub(super) fn of(device: usize) -> Self {
        Self { device, ..Self::default() }
    }

    pub(super) fn device(&self) -> usize {
        self.device
    }

    /// Whether all requests are over and this side's memory is quiet.
    pub(crate) fn ended(&self) -> bool {
        self.remaining.load(Ordering::Acquire) == 0
    }

    /// Why the first of them failed.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether something went by a slower path than its batch says.
    pub(crate) fn fell_back(&self) -> bool {
        self.fell_back.load(Ordering::Relaxed)
    }

    /// Asks that what has not been moved is not. Its sessions have to
    /// [`sweep`](super::Session::sweep) behind this.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    /// Does something once, when it has ended.
    pub(super) fn at_end(&self, it: Box<dyn FnOnce() + Send>) {
        let mut at_end = self.at_end.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.ended() {
            return at_end.push(it);
        }
        drop(at_end);
        it();
    }

    /// Something more to wait for.
    pub(super) fn claim(self: &Arc<Self>) -> Claim {
        self.remaining.fetch_add(1, Ordering::Relaxed);
        Claim { transfer: Arc::clone(self), ended: false }
    }

    fn end(&self, result: Result<(), Error>) {
        if let Err(error) = result {
            self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
        if self.remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
            let mut at_end = self.at_end.lock().unwrap_or_else(PoisonError::into_inner);
            let all = std::mem::take(&mut *at_end);
            drop(at_end);
            all.into_iter().for_each(|it| it());
        }
    }
}

/// Keeps a transfer from ending. It ends once; one that is dropped has failed.
#[derive(Debug)]
pub(super) struct Claim {
    transfer: Arc<Transfer>,
    ended: bool,
}

impl Claim {
    /// Another one of the same transfer.
    pub(super) fn another(&self) -> Self {
        self.transfer.claim()
    }

    /// Whether nobody wants it any more.
    pub(super) fn is_cancelled(&self) -> bool {
        self.transfer.cancelled.load(Ordering::Acquire)
    }

    pub(super) fn fall_back(&self) {
        self.transfer.fell_back.store(true, Ordering::Relaxed);
    }

    pub(super) fn end(mut self, result: Result<(), Error>) {
        self.ended = true;
        self.transfer.end(result);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.ended {
            let reason = "the engine was closed".into();
            self.transfer.end(Err(Error::Tcp { peer: "a peer".into(), reason }));
        }
    }
}

/// What waits for a lane.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) claim: Claim,
    pub(super) work: Work,
}

/// What a lane has to do for it.
#[derive(Debug)]
pub(super) enum Work {
    /// It becomes requests first.
    Cut(Share),
    Ask(Asked),
}

/// A request, and where its payload lies here.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) encoded: Encoded,
    pub(super) layout: Layout,
    pub(super) is_write: bool,
}
