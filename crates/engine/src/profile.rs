//! Profiles of devices: what `kvferry doctor --calibrate` measured, kept for later processes.
//!
//! A profile only makes copies faster. Whatever is wrong with it means defaults and a line that
//! says why, never an error. It counts only if nobody but this user can have written it.

mod host_link;
mod tuning;

use std::path::{Path, PathBuf};

use kvferry_device::{DeviceInfo, private_file};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

pub use self::host_link::HostLink;
pub use self::tuning::{Tuning, Values};
use crate::calibrate::Sample;
use crate::config::Config;

/// The folder of profiles in the cache folder.
const FOLDER: &str = "profiles";

/// Far above any real profile (about 60 KB); bounds what is read.
const MAX_BYTES: u64 = 4 << 20;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What was measured on a device, and the values that follow from it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// When, in UTC: `2026-11-29T12:00:00Z`.
    pub date: String,
    /// The device's product name.
    pub name: String,
    /// The device's identity.
    pub uuid: String,
    /// The device's compiler target.
    pub architecture: String,
    /// What follows.
    pub values: Values,
    /// And for host memory; none on the processor.
    pub host_link: Option<HostLink>,
    /// What was measured.
    pub samples: Vec<Sample>,
}

/// A profile as it is kept.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    /// Of kvferry. Another version may measure, or use the values, in another way.
    kvferry: String,
    /// Of the version and the profile: a file that was cut short or altered does not match.
    digest: String,
    profile: serde_json::Value,
}

/// A profile that is there and not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the profile {} of {device} is not used: {fault}; `kvferry doctor --calibrate --device {device}` makes a new one",
    path.display()
)]
pub struct ProfileError {
    /// The device.
    pub device: String,
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub fault: ProfileFault,
}

/// What is wrong with a profile.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileFault {
    /// The file cannot be read or written, or others may write it.
    #[error("{0}")]
    File(String),
    /// It is no profile.
    #[error("it is not a profile ({0})")]
    Garbage(String),
    /// Another version of kvferry made it.
    #[error("kvferry {0} made it, and this is {VERSION}")]
    Version(String),
    /// It is not as it was written.
    #[error("it was altered: its digest does not match")]
    Digest,
    /// It is another device's.
    #[error("it is of device {0}")]
    Device(String),
    /// The device is not what it was.
    #[error("it is of architecture {profile:?}, and the device is {device:?}")]
    Architecture {
        /// The profile's.
        profile: String,
        /// The device's.
        device: String,
    },
    /// A value that its knob would not accept.
    #[error("its {name} is {value}, and only {low} to {high} is accepted")]
    OutOfRange {
        /// The knob.
        name: &'static str,
        /// The profile's value.
        value: u64,
        /// Least that is accepted.
        low: u64,
        /// Most that is accepted.
        high: u64,
    },
}

impl Profile {
    /// Reads the device's profile from the cache folder; `None` if there is none.
    ///
    /// # Errors
    /// Why a profile that is there is not used.
    pub fn load(config: &Config, info: &DeviceInfo) -> Result<Option<Self>, ProfileError> {
        let Some((folder, name)) = place(config, info) else { return Ok(None) };
        let bytes = match private_file::read(&folder, &name, MAX_BYTES) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                return Err(unused(info, &folder, &name, ProfileFault::File(error.to_string())));
            }
        };
        let profile = Self::decode(&bytes, info);
        profile.map(Some).map_err(|fault| unused(info, &folder, &name, fault))
    }

    /// Keeps the profile for later processes, in place of an older one; returns the file, or
    /// `None` where the configuration keeps none.
    ///
    /// # Errors
    /// The system's, for the file.
    pub fn store(
        &self,
        config: &Config,
        info: &DeviceInfo,
    ) -> Result<Option<PathBuf>, ProfileError> {
        let Some((folder, name)) = place(config, info) else { return Ok(None) };
        let stored = private_file::replace(&folder, &name, &[self.encode().as_bytes(), b"\n"]);
        stored
            .map_err(|error| unused(info, &folder, &name, ProfileFault::File(error.to_string())))?;
        Ok(Some(folder.join(name)))
    }

    fn encode(&self) -> String {
        let profile = serde_json::to_value(self).expect("it is made of numbers and text");
        let digest = digest(VERSION, &profile);
        let kept = Kept { kvferry: VERSION.to_owned(), digest, profile };
        serde_json::to_string_pretty(&kept).expect("it is made of numbers and text")
    }

    fn decode(bytes: &[u8], info: &DeviceInfo) -> Result<Self, ProfileFault> {
        let garbage = |error: serde_json::Error| ProfileFault::Garbage(error.to_string());
        let Kept { kvferry, digest: kept, profile } =
            serde_json::from_slice(bytes).map_err(garbage)?;
        if kvferry != VERSION {
            return Err(ProfileFault::Version(kvferry));
        }
        if kept != digest(&kvferry, &profile) {
            return Err(ProfileFault::Digest);
        }
        let profile: Self = serde_json::from_value(profile).map_err(garbage)?;
        if profile.uuid != info.uuid.to_string() {
            return Err(ProfileFault::Device(profile.uuid));
        }
        if profile.architecture != info.architecture {
            let device = info.architecture.clone();
            return Err(ProfileFault::Architecture { profile: profile.architecture, device });
        }
        if profile.host_link.is_some_and(|link| !link.is_sane()) {
            return Err(ProfileFault::Garbage("costs of host memory that no device has".into()));
        }
        for (name, value, accepted) in profile.values.knobs() {
            if !accepted.contains(&value) {
                let (low, high) = accepted.into_inner();
                return Err(ProfileFault::OutOfRange { name, value, low, high });
            }
        }
        Ok(profile)
    }
}

/// The folder and the file of a device's profile.
fn place(config: &Config, info: &DeviceInfo) -> Option<(PathBuf, String)> {
    let folder = config.cache_directory.as_ref()?.join(FOLDER);
    Some((folder, format!("{}.json", info.uuid)))
}

fn unused(info: &DeviceInfo, folder: &Path, name: &str, fault: ProfileFault) -> ProfileError {
    ProfileError { device: info.to_string(), path: folder.join(name), fault }
}

/// Of values, not of text: how a file is indented does not matter.
fn digest(version: &str, profile: &serde_json::Value) -> String {
    let digest = Sha256::new().chain_update(version).chain_update([0]);
    let digest = digest.chain_update(profile.to_string()).finalize();
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use kvferry_device::Device;
    use kvferry_device::sim::{SimOptions, sim};

    use super::*;

    pub(super) const VALUES: Values = Values {
        batch_min: 3,
        small_max_bytes: 2 << 20,
        tile_bytes: 32 << 10,
        max_grid_blocks: 96,
    };

    pub(super) fn with(folder: &Path, knobs: &[(&str, &str)]) -> Config {
        Config::from_lookup(|asked| match asked {
            "MC_KVFERRY_CACHE_DIR" => Some(folder.into()),
            _ => knobs.iter().find(|(name, _)| *name == asked).map(|(_, value)| value.into()),
        })
        .expect("good knobs")
    }

    pub(super) fn simulated(ordinal: u32) -> std::sync::Arc<dyn Device> {
        sim(&SimOptions { ordinal, ..SimOptions::default() }).expect("always there").0
    }

    pub(super) fn profile_of(info: &DeviceInfo) -> Profile {
        Profile {
            date: "2026-11-29T12:00:00Z".into(),
            name: info.name.clone(),
            uuid: info.uuid.to_string(),
            architecture: info.architecture.clone(),
            values: VALUES,
            host_link: None,
            samples: Vec::new(),
        }
    }

    fn fault(config: &Config, info: &DeviceInfo) -> Option<ProfileFault> {
        Profile::load(config, info).err().map(|error| error.fault)
    }

    #[test]
    fn a_profile_is_read_back_for_its_device_and_only_from_a_folder_of_this_user() {
        let folder = tempfile::tempdir().expect("a folder");
        let (one, other) = (simulated(0), simulated(1));
        let config = with(folder.path(), &[]);
        let profile = profile_of(one.info());
        let file = profile.store(&config, one.info()).expect("stores").expect("kept");
        assert_eq!(Profile::load(&config, one.info()), Ok(Some(profile)));
        assert_eq!(Profile::load(&config, other.info()), Ok(None));
        assert_eq!(fs::metadata(&file).expect("there").permissions().mode() & 0o077, 0);
        assert_eq!(
            fs::metadata(file.parent().expect("a folder")).expect("there").permissions().mode()
                & 0o777,
            0o700
        );

        let renamed = file.with_file_name(format!("{}.json", other.info().uuid));
        fs::rename(&file, &renamed).expect("renames");
        assert_eq!(
            fault(&config, other.info()),
            Some(ProfileFault::Device(one.info().uuid.to_string()))
        );
        fs::set_permissions(&renamed, fs::Permissions::from_mode(0o622)).expect("ours");
        let writable = fault(&config, other.info());
        assert_eq!(writable, Some(ProfileFault::File("others may write to it".into())));
        assert_eq!(Profile::load(&Config::default(), one.info()), Ok(None), "no cache folder");
    }

    #[test]
    fn a_file_that_was_cut_short_or_altered_is_not_used() {
        let device = simulated(0);
        let whole = profile_of(device.info()).encode();
        assert!(Profile::decode(whole.as_bytes(), device.info()).is_ok());
        for len in 0..whole.len() {
            let cut = Profile::decode(&whole.as_bytes()[..len], device.info());
            assert!(matches!(cut, Err(ProfileFault::Garbage(_))), "{len} bytes: {cut:?}");
        }
        for at in 0..whole.len() {
            let mut altered = whole.clone().into_bytes();
            altered[at] ^= 1;
            // A changed blank between tokens is the only change that changes nothing.
            if !whole.as_bytes()[at].is_ascii_whitespace() {
                assert!(Profile::decode(&altered, device.info()).is_err(), "byte {at} altered");
            }
        }
        let larger = whole.replace("\"max_grid_blocks\": 96", "\"max_grid_blocks\": 97");
        assert_eq!(Profile::decode(larger.as_bytes(), device.info()), Err(ProfileFault::Digest));
        assert!(matches!(
            Profile::decode(b"\xff\xfe garbage", device.info()),
            Err(ProfileFault::Garbage(_))
        ));
    }

    #[test]
    fn a_profile_of_another_version_or_architecture_or_with_impossible_values_says_so() {
        let device = simulated(0);
        let good = profile_of(device.info());
        let older =
            good.encode().replace(&format!("\"kvferry\": \"{VERSION}\""), "\"kvferry\": \"0.0.1\"");
        assert_eq!(
            Profile::decode(older.as_bytes(), device.info()),
            Err(ProfileFault::Version("0.0.1".into()))
        );
        let foreign = Profile { architecture: "sm_80".into(), ..good.clone() };
        assert_eq!(
            Profile::decode(foreign.encode().as_bytes(), device.info()),
            Err(ProfileFault::Architecture { profile: "sm_80".into(), device: "sim".into() })
        );
        for (values, name, value) in [
            (Values { batch_min: 0, ..VALUES }, "MC_KVFERRY_BATCH_MIN", 0),
            (Values { batch_min: u64::MAX, ..VALUES }, "MC_KVFERRY_BATCH_MIN", u64::MAX),
            (
                Values { small_max_bytes: (16 << 30) + 1, ..VALUES },
                "MC_KVFERRY_SMALL_MAX_BYTES",
                (16 << 30) + 1,
            ),
            (Values { tile_bytes: 255, ..VALUES }, "MC_KVFERRY_TILE_BYTES", 255),
            (Values { max_grid_blocks: 65_536, ..VALUES }, "MC_KVFERRY_MAX_GRID_BLOCKS", 65_536),
        ] {
            let refused = Profile::decode(
                Profile { values, ..good.clone() }.encode().as_bytes(),
                device.info(),
            );
            let Err(ProfileFault::OutOfRange { name: named, value: wrong, .. }) = refused else {
                panic!("{values:?} was taken: {refused:?}");
            };
            assert_eq!((named, wrong), (name, value));
        }
        for host_link in [
            HostLink { link: 0, ..HostLink::default() },
            HostLink { call_ns: u64::MAX, ..HostLink::default() },
            HostLink { grid_blocks: 0, ..HostLink::default() },
        ] {
            let profile = Profile { host_link: Some(host_link), ..good.clone() };
            let refused = Profile::decode(profile.encode().as_bytes(), device.info());
            assert!(matches!(refused, Err(ProfileFault::Garbage(_))), "{refused:?}");
        }
    }
}
