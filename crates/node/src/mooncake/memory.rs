use std::io;
use std::sync::Arc;

use kvferry_engine::Lease;
use kvferry_wire::mooncake::Payload;
use tokio::io::Interest;
use tokio::net::TcpStream;

/// Bytes of a GPU's memory that are copied at a time: what a connection of one holds.
const CHUNK: usize = 256 << 10;

/// Most bytes of host memory that one call moves, so that connections take turns.
const SHARE: u64 = 1 << 20;

/// What one operation reads or writes here.
#[derive(Debug)]
pub(super) enum Memory {
    /// Host memory: the socket's bytes go straight to and from it.
    Host { lease: Arc<Lease>, start: u64 },
    /// A GPU's memory, by way of a chunk.
    Device { lease: Arc<Lease>, start: u64, chunk: Chunk },
    /// No memory: what is received is dropped, and there is nothing to send.
    Nowhere,
}

/// A stretch of the operation's bytes.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    bytes: Vec<u8>,
    /// Where in the operation the first of them is.
    offset: u64,
}

/// What ends an operation, beside what its peer says.
#[derive(Debug, thiserror::Error)]
pub(super) enum MoveError {
    #[error(transparent)]
    Socket(#[from] io::Error),
    #[error(transparent)]
    Device(#[from] kvferry_engine::Error),
}

impl Memory {
    /// Of an operation whose first byte is the lease's byte `start`.
    pub(super) fn new(lease: Arc<Lease>, start: u64) -> Self {
        if lease.is_host() {
            Self::Host { lease, start }
        } else {
            Self::Device { lease, start, chunk: Chunk::default() }
        }
    }

    /// Whether somebody waits for the operation to end.
    pub(super) fn is_withdrawn(&self) -> bool {
        match self {
            Self::Host { lease, .. } | Self::Device { lease, .. } => lease.is_withdrawn(),
            Self::Nowhere => false,
        }
    }

    /// Receives what comes next, without waiting for the socket, and says how many bytes; 0 at the
    /// end of the stream. Those that complete the payload are in place when this returns.
    pub(super) async fn receive(
        &mut self,
        stream: &TcpStream,
        Payload { offset, left }: Payload,
    ) -> Result<u64, MoveError> {
        match self {
            Self::Host { lease, start } => {
                let receive = || Ok(lease.receive(stream, *start + offset, left.min(SHARE))?);
                Ok(stream.try_io(Interest::READABLE, receive)? as u64)
            }
            Self::Device { lease, start, chunk } => {
                let held = chunk.bytes.len();
                let room = (CHUNK - held).min(usize::try_from(left).unwrap_or(CHUNK));
                chunk.bytes.resize(held + room, 0);
                let received = stream.try_read(&mut chunk.bytes[held..]);
                chunk.bytes.truncate(held + received.as_ref().map_or(0, |count| *count));
                let received = received?;
                if chunk.bytes.len() == CHUNK || received as u64 == left {
                    let at = *start + offset - held as u64;
                    chunk.bytes =
                        on_device(lease, std::mem::take(&mut chunk.bytes), move |lease, bytes| {
                            lease.write(at, bytes)
                        })
                        .await?;
                    chunk.bytes.clear();
                }
                Ok(received as u64)
            }
            Self::Nowhere => {
                let mut bytes = [0; 64];
                let most = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                Ok(stream.try_read(&mut bytes[..most])? as u64)
            }
        }
    }

    /// Sends what comes next, without waiting for the socket, and says how many bytes.
    pub(super) async fn send(
        &mut self,
        stream: &TcpStream,
        Payload { offset, left }: Payload,
    ) -> Result<u64, MoveError> {
        match self {
            Self::Host { lease, start } => {
                let send = || Ok(lease.send(stream, *start + offset, left.min(SHARE))?);
                Ok(stream.try_io(Interest::WRITABLE, send)? as u64)
            }
            Self::Device { lease, start, chunk } => {
                if offset >= chunk.offset + chunk.bytes.len() as u64 {
                    let at = *start + offset;
                    let mut bytes = std::mem::take(&mut chunk.bytes);
                    bytes.resize(CHUNK.min(usize::try_from(left).unwrap_or(CHUNK)), 0);
                    chunk.bytes =
                        on_device(lease, bytes, move |lease, bytes| lease.read(at, bytes)).await?;
                    chunk.offset = offset;
                }
                Ok(stream.try_write(&chunk.bytes[(offset - chunk.offset) as usize..])? as u64)
            }
            Self::Nowhere => Err(io::Error::from(io::ErrorKind::InvalidInput).into()),
        }
    }
}

/// Runs a device's copy where it holds up no other connection.
async fn on_device(
    lease: &Arc<Lease>,
    mut bytes: Vec<u8>,
    copy: impl FnOnce(&Lease, &mut [u8]) -> kvferry_engine::Result<()> + Send + 'static,
) -> Result<Vec<u8>, MoveError> {
    let lease = Arc::clone(lease);
    let copied = tokio::task::spawn_blocking(move || copy(&lease, &mut bytes).map(|()| bytes));
    Ok(copied.await.map_err(io::Error::other)??)
}
