//! What an operation of the page store costs the caller's thread: divide a time by the number of
//! pages in its name. Copies run meanwhile, and what waits for them is not measured.
//!
//! On the simulated GPU, and on the first NVIDIA GPU with `--features cuda`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvferry_device::Device;
use kvferry_device::sim::{SimOptions, sim};
use kvferry_engine::{
    Config, DeviceName, Engine, OffloadMode, PageKey, PageShape, PageStore, StoreOptions,
    open_device,
};

const PATIENCE: Duration = Duration::from_secs(60);
const PAGES: u32 = 512;

fn devices(config: &Config) -> Vec<Arc<dyn Device>> {
    let mut devices = vec![sim(&SimOptions::default()).expect("always there").0];
    if cfg!(feature = "cuda") {
        match open_device(DeviceName::Cuda(0), config) {
            Ok(device) => devices.push(device),
            Err(error) => eprintln!("no NVIDIA GPU: {error}"),
        }
    }
    devices
}

fn bench(criterion: &mut Criterion) {
    let config = Config::from_env().expect("good knobs");
    for device in devices(&config) {
        let name = device.info().to_string();
        let host = kvferry_device::host().expect("always there");
        let engine = Engine::new(config.clone(), vec![device, host]).expect("an engine");
        // The last has what each page costs, and no rows: the simulated GPU takes its time for those on
        // the caller's thread.
        for (layers, page_bytes) in [(64, 4096), (64, 16 << 10), (1, 4096)] {
            of_pages(criterion, &name, &engine, layers, page_bytes);
        }
    }
}

fn of_pages(
    criterion: &mut Criterion,
    name: &str,
    engine: &Arc<Engine>,
    layers: u32,
    page_bytes: u64,
) {
    let layer_stride = u64::from(PAGES) * page_bytes;
    let memory = engine.allocate(&engine.devices()[0], layer_stride * u64::from(layers));
    let memory = memory.expect("device memory");
    let shape = PageShape {
        addr: memory.addr(),
        pages: PAGES,
        page_bytes,
        layers,
        layer_stride,
        page_stride: page_bytes,
    };
    let mut group = criterion.benchmark_group(format!("store/{name}"));
    for offload in [OffloadMode::Direct, OffloadMode::Auto] {
        let options = StoreOptions {
            offload,
            in_flight_bytes: u64::MAX,
            ..StoreOptions::with_budget(memory.len())
        };
        let store = PageStore::new(engine, 0, shape, options).expect("a store");
        let kinds: [(&str, &[u32], u32); 3] =
            [("alone", &[1, 16, 128], 2), ("neighbours", &[8, 128], 1), ("calls of 1", &[64], 2)];
        for (kind, counts, step) in kinds {
            for &count in counts {
                let one_by_one = kind.starts_with("calls");
                let pages: Vec<_> =
                    (0..count).map(|at| (at * step, PageKey(u128::from(at)))).collect();
                let back: Vec<_> = pages.iter().map(|&(page, key)| (key, page)).collect();
                let numbers: Vec<_> = pages.iter().map(|&(page, _)| page).collect();
                let of_call = if one_by_one { 1 } else { count as usize };
                let id = |what: &str| {
                    let what = format!("{what}/{offload}/{layers} x {page_bytes} B/{kind}");
                    BenchmarkId::new(what, count)
                };
                group.throughput(Throughput::Elements(count.into()));
                let mut measure = |what: &str, stored: bool, run: &dyn Fn()| {
                    group.bench_function(id(what), |bencher| {
                        bencher.iter_custom(|times| {
                            let mut total = Duration::ZERO;
                            for _ in 0..times {
                                if stored {
                                    store.page_out(&pages, None).expect("goes out");
                                    store.drain(PATIENCE).expect("all well");
                                }
                                let start = Instant::now();
                                run();
                                total += start.elapsed();
                                store.reset(PATIENCE).expect("all well");
                            }
                            total
                        });
                    });
                };
                measure("out", false, &|| {
                    for pages in pages.chunks(of_call) {
                        store.page_out(pages, None).expect("goes out");
                    }
                });
                measure("in", true, &|| {
                    for back in back.chunks(of_call) {
                        store.page_in(back, None).expect("comes in");
                    }
                });
                measure("clear", false, &|| {
                    for numbers in numbers.chunks(of_call) {
                        store.clear(numbers, None).expect("clears");
                    }
                });
                // What a step does: behind each other on the device.
                measure("out, clear, in", false, &|| {
                    store.page_out(&pages, None).expect("goes out");
                    store.clear(&numbers, None).expect("clears");
                    store.page_in(&back, None).expect("comes in");
                });
            }
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .sample_size(20);
    targets = bench
}
criterion_main!(benches);
