use std::fmt::{self, Display};
use std::time::Duration;

use crate::batch::{BatchId, Path};

/// Which end of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// This engine's memory.
    Local,
    /// The target's memory.
    Remote,
}

impl Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Local => "local",
            Self::Remote => "remote",
        })
    }
}

/// What is wrong with a list of ranges. Nothing of the list was submitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    /// No registered region holds the address.
    #[error("range {index}: {side} address {addr:#x} ({len} bytes) is in no registered region")]
    NotRegistered {
        /// Position in the list.
        index: usize,
        /// Which end.
        side: Side,
        /// First byte of the range.
        addr: u64,
        /// Bytes of the range.
        len: u64,
    },
    /// The range begins inside registered memory and ends beyond it.
    #[error(
        "range {index}: {side} [{addr:#x}, {addr:#x} + {len}) leaves the registered region [{start:#x}, {start:#x} + {region}) by {beyond} bytes"
    )]
    OutOfBounds {
        /// Position in the list.
        index: usize,
        /// Which end.
        side: Side,
        /// First byte of the range.
        addr: u64,
        /// Bytes of the range.
        len: u64,
        /// First byte of the region.
        start: u64,
        /// Bytes of the region.
        region: u64,
        /// Bytes of the range behind the region's end.
        beyond: u64,
    },
    /// Address plus length is more than an address can hold.
    #[error(
        "range {index}: {side} address {addr:#x} + {len} bytes passes the end of the address space"
    )]
    Overflow {
        /// Position in the list.
        index: usize,
        /// Which end.
        side: Side,
        /// First byte of the range.
        addr: u64,
        /// Bytes of the range.
        len: u64,
    },
    /// Two ranges write the same byte; copies of one batch have no order.
    #[error(
        "ranges {first} and {second} both write {side} address {addr:#x}: put them in two batches"
    )]
    DestinationsOverlap {
        /// Position of the one.
        first: usize,
        /// Position of the other.
        second: usize,
        /// Which end is written.
        side: Side,
        /// First byte that both write.
        addr: u64,
    },
    /// The same, as a device finds it out: it does not know which the other range is.
    #[error(
        "range {index} writes a byte at its {side} end that another range writes, too: put them in two batches (MC_KVFERRY_OVERLAP_CHECK=before names both)"
    )]
    DestinationShared {
        /// Position of the range.
        index: usize,
        /// Which end is written.
        side: Side,
    },
    /// One range reads what another (or itself) writes; copies of one batch have no order.
    #[error(
        "range {reader} reads address {addr:#x}, which range {writer} writes: put them in two batches"
    )]
    SourceOverwritten {
        /// Position of the range that reads.
        reader: usize,
        /// Position of the range that writes.
        writer: usize,
        /// First byte that is both.
        addr: u64,
    },
    /// The local ends lie on several devices.
    #[error(
        "range {index}: its local end is on {device}, an earlier one is on {first}: submit one batch per device"
    )]
    MixedDevices {
        /// Position of the range.
        index: usize,
        /// Its device.
        device: String,
        /// The device of the ranges before it.
        first: String,
    },
}

/// A page of a form: what an error names beside the form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormPage {
    /// Its number.
    pub number: u32,
    /// Position in the list of numbers.
    pub position: usize,
}

/// A piece of a form: `piece` counts in the order page, layer, row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormPiece {
    /// Position of the form in the list.
    pub form: usize,
    /// Position of the piece in the form's expansion.
    pub piece: u64,
}

impl Display for FormPiece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "piece {} of form {}", self.piece, self.form)
    }
}

/// What is wrong with a list of compact forms. Nothing of the list was submitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormError {
    /// The two ends of a paged form do not name equally many pages.
    #[error(
        "form {form}: {local} local page numbers and {remote} remote ones: give one of each for every page"
    )]
    PageCounts {
        /// Position in the list.
        form: usize,
        /// Local page numbers.
        local: usize,
        /// Remote page numbers.
        remote: usize,
    },
    /// No registered region holds the form's first byte.
    #[error(
        "form {form}: {side} address {addr:#x}{} is in no registered region: register it, or correct the form's address and numbers",
        of_page(page)
    )]
    NotRegistered {
        /// Position in the list.
        form: usize,
        /// Which end.
        side: Side,
        /// First byte of the whole expansion.
        addr: u64,
        /// The page that lies lowest.
        page: Option<FormPage>,
    },
    /// The form begins inside registered memory and ends beyond it.
    #[error(
        "form {form}: {side} [{addr:#x}, {addr:#x} + {len}){} leaves the registered region [{start:#x}, {start:#x} + {region}) by {beyond} bytes: correct the form, or split it so that each part lies in one region",
        of_page(page)
    )]
    OutOfBounds {
        /// Position in the list.
        form: usize,
        /// Which end.
        side: Side,
        /// First byte of the whole expansion.
        addr: u64,
        /// Bytes from the first to the last of the whole expansion.
        len: u64,
        /// The page that lies highest.
        page: Option<FormPage>,
        /// First byte of the region.
        start: u64,
        /// Bytes of the region.
        region: u64,
        /// Bytes of the expansion behind the region's end.
        beyond: u64,
    },
    /// An address of the expansion is more than an address can hold.
    #[error(
        "form {form}: {side} address {addr:#x} and its strides{} pass the end of the address space: correct the form's counts and strides",
        of_page(page)
    )]
    Overflow {
        /// Position in the list.
        form: usize,
        /// Which end.
        side: Side,
        /// Address that the form gives.
        addr: u64,
        /// The page that lies highest.
        page: Option<FormPage>,
    },
    /// The list up to this form has more pieces, or more bytes, than 64 bits can count.
    #[error(
        "form {form}: the list has 2^64 pieces or bytes, or more, up to here: correct the form, or split the list"
    )]
    TooLarge {
        /// Position in the list.
        form: usize,
    },
    /// Two pieces write the same byte; copies of one batch have no order.
    #[error("{first} and {second} both write {side} address {addr:#x}: put them in two batches")]
    DestinationsOverlap {
        /// The one.
        first: FormPiece,
        /// The other.
        second: FormPiece,
        /// Which end is written.
        side: Side,
        /// First byte that both write.
        addr: u64,
    },
    /// One piece reads what another (or itself) writes; copies of one batch have no order.
    #[error("{reader} reads address {addr:#x}, which {writer} writes: put them in two batches")]
    SourceOverwritten {
        /// The piece that reads.
        reader: FormPiece,
        /// The piece that writes.
        writer: FormPiece,
        /// First byte that is both.
        addr: u64,
    },
    /// The strides alone do not show that no byte is written twice, and there are too many pieces
    /// to look at each.
    #[error(
        "whether any of {pieces} pieces overlap is not seen from their strides, and more than {limit} are not compared one by one: split the list, or set MC_KVFERRY_OVERLAP_CHECK=off"
    )]
    TooManyPieces {
        /// Pieces of the list.
        pieces: u64,
        /// Pieces that are compared at most.
        limit: u64,
    },
}

fn but_for(stay: &[u64]) -> String {
    if stay.is_empty() {
        return String::new();
    }
    let stay: Vec<_> = stay.iter().map(|addr| format!("{addr:#x}")).collect();
    let stay = stay.join(", ");
    format!(" but for those in use, at {stay}: keep their memory, and unregister them later")
}

fn of_page(page: &Option<FormPage>) -> String {
    page.map_or(String::new(), |FormPage { number, position }| {
        format!(" (page {number}, at position {position} of the list)")
    })
}

/// What the engine can fail with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The list of ranges is wrong.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The list of compact forms is wrong.
    #[error(transparent)]
    Form(#[from] FormError),
    /// The parts of a batch are not all copied by one device, which is that of their local ends or,
    /// for host memory, the GPU that reaches the remote ones.
    #[error(
        "part {part} is copied by {device}, an earlier one by {first}: submit one batch per device"
    )]
    MixedParts {
        /// Position of the part, without those that are empty.
        part: usize,
        /// Its device.
        device: String,
        /// The device of the parts before it.
        first: String,
    },
    /// The process was forked after the engine was made: only its parent can use the engine.
    #[error(
        "the engine was made by process {owner}, of which this is a fork, and no driver survives that: use it there, or start processes without fork"
    )]
    OtherProcess {
        /// Who made it.
        owner: u32,
    },
    /// A device call failed.
    #[error(transparent)]
    Device(#[from] kvferry_device::Error),
    /// The region to register is empty or passes the end of the address space.
    #[error("a region of {len} bytes at {addr:#x} cannot be registered")]
    BadRegion {
        /// First byte.
        addr: u64,
        /// Bytes.
        len: u64,
    },
    /// No device of the engine owns the memory.
    #[error(
        "{addr:#x} is memory of none of {devices}; host memory is registered with an engine that has the device host, too"
    )]
    NotDeviceMemory {
        /// First byte.
        addr: u64,
        /// The devices that were asked.
        devices: String,
    },
    /// The region to register leaves the allocation that it begins in.
    #[error(
        "region [{addr:#x}, {addr:#x} + {len}) leaves its allocation [{base:#x}, {base:#x} + {allocation})"
    )]
    LeavesAllocation {
        /// First byte of the region.
        addr: u64,
        /// Bytes of the region.
        len: u64,
        /// First byte of the allocation.
        base: u64,
        /// Bytes of the allocation.
        allocation: u64,
    },
    /// A registered region holds some of these bytes, or one whose unregistering has not ended.
    #[error(
        "region [{addr:#x}, {addr:#x} + {len}) overlaps [{start:#x}, {start:#x} + {region}), which is already registered"
    )]
    AlreadyRegistered {
        /// First byte of the new region.
        addr: u64,
        /// Bytes of the new region.
        len: u64,
        /// First byte of the registered region.
        start: u64,
        /// Bytes of the registered region.
        region: u64,
    },
    /// One of several regions could not be registered; those before it were taken back.
    #[error(
        "region {index} of the list: {error}; the {index} regions before it were unregistered again{}",
        but_for(stay)
    )]
    RegionOfList {
        /// Position in the list.
        index: usize,
        /// Why.
        #[source]
        error: Box<Error>,
        /// First bytes of those before it that are registered all the same: something used them
        /// already. Their memory must stay, and they are the caller's to unregister.
        stay: Vec<u64>,
    },
    /// No region begins at that address.
    #[error("no registered region begins at {addr:#x}")]
    UnknownRegion {
        /// The address given.
        addr: u64,
    },
    /// Batches still use the region.
    #[error("{batches} batches still use the region at {addr:#x} after {} s: the region stays registered, keep its memory", waited.as_secs())]
    RegionBusy {
        /// First byte of the region.
        addr: u64,
        /// Batches in flight.
        batches: usize,
        /// How long they were waited for.
        waited: Duration,
    },
    /// The id was released, or is of another engine.
    #[error("batch {0} does not exist: it was released, or is another engine's")]
    UnknownBatch(BatchId),
    /// The batch runs; it can be released once it ended.
    #[error("batch {0} is still running: wait for it before releasing it")]
    BatchBusy(BatchId),
    /// No allocation with that name holds a registered region.
    #[error(
        "no registered region lies in allocation {id} of device {device}: it was unregistered, fetch the segment again"
    )]
    UnknownAllocation {
        /// Device of the allocation.
        device: String,
        /// Number of the allocation.
        id: u64,
    },
    /// The segment contradicts itself or is another engine's.
    #[error("the segment of {peer} is not usable: {reason}")]
    BadSegment {
        /// The peer.
        peer: String,
        /// What is wrong.
        reason: String,
    },
    /// The peer is gone.
    #[error("peer {peer} is lost: {reason}")]
    PeerLost {
        /// The peer.
        peer: String,
        /// What was seen.
        reason: String,
    },
    /// The peer did not hand out an export.
    #[error("peer {peer} gave no export of allocation {id}: {reason}")]
    ExportRefused {
        /// The peer.
        peer: String,
        /// Number of the allocation.
        id: u64,
        /// What it said, or what failed.
        reason: String,
    },
    /// Another library, or another engine of this process, has the peer's allocation mapped.
    #[error(
        "{device} cannot map [{base:#x}, {base:#x} + {len}) of peer {peer} (process {pid}): another library of this process has it mapped; close that mapping first"
    )]
    MappedElsewhere {
        /// The local device.
        device: String,
        /// The peer.
        peer: String,
        /// The peer's process.
        pid: u32,
        /// First byte of the allocation, an address of the peer.
        base: u64,
        /// Bytes of the allocation.
        len: u64,
    },
    /// No device of this engine can read and write both ends.
    #[error(
        "{device} cannot reach memory of {peer} on device {remote}: no peer access between them, *_VISIBLE_DEVICES hides it from this process, or, where the local end is host memory, this engine has no GPU that reaches both (TCP would, if the peer serves the batch protocol and MC_KVFERRY_STRICT is off; MC_FORCE_TCP=1 means it)"
    )]
    Unreachable {
        /// The device of the local end.
        device: String,
        /// The peer.
        peer: String,
        /// The device of the remote end.
        remote: String,
    },
    /// A pair of devices was tried out and does not work, whatever the driver says of it. This
    /// engine does not use it again.
    #[error(
        "{device} is not used with memory of {peer} on device {remote}: {what}; the driver calls the pair reachable, so check the IOMMU and PCIe ACS settings and the driver (MC_KVFERRY_PROOF=off skips this check, at your own risk; MC_FORCE_TCP=1 goes another way)"
    )]
    Unproven {
        /// The local device.
        device: String,
        /// The peer.
        peer: String,
        /// The peer's device.
        remote: String,
        /// What went wrong: the first wrong byte, or the driver's word.
        what: String,
    },
    /// The peer's export of an allocation is of no use here.
    #[error(
        "{device} cannot map [{base:#x}, {base:#x} + {len}) of peer {peer}: {reason} (MC_FORCE_TCP=1 goes another way)"
    )]
    NotOpened {
        /// The local device.
        device: String,
        /// The peer.
        peer: String,
        /// First byte of the allocation, an address of the peer.
        base: u64,
        /// Bytes of the allocation.
        len: u64,
        /// The driver's word.
        reason: String,
    },
    /// The peer took no part in trying out a pair of devices. The next submission tries again.
    #[error(
        "{device} and {peer}'s device {remote} could not be tried out before traffic uses them: {reason} (MC_KVFERRY_PROOF=off skips this check, at your own risk)"
    )]
    ProbeRefused {
        /// The local device.
        device: String,
        /// The peer.
        peer: String,
        /// The peer's device.
        remote: String,
        /// What it said, or what failed.
        reason: String,
    },
    /// The device has no copy kernel, and the batch has pieces that the kernel should take.
    #[error(
        "{device} would move this batch to or from {peer} by {path}, as it has no copy kernel: {reason} (MC_KVFERRY_STRICT=1 refuses that; MC_KVFERRY_KERNEL=off means it)"
    )]
    Fallback {
        /// The device of the local end.
        device: String,
        /// The peer, or the peers.
        peer: String,
        /// What would move the bytes.
        path: Path,
        /// Why there is no kernel.
        reason: String,
    },
    /// There is no device memory to stage a batch in.
    #[error(
        "{device} would move this batch to or from {peer} by {path}, as it has no memory to stage it in: {reason} (MC_KVFERRY_STRICT=1 refuses that; MC_KVFERRY_OFFLOAD_BOUNCE_MB says how much is asked for)"
    )]
    NoDeviceMemory {
        /// The device.
        device: String,
        /// The peer, or the peers.
        peer: String,
        /// What would move the bytes.
        path: Path,
        /// The device's word.
        reason: String,
    },
    /// There is nothing to measure on a device without a copy kernel.
    #[error("{device} has no copy kernel, and so nothing to calibrate: {reason}")]
    NoKernel {
        /// The device.
        device: String,
        /// Why there is none.
        reason: String,
    },
    /// No device of this engine has that identity.
    #[error("no device {device} in this engine: its devices are {devices}")]
    UnknownDevice {
        /// The identity asked for.
        device: String,
        /// The devices that there are.
        devices: String,
    },
    /// A transfer over TCP failed. Its destination is undefined.
    #[error("the transfer with {peer} over TCP failed: {reason}")]
    Tcp {
        /// The peer.
        peer: String,
        /// What it said, or what was seen of it.
        reason: String,
    },
    /// Memory that is reached by TCP alone, and that the peer does not serve there.
    #[error(
        "{peer} does not serve its region at {addr:#x} over TCP, and no mapping reaches it from here: host memory that did not come from kvferry cannot be mapped"
    )]
    NotServed {
        /// The peer.
        peer: String,
        /// First byte of the region.
        addr: u64,
    },
    /// GPU memory would go over TCP by a slower path.
    #[error(
        "{device} would move this batch to or from {peer} piece by piece over TCP: {reason} (MC_KVFERRY_STRICT=1 refuses that)"
    )]
    NotStaged {
        /// The device.
        device: String,
        /// The peer.
        peer: String,
        /// Why it is not staged.
        reason: String,
    },
    /// More host memory would be page-locked than the budget allows.
    #[error(
        "page-locking {bytes} bytes of host memory would pass the budget: {used} of {budget} bytes are locked; free some, or raise MC_KVFERRY_PINNED_MB"
    )]
    PinnedBudget {
        /// Bytes to lock.
        bytes: u64,
        /// Bytes that are locked.
        used: u64,
        /// Most that may be.
        budget: u64,
    },
    /// A stream, or a batch, is to wait for a batch that a device's queue does not hold the whole of: one
    /// that is submitted step by step, or one over TCP, which no queue holds.
    #[error(
        "batch {0} is moved step by step or over TCP and has not come far enough for a device to wait for it: wait for it on the host (poll, wait or the eventfd), then launch or submit what needs it"
    )]
    NotAllSubmitted(BatchId),
    /// [`Engine::cancel`](crate::Engine::cancel) ended the batch before all of it was moved.
    #[error("the batch was cancelled before all of its bytes were moved")]
    Cancelled,
    /// The engine was dropped before all of a batch was submitted.
    #[error("the engine was dropped before all of the batch was submitted")]
    Stopped,
    /// The key of the lanes cannot be used.
    #[error("MC_KVFERRY_AUTH_KEY_FILE={path}: {reason}")]
    AuthKey {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Nothing can listen there.
    #[error("listening for lanes on {address}: {reason}")]
    Listen {
        /// The address.
        address: std::net::SocketAddr,
        /// The system's word.
        reason: String,
    },
    /// The system refused something that the engine needs.
    #[error("{call} failed: {reason}")]
    System {
        /// What was called.
        call: &'static str,
        /// The system's word.
        reason: String,
    },
}

impl Error {
    /// What kind of failure it is, as metrics and spans name it: a handful of names, for alarms.
    pub fn kind(&self) -> &'static str {
        use kvferry_device::Error as Device;
        match self {
            Self::Range(_)
            | Self::Form(_)
            | Self::MixedParts { .. }
            | Self::Device(Device::NotOrderable { .. } | Device::BadSize { .. }) => "bad_request",
            Self::PeerLost { .. } => "peer_lost",
            Self::Tcp { .. } | Self::NotServed { .. } => "tcp",
            Self::ExportRefused { .. } | Self::ProbeRefused { .. } | Self::BadSegment { .. } => {
                "peer_refused"
            }
            Self::Unreachable { .. }
            | Self::Unproven { .. }
            | Self::NotOpened { .. }
            | Self::MappedElsewhere { .. } => "unreachable",
            Self::Fallback { .. } | Self::NoDeviceMemory { .. } | Self::NotStaged { .. } => {
                "slower_way_refused"
            }
            Self::PinnedBudget { .. } | Self::Device(Device::OutOfMemory { .. }) => "out_of_memory",
            Self::Device(Device::Lost { .. } | Device::Stalled { .. }) => "device_lost",
            Self::Device(_) => "device",
            Self::Cancelled => "cancelled",
            Self::Stopped => "stopped",
            _ => "other",
        }
    }
}

/// An engine result.
pub type Result<T, E = Error> = std::result::Result<T, E>;
