//! What one side receives: whole frames, and payload that the host reads by itself.

use alloc::vec::Vec;

use super::frame::{FrameHeader, HEADER_LENGTH};
use super::violation::Violation;

/// What the next received bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// Nothing is read: the lane is closed.
    Nothing,
    /// Framing: pass what arrives to `received`.
    Framing,
    /// Payload: read it to where it belongs and tell `received_payload`.
    Payload(Landing),
    /// So many bytes of payload that nobody wants any more: drop them and tell `received_payload`.
    Discard(u32),
}

/// Payload that arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Landing {
    /// Its request.
    pub request: u64,
    /// Where it begins in the request's bytes.
    pub offset: u64,
    /// Its bytes: they fit into one slot.
    pub length: u32,
    /// Bytes of it that were received; the rest is next.
    pub received: u32,
    /// What its sender computed over it, as [`crate::checksum::of`]; none if the lane has no
    /// checksums.
    pub checksum: Option<u64>,
}

#[derive(Debug)]
pub(super) struct Inbox {
    header: [u8; HEADER_LENGTH],
    count: usize,
    frame: Option<FrameHeader>,
    body: Vec<u8>,
    /// Whether `body` holds a whole frame.
    whole: bool,
    landing: Option<Landing>,
    discard: bool,
    /// Bytes that arrived, ever.
    pub(super) received: u64,
    /// Frames that were whole, payload included, ever.
    pub(super) frames: u64,
}

impl Inbox {
    pub(super) fn new() -> Self {
        Self {
            header: [0; HEADER_LENGTH],
            count: 0,
            frame: None,
            body: Vec::new(),
            whole: false,
            landing: None,
            discard: false,
            received: 0,
            frames: 0,
        }
    }

    pub(super) fn incoming(&self) -> Incoming {
        match self.landing {
            None => Incoming::Framing,
            Some(landing) if self.discard => Incoming::Discard(landing.length - landing.received),
            Some(landing) => Incoming::Payload(landing),
        }
    }

    /// Takes bytes of at most one frame, whose body is at most `limit` bytes with its header. Never
    /// holds more than arrived.
    pub(super) fn received(&mut self, bytes: &[u8], limit: u32) -> Result<usize, Violation> {
        if self.whole || self.landing.is_some() {
            return Ok(0);
        }
        let taken = bytes.len().min(HEADER_LENGTH - self.count);
        self.header[self.count..self.count + taken].copy_from_slice(&bytes[..taken]);
        self.count += taken;
        self.received += taken as u64;
        if self.count < HEADER_LENGTH {
            return Ok(taken);
        }
        let frame = match self.frame {
            Some(frame) => frame,
            None => {
                self.body.clear();
                *self.frame.insert(FrameHeader::decode(&self.header, limit)?)
            }
        };
        let rest = &bytes[taken..];
        let missing = frame.length as usize - self.body.len();
        let rest = &rest[..rest.len().min(missing)];
        self.body.extend_from_slice(rest);
        self.received += rest.len() as u64;
        self.whole = self.body.len() == frame.length as usize;
        Ok(taken + rest.len())
    }

    /// The frame that is whole, until it is [`done`](Self::done).
    pub(super) fn frame(&self) -> Option<FrameHeader> {
        self.frame.filter(|_| self.whole)
    }

    pub(super) fn body(&self) -> &[u8] {
        &self.body
    }

    /// Goes on to the next frame.
    pub(super) fn done(&mut self) {
        (self.count, self.frame, self.whole) = (0, None, false);
        self.frames += 1;
    }

    /// Goes on to a payload, to the host's memory or to nowhere.
    pub(super) fn land(&mut self, landing: Landing, discard: bool) {
        (self.count, self.frame, self.whole) = (0, None, false);
        (self.landing, self.discard) = (Some(landing), discard);
    }

    /// Takes note of payload that was read; returns it once it is whole, and whether nobody wanted
    /// it.
    pub(super) fn received_payload(&mut self, count: u32) -> Option<(Landing, bool)> {
        let landing = self.landing.as_mut()?;
        let moved = count.min(landing.length - landing.received);
        landing.received += moved;
        self.received += u64::from(moved);
        if landing.received < landing.length {
            return None;
        }
        self.frames += 1;
        self.landing.take().map(|landing| (landing, self.discard))
    }

    /// Drops what is still to come of a payload of that request.
    pub(super) fn discard(&mut self, request: u64) {
        if self.landing.is_some_and(|landing| landing.request == request) {
            self.discard = true;
        }
    }

    /// Whether a frame has begun that is not whole, as far as the other side can help: a payload
    /// counts from its first byte, since before that this side may be waiting for a slot.
    pub(super) fn is_within_frame(&self) -> bool {
        match self.landing {
            Some(landing) => landing.received > 0,
            None => self.count > 0 && !self.whole,
        }
    }

    /// Bytes that came of the payload on its way here, if it is of that request or an earlier one.
    pub(super) fn landed(&self, request: u64) -> u64 {
        self.landing.filter(|it| it.request <= request).map_or(0, |it| it.received.into())
    }

    /// Whether payload is on its way here.
    pub(super) fn is_landing(&self) -> bool {
        self.landing.is_some()
    }

    /// Bytes that are held for frames.
    pub(super) fn held(&self) -> usize {
        self.body.capacity()
    }
}
