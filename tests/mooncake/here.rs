//! This side of a transfer, and what both sides have to hold.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_engine::{Buffer, Config, Engine};
use kvferry_node::{Node, NodeOptions};
use rand::Rng;
use rand::rngs::SmallRng;

use crate::stock::{Piece, Stock};

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A node on host memory with one registered buffer.
pub(crate) struct Here {
    pub(crate) buffer: Buffer,
    pub(crate) node: Arc<Node>,
    pub(crate) engine: Arc<Engine>,
}

impl Here {
    pub(crate) fn new(bytes: u64) -> Self {
        Self::with(bytes, Config::default(), &NodeOptions::default())
    }

    pub(crate) fn with(bytes: u64, config: Config, options: &NodeOptions) -> Self {
        let host = kvferry_device::host().expect("host memory");
        let engine = Engine::new(config, vec![host]).expect("an engine");
        let buffer = engine.allocate(&engine.devices()[0], bytes).expect("memory");
        let deadline = Instant::now() + PATIENCE;
        let node = loop {
            match Node::start(Arc::clone(&engine), options) {
                Ok(node) => break node,
                // Another test's process, just started, may hold a copy of a port that was closed.
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        Self { buffer, node, engine }
    }

    /// One that has little patience with peers that move nothing.
    pub(crate) fn impatient(bytes: u64) -> Self {
        let mut config = Config::default();
        config.tcp_status_timeout = Duration::from_millis(500);
        Self::with(bytes, config, &NodeOptions::default())
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.buffer.len() as usize];
        self.buffer.read(0, &mut bytes).expect("inside");
        bytes
    }
}

/// Fills both buffers with random bytes; what they hold.
pub(crate) fn fill(here: &Here, stock: &mut Stock, random: &mut SmallRng) -> (Vec<u8>, Vec<u8>) {
    let mut ours = vec![0; here.buffer.len() as usize];
    let mut theirs = vec![0; stock.len() as usize];
    random.fill(&mut ours[..]);
    random.fill(&mut theirs[..]);
    here.buffer.write(0, &ours).expect("inside");
    stock.put(0, &theirs);
    (ours, theirs)
}

/// Pieces of these lengths at random places of both buffers that do not overlap; `remote` is where
/// the other side's buffer begins.
pub(crate) fn scatter(lens: &[u64], bytes: u64, remote: u64, random: &mut SmallRng) -> Vec<Piece> {
    let places = |random: &mut SmallRng| {
        let mut order: Vec<usize> = (0..lens.len()).collect();
        rand::seq::SliceRandom::shuffle(&mut order[..], random);
        let mut spare = bytes - lens.iter().sum::<u64>();
        let (mut at, mut starts) = (0, vec![0; lens.len()]);
        for (done, index) in order.into_iter().enumerate() {
            let gap = random.random_range(0..=spare / (lens.len() - done) as u64);
            spare -= gap;
            starts[index] = at + gap;
            at += gap + lens[index];
        }
        starts
    };
    let (here, there) = (places(random), places(random));
    let piece = |((&len, local), at)| Piece { local, remote: remote + at, len };
    lens.iter().zip(here).zip(there).map(piece).collect()
}

/// Copies pieces from one image to the other, as a transfer does.
pub(crate) fn copy(
    source: &[u8],
    destination: &mut [u8],
    pieces: impl Iterator<Item = (u64, u64, u64)>,
) {
    for (from, to, len) in pieces {
        let (from, to, len) = (from as usize, to as usize, len as usize);
        destination[to..to + len].copy_from_slice(&source[from..from + len]);
    }
}

/// Compares without printing megabytes.
pub(crate) fn same(found: &[u8], expected: &[u8], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let wrong = found.iter().zip(expected).position(|(found, expected)| found != expected);
    assert_eq!(wrong, None, "first wrong byte of {what}");
}

pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A generator whose seed the test prints, and which `KVFERRY_TEST_SEED` sets.
pub(crate) fn random() -> SmallRng {
    let given = std::env::var("KVFERRY_TEST_SEED").ok();
    let seed = given.map_or_else(rand::random, |seed| seed.parse().expect("a number"));
    println!("KVFERRY_TEST_SEED={seed}");
    rand::SeedableRng::seed_from_u64(seed)
}
