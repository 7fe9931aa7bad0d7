//! What submitting a batch costs the caller's thread, from the request to the driver: divide a time by
//! the number of pieces in its name. The copies are ended before the next batch, and not measured.
//!
//! On the simulated GPU, whose driver calls cost next to nothing, and which is held meanwhile so that its
//! thread does not wake up; and on the first NVIDIA GPU with `--features cuda`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use kvferry_device::Device;
use kvferry_device::sim::{SimControl, SimOptions, sim};
use kvferry_engine::{
    BatchId, Config, Copies, DeviceName, Engine, Op, Paged, Pages, Range, State, Strided,
    open_device,
};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

const PATIENCE: Duration = Duration::from_secs(60);
const PIECE: u64 = 64;
/// Keys and values, of two layers.
const TENSORS: u64 = 4;
/// Rows of a page of which a slice of the heads moves a quarter each.
const ROWS: u32 = 4;

/// A device, and what holds it if it is simulated.
type Held = (Arc<dyn Device>, Option<Arc<SimControl>>);

fn devices(config: &Config) -> Vec<Held> {
    let (device, control) = sim(&SimOptions::default()).expect("always there");
    let mut devices: Vec<Held> = vec![(device, Some(control))];
    if cfg!(feature = "cuda") {
        match open_device(DeviceName::Cuda(0), config) {
            Ok(device) => devices.push((device, None)),
            Err(error) => eprintln!("no NVIDIA GPU: {error}"),
        }
    }
    devices
}

fn bench(criterion: &mut Criterion) {
    let config = Config::from_env().expect("good knobs");
    for (device, control) in devices(&config) {
        let name = device.info().to_string();
        let engine = Engine::new(config.clone(), vec![device]).expect("an engine");
        for count in [16, 2048, 16_384] {
            of_count(criterion, &name, &engine, control.as_deref(), count);
        }
    }
}

/// Pieces between two pieces of memory of one device.
fn of_count(
    criterion: &mut Criterion,
    name: &str,
    engine: &Arc<Engine>,
    control: Option<&SimControl>,
    count: u32,
) {
    let bytes = u64::from(count) * 2 * PIECE;
    let device = &engine.devices()[0];
    let [from, to] = [(); 2].map(|()| engine.allocate(device, TENSORS * bytes).expect("memory"));
    let target = engine.local().expect("its own memory");
    let shuffled = |seed| {
        let mut pages: Vec<u32> = (0..2 * count).collect();
        pages.shuffle(&mut SmallRng::seed_from_u64(seed));
        pages.truncate(count as usize);
        pages
    };
    let (here, there) = (shuffled(7), shuffled(9));
    let at = |page: &u32| u64::from(*page) * PIECE;
    let range = |(here, there)| Range {
        local: from.addr() + at(here),
        remote: to.addr() + at(there),
        len: PIECE,
    };
    let ranges: Vec<_> = here.iter().zip(&there).map(range).collect();
    let pages = |addr, numbers| Pages::whole(addr, numbers, PIECE, 0);
    let paged = [Paged::whole_pages(pages(from.addr(), &here), pages(to.addr(), &there), 1, PIECE)];
    // The first quarter of the heads: packed at the source, between the others at the destination.
    let slice = |tensor: u64| {
        let pages = |addr, numbers, page_stride| Pages {
            addr: addr + tensor * bytes,
            numbers,
            page_stride,
            layer_stride: 2 * bytes,
            row_stride: page_stride / u64::from(ROWS),
        };
        let row_bytes = PIECE / 4 / u64::from(ROWS);
        let (local, remote) =
            (pages(from.addr(), &here, PIECE / 4), pages(to.addr(), &there, PIECE));
        Paged { local, remote, layers: 2, rows: ROWS, row_bytes }
    };
    let slices = [slice(0), slice(1)];
    let strided = [Strided {
        local: from.addr(),
        remote: to.addr(),
        len: PIECE,
        count: count.into(),
        local_stride: 2 * PIECE,
        remote_stride: PIECE,
    }];
    let mut group = criterion.benchmark_group(format!("submit/{name}"));
    let forms: [(&str, Copies<'_>); 4] = [
        ("ranges", (&ranges).into()),
        ("paged", (&paged).into()),
        ("slices", (&slices).into()),
        ("strided", (&strided).into()),
    ];
    for (form, copies) in forms {
        group.bench_function(BenchmarkId::new(form, count), |bencher| {
            bencher.iter_custom(|times| {
                let mut total = Duration::ZERO;
                for _ in 0..times {
                    control.inspect(|control| control.hold());
                    let start = Instant::now();
                    let batch = engine.submit(&target, Op::Write, copies).expect("submitted");
                    total += start.elapsed();
                    control.inspect(|control| control.release());
                    wait_awake(engine, batch);
                    engine.release(batch).expect("ended");
                }
                total
            });
        });
    }
    group.finish();
}

/// Polls until the batch has completed. A nap, as those of [`Engine::wait`], would leave caches colder
/// for the next batch.
fn wait_awake(engine: &Engine, batch: BatchId) {
    let start = Instant::now();
    loop {
        match engine.poll(batch).expect("known").state {
            State::Completed => return,
            State::Running => assert!(start.elapsed() < PATIENCE, "in time"),
            State::Failed(error) => panic!("{error}"),
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(2))
        .sample_size(20);
    targets = bench
}
criterion_main!(benches);
