//! What is known of a batch when it is submitted and when it ends: the one place that statistics,
//! metrics and spans are told from, so that they tell the same.

use std::ffi::CString;
use std::fmt::{self, Display};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_device::nvtx::{Nvtx, NvtxRange};
use tracing::Span;
use tracing::field::{Empty, display};

use crate::batch::Path;
use crate::error::Error;
use crate::plan::Op;
use crate::request::Part;

/// Which transport moves a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Nothing had to move.
    None,
    /// A device of this process, into or out of memory that it has mapped.
    Peer,
    /// The same, between a GPU and host memory.
    Offload,
    /// Lanes to a peer.
    Tcp,
    /// Some of its targets by lanes and some not.
    Mixed,
    /// Mooncake's own framing, by a node's peer.
    Mooncake,
}

impl Transport {
    pub(crate) const ALL: [Self; 6] =
        [Self::None, Self::Peer, Self::Offload, Self::Tcp, Self::Mixed, Self::Mooncake];

    /// As labels spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Peer => "peer",
            Self::Offload => "offload",
            Self::Tcp => "tcp",
            Self::Mixed => "mixed",
            Self::Mooncake => "mooncake",
        }
    }
}

impl Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which way the bytes of a batch go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// To the targets.
    Write,
    /// From the targets.
    Read,
    /// Of some parts to, and of some from them.
    Both,
}

impl Flow {
    pub(crate) const ALL: [Self; 3] = [Self::Write, Self::Read, Self::Both];

    /// Of parts that have bytes to move.
    pub(crate) fn of(parts: &[Part<'_>]) -> Self {
        let mut ops = parts.iter().filter(|part| !part.copies.are_empty()).map(|part| part.op);
        match ops.next() {
            Some(first) if ops.any(|op| op != first) => Self::Both,
            Some(op) => op.into(),
            None => Self::Write,
        }
    }

    /// As labels spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
            Self::Both => "both",
        }
    }
}

impl From<Op> for Flow {
    fn from(op: Op) -> Self {
        match op {
            Op::Write => Self::Write,
            Op::Read => Self::Read,
        }
    }
}

impl Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a batch went a slower way than it could have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// The device has no copy kernel.
    NoKernel,
    /// There was no device memory to stage host offload in.
    NoBounce,
    /// GPU memory went over TCP piece by piece: staging is off, its slots were taken, or there is
    /// no copy kernel to fill them.
    NotStaged,
    /// Memory of this host went over TCP, because no mapping reaches it: no peer access, a pair of
    /// devices that did not prove itself, or a peer that hands out no exports.
    NotMapped,
}

impl Fallback {
    pub(crate) const ALL: [Self; 4] =
        [Self::NoKernel, Self::NoBounce, Self::NotStaged, Self::NotMapped];

    /// As labels spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoKernel => "no_copy_kernel",
            Self::NoBounce => "no_device_memory",
            Self::NotStaged => "not_staged",
            Self::NotMapped => "not_mapped",
        }
    }
}

impl Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What is known of a batch once it runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) transport: Transport,
    pub(crate) flow: Flow,
    /// Pieces that the caller named: ranges, or the pieces that forms stand for.
    pub(crate) pieces: u64,
    /// When the call that submitted it began.
    pub(crate) submitted: Instant,
    pub(crate) fallback: Option<Fallback>,
}

/// A batch that ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended<'a> {
    pub(crate) facts: Facts,
    pub(crate) path: Path,
    /// Of all its pieces, whether or not they arrived.
    pub(crate) bytes: u64,
    /// From the submission until the end was seen.
    pub(crate) time: Duration,
    pub(crate) failure: Option<&'a Error>,
}

impl Facts {
    pub(crate) fn new(parts: &[Part<'_>], submitted: Instant, transport: Transport) -> Self {
        let counts = parts.iter().map(|part| part.copies.count());
        let pieces = counts.fold(0, u64::saturating_add);
        Self { transport, flow: Flow::of(parts), pieces, submitted, fallback: None }
    }

    /// The span of the batch, from its submission to its end, in the names that OpenTelemetry has for
    /// what it has names for. It costs next to nothing as long as no subscriber wants it.
    pub(crate) fn span(&self, parts: &[Part<'_>], bytes: u64) -> Span {
        let span = tracing::debug_span!(
            target: "kvferry::batch",
            "batch",
            "otel.kind" = "client",
            "otel.status_code" = Empty,
            "otel.status_description" = Empty,
            "error.type" = Empty,
            "peer.service" = Empty,
            "kvferry.transport" = self.transport.name(),
            "kvferry.direction" = self.flow.name(),
            "kvferry.path" = Empty,
            "kvferry.pieces" = self.pieces,
            "kvferry.bytes" = bytes,
            "kvferry.fallback" = Empty,
        );
        if !span.is_disabled() {
            let mut targets: Vec<_> = parts.iter().map(|part| part.target.name()).collect();
            targets.dedup();
            span.record("peer.service", targets.join(","));
        }
        span
    }

    /// The batch on the time line of NVIDIA's tools, from now to its end.
    pub(crate) fn range(&self, nvtx: &Arc<Nvtx>, bytes: u64) -> NvtxRange {
        let Self { transport, flow, pieces, .. } = self;
        let name = format!("kvferry {flow} by {transport}: {pieces} pieces, {bytes} bytes");
        // There is no zero in it.
        nvtx.range(&CString::new(name).unwrap_or_default())
    }
}

impl Ended<'_> {
    /// Writes the end into the batch's span.
    pub(crate) fn record(&self, span: &Span) {
        if span.is_disabled() {
            return;
        }
        // Both may change while it runs.
        span.record("kvferry.path", self.path.name());
        span.record("kvferry.fallback", self.facts.fallback.map(Fallback::name));
        match self.failure {
            None => span.record("otel.status_code", "OK"),
            Some(error) => span
                .record("otel.status_code", "ERROR")
                .record("error.type", error.kind())
                .record("otel.status_description", display(error)),
        };
    }
}
