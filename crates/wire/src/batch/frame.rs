//! The frames' headers.

use alloc::vec::Vec;

use super::codec::{Reader, Write};
use super::inbox::Landing;
use super::violation::Violation;

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
