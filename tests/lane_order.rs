//! A lane is on one connection at a time (docs/wire.md, section 4): what comes by the next one is not
//! served, and the next one is not made, while anything of an earlier one still moves. The other side
//! is a script here, because it takes one that holds bytes back at the right moment.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry::{Buffer, Config, Engine, Listener, Op, Range, Segment, State};
use kvferry_device::Device;
use kvferry_device::sim::{SimControl, SimOptions, sim};
use kvferry_wire::Id;
use kvferry_wire::batch::{
    Encoder, Form, Incoming, Initiator, Limits, Nonce, Outcome, Part, Responder, Status, initiator,
    responder,
};

const PATIENCE: Duration = Duration::from_secs(20);
/// How long something that must not happen is waited for.
const SILENCE: Duration = Duration::from_millis(300);
/// One DATA frame.
const LEN: u64 = 1 << 20;
/// What the earlier connection carries, and the later one.
const EARLIER: u8 = 0xAA;
const LATER: u8 = 0xBB;

struct Node {
    buffer: Buffer,
    listener: Listener,
    engine: Arc<Engine>,
}

impl Node {
    fn start(device: &Arc<dyn Device>) -> Self {
        let knobs = [("MC_KVFERRY_CACHE_DIR", "off"), ("MC_TCP_LANES_PER_PEER", "1")];
        let lookup = |name: &str| {
            let mut knobs = knobs.iter();
            knobs.find(|(knob, _)| *knob == name).map(|(_, value)| value.into())
        };
        let config = Config::from_lookup(lookup).expect("good knobs");
        let engine = Engine::new(config, vec![Arc::clone(device)]).expect("an engine");
        let buffer = engine.allocate(device, LEN).expect("memory");
        buffer.write(0, &vec![0; LEN as usize]).expect("inside");
        let listener = engine.listen("127.0.0.1:0".parse().unwrap()).expect("listens");
        Self { buffer, listener, engine }
    }

    /// The byte that fills its whole buffer.
    fn filled_with(&self) -> u8 {
        let mut bytes = vec![0; LEN as usize];
        self.buffer.read(0, &mut bytes).expect("inside");
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "bytes of both connections");
        bytes[0]
    }
}

fn gpu() -> (Arc<dyn Device>, Arc<SimControl>) {
    sim(&SimOptions::default()).expect("a simulated GPU")
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Reads what there is by the deadline; nothing where the other side closed, or says nothing.
fn read(stream: &mut TcpStream, deadline: Instant) -> Option<Vec<u8>> {
    let left = deadline.saturating_duration_since(Instant::now());
    stream.set_read_timeout(Some(left.max(Duration::from_millis(1)))).expect("a timeout");
    let mut bytes = vec![0; 64 << 10];
    match stream.read(&mut bytes) {
        Ok(0) => None,
        Ok(count) => Some(bytes[..count].to_vec()),
        Err(error) => {
            let ends = [ErrorKind::WouldBlock, ErrorKind::ConnectionReset];
            assert!(ends.contains(&error.kind()), "{error}");
            None
        }
    }
}

/// Whether the other side ends the connection, and what it says before.
fn ends(stream: &mut TcpStream) -> (bool, usize) {
    let (deadline, mut heard) = (Instant::now() + PATIENCE, 0);
    while let Some(bytes) = read(stream, deadline) {
        heard += bytes.len();
    }
    (Instant::now() < deadline, heard)
}

/// A scripted initiator with one lane and one WRITE of the whole buffer.
struct Script {
    machine: Initiator,
    address: std::net::SocketAddr,
}

impl Script {
    fn new(node: &Node) -> Self {
        let segment = node.engine.segment();
        let mut machine = Initiator::new(initiator::Settings {
            limits: Limits::default(),
            credits: 4,
            incarnation: Id([1; 16]),
            expected: Id(segment.incarnation.0),
            session: Id([2; 16]),
            lane: 0,
            lanes: 1,
            key: None,
            wants_checksums: false,
            attempts: 3,
            queue: 4,
        });
        let region = segment.regions.iter().find(|region| region.addr == node.buffer.addr());
        let name = region.and_then(|region| region.segment).expect("it is served");
        let (op, form) = (kvferry_wire::batch::Op::Write, Form::Ranges);
        let mut write = Encoder::new(Vec::new(), op, form, Part::whole(1), 0, &[name]);
        write.range(kvferry_wire::batch::Range { segment: 0, offset: 0, length: LEN });
        machine.submit(write.finish().expect("a request")).expect("it has room");
        Self { machine, address: node.listener.address() }
    }

    /// Makes the next connection of the lane, and says nothing yet.
    fn connect(&mut self) -> TcpStream {
        self.machine.disconnected();
        self.machine.connect(Nonce(rand::random()));
        let stream = TcpStream::connect(self.address).expect("it listens");
        stream.set_nodelay(true).expect("a socket");
        stream
    }

    /// Sends all framing, and at most so many bytes of payload, all alike.
    fn send(&mut self, stream: &mut TcpStream, byte: u8, most: u32) {
        let mut left = most;
        loop {
            let outgoing = self.machine.outgoing();
            let payload = outgoing.payload.map_or(0, |it| it.length - it.sent).min(left);
            if outgoing.framing.is_empty() && payload == 0 {
                return;
            }
            let mut bytes = outgoing.framing.to_vec();
            bytes.extend(vec![byte; payload as usize]);
            stream.write_all(&bytes).expect("it reads");
            self.machine.sent(bytes.len());
            left -= payload;
        }
    }

    /// Waits for an event; none if it does not come in time.
    fn hear(
        &mut self,
        stream: &mut TcpStream,
        patience: Duration,
        wanted: fn(&initiator::Event) -> bool,
    ) -> Option<initiator::Event> {
        let deadline = Instant::now() + patience;
        loop {
            while let Some(event) = self.machine.event() {
                if wanted(&event) {
                    return Some(event);
                }
            }
            let bytes = read(stream, deadline)?;
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let taken = self.machine.received(rest);
                assert!(taken > 0, "a writer hears framing alone: {:?}", self.machine.closed());
                rest = &rest[taken..];
            }
        }
    }

    fn opens(&mut self, stream: &mut TcpStream, patience: Duration) -> bool {
        self.send(stream, 0, 0);
        let opened =
            self.hear(stream, patience, |event| matches!(event, initiator::Event::Opened(_)));
        opened.is_some()
    }

    /// Sends the request, and so much of its payload.
    fn write(&mut self, stream: &mut TcpStream, byte: u8, most: u32) {
        self.send(stream, 0, 0);
        let begun = |event: &initiator::Event| matches!(event, initiator::Event::Begun { .. });
        let begun = self.hear(stream, PATIENCE, begun);
        let Some(initiator::Event::Begun { request }) = begun else { panic!("{begun:?}") };
        self.machine.offer(request, LEN as u32, 0).expect("it begins");
        self.send(stream, byte, most);
    }

    fn is_done(&mut self, stream: &mut TcpStream) -> bool {
        let ended = |event: &initiator::Event| matches!(event, initiator::Event::Ended { .. });
        let done = Outcome::Done;
        matches!(self.hear(stream, PATIENCE, ended),
            Some(initiator::Event::Ended { outcome, .. }) if outcome == done)
    }
}

#[test]
fn a_connection_is_not_opened_while_copies_of_an_earlier_one_run() {
    let (device, control) = gpu();
    let node = Node::start(&device);
    let mut script = Script::new(&node);
    let mut earlier = script.connect();
    assert!(script.opens(&mut earlier, PATIENCE));
    let before = control.calls("copy");
    control.hold();
    script.write(&mut earlier, EARLIER, u32::MAX);
    eventually("the payload is on its way to the GPU", || control.calls("copy") > before);

    let mut later = script.connect();
    assert!(!script.opens(&mut later, SILENCE), "its copy still runs");
    control.release();
    assert!(script.opens(&mut later, PATIENCE), "nothing moves any more");
    assert!(ends(&mut earlier).0, "the earlier connection is over");
    script.write(&mut later, LATER, u32::MAX);
    assert!(script.is_done(&mut later));
    assert_eq!(node.filled_with(), LATER);
}

#[test]
fn what_an_earlier_connection_still_carries_is_not_served_beside_the_next_one() {
    let node = Node::start(&kvferry_device::host().expect("host memory"));
    let mut script = Script::new(&node);
    let mut earlier = script.connect();
    assert!(script.opens(&mut earlier, PATIENCE));
    // The rest is held back, as if the network were slow.
    script.write(&mut earlier, EARLIER, LEN as u32 / 2);

    let mut later = script.connect();
    assert!(script.opens(&mut later, PATIENCE));
    script.write(&mut later, LATER, u32::MAX);
    assert!(script.is_done(&mut later));
    assert_eq!(node.filled_with(), LATER);
    // Late, and to whom it may concern: that nobody takes it is no failure.
    let _ = earlier.write_all(&vec![EARLIER; LEN as usize / 2]);
    assert_eq!(ends(&mut earlier), (true, 0), "it ends without an answer");
    assert_eq!(node.filled_with(), LATER, "nothing came after the answer");
}

#[test]
fn a_connection_that_arrives_after_the_next_one_is_refused() {
    let node = Node::start(&kvferry_device::host().expect("host memory"));
    let mut script = Script::new(&node);
    let mut earlier = script.connect();
    let held = script.machine.outgoing().framing.to_vec();
    let mut later = script.connect();
    assert!(script.opens(&mut later, PATIENCE));

    earlier.write_all(&held).expect("it reads");
    // The reason is in REFUSED's text.
    let (deadline, mut heard) = (Instant::now() + PATIENCE, Vec::new());
    while let Some(bytes) = read(&mut earlier, deadline) {
        heard.extend(bytes);
    }
    let heard = String::from_utf8_lossy(&heard);
    assert!(heard.contains("a newer connection has this lane"), "{heard:?}");
    script.write(&mut later, LATER, u32::MAX);
    assert!(script.is_done(&mut later), "the lane works on");
    assert_eq!(node.filled_with(), LATER);
}

/// A scripted responder on one connection: it serves READs with bytes all alike.
struct Server {
    stream: TcpStream,
    machine: Responder,
}

impl Server {
    fn accept(listener: &TcpListener, segment: &Segment, patience: Duration) -> Option<Self> {
        listener.set_nonblocking(true).expect("a socket");
        let deadline = Instant::now() + patience;
        let stream = loop {
            match listener.accept() {
                Ok((stream, _)) => break stream,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            if Instant::now() >= deadline {
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        stream.set_nonblocking(false).expect("a socket");
        let settings = responder::Settings {
            limits: Limits::default(),
            credits: 4,
            incarnation: Id(segment.incarnation.0),
            key: None,
            wants_checksums: false,
        };
        Some(Self { stream, machine: Responder::new(settings, Nonce(rand::random())) })
    }

    /// Opens the lane and sends all bytes of its first request, whose number it returns.
    fn send_bytes(&mut self, byte: u8) -> u64 {
        let deadline = Instant::now() + PATIENCE;
        let mut served = None;
        while served.is_none() {
            let bytes = read(&mut self.stream, deadline).expect("an initiator asks");
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                assert_eq!(self.machine.incoming(), Incoming::Framing);
                let taken = self.machine.received(rest);
                rest = &rest[taken..];
                match self.machine.event() {
                    Some(responder::Event::Asked(_)) => {
                        self.machine.accept().expect("it was asked");
                    }
                    Some(responder::Event::Request { request, body }) => {
                        served = Some((request, body.length));
                    }
                    _ => assert!(taken > 0, "{:?}", self.machine.closed()),
                }
            }
            self.send(byte);
        }
        let (request, length) = served.expect("just now");
        self.machine.offer(request, length as u32, 0).expect("it is open");
        self.send(byte);
        request
    }

    fn finish(&mut self, request: u64) {
        self.machine.finish(request, Status::DONE).expect("all of it was offered");
        self.send(0);
    }

    fn send(&mut self, byte: u8) {
        loop {
            let outgoing = self.machine.outgoing();
            let payload = outgoing.payload.map_or(0, |it| it.length - it.sent);
            if outgoing.framing.is_empty() && payload == 0 {
                return;
            }
            let mut bytes = outgoing.framing.to_vec();
            bytes.extend(vec![byte; payload as usize]);
            self.stream.write_all(&bytes).expect("it reads");
            self.machine.sent(bytes.len());
        }
    }
}

#[test]
fn a_lane_connects_again_only_when_its_own_copies_have_ended() {
    let (device, control) = gpu();
    let here = Node::start(&device);
    // Its descriptor alone is needed: the script listens in its place.
    let there = Node::start(&kvferry_device::host().expect("host memory"));
    let segment = there.engine.segment();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    let target = here.engine.open_tcp("peer", segment.clone(), &address).expect("opens");

    let before = control.calls("copy");
    let range = Range { local: here.buffer.addr(), remote: there.buffer.addr(), len: LEN };
    let batch = here.engine.submit(&target, Op::Read, &[range]).expect("submits");
    let mut earlier = Server::accept(&listener, &segment, PATIENCE).expect("it connects");
    control.hold();
    // Without a status it has to ask again.
    earlier.send_bytes(EARLIER);
    eventually("the payload is on its way to the GPU", || control.calls("copy") > before);
    drop(earlier);
    assert!(Server::accept(&listener, &segment, SILENCE).is_none(), "its copy still runs");
    control.release();
    let mut later = Server::accept(&listener, &segment, PATIENCE).expect("it connects again");
    let request = later.send_bytes(LATER);
    later.finish(request);
    let status = here.engine.wait(batch, PATIENCE).expect("known");
    assert_eq!(status.state, State::Completed);
    assert_eq!(here.filled_with(), LATER);
}
