//! Faults of other engines that the tests in `failures` do not try in full: mappings that are
//! reopened all the time, the caller's current device, memory of two allocations that touch, and
//! calls beside a wait. The numbers are those of the project's list of failure cases. What goes over
//! TCP is in `public_faults_tcp.rs`.

mod common;

use std::slice::from_ref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvferry_device::conformance::skip;
use kvferry_device::sim::{self, Fault, SimControl, SimOptions};
use kvferry_device::{Device, DeviceUuid, Export, Memory};
use kvferry_engine::{
    AllocationKey, Buffer, Engine, Error, Exports, ExportsError, Identity, Mismatch, Op, Probe,
    Range, RangeError, Segment, Side, State, Target,
};

use common::{NoExports, config};

const LONG: Duration = Duration::from_secs(60);

fn host() -> Arc<dyn Device> {
    kvferry_device::host().expect("always there")
}

fn engine(devices: &[Arc<dyn Device>], knobs: &[(&str, &str)]) -> Arc<Engine> {
    Engine::new(config(knobs), devices.to_vec()).expect("an engine")
}

fn direct(importer: &Engine, exporter: &Engine) -> Target {
    importer.open("direct", exporter.segment(), Arc::new(NoExports)).expect("opens")
}

fn finish(engine: &Engine, target: &Target, op: Op, ranges: &[Range]) -> State {
    let id = engine.submit(target, op, ranges).expect("submits");
    let status = engine.wait(id, LONG).expect("known");
    engine.release(id).expect("it ended");
    status.state
}

/// What the exporter hands out, counted.
#[derive(Debug)]
struct Counted {
    exporter: Arc<Engine>,
    fetched: AtomicUsize,
}

impl Exports for Counted {
    fn fetch(&self, key: AllocationKey) -> Result<Export, ExportsError> {
        self.fetched.fetch_add(1, Ordering::SeqCst);
        Ok(self.exporter.export(key)?)
    }

    fn probe(&self, _: DeviceUuid) -> Result<Probe, ExportsError> {
        Err("the knob says that nothing is proven".into())
    }

    fn prove(&self, _: AllocationKey, _: u64) -> Result<Option<Mismatch>, ExportsError> {
        Err("the knob says that nothing is proven".into())
    }
}

/// The exporter as if it ran in another process, so that its memory is mapped.
fn mapped(importer: &Engine, exporter: &Arc<Engine>) -> (Target, Arc<Counted>) {
    let exports =
        Arc::new(Counted { exporter: Arc::clone(exporter), fetched: AtomicUsize::new(0) });
    let other = Identity::random();
    let segment = Segment { incarnation: other, process: other, ..exporter.segment() };
    let target = importer.open("another process", segment, exports.clone()).expect("opens");
    (target, exports)
}

/// How often the memory at `addr` is mapped in this process, by its file.
fn mappings_of(addr: u64) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("linux");
    let inode = |line: &str| line.split_whitespace().nth(4).map(String::from);
    let holds = |line: &&str| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let number = |hex| u64::from_str_radix(hex, 16).ok();
        Some((number(start)?..number(end)?).contains(&addr))
    };
    let own = maps.lines().find(|line| holds(line) == Some(true)).and_then(inode);
    assert!(own.is_some(), "{addr:#x} is not mapped");
    maps.lines().filter(|line| inode(line) == own).count()
}

/// FAILURES.md B03: threads that read more allocations than are kept open find their bytes, and in
/// the end each mapping that was opened was closed once.
#[test]
fn threads_that_take_each_others_mappings_away_read_the_right_bytes_and_leave_one() {
    const PIECE: u64 = 64 << 10;
    const PIECES: u64 = 16;
    const REMOTES: usize = 24;
    let host = host();
    let knobs = [("MC_KVFERRY_MAX_MAPPINGS", "1"), ("MC_KVFERRY_PROOF", "off")];
    let (importer, exporter) = (engine(from_ref(&host), &knobs), engine(from_ref(&host), &[]));
    let remotes: Vec<Buffer> =
        (0..REMOTES).map(|_| exporter.allocate(&host, PIECE * PIECES).expect("memory")).collect();
    let byte = |at: usize, piece: u64| (at as u64 * PIECES + piece) as u8;
    for (at, remote) in remotes.iter().enumerate() {
        for piece in 0..PIECES {
            let bytes = vec![byte(at, piece); PIECE as usize];
            remote.write(piece * PIECE, &bytes).expect("inside");
        }
    }
    let (target, exports) = mapped(&importer, &exporter);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (importer, target, remotes, host) = (&importer, &target, &remotes, &host);
            scope.spawn(move || {
                let local = importer.allocate(host, PIECE).expect("memory");
                for piece in (0..PIECES).filter(|piece| piece % 4 == thread) {
                    for (at, remote) in remotes.iter().enumerate() {
                        let remote = remote.addr() + piece * PIECE;
                        let range = Range { local: local.addr(), remote, len: PIECE };
                        let state = finish(importer, target, Op::Read, &[range]);
                        assert_eq!(state, State::Completed);
                        let mut found = vec![0; PIECE as usize];
                        local.read(0, &mut found).expect("inside");
                        assert!(found.iter().all(|&found| found == byte(at, piece)));
                    }
                }
            });
        }
    });
    let fetched = exports.fetched.load(Ordering::SeqCst);
    assert!(fetched > 2 * REMOTES, "only {fetched} opened");
    // All batches have ended; the next mapping that is opened brings the number back to the limit.
    let local = importer.allocate(&host, PIECE).expect("memory");
    let range = Range { local: local.addr(), remote: remotes[0].addr(), len: PIECE };
    assert_eq!(finish(&importer, &target, Op::Read, &[range]), State::Completed);
    assert_eq!(target.open_count(), 1);
    let mapped = || remotes.iter().map(|remote| mappings_of(remote.addr()) - 1).sum::<usize>();
    assert_eq!(mapped(), 1, "each that was opened was closed once");
    drop(target);
    assert_eq!(mapped(), 0);
}

/// FAILURES.md B03: a read over 1 GiB opens its mapping once and closes it once.
#[test]
fn a_read_of_more_than_a_gibibyte_opens_one_mapping() {
    const LEN: u64 = (1 << 30) + 4099;
    let meminfo = std::fs::read_to_string("/proc/meminfo").expect("linux");
    let available = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let available = available.and_then(|kib| kib.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    if available.is_none_or(|kib| kib << 10 < 3 * LEN) {
        return skip("memory", &format!("{available:?} KiB are too few for two buffers"));
    }
    let host = host();
    // A busy machine takes a while for a single copy, and it is no stall.
    let patient = [("MC_KVFERRY_STALL_TIMEOUT_SEC", "3600"), ("MC_KVFERRY_PROOF", "off")];
    let (importer, exporter) = (engine(from_ref(&host), &patient), engine(from_ref(&host), &[]));
    let remote = exporter.allocate(&host, LEN).expect("memory");
    let local = importer.allocate(&host, LEN).expect("memory");
    let marks = [0, (1 << 30) - 1, 1 << 30, LEN - 1];
    for (mark, byte) in marks.into_iter().zip(1..) {
        remote.write(mark, &[byte]).expect("inside");
    }
    let (target, exports) = mapped(&importer, &exporter);
    let range = Range { local: local.addr(), remote: remote.addr(), len: LEN };
    assert_eq!(finish(&importer, &target, Op::Read, &[range]), State::Completed);
    for (mark, byte) in marks.into_iter().zip(1..) {
        let mut found = [0];
        local.read(mark, &mut found).expect("inside");
        assert_eq!(found, [byte], "byte {mark}");
    }
    assert_eq!((exports.fetched.load(Ordering::SeqCst), target.open_count()), (1, 1));
    assert_eq!(mappings_of(remote.addr()), 2);
    drop(target);
    assert_eq!(mappings_of(remote.addr()), 1);
}

/// Every call that touches a device, on memory of that one.
fn call_everything(
    engine: &Arc<Engine>,
    device: &Arc<dyn Device>,
    control: &Arc<SimControl>,
    same: &dyn Fn(&str),
) {
    let memory = Arc::clone(device).allocate(16 << 10);
    same("the device's own allocate");
    let Ok(memory) = memory else { return };
    // SAFETY: unregistered below, before `memory` is dropped; nobody else uses it.
    let registered = unsafe { engine.register(memory.addr(), memory.len()) };
    same("register");
    // SAFETY: refused, because the first one leaves the allocation.
    let list = unsafe { engine.register_all(&[(memory.addr(), memory.len() + 1), (1, 1)]) };
    assert!(list.is_err());
    same("register_all");
    let own = engine.local().expect("itself");
    let opened = engine.open("itself", engine.segment(), Arc::new(NoExports)).expect("opens");
    same("open");
    let exported: Vec<_> =
        engine.segment().allocations.iter().map(|it| engine.export(it.key)).collect();
    same("export");
    let loan = engine.lend(device.info().uuid).map(drop);
    same("lend");
    let stream = control.stream();
    let range = Range { local: memory.addr(), remote: memory.addr() + (8 << 10), len: 4096 };
    for target in [&own, &opened] {
        let id = engine.submit(target, Op::Write, &[range]);
        same("submit");
        let Ok(id) = id else { continue };
        use kvferry_device::conformance::ApplicationStream;
        // SAFETY: the stream lives longer than the call.
        let consumer = unsafe { kvferry_engine::Consumer::stream(stream.handle()) };
        let signalled = engine.signal(id, consumer);
        same("signal");
        let polled = engine.poll(id);
        same("poll");
        let waited = engine.wait(id, LONG);
        same("wait");
        let released = engine.release(id);
        same("release");
        drop((signalled, polled, waited, released));
    }
    let refused = engine.submit(&own, Op::Write, &[Range { len: 1 << 40, ..range }]);
    assert!(refused.is_err());
    same("a refused submit");
    drop((own, opened, exported, loan));
    same("dropping targets");
    if registered.is_ok() && engine.unregister(memory.addr()).is_err() {
        // Something may still copy: it is the process's for good.
        std::mem::forget(memory);
        return;
    }
    same("unregister");
    drop(memory);
    same("free");
}

/// FAILURES.md B13: of three devices the second is the caller's, and stays so after each call,
/// whichever driver call inside it fails.
#[test]
fn the_current_device_of_three_is_left_alone_by_every_call_whatever_fails_inside() {
    let simulated = |ordinal| sim::sim(&SimOptions { ordinal, ..SimOptions::default() });
    let inner = [
        "nothing",
        "enter",
        "allocate",
        "allocation",
        "prepare_export",
        "export",
        "free",
        "create_stream",
        "create_event",
        "record",
        "fired",
        "copy",
        "launch",
        "launch_inline",
        "signal_consumer",
    ];
    for fails in inner {
        for nth in 0..2 {
            sim::set_current_device(Some(1));
            let same = |what: &str| {
                assert_eq!(sim::current_device(), Some(1), "after {what}, {fails} {nth} failing");
            };
            let made: Vec<_> = (0..3).map(|at| simulated(at).expect("always there")).collect();
            same("opening devices");
            let devices: Vec<_> = made.iter().map(|(device, _)| Arc::clone(device)).collect();
            let unregister = [("MC_KVFERRY_UNREGISTER_TIMEOUT_SEC", "0")];
            let engine = engine(&devices, &unregister);
            same("Engine::new");
            let (device, control) = &made[2];
            let call_everything = |engine: &Arc<Engine>, same: &dyn Fn(&str)| {
                control.fail(fails, nth, Fault::Refused);
                call_everything(engine, device, control, same);
                control.forget_failures();
            };
            call_everything(&engine, &same);
            drop(engine);
            same("dropping the engine");
            // A thread without a device has none afterwards.
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let none = |what: &str| assert_eq!(sim::current_device(), None, "{what}");
                    let engine = self::engine(&devices, &unregister);
                    call_everything(&engine, &none);
                    drop(engine);
                    none("dropping the engine");
                });
            });
        }
    }
    sim::set_current_device(None);
}

/// Two allocations of a device, the second of which begins where the first ends.
fn neighbours(device: &Arc<dyn Device>, bytes: u64) -> [Memory; 2] {
    let mut memories: Vec<Memory> =
        (0..64).map(|_| Arc::clone(device).allocate(bytes).expect("memory")).collect();
    memories.sort_by_key(Memory::addr);
    let touch = |pair: &[Memory]| pair[0].addr() + pair[0].len() == pair[1].addr();
    let at = memories.windows(2).position(touch).expect("two of 64 touch");
    let second = memories.swap_remove(at + 1);
    [memories.swap_remove(at), second]
}

/// FAILURES.md B25: registered neighbours of two allocations are not one piece of memory, though
/// their addresses go on.
#[test]
fn a_range_across_two_allocations_that_touch_is_refused_at_either_end() {
    const LEN: u64 = 64 << 10;
    let simulated = sim::sim(&SimOptions::default()).expect("always there").0;
    for device in [host(), simulated] {
        let engine = engine(from_ref(&device), &[]);
        let [first, second] = neighbours(&device, LEN);
        let border = second.addr();
        for memory in [&first, &second] {
            // SAFETY: unregistered below, before the memory is dropped; nobody else uses it.
            unsafe { engine.register(memory.addr(), LEN) }.expect("registers");
        }
        let other = engine.allocate(&device, LEN).expect("memory");
        other.write(0, &[7; LEN as usize]).expect("inside");
        let target = direct(&engine, &engine);
        let across = border - 100;
        let good = Range { local: other.addr(), remote: first.addr(), len: 64 };
        for (side, bad) in [
            (Side::Remote, Range { local: other.addr() + 128, remote: across, len: 101 }),
            (Side::Local, Range { local: across, remote: other.addr() + 128, len: 101 }),
        ] {
            let before = read(&device, first.addr());
            for op in [Op::Write, Op::Read] {
                let refused = engine.submit(&target, op, &[good, bad]);
                let expected = RangeError::OutOfBounds {
                    index: 1,
                    side,
                    addr: across,
                    len: 101,
                    start: first.addr(),
                    region: LEN,
                    beyond: 1,
                };
                assert_eq!(refused, Err(Error::Range(expected)), "{op:?} on {}", device.info());
            }
            assert_eq!(read(&device, first.addr()), before, "a refused list moved bytes");
        }
        // Up to the border, and from it, is fine.
        let ranges = [
            Range { local: other.addr(), remote: across, len: 100 },
            Range { local: other.addr() + 100, remote: border, len: 1 },
        ];
        assert_eq!(finish(&engine, &target, Op::Write, &ranges), State::Completed);
        assert_eq!(
            (read(&device, across), read(&device, border)),
            ([7; 64], {
                let mut expected = [0; 64];
                expected[0] = 7;
                expected
            })
        );
        drop(target);
        for memory in [&first, &second] {
            engine.unregister(memory.addr()).expect("idle");
        }
    }
}

fn read(device: &Arc<dyn Device>, addr: u64) -> [u8; 64] {
    let mut bytes = [0; 64];
    // SAFETY: 64 bytes of memory of the caller's, which nothing writes now.
    unsafe { device.read(addr, &mut bytes) }.expect("reads");
    bytes
}

/// What this thread has used of a processor: who else runs on it does not count.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// FAILURES.md B36: what a round costs does not grow with the rounds before it.
#[test]
fn the_fiftieth_round_of_registering_thousands_of_views_takes_no_longer_than_the_first_ones() {
    const VIEWS: u64 = 4000;
    const BYTES: u64 = 200_000;
    let device = sim::sim(&SimOptions::default()).expect("always there").0;
    let engine = engine(from_ref(&device), &[]);
    let memory = Arc::clone(&device).allocate(VIEWS * BYTES).expect("memory");
    let views: Vec<u64> = (0..VIEWS).map(|at| memory.addr() + at * BYTES).collect();
    let rounds: Vec<Duration> = (0..50)
        .map(|round| {
            let start = processor_time();
            for &view in &views {
                // SAFETY: unregistered below, before `memory` is dropped.
                unsafe { engine.register(view, BYTES) }.expect("registers");
            }
            match round % 2 {
                0 => views.iter().for_each(|&view| engine.unregister(view).expect("idle")),
                _ => views.iter().rev().for_each(|&view| engine.unregister(view).expect("idle")),
            }
            processor_time() - start
        })
        .collect();
    // The quickest of ten, since others use this machine and its caches, too. In the report it was many
    // times more.
    let quickest = |rounds: &[Duration]| *rounds.iter().min().expect("ten of them");
    let (first, last) = (quickest(&rounds[..10]), quickest(&rounds[40..]));
    assert!(last < 4 * first, "{first:?} became {last:?}");
}

/// FAILURES.md B51: whoever waits for a batch holds no lock that another thread's call needs.
#[test]
fn a_wait_of_one_thread_holds_up_no_call_of_another() {
    let (device, control) = sim::sim(&SimOptions::default()).expect("always there");
    let host = host();
    let engine = engine(&[host.clone(), device.clone()], &[]);
    let buffer = engine.allocate(&device, 8192).expect("memory");
    let target = direct(&engine, &engine);
    let range = Range { local: buffer.addr(), remote: buffer.addr() + 4096, len: 4096 };
    control.hold();
    let id = engine.submit(&target, Op::Write, &[range]).expect("submits");
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| engine.wait(id, LONG).expect("known").state);
        for _ in 0..200 {
            let memory = engine.allocate(&host, 8192).expect("memory");
            let own = direct(&engine, &engine);
            let (local, remote) = (memory.addr(), memory.addr() + 4096);
            let moved = finish(&engine, &own, Op::Write, &[Range { local, remote, len: 4096 }]);
            assert_eq!(moved, State::Completed);
            assert_eq!(engine.poll(id).expect("known").state, State::Running);
        }
        assert!(!waits.is_finished(), "the batch ended although the device was held");
        control.release();
        assert_eq!(waits.join().expect("no panic"), State::Completed);
    });
}
