//! Exports between engines of one host: who hands them out, and who asks.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvferry_device::{Chunk, DeviceUuid, Export};
use kvferry_engine::{AllocationKey, Exports, ExportsError, Identity, Loan, Mismatch, Probe};
use kvferry_wire::exchange::{self, MAX_DESCRIPTORS, Message, VERSION, Wrong};
use kvferry_wire::segment::Extension;
use kvferry_wire::{Id, Uuid};

use crate::channel::{Channel, ChannelError};
use crate::describe::Local;
use crate::error::NodeError;
use crate::socket::{self, PATIENCE};

/// How long a peer may take to export an allocation: a driver call, perhaps behind others.
const FETCH_PATIENCE: Duration = Duration::from_secs(10);

/// Most loans of one connection: a peer has one per local device, for as long as it proves.
const MOST_LOANS: usize = 64;

/// Hands out exports until the client closes.
pub(crate) fn serve(local: &Local, socket: &Arc<OwnedFd>) {
    let mut channel = Channel::new(Arc::clone(socket));
    match answer(local, socket, &mut channel) {
        Ok(()) | Err(Refusal::Channel(ChannelError::Ended)) => {
            tracing::debug!(node = local.name, "an exports connection ended")
        }
        Err(refusal) => {
            local.reject();
            tracing::debug!(node = local.name, reason = %refusal, "rejected an exports connection");
            // Best effort: the client may be anything, or gone.
            let refused = Message::Refused { request: None, reason: refusal.to_string() };
            let _ = channel.send(&refused, None, Instant::now() + PATIENCE);
        }
    }
}

/// The connection to a peer's exports.
#[derive(Debug)]
pub(crate) struct Connection {
    peer: String,
    pid: u32,
    socket: Arc<OwnedFd>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    channel: Channel,
    /// Of the last request.
    request: u64,
}

/// Connects to the exports of a peer on this host.
///
/// # Errors
/// Why it is kept from mapping that peer's memory: another user, or another network namespace.
pub(crate) fn connect(peer: &str, extension: &Extension) -> Result<OwnedFd, NodeError> {
    let (name, pid) = (&extension.socket, extension.pid);
    let socket = socket::connect_unix(name).map_err(|error| {
        let reason = format!(
            "{error} at its socket @{name:?}: it ended, or is in another network namespace"
        );
        NodeError::Exports { peer: peer.to_owned(), pid, reason }
    })?;
    socket::same_user(&socket)?;
    Ok(socket)
}

impl Connection {
    /// A connection to the engine that `extension` is of, and to no other.
    pub(crate) fn open(
        peer: &str,
        extension: &Extension,
        socket: OwnedFd,
    ) -> Result<Self, NodeError> {
        let pid = extension.pid;
        let failed = |reason: String| NodeError::Exports { peer: peer.to_owned(), pid, reason };
        let socket = Arc::new(socket);
        let mut channel = Channel::new(Arc::clone(&socket));
        let deadline = Instant::now() + PATIENCE;
        let hello = Message::Hello { version: VERSION, incarnation: extension.incarnation };
        // A refusal may already be there when sending fails.
        let sent = channel.send(&hello, None, deadline);
        match channel.receive(deadline) {
            Ok((Message::Hello { version: VERSION, incarnation }, _))
                if incarnation == extension.incarnation => {}
            Ok((Message::Hello { version, incarnation }, _)) => {
                let expected = extension.incarnation;
                return Err(failed(format!(
                    "engine {incarnation} (version {version}) answers, not {expected}"
                )));
            }
            Ok((Message::Refused { reason, .. }, _)) => {
                return Err(failed(format!("it says {reason:?}")));
            }
            Ok(_) => return Err(failed(ChannelError::Unexpected.to_string())),
            Err(error) => return Err(failed(sent.err().unwrap_or(error).to_string())),
        }
        tracing::debug!(peer, pid, socket = extension.socket, "connected to a peer's exports");
        Ok(Self {
            peer: peer.to_owned(),
            pid,
            socket,
            state: Mutex::new(State { channel, request: 0 }),
        })
    }

    /// Closed by the peer's death.
    pub(crate) fn socket(&self) -> &Arc<OwnedFd> {
        &self.socket
    }

    fn fetch_by(&self, allocation: AllocationKey, deadline: Instant) -> Result<Export, Refusal> {
        let AllocationKey { device, id } = allocation;
        let fetch = |request| Message::Fetch { request, device: Uuid(device.0), id };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (answer, fds) = state.ask(fetch, deadline)?;
        let Message::Export { export, .. } = answer else {
            return Err(ChannelError::Unexpected.into());
        };
        match export {
            exchange::Export::Chunks { length: len, count } => {
                Ok(Export::Chunks { chunks: state.chunks(count, deadline)?, len })
            }
            export => unpack(export, fds),
        }
    }

    /// The answer to one request that brings no descriptors, unless that is a refusal.
    fn ask(
        &self,
        message: impl FnOnce(u64) -> Message,
        deadline: Instant,
    ) -> Result<Message, Refusal> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.ask(message, deadline).map(|(answer, _)| answer)
    }

    /// After an answer that broke the rules, ends the connection.
    fn told(&self, refusal: Refusal) -> ExportsError {
        if matches!(&refusal, Refusal::Channel(error) if !error.is_harmless()) {
            // Where the next answer would begin is unknown. The monitor sees this and declares
            // the peer lost.
            socket::shut_down(&*self.socket);
        }
        let (peer, reason) = (self.peer.clone(), refusal.to_string());
        NodeError::Exports { peer, pid: self.pid, reason }.into()
    }
}

impl State {
    /// Makes one request; its first answer, unless that is a refusal.
    fn ask(
        &mut self,
        message: impl FnOnce(u64) -> Message,
        deadline: Instant,
    ) -> Result<(Message, Vec<OwnedFd>), Refusal> {
        self.request += 1;
        self.channel.send(&message(self.request), None, deadline)?;
        self.answer(deadline)
    }

    /// The next message about the last request.
    fn answer(&mut self, deadline: Instant) -> Result<(Message, Vec<OwnedFd>), Refusal> {
        loop {
            // Of a request that was given up.
            let is_late = |request: Option<u64>| request.is_some_and(|late| late < self.request);
            let (answer, fds) = match self.channel.receive(deadline) {
                Ok((answer, _)) if is_late(answer.request()) => continue,
                Err(ChannelError::OutOfDescriptors { request }) if is_late(request) => continue,
                answer => answer?,
            };
            return match answer {
                Message::Refused { request, reason }
                    if request.is_none_or(|request| request == self.request) =>
                {
                    Err(Refusal::Peer(reason))
                }
                answer if answer.request() == Some(self.request) => Ok((answer, fds)),
                _ => Err(ChannelError::Unexpected.into()),
            };
        }
    }

    /// All chunks of an export, which may be more than one message holds.
    fn chunks(&mut self, count: u64, deadline: Instant) -> Result<Vec<Chunk>, Refusal> {
        let mut chunks: Vec<Chunk> = Vec::new();
        while (chunks.len() as u64) < count {
            let (message, fds) = self.answer(deadline)?;
            let Message::Chunks { lengths, .. } = message else {
                return Err(ChannelError::Unexpected.into());
            };
            if lengths.len() as u64 > count - chunks.len() as u64 {
                return Err(ChannelError::Unexpected.into());
            }
            chunks.extend(fds.into_iter().zip(lengths).map(|(fd, len)| Chunk { fd, len }));
        }
        Ok(chunks)
    }
}

impl Exports for Connection {
    fn fetch(&self, allocation: AllocationKey) -> Result<Export, ExportsError> {
        let fetched = self.fetch_by(allocation, Instant::now() + FETCH_PATIENCE);
        tracing::debug!(peer = self.peer, id = allocation.id, device = %allocation.device, ok = fetched.is_ok(), "fetched an export");
        fetched.map_err(|refusal| self.told(refusal))
    }

    fn probe(&self, device: DeviceUuid) -> Result<Probe, ExportsError> {
        let probe = |request| Message::Probe { request, device: Uuid(device.0) };
        match self.ask(probe, Instant::now() + FETCH_PATIENCE) {
            Ok(Message::Sample { id, seed, .. }) => {
                Ok(Probe { allocation: AllocationKey { device, id }, seed })
            }
            Ok(_) => Err(self.told(ChannelError::Unexpected.into())),
            Err(refusal) => Err(self.told(refusal)),
        }
    }

    fn prove(
        &self,
        allocation: AllocationKey,
        seed: u64,
    ) -> Result<Option<Mismatch>, ExportsError> {
        let AllocationKey { device, id } = allocation;
        let prove = |request| Message::Prove { request, device: Uuid(device.0), id, seed };
        match self.ask(prove, Instant::now() + FETCH_PATIENCE) {
            Ok(Message::Verdict { wrong, .. }) => {
                Ok(wrong.map(|Wrong { at, expected, found }| Mismatch { at, expected, found }))
            }
            Ok(_) => Err(self.told(ChannelError::Unexpected.into())),
            Err(refusal) => Err(self.told(refusal)),
        }
    }
}

/// Why a connection, or one fetch, got no further.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error(transparent)]
    User(#[from] NodeError),
    #[error("this socket speaks version {VERSION}, not {0}")]
    Version(u32),
    #[error("engine {expected} was expected, this is {found}: fetch the descriptor again")]
    Incarnation { expected: Identity, found: Identity },
    #[error("{0}")]
    Peer(String),
}

fn answer(local: &Local, socket: &Arc<OwnedFd>, channel: &mut Channel) -> Result<(), Refusal> {
    socket::same_user(&**socket)?;
    let (hello, _) = channel.receive(Instant::now() + PATIENCE)?;
    let Message::Hello { version, incarnation } = hello else {
        return Err(ChannelError::Unexpected.into());
    };
    let (expected, found) = (Identity(incarnation.0), local.engine.incarnation());
    if version != VERSION {
        return Err(Refusal::Version(version));
    }
    if expected != found {
        return Err(Refusal::Incarnation { expected, found });
    }
    tracing::debug!(node = local.name, "a peer connected for exports");
    let hello = Message::Hello { version: VERSION, incarnation: Id(found.0) };
    channel.send(&hello, None, Instant::now() + PATIENCE)?;
    let mut loans = Vec::new();
    loop {
        channel.idle()?;
        let key = |device: Uuid, id| AllocationKey { device: DeviceUuid(device.0), id };
        let message = match channel.receive(Instant::now() + PATIENCE)?.0 {
            Message::Fetch { request, device, id } => {
                hand_out(local, request, key(device, id), channel)?;
                continue;
            }
            Message::Probe { request, device } => {
                lend(local, &mut loans, request, DeviceUuid(device.0))
            }
            Message::Prove { request, device, id, seed } => {
                compare(local, &mut loans, request, key(device, id), seed)
            }
            _ => return Err(ChannelError::Unexpected.into()),
        };
        channel.send(&message, None, Instant::now() + PATIENCE)?;
    }
}

/// Answers one fetch. The descriptors made for it are closed at its end.
fn hand_out(
    local: &Local,
    request: u64,
    key: AllocationKey,
    channel: &mut Channel,
) -> Result<(), Refusal> {
    let export = local.engine.export(key);
    let deadline = Instant::now() + PATIENCE;
    let sent = match export {
        Ok(export) => send(request, &export, channel, deadline),
        Err(error) => Err(Refusal::Peer(error.to_string())),
    };
    match sent {
        Ok(()) => {
            tracing::debug!(node = local.name, id = key.id, device = %key.device, "handed out an export");
            Ok(())
        }
        // A timeout may have come within a message.
        Err(refusal @ (Refusal::Peer(_) | Refusal::Channel(ChannelError::TooManyOnTheirWay))) => {
            tracing::debug!(node = local.name, id = key.id, %refusal, "refused an export");
            let refused = Message::Refused { request: Some(request), reason: refusal.to_string() };
            Ok(channel.send(&refused, None, deadline)?)
        }
        Err(error) => Err(error),
    }
}

/// Lends memory for as long as it stays in `loans`.
fn lend(local: &Local, loans: &mut Vec<Loan>, request: u64, device: DeviceUuid) -> Message {
    if loans.len() >= MOST_LOANS {
        let reason = format!("{MOST_LOANS} samples are lent on this connection already");
        return Message::Refused { request: Some(request), reason };
    }
    match local.engine.lend(device) {
        Ok(loan) => {
            let Probe { allocation, seed } = loan.probe();
            tracing::debug!(node = local.name, id = allocation.id, %device, "lent memory for a proof");
            loans.push(loan);
            Message::Sample { request, id: allocation.id, seed }
        }
        Err(error) => {
            tracing::debug!(node = local.name, %device, %error, "lent no memory for a proof");
            Message::Refused { request: Some(request), reason: error.to_string() }
        }
    }
}

fn compare(
    local: &Local,
    loans: &mut Vec<Loan>,
    request: u64,
    key: AllocationKey,
    seed: u64,
) -> Message {
    let refused = |reason| Message::Refused { request: Some(request), reason };
    let Some(at) = loans.iter().position(|loan| loan.probe().allocation == key) else {
        return refused(format!("allocation {} was not lent on this connection", key.id));
    };
    match loans.swap_remove(at).compare(seed) {
        Ok(wrong) => {
            tracing::debug!(node = local.name, id = key.id, device = %key.device, ?wrong, "compared what a peer wrote for a proof");
            let wrong = wrong.map(|Mismatch { at, expected, found }| Wrong { at, expected, found });
            Message::Verdict { request, wrong }
        }
        Err(error) => refused(error.to_string()),
    }
}

fn send(
    request: u64,
    export: &Export,
    channel: &mut Channel,
    deadline: Instant,
) -> Result<(), Refusal> {
    let (length, fd): (u64, Option<BorrowedFd<'_>>) = match export {
        Export::File { fd, len } | Export::Pool { fd, len, .. } => (*len, Some(fd.as_fd())),
        Export::Handle { len, .. } | Export::Chunks { len, .. } => (*len, None),
    };
    let described = match export {
        Export::File { .. } => exchange::Export::File { length },
        Export::Handle { bytes, .. } => exchange::Export::Handle { length, bytes: bytes.clone() },
        Export::Pool { bytes, .. } => exchange::Export::Pool { length, bytes: bytes.clone() },
        Export::Chunks { chunks, .. } => {
            exchange::Export::Chunks { length, count: chunks.len() as u64 }
        }
    };
    channel.send(&Message::Export { request, export: described }, fd, deadline)?;
    let Export::Chunks { chunks, .. } = export else { return Ok(()) };
    for part in chunks.chunks(MAX_DESCRIPTORS) {
        let lengths = part.iter().map(|chunk| chunk.len).collect();
        let fds = part.iter().map(|chunk| chunk.fd.as_fd());
        channel.send(&Message::Chunks { request, lengths }, fds, deadline)?;
    }
    Ok(())
}

fn unpack(export: exchange::Export, fds: Vec<OwnedFd>) -> Result<Export, Refusal> {
    match (export, fds.into_iter().next()) {
        (exchange::Export::File { length: len }, Some(fd)) => Ok(Export::File { fd, len }),
        (exchange::Export::Pool { length: len, bytes }, Some(fd)) => {
            Ok(Export::Pool { fd, bytes, len })
        }
        (exchange::Export::Handle { length: len, bytes }, None) => {
            Ok(Export::Handle { bytes, len })
        }
        // The channel gives each message what it says.
        _ => Err(ChannelError::NoDescriptor.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    const KEY: AllocationKey = AllocationKey { device: DeviceUuid([1; 16]), id: 7 };

    /// A connection whose greetings are over, and the peer's end of it.
    fn connected() -> (Connection, Channel) {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let (socket, theirs) = (Arc::new(ours), Channel::new(Arc::new(theirs)));
        let state = Mutex::new(State { channel: Channel::new(Arc::clone(&socket)), request: 0 });
        (Connection { peer: "peer".into(), pid: 1, socket, state }, theirs)
    }

    fn soon() -> Instant {
        Instant::now() + PATIENCE
    }

    fn file(request: u64, length: u64) -> Message {
        Message::Export { request, export: exchange::Export::File { length } }
    }

    #[test]
    fn an_answer_that_comes_too_late_is_not_taken_for_the_next_one() {
        let (connection, peer) = connected();
        let late =
            connection.fetch_by(KEY, Instant::now() + Duration::from_millis(10)).unwrap_err();
        assert!(matches!(&late, Refusal::Channel(error) if error.is_harmless()), "{late}");
        let fd = File::open("/dev/null").unwrap();
        peer.send(&file(1, 111), Some(fd.as_fd()), soon()).unwrap();
        peer.send(&file(2, 222), Some(fd.as_fd()), soon()).unwrap();
        assert_eq!(connection.fetch_by(KEY, soon()).unwrap().len(), 222);
    }

    #[test]
    fn a_refusal_is_told_in_the_peers_words_and_the_next_fetch_goes_on() {
        let (connection, peer) = connected();
        let refused = Message::Refused { request: Some(1), reason: "no such allocation".into() };
        peer.send(&refused, None, soon()).unwrap();
        let error = connection.fetch(KEY).unwrap_err().to_string();
        assert!(error.contains("peer") && error.contains("no such allocation"), "{error}");
        let export = exchange::Export::Handle { length: 64, bytes: vec![1, 2] };
        peer.send(&Message::Export { request: 2, export }, None, soon()).unwrap();
        assert!(
            matches!(connection.fetch(KEY).unwrap(), Export::Handle { len: 64, bytes } if bytes == [1, 2])
        );
    }

    fn chunks(request: u64, lengths: &[u64]) -> Message {
        Message::Chunks { request, lengths: lengths.to_vec() }
    }

    fn announced(request: u64, length: u64, count: u64) -> Message {
        let export = exchange::Export::Chunks { length, count };
        Message::Export { request, export }
    }

    #[test]
    fn chunks_come_in_as_many_messages_as_they_take_each_with_its_own_descriptor() {
        let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let all: Vec<OwnedFd> = (0..200).map(|_| memory.try_clone().unwrap()).collect();
        let lengths: Vec<u64> = (1..=200).map(|index| index * 4096).collect();
        let total = lengths.iter().sum();
        let made = all.into_iter().zip(&lengths).map(|(fd, &len)| Chunk { fd, len });
        let export = Export::Chunks { chunks: made.collect(), len: total };
        let (connection, mut peer) = connected();
        send(1, &export, &mut peer, soon()).unwrap();
        let Export::Chunks { chunks, len } = connection.fetch_by(KEY, soon()).unwrap() else {
            panic!("chunks were sent")
        };
        let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
        assert_eq!(len, total);
        assert_eq!(chunks.iter().map(|chunk| chunk.len).collect::<Vec<_>>(), lengths);
        assert!(chunks.iter().all(|chunk| inode(&chunk.fd) == inode(&memory)));
    }

    #[test]
    fn chunks_of_a_request_that_was_given_up_are_skipped() {
        let (connection, peer) = connected();
        connection.fetch_by(KEY, Instant::now() + Duration::from_millis(10)).unwrap_err();
        let fd = File::open("/dev/null").unwrap();
        peer.send(&announced(1, 2, 2), None, soon()).unwrap();
        peer.send(&chunks(1, &[1]), [fd.as_fd()], soon()).unwrap();
        peer.send(&chunks(1, &[1]), [fd.as_fd()], soon()).unwrap();
        peer.send(&announced(2, 30, 1), None, soon()).unwrap();
        peer.send(&chunks(2, &[30]), [fd.as_fd()], soon()).unwrap();
        let Export::Chunks { chunks, len: 30 } = connection.fetch_by(KEY, soon()).unwrap() else {
            panic!("chunks were sent")
        };
        assert_eq!(chunks.len(), 1);
    }

    #[test]
    fn an_exporter_that_cannot_send_all_chunks_says_so_and_the_next_fetch_goes_on() {
        let (connection, peer) = connected();
        let fd = File::open("/dev/null").unwrap();
        peer.send(&announced(1, 2, 2), None, soon()).unwrap();
        peer.send(&chunks(1, &[1]), [fd.as_fd()], soon()).unwrap();
        let refused = Message::Refused { request: Some(1), reason: "no descriptors".into() };
        peer.send(&refused, None, soon()).unwrap();
        let error = connection.fetch(KEY).unwrap_err().to_string();
        assert!(error.contains("no descriptors"), "{error}");
        peer.send(&file(2, 7), [fd.as_fd()], soon()).unwrap();
        assert_eq!(connection.fetch_by(KEY, soon()).unwrap().len(), 7);
    }

    #[test]
    fn an_answer_that_breaks_the_rules_ends_the_connection() {
        let file_of_null = File::open("/dev/null").unwrap();
        let null = || file_of_null.as_fd();
        let hello = Message::Hello { version: VERSION, incarnation: Id([0; 16]) };
        let refused = Message::Refused { request: Some(1), reason: String::new() };
        let handle = Message::Export {
            request: 1,
            export: exchange::Export::Handle { length: 1, bytes: vec![] },
        };
        let pool = Message::Export {
            request: 1,
            export: exchange::Export::Pool { length: 1, bytes: vec![] },
        };
        let one = |message, fds| vec![(message, fds)];
        for answers in [
            one(file(1, 64), vec![]),
            one(file(1, 64), vec![null(), null()]),
            one(file(9, 64), vec![null()]),
            one(refused, vec![null()]),
            one(handle, vec![null()]),
            one(pool, vec![]),
            one(hello.clone(), vec![]),
            one(chunks(9, &[1]), vec![null()]),
            // Chunks that were not announced are no answer.
            one(chunks(1, &[1]), vec![null()]),
            one(announced(1, 1, 1), vec![null()]),
            // Fewer descriptors than said, more than said.
            vec![(announced(1, 2, 2), vec![]), (chunks(1, &[1, 1]), vec![null()])],
            vec![(announced(1, 2, 2), vec![]), (chunks(1, &[1]), vec![null(), null()])],
            // More chunks than announced.
            vec![(announced(1, 2, 1), vec![]), (chunks(1, &[1, 1]), vec![null(), null()])],
            // Something else in their place.
            vec![(announced(1, 2, 2), vec![]), (file(1, 2), vec![null()])],
            vec![(announced(1, 2, 2), vec![]), (hello, vec![])],
        ] {
            let (connection, mut peer) = connected();
            for (answer, fds) in &answers {
                peer.send(answer, fds.iter().copied(), soon()).unwrap();
            }
            connection.fetch(KEY).expect_err("refused");
            peer.receive(soon()).expect("the fetch");
            assert!(matches!(peer.receive(soon()), Err(ChannelError::Ended)), "{answers:?}");
        }
    }
}
