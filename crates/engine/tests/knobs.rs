//! What knobs change, where no other test of this crate fails when one is ignored.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvferry_device::Error as DeviceError;
use kvferry_device::sim::{SimControl, SimOptions, sim};
use kvferry_engine::{
    Buffer, Engine, Error, OffloadMode, Op, Part, Range, State, SubmitOptions, Target,
};

use common::{NoExports, config};

const LONG: Duration = Duration::from_secs(60);
const BYTES: u64 = 8 << 20;

fn finish(engine: &Engine, target: &Target, ranges: &[Range], offload: OffloadMode) {
    let options = SubmitOptions { offload, ..SubmitOptions::default() };
    let part = Part { target, op: Op::Write, copies: ranges.into() };
    let id = engine.submit_parts(&[part], &options).expect("submits");
    let status = engine.wait(id, LONG).expect("known");
    assert_eq!(status.state, State::Completed);
    engine.release(id).expect("it ended");
}

/// An engine that copies between two memories of one simulated GPU.
struct Loop {
    engine: Arc<Engine>,
    control: Arc<SimControl>,
    target: Target,
    local: Buffer,
    remote: Buffer,
}

impl Loop {
    fn new(knobs: &[(&str, &str)]) -> Self {
        let (device, control) = sim(&SimOptions::default()).expect("always there");
        let engine = Engine::new(config(knobs), vec![Arc::clone(&device)]).expect("an engine");
        let [local, remote] = [(); 2].map(|()| engine.allocate(&device, BYTES).expect("memory"));
        let target = engine.open("peer", engine.segment(), Arc::new(NoExports)).expect("opens");
        Self { engine, control, target, local, remote }
    }

    fn copy(&self, count: u64, len: u64) {
        let range = |at: u64| Range {
            local: self.local.addr() + at * 2 * len,
            // Not at one distance, so that no stride is found.
            remote: self.remote.addr() + at * 2 * len + at % 2,
            len,
        };
        let ranges: Vec<_> = (0..count).map(range).collect();
        finish(&self.engine, &self.target, &ranges, OffloadMode::Auto);
    }
}

/// An engine that copies between a simulated GPU and host memory.
struct Offload {
    engine: Arc<Engine>,
    control: Arc<SimControl>,
    target: Target,
    ranges: Vec<Range>,
    _buffers: [Buffer; 2],
}

impl Offload {
    fn new(knobs: &[(&str, &str)]) -> Self {
        let (gpu, control) = sim(&SimOptions::default()).expect("always there");
        let devices = [gpu, kvferry_device::host().expect("always there")];
        let engine = Engine::new(config(knobs), devices.to_vec()).expect("an engine");
        let buffers = devices.map(|device| engine.allocate(&device, BYTES).expect("memory"));
        // 2 MiB in steps back and forth on the GPU, and without a gap in host memory.
        let range = |at: u64| Range {
            local: buffers[0].addr() + (at ^ 1) * 8192,
            remote: buffers[1].addr() + at * 4096,
            len: 4096,
        };
        let ranges = (0..512).map(range).collect();
        let target = engine.local().expect("itself");
        Self { engine, control, target, ranges, _buffers: buffers }
    }

    fn store(&self, mode: OffloadMode) {
        finish(&self.engine, &self.target, &self.ranges, mode);
    }
}

#[test]
fn pieces_longer_than_tile_bytes_are_that_many_descriptors() {
    for (tile, units) in [("4K", 2 * 16), ("16K", 2 * 4), ("64K", 2)] {
        let a_loop = Loop::new(&[("MC_KVFERRY_TILE_BYTES", tile)]);
        a_loop.copy(2, 64 << 10);
        assert_eq!(a_loop.control.work().units, units, "{tile}");
    }
}

#[test]
fn no_launch_has_more_blocks_than_max_grid_blocks() {
    for blocks in ["3", "40"] {
        let a_loop = Loop::new(&[("MC_KVFERRY_MAX_GRID_BLOCKS", blocks)]);
        a_loop.copy(4000, 512);
        assert_eq!(a_loop.control.work().most_blocks.to_string(), blocks);
    }
}

#[test]
fn copies_are_spread_over_as_many_streams_as_streams_says() {
    for streams in ["1", "3", "9"] {
        let a_loop = Loop::new(&[("MC_KVFERRY_STREAMS", streams), ("MC_KVFERRY_KERNEL", "off")]);
        a_loop.copy(20, 4096);
        assert_eq!(a_loop.control.work().used_streams().to_string(), streams);
    }
}

#[test]
fn copy_streams_have_the_priority_that_is_asked_for() {
    for (priority, is_high) in [("high", true), ("normal", false)] {
        let knob = ("MC_KVFERRY_STREAM_PRIORITY", priority);
        let (a_loop, offload) = (Loop::new(&[knob]), Offload::new(&[knob]));
        a_loop.copy(20, 4096);
        OffloadMode::ALL.into_iter().for_each(|mode| offload.store(mode));
        for work in [a_loop.control.work(), offload.control.work()] {
            assert!(work.used_streams() > 0);
            let used = work.streams.values().filter(|stream| stream.calls > 0);
            assert!(used.clone().all(|stream| stream.high_priority == is_high), "{priority}");
        }
    }
}

#[test]
fn a_staged_copy_takes_a_step_for_each_chunk() {
    let copies = |chunk| {
        let offload = Offload::new(&[("MC_KVFERRY_OFFLOAD_CHUNK_BYTES", chunk)]);
        offload.store(OffloadMode::Staged);
        offload.control.calls("copy")
    };
    // 2 MiB. A batch of more than a chunk packs each half of its buffer in turn, and first a short
    // step.
    for (chunk, steps) in [("64M", 1..=1), ("512K", 4..=9), ("128K", 16..=33)] {
        let copies = copies(chunk);
        assert!(steps.contains(&copies), "{copies} of {chunk}");
    }
}

#[test]
fn batches_go_in_steps_once_the_models_slowest_steps_are_over_the_tail_budget() {
    // By how many percent steps beside transfers are longer; 5 is the default.
    for (budget, percent, in_steps) in
        [("1", 3, true), ("4", 3, false), ("10", 20, true), ("30", 20, false)]
    {
        let knobs = [("MC_KVFERRY_POLICY", "tail"), ("MC_KVFERRY_TAIL_BUDGET_PERCENT", budget)];
        let Offload { engine, control, target, ranges, .. } = &Offload::new(&knobs);
        let step = |percent: u32| {
            engine.record_step(0, Duration::from_micros(3000) * (100 + percent) / 100);
        };
        let submit = || engine.submit(target, Op::Write, ranges).expect("submits");
        let end = |id| {
            let status = engine.wait(id, LONG).expect("known");
            assert_eq!(status.state, State::Completed);
        };
        (0..256).for_each(|_| step(0));
        control.hold();
        let beside = submit();
        // Rounds that are over or not, all beside the batch.
        (0..2 * 256).for_each(|_| step(percent));
        control.release();
        end(beside);
        let next = submit();
        let choice = engine.choice(next).expect("known").expect("an offload");
        end(next);
        assert_eq!(choice.in_steps, in_steps, "{percent} % over a budget of {budget} %: {choice}");
    }
}

#[test]
fn a_device_without_progress_is_lost_after_the_stall_timeout() {
    let a_loop = Loop::new(&[
        ("MC_KVFERRY_STALL_TIMEOUT_SEC", "1"),
        // Nobody knows what a lost device does, and so its regions stay in use.
        ("MC_KVFERRY_UNREGISTER_TIMEOUT_SEC", "0"),
    ]);
    a_loop.control.hold();
    let (local, remote) = (a_loop.local.addr(), a_loop.remote.addr());
    let range = Range { local, remote, len: 4096 };
    let start = Instant::now();
    let id = a_loop.engine.submit(&a_loop.target, Op::Write, &[range]).expect("submits");
    let state = a_loop.engine.wait(id, LONG).expect("known").state;
    let took = start.elapsed();
    a_loop.control.release();
    assert!(
        matches!(state, State::Failed(Error::Device(DeviceError::Stalled { .. }))),
        "{state:?}"
    );
    // The default is 30 seconds.
    assert!(took > Duration::from_millis(900) && took < Duration::from_secs(20), "{took:?}");
}

#[cfg(feature = "rocm")]
#[test]
fn no_amd_gpu_is_used_where_disable_hip_is_set() {
    use kvferry_engine::{DeviceName, open_device, visible_gpus};
    let refusals = |knobs: &[(&str, &str)]| {
        let config = config(knobs);
        let mut refusals: Vec<_> = visible_gpus(&config)
            .into_iter()
            .filter_map(|gpus| Some(gpus.err()?.to_string()))
            .collect();
        refusals.extend(open_device(DeviceName::Rocm(0), &config).err().map(|e| e.to_string()));
        refusals.iter().filter(|refusal| refusal.contains("MC_DISABLE_HIP")).count()
    };
    assert_eq!(refusals(&[]), 0);
    // Its value does not matter.
    assert_eq!(refusals(&[("MC_DISABLE_HIP", "0")]), 2);
}

/// Two engines with host memory, and what one knows of the other behind a relay.
struct Pair {
    here: Arc<Engine>,
    target: Target,
    local: Buffer,
    remote: Buffer,
    _there: (Arc<Engine>, kvferry_engine::Listener),
}

/// Tests that use TCP, of which one counts its threads.
static ALONE: Mutex<()> = Mutex::new(());

const PATTERN: u8 = 0xA7;

impl Pair {
    fn new(here: &[(&str, &str)], there: &[(&str, &str)], flips: bool) -> Self {
        let device = kvferry_device::host().expect("always there");
        let [here, there] = [here, there]
            .map(|knobs| Engine::new(config(knobs), vec![Arc::clone(&device)]).expect("an engine"));
        let [local, remote] =
            [&here, &there].map(|engine| engine.allocate(&device, BYTES).expect("memory"));
        local.write(0, &vec![PATTERN; BYTES as usize]).expect("inside");
        let listener = there.listen("127.0.0.1:0".parse().expect("an address")).expect("listens");
        let address = match flips {
            true => flipping_relay(listener.address()),
            false => listener.address(),
        };
        let target = here.open_tcp("peer", there.segment(), &address.to_string()).expect("opens");
        Self { here, target, local, remote, _there: (there, listener) }
    }

    fn write(&self) -> State {
        let ranges = [Range { local: self.local.addr(), remote: self.remote.addr(), len: BYTES }];
        let id = self.here.submit(&self.target, Op::Write, &ranges).expect("submits");
        let state = self.here.wait(id, LONG).expect("known").state;
        self.here.release(id).expect("it ended");
        state
    }
}

/// Passes bytes on, but flips a bit wherever 64 bytes in a row are the pattern: in payload alone.
fn flipping_relay(to: SocketAddr) -> SocketAddr {
    fn pass(mut from: TcpStream, mut to: TcpStream) {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            for row in bytes[..count].chunks_exact_mut(64) {
                if row.iter().all(|&byte| byte == PATTERN) {
                    row[0] ^= 1;
                }
            }
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        // The other side may have been quicker.
        let _ = (to.shutdown(Shutdown::Both), from.shutdown(Shutdown::Both));
    }
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (Ok(client), Ok(server)) = (client, TcpStream::connect(to)) else { continue };
            let clone = |stream: &TcpStream| stream.try_clone().expect("a clone");
            let back = (clone(&server), clone(&client));
            std::thread::spawn(move || pass(client, server));
            std::thread::spawn(move || pass(back.0, back.1));
        }
    });
    address
}

#[test]
fn with_checksums_payload_that_changes_on_its_way_is_refused_and_without_it_lands() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let on: &[_] = &[("MC_KVFERRY_TCP_CHECKSUMS", "1")];
    let off: &[_] = &[("MC_KVFERRY_TCP_CHECKSUMS", "0")];
    // Either side may want them.
    for (here, there) in [(on, off), (off, on)] {
        let state = Pair::new(here, there, true).write();
        let State::Failed(error) = &state else { panic!("{state:?}") };
        assert!(error.to_string().contains("checksum"), "{error}");
    }
    let pair = Pair::new(off, off, true);
    assert_eq!(pair.write(), State::Completed);
    let mut bytes = vec![0; BYTES as usize];
    pair.remote.read(0, &mut bytes).expect("inside");
    assert!(bytes.iter().any(|&byte| byte != PATTERN), "nothing changed: the test shows nothing");
}

/// Threads of this process that serve sockets.
fn tcp_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("linux").flatten();
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    tasks.filter_map(name).filter(|name| name.trim_end() == "kvferry-tcp").count()
}

#[test]
fn as_many_threads_serve_sockets_as_tcp_threads_says() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let one: &[_] = &[("MC_KVFERRY_TCP_THREADS", "1")];
    for threads in ["1", "3", "6"] {
        let lanes = ("MC_TCP_LANES_PER_PEER", "9");
        let pair = Pair::new(&[("MC_KVFERRY_TCP_THREADS", threads), lanes], one, false);
        assert_eq!(pair.write(), State::Completed);
        let expected = threads.parse::<usize>().expect("a number") + 1;
        // A thread that was just started gives itself its name.
        let start = Instant::now();
        while tcp_threads() != expected {
            assert!(start.elapsed() < LONG, "{} of {expected}", tcp_threads());
            std::thread::yield_now();
        }
        assert_eq!(pair.write(), State::Completed);
        assert_eq!(tcp_threads(), expected);
    }
}

#[test]
fn gpu_memory_is_staged_for_tcp_in_slices_of_the_size_that_is_asked_for() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let slices = |size| {
        let knobs = [("MC_TCP_SLICE_SIZE", size)];
        let (gpu, control) = sim(&SimOptions::default()).expect("always there");
        let here = Engine::new(config(&knobs), vec![Arc::clone(&gpu)]).expect("an engine");
        let pair = Pair::new(&[], &[], false);
        let (there, listener) = &pair._there;
        let local = here.allocate(&gpu, BYTES).expect("memory");
        let address = listener.address().to_string();
        let target = here.open_tcp("peer", there.segment(), &address).expect("opens");
        let range = [Range { local: local.addr(), remote: pair.remote.addr(), len: BYTES }];
        finish(&here, &target, &range, OffloadMode::Auto);
        control.calls("copy")
    };
    // 8 MiB, one DMA to host memory for each.
    assert_eq!([slices("1M"), slices("512K"), slices("128K")], [8, 16, 64]);
}
