//! What kvferry says over sockets, without the sockets.
//!
//! [`handshake`] frames Mooncake's peer-to-peer metadata requests, [`segment`] is the descriptor
//! that they fetch, [`mooncake`] frames its TCP data transport, [`batch`] is our own, and
//! [`exchange`] is how two engines of one host hand over exports. Every length is checked before
//! anything is allocated for it, and what a peer sent is an error at worst, never a panic. The caller
//! owns sockets, clocks and threads: without `std` there are none here.

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod batch;
pub mod checksum;
pub mod exchange;
mod frame;
pub mod handshake;
mod hex;
pub mod mooncake;
pub mod segment;

pub use frame::FrameError;
pub use hex::{Id, Uuid};
