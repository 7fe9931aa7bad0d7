//! Order between transfers and the application's own streams, on the simulated GPU and on a real one.
//!
//! A binary of its own, and one case at a time: a stream that is held may hold up every stream that
//! shares its hardware queue, of which CUDA gives a process eight by default
//! (`CUDA_DEVICE_MAX_CONNECTIONS`).

use kvferry_device::conformance::Application;
use kvferry_device::ordering_conformance;
use kvferry_device::sim::{SimOptions, sim};

fn simulated() -> Option<Application> {
    let (device, control) = sim(&SimOptions::default()).expect("always there");
    Some((device, Box::new(move || Box::new(control.stream()))))
}

ordering_conformance!(simulated_gpu, super::simulated);

#[cfg(feature = "cuda")]
fn cuda() -> Option<Application> {
    use kvferry_device::cuda::{CudaOptions, application_stream, open};
    match open(0, &CudaOptions::default()) {
        Ok(device) => {
            Some((device, Box::new(|| Box::new(application_stream(0).expect("a stream")))))
        }
        Err(error) => {
            kvferry_device::conformance::skip("cuda", &error);
            None
        }
    }
}

#[cfg(feature = "cuda")]
ordering_conformance!(cuda_gpu, super::cuda);

#[cfg(feature = "rocm")]
fn rocm() -> Option<Application> {
    use kvferry_device::rocm::{RocmOptions, application_stream, open};
    match open(0, &RocmOptions::default()) {
        Ok(device) => {
            Some((device, Box::new(|| Box::new(application_stream(0).expect("a stream")))))
        }
        Err(error) => {
            kvferry_device::conformance::skip("rocm", &error);
            None
        }
    }
}

#[cfg(feature = "rocm")]
ordering_conformance!(rocm_gpu, super::rocm);
