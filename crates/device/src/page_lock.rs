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

/// Where the device sees locked memory: in one piece, or not at all. Locks may also end at `borders`.
fn device_address(locker: &impl PageLocker, host: u64, len: u64, borders: &[u64]) -> Result<u64> {
    let first = locker.device_address(host)?;
    let inside = borders.iter().filter_map(|border| border.checked_sub(host));
    let ends = (1..len.div_ceil(PIECE)).map(|piece| piece * PIECE).chain([len - 1]);
    for offset in ends.chain(inside.filter(|offset| *offset < len)) {
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
/// whole pages and none twice, and every GPU may ask, so buffers that share a page share its lock: of
/// two that lie side by side on the heap the second one locks what the first one has not.
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

/// First byte and length.
type Pages = (u64, u64);

/// No two entries of the table do.
fn overlap((base, len): Pages, (other, bytes): Pages) -> bool {
    base < other + bytes && other < base + len
}

/// What of some pages is in none of these, which are sorted.
fn gaps((base, len): Pages, known: &[Pages]) -> Vec<Pages> {
    let (mut gaps, mut at) = (Vec::new(), base);
    for &(start, bytes) in known.iter().chain([&(base + len, 0)]) {
        if at < start {
            gaps.push((at, start - at));
        }
        at = at.max(start + bytes);
    }
    gaps
}

impl<L: PageLocker> PageLocks<L> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Locks memory, or shares the locks of whoever asked for some of it before; returns where the
    /// device sees it.
    pub(crate) fn lock(&self, locker: &Arc<L>, host: u64, len: u64) -> Result<u64> {
        let pages = whole_pages(host, len);
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known: Vec<_> = table.keys().copied().filter(|it| overlap(*it, pages)).collect();
        let mut added: Vec<Pages> = Vec::new();
        let mut locked = Ok(());
        for gap in gaps(pages, &known) {
            match PageLock::begin(locker, gap.0, gap.1) {
                Ok(lock) => {
                    table.insert(gap, Shared { lock, users: 0 });
                    added.push(gap);
                }
                Err(error) => {
                    locked = Err(error);
                    break;
                }
            }
        }
        let borders: Vec<_> = known.iter().chain(&added).map(|(base, _)| *base).collect();
        let seen = locked.and_then(|()| device_address(&**locker, host, len, &borders));
        if seen.is_err() {
            for gap in added.into_iter().rev() {
                let _ = table.remove(&gap).map(|shared| shared.lock.end());
            }
            return seen;
        }
        let all = table.iter_mut().filter(|(it, _)| overlap(**it, pages));
        all.for_each(|(_, shared)| shared.users += 1);
        seen
    }

    /// Ends one `lock` of that range.
    pub(crate) fn unlock(&self, locker: &L, host: u64, len: u64) -> Result<()> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let pages = whole_pages(host, len);
        let known: Vec<_> = table.keys().copied().filter(|it| overlap(*it, pages)).collect();
        if !gaps(pages, &known).is_empty() {
            return Err(Error::UnknownAddress { device: locker.to_string(), addr: host });
        }
        let mut ended = Ok(());
        for key in known {
            let Some(shared) = table.get_mut(&key) else { continue };
            shared.users -= 1;
            if shared.users == 0
                && let Some(shared) = table.remove(&key)
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
            match device_address(&**locker, base, len, &[]) {
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
    fn neighbours_that_share_a_page_lock_it_once_and_until_the_last_of_them_lets_go() {
        let (locks, books) = (PageLocks::new(), Arc::new(Books::default()));
        let locked = || {
            let mut locked = books.locked.lock().unwrap().clone();
            locked.sort_unstable();
            locked
        };
        // Two of three and a half pages, from the middle of the tenth on; then one below, and one
        // over all.
        let half = page(1) / 2;
        let ranges = [
            (page(10) + half, 3 * page(1)),
            (page(13) + half, 3 * page(1)),
            (page(9), page(1) + 1),
            (page(8), page(12)),
        ];
        let expected = [
            vec![(page(10), page(4))],
            vec![(page(10), page(4)), (page(14), page(3))],
            vec![(page(9), page(1)), (page(10), page(4)), (page(14), page(3))],
            vec![
                (page(8), page(1)),
                (page(9), page(1)),
                (page(10), page(4)),
                (page(14), page(3)),
                (page(17), page(3)),
            ],
        ];
        for (&(host, len), expected) in ranges.iter().zip(&expected) {
            assert_eq!(locks.lock(&books, host, len), Ok(host + SHIFT));
            assert_eq!(locked(), *expected);
        }
        // The first one's pages are also the second's and the last's.
        for at in [0, 1, 2] {
            locks.unlock(&books, ranges[at].0, ranges[at].1).expect("there");
            assert_eq!(locked(), expected[3]);
        }
        let missing = locks.unlock(&books, page(8), page(13));
        assert!(matches!(missing, Err(Error::UnknownAddress { .. })), "{missing:?}");
        locks.unlock(&books, ranges[3].0, ranges[3].1).expect("there");
        assert_eq!(locked(), []);
    }

    #[test]
    fn neighbours_that_a_device_sees_apart_are_refused_and_nothing_changes() {
        let cut = Arc::new(Books { cut: Some(page(12)), ..Books::default() });
        let locks = PageLocks::new();
        locks.lock(&cut, page(10), page(2)).expect("locks");
        for (host, len) in [(page(11), page(2)), (page(9), page(4))] {
            let refused = locks.lock(&cut, host, len);
            assert!(matches!(refused, Err(Error::Call { .. })), "{refused:?}");
            assert_eq!(*cut.locked.lock().unwrap(), [(page(10), page(2))]);
        }
        locks.unlock(&cut, page(10), page(2)).expect("there");
        assert_eq!(*cut.locked.lock().unwrap(), []);
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
