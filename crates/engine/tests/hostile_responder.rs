//! Peers that answer by the batch protocol, and never do what they are asked for.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use kvferry_engine::{Engine, Error, Identity, Op, Range, State};
use kvferry_wire::Id;
use kvferry_wire::batch::{Incoming, Limits, Nonce, Responder, responder};

const PATIENCE: Duration = Duration::from_secs(60);
const LEN: u64 = 4 << 20;

/// Listens as that engine. Each lane is opened and then left to what `answer` does.
fn listen(incarnation: Identity, answer: fn(&mut Responder)) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let settings = responder::Settings {
                limits: Limits::default(),
                credits: 1,
                incarnation: Id(incarnation.0),
                key: None,
                wants_checksums: false,
            };
            let machine = Responder::new(settings, Nonce([7; 32]));
            let stream = stream.expect("a connection");
            std::thread::spawn(move || serve(stream, machine, answer));
        }
    });
    address
}

fn serve(mut stream: TcpStream, mut machine: Responder, answer: fn(&mut Responder)) {
    stream.set_read_timeout(Some(Duration::from_millis(10))).expect("a socket");
    let (began, mut buffer) = (Instant::now(), [0; 4096]);
    while machine.closed().is_none() {
        machine.tick(began.elapsed());
        while !machine.outgoing().is_empty() {
            let framing = machine.outgoing().framing.to_vec();
            if stream.write_all(&framing).is_err() {
                return;
            }
            machine.sent(framing.len());
        }
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => take(&mut machine, &buffer[..count], answer),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
}

fn take(machine: &mut Responder, mut bytes: &[u8], answer: fn(&mut Responder)) {
    while !bytes.is_empty() {
        let taken = match machine.incoming() {
            Incoming::Nothing => return,
            Incoming::Framing => machine.received(bytes),
            Incoming::Payload(landing) => {
                let count = bytes.len().min((landing.length - landing.received) as usize);
                machine.received_payload(count as u32);
                count
            }
            Incoming::Discard(left) => {
                let count = bytes.len().min(left as usize);
                machine.received_payload(count as u32);
                count
            }
        };
        bytes = &bytes[taken..];
        let mut asked = false;
        while let Some(event) = machine.event() {
            asked |= matches!(event, responder::Event::Asked(_));
        }
        if asked {
            machine.accept().expect("it was asked");
            answer(machine);
        }
    }
}

#[test]
fn a_peer_that_says_goodbye_to_every_lane_fails_what_it_is_asked_for() {
    let device = kvferry_device::host().expect("host memory");
    // The engine whose memory is meant, which listens nowhere.
    let there = Engine::new(common::config(&[]), vec![device.clone()]).expect("an engine");
    let remote = there.allocate(&device, LEN).expect("memory");
    let address = listen(there.incarnation(), Responder::shut_down);
    let here = Engine::new(common::config(&[]), vec![device.clone()]).expect("an engine");
    let local = here.allocate(&device, LEN).expect("memory");
    let segment = there.segment();
    let target = here.open_tcp("peer", segment, &address.to_string()).expect("opens");
    let range = [Range { local: local.addr(), remote: remote.addr(), len: LEN }];
    for op in [Op::Write, Op::Read] {
        let id = here.submit(&target, op, &range).expect("submits");
        let state = here.wait(id, PATIENCE).expect("known").state;
        let State::Failed(Error::Tcp { reason, .. }) = state else { panic!("{state:?}") };
        assert!(reason.contains("goodbye"), "{reason}");
    }
}
