//! Between a device's memory and sockets: pinned slots, cut into slices.
//!
//! Half of the slices send and half receive. A slice that sends is free once the socket took it,
//! which depends on the peer; one that receives is free once its bytes are applied, which depends on
//! this device alone. So two engines that send to each other never wait for each other's slices.

mod copying;

use std::collections::{HashSet, VecDeque};
use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use kvferry_device::{Capabilities, Device, Memory, PinnedMemory, QueueOptions, Vendor};
use tokio::sync::Notify;

use self::copying::Listed;
pub(super) use self::copying::{Copying, copy};
use super::lane::{DeviceLanes, Lane};
use super::watcher::Watcher;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::pinned::{PinnedAccount, PinnedShare};

/// Which way the bytes of a slice go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Send,
    Receive,
}

/// Address and bytes of a piece of device memory.
pub(super) type Piece = (u64, u64);

/// Pageable slices of one device and direction, for when there are no pinned ones.
const PAGEABLE: usize = 16;

/// The staging of an engine.
#[derive(Debug)]
pub(super) struct Staging {
    config: Config,
    devices: Vec<Arc<DeviceLanes>>,
    account: Arc<PinnedAccount>,
    /// Per device; made when TCP first needs it.
    pools: Vec<OnceLock<Arc<Pool>>>,
    /// Held by who makes one.
    making: Mutex<()>,
    watcher: Watcher,
}

impl Staging {
    pub(super) fn new(
        config: &Config,
        devices: &[Arc<DeviceLanes>],
        account: &Arc<PinnedAccount>,
    ) -> Result<Self> {
        Ok(Self {
            config: config.clone(),
            devices: devices.to_vec(),
            account: Arc::clone(account),
            making: Mutex::default(),
            pools: devices.iter().map(|_| OnceLock::new()).collect(),
            watcher: Watcher::start()?,
        })
    }

    pub(super) fn device(&self, index: usize) -> &Arc<dyn Device> {
        &self.devices[index].device
    }

    /// Whether sockets use the device's memory in place.
    pub(super) fn is_host(&self, index: usize) -> bool {
        self.device(index).info().vendor == Vendor::Host
    }

    /// Bytes of a slice, and of an extent on the wire.
    pub(super) fn slice_bytes(&self) -> u64 {
        self.config.tcp_slice_bytes.min(self.config.tcp_staging_slot_bytes)
    }

    /// The slices of a device.
    ///
    /// # Errors
    /// [`Error::PinnedBudget`], and the device's, as long as there is no room for them.
    pub(super) fn pool(&self, index: usize) -> Result<Arc<Pool>> {
        let place = &self.pools[index];
        if let Some(pool) = place.get() {
            return Ok(Arc::clone(pool));
        }
        // Two of one device would lock twice the memory.
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = place.get() {
            return Ok(Arc::clone(pool));
        }
        let pool = Pool::new(&self.devices[index], &self.config, &self.account)?;
        Ok(Arc::clone(place.get_or_init(|| Arc::new(pool))))
    }

    /// Bytes of all pinned slices.
    pub(super) fn slot_bytes(&self) -> u64 {
        self.open_pools().map(|pool| pool.pinned_bytes).sum()
    }

    /// Bytes of pinned memory that the queues beside them hold.
    pub(super) fn queue_bytes(&self) -> u64 {
        self.open_pools().map(|pool| pool.lane.pinned_bytes).sum()
    }

    fn open_pools(&self) -> impl Iterator<Item = &Arc<Pool>> {
        self.pools.iter().filter_map(OnceLock::get)
    }

    pub(super) fn watcher(&self) -> &Watcher {
        &self.watcher
    }
}

/// Pinned memory and, for the kernel, device memory of the same size.
#[derive(Debug)]
struct Staged {
    pinned: PinnedMemory,
    bounce: Option<Memory>,
}

/// Things to take and to give back, and who waits for one.
#[derive(Debug)]
struct Shelf<T>(Mutex<ShelfState<T>>);

#[derive(Debug)]
struct ShelfState<T> {
    free: Vec<T>,
    waiters: Vec<Arc<Notify>>,
}

impl<T> Shelf<T> {
    fn new(free: Vec<T>) -> Self {
        Self(Mutex::new(ShelfState { free, waiters: Vec::new() }))
    }

    /// One of them; if there is none, `wake` is told once there is.
    fn take(&self, wake: &Arc<Notify>) -> Option<T> {
        let mut state = self.state();
        let taken = state.free.pop();
        if taken.is_none() && !state.waiters.iter().any(|waiter| Arc::ptr_eq(waiter, wake)) {
            state.waiters.push(Arc::clone(wake));
        }
        taken
    }

    fn give_back(&self, it: T) {
        let mut state = self.state();
        state.free.push(it);
        let waiters = std::mem::take(&mut state.waiters);
        drop(state);
        waiters.iter().for_each(|waiter| waiter.notify_one());
    }

    fn state(&self) -> MutexGuard<'_, ShelfState<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The slices of one device.
#[derive(Debug)]
pub(super) struct Pool {
    // First, so that its copies have ended when the memory goes.
    lane: Arc<Lane>,
    /// Copies that nobody has submitted yet, in their order.
    listed: Mutex<VecDeque<Listed>>,
    send: Shelf<Staged>,
    receive: Shelf<Staged>,
    pageable_send: Shelf<Vec<u8>>,
    pageable_receive: Shelf<Vec<u8>>,
    pinned_bytes: u64,
    /// Of the slices' memory.
    _share: PinnedShare,
    slice_bytes: u64,
    /// Slices that send.
    pub(super) send_slices: usize,
    kernel: bool,
    strict: bool,
    /// Peers of whose fallback it was warned.
    warned: Mutex<HashSet<String>>,
}

impl Pool {
    fn new(
        of_device: &Arc<DeviceLanes>,
        config: &Config,
        account: &Arc<PinnedAccount>,
    ) -> Result<Self> {
        let device = &of_device.device;
        let slice_bytes = config.tcp_slice_bytes.min(config.tcp_staging_slot_bytes);
        let count = match config.tcp_staging {
            true => config.tcp_staging_slots as u64 * config.tcp_staging_slot_bytes / slice_bytes,
            false => 0,
        };
        let share = account.take(count * slice_bytes)?;
        let kernel = config.kernel && device.info().capabilities.contains(Capabilities::KERNEL);
        let options = QueueOptions {
            // More share the link, and the first slices come later.
            streams: 4,
            // One launch for the pieces, if they are not tiny, of several slices.
            ring_slots: 16,
            slot_descriptors: 4096,
            // They run one behind the other, so a short first launch gains nothing.
            first_descriptors: 4096,
            ..QueueOptions::default()
        };
        let lane = Lane::open_with(of_device, config, &options)?;
        let mut slices = Vec::new();
        for _ in 0..count {
            let pinned = Arc::clone(device).allocate_pinned(slice_bytes)?;
            let bounce = match kernel {
                true => Some(Arc::clone(device).allocate(slice_bytes)?),
                false => None,
            };
            slices.push(Staged { pinned, bounce });
        }
        let receive = slices.split_off(slices.len() / 2);
        tracing::debug!(device = %device.info(), slices = count, slice_bytes, kernel, "staging for TCP");
        let pageable = || Shelf::new(vec![Vec::new(); PAGEABLE]);
        Ok(Self {
            send_slices: slices.len(),
            lane,
            listed: Mutex::default(),
            send: Shelf::new(slices),
            receive: Shelf::new(receive),
            pageable_send: pageable(),
            pageable_receive: pageable(),
            pinned_bytes: share.bytes(),
            _share: share,
            slice_bytes,
            kernel,
            strict: config.strict,
            warned: Mutex::default(),
        })
    }

    /// Whether there is pinned memory that way.
    pub(super) fn is_staged(&self, side: Side) -> bool {
        self.pinned_bytes > 0 && (side == Side::Receive || self.send_slices > 0)
    }

    /// A free slice for what comes from or goes to the peer; if there is none, `wake` is told when it is worth to ask again. Who has waited
    /// long gets pageable memory.
    ///
    /// # Errors
    /// [`Error::NotStaged`] in strict mode, in the place of pageable memory.
    pub(super) fn take(
        self: &Arc<Self>,
        side: Side,
        peer: &str,
        waited_long: bool,
        wake: &Arc<Notify>,
    ) -> Result<Option<Slice>> {
        let (pinned, pageable) = match side {
            Side::Send => (&self.send, &self.pageable_send),
            Side::Receive => (&self.receive, &self.pageable_receive),
        };
        let slice = |bytes| Some(Slice { bytes: Some(bytes), side, pool: Arc::clone(self) });
        if self.is_staged(side) {
            if let Some(staged) = pinned.take(wake) {
                return Ok(slice(Bytes::Staged(staged)));
            }
            if !waited_long {
                return Ok(None);
            }
        }
        self.fall_back(peer, if self.pinned_bytes > 0 { "all slots are busy" } else { OFF })?;
        Ok(pageable.take(wake).and_then(|mut bytes| {
            bytes.resize(self.slice_bytes as usize, 0);
            slice(Bytes::Pageable(bytes))
        }))
    }

    /// Warns once of a slower path to or from a peer, or refuses it in strict mode.
    pub(super) fn fall_back(&self, peer: &str, reason: &str) -> Result<()> {
        let device = self.lane.device.info();
        if self.strict {
            let (device, reason) = (device.to_string(), reason.to_owned());
            return Err(Error::NotStaged { device, peer: peer.to_owned(), reason });
        }
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        if !warned.contains(peer) {
            warned.insert(peer.to_owned());
            tracing::warn!(%device, peer, reason, "GPU memory goes over TCP piece by piece, which is slower");
        }
        Ok(())
    }

    /// Whether the kernel gathers and scatters; without it that is one DMA a piece.
    pub(super) fn kernel(&self) -> bool {
        self.kernel
    }
}

/// Why nothing is staged where that was asked for.
pub(super) const OFF: &str = "MC_TCP_GPU_STAGING is off";

/// Memory between a device and a socket; its pool gets it back when it is dropped.
pub(super) struct Slice {
    /// Taken by `Drop` alone.
    bytes: Option<Bytes>,
    side: Side,
    pool: Arc<Pool>,
}

#[derive(Debug)]
enum Bytes {
    Staged(Staged),
    Pageable(Vec<u8>),
}

impl Debug for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slice").field("side", &self.side).finish_non_exhaustive()
    }
}

impl Slice {
    pub(super) fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Some(Bytes::Staged(staged)) => staged.pinned.bytes(),
            Some(Bytes::Pageable(bytes)) => bytes,
            None => &[],
        }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.bytes {
            Some(Bytes::Staged(staged)) => staged.pinned.bytes_mut(),
            Some(Bytes::Pageable(bytes)) => bytes,
            None => &mut [],
        }
    }

    pub(super) fn is_pinned(&self) -> bool {
        matches!(self.bytes, Some(Bytes::Staged(_)))
    }
}

impl Drop for Slice {
    fn drop(&mut self) {
        match (self.bytes.take(), self.side) {
            (Some(Bytes::Staged(staged)), Side::Send) => self.pool.send.give_back(staged),
            (Some(Bytes::Staged(staged)), Side::Receive) => self.pool.receive.give_back(staged),
            (Some(Bytes::Pageable(bytes)), Side::Send) => self.pool.pageable_send.give_back(bytes),
            (Some(Bytes::Pageable(bytes)), Side::Receive) => {
                self.pool.pageable_receive.give_back(bytes);
            }
            (None, _) => {}
        }
    }
}
