//! The machines, frame by frame.

use super::*;
use crate::segment::SegmentRef;
use crate::{Id, checksum};
use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;

const HERE: Id = Id([0x11; 16]);
const THERE: Id = Id([0x22; 16]);
const SEGMENTS: [SegmentRef; 1] = [SegmentRef { segment: 5, generation: 2 }];

fn limits() -> Limits {
    Limits { slot_bytes: 64, credits: 4, requests: 2, progress_ms: 1000, ..Limits::default() }
}

fn initiator(key: Option<Key>) -> Initiator {
    initiator_of(limits(), key)
}

fn initiator_of(limits: Limits, key: Option<Key>) -> Initiator {
    Initiator::new(initiator::Settings {
        limits,
        credits: 1,
        incarnation: HERE,
        expected: THERE,
        session: Id([0x33; 16]),
        lane: 1,
        lanes: 4,
        key,
        wants_checksums: false,
        attempts: 2,
        queue: 4,
    })
}

fn responder(key: Option<Key>) -> Responder {
    responder_of(limits(), key)
}

fn responder_of(limits: Limits, key: Option<Key>) -> Responder {
    let settings =
        responder::Settings { limits, credits: 2, incarnation: THERE, key, wants_checksums: false };
    Responder::new(settings, Nonce([0x55; 32]))
}

fn key(byte: u8) -> Option<Key> {
    Some(Key::new(&[byte; 32]).unwrap())
}

/// All framing that a side has to send; its payload as zeros.
macro_rules! drain {
    ($side:expr) => {{
        let mut bytes = Vec::new();
        loop {
            let outgoing = $side.outgoing();
            if outgoing.is_empty() {
                break bytes;
            }
            let payload = outgoing.payload.map_or(0, |it| (it.length - it.sent) as usize);
            bytes.extend(outgoing.framing);
            bytes.extend(core::iter::repeat_n(0, payload));
            let count = outgoing.framing.len() + payload;
            $side.sent(count);
        }
    }};
}

/// Gives a side bytes, payload too; says how many it took.
macro_rules! feed {
    ($side:expr, $bytes:expr) => {{
        let bytes: &[u8] = $bytes;
        let mut taken = 0;
        loop {
            let rest = &bytes[taken..];
            let count = match $side.incoming() {
                Incoming::Nothing => 0,
                Incoming::Framing => $side.received(rest),
                Incoming::Payload(Landing { length, received, .. }) => {
                    let count = rest.len().min((length - received) as usize);
                    $side.received_payload(count as u32);
                    count
                }
                Incoming::Discard(left) => {
                    let count = rest.len().min(left as usize);
                    $side.received_payload(count as u32);
                    count
                }
            };
            taken += count;
            if count == 0 {
                break taken;
            }
        }
    }};
}

/// Gives a responder bytes and takes its events, as text.
macro_rules! serve {
    ($side:expr, $bytes:expr) => {{
        let (bytes, mut taken, mut events): (&[u8], _, Vec<String>) = ($bytes, 0, Vec::new());
        loop {
            let count = feed!($side, &bytes[taken..]);
            taken += count;
            match $side.event() {
                Some(event) => events.push(alloc::format!("{event:?}")),
                None if count == 0 || taken == bytes.len() => break events,
                None => {}
            }
        }
    }};
}

mod bytes;
mod damage;
mod hostile;
mod requests;
mod time;
mod trust;

/// An open lane, before the first request.
fn opened() -> (Initiator, Responder) {
    opened_of(limits())
}

fn opened_of(limits: Limits) -> (Initiator, Responder) {
    let (mut here, mut there) = (initiator_of(limits, None), responder_of(limits, None));
    here.connect(Nonce([0x44; 32]));
    feed!(there, &drain!(here));
    assert!(matches!(there.event(), Some(responder::Event::Asked(_))));
    there.accept().unwrap();
    feed!(here, &drain!(there));
    let Some(initiator::Event::Opened(agreed)) = here.event() else { panic!("it is not open") };
    let found = (agreed.peer, agreed.minor, agreed.extent_bytes);
    assert_eq!(found, (THERE, 0, limits.slot_bytes));
    (here, there)
}

fn encoded(op: Op, length: u64) -> Encoded {
    let mut encoder = Encoder::new(Vec::new(), op, Form::Ranges, Part::whole(9), 0, &SEGMENTS);
    encoder.range(Range { segment: 0, offset: 0x1000, length });
    encoder.finish().unwrap()
}

fn violation(closed: Option<&Closed>) -> Violation {
    match closed {
        Some(Closed::Violation(violation)) => violation.clone(),
        other => panic!("no violation but {other:?}"),
    }
}
