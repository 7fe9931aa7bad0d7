//! Calls of HIP arrive at libcuda, which here only writes down what it is asked, and at the NVRTC
//! of this machine, if there is one.

mod common;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::process::Command;
use std::ptr::{null_mut, without_provenance_mut};

use common::{Hip, alone, compile, is_alone};
use hip_sys::*;
use libloading::Library;

/// Runs `body` with the stub as libcuda.
fn on_stub(test: &str, body: impl FnOnce(&Hip, &dyn Fn() -> String)) {
    let folder = tempfile::tempdir().expect("a folder");
    let library = folder.path().join("libcuda.so.1");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/libcuda.cpp");
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    if !is_alone(test) {
        let built = Command::new(compiler)
            .args(["-std=c++17", "-shared", "-fPIC", source, "-o"])
            .arg(&library)
            .status();
        assert!(built.expect("a C++ compiler").success());
    }
    let path = folder.path().to_str().expect("text");
    alone(test, &[("KVFERRY_HIP_SHIM", "cuda"), ("LD_LIBRARY_PATH", path)], || {
        // SAFETY: the stub has no constructors, and the signature is its own.
        let said = || unsafe {
            let stub = Library::new("libcuda.so.1").expect("the stub");
            let said = stub.get::<extern "C" fn() -> *const c_char>("stub_said").expect("its own");
            CStr::from_ptr(said()).to_str().expect("text").to_owned()
        };
        body(&Hip::load(), &said);
    });
}

#[test]
fn a_thread_has_the_context_of_its_device_when_it_is_needed() {
    const NAME: &str = "a_thread_has_the_context_of_its_device_when_it_is_needed";
    on_stub(NAME, |hip, said| {
        let mut device = -1;
        // SAFETY: the library writes one number, or refuses.
        unsafe {
            assert_eq!(hip.library.hipGetDevice(&mut device), 0);
            assert_eq!((device, said()), (0, String::new()));
            hip.allocate(64);
            hip.allocate(65);
            assert_eq!(said(), "current 140;alloc 64;alloc 65;");
            assert_eq!(hip.library.hipSetDevice(1), 0);
            hip.allocate(66);
            assert_eq!(said(), "current 141;alloc 66;");
            assert_eq!(hip.library.hipSetDevice(2), hipErrorInvalidDevice);
            assert_eq!(hip.library.hipGetDevice(&mut device), 0);
            assert_eq!(device, 1, "what was refused changes nothing");
            assert_eq!(hip.library.hipDeviceEnablePeerAccess(0, 0), 0);
            assert_eq!(said(), "peer 140 0;");
            let mut can = 0;
            assert_eq!(hip.library.hipDeviceCanAccessPeer(&mut can, 0, 1), 0);
            assert_eq!((can, said()), (1, "can 40 41;".to_owned()));
        }
        std::thread::scope(|scope| {
            scope.spawn(|| hip.allocate(67).addr());
        });
        assert_eq!(said(), "current 140;alloc 67;", "of another thread");
    });
}

#[test]
fn arguments_arrive_in_their_places() {
    on_stub("arguments_arrive_in_their_places", |hip, said| {
        let at = |addr: usize| without_provenance_mut::<c_void>(addr);
        let stream: hipStream_t = without_provenance_mut(3);
        let (mut event, mut host, mut rights) = (null_mut(), null_mut(), 0);
        let mut argument = 77_u32;
        let mut arguments: [*mut c_void; 1] = [(&raw mut argument).cast()];
        hip.allocate(1);
        said();
        // SAFETY: the stub touches nothing but places for results.
        unsafe {
            let hip = &hip.library;
            let kind = hipMemcpyDefault;
            assert_eq!(hip.hipMemcpyAsync(at(0x10), at(0x20), 30, kind, stream), 0);
            assert_eq!(said(), "copy 10 20 30 3;");
            let rows = hip.hipMemcpy2DAsync(at(0x10), 64, at(0x20), 128, 48, 5, kind, stream);
            assert_eq!(rows, 0);
            assert_eq!(said(), "rows 4 20 128 4 10 64 48 5 3;");
            let flags = hipEventDisableTiming | hipEventReleaseToSystem;
            assert_eq!(hip.hipEventCreateWithFlags(&mut event, flags), 0);
            let flags = hipHostMallocPortable | hipHostMallocMapped | hipHostMallocCoherent;
            assert_eq!(hip.hipHostMalloc(&mut host, 9, flags), 0);
            assert_eq!((said().as_str(), host.addr()), ("event 2;host 9 3;", 0x9000));
            let word = at(0x40);
            let all = u32::MAX;
            assert_eq!(hip.hipStreamWaitValue32(stream, word, 8, hipStreamWaitValueEq, all), 0);
            assert_eq!(hip.hipStreamWaitValue32(stream, word, 8, 0, 1), hipErrorNotSupported);
            assert_eq!(said(), "wait 3 40 8 1;");
            let (function, arguments) = (without_provenance_mut(11), arguments.as_mut_ptr());
            let launched = hip.hipModuleLaunchKernel(
                function,
                1,
                2,
                3,
                4,
                5,
                6,
                7,
                stream,
                arguments,
                null_mut(),
            );
            assert_eq!(launched, 0);
            assert_eq!(said(), "launch 11 1 2 3 4 5 6 7 3 77;");
            let location = hipMemLocation { type_: hipMemLocationTypeDevice, id: 1 };
            assert_eq!(hip.hipMemGetAccess(&mut rights, &location, at(0x8000)), 0);
            assert_eq!((rights, said().as_str()), (3, "release 6;access 1 1;"));
            let refused = hip.hipMemGetAccess(&mut rights, &location, at(0x7000));
            assert_eq!((refused, said().as_str()), (hipErrorInvalidValue, ""), "no chunk");
        }
    });
}

#[test]
fn answers_have_amds_form() {
    on_stub("answers_have_amds_form", |hip, _| {
        // SAFETY: zeros are valid for all of it.
        let mut found: hipPointerAttribute_t = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut properties: hipDeviceProp_tR0600 = unsafe { std::mem::zeroed() };
        let (mut id, mut value) = (u64::MAX, 0);
        let device = without_provenance_mut::<c_void>(0x7000);
        let unknown = without_provenance_mut::<c_void>(0x1234);
        // SAFETY: the library writes what is asked for.
        unsafe {
            assert_eq!(hip.library.hipPointerGetAttributes(&mut found, device), 0);
            assert_eq!((found.type_, found.device), (hipMemoryTypeDevice, 1));
            assert_eq!(hip.library.hipPointerGetAttributes(&mut found, unknown), 0);
            assert_eq!((found.type_, found.device), (hipMemoryTypeUnregistered, -2));
            let place: *mut u64 = &mut id;
            let name = HIP_POINTER_ATTRIBUTE_BUFFER_ID;
            assert_eq!(hip.library.hipPointerGetAttribute(place.cast(), name, device), 0);
            assert_eq!(id, 0xffff_ffff_0000_0007, "32 bits are written");
            assert_eq!(hip.library.hipGetDevicePropertiesR0600(&mut properties, 1), 0);
            let name = CStr::from_ptr(properties.gcnArchName.as_ptr());
            assert_eq!((name, properties.warpSize), (c"sm_90", 32));
            let pitch = hipDeviceAttributeMaxPitch;
            assert_eq!(hip.library.hipDeviceGetAttribute(&mut value, pitch, 0), 0);
            assert_eq!(value, 1011);
            let registered = hip.library.hipHostRegister(device, 64, 0);
            assert_eq!(registered, hipErrorHostMemoryAlreadyRegistered);
            assert_eq!(hip.last_error(), hipErrorHostMemoryAlreadyRegistered);
            assert_eq!(hip.query(without_provenance_mut(5)), hipErrorNotReady);
            assert_eq!(hip.last_error(), 0, "not ready is no failure");
            let missing = hip.library.hipStreamSynchronize(null_mut());
            assert_eq!(missing, hipErrorSharedObjectSymbolNotFound, "the stub has it not");
        }
    });
}

#[test]
fn without_a_gpu_there_is_no_device() {
    const NAME: &str = "without_a_gpu_there_is_no_device";
    // SAFETY: looking for a library; NVIDIA's may be opened.
    if unsafe { Library::new("libcuda.so.1") }.is_ok() {
        println!("SKIP: this machine has a libcuda");
        return;
    }
    alone(NAME, &[("KVFERRY_HIP_SHIM", "cuda")], || {
        let hip = Hip::load();
        let mut count: c_int = -1;
        // SAFETY: the library writes one number, if any.
        unsafe {
            assert_eq!(hip.library.hipInit(0), hipErrorNoDevice);
            assert_eq!(hip.library.hipGetDeviceCount(&mut count), hipErrorNoDevice);
        }
    });
}

#[test]
fn hiprtc_is_nvrtc_and_makes_a_cubin_of_the_copy_kernel() {
    const NAME: &str = "hiprtc_is_nvrtc_and_makes_a_cubin_of_the_copy_kernel";
    let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
    // SAFETY: opening NVIDIA's library runs its constructors, which is what is wanted.
    if !names.iter().any(|name| unsafe { Library::new(*name) }.is_ok()) {
        let required = std::env::var("KVFERRY_TEST_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|name| name == "nvrtc"), "no {names:?}");
        println!("SKIP nvrtc: none of {names:?} can be opened");
        return;
    }
    alone(NAME, &[("KVFERRY_HIP_SHIM", "cuda")], || {
        let hip = Hip::load();
        let source = include_str!("../../device/kernels/copy.cu");
        let options = ["--gpu-architecture=sm_90", "-std=c++17"];
        let code = compile(&hip, source, &options).expect("compiles");
        assert!(code.starts_with(b"\x7fELF"));
        let (code, log) = compile(&hip, "int f() { return nothing; }", &options).expect_err("bad");
        assert!(code == 6 && log.contains("nothing"), "{log}");
        let comgr = hip.folder.path().join("libamd_comgr.so.3");
        let (mut count, mut name) = (0, std::ptr::null());
        // SAFETY: the library writes one number, and texts that live as long as it does.
        let known: Vec<_> = unsafe {
            let comgr = comgr::ComgrLibrary::new(comgr).expect("loads");
            assert_eq!(comgr.amd_comgr_get_isa_count(&mut count), 0);
            let mut name_of = |index| {
                assert_eq!(comgr.amd_comgr_get_isa_name(index, &mut name), 0);
                CStr::from_ptr(name).to_str().expect("text").to_owned()
            };
            (0..count).map(&mut name_of).collect()
        };
        assert!(known.iter().any(|name| name == "amdgcn-amd-amdhsa--sm_90"), "{known:?}");
    });
}
