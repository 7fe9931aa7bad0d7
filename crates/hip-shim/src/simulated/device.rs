//! The GPUs, and which of them a thread uses.

use std::cell::Cell;
use std::collections::HashSet;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, PoisonError};

use hip_sys::*;

use super::copy::MAX_PITCH;
use crate::call::{Result, put};
use crate::settings::settings;

const NAME: &str = "AMD Instinct MI300X (kvferry stand-in)";
const MULTIPROCESSORS: c_int = 304;

thread_local! {
    static CURRENT: Cell<c_int> = const { Cell::new(0) };
}

pub(super) fn current_device() -> c_int {
    CURRENT.get()
}

fn count() -> Result<c_int> {
    match settings().devices.len() {
        0 => Err(settings().no_device),
        count => Ok(count as c_int),
    }
}

/// The device, if it is one.
pub(super) fn check_device(device: c_int) -> Result<c_int> {
    let count = count()?;
    if (0..count).contains(&device) { Ok(device) } else { Err(hipErrorInvalidDevice) }
}

/// Its number in the machine, which is the same in all processes.
fn number(device: c_int) -> Result<u32> {
    Ok(settings().devices[check_device(device)? as usize])
}

/// Threads of one wave.
pub(super) fn wave_lanes() -> c_int {
    if settings().architecture.starts_with("gfx9") { 64 } else { 32 }
}

pub(crate) unsafe fn hipInit(flags: c_uint) -> Result {
    if flags != 0 {
        return Err(hipErrorInvalidValue);
    }
    count().map(drop)
}

pub(crate) unsafe fn hipDriverGetVersion(version: *mut c_int) -> Result {
    // SAFETY: the caller's contract.
    unsafe { put(version, settings().version) }
}

pub(crate) unsafe fn hipRuntimeGetVersion(version: *mut c_int) -> Result {
    // SAFETY: the caller's contract.
    unsafe { put(version, settings().version) }
}

pub(crate) unsafe fn hipGetDeviceCount(place: *mut c_int) -> Result {
    let count = count();
    // SAFETY: the caller's contract.
    unsafe { put(place, count.unwrap_or(0)) }?;
    count.map(drop)
}

pub(crate) unsafe fn hipGetDevice(place: *mut c_int) -> Result {
    count()?;
    // SAFETY: the caller's contract.
    unsafe { put(place, current_device()) }
}

pub(crate) unsafe fn hipSetDevice(device: c_int) -> Result {
    CURRENT.set(check_device(device)?);
    Ok(())
}

pub(crate) unsafe fn hipDeviceGet(place: *mut hipDevice_t, ordinal: c_int) -> Result {
    let device = check_device(ordinal)?;
    // SAFETY: the caller's contract.
    unsafe { put(place, device) }
}

/// # Safety
/// `place` is null, which is refused, or has room for `len` bytes.
unsafe fn put_text(place: *mut c_char, len: c_int, text: &str) -> Result {
    let room = usize::try_from(len).unwrap_or(0);
    if place.is_null() || room <= text.len() {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: the caller's contract: text and zero fit, as was just seen.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), place.cast(), text.len());
        place.add(text.len()).write(0);
    }
    Ok(())
}

pub(crate) unsafe fn hipDeviceGetName(
    place: *mut c_char,
    len: c_int,
    device: hipDevice_t,
) -> Result {
    check_device(device)?;
    // SAFETY: the caller's contract.
    unsafe { put_text(place, len, NAME) }
}

/// Sixteen digits, as AMD's are.
fn uuid(device: c_int) -> Result<hipUUID> {
    let digits = format!("{:016x}", 0x6b76_6665_7272_7900 + u64::from(number(device)?));
    let mut bytes = [0; 16];
    bytes.iter_mut().zip(digits.bytes()).for_each(|(byte, digit)| *byte = digit as c_char);
    Ok(hipUUID { bytes })
}

pub(crate) unsafe fn hipDeviceGetUuid(place: *mut hipUUID, device: hipDevice_t) -> Result {
    let uuid = uuid(device)?;
    // SAFETY: the caller's contract.
    unsafe { put(place, uuid) }
}

pub(crate) unsafe fn hipDeviceGetPCIBusId(place: *mut c_char, len: c_int, device: c_int) -> Result {
    let text = format!("0000:{:02x}:00.0", 0xc1 + number(device)?);
    // SAFETY: the caller's contract.
    unsafe { put_text(place, len, &text) }
}

pub(crate) unsafe fn hipDeviceTotalMem(place: *mut usize, device: hipDevice_t) -> Result {
    check_device(device)?;
    // SAFETY: the caller's contract.
    unsafe { put(place, settings().memory_bytes as usize) }
}

pub(crate) unsafe fn hipDeviceGetAttribute(
    place: *mut c_int,
    attribute: hipDeviceAttribute_t,
    device: c_int,
) -> Result {
    let number = number(device)?;
    let value = match attribute {
        hipDeviceAttributeWarpSize => wave_lanes(),
        hipDeviceAttributeMultiprocessorCount | hipDeviceAttributePhysicalMultiProcessorCount => {
            MULTIPROCESSORS
        }
        hipDeviceAttributeMaxPitch => MAX_PITCH as c_int,
        hipDeviceAttributeMaxThreadsPerBlock => 1024,
        hipDeviceAttributeMaxThreadsPerMultiProcessor => 2048,
        hipDeviceAttributePciDomainId => 0,
        hipDeviceAttributePciBusId => 0xc1 + number as c_int,
        hipDeviceAttributePciDeviceId => 0,
        hipDeviceAttributeComputeCapabilityMajor => 9,
        hipDeviceAttributeComputeCapabilityMinor => 4,
        hipDeviceAttributeCanMapHostMemory
        | hipDeviceAttributeHostRegisterSupported
        | hipDeviceAttributeCanUseStreamWaitValue
        | hipDeviceAttributeUnifiedAddressing
        | hipDeviceAttributeMemoryPoolsSupported
        | hipDeviceAttributeVirtualMemoryManagementSupported
        | hipDeviceAttributeStreamPrioritiesSupported
        | hipDeviceAttributeConcurrentKernels
        | hipDeviceAttributeIsLargeBar => 1,
        hipDeviceAttributeMemoryPoolSupportedHandleTypes => {
            hipMemHandleTypePosixFileDescriptor as c_int
        }
        hipDeviceAttributeAsyncEngineCount => 8,
        hipDeviceAttributeNumberOfXccs => 8,
        hipDeviceAttributeIntegrated | hipDeviceAttributeManagedMemory => 0,
        _ => return Err(hipErrorInvalidValue),
    };
    // SAFETY: the caller's contract.
    unsafe { put(place, value) }
}

pub(crate) unsafe fn hipGetDevicePropertiesR0600(
    place: *mut hipDeviceProp_tR0600,
    device: c_int,
) -> Result {
    let number = number(device)?;
    if place.is_null() {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: zeros are valid for numbers, texts and null pointers, which is all there is.
    let mut properties: hipDeviceProp_tR0600 = unsafe { std::mem::zeroed() };
    // SAFETY: each text has 256 bytes.
    unsafe {
        put_text(properties.name.as_mut_ptr(), 256, NAME)?;
        put_text(properties.gcnArchName.as_mut_ptr(), 256, &settings().architecture)?;
    }
    properties.uuid = uuid(device)?;
    properties.totalGlobalMem = settings().memory_bytes as usize;
    properties.warpSize = wave_lanes();
    properties.multiProcessorCount = MULTIPROCESSORS;
    properties.maxThreadsPerBlock = 1024;
    properties.memPitch = MAX_PITCH;
    properties.pciBusID = 0xc1 + number as c_int;
    properties.unifiedAddressing = 1;
    properties.canMapHostMemory = 1;
    // SAFETY: the caller's contract.
    unsafe { put(place, properties) }
}

/// The layout of HIP 5, whatever the version.
pub(crate) unsafe fn hipGetDeviceProperties(place: *mut c_void, device: c_int) -> Result {
    /// Bytes of all of it.
    const LEN: usize = 792;
    check_device(device)?;
    let place: *mut c_char = place.cast();
    if place.is_null() {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: the caller's contract: so many bytes, and the two texts are inside.
    unsafe {
        place.write_bytes(0, LEN);
        put_text(place, 256, NAME)?;
        put_text(place.add(ARCHITECTURE_OFFSET_HIP5), 256, &settings().architecture)
    }
}

/// Every GPU is next to every other, unless they are to have no access.
fn can_access(device: c_int, peer: c_int) -> Result<bool> {
    check_device(device)?;
    check_device(peer)?;
    Ok(device != peer && settings().peers)
}

pub(crate) unsafe fn hipDeviceCanAccessPeer(
    place: *mut c_int,
    device: c_int,
    peer: c_int,
) -> Result {
    let can = can_access(device, peer)?;
    // SAFETY: the caller's contract.
    unsafe { put(place, c_int::from(can)) }
}

pub(crate) unsafe fn hipDeviceEnablePeerAccess(peer: c_int, flags: c_uint) -> Result {
    static ENABLED: Mutex<Option<HashSet<(c_int, c_int)>>> = Mutex::new(None);
    let device = check_device(current_device())?;
    if flags != 0 {
        return Err(hipErrorInvalidValue);
    }
    if !can_access(device, peer)? {
        return Err(hipErrorInvalidDevice);
    }
    let mut enabled = ENABLED.lock().unwrap_or_else(PoisonError::into_inner);
    if !enabled.get_or_insert_default().insert((device, peer)) {
        return Err(hipErrorPeerAccessAlreadyEnabled);
    }
    Ok(())
}

pub(crate) unsafe fn hipExtGetLinkTypeAndHopCount(
    device: c_int,
    peer: c_int,
    link: *mut u32,
    hops: *mut u32,
) -> Result {
    /// Of HSA: XGMI, and PCI Express.
    const XGMI: u32 = 4;
    const PCIE: u32 = 2;
    check_device(device)?;
    check_device(peer)?;
    if device == peer {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: the caller's contract.
    unsafe {
        put(link, if settings().peers { XGMI } else { PCIE })?;
        put(hops, 1)
    }
}
