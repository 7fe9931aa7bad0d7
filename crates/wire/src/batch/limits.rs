use alloc::vec::Vec;

use super::codec::{Reader, Write};

/// What one side takes. Each side says so in its hello, and the other one keeps to it: going beyond
/// closes the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest frame without payload, in bytes with its header; 1 KiB to 16 MiB.
    pub frame_bytes: u32,
    /// Longest payload of one DATA frame: the bytes of a staging slot.
    pub slot_bytes: u32,
    /// Most payload bytes of one request.
    pub request_bytes: u64,
    /// Most entries and page numbers, together, of one request.
    pub ranges: u32,
    /// Most requests that are open on a lane at once; 1 to 65536.
    pub requests: u32,
    /// Most DATA frames that may be under way to this side: its credits; 1 to 65536.
    pub credits: u32,
    /// This side closes a lane that it waits for if nothing arrives for so many milliseconds, and
    /// one whose frame is not whole so long after its first byte; 10 ms to a day.
    pub progress_ms: u32,
    /// A responder closes a lane that had no open request for so many milliseconds; 0 for never.
    pub idle_ms: u32,
}

/// Limits that no engine can work with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{limit} is {value}, and has to be {least} to {most}")]
pub struct LimitError {
    /// Which one.
    pub limit: &'static str,
    /// Its value.
    pub value: u64,
    /// The least that is possible.
    pub least: u64,
    /// The most that is possible.
    pub most: u64,
}

impl Limits {
    /// Checks that each is possible.
    ///
    /// # Errors
    /// The first that is not.
    pub fn check(&self) -> Result<(), LimitError> {
        let among = |limit, value: u64, least, most| {
            let error = LimitError { limit, value, least, most };
            if (least..=most).contains(&value) { Ok(()) } else { Err(error) }
        };
        let count = 1 << 16;
        among("frame_bytes", self.frame_bytes.into(), 1 << 10, 16 << 20)?;
        among("slot_bytes", self.slot_bytes.into(), 1, u32::MAX.into())?;
        among("request_bytes", self.request_bytes, 1, u64::MAX)?;
        among("ranges", self.ranges.into(), 1, u32::MAX.into())?;
        among("requests", self.requests.into(), 1, count)?;
        among("credits", self.credits.into(), 1, count)?;
        among("progress_ms", self.progress_ms.into(), 10, 86_400_000)
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        out.u64(self.request_bytes);
        out.u32(self.frame_bytes);
        out.u32(self.slot_bytes);
        out.u32(self.ranges);
        out.u32(self.requests);
        out.u32(self.credits);
        out.u32(self.progress_ms);
        out.u32(self.idle_ms);
    }

    pub(super) fn decode(reader: &mut Reader<'_>) -> Option<Self> {
        Some(Self {
            request_bytes: reader.u64()?,
            frame_bytes: reader.u32()?,
            slot_bytes: reader.u32()?,
            ranges: reader.u32()?,
            requests: reader.u32()?,
            credits: reader.u32()?,
            progress_ms: reader.u32()?,
            idle_ms: reader.u32()?,
        })
    }
}

impl Default for Limits {
    /// Of a slot as in Mooncake's RFC, 16 MiB; a lane holds at most about 512 KiB of framing.
    fn default() -> Self {
        Self {
            frame_bytes: 256 << 10,
            slot_bytes: 16 << 20,
            request_bytes: 1 << 40,
            ranges: 16_000,
            requests: 64,
            credits: 8,
            progress_ms: 10_000,
            idle_ms: 120_000,
        }
    }
}
