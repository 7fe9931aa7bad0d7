//! The table of knobs: names, defaults, accepted forms and what each changes. docs/knobs.md and
//! `kvferry doctor` are made from it.

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

/// All knobs, in the order of [`Config`](super::Config)'s fields.
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
        default: "auto",
        accepts: "auto, before, beside or off",
        about: "overlapping destinations: before refuses them; beside fails such a batch while it runs, and lets its copies begin 2 to 5 ns a range sooner; auto is before for forms and up to 2048 ranges, else beside; off leaves their bytes undefined",
    },
    Knob {
        name: "MC_KVFERRY_STREAMS",
        default: "3",
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
        about: "1 refuses a batch that would go a slower way: by DMA for lack of a copy kernel, by the kernel for lack of a staging buffer, over TCP for lack of a mapping or without staging; 0 lets it and says so once",
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
        about: "how long unregistering a region, or dropping the engine, waits for whoever uses it",
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
        about: "most bytes a second that the transfers of one device move within this host; TCP has no limit",
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
        about: "most host memory that is page-locked for transfers, page stores and TCP's staging slots; unset, three quarters of this machine's memory",
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
pub(super) const UNSET: &str = "unset";

pub(super) fn knob(name: &str) -> &'static Knob {
    KNOBS.iter().find(|knob| knob.name == name).expect("every field's knob is in the table")
}
