//! What a GPU is, and which others it reaches; asked without making it current.

use std::ffi::{CStr, c_char, c_int};
use std::fs::File;
use std::io::ErrorKind;
use std::mem::offset_of;

use hip_sys as sys;

use super::functions::Failure;
use super::library::Hip;
use crate::device::{Capabilities, DeviceInfo, DeviceUuid, Vendor};
use crate::error::{Error, Result};

/// GPUs that this process sees, at least 1; `asked` is the device that the caller is after.
pub(super) fn count(hip: &Hip, asked: &str) -> Result<u32> {
    let no_device = |reason: String| Error::NoDevice { device: asked.into(), reason };
    // Without a GPU HIP 5 answers with 101 where later ones say 100.
    let failed = |failure| no_device(format!("{}; {}", hip.describe(failure), why_none()));
    // SAFETY: may be called any number of times, from any thread.
    unsafe { hip.hipInit(0) }.map_err(failed)?;
    let mut count = 0;
    // SAFETY: HIP writes one number.
    unsafe { hip.hipGetDeviceCount(&mut count) }.map_err(failed)?;
    match u32::try_from(count) {
        Ok(count) if count > 0 => Ok(count),
        _ => Err(no_device(format!("HIP {} sees no GPU; {}", hip.version, why_none()))),
    }
}

/// The cause that can be seen from here. HIP has one code for all of them.
fn why_none() -> &'static str {
    match File::options().read(true).write(true).open("/dev/kfd") {
        Ok(_) => "do HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES hide it?",
        Err(error) if error.kind() == ErrorKind::NotFound => {
            "there is no /dev/kfd: load the amdgpu kernel driver, or give the container its devices \
             (--device=/dev/kfd --device=/dev/dri)"
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            "this user may not open /dev/kfd: add them to the groups render and video"
        }
        Err(_) => "/dev/kfd cannot be opened: see the kernel's log for what amdgpu says",
    }
}

pub(super) fn device(hip: &Hip, ordinal: u32) -> Result<sys::hipDevice_t, Failure> {
    let mut device = 0;
    // SAFETY: HIP is initialised and writes one number; it refuses an ordinal out of range.
    unsafe { hip.hipDeviceGet(&mut device, ordinal as c_int) }?;
    Ok(device)
}

/// Facts about the device. Its architecture is the whole name, with features, as in
/// `gfx942:sramecc+:xnack-`: code for other features does not load.
pub(super) fn info(
    hip: &Hip,
    device: sys::hipDevice_t,
    ordinal: u32,
) -> Result<DeviceInfo, Failure> {
    let mut bytes = 0;
    // SAFETY: the device comes from hipDeviceGet; HIP writes one number.
    unsafe { hip.hipDeviceTotalMem(&mut bytes, device) }?;
    // SAFETY: HIP writes a text with its zero into as many bytes as it is told.
    let name = text(|buffer, len| unsafe { hip.hipDeviceGetName(buffer, len, device) })?;
    Ok(DeviceInfo {
        vendor: Vendor::Rocm,
        ordinal,
        name,
        uuid: uuid(hip, device)?,
        pci_bus_id: pci_bus_id(hip, device),
        architecture: architecture(hip, device)?,
        memory_bytes: bytes as u64,
        capabilities: Capabilities::IPC,
        kernel: String::new(),
    })
}

fn text(read: impl FnOnce(*mut c_char, c_int) -> Result<(), Failure>) -> Result<String, Failure> {
    let mut buffer = [0_u8; 256];
    read(buffer.as_mut_ptr().cast(), buffer.len() as c_int)?;
    Ok(until_zero(&buffer))
}

fn until_zero(bytes: &[u8]) -> String {
    let text = CStr::from_bytes_until_nul(bytes).map_or(bytes, CStr::to_bytes);
    String::from_utf8_lossy(text).into_owned()
}

fn pci_bus_id(hip: &Hip, device: sys::hipDevice_t) -> Option<String> {
    // SAFETY: HIP writes a text with its zero into as many bytes as it is told.
    let bus = text(|buffer, len| unsafe { hip.hipDeviceGetPCIBusId(buffer, len, device) });
    bus.ok().map(|bus| bus.to_ascii_lowercase())
}

fn architecture(hip: &Hip, device: sys::hipDevice_t) -> Result<String, Failure> {
    let mut properties = [0_u64; sys::DEVICE_PROPERTIES_BYTES / size_of::<u64>()];
    let start = properties.as_mut_ptr();
    // HIP 6 and later have both functions; the older one is for programs built against HIP 5.
    let (asked, offset) = if hip.functions.hipGetDevicePropertiesR0600.is_ok() {
        // SAFETY: HIP writes its structure of 1472 bytes; no version has more than there is room
        // for, and the room is aligned for it.
        let asked = unsafe { hip.hipGetDevicePropertiesR0600(start.cast(), device) };
        (asked, offset_of!(sys::hipDeviceProp_tR0600, gcnArchName))
    } else {
        // SAFETY: as above; 792 bytes.
        let asked = unsafe { hip.hipGetDeviceProperties(start.cast(), device) };
        (asked, sys::ARCHITECTURE_OFFSET_HIP5)
    };
    asked?;
    let bytes: Vec<u8> = properties.iter().flat_map(|word| word.to_ne_bytes()).collect();
    Ok(until_zero(&bytes[offset..offset + 256]))
}

fn uuid(hip: &Hip, device: sys::hipDevice_t) -> Result<DeviceUuid, Failure> {
    let mut uuid = sys::hipUUID { bytes: [0; 16] };
    // SAFETY: the device comes from hipDeviceGet; HIP writes 16 bytes.
    unsafe { hip.hipDeviceGetUuid(&mut uuid, device) }?;
    let bytes = uuid.bytes.map(|byte| byte as u8);
    Ok(identity(bytes, pci_bus_id(hip, device).as_deref()))
}

/// The 16 hexadecimal digits of the GPU's own number. Some GPUs have none and say `XX`, and the
/// parts of a partitioned one may share it: these are told apart by where they are on the bus.
fn identity(uuid: [u8; 16], pci_bus_id: Option<&str>) -> DeviceUuid {
    let numbered = uuid != [0; 16] && !uuid.starts_with(b"XX");
    let part = pci_bus_id.is_some_and(|bus| !bus.ends_with(".0"));
    let place = pci_bus_id.and_then(|bus| format!("pci-{bus}").into_bytes().try_into().ok());
    match place {
        Some(place) if part || !numbered => DeviceUuid(place),
        _ => DeviceUuid(uuid),
    }
}

/// Whether kernels of `device` can be allowed to use memory of `peer`.
pub(super) fn can_access(hip: &Hip, device: sys::hipDevice_t, peer: sys::hipDevice_t) -> bool {
    let mut can = 0;
    // SAFETY: both devices come from hipDeviceGet; HIP writes one number.
    unsafe { hip.hipDeviceCanAccessPeer(&mut can, device, peer) }.is_ok() && can != 0
}

/// Visible devices whose memory `own` can use.
pub(super) fn peers(
    hip: &Hip,
    own: sys::hipDevice_t,
    count: u32,
) -> Result<Vec<DeviceUuid>, Failure> {
    let mut peers = Vec::new();
    for ordinal in 0..count {
        let other = device(hip, ordinal)?;
        if other != own && can_access(hip, own, other) {
            peers.push(uuid(hip, other)?);
        }
    }
    Ok(peers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_without_a_number_of_its_own_is_its_place_on_the_bus() {
        let numbered = *b"4e53d2f1c1e4a5b6";
        let mut unnumbered = [0; 16];
        unnumbered[..2].copy_from_slice(b"XX");
        for (uuid, bus, expected) in [
            (numbered, Some("0000:0f:00.0"), &numbered),
            (numbered, None, &numbered),
            (unnumbered, Some("0000:0f:00.0"), b"pci-0000:0f:00.0"),
            ([0; 16], Some("0001:0f:00.0"), b"pci-0001:0f:00.0"),
            // A part of a partitioned GPU.
            (numbered, Some("0000:0f:00.3"), b"pci-0000:0f:00.3"),
            // No bus of the known form: better the number than nothing.
            (unnumbered, Some("10000:0f:00.0"), &unnumbered),
        ] {
            assert_eq!(identity(uuid, bus), DeviceUuid(*expected), "{uuid:?} {bus:?}");
        }
    }
}
