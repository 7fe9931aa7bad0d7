//! From a device's name to the device.

use std::str::FromStr;
use std::sync::Arc;

use kvferry_device::{Device, Error};

use crate::config::Config;

/// A device by name: `host`, or `cuda:N` for the N-th NVIDIA GPU that this process sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceName {
    /// Host memory.
    Host,
    /// An NVIDIA GPU.
    Cuda(u32),
}

/// A name that no device can have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a device: expected host or cuda:N")]
pub struct BadDeviceName(String);

impl FromStr for DeviceName {
    type Err = BadDeviceName;

    fn from_str(text: &str) -> Result<Self, BadDeviceName> {
        let bad = || BadDeviceName(text.to_owned());
        match text.split_once(':') {
            None if text == "host" => Ok(Self::Host),
            Some(("cuda", ordinal)) if ordinal.bytes().all(|byte| byte.is_ascii_digit()) => {
                ordinal.parse().map(Self::Cuda).map_err(|_| bad())
            }
            _ => Err(bad()),
        }
    }
}

impl std::fmt::Display for DeviceName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// Opens a device with the knobs of `config`. Compiles its copy kernel, or loads it from the
/// cache, so that no transfer pays for it.
///
/// # Errors
/// Why there is no such device; for a vendor that was not built in, how to build it in.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "only GPUs have knobs"))]
pub fn open_device(name: DeviceName, config: &Config) -> Result<Arc<dyn Device>, Error> {
    match name {
        DeviceName::Host => kvferry_device::host(),
        #[cfg(feature = "cuda")]
        DeviceName::Cuda(ordinal) => {
            use kvferry_device::cuda::{CudaOptions, open};
            let cache_directory = config.cache_directory.clone();
            open(ordinal, &CudaOptions { kernel: config.kernel, cache_directory })
        }
        #[cfg(not(feature = "cuda"))]
        DeviceName::Cuda(_) => {
            Err(Error::NoDevice { device: name.to_string(), reason: NOT_BUILT.into() })
        }
    }
}

/// Every GPU that this process sees, or why there is none, vendor by vendor.
pub fn visible_gpus() -> Vec<Result<Vec<DeviceName>, Error>> {
    #[cfg(feature = "cuda")]
    let cuda =
        kvferry_device::cuda::count().map(|count| (0..count).map(DeviceName::Cuda).collect());
    #[cfg(not(feature = "cuda"))]
    let cuda = Err(Error::NoDevice { device: "cuda".into(), reason: NOT_BUILT.into() });
    vec![cuda]
}

#[cfg(not(feature = "cuda"))]
const NOT_BUILT: &str = "kvferry was built without NVIDIA support; build it with --features cuda";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_name_is_read_or_refused_quoting_it() {
        assert_eq!("host".parse(), Ok(DeviceName::Host));
        assert_eq!("cuda:3".parse(), Ok(DeviceName::Cuda(3)));
        for bad in [
            "",
            "host:0",
            "cuda",
            "cuda:",
            "cuda:-1",
            "cuda:1x",
            "cuda:+1",
            "cuda:4294967296",
            "gpu:0",
            "CUDA:0",
        ] {
            assert_eq!(DeviceName::from_str(bad), Err(BadDeviceName(bad.into())), "{bad}");
        }
    }
}
