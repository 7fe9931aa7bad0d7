//! GPU memory that applications make with other calls than cudaMalloc, for tests.
//!
//! Everything here panics if the driver refuses it.

use std::sync::Arc;

use cudarc::driver::sys;

use super::context::Context;
use super::identity;
use super::library::Cuda;
use crate::device::DeviceUuid;
use crate::testing::{ChunkKind, ChunkedMemory};

fn done(result: sys::CUresult) {
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}

fn context(ordinal: u32) -> Arc<Context> {
    super::count().expect("a GPU");
    let cuda = Cuda::load().expect("libcuda");
    let device = identity::device(cuda, ordinal).expect("that GPU");
    Context::retain(cuda, device, ordinal, DeviceUuid([0; 16])).expect("its context")
}

fn on_device(ordinal: u32) -> sys::CUmemLocation {
    sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: ordinal as i32,
    }
}

fn handle_kind(shareable: bool) -> sys::CUmemAllocationHandleType {
    use sys::CUmemAllocationHandleType as Kind;
    match shareable {
        true => Kind::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        false => Kind::CU_MEM_HANDLE_TYPE_NONE,
    }
}

/// Memory of cuMemCreate, mapped side by side; each chunk is as small as the GPU allows.
#[derive(Debug)]
pub struct CudaChunks {
    context: Arc<Context>,
    ordinal: u32,
    base: u64,
    chunk_len: u64,
    mapped: Vec<bool>,
}

/// Maps chunks of GPU `ordinal`.
pub fn map_chunks(ordinal: u32, kinds: &[ChunkKind]) -> CudaChunks {
    let context = context(ordinal);
    let (mut base, mut granularity) = (0, 0);
    {
        let _scope = context.enter().expect("enters");
        let properties = properties(ordinal, true);
        let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: the driver reads one structure and writes one number.
        done(unsafe { sys::cuMemGetAllocationGranularity(&mut granularity, &properties, option) });
        // SAFETY: the driver writes one address.
        done(unsafe { sys::cuMemAddressReserve(&mut base, granularity * kinds.len(), 0, 0, 0) });
    }
    let mapped = vec![false; kinds.len()];
    let mut chunks = CudaChunks { context, ordinal, base, chunk_len: granularity as u64, mapped };
    kinds.iter().enumerate().for_each(|(index, &kind)| chunks.replace(index, kind));
    chunks
}

fn properties(ordinal: u32, shareable: bool) -> sys::CUmemAllocationProp {
    // SAFETY: zeros are what NVIDIA asks for in the fields that are not set.
    let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = on_device(ordinal);
    properties.requestedHandleTypes = handle_kind(shareable);
    properties
}

impl CudaChunks {
    fn unmap(&mut self, index: usize) {
        if std::mem::take(&mut self.mapped[index]) {
            let addr = self.base + index as u64 * self.chunk_len;
            // SAFETY: mapped there, as one, by `replace`; the tests use it no more.
            done(unsafe { sys::cuMemUnmap(addr, self.chunk_len as usize) });
        }
    }
}

impl ChunkedMemory for CudaChunks {
    fn addr(&self) -> u64 {
        self.base
    }

    fn chunk_len(&self) -> u64 {
        self.chunk_len
    }

    fn len(&self) -> u64 {
        self.chunk_len * self.mapped.len() as u64
    }

    fn replace(&mut self, index: usize, kind: ChunkKind) {
        let context = Arc::clone(&self.context);
        let _scope = context.enter().expect("enters");
        self.unmap(index);
        if kind == ChunkKind::Hole {
            return;
        }
        let (addr, len) = (self.base + index as u64 * self.chunk_len, self.chunk_len as usize);
        let properties = properties(self.ordinal, kind == ChunkKind::Shareable);
        let access = sys::CUmemAccessDesc {
            location: on_device(self.ordinal),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let mut handle = 0;
        // SAFETY: the place is ours and free; the mapping keeps the memory without its handle.
        unsafe {
            done(sys::cuMemCreate(&mut handle, len, &properties, 0));
            done(sys::cuMemMap(addr, len, 0, handle, 0));
            done(sys::cuMemRelease(handle));
            done(sys::cuMemSetAccess(addr, len, &access, 1));
        }
        self.mapped[index] = true;
    }
}

impl Drop for CudaChunks {
    fn drop(&mut self) {
        let context = Arc::clone(&self.context);
        let _scope = context.enter().expect("enters");
        (0..self.mapped.len()).for_each(|index| self.unmap(index));
        // SAFETY: reserved by `map_chunks`, and nothing is mapped there any more.
        done(unsafe { sys::cuMemAddressFree(self.base, self.len() as usize) });
    }
}

/// Memory of a stream-ordered pool; freed when dropped.
#[derive(Debug)]
pub struct PoolMemory {
    context: Arc<Context>,
    addr: u64,
    /// Ours, to destroy; none if it is the device's own.
    pool: Option<usize>,
}

/// Allocates from a pool of GPU `ordinal` that was made to be shared, or from the default one of
/// cudaMallocAsync, which was not.
pub fn allocate_from_pool(ordinal: u32, bytes: u64, shareable: bool) -> PoolMemory {
    let context = context(ordinal);
    let scope = context.enter().expect("enters");
    let mut pool: sys::CUmemoryPool = std::ptr::null_mut();
    let mut addr = 0;
    // SAFETY: zeros are what NVIDIA asks for in the fields that are not set; the driver writes one
    // pool and one address, which is ready when the stream is idle.
    unsafe {
        if shareable {
            let mut properties: sys::CUmemPoolProps = std::mem::zeroed();
            properties.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
            properties.handleTypes = handle_kind(true);
            properties.location = on_device(ordinal);
            done(sys::cuMemPoolCreate(&mut pool, &properties));
        } else {
            done(sys::cuDeviceGetDefaultMemPool(&mut pool, context.device));
        }
        let stream = std::ptr::null_mut();
        done(sys::cuMemAllocFromPoolAsync(&mut addr, bytes as usize, pool, stream));
        done(sys::cuStreamSynchronize(stream));
    }
    drop(scope);
    PoolMemory { context, addr, pool: shareable.then_some(pool as usize) }
}

impl PoolMemory {
    /// First byte.
    pub fn addr(&self) -> u64 {
        self.addr
    }
}

impl Drop for PoolMemory {
    fn drop(&mut self) {
        let _scope = self.context.enter().expect("enters");
        let stream = std::ptr::null_mut();
        // SAFETY: allocated and created above, ended once, when the tests use them no more.
        unsafe {
            done(sys::cuMemFreeAsync(self.addr, stream));
            done(sys::cuStreamSynchronize(stream));
            if let Some(pool) = self.pool {
                done(sys::cuMemPoolDestroy(pool as sys::CUmemoryPool));
            }
        }
    }
}
