//! Host memory that a GPU uses in place: page-locked where it is, shared by all who ask, and let
//! go.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Debug, Display};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::compact::Rows;
use crate::error::{Error, Result};
use crate::host::{system_error, whole_pages};
use crate::software::{map, unmap};

/// Most bytes page-locked by one call: NVIDIA's drivers from R580 on fail at 512 GiB of small
/// pages (PEERS.md).
const PIECE: u64 = 64 << 30;

/// A device whose driver page-locks host memory, by the device's name in `Display`. All calls run
/// in the device's scope.
pub(crate) trait PageLocker: Debug + Display + Send + Sync {
    /// Whether it locks whole pages, each of them once. Otherwise it locks any bytes.
    ///
    /// Either way a kernel may cross the border between two locks and a copy may not: the driver
    /// refuses it ([`PageLocks::copy`]).
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
        (self.base..self.base + self.len).step_by(self.step() as usize)
    }

    fn step(&self) -> u64 {
        if self.is_the_applications() { page_size() } else { PIECE }
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
pub(crate) struct PageLocks<L> {
    table: Mutex<BTreeMap<Extent, Shared<L>>>,
    /// The same memory by its first byte, for copies, which do not wait for the table.
    seen: Mutex<BTreeMap<u64, Seen>>,
}

/// Locked memory as copies name it, with a border at every step.
#[derive(Clone, Copy, Debug)]
struct Seen {
    host: u64,
    device: u64,
    len: u64,
    step: u64,
}

impl Seen {
    /// Borders inside of memory that the processor or the device names, as distances from its first
    /// byte. The last one is where other memory begins.
    fn borders(self, addr: u64, len: u64) -> impl Iterator<Item = u64> {
        // The driver may have refused any numbers.
        let end = addr.saturating_add(len);
        [self.host, self.device].into_iter().flat_map(move |base| {
            let first = addr.saturating_sub(base) / self.step;
            (first..=self.len.div_ceil(self.step))
                .map(move |at| base + (at * self.step).min(self.len))
                .take_while(move |&border| border < end)
                .filter(move |&border| border > addr)
                .map(move |border| border - addr)
        })
    }
}

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
        Self { table: Mutex::new(BTreeMap::new()), seen: Mutex::new(BTreeMap::new()) }
    }

    /// Locks memory, or shares the locks of whoever asked for it before; returns where the device
    /// sees it. That is in one piece: where a range is several entries, kernels cross their borders, as
    /// they cross those of the pieces of long memory, and [`PageLocks::copy`] does.
    ///
    /// Refused is memory that others have locked with more or less around it, unless what both have
    /// is the page at an end of each.
    pub(crate) fn lock(&self, locker: &Arc<L>, host: u64, len: u64) -> Result<u64> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
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
        let first = locked.and_then(|()| {
            let locks = entries.clone().filter_map(|entry| table.get(&entry)).map(|it| &it.lock);
            device_address(&**locker, (host, len), locks)
        });
        let Ok(device) = first else {
            for entry in added.into_iter().rev() {
                let _ = table.remove(&entry).map(|shared| shared.lock.end());
            }
            return first;
        };
        let mut seen = self.seen();
        for entry in entries {
            let Some(shared) = table.get_mut(&entry) else { continue };
            shared.users += 1;
            // The application may have locked any pages.
            let (base, len) = match shared.lock.is_the_applications() {
                true => whole_pages(entry.0, entry.1),
                false => entry,
            };
            // It may begin before what was asked for.
            let device = device.wrapping_add(base.wrapping_sub(host));
            seen.insert(entry.0, Seen { host: base, device, len, step: shared.lock.step() });
        }
        first
    }

    /// Ends one `lock` of that range.
    pub(crate) fn unlock(&self, locker: &L, host: u64, len: u64) -> Result<()> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
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
                self.seen().remove(&entry.0);
                ended = ended.and(shared.lock.end());
            }
        }
        ended
    }

    fn seen(&self) -> MutexGuard<'_, BTreeMap<u64, Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Borders inside of memory of that length at either address, as distances from its beginning.
    fn borders(&self, [dst, src]: [u64; 2], len: u64) -> Vec<u64> {
        let seen = self.seen();
        let inside = |addr| seen.values().flat_map(move |it| it.borders(addr, len));
        inside(dst).chain(inside(src)).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Where rows have to be divided, so that a border lies between two blocks of them or inside a row
    /// that is a block by itself: numbers of rows, from 1 on.
    fn row_borders(&self, rows: Rows) -> Vec<u64> {
        let mut found = BTreeSet::new();
        let seen = self.seen();
        for (addr, pitch) in [(rows.dst, rows.dst_pitch), (rows.src, rows.src_pitch)] {
            let len = (rows.count - 1).saturating_mul(pitch).saturating_add(rows.len);
            for border in seen.values().flat_map(|it| it.borders(addr, len)) {
                let (row, inside) = (border / pitch, border % pitch);
                if inside < rows.len {
                    found.insert(row);
                }
                if inside > 0 {
                    found.insert(row + 1);
                }
            }
        }
        found.into_iter().filter(|row| (1..rows.count).contains(row)).collect()
    }

    /// As [`PageLocks::copy`], of rows that `block` copies at once.
    pub(crate) fn copy_rows<E>(
        &self,
        rows: Rows,
        refused: impl Fn(&E) -> bool,
        copy: impl Fn(u64, u64, u64) -> Result<(), E>,
        block: impl Fn(Rows) -> Result<(), E>,
    ) -> Result<(), E> {
        let part = |from: u64, to: u64| {
            let src = rows.src.wrapping_add(from * rows.src_pitch);
            let dst = rows.dst.wrapping_add(from * rows.dst_pitch);
            match to - from {
                1 => self.copy([dst, src], rows.len, &refused, &copy),
                count => block(Rows { src, dst, count, ..rows }),
            }
        };
        match part(0, rows.count) {
            Err(error) if refused(&error) => {
                copy_parts(&self.row_borders(rows), (0, rows.count), error, &refused, &part)
            }
            done => done,
        }
    }

    /// Copies by `copy`, which takes a destination, a source and a length. Drivers refuse a copy
    /// that begins in one lock and ends in another or in none, with an error that `refused` knows
    /// (CUDA on H200, clr's `ihipMemcpy_validate`): where there are such borders inside, the parts
    /// between them are copied. That the copy is tried first leaves all others as quick as they are.
    ///
    /// Behind an error some parts may have been started.
    pub(crate) fn copy<E>(
        &self,
        [dst, src]: [u64; 2],
        len: u64,
        refused: impl Fn(&E) -> bool,
        copy: impl Fn(u64, u64, u64) -> Result<(), E>,
    ) -> Result<(), E> {
        match copy(dst, src, len) {
            Err(error) if refused(&error) => {
                let part = |from: u64, to: u64| {
                    copy(dst.wrapping_add(from), src.wrapping_add(from), to - from)
                };
                copy_parts(&self.borders([dst, src], len), (0, len), error, &refused, &part)
            }
            done => done,
        }
    }
}

/// Copies both halves of what was refused, and of those that are refused again: of the application's
/// memory not every page is a border, so that most parts are long.
fn copy_parts<E>(
    borders: &[u64],
    (from, to): (u64, u64),
    error: E,
    refused: &impl Fn(&E) -> bool,
    part: &impl Fn(u64, u64) -> Result<(), E>,
) -> Result<(), E> {
    let Some(&border) = borders.get(borders.len() / 2) else { return Err(error) };
    let (before, after) = (&borders[..borders.len() / 2], &borders[borders.len() / 2 + 1..]);
    for (borders, from, to) in [(before, from, border), (after, border, to)] {
        match part(from, to) {
            Err(error) if refused(&error) => {
                copy_parts(borders, (from, to), error, refused, part)?;
            }
            done => done?,
        }
    }
    Ok(())
}

/// Memory that a host device of another process exported: mapped here, and locked for a GPU.
#[derive(Debug)]
pub(crate) struct LockedFile<L: PageLocker + 'static> {
    locks: &'static PageLocks<L>,
    locker: Arc<L>,
    base: u64,
    /// Whole pages.
    len: u64,
}

impl<L: PageLocker> LockedFile<L> {
    /// Also returns where the device sees it.
    pub(crate) fn open(
        locks: &'static PageLocks<L>,
        locker: &Arc<L>,
        fd: OwnedFd,
        len: u64,
    ) -> Result<(u64, Self)> {
        let base = map(fd.as_fd(), len).map_err(|error| match error {
            rustix::io::Errno::INVAL => Error::BadExport {
                device: locker.to_string(),
                reason: format!("its file is shorter than {len} bytes, or cannot be mapped"),
            },
            error => system_error(locker, "mmap", len, error),
        })?;
        drop(fd);
        let (base, len) = whole_pages(base, len);
        let addr = locks.lock(locker, base, len).inspect_err(|_| unmap(base, len))?;
        Ok((addr, Self { locks, locker: Arc::clone(locker), base, len }))
    }

    pub(crate) fn close(self) -> Result<()> {
        let ended = self.locks.unlock(&self.locker, self.base, self.len);
        unmap(self.base, self.len);
        ended
    }
}

#[cfg(test)]
mod tests;
