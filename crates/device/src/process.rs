//! Which process this is, asked without a system call. Locks that another thread held, threads, and
//! whatever a driver keeps do not survive a fork.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

/// Forks between the first process that asked and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The process that made something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MadeBy {
    forks: u32,
    process: u32,
}

impl MadeBy {
    /// The calling one. From now on its forks are noticed.
    pub fn this_process() -> Self {
        extern "C" fn in_child() {
            FORKS.fetch_add(1, Ordering::Relaxed);
        }
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(|| {
            // SAFETY: the handler only adds to a static, which a child of a thread may do, and a
            // library is never unloaded (`-z nodelete`). Without memory for it there is no handler.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
        Self { forks: FORKS.load(Ordering::Relaxed), process: std::process::id() }
    }

    /// Whether the calling process is it, and no fork of it.
    pub fn is_this_process(&self) -> bool {
        self.forks == FORKS.load(Ordering::Relaxed)
    }

    /// Its number.
    pub fn process(&self) -> u32 {
        self.process
    }
}

/// Whether this is a fork of a process that had made something.
pub fn is_fork() -> bool {
    FORKS.load(Ordering::Relaxed) > 0
}
