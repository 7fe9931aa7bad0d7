//! What a descriptor costs the host before the device sees it: checking the list, and packing it
//! into ring slots. Divide a time by the number of pieces in its name.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvferry_engine::bench::{
    Form, Limits, Pieces, Relocations, Scratch, Strides, Want, Window, check_bounds,
    check_bounds_and_mark, check_form_bounds, check_form_overlaps, check_overlaps, find_strides,
};
use kvferry_engine::device::{CopyDescriptor, CopySource};
use kvferry_engine::{Op, Paged, Pages, Range, Strided};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

const LIMITS: Limits = Limits { small_max_bytes: 1 << 20, tile_bytes: 16 << 10 };
const LOCAL: u64 = 1 << 40;
const REMOTE: u64 = 1 << 41;

/// Pieces of these lengths, each side in a random order of its own, with a gap behind each.
fn scattered(lengths: &[u64]) -> Vec<Range> {
    scattered_with_gaps(lengths, 64)
}

/// The same with gaps of so many bytes.
fn scattered_with_gaps(lengths: &[u64], gap: u64) -> Vec<Range> {
    let mut random = SmallRng::seed_from_u64(7);
    let mut place = || {
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        order.shuffle(&mut random);
        let mut offsets = vec![0; lengths.len()];
        let mut next = 0;
        for index in order {
            offsets[index] = next;
            next += lengths[index].next_multiple_of(64) + gap;
        }
        offsets
    };
    let (local, remote) = (place(), place());
    let range = |at: usize| Range {
        local: LOCAL + local[at],
        remote: REMOTE + remote[at],
        len: lengths[at],
    };
    (0..lengths.len()).map(range).collect()
}

/// `[layer][page][bytes]`, page by page: a stride on both sides, destinations not ascending.
fn paged(pages: u64, layers: u64, bytes: u64) -> Vec<Range> {
    let mut order: Vec<u64> = (0..pages).collect();
    order.shuffle(&mut SmallRng::seed_from_u64(9));
    let offset = |page: u64, layer: u64| layer * pages * 2 * bytes + page * 2 * bytes;
    let page = |(at, &page): (usize, &u64)| {
        (0..layers)
            .map(move |layer| Range {
                local: LOCAL + offset(at as u64, layer),
                remote: REMOTE + offset(page, layer),
                len: bytes,
            })
            .collect::<Vec<_>>()
    };
    order.iter().enumerate().flat_map(page).collect()
}

/// Equal strides on both sides, in list order.
fn strided(count: u64, bytes: u64, stride: u64) -> Vec<Range> {
    let range = |at| Range { local: LOCAL + at * stride, remote: REMOTE + at * bytes, len: bytes };
    (0..count).map(range).collect()
}

fn plan(criterion: &mut Criterion) {
    let mix = [
        (5702, 64),
        (5703, 128),
        (7603, 256),
        (9504, 512),
        (9504, 1024),
        (6653, 2048),
        (2851, 16384),
    ];
    let mut mixed: Vec<u64> = mix.iter().flat_map(|&(count, len)| vec![len; count]).collect();
    mixed.shuffle(&mut SmallRng::seed_from_u64(8));
    let mut pages: Vec<u64> = [(1800, 512), (1800, 8192), (3600, 16384)]
        .iter()
        .flat_map(|&(count, len)| vec![len; count])
        .collect();
    pages.shuffle(&mut SmallRng::seed_from_u64(6));
    let lists = [
        ("R4, 7200 of 512 B to 16 KiB", scattered(&pages)),
        ("R3, 47520 of 64 B to 16 KiB", scattered(&mixed)),
        ("R3 in 0.9 GB", scattered_with_gaps(&mixed, 16 << 10)),
        ("R3 in 3 GB", scattered_with_gaps(&mixed, 60 << 10)),
        ("R3 in 50 GB", scattered_with_gaps(&mixed, 1 << 20)),
        ("R6, 16384 of 4 KiB", scattered(&[4096; 16384])),
        ("R2, 3840 of 2112 B", scattered(&[2112; 3840])),
        ("3904 pages of layers, 2112 B", paged(64, 61, 2112)),
        ("W06, 168000 of 576 B in order", strided(168_000, 576, 4608)),
    ];
    let window = |start| [Window { start, len: 1 << 39 }];
    let (local, remote) = (window(LOCAL), window(REMOTE));
    let mut slot = vec![CopyDescriptor::default(); 8192];
    let mut scratch = Scratch::default();
    let mut group = criterion.benchmark_group("host cost");
    for (name, ranges) in &lists {
        group.throughput(Throughput::Elements(ranges.len() as u64));
        let bounds = |scratch: &mut Scratch| {
            check_bounds(Op::Write, ranges, &local, &remote, &LIMITS, scratch)
        };
        group.bench_function(BenchmarkId::new("bounds", name), |bench| {
            bench.iter(|| bounds(&mut scratch));
        });
        let (checked, extent) = bounds(&mut scratch).expect("a good list");
        group.bench_function(BenchmarkId::new("overlaps", name), |bench| {
            bench.iter(|| check_overlaps(Op::Write, ranges, &extent, false, &mut scratch));
        });
        group.bench_function(BenchmarkId::new("bounds and overlaps", name), |bench| {
            bench.iter(|| {
                let (_, extent) = check_bounds_and_mark(
                    Op::Write,
                    ranges,
                    &local,
                    &remote,
                    &LIMITS,
                    &mut scratch,
                )?;
                check_overlaps(Op::Write, ranges, &extent, false, &mut scratch)
            });
        });
        let mut found = Strides::default();
        group.bench_function(BenchmarkId::new("strides", name), |bench| {
            bench.iter(|| find_strides(black_box(ranges), &mut found));
        });
        group.bench_with_input(BenchmarkId::new("pack", name), ranges, |bench, ranges| {
            bench.iter(|| {
                let (op, want) = (Op::Write, Want::Small);
                let to = Relocations { local: &[], remote: &[1 << 20] };
                let mut pieces =
                    Pieces::new(op, ranges, &local, &remote, to, want, &checked, &LIMITS);
                let mut packed = 0;
                loop {
                    match pieces.fill(&mut slot) {
                        0 => break packed,
                        count => packed += count,
                    }
                }
            });
        });
    }
    group.finish();
}

/// Bounds and overlaps of a list of compact forms.
fn check_forms<F: Form>(criterion: &mut Criterion, name: &str, forms: &[F]) {
    let window = |start| [Window { start, len: 1 << 40 }];
    let (local, remote) = (window(LOCAL), window(REMOTE));
    let mut scratch = Scratch::default();
    let mut group = criterion.benchmark_group("host cost of forms");
    group.bench_function(BenchmarkId::new("bounds", name), |bench| {
        bench.iter(|| check_form_bounds(black_box(forms), &local, &remote, &mut scratch));
    });
    group.bench_function(BenchmarkId::new("bounds and overlaps", name), |bench| {
        bench.iter(|| {
            check_form_bounds(black_box(forms), &local, &remote, &mut scratch)?;
            check_form_overlaps(Op::Write, forms, false, &mut scratch)
        });
    });
    group.finish();
}

fn forms(criterion: &mut Criterion) {
    let strided = |at: u64| Strided {
        local: LOCAL + (at << 30),
        remote: REMOTE + (at << 30),
        len: 576,
        count: 7000,
        local_stride: 4608,
        remote_stride: 576,
    };
    let columns =
        |at: u64| Strided { remote: REMOTE + at * 576, remote_stride: 24 * 576, ..strided(at) };
    check_forms(criterion, "1 strided", &[strided(0)]);
    check_forms(criterion, "W06, 24 strided", &(0..24).map(strided).collect::<Vec<_>>());
    check_forms(criterion, "24 columns of one matrix", &(0..24).map(columns).collect::<Vec<_>>());
    let numbers = |seed, of| {
        let mut all: Vec<u32> = (0..of).collect();
        all.shuffle(&mut SmallRng::seed_from_u64(seed));
        all.truncate(2048);
        all
    };
    let [from, to, near] =
        [(1, 32_768), (2, 32_768), (3, 4096)].map(|(seed, of)| numbers(seed, of));
    let runs: Vec<u32> = (0..2048).map(|at| at / 16 * 37 % 2048 * 16 + 15 - at % 16).collect();
    let paged = |to| {
        let end = |addr, numbers| Pages::whole(addr, numbers, 36_864, 36_864 << 15);
        Paged::whole_pages(end(LOCAL, &from), end(REMOTE, to), 61, 36_864)
    };
    check_forms(criterion, "2048 random pages of 61 layers", &[paged(&to)]);
    check_forms(criterion, "2048 of 4096 pages of 61 layers", &[paged(&near)]);
    check_forms(criterion, "2048 pages of 61 layers, in falling runs of 16", &[paged(&runs)]);
}

criterion_group!(benches, plan, forms);
criterion_main!(benches);
