use std::time::{Duration, Instant};

use kvferry_device::sim::{Fault, SimControl, SimOptions, sim};
use kvferry_device::{Device, Memory, Queue};

use super::super::{Copying, Pool, Side, Staging, copy};
use super::*;
use crate::config::Config;

const PIECE: u64 = 1000;

struct Fixture {
    _staging: Staging,
    pool: Arc<Pool>,
    wake: Arc<Notify>,
    memory: Memory,
    device: Arc<dyn Device>,
    control: Arc<SimControl>,
}

impl Fixture {
    /// Eight slices each way, and device memory of noise.
    fn new() -> Self {
        let (device, control) = sim(&SimOptions::default()).unwrap();
        let knobs = |name: &str| match name {
            "MC_TCP_SLICE_SIZE" => Some("64K".into()),
            "MC_TCP_GPU_STAGING_SLOT_MB" | "MC_TCP_GPU_STAGING_SLOTS" => Some("1".into()),
            _ => None,
        };
        let config = Config::from_lookup(knobs).unwrap();
        let staging = Staging::new(&config, &[Arc::clone(&device)]).unwrap();
        let memory = Arc::clone(&device).allocate(2 << 20).unwrap();
        let noise: Vec<u8> = (0..2 << 20).map(|at: u32| (at * 31 % 251) as u8).collect();
        // SAFETY: it is this test's own memory.
        unsafe { device.write(memory.addr(), &noise) }.unwrap();
        let pool = staging.pool(0).unwrap();
        Self { _staging: staging, pool, wake: Arc::default(), memory, device, control }
    }

    fn slice(&self, side: Side) -> Option<Slice> {
        self.pool.take(side, false, &self.wake).unwrap()
    }

    /// Begins to copy between a slice and `count` pieces that lie apart, from the `first` on.
    fn begin(&self, slice: Slice, first: u64, count: u64) -> Copying {
        self.begin_behind(0, slice, first, count)
    }

    fn begin_behind(&self, ahead: u64, slice: Slice, first: u64, count: u64) -> Copying {
        let base = self.memory.addr();
        let pieces = (first..first + count).map(move |at| (base + at * 2 * PIECE, PIECE));
        // SAFETY: the pieces are this test's own memory, which outlives all copies.
        unsafe { copy(slice, pieces, count * PIECE, ahead, Arc::new(()), &self.wake) }
    }

    /// Has the thread wait with a copy in its hands, and nothing listed, until it shall [`go_on`].
    fn stop(&self) -> (MutexGuard<'_, Box<dyn Queue>>, Copying) {
        let queue = self.pool.copier.lane().lock();
        let copying = self.begin(self.slice(Side::Receive).unwrap(), 900, 1);
        until(|| (self.pool.copier.shared.count.load(Ordering::Acquire) == 0).then_some(()));
        (queue, copying)
    }

    fn calls<const N: usize>(&self, names: [&'static str; N]) -> [u64; N] {
        names.map(|name| self.control.calls(name))
    }

    /// What lies in those pieces.
    fn bytes(&self, first: u64, count: u64) -> Vec<u8> {
        let mut bytes = vec![0; (count * PIECE) as usize];
        for (at, part) in (first..).zip(bytes.chunks_mut(PIECE as usize)) {
            // SAFETY: as in `begin`.
            unsafe { self.device.read(self.memory.addr() + at * 2 * PIECE, part) }.unwrap();
        }
        bytes
    }
}

/// Lets it go on.
fn go_on((queue, mut copying): (MutexGuard<'_, Box<dyn Queue>>, Copying)) {
    drop(queue);
    until(|| copying.ended()).1.unwrap();
}

fn until<T>(mut found: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(30), "it does not end");
        std::thread::yield_now();
    }
}

#[test]
fn copies_that_come_while_the_thread_is_busy_are_one_submission() {
    let it = Fixture::new();
    for (side, counts) in [(Side::Send, [20, 3, 64]), (Side::Receive, [64, 20, 2])] {
        let before = it.calls(["store", "launch", "launch_inline"]);
        let stopped = it.stop();
        let mut copies = Vec::new();
        for (at, count) in (0..).zip(counts) {
            let mut slice = it.slice(side).unwrap();
            slice.bytes_mut()[..(count * PIECE) as usize].fill(200 + at as u8);
            copies.push((at, count, it.begin(slice, at * 100, count)));
        }
        go_on(stopped);
        for (at, count, mut copying) in copies {
            let (slice, result) = until(|| copying.ended());
            result.unwrap();
            let slice = slice.unwrap();
            assert_eq!(slice.bytes()[..(count * PIECE) as usize], it.bytes(at * 100, count));
            let filled = slice.bytes()[0] == 200 + at as u8;
            assert_eq!(filled, side == Side::Receive, "the bytes went the right way");
        }
        let after = it.calls(["store", "launch", "launch_inline"]);
        assert_eq!(after[0] - before[0], 2, "one word says that all have ended");
        let launches = after[1] + after[2] - before[1] - before[2];
        assert_eq!(launches, 1, "few pieces go by DMA alone, and the others together");
    }
}

#[test]
fn a_submission_is_of_one_kind_and_kinds_take_turns() {
    let it = Fixture::new();
    let stopped = it.stop();
    let begin = |side, at: u64| it.begin(it.slice(side).unwrap(), at * 100, 10);
    let all = [
        begin(Side::Receive, 0),
        begin(Side::Send, 1),
        begin(Side::Receive, 2),
        begin(Side::Send, 3),
    ];
    let before = it.control.calls("store");
    go_on(stopped);
    for mut copying in all {
        until(|| copying.ended()).1.unwrap();
    }
    assert_eq!(it.control.calls("store") - before, 3, "one was stopped, the sends, the receives");
    let mut last = Kind::Receive;
    let stopped = it.stop();
    let all = [begin(Side::Receive, 0), begin(Side::Send, 1)];
    let groups = [(); 2].map(|()| it.pool.copier.shared.next_group(&mut last).unwrap());
    assert_eq!(groups.each_ref().map(|group| group[0].kind), [Kind::Send, Kind::Receive]);
    // Nobody will submit them.
    groups.iter().flatten().for_each(|copy| copy.progress.reach(End::Quiet(Ok(()))));
    drop(all);
    go_on(stopped);
}

#[test]
fn a_group_is_no_more_than_so_many_slices_and_bytes() {
    let it = Fixture::new();
    let shared = &it.pool.copier.shared;
    let stopped = it.stop();
    let list = |bytes| {
        let (progress, kind, ahead) = (Arc::default(), Kind::Send, 0);
        let (pieces, copies) = (Vec::new(), Vec::new());
        // SAFETY: it copies nothing.
        unsafe { it.pool.copier.list(Listed { progress, kind, bytes, ahead, pieces, copies }) };
    };
    let mut last = Kind::Receive;
    (0..GROUP + 1).for_each(|_| list(1));
    assert_eq!(shared.next_group(&mut last).unwrap().len(), GROUP);
    assert_eq!(shared.next_group(&mut last).unwrap().len(), 1);
    [GROUP_BYTES + 1, GROUP_BYTES - 1, 1, 1].into_iter().for_each(list);
    assert_eq!(shared.next_group(&mut last).unwrap().len(), 1, "one goes however large");
    assert_eq!(shared.next_group(&mut last).unwrap().len(), 2);
    assert_eq!(shared.next_group(&mut last).unwrap().len(), 1);
    assert!(shared.next_group(&mut last).is_none());
    go_on(stopped);
}

#[test]
fn the_lane_with_the_least_to_send_comes_first() {
    let it = Fixture::new();
    let stopped = it.stop();
    let copies =
        [7, 0, 7, 3, 0].map(|ahead| it.begin_behind(ahead, it.slice(Side::Send).unwrap(), 0, 10));
    let listed = locked(&it.pool.copier.shared.inbox);
    let order: Vec<_> = listed.listed[Kind::Send as usize].iter().map(|it| it.ahead).collect();
    drop(listed);
    assert_eq!(order, [0, 0, 3, 7, 7]);
    go_on(stopped);
    for mut copying in copies {
        until(|| copying.ended()).1.unwrap();
    }
}

#[test]
fn a_copy_that_is_dropped_keeps_its_slice_until_its_end() {
    let it = Fixture::new();
    let mut others = Vec::new();
    while let Some(slice) = it.slice(Side::Send) {
        others.push(slice);
    }
    it.control.hold();
    let submitted = it.begin(others.pop().unwrap(), 0, 20);
    until(|| (it.control.calls("store") == 1).then_some(()));
    drop(submitted);
    let stopped = it.stop();
    drop(it.begin(others.pop().unwrap(), 100, 20));
    let (queue, mut first) = stopped;
    drop(queue);
    until(|| (it.control.calls("store") == 3).then_some(()));
    assert!(it.slice(Side::Send).is_none(), "the device still uses both");
    it.control.release();
    let both = [until(|| it.slice(Side::Send)), until(|| it.slice(Side::Send))];
    assert!(it.slice(Side::Send).is_none(), "there are no more than there were");
    drop(both);
    until(|| first.ended()).1.unwrap();
}

#[test]
fn a_copy_that_the_driver_refuses_says_so_to_each_and_gives_slices_back() {
    let it = Fixture::new();
    for (call, nth) in [("launch_inline", 0), ("store", 1)] {
        let stopped = it.stop();
        let copies = [0, 1].map(|at| it.begin(it.slice(Side::Send).unwrap(), at * 100, 20));
        it.control.fail(call, nth, Fault::Refused);
        go_on(stopped);
        for mut copying in copies {
            let (slice, result) = until(|| copying.ended());
            assert!(slice.is_some() && result.is_err(), "{call}");
        }
        it.control.forget_failures();
    }
    let mut copying = it.begin(it.slice(Side::Send).unwrap(), 0, 20);
    until(|| copying.ended()).1.expect("the next one is well");
}

#[test]
fn a_lost_device_keeps_the_slices_that_it_may_use() {
    let it = Fixture::new();
    let mut copying = it.begin(it.slice(Side::Send).unwrap(), 0, 20);
    until(|| copying.ended()).1.unwrap();
    it.control.hold();
    let mut copying = it.begin(it.slice(Side::Send).unwrap(), 0, 20);
    until(|| (it.control.calls("store") == 2).then_some(()));
    it.control.lose();
    let (slice, result) = until(|| copying.ended());
    assert!(slice.is_none(), "it is never used again");
    result.unwrap_err();
    it.control.release();
}

#[test]
fn whoever_sleeps_is_told_of_the_end() {
    let it = Fixture::new();
    let told = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let told =
            async { tokio::time::timeout(Duration::from_secs(30), it.wake.notified()).await };
        runtime.block_on(told).expect("it is told");
    };
    it.control.hold();
    let mut copying = it.begin(it.slice(Side::Receive).unwrap(), 0, 20);
    copying.watch(&it.wake);
    assert!(copying.ended().is_none());
    it.control.release();
    told();
    until(|| copying.ended()).1.unwrap();
    // One that asks too late is told at once.
    let mut copying = it.begin(it.slice(Side::Receive).unwrap(), 0, 20);
    let Copying::Queued(queued) = &copying else { unreachable!() };
    until(|| queued.progress.end());
    copying.watch(&it.wake);
    told();
    until(|| copying.ended()).1.unwrap();
}

#[test]
fn the_thread_ends_with_its_pool_and_ends_what_runs_before() {
    let it = Fixture::new();
    let shared = Arc::downgrade(&it.pool.copier.shared);
    it.control.hold();
    drop(it.begin(it.slice(Side::Send).unwrap(), 0, 20));
    it.control.release();
    let Fixture { _staging, pool, memory, .. } = it;
    drop((_staging, pool));
    until(|| shared.upgrade().is_none().then_some(()));
    drop(memory);
}
