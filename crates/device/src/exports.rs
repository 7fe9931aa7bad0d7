//! What exports of all vendors have in common: the tag of the process that made a handle, what an
//! opener keeps, and file descriptors.
//!
//! The tag is no secret and proves nothing; it only spares a process the attempt to open its own
//! export, which drivers refuse with a misleading error (FAILURES.md B05).

use std::collections::HashMap;
use std::ffi::c_int;
use std::hash::{BuildHasher, RandomState};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::error::{Error, Result};

const TAG_BYTES: usize = 16;
/// Of CUDA and HIP, for a handle and for the place of an allocation in a pool.
pub(crate) const HANDLE_BYTES: usize = 64;

/// Random, one for the life of the process.
fn process_tag() -> [u8; TAG_BYTES] {
    static TAG: OnceLock<[u8; TAG_BYTES]> = OnceLock::new();
    *TAG.get_or_init(|| {
        let random = RandomState::new();
        let halves = [random.hash_one(0_u8), random.hash_one(1_u8)].map(u64::to_le_bytes);
        let mut tag = [0; TAG_BYTES];
        tag.copy_from_slice(halves.as_flattened());
        tag
    })
}

/// 64 bytes of the driver, marked as made here.
pub(crate) fn tagged(bytes: [u8; HANDLE_BYTES]) -> Vec<u8> {
    process_tag().into_iter().chain(bytes).collect()
}

/// The driver's bytes in an export, or why it must not be opened.
pub(crate) fn parse(bytes: &[u8], device: &str) -> Result<[u8; HANDLE_BYTES]> {
    let bad = || Error::BadExport {
        device: device.into(),
        reason: format!(
            "a handle has {} bytes, this one has {}",
            TAG_BYTES + HANDLE_BYTES,
            bytes.len()
        ),
    };
    let (tag, handle) = bytes.split_first_chunk::<TAG_BYTES>().ok_or_else(bad)?;
    let handle = <[u8; HANDLE_BYTES]>::try_from(handle).map_err(|_| bad())?;
    if *tag == process_tag() {
        return Err(Error::SameProcess { device: device.into() });
    }
    Ok(handle)
}

/// Mappings of other processes' memory, by their first byte as the device sees it. A driver may
/// map one allocation twice at one address.
#[derive(Debug)]
pub(crate) struct Openings<T>(Mutex<HashMap<u64, Vec<T>>>);

impl<T> Default for Openings<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Openings<T> {
    pub(crate) fn insert(&self, addr: u64, opened: T) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry(addr).or_default().push(opened);
    }

    /// The last of those at that address.
    pub(crate) fn remove(&self, addr: u64) -> Option<T> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let here = all.get_mut(&addr)?;
        let last = here.pop();
        if here.is_empty() {
            all.remove(&addr);
        }
        last
    }
}

/// Takes a descriptor that a driver made.
///
/// # Safety
/// It is open and nobody else's.
pub(crate) unsafe fn adopt(fd: c_int) -> OwnedFd {
    // SAFETY: the caller's contract.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // It would outlive an exec and keep the memory; not worth a failure.
    let _ = rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC);
    fd
}

/// Whether this process could not open a file now. Drivers have no code of their own for it.
pub(crate) fn no_descriptors() -> bool {
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::Errno;
    matches!(eventfd(0, EventfdFlags::CLOEXEC), Err(Errno::MFILE | Errno::NFILE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_of_this_process_is_recognised_before_the_driver_is_asked() {
        let mut bytes = tagged([7; HANDLE_BYTES]);
        assert_eq!(
            parse(&bytes, "cuda:0").err(),
            Some(Error::SameProcess { device: "cuda:0".into() })
        );
        bytes[0] ^= 1;
        let handle = parse(&bytes, "cuda:0").expect("a foreign tag");
        assert_eq!(handle, [7; HANDLE_BYTES]);
    }

    #[test]
    fn handles_of_other_lengths_are_refused() {
        for len in (0..200).filter(|&len| len != TAG_BYTES + HANDLE_BYTES) {
            let mut bytes = process_tag().to_vec();
            bytes.resize(len, 0);
            assert!(matches!(parse(&bytes, "cuda:0"), Err(Error::BadExport { .. })), "{len} bytes");
        }
    }

    #[test]
    fn openings_at_one_address_end_one_by_one() {
        let openings = Openings::default();
        openings.insert(4096, 'a');
        openings.insert(4096, 'b');
        openings.insert(8192, 'c');
        assert_eq!(
            [4096, 4096, 4096, 8192].map(|addr| openings.remove(addr)),
            [Some('b'), Some('a'), None, Some('c')]
        );
    }
}
