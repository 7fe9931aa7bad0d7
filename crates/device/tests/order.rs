//! Order between transfers and the application's own streams, on the simulated GPU and on a real one.
//!
//! A binary of its own, and one case at a time: a stream that is held may hold up every stream that
//! shares its hardware queue, of which CUDA gives a process eight by default
//! (`CUDA_DEVICE_MAX_CONNECTIONS`).

use std::sync::Arc;

use kvferry_device::conformance::{Application, ApplicationStream};
use kvferry_device::ordering_conformance;
use kvferry_device::sim::{Fault, SimOptions, sim};
use kvferry_device::{
    CopyDescriptor, Device, Error, Fence, Left, Producer, Queue, QueueOptions, SliceSource, Work,
};

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

/// Whatever a refused submission waited for, and in whatever call it was refused, the next one that
/// waits does not wait for it.
#[test]
fn a_refused_submission_leaves_no_stream_that_waits_to_the_next() {
    let (device, control) = sim(&SimOptions::default()).expect("always there");
    let (other, of_other) = sim(&SimOptions { ordinal: 1, ..SimOptions::default() }).expect("too");
    let open = |device: &Arc<dyn Device>| {
        Arc::clone(device).queue(&QueueOptions::default()).expect("a queue")
    };
    let copy = |device: &Arc<dyn Device>| {
        let memory = Arc::clone(device).allocate(8192).expect("memory");
        let copy = [CopyDescriptor { src: memory.addr(), dst: memory.addr() + 4096, len: 4096 }];
        (memory, copy)
    };
    let submit = |queue: &mut dyn Queue, large: &[CopyDescriptor], after, behind: &[Fence]| {
        let mut nothing = SliceSource(&[]);
        let mut work = Work { large, after, behind, ..Work::pieces(&mut nothing) };
        // SAFETY: the memory lives longer than the queues.
        unsafe { queue.submit(&mut work) }
    };
    let (_memory, here) = copy(&device);
    let (_others, there) = copy(&other);
    let (mut queue, mut second, mut far) = (open(&device), open(&device), open(&other));
    let (held, ready) = (control.stream(), control.stream());
    // SAFETY: the streams live longer than the submissions.
    let after = |stream: &dyn ApplicationStream| unsafe { Producer::stream(stream.handle()) };
    let far_runs = {
        of_other.hold();
        submit(&mut *far, &there, None, &[]).expect("runs on the other device")
    };
    held.hold();
    let near_runs = submit(&mut *second, &here, Some(after(&held)), &[]).expect("waits");
    for (fence, call) in [
        (far.lend(far_runs).expect("it is held"), None),
        (second.lend(near_runs).expect("it waits"), Some("wait")),
        (second.lend(near_runs).expect("it waits"), Some("record")),
    ] {
        if let Some(call) = call {
            control.fail(call, 0, Fault::Refused);
        }
        let behind = [fence];
        let refused = submit(&mut *queue, &here, Some(after(&held)), &behind);
        let refused = refused.expect_err("behind what it cannot wait for");
        assert_eq!(refused.left, Left::Nothing);
        assert_eq!(call.is_none(), matches!(refused.error, Error::NotOrderable { .. }));
        control.forget_failures();
        let [fence] = behind;
        if call.is_none() { &mut far } else { &mut second }.take_back(fence);
        let next = submit(&mut *queue, &here, Some(after(&ready)), &[]);
        let next = next.expect("its producer is ready");
        let completions = queue.completions();
        while !completions.done(next) {
            queue.check().expect("works");
            std::thread::yield_now();
        }
    }
    held.open();
    of_other.release();
}
