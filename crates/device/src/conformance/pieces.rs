//! Lists of pieces: whatever their number, lengths and places, every byte arrives and none beside.

use std::sync::Arc;

use super::{GUARD, allocate, finish, pattern, queue, read, submit, write};
use crate::{CopyDescriptor, CopySource, Device, QueueOptions, SliceSource, Vendor};

/// Copies `list` (offsets into two buffers), then checks every byte of the destination.
pub(super) fn copy_and_check(
    device: &Arc<dyn Device>,
    list: &[CopyDescriptor],
    large: &[CopyDescriptor],
) {
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
pub(super) fn scattered(
    lengths: impl Iterator<Item = u64> + Clone,
    align: u64,
) -> Vec<CopyDescriptor> {
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
