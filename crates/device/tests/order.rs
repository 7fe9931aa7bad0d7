//! Order between transfers and the application's own streams, on the simulated GPU and on a real one.
//!
//! A binary of its own, and one case at a time: a stream that is held may hold up every stream that
//! shares its hardware queue, of which CUDA gives a process eight by default
//! (`CUDA_DEVICE_MAX_CONNECTIONS`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvferry_device::conformance::{Application, ApplicationStream};
use kvferry_device::ordering_conformance;
use kvferry_device::sim::{Fault, SimOptions, sim};
use kvferry_device::{
    CompactCopy, CompactEnd, Consumer, CopyDescriptor, Device, Error, Fence, Left, Producer, Queue,
    QueueOptions, SliceSource, Stage, StageSource, Staged, Ticket, Work,
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
        (far.lend(far_runs).expect("works").expect("it is held"), None),
        (second.lend(near_runs).expect("works").expect("it waits"), Some("wait")),
        (second.lend(near_runs).expect("works").expect("it waits"), Some("record")),
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

/// One step of DMA.
struct OneStep<'a>(Option<&'a [CompactCopy<'a>]>);

impl StageSource for OneStep<'_> {
    fn has_next(&self) -> bool {
        self.0.is_some()
    }

    fn next(&mut self, _slot: &mut [CopyDescriptor]) -> Stage<'_> {
        Stage { pieces: 0, dma: self.0.take().unwrap_or_default(), dma_first: false }
    }
}

/// The end of a submission is asked for when others are behind it on its stream already, and is not
/// theirs. Where nobody asks and nothing follows it costs no call.
#[test]
fn whoever_waits_for_a_submission_does_not_wait_for_those_behind_it_on_its_stream() {
    let (device, control) = sim(&SimOptions::default()).expect("always there");
    let memory = Arc::clone(&device).allocate(8192).expect("memory");
    let copy = CopyDescriptor { src: memory.addr(), dst: memory.addr() + 4096, len: 4096 };
    let one_stream = QueueOptions { streams: 1, ..QueueOptions::default() };
    let mut queue = Arc::clone(&device).queue(&one_stream).expect("a queue");
    let mut others = Arc::clone(&device).queue(&one_stream).expect("a queue");
    let submit = |queue: &mut dyn Queue, after, behind: &[Fence]| {
        let mut nothing = SliceSource(&[]);
        let large = &[copy];
        let mut work = Work { large, after, behind, ..Work::pieces(&mut nothing) };
        // SAFETY: the memory lives longer than the queues.
        unsafe { queue.submit(&mut work) }.expect("works")
    };
    let finish = |queue: &mut dyn Queue, ticket: Ticket| {
        let (completions, start) = (queue.completions(), Instant::now());
        while !completions.done(ticket) {
            assert!(start.elapsed() < Duration::from_secs(30), "it waits");
            queue.check().expect("works");
            std::thread::yield_now();
        }
    };
    let held = control.stream();
    held.hold();
    // SAFETY: the stream lives longer than the submission.
    let after = Some(unsafe { Producer::stream(held.handle()) });
    let waits = submit(&mut *queue, after, &[]);

    control.hold();
    let records = control.calls("record");
    let first = submit(&mut *queue, None, &[]);
    assert_eq!(control.calls("record"), records, "nobody asked");
    let end = |addr| CompactEnd { addr, ..CompactEnd::default() };
    let (src, dst) = (end(copy.src), end(copy.dst));
    let row = [CompactCopy { src, dst, len: 16, rows: 1, layers: 1, pages: 1 }];
    let mut nothing = SliceSource(&[]);
    let staged =
        Staged { stages: &mut OneStep(Some(&row)), behind: &[waits], may_leave: &mut || true };
    let mut work = Work { staged: Some(staged), ..Work::pieces(&mut nothing) };
    // SAFETY: the memory lives longer than the queues.
    let second = unsafe { queue.submit(&mut work) }.expect("works");

    let fence = queue.lend(first).expect("works").expect("the device is held");
    let behind = [fence];
    let late = submit(&mut *others, None, &behind);
    control.release();
    finish(&mut *others, late);
    let completions = queue.completions();
    assert!(completions.done(first) && !completions.done(second) && !completions.done(waits));
    held.open();
    finish(&mut *queue, second);
    let [fence] = behind;
    queue.take_back(fence);
}

/// Submissions are found done from the oldest on, so one that is done may be behind one that runs.
#[test]
fn a_stream_that_is_to_wait_for_what_is_done_does_not_wait_for_what_came_behind_it() {
    let (device, control) = sim(&SimOptions::default()).expect("always there");
    let memory = Arc::clone(&device).allocate(8192).expect("memory");
    let copy = CopyDescriptor { src: memory.addr(), dst: memory.addr() + 4096, len: 4096 };
    let two_streams = QueueOptions { streams: 2, ..QueueOptions::default() };
    let mut queue = device.queue(&two_streams).expect("a queue");
    let mut submit = |copies: usize| {
        let (mut nothing, large) = (SliceSource(&[]), vec![copy; copies]);
        let mut work = Work { large: &large, one_stream: true, ..Work::pieces(&mut nothing) };
        // SAFETY: the memory lives longer than the queue.
        unsafe { queue.submit(&mut work) }.expect("works")
    };
    control.hold();
    let (long, short) = (submit(64), submit(1));
    // A copy of each, one more, and the end of the short one.
    control.step(4);
    // One on each stream.
    let behind = [submit(64), submit(64)];
    let completions = queue.completions();
    assert!(completions.done(short) && !completions.done(long));
    let consumer = control.stream();
    // SAFETY: the stream lives longer than the call.
    let waiting = unsafe { Consumer::stream(consumer.handle()) };
    queue.signal(short, waiting).expect("works");
    let passed = consumer.record();
    // A turn of each stream, and more.
    control.step(9);
    let has_passed = consumer.has_fired(passed);
    let others_run = ![long, behind[0], behind[1]].iter().any(|&ticket| completions.done(ticket));
    control.release();
    assert!(has_passed, "it waits for somebody else's copies");
    assert!(others_run);
}

/// A submission has a completion word until it is done, of which there are 4096.
#[test]
fn submissions_that_wait_leave_half_of_the_words_to_those_that_do_not() {
    const HALF: usize = 2048;
    let (device, control) = sim(&SimOptions::default()).expect("always there");
    let mut queue = device.queue(&QueueOptions::default()).expect("a queue");
    let held = control.stream();
    held.hold();
    // SAFETY: the stream lives longer than the submissions.
    let after = Some(unsafe { Producer::stream(held.handle()) });
    let submit = |queue: &mut dyn Queue, after| {
        let mut nothing = SliceSource(&[]);
        // SAFETY: it copies nothing.
        unsafe { queue.submit(&mut Work { after, ..Work::pieces(&mut nothing) }) }.expect("works")
    };
    let mut waiting: Vec<_> = (0..HALF).map(|_| submit(&mut *queue, after)).collect();
    let completions = queue.completions();
    for _ in 0..100 {
        submit(&mut *queue, None);
    }
    let submitted = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let one_more = scope.spawn(|| {
            let ticket = submit(&mut *queue, after);
            submitted.store(true, Ordering::Release);
            ticket
        });
        // Whoever waits for a word asks the device after each gate.
        let asked = control.calls("fired") + 2 * HALF as u64;
        while control.calls("fired") < asked && !submitted.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        let took_one = submitted.load(Ordering::Acquire);
        held.open();
        assert!(!took_one, "it took a word of the others");
        waiting.push(one_more.join().expect("it gets a word"));
    });
    let start = Instant::now();
    while !waiting.iter().all(|&ticket| completions.done(ticket)) {
        assert!(start.elapsed() < Duration::from_secs(30), "one never ends");
        queue.check().expect("works");
    }
}

/// A launch that is all of a submission says itself that it is over, which saves a call. What is beside
/// or behind it on another stream is not forgotten.
#[test]
fn a_launch_stores_the_word_of_a_submission_that_it_is_all_of() {
    let (device, control) = sim(&SimOptions::default()).expect("always there");
    let memory = Arc::clone(&device).allocate(1 << 20).expect("memory");
    let (src, dst) = (memory.addr(), memory.addr() + (1 << 19));
    let mut queue = Arc::clone(&device).queue(&QueueOptions::default()).expect("a queue");
    let completions = queue.completions();
    let copy = |at: u64| CopyDescriptor { src: src + at * 16, dst: dst + at * 16, len: 16 };
    let few: Vec<_> = (0..16).map(copy).collect();
    let many: Vec<_> = (0..1000).map(copy).collect();
    let end = |addr| CompactEnd { addr, row_stride: 32, ..CompactEnd::default() };
    let one = CompactCopy { src: end(src), dst: end(dst), len: 16, rows: 8, layers: 1, pages: 1 };
    let forms = vec![one; 100];
    let held = control.stream();
    // SAFETY: the stream lives longer than the submissions.
    let after = Some(unsafe { Producer::stream(held.handle()) });
    let none = || (&few[..0], &forms[..0], &few[..0], &few[..0]);
    for (what, (pieces, compact, large, last), after, stores) in [
        ("a few pieces", (&few[..], none().1, none().2, none().3), None, 0),
        ("a form", (none().0, &forms[..1], none().2, none().3), None, 0),
        ("a form behind a producer", (none().0, &forms[..1], none().2, none().3), after, 0),
        ("many pieces", (&many[..], none().1, none().2, none().3), None, 1),
        ("more forms than one launch takes", (none().0, &forms[..], none().2, none().3), None, 1),
        ("pieces and a form", (&few[..], &forms[..1], none().2, none().3), None, 1),
        ("a form and a large copy", (none().0, &forms[..1], &few[..1], none().3), None, 1),
        ("a form and a copy behind it", (none().0, &forms[..1], none().2, &few[..1]), None, 1),
        ("a large copy", (none().0, none().1, &few[..1], none().3), None, 1),
    ] {
        let before = control.calls("store");
        control.hold();
        let mut pieces = SliceSource(pieces);
        let mut work = Work { compact, large, last, after, ..Work::pieces(&mut pieces) };
        // SAFETY: the memory lives longer than the queue.
        let ticket = unsafe { queue.submit(&mut work) }.expect("works");
        assert_eq!(control.calls("store") - before, stores, "{what}");
        assert!(!completions.done(ticket), "{what}: nothing has run");
        control.release();
        let start = Instant::now();
        while !completions.done(ticket) {
            assert!(start.elapsed() < Duration::from_secs(30), "{what}: it does not end");
            queue.check().expect("works");
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_queue_of_a_device_whose_memory_is_all_in_use_ends_its_submissions_by_calls() {
    let (device, control) = sim(&SimOptions::default()).expect("always there");
    let memory = Arc::clone(&device).allocate(1 << 10).expect("memory");
    control.fail("allocate", 0, Fault::OutOfMemory);
    let mut queue = Arc::clone(&device).queue(&QueueOptions::default()).expect("a queue");
    let completions = queue.completions();
    let copy = [CopyDescriptor { src: memory.addr(), dst: memory.addr() + 512, len: 16 }];
    let mut pieces = SliceSource(&copy);
    // SAFETY: the memory lives longer than the queue.
    let ticket = unsafe { queue.submit(&mut Work::pieces(&mut pieces)) }.expect("works");
    assert_eq!(control.calls("store"), 1);
    let start = Instant::now();
    while !completions.done(ticket) {
        assert!(start.elapsed() < Duration::from_secs(30), "it does not end");
        std::thread::yield_now();
    }
}
