//! Queues: when a submission is complete, what is first and last in it, and threads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::pieces::{copy_and_check, scattered};
use super::{
    GUARD, allocate, an_allocation_is_found_from_any_address_inside_it, finish,
    memory_keeps_what_was_written, pattern, queue, read, submit, submit_work, write,
};
use crate::{
    CopyDescriptor, CopySource, Device, Memory, Producer, Queue, SliceSource, Ticket, Work,
};

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
        after: Option<Producer>,
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

/// A list whose pieces cannot be had.
struct Panics;

impl CopySource for Panics {
    fn fill(&mut self, _slot: &mut [CopyDescriptor]) -> usize {
        panic!("the list's own panic, which the case is about");
    }
}

#[doc(hidden)]
pub fn a_list_that_panics_costs_later_submissions_no_piece(device: Arc<dyn Device>) {
    // Callers of the C ABI go on behind a panic that it caught.
    let memory = allocate(&device, 8192);
    let (source, destination) = (memory.addr(), memory.addr() + 4096);
    let bytes = pattern(4096, 3);
    write(&device, source, &bytes);
    let mut queue = queue(&device);
    for kernel in [true, false] {
        let caught = catch_unwind(AssertUnwindSafe(|| {
            submit_work(&mut *queue, &mut Work { kernel, ..Work::pieces(&mut Panics) })
        }));
        assert!(caught.is_err(), "the panic comes through");
        write(&device, destination, &[GUARD; 4096]);
        let pieces: Vec<_> = (0..64)
            .map(|at| 64 * at)
            .map(|at| CopyDescriptor { src: source + at, dst: destination + at, len: 64 })
            .collect();
        let mut pieces = SliceSource(&pieces);
        let ticket = submit_work(&mut *queue, &mut Work { kernel, ..Work::pieces(&mut pieces) });
        finish(&mut *queue, ticket);
        assert_eq!(read(&device, destination, 4096), bytes, "by the kernel: {kernel}");
    }
}
