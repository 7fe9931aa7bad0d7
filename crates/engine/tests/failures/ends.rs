//! How batches end: once, completed or failed, and told to whoever waits.

use std::sync::Arc;
use std::time::Duration;

use kvferry_device::Error as DeviceError;
use kvferry_device::conformance::ApplicationStream;
use kvferry_device::sim::{Fault, Live, SimOptions, sim};
use kvferry_engine::{
    Engine, Error, Op, Part, Producer, Range, RangeError, Side, State, Strided, SubmitOptions,
};

use crate::common::config;
use crate::support::{LONG, bytes, direct, engine_on, finish, pattern, simulated, transfer};

#[test]
fn b19_a_batch_is_not_complete_before_its_copies_ran() {
    let (device, control) = simulated(0);
    let engine = engine_on(vec![device.clone()]);
    let buffer = engine.allocate(&device, 8 << 20).expect("memory");
    let target = direct(&engine, &engine);
    for (count, len) in [(1, 64), (1, 4096), (1000, 2112)] {
        buffer.write(0, &pattern(4 << 20, count as u8)).expect("inside");
        let ranges: Vec<Range> = (0..count)
            .map(|at| Range {
                local: buffer.addr() + at * 4096,
                remote: buffer.addr() + (4 << 20) + at * 4096,
                len,
            })
            .collect();
        control.hold();
        let id = engine.submit(&target, Op::Write, &ranges).expect("submits");
        for _ in 0..1000 {
            assert_eq!(engine.poll(id).map(|status| status.state), Ok(State::Running));
        }
        assert_eq!(
            engine.wait(id, Duration::ZERO).map(|status| (status.state, status.bytes)),
            Ok((State::Running, 0))
        );
        assert_eq!(engine.release(id), Err(Error::BatchBusy(id)));
        control.release();
        assert_eq!(finish(&engine, id), State::Completed);
        let last = ((count - 1) * 4096) as usize;
        assert_eq!(
            bytes(&buffer, (4 << 20) + last as u64, len as usize),
            pattern(4 << 20, count as u8)[last..last + len as usize]
        );
    }
}

#[test]
fn b23_the_first_poll_after_completion_says_so_and_events_do_not_pile_up() {
    let (device, control) = simulated(0);
    let engine = engine_on(vec![device.clone()]);
    let buffer = engine.allocate(&device, 1 << 20).expect("memory");
    let target = direct(&engine, &engine);
    let range = |at: u64| Range {
        local: buffer.addr() + at * 64,
        remote: buffer.addr() + (1 << 19) + at * 64,
        len: 64,
    };
    let ranges: Vec<Range> = (0..20).map(|at| range(at * 2)).collect();
    transfer(&engine, &target, Op::Write, &ranges);
    let (events, streams) = (control.live(Live::Events), control.live(Live::Streams));
    for round in 0..20_000 {
        let id = engine
            .submit(&target, Op::Write, if round % 2 == 0 { &ranges } else { &ranges[..1] })
            .expect("submits");
        let status = engine.wait(id, LONG).expect("known");
        assert_eq!(status.state, State::Completed);
        assert_eq!(status.bytes, if round % 2 == 0 { 20 * 64 } else { 64 });
        assert_eq!(engine.poll(id), Ok(status), "polling after the end gives the same answer");
        engine.release(id).expect("ended");
    }
    assert_eq!((control.live(Live::Events), control.live(Live::Streams)), (events, streams));
    // Eight requests of which the sixth is bad: it alone fails, and by name.
    let outcomes: Vec<_> = (0..8)
        .map(|at| {
            let bad = if at == 5 { 1 << 40 } else { 0 };
            engine.submit(
                &target,
                Op::Write,
                &[Range { remote: range(at).remote + bad, ..range(at) }],
            )
        })
        .collect();
    for (at, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Ok(id) => assert_eq!(finish(&engine, id), State::Completed, "request {at}"),
            Err(error) => {
                assert_eq!(at, 5);
                assert!(matches!(
                    error,
                    Error::Range(RangeError::NotRegistered { index: 0, side: Side::Remote, .. })
                ));
            }
        }
    }
}

#[test]
fn b32_a_device_without_progress_ends_its_batches_and_one_with_progress_never_does() {
    let (device, control) = simulated(0);
    let engine = Engine::new(
        config(&[
            // More than a busy machine takes for the first transfer.
            ("MC_KVFERRY_STALL_TIMEOUT_SEC", "3"),
            ("MC_KVFERRY_UNREGISTER_TIMEOUT_SEC", "0"),
        ]),
        vec![device.clone()],
    )
    .expect("an engine");
    let buffer = engine.allocate(&device, 1 << 20).expect("memory");
    let target = direct(&engine, &engine);
    let range = Range { local: buffer.addr(), remote: buffer.addr() + (1 << 19), len: 1 << 19 };
    transfer(&engine, &target, Op::Write, &[range]);
    control.hold();
    let id = engine.submit(&target, Op::Write, &[range]).expect("submits");
    assert_eq!(
        engine.wait(id, Duration::from_millis(10)).map(|status| status.state),
        Ok(State::Running),
        "a timeout of the caller ends nothing"
    );
    let state = finish(&engine, id);
    assert!(
        matches!(state, State::Failed(Error::Device(DeviceError::Stalled { .. }))),
        "{state:?}"
    );
    let next = engine.submit(&target, Op::Write, &[range]);
    assert!(matches!(next, Err(Error::Device(DeviceError::Stalled { .. }))), "{next:?}");
    // Nobody knows what the device still does: the region stays in use.
    assert!(matches!(engine.unregister(buffer.addr()), Err(Error::RegionBusy { .. })));
    control.release();
}

#[test]
fn b35_busy_stale_and_double_release_are_typed_errors_and_ids_do_not_come_back() {
    let (device, control) = simulated(0);
    let engine = engine_on(vec![device.clone()]);
    let buffer = engine.allocate(&device, 8192).expect("memory");
    let target = direct(&engine, &engine);
    let range = Range { local: buffer.addr(), remote: buffer.addr() + 4096, len: 4096 };
    control.hold();
    let busy = engine.submit(&target, Op::Write, &[range]).expect("submits");
    assert_eq!(engine.release(busy), Err(Error::BatchBusy(busy)));
    control.release();
    assert_eq!(finish(&engine, busy), State::Completed);
    assert_eq!(engine.release(busy), Err(Error::UnknownBatch(busy)));
    assert_eq!(engine.poll(busy), Err(Error::UnknownBatch(busy)));
    std::thread::scope(|scope| {
        let poller = scope
            .spawn(|| (0..100_000).all(|_| engine.poll(busy) == Err(Error::UnknownBatch(busy))));
        for _ in 0..100_000 {
            let id = engine.submit(&target, Op::Write, &[] as &[Range]).expect("accepted");
            engine.release(id).expect("ended");
        }
        assert!(poller.join().expect("polls"));
    });
}

/// What a transfer asks for, so that every way into the device is taken.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ask {
    /// Pieces that fit into a kernel's parameters, and large ones.
    Few,
    /// More than fit, scattered.
    Many,
    /// A form.
    Strided,
    /// The few, behind a stream of the application's.
    Ordered,
}

/// What a submission can be told by the device, at every call that it makes.
#[test]
fn whichever_call_fails_the_batch_ends_once_and_the_engine_goes_on() {
    let calls = [
        "enter",
        "launch",
        "launch_inline",
        "launch_compact",
        "copy",
        "copy_rows",
        "record",
        "wait",
        "store",
        "wait_producer",
        "create_event",
        "create_stream",
        "fired",
    ];
    for kernel in [true, false] {
        for call in calls {
            for nth in 0..12 {
                for fault in [Fault::Refused, Fault::OutOfMemory, Fault::Lost] {
                    survive(kernel, Ask::Few, call, nth, fault);
                }
                for ask in [Ask::Many, Ask::Strided, Ask::Ordered] {
                    if nth < 4 {
                        survive(kernel, ask, call, nth, Fault::Refused);
                    }
                }
            }
        }
    }
}

fn survive(kernel: bool, ask: Ask, call: &'static str, nth: u64, fault: Fault) {
    let what = format!("{call} number {nth}, {fault:?}, {ask:?}, kernel {kernel}");
    let (device, control) =
        sim(&SimOptions { kernel, ..SimOptions::default() }).expect("always there");
    let knobs = [("MC_KVFERRY_UNREGISTER_TIMEOUT_SEC", "0"), ("MC_KVFERRY_SMALL_MAX_BYTES", "4K")];
    let engine = Engine::new(config(&knobs), vec![device.clone()]).expect("an engine");
    let buffer = engine.allocate(&device, 1 << 20).expect("memory");
    let target = direct(&engine, &engine);
    let half = 1 << 19;
    let form = Strided {
        local: buffer.addr(),
        remote: buffer.addr() + half,
        len: 700,
        count: 100,
        local_stride: 1000,
        remote_stride: 1000,
    };
    let ranges: Vec<Range> = match ask {
        Ask::Strided => form.pieces().collect(),
        _ => {
            let count: u64 = if ask == Ask::Many { 300 } else { 40 };
            let small = (0..count).map(|at| (at * 7 % count * 1000, 700));
            let large = (0..5).map(|at| (400_000 + at * 10_000, 9000));
            small
                .chain(large)
                .map(|(offset, len)| Range {
                    local: buffer.addr() + offset,
                    remote: buffer.addr() + half + offset,
                    len,
                })
                .collect()
        }
    };
    let forms = [form];
    let copies = if ask == Ask::Strided { (&forms).into() } else { (&ranges).into() };
    let stream = control.stream();
    // SAFETY: the stream lives longer than the submissions.
    let after = (ask == Ask::Ordered).then(|| unsafe { Producer::stream(stream.handle()) });
    let options = SubmitOptions { after, ..SubmitOptions::default() };
    let submit =
        || engine.submit_parts(&[Part { target: &target, op: Op::Write, copies }], &options);
    let source = pattern(half as usize, 1);
    buffer.write(0, &source).expect("inside");
    control.fail(call, nth, fault);
    let mut ends = 0;
    for _ in 0..3 {
        // Refused before anything moved, or a batch that ends exactly once: both are fine.
        let Ok(id) = submit() else { continue };
        let status = engine.wait(id, LONG).expect("known");
        assert_ne!(status.state, State::Running, "{what}: never ended");
        assert_eq!(engine.poll(id), Ok(status.clone()), "{what}: ended twice");
        ends += usize::from(status.state == State::Completed);
        engine.release(id).expect("ended");
    }
    if fault == Fault::Lost {
        return;
    }
    // A completion that cannot be asked for counts as a lost device.
    if call != "fired" && !(call == "enter" && nth > 0) {
        // One planned failure costs at most one batch.
        assert!(ends >= 2, "{what}: only {ends} of 3 batches completed");
        control.forget_failures();
        buffer.write(half, &vec![0; half as usize]).expect("inside");
        let id = submit().expect("submits");
        assert_eq!(engine.wait(id, LONG).expect("known").state, State::Completed, "{what}");
        engine.release(id).expect("ended");
        for range in &ranges {
            let offset = range.local - buffer.addr();
            let expected = &source[offset as usize..][..range.len as usize];
            assert_eq!(bytes(&buffer, half + offset, range.len as usize), expected, "{what}");
        }
        drop(buffer);
        drop((engine, target));
        drop(device);
        for live in [Live::Allocations, Live::Pinned, Live::Streams, Live::Events, Live::Mappings] {
            assert_eq!(control.live(live), 0, "{what}: {live:?} leaked");
        }
    }
}

#[test]
fn an_event_descriptor_counts_batches_as_they_end() {
    let (device, control) = simulated(0);
    let engine = engine_on(vec![device.clone()]);
    let buffer = engine.allocate(&device, 8192).expect("memory");
    let target = direct(&engine, &engine);
    let fd = engine.event_fd().expect("a descriptor");
    let readable = |timeout_ms: i64| {
        let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
        let timeout = rustix::event::Timespec {
            tv_sec: timeout_ms / 1000,
            tv_nsec: timeout_ms % 1000 * 1_000_000,
        };
        rustix::event::poll(&mut fds, Some(&timeout)).expect("polls") == 1
    };
    let count = || {
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes).expect("readable");
        u64::from_ne_bytes(bytes)
    };
    assert!(!readable(0));
    let range = Range { local: buffer.addr(), remote: buffer.addr() + 4096, len: 4096 };
    control.hold();
    let ids: Vec<_> =
        (0..3).map(|_| engine.submit(&target, Op::Write, &[range]).expect("submits")).collect();
    assert!(!readable(20), "nothing ended yet");
    control.release();
    let mut ended = 0;
    while ended < 3 {
        assert!(readable(60_000), "only {ended} of 3 were told");
        ended += count();
    }
    assert_eq!(ended, 3);
    for id in ids {
        assert_eq!(engine.poll(id).map(|status| status.state), Ok(State::Completed));
    }
    // A batch that ends under the caller's own poll is told, too.
    let id = engine.submit(&target, Op::Write, &[range]).expect("submits");
    assert_eq!(finish(&engine, id), State::Completed);
    assert!(readable(60_000));
    assert_eq!(count(), 1);
    // So is one that has nothing to move, and has ended when it is submitted.
    let nothing = Range { len: 0, ..range };
    engine.submit(&target, Op::Write, &[nothing]).expect("submits");
    assert!(readable(0));
    assert_eq!(count(), 1);
}

#[test]
fn b49_a_fork_is_refused_at_once_and_harms_nothing() {
    let (device, control) = simulated(0);
    let engine = engine_on(vec![Arc::clone(&device)]);
    let (one, other) = (engine.allocate(&device, 4096), engine.allocate(&device, 4096));
    let (one, other) = (one.expect("memory"), other.expect("memory"));
    let target = engine.local().expect("itself");
    let range = [Range { local: one.addr(), remote: other.addr(), len: 4096 }];
    one.write(0, &[7; 4096]).expect("inside");
    let key = engine.segment().allocations[0].key;
    control.hold();
    let id = engine.submit(&target, Op::Write, &range).expect("submits");
    let owner = std::process::id();
    // SAFETY: the child calls nothing but what looks at the process first, and ends without running
    // what the parent's other threads left.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = |error: Option<Error>| error == Some(Error::OtherProcess { owner });
        // SAFETY: it is refused.
        let registered = unsafe { engine.register(one.addr(), 4096) };
        let all = refused(registered.err())
            && refused(engine.submit(&target, Op::Write, &range).err())
            && refused(engine.local().err())
            && refused(engine.allocate(&device, 4096).err())
            && refused(engine.unregister(one.addr()).err())
            && refused(engine.poll(id).err())
            && refused(engine.cancel(id).err())
            && refused(engine.wait(id, LONG).err())
            && refused(engine.release(id).err())
            && refused(engine.listen(([127, 0, 0, 1], 0).into()).err())
            && refused(engine.choice(id).err())
            && refused(engine.event_fd().err())
            && refused(engine.lock_host(one.addr(), &device).err())
            && refused(engine.export(key).err())
            && refused(engine.lend(device.info().uuid).err())
            && refused(one.read(0, &mut [0]).err())
            && refused(target.refresh(engine.segment()).err())
            && engine.segment().regions.is_empty()
            && engine.statistics().regions == 0
            && engine.pinned_bytes() == 0
            && engine.lease(one.addr(), 1).is_none();
        engine.record_step(0, LONG);
        drop((target, one, other, engine));
        // SAFETY: it ends this process.
        unsafe { libc::_exit(if all { 42 } else { 1 }) };
    }
    assert!(child > 0);
    let mut status = 0;
    // SAFETY: the child above.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 42));
    control.release();
    assert_eq!(engine.wait(id, LONG).expect("known").state, State::Completed);
    let mut copied = [0; 4096];
    other.read(0, &mut copied).expect("inside");
    assert_eq!(copied, [7; 4096]);
}
