//! What a profile says of a device's way to host memory.

use serde::{Deserialize, Serialize};

use crate::config::MAX_GRID_BLOCKS;

/// What the ways between a GPU and host memory cost, by which
/// [`OffloadMode::Auto`](crate::OffloadMode::Auto) chooses. Only their ratios count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostLink {
    /// Bytes a microsecond of one contiguous DMA.
    pub link: u64,
    /// What a row of a 2-D DMA costs beside its bytes, in nanoseconds.
    pub row_ns: u64,
    /// What a DMA costs the host, in nanoseconds.
    pub call_ns: u64,
    /// Until the first byte of a staged copy is on the link, in nanoseconds.
    pub staging_ns: u64,
    /// Bytes a microsecond of the kernel on host memory.
    pub kernel_link: u64,
    /// Until the kernel's first byte is on the link, in nanoseconds.
    pub launch_ns: u64,
    /// Most blocks of a launch on host memory: the link is full with far fewer bytes under way than
    /// device memory takes, and more warps only take multiprocessors from the model.
    pub grid_blocks: u32,
}

/// Measured on one H200 (2026-11-29, LAB.md: beside decode 64 blocks are quicker than a full grid, and
/// hurt less; 2026-11-30, 81 points of W11). The ratios are much the same wherever a GPU is behind PCIe.
impl Default for HostLink {
    fn default() -> Self {
        Self {
            link: 55_000,
            row_ns: 55,
            call_ns: 2500,
            staging_ns: 25_000,
            kernel_link: 50_000,
            launch_ns: 8000,
            grid_blocks: 64,
        }
    }
}

impl HostLink {
    /// Whether a choice can be made by it.
    pub(super) fn is_sane(&self) -> bool {
        const SECOND: u64 = 1_000_000_000;
        let times = [self.row_ns, self.call_ns, self.staging_ns, self.launch_ns];
        self.link > 0
            && self.kernel_link > 0
            && times.into_iter().all(|time| time < SECOND)
            && MAX_GRID_BLOCKS.contains(&self.grid_blocks.into())
    }
}
