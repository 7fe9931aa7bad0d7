//! The threads that serve sockets. Each has a runtime of its own, and a lane stays on the thread that
//! it was given: its socket wakes that thread, and no other one stands in between.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder as Named, JoinHandle};

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::oneshot;

use crate::error::{Error, Result};

/// The threads, started when they are first needed. Dropping it ends them, and with them all that runs
/// there; of a thread that drops it itself, once it has returned to its runtime.
#[derive(Debug)]
pub(super) struct Threads(Spread);

/// Gives out threads by turns.
#[derive(Clone, Debug)]
pub(super) struct Spread {
    threads: Arc<[Mutex<Place>]>,
    next: Arc<AtomicUsize>,
}

#[derive(Debug, Default)]
enum Place {
    #[default]
    Empty,
    Taken(Thread),
    /// There will be no thread any more.
    Closed,
}

#[derive(Debug)]
struct Thread {
    handle: Handle,
    /// The thread ends when this is dropped.
    until: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl Threads {
    pub(super) fn new(count: usize) -> Self {
        let threads = (0..count.max(1)).map(|_| Mutex::default()).collect();
        Self(Spread { threads, next: Arc::default() })
    }

    pub(super) fn spread(&self) -> &Spread {
        &self.0
    }
}

impl Threads {
    /// Ends the threads, and waits for all but the calling one.
    pub(super) fn close(&self) {
        let close = |place: &Mutex<Place>| {
            let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
            match std::mem::replace(&mut *place, Place::Closed) {
                Place::Taken(Thread { until, thread, .. }) => {
                    drop(until);
                    Some(thread)
                }
                Place::Empty | Place::Closed => None,
            }
        };
        // All are told before the first is waited for.
        let threads: Vec<_> = self.0.threads.iter().filter_map(close).collect();
        let here = std::thread::current().id();
        let others = threads.into_iter().filter(|thread| thread.thread().id() != here);
        // A panic there was reported when it happened.
        others.for_each(|thread| drop(thread.join()));
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.close();
    }
}

impl Spread {
    /// The thread whose turn it is.
    ///
    /// # Errors
    /// [`Error::System`] if it cannot be started, or the engine is being closed.
    pub(super) fn next(&self) -> Result<Handle> {
        let turn = self.next.fetch_add(1, Ordering::Relaxed) % self.threads.len();
        let mut place = self.threads[turn].lock().unwrap_or_else(PoisonError::into_inner);
        match &*place {
            Place::Taken(thread) => Ok(thread.handle.clone()),
            Place::Empty => {
                let spawn = |run| Named::new().name("kvferry-tcp".into()).spawn(run);
                let thread = start(spawn)?;
                let handle = thread.handle.clone();
                *place = Place::Taken(thread);
                Ok(handle)
            }
            Place::Closed => {
                let reason = "the engine is being closed".to_owned();
                Err(Error::System { call: "thread", reason })
            }
        }
    }

    /// Threads that run.
    #[cfg(test)]
    pub(super) fn started(&self) -> usize {
        let is_taken = |place: &&Mutex<Place>| matches!(*place.lock().unwrap(), Place::Taken(_));
        self.threads.iter().filter(is_taken).count()
    }
}

/// The thread comes first, and waits for its runtime: one that has no thread to run it could not be
/// dropped here, where a task may be running.
fn start(
    spawn: impl FnOnce(Box<dyn FnOnce() + Send>) -> std::io::Result<JoinHandle<()>>,
) -> Result<Thread> {
    let failed = |call, error: std::io::Error| Error::System { call, reason: error.to_string() };
    let (give, given) = std::sync::mpsc::channel::<Runtime>();
    let (until, ended) = oneshot::channel::<()>();
    let thread = spawn(Box::new(move || {
        // There is none if it could not be made.
        let Ok(runtime) = given.recv() else { return };
        // An error says that the sender was dropped, which is what ends it.
        let _ = runtime.block_on(ended);
    }));
    let thread = thread.map_err(|error| failed("thread", error))?;
    let runtime = Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = runtime.map_err(|error| failed("runtime", error))?;
    let handle = runtime.handle().clone();
    give.send(runtime).expect("the thread waits for it");
    Ok(Thread { handle, until, thread })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_started_by_whoever_first_needs_it_and_used_again() {
        let threads = Threads::new(3);
        let spread = threads.spread();
        assert_eq!(spread.started(), 0);
        spread.next().unwrap();
        assert_eq!(spread.started(), 1);
        let ids: Vec<_> = (0..6).map(|_| spread.next().unwrap().id()).collect();
        assert_eq!(spread.started(), 3);
        assert_eq!(ids[..3], ids[3..]);
        let spread = spread.clone();
        drop(threads);
        assert_eq!(spread.started(), 0);
        assert!(spread.next().is_err(), "nothing is started behind the end");
    }

    /// Says that it is gone, some time after that began.
    struct Slow(Arc<AtomicUsize>);

    impl Drop for Slow {
        fn drop(&mut self) {
            std::thread::sleep(std::time::Duration::from_millis(50));
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn what_runs_is_over_when_they_are_dropped_also_by_somebody_elses_task() {
        let gone = Arc::new(AtomicUsize::new(0));
        let threads = Threads::new(2);
        for _ in 0..2 {
            let task = Slow(Arc::clone(&gone));
            threads.spread().next().unwrap().spawn(async move {
                let _task = task;
                std::future::pending::<()>().await;
            });
        }
        let runtime = Builder::new_current_thread().build().unwrap();
        runtime.block_on(async { drop(threads) });
        assert_eq!(gone.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn one_of_them_that_drops_them_does_not_wait_for_itself() {
        let threads = Threads::new(2);
        let (one, other) = (threads.spread().next().unwrap(), threads.spread().next().unwrap());
        let gone = Arc::new(AtomicUsize::new(0));
        let task = Slow(Arc::clone(&gone));
        other.spawn(async move {
            let _task = task;
            std::future::pending::<()>().await;
        });
        let (told, heard) = std::sync::mpsc::channel();
        one.spawn(async move {
            drop(threads);
            told.send(()).unwrap();
        });
        heard.recv().unwrap();
        assert_eq!(gone.load(Ordering::Relaxed), 1, "it waited for the other one");
    }

    #[test]
    fn a_thread_that_cannot_be_spawned_is_an_error_to_a_task_and_no_panic() {
        let none = |_| Err(std::io::ErrorKind::WouldBlock.into());
        let runtime = Builder::new_current_thread().build().unwrap();
        let error = runtime.block_on(async { start(none) }).unwrap_err();
        assert!(matches!(error, Error::System { call: "thread", .. }), "{error}");
    }
}
