//! Mooncake's peer-to-peer handshake: one request and one reply per TCP connection.
//!
//! `u64 length (little-endian) = 1 + len(json), u8 type, json`. Old peers leave the type out; they
//! are known by a first byte that is no type, and get their reply without one.

use alloc::vec::Vec;

use crate::frame::{Frames, encode as frame};

pub use crate::frame::FrameError;

/// Longest frame that a decoder takes unless told otherwise, as in Mooncake.
pub const DEFAULT_LIMIT: u64 = 1 << 20;

/// No decoder takes longer frames.
pub const MAX_LIMIT: u64 = 128 << 20;

/// A metadata request. Servers ignore what it says.
pub const METADATA_REQUEST: &[u8] = b"{}\n";

/// The reply to a probe.
pub const PROBE_REPLY: &[u8] = b"{\"status\":\"success\"}\n";

/// The reply to a notification.
pub const NOTIFY_REPLY: &[u8] = b"{\"name\":\"\",\"notify_msg\":\"success\"}\n";

/// The reply to a connection request, which only RDMA transports make.
pub const CONNECTION_REPLY: &[u8] =
    b"{\"local_nic_path\":\"\",\"peer_nic_path\":\"\",\"qp_num\":[],\
    \"reply_msg\":\"kvferry has no RDMA transport: connect by tcp\"}\n";

/// What a message asks for, and what its reply repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Queue pairs of an RDMA transport.
    Connection,
    /// The segment descriptor.
    Metadata,
    /// A text for the application.
    Notify,
    /// Whether anybody is there.
    Probe,
    /// A connection request of an old peer, which knows no types.
    Untyped,
}

/// One request or reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its type.
    pub kind: Kind,
    /// JSON, not yet parsed.
    pub body: Vec<u8>,
}

/// The bytes of a message.
pub fn encode(kind: Kind, body: &[u8]) -> Vec<u8> {
    match kind {
        Kind::Connection => frame(&[&[0], body]),
        Kind::Metadata => frame(&[&[1], body]),
        Kind::Notify => frame(&[&[2], body]),
        Kind::Probe => frame(&[&[3], body]),
        Kind::Untyped => frame(&[body]),
    }
}

/// Finds messages in bytes that arrive in any portions.
///
/// [`push`](Self::push) bytes as they come and [`poll`](Self::poll) after each push: a bad length
/// is refused as soon as its 8 bytes are there.
#[derive(Debug)]
pub struct Decoder {
    frames: Frames,
}

impl Decoder {
    /// Takes frames of at most `limit` bytes; of 1 and of [`MAX_LIMIT`] if `limit` is outside.
    pub fn new(limit: u64) -> Self {
        Self { frames: Frames::new(limit.clamp(1, MAX_LIMIT)) }
    }

    /// Takes bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.frames.push(bytes);
    }

    /// The next message; `None` until all of it is there.
    ///
    /// # Errors
    /// A length that no peer sends. It stays: close the connection.
    pub fn poll(&mut self) -> Result<Option<Message>, FrameError> {
        Ok(self.frames.poll()?.map(message))
    }

    /// Whether no message has begun.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new(DEFAULT_LIMIT)
    }
}

fn message(mut payload: Vec<u8>) -> Message {
    let kind = match payload.first() {
        Some(0) => Kind::Connection,
        Some(1) => Kind::Metadata,
        Some(2) => Kind::Notify,
        Some(3) => Kind::Probe,
        _ => return Message { kind: Kind::Untyped, body: payload },
    };
    payload.remove(0);
    Message { kind, body: payload }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(decoder: &mut Decoder) -> Vec<Message> {
        core::iter::from_fn(|| decoder.poll().unwrap()).collect()
    }

    #[test]
    fn messages_have_mooncakes_bytes() {
        assert_eq!(encode(Kind::Metadata, b"{}\n"), b"\x04\0\0\0\0\0\0\0\x01{}\n");
        assert_eq!(encode(Kind::Connection, b"{}"), b"\x03\0\0\0\0\0\0\0\x00{}");
        assert_eq!(encode(Kind::Notify, b"{}"), b"\x03\0\0\0\0\0\0\0\x02{}");
        assert_eq!(encode(Kind::Probe, b"{}"), b"\x03\0\0\0\0\0\0\0\x03{}");
        assert_eq!(encode(Kind::Untyped, b"{}"), b"\x02\0\0\0\0\0\0\0{}");
        let long = encode(Kind::Metadata, &[b' '; 0x0102]);
        assert_eq!(long[..9], *b"\x03\x01\0\0\0\0\0\0\x01");
    }

    #[test]
    fn messages_decode_identically_at_every_split_point() {
        let sent = [
            Message { kind: Kind::Metadata, body: b"{\"name\":\"a\"}\n".to_vec() },
            Message { kind: Kind::Untyped, body: b"{}\n".to_vec() },
            Message { kind: Kind::Probe, body: Vec::new() },
        ];
        let bytes: Vec<u8> =
            sent.iter().flat_map(|message| encode(message.kind, &message.body)).collect();
        for split in 0..=bytes.len() {
            let mut decoder = Decoder::default();
            decoder.push(&bytes[..split]);
            let mut found = all(&mut decoder);
            decoder.push(&bytes[split..]);
            found.extend(all(&mut decoder));
            assert_eq!(found, sent, "split at byte {split}");
            assert!(decoder.is_empty(), "split at byte {split}");
        }
    }

    #[test]
    fn a_message_of_an_old_peer_is_an_untyped_connection_request() {
        let mut decoder = Decoder::default();
        decoder.push(b"\x02\0\0\0\0\0\0\0{}");
        assert_eq!(decoder.poll(), Ok(Some(Message { kind: Kind::Untyped, body: b"{}".to_vec() })));
    }

    #[test]
    fn a_web_browser_is_refused_by_its_first_eight_bytes() {
        let mut decoder = Decoder::default();
        decoder.push(b"GET / H");
        assert_eq!(decoder.poll(), Ok(None));
        decoder.push(b"T");
        let length = u64::from_le_bytes(*b"GET / HT");
        assert_eq!(decoder.poll(), Err(FrameError::TooLong { length, limit: DEFAULT_LIMIT }));
    }

    #[test]
    fn a_limit_stays_within_mooncakes_bounds() {
        let mut decoder = Decoder::new(u64::MAX);
        decoder.push(&(MAX_LIMIT + 1).to_le_bytes());
        assert_eq!(
            decoder.poll(),
            Err(FrameError::TooLong { length: MAX_LIMIT + 1, limit: MAX_LIMIT })
        );
    }

    proptest! {
        #[test]
        fn garbage_never_panics(portions in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..64), 0..16)) {
            let mut decoder = Decoder::default();
            for portion in portions {
                decoder.push(&portion);
                while let Ok(Some(_)) = decoder.poll() {}
            }
        }

        #[test]
        fn short_garbage_frames_never_panic(payloads in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..64), 0..16)) {
            let mut decoder = Decoder::default();
            for payload in &payloads {
                decoder.push(&frame(&[payload]));
            }
            prop_assert_eq!(all(&mut decoder).len(), payloads.len());
        }
    }
}
