//! HIP on an NVIDIA GPU: each call is one of libcuda, or of NVRTC.
//!
//! The two APIs are so alike that most structures and enumerations have one layout and one set of
//! values, so they are passed on as they are; `tests` below compare them. What differs is translated
//! here: result codes, attributes, and the device of a thread, which for CUDA is a context.

mod code;
mod compile;
mod device;
mod kernel;
mod library;
mod memory;
mod stream;
mod virtual_memory;

#[cfg(test)]
mod tests;

pub(crate) use self::compile::*;
pub(crate) use self::device::*;
pub(crate) use self::kernel::*;
pub(crate) use self::memory::*;
pub(crate) use self::stream::*;
pub(crate) use self::virtual_memory::*;

/// Functions that are one call of libcuda with the same arguments, on the device of the thread.
macro_rules! forward {
    ($(fn $hip:ident($($arg:ident: $type:ty),* $(,)?) = $cuda:ident;)*) => {
        $(
            pub(crate) unsafe fn $hip($($arg: $type),*) -> crate::call::Result {
                let cuda = super::device::bind()?;
                // SAFETY: the caller's contract, which NVIDIA's function shares.
                unsafe { cuda.$cuda($($arg),*) }
            }
        )*
    };
}

use forward;
