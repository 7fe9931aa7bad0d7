//! Memory of stream-ordered pools (cudaMallocAsync): a pool that was made to be shared has a file
//! descriptor, and each allocation a place in it.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::OwnedFd;

use cudarc::driver::sys;

use super::CudaDriver;
use super::ipc::{Opened, raw};
use crate::device::{Allocation, Export};
use crate::error::Result;
use crate::exports::{adopt, parse, tagged};

const DESCRIPTOR: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

const NOT_SHAREABLE: &str = "it is memory of a stream-ordered pool that was not made to be shared, as the \
     default one of cudaMallocAsync is: allocate with cudaMalloc, or from a pool created with POSIX \
     file descriptors as its handle type";

#[derive(Clone, Copy, Debug)]
pub(super) struct Pool(sys::CUmemoryPool);

// SAFETY: a pool is a name that the driver takes on any thread.
unsafe impl Send for Pool {}

impl CudaDriver {
    /// The pool that the memory at `addr` is of.
    pub(super) fn pool_of(&self, addr: u64) -> Option<Pool> {
        let mut pool: sys::CUmemoryPool = std::ptr::null_mut();
        let mut name = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE;
        let mut value: *mut c_void = (&raw mut pool).cast();
        let count: c_uint = 1;
        // SAFETY: one attribute and one place for it, of the size of a pointer.
        let known =
            unsafe { self.cuda().cuPointerGetAttributes(count, &mut name, &mut value, addr) };
        // A driver that does not know the attribute knows no pools either.
        (known.is_ok() && !pool.is_null()).then_some(Pool(pool))
    }

    pub(super) fn export_pool(&self, pool: Pool, unit: &Allocation) -> Result<Export> {
        use sys::CUresult::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED};
        let cuda = self.cuda();
        let mut fd: c_int = -1;
        // SAFETY: the pool is that of an allocation that lives; the driver writes one descriptor,
        // which is ours from then on.
        let fd = unsafe {
            cuda.cuMemPoolExportToShareableHandle((&raw mut fd).cast(), pool.0, DESCRIPTOR, 0)
                .map(|()| adopt(fd))
        };
        let fd = fd.map_err(|failure| {
            if failure.is(CUDA_ERROR_INVALID_VALUE) || failure.is(CUDA_ERROR_NOT_SUPPORTED) {
                return self.not_exportable(unit, NOT_SHAREABLE);
            }
            self.descriptor_error(failure, unit)
        })?;
        let mut place = sys::CUmemPoolPtrExportData { reserved: [0; 64] };
        // SAFETY: the driver writes one structure and refuses an address that it does not know.
        unsafe { cuda.cuMemPoolExportPointer(&mut place, unit.base) }
            .map_err(|failure| self.descriptor_error(failure, unit))?;
        Ok(Export::Pool { fd, bytes: tagged(place.reserved), len: unit.len })
    }

    pub(super) fn open_pool(&self, fd: OwnedFd, bytes: &[u8], len: u64) -> Result<(u64, Opened)> {
        let mut place =
            sys::CUmemPoolPtrExportData { reserved: parse(bytes, &self.info.to_string())? };
        let cuda = self.cuda();
        let mut pool: sys::CUmemoryPool = std::ptr::null_mut();
        // SAFETY: the driver writes one pool, checks what the descriptor is of, and does not keep
        // it.
        unsafe { cuda.cuMemPoolImportFromShareableHandle(&mut pool, raw(&fd), DESCRIPTOR, 0) }
            .map_err(|failure| self.open_error(failure, len))?;
        drop(fd);
        let pool = Pool(pool);
        let mut addr = 0;
        // SAFETY: the pool was just imported; the driver checks the place and writes one address.
        let imported = unsafe { cuda.cuMemPoolImportPointer(&mut addr, pool.0, &mut place) };
        if let Err(failure) = imported {
            self.destroy_pool(pool);
            return Err(self.open_error(failure, len));
        }
        if let Err(error) = self.use_pool(pool, addr, len) {
            let _ = self.close_pool(addr, pool);
            return Err(error);
        }
        Ok((addr, Opened::Pool(pool)))
    }

    /// Checks the announced length, and lets this device in if the pool is another one's.
    fn use_pool(&self, pool: Pool, addr: u64, len: u64) -> Result<()> {
        self.check_mapping(addr, len).map_err(|reason| self.bad_export(reason))?;
        let owner = self.attributes(addr)?.map(|found| found.ordinal);
        if owner == Some(self.context.device) {
            return Ok(());
        }
        let access = self.access();
        // SAFETY: the pool was imported and lives; the driver reads one structure.
        unsafe { self.cuda().cuMemPoolSetAccess(pool.0, &access, 1) }
            .map_err(|failure| self.open_error(failure, len))
    }

    /// The address first, then its pool: the order that NVIDIA asks of an importer.
    pub(super) fn close_pool(&self, addr: u64, pool: Pool) -> Result<()> {
        // SAFETY: imported by `open_pool`, freed once, when nothing uses it any more. This ends
        // the mapping; the memory stays the exporter's.
        let freed = unsafe { self.cuda().cuMemFree_v2(addr) };
        self.destroy_pool(pool);
        freed.map_err(|failure| self.error(failure))
    }

    fn destroy_pool(&self, pool: Pool) {
        // SAFETY: imported by `open_pool`, destroyed once, after its only address was freed.
        if let Err(failure) = unsafe { self.cuda().cuMemPoolDestroy(pool.0) } {
            tracing::warn!(device = %self.info, "{}", self.cuda().describe(failure));
        }
    }
}
