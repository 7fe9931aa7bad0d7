//! The store's memory: pieces of page-locked host memory, and a page of zeros on the device.

use std::sync::Arc;

use kvferry_device::{Vendor, bind_near};
use rustix::process::{Resource, getrlimit};

use super::{PageShape, StoreError, StoreOptions};
use crate::buffer::Buffer;
use crate::engine::Engine;

/// Most bytes of a piece: drivers fail for much more in one call (FAILURES.md B48).
pub(super) const MOST_PIECE: u64 = 64 << 30;

/// Freed when dropped; the caller says when that is.
#[derive(Debug)]
pub(super) struct StoreMemory {
    /// First bytes of the pieces.
    pub(super) addrs: Vec<u64>,
    /// Slots of each piece.
    pub(super) slots: Vec<u32>,
    /// From the number of a piece's first slot to that of the next piece.
    pub(super) piece_stride: u32,
    /// The pieces, and last a page of zeros on the device.
    buffers: Vec<Buffer>,
}

impl StoreMemory {
    /// Numbers of slots are multiples of `group` at the beginnings of pieces.
    pub(super) fn new(
        engine: &Arc<Engine>,
        device: usize,
        shape: &PageShape,
        options: &StoreOptions,
        group: u32,
    ) -> Result<Self, StoreError> {
        let bad = |option, value, accepts| StoreError::BadOption { option, value, accepts };
        let slot_bytes = shape.slot_bytes();
        let budget = options.budget_bytes;
        if !(slot_bytes..=MOST_PIECE).contains(&options.piece_bytes) {
            let accepts = format!("{slot_bytes}, which is a page, to {MOST_PIECE} bytes");
            return Err(bad("piece_bytes", options.piece_bytes, accepts));
        }
        let of_piece = options.piece_bytes / slot_bytes;
        let all = budget / slot_bytes;
        // Slots have 32-bit numbers.
        let most = u64::from(u32::MAX / 2);
        if all == 0 || all > most || of_piece > most {
            let accepts = format!("room for 1 to {most} pages of {slot_bytes} bytes");
            return Err(bad("budget_bytes", budget, accepts));
        }
        let Some(gpu) = engine.devices().get(device) else {
            let accepts = format!("one of the engine's {} devices", engine.devices().len());
            return Err(bad("device", device as u64, accepts));
        };
        let host = engine.devices().iter().find(|device| device.info().vendor == Vendor::Host);
        let host = host.ok_or(StoreError::NoHostMemory)?;
        let pieces = all.div_ceil(of_piece);
        let slots: Vec<_> =
            (0..pieces).map(|piece| of_piece.min(all - piece * of_piece) as u32).collect();
        let mut memory = Self {
            addrs: Vec::new(),
            piece_stride: (of_piece.min(all) as u32).next_multiple_of(group),
            slots,
            buffers: Vec::new(),
        };
        for (piece, &slots) in memory.slots.iter().enumerate() {
            let bytes = u64::from(slots) * slot_bytes;
            let pinned = engine.allocate(host, bytes).and_then(|buffer| {
                if let Err(reason) = bind_near(buffer.addr(), bytes, gpu.info()) {
                    warn_once(&reason);
                }
                engine.lock_host(buffer.addr(), gpu)?;
                Ok(buffer)
            });
            match pinned {
                Ok(buffer) => {
                    memory.addrs.push(buffer.addr());
                    memory.buffers.push(buffer);
                }
                Err(error) => {
                    // In reverse: what was locked last is unlocked first.
                    while memory.buffers.pop().is_some() {}
                    return Err(StoreError::NotPinned {
                        piece,
                        pieces: memory.slots.len(),
                        bytes,
                        budget,
                        device: gpu.info().to_string(),
                        limit: limit(),
                        error: Box::new(error),
                    });
                }
            }
        }
        let zeros = engine.allocate(gpu, shape.bytes())?;
        zeros.write(0, &vec![0; shape.bytes() as usize])?;
        memory.buffers.push(zeros);
        Ok(memory)
    }

    /// The piece of a slot, and the slot's number in it.
    pub(super) fn place(&self, slot: u32) -> (u32, u32) {
        (slot / self.piece_stride, slot % self.piece_stride)
    }

    pub(super) fn pieces(&self) -> &[Buffer] {
        &self.buffers[..self.addrs.len().min(self.buffers.len())]
    }

    /// First byte of the page of zeros.
    pub(super) fn zeros(&self) -> u64 {
        self.buffers.last().map_or(0, Buffer::addr)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.buffers.iter().map(Buffer::len).sum()
    }

    /// Leaves the memory allocated, registered and locked for the life of the process.
    pub(super) fn leak(&mut self) {
        self.buffers.drain(..).for_each(std::mem::forget);
    }
}

/// How much memory this process may lock, for a person.
fn limit() -> String {
    match getrlimit(Resource::Memlock).current {
        None => "nothing".into(),
        Some(bytes) => format!("{bytes} bytes"),
    }
}

fn warn_once(reason: &str) {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        tracing::warn!(reason, "host memory for pages is not bound to the GPU's NUMA node: copies may be slower, and vary");
    });
}
