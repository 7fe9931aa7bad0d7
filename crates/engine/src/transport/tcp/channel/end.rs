//! What the machines of both sides have in common.

use std::time::Duration;

use kvferry_wire::batch::{Closed, Incoming, Initiator, OfferError, Outgoing, Responder};

/// What both machines have in common.
pub(in super::super) trait End {
    fn incoming(&self) -> Incoming;
    fn received(&mut self, bytes: &[u8]) -> usize;
    fn received_payload(&mut self, count: u32);
    fn outgoing(&mut self) -> Outgoing<'_>;
    fn sent(&mut self, count: usize);
    fn tick(&mut self, now: Duration);
    fn hold(&mut self, held: bool);
    fn grant(&mut self, slots: u32) -> u32;
    fn closed(&self) -> Option<&Closed>;
    fn offer(&mut self, request: u64, length: u32, checksum: u64) -> Result<u64, OfferError>;
}

macro_rules! ends {
    ($($machine:ident)*) => {
        $(impl End for $machine {
            fn incoming(&self) -> Incoming {
                self.incoming()
            }
            fn received(&mut self, bytes: &[u8]) -> usize {
                self.received(bytes)
            }
            fn received_payload(&mut self, count: u32) {
                self.received_payload(count);
            }
            fn outgoing(&mut self) -> Outgoing<'_> {
                self.outgoing()
            }
            fn sent(&mut self, count: usize) {
                self.sent(count);
            }
            fn tick(&mut self, now: Duration) {
                self.tick(now);
            }
            fn hold(&mut self, held: bool) {
                self.hold(held);
            }
            fn grant(&mut self, slots: u32) -> u32 {
                self.grant(slots)
            }
            fn closed(&self) -> Option<&Closed> {
                self.closed()
            }
            fn offer(&mut self, request: u64, length: u32, checksum: u64) -> Result<u64, OfferError> {
                self.offer(request, length, checksum)
            }
        })*
    };
}

ends! { Initiator Responder }
