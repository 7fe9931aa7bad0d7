//! Deadlines.

use super::*;

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
    let what = "too little could be sent";
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
fn a_responder_that_waited_for_too_long_is_heard_before_its_hello() {
    let mut here = initiator(None);
    here.connect(Nonce([1; 32]));
    let mut there = responder(None);
    there.tick(Duration::from_secs(5));
    there.tick(Duration::from_secs(6));
    feed!(here, &drain!(there));
    let reason = "no hello was completed for 1000 ms".into();
    assert_eq!(violation(here.closed()), Violation::Accused { reason });
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
    here.submit(encoder.finish().unwrap()).unwrap();
    for step in 0..30 {
        let now = Duration::from_millis(step * 50);
        here.tick(now);
        there.tick(now);
        serve!(there, &drain!(here));
        feed!(here, &drain!(there));
    }
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
fn a_lane_without_requests_is_retired_whatever_else_its_peer_sends() {
    let (mut here, mut there) = opened();
    let request = here.submit(encoded(Op::Write, 10)).unwrap();
    serve!(there, &drain!(here));
    there.finish(request, Status::new(Code::NotAllowed, "")).unwrap();
    drain!(there);
    // A payload that nobody wants any more, and the sign of life of a lane that has work.
    let mut noise = Vec::new();
    frame::Data { offset: 0, length: 1, checksum: 0 }.encode(&mut noise, request);
    noise.push(0);
    frame::encode(&mut noise, Kind::Ping, 1, |_| {});
    for second in 0..=120 {
        assert!(!said_goodbye(&drain!(there)), "after {second} s");
        serve!(there, &noise);
        there.tick(Duration::from_secs(second));
    }
    assert!(said_goodbye(&drain!(there)));
    serve!(there, &noise);
    there.tick(Duration::from_secs(121));
    there.tick(Duration::from_secs(122));
    assert_eq!(there.closed(), Some(&Closed::Retired));
}

/// Whether one of these frames without payload is a goodbye.
fn said_goodbye(mut frames: &[u8]) -> bool {
    while let [a, b, c, d, kind, ..] = *frames {
        if kind == 0x17 {
            return true;
        }
        frames = &frames[HEADER_LENGTH + u32::from_le_bytes([a, b, c, d]) as usize..];
    }
    false
}

const PROGRESS_MS: u64 = 300;

/// Of frames that fill a slot each, with a progress time.
fn impatient(op: Op, frames: u64) -> Encoded {
    let (form, part) = (Form::Ranges, Part::whole(9));
    let mut encoder = Encoder::new(Vec::new(), op, form, part, PROGRESS_MS as u32, &SEGMENTS);
    encoder.range(Range { segment: 0, offset: 0, length: frames * 64 });
    encoder.finish().unwrap()
}

fn ends(here: &mut Initiator) -> Vec<(u64, Outcome)> {
    let events = core::iter::from_fn(|| here.event());
    let ended = |event| match event {
        initiator::Event::Ended { request, outcome } => Some((request, outcome)),
        _ => None,
    };
    events.filter_map(ended).collect()
}

#[test]
fn a_write_behind_a_slow_one_waits_as_long_as_that_one_moves() {
    let (mut here, mut there) = opened();
    let slow = here.submit(impatient(Op::Write, 10)).unwrap();
    let behind = here.submit(impatient(Op::Write, 1)).unwrap();
    serve!(there, &drain!(here));
    for _ in 0..10 {
        here.offer(slow, 64, 0).unwrap();
    }
    here.offer(behind, 64, 0).unwrap();
    // The peer gives a credit back each 200 ms, so the last frame of the slow one comes in step 8.
    let mut ended = Vec::new();
    for step in 0..10 {
        let now = Duration::from_millis(step * 200);
        here.tick(now);
        let events = serve!(there, &drain!(here));
        there.tick(now);
        assert!(!events.iter().any(|event| event.contains("Overdue")), "{step}: {events:?}");
        assert_eq!(there.event(), None, "{step}");
        if let Some(done) = [(8, slow), (9, behind)].iter().find(|(at, _)| *at == step) {
            there.finish(done.1, Status::DONE).unwrap();
        }
        there.grant(1);
        feed!(here, &drain!(there));
        ended.extend(ends(&mut here));
    }
    assert_eq!(ended, [(slow, Outcome::Done), (behind, Outcome::Done)]);
}

#[test]
fn a_read_behind_a_slow_one_waits_as_long_as_that_one_moves() {
    let (mut here, mut there) = opened();
    let slow = here.submit(impatient(Op::Read, 10)).unwrap();
    let behind = here.submit(impatient(Op::Read, 1)).unwrap();
    serve!(there, &drain!(here));
    for step in 0..11 {
        let now = Duration::from_millis(step * 200);
        here.tick(now);
        there.tick(now);
        feed!(there, &drain!(here));
        assert_eq!(there.event(), None, "{step}");
        there.offer(if step < 10 { slow } else { behind }, 64, 0).unwrap();
        feed!(here, &drain!(there));
        serve!(there, &[]);
        here.grant(1);
        assert_eq!(ends(&mut here), [], "{step}");
    }
    for request in [slow, behind] {
        there.finish(request, Status::DONE).unwrap();
    }
    feed!(here, &drain!(there));
    assert_eq!(ends(&mut here), [(slow, Outcome::Done), (behind, Outcome::Done)]);
}

#[test]
fn a_write_that_is_gone_waits_for_its_frames_to_be_taken_and_not_for_those_of_later_ones() {
    let (mut here, mut there) = opened();
    let gone = here.submit(impatient(Op::Write, 2)).unwrap();
    serve!(there, &drain!(here));
    for _ in 0..2 {
        here.offer(gone, 64, 0).unwrap();
    }
    serve!(there, &drain!(here));
    let later = here.submit(impatient(Op::Write, 10)).unwrap();
    serve!(there, &drain!(here));
    for _ in 0..10 {
        here.offer(later, 64, 0).unwrap();
    }
    let mut cancelled = None;
    for step in 0..10 {
        let now = step * 200;
        here.tick(Duration::from_millis(now));
        let events = serve!(there, &drain!(here));
        let cancels =
            |event: &String| event.contains("Cancelled") && event.contains(&gone.to_string());
        if cancelled.is_none() && events.iter().any(cancels) {
            cancelled = Some(now);
        }
        there.grant(1);
        feed!(here, &drain!(there));
    }
    // Its two credits came before the ticks at 200 and 400 ms.
    assert_eq!(cancelled, Some(800));
}

/// Of frames that fill a slot each; `progress_ms` is what the initiator says.
fn patient(op: Op, progress_ms: u32) -> Encoded {
    let (form, part) = (Form::Ranges, Part::whole(9));
    let mut encoder = Encoder::new(Vec::new(), op, form, part, progress_ms, &SEGMENTS);
    encoder.range(Range { segment: 0, offset: 0, length: 10 * 64 });
    encoder.finish().unwrap()
}

/// When the responder, whose progress time is 1000 ms, says that a request is overdue whose initiator
/// sends nothing but pings: in ms, looked at every 50, of the first three seconds.
fn overdue(op: Op, progress_ms: u32, mut host: impl FnMut(&mut Responder, u64)) -> Option<u64> {
    let (mut here, mut there) = opened();
    let request = here.submit(patient(op, progress_ms)).unwrap();
    serve!(there, &drain!(here));
    (0..=60).map(|step| step * 50).find(|&now| {
        host(&mut there, request);
        there.tick(Duration::from_millis(now));
        let mut ping = Vec::new();
        frame::encode(&mut ping, Kind::Ping, now, |_| {});
        drain!(there);
        let events = serve!(there, &ping);
        assert_eq!(there.closed(), None, "{now}");
        events.iter().any(|event| event.contains("Overdue"))
    })
}

#[test]
fn a_peer_that_pings_and_moves_nothing_is_waited_for_no_longer_than_this_side_says() {
    // A peer may ask for less, and for no more.
    for (progress_ms, expected) in [(0, 1000), (300, 300), (1000, 1000), (u32::MAX, 1000)] {
        // No payload comes of a WRITE.
        assert_eq!(overdue(Op::Write, progress_ms, |_, _| {}), Some(expected), "{progress_ms}");
        // One credit came with the hello, and no other one.
        let mut offered = false;
        let found = overdue(Op::Read, progress_ms, |there, request| {
            if !core::mem::replace(&mut offered, true) {
                there.offer(request, 64, 0).unwrap();
                there.offer(request, 64, 0).unwrap();
            }
        });
        assert_eq!(found, Some(expected), "{progress_ms}: one small frame is no progress");
    }
}

#[test]
fn time_that_the_responder_itself_takes_is_not_the_peers() {
    // It has not made the payload of a READ ready.
    assert_eq!(overdue(Op::Read, 300, |_, _| {}), None);
    // It cannot read for lack of a slot.
    assert_eq!(overdue(Op::Write, 300, |there, _| there.hold(true)), None);
    // It copies what came, and gives no credit until then.
    let (mut here, mut there) = opened();
    let request = here.submit(patient(Op::Write, 300)).unwrap();
    serve!(there, &drain!(here));
    for _ in 0..3 {
        here.offer(request, 64, 0).unwrap();
    }
    serve!(there, &drain!(here));
    assert_eq!(there.granted(), 0);
    let ticks = |there: &mut Responder, from: u64| {
        (from..from + 20).any(|step| {
            there.tick(Duration::from_millis(step * 50));
            let mut ping = Vec::new();
            frame::encode(&mut ping, Kind::Ping, step, |_| {});
            serve!(there, &ping).iter().any(|event| event.contains("Overdue"))
        })
    };
    assert!(!ticks(&mut there, 0));
    there.grant(1);
    assert!(ticks(&mut there, 20), "now it is the peer's turn");
}

/// Ten frames of a READ, all ready at once, as host memory is; the peer takes one each 200 ms and may
/// wait for 300. The step at which the request is overdue.
fn overdue_frame_by_frame(frame_bytes: u32) -> Option<u64> {
    let (mut here, mut there) = opened_of(Limits { slot_bytes: frame_bytes, ..limits() });
    let (form, part) = (Form::Ranges, Part::whole(9));
    let mut encoder = Encoder::new(Vec::new(), Op::Read, form, part, 300, &SEGMENTS);
    encoder.range(Range { segment: 0, offset: 0, length: 10 * u64::from(frame_bytes) });
    let request = here.submit(encoder.finish().unwrap()).unwrap();
    serve!(there, &drain!(here));
    for _ in 0..10 {
        there.offer(request, frame_bytes, 0).unwrap();
    }
    for step in 0..10 {
        there.tick(Duration::from_millis(step * 200));
        let events = serve!(there, &drain!(here));
        if events.iter().any(|event| event.contains("Overdue")) {
            return Some(step);
        }
        feed!(here, &drain!(there));
        here.grant(1);
    }
    there.finish(request, Status::DONE).unwrap();
    feed!(here, &drain!(there));
    assert_eq!(ends(&mut here), [(request, Outcome::Done)]);
    None
}

#[test]
fn a_read_goes_credit_by_credit_for_as_long_as_the_frames_are_worth_it() {
    assert_eq!(overdue_frame_by_frame(256 << 10), None);
    // As of a peer that would keep a slot for each of them.
    assert_eq!(overdue_frame_by_frame(64), Some(2));
}

#[test]
fn a_reader_that_takes_a_byte_now_and_then_ends_its_lane() {
    let (mut here, mut there) = opened();
    let request = here.submit(encoded(Op::Read, 64)).unwrap();
    serve!(there, &drain!(here));
    there.offer(request, 64, 0).unwrap();
    for step in 0..=10 {
        assert_eq!(there.closed(), None, "{step}");
        assert!(!there.outgoing().is_empty());
        there.sent(1);
        let mut ping = Vec::new();
        frame::encode(&mut ping, Kind::Ping, step, |_| {});
        feed!(there, &ping);
        there.tick(Duration::from_millis(step * 100));
    }
    let what = "too little could be sent";
    assert_eq!(violation(there.closed()), Violation::Silence { what, milliseconds: 1000 });
}
