//! A node: one engine under a name that peers can open.
//!
//! It answers Mooncake's metadata handshake on a TCP port, hands out exports on a Unix socket to
//! engines of the same user on the same host, and opens such peers itself. The open connection to
//! a peer is also how its death is noticed. Stock Mooncake processes read and write its memory over
//! Mooncake's own TCP transport.

#![forbid(unsafe_code)]

mod address;
mod batch_port;
mod channel;
mod describe;
mod error;
mod exports;
mod handshake;
mod monitor;
mod mooncake;
mod node;
mod peer;
mod service;
mod socket;

pub use error::NodeError;
pub use mooncake::{MooncakeLimits, MooncakePeer, Transfer, TransferError, TransferState};
pub use node::{Node, NodeOptions};
pub use peer::Peer;
