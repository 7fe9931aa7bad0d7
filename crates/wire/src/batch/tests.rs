use super::*;
use crate::segment::SegmentRef;
use crate::{Id, checksum};
use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;
use proptest::prelude::*;

const HERE: Id = Id([0x11; 16]);
const THERE: Id = Id([0x22; 16]);
const SEGMENTS: [SegmentRef; 1] = [SegmentRef { segment: 5, generation: 2 }];

fn limits() -> Limits {
    Limits { slot_bytes: 64, credits: 4, requests: 2, progress_ms: 1000, ..Limits::default() }
}

fn initiator(key: Option<Key>) -> Initiator {
    Initiator::new(initiator::Settings {
        limits: limits(),
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
    let settings = responder::Settings {
        limits: limits(),
        credits: 2,
        incarnation: THERE,
        key,
        wants_checksums: false,
    };
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

/// An open lane, before the first request.
fn opened() -> (Initiator, Responder) {
    let (mut here, mut there) = (initiator(None), responder(None));
    here.connect(Nonce([0x44; 32]));
    feed!(there, &drain!(here));
    assert!(matches!(there.event(), Some(responder::Event::Asked(_))));
    there.accept().unwrap();
    feed!(here, &drain!(there));
    let Some(initiator::Event::Opened(agreed)) = here.event() else { panic!("it is not open") };
    assert_eq!((agreed.peer, agreed.minor, agreed.extent_bytes), (THERE, 0, 64));
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

#[test]
fn hellos_have_these_bytes() {
    let mut here = initiator(None);
    here.connect(Nonce([0x44; 32]));
    let bytes = drain!(here);
    let mut expected = Vec::new();
    expected.extend([152, 0, 0, 0, 0x01, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend(b"KVFERRY\0");
    expected.extend([1, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend([0x11; 16]);
    expected.extend([0x22; 16]);
    expected.extend([0x33; 16]);
    expected.extend([1, 0, 4, 0, 0, 0, 0, 0]);
    expected.extend([1, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend([0x44; 32]);
    expected.extend([0, 0, 0, 0, 0, 1, 0, 0]);
    expected.extend([0, 0, 4, 0]);
    expected.extend([64, 0, 0, 0]);
    expected.extend([0x80, 0x3e, 0, 0]);
    expected.extend([2, 0, 0, 0]);
    expected.extend([4, 0, 0, 0]);
    expected.extend([0xe8, 3, 0, 0]);
    expected.extend([0xc0, 0xd4, 1, 0]);
    expected.extend([1, 0, 0, 0]);
    assert_eq!(bytes, expected);
}

#[test]
fn requests_have_these_bytes() {
    let part = Part { transfer: 0x0102, index: 1, count: 3 };
    let segments = [SEGMENTS[0], SegmentRef { segment: 6, generation: 1 }];
    let begin = |form| Encoder::new(vec![9; 99], Op::Write, form, part, 500, &segments);
    let fixed = |body: u8, length: u8, form: u8, count: u8| {
        let mut bytes = vec![body, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        bytes.extend([2, 1, 0, 0, 0, 0, 0, 0, 1, 0, 3, 0, 0xf4, 1, 0, 0]);
        bytes.extend([length, 0, 0, 0, 0, 0, 0, 0, form, 0, 2, 0, count, 0, 0, 0]);
        bytes.extend([5, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend([6, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        bytes
    };
    let mut ranges = begin(Form::Ranges);
    ranges.range(Range { segment: 1, offset: 0x10, length: 7 });
    ranges.range(Range { segment: 0, offset: 0x99, length: 0 });
    ranges.range(Range { segment: 0, offset: 0x20, length: 3 });
    let mut expected = fixed(96, 10, 0, 2);
    expected.extend([0x10, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 1, 0, 0, 0]);
    expected.extend([0x20, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(ranges.finish().unwrap().frame(), expected);

    let mut strided = begin(Form::Strided);
    strided.strided(Strided { segment: 1, offset: 0x10, length: 4, count: 3, stride: 8 });
    let mut expected = fixed(104, 12, 1, 1);
    expected.extend([1, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend([4, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(strided.finish().unwrap().frame(), expected);

    let mut paged = begin(Form::Paged);
    let pages = Paged {
        segment: 0,
        offset: 0x40,
        page_stride: 0x100,
        layer_stride: 0x20,
        row_stride: 8,
        row_bytes: 2,
        layers: 2,
        rows: 3,
    };
    paged.paged(pages, &[4, 0, 2]);
    let mut expected = fixed(136, 36, 2, 1);
    expected.extend([0, 0, 0, 0, 3, 0, 0, 0, 0x40, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    expected.extend([0x20, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend([2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(paged.finish().unwrap().frame(), expected);
}

#[test]
fn the_other_frames_have_these_bytes() {
    let (mut here, mut there) = opened();
    let request = here.submit(encoded(Op::Write, 100)).unwrap();
    feed!(there, &drain!(here));
    assert!(matches!(there.event(), Some(responder::Event::Request { request: 1, .. })));
    assert_eq!(here.offer(request, 64, 7), Ok(0));
    let data = drain!(here);
    let mut expected = vec![24, 0, 0, 0, 0x12, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    expected.extend([0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend([0; 64]);
    assert_eq!(data, expected, "without checksums the field is zero");
    feed!(there, &data);
    there.grant(2);
    assert_eq!(drain!(there), [4, 0, 0, 0, 0x13, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0]);
    here.cancel(request);
    let cancel = drain!(here);
    assert_eq!(cancel, [0, 0, 0, 0, 0x15, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    feed!(there, &cancel);
    there.not_before(request, request).unwrap();
    let mut expected = vec![8, 0, 0, 0, 0x16, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    expected.extend([1, 0, 0, 0, 0, 0, 0, 0]);
    let notice = drain!(there);
    assert_eq!(notice, expected);
    feed!(here, &notice);
    there.finish(request, Status::new(Code::Cancelled, "so")).unwrap();
    let mut expected = vec![6, 0, 0, 0, 0x14, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    expected.extend([1, 0, 0, 0, b's', b'o']);
    let status = drain!(there);
    assert_eq!(status, expected);
    feed!(here, &status);
    there.shut_down();
    let mut expected = vec![4, 0, 0, 0, 0x17, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    expected.extend([1, 0, 0, 0]);
    let goodbye = drain!(there);
    assert_eq!(goodbye, expected);
    feed!(here, &goodbye);
    assert_eq!(drain!(here), b"");
    assert_eq!(here.closed(), Some(&Closed::Retired));
}

#[test]
fn a_conversation_is_the_same_at_every_split_point() {
    let (mut here, mut there) = (initiator(key(1)), responder(key(1)));
    here.connect(Nonce([0x44; 32]));
    let hello = drain!(here);
    feed!(there, &hello);
    feed!(here, &drain!(there));
    let proof = drain!(here);
    feed!(there, &proof);
    there.event();
    there.accept().unwrap();
    feed!(here, &drain!(there));
    let write = here.submit(encoded(Op::Write, 100)).unwrap();
    here.submit(encoded(Op::Read, 10)).unwrap();
    let requests = drain!(here);
    here.offer(write, 40, 0).unwrap();
    here.offer(write, 60, 0).unwrap();
    // An initiator sends no request before the lane is open.
    let greeting = hello.len() + proof.len();
    let bytes = [hello, proof, requests, drain!(here)].concat();
    // What the whole of it came to, byte for byte and event for event.
    let run = |split: usize| {
        let mut there = responder(key(1));
        let (mut answers, mut events) = (Vec::new(), Vec::new());
        let mut cuts = [0, split, greeting, bytes.len()];
        cuts.sort_unstable();
        for cut in cuts.windows(2) {
            events.extend(serve!(there, &bytes[cut[0]..cut[1]]));
            if cut[1] == greeting {
                there.accept();
            }
            answers.extend(drain!(there));
        }
        assert_eq!(there.closed(), None, "split at byte {split}");
        (answers, events)
    };
    let whole = run(0);
    assert_eq!(whole.1.len(), 5, "{:?}", whole.1);
    for split in 1..=bytes.len() {
        assert_eq!(run(split), whole, "split at byte {split}");
    }
}

#[test]
fn only_a_peer_with_the_key_is_served() {
    // (initiator's key, responder's key, refusal)
    for (ours, theirs, refusal) in [
        (None, key(1), Refusal::AuthenticationRequired),
        (key(2), key(1), Refusal::AuthenticationFailed),
    ] {
        let (mut here, mut there) = (initiator(ours), responder(theirs));
        here.connect(Nonce([0x44; 32]));
        for _ in 0..2 {
            feed!(there, &drain!(here));
            feed!(here, &drain!(there));
        }
        assert_eq!(there.event(), None, "no lane was asked for");
        for closed in [here.closed(), there.closed()] {
            match closed {
                Some(Closed::Refused(refused)) => assert_eq!(refused.refusal, refusal),
                other => panic!("not refused but {other:?}"),
            }
        }
    }
}

#[test]
fn an_initiator_with_a_key_speaks_to_no_peer_without_it() {
    let (mut here, mut there) = (initiator(key(1)), responder(None));
    here.connect(Nonce([0x44; 32]));
    feed!(there, &drain!(here));
    feed!(here, &drain!(there));
    assert_eq!(violation(here.closed()), Violation::Unauthenticated);
    // One that claims to have it and proves nothing.
    let (mut here, mut there) = (initiator(key(1)), responder(key(1)));
    here.connect(Nonce([0x44; 32]));
    feed!(there, &drain!(here));
    feed!(here, &drain!(there));
    let mut welcome = vec![32, 0, 0, 0, 0x03, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    welcome.extend([0; 32]);
    feed!(here, &welcome);
    assert_eq!(violation(here.closed()), Violation::Unauthenticated);
}

#[test]
fn a_proof_is_good_for_one_connection_and_one_side() {
    let (mut here, mut there) = (initiator(key(1)), responder(key(1)));
    here.connect(Nonce([0x44; 32]));
    let hello = drain!(here);
    feed!(there, &hello);
    let answer = drain!(there);
    feed!(here, &answer);
    let proof = drain!(here);
    // The HMAC by another implementation (Python's hmac) of the bytes that docs/wire.md names.
    let Some(key) = key(1) else { unreachable!() };
    let hellos =
        hello::Hellos { initiator: hello[16..].to_vec(), responder: answer[16..].to_vec() };
    assert_eq!(proof[16..], key.prove(hello::Side::Initiator, &hellos));
    assert_ne!(proof[16..], key.prove(hello::Side::Responder, &hellos));
    // Replayed to a connection with another nonce.
    let settings = responder::Settings {
        limits: limits(),
        credits: 2,
        incarnation: THERE,
        key: Some(key),
        wants_checksums: false,
    };
    let mut other = Responder::new(settings, Nonce([0x56; 32]));
    feed!(other, &hello);
    drain!(other);
    feed!(other, &proof);
    assert!(
        matches!(other.closed(), Some(Closed::Refused(it)) if it.refusal == Refusal::AuthenticationFailed)
    );
}

#[test]
fn another_major_version_is_refused_with_its_reason_and_a_newer_minor_is_not() {
    let mut here = initiator(None);
    here.connect(Nonce([0x44; 32]));
    let hello = drain!(here);
    let mut major = hello[..28].to_vec();
    (major[0], major[24]) = (12, 9);
    let mut there = responder(None);
    feed!(there, &major);
    let refused = drain!(there);
    feed!(here, &refused);
    let closed = here.closed().unwrap().to_string();
    assert!(closed.contains("major version 9, this engine 1"), "{closed}");

    let mut minor = hello.clone();
    minor[26] = 7;
    minor[0] += 3;
    minor.extend(b"new");
    let mut there = responder(None);
    feed!(there, &minor);
    let Some(responder::Event::Asked(asked)) = there.event() else { panic!("it is refused") };
    assert_eq!(asked.minor, 7);
    assert_eq!(there.accept().unwrap().minor, 0);
}

#[test]
fn a_restarted_engine_refuses_who_means_the_old_one() {
    let (mut here, mut there) = (initiator(None), responder(None));
    here.connect(Nonce([0x44; 32]));
    let mut hello = drain!(here);
    hello[16 + 32] ^= 1;
    feed!(there, &hello);
    feed!(here, &drain!(there));
    match here.closed() {
        Some(Closed::Refused(it)) => assert_eq!(it.refusal, Refusal::WrongIncarnation),
        other => panic!("not refused but {other:?}"),
    }
}

#[test]
fn what_no_peer_sends_closes_the_lane() {
    let request = |bytes: &mut Vec<u8>, request: u64, length: u64| {
        let mut encoded = encoded(Op::Write, length);
        encoded.set_number(request);
        bytes.extend(encoded.frame());
    };
    let data = |bytes: &mut Vec<u8>, request: u64, offset: u64, length: u32| {
        frame::Data { offset, length, checksum: 0 }.encode(bytes, request);
        bytes.extend(vec![0; length as usize]);
    };
    let check = |name: &str, write: &dyn Fn(&mut Vec<u8>)| {
        let (_, mut there) = opened();
        let mut bytes = Vec::new();
        write(&mut bytes);
        let mut taken = 0;
        while there.closed().is_none() {
            let count = feed!(there, &bytes[taken..]);
            taken += count;
            let told = there.event().is_some();
            assert!(told || count > 0 || there.closed().is_some(), "{name} was taken");
        }
        let text = violation(there.closed()).to_string();
        assert!(text.contains(name), "{text:?} instead of {name:?}");
        assert_eq!(there.incoming(), Incoming::Nothing);
        let goodbye = drain!(there);
        assert_eq!((goodbye[4], goodbye[16]), (0x17, 2), "a goodbye says why");
    };
    check("request 1 after request 1", &|out| {
        request(out, 1, 10);
        request(out, 1, 10);
    });
    check("request 1 after request 5", &|out| {
        request(out, 5, 10);
        request(out, 1, 10);
    });
    check("request 3 is one too many, 2 may be open", &|out| {
        (1..=3).for_each(|number| request(out, number, 10));
    });
    check("payload of request 1 without a credit", &|out| {
        request(out, 1, 100);
        (0..3).for_each(|at| data(out, 1, at * 10, 10));
    });
    check("request 1 continues at 10", &|out| {
        request(out, 1, 100);
        data(out, 1, 0, 10);
        data(out, 1, 20, 10);
    });
    check("at most 64 bytes, not at 0 with 65", &|out| {
        request(out, 1, 100);
        data(out, 1, 0, 65);
    });
    check("at most 10 bytes, not at 0 with 11", &|out| {
        request(out, 1, 10);
        data(out, 1, 0, 11);
    });
    check("not at 0 with 0", &|out| {
        request(out, 1, 10);
        data(out, 1, 0, 0);
    });
    check("a Data frame for request 7", &|out| data(out, 7, 0, 1));
    check("a Cancel frame for request 7", &|out| frame::encode(out, Kind::Cancel, 7, |_| {}));
    check("a Status frame does not belong here", &|out| {
        frame::encode(out, Kind::Status, 1, |out| out.extend([0; 4]));
    });
    check("a Hello frame does not belong here", &|out| frame::encode(out, Kind::Hello, 0, |_| {}));
    check("frame kind 0x4b is unknown", &|out| out.extend(b"GET KV HTTP/1.1\r\n"));
    check("a Write frame with a body of 4294967295 bytes", &|out| {
        out.extend([0xff, 0xff, 0xff, 0xff, 0x10, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    });
    check("reserved bits of a Ping frame", &|out| {
        out.extend([0, 0, 0, 0, 0x18, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    });
    check("a Ping frame cannot have a body of 1 bytes", &|out| {
        frame::encode(out, Kind::Ping, 1, |out| out.push(0));
    });
    check("5 credits, the peer's limit is 4", &|out| {
        frame::encode(out, Kind::Credit, 0, |out| out.extend([4, 0, 0, 0]));
    });
    check("request 1: its entries have 10 bytes, it says 11", &|out| {
        request(out, 1, 10);
        let at = out.len() - 16 - 16 - 16 + 8 + 8 - 8;
        let length = HEADER_LENGTH + 16;
        assert!(at > length);
        out[length] = 11;
    });
}

#[test]
fn what_no_responder_sends_closes_the_lane() {
    let check = |name: &str, write: &dyn Fn(&mut Vec<u8>)| {
        let (mut here, mut there) = opened();
        for op in [Op::Write, Op::Read] {
            here.submit(encoded(op, 10)).unwrap();
        }
        feed!(there, &drain!(here));
        let mut bytes = Vec::new();
        write(&mut bytes);
        feed!(here, &bytes);
        let text = violation(here.closed()).to_string();
        assert!(text.contains(name), "{text:?} instead of {name:?}");
    };
    let status = |out: &mut Vec<u8>, request, code: u8| {
        frame::encode(out, Kind::Status, request, |out| out.extend([code, 0, 0, 0]));
    };
    let not_before = |out: &mut Vec<u8>, request, after: u8| {
        frame::encode(out, Kind::NotBefore, request, |out| {
            out.extend([after, 0, 0, 0, 0, 0, 0, 0])
        });
    };
    check("request 1 is said to be done with 10 bytes missing", &|out| status(out, 1, 0));
    check("request 2 is said to be done with 10 bytes missing", &|out| status(out, 2, 0));
    check("a Status frame for request 3", &|out| status(out, 3, 1));
    check("a Status frame for request 1", &|out| {
        status(out, 1, 1);
        status(out, 1, 1);
    });
    check("a Data frame for request 1", &|out| {
        frame::Data { offset: 0, length: 1, checksum: 0 }.encode(out, 1);
    });
    check("payload of request 2 without a credit", &|out| {
        for offset in 0..2 {
            frame::Data { offset, length: 1, checksum: 0 }.encode(out, 2);
            out.push(0);
        }
    });
    check("request 1 cannot wait for request 2", &|out| not_before(out, 1, 2));
    check("request 1 cannot wait for request 3", &|out| not_before(out, 1, 3));
    check("a Write frame does not belong here", &|out| frame::encode(out, Kind::Write, 1, |_| {}));
    check("the peer closes the lane: so", &|out| {
        frame::encode(out, Kind::Goodbye, 0, |out| out.extend([2, 0, 0, 0, b's', b'o']));
    });
}

#[test]
fn requests_that_wait_for_others_end_with_them_and_never_in_a_circle() {
    let (mut here, mut there) = opened();
    let requests: Vec<u64> = (0..2).map(|_| here.submit(encoded(Op::Write, 10)).unwrap()).collect();
    serve!(there, &drain!(here));
    requests.iter().for_each(|&request| here.cancel(request));
    assert_eq!(serve!(there, &drain!(here)).len(), 2, "both cancels arrive");
    assert_eq!(there.requests().count(), 2);
    there.not_before(1, 2).unwrap();
    assert_eq!(there.not_before(2, 1), Err(responder::FinishError::NotOpen { request: 1 }));
    assert_eq!(
        there.finish(1, Status::DONE),
        Err(responder::FinishError::NotOpen { request: 1 }),
        "it ends with the other"
    );
    there.finish(2, Status::new(Code::Cancelled, "")).unwrap();
    feed!(here, &drain!(there));
    let ended: Vec<_> = core::iter::from_fn(|| here.event())
        .filter_map(|event| match event {
            initiator::Event::Ended { request, .. } => Some(request),
            _ => None,
        })
        .collect();
    assert_eq!(ended, [2, 1]);
    assert_eq!(there.requests().count(), 0);
    assert_eq!(here.closed(), None);
}

#[test]
fn a_full_queue_gives_the_request_back_and_a_request_beyond_the_peers_limits_fails_alone() {
    let (mut here, _there) = opened();
    for _ in 0..4 {
        here.submit(encoded(Op::Write, 10)).unwrap();
    }
    let full = here.submit(encoded(Op::Write, 10)).unwrap_err();
    assert_eq!((full.limit, full.request.length()), (4, 10));

    let (mut here, _there) = opened();
    let mut encoder =
        Encoder::new(Vec::new(), Op::Write, Form::Ranges, Part::whole(1), 0, &SEGMENTS);
    (0..16_001).for_each(|at| encoder.range(Range { segment: 0, offset: at, length: 1 }));
    let request = here.submit(encoder.finish().unwrap()).unwrap();
    let small = here.submit(encoded(Op::Write, 10)).unwrap();
    drain!(here);
    let Some(initiator::Event::Ended { request: ended, outcome: Outcome::Failed(status) }) =
        here.event()
    else {
        panic!("it was sent")
    };
    assert_eq!((ended, status.code), (request, Code::TooLarge));
    assert_eq!(here.event(), Some(initiator::Event::Begun { request: small }));
}

#[test]
fn an_encoder_finds_what_a_responder_would_refuse() {
    let begin = |form| Encoder::new(Vec::new(), Op::Write, form, Part::whole(1), 0, &SEGMENTS);
    let mut encoder = begin(Form::Ranges);
    encoder.range(Range { segment: 1, offset: 0, length: 1 });
    let error = RequestError::NoSegment { entry: 0, segment: 1, segments: 1 };
    assert_eq!(encoder.finish(), Err(error));
    let mut encoder = begin(Form::Ranges);
    encoder.range(Range { segment: 0, offset: u64::MAX, length: 1 });
    assert_eq!(encoder.finish(), Err(RequestError::Overflow { entry: 0 }));
    let mut encoder = begin(Form::Strided);
    encoder.strided(Strided { segment: 0, offset: 0, length: 1, count: 1 << 40, stride: 1 << 40 });
    assert_eq!(encoder.finish(), Err(RequestError::Overflow { entry: 0 }));
    let part = Part { transfer: 1, index: 1, count: 1 };
    let encoder = Encoder::new(Vec::new(), Op::Read, Form::Ranges, part, 0, &SEGMENTS);
    assert_eq!(encoder.finish(), Err(RequestError::Part { index: 1, count: 1 }));
}

#[test]
fn a_long_range_becomes_several_entries_of_the_same_bytes() {
    let length = (9 << 30) + 5;
    let request = encoded(Op::Read, length);
    let limits = Limits { request_bytes: u64::MAX, ..limits() };
    let body = Request::decode(Op::Read, &request.frame()[HEADER_LENGTH..], &limits).unwrap();
    let pieces: Vec<_> = body.pieces().map(|piece| (piece.offset, piece.length)).collect();
    let gib = 1 << 30;
    assert_eq!(
        pieces,
        [(0x1000, 3 * gib), (0x1000 + 3 * gib, 3 * gib), (0x1000 + 6 * gib, 3 * gib + 5)]
    );
}

#[test]
fn a_silent_peer_ends_the_lane_and_a_slow_one_does_not() {
    let second = Duration::from_secs;
    let (mut here, mut there) = opened();
    let request = here.submit(encoded(Op::Write, 10)).unwrap();
    serve!(there, &drain!(here));
    // Nothing for 900 ms, an answer, and nothing for 900 ms again.
    let at = |ms: u64| second(100) + Duration::from_millis(ms);
    here.tick(at(0));
    here.tick(at(900));
    assert_eq!(here.closed(), None);
    there.grant(1);
    feed!(here, &drain!(there));
    here.tick(at(950));
    here.tick(at(1850));
    drain!(here);
    assert_eq!(here.closed(), None);
    here.tick(at(1950));
    let error = Violation::Silence { what: "nothing came", milliseconds: 1000 };
    assert_eq!(violation(here.closed()), error);
    here.disconnected();
    here.give_up();
    let ended: Vec<_> = core::iter::from_fn(|| here.event()).collect();
    let outcome = Outcome::Lost { quiet: false };
    assert_eq!(ended.last(), Some(&initiator::Event::Ended { request, outcome }));
}

#[test]
fn signs_of_life_keep_a_lane_open_while_a_request_waits() {
    let (mut here, mut there) = opened();
    here.submit(encoded(Op::Write, 10)).unwrap();
    serve!(there, &drain!(here));
    for step in 0..100 {
        let now = Duration::from_millis(step * 100);
        here.tick(now);
        there.tick(now);
        feed!(there, &drain!(here));
        feed!(here, &drain!(there));
    }
    assert_eq!((here.closed(), there.closed()), (None, None));
}

#[test]
fn a_trickle_and_a_reader_that_stalls_end_the_lane() {
    let (_, mut there) = opened();
    // One byte each 100 ms of a frame that never becomes whole.
    for step in 0..15 {
        there.received(&[[24, 0, 0, 0, 0x18].as_slice(), &[0; 16]].concat()[step..step + 1]);
        there.tick(Duration::from_millis(step as u64 * 100));
    }
    let error = Violation::Silence { what: "a frame was not whole", milliseconds: 1000 };
    assert_eq!(violation(there.closed()), error);
    let (mut here, _there) = opened();
    here.submit(encoded(Op::Write, 10)).unwrap();
    assert!(!here.outgoing().is_empty());
    here.tick(Duration::ZERO);
    here.tick(Duration::from_secs(1));
    let what = "nothing could be sent";
    assert_eq!(violation(here.closed()), Violation::Silence { what, milliseconds: 1000 });
}

#[test]
fn a_connection_that_says_nothing_is_closed() {
    let mut there = responder(None);
    there.tick(Duration::from_secs(5));
    there.tick(Duration::from_secs(6));
    let what = "no hello was completed";
    assert_eq!(violation(there.closed()), Violation::Silence { what, milliseconds: 1000 });
}

#[test]
fn time_without_a_slot_is_not_the_peers() {
    let (mut here, mut there) = opened();
    let request = here.submit(encoded(Op::Write, 10)).unwrap();
    serve!(there, &drain!(here));
    here.offer(request, 10, 0).unwrap();
    let data = drain!(here);
    there.received(&data);
    there.hold(true);
    for step in 0..30 {
        there.tick(Duration::from_millis(step * 100));
    }
    assert_eq!(there.closed(), None);
    there.hold(false);
    there.tick(Duration::from_secs(4));
    there.tick(Duration::from_secs(5));
    let what = "nothing came";
    assert_eq!(violation(there.closed()), Violation::Silence { what, milliseconds: 1000 });
}

#[test]
fn a_request_without_progress_is_cancelled_and_then_the_lane_is_closed() {
    let (mut here, mut there) = opened();
    let mut encoder =
        Encoder::new(Vec::new(), Op::Read, Form::Ranges, Part::whole(1), 300, &SEGMENTS);
    encoder.range(Range { segment: 0, offset: 0, length: 10 });
    let request = here.submit(encoder.finish().unwrap()).unwrap();
    let mut overdue = false;
    for step in 0..30 {
        let now = Duration::from_millis(step * 50);
        here.tick(now);
        there.tick(now);
        feed!(there, &drain!(here));
        while let Some(event) = there.event() {
            overdue |= event == responder::Event::Overdue { request };
        }
        feed!(here, &drain!(there));
    }
    assert!(overdue);
    let what = "a cancelled request was not answered";
    assert_eq!(violation(here.closed()), Violation::Silence { what, milliseconds: 300 });
}

#[test]
fn an_idle_lane_says_goodbye() {
    let (mut here, mut there) = opened();
    there.tick(Duration::ZERO);
    there.tick(Duration::from_secs(120));
    feed!(here, &drain!(there));
    assert_eq!(here.event(), Some(initiator::Event::Draining));
    // What is submitted now waits for the next connection.
    let request = here.submit(encoded(Op::Write, 10)).unwrap();
    assert_eq!(drain!(here), b"");
    assert_eq!(here.closed(), Some(&Closed::Retired));
    here.disconnected();
    assert_eq!(here.event(), None, "request {request} did not end");
    here.connect(Nonce([1; 32]));
    let mut there = responder(None);
    feed!(there, &drain!(here));
    there.event();
    there.accept().unwrap();
    feed!(here, &drain!(there));
    drain!(here);
    assert!(
        core::iter::from_fn(|| here.event()).any(|it| it == initiator::Event::Begun { request })
    );
}

#[test]
fn a_corrupt_payload_fails_its_request_even_if_the_responder_did_it() {
    let (mut here, mut there) = opened();
    let request = here.submit(encoded(Op::Read, 10)).unwrap();
    serve!(there, &drain!(here));
    there.offer(request, 10, checksum::of(b"0123456789")).unwrap();
    there.finish(request, Status::DONE).unwrap();
    let answer = drain!(there);
    feed!(here, &answer[..answer.len() - 20]);
    here.fail(request, Status::new(Code::Corrupt, "byte 3"));
    feed!(here, &answer[answer.len() - 20..]);
    let ended = core::iter::from_fn(|| here.event()).last();
    let outcome = Outcome::Failed(Status::new(Code::Corrupt, "byte 3"));
    assert_eq!(ended, Some(initiator::Event::Ended { request, outcome }));
}

proptest! {
    #[test]
    fn a_hello_survives_its_bytes(bytes in proptest::collection::vec(any::<u8>(), 152), flags in 0u32..4) {
        let mut bytes = bytes;
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&MAJOR.to_le_bytes());
        bytes[12..16].copy_from_slice(&flags.to_le_bytes());
        bytes[68..72].fill(0);
        if let Ok(hello) = Hello::decode(&bytes) {
            let mut again = Vec::new();
            hello.encode(&mut again);
            prop_assert_eq!(again, bytes);
        }
    }

    #[test]
    fn forms_expand_to_what_they_mean_and_stay_inside_their_hull(
        form in 0..2, offset in 0u64..1 << 40, length in 1u64..100, count in 1u64..20, stride in 0u64..1000,
        numbers in proptest::collection::vec(0u32..50, 1..9), layers in 1u32..5, rows in 1u32..5,
    ) {
        let kind = if form == 0 { Form::Strided } else { Form::Paged };
        let mut encoder = Encoder::new(Vec::new(), Op::Read, kind, Part::whole(1), 0, &SEGMENTS);
        let mut expected = Vec::new();
        if form == 0 {
            encoder.strided(Strided { segment: 0, offset, length, count, stride });
            expected.extend((0..count).map(|at| (offset + at * stride, length)));
        } else {
            let (page_stride, layer_stride, row_stride) = (stride * 7, stride * 3, stride);
            encoder.paged(
                Paged { segment: 0, offset, page_stride, layer_stride, row_stride, row_bytes: length, layers, rows },
                &numbers,
            );
            for number in &numbers {
                for layer in 0..layers {
                    for row in 0..rows {
                        let at = offset + u64::from(*number) * page_stride
                            + u64::from(layer) * layer_stride + u64::from(row) * row_stride;
                        expected.push((at, length));
                    }
                }
            }
        }
        let request = encoder.finish().unwrap();
        let body = Request::decode(Op::Read, &request.frame()[HEADER_LENGTH..], &limits()).unwrap();
        let pieces: Vec<_> = body.pieces().map(|piece| (piece.offset, piece.length)).collect();
        let (low, high) = body.entries().next().unwrap().hull();
        prop_assert_eq!(pieces.iter().map(|piece| piece.0).min(), Some(low));
        prop_assert_eq!(pieces.iter().map(|piece| piece.0 + piece.1).max(), Some(high));
        prop_assert_eq!(pieces.iter().map(|piece| piece.1).sum::<u64>(), request.length());
        prop_assert_eq!(pieces, expected);
    }

    #[test]
    fn a_damaged_request_is_refused_or_stays_within_the_limits(
        form in 0usize..3, at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<prop::sample::Index>(),
    ) {
        let kind = [Form::Ranges, Form::Strided, Form::Paged][form];
        let mut encoder = Encoder::new(Vec::new(), Op::Write, kind, Part::whole(1), 0, &SEGMENTS);
        encoder_entries(&mut encoder, kind);
        let request = encoder.finish().unwrap();
        let mut body = request.frame()[HEADER_LENGTH..].to_vec();
        let cut = cut.index(body.len() + 1);
        let at = at.index(body.len());
        body[at] = byte;
        let limits = Limits { request_bytes: 1 << 20, ranges: 32, ..limits() };
        for body in [&body[..], &body[..cut]] {
            if let Ok(request) = Request::decode(Op::Write, body, &limits) {
                prop_assert!(request.length <= 1 << 20);
                prop_assert!(request.entries().count() <= 32);
                let found: u64 = request.pieces().map(|piece| piece.length).sum();
                prop_assert_eq!(found, request.length);
                let inside = request.entries().all(|entry| entry.hull().0 < entry.hull().1);
                prop_assert!(inside);
            }
        }
    }

    #[test]
    fn damaged_bytes_never_panic_and_never_hold_more_than_a_frame(
        flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(), portion in 1usize..200,
    ) {
        let (mut here, mut there) = (initiator(None), responder(None));
        here.connect(Nonce([0x44; 32]));
        let mut asked = drain!(here);
        feed!(there, &asked);
        there.event();
        there.accept().unwrap();
        let mut answered = drain!(there);
        feed!(here, &answered);
        let write = here.submit(encoded(Op::Write, 100)).unwrap();
        here.submit(encoded(Op::Read, 10)).unwrap();
        asked.extend(drain!(here));
        here.offer(write, 40, 0).unwrap();
        here.cancel(write);
        asked.extend(drain!(here));
        serve!(there, &asked[168..]);
        there.offer(2, 10, 0).ok();
        there.finish(2, Status::DONE).ok();
        there.finish(write, Status::new(Code::Cancelled, "")).ok();
        answered.extend(drain!(there));
        for bytes in [&mut asked, &mut answered] {
            for (at, byte) in &flips {
                let at = at.index(bytes.len());
                bytes[at] = *byte;
            }
            let cut = cut.index(bytes.len() + 1);
            bytes.truncate(cut);
        }
        let mut there = responder(None);
        let (greeting, rest) = asked.split_at(asked.len().min(168));
        for part in greeting.chunks(portion).chain(rest.chunks(portion)) {
            if serve!(there, part).iter().any(|event| event.starts_with("Asked")) {
                there.accept();
            }
            prop_assert!(there.held_bytes() <= 2 * limits().frame_bytes as usize);
            prop_assert!(there.requests().count() <= 2);
            drain!(there);
        }
        let mut here = initiator(None);
        here.connect(Nonce([0x44; 32]));
        here.submit(encoded(Op::Write, 100)).unwrap();
        here.submit(encoded(Op::Read, 10)).unwrap();
        for part in answered.chunks(portion) {
            feed!(here, part);
            while here.event().is_some() {}
            drain!(here);
            prop_assert!(here.held_bytes() <= 2 * limits().frame_bytes as usize);
        }
        here.disconnected();
        here.give_up();
        let ended = core::iter::from_fn(|| here.event());
        let _ = ended.count();
        prop_assert_eq!(here.requests(), 0);
    }
}

fn encoder_entries(encoder: &mut Encoder, form: Form) {
    for at in 0..3 {
        match form {
            Form::Ranges => encoder.range(Range { segment: 0, offset: at * 64, length: 9 }),
            Form::Strided => encoder.strided(Strided {
                segment: 0,
                offset: at * 64,
                length: 3,
                count: 4,
                stride: 8,
            }),
            Form::Paged => encoder.paged(
                Paged {
                    segment: 0,
                    offset: at,
                    page_stride: 64,
                    layer_stride: 16,
                    row_stride: 8,
                    row_bytes: 5,
                    layers: 2,
                    rows: 2,
                },
                &[2, 0, 1],
            ),
        }
    }
}
