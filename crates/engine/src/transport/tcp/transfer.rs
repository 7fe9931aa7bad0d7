//! A batch's share of what goes over TCP.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

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

    /// Something more to wait for, of that target's. All that a batch waits for is claimed before
    /// anybody asks whether it has ended.
    pub(super) fn claim(self: &Arc<Self>, owner: &Arc<Owner>) -> Claim {
        self.remaining.fetch_add(1, Ordering::Relaxed);
        Claim { transfer: Arc::clone(self), owner: Arc::clone(owner), ended: false }
    }

    fn end(&self, result: Result<(), Error>) {
        if let Err(error) = result {
            self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
        self.remaining.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A target, as what is claimed for it knows it.
#[derive(Debug)]
pub(super) struct Owner {
    /// Its name.
    peer: String,
    /// Why its transfers fail, once they do.
    ended: OnceLock<String>,
}

impl Owner {
    pub(super) fn new(peer: &str) -> Arc<Self> {
        Arc::new(Self { peer: peer.to_owned(), ended: OnceLock::new() })
    }

    /// Ends its transfers from now on; false if they are ended already. Its session has to
    /// [`sweep`](super::Session::sweep) behind this.
    pub(super) fn end(&self, reason: &str) -> bool {
        self.ended.set(reason.to_owned()).is_ok()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.get().is_some()
    }

    fn failed(&self, reason: &str) -> Error {
        Error::Tcp { peer: self.peer.clone(), reason: reason.to_owned() }
    }
}

/// Keeps a transfer from ending. It ends once; one that is dropped has failed.
#[derive(Debug)]
pub(super) struct Claim {
    transfer: Arc<Transfer>,
    owner: Arc<Owner>,
    ended: bool,
}

impl Claim {
    /// Another one of the same transfer.
    pub(super) fn another(&self) -> Self {
        self.transfer.claim(&self.owner)
    }

    pub(super) fn is_of(&self, transfer: &Arc<Transfer>) -> bool {
        Arc::ptr_eq(&self.transfer, transfer)
    }

    /// Why nobody wants it any more, if so: its batch was cancelled, or its target has ended.
    pub(super) fn unwanted(&self) -> Option<Error> {
        if self.transfer.cancelled.load(Ordering::Acquire) {
            return Some(Error::Cancelled);
        }
        self.owner.ended.get().map(|reason| self.owner.failed(reason))
    }

    pub(super) fn fall_back(&self) {
        self.transfer.fell_back.store(true, Ordering::Relaxed);
    }

    pub(super) fn end(mut self, result: Result<(), Error>) {
        self.ended = true;
        self.transfer.end(result);
    }

    /// A failure by what the peer did, or did not.
    pub(super) fn failed(&self, reason: &str) -> Error {
        self.owner.failed(reason)
    }

    /// Ends it as [`failed`](Self::failed).
    pub(super) fn fail(self, reason: &str) {
        let error = self.failed(reason);
        self.end(Err(error));
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.ended {
            self.transfer.end(Err(self.owner.failed("the engine was closed")));
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
