//! Which frames an initiator sends, and what those that come do to its requests.

use alloc::collections::VecDeque;
use alloc::string::ToString;
use alloc::vec::Vec;

use super::{Event, Initiator, Open, Outcome, Phase, cancelled};
use crate::batch::Closed;
use crate::batch::codec::Reader;
use crate::batch::frame::{self, Data, FrameHeader, Kind};
use crate::batch::hello::{Hello, HelloError, PROOF_LENGTH, Refused, Side};
use crate::batch::link::{SEND_LENGTH, accusation, decode_coded, farewell};
use crate::batch::request::Op;
use crate::batch::status::{Code, Farewell, Refusal, Status};
use crate::batch::violation::Violation;
use crate::batch::watch::Watch;

impl Initiator {
    /// Takes back the offers of a request that are not on their way.
    pub(super) fn drop_offers(&mut self, request: u64) {
        for release in self.link.outbox.drop_offers(request) {
            if let Some(open) = self.requests.get_mut(&request) {
                open.moved -= u64::from(release.length);
            }
            self.events.push_back(Event::Released(release));
        }
    }

    pub(super) fn append(&mut self) {
        self.link.append();
        for request in core::mem::take(&mut self.cancels) {
            if self.requests.contains_key(&request) {
                frame::encode(self.link.outbox.framing(), Kind::Cancel, request, |_| {});
            }
        }
        while self.link.outbox.waiting() < SEND_LENGTH && self.append_request() {}
        self.link.outbox.append_data();
        let done = self.in_flight == 0 && self.link.outbox.outgoing().payload.is_none();
        if done && self.goodbye.is_some() {
            self.closed = Some(Closed::Retired);
        } else if done && self.retiring && self.requests.is_empty() {
            self.link.append_goodbye(Farewell::Done, 0, "");
            self.closed = Some(Closed::Retired);
        }
    }

    /// Appends the next request, if there is one that may be sent.
    fn append_request(&mut self) -> bool {
        let Some(agreed) = self.link.agreed.filter(|_| self.goodbye.is_none()) else {
            return false;
        };
        if self.in_flight >= agreed.theirs.requests {
            return false;
        }
        let Some((&request, open)) = self.requests.range_mut(self.unsent..).next() else {
            return false;
        };
        self.unsent = request + 1;
        open.moved = 0;
        if let Err(error) = open.encoded.fits(&agreed.theirs) {
            let status = Status::new(Code::TooLarge, error.to_string());
            self.finish(request, Outcome::Failed(status));
            return true;
        }
        (open.sent, open.attempts) = (true, open.attempts + 1);
        (open.gone, open.progress, open.put_off) = (None, Watch::default(), false);
        self.in_flight += 1;
        self.link.outbox.framing().extend_from_slice(&open.encoded.bytes);
        self.events.push_back(Event::Begun { request });
        true
    }

    pub(super) fn handle(&mut self, header: FrameHeader) -> Result<(), Violation> {
        match self.phase {
            Phase::Disconnected => Ok(()),
            // It may come before anything else: of a responder that waited for too long, say.
            Phase::Greeting(_) | Phase::Proven { .. } if header.kind == Kind::Goodbye => {
                let (code, reason) = decode_coded(Kind::Goodbye, self.link.inbox.body())?;
                Err(accusation(Farewell::from_code(code), &reason))
            }
            Phase::Greeting(ours) => self.greeted(header, ours),
            Phase::Proven { ours, theirs } => self.welcomed(header, ours, theirs),
            Phase::Open => self.answered(header),
        }
    }

    fn greeted(&mut self, header: FrameHeader, ours: Hello) -> Result<(), Violation> {
        if header.kind == Kind::Refused {
            return self.refused();
        }
        if header.kind != Kind::Hello {
            let expected = "the responder's hello comes first";
            return Err(Violation::Unexpected { kind: header.kind, expected });
        }
        let body = self.link.inbox.body();
        let theirs = Hello::decode(body).map_err(|error| match error {
            HelloError::Malformed(reason) => Violation::Hello { reason },
            HelloError::Major(_) => Violation::Hello { reason: "another major version" },
        })?;
        if theirs.incarnation != ours.expected {
            let (expected, found) = (ours.expected, theirs.incarnation);
            return Err(Violation::WrongIncarnation { expected, found });
        }
        if theirs.lane != ours.lane || theirs.expected != ours.incarnation {
            return Err(Violation::Hello { reason: "it answers another one" });
        }
        if theirs.limits.check().is_err() {
            return Err(Violation::Hello { reason: "its limits are impossible" });
        }
        if theirs.authenticates != ours.authenticates {
            return Err(Violation::Unauthenticated);
        }
        self.hellos.responder = body.to_vec();
        self.link.inbox.done();
        if let Some(key) = &self.settings.key {
            let proof = key.prove(Side::Initiator, &self.hellos);
            frame::encode(self.link.outbox.framing(), Kind::Proof, 0, |out| {
                out.extend_from_slice(&proof);
            });
        }
        self.phase = Phase::Proven { ours, theirs };
        Ok(())
    }

    fn welcomed(
        &mut self,
        header: FrameHeader,
        ours: Hello,
        theirs: Hello,
    ) -> Result<(), Violation> {
        if header.kind == Kind::Refused {
            return self.refused();
        }
        if header.kind != Kind::Welcome {
            let expected = "the lane is not open yet";
            return Err(Violation::Unexpected { kind: header.kind, expected });
        }
        let body = self.link.inbox.body();
        if body.len() != PROOF_LENGTH {
            return Err(Violation::BodyLength { kind: header.kind, length: body.len() });
        }
        let key = self.settings.key.as_ref();
        if key.is_some_and(|key| !key.verifies(Side::Responder, &self.hellos, body)) {
            return Err(Violation::Unauthenticated);
        }
        self.link.inbox.done();
        let agreed = self.link.open(&ours, &theirs);
        self.phase = Phase::Open;
        self.events.push_back(Event::Opened(agreed));
        // The responder opens a lane only when nothing of its earlier connections is at work.
        let mut over = Vec::new();
        for (&request, open) in self.requests.iter_mut().filter(|(_, open)| open.touched) {
            open.touched = false;
            if open.cancelled {
                over.push((request, cancelled()));
            } else if open.attempts >= self.settings.attempts {
                over.push((request, Outcome::Lost { quiet: true }));
            }
        }
        over.into_iter().for_each(|(request, outcome)| self.finish(request, outcome));
        Ok(())
    }

    fn refused(&mut self) -> Result<(), Violation> {
        let (code, reason) = decode_coded(Kind::Refused, self.link.inbox.body())?;
        let refusal = Refusal::from_code(code);
        self.closed = Some(Closed::Refused(Refused { refusal, reason }));
        Ok(())
    }

    fn answered(&mut self, header: FrameHeader) -> Result<(), Violation> {
        if self.link.handle(header)? {
            return Ok(());
        }
        let FrameHeader { kind, request, .. } = header;
        match kind {
            Kind::Data => return self.data(request),
            Kind::Status => self.status(request)?,
            Kind::NotBefore => self.not_before(request)?,
            Kind::Goodbye => self.farewell(request)?,
            _ => {
                let expected = "a responder does not send it on an open lane";
                return Err(Violation::Unexpected { kind, expected });
            }
        }
        self.link.inbox.done();
        Ok(())
    }

    fn data(&mut self, request: u64) -> Result<(), Violation> {
        let data = Data::decode(self.link.inbox.body())?;
        self.link.use_credit(request)?;
        let none = Violation::NoSuchRequest { kind: Kind::Data, request };
        // A READ ends with a status behind its payload, so there is nothing that could cross.
        let open = self.requests.get_mut(&request).filter(|open| open.sent).ok_or(none.clone())?;
        if open.encoded.op != Op::Read {
            return Err(none);
        }
        let missing = open.encoded.length - open.moved;
        data.check(request, open.moved, missing, self.settings.limits.slot_bytes)?;
        open.moved += u64::from(data.length);
        let discard = open.cancelled;
        let checksums = self.link.agreed.is_some_and(|agreed| agreed.checksums);
        self.link.inbox.land(data.landing(request, checksums), discard);
        Ok(())
    }

    fn status(&mut self, request: u64) -> Result<(), Violation> {
        let (code, reason) = decode_coded(Kind::Status, self.link.inbox.body())?;
        let status = Status { code: Code::from_code(code), reason };
        let open = self.requests.get(&request);
        let open = open.filter(|open| open.sent && open.after.is_none() && open.outcome.is_none());
        let none = Violation::NoSuchRequest { kind: Kind::Status, request };
        let open = open.ok_or(none)?;
        if status.is_done() {
            // What was offered and not sent is as good as not offered.
            let unsent = if self.link.outbox.holds(request) { 1 } else { 0 };
            let missing = open.encoded.length - open.moved + unsent;
            if missing > 0 {
                return Err(Violation::EarlyDone { request, missing });
            }
            self.finish(request, Outcome::Done);
        } else {
            self.finish(request, Outcome::Failed(status));
        }
        Ok(())
    }

    fn not_before(&mut self, request: u64) -> Result<(), Violation> {
        let mut reader = Reader(self.link.inbox.body());
        let length = reader.0.len();
        let after = reader.u64().filter(|_| reader.0.is_empty());
        let after = after.ok_or(Violation::BodyLength { kind: Kind::NotBefore, length })?;
        let wrong = Violation::NotBefore { request, after };
        // Only a request that will have a status of its own can be waited for: no circles.
        let ends_itself =
            |open: &&Open| open.sent && open.after.is_none() && open.outcome.is_none();
        if self.requests.get(&after).filter(ends_itself).is_none() {
            return Err(wrong);
        }
        let open = self.requests.get_mut(&request);
        let open =
            open.filter(|open| open.cancelled && ends_itself(&&**open)).ok_or(wrong.clone())?;
        // Else a peer could put the end off for ever.
        if request == after && core::mem::replace(&mut open.put_off, true) {
            return Err(wrong);
        }
        open.progress = Watch::default();
        if request != after {
            open.after = Some(after);
        }
        Ok(())
    }

    fn farewell(&mut self, last: u64) -> Result<(), Violation> {
        let (code, reason) = decode_coded(Kind::Goodbye, self.link.inbox.body())?;
        let farewell = Farewell::from_code(code);
        if !matches!(farewell, Farewell::Done | Farewell::ShuttingDown) {
            return Err(accusation(farewell, &reason));
        }
        if self.goodbye.replace(last).is_some() {
            let expected = "there was a goodbye already";
            return Err(Violation::Unexpected { kind: Kind::Goodbye, expected });
        }
        // What the peer did not take waits for another connection.
        let untaken: Vec<_> =
            self.requests.range(last.saturating_add(1)..).map(|(&id, _)| id).collect();
        for request in untaken {
            let Some(open) = self.requests.get_mut(&request).filter(|open| open.sent) else {
                continue;
            };
            open.attempts -= 1;
            self.in_flight -= 1;
            let cancelled_too = open.cancelled;
            (open.sent, open.after) = (false, None);
            self.drop_offers(request);
            if cancelled_too {
                self.finish(request, cancelled());
            }
        }
        self.events.push_back(Event::Draining);
        Ok(())
    }

    /// Ends a request, and those that end with it, as soon as no payload of it is on its way.
    pub(super) fn finish(&mut self, request: u64, outcome: Outcome) {
        let mut over = VecDeque::from([(request, outcome)]);
        while let Some((request, outcome)) = over.pop_front() {
            self.drop_offers(request);
            let Some(open) = self.requests.get_mut(&request) else { continue };
            if self.link.outbox.sends(request) {
                open.outcome = Some(outcome);
                continue;
            }
            let Some(open) = self.requests.remove(&request) else { continue };
            if open.sent {
                self.in_flight -= 1;
            }
            let outcome = open.verdict.map_or(outcome, Outcome::Failed);
            self.events.push_back(Event::Ended { request, outcome });
            if self.spare.len() < 8 {
                self.spare.push(open.encoded.bytes);
            }
            let with = self.requests.iter().filter(|(_, open)| open.after == Some(request));
            over.extend(with.map(|(&request, _)| (request, cancelled())));
        }
    }

    pub(super) fn violated(&mut self, violation: Violation) {
        if let Some(farewell) = farewell(&violation) {
            self.link.append_goodbye(farewell, 0, &violation.to_string());
        }
        self.closed = Some(Closed::Violation(violation));
    }
}
