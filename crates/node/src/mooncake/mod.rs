//! Mooncake's TCP transport: by which stock Mooncake processes read and write this node's memory, and
//! it theirs.
//!
//! The framing has no authentication: whoever reaches the data port may use all registered memory.
//! `MC_KVFERRY_MOONCAKE=off` closes it, and so does a key. Sockets are the host here, and [`kvferry_wire::mooncake`]
//! the protocol.

mod client;
mod connection;
mod error;
mod memory;
mod overlap;
mod pool;
mod server;
mod transfer;

pub use client::MooncakePeer;
pub use error::TransferError;
pub use transfer::{Transfer, TransferState};

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use kvferry_device::MadeBy;
use kvferry_engine::Engine;
use tokio::runtime::{Handle, Runtime};

use crate::describe::Local;
use crate::error::NodeError;

/// Bounds of Mooncake's TCP transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MooncakeLimits {
    /// Most connections that are served at once. When all are taken, the one that has been idle for
    /// longest makes room, after a quarter of a second at least; if none is idle, the next one
    /// waits.
    pub connections: usize,
    /// How long a connection without an operation is kept.
    pub idle: Duration,
}

impl Default for MooncakeLimits {
    /// 512 connections, 120 s.
    fn default() -> Self {
        Self { connections: 512, idle: Duration::from_secs(120) }
    }
}

/// The transport of one node. Dropping it ends its connections.
#[derive(Debug)]
pub(crate) struct Mooncake {
    /// Taken only by `Drop`.
    runtime: Option<Runtime>,
    handle: Handle,
    /// A fork has none of the runtime's threads, and the same poller.
    made_by: MadeBy,
}

/// How long a header or a status may take, and how long a payload may take for each 256 KiB, or for
/// what is left of it, in transfers of either side: `MC_TCP_STATUS_TIMEOUT_SEC`.
fn progress(engine: &Engine) -> Duration {
    engine.config().tcp_status_timeout
}

/// Threads that move bytes, at most.
const THREADS: usize = 4;

/// Threads that wait for devices, resolvers and descriptors, at most; there is none while nothing of
/// that happens.
const WAITING_THREADS: usize = 16;

/// How long a thread may take to leave a device's copy.
const LEAVE: Duration = Duration::from_secs(5);

impl Mooncake {
    /// Serves `listener`, which must not block.
    pub(crate) fn start(
        local: &Arc<Local>,
        listener: TcpListener,
        limits: MooncakeLimits,
    ) -> Result<Self, NodeError> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads)
            .max_blocking_threads(WAITING_THREADS)
            .thread_name("kvferry-mooncake")
            .enable_io()
            .enable_time()
            .build()
            .map_err(|error| NodeError::system("starting the TCP transport", error))?;
        let listener = {
            let _entered = runtime.enter();
            tokio::net::TcpListener::from_std(listener)
                .map_err(|error| NodeError::system("listening for data", error))?
        };
        runtime.spawn(server::accept(Arc::clone(local), listener, limits));
        let handle = runtime.handle().clone();
        Ok(Self { runtime: Some(runtime), handle, made_by: MadeBy::this_process() })
    }

    /// Opens a peer for transfers by `engine`.
    pub(crate) fn open(&self, name: &str, engine: &Arc<Engine>) -> Result<MooncakePeer, NodeError> {
        MooncakePeer::open(name, engine, &self.handle, progress(engine))
    }
}

impl Drop for Mooncake {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        if !self.made_by.is_this_process() {
            return std::mem::forget(runtime);
        }
        // On a thread of its own: a runtime may not be waited for inside another one, where the
        // application may be now.
        let ended = std::thread::Builder::new()
            .name("kvferry-mooncake".into())
            .spawn(move || runtime.shutdown_timeout(LEAVE));
        let _ = ended.map(std::thread::JoinHandle::join);
    }
}
