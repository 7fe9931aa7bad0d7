//! Copies between a GPU's memory and host memory of the same engine: every mode, direction, form and
//! alignment, on the simulated GPU and on host memory.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_device::conformance::ApplicationStream;
use kvferry_device::sim::{Fault, SimControl, SimOptions, sim};
use kvferry_device::{Device, Error as DeviceError, Vendor};
use kvferry_engine::{
    BatchId, Buffer, Consumer, Copies, Engine, Error, OffloadMode, Op, Paged, Pages, Part, Path,
    Producer, Range, Reason, State, Strided, SubmitOptions, Target,
};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use common::config;

const LONG: Duration = Duration::from_secs(60);

/// Small buffers, so that short tests take many steps.
const SMALL: &[(&str, &str)] =
    &[("MC_KVFERRY_OFFLOAD_BOUNCE_MB", "1"), ("MC_KVFERRY_OFFLOAD_CHUNK_BYTES", "64K")];

/// Buffers that hold any list of these tests: it goes through one in a short step and a long one.
const LARGE: &[(&str, &str)] =
    &[("MC_KVFERRY_OFFLOAD_BOUNCE_MB", "16"), ("MC_KVFERRY_OFFLOAD_CHUNK_BYTES", "4M")];

fn simulated() -> (Arc<dyn Device>, Arc<SimControl>) {
    sim(&SimOptions::default()).expect("always there")
}

fn host() -> Arc<dyn Device> {
    kvferry_device::host().expect("always there")
}

fn pattern(len: u64, seed: u64) -> Vec<u8> {
    (0..len).map(|at| ((at + seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 29) as u8).collect()
}

fn bytes(buffer: &Buffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len() as usize];
    buffer.read(0, &mut bytes).expect("inside");
    bytes
}

/// One engine, a buffer on a GPU and one in host memory.
struct Bench {
    engine: Arc<Engine>,
    target: Target,
    gpu: Buffer,
    host: Buffer,
    /// What each holds before a transfer.
    patterns: [Vec<u8>; 2],
}

/// Which end of a transfer is called local, and its operation.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Way {
    /// From the GPU to host memory.
    store: bool,
    gpu_is_local: bool,
}

const WAYS: [Way; 4] = [
    Way { store: true, gpu_is_local: true },
    Way { store: false, gpu_is_local: true },
    Way { store: true, gpu_is_local: false },
    Way { store: false, gpu_is_local: false },
];

impl Way {
    fn op(self) -> Op {
        if self.store == self.gpu_is_local { Op::Write } else { Op::Read }
    }

    /// A range of an offset on the GPU and one in host memory.
    fn range(self, bench: &Bench, (gpu, host, len): (u64, u64, u64)) -> Range {
        let (gpu, host) = (bench.gpu.addr() + gpu, bench.host.addr() + host);
        match self.gpu_is_local {
            true => Range { local: gpu, remote: host, len },
            false => Range { local: host, remote: gpu, len },
        }
    }
}

impl Bench {
    fn new(device: &Arc<dyn Device>, knobs: &[(&str, &str)], len: u64) -> Self {
        let (mut devices, mut host) = (vec![Arc::clone(device)], host());
        match device.info().vendor {
            Vendor::Host => host = Arc::clone(device),
            _ => devices.push(Arc::clone(&host)),
        }
        let engine = Engine::new(config(knobs), devices).expect("an engine");
        let gpu = engine.allocate(device, len).expect("memory");
        let host = engine.allocate(&host, len).expect("memory");
        let target = engine.local().expect("itself");
        let patterns = [pattern(len, 1), pattern(len, 1 << 40)];
        Self { engine, target, gpu, host, patterns }
    }

    fn submit<'a>(
        &'a self,
        op: Op,
        copies: impl Into<Copies<'a>>,
        options: &SubmitOptions,
    ) -> Result<BatchId, Error> {
        let part = Part { target: &self.target, op, copies: copies.into() };
        self.engine.submit_parts(&[part], options)
    }

    /// Moves the last page of both buffers, which no other batch does: what could go before has
    /// gone when this returns.
    fn let_others_pass(&self, op: Op, offload: OffloadMode) {
        let last = |buffer: &Buffer| buffer.addr() + buffer.len() - 4096;
        let range = [Range { local: last(&self.gpu), remote: last(&self.host), len: 4096 }];
        for _ in 0..4 {
            let id = self.submit(op, &range, &asks(offload)).expect("submits");
            assert_eq!(self.finish(id).0, State::Completed);
        }
    }

    fn finish(&self, id: BatchId) -> (State, Path) {
        let status = self.engine.wait(id, LONG).expect("known");
        assert_ne!(status.state, State::Running, "the batch never ended");
        self.engine.release(id).expect("it ended");
        (status.state, status.path)
    }

    /// Copies, and compares every byte of both buffers.
    fn check<'a>(
        &'a self,
        way: Way,
        copies: impl Into<Copies<'a>>,
        pieces: &[(u64, u64, u64)],
        options: &SubmitOptions,
    ) -> Path {
        let [mut on_gpu, mut in_host] = self.patterns.clone();
        self.gpu.write(0, &on_gpu).expect("inside");
        self.host.write(0, &in_host).expect("inside");
        for &(gpu, host, len) in pieces {
            let (gpu, host) = (gpu as usize..(gpu + len) as usize, host as usize);
            let host = host..host + len as usize;
            match way.store {
                true => in_host[host].copy_from_slice(&on_gpu[gpu]),
                false => on_gpu[gpu].copy_from_slice(&in_host[host]),
            }
        }
        let id = self.submit(way.op(), copies, options).expect("submits");
        let (state, path) = self.finish(id);
        assert_eq!(state, State::Completed);
        assert!(bytes(&self.gpu) == on_gpu, "GPU memory, {way:?} {options:?}");
        assert!(bytes(&self.host) == in_host, "host memory, {way:?} {options:?}");
        path
    }
}

const LEN: u64 = 3 << 20;

/// Offsets on the GPU and in host memory, and lengths.
type Pieces = Vec<(u64, u64, u64)>;

/// Pieces of every kind of list, with bytes between them that must stay as they are.
fn lists() -> Vec<(&'static str, Pieces)> {
    let mut random = SmallRng::seed_from_u64(6);
    let mut slots = |count: u64, stride: u64, offset: u64| {
        let mut slots: Vec<u64> = (0..count).map(|slot| slot * stride + offset).collect();
        slots.shuffle(&mut random);
        slots
    };
    let zip = |gpu: Vec<u64>, host: Vec<u64>, len: u64| -> Pieces {
        gpu.into_iter().zip(host).map(|(gpu, host)| (gpu, host, len)).collect()
    };
    let in_order = |count: u64, stride: u64, offset: u64| -> Vec<u64> {
        (0..count).map(|slot| slot * stride + offset).collect()
    };
    let mut lists = vec![
        ("scattered to packed", zip(slots(500, 4352, 16), in_order(500, 4096, 4096), 4096)),
        ("scattered to dense", zip(slots(500, 4352, 16), slots(500, 4096, 256), 4096)),
        ("scattered to gaps", zip(slots(500, 4352, 16), slots(500, 4352, 256), 4096)),
        ("scattered, odd", zip(slots(700, 1031, 3), slots(700, 1037, 11), 1021)),
        ("scattered to packed, odd", zip(slots(700, 1031, 3), in_order(700, 1021, 5), 1021)),
        ("apart", zip(slots(60, 40_000, 1), slots(60, 45_000, 77), 777)),
        ("one", vec![(77, 1_000_001, 1_234_567)]),
        ("nothing between", vec![(0, 0, LEN)]),
        ("long ones", zip(slots(5, 600_000, 8), slots(5, 600_000, 24), 512 << 10)),
        ("one byte", vec![(LEN - 1, 0, 1)]),
    ];
    // 64 layers of 20 pages, whose pages lie side by side in host memory, all layers of one.
    let (layers, pages, page) = (64u64, 20u64, 1040u64);
    let mut numbers: Vec<u64> = (0..pages).collect();
    numbers.shuffle(&mut random);
    let cache = numbers.iter().enumerate().flat_map(|(at, number)| {
        (0..layers).map(move |layer| {
            let host = (at as u64 * layers + layer) * page;
            (layer * pages * page + number * page, host + 512, page)
        })
    });
    lists.push(("layers of pages", cache.collect()));
    // Lengths of all kinds.
    let mut mixed = Vec::new();
    let (mut gpu, mut host) = (0, 0);
    while gpu < LEN - 100_000 && host < LEN - 100_000 {
        let len = [1, 15, 64, 100, 656, 4096, 16_384, 70_001][random.random_range(0..8)];
        mixed.push((gpu, host, len));
        gpu += len + random.random_range(0..100);
        host += len + random.random_range(0..2) * 33;
    }
    mixed.shuffle(&mut random);
    lists.push(("mixed", mixed));
    lists
}

fn every_list_arrives(device: &Arc<dyn Device>, knobs: &[(&str, &str)], modes: &[OffloadMode]) {
    let bench = Bench::new(device, knobs, LEN);
    for (name, pieces) in lists() {
        for way in WAYS {
            let ranges: Vec<_> = pieces.iter().map(|&piece| way.range(&bench, piece)).collect();
            for &offload in modes {
                let options = SubmitOptions { offload, ..SubmitOptions::default() };
                let path = bench.check(way, &ranges, &pieces, &options);
                if offload == OffloadMode::Staged {
                    assert_eq!(path, Path::Staged, "{name}");
                }
            }
        }
    }
}

#[test]
fn every_list_arrives_in_every_mode_on_a_gpu() {
    every_list_arrives(&simulated().0, SMALL, &OffloadMode::ALL);
}

#[test]
fn every_list_arrives_in_every_mode_on_host_memory() {
    every_list_arrives(&host(), SMALL, &OffloadMode::ALL);
}

#[test]
fn every_list_arrives_through_buffers_that_hold_all_of_it() {
    for device in [simulated().0, host()] {
        every_list_arrives(&device, LARGE, &[OffloadMode::Staged]);
    }
}

#[test]
fn what_writes_a_byte_twice_is_refused_naming_it_before_a_byte_moves_in_every_mode() {
    for (device, knobs) in [(simulated().0, LARGE), (simulated().0, SMALL), (host(), LARGE)] {
        let bench = Bench::new(&device, knobs, LEN);
        for (name, good) in lists() {
            let Some(last) = good.len().checked_sub(1).filter(|&last| last > 100) else { continue };
            for way in WAYS {
                let mut pieces = good.clone();
                match way.store {
                    true => pieces[last].1 = pieces[100].1,
                    false => pieces[last].0 = pieces[100].0,
                }
                let list = |pieces: &Pieces| -> Vec<Range> {
                    pieces.iter().map(|&piece| way.range(&bench, piece)).collect()
                };
                let (bad, fine) = (list(&pieces), list(&good));
                bench.gpu.write(0, &bench.patterns[0]).expect("inside");
                bench.host.write(0, &bench.patterns[1]).expect("inside");
                let submit = |offload| {
                    let refused = bench.submit(way.op(), &bad, &asks(offload));
                    refused.expect_err("a byte is written twice").to_string()
                };
                let expected = submit(OffloadMode::Direct);
                assert!(expected.contains(&format!(" and {last} both")), "{name}: {expected}");
                for offload in OffloadMode::ALL {
                    assert_eq!(submit(offload), expected, "{name}");
                    assert!(bytes(&bench.gpu) == bench.patterns[0], "{name} {way:?} {offload:?}");
                    assert!(bytes(&bench.host) == bench.patterns[1], "{name} {way:?} {offload:?}");
                }
                bench.check(way, &fine, &good, &asks(OffloadMode::Staged));
            }
        }
        let way = WAYS[0];
        let (local, remote) = (bench.gpu.addr(), bench.host.addr());
        let form =
            Strided { local, remote, len: 100, count: 3000, local_stride: 1000, remote_stride: 99 };
        let submit = |offload| {
            let refused = bench.submit(way.op(), &[form], &asks(offload));
            refused.expect_err("a byte is written twice").to_string()
        };
        bench.host.write(0, &bench.patterns[1]).expect("inside");
        for offload in OffloadMode::ALL {
            assert_eq!(submit(offload), submit(OffloadMode::Direct));
            assert!(bytes(&bench.host) == bench.patterns[1], "{offload:?}");
        }
    }
}

#[test]
fn a_long_list_that_writes_a_byte_twice_is_refused_if_staged_and_else_fails() {
    let bench = Bench::new(&simulated().0, LARGE, 16 << 20);
    for way in [WAYS[0], WAYS[1]] {
        let (good, mut pieces) = scattered(&bench, way, 3000);
        match way.store {
            true => pieces[2999].1 = pieces[100].1,
            false => pieces[2999].0 = pieces[100].0,
        }
        let bad: Vec<_> = pieces.iter().map(|&piece| way.range(&bench, piece)).collect();
        bench.gpu.write(0, &bench.patterns[0]).expect("inside");
        bench.host.write(0, &bench.patterns[1]).expect("inside");
        let refused = bench.submit(way.op(), &bad, &asks(OffloadMode::Staged));
        let refused = refused.expect_err("a byte is written twice");
        assert!(refused.to_string().contains("100 and 2999 both"), "{refused}");
        assert!(bytes(&bench.gpu) == bench.patterns[0] && bytes(&bench.host) == bench.patterns[1]);
        for offload in [OffloadMode::Direct, OffloadMode::Kernel] {
            let id = bench.submit(way.op(), &bad, &asks(offload)).expect("starts");
            assert_eq!(bench.finish(id).0, State::Failed(refused.clone()), "{offload:?}");
            let id = bench.submit(way.op(), &good, &asks(offload)).expect("starts");
            assert_eq!(bench.finish(id).0, State::Completed, "{offload:?}");
        }
    }
}

/// It may be whoever submits that ends the producer later.
#[test]
fn a_long_list_that_writes_a_byte_twice_fails_behind_its_producer_and_submitting_does_not_wait() {
    let (device, control) = simulated();
    let bench = Arc::new(Bench::new(&device, LARGE, 24 << 20));
    let stream = control.stream();
    for way in [WAYS[0], WAYS[1]] {
        let (_, mut pieces) = scattered(&bench, way, 4096);
        match way.store {
            true => pieces[4095].1 = pieces[100].1,
            false => pieces[4095].0 = pieces[100].0,
        }
        let bad: Vec<_> = pieces.iter().map(|&piece| way.range(&bench, piece)).collect();
        for ordered_by_batch in [false, true] {
            stream.hold();
            // SAFETY: the stream is open before it is dropped.
            let after = unsafe { Producer::stream(stream.handle()) };
            let (told, submitted) = std::sync::mpsc::channel();
            let (its, bad) = (Arc::clone(&bench), bad.clone());
            let submits = std::thread::spawn(move || {
                let gated = SubmitOptions { after: Some(after), ..asks(OffloadMode::Staged) };
                if !ordered_by_batch {
                    told.send((None, its.submit(way.op(), &bad, &gated))).expect("somebody waits");
                    return;
                }
                let before = [its.submit(way.op(), &bad[..1], &gated).expect("submits")];
                let behind = SubmitOptions { behind: &before, ..asks(OffloadMode::Staged) };
                let id = its.submit(way.op(), &bad, &behind);
                told.send((Some(before[0]), id)).expect("somebody waits");
            });
            let told = submitted.recv_timeout(LONG);
            stream.open();
            let (before, id) = told.expect("the producer is held by whoever submits");
            submits.join().expect("it ends");
            let state = bench.finish(id.expect("it is gated")).0;
            let State::Failed(Error::Range(error)) = state else { panic!("{way:?}: {state:?}") };
            assert!(error.to_string().contains("100 and 4095 both"), "{error}");
            if let Some(before) = before {
                assert_eq!(bench.finish(before).0, State::Completed);
            }
        }
    }
}

#[test]
fn every_policy_moves_every_list() {
    for policy in ["throughput", "balanced", "tail", "strict"] {
        let knobs = [SMALL, &[("MC_KVFERRY_POLICY", policy)]].concat();
        every_list_arrives(&simulated().0, &knobs, &[OffloadMode::Auto]);
    }
}

#[test]
fn every_list_arrives_step_by_step() {
    let knobs = [SMALL, &[("MC_KVFERRY_MAX_RATE", "200M")]].concat();
    every_list_arrives(&simulated().0, &knobs, &OffloadMode::ALL);
    every_list_arrives(&host(), &knobs, &[OffloadMode::Auto, OffloadMode::Staged]);
}

#[test]
fn every_form_arrives_in_every_mode() {
    for device in [simulated().0, host()] {
        let bench = Bench::new(&device, SMALL, LEN);
        for (page, rows, row_bytes, row_stride) in [
            (512u64, 1u32, 512u64, 0u64),
            (1040, 1, 1040, 0),
            (1024, 4, 200, 256),
            (999, 3, 333, 333),
        ] {
            let (layers, count) = (30u32, 40u64);
            let mut numbers: Vec<u32> = (0..count as u32).collect();
            numbers.shuffle(&mut SmallRng::seed_from_u64(page));
            let in_order: Vec<u32> = (0..count as u32).collect();
            for way in WAYS {
                let cache = Pages {
                    addr: bench.gpu.addr() + 5,
                    numbers: &numbers,
                    page_stride: page,
                    layer_stride: page * count,
                    row_stride,
                };
                // All layers of a page side by side.
                let store = Pages {
                    addr: bench.host.addr() + 16,
                    numbers: &in_order,
                    page_stride: page * u64::from(layers),
                    layer_stride: page,
                    row_stride,
                };
                let (local, remote) =
                    if way.gpu_is_local { (cache, store) } else { (store, cache) };
                let form = Paged { local, remote, layers, rows, row_bytes };
                let (gpu, host) = (bench.gpu.addr(), bench.host.addr());
                let pieces: Pieces = form
                    .pieces()
                    .map(|piece| match way.gpu_is_local {
                        true => (piece.local - gpu, piece.remote - host, piece.len),
                        false => (piece.remote - gpu, piece.local - host, piece.len),
                    })
                    .collect();
                for offload in OffloadMode::ALL {
                    let options = SubmitOptions { offload, ..SubmitOptions::default() };
                    bench.check(way, &[form], &pieces, &options);
                }
            }
        }
        let (gpu, host) = (bench.gpu.addr() + 3, bench.host.addr() + 7);
        let form = Strided {
            local: gpu,
            remote: host,
            len: 100,
            count: 3000,
            local_stride: 1000,
            remote_stride: 128,
        };
        let pieces: Pieces = (0..3000).map(|at| (3 + at * 1000, 7 + at * 128, 100)).collect();
        for offload in OffloadMode::ALL {
            let options = SubmitOptions { offload, ..SubmitOptions::default() };
            bench.check(WAYS[0], &[form], &pieces, &options);
        }
    }
}

/// Pieces of 4 KiB, scattered on the GPU and packed in host memory.
fn scattered(bench: &Bench, way: Way, count: u64) -> (Vec<Range>, Pieces) {
    let mut slots: Vec<u64> = (0..count).collect();
    slots.shuffle(&mut SmallRng::seed_from_u64(count));
    let pieces: Pieces =
        slots.iter().zip(0..).map(|(slot, at)| (slot * 4352, at * 4096, 4096)).collect();
    (pieces.iter().map(|&piece| way.range(bench, piece)).collect(), pieces)
}

fn asks(offload: OffloadMode) -> SubmitOptions<'static> {
    SubmitOptions { offload, ..SubmitOptions::default() }
}

#[test]
fn a_byte_rate_bounds_offload_and_copies_on_one_device() {
    // 2 MiB at 8 MiB a second take a quarter of a second, but for the first step.
    let knobs = [SMALL, &[("MC_KVFERRY_MAX_RATE", "8M")]].concat();
    let bench = Bench::new(&simulated().0, &knobs, 5 << 20);
    let at_least = Duration::from_millis(200);
    for offload in OffloadMode::ALL {
        let (ranges, pieces) = scattered(&bench, WAYS[0], 512);
        let start = Instant::now();
        bench.check(WAYS[0], &ranges, &pieces, &asks(offload));
        assert!(start.elapsed() > at_least, "{offload}: {:?}", start.elapsed());
    }
    // From place to place on one device is the peer transport's.
    let (local, remote) = (bench.gpu.addr(), bench.gpu.addr() + (2 << 20));
    let start = Instant::now();
    let range = Range { local, remote, len: 2 << 20 };
    let id = bench.submit(Op::Write, &[range], &SubmitOptions::default()).expect("submits");
    assert_eq!(bench.finish(id).0, State::Completed);
    assert!(start.elapsed() > at_least, "{:?}", start.elapsed());
}

#[test]
fn submitting_step_by_step_does_not_wait() {
    // 2 MiB at 16 KiB a second take two minutes, longer than any machine takes to submit them.
    let knobs = [SMALL, &[("MC_KVFERRY_MAX_RATE", "16K")]].concat();
    let bench = Bench::new(&simulated().0, &knobs, 5 << 20);
    let (ranges, _) = scattered(&bench, WAYS[0], 512);
    let id = bench.submit(Op::Write, &ranges, &SubmitOptions::default()).expect("submits");
    assert_eq!(bench.engine.poll(id).expect("known").state, State::Running, "it was waited for");
    bench.engine.cancel(id).expect("it runs");
    assert_eq!(bench.finish(id).0, State::Failed(Error::Cancelled));
}

#[test]
fn an_engine_dropped_beside_batches_that_would_take_minutes_ends_them_at_once() {
    let knobs = [SMALL, &[("MC_KVFERRY_MAX_RATE", "16K")]].concat();
    // A number of its own, by which its threads are told from others'.
    let options = SimOptions { ordinal: 77, ..SimOptions::default() };
    let ((device, control), host) = (sim(&options).expect("always there"), host());
    // The device's own.
    wait_for_threads("kvferry-sim:77", 1);
    let devices = vec![Arc::clone(&device), Arc::clone(&host)];
    let engine = Engine::new(config(&knobs), devices).expect("an engine");
    // Freed after the engine is gone.
    let (gpu, host) = (
        Arc::clone(&device).allocate(1 << 20).expect("memory"),
        Arc::clone(&host).allocate(1 << 20).expect("memory"),
    );
    for memory in [&gpu, &host] {
        // SAFETY: it outlives the engine.
        unsafe { engine.register(memory.addr(), memory.len()) }.expect("registers");
    }
    let target = engine.local().expect("itself");
    for offload in OffloadMode::ALL {
        let range = Range { local: gpu.addr(), remote: host.addr(), len: 1 << 20 };
        let part = Part { target: &target, op: Op::Write, copies: Copies::Ranges(&[range]) };
        engine.submit_parts(&[part], &asks(offload)).expect("submits");
    }
    wait_for_threads("kvferry-sim:77", 2);
    let start = Instant::now();
    drop((target, engine));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    wait_for_threads("kvferry-sim:77", 1);
    let calls = control.calls("copy") + control.calls("launch_inline");
    assert!(calls < 200, "{calls} of 1024 steps");
}

/// Until so many threads of this process have the name: one takes it when it first runs, and is seen
/// for a moment behind its end.
fn wait_for_threads(name: &str, count: usize) {
    let start = Instant::now();
    let named = || {
        let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
        let names =
            tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
        names.filter(|found| found.trim_end() == name).count()
    };
    while named() != count {
        assert!(start.elapsed() < LONG, "{} threads, not {count}", named());
        std::thread::yield_now();
    }
}

fn fill(buffer: &Buffer, byte: u8) {
    buffer.write(0, &vec![byte; buffer.len() as usize]).expect("inside");
}

/// Knobs under which batches go at once, and step by step.
const PACES: [&[(&str, &str)]; 2] = [&[], &[("MC_KVFERRY_MAX_RATE", "1G")]];

#[test]
fn b21_a_store_behind_its_producer_never_reads_what_was_not_written_yet() {
    for pace in PACES {
        let (device, control) = simulated();
        let bench = Bench::new(&device, &[SMALL, pace].concat(), 2 << 20);
        let stream = control.stream();
        for offload in OffloadMode::ALL {
            for ordered in [true, false] {
                fill(&bench.gpu, 1);
                fill(&bench.host, 0);
                stream.hold();
                // SAFETY: until the batch has ended nobody else uses the buffer, and in the control
                // nobody relies on what it reads.
                unsafe { stream.fill(bench.gpu.addr(), 2, bench.gpu.len()) };
                // SAFETY: the stream lives longer than the call.
                let after = ordered.then(|| unsafe { Producer::stream(stream.handle()) });
                let (ranges, pieces) = scattered(&bench, WAYS[0], 256);
                let options = SubmitOptions { after, ..asks(offload) };
                let id = bench.submit(Op::Write, &ranges, &options).expect("submits");
                if ordered {
                    bench.let_others_pass(Op::Write, offload);
                    let status = bench.engine.poll(id).expect("known");
                    assert_eq!(status.state, State::Running, "{offload}");
                    stream.open();
                    assert_eq!(bench.finish(id).0, State::Completed);
                } else {
                    // The control shows that without the order old bytes are read.
                    assert_eq!(bench.finish(id).0, State::Completed);
                    stream.open();
                }
                let stored = bytes(&bench.host);
                let expected = if ordered { 2 } else { 1 };
                for &(_, host, len) in &pieces {
                    let range = host as usize..(host + len) as usize;
                    assert!(stored[range].iter().all(|&byte| byte == expected), "{offload}");
                }
                let passed = stream.record();
                while !stream.has_fired(passed) {
                    std::thread::yield_now();
                }
            }
        }
    }
}

#[test]
fn a_load_waits_for_what_still_uses_its_destination_and_its_consumer_for_the_load() {
    let (device, control) = simulated();
    let bench = Bench::new(&device, SMALL, 2 << 20);
    let (producer, consumer) = (control.stream(), control.stream());
    for offload in OffloadMode::ALL {
        fill(&bench.gpu, 1);
        fill(&bench.host, 3);
        producer.hold();
        // Whoever writes the destination last wins: that is the load.
        // SAFETY: the load below waits for it.
        unsafe { producer.fill(bench.gpu.addr(), 2, bench.gpu.len()) };
        // SAFETY: the streams live longer than the calls.
        let after = Some(unsafe { Producer::stream(producer.handle()) });
        let (ranges, pieces) = scattered(&bench, WAYS[1], 256);
        let options = SubmitOptions { after, ..asks(offload) };
        let id = bench.submit(Op::Read, &ranges, &options).expect("submits");
        // SAFETY: as above.
        let waits = unsafe { Consumer::stream(consumer.handle()) };
        bench.engine.signal(id, waits).expect("all of it is submitted");
        let passed = consumer.record();
        bench.let_others_pass(Op::Read, offload);
        assert!(!consumer.has_fired(passed), "{offload}: the consumer did not wait");
        producer.open();
        while !consumer.has_fired(passed) {
            std::thread::yield_now();
        }
        assert_eq!(bench.finish(id).0, State::Completed);
        let loaded = bytes(&bench.gpu);
        for &(gpu, _, len) in &pieces {
            let range = gpu as usize..(gpu + len) as usize;
            assert!(loaded[range].iter().all(|&byte| byte == 3), "{offload}");
        }
    }
}

#[test]
fn a_held_producer_holds_up_no_batch_without_one() {
    let (device, control) = simulated();
    let bench = Bench::new(&device, SMALL, 2 << 20);
    let stream = control.stream();
    let (ranges, pieces) = scattered(&bench, WAYS[0], 128);
    for offload in OffloadMode::ALL {
        stream.hold();
        // SAFETY: the stream lives longer than the call.
        let after = Some(unsafe { Producer::stream(stream.handle()) });
        let held: Vec<_> = (0..3)
            .map(|_| {
                let options = SubmitOptions { after, ..asks(offload) };
                bench.submit(Op::Write, &ranges, &options).expect("submits")
            })
            .collect();
        for mode in OffloadMode::ALL {
            bench.check(WAYS[1], &ranges, &pieces, &asks(mode));
        }
        for _ in 0..4 {
            let id = bench.submit(Op::Write, &ranges, &asks(offload)).expect("submits");
            assert_eq!(bench.finish(id).0, State::Completed);
        }
        stream.open();
        for id in held {
            assert_eq!(bench.finish(id).0, State::Completed);
        }
    }
}

#[test]
fn whichever_driver_call_fails_every_batch_ends_once_and_the_next_one_works() {
    let calls = [
        "allocate",
        "allocate_pinned",
        "create_stream",
        "create_event",
        "record",
        "wait",
        "store",
        "wait_producer",
        "copy",
        "copy_rows",
        "launch",
        "launch_inline",
        "launch_compact",
        "map_host",
    ];
    let mut failed = 0;
    for pace in PACES {
        for call in calls {
            for nth in [0, 1, 4] {
                for offload in [OffloadMode::Direct, OffloadMode::Kernel, OffloadMode::Staged] {
                    let (device, control) = simulated();
                    let bench = Bench::new(&device, &[SMALL, pace].concat(), 1 << 19);
                    let stream = control.stream();
                    let (ranges, pieces) = scattered(&bench, WAYS[0], 100);
                    control.fail(call, nth, Fault::Refused);
                    // SAFETY: the stream lives longer than the call.
                    let after = Some(unsafe { Producer::stream(stream.handle()) });
                    for after in [None, after] {
                        let options = SubmitOptions { after, ..asks(offload) };
                        match bench.submit(Op::Write, &ranges, &options) {
                            Err(_) => failed += 1,
                            Ok(id) => {
                                let state = bench.finish(id).0;
                                failed += usize::from(state != State::Completed);
                            }
                        }
                    }
                    control.forget_failures();
                    bench.check(WAYS[0], &ranges, &pieces, &asks(offload));
                }
            }
        }
    }
    assert!(failed > 60, "{failed} failures show little");
}

#[test]
fn a_batch_in_steps_fails_behind_one_of_another_device_that_is_lost() {
    let (first, control) = simulated();
    let (second, _) = sim(&SimOptions { ordinal: 1, ..SimOptions::default() }).expect("too");
    // The first step is half a second's, so that more of the first batch is to come; what a lost device
    // may still use stays registered.
    let knobs = [("MC_KVFERRY_MAX_RATE", "4M"), ("MC_KVFERRY_UNREGISTER_TIMEOUT_SEC", "0")];
    let devices = vec![Arc::clone(&first), Arc::clone(&second), host()];
    let engine = Engine::new(config(&knobs), devices).expect("an engine");
    let target = engine.local().expect("itself");
    let memory = |device| engine.allocate(device, 1 << 20).expect("memory");
    let (one, other, beside) = (memory(&first), memory(&second), memory(&host()));
    let store = |from: &Buffer, at: u64, behind: &[BatchId]| {
        let local = from.addr();
        let range = [Range { local, remote: beside.addr() + at, len: 1 << 19 }];
        let part = Part { target: &target, op: Op::Write, copies: (&range).into() };
        let options = SubmitOptions { behind, ..asks(OffloadMode::Direct) };
        engine.submit_parts(&[part], &options).expect("submits")
    };
    control.hold();
    let before = store(&one, 0, &[]);
    let behind = store(&other, 1 << 19, &[before]);
    control.lose();
    for id in [before, behind] {
        let state = engine.wait(id, LONG).expect("known").state;
        let lost = matches!(state, State::Failed(Error::Device(DeviceError::Lost { .. })));
        assert!(lost, "{id}: {state:?}");
        engine.release(id).expect("it ended");
    }
}

#[test]
fn without_memory_for_another_buffer_a_batch_that_waits_for_nobody_takes_the_kernel() {
    let (device, control) = simulated();
    let bench = Bench::new(&device, SMALL, 8 << 20);
    let stream = control.stream();
    let (ranges, pieces) = scattered(&bench, WAYS[0], 1024);
    stream.hold();
    // SAFETY: the stream lives longer than the call.
    let after = Some(unsafe { Producer::stream(stream.handle()) });
    let waits = SubmitOptions { after, ..asks(OffloadMode::Staged) };
    let held = bench.submit(Op::Write, &ranges, &waits).expect("the first buffer");
    control.fail("allocate", 0, Fault::OutOfMemory);
    let id = bench.submit(Op::Write, &ranges, &asks(OffloadMode::Auto)).expect("by the kernel");
    let choice = bench.engine.choice(id).expect("known").expect("offloaded");
    assert_eq!(choice.reason, Reason::NoBounce);
    assert_eq!(bench.finish(id).0, State::Completed);
    stream.open();
    assert_eq!(bench.finish(held).0, State::Completed);
    bench.check(WAYS[0], &ranges, &pieces, &asks(OffloadMode::Staged));
}

#[test]
fn nothing_is_ordered_behind_a_batch_of_which_nobody_knows_when_it_ends() {
    let (device, control) = simulated();
    // What a lost device may still use stays registered.
    let bench = Bench::new(&device, &[("MC_KVFERRY_UNREGISTER_TIMEOUT_SEC", "0")], 8 << 20);
    // More than a launch that ends with a word of its own.
    let (ranges, _) = scattered(&bench, WAYS[0], 1000);
    // Its own queue works and knows nothing of the other one's.
    let (from, to) = (bench.gpu.addr(), bench.gpu.addr() + (1 << 19));
    let inside = [Range { local: from, remote: to, len: 4096 }];
    let id = bench.submit(Op::Write, &inside, &SubmitOptions::default()).expect("submits");
    assert_eq!(bench.finish(id).0, State::Completed);
    control.hold();
    control.fail("store", 0, Fault::Refused);
    control.fail("store", 1, Fault::Refused);
    let id = bench.submit(Op::Write, &ranges, &asks(OffloadMode::Kernel)).expect("it has begun");
    control.forget_failures();
    let lost = |refused: Result<(), Error>| {
        assert!(matches!(refused, Err(Error::Device(DeviceError::Lost { .. }))), "{refused:?}");
    };
    let behind = SubmitOptions { behind: &[id], ..SubmitOptions::default() };
    lost(bench.submit(Op::Write, &inside, &behind).map(drop));
    let stream = control.stream();
    // SAFETY: the stream lives longer than the call.
    lost(bench.engine.signal(id, unsafe { Consumer::stream(stream.handle()) }));
    // Any other error would mean that nothing moves any more.
    match bench.finish(id).0 {
        State::Failed(error) => lost(Err(error)),
        other => panic!("{other:?}"),
    }
    control.release();
}

/// The gate of the one behind never opens, and its own queue sees nothing that stands still.
#[test]
fn a_batch_behind_one_that_stalls_on_another_queue_ends_with_it_and_the_engine_can_be_dropped() {
    for pace in PACES {
        let (device, control) = simulated();
        let knobs =
            [("MC_KVFERRY_STALL_TIMEOUT_SEC", "1"), ("MC_KVFERRY_UNREGISTER_TIMEOUT_SEC", "0")];
        let bench = Bench::new(&device, &[SMALL, pace, &knobs].concat(), 1 << 20);
        let (from, to) = (bench.gpu.addr(), bench.gpu.addr() + (1 << 19));
        let inside = [Range { local: from, remote: to, len: 4096 }];
        let (ranges, _) = scattered(&bench, WAYS[0], 100);
        control.hold();
        let first = bench.submit(Op::Write, &inside, &SubmitOptions::default()).expect("submits");
        let behind_it = SubmitOptions { behind: &[first], ..asks(OffloadMode::Kernel) };
        let second = bench.submit(Op::Write, &ranges, &behind_it).expect("submits");
        let stalled = |error: Error| {
            assert!(matches!(error, Error::Device(DeviceError::Stalled { .. })), "{error:?}");
        };
        // Nobody asks after the first.
        for id in [second, first] {
            let State::Failed(error) = bench.engine.wait(id, LONG).expect("known").state else {
                panic!("{pace:?}: {id} never ended");
            };
            stalled(error);
        }
        stalled(bench.submit(Op::Write, &ranges, &asks(OffloadMode::Direct)).expect_err("lost"));
        let (told, dropped) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            drop(bench);
            told.send(()).expect("somebody waits");
        });
        dropped.recv_timeout(LONG).expect("the engine ends");
        control.release();
    }
}

/// A lost device may never end what it runs, and then nor does what is behind that.
#[test]
fn nothing_is_ordered_behind_what_a_lost_device_may_never_end() {
    let (device, control) = simulated();
    let bench = Bench::new(&device, &[("MC_KVFERRY_UNREGISTER_TIMEOUT_SEC", "0")], 1 << 20);
    let (from, to) = (bench.gpu.addr(), bench.gpu.addr() + (1 << 19));
    let inside = [Range { local: from, remote: to, len: 4096 }];
    let (ranges, _) = scattered(&bench, WAYS[0], 100);
    control.hold();
    let runs = bench.submit(Op::Write, &inside, &SubmitOptions::default()).expect("submits");
    let stored = bench.submit(Op::Write, &ranges, &asks(OffloadMode::Direct)).expect("submits");
    control.fail("fired", 0, Fault::Refused);
    assert!(matches!(bench.finish(stored).0, State::Failed(_)));
    let stream = control.stream();
    // SAFETY: the stream lives longer than the call.
    let refused = bench.engine.signal(runs, unsafe { Consumer::stream(stream.handle()) });
    let lost = matches!(refused, Err(Error::Device(DeviceError::Lost { .. })));
    assert!(lost, "{refused:?}");
    control.release();
}

#[test]
fn a_device_that_is_lost_amid_a_batch_ends_it_as_lost() {
    for pace in [PACES[0], &[("MC_KVFERRY_MAX_RATE", "4M")]] {
        for offload in OffloadMode::ALL {
            let (device, control) = simulated();
            // What a lost device may still use stays registered.
            let leaks = [("MC_KVFERRY_UNREGISTER_TIMEOUT_SEC", "0")];
            let bench = Bench::new(&device, &[SMALL, pace, &leaks].concat(), 2 << 20);
            let (ranges, _) = scattered(&bench, WAYS[0], 400);
            control.hold();
            let id = bench.submit(Op::Write, &ranges, &asks(offload)).expect("submits");
            control.lose();
            let state = bench.finish(id).0;
            let lost =
                matches!(&state, State::Failed(Error::Device(kvferry_device::Error::Lost { .. })));
            assert!(lost, "{offload}: {state:?}");
            let next = bench.submit(Op::Write, &ranges, &asks(offload));
            let fails = next.map_or(true, |id| matches!(bench.finish(id).0, State::Failed(_)));
            assert!(fails, "{offload} {pace:?}: a lost device copied");
            control.release();
        }
    }
}

#[test]
fn knobs_choose_the_way_of_each_direction_and_a_submission_goes_before_them() {
    let choose = |knobs: &[(&str, &str)], way: Way, offload: OffloadMode| {
        let bench = Bench::new(&simulated().0, &[SMALL, knobs].concat(), 3 << 20);
        let (ranges, _) = scattered(&bench, way, 600);
        let id = bench.submit(way.op(), &ranges, &asks(offload)).expect("submits");
        let choice = bench.engine.choice(id).expect("known").expect("an offload");
        assert_eq!(bench.finish(id).0, State::Completed);
        (choice.mode, choice.reason)
    };
    let (store, load, auto) = (WAYS[0], WAYS[1], OffloadMode::Auto);
    let knobs = [("MC_KVFERRY_OFFLOAD_STORE", "kernel"), ("MC_KVFERRY_OFFLOAD_LOAD", "direct")];
    assert_eq!(choose(&knobs, store, auto), (OffloadMode::Kernel, Reason::Knob));
    assert_eq!(choose(&knobs, load, auto), (OffloadMode::Direct, Reason::Knob));
    let asked = choose(&knobs, store, OffloadMode::Staged);
    assert_eq!(asked, (OffloadMode::Staged, Reason::Asked));
    let together = (OffloadMode::Staged, Reason::TogetherInHostMemory);
    assert_eq!(choose(&[], store, auto), together);
    let quickest = choose(&[("MC_KVFERRY_POLICY", "throughput")], load, auto);
    assert_eq!(quickest, (OffloadMode::Kernel, Reason::TooFewToStage));
    let strict = choose(&[("MC_KVFERRY_POLICY", "strict")], store, auto);
    assert_eq!(strict, (OffloadMode::Direct, Reason::Strict));
    let off = choose(&[("MC_KVFERRY_KERNEL", "off")], store, auto);
    assert_eq!(off, (OffloadMode::Direct, Reason::WithoutKernel));
}

#[test]
fn the_bounce_and_pinned_memory_keep_to_their_knobs() {
    let (device, control) = simulated();
    let knobs = [("MC_KVFERRY_OFFLOAD_BOUNCE_MB", "2"), ("MC_KVFERRY_OFFLOAD_CHUNK_BYTES", "256K")];
    let bench = Bench::new(&device, &knobs, 3 << 20);
    assert_eq!(bench.engine.bounce_bytes(), 0, "made at first use");
    let (ranges, _) = scattered(&bench, WAYS[0], 600);
    let staged = asks(OffloadMode::Staged);
    let submit = || bench.submit(Op::Write, &ranges, &staged).expect("submits");
    control.hold();
    let held: Vec<_> = (0..20).map(|_| submit()).collect();
    // Of the store's half: chunks and what alignment takes.
    let most = (1 << 20) + (1 << 20) / 32 + (64 << 10);
    assert!((1 << 18..=most).contains(&bench.engine.bounce_bytes()));
    control.release();
    for id in held {
        assert_eq!(bench.finish(id).0, State::Completed);
    }

    let bench = Bench::new(&device, &[("MC_KVFERRY_PINNED_MB", "2")], 3 << 20);
    let (ranges, _) = scattered(&bench, WAYS[0], 100);
    let refused = bench.submit(Op::Write, &ranges, &staged).expect_err("over the budget");
    assert_eq!(refused, Error::PinnedBudget { bytes: bench.host.len(), used: 0, budget: 2 << 20 });
    let refused = bench.engine.lock_host(bench.host.addr(), &device);
    assert!(matches!(refused, Err(Error::PinnedBudget { .. })), "{refused:?}");
}

#[test]
fn a_batch_behind_one_that_goes_step_by_step_waits_for_all_of_it() {
    let knobs = [SMALL, &[("MC_KVFERRY_MAX_RATE", "8M")]].concat();
    let bench = Bench::new(&simulated().0, &knobs, 2 << 20);
    let (ranges, pieces) = scattered(&bench, WAYS[0], 256);
    for offload in OffloadMode::ALL {
        fill(&bench.gpu, 7);
        fill(&bench.host, 0);
        let store = bench.submit(Op::Write, &ranges, &asks(offload)).expect("submits");
        // Back from where the store writes, to another place.
        let range = Range {
            local: bench.gpu.addr() + (1 << 20) + (1 << 17),
            remote: bench.host.addr() + (255 << 12),
            len: 4096,
        };
        let behind = &[store];
        let options = SubmitOptions { behind, ..asks(offload) };
        let load = bench.submit(Op::Read, &[range], &options).expect("submits");
        assert_eq!(bench.finish(load).0, State::Completed);
        let stored = bench.engine.poll(store).expect("known").state;
        assert_eq!(stored, State::Completed, "{offload}");
        assert_eq!(bench.finish(store).0, State::Completed);
        let host = bytes(&bench.host);
        for &(_, at, len) in &pieces {
            assert!(host[at as usize..(at + len) as usize].iter().all(|&byte| byte == 7));
        }
        let gpu = bytes(&bench.gpu);
        let at = (1 << 20) + (1 << 17);
        assert!(gpu[at..at + 4096].iter().all(|&byte| byte == 7), "{offload}: loaded too early");
    }
}

#[test]
fn over_the_tails_budget_batches_go_step_by_step_with_pauses() {
    let (device, control) = simulated();
    let knobs = [SMALL, &[("MC_KVFERRY_POLICY", "tail")]].concat();
    let bench = Bench::new(&device, &knobs, 3 << 20);
    let (ranges, pieces) = scattered(&bench, WAYS[0], 600);
    let step = |percent: u32| {
        let time = Duration::from_micros(3000) * (100 + percent) / 100;
        bench.engine.record_step(0, time);
    };
    let choice = || {
        let id = bench.submit(Op::Write, &ranges, &SubmitOptions::default()).expect("submits");
        (id, bench.engine.choice(id).expect("known").expect("an offload"))
    };
    (0..256).for_each(|_| step(0));
    let (id, calm) = choice();
    assert!(!calm.in_steps, "{calm}");
    assert_eq!(bench.finish(id).0, State::Completed);
    step(0);
    control.hold();
    let (id, _) = choice();
    // Two rounds of steps beside the batch, a third of them longer than the budget allows.
    (0..2 * 256).for_each(|at| step(if at % 3 == 0 { 20 } else { 0 }));
    control.release();
    assert_eq!(bench.finish(id).0, State::Completed);
    let (id, over) = choice();
    assert!(over.in_steps && over.mode == OffloadMode::Staged, "{over}");
    assert_eq!(bench.finish(id).0, State::Completed);
    bench.check(WAYS[0], &ranges, &pieces, &SubmitOptions::default());
}

#[test]
fn neighbouring_pages_of_all_layers_are_one_2d_copy_of_wider_rows() {
    let (device, control) = simulated();
    let bench = Bench::new(&device, SMALL, 3 << 20);
    let (layers, pages, page) = (64u64, 16u64, 1000u64);
    // Side by side at both ends, layers apart.
    let at = |layer: u64, number: u64| {
        let inside = number * page;
        (layer * (pages + 3) * page + inside, layer * (pages + 9) * page + inside, page)
    };
    let pieces: Pieces = (0..pages)
        .flat_map(|number| (0..layers).map(move |layer| (layer, number)))
        .map(|(layer, number)| at(layer, number))
        .collect();
    let numbers: Vec<u32> = (0..pages as u32).collect();
    for way in WAYS {
        let ranges: Vec<_> = pieces.iter().map(|&piece| way.range(&bench, piece)).collect();
        let end = |addr, apart: u64| Pages::whole(addr, &numbers, page, (pages + apart) * page);
        let (gpu, host) = (end(bench.gpu.addr(), 3), end(bench.host.addr(), 9));
        let (local, remote) = if way.gpu_is_local { (gpu, host) } else { (host, gpu) };
        let form = Paged::whole_pages(local, remote, layers as u32, page);
        let calls = || control.calls("copy_rows") + control.calls("copy");
        let before = calls();
        bench.check(way, &ranges, &pieces, &asks(OffloadMode::Direct));
        assert_eq!(calls() - before, 1, "the list, {way:?}");
        bench.check(way, &[form], &pieces, &asks(OffloadMode::Direct));
        assert_eq!(calls() - before, 2, "the form, {way:?}");
    }
}

#[test]
fn runs_of_a_list_are_a_dma_each_and_what_lies_between_them_is_copied_by_itself() {
    let (device, control) = simulated();
    let bench = Bench::new(&device, SMALL, 3 << 20);
    let (layers, len) = (80u64, 512u64);
    // Pages of all layers, one of them from its last layer to its first, with pieces of other lengths
    // before, between and behind.
    let page = |number: u64| {
        move |layer: u64| (layer * 16_384 + number * 2048, (number * layers + layer) * len, len)
    };
    let odd = |number: u64| {
        let at = (2 << 20) + number * 8192;
        [(at, at + 64, 100), (at + 4096, at + 1000, 300)]
    };
    let mut pieces: Pieces = odd(0).to_vec();
    for number in [3, 0, 2, 1] {
        let page: Pieces = (0..layers).map(page(number)).collect();
        match number {
            2 => pieces.extend(page.iter().rev()),
            _ => pieces.extend(page),
        }
        pieces.extend(odd(1 + number));
    }
    for way in WAYS {
        let ranges: Vec<_> = pieces.iter().map(|&piece| way.range(&bench, piece)).collect();
        let before = (control.calls("copy_rows"), control.calls("copy"));
        bench.check(way, &ranges, &pieces, &asks(OffloadMode::Direct));
        let calls = (control.calls("copy_rows") - before.0, control.calls("copy") - before.1);
        assert_eq!(calls, (4, 10), "{way:?}");
    }
}

#[test]
fn the_dmas_of_a_direct_batch_are_all_on_one_stream() {
    let (device, control) = simulated();
    let bench = Bench::new(&device, SMALL, 1 << 20);
    let (ranges, pieces) = scattered(&bench, WAYS[0], 100);
    let calls = || control.work().streams.into_iter().map(|(stream, work)| (stream, work.calls));
    for _ in 0..4 {
        let before: Vec<_> = calls().collect();
        bench.check(WAYS[0], &ranges, &pieces, &asks(OffloadMode::Direct));
        let used = calls().filter(|now| now.1 > 0 && !before.contains(now)).count();
        assert_eq!(used, 1);
    }
}
