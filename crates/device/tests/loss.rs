//! When a queue gives its device up, and what it says then. Seen on a simulated GPU.

use std::sync::Arc;

use kvferry_device::sim::{Fault, SimControl, SimOptions, sim};
use kvferry_device::{
    CopyDescriptor, Error, Left, Memory, Queue, QueueOptions, SliceSource, SubmitError, Ticket,
    Work,
};

struct Bench {
    queue: Box<dyn Queue>,
    memory: Memory,
    control: Arc<SimControl>,
}

impl Bench {
    fn new(options: &QueueOptions) -> Self {
        let (device, control) = sim(&SimOptions::default()).expect("always there");
        let memory = Arc::clone(&device).allocate(8192).expect("memory");
        let queue = device.queue(options).expect("a queue");
        Self { queue, memory, control }
    }

    /// Submits one copy.
    fn submit(&mut self) -> Result<Ticket, SubmitError> {
        let (src, dst) = (self.memory.addr(), self.memory.addr() + 4096);
        let large = [CopyDescriptor { src, dst, len: 4096 }];
        let mut nothing = SliceSource(&[]);
        let mut work = Work { large: &large, ..Work::pieces(&mut nothing) };
        // SAFETY: the memory is never freed while the queue may use it.
        unsafe { self.queue.submit(&mut work) }
    }

    /// Drops the queue first, and nothing that a lost device may still use.
    fn end(self) {
        let Self { queue, memory, control } = self;
        drop(queue);
        std::mem::forget(memory);
        control.release();
    }
}

#[test]
fn a_queue_that_cannot_know_what_runs_says_that_its_device_is_lost_whatever_the_driver_says() {
    let is_lost = |error: &Error, call: &str| match error {
        Error::Lost { cause, .. } => assert!(cause.starts_with(call), "{cause}"),
        other => panic!("{call}: {other:?}"),
    };
    for fault in [Fault::Refused, Fault::OutOfMemory, Fault::Code(719)] {
        // Neither the copies nor what says when they end.
        let mut bench = Bench::new(&QueueOptions::default());
        bench.control.hold();
        bench.control.fail("store", 0, fault);
        bench.control.fail("store", 1, fault);
        let refused = bench.submit().expect_err("its end is not stored");
        assert_eq!(refused.left, Left::Unknown);
        let call = refused.error.to_string();
        is_lost(&bench.queue.check().expect_err("copies run"), &call);
        is_lost(&bench.submit().expect_err("nor do others").error, &call);
        bench.end();

        // What runs was begun well, and cannot be asked for.
        for call in ["enter", "fired"] {
            let mut bench = Bench::new(&QueueOptions::default());
            bench.control.hold();
            bench.submit().expect("begins");
            bench.control.fail(call, 0, fault);
            let lost = bench.queue.check().expect_err("it cannot be asked for");
            is_lost(&lost, if fault == Fault::OutOfMemory { "sim:0" } else { call });
            assert_eq!(bench.queue.check(), Err(lost));
            bench.end();
        }
    }
}
