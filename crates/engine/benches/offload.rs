//! Host time of a staged submission: 16384 pieces of 4 KiB between the simulated GPU, whose driver's calls
//! cost hardly anything, and host memory: the least of several, as the copies themselves run on a thread
//! that may be in the way. `cargo bench --bench offload`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvferry_device::sim::{SimOptions, sim};
use kvferry_engine::{Config, Copies, Engine, OffloadMode, Op, Part, Range, SubmitOptions};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

const PIECES: u64 = 16_384;
const PIECE: u64 = 4096;

/// Submissions of which the shortest counts.
const TURNS: usize = 20;

fn slots(stride: u64, shuffled: bool) -> Vec<u64> {
    let mut slots: Vec<u64> = (0..PIECES).map(|slot| slot * stride).collect();
    if shuffled {
        slots.shuffle(&mut SmallRng::seed_from_u64(stride));
    }
    slots
}

fn submissions(criterion: &mut Criterion) {
    let (gpu, _control) = sim(&SimOptions::default()).expect("always there");
    let host = kvferry_device::host().expect("always there");
    let devices = vec![Arc::clone(&gpu), Arc::clone(&host)];
    let engine = Engine::new(Config::default(), devices).expect("an engine");
    let gpu = engine.allocate(&gpu, PIECES * (PIECE + 256)).expect("memory");
    let host = engine.allocate(&host, PIECES * (PIECE + 256)).expect("memory");
    let target = engine.local().expect("itself");
    let mut group = criterion.benchmark_group("staged submission");
    group.throughput(Throughput::Elements(PIECES)).sample_size(10);
    for (name, stride, shuffled) in [
        ("packed in order", PIECE, false),
        ("packed in any order", PIECE, true),
        ("with gaps in any order", PIECE + 256, true),
    ] {
        let ends = slots(PIECE + 256, true).into_iter().zip(slots(stride, shuffled));
        let ranges: Vec<Range> = ends
            .map(|(on_gpu, in_host)| Range {
                local: gpu.addr() + on_gpu,
                remote: host.addr() + in_host,
                len: PIECE,
            })
            .collect();
        for op in [Op::Write, Op::Read] {
            let options = SubmitOptions { offload: OffloadMode::Staged, ..Default::default() };
            let part = Part { target: &target, op, copies: Copies::Ranges(&ranges) };
            group.bench_function(BenchmarkId::new(name, format!("{op:?}")), |bencher| {
                bencher.iter_custom(|times| {
                    let submit = |_| {
                        let start = Instant::now();
                        let id = engine.submit_parts(&[part], &options).expect("submits");
                        let spent = start.elapsed();
                        engine.wait(id, Duration::from_secs(60)).expect("known");
                        engine.release(id).expect("it ended");
                        spent
                    };
                    (0..times).filter_map(|_| (0..TURNS).map(submit).min()).sum()
                });
            });
        }
    }
}

criterion_group!(benches, submissions);
criterion_main!(benches);
