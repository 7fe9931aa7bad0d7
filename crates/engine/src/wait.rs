//! How threads wait for batches: by polls that give the processor away in time, and for the eventfd by
//! a thread of its own, which sleeps while nothing runs.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::thread::Builder;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use crate::engine::Engine;
use crate::error::{Error, Result};

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

/// Held while one is started: what `started` gives out has its thread, whoever made it.
static STARTING: Mutex<()> = Mutex::new(());

impl Notifier {
    /// The engine's one, which is kept in `place`; started if there is none.
    ///
    /// # Errors
    /// [`Error::System`] if there are no more descriptors or threads; nothing is left of it then.
    pub(crate) fn started<'a>(
        place: &'a OnceLock<Arc<Self>>,
        engine: &Arc<Engine>,
    ) -> Result<&'a Arc<Self>> {
        if let Some(notifier) = place.get() {
            return Ok(notifier);
        }
        let _alone = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(notifier) = place.get() {
            return Ok(notifier);
        }
        let failed = |call| move |reason: String| Error::System { call, reason };
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let fd = fd.map_err(|error| failed("eventfd")(error.to_string()))?;
        let notifier = Arc::new(Self { fd, work: Mutex::default(), woken: Condvar::new() });
        let (run, engine) = (Arc::clone(&notifier), Arc::downgrade(engine));
        let thread = Builder::new().name("kvferry-notify".into()).spawn(move || run.run(&engine));
        thread.map_err(|error| failed("thread")(error.to_string()))?;
        let notifier = place.get_or_init(|| notifier);
        // Batches that run already told nobody.
        notifier.wake();
        Ok(notifier)
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
