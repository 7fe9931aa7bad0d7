//! One connection: between its socket, the protocol's machine, and the memory that payload belongs to.
//!
//! Host memory goes straight from and to the socket. A device's goes through slices: the next ones are
//! gathered while one is on the wire, and those that came are scattered while the next one arrives.

use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_wire::batch::{
    Agreed, Closed, Code, Incoming, Initiator, Landing, OfferError, Outgoing, Release, Responder,
    Status,
};
use kvferry_wire::checksum::Checksum;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::layout::{Cursor, Home, Layout};
use crate::error::{Error, Result};
use crate::transport::staging::{Side, Slice, Staging, copy};

/// Bytes that are read at once where they are not known to be payload.
const BUFFER: usize = 64 << 10;

/// Pieces of host memory in one system call; the system takes no more than 1024.
const PIECES: usize = 1000;

/// How long a lane waits for a slice before it takes a slower path.
const PATIENCE: Duration = Duration::from_millis(100);

/// How often deadlines are looked at, with requests and without.
const TICK: Duration = Duration::from_millis(50);
const IDLE: Duration = Duration::from_millis(500);

/// How long a closed connection says its last words.
const PARTING: Duration = Duration::from_secs(1);

/// What both machines have in common.
pub(super) trait End {
    fn incoming(&self) -> Incoming;
    fn received(&mut self, bytes: &[u8]) -> usize;
    fn received_payload(&mut self, count: u32);
    fn outgoing(&mut self) -> Outgoing<'_>;
    fn sent(&mut self, count: usize);
    fn tick(&mut self, now: Duration);
    fn hold(&mut self, held: bool);
    fn grant(&mut self, slots: u32) -> u32;
    fn closed(&self) -> Option<&Closed>;
    fn offer(&mut self, request: u64, length: u32, checksum: u64) -> Result<u64, OfferError>;
}

macro_rules! ends {
    ($($machine:ident)*) => {
        $(impl End for $machine {
            fn incoming(&self) -> Incoming {
                self.incoming()
            }
            fn received(&mut self, bytes: &[u8]) -> usize {
                self.received(bytes)
            }
            fn received_payload(&mut self, count: u32) {
                self.received_payload(count);
            }
            fn outgoing(&mut self) -> Outgoing<'_> {
                self.outgoing()
            }
            fn sent(&mut self, count: usize) {
                self.sent(count);
            }
            fn tick(&mut self, now: Duration) {
                self.tick(now);
            }
            fn hold(&mut self, held: bool) {
                self.hold(held);
            }
            fn grant(&mut self, slots: u32) -> u32 {
                self.grant(slots)
            }
            fn closed(&self) -> Option<&Closed> {
                self.closed()
            }
            fn offer(&mut self, request: u64, length: u32, checksum: u64) -> Result<u64, OfferError> {
                self.offer(request, length, checksum)
            }
        })*
    };
}

ends! { Initiator Responder }

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
    /// Bytes that are being gathered, or were.
    gathered: u64,
    pub(super) offered: u64,
    /// Offers that are not released.
    pub(super) outstanding: usize,
    /// Bytes that came and are where they belong.
    pub(super) applied: u64,
    /// Copies that use its memory.
    pub(super) copies: usize,
    /// Why it cannot go on.
    pub(super) failure: Option<Status>,
    /// Some of it did not go through pinned memory though it should.
    pub(super) fell_back: bool,
}

#[derive(Debug)]
struct Gathering {
    number: u64,
    request: u64,
    length: u32,
    done: Option<(Option<Slice>, Result<()>)>,
}

#[derive(Debug)]
enum Copied {
    Gathered { number: u64, slice: Option<Slice>, result: Result<()> },
    Scattered { request: u64, length: u32, result: Result<()> },
}

/// What became of an attempt to use the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    Moved,
    /// The socket is not ready.
    Blocked,
    /// There is nothing to do, or this side is not ready.
    Idle,
}

/// The connection.
#[derive(Debug)]
pub(super) struct Channel {
    stream: TcpStream,
    staging: Arc<Staging>,
    /// Received and not taken yet.
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    moves: HashMap<u64, Move>,
    /// Requests with bytes to gather or to offer.
    sending: VecDeque<u64>,
    gathering: VecDeque<Gathering>,
    /// Slices that are offered, by request and offset.
    slices: HashMap<(u64, u64), Slice>,
    /// Slices that this lane may fill ahead.
    depth: usize,
    landing: Option<Slice>,
    /// Where the payload that lands began.
    landing_from: Cursor,
    /// Since when it waits for a slice, by side.
    waits: [Option<Instant>; 2],
    agreed: Option<Agreed>,
    changed: Vec<u64>,
    next_number: u64,
    copies: usize,
    copied: (UnboundedSender<Copied>, UnboundedReceiver<Copied>),
    /// Told when there is something for the role, or a slice.
    wake: Arc<Notify>,
}

impl Channel {
    pub(super) fn new(
        stream: TcpStream,
        staging: Arc<Staging>,
        lanes: usize,
        wake: Arc<Notify>,
    ) -> Self {
        Self {
            stream,
            staging,
            buffer: vec![0; BUFFER].into(),
            start: 0,
            end: 0,
            moves: HashMap::new(),
            sending: VecDeque::new(),
            gathering: VecDeque::new(),
            slices: HashMap::new(),
            depth: lanes,
            landing: None,
            landing_from: Cursor::default(),
            waits: [None; 2],
            agreed: None,
            changed: Vec::new(),
            next_number: 0,
            copies: 0,
            copied: unbounded_channel(),
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
            gathered: 0,
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

    /// Requests whose move changed.
    pub(super) fn take_changed(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.changed)
    }

    pub(super) fn change(&mut self, request: u64) {
        self.changed.push(request);
    }

    pub(super) fn released(&mut self, release: &Release) {
        self.slices.remove(&(release.request, release.offset));
        if let Some(it) = self.moves.get_mut(&release.request) {
            it.outstanding = it.outstanding.saturating_sub(1);
            self.changed.push(release.request);
        }
    }

    /// Payload is whole: applies it.
    pub(super) fn arrived<E: End>(&mut self, end: &mut E, landing: &Landing) {
        let slice = self.landing.take();
        let Some(it) = self.moves.get_mut(&landing.request) else {
            end.grant(1);
            return;
        };
        self.changed.push(landing.request);
        let length = u64::from(landing.length);
        let found = landing.checksum.map(|expected| {
            let mut sum = Checksum::new();
            match &slice {
                Some(slice) => sum.update(&slice.bytes()[..length as usize]),
                None => sum_up(&mut sum, self.landing_from, &it.layout, length),
            }
            (expected, sum.value())
        });
        if let Some((expected, found)) = found.filter(|(expected, found)| expected != found) {
            let reason = format!("checksum {found:#018x} of a payload that has {expected:#018x}");
            it.failure.get_or_insert(Status::new(Code::Corrupt, reason));
            end.grant(1);
            return;
        }
        let Some(slice) = slice else {
            it.applied += length;
            end.grant(1);
            return;
        };
        let from = it.cursor;
        it.cursor.advance(&it.layout, length);
        it.copies += 1;
        self.copies += 1;
        let (sender, request) = (self.copied.0.clone(), landing.request);
        let length = landing.length;
        let done = Box::new(move |slice: Option<Slice>, result| {
            drop(slice);
            let _ = sender.send(Copied::Scattered { request, length, result });
        });
        let pieces = from.pieces(Arc::clone(&it.layout), length.into());
        let hold = Arc::clone(&it.layout) as _;
        // SAFETY: the layout's pieces were checked, and it or the batch keeps them registered.
        unsafe { copy(self.staging.watcher(), slice, pieces, length.into(), hold, done) };
    }

    fn took(&mut self, copied: Copied, end: &mut impl End) {
        self.copies -= 1;
        match copied {
            Copied::Scattered { request, length, result } => {
                end.grant(1);
                let Some(it) = self.moves.get_mut(&request) else { return };
                it.copies -= 1;
                match result {
                    Ok(()) => it.applied += u64::from(length),
                    Err(error) => it.fail(&error),
                }
                self.changed.push(request);
            }
            Copied::Gathered { number, slice, result } => {
                let found = self.gathering.iter_mut().find(|it| it.number == number);
                let Some(gathering) = found else { return };
                if let Some(it) = self.moves.get_mut(&gathering.request) {
                    it.copies -= 1;
                    self.changed.push(gathering.request);
                }
                gathering.done = Some((slice, result));
            }
        }
    }

    /// Gathers and offers what can be.
    fn prepare(&mut self, end: &mut impl End) {
        self.offer_gathered(end);
        let Some(agreed) = self.agreed else { return };
        let extent = u64::from(agreed.extent_bytes).min(self.staging.slice_bytes());
        while let Some(&request) = self.sending.front() {
            let Some(it) = self.moves.get_mut(&request) else {
                self.sending.pop_front();
                continue;
            };
            if it.failure.is_some() || it.gathered == it.layout.length {
                self.sending.pop_front();
                continue;
            }
            let length = extent.min(it.layout.length - it.gathered);
            let Home::Device(device) = it.layout.home else {
                let checksum = match agreed.checksums {
                    true => {
                        let (mut sum, mut from) = (Checksum::new(), it.cursor);
                        from.advance(&it.layout, it.gathered - it.sent());
                        sum_up(&mut sum, from, &it.layout, length);
                        sum.value()
                    }
                    false => 0,
                };
                match end.offer(request, length as u32, checksum) {
                    Ok(_) => {
                        it.gathered += length;
                        it.offered += length;
                        it.outstanding += 1;
                        self.changed.push(request);
                    }
                    Err(_) => it.gathered = it.layout.length,
                }
                continue;
            };
            let ahead = self.gathering.len() + self.slices.len();
            let taken = self.staging.pool(device).and_then(|pool| {
                // Half of the slices at most for one peer, so that a slow one leaves some.
                if ahead >= (pool.send_slices / (2 * self.depth)).max(2) {
                    return Ok(None);
                }
                let waited = self.waits[0].is_some_and(|since| since.elapsed() >= PATIENCE);
                let taken = pool.take(Side::Send, waited, &self.wake)?;
                self.waits[0] =
                    taken.is_none().then(|| *self.waits[0].get_or_insert_with(Instant::now));
                Ok(taken)
            });
            let slice = match taken {
                Ok(Some(slice)) => slice,
                Ok(None) => return,
                Err(error) => {
                    it.fail(&error);
                    self.changed.push(request);
                    continue;
                }
            };
            it.fell_back |= !slice.is_pinned();
            let from = it.cursor;
            it.cursor.advance(&it.layout, length);
            it.gathered += length;
            it.copies += 1;
            self.copies += 1;
            let number = self.next_number;
            self.next_number += 1;
            self.gathering.push_back(Gathering {
                number,
                request,
                length: length as u32,
                done: None,
            });
            let sender = self.copied.0.clone();
            let done = Box::new(move |slice, result| {
                let _ = sender.send(Copied::Gathered { number, slice, result });
            });
            let pieces = from.pieces(Arc::clone(&it.layout), length);
            let hold = Arc::clone(&it.layout) as _;
            // SAFETY: as in `arrived`; a gather only reads them.
            unsafe { copy(self.staging.watcher(), slice, pieces, length, hold, done) };
        }
    }

    /// Offers slices in the order of their bytes.
    fn offer_gathered(&mut self, end: &mut impl End) {
        while self.gathering.front().is_some_and(|first| first.done.is_some()) {
            let Some(Gathering { request, length, done: Some((slice, result)), .. }) =
                self.gathering.pop_front()
            else {
                return;
            };
            let Some(it) = self.moves.get_mut(&request) else { continue };
            self.changed.push(request);
            if let Err(error) = result {
                it.fail(&error);
            }
            let Some(slice) = slice.filter(|_| it.failure.is_none()) else { continue };
            let checksum = match self.agreed.is_some_and(|agreed| agreed.checksums) {
                true => kvferry_wire::checksum::of(&slice.bytes()[..length as usize]),
                false => 0,
            };
            // If the request is over, the slice is free.
            if let Ok(offset) = end.offer(request, length, checksum) {
                it.offered += u64::from(length);
                it.outstanding += 1;
                self.slices.insert((request, offset), slice);
            }
        }
    }

    fn send(&mut self, end: &mut impl End) -> io::Result<Flow> {
        let out = end.outgoing();
        if out.is_empty() {
            return Ok(Flow::Idle);
        }
        let framing = out.framing.len();
        let written = match out.payload {
            None => self.stream.try_write(out.framing),
            Some(payload) => {
                let key = (payload.request, payload.offset);
                if let Some(slice) = self.slices.get(&key) {
                    let bytes = &slice.bytes()[payload.sent as usize..payload.length as usize];
                    self.stream
                        .try_write_vectored(&[IoSlice::new(out.framing), IoSlice::new(bytes)])
                } else {
                    let it = self.moves.get(&payload.request).ok_or_else(unknown)?;
                    let left = u64::from(payload.length - payload.sent);
                    let bytes = it.cursor.host_bytes(&it.layout, left, PIECES);
                    let mut slices = Vec::with_capacity(bytes.len() + 1);
                    slices.push(IoSlice::new(out.framing));
                    slices.extend(bytes.iter().map(|bytes| bytes.to_send()));
                    let written = self.stream.try_write_vectored(&slices);
                    let payload_bytes =
                        written.as_ref().map_or(0, |count| count.saturating_sub(framing));
                    if let Some(it) = self.moves.get_mut(&payload.request) {
                        let layout = Arc::clone(&it.layout);
                        it.cursor.advance(&layout, payload_bytes as u64);
                        it.applied += payload_bytes as u64;
                    }
                    written
                }
            }
        };
        match written {
            Ok(0) => Err(ErrorKind::WriteZero.into()),
            Ok(count) => {
                end.sent(count);
                Ok(Flow::Moved)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Flow::Blocked),
            Err(error) => Err(error),
        }
    }

    fn receive(&mut self, end: &mut impl End) -> io::Result<Flow> {
        match end.incoming() {
            Incoming::Nothing => Ok(Flow::Idle),
            Incoming::Framing => {
                if self.start == self.end {
                    match self.fill()? {
                        Flow::Moved => {}
                        flow => return Ok(flow),
                    }
                }
                let taken = end.received(&self.buffer[self.start..self.end]);
                self.start += taken;
                Ok(if taken > 0 { Flow::Moved } else { Flow::Idle })
            }
            Incoming::Discard(count) => {
                self.landing = None;
                if self.waits[1].take().is_some() {
                    end.hold(false);
                }
                self.discard(end, count)
            }
            Incoming::Payload(landing) => {
                let Some(it) = self.moves.get(&landing.request) else {
                    return self.discard(end, landing.length - landing.received);
                };
                match it.layout.home {
                    Home::Host => self.receive_host(end, &landing),
                    Home::Device(device) => self.receive_staged(end, &landing, device),
                }
            }
        }
    }

    fn fill(&mut self) -> io::Result<Flow> {
        match self.stream.try_read(&mut self.buffer) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                (self.start, self.end) = (0, count);
                Ok(Flow::Moved)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Flow::Blocked),
            Err(error) => Err(error),
        }
    }

    fn discard(&mut self, end: &mut impl End, count: u32) -> io::Result<Flow> {
        if self.start == self.end {
            match self.fill()? {
                Flow::Moved => {}
                flow => return Ok(flow),
            }
        }
        let count = (self.end - self.start).min(count as usize);
        self.start += count;
        end.received_payload(count as u32);
        Ok(Flow::Moved)
    }

    fn receive_host(&mut self, end: &mut impl End, landing: &Landing) -> io::Result<Flow> {
        let it = self.moves.get_mut(&landing.request).ok_or_else(unknown)?;
        let layout = Arc::clone(&it.layout);
        let left = (landing.length - landing.received) as usize;
        if landing.received == 0 {
            self.landing_from = it.cursor;
        }
        let buffered = (self.end - self.start).min(left);
        if buffered > 0 {
            let mut from = &self.buffer[self.start..self.start + buffered];
            while !from.is_empty() {
                let bytes = it.cursor.host_bytes(&layout, from.len() as u64, 1);
                let count = bytes.first().map_or(0, |bytes| bytes.copy_from(from));
                if count == 0 {
                    return Err(unknown());
                }
                it.cursor.advance(&layout, count as u64);
                from = &from[count..];
            }
            self.start += buffered;
            end.received_payload(buffered as u32);
            return Ok(Flow::Moved);
        }
        let mut bytes = it.cursor.host_bytes(&layout, left as u64, PIECES);
        let room: usize = bytes.iter().map(|bytes| bytes.len()).sum();
        let mut slices: Vec<_> = bytes.iter_mut().map(|bytes| bytes.to_receive()).collect();
        if room == left {
            slices.push(IoSliceMut::new(&mut self.buffer));
        }
        let read = self.stream.try_read_vectored(&mut slices);
        let Some(count) = self.after_read(end, read, room)? else { return Ok(Flow::Blocked) };
        if let Some(it) = self.moves.get_mut(&landing.request) {
            it.cursor.advance(&layout, count as u64);
        }
        Ok(Flow::Moved)
    }

    fn receive_staged(
        &mut self,
        end: &mut impl End,
        landing: &Landing,
        device: usize,
    ) -> io::Result<Flow> {
        if self.landing.is_none() {
            let waited = self.waits[1].is_some_and(|since| since.elapsed() >= PATIENCE);
            let pool = self.staging.pool(device);
            match pool.and_then(|pool| pool.take(Side::Receive, waited, &self.wake)) {
                Ok(Some(slice)) => {
                    if let Some(it) = self.moves.get_mut(&landing.request) {
                        it.fell_back |= !slice.is_pinned();
                    }
                    self.landing = Some(slice);
                    if self.waits[1].take().is_some() {
                        end.hold(false);
                    }
                }
                Ok(None) => {
                    if self.waits[1].is_none() {
                        self.waits[1] = Some(Instant::now());
                        end.hold(true);
                    }
                    return Ok(Flow::Idle);
                }
                Err(error) => {
                    if let Some(it) = self.moves.get_mut(&landing.request) {
                        it.fail(&error);
                    }
                    self.changed.push(landing.request);
                    return self.discard(end, landing.length - landing.received);
                }
            }
        }
        let Some(slice) = &mut self.landing else { return Err(unknown()) };
        let place = &mut slice.bytes_mut()[landing.received as usize..landing.length as usize];
        let buffered = (self.end - self.start).min(place.len());
        if buffered > 0 {
            place[..buffered].copy_from_slice(&self.buffer[self.start..self.start + buffered]);
            self.start += buffered;
            end.received_payload(buffered as u32);
            return Ok(Flow::Moved);
        }
        let room = place.len();
        let mut slices = [IoSliceMut::new(place), IoSliceMut::new(&mut self.buffer)];
        let read = self.stream.try_read_vectored(&mut slices);
        let count = self.after_read(end, read, room)?;
        Ok(if count.is_some() { Flow::Moved } else { Flow::Blocked })
    }

    /// Shares what was read between the payload, which had `room`, and the buffer behind it.
    fn after_read(
        &mut self,
        end: &mut impl End,
        read: io::Result<usize>,
        room: usize,
    ) -> io::Result<Option<usize>> {
        match read {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                let payload = count.min(room);
                (self.start, self.end) = (0, count - payload);
                end.received_payload(payload as u32);
                Ok(Some(payload))
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
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
            while let Ok(copied) = self.copied.1.try_recv() {
                self.took(copied, end);
            }
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
                if turns.is_multiple_of(32) {
                    tokio::task::yield_now().await;
                }
                continue;
            }
            let interest = match (sent == Flow::Blocked, received == Flow::Blocked) {
                (true, true) => Some(Interest::READABLE | Interest::WRITABLE),
                (true, false) => Some(Interest::WRITABLE),
                (false, true) => Some(Interest::READABLE),
                (false, false) => None,
            };
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
                Some(copied) = self.copied.1.recv() => self.took(copied, end),
                () = self.wake.notified() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
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
    pub(super) async fn quiet(&mut self, end: &mut impl End) {
        self.landing = None;
        while self.copies > 0 {
            let Some(copied) = self.copied.1.recv().await else { return };
            self.took(copied, end);
        }
        self.gathering.clear();
    }
}

impl Move {
    pub(super) fn length(&self) -> u64 {
        self.layout.length
    }

    fn fail(&mut self, error: &Error) {
        self.failure.get_or_insert(Status::new(Code::DeviceFailed, error.to_string()));
    }

    /// Of host memory: bytes that the socket took.
    fn sent(&self) -> u64 {
        self.applied
    }
}

fn sum_up(sum: &mut Checksum, from: Cursor, layout: &Layout, length: u64) {
    let (mut from, mut left) = (from, length);
    while left > 0 {
        let bytes = from.host_bytes(layout, left, PIECES);
        let count: u64 = bytes.iter().map(|bytes| bytes.len() as u64).sum();
        if count == 0 {
            return;
        }
        bytes.iter().for_each(|bytes| sum.update(&bytes.to_send()));
        from.advance(layout, count);
        left -= count;
    }
}

fn unknown() -> io::Error {
    io::Error::other("payload of a request that is not known")
}
