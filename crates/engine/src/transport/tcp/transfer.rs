//! A batch's share of what goes over TCP.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kvferry_wire::batch::Encoded;

use super::layout::Layout;
use crate::error::Error;

/// What a batch waits for over TCP: all its requests, at all its peers.
#[derive(Debug)]
pub(crate) struct Transfer {
    remaining: AtomicUsize,
    failure: Mutex<Option<Error>>,
    fell_back: AtomicBool,
}

impl Transfer {
    pub(super) fn new(requests: usize) -> Arc<Self> {
        Arc::new(Self {
            remaining: AtomicUsize::new(requests),
            failure: Mutex::default(),
            fell_back: AtomicBool::new(false),
        })
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

    fn end(&self, result: Result<(), Error>) {
        if let Err(error) = result {
            self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
        self.remaining.fetch_sub(1, Ordering::AcqRel);
    }
}

/// One request of a transfer. It ends once; one that is dropped has failed.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) transfer: Arc<Transfer>,
    /// Taken by the lane that sends it.
    pub(super) encoded: Option<Encoded>,
    pub(super) layout: Arc<Layout>,
    pub(super) is_write: bool,
    ended: bool,
}

impl Job {
    pub(super) fn new(
        transfer: Arc<Transfer>,
        encoded: Encoded,
        layout: Layout,
        is_write: bool,
    ) -> Self {
        Self { transfer, encoded: Some(encoded), layout: Arc::new(layout), is_write, ended: false }
    }

    pub(super) fn fall_back(&self) {
        self.transfer.fell_back.store(true, Ordering::Relaxed);
    }

    pub(super) fn end(mut self, result: Result<(), Error>) {
        self.ended = true;
        self.transfer.end(result);
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if !self.ended {
            let reason = "the engine was closed".into();
            self.transfer.end(Err(Error::Tcp { peer: "a peer".into(), reason }));
        }
    }
}
