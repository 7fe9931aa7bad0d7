use std::time::{Duration, Instant};

use kvferry_device::sim::{Fault, SimControl, SimOptions, sim};
use kvferry_device::{Device, Memory};

use super::*;
use crate::config::Config;
use crate::pinned::PinnedAccount;
use crate::transport::lane::DeviceLanes;

const PIECE: u64 = 1000;

struct Fixture {
    staging: Arc<Staging>,
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
        let account = PinnedAccount::new(&config);
        let staging = Staging::new(&config, &[DeviceLanes::new(&device)], &account).unwrap();
        let staging = Arc::new(staging);
        let memory = Arc::clone(&device).allocate(1 << 20).unwrap();
        let noise: Vec<u8> = (0..1 << 20).map(|at: u32| (at * 31 % 251) as u8).collect();
        // SAFETY: it is this test's own memory.
        unsafe { device.write(memory.addr(), &noise) }.unwrap();
        let pool = staging.pool(0).unwrap();
        Self { staging, pool, wake: Arc::default(), memory, device, control }
    }

    /// Words by which submissions end, so far.
    fn words(&self) -> u64 {
        self.control.work().words
    }

    fn launches(&self) -> u64 {
        self.control.calls("launch") + self.control.calls("launch_inline")
    }

    fn slice(&self, side: Side) -> Option<Slice> {
        self.pool.take(side, "a peer", false, &self.wake).unwrap()
    }

    /// Begins to copy between a slice and `count` pieces that lie apart, from the `first` on.
    fn begin(&self, slice: Slice, first: u64, count: u64) -> Copying {
        self.begin_behind(0, slice, first, count)
    }

    fn begin_behind(&self, ahead: u64, slice: Slice, first: u64, count: u64) -> Copying {
        let base = self.memory.addr();
        let pieces = (first..first + count).map(move |at| (base + at * 2 * PIECE, PIECE));
        // SAFETY: the pieces are this test's own memory, which outlives all copies.
        unsafe {
            copy(&self.staging, slice, pieces, count * PIECE, ahead, Arc::new(()), &self.wake)
        }
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
fn copies_that_come_while_another_thread_has_the_queue_are_one_submission() {
    let it = Fixture::new();
    for (side, counts) in [(Side::Send, [20, 3, 64]), (Side::Receive, [64, 20, 2])] {
        let before = (it.words(), it.launches());
        let queue = it.pool.lane.lock();
        let mut copies = Vec::new();
        for (at, count) in (0..).zip(counts) {
            let mut slice = it.slice(side).unwrap();
            slice.bytes_mut()[..(count * PIECE) as usize].fill(200 + at as u8);
            copies.push((at, count, it.begin(slice, at * 100, count)));
        }
        assert_eq!(it.words(), before.0, "nobody waits, and nothing is lost");
        it.pool.submit_listed(queue, || true);
        for (at, count, mut copying) in copies {
            let (slice, result) = until(|| copying.ended());
            result.unwrap();
            let slice = slice.unwrap();
            assert_eq!(slice.bytes()[..(count * PIECE) as usize], it.bytes(at * 100, count));
            let filled = slice.bytes()[0] == 200 + at as u8;
            assert_eq!(filled, side == Side::Receive, "the bytes went the right way");
        }
        assert_eq!(it.words() - before.0, 1, "one word says that all have ended");
        let launches = it.launches() - before.1;
        assert_eq!(launches, 1, "few pieces go by DMA alone, and the others together");
    }
}

#[test]
fn a_submission_goes_one_way_and_copies_keep_their_order() {
    let it = Fixture::new();
    let before = it.words();
    let queue = it.pool.lane.lock();
    let sides = [Side::Send, Side::Receive, Side::Send, Side::Send];
    let copies: Vec<_> = (0..)
        .zip(sides)
        .map(|(at, side)| it.begin(it.slice(side).unwrap(), at * 100, 10))
        .collect();
    it.pool.submit_listed(queue, || true);
    assert_eq!(it.words() - before, 3, "sends, a receive, two sends");
    for mut copying in copies {
        until(|| copying.ended()).1.unwrap();
    }
}

#[test]
fn the_lane_with_the_least_to_send_comes_first() {
    let it = Fixture::new();
    let queue = it.pool.lane.lock();
    let copies =
        [7, 0, 7, 3, 0].map(|ahead| it.begin_behind(ahead, it.slice(Side::Send).unwrap(), 0, 10));
    let order: Vec<_> = locked(&it.pool.listed).iter().map(|listed| listed.ahead).collect();
    assert_eq!(order, [0, 0, 3, 7, 7]);
    it.pool.submit_listed(queue, || true);
    for mut copying in copies {
        until(|| copying.ended()).1.unwrap();
    }
}

#[test]
fn a_list_that_was_made_ahead_only_in_part_is_whole_and_in_order() {
    let count = PREPARED as u64 + 3;
    let pieces = (0..count).map(|at| (at * 100, 10));
    let mut list =
        Prepared::new(Tiles { pieces, now: (0, 0), middle: 7, side: Side::Send, tiles: u64::MAX });
    assert_eq!(list.made.len(), PREPARED);
    let (mut found, mut slot) = (Vec::new(), [CopyDescriptor::default(); 1000]);
    loop {
        match list.fill(&mut slot) {
            0 => break,
            filled => found.extend_from_slice(&slot[..filled]),
        }
    }
    let of = |at| CopyDescriptor { src: at * 100, dst: 7 + at * 10, len: 10 };
    assert_eq!(found, (0..count).map(of).collect::<Vec<_>>());
}

#[test]
fn nobody_submits_more_than_what_its_own_copy_needs() {
    let it = Fixture::new();
    let queue = it.pool.lane.lock();
    let mut first = it.begin(it.slice(Side::Send).unwrap(), 0, 10);
    let mut second = it.begin(it.slice(Side::Receive).unwrap(), 100, 10);
    drop(queue);
    let before = it.words();
    until(|| first.ended()).1.unwrap();
    assert_eq!(it.words() - before, 1);
    until(|| second.ended()).1.unwrap();
    assert_eq!(it.words() - before, 2);
}

#[test]
fn a_copy_that_is_dropped_keeps_its_slice_until_its_end() {
    let it = Fixture::new();
    let mut others = Vec::new();
    while let Some(slice) = it.slice(Side::Send) {
        others.push(slice);
    }
    it.control.hold();
    drop(it.begin(others.pop().unwrap(), 0, 20));
    // What only was listed is submitted first.
    let queue = it.pool.lane.lock();
    let listed = it.begin(others.pop().unwrap(), 100, 20);
    drop(queue);
    drop(listed);
    assert!(it.slice(Side::Send).is_none(), "the device still uses both");
    it.control.release();
    let both = [until(|| it.slice(Side::Send)), until(|| it.slice(Side::Send))];
    assert!(it.slice(Side::Send).is_none(), "there are no more than there were");
    drop(both);
}

#[test]
fn a_copy_that_the_driver_refuses_says_so_to_each_and_gives_slices_back() {
    let it = Fixture::new();
    for call in ["launch_inline", "store"] {
        let queue = it.pool.lane.lock();
        let copies = [0, 1].map(|at| it.begin(it.slice(Side::Send).unwrap(), at * 100, 20));
        it.control.fail(call, 0, Fault::Refused);
        it.pool.submit_listed(queue, || true);
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
    it.control.lose();
    let (slice, result) = until(|| copying.ended());
    assert!(slice.is_none(), "it is never used again");
    result.unwrap_err();
    it.control.release();
}

#[test]
fn whoever_sleeps_is_told_of_the_end() {
    let it = Fixture::new();
    it.control.hold();
    let mut copying = it.begin(it.slice(Side::Receive).unwrap(), 0, 20);
    copying.watch(&it.wake);
    assert!(copying.ended().is_none());
    it.control.release();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let told = async { tokio::time::timeout(Duration::from_secs(30), it.wake.notified()).await };
    runtime.block_on(told).expect("it is told");
    until(|| copying.ended()).1.unwrap();
}
