//! Host time of submissions between the simulated GPU, whose driver's calls cost hardly anything, and host
//! memory: the least of several, as the copies themselves run on a thread that may be in the way.
//!
//! - staged: 16384 pieces of 4 KiB;
//! - direct: 256 pages of 64 layers of 16 KiB, as one 2-D DMA a page, until the first DMA is asked for, which
//!   the simulated driver refuses. The link idles for as long.
//!
//! `cargo bench --bench offload`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvferry_device::sim::{Fault, SimOptions, sim};
use kvferry_engine::{
    Config, Copies, Engine, OffloadMode, Op, Paged, Pages, Part, Range, SubmitOptions,
};
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

const PAGES: u32 = 256;
const LAYERS: u32 = 64;
const ROW: u64 = 16 << 10;

fn first_dma(criterion: &mut Criterion) {
    let (gpu, control) = sim(&SimOptions::default()).expect("always there");
    let host = kvferry_device::host().expect("always there");
    let devices = vec![Arc::clone(&gpu), Arc::clone(&host)];
    let engine = Engine::new(Config::default(), devices).expect("an engine");
    let (page, layer) = (u64::from(LAYERS) * ROW, 2 * u64::from(PAGES) * ROW);
    let gpu = engine.allocate(&gpu, u64::from(LAYERS) * layer).expect("memory");
    let host = engine.allocate(&host, u64::from(PAGES) * page).expect("memory");
    let target = engine.local().expect("itself");
    // Every second page of the GPU, in any order.
    let mut on_gpu: Vec<u32> = (0..PAGES).map(|page| 2 * page).collect();
    on_gpu.shuffle(&mut SmallRng::seed_from_u64(1));
    let in_host: Vec<u32> = (0..PAGES).collect();
    let local = Pages::whole(gpu.addr(), &on_gpu, ROW, layer);
    let remote = Pages::whole(host.addr(), &in_host, page, ROW);
    let paged = [Paged::whole_pages(local, remote, LAYERS, ROW)];
    // The host's pages counted in rows, of which each has as many as there are layers.
    let rows_in_host: Vec<u32> = in_host.iter().map(|page| page * LAYERS).collect();
    let remote = Pages::whole(host.addr(), &rows_in_host, ROW, ROW);
    let paged_by_rows = [Paged::whole_pages(local, remote, LAYERS, ROW)];
    let both = on_gpu.iter().zip(&in_host).map(|(&from, &to)| (u64::from(from), u64::from(to)));
    let ranges: Vec<Range> = both
        .flat_map(|(from, to)| {
            let (local, remote) = (gpu.addr() + from * ROW, host.addr() + to * page);
            (0..u64::from(LAYERS)).map(move |at| Range {
                local: local + at * layer,
                remote: remote + at * ROW,
                len: ROW,
            })
        })
        .collect();
    let contiguous =
        [Range { local: gpu.addr(), remote: host.addr(), len: u64::from(PAGES) * page }];
    let mut group = criterion.benchmark_group("direct submission up to the first DMA");
    group.sample_size(10);
    for (name, call, copies) in [
        ("contiguous", "copy", Copies::Ranges(&contiguous)),
        ("pages", "copy_rows", Copies::Paged(&paged)),
        ("pages by rows", "copy_rows", Copies::Paged(&paged_by_rows)),
        ("ranges", "copy_rows", Copies::Ranges(&ranges)),
    ] {
        for op in [Op::Write, Op::Read] {
            let options = SubmitOptions { offload: OffloadMode::Direct, ..Default::default() };
            let part = Part { target: &target, op, copies };
            group.bench_function(BenchmarkId::new(name, format!("{op:?}")), |bencher| {
                bencher.iter_custom(|times| {
                    let submit = |_| {
                        control.fail(call, 0, Fault::Refused);
                        let start = Instant::now();
                        let submitted = engine.submit_parts(&[part], &options);
                        let spent = start.elapsed();
                        if let Ok(id) = submitted {
                            engine.wait(id, Duration::from_secs(60)).expect("known");
                            engine.release(id).expect("it ended");
                        }
                        spent
                    };
                    (0..times).filter_map(|_| (0..TURNS).map(submit).min()).sum()
                });
            });
        }
    }
}

criterion_group!(benches, submissions, first_dma);
criterion_main!(benches);
