//! The page store, on host memory, on the simulated GPU and, with `--features cuda` or `rocm`, on a
//! GPU. Cases whose names begin with `b` and a number are those of the project's list of public
//! failures.

mod bench;
#[path = "../common/mod.rs"]
mod common;
mod failures;
mod limits;
mod model;
mod pages;
mod streams;

use kvferry_device::conformance::one_at_a_time;

use bench::Kind;
use pages::*;
use streams::*;

/// One `#[test]` per case and device.
macro_rules! on_devices {
    (@kinds { $($(#[$when:meta])* $name:ident: $kind:expr;)* } $cases:tt) => {
        $($(#[$when])* mod $name { on_devices!(@cases $kind, $cases); })*
    };
    (@cases $kind:expr, { $($case:ident)* }) => {
        $(#[test]
        fn $case() {
            let _alone = super::one_at_a_time();
            super::$case($kind);
        })*
    };
    (all $all:tt streams $streams:tt) => {
        on_devices!(@kinds {
            host_memory: super::Kind::Host;
            simulated_gpu: super::Kind::Sim;
            #[cfg(feature = "cuda")]
            cuda_gpu: super::Kind::Cuda;
            #[cfg(feature = "rocm")]
            rocm_gpu: super::Kind::Rocm;
        } $all);
        on_devices!(@kinds {
            simulated_streams: super::Kind::Sim;
            #[cfg(feature = "cuda")]
            cuda_streams: super::Kind::Cuda;
            #[cfg(feature = "rocm")]
            rocm_streams: super::Kind::Rocm;
        } $streams);
    };
}

on_devices! {
    all {
        pages_go_out_are_cleared_and_come_back_wherever_they_are_wanted
        shapes_of_every_kind_come_back_whole
        an_operation_begins_when_those_before_it_on_the_page_are_done
        what_is_wrong_is_refused_by_name_and_changes_nothing
        the_memory_of_a_group_is_free_with_its_last_page
        threads_page_out_clear_and_page_in_at_the_same_time
        peers_reach_the_stores_memory
        b52_every_page_size_comes_back_whole_from_pieces_of_its_own
    }
    streams {
        b21_a_page_out_waits_for_its_producer_and_stores_what_it_wrote
        a_stream_waits_for_a_page_in_and_the_host_does_not
        a_stream_waits_for_a_page_out_before_it_writes_the_page
        operations_beside_a_capture_leave_its_graph_valid
    }
}
