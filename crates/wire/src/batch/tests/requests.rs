//! How requests are made and end.

use super::*;

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

#[test]
fn a_wrong_range_is_named_by_its_position() {
    let mut encoder =
        Encoder::new(Vec::new(), Op::Write, Form::Ranges, Part::whole(1), 0, &SEGMENTS);
    (0..3).for_each(|at| encoder.range(Range { segment: 0, offset: at * 8, length: 8 }));
    let whole = encoder.finish().unwrap().frame()[HEADER_LENGTH..].to_vec();
    let decode = |body: &[u8]| Request::decode(Op::Write, body, &limits()).map(|_| ());
    assert_eq!(decode(&whole), Ok(()));
    // The second entry, behind the fixed part, one segment and one entry.
    let second = 32 + 16 + 16;
    let damage = |at: usize, bytes: &[u8]| {
        let mut body = whole.clone();
        body[second + at..second + at + bytes.len()].copy_from_slice(bytes);
        decode(&body)
    };
    assert_eq!(damage(8, &[0; 4]), Err(RequestError::Empty { entry: 1 }));
    let error = RequestError::NoSegment { entry: 1, segment: 1, segments: 1 };
    assert_eq!(damage(12, &[1]), Err(error));
    assert_eq!(damage(0, &(u64::MAX - 7).to_le_bytes()), Err(RequestError::Overflow { entry: 1 }));
    assert_eq!(damage(0, &(u64::MAX - 8).to_le_bytes()), Ok(()), "it ends at the last byte");
    assert_eq!(damage(8, &[7]), Err(RequestError::Sum { length: 24, found: 23 }));
    assert_eq!(decode(&whole[..whole.len() - 1]), Err(RequestError::Length));
    assert_eq!(decode(&[&whole[..], &[0]].concat()), Err(RequestError::Length));
    let request = Request::decode(Op::Write, &whole, &limits()).unwrap();
    assert!(request.ranges().unwrap().eq(request.pieces()));
}
