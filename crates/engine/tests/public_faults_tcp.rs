//! Faults of other engines over TCP, between two engines of this process. The numbers are those of
//! the project's list of failure cases.

mod common;

use std::net::{SocketAddr, SocketAddrV4, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_device::Device;
use kvferry_device::conformance::skip;
use kvferry_device::sim::{SimControl, SimOptions, sim};
use kvferry_engine::{
    BatchStatus, Buffer, Config, Engine, Error, Listener, Op, Path, Range, State, Strided, Target,
};

use common::relay::Relay;
use rustix::net::{self, AddressFamily, SocketType};

const PATIENCE: Duration = Duration::from_secs(60);

fn config(knobs: &[(&str, &str)]) -> Config {
    common::config(&[knobs, &[("MC_KVFERRY_TCP_THREADS", "2")]].concat())
}

fn host() -> Arc<dyn Device> {
    kvferry_device::host().expect("always there")
}

fn gpu(ordinal: u32) -> (Arc<dyn Device>, Arc<SimControl>) {
    sim(&SimOptions { ordinal, ..SimOptions::default() }).expect("always there")
}

/// An engine with a buffer on the last of its devices.
struct Side {
    buffer: Buffer,
    engine: Arc<Engine>,
}

impl Side {
    fn new(devices: &[Arc<dyn Device>], bytes: u64, knobs: &[(&str, &str)]) -> Self {
        let engine = Engine::new(config(knobs), devices.to_vec()).expect("an engine");
        let device = devices.last().expect("a device");
        let buffer = engine.allocate(device, bytes).expect("memory");
        Self { buffer, engine }
    }

    fn listen(&self, address: &str) -> Listener {
        self.engine.listen(address.parse().expect("an address")).expect("listens")
    }

    fn open(&self, there: &Self, address: &str) -> Target {
        self.engine.open_tcp("peer", there.engine.segment(), address).expect("opens")
    }

    fn ended(&self, id: kvferry_engine::BatchId) -> BatchStatus {
        let status = self.engine.wait(id, PATIENCE).expect("known");
        assert_ne!(status.state, State::Running, "a batch does not end");
        self.engine.release(id).expect("it ended");
        status
    }

    fn transfer(&self, target: &Target, op: Op, ranges: &[Range]) -> BatchStatus {
        self.ended(self.engine.submit(target, op, ranges).expect("submits"))
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.buffer.len() as usize];
        self.buffer.read(0, &mut bytes).expect("inside");
        bytes
    }
}

/// Bytes that are like those of no other place within 16 MiB, and of no other seed.
fn pattern(len: u64, seed: u64) -> Vec<u8> {
    let words = (seed << 40..).map(|word: u64| word.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mut bytes: Vec<u8> =
        words.take(len.div_ceil(8) as usize).flat_map(u64::to_le_bytes).collect();
    bytes.truncate(len as usize);
    bytes
}

/// Pieces of one length, as far apart at both ends as given.
fn pieces(here: &Side, there: &Side, count: u64, len: u64, stride: u64) -> Vec<Range> {
    let range = |at: u64| Range {
        local: here.buffer.addr() + at * stride,
        remote: there.buffer.addr() + at * stride,
        len,
    };
    (0..count).map(range).collect()
}

fn address(listener: &Listener) -> String {
    listener.address().to_string()
}

/// FAILURES.md B30: nothing to send is sent at once, without a connection, and what is empty among
/// other ranges changes nothing.
#[test]
fn empty_and_zero_length_requests_complete_at_once_and_connect_nothing() {
    let (here, there) = (Side::new(&[host()], 1 << 20, &[]), Side::new(&[host()], 1 << 20, &[]));
    let listener = there.listen("127.0.0.1:0");
    let target = here.open(&there, &address(&listener));
    let zero = |local: u64, remote: u64| Range { local, remote, len: 0 };
    let (local, remote) = (here.buffer.addr(), there.buffer.addr());
    let lists =
        [vec![], vec![zero(local, remote)], vec![zero(0, 0)], vec![zero(u64::MAX, 1); 1000]];
    for (op, list) in [Op::Write, Op::Read].into_iter().zip([&lists, &lists]) {
        for list in list {
            let status = here.transfer(&target, op, list);
            assert_eq!((status.state, status.bytes), (State::Completed, 0), "{}", list.len());
        }
    }
    let nothing = Strided { local, remote, len: 0, count: 7, local_stride: 64, remote_stride: 64 };
    let id = here.engine.submit(&target, Op::Write, &[nothing]).expect("submits");
    assert_eq!(here.ended(id).state, State::Completed);
    assert_eq!(listener.lanes(), 0, "nobody connected for nothing");
    let source = pattern(1 << 20, 1);
    here.buffer.write(0, &source).expect("inside");
    let mut list = pieces(&here, &there, 1000, 32, 64);
    list.iter_mut().step_by(3).for_each(|range| range.len = 0);
    let status = here.transfer(&target, Op::Write, &list);
    assert_eq!((status.state, status.bytes), (State::Completed, 666 * 32));
    for (at, (found, source)) in there.bytes().chunks(64).zip(source.chunks(64)).enumerate() {
        let len = list.get(at).map_or(0, |range| range.len as usize);
        assert!(found[..len] == source[..len] && found[len..].iter().all(|&byte| byte == 0));
    }
}

/// FAILURES.md B32: the deadline is about progress. A batch may take several times as long.
#[test]
fn a_batch_that_takes_several_deadlines_completes_as_long_as_it_moves() {
    const PIECES: u64 = 100_000;
    const LEN: u64 = 656;
    let knobs = [("MC_TCP_STATUS_TIMEOUT_SEC", "2")];
    let bytes = PIECES * LEN;
    let (here, there) = (Side::new(&[host()], bytes, &knobs), Side::new(&[host()], bytes, &knobs));
    let listener = there.listen("127.0.0.1:0");
    let relay = Relay::start(listener.address(), 10 << 20);
    let target = here.open(&there, &relay.address);
    here.buffer.write(0, &pattern(bytes, 3)).expect("inside");
    // Every other piece first, so that neighbours are not one range.
    let mut ranges = pieces(&here, &there, PIECES, LEN, LEN);
    ranges.sort_by_key(|range| (range.local / LEN % 2, range.local));
    let start = Instant::now();
    let id = here.engine.submit(&target, Op::Write, &ranges).expect("submits");
    let early = here.engine.wait(id, Duration::ZERO).expect("known");
    assert_eq!((early.state, early.bytes), (State::Running, 0), "a wait of no time ends nothing");
    let status = here.ended(id);
    assert_eq!((status.state, status.bytes), (State::Completed, bytes));
    assert!(start.elapsed() > Duration::from_secs(4), "too quick: {:?}", start.elapsed());
    assert!(there.bytes() == pattern(bytes, 3), "wrong bytes");
    // The same without progress ends within the deadline, and nothing is left behind.
    relay.freeze();
    let start = Instant::now();
    let id = here.engine.submit(&target, Op::Write, &ranges).expect("submits");
    let state = here.ended(id).state;
    assert!(matches!(state, State::Failed(Error::Tcp { .. })), "{state:?}");
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    assert_eq!(here.engine.unregister(here.buffer.addr()), Ok(()), "resources come back");
    // SAFETY: the buffer's own memory; it unregisters it when it is dropped.
    unsafe { here.engine.register(here.buffer.addr(), bytes) }.expect("as before");
}

/// FAILURES.md B38: many more requests than any queue holds wait for each other, on new connections
/// and on ones that were closed while they were idle.
#[test]
fn thousands_of_batches_at_once_all_complete_on_new_connections_and_after_idle_ones_were_closed() {
    const COUNT: u64 = 3840;
    const LEN: u64 = 2112;
    let bytes = COUNT * LEN;
    let (here, there) = (Side::new(&[host()], bytes, &[]), Side::new(&[host()], bytes, &[]));
    let listener = there.listen("127.0.0.1:0");
    let relay = Relay::start(listener.address(), 0);
    let target = here.open(&there, &relay.address);
    let ranges = pieces(&here, &there, COUNT, LEN, LEN);
    for (round, op) in (0..).zip([Op::Write, Op::Read, Op::Write, Op::Read]) {
        let (source, destination) = match op {
            Op::Write => (&here, &there),
            Op::Read => (&there, &here),
        };
        source.buffer.write(0, &pattern(bytes, round)).expect("inside");
        let submit = |list: &[Range]| here.engine.submit(&target, op, list).expect("submits");
        let ids: Vec<_> = match round {
            // One batch of all, and a batch for each.
            0 | 1 => vec![submit(&ranges)],
            _ => ranges.iter().map(|range| submit(std::slice::from_ref(range))).collect(),
        };
        for id in ids {
            assert_eq!(here.ended(id).state, State::Completed, "round {round}");
        }
        assert!(destination.bytes() == pattern(bytes, round), "round {round}: wrong bytes");
        // The peer's end of everything that is idle.
        relay.cut();
    }
}

/// FAILURES.md B40: who asks for bytes and stops before it has taken them costs bounded memory and
/// its own lanes; others are served meanwhile.
#[test]
fn a_reader_that_takes_nothing_costs_its_own_lanes_and_bounded_memory() {
    const LEN: u64 = 16 << 20;
    let knobs = [
        ("MC_TCP_STATUS_TIMEOUT_SEC", "3"),
        ("MC_TCP_SLICE_SIZE", "64K"),
        ("MC_TCP_GPU_STAGING_SLOT_MB", "1"),
        ("MC_TCP_GPU_STAGING_SLOTS", "2"),
    ];
    let there = Side::new(&[gpu(0).0], LEN, &knobs);
    there.buffer.write(0, &pattern(LEN, 4)).expect("inside");
    let listener = there.listen("127.0.0.1:0");
    let [stalls, reads] = [0; 2].map(|_| Side::new(&[host()], LEN, &[]));
    let relay = Relay::start(listener.address(), 0);
    let stuck = stalls.open(&there, &relay.address);
    let open = reads.open(&there, &address(&listener));
    let whole = |side: &Side| pieces(side, &there, 1, LEN, LEN);
    assert_eq!(stalls.transfer(&stuck, Op::Read, &whole(&stalls)).state, State::Completed);
    relay.freeze();
    let start = Instant::now();
    let id = stalls.engine.submit(&stuck, Op::Read, &whole(&stalls)).expect("submits");
    // Those that ended while the stuck lane still was served.
    let mut rounds = 0;
    while listener.rejected() == 0 {
        assert!(start.elapsed() < PATIENCE, "a lane that takes nothing is served for ever");
        let status = reads.transfer(&open, Op::Read, &whole(&reads));
        assert_eq!(status.state, State::Completed);
        assert!(there.engine.staging_bytes() <= 2 << 20, "{}", there.engine.staging_bytes());
        rounds += u32::from(listener.rejected() == 0);
    }
    assert!(start.elapsed() > Duration::from_secs(2), "given up after {:?}", start.elapsed());
    println!("{rounds} rounds of others in {:?}", start.elapsed());
    // The first one may have been quicker than the stuck lane's request.
    assert!(rounds > 1, "others waited for it: {rounds} rounds");
    assert!(reads.bytes() == pattern(LEN, 4), "wrong bytes");
    assert_eq!(stalls.engine.poll(id).expect("known").state, State::Running);
    drop((stuck, stalls));
    // The lanes of the one that reads are all that is left.
    let lanes = reads.engine.config().tcp_lanes;
    while listener.lanes() > lanes {
        assert!(start.elapsed() < PATIENCE, "a stalled lane lives on");
        std::thread::yield_now();
    }
}

/// FAILURES.md B41: another engine at the address is told from the one that was meant, before any
/// byte moves.
#[test]
fn an_address_where_another_engine_listens_moves_nothing() {
    let meant = Side::new(&[host()], 4096, &[]);
    let other = Side::new(&[host()], 4096, &[]);
    let here = Side::new(&[host()], 4096, &[]);
    here.buffer.write(0, &[9; 4096]).expect("inside");
    let listener = other.listen("127.0.0.1:0");
    let target = here.open(&meant, &address(&listener));
    for op in [Op::Write, Op::Read] {
        let range = pieces(&here, &meant, 1, 4096, 4096);
        match here.engine.submit(&target, op, &range) {
            Ok(id) => match here.ended(id).state {
                State::Failed(Error::Tcp { reason, .. }) => {
                    let named = other.engine.incarnation().to_string();
                    println!("{reason}");
                    assert!(reason.contains("incarnation") || reason.contains(&named), "{reason}");
                }
                state => panic!("{op:?}: {state:?}"),
            },
            Err(error) => panic!("{op:?}: {error}"),
        }
    }
    assert!(other.bytes().iter().chain(&meant.bytes()).all(|&byte| byte == 0), "bytes moved");
    assert!(here.bytes().iter().all(|&byte| byte == 9), "bytes moved");
    // It counts once its end of the connection is over, which may be after ours.
    let start = Instant::now();
    while listener.rejected() == 0 {
        assert!(start.elapsed() < PATIENCE, "the other engine did not count it");
        std::thread::yield_now();
    }
}

/// FAILURES.md B41: nothing shares a port that is taken, and the refusal has its number.
#[test]
fn a_taken_port_is_refused_with_its_number_and_free_ones_are_all_different() {
    let side = Side::new(&[host()], 4096, &[]);
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("it is bound");
    let listener = side.listen("127.0.0.1:0");
    for address in [port, listener.address()] {
        let refused = side.engine.listen(address).map(drop);
        assert!(
            matches!(&refused, Err(Error::Listen { address: named, .. }) if *named == address),
            "{refused:?}"
        );
    }
    // 32 engines at once.
    let address = "127.0.0.1:0".parse().expect("an address");
    let engines: Vec<_> = (0..32).map(|_| Side::new(&[host()], 4096, &[]).engine).collect();
    let listeners: Vec<_> = std::thread::scope(|scope| {
        let starts: Vec<_> =
            engines.iter().map(|engine| scope.spawn(move || engine.listen(address))).collect();
        starts.into_iter().map(|start| start.join().expect("no panic").expect("listens")).collect()
    });
    let ports: std::collections::HashSet<_> =
        listeners.iter().map(|listener| listener.address().port()).collect();
    assert_eq!(ports.len(), 32);
}

/// FAILURES.md B42: lanes connect to IPv6 addresses with brackets and to names.
#[test]
fn lanes_reach_ipv6_addresses_and_names() {
    if let Err(error) = TcpListener::bind("[::1]:0") {
        return skip("ipv6", &error);
    }
    let (here, there) = (Side::new(&[host()], 4096, &[]), Side::new(&[host()], 4096, &[]));
    for (listen, hosts) in [
        ("[::1]:0", &["[::1]"][..]),
        ("127.0.0.1:0", &["127.0.0.1", "[::ffff:127.0.0.1]", "localhost"]),
        ("[::]:0", &["[::1]", "127.0.0.1", "localhost"]),
    ] {
        let listener = there.listen(listen);
        for (round, host) in (1..).zip(hosts) {
            here.buffer.write(0, &[round; 4096]).expect("inside");
            let target = here.open(&there, &format!("{host}:{}", listener.address().port()));
            let status = here.transfer(&target, Op::Write, &pieces(&here, &there, 1, 4096, 4096));
            assert_eq!(status.state, State::Completed, "{host} at {listen}");
            assert_eq!(there.bytes(), [round; 4096], "{host} at {listen}");
        }
    }
}

/// FAILURES.md B46: GPU memory is staged by the GPU that it lies on, at any length, with and
/// without slots, and a GPU that has nothing to do with it is asked for nothing.
#[test]
fn memory_of_the_second_gpu_goes_over_tcp_at_any_length_and_the_first_is_left_alone() {
    const LEN: u64 = 16 << 20;
    let slots = |slots: &'static str| {
        [("MC_TCP_GPU_STAGING_SLOT_MB", "1"), ("MC_TCP_GPU_STAGING_SLOTS", slots)]
    };
    let off = [("MC_TCP_GPU_STAGING", "0")];
    for (knobs, path) in [
        (&slots("4")[..], Path::TcpStaged),
        (&slots("1")[..], Path::TcpStaged),
        (&off[..], Path::Tcp),
    ] {
        let ((zero, unused), (one, control)) = (gpu(0), gpu(1));
        let here = Side::new(&[zero, one], LEN, knobs);
        let there = Side::new(&[host()], LEN, &[]);
        let listener = there.listen("127.0.0.1:0");
        let target = here.open(&there, &address(&listener));
        let calls = ["enter", "allocate", "allocate_pinned", "create_stream", "copy", "launch"];
        let idle = calls.map(|call| unused.calls(call));
        let busy = control.calls("enter");
        for len in [1, 64, 512, 4096, (64 << 10) + 1, LEN] {
            for op in [Op::Write, Op::Read] {
                let (source, destination) = match op {
                    Op::Write => (&here, &there),
                    Op::Read => (&there, &here),
                };
                let (bytes, behind) = (pattern(len, len), LEN.min(len + 64));
                source.buffer.write(0, &bytes).expect("inside");
                destination.buffer.write(0, &vec![0; behind as usize]).expect("inside");
                let status = here.transfer(&target, op, &pieces(&here, &there, 1, len, LEN));
                assert_eq!(status.state, State::Completed, "{op:?} of {len} bytes");
                assert!(status.path == path || path == Path::TcpStaged, "{}", status.path);
                let mut found = vec![0; behind as usize];
                destination.buffer.read(0, &mut found).expect("inside");
                assert!(found[..len as usize] == bytes, "{op:?} of {len} bytes");
                assert!(found[len as usize..].iter().all(|&byte| byte == 0), "beyond {len} bytes");
            }
        }
        // Pressure: more at once than there are slots.
        let whole = pieces(&here, &there, 256, 64 << 10, 64 << 10);
        let ids: Vec<_> = whole
            .iter()
            .map(|range| here.engine.submit(&target, Op::Write, std::slice::from_ref(range)))
            .collect();
        for id in ids {
            assert_eq!(here.ended(id.expect("submits")).state, State::Completed);
        }
        assert!(control.calls("enter") > busy);
        assert_eq!(calls.map(|call| unused.calls(call)), idle, "GPU 0 was used");
    }
}

/// An address that is taken, and where nobody listens.
fn reserved() -> (SocketAddr, OwnedFd) {
    let socket = net::socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    // A listener may take it over.
    net::sockopt::set_socket_reuseaddr(&socket, true).expect("it is new");
    // The source of a connection is 127.0.0.1, so none that is tried ever connects to itself.
    net::bind(&socket, &SocketAddrV4::new([127, 0, 0, 9].into(), 0)).expect("a port");
    let bound = net::getsockname(&socket).expect("it is bound");
    (bound.try_into().expect("an IPv4 address"), socket)
}

#[test]
fn more_batches_and_cancelled_ones_do_not_use_up_the_attempts_to_reach_a_peer() {
    let (here, there) = (Side::new(&[host()], 4096, &[]), Side::new(&[host()], 4096, &[]));
    let (address, reserved) = reserved();
    let target = here.open(&there, &address.to_string());
    here.buffer.write(0, &pattern(4096, 1)).expect("inside");
    let submit = |at: u64| {
        let range =
            Range { local: here.buffer.addr() + at, remote: there.buffer.addr() + at, len: 512 };
        here.engine.submit(&target, Op::Write, &[range]).expect("submits")
    };
    let began = Instant::now();
    let kept: Vec<_> = (0..8)
        .map(|at| {
            let (kept, unwanted) = (submit(at * 512), submit(at * 512));
            here.engine.cancel(unwanted).expect("known");
            assert_eq!(here.ended(unwanted).state, State::Failed(Error::Cancelled));
            // Each of them finds the lanes in a pause, or at an attempt.
            std::thread::sleep(Duration::from_millis(2));
            kept
        })
        .collect();
    while began.elapsed() < Duration::from_millis(100) {
        std::thread::yield_now();
    }
    let _listener = there.listen(&address.to_string());
    drop(reserved);
    for id in kept {
        assert_eq!(here.ended(id).state, State::Completed);
    }
    assert_eq!(there.bytes(), here.bytes());
}
