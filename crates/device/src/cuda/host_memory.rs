//! Host memory that a GPU uses in place: page-locked where it is, and let go.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;

use super::CudaDriver;
use super::context::Context;
use super::ipc::Opened;
use super::library::Failure;
use crate::error::{Error, Result};
use crate::host::{system_error, whole_pages};
use crate::software::{map, unmap};

/// Most bytes page-locked by one call: drivers from R580 on fail at 512 GiB of small pages
/// (PEERS.md).
const PIECE: u64 = 64 << 30;

/// Page-locked memory; [`Pinning::end`] unlocks it.
#[derive(Debug)]
pub(super) struct Pinning {
    /// Of the device that asked first, kept because the driver books the lock there.
    context: Arc<Context>,
    /// Bytes of each piece from the front; none if the application had locked it before.
    pieces: Vec<u64>,
}

/// Locked memory of this process, by address and length. The driver locks whole pages and none
/// twice, and every GPU may ask, so buffers that share a page share its lock.
///
/// The lock is held while memory is locked and unlocked, which may take seconds for tens of GB:
/// asking for the same range meanwhile must wait anyway, and the kernel lets one thread at a time
/// change a process's memory.
static LOCAL: Mutex<Option<HashMap<(u64, u64), Local>>> = Mutex::new(None);

#[derive(Debug)]
struct Local {
    pinning: Pinning,
    users: usize,
}

fn local() -> MutexGuard<'static, Option<HashMap<(u64, u64), Local>>> {
    LOCAL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// No two entries of the table overlap, so at most one covers a range.
fn covers((base, len): (u64, u64), (host, bytes): (u64, u64)) -> bool {
    base <= host && host + bytes <= base + len
}

impl Pinning {
    fn begin(context: &Arc<Context>, host: u64, len: u64) -> Result<Self, Failure> {
        let mut pinning = Self { context: Arc::clone(context), pieces: Vec::new() };
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        let mut done = 0;
        while done < len {
            let piece = PIECE.min(len - done);
            let at = (host + done) as *mut _;
            // SAFETY: the driver refuses memory that is not mapped; `end` undoes it.
            match unsafe { context.cuda.cuMemHostRegister_v2(at, piece as usize, flags) } {
                Ok(()) => pinning.pieces.push(piece),
                // By the application, which then owns the lock.
                Err(failure)
                    if done == 0
                        && failure.is(sys::CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) =>
                {
                    return Ok(pinning);
                }
                Err(failure) => {
                    let _ = pinning.end(host);
                    return Err(failure);
                }
            }
            done += piece;
        }
        Ok(pinning)
    }

    fn end(self, host: u64) -> Result<(), Failure> {
        let mut at = host;
        let mut ended = Ok(());
        for piece in self.pieces {
            // SAFETY: locked there, as one, by `begin`; nothing uses it any more.
            let unlocked = unsafe { self.context.cuda.cuMemHostUnregister(at as *mut _) };
            ended = ended.and(unlocked);
            at += piece;
        }
        ended
    }
}

impl CudaDriver {
    /// Maps and locks memory that a host device of another process exported.
    pub(super) fn open_host(&self, fd: OwnedFd, len: u64) -> Result<(u64, Opened)> {
        let base = map(fd.as_fd(), len).map_err(|error| match error {
            rustix::io::Errno::INVAL => self
                .bad_export(format!("its file is shorter than {len} bytes, or cannot be mapped")),
            error => system_error(&self.info, "mmap", len, error),
        })?;
        drop(fd);
        let pinned = Pinning::begin(&self.context, base, len)
            .map_err(|failure| self.pin_error(failure, len))
            .and_then(|pinning| match self.host_address(base, len) {
                Ok(addr) => Ok((addr, Opened::Host { base, pinning })),
                Err(error) => {
                    let _ = pinning.end(base);
                    Err(error)
                }
            });
        pinned.inspect_err(|_| unmap(base, len))
    }

    pub(super) fn close_host(&self, base: u64, len: u64, pinning: Pinning) -> Result<()> {
        let ended = pinning.end(base);
        unmap(base, len);
        ended.map_err(|failure| self.error(failure))
    }

    /// Locks memory of this process, or shares the lock of whoever asked for it before.
    pub(super) fn pin_local(&self, host: u64, len: u64) -> Result<u64> {
        let pages = whole_pages(host, len);
        let mut table = local();
        let table = table.get_or_insert_default();
        if let Some((_, known)) = table.iter_mut().find(|(known, _)| covers(**known, pages)) {
            let addr = self.host_address(host, len)?;
            known.users += 1;
            return Ok(addr);
        }
        if table.keys().any(|&(base, len)| base < pages.0 + pages.1 && pages.0 < base + len) {
            // Sharing that lock would end with its own user.
            return Err(Error::Call {
                call: "map_host",
                device: self.info.to_string(),
                name: format!(
                    "a part of the {len} bytes at {host:#x} is mapped already; map the whole once"
                ),
                code: 0,
            });
        }
        let pinning = Pinning::begin(&self.context, pages.0, pages.1)
            .map_err(|failure| self.pin_error(failure, len))?;
        match self.host_address(host, len) {
            Ok(addr) => {
                table.insert(pages, Local { pinning, users: 1 });
                Ok(addr)
            }
            Err(error) => {
                let _ = pinning.end(pages.0);
                Err(error)
            }
        }
    }

    pub(super) fn unpin_local(&self, host: u64, len: u64) -> Result<()> {
        let mut table = local();
        let table = table.get_or_insert_default();
        let pages = whole_pages(host, len);
        let known = table.iter_mut().find(|(known, _)| covers(**known, pages));
        let (&base, known) = known.ok_or_else(|| self.unknown(host))?;
        known.users -= 1;
        if known.users > 0 {
            return Ok(());
        }
        let Some(Local { pinning, .. }) = table.remove(&base) else { return Ok(()) };
        pinning.end(base.0).map_err(|failure| self.error(failure))
    }

    /// Where this device sees locked memory: in one piece, or not at all.
    fn host_address(&self, host: u64, len: u64) -> Result<u64> {
        let cuda = self.cuda();
        let at = |offset: u64| {
            let mut addr = 0;
            // SAFETY: the driver writes one address and refuses memory that is not locked.
            unsafe { cuda.cuMemHostGetDevicePointer_v2(&mut addr, (host + offset) as *mut _, 0) }
                .map_err(|failure| self.error(failure))?;
            Ok(addr)
        };
        let first = at(0)?;
        let ends = (1..len.div_ceil(PIECE)).map(|piece| piece * PIECE).chain([len - 1]);
        for offset in ends {
            if at(offset)? != first + offset {
                return Err(Error::Call {
                    call: "cuMemHostGetDevicePointer",
                    device: self.info.to_string(),
                    name: "the device sees the pieces of the host memory at scattered addresses"
                        .into(),
                    code: 0,
                });
            }
        }
        Ok(first)
    }

    fn pin_error(&self, failure: Failure, len: u64) -> Error {
        self.allocation_error(failure, "pinned host", len)
    }
}
