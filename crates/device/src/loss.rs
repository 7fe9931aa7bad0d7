//! Why a device is lost, as its queues and whoever waits for them know it.

use std::sync::{Arc, OnceLock};

use crate::device::DeviceInfo;
use crate::error::{Error, Result};

/// Whether a device is lost, and why. Clones are of the same device, and know it together.
#[derive(Clone, Debug, Default)]
pub struct Loss(Arc<OnceLock<Error>>);

impl Loss {
    /// Whether it is lost.
    pub fn is_lost(&self) -> bool {
        self.0.get().is_some()
    }

    /// Whether it is not lost.
    ///
    /// # Errors
    /// Why it is lost: [`Error::Lost`] or [`Error::Stalled`].
    pub fn check(&self) -> Result<()> {
        self.0.get().cloned().map_or(Ok(()), Err)
    }

    /// From now on it is lost. The first reason stays, and is returned. Any error but the two that
    /// mean a loss becomes the cause of one: others mean that nothing moves any more.
    pub(crate) fn lose(&self, device: &DeviceInfo, error: &Error) -> Error {
        let lost = || match error {
            Error::Lost { .. } | Error::Stalled { .. } => error.clone(),
            other => Error::Lost { device: device.to_string(), cause: other.to_string() },
        };
        self.0.get_or_init(lost).clone()
    }
}
