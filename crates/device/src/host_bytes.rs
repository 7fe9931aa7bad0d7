//! Host memory by its address, for system calls that read and write it in place.

use std::io::{IoSlice, IoSliceMut};

/// A run of host memory that belongs to somebody else: what a socket reads from or writes to
/// without a copy in between.
#[derive(Clone, Copy, Debug)]
pub struct HostBytes {
    addr: u64,
    len: usize,
}

impl HostBytes {
    /// `[addr, addr + len)`.
    ///
    /// # Safety
    /// As long as the value and its copies are used, the range is mapped, readable and writable.
    /// Others may use its bytes meanwhile: then what is read is unspecified, and nothing else.
    pub unsafe fn new(addr: u64, len: usize) -> Self {
        Self { addr, len }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// For a vectored write.
    pub fn to_send(&self) -> IoSlice<'_> {
        // SAFETY: `new`'s contract. The slice is handed to the system and read by nobody here.
        IoSlice::new(unsafe { std::slice::from_raw_parts(self.addr as *const u8, self.len) })
    }

    /// For a vectored read.
    pub fn to_receive(&mut self) -> IoSliceMut<'_> {
        // SAFETY: as in `to_send`; it is written by the system alone.
        IoSliceMut::new(unsafe { std::slice::from_raw_parts_mut(self.addr as *mut u8, self.len) })
    }

    /// Copies to the front of the run, as much as fits, and says how much that is.
    pub fn copy_from(&self, bytes: &[u8]) -> usize {
        let count = bytes.len().min(self.len);
        // SAFETY: `new`'s contract; `bytes` is a borrow, so it is not this memory unless its owner
        // broke that borrow.
        unsafe { std::ptr::copy(bytes.as_ptr(), self.addr as *mut u8, count) };
        count
    }
}
