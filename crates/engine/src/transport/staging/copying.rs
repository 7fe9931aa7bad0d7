//! The copies that fill slices and empty them.

use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, PoisonError};

use kvferry_device::{CopyDescriptor, CopySource, Left, Memory, Ticket, Work};
use tokio::sync::Notify;

use super::{Bytes, Piece, Pool, Side, Slice, Staged, Staging};
use crate::error::{Error, Result};

/// Up to so many pieces are one DMA each, without the kernel and the bounce buffer.
const FEW: usize = 4;

/// How a copy ended, and its slice, unless a device that is lost may still use it.
pub(in super::super) type Ended = (Option<Slice>, Result<()>);

/// A copy that was begun. What it uses is kept until its end, also if this is dropped.
#[derive(Debug)]
pub(in super::super) enum Copying {
    /// By the device.
    Queued(Queued),
    /// By a thread.
    Blocking(Arc<Mutex<Option<Ended>>>),
    /// It did not start.
    Over(Option<Ended>),
}

/// A submission that uses a slice.
pub(in super::super) struct Queued {
    staging: Arc<Staging>,
    ticket: Ticket,
    /// Until it ends: the slice, and what keeps the pieces registered.
    held: Option<(Slice, Arc<dyn Send + Sync>)>,
    /// Why it is not whole, though it will end.
    failure: Option<Error>,
    watched: bool,
}

impl Debug for Queued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queued").field("ticket", &self.ticket).finish_non_exhaustive()
    }
}

impl Copying {
    /// How it ended, once.
    pub(in super::super) fn ended(&mut self) -> Option<Ended> {
        match self {
            Self::Queued(queued) => queued.ended(),
            Self::Blocking(ended) => ended.lock().unwrap_or_else(PoisonError::into_inner).take(),
            Self::Over(ended) => ended.take(),
        }
    }

    /// Has `wake` told of its end, which a thread that copies does anyway.
    pub(in super::super) fn watch(&mut self, wake: &Arc<Notify>) {
        let Self::Queued(queued) = self else { return };
        let Some((slice, _)) = queued.held.as_ref().filter(|_| !queued.watched) else { return };
        queued.watched = true;
        let (lane, wake) = (Arc::clone(&slice.pool.lane), Arc::clone(wake));
        let tell = Box::new(move |_| wake.notify_one());
        queued.staging.watcher.watch(lane, queued.ticket, tell);
    }
}

impl Queued {
    fn ended(&mut self) -> Option<Ended> {
        let lane = &self.held.as_ref()?.0.pool.lane;
        let done = lane.completions.done(self.ticket);
        match if done { Ok(()) } else { lane.check() } {
            Ok(()) if !done => None,
            Ok(()) => {
                let (slice, _) = self.held.take()?;
                Some((Some(slice), self.failure.take().map_or(Ok(()), Err)))
            }
            Err(error) => {
                // The device may still use all of it.
                std::mem::forget(self.held.take());
                Some((None, Err(error.into())))
            }
        }
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        let Some(held) = self.held.take() else { return };
        let lane = Arc::clone(&held.0.pool.lane);
        let keep = Box::new(move |ended: Result<()>| match ended {
            Ok(()) => drop(held),
            Err(_) => std::mem::forget(held),
        });
        self.staging.watcher.watch(lane, self.ticket, keep);
    }
}

/// Fills a slice from device memory, or the other way round, by its side: `pieces` side by side are
/// the first `len` bytes of the slice. `wake` is told of the end if a thread copies.
///
/// # Safety
/// The pieces lie in registered memory that `hold` keeps registered, and nobody else relies on those
/// that are written.
pub(in super::super) unsafe fn copy(
    staging: &Arc<Staging>,
    slice: Slice,
    pieces: impl Iterator<Item = Piece> + Send + 'static,
    len: u64,
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
            *result.lock().unwrap_or_else(PoisonError::into_inner) = Some((Some(slice), copied));
            wake.notify_one();
        });
        return Copying::Blocking(ended);
    };
    let pool = Arc::clone(&slice.pool);
    // SAFETY: the caller's contract; the slice is kept until the copy has ended.
    let submitted = unsafe { pool.submit(staged, slice.side, pieces, len) };
    let (ticket, failure) = match submitted {
        Ok(ticket) => (ticket, None),
        Err(error) => match error.left {
            Left::Nothing => return Copying::Over(Some((Some(slice), Err(error.error.into())))),
            Left::Until(ticket) => (ticket, Some(Error::from(error.error))),
            Left::Unknown => {
                pool.lane.lose(&error.error);
                (Ticket::NEVER, Some(error.error.into()))
            }
        },
    };
    let (staging, held) = (Arc::clone(staging), Some((slice, hold)));
    Copying::Queued(Queued { staging, ticket, held, failure, watched: false })
}

/// # Safety
/// As [`copy`].
unsafe fn copy_pageable(slice: &mut Slice, pieces: impl Iterator<Item = Piece>) -> Result<()> {
    let device = Arc::clone(&slice.pool.lane.device);
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

impl Pool {
    /// # Safety
    /// As [`copy`]; `staged` is used until the submission is done.
    unsafe fn submit(
        &self,
        staged: &Staged,
        side: Side,
        mut pieces: impl Iterator<Item = Piece>,
        len: u64,
    ) -> Result<Ticket, kvferry_device::SubmitError> {
        let pinned = staged.pinned.addr();
        let few: Vec<_> = pieces.by_ref().take(FEW + 1).collect();
        let bounce = staged.bounce.as_ref().filter(|_| few.len() > FEW).map(Memory::addr);
        let values = &self.lane.tuning.values;
        let tiles = bounce.map_or(u64::MAX, |_| values.tile_bytes);
        let middle = bounce.unwrap_or(pinned);
        let mut source =
            Tiles { pieces: few.into_iter().chain(pieces), now: (0, 0), middle, side, tiles };
        let between = bounce.map(|bounce| match side {
            Side::Send => CopyDescriptor { src: bounce, dst: pinned, len },
            Side::Receive => CopyDescriptor { src: pinned, dst: bounce, len },
        });
        let mut work = Work {
            kernel: bounce.is_some(),
            max_grid_blocks: values.max_grid_blocks,
            ..Work::pieces(&mut source)
        };
        match side {
            Side::Send => work.last = between.as_slice(),
            Side::Receive => work.first = between.as_slice(),
        }
        // SAFETY: the caller's contract; slices are inside their own allocations.
        unsafe { self.lane.lock().submit(&mut work) }
    }
}

/// Pieces as descriptors to or from a run of memory, no longer than a tile.
struct Tiles<I> {
    pieces: I,
    now: Piece,
    /// The next byte of the run.
    middle: u64,
    side: Side,
    tiles: u64,
}

impl<I: Iterator<Item = Piece>> CopySource for Tiles<I> {
    fn fill(&mut self, slot: &mut [CopyDescriptor]) -> usize {
        for (count, place) in slot.iter_mut().enumerate() {
            if self.now.1 == 0 {
                match self.pieces.next() {
                    Some(piece) => self.now = piece,
                    None => return count,
                }
            }
            let (addr, len) = (self.now.0, self.now.1.min(self.tiles));
            *place = match self.side {
                Side::Send => CopyDescriptor { src: addr, dst: self.middle, len },
                Side::Receive => CopyDescriptor { src: self.middle, dst: addr, len },
            };
            self.middle += len;
            self.now = (addr + len, self.now.1 - len);
        }
        slot.len()
    }
}
