//! Access between the devices of one vendor that are open in this process.

use std::fmt::Display;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::device::DeviceUuid;
use crate::error::Result;

/// A device that can be let into the memory of others, by its name in `Display`.
pub(crate) trait Peer: Display {
    fn uuid(&self) -> DeviceUuid;
    /// Whether the driver says that access to `peer` is possible.
    fn can_access(&self, peer: &Self) -> bool;
    /// Lets this device's kernels use memory of `peer`. That they may already is success.
    fn enable_access(&self, peer: &Self) -> Result<()>;
    fn refusals(&self) -> &Refusals;
}

/// Devices for which access was promised and then refused.
#[derive(Debug, Default)]
pub(crate) struct Refusals(Mutex<Vec<DeviceUuid>>);

impl Refusals {
    pub(crate) fn contain(&self, uuid: &DeviceUuid) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(uuid)
    }

    fn set(&self, uuid: DeviceUuid, refused: bool) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| *other != uuid);
        if refused {
            all.push(uuid);
        }
    }
}

/// Devices of one vendor that are open in this process.
#[derive(Debug)]
pub(crate) struct OpenDevices<T>(Mutex<Vec<Weak<T>>>);

impl<T: Peer> OpenDevices<T> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Adds a device, and lets every pair that can reach each other's memory do so from kernels.
    ///
    /// Nothing is ever disabled: the application may rely on the same access.
    pub(crate) fn connect(&self, device: &Arc<T>) {
        let mut opened = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        opened.retain(|other| other.strong_count() > 0);
        let uuid = device.uuid();
        for other in opened.iter().filter_map(Weak::upgrade).filter(|other| other.uuid() != uuid) {
            enable(&**device, &*other);
            enable(&*other, &**device);
        }
        opened.push(Arc::downgrade(device));
    }
}

fn enable<T: Peer>(device: &T, peer: &T) {
    if !device.can_access(peer) {
        return;
    }
    let enabled = device.enable_access(peer);
    device.refusals().set(peer.uuid(), enabled.is_err());
    if let Err(error) = enabled {
        tracing::warn!(%error, "{device} cannot reach the memory of {peer}");
    }
}
