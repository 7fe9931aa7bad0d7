//! How a simulated GPU shares its memory: whole allocations by handles, chunks by descriptors.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{Mode, OFlags, fstat, open};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};

use super::control::{Corrupt, SimControl};
use super::driver::SimDriver;
use crate::chunks;
use crate::device::{Allocation, Capabilities, Chunk, Export};
use crate::error::{Error, Result};
use crate::host::system_error;
use crate::software::{SharedMemory, map, map_at, reserve, unmap};
use crate::testing::{ChunkKind, ChunkedMemory};

/// What a handle says: where to find the memfd, and what it must turn out to be.
const HANDLE_BYTES: usize = 64;
const MAGIC: &[u8; 8] = b"simipc01";

/// Inodes that this process has mapped: a driver refuses a second mapping of one allocation.
static MAPPED: Mutex<Option<HashSet<u64>>> = Mutex::new(None);
/// Fresh bytes for every export.
static NONCE: AtomicU64 = AtomicU64::new(1);

fn mapped<R>(use_set: impl FnOnce(&mut HashSet<u64>) -> R) -> R {
    use_set(MAPPED.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// The memory of that handle may be mapped again.
pub(super) fn let_go(inode: u64) {
    mapped(|set| set.remove(&inode));
}

/// Maps the memory of a handle made by [`sim`](super::sim) as another library would do it,
/// bypassing kvferry, so that kvferry's own attempt meets a mapping that is not its own. Returns
/// how to end it.
///
/// # Errors
/// If the handle is not one of a live process.
pub fn map_as_another_library(handle: &[u8]) -> std::io::Result<impl FnOnce() + use<>> {
    let inode = parse(handle).ok_or(std::io::ErrorKind::InvalidInput)?.inode;
    mapped(|set| set.insert(inode));
    Ok(move || let_go(inode))
}

struct Handle {
    pid: u32,
    fd: u32,
    inode: u64,
}

fn parse(bytes: &[u8]) -> Option<Handle> {
    let bytes: &[u8; HANDLE_BYTES] = bytes.try_into().ok()?;
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    (bytes[..8] == *MAGIC).then(|| Handle {
        pid: word(8) as u32,
        fd: word(16) as u32,
        inode: word(24),
    })
}

/// What a mapping of another process's memory is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Opened {
    Handle {
        inode: u64,
    },
    /// Of a kind that may be mapped any number of times.
    Shared,
}

impl SimDriver {
    pub(super) fn opened(&self) -> MutexGuard<'_, HashMap<u64, Opened>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn unit(&self, addr: u64, len: u64) -> Option<Allocation> {
        let first = self.memory.find(addr)?;
        if self.memory.chunk(addr).is_none() {
            return Some(first);
        }
        let next = |at| {
            let chunk = self.memory.chunk(at).and_then(|_| self.memory.find(at));
            Ok::<_, Infallible>(chunk)
        };
        chunks::run(first, addr.saturating_add(len), next).ok()
    }

    /// The chunks of a unit that has some.
    fn chunks(&self, unit: &Allocation) -> impl Iterator<Item = Allocation> {
        let mut at = unit.base;
        let end = unit.base + unit.len;
        std::iter::from_fn(move || {
            let chunk = (at < end).then(|| self.memory.find(at)).flatten()?;
            at = chunk.base + chunk.len;
            Some(chunk)
        })
    }

    pub(super) fn check_export(&self, unit: &Allocation) -> Result<()> {
        let refused = |reason: &str| Error::NotExportable {
            device: self.info.to_string(),
            base: unit.base,
            reason: reason.into(),
        };
        if !self.info.capabilities.contains(Capabilities::IPC) {
            return Err(refused("this device has no IPC"));
        }
        let private =
            |chunk: &Allocation| self.memory.chunk(chunk.base) == Some(ChunkKind::Private);
        if self.chunks(unit).any(|chunk| private(&chunk)) {
            return Err(refused(chunks::NOT_SHAREABLE));
        }
        Ok(())
    }

    pub(super) fn export_handle(&self, allocation: &Allocation) -> Result<Export> {
        self.call("export")?;
        let stat = self.memory.with_fd(allocation.base, |fd| (fd.as_raw_fd(), fstat(fd)));
        let (number, stat) = stat.ok_or_else(|| self.unknown(allocation.base))?;
        let inode = stat.map_err(|error| system_error(&self.info, "fstat", 0, error))?.st_ino;
        let mut bytes = Vec::with_capacity(HANDLE_BYTES);
        bytes.extend_from_slice(MAGIC);
        for word in [
            u64::from(std::process::id()),
            number as u64,
            inode,
            NONCE.fetch_add(1, Ordering::Relaxed),
        ] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.resize(HANDLE_BYTES, 0);
        Ok(Export::Handle { bytes, len: allocation.len })
    }

    pub(super) fn export_chunks(&self, unit: &Allocation) -> Result<Export> {
        self.call("export")?;
        let shared = |chunk: Allocation| {
            let fd = self.memory.with_fd(chunk.base, |fd| fcntl_dupfd_cloexec(fd, 0));
            let fd = fd.ok_or_else(|| self.unknown(chunk.base))?;
            let fd = fd.map_err(|error| system_error(&self.info, "fcntl", chunk.len, error))?;
            Ok(Chunk { fd, len: chunk.len })
        };
        let chunks = self.chunks(unit).map(shared).collect::<Result<_>>()?;
        Ok(Export::Chunks { chunks, len: unit.len })
    }

    pub(super) fn open_handle(&self, bytes: &[u8], len: u64) -> Result<(u64, Opened)> {
        let handle =
            parse(bytes).ok_or_else(|| self.bad_export("not a handle of a simulated GPU"))?;
        if handle.pid == std::process::id() {
            return Err(Error::SameProcess { device: self.info.to_string() });
        }
        let path = format!("/proc/{}/fd/{}", handle.pid, handle.fd);
        let fd = open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|error| {
            self.bad_export(format!("its process is gone or refuses us: {error}"))
        })?;
        if fstat(&fd).map_or(0, |stat| stat.st_ino) != handle.inode {
            return Err(self.bad_export("the memory was freed"));
        }
        if !mapped(|set| set.insert(handle.inode)) {
            return Err(Error::AlreadyMapped { device: self.info.to_string(), bytes: len });
        }
        let base = match self.control.corrupt() {
            None => map(fd.as_fd(), len),
            Some(corrupt) => map_corrupt(fd.as_fd(), len, corrupt),
        };
        let base = base.map_err(|error| {
            let_go(handle.inode);
            system_error(&self.info, "mmap", len, error)
        })?;
        Ok((base, Opened::Handle { inode: handle.inode }))
    }

    pub(super) fn open_chunks(&self, chunks: Vec<Chunk>, len: u64) -> Result<(u64, Opened)> {
        chunks::check(&chunks, len).map_err(|reason| self.bad_export(reason))?;
        let failed = |error| system_error(&self.info, "mmap", len, error);
        let base = reserve(len).map_err(failed)?;
        let mut at = base;
        let imported = chunks.into_iter().try_for_each(|Chunk { fd, len }| {
            self.call("import")?;
            map_at(at, fd.as_fd(), len).map_err(failed)?;
            at += len;
            Ok(())
        });
        if let Err(error) = imported {
            unmap(base, len);
            return Err(error);
        }
        Ok((base, Opened::Shared))
    }
}

/// A mapping of the file that is private, or one of no file at all.
fn map_corrupt(fd: BorrowedFd<'_>, len: u64, corrupt: Corrupt) -> rustix::io::Result<u64> {
    let (at, len) = (std::ptr::null_mut(), len as usize);
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice aliases nothing of ours.
    let base = unsafe {
        match corrupt {
            Corrupt::Reads => mmap_anonymous(at, len, protection, MapFlags::PRIVATE),
            Corrupt::Writes => mmap(at, len, protection, MapFlags::PRIVATE, fd, 0),
        }
    }?;
    Ok(base as u64)
}

impl SimControl {
    /// Memory of the device as a virtual memory API makes it, `kinds.len()` chunks of `chunk_len`
    /// bytes, which is a multiple of the page size.
    ///
    /// # Panics
    /// If the system has no memory for it.
    pub fn map_chunks(&self, chunk_len: u64, kinds: &[ChunkKind]) -> SimChunks {
        let len = chunk_len * kinds.len() as u64;
        let base = reserve(len).expect("addresses");
        let memory = Arc::clone(&self.memory);
        let mut chunks = SimChunks { base, chunk_len, len, memory };
        kinds.iter().enumerate().for_each(|(index, &kind)| chunks.replace(index, kind));
        chunks
    }
}

/// Chunks of a simulated GPU.
#[derive(Debug)]
pub struct SimChunks {
    base: u64,
    chunk_len: u64,
    len: u64,
    memory: Arc<SharedMemory>,
}

impl ChunkedMemory for SimChunks {
    fn addr(&self) -> u64 {
        self.base
    }

    fn chunk_len(&self) -> u64 {
        self.chunk_len
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn replace(&mut self, index: usize, kind: ChunkKind) {
        let addr = self.base + index as u64 * self.chunk_len;
        // None where there was a hole.
        let _ = self.memory.unmap_chunk(addr);
        if kind != ChunkKind::Hole {
            self.memory.map_chunk(addr, self.chunk_len, kind).expect("memory for a chunk");
        }
    }
}

impl Drop for SimChunks {
    fn drop(&mut self) {
        for index in 0..self.len / self.chunk_len {
            let _ = self.memory.unmap_chunk(self.base + index * self.chunk_len);
        }
        unmap(self.base, self.len);
    }
}
