//! The end of what no queue sees end, as a submission, so that streams and batches of a device can wait
//! for it: an empty one that waits for a number which this process raises at the end.

use std::fmt::{self, Debug};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_device::{Error as DeviceError, HostWord, Ticket};

use super::lane::Lane;
use super::watcher::wait_for;
use crate::batch::Pending;
use crate::error::{Error, Result};

/// What is done at an end.
#[derive(Default)]
pub(super) struct AtEnd(Vec<Box<dyn FnOnce() + Send>>);

impl AtEnd {
    pub(super) fn push(&mut self, it: Box<dyn FnOnce() + Send>) {
        self.0.push(it);
    }

    pub(super) fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    pub(super) fn run(self) {
        self.0.into_iter().for_each(|it| it());
    }
}

impl Debug for AtEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AtEnd").field(&self.0.len()).finish()
    }
}

/// The numbers of one transport.
#[derive(Debug, Default)]
pub(super) struct Endings {
    all: Mutex<Vec<Ending>>,
    /// Numbers that were made.
    made: AtomicU64,
}

/// A number, the device that sees it, and its value.
#[derive(Debug)]
struct Ending {
    lane: Arc<Lane>,
    word: Arc<HostWord>,
    value: u32,
    /// The last submission that waits for it.
    ticket: Option<Ticket>,
}

impl Ending {
    fn pending(&self) -> Option<Pending> {
        self.ticket.map(|ticket| Pending { lane: Arc::clone(&self.lane), ticket })
    }

    fn is_idle(&self) -> bool {
        self.ticket.is_none_or(|ticket| self.lane.completions.done(ticket))
    }
}

impl Endings {
    /// A submission of the lane's that ends with whatever `at_end` adds its argument to. That always
    /// ends, and its end needs no room in the lane's queue.
    ///
    /// # Errors
    /// `NotOrderable` if the device cannot wait for the host.
    pub(super) fn submit(
        &self,
        lane: &Arc<Lane>,
        at_end: impl FnOnce(Box<dyn FnOnce() + Send>),
    ) -> Result<Ticket> {
        let mut ending = self.take(lane)?;
        ending.value = ending.value.wrapping_add(1);
        let (word, value) = (Arc::clone(&ending.word), ending.value);
        // SAFETY: the word is in the list or leaked until the submission has ended, and what ends
        // raises it.
        let producer = unsafe { word.reaches(value) };
        match wait_for(lane, producer) {
            Ok(ticket) => {
                ending.ticket = Some(ticket);
                self.all().push(ending);
                at_end(Box::new(move || word.raise(value)));
                Ok(ticket)
            }
            Err(error) => {
                word.raise(value);
                match error {
                    Error::Device(DeviceError::NotOrderable { .. }) => self.all().push(ending),
                    // A stream may wait for it nevertheless.
                    _ => std::mem::forget(ending.word),
                }
                Err(error)
            }
        }
    }

    /// Bytes of pinned memory.
    pub(super) fn pinned_bytes(&self) -> u64 {
        self.made.load(Ordering::Relaxed) * HostWord::BYTES
    }

    fn take(&self, lane: &Arc<Lane>) -> Result<Ending> {
        let mut all = self.all();
        if let Some(at) = all.iter().position(|it| Arc::ptr_eq(&it.lane, lane) && it.is_idle()) {
            return Ok(Ending { ticket: None, ..all.swap_remove(at) });
        }
        drop(all);
        let word = Arc::new(HostWord::new(&lane.device)?);
        self.made.fetch_add(1, Ordering::Relaxed);
        Ok(Ending { lane: Arc::clone(lane), word, value: 0, ticket: None })
    }

    fn all(&self) -> MutexGuard<'_, Vec<Ending>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Endings {
    fn drop(&mut self) {
        for ending in self.all().drain(..) {
            // All have been raised: a device that works sees it soon.
            let quiet = ending.pending().is_none_or(|it| ending.lane.settle(&[it]).is_ok());
            if !quiet {
                // A device that is lost may still look at it.
                std::mem::forget(ending.word);
            }
        }
    }
}
