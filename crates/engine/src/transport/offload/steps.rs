//! How much transfers lengthen the model's slowest steps, from the times that the model's engine
//! tells, and how much less the tail policy lets move because of it.

use std::sync::Arc;
use std::time::Duration;

use super::paced::Paced;
use crate::batch::Pending;
use crate::mostly_one::MostlyOne;
use crate::transport::peer::Submitted;

/// Steps of a round, of which a p99 is taken: the third longest.
const ROUND: usize = 256;

/// Least steps beside which nothing moved, before a round is judged by them.
const LEAST: usize = 128;

/// Rounds well under the budget, before more may move again; twice as many after each time that it
/// was too much.
const PATIENCE: u32 = 4;
const MOST_PATIENCE: u32 = 64;

/// Rounds in a row over the budget before less may move: the third longest of so few steps is now and
/// then somebody else's doing (H200, 2026-11-30: beside DMA with strides, which lengthens the p99 by 3
/// to 4 %, single rounds were over 5 %).
const CONFIRMED: u32 = 2;

/// At most: a two-hundred-and-fifty-sixth of the time.
const MOST_THROTTLE: u32 = 8;

/// Times of the last steps of one kind.
#[derive(Debug, Default)]
struct Window {
    times: Vec<Duration>,
    /// Where the next one goes, once it is full.
    next: usize,
}

impl Window {
    fn push(&mut self, time: Duration) {
        if self.times.len() < ROUND {
            self.times.push(time);
        } else {
            self.times[self.next] = time;
        }
        self.next = (self.next + 1) % ROUND;
    }

    fn p99(&self) -> Duration {
        let mut sorted = self.times.clone();
        sorted.sort_unstable();
        sorted.get(sorted.len() * 99 / 100).copied().unwrap_or_default()
    }
}

/// A batch that may run.
#[derive(Debug)]
struct Moving {
    pending: MostlyOne<Pending>,
    paced: Vec<Arc<Paced>>,
}

impl Moving {
    fn is_running(&self) -> bool {
        self.pending.iter().any(|pending| !pending.lane.completions.done(pending.ticket))
            || self.paced.iter().any(|paced| paced.ended() == Ok(false))
    }
}

/// What the steps of one device tell.
#[derive(Debug)]
pub(super) struct Steps {
    budget_percent: f64,
    throttle: u32,
    /// Steps beside which nothing moved.
    calm: Window,
    /// Steps of this round.
    round: Window,
    /// Something moved in this round.
    moved: bool,
    /// Not known to have ended when the last step did, or submitted since and then running.
    moving: Vec<Moving>,
    /// Something was submitted since the last step.
    submitted: bool,
    /// Rounds in a row that were over the budget.
    bad_rounds: u32,
    /// Rounds in a row that were well under it.
    good_rounds: u32,
    patience: u32,
}

impl Steps {
    pub(super) fn new(budget_percent: u32) -> Self {
        Self {
            budget_percent: budget_percent.into(),
            throttle: 0,
            calm: Window::default(),
            round: Window::default(),
            moved: false,
            moving: Vec::new(),
            submitted: false,
            bad_rounds: 0,
            good_rounds: 0,
            patience: PATIENCE,
        }
    }

    /// Transfers may take one part in two to the power of this of the time.
    pub(super) fn throttle(&self) -> u32 {
        self.throttle
    }

    /// A batch was submitted.
    pub(super) fn moves(&mut self, submitted: &Submitted) {
        let Submitted { pending, paced, .. } = submitted;
        self.submitted = true;
        // Nobody may ever tell of a step.
        self.moving.retain(Moving::is_running);
        self.moving.push(Moving { pending: pending.clone(), paced: paced.clone() });
    }

    /// A step ended that took `time`. Returns the throttle and by how many percent the p99 was longer,
    /// where that changed something.
    pub(super) fn record(&mut self, time: Duration) -> Option<(u32, f64)> {
        let beside = std::mem::take(&mut self.submitted) || !self.moving.is_empty();
        self.moving.retain(Moving::is_running);
        self.record_beside(time, beside)
    }

    fn record_beside(&mut self, time: Duration, beside: bool) -> Option<(u32, f64)> {
        self.moved |= beside;
        if !beside {
            self.calm.push(time);
        }
        self.round.push(time);
        if self.round.times.len() < ROUND {
            return None;
        }
        let round = std::mem::take(&mut self.round);
        let moved = std::mem::take(&mut self.moved);
        if !moved || self.calm.times.len() < LEAST {
            return None;
        }
        let (calm, now) = (self.calm.p99().as_secs_f64(), round.p99().as_secs_f64());
        let percent = (now / calm.max(1e-9) - 1.0) * 100.0;
        let before = self.throttle;
        let over = percent > self.budget_percent;
        self.bad_rounds = if over { self.bad_rounds + 1 } else { 0 };
        if over {
            self.good_rounds = 0;
            if self.bad_rounds == CONFIRMED {
                self.bad_rounds = 0;
                self.throttle = (before + 1).min(MOST_THROTTLE);
                self.patience = (self.patience * 2).min(MOST_PATIENCE);
            }
        } else if percent < self.budget_percent / 2.0 {
            self.good_rounds += 1;
            if self.good_rounds >= self.patience {
                self.throttle = before.saturating_sub(1);
                self.good_rounds = 0;
            }
        } else {
            self.good_rounds = 0;
        }
        (self.throttle != before).then_some((self.throttle, percent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(3);

    /// One step in sixteen is beside a transfer, and so many percent longer.
    fn rounds(steps: &mut Steps, count: usize, percent: u32) {
        for at in 0..count * ROUND {
            let beside = at % 16 == 0;
            let time = if beside { STEP + STEP * percent / 100 } else { STEP };
            steps.record_beside(time, beside);
        }
    }

    #[test]
    fn over_the_budget_less_is_moved_at_a_time_and_after_calm_more_again() {
        let mut steps = Steps::new(5);
        rounds(&mut steps, 3, 4);
        assert_eq!(steps.throttle(), 0);
        rounds(&mut steps, 2, 6);
        assert_eq!(steps.throttle(), 1);
        rounds(&mut steps, 2, 6);
        assert_eq!(steps.throttle(), 2);
        rounds(&mut steps, 18, 6);
        assert_eq!(steps.throttle(), MOST_THROTTLE);
        // In the budget, and not well enough to try more.
        rounds(&mut steps, 200, 4);
        assert_eq!(steps.throttle(), MOST_THROTTLE);
        for throttle in (0..MOST_THROTTLE).rev() {
            rounds(&mut steps, MOST_PATIENCE as usize, 1);
            assert_eq!(steps.throttle(), throttle);
        }
    }

    #[test]
    fn one_round_over_the_budget_between_others_changes_nothing() {
        let mut steps = Steps::new(5);
        for _ in 0..20 {
            rounds(&mut steps, 1, 6);
            rounds(&mut steps, 1, 4);
        }
        assert_eq!(steps.throttle(), 0);
    }

    #[test]
    fn after_each_time_too_much_it_takes_longer_to_try_again() {
        let mut steps = Steps::new(5);
        rounds(&mut steps, 2, 50);
        rounds(&mut steps, 2 * PATIENCE as usize - 1, 0);
        assert_eq!(steps.throttle(), 1);
        rounds(&mut steps, 1, 0);
        assert_eq!(steps.throttle(), 0);
        rounds(&mut steps, 2, 50);
        rounds(&mut steps, 4 * PATIENCE as usize - 1, 0);
        assert_eq!(steps.throttle(), 1);
        rounds(&mut steps, 1, 0);
        assert_eq!(steps.throttle(), 0);
    }

    #[test]
    fn steps_that_are_slow_beside_nothing_change_nothing() {
        let mut steps = Steps::new(5);
        for at in 0..10 * ROUND {
            let time = if at % 20 == 0 { STEP * 3 } else { STEP };
            steps.record_beside(time, false);
        }
        // Beside transfers they are as slow as beside none.
        for at in 0..10 * ROUND {
            let time = if at % 20 == 0 { STEP * 3 } else { STEP };
            steps.record_beside(time, at % 16 == 0);
        }
        assert_eq!(steps.throttle(), 0);
    }

    #[test]
    fn batches_that_ended_are_forgotten_also_where_nobody_tells_of_steps() {
        let mut steps = Steps::new(5);
        for _ in 0..1000 {
            steps.moves(&Submitted::nothing());
        }
        assert_eq!(steps.moving.len(), 1);
        // Yet the step that follows was beside them.
        steps.record(STEP);
        assert!(steps.moved && steps.calm.times.is_empty());
        steps.record(STEP);
        assert_eq!(steps.calm.times.len(), 1);
    }

    #[test]
    fn without_a_step_beside_nothing_there_is_no_verdict() {
        let mut steps = Steps::new(5);
        for at in 0..10 * ROUND {
            steps.record_beside(STEP * (1 + at as u32 % 9), true);
        }
        assert_eq!(steps.throttle(), 0);
    }
}
