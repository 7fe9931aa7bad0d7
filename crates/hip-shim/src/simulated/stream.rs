//! Streams: sequences of work, each run by a thread of its own, and the order between them.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use hip_sys::*;

use super::capture::{self, Capture};
use super::device::{check_device, current_device};
use super::memory::memory;
use crate::call::{Result, put};
use crate::faults::lost;

/// Handles with a meaning of their own, in HIP as in CUDA.
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

/// How often a stream's thread looks for work before it sleeps: many copies come close together.
const SPINS: u32 = 20;

/// How often a thread looks at what nobody tells it: a word in memory, and a device that is lost.
const LOOK: Duration = Duration::from_micros(50);

pub(super) enum Work {
    Run(Box<dyn FnOnce() + Send>),
    /// Notes when it is reached.
    Record(Arc<OnceLock<Instant>>),
    /// Waits for work of another stream.
    Wait(Point),
    /// Waits for a word in memory.
    WaitWord(Box<dyn Fn() -> bool + Send>),
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Run(_) => "Run",
            Self::Record(_) => "Record",
            Self::Wait(_) => "Wait",
            Self::WaitWord(_) => "WaitWord",
        })
    }
}

/// A place in a stream.
#[derive(Clone, Debug)]
pub(super) struct Point {
    stream: Arc<Stream>,
    /// Pieces of work of the stream up to here.
    count: u64,
}

impl Point {
    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(super) fn is_reached(&self) -> bool {
        self.stream.queue().done >= self.count
    }

    /// Blocks until it is reached, or the device is lost.
    pub(super) fn wait(&self) -> Result {
        let mut queue = self.stream.queue();
        while queue.done < self.count {
            if let Some(code) = lost() {
                return Err(code);
            }
            queue.awaited = queue.awaited.min(self.count);
            queue = sleep(&self.stream.progress, queue);
        }
        Ok(())
    }
}

#[derive(Debug)]
pub(super) struct Stream {
    pub(super) device: c_int,
    /// Ordered with the legacy default stream of its device.
    blocking: bool,
    queue: Mutex<Queue>,
    /// For the stream's thread: there is work.
    work: Condvar,
    /// For those that wait: what somebody waits for is done.
    progress: Condvar,
    pub(super) capture: Mutex<Option<Capture>>,
}

#[derive(Debug)]
struct Queue {
    waiting: VecDeque<Work>,
    /// Pieces of work that were submitted, ever.
    submitted: u64,
    /// Those that are done.
    done: u64,
    /// Whether a thread runs the stream.
    running: bool,
    /// That thread sleeps. To wake one that does not costs a call of the kernel, too.
    asleep: bool,
    /// The least count that somebody waits for.
    awaited: u64,
}

/// Waits for a while: nobody says when the device is lost.
fn sleep<'a>(until: &Condvar, queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
    let limit = Duration::from_millis(20);
    until.wait_timeout(queue, limit).unwrap_or_else(PoisonError::into_inner).0
}

impl Stream {
    fn new(device: c_int, blocking: bool) -> Arc<Self> {
        Arc::new(Self {
            device,
            blocking,
            queue: Mutex::new(Queue {
                waiting: VecDeque::new(),
                submitted: 0,
                done: 0,
                running: false,
                asleep: false,
                awaited: u64::MAX,
            }),
            work: Condvar::new(),
            progress: Condvar::new(),
            capture: Mutex::default(),
        })
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The end of what was submitted so far.
    fn end(self: &Arc<Self>) -> Point {
        let count = self.queue().submitted;
        Point { stream: Arc::clone(self), count }
    }

    fn push(self: &Arc<Self>, work: Work) -> Point {
        let mut queue = self.queue();
        queue.waiting.push_back(work);
        queue.submitted += 1;
        let count = queue.submitted;
        if !std::mem::replace(&mut queue.running, true) {
            let stream = Arc::clone(self);
            let thread = std::thread::Builder::new().name(format!("hip-{}", self.device));
            thread.spawn(move || stream.run()).expect("a thread");
        }
        let asleep = queue.asleep;
        drop(queue);
        if asleep {
            self.work.notify_one();
        }
        Point { stream: Arc::clone(self), count }
    }

    /// Runs what is there; the thread ends when there has been nothing for a while.
    fn run(&self) {
        let mut idle = 0;
        let mut queue = self.queue();
        loop {
            let Some(work) = queue.waiting.pop_front() else {
                if idle > SPINS + 50 {
                    queue.running = false;
                    return;
                }
                idle += 1;
                if idle <= SPINS {
                    drop(queue);
                    std::thread::yield_now();
                    queue = self.queue();
                } else {
                    queue.asleep = true;
                    queue = sleep(&self.work, queue);
                    queue.asleep = false;
                }
                continue;
            };
            idle = 0;
            drop(queue);
            if !work.run() {
                return;
            }
            queue = self.queue();
            queue.done += 1;
            if queue.done >= queue.awaited {
                // Who waits for more says so again.
                queue.awaited = u64::MAX;
                self.progress.notify_all();
            }
        }
    }
}

impl Work {
    /// `false` if the device is lost; then nothing of the stream runs any more.
    fn run(self) -> bool {
        if lost().is_some() {
            return false;
        }
        match self {
            Self::Run(work) => work(),
            Self::Record(time) => {
                let _ = time.set(Instant::now());
            }
            Self::Wait(point) => return point.wait().is_ok(),
            Self::WaitWord(holds) => {
                while !holds() {
                    if lost().is_some() {
                        return false;
                    }
                    std::thread::sleep(LOOK);
                }
            }
        }
        true
    }
}

/// All streams of the process. Submitting holds the lock, so that the order between the legacy
/// default stream and the others is one order.
#[derive(Debug, Default)]
pub(super) struct Streams {
    /// By handle.
    known: HashMap<usize, Arc<Stream>>,
    /// Of each device its legacy default stream.
    legacy: HashMap<c_int, Arc<Stream>>,
    /// Those of threads, and those that were destroyed while they had work.
    others: Vec<Arc<Stream>>,
}

pub(super) fn streams() -> MutexGuard<'static, Streams> {
    static STREAMS: LazyLock<Mutex<Streams>> = LazyLock::new(Mutex::default);
    STREAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    static OF_THREAD: RefCell<HashMap<c_int, Arc<Stream>>> = RefCell::default();
}

impl Streams {
    /// The stream that a handle means on this thread.
    pub(super) fn find(&mut self, handle: hipStream_t) -> Result<Arc<Stream>> {
        match handle.addr() {
            0 | LEGACY => {
                let device = current_device();
                let legacy = self.legacy.entry(device);
                Ok(Arc::clone(legacy.or_insert_with(|| Stream::new(device, false))))
            }
            PER_THREAD => Ok(self.of_thread()),
            handle => self.known.get(&handle).cloned().ok_or(hipErrorContextIsDestroyed),
        }
    }

    fn of_thread(&mut self) -> Arc<Stream> {
        let device = current_device();
        OF_THREAD.with_borrow_mut(|streams| {
            let stream = streams.entry(device).or_insert_with(|| {
                let stream = Stream::new(device, true);
                self.others.push(Arc::clone(&stream));
                stream
            });
            Arc::clone(stream)
        })
    }

    pub(super) fn is_legacy(&self, stream: &Arc<Stream>) -> bool {
        self.legacy.get(&stream.device).is_some_and(|legacy| Arc::ptr_eq(legacy, stream))
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Stream>> {
        self.known.values().chain(self.legacy.values()).chain(&self.others)
    }

    /// All streams of a device.
    pub(super) fn of_device(&self, device: c_int) -> impl Iterator<Item = &Arc<Stream>> {
        self.all().filter(move |stream| stream.device == device)
    }

    /// Those that the legacy default stream of the device waits for, and that wait for it.
    pub(super) fn blocking(&self, device: c_int) -> impl Iterator<Item = &Arc<Stream>> {
        self.of_device(device).filter(|stream| stream.blocking)
    }

    /// Puts work behind all that it has to come after.
    pub(super) fn submit(&mut self, stream: &Arc<Stream>, work: Work) -> Point {
        let before: Vec<Point> = if self.is_legacy(stream) {
            self.blocking(stream.device).map(Stream::end).collect()
        } else if stream.blocking {
            self.legacy.get(&stream.device).map(Stream::end).into_iter().collect()
        } else {
            Vec::new()
        };
        for point in before.into_iter().filter(|point| !point.is_reached()) {
            stream.push(Work::Wait(point));
        }
        stream.push(work)
    }

    /// The end of all work of a device.
    pub(super) fn end_of_device(&self, device: c_int) -> Vec<Point> {
        self.of_device(device).map(Stream::end).collect()
    }
}

/// Waits for all work of a device, as freeing memory does.
pub(super) fn wait_for_device(device: c_int) -> Result {
    let points = streams().end_of_device(device);
    points.iter().try_for_each(Point::wait)
}

/// Puts work into the stream of that handle; into its graph, where it never runs, while it is being
/// captured. `None` says that it was captured.
pub(super) fn submit(handle: hipStream_t, work: Work) -> Result<Option<Point>> {
    let mut streams = streams();
    let stream = streams.find(handle)?;
    if capture::add(&streams, &stream)? {
        return Ok(None);
    }
    Ok(Some(streams.submit(&stream, work)))
}

pub(crate) unsafe fn hipStreamCreateWithPriority(
    place: *mut hipStream_t,
    flags: c_uint,
    _priority: c_int,
) -> Result {
    let device = check_device(current_device())?;
    if flags & !hipStreamNonBlocking != 0 {
        return Err(hipErrorInvalidValue);
    }
    let stream = Stream::new(device, flags & hipStreamNonBlocking == 0);
    let handle = Arc::as_ptr(&stream).expose_provenance();
    streams().known.insert(handle, stream);
    // SAFETY: the caller's contract.
    unsafe { put(place, std::ptr::without_provenance_mut(handle)) }
}

pub(crate) unsafe fn hipExtStreamCreateWithCUMask(
    place: *mut hipStream_t,
    mask_words: u32,
    mask: *const u32,
) -> Result {
    if mask_words == 0 || mask.is_null() {
        return Err(hipErrorInvalidValue);
    }
    // SAFETY: the caller's contract.
    unsafe { hipStreamCreateWithPriority(place, hipStreamDefault, 0) }
}

pub(crate) unsafe fn hipDeviceGetStreamPriorityRange(
    least: *mut c_int,
    greatest: *mut c_int,
) -> Result {
    // SAFETY: the caller's contract.
    unsafe {
        put(least, 1)?;
        put(greatest, -1)
    }
}

pub(crate) unsafe fn hipStreamDestroy(handle: hipStream_t) -> Result {
    match handle.addr() {
        0 | LEGACY | PER_THREAD => return Err(hipErrorInvalidResourceHandle),
        _ => {}
    }
    let mut streams = streams();
    let stream = streams.known.remove(&handle.addr()).ok_or(hipErrorContextIsDestroyed)?;
    capture::forget(&stream);
    // Its work goes on.
    streams.others.retain(|other| Arc::strong_count(other) > 1 || !other.end().is_reached());
    if !stream.end().is_reached() {
        streams.others.push(stream);
    }
    Ok(())
}

pub(crate) unsafe fn hipStreamGetDevice(handle: hipStream_t, place: *mut hipDevice_t) -> Result {
    let device = streams().find(handle)?.device;
    // SAFETY: the caller's contract.
    unsafe { put(place, device) }
}

pub(crate) unsafe fn hipStreamQuery(handle: hipStream_t) -> Result {
    let point = end_of(handle)?;
    if point.iter().all(Point::is_reached) { Ok(()) } else { Err(hipErrorNotReady) }
}

pub(crate) unsafe fn hipStreamSynchronize(handle: hipStream_t) -> Result {
    end_of(handle)?.iter().try_for_each(Point::wait)
}

/// What has to be reached before the stream is idle.
fn end_of(handle: hipStream_t) -> Result<Vec<Point>> {
    let mut streams = streams();
    let stream = streams.find(handle)?;
    capture::refuse_wait(&stream)?;
    let mut points = vec![stream.end()];
    if streams.is_legacy(&stream) {
        points.extend(streams.blocking(stream.device).map(Stream::end));
    }
    Ok(points)
}

pub(crate) unsafe fn hipStreamWriteValue32(
    handle: hipStream_t,
    word: *mut c_void,
    value: u32,
    _flags: c_uint,
) -> Result {
    let word = memory().word(word)?;
    let store = move || word.store(value);
    submit(handle, Work::Run(Box::new(store))).map(drop)
}

pub(crate) unsafe fn hipStreamWaitValue32(
    handle: hipStream_t,
    word: *mut c_void,
    value: u32,
    flags: c_uint,
    mask: u32,
) -> Result {
    let word = memory().word(word)?;
    let holds: fn(u32, u32) -> bool = match flags {
        hipStreamWaitValueGte => |found, value| found >= value,
        hipStreamWaitValueEq => |found, value| found == value,
        hipStreamWaitValueAnd => |found, value| found & value != 0,
        hipStreamWaitValueNor => |found, value| !(found | value) != 0,
        _ => return Err(hipErrorInvalidValue),
    };
    let holds = move || holds(word.load() & mask, value);
    submit(handle, Work::WaitWord(Box::new(holds))).map(drop)
}
