//! The configuration: a field for every knob, and by what each is read. Names, defaults and accepted
//! forms are in the table, `knobs.rs`; what a profile of a device may set instead of a default is in
//! `profile.rs`.
//!
//! A value that is absent means the default. A value that is present and wrong is an error that
//! names the knob, the value and the accepted form; a silent default would hide the mistake.

mod knobs;
mod reader;

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tracing::level_filters::LevelFilter;

pub use self::knobs::{KNOBS, Knob};
use self::reader::{CACHE, Reader, on_or_off, seconds, sized, within};
pub use self::reader::{KnobError, Setting, Source};
use crate::request::OffloadMode;

/// What kvferry lets an operator change.
#[derive(Clone, Debug)]
pub struct Config {
    /// Fewer small pieces than this are copied one DMA each. `MC_KVFERRY_BATCH_MIN`.
    pub batch_min: usize,
    /// Bytes up to which a piece counts as small, after merging. `MC_KVFERRY_SMALL_MAX_BYTES`.
    pub small_max_bytes: u64,
    /// Bytes of a piece that one warp copies. `MC_KVFERRY_TILE_BYTES`.
    pub tile_bytes: u64,
    /// Most blocks of one kernel launch. `MC_KVFERRY_MAX_GRID_BLOCKS`.
    pub max_grid_blocks: u32,
    /// When overlapping destinations are looked for. `MC_KVFERRY_OVERLAP_CHECK`.
    pub overlap_check: OverlapCheck,
    /// Streams per device. `MC_KVFERRY_STREAMS`.
    pub streams: usize,
    /// Copy streams run before the model's own. `MC_KVFERRY_STREAM_PRIORITY`.
    pub high_priority: bool,
    /// Use the copy kernel where there is one. `MC_KVFERRY_KERNEL`.
    pub kernel: bool,
    /// Refuse batches that would go a slower way: without the copy kernel that should take them, or
    /// over TCP without staging. `MC_KVFERRY_STRICT`.
    pub strict: bool,
    /// Every pair of devices proves itself before traffic uses it. `MC_KVFERRY_PROOF`.
    pub proof: bool,
    /// Most mappings of peers' allocations that are kept open while idle.
    /// `MC_KVFERRY_MAX_MAPPINGS`.
    pub max_mappings: usize,
    /// Without progress for this long a device counts as lost. `MC_KVFERRY_STALL_TIMEOUT_SEC`.
    pub stall_timeout: Duration,
    /// How long unregistering waits for batches. `MC_KVFERRY_UNREGISTER_TIMEOUT_SEC`.
    pub unregister_timeout: Duration,
    /// How bytes go from a GPU to host memory, where a submission does not say.
    /// `MC_KVFERRY_OFFLOAD_STORE`.
    pub offload_store: OffloadMode,
    /// How bytes go from host memory to a GPU, where a submission does not say.
    /// `MC_KVFERRY_OFFLOAD_LOAD`.
    pub offload_load: OffloadMode,
    /// What is chosen where neither says. `MC_KVFERRY_POLICY`.
    pub policy: Policy,
    /// By how many percent transfers may lengthen the model's slowest steps, its p99, under
    /// [`Policy::Tail`]. `MC_KVFERRY_TAIL_BUDGET_PERCENT`.
    pub tail_budget_percent: u32,
    /// Most bytes a second that the transfers of one device move on this host; `None` for no limit.
    /// `MC_KVFERRY_MAX_RATE`.
    pub max_rate: Option<u64>,
    /// Device memory that staged copies of one device pass through, in bytes, half of it for each
    /// direction. `MC_KVFERRY_OFFLOAD_BOUNCE_MB`.
    pub offload_bounce_bytes: u64,
    /// Bytes of a staged or paced copy that are one step. `MC_KVFERRY_OFFLOAD_CHUNK_BYTES`.
    pub offload_chunk_bytes: u64,
    /// Most bytes of host memory that are page-locked for transfers, page stores and TCP's staging
    /// slots; `None` for three quarters of this machine's memory. `MC_KVFERRY_PINNED_MB`.
    pub pinned_bytes: Option<u64>,
    /// Serve and use Mooncake's TCP transport, which knows no authentication; undecided,
    /// [`Config::serves_mooncake`] decides. `MC_KVFERRY_MOONCAKE`.
    pub mooncake: Option<bool>,
    /// Newest version of Mooncake's TCP framing that transfers begun here speak. `MC_TCP_PROTO`.
    pub tcp_proto: u32,
    /// Where compiled kernels and profiles of devices are kept; `None` keeps none.
    /// `MC_KVFERRY_CACHE_DIR`.
    pub cache_directory: Option<PathBuf>,
    /// Use no AMD GPU. `MC_DISABLE_HIP`.
    pub disable_hip: bool,
    /// In the place of `batch_min` for AMD GPUs, if that is not in the environment.
    /// `MC_HIP_BATCH_COPY_MIN`.
    pub hip_batch_copy_min: Option<usize>,
    /// Folders of ROCm's libraries, looked into after all places that the loader knows: that of
    /// ROCm's own variable `ROCM_PATH`, and the one where AMD's packages install.
    pub rocm_directories: Vec<PathBuf>,
    /// Use TCP for peers that could be reached through mappings, too. `MC_FORCE_TCP`.
    pub force_tcp: bool,
    /// Connections to one peer. `MC_TCP_LANES_PER_PEER`.
    pub tcp_lanes: usize,
    /// Most bytes that one lane stages and sends at a time. `MC_TCP_SLICE_SIZE`.
    pub tcp_slice_bytes: u64,
    /// A peer that makes no progress for this long counts as gone. `MC_TCP_STATUS_TIMEOUT_SEC`.
    pub tcp_status_timeout: Duration,
    /// Stage GPU memory in pinned host memory. `MC_TCP_GPU_STAGING`.
    pub tcp_staging: bool,
    /// Bytes of a staging slot. `MC_TCP_GPU_STAGING_SLOT_MB`.
    pub tcp_staging_slot_bytes: u64,
    /// Staging slots of one device. `MC_TCP_GPU_STAGING_SLOTS`.
    pub tcp_staging_slots: usize,
    /// Threads that serve all sockets. `MC_KVFERRY_TCP_THREADS`.
    pub tcp_threads: usize,
    /// Want checksums of all payload. `MC_KVFERRY_TCP_CHECKSUMS`.
    pub tcp_checksums: bool,
    /// Holds the key that both ends of a lane must have. `MC_KVFERRY_AUTH_KEY_FILE`.
    pub auth_key_file: Option<PathBuf>,
    /// Batches are ranges on the time line of NVIDIA's tools; `None` for none. `MC_KVFERRY_NVTX`.
    pub nvtx: Option<NvtxLibrary>,
    /// What the shared library writes to standard error. `MC_KVFERRY_LOG`.
    pub log: LevelFilter,
    settings: Vec<Setting>,
}

// What knobs accept that a profile may set, too.
pub(crate) const BATCH_MIN: RangeInclusive<u64> = 1..=1_000_000;
pub(crate) const SMALL_MAX_BYTES: RangeInclusive<u64> = 0..=16 << 30;
pub(crate) const TILE_BYTES: RangeInclusive<u64> = 256..=1 << 30;
pub(crate) const MAX_GRID_BLOCKS: RangeInclusive<u64> = 1..=65_535;

/// When lists are checked for destinations that overlap. Bounds are always checked before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverlapCheck {
    /// Before anything moves for forms and for lists of up to [`Self::FEW`] ranges, where it costs a
    /// few microseconds; beside the copies for longer lists.
    Auto,
    /// Before anything moves: such a list is refused.
    Before,
    /// While the copies run: such a batch ends as failed, and what it wrote is undefined, inside
    /// its own destinations.
    Beside,
    /// Never: bytes that two pieces write are undefined.
    Off,
}

impl OverlapCheck {
    /// Ranges of the longest list that [`Self::Auto`] checks before its copies start.
    pub const FEW: usize = 2048;

    /// Whether so many ranges are checked before their copies start.
    pub(crate) fn is_before(self, ranges: usize) -> bool {
        match self {
            Self::Auto => ranges <= Self::FEW,
            Self::Before => true,
            Self::Beside | Self::Off => false,
        }
    }

    fn parse(text: &str) -> Option<Self> {
        match text {
            "auto" => Some(Self::Auto),
            "before" => Some(Self::Before),
            "beside" => Some(Self::Beside),
            "off" => Some(Self::Off),
            _ => None,
        }
    }
}

/// What matters more where host offload runs beside a model: the transfers or the model's steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The quickest way for the shape.
    Throughput,
    /// The quickest way that leaves the multiprocessors to the model but for moments.
    Balanced,
    /// As much as the budget for the model's slowest steps allows ([`crate::Engine::record_step`]).
    Tail,
    /// DMA alone.
    Strict,
}

impl Policy {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "throughput" => Some(Self::Throughput),
            "balanced" => Some(Self::Balanced),
            "tail" => Some(Self::Tail),
            "strict" => Some(Self::Strict),
            _ => None,
        }
    }
}

/// Which NVTX library shows batches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NvtxLibrary {
    /// The one that the loader finds.
    Found,
    /// This one.
    At(PathBuf),
}

impl Config {
    /// Reads the process's environment; unknown `MC_KVFERRY_*` names are warned about.
    ///
    /// # Errors
    /// The first knob whose value is not accepted.
    pub fn from_env() -> Result<Self, KnobError> {
        Self::warn_of_unknown_names();
        Self::from_lookup(|name| std::env::var_os(name))
    }

    /// Reads knobs through `lookup`.
    ///
    /// # Errors
    /// The first knob whose value is not accepted.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, KnobError> {
        let mut reader = Reader::new(&lookup);
        Ok(Self {
            batch_min: reader.read("MC_KVFERRY_BATCH_MIN", within(BATCH_MIN))? as usize,
            small_max_bytes: reader.read("MC_KVFERRY_SMALL_MAX_BYTES", sized(SMALL_MAX_BYTES))?,
            tile_bytes: reader.read("MC_KVFERRY_TILE_BYTES", sized(TILE_BYTES))?,
            max_grid_blocks: reader.read("MC_KVFERRY_MAX_GRID_BLOCKS", within(MAX_GRID_BLOCKS))?
                as u32,
            overlap_check: reader.read("MC_KVFERRY_OVERLAP_CHECK", OverlapCheck::parse)?,
            streams: reader.read("MC_KVFERRY_STREAMS", within(1..=64))? as usize,
            high_priority: reader.read("MC_KVFERRY_STREAM_PRIORITY", |text| match text {
                "high" => Some(true),
                "normal" => Some(false),
                _ => None,
            })?,
            kernel: reader.read("MC_KVFERRY_KERNEL", on_or_off)?,
            strict: reader.read("MC_KVFERRY_STRICT", on_or_off)?,
            proof: reader.read("MC_KVFERRY_PROOF", on_or_off)?,
            max_mappings: reader.read("MC_KVFERRY_MAX_MAPPINGS", within(1..=1_000_000))? as usize,
            stall_timeout: reader.read("MC_KVFERRY_STALL_TIMEOUT_SEC", seconds(1))?,
            unregister_timeout: reader.read("MC_KVFERRY_UNREGISTER_TIMEOUT_SEC", seconds(0))?,
            offload_store: reader.read("MC_KVFERRY_OFFLOAD_STORE", |text| text.parse().ok())?,
            offload_load: reader.read("MC_KVFERRY_OFFLOAD_LOAD", |text| text.parse().ok())?,
            policy: reader.read("MC_KVFERRY_POLICY", Policy::parse)?,
            tail_budget_percent: reader.read("MC_KVFERRY_TAIL_BUDGET_PERCENT", within(1..=1000))?
                as u32,
            max_rate: reader.read("MC_KVFERRY_MAX_RATE", |text| match text {
                "off" => Some(None),
                text => sized(1 << 10..=1 << 40)(text).map(Some),
            })?,
            offload_bounce_bytes: reader.read("MC_KVFERRY_OFFLOAD_BOUNCE_MB", within(1..=4096))?
                << 20,
            offload_chunk_bytes: reader
                .read("MC_KVFERRY_OFFLOAD_CHUNK_BYTES", sized(64 << 10..=1 << 30))?,
            pinned_bytes: reader
                .read_if_set("MC_KVFERRY_PINNED_MB", within(1..=1 << 24))?
                .map(|megabytes| megabytes << 20),
            mooncake: reader.read_if_set("MC_KVFERRY_MOONCAKE", on_or_off)?,
            tcp_proto: reader.read("MC_TCP_PROTO", within(1..=2))? as u32,
            cache_directory: reader.cache_directory()?,
            disable_hip: reader.read_if_set("MC_DISABLE_HIP", |_| Some(()))?.is_some(),
            hip_batch_copy_min: reader
                .read_if_set("MC_HIP_BATCH_COPY_MIN", within(BATCH_MIN))?
                .map(|least| least as usize),
            rocm_directories: rocm_directories(&lookup),
            force_tcp: reader.read_if_set("MC_FORCE_TCP", |_| Some(()))?.is_some(),
            tcp_lanes: reader.read("MC_TCP_LANES_PER_PEER", within(1..=64))? as usize,
            tcp_slice_bytes: reader.read("MC_TCP_SLICE_SIZE", sized(4 << 10..=64 << 20))?,
            tcp_status_timeout: reader.read("MC_TCP_STATUS_TIMEOUT_SEC", seconds(1))?,
            tcp_staging: reader.read("MC_TCP_GPU_STAGING", on_or_off)?,
            tcp_staging_slot_bytes: reader.read("MC_TCP_GPU_STAGING_SLOT_MB", within(1..=1024))?
                << 20,
            tcp_staging_slots: reader.read("MC_TCP_GPU_STAGING_SLOTS", within(1..=256))? as usize,
            tcp_threads: reader.read("MC_KVFERRY_TCP_THREADS", within(1..=64))? as usize,
            tcp_checksums: reader.read("MC_KVFERRY_TCP_CHECKSUMS", on_or_off)?,
            auth_key_file: reader.read_if_set("MC_KVFERRY_AUTH_KEY_FILE", |text| {
                Some(PathBuf::from(text)).filter(|path| path.is_absolute())
            })?,
            nvtx: reader.read("MC_KVFERRY_NVTX", |text| match text {
                "off" | "0" => Some(None),
                "on" | "1" => Some(Some(NvtxLibrary::Found)),
                path => Path::new(path).is_absolute().then(|| Some(NvtxLibrary::At(path.into()))),
            })?,
            log: reader.read("MC_KVFERRY_LOG", |text| match text {
                "off" | "error" | "warn" | "info" | "debug" | "trace" => text.parse().ok(),
                _ => None,
            })?,
            settings: reader.into_settings(),
        })
    }

    /// Every knob's value and where it came from, before profiles of devices.
    pub fn settings(&self) -> &[Setting] {
        &self.settings
    }

    /// Whether Mooncake's TCP transport is served and used: as decided, else if there is no key,
    /// which that transport would go around.
    pub fn serves_mooncake(&self) -> bool {
        self.mooncake.unwrap_or(self.auth_key_file.is_none())
    }

    /// Whether the environment sets the knob.
    pub(crate) fn is_in_environment(&self, name: &str) -> bool {
        let mut settings = self.settings.iter();
        settings.any(|setting| setting.name == name && setting.source == Source::Environment)
    }

    /// Who set a knob that has no default.
    pub(crate) fn source(&self, name: &str) -> Source {
        match self.is_in_environment(name) {
            true => Source::Environment,
            false => Source::Program,
        }
    }
}

impl Default for Config {
    /// All defaults; nothing is kept on disk, and no profile is read.
    fn default() -> Self {
        Self::from_lookup(|name| (name == CACHE).then(|| "off".into()))
            .expect("every default is accepted")
    }
}

fn rocm_directories(lookup: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let given = lookup("ROCM_PATH").map(PathBuf::from).filter(|path| path.is_absolute());
    let folders = given.into_iter().chain([PathBuf::from("/opt/rocm")]);
    folders.map(|folder| folder.join("lib")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &str, value: &str) -> Result<Config, KnobError> {
        Config::from_lookup(|asked| (asked == name).then(|| value.into()))
    }

    #[test]
    fn defaults_are_the_ones_the_table_states() {
        let config = Config::default();
        assert_eq!(config.batch_min, 2);
        assert_eq!(config.small_max_bytes, 4 << 20);
        assert_eq!(config.streams, 3);
        assert!(config.kernel && config.high_priority && config.proof && !config.strict);
        assert_eq!((config.mooncake, config.serves_mooncake()), (None, true));
        assert_eq!(config.max_mappings, 4096);
        let names: Vec<_> = config.settings().iter().map(|setting| setting.name).collect();
        assert_eq!(names, KNOBS.iter().map(|knob| knob.name).collect::<Vec<_>>());
    }

    /// FAILURES.md B47.
    #[test]
    fn every_knob_refuses_garbage_and_names_itself_the_value_and_the_accepted_form() {
        let presence = ["MC_DISABLE_HIP", "MC_FORCE_TCP"];
        for knob in KNOBS.iter().filter(|knob| !presence.contains(&knob.name)) {
            for garbage in [
                "",
                " ",
                "abc",
                "-1",
                "1.5",
                "8080junk",
                "18446744073709551616",
                "64Q",
                "+5",
                "\u{fffd}",
            ] {
                let error =
                    with(knob.name, garbage).expect_err(&format!("{} took {garbage:?}", knob.name));
                assert_eq!(
                    error,
                    KnobError { name: knob.name, value: garbage.into(), accepts: knob.accepts }
                );
            }
        }
    }

    #[test]
    fn a_value_that_is_not_text_is_refused() {
        use std::os::unix::ffi::OsStringExt;
        let lookup = |asked: &str| {
            (asked == "MC_KVFERRY_STREAMS").then(|| OsString::from_vec(vec![b'4', 0xff]))
        };
        assert_eq!(Config::from_lookup(lookup).expect_err("not UTF-8").name, "MC_KVFERRY_STREAMS");
    }

    #[test]
    fn sizes_take_binary_suffixes_and_limits_hold() {
        assert_eq!(
            with("MC_KVFERRY_SMALL_MAX_BYTES", "256K").map(|c| c.small_max_bytes),
            Ok(256 << 10)
        );
        assert_eq!(
            with("MC_KVFERRY_SMALL_MAX_BYTES", " 16G ").map(|c| c.small_max_bytes),
            Ok(16 << 30)
        );
        assert!(with("MC_KVFERRY_SMALL_MAX_BYTES", "17G").is_err());
        assert!(with("MC_KVFERRY_STREAMS", "0").is_err());
        assert!(with("MC_KVFERRY_MAX_MAPPINGS", "0").is_err());
        assert!(with("MC_KVFERRY_MAX_GRID_BLOCKS", "65536").is_err());
    }

    #[test]
    fn off_means_off_whatever_the_spelling() {
        for off in ["off", "0"] {
            assert_eq!(with("MC_KVFERRY_KERNEL", off).map(|config| config.kernel), Ok(false));
            assert_eq!(with("MC_KVFERRY_PROOF", off).map(|config| config.proof), Ok(false));
            assert_eq!(
                with("MC_KVFERRY_MOONCAKE", off).map(|config| config.mooncake),
                Ok(Some(false))
            );
            assert_eq!(with(CACHE, off).map(|config| config.cache_directory), Ok(None));
        }
    }

    #[test]
    fn a_key_closes_the_framing_that_knows_none_unless_the_user_opens_it() {
        let key = ("MC_KVFERRY_AUTH_KEY_FILE", "/key");
        let serves = |knobs: &[(&str, &str)]| {
            let lookup = |asked: &str| {
                knobs.iter().find(|(name, _)| *name == asked).map(|(_, value)| value.into())
            };
            Config::from_lookup(lookup).expect("good knobs").serves_mooncake()
        };
        assert!(!serves(&[key]));
        assert!(serves(&[key, ("MC_KVFERRY_MOONCAKE", "on")]));
        assert!(serves(&[("MC_KVFERRY_MOONCAKE", "on")]));
        assert!(!serves(&[("MC_KVFERRY_MOONCAKE", "off")]));
    }

    #[test]
    fn amd_gpus_are_disabled_by_any_value_and_found_where_rocm_says() {
        assert!(!Config::default().disable_hip);
        for any in ["1", "0", ""] {
            assert_eq!(with("MC_DISABLE_HIP", any).map(|config| config.disable_hip), Ok(true));
        }
        let directories = |value: &str| with("ROCM_PATH", value).map(|c| c.rocm_directories);
        let standard = PathBuf::from("/opt/rocm/lib");
        assert_eq!(
            directories("/opt/rocm-7.2"),
            Ok(vec!["/opt/rocm-7.2/lib".into(), standard.clone()])
        );
        assert_eq!(directories("rocm"), Ok(vec![standard]));
    }
}
