//! The responder's side of a lane: it serves.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::string::String;
use core::time::Duration;

use super::frame::{self, Kind};
use super::hello::{Agreed, Hello, Hellos, Key, Nonce, PROOF_LENGTH, Refused, Side};
use super::inbox::{Incoming, Landing};
use super::limits::Limits;
use super::link::{Link, STRIDE};
use super::outbox::{Outgoing, Release};
use super::request::{Op, Request};
use super::status::{Refusal, Status};
use super::watch::Watch;
use super::{Closed, OfferError};
use crate::Id;

/// How a responder speaks on its lanes.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What this side takes; checked by [`Limits::check`].
    pub limits: Limits,
    /// DATA frames that this side takes from the beginning.
    pub credits: u32,
    /// This engine.
    pub incarnation: Id,
    /// With a key, only peers that prove that they have it are served.
    pub key: Option<Key>,
    /// Whether payload shall have checksums.
    pub wants_checksums: bool,
}

/// What a responder tells its host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A peer wants a lane, and has the key if there is one: [`accept`](Responder::accept) it when
    /// [`Lanes`](super::Lanes) says so, or [`refuse`](Responder::refuse) it.
    Asked(Hello),
    /// A request. The host checks its segments and bounds. Of a WRITE the bytes come, from the first
    /// one; those of a READ are to be [`offered`](Responder::offer). It is open until the host
    /// [`finishes`](Responder::finish) it.
    Request {
        /// Its number.
        request: u64,
        /// What is asked; keep what is needed of it.
        body: Request<'a>,
    },
    /// Payload is in its slot, whole: check its checksum, move it to its destination, and
    /// [`grant`](Responder::grant) the slot again.
    Arrived(Landing),
    /// An offer's slot is free.
    Released(Release),
    /// The peer wants the request no more: [`finish`](Responder::finish) it as soon as nothing
    /// touches its memory, and say [`not_before`](Responder::not_before) if that is not now.
    Cancelled {
        /// The request.
        request: u64,
    },
    /// The request has waited for the peer, and nothing moved, for as long as it or this side's
    /// [`progress_ms`](Limits::progress_ms) allows, whichever is less:
    /// [`finish`](Responder::finish) it, or the peer keeps what it uses for as long as it likes.
    Overdue {
        /// The request.
        request: u64,
    },
}

/// The host finishes a request that it cannot finish so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FinishError {
    /// It is not open (any more).
    #[error("request {request} is not open")]
    NotOpen {
        /// The request.
        request: u64,
    },
    /// It is not done: bytes are missing.
    #[error("request {request} is not done, {missing} bytes are missing")]
    Incomplete {
        /// The request.
        request: u64,
        /// Bytes that did not arrive or were not offered.
        missing: u64,
    },
}

mod frames;

#[derive(Debug)]
struct Open {
    op: Op,
    length: u64,
    /// How long it may wait for the peer.
    progress_ms: u32,
    /// Bytes that arrived, of a WRITE, or that were offered, of a READ.
    moved: u64,
    cancelled: bool,
    /// How the host finished it, while its status is not on its way.
    status: Option<Status>,
    /// The request whose end is also its own.
    after: Option<u64>,
    overdue: bool,
    /// The peer was told that it ends by itself, later.
    put_off: bool,
    progress: Watch,
}

#[derive(Debug)]
enum Phase {
    Silent,
    Greeted { ours: Hello, theirs: Hello },
    Asked { ours: Hello, theirs: Hello },
    Open,
}

/// Events without the request's bytes.
#[derive(Debug)]
enum Told {
    Asked(Hello),
    Arrived(Landing),
    Released(Release),
    Cancelled(u64),
    Overdue(u64),
}

/// The responder's side of one connection.
///
/// Read what [`incoming`](Self::incoming) says and send what [`outgoing`](Self::outgoing) says, look
/// at [`event`](Self::event) and [`closed`](Self::closed) after each, and call
/// [`tick`](Self::tick) a few times per progress time. When the connection is gone, for whatever
/// reason, call [`disconnected`](Self::disconnected), let all copies for its
/// [`requests`](Self::requests) end, and only then give the lane back to [`Lanes`](super::Lanes).
#[derive(Debug)]
pub struct Responder {
    settings: Settings,
    nonce: Nonce,
    phase: Phase,
    hellos: Hellos,
    link: Link,
    requests: BTreeMap<u64, Open>,
    last: u64,
    /// A request in the inbox, for the next event.
    waiting: bool,
    /// The request in the inbox was told.
    told: bool,
    /// Requests that are finished, in that order.
    finished: VecDeque<u64>,
    notices: VecDeque<(u64, u64)>,
    draining: bool,
    said_goodbye: bool,
    heard_goodbye: bool,
    closed: Option<Closed>,
    events: VecDeque<Told>,
    idle: Watch,
    parting: Watch,
}

impl Responder {
    /// Of a new connection. `nonce` is a new one.
    pub fn new(settings: Settings, nonce: Nonce) -> Self {
        Self {
            link: Link::new(settings.limits),
            settings,
            nonce,
            phase: Phase::Silent,
            hellos: Hellos::default(),
            requests: BTreeMap::new(),
            last: 0,
            waiting: false,
            told: false,
            finished: VecDeque::new(),
            notices: VecDeque::new(),
            draining: false,
            said_goodbye: false,
            heard_goodbye: false,
            closed: None,
            events: VecDeque::new(),
            idle: Watch::default(),
            parting: Watch::default(),
        }
    }

    /// Opens the lane that was [`asked`](Event::Asked) for. Nothing of earlier connections of that
    /// lane may be at work any more: the initiator relies on it.
    pub fn accept(&mut self) -> Option<Agreed> {
        let Phase::Asked { ours, theirs } = self.phase else { return None };
        let proof = match &self.settings.key {
            Some(key) => key.prove(Side::Responder, &self.hellos),
            None => [0; PROOF_LENGTH],
        };
        frame::encode(self.link.outbox.framing(), Kind::Welcome, 0, |out| {
            out.extend_from_slice(&proof);
        });
        self.phase = Phase::Open;
        Some(self.link.open(&ours, &theirs))
    }

    /// Does not open the lane. The connection closes.
    pub fn refuse(&mut self, refusal: Refusal, reason: &str) {
        if !matches!(self.phase, Phase::Open) {
            self.link.append_refusal(refusal, reason);
            let reason = String::from(reason);
            self.closed = Some(Closed::Refused(Refused { refusal, reason }));
        }
    }

    /// Offers the next `length` bytes of a READ: they lie in a slot, and stay there until it is
    /// [`released`](Event::Released). Says where they begin.
    ///
    /// # Errors
    /// If the request does not take them (any more): the slot is free.
    pub fn offer(&mut self, request: u64, length: u32, checksum: u64) -> Result<u64, OfferError> {
        let none = OfferError::NotOpen { request };
        let agreed = self.link.agreed.filter(|_| self.closed.is_none()).ok_or(none)?;
        let open = self.requests.get_mut(&request).filter(|open| open.op == Op::Read);
        let open = open.filter(|open| open.is_served() && !open.cancelled).ok_or(none)?;
        let data = agreed.extent(request, open.moved, open.length, length, checksum)?;
        open.moved += u64::from(length);
        self.link.outbox.offer(request, data);
        Ok(data.offset)
    }

    /// Ends a request: nothing reads or writes memory for it any more, except offers, which the lane
    /// takes care of. The status goes behind the payload that was offered.
    ///
    /// # Errors
    /// [`FinishError::Incomplete`] if it is said to be done and is not; it stays open.
    pub fn finish(&mut self, request: u64, status: Status) -> Result<(), FinishError> {
        let open = self.requests.get_mut(&request).filter(|open| open.is_served());
        let open = open.ok_or(FinishError::NotOpen { request })?;
        let missing = open.length - open.moved;
        if status.is_done() && missing > 0 {
            return Err(FinishError::Incomplete { request, missing });
        }
        let landing = matches!(self.link.inbox.incoming(), Incoming::Payload(landing) if landing.request == request);
        if status.is_done() && landing {
            return Err(FinishError::Incomplete { request, missing: 1 });
        }
        if !status.is_done() {
            self.link.inbox.discard(request);
            self.drop_offers(request);
        }
        if let Some(open) = self.requests.get_mut(&request) {
            open.status = Some(status);
            self.finished.push_back(request);
        }
        Ok(())
    }

    /// Answers a [`cancel`](Event::Cancelled) whose request cannot be finished yet: its memory is
    /// quiet when `after` ends. If that is another request, this one ends with it and needs no
    /// [`finish`](Self::finish); if it is itself, it does, and the peer is told once.
    ///
    /// # Errors
    /// If either is not open, or `after` itself waits for another one.
    pub fn not_before(&mut self, request: u64, after: u64) -> Result<(), FinishError> {
        for request in [request, after] {
            let served = self.requests.get(&request).is_some_and(Open::is_served);
            if !served {
                return Err(FinishError::NotOpen { request });
            }
        }
        let open = self.requests.get_mut(&request).filter(|open| open.cancelled);
        let open = open.ok_or(FinishError::NotOpen { request })?;
        if request == after && core::mem::replace(&mut open.put_off, true) {
            return Ok(());
        }
        if request != after {
            open.after = Some(after);
            self.drop_offers(request);
            self.link.inbox.discard(request);
        }
        self.notices.push_back((request, after));
        Ok(())
    }

    /// Lets the peer send so many more DATA frames: that many slots are free, or will be soon. Says
    /// how many it takes; there are never more than the limit.
    pub fn grant(&mut self, slots: u32) -> u32 {
        self.link.grant(slots)
    }

    /// DATA frames that this side may send now: more offers than that wait.
    pub fn credits(&self) -> u32 {
        self.link.outbox.credits
    }

    /// DATA frames that the peer may send and has not.
    pub fn granted(&self) -> u32 {
        self.link.granted()
    }

    /// Payload bytes of open WRITEs that have not come: what credits are for.
    pub fn expected_bytes(&self) -> u64 {
        let writes = self.requests.values().filter(|open| open.op == Op::Write && open.is_served());
        writes.fold(0, |sum, open| sum.saturating_add(open.length - open.moved))
    }

    /// Says that this side stops reading for lack of a slot, or goes on: the peer is not blamed for
    /// that time.
    pub fn hold(&mut self, held: bool) {
        self.link.held = held;
    }

    /// Takes no new requests, and closes when the open ones have ended.
    pub fn shut_down(&mut self) {
        self.draining = true;
    }

    /// Requests that have not ended, with those whose status is not on its way.
    pub fn requests(&self) -> impl Iterator<Item = u64> {
        self.requests.keys().copied()
    }

    /// Bytes that are held for frames that arrive.
    pub fn held_bytes(&self) -> usize {
        self.link.inbox.held()
    }

    /// What the next received bytes are.
    pub fn incoming(&self) -> Incoming {
        if self.closed.is_some() { Incoming::Nothing } else { self.link.inbox.incoming() }
    }

    /// Takes bytes of frames and says how many it took. It takes none behind a request until that
    /// was given out by [`event`](Self::event).
    pub fn received(&mut self, bytes: &[u8]) -> usize {
        self.settle();
        let mut taken = 0;
        while self.incoming() == Incoming::Framing && !self.waiting {
            let limit = self.link.frame_limit();
            let handled = self.link.inbox.received(&bytes[taken..], limit).and_then(|count| {
                taken += count;
                match self.link.inbox.frame() {
                    None => Ok(false),
                    Some(header) => self.handle(header).map(|()| true),
                }
            });
            match handled {
                Ok(true) => {}
                Ok(false) => break,
                Err(violation) => self.violated(violation),
            }
        }
        taken
    }

    /// Says that so many bytes of the payload were read.
    pub fn received_payload(&mut self, count: u32) {
        let Some((landing, discarded)) = self.link.inbox.received_payload(count) else { return };
        if discarded {
            self.link.grant(1);
        } else {
            self.events.push_back(Told::Arrived(landing));
        }
    }

    /// What is sent next.
    pub fn outgoing(&mut self) -> Outgoing<'_> {
        if self.link.outbox.is_ready() && self.closed.is_none() && matches!(self.phase, Phase::Open)
        {
            self.append();
        }
        self.link.outbox.outgoing()
    }

    /// Says that so many bytes of what [`outgoing`](Self::outgoing) says were sent, first of its
    /// framing, then of its payload.
    pub fn sent(&mut self, count: usize) {
        let release = self.link.outbox.sent(count);
        self.events.extend(release.map(Told::Released));
    }

    /// Looks at all deadlines. `now` is any clock that only grows.
    pub fn tick(&mut self, now: Duration) {
        if self.closed.is_some() {
            return;
        }
        if let Err(violation) = self.link.tick(!self.requests.is_empty(), now) {
            return self.violated(violation);
        }
        let idle = matches!(self.phase, Phase::Open) && self.requests.is_empty();
        // Nothing but a request keeps a lane: a peer may send other frames for ever.
        let still = self.idle.still(idle, self.last, now);
        let limit = self.settings.limits.idle_ms;
        if limit > 0 && still >= Duration::from_millis(limit.into()) {
            self.draining = true;
        }
        let parting = self.said_goodbye && self.requests.is_empty();
        let still = self.parting.still(parting, 0, now);
        if still >= Duration::from_millis(self.settings.limits.progress_ms.into()) {
            self.closed = Some(Closed::Retired);
        }
        let mut moved = 0u64;
        for (&request, open) in &mut self.requests {
            moved = moved.wrapping_add(open.moved);
            // It waits for the peer: for its bytes, or for it to take some. Offers go one behind the
            // other whosever they are, so enough that goes is progress.
            let (waits, moved) = match open.op {
                Op::Write => {
                    let moved = self.link.progress(request, moved);
                    (open.moved < open.length && self.link.takes(), moved)
                }
                Op::Read => {
                    let outbox = &self.link.outbox;
                    (outbox.holds(request), outbox.payload_sent / STRIDE)
                }
            };
            let active = waits && open.is_served() && !open.overdue;
            let still = open.progress.still(active, moved, now);
            if still >= Duration::from_millis(open.progress_ms.into()) {
                open.overdue = true;
                self.events.push_back(Told::Overdue(request));
            }
        }
    }

    /// What there is to tell, in order.
    pub fn event(&mut self) -> Option<Event<'_>> {
        self.settle();
        if let Some(told) = self.events.pop_front() {
            return Some(match told {
                Told::Asked(hello) => Event::Asked(hello),
                Told::Arrived(landing) => Event::Arrived(landing),
                Told::Released(release) => Event::Released(release),
                Told::Cancelled(request) => Event::Cancelled { request },
                Told::Overdue(request) => Event::Overdue { request },
            });
        }
        if !core::mem::take(&mut self.waiting) {
            return None;
        }
        self.told = true;
        let header = self.link.inbox.frame()?;
        let op = if header.kind == Kind::Write { Op::Write } else { Op::Read };
        let body = Request::parse(op, self.link.inbox.body()).ok()?;
        Some(Event::Request { request: header.request, body })
    }

    /// Why to close the connection. Send what [`outgoing`](Self::outgoing) still says, close the
    /// sending half, and read and drop what still arrives, all that for a bounded time: closing with
    /// unread bytes resets the connection, and the reason could be lost. Then tell
    /// [`disconnected`](Self::disconnected).
    pub fn closed(&self) -> Option<&Closed> {
        self.closed.as_ref()
    }

    /// The connection is gone, or the host has closed it. All offers are released; the open
    /// requests are those that the host may still be copying for.
    pub fn disconnected(&mut self) {
        let releases = self.link.outbox.clear();
        self.events.extend(releases.map(Told::Released));
        self.closed.get_or_insert(Closed::Gone);
        self.waiting = false;
    }
}

impl Open {
    /// Whether the host still serves it.
    fn is_served(&self) -> bool {
        self.status.is_none() && self.after.is_none()
    }
}
