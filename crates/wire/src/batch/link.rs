//! What both sides of an open lane do alike: credits, signs of life, deadlines.

use alloc::string::ToString;
use core::time::Duration;

use super::codec::{Reader, Write};
use super::frame::{self, FrameHeader, GREETING_LENGTH, Kind};
use super::hello::{Agreed, Hello};
use super::inbox::Inbox;
use super::limits::Limits;
use super::outbox::Outbox;
use super::status::{Farewell, Refusal, decode_reason, encode_coded};
use super::violation::Violation;
use super::watch::Watch;

/// Framing that is put together for one send, about.
pub(super) const SEND_LENGTH: usize = 64 << 10;

/// Bytes that have to go within each progress time, if there are so many: fewer are no use to anybody, and
/// a peer that takes one now and then would keep slots for as long as it likes.
pub(super) const STRIDE: u64 = 256 << 10;

#[derive(Debug)]
pub(super) struct Link {
    pub(super) ours: Limits,
    /// None until the lane is open.
    pub(super) agreed: Option<Agreed>,
    pub(super) inbox: Inbox,
    pub(super) outbox: Outbox,
    /// DATA frames that the other side may still send.
    granted: u32,
    /// Of them, those that it was not told of.
    untold: u32,
    pong: Option<u64>,
    ping: Option<u64>,
    pings: u64,
    /// This side does not read, for lack of a slot.
    pub(super) held: bool,
    greeting: Watch,
    frame: Watch,
    silence: Watch,
    stall: Watch,
    mute: Watch,
}

impl Link {
    pub(super) fn new(ours: Limits) -> Self {
        Self {
            ours,
            agreed: None,
            inbox: Inbox::new(),
            outbox: Outbox::default(),
            granted: 0,
            untold: 0,
            pong: None,
            ping: None,
            pings: 0,
            held: false,
            greeting: Watch::default(),
            frame: Watch::default(),
            silence: Watch::default(),
            stall: Watch::default(),
            mute: Watch::default(),
        }
    }

    /// Forgets a lost connection, of which the outbox was cleared.
    pub(super) fn clear(&mut self) {
        *self = Self::new(self.ours);
    }

    /// Goes on from the hellos to requests.
    pub(super) fn open(&mut self, ours: &Hello, theirs: &Hello) -> Agreed {
        let agreed = Agreed::new(ours, theirs);
        self.agreed = Some(agreed);
        self.outbox.credits = theirs.credits;
        (self.granted, self.untold) = (ours.credits, 0);
        agreed
    }

    /// Longest frame that this side takes now.
    pub(super) fn frame_limit(&self) -> u32 {
        if self.agreed.is_some() { self.ours.frame_bytes } else { GREETING_LENGTH }
    }

    /// Lets the other side send more DATA frames, up to this side's limit. Says how many more.
    pub(super) fn grant(&mut self, count: u32) -> u32 {
        let count = count.min(self.ours.credits - self.granted);
        self.granted += count;
        self.untold += count;
        count
    }

    pub(super) fn granted(&self) -> u32 {
        self.granted
    }

    /// Whether the other side may send payload now, as far as it is this side's.
    pub(super) fn takes(&self) -> bool {
        !self.held && (self.granted > 0 || self.inbox.is_landing())
    }

    /// Takes a credit back for a DATA frame that came.
    pub(super) fn use_credit(&mut self, request: u64) -> Result<(), Violation> {
        // One that the other side was not told of cannot be what it used.
        if self.granted == self.untold {
            return Err(Violation::CreditOverrun { request });
        }
        self.granted -= 1;
        Ok(())
    }

    /// Handles a frame that both sides handle alike; false if it is another one.
    pub(super) fn handle(&mut self, header: FrameHeader) -> Result<bool, Violation> {
        let body = self.inbox.body();
        let wrong = Violation::BodyLength { kind: header.kind, length: body.len() };
        match header.kind {
            Kind::Credit => {
                let mut reader = Reader(body);
                let count = reader.u32().filter(|_| reader.0.is_empty()).ok_or(wrong)?;
                let credits = u64::from(self.outbox.credits) + u64::from(count);
                let limit = self.agreed.map_or(0, |agreed| agreed.theirs.credits);
                if credits > limit.into() {
                    return Err(Violation::CreditOverflow { credits, limit });
                }
                self.outbox.credits = credits as u32;
                self.outbox.returned += u64::from(count);
            }
            Kind::Ping if body.is_empty() => self.pong = Some(header.request),
            Kind::Pong if body.is_empty() => {}
            Kind::Ping | Kind::Pong => return Err(wrong),
            _ => return Ok(false),
        }
        self.inbox.done();
        Ok(true)
    }

    /// Appends the frames that both sides send alike.
    pub(super) fn append(&mut self) {
        let framing = self.outbox.framing();
        if let Some(number) = self.pong.take() {
            frame::encode(framing, Kind::Pong, number, |_| {});
        }
        if let Some(number) = self.ping.take() {
            frame::encode(framing, Kind::Ping, number, |_| {});
        }
        let untold = core::mem::take(&mut self.untold);
        if untold > 0 {
            frame::encode(framing, Kind::Credit, 0, |out| out.u32(untold));
        }
    }

    /// Appends a goodbye, unless payload is on its way: nothing can be said then.
    pub(super) fn append_goodbye(&mut self, farewell: Farewell, last: u64, reason: &str) {
        if self.outbox.outgoing().payload.is_none() {
            frame::encode(self.outbox.framing(), Kind::Goodbye, last, |out| {
                encode_coded(out, farewell.code(), reason);
            });
        }
    }

    pub(super) fn append_refusal(&mut self, refusal: Refusal, reason: &str) {
        frame::encode(self.outbox.framing(), Kind::Refused, 0, |out| {
            encode_coded(out, refusal.code(), reason);
        });
    }

    /// A number that stands still while neither that request moves nor one before it, which it may
    /// have to wait for. `moved` are the bytes of them all, as far as they are counted by the frame.
    pub(super) fn progress(&self, request: u64, moved: u64) -> u64 {
        moved.wrapping_add(self.inbox.landed(request)).wrapping_add(self.outbox.leaving(request))
    }

    /// Looks at all deadlines of the lane. `waiting`: this side has requests open.
    pub(super) fn tick(&mut self, waiting: bool, now: Duration) -> Result<(), Violation> {
        let limit = Duration::from_millis(self.ours.progress_ms.into());
        let late = |still: Duration, what| {
            let milliseconds = u64::try_from(still.as_millis()).unwrap_or(u64::MAX);
            if still >= limit { Err(Violation::Silence { what, milliseconds }) } else { Ok(()) }
        };
        let Self { inbox, outbox, .. } = self;
        let reading = !self.held;
        late(self.greeting.still(self.agreed.is_none(), 0, now), "no hello was completed")?;
        let within = inbox.is_within_frame() && reading;
        late(self.frame.still(within, inbox.frames, now), "a frame was not whole")?;
        let sends = !outbox.outgoing().is_empty();
        late(self.stall.still(sends, outbox.sent / STRIDE, now), "too little could be sent")?;
        let waits = self.agreed.is_some() && reading && (waiting || inbox.is_landing());
        late(self.silence.still(waits, inbox.received, now), "nothing came")?;
        // The other side's patience: a sign of life for each third of it.
        let patience = self.agreed.map(|agreed| agreed.theirs.progress_ms);
        let still = self.mute.still(waiting && patience.is_some(), outbox.sent, now);
        if patience.is_some_and(|patience| still >= Duration::from_millis(patience.into()) / 3) {
            self.pings += 1;
            self.ping = Some(self.pings);
            self.mute = Watch::default();
        }
        Ok(())
    }
}

/// A body of a code and a reason.
pub(super) fn decode_coded(
    kind: Kind,
    body: &[u8],
) -> Result<(u32, alloc::string::String), Violation> {
    let mut reader = Reader(body);
    let wrong = Violation::BodyLength { kind, length: body.len() };
    let code = reader.u32().ok_or(wrong.clone())?;
    if reader.0.len() > super::status::REASON_LENGTH {
        return Err(wrong);
    }
    Ok((code, decode_reason(reader.0)))
}

/// The words for a lane that a peer closes.
pub(super) fn accusation(farewell: Farewell, reason: &str) -> Violation {
    let reason = if reason.is_empty() { farewell.to_string() } else { reason.to_string() };
    Violation::Accused { reason }
}

/// What to say to a peer before a lane is closed for this.
pub(super) fn farewell(violation: &Violation) -> Option<Farewell> {
    match violation {
        Violation::Accused { .. } => None,
        Violation::Silence { .. } => Some(Farewell::Silence),
        _ => Some(Farewell::Violation),
    }
}
