//! Device memory where many pieces lie side by side: gathered ahead of the slices that send them, or
//! collected behind those that received them.
//!
//! Where two processes share a device, its contexts take turns, and a kernel waits up to half a
//! millisecond for its own (H200). So kernels are few and large here, and slices go by DMA, which does
//! not wait.

use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_device::{Device, Memory};

use super::{Pool, Side};

/// Bytes of a chunk.
pub(in super::super) const CHUNK: u64 = 4 << 20;

/// The chunks of one device, half of them for either side.
#[derive(Debug)]
pub(super) struct Chunks {
    free: [Mutex<Vec<u64>>; 2],
    _memory: Option<Memory>,
}

impl Chunks {
    /// As many as there is memory for; none is a slower path and no error.
    pub(super) fn new(device: &Arc<dyn Device>, bytes: u64) -> Self {
        let count = bytes / CHUNK;
        let memory = (count > 0).then(|| Arc::clone(device).allocate(count * CHUNK));
        let memory = memory.and_then(|memory| {
            let refused = |error: &_| tracing::debug!(%error, bytes, "no memory to gather ahead");
            memory.inspect_err(refused).ok()
        });
        let (mut send, mut receive) = (Vec::new(), Vec::new());
        if let Some(memory) = &memory {
            send.extend((0..count).map(|at| memory.addr() + at * CHUNK));
            receive = send.split_off(send.len() / 2);
        }
        Self { free: [send.into(), receive.into()], _memory: memory }
    }

    fn free(&self, side: Side) -> MutexGuard<'_, Vec<u64>> {
        self.free[side as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A chunk; its pool gets it back when it is dropped.
pub(in super::super) struct Chunk {
    addr: u64,
    side: Side,
    pool: Arc<Pool>,
}

impl Debug for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chunk").field("addr", &self.addr).finish_non_exhaustive()
    }
}

impl Chunk {
    pub(in super::super) fn addr(&self) -> u64 {
        self.addr
    }

    pub(super) fn side(&self) -> Side {
        self.side
    }

    pub(super) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        self.pool.chunks.free(self.side).push(self.addr);
    }
}

impl Pool {
    /// A free chunk, if there is one.
    pub(in super::super) fn take_chunk(self: &Arc<Self>, side: Side) -> Option<Chunk> {
        let addr = self.chunks.free(side).pop()?;
        Some(Chunk { addr, side, pool: Arc::clone(self) })
    }
}
