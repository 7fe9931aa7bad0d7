//! The copies that fill slices and empty them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_device::{CopyDescriptor, Memory};
use tokio::sync::Notify;

use super::copier::{End, Held, Kind, Listed, Progress};
use super::{Bytes, Chunk, Piece, Side, Slice};
use crate::error::Result;

/// Up to so many pieces are one DMA each, without the kernel and the bounce buffer.
pub(in super::super) const FEW: usize = 4;

/// How a copy ended, and its slice, unless a device that is lost may still use it.
pub(in super::super) type Ended = (Option<Slice>, Result<()>);

/// A copy that was begun. What it uses is kept until its end, also if this is dropped.
#[derive(Debug)]
pub(in super::super) enum Copying {
    /// By the device.
    Queued(Queued),
    /// By a thread.
    Blocking(Arc<Mutex<Option<Ended>>>),
}

/// A copy of the device's that uses a slice.
pub(in super::super) struct Queued {
    pub(super) progress: Arc<Progress>,
    /// Until it ends.
    held: Option<Held>,
}

impl std::fmt::Debug for Queued {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queued").field("progress", &self.progress).finish_non_exhaustive()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Copying {
    /// How it ended, once.
    pub(in super::super) fn ended(&mut self) -> Option<Ended> {
        match self {
            Self::Queued(queued) => queued.ended(),
            Self::Blocking(ended) => locked(ended).take(),
        }
    }

    /// Has `wake` told of its end, which a thread that copies does anyway.
    pub(in super::super) fn watch(&mut self, wake: &Arc<Notify>) {
        if let Self::Queued(queued) = self {
            queued.progress.watch(wake);
        }
    }
}

impl Queued {
    fn ended(&mut self) -> Option<Ended> {
        self.held.as_ref()?;
        let end = self.progress.end()?;
        let (slice, hold) = self.held.take()?;
        match end {
            End::Quiet(result) => Some((slice, result)),
            End::Lost(error) => {
                // The device may still use all of it.
                std::mem::forget((slice, hold));
                Some((None, Err(error)))
            }
        }
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            self.progress.keep(held);
        }
    }
}

/// Fills a slice from device memory, or the other way round, by its side: `pieces` side by side are
/// the first `len` bytes of the slice. Copies with fewer bytes `ahead` go first. `wake` is told of the
/// end if a thread copies.
///
/// # Safety
/// The pieces lie in registered memory that `hold` keeps registered, and nobody else relies on those
/// that are written.
pub(in super::super) unsafe fn copy(
    slice: Slice,
    mut pieces: impl Iterator<Item = Piece> + Send + 'static,
    len: u64,
    ahead: u64,
    hold: Arc<dyn Send + Sync>,
    wake: &Arc<Notify>,
) -> Copying {
    let Some(Bytes::Staged(staged)) = &slice.bytes else {
        let (ended, wake) = (Arc::<Mutex<Option<Ended>>>::default(), Arc::clone(wake));
        let result = Arc::clone(&ended);
        tokio::task::spawn_blocking(move || {
            let mut slice = slice;
            // SAFETY: the caller's contract; `hold` is kept until it returns.
            let copied = unsafe { copy_pageable(&mut slice, pieces) };
            drop(hold);
            *locked(&result) = Some((Some(slice), copied));
            wake.notify_one();
        });
        return Copying::Blocking(ended);
    };
    let (side, pinned, pool) = (slice.side, staged.pinned.addr(), Arc::clone(&slice.pool));
    let few: Vec<_> = pieces.by_ref().take(FEW + 1).collect();
    let (mut list, mut copies) = (Vec::new(), Vec::new());
    match staged.bounce.as_ref().map(Memory::addr) {
        Some(_) if few.len() <= FEW => place(few, pinned, side, u64::MAX, &mut copies),
        bounce => {
            let tile = bounce.map_or(u64::MAX, |_| pool.copier.lane().tuning.values.tile_bytes);
            let pieces = few.into_iter().chain(pieces);
            place(pieces, bounce.unwrap_or(pinned), side, tile, &mut list);
            copies.extend(bounce.map(|bounce| match side {
                Side::Send => CopyDescriptor { src: bounce, dst: pinned, len },
                Side::Receive => CopyDescriptor { src: pinned, dst: bounce, len },
            }));
        }
    }
    let progress = Arc::<Progress>::default();
    let kind = match side {
        Side::Send => Kind::Send,
        Side::Receive => Kind::Receive,
    };
    let copy =
        Listed { progress: Arc::clone(&progress), kind, bytes: len, ahead, pieces: list, copies };
    // SAFETY: the caller's contract; the slice and what holds the pieces are kept until the end by
    // the copying or, if that is dropped, by the progress; slices are inside their allocations.
    unsafe { pool.copier.list(copy) };
    Copying::Queued(Queued { progress, held: Some((Some(slice), hold)) })
}

/// Fills a chunk from device memory, or the other way round, by its side: `pieces` side by side are its
/// first `len` bytes.
///
/// # Safety
/// As [`copy`]; `hold` keeps the chunk, too.
pub(in super::super) unsafe fn copy_chunk(
    chunk: &Chunk,
    pieces: impl Iterator<Item = Piece>,
    len: u64,
    ahead: u64,
    hold: Arc<dyn Send + Sync>,
) -> Copying {
    let copier = &chunk.pool().copier;
    let tile = copier.lane().tuning.values.tile_bytes;
    let (mut list, side) = (Vec::new(), chunk.side());
    place(pieces, chunk.addr(), side, tile, &mut list);
    let progress = Arc::<Progress>::default();
    let kind = match side {
        Side::Send => Kind::Gather,
        Side::Receive => Kind::Scatter,
    };
    let (pieces, copies) = (list, Vec::new());
    let copy = Listed { progress: Arc::clone(&progress), kind, bytes: len, ahead, pieces, copies };
    // SAFETY: as in `copy`; the chunk is kept like the pieces.
    unsafe { copier.list(copy) };
    Copying::Queued(Queued { progress, held: Some((None, hold)) })
}

/// # Safety
/// As [`copy`].
unsafe fn copy_pageable(slice: &mut Slice, pieces: impl Iterator<Item = Piece>) -> Result<()> {
    let device = Arc::clone(&slice.pool.copier.lane().device);
    let (side, bytes) = (slice.side, slice.bytes_mut());
    let mut at = 0;
    for (addr, len) in pieces {
        let part = &mut bytes[at..at + len as usize];
        match side {
            // SAFETY: the caller's contract.
            Side::Send => unsafe { device.read(addr, part) }?,
            // SAFETY: the caller's contract.
            Side::Receive => unsafe { device.write(addr, part) }?,
        }
        at += len as usize;
    }
    Ok(())
}

/// Adds pieces as descriptors to or from the run of memory at `middle`, none longer than a tile.
fn place(
    pieces: impl IntoIterator<Item = Piece>,
    mut middle: u64,
    side: Side,
    tile: u64,
    list: &mut Vec<CopyDescriptor>,
) {
    for (mut addr, mut left) in pieces {
        while left > 0 {
            let len = left.min(tile);
            list.push(match side {
                Side::Send => CopyDescriptor { src: addr, dst: middle, len },
                Side::Receive => CopyDescriptor { src: middle, dst: addr, len },
            });
            middle += len;
            (addr, left) = (addr + len, left - len);
        }
    }
}
