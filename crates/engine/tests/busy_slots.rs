//! A peer that takes nothing any more holds the slots that stage GPU memory for TCP. What goes to other
//! peers goes a slower way then: never in silence, and not at all if the operator says so.

mod common;

use std::io::Write;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use kvferry_device::sim::{SimOptions, sim};
use kvferry_engine::{BatchId, Buffer, Engine, Error, Listener, Op, Path, Range, State, Target};

use common::config;
use common::relay::Relay;

const PATIENCE: Duration = Duration::from_secs(60);

/// Bytes to a peer that takes nothing: more than the system takes for it.
const STUCK: u64 = 64 << 20;
const LEN: u64 = 3 << 20;

/// One lane and two slots that send, both of which one peer may have.
const KNOBS: &[(&str, &str)] = &[
    ("MC_KVFERRY_TCP_THREADS", "2"),
    ("MC_TCP_LANES_PER_PEER", "1"),
    ("MC_TCP_SLICE_SIZE", "1M"),
    ("MC_TCP_GPU_STAGING_SLOT_MB", "1"),
    ("MC_TCP_GPU_STAGING_SLOTS", "4"),
    ("MC_TCP_STATUS_TIMEOUT_SEC", "60"),
];

/// An engine of host memory.
struct Served {
    memory: Buffer,
    listener: Listener,
    engine: Arc<Engine>,
}

impl Served {
    fn start() -> Self {
        let host = kvferry_device::host().expect("always there");
        let engine = Engine::new(config(KNOBS), vec![Arc::clone(&host)]).expect("an engine");
        let memory = engine.allocate(&host, STUCK).expect("memory");
        let listener = engine.listen("127.0.0.1:0".parse().expect("good")).expect("listens");
        Self { memory, listener, engine }
    }

    fn address(&self) -> String {
        self.listener.address().to_string()
    }
}

/// An engine with a GPU, a peer that takes nothing and has all slots, and others that do.
struct Bench {
    stuck: BatchId,
    relay: Relay,
    memory: Buffer,
    engine: Arc<Engine>,
    _frozen: Served,
}

impl Bench {
    fn new(knobs: &[(&str, &str)]) -> Self {
        let frozen = Served::start();
        let (gpu, control) = sim(&SimOptions::default()).expect("always there");
        let config = config(&[KNOBS, knobs].concat());
        let engine = Engine::new(config, vec![Arc::clone(&gpu)]).expect("an engine");
        let memory = engine.allocate(&gpu, STUCK).expect("memory");
        let relay = Relay::start(frozen.listener.address(), 0);
        let segment = frozen.engine.segment();
        let target = engine.open_tcp("frozen", segment, &relay.address).expect("opens");
        let range = |len| [Range { local: memory.addr(), remote: frozen.memory.addr(), len }];
        let id = engine.submit(&target, Op::Write, &range(LEN)).expect("submits");
        assert_eq!(engine.wait(id, PATIENCE).expect("known").state, State::Completed);
        relay.stop_after(0);
        let stuck = engine.submit(&target, Op::Write, &range(STUCK)).expect("submits");
        // Until its socket takes no more, and so no more is gathered: both slots are full.
        let gathered = || {
            ["launch", "launch_inline", "launch_compact", "copy"].map(|call| control.calls(call))
        };
        let (mut before, mut since) = (gathered(), Instant::now());
        while since.elapsed() < Duration::from_millis(300) {
            let now = gathered();
            if now != before {
                (before, since) = (now, Instant::now());
            }
            std::thread::park_timeout(Duration::from_millis(5));
        }
        Self { stuck, relay, memory, engine, _frozen: frozen }
    }

    fn open(&self, peer: &Served, name: &str) -> Target {
        let (segment, address) = (peer.engine.segment(), peer.address());
        self.engine.open_tcp(name, segment, &address).expect("opens")
    }

    /// Writes to a peer that works.
    fn write(&self, peer: &Served, target: &Target) -> (State, Path) {
        let remote = peer.memory.addr();
        let range = [Range { local: self.memory.addr(), remote, len: LEN }];
        let id = self.engine.submit(target, Op::Write, &range).expect("submits");
        let status = self.engine.wait(id, PATIENCE).expect("known");
        (status.state, status.path)
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let running = self.engine.poll(self.stuck).map(|status| status.state);
        // Its lane connects again, and the peer takes what is sent.
        self.relay.stop_after(u64::MAX);
        self.relay.cut();
        if !std::thread::panicking() {
            assert_eq!(running, Ok(State::Running), "the peer takes nothing");
            let status = self.engine.wait(self.stuck, PATIENCE).expect("known");
            assert_eq!(status.state, State::Completed);
        }
    }
}

/// What is logged of warnings and worse in this process.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

static LOG: LazyLock<Log> = LazyLock::new(|| {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    // Of all threads: lanes have their own.
    tracing::subscriber::set_global_default(subscriber).expect("the only one");
    log
});

/// Lines of the log that name the peer.
fn logged(peer: &str) -> Vec<String> {
    let bytes = LOG.0.lock().expect("no panic").clone();
    let text = String::from_utf8(bytes).expect("text");
    text.lines().filter(|line| line.contains(peer)).map(String::from).collect()
}

#[test]
fn while_one_peer_has_all_slots_others_are_reached_the_slower_way_which_each_batch_says() {
    LazyLock::force(&LOG);
    let bench = Bench::new(&[]);
    bench.memory.write(0, &[7; LEN as usize]).expect("inside");
    for (name, fallbacks) in [("decode-one", 2), ("decode-two", 4)] {
        let peer = Served::start();
        let target = bench.open(&peer, name);
        for _ in 0..2 {
            peer.memory.write(0, &[0; LEN as usize]).expect("inside");
            assert_eq!(bench.write(&peer, &target), (State::Completed, Path::Mixed));
            let mut found = vec![0; LEN as usize];
            peer.memory.read(0, &mut found).expect("inside");
            assert!(found.iter().all(|&byte| byte == 7));
        }
        assert_eq!(bench.engine.statistics().fallbacks, fallbacks);
        let lines = logged(name);
        assert_eq!(lines.len(), 1, "{lines:#?}");
        for word in ["WARN", "sim:0", "all slots are busy"] {
            assert!(lines[0].contains(word), "{word} in {}", lines[0]);
        }
    }
}

#[test]
fn strict_refuses_the_slower_way_in_the_middle_of_a_transfer() {
    LazyLock::force(&LOG);
    let bench = Bench::new(&[("MC_KVFERRY_STRICT", "1")]);
    let peer = Served::start();
    let target = bench.open(&peer, "decode-strict");
    let (state, _) = bench.write(&peer, &target);
    // It is this side's: nothing is said against the peer.
    let State::Failed(error @ Error::NotStaged { peer, .. }) = &state else { panic!("{state:?}") };
    assert_eq!(peer, "decode-strict");
    let text = error.to_string();
    for word in ["sim:0", "decode-strict", "all slots are busy", "MC_KVFERRY_STRICT"] {
        assert!(text.contains(word), "{word} in {text}");
    }
    // The failure of a batch is told, and no slower way.
    let lines = logged("decode-strict");
    assert!(lines.iter().all(|line| line.contains("batch failed")), "{lines:#?}");
}
