//! The batch protocol: many ranges per request, many requests per connection, over several
//! connections (lanes) side by side. `docs/wire.md` is its specification.
//!
//! [`Initiator`] is the side of a lane that asks, over all the lane's connections; [`Responder`] is
//! the side that serves, over one connection. [`Lanes`] keeps a lane on one connection at a time.
//! They own the order of frames, credits, deadlines and the end of every request; the host owns
//! sockets, slots, copies and the clock. Payload never passes through them.
//!
//! Memory is named by segment, generation and offset. Whether a segment is there, and a range inside
//! it, is the host's to check; everything else about a request is checked when it arrives.

mod codec;
mod encoder;
mod entry;
mod frame;
mod hello;
mod inbox;
pub mod initiator;
mod lanes;
mod limits;
mod link;
mod outbox;
mod request;
pub mod responder;
mod status;
mod violation;
mod watch;

pub use encoder::{Encoded, Encoder};
pub use entry::{Entry, Form, Numbers, Paged, Range, Strided};
pub use frame::{HEADER_LENGTH, Kind};
pub use hello::{Agreed, Hello, Key, KeyError, LaneName, MAGIC, MAJOR, MINOR, Nonce, Refused};
pub use inbox::{Incoming, Landing};
pub use initiator::{Initiator, Outcome};
pub use lanes::{Answer, Claim, Lanes};
pub use limits::{LimitError, Limits};
pub use outbox::{Departure, Outgoing, Release};
pub use request::{Entries, Op, Part, Request, RequestError};
pub use responder::Responder;
pub use status::{Code, Farewell, REASON_LENGTH, Refusal, Status};
pub use violation::Violation;

use frame::Data;

/// Why a lane's connection is over.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Closed {
    /// The peer broke the protocol or was silent, or says so of this side.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// The lane was not opened.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// Nothing is open, and one side said goodbye.
    #[error("the lane is not needed any more")]
    Retired,
    /// The connection was lost.
    #[error("the connection was lost")]
    Gone,
}

/// An offer that is not taken. Its slot is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OfferError {
    /// The request ended, was cancelled, is not on its way yet, or takes no bytes of this side.
    #[error("request {request} takes no bytes")]
    NotOpen {
        /// The request.
        request: u64,
    },
    /// More than the request lacks, or than the other side's slot holds, or nothing.
    #[error("{length} bytes offered to request {request}, 1 to {most} are taken")]
    Length {
        /// The request.
        request: u64,
        /// Bytes of the offer.
        length: u32,
        /// Most bytes that are taken.
        most: u64,
    },
}

impl Agreed {
    /// The DATA frame of an offer, of a request that has come to `moved` of its `total` bytes.
    fn extent(
        &self,
        request: u64,
        moved: u64,
        total: u64,
        length: u32,
        checksum: u64,
    ) -> Result<Data, OfferError> {
        let most = (total - moved).min(self.extent_bytes.into());
        if length == 0 || u64::from(length) > most {
            return Err(OfferError::Length { request, length, most });
        }
        Ok(Data { offset: moved, length, checksum: if self.checksums { checksum } else { 0 } })
    }
}

#[cfg(test)]
mod tests;
