use super::*;
use alloc::vec;
use alloc::vec::Vec;
use proptest::prelude::*;

const BASE: u64 = 0x7f00_0000_1000;
const MEMORY: usize = 64;

/// A server with [`MEMORY`] bytes at [`BASE`], and what it sent.
struct Host {
    server: Server,
    memory: Vec<u8>,
    current: u64,
    sent: Vec<u8>,
}

impl Host {
    fn new() -> Self {
        let memory = (0..MEMORY as u8).collect();
        Self { server: Server::new(), memory, current: BASE, sent: Vec::new() }
    }

    /// Feeds bytes in portions and does all that the server asks for.
    fn feed(&mut self, mut bytes: &[u8], portion: usize) {
        while !bytes.is_empty() && self.server.closing().is_none() {
            let part = &bytes[..portion.min(bytes.len())];
            let taken = match self.server.incoming() {
                Incoming::Framing(most) => {
                    let taken = self.server.received(part);
                    assert_eq!(taken, most.min(part.len()));
                    taken
                }
                Incoming::Payload(Payload { offset, left }) => {
                    let taken = part.len().min(left as usize);
                    let at = (self.current - BASE + offset) as usize;
                    self.memory[at..at + taken].copy_from_slice(&part[..taken]);
                    self.server.received_payload(taken as u64);
                    taken
                }
                Incoming::Nothing => unreachable!("all that it waited for was done"),
            };
            bytes = &bytes[taken..];
            self.drive();
        }
    }

    fn drive(&mut self) {
        if let Some(Header { addr, length, .. }) = self.server.request() {
            let end = addr + length;
            if addr >= BASE && end <= BASE + MEMORY as u64 {
                self.current = addr;
                self.server.allow();
            } else {
                self.server.reject();
            }
        }
        if self.server.written().is_some() {
            self.server.applied();
        }
        loop {
            match self.server.outgoing() {
                Outgoing::Nothing => return,
                // A byte at a time: every split of what is sent.
                Outgoing::Framing(bytes) => self.sent.push(bytes[0]),
                Outgoing::Payload(Payload { offset, .. }) => {
                    self.sent.push(self.memory[(self.current - BASE + offset) as usize]);
                }
            }
            self.server.sent(1);
        }
    }
}

fn header(op: Op, version: Version, offset: u64, length: u64) -> Header {
    Header { op, version, addr: BASE.wrapping_add(offset), length }
}

#[test]
fn headers_and_statuses_have_mooncakes_bytes() {
    let write =
        Header { op: Op::Write, version: Version::V2, addr: 0x1122_3344_5566_7788, length: 0x0102 };
    let bytes = [
        0x02, 0x01, 0, 0, 0, 0, 0, 0, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0x81, 0, 0,
        0, 0, 0, 0, 0,
    ];
    assert_eq!(write.encode(), bytes);
    for (op, version, opcode) in [
        (Op::Read, Version::V1, 0),
        (Op::Write, Version::V1, 1),
        (Op::Read, Version::V2, 0x80),
        (Op::Write, Version::V2, 0x81),
    ] {
        assert_eq!(Header { op, version, ..write }.encode()[16], opcode);
    }
    assert_eq!(Status::Done.encode(), *b"\0\0\0\0VTCM");
    assert_eq!(Status::AddressRejected.encode(), *b"\x01\0\0\0VTCM");
    assert_eq!(Status::decode(*b"\x07\0\0\0VTCM"), Some(Status::Other(7)));
    assert_eq!(Status::decode(*b"\0\0\0\0VTCN"), None);
}

#[test]
fn padding_is_ignored_and_unknown_opcodes_are_refused() {
    let mut bytes = header(Op::Write, Version::V1, 0, 4).encode();
    bytes[17..].fill(0xee);
    assert_eq!(Header::decode(&bytes), Ok(header(Op::Write, Version::V1, 0, 4)));
    for opcode in (0..=255u8).filter(|opcode| opcode & 0x7f > 1) {
        bytes[16] = opcode;
        assert_eq!(Header::decode(&bytes), Err(opcode));
        let mut host = Host::new();
        host.feed(&bytes, 24);
        assert_eq!(host.server.closing(), Some(Closing::UnknownOpcode { opcode }));
        assert_eq!(host.sent, b"");
    }
}

/// Operations of one connection, and what the server answers.
fn conversation() -> (Vec<u8>, Vec<u8>) {
    let mut bytes = Vec::new();
    bytes.extend(header(Op::Write, Version::V2, 8, 4).encode());
    bytes.extend(b"abcd");
    bytes.extend(header(Op::Read, Version::V2, 6, 4).encode());
    bytes.extend(header(Op::Write, Version::V1, 63, 1).encode());
    bytes.extend(b"z");
    bytes.extend(header(Op::Read, Version::V1, 62, 2).encode());
    bytes.extend(header(Op::Read, Version::V2, 62, 3).encode());
    let mut answers = Vec::new();
    answers.extend(b"\0\0\0\0VTCM");
    answers.extend(b"\0\0\0\0VTCM\x06\x07ab");
    answers.extend(b"\x3ez");
    answers.extend(b"\x01\0\0\0VTCM");
    (bytes, answers)
}

#[test]
fn a_server_answers_the_same_at_every_split_point() {
    let (bytes, answers) = conversation();
    for split in 0..=bytes.len() {
        let mut host = Host::new();
        host.feed(&bytes[..split], usize::MAX);
        host.feed(&bytes[split..], usize::MAX);
        assert_eq!(host.sent, answers, "split at byte {split}");
        let rejected = Closing::Rejected { addr: BASE + 62, length: 3, version: Version::V2 };
        assert_eq!(host.server.closing(), Some(rejected), "split at byte {split}");
    }
    let mut host = Host::new();
    host.feed(&bytes, 1);
    assert_eq!(host.sent, answers);
}

#[test]
fn impossible_extents_are_rejected_without_asking_the_host() {
    for (addr, length) in [(BASE, 0), (u64::MAX, 1), (BASE, u64::MAX), (1 << 63, 1 << 63)] {
        for version in [Version::V1, Version::V2] {
            let mut server = Server::new();
            let asked = Header { op: Op::Write, version, addr, length };
            assert_eq!(server.received(&asked.encode()), HEADER_LENGTH);
            assert_eq!(server.request(), None, "{length} bytes at {addr:#x}");
            assert_eq!(server.incoming(), Incoming::Nothing);
            if version == Version::V2 {
                assert_eq!(server.outgoing(), Outgoing::Framing(&Status::AddressRejected.encode()));
                assert_eq!(server.closing(), None, "the status goes first");
                assert!(server.is_rejected());
                server.sent(8);
            }
            assert!(server.is_rejected());
            assert_eq!(server.outgoing(), Outgoing::Nothing);
            assert_eq!(server.closing(), Some(Closing::Rejected { addr, length, version }));
        }
    }
}

#[test]
fn a_connection_that_ends_early_is_truncated_and_one_between_operations_is_not() {
    let bytes = [&header(Op::Write, Version::V2, 0, 2).encode()[..], b"xy"].concat();
    for count in 0..=bytes.len() {
        let mut host = Host::new();
        host.feed(&bytes[..count], 1);
        host.server.received_end();
        let whole = count == 0 || count == bytes.len();
        let closing = if whole { Closing::Ended } else { Closing::Truncated };
        assert_eq!(host.server.closing(), Some(closing), "after {count} bytes");
    }
}

#[test]
fn a_client_may_close_its_half_while_it_is_answered() {
    let mut server = Server::new();
    server.received(&header(Op::Read, Version::V2, 0, 2).encode());
    server.received_end();
    server.allow();
    assert_eq!(server.outgoing(), Outgoing::Framing(&Status::Done.encode()));
    server.sent(8);
    assert_eq!(server.outgoing(), Outgoing::Payload(Payload { offset: 0, left: 2 }));
    server.sent(2);
    assert!(server.is_idle());
    server.received_end();
    assert_eq!(server.closing(), Some(Closing::Ended));
}

#[test]
fn a_copy_that_fails_closes_the_connection_without_a_status() {
    for op in [Op::Read, Op::Write] {
        let mut server = Server::new();
        server.received(&header(op, Version::V2, 3, 2).encode());
        server.allow();
        server.received_payload(2);
        server.fail();
        assert_eq!(server.closing(), Some(Closing::Failed { addr: BASE + 3, length: 2 }));
        assert_eq!(server.outgoing(), Outgoing::Nothing);
    }
}

/// Runs an operation against a server, `portion` bytes at a time in each direction.
fn run(
    header: Header,
    local: &mut [u8],
    host: &mut Host,
    portion: usize,
) -> Result<(), ClientError> {
    let mut client = Client::new(header);
    let (mut wire, mut read) = (Vec::new(), 0);
    while client.outcome().is_none() {
        let count = match client.outgoing() {
            Outgoing::Nothing => 0,
            Outgoing::Framing(bytes) => {
                wire.extend(&bytes[..portion.min(bytes.len())]);
                portion.min(bytes.len())
            }
            Outgoing::Payload(Payload { offset, left }) => {
                let count = portion.min(left as usize);
                wire.extend(&local[offset as usize..][..count]);
                count
            }
        };
        client.sent(count as u64);
        host.feed(&core::mem::take(&mut wire), portion);
        let rest = &host.sent[read..];
        let rest = &rest[..portion.min(rest.len())];
        read += match client.incoming() {
            Incoming::Framing(_) => client.received(rest),
            Incoming::Payload(Payload { offset, left }) => {
                let count = rest.len().min(left as usize);
                local[offset as usize..][..count].copy_from_slice(&rest[..count]);
                client.received_payload(count as u64);
                count
            }
            Incoming::Nothing => 0,
        };
        if host.server.closing().is_some() && read == host.sent.len() {
            client.received_end();
        }
    }
    client.outcome().expect("the loop ends with one")
}

proptest! {
    #[test]
    fn client_and_server_move_the_right_bytes(
        write in any::<bool>(), second in any::<bool>(), offset in 0..MEMORY as u64,
        length in 0..MEMORY as u64, portion in 1usize..40,
    ) {
        let op = if write { Op::Write } else { Op::Read };
        let version = if second { Version::V2 } else { Version::V1 };
        let mut host = Host::new();
        let mut local = vec![0xa5; length as usize];
        let before = host.memory.clone();
        let outcome = run(header(op, version, offset, length), &mut local, &mut host, portion);
        let (start, end) = (offset as usize, (offset + length) as usize);
        if end <= MEMORY {
            prop_assert_eq!(outcome, Ok(()));
            prop_assert_eq!(&host.memory[start..end], &local[..]);
            prop_assert_eq!(&host.memory[..start], &before[..start]);
            prop_assert_eq!(&host.memory[end..], &before[end..]);
        } else {
            prop_assert_eq!(&host.memory, &before);
            // A version 1 server has no way to say that a WRITE was rejected, if it was all sent.
            prop_assert!(outcome.is_err() || (write && !second));
        }
    }

    #[test]
    fn garbage_never_panics_and_never_asks_for_more_than_its_header_says(
        bytes in proptest::collection::vec(any::<u8>(), 0..256), portion in 1usize..64,
    ) {
        let mut host = Host::new();
        host.feed(&bytes, portion);
        prop_assert!(host.sent.len() <= bytes.len() * (STATUS_LENGTH + MEMORY));
        let mut client = Client::new(header(Op::Write, Version::V2, 0, 9));
        client.sent(24 + 9);
        client.received(&bytes);
    }

    #[test]
    fn garbage_never_gives_a_client_more_than_it_asked_for(
        bytes in proptest::collection::vec(any::<u8>(), 0..64), honest in any::<bool>(),
        write in any::<bool>(), second in any::<bool>(), length in 0u64..40,
    ) {
        let op = if write { Op::Write } else { Op::Read };
        let version = if second { Version::V2 } else { Version::V1 };
        let mut client = Client::new(header(op, version, 0, length));
        client.sent(24);
        let bytes = if honest { [&Status::Done.encode()[..], &bytes].concat() } else { bytes };
        let (mut rest, mut payload) = (&bytes[..], 0);
        loop {
            let taken = match client.incoming() {
                Incoming::Nothing => 0,
                Incoming::Framing(most) => {
                    prop_assert!(most <= STATUS_LENGTH);
                    client.received(rest)
                }
                Incoming::Payload(Payload { offset, left }) => {
                    prop_assert_eq!((offset, offset + left), (payload, length));
                    let taken = rest.len().min(left as usize);
                    client.received_payload(taken as u64);
                    payload += taken as u64;
                    taken
                }
            };
            rest = &rest[taken..];
            if taken == 0 {
                break;
            }
        }
        prop_assert!(payload <= length);
        if client.outcome() == Some(Ok(())) {
            prop_assert!(payload == length || write || length == 0);
        }
    }

    #[test]
    fn a_header_survives_its_bytes(write in any::<bool>(), second in any::<bool>(), addr in any::<u64>(), length in any::<u64>()) {
        let op = if write { Op::Write } else { Op::Read };
        let version = if second { Version::V2 } else { Version::V1 };
        let header = Header { op, version, addr, length };
        prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
    }
}

#[test]
fn an_early_rejection_ends_a_write_that_is_still_being_sent() {
    let mut client = Client::new(header(Op::Write, Version::V2, 0, 100));
    client.sent(24);
    client.sent(30);
    assert_eq!(client.received(&Status::AddressRejected.encode()), 8);
    assert_eq!(client.outcome(), Some(Err(ClientError::Rejected { addr: BASE, length: 100 })));
    assert_eq!((client.outgoing(), client.incoming()), (Outgoing::Nothing, Incoming::Nothing));
    client.received_end();
    assert_eq!(client.outcome(), Some(Err(ClientError::Rejected { addr: BASE, length: 100 })));
}

#[test]
fn a_status_that_cannot_be_true_fails_the_operation() {
    let begin = |op| {
        let mut client = Client::new(header(op, Version::V2, 0, 100));
        client.sent(24);
        client
    };
    let mut client = begin(Op::Write);
    client.sent(99);
    client.received(&Status::Done.encode());
    assert_eq!(client.outcome(), Some(Err(ClientError::EarlyStatus { left: 1 })));
    let mut client = begin(Op::Read);
    client.received(&[7; 8]);
    let word = 0x0707_0707_0707_0707;
    assert_eq!(client.outcome(), Some(Err(ClientError::NoStatus { word })));
    let mut client = begin(Op::Read);
    client.received(&Status::Other(9).encode());
    assert_eq!(client.outcome(), Some(Err(ClientError::UnknownCode { code: 9 })));
    let mut client = begin(Op::Read);
    client.received(&Status::Done.encode()[..5]);
    client.received_end();
    assert_eq!(client.outcome(), Some(Err(ClientError::Truncated { addr: BASE, length: 100 })));
}

#[test]
fn nothing_is_read_past_an_operation() {
    let mut client = Client::new(header(Op::Write, Version::V2, 0, 1));
    client.sent(24);
    client.sent(1);
    let bytes = [&Status::Done.encode()[..], b"next"].concat();
    assert_eq!(client.received(&bytes), 8);
    assert_eq!(client.outcome(), Some(Ok(())));
    assert_eq!(client.received(b"next"), 0);
}
