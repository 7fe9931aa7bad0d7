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

/// Opens a peer by TCP, on the host of its name; none if it does not speak the protocol.
pub(crate) fn open(
    local: &Local,
    name: &str,
    address: &Address,
    extension: &Extension,
) -> Result<Option<Target>, NodeError> {
    let Some(batch) = extension.batch.filter(|batch| batch.major == MAJOR) else { return Ok(None) };
    let at = Address { host: address.host.clone(), port: batch.port }.to_string();
    let segment = describe::segment(name, extension);
    let target = local.engine.open_tcp(name, segment, &at)?;
    tracing::debug!(node = local.name, peer = name, at, "opened a peer over TCP");
    Ok(Some(target))
}
