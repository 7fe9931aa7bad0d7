//! A stream with launches on it, one step after the other, timed by events.

use std::ffi::{c_uint, c_void};
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;

use super::module::{Buffer, Function, Module};
use super::{BLOCK_THREADS, CudaLoads, report};
use crate::cuda::context::Context;
use crate::cuda::library::Failure;
use crate::error::Result;
use crate::load::{LoadError, Shared};

/// Events that may be waiting. Without timing an event stands for several steps.
const QUEUED: u64 = 4;
const STEPS_OF_AN_UNTIMED_EVENT: u64 = 4;

/// One step: a kernel, its grid, and its arguments in the order of its parameters.
#[derive(Debug)]
pub(super) struct Launch {
    pub(super) function: Function,
    pub(super) grid: [u32; 2],
    /// A parameter of 32 bits is the low half of its word: CUDA's hosts are little-endian. Those
    /// after the kernel's last parameter are not looked at.
    pub(super) arguments: [u64; 5],
}

/// A load with all that it needs.
#[derive(Debug)]
pub(crate) struct Running {
    pub(super) context: Arc<Context>,
    pub(super) stream: sys::CUstream,
    /// A ring: those that wait, and the one before them, which a duration is measured from.
    events: Vec<sys::CUevent>,
    pub(super) launch: Launch,
    /// What the launch works on; freed after the stream is idle.
    _buffers: Vec<Buffer>,
    _module: Arc<Module>,
}

// SAFETY: streams, events and functions are names that the driver takes on any thread.
unsafe impl Send for Running {}

impl Running {
    /// A stream and events; the launch is set afterwards.
    pub(super) fn new(loads: &CudaLoads, buffers: Vec<Buffer>) -> Result<Self> {
        let context = &loads.context;
        let cuda = context.cuda;
        let _scope = context.enter()?;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        let mut stream = std::ptr::null_mut();
        // SAFETY: the context is current; the driver writes one stream. Priority 0 is normal.
        unsafe { cuda.cuStreamCreateWithPriority(&mut stream, flags, 0) }
            .map_err(|failure| context.error(failure))?;
        // From here on `Drop` ends the stream and the events.
        let mut running = Self {
            context: Arc::clone(context),
            stream,
            events: Vec::new(),
            launch: Launch { function: loads.module.fill, grid: [0, 0], arguments: [0; 5] },
            _buffers: buffers,
            _module: Arc::clone(&loads.module),
        };
        // A thread that waits sleeps, see above.
        let flags = sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as c_uint;
        for _ in 0..QUEUED + 2 {
            let mut event = std::ptr::null_mut();
            // SAFETY: the context is current; the driver writes one event.
            unsafe { cuda.cuEventCreate(&mut event, flags) }
                .map_err(|failure| context.error(failure))?;
            running.events.push(event);
        }
        Ok(running)
    }

    /// Repeats the step until the load is dropped.
    pub(super) fn run(&self, shared: &Shared) -> Result<(), LoadError> {
        let _scope = self.context.enter()?;
        let steps = if shared.timing() { 1 } else { STEPS_OF_AN_UNTIMED_EVENT };
        // Events recorded, and those of them that were seen to fire, after event 0.
        let (mut recorded, mut seen) = (0, 0);
        self.record(0)?;
        while !shared.stopping() {
            for _ in 0..steps {
                self.step()?;
            }
            recorded += 1;
            self.record(recorded)?;
            if recorded - seen > QUEUED {
                seen += 1;
                self.wait(seen)?;
                let duration = match shared.timing() {
                    true => Some(self.elapsed(seen - 1, seen)?),
                    false => None,
                };
                shared.add(steps, duration);
            }
        }
        Ok(())
    }

    /// How long a step takes on a GPU that has been busy for a while, so that its clock is up.
    pub(super) fn step_time(&self) -> Result<Duration> {
        const WARM_UP: u32 = 20;
        const TIMED: u32 = 5;
        self.time(WARM_UP)?;
        Ok(self.time(TIMED)? / TIMED)
    }

    /// Runs `steps` steps and waits for them.
    pub(super) fn time(&self, steps: u32) -> Result<Duration> {
        let _scope = self.context.enter()?;
        self.record(0)?;
        for _ in 0..steps {
            self.step()?;
        }
        self.record(1)?;
        self.wait(1)?;
        self.elapsed(0, 1)
    }

    pub(super) fn step(&self) -> Result<()> {
        let mut arguments: [*mut c_void; 5] = (self.launch.arguments.each_ref())
            .map(|argument| std::ptr::from_ref(argument).cast_mut().cast());
        // SAFETY: `CudaLoads` builds launches with the parameters of their kernels and buffers of
        // the sizes that these say, which live as long as `self`. The driver only reads the
        // arguments, before it returns.
        unsafe {
            self.context.cuda.cuLaunchKernel(
                self.launch.function.0,
                self.launch.grid[0],
                self.launch.grid[1],
                1,
                BLOCK_THREADS,
                1,
                1,
                0,
                self.stream,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .map_err(|failure| self.context.error(failure))
    }

    fn event(&self, number: u64) -> sys::CUevent {
        self.events[(number % self.events.len() as u64) as usize]
    }

    fn record(&self, number: u64) -> Result<()> {
        // SAFETY: both belong to `self` and live.
        unsafe { self.context.cuda.cuEventRecord(self.event(number), self.stream) }
            .map_err(|failure| self.context.error(failure))
    }

    fn wait(&self, number: u64) -> Result<()> {
        // SAFETY: the event belongs to `self` and lives.
        unsafe { self.context.cuda.cuEventSynchronize(self.event(number)) }
            .map_err(|failure| self.context.error(failure))
    }

    /// Time on the GPU between two events that have fired.
    fn elapsed(&self, start: u64, end: u64) -> Result<Duration> {
        let mut milliseconds = 0.0;
        // SAFETY: both events belong to `self`, take times, and were recorded.
        unsafe {
            self.context.cuda.cuEventElapsedTime_v2(
                &mut milliseconds,
                self.event(start),
                self.event(end),
            )
        }
        .map_err(|failure| self.context.error(failure))?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let cuda = self.context.cuda;
        let error = |failure: Failure| self.context.error(failure);
        report(self.context.enter().map(|_scope| {
            // SAFETY: the stream is ours. What it runs uses the buffers, which are freed after this.
            report(unsafe { cuda.cuStreamSynchronize(self.stream) }.map_err(error));
            for event in &self.events {
                // SAFETY: made by `new`, destroyed once.
                report(unsafe { cuda.cuEventDestroy_v2(*event) }.map_err(error));
            }
            // SAFETY: as for the events.
            report(unsafe { cuda.cuStreamDestroy_v2(self.stream) }.map_err(error));
        }));
    }
}
