//! Batches that their caller does not want any more: each ends once, and its memory is quiet then.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_device::Device;
use kvferry_device::sim::{SimControl, SimOptions, sim};
use kvferry_engine::{
    BatchId, BatchStatus, Buffer, Engine, Error, Listener, Op, Part, Producer, Range, State,
    SubmitOptions, Target,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use common::config;

const LONG: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

fn gpu() -> (Arc<dyn Device>, Arc<SimControl>) {
    sim(&SimOptions::default()).expect("always there")
}

fn host() -> Arc<dyn Device> {
    kvferry_device::host().expect("always there")
}

/// An engine, a target, and two buffers of which the second is at the target.
struct Bench {
    local: Buffer,
    remote: Buffer,
    target: Target,
    engine: Arc<Engine>,
    /// If the target is another engine.
    _listener: Option<Listener>,
}

impl Bench {
    /// From a GPU to host memory of one engine.
    fn offload(device: &Arc<dyn Device>, len: u64, knobs: &[(&str, &str)]) -> Self {
        let devices = vec![Arc::clone(device), host()];
        let engine = Engine::new(config(knobs), devices).expect("an engine");
        let local = engine.allocate(device, len).expect("memory");
        let remote = engine.allocate(&engine.devices()[1], len).expect("memory");
        let target = engine.local().expect("opens");
        Self { local, remote, target, engine, _listener: None }
    }

    /// Over TCP, to another engine of this process.
    fn tcp(
        here: &Arc<dyn Device>,
        there: &Arc<dyn Device>,
        len: u64,
        knobs: &[(&str, &str)],
    ) -> Self {
        let other = Engine::new(config(knobs), vec![Arc::clone(there)]).expect("an engine");
        let remote = other.allocate(there, len).expect("memory");
        let listener = other.listen("127.0.0.1:0".parse().unwrap()).expect("listens");
        let engine = Engine::new(config(knobs), vec![Arc::clone(here)]).expect("an engine");
        let local = engine.allocate(here, len).expect("memory");
        let address = listener.address().to_string();
        let target = engine.open_tcp("peer", other.segment(), &address).expect("opens");
        Self { local, remote, target, engine, _listener: Some(listener) }
    }

    fn all(&self) -> Range {
        Range { local: self.local.addr(), remote: self.remote.addr(), len: self.local.len() }
    }

    fn submit(&self, op: Op) -> BatchId {
        self.engine.submit(&self.target, op, &[self.all()]).expect("starts")
    }

    fn end(&self, id: BatchId) -> BatchStatus {
        let status = self.engine.wait(id, LONG).expect("it is there");
        assert_ne!(status.state, State::Running, "it did not end in {LONG:?}");
        assert_eq!(self.engine.poll(id).as_ref(), Ok(&status), "it ends once");
        self.engine.cancel(id).expect("it is there still");
        assert_eq!(self.engine.poll(id).as_ref(), Ok(&status), "too late");
        self.engine.release(id).expect("it ended");
        assert_eq!(self.engine.cancel(id), Err(Error::UnknownBatch(id)));
        status
    }

    fn is_running(&self, id: BatchId) -> bool {
        self.engine.poll(id).expect("it is there").state == State::Running
    }

    /// Fills both ends with another byte each.
    fn fill(&self, local: u8, remote: u8) {
        let len = self.local.len() as usize;
        self.local.write(0, &vec![local; len]).expect("inside");
        self.remote.write(0, &vec![remote; len]).expect("inside");
    }

    /// How many bytes of the target's buffer are that byte.
    fn count(&self, byte: u8) -> u64 {
        let mut found = vec![0; self.remote.len() as usize];
        self.remote.read(0, &mut found).expect("inside");
        found.iter().filter(|it| **it == byte).count() as u64
    }

    /// Moves all bytes, after whatever was cancelled.
    fn works(&self) {
        self.fill(201, 202);
        let id = self.submit(Op::Write);
        assert_eq!(self.end(id).state, State::Completed);
        assert_eq!(self.count(201), self.remote.len());
    }
}

fn cancelled() -> State {
    State::Failed(Error::Cancelled)
}

#[test]
fn what_a_gpus_queue_has_taken_runs_to_its_end() {
    let (device, control) = gpu();
    let bench = Bench::offload(&device, MIB, &[]);
    bench.fill(1, 2);
    control.hold();
    let id = bench.submit(Op::Write);
    for _ in 0..3 {
        bench.engine.cancel(id).expect("it is there");
    }
    assert!(bench.is_running(id));
    control.release();
    let status = bench.end(id);
    assert_eq!((status.state, status.bytes), (State::Completed, MIB));
    assert_eq!(bench.count(1), MIB);
    assert_eq!(bench.engine.statistics().all_paths().cancelled, 0);
}

#[test]
fn a_batch_that_is_submitted_in_steps_ends_behind_those_that_run() {
    let (device, control) = gpu();
    // A hundredth of a second's bytes a step, and four steps at a time: 100 s for all.
    let knobs = [("MC_KVFERRY_MAX_RATE", "40K"), ("MC_KVFERRY_OFFLOAD_CHUNK_BYTES", "64K")];
    let bench = Bench::offload(&device, 4 * MIB, &knobs);
    bench.fill(1, 2);
    control.hold();
    let id = bench.submit(Op::Write);
    let start = Instant::now();
    while control.calls("copy") == 0 {
        assert!(start.elapsed() < LONG, "no step was submitted");
        std::thread::yield_now();
    }
    bench.engine.cancel(id).expect("it is there");
    assert!(bench.is_running(id), "a step that was submitted is waited for");
    control.release();
    let start = Instant::now();
    assert_eq!(bench.end(id).state, cancelled());
    assert!(start.elapsed() < LONG / 2, "the worker was called");
    let moved = bench.count(1);
    assert!(moved < MIB, "{moved} bytes were moved");
    // Nothing follows: what is written behind the end stays.
    bench.fill(3, 4);
    assert_eq!(bench.count(4), 4 * MIB);
    let statistics = bench.engine.statistics();
    assert_eq!((statistics.all_paths().cancelled, statistics.running), (1, 0));
}

/// Knobs that make shares and slices many, and a silent peer short of patience.
const SMALL: &[(&str, &str)] = &[
    ("MC_TCP_SLICE_SIZE", "64K"),
    ("MC_TCP_GPU_STAGING_SLOT_MB", "1"),
    ("MC_TCP_GPU_STAGING_SLOTS", "2"),
    ("MC_TCP_LANES_PER_PEER", "2"),
    ("MC_KVFERRY_TCP_THREADS", "2"),
];

#[test]
fn a_transfer_over_tcp_is_quiet_at_both_ends_when_it_has_ended() {
    for gpus in [[false, false], [false, true], [true, false], [true, true]] {
        for op in [Op::Write, Op::Read] {
            println!("{gpus:?} {op:?}");
            let device = |is_gpu| if is_gpu { gpu() } else { (host(), gpu().1) };
            let ((here, held_here), (there, held_there)) = (device(gpus[0]), device(gpus[1]));
            let bench = Bench::tcp(&here, &there, 8 * MIB, SMALL);
            bench.works();
            bench.fill(1, 2);
            // Where there is a GPU its copies wait, so that not all is done at once.
            held_here.hold();
            held_there.hold();
            let id = bench.submit(op);
            bench.engine.cancel(id).expect("it is there");
            let waits = gpus.contains(&true);
            // What is queued at a device is not taken back, and the batch waits for it.
            let still_running = waits && bench.is_running(id);
            held_here.release();
            held_there.release();
            let state = bench.end(id).state;
            let too_late = !waits && state == State::Completed;
            assert!(state == cancelled() || too_late, "{state:?}, {still_running}");
            bench.fill(3, 4);
            assert_eq!(bench.count(4), 8 * MIB, "nothing arrives behind the end");
            let mut local = vec![0; 8 * MIB as usize];
            bench.local.read(0, &mut local).expect("inside");
            assert!(local.iter().all(|byte| *byte == 3), "nor here");
            bench.works();
        }
    }
}

#[test]
fn a_transfer_that_waits_for_the_applications_work_ends_at_once_and_is_not_begun() {
    let (device, control) = gpu();
    let (there, _) = gpu();
    let bench = Bench::tcp(&device, &there, MIB, SMALL);
    bench.fill(1, 2);
    let stream = control.stream();
    use kvferry_device::conformance::ApplicationStream;
    stream.hold();
    let ranges = [bench.all()];
    let part = Part { target: &bench.target, op: Op::Write, copies: (&ranges).into() };
    // SAFETY: the stream lives on.
    let after = Some(unsafe { Producer::stream(stream.handle()) });
    let options = SubmitOptions { after, ..SubmitOptions::default() };
    let id = bench.engine.submit_parts(&[part], &options).expect("starts");
    assert!(bench.is_running(id));
    bench.engine.cancel(id).expect("it is there");
    assert_eq!(bench.end(id).state, cancelled());
    // Its memory is its owner's again, though the application's work goes on.
    bench.engine.unregister(bench.local.addr()).expect("nothing uses it");
    // SAFETY: the buffer's own memory, which unregisters it.
    unsafe { bench.engine.register(bench.local.addr(), MIB) }.expect("as before");
    stream.open();
    bench.works();
    bench.fill(1, 2);
    assert_eq!(bench.count(2), MIB);
}

#[test]
fn cancelling_at_any_moment_ends_every_batch_once() {
    let random = &mut SmallRng::seed_from_u64(rand::random());
    let bench = Bench::tcp(&host(), &host(), 4 * MIB, SMALL);
    bench.works();
    let (mut ends, mut longest) = ([0; 2], Duration::from_millis(4));
    for round in 0..300 {
        let op = if round % 2 == 0 { Op::Write } else { Op::Read };
        let id = bench.submit(op);
        let (start, moment) = (Instant::now(), random.random_range(Duration::ZERO..longest));
        while start.elapsed() < moment {
            std::hint::spin_loop();
        }
        let state = std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| bench.engine.cancel(id).expect("it is there"));
            }
            let status = bench.engine.wait(id, LONG).expect("it is there");
            status.state
        });
        match state {
            State::Completed => {
                ends[0] += 1;
                longest = longest.mul_f64(0.95);
            }
            state => {
                assert_eq!(state, cancelled());
                ends[1] += 1;
                longest = longest.mul_f64(1.05);
            }
        }
        bench.engine.release(id).expect("it ended");
    }
    println!("{ends:?} completed and cancelled");
    assert!(ends[0] > 10 && ends[1] > 10, "{ends:?}");
    let all = bench.engine.statistics().all_paths();
    assert_eq!((all.completed - 1, all.cancelled, all.failed), (ends[0], ends[1], 0));
    bench.works();
    bench.engine.unregister(bench.local.addr()).expect("nothing uses it");
    // It goes with the process: the buffer would unregister it again.
    std::mem::forget(bench);
}
