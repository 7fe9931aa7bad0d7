//! The transport conformance suite: two processes move bytes between their registered memory, the
//! receiver checks every byte and every guard, and ends of processes at any moment cost no more
//! than the batches of that peer. The same cases run on host memory, on the simulated GPU and,
//! with `--features cuda` or `rocm`, on a GPU; the numbers in comments are those of the project's
//! list of public failures.
//!
//! Contents and moments are random. Each case prints its seed, and `KVFERRY_TEST_SEED` repeats it.

mod cases;
#[allow(dead_code, reason = "what only other suites do")]
mod peer_process;

use std::sync::{PoisonError, RwLock};

use peer_process::{Kind, config};

/// What both processes set.
const KNOBS: &[(&str, &str)] = &[];

use rand::SeedableRng;
use rand::rngs::SmallRng;

/// Not a case: what a peer process runs.
#[test]
fn peer_process() {
    peer_process::serve();
}

/// One `#[test]` per case and device, so that no device loses a case. Cases of the second list
/// count what the process holds, so each of them runs while no other case does.
macro_rules! transport_conformance {
    (on { $( $(#[$when:meta])* $name:ident: $kind:expr; )* }
     together $together:tt alone $alone:tt) => {
        $( $(#[$when])* mod $name { transport_conformance!(@cases $kind, $together, $alone); } )*
    };
    (@cases $kind:expr, { $($together:ident)* }, { $($alone:ident)* }) => {
        $(#[test]
        fn $together() {
            let _others = super::ALONE.read();
            super::run($kind, crate::cases::$together);
        })*
        $(#[test]
        fn $alone() {
            let _alone = super::ALONE.write().unwrap_or_else(super::PoisonError::into_inner);
            super::run($kind, crate::cases::$alone);
        })*
    };
}

static ALONE: RwLock<()> = RwLock::new(());

transport_conformance! {
    on {
        host_memory: super::Kind::Host;
        simulated_gpu: super::Kind::Sim;
        #[cfg(feature = "cuda")]
        cuda_gpu: super::Kind::Cuda;
        #[cfg(feature = "rocm")]
        rocm_gpu: super::Kind::Rocm;
    }
    together {
        thousands_of_scattered_pages_arrive_whole_and_alone
        lengths_from_a_byte_to_three_mebibytes_at_odd_offsets_arrive
        more_pieces_than_the_ring_holds_arrive
        views_of_one_allocation_are_read_and_written_at_their_own_offsets
        small_allocations_that_may_share_a_block_are_told_apart
        memory_that_was_freed_and_allocated_again_is_never_read_stale
        a_peer_that_is_opened_again_maps_the_same_memory_again
        an_address_that_is_valid_in_both_processes_means_the_peers_memory
        idle_mappings_beyond_the_bound_close_and_open_again
        every_step_works_on_a_thread_of_its_own
        what_completed_stays_completed_when_the_peer_ends
        a_peer_that_restarts_under_its_name_is_told_from_the_old_one
        ranges_that_the_peer_did_not_register_are_refused_by_index
        a_long_list_whose_destinations_overlap_fails_by_a_range_that_does
        memory_that_the_peer_withdrew_is_refused
        both_processes_move_both_ways_at_the_same_time
        compact_forms_move_what_their_pieces_would
        one_batch_for_several_peers_reaches_each_whole
    }
    alone {
        threads_that_race_to_the_first_use_all_succeed
        mappings_and_descriptors_end_with_the_peer
        a_peer_killed_at_any_moment_ends_every_batch_and_leaves_nothing
        an_initiator_killed_while_it_writes_here_leaves_this_side_working
    }
}

// What host memory has not.
transport_conformance! {
    on {
        simulated_gpu_memory: super::Kind::Sim;
        #[cfg(feature = "cuda")]
        cuda_gpu_memory: super::Kind::Cuda;
        #[cfg(feature = "rocm")]
        rocm_gpu_memory: super::Kind::Rocm;
    }
    together {
        memory_of_several_chunks_arrives_whole_across_their_borders
        chunks_that_are_replaced_are_never_read_stale
        memory_that_cannot_be_shared_is_refused_at_registration_with_the_remedy
        a_gpu_reads_and_writes_host_memory_of_another_process
        host_and_gpu_memory_of_two_processes_are_copied_both_ways_whichever_end_is_which
        host_memory_without_a_gpu_and_a_gpu_there_are_refused_by_name
        host_memory_without_a_gpu_and_a_gpu_there_go_over_tcp_and_that_is_said_once
        a_peer_without_descriptors_says_so_and_serves_when_it_has_some
        an_opener_without_descriptors_says_so_and_opens_when_it_has_some
    }
    alone {
        a_transfer_waits_for_the_applications_stream
    }
}

// Host memory of any origin, beside a GPU or alone.
transport_conformance! {
    on {
        private_host_memory: super::Kind::Host;
        private_memory_beside_simulated_gpu: super::Kind::Sim;
        #[cfg(feature = "cuda")]
        private_memory_beside_cuda_gpu: super::Kind::Cuda;
        #[cfg(feature = "rocm")]
        private_memory_beside_rocm_gpu: super::Kind::Rocm;
    }
    together {
        ordinary_host_memory_of_another_process_is_reached_by_tcp_and_that_is_no_fallback
        ordinary_host_memory_here_is_copied_to_and_from_memory_that_is_mapped
    }
    alone {}
}

// The same, where a GPU would change nothing.
transport_conformance! {
    on { private_memory_alone: super::Kind::Host; }
    together {
        one_batch_reaches_memory_that_is_mapped_and_memory_that_cannot_be
        ordinary_host_memory_that_is_withdrawn_or_whose_owner_dies_ends_batches
    }
    alone {}
}

// What only an NVIDIA GPU has: a pool of AMD's cannot be told from a pointer.
#[cfg(feature = "cuda")]
transport_conformance! {
    on { cuda_gpu_pools: super::Kind::Cuda; }
    together {
        memory_of_a_pool_that_may_be_shared_arrives_whole
        memory_of_the_default_pool_is_refused_at_registration_with_the_remedy
    }
    alone {}
}

// What only a simulated GPU can be made to do.
transport_conformance! {
    on { simulated_gpu_faults: super::Kind::Sim; }
    together {
        memory_that_another_library_has_mapped_is_refused_by_name_until_it_lets_go
        a_batch_that_runs_when_its_peer_dies_fails_once_it_is_quiet
        nothing_is_complete_before_its_bytes_are_at_the_peer
        an_import_that_fails_at_any_chunk_leaves_nothing_and_can_be_tried_again
        one_allocation_is_one_mapping_though_every_export_of_it_differs
        memory_that_is_withdrawn_under_a_running_batch_is_kept_until_the_batch_ends
        allocations_that_are_first_used_at_the_same_time_share_one_proof
        devices_that_deliver_wrong_bytes_are_not_used_and_say_so_once
        memory_that_cannot_be_opened_though_the_device_is_reachable_is_refused_and_said_once
        a_peer_that_dies_while_devices_are_tried_out_is_lost_and_they_are_not_blamed
        what_keeps_devices_from_being_tried_out_does_not_count_against_them
        devices_that_do_not_work_together_go_over_tcp_and_that_is_said_once
        an_allocation_that_cannot_be_opened_goes_over_tcp_and_the_others_do_not
    }
    alone {}
}

fn run(kind: Kind, case: fn(Kind, &mut SmallRng)) {
    if kind.has_driver()
        && let Err(error) = kind.open(&config())
    {
        let name = if kind == Kind::Rocm { "rocm" } else { "cuda" };
        return kvferry_device::conformance::skip(name, &error);
    }
    let given = std::env::var("KVFERRY_TEST_SEED").ok();
    let seed = given.map_or_else(rand::random, |seed| seed.parse().expect("a number"));
    println!("KVFERRY_TEST_SEED={seed}");
    case(kind, &mut SmallRng::seed_from_u64(seed));
}
