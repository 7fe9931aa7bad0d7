//! Every knob: its type, default, and what it accepts, in one place. What a profile of a device may
//! set instead of a default is in `profile.rs`.
//!
//! A value that is absent means the default. A value that is present and wrong is an error that
//! names the knob, the value and the accepted form; a silent default would hide the mistake.

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tracing::level_filters::LevelFilter;

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
    /// Most bytes of host memory that are page-locked for transfers and page stores; `None` for
    /// three quarters of this machine's memory. `MC_KVFERRY_PINNED_MB`.
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
    /// Before anything moves: such a list is refused.
    Before,
    /// While the copies run: such a batch ends as failed, and what it wrote is undefined, inside
    /// its own destinations.
    Beside,
    /// Never: bytes that two pieces write are undefined.
    Off,
}

impl OverlapCheck {
    fn parse(text: &str) -> Option<Self> {
        match text {
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

/// What is known of a knob before its value.
#[derive(Clone, Copy, Debug)]
pub struct Knob {
    /// The environment variable.
    pub name: &'static str,
    /// The value without it.
    pub default: &'static str,
    /// What it accepts.
    pub accepts: &'static str,
    /// What it changes.
    pub about: &'static str,
}

/// All knobs, in the order of [`Config`]'s fields.
pub const KNOBS: &[Knob] = &[
    Knob {
        name: "MC_KVFERRY_BATCH_MIN",
        default: "2",
        accepts: "1 to 1000000",
        about: "fewer small pieces than this are copied one DMA each",
    },
    Knob {
        name: "MC_KVFERRY_SMALL_MAX_BYTES",
        default: "4M",
        accepts: "0 to 16G bytes (suffixes K, M, G)",
        about: "pieces up to this size go to the copy kernel, larger ones to DMA",
    },
    Knob {
        name: "MC_KVFERRY_TILE_BYTES",
        default: "16K",
        accepts: "256 to 1G bytes (suffixes K, M, G)",
        about: "bytes that one warp copies; longer pieces are split",
    },
    Knob {
        name: "MC_KVFERRY_MAX_GRID_BLOCKS",
        default: "528",
        accepts: "1 to 65535",
        about: "most thread blocks of one kernel launch",
    },
    Knob {
        name: "MC_KVFERRY_OVERLAP_CHECK",
        default: "before",
        accepts: "before, beside or off",
        about: "before refuses overlapping destinations; beside fails such a batch while it runs, 2 to 5 ns a piece sooner; off leaves their bytes undefined",
    },
    Knob {
        name: "MC_KVFERRY_STREAMS",
        default: "4",
        accepts: "1 to 64",
        about: "streams per device that copies are spread over",
    },
    Knob {
        name: "MC_KVFERRY_STREAM_PRIORITY",
        default: "high",
        accepts: "high or normal",
        about: "priority of the copy streams beside the model's own",
    },
    Knob {
        name: "MC_KVFERRY_KERNEL",
        default: "on",
        accepts: "on or off (1 or 0)",
        about: "off copies everything by DMA",
    },
    Knob {
        name: "MC_KVFERRY_STRICT",
        default: "0",
        accepts: "1 or 0 (on or off)",
        about: "1 refuses a batch that would go a slower way, by DMA for lack of a copy kernel or over TCP without staging; 0 lets it and says so once",
    },
    Knob {
        name: "MC_KVFERRY_PROOF",
        default: "on",
        accepts: "on or off (1 or 0)",
        about: "a pair of devices moves test patterns between two processes before traffic uses it; off trusts the driver",
    },
    // A sixteenth of the mappings that Linux allows a process by default (vm.max_map_count), and
    // more than 64 peers with 60 layers each: below the working set every transfer would map again.
    Knob {
        name: "MC_KVFERRY_MAX_MAPPINGS",
        default: "4096",
        accepts: "1 to 1000000",
        about: "most mappings of peers' allocations that are kept open between batches",
    },
    Knob {
        name: "MC_KVFERRY_STALL_TIMEOUT_SEC",
        default: "30",
        accepts: "1 to 86400 seconds",
        about: "a device that makes no progress for this long counts as lost",
    },
    Knob {
        name: "MC_KVFERRY_UNREGISTER_TIMEOUT_SEC",
        default: "30",
        accepts: "0 to 86400 seconds",
        about: "how long unregistering a region waits for batches that use it",
    },
    Knob {
        name: "MC_KVFERRY_OFFLOAD_STORE",
        default: "auto",
        accepts: "auto, direct, kernel or staged",
        about: "how bytes go from a GPU to host memory; auto leaves it to the policy",
    },
    Knob {
        name: "MC_KVFERRY_OFFLOAD_LOAD",
        default: "auto",
        accepts: "auto, direct, kernel or staged",
        about: "how bytes go from host memory to a GPU; auto leaves it to the policy",
    },
    Knob {
        name: "MC_KVFERRY_POLICY",
        default: "balanced",
        accepts: "throughput, balanced, tail or strict",
        about: "what host offload beside a model favours: throughput, both, the model's slowest steps within a budget, or DMA alone",
    },
    Knob {
        name: "MC_KVFERRY_TAIL_BUDGET_PERCENT",
        default: "5",
        accepts: "1 to 1000",
        about: "by how much host offload may lengthen the model's p99 step under MC_KVFERRY_POLICY=tail",
    },
    Knob {
        name: "MC_KVFERRY_MAX_RATE",
        default: "off",
        accepts: "1K to 1024G bytes a second (suffixes K, M, G), or off",
        about: "most bytes a second that the transfers of one device move on this host",
    },
    Knob {
        name: "MC_KVFERRY_OFFLOAD_BOUNCE_MB",
        default: "256",
        accepts: "1 to 4096 MiB",
        about: "device memory that staged host offload of one device passes through, half for each direction",
    },
    Knob {
        name: "MC_KVFERRY_OFFLOAD_CHUNK_BYTES",
        default: "64M",
        accepts: "64K to 1G bytes (suffixes K, M, G)",
        about: "bytes of a staged or paced copy that are one step",
    },
    Knob {
        name: "MC_KVFERRY_PINNED_MB",
        default: UNSET,
        accepts: "1 to 16777216 MiB",
        about: "most host memory that is page-locked for transfers and page stores; unset, three quarters of this machine's memory",
    },
    Knob {
        name: "MC_KVFERRY_MOONCAKE",
        default: UNSET,
        accepts: "on or off (1 or 0)",
        about: "off refuses Mooncake's TCP framing, by which whoever reaches the port reads and writes registered memory; unset, it is on unless MC_KVFERRY_AUTH_KEY_FILE is set",
    },
    Knob {
        name: "MC_TCP_PROTO",
        default: "2",
        accepts: "1 or 2",
        about: "newest version of Mooncake's TCP framing that transfers begun here speak",
    },
    Knob {
        name: "MC_KVFERRY_CACHE_DIR",
        default: "$XDG_CACHE_HOME/kvferry or $HOME/.cache/kvferry",
        accepts: "an absolute path, or off",
        about: "where compiled kernels and profiles of devices are kept between runs",
    },
    // Mooncake's names, for those of its knobs that mean the same here.
    Knob {
        name: "MC_DISABLE_HIP",
        default: UNSET,
        accepts: "anything: that it is set is what counts",
        about: "set, no AMD GPU is used",
    },
    Knob {
        name: "MC_HIP_BATCH_COPY_MIN",
        default: UNSET,
        accepts: "1 to 1000000",
        about: "MC_KVFERRY_BATCH_MIN for AMD GPUs, where that is not set",
    },
    Knob {
        name: "MC_FORCE_TCP",
        default: UNSET,
        accepts: "anything: that it is set is what counts",
        about: "set, peers on this host are reached by TCP, too",
    },
    Knob {
        name: "MC_TCP_LANES_PER_PEER",
        default: "4",
        accepts: "1 to 64",
        about: "connections to one peer that share its transfers",
    },
    Knob {
        name: "MC_TCP_SLICE_SIZE",
        default: "2M",
        accepts: "4K to 64M bytes (suffixes K, M, G)",
        about: "bytes that one lane stages and sends at a time; slots are cut into slices of this",
    },
    Knob {
        name: "MC_TCP_STATUS_TIMEOUT_SEC",
        default: "10",
        accepts: "1 to 86400 seconds",
        about: "a peer that makes no progress over TCP for this long counts as gone",
    },
    Knob {
        name: "MC_TCP_GPU_STAGING",
        default: "1",
        accepts: "1 or 0 (on or off)",
        about: "0 copies GPU memory for TCP piece by piece through pageable memory",
    },
    Knob {
        name: "MC_TCP_GPU_STAGING_SLOT_MB",
        default: "16",
        accepts: "1 to 1024 MiB",
        about: "size of a pinned staging slot; each has as much GPU memory beside it",
    },
    Knob {
        name: "MC_TCP_GPU_STAGING_SLOTS",
        default: "8",
        accepts: "1 to 256",
        about: "pinned staging slots of one device; half send, half receive",
    },
    Knob {
        name: "MC_KVFERRY_TCP_THREADS",
        default: "8",
        accepts: "1 to 64",
        about: "threads that serve the sockets of an engine that uses TCP",
    },
    Knob {
        name: "MC_KVFERRY_TCP_CHECKSUMS",
        default: "0",
        accepts: "1 or 0 (on or off)",
        about: "1 wants a checksum of every slice that goes over TCP",
    },
    Knob {
        name: "MC_KVFERRY_AUTH_KEY_FILE",
        default: UNSET,
        accepts: "an absolute path",
        about: "a file of mode 0600 with the key that both ends of a TCP lane must have",
    },
    Knob {
        name: "MC_KVFERRY_NVTX",
        default: "off",
        accepts: "on, off, or the absolute path of libnvtx3interop.so.1",
        about: "on shows each batch as a range on the time line of NVIDIA's tools, such as Nsight Systems",
    },
    Knob {
        name: "MC_KVFERRY_LOG",
        default: "warn",
        accepts: "off, error, warn, info, debug or trace",
        about: "what the shared library writes to standard error, unless the process has a subscriber of tracing's; the command has KVFERRY_LOG",
    },
];

/// What is shown for a knob that has no value of its own.
const UNSET: &str = "unset";

/// A knob's value and where it came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The environment variable.
    pub name: &'static str,
    /// The value in force.
    pub value: String,
    /// Where it came from.
    pub source: Source,
}

/// Where a knob's value came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Nobody set it.
    Default,
    /// The environment variable of that name.
    Environment,
    /// A profile of the device, which `kvferry doctor --calibrate` made.
    Profile,
    /// The program that runs the engine: a field of [`Config`] that it changed.
    Program,
}

/// A knob with a value that it does not accept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}={value:?} is not accepted: expected {accepts}")]
pub struct KnobError {
    /// The environment variable.
    pub name: &'static str,
    /// Its value.
    pub value: String,
    /// What it accepts.
    pub accepts: &'static str,
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
        let mut reader = Reader { lookup: &lookup, settings: Vec::with_capacity(KNOBS.len()) };
        let within = |range: RangeInclusive<u64>| {
            move |text: &str| number(text).filter(|n| range.contains(n))
        };
        let sized =
            |range: RangeInclusive<u64>| move |text: &str| size(text).filter(|n| range.contains(n));
        let seconds =
            |low: u64| move |text: &str| within(low..=86_400)(text).map(Duration::from_secs);
        Ok(Self {
            batch_min: reader.read("MC_KVFERRY_BATCH_MIN", within(BATCH_MIN))? as usize,
            small_max_bytes: reader.read("MC_KVFERRY_SMALL_MAX_BYTES", sized(SMALL_MAX_BYTES))?,
            tile_bytes: reader.read("MC_KVFERRY_TILE_BYTES", sized(TILE_BYTES))?,
            max_grid_blocks: reader.read("MC_KVFERRY_MAX_GRID_BLOCKS", within(MAX_GRID_BLOCKS))?
                as u32,
            overlap_check: reader.read("MC_KVFERRY_OVERLAP_CHECK", OverlapCheck::parse)?,
            streams: reader.read("MC_KVFERRY_STREAMS", within(1..=64))? as usize,
            high_priority: reader
                .read("MC_KVFERRY_STREAM_PRIORITY", choice(&["high"], &["normal"]))?,
            kernel: reader.read("MC_KVFERRY_KERNEL", choice(&["on", "1"], &["off", "0"]))?,
            strict: reader.read("MC_KVFERRY_STRICT", choice(&["1", "on"], &["0", "off"]))?,
            proof: reader.read("MC_KVFERRY_PROOF", choice(&["on", "1"], &["off", "0"]))?,
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
            mooncake: reader
                .read_if_set("MC_KVFERRY_MOONCAKE", choice(&["on", "1"], &["off", "0"]))?,
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
            tcp_staging: reader.read("MC_TCP_GPU_STAGING", choice(&["1", "on"], &["0", "off"]))?,
            tcp_staging_slot_bytes: reader.read("MC_TCP_GPU_STAGING_SLOT_MB", within(1..=1024))?
                << 20,
            tcp_staging_slots: reader.read("MC_TCP_GPU_STAGING_SLOTS", within(1..=256))? as usize,
            tcp_threads: reader.read("MC_KVFERRY_TCP_THREADS", within(1..=64))? as usize,
            tcp_checksums: reader
                .read("MC_KVFERRY_TCP_CHECKSUMS", choice(&["1", "on"], &["0", "off"]))?,
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
            settings: reader.settings,
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

const CACHE: &str = "MC_KVFERRY_CACHE_DIR";

struct Reader<'a> {
    lookup: &'a dyn Fn(&str) -> Option<OsString>,
    settings: Vec<Setting>,
}

impl Reader<'_> {
    fn read<T>(
        &mut self,
        name: &'static str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<T, KnobError> {
        let knob = knob(name);
        let (text, source) = match (self.lookup)(name) {
            Some(value) => (value.to_string_lossy().into_owned(), Source::Environment),
            None => (knob.default.to_owned(), Source::Default),
        };
        let parsed = parse(text.trim());
        self.settings.push(Setting { name, value: text.trim().to_owned(), source });
        parsed.ok_or(KnobError { name, value: text, accepts: knob.accepts })
    }

    /// As [`Self::read`], for a knob without a default.
    fn read_if_set<T>(
        &mut self,
        name: &'static str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, KnobError> {
        if (self.lookup)(name).is_some() {
            return self.read(name, parse).map(Some);
        }
        self.settings.push(Setting { name, value: UNSET.to_owned(), source: Source::Default });
        Ok(None)
    }

    fn cache_directory(&mut self) -> Result<Option<PathBuf>, KnobError> {
        if let Some(value) = (self.lookup)(CACHE) {
            let path = PathBuf::from(&value);
            let shown = value.to_string_lossy().into_owned();
            let off = matches!(shown.trim(), "off" | "0");
            if !off && !path.is_absolute() {
                return Err(KnobError { name: CACHE, value: shown, accepts: knob(CACHE).accepts });
            }
            self.settings.push(Setting { name: CACHE, value: shown, source: Source::Environment });
            return Ok((!off).then_some(path));
        }
        let absolute =
            |name: &str| (self.lookup)(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let base = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
        let path = base.map(|base| base.join("kvferry"));
        let value = path.as_ref().map_or("off".into(), |path| path.display().to_string());
        self.settings.push(Setting { name: CACHE, value, source: Source::Default });
        Ok(path)
    }
}

fn rocm_directories(lookup: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let given = lookup("ROCM_PATH").map(PathBuf::from).filter(|path| path.is_absolute());
    let folders = given.into_iter().chain([PathBuf::from("/opt/rocm")]);
    folders.map(|folder| folder.join("lib")).collect()
}

fn knob(name: &str) -> &'static Knob {
    KNOBS.iter().find(|knob| knob.name == name).expect("every field's knob is in the table")
}

fn number(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// Bytes, with an optional binary suffix.
fn size(text: &str) -> Option<u64> {
    let suffixes = [("K", 10), ("M", 20), ("G", 30)];
    let (digits, shift) = suffixes
        .into_iter()
        .find_map(|(suffix, shift)| Some((text.strip_suffix(suffix)?, shift)))
        .unwrap_or((text, 0));
    number(digits)?.checked_mul(1 << shift)
}

fn choice(yes: &'static [&str], no: &'static [&str]) -> impl Fn(&str) -> Option<bool> {
    |text| match text {
        text if yes.contains(&text) => Some(true),
        text if no.contains(&text) => Some(false),
        _ => None,
    }
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
        assert_eq!(config.streams, 4);
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
