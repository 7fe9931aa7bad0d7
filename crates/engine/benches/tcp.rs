//! A batch between two engines of this process over TCP: what the call of submit costs, and the whole.
//! Divide a time by the number of pieces in its name.

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvferry_device::Device;
use kvferry_device::sim::{SimOptions, sim};
use kvferry_engine::{Buffer, Config, Copies, Engine, Listener, Op, Range, State, Target};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

const PATIENCE: Duration = Duration::from_secs(60);

/// Two engines, and pieces that lie in a random order at both ends.
struct Pair {
    engine: Arc<Engine>,
    target: Target,
    ranges: Vec<Range>,
    _ends: (Buffer, Buffer),
    _there: (Listener, Arc<Engine>),
}

impl Pair {
    fn new(device: impl Fn() -> Arc<dyn Device>, lengths: &[u64]) -> Self {
        let engine = |device: &Arc<dyn Device>| {
            let knobs = |name: &str| match name {
                "MC_KVFERRY_CACHE_DIR" => Some("off".into()),
                "MC_TCP_LANES_PER_PEER" => Some("4".into()),
                _ => None,
            };
            let config = Config::from_lookup(knobs).expect("good knobs");
            Engine::new(config, vec![Arc::clone(device)]).expect("an engine")
        };
        let (here, there) = (device(), device());
        let (from, to) = (engine(&here), engine(&there));
        let room = lengths.iter().map(|length| length + 64).sum();
        let local = from.allocate(&here, room).expect("memory");
        let remote = to.allocate(&there, room).expect("memory");
        let listener = to.listen("127.0.0.1:0".parse().expect("an address")).expect("listens");
        let address = listener.address().to_string();
        let target = from.open_tcp("peer", to.segment(), &address).expect("opens");
        let mut random = SmallRng::seed_from_u64(7);
        let mut place = |base: u64| {
            let mut order: Vec<usize> = (0..lengths.len()).collect();
            order.shuffle(&mut random);
            let (mut next, mut places) = (base, vec![0; lengths.len()]);
            for index in order {
                places[index] = next;
                next += lengths[index] + 64;
            }
            places
        };
        let (locals, remotes) = (place(local.addr()), place(remote.addr()));
        let range = |at: usize| Range { local: locals[at], remote: remotes[at], len: lengths[at] };
        let ranges = (0..lengths.len()).map(range).collect();
        let (_ends, _there) = ((local, remote), (listener, Arc::clone(&to)));
        Self { engine: from, target, ranges, _ends, _there }
    }

    /// How long the call of submit takes, and how long until the batch has ended.
    fn once(&self, op: Op) -> (Duration, Duration) {
        let start = Instant::now();
        let copies = Copies::Ranges(&self.ranges);
        let id = self.engine.submit(&self.target, op, copies).expect("submits");
        let submitted = start.elapsed();
        let status = self.engine.wait(id, PATIENCE).expect("known");
        let whole = start.elapsed();
        assert_eq!(status.state, State::Completed);
        self.engine.release(id).expect("it ended");
        (submitted, whole)
    }
}

fn tcp(criterion: &mut Criterion) {
    let mix = [(64, 5702), (256, 13306), (1024, 19008), (2048, 6653), (16384, 2851)];
    let mut mixed: Vec<u64> = mix.iter().flat_map(|&(len, count)| vec![len; count]).collect();
    mixed.shuffle(&mut SmallRng::seed_from_u64(8));
    let shapes = [
        ("R2, 3840 of 2112 B", vec![2112; 3840]),
        ("R6, 16384 of 4 KiB", vec![4096; 16384]),
        ("R3, 47520 of 64 B to 16 KiB", mixed),
    ];
    let host = || kvferry_device::host().expect("host memory");
    let gpu = || sim(&SimOptions::default()).expect("a simulated GPU").0;
    for (name, lengths) in &shapes {
        for (home, pair) in [("host", Pair::new(host, lengths)), ("sim", Pair::new(gpu, lengths))] {
            for (op, verb) in [(Op::Write, "write"), (Op::Read, "read")] {
                let mut group = criterion.benchmark_group(format!("tcp {verb}, {home}"));
                group.sample_size(10).measurement_time(Duration::from_secs(2));
                group.throughput(Throughput::Elements(lengths.len() as u64));
                group.bench_function(BenchmarkId::new("submit", name), |bench| {
                    bench.iter_custom(|times| (0..times).map(|_| pair.once(op).0).sum());
                });
                group.bench_function(BenchmarkId::new("whole", name), |bench| {
                    bench.iter_custom(|times| (0..times).map(|_| pair.once(op).1).sum());
                });
            }
        }
    }
}

criterion_group!(benches, tcp);
criterion_main!(benches);
