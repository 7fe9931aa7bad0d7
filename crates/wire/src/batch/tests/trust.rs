//! Keys, versions, incarnations.

use super::*;

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
    // By Python's hmac, from the layouts in docs/wire.md.
    let hex =
        |bytes: &[u8]| -> String { bytes.iter().map(|it| alloc::format!("{it:02x}")).collect() };
    let theirs = "4a5bc17c500e2eb16f3cb43531264d669ea0133c09931fd785e74f1be1abc32b";
    assert_eq!(hex(&proof[16..]), theirs);
    feed!(there, &proof);
    assert!(matches!(there.event(), Some(responder::Event::Asked(_))));
    there.accept().unwrap();
    let theirs = "24b2721d095ebaadb090d61bb5833d595fc00b3af9cd44b081093b3306948e11";
    assert_eq!(hex(&drain!(there)[16..]), theirs);
    // Replayed to a connection with another nonce.
    let settings = responder::Settings {
        limits: limits(),
        credits: 2,
        incarnation: THERE,
        key: key(1),
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
