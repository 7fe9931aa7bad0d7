//! Public failures of other engines as tests: the numbers are those of the project's list of
//! failure cases (B01 to B36). What needs a second process is in the workspace's
//! `tests/transport.rs`.

#[path = "../common/mod.rs"]
mod common;
mod devices;
mod ends;
mod host_memory;
mod lists;
mod mappings;
mod regions;
mod support;
