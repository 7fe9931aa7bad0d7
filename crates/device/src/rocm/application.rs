//! A stream of an application's, for tests of order.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use hip_sys as sys;

use super::context::Context;
use super::{Failure, Hip, RocmDriver, RocmOptions};
use crate::conformance::{ApplicationStream, CaptureMode};
use crate::driver::{Driver, Pinned};
use crate::error::Result;

/// Makes a stream on GPU `ordinal` as an application does: blocking, of normal priority.
///
/// # Errors
/// HIP's.
pub fn application_stream(ordinal: u32) -> Result<impl ApplicationStream> {
    RocmStream::new(ordinal, None)
}

#[derive(Debug)]
struct RocmStream {
    ordinal: u32,
    driver: RocmDriver,
    context: Arc<Context>,
    stream: sys::hipStream_t,
    /// It is not ours to destroy.
    is_special: bool,
    /// How many holds have been opened; the stream waits for its number.
    word: Pinned,
    holds: AtomicU32,
}

impl RocmStream {
    /// One that is made, or one that there is.
    fn new(ordinal: u32, special: Option<usize>) -> Result<Self> {
        let options = RocmOptions { kernel: false, ..RocmOptions::default() };
        let driver = RocmDriver::open(ordinal, &options)?;
        let context = Arc::clone(&driver.context);
        let scope = context.enter()?;
        let word = driver.allocate_pinned(size_of::<u32>() as u64)?;
        // SAFETY: just allocated, and nobody uses it yet.
        unsafe { word.host.cast::<u32>().write(0) };
        let mut stream = special.unwrap_or_default() as sys::hipStream_t;
        if special.is_none() {
            let flags = sys::hipStreamDefault;
            // SAFETY: the scope is entered; HIP writes one stream.
            unsafe { driver.hip().hipStreamCreateWithPriority(&mut stream, flags, 0) }
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

    fn with<R>(&self, call: impl FnOnce(&Hip) -> Result<R, Failure>) -> R {
        let _scope = self.context.enter().expect("enters");
        call(self.driver.hip()).map_err(|failure| self.driver.error(failure)).expect("works")
    }
}

impl ApplicationStream for RocmStream {
    fn handle(&self) -> *mut c_void {
        self.stream.cast()
    }

    fn hold(&self) {
        let number = self.holds.fetch_add(1, Ordering::Relaxed) + 1;
        let (word, flags) = (self.word.device as *mut c_void, sys::hipStreamWaitValueGte);
        // SAFETY: the stream and the word live as long as `self`.
        self.with(|hip| unsafe {
            hip.hipStreamWaitValue32(self.stream, word, number, flags, u32::MAX)
        });
    }

    fn open(&self) {
        // SAFETY: an aligned u32 that lives as long as `self` and that only this touches.
        let word = unsafe { &*self.word.host.cast::<AtomicU32>() };
        word.store(self.holds.load(Ordering::Relaxed), Ordering::Release);
    }

    unsafe fn fill(&self, addr: u64, byte: u8, len: u64) {
        let addr = addr as sys::hipDeviceptr_t;
        // SAFETY: the caller's contract; the stream lives.
        self.with(|hip| unsafe { hip.hipMemsetD8Async(addr, byte, len as usize, self.stream) });
    }

    fn record(&self) -> *mut c_void {
        let _scope = self.context.enter().expect("enters");
        let event = self.driver.create_event().expect("an event");
        // SAFETY: both live.
        self.with(|hip| unsafe { hip.hipEventRecord(event.0, self.stream) });
        event.0.cast()
    }

    fn has_fired(&self, event: *mut c_void) -> bool {
        let _scope = self.context.enter().expect("enters");
        self.driver.fired(super::Event(event.cast())).expect("works")
    }

    fn special(&self, value: usize) -> Option<Box<dyn ApplicationStream>> {
        Some(Box::new(Self::new(self.ordinal, Some(value)).expect("as this one")))
    }

    fn begin_capture(&self) {
        self.begin_capture_in(CaptureMode::Global);
    }

    fn begin_capture_in(&self, mode: CaptureMode) {
        // Not inside a scope, which would relax what this thread may do.
        let mode = match mode {
            CaptureMode::Global => sys::hipStreamCaptureModeGlobal,
            CaptureMode::ThreadLocal => sys::hipStreamCaptureModeThreadLocal,
            CaptureMode::Relaxed => sys::hipStreamCaptureModeRelaxed,
        };
        // SAFETY: the stream lives.
        unsafe { self.driver.hip().hipStreamBeginCapture(self.stream, mode) }
            .map_err(|failure| self.driver.error(failure))
            .expect("works");
    }

    fn end_capture(&self) -> bool {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream lives; HIP writes one graph.
        let ended = unsafe { self.driver.hip().hipStreamEndCapture(self.stream, &mut graph) };
        if !graph.is_null() {
            // SAFETY: made above, destroyed once.
            let _ = unsafe { self.driver.hip().hipGraphDestroy(graph) };
        }
        ended.is_ok()
    }
}

// SAFETY: a stream is a name that HIP takes on any thread; the word is only touched whole.
unsafe impl Send for RocmStream {}
// SAFETY: as above.
unsafe impl Sync for RocmStream {}

impl Drop for RocmStream {
    fn drop(&mut self) {
        self.open();
        let Ok(_scope) = self.context.enter() else { return };
        // SAFETY: the stream lives, and is destroyed once; what it held was let go.
        let _ = unsafe { self.driver.hip().hipStreamSynchronize(self.stream) };
        if !self.is_special {
            // SAFETY: as above.
            let _ = unsafe { self.driver.hip().hipStreamDestroy(self.stream) };
        }
        let _ = self.driver.free_pinned(self.word);
    }
}
