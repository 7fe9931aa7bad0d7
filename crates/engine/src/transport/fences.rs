//! What a submission waits for on the device.

use std::sync::Arc;

use kvferry_device::{Fence, Producer, SliceSource, Ticket, Work};

use super::lane::Lane;
use super::offload::Paced;
use crate::batch::Pending;
use crate::error::Result;

/// What has to be done before the first byte of a submission is read or written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order<'a> {
    pub(super) after: Option<Producer>,
    pub(super) behind: &'a [Fence],
    /// Batches of which not all is submitted: no device can wait for them.
    pub(super) paced: &'a [Arc<Paced>],
}

/// What a batch is behind.
#[derive(Debug, Default)]
pub(crate) struct Behind {
    pub(crate) pending: Vec<Pending>,
    /// Not all of them is submitted.
    pub(crate) paced: Vec<Arc<Paced>>,
}

impl Behind {
    pub(crate) fn is_empty(&self) -> bool {
        self.pending.is_empty() && self.paced.is_empty()
    }

    /// Ends of all that is submitted.
    ///
    /// # Errors
    /// What lost a device, if something that runs on it may never end.
    pub(super) fn fences(&self) -> Result<Fences> {
        Fences::of(&self.pending)
    }
}

impl Order<'_> {
    pub(super) const NONE: Self = Self { after: None, behind: &[], paced: &[] };

    /// Whether there is anything that a device waits for.
    pub(super) fn waits(&self) -> bool {
        self.after.is_some() || !self.behind.is_empty()
    }
}

/// Submits nothing but a wait, and says when that is over.
pub(super) fn wait_for(lane: &Arc<Lane>, order: Order<'_>) -> Result<Ticket> {
    let mut nothing = SliceSource(&[]);
    let (after, behind) = (order.after, order.behind);
    let mut work = Work { after, behind, ..Work::pieces(&mut nothing) };
    // SAFETY: it copies nothing.
    let submitted = unsafe { lane.lock().submit(&mut work) };
    submitted.map_err(|error| error.error.into())
}

/// Ends of earlier submissions, borrowed from their queues until dropped.
#[derive(Debug)]
pub(super) struct Fences {
    lanes: Vec<Arc<Lane>>,
    list: Vec<Fence>,
}

impl Fences {
    /// Of those that are not done.
    fn of(pending: &[Pending]) -> Result<Self> {
        let mut fences = Self { lanes: Vec::new(), list: Vec::new() };
        for Pending { lane, ticket } in pending {
            lane.refuse_lost(*ticket)?;
            if let Some(fence) = lane.lock().lend(*ticket)? {
                fences.lanes.push(Arc::clone(lane));
                fences.list.push(fence);
            }
        }
        Ok(fences)
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
