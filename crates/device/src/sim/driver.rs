//! The driver of a simulated GPU: memory of this process, and an executor that runs what streams
//! are given.

use std::cell::Cell;
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::control::{Live, SimControl, StreamWork};
use super::exports::{self, Opened};
use crate::compact::{CompactDescriptor, Rows};
use crate::device::{Allocation, DeviceInfo, DeviceUuid, Export};
use crate::driver::{Driver, Pinned};
use crate::error::{Error, Result};
use crate::host::{self, system_error, whole_pages};
use crate::kernel::{Claims, EndWord, Entry};
use crate::queue::{Consumer, CopyDescriptor, ProducerHandle};
use crate::software::{SharedMemory, expand, map, mirror, unmap};

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

#[derive(Debug)]
pub(super) struct SimDriver {
    pub(super) info: DeviceInfo,
    capacity: u64,
    used: Mutex<u64>,
    pub(super) memory: Arc<SharedMemory>,
    pinned: SharedMemory,
    /// Mappings of other processes' memory, by their first byte.
    pub(super) opened: Mutex<HashMap<u64, Opened>>,
    /// Where local host memory is seen, by its first byte and length: never at its own address, as
    /// a device may have another one for it. Only private memory, which has no second place, is seen
    /// where it is.
    mirrors: Mutex<HashMap<(u64, u64), Vec<u64>>>,
    pub(super) control: Arc<SimControl>,
}

/// As a real engine has: rows further apart than this are not one copy.
const MAX_PITCH: u64 = 1 << 31;

impl SimDriver {
    pub(super) fn new(info: DeviceInfo, control: Arc<SimControl>) -> Self {
        Self {
            capacity: info.memory_bytes,
            used: Mutex::default(),
            memory: Arc::clone(&control.memory),
            pinned: SharedMemory::default(),
            opened: Mutex::default(),
            mirrors: Mutex::default(),
            control,
            info,
        }
    }

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

    pub(super) fn unknown(&self, addr: u64) -> Error {
        Error::UnknownAddress { device: self.info.to_string(), addr }
    }

    pub(super) fn bad_export(&self, reason: impl Into<String>) -> Error {
        Error::BadExport { device: self.info.to_string(), reason: reason.into() }
    }

    /// Counts a call and checks that the thread entered this device's scope.
    pub(super) fn call(&self, call: &'static str) -> Result<()> {
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
    const LAUNCHES_STORE_WORDS: bool = true;

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
        self.control.lock_work().words += 1;
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

    unsafe fn launch_claimed(
        &self,
        stream: usize,
        descriptors: u64,
        count: u32,
        blocks: u32,
        claims: &Claims,
    ) -> Result<()> {
        self.call("launch_claimed")?;
        self.check_launch(count as usize, blocks.saturating_sub(claims.blocks))?;
        // SAFETY: the caller's contract: `count` descriptors lie there.
        let copy = |at: usize| unsafe { (descriptors as *const CopyDescriptor).add(at).read() };
        self.check_access("launch_claimed", (0..count as usize).map(copy))?;
        self.control.works(stream, count.into(), blocks);
        // SAFETY: the caller's contract.
        unsafe { self.control.executor.launch_claimed(stream, descriptors, count, *claims) };
        Ok(())
    }

    unsafe fn clear(&self, stream: usize, addr: u64, bytes: u64) -> Result<()> {
        self.call("clear")?;
        // SAFETY: the caller's contract.
        unsafe { self.control.executor.clear(stream, addr, bytes) };
        Ok(())
    }

    unsafe fn launch_inline(
        &self,
        stream: usize,
        descriptors: &[CopyDescriptor],
        blocks: u32,
        end: Option<EndWord>,
    ) -> Result<()> {
        self.call("launch_inline")?;
        self.check_launch(descriptors.len(), blocks)?;
        self.check_access("launch_inline", descriptors.iter().copied())?;
        self.control.works(stream, descriptors.len() as u64, blocks);
        // SAFETY: the caller's contract.
        unsafe { self.control.executor.launch_inline(stream, descriptors) };
        if let Some(end) = end {
            self.control.lock_work().words += 1;
            // SAFETY: the caller's contract.
            unsafe { self.control.executor.store(stream, end.address, end.value) };
        }
        Ok(())
    }

    unsafe fn launch_compact(
        &self,
        stream: usize,
        descriptors: &[CompactDescriptor],
        blocks: u32,
        end: Option<EndWord>,
    ) -> Result<()> {
        self.call("launch_compact")?;
        self.check_launch(descriptors.len(), blocks)?;
        // SAFETY: the caller's contract.
        self.check_access("launch_compact", unsafe { expand(descriptors) })?;
        let units = descriptors.last().map_or(0, |last| last.end);
        self.control.works(stream, units.into(), blocks);
        // SAFETY: the caller's contract.
        unsafe { self.control.executor.launch_compact(stream, descriptors) };
        if let Some(end) = end {
            self.control.lock_work().words += 1;
            // SAFETY: the caller's contract.
            unsafe { self.control.executor.store(stream, end.address, end.value) };
        }
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
