//! Memory of hipMemCreate and hipMemMap, as PyTorch's expandable segments are: it has no handle of
//! its own, but every chunk has a file descriptor.
//!
//! Descriptors are made when a peer asks and closed as soon as they are sent or mapped: a cache of
//! 60 GB is 3,000 of PyTorch's 20 MiB chunks.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};

use hip_sys as sys;

use super::RocmDriver;
use super::functions::Failure;
use super::ipc::Opened;
use super::library::{Hip, Version};
use crate::chunks;
use crate::device::{Allocation, Chunk, Export};
use crate::driver::Driver;
use crate::error::{Error, Result};
use crate::exports::adopt;

const DESCRIPTOR: sys::hipMemAllocationHandleType = sys::hipMemHandleTypePosixFileDescriptor;

/// From here on hipMemImportFromShareableHandle takes the descriptor in the place of a pointer;
/// before, a pointer to it (rocm-systems #759, and Mooncake #1550 for the version).
const IMPORTS_BY_VALUE: Version = Version { major: 7, minor: 1, patch: 0 };

/// From here on hipMemRetainAllocationHandle takes a reference, surely. Before February 2026
/// (rocm-systems #2696; 7.2 is older) it takes none, and to give back what was not taken would
/// free memory that is in use.
const RETAIN_TAKES_A_REFERENCE: Version = Version { major: 7, minor: 13, patch: 0 };

/// The physical memory behind an address.
struct Physical {
    hip: &'static Hip,
    handle: sys::hipMemGenericAllocationHandle_t,
    /// There is a reference to give back when dropped.
    referenced: bool,
}

impl Physical {
    /// Of memory that [`RocmDriver::is_chunk`]: for other memory the call crashes before HIP of
    /// May 2026 (rocm-systems #5807).
    fn behind(hip: &'static Hip, addr: u64) -> Result<Self, Failure> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: HIP writes one handle; the address is that of a chunk, says the caller.
        unsafe { hip.hipMemRetainAllocationHandle(&mut handle, addr as *mut c_void) }?;
        Ok(Self { hip, handle, referenced: hip.version >= RETAIN_TAKES_A_REFERENCE })
    }

    fn import(hip: &'static Hip, fd: &OwnedFd) -> Result<Self, Failure> {
        let mut number: c_int = fd.as_raw_fd();
        let shared = if hip.version >= IMPORTS_BY_VALUE {
            std::ptr::without_provenance_mut(number as usize)
        } else {
            (&raw mut number).cast()
        };
        let mut handle = std::ptr::null_mut();
        // SAFETY: HIP writes one handle, and takes the descriptor in the form of its version.
        unsafe { hip.hipMemImportFromShareableHandle(&mut handle, shared, DESCRIPTOR) }?;
        Ok(Self { hip, handle, referenced: true })
    }

    fn is_shareable(&self) -> Result<bool, Failure> {
        let mut properties = MaybeUninit::<sys::hipMemAllocationProp>::zeroed();
        // SAFETY: HIP writes one structure for a handle that lives.
        unsafe {
            self.hip.hipMemGetAllocationPropertiesFromHandle(properties.as_mut_ptr(), self.handle)
        }?;
        // SAFETY: inside the structure, which was zeroed; any number is valid for this field.
        let kinds = unsafe { (*properties.as_ptr()).__bindgen_anon_1.requestedHandleTypes };
        Ok(kinds & DESCRIPTOR != 0)
    }

    fn descriptor(&self) -> Result<OwnedFd, Failure> {
        let mut fd: c_int = -1;
        // SAFETY: HIP writes one descriptor, which is ours from then on.
        unsafe {
            let shared = (&raw mut fd).cast();
            self.hip.hipMemExportToShareableHandle(shared, self.handle, DESCRIPTOR, 0)?;
            Ok(adopt(fd))
        }
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        if !self.referenced {
            return;
        }
        // SAFETY: gives back the one reference that was taken.
        if let Err(failure) = unsafe { self.hip.hipMemRelease(self.handle) } {
            tracing::debug!("{}", self.hip.describe(failure));
        }
    }
}

/// Reserved addresses with chunks mapped from the front; all of it ends when dropped.
struct Range<'a> {
    driver: &'a RocmDriver,
    base: u64,
    len: u64,
    mapped: Vec<u64>,
}

impl Range<'_> {
    fn map(&mut self, physical: &Physical, len: u64) -> Result<(), Failure> {
        let addr = (self.base + self.mapped.iter().sum::<u64>()) as *mut c_void;
        // SAFETY: a free part of our own reservation: the lengths sum up to it. The mapping keeps
        // the memory without its handle.
        unsafe { self.driver.hip().hipMemMap(addr, len as usize, 0, physical.handle, 0) }?;
        self.mapped.push(len);
        Ok(())
    }
}

impl Drop for Range<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.driver.close_chunks(self.base, self.len, &self.mapped) {
            tracing::warn!(%error, "addresses of an import that failed stay reserved");
        }
    }
}

impl RocmDriver {
    fn location(&self) -> sys::hipMemLocation {
        sys::hipMemLocation { type_: sys::hipMemLocationTypeDevice, id: self.context.ordinal }
    }

    /// Whether memory with that first byte was mapped by the virtual memory API. Only such memory
    /// has rights of access: for other memory HIP has none to tell. (ROCr also takes the byte after
    /// a mapping for a part of it, but leaves a free page between two allocations.)
    fn is_chunk(&self, base: u64) -> bool {
        let (mut rights, location) = (0, self.location());
        // SAFETY: HIP reads one location, writes one number, and refuses an address that it does
        // not know.
        unsafe { self.hip().hipMemGetAccess(&mut rights, &location, base as *mut c_void) }.is_ok()
    }

    pub(super) fn unit(&self, addr: u64, len: u64) -> Result<Allocation> {
        let first = self.allocation(addr)?;
        if !self.is_chunk(first.base) {
            return Ok(first);
        }
        // HIP numbers chunks as they are mapped.
        chunks::run(first, addr.saturating_add(len), |end| match self.allocation(end) {
            Ok(chunk) => Ok(Some(chunk).filter(|chunk| self.is_chunk(chunk.base))),
            Err(Error::UnknownAddress { .. }) => Ok(None),
            Err(error) => Err(error),
        })
    }

    pub(super) fn prepare(&self, unit: &Allocation) -> Result<Option<Export>> {
        match self.is_chunk(unit.base) {
            true => self.check_chunks(unit).map(|()| None),
            false => self.export_handle(unit).map(Some),
        }
    }

    pub(super) fn export_unit_of(&self, unit: &Allocation) -> Result<Export> {
        match self.is_chunk(unit.base) {
            true => self.export_chunks(unit),
            false => self.export_handle(unit),
        }
    }

    /// Calls `each` with every chunk of a unit.
    fn for_each_chunk(
        &self,
        unit: &Allocation,
        mut each: impl FnMut(Physical, u64) -> Result<()>,
    ) -> Result<()> {
        let (mut at, end) = (unit.base, unit.base + unit.len);
        while at < end {
            let (base, len) = self.address_range(at)?.ok_or_else(|| self.unknown(at))?;
            if !self.is_chunk(base) {
                return Err(self.unknown(at));
            }
            match Physical::behind(self.hip(), base) {
                Ok(physical) => each(physical, len)?,
                // The chunks of HIP's own pools have no handle.
                Err(failure)
                    if failure.is(sys::hipErrorInvalidValue)
                        || failure.is(sys::hipErrorSharedObjectSymbolNotFound) =>
                {
                    return Err(self.not_exportable(unit, chunks::NOT_SHAREABLE));
                }
                Err(failure) => return Err(self.error(failure)),
            }
            at = base + len;
        }
        Ok(())
    }

    fn check_chunks(&self, unit: &Allocation) -> Result<()> {
        self.for_each_chunk(unit, |physical, _| match physical.is_shareable() {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.not_exportable(unit, chunks::NOT_SHAREABLE)),
            Err(failure) => Err(self.error(failure)),
        })
    }

    fn export_chunks(&self, unit: &Allocation) -> Result<Export> {
        let mut chunks = Vec::new();
        self.for_each_chunk(unit, |physical, len| {
            let fd = physical.descriptor();
            let fd = fd.map_err(|failure| self.descriptor_error(failure, unit))?;
            chunks.push(Chunk { fd, len });
            Ok(())
        })?;
        Ok(Export::Chunks { chunks, len: unit.len })
    }

    pub(super) fn open_chunks(&self, chunks: Vec<Chunk>, len: u64) -> Result<(u64, Opened)> {
        chunks::check(&chunks, len).map_err(|reason| self.bad_export(reason))?;
        let failed = |failure| self.open_error(failure, len);
        let hip = self.hip();
        let mut base = std::ptr::null_mut();
        let nowhere = std::ptr::null_mut();
        // SAFETY: HIP writes one address; whatever was reserved, `Range` gives back.
        unsafe { hip.hipMemAddressReserve(&mut base, len as usize, 0, nowhere, 0) }
            .map_err(failed)?;
        let mapped = Vec::with_capacity(chunks.len());
        let mut range = Range { driver: self, base: base as u64, len, mapped };
        for Chunk { fd, len } in &chunks {
            let physical = Physical::import(hip, fd).map_err(failed)?;
            range.map(&physical, *len).map_err(failed)?;
        }
        let access = sys::hipMemAccessDesc {
            location: self.location(),
            flags: sys::hipMemAccessFlagsProtReadWrite,
        };
        // SAFETY: all of the range is mapped; HIP reads one structure.
        unsafe { hip.hipMemSetAccess(base, len as usize, &access, 1) }.map_err(failed)?;
        // Until here: some runtimes of 2026 import a descriptor only now (rocm-systems #8304).
        drop(chunks);
        let mapped = std::mem::take(&mut range.mapped);
        std::mem::forget(range);
        Ok((base as u64, Opened::Chunks(mapped)))
    }

    /// Unmaps what was mapped from `base` on, and frees the addresses.
    pub(super) fn close_chunks(&self, base: u64, len: u64, chunks: &[u64]) -> Result<()> {
        let mut at = base;
        let mut ended = Ok(());
        for &chunk in chunks {
            // SAFETY: mapped there, as one, by `Range::map`; nothing uses it any more.
            ended = ended.and(unsafe { self.hip().hipMemUnmap(at as *mut c_void, chunk as usize) });
            at += chunk;
        }
        // SAFETY: reserved by `open_chunks`, freed once.
        let freed = unsafe { self.hip().hipMemAddressFree(base as *mut c_void, len as usize) };
        ended.and(freed).map_err(|failure| self.error(failure))
    }
}
