//! Streams of the application, and batches that go step by step: none waits for what is not submitted.
//! On the simulated GPU and, with `--features cuda` or `rocm`, on a GPU.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

#[cfg(any(feature = "cuda", feature = "rocm"))]
use kvferry_device::conformance::one_at_a_time;
use kvferry_device::conformance::{Application, ApplicationStream};
use kvferry_device::sim::{SimControl, SimOptions, sim};
use kvferry_engine::{
    BatchId, Buffer, Consumer, Engine, Error, OffloadMode, Op, PageKey, PageShape, PageStore, Part,
    Producer, Range, State, StoreError, StoreOptions, SubmitOptions, Target,
};

use common::config;

const PATIENCE: Duration = Duration::from_secs(60);
const PAGES: u64 = 64;
const PAGE: u64 = 4096;
const LEN: u64 = PAGES * PAGE;

/// Under which every batch goes step by step, this test's in seven.
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

    /// Makes the stream wait for the batch as soon as that can be.
    fn signal_once_submitted(&self, id: BatchId, stream: &dyn ApplicationStream) {
        let start = Instant::now();
        while let Err(refused) = self.engine.signal(id, consumer(stream)) {
            assert_eq!(refused, Error::NotAllSubmitted(id));
            assert!(start.elapsed() < PATIENCE, "it is never all submitted");
            std::thread::yield_now();
        }
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

/// On a stream that waits for a batch the model overwrites the first page that it loads.
fn a_stream_waits_once_all_is_submitted(bench: &Bench) {
    for _ in 0..5 {
        let (gate, model) = ((bench.stream)(), (bench.stream)());
        bench.gpu.write(0, &[1; LEN as usize]).expect("inside");
        gate.hold();
        let id = bench.load(&after(&*gate));
        let refused = [(); 3].map(|()| bench.engine.signal(id, consumer(&*model)));
        gate.open();
        assert_eq!(refused, [(); 3].map(|()| Err(Error::NotAllSubmitted(id))));
        bench.signal_once_submitted(id, &*model);
        // SAFETY: the batch, which the stream waits for, is the last that writes there.
        unsafe { model.fill(bench.gpu.addr(), 9, PAGE) };
        until_fired(&*model, model.record());
        let loaded = bench.loaded();
        assert!(loaded[..PAGE as usize].iter().all(|&byte| byte == 9), "the model did not wait");
        assert!(loaded[PAGE as usize..].iter().all(|&byte| byte == 3), "it did not wait for all");
        assert_eq!(bench.finish(id), State::Completed);
    }
}

/// What is loaded in steps goes back to where it came from.
fn a_batch_behind_one_in_steps_runs_in_order(bench: &Bench) {
    let gate = (bench.stream)();
    bench.gpu.write(0, &[1; LEN as usize]).expect("inside");
    gate.hold();
    let load = bench.load(&after(&*gate));
    let range = [Range { local: bench.gpu.addr(), remote: bench.host.addr(), len: LEN }];
    let part = Part { target: &bench.target, op: Op::Write, copies: (&range).into() };
    let options = SubmitOptions { behind: &[load], ..SubmitOptions::default() };
    let store = bench.engine.submit_parts(&[part], &options).expect("submits");
    let refused = bench.engine.signal(store, consumer(&*gate));
    gate.open();
    assert_eq!(refused, Err(Error::NotAllSubmitted(store)));
    assert_eq!(bench.finish(store), State::Completed);
    assert_eq!(bench.finish(load), State::Completed);
    let mut stored = vec![0; LEN as usize];
    bench.host.read(0, &mut stored).expect("inside");
    assert!(stored.iter().all(|&byte| byte == 3), "it did not wait for what it is behind");
}

/// Pages out and in again, into a page that the model's stream overwrites once the host has waited.
fn a_page_in_is_waited_for_on_the_host(bench: &Bench) {
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
    let refused = store.signal(&batch, consumer(&*model));
    gate.open();
    let not_submitted = matches!(refused, Err(StoreError::Engine(Error::NotAllSubmitted(_))));
    assert!(not_submitted, "{refused:?}");
    assert_eq!(store.wait(&batch, PATIENCE), Ok(State::Completed));
    store.signal(&batch, consumer(&*model)).expect("it has ended");
    // SAFETY: nothing else writes there any more.
    unsafe { model.fill(bench.gpu.addr() + 2 * PAGE, 9, PAGE) };
    until_fired(&*model, model.record());
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
}

fn all_on(bench: &Bench) {
    a_stream_waits_once_all_is_submitted(bench);
    a_batch_behind_one_in_steps_runs_in_order(bench);
    a_page_in_is_waited_for_on_the_host(bench);
}

#[test]
fn under_a_byte_rate_no_stream_waits_for_what_is_not_submitted() {
    all_on(&Bench::new(simulated().0, RATE));
}

#[test]
fn under_the_tail_policy_no_stream_waits_for_what_is_not_submitted() {
    let (application, control) = simulated();
    let bench = Bench::new(application, TAIL);
    bench.throttle(&control);
    let id = bench.load(&SubmitOptions::default());
    let choice = bench.engine.choice(id).expect("known").expect("an offload");
    assert!(choice.in_steps, "{choice}");
    assert_eq!(bench.finish(id), State::Completed);
    all_on(&bench);
}

#[test]
fn a_stream_that_was_refused_waits_for_nothing() {
    let bench = Bench::new(simulated().0, RATE);
    let (gate, model) = ((bench.stream)(), (bench.stream)());
    gate.hold();
    let (local, len) = (bench.gpu.addr(), LEN / 2);
    let inside = [Range { local, remote: local + len, len }];
    let part = Part { target: &bench.target, op: Op::Write, copies: (&inside).into() };
    // Between a GPU and host memory, and on the GPU.
    let ids = [
        bench.load(&after(&*gate)),
        bench.engine.submit_parts(&[part], &after(&*gate)).expect("submits"),
    ];
    let refused = ids.map(|id| bench.engine.signal(id, consumer(&*model)));
    if refused != ids.map(|id| Err(Error::NotAllSubmitted(id))) {
        gate.open();
        panic!("not all of them is submitted: {refused:?}");
    }
    until_fired(&*model, model.record());
    for id in ids {
        assert_eq!(bench.engine.poll(id).expect("known").state, State::Running);
    }
    gate.open();
}

#[test]
fn a_stream_waits_for_steps_that_run() {
    let (application, control) = simulated();
    // Four steps, and as many may run at a time.
    let bench = Bench::new(application, &[("MC_KVFERRY_MAX_RATE", "8M")]);
    let model = (bench.stream)();
    bench.gpu.write(0, &[1; LEN as usize]).expect("inside");
    control.hold();
    let id = bench.load(&SubmitOptions { offload: OffloadMode::Direct, ..Default::default() });
    bench.signal_once_submitted(id, &*model);
    // SAFETY: the batch, which the stream waits for, is the last that writes there.
    unsafe { model.fill(bench.gpu.addr(), 9, PAGE) };
    let event = model.record();
    assert_eq!(bench.engine.poll(id).expect("known").state, State::Running);
    control.release();
    until_fired(&*model, event);
    // Whether or not anybody asked for the batch.
    let loaded = bench.loaded();
    assert!(loaded[..PAGE as usize].iter().all(|&byte| byte == 9), "the model did not wait");
    assert!(loaded[PAGE as usize..].iter().all(|&byte| byte == 3), "it did not wait for all");
    assert_eq!(bench.finish(id), State::Completed);
}

#[test]
fn host_memory_refuses_it_too_until_the_batch_has_ended() {
    let host = kvferry_device::host().expect("always there");
    // Steps of a page, ten a second.
    let engine = Engine::new(config(&[("MC_KVFERRY_MAX_RATE", "40K")]), vec![Arc::clone(&host)]);
    let engine = engine.expect("an engine");
    let [local, remote] = [(); 2].map(|()| engine.allocate(&host, LEN).expect("memory"));
    let range = [Range { local: local.addr(), remote: remote.addr(), len: LEN }];
    let target = engine.local().expect("itself");
    let id = engine.submit(&target, Op::Write, &range).expect("submits");
    let (_, control) = simulated();
    let stream = control.stream();
    let refused = engine.signal(id, consumer(&stream)).expect_err("not all submitted");
    assert_eq!(refused, Error::NotAllSubmitted(id));
    engine.cancel(id).expect("known");
    let state = engine.wait(id, PATIENCE).expect("known").state;
    assert_eq!(state, State::Failed(Error::Cancelled));
    engine.signal(id, consumer(&stream)).expect("a batch that has ended is not waited for");
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
    fn under_a_byte_rate_no_stream_waits_for_what_is_not_submitted() {
        let _alone = one_at_a_time();
        let Some(application) = cuda() else { return };
        all_on(&Bench::new(application, RATE));
    }
}

#[cfg(feature = "rocm")]
mod rocm_gpu {
    use super::*;

    #[test]
    fn under_a_byte_rate_no_stream_waits_for_what_is_not_submitted() {
        let _alone = one_at_a_time();
        let stream = || kvferry_device::rocm::application_stream(0).expect("a stream");
        let name = kvferry_engine::DeviceName::Rocm(0);
        let application = open(name, Box::new(move || Box::new(stream())));
        let Some(application) = application else { return };
        all_on(&Bench::new(application, RATE));
    }
}
