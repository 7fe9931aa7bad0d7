//! A GPU in host memory, for tests: deferred execution, a current device per thread, IPC handles
//! that name whole allocations, and faults on demand.
//!
//! It is stricter than any real driver: a call outside its own device's scope fails, an export
//! gives fresh bytes each time, an allocation that is already mapped is refused.

mod control;
mod driver;
mod exports;
mod stream;

use std::sync::Arc;

use sha2::{Digest, Sha256};

pub use self::control::{Fault, Live, SimControl, SimWork, StreamWork};
use self::driver::SimDriver;
pub use self::driver::{current_device, set_current_device};
pub use self::exports::{SimChunks, map_as_another_library};
pub use self::stream::SimStream;
use crate::device::{Capabilities, Device, DeviceInfo, DeviceUuid, Vendor};
use crate::error::{Error, Result};
use crate::gpu::GpuDevice;

/// How a simulated GPU is made.
#[derive(Clone, Debug)]
pub struct SimOptions {
    /// Its number in this process.
    pub ordinal: u32,
    /// Whether a kernel compiler is found. Without one everything is DMA.
    pub kernel: bool,
    /// Whether other processes can open its memory.
    pub ipc: bool,
    /// Bytes of memory; more is out of memory.
    pub memory_bytes: u64,
    /// The GPU that it is a slice of (MIG): both have one PCI address and two identities.
    pub slice_of: Option<u32>,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self { ordinal: 0, kernel: true, ipc: true, memory_bytes: 64 << 30, slice_of: None }
    }
}

/// Opens a simulated GPU and the handle that makes it misbehave.
///
/// # Errors
/// [`Error::NoDevice`] if its thread cannot be started.
pub fn sim(options: &SimOptions) -> Result<(Arc<dyn Device>, Arc<SimControl>)> {
    let info = info(options);
    let no_thread =
        |error| Error::NoDevice { device: info.to_string(), reason: format!("no thread: {error}") };
    let control = Arc::new(SimControl::new(info.to_string()).map_err(no_thread)?);
    let driver = SimDriver::new(info, Arc::clone(&control));
    Ok((GpuDevice::new(driver)?, control))
}

fn info(options: &SimOptions) -> DeviceInfo {
    let digest = Sha256::digest(format!("kvferry simulated GPU {}", options.ordinal));
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&digest[..16]);
    let mut capabilities = Capabilities::empty();
    capabilities.set(Capabilities::KERNEL, options.kernel);
    capabilities.set(Capabilities::IPC, options.ipc);
    DeviceInfo {
        vendor: Vendor::Sim,
        ordinal: options.ordinal,
        name: "simulated GPU".into(),
        uuid: DeviceUuid(uuid),
        pci_bus_id: Some(format!("0000:{:02x}:00.0", options.slice_of.unwrap_or(options.ordinal))),
        architecture: "sim".into(),
        memory_bytes: options.memory_bytes,
        capabilities,
        kernel: if options.kernel { "simulated".into() } else { "none: no compiler".into() },
    }
}
