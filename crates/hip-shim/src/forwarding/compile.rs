//! NVRTC as hipRTC, and its architectures as comgr's.

use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::OnceLock;

use hip_sys::comgr::*;
use hip_sys::hiprtc::*;

use super::library::Nvrtc;
use crate::call::Result;

/// What stands before an architecture's name.
const TARGET: &str = "amdgcn-amd-amdhsa--";

/// `amdgcn-amd-amdhsa--sm_90` and so on.
fn architectures() -> Result<&'static [CString]> {
    static NAMES: OnceLock<Result<Vec<CString>>> = OnceLock::new();
    let names = NAMES.get_or_init(|| {
        let (nvrtc, mut count) = (Nvrtc::load()?, 0);
        // SAFETY: NVRTC writes one number.
        unsafe { nvrtc.nvrtcGetNumSupportedArchs(&mut count) }?;
        let mut numbers = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: NVRTC writes as many numbers as it just said.
        unsafe { nvrtc.nvrtcGetSupportedArchs(numbers.as_mut_ptr()) }?;
        let names = numbers.iter().map(|number| CString::new(format!("{TARGET}sm_{number}")));
        names.collect::<Result<_, _>>().map_err(|_| AMD_COMGR_STATUS_ERROR)
    });
    names.as_deref().map_err(|_| AMD_COMGR_STATUS_ERROR)
}

/// # Safety
/// `place` is null, which is refused, or writable.
unsafe fn put<T>(place: *mut T, value: T) -> Result {
    // SAFETY: the caller's contract.
    unsafe { crate::call::put(place, value) }.map_err(|_| AMD_COMGR_STATUS_ERROR_INVALID_ARGUMENT)
}

pub(crate) unsafe fn amd_comgr_get_isa_count(place: *mut usize) -> Result {
    let count = architectures()?.len();
    // SAFETY: the caller's contract.
    unsafe { put(place, count) }
}

pub(crate) unsafe fn amd_comgr_get_isa_name(index: usize, place: *mut *const c_char) -> Result {
    let name = architectures()?.get(index).ok_or(AMD_COMGR_STATUS_ERROR_INVALID_ARGUMENT)?;
    // SAFETY: the caller's contract.
    unsafe { put(place, name.as_ptr()) }
}

pub(crate) unsafe fn amd_comgr_get_isa_metadata(
    name: *const c_char,
    place: *mut amd_comgr_metadata_node_t,
) -> Result {
    if name.is_null() {
        return Err(AMD_COMGR_STATUS_ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: the caller's contract: it is not null, so it ends with a zero.
    let name = unsafe { CStr::from_ptr(name) };
    if !architectures()?.iter().any(|known| known.as_c_str() == name) {
        return Err(AMD_COMGR_STATUS_ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: the caller's contract.
    unsafe { put(place, amd_comgr_metadata_node_s { handle: 1 }) }
}

pub(crate) unsafe fn amd_comgr_destroy_metadata(_metadata: amd_comgr_metadata_node_t) -> Result {
    Ok(())
}

pub(crate) unsafe fn hiprtcVersion(major: *mut c_int, minor: *mut c_int) -> Result {
    // What all of AMD's say.
    // SAFETY: the caller's contract.
    unsafe {
        put(major, 9)?;
        put(minor, 0)
    }
}

pub(crate) unsafe fn hiprtcCreateProgram(
    place: *mut hiprtcProgram,
    source: *const c_char,
    name: *const c_char,
    header_count: c_int,
    headers: *const *const c_char,
    header_names: *const *const c_char,
) -> Result {
    let nvrtc = Nvrtc::load()?;
    // SAFETY: the caller's contract.
    unsafe { nvrtc.nvrtcCreateProgram(place, source, name, header_count, headers, header_names) }
}

pub(crate) unsafe fn hiprtcDestroyProgram(program: *mut hiprtcProgram) -> Result {
    // SAFETY: the caller's contract.
    unsafe { Nvrtc::load()?.nvrtcDestroyProgram(program) }
}

/// Options have one spelling in both.
pub(crate) unsafe fn hiprtcCompileProgram(
    program: hiprtcProgram,
    option_count: c_int,
    options: *const *const c_char,
) -> Result {
    // SAFETY: the caller's contract.
    unsafe { Nvrtc::load()?.nvrtcCompileProgram(program, option_count, options) }
}

pub(crate) unsafe fn hiprtcGetProgramLogSize(program: hiprtcProgram, place: *mut usize) -> Result {
    // SAFETY: the caller's contract.
    unsafe { Nvrtc::load()?.nvrtcGetProgramLogSize(program, place) }
}

pub(crate) unsafe fn hiprtcGetProgramLog(program: hiprtcProgram, place: *mut c_char) -> Result {
    // SAFETY: the caller's contract.
    unsafe { Nvrtc::load()?.nvrtcGetProgramLog(program, place) }
}

pub(crate) unsafe fn hiprtcGetCodeSize(program: hiprtcProgram, place: *mut usize) -> Result {
    // SAFETY: the caller's contract.
    unsafe { Nvrtc::load()?.nvrtcGetCUBINSize(program, place) }
}

pub(crate) unsafe fn hiprtcGetCode(program: hiprtcProgram, place: *mut c_char) -> Result {
    // SAFETY: the caller's contract.
    unsafe { Nvrtc::load()?.nvrtcGetCUBIN(program, place) }
}
