//! Devices that hold KV cache, behind one trait; the vendor is chosen at run time.
//!
//! A [`Device`] allocates and exports memory and opens [`Queue`]s. A queue runs copies; each
//! submission gets a [`Ticket`], and [`Completions::done`] means every byte of it has landed.
//!
//! This crate holds all GPU `unsafe` code. It never reads the environment, and it does not check
//! addresses that its caller can check.

#[cfg(any(feature = "cuda", feature = "rocm", feature = "testing"))]
mod chunks;
mod compact;
mod device;
mod driver;
mod error;
#[cfg(any(feature = "cuda", feature = "rocm"))]
mod exports;
mod gpu;
mod gpu_queue;
mod host;
mod host_bytes;
mod kernel;
pub mod load;
mod loss;
mod numa;
pub mod nvtx;
#[cfg(any(feature = "cuda", feature = "rocm"))]
mod page_lock;
#[cfg(any(feature = "cuda", feature = "rocm"))]
mod peers;
mod pinned;
pub mod private_file;
mod private_memory;
mod process;
mod queue;
mod software;

#[cfg(feature = "testing")]
pub mod conformance;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "rocm")]
pub mod rocm;
#[cfg(feature = "testing")]
pub mod sim;
#[cfg(feature = "testing")]
pub mod testing;

pub use device::{
    Allocation, Capabilities, Chunk, Device, DeviceInfo, DeviceUuid, Export, Mapping, Memory,
    Vendor,
};
pub use error::{Error, Left, Result, SubmitError};
pub use host::{host, host_uuid};
pub use host_bytes::HostBytes;
pub use loss::Loss;
pub use numa::bind_near;
pub use pinned::PinnedMemory;
pub use private_memory::private_memory;
pub use process::{MadeBy, is_fork};
pub use queue::{
    CompactCopy, CompactEnd, Completions, Consumer, CopyDescriptor, CopySource, Destinations,
    Fence, Producer, Queue, QueueOptions, Rows, Siblings, SliceSource, Stage, StageSource, Staged,
    Ticket, Verdict, Work,
};
