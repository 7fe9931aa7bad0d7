//! NVIDIA GPUs through libcuda, which is opened at run time.
//!
//! Works in the devices' primary contexts, beside whatever else the process does there, and
//! leaves each thread's current context as it was. Nothing here uses the legacy default stream,
//! waits for a whole device, or panics because a library or a symbol is missing.

#[cfg(feature = "testing")]
mod application;
mod compile;
mod context;
mod host_memory;
mod identity;
mod ipc;
mod library;
pub(crate) mod load;
mod order;
mod pointers;
mod pool;
mod report;
#[cfg(feature = "testing")]
pub mod testing;
mod virtual_memory;

#[cfg(feature = "testing")]
pub use self::application::application_stream;
pub use self::report::{CompilerReport, LibraryReport, describe};

use std::ffi::{c_int, c_uint, c_void};
use std::path::PathBuf;
use std::sync::Arc;

use cudarc::driver::sys;

use self::compile::Kernel;
use self::context::{Context, Scope};
use self::host_memory::LOCKS;
use self::ipc::Opened;
use self::library::{Cuda, Failure};
use crate::compact::CompactDescriptor;
use crate::compact::Rows;
use crate::device::{Allocation, Capabilities, Device, DeviceInfo, DeviceUuid, Export};
use crate::driver::{Driver, Pinned};
use crate::error::{Error, Result};
use crate::exports::Openings;
use crate::gpu::GpuDevice;
use crate::kernel::{self, BLOCK_THREADS, Claims, EndWord, Entry};
use crate::page_lock::LockedFile;
use crate::queue::{Consumer, CopyDescriptor, ProducerHandle};

/// How CUDA devices are opened.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Whether to load the copy kernel. Without it everything is DMA.
    pub kernel: bool,
    /// Where compiled kernels are kept; `None` compiles at each open.
    pub cache_directory: Option<PathBuf>,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self { kernel: true, cache_directory: None }
    }
}

/// Number of NVIDIA GPUs that this process sees, at least 1.
///
/// # Errors
/// [`Error::LibraryMissing`] or [`Error::SymbolMissing`] if libcuda cannot be used, and
/// [`Error::NoDevice`] with the driver's word if it is there and sees no GPU.
pub fn count() -> Result<u32> {
    count_devices(Cuda::load()?, "cuda")
}

/// Opens GPU `ordinal` and loads its copy kernel, compiled where the cache has none, so that no
/// transfer waits for it. A device whose kernel cannot be had is opened without one.
///
/// Devices of one process that can reach each other's memory are connected as they are opened.
///
/// # Errors
/// As [`count`]; [`Error::NoDevice`] also if there are fewer GPUs than that.
pub fn open(ordinal: u32, options: &CudaOptions) -> Result<Arc<dyn Device>> {
    Ok(GpuDevice::new(CudaDriver::open(ordinal, options)?)?)
}

fn count_devices(cuda: &Cuda, asked: &str) -> Result<u32> {
    let no_device = |reason| Error::NoDevice { device: asked.into(), reason };
    let failed = |failure| no_device(cuda.describe(failure));
    // SAFETY: may be called any number of times, from any thread.
    unsafe { cuda.cuInit(0) }.map_err(failed)?;
    let mut count = 0;
    // SAFETY: the driver writes one number.
    unsafe { cuda.cuDeviceGetCount(&mut count) }.map_err(failed)?;
    match u32::try_from(count) {
        Ok(count) if count > 0 => Ok(count),
        _ => Err(no_device("the driver sees no GPU; does CUDA_VISIBLE_DEVICES hide it?".into())),
    }
}

/// A GPU, in its primary context.
#[derive(Debug)]
struct CudaDriver {
    info: DeviceInfo,
    /// Visible devices whose memory this one can use.
    peers: Vec<DeviceUuid>,
    high_priority: c_int,
    multiprocessors: u32,
    /// Bytes that two rows of one DMA are apart at most.
    most_pitch: u64,
    /// A stream can store a word by itself.
    stores: bool,
    kernel: Option<Kernel>,
    /// Whether it can use host memory that is page-locked where it is.
    reaches_host: bool,
    opened: Openings<Opened>,
    context: Arc<Context>,
}

impl CudaDriver {
    fn open(ordinal: u32, options: &CudaOptions) -> Result<Self> {
        let asked = format!("cuda:{ordinal}");
        let cuda = Cuda::load()?;
        let count = count_devices(cuda, &asked)?;
        if ordinal >= count {
            let reason = format!(
                "this process sees {count} of them, numbered from 0; CUDA_VISIBLE_DEVICES may hide more"
            );
            return Err(Error::NoDevice { device: asked, reason });
        }
        let error = |failure| cuda.error(failure, &asked);
        let device = identity::device(cuda, ordinal).map_err(error)?;
        let (mut info, capability) = identity::info(cuda, device, ordinal).map_err(error)?;
        let peers = identity::peers(cuda, device, count).map_err(error)?;
        info.capabilities.set(Capabilities::PEER, !peers.is_empty());
        let context = Context::retain(cuda, device, ordinal, info.uuid)?;
        let high_priority = {
            let _scope = context.enter()?;
            let (mut least, mut greatest) = (0, 0);
            // SAFETY: the context is current; the driver writes two numbers.
            unsafe { cuda.cuCtxGetStreamPriorityRange(&mut least, &mut greatest) }
                .map_err(error)?;
            greatest
        };
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: the device comes from cuDeviceGet; the driver writes one number.
            unsafe { cuda.cuDeviceGetAttribute(&mut value, attribute, device) }.map_err(error)?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        use sys::CUdevice_attribute as Attribute;
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let most_pitch = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_PITCH)?.into();
        // Of no interest if the driver is too old to know it.
        let stores = attribute(Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
        let stores = stores.is_ok_and(|stores| stores != 0);
        let kernel = Kernel::open(&context, capability, options, &mut info);
        context.connect();
        let reaches_host = identity::reaches_host(cuda, device);
        let opened = Openings::default();
        Ok(Self {
            info,
            peers,
            high_priority,
            multiprocessors,
            most_pitch,
            stores,
            kernel,
            reaches_host,
            opened,
            context,
        })
    }

    fn cuda(&self) -> &'static Cuda {
        self.context.cuda
    }

    fn error(&self, failure: Failure) -> Error {
        self.context.error(failure)
    }

    fn allocation_error(&self, failure: Failure, kind: &'static str, bytes: u64) -> Error {
        self.context.allocation_error(failure, kind, bytes)
    }

    fn unknown(&self, addr: u64) -> Error {
        Error::UnknownAddress { device: self.info.to_string(), addr }
    }
}

/// Of a copy that crosses the border of a lock, among others.
fn is_refusal(failure: &Failure) -> bool {
    failure.is(sys::CUresult::CUDA_ERROR_INVALID_VALUE)
}

#[derive(Clone, Copy, Debug)]
struct Stream(sys::CUstream);

// SAFETY: a stream is a name that the driver takes on any thread.
unsafe impl Send for Stream {}

#[derive(Clone, Copy, Debug)]
struct Event(sys::CUevent);

// SAFETY: an event is a name that the driver takes on any thread.
unsafe impl Send for Event {}

impl Driver for CudaDriver {
    type Scope<'a> = Scope<'a>;
    type Stream = Stream;
    type Event = Event;
    const LAUNCHES_STORE_WORDS: bool = true;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn reaches(&self, other: &DeviceUuid) -> bool {
        *other == self.info.uuid
            || (self.reaches_host && *other == crate::host::host_uuid())
            || (self.peers.contains(other) && self.context.may_reach(other))
    }

    fn enter(&self) -> Result<Scope<'_>> {
        self.context.enter()
    }

    fn allocate(&self, bytes: u64) -> Result<u64> {
        let mut addr = 0;
        // SAFETY: the scope is entered; the driver writes one address.
        unsafe { self.cuda().cuMemAlloc_v2(&mut addr, bytes as usize) }
            .map_err(|failure| self.allocation_error(failure, "device", bytes))?;
        Ok(addr)
    }

    fn free(&self, addr: u64) -> Result<()> {
        // SAFETY: the `Memory` that owned the address is being dropped, once.
        unsafe { self.cuda().cuMemFree_v2(addr) }.map_err(|failure| self.error(failure))
    }

    fn allocate_pinned(&self, bytes: u64) -> Result<Pinned> {
        // Not write-combined: the processor reads it back.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        let mut host = std::ptr::null_mut();
        // SAFETY: the scope is entered; the driver writes one pointer.
        unsafe { self.cuda().cuMemHostAlloc(&mut host, bytes as usize, flags) }
            .map_err(|failure| self.allocation_error(failure, "pinned host", bytes))?;
        let mut memory = Pinned { host: host.cast(), device: 0, len: bytes };
        // SAFETY: `host` was just allocated, mapped.
        let mapped =
            unsafe { self.cuda().cuMemHostGetDevicePointer_v2(&mut memory.device, host, 0) };
        if let Err(failure) = mapped {
            let _ = self.free_pinned(memory);
            return Err(self.error(failure));
        }
        Ok(memory)
    }

    fn free_pinned(&self, memory: Pinned) -> Result<()> {
        // SAFETY: the memory's owner frees it once, when no work uses it any more.
        unsafe { self.cuda().cuMemFreeHost(memory.host.cast()) }
            .map_err(|failure| self.error(failure))
    }

    fn allocation(&self, addr: u64) -> Result<Allocation> {
        self.allocation_of(addr)
    }

    fn export_unit(&self, addr: u64, len: u64) -> Result<Allocation> {
        self.unit(addr, len)
    }

    fn prepare_export(&self, unit: &Allocation) -> Result<Option<Export>> {
        self.prepare(unit)
    }

    fn export(&self, unit: &Allocation) -> Result<Export> {
        self.export_unit_of(unit)
    }

    fn open(&self, export: Export) -> Result<u64> {
        let (addr, opened) = match export {
            Export::Handle { bytes, len } => self.open_handle(&bytes, len)?,
            Export::Chunks { chunks, len } => self.open_chunks(chunks, len)?,
            Export::Pool { fd, bytes, len } => self.open_pool(fd, &bytes, len)?,
            Export::File { fd, len } => {
                let (addr, file) = LockedFile::open(&LOCKS, &self.context, fd, len)?;
                (addr, Opened::Host(file))
            }
        };
        self.opened.insert(addr, opened);
        Ok(addr)
    }

    fn close(&self, mapped: u64, len: u64) -> Result<()> {
        let opened = self.opened.remove(mapped).ok_or_else(|| self.unknown(mapped))?;
        self.close_opened(mapped, len, opened)
    }

    fn map_host(&self, addr: u64, len: u64) -> Result<u64> {
        LOCKS.lock(&self.context, addr, len)
    }

    fn unmap_host(&self, addr: u64, len: u64) -> Result<()> {
        LOCKS.unlock(&self.context, addr, len)
    }

    fn create_stream(&self, high_priority: bool) -> Result<Stream> {
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        let priority = if high_priority { self.high_priority } else { 0 };
        let mut stream = std::ptr::null_mut();
        // SAFETY: the scope is entered; the driver writes one stream.
        unsafe { self.cuda().cuStreamCreateWithPriority(&mut stream, flags, priority) }
            .map_err(|failure| self.error(failure))?;
        Ok(Stream(stream))
    }

    fn destroy_stream(&self, stream: Stream) -> Result<()> {
        // SAFETY: the stream's owner destroys it once.
        unsafe { self.cuda().cuStreamDestroy_v2(stream.0) }.map_err(|failure| self.error(failure))
    }

    fn create_event(&self) -> Result<Event> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        let mut event = std::ptr::null_mut();
        // SAFETY: the scope is entered; the driver writes one event.
        unsafe { self.cuda().cuEventCreate(&mut event, flags) }
            .map_err(|failure| self.error(failure))?;
        Ok(Event(event))
    }

    fn destroy_event(&self, event: Event) -> Result<()> {
        // SAFETY: the event's owner destroys it once.
        unsafe { self.cuda().cuEventDestroy_v2(event.0) }.map_err(|failure| self.error(failure))
    }

    fn record(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: both belong to the queue that asks, and live.
        unsafe { self.cuda().cuEventRecord(event.0, stream.0) }
            .map_err(|failure| self.error(failure))
    }

    fn fired(&self, event: Event) -> Result<bool> {
        // SAFETY: the event belongs to the queue that asks, and lives.
        match unsafe { self.cuda().cuEventQuery(event.0) } {
            Ok(()) => Ok(true),
            Err(failure) if failure.is(sys::CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
            Err(failure) => Err(self.error(failure)),
        }
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        // SAFETY: both belong to the queue that asks, and live.
        unsafe { self.cuda().cuStreamWaitEvent(stream.0, event.0, 0) }
            .map_err(|failure| self.error(failure))
    }

    unsafe fn store(&self, stream: Stream, word: u64, value: u32) -> Result<()> {
        let stored = if self.stores {
            // Without flags the store waits until earlier writes are visible to the whole system.
            // SAFETY: the caller's contract.
            unsafe { self.cuda().cuStreamWriteValue32_v2(stream.0, word, value, 0) }
        } else {
            // SAFETY: the caller's contract.
            unsafe { self.cuda().cuMemsetD32Async(word, value, 1, stream.0) }
        };
        stored.map_err(|failure| self.error(failure))
    }

    fn wait_producer(&self, stream: Stream, producer: ProducerHandle, event: Event) -> Result<()> {
        match producer {
            ProducerHandle::Stream(handle) => {
                let producer = self.orderable(handle)?;
                // SAFETY: `Producer::stream` was promised a stream that lives; the event is ours.
                unsafe { self.cuda().cuEventRecord(event.0, producer) }
                    .map_err(|failure| self.not_orderable("stream", failure))?;
                self.wait(stream, event)
            }
            ProducerHandle::Event(handle) => {
                // SAFETY: `Producer::event` was promised an event that lives; the stream is ours.
                unsafe { self.cuda().cuStreamWaitEvent(stream.0, handle as sys::CUevent, 0) }
                    .map_err(|failure| self.not_orderable("event", failure))
            }
        }
    }

    fn signal_consumer(&self, Consumer(handle): Consumer, event: Event) -> Result<()> {
        let consumer = self.orderable(handle)?;
        // SAFETY: `Consumer::stream` was promised a stream that lives; the event is ours.
        unsafe { self.cuda().cuStreamWaitEvent(consumer, event.0, 0) }
            .map_err(|failure| self.not_orderable("stream", failure))
    }

    fn warp_lanes(&self) -> u32 {
        32
    }

    fn resident_blocks(&self, entry: Entry) -> u32 {
        let kernel = self.kernel.as_ref();
        kernel.map_or(1, |kernel| self.multiprocessors * kernel.blocks_per_multiprocessor(entry))
    }

    unsafe fn copy(&self, stream: Stream, dst: u64, src: u64, len: u64) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let copy = |dst, src, len| {
            // SAFETY: the caller's contract. With unified addresses the driver finds out by itself
            // what each side is.
            unsafe { self.cuda().cuMemcpyAsync(dst, src, len as usize, stream.0) }
        };
        LOCKS.copy([dst, src], len, is_refusal, copy).map_err(|failure| self.error(failure))
    }

    unsafe fn copy_rows(&self, stream: Stream, rows: Rows) -> Result<bool> {
        let Rows { len, src_pitch, dst_pitch, count, .. } = rows;
        if len == 0 || count == 0 {
            return Ok(true);
        }
        if src_pitch.max(dst_pitch) > self.most_pitch || src_pitch.min(dst_pitch) < len {
            return Ok(false);
        }
        let copy = |dst, src, len| {
            // SAFETY: the caller's contract, of a row or a part of one.
            unsafe { self.cuda().cuMemcpyAsync(dst, src, len as usize, stream.0) }
        };
        let block = |rows: Rows| {
            let copy = sys::CUDA_MEMCPY2D {
                srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED,
                srcDevice: rows.src,
                srcPitch: src_pitch as usize,
                dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED,
                dstDevice: rows.dst,
                dstPitch: dst_pitch as usize,
                WidthInBytes: len as usize,
                Height: rows.count as usize,
                srcXInBytes: 0,
                srcY: 0,
                srcHost: std::ptr::null(),
                srcArray: std::ptr::null_mut(),
                dstXInBytes: 0,
                dstY: 0,
                dstHost: std::ptr::null_mut(),
                dstArray: std::ptr::null_mut(),
            };
            // SAFETY: the caller's contract, for every row; the driver copies what `copy` says.
            unsafe { self.cuda().cuMemcpy2DAsync_v2(&copy, stream.0) }
        };
        LOCKS
            .copy_rows(rows, is_refusal, copy, block)
            .map(|()| true)
            .map_err(|failure| self.error(failure))
    }

    unsafe fn launch(
        &self,
        stream: Stream,
        descriptors: u64,
        count: u32,
        blocks: u32,
    ) -> Result<()> {
        let (mut descriptors, mut count) = (descriptors, count);
        let mut arguments: [*mut c_void; 2] =
            [(&raw mut descriptors).cast(), (&raw mut count).cast()];
        // SAFETY: the kernel takes (u64, u32); the rest is the caller's contract.
        unsafe { self.launch_entry(stream, Entry::Ring, blocks, &mut arguments) }
    }

    unsafe fn launch_claimed(
        &self,
        stream: Stream,
        descriptors: u64,
        count: u32,
        blocks: u32,
        claims: &Claims,
    ) -> Result<()> {
        let (mut descriptors, mut count, mut claims) = (descriptors, count, *claims);
        let mut arguments: [*mut c_void; 3] =
            [(&raw mut descriptors).cast(), (&raw mut count).cast(), (&raw mut claims).cast()];
        // SAFETY: the kernel takes (u64, u32, Claims); the rest is the caller's contract.
        unsafe { self.launch_entry(stream, Entry::Claimed, blocks, &mut arguments) }
    }

    unsafe fn clear(&self, stream: Stream, addr: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.cuda().cuMemsetD8Async(addr, 0, bytes as usize, stream.0) }
            .map_err(|failure| self.error(failure))
    }

    unsafe fn launch_inline(
        &self,
        stream: Stream,
        descriptors: &[CopyDescriptor],
        blocks: u32,
        end: Option<EndWord>,
    ) -> Result<()> {
        // SAFETY: the entry takes that one parameter; the rest is the caller's contract.
        kernel::with_inline(descriptors, end, |entry, parameter| unsafe {
            self.launch_entry(stream, entry, blocks, &mut [parameter])
        })
    }

    unsafe fn launch_compact(
        &self,
        stream: Stream,
        descriptors: &[CompactDescriptor],
        blocks: u32,
        end: Option<EndWord>,
    ) -> Result<()> {
        // SAFETY: the entry takes that one parameter; the rest is the caller's contract.
        kernel::with_compact(descriptors, end, |entry, parameter| unsafe {
            self.launch_entry(stream, entry, blocks, &mut [parameter])
        })
    }

    unsafe fn write(&self, stream: Stream, addr: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let copy = |dst, src, len| {
            // SAFETY: the caller's contract; `bytes` outlives the copy, which is waited for below.
            unsafe {
                self.cuda().cuMemcpyHtoDAsync_v2(dst, src as *const _, len as usize, stream.0)
            }
        };
        let sides = [addr, bytes.as_ptr().expose_provenance() as u64];
        let copied = LOCKS.copy(sides, bytes.len() as u64, is_refusal, copy);
        self.finish(stream, copied)
    }

    unsafe fn read(&self, stream: Stream, addr: u64, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let copy = |dst, src, len| {
            // SAFETY: the caller's contract; `bytes` outlives the copy, which is waited for below.
            unsafe { self.cuda().cuMemcpyDtoHAsync_v2(dst as *mut _, src, len as usize, stream.0) }
        };
        let sides = [bytes.as_mut_ptr().expose_provenance() as u64, addr];
        let copied = LOCKS.copy(sides, bytes.len() as u64, is_refusal, copy);
        self.finish(stream, copied)
    }
}

impl CudaDriver {
    /// # Safety
    /// `arguments` are the kernel's own; the rest as [`Driver::launch`].
    unsafe fn launch_entry(
        &self,
        stream: Stream,
        entry: Entry,
        blocks: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let Some(kernel) = &self.kernel else {
            return Err(Error::Call {
                call: "cuLaunchKernel",
                device: self.info.to_string(),
                name: self.info.kernel.clone(),
                code: 0,
            });
        };
        // SAFETY: the caller's contract. The driver copies the arguments before the call returns.
        unsafe {
            self.cuda().cuLaunchKernel(
                kernel.function(entry),
                blocks,
                1,
                1,
                BLOCK_THREADS,
                1,
                1,
                0,
                stream.0,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .map_err(|failure| self.error(failure))
    }

    /// Waits for one copy, also for one that failed: a part of it may run.
    fn finish(&self, stream: Stream, copied: Result<(), Failure>) -> Result<()> {
        // SAFETY: the stream belongs to the device and lives.
        let waited = unsafe { self.cuda().cuStreamSynchronize(stream.0) };
        copied.and(waited).map_err(|failure| self.error(failure))
    }
}

#[cfg(test)]
mod tests;
