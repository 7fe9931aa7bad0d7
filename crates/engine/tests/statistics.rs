//! What an engine says of itself, whatever it does meanwhile.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use kvferry_device::sim::{SimOptions, sim};
use kvferry_engine::{Engine, OffloadMode, Op, Part, Range, State, SubmitOptions};

use common::config;

const LONG: Duration = Duration::from_secs(60);

#[test]
fn whoever_sees_a_batch_ended_finds_it_counted() {
    let device = kvferry_device::host().expect("always there");
    let engine = Engine::new(config(&[]), vec![device.clone()]).expect("an engine");
    let memory = engine.allocate(&device, 1 << 12).expect("memory");
    let target = engine.local().expect("itself");
    let range = [Range { local: memory.addr(), remote: memory.addr() + 2048, len: 64 }];
    // A thread that ends batches as well: whoever comes second must not see the end too early.
    engine.event_fd().expect("a descriptor");
    for count in 1..=10_000 {
        let id = engine.submit(&target, Op::Write, &range).expect("submits");
        while engine.poll(id).expect("known").state == State::Running {
            std::hint::spin_loop();
        }
        assert_eq!(engine.statistics().all_paths().completed, count);
        engine.release(id).expect("it ended");
    }
}

#[test]
fn statistics_are_told_while_a_submission_waits_for_room() {
    // Of a device's ring, and of that for staged copies to host memory.
    for staged in [false, true] {
        let (device, control) = sim(&SimOptions::default()).expect("always there");
        let host = kvferry_device::host().expect("always there");
        let there = if staged { &host } else { &device };
        let engine = Engine::new(config(&[]), vec![device.clone(), host.clone()]);
        let engine = engine.expect("an engine");
        let local = engine.allocate(&device, 1 << 20).expect("memory");
        let remote = engine.allocate(there, 1 << 20).expect("memory");
        let target = engine.local().expect("itself");
        // No strides, and more of them than a launch carries by itself.
        let place = |at: u64| at * 1021 % 1024 * 256;
        let ranges: Vec<_> = (0..1024)
            .map(|at| (local.addr() + at * 512, remote.addr() + place(at)))
            .map(|(local, remote)| Range { local, remote, len: 100 })
            .collect();
        let mode = if staged { OffloadMode::Staged } else { OffloadMode::Auto };
        let options = SubmitOptions { offload: mode, ..SubmitOptions::default() };
        let part = Part { target: &target, op: Op::Write, copies: (&ranges).into() };
        let submit = || engine.submit_parts(&[part], &options).expect("submits");
        let warm = submit();
        assert_eq!(engine.wait(warm, LONG).expect("known").state, State::Completed);
        control.hold();
        let submitted = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let submitting = scope.spawn(|| {
                // Twice what the larger ring has room for.
                let submit = |_| (submit(), submitted.fetch_add(1, Ordering::Relaxed)).0;
                (0..64).map(submit).collect::<Vec<_>>()
            });
            let mut before = 0;
            // Until it does not get on any more.
            loop {
                std::thread::sleep(Duration::from_millis(50));
                match submitted.load(Ordering::Relaxed) {
                    now if now > 0 && now == before => break,
                    now => before = now,
                }
            }
            let (told, heard) = channel();
            let engine = &engine;
            scope.spawn(move || told.send(engine.statistics()).expect("it is heard"));
            let heard = heard.recv_timeout(Duration::from_secs(10));
            let waits = !submitting.is_finished();
            control.release();
            let statistics = heard.expect("it is told at once");
            assert!(waits, "staged: {staged}: there was room");
            assert!(statistics.running > 0);
            assert_eq!(statistics.bounce_bytes > 0, staged);
            for id in submitting.join().expect("no panic") {
                assert_eq!(engine.wait(id, LONG).expect("known").state, State::Completed);
            }
        });
    }
}
