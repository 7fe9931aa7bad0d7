//! The engine: what it holds, the peers it opens, and what it counts.

mod in_flight;
mod memory;
mod submit;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kvferry_device::nvtx::Nvtx;
use kvferry_device::{Device, MadeBy};

use crate::batch::{Batches, Path};
use crate::config::{Config, NvtxLibrary};
use crate::ended::{Ended, Facts, Flow, Transport};
use crate::error::{Error, Result};
use crate::mapping::MappingCache;
use crate::meters::Meters;
use crate::pinned::PinnedAccount;
use crate::plan::Op;
use crate::profile::Tuning;
use crate::registry::{Region, Registry};
use crate::segment::{Exports, Identity, NoExports, Segment};
use crate::statistics::{Counters, Statistics};
use crate::target::{Reach, Target};
use crate::transport::peer::Peer;
use crate::transport::tcp::{Listener, Tcp};
use crate::wait::{Notifier, Wait};

/// Moves bytes between registered memory here and at a peer.
///
/// Safe to use from any thread. Submission never waits for the copies; a batch is polled, waited
/// for, or awaited through [`Engine::event_fd`], and ends exactly once.
///
/// Dropping it ends what it serves, and waits for its batches and, at most
/// `MC_KVFERRY_UNREGISTER_TIMEOUT_SEC`, for whoever else uses its memory: copies for peers, engines of
/// this process, whose batches end when they are polled, and [`crate::Lease`]s.
#[derive(Debug)]
pub struct Engine {
    /// A fork of the process that made the engine must leave it alone.
    made_by: MadeBy,
    config: Config,
    incarnation: Identity,
    devices: Vec<Arc<dyn Device>>,
    registry: Arc<Registry>,
    mappings: Arc<MappingCache>,
    peer: Peer,
    /// Made when it is first needed.
    tcp: Mutex<Option<Arc<Tcp>>>,
    batches: Batches,
    meters: Meters,
    nvtx: Option<Arc<Nvtx>>,
    counters: Counters,
    notifier: OnceLock<Arc<Notifier>>,
}

impl Engine {
    /// Opens a queue on each device, with its profile if it has one.
    ///
    /// # Errors
    /// [`Error::Device`] if a device refuses its queue.
    pub fn new(config: Config, devices: Vec<Arc<dyn Device>>) -> Result<Arc<Self>> {
        let incarnation = Identity::random();
        Ok(Arc::new(Self {
            made_by: MadeBy::this_process(),
            incarnation,
            peer: Peer::new(&config, &devices)?,
            mappings: Arc::new(MappingCache::new(&config)),
            registry: Registry::of_engine(incarnation, PinnedAccount::new(&config)),
            nvtx: config.nvtx.as_ref().and_then(open_nvtx),
            config,
            devices,
            tcp: Mutex::default(),
            batches: Batches::default(),
            meters: Meters::new(),
            counters: Counters::default(),
            notifier: OnceLock::new(),
        }))
    }

    /// The knobs; what a device's profile changes is in [`Engine::tunings`].
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The devices, in the order given.
    pub fn devices(&self) -> &[Arc<dyn Device>] {
        &self.devices
    }

    /// How copies run on each device, in the order of [`Engine::devices`].
    pub fn tunings(&self) -> impl Iterator<Item = &Tuning> {
        self.peer.tunings()
    }

    /// Which engine this is; a restarted one is another.
    pub fn incarnation(&self) -> Identity {
        self.incarnation
    }

    /// Opens a peer's segment as a target. Mappings are made when a transfer first needs them.
    ///
    /// # Errors
    /// [`Error::BadSegment`] if the segment contradicts itself.
    pub fn open(&self, name: &str, segment: Segment, exports: Arc<dyn Exports>) -> Result<Target> {
        self.check_process()?;
        Target::new(name.to_owned(), segment, exports, Arc::clone(&self.mappings), Reach::Mapped)
    }

    /// As [`Engine::open`], for a peer with a [`Listener`] at `address`, a `host:port`: what of its
    /// memory cannot be mapped is reached by TCP. Lanes connect when a transfer first needs them.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn open_beside_tcp(
        &self,
        name: &str,
        segment: Segment,
        exports: Arc<dyn Exports>,
        address: &str,
    ) -> Result<Target> {
        self.check_process()?;
        let reach = Reach::MappedBesideTcp(address.to_owned());
        Target::new(name.to_owned(), segment, exports, Arc::clone(&self.mappings), reach)
    }

    /// Opens a peer's segment as a target that is reached by TCP, by lanes to the peer's
    /// [`Listener`] at `address`, a `host:port`. They connect when a transfer first needs them.
    ///
    /// # Errors
    /// As [`Engine::open`], [`Error::AuthKey`], and [`Error::System`] for no more threads.
    pub fn open_tcp(&self, name: &str, segment: Segment, address: &str) -> Result<Target> {
        self.open_far(name, segment, address, false)
    }

    /// As [`Engine::open_tcp`], for a peer on this host whose memory should be mapped and cannot be:
    /// its batches say that they went a slower way ([`Fallback::NotMapped`](crate::Fallback)).
    ///
    /// # Errors
    /// As [`Engine::open_tcp`].
    pub fn open_tcp_instead(&self, name: &str, segment: Segment, address: &str) -> Result<Target> {
        self.open_far(name, segment, address, true)
    }

    fn open_far(
        &self,
        name: &str,
        segment: Segment,
        address: &str,
        instead: bool,
    ) -> Result<Target> {
        let session = self.tcp()?.session(name, address, segment.incarnation)?;
        let mappings = Arc::clone(&self.mappings);
        let reach = Reach::Tcp { session, instead };
        Target::new(name.to_owned(), segment, Arc::new(NoExports), mappings, reach)
    }

    /// This engine's own registered memory as a target, whatever is registered when it is used: for
    /// copies between a GPU and host memory here, or from place to place on one device.
    ///
    /// # Errors
    /// None today; as [`Engine::open`].
    pub fn local(&self) -> Result<Target> {
        // What is in this process is found in its own table.
        self.open("this engine", self.empty_segment(), Arc::new(NoExports))
    }

    fn empty_segment(&self) -> Segment {
        Segment {
            incarnation: self.incarnation,
            process: Identity::of_process(),
            pid: self.made_by.process(),
            allocations: Vec::new(),
            regions: Vec::new(),
        }
    }

    /// Serves the registered memory to lanes of other engines, until the listener is dropped.
    ///
    /// # Errors
    /// [`Error::Listen`], and as [`Engine::open_tcp`].
    pub fn listen(&self, address: SocketAddr) -> Result<Listener> {
        self.tcp()?.listen(&self.registry, address)
    }

    /// Tells how long the model's last step on a device took, the device by its position in
    /// [`Engine::devices`]; call it as each step ends. [`crate::Policy::Tail`] needs it: it compares
    /// steps beside transfers with steps beside none. Others ignore it, and so does a fork.
    pub fn record_step(&self, device: usize, time: Duration) {
        if self.check_process().is_ok() {
            self.peer.record_step(device, time);
        }
    }

    /// Bytes of pinned memory that the engine holds for itself. A fork is told of none, here and
    /// below.
    pub fn pinned_bytes(&self) -> u64 {
        if self.check_process().is_err() {
            return 0;
        }
        self.peer.pinned_bytes() + self.of_tcp(Tcp::pinned_bytes)
    }

    /// Of them, those that stage GPU memory for TCP: slots times their size, per device that uses
    /// them.
    pub fn staging_bytes(&self) -> u64 {
        self.of_tcp(Tcp::slot_bytes)
    }

    /// Bytes of device memory that staged offload passes through, made so far
    /// (`MC_KVFERRY_OFFLOAD_BOUNCE_MB`).
    pub fn bounce_bytes(&self) -> u64 {
        match self.check_process() {
            Ok(()) => self.peer.bounce_bytes(),
            Err(_) => 0,
        }
    }

    /// What the engine has done and holds now; in a fork, what it had done.
    pub fn statistics(&self) -> Statistics {
        if self.check_process().is_err() {
            return self.counters.snapshot();
        }
        let (regions, registered_bytes) = self.registry.total();
        let (mappings, mapped_peers) = self.mappings.total();
        Statistics {
            running: self.batches.running_count() as u64,
            regions: regions as u64,
            registered_bytes,
            mappings: mappings as u64,
            mapped_peers: mapped_peers as u64,
            pinned_bytes: self.pinned_bytes(),
            staging_bytes: self.staging_bytes(),
            bounce_bytes: self.bounce_bytes(),
            locked_bytes: self.registry.pinned().used(),
            ..self.counters.snapshot()
        }
    }

    /// Counts a transfer by a transport of a node's, Mooncake's, that used memory of this engine.
    #[doc(hidden)]
    pub fn count_transfer(
        &self,
        op: Op,
        (pieces, bytes): (u64, u64),
        submitted: Instant,
        failure: Option<&Error>,
    ) {
        let flow = Flow::from(op);
        let (transport, fallback) = (Transport::Mooncake, None);
        let facts = Facts { transport, flow, pieces, submitted, fallback };
        let (path, time) = (Path::Tcp, submitted.elapsed());
        self.tell(&Ended { facts, path, bytes, time, failure });
    }

    /// Counts a batch that ended.
    fn tell(&self, ended: &Ended<'_>) {
        self.meters.ended(ended);
        self.counters.ended(ended);
    }

    fn tcp(&self) -> Result<Arc<Tcp>> {
        self.check_process()?;
        let mut tcp = self.tcp.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tcp) = &*tcp {
            return Ok(Arc::clone(tcp));
        }
        let account = self.registry.pinned();
        let made = Tcp::new(&self.config, self.peer.devices(), account, self.incarnation)?;
        let made = Arc::new(made);
        Ok(Arc::clone(tcp.insert(made)))
    }

    /// A number of the TCP transport's, if there is one.
    fn of_tcp(&self, number: impl Fn(&Tcp) -> u64) -> u64 {
        if self.check_process().is_err() {
            return 0;
        }
        let tcp = self.tcp.lock().unwrap_or_else(PoisonError::into_inner);
        tcp.as_ref().map_or(0, |tcp| number(tcp))
    }

    /// Refuses a fork of the process that made the engine, as every call does that may say so: a fork
    /// has copies of locks that may be held for ever, so none is taken there.
    ///
    /// # Errors
    /// [`Error::OtherProcess`].
    pub fn check_process(&self) -> Result<()> {
        match self.made_by.is_this_process() {
            true => Ok(()),
            false => Err(Error::OtherProcess { owner: self.made_by.process() }),
        }
    }

    /// Leaves everything as it is: it is the parent's.
    fn abandon(&mut self) {
        let (Ok(tcp) | Err(tcp)) = self.tcp.get_mut().map_err(PoisonError::into_inner);
        std::mem::forget((tcp.take(), self.notifier.take(), std::mem::take(&mut self.batches)));
        std::mem::forget((Arc::clone(&self.registry), Arc::clone(&self.mappings)));
        std::mem::forget(std::mem::take(&mut self.devices));
        self.peer.abandon();
    }

    pub(crate) fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    pub(crate) fn mappings(&self) -> &Arc<MappingCache> {
        &self.mappings
    }

    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Ends those of withdrawn regions that nobody uses any more; the others are left.
    fn forget_unused(&self, regions: &mut Vec<Arc<Region>>) {
        regions.retain(|region| {
            let is_used = region.users() > 0;
            if !is_used {
                self.registry.forget(region);
            }
            is_used
        });
    }

    /// Waits until nobody uses withdrawn regions any more: peers, whose copies end by themselves, and
    /// other engines of this process.
    fn quiet(&self, mut regions: Vec<Arc<Region>>) {
        let mut wait = Wait::begin();
        loop {
            self.forget_unused(&mut regions);
            let waited = wait.waited();
            // Nobody knows what a device that is lost does, however long that is waited for.
            let hope = regions.iter().any(|region| !self.peer.is_lost(region.device));
            if !hope || waited >= self.config.unregister_timeout {
                break;
            }
            wait.rest();
        }
        for Region { addr, len, .. } in regions.iter().map(|region| &**region) {
            tracing::error!(addr, len, waited = ?wait.waited(), "memory of an engine that was dropped is still in use");
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.check_process().is_err() {
            return self.abandon();
        }
        // What was not submitted yet is not, and peers begin nothing more.
        self.peer.stop();
        let regions = self.registry.withdraw_all();
        // Copies keep running into registered memory until they are done: wait for them. A device
        // that hangs ends its batches itself after the stall timeout.
        let mut wait = Wait::begin();
        while self.progress() > 0 {
            wait.rest();
        }
        let tcp = self.tcp.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(tcp) = &tcp {
            tcp.close();
        }
        self.quiet(regions);
        if let Some(notifier) = self.notifier.get() {
            notifier.wake();
        }
    }
}

/// A library that is missing is said and changes nothing else.
fn open_nvtx(library: &NvtxLibrary) -> Option<Arc<Nvtx>> {
    let path = match library {
        NvtxLibrary::Found => None,
        NvtxLibrary::At(path) => Some(path.as_path()),
    };
    let warn = |error: &_| tracing::warn!(%error, "MC_KVFERRY_NVTX: batches are shown nowhere");
    Nvtx::load(path).inspect_err(warn).ok()
}
