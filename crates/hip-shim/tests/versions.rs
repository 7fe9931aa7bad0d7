//! What differs between versions of ROCm, and libraries that lack functions.

mod common;

use std::ffi::{CStr, c_char};

use common::{Hip, alone, has, installed};
use hip_sys::*;

#[test]
fn each_version_has_its_files_and_functions() {
    let check = |version, files: &[(&str, &[&str], &[&str])]| {
        let folder = installed(version, &[]);
        let mut names: Vec<_> = std::fs::read_dir(folder.path())
            .expect("a folder")
            .map(|entry| entry.expect("an entry").file_name().into_string().expect("text"))
            .collect();
        names.sort();
        assert_eq!(names, files.iter().map(|(name, ..)| *name).collect::<Vec<_>>());
        for (name, present, absent) in files {
            let path = folder.path().join(name);
            present.iter().for_each(|symbol| assert!(has(&path, symbol), "{name}: {symbol}"));
            absent.iter().for_each(|symbol| assert!(!has(&path, symbol), "{name}: {symbol}"));
        }
    };
    let comgr: (&[&str], &[&str]) = (&["amd_comgr_get_isa_count"], &["hipInit"]);
    let newest = "hipMemcpyBatchAsync";
    check(
        50_731_921,
        &[
            ("libamd_comgr.so.2", comgr.0, comgr.1),
            (
                "libamdhip64.so.5",
                &["hipInit", "hiprtcCompileProgram", "hipGetDeviceProperties"],
                &[newest, "hipGetDevicePropertiesR0600"],
            ),
        ],
    );
    check(
        60_443_484,
        &[
            ("libamd_comgr.so.3", comgr.0, comgr.1),
            (
                "libamdhip64.so.6",
                &["hipGetDevicePropertiesR0600", "hiprtcCompileProgram"],
                &[newest, "hipMemGetHandleForAddressRange"],
            ),
            ("libhiprtc.so.6", &["hiprtcCompileProgram"], &["hipInit"]),
        ],
    );
    check(
        70_253_211,
        &[
            ("libamd_comgr.so.3", comgr.0, comgr.1),
            ("libamdhip64.so.7", &[newest, "hipInit"], &["hiprtcCompileProgram"]),
            ("libhiprtc.so.7", &["hiprtcCompileProgram"], &["hipInit"]),
        ],
    );
}

/// What the bindings look for, by their own text.
fn functions(bindings: &str) -> impl Iterator<Item = &str> {
    bindings.split(".get(b\"").skip(1).filter_map(|rest| rest.split("\\0").next())
}

#[test]
fn every_function_of_the_bindings_is_there() {
    let folder = installed(hip_shim::VERSION, &[]);
    for (file, bindings) in [
        ("libamdhip64.so.7", include_str!("../../hip-sys/src/generated/hip.rs")),
        ("libhiprtc.so.7", include_str!("../../hip-sys/src/generated/hiprtc.rs")),
        ("libamd_comgr.so.3", include_str!("../../hip-sys/src/generated/comgr.rs")),
    ] {
        let path = folder.path().join(file);
        let missing: Vec<_> = functions(bindings).filter(|name| !has(&path, name)).collect();
        assert!(functions(bindings).count() > 2 && missing.is_empty(), "{file}: {missing:?}");
    }
}

#[test]
fn a_library_is_found_by_its_soname_once_it_is_loaded() {
    use libloading::os::unix::{Library, RTLD_NOW};
    const NOLOAD: i32 = 4;
    let folder = installed(60_443_484, &[]);
    // SAFETY: looking for what is loaded runs nothing; the library's constructors are Rust's.
    unsafe {
        let find = || Library::open(Some("libamdhip64.so.6"), NOLOAD | RTLD_NOW);
        assert!(find().is_err(), "another test loaded it");
        let _loaded =
            Library::open(Some(folder.path().join("libamdhip64.so.6")), RTLD_NOW).expect("loads");
        find().expect("by its SONAME");
    }
}

#[test]
fn functions_can_be_absent_and_the_others_stay() {
    let hip = Hip::without(&["hipMemRetainAllocationHandle", "hipFree"]);
    assert!(hip.library.hipMemRetainAllocationHandle.is_err());
    assert!(hip.library.hipFree.is_err());
    assert!(hip.library.hipFreeAsync.is_ok() && hip.library.hipHostFree.is_ok());
    hip.allocate(64);
    let folder = tempfile::tempdir().expect("a folder");
    let error = hip_shim::install(folder.path(), hip_shim::VERSION, &["hipMaloc"]);
    assert!(error.expect_err("misspelt").to_string().contains("hipMaloc"));
}

#[test]
fn version_5_has_its_own_layout_and_values() {
    const NAME: &str = "version_5_has_its_own_layout_and_values";
    alone(NAME, &[("KVFERRY_HIP_SHIM_VERSION", "50731921")], || {
        let hip = Hip::load();
        let (mut version, mut properties) = (0, [0_u8; DEVICE_PROPERTIES_BYTES]);
        // SAFETY: zeros are valid for all of it.
        let mut found: hipPointerAttribute_t = unsafe { std::mem::zeroed() };
        let memory = hip.allocate(64);
        let on_the_stack = 0_u32;
        // SAFETY: the library writes what is asked for; addresses are only looked up.
        unsafe {
            let hip = &hip.library;
            assert_eq!(hip.hipRuntimeGetVersion(&mut version), 0);
            assert_eq!(version, 50_731_921);
            assert_eq!(hip.hipGetDeviceProperties(properties.as_mut_ptr().cast(), 0), 0);
            assert_eq!(hip.hipPointerGetAttributes(&mut found, memory), 0);
            assert_eq!(found.type_, memory_type_hip5::DEVICE);
            let unknown = (&raw const on_the_stack).cast();
            assert_eq!(hip.hipPointerGetAttributes(&mut found, unknown), hipErrorInvalidValue);
        }
        let name = CStr::from_bytes_until_nul(&properties[ARCHITECTURE_OFFSET_HIP5..]);
        assert_eq!(name.expect("a text"), c"gfx942:sramecc+:xnack-");
    });
}

#[test]
fn a_machine_without_a_gpu_says_so_in_each_of_the_two_words() {
    const NAME: &str = "a_machine_without_a_gpu_says_so_in_each_of_the_two_words";
    for code in [100, 101] {
        let text = code.to_string();
        let variables = [("KVFERRY_HIP_SHIM_DEVICES", "0"), ("KVFERRY_HIP_SHIM_NO_DEVICE", &text)];
        alone(NAME, &variables, || {
            let code: u32 = std::env::var("KVFERRY_HIP_SHIM_NO_DEVICE")
                .expect("set above")
                .parse()
                .expect("a number");
            let hip = Hip::load();
            let (mut count, mut addr) = (-1, std::ptr::null_mut());
            // SAFETY: the library writes one number, and no address.
            unsafe {
                assert_eq!(hip.library.hipGetDeviceCount(&mut count), code);
                assert_eq!(hip.library.hipMalloc(&mut addr, 64), code);
            }
            assert_eq!(count, 0);
        });
    }
}

/// The last digit of the device's identity, and its address on the bus.
fn identity(hip: &Hip, device: i32) -> (u8, String) {
    let (mut uuid, mut bus) = (hipUUID { bytes: [0; 16] }, [0 as c_char; 32]);
    // SAFETY: the library writes one identity, and one text with its zero.
    let bus = unsafe {
        assert_eq!(hip.library.hipDeviceGetUuid(&mut uuid, device), 0);
        assert_eq!(hip.library.hipDeviceGetPCIBusId(bus.as_mut_ptr(), 32, device), 0);
        CStr::from_ptr(bus.as_ptr())
    };
    (uuid.bytes[15] as u8, bus.to_str().expect("text").to_owned())
}

#[test]
fn each_device_has_an_identity_of_its_own() {
    let hip = Hip::load();
    assert_eq!(identity(&hip, 0), (b'0', "0000:c1:00.0".to_owned()));
    assert_eq!(identity(&hip, 1), (b'1', "0000:c2:00.0".to_owned()));
}

#[test]
fn a_device_keeps_its_identity_where_another_is_hidden() {
    const NAME: &str = "a_device_keeps_its_identity_where_another_is_hidden";
    alone(NAME, &[("HIP_VISIBLE_DEVICES", "1")], || {
        assert_eq!(identity(&Hip::load(), 0), (b'1', "0000:c2:00.0".to_owned()));
    });
}
