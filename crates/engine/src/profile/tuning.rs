//! How copies run on a device: which of environment, program, profile and default decides.

use std::ops::RangeInclusive;

use kvferry_device::{DeviceInfo, Vendor};
use serde::{Deserialize, Serialize};

use super::{HostLink, Profile};
use crate::config::{
    BATCH_MIN, Config, MAX_GRID_BLOCKS, SMALL_MAX_BYTES, Setting, Source, TILE_BYTES,
};

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
    pub(super) fn knobs(&self) -> [(&'static str, u64, RangeInclusive<u64>); 4] {
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
    use super::*;
    use crate::profile::tests::{VALUES, profile_of, simulated, with};

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
}
