//! Mappings of other processes' allocations: one open and one close per (exporter, allocation,
//! local device), however many targets, batches and threads use it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_device::Mapping;

use crate::error::Result;
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

/// What is mapped now.
#[derive(Debug, Default)]
pub(crate) struct MappingCache {
    slots: Mutex<HashMap<MappingKey, Arc<Slot>>>,
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
}

impl MappingCache {
    /// The mapping of that allocation, opened by `open` if nobody has it. Only callers that want
    /// the same allocation wait for each other.
    pub(crate) fn acquire(
        &self,
        key: MappingKey,
        open: impl FnOnce() -> Result<Mapping>,
    ) -> Result<OpenMapping> {
        let slot = self.slot(key);
        let mut mapped = slot.lock();
        let mapped = match &mut *mapped {
            Some(mapped) => mapped,
            empty => empty.insert(Mapped { mapping: open()?, users: 0 }),
        };
        mapped.users += 1;
        let addr = mapped.mapping.addr();
        Ok(OpenMapping { slot: Arc::clone(&slot), addr })
    }

    fn slot(&self, key: MappingKey) -> Arc<Slot> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if !slots.contains_key(&key) {
            // A slot that only this map holds is not in use and, under this lock, cannot get so.
            slots.retain(|_, slot| Arc::strong_count(slot) > 1);
        }
        Arc::clone(slots.entry(key).or_default())
    }

    #[cfg(test)]
    fn slots(&self) -> usize {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).len()
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
    use kvferry_device::DeviceUuid;

    use super::*;
    use crate::error::Error;

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

    #[test]
    fn an_allocation_is_opened_once_and_closed_with_its_last_user() {
        let cache = MappingCache::default();
        let first = cache.acquire(key(1), mapping).expect("opens");
        let second = cache.acquire(key(1), || panic!("it is open")).expect("shared");
        assert_eq!(first.addr(), second.addr());
        drop(first);
        let third = cache.acquire(key(1), || panic!("it is still open")).expect("shared");
        drop((second, third));
        let mut opened = false;
        let again = cache.acquire(key(1), || {
            opened = true;
            mapping()
        });
        assert!(again.is_ok() && opened, "the last user closed it");
    }

    #[test]
    fn a_failed_open_leaves_nothing_behind() {
        let cache = MappingCache::default();
        let failed = cache.acquire(key(1), || Err(Error::UnknownRegion { addr: 1 }));
        assert_eq!(failed.map(|_| ()), Err(Error::UnknownRegion { addr: 1 }));
        assert!(cache.acquire(key(1), mapping).is_ok());
    }

    #[test]
    fn slots_of_closed_mappings_do_not_pile_up() {
        let cache = MappingCache::default();
        for id in 0..1000 {
            drop(cache.acquire(key(id), mapping).expect("opens"));
        }
        assert!(cache.slots() <= 1);
    }
}
