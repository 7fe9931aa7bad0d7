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
    /// Whether it locks whole pages, each of them once, and a copy may begin in one lock and end in
    /// the next. Otherwise it locks any bytes, and a copy stays in one lock.
    fn locks_whole_pages(&self) -> bool;
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
    len: u64,
    /// How many of [`PIECE`] bytes, of which the last may have less; none if the application had
    /// locked it before.
    pieces: u64,
}

impl<L: PageLocker> PageLock<L> {
    fn begin(locker: &Arc<L>, base: u64, len: u64) -> Result<Self> {
        let mut lock = Self { locker: Arc::clone(locker), base, len, pieces: 0 };
        for offset in (0..len).step_by(PIECE as usize) {
            match locker.lock(base + offset, PIECE.min(len - offset)) {
                Ok(true) => lock.pieces += 1,
                Ok(false) if offset == 0 => return Ok(lock),
                Ok(false) => {
                    let _ = lock.end();
                    return Err(locked_in_part(&**locker, base, len));
                }
                Err(error) => {
                    let _ = lock.end();
                    return Err(error);
                }
            }
        }
        Ok(lock)
    }

    /// Where something else may begin to the device: the first bytes of the pieces and, as the
    /// application may have locked any part of the memory, of each page of what it has.
    fn borders(&self) -> impl Iterator<Item = u64> {
        let step = if self.is_the_applications() { page_size() } else { PIECE };
        (self.base..self.base + self.len).step_by(step as usize)
    }

    fn is_the_applications(&self) -> bool {
        self.pieces == 0
    }

    fn end(self) -> Result<()> {
        let mut ended = Ok(());
        // What was locked last is unlocked first.
        for piece in (0..self.pieces).rev() {
            ended = ended.and(self.locker.unlock(self.base + piece * PIECE));
        }
        ended
    }
}

fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

fn locked_in_part(locker: &impl Display, base: u64, len: u64) -> Error {
    let name = format!(
        "the application has locked a part of the {len} bytes at {base:#x}: let it lock all of them, or none"
    );
    refused(locker, name)
}

fn refused(locker: &impl Display, name: impl Into<String>) -> Error {
    Error::Call { call: "map_host", device: locker.to_string(), name: name.into(), code: 0 }
}

/// Where the device sees memory with these locks: in one piece, or not at all.
fn device_address<'a, L: PageLocker + 'a>(
    locker: &L,
    (host, len): (u64, u64),
    locks: impl Iterator<Item = &'a PageLock<L>>,
) -> Result<u64> {
    let first = locker.device_address(host)?;
    let look = |at: u64| match locker.device_address(at)? == first + (at - host) {
        true => Ok(()),
        false => Err(refused(
            locker,
            "the device sees the pieces of the host memory at scattered addresses",
        )),
    };
    let inside = host..host + len;
    for lock in locks {
        let mut borders = lock.borders().filter(|border| inside.contains(border));
        borders.try_for_each(look).map_err(|error| match lock.is_the_applications() {
            true => locked_in_part(locker, lock.base, lock.len),
            false => error,
        })?;
    }
    look(host + len - 1)?;
    Ok(first)
}

/// Locked memory of this process, by first byte and length: one table for a vendor. Every GPU may
/// ask, so those that ask for the same memory share its lock.
///
/// Neighbours on the heap share a page, which lives as long as the last of them. The rest of their
/// memory does not: a lock that outlived it would still name the old pages when the kernel puts new
/// ones there, and a GPU would use those. So where whole pages are locked, those of which somebody
/// has a part are locked one by one, and an entry of more pages is all of it the memory of each who
/// shares it.
///
/// The table stays locked while memory is locked and unlocked, which may take seconds for tens of
/// GB: asking for the same range meanwhile must wait anyway, and the kernel lets one thread at a
/// time change a process's memory.
#[derive(Debug)]
pub(crate) struct PageLocks<L>(Mutex<BTreeMap<Extent, Shared<L>>>);

#[derive(Debug)]
struct Shared<L> {
    lock: PageLock<L>,
    users: usize,
}

/// First byte and length.
type Extent = (u64, u64);

fn overlap((base, len): Extent, (other, bytes): Extent) -> bool {
    base < other + bytes && other < base + len
}

/// A range as it is locked. Of whole pages that is the first and the last one alone, if the range
/// has only a part of them, and what is between.
fn entries<L: PageLocker>(
    locker: &L,
    host: u64,
    len: u64,
) -> impl DoubleEndedIterator<Item = Extent> + Clone + use<L> {
    let entries = if locker.locks_whole_pages() {
        let page = page_size();
        let (base, bytes) = whole_pages(host, len);
        let end = base + bytes;
        let first = if host > base { base + page } else { base };
        // Not before `first`: both ends may lie in one page.
        let last = if host + len < end { first.max(end - page) } else { end };
        [(base, first - base), (first, last - first), (last, end - last)]
    } else {
        [(host, len), (host, 0), (host, 0)]
    };
    entries.into_iter().filter(|&(_, bytes)| bytes > 0)
}

impl<L: PageLocker> PageLocks<L> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Locks memory, or shares the locks of whoever asked for it before; returns where the device
    /// sees it. That is in one piece: where a range is several entries, copies and kernels may cross
    /// their borders, as they may cross those of the pieces of long memory.
    ///
    /// Refused is memory that others have locked with more or less around it, unless what both have
    /// is the page at an end of each.
    pub(crate) fn lock(&self, locker: &Arc<L>, host: u64, len: u64) -> Result<u64> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let entries = entries(&**locker, host, len);
        let differs = |known| entries.clone().any(|entry| overlap(known, entry) && known != entry);
        if let Some((base, bytes)) = table.keys().copied().find(|known| differs(*known)) {
            return Err(refused(
                &**locker,
                format!(
                    "of the {len} bytes at {host:#x} some are page-locked with others, the {bytes} at {base:#x}, and that lock may end first: register the same bytes, or bytes that do not overlap"
                ),
            ));
        }
        let mut added: Vec<Extent> = Vec::new();
        let mut locked = Ok(());
        for entry in entries.clone() {
            if table.contains_key(&entry) {
                continue;
            }
            match PageLock::begin(locker, entry.0, entry.1) {
                Ok(lock) => {
                    table.insert(entry, Shared { lock, users: 0 });
                    added.push(entry);
                }
                Err(error) => {
                    locked = Err(error);
                    break;
                }
            }
        }
        let seen = locked.and_then(|()| {
            let locks = entries.clone().filter_map(|entry| table.get(&entry)).map(|it| &it.lock);
            device_address(&**locker, (host, len), locks)
        });
        if seen.is_err() {
            for entry in added.into_iter().rev() {
                let _ = table.remove(&entry).map(|shared| shared.lock.end());
            }
            return seen;
        }
        for entry in entries {
            table.entry(entry).and_modify(|shared| shared.users += 1);
        }
        seen
    }

    /// Ends one `lock` of that range.
    pub(crate) fn unlock(&self, locker: &L, host: u64, len: u64) -> Result<()> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let entries = entries(locker, host, len);
        if !entries.clone().all(|entry| table.contains_key(&entry)) {
            return Err(Error::UnknownAddress { device: locker.to_string(), addr: host });
        }
        let mut ended = Ok(());
        for entry in entries.rev() {
            let Some(shared) = table.get_mut(&entry) else { continue };
            shared.users -= 1;
            if shared.users == 0
                && let Some(shared) = table.remove(&entry)
            {
                ended = ended.and(shared.lock.end());
            }
        }
        ended
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
            match device_address(&**locker, (base, len), [&lock].into_iter()) {
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
        /// No address is given for that page.
        hole: Option<u64>,
        /// Memory from there on is refused.
        full: Option<u64>,
        unlocked: Mutex<Vec<u64>>,
        /// Any bytes are locked, not whole pages.
        bytes: bool,
    }

    const SHIFT: u64 = 1 << 30;

    impl fmt::Display for Books {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("books:0")
        }
    }

    impl PageLocker for Books {
        fn locks_whole_pages(&self) -> bool {
            !self.bytes
        }

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
                _ if self.hole == Some(host - host % page(1)) => Err(refused(self, "no address")),
                _ => Ok(host + SHIFT),
            }
        }
    }

    fn page(number: u64) -> u64 {
        number * page_size()
    }

    fn locked(books: &Books) -> Vec<Extent> {
        let mut locked = books.locked.lock().unwrap().clone();
        locked.sort_unstable();
        locked
    }

    #[test]
    fn a_range_is_cut_at_pages_of_which_it_has_a_part() {
        let books = Books::default();
        let cut = |host, len| entries(&books, host, len).collect::<Vec<_>>();
        let one = page(1);
        assert_eq!(cut(page(10), 64 * one), [(page(10), 64 * one)]);
        assert_eq!(cut(page(10), one), [(page(10), one)]);
        for (host, len) in [(page(10), 1), (page(10) + 1, one - 1), (page(10) + 1, one - 2)] {
            assert_eq!(cut(host, len), [(page(10), one)], "{len} at {host:#x}");
        }
        let two = [(page(10), one), (page(11), one)];
        for (host, len) in [(page(10) + 1, one), (page(10), one + 1), (page(11) - 1, one + 1)] {
            assert_eq!(cut(host, len), two, "{len} at {host:#x}");
        }
        let three = [(page(10), one), (page(11), 5 * one), (page(16), one)];
        assert_eq!(cut(page(11) - 1, 5 * one + 2), three);
        assert_eq!(cut(page(10) + 5, 6 * one), three);
        assert_eq!(cut(page(10) + 5, 6 * one - 5), three[..2]);
        assert_eq!(cut(page(11), 5 * one + 5), three[1..]);
    }

    #[test]
    fn memory_of_the_same_pages_is_locked_once_and_until_its_last_user_lets_go() {
        let (locks, books) = (PageLocks::new(), Arc::new(Books::default()));
        let first = locks.lock(&books, page(10) + 5, page(3)).expect("locks");
        assert_eq!(first, page(10) + 5 + SHIFT);
        let second = locks.lock(&books, page(10) + 7, page(3)).expect("shares");
        assert_eq!(second, page(10) + 7 + SHIFT);
        let whole = [(page(10), page(1)), (page(11), page(2)), (page(13), page(1))];
        assert_eq!(locked(&books), whole);
        locks.unlock(&books, page(10) + 5, page(3)).expect("there");
        assert_eq!(locked(&books), whole);
        locks.unlock(&books, page(10) + 7, page(3)).expect("there");
        assert_eq!(locked(&books), []);
        assert!(locks.unlock(&books, page(10) + 7, page(3)).is_err());
    }

    #[test]
    fn of_neighbours_that_share_a_page_only_that_page_stays_locked_for_the_other() {
        let (locks, books) = (PageLocks::new(), Arc::new(Books::default()));
        // Two of three pages, from the middle of the tenth on, and a few bytes of the shared one.
        let half = page(1) / 2;
        let (first, second) = (page(10) + half, page(13) + half);
        let small = page(13) + half - 2;
        let pages = [10, 11, 13, 14, 16].map(page);
        let lens = [1, 2, 1, 2, 1].map(page);
        let all: Vec<_> = pages.into_iter().zip(lens).collect();
        assert_eq!(locks.lock(&books, first, page(3) - 9), Ok(first + SHIFT));
        assert_eq!(locked(&books), all[..3]);
        assert_eq!(locks.lock(&books, second, page(3)), Ok(second + SHIFT));
        assert_eq!(locks.lock(&books, small, 2), Ok(small + SHIFT));
        assert_eq!(locked(&books), all);
        locks.unlock(&books, first, page(3) - 9).expect("there");
        assert_eq!(locked(&books), all[2..]);
        // What comes to the same addresses is locked again.
        assert_eq!(locks.lock(&books, first, page(3) - 9), Ok(first + SHIFT));
        assert_eq!(locked(&books), all);
        let missing = locks.unlock(&books, first, page(4));
        assert!(matches!(missing, Err(Error::UnknownAddress { .. })), "{missing:?}");
        locks.unlock(&books, second, page(3)).expect("there");
        assert_eq!(locked(&books), all[..3]);
        locks.unlock(&books, first, page(3) - 9).expect("there");
        assert_eq!(locked(&books), all[2..3]);
        locks.unlock(&books, small, 2).expect("there");
        assert_eq!(locked(&books), []);
    }

    #[test]
    fn where_any_bytes_are_locked_a_range_is_one_lock_that_no_neighbour_shares() {
        let (locks, books) =
            (PageLocks::new(), Arc::new(Books { bytes: true, ..Books::default() }));
        let (first, second) = ((page(10) + 5, page(3)), (page(13) + 5, page(3)));
        for (host, len) in [first, second, first] {
            assert_eq!(locks.lock(&books, host, len), Ok(host + SHIFT));
        }
        assert_eq!(locked(&books), [first, second]);
        for (host, len) in [(page(10), page(4)), (page(11), 7), (page(10) + 5, page(2))] {
            assert!(locks.lock(&books, host, len).is_err(), "{len} at {host:#x}");
        }
        locks.unlock(&books, first.0, first.1).expect("there");
        assert_eq!(locked(&books), [first, second]);
        locks.unlock(&books, first.0, first.1).expect("there");
        assert_eq!(locked(&books), [second]);
        locks.unlock(&books, second.0, second.1).expect("there");
        assert_eq!(locked(&books), []);
    }

    #[test]
    fn memory_whose_pages_are_locked_with_others_is_refused_and_nothing_changes() {
        let (locks, books) = (PageLocks::new(), Arc::new(Books::default()));
        locks.lock(&books, page(10) + 5, page(3)).expect("locks");
        let before = locked(&books);
        for (host, len) in [
            (page(11), 7),
            (page(12), page(1)),
            (page(10) + 5, page(2)),
            (page(9), page(3)),
            (page(8), page(12)),
            (page(10), page(4)),
        ] {
            let refused = locks.lock(&books, host, len).expect_err("the lock of pages 11 and 12");
            assert!(refused.to_string().contains("do not overlap"), "{refused}");
            assert_eq!(locked(&books), before, "{len} at {host:#x}");
        }
        locks.unlock(&books, page(10) + 5, page(3)).expect("there");
        locks.lock(&books, page(8), page(12)).expect("nothing is in its way");
        assert_eq!(locked(&books), [(page(8), page(12))]);
    }

    #[test]
    fn neighbours_that_a_device_sees_apart_are_refused_and_nothing_changes() {
        let cut = Arc::new(Books { cut: Some(page(12)), ..Books::default() });
        let locks = PageLocks::new();
        locks.lock(&cut, page(10), page(1) + 9).expect("locks");
        let before = locked(&cut);
        assert_eq!(before, [(page(10), page(1)), (page(11), page(1))]);
        for len in [page(1), page(3)] {
            let refused = locks.lock(&cut, page(11) + 9, len);
            assert!(matches!(refused, Err(Error::Call { .. })), "{refused:?}");
            assert_eq!(locked(&cut), before);
        }
        locks.unlock(&cut, page(10), page(1) + 9).expect("there");
        assert_eq!(locked(&cut), []);
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

    #[test]
    fn memory_of_which_the_application_has_locked_but_a_part_is_refused() {
        let hole = Some(page(14));
        let books = Arc::new(Books { taken: true, hole, ..Books::default() });
        let locks = PageLocks::new();
        for (host, len) in [(page(10), page(9)), (page(10) + 5, page(9)), (page(13), page(2) - 1)] {
            let refused = locks.lock(&books, host, len).expect_err("page 14 is not locked");
            assert!(refused.to_string().contains("all of them, or none"), "{refused}");
            assert!(locks.unlock(&books, host, len).is_err(), "nothing stays in the table");
        }
        for (host, len) in [(page(10), page(4)), (page(15), page(4))] {
            assert_eq!(locks.lock(&books, host, len), Ok(host + SHIFT));
        }
    }
}
