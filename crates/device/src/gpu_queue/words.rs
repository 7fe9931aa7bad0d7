//! The words in pinned memory by which a queue's submissions say that they are done.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::MAX_IN_FLIGHT;
use crate::driver::{Driver, Pinned};
use crate::error::Result;
use crate::gpu::GpuDevice;
use crate::queue::{Completions, Ticket};

/// The completion words. The queue and whoever polls hold them together.
#[derive(Debug)]
pub(super) struct Words<D: Driver> {
    device: Arc<GpuDevice<D>>,
    pub(super) memory: Pinned,
}

// SAFETY: the memory is only read, as atomics; the device and the numbers are Sync themselves.
unsafe impl<D: Driver> Sync for Words<D> {}

impl<D: Driver> Words<D> {
    pub(super) fn new(device: &Arc<GpuDevice<D>>) -> Result<Arc<Self>> {
        let bytes = MAX_IN_FLIGHT * size_of::<u32>();
        let memory = device.driver.allocate_pinned(bytes as u64)?;
        // SAFETY: the memory is `bytes` long, ours alone, and no device uses it yet.
        unsafe { memory.host.write_bytes(0, bytes) };
        Ok(Arc::new(Self { device: Arc::clone(device), memory }))
    }

    /// Where the device stores a word.
    pub(super) fn address(&self, ticket: Ticket) -> u64 {
        self.memory.device + u64::from(ticket.word) * size_of::<u32>() as u64
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
