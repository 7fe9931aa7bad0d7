//! One connection: between its socket, the protocol's machine, and the memory that payload belongs to.
//!
//! Host memory goes straight from and to the socket. A device's goes through slices: the next ones are
//! gathered while one is on the wire, and those that came are scattered while the next one arrives.

mod copies;
mod end;
mod socket;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_device::Error as DeviceError;
use kvferry_wire::batch::{Agreed, Code, Release, Status};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use self::end::End;
use self::socket::Flow;
use super::layout::{Cursor, Layout};
use crate::error::Error;
use crate::transport::staging::{Copying, Slice, Staging};

/// Bytes that are read at once where they are not known to be payload.
const BUFFER: usize = 64 << 10;

/// Pieces of host memory in one system call; the system takes no more than 1024.
const PIECES: usize = 1000;

/// How often deadlines are looked at, with requests and without.
pub(super) const TICK: Duration = Duration::from_millis(50);
const IDLE: Duration = Duration::from_millis(500);

/// How long a lane that waits for a copy alone looks for its end before it sleeps. A copy takes 0.1 to
/// 0.5 ms on a GPU that others use, too, and whoever sleeps hears of its end 30 us later (H200).
const SPIN: Duration = Duration::from_micros(300);

/// How long a closed connection says its last words.
const PARTING: Duration = Duration::from_secs(1);

/// Decides what the channel moves.
pub(super) trait Role<E> {
    /// Handles all that the machine tells, and what changed in the moves of
    /// [`Channel::take_changed`]. False ends the connection.
    fn attend(&mut self, end: &mut E, channel: &mut Channel) -> bool;
}

/// The bytes of one request on this connection.
#[derive(Debug)]
pub(super) struct Move {
    layout: Arc<Layout>,
    /// The next byte to gather; of host memory, to send or to receive.
    cursor: Cursor,
    /// Bytes that are being gathered or were, or that came.
    begun: u64,
    pub(super) offered: u64,
    /// Offers that are not released.
    pub(super) outstanding: usize,
    /// Bytes that came and are where they belong; of host memory that is sent, bytes that the socket
    /// took.
    pub(super) applied: u64,
    /// Copies that use its memory.
    pub(super) copies: usize,
    /// Why it cannot go on.
    pub(super) failure: Option<Failure>,
    /// Some of it did not go through pinned memory though it should.
    pub(super) fell_back: bool,
}

/// Why a move cannot go on.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    /// As the peer is told.
    pub(super) status: Status,
    /// What failed, if it is this side's: the peer has nothing to do with it.
    pub(super) ours: Option<Error>,
}

/// A copy between a slice and the memory of a request.
#[derive(Debug)]
struct SliceCopy {
    request: u64,
    length: u32,
    copying: Copying,
}

/// The connection.
#[derive(Debug)]
pub(super) struct Channel {
    stream: TcpStream,
    /// Its name, or its host.
    peer: String,
    staging: Arc<Staging>,
    /// Received and not taken yet.
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    moves: HashMap<u64, Move>,
    /// Requests with bytes to gather or to offer.
    sending: VecDeque<u64>,
    /// In the order of their bytes.
    gathering: VecDeque<SliceCopy>,
    scattering: Vec<SliceCopy>,
    /// Slices that are offered, by request and offset.
    slices: HashMap<(u64, u64), Slice>,
    /// Bytes that are being gathered or are offered, and that the socket has not taken.
    ahead: u64,
    /// Slices that this lane may fill ahead.
    depth: usize,
    landing: Option<Slice>,
    /// Where the payload that lands began.
    landing_from: Cursor,
    /// Since when it waits for a slice, by side.
    waits: [Option<Instant>; 2],
    agreed: Option<Agreed>,
    changed: Vec<u64>,
    /// Told when there is something for the role, a slice, or the end of a copy.
    wake: Arc<Notify>,
}

impl Channel {
    pub(super) fn new(
        stream: TcpStream,
        peer: String,
        staging: Arc<Staging>,
        lanes: usize,
        wake: Arc<Notify>,
    ) -> Self {
        socket::prepare(&stream);
        Self {
            stream,
            peer,
            staging,
            buffer: vec![0; BUFFER].into(),
            start: 0,
            end: 0,
            moves: HashMap::new(),
            sending: VecDeque::new(),
            gathering: VecDeque::new(),
            scattering: Vec::new(),
            slices: HashMap::new(),
            ahead: 0,
            depth: lanes,
            landing: None,
            landing_from: Cursor::default(),
            waits: [None; 2],
            agreed: None,
            changed: Vec::new(),
            wake,
        }
    }

    pub(super) fn wake(&self) -> &Arc<Notify> {
        &self.wake
    }

    pub(super) fn opened(&mut self, agreed: Agreed) {
        self.agreed = Some(agreed);
    }

    /// Begins to move a request's bytes: out of the layout, or into it.
    pub(super) fn begin(&mut self, request: u64, layout: Arc<Layout>, outbound: bool) {
        if outbound && layout.length > 0 {
            self.sending.push_back(request);
        }
        let it = Move {
            layout,
            cursor: Cursor::default(),
            begun: 0,
            offered: 0,
            outstanding: 0,
            applied: 0,
            copies: 0,
            failure: None,
            fell_back: false,
        };
        self.moves.insert(request, it);
        self.changed.push(request);
    }

    pub(super) fn of(&mut self, request: u64) -> Option<&mut Move> {
        self.moves.get_mut(&request)
    }

    pub(super) fn end(&mut self, request: u64) -> Option<Move> {
        self.sending.retain(|it| *it != request);
        self.moves.remove(&request)
    }

    /// Gathers and offers nothing more of a request.
    pub(super) fn stop_sending(&mut self, request: u64) {
        self.sending.retain(|it| *it != request);
    }

    /// Requests whose move changed.
    pub(super) fn take_changed(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.changed)
    }

    pub(super) fn change(&mut self, request: u64) {
        self.changed.push(request);
    }

    pub(super) fn released(&mut self, release: &Release) {
        self.slices.remove(&(release.request, release.offset));
        self.ahead = self.ahead.saturating_sub(release.length.into());
        if let Some(it) = self.moves.get_mut(&release.request) {
            it.outstanding = it.outstanding.saturating_sub(1);
            self.changed.push(release.request);
        }
    }

    /// Runs the connection until the machine closes it, the role ends it, or it is lost.
    pub(super) async fn run<E: End>(
        &mut self,
        end: &mut E,
        role: &mut impl Role<E>,
    ) -> Option<io::Error> {
        let began = Instant::now();
        let mut ticked = began;
        let mut turns = 0u32;
        loop {
            self.settle_scattered(end);
            if ticked.elapsed() >= TICK {
                ticked = Instant::now();
                end.tick(began.elapsed());
            }
            let goes_on = role.attend(end, self);
            // Behind the role, which may have begun moves just now.
            self.prepare(end);
            if end.closed().is_some() {
                self.part(end).await;
                return None;
            }
            if !goes_on {
                return None;
            }
            let sent = match self.send(end) {
                Ok(flow) => flow,
                Err(error) => return Some(error),
            };
            let received = match self.receive(end) {
                Ok(flow) => flow,
                Err(error) => return Some(error),
            };
            if !self.changed.is_empty() {
                continue;
            }
            if sent == Flow::Moved || received == Flow::Moved {
                turns = turns.wrapping_add(1);
                // Other lanes may have this thread, too.
                if turns.is_multiple_of(4) {
                    tokio::task::yield_now().await;
                }
                continue;
            }
            if sent == Flow::Idle && self.waits_for_copies() && self.look_for_copy(end).await {
                continue;
            }
            let interest = match (sent == Flow::Blocked, received == Flow::Blocked) {
                (true, true) => Some(Interest::READABLE | Interest::WRITABLE),
                (true, false) => Some(Interest::WRITABLE),
                (false, true) => Some(Interest::READABLE),
                (false, false) => None,
            };
            self.watch_copies();
            // A lane without work has nothing but long deadlines.
            let pause = if self.agreed.is_some() && self.moves.is_empty() { IDLE } else { TICK };
            let stream = &self.stream;
            let ready = async {
                match interest {
                    Some(interest) => stream.ready(interest).await.map(|_| ()),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                ready = ready => {
                    if let Err(error) = ready {
                        return Some(error);
                    }
                }
                () = self.wake.notified() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Whether its socket has nothing to do until a copy ends.
    fn waits_for_copies(&self) -> bool {
        let sends = !self.gathering.is_empty() && self.slices.is_empty();
        sends || !self.scattering.is_empty() && self.moves.values().all(|it| it.left() == 0)
    }

    /// Looks for the end of a copy for a while. Others have the thread in between.
    async fn look_for_copy(&mut self, end: &mut impl End) -> bool {
        let start = Instant::now();
        while start.elapsed() < SPIN {
            if self.offer_gathered(end) || self.settle_scattered(end) {
                return true;
            }
            tokio::task::yield_now().await;
        }
        false
    }

    /// Asks to be woken by the ends of copies, but for those that a socket has no need of yet.
    fn watch_copies(&mut self) {
        let first = self.gathering.front_mut().filter(|_| self.slices.is_empty());
        let all = first.into_iter().chain(&mut self.scattering);
        all.for_each(|it| it.copying.watch(&self.wake));
    }

    /// Says the last words of a closed connection, and hears those of the peer.
    async fn part(&mut self, end: &mut impl End) {
        let parting = async {
            loop {
                match self.send(end) {
                    Ok(Flow::Moved) => {}
                    Ok(Flow::Blocked) => self.stream.writable().await?,
                    Ok(Flow::Idle) => break,
                    Err(error) => return Err(error),
                }
            }
            rustix::net::shutdown(&self.stream, rustix::net::Shutdown::Write)?;
            loop {
                // Else nobody looks at the time while bytes keep coming.
                tokio::task::consume_budget().await;
                match self.fill() {
                    Ok(Flow::Blocked) => self.stream.readable().await?,
                    Ok(_) => {}
                    Err(error) => return io::Result::<()>::Err(error),
                }
            }
        };
        let _ = tokio::time::timeout(PARTING, parting).await;
    }

    /// Waits until nothing copies for this connection any more.
    pub(super) async fn quiet(&mut self) {
        self.landing = None;
        loop {
            self.gathering.retain_mut(|it| it.copying.ended().is_none());
            self.scattering.retain_mut(|it| it.copying.ended().is_none());
            if self.gathering.is_empty() && self.scattering.is_empty() {
                return;
            }
            let all = self.gathering.iter_mut().chain(&mut self.scattering);
            all.for_each(|it| it.copying.watch(&self.wake));
            self.wake.notified().await;
        }
    }
}

impl Move {
    pub(super) fn length(&self) -> u64 {
        self.layout.length
    }

    /// Bytes that it has not begun to move.
    pub(super) fn left(&self) -> u64 {
        self.layout.length - self.begun
    }

    fn fail(&mut self, error: Error) {
        // What passes once there is memory again is no fault of the device.
        let code = match error {
            Error::NotStaged { .. }
            | Error::PinnedBudget { .. }
            | Error::Device(DeviceError::OutOfMemory { .. }) => Code::Exhausted,
            _ => Code::DeviceFailed,
        };
        let status = Status::new(code, error.to_string());
        self.failure.get_or_insert(Failure { status, ours: Some(error) });
    }

    /// Of host memory: bytes that the socket took.
    fn sent(&self) -> u64 {
        self.applied
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::task::Poll;

    use kvferry_wire::Id;
    use kvferry_wire::batch::{Limits, Nonce, Responder, responder};
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;
    use tokio::task::consume_budget;

    use super::*;
    use crate::config::Config;
    use crate::pinned::PinnedAccount;

    #[tokio::test]
    async fn a_peer_that_never_stops_sending_is_heard_for_no_longer_than_parting_takes() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (peer, here) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (mut peer, (here, _)) = (peer.unwrap(), here.unwrap());
        peer.write_all(&[7; 4096]).await.unwrap();
        here.readable().await.unwrap();
        let config = Config::default();
        let account = PinnedAccount::new(&config);
        let staging = Arc::new(Staging::new(&config, &[], &account).unwrap());
        let mut channel = Channel::new(here, "peer".into(), staging, 1, Arc::default());
        let settings = responder::Settings {
            limits: Limits::default(),
            credits: 1,
            incarnation: Id([1; 16]),
            key: None,
            wants_checksums: false,
        };
        let mut machine = Responder::new(settings, Nonce([2; 32]));
        {
            let mut parted = pin!(channel.part(&mut machine));
            // Once it has done as much as a task may at once, timers have their turn.
            let is_pending = poll_fn(|context| {
                while pin!(consume_budget()).poll(context).is_ready() {}
                Poll::Ready(parted.as_mut().poll(context).is_pending())
            });
            assert!(is_pending.await);
        }
        assert_eq!(channel.fill().unwrap(), Flow::Moved, "it went on");
    }
}
