//! AMD GPUs through libamdhip64, which is opened at run time.
//!
//! Works beside whatever else the process does on the devices, and leaves each thread's current
//! device and pending error as they were. Nothing here uses the legacy default stream or panics
//! because a library or a symbol is missing. HIP itself waits for the whole device when memory is
//! freed or a mapping of another process is closed, which happens when nothing uses them.

#[cfg(feature = "testing")]
mod application;
mod compile;
mod context;
#[cfg(test)]
mod fake;
mod functions;
mod host_memory;
mod identity;
mod ipc;
mod library;
mod module;
mod order;
mod pointers;
mod report;
mod search;
#[cfg(feature = "testing")]
pub mod testing;
mod virtual_memory;

#[cfg(feature = "testing")]
pub use self::application::application_stream;
pub use self::library::DEFAULT_LIBRARY_DIRECTORY;
pub use self::report::{CompilerReport, LibraryReport, describe};

use std::ffi::{c_int, c_void};
use std::path::PathBuf;
use std::sync::Arc;

use hip_sys as sys;

use self::context::{Context, PendingError, Scope};
use self::functions::Failure;
use self::host_memory::LOCKS;
use self::ipc::Opened;
use self::library::Hip;
use self::module::Kernel;
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

/// How ROCm devices are opened.
#[derive(Clone, Debug)]
pub struct RocmOptions {
    /// Whether to load the copy kernel. Without it everything is DMA.
    pub kernel: bool,
    /// Where compiled kernels are kept; `None` compiles at each open.
    pub cache_directory: Option<PathBuf>,
    /// Folders of ROCm's libraries, looked into after all places that the loader knows. The first
    /// device that a process opens decides.
    pub library_directories: Vec<PathBuf>,
}

impl Default for RocmOptions {
    fn default() -> Self {
        let library_directories = vec![DEFAULT_LIBRARY_DIRECTORY.into()];
        Self { kernel: true, cache_directory: None, library_directories }
    }
}

/// Number of AMD GPUs that this process sees, at least 1.
///
/// # Errors
/// [`Error::LibraryMissing`] or [`Error::SymbolMissing`] if libamdhip64 cannot be used, and
/// [`Error::NoDevice`] with HIP's word if it is there and sees no GPU.
pub fn count(options: &RocmOptions) -> Result<u32> {
    let hip = Hip::load(&options.library_directories)?;
    let _pending = PendingError::of_thread(hip);
    identity::count(hip, "rocm")
}

/// Opens GPU `ordinal` and loads its copy kernel, compiled where the cache has none, so that no
/// transfer waits for it. A device whose kernel cannot be had is opened without one.
///
/// Devices of one process that can reach each other's memory are connected as they are opened.
///
/// # Errors
/// As [`count`]; [`Error::NoDevice`] also if there are fewer GPUs than that.
pub fn open(ordinal: u32, options: &RocmOptions) -> Result<Arc<dyn Device>> {
    Ok(GpuDevice::new(RocmDriver::open(ordinal, options)?)?)
}

/// A GPU.
#[derive(Debug)]
struct RocmDriver {
    info: DeviceInfo,
    /// Visible devices whose memory this one can use.
    peers: Vec<DeviceUuid>,
    high_priority: c_int,
    multiprocessors: u32,
    /// Threads of a wave: 64 on CDNA, 32 on RDNA.
    wave: u32,
    /// Bytes that two rows of one DMA are apart at most.
    most_pitch: u64,
    kernel: Option<Kernel>,
    /// Whether it can use host memory that is page-locked where it is.
    reaches_host: bool,
    opened: Openings<Opened>,
    context: Arc<Context>,
}

impl RocmDriver {
    fn open(ordinal: u32, options: &RocmOptions) -> Result<Self> {
        let asked = format!("rocm:{ordinal}");
        let hip = Hip::load(&options.library_directories)?;
        let _pending = PendingError::of_thread(hip);
        let count = identity::count(hip, &asked)?;
        if ordinal >= count {
            let reason = format!(
                "this process sees {count} of them, numbered from 0; HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES may hide more"
            );
            return Err(Error::NoDevice { device: asked, reason });
        }
        let error = |failure| hip.error(failure, &asked);
        let device = identity::device(hip, ordinal).map_err(error)?;
        let mut info = identity::info(hip, device, ordinal).map_err(error)?;
        let peers = identity::peers(hip, device, count).map_err(error)?;
        info.capabilities.set(Capabilities::PEER, !peers.is_empty());
        let context = Context::new(hip, device, info.uuid);
        let high_priority = {
            let _scope = context.enter()?;
            let (mut least, mut greatest) = (0, 0);
            // SAFETY: the device is the thread's; HIP writes two numbers.
            unsafe { hip.hipDeviceGetStreamPriorityRange(&mut least, &mut greatest) }
                .map_err(error)?;
            greatest
        };
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: HIP writes one number.
            unsafe { hip.hipDeviceGetAttribute(&mut value, attribute, device) }.map_err(error)?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        let multiprocessors = attribute(sys::hipDeviceAttributeMultiprocessorCount)?;
        let wave = attribute(sys::hipDeviceAttributeWarpSize)?.clamp(1, BLOCK_THREADS);
        let most_pitch = attribute(sys::hipDeviceAttributeMaxPitch)?.into();
        let reaches_host = attribute(sys::hipDeviceAttributeCanMapHostMemory)? != 0;
        let kernel = Kernel::open(&context, options, &mut info);
        context.connect();
        let opened = Openings::default();
        Ok(Self {
            info,
            peers,
            high_priority,
            multiprocessors,
            wave,
            most_pitch,
            kernel,
            reaches_host,
            opened,
            context,
        })
    }

    fn hip(&self) -> &'static Hip {
        self.context.hip
    }

    fn error(&self, failure: Failure) -> Error {
        self.context.error(failure)
    }

    fn unknown(&self, addr: u64) -> Error {
        Error::UnknownAddress { device: self.info.to_string(), addr }
    }
}

/// Of a copy that crosses the border of a lock, among others.
fn is_refusal(failure: &Failure) -> bool {
    failure.is(sys::hipErrorInvalidValue)
}

#[derive(Clone, Copy, Debug)]
struct Stream(sys::hipStream_t);

// SAFETY: a stream is a name that HIP takes on any thread.
unsafe impl Send for Stream {}

#[derive(Clone, Copy, Debug)]
struct Event(sys::hipEvent_t);

// SAFETY: an event is a name that HIP takes on any thread.
unsafe impl Send for Event {}

impl Driver for RocmDriver {
    type Scope<'a> = Scope<'a>;
    type Stream = Stream;
    type Event = Event;
    const LAUNCHES_STORE_WORDS: bool = false;

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
        let mut addr = std::ptr::null_mut();
        // SAFETY: the scope is entered; HIP writes one address.
        unsafe { self.hip().hipMalloc(&mut addr, bytes as usize) }
            .map_err(|failure| self.context.allocation_error(failure, "device", bytes))?;
        Ok(addr as u64)
    }

    fn free(&self, addr: u64) -> Result<()> {
        // SAFETY: the `Memory` that owned the address is being dropped, once.
        unsafe { self.hip().hipFree(addr as *mut c_void) }.map_err(|failure| self.error(failure))
    }

    fn allocate_pinned(&self, bytes: u64) -> Result<Pinned> {
        // Coherent, whatever HIP_HOST_COHERENT says: the processor and a running kernel see each
        // other's writes. Not write-combined: the processor reads it back.
        let flags =
            sys::hipHostMallocPortable | sys::hipHostMallocMapped | sys::hipHostMallocCoherent;
        let mut host = std::ptr::null_mut();
        // SAFETY: the scope is entered; HIP writes one pointer.
        unsafe { self.hip().hipHostMalloc(&mut host, bytes as usize, flags) }
            .map_err(|failure| self.context.allocation_error(failure, "pinned host", bytes))?;
        let mut addr = std::ptr::null_mut();
        // SAFETY: `host` was just allocated, mapped.
        let mapped = unsafe { self.hip().hipHostGetDevicePointer(&mut addr, host, 0) };
        let memory = Pinned { host: host.cast(), device: addr as u64, len: bytes };
        if let Err(failure) = mapped {
            let _ = self.free_pinned(memory);
            return Err(self.error(failure));
        }
        Ok(memory)
    }

    fn free_pinned(&self, memory: Pinned) -> Result<()> {
        // SAFETY: the memory's owner frees it once, when no work uses it any more.
        unsafe { self.hip().hipHostFree(memory.host.cast()) }.map_err(|failure| self.error(failure))
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
            Export::Pool { .. } => {
                return Err(self.bad_export("it is of a memory pool, and HIP exports none"));
            }
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
        let priority = if high_priority { self.high_priority } else { 0 };
        let mut stream = std::ptr::null_mut();
        let flags = sys::hipStreamNonBlocking;
        // SAFETY: the scope is entered; HIP writes one stream.
        unsafe { self.hip().hipStreamCreateWithPriority(&mut stream, flags, priority) }
            .map_err(|failure| self.error(failure))?;
        Ok(Stream(stream))
    }

    fn destroy_stream(&self, stream: Stream) -> Result<()> {
        // SAFETY: the stream's owner destroys it once.
        unsafe { self.hip().hipStreamDestroy(stream.0) }.map_err(|failure| self.error(failure))
    }

    fn create_event(&self) -> Result<Event> {
        // When it fires, the caches of the GPU have been written back so far that the processor
        // and other GPUs see the bytes. HIP does so without a flag, too, but may be told not to;
        // hipEventDisableSystemFence, which is quicker, would leave them in the L2 cache.
        let flags = sys::hipEventDisableTiming | sys::hipEventReleaseToSystem;
        let mut event = std::ptr::null_mut();
        // SAFETY: the scope is entered; HIP writes one event.
        unsafe { self.hip().hipEventCreateWithFlags(&mut event, flags) }
            .map_err(|failure| self.error(failure))?;
        Ok(Event(event))
    }

    fn destroy_event(&self, event: Event) -> Result<()> {
        // SAFETY: the event's owner destroys it once.
        unsafe { self.hip().hipEventDestroy(event.0) }.map_err(|failure| self.error(failure))
    }

    fn record(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: both belong to the queue that asks, and live.
        unsafe { self.hip().hipEventRecord(event.0, stream.0) }
            .map_err(|failure| self.error(failure))
    }

    fn fired(&self, event: Event) -> Result<bool> {
        // SAFETY: the event belongs to the queue that asks, and lives.
        match unsafe { self.hip().hipEventQuery(event.0) } {
            Ok(()) => Ok(true),
            Err(failure) if failure.is(sys::hipErrorNotReady) => Ok(false),
            Err(failure) => Err(self.error(failure)),
        }
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        // SAFETY: both belong to the queue that asks, and live.
        unsafe { self.hip().hipStreamWaitEvent(stream.0, event.0, 0) }
            .map_err(|failure| self.error(failure))
    }

    unsafe fn store(&self, stream: Stream, word: u64, value: u32) -> Result<()> {
        // HIP puts a barrier before it that writes the caches back for the whole system (ROCm/clr,
        // submitStreamOperation). hipDeviceAttributeCanUseStreamWaitValue is not asked: it is about
        // waiting.
        // SAFETY: the caller's contract.
        unsafe { self.hip().hipStreamWriteValue32(stream.0, word as *mut c_void, value, 0) }
            .map_err(|failure| self.error(failure))
    }

    fn wait_producer(&self, stream: Stream, producer: ProducerHandle, event: Event) -> Result<()> {
        match producer {
            ProducerHandle::Stream(handle) => {
                let producer = self.orderable(handle)?;
                // SAFETY: `Producer::stream` was promised a stream that lives; the event is ours.
                unsafe { self.hip().hipEventRecord(event.0, producer) }
                    .map_err(|failure| self.not_orderable("stream", failure))?;
                self.wait(stream, event)
            }
            ProducerHandle::Event(handle) => {
                // SAFETY: `Producer::event` was promised an event that lives; the stream is ours.
                unsafe { self.hip().hipStreamWaitEvent(stream.0, handle as sys::hipEvent_t, 0) }
                    .map_err(|failure| self.not_orderable("event", failure))
            }
        }
    }

    fn signal_consumer(&self, Consumer(handle): Consumer, event: Event) -> Result<()> {
        let consumer = self.orderable(handle)?;
        // SAFETY: `Consumer::stream` was promised a stream that lives; the event is ours.
        unsafe { self.hip().hipStreamWaitEvent(consumer, event.0, 0) }
            .map_err(|failure| self.not_orderable("stream", failure))
    }

    fn warp_lanes(&self) -> u32 {
        self.wave
    }

    fn resident_blocks(&self, entry: Entry) -> u32 {
        let kernel = self.kernel.as_ref();
        kernel.map_or(1, |kernel| self.multiprocessors * kernel.blocks_per_multiprocessor(entry))
    }

    unsafe fn copy(&self, stream: Stream, dst: u64, src: u64, len: u64) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the caller's contract.
        unsafe { self.copy_bytes(stream, dst, src, len) }.map_err(|failure| self.error(failure))
    }

    unsafe fn copy_rows(&self, stream: Stream, rows: Rows) -> Result<bool> {
        let Rows { len, src_pitch, dst_pitch, count, .. } = rows;
        if len == 0 || count == 0 {
            return Ok(true);
        }
        if src_pitch.max(dst_pitch) > self.most_pitch || src_pitch.min(dst_pitch) < len {
            return Ok(false);
        }
        let copy = |dst: u64, src: u64, len: u64| {
            // SAFETY: the caller's contract, of a row or a part of one.
            unsafe { self.copy_bytes(stream, dst, src, len) }
        };
        let block = |rows: Rows| {
            // SAFETY: the caller's contract, for every row.
            unsafe {
                self.hip().hipMemcpy2DAsync(
                    rows.dst as *mut c_void,
                    dst_pitch as usize,
                    rows.src as *const c_void,
                    src_pitch as usize,
                    len as usize,
                    rows.count as usize,
                    sys::hipMemcpyDefault,
                    stream.0,
                )
            }
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
        unsafe {
            self.hip().hipMemsetD8Async(addr as sys::hipDeviceptr_t, 0, bytes as usize, stream.0)
        }
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
        let (host, len) = (bytes.as_ptr().expose_provenance() as u64, bytes.len() as u64);
        // SAFETY: the caller's contract; `bytes` outlives the copy, which is waited for below.
        let copied = unsafe { self.copy_bytes(stream, addr, host, len) };
        self.finish(stream, copied)
    }

    unsafe fn read(&self, stream: Stream, addr: u64, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let (host, len) = (bytes.as_mut_ptr().expose_provenance() as u64, bytes.len() as u64);
        // SAFETY: the caller's contract; `bytes` outlives the copy, which is waited for below.
        let copied = unsafe { self.copy_bytes(stream, host, addr, len) };
        self.finish(stream, copied)
    }
}

impl RocmDriver {
    /// HIP finds out by itself what each side is.
    ///
    /// # Safety
    /// As [`Driver::copy`].
    unsafe fn copy_bytes(
        &self,
        stream: Stream,
        dst: u64,
        src: u64,
        len: u64,
    ) -> Result<(), Failure> {
        LOCKS.copy([dst, src], len, is_refusal, |dst, src, len| {
            let (dst, src) = (dst as *mut c_void, src as *const c_void);
            let kind = sys::hipMemcpyDefault;
            // SAFETY: the caller's contract.
            unsafe { self.hip().hipMemcpyAsync(dst, src, len as usize, kind, stream.0) }
        })
    }

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
                call: "hipModuleLaunchKernel",
                device: self.info.to_string(),
                name: self.info.kernel.clone(),
                code: 0,
            });
        };
        // SAFETY: the caller's contract. HIP copies the arguments before the call returns.
        unsafe {
            self.hip().hipModuleLaunchKernel(
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
        let waited = unsafe { self.hip().hipStreamSynchronize(stream.0) };
        copied.and(waited).map_err(|failure| self.error(failure))
    }
}
