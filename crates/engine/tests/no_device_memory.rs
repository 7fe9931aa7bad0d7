//! Batches that should be staged in device memory, of which there is none: the kernel copies host memory
//! in place. Never in silence, and not at all if the operator says so.

mod common;

use std::sync::Arc;
use std::time::Duration;

use kvferry_device::Device;
use kvferry_device::sim::{Fault, SimControl, SimOptions, sim};
use kvferry_engine::{Buffer, Engine, Error, OffloadMode, Op, Path, Range, Reason, State, Target};
use metrics_util::debugging::{DebugValue, DebuggingRecorder};

use common::config;
use common::log::warnings;

const LONG: Duration = Duration::from_secs(60);
const PIECE: u64 = 4096;
const PIECES: u64 = 600;

/// Memory of a GPU and of the host, and copies that are staged if they can be.
struct Bench {
    target: Target,
    gpu: Buffer,
    host: Buffer,
    ranges: Vec<Range>,
    control: Arc<SimControl>,
    engine: Arc<Engine>,
}

impl Bench {
    fn new(knobs: &[(&str, &str)]) -> Self {
        let (gpu, control) = sim(&SimOptions::default()).expect("always there");
        let gpu: Arc<dyn Device> = gpu;
        let host = kvferry_device::host().expect("always there");
        let devices = vec![Arc::clone(&gpu), Arc::clone(&host)];
        let engine = Engine::new(config(knobs), devices).expect("an engine");
        let gpu = engine.allocate(&gpu, 2 * PIECES * PIECE).expect("memory");
        let host = engine.allocate(&host, PIECES * PIECE).expect("memory");
        gpu.write(0, &vec![7; gpu.len() as usize]).expect("inside");
        host.write(0, &vec![9; host.len() as usize]).expect("inside");
        // Together in host memory; on the GPU at places of no constant distance.
        let range = |at: u64| Range {
            local: gpu.addr() + (at * 7 % PIECES) * 2 * PIECE + at % 3 * 64,
            remote: host.addr() + at * PIECE,
            len: PIECE,
        };
        let ranges = (0..PIECES).map(range).collect();
        let target = engine.local().expect("itself");
        Self { target, gpu, host, ranges, control, engine }
    }

    /// Stores the pieces. Returns how that went, and why so.
    fn store(&self) -> Result<(Path, OffloadMode, Reason), Error> {
        let id = self.engine.submit(&self.target, Op::Write, &self.ranges)?;
        let choice = self.engine.choice(id).expect("known").expect("an offload");
        let status = self.engine.wait(id, LONG).expect("known");
        assert_eq!(status.state, State::Completed);
        Ok((status.path, choice.mode, choice.reason))
    }

    fn stored(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.host.len() as usize];
        self.host.read(0, &mut bytes).expect("inside");
        bytes
    }

    /// Nothing more is allocated, until there is memory again.
    fn spend_memory(&self) {
        for next in 0..100 {
            self.control.fail("allocate", next, Fault::OutOfMemory);
        }
    }

    fn free_memory(&self) {
        self.control.forget_failures();
    }
}

const STAGED: (Path, OffloadMode, Reason) =
    (Path::Staged, OffloadMode::Staged, Reason::TogetherInHostMemory);

#[test]
fn without_memory_to_stage_in_batches_go_by_the_kernel_and_say_so_and_the_log_once() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    let lines = warnings(|| {
        metrics::with_local_recorder(&recorder, || {
            let bench = Bench::new(&[]);
            bench.spend_memory();
            for _ in 0..2 {
                let in_place = (Path::Kernel, OffloadMode::Kernel, Reason::NoBounce);
                assert_eq!(bench.store(), Ok(in_place));
                assert!(bench.stored().iter().all(|&byte| byte == 7));
            }
            assert_eq!(bench.engine.statistics().fallbacks, 2);
            bench.free_memory();
            assert_eq!(bench.store(), Ok(STAGED), "there is memory again");
        });
    });
    assert_eq!(lines.len(), 1, "{lines:#?}");
    for word in ["WARN", "sim:0", "kernel", "memory"] {
        assert!(lines[0].contains(word), "{word} in {}", lines[0]);
    }
    let fallbacks = snapshotter.snapshot().into_vec().into_iter().find_map(|(key, _, _, value)| {
        let key = key.key();
        let is_it = key.name() == "kvferry_fallbacks_total"
            && key.labels().any(|label| label.value() == "no_device_memory");
        is_it.then_some(value)
    });
    assert_eq!(fallbacks, Some(DebugValue::Counter(2)));
}

#[test]
fn strict_refuses_a_batch_without_memory_to_stage_it_in_and_nothing_moves() {
    let bench = Bench::new(&[("MC_KVFERRY_STRICT", "1")]);
    let lines = warnings(|| {
        bench.spend_memory();
        let refused = bench.store().expect_err("it would go by the kernel");
        let Error::NoDeviceMemory { device, peer, path, .. } = &refused else {
            panic!("{refused:?}")
        };
        assert_eq!((&device[..], &peer[..], *path), ("sim:0", "this engine", Path::Kernel));
        assert!(refused.to_string().contains("MC_KVFERRY_STRICT"), "{refused}");
        assert!(bench.stored().iter().all(|&byte| byte == 9));
        bench.free_memory();
        assert_eq!(bench.store(), Ok(STAGED));
    });
    assert!(lines.is_empty(), "{lines:#?}");
    // What was refused holds nothing.
    assert_eq!(bench.engine.unregister(bench.gpu.addr()), Ok(()));
}
