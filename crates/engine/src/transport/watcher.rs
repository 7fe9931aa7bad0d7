//! Notices the ends of submissions for whoever cannot poll: no vendor's event wakes a task.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvferry_device::Ticket;

use super::lane::Lane;
use crate::error::{Error, Result};
use crate::wait::punctual_naps;

type Ended = Box<dyn FnOnce(Result<()>) + Send>;

struct Watched {
    lane: Arc<Lane>,
    ticket: Ticket,
    ended: Ended,
}

/// A thread that notices the ends of copies: no vendor's event wakes a task.
#[derive(Debug)]
pub(super) struct Watcher(Mutex<Sender<Watched>>);

impl Watcher {
    pub(super) fn start() -> Result<Self> {
        let (sender, receiver) = channel();
        std::thread::Builder::new()
            .name("kvferry-staging".into())
            .spawn(move || watch(&receiver))
            .map_err(|error| Error::System { call: "thread", reason: error.to_string() })?;
        Ok(Self(Mutex::new(sender)))
    }

    /// Calls `ended` once the submission has ended, or its device is lost.
    pub(super) fn watch(&self, lane: Arc<Lane>, ticket: Ticket, ended: Ended) {
        let sender = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // The thread lives as long as the sender.
        let _ = sender.send(Watched { lane, ticket, ended });
    }
}

/// How long it polls before it naps: about a small copy's time.
const SPIN: Duration = Duration::from_micros(30);
const NAP: Duration = Duration::from_micros(10);

fn watch(receiver: &Receiver<Watched>) {
    punctual_naps();
    let mut watched: VecDeque<Watched> = VecDeque::new();
    let mut last_end = Instant::now();
    loop {
        loop {
            let next = if watched.is_empty() {
                last_end = Instant::now();
                receiver.recv().map_err(|_| TryRecvError::Disconnected)
            } else {
                receiver.try_recv()
            };
            match next {
                Ok(next) => watched.push_back(next),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) if watched.is_empty() => return,
                Err(TryRecvError::Disconnected) => break,
            }
        }
        let mut waiting = VecDeque::with_capacity(watched.len());
        for it in watched.drain(..) {
            let done = it.lane.completions.done(it.ticket);
            match if done { Ok(()) } else { it.lane.check() } {
                Ok(()) if !done => waiting.push_back(it),
                ended => {
                    last_end = Instant::now();
                    (it.ended)(ended.map_err(Error::from));
                }
            }
        }
        watched = waiting;
        if last_end.elapsed() > SPIN {
            std::thread::sleep(NAP);
        }
    }
}
