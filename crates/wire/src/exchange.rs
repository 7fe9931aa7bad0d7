//! How engines of one host hand over exports: a Unix socket, frames of `u64 length
//! (little-endian), json`.
//!
//! The client says [`Message::Hello`] with the incarnation that it expects; the server answers with
//! its own, or refuses. Then every [`Message::Fetch`] gets one [`Message::Export`] or
//! [`Message::Refused`] with the same request number, and so has every [`Message::Probe`] one
//! [`Message::Sample`] and every [`Message::Prove`] one [`Message::Verdict`]. An [`Export::Chunks`]
//! is followed by as many [`Message::Chunks`] as it takes, or by a [`Message::Refused`] that ends it.
//! Descriptors, as many as [`Message::descriptors`] says, come as ancillary data (SCM_RIGHTS) of the
//! first bytes of that frame. The open connection also says that both are alive.
//!
//! A sample is memory that the server lends until it is proved, or the connection ends. Its
//! pattern, and the one that the client writes before it asks for the verdict, is a seed's: word
//! `i`, little-endian, is splitmix64's output number `i`. Its bytes are two lists of 64, 4096 and
//! 1048576 bytes.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::frame::{FrameError, Frames, encode as frame};
use crate::hex::{self, Id, Uuid};

/// Longest frame.
pub const LIMIT: u64 = 64 << 10;

/// What [`Message::Hello`] carries; another one is refused.
pub const VERSION: u32 = 2;

/// Most descriptors of one frame. The kernel passes 253 at most.
pub const MAX_DESCRIPTORS: usize = 64;

/// One message of either side.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Message {
    /// First message of both sides.
    Hello {
        /// [`VERSION`].
        version: u32,
        /// The engine that the client expects, or that the server is.
        incarnation: Id,
    },
    /// Asks for an export.
    Fetch {
        /// Number that the answer repeats, so that an answer which came too late is known as such.
        request: u64,
        /// The allocation's device.
        device: Uuid,
        /// The allocation's number.
        id: u64,
    },
    /// Answers a fetch.
    Export {
        /// Number of the fetch.
        request: u64,
        /// How to map the allocation.
        export: Export,
    },
    /// The next chunks of an [`Export::Chunks`].
    Chunks {
        /// Number of the fetch.
        request: u64,
        /// Bytes of each, in order of address; 1 to [`MAX_DESCRIPTORS`] of them.
        lengths: Vec<u64>,
    },
    /// Asks for memory to try out a device with.
    Probe {
        /// Number that the answer repeats.
        request: u64,
        /// The device whose memory it must be.
        device: Uuid,
    },
    /// Answers a probe.
    Sample {
        /// Number of the probe.
        request: u64,
        /// Number of the lent allocation of that device; to be fetched as any other.
        id: u64,
        /// Seed of the pattern that it holds.
        seed: u64,
    },
    /// Gives a sample back, not mapped any more, and asks what it holds.
    Prove {
        /// Number that the answer repeats.
        request: u64,
        /// The sample's device.
        device: Uuid,
        /// The sample's number.
        id: u64,
        /// Seed of the pattern that was written into it.
        seed: u64,
    },
    /// Answers a prove.
    Verdict {
        /// Number of the prove.
        request: u64,
        /// The first byte that is not the pattern's.
        wrong: Option<Wrong>,
    },
    /// Refuses a request, also a fetch of which some chunks were sent, or the whole connection.
    Refused {
        /// Number of the request; none if the connection is refused and closes.
        request: Option<u64>,
        /// Why, for a person.
        reason: String,
    },
}

impl Message {
    /// The number of the request that this asks or answers.
    pub fn request(&self) -> Option<u64> {
        match *self {
            Self::Hello { .. } => None,
            Self::Refused { request, .. } => request,
            Self::Fetch { request, .. }
            | Self::Export { request, .. }
            | Self::Chunks { request, .. }
            | Self::Probe { request, .. }
            | Self::Sample { request, .. }
            | Self::Prove { request, .. }
            | Self::Verdict { request, .. } => Some(request),
        }
    }
}

/// A byte of a sample that is not what it must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wrong {
    /// Its offset.
    pub at: u64,
    /// The pattern's byte.
    pub expected: u8,
    /// The byte that is there.
    pub found: u8,
}

/// What maps one whole allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Export {
    /// The file descriptor that comes with this frame.
    File {
        /// Bytes of the allocation.
        length: u64,
    },
    /// A handle of the vendor.
    Handle {
        /// Bytes of the allocation.
        length: u64,
        /// The vendor's bytes.
        #[serde(with = "hex::bytes")]
        bytes: Vec<u8>,
    },
    /// Chunks of memory that lie side by side. They come after this.
    Chunks {
        /// Bytes of all of them.
        length: u64,
        /// How many there are.
        count: u64,
    },
    /// An allocation of a memory pool, whose file descriptor comes with this frame.
    Pool {
        /// Bytes of the allocation.
        length: u64,
        /// The vendor's bytes, which find the allocation in the pool.
        #[serde(with = "hex::bytes")]
        bytes: Vec<u8>,
    },
}

impl Message {
    /// How many file descriptors come with it.
    pub fn descriptors(&self) -> usize {
        match self {
            Self::Export { export: Export::File { .. } | Export::Pool { .. }, .. } => 1,
            Self::Chunks { lengths, .. } => lengths.len(),
            _ => 0,
        }
    }
}

/// Why an exchange cannot go on. The connection is to be closed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExchangeError {
    /// The frame's length is impossible.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// No frame has so many descriptors, or so few.
    #[error("a message about {count} chunks, 1 to {MAX_DESCRIPTORS} are allowed")]
    Chunks {
        /// How many it lists.
        count: usize,
    },
    /// The frame holds no message.
    #[error("a message that cannot be read: {reason}")]
    Malformed {
        /// What is wrong with it, and where.
        reason: String,
    },
}

/// The bytes of a message.
///
/// # Errors
/// [`FrameError::TooLong`] if the other side would refuse it.
pub fn encode(message: &Message) -> Result<Vec<u8>, ExchangeError> {
    let malformed =
        |error: serde_json::Error| ExchangeError::Malformed { reason: error.to_string() };
    check(message)?;
    let json = serde_json::to_vec(message).map_err(malformed)?;
    let length = json.len() as u64;
    if length > LIMIT {
        return Err(FrameError::TooLong { length, limit: LIMIT }.into());
    }
    Ok(frame(&[&json]))
}

fn check(message: &Message) -> Result<(), ExchangeError> {
    match message {
        Message::Chunks { lengths, .. } if !(1..=MAX_DESCRIPTORS).contains(&lengths.len()) => {
            Err(ExchangeError::Chunks { count: lengths.len() })
        }
        _ => Ok(()),
    }
}

/// Finds messages in bytes that arrive in any portions; [`poll`](Self::poll) after each
/// [`push`](Self::push).
#[derive(Debug)]
pub struct Decoder {
    frames: Frames,
}

impl Decoder {
    /// Before the first byte.
    pub fn new() -> Self {
        Self { frames: Frames::new(LIMIT) }
    }

    /// Takes bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.frames.push(bytes);
    }

    /// The next message; `None` until all of it is there.
    ///
    /// # Errors
    /// A frame that no engine sends. Close the connection.
    pub fn poll(&mut self) -> Result<Option<Message>, ExchangeError> {
        let Some(json) = self.frames.poll()? else { return Ok(None) };
        let malformed =
            |error: serde_json::Error| ExchangeError::Malformed { reason: error.to_string() };
        let message = serde_json::from_slice(&json).map_err(malformed)?;
        check(&message)?;
        Ok(Some(message))
    }

    /// Whether no message has begun.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use proptest::prelude::*;

    fn messages() -> Vec<Message> {
        let export = Export::Handle { length: 4096, bytes: vec![0, 0xab, 0xff] };
        vec![
            Message::Hello { version: VERSION, incarnation: Id([0x11; 16]) },
            Message::Fetch { request: 1, device: Uuid([0x22; 16]), id: u64::MAX },
            Message::Export { request: 1, export: Export::File { length: 4096 } },
            Message::Export { request: 2, export },
            Message::Export { request: 4, export: Export::Chunks { length: 12_288, count: 2 } },
            Message::Chunks { request: 4, lengths: vec![4096, 8192] },
            Message::Export { request: 5, export: Export::Pool { length: 512, bytes: vec![1, 2] } },
            Message::Refused { request: Some(3), reason: "gone".into() },
            Message::Refused { request: None, reason: "a restarted engine".into() },
            Message::Probe { request: 4, device: Uuid([0x22; 16]) },
            Message::Sample { request: 4, id: 7, seed: u64::MAX },
            Message::Prove { request: 5, device: Uuid([0x22; 16]), id: 7, seed: 1 },
            Message::Verdict { request: 5, wrong: None },
            Message::Verdict { request: 6, wrong: Some(Wrong { at: 3, expected: 0, found: 255 }) },
        ]
    }

    #[test]
    fn messages_have_these_bytes() {
        let text =
            |message: &Message| String::from_utf8(encode(message).unwrap()[8..].to_vec()).unwrap();
        let texts: Vec<_> = messages().iter().map(text).collect();
        assert_eq!(
            texts,
            [
                r#"{"hello":{"version":2,"incarnation":"11111111111111111111111111111111"}}"#,
                r#"{"fetch":{"request":1,"device":"22222222-2222-2222-2222-222222222222","id":18446744073709551615}}"#,
                r#"{"export":{"request":1,"export":{"kind":"file","length":4096}}}"#,
                r#"{"export":{"request":2,"export":{"kind":"handle","length":4096,"bytes":"00abff"}}}"#,
                r#"{"export":{"request":4,"export":{"kind":"chunks","length":12288,"count":2}}}"#,
                r#"{"chunks":{"request":4,"lengths":[4096,8192]}}"#,
                r#"{"export":{"request":5,"export":{"kind":"pool","length":512,"bytes":"0102"}}}"#,
                r#"{"refused":{"request":3,"reason":"gone"}}"#,
                r#"{"refused":{"request":null,"reason":"a restarted engine"}}"#,
                r#"{"probe":{"request":4,"device":"22222222-2222-2222-2222-222222222222"}}"#,
                r#"{"sample":{"request":4,"id":7,"seed":18446744073709551615}}"#,
                r#"{"prove":{"request":5,"device":"22222222-2222-2222-2222-222222222222","id":7,"seed":1}}"#,
                r#"{"verdict":{"request":5,"wrong":null}}"#,
                r#"{"verdict":{"request":6,"wrong":{"at":3,"expected":0,"found":255}}}"#,
            ]
        );
        assert_eq!(encode(&messages()[7]).unwrap()[..8], 41u64.to_le_bytes());
    }

    #[test]
    fn messages_decode_identically_at_every_split_point() {
        let bytes: Vec<u8> =
            messages().iter().flat_map(|message| encode(message).unwrap()).collect();
        for split in 0..=bytes.len() {
            let mut decoder = Decoder::new();
            decoder.push(&bytes[..split]);
            let mut found: Vec<_> = core::iter::from_fn(|| decoder.poll().unwrap()).collect();
            decoder.push(&bytes[split..]);
            found.extend(core::iter::from_fn(|| decoder.poll().unwrap()));
            assert_eq!(found, messages(), "split at byte {split}");
        }
    }

    #[test]
    fn a_message_that_the_other_side_would_refuse_is_not_sent() {
        let message = Message::Refused { request: None, reason: "x".repeat(LIMIT as usize) };
        assert!(matches!(encode(&message), Err(ExchangeError::Frame(FrameError::TooLong { .. }))));
    }

    #[test]
    fn a_message_brings_as_many_descriptors_as_it_says() {
        let counts: Vec<_> = messages().iter().map(Message::descriptors).collect();
        assert_eq!(counts, [0, 0, 1, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_message_about_no_chunks_or_too_many_is_neither_sent_nor_taken() {
        for count in [0, MAX_DESCRIPTORS + 1, 4000] {
            let message = Message::Chunks { request: 1, lengths: vec![1; count] };
            assert_eq!(encode(&message), Err(ExchangeError::Chunks { count }));
            let mut decoder = Decoder::new();
            decoder.push(&frame(&[&serde_json::to_vec(&message).unwrap()]));
            assert_eq!(decoder.poll(), Err(ExchangeError::Chunks { count }));
        }
        let most = Message::Chunks { request: 1, lengths: vec![u64::MAX; MAX_DESCRIPTORS] };
        let mut decoder = Decoder::new();
        decoder.push(&encode(&most).unwrap());
        assert_eq!(decoder.poll(), Ok(Some(most)));
    }

    #[test]
    fn frames_without_a_message_are_malformed() {
        for json in [
            "",
            "{}",
            "null",
            "[1]",
            r#"{"hello":{}}"#,
            r#"{"hello":{"version":1,"incarnation":"zz"}}"#,
            r#"{"fetch":{"request":-1,"device":"22222222-2222-2222-2222-222222222222","id":0}}"#,
            r#"{"export":{"request":1,"export":{"kind":"handle","length":1,"bytes":"0"}}}"#,
            r#"{"export":{"request":1,"export":{"kind":"chunks","length":1,"count":-1}}}"#,
            r#"{"chunks":{"request":1,"lengths":[1,18446744073709551616]}}"#,
            r#"{"prove":{"request":1,"device":"22222222-2222-2222-2222-222222222222","id":7}}"#,
            r#"{"verdict":{"request":1,"wrong":{"at":3,"expected":256,"found":0}}}"#,
            r#"{"farewell":{}}"#,
            &"[".repeat(10_000),
        ] {
            let mut decoder = Decoder::new();
            decoder.push(&frame(&[json.as_bytes()]));
            decoder.poll().expect_err(json);
        }
    }

    proptest! {
        #[test]
        fn garbage_never_panics(payload in proptest::collection::vec(any::<u8>(), 0..256), framed in any::<bool>()) {
            let mut decoder = Decoder::new();
            decoder.push(&if framed { frame(&[&payload]) } else { payload });
            while let Ok(Some(_)) = decoder.poll() {}
        }
    }
}
