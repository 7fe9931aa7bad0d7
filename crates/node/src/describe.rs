//! Segments as descriptors and back.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use kvferry_device::{DeviceUuid, Vendor};
use kvferry_engine::{
    AllocationKey, Engine, Identity, Listener, Segment, SegmentAllocation, SegmentRegion, Served,
};
use kvferry_wire::segment::{self as wire, Descriptor, Extension, Protocol, SegmentError};
use kvferry_wire::{Id, Uuid};

use crate::batch_port;
use crate::error::NodeError;

/// What a node's threads share.
#[derive(Debug)]
pub(crate) struct Local {
    pub(crate) engine: Arc<Engine>,
    pub(crate) name: String,
    /// Boot id.
    pub(crate) host: Uuid,
    /// Abstract Unix socket where exports are handed out.
    pub(crate) socket: String,
    /// Where Mooncake's TCP transport listens; none if it is refused.
    pub(crate) data_port: Option<u16>,
    /// Connections that ended because of what they said.
    pub(crate) rejected: AtomicU64,
    /// By Mooncake's TCP transport.
    pub(crate) served: Served,
    /// Where the batch protocol is spoken, if it is.
    pub(crate) batch: Option<Listener>,
    /// The port that peers are told, if it is not the listener's.
    pub(crate) batch_port: Option<u16>,
}

impl Local {
    pub(crate) fn reject(&self) {
        self.rejected.fetch_add(1, Ordering::Relaxed);
    }

    /// The descriptor of the memory that is registered now.
    pub(crate) fn descriptor(&self) -> Result<Vec<u8>, SegmentError> {
        let segment = self.engine.segment();
        // Stock peers are told of no memory where none may be asked for.
        let served = segment.regions.iter().filter(|_| self.data_port.is_some());
        let buffers = served.map(|region| wire::Buffer {
            name: format!("{}{}", wire::SCHEME, self.name),
            addr: region.addr,
            length: region.len,
            protocol: None,
        });
        wire::encode(&Descriptor {
            name: self.name.clone(),
            protocol: Protocol::One("tcp".into()),
            tcp_data_port: self.data_port.unwrap_or(0),
            tcp_proto_version: 2,
            timestamp: timestamp(),
            buffers: buffers.collect(),
            kvferry: Some(self.extension(&segment)),
        })
    }

    fn extension(&self, segment: &Segment) -> Extension {
        let allocations = segment.allocations.iter().map(|allocation| wire::Allocation {
            device: Uuid(allocation.key.device.0),
            id: allocation.key.id,
            vendor: publish_vendor(allocation.vendor),
            base: allocation.base,
            length: allocation.len,
            mappable: allocation.mappable,
        });
        let regions = segment.regions.iter().map(|region| wire::Region {
            addr: region.addr,
            length: region.len,
            device: Uuid(region.allocation.device.0),
            id: region.allocation.id,
            segment: self.batch.as_ref().and(region.segment),
        });
        Extension {
            version: wire::VERSION,
            incarnation: Id(segment.incarnation.0),
            process: Id(segment.process.0),
            host: self.host,
            pid: std::process::id(),
            socket: self.socket.clone(),
            allocations: allocations.collect(),
            regions: regions.collect(),
            batch: self
                .batch
                .as_ref()
                .map(|listener| batch_port::describe(listener, self.batch_port)),
        }
    }
}

/// The peer's segment, without memory of vendors that this code does not know.
pub(crate) fn segment(peer: &str, extension: &Extension) -> Segment {
    let mut unknown = HashSet::new();
    let mut allocations = Vec::with_capacity(extension.allocations.len());
    for allocation in &extension.allocations {
        let key = AllocationKey { device: DeviceUuid(allocation.device.0), id: allocation.id };
        match read_vendor(allocation.vendor) {
            Some(vendor) => allocations.push(SegmentAllocation {
                key,
                vendor,
                base: allocation.base,
                len: allocation.length,
                mappable: allocation.mappable,
            }),
            None => {
                unknown.insert(key);
            }
        }
    }
    if !unknown.is_empty() {
        tracing::debug!(peer, allocations = unknown.len(), "leaving out memory of unknown vendors");
    }
    let regions = extension.regions.iter().map(|region| SegmentRegion {
        addr: region.addr,
        len: region.length,
        allocation: AllocationKey { device: DeviceUuid(region.device.0), id: region.id },
        segment: region.segment,
    });
    Segment {
        incarnation: Identity(extension.incarnation.0),
        process: Identity(extension.process.0),
        pid: extension.pid,
        allocations,
        regions: regions.filter(|region| !unknown.contains(&region.allocation)).collect(),
    }
}

/// What tells hosts apart: names and addresses repeat, and containers of one host have several.
pub(crate) fn boot_id() -> Result<Uuid, NodeError> {
    const PATH: &str = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(PATH)
        .map_err(|error| NodeError::system("reading the boot id", error))?;
    Uuid::parse(text.trim_end())
        .ok_or_else(|| NodeError::system("reading the boot id", format!("{PATH} holds {text:?}")))
}

fn publish_vendor(vendor: Vendor) -> wire::Vendor {
    match vendor {
        Vendor::Host => wire::Vendor::Host,
        Vendor::Sim => wire::Vendor::Sim,
        Vendor::Cuda => wire::Vendor::Cuda,
        Vendor::Rocm => wire::Vendor::Rocm,
        _ => wire::Vendor::Unknown,
    }
}

fn read_vendor(vendor: wire::Vendor) -> Option<Vendor> {
    match vendor {
        wire::Vendor::Host => Some(Vendor::Host),
        wire::Vendor::Sim => Some(Vendor::Sim),
        wire::Vendor::Cuda => Some(Vendor::Cuda),
        wire::Vendor::Rocm => Some(Vendor::Rocm),
        wire::Vendor::Unknown => None,
    }
}

/// Seconds since 1970; a clock before that is nobody's harm.
fn timestamp() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{}.{:06}", now.as_secs(), now.subsec_micros())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extension() -> Extension {
        let device = Uuid([1; 16]);
        let allocation = |id, vendor| wire::Allocation {
            device,
            id,
            vendor,
            base: id << 20,
            length: 4096,
            mappable: true,
        };
        let region = |id| wire::Region { addr: id << 20, length: 64, device, id, segment: None };
        Extension {
            version: wire::VERSION,
            incarnation: Id([2; 16]),
            process: Id([3; 16]),
            host: Uuid([4; 16]),
            pid: 5,
            socket: "s".into(),
            allocations: vec![
                allocation(1, wire::Vendor::Host),
                allocation(2, wire::Vendor::Unknown),
            ],
            regions: vec![region(1), region(2)],
            batch: None,
        }
    }

    #[test]
    fn memory_of_unknown_vendors_is_left_out() {
        let segment = segment("peer", &extension());
        assert_eq!((segment.allocations.len(), segment.regions.len()), (1, 1));
        assert_eq!(segment.allocations[0].key.id, 1);
        assert_eq!(segment.regions[0].allocation, segment.allocations[0].key);
        assert_eq!((segment.incarnation, segment.process), (Identity([2; 16]), Identity([3; 16])));
    }

    #[test]
    fn every_known_vendor_survives_publishing() {
        for vendor in [Vendor::Host, Vendor::Sim, Vendor::Cuda, Vendor::Rocm] {
            assert_eq!(read_vendor(publish_vendor(vendor)), Some(vendor));
        }
    }

    #[test]
    fn the_boot_id_is_the_same_each_time() {
        assert_eq!(boot_id().unwrap(), boot_id().unwrap());
    }
}
