//! Counters and histograms of the `metrics` facade, per transport, path, direction and size of
//! batch. docs/metrics.md lists them.
//!
//! A handle is made when its series is first counted and kept by the engine, so that a batch costs a
//! few additions. The recorder that is installed at that moment is the one that gets it: a program
//! installs its recorder before it makes an engine.

use std::sync::OnceLock;

use metrics::{Counter, Histogram, Unit};

use crate::batch::Path;
use crate::ended::{Ended, Fallback, Flow, Transport};
use crate::error::Error;

/// The series of one engine.
#[derive(Debug)]
pub(crate) struct Meters {
    /// By transport, path, flow and size, in this order.
    series: Box<[OnceLock<Box<Series>>]>,
    fallbacks: [OnceLock<Counter>; Fallback::ALL.len()],
}

/// Batches that are alike.
struct Series {
    batches: Counter,
    pieces: Counter,
    bytes: Counter,
    seconds: Histogram,
}

impl std::fmt::Debug for Series {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Series").finish_non_exhaustive()
    }
}

/// Sizes of batches: the bytes below which a batch is of that size, and its label.
const SIZES: [(u64, &str); 6] = [
    (64 << 10, "under_64K"),
    (1 << 20, "64K_to_1M"),
    (16 << 20, "1M_to_16M"),
    (256 << 20, "16M_to_256M"),
    (4 << 30, "256M_to_4G"),
    (u64::MAX, "4G_and_more"),
];

impl Meters {
    pub(crate) fn new() -> Self {
        describe();
        let count = Transport::ALL.len() * Path::ALL.len() * Flow::ALL.len() * SIZES.len();
        Self {
            series: (0..count).map(|_| OnceLock::new()).collect(),
            fallbacks: Default::default(),
        }
    }

    /// Counts a batch: its bytes and its time if all of it arrived, else why not.
    pub(crate) fn ended(&self, ended: &Ended<'_>) {
        let facts = &ended.facts;
        if let Some(fallback) = facts.fallback {
            let count =
                || metrics::counter!("kvferry_fallbacks_total", "reason" => fallback.name());
            self.fallbacks[fallback as usize].get_or_init(count).increment(1);
        }
        if let Some(error) = ended.failure {
            let (transport, flow) = (facts.transport.name(), facts.flow.name());
            return failed(transport, flow, error);
        }
        let size = SIZES.partition_point(|&(limit, _)| limit <= ended.bytes).min(SIZES.len() - 1);
        let (transport, path, flow) = (facts.transport, ended.path, facts.flow);
        let at = (transport as usize * Path::ALL.len() + path as usize) * Flow::ALL.len();
        let at = (at + flow as usize) * SIZES.len() + size;
        let series =
            self.series[at].get_or_init(|| Series::new(transport, path, flow, SIZES[size].1));
        series.batches.increment(1);
        series.pieces.increment(facts.pieces);
        series.bytes.increment(ended.bytes);
        series.seconds.record(ended.time);
    }

    /// Counts a submission that was refused: nothing moved.
    pub(crate) fn refused(&self, error: &Error) {
        failed("none", "none", error);
    }
}

/// Failures are rare: their handles are looked up each time.
fn failed(transport: &'static str, direction: &'static str, error: &Error) {
    let labels = [("transport", transport), ("direction", direction), ("kind", error.kind())];
    metrics::counter!("kvferry_failures_total", &labels).increment(1);
}

impl Series {
    fn new(transport: Transport, path: Path, flow: Flow, size: &'static str) -> Box<Self> {
        let labels = [
            ("transport", transport.name()),
            ("path", path.name()),
            ("direction", flow.name()),
            ("size", size),
        ];
        Box::new(Self {
            batches: metrics::counter!("kvferry_batches_total", &labels),
            pieces: metrics::counter!("kvferry_pieces_total", &labels),
            bytes: metrics::counter!("kvferry_bytes_total", &labels),
            seconds: metrics::histogram!("kvferry_batch_seconds", &labels),
        })
    }
}

/// Tells the recorder names, units and meanings.
fn describe() {
    use metrics::{describe_counter as counter, describe_histogram as histogram};
    counter!("kvferry_batches_total", Unit::Count, "Batches of which every byte landed");
    counter!(
        "kvferry_pieces_total",
        Unit::Count,
        "Pieces of these batches, as they were submitted"
    );
    counter!("kvferry_bytes_total", Unit::Bytes, "Bytes of these batches");
    histogram!(
        "kvferry_batch_seconds",
        Unit::Seconds,
        "Time of these batches, from the submission until the end was seen"
    );
    counter!("kvferry_failures_total", Unit::Count, "Batches that failed or were refused");
    counter!("kvferry_fallbacks_total", Unit::Count, "Batches that went a slower way");
}
