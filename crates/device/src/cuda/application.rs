//! A stream of an application's, for tests of order.

use std::ffi::{c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys;

use super::context::Context;
use super::{CudaDriver, CudaOptions};
use crate::conformance::{ApplicationStream, CaptureMode};
use crate::driver::{Driver, Pinned};
use crate::error::Result;

/// Makes a stream on GPU `ordinal` as an application does: blocking, of normal priority, in the
/// primary context.
///
/// # Errors
/// The driver's.
pub fn application_stream(ordinal: u32) -> Result<impl ApplicationStream> {
    CudaStream::new(ordinal, None)
}

#[derive(Debug)]
struct CudaStream {
    ordinal: u32,
    driver: CudaDriver,
    context: Arc<Context>,
    stream: sys::CUstream,
    /// It is not ours to destroy.
    is_special: bool,
    /// How many holds have been opened; the stream waits for its number.
    word: Pinned,
    holds: AtomicU32,
}

impl CudaStream {
    /// One that is made, or one that there is.
    fn new(ordinal: u32, special: Option<usize>) -> Result<Self> {
        let driver =
            CudaDriver::open(ordinal, &CudaOptions { kernel: false, cache_directory: None })?;
        let context = Arc::clone(&driver.context);
        let scope = context.enter()?;
        let word = driver.allocate_pinned(size_of::<u32>() as u64)?;
        // SAFETY: just allocated, and nobody uses it yet.
        unsafe { word.host.cast::<u32>().write(0) };
        let mut stream = special.unwrap_or_default() as sys::CUstream;
        if special.is_none() {
            // SAFETY: the scope is entered; the driver writes one stream. Flags 0: a blocking stream.
            unsafe { driver.cuda().cuStreamCreateWithPriority(&mut stream, 0, 0) }
                .map_err(|failure| driver.error(failure))?;
        }
        drop(scope);
        Ok(Self {
            ordinal,
            driver,
            context,
            stream,
            is_special: special.is_some(),
            word,
            holds: AtomicU32::new(0),
        })
    }

    fn with<R>(&self, call: impl FnOnce(&super::library::Cuda) -> Result<R, super::Failure>) -> R {
        let _scope = self.context.enter().expect("a context");
        call(self.driver.cuda()).map_err(|failure| self.driver.error(failure)).expect("works")
    }
}

impl ApplicationStream for CudaStream {
    fn handle(&self) -> *mut c_void {
        self.stream.cast()
    }

    fn hold(&self) {
        let number = self.holds.fetch_add(1, Ordering::Relaxed) + 1;
        let flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as c_uint;
        // SAFETY: the stream and the word live as long as `self`.
        self.with(|cuda| unsafe {
            cuda.cuStreamWaitValue32_v2(self.stream, self.word.device, number, flags)
        });
    }

    fn open(&self) {
        // SAFETY: an aligned u32 that lives as long as `self` and that only this touches.
        let word = unsafe { &*self.word.host.cast::<AtomicU32>() };
        word.store(self.holds.load(Ordering::Relaxed), Ordering::Release);
    }

    unsafe fn fill(&self, addr: u64, byte: u8, len: u64) {
        // SAFETY: the caller's contract; the stream lives.
        self.with(|cuda| unsafe { cuda.cuMemsetD8Async(addr, byte, len as usize, self.stream) });
    }

    fn record(&self) -> *mut c_void {
        let _scope = self.context.enter().expect("a context");
        let event = self.driver.create_event().expect("an event");
        // SAFETY: both live.
        self.with(|cuda| unsafe { cuda.cuEventRecord(event.0, self.stream) });
        event.0.cast()
    }

    fn has_fired(&self, event: *mut c_void) -> bool {
        let _scope = self.context.enter().expect("a context");
        self.driver.fired(super::Event(event.cast())).expect("works")
    }

    fn special(&self, value: usize) -> Option<Box<dyn ApplicationStream>> {
        Some(Box::new(Self::new(self.ordinal, Some(value)).expect("as this one")))
    }

    fn begin_capture(&self) {
        self.begin_capture_in(CaptureMode::Global);
    }

    fn begin_capture_in(&self, mode: CaptureMode) {
        use sys::CUstreamCaptureMode as Mode;
        // Not inside a scope, which would relax what this thread may do.
        let mode = match mode {
            CaptureMode::Global => Mode::CU_STREAM_CAPTURE_MODE_GLOBAL,
            CaptureMode::ThreadLocal => Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            CaptureMode::Relaxed => Mode::CU_STREAM_CAPTURE_MODE_RELAXED,
        };
        // SAFETY: the stream lives.
        unsafe { self.driver.cuda().cuStreamBeginCapture_v2(self.stream, mode) }
            .map_err(|failure| self.driver.error(failure))
            .expect("works");
    }

    fn end_capture(&self) -> bool {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream lives; the driver writes one graph.
        let ended = unsafe { self.driver.cuda().cuStreamEndCapture(self.stream, &mut graph) };
        if !graph.is_null() {
            // SAFETY: made above, destroyed once.
            let _ = unsafe { self.driver.cuda().cuGraphDestroy(graph) };
        }
        ended.is_ok()
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        self.open();
        let Ok(_scope) = self.context.enter() else { return };
        // SAFETY: the stream lives, and is destroyed once; what it held was let go.
        let _ = unsafe { self.driver.cuda().cuStreamSynchronize(self.stream) };
        if !self.is_special {
            // SAFETY: as above.
            let _ = unsafe { self.driver.cuda().cuStreamDestroy_v2(self.stream) };
        }
        let _ = self.driver.free_pinned(self.word);
    }
}
