//! What a caller chooses of a page store.

use std::fmt::{self, Display};
use std::time::Duration;

use super::{PageShape, StoreError, memory};
use crate::request::OffloadMode;

/// Names a stored page: the caller's own number, such as a hash of the tokens that the page is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageKey(pub u128);

impl Display for PageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// What a page-out does where as many bytes as may be are on their way, or where memory comes free
/// when copies end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    /// Fails at once.
    Refuse,
    /// Waits for copies to end, so long at most, and then fails.
    Wait(Duration),
}

/// How a store is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreOptions {
    /// Bytes of host memory for pages; what does not make a whole page is not used.
    pub budget_bytes: u64,
    /// Most bytes on their way to host memory at once; one call alone may have more.
    pub in_flight_bytes: u64,
    /// What happens beyond that.
    pub when_full: WhenFull,
    /// Most neighbouring pages that are stored as one group, a power of two up to 64. The memory of
    /// a group is free again when all of its pages are forgotten. `None` for what makes rows of
    /// 32 KiB, and 8 at most.
    pub longest_group: Option<u32>,
    /// Bytes of one piece of host memory, which is locked by one call: at most 64 GiB.
    pub piece_bytes: u64,
    /// How pages are copied. [`OffloadMode::Direct`] leaves clearing to DMA, too.
    pub offload: OffloadMode,
}

impl StoreOptions {
    /// So many bytes of host memory, and everything else as it is by default: 256 MiB in flight,
    /// beyond it a second of waiting.
    pub fn with_budget(budget_bytes: u64) -> Self {
        Self {
            budget_bytes,
            in_flight_bytes: 256 << 20,
            when_full: WhenFull::Wait(Duration::from_secs(1)),
            longest_group: None,
            piece_bytes: memory::MOST_PIECE,
            offload: OffloadMode::Auto,
        }
    }

    /// The binary logarithm of the longest group.
    pub(super) fn longest_group(&self, shape: &PageShape) -> Result<u32, StoreError> {
        const ROW: u64 = 32 << 10;
        const MOST: u32 = 64;
        let longest = match self.longest_group {
            _ if !shape.has_neighbours() => 1,
            Some(longest) if longest.is_power_of_two() && longest <= MOST => longest,
            Some(longest) => {
                return Err(StoreError::BadOption {
                    option: "longest_group",
                    value: longest.into(),
                    accepts: format!("a power of two, 1 to {MOST}"),
                });
            }
            None => (ROW / shape.page_bytes).clamp(1, 8) as u32,
        };
        Ok(longest.ilog2())
    }
}
