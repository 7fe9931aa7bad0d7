//! What a submission waits for on the device.

use std::sync::Arc;

use kvferry_device::{Fence, Producer};

use super::lane::Lane;
use crate::batch::Pending;

/// What has to be done before the first byte of a submission is read or written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order<'a> {
    pub(super) after: Option<Producer>,
    pub(super) behind: &'a [Fence],
}

impl Order<'_> {
    /// Whether there is anything to wait for.
    pub(super) fn waits(&self) -> bool {
        self.after.is_some() || !self.behind.is_empty()
    }
}

/// Ends of earlier submissions, borrowed from their queues until dropped.
#[derive(Debug)]
pub(super) struct Fences {
    lanes: Vec<Arc<Lane>>,
    list: Vec<Fence>,
}

impl Fences {
    /// Of those that are not done.
    pub(super) fn of(pending: &[Pending]) -> Self {
        let lend = |it: &Pending| Some((Arc::clone(&it.lane), it.lane.lock().lend(it.ticket)?));
        let (lanes, list) = pending.iter().filter_map(lend).unzip();
        Self { lanes, list }
    }

    pub(super) fn list(&self) -> &[Fence] {
        &self.list
    }
}

impl Drop for Fences {
    fn drop(&mut self) {
        for (lane, fence) in self.lanes.iter().zip(self.list.drain(..)) {
            lane.lock().take_back(fence);
        }
    }
}
