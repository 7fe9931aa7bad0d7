use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kvferry_device::nvtx::Nvtx;
use kvferry_device::{Consumer, Device, Export, MadeBy};
use rustix::event::{EventfdFlags, eventfd};

use crate::batch::{AllPending, BatchId, BatchStatus, Batches, End, Holds, Path, State, Told};
use crate::buffer::Buffer;
use crate::config::{Config, NvtxLibrary};
use crate::ended::{Ended, Facts, Fallback, Flow, Transport};
use crate::error::{Error, Result};
use crate::mapping::MappingCache;
use crate::meters::Meters;
use crate::pinned::PinnedAccount;
use crate::plan::Op;
use crate::profile::Tuning;
use crate::registry::Registry;
use crate::request::{Copies, Part, SubmitOptions};
use crate::segment::{AllocationKey, Exports, Identity, NoExports, Segment};
use crate::statistics::{Counters, Statistics};
use crate::target::{Reach, Target};
use crate::transport::peer::{Peer, Submitted};
use crate::transport::tcp::{Listener, Tcp};
use crate::transport::{Behind, Choice, Route};
use crate::wait::{Notifier, rest};

/// Moves bytes between registered memory here and at a peer.
///
/// Safe to use from any thread. Submission never waits for the copies; a batch is polled, waited
/// for, or awaited through [`Engine::event_fd`], and ends exactly once.
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

    /// Makes `[addr, addr + len)` a region that transfers may use and peers may read and write.
    ///
    /// The device is the one whose memory it is. Regions may not overlap; several may lie in one
    /// allocation, and a range may cross two that touch there.
    ///
    /// Host memory of any origin is served if host memory is a device of the engine. What did not
    /// come from [`Engine::allocate`] no other process can map, so peers of this host reach it by
    /// TCP, as those of other hosts do: that is its only path, and no fallback. Each region of it
    /// is an allocation of its own.
    ///
    /// # Errors
    /// Among others [`Error::NotDeviceMemory`], [`Error::AlreadyRegistered`],
    /// [`Error::LeavesAllocation`], `NotExportable` for GPU memory that no peer could open, and
    /// `NotAccessible` for host memory that is not all there, or may not be read and written.
    ///
    /// # Safety
    /// The memory stays allocated until [`Engine::unregister`] returns `Ok`, and peers have
    /// stopped using it by then: kvferry cannot see copies that a peer's GPU makes.
    pub unsafe fn register(&self, addr: u64, len: u64) -> Result<()> {
        self.check_process()?;
        self.registry.register(&self.devices, addr, len)?;
        tracing::debug!(addr, len, "registered");
        Ok(())
    }

    /// Registers all regions of the list, or none.
    ///
    /// # Errors
    /// [`Error::RegionOfList`] names the one that failed.
    ///
    /// # Safety
    /// As [`Engine::register`], for each.
    pub unsafe fn register_all(&self, regions: &[(u64, u64)]) -> Result<()> {
        for (index, &(addr, len)) in regions.iter().enumerate() {
            // SAFETY: the caller's contract.
            if let Err(error) = unsafe { self.register(addr, len) } {
                for &(addr, _) in regions[..index].iter().rev() {
                    self.unregister(addr)?;
                }
                return Err(Error::RegionOfList { index, error: Box::new(error) });
            }
        }
        Ok(())
    }

    /// Ends the region that begins at `addr`. Waits for batches of this engine that use it, at
    /// most `MC_KVFERRY_UNREGISTER_TIMEOUT_SEC`.
    ///
    /// # Errors
    /// [`Error::UnknownRegion`]; [`Error::RegionBusy`], and then the region stays registered.
    pub fn unregister(&self, addr: u64) -> Result<()> {
        self.check_process()?;
        let region = self.registry.withdraw(addr)?;
        let start = Instant::now();
        while region.users() > 0 {
            self.progress();
            let waited = start.elapsed();
            if region.users() > 0 && waited >= self.config.unregister_timeout {
                let batches = region.users();
                self.registry.restore(region);
                return Err(Error::RegionBusy { addr, batches, waited });
            }
            rest(waited);
        }
        self.registry.forget(&region);
        tracing::debug!(addr, len = region.len, "unregistered");
        Ok(())
    }

    /// Allocates memory on a device and registers it.
    ///
    /// # Errors
    /// The device's, or [`Error::Device`] if the memory cannot be exported.
    pub fn allocate(self: &Arc<Self>, device: &Arc<dyn Device>, bytes: u64) -> Result<Buffer> {
        self.check_process()?;
        let memory = Arc::clone(device).allocate(bytes)?;
        // SAFETY: the buffer owns the memory and unregisters it before freeing it.
        unsafe { self.register(memory.addr(), memory.len()) }?;
        Ok(Buffer::new(Arc::clone(self), Arc::clone(device), memory))
    }

    /// Page-locks registered host memory for a device of this engine, the whole allocation that
    /// `addr` lies in, until its last region is unregistered. The first transfer would do it, and
    /// take as long.
    ///
    /// # Errors
    /// [`Error::UnknownRegion`], [`Error::PinnedBudget`], and the device's.
    pub fn lock_host(&self, addr: u64, device: &Arc<dyn Device>) -> Result<()> {
        self.check_process()?;
        let region = self.registry.pin_at(addr).ok_or(Error::UnknownRegion { addr })?;
        if region.region().allocation.device != device.info().uuid {
            self.registry.lock_host(region.region().allocation, device)?;
        }
        Ok(())
    }

    /// The account of page-locked host memory, for whoever locks more of it.
    pub fn pinned_account(&self) -> &Arc<PinnedAccount> {
        self.registry.pinned()
    }

    /// What peers need to know of the registered memory, now. A fork of the process that made the
    /// engine has none to give: there it is empty.
    pub fn segment(&self) -> Segment {
        if self.check_process().is_err() {
            return self.empty_segment();
        }
        self.registry.segment(self.incarnation, &self.devices)
    }

    /// The export of an allocation of [`Engine::segment`], for one peer.
    ///
    /// # Errors
    /// [`Error::UnknownAllocation`] if no registered region lies in it.
    pub fn export(&self, allocation: AllocationKey) -> Result<Export> {
        self.check_process()?;
        self.registry.export(&self.devices, allocation)
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

    /// Tells how long the model's last step on a device took, the device by its position in
    /// [`Engine::devices`]; call it as each step ends. [`crate::Policy::Tail`] needs it: it compares
    /// steps beside transfers with steps beside none. Others ignore it, and so does a fork.
    pub fn record_step(&self, device: usize, time: Duration) {
        if self.check_process().is_ok() {
            self.peer.record_step(device, time);
        }
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

    /// Serves the registered memory to lanes of other engines, until the listener is dropped.
    ///
    /// # Errors
    /// [`Error::Listen`], and as [`Engine::open_tcp`].
    pub fn listen(&self, address: SocketAddr) -> Result<Listener> {
        self.tcp()?.listen(&self.registry, address)
    }

    fn tcp(&self) -> Result<Arc<Tcp>> {
        self.check_process()?;
        let mut tcp = self.tcp.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tcp) = &*tcp {
            return Ok(Arc::clone(tcp));
        }
        let made = Arc::new(Tcp::new(&self.config, &self.devices, self.incarnation)?);
        Ok(Arc::clone(tcp.insert(made)))
    }

    /// Starts copying and returns without waiting.
    ///
    /// The copies of one batch have no order among each other, nor with those of other batches
    /// that run at the same time. All local ends lie on one device, and it copies; between host
    /// memory here and a GPU's there, a GPU of this engine does, for which the host memory is
    /// page-locked at first use. An empty list, and one of zero-length ranges, completes at once.
    ///
    /// # Errors
    /// If anything is wrong with the list, the target or the device, before anything moves:
    /// nothing was submitted. A failure later is in the batch's status.
    pub fn submit<'a>(
        &self,
        target: &'a Target,
        op: Op,
        copies: impl Into<Copies<'a>>,
    ) -> Result<BatchId> {
        let part = Part { target, op, copies: copies.into() };
        self.submit_parts(&[part], &SubmitOptions::default())
    }

    /// As [`Engine::submit`], for several targets at once and in order with the caller's own work.
    /// The parts are copied side by side, so that every link carries at any moment.
    ///
    /// With a producer in the options, or batches to be behind, the copies wait on the device. The
    /// call returns without waiting as long as the device's descriptor ring has room: 32 slots of
    /// 8192 pieces, of which a batch of more than a few pieces takes at least one until its launches
    /// have ended, and of which batches that wait hold 16 at most, about 130,000 pieces. A call that
    /// finds no room waits for the oldest launch, or for the oldest of what those wait for, and other
    /// submissions to the same device wait with it. (Between a GPU and host memory: 8 slots of 32,768
    /// pieces in each direction.)
    ///
    /// # Errors
    /// As [`Engine::submit`], [`Error::UnknownBatch`], and `NotOrderable` behind a batch of another
    /// device, or for what goes over TCP behind any.
    pub fn submit_parts(&self, parts: &[Part<'_>], options: &SubmitOptions<'_>) -> Result<BatchId> {
        self.check_process()?;
        self.try_submit(parts, options).inspect_err(|error| {
            self.meters.refused(error);
            self.counters.refused();
        })
    }

    fn try_submit(&self, parts: &[Part<'_>], options: &SubmitOptions<'_>) -> Result<BatchId> {
        let began = Instant::now();
        let left = || parts.iter().map(|part| part.target.left().count()).sum::<usize>();
        loop {
            let before = left();
            match self.submit_once(began, parts, options) {
                // Nothing moved, and what turned out to be out of reach goes over TCP from now on.
                Err(_) if left() > before => {}
                submitted => return submitted,
            }
        }
    }

    fn submit_once(
        &self,
        began: Instant,
        parts: &[Part<'_>],
        options: &SubmitOptions<'_>,
    ) -> Result<BatchId> {
        if let Some(lost) = parts.iter().find_map(|part| part.target.lost()) {
            return Err(lost);
        }
        let behind = self.behind(options.behind)?;
        let routes = self.routes(parts)?;
        let (near, far) = Route::divide(parts, &routes);
        let far: Vec<_> = far.iter().filter(|part| !part.copies.are_empty()).collect();
        let planned = match far.is_empty() {
            true => None,
            false if !(behind.pending.is_empty() && behind.paced.is_empty()) => {
                return Err(not_behind());
            }
            false => {
                let tcp = self.tcp()?;
                let planned = tcp.plan(&self.peer, &self.registry, &far)?;
                Some((tcp, planned))
            }
        };
        let submitted = self.peer.submit(&self.registry, &near, options, &behind)?;
        let Some((submitted, transfer)) = (match planned {
            None => submitted.map(|submitted| (submitted, None)),
            Some((tcp, (planned, summary))) => {
                let mut all = submitted.unwrap_or_else(Submitted::nothing);
                all.bytes += summary.bytes;
                all.path = all.path.and(summary.path);
                let unmapped = routes.iter().any(Route::is_fallback);
                let unmapped = unmapped.then_some(Fallback::NotMapped);
                all.fallback = unmapped.or(all.fallback).or(summary.fallback);
                let Holds { targets, _pins, .. } = summary.holds;
                all.holds.targets.extend(targets);
                all.holds._pins.extend(_pins);
                let started = tcp.start(&self.peer, planned, &far, options.after);
                match started {
                    Ok(transfer) => Some((all, Some(transfer))),
                    Err(error) if all.is_nothing() => return Err(error),
                    Err(error) => {
                        all.failure.get_or_insert(error);
                        Some((all, None))
                    }
                }
            }
        }) else {
            let facts = Facts::new(parts, began, Transport::None);
            let (path, time) = (Path::None, began.elapsed());
            self.tell(&Ended { facts, path, bytes: 0, time, failure: None });
            return Ok(self.batches.insert_completed());
        };
        if let Some(error) = &submitted.failure {
            tracing::warn!(%error, "a batch failed while it was submitted");
        }
        let Submitted { pending, paced, failure, bytes, path, choice, fallback, holds } = submitted;
        let transport = match (&transfer, choice) {
            (Some(_), _) if near.iter().any(|part| !part.copies.are_empty()) => Transport::Mixed,
            (Some(_), _) => Transport::Tcp,
            (None, Some(_)) => Transport::Offload,
            (None, None) => Transport::Peer,
        };
        let fallback = fallback.or(choice.and_then(|choice| choice.reason.fallback()));
        let facts = Facts { fallback, ..Facts::new(parts, began, transport) };
        let _range = self.nvtx.as_ref().map(|nvtx| facts.range(nvtx, bytes));
        let told = Told { span: facts.span(parts, bytes), facts, _range };
        let pending = AllPending { submissions: pending.into(), paced: paced.into(), transfer };
        let id = self.batches.insert_running(pending, failure, bytes, (path, choice), holds, told);
        if let Some(notifier) = self.notifier.get() {
            notifier.wake();
        }
        tracing::debug!(%id, parts = parts.len(), bytes, %path, "submitted");
        Ok(id)
    }

    /// The way of each part; makes the lanes that are missing. None if mappings reach everything.
    fn routes<'a>(&self, parts: &[Part<'a>]) -> Result<Vec<Route<'a>>> {
        if parts.iter().all(|part| part.target.is_near()) {
            return Ok(Vec::new());
        }
        let local = self.registry.table();
        let routed = parts.iter().map(|part| {
            let route = Route::of(part, &local)?;
            if !part.target.is_far() && !matches!(route, Route::Near) {
                let tcp = self.tcp()?;
                part.target.connect(|address| {
                    tcp.session(part.target.name(), address, part.target.incarnation())
                })?;
                if let Route::Both { .. } = route {
                    tcp.check_whole(&self.peer, &self.registry, part)?;
                }
            }
            Ok(route)
        });
        routed.collect()
    }

    /// Makes later work of a stream of the caller's wait for a batch, on the device: the host does
    /// not wait. A batch that has ended is not waited for, and how a batch ends the stream does not
    /// see: ask [`Engine::poll`].
    ///
    /// # Errors
    /// [`Error::UnknownBatch`], the device's if the stream cannot wait (for a batch over TCP, which this
    /// process ends, only CUDA's can), and
    /// [`Error::NotAllSubmitted`] for a batch that is submitted step by step
    /// (`MC_KVFERRY_MAX_RATE`, [`Choice::in_steps`]) as long as some of it is not.
    pub fn signal(&self, id: BatchId, consumer: Consumer) -> Result<()> {
        self.check_process()?;
        let (_, pending) = self.batches.look(id)?;
        let Some(pending) = pending else { return Ok(()) };
        let mut steps = Vec::new();
        if let Some(transfer) = pending.transfer.filter(|transfer| !transfer.ended()) {
            steps.push(self.tcp()?.ending(&self.peer, &transfer)?);
        }
        for paced in pending.paced.iter() {
            steps.extend(paced.submissions().ok_or(Error::NotAllSubmitted(id))?);
        }
        self.peer.signal(&pending.submissions, consumer)?;
        self.peer.signal(&steps, consumer)
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

    /// What batches wait for that have not ended.
    fn behind(&self, batches: &[BatchId]) -> Result<Behind> {
        let mut all = Behind::default();
        for &id in batches {
            let (_, transfer) = self.batches.ask(id, |pending| {
                all.pending.extend_from_slice(&pending.submissions);
                for paced in pending.paced.iter() {
                    match paced.submissions() {
                        Some(steps) => all.pending.extend(steps),
                        None => all.paced.push(Arc::clone(paced)),
                    }
                }
                pending.transfer.clone().filter(|transfer| !transfer.ended())
            })?;
            if let Some(transfer) = transfer.flatten() {
                all.pending.push(self.tcp()?.ending(&self.peer, &transfer)?);
            }
        }
        Ok(all)
    }

    /// The batch's status now. Does not block, and asks no driver; asking again after the end gives
    /// the same answer.
    ///
    /// # Errors
    /// [`Error::UnknownBatch`].
    pub fn poll(&self, id: BatchId) -> Result<BatchStatus> {
        self.check_process()?;
        let end = match self.batches.ask(id, |pending| self.has_ended(pending))? {
            (status, None | Some(Ok(false))) => return Ok(status),
            (_, Some(Ok(true))) => End::Quiet,
            (_, Some(Err(error))) => End::Unknown(error.into()),
        };
        let (status, ended) = self.batches.finish(id, end)?;
        if let Some((told, bytes)) = ended {
            self.ended(id, &status, &told, bytes);
        }
        Ok(status)
    }

    /// Which way a batch went between a GPU and host memory, and why; none for other batches.
    ///
    /// # Errors
    /// [`Error::UnknownBatch`].
    pub fn choice(&self, id: BatchId) -> Result<Option<Choice>> {
        self.check_process()?;
        self.batches.choice(id)
    }

    fn has_ended(&self, pending: &AllPending) -> Result<bool, kvferry_device::Error> {
        let transfer = pending.transfer.as_ref();
        for paced in pending.paced.iter() {
            if !paced.ended()? {
                return Ok(false);
            }
        }
        Ok(self.peer.ended(&pending.submissions)? && transfer.is_none_or(|it| it.ended()))
    }

    /// Polls until the batch ends or the time is over; then its status is still `Running`.
    ///
    /// # Errors
    /// [`Error::UnknownBatch`].
    pub fn wait(&self, id: BatchId, timeout: Duration) -> Result<BatchStatus> {
        let start = Instant::now();
        loop {
            let status = self.poll(id)?;
            let waited = start.elapsed();
            if status.state != State::Running || waited >= timeout {
                return Ok(status);
            }
            rest(waited);
        }
    }

    /// Asks that what of a batch has not been moved yet is not, and returns at once.
    ///
    /// The batch ends by itself, once, as any other: failed with [`Error::Cancelled`] if some of it
    /// was left out, and completed if it was too late. Its memory is quiet when it has ended, not
    /// before. How late is too late depends on the transport: a device's queue gives nothing back
    /// that it was given, so such a batch runs to its end; one that is submitted step by step ends
    /// behind the steps that run; over TCP the peer is asked to stop, and one that does not answer
    /// is given up after `MC_TCP_STATUS_TIMEOUT_SEC`. Cancelling again, or behind the end, changes
    /// nothing.
    ///
    /// # Errors
    /// [`Error::UnknownBatch`].
    pub fn cancel(&self, id: BatchId) -> Result<()> {
        self.check_process()?;
        let Some((pending, targets)) = self.batches.in_flight(id)? else { return Ok(()) };
        pending.paced.iter().for_each(|paced| paced.cancel());
        if let Some(transfer) = pending.transfer {
            transfer.cancel();
            targets.iter().filter_map(Target::session).for_each(|session| session.sweep());
        }
        tracing::debug!(%id, "asked to cancel");
        Ok(())
    }

    /// Forgets a batch that ended; its id is unknown from then on.
    ///
    /// # Errors
    /// [`Error::BatchBusy`] while it runs, [`Error::UnknownBatch`].
    pub fn release(&self, id: BatchId) -> Result<()> {
        self.check_process()?;
        self.batches.release(id)
    }

    /// A descriptor that becomes readable when batches end: an eventfd whose counter grows by one
    /// for each. Starts a thread that watches batches; without this call there is none.
    ///
    /// # Errors
    /// [`Error::System`] if there are no more descriptors or threads.
    pub fn event_fd(self: &Arc<Self>) -> Result<BorrowedFd<'_>> {
        self.check_process()?;
        if let Some(notifier) = self.notifier.get() {
            return Ok(notifier.fd());
        }
        let failed = |call| move |reason: String| Error::System { call, reason };
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let fd = fd.map_err(|error| failed("eventfd")(error.to_string()))?;
        let notifier = Arc::new(Notifier::new(fd));
        if self.notifier.set(Arc::clone(&notifier)).is_ok() {
            let engine = Arc::downgrade(self);
            std::thread::Builder::new()
                .name("kvferry-notify".into())
                .spawn(move || notifier.run(&engine))
                .map_err(|error| failed("thread")(error.to_string()))?;
        }
        Ok(self.notifier.get().expect("set above").fd())
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

    /// A number of the TCP transport's, if there is one.
    fn of_tcp(&self, number: impl Fn(&Tcp) -> u64) -> u64 {
        if self.check_process().is_err() {
            return 0;
        }
        let tcp = self.tcp.lock().unwrap_or_else(PoisonError::into_inner);
        tcp.as_ref().map_or(0, |tcp| number(tcp))
    }

    /// Ends every batch that can be ended, and returns how many still run.
    pub(crate) fn progress(&self) -> usize {
        let running = self.batches.running();
        let ended = running.iter().filter(|id| {
            // An id that another thread released meanwhile has ended, too.
            self.poll(**id).map_or(true, |status| status.state != State::Running)
        });
        running.len() - ended.count()
    }

    /// Tells everybody of a batch that ended just now.
    fn ended(&self, id: BatchId, status: &BatchStatus, told: &Told, bytes: u64) {
        let failure = match &status.state {
            State::Failed(error) => Some(error),
            State::Running | State::Completed => None,
        };
        match failure {
            None => {}
            Some(Error::Cancelled) => tracing::debug!(%id, "batch cancelled"),
            Some(error) => tracing::warn!(%id, %error, "batch failed"),
        }
        let Told { facts, span, _range } = told;
        let (facts, path, time) = (*facts, status.path, facts.submitted.elapsed());
        let ended = Ended { facts, path, bytes, time, failure };
        ended.record(span);
        self.tell(&ended);
        if let Some(notifier) = self.notifier.get() {
            notifier.signal();
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

    pub(crate) fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    pub(crate) fn mappings(&self) -> &Arc<MappingCache> {
        &self.mappings
    }

    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.check_process().is_err() {
            return self.abandon();
        }
        // What was not submitted yet is not.
        self.peer.stop();
        // Copies keep running into registered memory until they are done: wait for them. A device
        // that hangs ends its batches itself after the stall timeout.
        let start = Instant::now();
        while self.progress() > 0 {
            rest(start.elapsed());
        }
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

fn not_behind() -> Error {
    Error::Device(kvferry_device::Error::NotOrderable {
        device: "TCP".into(),
        what: "batch",
        reason: "what goes over TCP is behind no other batch; wait for that".into(),
    })
}
