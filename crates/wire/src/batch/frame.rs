//! The frames' headers and how a stream of frames can be wrong.

use alloc::string::String;
use alloc::vec::Vec;

use super::codec::{Reader, Write};
use super::inbox::Landing;
use super::request::RequestError;

/// Bytes of a frame's header, the same in every version.
pub const HEADER_LENGTH: usize = 16;

/// Longest frame until the lane is open, header included.
pub(super) const GREETING_LENGTH: u32 = 1024;

macro_rules! kinds {
    ($($(#[$about:meta])* $kind:ident = $number:literal;)*) => {
        /// What a frame says.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind {
            $($(#[$about])* $kind = $number,)*
        }

        impl Kind {
            fn from_number(number: u8) -> Option<Self> {
                match number {
                    $($number => Some(Self::$kind),)*
                    _ => None,
                }
            }
        }
    };
}

kinds! {
    /// First frame of both sides.
    Hello = 0x01;
    /// The initiator's proof that it has the key.
    Proof = 0x02;
    /// The responder opens the lane, with its own proof.
    Welcome = 0x03;
    /// The responder does not open the lane.
    Refused = 0x04;
    /// Asks for bytes to be taken.
    Write = 0x10;
    /// Asks for bytes to be sent.
    Read = 0x11;
    /// Bytes of a request.
    Data = 0x12;
    /// Lets more DATA frames come.
    Credit = 0x13;
    /// Ends a request.
    Status = 0x14;
    /// Asks for a request to be given up.
    Cancel = 0x15;
    /// Answers a cancel that cannot be done at once.
    NotBefore = 0x16;
    /// Announces the end of the lane.
    Goodbye = 0x17;
    /// Asks for a sign of life.
    Ping = 0x18;
    /// Gives one.
    Pong = 0x19;
}

/// What every frame begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrameHeader {
    /// Bytes of the body; a DATA frame's payload is not counted.
    pub(super) length: u32,
    pub(super) kind: Kind,
    /// The request that it is about; 0 if none.
    pub(super) request: u64,
}

impl FrameHeader {
    /// Reads a header whose frame is at most `limit` bytes.
    pub(super) fn decode(bytes: &[u8; HEADER_LENGTH], limit: u32) -> Result<Self, Violation> {
        let mut reader = Reader(bytes);
        let (length, number, flags, reserved, request) =
            (|| Some((reader.u32()?, reader.u8()?, reader.u8()?, reader.u16()?, reader.u64()?)))()
                .expect("a header has 16 bytes");
        let kind = Kind::from_number(number).ok_or(Violation::UnknownKind { kind: number })?;
        if flags != 0 || reserved != 0 {
            return Err(Violation::Reserved { kind });
        }
        if length > limit.saturating_sub(HEADER_LENGTH as u32) {
            return Err(Violation::FrameTooLong { kind, length, limit });
        }
        Ok(Self { length, kind, request })
    }
}

/// Appends a frame whose body `write` appends.
pub(super) fn encode(
    out: &mut Vec<u8>,
    kind: Kind,
    request: u64,
    write: impl FnOnce(&mut Vec<u8>),
) {
    let start = out.len();
    out.u32(0);
    out.u8(kind as u8);
    out.u8(0);
    out.u16(0);
    out.u64(request);
    write(out);
    let length = (out.len() - start - HEADER_LENGTH) as u32;
    out[start..start + 4].copy_from_slice(&length.to_le_bytes());
}

/// The body of a DATA frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Data {
    /// Where the payload begins in the request's bytes.
    pub(super) offset: u64,
    /// Bytes of the payload.
    pub(super) length: u32,
    /// Of the payload; 0 where checksums were not agreed on.
    pub(super) checksum: u64,
}

impl Data {
    pub(super) fn encode(&self, out: &mut Vec<u8>, request: u64) {
        encode(out, Kind::Data, request, |out| {
            out.u64(self.offset);
            out.u32(self.length);
            out.u32(0);
            out.u64(self.checksum);
        });
    }

    pub(super) fn decode(body: &[u8]) -> Result<Self, Violation> {
        let mut reader = Reader(body);
        let fields = (|| Some((reader.u64()?, reader.u32()?, reader.u32()?, reader.u64()?)))();
        match fields {
            Some((_, _, reserved, _)) if reserved != 0 => {
                Err(Violation::Reserved { kind: Kind::Data })
            }
            Some((offset, length, _, checksum)) if reader.0.is_empty() => {
                Ok(Self { offset, length, checksum })
            }
            _ => Err(Violation::BodyLength { kind: Kind::Data, length: body.len() }),
        }
    }
}

impl Data {
    /// Checks that it continues a request which lacks `missing` bytes from `expected` on.
    pub(super) fn check(
        &self,
        request: u64,
        expected: u64,
        missing: u64,
        slot_bytes: u32,
    ) -> Result<(), Violation> {
        let &Self { offset, length, .. } = self;
        let most = missing.min(slot_bytes.into());
        if offset != expected || length == 0 || u64::from(length) > most {
            return Err(Violation::Extent { request, expected, most, offset, length });
        }
        Ok(())
    }

    /// Its payload, of which nothing has come yet.
    pub(super) fn landing(&self, request: u64, checksums: bool) -> Landing {
        let &Self { offset, length, checksum } = self;
        Landing { request, offset, length, received: 0, checksum: checksums.then_some(checksum) }
    }
}

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
