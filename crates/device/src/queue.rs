//! Submission of copies to a device, and their completion.

use std::any::Any;
use std::ffi::c_void;
use std::fmt::Debug;
use std::sync::Arc;

pub use crate::compact::{CompactCopy, CompactEnd, Rows};
use crate::device::DeviceUuid;
use crate::error::{Result, SubmitError};
use crate::loss::Loss;

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

/// Names one submission of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Which of the queue's completion words the device writes at the end.
    pub(crate) word: u32,
    /// What it writes.
    pub(crate) value: u32,
}

impl Ticket {
    /// Of a submission that nobody knows the end of: it is never done.
    pub const NEVER: Self = Self { word: u32::MAX, value: 0 };
}

/// The end of a submission, lent by its queue ([`Queue::lend`]) for other submissions to be behind.
#[derive(Debug)]
pub struct Fence {
    pub(crate) device: DeviceUuid,
    pub(crate) ticket: Ticket,
    /// The driver's event.
    pub(crate) event: Box<dyn Any + Send>,
}

/// Where a device says which submissions have ended. Outlives its queue, and is read without a
/// lock or a driver call (LAB: an event query costs 1.4 us, this a load from memory).
pub trait Completions: Debug + Send + Sync {
    /// Whether every byte of the submission has landed and is visible to whoever may read it. Once
    /// true it stays true.
    fn done(&self, ticket: Ticket) -> bool;
}

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

/// Work that passes through buffers in device memory, step by step: pieces between the buffer and
/// where bytes belong in device memory, by the kernel, and DMAs between the buffer and host memory.
pub struct Staged<'a> {
    /// The steps.
    pub stages: &'a mut dyn StageSource,
    /// Submissions of the same queue that use the same buffers: the first step waits for them.
    pub behind: &'a [Ticket],
    /// Asked once, when the first step is on its way into its buffer, before anything leaves one.
    /// After `false` nothing does: the submission is what was started so far.
    pub may_leave: &'a mut dyn FnMut() -> bool,
}

/// Hands out the steps of staged work.
pub trait StageSource {
    /// Whether there is another step.
    fn has_next(&self) -> bool;

    /// DMAs of the next step that are known before its pieces are: they start while those are packed,
    /// and the pieces wait for them.
    fn ahead(&mut self) -> &[CompactCopy<'_>] {
        &[]
    }

    /// Writes the next step's pieces to the front of `slot`, as many as it likes up to all that fit.
    ///
    /// Steps take turns on two streams: one begins when the last but one has ended, and runs beside
    /// the last. So steps of one parity may share a buffer.
    fn next(&mut self, slot: &mut [CopyDescriptor]) -> Stage<'_>;
}

/// A step of staged work.
#[derive(Clone, Copy, Debug)]
pub struct Stage<'a> {
    /// How many pieces were written to the slot.
    pub pieces: usize,
    /// For DMA, as few 2-D copies as strides allow.
    pub dma: &'a [CompactCopy<'a>],
    /// Whether the pieces wait for the DMAs, as they do for those that were ahead; else the DMAs wait for the pieces.
    pub dma_first: bool,
}

/// What one submission copies, and how.
pub struct Work<'a> {
    /// For the kernel, descriptor by descriptor.
    pub pieces: &'a mut dyn CopySource,
    /// For the kernel, which expands them.
    pub compact: &'a [CompactCopy<'a>],
    /// For DMA, one each.
    pub large: &'a [CopyDescriptor],
    /// For DMA, one each: everything else starts when these have landed.
    pub first: &'a [CopyDescriptor],
    /// For DMA, one each: they start when everything else has landed.
    pub last: &'a [CopyDescriptor],
    /// Through buffers in device memory, in no order with all of the above.
    pub staged: Option<Staged<'a>>,
    /// Whether the kernel may run. Where it may not, or where there is none, a piece is one DMA
    /// and a compact copy as few 2-D DMAs as its strides allow.
    pub kernel: bool,
    /// All of it runs on one stream.
    pub one_stream: bool,
    /// What has to be done before the first byte is read or written.
    pub after: Option<Producer>,
    /// Submissions of queues of the same device that have to be done before that, too. The device
    /// waits for them, the host does not.
    pub behind: &'a [Fence],
    /// Most blocks of one launch; more than the queue's own bound is no more than that.
    pub max_grid_blocks: u32,
    /// Where the destinations of the pieces lie, if the device is to find out whether they overlap.
    pub destinations: Option<&'a mut Destinations>,
}

/// Where the destinations of a submission's pieces lie, for a device that finds out beside the copies
/// whether two of them overlap.
#[derive(Debug)]
pub struct Destinations {
    /// First byte of the lowest, as the device sees it.
    pub low: u64,
    /// Behind the last byte of the highest.
    pub high: u64,
    /// A power of two, in bytes: each destination begins at a multiple of it from `low` on, and is a
    /// multiple of it long. As cut into pieces, too.
    pub granule: u64,
    /// Bytes of all pieces.
    pub bytes: u64,
    /// How many pieces, at most.
    pub pieces: u64,
    /// Set by the queue if the device finds out; else nobody does.
    pub verdict: Option<Verdict>,
}

impl Destinations {
    /// Granules that are claimed together, as one entry of a table.
    pub(crate) const BLOCK: u64 = 32;

    /// Blocks that the destinations touch, at most, each counted by every piece that does.
    pub(crate) fn blocks(&self) -> u64 {
        let block = self.granule.saturating_mul(Self::BLOCK);
        (self.bytes / block).saturating_add(self.pieces.saturating_mul(2))
    }
}

/// Whether destinations of a submission overlap. The device keeps a table for it until this is
/// dropped.
#[derive(Debug)]
pub struct Verdict {
    pub(crate) tables: Arc<dyn Verdicts>,
    pub(crate) table: usize,
}

impl Verdict {
    /// Of a submission that is done: the index of a piece of which another one writes a byte, too.
    pub fn overlap(&self) -> Option<u32> {
        self.tables.overlap(self.table)
    }
}

impl Drop for Verdict {
    fn drop(&mut self) {
        self.tables.give_back(self.table);
    }
}

/// Whoever keeps the tables of verdicts.
pub(crate) trait Verdicts: Debug + Send + Sync {
    fn overlap(&self, table: usize) -> Option<u32>;
    fn give_back(&self, table: usize);
}

impl<'a> Work<'a> {
    /// Pieces by the kernel and nothing else.
    pub fn pieces(pieces: &'a mut dyn CopySource) -> Self {
        Self {
            pieces,
            compact: &[],
            large: &[],
            first: &[],
            last: &[],
            staged: None,
            kernel: true,
            one_stream: false,
            after: None,
            behind: &[],
            max_grid_blocks: u32::MAX,
            destinations: None,
        }
    }
}

impl Debug for Work<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work")
            .field("compact", &self.compact.len())
            .field("large", &self.large.len())
            .field("first", &self.first.len())
            .field("last", &self.last.len())
            .field("staged", &self.staged.is_some())
            .field("kernel", &self.kernel)
            .field("one_stream", &self.one_stream)
            .field("after", &self.after)
            .field("behind", &self.behind.len())
            .field("destinations", &self.destinations)
            .finish_non_exhaustive()
    }
}

/// Work of the caller's own that a submission waits for on the device, without the host.
///
/// Handles are the vendor's: a `CUstream` or `cudaStream_t`, a `CUevent` or `cudaEvent_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Producer(pub(crate) ProducerHandle);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProducerHandle {
    Stream(usize),
    Event(usize),
}

impl Producer {
    /// What the stream holds at the moment of the submission. The vendor's special values (null and
    /// 1 for the legacy default stream, 2 for the calling thread's) mean the stream that they mean
    /// on the thread that submits.
    ///
    /// # Safety
    /// The stream belongs to the submission's device and lives until the submission returns.
    pub unsafe fn stream(handle: *mut c_void) -> Self {
        Self(ProducerHandle::Stream(handle as usize))
    }

    /// What the event was last recorded behind.
    ///
    /// # Safety
    /// The event lives until the submission returns.
    pub unsafe fn event(handle: *mut c_void) -> Self {
        Self(ProducerHandle::Event(handle as usize))
    }
}

/// A stream of the caller's own that waits for a submission on the device, without the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Consumer(pub(crate) usize);

impl Consumer {
    /// The stream, special values as in [`Producer::stream`].
    ///
    /// # Safety
    /// The stream lives until the call that takes this returns.
    pub unsafe fn stream(handle: *mut c_void) -> Self {
        Self(handle as usize)
    }
}

/// Queues of one device whose work may be behind each other's. Nothing that is behind a submission
/// that does not end ends either, so what loses one of them loses all.
pub trait Siblings: Debug + Send + Sync {
    /// What they know of the device together.
    fn loss(&self) -> &Loss;

    /// As [`Queue::check`], of all of them that nobody uses now. Does not wait for those.
    ///
    /// # Errors
    /// Why the device is lost.
    fn check(&self) -> Result<()>;
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
    /// Most blocks of one launch; never more than are resident at once.
    pub max_grid_blocks: u32,
    /// Most bytes of a compact copy that one warp copies at a time.
    pub tile_bytes: u64,
    /// Streams ask the driver for its highest priority, so that a transfer does not wait behind
    /// the model's own kernels (LAB.md, "Transfers beside compute": a third of the wait).
    pub high_priority: bool,
    /// How long submitted work may make no progress before the device counts as lost. Time that a
    /// submission waits for its producer does not count.
    pub stall_timeout: std::time::Duration,
    /// The other queues of the device that this one's work may be behind, or theirs behind its own.
    pub siblings: Option<Arc<dyn Siblings>>,
}

impl Default for QueueOptions {
    fn default() -> Self {
        Self {
            // Each is joined to the last at the end, which costs about a microsecond: sixteen DMAs of
            // 16 MiB inside one H200 reach 0.96 to 0.99 of one with 3 streams and 0.93 to 0.97 with 4.
            streams: 3,
            ring_slots: 32,
            slot_descriptors: 8192,
            first_descriptors: 1024,
            max_grid_blocks: 528,
            tile_bytes: 16 << 10,
            high_priority: true,
            stall_timeout: std::time::Duration::from_secs(30),
            siblings: None,
        }
    }
}

/// Runs copies on one device.
///
/// Each submission gets a [`Ticket`]; once [`Completions::done`] says so, every byte of the
/// submission has landed. Submissions may overlap on the device and end in any order, so two that
/// touch the same bytes have no order between them, unless the later one asks for it
/// ([`Work::behind`]); one that waits holds up no other.
pub trait Queue: Debug + Send {
    /// Enqueues the work and returns without waiting for the copies. It waits only for a free ring
    /// slot and for one of 4096 completion words, which depends on the device alone; with a producer,
    /// where those that wait for theirs hold up half of the ring or of the words, on these producers,
    /// too. Submissions that are [behind](Work::behind) others count as such.
    ///
    /// On `Err` earlier copies of the same submission may be running:
    /// [`SubmitError::left`](crate::SubmitError) says until when.
    ///
    /// Copies of a submission have no order, except that [`Work::first`] comes before and
    /// [`Work::last`] behind the others: a byte that two of them write, or that one reads and another
    /// writes, is undefined afterwards. A submission with either list runs on one stream.
    ///
    /// # Safety
    /// Until the submission is done:
    /// - every source range is readable, and every destination range writable, by this device;
    /// - from the end of the producer on, nobody else relies on the bytes of a destination, or
    ///   changes those of a source.
    unsafe fn submit(&mut self, work: &mut Work<'_>) -> Result<Ticket, SubmitError>;

    /// Makes later work of a stream of the caller's wait for the submission. The host does not
    /// wait.
    fn signal(&mut self, ticket: Ticket, consumer: Consumer) -> Result<()>;

    /// The end of a submission, to be behind in this queue or another one of the device; none if it
    /// is done. It has to be given back once what is behind it is submitted.
    fn lend(&mut self, ticket: Ticket) -> Result<Option<Fence>>;

    /// Takes back what this queue lent.
    fn take_back(&mut self, fence: Fence);

    /// Asks the driver whether the device still works; call it from time to time while waiting.
    ///
    /// An error means that the device is lost, and is [`Lost`](crate::Error::Lost) or
    /// [`Stalled`](crate::Error::Stalled): nothing more will complete, and nobody knows whether the
    /// ranges of unfinished submissions are quiet.
    fn check(&mut self) -> Result<()>;

    /// Which submissions are done.
    fn completions(&self) -> Arc<dyn Completions>;

    /// Bytes of pinned host memory that the queue holds, as many for as long as it lives.
    fn pinned_bytes(&self) -> u64;
}
