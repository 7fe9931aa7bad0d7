//! What the fuzz targets run, and the corpus test of the stable build (`tests/corpus.rs`).
//!
//! Each takes any bytes and panics only if something is wrong with this crate.
#![allow(dead_code, unreachable_pub)]

use kvferry_wire::batch::{
    Encoder, Form, Incoming, Initiator, Key, Limits, Nonce, Op, Outcome, Part, Range, Responder,
    Status, Strided, initiator, responder,
};
use kvferry_wire::mooncake::{self, Server};
use kvferry_wire::segment::SegmentRef;
use kvferry_wire::{Id, exchange, handshake};

/// First byte of the memory that the Mooncake server of [`mooncake_server`] has.
pub const BASE: u64 = 0x1_0000;
/// Its bytes.
pub const MEMORY: u64 = 4096;
/// The responder's engine.
pub const THERE: Id = Id([0x22; 16]);
/// The initiator's engine.
pub const HERE: Id = Id([0x11; 16]);
/// The registered segment of [`batch_responder`].
pub const SEGMENT: SegmentRef = SegmentRef { segment: 5, generation: 2 };
/// What both sides take.
pub const LIMITS: Limits = Limits {
    frame_bytes: 2048,
    slot_bytes: 64,
    request_bytes: 1 << 16,
    ranges: 64,
    requests: 3,
    credits: 3,
    progress_ms: 1000,
    idle_ms: 5000,
};

/// A server of two operations at most: how it ended, and how many operations were done.
pub fn mooncake_server(data: &[u8]) -> usize {
    let (&portion, mut bytes) = data.split_first().unwrap_or((&1, data));
    let portion = usize::from(portion).max(1);
    let (mut server, mut done, mut memory) = (Server::new(), 0, [0u8; MEMORY as usize]);
    let mut at = 0;
    loop {
        if let Some(header) = server.request() {
            let end = header.addr.checked_add(header.length).expect("it was checked");
            assert!(header.length > 0);
            if header.addr >= BASE && end <= BASE + MEMORY {
                at = (header.addr - BASE) as usize;
                server.allow();
            } else {
                server.reject();
            }
        }
        if server.written().is_some() {
            server.applied();
            done += 1;
        }
        match server.outgoing() {
            mooncake::Outgoing::Nothing => {}
            mooncake::Outgoing::Framing(status) => {
                let count = portion.min(status.len());
                server.sent(count as u64);
                continue;
            }
            mooncake::Outgoing::Payload(payload) => {
                let count = payload.left.min(portion as u64);
                let from = at + payload.offset as usize;
                assert!(from + count as usize <= memory.len());
                server.sent(count);
                done += usize::from(count == payload.left);
                continue;
            }
        }
        if server.closing().is_some() {
            return done;
        }
        if bytes.is_empty() {
            server.received_end();
            return done;
        }
        let part = &bytes[..portion.min(bytes.len())];
        let taken = match server.incoming() {
            mooncake::Incoming::Nothing => unreachable!("it waits for nobody"),
            mooncake::Incoming::Framing(_) => server.received(part),
            mooncake::Incoming::Payload(payload) => {
                let count = part.len().min(usize::try_from(payload.left).unwrap_or(usize::MAX));
                let to = at + payload.offset as usize;
                memory[to..to + count].copy_from_slice(&part[..count]);
                server.received_payload(count as u64);
                count
            }
        };
        bytes = &bytes[taken..];
    }
}

/// An operation of [`mooncake_client`], as its first byte says.
pub fn operation(flags: u8) -> mooncake::Header {
    let op = if flags & 1 == 0 { mooncake::Op::Read } else { mooncake::Op::Write };
    let version = if flags & 2 == 0 { mooncake::Version::V1 } else { mooncake::Version::V2 };
    mooncake::Header { op, version, addr: BASE, length: u64::from(flags >> 3) }
}

/// Clients of one operation after the other, on the bytes of a server: how many were done until one
/// was not.
pub fn mooncake_client(data: &[u8]) -> usize {
    let (&portion, mut bytes) = data.split_first().unwrap_or((&1, data));
    let mut done = 0;
    while let Some((&flags, answer)) = bytes.split_first() {
        bytes = answer;
        if !client_operation(flags, usize::from(portion).max(1), &mut bytes) {
            break;
        }
        done += 1;
    }
    done
}

fn client_operation(flags: u8, portion: usize, bytes: &mut &[u8]) -> bool {
    let header = operation(flags);
    // Whether an answer may come before all was sent.
    let at_once = flags & 4 == 4;
    let mut client = mooncake::Client::new(header);
    let (mut sent, mut landed) = (0, 0);
    while client.outcome().is_none() {
        let count = match client.outgoing() {
            mooncake::Outgoing::Nothing => 0,
            mooncake::Outgoing::Framing(framing) => framing.len().min(portion) as u64,
            mooncake::Outgoing::Payload(payload) => {
                assert_eq!(payload.offset + payload.left, header.length);
                payload.left.min(portion as u64)
            }
        };
        client.sent(count);
        sent += count;
        if count > 0 && !at_once {
            continue;
        }
        let part = &bytes[..portion.min(bytes.len())];
        let taken = match client.incoming() {
            mooncake::Incoming::Nothing => {
                assert!(count > 0 || client.outcome().is_some(), "it waits for nobody");
                0
            }
            _ if part.is_empty() => {
                client.received_end();
                0
            }
            mooncake::Incoming::Framing(_) => client.received(part),
            mooncake::Incoming::Payload(payload) => {
                assert_eq!(payload.offset + payload.left, header.length);
                let count = payload.left.min(part.len() as u64);
                landed += count;
                client.received_payload(count);
                count as usize
            }
        };
        *bytes = &bytes[taken..];
    }
    let is_done = client.outcome() == Some(Ok(()));
    if is_done && header.length > 0 {
        let (read, written) = match header.op {
            mooncake::Op::Read => (header.length, 0),
            mooncake::Op::Write => (0, header.length),
        };
        assert_eq!(landed, read);
        assert!(at_once || sent == mooncake::HEADER_LENGTH as u64 + written);
    }
    is_done
}

/// A decoder of what hands over exports: how many messages it found.
pub fn exchange(data: &[u8]) -> usize {
    let (&portion, bytes) = data.split_first().unwrap_or((&1, data));
    let mut decoder = exchange::Decoder::new();
    let mut found = 0;
    for part in bytes.chunks(usize::from(portion).max(1)) {
        decoder.push(part);
        loop {
            match decoder.poll() {
                Ok(Some(message)) => {
                    assert!(message.descriptors() <= exchange::MAX_DESCRIPTORS);
                    let mut decoder = exchange::Decoder::new();
                    decoder.push(&exchange::encode(&message).expect("it was read"));
                    assert_eq!(decoder.poll(), Ok(Some(message)));
                    found += 1;
                }
                Ok(None) => break,
                Err(_) => return found,
            }
        }
    }
    found
}

/// A decoder of handshakes: how many messages it found.
pub fn handshake(data: &[u8]) -> usize {
    let (&portion, bytes) = data.split_first().unwrap_or((&1, data));
    let mut decoder = handshake::Decoder::new(1 << 16);
    let mut found = 0;
    for part in bytes.chunks(usize::from(portion).max(1)) {
        decoder.push(part);
        loop {
            match decoder.poll() {
                Ok(Some(message)) => {
                    assert!(message.body.len() <= 1 << 16);
                    let again = handshake::encode(message.kind, &message.body);
                    let mut decoder = handshake::Decoder::new(1 << 16);
                    decoder.push(&again);
                    assert_eq!(decoder.poll(), Ok(Some(message)));
                    found += 1;
                }
                Ok(None) => break,
                Err(_) => return found,
            }
        }
    }
    found
}

/// A descriptor: whether it is one, which is then also written and read again.
pub fn segment(data: &[u8]) -> usize {
    let Ok(descriptor) = kvferry_wire::segment::parse(data) else { return 0 };
    for buffer in &descriptor.buffers {
        assert!(buffer.addr > 0 && buffer.addr.checked_add(buffer.length).is_some());
    }
    let again = kvferry_wire::segment::encode(&descriptor).expect("it was checked");
    assert_eq!(kvferry_wire::segment::parse(&again).as_ref(), Ok(&descriptor));
    1 + descriptor.tcp_buffers().count()
}

/// Splits data into portions to receive and, where a portion's length is zero, deeds of the host.
fn portions(mut data: &[u8]) -> impl Iterator<Item = Result<&[u8], u8>> {
    std::iter::from_fn(move || {
        let (&length, rest) = data.split_first()?;
        if length == 0 {
            let (&deed, rest) = rest.split_first()?;
            data = rest;
            return Some(Err(deed));
        }
        let (portion, rest) = rest.split_at(rest.len().min(length.into()));
        data = rest;
        Some(Ok(portion))
    })
}

/// A key, if the data wants one.
fn key(flags: u8) -> Option<Key> {
    (flags & 1 == 1).then(|| Key::new(&[7; 32]).expect("it is long enough"))
}

fn check_incoming(incoming: Incoming) {
    if let Incoming::Payload(landing) = incoming {
        assert!(landing.length <= LIMITS.slot_bytes && landing.received < landing.length);
        assert!(landing.offset + u64::from(landing.length) <= LIMITS.request_bytes);
    }
}

/// A responder on the bytes of an initiator: how many requests it was asked.
pub fn batch_responder(data: &[u8]) -> usize {
    let (&flags, data) = data.split_first().unwrap_or((&0, data));
    let settings = responder::Settings {
        limits: LIMITS,
        credits: 2,
        incarnation: THERE,
        key: key(flags),
        wants_checksums: flags & 2 == 2,
    };
    let mut there = Responder::new(settings, Nonce([0x55; 32]));
    let (mut asked, mut now) = (0, std::time::Duration::ZERO);
    let mut open: Vec<(u64, Op, u64)> = Vec::new();
    let mut offers = 0usize;
    for portion in portions(data) {
        let mut rest = portion.unwrap_or(&[]);
        loop {
            check_incoming(there.incoming());
            let taken = match there.incoming() {
                Incoming::Nothing => 0,
                Incoming::Framing => there.received(rest),
                Incoming::Payload(landing) => {
                    let count = rest.len().min((landing.length - landing.received) as usize);
                    there.received_payload(count as u32);
                    count
                }
                Incoming::Discard(left) => {
                    let count = rest.len().min(left as usize);
                    there.received_payload(count as u32);
                    count
                }
            };
            rest = &rest[taken..];
            let Some(event) = there.event() else { if taken == 0 { break } else { continue } };
            match event {
                responder::Event::Asked(_) => {
                    there.accept().expect("it was asked");
                }
                responder::Event::Request { request, body } => {
                    asked += 1;
                    let found: u64 = body.pieces().take(1 << 17).map(|piece| piece.length).sum();
                    assert_eq!(found, body.length);
                    let segments: Vec<_> = body.segments().collect();
                    for entry in body.entries() {
                        let (low, high) = entry.hull();
                        assert!(low < high && (entry.segment() as usize) < segments.len());
                    }
                    open.push((request, body.op, body.length));
                }
                responder::Event::Arrived(_) => {
                    there.grant(1);
                }
                responder::Event::Released(_) => offers -= 1,
                responder::Event::Cancelled { .. } | responder::Event::Overdue { .. } => {}
            }
        }
        if let Err(deed) = portion {
            let at = usize::from(deed >> 4) % open.len().max(1);
            match (deed & 15, open.get(at).copied()) {
                (0, Some((request, Op::Read, length))) => {
                    let most = length.min(LIMITS.slot_bytes.into()) as u32;
                    offers += usize::from(there.offer(request, most, 0).is_ok());
                }
                (1, Some((request, ..))) => {
                    let done = there.finish(request, Status::DONE).is_ok();
                    open.retain(|one| !done || one.0 != request);
                }
                (2, Some((request, ..))) => {
                    let status = Status::new(kvferry_wire::batch::Code::OutOfBounds, "so");
                    let _ = there.finish(request, status);
                    open.remove(at);
                }
                (3, Some((request, ..))) => {
                    let other = open[usize::from(deed) % open.len()].0;
                    let _ = there.not_before(request, other);
                }
                (4, _) => {
                    now += std::time::Duration::from_millis(200);
                    there.tick(now);
                }
                (5, _) => there.shut_down(),
                (6, _) => there.hold(deed & 16 == 16),
                _ => {}
            }
        }
        let outgoing = there.outgoing();
        let payload = outgoing.payload.map_or(0, |departure| departure.length - departure.sent);
        let count = outgoing.framing.len() + payload as usize;
        there.sent(count);
        assert!(there.held_bytes() <= 2 * LIMITS.frame_bytes as usize);
        assert!(there.requests().count() <= LIMITS.requests as usize);
        assert!(there.granted() <= LIMITS.credits);
    }
    there.disconnected();
    while let Some(event) = there.event() {
        offers -= usize::from(matches!(event, responder::Event::Released(_)));
    }
    assert_eq!(offers, 0, "slots that are never released");
    asked
}

/// Requests of every form, for [`batch_initiator`] and for the corpus of [`batch_responder`].
pub fn requests() -> Vec<kvferry_wire::batch::Encoded> {
    let begin = |op, form| Encoder::new(Vec::new(), op, form, Part::whole(9), 0, &[SEGMENT]);
    let mut write = begin(Op::Write, Form::Ranges);
    write.range(Range { segment: 0, offset: 16, length: 100 });
    let mut read = begin(Op::Read, Form::Strided);
    read.strided(Strided { segment: 0, offset: 0, length: 8, count: 4, stride: 32 });
    let mut pages = begin(Op::Read, Form::Paged);
    let paged = kvferry_wire::batch::Paged {
        segment: 0,
        offset: 64,
        page_stride: 256,
        layer_stride: 64,
        row_stride: 16,
        row_bytes: 4,
        layers: 2,
        rows: 3,
    };
    pages.paged(paged, &[2, 0, 1]);
    [write, read, pages].map(|request| request.finish().expect("it is a request")).into()
}

/// The initiator of [`batch_initiator`], connected.
pub fn initiator(flags: u8) -> Initiator {
    let mut here = Initiator::new(initiator::Settings {
        limits: LIMITS,
        credits: 2,
        incarnation: HERE,
        expected: THERE,
        session: Id([0x33; 16]),
        lane: 0,
        lanes: 1,
        key: key(flags),
        wants_checksums: flags & 2 == 2,
        attempts: 2,
        queue: 8,
    });
    here.connect(Nonce([0x44; 32]));
    here
}

/// An initiator on the bytes of a responder: how many of its requests were done.
pub fn batch_initiator(data: &[u8]) -> usize {
    let (&flags, data) = data.split_first().unwrap_or((&0, data));
    let mut here = initiator(flags);
    let mut ended = std::collections::BTreeMap::new();
    let mut open: Vec<u64> =
        requests().into_iter().map(|request| here.submit(request).expect("it has room")).collect();
    let all = open.len();
    let (mut offers, mut now) = (0usize, std::time::Duration::ZERO);
    let mut tell = |here: &mut Initiator, open: &mut Vec<u64>, offers: &mut usize| {
        while let Some(event) = here.event() {
            match event {
                initiator::Event::Released(_) => *offers -= 1,
                initiator::Event::Arrived(landing) => {
                    assert!(landing.length <= LIMITS.slot_bytes);
                    here.grant(1);
                }
                initiator::Event::Ended { request, outcome } => {
                    open.retain(|one| *one != request);
                    let before = ended.insert(request, outcome);
                    assert!(before.is_none(), "request {request} ended twice");
                }
                _ => {}
            }
        }
        ended.values().filter(|outcome| **outcome == Outcome::Done).count()
    };
    for portion in portions(data) {
        let mut rest = portion.unwrap_or(&[]);
        loop {
            check_incoming(here.incoming());
            let taken = match here.incoming() {
                Incoming::Nothing => 0,
                Incoming::Framing => here.received(rest),
                Incoming::Payload(landing) => {
                    let count = rest.len().min((landing.length - landing.received) as usize);
                    here.received_payload(count as u32);
                    count
                }
                Incoming::Discard(left) => {
                    let count = rest.len().min(left as usize);
                    here.received_payload(count as u32);
                    count
                }
            };
            rest = &rest[taken..];
            if taken == 0 {
                break;
            }
        }
        tell(&mut here, &mut open, &mut offers);
        if let Err(deed) = portion {
            let request = open.get(usize::from(deed >> 4) % open.len().max(1)).copied();
            match (deed & 15, request) {
                (0, Some(request)) => offers += usize::from(here.offer(request, 50, 0).is_ok()),
                (1, Some(request)) => here.cancel(request),
                (2, Some(request)) => {
                    here.fail(request, Status::new(kvferry_wire::batch::Code::Corrupt, ""))
                }
                (4, _) => {
                    now += std::time::Duration::from_millis(200);
                    here.tick(now);
                }
                (5, _) => here.retire(),
                (6, _) => here.hold(deed & 16 == 16),
                (7, _) => {
                    here.disconnected();
                    here.connect(Nonce([deed; 32]));
                }
                _ => {}
            }
        }
        let outgoing = here.outgoing();
        let payload = outgoing.payload.map_or(0, |departure| departure.length - departure.sent);
        let count = outgoing.framing.len() + payload as usize;
        here.sent(count);
        assert!(here.held_bytes() <= 2 * LIMITS.frame_bytes as usize);
        assert!(here.granted() <= LIMITS.credits);
        tell(&mut here, &mut open, &mut offers);
    }
    here.disconnected();
    here.give_up();
    let done = tell(&mut here, &mut open, &mut offers);
    assert_eq!((offers, open.len(), here.requests()), (0, 0, 0), "what never ends");
    assert!(done <= all);
    done
}
