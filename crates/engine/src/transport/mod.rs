//! Ways to move a batch. Each takes checked ranges and returns what the batch waits for.

mod fences;
mod lane;
mod load;
mod offload;
mod overlaps;
pub(crate) mod peer;
pub(crate) mod place;
mod route;
mod staging;
pub(crate) mod tcp;
mod watcher;

pub(crate) use fences::Behind;
pub(crate) use lane::Lane;
pub(crate) use offload::Paced;
pub use offload::{Choice, Reason};
pub(crate) use route::Route;
