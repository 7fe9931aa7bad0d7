//! The suite that every device passes.
//!
//! [`device_conformance!`](crate::device_conformance) makes one test a case, so that no backend
//! loses a case by forgetting it.

mod claims;
mod compact;
mod locked;
mod memory;
mod ordering;
mod pieces;
mod queues;
mod staged;

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::{CopyDescriptor, CopySource, Device, Memory, Queue, QueueOptions, Ticket, Work};

pub use claims::*;
pub use compact::*;
pub use locked::*;
pub use memory::*;
pub use ordering::*;
pub use pieces::*;
pub use queues::*;
pub use staged::*;

/// One `#[test]` per case for the device that `$open` opens.
///
/// `$open` is a function that returns `Option<Arc<dyn Device>>`; `None` skips, after it printed
/// why.
#[macro_export]
macro_rules! device_conformance {
    ($name:ident, $open:expr) => {
        mod $name {
            $crate::device_conformance!(@cases $open;
                memory_keeps_what_was_written
                an_allocation_is_found_from_any_address_inside_it
                a_new_allocation_never_has_the_number_of_an_old_one
                impossible_sizes_are_refused
                an_export_is_not_opened_by_the_process_that_made_it_or_is_the_same_memory
                a_stale_allocation_is_not_exported
                garbage_is_not_opened_as_an_export
                pieces_of_every_alignment_and_length_arrive_whole_and_alone
                many_more_pieces_than_the_ring_holds_arrive
                small_and_large_in_one_submission_both_arrive
                what_is_first_and_what_is_last_are_so
                staged_work_passes_two_buffers_whole
                staged_work_waits_for_what_uses_its_buffers
                pinned_memory_is_seen_by_the_processor_and_the_device
                copies_cross_the_pages_that_are_locked_alone
                copies_cross_from_locked_memory_into_its_neighbour
                an_empty_submission_completes
                every_submission_completes_and_stays_complete
                compact_copies_of_random_form_arrive_whole_and_alone
                compact_copies_of_real_caches_arrive_whole_and_alone
                compact_copies_that_name_the_same_page_lists_arrive
                compact_copies_of_pages_below_and_above_65536_arrive
                more_compact_copies_and_page_numbers_than_a_launch_takes_arrive
                a_compact_copy_of_nothing_completes
                complete_is_never_said_before_the_bytes_are_there
                a_source_that_stutters_is_read_to_its_end
                piece_counts_around_the_limits_of_a_grid_arrive
                mixed_sizes_beyond_the_limits_of_batch_calls_arrive_time_and_again
                offsets_beyond_four_gibibytes_are_exact
                every_method_works_on_a_thread_that_never_touched_the_device
                two_queues_work_at_the_same_time
                a_dropped_queue_leaves_its_copies_done
                a_list_that_panics_costs_later_submissions_no_piece
                a_device_finds_the_piece_whose_destination_overlaps_another
                a_verdict_is_kept_until_it_is_given_back_and_is_missing_where_no_table_is_free
                destinations_that_no_table_holds_are_copied_without_a_verdict
            );
        }
    };
    (@cases $open:expr; $($case:ident)*) => {
        $(#[test]
        fn $case() {
            if let Some(device) = $open() {
                $crate::conformance::$case(device);
            }
        })*
    };
}

/// Says on standard error that what needs `name` is skipped, past the test harness.
///
/// # Panics
/// If `KVFERRY_TEST_REQUIRE`, a list separated by commas, holds `name`.
pub fn skip(name: &str, reason: &dyn std::fmt::Display) {
    let required = std::env::var("KVFERRY_TEST_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|word| word.trim() == name), "{name} is required: {reason}");
    // Not eprintln!, which the harness swallows when the test passes.
    let _ = writeln!(std::io::stderr(), "SKIP {name}: {reason}");
}

const GUARD: u8 = 0xA5;

/// A queue with a small ring, so that cases reach its limits quickly.
fn queue(device: &Arc<dyn Device>) -> Box<dyn Queue> {
    let options = QueueOptions { ring_slots: 4, slot_descriptors: 64, ..QueueOptions::default() };
    Arc::clone(device).queue(&options).expect("a queue")
}

fn finish(queue: &mut dyn Queue, ticket: Ticket) {
    let completions = queue.completions();
    eventually("a submission completes", || {
        queue.check().expect("the device works");
        completions.done(ticket)
    });
}

/// Polls until it holds.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(60), "it never came to this: {what}");
        std::thread::yield_now();
    }
}

fn allocate(device: &Arc<dyn Device>, bytes: u64) -> Memory {
    Arc::clone(device).allocate(bytes).expect("memory")
}

fn write(device: &Arc<dyn Device>, addr: u64, bytes: &[u8]) {
    // SAFETY: every case writes only inside memory that it allocated and that no copy uses then.
    unsafe { device.write(addr, bytes) }.expect("writes");
}

fn read(device: &Arc<dyn Device>, addr: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    // SAFETY: every case reads only inside memory that it allocated, after its copies completed.
    unsafe { device.read(addr, &mut bytes) }.expect("reads");
    bytes
}

fn submit(queue: &mut dyn Queue, pieces: &mut dyn CopySource, large: &[CopyDescriptor]) -> Ticket {
    submit_work(queue, &mut Work { large, ..Work::pieces(pieces) })
}

fn submit_work(queue: &mut dyn Queue, work: &mut Work<'_>) -> Ticket {
    // SAFETY: every case keeps the memory until the submission completes, and builds lists
    // without overlaps.
    unsafe { queue.submit(work) }.expect("submits")
}

/// Bytes that differ from their neighbours near and far.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64)
        .map(|at| ((at + seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33) as u8)
        .collect()
}
