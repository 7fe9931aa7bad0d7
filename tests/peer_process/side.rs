//! One side of a transfer: device, engine, node and memory. Obeys orders, in this process or for
//! another one.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvferry::device::{Device, Export, Memory};
use kvferry::node::{Node, NodeOptions, Peer};
use kvferry::{Buffer, Config, Engine, Error, Op, Range, State, Target};
use kvferry_device::conformance::ApplicationStream;
use kvferry_device::sim::{Live, SimControl, SimOptions, sim};
use kvferry_device::testing::{ChunkKind, ChunkedMemory};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

use super::image::{Image, Layout, pattern};

/// A step that takes longer has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// What the suite runs on.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) enum Kind {
    Host,
    Sim,
    Cuda,
    Rocm,
    /// Host memory, with a simulated GPU beside.
    HostBesideSim,
    /// Host memory, with a GPU beside.
    HostBesideCuda,
    HostBesideRocm,
}

/// A device, and what makes it misbehave if it is simulated.
pub(crate) struct Opened {
    device: Arc<dyn Device>,
    /// Another device of the same engine, which no case allocates on.
    beside: Option<Arc<dyn Device>>,
    control: Option<Arc<SimControl>>,
}

impl Kind {
    pub(crate) fn open(self, config: &Config) -> kvferry::device::Result<Opened> {
        match self {
            Self::Host => {
                Ok(Opened { device: kvferry_device::host()?, beside: None, control: None })
            }
            Self::Sim => sim(&SimOptions::default()).map(|(device, control)| Opened {
                device,
                beside: None,
                control: Some(control),
            }),
            Self::Cuda => Opened::named(kvferry::DeviceName::Cuda(0), config),
            Self::Rocm => Opened::named(kvferry::DeviceName::Rocm(0), config),
            Self::HostBesideSim => Self::Sim.open(config)?.behind_host_memory(),
            Self::HostBesideCuda => Self::Cuda.open(config)?.behind_host_memory(),
            Self::HostBesideRocm => Self::Rocm.open(config)?.behind_host_memory(),
        }
    }

    /// A GPU of a vendor's driver, which may have what only the driver knows of.
    pub(crate) fn has_driver(self) -> bool {
        matches!(self, Self::Cuda | Self::Rocm)
    }

    /// Host memory with a GPU of this kind beside.
    pub(crate) fn behind_host_memory(self) -> Self {
        match self {
            Self::Sim => Self::HostBesideSim,
            Self::Cuda => Self::HostBesideCuda,
            Self::Rocm => Self::HostBesideRocm,
            _ => unreachable!("no GPU: {self:?}"),
        }
    }
}

impl Opened {
    fn named(name: kvferry::DeviceName, config: &Config) -> kvferry::device::Result<Self> {
        let device = kvferry::open_device(name, config)?;
        Ok(Self { device, beside: None, control: None })
    }

    fn behind_host_memory(self) -> kvferry::device::Result<Self> {
        Ok(Self { device: kvferry_device::host()?, beside: Some(self.device), ..self })
    }
}

/// Defaults, whatever the environment says; one folder for the kernels of all processes.
pub(crate) fn config() -> Config {
    config_with(&[])
}

fn config_with(knobs: &[(&str, &str)]) -> Config {
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels");
    let given =
        |name: &str| knobs.iter().find(|(knob, _)| *knob == name).map(|(_, value)| value.into());
    let always =
        |name: &str| crate::KNOBS.iter().find(|(knob, _)| *knob == name).map(|(_, it)| it.into());
    let knob = |name: &str| match name {
        "MC_KVFERRY_CACHE_DIR" => Some(cache.clone().into()),
        name => given(name).or_else(|| always(name)),
    };
    Config::from_lookup(knob).expect("the folder is absolute, the cases know the rest")
}

/// What a side is asked to do. Buffers are named by their address.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) enum Order {
    /// A registered buffer.
    Allocate { len: u64 },
    /// Memory of which only these parts, offset and length, are registered.
    AllocateViews { len: u64, views: Vec<(u64, u64)> },
    /// Registered memory of a virtual memory API, that many chunks, all shareable but these.
    AllocateChunks { chunks: usize, private: Option<usize>, hole: Option<usize> },
    /// Registered host memory of the process's own heap.
    AllocatePrivate { len: u64 },
    /// Registered memory of a stream-ordered pool.
    AllocateFromPool { len: u64, shareable: bool },
    /// From now on no more than that many further descriptors; `None`: as many as at the start.
    LimitDescriptors { spare: Option<u64> },
    /// Unregister the view at `addr`, and keep its memory.
    Withdraw { addr: u64 },
    /// Unregister and free what one of the above made.
    Free { addr: u64 },
    /// Fill a whole buffer with a seeded pattern.
    Fill { addr: u64, seed: u64 },
    /// Compare a whole buffer.
    Verify { addr: u64, image: Image },
    /// Open the other side's node.
    Open { name: String },
    /// Let go of it.
    Close,
    /// Refresh the other side, and move all of these at the same time.
    Move(Vec<Move>),
    /// The handle of the allocation at `addr`.
    Export { addr: u64 },
    /// What is held now.
    Usage,
    /// End at once, as a crash (`None`) or by `exit`.
    End { code: Option<i32> },
}

/// A transfer with the other side's buffer.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Move {
    /// Or read.
    pub(crate) write: bool,
    pub(crate) local: u64,
    pub(crate) remote: u64,
    pub(crate) layout: Layout,
    /// The pieces are split between that many threads, one batch each.
    pub(crate) threads: usize,
    /// How often each thread moves its pieces.
    pub(crate) times: usize,
}

impl Move {
    pub(crate) fn op(&self) -> Op {
        if self.write { Op::Write } else { Op::Read }
    }

    pub(crate) fn ranges(&self) -> Vec<Range> {
        let Self { local, remote, .. } = *self;
        let range = |source: u64, destination: u64, len: u64| match self.write {
            true => Range { local: local + source, remote: remote + destination, len },
            false => Range { local: local + destination, remote: remote + source, len },
        };
        let pieces = self.layout.pieces().into_iter();
        pieces.map(|piece| range(piece.source, piece.destination, piece.len)).collect()
    }
}

#[derive(Debug, Deserialize, Serialize)]
pub(crate) enum Answer {
    Ready {
        name: String,
    },
    Done,
    Address(u64),
    Handle(Vec<u8>),
    Usage(Usage),
    /// The memory is not as it must be.
    Wrong(String),
    Failed(String),
}

/// What a process holds.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Usage {
    pub(crate) descriptors: usize,
    /// Mappings of other processes' memory; on a real GPU, where nobody can count them, none.
    pub(crate) mappings: usize,
}

impl Usage {
    /// Whether nothing piled up since `before`.
    pub(crate) fn within(&self, before: &Self) -> bool {
        self.descriptors <= before.descriptors && self.mappings <= before.mappings
    }
}

/// Whoever obeys orders, and what the cases say to both sides.
pub(crate) trait Obey {
    fn ask(&mut self, order: Order) -> Answer;

    fn done(&mut self, order: Order) {
        let asked = format!("{order:.200?}");
        match self.ask(order) {
            Answer::Done => {}
            other => panic!("{asked}: {other:?}"),
        }
    }

    fn address(&mut self, order: Order) -> u64 {
        match self.ask(order) {
            Answer::Address(addr) => addr,
            other => panic!("no memory: {other:?}"),
        }
    }

    /// A registered buffer full of a pattern.
    fn filled(&mut self, len: u64, seed: u64) -> u64 {
        let addr = self.address(Order::Allocate { len });
        self.done(Order::Fill { addr, seed });
        addr
    }

    fn verify(&mut self, addr: u64, image: Image) {
        self.done(Order::Verify { addr, image });
    }

    fn usage(&mut self) -> Usage {
        match self.ask(Order::Usage) {
            Answer::Usage(usage) => usage,
            other => panic!("no usage: {other:?}"),
        }
    }
}

#[derive(Debug)]
enum Held {
    Buffer(Buffer),
    Views {
        memory: Memory,
        views: Vec<u64>,
    },
    /// One region that is all of memory which no device of ours allocated.
    Foreign {
        _memory: Box<dyn std::fmt::Debug + Send + Sync>,
        region: (u64, u64),
    },
}

impl Held {
    fn len(&self) -> u64 {
        match self {
            Self::Buffer(buffer) => buffer.len(),
            Self::Views { memory, .. } => memory.len(),
            Self::Foreign { region: (_, len), .. } => *len,
        }
    }
}

/// One side. The fields are dropped in this order: no memory outlives what registered it.
pub(crate) struct Side {
    held: HashMap<u64, Held>,
    peer: Option<Peer>,
    pub(crate) node: Arc<Node>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) control: Option<Arc<SimControl>>,
    kind: Kind,
}

impl Side {
    pub(crate) fn start(kind: Kind, listen: Option<SocketAddr>) -> Result<Self, Failure> {
        Self::start_with(kind, listen, &[])
    }

    /// With these knobs, and the defaults of the others.
    pub(crate) fn start_with(
        kind: Kind,
        listen: Option<SocketAddr>,
        knobs: &[(&str, &str)],
    ) -> Result<Self, Failure> {
        more_descriptors();
        let config = config_with(knobs);
        let Opened { device, beside, control } = kind.open(&config)?;
        let devices = [Some(Arc::clone(&device)), beside].into_iter().flatten().collect();
        let engine = Engine::new(config, devices)?;
        let mut options = NodeOptions::default();
        options.listen = listen.unwrap_or(options.listen);
        let node = Node::start(Arc::clone(&engine), &options)?;
        Ok(Self { held: HashMap::new(), peer: None, node, engine, device, control, kind })
    }

    /// Submits, waits for the end, and forgets the batch.
    pub(crate) fn run(&self, target: &Target, op: Op, ranges: &[Range]) -> Result<(), Error> {
        let id = self.engine.submit(target, op, ranges)?;
        let status = self.engine.wait(id, PATIENCE)?;
        assert_ne!(status.state, State::Running, "a batch did not end in {PATIENCE:?}");
        self.engine.release(id)?;
        match status.state {
            State::Failed(error) => Err(error),
            _ => Ok(()),
        }
    }

    /// A stream of an application's on this side's GPU.
    pub(crate) fn application_stream(&self) -> Box<dyn ApplicationStream> {
        match (&self.control, self.kind) {
            (Some(control), _) => Box::new(control.stream()),
            #[cfg(feature = "cuda")]
            (_, Kind::Cuda) => {
                Box::new(kvferry_device::cuda::application_stream(0).expect("a stream"))
            }
            #[cfg(feature = "rocm")]
            (_, Kind::Rocm) => {
                Box::new(kvferry_device::rocm::application_stream(0).expect("a stream"))
            }
            _ => unreachable!("host memory has no streams"),
        }
    }

    /// Reads memory of this side that no transfer uses.
    pub(crate) fn read(&self, addr: u64, bytes: &mut [u8]) {
        // SAFETY: the cases read inside what they hold, after the transfers ended.
        unsafe { self.device.read(addr, bytes) }.expect("reads");
    }

    /// The other side, after `Order::Open`.
    pub(crate) fn peer(&self) -> &Peer {
        self.peer.as_ref().expect("it was opened")
    }

    pub(crate) fn obey(&mut self, order: Order) -> Result<Answer, Failure> {
        match order {
            Order::Allocate { len } => {
                let buffer = self.engine.allocate(&self.device, len)?;
                Ok(self.hold(buffer.addr(), Held::Buffer(buffer)))
            }
            Order::AllocateViews { len, views } => {
                let memory = Arc::clone(&self.device).allocate(len)?;
                let list: Vec<_> =
                    views.iter().map(|&(offset, len)| (memory.addr() + offset, len)).collect();
                // SAFETY: `Free` and `Drop` free the memory only after they unregistered the
                // views, when the other side has stopped.
                unsafe { self.engine.register_all(&list) }?;
                let views = list.into_iter().map(|(addr, _)| addr).collect();
                Ok(self.hold(memory.addr(), Held::Views { memory, views }))
            }
            Order::AllocateChunks { chunks, private, hole } => {
                let kind = |index| match (Some(index) == private, Some(index) == hole) {
                    (true, _) => ChunkKind::Private,
                    (_, true) => ChunkKind::Hole,
                    _ => ChunkKind::Shareable,
                };
                let memory = self.chunks(&(0..chunks).map(kind).collect::<Vec<_>>())?;
                let region = (memory.addr(), memory.len());
                self.register_foreign(region, memory)
            }
            Order::AllocatePrivate { len } => {
                let mut memory = vec![0_u8; len as usize];
                self.register_foreign((memory.as_mut_ptr() as u64, len), Box::new(memory))
            }
            #[cfg(feature = "cuda")]
            Order::AllocateFromPool { len, shareable } => {
                let memory = kvferry_device::cuda::testing::allocate_from_pool(0, len, shareable);
                self.register_foreign((memory.addr(), len), Box::new(memory))
            }
            #[cfg(not(feature = "cuda"))]
            Order::AllocateFromPool { .. } => Err("only a real GPU has pools".into()),
            Order::LimitDescriptors { spare } => {
                limit_descriptors(spare)?;
                Ok(Answer::Done)
            }
            Order::Withdraw { addr } => {
                self.engine.unregister(addr)?;
                for held in self.held.values_mut() {
                    if let Held::Views { views, .. } = held {
                        views.retain(|view| *view != addr);
                    }
                }
                Ok(Answer::Done)
            }
            Order::Free { addr } => {
                let held = self.held.remove(&addr).ok_or("no such memory")?;
                release(&self.engine, held)?;
                Ok(Answer::Done)
            }
            Order::Fill { addr, seed } => {
                let len = self.held.get(&addr).ok_or("no such memory")?.len();
                // SAFETY: the range is all of an allocation in `held`; the cases fill memory that
                // no transfer uses then.
                unsafe { self.device.write(addr, &pattern(seed, len)) }?;
                Ok(Answer::Done)
            }
            Order::Verify { addr, image } => {
                let len = self.held.get(&addr).ok_or("no such memory")?.len();
                let mut found = vec![0; len as usize];
                // SAFETY: as above; the cases verify after the transfers ended.
                unsafe { self.device.read(addr, &mut found) }?;
                Ok(image.mismatch(&found).map_or(Answer::Done, Answer::Wrong))
            }
            Order::Open { name } => {
                self.peer = Some(self.node.open(&name)?);
                Ok(Answer::Done)
            }
            Order::Close => {
                self.peer = None;
                Ok(Answer::Done)
            }
            Order::Move(moves) => self.move_all(&moves).map(|()| Answer::Done),
            Order::Export { addr } => match self.device.export(&self.device.allocation(addr)?)? {
                Export::Handle { bytes, .. } => Ok(Answer::Handle(bytes)),
                _ => Err("this memory has no handle".into()),
            },
            Order::Usage => Ok(Answer::Usage(self.usage_now()?)),
            Order::End { code: Some(code) } => std::process::exit(code),
            Order::End { code: None } => std::process::abort(),
        }
    }

    fn chunks(&self, kinds: &[ChunkKind]) -> Result<Box<dyn ChunkedMemory>, Failure> {
        match (&self.control, self.kind) {
            (Some(control), _) => Ok(Box::new(control.map_chunks(64 << 10, kinds))),
            #[cfg(feature = "cuda")]
            (_, Kind::Cuda) => Ok(Box::new(kvferry_device::cuda::testing::map_chunks(0, kinds))),
            #[cfg(feature = "rocm")]
            (_, Kind::Rocm) => Ok(Box::new(kvferry_device::rocm::testing::map_chunks(0, kinds))),
            _ => Err("host memory has no chunks".into()),
        }
    }

    fn register_foreign(
        &mut self,
        region: (u64, u64),
        memory: Box<dyn std::fmt::Debug + Send + Sync>,
    ) -> Result<Answer, Failure> {
        // SAFETY: as for views.
        unsafe { self.engine.register(region.0, region.1) }?;
        Ok(self.hold(region.0, Held::Foreign { _memory: memory, region }))
    }

    fn hold(&mut self, addr: u64, held: Held) -> Answer {
        self.held.insert(addr, held);
        Answer::Address(addr)
    }

    fn move_all(&self, moves: &[Move]) -> Result<(), Failure> {
        let peer = self.peer.as_ref().ok_or("no peer was opened")?;
        peer.refresh()?;
        let all: Vec<(&Move, Vec<Range>)> = moves.iter().map(|one| (one, one.ranges())).collect();
        std::thread::scope(|scope| {
            let threads: Vec<_> = all
                .iter()
                .flat_map(|(one, ranges)| {
                    let share = ranges.len().div_ceil(one.threads).max(1);
                    ranges.chunks(share).map(move |part| (one, part))
                })
                .map(|(one, part)| {
                    scope.spawn(move || {
                        (0..one.times).try_for_each(|_| self.run(peer.target(), one.op(), part))
                    })
                })
                .collect();
            // All of them, so that none is left running when the first one failed.
            let ended: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
            ended.into_iter().try_for_each(|ended| {
                ended.map_err(|_| "a thread panicked")?.map_err(Failure::from)
            })
        })
    }

    fn usage_now(&self) -> std::io::Result<Usage> {
        let mappings = match (&self.control, self.kind) {
            (Some(control), _) => control.live(Live::Mappings) as usize,
            (None, Kind::Host) => {
                // Its own memory counts, too, and stays the same.
                let maps = std::fs::read_to_string("/proc/self/maps")?;
                maps.lines().filter(|line| line.contains("memfd:kvferry")).count()
            }
            (None, _) => 0,
        };
        Ok(Usage { descriptors: std::fs::read_dir("/proc/self/fd")?.count(), mappings })
    }
}

impl Obey for Side {
    fn ask(&mut self, order: Order) -> Answer {
        self.obey(order).unwrap_or_else(|error| Answer::Failed(error.to_string()))
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        for (_, held) in self.held.drain() {
            if let Err(error) = release(&self.engine, held) {
                eprintln!("memory was in use when a side ended: {error}");
            }
        }
    }
}

/// As many as this process may have, within reason: many sides run together on a machine of many
/// cores.
fn more_descriptors() {
    static MORE: std::sync::Once = std::sync::Once::new();
    MORE.call_once(|| {
        let limit = getrlimit(Resource::Nofile);
        let current = limit.maximum.map_or(1 << 16, |most| most.min(1 << 16));
        if limit.current.is_some_and(|now| now < current) {
            let more = Rlimit { current: Some(current), ..limit };
            setrlimit(Resource::Nofile, more).expect("up to the hard limit");
        }
    });
}

fn limit_descriptors(spare: Option<u64>) -> std::io::Result<()> {
    static START: std::sync::OnceLock<Rlimit> = std::sync::OnceLock::new();
    let start = *START.get_or_init(|| getrlimit(Resource::Nofile));
    let next = std::fs::File::open("/dev/null")?.as_raw_fd() as u64;
    let current = spare.map(|spare| next + spare).or(start.current);
    setrlimit(Resource::Nofile, Rlimit { current, ..start }).map_err(Into::into)
}

fn release(engine: &Engine, held: Held) -> Result<(), Error> {
    if let Held::Foreign { _memory, region } = held {
        return engine.unregister(region.0).inspect_err(|_| std::mem::forget(_memory));
    }
    if let Held::Views { memory, views } = held {
        for view in views {
            if let Err(error) = engine.unregister(view) {
                std::mem::forget(memory);
                return Err(error);
            }
        }
    }
    Ok(())
}
