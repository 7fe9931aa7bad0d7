//! Work that keeps a device busy while transfers run beside it, for measuring what each costs the
//! other.
//!
//! A load repeats one step, always of the same size, on its own threads from start to drop. On a
//! GPU it is one thread that keeps a few launches queued on a stream of normal priority, as a
//! model's own kernels are (`kernels/load.cu`); on host memory, and on a simulated GPU, one thread
//! for each processor does the same kind of work.
//!
//! Nothing that moves bytes uses this module.

mod processor;

use std::fmt::{self, Display};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::device::{DeviceInfo, Vendor};
use crate::error::Error;

/// What a load keeps busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadKind {
    /// A matrix product, as in a prefill: every multiprocessor is full.
    Gemm,
    /// Short independent blocks of arithmetic, about 40 us each on a GPU.
    Blocks,
    /// Reading and writing a large buffer, as memory-bound as a decode.
    Memory,
    /// The decode of a small batch: each step reads the weights of all layers in a few kernels a
    /// layer, one graph launch, and is waited for before the next begins.
    Decode,
}

impl LoadKind {
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::Gemm, Self::Blocks, Self::Memory, Self::Decode];

    /// `gemm`, `blocks`, `memory` or `decode`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gemm => "gemm",
            Self::Blocks => "blocks",
            Self::Memory => "memory",
            Self::Decode => "decode",
        }
    }
}

impl Display for LoadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a load does not run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// There is no compiler, or it refused the source.
    #[error("the loads do not compile for {device}: {reason}{}{log}", if log.is_empty() { "" } else { "\n" })]
    NotCompiled {
        /// The device to compile for.
        device: String,
        /// One line.
        reason: String,
        /// What the compiler said; may be empty.
        log: String,
    },
    /// The device cannot do this kind of work.
    #[error("{device} cannot run the load {load}: {reason}")]
    Unsupported {
        /// The device asked.
        device: String,
        /// The load asked for.
        load: LoadKind,
        /// What it lacks.
        reason: String,
    },
    /// The system gives no thread.
    #[error("no thread for a load: {0}")]
    NoThread(String),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] Error),
}

/// The loads of one device, compiled and sized. Sizes are measured once, so every load of a kind
/// that this starts does the same work, and their rates can be compared.
#[derive(Debug)]
pub struct Loads {
    device: String,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Processor,
    #[cfg(feature = "cuda")]
    Cuda(crate::cuda::load::CudaLoads),
}

impl Loads {
    /// Compiles the loads for a device, without a cache: a second or so.
    ///
    /// # Errors
    /// [`LoadError::NotCompiled`] with the compiler's own words, and what opening the device gives.
    pub fn open(device: &DeviceInfo) -> Result<Self, LoadError> {
        let backend = match device.vendor {
            Vendor::Host | Vendor::Sim => Backend::Processor,
            #[cfg(feature = "cuda")]
            Vendor::Cuda => Backend::Cuda(crate::cuda::load::CudaLoads::open(device.ordinal)?),
            #[cfg(not(feature = "cuda"))]
            Vendor::Cuda => {
                return Err(LoadError::NotCompiled {
                    device: device.to_string(),
                    reason:
                        "kvferry was built without NVIDIA support; build it with --features cuda"
                            .into(),
                    log: String::new(),
                });
            }
            Vendor::Rocm => {
                return Err(LoadError::NotCompiled {
                    device: device.to_string(),
                    reason: "the loads are written for NVIDIA GPUs only".into(),
                    log: String::new(),
                });
            }
        };
        Ok(Self { device: device.to_string(), backend })
    }

    /// Starts a load and returns once its first steps are done. With `timing` it reads the duration
    /// of each step; without, it only counts, which shows what the reading costs.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`], [`LoadError::NoThread`], or what the device's calls fail with.
    pub fn start(&self, kind: LoadKind, timing: bool) -> Result<Load, LoadError> {
        self.start_with(kind, timing, None)
    }

    /// As [`Loads::start`] with `timing`; `tell` is told how long each step took as it ends, on the
    /// load's own thread, which goes on when it returns.
    ///
    /// # Errors
    /// As [`Loads::start`].
    pub fn start_told(&self, kind: LoadKind, tell: Tell) -> Result<Load, LoadError> {
        self.start_with(kind, true, Some(tell))
    }

    fn start_with(
        &self,
        kind: LoadKind,
        timing: bool,
        tell: Option<Tell>,
    ) -> Result<Load, LoadError> {
        let (about, bodies) = match &self.backend {
            Backend::Processor => processor::bodies(kind),
            #[cfg(feature = "cuda")]
            Backend::Cuda(loads) => {
                let (about, body) = loads.prepare(kind)?;
                (about, vec![body])
            }
        };
        Load::start(&self.device, about, Shared::new(timing, tell), bodies)
    }
}

/// Is told how long a step took.
pub type Tell = Box<dyn Fn(Duration) + Send + Sync>;

/// What a thread of a load does until [`Shared::stopping`].
pub(crate) type Body = Box<dyn FnOnce(&Shared) -> Result<(), LoadError> + Send>;

/// A load that runs until it is dropped; dropping waits for the steps that were queued.
#[derive(Debug)]
pub struct Load {
    about: String,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// How far a load has come.
#[derive(Clone, Debug)]
pub struct Progress {
    /// Steps done since the start.
    pub steps: u64,
    /// When this process saw the last of them end, or the start.
    pub at: Instant,
    /// How long each step took that ended since the last reading; none without timing.
    ///
    /// On a GPU this is the time between the ends of two steps by the GPU's own clock, to half a
    /// microsecond: steps follow each other without a gap, and when the host comes to look does not
    /// matter. On a processor it is that of the step's thread. A decode step is timed by the host
    /// on both, from its launch until the host sees its end: that is what a token waits for.
    pub durations: Vec<Duration>,
}

/// A load that does no step in this time after its start does not run.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Durations that are kept for a reader, minutes of the shortest steps; later ones are only
/// counted.
const MAX_DURATIONS: usize = 1 << 20;

impl Load {
    fn start(
        device: &str,
        about: String,
        shared: Shared,
        bodies: Vec<Body>,
    ) -> Result<Self, LoadError> {
        let shared = Arc::new(shared);
        let mut load = Self { about, shared, threads: Vec::with_capacity(bodies.len()) };
        for body in bodies {
            let shared = Arc::clone(&load.shared);
            let work = move || {
                if let Err(error) = body(&shared) {
                    shared.fail(error);
                }
            };
            let thread = std::thread::Builder::new()
                .name("kvferry-load".into())
                .spawn(work)
                .map_err(|error| LoadError::NoThread(error.to_string()))?;
            load.threads.push(thread);
        }
        load.shared.wait_for_a_step(device)?;
        Ok(load)
    }

    /// What a step does, for people: sizes and types.
    pub fn about(&self) -> &str {
        &self.about
    }

    /// How far it has come; takes the durations of the steps since the last reading.
    ///
    /// # Errors
    /// What ended the load, if it ended by itself.
    pub fn read(&self) -> Result<Progress, LoadError> {
        let mut state = self.shared.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        let durations = std::mem::take(&mut state.durations);
        Ok(Progress { steps: state.steps, at: state.at, durations })
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::debug!("a thread of a load panicked");
            }
        }
    }
}

/// What a load's threads and its owner share. Touched once a step.
pub(crate) struct Shared {
    timing: bool,
    tell: Option<Tell>,
    stop: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("timing", &self.timing).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct State {
    steps: u64,
    at: Instant,
    durations: Vec<Duration>,
    failed: Option<LoadError>,
}

impl Shared {
    fn new(timing: bool, tell: Option<Tell>) -> Self {
        let state = State { steps: 0, at: Instant::now(), durations: Vec::new(), failed: None };
        Self {
            timing,
            tell,
            stop: AtomicBool::new(false),
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// Whether durations are wanted.
    pub(crate) fn timing(&self) -> bool {
        self.timing
    }

    /// Whether the load is being dropped.
    pub(crate) fn stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Counts steps that have ended just now.
    pub(crate) fn add(&self, steps: u64, duration: Option<Duration>) {
        if let (Some(tell), Some(duration)) = (&self.tell, duration) {
            tell(duration);
        }
        let mut state = self.lock();
        state.steps += steps;
        state.at = Instant::now();
        if let Some(duration) = duration
            && state.durations.len() < MAX_DURATIONS
        {
            state.durations.push(duration);
        }
        if state.steps == steps {
            // Only the first step is waited for.
            self.changed.notify_all();
        }
    }

    fn fail(&self, error: LoadError) {
        self.lock().failed.get_or_insert(error);
        self.changed.notify_all();
    }

    fn wait_for_a_step(&self, device: &str) -> Result<(), LoadError> {
        let silent = |state: &mut State| state.steps == 0 && state.failed.is_none();
        let (state, _) = self
            .changed
            .wait_timeout_while(self.lock(), START_TIMEOUT, silent)
            .unwrap_or_else(PoisonError::into_inner);
        match &state.failed {
            Some(error) => Err(error.clone()),
            None if state.steps == 0 => {
                Err(Error::Stalled { device: device.to_owned(), waited: START_TIMEOUT }.into())
            }
            None => Ok(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;

    fn host_loads() -> Loads {
        let host = crate::host().expect("host memory is always there");
        Loads::open(host.info()).expect("the processor needs no compiler")
    }

    /// Waits until the load has done more than `steps`.
    fn read_past(load: &Load, steps: u64) -> Progress {
        let start = Instant::now();
        loop {
            let progress = load.read().expect("it runs");
            if progress.steps > steps {
                return progress;
            }
            assert!(start.elapsed() < START_TIMEOUT, "no step after {steps}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn every_load_runs_from_start_on_and_reports_the_steps_since_the_last_reading() {
        for kind in LoadKind::ALL {
            let load = host_loads().start(kind, true).expect("it starts");
            let first = load.read().expect("it runs");
            assert!(first.steps > 0, "{kind}: start waits for a step");
            assert_eq!(first.durations.len() as u64, first.steps, "{kind}");
            let second = read_past(&load, first.steps);
            assert_eq!(second.durations.len() as u64, second.steps - first.steps, "{kind}");
            assert!(second.durations.iter().all(|step| !step.is_zero()), "{kind}");
            assert!(second.at > first.at, "{kind}");
        }
    }

    #[test]
    fn without_timing_steps_are_counted_and_not_timed() {
        let load = host_loads().start(LoadKind::Blocks, false).expect("it starts");
        assert!(read_past(&load, 1).durations.is_empty());
    }

    #[test]
    fn each_step_is_told_as_it_ends() {
        let told = Arc::new(Mutex::new(Vec::new()));
        let list = Arc::clone(&told);
        let tell: Tell = Box::new(move |took| list.lock().expect("no panic").push(took));
        let load = host_loads().start_told(LoadKind::Decode, tell).expect("it starts");
        // A reading takes the steps since the one before.
        let mut read = Vec::new();
        for steps in 0..3 {
            read.extend(read_past(&load, steps).durations);
        }
        assert!(read.len() > 2, "{read:?}");
        let told = told.lock().expect("no panic");
        assert!(told.len() >= read.len(), "{} of {}", told.len(), read.len());
        assert_eq!(told[..read.len()], read);
    }

    #[test]
    fn a_dropped_load_has_ended_all_its_threads() {
        let load = host_loads().start(LoadKind::Memory, true).expect("it starts");
        let shared: Weak<Shared> = Arc::downgrade(&load.shared);
        assert!(shared.strong_count() > 1, "threads hold it");
        drop(load);
        assert_eq!(shared.strong_count(), 0, "a thread still runs");
    }

    #[test]
    fn a_load_that_fails_says_why_at_its_start_and_when_read() {
        let lost = || Error::Lost { device: "cuda:0".into(), cause: "it is gone".into() };
        let body: Body = Box::new(move |_| Err(lost().into()));
        let error = Load::start("cuda:0", String::new(), Shared::new(true, None), vec![body])
            .expect_err("no step");
        assert_eq!(error, LoadError::Device(lost()));

        let body: Body = Box::new(move |shared| {
            shared.add(1, None);
            while !shared.stopping() {
                std::thread::yield_now();
            }
            Ok(())
        });
        let load = Load::start("cuda:0", String::new(), Shared::new(true, None), vec![body])
            .expect("one step");
        load.shared.fail(lost().into());
        assert_eq!(load.read().expect_err("it ended"), LoadError::Device(lost()));
    }
}
