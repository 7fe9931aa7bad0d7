//! Slots of the descriptor ring: taken, in use by launches, and free again.

use super::{GpuQueue, Open, SlotInUse};
use crate::driver::Driver;
use crate::error::Result;
use crate::queue::CopyDescriptor;

impl<D: Driver> GpuQueue<D> {
    pub(super) fn slot(&mut self, slot: usize) -> &mut [CopyDescriptor] {
        let descriptors = self.options.slot_descriptors;
        // SAFETY: the slot lies inside the ring, which was zeroed, is aligned to a page, and
        // belongs to this queue; a slot in use by the device is never in `free_slots` or open, and
        // only those two reach here.
        unsafe {
            let first = self.ring.host.cast::<CopyDescriptor>().add(slot * descriptors);
            std::slice::from_raw_parts_mut(first, descriptors)
        }
    }

    /// Where the device reads a slot.
    pub(super) fn slot_address(&self, slot: usize) -> u64 {
        let offset = slot * self.options.slot_descriptors * size_of::<CopyDescriptor>();
        self.ring.device + offset as u64
    }

    pub(super) fn take_slot(&mut self, open: &mut Open<D>) -> Result<usize> {
        self.hand_over_slot(open)?;
        if open.gate.is_some() {
            // The other half stays for submissions that wait for nobody.
            let most = (self.options.ring_slots / 2).max(1);
            self.wait_until(open, |queue, _| {
                queue.gated_slots < most && !queue.free_slots.is_empty()
            })?;
            self.gated_slots += 1;
        } else {
            self.wait_until(open, |queue, _| !queue.free_slots.is_empty())?;
        }
        let slot = self.free_slots.pop().expect("the wait ends only with a free slot");
        open.slot = Some(slot);
        Ok(slot)
    }

    pub(super) fn return_slot(&mut self, open: &mut Open<D>) {
        if let Some(slot) = open.slot.take() {
            self.free_slots.push(slot);
            self.gated_slots -= usize::from(open.gate.is_some());
        }
    }

    /// Puts an event behind the launch that reads the open slot, if one does: the submission goes on,
    /// and the slot may be needed before its end.
    pub(super) fn hand_over_slot(&mut self, open: &mut Open<D>) -> Result<()> {
        let Some(stream) = open.reader else { return Ok(()) };
        let event = self.record(stream)?;
        open.reader = None;
        if let Some(slot) = open.slot.take() {
            self.put_in_use(open, SlotInUse { slot, event: Some(event), other: None });
        }
        Ok(())
    }

    pub(super) fn put_in_use(&mut self, open: &mut Open<D>, slot: SlotInUse<D>) {
        match &mut open.gate {
            Some(gate) => gate.slots.push(slot),
            None => {
                open.slots += 1;
                self.slots_in_use.push_back(slot);
            }
        }
    }

    pub(super) fn free_oldest_slot(&mut self) {
        if let Some(oldest) = self.slots_in_use.pop_front() {
            self.free_slot(oldest);
        }
    }

    pub(super) fn free_slot(&mut self, SlotInUse { slot, event, other }: SlotInUse<D>) {
        self.free_slots.push(slot);
        self.idle_events.extend(event);
        self.idle_events.extend(other);
    }

    /// Whether the launches that read a slot are known to be over. Inside the scope.
    pub(super) fn is_read(&self, slot: &SlotInUse<D>) -> Result<bool> {
        let Some(event) = slot.event else { return Ok(false) };
        let driver = &self.device.driver;
        Ok(driver.fired(event)? && slot.other.map_or(Ok(true), |event| driver.fired(event))?)
    }

    /// Frees slots whose launches are over though their submissions are not. Inside the scope.
    pub(super) fn reap_slots(&mut self, open: &mut Open<D>) -> Result<()> {
        self.reap();
        while let Some(oldest) = self.slots_in_use.front() {
            if !self.is_read(oldest)? {
                break;
            }
            self.free_oldest_slot();
            self.moved_on = true;
            match self.in_flight.iter_mut().find(|submission| submission.slots > 0) {
                Some(owner) => owner.slots -= 1,
                None => open.slots -= 1,
            }
        }
        if let Some(gate) = &mut open.gate {
            while let Some(oldest) = gate.slots.first() {
                if !self.is_read(oldest)? {
                    break;
                }
                let read = gate.slots.remove(0);
                self.free_slot(read);
                self.gated_slots -= 1;
                self.moved_on = true;
            }
        }
        Ok(())
    }
}
