//! Profiles of devices: what `kvferry doctor --calibrate` measured, kept for later processes, and
//! which of environment, profile and default decides how copies run on a device.
//!
//! A profile only makes copies faster. Whatever is wrong with it means defaults and a line that
//! says why, never an error. It counts only if nobody but this user can have written it.

mod host_link;

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use kvferry_device::{DeviceInfo, Vendor, private_file};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

pub use self::host_link::HostLink;
use crate::calibrate::Sample;
use crate::config::{
    BATCH_MIN, Config, MAX_GRID_BLOCKS, SMALL_MAX_BYTES, Setting, Source, TILE_BYTES,
};

/// The folder of profiles in the cache folder.
const FOLDER: &str = "profiles";

/// Far above any real profile (about 60 KB); bounds what is read.
const MAX_BYTES: u64 = 4 << 20;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The knobs that depend on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Values {
    /// Fewer small pieces than this are copied one DMA each. `MC_KVFERRY_BATCH_MIN`.
    pub batch_min: u64,
    /// Bytes up to which a piece counts as small. `MC_KVFERRY_SMALL_MAX_BYTES`.
    pub small_max_bytes: u64,
    /// Bytes of a piece that one warp copies. `MC_KVFERRY_TILE_BYTES`.
    pub tile_bytes: u64,
    /// Most blocks of one kernel launch. `MC_KVFERRY_MAX_GRID_BLOCKS`.
    pub max_grid_blocks: u32,
}

impl Values {
    /// Those of a configuration, whatever the device.
    pub fn of(config: &Config) -> Self {
        Self {
            batch_min: config.batch_min as u64,
            small_max_bytes: config.small_max_bytes,
            tile_bytes: config.tile_bytes,
            max_grid_blocks: config.max_grid_blocks,
        }
    }

    /// What is good for devices of an architecture, as far as it is known before anything was
    /// measured: the defaults, which an H200 gave, but for AMD's. Those were chosen from what AMD
    /// publishes, without such a GPU at hand; `kvferry doctor --calibrate` measures better ones.
    ///
    /// The bound of a launch is one block, 4 waves, for each compute unit of the largest GPU of the
    /// kind: 110 for MI250X (one of its two), 304 for MI300X, 256 for MI355X. That is 4 MiB and
    /// more under way at a time, several times what all XGMI links of a GPU together hold, and it
    /// leaves most places for waves to the model. The defaults' bound is four blocks for each
    /// multiprocessor, which holds as many bytes, as waves are twice as wide.
    ///
    /// On MI200 a copy by DMA between two GPUs takes one engine that was made for PCIe, and gets
    /// about 50 GB/s where the links between them carry up to four times that; the kernel uses the
    /// links whole. So pieces stay with the kernel up to four times the usual size.
    fn usual(architecture: &str) -> Self {
        let defaults = Self::of(&Config::default());
        match architecture.split(':').next() {
            Some("gfx90a") => Self { max_grid_blocks: 110, small_max_bytes: 16 << 20, ..defaults },
            Some("gfx942") => Self { max_grid_blocks: 304, ..defaults },
            Some("gfx950") => Self { max_grid_blocks: 256, ..defaults },
            _ => defaults,
        }
    }

    /// Each by the name of its knob, with what the knob accepts.
    fn knobs(&self) -> [(&'static str, u64, RangeInclusive<u64>); 4] {
        [
            ("MC_KVFERRY_BATCH_MIN", self.batch_min, BATCH_MIN),
            ("MC_KVFERRY_SMALL_MAX_BYTES", self.small_max_bytes, SMALL_MAX_BYTES),
            ("MC_KVFERRY_TILE_BYTES", self.tile_bytes, TILE_BYTES),
            ("MC_KVFERRY_MAX_GRID_BLOCKS", u64::from(self.max_grid_blocks), MAX_GRID_BLOCKS),
        ]
    }
}

const HIP_BATCH_MIN: &str = "MC_HIP_BATCH_COPY_MIN";

/// What Mooncake's knob says in the place of the one named, if it is one of an AMD GPU's.
fn hip_batch_min(config: &Config, info: &DeviceInfo, name: &str) -> Option<u64> {
    let asked = info.vendor == Vendor::Rocm && name == "MC_KVFERRY_BATCH_MIN";
    config.hip_batch_copy_min.filter(|_| asked).map(|least| least as u64)
}

/// How copies run on one device, and why so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// The values in force.
    pub values: Values,
    /// What the ways to host memory cost: the profile's, or those of an H200.
    pub host_link: HostLink,
    settings: Vec<Setting>,
}

impl Tuning {
    /// What the environment or the program set; else what the profile says, if there is one; else
    /// what is usual for such a device.
    pub fn new(config: &Config, info: &DeviceInfo, profile: Option<&Profile>) -> Self {
        let configured = Values::of(config).knobs();
        let defaults = Values::of(&Config::default()).knobs();
        let usual = Values::usual(&info.architecture).knobs();
        let measured = profile.map(|profile| profile.values.knobs());
        let mut chosen = [0; 4];
        let mut settings = Vec::with_capacity(chosen.len());
        for (at, place) in chosen.iter_mut().enumerate() {
            let (name, configured, _) = configured[at];
            let setting = if config.is_in_environment(name) {
                (name, configured, Source::Environment)
            } else if configured != defaults[at].1 {
                (name, configured, Source::Program)
            } else if let Some(least) = hip_batch_min(config, info, name) {
                (HIP_BATCH_MIN, least, config.source(HIP_BATCH_MIN))
            } else if let Some(measured) = &measured {
                (name, measured[at].1, Source::Profile)
            } else {
                (name, usual[at].1, Source::Default)
            };
            let (name, value, source) = setting;
            *place = value;
            let in_bytes = name.ends_with("_BYTES");
            let value = if in_bytes { shown_bytes(value) } else { value.to_string() };
            settings.push(Setting { name, value, source });
        }
        let [batch_min, small_max_bytes, tile_bytes, grid] = chosen;
        let max_grid_blocks =
            u32::try_from(grid).expect("it was the u32 of a configuration or a profile");
        Self {
            values: Values { batch_min, small_max_bytes, tile_bytes, max_grid_blocks },
            host_link: profile.and_then(|profile| profile.host_link).unwrap_or_default(),
            settings,
        }
    }

    /// Of a device, with its profile. A profile that is not usable is warned about.
    pub(crate) fn of_device(config: &Config, info: &DeviceInfo) -> Self {
        let profile = Profile::load(config, info).unwrap_or_else(|error| {
            tracing::warn!("{error}");
            None
        });
        Self::new(config, info, profile.as_ref())
    }

    /// Each value and where it came from.
    pub fn settings(&self) -> &[Setting] {
        &self.settings
    }
}

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

/// Bytes as the knobs take them.
fn shown_bytes(bytes: u64) -> String {
    let suffixes = [("G", 30), ("M", 20), ("K", 10)];
    let whole = |&(_, shift): &(&str, u32)| bytes > 0 && bytes.is_multiple_of(1 << shift);
    match suffixes.into_iter().find(whole) {
        Some((suffix, shift)) => format!("{}{suffix}", bytes >> shift),
        None => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use kvferry_device::Device;
    use kvferry_device::sim::{SimOptions, sim};

    use super::*;

    const VALUES: Values = Values {
        batch_min: 3,
        small_max_bytes: 2 << 20,
        tile_bytes: 32 << 10,
        max_grid_blocks: 96,
    };

    fn with(folder: &Path, knobs: &[(&str, &str)]) -> Config {
        Config::from_lookup(|asked| match asked {
            "MC_KVFERRY_CACHE_DIR" => Some(folder.into()),
            _ => knobs.iter().find(|(name, _)| *name == asked).map(|(_, value)| value.into()),
        })
        .expect("good knobs")
    }

    fn simulated(ordinal: u32) -> std::sync::Arc<dyn Device> {
        sim(&SimOptions { ordinal, ..SimOptions::default() }).expect("always there").0
    }

    fn profile_of(info: &DeviceInfo) -> Profile {
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
    fn environment_goes_before_program_before_profile_before_default() {
        let folder = tempfile::tempdir().expect("a folder");
        let device = simulated(0);
        let profile = profile_of(device.info());
        let sources = |tuning: &Tuning| -> Vec<_> {
            tuning.settings().iter().map(|s| (s.value.clone(), s.source)).collect()
        };
        let shown = |value: &str, source| (value.to_owned(), source);

        let config = with(folder.path(), &[]);
        let none = Tuning::of_device(&config, device.info());
        assert_eq!(none.values, Values::of(&Config::default()));
        let defaults = ["2", "4M", "16K", "528"].map(|value| shown(value, Source::Default));
        assert_eq!(sources(&none), defaults);

        profile.store(&config, device.info()).expect("stores");
        let all = Tuning::of_device(&config, device.info());
        assert_eq!(all.values, VALUES);
        assert_eq!(sources(&all), ["3", "2M", "32K", "96"].map(|v| shown(v, Source::Profile)));

        // A knob in the environment wins also where it says what the default is.
        let knobs = [("MC_KVFERRY_TILE_BYTES", "16K"), ("MC_KVFERRY_MAX_GRID_BLOCKS", "7")];
        let mut config = with(folder.path(), &knobs);
        config.batch_min = 5;
        let some = Tuning::of_device(&config, device.info());
        let expected = [
            shown("5", Source::Program),
            shown("2M", Source::Profile),
            shown("16K", Source::Environment),
            shown("7", Source::Environment),
        ];
        assert_eq!(sources(&some), expected);
        assert_eq!(
            some.values,
            Values { batch_min: 5, tile_bytes: 16 << 10, max_grid_blocks: 7, ..VALUES }
        );
    }

    #[test]
    fn amd_gpus_have_defaults_of_their_own_and_take_mooncakes_knob() {
        let info = |architecture: &str| DeviceInfo {
            vendor: Vendor::Rocm,
            architecture: architecture.into(),
            ..simulated(0).info().clone()
        };
        let folder = tempfile::tempdir().expect("a folder");
        let tuned = |architecture, knobs: &[(&str, &str)]| {
            Tuning::new(&with(folder.path(), knobs), &info(architecture), None)
        };
        let of = |architecture| tuned(architecture, &[]).values;
        let defaults = Values::of(&Config::default());
        assert_eq!(of("gfx942:sramecc+:xnack-"), Values { max_grid_blocks: 304, ..defaults });
        assert_eq!(of("gfx950"), Values { max_grid_blocks: 256, ..defaults });
        assert_eq!(
            of("gfx90a:sramecc+:xnack-"),
            Values { max_grid_blocks: 110, small_max_bytes: 16 << 20, ..defaults }
        );
        assert_eq!(of("gfx1100"), defaults);

        let mooncake = ("MC_HIP_BATCH_COPY_MIN", "9");
        let both = [mooncake, ("MC_KVFERRY_BATCH_MIN", "2")];
        let first = |tuning: &Tuning| tuning.settings()[0].clone();
        let set = |name, value: &str, source| Setting { name, value: value.to_owned(), source };
        assert_eq!(
            first(&tuned("gfx942", &[mooncake])),
            set("MC_HIP_BATCH_COPY_MIN", "9", Source::Environment)
        );
        assert_eq!(
            first(&tuned("gfx942", &both)),
            set("MC_KVFERRY_BATCH_MIN", "2", Source::Environment)
        );
        let elsewhere = Tuning::new(&with(folder.path(), &[mooncake]), simulated(0).info(), None);
        assert_eq!(first(&elsewhere), set("MC_KVFERRY_BATCH_MIN", "2", Source::Default));
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
