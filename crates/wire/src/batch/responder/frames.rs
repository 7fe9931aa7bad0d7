//! Which frames a responder sends, and what those that come do to its requests.

use alloc::collections::VecDeque;
use alloc::format;
use alloc::string::ToString;
use alloc::vec::Vec;

use super::{Open, Phase, Responder, Told};
use crate::batch::Closed;
use crate::batch::codec::Write;
use crate::batch::frame::{self, Data, FrameHeader, Kind};
use crate::batch::hello::{Hello, HelloError, MAJOR, MINOR, Side};
use crate::batch::link::{SEND_LENGTH, accusation, decode_coded, farewell};
use crate::batch::request::{Op, Request};
use crate::batch::status::{Farewell, Refusal, encode_coded};
use crate::batch::violation::Violation;
use crate::batch::watch::Watch;

impl Responder {
    /// Goes on behind a request that was told.
    pub(super) fn settle(&mut self) {
        if core::mem::take(&mut self.told) {
            self.link.inbox.done();
        }
    }

    /// Takes back the offers of a request that are not on their way.
    pub(super) fn drop_offers(&mut self, request: u64) {
        for release in self.link.outbox.drop_offers(request) {
            if let Some(open) = self.requests.get_mut(&request) {
                open.moved -= u64::from(release.length);
            }
            self.events.push_back(Told::Released(release));
        }
    }

    pub(super) fn append(&mut self) {
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

    pub(super) fn handle(&mut self, header: FrameHeader) -> Result<(), Violation> {
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
        // What the peer says may only be less: it must not decide for how long it may do nothing.
        let ours = self.settings.limits.progress_ms;
        let progress_ms = if body.progress_ms == 0 { ours } else { body.progress_ms.min(ours) };
        let open = Open {
            op,
            length: body.length,
            progress_ms,
            moved: 0,
            cancelled: false,
            status: None,
            after: None,
            overdue: false,
            put_off: false,
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

    pub(super) fn violated(&mut self, violation: Violation) {
        if let Some(farewell) = farewell(&violation) {
            self.link.append_goodbye(farewell, self.last, &violation.to_string());
        }
        self.closed = Some(Closed::Violation(violation));
    }
}
