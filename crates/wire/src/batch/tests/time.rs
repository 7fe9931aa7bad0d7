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
