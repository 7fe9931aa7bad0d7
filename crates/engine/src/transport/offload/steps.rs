//! How much transfers lengthen the model's slowest steps, from the times that the model's engine
//! tells.

use std::time::Duration;

/// Steps that a percentile is taken of.
const WINDOW: usize = 512;

/// Times of the last steps of one kind.
#[derive(Debug, Default)]
struct Window {
    times: Vec<Duration>,
    /// Where the next one goes, once it is full.
    next: usize,
}

impl Window {
    fn push(&mut self, time: Duration) {
        if self.times.len() < WINDOW {
            self.times.push(time);
        } else {
            self.times[self.next] = time;
        }
        self.next = (self.next + 1) % WINDOW;
    }
}

/// What the steps of one device tell.
#[derive(Debug, Default)]
pub(in crate::transport) struct Steps {
    all: Window,
}

impl Steps {
    /// A step ended that took `time`.
    pub(in crate::transport) fn record(&mut self, time: Duration) {
        self.all.push(time);
    }
}
