//! One thread that notices when peers die.
//!
//! A process that ends, however it ends, closes its sockets; the other end of the exports
//! connection then hangs up. Silence is no sign: a stopped peer is alive.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use kvferry_device::MadeBy;
use kvferry_engine::Target;
use rustix::event::{PollFd, PollFlags};

use crate::error::NodeError;
use crate::socket::{self, Wake};

/// The thread. Whoever opens peers has it, and so does each [`Watch`], whose peer may outlive that.
#[derive(Debug)]
pub(crate) struct Monitor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// A fork has no such thread, and leaves its locks alone.
    made_by: MadeBy,
}

/// A peer is watched until this is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    monitor: Arc<Monitor>,
    key: u64,
}

#[derive(Debug)]
struct Shared {
    /// Raised when the list changes.
    wake: Wake,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    stop: bool,
    peers: HashMap<u64, Watched>,
}

#[derive(Debug)]
struct Watched {
    socket: Arc<OwnedFd>,
    target: Target,
}

impl Monitor {
    pub(crate) fn start() -> Result<Arc<Self>, NodeError> {
        let wake = Wake::new().map_err(|error| NodeError::system("eventfd", error))?;
        let shared = Arc::new(Shared { wake, state: Mutex::default() });
        let watching = Arc::clone(&shared);
        let thread = Builder::new().name("kvferry-monitor".into()).spawn(move || watching.run());
        let thread = thread.map_err(|error| NodeError::system("starting a thread", error))?;
        let made_by = MadeBy::this_process();
        Ok(Arc::new(Self { shared, thread: Some(thread), made_by }))
    }

    /// Declares `target` lost as soon as the other end of `socket` closes.
    pub(crate) fn watch(self: &Arc<Self>, socket: Arc<OwnedFd>, target: Target) -> Watch {
        let mut state = self.shared.state();
        let key = state.next;
        state.next += 1;
        state.peers.insert(key, Watched { socket, target });
        drop(state);
        self.shared.wake.raise();
        Watch { monitor: Arc::clone(self), key }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        if !self.made_by.is_this_process() {
            return std::mem::forget(self.thread.take());
        }
        self.shared.state().stop = true;
        self.shared.wake.raise();
        // A panic there was reported when it happened.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !self.monitor.made_by.is_this_process() {
            return;
        }
        let watched = self.monitor.shared.state().peers.remove(&self.key);
        if watched.is_some() {
            self.monitor.shared.wake.raise();
        }
    }
}

/// Before polling again after a failure of poll itself, which is none of a peer.
const REST: Duration = Duration::from_millis(100);

impl Shared {
    fn run(&self) {
        loop {
            self.wake.clear();
            let watched: Vec<(u64, Arc<OwnedFd>)> = {
                let state = self.state();
                if state.stop {
                    return;
                }
                state
                    .peers
                    .iter()
                    .map(|(&key, watched)| (key, Arc::clone(&watched.socket)))
                    .collect()
            };
            let hung_up = match hung_up(&self.wake, &watched) {
                Ok(keys) => keys,
                Err(error) => {
                    tracing::warn!(%error, "cannot watch peers, trying again");
                    let _ = socket::wait_readable(&self.wake, Some(Instant::now() + REST));
                    continue;
                }
            };
            for key in hung_up {
                let gone = self.state().peers.remove(&key);
                // Outside the lock: it closes mappings.
                if let Some(Watched { target, .. }) = gone {
                    target.lose("its connection closed: the process ended, or its node was closed");
                }
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for the wake or a hang-up; the keys of the latter. Does not read, as fetches do.
fn hung_up(wake: &Wake, watched: &[(u64, Arc<OwnedFd>)]) -> rustix::io::Result<Vec<u64>> {
    let mut fds = Vec::with_capacity(watched.len() + 1);
    fds.extend(watched.iter().map(|(_, socket)| PollFd::new(&**socket, PollFlags::RDHUP)));
    fds.push(PollFd::new(wake, PollFlags::IN));
    socket::wait(&mut fds, None)?;
    let closed = watched.iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
    Ok(closed.map(|((key, _), _)| *key).collect())
}
