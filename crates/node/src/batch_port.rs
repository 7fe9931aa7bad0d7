//! The batch protocol beside the handshake: its port, and peers that are reached by it.

use kvferry_engine::{Listener, Target};
use kvferry_wire::batch::{MAJOR, MINOR};
use kvferry_wire::segment::{BatchPort, Extension};

use crate::address::Address;
use crate::describe::{self, Local};
use crate::error::NodeError;

/// What a descriptor says of a listener, which `port` forwards to if there is one.
pub(crate) fn describe(listener: &Listener, port: Option<u16>) -> BatchPort {
    let port = port.unwrap_or(listener.address().port());
    BatchPort { port, major: MAJOR, minor: MINOR, authenticated: listener.is_authenticated() }
}

/// Where a peer speaks the protocol, if it does.
pub(crate) fn address(peer: &Address, extension: &Extension) -> Option<String> {
    let batch = extension.batch.filter(|batch| batch.major == MAJOR)?;
    Some(Address { host: peer.host.clone(), port: batch.port }.to_string())
}

/// Opens a peer by TCP, on the host of its name; none if it does not speak the protocol. `instead` of
/// mappings, if its host would allow them.
pub(crate) fn open(
    local: &Local,
    name: &str,
    address: &Address,
    extension: &Extension,
    instead: bool,
) -> Result<Option<Target>, NodeError> {
    let Some(at) = self::address(address, extension) else { return Ok(None) };
    let segment = describe::segment(name, extension);
    let target = match instead {
        false => local.engine.open_tcp(name, segment, &at)?,
        true => local.engine.open_tcp_instead(name, segment, &at)?,
    };
    tracing::debug!(node = local.name, peer = name, at, "opened a peer over TCP");
    Ok(Some(target))
}
