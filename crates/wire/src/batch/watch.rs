//! Deadlines without a clock: the host says now and then what time it is.

use core::time::Duration;

/// Notices when a counter stands still while it should not.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Watch {
    mark: Option<(u64, Duration)>,
}

impl Watch {
    /// How long `counter` has stood still while `active`, as far as it was looked at.
    pub(super) fn still(&mut self, active: bool, counter: u64, now: Duration) -> Duration {
        match self.mark {
            Some((mark, since)) if active && mark == counter => now.saturating_sub(since),
            _ => {
                self.mark = active.then_some((counter, now));
                Duration::ZERO
            }
        }
    }
}
