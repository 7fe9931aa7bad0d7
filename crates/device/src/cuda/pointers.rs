//! What libcuda knows of an address.

use std::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys;

use super::CudaDriver;
use crate::device::Allocation;
use crate::error::Result;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PointerAttributes {
    memory_type: c_uint,
    pub(super) ordinal: c_int,
    pub(super) start: sys::CUdeviceptr,
    pub(super) len: usize,
    id: u64,
    /// One byte for the driver; the rest stays zero.
    pub(super) legacy_ipc: u64,
}

impl CudaDriver {
    pub(super) fn allocation_of(&self, addr: u64) -> Result<Allocation> {
        let found = self.attributes(addr)?.filter(|found| {
            let memory_type = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint;
            found.memory_type == memory_type
                && u32::try_from(found.ordinal) == Ok(self.info.ordinal)
        });
        let found = found.ok_or_else(|| self.unknown(addr))?;
        // Not the range in the attributes, which for chunks and pools is all that is reserved.
        let (base, len) = self.address_range(addr)?.ok_or_else(|| self.unknown(addr))?;
        Ok(Allocation { base, len, id: found.id })
    }

    /// The one allocation or chunk that `addr` lies in, first byte and bytes; `None` if the driver
    /// knows of none.
    pub(super) fn address_range(&self, addr: u64) -> Result<Option<(u64, u64)>> {
        let (mut base, mut len) = (0, 0);
        // SAFETY: the driver writes two numbers and refuses an address that it does not know.
        match unsafe { self.cuda().cuMemGetAddressRange_v2(&mut base, &mut len, addr) } {
            Ok(()) => Ok(Some((base, len as u64))),
            Err(failure)
                if failure.is(sys::CUresult::CUDA_ERROR_INVALID_VALUE)
                    || failure.is(sys::CUresult::CUDA_ERROR_NOT_FOUND) =>
            {
                Ok(None)
            }
            Err(failure) => Err(self.error(failure)),
        }
    }

    /// What the driver knows of an address; `None` if it knows nothing.
    pub(super) fn attributes(&self, addr: u64) -> Result<Option<PointerAttributes>> {
        let mut found = PointerAttributes::default();
        use sys::CUpointer_attribute as Attribute;
        let mut names = [
            Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID,
            Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        ];
        let mut values: [*mut c_void; 6] = [
            (&raw mut found.memory_type).cast(),
            (&raw mut found.ordinal).cast(),
            (&raw mut found.start).cast(),
            (&raw mut found.len).cast(),
            (&raw mut found.id).cast(),
            (&raw mut found.legacy_ipc).cast(),
        ];
        // SAFETY: both arrays have six entries, and each value points to a field of the size that
        // NVIDIA documents for its attribute. The address is only looked up.
        let known = unsafe {
            self.cuda().cuPointerGetAttributes(
                names.len() as c_uint,
                names.as_mut_ptr(),
                values.as_mut_ptr(),
                addr,
            )
        };
        use sys::CUresult::{CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_VALUE};
        match known {
            Ok(()) => Ok((found.len > 0).then_some(found)),
            // The driver's words for "not mine".
            Err(failure)
                if failure.is(CUDA_ERROR_INVALID_VALUE)
                    || failure.is(CUDA_ERROR_INVALID_CONTEXT) =>
            {
                Ok(None)
            }
            Err(failure) => Err(self.error(failure)),
        }
    }
}
