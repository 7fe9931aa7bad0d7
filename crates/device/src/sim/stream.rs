//! Streams of an application that runs beside kvferry on a simulated GPU.

use std::ffi::c_void;
use std::sync::Arc;

use super::control::SimControl;
use crate::conformance::ApplicationStream;
use crate::queue::CopyDescriptor;

/// A stream of the application's: work that transfers wait for, or that waits for transfers.
#[derive(Debug)]
pub struct SimStream {
    stream: usize,
    gate: usize,
    control: Arc<SimControl>,
}

impl SimStream {
    pub(super) fn new(control: Arc<SimControl>) -> Self {
        let executor = &control.executor;
        Self { stream: executor.create_stream(), gate: executor.create_event(), control }
    }
}

impl ApplicationStream for SimStream {
    fn handle(&self) -> *mut c_void {
        self.stream as *mut c_void
    }

    fn hold(&self) {
        self.control.executor.arm(self.gate);
        self.control.executor.wait(self.stream, self.gate);
    }

    fn open(&self) {
        self.control.executor.fire(self.gate);
    }

    unsafe fn fill(&self, addr: u64, byte: u8, len: u64) {
        let bytes: &'static [u8] = vec![byte; len as usize].leak();
        let copy = CopyDescriptor { src: bytes.as_ptr() as u64, dst: addr, len };
        // SAFETY: the caller's contract; the source stays.
        unsafe { self.control.executor.copy(self.stream, copy) };
    }

    fn record(&self) -> *mut c_void {
        let event = self.control.executor.create_event();
        self.control.executor.record(event, self.stream);
        event as *mut c_void
    }

    fn has_fired(&self, event: *mut c_void) -> bool {
        self.control.executor.fired(event as usize)
    }

    fn begin_capture(&self) {
        self.control.capturing().insert(self.stream);
    }

    fn end_capture(&self) -> bool {
        // Nothing else may have been recorded into the stream, or waits in it.
        self.control.capturing().remove(&self.stream) && self.control.executor.is_empty(self.stream)
    }
}
