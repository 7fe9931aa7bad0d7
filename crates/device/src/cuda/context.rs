//! The primary context of one device, and access between the devices of this process.

use std::fmt::{self, Display};
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys;

use super::library::{Cuda, Failure};
use crate::device::DeviceUuid;
use crate::error::{Error, Result};
use crate::peers::{OpenDevices, Peer, Refusals};

/// The primary context of a device, the one that the runtime API and PyTorch use, too.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) cuda: &'static Cuda,
    pub(super) device: sys::CUdevice,
    ordinal: u32,
    uuid: DeviceUuid,
    raw: sys::CUcontext,
    refusals: Refusals,
}

// SAFETY: a context is a name that the driver takes on any thread.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks what it changes.
unsafe impl Sync for Context {}

/// Contexts of the devices that are open in this process.
static OPENED: OpenDevices<Context> = OpenDevices::new();

impl Context {
    /// Retains the device's primary context until drop; it does not become current.
    pub(super) fn retain(
        cuda: &'static Cuda,
        device: sys::CUdevice,
        ordinal: u32,
        uuid: DeviceUuid,
    ) -> Result<Arc<Self>> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `device` comes from cuDeviceGet; `Drop` releases what is retained here.
        unsafe { cuda.cuDevicePrimaryCtxRetain(&mut raw, device) }
            .map_err(|failure| cuda.error(failure, format_args!("cuda:{ordinal}")))?;
        Ok(Arc::new(Self { cuda, device, ordinal, uuid, raw, refusals: Refusals::default() }))
    }

    /// Makes the context current for the thread, and lets the thread make calls that would break
    /// a graph capture of another thread; both end with the scope.
    pub(super) fn enter(&self) -> Result<Scope<'_>> {
        // SAFETY: `self` keeps the context retained.
        unsafe { self.cuda.cuCtxPushCurrent_v2(self.raw) }
            .map_err(|failure| self.error(failure))?;
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32;
        // SAFETY: the driver reads and writes one 32-bit mode; `u32` holds modes that are newer
        // than the bindings.
        let exchanged =
            unsafe { self.cuda.cuThreadExchangeStreamCaptureMode((&raw mut mode).cast()) };
        let scope =
            Scope { context: self, mode: exchanged.is_ok().then_some(mode), thread: PhantomData };
        match exchanged {
            Ok(()) => Ok(scope),
            Err(failure) => {
                drop(scope);
                Err(self.error(failure))
            }
        }
    }

    pub(super) fn error(&self, failure: Failure) -> Error {
        self.cuda.error(failure, self)
    }

    pub(super) fn allocation_error(
        &self,
        failure: Failure,
        kind: &'static str,
        bytes: u64,
    ) -> Error {
        if failure.is(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) {
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
        can_access(self.cuda, self.device, peer.device)
    }

    fn enable_access(&self, peer: &Self) -> Result<()> {
        let _scope = self.enter()?;
        // SAFETY: this context is current, and the caller keeps the other one retained.
        match unsafe { self.cuda.cuCtxEnablePeerAccess(peer.raw, 0) } {
            Err(failure) if failure.is(sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) => {
                Ok(())
            }
            enabled => enabled.map_err(|failure| self.error(failure)),
        }
    }

    fn refusals(&self) -> &Refusals {
        &self.refusals
    }
}

impl Display for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuda:{}", self.ordinal)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the one release for the one retain; every user of the context holds `self`.
        if let Err(failure) = unsafe { self.cuda.cuDevicePrimaryCtxRelease_v2(self.device) } {
            tracing::debug!(device = %self, "{}", self.cuda.describe(failure));
        }
    }
}

/// Whether kernels of `device` can be allowed to use memory of `peer`.
pub(super) fn can_access(cuda: &Cuda, device: sys::CUdevice, peer: sys::CUdevice) -> bool {
    let mut can = 0;
    // SAFETY: both devices come from cuDeviceGet; the driver writes one number.
    unsafe { cuda.cuDeviceCanAccessPeer(&mut can, device, peer) }.is_ok() && can != 0
}

/// A context is current for this thread until this is dropped.
#[derive(Debug)]
pub(crate) struct Scope<'a> {
    context: &'a Context,
    /// The thread's own capture mode.
    mode: Option<u32>,
    /// Both belong to the thread, so the scope stays on it.
    thread: PhantomData<*const ()>,
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        let cuda = self.context.cuda;
        if let Some(mut mode) = self.mode {
            // SAFETY: the mode is what the driver gave for this thread.
            let restored =
                unsafe { cuda.cuThreadExchangeStreamCaptureMode((&raw mut mode).cast()) };
            report(cuda, restored);
        }
        let mut popped = std::ptr::null_mut();
        // SAFETY: pops what `enter` pushed on this thread: scopes end in the reverse of their order.
        report(cuda, unsafe { cuda.cuCtxPopCurrent_v2(&mut popped) });
    }
}

fn report(cuda: &Cuda, result: Result<(), Failure>) {
    if let Err(failure) = result {
        tracing::debug!("{}", cuda.describe(failure));
    }
}
