//! How threads wait for batches: by polls that give the processor away in time, and for the eventfd by
//! a thread of its own, which sleeps while nothing runs.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::engine::Engine;

/// How long a wait polls before it gives the processor away: about what a small batch takes.
const SPIN: Duration = Duration::from_micros(30);
/// Between polls after that.
const NAP: Duration = Duration::from_micros(50);

/// Between two polls. No vendor's event has a wait with a deadline, so waiting is polling; it
/// gives the processor away once the wait is longer than a small batch takes.
pub(crate) fn rest(waited: Duration) {
    if waited < SPIN {
        std::hint::spin_loop();
    } else {
        std::thread::sleep(NAP);
    }
}

/// The eventfd and the thread that keeps it true.
#[derive(Debug)]
pub(crate) struct Notifier {
    fd: OwnedFd,
    /// Whether batches may be running.
    work: Mutex<bool>,
    woken: Condvar,
}

impl Notifier {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self { fd, work: Mutex::default(), woken: Condvar::new() }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(crate) fn wake(&self) {
        *self.work.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.woken.notify_one();
    }

    pub(crate) fn signal(&self) {
        // The only failure is a full counter, and then it is readable already.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// Polls running batches; sleeps while there are none; ends with its engine.
    pub(crate) fn run(&self, engine: &Weak<Engine>) {
        loop {
            let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
            while !*work {
                work = self.woken.wait(work).unwrap_or_else(PoisonError::into_inner);
            }
            *work = false;
            drop(work);
            let start = Instant::now();
            loop {
                let Some(engine) = engine.upgrade() else { return };
                if engine.progress() == 0 {
                    break;
                }
                drop(engine);
                rest(start.elapsed());
            }
        }
    }
}
