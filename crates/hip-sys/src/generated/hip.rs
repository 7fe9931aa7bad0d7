// HIP 7.2.53211, hip/hip_runtime_api.h, bindgen 0.73.2; made by ci/bindings.sh

#[repr(C)]
#[derive(Copy, Clone, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct __BindgenBitfieldUnit<Storage> {
    storage: Storage,
}
impl<Storage> __BindgenBitfieldUnit<Storage> {
    #[inline]
    pub const fn new(storage: Storage) -> Self {
        Self { storage }
    }
}
impl<Storage> __BindgenBitfieldUnit<Storage>
where
    Storage: AsRef<[u8]> + AsMut<[u8]>,
{
    #[inline]
    fn extract_bit(byte: u8, index: usize) -> bool {
        let bit_index = if cfg!(target_endian = "big") { 7 - (index % 8) } else { index % 8 };
        let mask = 1 << bit_index;
        byte & mask == mask
    }
    #[inline]
    pub fn get_bit(&self, index: usize) -> bool {
        debug_assert!(index / 8 < self.storage.as_ref().len());
        let byte_index = index / 8;
        let byte = self.storage.as_ref()[byte_index];
        Self::extract_bit(byte, index)
    }
    #[inline]
    pub unsafe fn raw_get_bit(this: *const Self, index: usize) -> bool {
        debug_assert!(index / 8 < core::mem::size_of::<Storage>());
        let byte_index = index / 8;
        let byte = unsafe {
            *(core::ptr::addr_of!((*this).storage) as *const u8).offset(byte_index as isize)
        };
        Self::extract_bit(byte, index)
    }
    #[inline]
    fn change_bit(byte: u8, index: usize, val: bool) -> u8 {
        let bit_index = if cfg!(target_endian = "big") { 7 - (index % 8) } else { index % 8 };
        let mask = 1 << bit_index;
        if val { byte | mask } else { byte & !mask }
    }
    #[inline]
    pub fn set_bit(&mut self, index: usize, val: bool) {
        debug_assert!(index / 8 < self.storage.as_ref().len());
        let byte_index = index / 8;
        let byte = &mut self.storage.as_mut()[byte_index];
        *byte = Self::change_bit(*byte, index, val);
    }
    #[inline]
    pub unsafe fn raw_set_bit(this: *mut Self, index: usize, val: bool) {
        debug_assert!(index / 8 < core::mem::size_of::<Storage>());
        let byte_index = index / 8;
        let byte = unsafe {
            (core::ptr::addr_of_mut!((*this).storage) as *mut u8).offset(byte_index as isize)
        };
        unsafe { *byte = Self::change_bit(*byte, index, val) };
    }
    #[inline]
    pub fn get(&self, bit_offset: usize, bit_width: u8) -> u64 {
        debug_assert!(bit_width <= 64);
        debug_assert!(bit_offset / 8 < self.storage.as_ref().len());
        debug_assert!((bit_offset + (bit_width as usize) + 7) / 8 <= self.storage.as_ref().len());
        if bit_width == 0 {
            return 0;
        }
        let mut val = 0u64;
        let storage = self.storage.as_ref();
        let start_byte = bit_offset / 8;
        let bit_shift = bit_offset % 8;
        let bytes_needed = (bit_width as usize + bit_shift + 7) / 8;
        if cfg!(target_endian = "big") {
            for i in 0..bytes_needed {
                val |= (storage[start_byte + i].reverse_bits() as u64) << (i * 8);
            }
        } else {
            for i in 0..bytes_needed {
                val |= (storage[start_byte + i] as u64) << (i * 8);
            }
        }
        val >>= bit_shift;
        if bit_width < 64 {
            val &= (1u64 << bit_width) - 1;
        }
        if cfg!(target_endian = "big") {
            val = val.reverse_bits() >> (64 - bit_width as usize);
        }
        val
    }
    #[inline]
    pub unsafe fn raw_get(this: *const Self, bit_offset: usize, bit_width: u8) -> u64 {
        debug_assert!(bit_width <= 64);
        debug_assert!(bit_offset / 8 < core::mem::size_of::<Storage>());
        debug_assert!(
            (bit_offset + (bit_width as usize) + 7) / 8 <= core::mem::size_of::<Storage>()
        );
        if bit_width == 0 {
            return 0;
        }
        let mut val = 0u64;
        let start_byte = bit_offset / 8;
        let bit_shift = bit_offset % 8;
        let bytes_needed = (bit_width as usize + bit_shift + 7) / 8;
        let storage_ptr = unsafe { core::ptr::addr_of!((*this).storage) as *const u8 };
        if cfg!(target_endian = "big") {
            for i in 0..bytes_needed {
                let byte = unsafe { *storage_ptr.add(start_byte + i) };
                val |= (byte.reverse_bits() as u64) << (i * 8);
            }
        } else {
            for i in 0..bytes_needed {
                let byte = unsafe { *storage_ptr.add(start_byte + i) };
                val |= (byte as u64) << (i * 8);
            }
        }
        val >>= bit_shift;
        if bit_width < 64 {
            val &= (1u64 << bit_width) - 1;
        }
        if cfg!(target_endian = "big") {
            val = val.reverse_bits() >> (64 - bit_width as usize);
        }
        val
    }
    #[inline]
    pub fn set(&mut self, bit_offset: usize, bit_width: u8, val: u64) {
        debug_assert!(bit_width <= 64);
        debug_assert!(bit_offset / 8 < self.storage.as_ref().len());
        debug_assert!((bit_offset + (bit_width as usize) + 7) / 8 <= self.storage.as_ref().len());
        if bit_width == 0 {
            return;
        }
        let mut val = val;
        if bit_width < 64 {
            val &= (1u64 << bit_width) - 1;
        }
        if cfg!(target_endian = "big") {
            val = val.reverse_bits() >> (64 - bit_width as usize);
        }
        let storage = self.storage.as_mut();
        let start_byte = bit_offset / 8;
        let bit_shift = bit_offset % 8;
        let bytes_needed = (bit_width as usize + bit_shift + 7) / 8;
        val <<= bit_shift;
        let field_mask = if bit_width as usize + bit_shift >= 64 {
            !0u64 << bit_shift
        } else {
            ((1u64 << bit_width) - 1) << bit_shift
        };
        for i in 0..bytes_needed {
            let byte_val = (val >> (i * 8)) as u8;
            let byte_mask = (field_mask >> (i * 8)) as u8;
            if cfg!(target_endian = "big") {
                let byte = storage[start_byte + i].reverse_bits();
                let new_byte = (byte & !byte_mask) | (byte_val & byte_mask);
                storage[start_byte + i] = new_byte.reverse_bits();
            } else {
                storage[start_byte + i] =
                    (storage[start_byte + i] & !byte_mask) | (byte_val & byte_mask);
            }
        }
    }
    #[inline]
    pub unsafe fn raw_set(this: *mut Self, bit_offset: usize, bit_width: u8, val: u64) {
        debug_assert!(bit_width <= 64);
        debug_assert!(bit_offset / 8 < core::mem::size_of::<Storage>());
        debug_assert!(
            (bit_offset + (bit_width as usize) + 7) / 8 <= core::mem::size_of::<Storage>()
        );
        if bit_width == 0 {
            return;
        }
        let mut val = val;
        if bit_width < 64 {
            val &= (1u64 << bit_width) - 1;
        }
        if cfg!(target_endian = "big") {
            val = val.reverse_bits() >> (64 - bit_width as usize);
        }
        let start_byte = bit_offset / 8;
        let bit_shift = bit_offset % 8;
        let bytes_needed = (bit_width as usize + bit_shift + 7) / 8;
        val <<= bit_shift;
        let field_mask = if bit_width as usize + bit_shift >= 64 {
            !0u64 << bit_shift
        } else {
            ((1u64 << bit_width) - 1) << bit_shift
        };
        let storage_ptr = unsafe { core::ptr::addr_of_mut!((*this).storage) as *mut u8 };
        for i in 0..bytes_needed {
            let byte_val = (val >> (i * 8)) as u8;
            let byte_mask = (field_mask >> (i * 8)) as u8;
            let byte_ptr = unsafe { storage_ptr.add(start_byte + i) };
            if cfg!(target_endian = "big") {
                let byte = unsafe { (*byte_ptr).reverse_bits() };
                let new_byte = (byte & !byte_mask) | (byte_val & byte_mask);
                unsafe { *byte_ptr = new_byte.reverse_bits() };
            } else {
                unsafe { *byte_ptr = (*byte_ptr & !byte_mask) | (byte_val & byte_mask) };
            }
        }
    }
}
#[doc = " Const-generic methods for efficient bitfield access when offset and width"]
#[doc = " are known at compile time."]
impl<const N: usize> __BindgenBitfieldUnit<[u8; N]> {
    #[doc = " Get a field using const generics for compile-time optimization."]
    #[doc = " Uses native word size operations when the field fits in usize."]
    #[inline]
    pub const fn get_const<const BIT_OFFSET: usize, const BIT_WIDTH: u8>(&self) -> u64 {
        debug_assert!(BIT_WIDTH <= 64);
        debug_assert!(BIT_OFFSET / 8 < N);
        debug_assert!((BIT_OFFSET + (BIT_WIDTH as usize) + 7) / 8 <= N);
        if BIT_WIDTH == 0 {
            return 0;
        }
        let start_byte = BIT_OFFSET / 8;
        let bit_shift = BIT_OFFSET % 8;
        let bytes_needed = (BIT_WIDTH as usize + bit_shift + 7) / 8;
        if BIT_WIDTH as usize + bit_shift <= usize::BITS as usize {
            let mut val = 0usize;
            if cfg!(target_endian = "big") {
                let mut i = 0;
                while i < bytes_needed {
                    val |= (self.storage[start_byte + i].reverse_bits() as usize) << (i * 8);
                    i += 1;
                }
            } else {
                let mut i = 0;
                while i < bytes_needed {
                    val |= (self.storage[start_byte + i] as usize) << (i * 8);
                    i += 1;
                }
            }
            val >>= bit_shift;
            if (BIT_WIDTH as u32) < usize::BITS {
                val &= (1usize << BIT_WIDTH) - 1;
            }
            if cfg!(target_endian = "big") {
                val = val.reverse_bits() >> (usize::BITS as usize - BIT_WIDTH as usize);
            }
            val as u64
        } else {
            let mut val = 0u64;
            if cfg!(target_endian = "big") {
                let mut i = 0;
                while i < bytes_needed {
                    val |= (self.storage[start_byte + i].reverse_bits() as u64) << (i * 8);
                    i += 1;
                }
            } else {
                let mut i = 0;
                while i < bytes_needed {
                    val |= (self.storage[start_byte + i] as u64) << (i * 8);
                    i += 1;
                }
            }
            val >>= bit_shift;
            if BIT_WIDTH < 64 {
                val &= (1u64 << BIT_WIDTH) - 1;
            }
            if cfg!(target_endian = "big") {
                val = val.reverse_bits() >> (64 - BIT_WIDTH as usize);
            }
            val
        }
    }
    #[doc = " Set a field using const generics for compile-time optimization."]
    #[doc = " Uses native word size operations when the field fits in usize."]
    #[inline]
    pub fn set_const<const BIT_OFFSET: usize, const BIT_WIDTH: u8>(&mut self, val: u64) {
        debug_assert!(BIT_WIDTH <= 64);
        debug_assert!(BIT_OFFSET / 8 < N);
        debug_assert!((BIT_OFFSET + (BIT_WIDTH as usize) + 7) / 8 <= N);
        if BIT_WIDTH == 0 {
            return;
        }
        let start_byte = BIT_OFFSET / 8;
        let bit_shift = BIT_OFFSET % 8;
        let bytes_needed = (BIT_WIDTH as usize + bit_shift + 7) / 8;
        if BIT_WIDTH as usize + bit_shift <= usize::BITS as usize {
            let mut val = val as usize;
            if (BIT_WIDTH as u32) < usize::BITS {
                val &= (1usize << BIT_WIDTH) - 1;
            }
            if cfg!(target_endian = "big") {
                val = val.reverse_bits() >> (usize::BITS as usize - BIT_WIDTH as usize);
            }
            val <<= bit_shift;
            let field_mask = if BIT_WIDTH as usize + bit_shift >= usize::BITS as usize {
                !0usize << bit_shift
            } else {
                ((1usize << BIT_WIDTH) - 1) << bit_shift
            };
            let mut i = 0;
            while i < bytes_needed {
                let byte_val = (val >> (i * 8)) as u8;
                let byte_mask = (field_mask >> (i * 8)) as u8;
                if cfg!(target_endian = "big") {
                    let byte = self.storage[start_byte + i].reverse_bits();
                    let new_byte = (byte & !byte_mask) | (byte_val & byte_mask);
                    self.storage[start_byte + i] = new_byte.reverse_bits();
                } else {
                    self.storage[start_byte + i] =
                        (self.storage[start_byte + i] & !byte_mask) | (byte_val & byte_mask);
                }
                i += 1;
            }
        } else {
            let mut val = val;
            if BIT_WIDTH < 64 {
                val &= (1u64 << BIT_WIDTH) - 1;
            }
            if cfg!(target_endian = "big") {
                val = val.reverse_bits() >> (64 - BIT_WIDTH as usize);
            }
            val <<= bit_shift;
            let field_mask = if BIT_WIDTH as usize + bit_shift >= 64 {
                !0u64 << bit_shift
            } else {
                ((1u64 << BIT_WIDTH) - 1) << bit_shift
            };
            let mut i = 0;
            while i < bytes_needed {
                let byte_val = (val >> (i * 8)) as u8;
                let byte_mask = (field_mask >> (i * 8)) as u8;
                if cfg!(target_endian = "big") {
                    let byte = self.storage[start_byte + i].reverse_bits();
                    let new_byte = (byte & !byte_mask) | (byte_val & byte_mask);
                    self.storage[start_byte + i] = new_byte.reverse_bits();
                } else {
                    self.storage[start_byte + i] =
                        (self.storage[start_byte + i] & !byte_mask) | (byte_val & byte_mask);
                }
                i += 1;
            }
        }
    }
    #[doc = " Raw pointer get using const generics for compile-time optimization."]
    #[doc = " Uses native word size operations when the field fits in usize."]
    #[inline]
    pub const unsafe fn raw_get_const<const BIT_OFFSET: usize, const BIT_WIDTH: u8>(
        this: *const Self,
    ) -> u64 {
        debug_assert!(BIT_WIDTH <= 64);
        debug_assert!(BIT_OFFSET / 8 < N);
        debug_assert!((BIT_OFFSET + (BIT_WIDTH as usize) + 7) / 8 <= N);
        if BIT_WIDTH == 0 {
            return 0;
        }
        let start_byte = BIT_OFFSET / 8;
        let bit_shift = BIT_OFFSET % 8;
        let bytes_needed = (BIT_WIDTH as usize + bit_shift + 7) / 8;
        let storage_ptr = unsafe { core::ptr::addr_of!((*this).storage) as *const u8 };
        if BIT_WIDTH as usize + bit_shift <= usize::BITS as usize {
            let mut val = 0usize;
            if cfg!(target_endian = "big") {
                let mut i = 0;
                while i < bytes_needed {
                    let byte = unsafe { *storage_ptr.add(start_byte + i) };
                    val |= (byte.reverse_bits() as usize) << (i * 8);
                    i += 1;
                }
            } else {
                let mut i = 0;
                while i < bytes_needed {
                    let byte = unsafe { *storage_ptr.add(start_byte + i) };
                    val |= (byte as usize) << (i * 8);
                    i += 1;
                }
            }
            val >>= bit_shift;
            if (BIT_WIDTH as u32) < usize::BITS {
                val &= (1usize << BIT_WIDTH) - 1;
            }
            if cfg!(target_endian = "big") {
                val = val.reverse_bits() >> (usize::BITS as usize - BIT_WIDTH as usize);
            }
            val as u64
        } else {
            let mut val = 0u64;
            if cfg!(target_endian = "big") {
                let mut i = 0;
                while i < bytes_needed {
                    let byte = unsafe { *storage_ptr.add(start_byte + i) };
                    val |= (byte.reverse_bits() as u64) << (i * 8);
                    i += 1;
                }
            } else {
                let mut i = 0;
                while i < bytes_needed {
                    let byte = unsafe { *storage_ptr.add(start_byte + i) };
                    val |= (byte as u64) << (i * 8);
                    i += 1;
                }
            }
            val >>= bit_shift;
            if BIT_WIDTH < 64 {
                val &= (1u64 << BIT_WIDTH) - 1;
            }
            if cfg!(target_endian = "big") {
                val = val.reverse_bits() >> (64 - BIT_WIDTH as usize);
            }
            val
        }
    }
    #[doc = " Raw pointer set using const generics for compile-time optimization."]
    #[doc = " Uses native word size operations when the field fits in usize."]
    #[inline]
    pub unsafe fn raw_set_const<const BIT_OFFSET: usize, const BIT_WIDTH: u8>(
        this: *mut Self,
        val: u64,
    ) {
        debug_assert!(BIT_WIDTH <= 64);
        debug_assert!(BIT_OFFSET / 8 < N);
        debug_assert!((BIT_OFFSET + (BIT_WIDTH as usize) + 7) / 8 <= N);
        if BIT_WIDTH == 0 {
            return;
        }
        let start_byte = BIT_OFFSET / 8;
        let bit_shift = BIT_OFFSET % 8;
        let bytes_needed = (BIT_WIDTH as usize + bit_shift + 7) / 8;
        let storage_ptr = this.cast::<[u8; N]>().cast::<u8>();
        if BIT_WIDTH as usize + bit_shift <= usize::BITS as usize {
            let mut val = val as usize;
            if (BIT_WIDTH as u32) < usize::BITS {
                val &= (1usize << BIT_WIDTH) - 1;
            }
            if cfg!(target_endian = "big") {
                val = val.reverse_bits() >> (usize::BITS as usize - BIT_WIDTH as usize);
            }
            val <<= bit_shift;
            let field_mask = if BIT_WIDTH as usize + bit_shift >= usize::BITS as usize {
                !0usize << bit_shift
            } else {
                ((1usize << BIT_WIDTH) - 1) << bit_shift
            };
            let mut i = 0;
            while i < bytes_needed {
                let byte_val = (val >> (i * 8)) as u8;
                let byte_mask = (field_mask >> (i * 8)) as u8;
                let byte_ptr = unsafe { storage_ptr.add(start_byte + i) };
                if cfg!(target_endian = "big") {
                    let byte = unsafe { (*byte_ptr).reverse_bits() };
                    let new_byte = (byte & !byte_mask) | (byte_val & byte_mask);
                    unsafe { *byte_ptr = new_byte.reverse_bits() };
                } else {
                    unsafe { *byte_ptr = (*byte_ptr & !byte_mask) | (byte_val & byte_mask) };
                }
                i += 1;
            }
        } else {
            let mut val = val;
            if BIT_WIDTH < 64 {
                val &= (1u64 << BIT_WIDTH) - 1;
            }
            if cfg!(target_endian = "big") {
                val = val.reverse_bits() >> (64 - BIT_WIDTH as usize);
            }
            val <<= bit_shift;
            let field_mask = if BIT_WIDTH as usize + bit_shift >= 64 {
                !0u64 << bit_shift
            } else {
                ((1u64 << BIT_WIDTH) - 1) << bit_shift
            };
            let mut i = 0;
            while i < bytes_needed {
                let byte_val = (val >> (i * 8)) as u8;
                let byte_mask = (field_mask >> (i * 8)) as u8;
                let byte_ptr = unsafe { storage_ptr.add(start_byte + i) };
                if cfg!(target_endian = "big") {
                    let byte = unsafe { (*byte_ptr).reverse_bits() };
                    let new_byte = (byte & !byte_mask) | (byte_val & byte_mask);
                    unsafe { *byte_ptr = new_byte.reverse_bits() };
                } else {
                    unsafe { *byte_ptr = (*byte_ptr & !byte_mask) | (byte_val & byte_mask) };
                }
                i += 1;
            }
        }
    }
}
pub const hipIpcMemLazyEnablePeerAccess: u32 = 1;
pub const hipStreamDefault: u32 = 0;
pub const hipStreamNonBlocking: u32 = 1;
pub const hipEventDefault: u32 = 0;
pub const hipEventBlockingSync: u32 = 1;
pub const hipEventDisableTiming: u32 = 2;
pub const hipEventInterprocess: u32 = 4;
pub const hipEventRecordDefault: u32 = 0;
pub const hipEventRecordExternal: u32 = 1;
pub const hipEventWaitDefault: u32 = 0;
pub const hipEventWaitExternal: u32 = 1;
pub const hipEventDisableSystemFence: u32 = 536870912;
pub const hipEventReleaseToDevice: u32 = 1073741824;
pub const hipEventReleaseToSystem: u32 = 2147483648;
pub const hipHostMallocDefault: u32 = 0;
pub const hipHostMallocPortable: u32 = 1;
pub const hipHostMallocMapped: u32 = 2;
pub const hipHostMallocWriteCombined: u32 = 4;
pub const hipHostMallocUncached: u32 = 268435456;
pub const hipHostMallocNumaUser: u32 = 536870912;
pub const hipHostMallocCoherent: u32 = 1073741824;
pub const hipHostMallocNonCoherent: u32 = 2147483648;
pub const hipHostRegisterDefault: u32 = 0;
pub const hipHostRegisterPortable: u32 = 1;
pub const hipHostRegisterMapped: u32 = 2;
pub const hipHostRegisterIoMemory: u32 = 4;
pub const hipHostRegisterReadOnly: u32 = 8;
pub const hipStreamWaitValueGte: u32 = 0;
pub const hipStreamWaitValueEq: u32 = 1;
pub const hipStreamWaitValueAnd: u32 = 2;
pub const hipStreamWaitValueNor: u32 = 3;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct hipDeviceArch_t {
    pub _bindgen_align: [u32; 0],
    pub _bitfield_1: __BindgenBitfieldUnit<[u8; 3usize]>,
    pub __bindgen_padding_0: u8,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of hipDeviceArch_t"][::core::mem::size_of::<hipDeviceArch_t>() - 4usize];
    ["Alignment of hipDeviceArch_t"][::core::mem::align_of::<hipDeviceArch_t>() - 4usize];
};
impl hipDeviceArch_t {
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn hasGlobalInt32Atomics(&self) -> ::core::ffi::c_uint {
        unsafe { ::core::mem::transmute(self._bitfield_1.get_const::<0usize, 1u8>() as u32) }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn set_hasGlobalInt32Atomics(&mut self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            self._bitfield_1.set_const::<0usize, 1u8>(val as u64)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn hasGlobalInt32Atomics_raw(this: *const Self) -> ::core::ffi::c_uint {
        unsafe {
            ::core::mem::transmute(
                <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_get_const::<0usize, 1u8>(
                    ::core::ptr::addr_of!((*this)._bitfield_1),
                ) as u32,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn set_hasGlobalInt32Atomics_raw(this: *mut Self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_set_const::<0usize, 1u8>(
                ::core::ptr::addr_of_mut!((*this)._bitfield_1),
                val as u64,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn hasGlobalFloatAtomicExch(&self) -> ::core::ffi::c_uint {
        unsafe { ::core::mem::transmute(self._bitfield_1.get_const::<1usize, 1u8>() as u32) }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn set_hasGlobalFloatAtomicExch(&mut self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            self._bitfield_1.set_const::<1usize, 1u8>(val as u64)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn hasGlobalFloatAtomicExch_raw(this: *const Self) -> ::core::ffi::c_uint {
        unsafe {
            ::core::mem::transmute(
                <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_get_const::<1usize, 1u8>(
                    ::core::ptr::addr_of!((*this)._bitfield_1),
                ) as u32,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn set_hasGlobalFloatAtomicExch_raw(this: *mut Self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_set_const::<1usize, 1u8>(
                ::core::ptr::addr_of_mut!((*this)._bitfield_1),
                val as u64,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn hasSharedInt32Atomics(&self) -> ::core::ffi::c_uint {
        unsafe { ::core::mem::transmute(self._bitfield_1.get_const::<2usize, 1u8>() as u32) }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn set_hasSharedInt32Atomics(&mut self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            self._bitfield_1.set_const::<2usize, 1u8>(val as u64)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn hasSharedInt32Atomics_raw(this: *const Self) -> ::core::ffi::c_uint {
        unsafe {
            ::core::mem::transmute(
                <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_get_const::<2usize, 1u8>(
                    ::core::ptr::addr_of!((*this)._bitfield_1),
                ) as u32,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn set_hasSharedInt32Atomics_raw(this: *mut Self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_set_const::<2usize, 1u8>(
                ::core::ptr::addr_of_mut!((*this)._bitfield_1),
                val as u64,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn hasSharedFloatAtomicExch(&self) -> ::core::ffi::c_uint {
        unsafe { ::core::mem::transmute(self._bitfield_1.get_const::<3usize, 1u8>() as u32) }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn set_hasSharedFloatAtomicExch(&mut self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            self._bitfield_1.set_const::<3usize, 1u8>(val as u64)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn hasSharedFloatAtomicExch_raw(this: *const Self) -> ::core::ffi::c_uint {
        unsafe {
            ::core::mem::transmute(
                <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_get_const::<3usize, 1u8>(
                    ::core::ptr::addr_of!((*this)._bitfield_1),
                ) as u32,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn set_hasSharedFloatAtomicExch_raw(this: *mut Self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_set_const::<3usize, 1u8>(
                ::core::ptr::addr_of_mut!((*this)._bitfield_1),
                val as u64,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn hasFloatAtomicAdd(&self) -> ::core::ffi::c_uint {
        unsafe { ::core::mem::transmute(self._bitfield_1.get_const::<4usize, 1u8>() as u32) }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn set_hasFloatAtomicAdd(&mut self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            self._bitfield_1.set_const::<4usize, 1u8>(val as u64)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn hasFloatAtomicAdd_raw(this: *const Self) -> ::core::ffi::c_uint {
        unsafe {
            ::core::mem::transmute(
                <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_get_const::<4usize, 1u8>(
                    ::core::ptr::addr_of!((*this)._bitfield_1),
                ) as u32,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn set_hasFloatAtomicAdd_raw(this: *mut Self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_set_const::<4usize, 1u8>(
                ::core::ptr::addr_of_mut!((*this)._bitfield_1),
                val as u64,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn hasGlobalInt64Atomics(&self) -> ::core::ffi::c_uint {
        unsafe { ::core::mem::transmute(self._bitfield_1.get_const::<5usize, 1u8>() as u32) }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn set_hasGlobalInt64Atomics(&mut self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            self._bitfield_1.set_const::<5usize, 1u8>(val as u64)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn hasGlobalInt64Atomics_raw(this: *const Self) -> ::core::ffi::c_uint {
        unsafe {
            ::core::mem::transmute(
                <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_get_const::<5usize, 1u8>(
                    ::core::ptr::addr_of!((*this)._bitfield_1),
                ) as u32,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn set_hasGlobalInt64Atomics_raw(this: *mut Self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_set_const::<5usize, 1u8>(
                ::core::ptr::addr_of_mut!((*this)._bitfield_1),
                val as u64,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn hasSharedInt64Atomics(&self) -> ::core::ffi::c_uint {
        unsafe { ::core::mem::transmute(self._bitfield_1.get_const::<6usize, 1u8>() as u32) }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn set_hasSharedInt64Atomics(&mut self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            self._bitfield_1.set_const::<6usize, 1u8>(val as u64)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn hasSharedInt64Atomics_raw(this: *const Self) -> ::core::ffi::c_uint {
        unsafe {
            ::core::mem::transmute(
                <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_get_const::<6usize, 1u8>(
                    ::core::ptr::addr_of!((*this)._bitfield_1),
                ) as u32,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn set_hasSharedInt64Atomics_raw(this: *mut Self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_set_const::<6usize, 1u8>(
                ::core::ptr::addr_of_mut!((*this)._bitfield_1),
                val as u64,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn hasDoubles(&self) -> ::core::ffi::c_uint {
        unsafe { ::core::mem::transmute(self._bitfield_1.get_const::<7usize, 1u8>() as u32) }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn set_hasDoubles(&mut self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            self._bitfield_1.set_const::<7usize, 1u8>(val as u64)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn hasDoubles_raw(this: *const Self) -> ::core::ffi::c_uint {
        unsafe {
            ::core::mem::transmute(
                <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_get_const::<7usize, 1u8>(
                    ::core::ptr::addr_of!((*this)._bitfield_1),
                ) as u32,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn set_hasDoubles_raw(this: *mut Self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_set_const::<7usize, 1u8>(
                ::core::ptr::addr_of_mut!((*this)._bitfield_1),
                val as u64,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn hasWarpVote(&self) -> ::core::ffi::c_uint {
        unsafe { ::core::mem::transmute(self._bitfield_1.get_const::<8usize, 1u8>() as u32) }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn set_hasWarpVote(&mut self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            self._bitfield_1.set_const::<8usize, 1u8>(val as u64)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn hasWarpVote_raw(this: *const Self) -> ::core::ffi::c_uint {
        unsafe {
            ::core::mem::transmute(
                <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_get_const::<8usize, 1u8>(
                    ::core::ptr::addr_of!((*this)._bitfield_1),
                ) as u32,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn set_hasWarpVote_raw(this: *mut Self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_set_const::<8usize, 1u8>(
                ::core::ptr::addr_of_mut!((*this)._bitfield_1),
                val as u64,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn hasWarpBallot(&self) -> ::core::ffi::c_uint {
        unsafe { ::core::mem::transmute(self._bitfield_1.get_const::<9usize, 1u8>() as u32) }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn set_hasWarpBallot(&mut self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            self._bitfield_1.set_const::<9usize, 1u8>(val as u64)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn hasWarpBallot_raw(this: *const Self) -> ::core::ffi::c_uint {
        unsafe {
            ::core::mem::transmute(
                <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_get_const::<9usize, 1u8>(
                    ::core::ptr::addr_of!((*this)._bitfield_1),
                ) as u32,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn set_hasWarpBallot_raw(this: *mut Self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_set_const::<9usize, 1u8>(
                ::core::ptr::addr_of_mut!((*this)._bitfield_1),
                val as u64,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn hasWarpShuffle(&self) -> ::core::ffi::c_uint {
        unsafe { ::core::mem::transmute(self._bitfield_1.get_const::<10usize, 1u8>() as u32) }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn set_hasWarpShuffle(&mut self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            self._bitfield_1.set_const::<10usize, 1u8>(val as u64)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn hasWarpShuffle_raw(this: *const Self) -> ::core::ffi::c_uint {
        unsafe {
            ::core::mem::transmute(<__BindgenBitfieldUnit<[u8; 3usize]>>::raw_get_const::<
                10usize,
                1u8,
            >(::core::ptr::addr_of!((*this)._bitfield_1)) as u32)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn set_hasWarpShuffle_raw(this: *mut Self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_set_const::<10usize, 1u8>(
                ::core::ptr::addr_of_mut!((*this)._bitfield_1),
                val as u64,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn hasFunnelShift(&self) -> ::core::ffi::c_uint {
        unsafe { ::core::mem::transmute(self._bitfield_1.get_const::<11usize, 1u8>() as u32) }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn set_hasFunnelShift(&mut self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            self._bitfield_1.set_const::<11usize, 1u8>(val as u64)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn hasFunnelShift_raw(this: *const Self) -> ::core::ffi::c_uint {
        unsafe {
            ::core::mem::transmute(<__BindgenBitfieldUnit<[u8; 3usize]>>::raw_get_const::<
                11usize,
                1u8,
            >(::core::ptr::addr_of!((*this)._bitfield_1)) as u32)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn set_hasFunnelShift_raw(this: *mut Self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_set_const::<11usize, 1u8>(
                ::core::ptr::addr_of_mut!((*this)._bitfield_1),
                val as u64,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn hasThreadFenceSystem(&self) -> ::core::ffi::c_uint {
        unsafe { ::core::mem::transmute(self._bitfield_1.get_const::<12usize, 1u8>() as u32) }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn set_hasThreadFenceSystem(&mut self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            self._bitfield_1.set_const::<12usize, 1u8>(val as u64)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn hasThreadFenceSystem_raw(this: *const Self) -> ::core::ffi::c_uint {
        unsafe {
            ::core::mem::transmute(<__BindgenBitfieldUnit<[u8; 3usize]>>::raw_get_const::<
                12usize,
                1u8,
            >(::core::ptr::addr_of!((*this)._bitfield_1)) as u32)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn set_hasThreadFenceSystem_raw(this: *mut Self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_set_const::<12usize, 1u8>(
                ::core::ptr::addr_of_mut!((*this)._bitfield_1),
                val as u64,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn hasSyncThreadsExt(&self) -> ::core::ffi::c_uint {
        unsafe { ::core::mem::transmute(self._bitfield_1.get_const::<13usize, 1u8>() as u32) }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn set_hasSyncThreadsExt(&mut self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            self._bitfield_1.set_const::<13usize, 1u8>(val as u64)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn hasSyncThreadsExt_raw(this: *const Self) -> ::core::ffi::c_uint {
        unsafe {
            ::core::mem::transmute(<__BindgenBitfieldUnit<[u8; 3usize]>>::raw_get_const::<
                13usize,
                1u8,
            >(::core::ptr::addr_of!((*this)._bitfield_1)) as u32)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn set_hasSyncThreadsExt_raw(this: *mut Self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_set_const::<13usize, 1u8>(
                ::core::ptr::addr_of_mut!((*this)._bitfield_1),
                val as u64,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn hasSurfaceFuncs(&self) -> ::core::ffi::c_uint {
        unsafe { ::core::mem::transmute(self._bitfield_1.get_const::<14usize, 1u8>() as u32) }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn set_hasSurfaceFuncs(&mut self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            self._bitfield_1.set_const::<14usize, 1u8>(val as u64)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn hasSurfaceFuncs_raw(this: *const Self) -> ::core::ffi::c_uint {
        unsafe {
            ::core::mem::transmute(<__BindgenBitfieldUnit<[u8; 3usize]>>::raw_get_const::<
                14usize,
                1u8,
            >(::core::ptr::addr_of!((*this)._bitfield_1)) as u32)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn set_hasSurfaceFuncs_raw(this: *mut Self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_set_const::<14usize, 1u8>(
                ::core::ptr::addr_of_mut!((*this)._bitfield_1),
                val as u64,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn has3dGrid(&self) -> ::core::ffi::c_uint {
        unsafe { ::core::mem::transmute(self._bitfield_1.get_const::<15usize, 1u8>() as u32) }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn set_has3dGrid(&mut self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            self._bitfield_1.set_const::<15usize, 1u8>(val as u64)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn has3dGrid_raw(this: *const Self) -> ::core::ffi::c_uint {
        unsafe {
            ::core::mem::transmute(<__BindgenBitfieldUnit<[u8; 3usize]>>::raw_get_const::<
                15usize,
                1u8,
            >(::core::ptr::addr_of!((*this)._bitfield_1)) as u32)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn set_has3dGrid_raw(this: *mut Self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_set_const::<15usize, 1u8>(
                ::core::ptr::addr_of_mut!((*this)._bitfield_1),
                val as u64,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn hasDynamicParallelism(&self) -> ::core::ffi::c_uint {
        unsafe { ::core::mem::transmute(self._bitfield_1.get_const::<16usize, 1u8>() as u32) }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn set_hasDynamicParallelism(&mut self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            self._bitfield_1.set_const::<16usize, 1u8>(val as u64)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn hasDynamicParallelism_raw(this: *const Self) -> ::core::ffi::c_uint {
        unsafe {
            ::core::mem::transmute(<__BindgenBitfieldUnit<[u8; 3usize]>>::raw_get_const::<
                16usize,
                1u8,
            >(::core::ptr::addr_of!((*this)._bitfield_1)) as u32)
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub unsafe fn set_hasDynamicParallelism_raw(this: *mut Self, val: ::core::ffi::c_uint) {
        unsafe {
            let val: u32 = ::core::mem::transmute(val);
            <__BindgenBitfieldUnit<[u8; 3usize]>>::raw_set_const::<16usize, 1u8>(
                ::core::ptr::addr_of_mut!((*this)._bitfield_1),
                val as u64,
            )
        }
    }
    #[inline]
    #[allow(unnecessary_transmutes)]
    pub fn new_bitfield_1(
        hasGlobalInt32Atomics: ::core::ffi::c_uint,
        hasGlobalFloatAtomicExch: ::core::ffi::c_uint,
        hasSharedInt32Atomics: ::core::ffi::c_uint,
        hasSharedFloatAtomicExch: ::core::ffi::c_uint,
        hasFloatAtomicAdd: ::core::ffi::c_uint,
        hasGlobalInt64Atomics: ::core::ffi::c_uint,
        hasSharedInt64Atomics: ::core::ffi::c_uint,
        hasDoubles: ::core::ffi::c_uint,
        hasWarpVote: ::core::ffi::c_uint,
        hasWarpBallot: ::core::ffi::c_uint,
        hasWarpShuffle: ::core::ffi::c_uint,
        hasFunnelShift: ::core::ffi::c_uint,
        hasThreadFenceSystem: ::core::ffi::c_uint,
        hasSyncThreadsExt: ::core::ffi::c_uint,
        hasSurfaceFuncs: ::core::ffi::c_uint,
        has3dGrid: ::core::ffi::c_uint,
        hasDynamicParallelism: ::core::ffi::c_uint,
    ) -> __BindgenBitfieldUnit<[u8; 3usize]> {
        let mut __bindgen_bitfield_unit: __BindgenBitfieldUnit<[u8; 3usize]> = Default::default();
        __bindgen_bitfield_unit.set_const::<0usize, 1u8>({
            let hasGlobalInt32Atomics: u32 =
                unsafe { ::core::mem::transmute(hasGlobalInt32Atomics) };
            hasGlobalInt32Atomics as u64
        });
        __bindgen_bitfield_unit.set_const::<1usize, 1u8>({
            let hasGlobalFloatAtomicExch: u32 =
                unsafe { ::core::mem::transmute(hasGlobalFloatAtomicExch) };
            hasGlobalFloatAtomicExch as u64
        });
        __bindgen_bitfield_unit.set_const::<2usize, 1u8>({
            let hasSharedInt32Atomics: u32 =
                unsafe { ::core::mem::transmute(hasSharedInt32Atomics) };
            hasSharedInt32Atomics as u64
        });
        __bindgen_bitfield_unit.set_const::<3usize, 1u8>({
            let hasSharedFloatAtomicExch: u32 =
                unsafe { ::core::mem::transmute(hasSharedFloatAtomicExch) };
            hasSharedFloatAtomicExch as u64
        });
        __bindgen_bitfield_unit.set_const::<4usize, 1u8>({
            let hasFloatAtomicAdd: u32 = unsafe { ::core::mem::transmute(hasFloatAtomicAdd) };
            hasFloatAtomicAdd as u64
        });
        __bindgen_bitfield_unit.set_const::<5usize, 1u8>({
            let hasGlobalInt64Atomics: u32 =
                unsafe { ::core::mem::transmute(hasGlobalInt64Atomics) };
            hasGlobalInt64Atomics as u64
        });
        __bindgen_bitfield_unit.set_const::<6usize, 1u8>({
            let hasSharedInt64Atomics: u32 =
                unsafe { ::core::mem::transmute(hasSharedInt64Atomics) };
            hasSharedInt64Atomics as u64
        });
        __bindgen_bitfield_unit.set_const::<7usize, 1u8>({
            let hasDoubles: u32 = unsafe { ::core::mem::transmute(hasDoubles) };
            hasDoubles as u64
        });
        __bindgen_bitfield_unit.set_const::<8usize, 1u8>({
            let hasWarpVote: u32 = unsafe { ::core::mem::transmute(hasWarpVote) };
            hasWarpVote as u64
        });
        __bindgen_bitfield_unit.set_const::<9usize, 1u8>({
            let hasWarpBallot: u32 = unsafe { ::core::mem::transmute(hasWarpBallot) };
            hasWarpBallot as u64
        });
        __bindgen_bitfield_unit.set_const::<10usize, 1u8>({
            let hasWarpShuffle: u32 = unsafe { ::core::mem::transmute(hasWarpShuffle) };
            hasWarpShuffle as u64
        });
        __bindgen_bitfield_unit.set_const::<11usize, 1u8>({
            let hasFunnelShift: u32 = unsafe { ::core::mem::transmute(hasFunnelShift) };
            hasFunnelShift as u64
        });
        __bindgen_bitfield_unit.set_const::<12usize, 1u8>({
            let hasThreadFenceSystem: u32 = unsafe { ::core::mem::transmute(hasThreadFenceSystem) };
            hasThreadFenceSystem as u64
        });
        __bindgen_bitfield_unit.set_const::<13usize, 1u8>({
            let hasSyncThreadsExt: u32 = unsafe { ::core::mem::transmute(hasSyncThreadsExt) };
            hasSyncThreadsExt as u64
        });
        __bindgen_bitfield_unit.set_const::<14usize, 1u8>({
            let hasSurfaceFuncs: u32 = unsafe { ::core::mem::transmute(hasSurfaceFuncs) };
            hasSurfaceFuncs as u64
        });
        __bindgen_bitfield_unit.set_const::<15usize, 1u8>({
            let has3dGrid: u32 = unsafe { ::core::mem::transmute(has3dGrid) };
            has3dGrid as u64
        });
        __bindgen_bitfield_unit.set_const::<16usize, 1u8>({
            let hasDynamicParallelism: u32 =
                unsafe { ::core::mem::transmute(hasDynamicParallelism) };
            hasDynamicParallelism as u64
        });
        __bindgen_bitfield_unit
    }
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct hipUUID_t {
    pub bytes: [::core::ffi::c_char; 16usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of hipUUID_t"][::core::mem::size_of::<hipUUID_t>() - 16usize];
    ["Alignment of hipUUID_t"][::core::mem::align_of::<hipUUID_t>() - 1usize];
    ["Offset of field: hipUUID_t::bytes"][::core::mem::offset_of!(hipUUID_t, bytes) - 0usize];
};
pub type hipUUID = hipUUID_t;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct hipDeviceProp_tR0600 {
    pub name: [::core::ffi::c_char; 256usize],
    pub uuid: hipUUID,
    pub luid: [::core::ffi::c_char; 8usize],
    pub luidDeviceNodeMask: ::core::ffi::c_uint,
    pub totalGlobalMem: usize,
    pub sharedMemPerBlock: usize,
    pub regsPerBlock: ::core::ffi::c_int,
    pub warpSize: ::core::ffi::c_int,
    pub memPitch: usize,
    pub maxThreadsPerBlock: ::core::ffi::c_int,
    pub maxThreadsDim: [::core::ffi::c_int; 3usize],
    pub maxGridSize: [::core::ffi::c_int; 3usize],
    pub clockRate: ::core::ffi::c_int,
    pub totalConstMem: usize,
    pub major: ::core::ffi::c_int,
    pub minor: ::core::ffi::c_int,
    pub textureAlignment: usize,
    pub texturePitchAlignment: usize,
    pub deviceOverlap: ::core::ffi::c_int,
    pub multiProcessorCount: ::core::ffi::c_int,
    pub kernelExecTimeoutEnabled: ::core::ffi::c_int,
    pub integrated: ::core::ffi::c_int,
    pub canMapHostMemory: ::core::ffi::c_int,
    pub computeMode: ::core::ffi::c_int,
    pub maxTexture1D: ::core::ffi::c_int,
    pub maxTexture1DMipmap: ::core::ffi::c_int,
    pub maxTexture1DLinear: ::core::ffi::c_int,
    pub maxTexture2D: [::core::ffi::c_int; 2usize],
    pub maxTexture2DMipmap: [::core::ffi::c_int; 2usize],
    pub maxTexture2DLinear: [::core::ffi::c_int; 3usize],
    pub maxTexture2DGather: [::core::ffi::c_int; 2usize],
    pub maxTexture3D: [::core::ffi::c_int; 3usize],
    pub maxTexture3DAlt: [::core::ffi::c_int; 3usize],
    pub maxTextureCubemap: ::core::ffi::c_int,
    pub maxTexture1DLayered: [::core::ffi::c_int; 2usize],
    pub maxTexture2DLayered: [::core::ffi::c_int; 3usize],
    pub maxTextureCubemapLayered: [::core::ffi::c_int; 2usize],
    pub maxSurface1D: ::core::ffi::c_int,
    pub maxSurface2D: [::core::ffi::c_int; 2usize],
    pub maxSurface3D: [::core::ffi::c_int; 3usize],
    pub maxSurface1DLayered: [::core::ffi::c_int; 2usize],
    pub maxSurface2DLayered: [::core::ffi::c_int; 3usize],
    pub maxSurfaceCubemap: ::core::ffi::c_int,
    pub maxSurfaceCubemapLayered: [::core::ffi::c_int; 2usize],
    pub surfaceAlignment: usize,
    pub concurrentKernels: ::core::ffi::c_int,
    pub ECCEnabled: ::core::ffi::c_int,
    pub pciBusID: ::core::ffi::c_int,
    pub pciDeviceID: ::core::ffi::c_int,
    pub pciDomainID: ::core::ffi::c_int,
    pub tccDriver: ::core::ffi::c_int,
    pub asyncEngineCount: ::core::ffi::c_int,
    pub unifiedAddressing: ::core::ffi::c_int,
    pub memoryClockRate: ::core::ffi::c_int,
    pub memoryBusWidth: ::core::ffi::c_int,
    pub l2CacheSize: ::core::ffi::c_int,
    pub persistingL2CacheMaxSize: ::core::ffi::c_int,
    pub maxThreadsPerMultiProcessor: ::core::ffi::c_int,
    pub streamPrioritiesSupported: ::core::ffi::c_int,
    pub globalL1CacheSupported: ::core::ffi::c_int,
    pub localL1CacheSupported: ::core::ffi::c_int,
    pub sharedMemPerMultiprocessor: usize,
    pub regsPerMultiprocessor: ::core::ffi::c_int,
    pub managedMemory: ::core::ffi::c_int,
    pub isMultiGpuBoard: ::core::ffi::c_int,
    pub multiGpuBoardGroupID: ::core::ffi::c_int,
    pub hostNativeAtomicSupported: ::core::ffi::c_int,
    pub singleToDoublePrecisionPerfRatio: ::core::ffi::c_int,
    pub pageableMemoryAccess: ::core::ffi::c_int,
    pub concurrentManagedAccess: ::core::ffi::c_int,
    pub computePreemptionSupported: ::core::ffi::c_int,
    pub canUseHostPointerForRegisteredMem: ::core::ffi::c_int,
    pub cooperativeLaunch: ::core::ffi::c_int,
    pub cooperativeMultiDeviceLaunch: ::core::ffi::c_int,
    pub sharedMemPerBlockOptin: usize,
    pub pageableMemoryAccessUsesHostPageTables: ::core::ffi::c_int,
    pub directManagedMemAccessFromHost: ::core::ffi::c_int,
    pub maxBlocksPerMultiProcessor: ::core::ffi::c_int,
    pub accessPolicyMaxWindowSize: ::core::ffi::c_int,
    pub reservedSharedMemPerBlock: usize,
    pub hostRegisterSupported: ::core::ffi::c_int,
    pub sparseHipArraySupported: ::core::ffi::c_int,
    pub hostRegisterReadOnlySupported: ::core::ffi::c_int,
    pub timelineSemaphoreInteropSupported: ::core::ffi::c_int,
    pub memoryPoolsSupported: ::core::ffi::c_int,
    pub gpuDirectRDMASupported: ::core::ffi::c_int,
    pub gpuDirectRDMAFlushWritesOptions: ::core::ffi::c_uint,
    pub gpuDirectRDMAWritesOrdering: ::core::ffi::c_int,
    pub memoryPoolSupportedHandleTypes: ::core::ffi::c_uint,
    pub deferredMappingHipArraySupported: ::core::ffi::c_int,
    pub ipcEventSupported: ::core::ffi::c_int,
    pub clusterLaunch: ::core::ffi::c_int,
    pub unifiedFunctionPointers: ::core::ffi::c_int,
    pub reserved: [::core::ffi::c_int; 63usize],
    pub hipReserved: [::core::ffi::c_int; 32usize],
    pub gcnArchName: [::core::ffi::c_char; 256usize],
    pub maxSharedMemoryPerMultiProcessor: usize,
    pub clockInstructionRate: ::core::ffi::c_int,
    pub arch: hipDeviceArch_t,
    pub hdpMemFlushCntl: *mut ::core::ffi::c_uint,
    pub hdpRegFlushCntl: *mut ::core::ffi::c_uint,
    pub cooperativeMultiDeviceUnmatchedFunc: ::core::ffi::c_int,
    pub cooperativeMultiDeviceUnmatchedGridDim: ::core::ffi::c_int,
    pub cooperativeMultiDeviceUnmatchedBlockDim: ::core::ffi::c_int,
    pub cooperativeMultiDeviceUnmatchedSharedMem: ::core::ffi::c_int,
    pub isLargeBar: ::core::ffi::c_int,
    pub asicRevision: ::core::ffi::c_int,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of hipDeviceProp_tR0600"][::core::mem::size_of::<hipDeviceProp_tR0600>() - 1472usize];
    ["Alignment of hipDeviceProp_tR0600"][::core::mem::align_of::<hipDeviceProp_tR0600>() - 8usize];
    ["Offset of field: hipDeviceProp_tR0600::name"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, name) - 0usize];
    ["Offset of field: hipDeviceProp_tR0600::uuid"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, uuid) - 256usize];
    ["Offset of field: hipDeviceProp_tR0600::luid"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, luid) - 272usize];
    ["Offset of field: hipDeviceProp_tR0600::luidDeviceNodeMask"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, luidDeviceNodeMask) - 280usize];
    ["Offset of field: hipDeviceProp_tR0600::totalGlobalMem"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, totalGlobalMem) - 288usize];
    ["Offset of field: hipDeviceProp_tR0600::sharedMemPerBlock"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, sharedMemPerBlock) - 296usize];
    ["Offset of field: hipDeviceProp_tR0600::regsPerBlock"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, regsPerBlock) - 304usize];
    ["Offset of field: hipDeviceProp_tR0600::warpSize"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, warpSize) - 308usize];
    ["Offset of field: hipDeviceProp_tR0600::memPitch"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, memPitch) - 312usize];
    ["Offset of field: hipDeviceProp_tR0600::maxThreadsPerBlock"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxThreadsPerBlock) - 320usize];
    ["Offset of field: hipDeviceProp_tR0600::maxThreadsDim"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxThreadsDim) - 324usize];
    ["Offset of field: hipDeviceProp_tR0600::maxGridSize"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxGridSize) - 336usize];
    ["Offset of field: hipDeviceProp_tR0600::clockRate"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, clockRate) - 348usize];
    ["Offset of field: hipDeviceProp_tR0600::totalConstMem"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, totalConstMem) - 352usize];
    ["Offset of field: hipDeviceProp_tR0600::major"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, major) - 360usize];
    ["Offset of field: hipDeviceProp_tR0600::minor"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, minor) - 364usize];
    ["Offset of field: hipDeviceProp_tR0600::textureAlignment"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, textureAlignment) - 368usize];
    ["Offset of field: hipDeviceProp_tR0600::texturePitchAlignment"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, texturePitchAlignment) - 376usize];
    ["Offset of field: hipDeviceProp_tR0600::deviceOverlap"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, deviceOverlap) - 384usize];
    ["Offset of field: hipDeviceProp_tR0600::multiProcessorCount"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, multiProcessorCount) - 388usize];
    ["Offset of field: hipDeviceProp_tR0600::kernelExecTimeoutEnabled"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, kernelExecTimeoutEnabled) - 392usize];
    ["Offset of field: hipDeviceProp_tR0600::integrated"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, integrated) - 396usize];
    ["Offset of field: hipDeviceProp_tR0600::canMapHostMemory"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, canMapHostMemory) - 400usize];
    ["Offset of field: hipDeviceProp_tR0600::computeMode"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, computeMode) - 404usize];
    ["Offset of field: hipDeviceProp_tR0600::maxTexture1D"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxTexture1D) - 408usize];
    ["Offset of field: hipDeviceProp_tR0600::maxTexture1DMipmap"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxTexture1DMipmap) - 412usize];
    ["Offset of field: hipDeviceProp_tR0600::maxTexture1DLinear"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxTexture1DLinear) - 416usize];
    ["Offset of field: hipDeviceProp_tR0600::maxTexture2D"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxTexture2D) - 420usize];
    ["Offset of field: hipDeviceProp_tR0600::maxTexture2DMipmap"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxTexture2DMipmap) - 428usize];
    ["Offset of field: hipDeviceProp_tR0600::maxTexture2DLinear"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxTexture2DLinear) - 436usize];
    ["Offset of field: hipDeviceProp_tR0600::maxTexture2DGather"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxTexture2DGather) - 448usize];
    ["Offset of field: hipDeviceProp_tR0600::maxTexture3D"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxTexture3D) - 456usize];
    ["Offset of field: hipDeviceProp_tR0600::maxTexture3DAlt"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxTexture3DAlt) - 468usize];
    ["Offset of field: hipDeviceProp_tR0600::maxTextureCubemap"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxTextureCubemap) - 480usize];
    ["Offset of field: hipDeviceProp_tR0600::maxTexture1DLayered"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxTexture1DLayered) - 484usize];
    ["Offset of field: hipDeviceProp_tR0600::maxTexture2DLayered"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxTexture2DLayered) - 492usize];
    ["Offset of field: hipDeviceProp_tR0600::maxTextureCubemapLayered"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxTextureCubemapLayered) - 504usize];
    ["Offset of field: hipDeviceProp_tR0600::maxSurface1D"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxSurface1D) - 512usize];
    ["Offset of field: hipDeviceProp_tR0600::maxSurface2D"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxSurface2D) - 516usize];
    ["Offset of field: hipDeviceProp_tR0600::maxSurface3D"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxSurface3D) - 524usize];
    ["Offset of field: hipDeviceProp_tR0600::maxSurface1DLayered"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxSurface1DLayered) - 536usize];
    ["Offset of field: hipDeviceProp_tR0600::maxSurface2DLayered"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxSurface2DLayered) - 544usize];
    ["Offset of field: hipDeviceProp_tR0600::maxSurfaceCubemap"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxSurfaceCubemap) - 556usize];
    ["Offset of field: hipDeviceProp_tR0600::maxSurfaceCubemapLayered"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxSurfaceCubemapLayered) - 560usize];
    ["Offset of field: hipDeviceProp_tR0600::surfaceAlignment"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, surfaceAlignment) - 568usize];
    ["Offset of field: hipDeviceProp_tR0600::concurrentKernels"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, concurrentKernels) - 576usize];
    ["Offset of field: hipDeviceProp_tR0600::ECCEnabled"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, ECCEnabled) - 580usize];
    ["Offset of field: hipDeviceProp_tR0600::pciBusID"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, pciBusID) - 584usize];
    ["Offset of field: hipDeviceProp_tR0600::pciDeviceID"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, pciDeviceID) - 588usize];
    ["Offset of field: hipDeviceProp_tR0600::pciDomainID"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, pciDomainID) - 592usize];
    ["Offset of field: hipDeviceProp_tR0600::tccDriver"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, tccDriver) - 596usize];
    ["Offset of field: hipDeviceProp_tR0600::asyncEngineCount"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, asyncEngineCount) - 600usize];
    ["Offset of field: hipDeviceProp_tR0600::unifiedAddressing"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, unifiedAddressing) - 604usize];
    ["Offset of field: hipDeviceProp_tR0600::memoryClockRate"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, memoryClockRate) - 608usize];
    ["Offset of field: hipDeviceProp_tR0600::memoryBusWidth"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, memoryBusWidth) - 612usize];
    ["Offset of field: hipDeviceProp_tR0600::l2CacheSize"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, l2CacheSize) - 616usize];
    ["Offset of field: hipDeviceProp_tR0600::persistingL2CacheMaxSize"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, persistingL2CacheMaxSize) - 620usize];
    ["Offset of field: hipDeviceProp_tR0600::maxThreadsPerMultiProcessor"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxThreadsPerMultiProcessor) - 624usize];
    ["Offset of field: hipDeviceProp_tR0600::streamPrioritiesSupported"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, streamPrioritiesSupported) - 628usize];
    ["Offset of field: hipDeviceProp_tR0600::globalL1CacheSupported"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, globalL1CacheSupported) - 632usize];
    ["Offset of field: hipDeviceProp_tR0600::localL1CacheSupported"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, localL1CacheSupported) - 636usize];
    ["Offset of field: hipDeviceProp_tR0600::sharedMemPerMultiprocessor"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, sharedMemPerMultiprocessor) - 640usize];
    ["Offset of field: hipDeviceProp_tR0600::regsPerMultiprocessor"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, regsPerMultiprocessor) - 648usize];
    ["Offset of field: hipDeviceProp_tR0600::managedMemory"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, managedMemory) - 652usize];
    ["Offset of field: hipDeviceProp_tR0600::isMultiGpuBoard"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, isMultiGpuBoard) - 656usize];
    ["Offset of field: hipDeviceProp_tR0600::multiGpuBoardGroupID"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, multiGpuBoardGroupID) - 660usize];
    ["Offset of field: hipDeviceProp_tR0600::hostNativeAtomicSupported"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, hostNativeAtomicSupported) - 664usize];
    ["Offset of field: hipDeviceProp_tR0600::singleToDoublePrecisionPerfRatio"][::core::mem::offset_of!(
        hipDeviceProp_tR0600,
        singleToDoublePrecisionPerfRatio
    ) - 668usize];
    ["Offset of field: hipDeviceProp_tR0600::pageableMemoryAccess"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, pageableMemoryAccess) - 672usize];
    ["Offset of field: hipDeviceProp_tR0600::concurrentManagedAccess"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, concurrentManagedAccess) - 676usize];
    ["Offset of field: hipDeviceProp_tR0600::computePreemptionSupported"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, computePreemptionSupported) - 680usize];
    ["Offset of field: hipDeviceProp_tR0600::canUseHostPointerForRegisteredMem"][::core::mem::offset_of!(
        hipDeviceProp_tR0600,
        canUseHostPointerForRegisteredMem
    ) - 684usize];
    ["Offset of field: hipDeviceProp_tR0600::cooperativeLaunch"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, cooperativeLaunch) - 688usize];
    ["Offset of field: hipDeviceProp_tR0600::cooperativeMultiDeviceLaunch"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, cooperativeMultiDeviceLaunch) - 692usize];
    ["Offset of field: hipDeviceProp_tR0600::sharedMemPerBlockOptin"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, sharedMemPerBlockOptin) - 696usize];
    ["Offset of field: hipDeviceProp_tR0600::pageableMemoryAccessUsesHostPageTables"][::core::mem::offset_of!(
        hipDeviceProp_tR0600,
        pageableMemoryAccessUsesHostPageTables
    ) - 704usize];
    ["Offset of field: hipDeviceProp_tR0600::directManagedMemAccessFromHost"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, directManagedMemAccessFromHost) - 708usize];
    ["Offset of field: hipDeviceProp_tR0600::maxBlocksPerMultiProcessor"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, maxBlocksPerMultiProcessor) - 712usize];
    ["Offset of field: hipDeviceProp_tR0600::accessPolicyMaxWindowSize"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, accessPolicyMaxWindowSize) - 716usize];
    ["Offset of field: hipDeviceProp_tR0600::reservedSharedMemPerBlock"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, reservedSharedMemPerBlock) - 720usize];
    ["Offset of field: hipDeviceProp_tR0600::hostRegisterSupported"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, hostRegisterSupported) - 728usize];
    ["Offset of field: hipDeviceProp_tR0600::sparseHipArraySupported"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, sparseHipArraySupported) - 732usize];
    ["Offset of field: hipDeviceProp_tR0600::hostRegisterReadOnlySupported"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, hostRegisterReadOnlySupported) - 736usize];
    ["Offset of field: hipDeviceProp_tR0600::timelineSemaphoreInteropSupported"][::core::mem::offset_of!(
        hipDeviceProp_tR0600,
        timelineSemaphoreInteropSupported
    ) - 740usize];
    ["Offset of field: hipDeviceProp_tR0600::memoryPoolsSupported"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, memoryPoolsSupported) - 744usize];
    ["Offset of field: hipDeviceProp_tR0600::gpuDirectRDMASupported"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, gpuDirectRDMASupported) - 748usize];
    ["Offset of field: hipDeviceProp_tR0600::gpuDirectRDMAFlushWritesOptions"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, gpuDirectRDMAFlushWritesOptions) - 752usize];
    ["Offset of field: hipDeviceProp_tR0600::gpuDirectRDMAWritesOrdering"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, gpuDirectRDMAWritesOrdering) - 756usize];
    ["Offset of field: hipDeviceProp_tR0600::memoryPoolSupportedHandleTypes"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, memoryPoolSupportedHandleTypes) - 760usize];
    ["Offset of field: hipDeviceProp_tR0600::deferredMappingHipArraySupported"][::core::mem::offset_of!(
        hipDeviceProp_tR0600,
        deferredMappingHipArraySupported
    ) - 764usize];
    ["Offset of field: hipDeviceProp_tR0600::ipcEventSupported"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, ipcEventSupported) - 768usize];
    ["Offset of field: hipDeviceProp_tR0600::clusterLaunch"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, clusterLaunch) - 772usize];
    ["Offset of field: hipDeviceProp_tR0600::unifiedFunctionPointers"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, unifiedFunctionPointers) - 776usize];
    ["Offset of field: hipDeviceProp_tR0600::reserved"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, reserved) - 780usize];
    ["Offset of field: hipDeviceProp_tR0600::hipReserved"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, hipReserved) - 1032usize];
    ["Offset of field: hipDeviceProp_tR0600::gcnArchName"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, gcnArchName) - 1160usize];
    ["Offset of field: hipDeviceProp_tR0600::maxSharedMemoryPerMultiProcessor"][::core::mem::offset_of!(
        hipDeviceProp_tR0600,
        maxSharedMemoryPerMultiProcessor
    ) - 1416usize];
    ["Offset of field: hipDeviceProp_tR0600::clockInstructionRate"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, clockInstructionRate) - 1424usize];
    ["Offset of field: hipDeviceProp_tR0600::arch"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, arch) - 1428usize];
    ["Offset of field: hipDeviceProp_tR0600::hdpMemFlushCntl"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, hdpMemFlushCntl) - 1432usize];
    ["Offset of field: hipDeviceProp_tR0600::hdpRegFlushCntl"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, hdpRegFlushCntl) - 1440usize];
    ["Offset of field: hipDeviceProp_tR0600::cooperativeMultiDeviceUnmatchedFunc"][::core::mem::offset_of!(
        hipDeviceProp_tR0600,
        cooperativeMultiDeviceUnmatchedFunc
    ) - 1448usize];
    ["Offset of field: hipDeviceProp_tR0600::cooperativeMultiDeviceUnmatchedGridDim"][::core::mem::offset_of!(
        hipDeviceProp_tR0600,
        cooperativeMultiDeviceUnmatchedGridDim
    )
        - 1452usize];
    ["Offset of field: hipDeviceProp_tR0600::cooperativeMultiDeviceUnmatchedBlockDim"][::core::mem::offset_of!(
        hipDeviceProp_tR0600,
        cooperativeMultiDeviceUnmatchedBlockDim
    )
        - 1456usize];
    ["Offset of field: hipDeviceProp_tR0600::cooperativeMultiDeviceUnmatchedSharedMem"][::core::mem::offset_of!(
        hipDeviceProp_tR0600,
        cooperativeMultiDeviceUnmatchedSharedMem
    )
        - 1460usize];
    ["Offset of field: hipDeviceProp_tR0600::isLargeBar"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, isLargeBar) - 1464usize];
    ["Offset of field: hipDeviceProp_tR0600::asicRevision"]
        [::core::mem::offset_of!(hipDeviceProp_tR0600, asicRevision) - 1468usize];
};
pub const hipMemoryTypeUnregistered: hipMemoryType = 0;
pub const hipMemoryTypeHost: hipMemoryType = 1;
pub const hipMemoryTypeDevice: hipMemoryType = 2;
pub const hipMemoryTypeManaged: hipMemoryType = 3;
pub const hipMemoryTypeArray: hipMemoryType = 10;
pub const hipMemoryTypeUnified: hipMemoryType = 11;
pub type hipMemoryType = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct hipPointerAttribute_t {
    pub type_: hipMemoryType,
    pub device: ::core::ffi::c_int,
    pub devicePointer: *mut ::core::ffi::c_void,
    pub hostPointer: *mut ::core::ffi::c_void,
    pub isManaged: ::core::ffi::c_int,
    pub allocationFlags: ::core::ffi::c_uint,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of hipPointerAttribute_t"][::core::mem::size_of::<hipPointerAttribute_t>() - 32usize];
    ["Alignment of hipPointerAttribute_t"]
        [::core::mem::align_of::<hipPointerAttribute_t>() - 8usize];
    ["Offset of field: hipPointerAttribute_t::type_"]
        [::core::mem::offset_of!(hipPointerAttribute_t, type_) - 0usize];
    ["Offset of field: hipPointerAttribute_t::device"]
        [::core::mem::offset_of!(hipPointerAttribute_t, device) - 4usize];
    ["Offset of field: hipPointerAttribute_t::devicePointer"]
        [::core::mem::offset_of!(hipPointerAttribute_t, devicePointer) - 8usize];
    ["Offset of field: hipPointerAttribute_t::hostPointer"]
        [::core::mem::offset_of!(hipPointerAttribute_t, hostPointer) - 16usize];
    ["Offset of field: hipPointerAttribute_t::isManaged"]
        [::core::mem::offset_of!(hipPointerAttribute_t, isManaged) - 24usize];
    ["Offset of field: hipPointerAttribute_t::allocationFlags"]
        [::core::mem::offset_of!(hipPointerAttribute_t, allocationFlags) - 28usize];
};
pub const hipSuccess: hipError_t = 0;
pub const hipErrorInvalidValue: hipError_t = 1;
pub const hipErrorOutOfMemory: hipError_t = 2;
pub const hipErrorMemoryAllocation: hipError_t = 2;
pub const hipErrorNotInitialized: hipError_t = 3;
pub const hipErrorInitializationError: hipError_t = 3;
pub const hipErrorDeinitialized: hipError_t = 4;
pub const hipErrorProfilerDisabled: hipError_t = 5;
pub const hipErrorProfilerNotInitialized: hipError_t = 6;
pub const hipErrorProfilerAlreadyStarted: hipError_t = 7;
pub const hipErrorProfilerAlreadyStopped: hipError_t = 8;
pub const hipErrorInvalidConfiguration: hipError_t = 9;
pub const hipErrorInvalidPitchValue: hipError_t = 12;
pub const hipErrorInvalidSymbol: hipError_t = 13;
pub const hipErrorInvalidDevicePointer: hipError_t = 17;
pub const hipErrorInvalidMemcpyDirection: hipError_t = 21;
pub const hipErrorInsufficientDriver: hipError_t = 35;
pub const hipErrorMissingConfiguration: hipError_t = 52;
pub const hipErrorPriorLaunchFailure: hipError_t = 53;
pub const hipErrorInvalidDeviceFunction: hipError_t = 98;
pub const hipErrorNoDevice: hipError_t = 100;
pub const hipErrorInvalidDevice: hipError_t = 101;
pub const hipErrorInvalidImage: hipError_t = 200;
pub const hipErrorInvalidContext: hipError_t = 201;
pub const hipErrorContextAlreadyCurrent: hipError_t = 202;
pub const hipErrorMapFailed: hipError_t = 205;
pub const hipErrorMapBufferObjectFailed: hipError_t = 205;
pub const hipErrorUnmapFailed: hipError_t = 206;
pub const hipErrorArrayIsMapped: hipError_t = 207;
pub const hipErrorAlreadyMapped: hipError_t = 208;
pub const hipErrorNoBinaryForGpu: hipError_t = 209;
pub const hipErrorAlreadyAcquired: hipError_t = 210;
pub const hipErrorNotMapped: hipError_t = 211;
pub const hipErrorNotMappedAsArray: hipError_t = 212;
pub const hipErrorNotMappedAsPointer: hipError_t = 213;
pub const hipErrorECCNotCorrectable: hipError_t = 214;
pub const hipErrorUnsupportedLimit: hipError_t = 215;
pub const hipErrorContextAlreadyInUse: hipError_t = 216;
pub const hipErrorPeerAccessUnsupported: hipError_t = 217;
pub const hipErrorInvalidKernelFile: hipError_t = 218;
pub const hipErrorInvalidGraphicsContext: hipError_t = 219;
pub const hipErrorInvalidSource: hipError_t = 300;
pub const hipErrorFileNotFound: hipError_t = 301;
pub const hipErrorSharedObjectSymbolNotFound: hipError_t = 302;
pub const hipErrorSharedObjectInitFailed: hipError_t = 303;
pub const hipErrorOperatingSystem: hipError_t = 304;
pub const hipErrorInvalidHandle: hipError_t = 400;
pub const hipErrorInvalidResourceHandle: hipError_t = 400;
pub const hipErrorIllegalState: hipError_t = 401;
pub const hipErrorNotFound: hipError_t = 500;
pub const hipErrorNotReady: hipError_t = 600;
pub const hipErrorIllegalAddress: hipError_t = 700;
pub const hipErrorLaunchOutOfResources: hipError_t = 701;
pub const hipErrorLaunchTimeOut: hipError_t = 702;
pub const hipErrorPeerAccessAlreadyEnabled: hipError_t = 704;
pub const hipErrorPeerAccessNotEnabled: hipError_t = 705;
pub const hipErrorSetOnActiveProcess: hipError_t = 708;
pub const hipErrorContextIsDestroyed: hipError_t = 709;
pub const hipErrorAssert: hipError_t = 710;
pub const hipErrorHostMemoryAlreadyRegistered: hipError_t = 712;
pub const hipErrorHostMemoryNotRegistered: hipError_t = 713;
pub const hipErrorLaunchFailure: hipError_t = 719;
pub const hipErrorCooperativeLaunchTooLarge: hipError_t = 720;
pub const hipErrorNotSupported: hipError_t = 801;
pub const hipErrorStreamCaptureUnsupported: hipError_t = 900;
pub const hipErrorStreamCaptureInvalidated: hipError_t = 901;
pub const hipErrorStreamCaptureMerge: hipError_t = 902;
pub const hipErrorStreamCaptureUnmatched: hipError_t = 903;
pub const hipErrorStreamCaptureUnjoined: hipError_t = 904;
pub const hipErrorStreamCaptureIsolation: hipError_t = 905;
pub const hipErrorStreamCaptureImplicit: hipError_t = 906;
pub const hipErrorCapturedEvent: hipError_t = 907;
pub const hipErrorStreamCaptureWrongThread: hipError_t = 908;
pub const hipErrorGraphExecUpdateFailure: hipError_t = 910;
pub const hipErrorInvalidChannelDescriptor: hipError_t = 911;
pub const hipErrorInvalidTexture: hipError_t = 912;
pub const hipErrorUnknown: hipError_t = 999;
pub const hipErrorRuntimeMemory: hipError_t = 1052;
pub const hipErrorRuntimeOther: hipError_t = 1053;
pub const hipErrorTbd: hipError_t = 1054;
pub type hipError_t = ::core::ffi::c_uint;
pub const hipDeviceAttributeCudaCompatibleBegin: hipDeviceAttribute_t = 0;
pub const hipDeviceAttributeEccEnabled: hipDeviceAttribute_t = 0;
pub const hipDeviceAttributeAccessPolicyMaxWindowSize: hipDeviceAttribute_t = 1;
pub const hipDeviceAttributeAsyncEngineCount: hipDeviceAttribute_t = 2;
pub const hipDeviceAttributeCanMapHostMemory: hipDeviceAttribute_t = 3;
pub const hipDeviceAttributeCanUseHostPointerForRegisteredMem: hipDeviceAttribute_t = 4;
pub const hipDeviceAttributeClockRate: hipDeviceAttribute_t = 5;
pub const hipDeviceAttributeComputeMode: hipDeviceAttribute_t = 6;
pub const hipDeviceAttributeComputePreemptionSupported: hipDeviceAttribute_t = 7;
pub const hipDeviceAttributeConcurrentKernels: hipDeviceAttribute_t = 8;
pub const hipDeviceAttributeConcurrentManagedAccess: hipDeviceAttribute_t = 9;
pub const hipDeviceAttributeCooperativeLaunch: hipDeviceAttribute_t = 10;
pub const hipDeviceAttributeCooperativeMultiDeviceLaunch: hipDeviceAttribute_t = 11;
pub const hipDeviceAttributeDeviceOverlap: hipDeviceAttribute_t = 12;
pub const hipDeviceAttributeDirectManagedMemAccessFromHost: hipDeviceAttribute_t = 13;
pub const hipDeviceAttributeGlobalL1CacheSupported: hipDeviceAttribute_t = 14;
pub const hipDeviceAttributeHostNativeAtomicSupported: hipDeviceAttribute_t = 15;
pub const hipDeviceAttributeIntegrated: hipDeviceAttribute_t = 16;
pub const hipDeviceAttributeIsMultiGpuBoard: hipDeviceAttribute_t = 17;
pub const hipDeviceAttributeKernelExecTimeout: hipDeviceAttribute_t = 18;
pub const hipDeviceAttributeL2CacheSize: hipDeviceAttribute_t = 19;
pub const hipDeviceAttributeLocalL1CacheSupported: hipDeviceAttribute_t = 20;
pub const hipDeviceAttributeLuid: hipDeviceAttribute_t = 21;
pub const hipDeviceAttributeLuidDeviceNodeMask: hipDeviceAttribute_t = 22;
pub const hipDeviceAttributeComputeCapabilityMajor: hipDeviceAttribute_t = 23;
pub const hipDeviceAttributeManagedMemory: hipDeviceAttribute_t = 24;
pub const hipDeviceAttributeMaxBlocksPerMultiProcessor: hipDeviceAttribute_t = 25;
pub const hipDeviceAttributeMaxBlockDimX: hipDeviceAttribute_t = 26;
pub const hipDeviceAttributeMaxBlockDimY: hipDeviceAttribute_t = 27;
pub const hipDeviceAttributeMaxBlockDimZ: hipDeviceAttribute_t = 28;
pub const hipDeviceAttributeMaxGridDimX: hipDeviceAttribute_t = 29;
pub const hipDeviceAttributeMaxGridDimY: hipDeviceAttribute_t = 30;
pub const hipDeviceAttributeMaxGridDimZ: hipDeviceAttribute_t = 31;
pub const hipDeviceAttributeMaxSurface1D: hipDeviceAttribute_t = 32;
pub const hipDeviceAttributeMaxSurface1DLayered: hipDeviceAttribute_t = 33;
pub const hipDeviceAttributeMaxSurface2D: hipDeviceAttribute_t = 34;
pub const hipDeviceAttributeMaxSurface2DLayered: hipDeviceAttribute_t = 35;
pub const hipDeviceAttributeMaxSurface3D: hipDeviceAttribute_t = 36;
pub const hipDeviceAttributeMaxSurfaceCubemap: hipDeviceAttribute_t = 37;
pub const hipDeviceAttributeMaxSurfaceCubemapLayered: hipDeviceAttribute_t = 38;
pub const hipDeviceAttributeMaxTexture1DWidth: hipDeviceAttribute_t = 39;
pub const hipDeviceAttributeMaxTexture1DLayered: hipDeviceAttribute_t = 40;
pub const hipDeviceAttributeMaxTexture1DLinear: hipDeviceAttribute_t = 41;
pub const hipDeviceAttributeMaxTexture1DMipmap: hipDeviceAttribute_t = 42;
pub const hipDeviceAttributeMaxTexture2DWidth: hipDeviceAttribute_t = 43;
pub const hipDeviceAttributeMaxTexture2DHeight: hipDeviceAttribute_t = 44;
pub const hipDeviceAttributeMaxTexture2DGather: hipDeviceAttribute_t = 45;
pub const hipDeviceAttributeMaxTexture2DLayered: hipDeviceAttribute_t = 46;
pub const hipDeviceAttributeMaxTexture2DLinear: hipDeviceAttribute_t = 47;
pub const hipDeviceAttributeMaxTexture2DMipmap: hipDeviceAttribute_t = 48;
pub const hipDeviceAttributeMaxTexture3DWidth: hipDeviceAttribute_t = 49;
pub const hipDeviceAttributeMaxTexture3DHeight: hipDeviceAttribute_t = 50;
pub const hipDeviceAttributeMaxTexture3DDepth: hipDeviceAttribute_t = 51;
pub const hipDeviceAttributeMaxTexture3DAlt: hipDeviceAttribute_t = 52;
pub const hipDeviceAttributeMaxTextureCubemap: hipDeviceAttribute_t = 53;
pub const hipDeviceAttributeMaxTextureCubemapLayered: hipDeviceAttribute_t = 54;
pub const hipDeviceAttributeMaxThreadsDim: hipDeviceAttribute_t = 55;
pub const hipDeviceAttributeMaxThreadsPerBlock: hipDeviceAttribute_t = 56;
pub const hipDeviceAttributeMaxThreadsPerMultiProcessor: hipDeviceAttribute_t = 57;
pub const hipDeviceAttributeMaxPitch: hipDeviceAttribute_t = 58;
pub const hipDeviceAttributeMemoryBusWidth: hipDeviceAttribute_t = 59;
pub const hipDeviceAttributeMemoryClockRate: hipDeviceAttribute_t = 60;
pub const hipDeviceAttributeComputeCapabilityMinor: hipDeviceAttribute_t = 61;
pub const hipDeviceAttributeMultiGpuBoardGroupID: hipDeviceAttribute_t = 62;
pub const hipDeviceAttributeMultiprocessorCount: hipDeviceAttribute_t = 63;
pub const hipDeviceAttributeUnused1: hipDeviceAttribute_t = 64;
pub const hipDeviceAttributePageableMemoryAccess: hipDeviceAttribute_t = 65;
pub const hipDeviceAttributePageableMemoryAccessUsesHostPageTables: hipDeviceAttribute_t = 66;
pub const hipDeviceAttributePciBusId: hipDeviceAttribute_t = 67;
pub const hipDeviceAttributePciDeviceId: hipDeviceAttribute_t = 68;
pub const hipDeviceAttributePciDomainId: hipDeviceAttribute_t = 69;
pub const hipDeviceAttributePciDomainID: hipDeviceAttribute_t = 69;
pub const hipDeviceAttributePersistingL2CacheMaxSize: hipDeviceAttribute_t = 70;
pub const hipDeviceAttributeMaxRegistersPerBlock: hipDeviceAttribute_t = 71;
pub const hipDeviceAttributeMaxRegistersPerMultiprocessor: hipDeviceAttribute_t = 72;
pub const hipDeviceAttributeReservedSharedMemPerBlock: hipDeviceAttribute_t = 73;
pub const hipDeviceAttributeMaxSharedMemoryPerBlock: hipDeviceAttribute_t = 74;
pub const hipDeviceAttributeSharedMemPerBlockOptin: hipDeviceAttribute_t = 75;
pub const hipDeviceAttributeSharedMemPerMultiprocessor: hipDeviceAttribute_t = 76;
pub const hipDeviceAttributeSingleToDoublePrecisionPerfRatio: hipDeviceAttribute_t = 77;
pub const hipDeviceAttributeStreamPrioritiesSupported: hipDeviceAttribute_t = 78;
pub const hipDeviceAttributeSurfaceAlignment: hipDeviceAttribute_t = 79;
pub const hipDeviceAttributeTccDriver: hipDeviceAttribute_t = 80;
pub const hipDeviceAttributeTextureAlignment: hipDeviceAttribute_t = 81;
pub const hipDeviceAttributeTexturePitchAlignment: hipDeviceAttribute_t = 82;
pub const hipDeviceAttributeTotalConstantMemory: hipDeviceAttribute_t = 83;
pub const hipDeviceAttributeTotalGlobalMem: hipDeviceAttribute_t = 84;
pub const hipDeviceAttributeUnifiedAddressing: hipDeviceAttribute_t = 85;
pub const hipDeviceAttributeUnused2: hipDeviceAttribute_t = 86;
pub const hipDeviceAttributeWarpSize: hipDeviceAttribute_t = 87;
pub const hipDeviceAttributeMemoryPoolsSupported: hipDeviceAttribute_t = 88;
pub const hipDeviceAttributeVirtualMemoryManagementSupported: hipDeviceAttribute_t = 89;
pub const hipDeviceAttributeHostRegisterSupported: hipDeviceAttribute_t = 90;
pub const hipDeviceAttributeMemoryPoolSupportedHandleTypes: hipDeviceAttribute_t = 91;
pub const hipDeviceAttributeHostNumaId: hipDeviceAttribute_t = 92;
pub const hipDeviceAttributeCudaCompatibleEnd: hipDeviceAttribute_t = 9999;
pub const hipDeviceAttributeAmdSpecificBegin: hipDeviceAttribute_t = 10000;
pub const hipDeviceAttributeClockInstructionRate: hipDeviceAttribute_t = 10000;
pub const hipDeviceAttributeUnused3: hipDeviceAttribute_t = 10001;
pub const hipDeviceAttributeMaxSharedMemoryPerMultiprocessor: hipDeviceAttribute_t = 10002;
pub const hipDeviceAttributeUnused4: hipDeviceAttribute_t = 10003;
pub const hipDeviceAttributeUnused5: hipDeviceAttribute_t = 10004;
pub const hipDeviceAttributeHdpMemFlushCntl: hipDeviceAttribute_t = 10005;
pub const hipDeviceAttributeHdpRegFlushCntl: hipDeviceAttribute_t = 10006;
pub const hipDeviceAttributeCooperativeMultiDeviceUnmatchedFunc: hipDeviceAttribute_t = 10007;
pub const hipDeviceAttributeCooperativeMultiDeviceUnmatchedGridDim: hipDeviceAttribute_t = 10008;
pub const hipDeviceAttributeCooperativeMultiDeviceUnmatchedBlockDim: hipDeviceAttribute_t = 10009;
pub const hipDeviceAttributeCooperativeMultiDeviceUnmatchedSharedMem: hipDeviceAttribute_t = 10010;
pub const hipDeviceAttributeIsLargeBar: hipDeviceAttribute_t = 10011;
pub const hipDeviceAttributeAsicRevision: hipDeviceAttribute_t = 10012;
pub const hipDeviceAttributeCanUseStreamWaitValue: hipDeviceAttribute_t = 10013;
pub const hipDeviceAttributeImageSupport: hipDeviceAttribute_t = 10014;
pub const hipDeviceAttributePhysicalMultiProcessorCount: hipDeviceAttribute_t = 10015;
pub const hipDeviceAttributeFineGrainSupport: hipDeviceAttribute_t = 10016;
pub const hipDeviceAttributeWallClockRate: hipDeviceAttribute_t = 10017;
pub const hipDeviceAttributeNumberOfXccs: hipDeviceAttribute_t = 10018;
pub const hipDeviceAttributeMaxAvailableVgprsPerThread: hipDeviceAttribute_t = 10019;
pub const hipDeviceAttributePciChipId: hipDeviceAttribute_t = 10020;
pub const hipDeviceAttributeAmdSpecificEnd: hipDeviceAttribute_t = 19999;
pub const hipDeviceAttributeVendorSpecificBegin: hipDeviceAttribute_t = 20000;
pub type hipDeviceAttribute_t = ::core::ffi::c_uint;
pub type hipDeviceptr_t = *mut ::core::ffi::c_void;
#[repr(C)]
#[derive(Debug)]
pub struct hipArray {
    _unused: [u8; 0],
}
pub type hipArray_t = *mut hipArray;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct hip_Memcpy2D {
    pub srcXInBytes: usize,
    pub srcY: usize,
    pub srcMemoryType: hipMemoryType,
    pub srcHost: *const ::core::ffi::c_void,
    pub srcDevice: hipDeviceptr_t,
    pub srcArray: hipArray_t,
    pub srcPitch: usize,
    pub dstXInBytes: usize,
    pub dstY: usize,
    pub dstMemoryType: hipMemoryType,
    pub dstHost: *mut ::core::ffi::c_void,
    pub dstDevice: hipDeviceptr_t,
    pub dstArray: hipArray_t,
    pub dstPitch: usize,
    pub WidthInBytes: usize,
    pub Height: usize,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of hip_Memcpy2D"][::core::mem::size_of::<hip_Memcpy2D>() - 128usize];
    ["Alignment of hip_Memcpy2D"][::core::mem::align_of::<hip_Memcpy2D>() - 8usize];
    ["Offset of field: hip_Memcpy2D::srcXInBytes"]
        [::core::mem::offset_of!(hip_Memcpy2D, srcXInBytes) - 0usize];
    ["Offset of field: hip_Memcpy2D::srcY"][::core::mem::offset_of!(hip_Memcpy2D, srcY) - 8usize];
    ["Offset of field: hip_Memcpy2D::srcMemoryType"]
        [::core::mem::offset_of!(hip_Memcpy2D, srcMemoryType) - 16usize];
    ["Offset of field: hip_Memcpy2D::srcHost"]
        [::core::mem::offset_of!(hip_Memcpy2D, srcHost) - 24usize];
    ["Offset of field: hip_Memcpy2D::srcDevice"]
        [::core::mem::offset_of!(hip_Memcpy2D, srcDevice) - 32usize];
    ["Offset of field: hip_Memcpy2D::srcArray"]
        [::core::mem::offset_of!(hip_Memcpy2D, srcArray) - 40usize];
    ["Offset of field: hip_Memcpy2D::srcPitch"]
        [::core::mem::offset_of!(hip_Memcpy2D, srcPitch) - 48usize];
    ["Offset of field: hip_Memcpy2D::dstXInBytes"]
        [::core::mem::offset_of!(hip_Memcpy2D, dstXInBytes) - 56usize];
    ["Offset of field: hip_Memcpy2D::dstY"][::core::mem::offset_of!(hip_Memcpy2D, dstY) - 64usize];
    ["Offset of field: hip_Memcpy2D::dstMemoryType"]
        [::core::mem::offset_of!(hip_Memcpy2D, dstMemoryType) - 72usize];
    ["Offset of field: hip_Memcpy2D::dstHost"]
        [::core::mem::offset_of!(hip_Memcpy2D, dstHost) - 80usize];
    ["Offset of field: hip_Memcpy2D::dstDevice"]
        [::core::mem::offset_of!(hip_Memcpy2D, dstDevice) - 88usize];
    ["Offset of field: hip_Memcpy2D::dstArray"]
        [::core::mem::offset_of!(hip_Memcpy2D, dstArray) - 96usize];
    ["Offset of field: hip_Memcpy2D::dstPitch"]
        [::core::mem::offset_of!(hip_Memcpy2D, dstPitch) - 104usize];
    ["Offset of field: hip_Memcpy2D::WidthInBytes"]
        [::core::mem::offset_of!(hip_Memcpy2D, WidthInBytes) - 112usize];
    ["Offset of field: hip_Memcpy2D::Height"]
        [::core::mem::offset_of!(hip_Memcpy2D, Height) - 120usize];
};
pub const hipMemcpyHostToHost: hipMemcpyKind = 0;
pub const hipMemcpyHostToDevice: hipMemcpyKind = 1;
pub const hipMemcpyDeviceToHost: hipMemcpyKind = 2;
pub const hipMemcpyDeviceToDevice: hipMemcpyKind = 3;
pub const hipMemcpyDefault: hipMemcpyKind = 4;
pub const hipMemcpyDeviceToDeviceNoCU: hipMemcpyKind = 1024;
pub type hipMemcpyKind = ::core::ffi::c_uint;
pub const hipMemLocationTypeInvalid: hipMemLocationType = 0;
pub const hipMemLocationTypeNone: hipMemLocationType = 0;
pub const hipMemLocationTypeDevice: hipMemLocationType = 1;
pub const hipMemLocationTypeHost: hipMemLocationType = 2;
pub const hipMemLocationTypeHostNuma: hipMemLocationType = 3;
pub const hipMemLocationTypeHostNumaCurrent: hipMemLocationType = 4;
pub type hipMemLocationType = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct hipMemLocation {
    pub type_: hipMemLocationType,
    pub id: ::core::ffi::c_int,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of hipMemLocation"][::core::mem::size_of::<hipMemLocation>() - 8usize];
    ["Alignment of hipMemLocation"][::core::mem::align_of::<hipMemLocation>() - 4usize];
    ["Offset of field: hipMemLocation::type_"]
        [::core::mem::offset_of!(hipMemLocation, type_) - 0usize];
    ["Offset of field: hipMemLocation::id"][::core::mem::offset_of!(hipMemLocation, id) - 4usize];
};
pub const hipMemcpySrcAccessOrderInvalid: hipMemcpySrcAccessOrder = 0;
pub const hipMemcpySrcAccessOrderStream: hipMemcpySrcAccessOrder = 1;
pub const hipMemcpySrcAccessOrderDuringApiCall: hipMemcpySrcAccessOrder = 2;
pub const hipMemcpySrcAccessOrderAny: hipMemcpySrcAccessOrder = 3;
pub const hipMemcpySrcAccessOrderMax: hipMemcpySrcAccessOrder = 2147483647;
pub type hipMemcpySrcAccessOrder = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct hipMemcpyAttributes {
    pub srcAccessOrder: hipMemcpySrcAccessOrder,
    pub srcLocHint: hipMemLocation,
    pub dstLocHint: hipMemLocation,
    pub flags: ::core::ffi::c_uint,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of hipMemcpyAttributes"][::core::mem::size_of::<hipMemcpyAttributes>() - 24usize];
    ["Alignment of hipMemcpyAttributes"][::core::mem::align_of::<hipMemcpyAttributes>() - 4usize];
    ["Offset of field: hipMemcpyAttributes::srcAccessOrder"]
        [::core::mem::offset_of!(hipMemcpyAttributes, srcAccessOrder) - 0usize];
    ["Offset of field: hipMemcpyAttributes::srcLocHint"]
        [::core::mem::offset_of!(hipMemcpyAttributes, srcLocHint) - 4usize];
    ["Offset of field: hipMemcpyAttributes::dstLocHint"]
        [::core::mem::offset_of!(hipMemcpyAttributes, dstLocHint) - 12usize];
    ["Offset of field: hipMemcpyAttributes::flags"]
        [::core::mem::offset_of!(hipMemcpyAttributes, flags) - 20usize];
};
pub const HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: hipFunction_attribute = 0;
pub const HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: hipFunction_attribute = 1;
pub const HIP_FUNC_ATTRIBUTE_CONST_SIZE_BYTES: hipFunction_attribute = 2;
pub const HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: hipFunction_attribute = 3;
pub const HIP_FUNC_ATTRIBUTE_NUM_REGS: hipFunction_attribute = 4;
pub const HIP_FUNC_ATTRIBUTE_PTX_VERSION: hipFunction_attribute = 5;
pub const HIP_FUNC_ATTRIBUTE_BINARY_VERSION: hipFunction_attribute = 6;
pub const HIP_FUNC_ATTRIBUTE_CACHE_MODE_CA: hipFunction_attribute = 7;
pub const HIP_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: hipFunction_attribute = 8;
pub const HIP_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: hipFunction_attribute = 9;
pub const HIP_FUNC_ATTRIBUTE_MAX: hipFunction_attribute = 10;
pub type hipFunction_attribute = ::core::ffi::c_uint;
pub const HIP_POINTER_ATTRIBUTE_CONTEXT: hipPointer_attribute = 1;
pub const HIP_POINTER_ATTRIBUTE_MEMORY_TYPE: hipPointer_attribute = 2;
pub const HIP_POINTER_ATTRIBUTE_DEVICE_POINTER: hipPointer_attribute = 3;
pub const HIP_POINTER_ATTRIBUTE_HOST_POINTER: hipPointer_attribute = 4;
pub const HIP_POINTER_ATTRIBUTE_P2P_TOKENS: hipPointer_attribute = 5;
pub const HIP_POINTER_ATTRIBUTE_SYNC_MEMOPS: hipPointer_attribute = 6;
pub const HIP_POINTER_ATTRIBUTE_BUFFER_ID: hipPointer_attribute = 7;
pub const HIP_POINTER_ATTRIBUTE_IS_MANAGED: hipPointer_attribute = 8;
pub const HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL: hipPointer_attribute = 9;
pub const HIP_POINTER_ATTRIBUTE_IS_LEGACY_HIP_IPC_CAPABLE: hipPointer_attribute = 10;
pub const HIP_POINTER_ATTRIBUTE_RANGE_START_ADDR: hipPointer_attribute = 11;
pub const HIP_POINTER_ATTRIBUTE_RANGE_SIZE: hipPointer_attribute = 12;
pub const HIP_POINTER_ATTRIBUTE_MAPPED: hipPointer_attribute = 13;
pub const HIP_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: hipPointer_attribute = 14;
pub const HIP_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: hipPointer_attribute = 15;
pub const HIP_POINTER_ATTRIBUTE_ACCESS_FLAGS: hipPointer_attribute = 16;
pub const HIP_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: hipPointer_attribute = 17;
pub type hipPointer_attribute = ::core::ffi::c_uint;
pub type hipDevice_t = ::core::ffi::c_int;
#[repr(C)]
#[derive(Debug)]
pub struct ihipStream_t {
    _unused: [u8; 0],
}
pub type hipStream_t = *mut ihipStream_t;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct hipIpcMemHandle_st {
    pub reserved: [::core::ffi::c_char; 64usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of hipIpcMemHandle_st"][::core::mem::size_of::<hipIpcMemHandle_st>() - 64usize];
    ["Alignment of hipIpcMemHandle_st"][::core::mem::align_of::<hipIpcMemHandle_st>() - 1usize];
    ["Offset of field: hipIpcMemHandle_st::reserved"]
        [::core::mem::offset_of!(hipIpcMemHandle_st, reserved) - 0usize];
};
pub type hipIpcMemHandle_t = hipIpcMemHandle_st;
#[repr(C)]
#[derive(Debug)]
pub struct ihipModule_t {
    _unused: [u8; 0],
}
pub type hipModule_t = *mut ihipModule_t;
#[repr(C)]
#[derive(Debug)]
pub struct ihipModuleSymbol_t {
    _unused: [u8; 0],
}
pub type hipFunction_t = *mut ihipModuleSymbol_t;
#[repr(C)]
#[derive(Debug)]
pub struct ihipMemPoolHandle_t {
    _unused: [u8; 0],
}
pub type hipMemPool_t = *mut ihipMemPoolHandle_t;
#[repr(C)]
#[derive(Debug)]
pub struct ihipEvent_t {
    _unused: [u8; 0],
}
pub type hipEvent_t = *mut ihipEvent_t;
pub const hipMemAccessFlagsProtNone: hipMemAccessFlags = 0;
pub const hipMemAccessFlagsProtRead: hipMemAccessFlags = 1;
pub const hipMemAccessFlagsProtReadWrite: hipMemAccessFlags = 3;
pub type hipMemAccessFlags = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct hipMemAccessDesc {
    pub location: hipMemLocation,
    pub flags: hipMemAccessFlags,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of hipMemAccessDesc"][::core::mem::size_of::<hipMemAccessDesc>() - 12usize];
    ["Alignment of hipMemAccessDesc"][::core::mem::align_of::<hipMemAccessDesc>() - 4usize];
    ["Offset of field: hipMemAccessDesc::location"]
        [::core::mem::offset_of!(hipMemAccessDesc, location) - 0usize];
    ["Offset of field: hipMemAccessDesc::flags"]
        [::core::mem::offset_of!(hipMemAccessDesc, flags) - 8usize];
};
pub const hipMemAllocationTypeInvalid: hipMemAllocationType = 0;
pub const hipMemAllocationTypePinned: hipMemAllocationType = 1;
pub const hipMemAllocationTypeUncached: hipMemAllocationType = 1073741824;
pub const hipMemAllocationTypeMax: hipMemAllocationType = 2147483647;
pub type hipMemAllocationType = ::core::ffi::c_uint;
pub const hipMemHandleTypeNone: hipMemAllocationHandleType = 0;
pub const hipMemHandleTypePosixFileDescriptor: hipMemAllocationHandleType = 1;
pub const hipMemHandleTypeWin32: hipMemAllocationHandleType = 2;
pub const hipMemHandleTypeWin32Kmt: hipMemAllocationHandleType = 4;
pub type hipMemAllocationHandleType = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct hipMemPoolProps {
    pub allocType: hipMemAllocationType,
    pub handleTypes: hipMemAllocationHandleType,
    pub location: hipMemLocation,
    pub win32SecurityAttributes: *mut ::core::ffi::c_void,
    pub maxSize: usize,
    pub reserved: [::core::ffi::c_uchar; 56usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of hipMemPoolProps"][::core::mem::size_of::<hipMemPoolProps>() - 88usize];
    ["Alignment of hipMemPoolProps"][::core::mem::align_of::<hipMemPoolProps>() - 8usize];
    ["Offset of field: hipMemPoolProps::allocType"]
        [::core::mem::offset_of!(hipMemPoolProps, allocType) - 0usize];
    ["Offset of field: hipMemPoolProps::handleTypes"]
        [::core::mem::offset_of!(hipMemPoolProps, handleTypes) - 4usize];
    ["Offset of field: hipMemPoolProps::location"]
        [::core::mem::offset_of!(hipMemPoolProps, location) - 8usize];
    ["Offset of field: hipMemPoolProps::win32SecurityAttributes"]
        [::core::mem::offset_of!(hipMemPoolProps, win32SecurityAttributes) - 16usize];
    ["Offset of field: hipMemPoolProps::maxSize"]
        [::core::mem::offset_of!(hipMemPoolProps, maxSize) - 24usize];
    ["Offset of field: hipMemPoolProps::reserved"]
        [::core::mem::offset_of!(hipMemPoolProps, reserved) - 32usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct hipMemPoolPtrExportData {
    pub reserved: [::core::ffi::c_uchar; 64usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of hipMemPoolPtrExportData"]
        [::core::mem::size_of::<hipMemPoolPtrExportData>() - 64usize];
    ["Alignment of hipMemPoolPtrExportData"]
        [::core::mem::align_of::<hipMemPoolPtrExportData>() - 1usize];
    ["Offset of field: hipMemPoolPtrExportData::reserved"]
        [::core::mem::offset_of!(hipMemPoolPtrExportData, reserved) - 0usize];
};
#[repr(C)]
#[derive(Debug)]
pub struct ihipGraph {
    _unused: [u8; 0],
}
pub type hipGraph_t = *mut ihipGraph;
pub const hipStreamCaptureModeGlobal: hipStreamCaptureMode = 0;
pub const hipStreamCaptureModeThreadLocal: hipStreamCaptureMode = 1;
pub const hipStreamCaptureModeRelaxed: hipStreamCaptureMode = 2;
pub type hipStreamCaptureMode = ::core::ffi::c_uint;
pub const hipStreamCaptureStatusNone: hipStreamCaptureStatus = 0;
pub const hipStreamCaptureStatusActive: hipStreamCaptureStatus = 1;
pub const hipStreamCaptureStatusInvalidated: hipStreamCaptureStatus = 2;
pub type hipStreamCaptureStatus = ::core::ffi::c_uint;
#[repr(C)]
#[derive(Copy, Clone)]
pub struct hipMemAllocationProp {
    pub type_: hipMemAllocationType,
    pub __bindgen_anon_1: hipMemAllocationProp__bindgen_ty_1,
    pub location: hipMemLocation,
    pub win32HandleMetaData: *mut ::core::ffi::c_void,
    pub allocFlags: hipMemAllocationProp__bindgen_ty_2,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub union hipMemAllocationProp__bindgen_ty_1 {
    pub requestedHandleType: hipMemAllocationHandleType,
    pub requestedHandleTypes: hipMemAllocationHandleType,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of hipMemAllocationProp__bindgen_ty_1"]
        [::core::mem::size_of::<hipMemAllocationProp__bindgen_ty_1>() - 4usize];
    ["Alignment of hipMemAllocationProp__bindgen_ty_1"]
        [::core::mem::align_of::<hipMemAllocationProp__bindgen_ty_1>() - 4usize];
    ["Offset of field: hipMemAllocationProp__bindgen_ty_1::requestedHandleType"]
        [::core::mem::offset_of!(hipMemAllocationProp__bindgen_ty_1, requestedHandleType) - 0usize];
    ["Offset of field: hipMemAllocationProp__bindgen_ty_1::requestedHandleTypes"][::core::mem::offset_of!(
        hipMemAllocationProp__bindgen_ty_1,
        requestedHandleTypes
    ) - 0usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct hipMemAllocationProp__bindgen_ty_2 {
    pub compressionType: ::core::ffi::c_uchar,
    pub gpuDirectRDMACapable: ::core::ffi::c_uchar,
    pub usage: ::core::ffi::c_ushort,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of hipMemAllocationProp__bindgen_ty_2"]
        [::core::mem::size_of::<hipMemAllocationProp__bindgen_ty_2>() - 4usize];
    ["Alignment of hipMemAllocationProp__bindgen_ty_2"]
        [::core::mem::align_of::<hipMemAllocationProp__bindgen_ty_2>() - 2usize];
    ["Offset of field: hipMemAllocationProp__bindgen_ty_2::compressionType"]
        [::core::mem::offset_of!(hipMemAllocationProp__bindgen_ty_2, compressionType) - 0usize];
    ["Offset of field: hipMemAllocationProp__bindgen_ty_2::gpuDirectRDMACapable"][::core::mem::offset_of!(
        hipMemAllocationProp__bindgen_ty_2,
        gpuDirectRDMACapable
    ) - 1usize];
    ["Offset of field: hipMemAllocationProp__bindgen_ty_2::usage"]
        [::core::mem::offset_of!(hipMemAllocationProp__bindgen_ty_2, usage) - 2usize];
};
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of hipMemAllocationProp"][::core::mem::size_of::<hipMemAllocationProp>() - 32usize];
    ["Alignment of hipMemAllocationProp"][::core::mem::align_of::<hipMemAllocationProp>() - 8usize];
    ["Offset of field: hipMemAllocationProp::type_"]
        [::core::mem::offset_of!(hipMemAllocationProp, type_) - 0usize];
    ["Offset of field: hipMemAllocationProp::location"]
        [::core::mem::offset_of!(hipMemAllocationProp, location) - 8usize];
    ["Offset of field: hipMemAllocationProp::win32HandleMetaData"]
        [::core::mem::offset_of!(hipMemAllocationProp, win32HandleMetaData) - 16usize];
    ["Offset of field: hipMemAllocationProp::allocFlags"]
        [::core::mem::offset_of!(hipMemAllocationProp, allocFlags) - 24usize];
};
#[repr(C)]
#[derive(Debug)]
pub struct ihipMemGenericAllocationHandle {
    _unused: [u8; 0],
}
pub type hipMemGenericAllocationHandle_t = *mut ihipMemGenericAllocationHandle;
pub const hipMemAllocationGranularityMinimum: hipMemAllocationGranularity_flags = 0;
pub const hipMemAllocationGranularityRecommended: hipMemAllocationGranularity_flags = 1;
pub type hipMemAllocationGranularity_flags = ::core::ffi::c_uint;
pub const hipMemRangeHandleTypeDmaBufFd: hipMemRangeHandleType = 1;
pub const hipMemRangeHandleTypeMax: hipMemRangeHandleType = 2147483647;
pub type hipMemRangeHandleType = ::core::ffi::c_uint;
pub struct HipLibrary {
    __library: ::libloading::Library,
    pub hipInit:
        Result<unsafe extern "C" fn(flags: ::core::ffi::c_uint) -> hipError_t, ::libloading::Error>,
    pub hipDriverGetVersion: Result<
        unsafe extern "C" fn(driverVersion: *mut ::core::ffi::c_int) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipRuntimeGetVersion: Result<
        unsafe extern "C" fn(runtimeVersion: *mut ::core::ffi::c_int) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipDeviceGet: Result<
        unsafe extern "C" fn(device: *mut hipDevice_t, ordinal: ::core::ffi::c_int) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipDeviceGetName: Result<
        unsafe extern "C" fn(
            name: *mut ::core::ffi::c_char,
            len: ::core::ffi::c_int,
            device: hipDevice_t,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipDeviceGetUuid: Result<
        unsafe extern "C" fn(uuid: *mut hipUUID, device: hipDevice_t) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipDeviceGetPCIBusId: Result<
        unsafe extern "C" fn(
            pciBusId: *mut ::core::ffi::c_char,
            len: ::core::ffi::c_int,
            device: ::core::ffi::c_int,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipDeviceTotalMem: Result<
        unsafe extern "C" fn(bytes: *mut usize, device: hipDevice_t) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipSetDevice: Result<
        unsafe extern "C" fn(deviceId: ::core::ffi::c_int) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipGetDevice: Result<
        unsafe extern "C" fn(deviceId: *mut ::core::ffi::c_int) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipGetDeviceCount: Result<
        unsafe extern "C" fn(count: *mut ::core::ffi::c_int) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipDeviceGetAttribute: Result<
        unsafe extern "C" fn(
            pi: *mut ::core::ffi::c_int,
            attr: hipDeviceAttribute_t,
            deviceId: ::core::ffi::c_int,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipDeviceGetDefaultMemPool: Result<
        unsafe extern "C" fn(mem_pool: *mut hipMemPool_t, device: ::core::ffi::c_int) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipGetDevicePropertiesR0600: Result<
        unsafe extern "C" fn(
            prop: *mut hipDeviceProp_tR0600,
            deviceId: ::core::ffi::c_int,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipExtGetLinkTypeAndHopCount: Result<
        unsafe extern "C" fn(
            device1: ::core::ffi::c_int,
            device2: ::core::ffi::c_int,
            linktype: *mut u32,
            hopcount: *mut u32,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipIpcGetMemHandle: Result<
        unsafe extern "C" fn(
            handle: *mut hipIpcMemHandle_t,
            devPtr: *mut ::core::ffi::c_void,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipIpcOpenMemHandle: Result<
        unsafe extern "C" fn(
            devPtr: *mut *mut ::core::ffi::c_void,
            handle: hipIpcMemHandle_t,
            flags: ::core::ffi::c_uint,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipIpcCloseMemHandle: Result<
        unsafe extern "C" fn(devPtr: *mut ::core::ffi::c_void) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipGetLastError: Result<unsafe extern "C" fn() -> hipError_t, ::libloading::Error>,
    pub hipPeekAtLastError: Result<unsafe extern "C" fn() -> hipError_t, ::libloading::Error>,
    pub hipGetErrorName: Result<
        unsafe extern "C" fn(hip_error: hipError_t) -> *const ::core::ffi::c_char,
        ::libloading::Error,
    >,
    pub hipGetErrorString: Result<
        unsafe extern "C" fn(hipError: hipError_t) -> *const ::core::ffi::c_char,
        ::libloading::Error,
    >,
    pub hipStreamCreateWithPriority: Result<
        unsafe extern "C" fn(
            stream: *mut hipStream_t,
            flags: ::core::ffi::c_uint,
            priority: ::core::ffi::c_int,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipDeviceGetStreamPriorityRange: Result<
        unsafe extern "C" fn(
            leastPriority: *mut ::core::ffi::c_int,
            greatestPriority: *mut ::core::ffi::c_int,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipStreamDestroy:
        Result<unsafe extern "C" fn(stream: hipStream_t) -> hipError_t, ::libloading::Error>,
    pub hipStreamQuery:
        Result<unsafe extern "C" fn(stream: hipStream_t) -> hipError_t, ::libloading::Error>,
    pub hipStreamSynchronize:
        Result<unsafe extern "C" fn(stream: hipStream_t) -> hipError_t, ::libloading::Error>,
    pub hipStreamWaitEvent: Result<
        unsafe extern "C" fn(
            stream: hipStream_t,
            event: hipEvent_t,
            flags: ::core::ffi::c_uint,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipStreamGetDevice: Result<
        unsafe extern "C" fn(stream: hipStream_t, device: *mut hipDevice_t) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipExtStreamCreateWithCUMask: Result<
        unsafe extern "C" fn(
            stream: *mut hipStream_t,
            cuMaskSize: u32,
            cuMask: *const u32,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipStreamWaitValue32: Result<
        unsafe extern "C" fn(
            stream: hipStream_t,
            ptr: *mut ::core::ffi::c_void,
            value: u32,
            flags: ::core::ffi::c_uint,
            mask: u32,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipStreamWriteValue32: Result<
        unsafe extern "C" fn(
            stream: hipStream_t,
            ptr: *mut ::core::ffi::c_void,
            value: u32,
            flags: ::core::ffi::c_uint,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipEventCreateWithFlags: Result<
        unsafe extern "C" fn(event: *mut hipEvent_t, flags: ::core::ffi::c_uint) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipEventRecord: Result<
        unsafe extern "C" fn(event: hipEvent_t, stream: hipStream_t) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipEventDestroy:
        Result<unsafe extern "C" fn(event: hipEvent_t) -> hipError_t, ::libloading::Error>,
    pub hipEventSynchronize:
        Result<unsafe extern "C" fn(event: hipEvent_t) -> hipError_t, ::libloading::Error>,
    pub hipEventElapsedTime: Result<
        unsafe extern "C" fn(ms: *mut f32, start: hipEvent_t, stop: hipEvent_t) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipEventQuery:
        Result<unsafe extern "C" fn(event: hipEvent_t) -> hipError_t, ::libloading::Error>,
    pub hipPointerGetAttributes: Result<
        unsafe extern "C" fn(
            attributes: *mut hipPointerAttribute_t,
            ptr: *const ::core::ffi::c_void,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipPointerGetAttribute: Result<
        unsafe extern "C" fn(
            data: *mut ::core::ffi::c_void,
            attribute: hipPointer_attribute,
            ptr: hipDeviceptr_t,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipDrvPointerGetAttributes: Result<
        unsafe extern "C" fn(
            numAttributes: ::core::ffi::c_uint,
            attributes: *mut hipPointer_attribute,
            data: *mut *mut ::core::ffi::c_void,
            ptr: hipDeviceptr_t,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMalloc: Result<
        unsafe extern "C" fn(ptr: *mut *mut ::core::ffi::c_void, size: usize) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipHostMalloc: Result<
        unsafe extern "C" fn(
            ptr: *mut *mut ::core::ffi::c_void,
            size: usize,
            flags: ::core::ffi::c_uint,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipFreeAsync: Result<
        unsafe extern "C" fn(dev_ptr: *mut ::core::ffi::c_void, stream: hipStream_t) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemPoolSetAccess: Result<
        unsafe extern "C" fn(
            mem_pool: hipMemPool_t,
            desc_list: *const hipMemAccessDesc,
            count: usize,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemPoolCreate: Result<
        unsafe extern "C" fn(
            mem_pool: *mut hipMemPool_t,
            pool_props: *const hipMemPoolProps,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemPoolDestroy:
        Result<unsafe extern "C" fn(mem_pool: hipMemPool_t) -> hipError_t, ::libloading::Error>,
    pub hipMallocFromPoolAsync: Result<
        unsafe extern "C" fn(
            dev_ptr: *mut *mut ::core::ffi::c_void,
            size: usize,
            mem_pool: hipMemPool_t,
            stream: hipStream_t,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemPoolExportToShareableHandle: Result<
        unsafe extern "C" fn(
            shared_handle: *mut ::core::ffi::c_void,
            mem_pool: hipMemPool_t,
            handle_type: hipMemAllocationHandleType,
            flags: ::core::ffi::c_uint,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemPoolImportFromShareableHandle: Result<
        unsafe extern "C" fn(
            mem_pool: *mut hipMemPool_t,
            shared_handle: *mut ::core::ffi::c_void,
            handle_type: hipMemAllocationHandleType,
            flags: ::core::ffi::c_uint,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemPoolExportPointer: Result<
        unsafe extern "C" fn(
            export_data: *mut hipMemPoolPtrExportData,
            dev_ptr: *mut ::core::ffi::c_void,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemPoolImportPointer: Result<
        unsafe extern "C" fn(
            dev_ptr: *mut *mut ::core::ffi::c_void,
            mem_pool: hipMemPool_t,
            export_data: *mut hipMemPoolPtrExportData,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipHostGetDevicePointer: Result<
        unsafe extern "C" fn(
            devPtr: *mut *mut ::core::ffi::c_void,
            hstPtr: *mut ::core::ffi::c_void,
            flags: ::core::ffi::c_uint,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipHostRegister: Result<
        unsafe extern "C" fn(
            hostPtr: *mut ::core::ffi::c_void,
            sizeBytes: usize,
            flags: ::core::ffi::c_uint,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipHostUnregister: Result<
        unsafe extern "C" fn(hostPtr: *mut ::core::ffi::c_void) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipFree: Result<
        unsafe extern "C" fn(ptr: *mut ::core::ffi::c_void) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipHostFree: Result<
        unsafe extern "C" fn(ptr: *mut ::core::ffi::c_void) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemcpyHtoDAsync: Result<
        unsafe extern "C" fn(
            dst: hipDeviceptr_t,
            src: *const ::core::ffi::c_void,
            sizeBytes: usize,
            stream: hipStream_t,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemcpyDtoHAsync: Result<
        unsafe extern "C" fn(
            dst: *mut ::core::ffi::c_void,
            src: hipDeviceptr_t,
            sizeBytes: usize,
            stream: hipStream_t,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemcpyDtoDAsync: Result<
        unsafe extern "C" fn(
            dst: hipDeviceptr_t,
            src: hipDeviceptr_t,
            sizeBytes: usize,
            stream: hipStream_t,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemcpyAsync: Result<
        unsafe extern "C" fn(
            dst: *mut ::core::ffi::c_void,
            src: *const ::core::ffi::c_void,
            sizeBytes: usize,
            kind: hipMemcpyKind,
            stream: hipStream_t,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemsetD8Async: Result<
        unsafe extern "C" fn(
            dest: hipDeviceptr_t,
            value: ::core::ffi::c_uchar,
            count: usize,
            stream: hipStream_t,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemsetD32Async: Result<
        unsafe extern "C" fn(
            dst: hipDeviceptr_t,
            value: ::core::ffi::c_int,
            count: usize,
            stream: hipStream_t,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemGetInfo: Result<
        unsafe extern "C" fn(free: *mut usize, total: *mut usize) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemcpyParam2DAsync: Result<
        unsafe extern "C" fn(pCopy: *const hip_Memcpy2D, stream: hipStream_t) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemcpy2DAsync: Result<
        unsafe extern "C" fn(
            dst: *mut ::core::ffi::c_void,
            dpitch: usize,
            src: *const ::core::ffi::c_void,
            spitch: usize,
            width: usize,
            height: usize,
            kind: hipMemcpyKind,
            stream: hipStream_t,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemGetAddressRange: Result<
        unsafe extern "C" fn(
            pbase: *mut hipDeviceptr_t,
            psize: *mut usize,
            dptr: hipDeviceptr_t,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemcpyBatchAsync: Result<
        unsafe extern "C" fn(
            dsts: *mut *mut ::core::ffi::c_void,
            srcs: *mut *mut ::core::ffi::c_void,
            sizes: *mut usize,
            count: usize,
            attrs: *mut hipMemcpyAttributes,
            attrsIdxs: *mut usize,
            numAttrs: usize,
            failIdx: *mut usize,
            stream: hipStream_t,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipDeviceCanAccessPeer: Result<
        unsafe extern "C" fn(
            canAccessPeer: *mut ::core::ffi::c_int,
            deviceId: ::core::ffi::c_int,
            peerDeviceId: ::core::ffi::c_int,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipDeviceEnablePeerAccess: Result<
        unsafe extern "C" fn(
            peerDeviceId: ::core::ffi::c_int,
            flags: ::core::ffi::c_uint,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipModuleUnload:
        Result<unsafe extern "C" fn(module: hipModule_t) -> hipError_t, ::libloading::Error>,
    pub hipModuleGetFunction: Result<
        unsafe extern "C" fn(
            function: *mut hipFunction_t,
            module: hipModule_t,
            kname: *const ::core::ffi::c_char,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipFuncGetAttribute: Result<
        unsafe extern "C" fn(
            value: *mut ::core::ffi::c_int,
            attrib: hipFunction_attribute,
            hfunc: hipFunction_t,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipModuleLoadData: Result<
        unsafe extern "C" fn(
            module: *mut hipModule_t,
            image: *const ::core::ffi::c_void,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipModuleLaunchKernel: Result<
        unsafe extern "C" fn(
            f: hipFunction_t,
            gridDimX: ::core::ffi::c_uint,
            gridDimY: ::core::ffi::c_uint,
            gridDimZ: ::core::ffi::c_uint,
            blockDimX: ::core::ffi::c_uint,
            blockDimY: ::core::ffi::c_uint,
            blockDimZ: ::core::ffi::c_uint,
            sharedMemBytes: ::core::ffi::c_uint,
            stream: hipStream_t,
            kernelParams: *mut *mut ::core::ffi::c_void,
            extra: *mut *mut ::core::ffi::c_void,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemGetHandleForAddressRange: Result<
        unsafe extern "C" fn(
            handle: *mut ::core::ffi::c_void,
            dptr: hipDeviceptr_t,
            size: usize,
            handleType: hipMemRangeHandleType,
            flags: ::core::ffi::c_ulonglong,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipModuleOccupancyMaxActiveBlocksPerMultiprocessor: Result<
        unsafe extern "C" fn(
            numBlocks: *mut ::core::ffi::c_int,
            f: hipFunction_t,
            blockSize: ::core::ffi::c_int,
            dynSharedMemPerBlk: usize,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipStreamBeginCapture: Result<
        unsafe extern "C" fn(stream: hipStream_t, mode: hipStreamCaptureMode) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipStreamEndCapture: Result<
        unsafe extern "C" fn(stream: hipStream_t, pGraph: *mut hipGraph_t) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipStreamIsCapturing: Result<
        unsafe extern "C" fn(
            stream: hipStream_t,
            pCaptureStatus: *mut hipStreamCaptureStatus,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipThreadExchangeStreamCaptureMode: Result<
        unsafe extern "C" fn(mode: *mut hipStreamCaptureMode) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipGraphDestroy:
        Result<unsafe extern "C" fn(graph: hipGraph_t) -> hipError_t, ::libloading::Error>,
    pub hipMemAddressFree: Result<
        unsafe extern "C" fn(devPtr: *mut ::core::ffi::c_void, size: usize) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemAddressReserve: Result<
        unsafe extern "C" fn(
            ptr: *mut *mut ::core::ffi::c_void,
            size: usize,
            alignment: usize,
            addr: *mut ::core::ffi::c_void,
            flags: ::core::ffi::c_ulonglong,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemCreate: Result<
        unsafe extern "C" fn(
            handle: *mut hipMemGenericAllocationHandle_t,
            size: usize,
            prop: *const hipMemAllocationProp,
            flags: ::core::ffi::c_ulonglong,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemExportToShareableHandle: Result<
        unsafe extern "C" fn(
            shareableHandle: *mut ::core::ffi::c_void,
            handle: hipMemGenericAllocationHandle_t,
            handleType: hipMemAllocationHandleType,
            flags: ::core::ffi::c_ulonglong,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemGetAccess: Result<
        unsafe extern "C" fn(
            flags: *mut ::core::ffi::c_ulonglong,
            location: *const hipMemLocation,
            ptr: *mut ::core::ffi::c_void,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemGetAllocationGranularity: Result<
        unsafe extern "C" fn(
            granularity: *mut usize,
            prop: *const hipMemAllocationProp,
            option: hipMemAllocationGranularity_flags,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemGetAllocationPropertiesFromHandle: Result<
        unsafe extern "C" fn(
            prop: *mut hipMemAllocationProp,
            handle: hipMemGenericAllocationHandle_t,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemImportFromShareableHandle: Result<
        unsafe extern "C" fn(
            handle: *mut hipMemGenericAllocationHandle_t,
            osHandle: *mut ::core::ffi::c_void,
            shHandleType: hipMemAllocationHandleType,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemMap: Result<
        unsafe extern "C" fn(
            ptr: *mut ::core::ffi::c_void,
            size: usize,
            offset: usize,
            handle: hipMemGenericAllocationHandle_t,
            flags: ::core::ffi::c_ulonglong,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemRelease: Result<
        unsafe extern "C" fn(handle: hipMemGenericAllocationHandle_t) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemRetainAllocationHandle: Result<
        unsafe extern "C" fn(
            handle: *mut hipMemGenericAllocationHandle_t,
            addr: *mut ::core::ffi::c_void,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemSetAccess: Result<
        unsafe extern "C" fn(
            ptr: *mut ::core::ffi::c_void,
            size: usize,
            desc: *const hipMemAccessDesc,
            count: usize,
        ) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipMemUnmap: Result<
        unsafe extern "C" fn(ptr: *mut ::core::ffi::c_void, size: usize) -> hipError_t,
        ::libloading::Error,
    >,
    pub hipGetDeviceProperties: Result<
        unsafe extern "C" fn(
            properties: *mut ::core::ffi::c_void,
            device: ::core::ffi::c_int,
        ) -> hipError_t,
        ::libloading::Error,
    >,
}
impl HipLibrary {
    pub unsafe fn new<P>(path: P) -> Result<Self, ::libloading::Error>
    where
        P: AsRef<::std::ffi::OsStr>,
    {
        let path = path.as_ref();
        let library = unsafe { ::libloading::Library::new(path) }?;
        unsafe { Self::from_library(library) }
    }
    pub unsafe fn from_library<L>(library: L) -> Result<Self, ::libloading::Error>
    where
        L: Into<::libloading::Library>,
    {
        let __library = library.into();
        let hipInit = unsafe { __library.get(b"hipInit\0") }.map(|sym| *sym);
        let hipDriverGetVersion =
            unsafe { __library.get(b"hipDriverGetVersion\0") }.map(|sym| *sym);
        let hipRuntimeGetVersion =
            unsafe { __library.get(b"hipRuntimeGetVersion\0") }.map(|sym| *sym);
        let hipDeviceGet = unsafe { __library.get(b"hipDeviceGet\0") }.map(|sym| *sym);
        let hipDeviceGetName = unsafe { __library.get(b"hipDeviceGetName\0") }.map(|sym| *sym);
        let hipDeviceGetUuid = unsafe { __library.get(b"hipDeviceGetUuid\0") }.map(|sym| *sym);
        let hipDeviceGetPCIBusId =
            unsafe { __library.get(b"hipDeviceGetPCIBusId\0") }.map(|sym| *sym);
        let hipDeviceTotalMem = unsafe { __library.get(b"hipDeviceTotalMem\0") }.map(|sym| *sym);
        let hipSetDevice = unsafe { __library.get(b"hipSetDevice\0") }.map(|sym| *sym);
        let hipGetDevice = unsafe { __library.get(b"hipGetDevice\0") }.map(|sym| *sym);
        let hipGetDeviceCount = unsafe { __library.get(b"hipGetDeviceCount\0") }.map(|sym| *sym);
        let hipDeviceGetAttribute =
            unsafe { __library.get(b"hipDeviceGetAttribute\0") }.map(|sym| *sym);
        let hipDeviceGetDefaultMemPool =
            unsafe { __library.get(b"hipDeviceGetDefaultMemPool\0") }.map(|sym| *sym);
        let hipGetDevicePropertiesR0600 =
            unsafe { __library.get(b"hipGetDevicePropertiesR0600\0") }.map(|sym| *sym);
        let hipExtGetLinkTypeAndHopCount =
            unsafe { __library.get(b"hipExtGetLinkTypeAndHopCount\0") }.map(|sym| *sym);
        let hipIpcGetMemHandle = unsafe { __library.get(b"hipIpcGetMemHandle\0") }.map(|sym| *sym);
        let hipIpcOpenMemHandle =
            unsafe { __library.get(b"hipIpcOpenMemHandle\0") }.map(|sym| *sym);
        let hipIpcCloseMemHandle =
            unsafe { __library.get(b"hipIpcCloseMemHandle\0") }.map(|sym| *sym);
        let hipGetLastError = unsafe { __library.get(b"hipGetLastError\0") }.map(|sym| *sym);
        let hipPeekAtLastError = unsafe { __library.get(b"hipPeekAtLastError\0") }.map(|sym| *sym);
        let hipGetErrorName = unsafe { __library.get(b"hipGetErrorName\0") }.map(|sym| *sym);
        let hipGetErrorString = unsafe { __library.get(b"hipGetErrorString\0") }.map(|sym| *sym);
        let hipStreamCreateWithPriority =
            unsafe { __library.get(b"hipStreamCreateWithPriority\0") }.map(|sym| *sym);
        let hipDeviceGetStreamPriorityRange =
            unsafe { __library.get(b"hipDeviceGetStreamPriorityRange\0") }.map(|sym| *sym);
        let hipStreamDestroy = unsafe { __library.get(b"hipStreamDestroy\0") }.map(|sym| *sym);
        let hipStreamQuery = unsafe { __library.get(b"hipStreamQuery\0") }.map(|sym| *sym);
        let hipStreamSynchronize =
            unsafe { __library.get(b"hipStreamSynchronize\0") }.map(|sym| *sym);
        let hipStreamWaitEvent = unsafe { __library.get(b"hipStreamWaitEvent\0") }.map(|sym| *sym);
        let hipStreamGetDevice = unsafe { __library.get(b"hipStreamGetDevice\0") }.map(|sym| *sym);
        let hipExtStreamCreateWithCUMask =
            unsafe { __library.get(b"hipExtStreamCreateWithCUMask\0") }.map(|sym| *sym);
        let hipStreamWaitValue32 =
            unsafe { __library.get(b"hipStreamWaitValue32\0") }.map(|sym| *sym);
        let hipStreamWriteValue32 =
            unsafe { __library.get(b"hipStreamWriteValue32\0") }.map(|sym| *sym);
        let hipEventCreateWithFlags =
            unsafe { __library.get(b"hipEventCreateWithFlags\0") }.map(|sym| *sym);
        let hipEventRecord = unsafe { __library.get(b"hipEventRecord\0") }.map(|sym| *sym);
        let hipEventDestroy = unsafe { __library.get(b"hipEventDestroy\0") }.map(|sym| *sym);
        let hipEventSynchronize =
            unsafe { __library.get(b"hipEventSynchronize\0") }.map(|sym| *sym);
        let hipEventElapsedTime =
            unsafe { __library.get(b"hipEventElapsedTime\0") }.map(|sym| *sym);
        let hipEventQuery = unsafe { __library.get(b"hipEventQuery\0") }.map(|sym| *sym);
        let hipPointerGetAttributes =
            unsafe { __library.get(b"hipPointerGetAttributes\0") }.map(|sym| *sym);
        let hipPointerGetAttribute =
            unsafe { __library.get(b"hipPointerGetAttribute\0") }.map(|sym| *sym);
        let hipDrvPointerGetAttributes =
            unsafe { __library.get(b"hipDrvPointerGetAttributes\0") }.map(|sym| *sym);
        let hipMalloc = unsafe { __library.get(b"hipMalloc\0") }.map(|sym| *sym);
        let hipHostMalloc = unsafe { __library.get(b"hipHostMalloc\0") }.map(|sym| *sym);
        let hipFreeAsync = unsafe { __library.get(b"hipFreeAsync\0") }.map(|sym| *sym);
        let hipMemPoolSetAccess =
            unsafe { __library.get(b"hipMemPoolSetAccess\0") }.map(|sym| *sym);
        let hipMemPoolCreate = unsafe { __library.get(b"hipMemPoolCreate\0") }.map(|sym| *sym);
        let hipMemPoolDestroy = unsafe { __library.get(b"hipMemPoolDestroy\0") }.map(|sym| *sym);
        let hipMallocFromPoolAsync =
            unsafe { __library.get(b"hipMallocFromPoolAsync\0") }.map(|sym| *sym);
        let hipMemPoolExportToShareableHandle =
            unsafe { __library.get(b"hipMemPoolExportToShareableHandle\0") }.map(|sym| *sym);
        let hipMemPoolImportFromShareableHandle =
            unsafe { __library.get(b"hipMemPoolImportFromShareableHandle\0") }.map(|sym| *sym);
        let hipMemPoolExportPointer =
            unsafe { __library.get(b"hipMemPoolExportPointer\0") }.map(|sym| *sym);
        let hipMemPoolImportPointer =
            unsafe { __library.get(b"hipMemPoolImportPointer\0") }.map(|sym| *sym);
        let hipHostGetDevicePointer =
            unsafe { __library.get(b"hipHostGetDevicePointer\0") }.map(|sym| *sym);
        let hipHostRegister = unsafe { __library.get(b"hipHostRegister\0") }.map(|sym| *sym);
        let hipHostUnregister = unsafe { __library.get(b"hipHostUnregister\0") }.map(|sym| *sym);
        let hipFree = unsafe { __library.get(b"hipFree\0") }.map(|sym| *sym);
        let hipHostFree = unsafe { __library.get(b"hipHostFree\0") }.map(|sym| *sym);
        let hipMemcpyHtoDAsync = unsafe { __library.get(b"hipMemcpyHtoDAsync\0") }.map(|sym| *sym);
        let hipMemcpyDtoHAsync = unsafe { __library.get(b"hipMemcpyDtoHAsync\0") }.map(|sym| *sym);
        let hipMemcpyDtoDAsync = unsafe { __library.get(b"hipMemcpyDtoDAsync\0") }.map(|sym| *sym);
        let hipMemcpyAsync = unsafe { __library.get(b"hipMemcpyAsync\0") }.map(|sym| *sym);
        let hipMemsetD8Async = unsafe { __library.get(b"hipMemsetD8Async\0") }.map(|sym| *sym);
        let hipMemsetD32Async = unsafe { __library.get(b"hipMemsetD32Async\0") }.map(|sym| *sym);
        let hipMemGetInfo = unsafe { __library.get(b"hipMemGetInfo\0") }.map(|sym| *sym);
        let hipMemcpyParam2DAsync =
            unsafe { __library.get(b"hipMemcpyParam2DAsync\0") }.map(|sym| *sym);
        let hipMemcpy2DAsync = unsafe { __library.get(b"hipMemcpy2DAsync\0") }.map(|sym| *sym);
        let hipMemGetAddressRange =
            unsafe { __library.get(b"hipMemGetAddressRange\0") }.map(|sym| *sym);
        let hipMemcpyBatchAsync =
            unsafe { __library.get(b"hipMemcpyBatchAsync\0") }.map(|sym| *sym);
        let hipDeviceCanAccessPeer =
            unsafe { __library.get(b"hipDeviceCanAccessPeer\0") }.map(|sym| *sym);
        let hipDeviceEnablePeerAccess =
            unsafe { __library.get(b"hipDeviceEnablePeerAccess\0") }.map(|sym| *sym);
        let hipModuleUnload = unsafe { __library.get(b"hipModuleUnload\0") }.map(|sym| *sym);
        let hipModuleGetFunction =
            unsafe { __library.get(b"hipModuleGetFunction\0") }.map(|sym| *sym);
        let hipFuncGetAttribute =
            unsafe { __library.get(b"hipFuncGetAttribute\0") }.map(|sym| *sym);
        let hipModuleLoadData = unsafe { __library.get(b"hipModuleLoadData\0") }.map(|sym| *sym);
        let hipModuleLaunchKernel =
            unsafe { __library.get(b"hipModuleLaunchKernel\0") }.map(|sym| *sym);
        let hipMemGetHandleForAddressRange =
            unsafe { __library.get(b"hipMemGetHandleForAddressRange\0") }.map(|sym| *sym);
        let hipModuleOccupancyMaxActiveBlocksPerMultiprocessor =
            unsafe { __library.get(b"hipModuleOccupancyMaxActiveBlocksPerMultiprocessor\0") }
                .map(|sym| *sym);
        let hipStreamBeginCapture =
            unsafe { __library.get(b"hipStreamBeginCapture\0") }.map(|sym| *sym);
        let hipStreamEndCapture =
            unsafe { __library.get(b"hipStreamEndCapture\0") }.map(|sym| *sym);
        let hipStreamIsCapturing =
            unsafe { __library.get(b"hipStreamIsCapturing\0") }.map(|sym| *sym);
        let hipThreadExchangeStreamCaptureMode =
            unsafe { __library.get(b"hipThreadExchangeStreamCaptureMode\0") }.map(|sym| *sym);
        let hipGraphDestroy = unsafe { __library.get(b"hipGraphDestroy\0") }.map(|sym| *sym);
        let hipMemAddressFree = unsafe { __library.get(b"hipMemAddressFree\0") }.map(|sym| *sym);
        let hipMemAddressReserve =
            unsafe { __library.get(b"hipMemAddressReserve\0") }.map(|sym| *sym);
        let hipMemCreate = unsafe { __library.get(b"hipMemCreate\0") }.map(|sym| *sym);
        let hipMemExportToShareableHandle =
            unsafe { __library.get(b"hipMemExportToShareableHandle\0") }.map(|sym| *sym);
        let hipMemGetAccess = unsafe { __library.get(b"hipMemGetAccess\0") }.map(|sym| *sym);
        let hipMemGetAllocationGranularity =
            unsafe { __library.get(b"hipMemGetAllocationGranularity\0") }.map(|sym| *sym);
        let hipMemGetAllocationPropertiesFromHandle =
            unsafe { __library.get(b"hipMemGetAllocationPropertiesFromHandle\0") }.map(|sym| *sym);
        let hipMemImportFromShareableHandle =
            unsafe { __library.get(b"hipMemImportFromShareableHandle\0") }.map(|sym| *sym);
        let hipMemMap = unsafe { __library.get(b"hipMemMap\0") }.map(|sym| *sym);
        let hipMemRelease = unsafe { __library.get(b"hipMemRelease\0") }.map(|sym| *sym);
        let hipMemRetainAllocationHandle =
            unsafe { __library.get(b"hipMemRetainAllocationHandle\0") }.map(|sym| *sym);
        let hipMemSetAccess = unsafe { __library.get(b"hipMemSetAccess\0") }.map(|sym| *sym);
        let hipMemUnmap = unsafe { __library.get(b"hipMemUnmap\0") }.map(|sym| *sym);
        let hipGetDeviceProperties =
            unsafe { __library.get(b"hipGetDeviceProperties\0") }.map(|sym| *sym);
        Ok(HipLibrary {
            __library,
            hipInit,
            hipDriverGetVersion,
            hipRuntimeGetVersion,
            hipDeviceGet,
            hipDeviceGetName,
            hipDeviceGetUuid,
            hipDeviceGetPCIBusId,
            hipDeviceTotalMem,
            hipSetDevice,
            hipGetDevice,
            hipGetDeviceCount,
            hipDeviceGetAttribute,
            hipDeviceGetDefaultMemPool,
            hipGetDevicePropertiesR0600,
            hipExtGetLinkTypeAndHopCount,
            hipIpcGetMemHandle,
            hipIpcOpenMemHandle,
            hipIpcCloseMemHandle,
            hipGetLastError,
            hipPeekAtLastError,
            hipGetErrorName,
            hipGetErrorString,
            hipStreamCreateWithPriority,
            hipDeviceGetStreamPriorityRange,
            hipStreamDestroy,
            hipStreamQuery,
            hipStreamSynchronize,
            hipStreamWaitEvent,
            hipStreamGetDevice,
            hipExtStreamCreateWithCUMask,
            hipStreamWaitValue32,
            hipStreamWriteValue32,
            hipEventCreateWithFlags,
            hipEventRecord,
            hipEventDestroy,
            hipEventSynchronize,
            hipEventElapsedTime,
            hipEventQuery,
            hipPointerGetAttributes,
            hipPointerGetAttribute,
            hipDrvPointerGetAttributes,
            hipMalloc,
            hipHostMalloc,
            hipFreeAsync,
            hipMemPoolSetAccess,
            hipMemPoolCreate,
            hipMemPoolDestroy,
            hipMallocFromPoolAsync,
            hipMemPoolExportToShareableHandle,
            hipMemPoolImportFromShareableHandle,
            hipMemPoolExportPointer,
            hipMemPoolImportPointer,
            hipHostGetDevicePointer,
            hipHostRegister,
            hipHostUnregister,
            hipFree,
            hipHostFree,
            hipMemcpyHtoDAsync,
            hipMemcpyDtoHAsync,
            hipMemcpyDtoDAsync,
            hipMemcpyAsync,
            hipMemsetD8Async,
            hipMemsetD32Async,
            hipMemGetInfo,
            hipMemcpyParam2DAsync,
            hipMemcpy2DAsync,
            hipMemGetAddressRange,
            hipMemcpyBatchAsync,
            hipDeviceCanAccessPeer,
            hipDeviceEnablePeerAccess,
            hipModuleUnload,
            hipModuleGetFunction,
            hipFuncGetAttribute,
            hipModuleLoadData,
            hipModuleLaunchKernel,
            hipMemGetHandleForAddressRange,
            hipModuleOccupancyMaxActiveBlocksPerMultiprocessor,
            hipStreamBeginCapture,
            hipStreamEndCapture,
            hipStreamIsCapturing,
            hipThreadExchangeStreamCaptureMode,
            hipGraphDestroy,
            hipMemAddressFree,
            hipMemAddressReserve,
            hipMemCreate,
            hipMemExportToShareableHandle,
            hipMemGetAccess,
            hipMemGetAllocationGranularity,
            hipMemGetAllocationPropertiesFromHandle,
            hipMemImportFromShareableHandle,
            hipMemMap,
            hipMemRelease,
            hipMemRetainAllocationHandle,
            hipMemSetAccess,
            hipMemUnmap,
            hipGetDeviceProperties,
        })
    }
    pub unsafe fn hipInit(&self, flags: ::core::ffi::c_uint) -> hipError_t {
        unsafe { (self.hipInit.as_ref().expect("Expected function, got error."))(flags) }
    }
    pub unsafe fn hipDriverGetVersion(&self, driverVersion: *mut ::core::ffi::c_int) -> hipError_t {
        unsafe {
            (self.hipDriverGetVersion.as_ref().expect("Expected function, got error."))(
                driverVersion,
            )
        }
    }
    pub unsafe fn hipRuntimeGetVersion(
        &self,
        runtimeVersion: *mut ::core::ffi::c_int,
    ) -> hipError_t {
        unsafe {
            (self.hipRuntimeGetVersion.as_ref().expect("Expected function, got error."))(
                runtimeVersion,
            )
        }
    }
    pub unsafe fn hipDeviceGet(
        &self,
        device: *mut hipDevice_t,
        ordinal: ::core::ffi::c_int,
    ) -> hipError_t {
        unsafe {
            (self.hipDeviceGet.as_ref().expect("Expected function, got error."))(device, ordinal)
        }
    }
    pub unsafe fn hipDeviceGetName(
        &self,
        name: *mut ::core::ffi::c_char,
        len: ::core::ffi::c_int,
        device: hipDevice_t,
    ) -> hipError_t {
        unsafe {
            (self.hipDeviceGetName.as_ref().expect("Expected function, got error."))(
                name, len, device,
            )
        }
    }
    pub unsafe fn hipDeviceGetUuid(&self, uuid: *mut hipUUID, device: hipDevice_t) -> hipError_t {
        unsafe {
            (self.hipDeviceGetUuid.as_ref().expect("Expected function, got error."))(uuid, device)
        }
    }
    pub unsafe fn hipDeviceGetPCIBusId(
        &self,
        pciBusId: *mut ::core::ffi::c_char,
        len: ::core::ffi::c_int,
        device: ::core::ffi::c_int,
    ) -> hipError_t {
        unsafe {
            (self.hipDeviceGetPCIBusId.as_ref().expect("Expected function, got error."))(
                pciBusId, len, device,
            )
        }
    }
    pub unsafe fn hipDeviceTotalMem(&self, bytes: *mut usize, device: hipDevice_t) -> hipError_t {
        unsafe {
            (self.hipDeviceTotalMem.as_ref().expect("Expected function, got error."))(bytes, device)
        }
    }
    pub unsafe fn hipSetDevice(&self, deviceId: ::core::ffi::c_int) -> hipError_t {
        unsafe { (self.hipSetDevice.as_ref().expect("Expected function, got error."))(deviceId) }
    }
    pub unsafe fn hipGetDevice(&self, deviceId: *mut ::core::ffi::c_int) -> hipError_t {
        unsafe { (self.hipGetDevice.as_ref().expect("Expected function, got error."))(deviceId) }
    }
    pub unsafe fn hipGetDeviceCount(&self, count: *mut ::core::ffi::c_int) -> hipError_t {
        unsafe { (self.hipGetDeviceCount.as_ref().expect("Expected function, got error."))(count) }
    }
    pub unsafe fn hipDeviceGetAttribute(
        &self,
        pi: *mut ::core::ffi::c_int,
        attr: hipDeviceAttribute_t,
        deviceId: ::core::ffi::c_int,
    ) -> hipError_t {
        unsafe {
            (self.hipDeviceGetAttribute.as_ref().expect("Expected function, got error."))(
                pi, attr, deviceId,
            )
        }
    }
    pub unsafe fn hipDeviceGetDefaultMemPool(
        &self,
        mem_pool: *mut hipMemPool_t,
        device: ::core::ffi::c_int,
    ) -> hipError_t {
        unsafe {
            (self.hipDeviceGetDefaultMemPool.as_ref().expect("Expected function, got error."))(
                mem_pool, device,
            )
        }
    }
    pub unsafe fn hipGetDevicePropertiesR0600(
        &self,
        prop: *mut hipDeviceProp_tR0600,
        deviceId: ::core::ffi::c_int,
    ) -> hipError_t {
        unsafe {
            (self.hipGetDevicePropertiesR0600.as_ref().expect("Expected function, got error."))(
                prop, deviceId,
            )
        }
    }
    pub unsafe fn hipExtGetLinkTypeAndHopCount(
        &self,
        device1: ::core::ffi::c_int,
        device2: ::core::ffi::c_int,
        linktype: *mut u32,
        hopcount: *mut u32,
    ) -> hipError_t {
        unsafe {
            (self.hipExtGetLinkTypeAndHopCount.as_ref().expect("Expected function, got error."))(
                device1, device2, linktype, hopcount,
            )
        }
    }
    pub unsafe fn hipIpcGetMemHandle(
        &self,
        handle: *mut hipIpcMemHandle_t,
        devPtr: *mut ::core::ffi::c_void,
    ) -> hipError_t {
        unsafe {
            (self.hipIpcGetMemHandle.as_ref().expect("Expected function, got error."))(
                handle, devPtr,
            )
        }
    }
    pub unsafe fn hipIpcOpenMemHandle(
        &self,
        devPtr: *mut *mut ::core::ffi::c_void,
        handle: hipIpcMemHandle_t,
        flags: ::core::ffi::c_uint,
    ) -> hipError_t {
        unsafe {
            (self.hipIpcOpenMemHandle.as_ref().expect("Expected function, got error."))(
                devPtr, handle, flags,
            )
        }
    }
    pub unsafe fn hipIpcCloseMemHandle(&self, devPtr: *mut ::core::ffi::c_void) -> hipError_t {
        unsafe {
            (self.hipIpcCloseMemHandle.as_ref().expect("Expected function, got error."))(devPtr)
        }
    }
    pub unsafe fn hipGetLastError(&self) -> hipError_t {
        unsafe { (self.hipGetLastError.as_ref().expect("Expected function, got error."))() }
    }
    pub unsafe fn hipPeekAtLastError(&self) -> hipError_t {
        unsafe { (self.hipPeekAtLastError.as_ref().expect("Expected function, got error."))() }
    }
    pub unsafe fn hipGetErrorName(&self, hip_error: hipError_t) -> *const ::core::ffi::c_char {
        unsafe {
            (self.hipGetErrorName.as_ref().expect("Expected function, got error."))(hip_error)
        }
    }
    pub unsafe fn hipGetErrorString(&self, hipError: hipError_t) -> *const ::core::ffi::c_char {
        unsafe {
            (self.hipGetErrorString.as_ref().expect("Expected function, got error."))(hipError)
        }
    }
    pub unsafe fn hipStreamCreateWithPriority(
        &self,
        stream: *mut hipStream_t,
        flags: ::core::ffi::c_uint,
        priority: ::core::ffi::c_int,
    ) -> hipError_t {
        unsafe {
            (self.hipStreamCreateWithPriority.as_ref().expect("Expected function, got error."))(
                stream, flags, priority,
            )
        }
    }
    pub unsafe fn hipDeviceGetStreamPriorityRange(
        &self,
        leastPriority: *mut ::core::ffi::c_int,
        greatestPriority: *mut ::core::ffi::c_int,
    ) -> hipError_t {
        unsafe {
            (self.hipDeviceGetStreamPriorityRange.as_ref().expect("Expected function, got error."))(
                leastPriority,
                greatestPriority,
            )
        }
    }
    pub unsafe fn hipStreamDestroy(&self, stream: hipStream_t) -> hipError_t {
        unsafe { (self.hipStreamDestroy.as_ref().expect("Expected function, got error."))(stream) }
    }
    pub unsafe fn hipStreamQuery(&self, stream: hipStream_t) -> hipError_t {
        unsafe { (self.hipStreamQuery.as_ref().expect("Expected function, got error."))(stream) }
    }
    pub unsafe fn hipStreamSynchronize(&self, stream: hipStream_t) -> hipError_t {
        unsafe {
            (self.hipStreamSynchronize.as_ref().expect("Expected function, got error."))(stream)
        }
    }
    pub unsafe fn hipStreamWaitEvent(
        &self,
        stream: hipStream_t,
        event: hipEvent_t,
        flags: ::core::ffi::c_uint,
    ) -> hipError_t {
        unsafe {
            (self.hipStreamWaitEvent.as_ref().expect("Expected function, got error."))(
                stream, event, flags,
            )
        }
    }
    pub unsafe fn hipStreamGetDevice(
        &self,
        stream: hipStream_t,
        device: *mut hipDevice_t,
    ) -> hipError_t {
        unsafe {
            (self.hipStreamGetDevice.as_ref().expect("Expected function, got error."))(
                stream, device,
            )
        }
    }
    pub unsafe fn hipExtStreamCreateWithCUMask(
        &self,
        stream: *mut hipStream_t,
        cuMaskSize: u32,
        cuMask: *const u32,
    ) -> hipError_t {
        unsafe {
            (self.hipExtStreamCreateWithCUMask.as_ref().expect("Expected function, got error."))(
                stream, cuMaskSize, cuMask,
            )
        }
    }
    pub unsafe fn hipStreamWaitValue32(
        &self,
        stream: hipStream_t,
        ptr: *mut ::core::ffi::c_void,
        value: u32,
        flags: ::core::ffi::c_uint,
        mask: u32,
    ) -> hipError_t {
        unsafe {
            (self.hipStreamWaitValue32.as_ref().expect("Expected function, got error."))(
                stream, ptr, value, flags, mask,
            )
        }
    }
    pub unsafe fn hipStreamWriteValue32(
        &self,
        stream: hipStream_t,
        ptr: *mut ::core::ffi::c_void,
        value: u32,
        flags: ::core::ffi::c_uint,
    ) -> hipError_t {
        unsafe {
            (self.hipStreamWriteValue32.as_ref().expect("Expected function, got error."))(
                stream, ptr, value, flags,
            )
        }
    }
    pub unsafe fn hipEventCreateWithFlags(
        &self,
        event: *mut hipEvent_t,
        flags: ::core::ffi::c_uint,
    ) -> hipError_t {
        unsafe {
            (self.hipEventCreateWithFlags.as_ref().expect("Expected function, got error."))(
                event, flags,
            )
        }
    }
    pub unsafe fn hipEventRecord(&self, event: hipEvent_t, stream: hipStream_t) -> hipError_t {
        unsafe {
            (self.hipEventRecord.as_ref().expect("Expected function, got error."))(event, stream)
        }
    }
    pub unsafe fn hipEventDestroy(&self, event: hipEvent_t) -> hipError_t {
        unsafe { (self.hipEventDestroy.as_ref().expect("Expected function, got error."))(event) }
    }
    pub unsafe fn hipEventSynchronize(&self, event: hipEvent_t) -> hipError_t {
        unsafe {
            (self.hipEventSynchronize.as_ref().expect("Expected function, got error."))(event)
        }
    }
    pub unsafe fn hipEventElapsedTime(
        &self,
        ms: *mut f32,
        start: hipEvent_t,
        stop: hipEvent_t,
    ) -> hipError_t {
        unsafe {
            (self.hipEventElapsedTime.as_ref().expect("Expected function, got error."))(
                ms, start, stop,
            )
        }
    }
    pub unsafe fn hipEventQuery(&self, event: hipEvent_t) -> hipError_t {
        unsafe { (self.hipEventQuery.as_ref().expect("Expected function, got error."))(event) }
    }
    pub unsafe fn hipPointerGetAttributes(
        &self,
        attributes: *mut hipPointerAttribute_t,
        ptr: *const ::core::ffi::c_void,
    ) -> hipError_t {
        unsafe {
            (self.hipPointerGetAttributes.as_ref().expect("Expected function, got error."))(
                attributes, ptr,
            )
        }
    }
    pub unsafe fn hipPointerGetAttribute(
        &self,
        data: *mut ::core::ffi::c_void,
        attribute: hipPointer_attribute,
        ptr: hipDeviceptr_t,
    ) -> hipError_t {
        unsafe {
            (self.hipPointerGetAttribute.as_ref().expect("Expected function, got error."))(
                data, attribute, ptr,
            )
        }
    }
    pub unsafe fn hipDrvPointerGetAttributes(
        &self,
        numAttributes: ::core::ffi::c_uint,
        attributes: *mut hipPointer_attribute,
        data: *mut *mut ::core::ffi::c_void,
        ptr: hipDeviceptr_t,
    ) -> hipError_t {
        unsafe {
            (self.hipDrvPointerGetAttributes.as_ref().expect("Expected function, got error."))(
                numAttributes,
                attributes,
                data,
                ptr,
            )
        }
    }
    pub unsafe fn hipMalloc(&self, ptr: *mut *mut ::core::ffi::c_void, size: usize) -> hipError_t {
        unsafe { (self.hipMalloc.as_ref().expect("Expected function, got error."))(ptr, size) }
    }
    pub unsafe fn hipHostMalloc(
        &self,
        ptr: *mut *mut ::core::ffi::c_void,
        size: usize,
        flags: ::core::ffi::c_uint,
    ) -> hipError_t {
        unsafe {
            (self.hipHostMalloc.as_ref().expect("Expected function, got error."))(ptr, size, flags)
        }
    }
    pub unsafe fn hipFreeAsync(
        &self,
        dev_ptr: *mut ::core::ffi::c_void,
        stream: hipStream_t,
    ) -> hipError_t {
        unsafe {
            (self.hipFreeAsync.as_ref().expect("Expected function, got error."))(dev_ptr, stream)
        }
    }
    pub unsafe fn hipMemPoolSetAccess(
        &self,
        mem_pool: hipMemPool_t,
        desc_list: *const hipMemAccessDesc,
        count: usize,
    ) -> hipError_t {
        unsafe {
            (self.hipMemPoolSetAccess.as_ref().expect("Expected function, got error."))(
                mem_pool, desc_list, count,
            )
        }
    }
    pub unsafe fn hipMemPoolCreate(
        &self,
        mem_pool: *mut hipMemPool_t,
        pool_props: *const hipMemPoolProps,
    ) -> hipError_t {
        unsafe {
            (self.hipMemPoolCreate.as_ref().expect("Expected function, got error."))(
                mem_pool, pool_props,
            )
        }
    }
    pub unsafe fn hipMemPoolDestroy(&self, mem_pool: hipMemPool_t) -> hipError_t {
        unsafe {
            (self.hipMemPoolDestroy.as_ref().expect("Expected function, got error."))(mem_pool)
        }
    }
    pub unsafe fn hipMallocFromPoolAsync(
        &self,
        dev_ptr: *mut *mut ::core::ffi::c_void,
        size: usize,
        mem_pool: hipMemPool_t,
        stream: hipStream_t,
    ) -> hipError_t {
        unsafe {
            (self.hipMallocFromPoolAsync.as_ref().expect("Expected function, got error."))(
                dev_ptr, size, mem_pool, stream,
            )
        }
    }
    pub unsafe fn hipMemPoolExportToShareableHandle(
        &self,
        shared_handle: *mut ::core::ffi::c_void,
        mem_pool: hipMemPool_t,
        handle_type: hipMemAllocationHandleType,
        flags: ::core::ffi::c_uint,
    ) -> hipError_t {
        unsafe {
            (self
                .hipMemPoolExportToShareableHandle
                .as_ref()
                .expect("Expected function, got error."))(
                shared_handle,
                mem_pool,
                handle_type,
                flags,
            )
        }
    }
    pub unsafe fn hipMemPoolImportFromShareableHandle(
        &self,
        mem_pool: *mut hipMemPool_t,
        shared_handle: *mut ::core::ffi::c_void,
        handle_type: hipMemAllocationHandleType,
        flags: ::core::ffi::c_uint,
    ) -> hipError_t {
        unsafe {
            (self
                .hipMemPoolImportFromShareableHandle
                .as_ref()
                .expect("Expected function, got error."))(
                mem_pool,
                shared_handle,
                handle_type,
                flags,
            )
        }
    }
    pub unsafe fn hipMemPoolExportPointer(
        &self,
        export_data: *mut hipMemPoolPtrExportData,
        dev_ptr: *mut ::core::ffi::c_void,
    ) -> hipError_t {
        unsafe {
            (self.hipMemPoolExportPointer.as_ref().expect("Expected function, got error."))(
                export_data,
                dev_ptr,
            )
        }
    }
    pub unsafe fn hipMemPoolImportPointer(
        &self,
        dev_ptr: *mut *mut ::core::ffi::c_void,
        mem_pool: hipMemPool_t,
        export_data: *mut hipMemPoolPtrExportData,
    ) -> hipError_t {
        unsafe {
            (self.hipMemPoolImportPointer.as_ref().expect("Expected function, got error."))(
                dev_ptr,
                mem_pool,
                export_data,
            )
        }
    }
    pub unsafe fn hipHostGetDevicePointer(
        &self,
        devPtr: *mut *mut ::core::ffi::c_void,
        hstPtr: *mut ::core::ffi::c_void,
        flags: ::core::ffi::c_uint,
    ) -> hipError_t {
        unsafe {
            (self.hipHostGetDevicePointer.as_ref().expect("Expected function, got error."))(
                devPtr, hstPtr, flags,
            )
        }
    }
    pub unsafe fn hipHostRegister(
        &self,
        hostPtr: *mut ::core::ffi::c_void,
        sizeBytes: usize,
        flags: ::core::ffi::c_uint,
    ) -> hipError_t {
        unsafe {
            (self.hipHostRegister.as_ref().expect("Expected function, got error."))(
                hostPtr, sizeBytes, flags,
            )
        }
    }
    pub unsafe fn hipHostUnregister(&self, hostPtr: *mut ::core::ffi::c_void) -> hipError_t {
        unsafe {
            (self.hipHostUnregister.as_ref().expect("Expected function, got error."))(hostPtr)
        }
    }
    pub unsafe fn hipFree(&self, ptr: *mut ::core::ffi::c_void) -> hipError_t {
        unsafe { (self.hipFree.as_ref().expect("Expected function, got error."))(ptr) }
    }
    pub unsafe fn hipHostFree(&self, ptr: *mut ::core::ffi::c_void) -> hipError_t {
        unsafe { (self.hipHostFree.as_ref().expect("Expected function, got error."))(ptr) }
    }
    pub unsafe fn hipMemcpyHtoDAsync(
        &self,
        dst: hipDeviceptr_t,
        src: *const ::core::ffi::c_void,
        sizeBytes: usize,
        stream: hipStream_t,
    ) -> hipError_t {
        unsafe {
            (self.hipMemcpyHtoDAsync.as_ref().expect("Expected function, got error."))(
                dst, src, sizeBytes, stream,
            )
        }
    }
    pub unsafe fn hipMemcpyDtoHAsync(
        &self,
        dst: *mut ::core::ffi::c_void,
        src: hipDeviceptr_t,
        sizeBytes: usize,
        stream: hipStream_t,
    ) -> hipError_t {
        unsafe {
            (self.hipMemcpyDtoHAsync.as_ref().expect("Expected function, got error."))(
                dst, src, sizeBytes, stream,
            )
        }
    }
    pub unsafe fn hipMemcpyDtoDAsync(
        &self,
        dst: hipDeviceptr_t,
        src: hipDeviceptr_t,
        sizeBytes: usize,
        stream: hipStream_t,
    ) -> hipError_t {
        unsafe {
            (self.hipMemcpyDtoDAsync.as_ref().expect("Expected function, got error."))(
                dst, src, sizeBytes, stream,
            )
        }
    }
    pub unsafe fn hipMemcpyAsync(
        &self,
        dst: *mut ::core::ffi::c_void,
        src: *const ::core::ffi::c_void,
        sizeBytes: usize,
        kind: hipMemcpyKind,
        stream: hipStream_t,
    ) -> hipError_t {
        unsafe {
            (self.hipMemcpyAsync.as_ref().expect("Expected function, got error."))(
                dst, src, sizeBytes, kind, stream,
            )
        }
    }
    pub unsafe fn hipMemsetD8Async(
        &self,
        dest: hipDeviceptr_t,
        value: ::core::ffi::c_uchar,
        count: usize,
        stream: hipStream_t,
    ) -> hipError_t {
        unsafe {
            (self.hipMemsetD8Async.as_ref().expect("Expected function, got error."))(
                dest, value, count, stream,
            )
        }
    }
    pub unsafe fn hipMemsetD32Async(
        &self,
        dst: hipDeviceptr_t,
        value: ::core::ffi::c_int,
        count: usize,
        stream: hipStream_t,
    ) -> hipError_t {
        unsafe {
            (self.hipMemsetD32Async.as_ref().expect("Expected function, got error."))(
                dst, value, count, stream,
            )
        }
    }
    pub unsafe fn hipMemGetInfo(&self, free: *mut usize, total: *mut usize) -> hipError_t {
        unsafe {
            (self.hipMemGetInfo.as_ref().expect("Expected function, got error."))(free, total)
        }
    }
    pub unsafe fn hipMemcpyParam2DAsync(
        &self,
        pCopy: *const hip_Memcpy2D,
        stream: hipStream_t,
    ) -> hipError_t {
        unsafe {
            (self.hipMemcpyParam2DAsync.as_ref().expect("Expected function, got error."))(
                pCopy, stream,
            )
        }
    }
    pub unsafe fn hipMemcpy2DAsync(
        &self,
        dst: *mut ::core::ffi::c_void,
        dpitch: usize,
        src: *const ::core::ffi::c_void,
        spitch: usize,
        width: usize,
        height: usize,
        kind: hipMemcpyKind,
        stream: hipStream_t,
    ) -> hipError_t {
        unsafe {
            (self.hipMemcpy2DAsync.as_ref().expect("Expected function, got error."))(
                dst, dpitch, src, spitch, width, height, kind, stream,
            )
        }
    }
    pub unsafe fn hipMemGetAddressRange(
        &self,
        pbase: *mut hipDeviceptr_t,
        psize: *mut usize,
        dptr: hipDeviceptr_t,
    ) -> hipError_t {
        unsafe {
            (self.hipMemGetAddressRange.as_ref().expect("Expected function, got error."))(
                pbase, psize, dptr,
            )
        }
    }
    pub unsafe fn hipMemcpyBatchAsync(
        &self,
        dsts: *mut *mut ::core::ffi::c_void,
        srcs: *mut *mut ::core::ffi::c_void,
        sizes: *mut usize,
        count: usize,
        attrs: *mut hipMemcpyAttributes,
        attrsIdxs: *mut usize,
        numAttrs: usize,
        failIdx: *mut usize,
        stream: hipStream_t,
    ) -> hipError_t {
        unsafe {
            (self.hipMemcpyBatchAsync.as_ref().expect("Expected function, got error."))(
                dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, stream,
            )
        }
    }
    pub unsafe fn hipDeviceCanAccessPeer(
        &self,
        canAccessPeer: *mut ::core::ffi::c_int,
        deviceId: ::core::ffi::c_int,
        peerDeviceId: ::core::ffi::c_int,
    ) -> hipError_t {
        unsafe {
            (self.hipDeviceCanAccessPeer.as_ref().expect("Expected function, got error."))(
                canAccessPeer,
                deviceId,
                peerDeviceId,
            )
        }
    }
    pub unsafe fn hipDeviceEnablePeerAccess(
        &self,
        peerDeviceId: ::core::ffi::c_int,
        flags: ::core::ffi::c_uint,
    ) -> hipError_t {
        unsafe {
            (self.hipDeviceEnablePeerAccess.as_ref().expect("Expected function, got error."))(
                peerDeviceId,
                flags,
            )
        }
    }
    pub unsafe fn hipModuleUnload(&self, module: hipModule_t) -> hipError_t {
        unsafe { (self.hipModuleUnload.as_ref().expect("Expected function, got error."))(module) }
    }
    pub unsafe fn hipModuleGetFunction(
        &self,
        function: *mut hipFunction_t,
        module: hipModule_t,
        kname: *const ::core::ffi::c_char,
    ) -> hipError_t {
        unsafe {
            (self.hipModuleGetFunction.as_ref().expect("Expected function, got error."))(
                function, module, kname,
            )
        }
    }
    pub unsafe fn hipFuncGetAttribute(
        &self,
        value: *mut ::core::ffi::c_int,
        attrib: hipFunction_attribute,
        hfunc: hipFunction_t,
    ) -> hipError_t {
        unsafe {
            (self.hipFuncGetAttribute.as_ref().expect("Expected function, got error."))(
                value, attrib, hfunc,
            )
        }
    }
    pub unsafe fn hipModuleLoadData(
        &self,
        module: *mut hipModule_t,
        image: *const ::core::ffi::c_void,
    ) -> hipError_t {
        unsafe {
            (self.hipModuleLoadData.as_ref().expect("Expected function, got error."))(module, image)
        }
    }
    pub unsafe fn hipModuleLaunchKernel(
        &self,
        f: hipFunction_t,
        gridDimX: ::core::ffi::c_uint,
        gridDimY: ::core::ffi::c_uint,
        gridDimZ: ::core::ffi::c_uint,
        blockDimX: ::core::ffi::c_uint,
        blockDimY: ::core::ffi::c_uint,
        blockDimZ: ::core::ffi::c_uint,
        sharedMemBytes: ::core::ffi::c_uint,
        stream: hipStream_t,
        kernelParams: *mut *mut ::core::ffi::c_void,
        extra: *mut *mut ::core::ffi::c_void,
    ) -> hipError_t {
        unsafe {
            (self.hipModuleLaunchKernel.as_ref().expect("Expected function, got error."))(
                f,
                gridDimX,
                gridDimY,
                gridDimZ,
                blockDimX,
                blockDimY,
                blockDimZ,
                sharedMemBytes,
                stream,
                kernelParams,
                extra,
            )
        }
    }
    pub unsafe fn hipMemGetHandleForAddressRange(
        &self,
        handle: *mut ::core::ffi::c_void,
        dptr: hipDeviceptr_t,
        size: usize,
        handleType: hipMemRangeHandleType,
        flags: ::core::ffi::c_ulonglong,
    ) -> hipError_t {
        unsafe {
            (self.hipMemGetHandleForAddressRange.as_ref().expect("Expected function, got error."))(
                handle, dptr, size, handleType, flags,
            )
        }
    }
    pub unsafe fn hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
        &self,
        numBlocks: *mut ::core::ffi::c_int,
        f: hipFunction_t,
        blockSize: ::core::ffi::c_int,
        dynSharedMemPerBlk: usize,
    ) -> hipError_t {
        unsafe {
            (self
                .hipModuleOccupancyMaxActiveBlocksPerMultiprocessor
                .as_ref()
                .expect("Expected function, got error."))(
                numBlocks,
                f,
                blockSize,
                dynSharedMemPerBlk,
            )
        }
    }
    pub unsafe fn hipStreamBeginCapture(
        &self,
        stream: hipStream_t,
        mode: hipStreamCaptureMode,
    ) -> hipError_t {
        unsafe {
            (self.hipStreamBeginCapture.as_ref().expect("Expected function, got error."))(
                stream, mode,
            )
        }
    }
    pub unsafe fn hipStreamEndCapture(
        &self,
        stream: hipStream_t,
        pGraph: *mut hipGraph_t,
    ) -> hipError_t {
        unsafe {
            (self.hipStreamEndCapture.as_ref().expect("Expected function, got error."))(
                stream, pGraph,
            )
        }
    }
    pub unsafe fn hipStreamIsCapturing(
        &self,
        stream: hipStream_t,
        pCaptureStatus: *mut hipStreamCaptureStatus,
    ) -> hipError_t {
        unsafe {
            (self.hipStreamIsCapturing.as_ref().expect("Expected function, got error."))(
                stream,
                pCaptureStatus,
            )
        }
    }
    pub unsafe fn hipThreadExchangeStreamCaptureMode(
        &self,
        mode: *mut hipStreamCaptureMode,
    ) -> hipError_t {
        unsafe {
            (self
                .hipThreadExchangeStreamCaptureMode
                .as_ref()
                .expect("Expected function, got error."))(mode)
        }
    }
    pub unsafe fn hipGraphDestroy(&self, graph: hipGraph_t) -> hipError_t {
        unsafe { (self.hipGraphDestroy.as_ref().expect("Expected function, got error."))(graph) }
    }
    pub unsafe fn hipMemAddressFree(
        &self,
        devPtr: *mut ::core::ffi::c_void,
        size: usize,
    ) -> hipError_t {
        unsafe {
            (self.hipMemAddressFree.as_ref().expect("Expected function, got error."))(devPtr, size)
        }
    }
    pub unsafe fn hipMemAddressReserve(
        &self,
        ptr: *mut *mut ::core::ffi::c_void,
        size: usize,
        alignment: usize,
        addr: *mut ::core::ffi::c_void,
        flags: ::core::ffi::c_ulonglong,
    ) -> hipError_t {
        unsafe {
            (self.hipMemAddressReserve.as_ref().expect("Expected function, got error."))(
                ptr, size, alignment, addr, flags,
            )
        }
    }
    pub unsafe fn hipMemCreate(
        &self,
        handle: *mut hipMemGenericAllocationHandle_t,
        size: usize,
        prop: *const hipMemAllocationProp,
        flags: ::core::ffi::c_ulonglong,
    ) -> hipError_t {
        unsafe {
            (self.hipMemCreate.as_ref().expect("Expected function, got error."))(
                handle, size, prop, flags,
            )
        }
    }
    pub unsafe fn hipMemExportToShareableHandle(
        &self,
        shareableHandle: *mut ::core::ffi::c_void,
        handle: hipMemGenericAllocationHandle_t,
        handleType: hipMemAllocationHandleType,
        flags: ::core::ffi::c_ulonglong,
    ) -> hipError_t {
        unsafe {
            (self.hipMemExportToShareableHandle.as_ref().expect("Expected function, got error."))(
                shareableHandle,
                handle,
                handleType,
                flags,
            )
        }
    }
    pub unsafe fn hipMemGetAccess(
        &self,
        flags: *mut ::core::ffi::c_ulonglong,
        location: *const hipMemLocation,
        ptr: *mut ::core::ffi::c_void,
    ) -> hipError_t {
        unsafe {
            (self.hipMemGetAccess.as_ref().expect("Expected function, got error."))(
                flags, location, ptr,
            )
        }
    }
    pub unsafe fn hipMemGetAllocationGranularity(
        &self,
        granularity: *mut usize,
        prop: *const hipMemAllocationProp,
        option: hipMemAllocationGranularity_flags,
    ) -> hipError_t {
        unsafe {
            (self.hipMemGetAllocationGranularity.as_ref().expect("Expected function, got error."))(
                granularity,
                prop,
                option,
            )
        }
    }
    pub unsafe fn hipMemGetAllocationPropertiesFromHandle(
        &self,
        prop: *mut hipMemAllocationProp,
        handle: hipMemGenericAllocationHandle_t,
    ) -> hipError_t {
        unsafe {
            (self
                .hipMemGetAllocationPropertiesFromHandle
                .as_ref()
                .expect("Expected function, got error."))(prop, handle)
        }
    }
    pub unsafe fn hipMemImportFromShareableHandle(
        &self,
        handle: *mut hipMemGenericAllocationHandle_t,
        osHandle: *mut ::core::ffi::c_void,
        shHandleType: hipMemAllocationHandleType,
    ) -> hipError_t {
        unsafe {
            (self.hipMemImportFromShareableHandle.as_ref().expect("Expected function, got error."))(
                handle,
                osHandle,
                shHandleType,
            )
        }
    }
    pub unsafe fn hipMemMap(
        &self,
        ptr: *mut ::core::ffi::c_void,
        size: usize,
        offset: usize,
        handle: hipMemGenericAllocationHandle_t,
        flags: ::core::ffi::c_ulonglong,
    ) -> hipError_t {
        unsafe {
            (self.hipMemMap.as_ref().expect("Expected function, got error."))(
                ptr, size, offset, handle, flags,
            )
        }
    }
    pub unsafe fn hipMemRelease(&self, handle: hipMemGenericAllocationHandle_t) -> hipError_t {
        unsafe { (self.hipMemRelease.as_ref().expect("Expected function, got error."))(handle) }
    }
    pub unsafe fn hipMemRetainAllocationHandle(
        &self,
        handle: *mut hipMemGenericAllocationHandle_t,
        addr: *mut ::core::ffi::c_void,
    ) -> hipError_t {
        unsafe {
            (self.hipMemRetainAllocationHandle.as_ref().expect("Expected function, got error."))(
                handle, addr,
            )
        }
    }
    pub unsafe fn hipMemSetAccess(
        &self,
        ptr: *mut ::core::ffi::c_void,
        size: usize,
        desc: *const hipMemAccessDesc,
        count: usize,
    ) -> hipError_t {
        unsafe {
            (self.hipMemSetAccess.as_ref().expect("Expected function, got error."))(
                ptr, size, desc, count,
            )
        }
    }
    pub unsafe fn hipMemUnmap(&self, ptr: *mut ::core::ffi::c_void, size: usize) -> hipError_t {
        unsafe { (self.hipMemUnmap.as_ref().expect("Expected function, got error."))(ptr, size) }
    }
    pub unsafe fn hipGetDeviceProperties(
        &self,
        properties: *mut ::core::ffi::c_void,
        device: ::core::ffi::c_int,
    ) -> hipError_t {
        unsafe {
            (self.hipGetDeviceProperties.as_ref().expect("Expected function, got error."))(
                properties, device,
            )
        }
    }
}
