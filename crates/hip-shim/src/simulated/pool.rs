//! Stream-ordered pools. A pool that was made to be shared has a file that names it; an allocation
//! has a place, which says where its own file is.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use hip_sys::*;
use rustix::io::{pread, pwrite};

use super::device::{check_device, current_device};
use super::ipc::{Place, open_pooled};
use super::memory::{Kind, allocate, memory, new_file, pointer, release};
use super::stream::{Work, submit};
use super::virtual_memory::{duplicate, is_of_memory};
use crate::call::{Result, put};

#[derive(Debug)]
struct Pool {
    device: c_int,
    /// Who it is, for whoever imports it; unique on the machine.
    name: u64,
    /// Of a pool that may be shared; as in AMD's library the only descriptor there ever is.
    file: Option<OwnedFd>,
    imported: bool,
    /// A default pool cannot be destroyed.
    default: bool,
}

fn pools() -> MutexGuard<'static, HashMap<usize, Pool>> {
    static POOLS: LazyLock<Mutex<HashMap<usize, Pool>>> = LazyLock::new(Mutex::default);
    POOLS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn new_name() -> u64 {
    static NAMES: AtomicU64 = AtomicU64::new(1);
    u64::from(std::process::id()) << 32 | NAMES.fetch_add(1, Ordering::Relaxed)
}

fn insert(pools: &mut HashMap<usize, Pool>, pool: Pool) -> hipMemPool_t {
    static HANDLES: AtomicU64 = AtomicU64::new(1);
    let handle = HANDLES.fetch_add(1, Ordering::Relaxed) as usize * 64;
    pools.insert(handle, pool);
    std::ptr::without_provenance_mut(handle)
}

pub(crate) unsafe fn hipDeviceGetDefaultMemPool(place: *mut hipMemPool_t, device: c_int) -> Result {
    let device = check_device(device)?;
    let mut pools = pools();
    let known = pools.iter().find(|(_, pool)| pool.default && pool.device == device);
    let handle = match known {
        Some((&handle, _)) => std::ptr::without_provenance_mut(handle),
        None => {
            let pool =
                Pool { device, name: new_name(), file: None, imported: false, default: true };
            insert(&mut pools, pool)
        }
    };
    // SAFETY: the caller's contract.
    unsafe { put(place, handle) }
}

pub(crate) unsafe fn hipMemPoolCreate(
    place: *mut hipMemPool_t,
    properties: *const hipMemPoolProps,
) -> Result {
    if properties.is_null() {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: the caller's contract: it is not null, so it points to one.
    let properties = unsafe { properties.read() };
    let device = check_device(properties.location.id).map_err(|_| hipErrorInvalidValue)?;
    if properties.allocType != hipMemAllocationTypePinned
        || properties.location.type_ != hipMemLocationTypeDevice
    {
        return Err(hipErrorInvalidValue);
    }
    let name = new_name();
    let file = match properties.handleTypes {
        hipMemHandleTypeNone => None,
        _ => {
            let file = new_file(8)?;
            pwrite(&file, &name.to_le_bytes(), 0).map_err(|_| hipErrorOutOfMemory)?;
            Some(file)
        }
    };
    let pool = Pool { device, name, file, imported: false, default: false };
    let handle = insert(&mut pools(), pool);
    // SAFETY: the caller's contract.
    unsafe { put(place, handle) }
}

pub(crate) unsafe fn hipMemPoolDestroy(pool: hipMemPool_t) -> Result {
    let mut pools = pools();
    match pools.get(&pool.addr()) {
        Some(Pool { default: false, .. }) => {
            pools.remove(&pool.addr());
            Ok(())
        }
        _ => Err(hipErrorInvalidValue),
    }
}

pub(crate) unsafe fn hipMemPoolSetAccess(
    pool: hipMemPool_t,
    access: *const hipMemAccessDesc,
    count: usize,
) -> Result {
    if access.is_null() || !pools().contains_key(&pool.addr()) {
        return Err(hipErrorInvalidValue);
    }
    for index in 0..count {
        // SAFETY: the caller's contract: the list has `count` entries.
        let access = unsafe { access.add(index).read() };
        if access.location.type_ != hipMemLocationTypeDevice {
            return Err(hipErrorInvalidValue);
        }
        check_device(access.location.id)?;
        if access.flags == hipMemAccessFlagsProtNone {
            return Err(hipErrorInvalidDevice);
        }
    }
    Ok(())
}

pub(crate) unsafe fn hipMallocFromPoolAsync(
    place: *mut *mut c_void,
    bytes: usize,
    pool: hipMemPool_t,
    stream: hipStream_t,
) -> Result {
    let device = match pools().get(&pool.addr()) {
        Some(Pool { imported: false, device, .. }) => *device,
        _ => return Err(hipErrorInvalidValue),
    };
    let base = match bytes {
        0 => 0,
        bytes => allocate(device, bytes as u64, Kind::Pool(pool.addr()))?,
    };
    submit(stream, Work::Run(Box::new(|| {})))?;
    // SAFETY: the caller's contract.
    unsafe { put(place, pointer(base)) }
}

/// The memory is gone when the stream comes here.
pub(crate) unsafe fn hipFreeAsync(addr: *mut c_void, stream: hipStream_t) -> Result {
    let base = addr.addr() as u64;
    match memory().at(base) {
        Some(range) if matches!(range.kind, Kind::Pool(_) | Kind::Device) => {}
        _ => return Err(hipErrorInvalidValue),
    }
    submit(stream, Work::Run(Box::new(move || release(base)))).map(drop)
}

/// The number is the pool's own descriptor, the same at each call: who closes it closes it for the
/// pool.
pub(crate) unsafe fn hipMemPoolExportToShareableHandle(
    place: *mut c_void,
    pool: hipMemPool_t,
    handle_type: hipMemAllocationHandleType,
    flags: c_uint,
) -> Result {
    let pools = pools();
    let file = pools.get(&pool.addr()).filter(|pool| !pool.imported);
    let file = file.and_then(|pool| pool.file.as_ref()).ok_or(hipErrorInvalidValue)?;
    if flags != 0 || handle_type != hipMemHandleTypePosixFileDescriptor {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: the caller's contract: a descriptor has room there.
    unsafe { put(place.cast(), file.as_raw_fd()) }
}

/// `shared` is the number of the descriptor, in all versions.
pub(crate) unsafe fn hipMemPoolImportFromShareableHandle(
    place: *mut hipMemPool_t,
    shared: *mut c_void,
    handle_type: hipMemAllocationHandleType,
    flags: c_uint,
) -> Result {
    let device = check_device(current_device())?;
    if shared.is_null() || flags != 0 || handle_type != hipMemHandleTypePosixFileDescriptor {
        return Err(hipErrorInvalidValue);
    }
    let file = duplicate(shared.addr() as c_int)?;
    let mut name = [0; 8];
    let whole = pread(&file, &mut name, 0).is_ok_and(|bytes| bytes == name.len());
    if !whole || !is_of_memory(&file) {
        return Err(hipErrorOutOfMemory);
    }
    let name = u64::from_le_bytes(name);
    let pool = Pool { device, name, file: None, imported: true, default: false };
    let handle = insert(&mut pools(), pool);
    // SAFETY: the caller's contract.
    unsafe { put(place, handle) }
}

pub(crate) unsafe fn hipMemPoolExportPointer(
    data: *mut hipMemPoolPtrExportData,
    addr: *mut c_void,
) -> Result {
    let range = memory().known(addr).cloned().map_err(|_| hipErrorOutOfMemory)?;
    let Kind::Pool(pool) = range.kind else { return Err(hipErrorOutOfMemory) };
    let name = pools().get(&pool).map(|pool| pool.name).ok_or(hipErrorOutOfMemory)?;
    let mut place = Place::of(&range, addr.addr() as u64).ok_or(hipErrorOutOfMemory)?;
    place.pool = name;
    // SAFETY: the caller's contract; both are 64 bytes.
    unsafe { put(data, std::mem::transmute::<Place, hipMemPoolPtrExportData>(place)) }
}

pub(crate) unsafe fn hipMemPoolImportPointer(
    place: *mut *mut c_void,
    pool: hipMemPool_t,
    data: *mut hipMemPoolPtrExportData,
) -> Result {
    if data.is_null() {
        return Err(hipErrorInvalidValue);
    }
    let (device, name) = match pools().get(&pool.addr()) {
        Some(Pool { imported: true, device, name, .. }) => (*device, *name),
        _ => return Err(hipErrorInvalidValue),
    };
    // SAFETY: the caller's contract: 64 bytes, of which any are valid numbers.
    let data: Place = unsafe { data.cast::<Place>().read_unaligned() };
    if data.pool != name {
        return Err(hipErrorOutOfMemory);
    }
    let base = open_pooled(&data, device, pool.addr()).ok_or(hipErrorOutOfMemory)?;
    // SAFETY: the caller's contract.
    unsafe { put(place, pointer(base + data.offset())) }
}
