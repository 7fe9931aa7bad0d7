//! Events: places in streams that can be asked and waited for.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use hip_sys::*;

use super::capture;
use super::device::{check_device, current_device};
use super::stream::{Point, Stream, Work, streams};
use crate::call::{Result, put};

#[derive(Debug)]
struct Event {
    device: c_int,
    timing: bool,
    last: Mutex<Recorded>,
}

#[derive(Clone, Debug)]
enum Recorded {
    Never,
    At {
        point: Point,
        time: Arc<OnceLock<Instant>>,
    },
    /// Into the graph that the stream was being captured into.
    Captured(Arc<Stream>),
}

type Events = HashMap<usize, Arc<Event>>;

fn events() -> MutexGuard<'static, Events> {
    static EVENTS: LazyLock<Mutex<Events>> = LazyLock::new(Mutex::default);
    EVENTS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn find(handle: hipEvent_t) -> Result<Arc<Event>> {
    events().get(&handle.addr()).cloned().ok_or(hipErrorInvalidHandle)
}

impl Event {
    fn last(&self) -> MutexGuard<'_, Recorded> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where it was recorded; asking breaks the capture that it is part of.
    fn point(&self) -> Result<Option<Point>> {
        match &*self.last() {
            Recorded::Never => Ok(None),
            Recorded::At { point, .. } => Ok(Some(point.clone())),
            Recorded::Captured(stream) => {
                stream.invalidate_capture();
                Err(hipErrorCapturedEvent)
            }
        }
    }

    fn time(&self) -> Result<Instant> {
        if !self.timing {
            return Err(hipErrorInvalidHandle);
        }
        match &*self.last() {
            Recorded::At { time, .. } => time.get().copied().ok_or(hipErrorNotReady),
            _ => Err(hipErrorInvalidHandle),
        }
    }
}

pub(crate) unsafe fn hipEventCreateWithFlags(place: *mut hipEvent_t, flags: c_uint) -> Result {
    let device = check_device(current_device())?;
    let known = hipEventBlockingSync
        | hipEventDisableTiming
        | hipEventInterprocess
        | hipEventDisableSystemFence
        | hipEventReleaseToDevice
        | hipEventReleaseToSystem;
    if flags & !known != 0 {
        return Err(hipErrorInvalidValue);
    }
    let timing = flags & hipEventDisableTiming == 0;
    let event = Arc::new(Event { device, timing, last: Mutex::new(Recorded::Never) });
    let handle = Arc::as_ptr(&event).addr();
    events().insert(handle, event);
    // SAFETY: the caller's contract.
    unsafe { put(place, std::ptr::without_provenance_mut(handle)) }
}

pub(crate) unsafe fn hipEventDestroy(event: hipEvent_t) -> Result {
    events().remove(&event.addr()).map(drop).ok_or(hipErrorContextIsDestroyed)
}

pub(crate) unsafe fn hipEventRecord(event: hipEvent_t, stream: hipStream_t) -> Result {
    let event = find(event)?;
    let mut streams = streams();
    let stream = streams.find(stream)?;
    if stream.device != event.device {
        return Err(hipErrorInvalidHandle);
    }
    let recorded = if capture::add(&streams, &stream)? {
        Recorded::Captured(stream)
    } else {
        let time = Arc::new(OnceLock::new());
        let point = streams.submit(&stream, Work::Record(Arc::clone(&time)));
        Recorded::At { point, time }
    };
    *event.last() = recorded;
    Ok(())
}

pub(crate) unsafe fn hipEventQuery(event: hipEvent_t) -> Result {
    match find(event)?.point()? {
        Some(point) if !point.is_reached() => Err(hipErrorNotReady),
        _ => Ok(()),
    }
}

pub(crate) unsafe fn hipEventSynchronize(event: hipEvent_t) -> Result {
    find(event)?.point()?.map_or(Ok(()), |point| point.wait())
}

pub(crate) unsafe fn hipEventElapsedTime(
    milliseconds: *mut f32,
    start: hipEvent_t,
    stop: hipEvent_t,
) -> Result {
    let (start, stop) = (find(start)?.time()?, find(stop)?.time()?);
    let elapsed = match stop.checked_duration_since(start) {
        Some(elapsed) => elapsed.as_secs_f32(),
        None => -(start - stop).as_secs_f32(),
    };
    // SAFETY: the caller's contract.
    unsafe { put(milliseconds, elapsed * 1e3) }
}

pub(crate) unsafe fn hipStreamWaitEvent(
    stream: hipStream_t,
    event: hipEvent_t,
    flags: c_uint,
) -> Result {
    let event = find(event)?;
    if flags != 0 {
        return Err(hipErrorInvalidValue);
    }
    let mut streams = streams();
    let stream = streams.find(stream).map_err(|_| hipErrorInvalidHandle)?;
    let last = event.last().clone();
    match last {
        Recorded::Never => Ok(()),
        Recorded::Captured(_) if streams.is_legacy(&stream) => Err(hipErrorInvalidHandle),
        Recorded::Captured(origin) => {
            capture::join(&stream, &origin);
            Ok(())
        }
        // Between what is captured and what is not there is no order.
        Recorded::At { point, .. } if point.stream().is_capturing() || stream.is_capturing() => {
            Err(hipErrorStreamCaptureIsolation)
        }
        Recorded::At { point, .. } => {
            capture::add(&streams, &stream)?;
            streams.submit(&stream, Work::Wait(point));
            Ok(())
        }
    }
}
