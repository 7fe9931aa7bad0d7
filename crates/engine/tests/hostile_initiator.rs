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
        let devices = vec![Arc::clone(device)];
        let engine = Engine::new(common::config(KNOBS), devices).expect("an engine");
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

    /// Asks for all of the buffer, so many times over.
    fn ask(&mut self, there: &Served, op: wire::Op, times: usize, progress_ms: u32) -> u64 {
        let segments = [there.segment()];
        let part = Part::whole(1);
        let mut encoder = Encoder::new(Vec::new(), op, Form::Ranges, part, progress_ms, &segments);
        for _ in 0..times {
            encoder.range(wire::Range { segment: 0, offset: 0, length: LEN });
        }
        self.machine.submit(encoder.finish().expect("a request")).expect("there is room")
    }

    /// Goes on until something is told that is asked for.
    fn until<T>(&mut self, wanted: impl Fn(initiator::Event) -> Option<T>) -> T {
        let start = Instant::now();
        let mut buffer = [0; 64 << 10];
        loop {
            assert!(start.elapsed() < PATIENCE, "it is not told");
            assert_eq!(self.machine.closed(), None);
            if let Some(told) = std::iter::from_fn(|| self.machine.event()).find_map(&wanted) {
                return told;
            }
            self.machine.tick(self.began.elapsed());
            let framing = self.machine.outgoing().framing.to_vec();
            self.stream.write_all(&framing).expect("it reads");
            self.machine.sent(framing.len());
            match self.stream.read(&mut buffer) {
                Ok(count) => {
                    assert_ne!(count, 0, "it closed the connection");
                    assert_eq!(self.machine.received(&buffer[..count]), count);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => panic!("{error}"),
            }
        }
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
            let request = lane.ask(&there, op, 1, progress_ms);
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
    let here = Engine::new(common::config(KNOBS), vec![gpu()]).expect("an engine");
    let local = here.allocate(&here.devices()[0], LEN).expect("memory");
    let address = there.listener.address().to_string();
    let target = here.open_tcp("peer", there.engine.segment(), &address).expect("opens");
    let range = [Range { local: local.addr(), remote: there.buffer.addr(), len: LEN }];
    let id = here.submit(&target, Op::Read, &range).expect("submits");
    assert_eq!(here.wait(id, PATIENCE).expect("known").state, State::Completed);
    drop(lane);
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
    let request = lane.ask(&there, wire::Op::Read, 4, 0);
    assert!(matches!(lane.end(request), Outcome::Failed(Status { code: Code::TimedOut, .. })));
    // There would be 16 million frames.
    let grown = most_memory() - before;
    assert!(grown < 128 << 20, "{grown} bytes for a request that nobody takes");
}
