//! Mappings of other processes' allocations, and the whole life of one:
//!
//! - The first transfer that needs it opens it, after the pair of devices proved itself
//!   ([`crate::proof`]): one open per (exporter, allocation, local device), however many targets,
//!   batches and threads come at the same time.
//! - Between batches it stays open for the targets that used it, its keepers. A target lets go when
//!   the peer withdraws the allocation, is lost, or the target itself is dropped.
//! - Of more than `MC_KVFERRY_MAX_MAPPINGS` the one that was used longest ago and is in no batch is
//!   let go for all its keepers, whenever another one is opened. Its next use opens it again.
//! - Whoever lets go, batches that use it keep it open until their copies are quiet. Whoever lets
//!   go last closes it.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_device::Mapping;

use crate::config::Config;
use crate::error::Result;
use crate::proof::Proofs;
use crate::segment::{AllocationKey, Identity};

/// Allocation, as one local device sees it. The process, not the address and not the bytes of a
/// handle, says whose it is (FAILURES.md B04, B08, B43).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MappingKey {
    pub(crate) process: Identity,
    pub(crate) allocation: AllocationKey,
    /// Index of the local device.
    pub(crate) device: usize,
}

/// A target that keeps mappings open between its batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Keeper(u64);

/// What is mapped now, and which pairs of devices may be used at all.
#[derive(Debug)]
pub(crate) struct MappingCache {
    pub(crate) proofs: Proofs,
    /// Most mappings that are kept open, as long as that many are idle.
    limit: usize,
    state: Mutex<State>,
    keepers: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<MappingKey, Entry>,
    /// Of how many entries the mapping is kept.
    kept: usize,
    /// Counts uses, so that entries can be compared.
    clock: u64,
}

#[derive(Debug, Default)]
struct Entry {
    slot: Arc<Slot>,
    /// Idle if nobody else has this `Arc`: clones are made under the lock of the state alone.
    kept: Option<Arc<OpenMapping>>,
    keepers: Vec<Keeper>,
    used: u64,
}

/// Locked while its mapping is opened or closed, so that an open never meets its own predecessor.
#[derive(Debug, Default)]
struct Slot(Mutex<Option<Mapped>>);

#[derive(Debug)]
struct Mapped {
    mapping: Mapping,
    users: usize,
}

/// Keeps a mapping open until dropped.
#[derive(Debug)]
pub(crate) struct OpenMapping {
    slot: Arc<Slot>,
    addr: u64,
}

impl OpenMapping {
    /// Where the allocation's first byte is in this process.
    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    fn new(slot: Arc<Slot>, open: impl FnOnce() -> Result<Mapping>) -> Result<Self> {
        let mut mapped = slot.lock();
        let mapped_now = match &mut *mapped {
            Some(mapped) => mapped,
            empty => empty.insert(Mapped { mapping: open()?, users: 0 }),
        };
        mapped_now.users += 1;
        let addr = mapped_now.mapping.addr();
        drop(mapped);
        Ok(Self { slot, addr })
    }
}

impl MappingCache {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            proofs: Proofs::new(config),
            limit: config.max_mappings,
            state: Mutex::default(),
            keepers: AtomicU64::new(0),
        }
    }

    /// A keeper that keeps nothing yet.
    pub(crate) fn keeper(&self) -> Keeper {
        Keeper(self.keepers.fetch_add(1, Ordering::Relaxed))
    }

    /// The mapping of that allocation, opened by `open` if nobody has it. Only callers that want
    /// the same allocation wait for each other. `keeper` keeps it if `lists` says, under the lock
    /// that [`release`](Self::release) takes, that it still wants it.
    pub(crate) fn acquire(
        &self,
        key: MappingKey,
        keeper: Keeper,
        lists: impl Fn() -> bool,
        open: impl FnOnce() -> Result<Mapping>,
    ) -> Result<Arc<OpenMapping>> {
        let slot = {
            let mut state = self.state();
            if let Some(mapping) = state.kept_for(key, keeper, &lists) {
                return Ok(mapping);
            }
            state.slot(key)
        };
        let opened = Arc::new(OpenMapping::new(slot, open)?);
        let (mapping, let_go) = self.keep(key, keeper, lists, opened);
        // Outside the lock: it closes mappings.
        drop(let_go);
        Ok(mapping)
    }

    /// Lets go of what `keeper` keeps and `lists` does not name.
    pub(crate) fn release(&self, keeper: Keeper, lists: impl Fn(AllocationKey) -> bool) {
        let let_go = self.state().release(keeper, lists);
        drop(let_go);
    }

    /// Lets go of all that `keeper` keeps if `ends`, called under the lock, says so. Whoever sees
    /// what `ends` did finds nothing kept.
    pub(crate) fn release_all_if(&self, keeper: Keeper, ends: impl FnOnce() -> bool) -> bool {
        let mut state = self.state();
        let ended = ends();
        let let_go = if ended { state.release(keeper, |_| false) } else { Vec::new() };
        drop(state);
        // Outside the lock: it closes mappings.
        drop(let_go);
        ended
    }

    /// How many mappings `keeper` keeps open.
    pub(crate) fn count(&self, keeper: Keeper) -> usize {
        let state = self.state();
        let kept = |entry: &&Entry| entry.kept.is_some() && entry.keepers.contains(&keeper);
        state.entries.values().filter(kept).count()
    }

    /// How many mappings are kept, and of how many processes.
    pub(crate) fn total(&self) -> (usize, usize) {
        let state = self.state();
        let kept = state.entries.iter().filter(|(_, entry)| entry.kept.is_some());
        let processes: HashSet<_> = kept.clone().map(|(key, _)| key.process).collect();
        (kept.count(), processes.len())
    }

    fn keep(
        &self,
        key: MappingKey,
        keeper: Keeper,
        lists: impl Fn() -> bool,
        opened: Arc<OpenMapping>,
    ) -> (Arc<OpenMapping>, Vec<Arc<OpenMapping>>) {
        let mut state = self.state();
        // Of two threads that came here together the later one finds the earlier one's.
        if let Some(mapping) = state.kept_for(key, keeper, &lists) {
            return (mapping, vec![opened]);
        }
        if !lists() {
            return (opened, Vec::new());
        }
        let let_go = state.make_room(self.limit);
        state.clock += 1;
        state.kept += 1;
        let used = state.clock;
        let entry = state.entries.entry(key).or_default();
        entry.kept = Some(Arc::clone(&opened));
        entry.keepers = vec![keeper];
        entry.used = used;
        (opened, let_go)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The mapping if somebody keeps it; `keeper` does from now on, too.
    fn kept_for(
        &mut self,
        key: MappingKey,
        keeper: Keeper,
        lists: impl Fn() -> bool,
    ) -> Option<Arc<OpenMapping>> {
        let entry = self.entries.get_mut(&key)?;
        let mapping = Arc::clone(entry.kept.as_ref()?);
        self.clock += 1;
        entry.used = self.clock;
        if !entry.keepers.contains(&keeper) && lists() {
            entry.keepers.push(keeper);
        }
        Some(mapping)
    }

    fn slot(&mut self, key: MappingKey) -> Arc<Slot> {
        if !self.entries.contains_key(&key) {
            // A slot that only this map holds is not in use and, under this lock, cannot get so.
            self.entries
                .retain(|_, entry| entry.kept.is_some() || Arc::strong_count(&entry.slot) > 1);
        }
        Arc::clone(&self.entries.entry(key).or_default().slot)
    }

    fn release(
        &mut self,
        keeper: Keeper,
        lists: impl Fn(AllocationKey) -> bool,
    ) -> Vec<Arc<OpenMapping>> {
        let mut let_go = Vec::new();
        for (key, entry) in &mut self.entries {
            if !lists(key.allocation) {
                entry.keepers.retain(|other| *other != keeper);
            }
            if entry.keepers.is_empty() {
                let_go.extend(entry.kept.take());
            }
        }
        self.kept -= let_go.len();
        let_go
    }

    /// Lets idle mappings go, the least recently used first, until one more is within the limit.
    fn make_room(&mut self, limit: usize) -> Vec<Arc<OpenMapping>> {
        let mut let_go = Vec::new();
        while self.kept >= limit {
            let idle = |entry: &&mut Entry| {
                entry.kept.as_ref().is_some_and(|mapping| Arc::strong_count(mapping) == 1)
            };
            let oldest = self.entries.values_mut().filter(idle).min_by_key(|entry| entry.used);
            let Some(oldest) = oldest else { break };
            let_go.extend(oldest.kept.take());
            oldest.keepers.clear();
            self.kept -= 1;
        }
        let_go
    }
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, Option<Mapped>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OpenMapping {
    fn drop(&mut self) {
        let mut slot = self.slot.lock();
        if let Some(mapped) = &mut *slot {
            mapped.users -= 1;
            if mapped.users == 0 {
                // Dropping it closes it, still under the slot's lock.
                *slot = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use kvferry_device::DeviceUuid;

    use super::*;
    use crate::error::Error;

    fn cache(limit: usize) -> MappingCache {
        let mut config = Config::default();
        config.max_mappings = limit;
        MappingCache::new(&config)
    }

    fn key(id: u64) -> MappingKey {
        MappingKey {
            process: Identity([1; 16]),
            allocation: AllocationKey { device: DeviceUuid([0; 16]), id },
            device: 0,
        }
    }

    fn mapping() -> Result<Mapping> {
        let host = kvferry_device::host()?;
        let memory = Arc::clone(&host).allocate(4096)?;
        let export = host.export(&host.allocation(memory.addr())?)?;
        Ok(host.open(export)?)
    }

    fn is_open(cache: &MappingCache, id: u64) -> bool {
        let slot = cache.state().entries.get(&key(id)).map(|entry| Arc::clone(&entry.slot));
        slot.is_some_and(|slot| slot.lock().is_some())
    }

    fn shared(cache: &MappingCache, id: u64, keeper: Keeper) -> Arc<OpenMapping> {
        cache.acquire(key(id), keeper, || true, || panic!("{id} is open")).expect("shared")
    }

    fn opened(cache: &MappingCache, id: u64, keeper: Keeper) -> Arc<OpenMapping> {
        assert!(!is_open(cache, id));
        cache.acquire(key(id), keeper, || true, mapping).expect("opens")
    }

    #[test]
    fn a_mapping_is_opened_once_and_closed_when_its_last_keeper_and_its_last_batch_let_go() {
        let cache = cache(10);
        let (one, other) = (cache.keeper(), cache.keeper());
        let first = opened(&cache, 1, one);
        let second = shared(&cache, 1, other);
        assert_eq!(first.addr(), second.addr());
        assert_eq!((cache.count(one), cache.count(other)), (1, 1));
        drop((first, second));
        cache.release(one, |_| false);
        assert_eq!((cache.count(one), cache.count(other)), (0, 1));
        let batch = shared(&cache, 1, other);
        cache.release(other, |_| false);
        assert!(is_open(&cache, 1), "a batch uses it");
        drop(batch);
        assert!(!is_open(&cache, 1));
        opened(&cache, 1, one);
    }

    #[test]
    fn a_keeper_that_does_not_list_an_allocation_any_more_does_not_keep_it() {
        let cache = cache(10);
        let keeper = cache.keeper();
        let batch = cache.acquire(key(1), keeper, || false, mapping).expect("opens");
        assert_eq!(cache.count(keeper), 0);
        drop(batch);
        assert!(!is_open(&cache, 1));
        drop((opened(&cache, 1, keeper), opened(&cache, 2, keeper)));
        cache.release(keeper, |allocation| allocation.id == 2);
        assert!(!is_open(&cache, 1) && is_open(&cache, 2));
    }

    #[test]
    fn whoever_sees_that_a_keeper_ended_finds_nothing_kept() {
        let cache = cache(10);
        for _ in 0..200 {
            let (keeper, ended) = (cache.keeper(), AtomicBool::new(false));
            drop(opened(&cache, 1, keeper));
            assert!(!cache.release_all_if(keeper, || false));
            assert_eq!(cache.count(keeper), 1);
            let kept = std::thread::scope(|scope| {
                let reader = scope.spawn(|| {
                    while !ended.load(Ordering::Acquire) {
                        std::hint::spin_loop();
                    }
                    cache.count(keeper)
                });
                let end = || {
                    ended.store(true, Ordering::Release);
                    // Time for the reader, so that the end has to be seen under the lock.
                    std::thread::yield_now();
                    true
                };
                assert!(cache.release_all_if(keeper, end));
                reader.join().expect("no panic")
            });
            assert_eq!(kept, 0);
        }
    }

    #[test]
    fn a_failed_open_leaves_nothing_behind() {
        let cache = cache(10);
        let keeper = cache.keeper();
        let failed =
            cache.acquire(key(1), keeper, || true, || Err(Error::UnknownRegion { addr: 1 }));
        assert_eq!(failed.map(|_| ()), Err(Error::UnknownRegion { addr: 1 }));
        assert_eq!(cache.count(keeper), 0);
        opened(&cache, 1, keeper);
    }

    #[test]
    fn beyond_the_limit_the_idle_mapping_that_was_used_longest_ago_is_closed() {
        let cache = cache(3);
        let (one, other) = (cache.keeper(), cache.keeper());
        let batch = opened(&cache, 1, one);
        for id in [2, 3] {
            drop(opened(&cache, id, one));
        }
        drop(shared(&cache, 3, other));
        drop(shared(&cache, 2, one));
        // 1 is the oldest and in use, 3 is the next, though two keep it.
        drop(opened(&cache, 4, one));
        assert_eq!([1, 2, 3, 4].map(|id| is_open(&cache, id)), [true, true, false, true]);
        assert_eq!((cache.count(one), cache.count(other)), (3, 0));
        drop(batch);
        drop(opened(&cache, 3, other));
        assert_eq!([1, 2, 3, 4].map(|id| is_open(&cache, id)), [false, true, true, true]);
    }

    #[test]
    fn mappings_that_are_all_in_use_pass_the_limit_and_come_back_to_it() {
        let cache = cache(2);
        let keeper = cache.keeper();
        let batches: Vec<_> = (0..10).map(|id| opened(&cache, id, keeper)).collect();
        assert_eq!(cache.count(keeper), 10);
        drop(batches);
        drop(opened(&cache, 10, keeper));
        assert_eq!(cache.count(keeper), 2);
        assert!(is_open(&cache, 9) && is_open(&cache, 10));
    }

    #[test]
    fn entries_of_closed_mappings_do_not_pile_up() {
        let cache = cache(10);
        for id in 0..1000 {
            let keeper = cache.keeper();
            drop(opened(&cache, id, keeper));
            cache.release(keeper, |_| false);
        }
        assert!(cache.state().entries.len() <= 1);
    }
}
