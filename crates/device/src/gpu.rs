//! A device and its queues over any [`Driver`]: descriptor ring, event pool, launches and
//! completion, written once for all vendors.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::device::{
    Allocation, Capabilities, Device, DeviceInfo, DeviceUuid, Export, Mapping, Memory, Release,
};
use crate::driver::{Driver, Pinned};
use crate::error::{Error, Left, Result, SubmitError};
use crate::queue::{CopyDescriptor, CopySource, Queue, QueueOptions, Seq};

/// Submissions in flight are bounded by what their events cost; beyond it, submit waits.
const MAX_IN_FLIGHT: usize = 4096;

/// How long a full ring is polled without giving the processor away.
const SPIN: Duration = Duration::from_micros(50);

#[derive(Debug)]
pub(crate) struct GpuDevice<D: Driver> {
    driver: D,
    /// For [`Device::read`] and [`Device::write`]; one at a time.
    setup: Mutex<D::Stream>,
}

impl<D: Driver> GpuDevice<D> {
    pub(crate) fn new(driver: D) -> Result<Arc<Self>> {
        let setup = {
            let _scope = driver.enter()?;
            driver.create_stream(false)?
        };
        Ok(Arc::new(Self { driver, setup: Mutex::new(setup) }))
    }

    fn bad_size(&self, bytes: u64) -> Error {
        Error::BadSize { device: self.driver.info().to_string(), bytes }
    }

    /// Whether the unit is still what it was when it was found.
    fn export_is_whole(&self, unit: &Allocation) -> Result<()> {
        if self.driver.export_unit(unit.base, unit.len)? == *unit {
            return Ok(());
        }
        Err(Error::NotExportable {
            device: self.driver.info().to_string(),
            base: unit.base,
            reason: "it was freed, and other memory is at its address now: register that instead"
                .into(),
        })
    }
}

impl<D: Driver> Device for GpuDevice<D> {
    fn info(&self) -> &DeviceInfo {
        self.driver.info()
    }

    fn allocate(self: Arc<Self>, bytes: u64) -> Result<Memory> {
        if bytes == 0 || bytes > isize::MAX as u64 {
            return Err(self.bad_size(bytes));
        }
        let addr = {
            let _scope = self.driver.enter()?;
            self.driver.allocate(bytes)?
        };
        Ok(Memory::new(addr, bytes, self))
    }

    fn allocation(&self, addr: u64) -> Result<Allocation> {
        let _scope = self.driver.enter()?;
        self.driver.allocation(addr)
    }

    fn export_unit(&self, addr: u64, len: u64) -> Result<Allocation> {
        let _scope = self.driver.enter()?;
        self.driver.export_unit(addr, len)
    }

    fn prepare_export(&self, unit: &Allocation) -> Result<Option<Export>> {
        let _scope = self.driver.enter()?;
        self.export_is_whole(unit)?;
        self.driver.prepare_export(unit)
    }

    fn export(&self, unit: &Allocation) -> Result<Export> {
        let _scope = self.driver.enter()?;
        self.export_is_whole(unit)?;
        self.driver.export(unit)
    }

    fn open(self: Arc<Self>, export: Export) -> Result<Mapping> {
        let len = export.len();
        if len == 0 || len > isize::MAX as u64 {
            return Err(self.bad_size(len));
        }
        let addr = {
            let _scope = self.driver.enter()?;
            self.driver.open(export)?
        };
        Ok(Mapping::new(addr, len, self))
    }

    fn map_host(self: Arc<Self>, addr: u64, len: u64) -> Result<Mapping> {
        if len == 0 || addr.checked_add(len).is_none_or(|end| end > isize::MAX as u64) {
            return Err(self.bad_size(len));
        }
        let mapped = {
            let _scope = self.driver.enter()?;
            self.driver.map_host(addr, len)?
        };
        Ok(Mapping::of_host(mapped, addr, len, self))
    }

    fn reaches(&self, other: &DeviceUuid) -> bool {
        *other == self.driver.info().uuid || self.driver.reaches(other)
    }

    fn queue(self: Arc<Self>, options: &QueueOptions) -> Result<Box<dyn Queue>> {
        Ok(Box::new(GpuQueue::new(self, options.clone())?))
    }

    unsafe fn write(&self, addr: u64, bytes: &[u8]) -> Result<()> {
        let stream = self.setup.lock().unwrap_or_else(PoisonError::into_inner);
        let _scope = self.driver.enter()?;
        // SAFETY: the caller's contract is the driver's.
        unsafe { self.driver.write(*stream, addr, bytes) }
    }

    unsafe fn read(&self, addr: u64, bytes: &mut [u8]) -> Result<()> {
        let stream = self.setup.lock().unwrap_or_else(PoisonError::into_inner);
        let _scope = self.driver.enter()?;
        // SAFETY: the caller's contract is the driver's.
        unsafe { self.driver.read(*stream, addr, bytes) }
    }
}

impl<D: Driver> Release for GpuDevice<D> {
    fn free(&self, addr: u64) {
        let freed = self.driver.enter().and_then(|_scope| self.driver.free(addr));
        if let Err(error) = freed {
            tracing::warn!(%error, addr, "device memory was not freed");
        }
    }

    fn close(&self, mapped: u64, len: u64) {
        let closed = self.driver.enter().and_then(|_scope| self.driver.close(mapped, len));
        if let Err(error) = closed {
            tracing::warn!(%error, mapped, "a mapping of another process was not closed");
        }
    }

    fn unmap_host(&self, host: u64, len: u64) {
        let unmapped = self.driver.enter().and_then(|_scope| self.driver.unmap_host(host, len));
        if let Err(error) = unmapped {
            tracing::warn!(%error, host, len, "host memory stays page-locked");
        }
    }
}

impl<D: Driver> Drop for GpuDevice<D> {
    fn drop(&mut self) {
        let setup = *self.setup.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Ok(_scope) = self.driver.enter() {
            let _ = self.driver.destroy_stream(setup);
        }
    }
}

/// Work that ends with one event.
#[derive(Debug)]
struct InFlight<E> {
    seq: Seq,
    event: E,
    /// The ring slot that this work reads.
    slot: Option<usize>,
}

#[derive(Debug)]
struct GpuQueue<D: Driver> {
    device: Arc<GpuDevice<D>>,
    options: QueueOptions,
    streams: Vec<D::Stream>,
    next_stream: usize,
    ring: Pinned,
    free_slots: Vec<usize>,
    /// The slot being filled or launched; after a failed launch its fence takes it over.
    open_slot: Option<usize>,
    idle_events: Vec<D::Event>,
    /// In submission order; reaped from the front.
    in_flight: VecDeque<InFlight<D::Event>>,
    submitted: Seq,
    lost: Option<Error>,
    /// Since when the front of `in_flight` has been waited for.
    waiting_since: Option<Instant>,
}

impl<D: Driver> GpuQueue<D> {
    fn new(device: Arc<GpuDevice<D>>, mut options: QueueOptions) -> Result<Self> {
        options.streams = options.streams.clamp(1, u64::BITS as usize);
        options.ring_slots = options.ring_slots.max(1);
        options.slot_descriptors = options.slot_descriptors.clamp(1, u32::MAX as usize);
        options.max_grid_blocks = options.max_grid_blocks.max(1);
        let driver = &device.driver;
        let scope = driver.enter()?;
        let bytes = options.ring_slots * options.slot_descriptors * size_of::<CopyDescriptor>();
        let ring = driver.allocate_pinned(bytes as u64)?;
        // SAFETY: the ring is `bytes` long, ours alone, and nothing reads it yet. Zeroing makes
        // every slot a valid `[CopyDescriptor]`.
        unsafe { ring.host.write_bytes(0, bytes) };
        // From here on `Drop` cleans up what a failure leaves.
        let mut queue = Self {
            free_slots: (0..options.ring_slots).rev().collect(),
            streams: Vec::with_capacity(options.streams),
            idle_events: Vec::with_capacity(options.ring_slots + options.streams),
            in_flight: VecDeque::with_capacity(options.ring_slots + options.streams),
            next_stream: 0,
            open_slot: None,
            submitted: Seq(0),
            lost: None,
            waiting_since: None,
            device: Arc::clone(&device),
            options,
            ring,
        };
        for _ in 0..queue.options.streams {
            let stream = driver.create_stream(queue.options.high_priority)?;
            queue.streams.push(stream);
        }
        // One event a slot and one a stream, so that no warm transfer creates one.
        for _ in 0..queue.options.ring_slots + queue.options.streams {
            let event = driver.create_event()?;
            queue.idle_events.push(event);
        }
        drop(scope);
        Ok(queue)
    }

    fn next_stream(&mut self) -> usize {
        self.next_stream = (self.next_stream + 1) % self.streams.len();
        self.next_stream
    }

    /// # Safety
    /// As [`Queue::submit`]; the driver's scope is entered.
    unsafe fn enqueue(
        &mut self,
        seq: Seq,
        pieces: &mut dyn CopySource,
        large: &[CopyDescriptor],
        started: &mut bool,
    ) -> Result<()> {
        let device = Arc::clone(&self.device);
        let driver = &device.driver;
        let kernel = driver.info().capabilities.contains(Capabilities::KERNEL);
        // Streams that got copies since their last event, as a bit set.
        let mut copied = 0u64;
        // The first launch is short, so that the device works while the rest is packed.
        let mut room = self.options.first_descriptors.clamp(1, self.options.slot_descriptors);
        let mut more = true;
        while more {
            let slot = self.take_slot()?;
            let (count, descriptors) = self.fill_slot(slot, room, pieces);
            // Filling stops only at the end of the room or of the source.
            more = count == room;
            room = self.options.slot_descriptors;
            if count == 0 {
                self.return_slot();
                break;
            }
            let index = self.next_stream();
            let stream = self.streams[index];
            *started = true;
            if kernel {
                let blocks = crate::kernel::grid(
                    count as u32,
                    driver.warp_lanes(),
                    self.options.max_grid_blocks,
                );
                // SAFETY: the caller's contract; the slot stays as it is until its event fires,
                // because `reap` alone frees slots.
                unsafe { driver.launch(stream, descriptors, count as u32, blocks) }?;
                self.record(seq, index, Some(slot))?;
                self.open_slot = None;
                continue;
            }
            for at in 0..count {
                let CopyDescriptor { src, dst, len } = self.slot(slot)[at];
                let index = self.next_stream();
                copied |= 1 << index;
                // SAFETY: the caller's contract.
                unsafe { driver.copy(self.streams[index], dst, src, len) }?;
            }
            self.return_slot();
        }
        for &CopyDescriptor { src, dst, len } in large {
            let index = self.next_stream();
            copied |= 1 << index;
            *started = true;
            // SAFETY: the caller's contract.
            unsafe { driver.copy(self.streams[index], dst, src, len) }?;
        }
        for index in (0..self.streams.len()).filter(|index| copied >> index & 1 == 1) {
            self.record(seq, index, None)?;
        }
        Ok(())
    }

    fn slot(&mut self, slot: usize) -> &mut [CopyDescriptor] {
        let descriptors = self.options.slot_descriptors;
        // SAFETY: the slot lies inside the ring, which was zeroed, is aligned to a page, and
        // belongs to this queue; a slot in use by the device is never in `free_slots` or open, and
        // only those two reach here.
        unsafe {
            let first = self.ring.host.cast::<CopyDescriptor>().add(slot * descriptors);
            std::slice::from_raw_parts_mut(first, descriptors)
        }
    }

    /// Fills up to `room` of the slot; returns how many descriptors it holds and where the device
    /// reads them.
    fn fill_slot(&mut self, slot: usize, room: usize, pieces: &mut dyn CopySource) -> (usize, u64) {
        let mut count = 0;
        while count < room {
            let more = pieces.fill(&mut self.slot(slot)[count..room]);
            if more == 0 {
                break;
            }
            count += more;
        }
        let offset = slot * self.options.slot_descriptors * size_of::<CopyDescriptor>();
        (count, self.ring.device + offset as u64)
    }

    fn take_slot(&mut self) -> Result<usize> {
        let slot = match self.free_slots.pop() {
            Some(slot) => slot,
            None => {
                self.wait_until(|queue| !queue.free_slots.is_empty())?;
                self.free_slots.pop().expect("the wait ends only with a free slot")
            }
        };
        self.open_slot = Some(slot);
        Ok(slot)
    }

    fn return_slot(&mut self) {
        self.free_slots.extend(self.open_slot.take());
    }

    /// Records the end of what `stream` holds now as a part of submission `seq`.
    fn record(&mut self, seq: Seq, stream: usize, slot: Option<usize>) -> Result<()> {
        let event = match self.idle_events.pop() {
            Some(event) => event,
            None => self.device.driver.create_event()?,
        };
        if let Err(error) = self.device.driver.record(event, self.streams[stream]) {
            self.idle_events.push(event);
            return Err(error);
        }
        self.in_flight.push_back(InFlight { seq, event, slot });
        Ok(())
    }

    /// Puts an event behind everything that a failed submission may have started.
    fn fence(&mut self, seq: Seq) -> Result<()> {
        for index in 0..self.streams.len() {
            self.record(seq, index, None)?;
        }
        // The slot of a failed launch is free once every stream has passed its fence.
        let slot = self.open_slot.take();
        if let Some(last) = self.in_flight.back_mut() {
            last.slot = slot;
        }
        Ok(())
    }

    /// Frees the slots and events of finished work. Call inside the driver's scope.
    fn reap(&mut self) -> Result<()> {
        while let Some(front) = self.in_flight.front() {
            if !self.device.driver.fired(front.event)? {
                return self.check_stall();
            }
            let done = self.in_flight.pop_front().expect("the front was just looked at");
            self.idle_events.push(done.event);
            self.free_slots.extend(done.slot);
            self.waiting_since = None;
        }
        Ok(())
    }

    fn check_stall(&mut self) -> Result<()> {
        let now = Instant::now();
        let since = *self.waiting_since.get_or_insert(now);
        let waited = now.duration_since(since);
        if waited < self.options.stall_timeout {
            return Ok(());
        }
        Err(Error::Stalled { device: self.device.driver.info().to_string(), waited })
    }

    /// Polls until `ready`. Vendors offer no wait with a deadline, so this gives up the processor
    /// between polls once the wait is longer than a launch takes.
    fn wait_until(&mut self, ready: impl Fn(&Self) -> bool) -> Result<()> {
        let start = Instant::now();
        loop {
            self.reap()?;
            if ready(self) {
                return Ok(());
            }
            if start.elapsed() < SPIN {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
    }

    fn lose(&mut self, error: &Error) {
        if self.lost.is_none() {
            tracing::error!(%error, in_flight = self.in_flight.len(), "device lost; its unfinished work will never count as complete");
            self.lost = Some(error.clone());
        }
    }
}

impl<D: Driver> Queue for GpuQueue<D> {
    unsafe fn submit(
        &mut self,
        pieces: &mut dyn CopySource,
        large: &[CopyDescriptor],
    ) -> Result<Seq, SubmitError> {
        let nothing = |error| SubmitError { error, left: Left::Nothing };
        if let Some(error) = &self.lost {
            return Err(nothing(error.clone()));
        }
        let device = Arc::clone(&self.device);
        let _scope = device.driver.enter().map_err(nothing)?;
        if self.in_flight.len() >= MAX_IN_FLIGHT {
            self.wait_until(|queue| queue.in_flight.len() < MAX_IN_FLIGHT).map_err(|error| {
                self.lose(&error);
                nothing(error)
            })?;
        }
        let seq = Seq(self.submitted.0 + 1);
        let mut started = false;
        // SAFETY: the caller's contract; the scope is entered.
        let Err(error) = (unsafe { self.enqueue(seq, pieces, large, &mut started) }) else {
            self.submitted = seq;
            return Ok(seq);
        };
        if !started {
            self.return_slot();
            if matches!(error, Error::Lost { .. } | Error::Stalled { .. }) {
                self.lose(&error);
            }
            return Err(nothing(error));
        }
        self.submitted = seq;
        let left = match self.fence(seq) {
            Ok(()) => Left::Until(seq),
            Err(fence) => {
                self.lose(&fence);
                Left::Unknown
            }
        };
        Err(SubmitError { error, left })
    }

    fn completed(&mut self) -> Result<Seq> {
        if let Some(error) = &self.lost {
            return Err(error.clone());
        }
        if self.in_flight.is_empty() {
            return Ok(self.submitted);
        }
        let device = Arc::clone(&self.device);
        let reaped = device.driver.enter().and_then(|_scope| self.reap());
        if let Err(error) = reaped {
            self.lose(&error);
            return Err(error);
        }
        Ok(self.in_flight.front().map_or(self.submitted, |front| Seq(front.seq.0 - 1)))
    }

    fn submitted(&self) -> Seq {
        self.submitted
    }

    fn pinned_bytes(&self) -> u64 {
        self.ring.len
    }
}

impl<D: Driver> Drop for GpuQueue<D> {
    fn drop(&mut self) {
        let device = Arc::clone(&self.device);
        let driver = &device.driver;
        let Ok(_scope) = driver.enter() else { return };
        let quiet =
            self.lost.is_none() && self.wait_until(|queue| queue.in_flight.is_empty()).is_ok();
        if !quiet {
            // The device may still read the ring: leaking it is the only safe end.
            tracing::error!(device = %driver.info(), bytes = self.ring.len, "a queue was dropped with work that did not end; its ring is leaked");
            return;
        }
        for event in self.idle_events.drain(..) {
            let _ = driver.destroy_event(event);
        }
        for stream in self.streams.drain(..) {
            let _ = driver.destroy_stream(stream);
        }
        let _ = driver.free_pinned(self.ring);
    }
}
