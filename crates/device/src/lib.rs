//! Devices that hold KV cache, behind one trait; the vendor is chosen at run time.
//!
//! A [`Device`] allocates and exports memory and opens [`Queue`]s. A queue runs copies; each
//! submission gets a [`Seq`], and `completed() >= seq` means every byte of it has landed.
//!
//! This crate holds all GPU `unsafe` code. It never reads the environment, and it does not check
//! addresses that its caller can check.

mod device;
mod driver;
mod error;
mod gpu;
mod host;
mod kernel;
pub mod load;
mod queue;
mod software;

#[cfg(feature = "testing")]
pub mod conformance;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "testing")]
pub mod sim;

pub use device::{
    Allocation, Capabilities, Device, DeviceInfo, DeviceUuid, Export, Mapping, Memory, Vendor,
};
pub use error::{Error, Left, Result, SubmitError};
pub use host::host;
pub use queue::{CopyDescriptor, CopySource, Queue, QueueOptions, Seq, SliceSource};
