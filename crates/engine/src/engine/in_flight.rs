//! Batches in flight: asked after, waited for, cancelled, and told of when they end.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use kvferry_device::Consumer;
use tracing::Span;

use super::Engine;
use crate::batch::{AllPending, BatchId, BatchStatus, End, State};
use crate::ended::Ended;
use crate::error::{Error, Result};
use crate::target::Target;
use crate::transport::Choice;
use crate::wait::{Notifier, Wait};

impl Engine {
    /// The batch's status now. Does not block, and asks no driver; asking again after the end gives
    /// the same answer.
    ///
    /// # Errors
    /// [`Error::UnknownBatch`].
    pub fn poll(&self, id: BatchId) -> Result<BatchStatus> {
        self.check_process()?;
        let end = match self.batches.ask(id, |pending| self.has_ended(pending))? {
            (status, None | Some(Ok(false))) => return Ok(status),
            (_, Some(Ok(true))) => End::Quiet,
            (_, Some(Err(error))) => End::Unknown(error.into()),
        };
        let count = |ended: &Ended<'_>| self.counters.ended(ended);
        let (status, finished) = self.batches.finish(id, end, count)?;
        if let Some(finished) = finished {
            self.ended(id, &finished.ended(&status), &finished.told.span);
        }
        Ok(status)
    }

    fn has_ended(&self, pending: &AllPending) -> Result<bool, kvferry_device::Error> {
        let transfer = pending.transfer.as_ref();
        for paced in pending.paced.iter() {
            if !paced.ended()? {
                return Ok(false);
            }
        }
        Ok(self.peer.ended(&pending.submissions)? && transfer.is_none_or(|it| it.ended()))
    }

    /// Polls until the batch ends or the time is over; then its status is still `Running`. Between polls the
    /// thread sleeps for 20 to 100 us, for which its timer slack (`PR_SET_TIMERSLACK`) is 1 ns; afterwards it
    /// has its own again.
    ///
    /// # Errors
    /// [`Error::UnknownBatch`].
    pub fn wait(&self, id: BatchId, timeout: Duration) -> Result<BatchStatus> {
        let mut wait = Wait::begin();
        loop {
            let status = self.poll(id)?;
            let waited = wait.waited();
            if status.state != State::Running || waited >= timeout {
                return Ok(status);
            }
            wait.rest();
        }
    }

    /// Makes later work of a stream of the caller's wait for a batch, on the device: the host does
    /// not wait. A batch that has ended is not waited for, and how a batch ends the stream does not
    /// see: ask [`Engine::poll`].
    ///
    /// No stream waits for what is not on a device's queue yet: on a GPU it would hold up work of other
    /// streams, the batch's own among it. Such a batch is refused: wait for it on the host, by
    /// [`Engine::poll`], [`Engine::wait`] or [`Engine::event_fd`], and launch what needs it then.
    ///
    /// # Errors
    /// [`Error::UnknownBatch`]; [`Error::NotAllSubmitted`] for one that goes over TCP and has not ended,
    /// or is submitted step by step (`MC_KVFERRY_MAX_RATE`, [`Choice::in_steps`]) and not all of it is;
    /// the device's if the stream cannot wait.
    pub fn signal(&self, id: BatchId, consumer: Consumer) -> Result<()> {
        self.check_process()?;
        let (_, pending) = self.batches.look(id)?;
        let Some(pending) = pending else { return Ok(()) };
        let steps = pending.paced.iter().map(|paced| paced.submissions());
        let Some(steps) = steps.collect::<Option<Vec<_>>>().filter(|_| !pending.is_over_tcp())
        else {
            return Err(Error::NotAllSubmitted(id));
        };
        self.peer.signal(&pending.submissions, consumer)?;
        self.peer.signal(&steps.concat(), consumer)
    }

    /// Asks that what of a batch has not been moved yet is not, and returns at once.
    ///
    /// The batch ends by itself, once, as any other: failed with [`Error::Cancelled`] if some of it
    /// was left out, and completed if it was too late. Its memory is quiet when it has ended, not
    /// before. How late is too late depends on the transport: a device's queue gives nothing back
    /// that it was given, so such a batch runs to its end; one that is submitted step by step ends
    /// behind the steps that run; over TCP what waits for a producer ends at once, of the rest the
    /// peer is asked to stop, and one that does not answer is given up after
    /// `MC_TCP_STATUS_TIMEOUT_SEC`. Cancelling again, or behind the end, changes nothing.
    ///
    /// # Errors
    /// [`Error::UnknownBatch`].
    pub fn cancel(&self, id: BatchId) -> Result<()> {
        self.check_process()?;
        let Some((pending, targets)) = self.batches.in_flight(id)? else { return Ok(()) };
        pending.paced.iter().for_each(|paced| paced.cancel());
        if let Some(transfer) = pending.transfer {
            transfer.cancel();
            targets.iter().filter_map(Target::session).for_each(|session| session.sweep());
        }
        tracing::debug!(%id, "asked to cancel");
        Ok(())
    }

    /// Forgets a batch that ended; its id is unknown from then on.
    ///
    /// # Errors
    /// [`Error::BatchBusy`] while it runs, [`Error::UnknownBatch`].
    pub fn release(&self, id: BatchId) -> Result<()> {
        self.check_process()?;
        self.batches.release(id)
    }

    /// Which way a batch went between a GPU and host memory, and why; none for other batches.
    ///
    /// # Errors
    /// [`Error::UnknownBatch`].
    pub fn choice(&self, id: BatchId) -> Result<Option<Choice>> {
        self.check_process()?;
        self.batches.choice(id)
    }

    /// A descriptor that becomes readable when batches end: an eventfd whose counter grows by one
    /// for each that runs now or begins later. Starts a thread that watches batches; without this call
    /// there is none.
    ///
    /// # Errors
    /// [`Error::System`] if there are no more descriptors or threads; a later call tries again.
    pub fn event_fd(self: &Arc<Self>) -> Result<BorrowedFd<'_>> {
        self.check_process()?;
        Notifier::started(&self.notifier, self).map(|notifier| notifier.fd())
    }

    /// Ends every batch that can be ended, and returns how many still run.
    pub(crate) fn progress(&self) -> usize {
        let running = self.batches.running();
        let ended = running.iter().filter(|id| {
            // An id that another thread released meanwhile has ended, too.
            self.poll(**id).map_or(true, |status| status.state != State::Running)
        });
        running.len() - ended.count()
    }

    /// Tells everybody of a batch that ended just now and is counted.
    fn ended(&self, id: BatchId, ended: &Ended<'_>, span: &Span) {
        match ended.failure {
            None => {}
            Some(Error::Cancelled) => tracing::debug!(%id, "batch cancelled"),
            Some(error) => tracing::warn!(%id, %error, "batch failed"),
        }
        ended.record(span);
        self.meters.ended(ended);
        if let Some(notifier) = self.notifier.get() {
            notifier.signal();
        }
    }
}
