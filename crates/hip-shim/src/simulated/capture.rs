//! Streams that are being captured into graphs, and what must not be called meanwhile. Graphs are
//! empty: nobody here launches one.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::thread::ThreadId;

use hip_sys::*;

use super::stream::{Stream, Streams, streams};
use crate::call::{Result, put};

#[derive(Debug)]
pub(super) struct Capture {
    mode: hipStreamCaptureMode,
    thread: ThreadId,
    valid: bool,
    /// Of a stream that waited for an event of one that is being captured: that one.
    origin: Option<Arc<Stream>>,
}

thread_local! {
    /// What this thread must not call while streams are being captured.
    static MODE: Cell<hipStreamCaptureMode> = const { Cell::new(hipStreamCaptureModeGlobal) };
}

impl Stream {
    fn with_capture<R>(&self, look: impl FnOnce(&mut Option<Capture>) -> R) -> R {
        look(&mut self.capture.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn is_capturing(&self) -> bool {
        self.with_capture(|capture| capture.is_some())
    }

    pub(super) fn invalidate_capture(&self) {
        self.with_capture(|capture| {
            if let Some(capture) = capture {
                capture.valid = false;
            }
        });
    }
}

/// Refuses what may break a capture of another, and breaks the capture, as AMD's library does;
/// a thread in relaxed mode may call everything.
pub(super) fn refuse_unsafe() -> Result {
    let mode = MODE.get();
    if mode == hipStreamCaptureModeRelaxed {
        return Ok(());
    }
    let here = std::thread::current().id();
    let mut broken = false;
    for stream in streams().all() {
        stream.with_capture(|capture| {
            let Some(capture) = capture else { return };
            let of_this_thread =
                capture.thread == here && capture.mode != hipStreamCaptureModeRelaxed;
            let global =
                mode == hipStreamCaptureModeGlobal && capture.mode == hipStreamCaptureModeGlobal;
            if of_this_thread || global {
                capture.valid = false;
                broken = true;
            }
        });
    }
    if broken { Err(hipErrorStreamCaptureUnsupported) } else { Ok(()) }
}

/// Whether work for the stream goes into a graph.
pub(super) fn add(streams: &Streams, stream: &Arc<Stream>) -> Result<bool> {
    if streams.is_legacy(stream) {
        // It would wait for the streams that are being captured.
        let mut broken = false;
        for other in streams.blocking(stream.device).filter(|other| other.is_capturing()) {
            other.invalidate_capture();
            broken = true;
        }
        return if broken { Err(hipErrorStreamCaptureImplicit) } else { Ok(false) };
    }
    stream.with_capture(|capture| match capture {
        None => Ok(false),
        Some(Capture { valid: true, .. }) => Ok(true),
        Some(_) => Err(hipErrorStreamCaptureInvalidated),
    })
}

/// Refuses to wait for a stream whose work does not run.
pub(super) fn refuse_wait(stream: &Stream) -> Result {
    if stream.is_capturing() {
        stream.invalidate_capture();
        return Err(hipErrorStreamCaptureUnsupported);
    }
    Ok(())
}

/// A stream that waits for an event of `origin`, which is being captured, is captured with it.
pub(super) fn join(stream: &Arc<Stream>, origin: &Arc<Stream>) {
    let found = origin.with_capture(|capture| capture.as_ref().map(|it| (it.mode, it.thread)));
    let Some((mode, thread)) = found.filter(|_| !Arc::ptr_eq(stream, origin)) else { return };
    stream.with_capture(|capture| {
        capture.get_or_insert(Capture {
            mode,
            thread,
            valid: true,
            origin: Some(Arc::clone(origin)),
        });
    });
}

/// Ends what the stream is part of, when it is destroyed.
pub(super) fn forget(stream: &Stream) {
    stream.with_capture(|capture| *capture = None);
}

pub(crate) unsafe fn hipThreadExchangeStreamCaptureMode(mode: *mut hipStreamCaptureMode) -> Result {
    if mode.is_null() {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: the caller's contract: it is not null, so it points to a mode.
    let wanted = unsafe { mode.read() };
    if wanted > hipStreamCaptureModeRelaxed {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: as above.
    unsafe { put(mode, MODE.replace(wanted)) }
}

pub(crate) unsafe fn hipStreamBeginCapture(
    handle: hipStream_t,
    mode: hipStreamCaptureMode,
) -> Result {
    let mut streams = streams();
    let stream = streams.find(handle)?;
    if streams.is_legacy(&stream) {
        return Err(hipErrorStreamCaptureUnsupported);
    }
    if mode > hipStreamCaptureModeRelaxed {
        return Err(hipErrorInvalidValue);
    }
    stream.with_capture(|capture| {
        if capture.is_some() {
            return Err(hipErrorIllegalState);
        }
        let thread = std::thread::current().id();
        *capture = Some(Capture { mode, thread, valid: true, origin: None });
        Ok(())
    })
}

pub(crate) unsafe fn hipStreamEndCapture(handle: hipStream_t, place: *mut hipGraph_t) -> Result {
    /// Graphs have numbers, and nothing else.
    static GRAPHS: AtomicUsize = AtomicUsize::new(1);
    let mut streams = streams();
    let stream = streams.find(handle)?;
    let valid = stream.with_capture(|capture| match capture {
        None => Err(hipErrorIllegalState),
        Some(Capture { origin: Some(_), .. }) => Err(hipErrorStreamCaptureUnmatched),
        Some(found)
            if found.mode != hipStreamCaptureModeRelaxed
                && found.thread != std::thread::current().id() =>
        {
            Err(hipErrorStreamCaptureWrongThread)
        }
        Some(found) => {
            let valid = found.valid;
            *capture = None;
            Ok(valid)
        }
    })?;
    // Nothing here joins a stream back, so whoever joined is left over.
    let mut joined = false;
    for other in streams.all() {
        other.with_capture(|capture| {
            let ours = |it: &Capture| it.origin.as_ref().is_some_and(|it| Arc::ptr_eq(it, &stream));
            if capture.as_ref().is_some_and(ours) {
                *capture = None;
                joined = true;
            }
        });
    }
    let ended = match (valid, joined) {
        (true, false) => Ok(GRAPHS.fetch_add(1, Ordering::Relaxed)),
        (true, true) => Err(hipErrorStreamCaptureUnjoined),
        (false, _) => Err(hipErrorStreamCaptureInvalidated),
    };
    let graph = ended.unwrap_or(0);
    // SAFETY: the caller's contract.
    unsafe { put(place, std::ptr::without_provenance_mut(graph)) }?;
    ended.map(drop)
}

pub(crate) unsafe fn hipStreamIsCapturing(
    handle: hipStream_t,
    place: *mut hipStreamCaptureStatus,
) -> Result {
    let mut streams = streams();
    let stream = streams.find(handle)?;
    if streams.is_legacy(&stream)
        && streams.blocking(stream.device).any(|stream| stream.is_capturing())
    {
        return Err(hipErrorStreamCaptureImplicit);
    }
    let status = stream.with_capture(|capture| match capture {
        None => hipStreamCaptureStatusNone,
        Some(Capture { valid: true, .. }) => hipStreamCaptureStatusActive,
        Some(_) => hipStreamCaptureStatusInvalidated,
    });
    // SAFETY: the caller's contract.
    unsafe { put(place, status) }
}

pub(crate) unsafe fn hipGraphDestroy(graph: hipGraph_t) -> Result {
    if graph.is_null() { Err(hipErrorInvalidValue) } else { Ok(()) }
}
