//! One device's place in this process: which device a thread uses and what errors it has pending,
//! and access between the devices.

use std::ffi::c_int;
use std::fmt::{self, Display};
use std::marker::PhantomData;
use std::sync::Arc;

use hip_sys as sys;

use super::functions::Failure;
use super::identity::can_access;
use super::library::Hip;
use crate::device::DeviceUuid;
use crate::error::{Error, Result};
use crate::peers::{OpenDevices, Peer, Refusals};

/// A device. HIP keeps one context for it, the one that PyTorch uses, too.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) hip: &'static Hip,
    pub(super) ordinal: c_int,
    uuid: DeviceUuid,
    refusals: Refusals,
}

/// Devices that are open in this process.
static OPENED: OpenDevices<Context> = OpenDevices::new();

impl Context {
    pub(super) fn new(hip: &'static Hip, ordinal: c_int, uuid: DeviceUuid) -> Arc<Self> {
        Arc::new(Self { hip, ordinal, uuid, refusals: Refusals::default() })
    }

    /// Makes the device the thread's, and lets the thread make calls that would break a graph
    /// capture of another thread; both end with the scope, and no error of ours stays pending.
    pub(super) fn enter(&self) -> Result<Scope<'_>> {
        let mut scope = Scope {
            context: self,
            mode: None,
            previous: None,
            _pending: PendingError::of_thread(self.hip),
        };
        let mut previous = 0;
        // SAFETY: HIP writes one number.
        unsafe { self.hip.hipGetDevice(&mut previous) }.map_err(|failure| self.error(failure))?;
        if previous != self.ordinal {
            // SAFETY: HIP counted this device when it was opened.
            unsafe { self.hip.hipSetDevice(self.ordinal) }
                .map_err(|failure| self.error(failure))?;
            scope.previous = Some(previous);
        }
        let mut mode = sys::hipStreamCaptureModeRelaxed;
        // SAFETY: HIP reads and writes one mode.
        unsafe { self.hip.hipThreadExchangeStreamCaptureMode(&mut mode) }
            .map_err(|failure| self.error(failure))?;
        scope.mode = Some(mode);
        Ok(scope)
    }

    pub(super) fn error(&self, failure: Failure) -> Error {
        self.hip.error(failure, self)
    }

    pub(super) fn allocation_error(
        &self,
        failure: Failure,
        kind: &'static str,
        bytes: u64,
    ) -> Error {
        if failure.is(sys::hipErrorOutOfMemory) {
            return Error::OutOfMemory { device: self.to_string(), kind, bytes };
        }
        self.error(failure)
    }

    /// Lets every pair of open devices that can reach each other's memory do so from kernels.
    pub(super) fn connect(self: &Arc<Self>) {
        OPENED.connect(self);
    }

    /// Whether `other` is not among the devices that this one was refused.
    pub(super) fn may_reach(&self, other: &DeviceUuid) -> bool {
        !self.refusals.contain(other)
    }
}

impl Peer for Context {
    fn uuid(&self) -> DeviceUuid {
        self.uuid
    }

    fn can_access(&self, peer: &Self) -> bool {
        can_access(self.hip, self.ordinal, peer.ordinal)
    }

    /// On a thread of its own: that access is enabled already is a failure for HIP, which would
    /// take the place of an error that the caller's thread has pending (FAILURES.md B15).
    fn enable_access(&self, peer: &Self) -> Result<()> {
        let enable = || {
            let _scope = self.enter()?;
            // SAFETY: this device is the thread's.
            match unsafe { self.hip.hipDeviceEnablePeerAccess(peer.ordinal, 0) } {
                Err(failure) if failure.is(sys::hipErrorPeerAccessAlreadyEnabled) => Ok(()),
                enabled => enabled.map_err(|failure| self.error(failure)),
            }
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().spawn_scoped(scope, enable);
            let thread = thread.map_err(|error| Error::Call {
                call: "hipDeviceEnablePeerAccess",
                device: self.to_string(),
                name: format!("no thread for it: {error}"),
                code: 0,
            })?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn refusals(&self) -> &Refusals {
        &self.refusals
    }
}

impl Display for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rocm:{}", self.ordinal)
    }
}

/// What HIP keeps for a thread until `hipGetLastError` is asked, and what the application then
/// blames on whatever it just did.
///
/// If the thread has no error pending when this is made, it has none when this is dropped, whatever
/// failed between. If it has one, it keeps one: HIP cannot set it, so a failure of ours takes its
/// place (and up to HIP 6 any call does: there the code of the last call is what is kept, also when
/// that succeeded).
#[derive(Debug)]
pub(super) struct PendingError<'a> {
    hip: &'a Hip,
    none_before: bool,
    /// It is the thread's.
    thread: PhantomData<*const ()>,
}

impl<'a> PendingError<'a> {
    pub(super) fn of_thread(hip: &'a Hip) -> Self {
        // SAFETY: only reads what is kept for the thread.
        let none_before = unsafe { hip.hipPeekAtLastError() }.is_ok();
        Self { hip, none_before, thread: PhantomData }
    }
}

impl Drop for PendingError<'_> {
    fn drop(&mut self) {
        if self.none_before {
            // SAFETY: forgets what is kept for the thread, which is ours.
            let _ = unsafe { self.hip.hipGetLastError() };
        }
    }
}

/// A device is this thread's until this is dropped.
#[derive(Debug)]
pub(crate) struct Scope<'a> {
    context: &'a Context,
    /// The thread's own capture mode.
    mode: Option<sys::hipStreamCaptureMode>,
    /// The thread's own device, if it is another one.
    previous: Option<c_int>,
    /// Ends last.
    _pending: PendingError<'a>,
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        let hip = self.context.hip;
        if let Some(mut mode) = self.mode {
            // SAFETY: the mode is what HIP gave for this thread.
            report(hip, unsafe { hip.hipThreadExchangeStreamCaptureMode(&mut mode) });
        }
        if let Some(previous) = self.previous {
            // SAFETY: HIP said that this was the thread's device.
            report(hip, unsafe { hip.hipSetDevice(previous) });
        }
    }
}

fn report(hip: &Hip, result: Result<(), Failure>) {
    if let Err(failure) = result {
        tracing::debug!("{}", hip.describe(failure));
    }
}
