//! Host memory that no other process can map: what `malloc`, `mmap` or another library gave.
//!
//! Nobody promises anything about it but its owner, so the kernel is asked whether all of it is there
//! and may be read and written: what is not would end the process at the first transfer.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;

use crate::device::Allocation;
use crate::error::{Error, Result};
use crate::software::next_allocation;

/// Names the memory `[addr, addr + len)` of this process, which is not empty and does not pass the
/// end of the address space, as an allocation of its own that cannot be exported.
///
/// # Errors
/// [`Error::NotAccessible`] if some of it is not mapped, or may not be read and written.
pub fn private_memory(addr: u64, len: u64) -> Result<Allocation> {
    let refused = |at: u64, reason: String| Error::NotAccessible { addr, len, at, reason };
    let unreadable = |error: std::io::Error| refused(addr, format!("{MAPS}: {error}"));
    let end = addr.saturating_add(len);
    let mut at = addr;
    // Names of files may be any bytes.
    for line in BufReader::new(File::open(MAPS).map_err(unreadable)?).split(b'\n') {
        let line = line.map_err(unreadable)?;
        let line = String::from_utf8_lossy(&line);
        let Some(span) = Span::parse(&line).filter(|span| span.end > at) else { continue };
        if span.start > at {
            break;
        }
        if !span.may_read_and_write {
            return Err(refused(at, "it may not be read and written".into()));
        }
        at = span.end.min(end);
        if span.is_file && is_behind_the_end_of_its_file(at - 1) {
            return Err(refused(at - 1, "the file that is mapped there has ended".into()));
        }
        if at == end {
            return Ok(Allocation { base: addr, len, id: next_allocation() });
        }
    }
    Err(refused(at, "nothing is mapped".into()))
}

const MAPS: &str = "/proc/self/maps";

/// A line of [`MAPS`].
struct Span {
    start: u64,
    end: u64,
    may_read_and_write: bool,
    is_file: bool,
}

impl Span {
    /// Such as `7f0-800 rw-p 00000000 00:00 0   [heap]`; the last number is the file's.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let access = words.next()?;
        let inode = words.nth(2)?;
        Some(Self {
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
            may_read_and_write: access.starts_with("rw"),
            is_file: inode != "0",
        })
    }
}

/// Whether a touch of a mapped byte would be a bus error. The kernel reads it, so nothing happens
/// here if it would. A process that may not ask is believed.
fn is_behind_the_end_of_its_file(addr: u64) -> bool {
    let Ok(memory) = File::open("/proc/self/mem") else { return false };
    memory.read_at(&mut [0], addr).is_err()
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::fd::AsFd;
    use std::os::unix::ffi::OsStrExt;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};

    use super::*;
    use crate::software::{map, unmap};

    /// Three pages, of which the middle one is another mapping.
    struct Pages {
        base: u64,
        page: u64,
    }

    impl Pages {
        fn new() -> Self {
            let page = rustix::param::page_size() as u64;
            let access = ProtFlags::READ | ProtFlags::WRITE;
            let len = 3 * page as usize;
            // SAFETY: a new mapping at an address of the kernel's choice.
            let base =
                unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE) };
            Self { base: base.expect("memory") as u64, page }
        }

        fn protect(&self, access: MprotectFlags) {
            let middle = (self.base + self.page) as *mut _;
            // SAFETY: nothing uses it.
            unsafe { mprotect(middle, self.page as usize, access) }.expect("ours");
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: as above.
            unsafe { munmap(self.base as *mut _, 3 * self.page as usize) }.expect("ours");
        }
    }

    fn refused_at(addr: u64, len: u64) -> u64 {
        match private_memory(addr, len) {
            Err(Error::NotAccessible { at, .. }) => at,
            other => panic!("{len} bytes at {addr:#x}: {other:?}"),
        }
    }

    #[test]
    fn memory_of_any_kind_that_can_be_read_and_written_is_taken_and_never_under_one_number() {
        let heap = vec![7_u8; 100_001];
        let stack = [1_u8; 3];
        let pages = Pages::new();
        let mut numbers = Vec::new();
        for (addr, len) in [
            (heap.as_ptr() as u64, heap.len() as u64),
            (heap.as_ptr() as u64 + 1, 1),
            (stack.as_ptr() as u64, 3),
            (pages.base, 3 * pages.page),
            (pages.base, 3 * pages.page),
        ] {
            let found = private_memory(addr, len).expect("it is there");
            assert_eq!((found.base, found.len), (addr, len));
            assert!(!numbers.contains(&found.id));
            numbers.push(found.id);
        }
    }

    #[test]
    fn the_first_byte_that_cannot_be_used_is_named() {
        let pages = Pages::new();
        let Pages { base, page } = pages;
        for access in [MprotectFlags::empty(), MprotectFlags::READ] {
            pages.protect(access);
            private_memory(base, page).expect("the first page");
            private_memory(base + 2 * page, page).expect("the last page");
            assert_eq!(refused_at(base, 2 * page), base + page);
            assert_eq!(refused_at(base + 5, page), base + page);
            assert_eq!(refused_at(base + page + 7, 1), base + page + 7);
        }
        pages.protect(MprotectFlags::READ | MprotectFlags::WRITE);
        private_memory(base, 3 * page).expect("all of it");
        for (addr, len) in [(1, 1), (0x1000, 64), (1 << 60, 1), (u64::MAX - 1, 1)] {
            assert_eq!(refused_at(addr, len), addr);
        }
        refused_at(base, u64::MAX - base);
    }

    #[test]
    fn memory_behind_the_end_of_a_mapped_file_is_refused() {
        let page = rustix::param::page_size() as u64;
        let file = memfd_create("kvferry-test", MemfdFlags::CLOEXEC).expect("a file");
        ftruncate(&file, 3 * page).expect("grows");
        let base = map(file.as_fd(), 3 * page).expect("maps");
        private_memory(base, 3 * page).expect("all of it");
        ftruncate(&file, page).expect("shrinks");
        private_memory(base, page).expect("what is left");
        assert_eq!(refused_at(base, 2 * page), base + 2 * page - 1);
        unmap(base, 3 * page);
    }

    #[test]
    fn a_file_whose_name_is_no_text_hides_nothing_that_is_mapped_above_it() {
        let pages = Pages::new();
        let Pages { base, page } = pages;
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join(OsStr::from_bytes(b"\xff"));
        std::fs::write(&path, vec![1; page as usize]).expect("a file");
        let file = File::open(&path).expect("it is there");
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        // SAFETY: it takes the place of the first of our pages, which nothing uses.
        unsafe { mmap(base as *mut _, page as usize, ProtFlags::READ, flags, &file, 0) }
            .expect("maps");
        private_memory(base + page, 2 * page).expect("it is there");
        assert_eq!(refused_at(base, page), base);
    }
}
