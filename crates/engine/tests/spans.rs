//! Batches as a trace has them. In a binary of its own: tracing decides at the first sight of a span,
//! and for all threads, whether anybody wants it.

mod common;

use std::sync::Arc;
use std::time::Duration;

use kvferry_engine::{Config, Engine, Op, Range};
use tracing_subscriber::fmt::format::FmtSpan;

use common::NoExports;
use common::log::Lines;

const LONG: Duration = Duration::from_secs(60);

/// The lines of a subscriber that wants batches' spans, one when each ends.
fn spans(what: impl FnOnce()) -> Vec<String> {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter("kvferry::batch=debug")
        .with_span_events(FmtSpan::CLOSE)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, what);
    lines.read()
}

#[test]
fn a_batch_is_a_span_that_ends_with_it_and_says_what_moved_how_and_with_which_result() {
    let lines = spans(|| {
        let device = kvferry_device::host().expect("always there");
        let engine = Engine::new(Config::default(), vec![device]).expect("an engine");
        let memory = engine.allocate(&engine.devices()[0], 1 << 20).expect("memory");
        let target = engine.open("decode", engine.segment(), Arc::new(NoExports)).expect("opens");
        let range = |at, len| Range {
            local: memory.addr() + at,
            remote: memory.addr() + (1 << 19) + at,
            len,
        };
        let ranges = [range(0, 100), range(1000, 28)];
        let id = engine.submit(&target, Op::Read, &ranges).expect("submits");
        engine.wait(id, LONG).expect("known");
        let id = engine.submit(&target, Op::Write, &ranges).expect("submits");
        target.lose("pulled the plug");
        engine.wait(id, LONG).expect("known");
    });
    let [good, bad] = &lines[..] else { panic!("{lines:#?}") };
    for field in [
        "peer.service=\"decode\"",
        "kvferry.transport=\"peer\"",
        "kvferry.direction=\"read\"",
        "kvferry.path=\"memcpy\"",
        "kvferry.pieces=2",
        "kvferry.bytes=128",
        "otel.kind=\"client\"",
        "otel.status_code=\"OK\"",
        "close",
    ] {
        assert!(good.contains(field), "{field} is not in {good}");
    }
    for field in ["otel.status_code=\"ERROR\"", "error.type=\"peer_lost\"", "pulled the plug"] {
        assert!(bad.contains(field), "{field} is not in {bad}");
    }
}
