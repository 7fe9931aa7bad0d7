use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kvferry_engine::{Engine, Lease, Op, Range, RangeError, Side};
use kvferry_wire::mooncake::{Client, ClientError, Header, Op as WireOp, Version};
use kvferry_wire::segment::Descriptor;
use tokio::runtime::Handle;

use super::connection::Connection;
use super::error::TransferError;
use super::memory::{Memory, MoveError};
use super::overlap::refuse_overlaps;
use super::pool::{Lent, Pool};
use super::transfer::{Count, Ending, Transfer};
use crate::address::Address;
use crate::error::NodeError;
use crate::handshake;

/// Connections to one peer, at most; as many as stock Mooncake keeps.
const LANES: usize = 4;

/// Longest piece of one operation, so that long ranges are spread over the connections.
const PIECE: u64 = 8 << 20;

/// A peer that is read and written by Mooncake's TCP transport. Clones are the same peer.
///
/// It is one life of the peer's process: once another one answers under its name, transfers fail
/// with [`TransferError::Restarted`], and the name is to be opened again.
#[derive(Clone, Debug)]
pub struct MooncakePeer {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    address: Address,
    name: String,
    engine: Arc<Engine>,
    runtime: Handle,
    pool: Arc<Pool>,
    progress: Duration,
    life: Life,
    version: Version,
    /// What it serves, by address: first byte and bytes.
    buffers: Mutex<Arc<Vec<(u64, u64)>>>,
    restarted: OnceLock<()>,
}

/// What is another one when the peer's process is. Stock Mooncake publishes nothing better than the
/// port that its system gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Life {
    port: u16,
    incarnation: Option<kvferry_wire::Id>,
}

impl Life {
    fn of(descriptor: &Descriptor) -> Self {
        let incarnation = descriptor.kvferry.as_ref().map(|extension| extension.incarnation);
        Self { port: descriptor.tcp_data_port, incarnation }
    }
}

/// One operation.
#[derive(Debug)]
struct Piece {
    /// Position of its range in the list.
    index: usize,
    lease: Arc<Lease>,
    /// Its first byte in the lease.
    start: u64,
    remote: u64,
    len: u64,
}

/// What the workers of a batch share.
#[derive(Debug)]
struct Batch {
    op: Op,
    pieces: Mutex<VecDeque<Piece>>,
    failure: OnceLock<TransferError>,
    /// It does not end before the last worker does, however that ends.
    _ending: Arc<Ending>,
}

impl MooncakePeer {
    pub(super) fn open(
        name: &str,
        engine: &Arc<Engine>,
        runtime: &Handle,
        progress: Duration,
    ) -> Result<Self, NodeError> {
        let address = Address::of_peer(name)?;
        let descriptor = handshake::fetch(&address)?;
        if !descriptor.protocol.offers("tcp") || descriptor.tcp_data_port == 0 {
            return Err(NodeError::NoDataPort { peer: name.to_owned() });
        }
        let version = match descriptor.tcp_proto_version.min(engine.config().tcp_proto) {
            0 | 1 => Version::V1,
            _ => Version::V2,
        };
        // The host that answered: the name that the peer gives itself may lead nowhere from here.
        let host = address.host.clone();
        let pool = Arc::new(Pool::new(host, descriptor.tcp_data_port, LANES, progress));
        let inner = Inner {
            address,
            name: name.to_owned(),
            engine: Arc::clone(engine),
            runtime: runtime.clone(),
            pool,
            progress,
            life: Life::of(&descriptor),
            version,
            buffers: Mutex::new(Arc::new(buffers(&descriptor))),
            restarted: OnceLock::new(),
        };
        tracing::debug!(
            peer = name,
            ?version,
            port = descriptor.tcp_data_port,
            "opened a Mooncake peer"
        );
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The name it was opened with.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// First byte and bytes of each buffer that it serves, by address, as last fetched. A fork is
    /// told of none.
    pub fn buffers(&self) -> Vec<(u64, u64)> {
        if self.inner.engine.check_process().is_err() {
            return Vec::new();
        }
        self.inner.buffers().to_vec()
    }

    /// Whether another process answered under its name.
    pub fn is_restarted(&self) -> bool {
        self.inner.restarted.get().is_some()
    }

    /// Starts to copy ranges, each inside registered memory here and there, and returns without
    /// waiting. They have no order among each other.
    ///
    /// An address that the peer was not known to serve makes it fetch the descriptor again before
    /// anything moves. An operation is tried again only where that changes nothing: if no
    /// connection was had for it, and a read whose kept connection turned out to be broken.
    ///
    /// # Errors
    /// [`TransferError::Range`] for local ends outside registered memory and for destinations that
    /// overlap, [`TransferError::Restarted`]. Nothing moves then; what is found later is in the
    /// transfer's state.
    pub fn submit(&self, op: Op, ranges: &[Range]) -> Result<Transfer, TransferError> {
        let submitted = Instant::now();
        let inner = &self.inner;
        inner.engine.check_process().map_err(NodeError::from)?;
        if self.is_restarted() {
            return Err(TransferError::Restarted { peer: inner.name.clone() });
        }
        refuse_overlaps(op, ranges)?;
        let mut pieces = Vec::with_capacity(ranges.len());
        for (index, range) in ranges.iter().enumerate() {
            inner.local_pieces(index, range, &mut pieces)?;
        }
        let (transfer, ending) = Transfer::begin(Count {
            engine: Arc::clone(&inner.engine),
            peer: inner.name.clone(),
            op,
            pieces: ranges.len() as u64,
            bytes: pieces.iter().map(|piece| piece.len).sum(),
            submitted,
        });
        if pieces.is_empty() {
            ending.say(Ok(()));
            return Ok(transfer);
        }
        let inner = Arc::clone(inner);
        self.inner.runtime.spawn(async move {
            let ending = Arc::new(ending);
            let outcome = inner.run(op, pieces, &ending).await;
            if let Err(error) = &outcome {
                tracing::warn!(peer = inner.name, %error, "a transfer failed");
            }
            ending.say(outcome);
        });
        Ok(transfer)
    }

    /// Fetches the peer's descriptor again.
    ///
    /// # Errors
    /// [`NodeError::PeerRestarted`] if another process answers; this peer is of no use then.
    pub fn refresh(&self) -> Result<(), NodeError> {
        self.inner.engine.check_process()?;
        self.inner.refresh()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.engine.check_process().is_err() {
            // A fork has the parent's poller: a connection that it closed would be polled no more.
            std::mem::forget(Arc::clone(&self.pool));
        }
    }
}

/// The buffers of the TCP transport, by address.
fn buffers(descriptor: &Descriptor) -> Vec<(u64, u64)> {
    let mut buffers: Vec<_> =
        descriptor.tcp_buffers().map(|buffer| (buffer.addr, buffer.length)).collect();
    buffers.sort_unstable();
    buffers
}

impl Inner {
    fn buffers(&self) -> Arc<Vec<(u64, u64)>> {
        Arc::clone(&self.locked())
    }

    fn locked(&self) -> MutexGuard<'_, Arc<Vec<(u64, u64)>>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refresh(&self) -> Result<(), NodeError> {
        let descriptor = handshake::fetch(&self.address)?;
        let life = Life::of(&descriptor);
        if life != self.life {
            let _ = self.restarted.set(());
            let shown = |life: Life| match life.incarnation {
                Some(incarnation) => incarnation.to_string(),
                None => format!("at data port {}", life.port),
            };
            return Err(NodeError::PeerRestarted {
                peer: self.name.clone(),
                expected: shown(self.life),
                found: shown(life),
            });
        }
        *self.locked() = Arc::new(buffers(&descriptor));
        Ok(())
    }

    async fn refresh_elsewhere(self: &Arc<Self>) -> Result<(), TransferError> {
        let inner = Arc::clone(self);
        let fetched = tokio::task::spawn_blocking(move || inner.refresh()).await;
        match fetched.map_err(|_| TransferError::Closed)? {
            Ok(()) => Ok(()),
            Err(NodeError::PeerRestarted { peer, .. }) => Err(TransferError::Restarted { peer }),
            Err(error) => Err(error.into()),
        }
    }

    /// Leases the local end of a range, region by region.
    fn local_pieces(
        &self,
        index: usize,
        &Range { local, remote, len }: &Range,
        pieces: &mut Vec<Piece>,
    ) -> Result<(), RangeError> {
        let overflow = |side, addr| RangeError::Overflow { index, side, addr, len };
        local.checked_add(len).ok_or_else(|| overflow(Side::Local, local))?;
        remote.checked_add(len).ok_or_else(|| overflow(Side::Remote, remote))?;
        let mut done = 0;
        while done < len {
            let (addr, rest) = (local + done, len - done);
            let unknown = RangeError::NotRegistered { index, side: Side::Local, addr, len: rest };
            let lease = Arc::new(self.engine.lease(addr, rest).ok_or(unknown)?);
            let end = done + lease.len();
            let (mut start, remote) = (0, remote + done);
            while start < lease.len() {
                let len = PIECE.min(lease.len() - start);
                let lease = Arc::clone(&lease);
                pieces.push(Piece { index, lease, start, remote: remote + start, len });
                start += len;
            }
            done = end;
        }
        Ok(())
    }

    async fn run(
        self: &Arc<Self>,
        op: Op,
        pieces: Vec<Piece>,
        ending: &Arc<Ending>,
    ) -> Result<(), TransferError> {
        let pieces = match divide(&self.buffers(), &pieces) {
            Ok(pieces) => pieces,
            Err(_) => {
                self.refresh_elsewhere().await?;
                divide(&self.buffers(), &pieces)?
            }
        };
        let workers = pieces.len().min(LANES);
        let (pieces, ending) = (Mutex::new(pieces.into()), Arc::clone(ending));
        let batch = Arc::new(Batch { op, pieces, failure: OnceLock::new(), _ending: ending });
        let mut running = tokio::task::JoinSet::new();
        for _ in 0..workers {
            let (inner, batch) = (Arc::clone(self), Arc::clone(&batch));
            running.spawn(async move { inner.work(&batch).await });
        }
        // All of them, also after a failure: only then is everything quiet.
        while let Some(ended) = running.join_next().await {
            ended.map_err(|_| TransferError::Closed)?;
        }
        let Some(failure) = batch.failure.get() else { return Ok(()) };
        // A peer that was restarted explains it best, and one whose memory changed is known better.
        if !matches!(failure, TransferError::Device { .. } | TransferError::Stalled { .. })
            && let Err(restarted @ TransferError::Restarted { .. }) = self.refresh_elsewhere().await
        {
            return Err(restarted);
        }
        Err(failure.clone())
    }

    /// Moves pieces until there are none, or one failed.
    async fn work(self: &Arc<Self>, batch: &Batch) {
        let next = || batch.pieces.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        while batch.failure.get().is_none()
            && let Some(piece) = next()
        {
            if let Err(error) = self.move_piece(batch.op, &piece).await {
                let _ = batch.failure.set(error);
            }
        }
    }

    async fn move_piece(&self, op: Op, piece: &Piece) -> Result<(), TransferError> {
        let Ok(_lane) = self.pool.lanes.acquire().await else { return Err(TransferError::Closed) };
        let broken = |error: io::Error| self.failed(piece.index, Failure::Connection(error));
        let Lent { mut connection, used } = self.pool.connect().await.map_err(broken)?;
        let mut outcome = self.operate(&mut connection, op, piece).await;
        // A read changes nothing at the peer, and a kept connection may have been given up.
        if used && op == Op::Read && outcome.as_ref().is_err_and(Failure::is_break) {
            connection = self.pool.connect_new().await.map_err(broken)?.connection;
            outcome = self.operate(&mut connection, op, piece).await;
        }
        outcome.map_err(|failure| self.failed(piece.index, failure))?;
        self.pool.keep(connection);
        Ok(())
    }

    async fn operate(
        &self,
        connection: &mut Connection,
        op: Op,
        &Piece { ref lease, start, remote, len, .. }: &Piece,
    ) -> Result<(), Failure> {
        let version = self.version;
        let op = match op {
            Op::Read => WireOp::Read,
            Op::Write => WireOp::Write,
        };
        let header = Header { op, version, addr: remote, length: len };
        let mut outcome = complete(connection, header, Memory::new(Arc::clone(lease), start)).await;
        if (op, version) == (WireOp::Write, Version::V1) && outcome.is_ok() {
            // Nobody says that the bytes are in place. Operations of one connection are done in
            // order, so they are once the next one is answered.
            let last = Header { op: WireOp::Read, version, addr: remote + len - 1, length: 1 };
            outcome = complete(connection, last, Memory::Nowhere).await;
        }
        outcome.map_err(|failure| match version {
            // Which is how version 1 rejects an address.
            Version::V1 if failure.is_break() => {
                Failure::Said(ClientError::Truncated { addr: remote, length: len })
            }
            _ => failure,
        })
    }

    fn failed(&self, index: usize, failure: Failure) -> TransferError {
        let peer = self.name.clone();
        match failure {
            Failure::Said(error) => TransferError::Refused { peer, index, error },
            Failure::Stalled => TransferError::Stalled { peer, index, waited: self.progress },
            Failure::Connection(error) => {
                TransferError::Connection { peer, index, reason: error.to_string() }
            }
            Failure::Device(error) => TransferError::Device { index, error },
        }
    }
}

/// Divides pieces where the peer's buffers end.
fn divide(buffers: &[(u64, u64)], pieces: &[Piece]) -> Result<Vec<Piece>, RangeError> {
    let mut divided = Vec::with_capacity(pieces.len());
    for &Piece { index, ref lease, start, remote, len } in pieces {
        let mut done = 0;
        while done < len {
            let (addr, rest) = (remote + done, len - done);
            let before = buffers.partition_point(|&(first, _)| first <= addr);
            let left = before.checked_sub(1).map_or(0, |at| {
                let (first, bytes) = buffers[at];
                bytes.saturating_sub(addr - first)
            });
            if left == 0 {
                let side = Side::Remote;
                return Err(RangeError::NotRegistered { index, side, addr, len: rest });
            }
            let (lease, len) = (Arc::clone(lease), rest.min(left));
            divided.push(Piece { index, lease, start: start + done, remote: addr, len });
            done += len;
        }
    }
    Ok(divided)
}

/// How an operation failed.
#[derive(Debug)]
enum Failure {
    Said(ClientError),
    Stalled,
    Connection(io::Error),
    Device(kvferry_engine::Error),
}

impl Failure {
    /// Whether the connection broke, for whatever reason.
    fn is_break(&self) -> bool {
        matches!(self, Self::Connection(_) | Self::Said(ClientError::Truncated { .. }))
    }
}

async fn complete(
    connection: &mut Connection,
    header: Header,
    mut memory: Memory,
) -> Result<(), Failure> {
    let mut client = Client::new(header);
    connection.restart();
    loop {
        if let Some(outcome) = client.outcome() {
            return outcome.map_err(Failure::Said);
        }
        match connection.advance(&mut client, Some(&mut memory)).await {
            Ok(()) => {}
            Err(MoveError::Device(error)) => return Err(Failure::Device(error)),
            Err(MoveError::Socket(error)) if error.kind() == io::ErrorKind::TimedOut => {
                return Err(Failure::Stalled);
            }
            Err(MoveError::Socket(error)) => return Err(Failure::Connection(error)),
        }
    }
}
