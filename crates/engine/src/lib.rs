//! Policy of kvferry: knobs, registered memory, planning, batches and transports.
//!
//! Data flows one way: request (ranges and a target) -> registry (who owns these addresses) ->
//! plan (merge, split, bounds) -> transport -> device queue -> batch status. Start at [`Engine`].

mod again;
mod batch;
mod buffer;
pub mod calibrate;
mod config;
mod devices;
mod ended;
pub mod endpoint;
mod engine;
mod error;
mod lease;
mod mapping;
pub mod measure;
mod meters;
mod mostly_one;
mod pinned;
mod plan;
pub mod profile;
mod proof;
mod registry;
mod request;
mod segment;
mod statistics;
mod store;
mod target;
mod transport;
mod unknown_knob;
mod wait;
mod way;

pub use batch::{BatchId, BatchStatus, Path, State};
pub use buffer::Buffer;
pub use config::{
    Config, KNOBS, Knob, KnobError, NvtxLibrary, OverlapCheck, Policy, Setting, Source,
};
pub use devices::{BadDeviceName, DeviceName, open_device, visible_gpus};
pub use ended::{Fallback, Flow, Transport};
pub use engine::Engine;
pub use error::{Error, FormError, FormPage, FormPiece, RangeError, Result, Side};
pub use lease::Lease;
pub use meters::Served;
pub use pinned::{PinnedAccount, PinnedShare};
pub use plan::{FormPieces, Op, Paged, Pages, Range, Strided};
pub use profile::{HostLink, Profile, Tuning};
pub use proof::{Loan, Mismatch, Probe};
pub use request::{Copies, OffloadMode, Part, SubmitOptions, UnknownMode};
pub use segment::{
    AllocationKey, Exports, ExportsError, Identity, Segment, SegmentAllocation, SegmentRegion,
    Segments,
};
pub use statistics::{PathStatistics, Statistics};
pub use store::{
    PageBatch, PageKey, PageShape, PageStore, StoreError, StoreOptions, StoreStatistics, WhenFull,
};
pub use target::Target;
pub use transport::tcp::Listener;
pub use transport::{Choice, Reason};
pub use unknown_knob::UnknownKnob;
pub use way::Way;

/// The device layer: what an engine runs on.
pub use kvferry_device as device;
pub use kvferry_device::{Consumer, Producer};
pub use kvferry_wire::segment::SegmentRef;

/// The planner's inside, for the criterion benchmark alone.
#[doc(hidden)]
pub mod bench {
    pub use crate::plan::{
        CheckedForms, Form, Grid, Limits, Pieces, PlacedEnd, PlacedForm, Relocations, SHORTEST_RUN,
        Scratch, Strides, Want, Window, check_bounds, check_bounds_and_mark, check_form_bounds,
        check_form_overlaps, check_overlaps, find_strides,
    };
}
