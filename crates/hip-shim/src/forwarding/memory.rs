//! Device and host memory, what an address is, and memory of other processes.

use std::ffi::{c_int, c_uint, c_void};

use hip_sys::*;

use super::device::bind;
use crate::call::{Result, put};

super::forward! {
    fn hipMalloc(place: *mut *mut c_void, bytes: usize) = cuMemAlloc_v2;
    fn hipFree(addr: *mut c_void) = cuMemFree_v2;
    fn hipHostFree(host: *mut c_void) = cuMemFreeHost;
    fn hipHostUnregister(host: *mut c_void) = cuMemHostUnregister;
    fn hipHostGetDevicePointer(place: *mut *mut c_void, host: *mut c_void, flags: c_uint)
        = cuMemHostGetDevicePointer_v2;
    fn hipMemGetAddressRange(base: *mut hipDeviceptr_t, bytes: *mut usize, addr: hipDeviceptr_t)
        = cuMemGetAddressRange_v2;
    fn hipIpcGetMemHandle(handle: *mut hipIpcMemHandle_t, addr: *mut c_void) = cuIpcGetMemHandle;
    fn hipIpcOpenMemHandle(place: *mut *mut c_void, handle: hipIpcMemHandle_t, flags: c_uint)
        = cuIpcOpenMemHandle_v2;
    fn hipIpcCloseMemHandle(addr: *mut c_void) = cuIpcCloseMemHandle;
}

/// Flags that both have, with one value: portable, mapped, write-combined. CUDA's is always
/// coherent.
const HOST_FLAGS: c_uint = hipHostMallocPortable | hipHostMallocMapped | hipHostMallocWriteCombined;

pub(crate) unsafe fn hipHostMalloc(place: *mut *mut c_void, bytes: usize, flags: c_uint) -> Result {
    // SAFETY: the caller's contract.
    unsafe { bind()?.cuMemHostAlloc(place, bytes, flags & HOST_FLAGS) }
}

pub(crate) unsafe fn hipHostRegister(host: *mut c_void, bytes: usize, flags: c_uint) -> Result {
    let known = hipHostRegisterPortable | hipHostRegisterMapped | hipHostRegisterIoMemory;
    // SAFETY: the caller's contract.
    unsafe { bind()?.cuMemHostRegister_v2(host, bytes, flags & known) }
}

pub(crate) unsafe fn hipPointerGetAttributes(
    place: *mut hipPointerAttribute_t,
    addr: *const c_void,
) -> Result {
    let cuda = bind()?;
    if addr.is_null() {
        return Err(hipErrorInvalidValue);
    }
    let (mut kind, mut device, mut managed): (hipMemoryType, c_int, c_int) = (0, 0, 0);
    let (mut on_device, mut on_host): (*mut c_void, *mut c_void) =
        (std::ptr::null_mut(), std::ptr::null_mut());
    let mut names = [
        HIP_POINTER_ATTRIBUTE_MEMORY_TYPE,
        HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        HIP_POINTER_ATTRIBUTE_IS_MANAGED,
        HIP_POINTER_ATTRIBUTE_DEVICE_POINTER,
        HIP_POINTER_ATTRIBUTE_HOST_POINTER,
    ];
    let mut values: [*mut c_void; 5] = [
        (&raw mut kind).cast(),
        (&raw mut device).cast(),
        (&raw mut managed).cast(),
        (&raw mut on_device).cast(),
        (&raw mut on_host).cast(),
    ];
    // SAFETY: five names and five places, each at least as large as its attribute; the address is
    // only looked up. What libcuda does not know it leaves zero.
    unsafe {
        cuda.cuPointerGetAttributes(5, names.as_mut_ptr(), values.as_mut_ptr(), addr.cast_mut())
    }?;
    let found = hipPointerAttribute_t {
        type_: if managed != 0 { hipMemoryTypeManaged } else { kind },
        device: if kind == hipMemoryTypeUnregistered { -2 } else { device },
        devicePointer: on_device,
        hostPointer: on_host,
        isManaged: managed,
        allocationFlags: 0,
    };
    // SAFETY: the caller's contract.
    unsafe { put(place, found) }
}

/// Where CUDA has 64 bits and HIP 32, the lower half.
pub(crate) unsafe fn hipPointerGetAttribute(
    place: *mut c_void,
    attribute: hipPointer_attribute,
    addr: hipDeviceptr_t,
) -> Result {
    let cuda = bind()?;
    match attribute {
        HIP_POINTER_ATTRIBUTE_BUFFER_ID | HIP_POINTER_ATTRIBUTE_RANGE_SIZE => {
            let mut value = 0_u64;
            // SAFETY: libcuda writes 64 bits; the rest is the caller's contract.
            unsafe {
                cuda.cuPointerGetAttribute((&raw mut value).cast(), attribute, addr)?;
                put(place.cast(), value as u32)
            }
        }
        // SAFETY: the caller's contract.
        _ => unsafe { cuda.cuPointerGetAttribute(place, attribute, addr) },
    }
}

pub(crate) unsafe fn hipDrvPointerGetAttributes(
    count: c_uint,
    attributes: *mut hipPointer_attribute,
    places: *mut *mut c_void,
    addr: hipDeviceptr_t,
) -> Result {
    for index in 0..count as usize {
        // SAFETY: the caller's contract: both lists have `count` entries.
        let _ = unsafe {
            let (attribute, place) = (attributes.add(index).read(), places.add(index).read());
            hipPointerGetAttribute(place, attribute, addr)
        };
    }
    Ok(())
}

pub(crate) unsafe fn hipMemGetHandleForAddressRange(
    _place: *mut c_void,
    _addr: hipDeviceptr_t,
    _bytes: usize,
    _handle_type: hipMemRangeHandleType,
    _flags: std::ffi::c_ulonglong,
) -> Result {
    Err(hipErrorNotSupported)
}
