//! One device of an engine, its queue, and whether it still works.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use kvferry_device::{
    Completions, Device, Left, Loss, Queue, QueueOptions, SubmitError, Ticket, Work,
};
use rustix::time::{ClockId, clock_gettime};

use crate::batch::Pending;
use crate::config::Config;
use crate::error::Result;
use crate::profile::Tuning;
use crate::wait::Wait;

/// One device and its queue.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(super) device: Arc<dyn Device>,
    pub(super) tuning: Tuning,
    /// Peers that a batch went to by a fallback.
    pub(super) fell_back: Mutex<HashSet<String>>,
    queue: Mutex<Box<dyn Queue>>,
    /// That the queue holds for as long as it lives. Known beside it: a thread that submits may have
    /// the queue for as long as a producer likes.
    pub(super) pinned_bytes: u64,
    pub(super) completions: Arc<dyn Completions>,
    /// Whether anything that runs will complete.
    loss: Loss,
    /// When the driver was last asked, by [`milliseconds`].
    asked: AtomicU64,
}

impl Lane {
    pub(super) fn open(device: Arc<dyn Device>, config: &Config) -> Result<Self> {
        Self::open_with(
            device,
            config,
            &QueueOptions { streams: config.streams, ..Default::default() },
        )
    }

    /// Opens a queue with so many streams and such a ring; the rest is the device's tuning.
    pub(super) fn open_with(
        device: Arc<dyn Device>,
        config: &Config,
        options: &QueueOptions,
    ) -> Result<Self> {
        let tuning = Tuning::of_device(config, device.info());
        let loss = Loss::default();
        let options = QueueOptions {
            max_grid_blocks: tuning.values.max_grid_blocks,
            tile_bytes: tuning.values.tile_bytes,
            high_priority: config.high_priority,
            stall_timeout: config.stall_timeout,
            loss: Some(loss.clone()),
            ..options.clone()
        };
        let queue = Arc::clone(&device).queue(&options)?;
        let completions = queue.completions();
        Ok(Self {
            device,
            tuning,
            fell_back: Mutex::default(),
            pinned_bytes: queue.pinned_bytes(),
            queue: Mutex::new(queue),
            completions,
            loss,
            asked: AtomicU64::new(0),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Box<dyn Queue>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Submits to the queue. What may run from now on is in `pending`, also behind an error.
    ///
    /// # Safety
    /// As [`Queue::submit`].
    pub(super) unsafe fn submit(
        self: &Arc<Self>,
        work: &mut Work<'_>,
        pending: &mut Vec<Pending>,
    ) -> Result<()> {
        let pend = |ticket| Pending { lane: Arc::clone(self), ticket };
        // SAFETY: the caller's contract.
        match unsafe { self.lock().submit(work) } {
            Ok(ticket) => {
                pending.push(pend(ticket));
                Ok(())
            }
            Err(SubmitError { error, left }) => {
                match left {
                    Left::Nothing => {}
                    Left::Until(ticket) => pending.push(pend(ticket)),
                    // Nothing says when it ends: the batch does, once somebody asks the device.
                    Left::Unknown => pending.push(pend(Ticket::NEVER)),
                }
                Err(error.into())
            }
        }
    }

    /// Waits until submissions of this lane are done.
    ///
    /// # Errors
    /// If the device is lost: nobody knows whether they are.
    pub(super) fn settle(&self, pending: &[Pending]) -> Result<(), kvferry_device::Error> {
        let mut wait = Wait::begin();
        while !pending.iter().all(|pending| self.completions.done(pending.ticket)) {
            self.check()?;
            wait.rest();
        }
        Ok(())
    }

    /// Refuses to order anything behind a submission of which nobody knows when it ends: the queue takes
    /// its ticket for one that is done.
    pub(super) fn refuse_unknown(&self, ticket: Ticket) -> Result<(), kvferry_device::Error> {
        if ticket == Ticket::NEVER { self.check() } else { Ok(()) }
    }

    pub(super) fn is_lost(&self) -> bool {
        self.loss.is_lost()
    }

    /// The queue, unless another thread has it.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, Box<dyn Queue>>> {
        match self.queue.try_lock() {
            Ok(queue) => Some(queue),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Asks the driver whether the device still works, if nobody did lately. Does not wait for a
    /// thread that submits.
    pub(super) fn check(&self) -> Result<(), kvferry_device::Error> {
        self.loss.check()?;
        let now = milliseconds();
        if now == self.asked.load(Ordering::Relaxed) {
            return Ok(());
        }
        let Some(mut queue) = self.try_lock() else { return Ok(()) };
        self.asked.store(now, Ordering::Relaxed);
        queue.check()
    }
}

/// A clock that moves once in one to ten milliseconds, as the system is configured, and costs a
/// quarter of the exact one: a poll of something that runs asks the driver no more often.
fn milliseconds() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}
