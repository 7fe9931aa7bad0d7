//! Random and damaged bytes.

use super::*;
use proptest::prelude::*;

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
