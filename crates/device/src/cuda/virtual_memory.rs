//! Memory of cuMemCreate and cuMemMap, as PyTorch's expandable segments are: it has no handle of
//! its own, but every chunk has a file descriptor.
//!
//! Descriptors are made when a peer asks and closed as soon as they are sent or imported: a cache
//! of 60 GB is 3,000 of PyTorch's 20 MiB chunks.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use cudarc::driver::sys;

use super::CudaDriver;
use super::ipc::{Opened, raw};
use super::library::{Cuda, Failure};
use crate::chunks;
use crate::device::{Allocation, Chunk, Export};
use crate::driver::Driver;
use crate::error::{Error, Result};
use crate::exports::adopt;

const DESCRIPTOR: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// The physical memory behind an address; given back when dropped.
struct Physical {
    cuda: &'static Cuda,
    handle: sys::CUmemGenericAllocationHandle,
}

impl Physical {
    fn behind(cuda: &'static Cuda, addr: u64) -> Result<Self, Failure> {
        let mut handle = 0;
        // SAFETY: the driver writes one handle and refuses an address that has none.
        unsafe { cuda.cuMemRetainAllocationHandle(&mut handle, addr as *mut c_void) }?;
        Ok(Self { cuda, handle })
    }

    fn import(cuda: &'static Cuda, fd: &OwnedFd) -> Result<Self, Failure> {
        let mut handle = 0;
        // SAFETY: the driver writes one handle, checks what the descriptor is of, and does not
        // keep it.
        unsafe { cuda.cuMemImportFromShareableHandle(&mut handle, raw(fd), DESCRIPTOR) }?;
        Ok(Self { cuda, handle })
    }

    fn is_shareable(&self) -> Result<bool, Failure> {
        let mut properties = MaybeUninit::<sys::CUmemAllocationProp>::zeroed();
        // SAFETY: the driver writes one structure for a handle that lives.
        unsafe {
            self.cuda.cuMemGetAllocationPropertiesFromHandle(properties.as_mut_ptr(), self.handle)
        }?;
        // SAFETY: inside the structure, which was zeroed; any number is valid for this field. The
        // others may hold values that are newer than the bindings and are not looked at.
        let kinds = unsafe { (&raw const (*properties.as_ptr()).requestedHandleTypes).read() };
        Ok(kinds.0 & DESCRIPTOR.0 != 0)
    }

    fn descriptor(&self) -> Result<OwnedFd, Failure> {
        let mut fd: c_int = -1;
        // SAFETY: the driver writes one descriptor, which is ours from then on.
        unsafe {
            let shared = (&raw mut fd).cast();
            self.cuda.cuMemExportToShareableHandle(shared, self.handle, DESCRIPTOR, 0)?;
            Ok(adopt(fd))
        }
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: gives back the one reference that was taken.
        if let Err(failure) = unsafe { self.cuda.cuMemRelease(self.handle) } {
            tracing::debug!("{}", self.cuda.describe(failure));
        }
    }
}

/// Reserved addresses with chunks mapped from the front; all of it ends when dropped.
struct Range<'a> {
    driver: &'a CudaDriver,
    base: u64,
    len: u64,
    mapped: Vec<u64>,
}

impl Range<'_> {
    fn map(&mut self, physical: &Physical, len: u64) -> Result<(), Failure> {
        let addr = self.base + self.mapped.iter().sum::<u64>();
        // SAFETY: a free part of our own reservation: the lengths sum up to it. The driver checks
        // the length against the memory, and the mapping keeps the memory without its handle.
        unsafe { self.driver.cuda().cuMemMap(addr, len as usize, 0, physical.handle, 0) }?;
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

impl CudaDriver {
    /// Whether the virtual memory API made the memory at `addr`: only its memory has such a handle
    /// (LAB.md).
    pub(super) fn is_chunk(&self, addr: u64) -> bool {
        Physical::behind(self.cuda(), addr).is_ok()
    }

    pub(super) fn unit(&self, addr: u64, len: u64) -> Result<Allocation> {
        let first = self.allocation(addr)?;
        if !self.is_chunk(first.base) {
            return Ok(first);
        }
        // The driver numbers chunks as they are mapped (H200, 580.159.04: a new number at each
        // cuMemMap, also at the same address).
        chunks::run(first, addr.saturating_add(len), |end| match self.allocation(end) {
            Ok(chunk) => Ok(Some(chunk).filter(|chunk| self.is_chunk(chunk.base))),
            Err(Error::UnknownAddress { .. }) => Ok(None),
            Err(error) => Err(error),
        })
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
            let physical = Physical::behind(self.cuda(), base);
            each(physical.map_err(|failure| self.error(failure))?, len)?;
            at = base + len;
        }
        Ok(())
    }

    pub(super) fn check_chunks(&self, unit: &Allocation) -> Result<()> {
        self.for_each_chunk(unit, |physical, _| match physical.is_shareable() {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.not_exportable(unit, chunks::NOT_SHAREABLE)),
            Err(failure) => Err(self.error(failure)),
        })
    }

    pub(super) fn export_chunks(&self, unit: &Allocation) -> Result<Export> {
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
        let cuda = self.cuda();
        let mut base = 0;
        // SAFETY: the driver writes one address; whatever was reserved, `Range` gives back.
        unsafe { cuda.cuMemAddressReserve(&mut base, len as usize, 0, 0, 0) }.map_err(failed)?;
        let mut range = Range { driver: self, base, len, mapped: Vec::with_capacity(chunks.len()) };
        for Chunk { fd, len } in chunks {
            let physical = Physical::import(cuda, &fd).map_err(failed)?;
            range.map(&physical, len).map_err(failed)?;
        }
        let access = self.access();
        // SAFETY: all of the range is mapped; the driver reads one structure.
        unsafe { cuda.cuMemSetAccess(base, len as usize, &access, 1) }.map_err(failed)?;
        let mapped = std::mem::take(&mut range.mapped);
        std::mem::forget(range);
        Ok((base, Opened::Chunks(mapped)))
    }

    /// Lets this device, wherever the memory is, read and write.
    pub(super) fn access(&self) -> sys::CUmemAccessDesc {
        sys::CUmemAccessDesc {
            location: sys::CUmemLocation {
                type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: self.context.device,
            },
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        }
    }

    /// Unmaps what was mapped from `base` on, and frees the addresses.
    pub(super) fn close_chunks(&self, base: u64, len: u64, chunks: &[u64]) -> Result<()> {
        let mut at = base;
        let mut ended = Ok(());
        for &chunk in chunks {
            // SAFETY: mapped there, as one, by `Range::map`; nothing uses it any more.
            ended = ended.and(unsafe { self.cuda().cuMemUnmap(at, chunk as usize) });
            at += chunk;
        }
        // SAFETY: reserved by `open_chunks`, freed once. The driver refuses if a chunk is left.
        let freed = unsafe { self.cuda().cuMemAddressFree(base, len as usize) };
        ended.and(freed).map_err(|failure| self.error(failure))
    }
}
