//! What a list of ranges may say: bounds, overlaps, sizes from nothing to beyond 4 GiB.

use std::sync::Arc;

use kvferry_device::{Device, Memory};
use kvferry_engine::{Engine, Error, Op, Path, Range, RangeError, Side, State};

use crate::common::config;
use crate::support::{
    LONG, bytes, direct, engine_on, finish, host_pair, pattern, simulated, transfer,
};

#[test]
fn b25_a_range_that_leaves_its_region_is_refused_and_nothing_of_its_batch_moves() {
    let (importer, exporter, host) = host_pair();
    let memory = Arc::clone(&host).allocate(64 << 10).expect("memory");
    // Two regions that touch in one allocation, a hole, and a third one.
    let regions = [(0, 4096), (4096, 4096), (16_384, 640 * 10)];
    for (offset, len) in regions {
        // SAFETY: unregistered before `memory` is dropped.
        unsafe { exporter.register(memory.addr() + offset, len) }.expect("registers");
    }
    let target = direct(&importer, &exporter);
    let local = importer.allocate(&host, 64 << 10).expect("memory");
    local.write(0, &pattern(64 << 10, 9)).expect("inside");
    let good = Range { local: local.addr(), remote: memory.addr() + 16_384, len: 100 };
    let refused = |bad: Range| {
        let before = {
            let mut now = vec![0; 64 << 10];
            unsafe_read(&host, &memory, &mut now);
            now
        };
        let error = importer.submit(&target, Op::Write, &[good, bad]).expect_err("refused");
        let mut after = vec![0; 64 << 10];
        unsafe_read(&host, &memory, &mut after);
        assert!(before == after, "bytes moved although the batch was refused");
        error
    };
    let at = |offset: u64, len: u64| Range {
        local: local.addr() + 200,
        remote: memory.addr() + offset,
        len,
    };
    assert!(matches!(
        refused(at(4097, 4096)),
        Error::Range(RangeError::OutOfBounds { index: 1, side: Side::Remote, beyond: 1, .. })
    ));
    assert!(matches!(
        refused(at(16_383, 2)),
        Error::Range(RangeError::NotRegistered { index: 1, .. })
    ));
    // Pages of 584 bytes at stride 640: the eleventh is behind the region's end.
    assert!(matches!(
        refused(at(16_384 + 640 * 10, 584)),
        Error::Range(RangeError::NotRegistered { index: 1, .. })
    ));
    let beyond_local =
        Range { local: local.addr() + (64 << 10) - 1, remote: memory.addr() + 4096, len: 2 };
    assert!(matches!(
        refused(beyond_local),
        Error::Range(RangeError::OutOfBounds { index: 1, side: Side::Local, beyond: 1, .. })
    ));
    let wraps = Range { local: local.addr(), remote: u64::MAX - 10, len: 100 };
    assert!(matches!(
        refused(wraps),
        Error::Range(RangeError::Overflow { index: 1, side: Side::Remote, .. })
    ));
    // Across the border of two regions of one allocation is fine.
    transfer(&importer, &target, Op::Write, &[at(4000, 200)]);
    for (offset, _) in regions {
        exporter.unregister(memory.addr() + offset).expect("idle");
    }
}

fn unsafe_read(host: &Arc<dyn Device>, memory: &Memory, bytes: &mut [u8]) {
    // SAFETY: `memory` is at least as long and no copy runs.
    unsafe { host.read(memory.addr(), bytes) }.expect("reads");
}

#[test]
fn b26_one_copy_of_more_than_four_gibibytes_is_exact() {
    let len = (1u64 << 32) + 1;
    let meminfo = std::fs::read_to_string("/proc/meminfo").expect("linux");
    let available =
        meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:")).expect("a line");
    let available: u64 = available.trim().trim_end_matches(" kB").parse().expect("a number");
    if available << 10 < 3 * len {
        eprintln!("SKIP one copy of more than 4 GiB: {available} KiB of memory are too few");
        return;
    }
    let host = kvferry_device::host().expect("host memory");
    // A busy machine takes a while for a single copy, and it is no stall.
    let patient = || {
        let config = config(&[("MC_KVFERRY_STALL_TIMEOUT_SEC", "3600")]);
        Engine::new(config, vec![Arc::clone(&host)]).expect("an engine")
    };
    let (importer, exporter) = (patient(), patient());
    let (from, to) = (
        importer.allocate(&host, len).expect("memory"),
        exporter.allocate(&host, len).expect("memory"),
    );
    let marks = [0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32];
    for (at, mark) in marks.into_iter().enumerate() {
        from.write(mark, &[at as u8 + 1]).expect("inside");
    }
    transfer(
        &importer,
        &direct(&importer, &exporter),
        Op::Write,
        &[Range { local: from.addr(), remote: to.addr(), len }],
    );
    for (at, mark) in marks.into_iter().enumerate() {
        assert_eq!(bytes(&to, mark, 1), [at as u8 + 1], "byte {mark}");
    }
}

#[test]
fn b30_empty_and_zero_length_requests_complete_at_once() {
    let (device, control) = simulated(0);
    let engine = engine_on(vec![device.clone()]);
    let buffer = engine.allocate(&device, 1 << 20).expect("memory");
    let target = direct(&engine, &engine);
    // Nothing runs, so only what needs no device can complete.
    control.hold();
    let zero = |addr: u64| Range { local: addr, remote: addr, len: 0 };
    for list in [vec![], vec![zero(buffer.addr())], vec![zero(0)], vec![zero(u64::MAX); 1000]] {
        let id = engine.submit(&target, Op::Write, &list).expect("accepted");
        let status = engine.poll(id).expect("known");
        assert_eq!((status.state, status.bytes, status.path), (State::Completed, 0, Path::None));
        engine.release(id).expect("ended");
    }
    control.release();
    let list: Vec<Range> = (0..1000)
        .map(|at| Range {
            local: buffer.addr() + at * 64,
            remote: buffer.addr() + (1 << 19) + at * 64,
            len: if at % 3 == 0 { 0 } else { 32 },
        })
        .collect();
    let id = engine.submit(&target, Op::Write, &list).expect("submits");
    let status = engine.wait(id, LONG).expect("known");
    assert_eq!((status.state, status.bytes), (State::Completed, 666 * 32));
    // SAFETY: refused, so nothing is promised.
    let empty = unsafe { engine.register(buffer.addr(), 0) };
    assert_eq!(empty, Err(Error::BadRegion { addr: buffer.addr(), len: 0 }));
}

#[test]
fn b31_overlaps_inside_a_batch_are_refused_by_name() {
    let (importer, exporter, host) = host_pair();
    let (local, remote) = (
        importer.allocate(&host, 1 << 20).expect("memory"),
        exporter.allocate(&host, 1 << 20).expect("memory"),
    );
    let target = direct(&importer, &exporter);
    let range = |l: u64, r: u64, len: u64| Range {
        local: local.addr() + l,
        remote: remote.addr() + r,
        len,
    };
    let twice = importer.submit(&target, Op::Write, &[range(0, 0, 64), range(64, 0, 64)]);
    assert_eq!(
        twice,
        Err(RangeError::DestinationsOverlap {
            first: 0,
            second: 1,
            side: Side::Remote,
            addr: remote.addr()
        }
        .into())
    );
    // Shared sources are always fine.
    transfer(&importer, &target, Op::Write, &[range(0, 0, 64), range(0, 64, 64)]);
    // In one address space a source may be a destination, too: both directions of a shift, and
    // the same range.
    let own = direct(&importer, &importer);
    for (from, to) in [(0, 100), (100, 0), (0, 0)] {
        let shifted =
            Range { local: local.addr() + from, remote: local.addr() + to, len: 64 << 10 };
        let refused = importer.submit(&own, Op::Write, &[shifted]);
        assert!(
            matches!(
                refused,
                Err(Error::Range(RangeError::SourceOverwritten { reader: 0, writer: 0, .. }))
            ),
            "{refused:?}"
        );
    }
}

#[test]
fn b31_overlaps_are_found_beside_the_copies_or_not_looked_for_as_the_knob_says() {
    for (knob, failed) in [("beside", true), ("off", false)] {
        let host = kvferry_device::host().expect("always there");
        let knobs = config(&[("MC_KVFERRY_OVERLAP_CHECK", knob)]);
        let engine = Engine::new(knobs, vec![host.clone()]).expect("an engine");
        let buffer = engine.allocate(&host, 1 << 20).expect("memory");
        let target = direct(&engine, &engine);
        let range = |l: u64, r: u64| Range {
            local: buffer.addr() + l,
            remote: buffer.addr() + (1 << 19) + r,
            len: 64,
        };
        let bad = [range(0, 64), range(64, 0), range(128, 32)];
        let id = engine.submit(&target, Op::Write, &bad).expect("starts");
        match finish(&engine, id) {
            State::Failed(Error::Range(error)) => {
                assert!(failed, "{knob}: {error}");
                let (side, addr) = (Side::Remote, buffer.addr() + (1 << 19) + 32);
                let expected = RangeError::DestinationsOverlap { first: 1, second: 2, side, addr };
                assert_eq!(error, expected);
            }
            state => assert_eq!((state, failed), (State::Completed, false), "{knob}"),
        }
        // Good lists complete, and bounds are checked before anything moves.
        transfer(&engine, &target, Op::Write, &[range(0, 64), range(64, 0)]);
        let outside = Range { len: 1 << 20, ..range(0, 0) };
        let refused = engine.submit(&target, Op::Write, &[outside]);
        assert!(
            matches!(refused, Err(Error::Range(RangeError::OutOfBounds { .. }))),
            "{refused:?}"
        );
    }
}
