//! Registered memory: who owns an address, in which allocation, and who uses it now.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use foldhash::HashMap;
use kvferry_device::{Allocation, Device, DeviceUuid, Export, Mapping, Vendor, private_memory};
use kvferry_wire::segment::SegmentRef;
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::pinned::{PinnedAccount, PinnedShare};
use crate::plan::Window;
use crate::segment::{AllocationKey, Identity, Segment, SegmentAllocation, SegmentRegion};

/// A registered region.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    /// Index of its device in the engine.
    pub(crate) device: usize,
    pub(crate) allocation: AllocationKey,
    /// What peers call it over TCP.
    pub(crate) segment: SegmentRef,
    /// Batches in flight that use it.
    users: AtomicUsize,
    /// Whether somebody waits for it to be unused.
    withdrawn: AtomicBool,
    /// Somebody did, and gave up: it is withdrawn for good.
    given_up: AtomicBool,
}

impl Region {
    pub(crate) fn users(&self) -> usize {
        self.users.load(Acquire)
    }

    pub(crate) fn is_withdrawn(&self) -> bool {
        self.withdrawn.load(Relaxed)
    }

    /// That it is still in use, after so long.
    pub(crate) fn busy(&self, waited: Duration) -> Error {
        Error::RegionBusy { addr: self.addr, batches: self.users(), waited }
    }
}

/// Keeps a region in use until dropped.
#[derive(Debug)]
pub(crate) struct Pin(Arc<Region>);

impl Pin {
    fn new(region: &Arc<Region>) -> Self {
        region.users.fetch_add(1, AcqRel);
        Self(Arc::clone(region))
    }

    pub(crate) fn region(&self) -> &Region {
        &self.0
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, AcqRel);
    }
}

/// Host memory of this process, page-locked for a device of another kind until dropped.
#[derive(Debug)]
pub(crate) struct HostLock {
    base: u64,
    // Before the share: it ends the lock.
    mapping: Mapping,
    /// Shared by the locks of all devices, which are one lock of the memory.
    share: Arc<PinnedShare>,
}

impl HostLock {
    /// What to add to an address of the memory to get where the device sees it.
    pub(crate) fn relocation(&self) -> u64 {
        self.mapping.addr().wrapping_sub(self.base)
    }
}

/// Of one allocation, by device. Locked while memory is page-locked, which takes seconds for tens
/// of GB, so only those that want the same allocation wait for each other.
#[derive(Debug, Default)]
struct HostLocks(Mutex<HashMap<DeviceUuid, Arc<HostLock>>>);

/// All regions at one moment, for submissions: windows to search, regions to pin.
#[derive(Debug, Default)]
pub(crate) struct Table {
    /// Regions that touch inside one allocation are one window, so a range may cross them.
    pub(crate) windows: Vec<Window>,
    /// Per window.
    pub(crate) devices: Vec<usize>,
    /// Per window.
    pub(crate) allocations: Vec<AllocationKey>,
    /// Per window: which of `regions` it is made of.
    members: Vec<std::ops::Range<usize>>,
    regions: Vec<Arc<Region>>,
}

impl Table {
    fn new(regions: &BTreeMap<u64, Arc<Region>>) -> Self {
        let mut table = Self { regions: regions.values().cloned().collect(), ..Self::default() };
        for (at, region) in table.regions.iter().enumerate() {
            let continues =
                table.windows.last().is_some_and(|last| last.start + last.len == region.addr)
                    && table.allocations.last() == Some(&region.allocation);
            if let (true, Some(last), Some(members)) =
                (continues, table.windows.last_mut(), table.members.last_mut())
            {
                last.len += region.len;
                members.end = at + 1;
                continue;
            }
            table.windows.push(Window { start: region.addr, len: region.len });
            table.devices.push(region.device);
            table.allocations.push(region.allocation);
            table.members.push(at..at + 1);
        }
        table
    }

    /// The window that holds an address.
    pub(crate) fn window_at(&self, addr: u64) -> Option<usize> {
        let at = self.windows.partition_point(|window| window.start <= addr).checked_sub(1)?;
        (addr - self.windows[at].start < self.windows[at].len).then_some(at)
    }

    /// The device of an address that is in a window.
    pub(crate) fn device_at(&self, addr: u64) -> usize {
        self.devices[self.windows.partition_point(|window| window.start <= addr).saturating_sub(1)]
    }
}

/// The engine's registered memory.
#[derive(Debug)]
pub(crate) struct Registry {
    state: Mutex<Regions>,
    pinned: Arc<PinnedAccount>,
}

/// The engines of this process, by incarnation. What a peer says of itself never makes its
/// addresses ours: only finding its registry here does.
static IN_PROCESS: Mutex<BTreeMap<[u8; 16], Weak<Registry>>> = Mutex::new(BTreeMap::new());

/// The registry of an engine of this process.
pub(crate) fn in_process(incarnation: Identity) -> Option<Arc<Registry>> {
    IN_PROCESS.lock().unwrap_or_else(PoisonError::into_inner).get(&incarnation.0)?.upgrade()
}

#[derive(Debug, Default)]
struct Regions {
    by_addr: BTreeMap<u64, Arc<Region>>,
    /// Those that somebody ends: nobody finds them, but their memory is theirs until that is done,
    /// as they come back if they stay in use. They overlap none of the others.
    withdrawn: BTreeMap<u64, Arc<Region>>,
    /// By number of their segments.
    segments: Vec<NamedSegment>,
    /// Numbers that name no region.
    free_segments: Vec<usize>,
    allocations: HashMap<AllocationKey, Exported>,
    /// Built when a submission first needs it after a change.
    table: Option<Arc<Table>>,
}

/// What a segment's number names over TCP.
#[derive(Debug, Default)]
struct NamedSegment {
    /// Grows with every region that gets the number.
    generation: u64,
    /// None before it is registered and after it is withdrawn.
    region: Option<Arc<Region>>,
}

impl Regions {
    /// A name that no region has or had.
    fn name_segment(&mut self) -> SegmentRef {
        let number = self.free_segments.pop().unwrap_or_else(|| {
            self.segments.push(NamedSegment::default());
            self.segments.len() - 1
        });
        self.segments[number].generation += 1;
        SegmentRef { segment: number as u64, generation: self.segments[number].generation }
    }

    /// The allocation, if that was its last region.
    fn end_region_of(&mut self, key: AllocationKey) -> Option<Exported> {
        let exported = self.allocations.get_mut(&key)?;
        exported.regions -= 1;
        let unused = exported.regions == 0;
        unused.then(|| self.allocations.remove(&key)).flatten()
    }

    fn publish(&mut self, region: Arc<Region>) {
        self.segments[region.segment.segment as usize].region = Some(Arc::clone(&region));
        self.by_addr.insert(region.addr, region);
        self.table = None;
    }
}

/// An allocation with registered regions. That it can be exported was found out when the first one
/// was registered, so what cannot is refused there and not in live traffic. One that is lent
/// for proofs has no regions and is in no segment.
#[derive(Debug)]
struct Exported {
    allocation: Allocation,
    device: usize,
    /// Not so is host memory that did not come from kvferry: each region of it is an allocation.
    mappable: bool,
    /// The export to copy for every peer, where it is to be made once only (FAILURES.md B06, B08).
    export: Option<Export>,
    /// Of host memory that GPUs use in place. They last as long as the entry: the first transfer
    /// that needs one makes it, and the end of the last region ends it.
    locks: Arc<HostLocks>,
    regions: usize,
}

impl Exported {
    fn new(owned: Owned, export: Option<Export>, regions: usize) -> Self {
        let Owned { device, allocation, mappable } = owned;
        Self { allocation, device, mappable, export, locks: Arc::default(), regions }
    }
}

/// Whose memory a range is.
#[derive(Clone, Copy, Debug)]
struct Owned {
    device: usize,
    allocation: Allocation,
    mappable: bool,
}

impl Registry {
    /// The registry of a new engine.
    pub(crate) fn of_engine(incarnation: Identity, pinned: Arc<PinnedAccount>) -> Arc<Self> {
        let registry = Arc::new(Self { state: Mutex::default(), pinned });
        let mut engines = IN_PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
        engines.retain(|_, registry| registry.strong_count() > 0);
        engines.insert(incarnation.0, Arc::downgrade(&registry));
        registry
    }

    pub(crate) fn register(&self, devices: &[Arc<dyn Device>], addr: u64, len: u64) -> Result<()> {
        if len == 0 || addr.checked_add(len).is_none() {
            return Err(Error::BadRegion { addr, len });
        }
        let owned = owner(devices, addr, len)?;
        let Owned { device, allocation, mappable } = owned;
        if len > allocation.len - (addr - allocation.base) {
            let Allocation { base, len: bytes, .. } = allocation;
            return Err(Error::LeavesAllocation { addr, len, base, allocation: bytes });
        }
        let key = AllocationKey { device: devices[device].info().uuid, id: allocation.id };
        self.refuse_overlap(&self.state(), addr, len)?;
        // These are driver calls: they happen outside the lock, and a lost race only wastes them.
        let known = self.state().allocations.contains_key(&key);
        let export = match (known, mappable) {
            (true, _) => None,
            (false, true) => Some(devices[device].prepare_export(&allocation)?),
            (false, false) => Some(None),
        };
        let mut state = self.state();
        self.refuse_overlap(&state, addr, len)?;
        match (state.allocations.get_mut(&key), export) {
            (Some(exported), _) => exported.regions += 1,
            (None, Some(export)) => {
                state.allocations.insert(key, Exported::new(owned, export, 1));
            }
            (None, None) => {
                // Its last region was unregistered since we looked.
                drop(state);
                return self.register(devices, addr, len);
            }
        }
        let segment = state.name_segment();
        let region = Region {
            addr,
            len,
            device,
            allocation: key,
            segment,
            users: AtomicUsize::new(0),
            withdrawn: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
        };
        state.publish(Arc::new(region));
        Ok(())
    }

    /// Withdraws the region that begins at `addr`: later submissions do not find it.
    ///
    /// # Errors
    /// [`Error::RegionBusy`] for one that somebody else is ending: its memory is still in use.
    pub(crate) fn withdraw(&self, addr: u64) -> Result<Arc<Region>> {
        let mut state = self.state();
        if let Some(region) = state.withdrawn.get(&addr) {
            return Err(region.busy(Duration::ZERO));
        }
        let region = state.by_addr.remove(&addr).ok_or(Error::UnknownRegion { addr })?;
        state.segments[region.segment.segment as usize].region = None;
        region.withdrawn.store(true, Relaxed);
        state.withdrawn.insert(addr, Arc::clone(&region));
        state.table = None;
        Ok(region)
    }

    /// Withdraws all regions; those that somebody gave up come as well.
    pub(crate) fn withdraw_all(&self) -> Vec<Arc<Region>> {
        let (addrs, mut regions): (Vec<_>, Vec<_>) = {
            let state = self.state();
            let given_up = state.withdrawn.values().filter(|it| it.given_up.swap(false, Relaxed));
            (state.by_addr.keys().copied().collect(), given_up.cloned().collect())
        };
        regions.extend(addrs.into_iter().filter_map(|addr| self.withdraw(addr).ok()));
        regions
    }

    /// Leaves withdrawn regions as they are: nobody finds them, and whoever withdraws all has them next.
    pub(crate) fn give_up(&self, regions: Vec<Arc<Region>>) {
        regions.iter().for_each(|region| region.given_up.store(true, Relaxed));
    }

    /// One of the regions that are being ended.
    pub(crate) fn withdrawn(&self) -> Option<Arc<Region>> {
        self.state().withdrawn.values().next().cloned()
    }

    /// Puts a withdrawn region back, because it is still in use.
    pub(crate) fn restore(&self, region: Arc<Region>) {
        region.withdrawn.store(false, Relaxed);
        let mut state = self.state();
        state.withdrawn.remove(&region.addr);
        state.publish(region);
    }

    /// Keeps the region of that name registered until the pin is dropped; none if it is not (any
    /// more).
    pub(crate) fn pin_segment(&self, name: SegmentRef) -> Option<Pin> {
        let state = self.state();
        let named = state.segments.get(usize::try_from(name.segment).ok()?)?;
        let region = named.region.as_ref().filter(|_| named.generation == name.generation)?;
        Some(Pin::new(region))
    }

    /// Ends a withdrawn region that nobody uses any more.
    pub(crate) fn forget(&self, region: &Region) {
        let ended = {
            let mut state = self.state();
            state.free_segments.push(region.segment.segment as usize);
            state.end_region_of(region.allocation)
        };
        // Outside the lock: it ends page-locks.
        drop(ended);
        self.state().withdrawn.remove(&region.addr);
    }

    /// Makes an allocation of the engine's own exportable, without a region that a peer could use.
    pub(crate) fn lend(
        &self,
        device: usize,
        owner: &Arc<dyn Device>,
        addr: u64,
    ) -> Result<AllocationKey> {
        let allocation = owner.allocation(addr)?;
        let key = AllocationKey { device: owner.info().uuid, id: allocation.id };
        // Outside the lock, as in `register`. Nobody else knows this memory, so nobody is faster.
        let export = owner.prepare_export(&allocation)?;
        let owned = Owned { device, allocation, mappable: true };
        let lent = Exported::new(owned, export, 0);
        self.state().allocations.insert(key, lent);
        Ok(key)
    }

    /// Ends what `lend` began.
    pub(crate) fn take_back(&self, key: AllocationKey) {
        self.state().allocations.remove(&key);
    }

    /// Page-locks host memory for a device, once however many come at the same time, until its last
    /// region is unregistered. Callers pin a region in it first, and let go of the lock before the
    /// pin: once a region is unregistered its memory may be freed.
    pub(crate) fn lock_host(
        &self,
        key: AllocationKey,
        device: &Arc<dyn Device>,
    ) -> Result<Arc<HostLock>> {
        let (locks, Allocation { base, len, .. }) = {
            let state = self.state();
            let exported = state.allocations.get(&key).ok_or_else(|| unknown(key))?;
            (Arc::clone(&exported.locks), exported.allocation)
        };
        let mut locks = locks.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = locks.get(&device.info().uuid) {
            return Ok(Arc::clone(lock));
        }
        let share = match locks.values().next() {
            Some(lock) => Arc::clone(&lock.share),
            None => Arc::new(self.pinned.take(len)?),
        };
        tracing::debug!(base, bytes = len, device = %device.info(), "page-locking host memory");
        let mapping = Arc::clone(device).map_host(base, len)?;
        let lock = Arc::new(HostLock { base, mapping, share });
        locks.insert(device.info().uuid, Arc::clone(&lock));
        Ok(lock)
    }

    /// How many regions there are, and their bytes.
    pub(crate) fn total(&self) -> (usize, u64) {
        let state = self.state();
        (state.by_addr.len(), state.by_addr.values().map(|region| region.len).sum())
    }

    pub(crate) fn pinned(&self) -> &Arc<PinnedAccount> {
        &self.pinned
    }

    /// Keeps the region that holds `addr` registered until the pin is dropped; none if none does.
    pub(crate) fn pin_at(&self, addr: u64) -> Option<Pin> {
        // Pinned under the lock, under which regions are withdrawn.
        let state = self.state();
        let (_, region) = state.by_addr.range(..=addr).next_back()?;
        (addr - region.addr < region.len).then(|| Pin::new(region))
    }

    /// Keeps the regions of these windows registered until the pins, which it adds, are dropped.
    ///
    /// # Errors
    /// [`Error::UnknownRegion`] if one was withdrawn since the table was made.
    pub(crate) fn pin(
        &self,
        table: &Table,
        windows: impl Iterator<Item = usize>,
        pins: &mut SmallVec<[Pin; 2]>,
    ) -> Result<()> {
        let before = pins.len();
        let regions = windows.flat_map(|window| &table.regions[table.members[window].clone()]);
        pins.extend(regions.map(Pin::new));
        // Pinned first and looked up after: whoever withdraws a region after this look sees the
        // pin and waits, whoever did before it is seen here.
        let state = self.state();
        for Pin(region) in &pins[before..] {
            if !state.by_addr.get(&region.addr).is_some_and(|now| Arc::ptr_eq(now, region)) {
                return Err(Error::UnknownRegion { addr: region.addr });
            }
        }
        Ok(())
    }

    pub(crate) fn table(&self) -> Arc<Table> {
        let state = &mut *self.state();
        let by_addr = &state.by_addr;
        Arc::clone(state.table.get_or_insert_with(|| Arc::new(Table::new(by_addr))))
    }

    pub(crate) fn segment(&self, incarnation: Identity, devices: &[Arc<dyn Device>]) -> Segment {
        let state = self.state();
        let published = state.allocations.iter().filter(|(_, exported)| exported.regions > 0);
        let allocations = published.map(|(&key, exported)| SegmentAllocation {
            key,
            vendor: devices[exported.device].info().vendor,
            base: exported.allocation.base,
            len: exported.allocation.len,
            mappable: exported.mappable,
        });
        let regions = state.by_addr.values().map(|region| SegmentRegion {
            addr: region.addr,
            len: region.len,
            allocation: region.allocation,
            segment: Some(region.segment),
        });
        Segment {
            incarnation,
            process: Identity::of_process(),
            pid: std::process::id(),
            allocations: allocations.collect(),
            regions: regions.collect(),
        }
    }

    pub(crate) fn export(&self, devices: &[Arc<dyn Device>], key: AllocationKey) -> Result<Export> {
        let (device, allocation) = {
            let state = self.state();
            let exported = state.allocations.get(&key).ok_or_else(|| unknown(key))?;
            if !exported.mappable {
                let device = devices[exported.device].info().to_string();
                let reason = "it did not come from kvferry; TCP reaches it".into();
                let base = exported.allocation.base;
                return Err(kvferry_device::Error::NotExportable { device, base, reason }.into());
            }
            if let Some(Export::Handle { bytes, len }) = &exported.export {
                return Ok(Export::Handle { bytes: bytes.clone(), len: *len });
            }
            (exported.device, exported.allocation)
        };
        Ok(devices[device].export(&allocation)?)
    }

    fn refuse_overlap(&self, state: &Regions, addr: u64, len: u64) -> Result<()> {
        let mut before = [&state.by_addr, &state.withdrawn]
            .into_iter()
            .filter_map(|regions| regions.range(..addr + len).next_back());
        match before.find(|(_, region)| region.addr + region.len > addr) {
            Some((_, region)) => {
                Err(Error::AlreadyRegistered { addr, len, start: region.addr, region: region.len })
            }
            None => Ok(()),
        }
    }

    fn state(&self) -> MutexGuard<'_, Regions> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unknown(key: AllocationKey) -> Error {
    Error::UnknownAllocation { device: key.device.to_string(), id: key.id }
}

/// The device that owns `addr`, by its driver's word and never by an ordinal, and what it exports
/// for the range. What no device knows is host memory of the application's own, if there is a device
/// for that.
fn owner(devices: &[Arc<dyn Device>], addr: u64, len: u64) -> Result<Owned> {
    for (index, device) in devices.iter().enumerate() {
        match device.export_unit(addr, len) {
            Ok(allocation) => return Ok(Owned { device: index, allocation, mappable: true }),
            Err(kvferry_device::Error::UnknownAddress { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    if let Some(host) = devices.iter().position(|device| device.info().vendor == Vendor::Host) {
        let allocation = private_memory(addr, len)?;
        return Ok(Owned { device: host, allocation, mappable: false });
    }
    let names: Vec<_> = devices.iter().map(|device| device.info().to_string()).collect();
    Err(Error::NotDeviceMemory { addr, devices: names.join(", ") })
}
