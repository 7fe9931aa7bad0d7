//! Streams of the application wait for batches that go step by step, of which not all is submitted: on
//! the simulated GPU and, with `--features cuda` or `rocm`, on a GPU.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

#[cfg(any(feature = "cuda", feature = "rocm"))]
use kvferry_device::conformance::one_at_a_time;
use kvferry_device::conformance::{Application, ApplicationStream};
use kvferry_device::sim::{SimControl, SimOptions, sim};
use kvferry_engine::{
    BatchId, Buffer, Consumer, Engine, Error, OffloadMode, Op, PageKey, PageShape, PageStore, Part,
    Producer, Range, State, StoreOptions, SubmitOptions, Target,
};

use common::config;

const PATIENCE: Duration = Duration::from_secs(60);
const PAGES: u64 = 64;
const PAGE: u64 = 4096;
const LEN: u64 = PAGES * PAGE;

/// Under which every batch goes step by step, this test's in seven, of which four run at a time.
const RATE: &[(&str, &str)] = &[("MC_KVFERRY_MAX_RATE", "4M")];
/// Under which batches do once [`Bench::throttle`] was called.
const TAIL: &[(&str, &str)] =
    &[("MC_KVFERRY_POLICY", "tail"), ("MC_KVFERRY_OFFLOAD_CHUNK_BYTES", "64K")];

/// Memory of a GPU and of the host, which is 3 everywhere.
struct Bench {
    stream: Box<dyn Fn() -> Box<dyn ApplicationStream>>,
    target: Target,
    gpu: Buffer,
    host: Buffer,
    engine: Arc<Engine>,
}

impl Bench {
    fn new((device, stream): Application, knobs: &[(&str, &str)]) -> Self {
        let host = kvferry_device::host().expect("always there");
        let devices = vec![Arc::clone(&device), Arc::clone(&host)];
        let engine = Engine::new(config(knobs), devices).expect("an engine");
        let gpu = engine.allocate(&device, LEN).expect("memory");
        let host = engine.allocate(&host, LEN).expect("memory");
        let target = engine.local().expect("itself");
        host.write(0, &[3; LEN as usize]).expect("inside");
        Self { stream, target, gpu, host, engine }
    }

    /// Tells of slow steps of the model beside a transfer, until transfers go step by step.
    fn throttle(&self, control: &SimControl) {
        let step = |percent: u32| {
            self.engine.record_step(0, Duration::from_micros(3000) * (100 + percent) / 100);
        };
        (0..257).for_each(|_| step(0));
        control.hold();
        let id = self.load(&SubmitOptions::default());
        (0..2 * 256).for_each(|at| step(if at % 3 == 0 { 20 } else { 0 }));
        control.release();
        self.finish(id);
    }

    /// Pages in host memory to pages of the GPU in the opposite order.
    fn load(&self, options: &SubmitOptions<'_>) -> BatchId {
        let range = |at: u64| Range {
            local: self.gpu.addr() + (PAGES - 1 - at) * PAGE,
            remote: self.host.addr() + at * PAGE,
            len: PAGE,
        };
        let ranges: Vec<_> = (0..PAGES).map(range).collect();
        let part = Part { target: &self.target, op: Op::Read, copies: (&ranges[..]).into() };
        self.engine.submit_parts(&[part], options).expect("submits")
    }

    fn finish(&self, id: BatchId) -> State {
        let state = self.engine.wait(id, PATIENCE).expect("known").state;
        assert_ne!(state, State::Running, "the batch never ended");
        self.engine.release(id).expect("it ended");
        state
    }

    fn loaded(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN as usize];
        self.gpu.read(0, &mut bytes).expect("inside");
        bytes
    }
}

/// The engine's stream, for which nobody waits: it is the submission's.
fn after(stream: &dyn ApplicationStream) -> SubmitOptions<'static> {
    // SAFETY: the stream lives longer than the call that it is for.
    let after = Some(unsafe { Producer::stream(stream.handle()) });
    SubmitOptions { after, ..SubmitOptions::default() }
}

fn consumer(stream: &dyn ApplicationStream) -> Consumer {
    // SAFETY: as above.
    unsafe { Consumer::stream(stream.handle()) }
}

fn until_fired(stream: &dyn ApplicationStream, event: *mut std::ffi::c_void) {
    let start = Instant::now();
    while !stream.has_fired(event) {
        assert!(start.elapsed() < PATIENCE, "the stream does not go on");
        std::thread::yield_now();
    }
}

fn simulated() -> (Application, Arc<SimControl>) {
    let (device, control) = sim(&SimOptions::default()).expect("always there");
    let streams = Arc::clone(&control);
    ((device, Box::new(move || Box::new(streams.stream()))), control)
}

/// On a stream that waits for batches the model overwrites the first page that they load, several
/// times, because what is waited for is used again.
fn a_stream_waits_for_all_steps(bench: &Bench) {
    let mut pinned = 0;
    for round in 1..=20 {
        let (gate, model) = ((bench.stream)(), (bench.stream)());
        bench.gpu.write(0, &[1; LEN as usize]).expect("inside");
        gate.hold();
        let id = bench.load(&after(&*gate));
        bench.engine.signal(id, consumer(&*model)).expect("the stream waits");
        // SAFETY: the batch, which the stream waits for, is the last that writes there.
        unsafe { model.fill(bench.gpu.addr(), 9, PAGE) };
        let event = model.record();
        let state = bench.engine.wait(id, Duration::from_millis(5)).expect("known").state;
        assert_eq!(state, State::Running);
        assert!(!model.has_fired(event), "no step was submitted");
        gate.open();
        until_fired(&*model, event);
        // Whether or not anybody asked for the batch.
        let loaded = bench.loaded();
        assert!(loaded[..PAGE as usize].iter().all(|&byte| byte == 9), "the model did not wait");
        assert!(loaded[PAGE as usize..].iter().all(|&byte| byte == 3), "it did not wait for all");
        assert_eq!(bench.finish(id), State::Completed);
        match round {
            // The end of the batch before may not have been seen when the next is waited for.
            1..3 => pinned = bench.engine.pinned_bytes(),
            _ => assert!(bench.engine.pinned_bytes() <= pinned + 4, "{round} rounds"),
        }
    }
}

#[test]
fn a_stream_waits_for_a_batch_under_a_byte_rate() {
    a_stream_waits_for_all_steps(&Bench::new(simulated().0, RATE));
}

#[test]
fn a_stream_waits_for_a_batch_that_the_tail_policy_throttles() {
    let (application, control) = simulated();
    let bench = Bench::new(application, TAIL);
    bench.throttle(&control);
    let id = bench.load(&SubmitOptions::default());
    let choice = bench.engine.choice(id).expect("known").expect("an offload");
    assert!(choice.in_steps, "{choice}");
    assert_eq!(bench.finish(id), State::Completed);
    a_stream_waits_for_all_steps(&bench);
}

#[test]
fn a_stream_waits_for_copies_on_one_device_under_a_byte_rate() {
    let bench = Bench::new(simulated().0, RATE);
    let (gate, model) = ((bench.stream)(), (bench.stream)());
    bench.gpu.write(0, &[5; LEN as usize]).expect("inside");
    gate.hold();
    let (local, len) = (bench.gpu.addr(), LEN / 2);
    let range = [Range { local, remote: local + len, len }];
    let part = Part { target: &bench.target, op: Op::Write, copies: (&range).into() };
    let id = bench.engine.submit_parts(&[part], &after(&*gate)).expect("submits");
    bench.engine.signal(id, consumer(&*model)).expect("the stream waits");
    // SAFETY: the batch, which the stream waits for, is the last that reads there.
    unsafe { model.fill(local, 9, len) };
    let event = model.record();
    gate.open();
    until_fired(&*model, event);
    let [written, read] =
        [0, len].map(|at| bench.loaded()[at as usize..(at + len) as usize].to_vec());
    assert!(written.iter().all(|&byte| byte == 9) && read.iter().all(|&byte| byte == 5));
    assert_eq!(bench.finish(id), State::Completed);
}

#[test]
fn a_stream_goes_on_when_the_batch_is_cancelled() {
    let bench = Bench::new(simulated().0, RATE);
    let (gate, model) = ((bench.stream)(), (bench.stream)());
    gate.hold();
    let id = bench.load(&after(&*gate));
    bench.engine.signal(id, consumer(&*model)).expect("the stream waits");
    let event = model.record();
    assert!(!model.has_fired(event));
    bench.engine.cancel(id).expect("known");
    until_fired(&*model, event);
    assert_eq!(bench.finish(id), State::Failed(Error::Cancelled));
    gate.open();
}

#[test]
fn a_stream_goes_on_when_the_device_is_lost() {
    let (application, control) = simulated();
    // What a lost device may still use stays registered.
    let leaks = [RATE, &[("MC_KVFERRY_UNREGISTER_TIMEOUT_SEC", "0")]].concat();
    let bench = Bench::new(application, &leaks);
    let model = (bench.stream)();
    control.hold();
    // No step of it ends, and not all are submitted before one does.
    let id = bench.load(&SubmitOptions { offload: OffloadMode::Direct, ..Default::default() });
    bench.engine.signal(id, consumer(&*model)).expect("the stream waits");
    let event = model.record();
    control.lose();
    let state = bench.finish(id);
    let lost = matches!(&state, State::Failed(Error::Device(kvferry_device::Error::Lost { .. })));
    assert!(lost, "{state:?}");
    control.release();
    until_fired(&*model, event);
}

#[test]
fn a_device_that_cannot_wait_for_the_host_refuses_it_until_all_is_submitted() {
    let host = kvferry_device::host().expect("always there");
    let engine = Engine::new(config(&[("MC_KVFERRY_MAX_RATE", "1M")]), vec![Arc::clone(&host)]);
    let engine = engine.expect("an engine");
    let [local, remote] = [(); 2].map(|()| engine.allocate(&host, LEN).expect("memory"));
    let range = [Range { local: local.addr(), remote: remote.addr(), len: LEN }];
    let target = engine.local().expect("itself");
    let id = engine.submit(&target, Op::Write, &range).expect("submits");
    let (_, control) = simulated();
    let stream = control.stream();
    let refused = engine.signal(id, consumer(&stream)).expect_err("not all submitted");
    assert_eq!(refused, Error::NotAllSubmitted(id));
    assert_eq!(engine.wait(id, PATIENCE).expect("known").state, State::Completed);
    engine.signal(id, consumer(&stream)).expect("a batch that has ended is not waited for");
}

/// Pages out and in again, behind a gate, into a page that the model's stream overwrites.
fn a_stream_waits_for_a_page_in(bench: &Bench) {
    let (page_bytes, layers) = (PAGE, 4);
    let pages = (PAGES / u64::from(layers)) as u32;
    let shape = PageShape {
        addr: bench.gpu.addr(),
        pages,
        page_bytes,
        layers,
        layer_stride: u64::from(pages) * page_bytes,
        page_stride: page_bytes,
    };
    let options = StoreOptions::with_budget(2 * LEN);
    let store = PageStore::new(&bench.engine, 0, shape, options).expect("a store");
    bench.gpu.write(0, &[7; LEN as usize]).expect("inside");
    store.page_out(&[(0, PageKey(1)), (1, PageKey(2))], None).expect("goes out");
    store.drain(PATIENCE).expect("all well");
    let (gate, model) = ((bench.stream)(), (bench.stream)());
    bench.gpu.write(0, &[1; LEN as usize]).expect("inside");
    gate.hold();
    let back = [(PageKey(1), 2), (PageKey(2), 3)];
    let batch = store.page_in(&back, after(&*gate).after).expect("comes in");
    store.signal(&batch, consumer(&*model)).expect("the stream waits");
    let row = bench.gpu.addr() + 2 * PAGE;
    // SAFETY: the page-in, which the stream waits for, is the last that writes there.
    unsafe { model.fill(row, 9, PAGE) };
    let event = model.record();
    assert!(!model.has_fired(event), "nothing came in");
    gate.open();
    until_fired(&*model, event);
    let loaded = bench.loaded();
    for layer in 0..u64::from(layers) {
        for page in 0..4 {
            let expected = match (layer, page) {
                (0, 2) => 9,
                (_, 2 | 3) => 7,
                _ => 1,
            };
            let at = ((layer * u64::from(pages) + page) * PAGE) as usize;
            let row = &loaded[at..at + PAGE as usize];
            assert!(row.iter().all(|&byte| byte == expected), "layer {layer} of page {page}");
        }
    }
    assert_eq!(store.wait(&batch, PATIENCE), Ok(State::Completed));
}

#[test]
fn a_stream_waits_for_a_page_in_under_a_byte_rate() {
    a_stream_waits_for_a_page_in(&Bench::new(simulated().0, RATE));
}

#[test]
fn a_stream_waits_for_a_page_in_that_the_tail_policy_throttles() {
    let (application, control) = simulated();
    let bench = Bench::new(application, TAIL);
    bench.throttle(&control);
    a_stream_waits_for_a_page_in(&bench);
}

/// The device and its streams; none without one, and says so.
#[cfg(any(feature = "cuda", feature = "rocm"))]
fn open(
    name: kvferry_engine::DeviceName,
    stream: Box<dyn Fn() -> Box<dyn ApplicationStream>>,
) -> Option<Application> {
    match kvferry_engine::open_device(name, &config(&[])) {
        Ok(device) => Some((device, stream)),
        Err(error) => {
            let name = name.to_string();
            kvferry_device::conformance::skip(name.split(':').next().unwrap_or(&name), &error);
            None
        }
    }
}

#[cfg(feature = "cuda")]
mod cuda_gpu {
    use super::*;

    fn cuda() -> Option<Application> {
        let stream = || kvferry_device::cuda::application_stream(0).expect("a stream");
        open(kvferry_engine::DeviceName::Cuda(0), Box::new(move || Box::new(stream())))
    }

    #[test]
    fn streams_wait_for_a_batch_and_a_page_in_under_a_byte_rate() {
        let _alone = one_at_a_time();
        let Some(application) = cuda() else { return };
        let bench = Bench::new(application, RATE);
        a_stream_waits_for_all_steps(&bench);
        a_stream_waits_for_a_page_in(&bench);
    }
}

#[cfg(feature = "rocm")]
mod rocm_gpu {
    use super::*;

    #[test]
    fn a_stream_is_refused_a_batch_of_which_not_all_is_submitted() {
        let _alone = one_at_a_time();
        let stream = || kvferry_device::rocm::application_stream(0).expect("a stream");
        let name = kvferry_engine::DeviceName::Rocm(0);
        let application = open(name, Box::new(move || Box::new(stream())));
        let Some(application) = application else { return };
        let bench = Bench::new(application, RATE);
        let (gate, model) = ((bench.stream)(), (bench.stream)());
        gate.hold();
        let id = bench.load(&after(&*gate));
        for _ in 0..3 {
            let refused = bench.engine.signal(id, consumer(&*model)).expect_err("not submitted");
            assert_eq!(refused, Error::NotAllSubmitted(id));
        }
        gate.open();
        assert_eq!(bench.finish(id), State::Completed);
        bench.engine.signal(id, consumer(&*model)).expect_err("it was released");
    }
}
