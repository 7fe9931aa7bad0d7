//! kvferry moves LLM KV cache between the memory of a prefill and a decode process, on GPUs or in
//! host memory, on one host or over TCP, and between a GPU and host memory: thousands of scattered
//! pieces in one call.
//!
//! An [`Engine`] moves bytes between registered memory here and at a peer, a [`node::Node`] names an
//! engine so that peers can open it, and a [`PageStore`] keeps pages of a GPU's cache in host memory.
//! [`KNOBS`] are environment variables; the `kvferry doctor` command explains them and the machine.
//! The features `cuda` and `rocm` add GPUs, whose libraries are opened at run time.
//!
//! # A first transfer
//!
//! On host memory, by the same code as on a GPU:
//!
//! ```
//! use std::time::Duration;
//! use kvferry::{Config, DeviceName, Engine, Op, Range, State, open_device};
//! use kvferry::node::{Node, NodeOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = open_device(DeviceName::Host, &Config::default())?;
//! let engine = Engine::new(Config::default(), vec![device.clone()])?;
//! let pages = engine.allocate(&device, 1 << 20)?;
//! pages.write(0, b"a page")?;
//! let node = Node::start(engine.clone(), &NodeOptions::default())?;
//! // Normally the name of another process's node; a node can open itself, too.
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
//!
//! # Pages of a cache
//!
//! [`Paged`] names pages by their numbers and costs the host the same for one layer and for sixty:
//!
//! ```
//! use std::time::Duration;
//! use kvferry::{Config, DeviceName, Engine, Op, Paged, Pages, State, open_device};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! const LAYERS: u32 = 4;
//! const PAGE: u64 = 4096;
//! # let device = open_device(DeviceName::Host, &Config::default())?;
//! # let engine = Engine::new(Config::default(), vec![device.clone()])?;
//! // Two caches of 16 pages a layer, one layer behind the other.
//! let (from, to) = (engine.allocate(&device, 64 * PAGE)?, engine.allocate(&device, 64 * PAGE)?);
//! from.write(PAGE, &[7; PAGE as usize])?;
//! let here = Pages::whole(from.addr(), &[1, 5], PAGE, 16 * PAGE);
//! let there = Pages::whole(to.addr(), &[9, 3], PAGE, 16 * PAGE);
//! let pages = [Paged::whole_pages(here, there, LAYERS, PAGE)];
//! // Within one process, the target is the engine itself.
//! let batch = engine.submit(&engine.local()?, Op::Write, &pages)?;
//! let status = engine.wait(batch, Duration::from_secs(10))?;
//! assert_eq!((status.state, status.bytes), (State::Completed, 8 * PAGE));
//! let mut page = [0; PAGE as usize];
//! to.read(9 * PAGE, &mut page)?;
//! assert_eq!(page, [7; PAGE as usize]);
//! # Ok(())
//! # }
//! ```
//!
//! # What goes wrong
//!
//! A list with any mistake in it is refused whole, before anything moves, and the error names the
//! piece; what fails later is in the batch's [`State`]. A batch ends exactly once:
//!
//! ```
//! use kvferry::{Config, DeviceName, Engine, Error, Op, Range, RangeError, open_device};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let device = open_device(DeviceName::Host, &Config::default())?;
//! # let engine = Engine::new(Config::default(), vec![device.clone()])?;
//! # let pages = engine.allocate(&device, 1 << 20)?;
//! let beyond = Range { local: pages.addr(), remote: pages.addr() + (1 << 20) - 1, len: 2 };
//! let refused = engine.submit(&engine.local()?, Op::Write, &[beyond]);
//! assert!(matches!(refused, Err(Error::Range(RangeError::OutOfBounds { index: 0, beyond: 1, .. }))));
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
