//! What an address is.

use std::ffi::{c_int, c_uint, c_void};

use hip_sys::memory_type_hip5;
use hip_sys::*;

use super::memory::{Kind, Range, memory, pointer};
use crate::call::{Result, put};
use crate::settings::settings;

/// Of memory that no device knows.
const NO_DEVICE: c_int = -2;

pub(crate) unsafe fn hipMemGetAddressRange(
    base: *mut hipDeviceptr_t,
    bytes: *mut usize,
    addr: hipDeviceptr_t,
) -> Result {
    let memory = memory();
    let range = memory.find(addr.addr() as u64).ok_or(hipErrorNotFound)?;
    // SAFETY: the caller's contract.
    unsafe {
        put(base, pointer(range.base))?;
        put(bytes, range.len as usize)
    }
}

fn memory_type(range: &Range) -> hipMemoryType {
    match (range.is_host(), settings().major() < 6) {
        (true, false) => hipMemoryTypeHost,
        (false, false) => hipMemoryTypeDevice,
        (true, true) => memory_type_hip5::HOST,
        (false, true) => memory_type_hip5::DEVICE,
    }
}

pub(crate) unsafe fn hipPointerGetAttributes(
    place: *mut hipPointerAttribute_t,
    addr: *const c_void,
) -> Result {
    if addr.is_null() {
        return Err(hipErrorInvalidValue);
    }
    let mut found = hipPointerAttribute_t {
        type_: hipMemoryTypeUnregistered,
        device: NO_DEVICE,
        devicePointer: std::ptr::null_mut(),
        hostPointer: std::ptr::null_mut(),
        isManaged: 0,
        allocationFlags: 0,
    };
    match memory().find(addr.addr() as u64) {
        Some(range) => {
            found.type_ = memory_type(range);
            found.device = range.device;
            found.devicePointer = addr.cast_mut();
            if range.is_host() {
                found.hostPointer = addr.cast_mut();
            }
        }
        // HIP 5 has no word for it.
        None if settings().major() < 6 => return Err(hipErrorInvalidValue),
        None => {}
    }
    // SAFETY: the caller's contract.
    unsafe { put(place, found) }
}

/// Numbers are as wide as AMD's library writes them, which is less than CUDA's for some.
pub(crate) unsafe fn hipPointerGetAttribute(
    place: *mut c_void,
    attribute: hipPointer_attribute,
    addr: hipDeviceptr_t,
) -> Result {
    let memory = memory();
    let range = memory.known(addr)?;
    // SAFETY: the caller's contract: `place` has room for what the attribute is.
    unsafe {
        match attribute {
            HIP_POINTER_ATTRIBUTE_MEMORY_TYPE => put(place.cast(), memory_type(range)),
            HIP_POINTER_ATTRIBUTE_DEVICE_POINTER => put(place.cast(), addr),
            HIP_POINTER_ATTRIBUTE_HOST_POINTER if range.is_host() => put(place.cast(), addr),
            HIP_POINTER_ATTRIBUTE_BUFFER_ID => put(place.cast::<u32>(), range.id),
            HIP_POINTER_ATTRIBUTE_IS_MANAGED => put(place.cast::<bool>(), false),
            HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL => put(place.cast(), range.device),
            HIP_POINTER_ATTRIBUTE_RANGE_START_ADDR => put(place.cast(), pointer(range.base)),
            HIP_POINTER_ATTRIBUTE_RANGE_SIZE => put(place.cast::<u32>(), range.len as u32),
            HIP_POINTER_ATTRIBUTE_MAPPED => put(place.cast::<bool>(), true),
            HIP_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => put(place.cast(), pool(range)),
            HIP_POINTER_ATTRIBUTE_HOST_POINTER => Err(hipErrorInvalidValue),
            HIP_POINTER_ATTRIBUTE_CONTEXT
            | HIP_POINTER_ATTRIBUTE_P2P_TOKENS
            | HIP_POINTER_ATTRIBUTE_IS_LEGACY_HIP_IPC_CAPABLE
            | HIP_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
            | HIP_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE => Err(hipErrorNotSupported),
            _ => Err(hipErrorInvalidValue),
        }
    }
}

fn pool(range: &Range) -> hipMemPool_t {
    match range.kind {
        Kind::Pool(handle) | Kind::Imported(handle) => std::ptr::without_provenance_mut(handle),
        _ => std::ptr::null_mut(),
    }
}

/// Succeeds whatever it finds: a place whose attribute cannot be had stays as it is.
pub(crate) unsafe fn hipDrvPointerGetAttributes(
    count: c_uint,
    attributes: *mut hipPointer_attribute,
    places: *mut *mut c_void,
    addr: hipDeviceptr_t,
) -> Result {
    if count == 0 || attributes.is_null() || places.is_null() || addr.is_null() {
        return Err(hipErrorInvalidValue);
    }
    for index in 0..count as usize {
        // SAFETY: the caller's contract: both lists have `count` entries.
        let _ = unsafe {
            let (attribute, place) = (attributes.add(index).read(), places.add(index).read());
            hipPointerGetAttribute(place, attribute, addr)
        };
    }
    Ok(())
}
