//! What no peer sends.

use super::*;

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
fn a_responder_puts_the_end_of_a_cancelled_request_off_once() {
    let (mut here, mut there) = opened();
    let request = here.submit(encoded(Op::Write, 10)).unwrap();
    serve!(there, &drain!(here));
    here.cancel(request);
    serve!(there, &drain!(here));
    // Its own host may ask for it more often.
    for _ in 0..2 {
        there.not_before(request, request).unwrap();
    }
    feed!(here, &drain!(there));
    assert_eq!(here.closed(), None);
    let mut again = Vec::new();
    frame::encode(&mut again, Kind::NotBefore, request, |out| out.extend(request.to_le_bytes()));
    feed!(here, &again);
    assert_eq!(violation(here.closed()), Violation::NotBefore { request, after: request });
}
