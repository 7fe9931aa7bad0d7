//! When a queue gives its device up, and what it says then. Seen on a simulated GPU.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use kvferry_device::conformance::ApplicationStream;
use kvferry_device::sim::{Fault, SimControl, SimOptions, sim};
use kvferry_device::{
    CopyDescriptor, Error, Left, Memory, Producer, Queue, QueueOptions, SliceSource, SubmitError,
    Ticket, Work,
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
        self.submit_copies(1, None)
    }

    fn submit_copies(
        &mut self,
        count: usize,
        after: Option<Producer>,
    ) -> Result<Ticket, SubmitError> {
        let (src, dst) = (self.memory.addr(), self.memory.addr() + 4096);
        let large = vec![CopyDescriptor { src, dst, len: 4096 }; count];
        let mut nothing = SliceSource(&[]);
        let mut work = Work { large: &large, after, ..Work::pieces(&mut nothing) };
        // SAFETY: the memory is never freed while the queue may use it.
        unsafe { self.queue.submit(&mut work) }
    }

    /// A producer that is done.
    fn ready(&self) -> Producer {
        let stream = self.control.stream();
        let event = stream.record();
        while !stream.has_fired(event) {
            std::thread::yield_now();
        }
        // SAFETY: events of the simulated GPU live as long as it does.
        unsafe { Producer::event(event) }
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

#[test]
fn a_device_that_ends_one_after_the_other_of_many_that_run_is_no_stalled_one() {
    let stall_timeout = Duration::from_secs(1);
    let mut bench = Bench::new(&QueueOptions { stall_timeout, ..QueueOptions::default() });
    let ready = bench.ready();
    bench.control.hold();
    let front = bench.submit_copies(64, None).expect("begins");
    let behind = [(); 4].map(|()| bench.submit_copies(1, Some(ready)).expect("begins"));
    // A copy of the first, and what tells that the others may begin.
    bench.control.step(5);
    let completions = bench.queue.completions();
    let ended = || behind.iter().filter(|&&ticket| completions.done(ticket)).count();
    bench.queue.check().expect("all run");
    // Longer than the timeout in all.
    for count in 1..=behind.len() {
        std::thread::sleep(stall_timeout * 2 / 5);
        while ended() < count {
            bench.control.step(1);
        }
        bench.queue.check().expect("it moves on");
    }
    assert!(!completions.done(front));
    bench.control.release();
}

#[test]
fn a_lost_device_is_noticed_at_once_though_nothing_but_gated_work_runs() {
    for fault in [Fault::Lost, Fault::Code(719)] {
        let mut bench = Bench::new(&QueueOptions::default());
        let ready = bench.ready();
        bench.control.hold();
        bench.submit_copies(1, Some(ready)).expect("begins");
        // It may begin.
        bench.control.step(1);
        bench.queue.check().expect("it runs");
        bench.control.fail("fired", 0, fault);
        let lost = bench.queue.check();
        assert!(matches!(lost, Err(Error::Lost { .. })), "{fault:?}: {lost:?}");
        bench.end();
    }
}

/// What is larger than the ring waits for the device while it is submitted.
#[test]
fn a_device_that_stalls_amid_a_submission_ends_the_call() {
    for gated in [false, true] {
        let stall_timeout = Duration::from_millis(200);
        let ring = QueueOptions { ring_slots: 2, slot_descriptors: 16, ..QueueOptions::default() };
        let mut bench = Bench::new(&QueueOptions { stall_timeout, ..ring });
        let ready = bench.ready();
        bench.control.hold();
        let (told, returned) = channel();
        let control = Arc::clone(&bench.control);
        std::thread::spawn(move || {
            let (src, dst) = (bench.memory.addr(), bench.memory.addr() + 4096);
            let pieces = vec![CopyDescriptor { src, dst, len: 16 }; 100];
            let (mut pieces, after) = (SliceSource(&pieces), gated.then_some(ready));
            let mut work = Work { after, ..Work::pieces(&mut pieces) };
            // SAFETY: the memory is never freed.
            let submitted = unsafe { bench.queue.submit(&mut work) };
            told.send(submitted.map(|_| ())).expect("somebody waits");
            bench.end();
        });
        if gated {
            // It may begin.
            while control.calls("launch") == 0 {
                std::thread::yield_now();
            }
            control.step(1);
        }
        let submitted = returned.recv_timeout(Duration::from_secs(30)).expect("it waits for ever");
        let error = submitted.expect_err("most of it was not begun").error;
        assert!(matches!(error, Error::Stalled { .. }), "{error:?}");
    }
}
