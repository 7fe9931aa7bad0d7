//! `hipMalloc` memory of another process. A handle says where to find the file behind an
//! allocation: a descriptor of the process that exported it.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use hip_sys::*;
use rustix::fs::{Mode, OFlags, fstat, open};

use super::device::{check_device, current_device};
use super::memory::{Kind, Range, map, memory, pointer, release};
use super::stream::wait_for_device;
use crate::call::{Result, put};
use crate::settings::settings;

const MAGIC: u64 = u64::from_le_bytes(*b"kvfshim1");

/// The same allocation has other bytes at each export, as AMD's has.
static EXPORTS: AtomicU64 = AtomicU64::new(1);

/// Where the memory of an allocation is; as large as a handle, and so is the place of an allocation
/// in a pool.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    magic: u64,
    descriptor: u64,
    inode: u64,
    export: u64,
    /// Bytes of the allocation; AMD's has these two and the process at the same place.
    len: u64,
    /// Of the address that was exported.
    offset: u64,
    process: u32,
    reserved: u32,
    pub(super) pool: u64,
}

const _: () = assert!(size_of::<Place>() == size_of::<hipIpcMemHandle_t>());

impl Place {
    /// Of an address in memory that has a file.
    pub(super) fn of(range: &Range, addr: u64) -> Option<Self> {
        let file = range.file.as_ref()?;
        Some(Self {
            magic: MAGIC,
            descriptor: file.as_raw_fd() as u64,
            inode: fstat(file).ok()?.st_ino,
            export: EXPORTS.fetch_add(1, Ordering::Relaxed),
            len: range.len,
            offset: addr - range.base,
            process: std::process::id(),
            reserved: 0,
            pool: 0,
        })
    }

    /// Bytes from the start of the allocation to the address.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// The file, if its process lives and still has it.
    fn open(&self) -> Option<OwnedFd> {
        let path = format!("/proc/{}/fd/{}", self.process, self.descriptor);
        let file = open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let same = fstat(&file).is_ok_and(|stat| stat.st_ino == self.inode);
        (self.magic == MAGIC && same && self.offset < self.len).then_some(file)
    }
}

pub(crate) unsafe fn hipIpcGetMemHandle(
    place: *mut hipIpcMemHandle_t,
    addr: *mut c_void,
) -> Result {
    let memory = memory();
    let range = memory.known(addr)?;
    if !matches!(range.kind, Kind::Device) {
        return Err(hipErrorInvalidValue);
    }
    let handle = Place::of(range, addr.addr() as u64).ok_or(hipErrorInvalidValue)?;
    // SAFETY: the caller's contract; both are 64 bytes.
    unsafe { put(place, std::mem::transmute::<Place, hipIpcMemHandle_t>(handle)) }
}

pub(crate) unsafe fn hipIpcOpenMemHandle(
    place: *mut *mut c_void,
    handle: hipIpcMemHandle_t,
    flags: c_uint,
) -> Result {
    let device = check_device(current_device())?;
    let only = match settings().major() {
        ..6 => IPC_MEM_LAZY_ENABLE_PEER_ACCESS_HIP5,
        _ => hipIpcMemLazyEnablePeerAccess,
    };
    if flags != only {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: 64 bytes, of which any are valid numbers.
    let handle: Place = unsafe { std::mem::transmute(handle) };
    if handle.len == 0 {
        return Err(hipErrorInvalidValue);
    }
    if handle.process == std::process::id() {
        return Err(hipErrorInvalidContext);
    }
    let base = open_shared(&handle, device).ok_or(hipErrorInvalidDevicePointer)?;
    // SAFETY: the caller's contract.
    unsafe { put(place, pointer(base + handle.offset)) }
}

/// Maps the memory of a place, unless it is opened already.
fn open_shared(place: &Place, device: c_int) -> Option<u64> {
    let file = place.open()?;
    let mut memory = memory();
    if let Some(base) = memory.opened(place.inode)
        && let Some(Range { kind: Kind::Opened { users, .. }, .. }) = memory.at(base)
    {
        *users += 1;
        return Some(base);
    }
    let base = map(&file, place.len).ok()?;
    let kind = Kind::Opened { inode: place.inode, users: 1 };
    memory.insert(base, place.len, device, kind, None);
    Some(base)
}

/// Maps the memory of a place in a pool.
pub(super) fn open_pooled(place: &Place, device: c_int, pool: usize) -> Option<u64> {
    let base = map(&place.open()?, place.len).ok()?;
    memory().insert(base, place.len, device, Kind::Imported(pool), None);
    Some(base)
}

pub(crate) unsafe fn hipIpcCloseMemHandle(addr: *mut c_void) -> Result {
    if addr.is_null() {
        return Err(hipErrorInvalidValue);
    }
    let (base, device) = {
        let memory = memory();
        let range = memory.known(addr)?;
        match range.kind {
            Kind::Opened { .. } => (range.base, range.device),
            _ => return Err(hipErrorInvalidValue),
        }
    };
    wait_for_device(device)?;
    let last = match memory().at(base) {
        Some(Range { kind: Kind::Opened { users, .. }, .. }) => {
            *users -= 1;
            *users == 0
        }
        _ => return Err(hipErrorInvalidValue),
    };
    if last {
        release(base);
    }
    Ok(())
}
