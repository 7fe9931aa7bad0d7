use std::time::Duration;

use kvferry_engine::RangeError;
use kvferry_wire::mooncake::ClientError;

use crate::error::NodeError;

/// Why a transfer to a Mooncake peer failed, or was not begun.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The list is wrong: nothing moved.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The peer's answer to one range.
    #[error("range {index} to or from {peer}: {error}")]
    Refused {
        /// The peer.
        peer: String,
        /// Position of the range in the list.
        index: usize,
        /// What it said, or did not say.
        #[source]
        error: ClientError,
    },
    /// No connection to the peer, or one that broke.
    #[error("range {index} to or from {peer}: {reason}")]
    Connection {
        /// The peer.
        peer: String,
        /// Position of the range in the list.
        index: usize,
        /// The system's word.
        reason: String,
    },
    /// The peer is there, and moves nothing.
    #[error("range {index} to or from {peer}: no progress for {} s", waited.as_secs_f32())]
    Stalled {
        /// The peer.
        peer: String,
        /// Position of the range in the list.
        index: usize,
        /// How long it was waited for.
        waited: Duration,
    },
    /// Another process answers under the peer's name, so its addresses mean nothing any more.
    #[error("peer {peer} was restarted: open it again")]
    Restarted {
        /// The peer.
        peer: String,
    },
    /// The peer's descriptor, which was needed for an unknown address, could not be fetched.
    #[error(transparent)]
    Descriptor(#[from] NodeError),
    /// A device here could not copy.
    #[error("range {index}: {error}")]
    Device {
        /// Position of the range in the list.
        index: usize,
        /// The device's word.
        #[source]
        error: kvferry_engine::Error,
    },
    /// The node was dropped while the transfer ran.
    #[error("the node was closed")]
    Closed,
}
