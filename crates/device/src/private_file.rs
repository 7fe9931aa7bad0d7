//! Files that only this user can have written: what a process kept on disk for later ones.
//!
//! What is read decides what runs on a device and how, so a file counts only if nobody else can
//! have written it.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, open, openat};
use rustix::process::geteuid;

/// Reads the first `most` bytes of a file of `directory`.
///
/// # Errors
/// The system's; `NotFound` if there is no such file or directory; `InvalidData` for a file or a
/// directory that others own or may write, and for what is no regular file.
pub fn read(directory: &Path, name: &str, most: u64) -> io::Result<Vec<u8>> {
    let directory = open_directory(directory)?;
    // Not blocking, should the name be a pipe: it is refused below.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = openat(&directory, name, flags, Mode::empty())?;
    let stat = only_ours(file.as_fd())?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(refused("not a regular file"));
    }
    let mut bytes = Vec::new();
    File::from(file).take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Makes `parts`, one behind the other, the whole file; other processes see the old one or the new
/// one. Makes the directory, with mode 0700, if there is none.
///
/// # Errors
/// As [`read`] of the directory, and the system's.
pub fn replace(directory: &Path, name: &str, parts: &[&[u8]]) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    open_directory(directory)?;
    // Nothing is synced: whoever reads finds by a digest what a crash may leave behind.
    let mut file = tempfile::Builder::new().prefix(".new-").tempfile_in(directory)?;
    for part in parts {
        file.write_all(part)?;
    }
    file.persist(directory.join(name))?;
    Ok(())
}

fn open_directory(path: &Path) -> io::Result<impl AsFd> {
    let directory =
        open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    only_ours(directory.as_fd())?;
    Ok(directory)
}

/// Refuses what another user owns or may write. Judges the open file, not its name, which may
/// mean something else a moment later.
fn only_ours(fd: BorrowedFd<'_>) -> io::Result<Stat> {
    let stat = fstat(fd)?;
    if stat.st_uid != geteuid().as_raw() {
        return Err(refused("it belongs to another user"));
    }
    if Mode::from_raw_mode(stat.st_mode).intersects(Mode::WGRP | Mode::WOTH) {
        return Err(refused("others may write to it"));
    }
    Ok(stat)
}

fn refused(reason: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}
