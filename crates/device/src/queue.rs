//! Ordered submission of copies, and their completion.

use std::fmt::Debug;

use crate::error::{Result, SubmitError};

/// One copy, as `kernels/copy.cu` reads it: 24 bytes, three little-endian u64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CopyDescriptor {
    /// First byte to read, an address that the executing device can read.
    pub src: u64,
    /// First byte to write, an address that the executing device can write.
    pub dst: u64,
    /// Bytes; zero copies nothing.
    pub len: u64,
}

const _: () =
    assert!(size_of::<CopyDescriptor>() == 24, "kernels/copy.cu reads 24-byte descriptors");

/// Number of a submission on its queue. Numbers only grow; 0 is before the first submission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seq(pub u64);

/// Hands out descriptors slot by slot, so that a queue packs them straight into its ring while
/// the device works on the slots before.
pub trait CopySource {
    /// Writes the next descriptors to the front of `slot` and returns how many; 0 ends the source.
    ///
    /// A source that returns fewer than fit may be asked again. One warp copies one descriptor, so
    /// a source splits long pieces into tiles, or the longest becomes the tail of the launch.
    fn fill(&mut self, slot: &mut [CopyDescriptor]) -> usize;
}

/// A source over a slice, for callers that have descriptors ready.
#[derive(Debug)]
pub struct SliceSource<'a>(pub &'a [CopyDescriptor]);

impl CopySource for SliceSource<'_> {
    fn fill(&mut self, slot: &mut [CopyDescriptor]) -> usize {
        let count = slot.len().min(self.0.len());
        let (now, later) = self.0.split_at(count);
        slot[..count].copy_from_slice(now);
        self.0 = later;
        count
    }
}

/// How a queue runs its copies. Policy lives above; these are the values it chose.
#[derive(Clone, Debug)]
pub struct QueueOptions {
    /// Streams that launches and DMA copies are spread over, 1 to 64.
    pub streams: usize,
    /// Descriptor ring: number of slots.
    pub ring_slots: usize,
    /// Descriptor ring: descriptors in one slot, which is one launch.
    pub slot_descriptors: usize,
    /// Descriptors of a submission's first launch, at most.
    pub first_descriptors: usize,
    /// Most blocks of one launch.
    pub max_grid_blocks: u32,
    /// Streams ask the driver for its highest priority, so that a transfer does not wait behind
    /// the model's own kernels (LAB.md, "Transfers beside compute": a third of the wait).
    pub high_priority: bool,
    /// How long submitted work may make no progress before the device counts as lost.
    pub stall_timeout: std::time::Duration,
}

impl Default for QueueOptions {
    fn default() -> Self {
        Self {
            streams: 4,
            ring_slots: 32,
            slot_descriptors: 8192,
            first_descriptors: 2048,
            max_grid_blocks: 528,
            high_priority: true,
            stall_timeout: std::time::Duration::from_secs(30),
        }
    }
}

/// Runs copies on one device.
///
/// Each submission gets a [`Seq`]; once [`Queue::completed`] returns that number or a later one,
/// every byte of the submission has landed and is visible to whoever may read it. Submissions may
/// overlap on the device, so two that touch the same bytes have no order between them; their
/// completion is reported in order.
pub trait Queue: Debug + Send {
    /// Enqueues `pieces` as kernel launches, one per ring slot, and each copy of `large` as one
    /// DMA; on a device without a kernel everything is DMA. Returns without waiting for the
    /// copies; it waits only for a free ring slot, which depends on the device alone.
    ///
    /// On `Err` earlier copies of the same submission may be running:
    /// [`SubmitError::left`](crate::SubmitError) says until when.
    ///
    /// Copies of a submission have no order: a byte that two of them write, or that one reads and
    /// another writes, is undefined afterwards.
    ///
    /// # Safety
    /// Until `completed()` reaches the submission's number:
    /// - every source range is readable, and every destination range writable, by this device;
    /// - nobody else relies on the bytes of a destination, or changes those of a source.
    unsafe fn submit(
        &mut self,
        pieces: &mut dyn CopySource,
        large: &[CopyDescriptor],
    ) -> Result<Seq, SubmitError>;

    /// The last submission such that it and all before it have landed. Does not block.
    ///
    /// An error means that the device is lost: nothing more will complete, and nobody knows
    /// whether the ranges of unfinished submissions are quiet.
    fn completed(&mut self) -> Result<Seq>;

    /// The last number given out.
    fn submitted(&self) -> Seq;

    /// Bytes of pinned host memory that the descriptor ring holds.
    fn pinned_bytes(&self) -> u64;
}
