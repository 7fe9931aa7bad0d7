//! kvferry moves LLM KV cache between the GPU memory of processes on one host.
//!
//! An [`Engine`] moves bytes between registered memory here and at a peer; a [`node::Node`] names
//! an engine so that peers can open it. The README shows both in thirty lines.
//!
//! ```
//! use std::time::Duration;
//! use kvferry::{Config, DeviceName, Engine, Op, Range, State, open_device};
//! use kvferry::node::{Node, NodeOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = Config::default();
//! let device = open_device(DeviceName::Host, &config)?;
//! let engine = Engine::new(config, vec![device.clone()])?;
//! let pages = engine.allocate(&device, 1 << 20)?;
//! pages.write(0, b"a page")?;
//! let node = Node::start(engine.clone(), &NodeOptions::default())?;
//! let peer = node.open(node.name())?;
//! let range = Range { local: pages.addr(), remote: pages.addr() + 4096, len: 6 };
//! let batch = engine.submit(peer.target(), Op::Write, &[range])?;
//! assert_eq!(engine.wait(batch, Duration::from_secs(10))?.state, State::Completed);
//! let mut copy = [0; 6];
//! pages.read(4096, &mut copy)?;
//! assert_eq!(&copy, b"a page");
//! # Ok(())
//! # }
//! ```

#[doc(hidden)]
pub mod abi;

pub use kvferry_engine::*;

/// Names an engine, serves and fetches segment descriptors.
pub use kvferry_node as node;

/// Compiles and runs the README's example with the documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
