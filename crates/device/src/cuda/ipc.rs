//! Device memory for another process: what kind it is, and the exports of cudaMalloc memory, the
//! driver's 64-byte handle.

use std::ffi::c_char;
use std::os::fd::{AsRawFd, OwnedFd};

use cudarc::driver::sys;

use super::CudaDriver;
use super::context::Context;
use super::library::Failure;
use super::pool::Pool;
use crate::device::{Allocation, Export};
use crate::error::{Error, Result};
use crate::exports::{HANDLE_BYTES, no_descriptors, parse, tagged};
use crate::page_lock::LockedFile;

const _: () = assert!(size_of::<sys::CUipcMemHandle>() == HANDLE_BYTES);

/// What a mapping of another process's memory is, and how it ends.
#[derive(Debug)]
pub(super) enum Opened {
    /// cudaMalloc memory.
    Handle,
    /// Chunks of these lengths.
    Chunks(Vec<u64>),
    /// Memory of a pool, which was imported for it.
    Pool(Pool),
    /// Host memory.
    Host(LockedFile<Context>),
}

/// Who can make an export of an allocation.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Legacy,
    Virtual,
    Pool(Pool),
    Other,
}

impl CudaDriver {
    fn kind(&self, addr: u64) -> Result<Kind> {
        if self.is_chunk(addr) {
            return Ok(Kind::Virtual);
        }
        if self.attributes(addr)?.is_some_and(|found| found.legacy_ipc != 0) {
            return Ok(Kind::Legacy);
        }
        Ok(self.pool_of(addr).map_or(Kind::Other, Kind::Pool))
    }

    pub(super) fn prepare(&self, unit: &Allocation) -> Result<Option<Export>> {
        match self.kind(unit.base)? {
            Kind::Legacy => self.export_handle(unit).map(Some),
            Kind::Virtual => self.check_chunks(unit).map(|()| None),
            // Nothing tells whether a pool can be exported, so it is exported.
            Kind::Pool(pool) => self.export_pool(pool, unit).map(|_| None),
            Kind::Other => Err(self.no_handle(unit)),
        }
    }

    pub(super) fn export_unit_of(&self, unit: &Allocation) -> Result<Export> {
        match self.kind(unit.base)? {
            Kind::Legacy => self.export_handle(unit),
            Kind::Virtual => self.export_chunks(unit),
            Kind::Pool(pool) => self.export_pool(pool, unit),
            Kind::Other => Err(self.no_handle(unit)),
        }
    }

    fn export_handle(&self, allocation: &Allocation) -> Result<Export> {
        let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
        // SAFETY: the driver writes one handle and refuses an address that it does not know.
        match unsafe { self.cuda().cuIpcGetMemHandle(&mut handle, allocation.base) } {
            Ok(()) => {}
            Err(failure)
                if failure.is(sys::CUresult::CUDA_ERROR_INVALID_VALUE)
                    || failure.is(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED) =>
            {
                return Err(self.no_handle(allocation));
            }
            Err(failure) => return Err(self.error(failure)),
        }
        let bytes = tagged(handle.reserved.map(|byte| byte as u8));
        Ok(Export::Handle { bytes, len: allocation.len })
    }

    fn no_handle(&self, allocation: &Allocation) -> Error {
        let reason = "the driver gives no handle for it: it is managed, or mapped from another \
                      process; allocate with cudaMalloc";
        self.not_exportable(allocation, reason)
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
            _ => self.not_exportable(unit, self.cuda().describe(failure)),
        }
    }

    /// What a failure to open an export means.
    pub(super) fn open_error(&self, failure: Failure, bytes: u64) -> Error {
        use sys::CUresult::*;
        let of_the_export = [
            CUDA_ERROR_INVALID_VALUE,
            CUDA_ERROR_INVALID_HANDLE,
            CUDA_ERROR_INVALID_CONTEXT,
            CUDA_ERROR_INVALID_DEVICE,
            CUDA_ERROR_MAP_FAILED,
            CUDA_ERROR_NOT_SUPPORTED,
            CUDA_ERROR_NOT_PERMITTED,
            CUDA_ERROR_OPERATING_SYSTEM,
            CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
            CUDA_ERROR_TOO_MANY_PEERS,
            CUDA_ERROR_NOT_FOUND,
        ];
        if !of_the_export.into_iter().any(|code| failure.is(code)) {
            return self.allocation_error(failure, "device", bytes);
        }
        if no_descriptors() {
            let device = self.info.to_string();
            return Error::OutOfDescriptors { call: failure.call, device };
        }
        self.bad_export(format!(
            "{}; the memory was freed, its process has ended, another library of this process exported \
             it, or this process cannot see its GPU",
            self.cuda().describe(failure)
        ))
    }

    pub(super) fn open_handle(&self, bytes: &[u8], len: u64) -> Result<(u64, Opened)> {
        let handle = parse(bytes, &self.info.to_string())?.map(|byte| byte as c_char);
        let handle = sys::CUipcMemHandle { reserved: handle };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut addr = 0;
        // SAFETY: the driver checks the handle; it maps at an address of its own choice.
        unsafe { self.cuda().cuIpcOpenMemHandle_v2(&mut addr, handle, flags) }.map_err(
            |failure| {
                if failure.is(sys::CUresult::CUDA_ERROR_ALREADY_MAPPED) {
                    return Error::AlreadyMapped { device: self.info.to_string(), bytes: len };
                }
                self.open_error(failure, len)
            },
        )?;
        if let Err(reason) = self.check_mapping(addr, len) {
            // SAFETY: opened above, closed once.
            let _ = unsafe { self.cuda().cuIpcCloseMemHandle(addr) };
            return Err(self.bad_export(reason));
        }
        Ok((addr, Opened::Handle))
    }

    /// Ends what one of the `open` functions made.
    pub(super) fn close_opened(&self, addr: u64, len: u64, opened: Opened) -> Result<()> {
        match opened {
            // SAFETY: the `Mapping` that owned the address is being dropped, once.
            Opened::Handle => unsafe { self.cuda().cuIpcCloseMemHandle(addr) }
                .map_err(|failure| self.error(failure)),
            Opened::Chunks(chunks) => self.close_chunks(addr, len, &chunks),
            Opened::Pool(pool) => self.close_pool(addr, pool),
            Opened::Host(file) => file.close(),
        }
    }

    /// Whether the length that came with the handle is true: it may be a lie of the exporter.
    pub(super) fn check_mapping(&self, addr: u64, len: u64) -> Result<(), String> {
        let Ok(Some(found)) = self.attributes(addr) else {
            return Err(format!("the driver does not know {addr:#x}, where it mapped the memory"));
        };
        let end = found.start.saturating_add(found.len as u64);
        match addr.checked_add(len) {
            Some(last) if addr >= found.start && last <= end => Ok(()),
            _ => Err(format!(
                "{len} bytes were announced, {} bytes were mapped",
                end.saturating_sub(addr)
            )),
        }
    }
}

/// A descriptor that the driver takes as a pointer.
pub(super) fn raw(fd: &OwnedFd) -> *mut std::ffi::c_void {
    std::ptr::without_provenance_mut(fd.as_raw_fd() as usize)
}
