//! AMD GPUs through libamdhip64, which is opened at run time.

#![allow(dead_code, reason = "the driver that calls all of it is not here yet")]

mod compile;
#[cfg(test)]
mod fake;
mod functions;
mod identity;
mod library;
mod report;
mod search;

pub use self::library::DEFAULT_LIBRARY_DIRECTORY;
pub use self::report::{CompilerReport, LibraryReport, describe};
