//! What tests need of every kind of GPU memory, simulated or real.

use crate::compact::CompactCopy;
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

/// The descriptors of one launch of the compact kernel, as `kernels/copy.cu` reads them: 14 words
/// each. Page lists are read where the copies have them.
pub fn compact_descriptors(
    copies: &[CompactCopy<'_>],
    warps: u64,
    tile_bytes: u64,
) -> Vec<[u64; 15]> {
    let mut units = 0;
    let descriptor = |copy: &CompactCopy<'_>| {
        let copy = copy.normal();
        let division = copy.divide(warps, tile_bytes);
        let list = |pages: &[u32]| {
            if pages.is_empty() { 0 } else { pages.as_ptr().expose_provenance() as u64 }
        };
        let lists = [list(copy.src.pages), list(copy.dst.pages)];
        let descriptor = copy.descriptor(&division, lists, units);
        units = descriptor.end;
        descriptor.words()
    };
    copies.iter().map(descriptor).collect()
}
