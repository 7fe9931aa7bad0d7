//! A decode step as the GPU sees it: one graph launch of memory-bound kernels that read the weights
//! of all layers. Nothing is computed with them, and nothing is written: what disturbs such a step
//! is whatever takes memory bandwidth or multiprocessors from it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::module::Buffer;
use super::steps::{Launch, Running};
use super::{CudaLoads, report};
use crate::error::Result;
use crate::load::{LoadError, Shared};

/// Layers of a step, and kernels of a layer: about a 4B model's (Qwen3-4B has 36).
const LAYERS: u64 = 36;
const KERNELS_OF_A_LAYER: u64 = 4;
/// Bytes that a kernel reads; an H200 then needs 3 ms for a step (LAB.md).
const KERNEL_BYTES: u64 = 80 << 20;
/// Layers that have memory of their own; the others read the same again, far more than a cache
/// holds later.
const DISTINCT_LAYERS: u64 = 8;
/// Steps before the first one that counts, so that the clock is up.
const WARM_UP: u32 = 32;

/// A graph of one step, and what it reads.
#[derive(Debug)]
pub(super) struct Decode {
    graph: Graph,
    stream: Running,
    kernel_bytes: u64,
}

impl Decode {
    /// Captures the step. A GPU with little memory gets smaller layers.
    pub(super) fn new(loads: &CudaLoads) -> Result<Self> {
        let kernels = DISTINCT_LAYERS * KERNELS_OF_A_LAYER;
        let kernel_bytes = KERNEL_BYTES.min(loads.memory_bytes / 8 / kernels) / 16 * 16;
        let weights = Buffer::new(&loads.context, kernels * kernel_bytes)?;
        let sink = Buffer::new(&loads.context, 4)?;
        let (weights_addr, sink_addr) = (weights.addr, sink.addr);
        let mut stream = Running::new(loads, vec![weights, sink])?;
        stream.launch = Launch {
            function: loads.module.fill,
            grid: [loads.resident, 1],
            arguments: [weights_addr, kernels * kernel_bytes / 2, 1, 0, 0],
        };
        stream.time(1)?;
        let launches = (0..LAYERS * KERNELS_OF_A_LAYER).map(|kernel| Launch {
            function: loads.module.weights,
            grid: [loads.resident, 1],
            arguments: [
                weights_addr + kernel % kernels * kernel_bytes,
                kernel_bytes / 16,
                sink_addr,
                0,
                0,
            ],
        });
        let graph = Graph::capture(&mut stream, launches)?;
        Ok(Self { graph, stream, kernel_bytes })
    }

    /// What a step does.
    pub(super) fn about(&self) -> String {
        let kernels = LAYERS * KERNELS_OF_A_LAYER;
        format!(
            "a graph of {LAYERS} layers of {KERNELS_OF_A_LAYER} kernels that read {:.2} GB of \
             weights, waited for before the next",
            (kernels * self.kernel_bytes) as f64 / 1e9
        )
    }

    /// Decodes until the load is dropped.
    pub(super) fn run(&self, shared: &Shared) -> Result<(), LoadError> {
        let _scope = self.stream.context.enter()?;
        for _ in 0..WARM_UP {
            self.step()?;
        }
        while !shared.stopping() {
            let took = self.step()?;
            shared.add(1, shared.timing().then_some(took));
        }
        Ok(())
    }

    /// One step, from its launch until the host sees its end. The context is current.
    fn step(&self) -> Result<Duration> {
        let start = Instant::now();
        let cuda = self.stream.context.cuda;
        // SAFETY: graph and stream live; what the kernels read belongs to `self.stream`.
        unsafe { cuda.cuGraphLaunch(self.graph.executable, self.stream.stream) }
            .and_then(|()| {
                // SAFETY: the stream is ours. The driver decides how it waits, as it would for an
                // engine that synchronises.
                unsafe { cuda.cuStreamSynchronize(self.stream.stream) }
            })
            .map_err(|failure| self.stream.context.error(failure))?;
        Ok(start.elapsed())
    }
}

/// A graph that can be launched. It is destroyed after its last launch has ended: every step waits.
#[derive(Debug)]
struct Graph {
    context: Arc<super::Context>,
    executable: sys::CUgraphExec,
}

// SAFETY: a graph is a name that the driver takes on any thread; one thread at a time uses it.
unsafe impl Send for Graph {}

impl Graph {
    /// Records the launches of `stream` instead of running them.
    fn capture(stream: &mut Running, launches: impl Iterator<Item = Launch>) -> Result<Self> {
        let context = Arc::clone(&stream.context);
        let cuda = context.cuda;
        let scope = context.enter()?;
        let error = |failure| context.error(failure);
        // The calling thread's other calls, and those of other threads, go on beside the capture.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the context is current and the stream is ours; nothing is queued on it.
        unsafe { cuda.cuStreamBeginCapture_v2(stream.stream, mode) }.map_err(error)?;
        let mut launched = Ok(());
        for launch in launches {
            stream.launch = launch;
            launched = launched.and_then(|()| stream.step());
        }
        let mut graph = std::ptr::null_mut();
        // SAFETY: ends the capture that began above, whatever became of the launches.
        let ended = unsafe { cuda.cuStreamEndCapture(stream.stream, &mut graph) }.map_err(error);
        launched?;
        ended?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: the graph is whole; the driver writes one name.
        let made = unsafe { cuda.cuGraphInstantiateWithFlags(&mut executable, graph, 0) };
        // SAFETY: made by the capture, destroyed once; the executable does not need it.
        report(unsafe { cuda.cuGraphDestroy(graph) }.map_err(error));
        made.map_err(error)?;
        drop(scope);
        Ok(Self { context, executable })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let destroyed = self.context.enter().and_then(|_scope| {
            // SAFETY: made by `capture`, destroyed once.
            unsafe { self.context.cuda.cuGraphExecDestroy(self.executable) }
                .map_err(|failure| self.context.error(failure))
        });
        report(destroyed);
    }
}
