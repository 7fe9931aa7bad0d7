//! The fuzz targets' corpus, on the stable build: what each file reaches, so that a corpus which
//! says nothing any more is noticed.

#[path = "../fuzz/entries.rs"]
mod entries;

use std::path::PathBuf;

use kvferry_wire::batch::{Incoming, Key, Nonce, Responder, Status, responder};
use kvferry_wire::{exchange, handshake, mooncake};

fn corpus(target: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target)
}

/// Runs every file of a target and says what the best of them reaches.
fn run(target: &str, entry: fn(&[u8]) -> usize) -> usize {
    let files = std::fs::read_dir(corpus(target)).expect("a corpus");
    let files: Vec<_> = files.map(|file| file.expect("a file").path()).collect();
    assert!(files.len() >= 2, "{target} has {} files", files.len());
    let reached = files.iter().map(|file| {
        let bytes = std::fs::read(file).expect("a file");
        // Also cut off anywhere, and with any byte flipped.
        for at in 0..bytes.len().min(600) {
            let _ = entry(&bytes[..at]);
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x81;
            let _ = entry(&flipped);
        }
        entry(&bytes)
    });
    reached.max().expect("there are files")
}

#[test]
fn the_corpus_of_the_mooncake_server_does_operations() {
    assert_eq!(run("mooncake_server", entries::mooncake_server), 4);
}

#[test]
fn the_corpus_of_the_mooncake_client_does_operations_of_every_kind() {
    assert_eq!(run("mooncake_client", entries::mooncake_client), 5);
}

#[test]
fn the_corpus_of_the_exchange_has_messages_of_every_kind() {
    assert_eq!(run("exchange", entries::exchange), exchange_messages().len());
}

#[test]
fn the_corpus_of_handshakes_has_messages_of_every_kind() {
    assert_eq!(run("handshake", entries::handshake), 5);
}

#[test]
fn the_corpus_of_segments_has_descriptors() {
    assert!(run("segment", entries::segment) >= 2);
}

#[test]
fn the_corpus_of_the_responder_asks_for_every_form() {
    assert_eq!(run("batch_responder", entries::batch_responder), 3);
}

#[test]
fn the_corpus_of_the_initiator_does_every_request() {
    assert_eq!(run("batch_initiator", entries::batch_initiator), 3);
}

/// Bytes as [`entries`] takes them: portions, and deeds.
#[derive(Default)]
struct Script(Vec<u8>);

impl Script {
    fn portion(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(255) {
            self.0.push(part.len() as u8);
            self.0.extend(part);
        }
    }

    fn deed(&mut self, deed: u8) {
        self.0.extend([0, deed]);
    }
}

/// Both sides of a conversation in which all requests are done.
fn conversation(flags: u8) -> (Vec<u8>, Vec<u8>) {
    let mut here = entries::initiator(flags);
    let settings = responder::Settings {
        limits: entries::LIMITS,
        credits: 2,
        incarnation: entries::THERE,
        key: (flags & 1 == 1).then(|| Key::new(&[7; 32]).expect("it is long enough")),
        wants_checksums: flags & 2 == 2,
    };
    let mut there = Responder::new(settings, Nonce([0x55; 32]));
    for request in entries::requests() {
        here.submit(request).expect("it has room");
    }
    let (mut asked, mut answered) = (Script(vec![flags]), Script(vec![flags]));
    let (mut offered, mut open) = (0, Vec::new());
    for _ in 0..40 {
        let outgoing = here.outgoing();
        let payload = outgoing.payload.map_or(0, |it| (it.length - it.sent) as usize);
        let mut bytes = outgoing.framing.to_vec();
        bytes.extend(vec![0xab; payload]);
        here.sent(bytes.len());
        asked.portion(&bytes);
        let mut rest = &bytes[..];
        loop {
            let taken = match there.incoming() {
                Incoming::Payload(landing) => {
                    let count = rest.len().min((landing.length - landing.received) as usize);
                    there.received_payload(count as u32);
                    count
                }
                _ => there.received(rest),
            };
            rest = &rest[taken..];
            match there.event() {
                Some(responder::Event::Asked(_)) => {
                    there.accept().expect("it was asked");
                }
                Some(responder::Event::Request { request, body }) => {
                    open.push((request, body.op, body.length));
                }
                Some(responder::Event::Arrived(_)) => {
                    there.grant(1);
                }
                Some(_) => {}
                None if taken == 0 => break,
                None => {}
            }
        }
        for (at, &(request, op, length)) in open.iter().enumerate() {
            if op == kvferry_wire::batch::Op::Read {
                asked.deed((at as u8) << 4);
                // A longer READ takes two offers, of which the second one has its own length.
                let most = length.min(entries::LIMITS.slot_bytes.into()) as u32;
                let rest = length.saturating_sub(entries::LIMITS.slot_bytes.into()) as u32;
                let _ = there.offer(request, most, 0).or_else(|_| there.offer(request, rest, 0));
            }
        }
        let mut at = 0;
        while at < open.len() {
            if there.finish(open[at].0, Status::DONE).is_ok() {
                asked.deed((at as u8) << 4 | 1);
                open.remove(at);
            } else {
                at += 1;
            }
        }
        let outgoing = there.outgoing();
        let payload = outgoing.payload.map_or(0, |it| (it.length - it.sent) as usize);
        let mut bytes = outgoing.framing.to_vec();
        bytes.extend(vec![0xcd; payload]);
        there.sent(bytes.len());
        answered.portion(&bytes);
        let mut rest = &bytes[..];
        loop {
            let taken = match here.incoming() {
                Incoming::Payload(landing) => {
                    let count = rest.len().min((landing.length - landing.received) as usize);
                    here.received_payload(count as u32);
                    count
                }
                _ => here.received(rest),
            };
            rest = &rest[taken..];
            if taken == 0 {
                break;
            }
        }
        while let Some(event) = here.event() {
            if matches!(event, kvferry_wire::batch::initiator::Event::Arrived(_)) {
                here.grant(1);
            }
        }
        if offered < 2 && here.offer(1, 50, 0).is_ok() {
            answered.deed(0);
            offered += 1;
        }
    }
    assert_eq!(here.requests(), 0, "the conversation does not come to its end");
    (asked.0, answered.0)
}

fn exchange_messages() -> Vec<exchange::Message> {
    use exchange::{Export, Message};
    let device = kvferry_wire::Uuid([0x22; 16]);
    let exports = [
        Export::File { length: 4096 },
        Export::Handle { length: 4096, bytes: vec![0, 0xab, 0xff] },
        Export::Chunks { length: 8192, count: 2 },
        Export::Pool { length: 512, bytes: vec![1, 2] },
    ];
    let exports = exports.map(|export| Message::Export { request: 1, export });
    let others = [
        Message::Hello { version: exchange::VERSION, incarnation: entries::HERE },
        Message::Fetch { request: 1, device, id: u64::MAX },
        Message::Chunks { request: 1, lengths: vec![4096, 4096] },
        Message::Probe { request: 2, device },
        Message::Sample { request: 2, id: 5, seed: 6 },
        Message::Prove { request: 3, device, id: 5, seed: 7 },
        Message::Verdict {
            request: 3,
            wrong: Some(exchange::Wrong { at: 9, expected: 1, found: 0 }),
        },
        Message::Refused { request: None, reason: "gone".into() },
    ];
    exports.into_iter().chain(others).collect()
}

/// Writes the corpus anew: `KVFERRY_WRITE_CORPUS=1 cargo test -p kvferry-wire --test corpus`.
#[test]
fn the_corpus_can_be_written_anew() {
    let Some(_) = std::env::var_os("KVFERRY_WRITE_CORPUS") else {
        // What is checked in is what the code would write.
        for flags in 0..4 {
            let (asked, answered) = conversation(flags);
            for (target, bytes) in [("batch_responder", asked), ("batch_initiator", answered)] {
                let file = corpus(target).join(format!("conversation-{flags}"));
                let there = std::fs::read(&file).expect("a file");
                assert_eq!(there, bytes, "{} is not what it would be now", file.display());
            }
        }
        return;
    };
    let write = |target: &str, name: &str, bytes: &[u8]| {
        std::fs::create_dir_all(corpus(target)).unwrap();
        std::fs::write(corpus(target).join(name), bytes).unwrap();
    };
    for flags in 0..4 {
        let (asked, answered) = conversation(flags);
        write("batch_responder", &format!("conversation-{flags}"), &asked);
        write("batch_initiator", &format!("conversation-{flags}"), &answered);
    }
    let operation = |op, version, addr, length: u64| {
        let mut bytes = mooncake::Header { op, version, addr, length }.encode().to_vec();
        if op == mooncake::Op::Write {
            bytes.extend(vec![0xab; length.min(64) as usize]);
        }
        bytes
    };
    use mooncake::{Op, Version};
    let base = entries::BASE;
    let all = [
        vec![7],
        operation(Op::Write, Version::V2, base + 8, 20),
        operation(Op::Read, Version::V2, base, 30),
        operation(Op::Write, Version::V1, base, 1),
        operation(Op::Read, Version::V1, base + 4095, 1),
        operation(Op::Write, Version::V2, base + 4090, 20),
    ];
    write("mooncake_server", "operations", &all.concat());
    let bad = [vec![255], operation(Op::Read, Version::V2, u64::MAX, u64::MAX)];
    write("mooncake_server", "overflow", &bad.concat());
    write("mooncake_server", "http", b"\xffGET / HTTP/1.1\r\nHost: kvferry\r\n\r\n");
    // Of 5 bytes each; the status of version 2 says that it is done.
    let done = [0, 0, 0, 0, 0x56, 0x54, 0x43, 0x4d];
    let answered = [
        vec![7],
        vec![5 << 3, 1, 2, 3, 4, 5],
        vec![5 << 3 | 1],
        [&[5 << 3 | 2][..], &done, &[1, 2, 3, 4, 5]].concat(),
        [&[5 << 3 | 3][..], &done].concat(),
        vec![0],
    ];
    write("mooncake_client", "operations", &answered.concat());
    let early = [&[9, 5 << 3 | 4 | 3][..], &done].concat();
    write("mooncake_client", "early", &early);
    let encode = |message| exchange::encode(message).unwrap();
    let messages: Vec<_> = exchange_messages().iter().flat_map(encode).collect();
    write("exchange", "kinds", &[vec![5], messages].concat());
    write("exchange", "length", &[vec![3], (1u64 << 63).to_le_bytes().to_vec()].concat());
    let kinds = [
        handshake::encode(handshake::Kind::Metadata, handshake::METADATA_REQUEST),
        handshake::encode(handshake::Kind::Probe, b"{}\n"),
        handshake::encode(handshake::Kind::Notify, b"{\"name\":\"a\",\"notify_msg\":\"b\"}\n"),
        handshake::encode(handshake::Kind::Connection, handshake::CONNECTION_REPLY),
        handshake::encode(handshake::Kind::Untyped, b"{}\n"),
    ];
    write("handshake", "kinds", &[vec![5], kinds.concat()].concat());
    write("handshake", "http", b"\xffGET / HTTP/1.1\r\nHost: kvferry\r\n\r\n");
    write("handshake", "length", &[vec![3], (1u64 << 63).to_le_bytes().to_vec()].concat());
    write(
        "segment",
        "stock",
        br#"{"name":"10.0.0.1:15428","protocol":"tcp","tcp_data_port":16021,"tcp_proto_version":2,"timestamp":"2026","buffers":[{"name":"10.0.0.1:15428","addr":140000000000000,"length":1048576}]}"#,
    );
    write(
        "segment",
        "several",
        br#"{"name":"a:1","protocol":["hip","tcp"],"buffers":[{"name":"hip:0","addr":1,"length":2,"protocol":"hip","shm_name":"00"},{"name":"a:1","addr":5,"length":2,"protocol":"tcp"}]}"#,
    );
    write(
        "segment",
        "kvferry",
        br#"{"name":"a:1","protocol":"tcp","tcp_data_port":5,"tcp_proto_version":2,"timestamp":"1","buffers":[{"name":"a:1","addr":6144,"length":2048}],"kvferry":{"version":1,"incarnation":"b2b2b2b2b2b2b2b2b2b2b2b2b2b2b2b2","process":"c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3","host":"d4d4d4d4-d4d4-d4d4-d4d4-d4d4d4d4d4d4","pid":5,"socket":"s","allocations":[{"device":"a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1","id":7,"vendor":"cuda","base":4096,"length":4096}],"regions":[{"addr":6144,"length":2048,"device":"a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1","id":7,"segment":{"segment":3,"generation":9}}],"batch":{"port":6,"major":1,"minor":0,"authenticated":true}}}"#,
    );
}
