//! Mooncake's TCP data transport, versions 1 and 2, both roles.
//!
//! A connection carries one operation at a time: a header of 24 bytes, the payload in one direction,
//! and in version 2 a status of 8 bytes, after a WRITE was applied or before the payload of a READ.
//! [`Server`] and [`Client`] follow one connection. They never hold payload: they say what the next
//! bytes of each direction are ([`Incoming`], [`Outgoing`]), and the host moves them between the
//! socket and its own memory.

mod client;
mod server;

pub use client::{Client, ClientError};
pub use server::{Closing, Server};

/// Bytes of a header.
pub const HEADER_LENGTH: usize = 24;

/// Bytes of a status.
pub const STATUS_LENGTH: usize = 8;

/// In the opcode: the sender speaks version 2.
const VERSION_2: u8 = 0x80;

/// The high half of a status: "MCTV".
const STATUS_MAGIC: u32 = 0x4d43_5456;

/// Which way the payload goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// From the server to the client.
    Read,
    /// From the client to the server.
    Write,
}

/// Version of the framing. The client chooses it by the server's descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// Without statuses: the server closes the connection instead.
    V1,
    /// With statuses.
    V2,
}

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Which way the payload goes.
    pub op: Op,
    /// Version of the framing.
    pub version: Version,
    /// First byte, an address of the server's process.
    pub addr: u64,
    /// Bytes.
    pub length: u64,
}

impl Header {
    /// Its bytes.
    pub fn encode(&self) -> [u8; HEADER_LENGTH] {
        let opcode = match self.op {
            Op::Read => 0,
            Op::Write => 1,
        };
        let mut bytes = [0; HEADER_LENGTH];
        bytes[..8].copy_from_slice(&self.length.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.addr.to_le_bytes());
        bytes[16] = if self.version == Version::V2 { opcode | VERSION_2 } else { opcode };
        bytes
    }

    /// Reads a header, whatever is in its padding: Mooncake leaves that uninitialised.
    ///
    /// # Errors
    /// The opcode, if it is none. Mooncake would read it as READ; whoever sends it is no peer.
    pub fn decode(bytes: &[u8; HEADER_LENGTH]) -> Result<Self, u8> {
        let number = |at: usize| u64::from_le_bytes(core::array::from_fn(|byte| bytes[at + byte]));
        let opcode = bytes[16];
        let op = match opcode & !VERSION_2 {
            0 => Op::Read,
            1 => Op::Write,
            _ => return Err(opcode),
        };
        let version = if opcode & VERSION_2 == 0 { Version::V1 } else { Version::V2 };
        Ok(Self { op, version, addr: number(8), length: number(0) })
    }

    /// Whether it names bytes at all: some, and inside the address space.
    fn is_possible(&self) -> bool {
        self.length > 0 && self.addr.checked_add(self.length).is_some()
    }
}

/// The server's word on an operation, in version 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The WRITE was applied, or the payload of the READ follows.
    Done,
    /// The bytes are not inside one registered region.
    AddressRejected,
    /// A code that this code does not know.
    Other(u32),
}

impl Status {
    /// Its bytes.
    pub fn encode(self) -> [u8; STATUS_LENGTH] {
        let code = match self {
            Self::Done => 0,
            Self::AddressRejected => 1,
            Self::Other(code) => code,
        };
        (u64::from(STATUS_MAGIC) << 32 | u64::from(code)).to_le_bytes()
    }

    /// Reads a status; none if it is not one, as what a version 1 server sends.
    pub fn decode(bytes: [u8; STATUS_LENGTH]) -> Option<Self> {
        let word = u64::from_le_bytes(bytes);
        if word >> 32 != u64::from(STATUS_MAGIC) {
            return None;
        }
        Some(match word as u32 {
            0 => Self::Done,
            1 => Self::AddressRejected,
            code => Self::Other(code),
        })
    }
}

/// Payload bytes that come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payload {
    /// Offset of the next byte in the operation.
    pub offset: u64,
    /// Bytes from there to the end of the operation; never zero.
    pub left: u64,
}

/// What the next received bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// Nothing is read now.
    Nothing,
    /// Framing, at most so many bytes of it: pass what arrives to `received`.
    Framing(usize),
    /// Payload: read at most as much as is left, and tell `received_payload`.
    Payload(Payload),
}

/// What is sent next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outgoing<'a> {
    /// Nothing is sent now.
    Nothing,
    /// These bytes: tell `sent` how many of them were.
    Framing(&'a [u8]),
    /// Payload: send at most as much as is left, and tell `sent`.
    Payload(Payload),
}

/// Bytes of a header or a status that arrive in any portions.
#[derive(Clone, Copy, Debug)]
struct Collected<const N: usize> {
    bytes: [u8; N],
    count: usize,
}

impl<const N: usize> Collected<N> {
    const EMPTY: Self = Self { bytes: [0; N], count: 0 };

    /// Takes what it lacks, and says how many bytes that was.
    fn take(&mut self, bytes: &[u8]) -> usize {
        let taken = bytes.len().min(self.missing());
        self.bytes[self.count..self.count + taken].copy_from_slice(&bytes[..taken]);
        self.count += taken;
        taken
    }

    fn missing(&self) -> usize {
        N - self.count
    }
}

/// Framing that is being sent.
#[derive(Clone, Copy, Debug)]
struct Departing<const N: usize> {
    bytes: [u8; N],
    sent: usize,
}

impl<const N: usize> Departing<N> {
    fn new(bytes: [u8; N]) -> Self {
        Self { bytes, sent: 0 }
    }

    fn rest(&self) -> &[u8] {
        &self.bytes[self.sent..]
    }

    /// Whether all of it is sent.
    fn sent(&mut self, count: usize) -> bool {
        self.sent = self.sent.saturating_add(count).min(N);
        self.sent == N
    }
}

/// How far a payload is.
#[derive(Clone, Copy, Debug)]
struct Progress {
    done: u64,
    length: u64,
}

impl Progress {
    fn new(length: u64) -> Self {
        Self { done: 0, length }
    }

    fn payload(&self) -> Payload {
        Payload { offset: self.done, left: self.length - self.done }
    }

    /// Whether all of it has moved.
    fn moved(&mut self, count: u64) -> bool {
        self.done = self.done.saturating_add(count).min(self.length);
        self.done == self.length
    }
}

#[cfg(test)]
mod tests;
