//! What the tests of this folder share.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvferry_engine::{Buffer, Config, Engine, Op, Range, State, Target};
use kvferry_node::{Node, NodeOptions};
use kvferry_wire::handshake::{Decoder, Kind, Message, encode};
use kvferry_wire::segment::{self, Descriptor, Extension};

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// An engine on host memory, a node on a free port, and a registered buffer.
pub(crate) struct Side {
    pub(crate) buffer: Buffer,
    pub(crate) engine: Arc<Engine>,
    pub(crate) node: Arc<Node>,
}

impl Side {
    pub(crate) fn new(bytes: u64) -> Self {
        Self::with(bytes, &NodeOptions::default())
    }

    pub(crate) fn with(bytes: u64, options: &NodeOptions) -> Self {
        Self::configured(bytes, Config::default(), options)
    }

    pub(crate) fn configured(bytes: u64, config: Config, options: &NodeOptions) -> Self {
        let engine = Engine::new(config, vec![kvferry_device::host().unwrap()]).unwrap();
        let buffer = engine.allocate(&engine.devices()[0], bytes).unwrap();
        let node = Node::start(Arc::clone(&engine), options).unwrap();
        Self { buffer, engine, node }
    }

    /// Under the name of a node that ended. Another process, started meanwhile, may hold a copy of its
    /// port's descriptor for a moment.
    pub(crate) fn restarted(bytes: u64, name: &str) -> Self {
        let listen = name.parse().unwrap();
        let options = NodeOptions { listen, ..NodeOptions::default() };
        let engine = Engine::new(Config::default(), vec![kvferry_device::host().unwrap()]).unwrap();
        let buffer = engine.allocate(&engine.devices()[0], bytes).unwrap();
        let mut node = None;
        eventually("the port is free", || {
            node = Node::start(Arc::clone(&engine), &options).ok();
            node.is_some()
        });
        Self { buffer, engine, node: node.unwrap() }
    }

    /// The node's port, spoken to as a stranger would.
    pub(crate) fn stranger(&self) -> TcpStream {
        let stream = TcpStream::connect(self.node.name().parse::<SocketAddr>().unwrap()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// The node's data port, likewise.
    pub(crate) fn data_stranger(&self) -> TcpStream {
        let port = self.node.data_port().expect("it is not refused");
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    pub(crate) fn descriptor(&self) -> Descriptor {
        segment::parse(&ask(self.stranger(), Kind::Metadata, b"{}")).unwrap()
    }

    pub(crate) fn extension(&self) -> Extension {
        self.descriptor().kvferry.expect("a kvferry object")
    }

    /// Transfers one range with a buffer of the target, and waits.
    pub(crate) fn transfer(
        &self,
        target: &Target,
        op: Op,
        remote: u64,
        len: u64,
    ) -> Result<State, kvferry_engine::Error> {
        let id =
            self.engine.submit(target, op, &[Range { local: self.buffer.addr(), remote, len }])?;
        let state = self.engine.wait(id, PATIENCE)?.state;
        self.engine.release(id)?;
        Ok(state)
    }
}

/// One request of a stock peer; the reply's body.
pub(crate) fn ask(mut stream: TcpStream, kind: Kind, body: &[u8]) -> Vec<u8> {
    stream.write_all(&encode(kind, body)).unwrap();
    let reply = reply(&mut stream).expect("a reply");
    assert_eq!(reply.kind, kind);
    reply.body
}

/// What comes until the node closes its side.
pub(crate) fn reply(stream: &mut TcpStream) -> Option<Message> {
    let mut bytes = Vec::new();
    // A reset ends it as well.
    let _ = stream.read_to_end(&mut bytes);
    let mut decoder = Decoder::default();
    decoder.push(&bytes);
    decoder.poll().unwrap()
}

/// A Unix socket of a node, spoken to as a stranger would.
pub(crate) fn exports_of(extension: &Extension) -> UnixStream {
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&extension.socket).unwrap();
    let stream = UnixStream::connect_addr(&address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Strangers' first words. Each ends the connection that it came on.
pub(crate) fn garbage() -> Vec<(&'static str, Vec<u8>)> {
    let noise = |seed: u64| {
        (0..1024u64)
            .map(move |index| ((seed + index).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
    };
    vec![
        ("random bytes", noise(1).chain([0xff; 8]).collect()),
        ("other random bytes", noise(77).collect()),
        ("an HTTP request", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec()),
        ("a TLS hello", vec![0x16, 3, 1, 5, 0xc2, 1, 0, 5, 0xbe, 3, 3]),
        ("half a header", vec![4, 0, 0]),
        ("half a message", encode(Kind::Metadata, b"{}")[..10].to_vec()),
        ("a length of 2^63", (1u64 << 63).to_le_bytes().to_vec()),
        ("a length of 2^64-1", [0xff; 8].to_vec()),
        ("a length of zero", vec![0; 8]),
        ("a length just over the limit", ((1u64 << 20) + 1).to_le_bytes().to_vec()),
    ]
}

/// Says `bytes`, ends its own side, and waits for the other to end as well.
pub(crate) fn say(mut stream: impl Read + Write, bytes: &[u8], end: impl FnOnce()) {
    // Either may fail: the node may have hung up at an earlier byte.
    let _ = stream.write_all(bytes);
    end();
    let _ = stream.read_to_end(&mut Vec::new());
}

pub(crate) fn say_tcp(stream: &TcpStream, bytes: &[u8]) {
    say(stream, bytes, || drop(stream.shutdown(Shutdown::Write)));
}

pub(crate) fn say_unix(stream: &UnixStream, bytes: &[u8]) {
    say(stream, bytes, || drop(stream.shutdown(Shutdown::Write)));
}

pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A server that answers one request with this descriptor; its name.
pub(crate) fn impostor(descriptor: &Descriptor) -> String {
    impostors(std::slice::from_ref(descriptor)).name
}

/// A server that answers one request with each of these, and no other.
pub(crate) fn impostors(descriptors: &[Descriptor]) -> Answering {
    let answer = |it| encode(Kind::Metadata, &segment::encode(it).unwrap());
    answering_each(descriptors.iter().map(answer).collect())
}

/// A server that answers one request with these bytes; its name.
pub(crate) fn answering(bytes: Vec<u8>) -> String {
    answering_each(vec![bytes]).name
}

pub(crate) struct Answering {
    pub(crate) name: String,
    asked: Arc<AtomicUsize>,
    thread: JoinHandle<()>,
}

impl Answering {
    /// Whether it answers no more, and its port is free.
    pub(crate) fn ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// How many requests it had.
    pub(crate) fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

fn answering_each(answers: Vec<Vec<u8>>) -> Answering {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let name = listener.local_addr().unwrap().to_string();
    let asked = Arc::<AtomicUsize>::default();
    let count = Arc::clone(&asked);
    let thread = std::thread::spawn(move || {
        for answer in answers {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut request = vec![0; encode(Kind::Metadata, b"{}\n").len()];
            stream.read_exact(&mut request).unwrap();
            count.fetch_add(1, Ordering::SeqCst);
            stream.write_all(&answer).unwrap();
        }
    });
    Answering { name, asked, thread }
}

/// The warnings that are logged while `what` runs, on this thread.
pub(crate) fn warnings<R>(what: impl FnOnce() -> R) -> (R, Vec<String>) {
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);
    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let result = tracing::subscriber::with_default(subscriber, what);
    let bytes = lines.0.lock().unwrap().clone();
    (result, String::from_utf8(bytes).unwrap().lines().map(String::from).collect())
}
