//! Device memory that staged copies pass through: buffers that are made at first use, as many as the
//! knob allows, and shared by batches that wait for each other on the device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvferry_device::{Completions, Device, Memory, Ticket};

use crate::config::Config;
use crate::error::Result;

/// One buffer; a batch that is larger uses its halves by turns.
#[derive(Debug)]
struct Buffer {
    memory: Memory,
    /// The last submission that uses it.
    last: Option<Ticket>,
    /// That one waits for a producer.
    gated: bool,
}

/// The buffers of one device and direction.
#[derive(Debug)]
pub(super) struct Bounce {
    device: Arc<dyn Device>,
    completions: Arc<dyn Completions>,
    buffers: Vec<Buffer>,
    most: usize,
    bytes: u64,
    /// Bytes of all buffers.
    made: Arc<AtomicU64>,
    /// Bytes of a step that fits, whatever alignment takes.
    pub(super) chunk: u64,
}

/// A buffer for one batch.
#[derive(Debug)]
pub(super) struct Taken {
    at: usize,
    pub(super) base: u64,
    pub(super) bytes: u64,
    /// Uses it still.
    pub(super) behind: Option<Ticket>,
}

impl Bounce {
    pub(super) fn new(
        device: Arc<dyn Device>,
        completions: Arc<dyn Completions>,
        config: &Config,
    ) -> Self {
        // Two directions, of each a buffer for batches that wait and one for the others.
        let chunk = config.offload_chunk_bytes.min(config.offload_bounce_bytes / 4);
        let most = (config.offload_bounce_bytes / 2 / chunk).max(2) as usize;
        // A batch of just the size of a chunk has to fit, whatever its alignment takes.
        let bytes = (chunk + chunk / 32 + (8 << 10)).next_multiple_of(256);
        let (buffers, made) = (Vec::new(), Arc::default());
        Self { device, completions, buffers, most, bytes, made, chunk }
    }

    /// Makes one that a batch may use which waits for its producer, or one which does not, if there is
    /// none.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn prepare(&mut self, gated: bool) -> Result<()> {
        self.forget_ended();
        if !self.buffers.iter().any(self.usable(gated)) {
            self.add()?;
        }
        Ok(())
    }

    fn forget_ended(&mut self) {
        let completions = &self.completions;
        for buffer in &mut self.buffers {
            buffer.last = buffer.last.filter(|&last| !completions.done(last));
            buffer.gated &= buffer.last.is_some();
        }
    }

    /// Whether one more may be used by batches that wait: half of them stay for the others.
    fn may_wait(&self) -> bool {
        let waiting = self.buffers.iter().filter(|buffer| buffer.gated).count();
        waiting < (self.most / 2).max(1)
    }

    fn usable(&self, gated: bool) -> impl Fn(&Buffer) -> bool + use<> {
        let may_wait = self.may_wait();
        move |buffer| if gated { buffer.gated || may_wait } else { !buffer.gated }
    }

    /// A buffer that nobody uses, or else one that is free first, as far as that can be told: a batch
    /// that waits for its producer holds up another of its kind, and no other.
    ///
    /// # Errors
    /// The device's, if there is none that such a batch may use, and no memory for one.
    pub(super) fn take(&mut self, gated: bool) -> Result<Taken> {
        self.forget_ended();
        let (may_wait, usable) = (self.may_wait(), self.usable(gated));
        let idle = self.buffers.iter().position(|buffer| buffer.last.is_none() && usable(buffer));
        let at = match idle {
            Some(at) => at,
            None if self.buffers.len() < self.most && (may_wait || !gated) => match self.add() {
                Ok(at) => at,
                Err(error) => self.busy(usable).ok_or(error)?,
            },
            None => self.busy(usable).expect("each kind has one, or may have one"),
        };
        // The next to be shared is another one.
        let buffer = self.buffers.remove(at);
        let base = buffer.memory.addr();
        let behind = buffer.last;
        self.buffers.push(buffer);
        let at = self.buffers.len() - 1;
        Ok(Taken { at, base, bytes: self.bytes, behind })
    }

    fn busy(&self, usable: impl Fn(&Buffer) -> bool) -> Option<usize> {
        self.buffers.iter().position(usable)
    }

    fn add(&mut self) -> Result<usize> {
        let memory = Arc::clone(&self.device).allocate(self.bytes)?;
        self.made.fetch_add(memory.len(), Ordering::Relaxed);
        self.buffers.push(Buffer { memory, last: None, gated: false });
        Ok(self.buffers.len() - 1)
    }

    /// The submission uses the buffer until it is done.
    pub(super) fn used(&mut self, taken: &Taken, ticket: Ticket, gated: bool) {
        let buffer = &mut self.buffers[taken.at];
        // A batch without a producer is never behind one with.
        buffer.gated |= gated;
        buffer.last = Some(ticket);
    }

    /// Bytes of all buffers that were made, now and later.
    pub(super) fn made(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.made)
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        for buffer in self.buffers.drain(..) {
            if buffer.last.is_some_and(|last| !self.completions.done(last)) {
                // The device is lost and may still use it.
                std::mem::forget(buffer.memory);
            }
        }
    }
}
