//! Device memory that staged copies pass through: pairs of buffers, made at first use, as many as
//! the knob allows, and shared by batches that wait for each other on the device.

use std::sync::Arc;

use kvferry_device::{Completions, Device, Memory, Ticket};

use crate::config::Config;
use crate::error::Result;

/// Two buffers side by side.
#[derive(Debug)]
struct Pair {
    memory: Memory,
    /// The last submission that uses it.
    last: Option<Ticket>,
    /// That one waits for a producer.
    gated: bool,
}

/// The pairs of one device and direction.
#[derive(Debug)]
pub(super) struct Bounce {
    device: Arc<dyn Device>,
    completions: Arc<dyn Completions>,
    pairs: Vec<Pair>,
    most: usize,
    pub(super) buffer_bytes: u64,
}

/// A pair for one batch.
#[derive(Debug)]
pub(super) struct Taken {
    at: usize,
    pub(super) buffers: [u64; 2],
    /// Uses it still.
    pub(super) behind: Option<Ticket>,
}

impl Bounce {
    pub(super) fn new(
        device: Arc<dyn Device>,
        completions: Arc<dyn Completions>,
        config: &Config,
    ) -> Self {
        // Two directions, of each a pair for batches with a producer and one for the others.
        let most_bytes = config.offload_bounce_bytes / 8 / 256 * 256;
        let buffer_bytes = config.offload_chunk_bytes.min(most_bytes);
        let most = (config.offload_bounce_bytes / 4 / buffer_bytes).max(2) as usize;
        Self { device, completions, pairs: Vec::new(), most, buffer_bytes }
    }

    /// A pair that nobody uses, or else one that is free first, as far as that can be told: a batch
    /// that waits for its producer holds up another of its kind, and no other.
    ///
    /// # Errors
    /// The device's, if there is no pair yet and no memory for one.
    pub(super) fn take(&mut self, gated: bool) -> Result<Taken> {
        let completions = &self.completions;
        for pair in &mut self.pairs {
            pair.last = pair.last.filter(|&last| !completions.done(last));
            pair.gated &= pair.last.is_some();
        }
        let waiting = self.pairs.iter().filter(|pair| pair.gated).count();
        // Half of them stay for batches without a producer.
        let may_wait = waiting < (self.most / 2).max(1);
        let usable = |pair: &Pair| match gated {
            true => pair.gated || may_wait,
            false => !pair.gated,
        };
        let idle = self.pairs.iter().position(|pair| pair.last.is_none() && usable(pair));
        let at = match idle {
            Some(at) => at,
            None if self.pairs.len() < self.most && (may_wait || !gated) => match self.add() {
                Ok(at) => at,
                Err(error) => self.busy(usable).ok_or(error)?,
            },
            None => self.busy(usable).expect("each kind has a pair, or may have one"),
        };
        // The next to be shared is another one.
        let pair = self.pairs.remove(at);
        let base = pair.memory.addr();
        let behind = pair.last;
        self.pairs.push(pair);
        let at = self.pairs.len() - 1;
        Ok(Taken { at, buffers: [base, base + self.buffer_bytes], behind })
    }

    fn busy(&self, usable: impl Fn(&Pair) -> bool) -> Option<usize> {
        self.pairs.iter().position(usable)
    }

    fn add(&mut self) -> Result<usize> {
        let memory = Arc::clone(&self.device).allocate(2 * self.buffer_bytes)?;
        self.pairs.push(Pair { memory, last: None, gated: false });
        Ok(self.pairs.len() - 1)
    }

    /// The submission uses the pair until it is done.
    pub(super) fn used(&mut self, taken: &Taken, ticket: Ticket, gated: bool) {
        let pair = &mut self.pairs[taken.at];
        // A batch without a producer is never behind one with.
        pair.gated |= gated;
        pair.last = Some(ticket);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.pairs.iter().map(|pair| pair.memory.len()).sum()
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        for pair in self.pairs.drain(..) {
            if pair.last.is_some_and(|last| !self.completions.done(last)) {
                // The device is lost and may still use it.
                std::mem::forget(pair.memory);
            }
        }
    }
}
