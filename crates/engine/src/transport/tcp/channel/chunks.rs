//! What is gathered ahead of slices, and collected behind them.

use std::sync::Arc;

use super::super::layout::{Cursor, Home, Layout};
use super::copies::EXTENT;
use super::{Channel, ChunkCopy, Collected, Gathered, Held, Move};
use crate::transport::staging::{CHUNK, FEW, Side, Staging, copy_chunk};

/// Chunks that a request and a lane may have ahead of their slices.
const OF_REQUEST: usize = 2;
const OF_LANE: usize = 4;

impl Channel {
    /// Gathers into chunks what will be sent next.
    pub(super) fn gather_ahead(&mut self) {
        let Self { sending, moves, staging, chunk_copies, ahead, .. } = self;
        let mut chunks: usize = moves.values().map(|it| it.chunks.len()).sum();
        for &request in sending.iter() {
            let Some(it) = moves.get_mut(&request).filter(|it| it.failure.is_none()) else {
                continue;
            };
            let Home::Device(device) = it.layout.home else { continue };
            while it.chunks.len() < OF_REQUEST && chunks < OF_LANE {
                let waiting: u64 = it.chunks.iter().map(|it| it.length - it.taken).sum();
                let length = (it.left() - waiting).min(CHUNK);
                if !is_chunk(&it.layout, it.cursor, length, staging) {
                    break;
                }
                let pool = staging.pool(device).ok();
                let Some(chunk) = pool.and_then(|pool| pool.take_chunk(Side::Send)) else { return };
                let held = Arc::new(Held { chunk, _layout: Arc::clone(&it.layout) });
                let pieces = it.cursor.pieces(&*it.layout, length);
                // SAFETY: the layout's pieces were checked, and it or the batch keeps them
                // registered; a gather only reads them, and the chunk is new.
                let copying = unsafe {
                    copy_chunk(
                        &held.chunk,
                        pieces,
                        length,
                        *ahead + waiting,
                        Arc::clone(&held) as _,
                    )
                };
                it.cursor.advance(&it.layout, length);
                it.copies += 1;
                chunks += 1;
                chunk_copies.push(ChunkCopy { request, length, copying, held: Arc::clone(&held) });
                it.chunks.push_back(Gathered { held, ready: false, length, taken: 0 });
            }
        }
    }

    /// A chunk and the place in it for payload that came, if it shall be collected.
    pub(super) fn collect(
        &mut self,
        request: u64,
        from: Cursor,
        length: u64,
    ) -> Option<(Arc<Held>, u64)> {
        let it = self.moves.get(&request)?;
        let Home::Device(device) = it.layout.home else { return None };
        let is_chunk = length <= CHUNK && is_chunk(&it.layout, from, length, &self.staging);
        let left = it.left();
        let at = self.collected.iter().position(|it| it.request == request && it.is_open);
        let at = at.filter(|&at| {
            let fits = self.collected[at].length + length <= CHUNK;
            if !fits {
                self.collected[at].is_open = false;
                self.scatter_whole(at);
            }
            fits
        });
        let at = match at {
            Some(at) => at,
            None if !is_chunk => return None,
            None => {
                let it = self.moves.get(&request)?;
                let chunk = self.staging.pool(device).ok()?.take_chunk(Side::Receive)?;
                let held = Arc::new(Held { chunk, _layout: Arc::clone(&it.layout) });
                let (length, coming, is_open) = (0, 0, true);
                self.collected.push(Collected { request, held, from, length, coming, is_open });
                self.collected.len() - 1
            }
        };
        let collected = &mut self.collected[at];
        let offset = collected.length;
        collected.length += length;
        collected.coming += 1;
        collected.is_open = collected.length < CHUNK && left > 0;
        Some((Arc::clone(&collected.held), offset))
    }

    /// A slice has come to its chunk.
    pub(super) fn came(&mut self, held: &Arc<Held>) {
        let same = |it: &Collected| Arc::ptr_eq(&it.held, held);
        let Some(at) = self.collected.iter().position(same) else { return };
        self.collected[at].coming -= 1;
        self.scatter_whole(at);
    }

    /// Scatters a chunk if all has come to it that will.
    fn scatter_whole(&mut self, at: usize) {
        if self.collected[at].coming > 0 || self.collected[at].is_open {
            return;
        }
        let Collected { request, held, from, length, .. } = self.collected.swap_remove(at);
        let Some(it) = self.moves.get_mut(&request).filter(|it| it.failure.is_none()) else {
            return;
        };
        it.copies += 1;
        let pieces = from.pieces(&*it.layout, length);
        // SAFETY: the layout's pieces were checked, it or the batch keeps them registered, and
        // whoever asked for the transfer leaves them to it.
        let copying = unsafe { copy_chunk(&held.chunk, pieces, length, 0, Arc::clone(&held) as _) };
        self.chunk_copies.push(ChunkCopy { request, length, copying, held });
    }

    /// Takes note of chunks that were filled or emptied. Whether there were any.
    pub(super) fn settle_chunks(&mut self) -> bool {
        let (mut at, before) = (0, self.chunk_copies.len());
        while let Some(copy) = self.chunk_copies.get_mut(at) {
            let Some((_, result)) = copy.copying.ended() else {
                at += 1;
                continue;
            };
            let ChunkCopy { request, length, held, .. } = self.chunk_copies.swap_remove(at);
            let Some(it) = self.moves.get_mut(&request) else { continue };
            it.copies -= 1;
            let gathered = it.chunks.iter_mut().find(|it| Arc::ptr_eq(&it.held, &held));
            match (result, gathered) {
                (Ok(()), Some(gathered)) => gathered.ready = true,
                (Ok(()), None) => it.applied += length,
                (Err(error), _) => it.fail(&error),
            }
            self.changed.push(request);
        }
        self.chunk_copies.len() < before
    }
}

impl Move {
    /// Takes note of a slice that is filled from the first chunk.
    pub(super) fn take_gathered(&mut self, length: u64) {
        let Some(first) = self.chunks.front_mut() else { return };
        first.taken += length;
        if first.taken == first.length {
            self.chunks.pop_front();
        }
    }
}

/// Whether bytes of a request go through a chunk: not if they are few, or lie in few pieces.
fn is_chunk(layout: &Layout, from: Cursor, length: u64, staging: &Staging) -> bool {
    let is_long = layout.length > EXTENT.min(staging.slice_bytes());
    is_long && length > 0 && from.pieces(layout, length).nth(FEW).is_some()
}
