//! The initiator's side of a lane: it asks.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::time::Duration;

use super::encoder::Encoded;
use super::frame::{self, Kind};
use super::hello::{Agreed, Hello, Hellos, Key, LaneName, MINOR, Nonce};
use super::inbox::{Incoming, Landing};
use super::limits::Limits;
use super::link::Link;
use super::outbox::{Outgoing, Release};
use super::request::Op;
use super::status::{Code, Status};
use super::violation::Violation;
use super::watch::Watch;
use super::{Closed, OfferError};
use crate::Id;

/// How an initiator speaks on one lane.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What this side takes; checked by [`Limits::check`].
    pub limits: Limits,
    /// DATA frames that this side takes from the beginning of each connection.
    pub credits: u32,
    /// This engine.
    pub incarnation: Id,
    /// The engine to talk to; another one is not.
    pub expected: Id,
    /// The session, the same for all its lanes.
    pub session: Id,
    /// Number of the lane.
    pub lane: u16,
    /// Lanes of the session.
    pub lanes: u16,
    /// With a key, only peers that prove that they have it are spoken to.
    pub key: Option<Key>,
    /// Whether payload shall have checksums.
    pub wants_checksums: bool,
    /// How many connections a request may be sent on before it ends as lost.
    pub attempts: u32,
    /// Requests that are kept at most, sent or not.
    pub queue: usize,
}

/// How a request ended. It ends once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Every byte is where it belongs: those of a WRITE are applied at the responder, those of a
    /// READ were all given to the host.
    Done,
    /// Not done, and the responder does not touch its memory for it any more.
    Failed(Status),
    /// The lane was lost, and not connected again, or too often.
    Lost {
        /// Whether the responder is known not to touch its memory for it any more. If not, it stops
        /// when it notices the loss, by its own deadlines.
        quiet: bool,
    },
}

/// What an initiator tells its host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The lane is open.
    Opened(Agreed),
    /// The request goes out. For a WRITE, offer its bytes, from the first one; what was offered
    /// before, on a lost connection, does not count. For a READ, its bytes come, from the first one.
    Begun {
        /// The request.
        request: u64,
    },
    /// An offer's slot is free.
    Released(Release),
    /// Payload is in its slot, whole: check its checksum, move it to its destination, and
    /// [`grant`](Initiator::grant) the slot again.
    Arrived(Landing),
    /// The peer takes no new requests on this connection.
    Draining,
    /// The request is over. The memory of this side is quiet as soon as the host's own copies are.
    Ended {
        /// The request.
        request: u64,
        /// How it ended.
        outcome: Outcome,
    },
}

/// The queue is full: wait for an [`Event::Ended`]. The request is given back.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the lane keeps {limit} requests already")]
pub struct Full {
    /// The request.
    pub request: Encoded,
    /// Requests that are kept at most.
    pub limit: usize,
}

mod frames;

#[derive(Debug)]
struct Open {
    encoded: Encoded,
    /// It was sent on this connection.
    sent: bool,
    /// It was sent on an earlier connection, whose end the responder may not have noticed.
    touched: bool,
    attempts: u32,
    /// Bytes that were offered, of a WRITE, or that arrived, of a READ, on this connection.
    moved: u64,
    cancelled: bool,
    /// What it ends as, whatever the responder says.
    verdict: Option<Status>,
    /// The request whose end is also its own.
    after: Option<u64>,
    /// The responder said that it ends by itself, later: which it may say once.
    put_off: bool,
    /// How it ended, while payload of it is still on its way.
    outcome: Option<Outcome>,
    /// DATA frames of the connection when the last one of a WRITE was gone.
    gone: Option<u64>,
    progress: Watch,
}

#[derive(Debug)]
enum Phase {
    Disconnected,
    Greeting(Hello),
    Proven { ours: Hello, theirs: Hello },
    Open,
}

/// The initiator's side of a lane, over all its connections.
///
/// For each connection: [`connect`](Self::connect), then read what [`incoming`](Self::incoming) says
/// and send what [`outgoing`](Self::outgoing) says, look at [`event`](Self::event) and
/// [`closed`](Self::closed) after each, call [`tick`](Self::tick) a few times per progress time, and
/// when the connection is gone, for whatever reason, [`disconnected`](Self::disconnected). Requests
/// outlive connections: what was not done is sent again on the next one, until
/// [`give_up`](Self::give_up).
#[derive(Debug)]
pub struct Initiator {
    settings: Settings,
    epoch: u64,
    phase: Phase,
    hellos: Hellos,
    link: Link,
    requests: BTreeMap<u64, Open>,
    /// The next request's number.
    next: u64,
    /// Requests from this one on were not sent on this connection.
    unsent: u64,
    in_flight: u32,
    cancels: VecDeque<u64>,
    /// The last request that the peer took before it said goodbye.
    goodbye: Option<u64>,
    retiring: bool,
    closed: Option<Closed>,
    events: VecDeque<Event>,
    spare: Vec<Vec<u8>>,
}

impl Initiator {
    /// Of a lane that was never connected.
    pub fn new(settings: Settings) -> Self {
        Self {
            link: Link::new(settings.limits),
            settings,
            epoch: 0,
            phase: Phase::Disconnected,
            hellos: Hellos::default(),
            requests: BTreeMap::new(),
            next: 1,
            unsent: 1,
            in_flight: 0,
            cancels: VecDeque::new(),
            goodbye: None,
            retiring: false,
            closed: None,
            events: VecDeque::new(),
            spare: Vec::new(),
        }
    }

    /// Begins a connection that was just made, when there is no other one. `nonce` is a new one.
    pub fn connect(&mut self, nonce: Nonce) {
        debug_assert!(matches!(self.phase, Phase::Disconnected));
        self.epoch += 1;
        let Settings { session, lane, lanes, .. } = self.settings;
        let hello = Hello {
            minor: MINOR,
            authenticates: self.settings.key.is_some(),
            wants_checksums: self.settings.wants_checksums,
            incarnation: self.settings.incarnation,
            expected: self.settings.expected,
            lane: LaneName { session, lane, lanes, epoch: self.epoch },
            nonce,
            limits: self.settings.limits,
            credits: self.settings.credits.min(self.settings.limits.credits),
        };
        self.hellos = Hellos::default();
        hello.encode(&mut self.hellos.initiator);
        let body = &self.hellos.initiator;
        frame::encode(self.link.outbox.framing(), Kind::Hello, 0, |out| {
            out.extend_from_slice(body);
        });
        self.phase = Phase::Greeting(hello);
    }

    /// The connection is gone, or the host has closed it. Requests stay, and are sent again on the
    /// next connection.
    pub fn disconnected(&mut self) {
        let releases = self.link.outbox.clear();
        self.events.extend(releases.map(Event::Released));
        self.link.clear();
        self.phase = Phase::Disconnected;
        self.cancels.clear();
        (self.closed, self.retiring, self.in_flight) = (None, false, 0);
        self.goodbye = None;
        let mut over = Vec::new();
        for (&request, open) in &mut self.requests {
            open.touched |= open.sent;
            (open.sent, open.after) = (false, None);
            over.extend(open.outcome.take().map(|outcome| (request, outcome)));
        }
        self.unsent = 0;
        over.into_iter().for_each(|(request, outcome)| self.finish(request, outcome));
    }

    /// Ends every request: there will be no other connection. Call it when disconnected.
    pub fn give_up(&mut self) {
        debug_assert!(matches!(self.phase, Phase::Disconnected));
        let all = self.requests.iter().map(|(&request, open)| (request, !open.touched));
        let all: Vec<_> = all.collect();
        all.into_iter().for_each(|(request, quiet)| self.finish(request, Outcome::Lost { quiet }));
    }

    /// Takes a request and says its number. It is sent as soon as the lane is open and the peer
    /// takes one more.
    ///
    /// # Errors
    /// If the queue is full.
    pub fn submit(&mut self, mut encoded: Encoded) -> Result<u64, Full> {
        if self.requests.len() >= self.settings.queue {
            return Err(Full { request: encoded, limit: self.settings.queue });
        }
        let request = self.next;
        self.next += 1;
        encoded.set_number(request);
        let open = Open {
            encoded,
            sent: false,
            touched: false,
            attempts: 0,
            moved: 0,
            cancelled: false,
            verdict: None,
            after: None,
            put_off: false,
            outcome: None,
            gone: None,
            progress: Watch::default(),
        };
        self.requests.insert(request, open);
        Ok(request)
    }

    /// Offers the next `length` bytes of a WRITE that has [`begun`](Event::Begun): they lie in a
    /// slot, and stay there until it is [`released`](Event::Released). Says where they begin.
    ///
    /// # Errors
    /// If the request does not take them (any more): the slot is free.
    pub fn offer(&mut self, request: u64, length: u32, checksum: u64) -> Result<u64, OfferError> {
        let none = OfferError::NotOpen { request };
        let agreed = self.link.agreed.filter(|_| self.closed.is_none()).ok_or(none)?;
        let open = self.requests.get_mut(&request);
        let open = open
            .filter(|open| open.sent && !open.cancelled && open.outcome.is_none())
            .filter(|open| open.encoded.op == Op::Write)
            .ok_or(none)?;
        let data = agreed.extent(request, open.moved, open.encoded.length, length, checksum)?;
        open.moved += u64::from(length);
        self.link.outbox.offer(request, data);
        Ok(data.offset)
    }

    /// Gives the request up. It ends when the responder does not touch its memory for it any more,
    /// or at once if it was not sent.
    pub fn cancel(&mut self, request: u64) {
        let Some(open) = self.requests.get_mut(&request) else { return };
        if open.cancelled || open.outcome.is_some() {
            return;
        }
        open.cancelled = true;
        open.progress = Watch::default();
        if !open.sent && !open.touched {
            return self.finish(request, cancelled());
        }
        if open.encoded.op == Op::Read {
            // Some of its bytes will be dropped, so it is not done even if the responder did it.
            open.verdict.get_or_insert(Status::new(Code::Cancelled, ""));
        }
        let sent = open.sent;
        self.drop_offers(request);
        self.link.inbox.discard(request);
        if sent {
            self.cancels.push_back(request);
        }
    }

    /// Gives the request up for a reason of this side, as a checksum that is wrong. It ends as
    /// failed with that status, even if the responder did all of it.
    pub fn fail(&mut self, request: u64, status: Status) {
        if let Some(open) = self.requests.get_mut(&request) {
            open.verdict.get_or_insert(status);
            self.cancel(request);
        }
    }

    /// Lets the peer send so many more DATA frames: that many slots are free. Says how many it
    /// takes; there are never more than the limit. Credits end with their connection: when the lane
    /// is opened again, the peer has those of the settings.
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

    /// Says that this side stops reading for lack of a slot, or goes on: the peer is not blamed for
    /// that time.
    pub fn hold(&mut self, held: bool) {
        self.link.held = held;
    }

    /// Ends the lane once no request is open, with a goodbye.
    pub fn retire(&mut self) {
        self.retiring = true;
    }

    /// Requests that have not ended.
    pub fn requests(&self) -> usize {
        self.requests.len()
    }

    /// A buffer of an ended request, for the next [`Encoder`](super::Encoder).
    pub fn buffer(&mut self) -> Vec<u8> {
        self.spare.pop().unwrap_or_default()
    }

    /// Bytes that are held for frames that arrive.
    pub fn held_bytes(&self) -> usize {
        self.link.inbox.held()
    }

    /// What the next received bytes are.
    pub fn incoming(&self) -> Incoming {
        match self.phase {
            Phase::Disconnected => Incoming::Nothing,
            _ if self.closed.is_some() => Incoming::Nothing,
            _ => self.link.inbox.incoming(),
        }
    }

    /// Takes bytes of frames and says how many it took: all of them, unless payload follows or the
    /// lane is closed.
    pub fn received(&mut self, bytes: &[u8]) -> usize {
        let mut taken = 0;
        while self.incoming() == Incoming::Framing {
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
            self.events.push_back(Event::Arrived(landing));
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
        let Some(release) = self.link.outbox.sent(count) else { return };
        self.events.push_back(Event::Released(release));
        let over = self.requests.get_mut(&release.request).and_then(|open| open.outcome.take());
        if let Some(outcome) = over {
            self.finish(release.request, outcome);
        }
    }

    /// Looks at all deadlines. `now` is any clock that only grows.
    pub fn tick(&mut self, now: Duration) {
        if self.closed.is_some() || matches!(self.phase, Phase::Disconnected) {
            return;
        }
        if let Err(violation) = self.link.tick(self.in_flight > 0, now) {
            return self.violated(violation);
        }
        let (mut late, mut unanswered) = (Vec::new(), None);
        let mut moved = 0u64;
        for (&request, open) in self.requests.iter_mut().filter(|(_, open)| open.sent) {
            let holds = self.link.outbox.holds(request);
            let whole = open.moved == open.encoded.length;
            // While it waits for the host's bytes, time is the host's.
            let waits = open.encoded.op == Op::Read || whole || holds || open.cancelled;
            moved = moved.wrapping_add(open.moved);
            let mut moved = self.link.progress(request, moved);
            // The frames of a WRITE leave one behind the other, and what the system took of them may
            // still be on its way for long. That frames up to its last one leave, and that the peer is
            // done with so many, is progress; later ones are none.
            if open.encoded.op == Op::Write {
                let outbox = &self.link.outbox;
                let last = match whole && !holds {
                    true => *open.gone.get_or_insert(outbox.begun),
                    false => u64::MAX,
                };
                let frames = outbox.begun.min(last) + outbox.returned.min(last);
                moved = moved.wrapping_add(frames);
            }
            let still = open.progress.still(waits && !self.link.held, moved, now);
            let limit = match open.encoded.progress_ms {
                0 if open.cancelled => self.settings.limits.progress_ms,
                0 => u32::MAX,
                limit => limit,
            };
            if still >= Duration::from_millis(limit.into()) {
                late.push(request);
                if open.cancelled {
                    unanswered = Some(u64::try_from(still.as_millis()).unwrap_or(u64::MAX));
                }
            }
        }
        if let Some(milliseconds) = unanswered {
            let what = "a cancelled request was not answered";
            return self.violated(Violation::Silence { what, milliseconds });
        }
        for request in late {
            self.fail(request, Status::new(Code::TimedOut, "it made no progress"));
        }
    }

    /// What there is to tell, in order.
    pub fn event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Why to close the connection. Send what [`outgoing`](Self::outgoing) still says, close the
    /// sending half, and read and drop what still arrives, all that for a bounded time: closing with
    /// unread bytes resets the connection, and the reason could be lost. Then tell
    /// [`disconnected`](Self::disconnected).
    pub fn closed(&self) -> Option<&Closed> {
        self.closed.as_ref()
    }
}

fn cancelled() -> Outcome {
    Outcome::Failed(Status::new(Code::Cancelled, ""))
}
