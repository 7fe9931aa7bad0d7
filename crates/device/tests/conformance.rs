//! Every device passes one suite. A device that is not there is skipped with a line that says why;
//! `KVFERRY_TEST_REQUIRE=cuda,rocm` turns that into a failure.

use std::path::Path;
use std::sync::Arc;

use kvferry_device::sim::{SimOptions, sim};
use kvferry_device::{Device, device_conformance};

fn host() -> Option<Arc<dyn Device>> {
    Some(kvferry_device::host().expect("host memory is always there"))
}

fn simulated() -> Option<Arc<dyn Device>> {
    Some(sim(&SimOptions::default()).expect("always there").0)
}

fn simulated_without_kernel() -> Option<Arc<dyn Device>> {
    let options = SimOptions { kernel: false, ..SimOptions::default() };
    Some(sim(&options).expect("always there").0)
}

device_conformance!(host_memory, super::host);
device_conformance!(simulated_gpu, super::simulated);
device_conformance!(simulated_gpu_without_kernel, super::simulated_without_kernel);

#[cfg(feature = "cuda")]
fn cuda(kernel: bool) -> Option<Arc<dyn Device>> {
    use kvferry_device::cuda::{CudaOptions, open};
    let options = CudaOptions { kernel, ..CudaOptions::default() };
    match open(0, &options) {
        Ok(device) => Some(device),
        Err(error) => {
            kvferry_device::conformance::skip("cuda", &error);
            None
        }
    }
}

#[cfg(feature = "cuda")]
device_conformance!(cuda_gpu, || super::cuda(true));
#[cfg(feature = "cuda")]
device_conformance!(cuda_gpu_without_kernel, || super::cuda(false));

#[cfg(feature = "rocm")]
fn rocm(kernel: bool) -> Option<Arc<dyn Device>> {
    use kvferry_device::rocm::{RocmOptions, open};
    match open(0, &RocmOptions { kernel, ..RocmOptions::default() }) {
        Ok(device) => Some(device),
        Err(error) => {
            kvferry_device::conformance::skip("rocm", &error);
            None
        }
    }
}

#[cfg(feature = "rocm")]
device_conformance!(rocm_gpu, || super::rocm(true));
#[cfg(feature = "rocm")]
device_conformance!(rocm_gpu_without_kernel, || super::rocm(false));

/// FAILURES.md B28: those calls crash and hang on lists that their documentation allows.
#[test]
fn no_source_file_calls_a_vendors_batch_copy() {
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    let mut files = 0;
    while let Some(folder) = folders.pop() {
        for entry in folder.read_dir().expect("a folder of ours") {
            let path = entry.expect("listed").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(&path).expect("a source file").to_lowercase();
            // cuMemcpyBatchAsync, cuMemcpy3DBatchAsync, hipMemcpyBatchAsync and their versions.
            for call in ["memcpybatch", "memcpy3dbatch"] {
                assert!(!text.contains(call), "{} names {call}", path.display());
            }
            files += 1;
        }
    }
    assert!(files > 20, "only {files} files were read");
}

#[test]
fn host_memory_of_any_size_is_whole_pages_so_that_a_gpu_locks_it_as_one() {
    let host = host().expect("always there");
    let page = rustix::param::page_size() as u64;
    for bytes in [1, 100, page - 1, page, page + 1, 5 * page + 7] {
        let memory = Arc::clone(&host).allocate(bytes).expect("memory");
        let allocation = host.allocation(memory.addr()).expect("there");
        assert_eq!(
            (allocation.base, allocation.len),
            (memory.addr(), bytes.next_multiple_of(page))
        );
        assert_eq!(memory.len(), bytes);
    }
}
