use std::time::Duration;

use super::PageKey;
use crate::error::Error;

/// What a page store can fail with. Where a call fails, nothing of it was begun.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The engine refused the copies, or what the store is made of.
    #[error(transparent)]
    Engine(#[from] Error),
    /// The pages of the device cannot lie like that.
    #[error("pages of that shape are not stored: {reason}")]
    BadShape {
        /// What is wrong, and what would be right.
        reason: String,
    },
    /// An option of the store is outside of what it accepts.
    #[error("{option} is {value}, expected {accepts}")]
    BadOption {
        /// The option's name.
        option: &'static str,
        /// What was given.
        value: u64,
        /// What is accepted.
        accepts: String,
    },
    /// The engine has no device to allocate host memory on.
    #[error(
        "the engine has no host memory to keep pages in: give it kvferry_device::host() beside its GPUs"
    )]
    NoHostMemory,
    /// Host memory for pages was not to be had, or was not page-locked. What was locked before is
    /// unlocked and freed again.
    #[error(
        "piece {piece} of {pieces} of the page store, {bytes} bytes for {device}, could not be allocated and page-locked: {error}; locked memory of this process is limited to {limit} (ulimit -l), free memory and MC_KVFERRY_PINNED_MB limit it too: raise them, or make the store smaller than {budget} bytes"
    )]
    NotPinned {
        /// Which piece, from 0.
        piece: usize,
        /// How many pieces the store was to have.
        pieces: usize,
        /// Bytes of the piece.
        bytes: u64,
        /// Bytes of all pieces.
        budget: u64,
        /// The device that was to reach it.
        device: String,
        /// The process's limit of locked memory.
        limit: String,
        /// What refused it.
        #[source]
        error: Box<Error>,
    },
    /// A page that the device does not have.
    #[error(
        "page {page}, at position {index} of the list, is not one of the device's {pages} pages"
    )]
    PageOutOfRange {
        /// Position in the list.
        index: usize,
        /// Number of the page.
        page: u32,
        /// Pages of the device.
        pages: u32,
    },
    /// Two keys of one list would come into the same page.
    #[error("page {page} is twice in the list: the copies of one call have no order")]
    PageTwice {
        /// Number of the page.
        page: u32,
    },
    /// One list stores a key twice.
    #[error("key {key} is twice in the list: give each page a key of its own")]
    KeyTwice {
        /// The key.
        key: PageKey,
    },
    /// The key names a page that is stored.
    #[error("key {key}, at position {index} of the list, is already stored: forget it first")]
    AlreadyStored {
        /// Position in the list.
        index: usize,
        /// The key.
        key: PageKey,
    },
    /// The key names no stored page: it was never paged out, or was forgotten.
    #[error("no page of key {key} is stored: it was never paged out, or was forgotten since")]
    NotStored {
        /// The key.
        key: PageKey,
    },
    /// The page was paged out, and that failed.
    #[error("the page of key {key} is not stored, because its page-out failed: {error}")]
    PageOutFailed {
        /// The key.
        key: PageKey,
        /// Why.
        #[source]
        error: Box<Error>,
    },
    /// There is no more memory for pages.
    #[error(
        "the budget of {budget} bytes is spent: {needed} pages to store, {free} free, {held} held by neighbours that are still stored, {ending} that come free when copies end: forget pages, or give the store more memory"
    )]
    BudgetSpent {
        /// Bytes of the store.
        budget: u64,
        /// Pages that were to be stored.
        needed: u64,
        /// Pages that there is memory for now.
        free: u64,
        /// Forgotten pages of groups of which other pages are stored.
        held: u64,
        /// Forgotten pages that copies still use.
        ending: u64,
    },
    /// As many bytes as may be are on their way out.
    #[error(
        "{in_flight} bytes are on their way to host memory, {bytes} more would pass the limit of {limit} (waited {waited:?}): try again when some have arrived, or raise in_flight_bytes"
    )]
    Full {
        /// Bytes on their way out.
        in_flight: u64,
        /// Bytes that were to follow.
        bytes: u64,
        /// The limit.
        limit: u64,
        /// How long it was waited for.
        waited: Duration,
    },
    /// Copies did not end in time. They go on, and nothing that they use is freed.
    #[error("{operations} operations of the page store still run after {waited:?}")]
    Busy {
        /// Operations that run.
        operations: usize,
        /// How long they were waited for.
        waited: Duration,
    },
    /// Operations failed since the last time that somebody asked.
    #[error("{operations} operations of the page store failed, the first with: {error}")]
    Failed {
        /// How many.
        operations: u64,
        /// Why the first did.
        #[source]
        error: Box<Error>,
    },
    /// The process was forked after the store was made: only its parent can use the store.
    #[error(
        "the page store was made by process {owner}, of which this is a fork: make one here, or start processes without fork"
    )]
    OtherProcess {
        /// The process that made it.
        owner: u32,
    },
}
