//! Page-locked host memory.

use std::ffi::{c_uint, c_void};

use hip_sys::*;
use rustix::mm::{MsyncFlags, msync};

use super::capture;
use super::device::{check_device, current_device};
use super::memory::{Kind, map_private, memory, pointer, release};
use super::stream::wait_for_device;
use crate::call::{Result, put};

const PAGE: u64 = 4096;

pub(crate) unsafe fn hipHostMalloc(
    place: *mut *mut c_void,
    bytes: usize,
    _flags: c_uint,
) -> Result {
    let device = check_device(current_device())?;
    capture::refuse_unsafe()?;
    let mut base = 0;
    if bytes > 0 {
        base = map_private(bytes as u64)?;
        memory().insert(base, bytes as u64, device, Kind::Host, None);
    }
    // SAFETY: the caller's contract.
    unsafe { put(place, pointer(base)) }
}

pub(crate) unsafe fn hipHostFree(host: *mut c_void) -> Result {
    capture::refuse_unsafe()?;
    if host.is_null() {
        return Ok(());
    }
    let base = host.addr() as u64;
    let device = match memory().at(base) {
        Some(range) if matches!(range.kind, Kind::Host) => range.device,
        _ => return Err(hipErrorInvalidValue),
    };
    wait_for_device(device)?;
    release(base);
    Ok(())
}

pub(crate) unsafe fn hipHostRegister(host: *mut c_void, bytes: usize, _flags: c_uint) -> Result {
    let device = check_device(current_device())?;
    capture::refuse_unsafe()?;
    if host.is_null() || bytes == 0 {
        return Err(hipErrorInvalidValue);
    }
    let (base, len) = (host.addr() as u64, bytes as u64);
    if !is_mapped(base, len) {
        return Err(hipErrorInvalidValue);
    }
    let mut memory = memory();
    if memory.overlaps(base, len) {
        return Err(hipErrorHostMemoryAlreadyRegistered);
    }
    memory.insert(base, len, device, Kind::Registered, None);
    Ok(())
}

/// Whether the process has memory at all of these addresses.
fn is_mapped(base: u64, len: u64) -> bool {
    let first = base / PAGE * PAGE;
    let Some(end) = base.checked_add(len).and_then(|end| end.checked_next_multiple_of(PAGE)) else {
        return false;
    };
    // SAFETY: the kernel refuses what is not mapped; it starts to write back files, which changes
    // no memory.
    unsafe { msync(pointer(first), (end - first) as usize, MsyncFlags::ASYNC) }.is_ok()
}

pub(crate) unsafe fn hipHostUnregister(host: *mut c_void) -> Result {
    capture::refuse_unsafe()?;
    let mut memory = memory();
    match memory.at(host.addr() as u64) {
        Some(range) if matches!(range.kind, Kind::Registered) => {
            memory.remove(host.addr() as u64);
            Ok(())
        }
        _ => Err(hipErrorHostMemoryNotRegistered),
    }
}

pub(crate) unsafe fn hipHostGetDevicePointer(
    place: *mut *mut c_void,
    host: *mut c_void,
    flags: c_uint,
) -> Result {
    if flags != 0 || !memory().known(host)?.is_host() {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: the caller's contract.
    unsafe { put(place, host) }
}
