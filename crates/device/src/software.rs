//! Streams, events and shareable memory in plain host memory: what the host device and the
//! simulated GPU have in common. Work is deferred: a thread of the device runs it later, as a GPU
//! would.

mod claim;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
#[cfg(feature = "testing")]
use rustix::mm::{MremapFlags, mmap_anonymous, mremap};

use self::claim::claim;
use crate::compact::CompactDescriptor;
use crate::device::Allocation;
use crate::kernel::Claims;
use crate::queue::CopyDescriptor;
#[cfg(feature = "testing")]
use crate::testing::ChunkKind;

/// Allocation numbers are unique in the process, so that a reused address never looks familiar.
static NEXT_ALLOCATION: AtomicU64 = AtomicU64::new(1);

pub(crate) fn next_allocation() -> u64 {
    NEXT_ALLOCATION.fetch_add(1, Ordering::Relaxed)
}

/// Host memory that another process can map, one memfd an allocation.
#[derive(Debug, Default)]
pub(crate) struct SharedMemory {
    blocks: Mutex<BTreeMap<u64, Block>>,
}

#[derive(Debug)]
struct Block {
    len: u64,
    id: u64,
    fd: OwnedFd,
    #[cfg(feature = "testing")]
    chunk: Option<ChunkKind>,
}

impl SharedMemory {
    /// Allocates `bytes` of zeros; pages are taken when first touched.
    pub(crate) fn allocate(&self, bytes: u64) -> rustix::io::Result<u64> {
        let block = Block::new(bytes)?;
        let base = map(block.fd.as_fd(), bytes)?;
        self.blocks().insert(base, block);
        Ok(base)
    }

    /// Maps a new chunk at `addr`, inside what [`reserve`] returned.
    #[cfg(feature = "testing")]
    pub(crate) fn map_chunk(&self, addr: u64, len: u64, kind: ChunkKind) -> rustix::io::Result<()> {
        let block = Block { chunk: Some(kind), ..Block::new(len)? };
        map_at(addr, block.fd.as_fd(), len)?;
        self.blocks().insert(addr, block);
        Ok(())
    }

    /// Frees the chunk at `addr`, which stays reserved; `None` if there is none.
    #[cfg(feature = "testing")]
    pub(crate) fn unmap_chunk(&self, addr: u64) -> Option<()> {
        let block = self.blocks().remove(&addr)?;
        if let Err(error) = reserve_at(addr, block.len) {
            tracing::warn!(%error, addr, "a chunk was not unmapped");
        }
        Some(())
    }

    /// How the chunk that `addr` lies in was made; `None` if it is in none.
    #[cfg(feature = "testing")]
    pub(crate) fn chunk(&self, addr: u64) -> Option<ChunkKind> {
        let blocks = self.blocks();
        let (&base, block) = blocks.range(..=addr).next_back()?;
        block.chunk.filter(|_| addr - base < block.len)
    }

    /// Frees what `allocate` returned; `None` if it did not.
    pub(crate) fn free(&self, base: u64) -> Option<()> {
        let block = self.blocks().remove(&base)?;
        unmap(base, block.len);
        Some(())
    }

    pub(crate) fn find(&self, addr: u64) -> Option<Allocation> {
        let blocks = self.blocks();
        let (&base, block) = blocks.range(..=addr).next_back()?;
        (addr - base < block.len).then_some(Allocation { base, len: block.len, id: block.id })
    }

    /// Shows the file of the allocation at `base`; `None` if there is none.
    pub(crate) fn with_fd<R>(
        &self,
        base: u64,
        use_fd: impl FnOnce(BorrowedFd<'_>) -> R,
    ) -> Option<R> {
        Some(use_fd(self.blocks().get(&base)?.fd.as_fd()))
    }

    fn blocks(&self) -> MutexGuard<'_, BTreeMap<u64, Block>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Block {
    fn new(len: u64) -> rustix::io::Result<Self> {
        let fd = memfd_create("kvferry", MemfdFlags::CLOEXEC)?;
        ftruncate(&fd, len)?;
        Ok(Self {
            len,
            id: next_allocation(),
            fd,
            #[cfg(feature = "testing")]
            chunk: None,
        })
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        for (base, block) in std::mem::take(&mut *self.blocks()) {
            unmap(base, block.len);
        }
    }
}

/// Maps all `len` bytes of a memfd, refusing one that is shorter (a touch beyond its end would be
/// a bus error).
pub(crate) fn map(fd: BorrowedFd<'_>, len: u64) -> rustix::io::Result<u64> {
    check_size(fd, len)?;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice aliases nothing of ours.
    let base =
        unsafe { mmap(std::ptr::null_mut(), len as usize, access, MapFlags::SHARED, fd, 0) }?;
    Ok(base as u64)
}

fn check_size(fd: BorrowedFd<'_>, len: u64) -> rustix::io::Result<()> {
    let size = fstat(fd)?.st_size;
    if u64::try_from(size).is_ok_and(|size| size < len) || len > isize::MAX as u64 {
        return Err(rustix::io::Errno::INVAL);
    }
    Ok(())
}

/// Reserves `len` bytes of addresses, for [`map_at`]; [`unmap`] ends it with all that is there.
#[cfg(feature = "testing")]
pub(crate) fn reserve(len: u64) -> rustix::io::Result<u64> {
    let (nothing, flags) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: as in `map`; nothing can be read or written there.
    let base = unsafe { mmap_anonymous(std::ptr::null_mut(), len as usize, nothing, flags) }?;
    Ok(base as u64)
}

/// [`map`] at an address inside a reservation that only the caller uses.
#[cfg(feature = "testing")]
pub(crate) fn map_at(addr: u64, fd: BorrowedFd<'_>, len: u64) -> rustix::io::Result<()> {
    check_size(fd, len)?;
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
    // SAFETY: the range is the caller's own reservation, so what is replaced is nobody else's.
    unsafe { mmap(addr as *mut _, len as usize, access, flags, fd, 0) }?;
    Ok(())
}

/// Makes a part of a reservation what it was before [`map_at`].
#[cfg(feature = "testing")]
fn reserve_at(addr: u64, len: u64) -> rustix::io::Result<()> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: as in `map_at`.
    unsafe { mmap_anonymous(addr as *mut _, len as usize, ProtFlags::empty(), flags) }?;
    Ok(())
}

/// Maps the pages of shared memory a second time, elsewhere; [`unmap`] ends it. Whole pages only.
#[cfg(feature = "testing")]
pub(crate) fn mirror(base: u64, len: u64) -> rustix::io::Result<u64> {
    // SAFETY: an old length of zero leaves the old mapping as it is, and the new one is at an
    // address of the kernel's choice. The kernel refuses what is not mapped, and private memory.
    let mirror = unsafe { mremap(base as *mut _, 0, len as usize, MremapFlags::MAYMOVE) }?;
    Ok(mirror as u64)
}

/// Unmaps what [`map`] returned.
pub(crate) fn unmap(base: u64, len: u64) {
    // SAFETY: `base` and `len` come from `map`, and the owner (a `Memory` or a `Mapping`, both
    // dropped once) says that nothing uses the range any more.
    if let Err(error) = unsafe { munmap(base as *mut _, len as usize) } {
        tracing::warn!(%error, base, len, "munmap failed");
    }
}

/// Streams and events, run by one thread.
#[derive(Debug)]
pub(crate) struct Executor {
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Debug, Default)]
struct State {
    streams: Vec<VecDeque<Work>>,
    free_streams: Vec<usize>,
    /// Of each event, its last record; 0 is none.
    events: Vec<u64>,
    free_events: Vec<usize>,
    /// Records are numbered over all events and streams.
    last_record: u64,
    /// Those that have not been reached. An event may be recorded again, in another stream, while
    /// something still waits for its record before, so each is told apart.
    pending: BTreeSet<u64>,
    next: usize,
    held: bool,
    /// Pieces of work that run though it is held.
    steps: usize,
    stop: bool,
}

#[derive(Debug)]
enum Work {
    Copy(CopyDescriptor),
    Launch {
        descriptors: u64,
        count: u32,
    },
    Claimed {
        descriptors: u64,
        count: u32,
        claims: Claims,
    },
    Clear {
        addr: u64,
        bytes: u64,
    },
    Inline(Box<[CopyDescriptor]>),
    Compact(Box<[CompactDescriptor]>),
    Store {
        word: u64,
        value: u32,
    },
    Record {
        record: u64,
    },
    /// Holds its stream until the record is reached.
    Wait {
        record: u64,
    },
}

impl Executor {
    pub(crate) fn new(name: String) -> std::io::Result<Self> {
        let shared = Arc::new(Shared { state: Mutex::default(), work: Condvar::new() });
        let worker = std::thread::Builder::new().name(name).spawn({
            let shared = Arc::clone(&shared);
            move || shared.run()
        })?;
        Ok(Self { shared, worker: Some(worker) })
    }

    pub(crate) fn create_stream(&self) -> usize {
        let mut state = self.shared.state();
        state.free_streams.pop().unwrap_or_else(|| {
            state.streams.push(VecDeque::new());
            state.streams.len() - 1
        })
    }

    /// The stream must be idle; its number may be given out again.
    pub(crate) fn destroy_stream(&self, stream: usize) {
        self.shared.state().free_streams.push(stream);
    }

    pub(crate) fn create_event(&self) -> usize {
        let mut state = self.shared.state();
        state.free_events.pop().unwrap_or_else(|| {
            state.events.push(0);
            state.events.len() - 1
        })
    }

    pub(crate) fn destroy_event(&self, event: usize) {
        self.shared.state().free_events.push(event);
    }

    pub(crate) fn record(&self, event: usize, stream: usize) {
        let mut state = self.shared.state();
        let record = state.record(event);
        self.shared.push(state, stream, Work::Record { record });
    }

    pub(crate) fn fired(&self, event: usize) -> bool {
        let state = self.shared.state();
        !state.pending.contains(&state.events[event])
    }

    /// Later work of the stream waits for what the event was recorded behind.
    pub(crate) fn wait(&self, stream: usize, event: usize) {
        let state = self.shared.state();
        let record = state.events[event];
        self.shared.push(state, stream, Work::Wait { record });
    }

    /// # Safety
    /// As [`crate::Queue::submit`], until a later event on the stream fires.
    pub(crate) unsafe fn copy(&self, stream: usize, copy: CopyDescriptor) {
        self.shared.push(self.shared.state(), stream, Work::Copy(copy));
    }

    /// # Safety
    /// As `copy`; `descriptors` is the address of `count` descriptors that stay as they are.
    pub(crate) unsafe fn launch(&self, stream: usize, descriptors: u64, count: u32) {
        self.shared.push(self.shared.state(), stream, Work::Launch { descriptors, count });
    }

    /// # Safety
    /// As `launch`; the table and the verdict live until then, and nothing but launches uses the table.
    pub(crate) unsafe fn launch_claimed(
        &self,
        stream: usize,
        descriptors: u64,
        count: u32,
        claims: Claims,
    ) {
        let work = Work::Claimed { descriptors, count, claims };
        self.shared.push(self.shared.state(), stream, work);
    }

    /// # Safety
    /// As `copy`, of the destination.
    pub(crate) unsafe fn clear(&self, stream: usize, addr: u64, bytes: u64) {
        self.shared.push(self.shared.state(), stream, Work::Clear { addr, bytes });
    }

    /// # Safety
    /// As `copy`.
    pub(crate) unsafe fn launch_inline(&self, stream: usize, descriptors: &[CopyDescriptor]) {
        self.shared.push(self.shared.state(), stream, Work::Inline(descriptors.into()));
    }

    /// # Safety
    /// As `copy`; the page lists stay as they are, too.
    pub(crate) unsafe fn launch_compact(&self, stream: usize, descriptors: &[CompactDescriptor]) {
        self.shared.push(self.shared.state(), stream, Work::Compact(descriptors.into()));
    }

    /// # Safety
    /// `word` is an aligned u32 that lives until a later event on the stream fires.
    pub(crate) unsafe fn store(&self, stream: usize, word: u64, value: u32) {
        self.shared.push(self.shared.state(), stream, Work::Store { word, value });
    }

    /// Fires an event that [`Executor::arm`] made wait for it.
    #[cfg(feature = "testing")]
    pub(crate) fn fire(&self, event: usize) {
        let mut state = self.shared.state();
        let record = state.events[event];
        state.pending.remove(&record);
        drop(state);
        self.shared.work.notify_one();
    }

    /// Makes an event that fires only by [`Executor::fire`].
    #[cfg(feature = "testing")]
    pub(crate) fn arm(&self, event: usize) {
        self.shared.state().record(event);
    }

    /// Whether a stream has nothing to start.
    #[cfg(feature = "testing")]
    pub(crate) fn is_empty(&self, stream: usize) -> bool {
        self.shared.state().streams[stream].is_empty()
    }

    /// While held, nothing runs: no copy starts and no event fires.
    #[cfg(feature = "testing")]
    pub(crate) fn hold(&self, held: bool) {
        self.shared.state().held = held;
        self.shared.work.notify_one();
    }

    /// Runs so many pieces of work while held, streams by turns, or all that can run if they are
    /// fewer, and returns when they have run.
    #[cfg(feature = "testing")]
    pub(crate) fn step(&self, steps: usize) {
        self.shared.state().steps = steps;
        self.shared.work.notify_one();
        while self.shared.state().steps > 0 {
            std::thread::yield_now();
        }
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        self.shared.state().stop = true;
        self.shared.work.notify_one();
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, mut state: MutexGuard<'_, State>, stream: usize, work: Work) {
        state.streams[stream].push_back(work);
        drop(state);
        self.work.notify_one();
    }

    fn run(&self) {
        let mut state = self.state();
        loop {
            if state.stop {
                return;
            }
            let Some(work) = state.take_work() else {
                state.steps = 0;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            if let Work::Record { record } = work {
                state.pending.remove(&record);
            } else {
                drop(state);
                // SAFETY: whoever enqueued the work promised that its ranges stay valid until a later
                // event fires, and events of a stream fire after its earlier work, above.
                unsafe { work.run() };
                state = self.state();
            }
            state.steps = state.steps.saturating_sub(1);
        }
    }
}

impl State {
    /// Gives the event a new record that is not reached yet.
    fn record(&mut self, event: usize) -> u64 {
        self.last_record += 1;
        self.events[event] = self.last_record;
        self.pending.insert(self.last_record);
        self.last_record
    }

    /// Of a wait, whether it holds its stream.
    fn holds(&self, work: &Work) -> Option<bool> {
        match work {
            Work::Wait { record } => Some(self.pending.contains(record)),
            _ => None,
        }
    }

    /// The next piece of work, taking turns between streams; a stream that waits is passed over.
    fn take_work(&mut self) -> Option<Work> {
        if self.held && self.steps == 0 {
            return None;
        }
        let streams = self.streams.len();
        for step in 0..streams {
            let stream = (self.next + step) % streams;
            loop {
                let first = self.streams[stream].front();
                match first.map(|work| self.holds(work)) {
                    // It is over.
                    Some(Some(false)) => drop(self.streams[stream].pop_front()),
                    Some(None) => {
                        self.next = stream + 1;
                        return self.streams[stream].pop_front();
                    }
                    None | Some(Some(true)) => break,
                }
            }
        }
        None
    }
}

impl Work {
    /// # Safety
    /// The ranges are valid.
    unsafe fn run(self) {
        match self {
            // SAFETY: the caller's contract.
            Self::Copy(copy) => unsafe { run_copy(copy) },
            Self::Launch { descriptors, count } => {
                for index in 0..count as usize {
                    // SAFETY: the caller's contract: `count` descriptors lie there.
                    unsafe { run_copy((descriptors as *const CopyDescriptor).add(index).read()) }
                }
            }
            Self::Claimed { descriptors, count, claims } => {
                for index in 0..count {
                    // SAFETY: the caller's contract: `count` descriptors lie there.
                    let copy = unsafe {
                        (descriptors as *const CopyDescriptor).add(index as usize).read()
                    };
                    // SAFETY: the caller's contract; one thread runs all work of a device.
                    unsafe { claim(&claims, &copy, claims.first + index) };
                    // SAFETY: the caller's contract.
                    unsafe { run_copy(copy) }
                }
            }
            Self::Clear { addr, bytes } => {
                // SAFETY: the caller's contract.
                unsafe { (addr as *mut u8).write_bytes(0, bytes as usize) }
            }
            Self::Inline(descriptors) => {
                for copy in descriptors {
                    // SAFETY: the caller's contract.
                    unsafe { run_copy(copy) }
                }
            }
            Self::Compact(descriptors) => {
                // SAFETY: the caller's contract.
                let copies = unsafe { expand(&descriptors) };
                // SAFETY: the caller's contract.
                copies.for_each(|copy| unsafe { run_copy(copy) });
            }
            Self::Store { word, value } => {
                // SAFETY: the caller's contract: an aligned u32 that others use as an atomic, too.
                unsafe { &*(word as *const AtomicU32) }.store(value, Ordering::Release);
            }
            Self::Record { .. } | Self::Wait { .. } => {}
        }
    }
}

/// The copies of one launch of compact descriptors.
///
/// # Safety
/// Their page lists, where they have any, are readable at their addresses.
pub(crate) unsafe fn expand(
    descriptors: &[CompactDescriptor],
) -> impl Iterator<Item = CopyDescriptor> {
    let mut first = 0;
    descriptors.iter().flat_map(move |compact| {
        let units = 0..compact.end - std::mem::replace(&mut first, compact.end);
        // SAFETY: the caller's contract.
        units.flat_map(move |unit| unsafe { compact.unit(unit) })
    })
}

/// # Safety
/// `src` is readable and `dst` writable.
unsafe fn run_copy(CopyDescriptor { src, dst, len }: CopyDescriptor) {
    // SAFETY: the caller's contract. Addresses are host pointers that a mapping or an allocation
    // exposed; nothing in this process holds a reference to those bytes.
    unsafe { std::ptr::copy(src as *const u8, dst as *mut u8, len as usize) }
}

#[cfg(all(test, feature = "testing"))]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_for_the_record_it_was_made_for_though_the_event_is_recorded_again_elsewhere() {
        let executor = Executor::new("test".into()).expect("a thread");
        let [slow, quick, waiting] = [(); 3].map(|()| executor.create_stream());
        let [gate, event, end, quick_end] = [(); 4].map(|()| executor.create_event());
        executor.arm(gate);
        executor.wait(slow, gate);
        executor.record(event, slow);
        executor.wait(waiting, event);
        executor.record(end, waiting);
        executor.record(event, quick);
        executor.record(quick_end, quick);
        let reached = |event| {
            while !executor.fired(event) {
                std::thread::yield_now();
            }
        };
        reached(quick_end);
        // A turn of the waiting stream, should it have one.
        executor.record(quick_end, quick);
        reached(quick_end);
        assert!(!executor.fired(end), "the slow stream has not come to its record");
        executor.fire(gate);
        reached(end);
    }
}
