//! Makes a simulated GPU misbehave, and counts what it was asked.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::stream::SimStream;
use crate::error::{Error, Result};
use crate::software::{Executor, SharedMemory};

/// Things of a device that can leak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Live {
    /// Allocations of device memory.
    Allocations,
    /// Allocations of pinned memory.
    Pinned,
    /// Mappings of other processes' memory.
    Mappings,
    /// Host memory of this process that is page-locked.
    HostMappings,
    /// Streams.
    Streams,
    /// Events.
    Events,
}

impl Live {
    const ALL: [Self; 6] = [
        Self::Allocations,
        Self::Pinned,
        Self::Mappings,
        Self::HostMappings,
        Self::Streams,
        Self::Events,
    ];
}

/// Makes a simulated GPU misbehave, and counts what it was asked.
#[derive(Debug)]
pub struct SimControl {
    pub(super) executor: Executor,
    device: String,
    pub(super) memory: Arc<SharedMemory>,
    faults: Mutex<Faults>,
    live: [AtomicU64; Live::ALL.len()],
    /// Streams of the application that are being captured into a graph.
    capturing: Mutex<HashSet<usize>>,
    work: Mutex<SimWork>,
}

/// What a device was given to do so far.
#[derive(Clone, Debug, Default)]
pub struct SimWork {
    /// kvferry's own streams that exist.
    pub streams: BTreeMap<usize, StreamWork>,
    /// What the launches shared out: descriptors, of compact ones their units.
    pub units: u64,
    /// Thread blocks of the largest launch.
    pub most_blocks: u32,
    /// Words that say that work is over, ordered by a call or with a launch.
    pub words: u64,
}

/// What one stream was given to do.
#[derive(Clone, Copy, Debug)]
pub struct StreamWork {
    /// As it was made.
    pub high_priority: bool,
    /// Copies and launches.
    pub calls: u64,
}

impl SimWork {
    /// Streams that were given anything.
    pub fn used_streams(&self) -> usize {
        self.streams.values().filter(|stream| stream.calls > 0).count()
    }
}

#[derive(Debug, Default)]
struct Faults {
    lost: bool,
    /// What mappings of other processes are from now on.
    corrupt: Option<Corrupt>,
    /// Per call: how many calls were made.
    calls: HashMap<&'static str, u64>,
    /// Per call: the numbers of the calls that fail, with the error.
    planned: HashMap<&'static str, BTreeMap<u64, Fault>>,
}

/// How a planned call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An error of the driver that has no further consequence.
    Refused,
    /// Out of memory.
    OutOfMemory,
    /// An error of the driver with this number.
    Code(i32),
    /// The device is lost from then on.
    Lost,
}

/// How memory of other processes goes wrong while every call succeeds (FAILURES.md B16).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Corrupt {
    Reads,
    Writes,
}

impl SimControl {
    pub(super) fn new(device: String) -> std::io::Result<Self> {
        Ok(Self {
            executor: Executor::new(format!("kvferry-{device}"))?,
            device,
            memory: Arc::default(),
            faults: Mutex::default(),
            live: [const { AtomicU64::new(0) }; Live::ALL.len()],
            capturing: Mutex::default(),
            work: Mutex::default(),
        })
    }

    /// The `nth` next call of that name (0 is the next one) fails.
    ///
    /// Names: `allocate free allocate_pinned allocation prepare_export export open import (each
    /// chunk of an open) close map_host unmap_host create_stream create_event record fired wait
    /// store wait_producer signal_consumer copy copy_rows launch launch_claimed launch_inline
    /// launch_compact clear write read enter`.
    pub fn fail(&self, call: &'static str, nth: u64, fault: Fault) {
        let mut faults = self.faults();
        let number = faults.calls.get(call).copied().unwrap_or(0) + nth + 1;
        faults.planned.entry(call).or_default().insert(number, fault);
    }

    /// Planned failures that have not come yet will not come.
    pub fn forget_failures(&self) {
        self.faults().planned.clear();
    }

    /// From now on nothing runs and no event fires.
    pub fn hold(&self) {
        self.executor.hold(true);
    }

    /// So many pieces of what is held run, of its streams by turns, or all that can if they are fewer;
    /// returns when they have run. A copy, a launch, a record and a store are a piece each.
    pub fn step(&self, steps: usize) {
        self.executor.step(steps);
    }

    /// What was held runs.
    pub fn release(&self) {
        self.executor.hold(false);
    }

    /// A stream of the application's, beside kvferry's own.
    pub fn stream(self: &Arc<Self>) -> SimStream {
        SimStream::new(Arc::clone(self))
    }

    pub(super) fn capturing(&self) -> MutexGuard<'_, HashSet<usize>> {
        self.capturing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on every call fails: the device fell off the bus.
    pub fn lose(&self) {
        self.faults().lost = true;
    }

    /// Mappings that are opened from now on are of other memory: reads through them give zeros, and
    /// writes arrive nowhere.
    pub fn corrupt_peer_reads(&self) {
        self.faults().corrupt = Some(Corrupt::Reads);
    }

    /// Mappings that are opened from now on can be read, and writes through them arrive nowhere.
    pub fn corrupt_peer_writes(&self) {
        self.faults().corrupt = Some(Corrupt::Writes);
    }

    /// Mappings that are opened from now on are good.
    pub fn heal_peer_memory(&self) {
        self.faults().corrupt = None;
    }

    /// How often a call was made.
    pub fn calls(&self, call: &'static str) -> u64 {
        self.faults().calls.get(call).copied().unwrap_or(0)
    }

    /// How many of a thing exist now.
    pub fn live(&self, what: Live) -> u64 {
        self.live[what as usize].load(Ordering::SeqCst)
    }

    /// What the device was given to do so far.
    pub fn work(&self) -> SimWork {
        self.lock_work().clone()
    }

    pub(super) fn lock_work(&self) -> MutexGuard<'_, SimWork> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A stream is given a copy, or a launch of so many units and blocks.
    pub(super) fn works(&self, stream: usize, units: u64, blocks: u32) {
        let mut work = self.lock_work();
        work.units += units;
        work.most_blocks = work.most_blocks.max(blocks);
        if let Some(stream) = work.streams.get_mut(&stream) {
            stream.calls += 1;
        }
    }

    /// What mappings of other processes that are opened now are.
    pub(super) fn corrupt(&self) -> Option<Corrupt> {
        self.faults().corrupt
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn call(&self, call: &'static str) -> Result<()> {
        let mut faults = self.faults();
        let count = faults.calls.entry(call).or_default();
        *count += 1;
        let number = *count;
        let planned = faults.planned.get_mut(call).and_then(|planned| planned.remove(&number));
        faults.lost |= planned == Some(Fault::Lost);
        if faults.lost {
            return Err(Error::Lost {
                device: self.device.clone(),
                cause: format!("{call} says the device is gone"),
            });
        }
        let device = self.device.clone();
        match planned {
            None => Ok(()),
            Some(Fault::OutOfMemory) => {
                Err(Error::OutOfMemory { device, kind: "device", bytes: 0 })
            }
            Some(fault) => {
                let code = if let Fault::Code(code) = fault { code } else { 1 };
                Err(Error::Call { call, device, name: "planned failure".into(), code })
            }
        }
    }

    pub(super) fn born(&self, what: Live) {
        self.live[what as usize].fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn gone(&self, what: Live) {
        self.live[what as usize].fetch_sub(1, Ordering::SeqCst);
    }
}
