//! Copies and fills, each as one piece of work of a stream.

use std::ffi::{c_int, c_uchar, c_void};

use hip_sys::*;

use super::memory::memory;
use super::stream::{Work, submit};
use crate::call::{Result, put};

/// Bytes that rows are apart at most, as a device's attribute says.
pub(super) const MAX_PITCH: usize = i32::MAX as usize;

/// `count` rows of `width` bytes.
#[derive(Clone, Copy, Debug)]
struct Rows {
    dst: usize,
    dst_pitch: usize,
    src: usize,
    src_pitch: usize,
    width: usize,
    count: usize,
}

impl Rows {
    /// # Safety
    /// Every row is readable at the source and writable at the destination.
    unsafe fn copy(self) {
        for row in 0..self.count {
            let src = self.src + row * self.src_pitch;
            let dst: *mut u8 =
                std::ptr::with_exposed_provenance_mut(self.dst + row * self.dst_pitch);
            // SAFETY: the caller's contract. No reference to these bytes exists: they are device
            // memory, or the application's, which leaves them alone until the stream is here.
            unsafe { std::ptr::copy(std::ptr::with_exposed_provenance(src), dst, self.width) }
        }
    }

    fn submit(self, stream: hipStream_t) -> Result {
        if self.width == 0 || self.count == 0 {
            return Ok(());
        }
        if self.src == 0 || self.dst == 0 {
            return Err(hipErrorInvalidValue);
        }
        for (addr, pitch) in [(self.dst, self.dst_pitch), (self.src, self.src_pitch)] {
            let len = (self.count - 1).saturating_mul(pitch).saturating_add(self.width);
            if memory().leaves_registered(addr as u64, len as u64) {
                return Err(hipErrorInvalidValue);
            }
        }
        // SAFETY: who calls a copy of HIP promises both ranges until the stream is past it.
        let copy = move || unsafe { self.copy() };
        submit(stream, Work::Run(Box::new(copy))).map(drop)
    }
}

fn row(dst: *mut c_void, src: *const c_void, width: usize) -> Rows {
    let (dst, src) = (dst.expose_provenance(), src.expose_provenance());
    Rows { dst, dst_pitch: 0, src, src_pitch: 0, width, count: 1 }
}

/// Refuses what a device is to use and does not know.
fn check_known(addr: *const c_void) -> Result {
    memory().known(addr).map(drop)
}

pub(crate) unsafe fn hipMemcpyAsync(
    dst: *mut c_void,
    src: *const c_void,
    bytes: usize,
    kind: hipMemcpyKind,
    stream: hipStream_t,
) -> Result {
    if kind > hipMemcpyDefault && kind != hipMemcpyDeviceToDeviceNoCU {
        return Err(hipErrorInvalidMemcpyDirection);
    }
    row(dst, src, bytes).submit(stream)
}

pub(crate) unsafe fn hipMemcpyHtoDAsync(
    dst: hipDeviceptr_t,
    src: *const c_void,
    bytes: usize,
    stream: hipStream_t,
) -> Result {
    check_known(dst)?;
    row(dst, src, bytes).submit(stream)
}

pub(crate) unsafe fn hipMemcpyDtoHAsync(
    dst: *mut c_void,
    src: hipDeviceptr_t,
    bytes: usize,
    stream: hipStream_t,
) -> Result {
    check_known(src)?;
    row(dst, src, bytes).submit(stream)
}

pub(crate) unsafe fn hipMemcpyDtoDAsync(
    dst: hipDeviceptr_t,
    src: hipDeviceptr_t,
    bytes: usize,
    stream: hipStream_t,
) -> Result {
    check_known(dst)?;
    check_known(src)?;
    row(dst, src, bytes).submit(stream)
}

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
    if src_pitch.min(dst_pitch) < width || src_pitch.max(dst_pitch) > MAX_PITCH {
        return Err(hipErrorInvalidPitchValue);
    }
    Rows { dst_pitch, src_pitch, count: height, ..row(dst, src, width) }.submit(stream)
}

pub(crate) unsafe fn hipMemcpyParam2DAsync(
    copy: *const hip_Memcpy2D,
    stream: hipStream_t,
) -> Result {
    if copy.is_null() {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: the caller's contract: it is not null, so it points to one.
    let copy = unsafe { copy.read() };
    let side = |kind, host: *const c_void, device: hipDeviceptr_t, x, y, pitch: usize| {
        let base = if kind == hipMemoryTypeHost { host } else { device.cast_const() };
        (base as *const u8).wrapping_add(y * pitch + x).cast::<c_void>()
    };
    let src = side(
        copy.srcMemoryType,
        copy.srcHost,
        copy.srcDevice,
        copy.srcXInBytes,
        copy.srcY,
        copy.srcPitch,
    );
    let dst = side(
        copy.dstMemoryType,
        copy.dstHost,
        copy.dstDevice,
        copy.dstXInBytes,
        copy.dstY,
        copy.dstPitch,
    );
    // SAFETY: the caller's contract.
    unsafe {
        hipMemcpy2DAsync(
            dst.cast_mut(),
            copy.dstPitch,
            src,
            copy.srcPitch,
            copy.WidthInBytes,
            copy.Height,
            hipMemcpyDefault,
            stream,
        )
    }
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
        let (dst, src, bytes) =
            unsafe { (dsts.add(index).read(), srcs.add(index).read(), sizes.add(index).read()) };
        if let Err(code) = row(dst, src, bytes).submit(stream) {
            // SAFETY: as above.
            unsafe { put(failed, index) }?;
            return Err(code);
        }
    }
    Ok(())
}

/// Fills with values as wide as they are.
fn fill<T: Copy + Send + 'static>(
    dst: hipDeviceptr_t,
    value: T,
    count: usize,
    stream: hipStream_t,
) -> Result {
    check_known(dst)?;
    let dst = dst.expose_provenance();
    let fill = move || {
        let dst: *mut T = std::ptr::with_exposed_provenance_mut(dst);
        // SAFETY: who calls a fill of HIP promises the range until the stream is past it, aligned
        // for its values.
        (0..count).for_each(|at| unsafe { dst.add(at).write(value) });
    };
    submit(stream, Work::Run(Box::new(fill))).map(drop)
}

pub(crate) unsafe fn hipMemsetD8Async(
    dst: hipDeviceptr_t,
    value: c_uchar,
    count: usize,
    stream: hipStream_t,
) -> Result {
    fill(dst, value, count, stream)
}

pub(crate) unsafe fn hipMemsetD32Async(
    dst: hipDeviceptr_t,
    value: c_int,
    count: usize,
    stream: hipStream_t,
) -> Result {
    if !dst.addr().is_multiple_of(4) {
        return Err(hipErrorInvalidValue);
    }
    fill(dst, value, count, stream)
}
