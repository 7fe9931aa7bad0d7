//! The ways to move bytes that are compared beside a decoder: a mode, and knobs that make it what
//! studies of the matter call by these names.

use kvferry_engine::OffloadMode;

/// One way.
#[derive(Clone, Debug)]
pub(super) struct Contender {
    pub(super) name: &'static str,
    pub(super) mode: OffloadMode,
    knobs: &'static [(&'static str, &'static str)],
}

const GRID: &str = "MC_KVFERRY_MAX_GRID_BLOCKS";
const CHUNK: &str = "MC_KVFERRY_OFFLOAD_CHUNK_BYTES";
const POLICY: &str = "MC_KVFERRY_POLICY";

/// All of them, in the order of the table.
const CONTENDERS: [Contender; 6] = [
    Contender { name: "direct", mode: OffloadMode::Direct, knobs: &[] },
    // More blocks than are resident at once: nothing bounds the kernel.
    Contender {
        name: "kernel full",
        mode: OffloadMode::Kernel,
        knobs: &[(GRID, "65535"), (POLICY, "throughput")],
    },
    Contender {
        name: "kernel bounded",
        mode: OffloadMode::Kernel,
        knobs: &[(GRID, "64"), (POLICY, "throughput")],
    },
    // 2048 pieces of 4 KiB, and the next when they have landed (LAB.md).
    Contender {
        name: "chunked",
        mode: OffloadMode::Kernel,
        knobs: &[(GRID, "64"), (CHUNK, "8M"), (POLICY, "tail")],
    },
    Contender { name: "staged", mode: OffloadMode::Staged, knobs: &[] },
    Contender { name: "auto", mode: OffloadMode::Auto, knobs: &[(POLICY, "tail")] },
];

/// Those of the modes asked for.
pub(super) fn of_modes(modes: &[OffloadMode]) -> Vec<Contender> {
    CONTENDERS.iter().filter(|contender| modes.contains(&contender.mode)).cloned().collect()
}

impl Contender {
    /// What its engine has in the place of defaults. Of `auto`, what the environment says goes
    /// first: it is the one that a user would tune.
    pub(super) fn knobs(&self) -> Vec<(&'static str, &'static str)> {
        let own = |(name, _): &&(&str, &str)| {
            self.mode != OffloadMode::Auto || std::env::var_os(name).is_none()
        };
        self.knobs.iter().filter(own).copied().collect()
    }

    /// The same, to read.
    pub(super) fn knobs_text(&self) -> String {
        let knobs = self.knobs();
        knobs.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
    }
}
