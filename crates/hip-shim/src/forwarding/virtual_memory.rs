//! The virtual memory API, and stream-ordered pools.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use hip_sys::*;

use super::device::{bind, device};
use crate::call::{Result, put};

super::forward! {
    fn hipMemGetAllocationGranularity(
        place: *mut usize,
        properties: *const hipMemAllocationProp,
        option: hipMemAllocationGranularity_flags,
    ) = cuMemGetAllocationGranularity;
    fn hipMemCreate(
        place: *mut hipMemGenericAllocationHandle_t,
        bytes: usize,
        properties: *const hipMemAllocationProp,
        flags: c_ulonglong,
    ) = cuMemCreate;
    fn hipMemRelease(handle: hipMemGenericAllocationHandle_t) = cuMemRelease;
    fn hipMemRetainAllocationHandle(
        place: *mut hipMemGenericAllocationHandle_t, addr: *mut c_void
    ) = cuMemRetainAllocationHandle;
    fn hipMemGetAllocationPropertiesFromHandle(
        place: *mut hipMemAllocationProp, handle: hipMemGenericAllocationHandle_t
    ) = cuMemGetAllocationPropertiesFromHandle;
    fn hipMemExportToShareableHandle(
        place: *mut c_void,
        handle: hipMemGenericAllocationHandle_t,
        handle_type: hipMemAllocationHandleType,
        flags: c_ulonglong,
    ) = cuMemExportToShareableHandle;
    fn hipMemImportFromShareableHandle(
        place: *mut hipMemGenericAllocationHandle_t,
        shared: *mut c_void,
        handle_type: hipMemAllocationHandleType,
    ) = cuMemImportFromShareableHandle;
    fn hipMemAddressReserve(
        place: *mut *mut c_void,
        bytes: usize,
        alignment: usize,
        wanted: *mut c_void,
        flags: c_ulonglong,
    ) = cuMemAddressReserve;
    fn hipMemAddressFree(addr: *mut c_void, bytes: usize) = cuMemAddressFree;
    fn hipMemMap(
        addr: *mut c_void,
        bytes: usize,
        offset: usize,
        handle: hipMemGenericAllocationHandle_t,
        flags: c_ulonglong,
    ) = cuMemMap;
    fn hipMemUnmap(addr: *mut c_void, bytes: usize) = cuMemUnmap;
    fn hipMemSetAccess(
        addr: *mut c_void, bytes: usize, access: *const hipMemAccessDesc, count: usize
    ) = cuMemSetAccess;

    fn hipMemPoolCreate(place: *mut hipMemPool_t, properties: *const hipMemPoolProps)
        = cuMemPoolCreate;
    fn hipMemPoolDestroy(pool: hipMemPool_t) = cuMemPoolDestroy;
    fn hipMemPoolSetAccess(pool: hipMemPool_t, access: *const hipMemAccessDesc, count: usize)
        = cuMemPoolSetAccess;
    fn hipMallocFromPoolAsync(
        place: *mut *mut c_void, bytes: usize, pool: hipMemPool_t, stream: hipStream_t
    ) = cuMemAllocFromPoolAsync;
    fn hipFreeAsync(addr: *mut c_void, stream: hipStream_t) = cuMemFreeAsync;
    fn hipMemPoolExportPointer(data: *mut hipMemPoolPtrExportData, addr: *mut c_void)
        = cuMemPoolExportPointer;
    fn hipMemPoolImportPointer(
        place: *mut *mut c_void, pool: hipMemPool_t, data: *mut hipMemPoolPtrExportData
    ) = cuMemPoolImportPointer;
}

/// Of chunks, and of nothing else, as AMD's: only chunks have a handle.
pub(crate) unsafe fn hipMemGetAccess(
    rights: *mut c_ulonglong,
    location: *const hipMemLocation,
    addr: *mut c_void,
) -> Result {
    let cuda = bind()?;
    let mut handle = std::ptr::null_mut();
    // SAFETY: the caller's contract; the handle that is written is released once.
    unsafe {
        cuda.cuMemRetainAllocationHandle(&mut handle, addr).map_err(|_| hipErrorInvalidValue)?;
        cuda.cuMemRelease(handle)?;
        cuda.cuMemGetAccess(rights, location, addr)
    }
}

pub(crate) unsafe fn hipDeviceGetDefaultMemPool(
    place: *mut hipMemPool_t,
    ordinal: c_int,
) -> Result {
    let cuda = bind()?;
    // SAFETY: the caller's contract.
    unsafe { cuda.cuDeviceGetDefaultMemPool(place, device(ordinal)?) }
}

/// The descriptor is new at each call, not the pool's own as AMD's is.
pub(crate) unsafe fn hipMemPoolExportToShareableHandle(
    place: *mut c_void,
    pool: hipMemPool_t,
    handle_type: hipMemAllocationHandleType,
    flags: c_uint,
) -> Result {
    let cuda = bind()?;
    // SAFETY: the caller's contract.
    unsafe { cuda.cuMemPoolExportToShareableHandle(place, pool, handle_type, flags.into()) }
}

pub(crate) unsafe fn hipMemPoolImportFromShareableHandle(
    place: *mut hipMemPool_t,
    shared: *mut c_void,
    handle_type: hipMemAllocationHandleType,
    flags: c_uint,
) -> Result {
    if place.is_null() {
        return Err(hipErrorInvalidValue);
    }
    let (cuda, mut pool) = (bind()?, std::ptr::null_mut());
    // SAFETY: the caller's contract.
    unsafe {
        cuda.cuMemPoolImportFromShareableHandle(&mut pool, shared, handle_type, flags.into())?;
        put(place, pool)
    }
}
