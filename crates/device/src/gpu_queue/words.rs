//! The words in pinned memory by which a queue's submissions say that they are done.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::MAX_IN_FLIGHT;
use crate::device::{Device, Memory};
use crate::driver::{Driver, Pinned};
use crate::error::Result;
use crate::gpu::GpuDevice;
use crate::kernel::EndWord;
use crate::queue::{Completions, Ticket};

/// The completion words. The queue and whoever polls hold them together.
#[derive(Debug)]
pub(super) struct Words<D: Driver> {
    device: Arc<GpuDevice<D>>,
    pub(super) memory: Pinned,
    /// A u32 of device memory for each word, if launches store words.
    arrivals: Option<Memory>,
}

// SAFETY: the memory is only read, as atomics; the device and the numbers are Sync themselves.
unsafe impl<D: Driver> Sync for Words<D> {}

impl<D: Driver> Words<D> {
    pub(super) fn new(device: &Arc<GpuDevice<D>>) -> Result<Arc<Self>> {
        let bytes = MAX_IN_FLIGHT * size_of::<u32>();
        let memory = device.driver.allocate_pinned(bytes as u64)?;
        // SAFETY: the memory is `bytes` long, ours alone, and no device uses it yet.
        unsafe { memory.host.write_bytes(0, bytes) };
        // Without it a call stores each word: memory that is all in use is no reason to fail.
        let arrivals = D::LAUNCHES_STORE_WORDS.then(|| zeroed(device, bytes)).and_then(Result::ok);
        Ok(Arc::new(Self { device: Arc::clone(device), memory, arrivals }))
    }

    /// Where the device stores a word.
    pub(super) fn address(&self, ticket: Ticket) -> u64 {
        self.memory.device + u64::from(ticket.word) * size_of::<u32>() as u64
    }

    /// The word for a launch that stores it.
    pub(super) fn for_launch(&self, ticket: Ticket) -> Option<EndWord> {
        let arrivals =
            self.arrivals.as_ref()?.addr() + u64::from(ticket.word) * size_of::<u32>() as u64;
        Some(EndWord::new(self.address(ticket), arrivals, ticket.value))
    }
}

impl<D: Driver> Completions for Words<D> {
    fn done(&self, ticket: Ticket) -> bool {
        if ticket.word as usize >= MAX_IN_FLIGHT {
            return false;
        }
        // SAFETY: the index is inside the memory, which is aligned and lives as long as `self`;
        // whoever else touches it, the device, stores whole words.
        let word = unsafe { &*self.memory.host.cast::<AtomicU32>().add(ticket.word as usize) };
        // Later submissions that use the same word store larger numbers, which wrap.
        word.load(Ordering::Acquire).wrapping_sub(ticket.value) as i32 >= 0
    }
}

impl<D: Driver> Drop for Words<D> {
    fn drop(&mut self) {
        let driver = &self.device.driver;
        if let Ok(_scope) = driver.enter() {
            let _ = driver.free_pinned(self.memory);
        }
    }
}

/// Device memory of zeros.
fn zeroed<D: Driver>(device: &Arc<GpuDevice<D>>, bytes: usize) -> Result<Memory> {
    let memory = Arc::clone(device).allocate(bytes as u64)?;
    // SAFETY: the memory is `bytes` long and ours alone, and nothing uses it yet.
    unsafe { device.write(memory.addr(), &vec![0; bytes]) }?;
    Ok(memory)
}
