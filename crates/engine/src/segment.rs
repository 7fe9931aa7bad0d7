//! What an engine publishes of its memory, and what a peer needs to open it.

use std::fmt::{self, Debug, Display};

use kvferry_device::{DeviceUuid, Export, Vendor};
use kvferry_wire::segment::SegmentRef;

use crate::proof::{Mismatch, Probe};

/// 16 random bytes that name one engine, process or host boot, and never come again.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity(pub [u8; 16]);

impl Identity {
    /// A fresh one.
    pub fn random() -> Self {
        Self(rand::random())
    }

    /// The identity of this process. A forked child has its parent's; it may not use the engine.
    pub fn of_process() -> Self {
        static PROCESS: std::sync::OnceLock<Identity> = std::sync::OnceLock::new();
        *PROCESS.get_or_init(Self::random)
    }

    /// Reads what [`Display`] wrote: 32 hexadecimal digits.
    pub fn parse(text: &str) -> Option<Self> {
        if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        u128::from_str_radix(text, 16).ok().map(|number| Self(number.to_be_bytes()))
    }
}

impl Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

/// Names one driver allocation for as long as its process lives: the number is never used again,
/// the address may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AllocationKey {
    /// The device that owns it.
    pub device: DeviceUuid,
    /// The number that the device gave it.
    pub id: u64,
}

/// An allocation that holds at least one registered region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentAllocation {
    /// Its name.
    pub key: AllocationKey,
    /// Who makes its device.
    pub vendor: Vendor,
    /// First byte, an address of the publishing process.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Whether other processes of its host can map it. Host memory that did not come from kvferry
    /// they cannot; they reach it by TCP, as engines of other hosts do.
    pub mappable: bool,
}

/// A registered region: what a peer may read and write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentRegion {
    /// First byte, an address of the publishing process.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// The allocation that it lies in.
    pub allocation: AllocationKey,
    /// Its name over TCP; none if it is not served there.
    pub segment: Option<SegmentRef>,
}

/// All registered memory of one engine at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The engine; a restarted one is another.
    pub incarnation: Identity,
    /// The process that the engine runs in.
    pub process: Identity,
    /// That process's number, for messages to people alone.
    pub pid: u32,
    /// Its allocations.
    pub allocations: Vec<SegmentAllocation>,
    /// Its regions, by address, not overlapping.
    pub regions: Vec<SegmentRegion>,
}

/// What an engine asks of the one that owns a segment. Calls may block, and fail with whatever kept
/// the peer from answering, or with its refusal.
pub trait Exports: Debug + Send + Sync {
    /// The export of that allocation. Called once per allocation and local device, from the thread
    /// that first transfers to it, and once per probe.
    ///
    /// # Errors
    /// As above.
    fn fetch(&self, allocation: AllocationKey) -> Result<Export, ExportsError>;

    /// Borrows memory of `device` that holds a pattern: [`Engine::lend`](crate::Engine::lend).
    ///
    /// # Errors
    /// As above.
    fn probe(&self, device: DeviceUuid) -> Result<Probe, ExportsError>;

    /// Gives that memory back, no longer mapped here, and asks whether it holds the pattern of
    /// `seed`: [`Loan::compare`](crate::Loan::compare).
    ///
    /// # Errors
    /// As above.
    fn prove(&self, allocation: AllocationKey, seed: u64)
    -> Result<Option<Mismatch>, ExportsError>;
}

/// Where a target's segment is asked for again. The call may block, as long as the peer may take.
pub trait Segments: Debug + Send + Sync {
    /// The segment that the peer publishes now, which may be another engine's.
    ///
    /// # Errors
    /// What kept it from answering.
    fn fetch(&self) -> Result<Segment, ExportsError>;
}

/// What keeps a peer from answering.
pub type ExportsError = Box<dyn std::error::Error + Send + Sync>;

/// Of a target that nothing is mapped of.
#[derive(Debug)]
pub(crate) struct NoExports;

impl NoExports {
    fn none<T>() -> Result<T, ExportsError> {
        Err("it is reached by TCP alone".into())
    }
}

impl Exports for NoExports {
    fn fetch(&self, _: AllocationKey) -> Result<Export, ExportsError> {
        Self::none()
    }

    fn probe(&self, _: DeviceUuid) -> Result<Probe, ExportsError> {
        Self::none()
    }

    fn prove(&self, _: AllocationKey, _: u64) -> Result<Option<Mismatch>, ExportsError> {
        Self::none()
    }
}
