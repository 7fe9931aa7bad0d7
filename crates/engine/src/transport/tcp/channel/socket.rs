//! The socket: frames, and payload from and to where it belongs.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use kvferry_wire::batch::{Incoming, Landing};
use tokio::net::TcpStream;

use super::super::layout::Home;
use super::copies::PATIENCE;
use super::end::End;
use super::{Channel, PIECES};
use crate::transport::staging::{Pool, Side};

/// What became of an attempt to use the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    Moved,
    /// The socket is not ready.
    Blocked,
    /// There is nothing to do, or this side is not ready.
    Idle,
}

/// Bytes that a socket to a peer of this host holds; `net.core.wmem_max` may be less. By itself it grows
/// to 4 MiB, and who writes so much ahead of its reader takes its processor and the cache: R5 over 8
/// lanes on two busy cores took 190 ms with that and 56 ms with this. Over a network it has to grow
/// with the way.
const LOCAL_SEND_BYTES: usize = 512 << 10;

/// Sets a connection's options. What cannot be set is slower, and nothing else.
pub(super) fn prepare(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    let (Ok(here), Ok(there)) = (stream.local_addr(), stream.peer_addr()) else { return };
    if is_one_host(here.ip(), there.ip()) {
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(stream, LOCAL_SEND_BYTES);
    }
}

fn is_one_host(here: IpAddr, there: IpAddr) -> bool {
    here == there || there.is_loopback()
}

impl Channel {
    pub(super) fn send(&mut self, end: &mut impl End) -> io::Result<Flow> {
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

    pub(super) fn receive(&mut self, end: &mut impl End) -> io::Result<Flow> {
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

    pub(super) fn fill(&mut self) -> io::Result<Flow> {
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

    /// The socket does not wait for a slice any more.
    fn go_on(&mut self, end: &mut impl End) {
        if self.waits[1].take().is_some() {
            end.hold(false);
        }
    }

    /// Drops payload, for which no slice is needed.
    fn discard(&mut self, end: &mut impl End, count: u32) -> io::Result<Flow> {
        self.go_on(end);
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
            let take = |pool: Arc<Pool>| pool.take(Side::Receive, &self.peer, waited, &self.wake);
            match pool.and_then(take) {
                Ok(Some(slice)) => {
                    if let Some(it) = self.moves.get_mut(&landing.request) {
                        it.fell_back |= !slice.is_pinned();
                    }
                    self.landing = Some(slice);
                    self.go_on(end);
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
                        it.fail(error);
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
}

fn unknown() -> io::Error {
    io::Error::other("payload of a request that is not known")
}

#[cfg(test)]
mod tests {
    use rustix::net::sockopt::{set_socket_send_buffer_size, socket_send_buffer_size};

    use super::*;

    #[tokio::test]
    async fn a_socket_to_this_host_does_not_hold_megabytes() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (near, far) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (near, (far, _)) = (near.unwrap(), far.unwrap());
        set_socket_send_buffer_size(&far, LOCAL_SEND_BYTES).unwrap();
        let expected = socket_send_buffer_size(&far).unwrap();
        assert_ne!(socket_send_buffer_size(&near).unwrap(), expected);
        prepare(&near);
        assert_eq!(socket_send_buffer_size(&near).unwrap(), expected);
        assert!(near.nodelay().unwrap());
    }

    #[test]
    fn a_peer_is_of_this_host_if_it_has_its_address_or_the_loopback_one() {
        let is =
            |here: &str, there: &str| is_one_host(here.parse().unwrap(), there.parse().unwrap());
        assert!(is("127.0.0.1", "127.0.0.2") && is("::1", "::1") && is("10.0.0.7", "10.0.0.7"));
        assert!(!is("10.0.0.7", "10.0.0.8") && !is("fd00::1", "fd00::2"));
    }
}
