//! Memory of a virtual memory API on the simulated GPU: what is exported for a range, what is
//! refused, and that whatever fails leaves nothing. Every test looks at what this process holds, so
//! they run one at a time.

use std::collections::HashSet;
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_device::sim::{Fault, Live, SimChunks, SimControl, SimOptions, sim};
use kvferry_device::testing::ChunkKind::{Hole, Private, Shareable};
use kvferry_device::testing::{ChunkKind, ChunkedMemory};
use kvferry_device::{Chunk, Device, Error, Export};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const CHUNK: u64 = 64 << 10;

struct Gpu {
    device: Arc<dyn Device>,
    control: Arc<SimControl>,
    _alone: MutexGuard<'static, ()>,
}

fn gpu() -> Gpu {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (device, control) = sim(&SimOptions::default()).expect("always there");
    Gpu { device, control, _alone }
}

impl Gpu {
    fn chunks(&self, kinds: &[ChunkKind]) -> SimChunks {
        self.control.map_chunks(CHUNK, kinds)
    }

    fn export(&self, memory: &SimChunks) -> Export {
        let unit = self.device.export_unit(memory.addr(), memory.len()).expect("it is mapped");
        self.device.export(&unit).expect("exports")
    }

    fn open(&self, export: Export) -> Result<kvferry_device::Mapping, Error> {
        Arc::clone(&self.device).open(export)
    }

    fn write(&self, addr: u64, bytes: &[u8]) {
        // SAFETY: the tests write inside memory that they made.
        unsafe { self.device.write(addr, bytes) }.expect("writes");
    }

    fn read(&self, addr: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        // SAFETY: the tests read inside memory that they made or mapped.
        unsafe { self.device.read(addr, &mut bytes) }.expect("reads");
        bytes
    }
}

/// Descriptors and mappings of this process.
fn held() -> (usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").expect("always there").count();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("always there");
    (descriptors, maps.lines().filter(|line| line.contains("memfd:kvferry")).count())
}

/// While this lives, the process gets no descriptor beyond `spare` more.
struct FewDescriptors(Rlimit);

impl FewDescriptors {
    fn spare(spare: u64) -> Self {
        let before = getrlimit(Resource::Nofile);
        let next = File::open("/dev/null").map(|file| std::os::fd::AsRawFd::as_raw_fd(&file));
        let current = Some(next.expect("always there") as u64 + spare);
        setrlimit(Resource::Nofile, Rlimit { current, ..before }).expect("lower is allowed");
        Self(before)
    }
}

impl Drop for FewDescriptors {
    fn drop(&mut self) {
        setrlimit(Resource::Nofile, self.0).expect("as it was");
    }
}

#[test]
fn the_unit_of_a_range_is_the_run_of_chunks_that_it_touches() {
    let gpu = gpu();
    let memory = gpu.chunks(&[Shareable; 5]);
    let unit = |offset, len| {
        let unit = gpu.device.export_unit(memory.addr() + offset, len).expect("it is mapped");
        (unit.base - memory.addr(), unit.len / CHUNK)
    };
    assert_eq!(unit(0, 1), (0, 1));
    assert_eq!(unit(CHUNK, CHUNK), (CHUNK, 1));
    assert_eq!(unit(CHUNK - 1, 2), (0, 2));
    assert_eq!(unit(CHUNK + 5, 2 * CHUNK), (CHUNK, 3));
    assert_eq!(unit(0, 5 * CHUNK), (0, 5));
    // A range that goes on where nothing is mapped is longer than its unit.
    assert_eq!(unit(3 * CHUNK, 3 * CHUNK), (3 * CHUNK, 2));
    assert_eq!(unit(3 * CHUNK, u64::MAX), (3 * CHUNK, 2));
    let plain = Arc::clone(&gpu.device).allocate(CHUNK).expect("memory");
    assert_eq!(
        gpu.device.export_unit(plain.addr() + 3, 10),
        gpu.device.allocation(plain.addr()),
        "an allocation is its own unit"
    );
}

#[test]
fn a_hole_ends_the_unit() {
    let gpu = gpu();
    let memory = gpu.chunks(&[Shareable, Hole, Shareable]);
    let unit = gpu.device.export_unit(memory.addr(), 3 * CHUNK).expect("its first chunk is there");
    assert_eq!((unit.base, unit.len), (memory.addr(), CHUNK));
    let hole = memory.addr() + CHUNK;
    let refused = gpu.device.export_unit(hole, 1);
    assert_eq!(refused, Err(Error::UnknownAddress { device: "sim:0".into(), addr: hole }));
}

#[test]
fn a_units_number_never_comes_again_when_any_of_its_chunks_was_replaced() {
    let gpu = gpu();
    let mut memory = gpu.chunks(&[Shareable; 3]);
    let (addr, len) = (memory.addr(), memory.len());
    let mut seen = HashSet::new();
    for round in 0..30 {
        let unit = gpu.device.export_unit(addr, len).expect("it is mapped");
        assert_eq!(gpu.device.export_unit(addr + 7, len - 7), Ok(unit), "the same chunks");
        assert!(seen.insert(unit.id), "round {round}: number {} came again", unit.id);
        assert_ne!(unit.id >> 63, 0);
        memory.replace(round % 3, Shareable);
        let stale = gpu.device.export(&unit).expect_err("a chunk was replaced");
        assert!(matches!(stale, Error::NotExportable { .. }), "{stale}");
        assert_eq!(gpu.device.prepare_export(&unit).map(|_| ()), Err(stale));
    }
}

#[test]
fn a_chunk_that_may_not_be_shared_is_refused_before_traffic_with_the_remedy() {
    let gpu = gpu();
    let mut memory = gpu.chunks(&[Shareable, Shareable, Private]);
    let unit = |len| gpu.device.export_unit(memory.addr(), len).expect("it is mapped");
    let shareable = gpu.device.prepare_export(&unit(2 * CHUNK)).expect("these two may");
    assert!(shareable.is_none(), "no descriptors are made before a peer asks");
    let error = gpu.device.prepare_export(&unit(3 * CHUNK)).expect_err("one may not");
    assert!(error.to_string().contains("expandable_segments:False"), "{error}");
    let error = gpu.device.export(&unit(3 * CHUNK)).expect_err("one may not");
    assert!(matches!(error, Error::NotExportable { .. }), "{error}");
    memory.replace(2, Shareable);
    let all = gpu.device.export_unit(memory.addr(), memory.len()).expect("it is mapped");
    gpu.device.prepare_export(&all).expect("now all may");
}

#[test]
fn chunks_are_mapped_side_by_side_and_close_without_a_trace() {
    let gpu = gpu();
    let memory = gpu.chunks(&[Shareable; 8]);
    let bytes: Vec<u8> =
        (0..memory.len()).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u8).collect();
    gpu.write(memory.addr(), &bytes);
    let before = held();
    for _ in 0..20 {
        let export = gpu.export(&memory);
        assert_eq!(export.len(), memory.len());
        assert_eq!(held().0, before.0 + 8, "one descriptor a chunk, while the export lives");
        let mapping = gpu.open(export).expect("opens");
        assert_eq!(held().0, before.0, "none when it is open");
        assert!(gpu.read(mapping.addr(), mapping.len()) == bytes);
        gpu.write(mapping.addr() + CHUNK - 2, b"both");
        assert_eq!(gpu.read(memory.addr() + CHUNK - 2, 4), b"both");
        gpu.write(memory.addr(), &bytes);
        assert_eq!(gpu.control.live(Live::Mappings), 1);
        drop(mapping);
        assert_eq!(gpu.control.live(Live::Mappings), 0);
        assert_eq!(held(), before);
    }
}

#[test]
fn an_open_that_fails_at_any_chunk_undoes_what_it_did() {
    let gpu = gpu();
    let memory = gpu.chunks(&[Shareable; 6]);
    let before = held();
    for nth in 0..6 {
        gpu.control.fail("import", nth, Fault::Refused);
        let failed = gpu.open(gpu.export(&memory)).map(|_| ());
        assert!(matches!(failed, Err(Error::Call { call: "import", .. })), "{failed:?}");
        assert_eq!(held(), before, "chunk {nth}");
        assert_eq!(gpu.control.live(Live::Mappings), 0);
    }
    gpu.open(gpu.export(&memory)).expect("and now it opens");
}

#[test]
fn chunks_that_lie_about_their_lengths_are_refused() {
    let gpu = gpu();
    let memory = gpu.chunks(&[Shareable; 2]);
    let before = held();
    let export = |lengths: [u64; 2], len| {
        let Export::Chunks { chunks, .. } = gpu.export(&memory) else { panic!("it has chunks") };
        let lie = |(chunk, len): (Chunk, u64)| Chunk { len, ..chunk };
        Export::Chunks { chunks: chunks.into_iter().zip(lengths).map(lie).collect(), len }
    };
    for (lengths, len) in [
        ([CHUNK, CHUNK], CHUNK),
        ([CHUNK, CHUNK], 3 * CHUNK),
        ([CHUNK, 0], CHUNK),
        ([0, 0], CHUNK),
        // More than the memory behind it has: a touch would be a fault.
        ([CHUNK, 2 * CHUNK], 3 * CHUNK),
        ([u64::MAX, CHUNK + 1], CHUNK),
        ([1 << 62, 1 << 62], 1 << 63),
        ([CHUNK, 1], CHUNK + 1),
        ([1, CHUNK], CHUNK + 1),
        ([0, 0], 0),
    ] {
        let opened = gpu.open(export(lengths, len));
        if lengths == [CHUNK, 1] {
            // Less than there is: the rest is not mapped.
            assert_eq!(opened.expect("opens").len(), CHUNK + 1);
            continue;
        }
        let error = opened.expect_err("a lie");
        assert!(
            matches!(
                error,
                Error::BadExport { .. }
                    | Error::BadSize { .. }
                    | Error::Call { .. }
                    | Error::OutOfMemory { .. }
            ),
            "{error}"
        );
        assert_eq!(held(), before, "{lengths:?} of {len}");
    }
}

#[test]
fn an_export_without_descriptors_left_says_what_to_raise_and_works_afterwards() {
    let gpu = gpu();
    let memory = gpu.chunks(&[Shareable; 40]);
    let unit = gpu.device.export_unit(memory.addr(), memory.len()).expect("it is mapped");
    let before = held();
    {
        let _few = FewDescriptors::spare(20);
        let error = gpu.device.export(&unit).expect_err("20 are not enough for 40");
        assert!(matches!(error, Error::OutOfDescriptors { .. }), "{error}");
        assert!(error.to_string().contains("ulimit -n"), "{error}");
    }
    assert_eq!(held(), before);
    gpu.open(gpu.device.export(&unit).expect("enough")).expect("opens");
}

#[test]
fn a_gpu_reaches_host_memory_and_maps_what_a_host_device_exports() {
    let gpu = gpu();
    let host = kvferry_device::host().expect("always there");
    assert_eq!(host.info().uuid, kvferry_device::host_uuid());
    assert!(gpu.device.reaches(&host.info().uuid));
    assert!(!host.reaches(&gpu.device.info().uuid));
    let memory = Arc::clone(&host).allocate(100_003).expect("memory");
    let allocation = host.export_unit(memory.addr(), memory.len()).expect("found");
    assert!(host.prepare_export(&allocation).expect("exports").is_none());
    let before = held();
    let mapping = gpu.open(host.export(&allocation).expect("exports")).expect("opens");
    gpu.write(mapping.addr() + 100_000, &[1, 2, 3]);
    assert_eq!(gpu.read(memory.addr() + 100_000, 3), [1, 2, 3]);
    assert_eq!(gpu.control.live(Live::Mappings), 1);
    drop(mapping);
    assert_eq!((gpu.control.live(Live::Mappings), held()), (0, before));

    let local = Arc::clone(&gpu.device).map_host(memory.addr(), memory.len()).expect("maps");
    assert_eq!(gpu.control.live(Live::HostMappings), 1);
    assert_eq!(gpu.read(local.addr() + 100_000, 3), [1, 2, 3]);
    assert_ne!(local.addr(), memory.addr(), "nothing may rely on one address for both");
    drop(local);
    assert_eq!(gpu.control.live(Live::HostMappings), 0);
    for (addr, len) in [(memory.addr(), 0), (u64::MAX - 5, 10), (0, u64::MAX)] {
        let refused = Arc::clone(&gpu.device).map_host(addr, len).map(|_| ());
        assert!(matches!(refused, Err(Error::BadSize { .. })), "{refused:?}");
    }
    let same = host.map_host(memory.addr(), 10).expect("nothing to do");
    assert_eq!(same.addr(), memory.addr());
    drop(same);
    assert_eq!(gpu.read(memory.addr() + 100_000, 3), [1, 2, 3], "it is still there");
}
