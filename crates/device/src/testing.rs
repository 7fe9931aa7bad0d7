//! What tests need of every kind of GPU memory, simulated or real.

use std::fmt::Debug;

/// How a chunk of [`ChunkedMemory`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkKind {
    /// Mapped, and made to be shared with other processes.
    Shareable,
    /// Mapped, and made without the right to be shared.
    Private,
    /// Reserved addresses with nothing behind them.
    Hole,
}

/// Memory as a virtual memory API makes it: chunks of one size, mapped side by side. Freed when
/// dropped.
pub trait ChunkedMemory: Debug + Send + Sync {
    /// First byte.
    fn addr(&self) -> u64;
    /// Bytes of a chunk.
    fn chunk_len(&self) -> u64;
    /// Bytes, holes included.
    fn len(&self) -> u64;
    /// Frees what is at the place of that chunk, and puts a new chunk there.
    fn replace(&mut self, index: usize, kind: ChunkKind);
    /// Never true.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
