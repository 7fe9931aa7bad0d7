//! The application's streams, which transfers wait for and which wait for transfers.

use std::ffi::c_uint;

use cudarc::driver::sys;

use super::CudaDriver;
use super::library::Failure;
use crate::error::{Error, Result};

impl CudaDriver {
    /// The application's stream, unless it is being captured: what we record or wait for there
    /// would become a part of the graph.
    pub(super) fn orderable(&self, handle: usize) -> Result<sys::CUstream> {
        let stream = handle as sys::CUstream;
        // A number, because the driver may know states that are newer than the bindings.
        let mut status: c_uint = 0;
        // SAFETY: `Producer` and `Consumer` were promised a stream that lives; the driver writes
        // one 32-bit number.
        unsafe { self.cuda().cuStreamIsCapturing(stream, (&raw mut status).cast()) }
            .map_err(|failure| self.not_orderable("stream", failure))?;
        if status == 0 {
            return Ok(stream);
        }
        Err(Error::NotOrderable {
            device: self.info.to_string(),
            what: "stream",
            reason: "it is being captured into a graph; end the capture first".into(),
        })
    }

    pub(super) fn not_orderable(&self, what: &'static str, failure: Failure) -> Error {
        match self.error(failure) {
            lost @ Error::Lost { .. } => lost,
            _ => Error::NotOrderable {
                device: self.info.to_string(),
                what,
                reason: format!(
                    "{}; it must belong to this device and not be part of a graph",
                    self.cuda().describe(failure)
                ),
            },
        }
    }
}
