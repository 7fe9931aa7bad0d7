//! The lanes to one peer, from the side that asks.

mod asker;

use std::collections::VecDeque;
use std::fmt::{self, Debug};
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvferry_device::MadeBy;
use kvferry_wire::Id;
use kvferry_wire::batch::{Closed, Initiator, Nonce, Refusal, Violation, initiator};
use tokio::sync::Notify;
use tokio::time::Instant;

use self::asker::Asker;
use super::Shared;
use super::channel::Channel;
use super::transfer::{Claim, Job, Owner, Transfer};
use crate::endpoint;
use crate::error::{Error, Result};
use crate::segment::Identity;
use crate::transport::staging::Staging;

/// Requests that a lane asks at once: the next ones' bytes go out while the status of the one before
/// is on its way.
const AT_ONCE: usize = 4;

/// Connections that a request may be sent on.
const ATTEMPTS: u32 = 3;

/// Waits between attempts to connect, after the first one failed.
const RETRIES: [Duration; 3] =
    [Duration::from_millis(50), Duration::from_millis(200), Duration::from_secs(1)];

/// The lanes to one engine at one address, as one target uses them: targets of the same engine share
/// them. When the last one is dropped they end, once nothing is open.
pub(crate) struct Session {
    shared: Arc<SessionShared>,
    /// The target, as far as its transfers are concerned.
    owner: Arc<Owner>,
    /// A fork leaves its lanes and their locks alone.
    made_by: MadeBy,
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
    /// Those that wait for their producers.
    held: VecDeque<Job>,
    lanes: Vec<Standing>,
    /// Counts [`Session::sweep`].
    sweeps: u64,
    /// Targets that use the lanes.
    targets: usize,
    /// There is none any more: no more jobs will come.
    closed: bool,
    /// Why everything fails from now on.
    stopped: Option<String>,
}

impl Queue {
    /// Why it takes nothing of that claim any more.
    fn refusal(&self, claim: &Claim) -> Option<Error> {
        match &self.stopped {
            Some(reason) => Some(claim.failed(reason)),
            None => claim.unwanted(),
        }
    }
}

impl Session {
    /// Makes the lanes, for a first target of that name.
    pub(super) fn new(
        tcp: &Arc<Shared>,
        peer: &str,
        address: &str,
        incarnation: Identity,
    ) -> Result<Arc<Self>> {
        let lanes = tcp.lanes;
        let threads: Vec<_> = (0..lanes).map(|_| tcp.threads.next()).collect::<Result<_>>()?;
        let shared = Arc::new(SessionShared {
            peer: peer.to_owned(),
            address: address.to_owned(),
            incarnation,
            id: Id(Identity::random().0),
            tcp: Arc::clone(tcp),
            queue: Mutex::new(Queue {
                jobs: VecDeque::new(),
                held: VecDeque::new(),
                lanes: vec![Standing::Away; lanes],
                sweeps: 0,
                targets: 1,
                closed: false,
                stopped: None,
            }),
            wakes: (0..lanes).map(|_| Arc::default()).collect(),
        });
        for (index, thread) in threads.iter().enumerate() {
            thread.spawn(Lane::new(Arc::clone(&shared), index).run());
        }
        Ok(Self::of(shared, peer))
    }

    /// That of one more target of that name, unless the lanes end.
    pub(super) fn join(shared: Arc<SessionShared>, peer: &str) -> Option<Arc<Self>> {
        let mut queue = shared.queue();
        if queue.closed || queue.stopped.is_some() {
            return None;
        }
        queue.targets += 1;
        drop(queue);
        Some(Self::of(shared, peer))
    }

    fn of(shared: Arc<SessionShared>, peer: &str) -> Arc<Self> {
        let (owner, made_by) = (Owner::new(peer), MadeBy::this_process());
        Arc::new(Self { shared, owner, made_by })
    }

    pub(super) fn shared(&self) -> &Arc<SessionShared> {
        &self.shared
    }

    /// Whose its claims are.
    pub(super) fn owner(&self) -> &Arc<Owner> {
        &self.owner
    }

    /// Queues a job for whichever lane comes first.
    pub(super) fn submit(&self, job: Job) {
        let mut queue = self.shared.queue();
        if let Some(error) = queue.refusal(&job.claim) {
            drop(queue);
            return job.claim.end(Err(error));
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

    /// Keeps a job that waits for its producer, until [`Session::produced`]. Nothing has touched its
    /// memory: when it is not wanted any more it ends at once.
    pub(super) fn hold(&self, job: Job) {
        let mut queue = self.shared.queue();
        if let Some(error) = queue.refusal(&job.claim) {
            drop(queue);
            return job.claim.end(Err(error));
        }
        queue.held.push_back(job);
    }

    /// Queues what was held of a transfer, or ends it if its producer failed.
    pub(super) fn produced(&self, transfer: &Arc<Transfer>, result: &Result<()>) {
        let mut queue = self.shared.queue();
        let (jobs, kept) = split(&mut queue.held, |job| job.claim.is_of(transfer));
        queue.held = kept;
        drop(queue);
        for job in jobs {
            match result {
                Ok(()) => self.submit(job),
                Err(error) => job.claim.end(Err(error.clone())),
            }
        }
    }

    /// Ends what is left of transfers that nobody wants any more: at once what no lane has begun, and
    /// the rest as soon as the peer says that nothing moves for it any more.
    pub(crate) fn sweep(&self) {
        self.shared.queue().sweeps += 1;
        self.shared.end_unwanted();
        self.shared.wake();
    }

    /// Ends, as failed, all that is open of this target's. Other targets keep the lanes; of the last
    /// one they end at once.
    pub(crate) fn stop(&self, reason: &str) {
        if self.owner.end(reason) {
            self.shared.leave(Some(reason));
            self.sweep();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if !self.made_by.is_this_process() {
            // Its jobs are the parent's.
            return std::mem::forget(Arc::clone(&self.shared));
        }
        if !self.owner.has_ended() {
            self.shared.leave(None);
            self.shared.wake();
        }
    }
}

/// Divides a list into what is chosen and the rest, in order.
fn split(
    jobs: &mut VecDeque<Job>,
    chosen: impl FnMut(&Job) -> bool,
) -> (VecDeque<Job>, VecDeque<Job>) {
    std::mem::take(jobs).into_iter().partition(chosen)
}

impl SessionShared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        self.wakes.iter().for_each(|wake| wake.notify_one());
    }

    /// Forgets a target. The last one ends the lanes: at once if there is a reason.
    fn leave(&self, reason: Option<&str>) {
        let mut queue = self.queue();
        queue.targets -= 1;
        if queue.targets == 0 {
            queue.closed = true;
            if queue.stopped.is_none() {
                queue.stopped = reason.map(str::to_owned);
            }
        }
    }

    /// Ends what no lane has begun and nobody wants any more.
    fn end_unwanted(&self) {
        let mut queue = self.queue();
        let Queue { jobs, held, .. } = &mut *queue;
        let mut unwanted = Vec::new();
        for list in [jobs, held] {
            let (ended, kept) = split(list, |job| job.claim.unwanted().is_some());
            *list = kept;
            unwanted.extend(ended);
        }
        drop(queue);
        for Job { claim, .. } in unwanted {
            if let Some(error) = claim.unwanted() {
                claim.end(Err(error));
            }
        }
    }

    /// Queues jobs before all others.
    fn put_back(&self, jobs: Vec<Job>) {
        let (mut queue, mut refused) = (self.queue(), Vec::new());
        for job in jobs.into_iter().rev() {
            match queue.refusal(&job.claim) {
                Some(error) => refused.push((job.claim, error)),
                None => queue.jobs.push_front(job),
            }
        }
        drop(queue);
        refused.into_iter().for_each(|(claim, error)| claim.end(Err(error)));
    }

    /// Ends all lanes and, as failed, all that is open, whosever it is.
    fn stop(&self, reason: &str) {
        let mut queue = self.queue();
        if queue.stopped.is_none() {
            queue.stopped = Some(reason.to_owned());
        }
        let (jobs, held) = (std::mem::take(&mut queue.jobs), std::mem::take(&mut queue.held));
        drop(queue);
        jobs.into_iter().chain(held).for_each(|job| job.claim.fail(reason));
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
        jobs.into_iter().for_each(|job| job.claim.fail(reason));
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
        let asker = Asker::new(Arc::clone(&shared), index);
        Self { index, shared, machine, asker }
    }

    async fn run(mut self) {
        let wake = Arc::clone(&self.shared.wakes[self.index]);
        let (mut failures, mut farewells) = (0, 0);
        // No call for it, and there is one for each batch, makes it connect any earlier.
        let mut not_before = Instant::now();
        loop {
            let (stopped, closed) = {
                let queue = self.shared.queue();
                (queue.stopped.clone(), queue.closed)
            };
            self.asker.sweep(&mut self.machine, |_| {});
            self.asker.hear_ends(&mut self.machine);
            let idle = self.is_idle();
            if let Some(reason) = stopped {
                return self.give_up(&reason);
            }
            if closed && idle {
                return;
            }
            if idle {
                failures = 0;
                wake.notified().await;
                continue;
            }
            if Instant::now() < not_before {
                tokio::select! {
                    () = tokio::time::sleep_until(not_before) => {}
                    () = wake.notified() => {}
                }
                continue;
            }
            let ended = self.asker.ended_count;
            let loss = self.connection(&wake, &mut failures).await;
            let reason = match loss {
                Loss::Retired if self.asker.ended_count > ended || self.is_idle() => {
                    farewells = 0;
                    continue;
                }
                // A peer may say goodbye just when it is asked for something, but not for ever.
                Loss::Retired => {
                    let mut pauses = [Duration::ZERO].into_iter().chain(RETRIES);
                    match pauses.nth(farewells) {
                        Some(pause) => {
                            farewells += 1;
                            not_before = Instant::now() + pause;
                        }
                        None => {
                            farewells = 0;
                            self.give_up("it says goodbye to each lane and does nothing");
                        }
                    }
                    continue;
                }
                Loss::Over(reason) => {
                    failures = 0;
                    self.give_up(&reason);
                    continue;
                }
                Loss::Gone(reason) => reason,
            };
            tracing::debug!(peer = self.shared.peer, lane = self.index, reason, "a lane was lost");
            let pause = match RETRIES.get(failures) {
                Some(&pause) => {
                    failures += 1;
                    pause
                }
                None => {
                    failures = 0;
                    self.give_up(&reason);
                    // Others may still serve what is queued.
                    RETRIES[0]
                }
            };
            not_before = Instant::now() + pause;
        }
    }

    /// Whether nothing waits for it.
    fn is_idle(&self) -> bool {
        self.asker.asked.is_empty() && self.shared.queue().jobs.is_empty()
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
        let address = &self.shared.address;
        let stream = match endpoint::connect(address, tcp.timeout.min(CONNECT)).await {
            Ok(stream) => stream,
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                return Loss::Gone(format!("{address} does not answer"));
            }
            Err(error) => return Loss::Gone(format!("cannot connect to {address}: {error}")),
        };
        let staging: Arc<Staging> = Arc::clone(&tcp.staging);
        let peer = self.shared.peer.clone();
        let mut channel = Channel::new(stream, peer, staging, tcp.lanes, Arc::clone(wake));
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
