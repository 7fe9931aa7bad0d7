//! What a GPU is, and which others it reaches; asked without a context.

use std::ffi::{CStr, c_char, c_int};

use cudarc::driver::sys;

use super::context::can_access;
use super::library::{Cuda, Failure};
use crate::device::{Capabilities, DeviceInfo, DeviceUuid, Vendor};
use crate::error::Result;

pub(super) fn device(cuda: &Cuda, ordinal: u32) -> Result<sys::CUdevice, Failure> {
    let mut device = 0;
    // SAFETY: the driver is initialised and writes one number; it refuses an ordinal out of range.
    unsafe { cuda.cuDeviceGet(&mut device, ordinal as c_int) }?;
    Ok(device)
}

/// Facts about the device, and its compute capability as in `sm_90`.
pub(super) fn info(
    cuda: &Cuda,
    device: sys::CUdevice,
    ordinal: u32,
) -> Result<(DeviceInfo, u32), Failure> {
    use sys::CUdevice_attribute as Attribute;
    let attribute = |attribute| {
        let mut value = 0;
        // SAFETY: the device comes from cuDeviceGet; the driver writes one number.
        unsafe { cuda.cuDeviceGetAttribute(&mut value, attribute, device) }?;
        Ok(u32::try_from(value).unwrap_or(0))
    };
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let unified = attribute(Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)? != 0;
    let mut bytes = 0;
    // SAFETY: as above.
    unsafe { cuda.cuDeviceTotalMem_v2(&mut bytes, device) }?;
    // SAFETY: the driver writes a text with its zero into as many bytes as it is told.
    let name = text(|buffer, len| unsafe { cuda.cuDeviceGetName(buffer, len, device) })?;
    // SAFETY: as for the name.
    let bus = text(|buffer, len| unsafe { cuda.cuDeviceGetPCIBusId(buffer, len, device) });
    let capability = major * 10 + minor;
    let mut capabilities = Capabilities::empty();
    capabilities.set(Capabilities::IPC, unified);
    let info = DeviceInfo {
        vendor: Vendor::Cuda,
        ordinal,
        name,
        uuid: uuid(cuda, device)?,
        pci_bus_id: bus.ok().map(|bus| bus.to_ascii_lowercase()),
        architecture: format!("sm_{capability}"),
        memory_bytes: bytes as u64,
        capabilities,
        kernel: String::new(),
    };
    Ok((info, capability))
}

fn text(read: impl FnOnce(*mut c_char, c_int) -> Result<(), Failure>) -> Result<String, Failure> {
    let mut buffer = [0_u8; 256];
    read(buffer.as_mut_ptr().cast(), buffer.len() as c_int)?;
    let text = CStr::from_bytes_until_nul(&buffer).map_or(&buffer[..], CStr::to_bytes);
    Ok(String::from_utf8_lossy(text).into_owned())
}

/// Of a MIG instance its own, not that of the whole GPU.
fn uuid(cuda: &Cuda, device: sys::CUdevice) -> Result<DeviceUuid, Failure> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the device comes from cuDeviceGet; the driver writes 16 bytes.
    unsafe { cuda.cuDeviceGetUuid_v2(&mut uuid, device) }?;
    Ok(DeviceUuid(uuid.bytes.map(|byte| byte as u8)))
}

/// Whether `device` can use host memory that was page-locked where it is.
pub(super) fn reaches_host(cuda: &Cuda, device: sys::CUdevice) -> bool {
    let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED;
    let mut supported = 0;
    // SAFETY: the device comes from cuDeviceGet; the driver writes one number.
    unsafe { cuda.cuDeviceGetAttribute(&mut supported, attribute, device) }.is_ok()
        && supported != 0
}

/// Visible devices whose memory `device` can use.
pub(super) fn peers(
    cuda: &Cuda,
    own: sys::CUdevice,
    count: u32,
) -> Result<Vec<DeviceUuid>, Failure> {
    let mut peers = Vec::new();
    for ordinal in 0..count {
        let other = device(cuda, ordinal)?;
        if other != own && can_access(cuda, own, other) {
            peers.push(uuid(cuda, other)?);
        }
    }
    Ok(peers)
}
