use std::sync::Arc;

use kvferry_device::{Device, Memory};

use crate::engine::Engine;
use crate::error::{Error, Result};

/// Device memory that is registered with an engine for as long as it lives.
#[derive(Debug)]
pub struct Buffer {
    engine: Arc<Engine>,
    device: Arc<dyn Device>,
    /// None once it is freed.
    memory: Option<Memory>,
    addr: u64,
    len: u64,
}

impl Buffer {
    pub(crate) fn new(engine: Arc<Engine>, device: Arc<dyn Device>, memory: Memory) -> Self {
        let (addr, len) = (memory.addr(), memory.len());
        Self { engine, device, memory: Some(memory), addr, len }
    }

    /// First byte.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Never true: empty memory is not allocated.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies `bytes` into the buffer at `offset`. A transfer of the same bytes meanwhile has no
    /// order with it.
    ///
    /// # Errors
    /// [`Error::BadRegion`] if it leaves the buffer, [`Error::OtherProcess`].
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let addr = self.inside(offset, bytes.len())?;
        // SAFETY: `[addr, addr + bytes.len())` lies in memory that this buffer owns. Peers may
        // write it, too; then its contents are unspecified, as documented, and nothing else.
        Ok(unsafe { self.device.write(addr, bytes) }?)
    }

    /// Copies out of the buffer from `offset` until `bytes` is full. A transfer of the same bytes
    /// meanwhile has no order with it.
    ///
    /// # Errors
    /// As [`Buffer::write`].
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let addr = self.inside(offset, bytes.len())?;
        // SAFETY: as in `write`.
        Ok(unsafe { self.device.read(addr, bytes) }?)
    }

    /// Frees the memory. Waits for batches that use it, at most `MC_KVFERRY_UNREGISTER_TIMEOUT_SEC`.
    /// Dropping a buffer does the same, and keeps memory that stays in use for ever.
    ///
    /// # Errors
    /// The buffer, and as [`Engine::unregister`]: it is as it was.
    pub fn free(mut self) -> std::result::Result<(), Box<(Self, Error)>> {
        self.end().map_err(|error| Box::new((self, error)))
    }

    fn end(&mut self) -> Result<()> {
        match self.engine.unregister(self.addr) {
            // Who unregistered it waited until it was unused.
            Ok(()) | Err(Error::UnknownRegion { .. }) => {
                self.memory = None;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn inside(&self, offset: u64, len: usize) -> Result<u64> {
        self.engine.check_process()?;
        let end = offset.checked_add(len as u64).filter(|&end| end <= self.len);
        end.map(|_| self.addr + offset)
            .ok_or(Error::BadRegion { addr: self.addr.wrapping_add(offset), len: len as u64 })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.memory.is_none() {
            return;
        }
        let Err(error) = self.end() else { return };
        // Something may still copy to or from it, and in a fork it is the parent's.
        std::mem::forget(self.memory.take());
        if !matches!(error, Error::OtherProcess { .. }) {
            tracing::error!(%error, bytes = self.len, "a buffer was dropped while in use; its memory is leaked");
        }
    }
}
