//! The application's streams, which transfers wait for and which wait for transfers.

use hip_sys as sys;

use super::RocmDriver;
use super::functions::Failure;
use crate::error::{Error, Result};

impl RocmDriver {
    /// The application's stream, unless it is being captured: what we record or wait for there
    /// would become a part of the graph.
    pub(super) fn orderable(&self, handle: usize) -> Result<sys::hipStream_t> {
        let stream = handle as sys::hipStream_t;
        let mut status = sys::hipStreamCaptureStatusNone;
        // SAFETY: `Producer` and `Consumer` were promised a stream that lives; HIP writes one
        // number.
        unsafe { self.hip().hipStreamIsCapturing(stream, &mut status) }
            .map_err(|failure| self.not_orderable("stream", failure))?;
        if status == sys::hipStreamCaptureStatusNone {
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
            // HIP's word for a stream that it does not know is that its context is gone.
            lost @ Error::Lost { .. } if !failure.is(sys::hipErrorContextIsDestroyed) => lost,
            _ => Error::NotOrderable {
                device: self.info.to_string(),
                what,
                reason: format!(
                    "{}; it must belong to this device and not be part of a graph",
                    self.hip().describe(failure)
                ),
            },
        }
    }
}
