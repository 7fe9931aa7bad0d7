//! Exports between engines of one host: who hands them out, and who asks.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvferry_device::{DeviceUuid, Export};
use kvferry_engine::{AllocationKey, Exports, ExportsError, Identity, Loan, Mismatch, Probe};
use kvferry_wire::exchange::{self, Message, VERSION, Wrong};
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

impl Connection {
    /// Connects to the engine that `extension` is of, and to no other.
    pub(crate) fn open(peer: &str, extension: &Extension) -> Result<Self, NodeError> {
        let pid = extension.pid;
        let failed = |reason: String| NodeError::Exports { peer: peer.to_owned(), pid, reason };
        let name = &extension.socket;
        let socket = socket::connect_unix(name).map_err(|error| {
            failed(format!(
                "{error} at its socket @{name:?}: it ended, or is in another network namespace"
            ))
        })?;
        socket::same_user(&socket)?;
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
        tracing::debug!(peer, pid, socket = name, "connected to a peer's exports");
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
        match self.ask(fetch, deadline)? {
            (Message::Export { export, .. }, fd) => unpack(export, fd),
            _ => Err(ChannelError::Unexpected.into()),
        }
    }

    /// The answer to one request, unless that is a refusal.
    fn ask(
        &self,
        message: impl FnOnce(u64) -> Message,
        deadline: Instant,
    ) -> Result<(Message, Option<OwnedFd>), Refusal> {
        let state = &mut *self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.request += 1;
        state.channel.send(&message(state.request), None, deadline)?;
        loop {
            let (answer, fd) = state.channel.receive(deadline)?;
            match answer.request() {
                // The answer to a request that was given up.
                Some(request) if request < state.request => continue,
                Some(request) if request > state.request => {
                    return Err(ChannelError::Unexpected.into());
                }
                _ => {}
            }
            return match answer {
                Message::Refused { reason, .. } => Err(Refusal::Peer(reason)),
                Message::Hello { .. } => Err(ChannelError::Unexpected.into()),
                answer => Ok((answer, fd)),
            };
        }
    }

    /// After an answer that broke the rules, ends the connection.
    fn told(&self, refusal: Refusal) -> ExportsError {
        if matches!(&refusal, Refusal::Channel(error) if !error.is_timeout()) {
            // Where the next answer would begin is unknown. The monitor sees this and declares
            // the peer lost.
            socket::shut_down(&*self.socket);
        }
        let (peer, reason) = (self.peer.clone(), refusal.to_string());
        NodeError::Exports { peer, pid: self.pid, reason }.into()
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
            Ok((Message::Sample { id, seed, .. }, _)) => {
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
            Ok((Message::Verdict { wrong, .. }, _)) => {
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
        let (message, fd) = match channel.receive(Instant::now() + PATIENCE)?.0 {
            Message::Fetch { request, device, id } => export(local, request, key(device, id)),
            Message::Probe { request, device } => {
                (lend(local, &mut loans, request, DeviceUuid(device.0)), None)
            }
            Message::Prove { request, device, id, seed } => {
                (compare(local, &mut loans, request, key(device, id), seed), None)
            }
            _ => return Err(ChannelError::Unexpected.into()),
        };
        channel.send(&message, fd.as_ref().map(AsFd::as_fd), Instant::now() + PATIENCE)?;
    }
}

fn export(local: &Local, request: u64, key: AllocationKey) -> (Message, Option<OwnedFd>) {
    let (export, fd) = match local.engine.export(key) {
        Ok(Export::File { fd, len: length }) => (exchange::Export::File { length }, Some(fd)),
        Ok(Export::Handle { bytes, len: length }) => {
            (exchange::Export::Handle { length, bytes }, None)
        }
        Err(error) => {
            tracing::debug!(node = local.name, id = key.id, %error, "refused an export");
            return (Message::Refused { request: Some(request), reason: error.to_string() }, None);
        }
    };
    tracing::debug!(node = local.name, id = key.id, device = %key.device, "handed out an export");
    (Message::Export { request, export }, fd)
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

fn unpack(export: exchange::Export, fd: Option<OwnedFd>) -> Result<Export, Refusal> {
    match (export, fd) {
        (exchange::Export::File { length: len }, Some(fd)) => Ok(Export::File { fd, len }),
        (exchange::Export::File { .. }, None) => Err(ChannelError::NoDescriptor.into()),
        (exchange::Export::Handle { length: len, bytes }, _) => Ok(Export::Handle { bytes, len }),
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
        assert!(matches!(&late, Refusal::Channel(error) if error.is_timeout()), "{late}");
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

    #[test]
    fn an_answer_that_breaks_the_rules_ends_the_connection() {
        let fd = File::open("/dev/null").unwrap();
        let hello = Message::Hello { version: VERSION, incarnation: Id([0; 16]) };
        let refused = Message::Refused { request: Some(1), reason: String::new() };
        for (answer, fd) in [
            (file(1, 64), None),
            (file(9, 64), Some(fd.as_fd())),
            (refused, Some(fd.as_fd())),
            (hello, None),
        ] {
            let (connection, mut peer) = connected();
            peer.send(&answer, fd, soon()).unwrap();
            connection.fetch(KEY).expect_err("refused");
            peer.receive(soon()).expect("the fetch");
            assert!(matches!(peer.receive(soon()), Err(ChannelError::Ended)), "{answer:?}");
        }
    }
}
