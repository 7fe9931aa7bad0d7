//! Host memory that a GPU uses in place: page-locked where it is, shared by all who ask, and let
//! go.

use std::collections::BTreeMap;
use std::fmt::{Debug, Display};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::host::{system_error, whole_pages};
use crate::software::{map, unmap};

/// Most bytes page-locked by one call: NVIDIA's drivers from R580 on fail at 512 GiB of small
/// pages (PEERS.md).
const PIECE: u64 = 64 << 30;

/// A device whose driver page-locks host memory, by the device's name in `Display`. All calls run
/// in the device's scope.
pub(crate) trait PageLocker: Debug + Display + Send + Sync {
    /// Locks that memory for all devices. `false`: the application has locked it, and owns the
    /// lock.
    fn lock(&self, host: u64, len: u64) -> Result<bool>;
    /// Ends one `lock` that began at `host`.
    fn unlock(&self, host: u64) -> Result<()>;
    /// Where the device sees a byte of locked memory.
    fn device_address(&self, host: u64) -> Result<u64>;
}

/// Page-locked memory; [`PageLock::end`] unlocks it.
#[derive(Debug)]
struct PageLock<L> {
    /// The device that asked first, kept because the driver books the lock there.
    locker: Arc<L>,
    base: u64,
    /// Bytes of each piece from the front; none if the application had locked it before.
    pieces: Vec<u64>,
}

impl<L: PageLocker> PageLock<L> {
    fn begin(locker: &Arc<L>, base: u64, len: u64) -> Result<Self> {
        let mut lock = Self { locker: Arc::clone(locker), base, pieces: Vec::new() };
        let mut done = 0;
        while done < len {
            let piece = PIECE.min(len - done);
            match locker.lock(base + done, piece) {
                Ok(true) => lock.pieces.push(piece),
                Ok(false) if done == 0 => return Ok(lock),
                Ok(false) => {
                    let _ = lock.end();
                    return Err(refused(
                        &**locker,
                        format!(
                            "the application has locked a part of the {len} bytes at {base:#x}"
                        ),
                    ));
                }
                Err(error) => {
                    let _ = lock.end();
                    return Err(error);
                }
            }
            done += piece;
        }
        Ok(lock)
    }

    fn end(self) -> Result<()> {
        let mut at = self.base + self.pieces.iter().sum::<u64>();
        let mut ended = Ok(());
        // What was locked last is unlocked first.
        for piece in self.pieces.into_iter().rev() {
            at -= piece;
            ended = ended.and(self.locker.unlock(at));
        }
        ended
    }
}

fn refused(locker: &impl Display, name: impl Into<String>) -> Error {
    Error::Call { call: "map_host", device: locker.to_string(), name: name.into(), code: 0 }
}

/// Where the device sees locked memory: in one piece, or not at all.
fn device_address(locker: &impl PageLocker, host: u64, len: u64) -> Result<u64> {
    let first = locker.device_address(host)?;
    let ends = (1..len.div_ceil(PIECE)).map(|piece| piece * PIECE).chain([len - 1]);
    for offset in ends {
        if locker.device_address(host + offset)? != first + offset {
            return Err(refused(
                locker,
                "the device sees the pieces of the host memory at scattered addresses",
            ));
        }
    }
    Ok(first)
}

/// Locked memory of this process, by address and length: one table for a vendor. Drivers lock
/// whole pages and none twice, and every GPU may ask, so buffers that share a page share its lock.
///
/// The table stays locked while memory is locked and unlocked, which may take seconds for tens of
/// GB: asking for the same range meanwhile must wait anyway, and the kernel lets one thread at a
/// time change a process's memory.
#[derive(Debug)]
pub(crate) struct PageLocks<L>(Mutex<BTreeMap<(u64, u64), Shared<L>>>);

#[derive(Debug)]
struct Shared<L> {
    lock: PageLock<L>,
    users: usize,
}

/// No two entries of the table overlap, so at most one covers a range.
fn covers((base, len): (u64, u64), (host, bytes): (u64, u64)) -> bool {
    base <= host && host + bytes <= base + len
}

impl<L: PageLocker> PageLocks<L> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Locks memory, or shares the lock of whoever asked for it before; returns where the device
    /// sees it.
    pub(crate) fn lock(&self, locker: &Arc<L>, host: u64, len: u64) -> Result<u64> {
        let pages = whole_pages(host, len);
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, known)) = table.iter_mut().find(|(known, _)| covers(**known, pages)) {
            let addr = device_address(&**locker, host, len)?;
            known.users += 1;
            return Ok(addr);
        }
        if table.keys().any(|&(base, len)| base < pages.0 + pages.1 && pages.0 < base + len) {
            // Sharing that lock would end with its own user.
            return Err(refused(
                &**locker,
                format!(
                    "a part of the {len} bytes at {host:#x} is mapped already; map the whole once"
                ),
            ));
        }
        let lock = PageLock::begin(locker, pages.0, pages.1)?;
        match device_address(&**locker, host, len) {
            Ok(addr) => {
                table.insert(pages, Shared { lock, users: 1 });
                Ok(addr)
            }
            Err(error) => {
                let _ = lock.end();
                Err(error)
            }
        }
    }

    /// Ends one `lock` of that range.
    pub(crate) fn unlock(&self, locker: &L, host: u64, len: u64) -> Result<()> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let pages = whole_pages(host, len);
        let known = table.iter_mut().find(|(known, _)| covers(**known, pages));
        let unknown = || Error::UnknownAddress { device: locker.to_string(), addr: host };
        let (&key, known) = known.ok_or_else(unknown)?;
        known.users -= 1;
        if known.users > 0 {
            return Ok(());
        }
        table.remove(&key).map_or(Ok(()), |Shared { lock, .. }| lock.end())
    }
}

/// Memory that a host device of another process exported: mapped here, and locked for a GPU.
#[derive(Debug)]
pub(crate) struct LockedFile<L> {
    len: u64,
    lock: PageLock<L>,
}

impl<L: PageLocker> LockedFile<L> {
    /// Also returns where the device sees it.
    pub(crate) fn open(locker: &Arc<L>, fd: OwnedFd, len: u64) -> Result<(u64, Self)> {
        let base = map(fd.as_fd(), len).map_err(|error| match error {
            rustix::io::Errno::INVAL => Error::BadExport {
                device: locker.to_string(),
                reason: format!("its file is shorter than {len} bytes, or cannot be mapped"),
            },
            error => system_error(locker, "mmap", len, error),
        })?;
        drop(fd);
        let locked = PageLock::begin(locker, base, len).and_then(|lock| {
            match device_address(&**locker, base, len) {
                Ok(addr) => Ok((addr, Self { len, lock })),
                Err(error) => {
                    let _ = lock.end();
                    Err(error)
                }
            }
        });
        locked.inspect_err(|_| unmap(base, len))
    }

    pub(crate) fn close(self) -> Result<()> {
        let base = self.lock.base;
        let ended = self.lock.end();
        unmap(base, self.len);
        ended
    }
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use super::*;

    /// A driver that keeps its books, and sees memory a gigabyte further on.
    #[derive(Debug, Default)]
    struct Books {
        locked: Mutex<Vec<(u64, u64)>>,
        /// The application has locked everything.
        taken: bool,
        /// No address is given for the last byte.
        cut: Option<u64>,
        /// Memory from there on is refused.
        full: Option<u64>,
        unlocked: Mutex<Vec<u64>>,
    }

    const SHIFT: u64 = 1 << 30;

    impl fmt::Display for Books {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("books:0")
        }
    }

    impl PageLocker for Books {
        fn lock(&self, host: u64, len: u64) -> Result<bool> {
            if self.full.is_some_and(|full| host >= full) {
                let (device, kind) = (self.to_string(), "pinned host");
                return Err(Error::OutOfMemory { device, kind, bytes: len });
            }
            if !self.taken {
                self.locked.lock().unwrap().push((host, len));
            }
            Ok(!self.taken)
        }

        fn unlock(&self, host: u64) -> Result<()> {
            self.locked.lock().unwrap().retain(|&(base, _)| base != host);
            self.unlocked.lock().unwrap().push(host);
            Ok(())
        }

        fn device_address(&self, host: u64) -> Result<u64> {
            match self.cut {
                Some(cut) if host >= cut => Err(refused(self, "no address")),
                _ => Ok(host + SHIFT),
            }
        }
    }

    fn page(number: u64) -> u64 {
        number * rustix::param::page_size() as u64
    }

    #[test]
    fn memory_of_shared_pages_is_locked_once_and_until_its_last_user_lets_go() {
        let (locks, books) = (PageLocks::new(), Arc::new(Books::default()));
        let first = locks.lock(&books, page(10) + 5, page(3)).expect("locks");
        assert_eq!(first, page(10) + 5 + SHIFT);
        let inside = locks.lock(&books, page(11), 7).expect("shares");
        assert_eq!(inside, page(11) + SHIFT);
        let whole = vec![(page(10), page(4))];
        assert_eq!(*books.locked.lock().unwrap(), whole);
        locks.unlock(&books, page(10) + 5, page(3)).expect("there");
        assert_eq!(*books.locked.lock().unwrap(), whole);
        locks.unlock(&books, page(11), 7).expect("there");
        assert_eq!(*books.locked.lock().unwrap(), []);
        assert!(locks.unlock(&books, page(11), 7).is_err());
    }

    #[test]
    fn a_part_of_what_is_locked_and_more_is_refused_and_changes_nothing() {
        let (locks, books) = (PageLocks::new(), Arc::new(Books::default()));
        locks.lock(&books, page(10), page(2)).expect("locks");
        for (host, len) in [(page(11), page(2)), (page(9), page(2)), (page(9), page(4))] {
            let refused = locks.lock(&books, host, len);
            assert!(matches!(refused, Err(Error::Call { .. })), "{refused:?}");
        }
        assert_eq!(*books.locked.lock().unwrap(), [(page(10), page(2))]);
    }

    #[test]
    fn long_memory_is_locked_in_pieces_which_end_together_also_when_one_has_no_address() {
        let len = 2 * PIECE + page(1);
        let (locks, books) = (PageLocks::new(), Arc::new(Books::default()));
        assert_eq!(locks.lock(&books, page(1), len), Ok(page(1) + SHIFT));
        assert_eq!(books.locked.lock().unwrap().len(), 3);
        locks.unlock(&books, page(1), len).expect("there");
        assert_eq!(*books.locked.lock().unwrap(), []);
        let cut = Arc::new(Books { cut: Some(page(1) + PIECE), ..Books::default() });
        assert!(locks.lock(&cut, page(1), len).is_err());
        assert_eq!(*cut.locked.lock().unwrap(), []);
        assert!(locks.unlock(&cut, page(1), len).is_err(), "nothing stays in the table");
    }

    #[test]
    fn b48_a_piece_that_is_refused_takes_those_before_it_back_the_last_first() {
        let len = 5 * PIECE;
        for refused in 0..5 {
            let full = Some(page(1) + refused * PIECE);
            let (locks, books) = (PageLocks::new(), Arc::new(Books { full, ..Books::default() }));
            let said = locks.lock(&books, page(1), len);
            let what =
                Error::OutOfMemory { device: "books:0".into(), kind: "pinned host", bytes: PIECE };
            assert_eq!(said, Err(what));
            assert_eq!(*books.locked.lock().unwrap(), []);
            let back: Vec<_> = (0..refused).rev().map(|piece| page(1) + piece * PIECE).collect();
            assert_eq!(*books.unlocked.lock().unwrap(), back);
        }
    }

    #[test]
    fn a_lock_of_the_applications_own_is_used_and_left_alone() {
        let books = Arc::new(Books { taken: true, ..Books::default() });
        let locks = PageLocks::new();
        assert_eq!(locks.lock(&books, page(1), 9), Ok(page(1) + SHIFT));
        books.locked.lock().unwrap().push((page(1), page(1)));
        locks.unlock(&books, page(1), 9).expect("there");
        assert_eq!(*books.locked.lock().unwrap(), [(page(1), page(1))]);
    }
}
