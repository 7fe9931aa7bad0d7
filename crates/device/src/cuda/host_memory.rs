//! How libcuda page-locks host memory where it is.

use cudarc::driver::sys;

use super::context::Context;
use crate::error::Result;
use crate::page_lock::{PageLocker, PageLocks};

/// What this process has locked for its NVIDIA GPUs.
pub(super) static LOCKS: PageLocks<Context> = PageLocks::new();

impl PageLocker for Context {
    fn locks_whole_pages(&self) -> bool {
        true
    }

    fn lock(&self, host: u64, len: u64) -> Result<bool> {
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the driver refuses memory that is not mapped; `unlock` undoes it.
        match unsafe { self.cuda.cuMemHostRegister_v2(host as *mut _, len as usize, flags) } {
            Ok(()) => Ok(true),
            Err(failure)
                if failure.is(sys::CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) =>
            {
                Ok(false)
            }
            Err(failure) => Err(self.allocation_error(failure, "pinned host", len)),
        }
    }

    fn unlock(&self, host: u64) -> Result<()> {
        // SAFETY: locked there, as one, by `lock`; nothing uses it any more.
        unsafe { self.cuda.cuMemHostUnregister(host as *mut _) }
            .map_err(|failure| self.error(failure))
    }

    fn device_address(&self, host: u64) -> Result<u64> {
        let mut addr = 0;
        // SAFETY: the driver writes one address and refuses memory that is not locked.
        unsafe { self.cuda.cuMemHostGetDevicePointer_v2(&mut addr, host as *mut _, 0) }
            .map_err(|failure| self.error(failure))?;
        Ok(addr)
    }
}
