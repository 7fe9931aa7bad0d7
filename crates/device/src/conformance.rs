//! The suite that every device passes.
//!
//! [`device_conformance!`](crate::device_conformance) makes one test a case, so that no backend
//! loses a case by forgetting it.

mod compact;
mod ordering;
mod staged;

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::{
    CopyDescriptor, CopySource, Device, Error, Export, Memory, Queue, QueueOptions, SliceSource,
    Ticket, Vendor, Work,
};

pub use compact::*;
pub use ordering::*;
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
                an_empty_submission_completes
                every_submission_completes_and_stays_complete
                compact_copies_of_random_form_arrive_whole_and_alone
                compact_copies_of_real_caches_arrive_whole_and_alone
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

/// Copies `list` (offsets into two buffers), then checks every byte of the destination.
fn copy_and_check(device: &Arc<dyn Device>, list: &[CopyDescriptor], large: &[CopyDescriptor]) {
    let end = |of: fn(&CopyDescriptor) -> u64| {
        list.iter().chain(large).map(|copy| of(copy) + copy.len).max().unwrap_or(0)
    };
    let (source_len, destination_len) =
        (end(|copy| copy.src) as usize + 64, end(|copy| copy.dst) as usize + 64);
    let (source, destination) =
        (allocate(device, source_len as u64), allocate(device, destination_len as u64));
    let bytes = pattern(source_len, 7);
    write(device, source.addr(), &bytes);
    write(device, destination.addr(), &vec![GUARD; destination_len]);
    let placed = |copy: &CopyDescriptor| CopyDescriptor {
        src: source.addr() + copy.src,
        dst: destination.addr() + copy.dst,
        len: copy.len,
    };
    let mut queue = queue(device);
    let small: Vec<_> = list.iter().map(placed).collect();
    let large_placed: Vec<_> = large.iter().map(placed).collect();
    let ticket = submit(&mut *queue, &mut SliceSource(&small), &large_placed);
    finish(&mut *queue, ticket);
    let mut expected = vec![GUARD; destination_len];
    for copy in list.iter().chain(large) {
        let (src, dst, len) = (copy.src as usize, copy.dst as usize, copy.len as usize);
        expected[dst..dst + len].copy_from_slice(&bytes[src..src + len]);
    }
    let found = read(device, destination.addr(), destination_len);
    if let Some(at) = (0..destination_len).find(|&at| found[at] != expected[at]) {
        panic!("byte {at}: expected {:#04x}, found {:#04x}", expected[at], found[at]);
    }
}

/// Pieces of the given lengths, scattered with gaps, sources in reverse order.
fn scattered(lengths: impl Iterator<Item = u64> + Clone, align: u64) -> Vec<CopyDescriptor> {
    let round = |len: u64| (len + 1).next_multiple_of(align);
    let total: u64 = lengths.clone().map(round).sum();
    let mut at = 0;
    lengths
        .map(|len| {
            let dst = at;
            at += round(len);
            CopyDescriptor { src: total - at, dst, len }
        })
        .collect()
}

#[doc(hidden)]
pub fn memory_keeps_what_was_written(device: Arc<dyn Device>) {
    let memory = allocate(&device, 100_003);
    let bytes = pattern(100_003, 1);
    write(&device, memory.addr(), &bytes);
    assert!(memory.addr().is_multiple_of(256));
    assert_eq!(read(&device, memory.addr(), 100_003), bytes);
    write(&device, memory.addr() + 7, &[1, 2, 3]);
    assert_eq!(read(&device, memory.addr() + 6, 5), [bytes[6], 1, 2, 3, bytes[10]]);
}

#[doc(hidden)]
pub fn an_allocation_is_found_from_any_address_inside_it(device: Arc<dyn Device>) {
    let memory = allocate(&device, 4 << 20);
    let whole = device.allocation(memory.addr()).expect("found");
    assert_eq!(whole.base, memory.addr());
    assert!(whole.len >= memory.len());
    for offset in [1, 63, 4096, (4 << 20) - 1] {
        assert_eq!(device.allocation(memory.addr() + offset), Ok(whole), "offset {offset}");
    }
    for stranger in [0, 8, u64::MAX] {
        assert!(
            matches!(device.allocation(stranger), Err(Error::UnknownAddress { .. })),
            "{stranger:#x}"
        );
    }
}

#[doc(hidden)]
pub fn a_new_allocation_never_has_the_number_of_an_old_one(device: Arc<dyn Device>) {
    let mut seen = std::collections::HashSet::new();
    for round in 0..20u64 {
        let memory = allocate(&device, (round % 3 + 1) << 20);
        let id = device.allocation(memory.addr()).expect("found").id;
        assert!(seen.insert(id), "round {round}: number {id} came again");
    }
}

#[doc(hidden)]
pub fn impossible_sizes_are_refused(device: Arc<dyn Device>) {
    for bytes in [0, u64::MAX, 1 << 63] {
        let refused = Arc::clone(&device).allocate(bytes).map(|_| ());
        assert!(matches!(refused, Err(Error::BadSize { .. })), "{bytes}: {refused:?}");
    }
    let refused = Arc::clone(&device).allocate(1 << 60).map(|_| ());
    assert!(matches!(refused, Err(Error::OutOfMemory { .. } | Error::Call { .. })), "{refused:?}");
    // And the device still works.
    memory_keeps_what_was_written(device);
}

#[doc(hidden)]
pub fn an_export_is_not_opened_by_the_process_that_made_it_or_is_the_same_memory(
    device: Arc<dyn Device>,
) {
    let memory = allocate(&device, 1 << 20);
    write(&device, memory.addr(), &pattern(1000, 3));
    let allocation = device.allocation(memory.addr()).expect("found");
    let export = device.export(&allocation).expect("exports");
    assert_eq!(export.len(), allocation.len);
    match Arc::clone(&device).open(export) {
        Err(Error::SameProcess { .. }) => {}
        Ok(mapping) => assert_eq!(read(&device, mapping.addr(), 1000), pattern(1000, 3)),
        Err(error) => panic!("{error}"),
    }
}

#[doc(hidden)]
pub fn a_stale_allocation_is_not_exported(device: Arc<dyn Device>) {
    let memory = allocate(&device, 1 << 20);
    let stale = device.allocation(memory.addr()).expect("found");
    drop(memory);
    assert!(device.export(&stale).is_err());
    let again = allocate(&device, 1 << 20);
    if device.allocation(again.addr()).is_ok_and(|now| now.base == stale.base) {
        assert!(device.export(&stale).is_err(), "an old allocation was exported as a new one");
    }
}

#[doc(hidden)]
pub fn garbage_is_not_opened_as_an_export(device: Arc<dyn Device>) {
    for bytes in [vec![], vec![0; 1], vec![0xff; 64], vec![0; 80], vec![7; 4096]] {
        let opened = Arc::clone(&device).open(Export::Handle { bytes, len: 4096 }).map(|_| ());
        assert!(matches!(opened, Err(Error::BadExport { .. } | Error::Call { .. })), "{opened:?}");
    }
    let file = std::fs::File::open("/dev/null").expect("always there");
    assert!(Arc::clone(&device).open(Export::File { fd: file.into(), len: 1 << 20 }).is_err());
    let file = std::fs::File::open("/dev/null").expect("always there");
    assert!(Arc::clone(&device).open(Export::File { fd: file.into(), len: 0 }).is_err());
    memory_keeps_what_was_written(device);
}

#[doc(hidden)]
pub fn pieces_of_every_alignment_and_length_arrive_whole_and_alone(device: Arc<dyn Device>) {
    // FAILURES.md B24: lengths 1 to 300 and the odd rows of real caches, all 256 offset pairs.
    let lengths = (1..=300).chain([132, 576, 584, 656, 1056, 1152, 2112, 4097, 8448, 16_384 + 5]);
    let mut list = Vec::new();
    let (mut src, mut dst) = (0u64, 0u64);
    for (at, len) in lengths.enumerate() {
        for pair in (0..256).skip(at % 16).step_by(16) {
            src = src.next_multiple_of(16) + 16 + pair / 16;
            dst = dst.next_multiple_of(16) + 16 + pair % 16;
            list.push(CopyDescriptor { src, dst, len });
            src += len;
            dst += len;
        }
    }
    copy_and_check(&device, &list, &[]);
}

#[doc(hidden)]
pub fn many_more_pieces_than_the_ring_holds_arrive(device: Arc<dyn Device>) {
    // Four slots of 64: this goes around the ring ten times and ends inside a slot.
    copy_and_check(&device, &scattered((0..2571).map(|at| at % 700 + 1), 64), &[]);
}

#[doc(hidden)]
pub fn small_and_large_in_one_submission_both_arrive(device: Arc<dyn Device>) {
    let small = scattered((0..100).map(|_| 2112), 64);
    let end = small.iter().map(|copy| copy.dst + copy.len).max().unwrap_or(0).next_multiple_of(256);
    let large: Vec<_> = (0..9)
        .map(|at| {
            let offset = end + at * (1 << 20);
            CopyDescriptor { src: offset + 3, dst: offset, len: (1 << 20) - 11 }
        })
        .collect();
    copy_and_check(&device, &small, &large);
    copy_and_check(&device, &[], &large);
}

#[doc(hidden)]
pub fn an_empty_submission_completes(device: Arc<dyn Device>) {
    let mut queue = queue(&device);
    assert_eq!(queue.check(), Ok(()));
    let ticket = submit(&mut *queue, &mut SliceSource(&[]), &[]);
    finish(&mut *queue, ticket);
    let zero = CopyDescriptor { src: 0, dst: 0, len: 0 };
    let ticket = submit(&mut *queue, &mut SliceSource(&[zero; 3]), &[]);
    finish(&mut *queue, ticket);
}

#[doc(hidden)]
pub fn every_submission_completes_and_stays_complete(device: Arc<dyn Device>) {
    let memory = allocate(&device, 2 << 20);
    let mut queue = queue(&device);
    let copies = |count: u64| -> Vec<_> {
        (0..count)
            .map(|at| CopyDescriptor {
                src: memory.addr() + at * 64,
                dst: memory.addr() + (1 << 20) + at * 64,
                len: 64,
            })
            .collect()
    };
    // More than there are completion words, so that every word has been used before.
    let mut tickets = Vec::new();
    for round in 0..5000 {
        let count = [1000, 1, 0, 3000, 2].get(round).copied().unwrap_or(1);
        tickets.push(submit(&mut *queue, &mut SliceSource(&copies(count)), &[]));
    }
    for ticket in &tickets {
        finish(&mut *queue, *ticket);
    }
    let completions = queue.completions();
    assert!(tickets.iter().all(|ticket| completions.done(*ticket)));
    drop(queue);
    assert!(tickets.iter().all(|ticket| completions.done(*ticket)), "the words outlive the queue");
}

#[doc(hidden)]
pub fn complete_is_never_said_before_the_bytes_are_there(device: Arc<dyn Device>) {
    // FAILURES.md B19: a long copy in front, small ones behind it, read back by another path.
    const BIG: u64 = 64 << 20;
    let (source, destination) = (allocate(&device, BIG), allocate(&device, BIG));
    let mut queue = queue(&device);
    for round in 0..10u64 {
        let bytes = pattern(64, round);
        write(&device, source.addr() + BIG - 64, &bytes);
        let all = CopyDescriptor { src: source.addr(), dst: destination.addr(), len: BIG };
        let ticket = submit(&mut *queue, &mut SliceSource(&[]), &[all]);
        finish(&mut *queue, ticket);
        assert_eq!(read(&device, destination.addr() + BIG - 64, 64), bytes, "round {round}");
    }
}

#[doc(hidden)]
pub fn a_source_that_stutters_is_read_to_its_end(device: Arc<dyn Device>) {
    /// One descriptor a call.
    struct Stutter<'a>(SliceSource<'a>);
    impl CopySource for Stutter<'_> {
        fn fill(&mut self, slot: &mut [CopyDescriptor]) -> usize {
            self.0.fill(&mut slot[..1])
        }
    }
    let memory = allocate(&device, 1 << 20);
    write(&device, memory.addr(), &pattern(1 << 20, 5));
    let list: Vec<_> = (0..150u64)
        .map(|at| CopyDescriptor {
            src: memory.addr() + at * 100,
            dst: memory.addr() + (1 << 19) + at * 100,
            len: 100,
        })
        .collect();
    let mut queue = queue(&device);
    let ticket = submit(&mut *queue, &mut Stutter(SliceSource(&list)), &[]);
    finish(&mut *queue, ticket);
    assert_eq!(read(&device, memory.addr() + (1 << 19), 15_000), pattern(1 << 20, 5)[..15_000]);
}

#[doc(hidden)]
pub fn piece_counts_around_the_limits_of_a_grid_arrive(device: Arc<dyn Device>) {
    // FAILURES.md B27: more pieces than any grid dimension, bounded grid and ring.
    for count in [1u64, 159, 160, 161, 162, 65_535, 65_536, 65_537, 200_000] {
        let bytes = count * 64;
        let (source, destination) = (allocate(&device, bytes), allocate(&device, bytes));
        let data = pattern(bytes as usize, count);
        write(&device, source.addr(), &data);
        let mut next = 0;
        /// Back to front, so that no two neighbours could be merged.
        struct Backwards<'a> {
            next: &'a mut u64,
            count: u64,
            src: u64,
            dst: u64,
        }
        impl CopySource for Backwards<'_> {
            fn fill(&mut self, slot: &mut [CopyDescriptor]) -> usize {
                let now = (slot.len() as u64).min(self.count - *self.next) as usize;
                for place in &mut slot[..now] {
                    let offset = (self.count - 1 - *self.next) * 64;
                    *place =
                        CopyDescriptor { src: self.src + offset, dst: self.dst + offset, len: 64 };
                    *self.next += 1;
                }
                now
            }
        }
        let mut queue = Arc::clone(&device).queue(&QueueOptions::default()).expect("a queue");
        let mut pieces =
            Backwards { next: &mut next, count, src: source.addr(), dst: destination.addr() };
        let ticket = submit(&mut *queue, &mut pieces, &[]);
        finish(&mut *queue, ticket);
        assert!(read(&device, destination.addr(), bytes as usize) == data, "{count} pieces");
    }
}

#[doc(hidden)]
pub fn mixed_sizes_beyond_the_limits_of_batch_calls_arrive_time_and_again(device: Arc<dyn Device>) {
    // FAILURES.md B28: lists of host memory that crash or hang a vendor's batch call, some at once
    // and some when repeated.
    let (rounds, long_rounds) = match device.info().vendor {
        Vendor::Cuda | Vendor::Rocm => (200, 20),
        Vendor::Host | Vendor::Sim => (4, 2),
    };
    const LONGEST: u64 = 3 << 10;
    let bytes = pattern(1 << 20, 11);
    let host = crate::host().expect("host memory is always there");
    let memory = allocate(&host, bytes.len() as u64);
    write(&host, memory.addr(), &bytes);
    let locked = Arc::clone(&device).map_host(memory.addr(), memory.len());
    let source = locked.expect("page-locked");
    let mut queue = Arc::clone(&device).queue(&QueueOptions::default()).expect("a queue");
    for (count, rounds) in
        [(4096, rounds), (4097, rounds), (8192, rounds), (8193, rounds), (51_828, long_rounds)]
    {
        // Every length in turn, in no order; one byte between two destinations stays as it was.
        let lengths = (0..count).map(|at| at * 1187 % LONGEST + 1);
        let total: u64 = lengths.clone().map(|len| len + 1).sum();
        let destination = allocate(&device, total);
        write(&device, destination.addr(), &vec![GUARD; total as usize]);
        for round in 0..rounds {
            // Of other bytes than in the round before, so that old ones are wrong.
            let from = |at: u64| (at * 8191 + round * 13) % (bytes.len() as u64 - LONGEST);
            let mut end = 0;
            let list: Vec<_> = (0..count)
                .zip(lengths.clone())
                .map(|(at, len)| {
                    let dst = destination.addr() + end;
                    end += len + 1;
                    CopyDescriptor { src: source.addr() + from(at), dst, len }
                })
                .collect();
            let ticket = submit(&mut *queue, &mut SliceSource(&list), &[]);
            finish(&mut *queue, ticket);
            let found = read(&device, destination.addr(), total as usize);
            for (at, copy) in (0..count).zip(&list) {
                let (src, len) = (from(at) as usize, copy.len as usize);
                let (piece, rest) = found[(copy.dst - destination.addr()) as usize..].split_at(len);
                let arrived = *piece == bytes[src..src + len] && rest[0] == GUARD;
                assert!(arrived, "piece {at} of {count}, {len} bytes, round {round}");
            }
        }
    }
    drop(queue);
    drop(source);
}

#[doc(hidden)]
pub fn offsets_beyond_four_gibibytes_are_exact(device: Arc<dyn Device>) {
    // FAILURES.md B26: pages at the blocks around 2^31 and 2^32 of a real cache; only they are
    // touched, so host memory stays sparse.
    const STRIDE: u64 = 1_002_240;
    const PAGE: u64 = 8448;
    let memory = allocate(&device, 4300 * STRIDE);
    let packed = allocate(&device, 4 * PAGE);
    let list: Vec<_> = [2142u64, 2143, 4285, 4286]
        .iter()
        .enumerate()
        .map(|(at, block)| {
            write(&device, memory.addr() + block * STRIDE, &pattern(PAGE as usize, *block));
            CopyDescriptor {
                src: memory.addr() + block * STRIDE,
                dst: packed.addr() + at as u64 * PAGE,
                len: PAGE,
            }
        })
        .collect();
    let mut queue = queue(&device);
    let ticket = submit(&mut *queue, &mut SliceSource(&list), &[]);
    finish(&mut *queue, ticket);
    for (at, block) in [2142u64, 2143, 4285, 4286].into_iter().enumerate() {
        assert_eq!(
            read(&device, packed.addr() + at as u64 * PAGE, PAGE as usize),
            pattern(PAGE as usize, block),
            "block {block}"
        );
    }
}

#[doc(hidden)]
pub fn every_method_works_on_a_thread_that_never_touched_the_device(device: Arc<dyn Device>) {
    // FAILURES.md B10, B14: contexts and devices are per thread.
    let fresh = |work: &(dyn Fn() + Sync)| {
        std::thread::scope(|scope| scope.spawn(work).join()).expect("works on a fresh thread")
    };
    fresh(&|| memory_keeps_what_was_written(Arc::clone(&device)));
    fresh(&|| an_allocation_is_found_from_any_address_inside_it(Arc::clone(&device)));
    fresh(&|| copy_and_check(&device, &scattered((0..100).map(|_| 100), 64), &[]));
    // Made here, used there, dropped elsewhere.
    let memory = allocate(&device, 4096);
    let mut queue = queue(&device);
    let copy = CopyDescriptor { src: memory.addr(), dst: memory.addr() + 2048, len: 1024 };
    let queue = std::thread::scope(|scope| {
        scope
            .spawn(move || {
                let ticket = submit(&mut *queue, &mut SliceSource(&[copy]), &[]);
                finish(&mut *queue, ticket);
                queue
            })
            .join()
    })
    .expect("works");
    std::thread::scope(|scope| scope.spawn(move || drop(queue)).join()).expect("drops");
    std::thread::scope(|scope| scope.spawn(move || drop(memory)).join()).expect("drops");
}

#[doc(hidden)]
pub fn two_queues_work_at_the_same_time(device: Arc<dyn Device>) {
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| copy_and_check(&device, &scattered((0..500).map(|at| at + 1), 32), &[]));
        }
    });
}

#[doc(hidden)]
pub fn a_dropped_queue_leaves_its_copies_done(device: Arc<dyn Device>) {
    let memory = allocate(&device, 32 << 20);
    write(&device, memory.addr() + (16 << 20) - 64, &pattern(64, 9));
    let mut queue = queue(&device);
    let copy =
        CopyDescriptor { src: memory.addr(), dst: memory.addr() + (16 << 20), len: 16 << 20 };
    submit(&mut *queue, &mut SliceSource(&[]), &[copy]);
    drop(queue);
    assert_eq!(read(&device, memory.addr() + (32 << 20) - 64, 64), pattern(64, 9));
}

/// The bytes of a chain from one end to the other: first, then everything else, then last.
pub(crate) struct Chain {
    memory: Memory,
    part: u64,
    pieces: Vec<CopyDescriptor>,
    large: Vec<CopyDescriptor>,
}

impl Chain {
    pub(crate) fn new(device: &Arc<dyn Device>) -> Self {
        const PART: u64 = 4 << 20;
        let memory = allocate(device, 4 * PART);
        let base = memory.addr();
        let step = |at: u64, len: u64| CopyDescriptor {
            src: base + PART + at,
            dst: base + 2 * PART + at,
            len,
        };
        // Half of the middle in more pieces than a launch of the small ring takes.
        let pieces = (0..PART / 2 / 4096).map(|index| step(index * 4096, 4096)).collect();
        let large = vec![step(PART / 2, PART / 4), step(PART / 4 * 3, PART / 4)];
        Self { memory, part: PART, pieces, large }
    }

    pub(crate) fn source(&self) -> (u64, u64) {
        (self.memory.addr(), self.part)
    }

    pub(crate) fn result(&self, device: &Arc<dyn Device>) -> Vec<u8> {
        read(device, self.memory.addr() + 3 * self.part, self.part as usize)
    }

    pub(crate) fn submit(
        &self,
        queue: &mut dyn Queue,
        kernel: bool,
        after: Option<crate::Producer>,
    ) -> Ticket {
        let (base, len) = (self.memory.addr(), self.part);
        let first = [CopyDescriptor { src: base, dst: base + len, len }];
        let last = [CopyDescriptor { src: base + 2 * len, dst: base + 3 * len, len }];
        let mut pieces = SliceSource(&self.pieces);
        let mut work = Work {
            large: &self.large,
            first: &first,
            last: &last,
            kernel,
            after,
            ..Work::pieces(&mut pieces)
        };
        submit_work(queue, &mut work)
    }
}

#[doc(hidden)]
pub fn what_is_first_and_what_is_last_are_so(device: Arc<dyn Device>) {
    let mut queue = queue(&device);
    let chain = Chain::new(&device);
    for byte in 1..9 {
        let (source, len) = chain.source();
        write(&device, source, &vec![byte; len as usize]);
        let ticket = chain.submit(&mut *queue, byte % 2 == 0, None);
        finish(&mut *queue, ticket);
        assert!(chain.result(&device).iter().all(|&found| found == byte), "round {byte}");
    }
}

#[doc(hidden)]
pub fn pinned_memory_is_seen_by_the_processor_and_the_device(device: Arc<dyn Device>) {
    let mut queue = queue(&device);
    let mut pinned = Arc::clone(&device).allocate_pinned(100_000).expect("pinned memory");
    assert_eq!((pinned.len(), pinned.bytes().len()), (100_000, 100_000));
    assert!(pinned.bytes().iter().all(|&byte| byte == 0));
    let memory = allocate(&device, 100_000);
    for (at, byte) in pinned.bytes_mut().iter_mut().enumerate() {
        *byte = at as u8;
    }
    let expected = pinned.bytes().to_vec();
    let (host, there, len) = (pinned.addr(), memory.addr(), 100_000);
    for (src, dst) in [(host, there), (there, host)] {
        let ticket =
            submit(&mut *queue, &mut SliceSource(&[]), &[CopyDescriptor { src, dst, len }]);
        finish(&mut *queue, ticket);
        if dst == there {
            assert_eq!(read(&device, there, 100_000), expected);
            pinned.bytes_mut().fill(0);
        }
    }
    assert_eq!(pinned.bytes(), expected);
    assert!(Arc::clone(&device).allocate_pinned(0).is_err());
}
