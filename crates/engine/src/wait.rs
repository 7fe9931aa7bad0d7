//! How threads wait for batches: by polls that give the processor away in time, and for the eventfd by
//! a thread of its own, which sleeps while nothing runs.

use std::marker::PhantomData;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::thread::Builder;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::{current_timer_slack, set_current_timer_slack};

use crate::engine::Engine;
use crate::error::{Error, Result};

/// How long a wait polls before it gives the processor away: about what a small batch takes.
const SPIN: Duration = Duration::from_micros(30);
/// Between polls after that: as long as an end may be noticed late.
const NAP: Duration = Duration::from_micros(20);
/// In a wait that takes long: a 64th of what it took so far, up to this.
const LONGEST_NAP: Duration = Duration::from_micros(100);

/// A wait. No vendor's event has a wait with a deadline, so waiting is polling; it gives the processor away
/// once it is longer than a small batch takes.
#[derive(Debug)]
pub(crate) struct Wait {
    start: Instant,
    naps: Option<PunctualNaps>,
}

impl Wait {
    pub(crate) fn begin() -> Self {
        Self { start: Instant::now(), naps: None }
    }

    /// How long it takes already.
    pub(crate) fn waited(&self) -> Duration {
        self.start.elapsed()
    }

    /// Between two polls.
    pub(crate) fn rest(&mut self) {
        let waited = self.waited();
        if waited < SPIN {
            std::hint::spin_loop();
        } else {
            self.naps.get_or_insert_with(PunctualNaps::begin);
            std::thread::sleep((waited / 64).clamp(NAP, LONGEST_NAP));
        }
    }
}

/// Naps of this thread end in time, until it is dropped; Linux lets one last 50 us longer otherwise, so
/// that timers of several threads may run out together (prctl(2), PR_SET_TIMERSLACK).
#[derive(Debug)]
struct PunctualNaps {
    /// The thread's own slack in nanoseconds, if it is known.
    slack: Option<u64>,
    /// Of this thread.
    _here: PhantomData<*const ()>,
}

impl PunctualNaps {
    fn begin() -> Self {
        let slack = current_timer_slack().ok();
        if slack.is_some() {
            punctual_naps();
        }
        Self { slack, _here: PhantomData }
    }
}

impl Drop for PunctualNaps {
    fn drop(&mut self) {
        if let Some(slack) = self.slack {
            // None is for the thread's default, which is what 0 stands for.
            let _ = set_current_timer_slack(NonZeroU64::new(slack));
        }
    }
}

/// The same for a thread of ours, as long as it lives.
pub(crate) fn punctual_naps() {
    let _ = set_current_timer_slack(NonZeroU64::new(1));
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
            let mut wait = Wait::begin();
            loop {
                let Some(engine) = engine.upgrade() else { return };
                if engine.progress() == 0 {
                    break;
                }
                drop(engine);
                wait.rest();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn naps_end_in_time_and_the_timer_slack_of_the_thread_is_its_own_again_behind_the_wait() {
        set_current_timer_slack(NonZeroU64::new(77_000)).expect("Linux has it");
        let mut wait = Wait::begin();
        assert_eq!(current_timer_slack(), Ok(77_000), "no nap yet");
        while wait.naps.is_none() {
            wait.rest();
        }
        assert_eq!(current_timer_slack(), Ok(1));
        drop(wait);
        assert_eq!(current_timer_slack(), Ok(77_000));
    }
}
