//! What a device is: identity, memory, exports, queues.

use std::fmt::{self, Debug, Display};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::driver::Pinned;
use crate::error::Result;
use crate::pinned::PinnedMemory;
use crate::queue::{Queue, QueueOptions};

/// Who makes the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Vendor {
    /// This machine's memory, copied by its processor.
    Host,
    /// A GPU in host memory, for tests.
    Sim,
    /// An NVIDIA GPU.
    Cuda,
    /// An AMD GPU.
    Rocm,
}

impl Vendor {
    /// The prefix of device names: `cuda` in `cuda:0`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Sim => "sim",
            Self::Cuda => "cuda",
            Self::Rocm => "rocm",
        }
    }
}

/// Identity that is the same in every process of the host, whatever `*_VISIBLE_DEVICES` says.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceUuid(pub [u8; 16]);

impl Display for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl Debug for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

bitflags::bitflags! {
    /// What a device can do, as data: policy reads it, nobody guesses.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Capabilities: u32 {
        /// Many small copies run as one launch.
        const KERNEL = 1;
        /// Its memory can be opened by another process of this host.
        const IPC = 1 << 1;
        /// It can read and write the memory of at least one other device.
        const PEER = 1 << 2;
    }
}

/// Facts about a device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Who makes it.
    pub vendor: Vendor,
    /// Its number in this process; another process may count differently.
    pub ordinal: u32,
    /// The vendor's product name.
    pub name: String,
    /// Identity across processes.
    pub uuid: DeviceUuid,
    /// PCI address, where it has one: `0000:0f:00.0`.
    pub pci_bus_id: Option<String>,
    /// Compiler target, such as `sm_90`; empty where nothing is compiled.
    pub architecture: String,
    /// Bytes of memory that it owns.
    pub memory_bytes: u64,
    /// What it can do.
    pub capabilities: Capabilities,
    /// Where its copy kernel came from, or why it has none.
    pub kernel: String,
}

impl Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.vendor.name(), self.ordinal)
    }
}

/// The unit of exporting and mapping: one allocation of the driver, or, for memory of a virtual
/// memory API, a run of chunks that are mapped side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// First byte.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Number that no other allocation of this process and device gets, also after this one is
    /// freed and its address used again. Two runs have the same number only if all their chunks
    /// are the same, at the same addresses.
    pub id: u64,
}

/// What another process needs to map one whole allocation.
#[derive(Debug)]
pub enum Export {
    /// An opaque handle of the vendor. Two exports of one allocation may differ in every byte.
    Handle {
        /// The vendor's bytes.
        bytes: Vec<u8>,
        /// Bytes of the allocation.
        len: u64,
    },
    /// A file descriptor to map.
    File {
        /// The descriptor; it must travel by SCM_RIGHTS.
        fd: OwnedFd,
        /// Bytes of the allocation.
        len: u64,
    },
    /// Chunks to map side by side.
    Chunks {
        /// In order of address.
        chunks: Vec<Chunk>,
        /// Bytes of all of them.
        len: u64,
    },
    /// An allocation of a memory pool.
    Pool {
        /// The pool's descriptor; it must travel by SCM_RIGHTS.
        fd: OwnedFd,
        /// The vendor's bytes, which find the allocation in the pool.
        bytes: Vec<u8>,
        /// Bytes of the allocation.
        len: u64,
    },
}

/// Physical memory that is mapped, and exported, on its own.
#[derive(Debug)]
pub struct Chunk {
    /// Its descriptor; it must travel by SCM_RIGHTS.
    pub fd: OwnedFd,
    /// Bytes.
    pub len: u64,
}

impl Export {
    /// Bytes of the allocation.
    pub fn len(&self) -> u64 {
        match self {
            Self::Handle { len, .. }
            | Self::File { len, .. }
            | Self::Chunks { len, .. }
            | Self::Pool { len, .. } => *len,
        }
    }

    /// Never true: an empty allocation is not exported.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A device: owns memory, exports it, and opens queues that copy.
///
/// Every method may be called from any thread and leaves the calling thread's current device and
/// context as it found them, also when it fails. None uses the legacy default stream or waits for
/// the whole device.
pub trait Device: Debug + Send + Sync {
    /// Facts about the device.
    fn info(&self) -> &DeviceInfo;

    /// Allocates device memory; contents undefined. Aligned to at least 256 bytes.
    fn allocate(self: Arc<Self>, bytes: u64) -> Result<Memory>;

    /// Allocates page-locked host memory, zeroed, that the processor and this device both use.
    ///
    /// # Errors
    /// The driver's, as for memory that there is no more of.
    fn allocate_pinned(self: Arc<Self>, bytes: u64) -> Result<PinnedMemory>;

    /// The allocation that `addr` lies in.
    ///
    /// # Errors
    /// [`Error::UnknownAddress`](crate::Error::UnknownAddress) if it is not this device's memory.
    fn allocation(&self, addr: u64) -> Result<Allocation>;

    /// The unit to export so that another process reaches `[addr, addr + len)`: the allocation that
    /// `addr` lies in, or the run of chunks that the range touches. It ends before the range does
    /// where the allocation does, or where the next chunk is not mapped or not this device's.
    ///
    /// # Errors
    /// As [`Device::allocation`].
    fn export_unit(&self, addr: u64, len: u64) -> Result<Allocation>;

    /// Finds out whether [`Device::export`] will work, so that memory which cannot be exported is
    /// refused before there is traffic. Call it once per unit, not per region: where that matters
    /// (some drivers leak memory per export, FAILURES.md B06) it returns an [`Export::Handle`] to
    /// copy for every peer. For `None`, call [`Device::export`] for each.
    ///
    /// # Errors
    /// [`Error::NotExportable`](crate::Error::NotExportable) with the remedy.
    fn prepare_export(&self, unit: &Allocation) -> Result<Option<Export>>;

    /// Makes an export of the whole unit.
    ///
    /// # Errors
    /// As [`Device::prepare_export`], also if other memory is there now, and
    /// [`Error::OutOfDescriptors`](crate::Error::OutOfDescriptors).
    fn export(&self, unit: &Allocation) -> Result<Export>;

    /// Maps another process's memory into this process. May be slow; hold no lock. If it fails,
    /// nothing stays mapped.
    ///
    /// A GPU also opens what a host device exports: the memory is page-locked for it, and the
    /// mapping's address is the one that the GPU uses.
    ///
    /// # Errors
    /// [`Error::SameProcess`](crate::Error::SameProcess) for an export made by this process, and
    /// [`Error::AlreadyMapped`](crate::Error::AlreadyMapped) if someone else here has it open.
    fn open(self: Arc<Self>, export: Export) -> Result<Mapping>;

    /// Page-locks `[addr, addr + len)`, host memory of this process, until the mapping is dropped,
    /// and says where the device sees it. Memory that the application has page-locked itself is
    /// used as it is, and then must stay so. May be slow (page-locking is), so do it once.
    ///
    /// On host memory as a device it does nothing and gives the same address.
    ///
    /// # Errors
    /// The driver's, for memory that is not mapped or cannot be locked, and for memory that is mapped
    /// already with more or less around it. Then none of it is locked.
    fn map_host(self: Arc<Self>, addr: u64, len: u64) -> Result<Mapping>;

    /// Whether this device can read and write memory of the device with that identity, once it is
    /// mapped by [`Device::open`] or, for host memory of this process, [`Device::map_host`].
    fn reaches(&self, other: &DeviceUuid) -> bool;

    /// Opens a queue and all that it will need: streams, events, descriptor ring.
    fn queue(self: Arc<Self>, options: &QueueOptions) -> Result<Box<dyn Queue>>;

    /// Copies `bytes` to the device and returns when they are there. For set-up and checks.
    ///
    /// # Safety
    /// `[addr, addr + bytes.len())` is memory that this device may write and nobody else uses now.
    unsafe fn write(&self, addr: u64, bytes: &[u8]) -> Result<()>;

    /// Copies from the device and returns when `bytes` is full. For set-up and checks.
    ///
    /// # Safety
    /// `[addr, addr + bytes.len())` is memory that this device may read and nobody writes now.
    unsafe fn read(&self, addr: u64, bytes: &mut [u8]) -> Result<()>;
}

/// The half of a device that ends what [`Memory`] and [`Mapping`] began.
pub(crate) trait Release: Debug + Send + Sync {
    fn free(&self, addr: u64);
    fn free_pinned(&self, memory: Pinned);
    fn close(&self, mapped: u64, len: u64);
    fn unmap_host(&self, host: u64, len: u64);
}

/// Device memory that is freed when dropped.
#[derive(Debug)]
pub struct Memory {
    addr: u64,
    len: u64,
    device: Arc<dyn Release>,
}

impl Memory {
    pub(crate) fn new(addr: u64, len: u64, device: Arc<dyn Release>) -> Self {
        Self { addr, len, device }
    }

    /// First byte.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Never true: empty memory is not allocated.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.device.free(self.addr);
    }
}

/// Another process's allocation, or host memory of this one, mapped for a device until dropped.
#[derive(Debug)]
pub struct Mapping {
    addr: u64,
    len: u64,
    /// Where the processor sees local host memory; none for another process's memory.
    host: Option<u64>,
    device: Arc<dyn Release>,
}

impl Mapping {
    pub(crate) fn new(addr: u64, len: u64, device: Arc<dyn Release>) -> Self {
        Self { addr, len, host: None, device }
    }

    pub(crate) fn of_host(addr: u64, host: u64, len: u64, device: Arc<dyn Release>) -> Self {
        Self { addr, len, host: Some(host), device }
    }

    /// Where the device sees the first byte.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Never true: an empty allocation is not exported.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        match self.host {
            None => self.device.close(self.addr, self.len),
            Some(host) => self.device.unmap_host(host, self.len),
        }
    }
}
