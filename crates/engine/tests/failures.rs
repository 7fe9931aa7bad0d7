//! Public failures of other engines as tests: the numbers are those of the project's list of
//! failure cases (B01 to B36). What needs a second process is in the workspace's
//! `tests/transport.rs`.

mod common;

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use kvferry_device::conformance::ApplicationStream;
use kvferry_device::sim::{self, Fault, Live, SimControl, SimOptions};
use kvferry_device::{Device, DeviceUuid, Error as DeviceError, Export, Memory};
use kvferry_engine::{
    AllocationKey, BatchId, Buffer, Copies, Engine, Error, Exports, ExportsError, Identity, Loan,
    Mismatch, Op, Paged, Pages, Part, Path, Probe, Producer, Range, RangeError, Segment, Side,
    State, Strided, SubmitOptions, Target,
};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

use common::{NoExports, config};

const LONG: Duration = Duration::from_secs(60);

fn engine_on(devices: Vec<Arc<dyn Device>>) -> Arc<Engine> {
    Engine::new(config(&[]), devices).expect("an engine")
}

fn simulated(ordinal: u32) -> (Arc<dyn Device>, Arc<SimControl>) {
    sim::sim(&SimOptions { ordinal, ..SimOptions::default() }).expect("always there")
}

/// Hands out an engine's exports and counts them, without those of proofs.
#[derive(Debug)]
struct Counted {
    engine: Arc<Engine>,
    fetched: AtomicUsize,
    proven: AtomicUsize,
    loans: Mutex<Vec<Loan>>,
}

impl Counted {
    fn of(engine: &Arc<Engine>) -> Arc<Self> {
        Arc::new(Self {
            engine: Arc::clone(engine),
            fetched: AtomicUsize::new(0),
            proven: AtomicUsize::new(0),
            loans: Mutex::default(),
        })
    }

    fn lent(&self, key: AllocationKey) -> Option<usize> {
        let loans = self.loans.lock().expect("no panic");
        loans.iter().position(|loan| loan.probe().allocation == key)
    }
}

impl Exports for Counted {
    fn fetch(&self, key: AllocationKey) -> Result<Export, ExportsError> {
        let counts = usize::from(self.lent(key).is_none());
        self.fetched.fetch_add(counts, Ordering::SeqCst);
        Ok(self.engine.export(key)?)
    }

    fn probe(&self, device: DeviceUuid) -> Result<Probe, ExportsError> {
        let loan = self.engine.lend(device)?;
        let probe = loan.probe();
        self.loans.lock().expect("no panic").push(loan);
        Ok(probe)
    }

    fn prove(&self, key: AllocationKey, seed: u64) -> Result<Option<Mismatch>, ExportsError> {
        self.proven.fetch_add(1, Ordering::SeqCst);
        let at = self.lent(key).ok_or("not lent")?;
        let loan = self.loans.lock().expect("no panic").swap_remove(at);
        Ok(loan.compare(seed)?)
    }
}

fn direct(importer: &Engine, exporter: &Engine) -> Target {
    importer.open("direct", exporter.segment(), Arc::new(NoExports)).expect("opens")
}

/// The segment as if its engine ran in another process, so that it is mapped and not used
/// directly. Host memory allows that in one process.
fn foreign(segment: &Segment, incarnation: Identity) -> Segment {
    Segment { incarnation, process: incarnation, ..segment.clone() }
}

struct Foreign {
    target: Target,
    exports: Arc<Counted>,
    incarnation: Identity,
}

fn map_foreign(importer: &Engine, exporter: &Arc<Engine>) -> Foreign {
    let exports = Counted::of(exporter);
    let incarnation = Identity::random();
    let target = importer
        .open("foreign", foreign(&exporter.segment(), incarnation), exports.clone())
        .expect("opens");
    Foreign { target, exports, incarnation }
}

fn finish(engine: &Engine, id: BatchId) -> State {
    let status = engine.wait(id, LONG).expect("known");
    assert_ne!(status.state, State::Running, "the batch never ended");
    engine.release(id).expect("it ended");
    status.state
}

fn transfer(engine: &Engine, target: &Target, op: Op, ranges: &[Range]) {
    let id = engine.submit(target, op, ranges).expect("submits");
    assert_eq!(finish(engine, id), State::Completed);
}

fn bytes(buffer: &Buffer, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    buffer.read(offset, &mut bytes).expect("inside");
    bytes
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u64).wrapping_mul(0x9E37_79B9) as u8 ^ seed).collect()
}

fn host_pair() -> (Arc<Engine>, Arc<Engine>, Arc<dyn Device>) {
    let host = kvferry_device::host().expect("always there");
    (engine_on(vec![host.clone()]), engine_on(vec![host.clone()]), host)
}

#[test]
fn b01_views_of_one_allocation_are_read_at_their_own_offsets() {
    let (importer, exporter, host) = host_pair();
    let memory = Arc::clone(&host).allocate(8 << 20).expect("memory");
    // Four views of a MiB; the small tensors of a caching allocator; one at an odd byte.
    let mib = 1 << 20;
    let views = [
        (0, mib),
        (mib, mib),
        (2 * mib, mib),
        (3 * mib, mib),
        (4 * mib, 64),
        (4 * mib + 512, 16 << 10),
        (5 * mib, 128 << 10),
        (6 * mib, 512 << 10),
        (7 * mib + 13, 999),
    ];
    for (at, &(offset, len)) in views.iter().enumerate() {
        // SAFETY: `memory` outlives both engines' use of it: regions are unregistered below.
        unsafe {
            host.write(memory.addr() + offset, &vec![at as u8 + 1; len as usize]).expect("writes");
            exporter.register(memory.addr() + offset, len).expect("registers");
        }
    }
    let Foreign { target, exports, .. } = map_foreign(&importer, &exporter);
    let local = importer.allocate(&host, mib).expect("memory");
    for (at, &(offset, len)) in views.iter().enumerate() {
        transfer(
            &importer,
            &target,
            Op::Read,
            &[Range { local: local.addr(), remote: memory.addr() + offset, len }],
        );
        assert_eq!(bytes(&local, 0, len as usize), vec![at as u8 + 1; len as usize], "view {at}");
    }
    assert_eq!(exports.fetched.load(Ordering::SeqCst), 1, "one mapping serves all views");
    // SAFETY: refused, so nothing is promised.
    let leaves = unsafe { exporter.register(memory.addr() + (8 << 20) - 10, 11) };
    assert!(matches!(leaves, Err(Error::LeavesAllocation { .. })), "{leaves:?}");
    drop(target);
    for (offset, _) in views {
        exporter.unregister(memory.addr() + offset).expect("idle");
    }
}

#[test]
fn b03_an_allocation_is_opened_once_for_many_reads_and_closed_after_the_last() {
    let (importer, exporter, host) = host_pair();
    let remote = exporter.allocate(&host, 64 << 16).expect("memory");
    remote.write(0, &pattern(64 << 16, 3)).expect("inside");
    let Foreign { target, exports, .. } = map_foreign(&importer, &exporter);
    let local = importer.allocate(&host, 64 << 16).expect("memory");
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (importer, target, local, remote) = (&importer, &target, &local, &remote);
            scope.spawn(move || {
                for at in (thread * 8)..(thread * 8 + 8) {
                    let range = Range {
                        local: local.addr() + (at << 16),
                        remote: remote.addr() + (at << 16),
                        len: 1 << 16,
                    };
                    transfer(importer, target, Op::Read, &[range]);
                }
            });
        }
    });
    assert_eq!(bytes(&local, 0, 64 << 16), pattern(64 << 16, 3));
    assert_eq!((exports.fetched.load(Ordering::SeqCst), target.open_count()), (1, 1));
}

#[test]
fn b04_memory_that_was_freed_and_reallocated_at_one_address_is_never_stale() {
    let (importer, exporter, host) = host_pair();
    let local = importer.allocate(&host, 8 << 20).expect("memory");
    let first = exporter.allocate(&host, 4096).expect("memory");
    let Foreign { target, incarnation, .. } = map_foreign(&importer, &exporter);
    drop(first);
    let mut reused = 0;
    let mut seen = HashSet::new();
    for round in 0..100u64 {
        let pages = match round {
            0..33 => round + 1,
            33..66 => 67 - round,
            _ => round.wrapping_mul(7919) % 37 + 1,
        };
        let len = pages * (64 << 10);
        let remote = exporter.allocate(&host, len).expect("memory");
        reused += usize::from(!seen.insert(remote.addr()));
        remote.write(0, &vec![round as u8; len as usize]).expect("inside");
        target.refresh(foreign(&exporter.segment(), incarnation)).expect("the same engine");
        transfer(
            &importer,
            &target,
            Op::Read,
            &[Range { local: local.addr(), remote: remote.addr(), len }],
        );
        assert_eq!(
            bytes(&local, 0, len as usize),
            vec![round as u8; len as usize],
            "round {round}"
        );
        assert_eq!(target.open_count(), 1, "the mapping of the round before is gone");
    }
    assert!(reused > 0, "no address came again: the test shows nothing");
}

#[test]
fn b05_two_engines_of_one_process_use_each_others_memory_directly() {
    let (device, control) = simulated(0);
    let (a, b) = (engine_on(vec![device.clone()]), engine_on(vec![device.clone()]));
    let (from, to) =
        (a.allocate(&device, 4096).expect("memory"), b.allocate(&device, 4096).expect("memory"));
    from.write(0, &pattern(4096, 5)).expect("inside");
    let target = direct(&a, &b);
    for current in [None, Some(0), Some(1)] {
        sim::set_current_device(current);
        to.write(0, &[0; 4096]).expect("inside");
        transfer(
            &a,
            &target,
            Op::Write,
            &[Range { local: from.addr(), remote: to.addr(), len: 4096 }],
        );
        assert_eq!(bytes(&to, 0, 4096), pattern(4096, 5), "current device {current:?}");
    }
    sim::set_current_device(None);
    assert_eq!(control.calls("open"), 0, "no handle is opened in the process that made it");
    drop(to);
    drop(b);
    let gone =
        a.submit(&target, Op::Write, &[Range { local: from.addr(), remote: 1 << 40, len: 1 }]);
    assert!(matches!(gone, Err(Error::PeerLost { .. })), "{gone:?}");
}

/// Memory at both ends of a list, and what it must hold.
struct Ends<'a> {
    locals: [&'a Buffer; 2],
    remotes: [&'a Buffer; 2],
}

impl Ends<'_> {
    /// Fills all memory, copies, and compares every byte.
    fn copy<'a>(
        &self,
        engine: &Engine,
        target: &'a Target,
        op: Op,
        copies: impl Into<Copies<'a>>,
        ranges: &[Range],
        options: &SubmitOptions,
    ) -> Path {
        let buffers = || self.locals.iter().chain(&self.remotes);
        let mut expected: Vec<Vec<u8>> =
            (1..).map(|seed| pattern(ENDS as usize, seed)).take(4).collect();
        for (buffer, bytes) in buffers().zip(&expected) {
            buffer.write(0, bytes).expect("inside");
        }
        for &Range { local, remote, len } in ranges {
            let place = |addr: u64| {
                let inside =
                    |buffer: &&Buffer| (buffer.addr()..buffer.addr() + ENDS).contains(&addr);
                let at = buffers().position(inside).expect("in one of them");
                (at, (addr - buffers().nth(at).expect("found").addr()) as usize)
            };
            let (from, to) = match op {
                Op::Write => (place(local), place(remote)),
                Op::Read => (place(remote), place(local)),
            };
            let bytes = expected[from.0][from.1..][..len as usize].to_vec();
            expected[to.0][to.1..][..len as usize].copy_from_slice(&bytes);
        }
        let part = Part { target, op, copies: copies.into() };
        let id = engine.submit_parts(&[part], options).expect("submits");
        let path = engine.poll(id).expect("known").path;
        assert_eq!(finish(engine, id), State::Completed);
        for (at, (buffer, expected)) in buffers().zip(&expected).enumerate() {
            assert!(bytes(buffer, 0, ENDS as usize) == *expected, "buffer {at} is wrong");
        }
        path
    }
}

/// Bytes of each buffer of [`Ends`].
const ENDS: u64 = (1 << 20) + (1 << 19) + 77;

#[test]
fn b18_host_and_gpu_memory_of_one_process_are_copied_both_ways_whichever_end_is_which() {
    let (gpu, control) = simulated(0);
    let host = kvferry_device::host().expect("always there");
    let engine = engine_on(vec![host.clone(), gpu.clone()]);
    let other = engine_on(vec![host.clone(), gpu.clone()]);
    let of_host = |device: &Arc<dyn Device>| Arc::ptr_eq(device, &host);
    let buffers = |engine: &Arc<Engine>, device: &Arc<dyn Device>| {
        [0; 2].map(|_| engine.allocate(device, ENDS).expect("memory"))
    };
    for (here, there) in [(&host, &host), (&host, &gpu), (&gpu, &host), (&gpu, &gpu)] {
        let (locals, remotes) = (buffers(&engine, here), buffers(&other, there));
        let ends = Ends { locals: locals.each_ref(), remotes: remotes.each_ref() };
        let target = direct(&engine, &other);
        // All lengths at odd offsets, by turns in both buffers of both ends.
        let lengths = [1, 2, 3, 63, 64, 65, 4095, 4097, 65_537, 1 << 20];
        let mut next = 1;
        let long = lengths.iter().enumerate().map(|(at, &len)| {
            let offset = if len == 1 << 20 { 200_001 } else { next };
            next += len + 6;
            let (local, remote) = (locals[at / 2 % 2].addr(), remotes[at % 2].addr());
            Range { local: local + offset, remote: remote + offset + 2, len }
        });
        let long: Vec<Range> = long.collect();
        let spread = |buffer: usize, len: u64| -> Vec<Range> {
            let (local, remote) = (locals[buffer].addr() + 13, remotes[buffer].addr() + 7);
            let range = |at: u64| Range { local: local + at * 523, remote: remote + at * 541, len };
            (0..700).map(range).collect()
        };
        // In each window of both ends a plain list, and one that is a run.
        let mut lists = vec![long];
        for buffer in [0, 1] {
            let mut scattered = spread(buffer, 211);
            scattered.shuffle(&mut SmallRng::seed_from_u64(18));
            lists.extend([scattered, spread(buffer, 512)]);
        }
        let strided = Strided {
            local: locals[1].addr() + 3,
            remote: remotes[0].addr() + 5,
            len: 999,
            count: 300,
            local_stride: 1003,
            remote_stride: 1100,
        };
        let numbers: Vec<u32> = vec![5, 1, 9, 2, 0];
        let pages = |addr: u64| Pages::whole(addr, &numbers, 2112, 30_000);
        let paged =
            Paged::whole_pages(pages(locals[1].addr() + 1), pages(remotes[1].addr() + 1), 7, 2111);
        for op in [Op::Write, Op::Read] {
            for without_kernel in [false, true] {
                let options = SubmitOptions { without_kernel, ..SubmitOptions::default() };
                let mut path = Path::None;
                for list in &lists {
                    path = ends.copy(&engine, &target, op, list, list, &options);
                }
                let forms = [strided];
                let pieces: Vec<Range> = strided.pieces().collect();
                ends.copy(&engine, &target, op, &forms, &pieces, &options);
                let forms = [paged];
                let pieces: Vec<Range> = paged.pieces().collect();
                ends.copy(&engine, &target, op, &forms, &pieces, &options);
                let by_processor = of_host(here) && of_host(there);
                assert_eq!(path == Path::Memcpy, by_processor, "{here:?} to {there:?}: {path}");
            }
        }
        let across = of_host(here) != of_host(there);
        let locks = if across { locals.len() as u64 } else { 0 };
        assert_eq!(control.live(Live::HostMappings), locks, "one a buffer of host memory");
        drop((locals, remotes));
        assert_eq!(control.live(Live::HostMappings), 0);
    }
}

#[test]
fn host_memory_is_locked_once_for_all_threads_and_regions_until_the_last_region_is_idle_and_gone() {
    let (gpu, control) = simulated(0);
    let host = kvferry_device::host().expect("always there");
    let engine = engine_on(vec![host.clone(), gpu.clone()]);
    let memory = Arc::clone(&host).allocate(1 << 16).expect("memory");
    let regions = [memory.addr(), memory.addr() + (1 << 15)];
    for addr in regions {
        // SAFETY: unregistered below, before `memory` is dropped.
        unsafe { engine.register(addr, 1 << 14) }.expect("registers");
    }
    let remote = engine.allocate(&gpu, 1 << 16).expect("memory");
    let target = direct(&engine, &engine);
    let range = |thread: u64| Range {
        local: regions[thread as usize % 2] + thread * 100,
        remote: remote.addr() + thread * 100,
        len: 99,
    };
    // A lock that fails refuses the batch, and the next one tries again.
    control.fail("map_host", 0, Fault::OutOfMemory);
    let refused = engine.submit(&target, Op::Write, &[range(0)]);
    assert!(matches!(refused, Err(Error::Device(DeviceError::OutOfMemory { .. }))), "{refused:?}");
    let barrier = Barrier::new(32);
    std::thread::scope(|scope| {
        for thread in 0..32 {
            let (engine, target, barrier, range) = (&engine, &target, &barrier, &range);
            scope.spawn(move || {
                barrier.wait();
                transfer(engine, target, Op::Write, &[range(thread)]);
            });
        }
    });
    assert_eq!((control.calls("map_host"), control.live(Live::HostMappings)), (2, 1));
    engine.unregister(regions[0]).expect("idle");
    assert_eq!(control.live(Live::HostMappings), 1, "the other region is there");
    control.hold();
    let id = engine.submit(&target, Op::Read, &[range(1)]).expect("submits");
    std::thread::scope(|scope| {
        let unregister = scope.spawn(|| engine.unregister(regions[1]));
        while engine.segment().regions.len() > 1 {
            std::thread::yield_now();
        }
        assert_eq!(control.live(Live::HostMappings), 1, "a batch uses it");
        control.release();
        unregister.join().expect("no panic").expect("the batch ended");
    });
    assert_eq!(control.live(Live::HostMappings), 0, "unregistered memory is not locked");
    assert_eq!(finish(&engine, id), State::Completed);
}

#[test]
fn b18_host_memory_and_a_gpu_that_no_gpu_of_the_engine_reaches_are_refused_by_name() {
    let host = kvferry_device::host().expect("always there");
    let ((zero, control), (one, _), (two, _)) = (simulated(0), simulated(1), simulated(2));
    let owner = engine_on(vec![host.clone(), one.clone(), two.clone()]);
    let theirs = [&one, &two].map(|gpu| owner.allocate(gpu, 4096).expect("memory"));
    let submit = |devices: Vec<Arc<dyn Device>>, remotes: &[&Buffer]| {
        let engine = engine_on(devices);
        let local = engine.allocate(&host, 4096).expect("memory");
        let target = direct(&engine, &owner);
        let range = |(at, remote): (usize, &&Buffer)| Range {
            local: local.addr() + at as u64 * 100,
            remote: remote.addr(),
            len: 100,
        };
        let ranges: Vec<Range> = remotes.iter().enumerate().map(range).collect();
        let id = engine.submit(&target, Op::Write, &ranges)?;
        assert_eq!(finish(&engine, id), State::Completed);
        Ok(())
    };
    let [first, second] = &theirs;
    let unreachable = |refused: Result<(), Error>, owners: &[&Arc<dyn Device>]| {
        let named = |remote: &str| owners.iter().any(|one| one.info().uuid.to_string() == remote);
        assert!(
            matches!(&refused, Err(Error::Unreachable { device, remote, .. })
                if device == "host:0" && named(remote)),
            "{refused:?}"
        );
    };
    unreachable(submit(vec![host.clone()], &[first]), &[&one]);
    unreachable(submit(vec![host.clone(), zero.clone()], &[first]), &[&one]);
    unreachable(submit(vec![host.clone(), zero.clone(), one.clone()], &[second]), &[&two]);
    // Each alone is reached, and not both by one.
    let both = submit(vec![host.clone(), one.clone(), two.clone()], &[first, second]);
    unreachable(both, &[&one, &two]);
    assert_eq!(control.calls("map_host"), 0, "nothing is locked for a copy that is refused");
    submit(vec![host.clone(), zero.clone(), one.clone()], &[first]).expect("by the owner");
}

#[test]
fn parts_from_host_memory_to_several_kinds_of_memory_are_refused_by_name() {
    let (gpu, _control) = simulated(0);
    let host = kvferry_device::host().expect("always there");
    let engine = engine_on(vec![host.clone(), gpu.clone()]);
    let [local, pages] = [0; 2].map(|_| engine.allocate(&host, 4096).expect("memory"));
    let memory = engine.allocate(&gpu, 4096).expect("memory");
    let target = direct(&engine, &engine);
    let range = |remote: &Buffer| [Range { local: local.addr(), remote: remote.addr(), len: 9 }];
    let (to_host, to_gpu) = (range(&pages), range(&memory));
    let part = |ranges| Part { target: &target, op: Op::Write, copies: Copies::Ranges(ranges) };
    let parts = [part(&to_host), part(&to_gpu)];
    let refused = engine.submit_parts(&parts, &SubmitOptions::default());
    let (device, first) = ("sim:0".into(), "host:0".into());
    assert_eq!(refused, Err(Error::MixedParts { part: 1, device, first }));
}

#[test]
fn a_peer_that_claims_to_be_this_process_does_not_get_its_addresses_used() {
    let (importer, exporter, host) = host_pair();
    let secret = exporter.allocate(&host, 4096).expect("memory");
    let local = importer.allocate(&host, 4096).expect("memory");
    // A forged segment: our process, an engine that does not exist, an address that is valid here.
    let forged = Segment { incarnation: Identity::random(), ..exporter.segment() };
    let target = importer.open("forger", forged, Arc::new(NoExports)).expect("opens");
    let range = Range { local: local.addr(), remote: secret.addr(), len: 4096 };
    let refused = importer.submit(&target, Op::Read, &[range]);
    assert!(matches!(refused, Err(Error::ProbeRefused { .. })), "{refused:?}");
}

#[test]
fn b08_one_allocation_is_exported_once_however_many_views_are_registered() {
    let (device, control) = simulated(0);
    let engine = engine_on(vec![device.clone()]);
    let memory = Arc::clone(&device).allocate(10_000 * 4096).expect("memory");
    let view = |at: u64| memory.addr() + at * 4096;
    for at in 0..10_000 {
        // SAFETY: unregistered before `memory` is dropped.
        unsafe { engine.register(view(at), 4096) }.expect("registers");
    }
    assert_eq!(control.calls("export"), 1);
    let key = engine.segment().allocations[0].key;
    for _ in 0..10_000 {
        engine.export(key).expect("hands out");
    }
    assert_eq!(control.calls("export"), 1, "peers get the export that was made once");
    (0..10_000).for_each(|at| engine.unregister(view(at)).expect("idle"));
    assert!(matches!(engine.export(key), Err(Error::UnknownAllocation { .. })));
}

#[test]
fn b09_thirty_two_threads_that_race_to_the_first_use_open_once() {
    let (importer, exporter, host) = host_pair();
    let remote = exporter.allocate(&host, 1 << 20).expect("memory");
    let local = importer.allocate(&host, 1 << 20).expect("memory");
    for round in 0..50 {
        let Foreign { target, exports, .. } = map_foreign(&importer, &exporter);
        let barrier = Barrier::new(32);
        std::thread::scope(|scope| {
            for thread in 0..32u64 {
                let (importer, target, barrier, local, remote) =
                    (&importer, &target, &barrier, &local, &remote);
                scope.spawn(move || {
                    barrier.wait();
                    let at = thread * 1024;
                    transfer(
                        importer,
                        target,
                        Op::Read,
                        &[Range {
                            local: local.addr() + at,
                            remote: remote.addr() + at,
                            len: 1024,
                        }],
                    );
                });
            }
        });
        let counts = [&exports.fetched, &exports.proven].map(|count| count.load(Ordering::SeqCst));
        assert_eq!(counts, [1, 1], "round {round}: one open and one proof");
    }
}

#[test]
fn a_loan_that_was_given_back_is_lent_again_and_one_that_was_not_is_freed() {
    let (device, control) = simulated(0);
    let engine = engine_on(vec![device.clone()]);
    let uuid = device.info().uuid;
    let lend = || engine.lend(uuid).expect("lends");
    let first = lend();
    let Probe { allocation, seed } = first.probe();
    assert!(engine.export(allocation).is_ok());
    assert_eq!(engine.segment().allocations, [], "no peer may use it for a transfer");
    assert_eq!(first.compare(seed), Ok(None), "nobody wrote");
    let second = lend();
    assert_eq!(second.probe().allocation, allocation);
    assert_ne!(second.probe().seed, seed);
    let other = lend();
    assert_ne!(other.probe().allocation, allocation);
    assert_eq!(control.live(Live::Allocations), 2);
    drop(second);
    assert_eq!(control.live(Live::Allocations), 1);
    assert!(matches!(engine.export(allocation), Err(Error::UnknownAllocation { .. })));
    let wrong = other.compare(seed).expect("readable").expect("of another seed");
    assert_ne!(wrong.expected, wrong.found);
    let unknown = engine.lend(DeviceUuid([7; 16])).map(drop);
    assert!(
        matches!(&unknown, Err(Error::UnknownDevice { devices, .. }) if devices == "sim:0"),
        "{unknown:?}"
    );
    drop(engine);
    assert_eq!(control.live(Live::Allocations), 0);
}

#[test]
fn b17_slices_of_one_gpu_are_two_devices_though_they_share_a_pci_address() {
    let (whole, _) = simulated(0);
    let options = SimOptions { ordinal: 1, slice_of: Some(0), ..SimOptions::default() };
    let (slice, _) = sim::sim(&options).expect("always there");
    assert_eq!(whole.info().pci_bus_id, slice.info().pci_bus_id);
    let (a, b) = (engine_on(vec![whole.clone()]), engine_on(vec![slice.clone()]));
    let local = a.allocate(&whole, 4096).expect("memory");
    let remote = b.allocate(&slice, 4096).expect("memory");
    let range = Range { local: local.addr(), remote: remote.addr(), len: 4096 };
    let refused = a.submit(&direct(&a, &b), Op::Write, &[range]);
    let named = slice.info().uuid.to_string();
    assert!(
        matches!(&refused, Err(Error::Unreachable { remote, .. }) if *remote == named),
        "{refused:?}"
    );
}

#[test]
fn b10_every_call_works_on_its_own_fresh_thread_and_leaves_it_without_a_device() {
    fn fresh<R: Send>(call: impl FnOnce() -> R + Send) -> R {
        std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    assert_eq!(sim::current_device(), None);
                    let result = call();
                    assert_eq!(sim::current_device(), None, "the call left a device current");
                    result
                })
                .join()
                .expect("works on a fresh thread")
        })
    }
    let (device, _control) = fresh(|| simulated(3));
    let engine = fresh(|| engine_on(vec![device.clone()]));
    let buffer = fresh(|| engine.allocate(&device, 8192).expect("memory"));
    let target = fresh(|| direct(&engine, &engine));
    let range = Range { local: buffer.addr(), remote: buffer.addr() + 4096, len: 4096 };
    let id = fresh(|| engine.submit(&target, Op::Write, &[range]).expect("submits"));
    fresh(|| engine.wait(id, LONG).expect("known"));
    fresh(|| engine.release(id).expect("ended"));
    fresh(|| drop(buffer));
    fresh(|| drop((engine, target, device)));
}

#[test]
fn b13_the_callers_current_device_survives_every_call_good_or_bad() {
    let (device, control) = simulated(0);
    sim::set_current_device(Some(1));
    let same = |what: &str| assert_eq!(sim::current_device(), Some(1), "after {what}");
    let engine = engine_on(vec![device.clone()]);
    same("Engine::new");
    let buffer = engine.allocate(&device, 8192).expect("memory");
    same("allocate");
    let target = direct(&engine, &engine);
    same("open");
    let range = Range { local: buffer.addr(), remote: buffer.addr() + 4096, len: 4096 };
    for call in ["enter", "copy", "record", "fired"] {
        control.fail(call, 0, Fault::Refused);
        let _ = engine.submit(&target, Op::Write, &[range]).map(|id| engine.wait(id, LONG));
        same(call);
    }
    let bad = engine.submit(&target, Op::Write, &[Range { len: 1 << 40, ..range }]);
    assert!(bad.is_err());
    same("a refused submit");
    drop(buffer);
    same("unregister and free");
    drop(engine);
    same("drop");
    sim::set_current_device(None);
}

#[test]
fn b14_work_goes_to_the_device_of_the_memory_and_nothing_to_device_zero() {
    let (zero, zero_control) = simulated(0);
    let (three, _) = simulated(3);
    let engine = engine_on(vec![zero, three.clone()]);
    let buffer = engine.allocate(&three, 1 << 20).expect("memory");
    buffer.write(0, &pattern(1 << 19, 1)).expect("inside");
    let target = direct(&engine, &engine);
    let idle = ["launch", "copy", "record", "allocate"].map(|call| zero_control.calls(call));
    let ranges: Vec<Range> = (0..100)
        .map(|at| {
            let offset = at * 5000;
            Range {
                local: buffer.addr() + offset,
                remote: buffer.addr() + (1 << 19) + offset,
                len: 4096,
            }
        })
        .collect();
    std::thread::scope(|scope| {
        scope.spawn(|| transfer(&engine, &target, Op::Write, &ranges)).join()
    })
    .expect("works");
    for at in 0..100 {
        assert_eq!(
            bytes(&buffer, (1 << 19) + at * 5000, 4096),
            pattern(1 << 19, 1)[at as usize * 5000..][..4096]
        );
    }
    assert_eq!(["launch", "copy", "record", "allocate"].map(|call| zero_control.calls(call)), idle);
}

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

#[test]
fn b32_a_device_without_progress_ends_its_batches_and_one_with_progress_never_does() {
    let (device, control) = simulated(0);
    let engine = Engine::new(
        config(&[
            ("MC_KVFERRY_STALL_TIMEOUT_SEC", "1"),
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
fn b33_a_region_that_is_registered_twice_is_refused_and_nothing_is_freed_twice() {
    let (_, engine, host) = host_pair();
    let memory = Arc::clone(&host).allocate(64 << 10).expect("memory");
    let (addr, len) = (memory.addr(), 32 << 10);
    // SAFETY: everything is unregistered before `memory` is dropped.
    let register = |addr, len| unsafe { engine.register(addr, len) };
    let twice = |new_addr: u64, new_len: u64| {
        Err(Error::AlreadyRegistered { addr: new_addr, len: new_len, start: addr, region: len })
    };
    assert_eq!(register(addr, len), Ok(()));
    assert_eq!(register(addr, len), twice(addr, len));
    assert_eq!(register(addr + 4096, 2048), twice(addr + 4096, 2048));
    assert_eq!(register(addr + len - 1, 2), twice(addr + len - 1, 2));
    assert_eq!(engine.unregister(addr), Ok(()));
    assert_eq!(engine.unregister(addr), Err(Error::UnknownRegion { addr }));
    assert_eq!(engine.unregister(addr + 1), Err(Error::UnknownRegion { addr: addr + 1 }));
    // Two threads at once: one wins.
    for _ in 0..100 {
        let barrier = Barrier::new(2);
        let wins = std::thread::scope(|scope| {
            let racers: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        barrier.wait();
                        register(addr, len).is_ok()
                    })
                })
                .collect();
            racers.into_iter().filter_map(|racer| racer.join().ok()).filter(|&won| won).count()
        });
        assert_eq!(wins, 1);
        assert_eq!(engine.unregister(addr), Ok(()));
    }
    assert_eq!(engine.segment().allocations, []);
}

#[test]
fn b34_a_list_of_regions_is_registered_whole_or_not_at_all() {
    let (device, control) = simulated(0);
    let engine = engine_on(vec![device.clone()]);
    let memories: Vec<Memory> =
        (0..10).map(|_| Arc::clone(&device).allocate(4096).expect("memory")).collect();
    let list: Vec<_> = memories.iter().map(|memory| (memory.addr(), 4096)).collect();
    control.fail("export", 6, Fault::Refused);
    // SAFETY: unregistered before the memories are dropped.
    let failed = unsafe { engine.register_all(&list) };
    assert!(matches!(&failed, Err(Error::RegionOfList { index: 6, .. })), "{failed:?}");
    assert_eq!(engine.segment().regions, []);
    // SAFETY: as above.
    unsafe { engine.register_all(&list) }.expect("works now");
    assert_eq!(engine.segment().regions.len(), 10);
    list.iter().for_each(|&(addr, _)| engine.unregister(addr).expect("idle"));
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

#[test]
fn b36_ten_thousand_views_register_and_unregister_in_any_order_with_one_export() {
    let (device, control) = simulated(0);
    let engine = engine_on(vec![device.clone()]);
    let memory = Arc::clone(&device).allocate(10_000 * 200_000).expect("memory");
    let mut views: Vec<u64> = (0..10_000).map(|at| memory.addr() + at * 200_000).collect();
    let mut random = SmallRng::seed_from_u64(1);
    for round in 0..9u64 {
        for &view in &views {
            // SAFETY: unregistered below, before `memory` is dropped.
            unsafe { engine.register(view, 200_000) }.expect("registers");
        }
        assert_eq!(control.calls("export"), round + 1);
        match round % 3 {
            0 => {}
            1 => views.reverse(),
            _ => views.shuffle(&mut random),
        }
        views.iter().for_each(|&view| engine.unregister(view).expect("idle"));
    }
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
        sim::sim(&SimOptions { kernel, ..SimOptions::default() }).expect("always there");
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
}

#[test]
fn unregistering_waits_for_batches_in_flight_and_new_ones_do_not_find_the_region() {
    let (device, control) = simulated(0);
    let engine = engine_on(vec![device.clone()]);
    let (used, other) = (
        engine.allocate(&device, 8192).expect("memory"),
        engine.allocate(&device, 8192).expect("memory"),
    );
    let target = direct(&engine, &engine);
    let range =
        |buffer: &Buffer| Range { local: buffer.addr(), remote: buffer.addr() + 4096, len: 4096 };
    control.hold();
    let id = engine.submit(&target, Op::Write, &[range(&used)]).expect("submits");
    // A region that no batch uses goes at once.
    engine.unregister(other.addr()).expect("idle");
    std::thread::scope(|scope| {
        let unregister = scope.spawn(|| engine.unregister(used.addr()));
        while !engine.segment().regions.is_empty() {
            std::thread::yield_now();
        }
        assert!(matches!(
            engine.submit(&target, Op::Write, &[range(&used)]),
            Err(Error::Range(RangeError::NotRegistered { .. }))
        ));
        assert!(!unregister.is_finished(), "it returned while a batch was running");
        control.release();
        unregister.join().expect("no panic").expect("the batch ended");
    });
    assert_eq!(engine.poll(id).map(|status| status.state), Ok(State::Completed));
    // The buffers' own unregistration finds nothing; free what they leaked.
    for buffer in [&used, &other] {
        // SAFETY: the memory is theirs for the rest of the process.
        unsafe { engine.register(buffer.addr(), 8192) }.expect("registers again");
    }
}

#[test]
fn ranges_on_two_devices_are_refused_by_name() {
    let ((zero, _), (one, _)) = (simulated(0), simulated(1));
    let engine = engine_on(vec![zero.clone(), one.clone()]);
    let (a, b) = (
        engine.allocate(&zero, 8192).expect("memory"),
        engine.allocate(&one, 8192).expect("memory"),
    );
    let target = direct(&engine, &engine);
    let within =
        |buffer: &Buffer| Range { local: buffer.addr(), remote: buffer.addr() + 4096, len: 10 };
    let mixed = engine.submit(&target, Op::Write, &[within(&a), within(&b)]);
    assert_eq!(
        mixed,
        Err(RangeError::MixedDevices { index: 1, device: "sim:1".into(), first: "sim:0".into() }
            .into())
    );
    let across = Range { local: a.addr(), remote: b.addr(), len: 10 };
    let unreachable = engine.submit(&target, Op::Write, &[across]);
    assert!(matches!(unreachable, Err(Error::Unreachable { .. })), "{unreachable:?}");
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
