//! Whichever call of the driver fails while a device finds out whether destinations overlap: the
//! submission ends, no verdict is wrong, and the next ones work.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_device::sim::{Fault, Live, SimControl, SimOptions, sim};
use kvferry_device::{
    CopyDescriptor, Destinations, Left, Memory, Queue, QueueOptions, SliceSource, Verdict, Work,
};

const PIECES: u64 = 700;
const LEN: u64 = 64;

struct Bench {
    queue: Box<dyn Queue>,
    memory: Memory,
    control: Arc<SimControl>,
}

impl Bench {
    fn new() -> Self {
        let (device, control) = sim(&SimOptions::default()).expect("always there");
        let memory = Arc::clone(&device).allocate(4 * PIECES * LEN).expect("memory");
        let stall_timeout = Duration::from_secs(5);
        let options = QueueOptions {
            ring_slots: 8,
            slot_descriptors: 256,
            stall_timeout,
            ..Default::default()
        };
        let queue = device.queue(&options).expect("a queue");
        Self { queue, memory, control }
    }

    fn list(&self, overlaps: bool) -> Vec<CopyDescriptor> {
        let (src, half) = (self.memory.addr(), self.memory.addr() + 2 * PIECES * LEN);
        let order = |at: u64| at * 331 % PIECES;
        let mut list: Vec<_> = (0..PIECES)
            .map(|at| CopyDescriptor { src, dst: half + order(at) * 2 * LEN, len: LEN })
            .collect();
        if overlaps {
            list[5].dst = list[600].dst;
        }
        list
    }

    /// Submits the list and waits for its end; none if it failed.
    fn run(&mut self, list: &[CopyDescriptor]) -> Option<Option<Verdict>> {
        let mut destinations = Destinations {
            low: list.iter().map(|copy| copy.dst).min().expect("not empty"),
            high: list.iter().map(|copy| copy.dst + copy.len).max().expect("not empty"),
            granule: LEN,
            bytes: PIECES * LEN,
            pieces: PIECES,
            verdict: None,
        };
        let mut pieces = SliceSource(list);
        let mut work = Work { destinations: Some(&mut destinations), ..Work::pieces(&mut pieces) };
        // SAFETY: the memory lives longer than the queue.
        let submitted = unsafe { self.queue.submit(&mut work) };
        let (ticket, is_whole) = match submitted {
            Ok(ticket) => (ticket, true),
            Err(error) => match error.left {
                Left::Until(ticket) => (ticket, false),
                Left::Nothing | Left::Unknown => return None,
            },
        };
        let (completions, start) = (self.queue.completions(), Instant::now());
        while !completions.done(ticket) {
            if self.queue.check().is_err() {
                return None;
            }
            assert!(start.elapsed() < Duration::from_secs(30), "a submission never ended");
            std::thread::yield_now();
        }
        is_whole.then_some(destinations.verdict)
    }
}

#[test]
fn whichever_call_fails_no_verdict_is_wrong_and_the_next_submission_works() {
    let mut failures = 0;
    for call in ["allocate", "clear", "store", "launch_claimed", "record", "wait"] {
        for nth in [0, 1, 2, 5] {
            for fault in [Fault::Refused, Fault::OutOfMemory] {
                let mut bench = Bench::new();
                let [good, bad] = [false, true].map(|overlaps| bench.list(overlaps));
                bench.control.fail(call, nth, fault);
                for _ in 0..12 {
                    match bench.run(&good) {
                        None => failures += 1,
                        Some(verdict) => {
                            let overlap = verdict.and_then(|verdict| verdict.overlap());
                            assert_eq!(overlap, None, "{call} {nth} {fault:?}");
                        }
                    }
                }
                bench.control.forget_failures();
                let mut found = 0;
                for _ in 0..50 {
                    let verdict = bench.run(&bad).expect("works again");
                    let Some(verdict) = verdict else { continue };
                    let overlap = verdict.overlap().expect("pieces 5 and 600 are the same");
                    assert!([5, 600].contains(&overlap), "{call} {nth} {fault:?}: {overlap}");
                    found += 1;
                }
                assert!(found > 0, "{call} {nth} {fault:?}: nobody looked any more");
                let Bench { queue, memory, control } = bench;
                drop(queue);
                // A table that was not cleared may be in use for ever.
                let kept = 1 + u64::from(call == "clear" || call == "store");
                let live = control.live(Live::Allocations);
                assert!((1..=kept).contains(&live), "{call} {nth} {fault:?}: {live} allocations");
                drop(memory);
            }
        }
    }
    assert!(failures > 10, "{failures} failures show little");
}

#[test]
fn a_device_that_is_lost_while_it_looks_ends_what_waits() {
    for call in ["clear", "store", "launch_claimed", "record"] {
        for nth in 0..4 {
            let mut bench = Bench::new();
            let list = bench.list(false);
            bench.control.fail(call, nth, Fault::Lost);
            let ended = (0..12).filter(|_| bench.run(&list).is_some()).count();
            assert!(ended < 12, "{call} {nth}: the device was never lost");
            // Nobody knows whether it is quiet.
            std::mem::forget(bench.memory);
        }
    }
}
