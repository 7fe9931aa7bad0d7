//! Frames of `u64 length (little-endian), payload`, from bytes that arrive in any portions.

use alloc::vec::Vec;

const PREFIX: usize = size_of::<u64>();

/// Why a stream of frames cannot go on. The connection is to be closed: where the next frame would
/// begin is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The length is zero.
    #[error("a frame of no bytes")]
    Empty,
    /// The length is beyond the limit; such a number is often text of another protocol.
    #[error("a frame of {length} bytes, the limit is {limit}")]
    TooLong {
        /// What the frame's first 8 bytes say.
        length: u64,
        /// The limit.
        limit: u64,
    },
}

/// Splits a byte stream into payloads.
#[derive(Debug)]
pub(crate) struct Frames {
    limit: u64,
    buffer: Vec<u8>,
}

impl Frames {
    pub(crate) fn new(limit: u64) -> Self {
        Self { limit, buffer: Vec::new() }
    }

    /// Takes bytes as they came. Holds what was pushed and no more, whatever a length claims.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole payload. An error stays: later calls return it again.
    pub(crate) fn poll(&mut self) -> Result<Option<Vec<u8>>, FrameError> {
        let Some((prefix, rest)) = self.buffer.split_first_chunk::<PREFIX>() else {
            return Ok(None);
        };
        let (length, limit) = (u64::from_le_bytes(*prefix), self.limit);
        if length == 0 {
            return Err(FrameError::Empty);
        }
        let too_long = FrameError::TooLong { length, limit };
        let count = usize::try_from(length).ok().filter(|_| length <= limit).ok_or(too_long)?;
        let Some(payload) = rest.get(..count) else { return Ok(None) };
        let payload = payload.to_vec();
        self.buffer.drain(..PREFIX + count);
        Ok(Some(payload))
    }

    /// Whether no frame has begun.
    pub(crate) fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }
}

/// A frame of the joined `parts`.
pub(crate) fn encode(parts: &[&[u8]]) -> Vec<u8> {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let mut frame = Vec::with_capacity(PREFIX + length);
    frame.extend_from_slice(&(length as u64).to_le_bytes());
    parts.iter().for_each(|part| frame.extend_from_slice(part));
    frame
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_length_at_the_limit_passes_and_one_more_does_not() {
        let mut frames = Frames::new(3);
        frames.push(&encode(&[b"abc"]));
        assert_eq!(frames.poll(), Ok(Some(b"abc".to_vec())));
        frames.push(&encode(&[b"abcd"]));
        assert_eq!(frames.poll(), Err(FrameError::TooLong { length: 4, limit: 3 }));
    }

    #[test]
    fn a_bad_length_is_refused_before_its_payload_arrives() {
        for length in [1 << 63, u64::MAX, (1 << 20) + 1] {
            let mut frames = Frames::new(1 << 20);
            frames.push(&length.to_le_bytes());
            assert_eq!(frames.poll(), Err(FrameError::TooLong { length, limit: 1 << 20 }));
            assert!(frames.buffer.capacity() < 1024, "allocated for a length of {length}");
        }
        let mut frames = Frames::new(1 << 20);
        frames.push(&[0; 8]);
        assert_eq!(frames.poll(), Err(FrameError::Empty));
        assert_eq!(frames.poll(), Err(FrameError::Empty), "the error stays");
    }

    proptest! {
        #[test]
        fn frames_do_not_depend_on_how_their_bytes_arrive(
            payloads in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..40), 0..6),
            portion in 1usize..20,
        ) {
            let bytes: Vec<u8> = payloads.iter().flat_map(|payload| encode(&[payload])).collect();
            let mut frames = Frames::new(64);
            let mut found = Vec::new();
            for portion in bytes.chunks(portion) {
                frames.push(portion);
                while let Some(payload) = frames.poll().unwrap() {
                    found.push(payload);
                }
            }
            prop_assert_eq!(found, payloads);
            prop_assert!(frames.is_empty());
        }
    }
}
