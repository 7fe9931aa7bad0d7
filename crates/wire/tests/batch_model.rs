//! An initiator and a responder against model hosts that do everything in random order: bytes in
//! portions, slots late, cancels, refusals, lost connections, a responder that shuts down.

use std::collections::{BTreeMap, VecDeque};

use kvferry_wire::batch::{
    Answer, Claim, Code, Encoded, Encoder, Form, Incoming, Initiator, Key, Landing, Lanes, Limits,
    Nonce, Op, Outcome, Paged, Part, Range, Refusal, Responder, Status, Strided, initiator,
    responder,
};
use kvferry_wire::segment::SegmentRef;
use kvferry_wire::{Id, checksum};
use proptest::prelude::*;

const SEGMENT: SegmentRef = SegmentRef { segment: 5, generation: 2 };
const WINDOW: usize = 2048;
const WINDOWS: usize = 24;

const LIMITS: Limits = Limits {
    frame_bytes: 1024,
    slot_bytes: 96,
    request_bytes: 4096,
    ranges: 64,
    requests: 4,
    credits: 3,
    progress_ms: 10_000,
    idle_ms: 0,
};

/// splitmix64: the same run for the same seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((word ^ word >> 31) % limit as u64) as usize
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.below(256) as u8).collect()
    }
}

/// A request as the test means it.
struct Meant {
    op: Op,
    /// Offsets and lengths in the segment, in the order of the payload.
    pieces: Vec<(usize, usize)>,
    /// Of a WRITE what it writes, of a READ what was read so far.
    local: Vec<u8>,
    bad: bool,
    /// Bytes that were offered since it begun; none before.
    offered: Option<usize>,
    arrived: usize,
    outcome: Option<Outcome>,
}

/// A request at the responder.
#[derive(Debug)]
struct Served {
    op: Op,
    pieces: Vec<(usize, usize)>,
    length: usize,
    offered: usize,
    applied: usize,
    bad: bool,
    /// It waits for another one.
    over: bool,
    cancelled: bool,
}

/// The responder's end of one connection.
struct Connection {
    responder: Responder,
    claim: Option<Claim>,
    asked: Option<kvferry_wire::batch::Hello>,
    served: BTreeMap<u64, Served>,
    slots: BTreeMap<(u64, u64), Vec<u8>>,
    landing: Vec<u8>,
    /// Slots whose bytes are not at their destination yet.
    pending: VecDeque<(Landing, Vec<u8>)>,
}

struct World {
    random: Random,
    initiator: Initiator,
    meant: BTreeMap<u64, Meant>,
    windows: usize,
    slots: BTreeMap<(u64, u64), Vec<u8>>,
    landing: Vec<u8>,
    pending: VecDeque<(Landing, Vec<u8>)>,
    connection: Option<Connection>,
    /// Lost connections whose copies have not ended.
    lost: Vec<Connection>,
    to_responder: VecDeque<u8>,
    to_initiator: VecDeque<u8>,
    lanes: Lanes,
    memory: Vec<u8>,
    settings: responder::Settings,
    nonces: u8,
    faults: bool,
}

fn key() -> Key {
    Key::new(&[9; 32]).unwrap()
}

impl World {
    fn new(seed: u64, keyed: bool, checksums: bool) -> Self {
        let mut random = Random(seed);
        let memory = random.bytes(WINDOW * WINDOWS);
        let incarnation = Id([2; 16]);
        let initiator = Initiator::new(initiator::Settings {
            limits: LIMITS,
            credits: 2,
            incarnation: Id([1; 16]),
            expected: incarnation,
            session: Id([3; 16]),
            lane: 1,
            lanes: 4,
            key: keyed.then(key),
            wants_checksums: checksums,
            attempts: 3,
            queue: 8,
        });
        let settings = responder::Settings {
            limits: LIMITS,
            credits: 1,
            incarnation,
            key: keyed.then(key),
            wants_checksums: false,
        };
        Self {
            random,
            initiator,
            meant: BTreeMap::new(),
            windows: 0,
            slots: BTreeMap::new(),
            landing: Vec::new(),
            pending: VecDeque::new(),
            connection: None,
            lost: Vec::new(),
            to_responder: VecDeque::new(),
            to_initiator: VecDeque::new(),
            lanes: Lanes::new(4),
            memory,
            settings,
            nonces: 0,
            faults: true,
        }
    }

    fn step(&mut self) {
        match self.random.below(16) {
            0 => self.submit(),
            1 | 2 => self.initiator_sends(),
            3 | 4 => self.initiator_receives(),
            5 | 6 => self.responder_sends(),
            7 | 8 => self.responder_receives(),
            9 => self.initiator_offers(),
            10 => self.responder_offers(),
            11 => self.initiator_applies(),
            12 => self.responder_applies(),
            13 => self.finish_one(),
            14 => self.connect(),
            _ if self.faults => self.fault(),
            _ => {}
        }
        self.events();
    }

    fn submit(&mut self) {
        if !self.faults || self.windows == WINDOWS {
            return;
        }
        let base = self.windows * WINDOW;
        self.windows += 1;
        let op = if self.random.one_in(2) { Op::Write } else { Op::Read };
        let bad = self.random.one_in(8);
        let segments = [SEGMENT, SegmentRef { segment: 99, generation: 0 }];
        let segment = u32::from(bad);
        let (form, lists) = match self.random.below(3) {
            0 => (Form::Ranges, 0..self.random.below(8)),
            1 => (Form::Strided, 0..self.random.below(3)),
            _ => (Form::Paged, 0..1),
        };
        let part = Part { transfer: 7, index: 2, count: 3 };
        let buffer = self.initiator.buffer();
        let mut encoder = Encoder::new(buffer, op, form, part, 0, &segments);
        let mut pieces = Vec::new();
        for at in lists {
            let offset = base + at * 256;
            match form {
                Form::Ranges => {
                    let length = 1 + self.random.below(200);
                    encoder.range(Range { segment, offset: offset as u64, length: length as u64 });
                    pieces.push((offset, length));
                }
                Form::Strided => {
                    let (length, count) = (1 + self.random.below(20), 1 + self.random.below(8));
                    let stride = length + self.random.below(8);
                    encoder.strided(Strided {
                        segment,
                        offset: offset as u64,
                        length: length as u64,
                        count: count as u64,
                        stride: stride as u64,
                    });
                    pieces.extend((0..count).map(|piece| (offset + piece * stride, length)));
                }
                Form::Paged => {
                    let numbers = [3, 0, 2, 1];
                    let numbers = &numbers[..1 + self.random.below(4)];
                    let (layers, rows) = (1 + self.random.below(3), 1 + self.random.below(3));
                    let row_bytes = 1 + self.random.below(16);
                    encoder.paged(
                        Paged {
                            segment,
                            offset: offset as u64,
                            page_stride: 256,
                            layer_stride: 64,
                            row_stride: 16,
                            row_bytes: row_bytes as u64,
                            layers: layers as u32,
                            rows: rows as u32,
                        },
                        numbers,
                    );
                    for &number in numbers {
                        for place in
                            (0..layers).flat_map(|layer| (0..rows).map(move |row| (layer, row)))
                        {
                            let at = offset + number as usize * 256 + place.0 * 64 + place.1 * 16;
                            pieces.push((at, row_bytes));
                        }
                    }
                }
            }
        }
        let encoded: Encoded = encoder.finish().unwrap();
        let length = pieces.iter().map(|piece| piece.1).sum();
        assert_eq!(encoded.length(), length as u64);
        let local = if op == Op::Write { self.random.bytes(length) } else { vec![0; length] };
        let bad = bad && length > 0;
        if let Ok(request) = self.initiator.submit(encoded) {
            let meant = Meant { op, pieces, local, bad, offered: None, arrived: 0, outcome: None };
            assert!(self.meant.insert(request, meant).is_none(), "numbers are used once");
        }
    }

    fn initiator_sends(&mut self) {
        let room = 1 + self.random.below(300);
        let outgoing = self.initiator.outgoing();
        let mut bytes = outgoing.framing.to_vec();
        if let Some(departure) = outgoing.payload {
            let slot = &self.slots[&(departure.request, departure.offset)];
            bytes.extend(&slot[departure.sent as usize..]);
        }
        bytes.truncate(room);
        self.initiator.sent(bytes.len());
        self.to_responder.extend(bytes);
    }

    fn responder_sends(&mut self) {
        let room = 1 + self.random.below(300);
        let Some(connection) = &mut self.connection else { return };
        let outgoing = connection.responder.outgoing();
        let mut bytes = outgoing.framing.to_vec();
        if let Some(departure) = outgoing.payload {
            let slot = &connection.slots[&(departure.request, departure.offset)];
            bytes.extend(&slot[departure.sent as usize..]);
        }
        bytes.truncate(room);
        connection.responder.sent(bytes.len());
        self.to_initiator.extend(bytes);
    }

    fn initiator_receives(&mut self) {
        let room = self.random.below(300).min(self.to_initiator.len());
        let bytes = &self.to_initiator.make_contiguous()[..room];
        let taken = match self.initiator.incoming() {
            Incoming::Nothing => 0,
            Incoming::Framing => self.initiator.received(bytes),
            Incoming::Payload(landing) => {
                if landing.received == 0 {
                    self.landing.clear();
                }
                let count = room.min((landing.length - landing.received) as usize);
                self.landing.extend(&bytes[..count]);
                self.initiator.received_payload(count as u32);
                count
            }
            Incoming::Discard(left) => {
                let count = room.min(left as usize);
                self.initiator.received_payload(count as u32);
                count
            }
        };
        self.to_initiator.drain(..taken);
    }

    fn responder_receives(&mut self) {
        let room = self.random.below(300).min(self.to_responder.len());
        let Some(connection) = &mut self.connection else { return };
        let bytes = &self.to_responder.make_contiguous()[..room];
        let taken = match connection.responder.incoming() {
            Incoming::Nothing => 0,
            Incoming::Framing => connection.responder.received(bytes),
            Incoming::Payload(landing) => {
                if landing.received == 0 {
                    connection.landing.clear();
                }
                let count = room.min((landing.length - landing.received) as usize);
                connection.landing.extend(&bytes[..count]);
                connection.responder.received_payload(count as u32);
                count
            }
            Incoming::Discard(left) => {
                let count = room.min(left as usize);
                connection.responder.received_payload(count as u32);
                count
            }
        };
        self.to_responder.drain(..taken);
    }

    fn initiator_offers(&mut self) {
        let begun = self.meant.iter_mut().filter(|(_, meant)| {
            meant.op == Op::Write
                && meant.offered.is_some_and(|offered| offered < meant.local.len())
        });
        let mut begun: Vec<_> = begun.collect();
        if begun.is_empty() {
            return;
        }
        let at = self.random.below(begun.len());
        let (&request, meant) = begun.swap_remove(at);
        let start = meant.offered.expect("only begun ones were taken");
        let length = (1 + self.random.below(96)).min(meant.local.len() - start);
        let bytes = meant.local[start..start + length].to_vec();
        match self.initiator.offer(request, length as u32, checksum::of(&bytes)) {
            Ok(offset) => {
                assert_eq!(offset, start as u64);
                meant.offered = Some(start + length);
                assert!(self.slots.insert((request, offset), bytes).is_none());
            }
            // Cancelled, or not taken by a responder that shuts down.
            Err(_) => meant.offered = None,
        }
    }

    fn responder_offers(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        for (&request, served) in &mut connection.served {
            if served.op != Op::Read || served.offered == served.length || served.over || served.bad
            {
                continue;
            }
            let bytes: Vec<_> = served
                .pieces
                .iter()
                .flat_map(|&(at, length)| &self.memory[at..at + length])
                .copied()
                .collect();
            let length = (1 + self.random.below(96)).min(served.length - served.offered);
            let bytes = bytes[served.offered..served.offered + length].to_vec();
            let responder = &mut connection.responder;
            if let Ok(offset) = responder.offer(request, length as u32, checksum::of(&bytes)) {
                served.offered += length;
                assert!(connection.slots.insert((request, offset), bytes).is_none());
            }
        }
    }

    fn initiator_applies(&mut self) {
        let Some((landing, bytes)) = self.pending.pop_front() else { return };
        if let Some(meant) = self.meant.get_mut(&landing.request) {
            let at = landing.offset as usize;
            meant.local[at..at + bytes.len()].copy_from_slice(&bytes);
            meant.arrived = at + bytes.len();
        }
        self.initiator.grant(1);
    }

    /// One slot, of the connection or of one that was lost, goes to its destination.
    fn responder_applies(&mut self) {
        // Copies of lost connections are slow, so that a new connection meets them.
        let slow = self.random.one_in(16);
        let lost = self.lost.iter_mut().filter(|_| slow);
        let connections = lost.chain(&mut self.connection);
        let mut connections: Vec<_> =
            connections.filter(|connection| !connection.pending.is_empty()).collect();
        if connections.is_empty() {
            return;
        }
        let at = self.random.below(connections.len());
        let connection = connections.swap_remove(at);
        let Some((landing, bytes)) = connection.pending.pop_front() else { return };
        let Some(served) = connection.served.get_mut(&landing.request) else {
            panic!("a copy for request {} that has ended", landing.request)
        };
        for (at, byte) in (landing.offset as usize..).zip(&bytes) {
            let mut skip = at;
            for &(offset, length) in &served.pieces {
                if skip < length {
                    self.memory[offset + skip] = *byte;
                    break;
                }
                skip -= length;
            }
        }
        served.applied += bytes.len();
        if connection.responder.closed().is_none() {
            connection.responder.grant(1);
        }
    }

    /// The responder's host ends what can be ended.
    fn finish_one(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        let Connection { responder, served, pending, .. } = connection;
        let copies = |request| pending.iter().any(|(landing, _)| landing.request == request);
        let open: Vec<_> = served.iter().filter(|(_, it)| !it.over).map(|(&id, _)| id).collect();
        if open.is_empty() {
            return;
        }
        let request = open[self.random.below(open.len())];
        let it = &served[&request];
        let whole = if it.op == Op::Write { it.applied } else { it.offered } == it.length;
        let status = if it.bad {
            Status::new(Code::UnknownSegment, "segment 99 is not there")
        } else if copies(request) && it.cancelled {
            let after = open[self.random.below(open.len())];
            if responder.not_before(request, after).is_ok() && request != after {
                served.get_mut(&request).expect("it is open").over = true;
            }
            return;
        } else if copies(request) {
            return;
        } else if whole && !it.cancelled {
            Status::DONE
        } else if it.cancelled {
            Status::new(Code::Cancelled, "as asked")
        } else {
            return;
        };
        responder.finish(request, status).unwrap();
        served.get_mut(&request).expect("it is open").over = true;
    }

    fn connect(&mut self) {
        self.lost.retain(|connection| {
            let done = connection.pending.is_empty();
            if done {
                connection.claim.into_iter().for_each(|claim| self.lanes.release(claim));
            }
            !done
        });
        match &mut self.connection {
            Some(connection) => {
                let Some(hello) = &connection.asked else { return };
                match self.lanes.claim(&hello.lane) {
                    Answer::Granted(claim) => {
                        connection.asked = None;
                        connection.claim = Some(claim);
                        connection.responder.accept().expect("it was asked");
                    }
                    Answer::After(_) => {}
                    Answer::Stale | Answer::Full => {
                        connection.asked = None;
                        connection.responder.refuse(Refusal::Busy, "no lane is free");
                    }
                }
            }
            None => {
                self.nonces = self.nonces.wrapping_add(1);
                let nonce = |side: u8| Nonce([self.nonces ^ side; 32]);
                self.initiator.connect(nonce(0));
                let responder = Responder::new(self.settings.clone(), nonce(0x80));
                self.connection = Some(Connection {
                    responder,
                    claim: None,
                    asked: None,
                    served: BTreeMap::new(),
                    slots: BTreeMap::new(),
                    landing: Vec::new(),
                    pending: VecDeque::new(),
                });
            }
        }
    }

    fn fault(&mut self) {
        match self.random.below(24) {
            0 => self.lose(),
            1 => {
                if let Some(connection) = &mut self.connection {
                    connection.responder.shut_down();
                }
            }
            2..8 => {
                let open: Vec<_> =
                    self.meant.iter().filter(|(_, it)| it.outcome.is_none()).collect();
                if !open.is_empty() {
                    let request = *open[self.random.below(open.len())].0;
                    self.initiator.cancel(request);
                }
            }
            _ => {}
        }
    }

    fn lose(&mut self) {
        let Some(mut connection) = self.connection.take() else { return };
        self.to_responder.clear();
        self.to_initiator.clear();
        self.initiator.disconnected();
        self.initiator_events();
        assert!(self.slots.is_empty(), "slots that were never released");
        connection.responder.disconnected();
        Self::responder_events(&mut connection);
        assert!(connection.slots.is_empty(), "slots that were never released");
        // What arrived whole is still moved; the host cannot call it back.
        self.lost.push(connection);
    }

    fn events(&mut self) {
        if let Some(connection) = &mut self.connection {
            Self::responder_events(connection);
            if let Some(closed) = connection.responder.closed() {
                assert!(!closed.to_string().contains("credit"), "{closed}");
                if let kvferry_wire::batch::Closed::Violation(violation) = closed {
                    panic!("the initiator broke the protocol: {violation}");
                }
            }
        }
        self.initiator_events();
        match self.initiator.closed() {
            Some(kvferry_wire::batch::Closed::Violation(violation)) => {
                panic!("the responder broke the protocol: {violation}")
            }
            Some(_) => self.lose(),
            None => {}
        }
    }

    fn responder_events(connection: &mut Connection) {
        let Connection { responder, served, slots, pending, landing: landed, .. } = connection;
        while let Some(event) = responder.event() {
            match event {
                responder::Event::Asked(hello) => connection.asked = Some(hello),
                responder::Event::Request { request, body } => {
                    assert_eq!(body.part, Part { transfer: 7, index: 2, count: 3 });
                    let pieces: Vec<_> = body
                        .pieces()
                        .map(|piece| (piece.offset as usize, piece.length as usize))
                        .collect();
                    for entry in body.entries() {
                        let (low, high) = entry.hull();
                        assert!(high - low < WINDOW as u64);
                    }
                    let segments: Vec<_> = body.segments().collect();
                    let bad = body.entries().any(|it| segments[it.segment() as usize] != SEGMENT);
                    let (op, length) = (body.op, body.length as usize);
                    let it = Served {
                        op,
                        pieces,
                        length,
                        offered: 0,
                        applied: 0,
                        bad,
                        over: false,
                        cancelled: false,
                    };
                    assert!(served.insert(request, it).is_none());
                }
                responder::Event::Arrived(landing) => {
                    let bytes = core::mem::take(landed);
                    assert_eq!(bytes.len(), landing.length as usize);
                    if let Some(expected) = landing.checksum {
                        assert_eq!(checksum::of(&bytes), expected);
                    }
                    if served[&landing.request].bad {
                        // Not a byte of a request that is refused is moved.
                        responder.grant(1);
                    } else {
                        pending.push_back((landing, bytes));
                    }
                }
                responder::Event::Released(release) => {
                    slots.remove(&(release.request, release.offset)).expect("it was offered");
                }
                responder::Event::Cancelled { request } => {
                    served.get_mut(&request).expect("it is open").cancelled = true;
                }
                responder::Event::Overdue { .. } => unreachable!("no time passes"),
            }
        }
    }

    fn initiator_events(&mut self) {
        while let Some(event) = self.initiator.event() {
            match event {
                initiator::Event::Opened(agreed) => assert_eq!(agreed.peer, Id([2; 16])),
                initiator::Event::Begun { request } => {
                    let meant = self.meant.get_mut(&request).expect("it was submitted");
                    assert_eq!(meant.outcome, None, "request {request} begins after its end");
                    (meant.offered, meant.arrived) = (Some(0), 0);
                    // Slots of a lost connection have nothing to do with this one.
                    self.pending.retain(|(landing, _)| landing.request != request);
                }
                initiator::Event::Released(release) => {
                    let slot = self.slots.remove(&(release.request, release.offset));
                    assert_eq!(slot.expect("it was offered").len(), release.length as usize);
                }
                initiator::Event::Arrived(landing) => {
                    let bytes = core::mem::take(&mut self.landing);
                    if let Some(expected) = landing.checksum {
                        assert_eq!(checksum::of(&bytes), expected);
                    }
                    self.pending.push_back((landing, bytes));
                }
                initiator::Event::Draining => {}
                initiator::Event::Ended { request, outcome } => {
                    self.check_end(request, &outcome);
                    let meant = self.meant.get_mut(&request).expect("it was submitted");
                    let before = meant.outcome.replace(outcome);
                    assert_eq!(before, None, "request {request} ended twice");
                    meant.offered = None;
                }
            }
        }
    }

    fn check_end(&mut self, request: u64, outcome: &Outcome) {
        assert!(self.slots.keys().all(|slot| slot.0 != request), "an end before a release");
        if *outcome != (Outcome::Lost { quiet: false }) {
            let copies = self.lost.iter().chain(&self.connection);
            let mut copies = copies.flat_map(|connection| &connection.pending);
            assert!(
                copies.all(|(landing, _)| landing.request != request),
                "request {request} ended as {outcome:?} while the responder copies for it"
            );
        }
        if *outcome == Outcome::Done {
            let meant = &self.meant[&request];
            assert!(!meant.bad, "a refused request is done");
            if meant.op == Op::Write {
                let there: Vec<u8> = meant
                    .pieces
                    .iter()
                    .flat_map(|&(at, length)| self.memory[at..at + length].to_vec())
                    .collect();
                assert_eq!(
                    there, meant.local,
                    "request {request} is done and its bytes are not there"
                );
            }
        }
    }

    /// Lets everything come to its end, without new faults.
    fn settle(&mut self) {
        self.faults = false;
        for _ in 0..100_000 {
            if self.meant.values().all(|meant| meant.outcome.is_some()) && self.pending.is_empty() {
                return;
            }
            self.step();
        }
        let open: Vec<_> = self.meant.iter().filter(|(_, it)| it.outcome.is_none()).collect();
        let open: Vec<_> = open.iter().map(|(id, it)| (**id, it.op, it.offered)).collect();
        panic!("requests that never end: {open:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn every_request_ends_once_with_the_right_bytes_in_any_order_of_events(
        seed in any::<u64>(), steps in 0usize..6000, keyed in any::<bool>(), checksums in any::<bool>(),
    ) {
        let mut world = World::new(seed, keyed, checksums);
        let before = world.memory.clone();
        for _ in 0..steps {
            world.step();
        }
        world.settle();
        let mut mine = vec![false; world.memory.len()];
        for (request, meant) in &world.meant {
            for &(at, length) in &meant.pieces {
                mine[at..at + length].fill(meant.op == Op::Write && !meant.bad);
            }
            if meant.op == Op::Read && meant.outcome == Some(Outcome::Done) {
                let there: Vec<u8> = meant
                    .pieces
                    .iter()
                    .flat_map(|&(at, length)| before[at..at + length].to_vec())
                    .collect();
                prop_assert_eq!(&there, &meant.local, "request {}", request);
            }
        }
        for (at, mine) in mine.iter().enumerate().filter(|(_, mine)| !**mine) {
            prop_assert_eq!(world.memory[at], before[at], "guard byte {} {}", at, mine);
        }
    }
}

#[test]
fn the_model_reaches_every_kind_of_end() {
    let (mut done, mut failed, mut lost) = (0, 0, 0);
    for seed in 0..60 {
        let mut world = World::new(seed, seed % 2 == 0, true);
        for _ in 0..4000 {
            world.step();
        }
        world.settle();
        for meant in world.meant.values() {
            match &meant.outcome {
                Some(Outcome::Done) => done += 1,
                Some(Outcome::Failed(_)) => failed += 1,
                Some(Outcome::Lost { .. }) => lost += 1,
                None => {}
            }
        }
    }
    assert!(done > 100 && failed > 50 && lost > 0, "done {done}, failed {failed}, lost {lost}");
}
