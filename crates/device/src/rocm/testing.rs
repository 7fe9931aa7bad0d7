//! GPU memory that applications make with other calls than hipMalloc, for tests.
//!
//! Everything here panics if HIP refuses it.

use std::ffi::c_void;
use std::sync::Arc;

use hip_sys as sys;

use super::context::Context;
use super::functions::Failure;
use super::{Hip, RocmOptions, identity};
use crate::device::DeviceUuid;
use crate::testing::{ChunkKind, ChunkedMemory};

/// Memory of hipMemCreate, mapped side by side; each chunk is as small as the GPU allows.
#[derive(Debug)]
pub struct RocmChunks {
    context: Arc<Context>,
    base: u64,
    chunk_len: u64,
    mapped: Vec<bool>,
}

/// Maps chunks of GPU `ordinal`.
pub fn map_chunks(ordinal: u32, kinds: &[ChunkKind]) -> RocmChunks {
    let hip = Hip::load(&RocmOptions::default().library_directories).expect("libamdhip64");
    identity::count(hip, "rocm").expect("a GPU");
    let device = identity::device(hip, ordinal).expect("that GPU");
    let context = Context::new(hip, device, DeviceUuid([0; 16]));
    let (mut base, mut granularity) = (std::ptr::null_mut(), 0);
    {
        let _scope = context.enter().expect("enters");
        let properties = properties(device, true);
        let option = sys::hipMemAllocationGranularityMinimum;
        // SAFETY: HIP reads one structure and writes one number and one address.
        unsafe {
            hip.hipMemGetAllocationGranularity(&mut granularity, &properties, option)
                .expect("a granularity");
            let (bytes, nowhere) = (granularity * kinds.len(), std::ptr::null_mut());
            hip.hipMemAddressReserve(&mut base, bytes, 0, nowhere, 0).expect("addresses");
        }
    }
    let mapped = vec![false; kinds.len()];
    let mut chunks =
        RocmChunks { context, base: base as u64, chunk_len: granularity as u64, mapped };
    kinds.iter().enumerate().for_each(|(index, &kind)| chunks.replace(index, kind));
    chunks
}

fn on_device(ordinal: i32) -> sys::hipMemLocation {
    sys::hipMemLocation { type_: sys::hipMemLocationTypeDevice, id: ordinal }
}

fn properties(ordinal: i32, shareable: bool) -> sys::hipMemAllocationProp {
    // SAFETY: zeros are valid for all of its fields.
    let mut properties: sys::hipMemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::hipMemAllocationTypePinned;
    properties.location = on_device(ordinal);
    properties.__bindgen_anon_1.requestedHandleTypes = match shareable {
        true => sys::hipMemHandleTypePosixFileDescriptor,
        false => sys::hipMemHandleTypeNone,
    };
    properties
}

impl RocmChunks {
    fn place(&self, index: usize) -> *mut c_void {
        (self.base + index as u64 * self.chunk_len) as *mut c_void
    }

    fn unmap(&mut self, index: usize) {
        if std::mem::take(&mut self.mapped[index]) {
            let (addr, len) = (self.place(index), self.chunk_len as usize);
            // SAFETY: mapped there, as one, by `replace`; the tests use it no more.
            unsafe { self.context.hip.hipMemUnmap(addr, len) }.expect("unmaps");
        }
    }
}

impl ChunkedMemory for RocmChunks {
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
        let (hip, addr, len) = (context.hip, self.place(index), self.chunk_len as usize);
        let properties = properties(context.ordinal, kind == ChunkKind::Shareable);
        let access = sys::hipMemAccessDesc {
            location: on_device(context.ordinal),
            flags: sys::hipMemAccessFlagsProtReadWrite,
        };
        let mut handle = std::ptr::null_mut();
        // SAFETY: the place is ours and free; the mapping keeps the memory without its handle.
        let made = unsafe {
            (|| -> Result<(), Failure> {
                hip.hipMemCreate(&mut handle, len, &properties, 0)?;
                hip.hipMemMap(addr, len, 0, handle, 0)?;
                hip.hipMemRelease(handle)?;
                hip.hipMemSetAccess(addr, len, &access, 1)
            })()
        };
        made.expect("a chunk");
        self.mapped[index] = true;
    }
}

impl Drop for RocmChunks {
    fn drop(&mut self) {
        let context = Arc::clone(&self.context);
        let _scope = context.enter().expect("enters");
        (0..self.mapped.len()).for_each(|index| self.unmap(index));
        let (base, len) = (self.base as *mut c_void, self.len() as usize);
        // SAFETY: reserved by `map_chunks`, and nothing is mapped there any more.
        unsafe { context.hip.hipMemAddressFree(base, len) }.expect("frees");
    }
}
