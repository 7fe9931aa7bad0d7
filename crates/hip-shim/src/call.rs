//! What every exported function does around its work.

use std::cell::Cell;

use hip_sys::{hipError_t, hipErrorInvalidValue, hipErrorNotReady, hipSuccess};

use crate::faults::{self, Calls};

/// What a function of HIP, hipRTC or comgr returns; all three count from 0, which is success.
pub(crate) type Result<T = (), E = hipError_t> = std::result::Result<T, E>;

thread_local! {
    /// The thread's last error, until it is asked for.
    static LAST: Cell<hipError_t> = const { Cell::new(hipSuccess) };
}

/// Runs one call of HIP, unless it is to fail.
pub(crate) fn hip(
    function: &'static str,
    calls: &Calls,
    work: impl FnOnce() -> Result,
) -> hipError_t {
    let result = match faults::injected(function, calls, needs_device) {
        Some(code) => Err(code),
        None => work(),
    };
    let code = result.err().unwrap_or(hipSuccess);
    // Not done yet is an answer and no failure.
    if code != hipSuccess && code != hipErrorNotReady {
        LAST.set(code);
    }
    code
}

/// Runs one call of a library that keeps no last error.
pub(crate) fn plain(
    function: &'static str,
    calls: &Calls,
    work: impl FnOnce() -> Result,
) -> hipError_t {
    let injected = faults::injected(function, calls, |_| false);
    injected.map_or_else(work, Err).err().unwrap_or(0)
}

/// What a driver still answers for a device that is lost.
fn needs_device(function: &str) -> bool {
    ![
        "hipInit",
        "hipDriverGetVersion",
        "hipRuntimeGetVersion",
        "hipGetDeviceCount",
        "hipGetDevice",
        "hipSetDevice",
        "hipDeviceGet",
    ]
    .contains(&function)
}

/// The thread's last error, which is forgotten.
pub(crate) fn take_last_error() -> hipError_t {
    LAST.replace(hipSuccess)
}

pub(crate) fn last_error() -> hipError_t {
    LAST.get()
}

/// Writes a result to where the caller wants it.
///
/// # Safety
/// `place` is null, which is refused, or writable.
pub(crate) unsafe fn put<T>(place: *mut T, value: T) -> Result {
    if place.is_null() {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: the caller's contract.
    unsafe { place.write(value) };
    Ok(())
}
