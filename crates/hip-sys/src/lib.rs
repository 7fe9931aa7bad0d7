//! AMD's HIP, hipRTC and comgr as tables of functions that are looked up at run time.
//!
//! The modules are bindgen's output of an allowlist (`ci/bindings.sh`), under the names of AMD's
//! headers, with what the headers of HIP 5 have otherwise beside it. Nothing is linked: a table is
//! filled from a library that the caller opened, and a function that the library does not have is
//! an `Err` in its field. bindgen's methods of the same names panic then, so call through the
//! fields. Result codes and enumerations are numbers: a library may be newer than these headers.

#[allow(missing_docs, missing_debug_implementations, clippy::all)]
#[allow(non_camel_case_types, non_snake_case, non_upper_case_globals, unreachable_pub)]
#[allow(clippy::missing_safety_doc, clippy::undocumented_unsafe_blocks)]
mod generated {
    pub mod comgr;
    pub mod hip;
    pub mod hiprtc;
}

pub use generated::hip::*;
pub use generated::{comgr, hiprtc};

/// Bytes that are enough for what `hipGetDeviceProperties` and `hipGetDevicePropertiesR0600` write,
/// whatever the version (792 in HIP 5, 1472 in HIP 6 and 7).
pub const DEVICE_PROPERTIES_BYTES: usize = 4096;

/// Where the architecture's name is in what `hipGetDeviceProperties` writes, as 256 bytes of text:
/// the layout of HIP 5.
pub const ARCHITECTURE_OFFSET_HIP5: usize = 396;

/// Flag of `hipIpcOpenMemHandle` in HIP 5. Since 6.0 it is [`hipIpcMemLazyEnablePeerAccess`].
pub const IPC_MEM_LAZY_ENABLE_PEER_ACCESS_HIP5: u32 = 0;

/// The values of [`hipMemoryType`] in HIP 5, which has none for memory that it does not know.
pub mod memory_type_hip5 {
    use super::hipMemoryType;

    /// Page-locked host memory.
    pub const HOST: hipMemoryType = 0;
    /// Device memory.
    pub const DEVICE: hipMemoryType = 1;
    /// Managed memory.
    pub const MANAGED: hipMemoryType = 4;
}
