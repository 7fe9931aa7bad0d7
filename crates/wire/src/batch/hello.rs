//! The first frames of a lane: who, which version, which limits, and who has the key.

use alloc::string::String;
use alloc::vec::Vec;

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::codec::{Reader, Write};
use super::limits::Limits;
use crate::Id;

/// Major version of the protocol. Peers of another one are refused.
pub const MAJOR: u16 = 1;

/// Minor version. Two peers speak the lower one of theirs.
pub const MINOR: u16 = 0;

/// First bytes of every hello, in every version.
pub const MAGIC: [u8; 8] = *b"KVFERRY\0";

/// Bytes of a proof.
pub(super) const PROOF_LENGTH: usize = 32;

const AUTHENTICATES: u32 = 1;
const WANTS_CHECKSUMS: u32 = 2;

/// A number that is never used again, of [`Hello::nonce`]: from the system's random generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nonce(pub [u8; 32]);

/// Which connection this is: the lane's number in its session, and how often it was connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneName {
    /// The initiator's session with the responder: random, the same for all its lanes.
    pub session: Id,
    /// Number of the lane, from 0.
    pub lane: u16,
    /// How many lanes the session has.
    pub lanes: u16,
    /// Grows with each connection of this lane.
    pub epoch: u64,
}

/// What both sides say first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Newest minor version that the sender speaks.
    pub minor: u16,
    /// The sender has a key, and will not go on without proof that the other has it.
    pub authenticates: bool,
    /// The sender wants checksums of all payload; there are some if either does.
    pub wants_checksums: bool,
    /// The sender's engine.
    pub incarnation: Id,
    /// The engine that it means to talk to.
    pub expected: Id,
    /// The connection; a responder repeats it.
    pub lane: LaneName,
    /// Makes each proof good for one connection.
    pub nonce: Nonce,
    /// What the sender takes.
    pub limits: Limits,
    /// DATA frames that the sender takes from the beginning.
    pub credits: u32,
}

/// Why a hello cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HelloError {
    Malformed(&'static str),
    Major(u16),
}

impl Hello {
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let flags = if self.authenticates { AUTHENTICATES } else { 0 }
            | if self.wants_checksums { WANTS_CHECKSUMS } else { 0 };
        out.extend_from_slice(&MAGIC);
        out.u16(MAJOR);
        out.u16(self.minor);
        out.u32(flags);
        out.extend_from_slice(&self.incarnation.0);
        out.extend_from_slice(&self.expected.0);
        out.extend_from_slice(&self.lane.session.0);
        out.u16(self.lane.lane);
        out.u16(self.lane.lanes);
        out.u32(0);
        out.u64(self.lane.epoch);
        out.extend_from_slice(&self.nonce.0);
        self.limits.encode(out);
        out.u32(self.credits);
    }

    /// Reads a hello. Of another major version only the first 12 bytes are looked at; of a newer
    /// minor version what it appended is not, and neither are flags that this one does not know.
    pub(super) fn decode(body: &[u8]) -> Result<Self, HelloError> {
        let mut reader = Reader(body);
        let short = HelloError::Malformed("it is too short");
        let first = (|| Some((reader.array::<8>()?, reader.u16()?)))();
        let (magic, major) = first.ok_or(short)?;
        if magic != MAGIC {
            return Err(HelloError::Malformed("its first bytes are others"));
        }
        if major != MAJOR {
            return Err(HelloError::Major(major));
        }
        let hello = Self::fields(&mut reader).ok_or(short)?;
        if hello.lane.lane >= hello.lane.lanes {
            return Err(HelloError::Malformed("the lane is none of its session's"));
        }
        if hello.credits > hello.limits.credits {
            return Err(HelloError::Malformed("it gives more credits than its limit"));
        }
        Ok(hello)
    }

    fn fields(reader: &mut Reader<'_>) -> Option<Self> {
        let minor = reader.u16()?;
        let flags = reader.u32()?;
        let incarnation = Id(reader.array()?);
        let expected = Id(reader.array()?);
        let session = Id(reader.array()?);
        let (lane, lanes, _) = (reader.u16()?, reader.u16()?, reader.u32()?);
        let lane = LaneName { session, lane, lanes, epoch: reader.u64()? };
        Some(Self {
            minor,
            authenticates: flags & AUTHENTICATES != 0,
            wants_checksums: flags & WANTS_CHECKSUMS != 0,
            incarnation,
            expected,
            lane,
            nonce: Nonce(reader.array()?),
            limits: Limits::decode(reader)?,
            credits: reader.u32()?,
        })
    }
}

/// What two hellos come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// Minor version that both speak.
    pub minor: u16,
    /// Whether payload has checksums.
    pub checksums: bool,
    /// The other side's engine.
    pub peer: Id,
    /// What the other side takes.
    pub theirs: Limits,
    /// Longest payload of a DATA frame to the other side: its slot.
    pub extent_bytes: u32,
}

impl Agreed {
    pub(super) fn new(ours: &Hello, theirs: &Hello) -> Self {
        Self {
            minor: ours.minor.min(theirs.minor),
            checksums: ours.wants_checksums || theirs.wants_checksums,
            peer: theirs.incarnation,
            theirs: theirs.limits,
            extent_bytes: theirs.limits.slot_bytes,
        }
    }
}

/// A pre-shared key. It is never shown.
#[derive(Clone)]
pub struct Key(Vec<u8>);

/// The key is too short to keep anybody out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a key of {length} bytes, it has to be {} to {}", Key::LEAST, Key::MOST)]
pub struct KeyError {
    /// Its bytes.
    pub length: usize,
}

impl Key {
    /// Fewest bytes.
    pub const LEAST: usize = 16;
    /// Most bytes.
    pub const MOST: usize = 4096;

    /// These bytes, random ones.
    ///
    /// # Errors
    /// If they are too few or too many.
    pub fn new(bytes: &[u8]) -> Result<Self, KeyError> {
        if !(Self::LEAST..=Self::MOST).contains(&bytes.len()) {
            return Err(KeyError { length: bytes.len() });
        }
        Ok(Self(bytes.to_vec()))
    }

    /// The proof that one side has the key, bound to the bytes of both hellos.
    pub(super) fn prove(&self, side: Side, hellos: &Hellos) -> [u8; PROOF_LENGTH] {
        self.mac(side, hellos).finalize().into_bytes().into()
    }

    /// Whether `proof` is one, in a time that does not depend on where it is not.
    pub(super) fn verifies(&self, side: Side, hellos: &Hellos, proof: &[u8]) -> bool {
        self.mac(side, hellos).verify_slice(proof).is_ok()
    }

    fn mac(&self, side: Side, hellos: &Hellos) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes any key");
        mac.update(match side {
            Side::Initiator => b"kvferry initiator\0",
            Side::Responder => b"kvferry responder\0",
        });
        for hello in [&hellos.initiator, &hellos.responder] {
            mac.update(&(hello.len() as u32).to_le_bytes());
            mac.update(hello);
        }
        mac
    }
}

impl core::fmt::Debug for Key {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Key(..)")
    }
}

/// Whose proof it is. Neither can be given back to its maker as the other's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Initiator,
    Responder,
}

/// The bodies of both hellos as they were sent.
#[derive(Clone, Debug, Default)]
pub(super) struct Hellos {
    pub(super) initiator: Vec<u8>,
    pub(super) responder: Vec<u8>,
}

/// Why a lane did not open.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer refuses the lane, {refusal}: {reason}")]
pub struct Refused {
    /// For programs.
    pub refusal: super::status::Refusal,
    /// For people.
    pub reason: String,
}
