//! Device memory for another process: what kind it is, and the exports of hipMalloc memory, HIP's
//! 64-byte handle.
//!
//! What AMD does otherwise than NVIDIA (read in ROCm/clr and rocm-systems):
//! - A handle holds the offset of the pointer it was made for, so it is always made for the base
//!   of the allocation (FAILURES.md B01).
//! - Each handle that is made may leak a little of the driver's memory (B06), so a unit's handle
//!   is made once, by `prepare_export`, and copied for every peer.
//! - HIP refuses to open a handle that its own process made, and knows that by the process id
//!   alone: the first processes of two containers count as one.
//! - Closing a mapping waits for all streams of its device; nothing else here does.
//! - A pointer's pool cannot be found: the attribute for it is not supported. Memory of a pool has
//!   an ordinary handle, or none, and then it is refused.

use std::ffi::c_char;

use hip_sys as sys;

use super::RocmDriver;
use super::context::Context;
use super::functions::Failure;
use crate::device::{Allocation, Export};
use crate::error::{Error, Result};
use crate::exports::{HANDLE_BYTES, no_descriptors, parse, tagged};
use crate::page_lock::LockedFile;

const _: () = assert!(size_of::<sys::hipIpcMemHandle_t>() == HANDLE_BYTES);

const NO_HANDLE: &str = "HIP gives no handle for it: it is managed, mapped from another process, of a \
     stream-ordered pool, or of the virtual memory API (PyTorch's expandable segments) where HIP lacks \
     the functions to share that; allocate with hipMalloc, in PyTorch with \
     PYTORCH_HIP_ALLOC_CONF=expandable_segments:False";

/// What a mapping of another process's memory is, and how it ends.
#[derive(Debug)]
pub(super) enum Opened {
    /// hipMalloc memory.
    Handle,
    /// Chunks of these lengths.
    Chunks(Vec<u64>),
    /// Host memory.
    Host(LockedFile<Context>),
}

impl RocmDriver {
    pub(super) fn export_handle(&self, allocation: &Allocation) -> Result<Export> {
        let mut handle = sys::hipIpcMemHandle_t { reserved: [0; HANDLE_BYTES] };
        // SAFETY: HIP writes one handle and refuses an address that it does not know.
        match unsafe { self.hip().hipIpcGetMemHandle(&mut handle, allocation.base as *mut _) } {
            Ok(()) => {}
            Err(failure)
                if failure.is(sys::hipErrorInvalidValue)
                    || failure.is(sys::hipErrorNotSupported) =>
            {
                return Err(self.not_exportable(allocation, NO_HANDLE));
            }
            Err(failure) => return Err(self.error(failure)),
        }
        let bytes = tagged(handle.reserved.map(|byte| byte as u8));
        Ok(Export::Handle { bytes, len: allocation.len })
    }

    pub(super) fn not_exportable(&self, unit: &Allocation, reason: impl Into<String>) -> Error {
        let (device, reason) = (self.info.to_string(), reason.into());
        Error::NotExportable { device, base: unit.base, reason }
    }

    pub(super) fn bad_export(&self, reason: impl Into<String>) -> Error {
        Error::BadExport { device: self.info.to_string(), reason: reason.into() }
    }

    /// What a failure to make a descriptor for `unit` means.
    pub(super) fn descriptor_error(&self, failure: Failure, unit: &Allocation) -> Error {
        if no_descriptors() {
            let device = self.info.to_string();
            return Error::OutOfDescriptors { call: failure.call, device };
        }
        match self.error(failure) {
            lost @ Error::Lost { .. } => lost,
            _ => self.not_exportable(unit, self.hip().describe(failure)),
        }
    }

    /// What a failure to open an export means.
    pub(super) fn open_error(&self, failure: Failure, bytes: u64) -> Error {
        let of_the_export = [
            sys::hipErrorInvalidValue,
            sys::hipErrorInvalidDevicePointer,
            sys::hipErrorInvalidHandle,
            sys::hipErrorInvalidContext,
            sys::hipErrorInvalidDevice,
            sys::hipErrorMapFailed,
            sys::hipErrorNotSupported,
            sys::hipErrorOperatingSystem,
            sys::hipErrorPeerAccessUnsupported,
            sys::hipErrorNotFound,
            sys::hipErrorSharedObjectSymbolNotFound,
        ];
        if !of_the_export.into_iter().any(|code| failure.is(code)) {
            return self.context.allocation_error(failure, "device", bytes);
        }
        if no_descriptors() {
            let device = self.info.to_string();
            return Error::OutOfDescriptors { call: failure.call, device };
        }
        let said = self.hip().describe(failure);
        if failure.is(sys::hipErrorInvalidContext) {
            return self.bad_export(format!(
                "{said}: the process that exported the memory has the same process id in another \
                 container, and HIP takes the two for one; share the process ids of the host \
                 (--pid=host), or start this process as another than the container's first"
            ));
        }
        self.bad_export(format!(
            "{said}; the memory was freed, its process has ended, or this process cannot see its GPU"
        ))
    }

    pub(super) fn open_handle(&self, bytes: &[u8], len: u64) -> Result<(u64, Opened)> {
        let handle = parse(bytes, &self.info.to_string())?.map(|byte| byte as c_char);
        let handle = sys::hipIpcMemHandle_t { reserved: handle };
        let flags = self.hip().ipc_open_flags();
        let mut addr = std::ptr::null_mut();
        // SAFETY: HIP checks the handle; it maps at an address of its own choice.
        unsafe { self.hip().hipIpcOpenMemHandle(&mut addr, handle, flags) }.map_err(|failure| {
            if failure.is(sys::hipErrorAlreadyMapped) {
                return Error::AlreadyMapped { device: self.info.to_string(), bytes: len };
            }
            self.open_error(failure, len)
        })?;
        if let Err(reason) = self.check_mapping(addr as u64, len) {
            // SAFETY: opened above, closed once.
            let _ = unsafe { self.hip().hipIpcCloseMemHandle(addr) };
            return Err(self.bad_export(reason));
        }
        Ok((addr as u64, Opened::Handle))
    }

    /// Ends what one of the `open` functions made.
    pub(super) fn close_opened(&self, addr: u64, len: u64, opened: Opened) -> Result<()> {
        match opened {
            // SAFETY: the `Mapping` that owned the address is being dropped, once.
            Opened::Handle => unsafe { self.hip().hipIpcCloseMemHandle(addr as *mut _) }
                .map_err(|failure| self.error(failure)),
            Opened::Chunks(chunks) => self.close_chunks(addr, len, &chunks),
            Opened::Host(file) => file.close(),
        }
    }

    /// Whether the length that came with the handle is true: it may be a lie of the exporter.
    fn check_mapping(&self, addr: u64, len: u64) -> Result<(), String> {
        let Ok(Some((base, mapped))) = self.address_range(addr) else {
            return Err(format!("HIP does not know {addr:#x}, where it mapped the memory"));
        };
        let end = base.saturating_add(mapped);
        match addr.checked_add(len) {
            Some(last) if addr >= base && last <= end => Ok(()),
            _ => Err(format!(
                "{len} bytes were announced, {} bytes were mapped",
                end.saturating_sub(addr)
            )),
        }
    }
}
