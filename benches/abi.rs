//! What the C ABI costs: the same batch to another process through the Rust API, through
//! `submit_ranges` and through `submit_requests`, by turns, in medians: until it is seen to have ended,
//! and of the call that submits it alone.
//!
//! `cargo bench --bench abi -- [DEVICE [BATCHES]]`, with `--features cuda` for `cuda:0`; host memory
//! and 100 batches otherwise.

use std::error::Error;
use std::ffi::CString;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry::abi::types::{
    self, ABI_VERSION, BatchHandle, BatchStatus, EngineHandle, TargetHandle,
};
use kvferry::abi::{Api, kvferry_load};
use kvferry::node::{Node, NodeOptions};
use kvferry::{Buffer, Config, DeviceName, Engine, Op, Range, State, open_device};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Shapes of `kvferry bench`, by count and bytes of their pieces.
const SHAPES: &[(&str, &[(usize, u64)])] = &[
    ("R2", &[(3840, 2112)]),
    ("R6", &[(16384, 4096)]),
    (
        "R3",
        &[
            (5702, 64),
            (5703, 128),
            (7603, 256),
            (9504, 512),
            (9504, 1024),
            (6653, 2048),
            (2851, 16384),
        ],
    ),
    ("R5", &[(16, 16 << 20)]),
];

fn main() -> Outcome<()> {
    // Cargo says --bench.
    let arguments: Vec<_> = std::env::args().skip(1).filter(|it| it != "--bench").collect();
    let device = arguments.first().map_or("host", String::as_str);
    match arguments.get(1).map(String::as_str) {
        Some("peer") => peer(device),
        batches => compare(device, batches.map_or(Ok(100), str::parse)?),
    }
}

fn start(device: &str, bytes: u64) -> Outcome<(Buffer, Arc<Node>)> {
    let config = Config::from_env()?;
    let device = open_device(device.parse::<DeviceName>()?, &config)?;
    let engine = Engine::new(config, vec![Arc::clone(&device)])?;
    let buffer = engine.allocate(&device, bytes)?;
    Ok((buffer, Node::start(engine, &NodeOptions::default())?))
}

/// Bytes of the largest shape.
const ROOM: u64 = 16 * (16 << 20);

fn peer(device: &str) -> Outcome<()> {
    let (buffer, node) = start(device, ROOM)?;
    println!("{} {}", node.name(), buffer.addr());
    // Until the other process ends.
    std::io::stdin().lines().for_each(drop);
    Ok(())
}

/// Pieces in random order at both ends.
fn pieces(parts: &[(usize, u64)]) -> Vec<(u64, u64, u64)> {
    let random = &mut SmallRng::seed_from_u64(3);
    let mut lengths: Vec<u64> =
        parts.iter().flat_map(|&(count, len)| std::iter::repeat_n(len, count)).collect();
    lengths.shuffle(random);
    let mut offsets = || {
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        order.shuffle(random);
        let (mut offsets, mut next) = (vec![0; lengths.len()], 0);
        for at in order {
            offsets[at] = next;
            next += lengths[at];
        }
        offsets
    };
    let (here, there) = (offsets(), offsets());
    here.into_iter()
        .zip(there)
        .zip(&lengths)
        .map(|((here, there), &len)| (here, there, len))
        .collect()
}

/// Of one batch.
#[derive(Clone, Copy)]
struct Times {
    whole: Duration,
    call: Duration,
}

type Pick = fn(&Times) -> Duration;
const WHAT: [(&str, Pick); 2] = [("whole", |it| it.whole), ("call", |it| it.call)];

/// The C ABI as its callers use it.
struct Plugin {
    api: &'static Api,
    engine: EngineHandle,
    target: TargetHandle,
    memory: u64,
}

impl Plugin {
    fn open(device: &str, peer: &str) -> Outcome<Self> {
        // SAFETY: the table is static.
        let api = unsafe { kvferry_load(ABI_VERSION).as_ref() }.ok_or("no table")?;
        let (devices, peer) = (CString::new(device)?, CString::new(peer)?);
        let config = types::Config {
            struct_size: size_of::<types::Config>() as u64,
            devices: devices.as_ptr(),
            listen: null(),
            name: null(),
            batch_listen: null(),
            settings: null(),
            settings_count: 0,
        };
        let (mut engine, mut memory, mut target) = (0, 0, TargetHandle::default());
        // SAFETY: pointers are to what they say.
        let statuses = unsafe {
            [
                (api.create)(&config, &mut engine),
                (api.allocate)(engine, 0, ROOM, &mut memory),
                (api.open)(engine, peer.as_ptr(), &mut target),
            ]
        };
        if statuses != [0; 3] {
            return Err(format!("{statuses:?}").into());
        }
        Ok(Self { api, engine, target, memory })
    }

    /// Runs what `submit` begins.
    fn run(&self, submit: impl FnOnce(*mut BatchHandle) -> i32) -> Outcome<Times> {
        let mut batch = BatchHandle::default();
        // SAFETY: all of it are numbers.
        let mut status: BatchStatus = unsafe { std::mem::zeroed() };
        status.struct_size = size_of::<BatchStatus>() as u64;
        let start = Instant::now();
        let submitted = submit(&mut batch);
        let call = start.elapsed();
        while submitted == 0 && status.state == 0 {
            // SAFETY: as above.
            unsafe { (self.api.poll)(batch, &mut status) };
        }
        let whole = start.elapsed();
        // SAFETY: as above.
        let released = unsafe { (self.api.release)(batch) };
        match (submitted, status.state, released) {
            (0, 1, 0) => Ok(Times { whole, call }),
            ended => Err(format!("a batch ended as {ended:?}").into()),
        }
    }
}

fn compare(device: &str, batches: usize) -> Outcome<()> {
    let mut other = Command::new(std::env::current_exe()?)
        .args([device, "peer"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(other.stdout.take().ok_or("piped")?).read_line(&mut line)?;
    let (name, remote) = line.trim_end().split_once(' ').ok_or("the other process failed")?;
    let remote: u64 = remote.parse()?;

    let (buffer, node) = start(device, ROOM)?;
    let peer = node.open(name)?;
    let engine = node.engine();
    let plugin = Plugin::open(device, name)?;
    println!("{device}, medians of {batches} batches, write, us (and times the Rust API's):");
    for &(id, parts) in SHAPES {
        let pieces = pieces(parts);
        let at = |local: u64| {
            let range = |&(here, there, len): &(u64, u64, u64)| Range {
                local: local + here,
                remote: remote + there,
                len,
            };
            pieces.iter().map(range).collect::<Vec<_>>()
        };
        let (ranges, plugins) = (at(buffer.addr()), at(plugin.memory));
        let request = |range: &Range| types::Request {
            opcode: 1,
            reserved: 0,
            source: range.local,
            target: plugin.target,
            offset: range.remote,
            length: range.len,
        };
        let requests: Vec<_> = plugins.iter().map(request).collect();
        let mut times = [const { Vec::new() }; 3];
        for batch in 0..batches + 20 {
            let start = Instant::now();
            let id = engine.submit(peer.target(), Op::Write, &ranges)?;
            let call = start.elapsed();
            let state = loop {
                match engine.poll(id)?.state {
                    State::Running => {}
                    state => break state,
                }
            };
            let rust = Times { whole: start.elapsed(), call };
            engine.release(id)?;
            assert_eq!(state, State::Completed);
            let api = plugin.api;
            // SAFETY: lists of so many entries, which stay.
            let by_ranges = plugin.run(|batch| unsafe {
                let (list, count) = (plugins.as_ptr(), plugins.len());
                (api.submit_ranges)(plugin.target, 1, list, count, null(), batch)
            })?;
            // SAFETY: as above.
            let by_requests = plugin.run(|batch| unsafe {
                let (list, count) = (requests.as_ptr(), requests.len());
                (api.submit_requests)(plugin.engine, list, count, null_mut(), batch)
            })?;
            // The first ones map, prove and warm up.
            if batch >= 20 {
                let all = times.iter_mut().zip([rust, by_ranges, by_requests]);
                all.for_each(|(times, time)| times.push(time));
            }
        }
        for (what, time) in WHAT {
            let median = |times: &Vec<Times>| {
                let mut times: Vec<_> = times.iter().map(time).collect();
                times.sort_unstable();
                times[times.len() / 2].as_secs_f64() * 1e6
            };
            let [rust, ranges, requests] = times.each_ref().map(median);
            println!(
                "{id} {what}: Rust {rust:.1}, submit_ranges {ranges:.1} ({:.3}), submit_requests {requests:.1} ({:.3})",
                ranges / rust,
                requests / rust
            );
        }
    }
    // SAFETY: a number.
    unsafe { (plugin.api.destroy)(plugin.engine) };
    drop(other.stdin.take());
    other.wait()?;
    Ok(())
}
