//! A GPU in host memory, for tests: deferred execution, a current device per thread, IPC handles
//! that name whole allocations, and faults on demand.
//!
//! It is stricter than any real driver: a call outside its own device's scope fails, an export
//! gives fresh bytes each time, an allocation that is already mapped is refused.

mod exports;

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use sha2::{Digest, Sha256};

use self::exports::Opened;
pub use self::exports::{SimChunks, map_as_another_library};
use crate::compact::CompactDescriptor;
use crate::compact::Rows;
use crate::conformance::ApplicationStream;
use crate::device::{Allocation, Capabilities, Device, DeviceInfo, DeviceUuid, Export, Vendor};
use crate::driver::{Driver, Pinned};
use crate::error::{Error, Result};
use crate::gpu::GpuDevice;
use crate::host::{self, system_error, whole_pages};
use crate::kernel::Entry;
use crate::queue::{Consumer, CopyDescriptor, ProducerHandle};
use crate::software::{Executor, SharedMemory, expand, map, mirror, unmap};

thread_local! {
    static CURRENT: Cell<Option<u32>> = const { Cell::new(None) };
}

/// The calling thread's current simulated device; `None` on a thread that never touched one.
pub fn current_device() -> Option<u32> {
    CURRENT.get()
}

/// Sets the calling thread's current simulated device, as an application would.
pub fn set_current_device(ordinal: Option<u32>) {
    CURRENT.set(ordinal);
}

/// How a simulated GPU is made.
#[derive(Clone, Debug)]
pub struct SimOptions {
    /// Its number in this process.
    pub ordinal: u32,
    /// Whether a kernel compiler is found. Without one everything is DMA.
    pub kernel: bool,
    /// Whether other processes can open its memory.
    pub ipc: bool,
    /// Bytes of memory; more is out of memory.
    pub memory_bytes: u64,
    /// The GPU that it is a slice of (MIG): both have one PCI address and two identities.
    pub slice_of: Option<u32>,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self { ordinal: 0, kernel: true, ipc: true, memory_bytes: 64 << 30, slice_of: None }
    }
}

/// Opens a simulated GPU and the handle that makes it misbehave.
///
/// # Errors
/// [`Error::NoDevice`] if its thread cannot be started.
pub fn sim(options: &SimOptions) -> Result<(Arc<dyn Device>, Arc<SimControl>)> {
    let info = info(options);
    let no_thread =
        |error| Error::NoDevice { device: info.to_string(), reason: format!("no thread: {error}") };
    let executor = Executor::new(format!("kvferry-{info}")).map_err(no_thread)?;
    let control = Arc::new(SimControl {
        executor,
        device: info.to_string(),
        memory: Arc::default(),
        faults: Mutex::default(),
        live: [const { AtomicU64::new(0) }; Live::ALL.len()],
        capturing: Mutex::default(),
        work: Mutex::default(),
    });
    let driver = SimDriver {
        capacity: options.memory_bytes,
        memory: Arc::clone(&control.memory),
        pinned: SharedMemory::default(),
        opened: Mutex::default(),
        mirrors: Mutex::default(),
        used: Mutex::default(),
        control: Arc::clone(&control),
        info,
    };
    Ok((GpuDevice::new(driver)?, control))
}

fn info(options: &SimOptions) -> DeviceInfo {
    let digest = Sha256::digest(format!("kvferry simulated GPU {}", options.ordinal));
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&digest[..16]);
    let mut capabilities = Capabilities::empty();
    capabilities.set(Capabilities::KERNEL, options.kernel);
    capabilities.set(Capabilities::IPC, options.ipc);
    DeviceInfo {
        vendor: Vendor::Sim,
        ordinal: options.ordinal,
        name: "simulated GPU".into(),
        uuid: DeviceUuid(uuid),
        pci_bus_id: Some(format!("0000:{:02x}:00.0", options.slice_of.unwrap_or(options.ordinal))),
        architecture: "sim".into(),
        memory_bytes: options.memory_bytes,
        capabilities,
        kernel: if options.kernel { "simulated".into() } else { "none: no compiler".into() },
    }
}

/// Things of a device that can leak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Live {
    /// Allocations of device memory.
    Allocations,
    /// Allocations of pinned memory.
    Pinned,
    /// Mappings of other processes' memory.
    Mappings,
    /// Host memory of this process that is page-locked.
    HostMappings,
    /// Streams.
    Streams,
    /// Events.
    Events,
}

impl Live {
    const ALL: [Self; 6] = [
        Self::Allocations,
        Self::Pinned,
        Self::Mappings,
        Self::HostMappings,
        Self::Streams,
        Self::Events,
    ];
}

/// Makes a simulated GPU misbehave, and counts what it was asked.
#[derive(Debug)]
pub struct SimControl {
    executor: Executor,
    device: String,
    memory: Arc<SharedMemory>,
    faults: Mutex<Faults>,
    live: [AtomicU64; Live::ALL.len()],
    /// Streams of the application that are being captured into a graph.
    capturing: Mutex<HashSet<usize>>,
    work: Mutex<SimWork>,
}

/// What a device was given to do so far.
#[derive(Clone, Debug, Default)]
pub struct SimWork {
    /// kvferry's own streams that exist.
    pub streams: BTreeMap<usize, StreamWork>,
    /// What the launches shared out: descriptors, of compact ones their units.
    pub units: u64,
    /// Thread blocks of the largest launch.
    pub most_blocks: u32,
}

/// What one stream was given to do.
#[derive(Clone, Copy, Debug)]
pub struct StreamWork {
    /// As it was made.
    pub high_priority: bool,
    /// Copies and launches.
    pub calls: u64,
}

impl SimWork {
    /// Streams that were given anything.
    pub fn used_streams(&self) -> usize {
        self.streams.values().filter(|stream| stream.calls > 0).count()
    }
}

/// A stream of the application's: work that transfers wait for, or that waits for transfers.
#[derive(Debug)]
pub struct SimStream {
    stream: usize,
    gate: usize,
    control: Arc<SimControl>,
}

impl ApplicationStream for SimStream {
    fn handle(&self) -> *mut c_void {
        self.stream as *mut c_void
    }

    fn hold(&self) {
        self.control.executor.arm(self.gate);
        self.control.executor.wait(self.stream, self.gate);
    }

    fn open(&self) {
        self.control.executor.fire(self.gate);
    }

    unsafe fn fill(&self, addr: u64, byte: u8, len: u64) {
        let bytes: &'static [u8] = vec![byte; len as usize].leak();
        let copy = CopyDescriptor { src: bytes.as_ptr() as u64, dst: addr, len };
        // SAFETY: the caller's contract; the source stays.
        unsafe { self.control.executor.copy(self.stream, copy) };
    }

    fn record(&self) -> *mut c_void {
        let event = self.control.executor.create_event();
        self.control.executor.record(event, self.stream);
        event as *mut c_void
    }

    fn has_fired(&self, event: *mut c_void) -> bool {
        self.control.executor.fired(event as usize)
    }

    fn begin_capture(&self) {
        self.control.capturing().insert(self.stream);
    }

    fn end_capture(&self) -> bool {
        // Nothing else may have been recorded into the stream, or waits in it.
        self.control.capturing().remove(&self.stream) && self.control.executor.is_empty(self.stream)
    }
}

#[derive(Debug, Default)]
struct Faults {
    lost: bool,
    /// What mappings of other processes are from now on.
    corrupt: Option<Corrupt>,
    /// Per call: how many calls were made.
    calls: HashMap<&'static str, u64>,
    /// Per call: the numbers of the calls that fail, with the error.
    planned: HashMap<&'static str, BTreeMap<u64, Fault>>,
}

/// How a planned call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An error of the driver that has no further consequence.
    Refused,
    /// Out of memory.
    OutOfMemory,
    /// An error of the driver with this number.
    Code(i32),
    /// The device is lost from then on.
    Lost,
}

/// How memory of other processes goes wrong while every call succeeds (FAILURES.md B16).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Corrupt {
    Reads,
    Writes,
}

impl SimControl {
    /// The `nth` next call of that name (0 is the next one) fails.
    ///
    /// Names: `allocate free allocate_pinned allocation prepare_export export open import (each
    /// chunk of an open) close map_host unmap_host create_stream create_event record fired wait
    /// store wait_producer signal_consumer copy copy_rows launch launch_inline launch_compact write
    /// read enter`.
    pub fn fail(&self, call: &'static str, nth: u64, fault: Fault) {
        let mut faults = self.faults();
        let number = faults.calls.get(call).copied().unwrap_or(0) + nth + 1;
        faults.planned.entry(call).or_default().insert(number, fault);
    }

    /// Planned failures that have not come yet will not come.
    pub fn forget_failures(&self) {
        self.faults().planned.clear();
    }

    /// From now on nothing runs and no event fires.
    pub fn hold(&self) {
        self.executor.hold(true);
    }

    /// What was held runs.
    pub fn release(&self) {
        self.executor.hold(false);
    }

    /// A stream of the application's, beside kvferry's own.
    pub fn stream(self: &Arc<Self>) -> SimStream {
        SimStream {
            stream: self.executor.create_stream(),
            gate: self.executor.create_event(),
            control: Arc::clone(self),
        }
    }

    fn capturing(&self) -> MutexGuard<'_, HashSet<usize>> {
        self.capturing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on every call fails: the device fell off the bus.
    pub fn lose(&self) {
        self.faults().lost = true;
    }

    /// Mappings that are opened from now on are of other memory: reads through them give zeros, and
    /// writes arrive nowhere.
    pub fn corrupt_peer_reads(&self) {
        self.faults().corrupt = Some(Corrupt::Reads);
    }

    /// Mappings that are opened from now on can be read, and writes through them arrive nowhere.
    pub fn corrupt_peer_writes(&self) {
        self.faults().corrupt = Some(Corrupt::Writes);
    }

    /// Mappings that are opened from now on are good.
    pub fn heal_peer_memory(&self) {
        self.faults().corrupt = None;
    }

    /// How often a call was made.
    pub fn calls(&self, call: &'static str) -> u64 {
        self.faults().calls.get(call).copied().unwrap_or(0)
    }

    /// How many of a thing exist now.
    pub fn live(&self, what: Live) -> u64 {
        self.live[what as usize].load(Ordering::SeqCst)
    }

    /// What the device was given to do so far.
    pub fn work(&self) -> SimWork {
        self.lock_work().clone()
    }

    fn lock_work(&self) -> MutexGuard<'_, SimWork> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A stream is given a copy, or a launch of so many units and blocks.
    fn works(&self, stream: usize, units: u64, blocks: u32) {
        let mut work = self.lock_work();
        work.units += units;
        work.most_blocks = work.most_blocks.max(blocks);
        if let Some(stream) = work.streams.get_mut(&stream) {
            stream.calls += 1;
        }
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(&self, call: &'static str) -> Result<()> {
        let mut faults = self.faults();
        let count = faults.calls.entry(call).or_default();
        *count += 1;
        let number = *count;
        let planned = faults.planned.get_mut(call).and_then(|planned| planned.remove(&number));
        faults.lost |= planned == Some(Fault::Lost);
        if faults.lost {
            return Err(Error::Lost {
                device: self.device.clone(),
                cause: format!("{call} says the device is gone"),
            });
        }
        let device = self.device.clone();
        match planned {
            None => Ok(()),
            Some(Fault::OutOfMemory) => {
                Err(Error::OutOfMemory { device, kind: "device", bytes: 0 })
            }
            Some(fault) => {
                let code = if let Fault::Code(code) = fault { code } else { 1 };
                Err(Error::Call { call, device, name: "planned failure".into(), code })
            }
        }
    }

    fn born(&self, what: Live) {
        self.live[what as usize].fetch_add(1, Ordering::SeqCst);
    }

    fn gone(&self, what: Live) {
        self.live[what as usize].fetch_sub(1, Ordering::SeqCst);
    }
}

#[derive(Debug)]
struct SimDriver {
    info: DeviceInfo,
    capacity: u64,
    used: Mutex<u64>,
    memory: Arc<SharedMemory>,
    pinned: SharedMemory,
    /// Mappings of other processes' memory, by their first byte.
    opened: Mutex<HashMap<u64, Opened>>,
    /// Where local host memory is seen, by its first byte and length: never at its own address, as
    /// a device may have another one for it. Only private memory, which has no second place, is seen
    /// where it is.
    mirrors: Mutex<HashMap<(u64, u64), Vec<u64>>>,
    control: Arc<SimControl>,
}

/// As a real engine has: rows further apart than this are not one copy.
const MAX_PITCH: u64 = 1 << 31;

impl SimDriver {
    fn refuse_capture(&self, stream: usize) -> Result<()> {
        if !self.control.capturing().contains(&stream) {
            return Ok(());
        }
        Err(Error::NotOrderable {
            device: self.info.to_string(),
            what: "stream",
            reason: "it is being captured into a graph".into(),
        })
    }

    fn check_launch(&self, count: usize, blocks: u32) -> Result<()> {
        if count > 0 && (1..=65_535).contains(&blocks) {
            return Ok(());
        }
        Err(Error::Call {
            call: "launch",
            device: self.info.to_string(),
            name: format!("invalid configuration: {blocks} blocks, {count} descriptors"),
            code: 9,
        })
    }

    fn mirrors(&self) -> MutexGuard<'_, HashMap<(u64, u64), Vec<u64>>> {
        self.mirrors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses what a GPU could not reach: local host memory is there only where it is seen.
    fn check_access(
        &self,
        call: &'static str,
        mut copies: impl Iterator<Item = CopyDescriptor>,
    ) -> Result<()> {
        let mirrors = self.mirrors();
        let own = |addr: u64| {
            let inside =
                |&(&(host, len), _): &(&(u64, u64), &Vec<u64>)| addr.wrapping_sub(host) < len;
            mirrors.iter().find(inside).is_some_and(|(&(host, _), seen)| !seen.contains(&host))
        };
        if mirrors.is_empty() || !copies.any(|copy| own(copy.src) || own(copy.dst)) {
            return Ok(());
        }
        Err(Error::Call {
            call,
            device: self.info.to_string(),
            name: "illegal memory access: the processor's address of host memory".into(),
            code: 700,
        })
    }

    fn unknown(&self, addr: u64) -> Error {
        Error::UnknownAddress { device: self.info.to_string(), addr }
    }

    fn bad_export(&self, reason: impl Into<String>) -> Error {
        Error::BadExport { device: self.info.to_string(), reason: reason.into() }
    }

    /// Counts a call and checks that the thread entered this device's scope.
    fn call(&self, call: &'static str) -> Result<()> {
        self.control.call(call)?;
        if CURRENT.get() == Some(self.info.ordinal) {
            return Ok(());
        }
        Err(Error::Call {
            call,
            device: self.info.to_string(),
            name: "invalid device context".into(),
            code: 201,
        })
    }
}

/// Restores the thread's device.
#[derive(Debug)]
pub(crate) struct SimScope(Option<u32>);

impl Drop for SimScope {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}

impl Driver for SimDriver {
    type Scope<'a> = SimScope;
    type Stream = usize;
    type Event = usize;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn reaches(&self, other: &DeviceUuid) -> bool {
        *other == host::host_uuid()
    }

    fn enter(&self) -> Result<SimScope> {
        self.control.call("enter")?;
        Ok(SimScope(CURRENT.replace(Some(self.info.ordinal))))
    }

    fn allocate(&self, bytes: u64) -> Result<u64> {
        self.call("allocate")?;
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes > self.capacity - *used {
            return Err(Error::OutOfMemory {
                device: self.info.to_string(),
                kind: "device",
                bytes,
            });
        }
        let base = self
            .memory
            .allocate(bytes)
            .map_err(|error| system_error(&self.info, "memfd", bytes, error))?;
        *used += bytes;
        self.control.born(Live::Allocations);
        Ok(base)
    }

    fn free(&self, addr: u64) -> Result<()> {
        self.call("free")?;
        let allocation = self.memory.find(addr).ok_or_else(|| self.unknown(addr))?;
        self.memory.free(addr).ok_or_else(|| self.unknown(addr))?;
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) -= allocation.len;
        self.control.gone(Live::Allocations);
        Ok(())
    }

    fn allocate_pinned(&self, bytes: u64) -> Result<Pinned> {
        self.call("allocate_pinned")?;
        let base = self
            .pinned
            .allocate(bytes)
            .map_err(|error| system_error(&self.info, "memfd", bytes, error))?;
        self.control.born(Live::Pinned);
        Ok(Pinned { host: base as *mut u8, device: base, len: bytes })
    }

    fn free_pinned(&self, memory: Pinned) -> Result<()> {
        self.call("free_pinned")?;
        self.pinned.free(memory.device).ok_or_else(|| self.unknown(memory.device))?;
        self.control.gone(Live::Pinned);
        Ok(())
    }

    fn allocation(&self, addr: u64) -> Result<Allocation> {
        self.call("allocation")?;
        self.memory.find(addr).ok_or_else(|| self.unknown(addr))
    }

    fn export_unit(&self, addr: u64, len: u64) -> Result<Allocation> {
        self.call("allocation")?;
        self.unit(addr, len).ok_or_else(|| self.unknown(addr))
    }

    fn prepare_export(&self, unit: &Allocation) -> Result<Option<Export>> {
        self.call("prepare_export")?;
        self.check_export(unit)?;
        self.memory.chunk(unit.base).is_none().then(|| self.export_handle(unit)).transpose()
    }

    fn export(&self, unit: &Allocation) -> Result<Export> {
        self.check_export(unit)?;
        match self.memory.chunk(unit.base) {
            Some(_) => self.export_chunks(unit),
            None => self.export_handle(unit),
        }
    }

    fn open(&self, export: Export) -> Result<u64> {
        self.call("open")?;
        let (base, opened) = match export {
            Export::Handle { bytes, len } => self.open_handle(&bytes, len)?,
            Export::Chunks { chunks, len } => self.open_chunks(chunks, len)?,
            Export::File { fd, len } => {
                let base = map(fd.as_fd(), len)
                    .map_err(|error| system_error(&self.info, "mmap", len, error))?;
                (base, Opened::Shared)
            }
            Export::Pool { .. } => {
                return Err(self.bad_export("a simulated GPU has no memory pools"));
            }
        };
        self.opened().insert(base, opened);
        self.control.born(Live::Mappings);
        Ok(base)
    }

    fn close(&self, base: u64, len: u64) -> Result<()> {
        self.call("close")?;
        let opened = self.opened().remove(&base).ok_or_else(|| self.unknown(base))?;
        if let Opened::Handle { inode } = opened {
            exports::let_go(inode);
        }
        unmap(base, len);
        self.control.gone(Live::Mappings);
        Ok(())
    }

    fn map_host(&self, addr: u64, len: u64) -> Result<u64> {
        self.call("map_host")?;
        let (base, pages) = whole_pages(addr, len);
        let seen = match mirror(base, pages) {
            Ok(mirror) => mirror + (addr - base),
            // Private memory.
            Err(rustix::io::Errno::INVAL) => addr,
            Err(error) => return Err(system_error(&self.info, "mremap", pages, error)),
        };
        self.mirrors().entry((addr, len)).or_default().push(seen);
        self.control.born(Live::HostMappings);
        Ok(seen)
    }

    fn unmap_host(&self, addr: u64, len: u64) -> Result<()> {
        self.call("unmap_host")?;
        let mut mirrors = self.mirrors();
        let seen = mirrors.get_mut(&(addr, len)).and_then(Vec::pop);
        let seen = seen.ok_or_else(|| self.unknown(addr))?;
        mirrors.retain(|_, seen| !seen.is_empty());
        drop(mirrors);
        if seen != addr {
            let (mirror, pages) = whole_pages(seen, len);
            unmap(mirror, pages);
        }
        self.control.gone(Live::HostMappings);
        Ok(())
    }

    fn create_stream(&self, high_priority: bool) -> Result<usize> {
        self.call("create_stream")?;
        self.control.born(Live::Streams);
        let stream = self.control.executor.create_stream();
        let made = StreamWork { high_priority, calls: 0 };
        self.control.lock_work().streams.insert(stream, made);
        Ok(stream)
    }

    fn destroy_stream(&self, stream: usize) -> Result<()> {
        self.call("destroy_stream")?;
        self.control.executor.destroy_stream(stream);
        self.control.lock_work().streams.remove(&stream);
        self.control.gone(Live::Streams);
        Ok(())
    }

    fn create_event(&self) -> Result<usize> {
        self.call("create_event")?;
        self.control.born(Live::Events);
        Ok(self.control.executor.create_event())
    }

    fn destroy_event(&self, event: usize) -> Result<()> {
        self.call("destroy_event")?;
        self.control.executor.destroy_event(event);
        self.control.gone(Live::Events);
        Ok(())
    }

    fn record(&self, event: usize, stream: usize) -> Result<()> {
        self.call("record")?;
        self.control.executor.record(event, stream);
        Ok(())
    }

    fn fired(&self, event: usize) -> Result<bool> {
        self.call("fired")?;
        Ok(self.control.executor.fired(event))
    }

    fn wait(&self, stream: usize, event: usize) -> Result<()> {
        self.call("wait")?;
        self.control.executor.wait(stream, event);
        Ok(())
    }

    unsafe fn store(&self, stream: usize, word: u64, value: u32) -> Result<()> {
        self.call("store")?;
        // SAFETY: the caller's contract.
        unsafe { self.control.executor.store(stream, word, value) };
        Ok(())
    }

    fn wait_producer(&self, stream: usize, producer: ProducerHandle, event: usize) -> Result<()> {
        self.call("wait_producer")?;
        let executor = &self.control.executor;
        match producer {
            ProducerHandle::Stream(producer) => {
                self.refuse_capture(producer)?;
                executor.record(event, producer);
                executor.wait(stream, event);
            }
            ProducerHandle::Event(event) => executor.wait(stream, event),
            // SAFETY: what `HostWord::reaches` was promised.
            ProducerHandle::Word { word, value } => unsafe {
                executor.wait_word(stream, word, value);
            },
        }
        Ok(())
    }

    fn signal_consumer(&self, Consumer(consumer): Consumer, event: usize) -> Result<()> {
        self.call("signal_consumer")?;
        self.refuse_capture(consumer)?;
        self.control.executor.wait(consumer, event);
        Ok(())
    }

    fn warp_lanes(&self) -> u32 {
        32
    }

    fn resident_blocks(&self, _entry: Entry) -> u32 {
        u32::MAX
    }

    unsafe fn copy(&self, stream: usize, dst: u64, src: u64, len: u64) -> Result<()> {
        self.call("copy")?;
        self.check_access("copy", std::iter::once(CopyDescriptor { src, dst, len }))?;
        self.control.works(stream, 0, 0);
        // SAFETY: the caller's contract.
        unsafe { self.control.executor.copy(stream, CopyDescriptor { src, dst, len }) };
        Ok(())
    }

    unsafe fn copy_rows(&self, stream: usize, rows: Rows) -> Result<bool> {
        self.call("copy_rows")?;
        if rows.src_pitch.max(rows.dst_pitch) > MAX_PITCH {
            return Ok(false);
        }
        self.check_access("copy_rows", rows.descriptors())?;
        self.control.works(stream, 0, 0);
        // SAFETY: the caller's contract.
        rows.descriptors().for_each(|copy| unsafe { self.control.executor.copy(stream, copy) });
        Ok(true)
    }

    unsafe fn launch(
        &self,
        stream: usize,
        descriptors: u64,
        count: u32,
        blocks: u32,
    ) -> Result<()> {
        self.call("launch")?;
        self.check_launch(count as usize, blocks)?;
        // SAFETY: the caller's contract: `count` descriptors lie there.
        let copy = |at: usize| unsafe { (descriptors as *const CopyDescriptor).add(at).read() };
        self.check_access("launch", (0..count as usize).map(copy))?;
        self.control.works(stream, count.into(), blocks);
        // SAFETY: the caller's contract.
        unsafe { self.control.executor.launch(stream, descriptors, count) };
        Ok(())
    }

    unsafe fn launch_inline(
        &self,
        stream: usize,
        descriptors: &[CopyDescriptor],
        blocks: u32,
    ) -> Result<()> {
        self.call("launch_inline")?;
        self.check_launch(descriptors.len(), blocks)?;
        self.check_access("launch_inline", descriptors.iter().copied())?;
        self.control.works(stream, descriptors.len() as u64, blocks);
        // SAFETY: the caller's contract.
        unsafe { self.control.executor.launch_inline(stream, descriptors) };
        Ok(())
    }

    unsafe fn launch_compact(
        &self,
        stream: usize,
        descriptors: &[CompactDescriptor],
        blocks: u32,
    ) -> Result<()> {
        self.call("launch_compact")?;
        self.check_launch(descriptors.len(), blocks)?;
        // SAFETY: the caller's contract.
        self.check_access("launch_compact", unsafe { expand(descriptors) })?;
        let units = descriptors.last().map_or(0, |last| last.end);
        self.control.works(stream, units.into(), blocks);
        // SAFETY: the caller's contract.
        unsafe { self.control.executor.launch_compact(stream, descriptors) };
        Ok(())
    }

    unsafe fn write(&self, _stream: usize, addr: u64, bytes: &[u8]) -> Result<()> {
        self.call("write")?;
        // SAFETY: the caller says that the range is writable and nobody else's now.
        unsafe { (addr as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    unsafe fn read(&self, _stream: usize, addr: u64, bytes: &mut [u8]) -> Result<()> {
        self.call("read")?;
        // SAFETY: the caller says that the range is readable and nobody writes it now.
        unsafe { (addr as *const u8).copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}

/// A mapping of the file that is private, or one of no file at all.
fn map_corrupt(fd: BorrowedFd<'_>, len: u64, corrupt: Corrupt) -> rustix::io::Result<u64> {
    let (at, len) = (std::ptr::null_mut(), len as usize);
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice aliases nothing of ours.
    let base = unsafe {
        match corrupt {
            Corrupt::Reads => mmap_anonymous(at, len, protection, MapFlags::PRIVATE),
            Corrupt::Writes => mmap(at, len, protection, MapFlags::PRIVATE, fd, 0),
        }
    }?;
    Ok(base as u64)
}
