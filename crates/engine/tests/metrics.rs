//! Batches as an operator sees them in counters and histograms.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_device::Device;
use kvferry_device::sim::{SimOptions, sim};
use kvferry_engine::{
    Buffer, Config, Copies, Engine, Op, Part, Range, State, Strided, SubmitOptions, Target,
};
use metrics_util::debugging::{DebugValue, DebuggingRecorder};

use common::NoExports;

const LONG: Duration = Duration::from_secs(60);
const BYTES: u64 = 4 << 20;

/// An engine that copies between two memories of one device.
struct Loop {
    engine: Arc<Engine>,
    local: Buffer,
    remote: Buffer,
    target: Target,
}

impl Loop {
    fn new(device: Arc<dyn Device>) -> Self {
        let engine = Engine::new(Config::default(), vec![Arc::clone(&device)]).expect("an engine");
        let local = engine.allocate(&device, BYTES).expect("memory");
        let remote = engine.allocate(&device, BYTES).expect("memory");
        let target = engine.open("decode", engine.segment(), Arc::new(NoExports)).expect("opens");
        Self { engine, local, remote, target }
    }

    fn on_host() -> Self {
        Self::new(kvferry_device::host().expect("always there"))
    }

    fn range(&self, at: u64, len: u64) -> Range {
        Range { local: self.local.addr() + at, remote: self.remote.addr() + at, len }
    }

    fn move_all(&self, parts: &[(Op, Copies<'_>)]) {
        let target = &self.target;
        let part = |&(op, copies)| Part { target, op, copies };
        let parts: Vec<_> = parts.iter().map(part).collect();
        let id = self.engine.submit_parts(&parts, &SubmitOptions::default()).expect("submits");
        assert_eq!(self.engine.wait(id, LONG).expect("known").state, State::Completed);
    }
}

/// What was counted while `what` ran, as `name{label=value,...}`, the labels in the order of
/// docs/metrics.md; of a histogram, its values.
fn counted(what: impl FnOnce()) -> Vec<(String, DebugValue)> {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, what);
    let all = snapshotter.snapshot().into_vec().into_iter().map(|(key, _, _, value)| {
        let key = key.key();
        let labels = key.labels().map(|label| format!("{}={}", label.key(), label.value()));
        (format!("{}{{{}}}", key.name(), labels.collect::<Vec<_>>().join(",")), value)
    });
    all.collect()
}

fn counter(all: &[(String, DebugValue)], name: &str) -> u64 {
    let found = all.iter().find(|(it, _)| it == name);
    match found.unwrap_or_else(|| panic!("no {name} in {all:#?}")) {
        (_, DebugValue::Counter(count)) => *count,
        (_, other) => panic!("{name} is {other:?}"),
    }
}

#[test]
fn bytes_pieces_and_time_of_the_same_batches_are_counted_by_transport_path_direction_and_size() {
    let began = Instant::now();
    let all = counted(|| {
        let a_loop = Loop::on_host();
        let few = [a_loop.range(0, 100), a_loop.range(1000, 28)];
        let form = Strided {
            local: a_loop.local.addr(),
            remote: a_loop.remote.addr(),
            len: 1024,
            count: 1000,
            local_stride: 2048,
            remote_stride: 4096,
        };
        a_loop.move_all(&[(Op::Write, (&few).into())]);
        a_loop.move_all(&[(Op::Write, (&few).into())]);
        a_loop.move_all(&[(Op::Read, (&[form]).into())]);
        a_loop.move_all(&[(Op::Read, (&[a_loop.range(0, 7)]).into()), (Op::Write, (&few).into())]);
        a_loop.move_all(&[(Op::Write, (&[a_loop.range(0, 0)]).into())]);
    });
    let most = began.elapsed().as_secs_f64();
    for (labels, batches, pieces, bytes) in [
        ("transport=peer,path=memcpy,direction=write,size=under_64K", 2, 4, 256),
        ("transport=peer,path=memcpy,direction=read,size=64K_to_1M", 1, 1000, 1_024_000),
        ("transport=peer,path=memcpy,direction=both,size=under_64K", 1, 3, 135),
        ("transport=none,path=none,direction=write,size=under_64K", 1, 1, 0),
    ] {
        assert_eq!(counter(&all, &format!("kvferry_batches_total{{{labels}}}")), batches);
        assert_eq!(counter(&all, &format!("kvferry_pieces_total{{{labels}}}")), pieces);
        assert_eq!(counter(&all, &format!("kvferry_bytes_total{{{labels}}}")), bytes);
        let name = format!("kvferry_batch_seconds{{{labels}}}");
        let (_, seconds) = all.iter().find(|(it, _)| *it == name).expect("a histogram");
        let DebugValue::Histogram(seconds) = seconds else { panic!("{seconds:?}") };
        assert_eq!(seconds.len() as u64, batches);
        assert!(seconds.iter().all(|it| it.0 > 0.0 && it.0 < most), "{seconds:?} of {most} s");
    }
    let names: Vec<_> = all.iter().filter(|(name, _)| !name.contains("transport=")).collect();
    assert!(names.is_empty(), "nothing failed and nothing fell back: {names:?}");
}

#[test]
fn what_fails_and_what_is_refused_is_counted_by_its_kind_and_not_as_moved() {
    let all = counted(|| {
        let a_loop = Loop::on_host();
        let outside = [a_loop.range(BYTES, 1)];
        a_loop.engine.submit(&a_loop.target, Op::Write, &outside).expect_err("out of bounds");
        let id = a_loop.engine.submit(&a_loop.target, Op::Write, &[a_loop.range(0, 64)]);
        a_loop.target.lose("pulled the plug");
        let status = a_loop.engine.wait(id.expect("submits"), LONG).expect("known");
        assert!(matches!(status.state, State::Failed(_)), "{status:?}");
        a_loop.engine.submit(&a_loop.target, Op::Read, &outside).expect_err("it is lost");
    });
    let failures = |labels| counter(&all, &format!("kvferry_failures_total{{{labels}}}"));
    assert_eq!(failures("transport=none,direction=none,kind=bad_request"), 1);
    assert_eq!(failures("transport=peer,direction=write,kind=peer_lost"), 1);
    assert_eq!(failures("transport=none,direction=none,kind=peer_lost"), 1);
    assert!(!all.iter().any(|(name, _)| name.contains("bytes_total")), "{all:?}");
}

#[test]
fn a_batch_that_goes_a_slower_way_is_counted_with_the_reason() {
    let all = counted(|| {
        let options = SimOptions { kernel: false, ..SimOptions::default() };
        let a_loop = Loop::new(sim(&options).expect("always there").0);
        let ranges: Vec<_> = (0..40).map(|at| a_loop.range(at * 4096 + at % 2, 512)).collect();
        a_loop.move_all(&[(Op::Write, (&ranges).into())]);
        a_loop.move_all(&[(Op::Write, (&ranges).into())]);
    });
    assert_eq!(counter(&all, "kvferry_fallbacks_total{reason=no_copy_kernel}"), 2);
    let moved = "transport=peer,path=dma,direction=write,size=under_64K";
    assert_eq!(counter(&all, &format!("kvferry_bytes_total{{{moved}}}")), 2 * 40 * 512);
}

#[test]
fn what_goes_over_tcp_is_counted_at_both_ends_and_slower_ways_there_with_the_reason() {
    let all = counted(|| {
        let gpu = sim(&SimOptions::default()).expect("always there").0;
        let open = |device: &Arc<dyn Device>, staging: &str| {
            let lookup = |name: &str| match name {
                "MC_KVFERRY_CACHE_DIR" => Some("off".into()),
                "MC_TCP_GPU_STAGING" => Some(staging.into()),
                _ => None,
            };
            let config = Config::from_lookup(lookup).expect("good knobs");
            let engine = Engine::new(config, vec![Arc::clone(device)]).expect("an engine");
            let memory = engine.allocate(device, BYTES).expect("memory");
            (engine, memory)
        };
        let (server, there) = open(&kvferry_device::host().expect("always there"), "1");
        let listener = server.listen("127.0.0.1:0".parse().expect("good")).expect("listens");
        for staging in ["1", "0"] {
            let (engine, here) = open(&gpu, staging);
            let address = listener.address().to_string();
            let target = engine.open_tcp("it", server.segment(), &address).expect("opens");
            let range = Range { local: here.addr(), remote: there.addr(), len: 100_000 };
            let id = engine.submit(&target, Op::Read, &[range]).expect("submits");
            assert_eq!(engine.wait(id, LONG).expect("known").state, State::Completed);
        }
    });
    for path in ["tcp-staged", "tcp"] {
        let labels = format!("transport=tcp,path={path},direction=read,size=64K_to_1M");
        assert_eq!(counter(&all, &format!("kvferry_bytes_total{{{labels}}}")), 100_000);
    }
    assert_eq!(counter(&all, "kvferry_fallbacks_total{reason=not_staged}"), 1);
    assert_eq!(counter(&all, "kvferry_served_bytes_total{transport=tcp,direction=read}"), 200_000);
}

#[test]
fn a_gpus_host_offload_is_a_transport_of_its_own() {
    let all = counted(|| {
        let gpu = sim(&SimOptions::default()).expect("always there").0;
        let devices = vec![Arc::clone(&gpu), kvferry_device::host().expect("always there")];
        let engine = Engine::new(Config::default(), devices).expect("an engine");
        let cache = engine.allocate(&gpu, BYTES).expect("memory");
        let store = engine.allocate(&engine.devices()[1], BYTES).expect("memory");
        let target = engine.local().expect("always");
        let range = Range { local: cache.addr(), remote: store.addr(), len: BYTES };
        let id = engine.submit(&target, Op::Write, &[range]).expect("submits");
        assert_eq!(engine.wait(id, LONG).expect("known").state, State::Completed);
    });
    let labels = "transport=offload,path=dma,direction=write,size=1M_to_16M";
    assert_eq!(counter(&all, &format!("kvferry_bytes_total{{{labels}}}")), BYTES);
}

#[test]
fn every_metric_has_a_line_in_the_documentation() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let read = |file| std::fs::read_to_string(format!("{root}/{file}")).expect("of this project");
    let documentation = read("docs/metrics.md");
    let sources = read("crates/engine/src/meters.rs") + &read("crates/cli/src/serve.rs");
    let names: Vec<_> =
        sources.split('"').filter(|literal| literal.starts_with("kvferry_")).collect();
    assert!(names.len() >= 10, "{names:?}");
    for name in names {
        assert!(documentation.contains(&format!("\n| `{name}` |")), "{name} is not documented");
    }
}
