//! The runtime API keeps a thread's last error until the application asks, and then blames
//! whatever it just did (FAILURES.md B15): our calls leave none there.
//!
//! Needs libcudart; without it there is a SKIP line and nothing is tested, or the tests fail if
//! `KVFERRY_TEST_REQUIRE` contains `cudart`.

use libloading::Library;

use super::*;
use crate::cuda::testing::allocate_from_pool;
use crate::{Chunk, Error, QueueOptions, SliceSource, Work};

/// The application's runtime.
struct Runtime(Library);

impl Runtime {
    fn load() -> Option<Self> {
        let mut reason = String::new();
        for name in ["libcudart.so.13", "libcudart.so.12", "libcudart.so"] {
            // SAFETY: opening NVIDIA's library runs its constructors, which is what is wanted.
            match unsafe { Library::new(name) } {
                Ok(library) => return Some(Self(library)),
                Err(error) => reason = error.to_string(),
            }
        }
        crate::conformance::skip("cudart", &reason);
        None
    }

    fn call(&self, name: &str, argument: c_int) -> c_int {
        type Call = unsafe extern "C" fn(c_int, c_uint) -> c_int;
        // SAFETY: callers name functions that take an int and at most one unsigned after it, or
        // nothing; what is too much goes unread.
        unsafe { self.0.get::<Call>(name).expect("every libcudart has it")(argument, 0) }
    }

    /// Also forgets it.
    fn last_error(&self) -> c_int {
        self.call("cudaGetLastError", 0)
    }

    /// Makes the device current as an application does, with its context.
    fn use_device(&self, ordinal: c_int) {
        assert_eq!(self.call("cudaSetDevice", ordinal), 0);
        assert_eq!(self.call("cudaDeviceSynchronize", 0), 0);
    }

    #[track_caller]
    fn clean<R>(&self, what: &str, call: impl FnOnce() -> R) -> R {
        assert_eq!(self.last_error(), 0, "before {what}");
        let result = call();
        assert_eq!(self.last_error(), 0, "left behind by {what}");
        result
    }

    #[track_caller]
    fn clean_refusal<T>(&self, what: &str, call: impl FnOnce() -> Result<T>) {
        assert!(self.clean(what, || call().is_err()), "{what} was not refused");
    }
}

#[test]
fn no_call_of_ours_leaves_an_error_to_the_runtime() {
    alone("last_error::no_call_of_ours_leaves_an_error_to_the_runtime", || {
        let Some(runtime) = Runtime::load() else { return };
        let Ok(count) = count() else {
            first_device();
            return;
        };
        runtime.use_device(0);
        assert_ne!(runtime.call("cudaSetDevice", 1 << 20), 0);
        assert_ne!(runtime.last_error(), 0, "the runtime keeps no errors, so nothing is shown");

        let open_device = |ordinal| open(ordinal, &CudaOptions::default()).expect("it is there");
        let device = runtime.clean("open", || open_device(0));
        runtime.clean_refusal("opening a device too many", || open(count, &CudaOptions::default()));
        if count > 1 {
            drop(runtime.clean("opening and connecting a second device", || open_device(1)));
        }
        works(&runtime, &device);
        refuses(&runtime, &device);
        works(&runtime, &device);
        runtime.clean("drop", || drop(device));
    });
}

#[test]
fn access_between_devices_that_the_application_enabled_first_leaves_no_error() {
    alone(
        "last_error::access_between_devices_that_the_application_enabled_first_leaves_no_error",
        || {
            let Some(runtime) = Runtime::load() else { return };
            if !count().is_ok_and(|count| count > 1) {
                crate::conformance::skip("two GPUs", &"there are not so many");
                return;
            }
            for (device, peer) in [(0, 1), (1, 0)] {
                runtime.use_device(device);
                if runtime.call("cudaDeviceEnablePeerAccess", peer) != 0 {
                    crate::conformance::skip("peer access", &"the two GPUs have none");
                    return;
                }
            }
            let devices = [0, 1].map(|ordinal| {
                runtime
                    .clean("open", || open(ordinal, &CudaOptions::default()).expect("it is there"))
            });
            let again = runtime.call("cudaDeviceEnablePeerAccess", 0);
            assert_eq!((again, runtime.last_error()), (704, 704), "the runtime's own complaint");
            for device in &devices {
                works(&runtime, device);
                refuses(&runtime, device);
            }
            runtime.clean("drop", || drop(devices));
        },
    );
}

fn works(runtime: &Runtime, device: &Arc<dyn Device>) {
    let memory =
        runtime.clean("allocate", || Arc::clone(device).allocate(1 << 20).expect("memory"));
    let addr = memory.addr();
    // SAFETY: inside the memory, which nobody else uses.
    runtime.clean("write", || unsafe { device.write(addr, &[7; 4096]) }.expect("writes"));
    let unit = runtime.clean("export_unit", || device.export_unit(addr, 4096).expect("found"));
    runtime.clean("prepare_export", || device.prepare_export(&unit).expect("it may be shared"));
    runtime.clean("export", || device.export(&unit).expect("exports"));
    let host = vec![0_u8; 1 << 16];
    let host_addr = host.as_ptr().expose_provenance() as u64;
    let mapping = runtime
        .clean("map_host", || Arc::clone(device).map_host(host_addr, 1 << 16).expect("maps"));
    runtime.clean("the end of map_host", || drop(mapping));
    let mut queue = runtime
        .clean("queue", || Arc::clone(device).queue(&QueueOptions::default()).expect("a queue"));
    for count in [1, 1000] {
        let piece =
            |at: u64| CopyDescriptor { src: addr + at * 4, dst: addr + 65_536 + at * 4, len: 4 };
        let pieces: Vec<_> = (0..count).map(piece).collect();
        let large = [CopyDescriptor { src: addr, dst: addr + 131_072, len: 65_536 }];
        let mut source = SliceSource(&pieces);
        let mut work = Work { large: &large, ..Work::pieces(&mut source) };
        // SAFETY: inside the memory, which is kept until the submission is done, below; the
        // destinations are apart.
        let submitted = runtime.clean("submit", || unsafe { queue.submit(&mut work) });
        let ticket = submitted.expect("submits");
        let completions = queue.completions();
        let start = std::time::Instant::now();
        runtime.clean("check and done", || {
            while !completions.done(ticket) {
                queue.check().expect("works");
                assert!(start.elapsed().as_secs() < 30, "it does not end");
            }
        });
    }
    runtime.clean("the end of a queue", || drop(queue));
    let mut read = [0; 4096];
    // SAFETY: inside the memory, which nobody writes now.
    runtime.clean("read", || unsafe { device.read(addr + 131_072, &mut read) }.expect("reads"));
    assert_eq!(read, [7; 4096]);
    runtime.clean("free", || drop(memory));
}

fn refuses(runtime: &Runtime, device: &Arc<dyn Device>) {
    let on_the_stack = 0_u64;
    for addr in [0, 8, (&raw const on_the_stack) as u64, u64::MAX] {
        runtime.clean_refusal("an unknown address", || device.allocation(addr));
        runtime.clean_refusal("a unit of an unknown address", || device.export_unit(addr, 8));
    }
    let (len, null) = (1 << 20, || std::fs::File::open("/dev/null").expect("always there").into());
    for (what, export) in [
        ("a short handle", Export::Handle { bytes: vec![0; 7], len }),
        ("a handle of zeros", Export::Handle { bytes: vec![0; 80], len }),
        ("a handle of garbage", Export::Handle { bytes: vec![0xA7; 80], len }),
        ("chunks of no memory", Export::Chunks { chunks: vec![Chunk { fd: null(), len }], len }),
        ("a pool of no memory", Export::Pool { fd: null(), bytes: vec![0; 80], len }),
        ("a file that is no memory", Export::File { fd: null(), len }),
    ] {
        runtime.clean_refusal(what, || Arc::clone(device).open(export));
    }
    let memory = Arc::clone(device).allocate(len).expect("memory");
    let unit = device.allocation(memory.addr()).expect("found");
    let own = device.export(&unit).expect("exports");
    runtime.clean_refusal("our own export", || Arc::clone(device).open(own));
    drop(memory);
    runtime.clean_refusal("an export of what was freed", || device.export(&unit));
    let pooled = allocate_from_pool(device.info().ordinal, len, false);
    let unit = device.export_unit(pooled.addr(), len).expect("found");
    runtime.clean_refusal("an export of a private pool", || device.prepare_export(&unit));
    drop(pooled);
    for bytes in [0, 1 << 46, 1 << 60] {
        runtime.clean_refusal("memory of that size", || Arc::clone(device).allocate(bytes));
    }
    let too_much = Arc::clone(device).allocate(1 << 46).map(|_| ());
    assert!(matches!(too_much, Err(Error::OutOfMemory { .. })), "{too_much:?}");
    runtime.clean_refusal("host memory that is not there", || {
        Arc::clone(device).map_host(1 << 46, 4096)
    });
}
