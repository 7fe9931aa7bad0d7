//! Registered memory that a transport reads and writes itself: a socket's bytes go straight to and
//! from host memory, and through a chunk of the caller's for a GPU's.

use std::os::fd::AsFd;
use std::sync::Arc;

use kvferry_device::{Device, HostBytes, Vendor};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::registry::Pin;

/// A range inside one registered region, which stays registered until this is dropped.
///
/// Peers may use the same bytes meanwhile; then their contents are unspecified, and nothing else.
#[derive(Debug)]
pub struct Lease {
    device: Arc<dyn Device>,
    addr: u64,
    len: u64,
    pin: Pin,
}

impl Engine {
    /// Leases the part of `[addr, addr + len)` that lies in the region which holds `addr`; none if
    /// no region does, or the range is empty. Regions that touch are leased one by one. A fork gets
    /// none.
    pub fn lease(&self, addr: u64, len: u64) -> Option<Lease> {
        self.check_process().ok()?;
        let pin = self.registry().pin_at(addr)?;
        let region = pin.region();
        let len = len.min(region.len - (addr - region.addr));
        let device = Arc::clone(&self.devices()[region.device]);
        (len > 0).then_some(Lease { device, addr, len, pin })
    }
}

impl Lease {
    /// First byte.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Bytes; fewer than were asked for where the region ends before them.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Never true: nothing is leased for an empty range.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether [`Engine::unregister`] waits for this lease to end.
    pub fn is_withdrawn(&self) -> bool {
        self.pin.region().is_withdrawn()
    }

    /// Whether the processor reads and writes it, so that [`Self::receive`] and [`Self::send`] do.
    pub fn is_host(&self) -> bool {
        self.device.info().vendor == Vendor::Host
    }

    /// Copies `bytes` into the lease at `offset`. Returns when they are there, which for a GPU's
    /// memory may take some time.
    ///
    /// # Errors
    /// [`Error::BadRegion`] if they leave the lease, and the device's.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let addr = self.inside(offset, bytes.len() as u64)?;
        // SAFETY: the pin keeps the region's memory allocated, and the range is inside it.
        Ok(unsafe { self.device.write(addr, bytes) }?)
    }

    /// Fills `bytes` from the lease at `offset`. As [`Self::write`].
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let addr = self.inside(offset, bytes.len() as u64)?;
        // SAFETY: as in `write`.
        Ok(unsafe { self.device.read(addr, bytes) }?)
    }

    /// Receives at most `most` bytes, and none behind the end, from a socket into host memory at
    /// `offset`. Does not block. Returns how many; 0 at the end of the stream.
    ///
    /// # Errors
    /// The socket's, `AGAIN` among them; `INVAL` for memory that is not the host's, and for no bytes
    /// at all.
    pub fn receive(&self, socket: impl AsFd, offset: u64, most: u64) -> rustix::io::Result<usize> {
        let (addr, len) = self.host_range(offset, most)?;
        // SAFETY: the pin keeps the memory allocated, and the range is inside it.
        let mut bytes = unsafe { HostBytes::new(addr, len) };
        let received = rustix::net::recv(socket, &mut *bytes.to_receive(), RecvFlags::DONTWAIT);
        received.map(|(_, count)| count)
    }

    /// Sends at most `most` bytes, and none behind the end, of host memory from `offset` to a
    /// socket. Does not block. Returns how many.
    ///
    /// # Errors
    /// As [`Self::receive`].
    pub fn send(&self, socket: impl AsFd, offset: u64, most: u64) -> rustix::io::Result<usize> {
        let (addr, len) = self.host_range(offset, most)?;
        // SAFETY: as in `receive`.
        let bytes = unsafe { HostBytes::new(addr, len) };
        rustix::net::send(socket, &bytes.to_send(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
    }

    fn host_range(&self, offset: u64, most: u64) -> rustix::io::Result<(u64, usize)> {
        let len = most.min(self.len.saturating_sub(offset));
        match usize::try_from(len) {
            Ok(len) if len > 0 && self.is_host() => Ok((self.addr + offset, len)),
            _ => Err(Errno::INVAL),
        }
    }

    fn inside(&self, offset: u64, len: u64) -> Result<u64> {
        let end = offset.checked_add(len).filter(|&end| end <= self.len);
        end.map(|_| self.addr + offset)
            .ok_or(Error::BadRegion { addr: self.addr.wrapping_add(offset), len })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn engine() -> Arc<Engine> {
        Engine::new(Config::default(), vec![kvferry_device::host().unwrap()]).unwrap()
    }

    #[test]
    fn a_lease_ends_where_its_region_does_and_there_is_none_elsewhere() {
        let engine = engine();
        let buffer = engine.allocate(&engine.devices()[0], 8192).unwrap();
        let (start, end) = (buffer.addr(), buffer.addr() + buffer.len());
        assert_eq!(engine.lease(start, u64::MAX).unwrap().len(), 8192);
        assert_eq!(engine.lease(end - 1, 2).unwrap().len(), 1);
        for (addr, len) in [(start - 1, 2), (end, 1), (start, 0), (u64::MAX, 1), (0, u64::MAX)] {
            assert!(engine.lease(addr, len).is_none(), "{len} bytes at {addr:#x}");
        }
        let lease = engine.lease(start, 16).unwrap();
        for (offset, len) in [(0, 17), (16, 1), (u64::MAX, 1)] {
            lease.write(offset, &vec![0; len]).expect_err("leaves the lease");
            lease.read(offset, &mut vec![0; len]).expect_err("leaves the lease");
        }
    }

    #[test]
    fn bytes_go_between_a_socket_and_the_lease_and_not_behind_its_end() {
        let engine = engine();
        let buffer = engine.allocate(&engine.devices()[0], 64).unwrap();
        let lease = engine.lease(buffer.addr() + 8, 16).unwrap();
        let (here, there) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        rustix::net::send(&there, &[7; 32], SendFlags::empty()).unwrap();
        assert_eq!(lease.receive(&here, 4, u64::MAX), Ok(12));
        let mut bytes = [1; 64];
        buffer.read(0, &mut bytes).unwrap();
        assert_eq!((bytes[11], &bytes[12..24], bytes[24]), (0, &[7; 12][..], 0));
        assert_eq!(lease.send(&here, 3, 2), Ok(2));
        assert_eq!(rustix::net::recv(&there, &mut bytes[..], RecvFlags::empty()), Ok((2, 2)));
        assert_eq!(bytes[..2], [0, 7]);
        for offset in [16, u64::MAX] {
            assert_eq!(lease.receive(&here, offset, 1), Err(Errno::INVAL));
            assert_eq!(lease.send(&here, offset, 1), Err(Errno::INVAL));
        }
    }

    #[test]
    fn unregistering_waits_for_a_lease_which_sees_it() {
        let engine = engine();
        let buffer = engine.allocate(&engine.devices()[0], 64).unwrap();
        let addr = buffer.addr();
        let lease = engine.lease(addr, 64).unwrap();
        assert!(!lease.is_withdrawn());
        let ended = std::thread::scope(|scope| {
            let unregister = scope.spawn(|| engine.unregister(addr));
            while !lease.is_withdrawn() {
                std::thread::yield_now();
            }
            assert!(engine.lease(addr, 64).is_none(), "no new one");
            assert!(!unregister.is_finished());
            drop(lease);
            unregister.join().unwrap()
        });
        assert_eq!(ended, Ok(()));
        std::mem::forget(buffer);
    }
}
