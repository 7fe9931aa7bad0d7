//! Streams, events, captures, copies.

use std::ffi::{c_int, c_uchar, c_uint, c_void};

use hip_sys::*;

use super::device::bind;
use crate::call::{Result, put};

super::forward! {
    fn hipStreamCreateWithPriority(place: *mut hipStream_t, flags: c_uint, priority: c_int)
        = cuStreamCreateWithPriority;
    fn hipStreamDestroy(stream: hipStream_t) = cuStreamDestroy_v2;
    fn hipStreamQuery(stream: hipStream_t) = cuStreamQuery;
    fn hipStreamSynchronize(stream: hipStream_t) = cuStreamSynchronize;
    fn hipStreamWaitEvent(stream: hipStream_t, event: hipEvent_t, flags: c_uint)
        = cuStreamWaitEvent;
    fn hipStreamWriteValue32(stream: hipStream_t, word: *mut c_void, value: u32, flags: c_uint)
        = cuStreamWriteValue32_v2;
    fn hipStreamIsCapturing(stream: hipStream_t, status: *mut hipStreamCaptureStatus)
        = cuStreamIsCapturing;
    fn hipStreamBeginCapture(stream: hipStream_t, mode: hipStreamCaptureMode)
        = cuStreamBeginCapture_v2;
    fn hipStreamEndCapture(stream: hipStream_t, graph: *mut hipGraph_t) = cuStreamEndCapture;
    fn hipGraphDestroy(graph: hipGraph_t) = cuGraphDestroy;
    fn hipEventDestroy(event: hipEvent_t) = cuEventDestroy_v2;
    fn hipEventRecord(event: hipEvent_t, stream: hipStream_t) = cuEventRecord;
    fn hipEventQuery(event: hipEvent_t) = cuEventQuery;
    fn hipEventSynchronize(event: hipEvent_t) = cuEventSynchronize;
    fn hipEventElapsedTime(milliseconds: *mut f32, start: hipEvent_t, stop: hipEvent_t)
        = cuEventElapsedTime;
    fn hipMemsetD8Async(dst: hipDeviceptr_t, value: c_uchar, count: usize, stream: hipStream_t)
        = cuMemsetD8Async;
    fn hipMemsetD32Async(dst: hipDeviceptr_t, value: c_int, count: usize, stream: hipStream_t)
        = cuMemsetD32Async;
}

/// Flags that both have, with one value; how far an event flushes is AMD's own.
const EVENT_FLAGS: c_uint = hipEventBlockingSync | hipEventDisableTiming | hipEventInterprocess;

pub(crate) unsafe fn hipEventCreateWithFlags(place: *mut hipEvent_t, flags: c_uint) -> Result {
    // SAFETY: the caller's contract.
    unsafe { bind()?.cuEventCreate(place, flags & EVENT_FLAGS) }
}

pub(crate) unsafe fn hipExtStreamCreateWithCUMask(
    _place: *mut hipStream_t,
    _mask_words: u32,
    _mask: *const u32,
) -> Result {
    Err(hipErrorNotSupported)
}

/// A stream does not tell; kvferry does not ask.
pub(crate) unsafe fn hipStreamGetDevice(_stream: hipStream_t, _place: *mut hipDevice_t) -> Result {
    Err(hipErrorNotSupported)
}

/// CUDA compares the whole word.
pub(crate) unsafe fn hipStreamWaitValue32(
    stream: hipStream_t,
    word: *mut c_void,
    value: u32,
    flags: c_uint,
    mask: u32,
) -> Result {
    if mask != u32::MAX {
        return Err(hipErrorNotSupported);
    }
    // SAFETY: the caller's contract.
    unsafe { bind()?.cuStreamWaitValue32_v2(stream, word, value, flags) }
}

/// The kind says nothing that the driver does not know from the addresses.
pub(crate) unsafe fn hipMemcpyAsync(
    dst: *mut c_void,
    src: *const c_void,
    bytes: usize,
    _kind: hipMemcpyKind,
    stream: hipStream_t,
) -> Result {
    // SAFETY: the caller's contract; the source is only read.
    unsafe { bind()?.cuMemcpyAsync(dst, src.cast_mut(), bytes, stream) }
}

pub(crate) unsafe fn hipMemcpyHtoDAsync(
    dst: hipDeviceptr_t,
    src: *const c_void,
    bytes: usize,
    stream: hipStream_t,
) -> Result {
    // SAFETY: the caller's contract.
    unsafe { hipMemcpyAsync(dst, src, bytes, hipMemcpyDefault, stream) }
}

pub(crate) unsafe fn hipMemcpyDtoHAsync(
    dst: *mut c_void,
    src: hipDeviceptr_t,
    bytes: usize,
    stream: hipStream_t,
) -> Result {
    // SAFETY: the caller's contract.
    unsafe { hipMemcpyAsync(dst, src, bytes, hipMemcpyDefault, stream) }
}

pub(crate) unsafe fn hipMemcpyDtoDAsync(
    dst: hipDeviceptr_t,
    src: hipDeviceptr_t,
    bytes: usize,
    stream: hipStream_t,
) -> Result {
    // SAFETY: the caller's contract.
    unsafe { hipMemcpyAsync(dst, src, bytes, hipMemcpyDefault, stream) }
}

/// CU_MEMORYTYPE_UNIFIED: the driver finds out what each side is.
const UNIFIED: hipMemoryType = 4;

#[expect(clippy::too_many_arguments, reason = "the arguments of the C function")]
pub(crate) unsafe fn hipMemcpy2DAsync(
    dst: *mut c_void,
    dst_pitch: usize,
    src: *const c_void,
    src_pitch: usize,
    width: usize,
    height: usize,
    _kind: hipMemcpyKind,
    stream: hipStream_t,
) -> Result {
    let copy = hip_Memcpy2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: UNIFIED,
        srcHost: std::ptr::null(),
        srcDevice: src.cast_mut(),
        srcArray: std::ptr::null_mut(),
        srcPitch: src_pitch,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: UNIFIED,
        dstHost: std::ptr::null_mut(),
        dstDevice: dst,
        dstArray: std::ptr::null_mut(),
        dstPitch: dst_pitch,
        WidthInBytes: width,
        Height: height,
    };
    // SAFETY: the caller's contract; the structure is CUDA_MEMCPY2D, field for field.
    unsafe { bind()?.cuMemcpy2DAsync_v2(&copy, stream) }
}

/// Memory types of host and device are the same numbers in both.
pub(crate) unsafe fn hipMemcpyParam2DAsync(
    copy: *const hip_Memcpy2D,
    stream: hipStream_t,
) -> Result {
    // SAFETY: the caller's contract.
    unsafe { bind()?.cuMemcpy2DAsync_v2(copy, stream) }
}

#[expect(clippy::too_many_arguments, reason = "the arguments of the C function")]
pub(crate) unsafe fn hipMemcpyBatchAsync(
    dsts: *mut *mut c_void,
    srcs: *mut *mut c_void,
    sizes: *mut usize,
    count: usize,
    _attributes: *mut hipMemcpyAttributes,
    _attribute_indices: *mut usize,
    _attribute_count: usize,
    failed: *mut usize,
    stream: hipStream_t,
) -> Result {
    for index in 0..count {
        // SAFETY: the caller's contract: the lists have `count` entries.
        unsafe {
            let (dst, src) = (dsts.add(index).read(), srcs.add(index).read());
            let bytes = sizes.add(index).read();
            if let Err(code) = hipMemcpyAsync(dst, src, bytes, hipMemcpyDefault, stream) {
                put(failed, index)?;
                return Err(code);
            }
        }
    }
    Ok(())
}
