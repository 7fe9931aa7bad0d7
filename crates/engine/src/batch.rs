//! Batches: every one ends exactly once, and an id that was released is never mistaken for a new
//! one.

use std::collections::VecDeque;
use std::fmt::{self, Display};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvferry_device::nvtx::NvtxRange;
use kvferry_device::{Ticket, Verdict};
use smallvec::SmallVec;
use tracing::Span;

use crate::ended::{Ended, Facts, Fallback};
use crate::error::{Error, RangeError, Result, Side};
use crate::mapping::OpenMapping;
use crate::mostly_one::MostlyOne;
use crate::registry::{HostLock, Pin};
use crate::target::Target;
use crate::transport::tcp::Transfer;
use crate::transport::{Choice, Lane, Paced};

/// Names a batch of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchId {
    index: u32,
    generation: u32,
}

impl BatchId {
    /// As one number, for callers that carry numbers.
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// Of [`Self::to_bits`]; any other number names a batch that does not exist.
    pub fn from_bits(bits: u64) -> Self {
        Self { index: bits as u32, generation: (bits >> 32) as u32 }
    }
}

impl Display for BatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

/// Where a batch is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Bytes may still move.
    Running,
    /// Every byte has landed.
    Completed,
    /// It failed. Its destination is undefined; nothing moves any more, except after
    /// [`kvferry_device::Error::Lost`] and `Stalled`, where nobody can tell.
    Failed(Error),
}

/// What moved the bytes of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Nothing had to move.
    None,
    /// The copy kernel.
    Kernel,
    /// The device's DMA engines.
    Dma,
    /// Small pieces by the kernel, large ones by DMA.
    Mixed,
    /// A kernel that gathers or scatters in device memory, and one DMA from or to host memory.
    Staged,
    /// The processor.
    Memcpy,
    /// A socket, without pinned memory in between: host memory in place, or GPU memory piece by
    /// piece.
    Tcp,
    /// A socket, through pinned slots and the device's copy kernel.
    TcpStaged,
}

impl Path {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::None,
        Self::Kernel,
        Self::Dma,
        Self::Mixed,
        Self::Staged,
        Self::Memcpy,
        Self::Tcp,
        Self::TcpStaged,
    ];

    /// As labels and reports spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Kernel => "kernel",
            Self::Dma => "dma",
            Self::Mixed => "mixed",
            Self::Staged => "staged",
            Self::Memcpy => "memcpy",
            Self::Tcp => "tcp",
            Self::TcpStaged => "tcp-staged",
        }
    }

    /// Of bytes of which some took one path and some another.
    pub(crate) fn and(self, other: Self) -> Self {
        match (self, other) {
            (one, other) if one == other => one,
            (Self::None, path) | (path, Self::None) => path,
            _ => Self::Mixed,
        }
    }
}

impl Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A batch as a caller sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchStatus {
    /// Where it is.
    pub state: State,
    /// Bytes that have landed: all of them, or none yet.
    pub bytes: u64,
    /// What moves them.
    pub path: Path,
}

/// A submission that a running batch waits for.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    /// Whose queue runs it.
    pub(crate) lane: Arc<Lane>,
    pub(crate) ticket: Ticket,
}

/// Whatever a running batch waits for.
#[derive(Clone, Debug, Default)]
pub(crate) struct AllPending {
    /// Of the device's queue.
    pub(crate) submissions: MostlyOne<Pending>,
    /// Submitted step by step.
    pub(crate) paced: Arc<[Arc<Paced>]>,
    /// Over TCP.
    pub(crate) transfer: Option<Arc<Transfer>>,
    /// Whether destinations overlap, which a device finds out.
    pub(crate) overlap: Option<Arc<OverlapVerdict>>,
}

impl AllPending {
    /// Whether it goes over TCP and has not ended: no device waits for that.
    pub(crate) fn is_over_tcp(&self) -> bool {
        self.transfer.as_ref().is_some_and(|transfer| !transfer.ended())
    }
}

/// What a device finds out about the destinations of a batch.
#[derive(Debug)]
pub(crate) struct OverlapVerdict {
    pub(crate) verdict: Verdict,
    /// Which end is written.
    pub(crate) side: Side,
}

impl OverlapVerdict {
    /// Of a batch whose copies are done.
    fn failure(&self) -> Option<Error> {
        let index = self.verdict.overlap()? as usize;
        Some(RangeError::DestinationShared { index, side: self.side }.into())
    }
}

/// What a batch keeps alive until its copies are quiet. Locks end before the pins that keep their
/// memory registered.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    pub(crate) targets: MostlyOne<Target>,
    pub(crate) _locks: MostlyOne<Arc<HostLock>>,
    pub(crate) _pins: SmallVec<[Pin; 2]>,
    pub(crate) _mappings: MostlyOne<Arc<OpenMapping>>,
}

#[derive(Debug)]
struct Batch {
    status: BatchStatus,
    /// How it goes between a GPU and host memory, if it does.
    choice: Option<Choice>,
    /// Bytes of all ranges.
    total: u64,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    pending: AllPending,
    /// Why it will have failed once it is quiet.
    failure: Option<Error>,
    holds: Holds,
    told: Told,
}

/// What is told of a batch when it ends.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) facts: Facts,
    pub(crate) span: Span,
    /// On the time line of NVIDIA's tools.
    pub(crate) _range: Option<NvtxRange>,
}

/// A batch that a call ended.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) told: Told,
    /// Of all its pieces.
    bytes: u64,
    /// From the submission until its end was seen.
    time: Duration,
}

impl Finished {
    /// What is told of the batch, whose status says how it ended.
    pub(crate) fn ended<'a>(&self, status: &'a BatchStatus) -> Ended<'a> {
        let failure = match &status.state {
            State::Failed(error) => Some(error),
            State::Running | State::Completed => None,
        };
        let Self { told, bytes, time } = self;
        Ended { facts: told.facts, path: status.path, bytes: *bytes, time: *time, failure }
    }
}

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    batch: Option<Batch>,
}

/// All batches of an engine.
#[derive(Debug, Default)]
pub(crate) struct Batches {
    state: Mutex<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    slots: Vec<Slot>,
    /// First freed, first used again, so that a stale id meets a far younger generation.
    free: VecDeque<u32>,
    running: usize,
}

impl Slots {
    fn get(&mut self, id: BatchId) -> Result<&mut Batch> {
        let slot =
            self.slots.get_mut(id.index as usize).filter(|slot| slot.generation == id.generation);
        slot.and_then(|slot| slot.batch.as_mut()).ok_or(Error::UnknownBatch(id))
    }
}

/// How the copies of a batch ended.
#[derive(Debug)]
pub(crate) enum End {
    /// They are done.
    Quiet,
    /// The device is lost; what they do, nobody knows.
    Unknown(Error),
}

impl Batches {
    /// A batch that had nothing to move.
    pub(crate) fn insert_completed(&self) -> BatchId {
        let status = BatchStatus { state: State::Completed, bytes: 0, path: Path::None };
        self.insert(Batch { status, choice: None, total: 0, running: None })
    }

    pub(crate) fn insert_running(
        &self,
        pending: AllPending,
        failure: Option<Error>,
        total: u64,
        (path, choice): (Path, Option<Choice>),
        holds: Holds,
        told: Told,
    ) -> BatchId {
        let status = BatchStatus { state: State::Running, bytes: 0, path };
        let running = Some(Running { pending, failure, holds, told });
        self.insert(Batch { status, choice, total, running })
    }

    fn insert(&self, batch: Batch) -> BatchId {
        let mut state = self.state();
        state.running += usize::from(batch.running.is_some());
        let index = state.free.pop_front().unwrap_or_else(|| {
            state.slots.push(Slot::default());
            u32::try_from(state.slots.len() - 1)
                .expect("four thousand million batches do not fit in memory")
        });
        let slot = &mut state.slots[index as usize];
        slot.batch = Some(batch);
        BatchId { index, generation: slot.generation }
    }

    pub(crate) fn choice(&self, id: BatchId) -> Result<Option<Choice>> {
        Ok(self.state().get(id)?.choice)
    }

    /// The status, and what the batch waits for if it runs.
    pub(crate) fn look(&self, id: BatchId) -> Result<(BatchStatus, Option<AllPending>)> {
        let mut state = self.state();
        let batch = state.get(id)?;
        Ok((batch.status.clone(), batch.running.as_ref().map(|running| running.pending.clone())))
    }

    /// The status, and what `ask` says of what the batch waits for if it runs. `ask` is quick: it
    /// is called under the lock.
    pub(crate) fn ask<T>(
        &self,
        id: BatchId,
        ask: impl FnOnce(&AllPending) -> T,
    ) -> Result<(BatchStatus, Option<T>)> {
        let mut state = self.state();
        let batch = state.get(id)?;
        Ok((batch.status.clone(), batch.running.as_ref().map(|running| ask(&running.pending))))
    }

    /// What a batch waits for that runs, and its targets.
    pub(crate) fn in_flight(&self, id: BatchId) -> Result<Option<(AllPending, MostlyOne<Target>)>> {
        let mut state = self.state();
        let running = state.get(id)?.running.as_ref();
        Ok(running.map(|running| (running.pending.clone(), running.holds.targets.clone())))
    }

    /// Ends a running batch; of several threads that saw it end, one does it. Returns its status and,
    /// if this call ended it, what is to be told of it. `count` is quick: it is called under the lock,
    /// so that whoever sees the batch ended finds it counted.
    pub(crate) fn finish(
        &self,
        id: BatchId,
        end: End,
        count: impl FnOnce(&Ended<'_>),
    ) -> Result<(BatchStatus, Option<Finished>)> {
        let mut state = self.state();
        let batch = state.get(id)?;
        let Some(mut running) = batch.running.take() else {
            return Ok((batch.status.clone(), None));
        };
        let failure = match &end {
            End::Unknown(error) => Some(error.clone()),
            End::Quiet => {
                let lost = || running.holds.targets.iter().find_map(Target::lost);
                let transfer = running.pending.transfer.as_ref();
                let paced = || running.pending.paced.iter().find_map(|paced| paced.failure());
                let overlap = running.pending.overlap.as_ref();
                running
                    .failure
                    .or_else(lost)
                    .or_else(|| overlap.and_then(|it| it.failure()))
                    .or_else(paced)
                    .or_else(|| transfer.and_then(|it| it.failure()))
            }
        };
        if running.pending.transfer.as_ref().is_some_and(|transfer| transfer.fell_back()) {
            batch.status.path = batch.status.path.and(Path::Tcp);
            running.told.facts.fallback.get_or_insert(Fallback::NotStaged);
        }
        match failure {
            None => {
                batch.status.state = State::Completed;
                batch.status.bytes = batch.total;
            }
            Some(error) => batch.status.state = State::Failed(error),
        }
        let (status, bytes) = (batch.status.clone(), batch.total);
        let time = running.told.facts.submitted.elapsed();
        let finished = Finished { told: running.told, bytes, time };
        count(&finished.ended(&status));
        state.running -= 1;
        drop(state);
        match end {
            End::Quiet => drop(running.holds),
            // Copies may still run: keep what they touch for the life of the process.
            End::Unknown(_) => std::mem::forget(running.holds),
        }
        Ok((status, Some(finished)))
    }

    /// Forgets a batch that ended.
    pub(crate) fn release(&self, id: BatchId) -> Result<()> {
        let mut state = self.state();
        if state.get(id)?.running.is_some() {
            return Err(Error::BatchBusy(id));
        }
        let slot = &mut state.slots[id.index as usize];
        slot.batch = None;
        // A slot whose generations are used up is never used again.
        if let Some(next) = slot.generation.checked_add(1) {
            slot.generation = next;
            state.free.push_back(id.index);
        }
        Ok(())
    }

    /// How many run.
    pub(crate) fn running_count(&self) -> usize {
        self.state().running
    }

    /// Ids of the batches that run.
    pub(crate) fn running(&self) -> Vec<BatchId> {
        let state = self.state();
        if state.running == 0 {
            return Vec::new();
        }
        let running = |(index, slot): (usize, &Slot)| {
            slot.batch.as_ref()?.running.as_ref()?;
            Some(BatchId { index: index as u32, generation: slot.generation })
        };
        state.slots.iter().enumerate().filter_map(running).collect()
    }

    fn state(&self) -> MutexGuard<'_, Slots> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_released_id_is_unknown_for_ever_and_slots_do_not_grow() {
        let batches = Batches::default();
        let stale = batches.insert_completed();
        batches.release(stale).expect("it ended");
        for _ in 0..1_000_000 {
            let id = batches.insert_completed();
            assert_eq!(batches.look(stale).err(), Some(Error::UnknownBatch(stale)));
            batches.release(id).expect("it ended");
        }
        assert_eq!(batches.release(stale), Err(Error::UnknownBatch(stale)));
        assert!(batches.state().slots.len() <= 2);
    }
}
