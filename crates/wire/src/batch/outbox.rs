//! What one side sends: framing, and payload right behind the frame that announces it.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::frame::Data;

/// What is sent next: `framing`, and behind it the bytes of `payload`, if there is one. Both may go
/// in one call of the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outgoing<'a> {
    /// Bytes of frames.
    pub framing: &'a [u8],
    /// Bytes of the host's.
    pub payload: Option<Departure>,
}

impl Outgoing<'_> {
    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.framing.is_empty() && self.payload.is_none()
    }
}

/// Payload on its way: bytes that the host offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departure {
    /// Its request.
    pub request: u64,
    /// Where the offer begins in the request's bytes.
    pub offset: u64,
    /// Bytes of the offer.
    pub length: u32,
    /// Bytes of it that were sent; the rest is next.
    pub sent: u32,
}

/// An offer whose bytes the lane does not need any more: free its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Release {
    /// Its request.
    pub request: u64,
    /// Where the offer began in the request's bytes.
    pub offset: u64,
    /// Its bytes.
    pub length: u32,
    /// Whether they were sent. They were not if the request or the lane ended.
    pub sent: bool,
}

#[derive(Debug, Default)]
pub(super) struct Outbox {
    framing: Vec<u8>,
    at: usize,
    payload: Option<Departure>,
    offers: VecDeque<(u64, Data)>,
    /// DATA frames that the other side takes.
    pub(super) credits: u32,
    /// Bytes that were handed to the socket, ever.
    pub(super) sent: u64,
    /// Those of them that were payload.
    pub(super) payload_sent: u64,
    /// DATA frames that were begun, ever.
    pub(super) begun: u64,
    /// Credits that came, ever: the other side is done with that many DATA frames.
    pub(super) returned: u64,
}

impl Outbox {
    /// Puts an offer behind the others.
    pub(super) fn offer(&mut self, request: u64, data: Data) {
        self.offers.push_back((request, data));
    }

    /// Whether the next frame may be appended: nothing goes behind a payload that is not sent yet.
    pub(super) fn is_ready(&self) -> bool {
        self.at == self.framing.len() && self.payload.is_none()
    }

    /// Where frames are appended while the outbox is ready.
    pub(super) fn framing(&mut self) -> &mut Vec<u8> {
        if self.at == self.framing.len() {
            self.framing.clear();
            self.at = 0;
        }
        &mut self.framing
    }

    /// Bytes of framing that are not sent yet.
    pub(super) fn waiting(&self) -> usize {
        self.framing.len() - self.at
    }

    /// Appends the next offer's frame, if there is one and a credit for it.
    pub(super) fn append_data(&mut self) {
        if self.payload.is_some() || self.credits == 0 {
            return;
        }
        let Some((request, data)) = self.offers.pop_front() else { return };
        self.credits -= 1;
        self.begun += 1;
        data.encode(&mut self.framing, request);
        let Data { offset, length, .. } = data;
        self.payload = Some(Departure { request, offset, length, sent: 0 });
    }

    pub(super) fn outgoing(&self) -> Outgoing<'_> {
        Outgoing { framing: &self.framing[self.at..], payload: self.payload }
    }

    /// Takes note of bytes that were sent; returns the offer that is through.
    pub(super) fn sent(&mut self, count: usize) -> Option<Release> {
        let framing = count.min(self.waiting());
        self.at += framing;
        self.sent += framing as u64;
        let payload = self.payload.as_mut().filter(|_| self.at == self.framing.len())?;
        let moved = (count - framing).min((payload.length - payload.sent) as usize) as u32;
        payload.sent += moved;
        self.sent += u64::from(moved);
        self.payload_sent += u64::from(moved);
        if payload.sent < payload.length {
            return None;
        }
        let &mut Departure { request, offset, length, .. } = payload;
        self.payload = None;
        Some(Release { request, offset, length, sent: true })
    }

    /// Takes back the offers of a request of which no byte is on its way.
    pub(super) fn drop_offers(&mut self, request: u64) -> impl Iterator<Item = Release> + use<> {
        let offers = core::mem::take(&mut self.offers);
        let (dropped, kept) = offers.into_iter().partition(|&(of, _)| of == request);
        self.offers = kept;
        let dropped: VecDeque<_> = dropped;
        dropped.into_iter().map(unsent)
    }

    /// Takes back everything: the connection is gone.
    pub(super) fn clear(&mut self) -> impl Iterator<Item = Release> + use<> {
        let Self { payload, offers, .. } = core::mem::take(self);
        let started = payload.map(|departure| {
            let Departure { request, offset, length, .. } = departure;
            Release { request, offset, length, sent: false }
        });
        started.into_iter().chain(offers.into_iter().map(unsent))
    }

    /// Bytes that are sent of the payload on its way, if it is of that request or an earlier one.
    pub(super) fn leaving(&self, request: u64) -> u64 {
        self.payload.filter(|it| it.request <= request).map_or(0, |it| it.sent.into())
    }

    /// Whether payload of that request is on its way or was offered.
    pub(super) fn holds(&self, request: u64) -> bool {
        self.sends(request) || self.offers.iter().any(|&(of, _)| of == request)
    }

    /// Whether payload of that request is on its way and cannot be taken back.
    pub(super) fn sends(&self, request: u64) -> bool {
        self.payload.is_some_and(|departure| departure.request == request)
    }
}

fn unsent((request, Data { offset, length, .. }): (u64, Data)) -> Release {
    Release { request, offset, length, sent: false }
}
