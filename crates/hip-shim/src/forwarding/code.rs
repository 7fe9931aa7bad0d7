//! NVIDIA's result codes as AMD's.

use std::ffi::c_uint;

use hip_sys::*;

use crate::errors::hip_name;

/// Most have one number in both; HIP was made that way.
pub(super) fn hip_code(cuda: c_uint) -> hipError_t {
    match cuda {
        // A library that is too old, a stub, or a driver that does not fit it.
        34 | 36 | 803 | 804 => hipErrorInsufficientDriver,
        46 | 102 | 802 | 805..=810 => hipErrorNoDevice,
        // NVLink.
        220 => hipErrorECCNotCorrectable,
        // An access that another process is to blame for.
        226 => hipErrorIllegalAddress,
        221..=225 => hipErrorNoBinaryForGpu,
        703 => hipErrorLaunchFailure,
        // Too many peers.
        711 => hipErrorPeerAccessUnsupported,
        // Stack, instruction, alignment, address space, program counter.
        714..=718 | 721 => hipErrorLaunchFailure,
        // Not permitted.
        800 => hipErrorNotSupported,
        // These numbers are of other things in HIP.
        911 | 912 => hipErrorUnknown,
        // Asked for all the time.
        600 => hipErrorNotReady,
        code if hip_name(code).is_some() => code,
        _ => hipErrorUnknown,
    }
}
