//! Page-locked host memory that the processor and a device both use.

use std::fmt::{self, Debug};
use std::sync::Arc;

use crate::device::Release;
use crate::driver::Pinned;

/// Page-locked host memory, freed when dropped. The device reads and writes it at
/// [`addr`](Self::addr); whoever submits such a copy promises that nobody looks at the bytes
/// meanwhile, as for any memory.
pub struct PinnedMemory {
    memory: Pinned,
    device: Arc<dyn Release>,
}

// SAFETY: the memory is owned, plain bytes, and reached only through `&self` and `&mut self`.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    pub(crate) fn new(memory: Pinned, device: Arc<dyn Release>) -> Self {
        // SAFETY: the memory is new, so nobody else uses it; zeroing makes all of it initialised.
        unsafe { memory.host.write_bytes(0, memory.len as usize) };
        Self { memory, device }
    }

    /// Where the device sees the first byte.
    pub fn addr(&self) -> u64 {
        self.memory.device
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.memory.len
    }

    /// Never true: empty memory is not allocated.
    pub fn is_empty(&self) -> bool {
        self.memory.len == 0
    }

    /// The bytes, as the processor sees them.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes that live as long as `self`; the borrow keeps writers of
        // this process away, and `Queue::submit`'s contract the device.
        unsafe { std::slice::from_raw_parts(self.memory.host, self.memory.len as usize) }
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and the borrow is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.memory.host, self.memory.len as usize) }
    }
}

impl Debug for PinnedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedMemory").field("bytes", &self.memory.len).finish_non_exhaustive()
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        self.device.free_pinned(self.memory);
    }
}
