//! What HIP knows of an address.

use std::ffi::c_void;

use hip_sys as sys;

use super::RocmDriver;
use super::library::MemoryType;
use crate::device::Allocation;
use crate::error::Result;

impl RocmDriver {
    pub(super) fn allocation_of(&self, addr: u64) -> Result<Allocation> {
        if addr == 0 || !self.owns(addr)? {
            return Err(self.unknown(addr));
        }
        let (base, len) = self.address_range(addr)?.ok_or_else(|| self.unknown(addr))?;
        Ok(Allocation { base, len, id: self.buffer_id(addr)? })
    }

    /// The one allocation or chunk that `addr` lies in, first byte and bytes; `None` if HIP knows
    /// of none.
    pub(super) fn address_range(&self, addr: u64) -> Result<Option<(u64, u64)>> {
        let (mut base, mut len) = (std::ptr::null_mut(), 0);
        // SAFETY: HIP writes one address and one number, and refuses an address that it does not
        // know.
        match unsafe { self.hip().hipMemGetAddressRange(&mut base, &mut len, addr as *mut _) } {
            Ok(()) => Ok(Some((base as u64, len as u64))),
            Err(failure)
                if failure.is(sys::hipErrorNotFound)
                    || failure.is(sys::hipErrorInvalidValue)
                    || failure.is(sys::hipErrorInvalidDevicePointer) =>
            {
                Ok(None)
            }
            Err(failure) => Err(self.error(failure)),
        }
    }

    /// Whether `addr` is memory of this device.
    fn owns(&self, addr: u64) -> Result<bool> {
        let mut found = sys::hipPointerAttribute_t {
            type_: 0,
            device: -1,
            devicePointer: std::ptr::null_mut(),
            hostPointer: std::ptr::null_mut(),
            isManaged: 0,
            allocationFlags: 0,
        };
        // SAFETY: HIP writes one structure. The address is only looked up.
        match unsafe { self.hip().hipPointerGetAttributes(&mut found, addr as *const c_void) } {
            Ok(()) => Ok(self.hip().memory_type(found.type_) == MemoryType::Device
                && found.device == self.context.ordinal),
            // HIP 5 refuses an address that it does not know.
            Err(failure)
                if failure.is(sys::hipErrorInvalidValue)
                    || failure.is(sys::hipErrorInvalidDevicePointer) =>
            {
                Ok(false)
            }
            Err(failure) => Err(self.error(failure)),
        }
    }

    /// HIP's number of the allocation at `addr`. It counts them up as they are made, so another one
    /// at the same address has another number; after 2^32 of them it starts again. Without it
    /// memory could not be told from what was freed there, so then none is registered.
    fn buffer_id(&self, addr: u64) -> Result<u64> {
        // HIP writes 32 bits; it would be 64 in CUDA.
        let mut id = 0_u64;
        let attribute = sys::HIP_POINTER_ATTRIBUTE_BUFFER_ID;
        let value = (&raw mut id).cast();
        // SAFETY: there is room for either; the address is only looked up.
        unsafe { self.hip().hipPointerGetAttribute(value, attribute, addr as *mut _) }
            .map_err(|failure| self.error(failure))?;
        Ok(id)
    }
}
