//! How a lane can be wrong.

use alloc::string::String;

use super::frame::Kind;
use super::request::RequestError;

/// How a peer broke the protocol, or stopped keeping its time. The lane is to be closed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Not a frame of this version. On a new connection, most likely not a peer at all.
    #[error("frame kind {kind:#04x} is unknown")]
    UnknownKind {
        /// Its number.
        kind: u8,
    },
    /// Bits that have to be zero are not.
    #[error("reserved bits of a {kind:?} frame are set")]
    Reserved {
        /// Of which frame.
        kind: Kind,
    },
    /// Longer than this side takes.
    #[error("a {kind:?} frame with a body of {length} bytes, whole frames have at most {limit}")]
    FrameTooLong {
        /// Which frame.
        kind: Kind,
        /// Bytes of its body.
        length: u32,
        /// Most bytes of a frame with its header.
        limit: u32,
    },
    /// Too short or too long for what it is.
    #[error("a {kind:?} frame cannot have a body of {length} bytes")]
    BodyLength {
        /// Which frame.
        kind: Kind,
        /// Bytes of its body.
        length: usize,
    },
    /// Not now, or not from that side.
    #[error("a {kind:?} frame does not belong here: {expected}")]
    Unexpected {
        /// Which frame.
        kind: Kind,
        /// What does.
        expected: &'static str,
    },
    /// Not a hello of this protocol.
    #[error("the hello is malformed: {reason}")]
    Hello {
        /// Why.
        reason: &'static str,
    },
    /// Numbers of requests grow.
    #[error("request {request} after request {last}")]
    RequestOrder {
        /// The number.
        request: u64,
        /// The one before.
        last: u64,
    },
    /// More than this side takes.
    #[error("request {request} is one too many, {limit} may be open")]
    TooManyRequests {
        /// Its number.
        request: u64,
        /// The limit.
        limit: u32,
    },
    /// The request cannot be read.
    #[error("request {request}: {error}")]
    Request {
        /// Its number.
        request: u64,
        /// What is wrong.
        #[source]
        error: RequestError,
    },
    /// No such request was ever sent, or it is not one of that kind.
    #[error("a {kind:?} frame for request {request}, which has none")]
    NoSuchRequest {
        /// Which frame.
        kind: Kind,
        /// The number.
        request: u64,
    },
    /// More payload than this side has slots for.
    #[error("payload of request {request} without a credit")]
    CreditOverrun {
        /// Its number.
        request: u64,
    },
    /// More credits than the peer said it would give.
    #[error("{credits} credits, the peer's limit is {limit}")]
    CreditOverflow {
        /// How many this side has.
        credits: u64,
        /// The limit.
        limit: u32,
    },
    /// Payload that does not continue the request.
    #[error(
        "request {request} continues at {expected} with at most {most} bytes, \
         not at {offset} with {length}"
    )]
    Extent {
        /// The request's number.
        request: u64,
        /// Where it continues.
        expected: u64,
        /// Bytes that are missing, or a slot's if that is less.
        most: u64,
        /// Where the payload says that it belongs.
        offset: u64,
        /// Its bytes.
        length: u32,
    },
    /// A status says done of a request that cannot be.
    #[error("request {request} is said to be done with {missing} bytes missing")]
    EarlyDone {
        /// Its number.
        request: u64,
        /// Bytes that were not moved.
        missing: u64,
    },
    /// A request was said to end with one that will not end by itself.
    #[error("request {request} cannot wait for request {after}")]
    NotBefore {
        /// Its number.
        request: u64,
        /// The other's.
        after: u64,
    },
    /// The peer does not prove that it has the key.
    #[error("the peer does not prove that it has the pre-shared key")]
    Unauthenticated,
    /// Not the engine that was meant.
    #[error("another engine answers: {found} instead of {expected}")]
    WrongIncarnation {
        /// The one that was meant.
        expected: crate::Id,
        /// The one that answers.
        found: crate::Id,
    },
    /// Nothing came for too long while this side waited, or a frame was not whole in time.
    #[error("{what} for {milliseconds} ms")]
    Silence {
        /// What did not happen.
        what: &'static str,
        /// How long.
        milliseconds: u64,
    },
    /// The other side says that this side broke the protocol.
    #[error("the peer closes the lane: {reason}")]
    Accused {
        /// Its reason.
        reason: String,
    },
}
