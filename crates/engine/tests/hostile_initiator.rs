//! Peers that speak the batch protocol correctly and ask for more than is their due. They are the
//! protocol's own machine, without an engine that is well-behaved around it.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_device::Device;
use kvferry_device::sim::{SimOptions, sim};
use kvferry_engine::{Buffer, Engine, Identity, Listener, Op, Range, SegmentRef, State};
use kvferry_wire::Id;
use kvferry_wire::batch::{
    self as wire, Code, Encoder, Form, Initiator, Limits, Nonce, Outcome, Part, Status, initiator,
};

const PATIENCE: Duration = Duration::from_secs(60);
const LEN: u64 = 4 << 20;

/// An engine that serves and waits for a peer for a second, which is the least that it can be told.
struct Served {
    buffer: Buffer,
    listener: Listener,
    engine: Arc<Engine>,
}

/// Few slices, which a lane or two could keep.
const KNOBS: &[(&str, &str)] = &[
    ("MC_TCP_SLICE_SIZE", "64K"),
    ("MC_TCP_GPU_STAGING_SLOT_MB", "1"),
    ("MC_TCP_GPU_STAGING_SLOTS", "2"),
    ("MC_TCP_STATUS_TIMEOUT_SEC", "1"),
    ("MC_KVFERRY_TCP_THREADS", "1"),
];

impl Served {
    fn start(device: &Arc<dyn Device>) -> Self {
        Self::with(device, KNOBS)
    }

    fn with(device: &Arc<dyn Device>, knobs: &[(&str, &str)]) -> Self {
        let devices = vec![Arc::clone(device)];
        let engine = Engine::new(common::config(knobs), devices).expect("an engine");
        let buffer = engine.allocate(device, LEN).expect("memory");
        let listener = engine.listen("127.0.0.1:0".parse().unwrap()).expect("listens");
        Self { buffer, listener, engine }
    }

    fn segment(&self) -> SegmentRef {
        let segment = self.engine.segment();
        let region = segment.regions.iter().find(|region| region.addr == self.buffer.addr());
        region.expect("it is registered").segment.expect("it is served")
    }
}

/// A lane whose host does nothing that the protocol's machine does not do by itself: it answers pings,
/// sends its own, and gives no credits.
struct Lane {
    machine: Initiator,
    stream: TcpStream,
    began: Instant,
}

impl Lane {
    fn open(there: &Served, limits: Limits) -> Self {
        let address: SocketAddr = there.listener.address();
        let stream = TcpStream::connect(address).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_millis(10))).expect("a socket");
        let mut machine = Initiator::new(initiator::Settings {
            limits,
            credits: 0,
            incarnation: Id(Identity::random().0),
            expected: Id(there.engine.incarnation().0),
            session: Id(Identity::random().0),
            lane: 0,
            lanes: 1,
            key: None,
            wants_checksums: false,
            attempts: 1,
            queue: 4,
        });
        machine.connect(Nonce([7; 32]));
        Self { machine, stream, began: Instant::now() }
    }

    /// Asks for ranges of those lengths, each from the beginning of the buffer.
    fn ask(&mut self, there: &Served, op: wire::Op, lens: &[u64], progress_ms: u32) -> u64 {
        let segments = [there.segment()];
        let part = Part::whole(1);
        let mut encoder = Encoder::new(Vec::new(), op, Form::Ranges, part, progress_ms, &segments);
        for &length in lens {
            encoder.range(wire::Range { segment: 0, offset: 0, length });
        }
        self.machine.submit(encoder.finish().expect("a request")).expect("there is room")
    }

    /// Asks to write, and offers so many bytes of it as one frame.
    fn write(&mut self, there: &Served, len: u64, offered: u32) -> u64 {
        let asked = self.ask(there, wire::Op::Write, &[len], 0);
        self.until(|event| match event {
            initiator::Event::Begun { request } if request == asked => Some(()),
            _ => None,
        });
        self.machine.offer(asked, offered, 0).expect("it is open");
        asked
    }

    /// Goes on until something is told that is asked for.
    fn until<T>(&mut self, wanted: impl Fn(initiator::Event) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            assert!(start.elapsed() < PATIENCE, "it is not told");
            if let Some(told) = self.turn(&wanted) {
                return told;
            }
        }
    }

    /// Sends what there is to be sent, hears what came within moments, and says whether it was told.
    fn turn<T>(&mut self, wanted: impl Fn(initiator::Event) -> Option<T>) -> Option<T> {
        assert_eq!(self.machine.closed(), None);
        if let Some(told) = std::iter::from_fn(|| self.machine.event()).find_map(wanted) {
            return Some(told);
        }
        self.machine.tick(self.began.elapsed());
        let out = self.machine.outgoing();
        let mut bytes = out.framing.to_vec();
        let payload = out.payload.map_or(0, |payload| payload.length - payload.sent);
        bytes.resize(bytes.len() + payload as usize, 0);
        // A frame and its payload at once, which so arrive together.
        self.stream.write_all(&bytes).expect("it reads");
        self.machine.sent(bytes.len());
        let mut buffer = [0; 64 << 10];
        match self.stream.read(&mut buffer) {
            Ok(count) => {
                assert_ne!(count, 0, "it closed the connection");
                assert_eq!(self.machine.received(&buffer[..count]), count);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => panic!("{error}"),
        }
        None
    }

    fn end(&mut self, asked: u64) -> Outcome {
        self.until(|event| match event {
            initiator::Event::Ended { request, outcome } if request == asked => Some(outcome),
            _ => None,
        })
    }
}

fn gpu() -> Arc<dyn Device> {
    sim(&SimOptions::default()).expect("a simulated GPU").0
}

#[test]
fn a_peer_that_pings_and_moves_nothing_keeps_memory_and_slots_for_no_longer_than_the_deadline() {
    let there = Served::start(&gpu());
    let mut lane = Lane::open(&there, Limits::default());
    for op in [wire::Op::Read, wire::Op::Write] {
        // None, and 49 days; the lane goes on, as nothing was against the protocol.
        for progress_ms in [0, u32::MAX] {
            let start = Instant::now();
            let request = lane.ask(&there, op, &[LEN], progress_ms);
            let outcome = lane.end(request);
            let Outcome::Failed(Status { code, .. }) = outcome else { panic!("{outcome:?}") };
            assert_eq!(code, Code::TimedOut, "{op:?} {progress_ms}");
            assert!(start.elapsed() >= Duration::from_secs(1), "{op:?} {progress_ms}: too early");
        }
    }
    // What they held is there for others, and while the lane is open.
    there.engine.unregister(there.buffer.addr()).expect("nobody uses it");
    // SAFETY: the buffer's own memory, which unregisters it.
    unsafe { there.engine.register(there.buffer.addr(), LEN) }.expect("as before");
    let here = Engine::new(common::config(&[]), vec![gpu()]).expect("an engine");
    let local = here.allocate(&here.devices()[0], LEN).expect("memory");
    let address = there.listener.address().to_string();
    let target = here.open_tcp("peer", there.engine.segment(), &address).expect("opens");
    let range = [Range { local: local.addr(), remote: there.buffer.addr(), len: LEN }];
    // On a busy machine a second without progress may be nobody's fault, so more than once.
    let start = Instant::now();
    loop {
        let id = here.submit(&target, Op::Read, &range).expect("submits");
        match here.wait(id, PATIENCE).expect("known").state {
            State::Completed => break,
            state => assert!(start.elapsed() < PATIENCE, "{state:?}"),
        }
    }
    drop(lane);
}

/// Fails unless the request ended with that code; says why it did.
fn failed_with(outcome: Outcome, expected: Code) -> String {
    let Outcome::Failed(Status { code, reason }) = outcome else { panic!("{outcome:?}") };
    assert_eq!(code, expected, "{reason}");
    reason
}

#[test]
fn a_lane_whose_payload_was_refused_a_slot_keeps_its_deadlines() {
    let (device, control) = sim(&SimOptions::default()).expect("a simulated GPU");
    // One slice that sends and one that receives, and no slower way.
    let knobs = [
        ("MC_TCP_SLICE_SIZE", "1M"),
        ("MC_TCP_GPU_STAGING_SLOT_MB", "1"),
        ("MC_TCP_GPU_STAGING_SLOTS", "2"),
        ("MC_TCP_STATUS_TIMEOUT_SEC", "1"),
        ("MC_KVFERRY_STRICT", "1"),
    ];
    let there = Served::with(&device, &knobs);
    let [mut first, mut second] = [0; 2].map(|_| Lane::open(&there, Limits::default()));
    let request = first.write(&there, 4096, 4096);
    assert_eq!(first.end(request), Outcome::Done);
    let given =
        || ["launch", "launch_inline", "launch_compact", "copy"].map(|it| control.calls(it));
    let before = given();
    control.hold();
    let held = first.write(&there, 4096, 4096);
    let start = Instant::now();
    while given() == before {
        assert!(start.elapsed() < PATIENCE, "nothing is applied");
        first.turn(|_| None::<()>);
    }
    // It waits for the slice of the first one, and is then refused a slower way.
    let refused = second.write(&there, 4096, 4096);
    let reason = failed_with(second.end(refused), Code::Exhausted);
    assert!(reason.contains("all slots are busy"), "{reason}");
    control.release();
    assert_eq!(first.end(held), Outcome::Done);
    let silent = second.ask(&there, wire::Op::Write, &[4096], 0);
    failed_with(second.end(silent), Code::TimedOut);
}

#[test]
fn a_peer_that_sends_a_byte_now_and_then_does_not_keep_memory_that_is_unregistered() {
    for device in [kvferry_device::host().expect("host memory"), gpu()] {
        let there = Served::start(&device);
        let mut lane = Lane::open(&there, Limits::default());
        let request = lane.write(&there, LEN, 1);
        let (addr, begun) = (there.buffer.addr(), Instant::now());
        let outcome = std::thread::scope(|scope| {
            let ended = scope.spawn(|| there.engine.unregister(addr));
            let outcome = loop {
                assert!(begun.elapsed() < PATIENCE, "the peer keeps it");
                let ended = lane.turn(|event| match event {
                    initiator::Event::Ended { outcome, .. } => Some(outcome),
                    _ => None,
                });
                if let Some(outcome) = ended {
                    break outcome;
                }
                // The next byte, once the one before is gone, unless it has ended just now.
                if lane.machine.outgoing().is_empty() {
                    let _ = lane.machine.offer(request, 1, 0);
                }
            };
            ended.join().expect("no panic").expect("nobody keeps it");
            outcome
        });
        let reason = failed_with(outcome, Code::UnknownSegment);
        assert!(reason.contains("unregistered"), "{reason}");
        // The lane goes on, and the buffer unregisters it when it is dropped.
        // SAFETY: the buffer's own memory.
        unsafe { there.engine.register(addr, LEN) }.expect("as before");
        let request = lane.write(&there, 1, 1);
        assert_eq!(lane.end(request), Outcome::Done);
    }
}

/// Bytes that this process has held at once, at most.
fn most_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("it is there");
    let kibibytes = line.trim().trim_end_matches("kB").trim().parse::<u64>().expect("a number");
    kibibytes << 10
}

#[test]
fn a_peer_whose_slots_are_tiny_costs_no_memory_for_each_of_its_frames() {
    let there = Served::start(&kvferry_device::host().expect("host memory"));
    let mut lane = Lane::open(&there, Limits { slot_bytes: 1, ..Limits::default() });
    let before = most_memory();
    let request = lane.ask(&there, wire::Op::Read, &[LEN; 4], 0);
    assert!(matches!(lane.end(request), Outcome::Failed(Status { code: Code::TimedOut, .. })));
    // There would be 16 million frames.
    let grown = most_memory() - before;
    assert!(grown < 128 << 20, "{grown} bytes for a request that nobody takes");
}
