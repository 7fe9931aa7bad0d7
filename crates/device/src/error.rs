use std::time::Duration;

use crate::queue::Ticket;

/// What a device call can fail with: what failed, on which device, in the driver's own words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The vendor's library cannot be opened on this machine.
    #[error(
        "cannot load {library}: {reason}; install the vendor's driver or add its folder to LD_LIBRARY_PATH"
    )]
    LibraryMissing {
        /// File name that was looked for.
        library: &'static str,
        /// Why opening it failed.
        reason: String,
    },
    /// The vendor's library is there but lacks a function that kvferry calls.
    #[error("{library} has no function {symbol}: the installed driver is too old for kvferry")]
    SymbolMissing {
        /// The library that was opened.
        library: &'static str,
        /// The function that it lacks.
        symbol: &'static str,
    },
    /// No device of that kind, or fewer than asked for.
    #[error("no device {device}: {reason}")]
    NoDevice {
        /// The device asked for, such as `cuda:3`.
        device: String,
        /// Why there is none.
        reason: String,
    },
    /// A driver call failed.
    #[error("{call} failed on {device}: {name} ({code})")]
    Call {
        /// The driver's function.
        call: &'static str,
        /// The device it ran on.
        device: String,
        /// The driver's name for the failure.
        name: String,
        /// The driver's number for the failure.
        code: i32,
    },
    /// The device has no room for an allocation.
    #[error(
        "{device} is out of {kind} memory: {bytes} bytes asked for; free some, or ask for less"
    )]
    OutOfMemory {
        /// The device asked.
        device: String,
        /// `device` or `pinned host`.
        kind: &'static str,
        /// Bytes asked for.
        bytes: u64,
    },
    /// The device stopped working; nothing submitted to it will complete.
    #[error(
        "{device} is lost: {cause}; every transfer on it has failed, restart the process to use it again"
    )]
    Lost {
        /// The device that is gone.
        device: String,
        /// What was seen.
        cause: String,
    },
    /// Work that was submitted made no progress for too long.
    #[error("{device} made no progress for {} s", waited.as_secs())]
    Stalled {
        /// The device that is silent.
        device: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The address is in no allocation of this device.
    #[error("{addr:#x} is not memory of {device}")]
    UnknownAddress {
        /// The device asked.
        device: String,
        /// The address asked for.
        addr: u64,
    },
    /// The memory cannot be opened by another process.
    #[error(
        "the allocation at {base:#x} of {device} cannot be exported to another process: {reason}"
    )]
    NotExportable {
        /// The device that owns the memory.
        device: String,
        /// Base of the allocation.
        base: u64,
        /// Why, and what to do.
        reason: String,
    },
    /// Host memory that is not all there, or may not be used.
    #[error(
        "[{addr:#x}, {addr:#x} + {len}) is not host memory that this process can read and write: at {at:#x} {reason}"
    )]
    NotAccessible {
        /// First byte.
        addr: u64,
        /// Bytes.
        len: u64,
        /// A byte that cannot be used.
        at: u64,
        /// Why.
        reason: String,
    },
    /// Another library (or another part of this process) holds a mapping of the same allocation.
    #[error(
        "the allocation of {bytes} bytes exported for {device} is already mapped in this process by someone else: close that mapping first"
    )]
    AlreadyMapped {
        /// The device that should have opened it.
        device: String,
        /// Bytes of the allocation.
        bytes: u64,
    },
    /// The export came from this process; use the address itself.
    #[error(
        "the export was made by this process: {device} uses the address itself instead of a mapping"
    )]
    SameProcess {
        /// The device that was asked to open it.
        device: String,
    },
    /// The export is malformed, stale, or of another kind of device.
    #[error("{device} cannot open the export: {reason}")]
    BadExport {
        /// The device that was asked to open it.
        device: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The process, or the machine, has no file descriptor left.
    #[error(
        "{call} failed on {device}: no file descriptor is left; raise the limit of this process (ulimit -n, RLIMIT_NOFILE) and try again: nothing was changed"
    )]
    OutOfDescriptors {
        /// The call that needed one.
        call: &'static str,
        /// The device whose memory it is about.
        device: String,
    },
    /// What a transfer should wait for, or what should wait for it, cannot be waited for.
    #[error("{device} cannot order a transfer with that {what}: {reason}")]
    NotOrderable {
        /// The device that was asked.
        device: String,
        /// `stream` or `event`.
        what: &'static str,
        /// Why, and what to do.
        reason: String,
    },
    /// Zero bytes were asked for, or more than an address can hold.
    #[error("{bytes} bytes cannot be allocated on {device}")]
    BadSize {
        /// The device asked.
        device: String,
        /// Bytes asked for.
        bytes: u64,
    },
}

/// A device result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A submission that failed, and what is still running because of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct SubmitError {
    /// Why it failed.
    #[source]
    pub error: Error,
    /// What the failed submission left behind.
    pub left: Left,
}

/// What a failed submission left running. `Err` does not mean idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Nothing was enqueued; the ranges are free at once.
    Nothing,
    /// Some copies may run until this submission is done.
    Until(Ticket),
    /// Nobody can tell: keep the ranges for the life of the process. The queue is lost.
    Unknown,
}
