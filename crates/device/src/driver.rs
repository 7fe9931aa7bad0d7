//! The calls that differ between vendors, one to one with a driver API. Everything above is
//! written once, in `gpu.rs` and `gpu_queue.rs`.

use std::fmt::Debug;

use crate::compact::{CompactDescriptor, Rows};
use crate::device::{Allocation, DeviceInfo, DeviceUuid, Export};
use crate::error::Result;
use crate::kernel::{Claims, EndWord, Entry};
use crate::queue::{Consumer, CopyDescriptor, ProducerHandle};

/// Page-locked host memory that the device reads and writes in place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pinned {
    /// Where the processor sees it.
    pub(crate) host: *mut u8,
    /// Where the device sees it.
    pub(crate) device: u64,
    /// Bytes.
    pub(crate) len: u64,
}

// SAFETY: a pointer and two numbers; whoever dereferences `host` says why that is sound there.
unsafe impl Send for Pinned {}

/// One device of one vendor.
///
/// All methods but `info`, `reaches`, `enter`, `warp_lanes` and `resident_blocks` run inside a scope made by [`Driver::enter`].
/// Streams are non-blocking: they never wait for the legacy default stream.
pub(crate) trait Driver: Debug + Send + Sync + Sized + 'static {
    /// Makes this device current for the thread; dropping it restores what was current before.
    type Scope<'a>;
    /// An ordered sequence of work.
    type Stream: Copy + Debug + Send;
    /// A marker in a stream.
    type Event: Copy + Debug + Send + 'static;
    /// Whether `launch_inline` and `launch_compact` store the word that they are given. Else they are
    /// given none, and [`Driver::store`] does it.
    const LAUNCHES_STORE_WORDS: bool;

    fn info(&self) -> &DeviceInfo;
    /// Whether this device can read and write the memory of another one of this process.
    fn reaches(&self, other: &DeviceUuid) -> bool;
    fn enter(&self) -> Result<Self::Scope<'_>>;

    fn allocate(&self, bytes: u64) -> Result<u64>;
    fn free(&self, addr: u64) -> Result<()>;
    fn allocate_pinned(&self, bytes: u64) -> Result<Pinned>;
    fn free_pinned(&self, memory: Pinned) -> Result<()>;
    fn allocation(&self, addr: u64) -> Result<Allocation>;

    /// As [`crate::Device::export_unit`]; right where memory has no chunks.
    fn export_unit(&self, addr: u64, _len: u64) -> Result<Allocation> {
        self.allocation(addr)
    }
    /// As [`crate::Device::prepare_export`].
    fn prepare_export(&self, unit: &Allocation) -> Result<Option<Export>>;
    /// The unit is there, as [`Driver::export_unit`] found it.
    fn export(&self, unit: &Allocation) -> Result<Export>;
    /// Maps an export of another process, returns the address of its first byte.
    fn open(&self, export: Export) -> Result<u64>;
    fn close(&self, mapped: u64, len: u64) -> Result<()>;
    /// Page-locks host memory of this process, returns where the device sees it.
    fn map_host(&self, addr: u64, len: u64) -> Result<u64>;
    /// Ends one `map_host` of the same range.
    fn unmap_host(&self, addr: u64, len: u64) -> Result<()>;

    fn create_stream(&self, high_priority: bool) -> Result<Self::Stream>;
    fn destroy_stream(&self, stream: Self::Stream) -> Result<()>;
    /// An event without timing.
    fn create_event(&self) -> Result<Self::Event>;
    fn destroy_event(&self, event: Self::Event) -> Result<()>;
    fn record(&self, event: Self::Event, stream: Self::Stream) -> Result<()>;
    /// Whether all work before the last `record` is done; never blocks.
    fn fired(&self, event: Self::Event) -> Result<bool>;
    /// Later work of `stream` waits for the last `record`, also if the event is recorded again.
    fn wait(&self, stream: Self::Stream, event: Self::Event) -> Result<()>;
    /// After all earlier work of `stream`, and after its bytes are visible everywhere, `value` is
    /// stored at the device address `word`, which is pinned memory.
    ///
    /// # Safety
    /// `word` is an aligned u32 in pinned memory that lives until then.
    unsafe fn store(&self, stream: Self::Stream, word: u64, value: u32) -> Result<()>;

    /// Later work of `stream` waits for what the producer holds now. `event` may be recorded for it.
    /// A stream that is being captured into a graph is refused.
    fn wait_producer(
        &self,
        stream: Self::Stream,
        producer: ProducerHandle,
        event: Self::Event,
    ) -> Result<()>;
    /// Later work of the consumer waits for the last `record`.
    fn signal_consumer(&self, consumer: Consumer, event: Self::Event) -> Result<()>;

    /// Threads of one warp (wave): one descriptor each.
    fn warp_lanes(&self) -> u32;
    /// Blocks of that kernel that the device runs at the same time, at least 1.
    fn resident_blocks(&self, entry: Entry) -> u32;

    /// # Safety
    /// As [`crate::Queue::submit`], until an event recorded after it on `stream` fires.
    unsafe fn copy(&self, stream: Self::Stream, dst: u64, src: u64, len: u64) -> Result<()>;
    /// Starts one DMA for all rows. `false`: the pitches are more than the engine takes, and nothing
    /// was started.
    ///
    /// # Safety
    /// As `copy`.
    unsafe fn copy_rows(&self, stream: Self::Stream, rows: Rows) -> Result<bool>;
    /// Starts the copy kernel over `count` descriptors at the device address `descriptors`.
    /// Only where [`crate::Capabilities::KERNEL`] is set; `count` and `blocks` are at least 1.
    ///
    /// # Safety
    /// As `copy`; the descriptors stay as they are until then, too.
    unsafe fn launch(
        &self,
        stream: Self::Stream,
        descriptors: u64,
        count: u32,
        blocks: u32,
    ) -> Result<()>;
    /// As `launch` by [`Entry::Claimed`], of `blocks` blocks of which some claim.
    ///
    /// # Safety
    /// As `launch`; the table and the verdict live until then, too, and nothing but launches uses the
    /// table.
    unsafe fn launch_claimed(
        &self,
        stream: Self::Stream,
        descriptors: u64,
        count: u32,
        blocks: u32,
        claims: &Claims,
    ) -> Result<()>;
    /// Makes bytes of device memory zero.
    ///
    /// # Safety
    /// As `copy`, of the destination.
    unsafe fn clear(&self, stream: Self::Stream, addr: u64, bytes: u64) -> Result<()>;
    /// As `launch`, with 1 to [`INLINE_DESCRIPTORS`](crate::kernel::INLINE_DESCRIPTORS) descriptors
    /// that are copied before it returns. If `end` is there, it is stored once all bytes of the launch
    /// are visible everywhere.
    ///
    /// # Safety
    /// As `copy`; the word and the count of arrivals live until the word is stored, and no other launch
    /// uses that count before.
    unsafe fn launch_inline(
        &self,
        stream: Self::Stream,
        descriptors: &[CopyDescriptor],
        blocks: u32,
        end: Option<EndWord>,
    ) -> Result<()>;
    /// As `launch_inline`, with 1 to
    /// [`COMPACT_DESCRIPTORS`](crate::kernel::COMPACT_DESCRIPTORS) compact descriptors.
    ///
    /// # Safety
    /// As `launch_inline`, for every copy that the descriptors stand for; their page lists stay as they
    /// are until then, too.
    unsafe fn launch_compact(
        &self,
        stream: Self::Stream,
        descriptors: &[CompactDescriptor],
        blocks: u32,
        end: Option<EndWord>,
    ) -> Result<()>;

    /// Copies host bytes to the device on `stream` and waits.
    ///
    /// # Safety
    /// As [`crate::Device::write`].
    unsafe fn write(&self, stream: Self::Stream, addr: u64, bytes: &[u8]) -> Result<()>;
    /// Copies device bytes to the host on `stream` and waits.
    ///
    /// # Safety
    /// As [`crate::Device::read`].
    unsafe fn read(&self, stream: Self::Stream, addr: u64, bytes: &mut [u8]) -> Result<()>;
}
