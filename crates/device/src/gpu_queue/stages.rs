//! Staged work: steps that take turns on two streams and share buffers in device memory.

use super::{GpuQueue, Open, SlotInUse};
use crate::driver::Driver;
use crate::error::{Error, Result};
use crate::kernel::{Entry, INLINE_DESCRIPTORS};
use crate::queue::{CopyDescriptor, Fence, Stage, Staged, Ticket};

impl<D: Driver> GpuQueue<D> {
    /// # Safety
    /// As [`Queue::submit`](crate::Queue::submit); the driver's scope is entered.
    pub(super) unsafe fn enqueue_stages(
        &mut self,
        open: &mut Open<D>,
        staged: &mut Staged<'_>,
    ) -> Result<()> {
        let all = self.options.slot_descriptors;
        // A short rest of a slot would make a short step.
        let least = (all / 4).max(1);
        let mut turn = 0;
        let mut used = all;
        let mut may_leave = Some(&mut staged.may_leave);
        while staged.stages.has_next() {
            if all - used < least {
                self.hand_over_shared_slot(open)?;
                self.take_slot(open)?;
                used = 0;
            }
            let slot = open.slot.expect("one was just taken, or is not used up");
            self.begin_stage(open, turn, staged.behind)?;
            // SAFETY: the caller's contract.
            unsafe { self.copy_compact(open, staged.stages.ahead()) }?;
            let place = &mut self.slot(slot)[used..];
            let Stage { pieces, dma, dma_first } = staged.stages.next(place);
            if dma_first {
                // SAFETY: the caller's contract.
                unsafe { self.copy_compact(open, dma) }?;
            } else {
                // SAFETY: the caller's contract.
                used += unsafe { self.run_pieces(open, slot, used, pieces) }?;
            }
            if may_leave.take().is_some_and(|may_leave| !may_leave()) {
                break;
            }
            if dma_first {
                // SAFETY: the caller's contract.
                used += unsafe { self.run_pieces(open, slot, used, pieces) }?;
            } else {
                // SAFETY: the caller's contract.
                unsafe { self.copy_compact(open, dma) }?;
            }
            turn ^= 1;
        }
        open.turn = None;
        match used {
            0 => self.return_slot(open),
            _ => self.hand_over_shared_slot(open)?,
        }
        Ok(())
    }

    /// Starts pieces that lie in a slot; returns how many of them have to stay there.
    ///
    /// # Safety
    /// As [`Self::enqueue_stages`].
    unsafe fn run_pieces(
        &mut self,
        open: &mut Open<D>,
        slot: usize,
        first: usize,
        count: usize,
    ) -> Result<usize> {
        if count == 0 {
            return Ok(0);
        }
        let in_slot = first..first + count;
        if !self.kernel() {
            for at in in_slot {
                let copy = self.slot(slot)[at];
                // SAFETY: the caller's contract.
                unsafe { self.copy(open, &[copy]) }?;
            }
            return Ok(0);
        }
        let stream = self.use_stream(open)?;
        if count <= INLINE_DESCRIPTORS {
            let blocks = self.blocks(open, Entry::Inline, count as u32);
            let mut few = [CopyDescriptor::default(); INLINE_DESCRIPTORS];
            few[..count].copy_from_slice(&self.slot(slot)[in_slot]);
            // SAFETY: the caller's contract.
            unsafe { self.device.driver.launch_inline(stream, &few[..count], blocks, None) }?;
            return Ok(0);
        }
        let blocks = self.blocks(open, Entry::Ring, count as u32);
        let descriptors = self.slot_address(slot) + (first * size_of::<CopyDescriptor>()) as u64;
        // SAFETY: the caller's contract; the descriptors stay as they are until the events of the
        // slot fire or the submission is done, because only then it becomes free.
        unsafe { self.device.driver.launch(stream, descriptors, count as u32, blocks) }?;
        Ok(count)
    }

    /// Chooses the stream of a step; the first two wait for what is before all of them.
    fn begin_stage(&mut self, open: &mut Open<D>, turn: usize, behind: &[Ticket]) -> Result<()> {
        open.turn = Some(turn);
        let driver = &self.device.driver;
        if let Some(gate) = &mut open.gate {
            // The gate's own stream waited when it was made.
            if turn == 1 && gate.second.is_none() {
                let stream = match self.idle_gate_streams.pop() {
                    Some(stream) => stream,
                    None => driver.create_stream(self.options.high_priority)?,
                };
                gate.second = Some(stream);
                driver.wait(stream, gate.event)?;
            }
            return Ok(());
        }
        if open.turns[turn].is_none() {
            self.next_stream = (self.next_stream + 1) % self.streams.len();
            open.turns[turn] = Some(self.next_stream);
            let stream = self.shared_stream(self.next_stream)?;
            self.wait_behind(stream, behind)?;
        }
        Ok(())
    }

    /// Makes a stream wait for submissions.
    pub(super) fn wait_behind(&mut self, stream: D::Stream, behind: &[Ticket]) -> Result<()> {
        for &ticket in behind {
            if let Some(end) = self.end_of(ticket)? {
                self.device.driver.wait(stream, end)?;
            }
        }
        Ok(())
    }

    /// The end event of a submission of any queue of the device.
    pub(super) fn event_of(&self, fence: &Fence) -> Result<D::Event> {
        let info = self.device.driver.info();
        let event = fence.event.downcast_ref().filter(|_| fence.device == info.uuid);
        event.copied().ok_or_else(|| Error::NotOrderable {
            device: info.to_string(),
            what: "submission",
            reason: format!("device {} runs it; wait for it", fence.device),
        })
    }

    /// Puts events behind all launches that may read the open slot, on both streams.
    fn hand_over_shared_slot(&mut self, open: &mut Open<D>) -> Result<()> {
        let Some(slot) = open.slot else { return Ok(()) };
        let streams = match &open.gate {
            Some(gate) => [Some(gate.stream), gate.second],
            None => open.turns.map(|turn| turn.map(|at| self.streams[at].handle)),
        };
        let [Some(one), other] = streams else { return Ok(()) };
        let event = self.record(one)?;
        let other = match other {
            None => None,
            Some(stream) => match self.record(stream) {
                Ok(event) => Some(event),
                Err(error) => {
                    self.idle_events.push(event);
                    return Err(error);
                }
            },
        };
        open.slot = None;
        let in_use = SlotInUse { slot, event: Some(event), other };
        self.put_in_use(open, in_use);
        Ok(())
    }
}
