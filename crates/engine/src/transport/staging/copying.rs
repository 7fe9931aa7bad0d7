//! The copies that fill slices and empty them.
//!
//! A submission costs the host some 30 us, one after the other, and lanes that wait for each other's
//! fall asleep. So a lane only lists its copy, and submits if nobody else does just now. What is
//! listed then goes several slices at once: one launch for all of their pieces, and a DMA for each.

use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_device::{CopyDescriptor, CopySource, Left, Memory, Queue, Ticket, Work};
use tokio::sync::Notify;

use super::{Bytes, Piece, Pool, Side, Slice, Staging};
use crate::error::{Error, Result};

/// Up to so many pieces are one DMA each, without the kernel and the bounce buffer.
const FEW: usize = 4;

/// Descriptors of a slice that its lane makes, 100 KB of them; a slice of tiny pieces has more.
const PREPARED: usize = 4096;

/// Slices and bytes of one submission, whose slices end together.
const GROUP: usize = 8;
const GROUP_BYTES: u64 = 4 << 20;

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
    staging: Arc<Staging>,
    stage: Arc<Mutex<Stage>>,
    /// Until it ends: the slice, and what keeps the pieces registered.
    held: Option<(Slice, Arc<dyn Send + Sync>)>,
    watched: bool,
}

/// How far a copy is.
#[derive(Clone, Debug)]
enum Stage {
    Listed,
    Submitted {
        ticket: Ticket,
        /// Why it is not whole, though it will end.
        failure: Option<Error>,
    },
    Refused(Error),
}

/// A copy that waits to be submitted. Its slice and pieces are kept by its [`Queued`].
pub(super) struct Listed {
    stage: Arc<Mutex<Stage>>,
    side: Side,
    bytes: u64,
    /// Bytes that its socket has to do before.
    ahead: u64,
    /// For the kernel or, where there is none, for DMA.
    pieces: Option<Box<dyn CopySource + Send>>,
    /// For DMA: behind the pieces when it sends, before them when it receives.
    copies: Vec<CopyDescriptor>,
}

impl Debug for Queued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queued").field("stage", &self.stage).finish_non_exhaustive()
    }
}

impl Debug for Listed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listed").field("stage", &self.stage).finish_non_exhaustive()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_listed(stage: &Mutex<Stage>) -> bool {
    matches!(*locked(stage), Stage::Listed)
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
        let Self::Queued(queued) = self else { return };
        let Some((slice, _)) = queued.held.as_ref().filter(|_| !queued.watched) else { return };
        let lane = Arc::clone(&slice.pool.lane);
        queued.watched = true;
        match queued.submitted() {
            Stage::Submitted { ticket, .. } => {
                let wake = Arc::clone(wake);
                queued.staging.watcher.watch(lane, ticket, Box::new(move |_| wake.notify_one()));
            }
            Stage::Listed | Stage::Refused(_) => wake.notify_one(),
        }
    }
}

impl Queued {
    fn ended(&mut self) -> Option<Ended> {
        let pool = &self.held.as_ref()?.0.pool;
        let mut stage = locked(&self.stage).clone();
        if let Stage::Listed = stage {
            pool.submit_listed(pool.lane.try_lock()?, || is_listed(&self.stage));
            stage = locked(&self.stage).clone();
        }
        let (ticket, failure) = match stage {
            Stage::Listed => return None,
            Stage::Submitted { ticket, failure } => (ticket, failure),
            Stage::Refused(error) => {
                let (slice, _) = self.held.take()?;
                return Some((Some(slice), Err(error)));
            }
        };
        let done = pool.lane.completions.done(ticket);
        match if done { Ok(()) } else { pool.lane.check() } {
            Ok(()) if !done => None,
            Ok(()) => {
                let (slice, _) = self.held.take()?;
                Some((Some(slice), failure.map_or(Ok(()), Err)))
            }
            Err(error) => {
                // The device may still use all of it.
                std::mem::forget(self.held.take());
                Some((None, Err(error.into())))
            }
        }
    }

    /// Its stage once it is not listed any more.
    fn submitted(&self) -> Stage {
        if let Some((slice, _)) = self.held.as_ref().filter(|_| is_listed(&self.stage)) {
            let pool = &slice.pool;
            pool.submit_listed(pool.lane.lock(), || is_listed(&self.stage));
        }
        locked(&self.stage).clone()
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        if self.held.is_none() {
            return;
        }
        let stage = self.submitted();
        let (Some(held), Stage::Submitted { ticket, .. }) = (self.held.take(), stage) else {
            return;
        };
        let lane = Arc::clone(&held.0.pool.lane);
        let keep = Box::new(move |ended: Result<()>| match ended {
            Ok(()) => drop(held),
            Err(_) => std::mem::forget(held),
        });
        self.staging.watcher.watch(lane, ticket, keep);
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
    staging: &Arc<Staging>,
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
    let (mut list, mut copies): (Option<Box<dyn CopySource + Send>>, _) = (None, Vec::new());
    match staged.bounce.as_ref().map(Memory::addr) {
        Some(_) if few.len() <= FEW => {
            copies = vec![CopyDescriptor::default(); few.len()];
            let (pieces, tiles) = (few.into_iter(), u64::MAX);
            Tiles { pieces, now: (0, 0), middle: pinned, side, tiles }.fill(&mut copies);
        }
        bounce => {
            let tiles = bounce.map_or(u64::MAX, |_| pool.lane.tuning.values.tile_bytes);
            let (pieces, middle) = (few.into_iter().chain(pieces), bounce.unwrap_or(pinned));
            let descriptors = Tiles { pieces, now: (0, 0), middle, side, tiles };
            list = Some(Box::new(Prepared::new(descriptors)));
            copies.extend(bounce.map(|bounce| match side {
                Side::Send => CopyDescriptor { src: bounce, dst: pinned, len },
                Side::Receive => CopyDescriptor { src: pinned, dst: bounce, len },
            }));
        }
    }
    let stage = Arc::new(Mutex::new(Stage::Listed));
    let copy = Listed { stage: Arc::clone(&stage), side, bytes: len, ahead, pieces: list, copies };
    let mut listed = locked(&pool.listed);
    let place = listed.partition_point(|it| it.ahead <= ahead);
    listed.insert(place, copy);
    drop(listed);
    let (staging, held) = (Arc::clone(staging), Some((slice, hold)));
    let queued = Queued { staging, stage, held, watched: false };
    if let Some(queue) = pool.lane.try_lock() {
        pool.submit_listed(queue, || is_listed(&queued.stage));
    }
    Copying::Queued(queued)
}

impl Pool {
    /// Submits what is listed, as long as that is wanted: who waits for nothing that is listed has a
    /// socket to look after.
    fn submit_listed(
        &self,
        mut queue: MutexGuard<'_, Box<dyn Queue>>,
        is_wanted: impl Fn() -> bool,
    ) {
        while is_wanted() {
            let mut group = Vec::with_capacity(GROUP);
            {
                let mut listed = locked(&self.listed);
                let mut bytes = 0;
                while let Some(next) = listed.front() {
                    let fits = group.len() < GROUP && bytes + next.bytes <= GROUP_BYTES;
                    let same = group.first().is_none_or(|first: &Listed| first.side == next.side);
                    if !(group.is_empty() || fits && same) {
                        break;
                    }
                    bytes += next.bytes;
                    group.extend(listed.pop_front());
                }
            }
            if group.is_empty() {
                return;
            }
            self.submit_group(&mut **queue, group);
        }
    }

    /// Submits copies of one side as one.
    fn submit_group(&self, queue: &mut dyn Queue, mut group: Vec<Listed>) {
        let copies: Vec<_> = group.iter().flat_map(|it| it.copies.iter().copied()).collect();
        let lists: Vec<_> = group.iter_mut().filter_map(|it| it.pieces.take()).collect();
        let mut pieces = Lists { lists, at: 0 };
        let mut work = Work {
            kernel: self.kernel,
            max_grid_blocks: self.lane.tuning.values.max_grid_blocks,
            ..Work::pieces(&mut pieces)
        };
        match group.first().map(|first| first.side) {
            Some(Side::Send) => work.last = &copies,
            _ => work.first = &copies,
        }
        // SAFETY: each was listed by `copy`, whose contract its caller keeps; its `Queued` keeps the
        // slice and the pieces until the copy has ended, and slices are inside their allocations.
        let stage = match unsafe { queue.submit(&mut work) } {
            Ok(ticket) => Stage::Submitted { ticket, failure: None },
            Err(error) => match error.left {
                Left::Nothing => Stage::Refused(error.error.into()),
                Left::Until(ticket) => {
                    Stage::Submitted { ticket, failure: Some(error.error.into()) }
                }
                Left::Unknown => {
                    Stage::Submitted { ticket: Ticket::NEVER, failure: Some(error.error.into()) }
                }
            },
        };
        group.iter().for_each(|it| *locked(&it.stage) = stage.clone());
    }
}

/// One list behind the other.
struct Lists {
    lists: Vec<Box<dyn CopySource + Send>>,
    at: usize,
}

impl CopySource for Lists {
    fn fill(&mut self, slot: &mut [CopyDescriptor]) -> usize {
        while let Some(list) = self.lists.get_mut(self.at) {
            match list.fill(slot) {
                0 => self.at += 1,
                count => return count,
            }
        }
        0
    }
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

/// A list whose first descriptors were made by the lane that lists it: whoever submits holds a lock
/// that others wait for.
struct Prepared<S> {
    made: Vec<CopyDescriptor>,
    at: usize,
    rest: S,
}

impl<S: CopySource> Prepared<S> {
    fn new(mut rest: S) -> Self {
        let mut made = Vec::new();
        while made.len() < PREPARED {
            let before = made.len();
            made.resize(before + PREPARED / 8, CopyDescriptor::default());
            let count = rest.fill(&mut made[before..]);
            made.truncate(before + count);
            if count == 0 {
                break;
            }
        }
        Self { made, at: 0, rest }
    }
}

impl<S: CopySource> CopySource for Prepared<S> {
    fn fill(&mut self, slot: &mut [CopyDescriptor]) -> usize {
        let left = &self.made[self.at..];
        if left.is_empty() {
            return self.rest.fill(slot);
        }
        let count = left.len().min(slot.len());
        slot[..count].copy_from_slice(&left[..count]);
        self.at += count;
        count
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

#[cfg(test)]
mod tests;
