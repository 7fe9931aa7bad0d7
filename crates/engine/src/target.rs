//! A peer's segment, opened: what may be read and written there, and where it is mapped here.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, Weak};

use kvferry_device::{Device, DeviceUuid, Error as DeviceError, MadeBy, Mapping};
use kvferry_wire::segment::SegmentRef;

use crate::error::{Error, Result};
use crate::mapping::{Keeper, MappingCache, MappingKey, OpenMapping};
use crate::plan::Window;
use crate::proof::Pair;
use crate::registry::{Registry, in_process};
use crate::segment::{
    AllocationKey, Exports, ExportsError, Identity, Segment, SegmentAllocation, Segments,
};
use crate::transport::tcp::Session;
use crate::way::{LeftToTcp, Way};

/// A peer that transfers can name. Clones are the same target; mappings close when the last clone
/// and the last batch that uses them are gone, or earlier if there are too many.
///
/// The first transfer between two devices waits until the pair has proved itself
/// (`MC_KVFERRY_PROOF`): some milliseconds, once per process of the peer.
#[derive(Clone, Debug)]
pub struct Target {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    name: String,
    incarnation: Identity,
    process: Identity,
    pid: u32,
    table: RwLock<Arc<RemoteTable>>,
    /// If the engine is in this process: its registered memory, which is used directly.
    registry: Option<Weak<Registry>>,
    exports: Arc<dyn Exports>,
    cache: Arc<MappingCache>,
    keeper: Keeper,
    reach: Reach,
    left: LeftToTcp,
    /// Where newer segments come from, if they do by themselves.
    segments: OnceLock<Arc<dyn Segments>>,
    /// How often a newer segment was another one. Counted while `table` is locked.
    refreshes: AtomicU64,
    /// Held from when a segment is asked for until it is the target's: of two, the one that was asked
    /// for later stays.
    refreshing: Mutex<()>,
    /// The lanes to it, once there are some.
    session: OnceLock<Arc<Session>>,
    /// The mappings are that process's.
    made_by: MadeBy,
    lost: OnceLock<String>,
}

/// How a peer's memory is reached.
#[derive(Debug)]
pub(crate) enum Reach {
    /// Through mappings.
    Mapped,
    /// Through mappings, and by TCP at this `host:port` where there can be none.
    MappedBesideTcp(String),
    /// By TCP alone; `instead` of mappings, which its host would allow.
    Tcp { session: Arc<Session>, instead: bool },
}

/// A region of the peer's as TCP names it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RemoteRegion {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    pub(crate) segment: Option<SegmentRef>,
    /// Index of its allocation.
    allocation: usize,
}

/// The peer's regions at one moment.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct RemoteTable {
    /// Regions that touch inside one allocation are one window.
    pub(crate) windows: Vec<Window>,
    /// Per window: index into `list`.
    allocations: Vec<usize>,
    list: Vec<SegmentAllocation>,
    /// By address.
    regions: Vec<RemoteRegion>,
    /// All regions have a name on the wire.
    serves_all: bool,
    /// Some of it cannot be mapped.
    has_private: bool,
}

impl RemoteRegion {
    /// One that holds no address.
    pub(crate) const NONE: Self = Self { addr: 0, len: 0, segment: None, allocation: 0 };
}

impl RemoteTable {
    /// The position of the region that holds an address that is in a window.
    pub(crate) fn region_at(&self, addr: u64) -> usize {
        self.regions.partition_point(|region| region.addr <= addr).saturating_sub(1)
    }

    pub(crate) fn region(&self, at: usize) -> &RemoteRegion {
        &self.regions[at]
    }

    /// The device that a region lies on.
    pub(crate) fn device_of(&self, region: &RemoteRegion) -> DeviceUuid {
        self.list[region.allocation].key.device
    }

    /// Whether TCP reaches all regions.
    pub(crate) fn serves_all(&self) -> bool {
        self.serves_all
    }

    pub(crate) fn allocation(&self, window: usize) -> &SegmentAllocation {
        &self.list[self.allocations[window]]
    }

    /// The window that holds an address.
    pub(crate) fn window_at(&self, addr: u64) -> Option<usize> {
        let at = self.windows.partition_point(|window| window.start <= addr).checked_sub(1)?;
        (addr - self.windows[at].start < self.windows[at].len).then_some(at)
    }

    /// Whether a window cannot be mapped.
    pub(crate) fn is_private(&self, window: usize) -> bool {
        !self.allocation(window).mappable
    }

    /// The first byte that cannot be mapped.
    pub(crate) fn first_private(&self) -> Option<u64> {
        let at = (0..self.windows.len()).find(|&window| self.is_private(window))?;
        Some(self.windows[at].start)
    }

    fn lists(&self, key: AllocationKey) -> bool {
        self.list.iter().any(|allocation| allocation.key == key)
    }

    fn new(peer: &str, segment: Segment) -> Result<Self> {
        let bad = |reason: String| Error::BadSegment { peer: peer.to_owned(), reason };
        let mut by_key = HashMap::with_capacity(segment.allocations.len());
        for (index, allocation) in segment.allocations.iter().enumerate() {
            if allocation.len == 0 || allocation.base.checked_add(allocation.len).is_none() {
                return Err(bad(format!(
                    "allocation {} has an impossible extent",
                    allocation.key.id
                )));
            }
            if by_key.insert(allocation.key, index).is_some() {
                return Err(bad(format!("allocation {} is listed twice", allocation.key.id)));
            }
        }
        let mut table = Self {
            has_private: segment.allocations.iter().any(|allocation| !allocation.mappable),
            windows: Vec::new(),
            allocations: Vec::new(),
            list: segment.allocations,
            regions: Vec::new(),
            serves_all: segment.regions.iter().all(|region| region.segment.is_some()),
        };
        let mut regions = segment.regions;
        regions.sort_unstable_by_key(|region| region.addr);
        for region in regions {
            let named = by_key.get(&region.allocation);
            let &index = named.ok_or_else(|| {
                bad(format!("region {:#x} is in no listed allocation", region.addr))
            })?;
            let allocation = &table.list[index];
            let inside = region.addr.checked_sub(allocation.base).is_some_and(|offset| {
                region.len > 0 && offset < allocation.len && region.len <= allocation.len - offset
            });
            if !inside {
                return Err(bad(format!("region {:#x} leaves its allocation", region.addr)));
            }
            table.regions.push(RemoteRegion {
                addr: region.addr,
                len: region.len,
                segment: region.segment,
                allocation: index,
            });
            if let Some(last) = table.windows.last_mut() {
                let end = last.start + last.len;
                if end > region.addr {
                    return Err(bad(format!("region {:#x} overlaps another one", region.addr)));
                }
                if end == region.addr && table.allocations.last() == Some(&index) {
                    last.len += region.len;
                    continue;
                }
            }
            table.windows.push(Window { start: region.addr, len: region.len });
            table.allocations.push(index);
        }
        Ok(table)
    }
}

impl Target {
    pub(crate) fn new(
        name: String,
        segment: Segment,
        exports: Arc<dyn Exports>,
        cache: Arc<MappingCache>,
        reach: Reach,
    ) -> Result<Self> {
        let (incarnation, process, pid) = (segment.incarnation, segment.process, segment.pid);
        let registry = in_process(incarnation).map(|registry| Arc::downgrade(&registry));
        let table = RemoteTable::new(&name, segment)?;
        let table = RwLock::new(Arc::new(table));
        let keeper = cache.keeper();
        let session = match &reach {
            Reach::Tcp { session, .. } => Arc::clone(session).into(),
            Reach::Mapped | Reach::MappedBesideTcp(_) => OnceLock::new(),
        };
        let lost = OnceLock::new();
        Ok(Self {
            inner: Arc::new(Inner {
                made_by: MadeBy::this_process(),
                name,
                incarnation,
                process,
                pid,
                table,
                registry,
                exports,
                cache,
                keeper,
                reach,
                left: LeftToTcp::default(),
                segments: OnceLock::new(),
                refreshes: AtomicU64::new(0),
                refreshing: Mutex::default(),
                session,
                lost,
            }),
        })
    }

    /// The name it was opened with.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The engine behind it.
    pub fn incarnation(&self) -> Identity {
        self.inner.incarnation
    }

    /// Refuses a fork of the process that opened the target.
    ///
    /// # Errors
    /// [`Error::OtherProcess`].
    pub fn check_process(&self) -> Result<()> {
        match self.inner.made_by.is_this_process() {
            true => Ok(()),
            false => Err(Error::OtherProcess { owner: self.inner.made_by.process() }),
        }
    }

    /// Takes a newer segment of the same engine. Mappings of allocations that are gone close with
    /// their last batch. Who asks the peer for it uses [`Target::refresh_with`]: several threads may.
    ///
    /// # Errors
    /// [`Error::BadSegment`] if it contradicts itself or is another engine's,
    /// [`Error::OtherProcess`].
    pub fn refresh(&self, segment: Segment) -> Result<()> {
        let inner = &self.inner;
        self.check_process()?;
        if segment.incarnation != inner.incarnation {
            let reason = format!(
                "it is of engine {}, this target of {}",
                segment.incarnation, inner.incarnation
            );
            return Err(Error::BadSegment { peer: inner.name.clone(), reason });
        }
        let table = RemoteTable::new(&inner.name, segment)?;
        let table = Arc::new(table);
        // The table first: a mapping that is made meanwhile is kept only if the table has it.
        let mut current = inner.table.write().unwrap_or_else(PoisonError::into_inner);
        let differs = *current != table;
        *current = Arc::clone(&table);
        // Before anybody can see the table: who was refused by the one before finds out of this one by
        // the count.
        inner.refreshes.fetch_add(u64::from(differs), Ordering::AcqRel);
        drop(current);
        inner.cache.release(inner.keeper, |key| table.lists(key));
        Ok(())
    }

    /// [`Target::refresh`], of a segment that `fetch` asks the peer for. One at a time, so that no older
    /// segment replaces a newer one; whoever calls meanwhile waits.
    ///
    /// # Errors
    /// Those of `fetch`, and those of [`Target::refresh`].
    pub fn refresh_with<E: From<Error>>(
        &self,
        fetch: impl FnOnce() -> Result<Segment, E>,
    ) -> Result<(), E> {
        self.check_process()?;
        let _one = self.inner.refreshing.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(self.refresh(fetch()?)?)
    }

    /// From now on a submission that names memory which the peer is not known to have asks there once,
    /// and is tried again if that changed something. The first source stays.
    pub fn refresh_from(&self, segments: Arc<dyn Segments>) {
        let _ = self.inner.segments.set(segments);
    }

    /// Asks for a newer segment, if there is where to. A peer that was restarted is lost.
    pub(crate) fn ask_again(&self) {
        let inner = &self.inner;
        // What is in this process, and not far, is looked up where it is registered.
        let Some(segments) = inner.segments.get() else { return };
        if inner.registry.is_some() && !self.is_far() {
            return;
        }
        let (peer, ours) = (&inner.name, inner.incarnation);
        let refreshed: Result<(), ExportsError> = self.refresh_with(|| {
            let segment = segments.fetch()?;
            if segment.incarnation != ours {
                let reason = restarted(segment.incarnation);
                self.lose(&reason);
                return Err(reason.into());
            }
            Ok(segment)
        });
        match refreshed {
            Ok(()) => tracing::debug!(peer, "refreshed a peer whose memory was not known"),
            Err(error) => tracing::debug!(peer, %error, "cannot refresh a peer"),
        }
    }

    /// Grows with each thing that is found out of the peer's memory: that it is another one, or that
    /// mappings do not reach it.
    pub(crate) fn changes(&self) -> u64 {
        let inner = &self.inner;
        let refreshes = inner.refreshes.load(Ordering::Acquire);
        refreshes + inner.left.count() as u64
    }

    /// Declares the peer dead. New submissions fail; running batches end as failed once their
    /// copies are quiet; mappings close after that. In a fork nothing happens.
    pub fn lose(&self, reason: &str) {
        if self.end(reason) {
            tracing::warn!(peer = %self.inner.name, reason, "peer lost");
        }
    }

    /// As [`Target::lose`], where it is this side that ends: nobody needs to be warned.
    pub fn close(&self, reason: &str) {
        if self.end(reason) {
            tracing::debug!(peer = %self.inner.name, reason, "peer closed");
        }
    }

    /// Whether this call ended it.
    fn end(&self, reason: &str) -> bool {
        if self.check_process().is_err() {
            return false;
        }
        let lose = || self.inner.lost.set(reason.to_owned()).is_ok();
        let ended = self.inner.cache.release_all_if(self.inner.keeper, lose);
        if ended {
            self.inner.cache.proofs.forget(self.inner.process);
            if let Some(session) = self.inner.session.get() {
                session.stop(reason);
            }
        }
        ended
    }

    /// Why the peer counts as dead, if it does.
    pub fn lost(&self) -> Option<Error> {
        let reason = self.inner.lost.get()?.clone();
        Some(Error::PeerLost { peer: self.inner.name.clone(), reason })
    }

    /// Whether it is reached by TCP alone.
    pub(crate) fn is_far(&self) -> bool {
        matches!(self.inner.reach, Reach::Tcp { .. })
    }

    /// Whether it is reached by TCP alone, instead of mappings.
    pub(crate) fn is_far_instead(&self) -> bool {
        matches!(self.inner.reach, Reach::Tcp { instead: true, .. })
    }

    /// What of its memory should be mapped and goes by TCP.
    pub(crate) fn left(&self) -> &LeftToTcp {
        &self.inner.left
    }

    /// Leaves an allocation, or all of its device's, to TCP as a device here sees it, if the peer is
    /// reached by that, too. Says so once.
    pub(crate) fn leave_to_tcp(
        &self,
        local: usize,
        remote: DeviceUuid,
        allocation: Option<u64>,
        error: &Error,
    ) {
        let inner = &self.inner;
        let beside = matches!(inner.reach, Reach::MappedBesideTcp(_)) && inner.registry.is_none();
        if beside
            && self.table().serves_all()
            && inner.left.add(local, remote, allocation, error.to_string())
        {
            tracing::warn!(peer = inner.name, %remote, cause = %error, "memory of a peer on this host goes over TCP, which is slower");
        }
    }

    /// Which way its memory is reached now. A fork has none.
    pub fn way(&self) -> Way {
        let inner = &self.inner;
        if self.check_process().is_err() {
            return Way::default();
        }
        let beside = match &inner.reach {
            Reach::Tcp { .. } => return Way { tcp: true, ..Way::default() },
            Reach::MappedBesideTcp(_) => true,
            Reach::Mapped => false,
        };
        if inner.registry.is_some() {
            return Way { mapped: true, ..Way::default() };
        }
        let mut reasons = inner.left.reasons();
        if inner.table_now().has_private {
            reasons.push("host memory that did not come from kvferry cannot be mapped".into());
        }
        Way { mapped: true, tcp: beside && !reasons.is_empty(), reasons }
    }

    /// Whether mappings reach all of its memory, or it is in this process.
    pub(crate) fn is_near(&self) -> bool {
        let inner = &self.inner;
        let all_mapped = || !inner.table_now().has_private && inner.left.count() == 0;
        !self.is_far() && (inner.registry.is_some() || all_mapped())
    }

    /// The lanes to it, if there are any.
    pub(crate) fn session(&self) -> Option<&Arc<Session>> {
        self.inner.session.get()
    }

    /// Makes the lanes to a peer that is not far, unless there are some or it speaks on none.
    pub(crate) fn connect(&self, session: impl FnOnce(&str) -> Result<Arc<Session>>) -> Result<()> {
        let Reach::MappedBesideTcp(address) = &self.inner.reach else { return Ok(()) };
        if self.inner.session.get().is_none() {
            // Of several threads one's is kept; the others' have connected nothing.
            let _ = self.inner.session.set(session(address)?);
        }
        if let (Some(session), Some(reason)) = (self.session(), self.inner.lost.get()) {
            session.stop(reason);
        }
        Ok(())
    }

    /// How many of its allocations are mapped here now; in a fork none is.
    pub fn open_count(&self) -> usize {
        if self.check_process().is_err() {
            return 0;
        }
        self.inner.cache.count(self.inner.keeper)
    }

    pub(crate) fn table(&self) -> Arc<RemoteTable> {
        Arc::clone(&self.inner.table_now())
    }

    /// The registered memory of a target in this process; `None` for another process's.
    ///
    /// # Errors
    /// [`Error::PeerLost`] if its engine is gone.
    pub(crate) fn registry(&self) -> Result<Option<Arc<Registry>>> {
        let Some(registry) = &self.inner.registry else { return Ok(None) };
        let gone = || Error::PeerLost {
            peer: self.inner.name.clone(),
            reason: "its engine was dropped".into(),
        };
        registry.upgrade().map(Some).ok_or_else(gone)
    }

    /// The mapping of an allocation for a local device; opens it at first use.
    ///
    /// # Errors
    /// [`Error::Unproven`] if the pair of devices does not work.
    pub(crate) fn mapping(
        &self,
        allocation: &SegmentAllocation,
        index: usize,
        device: &Arc<dyn Device>,
    ) -> Result<Arc<OpenMapping>> {
        let inner = &self.inner;
        if !allocation.mappable {
            return Err(Error::NotServed { peer: inner.name.clone(), addr: allocation.base });
        }
        let key = MappingKey { process: inner.process, allocation: allocation.key, device: index };
        let lists = || inner.lost.get().is_none() && self.table().lists(allocation.key);
        inner.cache.acquire(key, inner.keeper, lists, || inner.open(allocation, index, device))
    }
}

/// Why a peer is lost whose name is another engine's now.
fn restarted(found: Identity) -> String {
    format!("it was restarted: engine {found} answers under its name")
}

impl Inner {
    fn table_now(&self) -> RwLockReadGuard<'_, Arc<RemoteTable>> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(
        &self,
        allocation: &SegmentAllocation,
        index: usize,
        device: &Arc<dyn Device>,
    ) -> Result<Mapping> {
        let SegmentAllocation { key, base, len, .. } = *allocation;
        let peer = || self.name.clone();
        let pair = Pair { process: self.process, local: index, remote: key.device };
        self.cache.proofs.require(pair, device, &self.name, &*self.exports)?;
        let refused = |reason| Error::ExportRefused { peer: peer(), id: key.id, reason };
        let export = self.exports.fetch(key).map_err(|error| refused(error.to_string()))?;
        if export.len() != len {
            let found = export.len();
            return Err(refused(format!("it is {found} bytes, the segment says {len}")));
        }
        tracing::debug!(peer = self.name, id = key.id, bytes = len, device = %device.info(), "mapping a peer's allocation");
        Arc::clone(device).open(export).map_err(|error| match error {
            DeviceError::AlreadyMapped { device, .. } => {
                Error::MappedElsewhere { device, peer: peer(), pid: self.pid, base, len }
            }
            error @ (DeviceError::Call { .. } | DeviceError::BadExport { .. }) => {
                let (device, reason) = (device.info().to_string(), error.to_string());
                Error::NotOpened { device, peer: peer(), base, len, reason }
            }
            error => error.into(),
        })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.made_by.is_this_process() {
            self.cache.release(self.keeper, |_| false);
        }
    }
}

#[cfg(test)]
mod tests;
