//! From a device's name to the device.

use std::str::FromStr;
use std::sync::Arc;

use kvferry_device::{Device, Error};

use crate::config::Config;

/// A device by name: `host`, `cuda:N` for the N-th NVIDIA GPU that this process sees, or `rocm:N`
/// for the N-th AMD GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceName {
    /// Host memory.
    Host,
    /// An NVIDIA GPU.
    Cuda(u32),
    /// An AMD GPU.
    Rocm(u32),
}

/// A name that no device can have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a device: expected host, cuda:N or rocm:N")]
pub struct BadDeviceName(String);

impl FromStr for DeviceName {
    type Err = BadDeviceName;

    fn from_str(text: &str) -> Result<Self, BadDeviceName> {
        let bad = || BadDeviceName(text.to_owned());
        let (vendor, ordinal) = match text.split_once(':') {
            None if text == "host" => return Ok(Self::Host),
            Some((vendor, digits)) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
                (vendor, digits.parse().map_err(|_| bad())?)
            }
            _ => return Err(bad()),
        };
        match vendor {
            "cuda" => Ok(Self::Cuda(ordinal)),
            "rocm" => Ok(Self::Rocm(ordinal)),
            _ => Err(bad()),
        }
    }
}

impl std::fmt::Display for DeviceName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Rocm(ordinal) => write!(f, "rocm:{ordinal}"),
        }
    }
}

/// Opens a device with the knobs of `config`. Compiles its copy kernel, or loads it from the
/// cache, so that no transfer pays for it.
///
/// # Errors
/// Why there is no such device; for a vendor that was not built in, how to build it in.
pub fn open_device(name: DeviceName, config: &Config) -> Result<Arc<dyn Device>, Error> {
    match name {
        DeviceName::Host => kvferry_device::host(),
        DeviceName::Cuda(ordinal) => cuda::open(ordinal, config),
        DeviceName::Rocm(ordinal) => rocm::open(ordinal, config),
    }
}

/// Every GPU that this process sees, or why there is none, vendor by vendor.
pub fn visible_gpus(config: &Config) -> Vec<Result<Vec<DeviceName>, Error>> {
    let named = |count: Result<u32, Error>, name: fn(u32) -> DeviceName| {
        count.map(|count| (0..count).map(name).collect())
    };
    vec![named(cuda::count(config), DeviceName::Cuda), named(rocm::count(config), DeviceName::Rocm)]
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::{Arc, Config, Device, Error};
    use kvferry_device::cuda::{self, CudaOptions};

    pub(super) fn count(_config: &Config) -> Result<u32, Error> {
        cuda::count()
    }

    pub(super) fn open(ordinal: u32, config: &Config) -> Result<Arc<dyn Device>, Error> {
        let cache_directory = config.cache_directory.clone();
        cuda::open(ordinal, &CudaOptions { kernel: config.kernel, cache_directory })
    }
}

#[cfg(feature = "rocm")]
mod rocm {
    use super::{Arc, Config, Device, Error};
    use kvferry_device::rocm::{self, RocmOptions};

    fn options(device: String, config: &Config) -> Result<RocmOptions, Error> {
        if config.disable_hip {
            let reason = "MC_DISABLE_HIP is set, to whatever value: unset it".into();
            return Err(Error::NoDevice { device, reason });
        }
        Ok(RocmOptions {
            kernel: config.kernel,
            cache_directory: config.cache_directory.clone(),
            library_directories: config.rocm_directories.clone(),
        })
    }

    pub(super) fn count(config: &Config) -> Result<u32, Error> {
        rocm::count(&options("rocm".into(), config)?)
    }

    pub(super) fn open(ordinal: u32, config: &Config) -> Result<Arc<dyn Device>, Error> {
        rocm::open(ordinal, &options(format!("rocm:{ordinal}"), config)?)
    }
}

#[cfg(not(feature = "cuda"))]
mod cuda {
    use super::{Arc, Config, Device, Error, not_built};

    pub(super) fn count(_config: &Config) -> Result<u32, Error> {
        Err(not_built("cuda".into(), "NVIDIA", "cuda"))
    }

    pub(super) fn open(ordinal: u32, _config: &Config) -> Result<Arc<dyn Device>, Error> {
        Err(not_built(format!("cuda:{ordinal}"), "NVIDIA", "cuda"))
    }
}

#[cfg(not(feature = "rocm"))]
mod rocm {
    use super::{Arc, Config, Device, Error, not_built};

    pub(super) fn count(_config: &Config) -> Result<u32, Error> {
        Err(not_built("rocm".into(), "AMD", "rocm"))
    }

    pub(super) fn open(ordinal: u32, _config: &Config) -> Result<Arc<dyn Device>, Error> {
        Err(not_built(format!("rocm:{ordinal}"), "AMD", "rocm"))
    }
}

#[cfg(not(all(feature = "cuda", feature = "rocm")))]
fn not_built(device: String, vendor: &str, feature: &str) -> Error {
    let reason =
        format!("kvferry was built without {vendor} support; build it with --features {feature}");
    Error::NoDevice { device, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_name_is_read_or_refused_quoting_it() {
        assert_eq!("host".parse(), Ok(DeviceName::Host));
        for (name, device) in [("cuda:3", DeviceName::Cuda(3)), ("rocm:0", DeviceName::Rocm(0))] {
            assert_eq!((name.parse(), device.to_string()), (Ok(device), name.to_owned()));
        }
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
            "rocm",
            "rocm:",
            "rocm:0:1",
            "hip:0",
        ] {
            assert_eq!(DeviceName::from_str(bad), Err(BadDeviceName(bad.into())), "{bad}");
        }
    }
}
