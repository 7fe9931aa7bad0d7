//! How HIP page-locks host memory where it is.

use hip_sys as sys;

use super::context::Context;
use crate::error::Result;
use crate::page_lock::{PageLocker, PageLocks};

/// What this process has locked for its AMD GPUs.
pub(super) static LOCKS: PageLocks<Context> = PageLocks::new();

impl PageLocker for Context {
    // `ihipMemcpy_validate` in clr's hip_memory.cpp refuses copies that leave a registered buffer,
    // and `ihipHostRegister` there makes a buffer of just the bytes that it is given.
    fn locks_whole_pages(&self) -> bool {
        false
    }

    fn lock(&self, host: u64, len: u64) -> Result<bool> {
        let flags = sys::hipHostRegisterPortable | sys::hipHostRegisterMapped;
        // SAFETY: HIP refuses memory that is not mapped; `unlock` undoes it.
        match unsafe { self.hip.hipHostRegister(host as *mut _, len as usize, flags) } {
            Ok(()) => Ok(true),
            Err(failure) if failure.is(sys::hipErrorHostMemoryAlreadyRegistered) => Ok(false),
            Err(failure) => Err(self.allocation_error(failure, "pinned host", len)),
        }
    }

    fn unlock(&self, host: u64) -> Result<()> {
        // SAFETY: locked there, as one, by `lock`; nothing uses it any more.
        unsafe { self.hip.hipHostUnregister(host as *mut _) }.map_err(|failure| self.error(failure))
    }

    fn device_address(&self, host: u64) -> Result<u64> {
        let mut addr = std::ptr::null_mut();
        // SAFETY: HIP writes one address and refuses memory that is not locked.
        unsafe { self.hip.hipHostGetDevicePointer(&mut addr, host as *mut _, 0) }
            .map_err(|failure| self.error(failure))?;
        Ok(addr as u64)
    }
}
