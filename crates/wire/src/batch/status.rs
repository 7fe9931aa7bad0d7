//! Codes and reasons: why a request, a hello or a lane ended.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt::{self, Display};

use super::codec::Write;

/// Longest reason, in bytes.
pub const REASON_LENGTH: usize = 256;

macro_rules! codes {
    ($(#[$doc:meta])* $name:ident { $($(#[$about:meta])* $variant:ident = $code:literal, $text:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $($(#[$about])* $variant,)*
            /// A code of a newer peer.
            Other(u32),
        }

        impl $name {
            pub(super) fn code(self) -> u32 {
                match self {
                    $(Self::$variant => $code,)*
                    Self::Other(code) => code,
                }
            }

            pub(super) fn from_code(code: u32) -> Self {
                match code {
                    $($code => Self::$variant,)*
                    code => Self::Other(code),
                }
            }
        }

        impl Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$variant => f.write_str($text),)*
                    Self::Other(code) => write!(f, "code {code}"),
                }
            }
        }
    };
}

codes! {
    /// How a request ended at the responder. Whatever the code, the responder neither reads nor
    /// writes for the request any more.
    Code {
        /// Every byte is where it belongs.
        Done = 0, "done";
        /// The initiator wanted it no more.
        Cancelled = 1, "cancelled";
        /// A range is not inside its segment.
        OutOfBounds = 2, "out of bounds";
        /// The segment is not there, or is another generation of it.
        UnknownSegment = 3, "unknown segment";
        /// The segment's owner does not allow it.
        NotAllowed = 4, "not allowed";
        /// Ranges overlap, or are otherwise no request that could be carried out.
        BadRequest = 5, "bad request";
        /// A payload's checksum is not that of its bytes.
        Corrupt = 6, "corrupt payload";
        /// It made no progress.
        TimedOut = 7, "no progress";
        /// A device could not copy.
        DeviceFailed = 8, "device failed";
        /// No memory or slots.
        Exhausted = 9, "out of resources";
        /// It is more than the limits allow.
        TooLarge = 10, "too large";
        /// The peer is shutting down.
        ShuttingDown = 11, "shutting down";
    }
}

codes! {
    /// Why a hello was refused.
    Refusal {
        /// The major versions differ.
        UnknownVersion = 1, "unknown version";
        /// Another engine listens there now.
        WrongIncarnation = 2, "wrong incarnation";
        /// Only peers with the pre-shared key are served.
        AuthenticationRequired = 3, "authentication required";
        /// The proof is not one with this side's key.
        AuthenticationFailed = 4, "authentication failed";
        /// The hello's limits are impossible.
        BadLimits = 5, "impossible limits";
        /// A newer connection of this lane exists.
        StaleLane = 6, "stale lane";
        /// No more lanes.
        Busy = 7, "busy";
        /// The engine is shutting down.
        ShuttingDown = 8, "shutting down";
    }
}

codes! {
    /// Why a side says goodbye.
    Farewell {
        /// The lane is not needed any more.
        Done = 0, "done";
        /// The engine shuts down. What is open goes on; nothing new begins.
        ShuttingDown = 1, "shutting down";
        /// The other side broke the protocol. The lane closes at once.
        Violation = 2, "protocol violation";
        /// The other side was silent for too long. The lane closes at once.
        Silence = 3, "silence";
    }
}

/// How a request ended, and why, for a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// For programs.
    pub code: Code,
    /// For people; cut off at [`REASON_LENGTH`] bytes.
    pub reason: String,
}

impl Status {
    /// Every byte is where it belongs.
    pub const DONE: Self = Self { code: Code::Done, reason: String::new() };

    /// Of this code and reason.
    pub fn new(code: Code, reason: impl Into<String>) -> Self {
        Self { code, reason: reason.into() }
    }

    /// Whether the request did what it was asked for.
    pub fn is_done(&self) -> bool {
        self.code == Code::Done
    }
}

impl Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.reason.is_empty() {
            return Display::fmt(&self.code, f);
        }
        write!(f, "{}: {}", self.code, self.reason)
    }
}

/// Appends a reason, cut off where it is too long.
pub(super) fn encode_reason(out: &mut Vec<u8>, reason: &str) {
    out.extend_from_slice(&reason.as_bytes()[..reason.floor_char_boundary(REASON_LENGTH)]);
}

/// The rest of a frame's body, whatever it is.
pub(super) fn decode_reason(rest: &[u8]) -> String {
    String::from_utf8_lossy(&rest[..rest.len().min(REASON_LENGTH)]).to_string()
}

/// A body of a code, a number and a reason.
pub(super) fn encode_coded(out: &mut Vec<u8>, code: u32, reason: &str) {
    out.u32(code);
    encode_reason(out, reason);
}
