//! The ways to move bytes that are compared beside a decoder: a mode, and knobs that make it what
//! studies of the matter call by these names.

use kvferry_engine::OffloadMode;

/// One way.
#[derive(Clone, Debug)]
pub(super) struct Contender {
    pub(super) name: &'static str,
    pub(super) mode: OffloadMode,
    knobs: &'static [(&'static str, &'static str)],
    /// Only so many pieces at a time, the next when they have landed.
    pub(super) chunk_pieces: Option<usize>,
}

const GRID: &str = "MC_KVFERRY_MAX_GRID_BLOCKS";
const POLICY: &str = "MC_KVFERRY_POLICY";

/// All of them, in the order of the table.
const CONTENDERS: [Contender; 6] = [
    contender("direct", OffloadMode::Direct, &[]),
    // More blocks than are resident at once: nothing bounds the kernel.
    contender("kernel full", OffloadMode::Kernel, &[(GRID, "65535")]),
    contender("kernel bounded", OffloadMode::Kernel, &[(GRID, "64")]),
    Contender {
        chunk_pieces: Some(2048),
        ..contender("chunked", OffloadMode::Kernel, &[(GRID, "64")])
    },
    contender("staged", OffloadMode::Staged, &[]),
    contender("auto", OffloadMode::Auto, &[(POLICY, "tail")]),
];

const fn contender(
    name: &'static str,
    mode: OffloadMode,
    knobs: &'static [(&'static str, &'static str)],
) -> Contender {
    Contender { name, mode, knobs, chunk_pieces: None }
}

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

    /// The same and the chunks, to read.
    pub(super) fn knobs_text(&self) -> String {
        let mut words: Vec<_> =
            self.knobs().iter().map(|(name, value)| format!("{name}={value}")).collect();
        words.extend(self.chunk_pieces.map(|pieces| format!("{pieces} pieces at a time")));
        words.join(" ")
    }
}
