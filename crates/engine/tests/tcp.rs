//! Transfers over TCP between two engines of this process, on host memory and on simulated GPUs.

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_device::Device;
use kvferry_device::sim::{Fault, SimControl, SimOptions, sim};
use kvferry_engine::{
    BatchId, Buffer, Config, Consumer, Copies, Engine, Error, Listener, Op, Paged, Pages, Part,
    Path, Producer, Range, State, Strided, SubmitOptions, Target,
};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use common::relay::Relay;

const PATIENCE: Duration = Duration::from_secs(60);
const LEN: u64 = 4 << 20;

fn config(knobs: &[(&str, &str)]) -> Config {
    common::config(&[knobs, &[("MC_KVFERRY_TCP_THREADS", "2")]].concat())
}

/// The engine that serves.
struct Served {
    buffer: Buffer,
    listener: Listener,
    engine: Arc<Engine>,
}

/// All that this process may have: many pairs run together on a machine of many cores.
fn more_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
        .expect("the hard limit");
}

impl Served {
    fn start(device: &Arc<dyn Device>, knobs: &[(&str, &str)]) -> Self {
        more_descriptors();
        let engine = Engine::new(config(knobs), vec![Arc::clone(device)]).expect("an engine");
        let buffer = engine.allocate(device, LEN).expect("memory");
        let listener = engine.listen("127.0.0.1:0".parse().unwrap()).expect("listens");
        Self { buffer, listener, engine }
    }

    fn address(&self) -> String {
        self.listener.address().to_string()
    }
}

struct Pair {
    target: Target,
    local: Buffer,
    engine: Arc<Engine>,
    there: Served,
}

/// Knobs that make slices and lanes many and small.
const SMALL: &[(&str, &str)] = &[
    ("MC_TCP_SLICE_SIZE", "64K"),
    ("MC_TCP_GPU_STAGING_SLOT_MB", "1"),
    ("MC_TCP_GPU_STAGING_SLOTS", "2"),
];

fn until(mut happened: impl FnMut() -> bool) {
    let start = Instant::now();
    while !happened() {
        assert!(start.elapsed() < PATIENCE, "it does not happen");
        std::thread::yield_now();
    }
}

fn host() -> Arc<dyn Device> {
    kvferry_device::host().expect("host memory")
}

fn gpu() -> (Arc<dyn Device>, Arc<SimControl>) {
    sim(&SimOptions::default()).expect("a simulated GPU")
}

impl Pair {
    fn new(here: &Arc<dyn Device>, there: &Arc<dyn Device>, knobs: &[(&str, &str)]) -> Self {
        let there = Served::start(there, knobs);
        let engine = Engine::new(config(knobs), vec![Arc::clone(here)]).expect("an engine");
        let local = engine.allocate(here, LEN).expect("memory");
        let address = there.address();
        let target = engine.open_tcp("peer", there.engine.segment(), &address).expect("opens");
        Self { target, local, engine, there }
    }

    fn finish(&self, id: BatchId) -> (State, Path) {
        let status = self.engine.wait(id, PATIENCE).expect("known");
        assert_ne!(status.state, State::Running, "a batch does not end");
        self.engine.release(id).expect("it ended");
        (status.state, status.path)
    }

    fn whole(&self) -> [Range; 1] {
        [Range { local: self.local.addr(), remote: self.there.buffer.addr(), len: LEN }]
    }

    /// Runs a request both ways and compares every byte with what the pieces say.
    fn check<'a>(&self, copies: Copies<'a>, pieces: &[Range], random: &mut SmallRng) -> Path {
        let mut path = Path::None;
        for op in [Op::Write, Op::Read] {
            let (source, destination) = match op {
                Op::Write => (&self.local, &self.there.buffer),
                Op::Read => (&self.there.buffer, &self.local),
            };
            let (bytes, mut expected) = (noise(random), noise(random));
            source.write(0, &bytes).expect("inside");
            destination.write(0, &expected).expect("inside");
            let id = self.engine.submit(&self.target, op, copies).expect("submits");
            let state;
            (state, path) = self.finish(id);
            assert_eq!(state, State::Completed, "{op:?}");
            for piece in pieces {
                let local = (piece.local - self.local.addr()) as usize;
                let remote = (piece.remote - self.there.buffer.addr()) as usize;
                let len = piece.len as usize;
                let (from, to) = if op == Op::Write { (local, remote) } else { (remote, local) };
                expected[to..to + len].copy_from_slice(&bytes[from..from + len]);
            }
            let mut found = vec![0; LEN as usize];
            destination.read(0, &mut found).expect("inside");
            let wrong = found.iter().zip(&expected).position(|(found, expected)| found != expected);
            assert_eq!(wrong, None, "{op:?}: the first wrong byte");
        }
        path
    }

    /// Pieces of such lengths, apart and shuffled at both ends.
    fn scattered(&self, len: impl Fn(&mut SmallRng) -> u64, random: &mut SmallRng) -> Vec<Range> {
        let (mut lens, mut used) = (Vec::new(), 0);
        loop {
            let len = len(random);
            let gap = random.random_range(0..3);
            if used + len + gap > LEN {
                break;
            }
            used += len + gap;
            lens.push((len, gap));
        }
        let mut place = |base: u64| {
            let mut order: Vec<usize> = (0..lens.len()).collect();
            order.shuffle(random);
            let (mut at, mut places) = (base, vec![0; lens.len()]);
            for index in order {
                places[index] = at;
                at += lens[index].0 + lens[index].1;
            }
            places
        };
        let (local, remote) = (place(self.local.addr()), place(self.there.buffer.addr()));
        let range =
            |index: usize| Range { local: local[index], remote: remote[index], len: lens[index].0 };
        (0..lens.len()).map(range).collect()
    }
}

fn noise(random: &mut SmallRng) -> Vec<u8> {
    let mut bytes = vec![0; LEN as usize];
    random.fill(&mut bytes[..]);
    bytes
}

fn random() -> SmallRng {
    let seed = std::env::var("KVFERRY_TEST_SEED").ok().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or_else(rand::random);
    println!("KVFERRY_TEST_SEED={seed}");
    SmallRng::seed_from_u64(seed)
}

fn moves_shapes(here: &Arc<dyn Device>, there: &Arc<dyn Device>, knobs: &[(&str, &str)]) -> Path {
    let (pair, mut random) = (Pair::new(here, there, knobs), random());
    let whole = pair.whole();
    let path = pair.check(Copies::Ranges(&whole), &whole, &mut random);
    for shape in [
        pair.scattered(|random| random.random_range(1..200), &mut random),
        pair.scattered(|_| 2112, &mut random),
        pair.scattered(|random| random.random_range(1..1 << 18), &mut random),
    ] {
        pair.check(Copies::Ranges(&shape), &shape, &mut random);
    }
    let strided = [Strided {
        local: pair.local.addr() + 3,
        remote: pair.there.buffer.addr() + 70,
        len: 100,
        count: 9000,
        local_stride: 300,
        remote_stride: 129,
    }];
    let pieces: Vec<_> = strided.iter().flat_map(|form| form.pieces()).collect();
    pair.check(Copies::Strided(&strided), &pieces, &mut random);
    let (mut here_pages, mut there_pages): (Vec<u32>, Vec<u32>) =
        ((0..64).collect(), (0..64).collect());
    here_pages.shuffle(&mut random);
    there_pages.shuffle(&mut random);
    let paged = [Paged::whole_pages(
        Pages::whole(pair.local.addr(), &here_pages, 4096, 64 * 4096),
        Pages::whole(pair.there.buffer.addr(), &there_pages, 4096 * 7, 4096),
        7,
        4001,
    )];
    let pieces: Vec<_> = paged.iter().flat_map(|form| form.pieces()).collect();
    pair.check(Copies::Paged(&paged), &pieces, &mut random);
    path
}

#[test]
fn host_memory_arrives_whole_and_alone_by_one_lane_and_by_eight() {
    for lanes in ["1", "8"] {
        let path = moves_shapes(&host(), &host(), &[("MC_TCP_LANES_PER_PEER", lanes)]);
        assert_eq!(path, Path::Tcp);
    }
}

#[test]
fn gpu_memory_is_staged_and_arrives_whole_and_alone() {
    for lanes in ["1", "8"] {
        let knobs = [SMALL, &[("MC_TCP_LANES_PER_PEER", lanes)]].concat();
        let path = moves_shapes(&gpu().0, &gpu().0, &knobs);
        assert_eq!(path, Path::TcpStaged);
    }
}

#[test]
fn host_and_gpu_memory_reach_each_other_whichever_end_is_which() {
    assert_eq!(moves_shapes(&host(), &gpu().0, SMALL), Path::Tcp);
    assert_eq!(moves_shapes(&gpu().0, &host(), SMALL), Path::TcpStaged);
}

#[test]
fn checksums_of_all_payload_are_right_and_change_nothing() {
    let knobs = [SMALL, &[("MC_KVFERRY_TCP_CHECKSUMS", "1")]].concat();
    moves_shapes(&host(), &gpu().0, &knobs);
    moves_shapes(&gpu().0, &host(), &knobs);
}

#[test]
fn without_staging_bytes_arrive_the_slow_way_and_strict_mode_refuses() {
    let off = [SMALL, &[("MC_TCP_GPU_STAGING", "0")]].concat();
    assert_eq!(moves_shapes(&gpu().0, &host(), &off), Path::Tcp);
    assert_eq!(moves_shapes(&host(), &gpu().0, &off), Path::Tcp);
    let strict = [&off[..], &[("MC_KVFERRY_STRICT", "1")]].concat();
    let pair = Pair::new(&gpu().0, &host(), &strict);
    let refused = pair.engine.submit(&pair.target, Op::Write, &pair.whole());
    assert!(matches!(refused, Err(Error::NotStaged { .. })), "{refused:?}");
}

#[test]
fn one_slot_is_enough_for_both_ways_at_once() {
    // One slice in all: one way has none and takes the slower path.
    let knobs: &[(&str, &str)] = &[
        ("MC_TCP_SLICE_SIZE", "1M"),
        ("MC_TCP_GPU_STAGING_SLOT_MB", "1"),
        ("MC_TCP_GPU_STAGING_SLOTS", "1"),
    ];
    moves_shapes(&gpu().0, &gpu().0, knobs);
}

#[test]
fn without_a_kernel_each_piece_is_a_dma_and_arrives() {
    let options = SimOptions { kernel: false, ..SimOptions::default() };
    let gpu = || sim(&options).expect("a simulated GPU").0;
    assert_eq!(moves_shapes(&gpu(), &gpu(), SMALL), Path::TcpStaged);
    let strict = [SMALL, &[("MC_KVFERRY_STRICT", "1")]].concat();
    let pair = Pair::new(&gpu(), &host(), &strict);
    let refused = pair.engine.submit(&pair.target, Op::Write, &pair.whole());
    assert!(matches!(refused, Err(Error::NotStaged { .. })), "{refused:?}");
}

#[test]
fn pinned_memory_is_slots_times_their_size_and_no_more() {
    let knobs = [SMALL, &[("MC_TCP_LANES_PER_PEER", "8")]].concat();
    let pair = Pair::new(&gpu().0, &gpu().0, &knobs);
    assert_eq!(pair.engine.staging_bytes(), 0, "nothing is staged yet");
    let whole = pair.whole();
    for _ in 0..20 {
        let ids: Vec<_> = [Op::Write, Op::Read]
            .map(|op| pair.engine.submit(&pair.target, op, &whole).expect("submits"))
            .into();
        ids.into_iter().for_each(|id| assert_eq!(pair.finish(id).0, State::Completed));
    }
    assert_eq!(pair.engine.staging_bytes(), 2 << 20);
    assert_eq!(pair.there.engine.staging_bytes(), 2 << 20);
}

#[test]
fn both_engines_write_to_each_other_with_few_slots_and_all_ends() {
    let (one, other) = (Pair::new(&gpu().0, &gpu().0, SMALL), Pair::new(&gpu().0, &gpu().0, SMALL));
    // The serving engine of each asks the other's, so every engine sends and receives.
    let back = |from: &Pair, to: &Pair| {
        let address = to.there.address();
        let engine = Arc::clone(&from.there.engine);
        let target = engine.open_tcp("back", to.there.engine.segment(), &address).expect("opens");
        let range =
            [Range { local: from.there.buffer.addr(), remote: to.there.buffer.addr(), len: LEN }];
        (engine, target, range)
    };
    let (here, there) = (back(&one, &other), back(&other, &one));
    for _ in 0..10 {
        let mut running = Vec::new();
        for (engine, target, range) in [&here, &there] {
            for op in [Op::Write, Op::Read] {
                running.push((engine, engine.submit(target, op, range).expect("submits")));
            }
        }
        for (engine, id) in running {
            assert_eq!(engine.wait(id, PATIENCE).expect("known").state, State::Completed);
        }
    }
}

#[test]
fn a_transfer_waits_for_its_producer_and_holds_up_no_other() {
    use kvferry_device::conformance::ApplicationStream;
    let (device, control) = gpu();
    let pair = Pair::new(&device, &host(), SMALL);
    let stream = control.stream();
    stream.hold();
    let (local, len) = (pair.local.addr(), LEN / 2);
    // SAFETY: the buffer outlives the stream's work, and nobody else uses this half meanwhile.
    unsafe { stream.fill(local, 7, len) };
    // SAFETY: the stream is the device's and alive.
    let after = unsafe { Producer::stream(stream.handle()) };
    let remote = pair.there.buffer.addr();
    let held = [Range { local, remote, len }];
    let part =
        kvferry_engine::Part { target: &pair.target, op: Op::Write, copies: Copies::Ranges(&held) };
    let options = SubmitOptions { after: Some(after), ..SubmitOptions::default() };
    let waits = pair.engine.submit_parts(&[part], &options).expect("submits");
    // As many others as would fill every slot go on.
    for _ in 0..20 {
        let other = [Range { local: local + len, remote: remote + len, len }];
        let id = pair.engine.submit(&pair.target, Op::Write, &other).expect("submits");
        assert_eq!(pair.finish(id).0, State::Completed);
    }
    assert_eq!(pair.engine.poll(waits).expect("known").state, State::Running);
    stream.open();
    assert_eq!(pair.finish(waits).0, State::Completed);
    let mut found = vec![0; len as usize];
    pair.there.buffer.read(0, &mut found).expect("inside");
    assert!(found.iter().all(|&byte| byte == 7), "the source was read before it was written");
}

#[test]
fn a_read_waits_for_whoever_still_uses_its_destination() {
    use kvferry_device::conformance::ApplicationStream;
    let (device, control) = gpu();
    let pair = Pair::new(&device, &host(), SMALL);
    pair.there.buffer.write(0, &[9; 1 << 20]).expect("inside");
    let stream = control.stream();
    stream.hold();
    let (local, len) = (pair.local.addr(), 1 << 20);
    // SAFETY: the buffer outlives the stream's work.
    unsafe { stream.fill(local, 7, len) };
    // SAFETY: the stream is the device's and alive.
    let after = Some(unsafe { Producer::stream(stream.handle()) });
    let range = [Range { local, remote: pair.there.buffer.addr(), len }];
    let part = Part { target: &pair.target, op: Op::Read, copies: Copies::Ranges(&range) };
    let options = SubmitOptions { after, ..SubmitOptions::default() };
    let id = pair.engine.submit_parts(&[part], &options).expect("submits");
    let waited = pair.engine.wait(id, Duration::from_millis(50)).expect("known");
    assert_eq!(waited.state, State::Running);
    stream.open();
    assert_eq!(pair.finish(id).0, State::Completed);
    let mut found = vec![0; len as usize];
    pair.local.read(0, &mut found).expect("inside");
    assert!(found.iter().all(|&byte| byte == 9), "the destination was written too early");
}

#[test]
fn streams_and_batches_are_refused_a_transfer_until_it_has_ended() {
    use kvferry_device::conformance::ApplicationStream;
    let (device, control) = gpu();
    let pair = Pair::new(&device, &host(), SMALL);
    let len = 1 << 20;
    let (local, remote) = (pair.local.addr(), pair.there.buffer.addr());
    pair.there.buffer.write(0, &vec![9; len as usize]).expect("inside");
    let (producer, consumer) = (control.stream(), control.stream());
    producer.hold();
    // SAFETY: the stream is the device's and alive.
    let after = Some(unsafe { Producer::stream(producer.handle()) });
    let range = [Range { local, remote, len }];
    let part = Part { target: &pair.target, op: Op::Read, copies: Copies::Ranges(&range) };
    let options = SubmitOptions { after, ..SubmitOptions::default() };
    let id = pair.engine.submit_parts(&[part], &options).expect("submits");
    // SAFETY: as above.
    let waiting = unsafe { Consumer::stream(consumer.handle()) };
    let refused = pair.engine.signal(id, waiting);
    let copy = [Range { local, remote: local + len, len }];
    let own = pair.engine.local().expect("its own memory");
    let next = || {
        let part = Part { target: &own, op: Op::Write, copies: Copies::Ranges(&copy) };
        let options = SubmitOptions { behind: &[id], ..SubmitOptions::default() };
        pair.engine.submit_parts(&[part], &options)
    };
    let refused = [refused, next().map(drop)];
    if refused != [(); 2].map(|()| Err(Error::NotAllSubmitted(id))) {
        producer.open();
        panic!("the transfer has not ended: {refused:?}");
    }
    let passed = consumer.record();
    until(|| consumer.has_fired(passed));
    assert_eq!(pair.engine.poll(id).expect("known").state, State::Running);
    producer.open();
    assert_eq!(pair.engine.wait(id, PATIENCE).expect("known").state, State::Completed);
    pair.engine.signal(id, waiting).expect("it has ended");
    assert_eq!(pair.finish(next().expect("it has ended")).0, State::Completed);
    let mut found = vec![0; len as usize];
    pair.local.read(len, &mut found).expect("inside");
    assert!(found.iter().all(|&byte| byte == 9), "the copy did not wait for its source");
}

#[test]
fn a_transfer_that_failed_holds_up_no_stream_and_no_batch() {
    use kvferry_device::conformance::ApplicationStream;
    let (device, control) = gpu();
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = silent.local_addr().expect("bound").to_string();
    let knobs = [("MC_TCP_STATUS_TIMEOUT_SEC", "1")];
    for device in [&device, &host()] {
        let pair = Pair::new(device, &host(), &knobs);
        let target = pair.engine.open_tcp("silent", pair.there.engine.segment(), &address);
        let id = pair.engine.submit(&target.expect("opens"), Op::Read, &pair.whole());
        let id = id.expect("submits");
        let consumer = control.stream();
        // SAFETY: the stream is alive.
        let waiting = unsafe { Consumer::stream(consumer.handle()) };
        assert_eq!(pair.engine.signal(id, waiting), Err(Error::NotAllSubmitted(id)));
        let state = pair.engine.wait(id, PATIENCE).expect("known").state;
        assert!(matches!(state, State::Failed(_)), "{state:?}");
        pair.engine.signal(id, waiting).expect("it has ended");
        let own = pair.engine.local().expect("its own memory");
        let local = pair.local.addr();
        let range = [Range { local, remote: local + 4096, len: 4096 }];
        let part = Part { target: &own, op: Op::Write, copies: Copies::Ranges(&range) };
        let options = SubmitOptions { behind: &[id], ..SubmitOptions::default() };
        let next = pair.engine.submit_parts(&[part], &options).expect("it has ended");
        assert_eq!(pair.finish(next).0, State::Completed);
    }
}

#[test]
fn ranges_beyond_registered_memory_are_refused_before_anything_moves() {
    let pair = Pair::new(&host(), &host(), &[]);
    let (local, remote) = (pair.local.addr(), pair.there.buffer.addr());
    for bad in [
        Range { local, remote: remote + 1, len: LEN },
        Range { local: local + 1, remote, len: LEN },
        Range { local, remote: u64::MAX - 3, len: 8 },
    ] {
        let refused = pair.engine.submit(&pair.target, Op::Write, &[bad]);
        assert!(matches!(refused, Err(Error::Range(_))), "{refused:?}");
    }
    let twice = [
        Range { local, remote, len: 64 },
        Range { local: local + 64, remote: remote + 8, len: 64 },
    ];
    let refused = pair.engine.submit(&pair.target, Op::Write, &twice);
    assert!(matches!(refused, Err(Error::Range(_))), "{refused:?}");
    assert_eq!(pair.there.listener.lanes(), 0, "nobody connected for it");
}

#[test]
fn memory_that_was_withdrawn_or_replaced_is_refused_with_a_reason() {
    let pair = Pair::new(&host(), &host(), &[]);
    let device = &pair.there.engine.devices()[0];
    let gone = pair.there.engine.allocate(device, 4096).expect("memory");
    pair.target.refresh(pair.there.engine.segment()).expect("the same engine");
    let range = [Range { local: pair.local.addr(), remote: gone.addr(), len: 4096 }];
    let id = pair.engine.submit(&pair.target, Op::Write, &range).expect("submits");
    assert_eq!(pair.finish(id).0, State::Completed);
    drop(gone);
    // The number of the segment is used again, its generation is not.
    let _new = pair.there.engine.allocate(device, 4096).expect("memory");
    let id = pair.engine.submit(&pair.target, Op::Write, &range).expect("still in the table");
    let (state, _) = pair.finish(id);
    let State::Failed(Error::Tcp { reason, .. }) = state else { panic!("{state:?}") };
    assert!(reason.contains("unregistered"), "{reason}");
    let id = pair.engine.submit(&pair.target, Op::Write, &pair.whole()).expect("submits");
    assert_eq!(pair.finish(id).0, State::Completed, "the lane goes on");
}

#[test]
fn forms_that_cross_regions_or_begin_before_one_arrive_like_any() {
    let (pair, mut random) = (Pair::new(&host(), &gpu().0, SMALL), random());
    let (local, remote) = (pair.local.addr(), pair.there.buffer.addr());
    pair.there.engine.unregister(remote).expect("it is idle");
    for (at, len) in [(0, LEN / 2), (LEN / 2, LEN / 2)] {
        // SAFETY: the buffer's own memory, which lives until the end of the test.
        unsafe { pair.there.engine.register(remote + at, len) }.expect("as before, in two");
    }
    pair.target.refresh(pair.there.engine.segment()).expect("the same engine");
    let numbers: Vec<u32> = (2..66).collect();
    let later: Vec<u32> = (100..164).collect();
    for (there, addr, stride) in [(&numbers, remote, 32768), (&later, remote - 98 * 16384, 16384)] {
        let paged = [Paged::whole_pages(
            Pages::whole(local, &numbers, 8192, 4096),
            Pages::whole(addr, there, stride, 4096),
            2,
            1000,
        )];
        let pieces: Vec<_> = paged.iter().flat_map(|form| form.pieces()).collect();
        pair.check(Copies::Paged(&paged), &pieces, &mut random);
    }
    pair.there.engine.unregister(remote + LEN / 2).expect("it is idle");
    pair.there.engine.unregister(remote).expect("it is idle");
    // SAFETY: as before; the buffer unregisters it.
    unsafe { pair.there.engine.register(remote, LEN) }.expect("as in the beginning");
}

#[test]
fn a_target_that_ends_takes_its_own_transfers_along_and_leaves_the_lanes_to_others() {
    use kvferry_device::conformance::ApplicationStream;
    let (device, control) = gpu();
    let pair = Pair::new(&device, &host(), SMALL);
    let open = |name: &str| {
        let segment = pair.there.engine.segment();
        pair.engine.open_tcp(name, segment, &pair.there.address()).expect("opens")
    };
    let lanes = pair.engine.config().tcp_lanes;
    for lose in [false, true] {
        let other = open("other");
        assert_eq!(
            pair.finish(pair.engine.submit(&other, Op::Write, &pair.whole()).unwrap()).0,
            State::Completed
        );
        control.hold();
        let submit = |target: &Target| {
            pair.engine.submit(target, Op::Write, &pair.whole()).expect("submits")
        };
        let (theirs, ours) = (submit(&other), submit(&pair.target));
        let stream = control.stream();
        stream.hold();
        let whole = pair.whole();
        let part = Part { target: &other, op: Op::Read, copies: Copies::Ranges(&whole) };
        // SAFETY: the stream is the device's and alive.
        let after = Some(unsafe { Producer::stream(stream.handle()) });
        let options = SubmitOptions { after, ..SubmitOptions::default() };
        let waits = pair.engine.submit_parts(&[part], &options).expect("submits");
        match lose {
            true => other.lose("it is gone"),
            false => other.close("it is gone"),
        }
        let reason = String::from("it is gone");
        let ended = State::Failed(Error::PeerLost { peer: "other".into(), reason });
        assert_eq!(pair.finish(waits).0, ended, "what waits for its producer ends at once");
        control.release();
        assert_eq!(pair.finish(theirs).0, ended);
        assert_eq!(pair.finish(ours).0, State::Completed);
        stream.open();
        assert_eq!(pair.target.lost(), None);
        assert!(matches!(
            pair.engine.submit(&other, Op::Write, &pair.whole()),
            Err(Error::PeerLost { .. })
        ));
        assert_eq!(pair.finish(submit(&pair.target)).0, State::Completed);
        assert!(pair.there.listener.lanes() <= lanes, "targets share their lanes");
    }
    // The last one takes the lanes along, and the next one has new ones.
    pair.target.close("it is over");
    let next = open("next");
    let id = pair.engine.submit(&next, Op::Read, &pair.whole()).expect("submits");
    assert_eq!(pair.finish(id).0, State::Completed);
}

#[test]
fn a_copy_that_fails_here_is_told_as_this_sides_failure_and_not_as_the_peers() {
    let (device, control) = gpu();
    let pair = Pair::new(&device, &host(), SMALL);
    let (local, remote) = (pair.local.addr(), pair.there.buffer.addr());
    let small = [Range { local, remote, len: 4096 }];
    for op in [Op::Write, Op::Read] {
        let submit = || pair.engine.submit(&pair.target, op, &small).expect("submits");
        assert_eq!(pair.finish(submit()).0, State::Completed);
        for _ in 0..20 {
            control.fail("copy", 0, Fault::Refused);
            let state = pair.finish(submit()).0;
            assert!(matches!(state, State::Failed(Error::Device(_))), "{op:?}: {state:?}");
        }
        assert_eq!(pair.finish(submit()).0, State::Completed);
    }
}

#[test]
fn a_list_whose_ranges_all_lie_in_regions_of_their_own_fits_its_requests() {
    const COUNT: u64 = 9000;
    let pair = Pair::new(&host(), &host(), &[("MC_TCP_LANES_PER_PEER", "1")]);
    let Served { engine: there, .. } = &pair.there;
    let memory = Arc::clone(&there.devices()[0]).allocate(COUNT * 128).expect("memory");
    let ranges: Vec<_> = (0..COUNT)
        .map(|at| {
            let remote = memory.addr() + at * 128;
            // SAFETY: the memory is unregistered before it is freed.
            unsafe { there.register(remote, 64) }.expect("it is host memory");
            Range { local: pair.local.addr() + at * 128, remote, len: 64 }
        })
        .collect();
    pair.target.refresh(there.segment()).expect("the same engine");
    let id = pair.engine.submit(&pair.target, Op::Write, &ranges).expect("submits");
    assert_eq!(pair.finish(id).0, State::Completed);
    for range in &ranges {
        there.unregister(range.remote).expect("nobody uses it");
    }
}

#[test]
fn unregistering_waits_for_what_a_peer_moves_and_later_requests_fail() {
    for _ in 0..10 {
        let pair = Pair::new(&host(), &gpu().0, SMALL);
        let whole = pair.whole();
        let submit = |op| pair.engine.submit(&pair.target, op, &whole).expect("submits");
        let ids: Vec<_> = (0..8).map(|_| submit(Op::Read)).collect();
        std::thread::yield_now();
        pair.there.engine.unregister(pair.there.buffer.addr()).expect("it waits");
        let mut failed = 0;
        for id in ids {
            match pair.finish(id).0 {
                State::Completed => {}
                State::Failed(Error::Tcp { reason, .. }) => {
                    assert!(reason.contains("unregistered"), "{reason}");
                    failed += 1;
                }
                state => panic!("{state:?}"),
            }
        }
        println!("{failed} of 8 failed");
        // The buffer unregisters when it is dropped.
        // SAFETY: the buffer's own memory.
        unsafe { pair.there.engine.register(pair.there.buffer.addr(), LEN) }.expect("as before");
    }
}

#[test]
fn a_peer_that_listens_no_more_ends_every_batch_with_a_reason() {
    let Pair { target, local, engine, there } = Pair::new(&host(), &host(), SMALL);
    let range = [Range { local: local.addr(), remote: there.buffer.addr(), len: LEN }];
    let first = engine.submit(&target, Op::Write, &range).expect("submits");
    assert_eq!(engine.wait(first, PATIENCE).expect("known").state, State::Completed);
    let ids: Vec<_> =
        (0..8).map(|_| engine.submit(&target, Op::Write, &range).expect("submits")).collect();
    drop(there.listener);
    for id in ids {
        let state = engine.wait(id, PATIENCE).expect("known").state;
        assert!(matches!(state, State::Completed | State::Failed(Error::Tcp { .. })), "{state:?}");
    }
    let last = engine.submit(&target, Op::Write, &range).expect("submits");
    let state = engine.wait(last, PATIENCE).expect("known").state;
    let State::Failed(Error::Tcp { reason, .. }) = state else { panic!("{state:?}") };
    assert!(reason.contains("cannot connect"), "{reason}");
}

#[test]
fn lanes_that_were_idle_or_cut_connect_again_without_losing_a_batch() {
    let there = Served::start(&host(), SMALL);
    let relay = Relay::start(there.listener.address(), 0);
    let engine = Engine::new(config(SMALL), vec![host()]).expect("an engine");
    let local = engine.allocate(&engine.devices()[0], LEN).expect("memory");
    let target = engine.open_tcp("peer", there.engine.segment(), &relay.address).expect("opens");
    let range = [Range { local: local.addr(), remote: there.buffer.addr(), len: LEN }];
    for _ in 0..5 {
        let id = engine.submit(&target, Op::Write, &range).expect("submits");
        assert_eq!(engine.wait(id, PATIENCE).expect("known").state, State::Completed);
        relay.cut();
    }
}

#[test]
fn connections_cut_at_any_byte_lose_no_byte_and_leave_no_batch_open() {
    let mut random = random();
    for (here, there) in [(host(), gpu().0), (gpu().0, host())] {
        let there = Served::start(&there, SMALL);
        let relay = Relay::start(there.listener.address(), 0);
        let engine = Engine::new(config(SMALL), vec![here]).expect("an engine");
        let local = engine.allocate(&engine.devices()[0], LEN).expect("memory");
        let target =
            engine.open_tcp("peer", there.engine.segment(), &relay.address).expect("opens");
        let range = [Range { local: local.addr(), remote: there.buffer.addr(), len: LEN }];
        let (mut completed, mut failed) = (0, 0);
        for round in 0..30 {
            let op = if round % 2 == 0 { Op::Write } else { Op::Read };
            let (source, destination) = match op {
                Op::Write => (&local, &there.buffer),
                Op::Read => (&there.buffer, &local),
            };
            let bytes = noise(&mut random);
            source.write(0, &bytes).expect("inside");
            relay.cut_after(random.random_range(1..2 * LEN));
            let id = engine.submit(&target, op, &range).expect("submits");
            match engine.wait(id, PATIENCE).expect("known").state {
                State::Completed => {
                    completed += 1;
                    let mut found = vec![0; LEN as usize];
                    destination.read(0, &mut found).expect("inside");
                    assert!(found == bytes, "completed with wrong bytes");
                }
                State::Failed(Error::Tcp { .. }) => failed += 1,
                state => panic!("{state:?}"),
            }
        }
        println!("{completed} completed, {failed} failed, {} cuts", relay.cuts());
        assert!(relay.cuts() > 0, "nothing was cut");
        assert!(completed >= 25, "a cut connection is made again");
    }
}

#[test]
fn a_peer_that_says_nothing_fails_batches_within_the_deadline() {
    let there = Served::start(&host(), &[]);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let knobs = &[("MC_TCP_STATUS_TIMEOUT_SEC", "1")];
    let engine = Engine::new(config(knobs), vec![host()]).expect("an engine");
    let local = engine.allocate(&engine.devices()[0], LEN).expect("memory");
    let target = engine.open_tcp("silent", there.engine.segment(), &address).expect("opens");
    let range = [Range { local: local.addr(), remote: there.buffer.addr(), len: LEN }];
    let start = Instant::now();
    let id = engine.submit(&target, Op::Read, &range).expect("submits");
    let state = engine.wait(id, PATIENCE).expect("known").state;
    assert!(matches!(state, State::Failed(Error::Tcp { .. })), "{state:?}");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[test]
fn a_peer_that_stops_in_the_middle_fails_its_batches_and_no_other_peers() {
    let knobs = [SMALL, &[("MC_TCP_STATUS_TIMEOUT_SEC", "2")]].concat();
    let (device, _control) = gpu();
    let (slow, fast) = (Served::start(&host(), &knobs), Served::start(&host(), SMALL));
    let relay = Relay::start(slow.listener.address(), 0);
    let engine = Engine::new(config(&knobs), vec![Arc::clone(&device)]).expect("an engine");
    let local = engine.allocate(&device, LEN).expect("memory");
    let stops = engine.open_tcp("slow", slow.engine.segment(), &relay.address).expect("opens");
    let goes = engine.open_tcp("fast", fast.engine.segment(), &fast.address()).expect("opens");
    relay.stop_after(LEN / 3);
    let range =
        |there: &Served| [Range { local: local.addr(), remote: there.buffer.addr(), len: LEN }];
    let start = Instant::now();
    let stuck = engine.submit(&stops, Op::Write, &range(&slow)).expect("submits");
    while engine.poll(stuck).expect("known").state == State::Running {
        let id = engine.submit(&goes, Op::Write, &range(&fast)).expect("submits");
        assert_eq!(engine.wait(id, PATIENCE).expect("known").state, State::Completed);
    }
    let state = engine.poll(stuck).expect("known").state;
    assert!(matches!(state, State::Failed(Error::Tcp { .. })), "{state:?}");
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
fn an_engine_that_is_dropped_in_flight_ends_its_batches_first() {
    for _ in 0..10 {
        let Pair { target, local, engine, there } = Pair::new(&gpu().0, &host(), SMALL);
        let range = [Range { local: local.addr(), remote: there.buffer.addr(), len: LEN }];
        for op in [Op::Write, Op::Read] {
            engine.submit(&target, op, &range).expect("submits");
        }
        drop((local, target));
        drop(engine);
    }
}

#[test]
fn an_engine_that_is_dropped_waits_for_what_it_copies_for_a_peer() {
    let (device, control) = gpu();
    let memory = Arc::clone(&device).allocate(LEN).expect("memory");
    let there = Engine::new(config(SMALL), vec![Arc::clone(&device)]).expect("an engine");
    // SAFETY: the engine is dropped before the memory.
    unsafe { there.register(memory.addr(), LEN) }.expect("it is the device's");
    let listener = there.listen("127.0.0.1:0".parse().unwrap()).expect("listens");
    let engine = Engine::new(config(SMALL), vec![host()]).expect("an engine");
    let local = engine.allocate(&engine.devices()[0], LEN).expect("memory");
    let address = listener.address().to_string();
    let target = engine.open_tcp("peer", there.segment(), &address).expect("opens");
    let given = || control.calls("launch") + control.calls("copy");
    let before = given();
    control.hold();
    let pieces: Vec<_> = (0..LEN / 8192)
        .map(|at| Range {
            local: local.addr() + at * 4096,
            remote: memory.addr() + at * 8192,
            len: 4096,
        })
        .collect();
    let id = engine.submit(&target, Op::Write, &pieces).expect("submits");
    until(|| given() > before);
    let dropped = std::thread::spawn(move || drop(there));
    // Nobody serves it any more, so all sockets and their threads are gone.
    let state = engine.wait(id, PATIENCE).expect("known").state;
    assert!(matches!(state, State::Failed(_)), "{state:?}");
    assert!(!dropped.is_finished(), "the device still writes");
    control.release();
    dropped.join().expect("no panic");
    drop(memory);
}

#[test]
fn a_restarted_engine_at_the_same_address_is_refused_by_name() {
    let Pair { target, local, engine, there } = Pair::new(&host(), &host(), &[]);
    let remote = there.buffer.addr();
    let address = there.listener.address();
    drop(there);
    let again = Engine::new(config(&[]), vec![host()]).expect("an engine");
    // The old listener's task may not have closed its socket yet.
    let mut listener = None;
    until(|| {
        listener = again.listen(address).ok();
        listener.is_some()
    });
    let range = [Range { local: local.addr(), remote, len: 64 }];
    // The old engine was of this process, so its target is known to be lost.
    match engine.submit(&target, Op::Write, &range) {
        Err(Error::PeerLost { .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn keys_have_to_match_and_their_file_to_be_private() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, bytes: &[u8], mode: u32| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (one, other) = (file("one", &[1; 32], 0o600), file("other", &[2; 32], 0o600));
    let run = |here: &str, there: &str| {
        let knob = |path: &str| match path {
            "" => config(&[]),
            path => config(&[("MC_KVFERRY_AUTH_KEY_FILE", path)]),
        };
        let served = Engine::new(knob(there), vec![host()]).expect("an engine");
        let buffer = served.allocate(&served.devices()[0], 64).expect("memory");
        let listener = served.listen("127.0.0.1:0".parse().unwrap()).expect("listens");
        let engine = Engine::new(knob(here), vec![host()]).expect("an engine");
        let local = engine.allocate(&engine.devices()[0], 64).expect("memory");
        let address = listener.address().to_string();
        let target = engine.open_tcp("peer", served.segment(), &address).expect("opens");
        let range = [Range { local: local.addr(), remote: buffer.addr(), len: 64 }];
        let id = engine.submit(&target, Op::Write, &range).expect("submits");
        engine.wait(id, PATIENCE).expect("known").state == State::Completed
    };
    assert!(run(&one, &one) && run("", ""));
    assert!(!run(&one, &other) && !run(&one, "") && !run("", &one));
    for bad in [file("open", &[1; 32], 0o640), file("short", &[1; 3], 0o600), "/nowhere".into()] {
        let engine = Engine::new(config(&[("MC_KVFERRY_AUTH_KEY_FILE", &bad)]), vec![host()]);
        let listens = engine.expect("an engine").listen("127.0.0.1:0".parse().unwrap());
        assert!(matches!(listens, Err(Error::AuthKey { .. })), "{bad}");
    }
}

#[test]
fn garbage_and_a_thousand_idle_connections_cost_only_themselves() {
    let pair = Pair::new(&host(), &host(), &[]);
    let address = pair.there.listener.address();
    let mut garbage = TcpStream::connect(address).unwrap();
    garbage.write_all(&[0x5a; 4096]).unwrap();
    garbage.set_read_timeout(Some(PATIENCE)).unwrap();
    let _ = garbage.read_to_end(&mut Vec::new());
    drop(garbage);
    let start = Instant::now();
    while pair.there.listener.rejected() == 0 {
        assert!(start.elapsed() < PATIENCE, "garbage is not counted");
        std::thread::yield_now();
    }
    // Far more than the listener keeps; both ends are this process's.
    let idle: Vec<_> = (0..1000).filter_map(|_| TcpStream::connect(address).ok()).collect();
    assert!(idle.len() >= 300, "this process has too few descriptors: {}", idle.len());
    let mut slow = TcpStream::connect(address).unwrap();
    let _ = slow.write_all(&[1]);
    let id = pair.engine.submit(&pair.target, Op::Write, &pair.whole()).expect("submits");
    assert_eq!(pair.finish(id).0, State::Completed, "strangers keep a peer out");
    // One byte now and then keeps no connection either.
    let start = Instant::now();
    while slow.write_all(&[0]).is_ok() {
        assert!(start.elapsed() < Duration::from_secs(30), "a connection of bytes lives on");
        std::thread::park_timeout(Duration::from_millis(300));
    }
    drop(idle);
}
