//! AMD GPUs through libamdhip64, which is opened at run time.

#![allow(dead_code, reason = "the driver that calls all of it is not here yet")]

mod functions;
mod identity;
mod library;
mod search;
