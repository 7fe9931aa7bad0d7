//! Memory of the simulated GPU, and how another process gets at it.

mod common;

use std::ffi::c_void;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::ptr::null_mut;

use common::{Hip, alone};
use hip_sys::*;

const LEN: usize = 1 << 16;

/// Takes what the environment names, and adds one to the first byte.
const CHILD: &str = "KVFERRY_HIP_SHIM_TEST_CHILD";

#[test]
fn the_child_of_other_tests() {
    let Ok(text) = std::env::var(CHILD) else { return };
    let hip = Hip::load();
    let (kind, bytes) = text.split_once(' ').expect("a kind and bytes");
    let (descriptor, bytes) = bytes.split_once(' ').expect("a descriptor and bytes");
    let bytes: Vec<u8> = (0..bytes.len() / 2)
        .map(|at| u8::from_str_radix(&bytes[2 * at..2 * at + 2], 16).expect("digits"))
        .collect();
    let file = || -> OwnedFd {
        std::fs::File::options().read(true).write(true).open(descriptor).expect("a file").into()
    };
    let addr = match kind {
        "handle" => opened_twice(&hip, bytes.try_into().expect("64 bytes")),
        "chunk" => mapped(&hip, &file()),
        "pool" => imported(&hip, &file(), bytes.try_into().expect("64 bytes")),
        "handles" => return open_at_once(&hip, &bytes),
        other => panic!("{other}"),
    };
    let first: *mut u8 = addr.cast();
    // SAFETY: mapped just now; the parent waits.
    unsafe { first.write(first.read() + 1) };
}

/// The same address both times, and each is closed.
fn opened_twice(hip: &Hip, bytes: [u8; 64]) -> *mut c_void {
    let handle = hipIpcMemHandle_t { reserved: bytes.map(|byte| byte as i8) };
    let open = || {
        let mut addr = null_mut();
        let flags = hipIpcMemLazyEnablePeerAccess;
        // SAFETY: the library writes one address.
        assert_eq!(unsafe { hip.library.hipIpcOpenMemHandle(&mut addr, handle, flags) }, 0);
        addr
    };
    let (first, second) = (open(), open());
    assert_eq!(first, second);
    // SAFETY: opened twice, closed twice, once too often, and opened again.
    unsafe {
        assert_eq!(hip.library.hipIpcCloseMemHandle(first), 0);
        assert_eq!(hip.library.hipIpcCloseMemHandle(second), 0);
        assert_eq!(hip.library.hipIpcCloseMemHandle(second), hipErrorInvalidValue);
    }
    open()
}

/// A thread for each handle; each closing ends a mapping while another begins.
fn open_at_once(hip: &Hip, handles: &[u8]) {
    std::thread::scope(|scope| {
        for bytes in handles.chunks(64) {
            let bytes: [u8; 64] = bytes.try_into().expect("64 bytes");
            let handle = hipIpcMemHandle_t { reserved: bytes.map(|byte| byte as i8) };
            scope.spawn(move || {
                for _ in 0..500 {
                    let mut addr = null_mut();
                    let flags = hipIpcMemLazyEnablePeerAccess;
                    // SAFETY: the library writes one address, which is closed once.
                    unsafe {
                        let opened = hip.library.hipIpcOpenMemHandle(&mut addr, handle, flags);
                        assert_eq!(opened, 0);
                        assert_eq!(hip.library.hipIpcCloseMemHandle(addr), 0);
                    }
                }
            });
        }
    });
}

fn mapped(hip: &Hip, file: &OwnedFd) -> *mut c_void {
    let (mut handle, mut addr) = (null_mut(), null_mut());
    let number = std::ptr::without_provenance_mut(file.as_raw_fd() as usize);
    // SAFETY: the library writes one handle and one address; the range is reserved before it is
    // mapped.
    unsafe {
        let kind = hipMemHandleTypePosixFileDescriptor;
        assert_eq!(hip.library.hipMemImportFromShareableHandle(&mut handle, number, kind), 0);
        assert_eq!(hip.library.hipMemAddressReserve(&mut addr, LEN, 0, null_mut(), 0), 0);
        assert_eq!(hip.library.hipMemMap(addr, LEN, 0, handle, 0), 0);
        assert_eq!(hip.library.hipMemRelease(handle), 0);
        assert_eq!(hip.library.hipMemSetAccess(addr, LEN, &access(), 1), 0);
    }
    addr
}

fn imported(hip: &Hip, file: &OwnedFd, reserved: [u8; 64]) -> *mut c_void {
    let (mut pool, mut addr) = (null_mut(), null_mut());
    let number = std::ptr::without_provenance_mut(file.as_raw_fd() as usize);
    let mut data = hipMemPoolPtrExportData { reserved };
    // SAFETY: the library writes one pool and one address.
    unsafe {
        let kind = hipMemHandleTypePosixFileDescriptor;
        let taken = hip.library.hipMemPoolImportFromShareableHandle(&mut pool, number, kind, 0);
        assert_eq!(taken, 0);
        assert_eq!(hip.library.hipMemPoolImportPointer(&mut addr, pool, &mut data), 0);
    }
    addr
}

fn access() -> hipMemAccessDesc {
    let location = hipMemLocation { type_: hipMemLocationTypeDevice, id: 0 };
    hipMemAccessDesc { location, flags: hipMemAccessFlagsProtReadWrite }
}

/// Runs the child on an export and returns what it left in the first byte.
fn after_child(hip: &Hip, addr: *mut c_void, kind: &str, descriptor: i32, bytes: &[u8]) -> u8 {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let path = format!("/proc/{}/fd/{descriptor}", std::process::id());
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["the_child_of_other_tests", "--exact", "--nocapture"])
        .env(CHILD, format!("{kind} {path} {digits}"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .output()
        .expect("starts");
    assert!(output.status.success(), "{output:?}");
    hip.bytes(addr, 1)[0]
}

#[test]
fn another_process_opens_a_handle_and_writes_the_same_memory() {
    let hip = Hip::load();
    let addr = hip.allocate(LEN);
    let inside: *mut c_void = addr.wrapping_byte_add(4096);
    let export = || {
        let mut handle = hipIpcMemHandle_t { reserved: [0; 64] };
        // SAFETY: the library writes one handle.
        assert_eq!(unsafe { hip.library.hipIpcGetMemHandle(&mut handle, inside) }, 0);
        handle
    };
    let (first, second) = (export(), export());
    assert_ne!(first.reserved, second.reserved, "as AMD's, other bytes each time");
    let bytes = first.reserved.map(|byte| byte as u8);
    assert_eq!(after_child(&hip, inside, "handle", 0, &bytes), 1);
    let mut own = null_mut();
    // SAFETY: the library refuses both.
    unsafe {
        let flags = hipIpcMemLazyEnablePeerAccess;
        let refused = hip.library.hipIpcOpenMemHandle(&mut own, first, flags);
        assert_eq!(refused, hipErrorInvalidContext, "our own export");
        let refused = hip.library.hipIpcOpenMemHandle(&mut own, first, 0);
        assert_eq!(refused, hipErrorInvalidValue, "the flags of HIP 5");
    }
}

#[test]
fn mappings_begin_and_end_at_the_same_time() {
    let hip = Hip::load();
    let mut handles = Vec::new();
    let memories = [(); 3].map(|()| hip.allocate(LEN));
    for addr in memories {
        let mut handle = hipIpcMemHandle_t { reserved: [0; 64] };
        // SAFETY: the library writes one handle.
        assert_eq!(unsafe { hip.library.hipIpcGetMemHandle(&mut handle, addr) }, 0);
        handles.extend(handle.reserved.map(|byte| byte as u8));
    }
    after_child(&hip, memories[0], "handles", 0, &handles);
}

#[test]
fn chunks_are_mapped_where_they_are_reserved_and_shared_by_descriptors() {
    let hip = Hip::load();
    let location = hipMemLocation { type_: hipMemLocationTypeDevice, id: 0 };
    let requested = hipMemAllocationProp__bindgen_ty_1 {
        requestedHandleType: hipMemHandleTypePosixFileDescriptor,
    };
    // SAFETY: zeros are what AMD asks for in the fields that are not set.
    let mut properties: hipMemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = hipMemAllocationTypePinned;
    properties.location = location;
    properties.__bindgen_anon_1 = requested;
    let (mut handle, mut addr, mut again, mut fd) = (null_mut(), null_mut(), null_mut(), -1);
    let (mut base, mut len) = (null_mut(), 0);
    // SAFETY: the library writes what it makes; ranges are reserved before they are mapped.
    unsafe {
        let hip = &hip.library;
        assert_eq!(hip.hipMemCreate(&mut handle, LEN, &properties, 0), 0);
        assert_eq!(hip.hipMemAddressReserve(&mut addr, 2 * LEN, 0, null_mut(), 0), 0);
        let outside = addr.wrapping_byte_add(2 * LEN);
        assert_eq!(hip.hipMemMap(outside, LEN, 0, handle, 0), hipErrorInvalidValue);
        assert_eq!(hip.hipMemMap(addr, LEN, 0, handle, 0), 0);
        assert_eq!(hip.hipMemMap(addr, LEN, 0, handle, 0), hipErrorInvalidValue, "taken");
        assert_eq!(hip.hipMemSetAccess(addr, LEN, &access(), 1), 0);
        assert_eq!(hip.hipMemSetAccess(addr, 2 * LEN, &access(), 1), hipErrorInvalidValue);
        let inside = addr.wrapping_byte_add(5);
        assert_eq!(hip.hipMemGetAddressRange(&mut base, &mut len, inside), 0);
        assert_eq!((base, len), (addr, LEN));
        assert_eq!(hip.hipMemRetainAllocationHandle(&mut again, inside), 0);
        assert_eq!(again, handle, "and 7.2 takes no reference");
        let mut rights = 0;
        assert_eq!(hip.hipMemGetAccess(&mut rights, &location, inside), 0);
        let kind = hipMemHandleTypePosixFileDescriptor;
        let shared: *mut i32 = &mut fd;
        assert_eq!(hip.hipMemExportToShareableHandle(shared.cast(), handle, kind, 0), 0);
        assert_eq!(hip.hipMemRelease(handle), 0);
        assert_eq!(hip.hipMemRetainAllocationHandle(&mut again, inside), 0);
        assert_eq!(hip.hipMemGetAllocationPropertiesFromHandle(&mut properties, again), 0);
    }
    assert_eq!(after_child(&hip, addr, "chunk", fd, &[]), 1);
    // SAFETY: mapped above, and nothing uses it any more.
    unsafe {
        let hip = &hip.library;
        assert_eq!(hip.hipMemAddressFree(addr, 2 * LEN), hipErrorInvalidValue, "still mapped");
        assert_eq!(hip.hipMemUnmap(addr, LEN), 0);
        assert_eq!(hip.hipMemAddressFree(addr, 2 * LEN), 0);
        assert_eq!(hip.hipMemRelease(handle), hipErrorInvalidValue, "all of it is gone");
    }
    let memory = hip.allocate(LEN);
    let mut rights = 0;
    // SAFETY: the library refuses it.
    let refused = unsafe { hip.library.hipMemGetAccess(&mut rights, &location, memory) };
    assert_eq!(refused, hipErrorInvalidValue, "no chunk");
}

#[test]
fn pools_are_shared_by_their_only_descriptor_and_refused_without_one() {
    let hip = Hip::load();
    // SAFETY: zeros are what AMD asks for in the fields that are not set.
    let mut properties: hipMemPoolProps = unsafe { std::mem::zeroed() };
    properties.allocType = hipMemAllocationTypePinned;
    properties.handleTypes = hipMemHandleTypePosixFileDescriptor;
    properties.location = hipMemLocation { type_: hipMemLocationTypeDevice, id: 0 };
    let (mut pool, mut addr, mut first, mut second) = (null_mut(), null_mut(), -1, -1);
    let mut data = hipMemPoolPtrExportData { reserved: [0; 64] };
    let kind = hipMemHandleTypePosixFileDescriptor;
    // SAFETY: the library writes what it makes.
    unsafe {
        let hip = &hip.library;
        assert_eq!(hip.hipMemPoolCreate(&mut pool, &properties), 0);
        assert_eq!(hip.hipMallocFromPoolAsync(&mut addr, LEN, pool, null_mut()), 0);
        for fd in [&mut first, &mut second] {
            let fd: *mut i32 = fd;
            assert_eq!(hip.hipMemPoolExportToShareableHandle(fd.cast(), pool, kind, 0), 0);
        }
        assert_eq!(hip.hipMemPoolExportPointer(&mut data, addr), 0);
    }
    assert_eq!(first, second);
    assert_eq!(after_child(&hip, addr, "pool", first, &data.reserved), 1);
    // SAFETY: as above.
    unsafe {
        let hip = &hip.library;
        let mut handle = hipIpcMemHandle_t { reserved: [0; 64] };
        assert_eq!(hip.hipIpcGetMemHandle(&mut handle, addr), hipErrorInvalidValue);
        assert_eq!(hip.hipDeviceGetDefaultMemPool(&mut pool, 0), 0);
        let fd: *mut i32 = &mut second;
        let refused = hip.hipMemPoolExportToShareableHandle(fd.cast(), pool, kind, 0);
        assert_eq!(refused, hipErrorInvalidValue, "the default pool is private");
    }
}

#[test]
fn an_address_is_known_while_its_memory_lives() {
    let hip = Hip::load();
    let addr = hip.allocate(LEN);
    let inside = addr.wrapping_byte_add(LEN - 1);
    let (mut base, mut len) = (null_mut(), 0);
    // SAFETY: zeros are valid for all of it.
    let mut found: hipPointerAttribute_t = unsafe { std::mem::zeroed() };
    let mut id = 0_u64;
    // SAFETY: the library writes what is asked for; addresses are only looked up.
    unsafe {
        let hip = &hip.library;
        assert_eq!(hip.hipMemGetAddressRange(&mut base, &mut len, inside), 0);
        assert_eq!((base, len), (addr, LEN));
        let beyond = addr.wrapping_byte_add(LEN);
        assert_eq!(hip.hipMemGetAddressRange(&mut base, &mut len, beyond), hipErrorNotFound);
        assert_eq!(hip.hipPointerGetAttributes(&mut found, inside), 0);
        assert_eq!((found.type_, found.device), (hipMemoryTypeDevice, 0));
        let place: *mut u64 = &mut id;
        let name = HIP_POINTER_ATTRIBUTE_BUFFER_ID;
        assert_eq!(hip.hipPointerGetAttribute(place.cast(), name, inside), 0);
        assert_ne!(id, 0);
        assert_eq!(hip.hipFree(inside), hipErrorInvalidValue, "not where it begins");
        assert_eq!(hip.hipFree(addr), 0);
        assert_eq!(hip.hipPointerGetAttributes(&mut found, inside), 0);
        assert_eq!(found.type_, hipMemoryTypeUnregistered);
    }
}

#[test]
fn host_memory_is_registered_once_and_only_where_there_is_some() {
    let hip = Hip::load();
    let memory = vec![0_u8; LEN];
    let addr = memory.as_ptr().cast_mut().cast::<c_void>();
    let mut device = null_mut();
    // SAFETY: the memory lives; the library refuses what is not mapped.
    unsafe {
        let hip = &hip.library;
        assert_eq!(hip.hipHostRegister(addr, LEN, 0), 0);
        assert_eq!(hip.hipHostRegister(addr, LEN, 0), hipErrorHostMemoryAlreadyRegistered);
        assert_eq!(hip.hipHostGetDevicePointer(&mut device, addr.wrapping_byte_add(9), 0), 0);
        assert_eq!(device, addr.wrapping_byte_add(9));
        assert_eq!(hip.hipHostUnregister(addr), 0);
        assert_eq!(hip.hipHostUnregister(addr), hipErrorHostMemoryNotRegistered);
        assert_ne!(hip.hipHostGetDevicePointer(&mut device, addr, 0), 0);
        let nowhere = std::ptr::without_provenance_mut(1 << 46);
        assert_eq!(hip.hipHostRegister(nowhere, LEN, 0), hipErrorInvalidValue);
    }
}

#[test]
fn a_copy_that_leaves_a_registration_is_refused_in_one_row_and_in_many() {
    let hip = Hip::load();
    let host = vec![0_u8; 3 * LEN];
    let [first, second, third] =
        [0, LEN, 2 * LEN].map(|at| host.as_ptr().wrapping_add(at).cast_mut().cast::<c_void>());
    let (device, stream) = (hip.allocate(3 * LEN), hip.stream(hipStreamNonBlocking));
    let rows = |dst, src, width, height| {
        let (pitch, kind) = (LEN / 4, hipMemcpyDefault);
        // SAFETY: the memory outlives the copies, which are waited for below.
        unsafe { hip.library.hipMemcpy2DAsync(dst, pitch, src, pitch, width, height, kind, stream) }
    };
    let copy = |dst, src, len| {
        // SAFETY: as above.
        unsafe { hip.library.hipMemcpyAsync(dst, src, len, hipMemcpyDefault, stream) }
    };
    // SAFETY: the memory lives.
    unsafe {
        assert_eq!(hip.library.hipHostRegister(first, LEN, 0), 0);
        assert_eq!(hip.library.hipHostRegister(second, LEN, 0), 0);
    }
    let refused = hipErrorInvalidValue;
    for (host, len, said) in [
        (first, LEN, 0),
        (second, LEN, 0),
        (third, LEN, 0),
        (first, LEN + 1, refused),
        (second, LEN + 1, refused),
        (first.wrapping_byte_add(LEN - 1), 2, refused),
    ] {
        assert_eq!([copy(host, device, len), copy(device, host, len)], [said; 2], "{len} bytes");
    }
    let before = second.wrapping_byte_sub(LEN / 4);
    for (host, count, said) in [(first, 4, 0), (first, 5, refused), (before, 2, refused)] {
        assert_eq!([rows(host, device, 8, count), rows(device, host, 8, count)], [said; 2]);
    }
    // SAFETY: the stream lives.
    unsafe {
        assert_eq!(hip.library.hipStreamSynchronize(stream), 0);
        assert_eq!(hip.library.hipHostUnregister(second), 0);
    }
    assert_eq!(copy(third.wrapping_byte_sub(1), device, 2), 0, "nobody's memory");
    // SAFETY: as above.
    assert_eq!(unsafe { hip.library.hipStreamSynchronize(stream) }, 0);
}

#[test]
fn memory_runs_out() {
    alone("memory_runs_out", &[("KVFERRY_HIP_SHIM_MEMORY", "1048576")], || {
        let hip = Hip::load();
        let (first, mut second) = (hip.allocate(1 << 20), null_mut());
        // SAFETY: the library writes one address; the first is freed once.
        unsafe {
            assert_eq!(hip.library.hipMalloc(&mut second, 1), hipErrorOutOfMemory);
            assert_eq!(hip.library.hipFree(first), 0);
            assert_eq!(hip.library.hipMalloc(&mut second, 1 << 20), 0);
        }
    });
}
