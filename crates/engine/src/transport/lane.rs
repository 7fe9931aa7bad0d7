//! The devices of an engine, their queues, and whether they still work.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};

use kvferry_device::{
    Completions, Device, Left, Loss, Queue, QueueOptions, Siblings, SubmitError, Ticket, Work,
};
use rustix::time::{ClockId, clock_gettime};

use crate::batch::Pending;
use crate::config::Config;
use crate::error::Result;
use crate::mostly_one::MostlyOne;
use crate::profile::Tuning;
use crate::wait::Wait;

/// A device of an engine, and all of its lanes. Work of one may be behind that of another, so what
/// loses one loses all: nothing behind it ends either.
#[derive(Debug)]
pub(crate) struct DeviceLanes {
    pub(super) device: Arc<dyn Device>,
    loss: Loss,
    /// Replaced as one, so that whoever asks them holds no lock.
    lanes: Mutex<Arc<[Weak<Lane>]>>,
    /// When the driver was last asked, by [`milliseconds`].
    asked: AtomicU64,
}

impl DeviceLanes {
    pub(super) fn new(device: &Arc<dyn Device>) -> Arc<Self> {
        let (device, loss) = (Arc::clone(device), Loss::default());
        Arc::new(Self { device, loss, lanes: Mutex::default(), asked: AtomicU64::new(0) })
    }

    pub(super) fn is_lost(&self) -> bool {
        self.loss.is_lost()
    }

    fn lanes(&self) -> MutexGuard<'_, Arc<[Weak<Lane>]>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, lane: &Arc<Lane>) {
        let mut lanes = self.lanes();
        *lanes = lanes.iter().cloned().chain([Arc::downgrade(lane)]).collect();
    }
}

impl Siblings for DeviceLanes {
    fn loss(&self) -> &Loss {
        &self.loss
    }

    /// Asks the driver whether the device still works, if nobody did lately: by every lane, as what
    /// is waited for on one may be behind what nobody waits for on another.
    fn check(&self) -> Result<(), kvferry_device::Error> {
        self.loss.check()?;
        let now = milliseconds();
        if now == self.asked.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.asked.store(now, Ordering::Relaxed);
        let lanes = Arc::clone(&self.lanes());
        for lane in lanes.iter().filter_map(Weak::upgrade) {
            if let Some(mut queue) = lane.try_lock() {
                queue.check()?;
            }
        }
        Ok(())
    }
}

/// One queue of a device.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(super) device: Arc<dyn Device>,
    of_device: Arc<DeviceLanes>,
    pub(super) tuning: Tuning,
    /// Peers that a batch went to by a fallback.
    pub(super) fell_back: Mutex<HashSet<String>>,
    queue: Mutex<Box<dyn Queue>>,
    /// That the queue holds for as long as it lives. Known beside it: a thread that submits may have
    /// the queue for as long as a producer likes.
    pub(super) pinned_bytes: u64,
    pub(super) completions: Arc<dyn Completions>,
}

impl Lane {
    pub(super) fn open(of_device: &Arc<DeviceLanes>, config: &Config) -> Result<Arc<Self>> {
        let options = QueueOptions { streams: config.streams, ..Default::default() };
        Self::open_with(of_device, config, &options)
    }

    /// Opens a queue with so many streams and such a ring; the rest is the device's tuning.
    pub(super) fn open_with(
        of_device: &Arc<DeviceLanes>,
        config: &Config,
        options: &QueueOptions,
    ) -> Result<Arc<Self>> {
        let device = Arc::clone(&of_device.device);
        let tuning = Tuning::of_device(config, device.info());
        let options = QueueOptions {
            max_grid_blocks: tuning.values.max_grid_blocks,
            tile_bytes: tuning.values.tile_bytes,
            high_priority: config.high_priority,
            stall_timeout: config.stall_timeout,
            siblings: Some(Arc::clone(of_device) as _),
            ..options.clone()
        };
        let queue = Arc::clone(&device).queue(&options)?;
        let completions = queue.completions();
        let lane = Arc::new(Self {
            device,
            of_device: Arc::clone(of_device),
            tuning,
            fell_back: Mutex::default(),
            pinned_bytes: queue.pinned_bytes(),
            queue: Mutex::new(queue),
            completions,
        });
        of_device.add(&lane);
        Ok(lane)
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
        pending: &mut MostlyOne<Pending>,
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

    /// Refuses to order anything behind a submission that a lost device may never end.
    pub(super) fn refuse_lost(&self, ticket: Ticket) -> Result<(), kvferry_device::Error> {
        if self.completions.done(ticket) { Ok(()) } else { self.of_device.loss.check() }
    }

    /// The queue, unless another thread has it.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, Box<dyn Queue>>> {
        match self.queue.try_lock() {
            Ok(queue) => Some(queue),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Whether its device still works; costs next to nothing if somebody asked lately.
    pub(super) fn check(&self) -> Result<(), kvferry_device::Error> {
        self.of_device.check()
    }
}

/// A clock that moves once in one to ten milliseconds, as the system is configured, and costs a
/// quarter of the exact one: a poll of something that runs asks the driver no more often.
fn milliseconds() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}
