//! Both sides of Mooncake's metadata handshake.

use std::fmt::Display;
use std::os::fd::OwnedFd;
use std::time::Instant;

use kvferry_wire::handshake::{self, Decoder, Kind, Message, encode};
use kvferry_wire::segment::{self, Descriptor};
use rustix::net::Shutdown;

use crate::address::Address;
use crate::describe::Local;
use crate::error::NodeError;
use crate::socket::{self, PATIENCE};

/// Longest descriptor that is read. Mooncake stops at 1 MiB; ours are longer where many regions
/// are registered, and are bounded by their entries (`segment::MAX_ENTRIES`).
const REPLY_LIMIT: u64 = 16 << 20;

/// Answers the one request of a connection.
pub(crate) fn serve(local: &Local, socket: &OwnedFd) {
    match answer(local, socket) {
        Ok(kind) => tracing::debug!(node = local.name, ?kind, "answered a handshake"),
        Err(reason) => {
            local.reject();
            tracing::debug!(node = local.name, reason, "rejected a handshake");
        }
    }
}

/// Asks a node for its descriptor.
pub(crate) fn fetch(address: &Address) -> Result<Descriptor, NodeError> {
    let peer = address.to_string();
    let failed = |doing: &'static str| {
        let peer = peer.clone();
        move |error: &dyn Display| NodeError::Handshake {
            peer,
            reason: format!("{doing}: {error}"),
        }
    };
    let deadline = Instant::now() + PATIENCE;
    let socket =
        socket::connect_tcp(address, deadline).map_err(|error| failed("connecting")(&error))?;
    let request = encode(Kind::Metadata, handshake::METADATA_REQUEST);
    socket::send(&socket, &request, &[], deadline).map_err(|error| failed("asking")(&error))?;
    let mut decoder = Decoder::new(REPLY_LIMIT);
    let reply = read(&socket, &mut decoder, deadline)
        .map_err(|reason| failed("reading its answer")(&reason))?;
    let reply = reply
        .ok_or_else(|| failed("reading its answer")(&"it closed the connection without one"))?;
    if reply.kind != Kind::Metadata {
        return Err(failed("reading its answer")(&format!("it is one to {:?}", reply.kind)));
    }
    segment::parse(&reply.body).map_err(|error| NodeError::Descriptor { peer, error })
}

/// What was asked; none if the client only connected.
fn answer(local: &Local, socket: &OwnedFd) -> Result<Option<Kind>, String> {
    let request = read(socket, &mut Decoder::default(), Instant::now() + PATIENCE)?;
    let Some(Message { kind, body }) = request else { return Ok(None) };
    let reply = match kind {
        Kind::Metadata => descriptor(local)?,
        Kind::Probe => encode(kind, handshake::PROBE_REPLY),
        Kind::Notify => {
            tracing::debug!(
                node = local.name,
                bytes = body.len(),
                "a notification, which nobody here waits for"
            );
            encode(kind, handshake::NOTIFY_REPLY)
        }
        Kind::Connection | Kind::Untyped => encode(kind, handshake::CONNECTION_REPLY),
    };
    let deadline = Instant::now() + PATIENCE;
    socket::send(socket, &reply, &[], deadline)
        .map_err(|error| format!("sending the answer: {error}"))?;
    // Closing with unread bytes would reset the connection and could take the answer back, so the
    // client closes first.
    let _ = rustix::net::shutdown(socket, Shutdown::Write);
    let mut rest = [0; 4096];
    while socket::receive(socket, &mut rest, deadline).is_ok_and(|count| count > 0) {}
    Ok(Some(kind))
}

fn descriptor(local: &Local) -> Result<Vec<u8>, String> {
    let json = local.descriptor().map_err(|error| {
        tracing::warn!(node = local.name, %error, "the registered memory cannot be published");
        format!("our own descriptor: {error}")
    })?;
    let frame = encode(Kind::Metadata, &json);
    if json.len() as u64 >= handshake::DEFAULT_LIMIT {
        tracing::debug!(
            node = local.name,
            bytes = json.len(),
            "a descriptor too long for stock Mooncake peers (MC_HANDSHAKE_MAX_LENGTH)"
        );
    }
    Ok(frame)
}

/// The next message; none if the connection ends before its first byte.
fn read(
    socket: &OwnedFd,
    decoder: &mut Decoder,
    deadline: Instant,
) -> Result<Option<Message>, String> {
    let mut buffer = [0; 16 << 10];
    loop {
        if let Some(message) = decoder.poll().map_err(|error| error.to_string())? {
            return Ok(Some(message));
        }
        let received = socket::receive(socket, &mut buffer, deadline);
        match received.map_err(|error| error.to_string())? {
            0 if decoder.is_empty() => return Ok(None),
            0 => return Err("the connection ended within a message".into()),
            count => decoder.push(&buffer[..count]),
        }
    }
}
