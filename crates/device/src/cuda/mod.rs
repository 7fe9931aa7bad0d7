//! NVIDIA GPUs through libcuda, which is opened at run time.
//!
//! Works in the devices' primary contexts, beside whatever else the process does there, and
//! leaves each thread's current context as it was. Nothing here uses the legacy default stream,
//! waits for a whole device, or panics because a library or a symbol is missing.

mod compile;
mod context;
mod identity;
mod ipc;
mod library;
pub(crate) mod load;

use std::ffi::{c_int, c_uint, c_void};
use std::path::PathBuf;
use std::sync::Arc;

use cudarc::driver::sys;

use self::compile::Kernel;
use self::context::{Context, Scope};
use self::library::{Cuda, Failure};
use crate::device::{Allocation, Capabilities, Device, DeviceInfo, DeviceUuid, Export};
use crate::driver::{Driver, Pinned};
use crate::error::{Error, Result};
use crate::gpu::GpuDevice;
use crate::kernel::{BLOCK_THREADS, CodeCache};

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
    kernel: Option<Kernel>,
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
        let kernel = open_kernel(&context, capability, options, &mut info);
        context.connect();
        Ok(Self { info, peers, high_priority, kernel, context })
    }

    fn cuda(&self) -> &'static Cuda {
        self.context.cuda
    }

    fn error(&self, failure: Failure) -> Error {
        self.context.error(failure)
    }

    fn allocation_error(&self, failure: Failure, kind: &'static str, bytes: u64) -> Error {
        if failure.is(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) {
            return Error::OutOfMemory { device: self.info.to_string(), kind, bytes };
        }
        self.error(failure)
    }

    fn unknown(&self, addr: u64) -> Error {
        Error::UnknownAddress { device: self.info.to_string(), addr }
    }

    /// What the driver knows of an address; `None` if it knows nothing.
    fn attributes(&self, addr: u64) -> Result<Option<PointerAttributes>> {
        let mut found = PointerAttributes::default();
        use sys::CUpointer_attribute as Attribute;
        let mut names = [
            Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID,
            Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        ];
        let mut values: [*mut c_void; 6] = [
            (&raw mut found.memory_type).cast(),
            (&raw mut found.ordinal).cast(),
            (&raw mut found.start).cast(),
            (&raw mut found.len).cast(),
            (&raw mut found.id).cast(),
            (&raw mut found.legacy_ipc).cast(),
        ];
        // SAFETY: both arrays have six entries, and each value points to a field of the size that
        // NVIDIA documents for its attribute. The address is only looked up.
        let known = unsafe {
            self.cuda().cuPointerGetAttributes(
                names.len() as c_uint,
                names.as_mut_ptr(),
                values.as_mut_ptr(),
                addr,
            )
        };
        use sys::CUresult::{CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_VALUE};
        match known {
            Ok(()) => Ok((found.len > 0).then_some(found)),
            // The driver's words for "not mine".
            Err(failure)
                if failure.is(CUDA_ERROR_INVALID_VALUE)
                    || failure.is(CUDA_ERROR_INVALID_CONTEXT) =>
            {
                Ok(None)
            }
            Err(failure) => Err(self.error(failure)),
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct PointerAttributes {
    memory_type: c_uint,
    ordinal: c_int,
    start: sys::CUdeviceptr,
    len: usize,
    id: u64,
    /// One byte for the driver; the rest stays zero.
    legacy_ipc: u64,
}

fn open_kernel(
    context: &Arc<Context>,
    capability: u32,
    options: &CudaOptions,
    info: &mut DeviceInfo,
) -> Option<Kernel> {
    if !options.kernel {
        info.kernel = "none: turned off".into();
        return None;
    }
    let cache = CodeCache { directory: options.cache_directory.clone() };
    match Kernel::prepare(context, capability, &cache) {
        Ok((kernel, origin)) => {
            info.kernel = origin;
            info.capabilities |= Capabilities::KERNEL;
            Some(kernel)
        }
        Err(none) => {
            tracing::warn!(device = %context, reason = %none.reason, log = %none.log, "no copy kernel: all copies are DMA");
            info.kernel = format!("none: {}", none.reason);
            None
        }
    }
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

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn reaches(&self, other: &DeviceUuid) -> bool {
        *other == self.info.uuid || (self.peers.contains(other) && self.context.may_reach(other))
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
        let found = self.attributes(addr)?.filter(|found| {
            let memory_type = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint;
            found.memory_type == memory_type
                && u32::try_from(found.ordinal) == Ok(self.info.ordinal)
        });
        let found = found.ok_or_else(|| self.unknown(addr))?;
        Ok(Allocation { base: found.start, len: found.len as u64, id: found.id })
    }

    fn export(&self, allocation: &Allocation) -> Result<Export> {
        self.export_handle(allocation)
    }

    fn open(&self, export: Export) -> Result<u64> {
        self.open_handle(export)
    }

    fn close(&self, mapped: u64, _len: u64) -> Result<()> {
        // SAFETY: the `Mapping` that owned the address is being dropped, once.
        unsafe { self.cuda().cuIpcCloseMemHandle(mapped) }.map_err(|failure| self.error(failure))
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

    fn warp_lanes(&self) -> u32 {
        32
    }

    unsafe fn copy(&self, stream: Stream, dst: u64, src: u64, len: u64) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the caller's contract. With unified addresses the driver finds out by itself
        // what each side is.
        unsafe { self.cuda().cuMemcpyAsync(dst, src, len as usize, stream.0) }
            .map_err(|failure| self.error(failure))
    }

    unsafe fn launch(
        &self,
        stream: Stream,
        descriptors: u64,
        count: u32,
        blocks: u32,
    ) -> Result<()> {
        let Some(kernel) = &self.kernel else {
            return Err(Error::Call {
                call: "cuLaunchKernel",
                device: self.info.to_string(),
                name: self.info.kernel.clone(),
                code: 0,
            });
        };
        let (mut descriptors, mut count) = (descriptors, count);
        // The driver copies what these point to before the call returns.
        let mut arguments: [*mut c_void; 2] =
            [(&raw mut descriptors).cast(), (&raw mut count).cast()];
        // SAFETY: the kernel takes (u64, u32); the rest is the caller's contract.
        unsafe {
            self.cuda().cuLaunchKernel(
                kernel.function,
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

    unsafe fn write(&self, stream: Stream, addr: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's contract; `bytes` outlives the copy, which is waited for below.
        let copied = unsafe {
            self.cuda().cuMemcpyHtoDAsync_v2(addr, bytes.as_ptr().cast(), bytes.len(), stream.0)
        };
        self.finish(stream, copied)
    }

    unsafe fn read(&self, stream: Stream, addr: u64, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's contract; `bytes` outlives the copy, which is waited for below.
        let copied = unsafe {
            self.cuda().cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), addr, bytes.len(), stream.0)
        };
        self.finish(stream, copied)
    }
}

impl CudaDriver {
    /// Waits for one copy, also for one that failed: a part of it may run.
    fn finish(&self, stream: Stream, copied: Result<(), Failure>) -> Result<()> {
        // SAFETY: the stream belongs to the device and lives.
        let waited = unsafe { self.cuda().cuStreamSynchronize(stream.0) };
        copied.and(waited).map_err(|failure| self.error(failure))
    }
}

#[cfg(test)]
mod tests;
