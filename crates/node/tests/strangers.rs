//! What anybody may say to a node's sockets, and what it costs the node.

mod common;

use std::io::{Read, Write};
use std::time::Duration;

use common::{Side, ask, eventually, exports_of, garbage, reply, say_tcp, say_unix};
use kvferry_wire::exchange::{self, Message, VERSION};
use kvferry_wire::handshake::{Kind, encode};
use kvferry_wire::{Id, Uuid, segment};

#[test]
fn a_stock_peer_gets_a_descriptor_that_it_can_read() {
    let side = Side::new(8192);
    let json = ask(side.stranger(), Kind::Metadata, b"{\"name\":\"whoever\"}");
    let descriptor = segment::parse(&json).unwrap();
    assert_eq!(descriptor.name, side.node.name());
    assert!(descriptor.protocol.offers("tcp"));
    assert_eq!(Some(descriptor.tcp_data_port), side.node.data_port());
    assert_eq!(descriptor.tcp_proto_version, 2);
    let buffer = &descriptor.buffers[0];
    assert_eq!((buffer.addr, buffer.length), (side.buffer.addr(), side.buffer.len()));
    assert_eq!(buffer.name, format!("kvferry://{}", side.node.name()));
    assert_eq!(json.last(), Some(&b'\n'));
}

#[test]
fn probes_notifications_and_connection_requests_are_answered() {
    let side = Side::new(4096);
    assert_eq!(ask(side.stranger(), Kind::Probe, b"{}"), b"{\"status\":\"success\"}\n");
    let notify = ask(side.stranger(), Kind::Notify, b"{\"name\":\"a\",\"notify_msg\":\"b\"}");
    assert_eq!(notify, b"{\"name\":\"\",\"notify_msg\":\"success\"}\n");
    for kind in [Kind::Connection, Kind::Untyped] {
        let refusal = String::from_utf8(ask(side.stranger(), kind, b"{}")).unwrap();
        assert!(refusal.contains("\"reply_msg\":\"kvferry has no RDMA transport"), "{refusal}");
    }
    assert_eq!(side.node.rejected(), 0);
}

/// FAILURES.md B37.
#[test]
fn garbage_on_the_handshake_port_ends_only_its_own_connection() {
    let side = Side::new(4096);
    for (count, (what, bytes)) in garbage().into_iter().enumerate() {
        say_tcp(&side.stranger(), &bytes);
        eventually(what, || side.node.rejected() == count as u64 + 1);
        assert_eq!(
            ask(side.stranger(), Kind::Probe, b"{}"),
            b"{\"status\":\"success\"}\n",
            "after {what}"
        );
    }
    drop(side.stranger());
    assert_eq!(
        ask(side.stranger(), Kind::Probe, b"{}").len(),
        21,
        "after a connection without a word"
    );
    assert_eq!(side.node.rejected(), garbage().len() as u64);
}

#[test]
fn garbage_on_the_exports_socket_ends_only_its_own_connection() {
    let (side, other) = (Side::new(4096), Side::new(4096));
    let extension = side.extension();
    let early =
        exchange::encode(&Message::Fetch { request: 1, device: Uuid([0; 16]), id: 1 }).unwrap();
    let version =
        exchange::encode(&Message::Hello { version: 3, incarnation: extension.incarnation })
            .unwrap();
    let stale =
        exchange::encode(&Message::Hello { version: VERSION, incarnation: Id([0; 16]) }).unwrap();
    let ours = [
        ("a fetch before the hello", early),
        ("another version", version),
        ("another engine", stale),
    ];
    for (count, (what, bytes)) in garbage().into_iter().chain(ours).enumerate() {
        say_unix(&exports_of(&extension), &bytes);
        eventually(what, || side.node.rejected() == count as u64 + 1);
        assert!(other.node.open(side.node.name()).unwrap().is_alive(), "after {what}");
    }
}

#[test]
fn a_request_that_arrives_byte_by_byte_is_answered() {
    let side = Side::new(4096);
    let mut stream = side.stranger();
    stream.set_nodelay(true).unwrap();
    for byte in encode(Kind::Probe, b"{}") {
        stream.write_all(&[byte]).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(reply(&mut stream).unwrap().kind, Kind::Probe);

    let extension = side.extension();
    let mut stream = exports_of(&extension);
    let hello = Message::Hello { version: VERSION, incarnation: extension.incarnation };
    for byte in exchange::encode(&hello).unwrap() {
        stream.write_all(&[byte]).unwrap();
    }
    assert_eq!(next(&mut stream), hello);
}

#[test]
fn a_refused_fetch_leaves_the_connection_open() {
    let side = Side::new(4096);
    let extension = side.extension();
    let mut stream = exports_of(&extension);
    let hello = Message::Hello { version: VERSION, incarnation: extension.incarnation };
    let allocation = extension.allocations[0];
    let unknown =
        Message::Fetch { request: 1, device: allocation.device, id: allocation.id + 1000 };
    let known = Message::Fetch { request: 2, device: allocation.device, id: allocation.id };
    // All at once: the node answers in order.
    let bytes: Vec<u8> = [&hello, &unknown, &known]
        .into_iter()
        .flat_map(|message| exchange::encode(message).unwrap())
        .collect();
    stream.write_all(&bytes).unwrap();
    assert_eq!(next(&mut stream), hello);
    assert!(matches!(next(&mut stream), Message::Refused { request: Some(1), .. }));
    let export = exchange::Export::File { length: allocation.length };
    assert_eq!(next(&mut stream), Message::Export { request: 2, export });
}

#[test]
fn samples_are_lent_to_one_connection_each_in_numbers_and_refusals_leave_it_open() {
    let side = Side::new(4096);
    let extension = side.extension();
    let device = extension.allocations[0].device;
    let connect = || {
        let mut stream = exports_of(&extension);
        let hello = Message::Hello { version: VERSION, incarnation: extension.incarnation };
        let mut ask = move |message: &Message| {
            stream.write_all(&exchange::encode(message).unwrap()).unwrap();
            next(&mut stream)
        };
        assert_eq!(ask(&hello), hello);
        ask
    };
    let (mut ask, mut other) = (connect(), connect());
    let refused = |answer: Message| match answer {
        Message::Refused { request: Some(_), reason } => reason,
        other => panic!("{other:?}"),
    };
    let unknown = ask(&Message::Probe { request: 1, device: Uuid([9; 16]) });
    assert!(refused(unknown).contains("host:0"));

    let sample = |answer: Message| match answer {
        Message::Sample { id, .. } => id,
        other => panic!("{other:?}"),
    };
    let first = sample(ask(&Message::Probe { request: 2, device }));
    let second = sample(other(&Message::Probe { request: 1, device }));
    assert_ne!(first, second, "two connections never share one");
    assert!(matches!(
        ask(&Message::Fetch { request: 3, device, id: first }),
        Message::Export { .. }
    ));
    let prove = |request, id| Message::Prove { request, device, id, seed: 1 };
    assert!(refused(ask(&prove(4, second))).contains("not lent on this connection"));
    assert!(matches!(ask(&prove(5, first)), Message::Verdict { request: 5, wrong: Some(_) }));
    refused(ask(&prove(6, first)));

    // It can be lent again, and a peer that never gives one back gets no more in the end.
    assert_eq!(sample(ask(&Message::Probe { request: 7, device })), first);
    let more = (8..71).map(|request| sample(ask(&Message::Probe { request, device }))).count();
    assert_eq!(more, 63);
    assert!(refused(ask(&Message::Probe { request: 71, device })).contains("64"));
    assert!(matches!(ask(&prove(72, first)), Message::Verdict { .. }));
    // None of it is memory that a transfer could name.
    assert_eq!(side.extension().allocations, extension.allocations);
    assert_eq!(side.node.rejected(), 0);
}

/// FAILURES.md B40.
#[test]
fn silent_clients_keep_nobody_out_and_are_ended_in_time() {
    let side = Side::new(4096);
    // Each says something before the next one comes: who makes room before it did is not counted.
    let begin = |_| {
        let mut stream = side.stranger();
        stream.write_all(&[4, 0, 0]).unwrap();
        stream
    };
    let mut silent: Vec<_> = (0..80).map(begin).collect();
    assert_eq!(ask(side.stranger(), Kind::Probe, b"{}").len(), 21, "while 80 others hang");
    for stream in &mut silent {
        assert_eq!(reply(stream), None, "ended by the node");
    }
    eventually("all are counted", || side.node.rejected() == 80);
}

/// One frame, byte by byte, so that no byte of the next is taken.
fn next(stream: &mut impl Read) -> Message {
    let mut decoder = exchange::Decoder::new();
    loop {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        decoder.push(&byte);
        if let Some(message) = decoder.poll().unwrap() {
            return message;
        }
    }
}
