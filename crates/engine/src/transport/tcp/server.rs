//! The side that serves lanes: a listener, and one task per connection.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use kvferry_device::MadeBy;
use kvferry_wire::Id;
use kvferry_wire::batch::{
    Answer, Claim, Closed, Code, Entry, Hello, Lanes, Nonce, Op, Refusal, Request, Responder,
    Status, responder,
};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

use super::Shared;
use super::channel::{Channel, Role, TICK};
use super::layout::{Grid, Home, Layout, Run};
use crate::error::{Error, Result};
use crate::registry::{Pin, Region, Registry};
use crate::{endpoint, meters, plan};

/// Lanes that are served at once.
const LANES: usize = 512;

/// Connections that have no lane yet. Of more, the oldest end: they are the ones that hang.
const STRANGERS: usize = 256;

/// How long a connection may take to become a lane.
const GREETING: Duration = Duration::from_secs(5);

/// How long a listener rests after an error that will not go away by asking again.
const REST: Duration = Duration::from_millis(100);

/// Serves this engine's registered memory to lanes of other engines; dropping it ends them.
#[derive(Debug)]
pub struct Listener {
    address: SocketAddr,
    door: Arc<Door>,
    authenticated: bool,
    /// A fork leaves its tasks and their locks alone.
    made_by: MadeBy,
}

/// What the connections of a listener share.
#[derive(Debug)]
struct Door {
    lanes: Mutex<Table>,
    rejected: AtomicU64,
    served: AtomicU64,
    meters: meters::Served,
    closing: Notify,
}

#[derive(Debug)]
struct Table {
    lanes: Lanes,
    /// Tells the connection that holds a lane to let go.
    holders: BTreeMap<Claim, Arc<Notify>>,
    /// Whose lanes others want.
    unwanted: Vec<Claim>,
    waiters: Vec<Arc<Notify>>,
    /// Connections that have no lane yet, the oldest first.
    strangers: BTreeMap<u64, Arc<Notify>>,
    next_stranger: u64,
    /// Wakes of all connections.
    all: Vec<Weak<Notify>>,
    closed: bool,
}

impl Listener {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether peers have to prove that they have the key.
    pub fn is_authenticated(&self) -> bool {
        self.authenticated
    }

    /// Connections that ended because of what they said, or did not say in time.
    pub fn rejected(&self) -> u64 {
        self.door.rejected.load(Ordering::Relaxed)
    }

    /// Lanes that are open; none is in a fork.
    pub fn lanes(&self) -> usize {
        match self.made_by.is_this_process() {
            true => self.door.table().lanes.len(),
            false => 0,
        }
    }

    /// Requests that were done.
    pub fn served(&self) -> u64 {
        self.door.served.load(Ordering::Relaxed)
    }

    pub(super) fn start(
        tcp: &Arc<Shared>,
        registry: &Arc<Registry>,
        address: SocketAddr,
    ) -> Result<Self> {
        let refused = |error: std::io::Error| Error::Listen { address, reason: error.to_string() };
        let listener = endpoint::listen(address).map_err(refused)?;
        let bound = listener.local_addr().map_err(refused)?;
        let door = Arc::new(Door {
            lanes: Mutex::new(Table {
                lanes: Lanes::new(LANES),
                holders: BTreeMap::new(),
                unwanted: Vec::new(),
                waiters: Vec::new(),
                strangers: BTreeMap::new(),
                next_stranger: 0,
                all: Vec::new(),
                closed: false,
            }),
            rejected: AtomicU64::new(0),
            served: AtomicU64::new(0),
            meters: meters::Served::new("tcp"),
            closing: Notify::new(),
        });
        let thread = tcp.threads.next()?;
        let listener = {
            let _inside = thread.enter();
            TcpListener::from_std(listener).map_err(refused)?
        };
        let task = accept(listener, Arc::clone(tcp), Arc::clone(registry), Arc::clone(&door));
        thread.spawn(task);
        let made_by = MadeBy::this_process();
        Ok(Self { address: bound, door, authenticated: tcp.key.is_some(), made_by })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if !self.made_by.is_this_process() {
            return;
        }
        let mut table = self.door.table();
        table.closed = true;
        table.all.iter().filter_map(Weak::upgrade).for_each(|wake| wake.notify_one());
        drop(table);
        self.door.closing.notify_one();
    }
}

impl Table {
    /// A connection that has no lane yet; too many of them end the oldest.
    fn meet(&mut self, wake: &Arc<Notify>) -> u64 {
        self.all.retain(|wake| wake.strong_count() > 0);
        self.all.push(Arc::downgrade(wake));
        if self.strangers.len() >= STRANGERS
            && let Some((_, oldest)) = self.strangers.pop_first()
        {
            oldest.notify_one();
        }
        let number = self.next_stranger;
        self.next_stranger += 1;
        self.strangers.insert(number, Arc::clone(wake));
        number
    }
}

impl Door {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn accept(listener: TcpListener, tcp: Arc<Shared>, registry: Arc<Registry>, door: Arc<Door>) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = door.closing.notified() => return,
        };
        match accepted {
            Ok((stream, from)) => {
                let (tcp, registry, door) =
                    (Arc::clone(&tcp), Arc::clone(&registry), Arc::clone(&door));
                // It leaves this thread's poller for that of its own.
                let Ok(stream) = stream.into_std() else { continue };
                match tcp.threads.next() {
                    Ok(thread) => drop(thread.spawn(serve(stream, from, tcp, registry, door))),
                    Err(error) => tracing::warn!(%error, %from, "a connection is not served"),
                }
            }
            Err(error) => {
                // Out of descriptors, most likely; asking again at once would spin.
                tracing::warn!(%error, "cannot accept lanes, trying again");
                tokio::time::sleep(REST).await;
            }
        }
    }
}

async fn serve(
    stream: std::net::TcpStream,
    from: SocketAddr,
    tcp: Arc<Shared>,
    registry: Arc<Registry>,
    door: Arc<Door>,
) {
    let Ok(stream) = TcpStream::from_std(stream) else { return };
    let settings = responder::Settings {
        limits: tcp.limits,
        credits: tcp.limits.credits,
        incarnation: Id(tcp.incarnation.0),
        key: tcp.key.clone(),
        wants_checksums: tcp.checksums,
    };
    let mut machine = Responder::new(settings, Nonce(rand::random()));
    let wake = Arc::new(Notify::new());
    let stranger = door.table().meet(&wake);
    let (peer, staging) = (from.ip().to_string(), Arc::clone(&tcp.staging));
    let mut channel = Channel::new(stream, peer, staging, tcp.lanes, wake);
    let mut server = Server {
        tcp: Arc::clone(&tcp),
        registry,
        door: Arc::clone(&door),
        began: Instant::now(),
        stranger,
        asked: None,
        claim: None,
        served: HashMap::new(),
        shut_down: false,
        looked: Instant::now(),
    };
    let lost = channel.run(&mut machine, &mut server).await;
    let closed = machine.closed().cloned();
    door.table().strangers.remove(&stranger);
    let rejected = matches!(&closed, Some(Closed::Violation(_) | Closed::Refused(_)))
        || closed.is_none() && server.claim.is_none();
    if rejected {
        door.rejected.fetch_add(1, Ordering::Relaxed);
    }
    let reason = closed.map(|closed| closed.to_string()).or(lost.map(|error| error.to_string()));
    tracing::debug!(%from, rejected, reason, "a connection ended");
    machine.disconnected();
    // An initiator that comes back relies on it: nothing of the old connection is at work.
    channel.quiet().await;
    drop(channel);
    server.let_go();
}

/// One request that is served.
#[derive(Debug)]
struct Served {
    op: Op,
    /// None if it was refused.
    layout: Option<Arc<Layout>>,
    /// Why it ends early.
    ending: Option<Status>,
    finished: bool,
}

struct Server {
    tcp: Arc<Shared>,
    registry: Arc<Registry>,
    door: Arc<Door>,
    began: Instant,
    /// Its number as long as it has no lane.
    stranger: u64,
    /// A peer that waits for its lane.
    asked: Option<Hello>,
    claim: Option<Claim>,
    served: HashMap<u64, Served>,
    shut_down: bool,
    /// When it last looked for withdrawn memory.
    looked: Instant,
}

impl Server {
    /// Gives the lane back.
    fn let_go(&mut self) {
        let Some(claim) = self.claim.take() else { return };
        let mut table = self.door.table();
        table.lanes.release(claim);
        table.holders.remove(&claim);
        table.unwanted.retain(|it| *it != claim);
        std::mem::take(&mut table.waiters).iter().for_each(|waiter| waiter.notify_one());
    }

    fn claim(&mut self, end: &mut Responder, channel: &mut Channel) {
        let Some(hello) = self.asked else { return };
        let door = Arc::clone(&self.door);
        let mut table = door.table();
        match table.lanes.claim(&hello.lane) {
            Answer::Granted(claim) => {
                table.holders.insert(claim, Arc::clone(channel.wake()));
                self.claim = Some(claim);
                table.strangers.remove(&self.stranger);
                if let Some(agreed) = end.accept() {
                    channel.opened(agreed);
                }
            }
            Answer::After(older) => {
                if !table.unwanted.contains(&older) {
                    table.unwanted.push(older);
                }
                if let Some(holder) = table.holders.get(&older) {
                    holder.notify_one();
                }
                table.waiters.push(Arc::clone(channel.wake()));
                return;
            }
            Answer::Stale => end.refuse(Refusal::StaleLane, "a newer connection has this lane"),
            Answer::Full => end.refuse(Refusal::Busy, "all lanes are taken"),
        }
        self.asked = None;
    }

    /// Finds the memory that a request means.
    fn layout(&self, body: &Request<'_>) -> Result<Layout, Status> {
        let unknown = |at: usize| {
            let reason = format!("segment {at} of the request was unregistered, or never was");
            Status::new(Code::UnknownSegment, reason)
        };
        let pins: Vec<Pin> = body
            .segments()
            .enumerate()
            .map(|(at, name)| self.registry.pin_segment(name).ok_or_else(|| unknown(at)))
            .collect::<Result<_, _>>()?;
        let mut devices = pins.iter().map(|pin| pin.region().device);
        let device = devices.next();
        if devices.any(|other| Some(other) != device) {
            let reason = "its segments lie on several devices";
            return Err(Status::new(Code::BadRequest, reason));
        }
        let outside = |at: usize, (low, high): (u64, u64), region: &Region| {
            let reason = format!("entry {at} is [{low}, {high}) of {} bytes", region.len);
            Status::new(Code::OutOfBounds, reason)
        };
        let region = |at: usize, segment: u32| {
            pins.get(segment as usize).map(Pin::region).ok_or_else(|| unknown(at))
        };
        let mut runs = Vec::new();
        if let Some(ranges) = body.ranges() {
            runs.reserve_exact(ranges.len());
            for (at, range) in ranges.enumerate() {
                let region = region(at, range.segment)?;
                if range.offset > region.len || range.length > region.len - range.offset {
                    let hull = (range.offset, range.offset.saturating_add(range.length));
                    return Err(outside(at, hull, region));
                }
                runs.push(Run::Piece { addr: region.addr + range.offset, len: range.length });
            }
        } else {
            for (at, entry) in body.entries().enumerate() {
                let region = region(at, entry.segment())?;
                let (low, high) = entry.hull();
                if low > high || high > region.len {
                    return Err(outside(at, (low, high), region));
                }
                runs.push(run(region.addr, &entry));
            }
        }
        let home = match device {
            Some(device) if !self.tcp.staging.is_host(device) => Home::Device(device),
            _ => Home::Host,
        };
        Ok(Layout { runs, home, length: body.length, pins })
    }
}

/// An entry whose expansion lies inside the region at `base`.
fn run(base: u64, entry: &Entry<'_>) -> Run {
    match entry {
        Entry::Range(range) => Run::Piece { addr: base + range.offset, len: range.length },
        Entry::Strided(it) => Run::Grid(Box::new(Grid {
            addr: base + it.offset,
            len: it.length,
            rows: (it.stride, it.count),
            layers: (0, 1),
            page_stride: 0,
            pages: vec![0],
        })),
        Entry::Paged(it, numbers) => Run::Grid(Box::new(Grid {
            addr: base.wrapping_add(it.offset),
            len: it.row_bytes,
            rows: (it.row_stride, it.rows.into()),
            layers: (it.layer_stride, it.layers.into()),
            page_stride: it.page_stride,
            pages: numbers.iter().collect(),
        })),
    }
}

impl Role<Responder> for Server {
    fn attend(&mut self, end: &mut Responder, channel: &mut Channel) -> bool {
        while let Some(event) = end.event() {
            match event {
                responder::Event::Asked(hello) => self.asked = Some(hello),
                responder::Event::Request { request, body } => {
                    let op = body.op;
                    let (layout, ending) = match self.layout(&body).map(Arc::new) {
                        Ok(layout) => {
                            channel.begin(request, Arc::clone(&layout), op == Op::Read);
                            (Some(layout), None)
                        }
                        Err(status) => (None, Some(status)),
                    };
                    self.served.insert(request, Served { op, layout, ending, finished: false });
                    channel.change(request);
                }
                responder::Event::Arrived(landing) => channel.arrived(end, &landing),
                responder::Event::Released(release) => channel.released(&release),
                responder::Event::Cancelled { request } => {
                    self.end_early(request, Status::new(Code::Cancelled, ""), channel);
                }
                responder::Event::Overdue { request } => {
                    let status = Status::new(Code::TimedOut, "it made no progress");
                    self.end_early(request, status, channel);
                }
            }
        }
        self.claim(end, channel);
        if self.looked.elapsed() >= TICK {
            self.looked = Instant::now();
            self.let_go_of_withdrawn(channel);
        }
        for request in channel.take_changed() {
            self.look_at(request, end, channel);
        }
        let table = self.door.table();
        let unwanted = self.claim.is_some_and(|claim| table.unwanted.contains(&claim));
        if table.closed && !self.shut_down {
            self.shut_down = true;
            end.shut_down();
        }
        // A lane ends with a goodbye, so that no status is lost.
        let over = table.closed && self.claim.is_none();
        let late = self.claim.is_none()
            && (self.began.elapsed() >= GREETING || !table.strangers.contains_key(&self.stranger));
        !(unwanted || over || late)
    }
}

impl Server {
    fn end_early(&mut self, request: u64, status: Status, channel: &mut Channel) {
        if let Some(served) = self.served.get_mut(&request) {
            served.ending.get_or_insert(status);
            channel.change(request);
        }
    }

    /// Ends requests whose memory somebody unregisters. A peer that moves a byte now and then would keep
    /// it for as long as it likes.
    fn let_go_of_withdrawn(&mut self, channel: &mut Channel) {
        for (&request, served) in &mut self.served {
            let withdrawn = served.layout.as_ref().is_some_and(|layout| layout.is_withdrawn());
            if withdrawn && !served.finished && served.ending.is_none() {
                let reason = "a segment of the request was unregistered meanwhile";
                served.ending = Some(Status::new(Code::UnknownSegment, reason));
                channel.change(request);
            }
        }
    }

    /// Finishes a request that is done, or cannot go on and is quiet.
    fn look_at(&mut self, request: u64, end: &mut Responder, channel: &mut Channel) {
        let Some(served) = self.served.get_mut(&request) else { return };
        let Some(it) = channel.of(request) else {
            // It was refused.
            if let Some(status) = served.ending.take() {
                let _ = end.finish(request, status);
            }
            self.served.remove(&request);
            return;
        };
        if let Some(failure) = it.failure.take() {
            served.ending.get_or_insert(failure.status);
        }
        let moved = if served.op == Op::Write { it.applied } else { it.offered };
        let whole = moved == it.length();
        let quiet = it.copies == 0;
        let status = match &served.ending {
            Some(status) if quiet => Some(status.clone()),
            None if whole && quiet => Some(Status::DONE),
            _ => None,
        };
        let outstanding = it.outstanding;
        if let Some(status) = status.filter(|_| !served.finished) {
            let (is_done, bytes) = (status.is_done(), it.length());
            match end.finish(request, status) {
                Ok(()) => {
                    served.finished = true;
                    if is_done {
                        self.door.served.fetch_add(1, Ordering::Relaxed);
                        let op = match served.op {
                            Op::Write => plan::Op::Write,
                            Op::Read => plan::Op::Read,
                        };
                        self.door.meters.count(op, bytes);
                    }
                }
                // The lane is closing, or a payload of it is just landing.
                Err(error) => tracing::debug!(request, %error, "a request is not finished yet"),
            }
            // Its offers may have been dropped just now.
            channel.change(request);
        } else if served.finished && outstanding == 0 && quiet {
            self.served.remove(&request);
            channel.end(request);
        }
    }
}
