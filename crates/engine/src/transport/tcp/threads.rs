//! The threads that serve sockets. Each has a runtime of its own, and a lane stays on the thread that
//! it was given: its socket wakes that thread, and no other one stands in between.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use crate::error::{Error, Result};

/// The threads. Dropping it ends them, and with them all that runs there.
#[derive(Debug)]
pub(super) struct Threads {
    spread: Spread,
    /// The thread ends when the sender is dropped.
    threads: Vec<(oneshot::Sender<()>, JoinHandle<()>)>,
}

/// Gives out threads by turns.
#[derive(Clone, Debug)]
pub(super) struct Spread {
    handles: Arc<[Handle]>,
    next: Arc<AtomicUsize>,
}

impl Threads {
    pub(super) fn start(count: usize) -> Result<Self> {
        let failed =
            |call, error: std::io::Error| Error::System { call, reason: error.to_string() };
        let (mut threads, mut handles) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for _ in 0..count.max(1) {
            let runtime = Builder::new_current_thread().enable_io().enable_time().build();
            let runtime = runtime.map_err(|error| failed("runtime", error))?;
            handles.push(runtime.handle().clone());
            let (sender, ended) = oneshot::channel::<()>();
            let run = move || {
                // An error says that the sender was dropped, which is what ends it.
                let _ = runtime.block_on(ended);
            };
            let thread = std::thread::Builder::new().name("kvferry-tcp".into()).spawn(run);
            threads.push((sender, thread.map_err(|error| failed("thread", error))?));
        }
        let spread = Spread { handles: handles.into(), next: Arc::default() };
        Ok(Self { spread, threads })
    }

    pub(super) fn spread(&self) -> &Spread {
        &self.spread
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let (senders, threads): (Vec<_>, Vec<_>) = self.threads.drain(..).unzip();
        drop(senders);
        // A thread that runs tasks does not wait: it may be one of them.
        if Handle::try_current().is_err() {
            threads.into_iter().for_each(|thread| drop(thread.join()));
        }
    }
}

impl Spread {
    /// The thread whose turn it is.
    pub(super) fn next(&self) -> &Handle {
        &self.handles[self.next.fetch_add(1, Ordering::Relaxed) % self.handles.len()]
    }
}
