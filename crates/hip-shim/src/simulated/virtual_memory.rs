//! Memory of the virtual memory API: addresses are reserved, physical memory is mapped there, and a
//! file descriptor takes the physical memory to another process.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_ulonglong, c_void};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use hip_sys::*;
use rustix::fs::fstat;
use rustix::io::fcntl_dupfd_cloexec;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect};

use super::device::{check_device, current_device};
use super::memory::{Kind, memory, new_file, pointer, unmap};
use super::stream::wait_for_device;
use crate::call::{Result, put};
use crate::settings::settings;

/// Bytes that sizes are multiples of.
const GRANULARITY: u64 = 64 << 10;

/// What `hipMemCreate` allocates.
#[derive(Debug)]
pub(super) struct Physical {
    file: OwnedFd,
    len: u64,
    properties: Properties,
}

#[derive(Clone, Copy, Debug)]
struct Properties {
    device: c_int,
    handle_type: hipMemAllocationHandleType,
}

/// Handles and reservations.
#[derive(Debug, Default)]
struct Table {
    /// By handle, with how often it was retained.
    physical: HashMap<usize, (Arc<Physical>, usize)>,
    /// Bytes, by first address.
    reserved: BTreeMap<u64, u64>,
}

fn table() -> MutexGuard<'static, Table> {
    static TABLE: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Table {
    /// What a handle is of that was not released, or whose memory is mapped.
    fn physical(&self, handle: hipMemGenericAllocationHandle_t) -> Result<Arc<Physical>> {
        let found = self.physical.get(&handle.addr()).map(|(found, _)| Arc::clone(found));
        found.or_else(|| mapped(handle)).ok_or(hipErrorInvalidValue)
    }

    /// A handle, for the caller to release once.
    fn retain(&mut self, physical: &Arc<Physical>) -> hipMemGenericAllocationHandle_t {
        let handle = Arc::as_ptr(physical).addr();
        let entry = self.physical.entry(handle).or_insert_with(|| (Arc::clone(physical), 0));
        entry.1 += 1;
        std::ptr::without_provenance_mut(handle)
    }

    /// Whether all of a range is reserved.
    fn is_reserved(&self, base: u64, len: u64) -> bool {
        let before = self.reserved.range(..=base).next_back();
        before.is_some_and(|(first, bytes)| base - first <= *bytes && len <= bytes - (base - first))
    }
}

fn mapped(handle: hipMemGenericAllocationHandle_t) -> Option<Arc<Physical>> {
    memory().chunks().find(|physical| Arc::as_ptr(physical).addr() == handle.addr()).cloned()
}

/// Ends the process where AMD's library would be left broken.
fn abort(reason: &str) -> ! {
    eprintln!("hip-shim: {reason}");
    std::process::abort();
}

/// Maps nothing there: a touch is a fault, and the addresses stay taken.
fn reserve(at: Option<u64>, len: u64) -> Result<u64> {
    let (nothing, flags) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
    let flags = if at.is_some() { flags | MapFlags::FIXED } else { flags };
    // SAFETY: at an address of the kernel's choice, or inside a reservation of ours, where only
    // what was mapped there is replaced.
    let base = unsafe { mmap_anonymous(pointer(at.unwrap_or(0)), len as usize, nothing, flags) };
    base.map(|base| base.expose_provenance() as u64).map_err(|_| hipErrorOutOfMemory)
}

pub(crate) unsafe fn hipMemGetAllocationGranularity(
    place: *mut usize,
    properties: *const hipMemAllocationProp,
    option: hipMemAllocationGranularity_flags,
) -> Result {
    // SAFETY: the caller's contract.
    unsafe { read_properties(properties) }?;
    if option > hipMemAllocationGranularityRecommended {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: the caller's contract.
    unsafe { put(place, GRANULARITY as usize) }
}

/// # Safety
/// Null, which is refused, or readable.
unsafe fn read_properties(properties: *const hipMemAllocationProp) -> Result<Properties> {
    if properties.is_null() {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: the caller's contract; both names of the handle's type are the same number.
    let (properties, handle_type) = unsafe {
        let properties = properties.read();
        (properties, properties.__bindgen_anon_1.requestedHandleType)
    };
    let on_device = properties.type_ == hipMemAllocationTypePinned
        && properties.location.type_ == hipMemLocationTypeDevice;
    let device = check_device(properties.location.id).map_err(|_| hipErrorInvalidValue)?;
    match handle_type {
        _ if !on_device => Err(hipErrorInvalidValue),
        hipMemHandleTypeNone | hipMemHandleTypePosixFileDescriptor => {
            Ok(Properties { device, handle_type })
        }
        _ => Err(hipErrorNotSupported),
    }
}

pub(crate) unsafe fn hipMemCreate(
    place: *mut hipMemGenericAllocationHandle_t,
    bytes: usize,
    properties: *const hipMemAllocationProp,
    flags: c_ulonglong,
) -> Result {
    // SAFETY: the caller's contract.
    let properties = unsafe { read_properties(properties) }?;
    let len = bytes as u64;
    if len == 0 || flags != 0 || !len.is_multiple_of(GRANULARITY) {
        return Err(hipErrorInvalidValue);
    }
    if len > settings().memory_bytes {
        return Err(hipErrorOutOfMemory);
    }
    let physical = Arc::new(Physical { file: new_file(len)?, len, properties });
    let handle = table().retain(&physical);
    // SAFETY: the caller's contract.
    unsafe { put(place, handle) }
}

pub(crate) unsafe fn hipMemRelease(handle: hipMemGenericAllocationHandle_t) -> Result {
    let mut table = table();
    let Some((_, users)) = table.physical.get_mut(&handle.addr()) else {
        if mapped(handle).is_some() {
            abort("hipMemRelease of a handle without a reference: the memory is still mapped");
        }
        return Err(hipErrorInvalidValue);
    };
    *users -= 1;
    if *users == 0 {
        table.physical.remove(&handle.addr());
    }
    Ok(())
}

/// Before 7.13 the handle comes without a reference, and memory that is no chunk breaks AMD's
/// library.
pub(crate) unsafe fn hipMemRetainAllocationHandle(
    place: *mut hipMemGenericAllocationHandle_t,
    addr: *mut c_void,
) -> Result {
    let retains = settings().version >= 71_300_000;
    let physical = match &memory().known(addr)?.kind {
        Kind::Chunk(physical) => Arc::clone(physical),
        _ if retains => return Err(hipErrorInvalidValue),
        _ => abort("hipMemRetainAllocationHandle of memory that hipMemMap did not map"),
    };
    let handle = match retains {
        true => table().retain(&physical),
        false => std::ptr::without_provenance_mut(Arc::as_ptr(&physical).addr()),
    };
    // SAFETY: the caller's contract.
    unsafe { put(place, handle) }
}

pub(crate) unsafe fn hipMemGetAllocationPropertiesFromHandle(
    place: *mut hipMemAllocationProp,
    handle: hipMemGenericAllocationHandle_t,
) -> Result {
    let found = table().physical(handle)?.properties;
    let requested = hipMemAllocationProp__bindgen_ty_1 { requestedHandleType: found.handle_type };
    let properties = hipMemAllocationProp {
        type_: hipMemAllocationTypePinned,
        __bindgen_anon_1: requested,
        location: hipMemLocation { type_: hipMemLocationTypeDevice, id: found.device },
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: hipMemAllocationProp__bindgen_ty_2 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
        },
    };
    // SAFETY: the caller's contract.
    unsafe { put(place, properties) }
}

pub(crate) unsafe fn hipMemExportToShareableHandle(
    place: *mut c_void,
    handle: hipMemGenericAllocationHandle_t,
    handle_type: hipMemAllocationHandleType,
    flags: c_ulonglong,
) -> Result {
    let physical = table().physical(handle)?;
    if flags != 0
        || handle_type == hipMemHandleTypeNone
        || handle_type != physical.properties.handle_type
    {
        return Err(hipErrorInvalidValue);
    }
    let copy = fcntl_dupfd_cloexec(&physical.file, 0).map_err(|_| hipErrorInvalidValue)?;
    // SAFETY: the caller's contract: a descriptor has room there.
    unsafe { put(place.cast(), copy.into_raw_fd()) }
}

/// Of a descriptor that another process, or this one, exported. Up to 7.0 `shared` points to the
/// number, from 7.1 on it is the number.
pub(crate) unsafe fn hipMemImportFromShareableHandle(
    place: *mut hipMemGenericAllocationHandle_t,
    shared: *mut c_void,
    handle_type: hipMemAllocationHandleType,
) -> Result {
    let device = check_device(current_device())?;
    if shared.is_null() || handle_type != hipMemHandleTypePosixFileDescriptor {
        return Err(hipErrorInvalidValue);
    }
    let number = if settings().version >= 70_100_000 {
        shared.addr() as c_int
    } else {
        // SAFETY: the caller's contract, in these versions.
        unsafe { shared.cast::<c_int>().read() }
    };
    let file = duplicate(number)?;
    let stat = fstat(&file).map_err(|_| hipErrorInvalidValue)?;
    let len = stat.st_size as u64;
    if len == 0 || !len.is_multiple_of(GRANULARITY) || !is_of_memory(&file) {
        return Err(hipErrorInvalidValue);
    }
    let properties = Properties { device, handle_type };
    let handle = table().retain(&Arc::new(Physical { file, len, properties }));
    // SAFETY: the caller's contract.
    unsafe { put(place, handle) }
}

/// A descriptor of our own for a file that the caller's number is of.
pub(super) fn duplicate(number: c_int) -> Result<OwnedFd> {
    if number < 0 {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: used for one call only, which fails if the number is no descriptor.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    fcntl_dupfd_cloexec(borrowed, 0).map_err(|_| hipErrorInvalidValue)
}

/// Whether the file is one that this library makes, of whatever process.
pub(super) fn is_of_memory(file: &OwnedFd) -> bool {
    use std::os::fd::AsRawFd;
    std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .is_ok_and(|name| name.to_string_lossy().starts_with("/memfd:kvferry-hip-shim"))
}

pub(crate) unsafe fn hipMemAddressReserve(
    place: *mut *mut c_void,
    bytes: usize,
    alignment: usize,
    _wanted: *mut c_void,
    flags: c_ulonglong,
) -> Result {
    let len = bytes as u64;
    if flags != 0 {
        return Err(hipErrorInvalidValue);
    }
    if len == 0
        || !len.is_multiple_of(GRANULARITY)
        || !(alignment == 0 || alignment.is_power_of_two())
    {
        return Err(hipErrorOutOfMemory);
    }
    let base = reserve(None, len)?;
    table().reserved.insert(base, len);
    // SAFETY: the caller's contract.
    unsafe { put(place, pointer(base)) }
}

pub(crate) unsafe fn hipMemAddressFree(addr: *mut c_void, bytes: usize) -> Result {
    let (base, len) = (addr.addr() as u64, bytes as u64);
    let mut table = table();
    if table.reserved.get(&base) != Some(&len) || memory().overlaps(base, len) {
        return Err(hipErrorInvalidValue);
    }
    table.reserved.remove(&base);
    unmap(base, len);
    Ok(())
}

/// Nothing can touch it before `hipMemSetAccess`.
pub(crate) unsafe fn hipMemMap(
    addr: *mut c_void,
    bytes: usize,
    offset: usize,
    handle: hipMemGenericAllocationHandle_t,
    flags: c_ulonglong,
) -> Result {
    let table = table();
    let physical = table.physical(handle)?;
    let (base, len) = (addr.addr() as u64, bytes as u64);
    let mut memory = memory();
    if offset != 0
        || flags != 0
        || len != physical.len
        || !table.is_reserved(base, len)
        || memory.overlaps(base, len)
    {
        return Err(hipErrorInvalidValue);
    }
    let (nothing, shared) = (ProtFlags::empty(), MapFlags::SHARED | MapFlags::FIXED);
    // SAFETY: inside a reservation of ours, where nothing is mapped, as was just seen.
    unsafe { mmap(addr, bytes, nothing, shared, physical.file.as_fd(), 0) }
        .map_err(|_| hipErrorOutOfMemory)?;
    memory.insert(base, len, physical.properties.device, Kind::Chunk(physical), None);
    Ok(())
}

pub(crate) unsafe fn hipMemSetAccess(
    addr: *mut c_void,
    bytes: usize,
    access: *const hipMemAccessDesc,
    count: usize,
) -> Result {
    if addr.is_null() || bytes == 0 || access.is_null() || count == 0 {
        return Err(hipErrorInvalidValue);
    }
    let mut allowed = MprotectFlags::empty();
    for index in 0..count {
        // SAFETY: the caller's contract: the list has `count` entries.
        let access = unsafe { access.add(index).read() };
        check_device(access.location.id).map_err(|_| hipErrorInvalidValue)?;
        allowed |= match access.flags {
            hipMemAccessFlagsProtNone => MprotectFlags::empty(),
            hipMemAccessFlagsProtRead => MprotectFlags::READ,
            _ => MprotectFlags::READ | MprotectFlags::WRITE,
        };
    }
    let (mut at, end) = (addr.addr() as u64, addr.addr() as u64 + bytes as u64);
    let memory = memory();
    while at < end {
        let chunk = memory.find(at).filter(|range| matches!(range.kind, Kind::Chunk(_)));
        at = chunk.map(|range| range.base + range.len).ok_or(hipErrorInvalidValue)?;
    }
    // SAFETY: chunks of ours, as was just seen.
    unsafe { mprotect(addr, bytes, allowed) }.map_err(|_| hipErrorInvalidValue)
}

/// Only of chunks: other memory has no rights of its own.
pub(crate) unsafe fn hipMemGetAccess(
    rights: *mut c_ulonglong,
    location: *const hipMemLocation,
    addr: *mut c_void,
) -> Result {
    if location.is_null() {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: the caller's contract: it is not null, so it points to one.
    let location = unsafe { location.read() };
    check_device(location.id).map_err(|_| hipErrorInvalidValue)?;
    let memory = memory();
    if !matches!(memory.known(addr)?.kind, Kind::Chunk(_)) {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: the caller's contract.
    unsafe { put(rights, hipMemAccessFlagsProtReadWrite.into()) }
}

pub(crate) unsafe fn hipMemUnmap(addr: *mut c_void, bytes: usize) -> Result {
    let (base, len) = (addr.addr() as u64, bytes as u64);
    let device = match memory().at(base) {
        Some(range) if range.len == len && matches!(range.kind, Kind::Chunk(_)) => range.device,
        _ => return Err(hipErrorInvalidValue),
    };
    wait_for_device(device)?;
    reserve(Some(base), len)?;
    memory().remove(base);
    Ok(())
}

/// There are no dma-bufs of memory that is a file.
pub(crate) unsafe fn hipMemGetHandleForAddressRange(
    _place: *mut c_void,
    addr: hipDeviceptr_t,
    _bytes: usize,
    _handle_type: hipMemRangeHandleType,
    _flags: c_ulonglong,
) -> Result {
    memory().known(addr)?;
    Err(hipErrorNotSupported)
}
