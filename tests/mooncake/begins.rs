//! The node begins, stock Mooncake serves.

use std::time::Duration;

use kvferry_engine::{Config, Op, Range, RangeError, Side};
use kvferry_node::{MooncakePeer, NodeOptions, TransferError, TransferState};
use kvferry_wire::mooncake::ClientError;
use serde_json::json;

use crate::here::{Here, PATIENCE, copy, eventually, fill, random, same, scatter};
use crate::relay::Relay;
use crate::stock::{Piece, Stock};

const BYTES: u64 = 20 << 20;

/// From a byte to more than one operation moves, aligned and not.
const LENS: &[u64] = &[1, 2, 7, 8, 24, 4095, 4096, 65537, 262_145, 3_000_001, (8 << 20) + 3];

fn ranges(here: &Here, pieces: &[Piece]) -> Vec<Range> {
    let base = here.buffer.addr();
    let range = |&Piece { local, remote, len }: &Piece| Range { local: base + local, remote, len };
    pieces.iter().map(range).collect()
}

fn transfer(peer: &MooncakePeer, op: Op, ranges: &[Range]) -> TransferState {
    peer.submit(op, ranges).expect("a good list").wait(PATIENCE)
}

fn failure(state: TransferState) -> TransferError {
    match state {
        TransferState::Failed(error) => error,
        other => panic!("{other:?}"),
    }
}

fn both_ways(config: Config) {
    let random = &mut random();
    let Some(mut stock) = Stock::start(BYTES, &[]) else { return };
    let here = Here::with(BYTES, config, &NodeOptions::default());
    let peer = here.node.open_mooncake(stock.name()).expect("a peer");
    assert_eq!(peer.buffers(), [(stock.addr(), stock.len())]);
    for _ in 0..3 {
        let (mut ours, mut theirs) = fill(&here, &mut stock, random);
        let base = stock.addr();
        let pieces = scatter(LENS, BYTES, base, random);
        let written = transfer(&peer, Op::Write, &ranges(&here, &pieces));
        assert_eq!(written, TransferState::Completed);
        copy(&ours, &mut theirs, pieces.iter().map(|p| (p.local, p.remote - base, p.len)));
        same(&stock.get(0, BYTES), &theirs, "what was written to stock");

        let pieces = scatter(LENS, BYTES, base, random);
        let read = transfer(&peer, Op::Read, &ranges(&here, &pieces));
        assert_eq!(read, TransferState::Completed);
        copy(&theirs, &mut ours, pieces.iter().map(|p| (p.remote - base, p.local, p.len)));
        same(&here.bytes(), &ours, "what was read from stock");
        same(&stock.get(0, BYTES), &theirs, "what was read, at stock");
    }
}

#[test]
fn stock_is_written_and_read_in_version_2() {
    both_ways(Config::default());
}

#[test]
fn thousands_of_small_pieces_and_several_transfers_at_once_arrive() {
    let random = &mut random();
    let Some(mut stock) = Stock::start(BYTES, &[]) else { return };
    let here = Here::new(BYTES);
    let peer = here.node.open_mooncake(stock.name()).expect("a peer");
    let (ours, mut theirs) = fill(&here, &mut stock, random);
    let base = stock.addr();
    let pieces = scatter(&[1777; 8000], BYTES, base, random);
    let ranges = ranges(&here, &pieces);
    let parts = ranges.chunks(2000).map(|part| peer.submit(Op::Write, part).expect("good"));
    for transfer in parts.collect::<Vec<_>>() {
        assert_eq!(transfer.wait(PATIENCE), TransferState::Completed);
    }
    copy(&ours, &mut theirs, pieces.iter().map(|p| (p.local, p.remote - base, p.len)));
    same(&stock.get(0, BYTES), &theirs, "what was written to stock");
}

fn version_1() -> Config {
    let mut config = Config::default();
    config.tcp_proto = 1;
    config
}

#[test]
fn stock_is_written_and_read_in_version_1() {
    both_ways(version_1());
}

#[test]
fn addresses_that_stock_rejects_are_reported_here_and_looked_up_the_next_time() {
    for (config, writes) in [(Config::default(), "rejected"), (version_1(), "closed")] {
        let Some(mut stock) = Stock::start(1 << 20, &[]) else { return };
        let here = Here::with(1 << 20, config, &NodeOptions::default());
        let (_, theirs) = fill(&here, &mut stock, &mut random());
        let peer = here.node.open_mooncake(stock.name()).expect("a peer");
        for op in [Op::Write, Op::Read] {
            // The descriptor that was fetched still has the buffer.
            assert_eq!(stock.ask(&json!({"do": "unregister"})), 0);
            let range = Range { local: here.buffer.addr(), remote: stock.addr(), len: 1 << 20 };
            let error = failure(transfer(&peer, op, &[range]));
            let TransferError::Refused { index: 0, error: said, .. } = &error else {
                panic!("{error:?}")
            };
            assert!(
                matches!(said, ClientError::Rejected { .. } | ClientError::Truncated { .. }),
                "{said:?}"
            );
            assert!(error.to_string().contains(writes), "{error}");
            // That fetched it again.
            let (side, addr, len) = (Side::Remote, stock.addr(), 1 << 20);
            let unknown = RangeError::NotRegistered { index: 0, side, addr, len };
            assert_eq!(failure(transfer(&peer, op, &[range])), TransferError::Range(unknown));
            // A region that is registered later is found without opening the peer again.
            assert_eq!(stock.ask(&json!({"do": "register"})), 0);
            let one = Range { len: 0, ..range };
            assert_eq!(transfer(&peer, op, &[one]), TransferState::Completed);
            let one = Range { len: 1, remote: stock.addr() + 5, ..range };
            assert_eq!(transfer(&peer, Op::Read, &[one]), TransferState::Completed);
        }
        same(&stock.get(0, 1 << 20), &theirs, "stock's buffer");
    }
}

#[test]
fn wrong_lists_are_refused_before_anything_moves() {
    let Some(mut stock) = Stock::start(4096, &[]) else { return };
    let here = Here::new(4096);
    let (ours, theirs) = fill(&here, &mut stock, &mut random());
    let peer = here.node.open_mooncake(stock.name()).expect("a peer");
    let (local, remote) = (here.buffer.addr(), stock.addr());
    let good = Range { local, remote, len: 64 };
    let local_end = Range { local: local + 4095, remote: remote + 64, len: 2 };
    let error = peer.submit(Op::Write, &[good, local_end]).expect_err("leaves local memory");
    assert!(error.to_string().starts_with("range 1: local"), "{error}");
    let twice = Range { local: local + 64, remote: remote + 63, len: 2 };
    let error = peer.submit(Op::Write, &[good, twice]).expect_err("writes a byte twice");
    assert!(error.to_string().contains("ranges 0 and 1 both write remote"), "{error}");
    let good = Range { local, remote: remote + 1024, len: 64 };
    for bad in [(remote + 4095, 2), (remote - 1, 2), (remote + 8192, 1), (8, 8)] {
        let bad = Range { local: local + 64, remote: bad.0, len: bad.1 };
        for op in [Op::Write, Op::Read] {
            let error = failure(transfer(&peer, op, &[good, bad]));
            assert!(error.to_string().starts_with("range 1: remote"), "{error}");
        }
    }
    let overflow = Range { local, remote: u64::MAX - 1, len: 64 };
    peer.submit(Op::Write, &[overflow]).expect_err("passes the end of the address space");
    same(&stock.get(0, 4096), &theirs, "stock's buffer");
    same(&here.bytes(), &ours, "our buffer");
}

#[test]
fn a_stock_process_that_restarts_under_its_name_is_told_from_the_old_one() {
    let Some(mut stock) = Stock::start(4096, &[]) else { return };
    let name = Relay::start(stock.name());
    let here = Here::new(4096);
    let peer = here.node.open_mooncake(name.address()).expect("a peer");
    let range = Range { local: here.buffer.addr(), remote: stock.addr(), len: 64 };
    assert_eq!(transfer(&peer, Op::Write, &[range]), TransferState::Completed);
    stock.kill();
    let error = failure(transfer(&peer, Op::Write, &[range]));
    let broken = matches!(error, TransferError::Connection { .. } | TransferError::Refused { .. });
    assert!(broken, "{error:?}");

    let second = Stock::start(4096, &[]).expect("as before");
    name.lead_to(second.name());
    match failure(transfer(&peer, Op::Write, &[range])) {
        error @ TransferError::Restarted { .. } => {
            assert_eq!(peer.submit(Op::Write, &[range]).expect_err("it is lost"), error);
        }
        // One in 2000 takes the data port of the old one, too: then its word is all that there is.
        error => {
            let said = "rejected 64 bytes";
            assert!(error.to_string().contains(said), "{error}");
            let error = failure(transfer(&peer, Op::Write, &[range]));
            assert!(matches!(error, TransferError::Range(_)), "{error:?}");
        }
    }
    let peer = here.node.open_mooncake(name.address()).expect("the new one");
    let range = Range { remote: second.addr(), ..range };
    assert_eq!(transfer(&peer, Op::Write, &[range]), TransferState::Completed);
}

#[test]
fn a_stock_process_that_is_killed_at_any_moment_ends_every_transfer() {
    for delay in [0, 1, 3, 10] {
        let Some(mut stock) = Stock::start(BYTES, &[]) else { return };
        let here = Here::new(BYTES);
        let peer = here.node.open_mooncake(stock.name()).expect("a peer");
        let range = Range { local: here.buffer.addr(), remote: stock.addr(), len: BYTES };
        let transfers: Vec<_> = (0..8)
            .map(|at| if at % 2 == 0 { Op::Write } else { Op::Read })
            .map(|op| peer.submit(op, &[range]).expect("submitted"))
            .collect();
        std::thread::sleep(Duration::from_millis(delay));
        stock.kill();
        for transfer in transfers {
            match transfer.wait(PATIENCE) {
                TransferState::Running => panic!("it hangs"),
                TransferState::Completed => {}
                TransferState::Failed(error) => {
                    assert!(error.to_string().contains(peer.name()), "{error}")
                }
            }
        }
        drop(peer);
        eventually("the memory is free", || here.engine.unregister(here.buffer.addr()).is_ok());
        // SAFETY: the buffer owns it, and unregisters it when it is dropped.
        unsafe { here.engine.register(here.buffer.addr(), BYTES) }.expect("again");
    }
}

#[test]
fn a_stock_process_that_is_stopped_costs_no_more_than_the_progress_deadline() {
    let Some(mut stock) = Stock::start(BYTES, &[]) else { return };
    let here = Here::impatient(BYTES);
    let peer = here.node.open_mooncake(stock.name()).expect("a peer");
    let range = Range { local: here.buffer.addr(), remote: stock.addr(), len: BYTES };
    stock.stop();
    let begun = [Op::Write, Op::Read].map(|op| peer.submit(op, &[range]).expect("submitted"));
    for transfer in begun {
        let error = failure(transfer.wait(PATIENCE));
        assert!(matches!(error, TransferError::Stalled { .. }), "{error:?}");
    }
    stock.go_on();
    // A busy machine may take longer than this side waits until the process runs again.
    eventually("it goes on", || match transfer(&peer, Op::Write, &[range]) {
        TransferState::Failed(TransferError::Stalled { .. }) => false,
        state => {
            assert_eq!(state, TransferState::Completed);
            true
        }
    });
    same(&stock.get(0, BYTES), &here.bytes(), "what was written once it went on");
}
