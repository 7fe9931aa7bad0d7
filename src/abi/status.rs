//! Status codes, and what they are for each error.

use kvferry_engine::device::Error as DeviceError;
use kvferry_engine::{BadDeviceName, Error, KnobError};
use kvferry_node::NodeError;

use super::numbers::*;
use super::types::Status;

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

    /// Tells which entry of a list it is about.
    pub(super) fn at(self, what: &str, position: usize) -> Self {
        Self { text: format!("{what} {position}: {}", self.text), ..self }
    }

    /// What is wrong with a descriptor that the caller has in hand, its own or a peer's, is no fault of
    /// a peer's at the other end of a connection.
    pub(super) fn of_descriptor(error: NodeError) -> Self {
        let is_bad = matches!(
            error,
            NodeError::Descriptor { .. } | NodeError::Engine(Error::BadSegment { .. })
        );
        match is_bad {
            true => Self::invalid(error.to_string()),
            false => error.into(),
        }
    }

    pub(super) fn not_found(text: impl Into<String>) -> Self {
        Self { status: NOT_FOUND, text: text.into() }
    }
}

/// The enums of errors may grow, so each match needs a last arm. A test sees that no variant gets there.
pub(super) fn of(error: &Error) -> Status {
    match error {
        Error::Range(_)
        | Error::Form(_)
        | Error::MixedParts { .. }
        | Error::BadRegion { .. }
        | Error::NotDeviceMemory { .. }
        | Error::LeavesAllocation { .. }
        | Error::AlreadyRegistered { .. } => INVALID_ARGUMENT,
        Error::RegionOfList { error, .. } => of(error),
        Error::UnknownRegion { .. }
        | Error::UnknownBatch(_)
        | Error::UnknownAllocation { .. }
        | Error::UnknownDevice { .. } => NOT_FOUND,
        Error::RegionBusy { .. } | Error::BatchBusy(_) | Error::NotAllSubmitted(_) => BUSY,
        Error::OtherProcess { .. } => FORKED,
        Error::AuthKey { .. } => BAD_SETTING,
        Error::Unreachable { .. }
        | Error::Unproven { .. }
        | Error::NotOpened { .. }
        | Error::MappedElsewhere { .. }
        | Error::NotServed { .. } => UNREACHABLE,
        Error::PeerLost { .. }
        | Error::BadSegment { .. }
        | Error::ExportRefused { .. }
        | Error::ProbeRefused { .. }
        | Error::Tcp { .. } => PEER_LOST,
        Error::Fallback { .. } | Error::NoDeviceMemory { .. } | Error::NotStaged { .. } => REFUSED,
        Error::PinnedBudget { .. } => OUT_OF_MEMORY,
        // Both: what ended the batch was asked for, by cancel or by destroy.
        Error::Cancelled | Error::Stopped => CANCELLED,
        Error::Listen { .. } | Error::System { .. } => SYSTEM,
        Error::NoKernel { .. } => DEVICE_ERROR,
        Error::Device(error) => of_device(error),
        _ => INTERNAL,
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
        DeviceError::AlreadyMapped { .. } => UNREACHABLE,
        // A peer's export.
        DeviceError::BadExport { .. } | DeviceError::SameProcess { .. } => PEER_LOST,
        DeviceError::Call { .. }
        | DeviceError::Lost { .. }
        | DeviceError::Stalled { .. }
        | DeviceError::SymbolMissing { .. } => DEVICE_ERROR,
        _ => INTERNAL,
    }
}

fn of_node(error: &NodeError) -> Status {
    match error {
        NodeError::BadAddress { .. } | NodeError::NameMissing { .. } => INVALID_ARGUMENT,
        NodeError::Listen { .. } | NodeError::System { .. } => SYSTEM,
        NodeError::Unreachable { .. }
        | NodeError::OtherUser { .. }
        | NodeError::NoDataPort { .. }
        | NodeError::MooncakeRefused => UNREACHABLE,
        NodeError::Handshake { .. }
        | NodeError::Descriptor { .. }
        | NodeError::Exports { .. }
        | NodeError::PeerRestarted { .. } => PEER_LOST,
        NodeError::Engine(error) => of(error),
        _ => INTERNAL,
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
        Self { status: of_node(&error), text: error.to_string() }
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use kvferry_engine::Config;

    use super::*;

    /// The names of an enum's variants, from wherever in a crate's source it stands.
    fn variants(crate_name: &str, enum_name: &str) -> Vec<String> {
        let folder =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("crates").join(crate_name).join("src");
        let head = format!("pub enum {enum_name} {{\n");
        let files = std::fs::read_dir(&folder).expect("the crate's source");
        let body = files.flatten().find_map(|file| {
            let text = std::fs::read_to_string(file.path()).ok()?;
            Some(text.split_once(&head)?.1.split_once("\n}\n")?.0.to_owned())
        });
        let name = |line: &str| {
            let name =
                line.strip_prefix("    ").filter(|line| line.starts_with(char::is_uppercase))?;
            name.split(|end: char| !end.is_alphanumeric()).next().map(str::to_owned)
        };
        body.expect("the enum").lines().filter_map(name).collect()
    }

    #[test]
    fn every_kind_of_error_has_a_status_that_was_chosen_for_it() {
        let source = include_str!("status.rs");
        let chosen = source.split_once("#[cfg(test)]").expect("this module").0;
        for (crate_name, enum_name, prefix) in [
            ("engine", "Error", " Error::"),
            ("device", "Error", " DeviceError::"),
            ("node", "NodeError", " NodeError::"),
        ] {
            let variants = variants(crate_name, enum_name);
            assert!(variants.len() > 10, "{crate_name}: {variants:?}");
            for variant in variants {
                let named = format!("{prefix}{variant}");
                let is_whole = |rest: &str| !rest.starts_with(char::is_alphanumeric);
                let is_chosen = chosen.split(&named).skip(1).any(is_whole);
                assert!(is_chosen, "{crate_name}'s {variant} is in no arm");
            }
        }
    }

    #[test]
    fn a_status_is_what_the_header_says_of_the_error() {
        let peer = || "peer".to_owned();
        let reason = || "why".to_owned();
        let budget = Error::PinnedBudget { bytes: 1, used: 2, budget: 2 };
        assert_eq!(of(&budget), OUT_OF_MEMORY);
        let index = 3;
        assert_eq!(
            of(&Error::RegionOfList { index, error: budget.into(), stay: Vec::new() }),
            OUT_OF_MEMORY
        );
        assert_eq!(of(&Error::Stopped), CANCELLED);
        let id = kvferry_engine::BatchId::from_bits(7);
        assert_eq!(of(&Error::NotAllSubmitted(id)), BUSY);
        assert_eq!(of(&Error::NotServed { peer: peer(), addr: 1 }), UNREACHABLE);
        let export = DeviceError::BadExport { device: "cuda:0".into(), reason: reason() };
        assert_eq!(of(&export.into()), PEER_LOST);
        assert_eq!(of_node(&NodeError::NoDataPort { peer: peer() }), UNREACHABLE);
        assert_eq!(of_node(&NodeError::MooncakeRefused), UNREACHABLE);
        assert_eq!(of_node(&NodeError::OtherUser { ours: 1, theirs: 2 }), UNREACHABLE);
        // Whose fault a bad descriptor is depends on where it came from.
        let bad = || NodeError::from(Error::BadSegment { peer: peer(), reason: reason() });
        assert_eq!(of_node(&bad()), PEER_LOST);
        assert_eq!(Refusal::of_descriptor(bad()).status, INVALID_ARGUMENT);
        let other = NodeError::Handshake { peer: peer(), reason: reason() };
        assert_eq!(Refusal::of_descriptor(other).status, PEER_LOST);
        let knob =
            Config::from_lookup(|name| (name == "MC_KVFERRY_STREAMS").then(|| "many".into()));
        assert_eq!(Refusal::from(knob.expect_err("no number")).status, BAD_SETTING);
    }
}
