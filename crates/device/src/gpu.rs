//! A device over any [`Driver`], written once for all vendors; its queues are in `gpu_queue.rs`.

use std::sync::{Arc, Mutex, PoisonError};

use crate::device::{Allocation, Device, DeviceInfo, DeviceUuid, Export, Mapping, Memory, Release};
use crate::driver::{Driver, Pinned};
use crate::error::{Error, Result};
use crate::gpu_queue::GpuQueue;
use crate::pinned::PinnedMemory;
use crate::queue::{Queue, QueueOptions};

#[derive(Debug)]
pub(crate) struct GpuDevice<D: Driver> {
    pub(crate) driver: D,
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

    fn allocate_pinned(self: Arc<Self>, bytes: u64) -> Result<PinnedMemory> {
        if bytes == 0 || bytes > isize::MAX as u64 {
            return Err(self.bad_size(bytes));
        }
        let pinned = {
            let _scope = self.driver.enter()?;
            self.driver.allocate_pinned(bytes)?
        };
        Ok(PinnedMemory::new(pinned, self))
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

    fn free_pinned(&self, memory: Pinned) {
        let freed = self.driver.enter().and_then(|_scope| self.driver.free_pinned(memory));
        if let Err(error) = freed {
            tracing::warn!(%error, bytes = memory.len, "pinned memory was not freed");
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
