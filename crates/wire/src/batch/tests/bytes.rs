//! Golden bytes.

use super::*;

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
