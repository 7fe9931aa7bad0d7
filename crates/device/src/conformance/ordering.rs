//! Order between a queue and the application's own streams.

use std::ffi::c_void;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Chain, allocate, eventually, finish, read, submit, submit_work, write};
use crate::{
    CompactCopy, CompactEnd, Consumer, CopyDescriptor, Device, Error, Fence, Left, Producer, Queue,
    QueueOptions, SliceSource, Work,
};

/// A stream of the application's on the device under test.
pub trait ApplicationStream: Debug {
    /// The vendor's handle.
    fn handle(&self) -> *mut c_void;
    /// Later work of the stream runs once [`ApplicationStream::open`] was called.
    fn hold(&self);
    /// Lets what is held run.
    fn open(&self);
    /// Sets `len` bytes to `byte` when the stream comes to it.
    ///
    /// # Safety
    /// The range is writable, and nobody else uses it until the stream has come so far.
    unsafe fn fill(&self, addr: u64, byte: u8, len: u64);
    /// The vendor's handle of an event behind what the stream holds now; it lives as long as the
    /// stream.
    fn record(&self) -> *mut c_void;
    /// Whether such an event has fired.
    fn has_fired(&self, event: *mut c_void) -> bool;
    /// The same device's stream of one of the vendor's special values, on the thread that calls it; none
    /// of a device that has none.
    fn special(&self, _value: usize) -> Option<Box<dyn ApplicationStream>> {
        None
    }
    /// Begins the capture of the stream into a graph, in the mode that forbids the most.
    fn begin_capture(&self);
    /// Begins it in any mode; in that one where a device has no other.
    fn begin_capture_in(&self, _mode: CaptureMode) {
        self.begin_capture();
    }
    /// Ends it. Whether the graph is valid.
    fn end_capture(&self) -> bool;
}

/// What a capture forbids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureMode {
    /// To every thread what may break it.
    Global,
    /// To the thread that began it.
    ThreadLocal,
    /// Nothing.
    Relaxed,
}

impl CaptureMode {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Global, Self::ThreadLocal, Self::Relaxed];
}

/// What opens a device and a way to make streams of an application on it.
pub type Application = (Arc<dyn Device>, Box<dyn Fn() -> Box<dyn ApplicationStream>>);

/// One `#[test]` per case of order between a device and an application's streams; `$open` returns
/// `Option<Application>`, as for [`device_conformance!`](crate::device_conformance).
#[macro_export]
macro_rules! ordering_conformance {
    ($name:ident, $open:expr) => {
        mod $name {
            $crate::ordering_conformance!(@cases $open;
                a_transfer_waits_for_its_producer_and_moves_what_it_wrote
                a_transfer_behind_others_waits_for_them_and_holds_up_nobody
                a_held_producer_holds_up_no_other_transfer
                what_is_first_waits_for_the_producer_too
                staged_work_waits_for_its_producer
                held_transfers_end_in_whatever_order_their_producers_do
                a_consumer_waits_for_a_transfer_without_the_host
                a_wait_for_the_producer_is_no_stall
                special_streams_are_waited_for_and_wait
                a_threads_special_stream_is_that_of_the_thread_that_submits
                a_stream_that_is_being_captured_is_refused_and_its_graph_stays_valid
                transfers_beside_a_capture_leave_its_graph_valid
            );
        }
    };
    (@cases $open:expr; $($case:ident)*) => {
        $(#[test]
        fn $case() {
            let _alone = $crate::conformance::one_at_a_time();
            if let Some(application) = $open() {
                $crate::conformance::$case(application);
            }
        })*
    };
}

/// Cases hold streams, and a held stream may hold up others (`tests/order.rs`).
#[doc(hidden)]
pub fn one_at_a_time() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

const LEN: u64 = 1 << 20;

/// Three lists of the same bytes: one DMA, many pieces, and one compact copy.
fn ways(
    src: u64,
    dst: u64,
) -> [(Vec<CopyDescriptor>, Vec<CompactCopy<'static>>, Vec<CopyDescriptor>); 4] {
    let piece = |at: u64| CopyDescriptor { src: src + at * 1024, dst: dst + at * 1024, len: 1024 };
    let end = |addr| CompactEnd { addr, row_stride: 1024, ..CompactEnd::default() };
    let compact =
        CompactCopy { src: end(src), dst: end(dst), len: 1024, rows: 1024, layers: 1, pages: 1 };
    [
        (vec![], vec![], vec![CopyDescriptor { src, dst, len: LEN }]),
        ((0..1024).map(piece).collect(), vec![], vec![]),
        (vec![], vec![compact], vec![]),
        (
            (0..32)
                .map(|at| CopyDescriptor {
                    src: src + at * 32_768,
                    dst: dst + at * 32_768,
                    len: 32_768,
                })
                .collect(),
            vec![],
            vec![],
        ),
    ]
}

#[doc(hidden)]
pub fn a_transfer_waits_for_its_producer_and_moves_what_it_wrote((device, stream): Application) {
    let stream = stream();
    let (source, destination) = (allocate(&device, LEN), allocate(&device, LEN));
    let options = QueueOptions {
        streams: 2,
        ring_slots: 4,
        slot_descriptors: 600,
        ..QueueOptions::default()
    };
    let mut queue = Arc::clone(&device).queue(&options).expect("a queue");
    let completions = queue.completions();
    let mut byte = 0;
    for (pieces, compact, large) in &ways(source.addr(), destination.addr()) {
        for by_event in [false, true] {
            byte += 1;
            write(&device, source.addr(), &vec![0; LEN as usize]);
            write(&device, destination.addr(), &vec![0; LEN as usize]);
            stream.hold();
            // SAFETY: nobody else uses the source until the transfer below, which waits for this.
            unsafe { stream.fill(source.addr(), byte, LEN) };
            let handle = if by_event { stream.record() } else { stream.handle() };
            // SAFETY: both live as long as the stream.
            let after = unsafe {
                if by_event { Producer::event(handle) } else { Producer::stream(handle) }
            };
            let mut source_of_pieces = SliceSource(pieces);
            let mut work =
                Work { compact, large, after: Some(after), ..Work::pieces(&mut source_of_pieces) };
            let ticket = submit_work(&mut *queue, &mut work);
            // Long enough for a transfer that does not wait to be done.
            std::thread::sleep(Duration::from_millis(30));
            queue.check().expect("works");
            assert!(!completions.done(ticket), "done before its producer");
            assert_eq!(read(&device, destination.addr(), LEN as usize), vec![0; LEN as usize]);
            stream.open();
            finish(&mut *queue, ticket);
            assert!(
                read(&device, destination.addr(), LEN as usize) == vec![byte; LEN as usize],
                "the transfer read before its producer had written"
            );
        }
    }
}

#[doc(hidden)]
pub fn a_transfer_behind_others_waits_for_them_and_holds_up_nobody((device, stream): Application) {
    let stream = stream();
    let [page, other, host, copy, beside] = [(); 5].map(|()| allocate(&device, LEN));
    // One for each way, as for host offload.
    let [mut outs, mut ins, mut others] =
        [(); 3].map(|()| Arc::clone(&device).queue(&QueueOptions::default()).expect("a queue"));
    // The page goes out, another comes in its place, and what went out comes back elsewhere; each
    // round by another way, so that kernels and DMAs wait for each other.
    for round in 0..4 {
        write(&device, page.addr(), &vec![1; LEN as usize]);
        write(&device, other.addr(), &vec![2; LEN as usize]);
        write(&device, host.addr(), &vec![0; LEN as usize]);
        write(&device, copy.addr(), &vec![0; LEN as usize]);
        stream.hold();
        // SAFETY: the stream outlives the submission.
        let after = Some(unsafe { Producer::stream(stream.handle()) });
        let mut turn = 0;
        let mut submit = |queue: &mut dyn Queue, src: u64, dst: u64, after, behind: &[Fence]| {
            let (pieces, compact, large) = &ways(src, dst)[(round + turn) % 4];
            turn += 1;
            let mut pieces = SliceSource(pieces);
            let mut work = Work { compact, large, after, behind, ..Work::pieces(&mut pieces) };
            submit_work(queue, &mut work)
        };
        let out = submit(&mut *outs, page.addr(), host.addr(), after, &[]);
        let lent = outs.lend(out).expect("works").expect("it is held");
        let behind_out = [lent];
        let into = submit(&mut *others, other.addr(), page.addr(), None, &behind_out);
        let [lent] = behind_out;
        let behind_both = [lent, others.lend(into).expect("works").expect("it waits")];
        let back = submit(&mut *ins, host.addr(), copy.addr(), None, &behind_both);
        // A second borrower, of whom the first knows nothing.
        let again = outs.lend(out).expect("works").expect("it is held");
        let [lent, of_into] = behind_both;
        outs.take_back(lent);
        others.take_back(of_into);
        // One that waits for nobody goes on meanwhile.
        let free = submit(&mut *outs, other.addr(), beside.addr(), None, &[]);
        finish(&mut *outs, free);
        let done = |queue: &dyn Queue, ticket| queue.completions().done(ticket);
        assert!(!done(&*outs, out) && !done(&*others, into) && !done(&*ins, back));
        assert_eq!(read(&device, page.addr(), LEN as usize), vec![1; LEN as usize]);
        stream.open();
        finish(&mut *ins, back);
        finish(&mut *others, into);
        finish(&mut *outs, out);
        assert_eq!(read(&device, page.addr(), LEN as usize), vec![2; LEN as usize]);
        assert_eq!(read(&device, copy.addr(), LEN as usize), vec![1; LEN as usize]);
        // The end of what is done stays what it was as long as it is lent.
        stream.hold();
        let held = submit(&mut *outs, page.addr(), host.addr(), after, &[]);
        let late = submit(&mut *ins, other.addr(), copy.addr(), None, std::slice::from_ref(&again));
        finish(&mut *ins, late);
        stream.open();
        finish(&mut *outs, held);
        outs.take_back(again);
        // And what is done is not lent.
        assert!(outs.lend(held).expect("works").is_none());
    }
}

#[doc(hidden)]
pub fn a_held_producer_holds_up_no_other_transfer((device, stream): Application) {
    let stream = stream();
    let memory = allocate(&device, 4 * LEN);
    let options = QueueOptions {
        streams: 2,
        ring_slots: 4,
        slot_descriptors: 600,
        ..QueueOptions::default()
    };
    let mut queue = Arc::clone(&device).queue(&options).expect("a queue");
    let completions = queue.completions();
    stream.hold();
    // SAFETY: the stream lives longer than the submissions.
    let after = unsafe { Producer::stream(stream.handle()) };
    let [_, (held, ..), ..] = ways(memory.addr(), memory.addr() + LEN);
    let mut pieces = SliceSource(&held);
    let held =
        submit_work(&mut *queue, &mut Work { after: Some(after), ..Work::pieces(&mut pieces) });
    // On every stream, and around the ring more than once.
    for (pieces, compact, large) in &ways(memory.addr() + 2 * LEN, memory.addr() + 3 * LEN) {
        for _ in 0..9 {
            let mut pieces = SliceSource(pieces);
            let mut work = Work { compact, large, ..Work::pieces(&mut pieces) };
            let ticket = submit_work(&mut *queue, &mut work);
            finish(&mut *queue, ticket);
        }
    }
    assert!(!completions.done(held));
    stream.open();
    finish(&mut *queue, held);
}

#[doc(hidden)]
pub fn held_transfers_end_in_whatever_order_their_producers_do((device, stream): Application) {
    // With the queue's own one there are as many streams as CUDA has hardware queues.
    const COUNT: u64 = 3;
    let streams: Vec<_> = (0..COUNT).map(|_| stream()).collect();
    let memory = allocate(&device, 2 * COUNT * 4096);
    write(&device, memory.addr(), &vec![0; 2 * COUNT as usize * 4096]);
    let options = QueueOptions { streams: 1, ring_slots: 4, ..QueueOptions::default() };
    let mut queue = Arc::clone(&device).queue(&options).expect("a queue");
    let mut tickets = Vec::new();
    for (at, stream) in (0..COUNT).zip(&streams) {
        let (src, dst) = (memory.addr() + at * 4096, memory.addr() + (COUNT + at) * 4096);
        stream.hold();
        // SAFETY: nobody else uses these bytes until the transfer, which waits.
        unsafe { stream.fill(src, at as u8 + 1, 4096) };
        // SAFETY: the stream lives longer than the submission.
        let after = unsafe { Producer::stream(stream.handle()) };
        let pieces: Vec<_> = (0..4)
            .map(|part| CopyDescriptor {
                src: src + part * 1024,
                dst: dst + part * 1024,
                len: 1024,
            })
            .collect();
        let mut pieces = SliceSource(&pieces);
        let mut work = Work { after: Some(after), ..Work::pieces(&mut pieces) };
        tickets.push(submit_work(&mut *queue, &mut work));
    }
    // The last first: no held transfer waits for another's producer.
    for at in (0..COUNT as usize).rev() {
        streams[at].open();
        finish(&mut *queue, tickets[at]);
        let found = read(&device, memory.addr() + (COUNT + at as u64) * 4096, 4096);
        assert_eq!(found, vec![at as u8 + 1; 4096]);
    }
}

#[doc(hidden)]
pub fn a_consumer_waits_for_a_transfer_without_the_host((device, stream): Application) {
    let (producer, consumer) = (stream(), stream());
    let memory = allocate(&device, 2 * LEN);
    write(&device, memory.addr(), &vec![7; LEN as usize]);
    let mut queue = Arc::clone(&device).queue(&QueueOptions::default()).expect("a queue");
    producer.hold();
    // SAFETY: the stream lives longer than the submission.
    let after = unsafe { Producer::stream(producer.handle()) };
    let [_, (pieces, ..), ..] = ways(memory.addr(), memory.addr() + LEN);
    let mut source = SliceSource(&pieces);
    let ticket =
        submit_work(&mut *queue, &mut Work { after: Some(after), ..Work::pieces(&mut source) });
    // SAFETY: the stream lives longer than the call.
    let waiting = unsafe { Consumer::stream(consumer.handle()) };
    queue.signal(ticket, waiting).expect("waits");
    let passed = consumer.record();
    std::thread::sleep(Duration::from_millis(30));
    assert!(!consumer.has_fired(passed), "the consumer ran before the transfer");
    producer.open();
    eventually("the consumer runs", || consumer.has_fired(passed));
    assert!(
        queue.completions().done(ticket) || {
            // The word comes just behind the event that the consumer waited for.
            finish(&mut *queue, ticket);
            true
        }
    );
    // Of a transfer that is done there is nothing to wait for.
    queue.signal(ticket, waiting).expect("does not wait");
    let passed = consumer.record();
    eventually("the consumer runs", || consumer.has_fired(passed));
    let done = submit(&mut *queue, &mut SliceSource(&[]), &[]);
    finish(&mut *queue, done);
}

#[doc(hidden)]
pub fn a_wait_for_the_producer_is_no_stall((device, stream): Application) {
    let stream = stream();
    let memory = allocate(&device, 8192);
    // Longer than a busy machine takes for a copy.
    let stall_timeout = Duration::from_secs(1);
    let options = QueueOptions { stall_timeout, ..QueueOptions::default() };
    let mut queue = Arc::clone(&device).queue(&options).expect("a queue");
    stream.hold();
    // SAFETY: the stream lives longer than the submission.
    let after = unsafe { Producer::stream(stream.handle()) };
    let copy = CopyDescriptor { src: memory.addr(), dst: memory.addr() + 4096, len: 4096 };
    let mut source = SliceSource(&[]);
    let large = [copy];
    let mut work = Work { large: &large, after: Some(after), ..Work::pieces(&mut source) };
    let ticket = submit_work(&mut *queue, &mut work);
    let start = Instant::now();
    while start.elapsed() < stall_timeout * 2 {
        queue.check().expect("a held producer is not a lost device");
        std::thread::sleep(stall_timeout / 4);
    }
    stream.open();
    finish(&mut *queue, ticket);
}

#[doc(hidden)]
pub fn a_stream_that_is_being_captured_is_refused_and_its_graph_stays_valid(
    (device, stream): Application,
) {
    let stream = stream();
    let memory = allocate(&device, 8192);
    let mut queue = Arc::clone(&device).queue(&QueueOptions::default()).expect("a queue");
    let copy = [CopyDescriptor { src: memory.addr(), dst: memory.addr() + 4096, len: 4096 }];
    for mode in CaptureMode::ALL {
        stream.begin_capture_in(mode);
        // SAFETY: the stream lives longer than the calls.
        let (after, consumer) =
            unsafe { (Producer::stream(stream.handle()), Consumer::stream(stream.handle())) };
        let mut source = SliceSource(&[]);
        let mut work = Work { large: &copy, after: Some(after), ..Work::pieces(&mut source) };
        // SAFETY: the memory lives longer than the submission.
        let refused = unsafe { queue.submit(&mut work) }.expect_err("its producer is captured");
        assert!(matches!(refused.error, Error::NotOrderable { .. }), "{mode:?}: {refused}");
        assert_eq!(refused.left, Left::Nothing);
        let ticket = submit(&mut *queue, &mut SliceSource(&[]), &copy);
        // Done or not, the answer may not touch the graph.
        if let Err(refused) = queue.signal(ticket, consumer) {
            assert!(matches!(refused, Error::NotOrderable { .. }), "{mode:?}: {refused}");
        }
        finish(&mut *queue, ticket);
        assert!(stream.end_capture(), "the graph was broken, {mode:?}");
    }
}

#[doc(hidden)]
pub fn transfers_beside_a_capture_leave_its_graph_valid((device, stream): Application) {
    // FAILURES.md B22: everything that a transfer does, on the thread that captures and on another.
    let stream = stream();
    let everything = || {
        let memory = allocate(&device, 2 * LEN);
        let allocation = device.allocation(memory.addr()).expect("found");
        device.export(&allocation).expect("exported");
        write(&device, memory.addr(), &vec![3; LEN as usize]);
        let mut queue = Arc::clone(&device).queue(&QueueOptions::default()).expect("a queue");
        for (pieces, compact, large) in &ways(memory.addr(), memory.addr() + LEN) {
            let mut pieces = SliceSource(pieces);
            let mut work = Work { compact, large, ..Work::pieces(&mut pieces) };
            let ticket = submit_work(&mut *queue, &mut work);
            finish(&mut *queue, ticket);
        }
        assert_eq!(read(&device, memory.addr() + LEN, LEN as usize), vec![3; LEN as usize]);
    };
    for mode in CaptureMode::ALL {
        stream.begin_capture_in(mode);
        std::thread::scope(|scope| scope.spawn(everything).join()).expect("works beside a capture");
        everything();
        assert!(stream.end_capture(), "the graph was broken, {mode:?}");
    }
}

/// Both names of the legacy default stream, and a thread's own one.
const SPECIAL: [usize; 3] = [0, 1, PER_THREAD];
const PER_THREAD: usize = 2;

#[doc(hidden)]
pub fn special_streams_are_waited_for_and_wait((device, stream): Application) {
    let gate = stream();
    let memory = allocate(&device, 2 * LEN);
    let (source, destination) = (memory.addr(), memory.addr() + LEN);
    let mut queue = Arc::clone(&device).queue(&QueueOptions::default()).expect("a queue");
    let completions = queue.completions();
    let [_, (pieces, ..), ..] = ways(source, destination);
    for value in SPECIAL {
        let Some(special) = gate.special(value) else { return };
        assert_eq!(special.handle().addr(), value);
        write(&device, memory.addr(), &vec![0; 2 * LEN as usize]);
        special.hold();
        // SAFETY: nobody else uses the source until the transfer below, which waits for this.
        unsafe { special.fill(source, 5, LEN) };
        // SAFETY: a special stream lives as long as the device, and so do those below.
        let after = unsafe { Producer::stream(special.handle()) };
        let mut from = SliceSource(&pieces);
        let mut work = Work { after: Some(after), ..Work::pieces(&mut from) };
        let ticket = submit_work(&mut *queue, &mut work);
        // Long enough for a transfer that does not wait to be done.
        std::thread::sleep(Duration::from_millis(30));
        queue.check().expect("works");
        assert!(!completions.done(ticket), "done before its producer, {value}");
        special.open();
        finish(&mut *queue, ticket);
        let moved = read(&device, destination, LEN as usize);
        assert!(moved.iter().all(|&byte| byte == 5), "the producer had not written, {value}");

        gate.hold();
        // SAFETY: as above.
        let (after, consumer) =
            unsafe { (Producer::stream(gate.handle()), Consumer::stream(special.handle())) };
        let mut from = SliceSource(&pieces);
        let mut work = Work { after: Some(after), ..Work::pieces(&mut from) };
        let ticket = submit_work(&mut *queue, &mut work);
        queue.signal(ticket, consumer).expect("waits");
        // SAFETY: the transfer, which the stream waits for, is the last that writes there.
        unsafe { special.fill(destination, 9, LEN) };
        let passed = special.record();
        std::thread::sleep(Duration::from_millis(30));
        assert!(!special.has_fired(passed), "the consumer ran before the transfer, {value}");
        gate.open();
        eventually("the consumer runs", || special.has_fired(passed));
        finish(&mut *queue, ticket);
        let filled = read(&device, destination, LEN as usize);
        assert!(filled.iter().all(|&byte| byte == 9), "the consumer did not wait, {value}");
    }
}

#[doc(hidden)]
pub fn a_threads_special_stream_is_that_of_the_thread_that_submits((device, stream): Application) {
    let Some(special) = stream().special(PER_THREAD) else { return };
    let memory = allocate(&device, 8192);
    let copy = [CopyDescriptor { src: memory.addr(), dst: memory.addr() + 4096, len: 4096 }];
    let mut queue = Arc::clone(&device).queue(&QueueOptions::default()).expect("a queue");
    let completions = queue.completions();
    let behind_it = |queue: &mut dyn Queue| {
        // SAFETY: a thread's stream lives as long as the thread, which waits below.
        let after = unsafe { Producer::stream(PER_THREAD as *mut c_void) };
        let mut nothing = SliceSource(&[]);
        submit_work(
            queue,
            &mut Work { large: &copy, after: Some(after), ..Work::pieces(&mut nothing) },
        )
    };
    special.hold();
    let held = behind_it(&mut *queue);
    std::thread::scope(|scope| {
        // That of another thread holds nothing.
        let other = scope.spawn(|| {
            let ticket = behind_it(&mut *queue);
            finish(&mut *queue, ticket);
        });
        other.join().expect("waits for nobody");
    });
    assert!(!completions.done(held), "it waited for the stream of another thread");
    special.open();
    finish(&mut *queue, held);
}

#[doc(hidden)]
pub fn what_is_first_waits_for_the_producer_too((device, stream): Application) {
    let stream = stream();
    let chain = Chain::new(&device);
    let mut queue = Arc::clone(&device).queue(&QueueOptions::default()).expect("a queue");
    let completions = queue.completions();
    let (source, len) = chain.source();
    write(&device, source, &vec![1; len as usize]);
    stream.hold();
    // SAFETY: nobody else uses these bytes until the submission, which waits.
    unsafe { stream.fill(source, 2, len) };
    // SAFETY: the stream lives longer than the submission.
    let after = unsafe { Producer::stream(stream.handle()) };
    let ticket = chain.submit(&mut *queue, true, Some(after));
    assert!(!completions.done(ticket));
    stream.open();
    finish(&mut *queue, ticket);
    assert!(chain.result(&device).iter().all(|&byte| byte == 2));
}
