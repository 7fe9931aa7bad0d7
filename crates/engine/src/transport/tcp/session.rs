//! The lanes to one peer, from the side that asks.

use std::collections::{HashMap, VecDeque};
use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvferry_wire::Id;
use kvferry_wire::batch::{Closed, Initiator, Nonce, Outcome, Refusal, Violation, initiator};
use tokio::net::TcpStream;
use tokio::sync::Notify;

use super::Shared;
use super::channel::{Channel, Role};
use super::cut::Scratch;
use super::layout::Layout;
use super::transfer::{Asked, Claim, Job, Work};
use crate::error::Error;
use crate::segment::Identity;
use crate::transport::staging::Staging;

/// Requests that a lane asks at once: the next ones' bytes go out while the status of the one before
/// is on its way.
const AT_ONCE: usize = 4;

/// Bytes of its requests that a lane has before it, not gathered or not arrived yet, when it takes the
/// next one: a READ finds its way to the first byte in the time of a few slices (on an H200 machine,
/// reads of 64 MiB took 6.0 ms with a quarter of it, and 5.0 with this).
const BACKLOG: u64 = 4 << 20;

/// Connections that a request may be sent on.
const ATTEMPTS: u32 = 3;

/// Waits between attempts to connect, after the first one failed.
const RETRIES: [Duration; 3] =
    [Duration::from_millis(50), Duration::from_millis(200), Duration::from_secs(1)];

/// The lanes to one engine at one address. Dropping it ends them once nothing is open.
pub(crate) struct Session {
    pub(super) shared: Arc<SessionShared>,
}

impl Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("peer", &self.shared.peer).finish_non_exhaustive()
    }
}

/// What the lanes of a session share.
pub(super) struct SessionShared {
    pub(super) peer: String,
    /// `host:port`.
    pub(super) address: String,
    pub(super) incarnation: Identity,
    id: Id,
    tcp: Arc<Shared>,
    queue: Mutex<Queue>,
    wakes: Vec<Arc<Notify>>,
}

/// What a lane is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// It is not open.
    Away,
    /// It has nothing to do.
    Idle,
    /// It was called for a job and has not come yet.
    Called,
    Busy,
}

struct Queue {
    jobs: VecDeque<Job>,
    lanes: Vec<Standing>,
    /// No more jobs will come.
    closed: bool,
    /// Why everything fails from now on.
    stopped: Option<String>,
}

impl Session {
    pub(super) fn new(
        tcp: &Arc<Shared>,
        peer: &str,
        address: &str,
        incarnation: Identity,
    ) -> Arc<Self> {
        let lanes = tcp.lanes;
        let shared = Arc::new(SessionShared {
            peer: peer.to_owned(),
            address: address.to_owned(),
            incarnation,
            id: Id(Identity::random().0),
            tcp: Arc::clone(tcp),
            queue: Mutex::new(Queue {
                jobs: VecDeque::new(),
                lanes: vec![Standing::Away; lanes],
                closed: false,
                stopped: None,
            }),
            wakes: (0..lanes).map(|_| Arc::default()).collect(),
        });
        for index in 0..lanes {
            tcp.threads.next().spawn(Lane::new(Arc::clone(&shared), index).run());
        }
        Arc::new(Self { shared })
    }

    /// Queues a job for whichever lane comes first.
    pub(super) fn submit(&self, job: Job) {
        let mut queue = self.shared.queue();
        if let Some(reason) = &queue.stopped {
            let failed = self.shared.failed(reason);
            drop(queue);
            return job.claim.end(Err(failed));
        }
        queue.jobs.push_back(job);
        // Busy lanes look by themselves.
        if let Some(idle) = queue.lanes.iter().position(|lane| *lane == Standing::Idle) {
            queue.lanes[idle] = Standing::Called;
            drop(queue);
            self.shared.wakes[idle].notify_one();
        } else if queue.lanes.contains(&Standing::Away) {
            drop(queue);
            self.shared.wake();
        }
    }

    /// Whether [`Session::stop`] ended it.
    pub(super) fn is_stopped(&self) -> bool {
        self.shared.queue().stopped.is_some()
    }

    /// Ends all lanes and, as failed, all that is open.
    pub(crate) fn stop(&self, reason: &str) {
        self.shared.stop(reason);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.shared.queue().closed = true;
        self.shared.wake();
    }
}

impl SessionShared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        self.wakes.iter().for_each(|wake| wake.notify_one());
    }

    /// Queues jobs before all others.
    fn put_back(&self, jobs: Vec<Job>) {
        let mut queue = self.queue();
        if let Some(reason) = &queue.stopped {
            let failed = self.failed(reason);
            drop(queue);
            return jobs.into_iter().for_each(|job| job.claim.end(Err(failed.clone())));
        }
        jobs.into_iter().rev().for_each(|job| queue.jobs.push_front(job));
    }

    fn stop(&self, reason: &str) {
        let mut queue = self.queue();
        if queue.stopped.is_none() {
            queue.stopped = Some(reason.to_owned());
        }
        let jobs = std::mem::take(&mut queue.jobs);
        drop(queue);
        jobs.into_iter().for_each(|job| job.claim.end(Err(self.failed(reason))));
        self.wake();
    }

    /// Fails what is queued, unless another lane is open and takes it.
    fn give_up(&self, reason: &str) {
        let mut queue = self.queue();
        if queue.lanes.iter().any(|lane| *lane != Standing::Away) {
            return;
        }
        let jobs = std::mem::take(&mut queue.jobs);
        drop(queue);
        jobs.into_iter().for_each(|job| job.claim.end(Err(self.failed(reason))));
    }

    fn failed(&self, reason: &str) -> Error {
        Error::Tcp { peer: self.peer.clone(), reason: reason.to_owned() }
    }
}

/// One lane, over all its connections.
struct Lane {
    index: usize,
    shared: Arc<SessionShared>,
    machine: Initiator,
    asker: Asker,
}

/// Why a lane is not connected (any more).
enum Loss {
    /// Connecting again may help.
    Gone(String),
    /// It will not.
    Over(String),
    /// Nobody needs it now.
    Retired,
}

impl Lane {
    fn new(shared: Arc<SessionShared>, index: usize) -> Self {
        let tcp = &shared.tcp;
        let machine = Initiator::new(initiator::Settings {
            limits: tcp.limits,
            credits: tcp.limits.credits,
            incarnation: Id(tcp.incarnation.0),
            expected: Id(shared.incarnation.0),
            session: shared.id,
            lane: index as u16,
            lanes: tcp.lanes as u16,
            key: tcp.key.clone(),
            wants_checksums: tcp.checksums,
            attempts: ATTEMPTS,
            queue: AT_ONCE,
        });
        let asker = Asker {
            shared: Arc::clone(&shared),
            index,
            scratch: Scratch::default(),
            asked: HashMap::new(),
            ended: HashMap::new(),
            open: false,
            draining: false,
            loss: None,
        };
        Self { index, shared, machine, asker }
    }

    async fn run(mut self) {
        let wake = Arc::clone(&self.shared.wakes[self.index]);
        let mut failures = 0;
        loop {
            let (stopped, closed, idle) = {
                let queue = self.shared.queue();
                (queue.stopped.clone(), queue.closed, queue.jobs.is_empty())
            };
            let idle = idle && self.asker.asked.is_empty();
            if let Some(reason) = stopped {
                return self.give_up(&reason);
            }
            if closed && idle {
                return;
            }
            if idle {
                wake.notified().await;
                continue;
            }
            let loss = self.connection(&wake, &mut failures).await;
            let reason = match loss {
                Loss::Retired => continue,
                Loss::Over(reason) => {
                    failures = 0;
                    self.give_up(&reason);
                    continue;
                }
                Loss::Gone(reason) => reason,
            };
            tracing::debug!(peer = self.shared.peer, lane = self.index, reason, "a lane was lost");
            match RETRIES.get(failures) {
                Some(&pause) => {
                    failures += 1;
                    tokio::select! {
                        () = tokio::time::sleep(pause) => {}
                        // A peer that was declared lost is not waited for.
                        () = wake.notified() => {}
                    }
                }
                None => {
                    failures = 0;
                    self.give_up(&reason);
                    // Others may still serve what is queued.
                    tokio::time::sleep(RETRIES[0]).await;
                }
            }
        }
    }

    /// Ends all requests of the lane, and those that no other lane will take.
    fn give_up(&mut self, reason: &str) {
        self.asker.loss = Some(reason.to_owned());
        self.machine.give_up();
        self.asker.hear_ends(&mut self.machine);
        self.shared.give_up(reason);
        self.asker.loss = None;
    }

    /// One connection, from its beginning to its end.
    async fn connection(&mut self, wake: &Arc<Notify>, failures: &mut usize) -> Loss {
        let tcp = Arc::clone(&self.shared.tcp);
        let connect = TcpStream::connect(&self.shared.address);
        let stream = match tokio::time::timeout(tcp.timeout.min(CONNECT), connect).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => {
                return Loss::Gone(format!("cannot connect to {}: {error}", self.shared.address));
            }
            Err(_) => return Loss::Gone(format!("{} does not answer", self.shared.address)),
        };
        let _ = stream.set_nodelay(true);
        let staging: Arc<Staging> = Arc::clone(&tcp.staging);
        let mut channel = Channel::new(stream, staging, tcp.lanes, Arc::clone(wake));
        self.machine.connect(Nonce(rand::random()));
        self.asker.draining = false;
        let lost = channel.run(&mut self.machine, &mut self.asker).await;
        if self.asker.open {
            self.asker.open = false;
            *failures = 0;
            self.shared.queue().lanes[self.index] = Standing::Away;
            // It may have been called for a job that others can do.
            self.shared.wake();
        }
        let closed = self.machine.closed().cloned();
        // What copies for this connection ends before another one may write the same bytes.
        channel.quiet().await;
        self.machine.disconnected();
        self.asker.hear_ends(&mut self.machine);
        match (closed, lost) {
            (Some(Closed::Retired), _) => Loss::Retired,
            (Some(Closed::Refused(refused)), _) => {
                let reason = refused.to_string();
                match refused.refusal {
                    Refusal::Busy | Refusal::StaleLane => Loss::Gone(reason),
                    Refusal::WrongIncarnation => {
                        self.shared.stop(&reason);
                        Loss::Over(reason)
                    }
                    _ => Loss::Over(reason),
                }
            }
            // Asking a silent peer again takes as long again.
            (Some(Closed::Violation(violation @ Violation::Silence { .. })), _) => {
                Loss::Over(violation.to_string())
            }
            (Some(Closed::Violation(violation)), _) => Loss::Over(violation.to_string()),
            (Some(Closed::Gone), _) | (None, None) => Loss::Gone("the connection was lost".into()),
            (None, Some(error)) => Loss::Gone(format!("the connection was lost: {error}")),
        }
    }
}

/// How long connecting may take.
const CONNECT: Duration = Duration::from_secs(5);

/// What a lane asks for and hears.
struct Asker {
    shared: Arc<SessionShared>,
    index: usize,
    scratch: Scratch,
    asked: HashMap<u64, Open>,
    /// Requests that are over at the peer.
    ended: HashMap<u64, Outcome>,
    open: bool,
    draining: bool,
    /// Why there will be no other connection.
    loss: Option<String>,
}

/// A request of the lane's.
struct Open {
    claim: Claim,
    layout: Arc<Layout>,
    is_write: bool,
}

impl Role<Initiator> for Asker {
    fn attend(&mut self, end: &mut Initiator, channel: &mut Channel) -> bool {
        loop {
            self.hear(end, channel);
            match self.ask(end, channel) {
                None => return false,
                Some(false) => return true,
                // Its bytes are gathered while the request goes out.
                Some(true) => drop(end.outgoing()),
            }
        }
    }
}

impl Asker {
    fn hear(&mut self, end: &mut Initiator, channel: &mut Channel) {
        while let Some(event) = end.event() {
            match event {
                initiator::Event::Opened(agreed) => {
                    channel.opened(agreed);
                    self.open = true;
                    self.shared.queue().lanes[self.index] = Standing::Busy;
                }
                initiator::Event::Begun { request } => {
                    if let Some(open) = self.asked.get(&request) {
                        channel.begin(request, Arc::clone(&open.layout), open.is_write);
                    }
                }
                initiator::Event::Released(release) => channel.released(&release),
                initiator::Event::Arrived(landing) => channel.arrived(end, &landing),
                initiator::Event::Draining => self.draining = true,
                initiator::Event::Ended { request, outcome } => {
                    self.ended.insert(request, outcome);
                    channel.change(request);
                }
            }
        }
        for request in channel.take_changed() {
            let Some(it) = channel.of(request) else {
                self.finish(request);
                continue;
            };
            let (copies, fell_back) = (it.copies, it.fell_back);
            if let Some(status) = it.failure.clone() {
                end.fail(request, status);
            }
            if fell_back && let Some(open) = self.asked.get(&request) {
                open.claim.fall_back();
            }
            if copies == 0 && self.ended.contains_key(&request) {
                channel.end(request);
                self.finish(request);
            }
        }
    }

    /// Takes a job if the lane has room, and says whether it did. None if the lane shall end.
    fn ask(&mut self, end: &mut Initiator, channel: &mut Channel) -> Option<bool> {
        let mut queue = self.shared.queue();
        if queue.stopped.is_some() {
            return None;
        }
        let Some(job) = self.next_job(&mut queue, end, channel) else {
            if queue.closed && queue.jobs.is_empty() && self.asked.is_empty() {
                end.retire();
            }
            return Some(false);
        };
        drop(queue);
        self.begin(job, end);
        Some(true)
    }

    /// The next job, if it is this lane's to do.
    fn next_job(&self, queue: &mut Queue, end: &Initiator, channel: &mut Channel) -> Option<Job> {
        if !self.open || self.draining {
            return None;
        }
        queue.lanes[self.index] = Standing::Busy;
        // One that would wait here behind others is left for lanes that are on their way to it.
        let called = queue.lanes.iter().filter(|lane| **lane == Standing::Called).count();
        let is_free = end.requests() == 0;
        let may = is_free
            || queue.jobs.len() > called
                && end.requests() < AT_ONCE
                && self.backlog(channel) < BACKLOG;
        let job = if may { queue.jobs.pop_front() } else { None };
        if job.is_none() && is_free {
            queue.lanes[self.index] = Standing::Idle;
        }
        job
    }

    /// Bytes of the lane's requests that it has not begun to move.
    fn backlog(&self, channel: &mut Channel) -> u64 {
        let left = |(&request, open): (&u64, &Open)| match channel.of(request) {
            Some(it) => it.left(),
            None => open.layout.length,
        };
        self.asked.iter().map(left).sum()
    }

    /// Makes requests of a job: one for this lane, and what it was not alone.
    fn begin(&mut self, job: Job, end: &mut Initiator) {
        let Job { claim, work } = job;
        let asked = match work {
            Work::Ask(asked) => asked,
            Work::Cut(share) => {
                self.scratch.buffer = end.buffer();
                let mut cut = match share.cut(&mut self.scratch) {
                    Ok(cut) => cut.into_iter(),
                    Err(error) => return claim.end(Err(error)),
                };
                let Some(first) = cut.next() else { return claim.end(Ok(())) };
                let rest: Vec<_> =
                    cut.map(|it| Job { claim: claim.another(), work: Work::Ask(it) }).collect();
                self.shared.put_back(rest);
                first
            }
        };
        let Asked { encoded, layout, is_write } = asked;
        match end.submit(encoded) {
            Ok(request) => {
                self.asked.insert(request, Open { claim, layout: Arc::new(layout), is_write });
            }
            Err(full) => {
                let work = Work::Ask(Asked { encoded: full.request, layout, is_write });
                self.shared.put_back(vec![Job { claim, work }]);
            }
        }
    }

    /// Hears the ends of requests while there is no connection, and so no copy.
    fn hear_ends(&mut self, end: &mut Initiator) {
        while let Some(event) = end.event() {
            if let initiator::Event::Ended { request, outcome } = event {
                self.ended.insert(request, outcome);
            }
        }
        let ended: Vec<_> = self.ended.keys().copied().collect();
        ended.into_iter().for_each(|request| self.finish(request));
    }

    fn finish(&mut self, request: u64) {
        let Some(outcome) = self.ended.remove(&request) else { return };
        let Some(open) = self.asked.remove(&request) else { return };
        open.claim.end(match outcome {
            Outcome::Done => Ok(()),
            Outcome::Failed(status) => Err(self.shared.failed(&status.to_string())),
            Outcome::Lost { quiet } => {
                let reason = self.loss.as_deref().unwrap_or("its lane was lost too often");
                let mut reason = reason.to_owned();
                if !quiet {
                    reason += "; the peer may still use its own memory for it until it notices";
                }
                Err(self.shared.failed(&reason))
            }
        });
    }
}
