//! The responder's side of a lane: it serves.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::time::Duration;

use super::codec::Write;
use super::frame::{self, Data, FrameHeader, Kind, Violation};
use super::hello::{
    Agreed, Hello, HelloError, Hellos, Key, MAJOR, MINOR, Nonce, PROOF_LENGTH, Refused, Side,
};
use super::inbox::{Incoming, Landing};
use super::limits::Limits;
use super::link::{Link, SEND_LENGTH, accusation, decode_coded, farewell};
use super::outbox::{Outgoing, Release};
use super::request::{Op, Request};
use super::status::{Farewell, Refusal, Status, encode_coded};
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
    /// The request has made no progress for as long as it allows.
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

#[derive(Debug)]
struct Open {
    op: Op,
    length: u64,
    progress_ms: u32,
    /// Bytes that arrived, of a WRITE, or that were offered, of a READ.
    moved: u64,
    cancelled: bool,
    /// How the host finished it, while its status is not on its way.
    status: Option<Status>,
    /// The request whose end is also its own.
    after: Option<u64>,
    overdue: bool,
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
    /// [`finish`](Self::finish); if it is itself, it does.
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
        let still = self.idle.still(idle, self.link.inbox.frames, now);
        let limit = self.settings.limits.idle_ms;
        if limit > 0 && still >= Duration::from_millis(limit.into()) {
            self.draining = true;
        }
        let parting = self.said_goodbye && self.requests.is_empty();
        let still = self.parting.still(parting, 0, now);
        if still >= Duration::from_millis(self.settings.limits.progress_ms.into()) {
            self.closed = Some(Closed::Retired);
        }
        for (&request, open) in &mut self.requests {
            let moved = open.moved;
            let active = open.progress_ms > 0 && open.is_served() && !open.overdue;
            let still = open.progress.still(active, moved, now);
            if active && still >= Duration::from_millis(open.progress_ms.into()) {
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

    /// Goes on behind a request that was told.
    fn settle(&mut self) {
        if core::mem::take(&mut self.told) {
            self.link.inbox.done();
        }
    }

    /// Takes back the offers of a request that are not on their way.
    fn drop_offers(&mut self, request: u64) {
        for release in self.link.outbox.drop_offers(request) {
            if let Some(open) = self.requests.get_mut(&request) {
                open.moved -= u64::from(release.length);
            }
            self.events.push_back(Told::Released(release));
        }
    }

    fn append(&mut self) {
        self.link.append();
        for (request, after) in core::mem::take(&mut self.notices) {
            frame::encode(self.link.outbox.framing(), Kind::NotBefore, request, |out| {
                out.u64(after);
            });
        }
        let mut later = VecDeque::new();
        while let Some(request) = self.finished.pop_front() {
            if self.link.outbox.waiting() >= SEND_LENGTH || self.link.outbox.holds(request) {
                later.push_back(request);
            } else {
                self.append_status(request);
            }
        }
        self.finished = later;
        if self.draining && !self.said_goodbye {
            self.said_goodbye = true;
            self.link.append_goodbye(Farewell::ShuttingDown, self.last, "");
        }
        self.link.outbox.append_data();
        // After its own goodbye it waits for the initiator to close: closing first, with unread
        // bytes, could take statuses back that are on their way.
        if self.requests.is_empty() && self.heard_goodbye {
            self.closed = Some(Closed::Retired);
        }
    }

    /// Ends a request, and those that end with it.
    fn append_status(&mut self, request: u64) {
        let Some(Open { status: Some(status), .. }) = self.requests.remove(&request) else {
            return;
        };
        frame::encode(self.link.outbox.framing(), Kind::Status, request, |out| {
            encode_coded(out, status.code.code(), &status.reason);
        });
        let mut over = Vec::from([request]);
        while let Some(ended) = over.pop() {
            let with = self.requests.extract_if(.., |_, open| open.after == Some(ended));
            over.extend(with.map(|(request, _)| request));
        }
    }

    fn handle(&mut self, header: FrameHeader) -> Result<(), Violation> {
        match self.phase {
            Phase::Silent => self.greeted(header),
            Phase::Greeted { ours, theirs } => self.proven(header, ours, theirs),
            Phase::Asked { .. } => {
                let expected = "the lane is not open yet";
                Err(Violation::Unexpected { kind: header.kind, expected })
            }
            Phase::Open => self.asked(header),
        }
    }

    fn greeted(&mut self, header: FrameHeader) -> Result<(), Violation> {
        if header.kind != Kind::Hello {
            let expected = "the initiator's hello comes first";
            return Err(Violation::Unexpected { kind: header.kind, expected });
        }
        let body = self.link.inbox.body();
        let theirs = match Hello::decode(body) {
            Ok(theirs) => theirs,
            Err(HelloError::Malformed(reason)) => return Err(Violation::Hello { reason }),
            Err(HelloError::Major(theirs)) => {
                let reason =
                    format!("the initiator speaks major version {theirs}, this engine {MAJOR}");
                self.refuse(Refusal::UnknownVersion, &reason);
                return Ok(());
            }
        };
        self.hellos.initiator = body.to_vec();
        if theirs.expected != self.settings.incarnation {
            let reason = format!(
                "this is engine {}, not {}: it was restarted, or another one has its port",
                self.settings.incarnation, theirs.expected
            );
            self.refuse(Refusal::WrongIncarnation, &reason);
            return Ok(());
        }
        if let Err(error) = theirs.limits.check() {
            self.refuse(Refusal::BadLimits, &error.to_string());
            return Ok(());
        }
        if self.settings.key.is_some() && !theirs.authenticates {
            self.refuse(
                Refusal::AuthenticationRequired,
                "this engine serves peers with its key only",
            );
            return Ok(());
        }
        self.link.inbox.done();
        let ours = Hello {
            minor: MINOR,
            authenticates: self.settings.key.is_some(),
            wants_checksums: self.settings.wants_checksums,
            incarnation: self.settings.incarnation,
            expected: theirs.incarnation,
            lane: theirs.lane,
            nonce: self.nonce,
            limits: self.settings.limits,
            credits: self.settings.credits.min(self.settings.limits.credits),
        };
        ours.encode(&mut self.hellos.responder);
        let body = &self.hellos.responder;
        frame::encode(self.link.outbox.framing(), Kind::Hello, 0, |out| {
            out.extend_from_slice(body);
        });
        if self.settings.key.is_some() {
            self.phase = Phase::Greeted { ours, theirs };
        } else {
            self.phase = Phase::Asked { ours, theirs };
            self.events.push_back(Told::Asked(theirs));
        }
        Ok(())
    }

    fn proven(&mut self, header: FrameHeader, ours: Hello, theirs: Hello) -> Result<(), Violation> {
        if header.kind != Kind::Proof {
            let expected = "the initiator's proof comes next";
            return Err(Violation::Unexpected { kind: header.kind, expected });
        }
        let body = self.link.inbox.body();
        let key = self.settings.key.as_ref();
        if key.is_some_and(|key| !key.verifies(Side::Initiator, &self.hellos, body)) {
            self.refuse(
                Refusal::AuthenticationFailed,
                "the proof is not one with this engine's key",
            );
            return Ok(());
        }
        self.link.inbox.done();
        self.phase = Phase::Asked { ours, theirs };
        self.events.push_back(Told::Asked(theirs));
        Ok(())
    }

    fn asked(&mut self, header: FrameHeader) -> Result<(), Violation> {
        if self.link.handle(header)? {
            return Ok(());
        }
        let FrameHeader { kind, request, .. } = header;
        match kind {
            Kind::Write => return self.request(request, Op::Write),
            Kind::Read => return self.request(request, Op::Read),
            Kind::Data => return self.data(request),
            Kind::Cancel => self.cancel(request)?,
            Kind::Goodbye => {
                let (code, reason) = decode_coded(kind, self.link.inbox.body())?;
                let farewell = Farewell::from_code(code);
                if !matches!(farewell, Farewell::Done | Farewell::ShuttingDown) {
                    return Err(accusation(farewell, &reason));
                }
                self.heard_goodbye = true;
            }
            _ => {
                let expected = "an initiator does not send it on an open lane";
                return Err(Violation::Unexpected { kind, expected });
            }
        }
        self.link.inbox.done();
        Ok(())
    }

    fn request(&mut self, request: u64, op: Op) -> Result<(), Violation> {
        if request <= self.last || self.heard_goodbye {
            return Err(Violation::RequestOrder { request, last: self.last });
        }
        if self.said_goodbye {
            // The initiator sent it before it heard that, and will send it elsewhere.
            self.last = request;
            self.link.inbox.done();
            return Ok(());
        }
        let limit = self.settings.limits.requests;
        if self.requests.len() >= limit as usize {
            return Err(Violation::TooManyRequests { request, limit });
        }
        let body = Request::decode(op, self.link.inbox.body(), &self.settings.limits)
            .map_err(|error| Violation::Request { request, error })?;
        let open = Open {
            op,
            length: body.length,
            progress_ms: body.progress_ms,
            moved: 0,
            cancelled: false,
            status: None,
            after: None,
            overdue: false,
            progress: Watch::default(),
        };
        self.requests.insert(request, open);
        self.last = request;
        self.waiting = true;
        Ok(())
    }

    fn data(&mut self, request: u64) -> Result<(), Violation> {
        let data = Data::decode(self.link.inbox.body())?;
        self.link.use_credit(request)?;
        let none = Violation::NoSuchRequest { kind: Kind::Data, request };
        let slot_bytes = self.settings.limits.slot_bytes;
        let checksums = self.link.agreed.is_some_and(|agreed| agreed.checksums);
        let discard = match self.requests.get_mut(&request) {
            Some(Open { op: Op::Read, .. }) => return Err(none),
            Some(open) => {
                data.check(request, open.moved, open.length - open.moved, slot_bytes)?;
                open.moved += u64::from(data.length);
                !open.is_served()
            }
            // It ended while these bytes were on their way.
            None if request > 0 && request <= self.last => {
                data.check(request, data.offset, u64::MAX, slot_bytes)?;
                true
            }
            None => return Err(none),
        };
        self.link.inbox.land(data.landing(request, checksums), discard);
        Ok(())
    }

    fn cancel(&mut self, request: u64) -> Result<(), Violation> {
        if request == 0 || request > self.last {
            return Err(Violation::NoSuchRequest { kind: Kind::Cancel, request });
        }
        // One that has ended was answered by its status.
        let open = self.requests.get_mut(&request);
        if let Some(open) = open.filter(|open| open.is_served() && !open.cancelled) {
            open.cancelled = true;
            self.drop_offers(request);
            self.events.push_back(Told::Cancelled(request));
        }
        Ok(())
    }

    fn violated(&mut self, violation: Violation) {
        if let Some(farewell) = farewell(&violation) {
            self.link.append_goodbye(farewell, self.last, &violation.to_string());
        }
        self.closed = Some(Closed::Violation(violation));
    }
}

impl Open {
    /// Whether the host still serves it.
    fn is_served(&self) -> bool {
        self.status.is_none() && self.after.is_none()
    }
}
