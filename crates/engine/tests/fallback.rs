//! What moves the bytes. Where there is no copy kernel, its pieces go by DMA: never in silence, and
//! not at all if the operator says so.

mod common;

use std::sync::Arc;
use std::time::Duration;

use kvferry_device::Device;
use kvferry_device::sim::{SimOptions, sim};
use kvferry_engine::profile::Values;
use kvferry_engine::{
    BatchStatus, Buffer, Config, Copies, Engine, Error, Op, Part, Path, Profile, Range, State,
    Strided, SubmitOptions, Target,
};

use common::NoExports;
use common::log::warnings;

const LONG: Duration = Duration::from_secs(60);
const BYTES: u64 = 1 << 20;

/// An engine that copies between two memories of one simulated GPU.
struct Loop {
    engine: Arc<Engine>,
    local: Buffer,
    remote: Buffer,
}

impl Loop {
    fn new(has_kernel: bool, knobs: &[(&str, &str)]) -> Self {
        let lookup = |asked: &str| match asked {
            "MC_KVFERRY_CACHE_DIR" => Some("off".into()),
            _ => knobs.iter().find(|(name, _)| *name == asked).map(|(_, value)| value.into()),
        };
        let config = Config::from_lookup(lookup).expect("good knobs");
        let options = SimOptions { kernel: has_kernel, ..SimOptions::default() };
        let device: Arc<dyn Device> = sim(&options).expect("always there").0;
        let engine = Engine::new(config, vec![Arc::clone(&device)]).expect("an engine");
        let local = engine.allocate(&device, BYTES).expect("memory");
        let remote = engine.allocate(&device, BYTES).expect("memory");
        Self { engine, local, remote }
    }

    fn target(&self, name: &str) -> Target {
        let segment = self.engine.segment();
        self.engine.open(name, segment, Arc::new(NoExports)).expect("opens")
    }

    fn ranges(&self, count: u64, len: u64) -> Vec<Range> {
        let range = |at: u64| Range {
            local: self.local.addr() + at * 2 * len,
            // Not at one distance, so that no stride is found.
            remote: self.remote.addr() + at * 2 * len + at % 2,
            len,
        };
        (0..count).map(range).collect()
    }

    fn submit(
        &self,
        target: &Target,
        copies: Copies<'_>,
        options: &SubmitOptions,
    ) -> Result<BatchStatus, Error> {
        let part = Part { target, op: Op::Write, copies };
        let id = self.engine.submit_parts(&[part], options)?;
        let status = self.engine.wait(id, LONG).expect("known");
        assert_eq!(status.state, State::Completed);
        Ok(status)
    }
}

#[test]
fn the_first_fallback_to_each_peer_is_logged_with_its_reason_and_every_batch_says_its_path() {
    let a_loop = Loop::new(false, &[]);
    let (one, other) = (a_loop.target("prefill"), a_loop.target("decode"));
    let ranges = a_loop.ranges(40, 512);
    let forms = [Strided {
        local: a_loop.local.addr(),
        remote: a_loop.remote.addr(),
        local_stride: 1024,
        remote_stride: 2048,
        len: 512,
        count: 100,
    }];
    let lines = warnings(|| {
        for target in [&one, &one, &other, &one] {
            for copies in [Copies::Ranges(&ranges), Copies::Strided(&forms)] {
                let status = a_loop.submit(target, copies, &SubmitOptions::default());
                assert_eq!(status.expect("submits").path, Path::Dma);
            }
        }
    });
    assert_eq!(lines.len(), 2, "{lines:#?}");
    for (line, peer) in lines.iter().zip(["prefill", "decode"]) {
        for word in ["WARN", peer, "sim:0", "dma", "no compiler"] {
            assert!(line.contains(word), "{word} in {line}");
        }
    }
}

#[test]
fn strict_refuses_a_fallback_with_its_path_and_its_reason_and_nothing_moves() {
    let a_loop = Loop::new(false, &[("MC_KVFERRY_STRICT", "1")]);
    let target = a_loop.target("decode");
    let ranges = a_loop.ranges(2, 512);
    let forms = [Strided {
        local: a_loop.local.addr(),
        remote: a_loop.remote.addr(),
        local_stride: 512,
        remote_stride: 512,
        len: 512,
        count: 1,
    }];
    a_loop.local.write(0, &[7; 4096]).expect("writes");
    a_loop.remote.write(0, &[9; 4096]).expect("writes");
    let lines = warnings(|| {
        for copies in [Copies::Ranges(&ranges), Copies::Strided(&forms)] {
            let refused = a_loop.submit(&target, copies, &SubmitOptions::default());
            let expected = Error::Fallback {
                device: "sim:0".into(),
                peer: "decode".into(),
                path: Path::Dma,
                reason: "none: no compiler".into(),
            };
            assert_eq!(refused, Err(expected));
        }
    });
    assert!(lines.is_empty(), "{lines:#?}");
    let mut bytes = [0; 4096];
    a_loop.remote.read(0, &mut bytes).expect("reads");
    assert_eq!(bytes, [9; 4096]);
    // What was refused holds nothing.
    let addr = a_loop.local.addr();
    assert_eq!(a_loop.engine.unregister(addr), Ok(()));
}

#[test]
fn a_choice_of_dma_is_no_fallback_and_neither_refused_nor_logged() {
    let without_kernel = SubmitOptions { without_kernel: true, ..SubmitOptions::default() };
    let plain = SubmitOptions::default();
    // One knob, and the pieces and their bytes.
    let cases = [
        (("MC_KVFERRY_BATCH_MIN", "16"), (15, 512), &plain),
        (("MC_KVFERRY_SMALL_MAX_BYTES", "1K"), (40, 4096), &plain),
        (("MC_KVFERRY_KERNEL", "off"), (40, 512), &plain),
        (("MC_KVFERRY_KERNEL", "on"), (40, 512), &without_kernel),
    ];
    for (knob, (count, len), options) in cases {
        let knobs = [knob, ("MC_KVFERRY_STRICT", "1")];
        let lines = warnings(|| {
            let a_loop = Loop::new(false, &knobs);
            let ranges = a_loop.ranges(count, len);
            let target = a_loop.target("decode");
            let status = a_loop.submit(&target, Copies::Ranges(&ranges), options);
            assert_eq!(status.map(|status| status.path), Ok(Path::Dma), "{knobs:?}");
        });
        assert!(lines.is_empty(), "{knobs:?}: {lines:#?}");
    }
}

#[test]
fn strict_takes_nothing_from_a_device_with_a_kernel_and_kernel_off_keeps_it_from_launching() {
    for (kernel, path) in [("on", Path::Kernel), ("off", Path::Dma)] {
        let a_loop = Loop::new(true, &[("MC_KVFERRY_STRICT", "1"), ("MC_KVFERRY_KERNEL", kernel)]);
        let ranges = a_loop.ranges(2, 512);
        let target = a_loop.target("decode");
        let status = a_loop.submit(&target, Copies::Ranges(&ranges), &SubmitOptions::default());
        assert_eq!(status.map(|status| status.path), Ok(path));
    }
}

#[test]
fn pieces_are_small_or_large_by_the_profile_of_the_device_that_copies_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let lookup = |asked: &str| (asked == "MC_KVFERRY_CACHE_DIR").then(|| folder.path().into());
    let config = Config::from_lookup(lookup).expect("good knobs");
    let gpu = sim(&SimOptions::default()).expect("always there").0;
    let host = kvferry_device::host().expect("always there");
    let info = gpu.info();
    let profile = Profile {
        date: "2026-11-29T12:00:00Z".into(),
        name: info.name.clone(),
        uuid: info.uuid.to_string(),
        architecture: info.architecture.clone(),
        values: Values { small_max_bytes: 1024, ..Values::of(&config) },
        host_link: None,
        samples: Vec::new(),
    };
    profile.store(&config, info).expect("stores");
    let engine = Engine::new(config, vec![Arc::clone(&host), Arc::clone(&gpu)]).expect("an engine");
    let [on_host, on_gpu, more_on_gpu] =
        [&host, &gpu, &gpu].map(|device| engine.allocate(device, BYTES).expect("memory"));
    let target = engine.open("self", engine.segment(), Arc::new(NoExports)).expect("opens");
    // The GPU copies for host memory, too.
    for (local, remote) in [(&on_host, &on_gpu), (&more_on_gpu, &on_gpu)] {
        for (len, path) in [(1024, Path::Kernel), (1025, Path::Dma)] {
            let range = |at: u64| Range {
                local: local.addr() + at * 4096,
                remote: remote.addr() + at * 8192 + at % 2,
                len,
            };
            let ranges: Vec<_> = (0..40).map(range).collect();
            let id = engine.submit(&target, Op::Write, &ranges).expect("submits");
            let status = engine.wait(id, LONG).expect("known");
            assert_eq!((status.state, status.path), (State::Completed, path), "{len} bytes");
        }
    }
}
