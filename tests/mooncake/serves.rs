//! Stock Mooncake begins, the node serves.

use kvferry_engine::Config;
use kvferry_node::NodeOptions;

use crate::here::{Here, copy, eventually, fill, random, same, scatter};
use crate::stock::{Piece, Stock, UNPOOLED, VERSION_1};

const BYTES: u64 = 6 << 20;

/// From a byte to three chunks of both sides, aligned and not.
const LENS: &[u64] = &[1, 2, 7, 8, 24, 4095, 4096, 4097, 65536, 65537, 262_145, 1 << 20, 3_000_001];

fn both_ways(environment: &[(&str, &str)]) {
    let random = &mut random();
    let Some(mut stock) = Stock::start(BYTES, environment) else { return };
    let here = Here::new(BYTES);
    for round in 0..3 {
        let (mut ours, mut theirs) = fill(&here, &mut stock, random);
        let base = here.buffer.addr();
        let pieces = scatter(LENS, BYTES, base, random);
        assert!(stock.moves("write", here.node.name(), &pieces), "round {round}");
        copy(&theirs, &mut ours, pieces.iter().map(|p| (p.local, p.remote - base, p.len)));
        // In version 1 the writer is not told when the last bytes are in place.
        eventually("all bytes are in place", || here.bytes() == ours);

        let pieces = scatter(LENS, BYTES, base, random);
        assert!(stock.moves("read", here.node.name(), &pieces), "round {round}");
        copy(&ours, &mut theirs, pieces.iter().map(|p| (p.remote - base, p.local, p.len)));
        same(&stock.get(0, BYTES), &theirs, "what stock read");
        same(&here.bytes(), &ours, "what stock read from");
    }
    assert_eq!(here.node.rejected(), 0);
}

#[test]
fn stock_writes_and_reads_here_in_version_2() {
    both_ways(&[]);
}

#[test]
fn stock_writes_and_reads_here_over_a_connection_for_each_piece() {
    both_ways(UNPOOLED);
}

#[test]
fn stock_writes_and_reads_here_in_version_1() {
    both_ways(VERSION_1);
}

#[test]
fn a_completed_write_of_stock_is_in_place() {
    let Some(mut stock) = Stock::start(BYTES, &[]) else { return };
    let here = Here::new(BYTES);
    for round in 0..50u8 {
        stock.put(0, &vec![round; 300_000]);
        let piece = Piece { local: 0, remote: here.buffer.addr() + 1, len: 300_000 };
        assert!(stock.moves("write", here.node.name(), &[piece]));
        same(&here.bytes()[1..300_001], &vec![round; 300_000], "version 2 says when");
    }
}

#[test]
fn thousands_of_pieces_that_each_have_a_connection_are_all_served() {
    let random = &mut random();
    let Some(mut stock) = Stock::start(BYTES, UNPOOLED) else { return };
    let here = Here::new(BYTES);
    let (mut ours, theirs) = fill(&here, &mut stock, random);
    let base = here.buffer.addr();
    let pieces = scatter(&[1000; 3000], BYTES, base, random);
    assert!(stock.moves("write", here.node.name(), &pieces));
    copy(&theirs, &mut ours, pieces.iter().map(|p| (p.local, p.remote - base, p.len)));
    same(&here.bytes(), &ours, "what stock wrote");
    assert_eq!(here.node.rejected(), 0);
}

/// Ranges that are not inside one registered region: before it, across its ends, behind it, nowhere.
fn outside(here: &Here) -> Vec<(u64, u64)> {
    let (start, end) = (here.buffer.addr(), here.buffer.addr() + here.buffer.len());
    vec![(end, 1), (start - 1, 2), (end - 1, 2), (start - 64, 64), (start, BYTES + 1), (4096, 64)]
}

/// Until it is counted here: stock gives up connections that were refused, and for a second after
/// it gave up all four it asks nobody.
fn refused(here: &Here, stock: &mut Stock, op: &str, piece: Piece) {
    let before = here.node.rejected();
    eventually("it is counted", || {
        assert!(!stock.moves(op, here.node.name(), &[piece]), "{op} {piece:x?}");
        here.node.rejected() > before
    });
}

#[test]
fn rejected_addresses_are_reported_on_both_sides_and_cost_nothing_else() {
    for environment in [&[][..], UNPOOLED] {
        let Some(mut stock) = Stock::start(2 * BYTES, environment) else { return };
        let here = Here::new(BYTES);
        let (ours, theirs) = fill(&here, &mut stock, &mut random());
        for (remote, len) in outside(&here) {
            for op in ["write", "read"] {
                let piece = Piece { local: 0, remote, len };
                refused(&here, &mut stock, op, piece);
            }
        }
        same(&here.bytes(), &ours, "the buffer after rejections");
        let piece = Piece { local: 0, remote: here.buffer.addr(), len: BYTES };
        eventually("a good one", || stock.moves("write", here.node.name(), &[piece]));
        same(&here.bytes(), &theirs[..BYTES as usize], "the good one");
    }
}

#[test]
fn rejected_addresses_of_version_1_are_counted_here_and_fail_reads_there() {
    let Some(mut stock) = Stock::start(2 * BYTES, VERSION_1) else { return };
    let here = Here::new(BYTES);
    let (ours, theirs) = fill(&here, &mut stock, &mut random());
    for (remote, len) in outside(&here) {
        let piece = Piece { local: 0, remote, len };
        refused(&here, &mut stock, "read", piece);
        // A write of version 1 is done when it is sent; what comes of it, nobody says.
        let before = here.node.rejected();
        eventually("it is counted", || {
            stock.moves("write", here.node.name(), &[piece]);
            here.node.rejected() > before
        });
    }
    same(&here.bytes(), &ours, "the buffer after rejections");
    same(&stock.get(0, 2 * BYTES), &theirs, "what stock would have read");
}

#[test]
fn a_region_that_was_unregistered_is_rejected_and_one_registered_later_is_served() {
    let Some(mut stock) = Stock::start(4096, &[]) else { return };
    let here = Here::new(4096);
    stock.put(0, &[1; 4096]);
    let late = here.engine.allocate(&here.engine.devices()[0], 4096).unwrap();
    let piece = Piece { local: 0, remote: late.addr(), len: 4096 };
    assert!(stock.moves("write", here.node.name(), &[piece]));
    drop(late);
    assert!(!stock.moves("write", here.node.name(), &[piece]));
    assert_eq!(here.node.rejected(), 1);
}

#[test]
fn a_stock_process_that_is_stopped_or_killed_within_an_operation_is_given_up() {
    let Some(mut stock) = Stock::start(64 << 20, &[]) else { return };
    let here = Here::impatient(64 << 20);
    let piece = Piece { local: 0, remote: here.buffer.addr(), len: 64 << 20 };
    for op in ["write", "read"] {
        let served = here.node.rejected();
        stock.begin(op, here.node.name(), &[piece]);
        // Whether it is stopped within the operation is up to the machine: until it once is.
        std::thread::sleep(std::time::Duration::from_millis(5));
        stock.stop();
        std::thread::sleep(std::time::Duration::from_millis(1500));
        stock.go_on();
        let whole = stock.answer() == 0;
        assert!(whole || here.node.rejected() > served, "{op} failed and was not counted");
    }
    stock.begin("write", here.node.name(), &[piece]);
    stock.kill();
    // No lease is left.
    eventually("the memory is free", || here.engine.unregister(here.buffer.addr()).is_ok());
    // SAFETY: the buffer owns it, and unregisters it when it is dropped.
    unsafe { here.engine.register(here.buffer.addr(), 64 << 20) }.expect("again");
}

#[test]
fn a_node_that_restarts_under_its_name_with_other_addresses_is_safe_from_stale_peers() {
    let Some(mut stock) = Stock::start(4096, &[]) else { return };
    stock.put(0, &[7; 4096]);
    let first = Here::new(4096);
    let stale = Piece { local: 0, remote: first.buffer.addr(), len: 64 };
    assert!(stock.moves("write", first.node.name(), &[stale]));
    let name = first.node.name().to_owned();
    let listen = name.parse().expect("an address");
    // Its memory stays, so that the second one has other addresses.
    let Here { buffer: _kept, node, engine: _running } = first;
    drop(node);
    let options = NodeOptions { listen, ..NodeOptions::default() };
    let second = Here::with(4096, Config::default(), &options);
    assert_eq!(second.node.name(), name);

    assert!(!stock.moves("write", &name, &[stale]), "an address of the first one");
    let piece = Piece { local: 0, remote: second.buffer.addr(), len: 64 };
    // A stock process keeps the first one's descriptor; a new one has none.
    let mut other = Stock::start(4096, &[]).expect("as before");
    other.put(0, &[9; 4096]);
    assert!(!other.moves("write", &name, &[stale]), "an address of the first one");
    same(&second.bytes(), &[0; 4096], "the second one's memory");
    assert!(other.moves("write", &name, &[piece]));
    same(&second.bytes()[..64], &[9; 64], "what it wrote");
}

#[test]
fn a_node_that_refuses_mooncakes_framing_names_no_port_and_no_memory() {
    let Some(mut stock) = Stock::start(4096, &[]) else { return };
    let mut config = Config::default();
    config.mooncake = Some(false);
    let here = Here::with(4096, config, &NodeOptions::default());
    assert_eq!(here.node.data_port(), None);
    let piece = Piece { local: 0, remote: here.buffer.addr(), len: 64 };
    for op in ["write", "read"] {
        assert!(!stock.moves(op, here.node.name(), &[piece]));
    }
    let error = here.node.open_mooncake(stock.name()).expect_err("nor does it begin");
    assert!(error.to_string().contains("MC_KVFERRY_MOONCAKE"), "{error}");
}

#[test]
fn a_probe_of_stock_is_answered() {
    let Some(mut stock) = Stock::start(4096, &[]) else { return };
    let here = Here::new(4096);
    let order = serde_json::json!({"do": "probe", "peer": here.node.name()});
    assert_eq!(stock.ask(&order), 0);
    assert_ne!(stock.ask(&serde_json::json!({"do": "probe", "peer": "127.0.0.1:1"})), 0);
}
