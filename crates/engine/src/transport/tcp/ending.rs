//! The end of a transfer as a submission, so that streams and batches of a device can wait for it: an
//! empty one that waits for a number which this process raises at the end.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_device::{HostWord, Ticket};

use super::transfer::Transfer;
use crate::error::Result;
use crate::transport::lane::Lane;
use crate::transport::watcher::{Watcher, wait_for};

#[derive(Debug, Default)]
pub(super) struct Endings {
    /// Numbers that no transfer needs.
    idle: Arc<Mutex<Vec<Ending>>>,
    /// Numbers that were made.
    made: AtomicU64,
}

/// A number, the device that sees it, and its value.
#[derive(Debug)]
struct Ending {
    lane: Arc<Lane>,
    word: Arc<HostWord>,
    value: u32,
}

impl Endings {
    /// A submission of the lane's that ends with the transfer, however that ends.
    ///
    /// # Errors
    /// `NotOrderable` if the device cannot wait for the host.
    pub(super) fn submit(
        &self,
        transfer: &Arc<Transfer>,
        lane: &Arc<Lane>,
        watcher: &Watcher,
    ) -> Result<Ticket> {
        let Ending { word, value, .. } = self.take(lane)?;
        let value = value.wrapping_add(1);
        // SAFETY: the word is kept below until the submission has ended, and the transfer, which
        // always ends, raises it.
        let producer = unsafe { word.reaches(value) };
        let ticket = wait_for(lane, producer).inspect_err(|_| {
            // A stream may wait for it nevertheless.
            word.raise(value);
            std::mem::forget(Arc::clone(&word));
        })?;
        let (raised, endings) = (Arc::clone(&word), Arc::clone(&self.idle));
        transfer.at_end(Box::new(move || raised.raise(value)));
        let ending = Ending { lane: Arc::clone(lane), word, value };
        let keep = move |ended: Result<()>| match ended {
            Ok(()) => locked(&endings).push(ending),
            // A device that is lost may still look at it.
            Err(_) => std::mem::forget(ending),
        };
        watcher.watch(Arc::clone(lane), ticket, Box::new(keep));
        Ok(ticket)
    }

    /// Bytes of pinned memory.
    pub(super) fn pinned_bytes(&self) -> u64 {
        self.made.load(Ordering::Relaxed) * HostWord::BYTES
    }

    fn take(&self, lane: &Arc<Lane>) -> Result<Ending> {
        let mut endings = locked(&self.idle);
        if let Some(at) = endings.iter().position(|it| Arc::ptr_eq(&it.lane, lane)) {
            return Ok(endings.swap_remove(at));
        }
        drop(endings);
        let word = Arc::new(HostWord::new(&lane.device)?);
        self.made.fetch_add(1, Ordering::Relaxed);
        Ok(Ending { lane: Arc::clone(lane), word, value: 0 })
    }
}

fn locked(endings: &Mutex<Vec<Ending>>) -> MutexGuard<'_, Vec<Ending>> {
    endings.lock().unwrap_or_else(PoisonError::into_inner)
}
