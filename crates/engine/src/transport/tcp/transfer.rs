//! A batch's share of what goes over TCP.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kvferry_wire::batch::Encoded;

use super::cut::Share;
use super::layout::Layout;
use crate::error::Error;

/// What a batch waits for over TCP: all its requests, at all its peers.
#[derive(Debug, Default)]
pub(crate) struct Transfer {
    /// Claims that have not ended.
    remaining: AtomicUsize,
    failure: Mutex<Option<Error>>,
    fell_back: AtomicBool,
    cancelled: AtomicBool,
}

impl Transfer {
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

    /// Something more to wait for.
    pub(super) fn claim(self: &Arc<Self>) -> Claim {
        self.remaining.fetch_add(1, Ordering::Relaxed);
        Claim { transfer: Arc::clone(self), ended: false }
    }

    fn end(&self, result: Result<(), Error>) {
        if let Err(error) = result {
            self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
        self.remaining.fetch_sub(1, Ordering::AcqRel);
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
