use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kvferry_device::MadeBy;
use kvferry_engine::{Engine, Error, Op};

use super::error::TransferError;

/// Where a transfer is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransferState {
    /// Bytes may still move.
    Running,
    /// Every byte is in place; where the peer speaks version 1, which does not say so, it was asked
    /// for the last byte of each piece.
    Completed,
    /// It failed. Its destination is undefined, and nothing here is read or written any more.
    Failed(TransferError),
}

/// A batch of ranges on its way to or from a Mooncake peer. It goes on, and ends exactly once,
/// whether or not anybody looks.
#[derive(Clone, Debug)]
pub struct Transfer {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<TransferState>,
    ended: Condvar,
    /// In a fork nothing ends it.
    made_by: MadeBy,
}

impl Transfer {
    /// One that runs, and what ends it.
    pub(super) fn begin(count: Count) -> (Self, Ending) {
        let state = Mutex::new(TransferState::Running);
        let (ended, made_by) = (Condvar::new(), MadeBy::this_process());
        let shared = Arc::new(Shared { state, ended, made_by });
        let ending = Ending { shared: Arc::clone(&shared), outcome: OnceLock::new(), count };
        (Self { shared }, ending)
    }

    /// Where it is now. Does not block. In a fork it has failed: it is the parent's.
    pub fn poll(&self) -> TransferState {
        if !self.shared.made_by.is_this_process() {
            return TransferState::Failed(TransferError::Closed);
        }
        self.shared.state().clone()
    }

    /// Waits until it ends or the time is over; then it is still `Running`.
    pub fn wait(&self, timeout: Duration) -> TransferState {
        if !self.shared.made_by.is_this_process() {
            return self.poll();
        }
        let running = |state: &mut TransferState| *state == TransferState::Running;
        let waited = self.shared.ended.wait_timeout_while(self.shared.state(), timeout, running);
        waited.unwrap_or_else(PoisonError::into_inner).0.clone()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, TransferState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is counted of a transfer when it ends.
#[derive(Debug)]
pub(super) struct Count {
    pub(super) engine: Arc<Engine>,
    pub(super) peer: String,
    pub(super) op: Op,
    pub(super) pieces: u64,
    pub(super) bytes: u64,
    pub(super) submitted: Instant,
}

impl Count {
    fn ended(&self, outcome: Result<(), &TransferError>) {
        let failure = outcome
            .err()
            .map(|error| Error::Tcp { peer: self.peer.clone(), reason: error.to_string() });
        let size = (self.pieces, self.bytes);
        self.engine.count_transfer(self.op, size, self.submitted, failure.as_ref());
    }
}

/// Ends a transfer when it is dropped, as failed if nobody said how. Whatever moves bytes holds it.
#[derive(Debug)]
pub(super) struct Ending {
    shared: Arc<Shared>,
    outcome: OnceLock<Result<(), TransferError>>,
    count: Count,
}

impl Ending {
    /// Says how; the first word counts.
    pub(super) fn say(&self, outcome: Result<(), TransferError>) {
        let _ = self.outcome.set(outcome);
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        let outcome = self.outcome.take().unwrap_or(Err(TransferError::Closed));
        self.count.ended(outcome.as_ref().map(drop));
        *self.shared.state() = match outcome {
            Ok(()) => TransferState::Completed,
            Err(error) => TransferState::Failed(error),
        };
        self.shared.ended.notify_all();
    }
}
