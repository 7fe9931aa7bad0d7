//! Segment descriptors: which memory an engine lets its peers read and write.
//!
//! The JSON is Mooncake's. What kvferry engines tell each other is one more object, `kvferry`,
//! which stock peers ignore and which is absent from theirs. A descriptor that [`parse`] accepts
//! has only extents inside the address space, and regions inside the allocations they name.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::hex::{Id, Uuid};

/// [`Extension::version`] of this code. Fields may be added under the same version.
pub const VERSION: u32 = 1;

/// Most buffers, allocations and regions, each, of a descriptor that [`parse`] accepts.
pub const MAX_ENTRIES: usize = 65536;

/// Begins the names of buffers that kvferry serves; behind it stands the name of the node. Mooncake
/// hands its transports no field of a descriptor that it does not know, but the names of buffers,
/// which its TCP transport does not use: by them kvferry inside Mooncake knows another kvferry.
pub const SCHEME: &str = "kvferry://";

/// What a node answers to a metadata request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descriptor {
    /// `host:port` of the handshake.
    pub name: String,
    /// Transports that the peer offers.
    pub protocol: Protocol,
    /// Where its TCP transport listens; 0 if it has none.
    #[serde(default)]
    pub tcp_data_port: u16,
    /// Version of its TCP transport.
    #[serde(default = "first_version")]
    pub tcp_proto_version: u32,
    /// When it was written, for people.
    #[serde(default)]
    pub timestamp: String,
    /// Registered memory, by addresses of the publishing process.
    #[serde(default)]
    pub buffers: Vec<Buffer>,
    /// What only kvferry engines publish.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kvferry: Option<Extension>,
}

impl Descriptor {
    /// The memory that the TCP transport serves. A descriptor of several transports lists each
    /// region once for each of them.
    pub fn tcp_buffers(&self) -> impl Iterator<Item = &Buffer> {
        let serves = |buffer: &&Buffer| match &buffer.protocol {
            Some(protocol) => protocol == "tcp",
            None => self.protocol.offers("tcp"),
        };
        self.buffers.iter().filter(serves)
    }
}

/// Mooncake writes one transport as a string and several as an array.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Protocol {
    /// `"tcp"`
    One(String),
    /// `["tcp", "hip"]`
    Several(Vec<String>),
}

impl Protocol {
    /// Whether the peer offers that transport.
    pub fn offers(&self, name: &str) -> bool {
        match self {
            Self::One(one) => one == name,
            Self::Several(several) => several.iter().any(|one| one == name),
        }
    }
}

/// A registered region as stock peers see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Buffer {
    /// Not empty. [`SCHEME`] and the node's name, of kvferry's; stock peers write the segment's name.
    pub name: String,
    /// First byte.
    pub addr: u64,
    /// Bytes.
    pub length: u64,
    /// The transport that this entry is for, where the descriptor has several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
}

/// What only kvferry engines need: to open the memory on the same host, or to reach it by the batch
/// protocol from another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extension {
    /// [`VERSION`].
    pub version: u32,
    /// The engine; a restarted one is another.
    pub incarnation: Id,
    /// Its process.
    pub process: Id,
    /// Boot of its host.
    pub host: Uuid,
    /// Its process id, for people: other containers count differently.
    pub pid: u32,
    /// Abstract Unix socket where it hands out exports.
    pub socket: String,
    /// Driver allocations that hold registered memory.
    pub allocations: Vec<Allocation>,
    /// Registered memory.
    pub regions: Vec<Region>,
    /// Where the batch protocol is spoken; none if nowhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<BatchPort>,
}

/// Where and how an engine speaks the batch protocol ([`crate::batch`]), on the host of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchPort {
    /// TCP port.
    pub port: u16,
    /// Major version of the protocol.
    pub major: u16,
    /// Newest minor version.
    pub minor: u16,
    /// Whether lanes must prove that they have the pre-shared key.
    pub authenticated: bool,
}

/// Whose memory an allocation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Vendor {
    /// Host memory.
    Host,
    /// A simulated GPU's.
    Sim,
    /// An NVIDIA GPU's.
    Cuda,
    /// An AMD GPU's.
    Rocm,
    /// A vendor that this code does not know; it cannot open such an allocation.
    #[serde(other)]
    Unknown,
}

/// One driver allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocation {
    /// Its device.
    pub device: Uuid,
    /// Its number on that device, never used again.
    pub id: u64,
    /// Whose memory it is.
    pub vendor: Vendor,
    /// First byte.
    pub base: u64,
    /// Bytes.
    pub length: u64,
    /// Whether other processes of its host can map it. What they cannot they reach by the batch
    /// protocol, as engines of other hosts do.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub mappable: bool,
}

/// One registered region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// First byte.
    pub addr: u64,
    /// Bytes.
    pub length: u64,
    /// Device of the allocation that it lies in.
    pub device: Uuid,
    /// Number of that allocation.
    pub id: u64,
    /// What the batch protocol calls it; none if it does not serve it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub segment: Option<SegmentRef>,
}

/// The batch protocol's name of a registered region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SegmentRef {
    /// Its number.
    pub segment: u64,
    /// Tells it from earlier regions of that number.
    pub generation: u64,
}

/// What is wrong with a descriptor. None of it may be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SegmentError {
    /// Not the JSON of a descriptor.
    #[error("no segment descriptor: {reason}")]
    Malformed {
        /// What is wrong, and where.
        reason: String,
    },
    /// Written by another generation of kvferry.
    #[error("its kvferry object has version {theirs}, this one reads version {VERSION}")]
    Version {
        /// The peer's.
        theirs: u32,
    },
    /// More entries than [`MAX_ENTRIES`].
    #[error("it lists {count} {what}, the limit is {MAX_ENTRIES}")]
    TooMany {
        /// Entries of which list.
        what: &'static str,
        /// How many.
        count: usize,
    },
    /// Address or length is zero, or the end is beyond the address space.
    #[error("{what} {index} has an impossible extent: {length} bytes at {addr:#x}")]
    Extent {
        /// Entry of which list.
        what: &'static str,
        /// Position in that list.
        index: usize,
        /// First byte.
        addr: u64,
        /// Bytes.
        length: u64,
    },
    /// Two allocations have one name.
    #[error("allocation {id} of device {device} is listed twice")]
    Duplicate {
        /// The device.
        device: Uuid,
        /// The number.
        id: u64,
    },
    /// A region names an allocation that is not listed.
    #[error("region {index} lies in allocation {id} of device {device}, which is not listed")]
    UnknownAllocation {
        /// Position of the region.
        index: usize,
        /// The device.
        device: Uuid,
        /// The number.
        id: u64,
    },
    /// Two regions have the same number of the batch protocol.
    #[error("two regions are segment {segment}")]
    DuplicateSegment {
        /// The number.
        segment: u64,
    },
    /// A buffer has no name; stock peers refuse the whole descriptor for it.
    #[error("buffer {index} has no name")]
    Unnamed {
        /// Position of the buffer.
        index: usize,
    },
    /// A region is not inside the allocation that it names.
    #[error(
        "region {index} ({length} bytes at {addr:#x}) leaves allocation {id} ({allocation} bytes at {base:#x})"
    )]
    OutsideAllocation {
        /// Position of the region.
        index: usize,
        /// First byte of the region.
        addr: u64,
        /// Bytes of the region.
        length: u64,
        /// Number of the allocation.
        id: u64,
        /// First byte of the allocation.
        base: u64,
        /// Bytes of the allocation.
        allocation: u64,
    },
}

/// Reads a descriptor and checks it.
///
/// # Errors
/// What is wrong with it.
pub fn parse(json: &[u8]) -> Result<Descriptor, SegmentError> {
    let malformed =
        |error: serde_json::Error| SegmentError::Malformed { reason: error.to_string() };
    // First the version alone, since another one may not fit the types at all.
    let versioned: Versioned = serde_json::from_slice(json).map_err(malformed)?;
    if let Some(Version { version: theirs }) =
        versioned.kvferry.filter(|found| found.version != VERSION)
    {
        return Err(SegmentError::Version { theirs });
    }
    let descriptor: Descriptor = serde_json::from_slice(json).map_err(malformed)?;
    check(&descriptor)?;
    Ok(descriptor)
}

/// The descriptor's JSON, with the line end that Mooncake writes.
///
/// # Errors
/// What a peer's [`parse`] would refuse it for.
pub fn encode(descriptor: &Descriptor) -> Result<Vec<u8>, SegmentError> {
    check(descriptor)?;
    let malformed =
        |error: serde_json::Error| SegmentError::Malformed { reason: error.to_string() };
    let mut json = serde_json::to_vec(descriptor).map_err(malformed)?;
    json.push(b'\n');
    Ok(json)
}

#[derive(Deserialize)]
struct Versioned {
    #[serde(default)]
    kvferry: Option<Version>,
}

#[derive(Deserialize)]
struct Version {
    version: u32,
}

fn first_version() -> u32 {
    1
}

fn yes() -> bool {
    true
}

fn is_yes(value: &bool) -> bool {
    *value
}

fn check(descriptor: &Descriptor) -> Result<(), SegmentError> {
    count("buffers", descriptor.buffers.len())?;
    for (index, buffer) in descriptor.buffers.iter().enumerate() {
        extent("buffer", index, buffer.addr, buffer.length)?;
        if buffer.name.is_empty() {
            return Err(SegmentError::Unnamed { index });
        }
    }
    descriptor.kvferry.as_ref().map_or(Ok(()), check_extension)
}

fn check_extension(extension: &Extension) -> Result<(), SegmentError> {
    count("allocations", extension.allocations.len())?;
    count("regions", extension.regions.len())?;
    let mut allocations = BTreeMap::new();
    for (index, allocation) in extension.allocations.iter().enumerate() {
        let &Allocation { device, id, base, length, .. } = allocation;
        extent("allocation", index, base, length)?;
        if allocations.insert((device, id), (base, length)).is_some() {
            return Err(SegmentError::Duplicate { device, id });
        }
    }
    let mut segments = BTreeSet::new();
    for (index, region) in extension.regions.iter().enumerate() {
        let &Region { addr, length, device, id, segment } = region;
        extent("region", index, addr, length)?;
        if let Some(SegmentRef { segment, .. }) =
            segment.filter(|one| !segments.insert(one.segment))
        {
            return Err(SegmentError::DuplicateSegment { segment });
        }
        let named = allocations.get(&(device, id));
        let &(base, allocation) =
            named.ok_or(SegmentError::UnknownAllocation { index, device, id })?;
        // Neither end overflows: both extents were checked.
        if addr < base || addr + length > base + allocation {
            return Err(SegmentError::OutsideAllocation {
                index,
                addr,
                length,
                id,
                base,
                allocation,
            });
        }
    }
    Ok(())
}

fn count(what: &'static str, count: usize) -> Result<(), SegmentError> {
    if count > MAX_ENTRIES { Err(SegmentError::TooMany { what, count }) } else { Ok(()) }
}

fn extent(what: &'static str, index: usize, addr: u64, length: u64) -> Result<(), SegmentError> {
    if addr == 0 || length == 0 || addr.checked_add(length).is_none() {
        return Err(SegmentError::Extent { what, index, addr, length });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
