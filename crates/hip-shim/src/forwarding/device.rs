//! Devices, whose primary contexts are made as they are first used, and the device of a thread.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use hip_sys::*;

use super::library::Cuda;
use crate::call::{Result, put};
use crate::settings::settings;

/// Of CUdevice_attribute.
pub(super) const WARP_SIZE: c_uint = 10;
pub(super) const CAPABILITY_MAJOR: c_uint = 75;
pub(super) const CAPABILITY_MINOR: c_uint = 76;

const MOST_DEVICES: usize = 64;

thread_local! {
    /// The thread's device.
    static CURRENT: Cell<c_int> = const { Cell::new(0) };
    /// Whose context is current; none at first.
    static BOUND: Cell<c_int> = const { Cell::new(-1) };
}

/// A primary context; a name that libcuda takes on any thread.
#[derive(Clone, Copy, Debug)]
struct Context(*mut c_void);

// SAFETY: as said there.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// NVIDIA's name for a device.
pub(super) fn device(ordinal: c_int) -> Result<c_int> {
    let mut device = 0;
    // SAFETY: libcuda writes one number, and refuses an ordinal that it does not have.
    unsafe { Cuda::load()?.cuDeviceGet(&mut device, ordinal) }?;
    Ok(device)
}

/// Retained for the life of the process, as HIP does.
fn context(ordinal: c_int) -> Result<Context> {
    static CONTEXTS: [OnceLock<Context>; MOST_DEVICES] = [const { OnceLock::new() }; MOST_DEVICES];
    let place = usize::try_from(ordinal).ok().and_then(|ordinal| CONTEXTS.get(ordinal));
    let place = place.ok_or(hipErrorInvalidDevice)?;
    if let Some(context) = place.get() {
        return Ok(*context);
    }
    let mut context = std::ptr::null_mut();
    // SAFETY: libcuda writes one context. Two threads may retain it; nobody releases it.
    unsafe { Cuda::load()?.cuDevicePrimaryCtxRetain(&mut context, device(ordinal)?) }?;
    Ok(*place.get_or_init(|| Context(context)))
}

/// Makes the context of the thread's device current, if it is not.
pub(super) fn bind() -> Result<&'static Cuda> {
    let cuda = Cuda::load()?;
    let current = CURRENT.get();
    if BOUND.get() != current {
        // SAFETY: the context is retained for good.
        unsafe { cuda.cuCtxSetCurrent(context(current)?.0) }?;
        BOUND.set(current);
    }
    Ok(cuda)
}

pub(super) fn attribute(attribute: c_uint, ordinal: c_int) -> Result<c_int> {
    let mut value = 0;
    // SAFETY: libcuda writes one number.
    unsafe { Cuda::load()?.cuDeviceGetAttribute(&mut value, attribute, device(ordinal)?) }?;
    Ok(value)
}

/// As NVRTC takes it.
fn architecture(ordinal: c_int) -> Result<String> {
    let (major, minor) =
        (attribute(CAPABILITY_MAJOR, ordinal)?, attribute(CAPABILITY_MINOR, ordinal)?);
    Ok(format!("sm_{}", major * 10 + minor))
}

pub(crate) unsafe fn hipInit(flags: c_uint) -> Result {
    if flags != 0 {
        return Err(hipErrorInvalidValue);
    }
    Cuda::load().map(drop)
}

pub(crate) unsafe fn hipDriverGetVersion(version: *mut c_int) -> Result {
    // SAFETY: the caller's contract.
    unsafe { put(version, settings().version) }
}

pub(crate) unsafe fn hipRuntimeGetVersion(version: *mut c_int) -> Result {
    // SAFETY: the caller's contract.
    unsafe { put(version, settings().version) }
}

pub(crate) unsafe fn hipGetDeviceCount(count: *mut c_int) -> Result {
    // SAFETY: the caller's contract.
    unsafe { Cuda::load()?.cuDeviceGetCount(count) }
}

pub(crate) unsafe fn hipGetDevice(place: *mut c_int) -> Result {
    // SAFETY: the caller's contract.
    unsafe { put(place, CURRENT.get()) }
}

/// The context follows with the next call that needs it: going back to a device that is not used
/// must not make one there.
pub(crate) unsafe fn hipSetDevice(ordinal: c_int) -> Result {
    device(ordinal)?;
    CURRENT.set(ordinal);
    Ok(())
}

pub(crate) unsafe fn hipDeviceGet(place: *mut hipDevice_t, ordinal: c_int) -> Result {
    device(ordinal)?;
    // HIP's name is the ordinal.
    // SAFETY: the caller's contract.
    unsafe { put(place, ordinal) }
}

pub(crate) unsafe fn hipDeviceGetName(
    place: *mut c_char,
    len: c_int,
    ordinal: hipDevice_t,
) -> Result {
    // SAFETY: the caller's contract.
    unsafe { Cuda::load()?.cuDeviceGetName(place, len, device(ordinal)?) }
}

pub(crate) unsafe fn hipDeviceGetUuid(place: *mut hipUUID, ordinal: hipDevice_t) -> Result {
    // SAFETY: the caller's contract.
    unsafe { Cuda::load()?.cuDeviceGetUuid_v2(place, device(ordinal)?) }
}

pub(crate) unsafe fn hipDeviceGetPCIBusId(
    place: *mut c_char,
    len: c_int,
    ordinal: c_int,
) -> Result {
    // SAFETY: the caller's contract.
    unsafe { Cuda::load()?.cuDeviceGetPCIBusId(place, len, device(ordinal)?) }
}

pub(crate) unsafe fn hipDeviceTotalMem(place: *mut usize, ordinal: hipDevice_t) -> Result {
    // SAFETY: the caller's contract.
    unsafe { Cuda::load()?.cuDeviceTotalMem_v2(place, device(ordinal)?) }
}

/// NVIDIA's number for an attribute of AMD's.
pub(super) fn cuda_attribute(attribute: hipDeviceAttribute_t) -> Option<c_uint> {
    Some(match attribute {
        hipDeviceAttributeMaxThreadsPerBlock => 1,
        hipDeviceAttributeWarpSize => WARP_SIZE,
        hipDeviceAttributeMaxPitch => 11,
        hipDeviceAttributeMultiprocessorCount => 16,
        hipDeviceAttributeIntegrated => 18,
        hipDeviceAttributeCanMapHostMemory => 19,
        hipDeviceAttributeConcurrentKernels => 31,
        hipDeviceAttributePciBusId => 33,
        hipDeviceAttributePciDeviceId => 34,
        hipDeviceAttributeMaxThreadsPerMultiProcessor => 39,
        hipDeviceAttributeAsyncEngineCount => 40,
        hipDeviceAttributeUnifiedAddressing => 41,
        hipDeviceAttributePciDomainId => 50,
        hipDeviceAttributeComputeCapabilityMajor => CAPABILITY_MAJOR,
        hipDeviceAttributeComputeCapabilityMinor => CAPABILITY_MINOR,
        hipDeviceAttributeStreamPrioritiesSupported => 78,
        hipDeviceAttributeManagedMemory => 83,
        // Of 64-bit ones, which newer drivers have wherever there are any.
        hipDeviceAttributeCanUseStreamWaitValue => 122,
        hipDeviceAttributeHostRegisterSupported => 99,
        hipDeviceAttributeVirtualMemoryManagementSupported => 102,
        hipDeviceAttributeMemoryPoolsSupported => 115,
        hipDeviceAttributeMemoryPoolSupportedHandleTypes => 119,
        _ => return None,
    })
}

pub(crate) unsafe fn hipDeviceGetAttribute(
    place: *mut c_int,
    asked: hipDeviceAttribute_t,
    ordinal: c_int,
) -> Result {
    let number = cuda_attribute(asked).ok_or(hipErrorInvalidValue)?;
    let value = attribute(number, ordinal)?;
    // SAFETY: the caller's contract.
    unsafe { put(place, value) }
}

/// Of the structure that kvferry reads one field of, those that are at hand.
pub(crate) unsafe fn hipGetDevicePropertiesR0600(
    place: *mut hipDeviceProp_tR0600,
    ordinal: c_int,
) -> Result {
    // SAFETY: zeros are valid for numbers, texts and null pointers, which is all there is.
    let mut properties: hipDeviceProp_tR0600 = unsafe { std::mem::zeroed() };
    let name = properties.name.as_mut_ptr();
    // SAFETY: the name has 256 bytes.
    unsafe { hipDeviceGetName(name, 256, ordinal) }?;
    let architecture = architecture(ordinal)?;
    let bytes = architecture.bytes().map(|byte| byte as c_char);
    properties.gcnArchName.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
    properties.warpSize = attribute(WARP_SIZE, ordinal)?;
    // SAFETY: the caller's contract.
    unsafe { put(place, properties) }
}

/// HIP 5 does not forward.
pub(crate) unsafe fn hipGetDeviceProperties(_place: *mut c_void, _ordinal: c_int) -> Result {
    Err(hipErrorNotSupported)
}

pub(crate) unsafe fn hipDeviceCanAccessPeer(
    place: *mut c_int,
    ordinal: c_int,
    peer: c_int,
) -> Result {
    // SAFETY: the caller's contract.
    unsafe { Cuda::load()?.cuDeviceCanAccessPeer(place, device(ordinal)?, device(peer)?) }
}

pub(crate) unsafe fn hipDeviceEnablePeerAccess(peer: c_int, flags: c_uint) -> Result {
    let cuda = bind()?;
    // SAFETY: the context is retained for good.
    unsafe { cuda.cuCtxEnablePeerAccess(context(peer)?.0, flags) }
}

pub(crate) unsafe fn hipExtGetLinkTypeAndHopCount(
    _device: c_int,
    _peer: c_int,
    _link: *mut u32,
    _hops: *mut u32,
) -> Result {
    Err(hipErrorNotSupported)
}

super::forward! {
    fn hipDeviceGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int)
        = cuCtxGetStreamPriorityRange;
    fn hipMemGetInfo(free: *mut usize, total: *mut usize) = cuMemGetInfo_v2;
}

/// A thread's own, whatever its device.
pub(crate) unsafe fn hipThreadExchangeStreamCaptureMode(mode: *mut hipStreamCaptureMode) -> Result {
    // SAFETY: the caller's contract.
    unsafe { Cuda::load()?.cuThreadExchangeStreamCaptureMode(mode) }
}
