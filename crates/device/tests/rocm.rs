//! AMD GPUs whose libraries misbehave, and applications that use HIP beside us. Numbers in comments
//! are those of the project's list of public failures (FAILURES.md).
//!
//! Each case runs in a process of its own on the stand-ins of `crates/hip-shim`, which fail as the
//! environment says: `ci/with-hip-shim.sh cargo test -p kvferry-device --features rocm`. Without
//! them it prints SKIP, or fails if `KVFERRY_TEST_REQUIRE` contains `hip-shim`.
#![cfg(feature = "rocm")]

use std::ffi::{c_int, c_uint};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_device::conformance::skip;
use kvferry_device::rocm::testing::map_chunks;
use kvferry_device::rocm::{RocmOptions, count, open};
use kvferry_device::testing::ChunkKind::Shareable;
use kvferry_device::testing::ChunkedMemory;
use kvferry_device::{
    Capabilities, Chunk, CopyDescriptor, Device, Error, Export, Producer, Queue, QueueOptions,
    SliceSource, Work,
};
use libloading::os::unix::Library;

const LEN: u64 = 1 << 20;

/// HIP, as an application of this process has it.
struct Application(Library);

impl Application {
    /// `None` where it is no stand-in.
    fn new() -> Option<Self> {
        for name in ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"] {
            // SAFETY: opening HIP runs its constructors, which is what is wanted.
            let Ok(library) = (unsafe { Library::new(name) }) else { continue };
            // SAFETY: only looked up.
            let stand_in = unsafe { library.get::<fn()>(b"kvferry_hip_shim_fail") }.is_ok();
            return stand_in.then_some(Self(library));
        }
        None
    }

    fn call(&self, name: &str, argument: c_int) -> c_uint {
        type Call = unsafe extern "C" fn(c_int, c_uint) -> c_uint;
        // SAFETY: callers name functions that take an int and at most one unsigned after it, or
        // nothing; what is too much goes unread.
        unsafe { self.0.get::<Call>(name.as_bytes()).expect("every HIP has it")(argument, 0) }
    }

    /// Also forgets it.
    fn last_error(&self) -> c_uint {
        self.call("hipGetLastError", 0)
    }

    fn device(&self) -> c_int {
        type Call = unsafe extern "C" fn(*mut c_int) -> c_uint;
        let mut device = -1;
        // SAFETY: HIP writes one number.
        let got =
            unsafe { self.0.get::<Call>(b"hipGetDevice").expect("every HIP has it")(&mut device) };
        assert_eq!(got, 0);
        device
    }

    #[track_caller]
    fn clean<R>(&self, what: &str, call: impl FnOnce() -> R) -> R {
        let device = self.device();
        assert_eq!(self.last_error(), 0, "before {what}");
        let result = call();
        assert_eq!(self.last_error(), 0, "left behind by {what}");
        assert_eq!(self.device(), device, "the thread's device after {what}");
        result
    }

    #[track_caller]
    fn clean_refusal<T>(&self, what: &str, call: impl FnOnce() -> kvferry_device::Result<T>) {
        assert!(self.clean(what, || call().is_err()), "{what} was not refused");
    }
}

/// Runs the test of that name, for each list of variables, as the only one of a new process.
fn alone(test: &str, cases: &[&[(&str, &str)]], body: impl FnOnce(&Application)) {
    const ALONE: &str = "KVFERRY_TEST_ALONE";
    let Some(application) = Application::new() else {
        return skip("hip-shim", &"libamdhip64 is missing, or is none of crates/hip-shim");
    };
    if std::env::var(ALONE).is_ok_and(|name| name == test) {
        return body(&application);
    }
    for variables in cases {
        let mut command = Command::new(std::env::current_exe().expect("this binary"));
        command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
        command.env(ALONE, test).envs(variables.iter().copied());
        let (passed, said) = run(command);
        assert!(passed, "{variables:?}: {said}");
    }
}

/// Whether the one test passed in time, and what it said.
fn run(mut command: Command) -> (bool, String) {
    const LIMIT: Duration = Duration::from_secs(120);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("it can be started");
    let start = Instant::now();
    while child.try_wait().expect("our own child").is_none() {
        if start.elapsed() > LIMIT {
            let _ = child.kill();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().expect("it has ended");
    let [said, complained] =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    // Zero tests would be a success, too.
    let passed = output.status.success() && said.contains("1 passed");
    (passed, format!("{}: {said}{complained}", output.status))
}

fn device(ordinal: u32) -> Arc<dyn Device> {
    open(ordinal, &RocmOptions::default()).expect("the stand-in has it")
}

fn queue(device: &Arc<dyn Device>) -> Box<dyn Queue> {
    Arc::clone(device).queue(&QueueOptions::default()).expect("a queue")
}

/// Copies 4 bytes each within the first half MiB at `addr`, enough of them for the kernel.
fn pieces(addr: u64) -> Vec<CopyDescriptor> {
    let piece =
        |at: u64| CopyDescriptor { src: addr + at * 4, dst: addr + LEN / 2 + at * 4, len: 4 };
    (0..1000).map(piece).collect()
}

/// Moves a thousand pieces and a large one, and checks them.
fn transfers(device: &Arc<dyn Device>) {
    let memory = Arc::clone(device).allocate(LEN).expect("memory");
    let addr = memory.addr();
    let bytes: Vec<u8> =
        (0..4000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
    // SAFETY: inside the memory, which nobody else uses.
    unsafe { device.write(addr, &bytes) }.expect("writes");
    let mut queue = queue(device);
    let (pieces, large) =
        (pieces(addr), [CopyDescriptor { src: addr, dst: addr + LEN / 4, len: 4000 }]);
    let mut source = SliceSource(&pieces);
    let mut work = Work { large: &large, ..Work::pieces(&mut source) };
    // SAFETY: inside the memory, which is kept until the submission is done, below; the
    // destinations are apart.
    let ticket = unsafe { queue.submit(&mut work) }.expect("submits");
    let completions = queue.completions();
    eventually("the copies end", || {
        queue.check().expect("works");
        completions.done(ticket)
    });
    for offset in [LEN / 2, LEN / 4] {
        let mut found = vec![0; bytes.len()];
        // SAFETY: inside the memory, which nobody writes now.
        unsafe { device.read(addr + offset, &mut found) }.expect("reads");
        assert!(found == bytes, "at {offset}");
    }
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(30), "it never came to this: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn no_gpu_is_an_error_that_says_what_to_do_whatever_the_code() {
    let none = ("KVFERRY_HIP_SHIM_DEVICES", "0");
    let code = |code| [none, ("KVFERRY_HIP_SHIM_NO_DEVICE", code)];
    alone(
        "no_gpu_is_an_error_that_says_what_to_do_whatever_the_code",
        &[&code("100"), &code("101")],
        |_| {
            let options = RocmOptions::default();
            for refused in [count(&options).map(drop), open(0, &options).map(drop)] {
                let error = refused.expect_err("there is none");
                assert!(matches!(error, Error::NoDevice { .. }), "{error}");
                assert!(error.to_string().contains("/dev/kfd"), "{error}");
            }
        },
    );
}

#[test]
fn an_ordinal_out_of_range_says_how_many_there_are() {
    alone("an_ordinal_out_of_range_says_how_many_there_are", &[&[]], |_| {
        for ordinal in [2, 1 << 31, u32::MAX] {
            let error = open(ordinal, &RocmOptions::default()).expect_err("there are two");
            assert!(matches!(error, Error::NoDevice { .. }), "{error}");
            assert!(error.to_string().contains("sees 2"), "{error}");
        }
    });
}

#[test]
fn a_device_whose_kernel_cannot_be_had_copies_by_dma_and_says_why() {
    // B50: a compiler that fails, is not there, or does not know the GPU.
    let reason = |reason| ("KVFERRY_TEST_REASON", reason);
    let fail = |call, why| [("KVFERRY_HIP_SHIM_FAIL", call), reason(why)];
    let unknown = |name, why| [("KVFERRY_HIP_SHIM_ARCHITECTURE", name), reason(why)];
    alone(
        "a_device_whose_kernel_cannot_be_had_copies_by_dma_and_says_why",
        &[
            &fail("hiprtcCompileProgram:1=6", "hiprtcCompileProgram failed"),
            &fail("hiprtcCreateProgram:1=1", "hiprtcCreateProgram failed"),
            &fail("hipModuleLoadData:1=209", "does not load"),
            &fail("hipModuleGetFunction:3=500", "does not load"),
            &unknown("gfx9999", "does not know \"gfx9999\""),
        ],
        |application| {
            let device = application.clean("open", || device(0));
            let info = device.info();
            assert!(!info.capabilities.contains(Capabilities::KERNEL), "{}", info.kernel);
            let reason = std::env::var("KVFERRY_TEST_REASON").expect("given");
            assert!(info.kernel.starts_with("none: "), "{}", info.kernel);
            assert!(info.kernel.contains(&reason), "{}", info.kernel);
            transfers(&device);
        },
    );
}

#[test]
fn waves_of_64_and_of_32_copy_alike() {
    let architecture = |name| [("KVFERRY_HIP_SHIM_ARCHITECTURE", name)];
    alone(
        "waves_of_64_and_of_32_copy_alike",
        &[
            &architecture("gfx90a:sramecc+:xnack-"),
            &architecture("gfx942"),
            &architecture("gfx1100"),
        ],
        |_| {
            let device = device(0);
            assert!(device.info().capabilities.contains(Capabilities::KERNEL));
            transfers(&device);
        },
    );
}

#[test]
fn a_device_that_is_lost_in_flight_fails_what_runs_and_all_that_comes() {
    let lost = |call| [("KVFERRY_HIP_SHIM_FAIL", call)];
    alone(
        "a_device_that_is_lost_in_flight_fails_what_runs_and_all_that_comes",
        &[
            &lost("lost:hipModuleLaunchKernel:2=719"),
            &lost("lost:hipStreamWriteValue32:3=700"),
            &lost("lost:hipEventRecord:2=719"),
        ],
        |_| {
            let device = device(0);
            let memory = Arc::clone(&device).allocate(LEN).expect("memory");
            let mut queue = queue(&device);
            let pieces = pieces(memory.addr());
            let mut error = None;
            eventually("the device is lost", || {
                let mut source = SliceSource(&pieces);
                let mut work = Work::pieces(&mut source);
                // SAFETY: inside the memory, which is kept until the end of the process.
                let submitted = unsafe { queue.submit(&mut work) };
                error = submitted.map(drop).map_err(|refused| refused.error).err();
                error = error.take().or_else(|| queue.check().err());
                error.is_some()
            });
            let error = error.expect("just seen");
            assert!(matches!(error, Error::Lost { .. }), "{error}");
            let again = Arc::clone(&device).allocate(LEN).map(drop).expect_err("it is lost");
            assert!(matches!(again, Error::Lost { .. }), "{again}");
            drop((queue, memory, device));
        },
    );
}

#[test]
fn no_call_leaves_an_error_or_another_device_to_the_thread() {
    // B15.
    alone("no_call_leaves_an_error_or_another_device_to_the_thread", &[&[]], |application| {
        assert_eq!(application.call("hipSetDevice", 1), 0);
        assert_ne!(application.call("hipSetDevice", 1 << 20), 0);
        assert_ne!(application.last_error(), 0, "HIP keeps no errors, so nothing is shown");
        let options = RocmOptions::default();
        let device = application.clean("open", || device(0));
        application.clean_refusal("opening a device too many", || open(2, &options));
        application.clean("transfers", || transfers(&device));
        refuses(application, &device);
        application.clean("transfers", || transfers(&device));
        application.clean("drop", || drop(device));
    });
}

fn refuses(application: &Application, device: &Arc<dyn Device>) {
    let on_the_stack = 0_u64;
    for addr in [0, 8, (&raw const on_the_stack) as u64, u64::MAX] {
        application.clean_refusal("an unknown address", || device.allocation(addr));
        application.clean_refusal("a unit of an unknown address", || device.export_unit(addr, 8));
    }
    let null = || std::fs::File::open("/dev/null").expect("always there").into();
    let len = LEN;
    for (what, export) in [
        ("a short handle", Export::Handle { bytes: vec![0; 7], len }),
        ("a handle of zeros", Export::Handle { bytes: vec![0; 80], len }),
        ("a handle of garbage", Export::Handle { bytes: vec![0xA7; 80], len }),
        ("chunks of no memory", Export::Chunks { chunks: vec![Chunk { fd: null(), len }], len }),
        ("a pool", Export::Pool { fd: null(), bytes: vec![0; 80], len }),
        ("a file that is no memory", Export::File { fd: null(), len }),
    ] {
        application.clean_refusal(what, || Arc::clone(device).open(export));
    }
    let memory =
        application.clean("allocate", || Arc::clone(device).allocate(LEN)).expect("memory");
    let unit = application.clean("allocation", || device.allocation(memory.addr())).expect("found");
    let own = application.clean("export", || device.export(&unit)).expect("exports");
    let error = application.clean("open", || Arc::clone(device).open(own).map(drop));
    assert!(matches!(error, Err(Error::SameProcess { .. })), "{error:?}");
    application.clean("free", || drop(memory));
    application.clean_refusal("an export of what was freed", || device.export(&unit));
    let too_much = application.clean("allocate", || Arc::clone(device).allocate(1 << 46).map(drop));
    assert!(matches!(too_much, Err(Error::OutOfMemory { .. })), "{too_much:?}");
    let nothing = 1 << 46;
    application.clean_refusal("host memory that is not there", || {
        Arc::clone(device).map_host(nothing, 4096)
    });
}

#[test]
fn access_that_the_application_enabled_first_is_success_and_its_own_error_stays() {
    // B15.
    alone(
        "access_that_the_application_enabled_first_is_success_and_its_own_error_stays",
        &[&[]],
        |application| {
            for (device, peer) in [(0, 1), (1, 0)] {
                assert_eq!(application.call("hipSetDevice", device), 0);
                assert_eq!(application.call("hipDeviceEnablePeerAccess", peer), 0);
            }
            let first = application.clean("open", || device(0));
            let invalid = application.call("hipSetDevice", 1 << 20);
            let second = device(1);
            assert_eq!(application.last_error(), invalid, "the application's own error");
            for (one, other) in [(&first, &second), (&second, &first)] {
                assert!(one.reaches(&other.info().uuid));
            }
            let again = application.call("hipDeviceEnablePeerAccess", 0);
            assert_eq!((again, application.last_error()), (704, 704), "HIP's own complaint");
        },
    );
}

#[test]
fn a_peer_that_refuses_access_is_not_reached() {
    alone(
        "a_peer_that_refuses_access_is_not_reached",
        &[&[("KVFERRY_HIP_SHIM_FAIL", "hipDeviceEnablePeerAccess:1=217")]],
        |_| {
            let (first, second) = (device(0), device(1));
            let reached = [first.reaches(&second.info().uuid), second.reaches(&first.info().uuid)];
            assert_eq!(reached.iter().filter(|&&reached| reached).count(), 1, "{reached:?}");
        },
    );
}

#[test]
fn a_handle_from_a_container_with_the_same_process_id_is_refused_with_the_remedy() {
    // B05: HIP tells its own handles by the process id.
    alone(
        "a_handle_from_a_container_with_the_same_process_id_is_refused_with_the_remedy",
        &[&[("KVFERRY_HIP_SHIM_FAIL", "hipIpcOpenMemHandle:1=201")]],
        |_| {
            let export = Export::Handle { bytes: vec![7; 80], len: LEN };
            let error = device(0).open(export).map(drop).expect_err("refused by HIP");
            assert!(matches!(error, Error::BadExport { .. }), "{error}");
            assert!(error.to_string().contains("--pid=host"), "{error}");
        },
    );
}

#[test]
fn a_handle_is_made_once_for_a_unit_and_other_memory_has_another_number() {
    // B04, B06, B08: exports differ in every byte, and so say nothing; numbers never repeat.
    alone(
        "a_handle_is_made_once_for_a_unit_and_other_memory_has_another_number",
        &[&[("KVFERRY_HIP_SHIM_FAIL", "hipIpcGetMemHandle:2+=999")]],
        |_| {
            let device = device(0);
            let mut numbers = std::collections::HashSet::new();
            for round in 0..200 {
                let memory = Arc::clone(&device).allocate(LEN).expect("memory");
                let unit = device.export_unit(memory.addr() + 4097, 5).expect("found");
                assert_eq!((unit.base, unit.len), (memory.addr(), LEN));
                assert!(numbers.insert(unit.id), "round {round}: {} came again", unit.id);
            }
            let memory = Arc::clone(&device).allocate(LEN).expect("memory");
            for at in 0..1000 {
                device.export_unit(memory.addr() + at, 5).expect("found without a handle");
            }
            let unit = device.export_unit(memory.addr(), LEN).expect("found");
            let prepared = device.prepare_export(&unit).expect("the one handle that can be made");
            assert!(matches!(prepared, Some(Export::Handle { len: LEN, .. })), "{prepared:?}");
        },
    );
}

#[test]
fn chunks_are_refused_with_the_remedy_where_hip_lacks_the_functions_for_them() {
    const NAME: &str = "chunks_are_refused_with_the_remedy_where_hip_lacks_the_functions_for_them";
    let without = ["hipMemRetainAllocationHandle", "hipMemGetAccess"].map(|function| {
        let folder = tempfile::tempdir().expect("a folder");
        let mut install = Command::new("hip-shim-install");
        let installed =
            install.arg(folder.path()).env("KVFERRY_HIP_SHIM_ABSENT", function).status();
        installed.is_ok_and(|status| status.success()).then_some(folder)
    });
    let [Some(retain), Some(access)] = &without else {
        return skip("hip-shim", &"hip-shim-install is not on the path");
    };
    let path = |folder: &tempfile::TempDir| folder.path().to_str().expect("text").to_owned();
    let (retain, access) = (path(retain), path(access));
    let folders = [&retain, &access].map(|path| [("LD_LIBRARY_PATH", path.as_str())]);
    alone(NAME, &[&folders[0], &folders[1]], |_| {
        let device = device(0);
        let memory = map_chunks(0, &[Shareable; 2]);
        let unit = device.export_unit(memory.addr(), memory.chunk_len()).expect("found");
        for refused in [device.prepare_export(&unit).map(drop), device.export(&unit).map(drop)] {
            let error = refused.expect_err("there is no way");
            assert!(matches!(error, Error::NotExportable { .. }), "{error}");
            assert!(error.to_string().contains("expandable_segments:False"), "{error}");
        }
        transfers(&device);
    });
}

#[test]
fn an_import_that_fails_leaves_no_descriptor_and_no_addresses() {
    let fail = |call| [("KVFERRY_HIP_SHIM_FAIL", call)];
    alone(
        "an_import_that_fails_leaves_no_descriptor_and_no_addresses",
        &[
            &fail("hipMemImportFromShareableHandle:2=1"),
            &fail("hipMemMap:5=2"),
            &fail("hipMemSetAccess:4=1"),
        ],
        |application| {
            let device = device(0);
            // Three calls of hipMemMap and of hipMemSetAccess are its own.
            let memory = map_chunks(0, &[Shareable; 3]);
            let unit = device.export_unit(memory.addr(), memory.len()).expect("found");
            assert!(device.prepare_export(&unit).expect("it may be shared").is_none());
            let export = device.export(&unit).expect("exports");
            let Export::Chunks { chunks, .. } = &export else { panic!("it has chunks") };
            assert_eq!(chunks.len(), 3);
            let descriptors = || std::fs::read_dir("/proc/self/fd").expect("listed").count();
            let before = descriptors();
            application.clean_refusal("an import", || Arc::clone(&device).open(export));
            assert_eq!(descriptors(), before - 3);
            let again = device.export(&unit).expect("exports");
            drop(Arc::clone(&device).open(again).expect("the failure is past"));
            assert_eq!(descriptors(), before - 3);
        },
    );
}

#[test]
fn an_applications_stream_that_hip_does_not_know_is_refused_and_the_device_works_on() {
    alone(
        "an_applications_stream_that_hip_does_not_know_is_refused_and_the_device_works_on",
        &[&[]],
        |application| {
            let device = device(0);
            let memory = Arc::clone(&device).allocate(LEN).expect("memory");
            let mut queue = queue(&device);
            // Of a stream that is gone the address may be that of the next one.
            let mut never_a_stream = 0u64;
            let unknown = (&raw mut never_a_stream).cast();
            let pieces = pieces(memory.addr());
            let mut source = SliceSource(&pieces);
            // SAFETY: deliberately not one that lives: HIP looks it up before it is used.
            let after = Some(unsafe { Producer::stream(unknown) });
            let mut work = Work { after, ..Work::pieces(&mut source) };
            // SAFETY: inside the memory, which is kept until the queue has ended.
            let refused = application.clean("submit", || unsafe { queue.submit(&mut work) });
            let error = refused.expect_err("no such stream").error;
            assert!(matches!(error, Error::NotOrderable { .. }), "{error}");
            transfers(&device);
        },
    );
}
