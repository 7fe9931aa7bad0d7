use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use kvferry_device::{Consumer, Device, Export, MadeBy};
use rustix::event::{EventfdFlags, eventfd};

use crate::batch::{AllPending, BatchId, BatchStatus, Batches, End, Holds, State};
use crate::buffer::Buffer;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::mapping::MappingCache;
use crate::pinned::PinnedAccount;
use crate::plan::Op;
use crate::profile::Tuning;
use crate::registry::Registry;
use crate::request::{Copies, Part, SubmitOptions};
use crate::segment::{AllocationKey, Exports, Identity, NoExports, Segment};
use crate::target::Target;
use crate::transport::peer::{Peer, Submitted};
use crate::transport::tcp::{Listener, Tcp};
use crate::transport::{Behind, Choice};

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
    notifier: OnceLock<Arc<Notifier>>,
}

/// How long a wait polls before it gives the processor away: about what a small batch takes.
const SPIN: Duration = Duration::from_micros(30);
/// Between polls after that.
const NAP: Duration = Duration::from_micros(50);

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
            config,
            devices,
            tcp: Mutex::default(),
            batches: Batches::default(),
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
    /// # Errors
    /// Among others [`Error::NotDeviceMemory`], [`Error::AlreadyRegistered`],
    /// [`Error::LeavesAllocation`], and `NotExportable` for memory that no peer could open.
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

    /// What peers need to know of the registered memory, now.
    pub fn segment(&self) -> Segment {
        self.registry.segment(self.incarnation, &self.devices)
    }

    /// The export of an allocation of [`Engine::segment`], for one peer.
    ///
    /// # Errors
    /// [`Error::UnknownAllocation`] if no registered region lies in it.
    pub fn export(&self, allocation: AllocationKey) -> Result<Export> {
        self.registry.export(&self.devices, allocation)
    }

    /// Opens a peer's segment as a target. Mappings are made when a transfer first needs them.
    ///
    /// # Errors
    /// [`Error::BadSegment`] if the segment contradicts itself.
    pub fn open(&self, name: &str, segment: Segment, exports: Arc<dyn Exports>) -> Result<Target> {
        self.check_process()?;
        Target::new(name.to_owned(), segment, exports, Arc::clone(&self.mappings), None)
    }

    /// This engine's own registered memory as a target, whatever is registered when it is used: for
    /// copies between a GPU and host memory here, or from place to place on one device.
    ///
    /// # Errors
    /// None today; as [`Engine::open`].
    pub fn local(&self) -> Result<Target> {
        self.check_process()?;
        let segment = Segment {
            incarnation: self.incarnation,
            process: Identity::of_process(),
            pid: std::process::id(),
            // What is in this process is found in its own table.
            allocations: Vec::new(),
            regions: Vec::new(),
        };
        self.open("this engine", segment, Arc::new(NoExports))
    }

    /// Tells how long the model's last step on a device took, the device by its position in
    /// [`Engine::devices`]; call it as each step ends. [`crate::Policy::Tail`] needs it: it compares
    /// steps beside transfers with steps beside none. Others ignore it.
    pub fn record_step(&self, device: usize, time: Duration) {
        self.peer.record_step(device, time);
    }

    /// Opens a peer's segment as a target that is reached by TCP, by lanes to the peer's
    /// [`Listener`] at `address`, a `host:port`. They connect when a transfer first needs them.
    ///
    /// # Errors
    /// As [`Engine::open`], [`Error::AuthKey`], and [`Error::System`] for no more threads.
    pub fn open_tcp(&self, name: &str, segment: Segment, address: &str) -> Result<Target> {
        let session = self.tcp()?.session(name, address, segment.incarnation);
        let mappings = Arc::clone(&self.mappings);
        Target::new(name.to_owned(), segment, Arc::new(NoExports), mappings, Some(session))
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
    /// call returns without waiting, except that a range list of more than about 130,000 pieces,
    /// which is more than half of the descriptor ring holds, waits for that here, and other
    /// submissions to the same device wait with it.
    ///
    /// # Errors
    /// As [`Engine::submit`], [`Error::UnknownBatch`], and `NotOrderable` behind a batch of another
    /// device or of TCP.
    pub fn submit_parts(&self, parts: &[Part<'_>], options: &SubmitOptions<'_>) -> Result<BatchId> {
        self.check_process()?;
        if let Some(lost) = parts.iter().find_map(|part| part.target.lost()) {
            return Err(lost);
        }
        let behind = self.behind(options.behind)?;
        let over_tcp =
            |part: &&Part<'_>| part.target.session().is_some() && !part.copies.are_empty();
        let far: Vec<_> = parts.iter().filter(over_tcp).collect();
        let planned = match far.is_empty() {
            true => None,
            false if !(behind.pending.is_empty() && behind.paced.is_empty()) => {
                return Err(not_orderable("batch"));
            }
            false => {
                let tcp = self.tcp()?;
                let planned = tcp.plan(&self.peer, &self.registry, &far)?;
                Some((tcp, planned))
            }
        };
        let near: Vec<_> =
            parts.iter().filter(|part| part.target.session().is_none()).copied().collect();
        let parts_here = if planned.is_none() { parts } else { &near };
        let submitted = self.peer.submit(&self.registry, parts_here, options, &behind)?;
        let Some((submitted, transfer)) = (match planned {
            None => submitted.map(|submitted| (submitted, None)),
            Some((tcp, (planned, summary))) => {
                let mut all = submitted.unwrap_or_else(Submitted::nothing);
                all.bytes += summary.bytes;
                all.path = all.path.and(summary.path);
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
            return Ok(self.batches.insert_completed());
        };
        if let Some(error) = &submitted.failure {
            tracing::warn!(%error, "a batch failed while it was submitted");
        }
        let Submitted { pending, paced, failure, bytes, path, choice, holds } = submitted;
        let pending = AllPending { submissions: pending.into(), paced: paced.into(), transfer };
        let id = self.batches.insert_running(pending, failure, bytes, (path, choice), holds);
        if let Some(notifier) = self.notifier.get() {
            notifier.wake();
        }
        tracing::debug!(%id, parts = parts.len(), bytes, %path, "submitted");
        Ok(id)
    }

    /// Makes later work of a stream of the caller's wait for a batch, on the device: the host does
    /// not wait. A batch that has ended is not waited for, and how a batch ends the stream does not
    /// see: ask [`Engine::poll`].
    ///
    /// # Errors
    /// [`Error::UnknownBatch`], the device's if the stream cannot wait, and
    /// [`Error::NotAllSubmitted`] for a batch that is submitted step by step
    /// (`MC_KVFERRY_MAX_RATE`, [`Choice::in_steps`]) as long as some of it is not.
    pub fn signal(&self, id: BatchId, consumer: Consumer) -> Result<()> {
        let (_, pending) = self.batches.look(id)?;
        let Some(pending) = pending else { return Ok(()) };
        if pending.transfer.is_some_and(|transfer| !transfer.ended()) {
            return Err(not_orderable("stream"));
        }
        let mut steps = Vec::new();
        for paced in pending.paced.iter() {
            steps.extend(paced.submissions().ok_or(Error::NotAllSubmitted(id))?);
        }
        self.peer.signal(&pending.submissions, consumer)?;
        self.peer.signal(&steps, consumer)
    }

    /// A fork has copies of locks that may be held for ever, so none is taken there.
    fn check_process(&self) -> Result<()> {
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
            let (_, over_tcp) = self.batches.ask(id, |pending| {
                all.pending.extend_from_slice(&pending.submissions);
                for paced in pending.paced.iter() {
                    match paced.submissions() {
                        Some(steps) => all.pending.extend(steps),
                        None => all.paced.push(Arc::clone(paced)),
                    }
                }
                pending.transfer.as_ref().is_some_and(|transfer| !transfer.ended())
            })?;
            if over_tcp == Some(true) {
                return Err(not_orderable("batch"));
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
        let (status, ended_here) = self.batches.finish(id, end)?;
        if ended_here {
            self.ended(id, &status);
        }
        Ok(status)
    }

    /// Which way a batch went between a GPU and host memory, and why; none for other batches.
    ///
    /// # Errors
    /// [`Error::UnknownBatch`].
    pub fn choice(&self, id: BatchId) -> Result<Option<Choice>> {
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
        if let Some(notifier) = self.notifier.get() {
            return Ok(notifier.fd.as_fd());
        }
        let failed = |call| move |reason: String| Error::System { call, reason };
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let fd = fd.map_err(|error| failed("eventfd")(error.to_string()))?;
        let notifier = Arc::new(Notifier { fd, work: Mutex::default(), woken: Condvar::new() });
        if self.notifier.set(Arc::clone(&notifier)).is_ok() {
            let engine = Arc::downgrade(self);
            std::thread::Builder::new()
                .name("kvferry-notify".into())
                .spawn(move || notifier.run(&engine))
                .map_err(|error| failed("thread")(error.to_string()))?;
        }
        Ok(self.notifier.get().expect("set above").fd.as_fd())
    }

    /// Bytes of pinned memory that the engine holds for itself.
    pub fn pinned_bytes(&self) -> u64 {
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
        self.peer.bounce_bytes()
    }

    /// A number of the TCP transport's, if there is one.
    fn of_tcp(&self, number: impl Fn(&Tcp) -> u64) -> u64 {
        let tcp = self.tcp.lock().unwrap_or_else(PoisonError::into_inner);
        tcp.as_ref().map_or(0, |tcp| number(tcp))
    }

    /// Ends every batch that can be ended, and returns how many still run.
    fn progress(&self) -> usize {
        let running = self.batches.running();
        let ended = running.iter().filter(|id| {
            // An id that another thread released meanwhile has ended, too.
            self.poll(**id).map_or(true, |status| status.state != State::Running)
        });
        running.len() - ended.count()
    }

    fn ended(&self, id: BatchId, status: &BatchStatus) {
        if let State::Failed(error) = &status.state {
            tracing::warn!(%id, %error, "batch failed");
        }
        if let Some(notifier) = self.notifier.get() {
            notifier.signal();
        }
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

fn not_orderable(what: &'static str) -> Error {
    Error::Device(kvferry_device::Error::NotOrderable {
        device: "TCP".into(),
        what,
        reason: "no device knows when a transfer over TCP ends; wait for the batch".into(),
    })
}

/// Between two polls. No vendor's event has a wait with a deadline, so waiting is polling; it
/// gives the processor away once the wait is longer than a small batch takes.
pub(crate) fn rest(waited: Duration) {
    if waited < SPIN {
        std::hint::spin_loop();
    } else {
        std::thread::sleep(NAP);
    }
}

/// The eventfd and the thread that keeps it true.
#[derive(Debug)]
struct Notifier {
    fd: OwnedFd,
    /// Whether batches may be running.
    work: Mutex<bool>,
    woken: Condvar,
}

impl Notifier {
    fn wake(&self) {
        *self.work.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.woken.notify_one();
    }

    fn signal(&self) {
        // The only failure is a full counter, and then it is readable already.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// Polls running batches; sleeps while there are none; ends with its engine.
    fn run(&self, engine: &Weak<Engine>) {
        loop {
            let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
            while !*work {
                work = self.woken.wait(work).unwrap_or_else(PoisonError::into_inner);
            }
            *work = false;
            drop(work);
            let start = Instant::now();
            loop {
                let Some(engine) = engine.upgrade() else { return };
                if engine.progress() == 0 {
                    break;
                }
                drop(engine);
                rest(start.elapsed());
            }
        }
    }
}
