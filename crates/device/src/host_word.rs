//! A number in pinned memory that the host raises and a device waits for.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::device::Device;
use crate::error::Result;
use crate::pinned::PinnedMemory;
use crate::queue::{Producer, ProducerHandle};

/// The number, 0 at first.
#[derive(Debug)]
pub struct HostWord(PinnedMemory);

impl HostWord {
    /// Bytes of pinned memory that one asks for.
    pub const BYTES: u64 = size_of::<u32>() as u64;

    /// One for the device.
    ///
    /// # Errors
    /// The driver's if there is no more pinned memory.
    pub fn new(device: &Arc<dyn Device>) -> Result<Self> {
        Arc::clone(device).allocate_pinned(Self::BYTES).map(Self)
    }

    /// Work that waits until the number is `value` or more, as 32-bit numbers that wrap. A device
    /// that cannot wait for the host refuses it.
    ///
    /// # Safety
    /// The word lives until the submission that waits has ended, and does reach the value.
    pub unsafe fn reaches(&self, value: u32) -> Producer {
        Producer(ProducerHandle::Word { word: self.0.addr(), value })
    }

    /// Raises it. All that the host or a device did before is done for whoever waits.
    pub fn raise(&self, value: u32) {
        self.0.word().store(value, Ordering::Release);
    }
}
