//! Forms, parts and options of a request, on host memory and on the simulated GPU.

mod common;

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use kvferry_device::Device;
use kvferry_device::conformance::ApplicationStream;
use kvferry_device::sim::{SimControl, SimOptions, sim};
use kvferry_engine::{
    BatchId, Buffer, Config, Consumer, Copies, Engine, Error, FormError, Op, Paged, Pages, Part,
    Path, Producer, Range, State, Strided, SubmitOptions, Target,
};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

use common::NoExports;

const PATIENCE: Duration = Duration::from_secs(60);
const LEN: u64 = 256 << 10;

/// An engine, a buffer of its own, and targets with a buffer each, all on one device.
struct Bench {
    engine: Arc<Engine>,
    local: Buffer,
    peers: Vec<(Target, Buffer)>,
}

impl Bench {
    fn on(device: &Arc<dyn Device>, peers: usize) -> Self {
        Self::with(device, peers, &[])
    }

    fn with(device: &Arc<dyn Device>, peers: usize, knobs: &[(&str, &str)]) -> Self {
        let lookup = |name: &str| {
            let set = knobs.iter().find(|(knob, _)| *knob == name).map(|(_, value)| value.into());
            set.or((name == "MC_KVFERRY_CACHE_DIR").then(|| "off".into()))
        };
        let open = || {
            let config = Config::from_lookup(lookup).expect("good knobs");
            Engine::new(config, vec![Arc::clone(device)]).expect("an engine")
        };
        let engine = open();
        let local = engine.allocate(device, LEN).expect("memory");
        let peer = |_| {
            let peer = open();
            let buffer = peer.allocate(device, LEN).expect("memory");
            let opened = engine.open("peer", peer.segment(), Arc::new(NoExports));
            (opened.expect("opens"), buffer)
        };
        let peers = (0..peers).map(peer).collect();
        Self { engine, local, peers }
    }

    fn finish(&self, id: BatchId) -> Path {
        let status = self.engine.wait(id, PATIENCE).expect("known");
        assert_eq!(status.state, State::Completed);
        self.engine.release(id).expect("it ended");
        status.path
    }

    /// Runs a request both ways and compares every byte with what the pieces say.
    fn check<'a>(
        &self,
        copies: impl Fn(u64, u64) -> Copies<'a>,
        pieces: &[Range],
        options: &SubmitOptions,
    ) -> Path {
        let (target, there) = &self.peers[0];
        let mut path = Path::None;
        for op in [Op::Write, Op::Read] {
            let (source, destination) = match op {
                Op::Write => (&self.local, there),
                Op::Read => (there, &self.local),
            };
            source.write(0, &pattern(1)).expect("inside");
            destination.write(0, &pattern(2)).expect("inside");
            let copies = copies(self.local.addr(), there.addr());
            let part = Part { target, op, copies };
            let id = self.engine.submit_parts(&[part], options).expect("submits");
            path = self.finish(id);
            let (bytes, mut expected) = (pattern(1), pattern(2));
            for piece in pieces {
                let (from, to) = match op {
                    Op::Write => (piece.local, piece.remote),
                    Op::Read => (piece.remote, piece.local),
                };
                let (from, to, len) = (from as usize, to as usize, piece.len as usize);
                expected[to..to + len].copy_from_slice(&bytes[from..from + len]);
            }
            let mut found = vec![0; LEN as usize];
            destination.read(0, &mut found).expect("inside");
            assert!(found == expected, "{op:?}: wrong bytes");
        }
        path
    }
}

fn pattern(seed: u64) -> Vec<u8> {
    (0..LEN).map(|at| ((at + 1).wrapping_mul(seed | 0x9E37_79B9_7F4A_7C15) >> 40) as u8).collect()
}

fn devices() -> [Arc<dyn Device>; 3] {
    let without = SimOptions { kernel: false, ordinal: 1, ..SimOptions::default() };
    [
        kvferry_device::host().expect("always there"),
        sim(&SimOptions::default()).expect("always there").0,
        sim(&without).expect("always there").0,
    ]
}

fn simulated() -> (Arc<dyn Device>, Arc<SimControl>) {
    sim(&SimOptions::default()).expect("always there")
}

fn strided(local: u64, remote: u64) -> Strided {
    Strided {
        local,
        remote: remote + 64,
        len: 48,
        count: 900,
        local_stride: 256,
        remote_stride: 64,
    }
}

fn pieces_of(form: &Strided) -> Vec<Range> {
    form.pieces().collect()
}

#[test]
fn a_strided_form_moves_what_its_pieces_would() {
    let pieces = pieces_of(&strided(0, 0));
    for device in devices() {
        let bench = Bench::on(&device, 1);
        for without_kernel in [false, true] {
            let options = SubmitOptions { without_kernel, ..SubmitOptions::default() };
            // Leaked, so that the closure may lend them.
            let copies =
                |local, remote| Copies::from(&*Box::leak(Box::new([strided(local, remote)])));
            bench.check(copies, &pieces, &options);
        }
    }
}

const LOCAL_PAGES: [u32; 5] = [7, 0, 3, 11, 4];
const REMOTE_PAGES: [u32; 5] = [1, 9, 2, 0, 8];

/// Of each token of a page one head of two, three layers.
fn paged(local: u64, remote: u64) -> Paged<'static> {
    Paged {
        local: Pages {
            addr: local,
            numbers: &LOCAL_PAGES,
            page_stride: 16 * 64,
            layer_stride: 16 * 1024,
            row_stride: 64,
        },
        remote: Pages {
            addr: remote + 64,
            numbers: &REMOTE_PAGES,
            page_stride: 16 * 128,
            layer_stride: 16 * 2048,
            row_stride: 128,
        },
        layers: 3,
        rows: 16,
        row_bytes: 64,
    }
}

#[test]
fn a_paged_form_moves_what_its_pieces_would() {
    let pieces: Vec<_> = paged(0, 0).pieces().collect();
    assert_eq!(pieces.len(), 5 * 3 * 16);
    for device in devices() {
        let bench = Bench::on(&device, 1);
        for without_kernel in [false, true] {
            let options = SubmitOptions { without_kernel, ..SubmitOptions::default() };
            let copies =
                |local, remote| Copies::from(&*Box::leak(Box::new([paged(local, remote)])));
            bench.check(copies, &pieces, &options);
        }
    }
}

#[test]
fn a_range_list_with_strides_is_sent_as_a_form_and_a_scattered_one_is_not() {
    let (device, control) = simulated();
    let bench = Bench::on(&device, 1);
    let list = |shuffled: bool| {
        let mut pieces = pieces_of(&strided(0, 0));
        if shuffled {
            pieces.shuffle(&mut SmallRng::seed_from_u64(1));
        }
        pieces
    };
    for (shuffled, compact, ring) in [(false, 1, 0), (true, 0, 1)] {
        let before = (control.calls("launch_compact"), control.calls("launch"));
        let placed = |local, remote| {
            let place = |piece: Range| Range {
                local: piece.local + local,
                remote: piece.remote + remote,
                ..piece
            };
            let list: Vec<_> = list(shuffled).into_iter().map(place).collect();
            Copies::from(&*Box::leak(list.into_boxed_slice()))
        };
        let path = bench.check(placed, &list(shuffled), &SubmitOptions::default());
        assert_eq!(path, Path::Kernel);
        // Written and read.
        let after = (control.calls("launch_compact"), control.calls("launch"));
        assert_eq!(after, (before.0 + 2 * compact, before.1 + 2 * ring), "shuffled: {shuffled}");
    }
}

#[test]
fn without_the_kernel_strides_are_one_row_copy_and_no_multiprocessor_is_used() {
    let (device, control) = simulated();
    let bench = Bench::on(&device, 1);
    let options = SubmitOptions { without_kernel: true, ..SubmitOptions::default() };
    let list = |local, remote| {
        let list: Vec<_> = strided(local, remote).pieces().collect();
        Copies::from(&*Box::leak(list.into_boxed_slice()))
    };
    let path = bench.check(list, &pieces_of(&strided(0, 0)), &options);
    assert_eq!(path, Path::Dma);
    assert_eq!(control.calls("copy_rows"), 2, "one for the write, one for the read");
    assert_eq!(control.calls("copy"), 0);
    let launches = ["launch", "launch_inline", "launch_compact"].map(|call| control.calls(call));
    assert_eq!(launches, [0; 3]);
}

#[test]
fn a_form_that_leaves_its_region_is_refused_and_nothing_moves() {
    let (device, control) = simulated();
    let bench = Bench::on(&device, 1);
    let (target, there) = &bench.peers[0];
    let good = strided(bench.local.addr(), there.addr());
    let bad = Strided { count: 1 << 40, ..good };
    let refused = bench.engine.submit(target, Op::Write, &[good, bad]);
    assert!(
        matches!(refused, Err(Error::Form(FormError::OutOfBounds { form: 1, .. }))),
        "{refused:?}"
    );
    let twice = bench.engine.submit(target, Op::Write, &[good, good]);
    assert!(matches!(twice, Err(Error::Form(FormError::DestinationsOverlap { .. }))), "{twice:?}");
    assert_eq!(control.calls("launch_compact") + control.calls("launch_inline"), 0);
    let nothing = Strided { len: 0, local: 1, ..good };
    let id = bench.engine.submit(target, Op::Write, &[nothing]).expect("nothing to do");
    assert_eq!(bench.finish(id), Path::None);
}

#[test]
fn parts_for_several_targets_are_one_batch_and_each_gets_its_own_bytes() {
    for device in devices() {
        let bench = Bench::on(&device, 3);
        bench.local.write(0, &pattern(5)).expect("inside");
        for forms in [false, true] {
            let mut lists = Vec::new();
            let mut strides = Vec::new();
            for (at, (_, there)) in (0u64..).zip(&bench.peers) {
                there.write(0, &pattern(6)).expect("inside");
                let local = bench.local.addr() + at * 1024;
                strides.push([strided(local, there.addr())]);
                let piece = |index: u64| Range {
                    local: local + index * 256,
                    remote: there.addr() + 64 + (index * 7 % 1000) * 64,
                    len: 48,
                };
                lists.push((0..900).map(piece).collect::<Vec<_>>());
            }
            let mut parts: Vec<_> = bench
                .peers
                .iter()
                .zip(lists.iter().zip(&strides))
                .map(|((target, _), (list, strided))| {
                    let copies = if forms { strided.into() } else { list.into() };
                    Part { target, op: Op::Write, copies }
                })
                .collect();
            // Nothing of a target is nothing, wherever it stands.
            let none = Copies::Ranges(&[]);
            parts.insert(1, Part { target: &bench.peers[0].0, op: Op::Read, copies: none });
            let id = bench.engine.submit_parts(&parts, &SubmitOptions::default()).expect("submits");
            bench.finish(id);
            for ((at, (_, there)), list) in bench.peers.iter().enumerate().zip(&lists) {
                let (bytes, mut expected) = (pattern(5), pattern(6));
                let pieces = match forms {
                    true => pieces_of(&strided(at as u64 * 1024, 0)),
                    false => list
                        .iter()
                        .map(|range| Range {
                            local: range.local - bench.local.addr(),
                            remote: range.remote - there.addr(),
                            ..*range
                        })
                        .collect(),
                };
                for piece in pieces {
                    let (from, to, len) =
                        (piece.local as usize, piece.remote as usize, piece.len as usize);
                    expected[to..to + len].copy_from_slice(&bytes[from..from + len]);
                }
                let mut found = vec![0; LEN as usize];
                there.read(0, &mut found).expect("inside");
                assert!(found == expected, "target {at}, forms {forms}");
            }
        }
    }
}

#[test]
fn parts_on_two_devices_are_refused_by_their_position() {
    let (one, _) = simulated();
    let (other, _) =
        sim(&SimOptions { ordinal: 1, ..SimOptions::default() }).expect("always there");
    let devices = vec![Arc::clone(&one), Arc::clone(&other)];
    let engine = Engine::new(Config::default(), devices).expect("an engine");
    let buffers = [&one, &other].map(|device| engine.allocate(device, LEN).expect("memory"));
    let target = engine.open("itself", engine.segment(), Arc::new(NoExports)).expect("opens");
    let lists = buffers
        .each_ref()
        .map(|buffer| [Range { local: buffer.addr(), remote: buffer.addr() + 4096, len: 64 }]);
    let parts =
        lists.each_ref().map(|list| Part { target: &target, op: Op::Write, copies: list.into() });
    let refused = engine.submit_parts(&parts, &SubmitOptions::default());
    assert!(matches!(refused, Err(Error::MixedParts { part: 1, .. })), "{refused:?}");
}

#[test]
fn a_batch_waits_for_its_producer_and_a_consumer_for_the_batch() {
    let (device, control) = simulated();
    let bench = Bench::on(&device, 1);
    let (target, there) = &bench.peers[0];
    let (producer, consumer) = (control.stream(), control.stream());
    there.write(0, &[0; 4096]).expect("inside");
    bench.local.write(0, &[0; 4096]).expect("inside");
    producer.hold();
    // SAFETY: nobody else uses these bytes until the batch, which waits for the stream.
    unsafe { producer.fill(bench.local.addr(), 9, 4096) };
    // SAFETY: the streams live longer than the calls.
    let (after, waiting) =
        unsafe { (Producer::stream(producer.handle()), Consumer::stream(consumer.handle())) };
    let range = [Range { local: bench.local.addr(), remote: there.addr(), len: 4096 }];
    let part = Part { target, op: Op::Write, copies: (&range).into() };
    let options = SubmitOptions { after: Some(after), ..SubmitOptions::default() };
    let id = bench.engine.submit_parts(&[part], &options).expect("submits");
    bench.engine.signal(id, waiting).expect("waits");
    let passed = consumer.record();
    // Another batch, without a producer, is not held up by this one.
    let other = [Range { local: bench.local.addr() + 8192, remote: there.addr() + 8192, len: 64 }];
    let free = bench.engine.submit(target, Op::Write, &other).expect("submits");
    bench.finish(free);
    assert_eq!(bench.engine.poll(id).expect("known").state, State::Running);
    assert!(!consumer.has_fired(passed));
    producer.open();
    bench.finish(id);
    let mut found = vec![0; 4096];
    there.read(0, &mut found).expect("inside");
    assert_eq!(found, vec![9; 4096]);
    while !consumer.has_fired(passed) {
        std::thread::yield_now();
    }
    let gone = bench.engine.signal(id, waiting);
    assert_eq!(gone, Err(Error::UnknownBatch(id)));
}

#[test]
fn an_order_that_cannot_be_kept_is_refused_before_anything_moves() {
    let (device, control) = simulated();
    let bench = Bench::on(&device, 1);
    let (target, there) = &bench.peers[0];
    let stream = control.stream();
    stream.begin_capture();
    let range = [Range { local: bench.local.addr(), remote: there.addr(), len: 4096 }];
    let part = Part { target, op: Op::Write, copies: (&range).into() };
    // SAFETY: the stream lives longer than the call.
    let after = Some(unsafe { Producer::stream(stream.handle()) });
    let options = SubmitOptions { after, ..SubmitOptions::default() };
    let refused = bench.engine.submit_parts(&[part], &options);
    assert!(
        matches!(
            refused,
            Err(Error::Device(kvferry_device::Error::NotOrderable { what: "stream", .. }))
        ),
        "{refused:?}"
    );
    assert_eq!(control.calls("copy"), 0);
    assert!(stream.end_capture());
    // Host memory has no streams at all.
    let host = kvferry_device::host().expect("always there");
    let bench = Bench::on(&host, 1);
    let (target, there) = &bench.peers[0];
    let range = [Range { local: bench.local.addr(), remote: there.addr(), len: 4096 }];
    let part = Part { target, op: Op::Write, copies: (&range).into() };
    // SAFETY: never used as a stream: host memory refuses all.
    let after = Some(unsafe { Producer::stream(std::ptr::null_mut::<c_void>()) });
    let options = SubmitOptions { after, ..SubmitOptions::default() };
    let refused = bench.engine.submit_parts(&[part], &options).map(drop);
    assert!(refused.is_err_and(|error| error.to_string().contains("host:0")));
}

#[test]
fn polling_a_running_batch_asks_the_driver_at_most_once_a_millisecond() {
    let (device, control) = simulated();
    let bench = Bench::on(&device, 1);
    let (target, there) = &bench.peers[0];
    control.hold();
    let range = [Range { local: bench.local.addr(), remote: there.addr(), len: 4096 }];
    let id = bench.engine.submit(target, Op::Write, &range).expect("submits");
    let before = control.calls("enter");
    let start = std::time::Instant::now();
    for _ in 0..100_000 {
        assert_eq!(bench.engine.poll(id).expect("known").state, State::Running);
    }
    let most = start.elapsed().as_millis() as u64 + 1;
    let asked = control.calls("enter") - before;
    assert!(asked <= most, "{asked} times in {most} ms");
    control.release();
    bench.finish(id);
}
