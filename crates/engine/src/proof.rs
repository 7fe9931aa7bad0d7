//! Proof that a device reads and writes another one's memory, before traffic relies on it.
//!
//! Drivers have said "peer access: yes", let every call succeed, and delivered wrong bytes
//! (FAILURES.md B16). Guard bytes have no place in a peer's memory, which is its user's, and
//! reading back one's own write through the same broken path can agree with itself. So the owner
//! takes part:
//!
//! 1. It lends memory of its own that holds the pattern of a random seed ([`Engine::lend`]).
//! 2. The opener maps it, copies it to its own device as traffic would, by kernel and by DMA, in
//!    pieces of 64 B, 4 KiB and 1 MiB, and checks every byte.
//! 3. It copies the pattern of another seed back through the mapping, and closes that.
//! 4. The owner compares what arrived in its memory ([`Loan::compare`]).
//!
//! That happens once per (peer process, local device, remote device), however many threads come
//! first. A pair that failed is not used again by this engine.

use std::collections::HashMap;
use std::fmt::{self, Display};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kvferry_device::{
    CopyDescriptor, Device, DeviceUuid, Error as DeviceError, Export, Left, Memory, Queue,
    QueueOptions, SliceSource, Ticket, Work,
};

use crate::config::Config;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::mapping::MappingCache;
use crate::registry::Registry;
use crate::segment::{AllocationKey, Exports, ExportsError, Identity};

/// Bytes of each piece, in the order in which they lie in one half of the memory.
const PIECES: [u64; 3] = [64, 4 << 10, 1 << 20];
/// One half is copied by kernel, where there is one, the other by DMA.
const HALF: u64 = PIECES[0] + PIECES[1] + PIECES[2];
/// Bytes of memory that a proof needs on both sides.
const BYTES: u64 = 2 * HALF;

const _: () = assert!(BYTES.is_multiple_of(8), "a pattern is made of whole words");

/// The bytes of a seed, the same in every version of kvferry: word `i`, little-endian, is
/// splitmix64's output number `i`.
fn pattern(seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; BYTES as usize];
    let mut state = seed;
    for chunk in bytes.as_chunks_mut().0 {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        *chunk = (word ^ word >> 31).to_le_bytes();
    }
    bytes
}

/// Memory that a peer lent for a proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// What to map.
    pub allocation: AllocationKey,
    /// Its pattern's seed.
    pub seed: u64,
}

/// The first byte that is not what it must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Offset in the memory of the proof.
    pub at: u64,
    /// The pattern's byte.
    pub expected: u8,
    /// The byte that is there.
    pub found: u8,
}

impl Mismatch {
    fn between(found: &[u8], expected: &[u8]) -> Option<Self> {
        if found == expected {
            return None;
        }
        let at = found.iter().zip(expected).position(|(found, expected)| found != expected)?;
        Some(Self { at: at as u64, expected: expected[at], found: found[at] })
    }
}

impl Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at, expected, found } = self;
        let mut offset = at % HALF;
        let mut pieces = PIECES.into_iter();
        let piece = pieces.find(|piece| match offset.checked_sub(*piece) {
            Some(rest) => {
                offset = rest;
                false
            }
            None => true,
        });
        let piece = piece.expect("an offset below the sum of all pieces is in one of them");
        // The list is one launch where there is a kernel, the other pieces are always DMA.
        let means = if *at < HALF { "in a list" } else { "by DMA" };
        write!(
            f,
            "byte {offset} of {piece} bytes copied {means} is {found:#04x} instead of {expected:#04x}"
        )
    }
}

/// What the engine keeps for proofs.
#[derive(Debug)]
pub(crate) struct Proofs {
    enabled: bool,
    options: QueueOptions,
    pairs: Mutex<HashMap<Pair, Arc<Verdict>>>,
    /// Memory to lend that nobody has now. It is kept, since freeing waits for the whole device.
    idle: Mutex<Vec<Lent>>,
    /// What no proof uses now.
    benches: Mutex<Vec<Bench>>,
}

/// Two devices, seen from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Pair {
    /// Owner of the remote one; another process may have set it up in another way.
    pub(crate) process: Identity,
    /// Index of the local device.
    pub(crate) local: usize,
    pub(crate) remote: DeviceUuid,
}

/// Whether a pair works, once that is known; locked while it proves itself.
#[derive(Debug, Default)]
struct Verdict(Mutex<Option<Result<()>>>);

impl Proofs {
    pub(crate) fn new(config: &Config) -> Self {
        let descriptors = PIECES.len() + 1;
        Self {
            enabled: config.proof,
            options: QueueOptions {
                streams: 1,
                ring_slots: 1,
                slot_descriptors: descriptors,
                first_descriptors: descriptors,
                max_grid_blocks: config.max_grid_blocks,
                tile_bytes: config.tile_bytes,
                high_priority: config.high_priority,
                stall_timeout: config.stall_timeout,
                siblings: None,
            },
            pairs: Mutex::default(),
            idle: Mutex::default(),
            benches: Mutex::default(),
        }
    }

    /// Returns once the pair has proved itself, now or earlier. Only those who need the same pair
    /// wait for each other.
    ///
    /// # Errors
    /// [`Error::Unproven`], for good. Anything else says that it could not be tried.
    pub(crate) fn require(
        &self,
        pair: Pair,
        device: &Arc<dyn Device>,
        peer: &str,
        exports: &dyn Exports,
    ) -> Result<()> {
        if !self.enabled {
            return Ok(());
        }
        let verdict = Arc::clone(lock(&self.pairs).entry(pair).or_default());
        let mut verdict = lock(&verdict.0);
        if let Some(verdict) = &*verdict {
            return verdict.clone();
        }
        let start = Instant::now();
        let tried = self.attempt(pair, device, peer, exports)?;
        let (device, remote) = (device.info().to_string(), pair.remote.to_string());
        let micros = start.elapsed().as_micros() as u64;
        let tried = match tried {
            Ok(()) => {
                tracing::debug!(device, peer, remote, micros, "a pair of devices proved itself");
                Ok(())
            }
            Err(what) => {
                let error = Error::Unproven { device, peer: peer.to_owned(), remote, what };
                tracing::warn!(%error, micros, "a pair of devices is not used");
                Err(error)
            }
        };
        verdict.insert(tried).clone()
    }

    /// Forgets pairs that work, once the peer is gone. Those that do not work stay known, in case
    /// only the connection is gone.
    pub(crate) fn forget(&self, process: Identity) {
        lock(&self.pairs).retain(|pair, verdict| {
            // What somebody else has now is being tried, and locked.
            pair.process != process
                || Arc::strong_count(verdict) > 1
                || matches!(&*lock(&verdict.0), Some(Err(_)))
        });
    }

    /// The outer error: it could not be tried. The inner one: what is wrong with the pair.
    fn attempt(
        &self,
        pair: Pair,
        device: &Arc<dyn Device>,
        peer: &str,
        exports: &dyn Exports,
    ) -> Result<Result<(), String>> {
        let refused = |error: ExportsError| Error::ProbeRefused {
            device: device.info().to_string(),
            peer: peer.to_owned(),
            remote: pair.remote.to_string(),
            reason: error.to_string(),
        };
        let mut bench = self.bench(pair.local, device)?;
        let ours = rand::random();
        let tried = exports.probe(pair.remote).map_err(refused).and_then(|probe| {
            let read = exports
                .fetch(probe.allocation)
                .map_err(refused)
                .and_then(|export| bench.exchange(export, probe.seed, ours));
            if bench.finish().is_err() {
                // Copies may still run: the owner has its memory back when the connection ends.
                return read;
            }
            // It gets it back in every other case, and only a peer that is alive is judged.
            let written = exports.prove(probe.allocation, ours).map_err(refused);
            Ok(match (read?, written?) {
                (Err(what), _) => Err(what),
                (Ok(()), Some(wrong)) => Err(format!("written there, {wrong}")),
                (Ok(()), None) => Ok(()),
            })
        });
        if bench.finish().is_ok() {
            lock(&self.benches).push(bench);
        } else {
            // Copies may still run in its memory.
            std::mem::forget(bench);
        }
        tried
    }

    fn bench(&self, local: usize, device: &Arc<dyn Device>) -> Result<Bench> {
        let mut benches = lock(&self.benches);
        if let Some(at) = benches.iter().position(|bench| bench.local == local) {
            return Ok(benches.swap_remove(at));
        }
        drop(benches);
        let queue = Arc::clone(device).queue(&self.options)?;
        let memory = Arc::clone(device).allocate(BYTES)?;
        Ok(Bench { local, device: Arc::clone(device), queue, running: None, memory })
    }
}

/// One local device's means of a proof.
#[derive(Debug)]
struct Bench {
    /// Index of the device.
    local: usize,
    device: Arc<dyn Device>,
    /// Its own, so that no transfer waits behind a proof.
    queue: Box<dyn Queue>,
    /// The submission that may still run.
    running: Option<Ticket>,
    memory: Memory,
}

impl Bench {
    /// Maps the export, reads the pattern of `theirs` through the mapping, writes that of `ours`,
    /// and closes it. The inner error: what is wrong; then nothing was written.
    fn exchange(&mut self, export: Export, theirs: u64, ours: u64) -> Result<Result<(), String>> {
        let len = export.len();
        if len < BYTES {
            return Ok(Err(format!("{len} bytes were lent for a proof that needs {BYTES}")));
        }
        let mapping = match Arc::clone(&self.device).open(export) {
            Ok(mapping) => mapping,
            // The owner still has that memory, as its answer says afterwards. To reach a device
            // and to open its memory are two abilities (FAILURES.md B17).
            Err(error @ (DeviceError::Call { .. } | DeviceError::BadExport { .. })) => {
                return Ok(Err(format!("its memory cannot be opened, {error}")));
            }
            Err(error) => return Err(error.into()),
        };
        let read = self.read_and_write(mapping.addr(), theirs, ours);
        if self.finish().is_err() {
            // Nobody knows whether copies still run: it stays open for the life of the process.
            std::mem::forget(mapping);
        }
        Ok(read?.map_err(|wrong| format!("read from there, {wrong}")))
    }

    fn read_and_write(
        &mut self,
        there: u64,
        theirs: u64,
        ours: u64,
    ) -> Result<Result<(), Mismatch>, DeviceError> {
        let here = self.memory.addr();
        self.copy(there, here)?;
        let mut found = vec![0; BYTES as usize];
        // SAFETY: `memory` is `BYTES` long, this bench's alone, and `copy` has ended.
        unsafe { self.device.read(here, &mut found) }?;
        if let Some(wrong) = Mismatch::between(&found, &pattern(theirs)) {
            // Where a write would go to, nobody knows either.
            return Ok(Err(wrong));
        }
        // SAFETY: as above.
        unsafe { self.device.write(here, &pattern(ours)) }?;
        self.copy(here, there)?;
        Ok(Ok(()))
    }

    /// Copies all of the memory, piece by piece, and waits for the end.
    fn copy(&mut self, from: u64, to: u64) -> Result<(), DeviceError> {
        let mut at = 0;
        let mut half = || {
            PIECES.map(|len| {
                let piece = CopyDescriptor { src: from + at, dst: to + at, len };
                at += len;
                piece
            })
        };
        let (bulk, single) = (half(), half());
        let mut pieces = SliceSource(&bulk);
        let mut work = Work { large: &single, ..Work::pieces(&mut pieces) };
        // SAFETY: one of the two ranges is `memory`, which is this bench's alone; the other is a
        // mapping of at least `BYTES` bytes that its owner lent to this proof alone. Both stay
        // until `finish` has said that nothing runs.
        let submitted = unsafe { self.queue.submit(&mut work) };
        self.running = match &submitted {
            Ok(ticket) => Some(*ticket),
            Err(error) => match error.left {
                Left::Nothing => None,
                Left::Until(ticket) => Some(ticket),
                Left::Unknown => Some(Ticket::NEVER),
            },
        };
        self.finish()?;
        submitted.map(drop).map_err(|error| error.error)
    }

    /// Waits until nothing runs. On `Err` nobody can tell.
    fn finish(&mut self) -> Result<(), DeviceError> {
        let completions = self.queue.completions();
        while self.running.is_some_and(|ticket| !completions.done(ticket)) {
            self.queue.check()?;
            std::thread::yield_now();
        }
        self.running = None;
        Ok(())
    }
}

/// Memory that is exported for proofs.
#[derive(Debug)]
struct Lent {
    key: AllocationKey,
    memory: Memory,
}

/// Memory of this engine that one peer proves a pair of devices with.
///
/// Dropped without [`compare`](Self::compare), because the peer is gone, it is freed and not lent
/// again: copies of a process that was killed may still arrive in it.
#[derive(Debug)]
pub struct Loan {
    seed: u64,
    device: Arc<dyn Device>,
    mappings: Arc<MappingCache>,
    registry: Arc<Registry>,
    key: AllocationKey,
    /// Taken when it ends.
    lent: Option<Lent>,
}

impl Engine {
    /// Lends memory of a device, full of a random pattern, to one peer. [`Engine::export`] exports
    /// it as any other allocation; no transfer can name it.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`]; [`Error::Device`] if there is no memory left.
    pub fn lend(&self, device: DeviceUuid) -> Result<Loan> {
        self.check_process()?;
        let devices = self.devices();
        let index = devices.iter().position(|owner| owner.info().uuid == device);
        let index = index.ok_or_else(|| {
            let names: Vec<_> = devices.iter().map(|device| device.info().to_string()).collect();
            Error::UnknownDevice { device: device.to_string(), devices: names.join(", ") }
        })?;
        let (owner, mappings) = (&devices[index], self.mappings());
        let idle = {
            let mut idle = lock(&mappings.proofs.idle);
            let at = idle.iter().position(|lent| lent.key.device == device);
            at.map(|at| idle.swap_remove(at))
        };
        let lent = match idle {
            Some(lent) => lent,
            None => {
                let memory = Arc::clone(owner).allocate(BYTES)?;
                let key = self.registry().lend(index, owner, memory.addr())?;
                Lent { key, memory }
            }
        };
        let loan = Loan {
            seed: rand::random(),
            device: Arc::clone(owner),
            mappings: Arc::clone(mappings),
            registry: Arc::clone(self.registry()),
            key: lent.key,
            lent: Some(lent),
        };
        // SAFETY: the memory is `BYTES` long and the loan's alone until the peer hears of it.
        unsafe { loan.device.write(loan.addr(), &pattern(loan.seed)) }?;
        Ok(loan)
    }
}

impl Loan {
    /// What the peer needs to know.
    pub fn probe(&self) -> Probe {
        Probe { allocation: self.key, seed: self.seed }
    }

    /// Compares the memory with the pattern of `seed`, which the peer says it has written, and
    /// takes it back.
    ///
    /// # Errors
    /// [`Error::Device`] if the memory cannot be read.
    pub fn compare(mut self, seed: u64) -> Result<Option<Mismatch>> {
        let mut found = vec![0; BYTES as usize];
        // SAFETY: the memory is `BYTES` long. A peer that lies still writes it; then what is read
        // is unspecified, and nothing else.
        unsafe { self.device.read(self.addr(), &mut found) }?;
        lock(&self.mappings.proofs.idle).extend(self.lent.take());
        Ok(Mismatch::between(&found, &pattern(seed)))
    }

    fn addr(&self) -> u64 {
        self.lent.as_ref().expect("taken only by `compare`, at its end").memory.addr()
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if self.lent.is_some() {
            self.registry.take_back(self.key);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_splitmix64_in_every_version() {
        // Another process may be of another version. The words of seed 0 are published.
        let words: Vec<u64> =
            pattern(0).as_chunks().0.iter().take(3).map(|word| u64::from_le_bytes(*word)).collect();
        assert_eq!(words, [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f]);
        assert_eq!(pattern(u64::MAX).len(), BYTES as usize);
    }

    #[test]
    fn a_mismatch_names_the_piece_that_it_is_in() {
        let expected = pattern(1);
        for (at, place) in [
            (0, "byte 0 of 64 bytes copied in a list"),
            (63, "byte 63 of 64 bytes copied in a list"),
            (64, "byte 0 of 4096 bytes copied in a list"),
            (HALF - 1, "byte 1048575 of 1048576 bytes copied in a list"),
            (HALF + 64 + 4096, "byte 0 of 1048576 bytes copied by DMA"),
            (BYTES - 1, "byte 1048575 of 1048576 bytes copied by DMA"),
        ] {
            let mut found = expected.clone();
            found[at as usize] ^= 0xff;
            let wrong = Mismatch::between(&found, &expected).expect("one byte");
            assert_eq!(wrong.at, at);
            assert!(wrong.to_string().starts_with(place), "{wrong}");
        }
        assert_eq!(Mismatch::between(&expected, &expected), None);
        // The peer's word for it may be anything.
        let _ = Mismatch { at: u64::MAX, expected: 0, found: 1 }.to_string();
    }
}
