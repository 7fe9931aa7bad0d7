//! Host memory that did not come from kvferry, as `malloc` gives it: registered, copied to and from
//! by the engine's own GPU, and never mapped by anybody else.

mod common;

use std::sync::Arc;
use std::time::Duration;

use kvferry_device::sim::{Live, SimControl, SimOptions, sim};
use kvferry_device::{Device, Error as DeviceError, Vendor};
use kvferry_engine::{
    AllocationKey, Engine, Error, Exports, ExportsError, Mismatch, Op, Path, Probe, Range,
    RangeError, State, Target,
};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use common::config;

const LONG: Duration = Duration::from_secs(60);
const LEN: usize = 1 << 20;

fn gpu() -> (Arc<dyn Device>, Arc<SimControl>) {
    sim(&SimOptions::default()).expect("always there")
}

fn host() -> Arc<dyn Device> {
    kvferry_device::host().expect("always there")
}

/// Bytes that begin at an odd place.
struct Heap {
    bytes: Vec<u8>,
    addr: u64,
}

impl Heap {
    fn new(len: usize, random: &mut SmallRng) -> Self {
        let mut bytes = vec![0; len + 3];
        random.fill(&mut bytes[..]);
        let addr = bytes.as_mut_ptr() as u64 + 3;
        Self { bytes, addr }
    }

    fn addr(&self) -> u64 {
        self.addr
    }

    fn len(&self) -> u64 {
        self.bytes.len() as u64 - 3
    }

    fn content(&self) -> &[u8] {
        &self.bytes[3..]
    }
}

fn register(engine: &Engine, heap: &Heap) -> Result<(), Error> {
    // SAFETY: every test unregisters it, or drops the engine, before the memory.
    unsafe { engine.register(heap.addr(), heap.len()) }
}

fn run(engine: &Engine, target: &Target, op: Op, ranges: &[Range]) -> Result<Path, Error> {
    let id = engine.submit(target, op, ranges)?;
    let status = engine.wait(id, LONG)?;
    engine.release(id)?;
    match status.state {
        State::Completed => Ok(status.path),
        State::Failed(error) => Err(error),
        State::Running => panic!("not in {LONG:?}"),
    }
}

/// Pieces that cover all bytes once, shuffled at one end.
fn pieces(local: u64, remote: u64, random: &mut SmallRng) -> Vec<Range> {
    let piece = LEN as u64 / 256;
    let mut order: Vec<u64> = (0..256).collect();
    order.shuffle(random);
    let range = |(at, other): (usize, u64)| Range {
        local: local + at as u64 * piece,
        remote: remote + other * piece,
        len: piece,
    };
    order.into_iter().enumerate().map(range).collect()
}

#[test]
fn a_gpu_copies_to_and_from_it_in_place_and_its_lock_ends_with_it() {
    let random = &mut SmallRng::seed_from_u64(1);
    let (device, control) = gpu();
    let engine = Engine::new(config(&[]), vec![Arc::clone(&device), host()]).expect("an engine");
    let buffer = engine.allocate(&device, LEN as u64).expect("memory");
    let heap = Heap::new(LEN, random);
    register(&engine, &heap).expect("it is there");
    let target = engine.local().expect("opens");
    let content = heap.content().to_vec();
    let ranges = pieces(buffer.addr(), heap.addr(), random);
    run(&engine, &target, Op::Read, &ranges).expect("loads");
    assert_eq!(control.live(Live::HostMappings), 1, "locked at first use");
    let mut found = vec![0; LEN];
    buffer.read(0, &mut found).expect("inside");
    assert_ne!(found, content, "in another order");
    buffer.write(0, &content).expect("inside");
    run(&engine, &target, Op::Write, &ranges).expect("stores");
    for range in &ranges {
        let (from, to) = (range.local - buffer.addr(), range.remote - heap.addr());
        let (from, to, len) = (from as usize, to as usize, range.len as usize);
        assert_eq!(heap.content()[to..to + len], content[from..from + len]);
        assert_eq!(found[from..from + len], content[to..to + len]);
    }
    engine.lock_host(heap.addr() + 17, &device).expect("it is");
    engine.unregister(heap.addr()).expect("unused");
    assert_eq!(control.live(Live::HostMappings), 0);
}

#[test]
fn the_processor_copies_between_it_and_other_host_memory_of_the_process() {
    let random = &mut SmallRng::seed_from_u64(2);
    let engine = Engine::new(config(&[]), vec![host()]).expect("an engine");
    let (one, other) = (Heap::new(LEN, random), Heap::new(LEN, random));
    register(&engine, &one).and_then(|()| register(&engine, &other)).expect("both are there");
    let target = engine.local().expect("opens");
    let all = Range { local: one.addr(), remote: other.addr(), len: one.len() };
    assert_eq!(run(&engine, &target, Op::Write, &[all]), Ok(Path::Memcpy));
    assert_eq!(one.content(), other.content());
    drop(engine);
}

#[test]
fn what_is_not_there_or_registered_already_is_refused() {
    let random = &mut SmallRng::seed_from_u64(3);
    let engine = Engine::new(config(&[]), vec![host()]).expect("an engine");
    let heap = Heap::new(64 << 10, random);
    // SAFETY: what is refused is not used, and the rest ends with the engine.
    let try_register = |addr, len| unsafe { engine.register(addr, len) };
    let refused = try_register(8, 64);
    assert!(
        matches!(refused, Err(Error::Device(DeviceError::NotAccessible { at: 8, .. }))),
        "{refused:?}"
    );
    for (addr, len) in [(heap.addr(), 0), (u64::MAX, 2)] {
        assert_eq!(try_register(addr, len), Err(Error::BadRegion { addr, len }));
    }
    let (first, second) = (heap.addr(), heap.addr() + 4096);
    try_register(first, 4096).expect("it is there");
    try_register(second, 4096).expect("it touches the one before");
    for (addr, len) in [(first, 1), (second + 4095, 2), (first - 1, 2), (first, 8192)] {
        let refused = try_register(addr, len);
        assert!(matches!(refused, Err(Error::AlreadyRegistered { .. })), "{refused:?}");
    }
    // Each is an allocation of its own, and a range lies in one.
    let target = engine.local().expect("opens");
    let over = Range { local: first, remote: second + 4000, len: 200 };
    let refused = engine.submit(&target, Op::Read, &[over]);
    assert!(
        matches!(refused, Err(Error::Range(RangeError::OutOfBounds { beyond: 104, .. }))),
        "{refused:?}"
    );
    assert_eq!(engine.statistics().registered_bytes, 8192);
    drop(engine);
}

#[test]
fn an_engine_without_host_memory_says_what_it_needs() {
    let (device, _) = gpu();
    let engine = Engine::new(config(&[]), vec![device]).expect("an engine");
    let heap = Heap::new(4096, &mut SmallRng::seed_from_u64(4));
    let refused = register(&engine, &heap).expect_err("nobody's");
    assert!(matches!(refused, Error::NotDeviceMemory { .. }), "{refused:?}");
    assert!(refused.to_string().contains("device host"), "{refused}");
}

#[test]
fn unregistering_waits_for_the_batch_that_uses_it() {
    let random = &mut SmallRng::seed_from_u64(5);
    let (device, control) = gpu();
    let knobs = [("MC_KVFERRY_UNREGISTER_TIMEOUT_SEC", "0")];
    let engine = Engine::new(config(&knobs), vec![Arc::clone(&device), host()]).expect("an engine");
    let buffer = engine.allocate(&device, LEN as u64).expect("memory");
    let heap = Heap::new(LEN, random);
    register(&engine, &heap).expect("it is there");
    let target = engine.local().expect("opens");
    engine.lock_host(heap.addr(), &device).expect("locks");
    control.hold();
    let all = Range { local: buffer.addr(), remote: heap.addr(), len: heap.len() };
    let id = engine.submit(&target, Op::Write, &[all]).expect("starts");
    let busy = engine.unregister(heap.addr());
    assert!(matches!(busy, Err(Error::RegionBusy { batches: 1, .. })), "{busy:?}");
    control.release();
    assert_eq!(engine.wait(id, LONG).map(|status| status.state), Ok(State::Completed));
    engine.unregister(heap.addr()).expect("unused");
}

#[derive(Debug)]
struct Asked;

impl Exports for Asked {
    fn fetch(&self, _: AllocationKey) -> Result<kvferry_device::Export, ExportsError> {
        panic!("nobody asks for an export that cannot be")
    }
    fn probe(&self, _: kvferry_device::DeviceUuid) -> Result<Probe, ExportsError> {
        panic!("nobody asks for a proof of it")
    }
    fn prove(&self, _: AllocationKey, _: u64) -> Result<Option<Mismatch>, ExportsError> {
        panic!("nobody asks for a proof of it")
    }
}

#[test]
fn it_is_published_as_what_cannot_be_mapped_and_is_not_exported() {
    let engine = Engine::new(config(&[]), vec![host()]).expect("an engine");
    let heap = Heap::new(4096, &mut SmallRng::seed_from_u64(6));
    register(&engine, &heap).expect("it is there");
    let memfd = engine.allocate(&engine.devices()[0], 4096).expect("memory");
    let mut segment = engine.segment();
    let region = *segment.regions.iter().find(|it| it.addr == heap.addr()).expect("published");
    let allocation = *segment.allocations.iter().find(|it| it.key == region.allocation).unwrap();
    assert_eq!(
        (allocation.vendor, allocation.base, allocation.len, allocation.mappable),
        (Vendor::Host, heap.addr(), heap.len(), false)
    );
    assert!(region.segment.is_some(), "TCP serves it");
    assert!(segment.allocations.iter().any(|it| it.mappable && it.base == memfd.addr()));
    let refused = engine.export(region.allocation).expect_err("no descriptor");
    assert!(refused.to_string().contains("TCP"), "{refused}");

    // Another process's, of which no lanes are known.
    segment.incarnation = kvferry_engine::Identity::random();
    let here = Engine::new(config(&[]), vec![host()]).expect("an engine");
    let local = here.allocate(&here.devices()[0], 4096).expect("memory");
    let target = here.open("peer", segment, Arc::new(Asked)).expect("opens");
    let all = Range { local: local.addr(), remote: heap.addr(), len: 4096 };
    let refused = here.submit(&target, Op::Write, &[all]);
    let not_served = Error::NotServed { peer: "peer".into(), addr: heap.addr() };
    assert_eq!(refused, Err(not_served));
    assert_eq!(here.statistics().refused, 1);
    drop(engine);
}
