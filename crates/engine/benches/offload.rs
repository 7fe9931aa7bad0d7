//! Host time of a staged submission: 16384 pieces of 4 KiB between host memory and host memory as a
//! device, which runs the same code as a GPU and makes no driver calls. `cargo bench --bench offload`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvferry_engine::{Config, Copies, Engine, OffloadMode, Op, Part, Range, SubmitOptions};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

const PIECES: u64 = 16_384;
const PIECE: u64 = 4096;

fn slots(stride: u64, shuffled: bool) -> Vec<u64> {
    let mut slots: Vec<u64> = (0..PIECES).map(|slot| slot * stride).collect();
    if shuffled {
        slots.shuffle(&mut SmallRng::seed_from_u64(stride));
    }
    slots
}

fn submissions(criterion: &mut Criterion) {
    let device = kvferry_device::host().expect("always there");
    let engine = Engine::new(Config::default(), vec![Arc::clone(&device)]).expect("an engine");
    let gpu = engine.allocate(&device, PIECES * (PIECE + 256)).expect("memory");
    let host = engine.allocate(&device, PIECES * (PIECE + 256)).expect("memory");
    let target = engine.local().expect("itself");
    let mut group = criterion.benchmark_group("staged submission");
    group.throughput(Throughput::Elements(PIECES));
    for (name, stride, shuffled) in
        [("packed in order", PIECE, false), ("packed in any order", PIECE, true)]
    {
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
                    let mut spent = Duration::ZERO;
                    for _ in 0..times {
                        let start = Instant::now();
                        let id = engine.submit_parts(&[part], &options).expect("submits");
                        spent += start.elapsed();
                        engine.wait(id, Duration::from_secs(60)).expect("known");
                        engine.release(id).expect("it ended");
                    }
                    spent
                });
            });
        }
    }
}

criterion_group!(benches, submissions);
criterion_main!(benches);
