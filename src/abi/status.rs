//! Status codes, and what they are for each error.

use kvferry_engine::device::Error as DeviceError;
use kvferry_engine::{BadDeviceName, Error, KnobError};
use kvferry_node::NodeError;

use super::types::Status;

pub(super) const OK: Status = 0;
pub(super) const INVALID_ARGUMENT: Status = 1;
pub(super) const NOT_FOUND: Status = 2;
pub(super) const BUSY: Status = 3;
pub(super) const BAD_SETTING: Status = 4;
pub(super) const UNREACHABLE: Status = 5;
pub(super) const PEER_LOST: Status = 6;
pub(super) const DEVICE_ERROR: Status = 7;
pub(super) const OUT_OF_MEMORY: Status = 8;
pub(super) const REFUSED: Status = 9;
pub(super) const SYSTEM: Status = 10;
pub(super) const FORKED: Status = 11;
pub(super) const INTERNAL: Status = 12;
pub(super) const CANCELLED: Status = 13;

/// Why a call was refused: a code for the program, a sentence for a person.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) status: Status,
    pub(super) text: String,
}

impl Refusal {
    pub(super) fn invalid(text: impl Into<String>) -> Self {
        Self { status: INVALID_ARGUMENT, text: text.into() }
    }

    pub(super) fn not_found(text: impl Into<String>) -> Self {
        Self { status: NOT_FOUND, text: text.into() }
    }
}

pub(super) fn of(error: &Error) -> Status {
    match error {
        Error::Range(_)
        | Error::Form(_)
        | Error::MixedParts { .. }
        | Error::BadRegion { .. }
        | Error::NotDeviceMemory { .. }
        | Error::LeavesAllocation { .. }
        | Error::AlreadyRegistered { .. }
        | Error::BadSegment { .. } => INVALID_ARGUMENT,
        Error::RegionOfList { error, .. } => of(error),
        Error::UnknownRegion { .. }
        | Error::UnknownBatch(_)
        | Error::UnknownAllocation { .. }
        | Error::UnknownDevice { .. } => NOT_FOUND,
        Error::RegionBusy { .. } | Error::BatchBusy(_) => BUSY,
        Error::OtherProcess { .. } => FORKED,
        Error::AuthKey { .. } => BAD_SETTING,
        Error::Unreachable { .. } | Error::Unproven { .. } | Error::MappedElsewhere { .. } => {
            UNREACHABLE
        }
        Error::PeerLost { .. }
        | Error::ExportRefused { .. }
        | Error::ProbeRefused { .. }
        | Error::NotServed { .. }
        | Error::Tcp { .. } => PEER_LOST,
        Error::Fallback { .. } | Error::NotStaged { .. } | Error::NoKernel { .. } => REFUSED,
        Error::Cancelled => CANCELLED,
        Error::Listen { .. } | Error::System { .. } => SYSTEM,
        Error::Device(error) => of_device(error),
        _ => DEVICE_ERROR,
    }
}

fn of_device(error: &DeviceError) -> Status {
    match error {
        DeviceError::NoDevice { .. } | DeviceError::LibraryMissing { .. } => NOT_FOUND,
        DeviceError::OutOfMemory { .. } => OUT_OF_MEMORY,
        DeviceError::OutOfDescriptors { .. } => SYSTEM,
        DeviceError::BadSize { .. }
        | DeviceError::UnknownAddress { .. }
        | DeviceError::NotExportable { .. }
        | DeviceError::NotAccessible { .. }
        | DeviceError::NotOrderable { .. } => INVALID_ARGUMENT,
        _ => DEVICE_ERROR,
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self { status: of(&error), text: error.to_string() }
    }
}

impl From<DeviceError> for Refusal {
    fn from(error: DeviceError) -> Self {
        Self { status: of_device(&error), text: error.to_string() }
    }
}

impl From<NodeError> for Refusal {
    fn from(error: NodeError) -> Self {
        let status = match &error {
            NodeError::BadAddress { .. } | NodeError::NameMissing { .. } => INVALID_ARGUMENT,
            NodeError::Listen { .. } | NodeError::System { .. } => SYSTEM,
            NodeError::Unreachable { .. } => UNREACHABLE,
            NodeError::Engine(error) => of(error),
            _ => PEER_LOST,
        };
        Self { status, text: error.to_string() }
    }
}

impl From<KnobError> for Refusal {
    fn from(error: KnobError) -> Self {
        Self { status: BAD_SETTING, text: error.to_string() }
    }
}

impl From<BadDeviceName> for Refusal {
    fn from(error: BadDeviceName) -> Self {
        Self::invalid(error.to_string())
    }
}
