//! Host memory, copied by the processor or, page-locked, by a GPU.

use std::sync::{Arc, Barrier};

use kvferry_device::sim::{Fault, Live};
use kvferry_device::{Device, Error as DeviceError};
use kvferry_engine::{
    Buffer, Copies, Engine, Error, Op, Paged, Pages, Part, Path, Range, State, Strided,
    SubmitOptions, Target,
};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

use crate::support::{bytes, direct, engine_on, finish, pattern, simulated, transfer};

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
