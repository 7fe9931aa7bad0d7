//! All memory that the library knows, and what `hipMalloc` allocates: files in memory, so that
//! another process can map them.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hip_sys::*;
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use super::capture;
use super::device::{check_device, current_device};
use super::stream::wait_for_device;
use super::virtual_memory::Physical;
use crate::call::{Result, put};
use crate::settings::settings;

/// What made a range.
#[derive(Clone, Debug)]
pub(super) enum Kind {
    /// `hipMalloc`.
    Device,
    /// `hipHostMalloc`.
    Host,
    /// `hipHostRegister`: the memory is the application's.
    Registered,
    /// `hipIpcOpenMemHandle`: memory of another process, opened so many times.
    Opened { inode: u64, users: usize },
    /// `hipMemMap`.
    Chunk(Arc<Physical>),
    /// `hipMallocFromPoolAsync`, from the pool of that handle.
    Pool(usize),
    /// `hipMemPoolImportPointer`, likewise.
    Imported(usize),
}

#[derive(Clone, Debug)]
pub(super) struct Range {
    pub(super) base: u64,
    pub(super) len: u64,
    /// Never that of another range, of this process.
    pub(super) id: u32,
    pub(super) device: c_int,
    pub(super) kind: Kind,
    /// None of memory that cannot be mapped elsewhere.
    pub(super) file: Option<Arc<OwnedFd>>,
}

impl Range {
    pub(super) fn is_host(&self) -> bool {
        matches!(self.kind, Kind::Host | Kind::Registered)
    }
}

#[derive(Debug, Default)]
pub(super) struct Memory {
    /// By first byte; none overlap.
    ranges: BTreeMap<u64, Range>,
    last_id: u32,
    /// Bytes that are allocated, of each device.
    used: BTreeMap<c_int, u64>,
}

pub(super) fn memory() -> MutexGuard<'static, Memory> {
    static MEMORY: Mutex<Memory> =
        Mutex::new(Memory { ranges: BTreeMap::new(), last_id: 0, used: BTreeMap::new() });
    MEMORY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A word that streams wait for and write.
#[derive(Clone, Copy, Debug)]
pub(super) struct Word(&'static AtomicU32);

impl Word {
    pub(super) fn load(self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    pub(super) fn store(self, value: u32) {
        self.0.store(value, Ordering::Release);
    }
}

impl Memory {
    /// The range that an address lies in.
    pub(super) fn find(&self, addr: u64) -> Option<&Range> {
        let (_, range) = self.ranges.range(..=addr).next_back()?;
        (addr - range.base < range.len).then_some(range)
    }

    pub(super) fn known(&self, addr: *const c_void) -> Result<&Range> {
        self.find(addr.addr() as u64).ok_or(hipErrorInvalidValue)
    }

    pub(super) fn chunks(&self) -> impl Iterator<Item = &Arc<Physical>> {
        self.ranges.values().filter_map(|range| match &range.kind {
            Kind::Chunk(physical) => Some(physical),
            _ => None,
        })
    }

    /// Where the memory with that inode, of another process, is mapped.
    pub(super) fn opened(&self, inode: u64) -> Option<u64> {
        let wanted = inode;
        let opened =
            |range: &&Range| matches!(range.kind, Kind::Opened { inode, .. } if inode == wanted);
        self.ranges.values().find(opened).map(|range| range.base)
    }

    /// The range that begins at an address.
    pub(super) fn at(&mut self, base: u64) -> Option<&mut Range> {
        self.ranges.get_mut(&base)
    }

    pub(super) fn overlaps(&self, base: u64, len: u64) -> bool {
        let before = self.ranges.range(..base.saturating_add(len)).next_back();
        before.is_some_and(|(_, range)| range.base + range.len > base)
    }

    /// Whether memory at `addr` has a part in a registration and a part that is not in it: what
    /// copies of AMD's library and of NVIDIA's driver refuse.
    pub(super) fn leaves_registered(&self, addr: u64, len: u64) -> bool {
        let Some(end) = addr.checked_add(len) else { return true };
        let mut touched = self
            .ranges
            .range(..end)
            .rev()
            .map(|(_, range)| range)
            .take_while(|range| range.base + range.len > addr);
        touched.any(|range| {
            matches!(range.kind, Kind::Registered)
                && (addr < range.base || end > range.base + range.len)
        })
    }

    pub(super) fn insert(
        &mut self,
        base: u64,
        len: u64,
        device: c_int,
        kind: Kind,
        file: Option<Arc<OwnedFd>>,
    ) {
        self.last_id += 1;
        let id = self.last_id;
        self.ranges.insert(base, Range { base, len, id, device, kind, file });
    }

    pub(super) fn remove(&mut self, base: u64) -> Option<Range> {
        self.ranges.remove(&base)
    }

    /// Books bytes of a device, which has only so many.
    pub(super) fn take(&mut self, device: c_int, bytes: u64) -> Result {
        let used = self.used.entry(device).or_default();
        let sum = used.checked_add(bytes).filter(|&sum| sum <= settings().memory_bytes);
        *used = sum.ok_or(hipErrorOutOfMemory)?;
        Ok(())
    }

    pub(super) fn give_back(&mut self, device: c_int, bytes: u64) {
        let used = self.used.entry(device).or_default();
        *used = used.saturating_sub(bytes);
    }

    /// The word at an address that the library knows.
    pub(super) fn word(&self, addr: *mut c_void) -> Result<Word> {
        let at = addr.addr() as u64;
        let inside = self.find(at).is_some_and(|range| range.base + range.len - at >= 4);
        if !inside || !at.is_multiple_of(4) {
            return Err(hipErrorInvalidValue);
        }
        let word: *const AtomicU32 = std::ptr::with_exposed_provenance(addr.addr());
        // SAFETY: aligned and inside memory that is mapped; a caller that frees it while a stream
        // still uses it breaks HIP's contract, as with a GPU.
        Ok(Word(unsafe { &*word }))
    }
}

/// A new file in memory; its pages are taken when first touched.
pub(super) fn new_file(len: u64) -> Result<OwnedFd> {
    let file =
        memfd_create("kvferry-hip-shim", MemfdFlags::CLOEXEC).map_err(|_| hipErrorOutOfMemory)?;
    ftruncate(&file, len).map_err(|_| hipErrorOutOfMemory)?;
    Ok(file)
}

/// Maps the first `len` bytes of a file, which has so many.
pub(super) fn map(file: &OwnedFd, len: u64) -> Result<u64> {
    let size = fstat(file).map_err(|_| hipErrorInvalidValue)?.st_size;
    if len == 0 || u64::try_from(size).map_or(true, |size| size < len) {
        return Err(hipErrorInvalidValue);
    }
    let (access, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: a new mapping at an address of the kernel's choice.
    let base = unsafe { mmap(std::ptr::null_mut(), len as usize, access, shared, file.as_fd(), 0) };
    base.map(|base| base.expose_provenance() as u64).map_err(|_| hipErrorOutOfMemory)
}

/// Memory that stays in this process.
pub(super) fn map_private(len: u64) -> Result<u64> {
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: as in `map`.
    let base = unsafe { mmap_anonymous(std::ptr::null_mut(), len as usize, access, flags) };
    base.map(|base| base.expose_provenance() as u64).map_err(|_| hipErrorOutOfMemory)
}

pub(super) fn unmap(base: u64, len: u64) {
    // SAFETY: `base` and `len` are those of a mapping of ours that was just taken from the table;
    // whoever uses it still breaks HIP's contract.
    let _ = unsafe { munmap(std::ptr::with_exposed_provenance_mut(base as usize), len as usize) };
}

/// An address as HIP gives it.
pub(super) fn pointer(addr: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(addr as usize)
}

/// Device memory of `len` bytes, of that kind.
pub(super) fn allocate(device: c_int, len: u64, kind: Kind) -> Result<u64> {
    memory().take(device, len)?;
    let mapped = new_file(len).and_then(|file| Ok((map(&file, len)?, file)));
    let (base, file) = mapped.inspect_err(|_| memory().give_back(device, len))?;
    memory().insert(base, len, device, kind, Some(Arc::new(file)));
    Ok(base)
}

pub(crate) unsafe fn hipMalloc(place: *mut *mut c_void, bytes: usize) -> Result {
    let device = check_device(current_device())?;
    capture::refuse_unsafe()?;
    let base = if bytes == 0 { 0 } else { allocate(device, bytes as u64, Kind::Device)? };
    // SAFETY: the caller's contract.
    unsafe { put(place, pointer(base)) }
}

pub(crate) unsafe fn hipFree(addr: *mut c_void) -> Result {
    capture::refuse_unsafe()?;
    if addr.is_null() {
        return Ok(());
    }
    let base = addr.addr() as u64;
    let Range { kind, device, .. } = memory().at(base).cloned().ok_or(hipErrorInvalidValue)?;
    match kind {
        Kind::Device | Kind::Pool(_) | Kind::Imported(_) => {}
        _ => return Err(hipErrorInvalidValue),
    }
    wait_for_device(device)?;
    release(base);
    Ok(())
}

/// Ends an allocation, or the mapping of an imported one.
pub(super) fn release(base: u64) {
    let mut memory = memory();
    let Some(range) = memory.remove(base) else { return };
    unmap(range.base, range.len);
    match range.kind {
        Kind::Imported(_) | Kind::Opened { .. } => {}
        _ => memory.give_back(range.device, range.len),
    }
}

pub(crate) unsafe fn hipMemGetInfo(free: *mut usize, total: *mut usize) -> Result {
    let device = check_device(current_device())?;
    let all = settings().memory_bytes;
    let used = memory().used.get(&device).copied().unwrap_or(0);
    // SAFETY: the caller's contract.
    unsafe {
        if !free.is_null() {
            put(free, (all - used) as usize)?;
        }
        if !total.is_null() {
            put(total, all as usize)?;
        }
    }
    Ok(())
}
