//! Which way a peer's memory is reached, and what keeps it from a better one.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};

use kvferry_device::DeviceUuid;

use crate::segment::AllocationKey;

/// Which way a peer's memory is reached. Of one that is not mapped, or not all of it, the reasons
/// are there to be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Way {
    /// Mappings reach it or, if its engine is in this process, it is used directly.
    pub mapped: bool,
    /// TCP reaches it, or what of it mappings do not.
    pub tcp: bool,
    /// Why mappings do not reach all of it: one sentence each, none if they do.
    pub reasons: Vec<String>,
}

impl Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.mapped, self.tcp) {
            (true, false) => "mapped",
            (true, true) => "mapped, and TCP beside",
            (false, true) => "TCP",
            (false, false) => "none",
        })?;
        match self.reasons.is_empty() {
            true => Ok(()),
            false => write!(f, ": {}", self.reasons.join("; ")),
        }
    }
}

/// What of one peer's memory should be mapped and cannot be, and so is left to TCP for as long as
/// the target lives.
#[derive(Debug, Default)]
pub(crate) struct LeftToTcp {
    /// As many as `places` has, to look at without a lock.
    count: AtomicUsize,
    /// With the reason.
    places: RwLock<BTreeMap<Place, String>>,
}

/// Memory of the peer as a device here sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    /// Index of the device that the local end lies on.
    local: usize,
    remote: DeviceUuid,
    /// One allocation, or all of them.
    allocation: Option<u64>,
}

impl LeftToTcp {
    /// How many have been left so far: it only grows.
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Leaves all memory of the peer's device, or one allocation, as `local` sees it. Whether it was
    /// not yet.
    pub(crate) fn add(
        &self,
        local: usize,
        remote: DeviceUuid,
        allocation: Option<u64>,
        reason: String,
    ) -> bool {
        let mut places = self.places.write().unwrap_or_else(PoisonError::into_inner);
        let is_new = places.insert(Place { local, remote, allocation }, reason).is_none();
        self.count.store(places.len(), Ordering::Release);
        is_new
    }

    /// Whether an allocation is left, as `local` sees it.
    pub(crate) fn holds(&self, local: usize, AllocationKey { device, id }: AllocationKey) -> bool {
        let places = self.places.read().unwrap_or_else(PoisonError::into_inner);
        let place = |allocation| Place { local, remote: device, allocation };
        places.contains_key(&place(None)) || places.contains_key(&place(Some(id)))
    }

    /// Why each is.
    pub(crate) fn reasons(&self) -> Vec<String> {
        let places = self.places.read().unwrap_or_else(PoisonError::into_inner);
        places.values().cloned().collect()
    }
}
