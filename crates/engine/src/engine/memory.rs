//! Memory that transfers may use: registered, exported, page-locked, and unregistered again.

use std::sync::Arc;

use kvferry_device::{Device, Export};

use super::Engine;
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::pinned::PinnedAccount;
use crate::segment::{AllocationKey, Segment};
use crate::wait::Wait;

impl Engine {
    /// Makes `[addr, addr + len)` a region that transfers may use and peers may read and write.
    ///
    /// The device is the one whose memory it is. Regions may not overlap; several may lie in one
    /// allocation, and a range may cross two that touch there.
    ///
    /// Host memory of any origin is served if host memory is a device of the engine. What did not
    /// come from [`Engine::allocate`] no other process can map, so peers of this host reach it by
    /// TCP, as those of other hosts do: that is its only path, and no fallback. Each region of it
    /// is an allocation of its own.
    ///
    /// # Errors
    /// Among others [`Error::NotDeviceMemory`], [`Error::AlreadyRegistered`],
    /// [`Error::LeavesAllocation`], `NotExportable` for GPU memory that no peer could open, and
    /// `NotAccessible` for host memory that is not all there, or may not be read and written.
    ///
    /// # Safety
    /// The memory stays allocated until [`Engine::unregister`] returns `Ok` or the engine was dropped,
    /// and peers have stopped using it by then: kvferry cannot see copies that a peer's GPU makes.
    pub unsafe fn register(&self, addr: u64, len: u64) -> Result<()> {
        self.check_process()?;
        self.registry.register(&self.devices, addr, len)?;
        tracing::debug!(addr, len, "registered");
        Ok(())
    }

    /// Registers all regions of the list, or none.
    ///
    /// # Errors
    /// [`Error::RegionOfList`] names the one that failed, and those before it that stay registered
    /// because batches use them already.
    ///
    /// # Safety
    /// As [`Engine::register`], for each.
    pub unsafe fn register_all(&self, regions: &[(u64, u64)]) -> Result<()> {
        for (index, &(addr, len)) in regions.iter().enumerate() {
            // SAFETY: the caller's contract.
            if let Err(error) = unsafe { self.register(addr, len) } {
                let before = regions[..index].iter().rev().map(|&(addr, _)| addr);
                let stays =
                    |&addr: &_| matches!(self.unregister(addr), Err(Error::RegionBusy { .. }));
                let stay = before.filter(stays).collect();
                return Err(Error::RegionOfList { index, error: Box::new(error), stay });
            }
        }
        Ok(())
    }

    /// Ends the region that begins at `addr`. Waits for batches of this engine that use it, at
    /// most `MC_KVFERRY_UNREGISTER_TIMEOUT_SEC`.
    ///
    /// # Errors
    /// [`Error::UnknownRegion`]; [`Error::RegionBusy`], and then the region stays registered, or another
    /// thread is ending it.
    pub fn unregister(&self, addr: u64) -> Result<()> {
        self.check_process()?;
        let region = self.registry.withdraw(addr)?;
        let mut wait = Wait::begin();
        while region.users() > 0 {
            self.progress();
            let waited = wait.waited();
            if region.users() > 0 && waited >= self.config.unregister_timeout {
                let busy = region.busy(waited);
                self.registry.restore(region);
                return Err(busy);
            }
            wait.rest();
        }
        self.registry.forget(&region);
        tracing::debug!(addr, len = region.len, "unregistered");
        Ok(())
    }

    /// Ends all regions, and waits until the last is unused, those that other threads are ending among
    /// them: at most `MC_KVFERRY_UNREGISTER_TIMEOUT_SEC` together, not each.
    ///
    /// # Errors
    /// [`Error::RegionBusy`] for one of those that are still in use. They are no regions any more
    /// nevertheless, but their memory is to be kept, until another such call is `Ok`.
    pub fn unregister_all(&self) -> Result<()> {
        self.check_process()?;
        let (mut wait, mut regions) = (Wait::begin(), Vec::new());
        loop {
            // One that another thread gives up comes back.
            regions.extend(self.registry.withdraw_all());
            self.progress();
            self.forget_unused(&mut regions);
            let Some(region) = self.registry.withdrawn() else { return Ok(()) };
            let waited = wait.waited();
            if waited >= self.config.unregister_timeout {
                self.registry.give_up(regions);
                return Err(region.busy(waited));
            }
            wait.rest();
        }
    }

    /// Allocates memory on a device and registers it.
    ///
    /// # Errors
    /// The device's, or [`Error::Device`] if the memory cannot be exported.
    pub fn allocate(self: &Arc<Self>, device: &Arc<dyn Device>, bytes: u64) -> Result<Buffer> {
        self.check_process()?;
        let memory = Arc::clone(device).allocate(bytes)?;
        // SAFETY: the buffer owns the memory and unregisters it before freeing it.
        unsafe { self.register(memory.addr(), memory.len()) }?;
        Ok(Buffer::new(Arc::clone(self), Arc::clone(device), memory))
    }

    /// Page-locks registered host memory for a device of this engine, the whole allocation that
    /// `addr` lies in, until its last region is unregistered. The first transfer would do it, and
    /// take as long.
    ///
    /// # Errors
    /// [`Error::UnknownRegion`], [`Error::PinnedBudget`], and the device's.
    pub fn lock_host(&self, addr: u64, device: &Arc<dyn Device>) -> Result<()> {
        self.check_process()?;
        let region = self.registry.pin_at(addr).ok_or(Error::UnknownRegion { addr })?;
        if region.region().allocation.device != device.info().uuid {
            self.registry.lock_host(region.region().allocation, device)?;
        }
        Ok(())
    }

    /// The account of page-locked host memory, for whoever locks more of it.
    pub fn pinned_account(&self) -> &Arc<PinnedAccount> {
        self.registry.pinned()
    }

    /// What peers need to know of the registered memory, now. A fork of the process that made the
    /// engine has none to give: there it is empty.
    pub fn segment(&self) -> Segment {
        if self.check_process().is_err() {
            return self.empty_segment();
        }
        self.registry.segment(self.incarnation, &self.devices)
    }

    /// The export of an allocation of [`Engine::segment`], for one peer.
    ///
    /// # Errors
    /// [`Error::UnknownAllocation`] if no registered region lies in it.
    pub fn export(&self, allocation: AllocationKey) -> Result<Export> {
        self.check_process()?;
        self.registry.export(&self.devices, allocation)
    }
}
