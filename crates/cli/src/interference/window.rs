//! Windows of time in which transfers follow each other at a pace.

use std::str::FromStr;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::Failure;

/// How transfers follow each other.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) enum Pace {
    /// There are none.
    Nothing,
    /// The next begins when the last has ended.
    BackToBack,
    /// Back to back until as many bytes are sent as this rate allows, then none until the next
    /// burst is due.
    Bursts { bytes_per_second: f64 },
}

/// What a window saw.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct WindowRan {
    pub(crate) seconds: f64,
    pub(crate) bytes: u64,
    /// Nanoseconds of each transfer.
    pub(crate) whole: Vec<u64>,
    pub(crate) path: String,
    /// Steps of the load, and the time that they took together.
    pub(crate) steps: u64,
    pub(crate) step_seconds: f64,
    /// Nanoseconds of each step.
    pub(crate) step: Vec<u64>,
}

impl WindowRan {
    pub(super) fn steps_per_second(&self) -> f64 {
        if self.step_seconds > 0.0 { self.steps as f64 / self.step_seconds } else { 0.0 }
    }
}

/// Time between the beginnings of two bursts.
pub(crate) const BURST_PERIOD: Duration = Duration::from_millis(50);

/// Reads a rate in GiB/s.
pub(crate) fn rate(text: &str) -> Result<f64, String> {
    match f64::from_str(text) {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        _ => Err("expected GiB a second, more than 0".into()),
    }
}

/// Runs `transfer`, which moves `bytes`, at a pace for about `length`; returns how long it was.
///
/// At least one transfer runs, and none is begun after the end.
pub(crate) fn window(
    pace: Pace,
    length: Duration,
    bytes: u64,
    transfer: impl FnMut() -> Result<(), Failure>,
) -> Result<Duration, Failure> {
    timed(&Instant::now(), pace, length, bytes, transfer)
}

/// The time since a window began.
trait Clock {
    fn elapsed(&self) -> Duration;
    fn sleep(&self, time: Duration);
}

impl Clock for Instant {
    fn elapsed(&self) -> Duration {
        Instant::elapsed(self)
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// As [`window`], by any clock.
fn timed(
    clock: &impl Clock,
    pace: Pace,
    length: Duration,
    bytes: u64,
    mut transfer: impl FnMut() -> Result<(), Failure>,
) -> Result<Duration, Failure> {
    // The clock is what is waited for, so nothing but the clock can end the wait.
    let sleep_until = |due: Duration| clock.sleep(due.saturating_sub(clock.elapsed()));
    match pace {
        Pace::Nothing => sleep_until(length),
        Pace::BackToBack => loop {
            transfer()?;
            if clock.elapsed() >= length {
                break;
            }
        },
        Pace::Bursts { bytes_per_second } => {
            let (mut sent, mut begins) = (0.0, Duration::ZERO);
            while begins < length {
                sleep_until(begins);
                begins = (begins + BURST_PERIOD).min(length);
                let due = bytes_per_second * begins.as_secs_f64();
                while sent < due && (sent == 0.0 || clock.elapsed() < length) {
                    transfer()?;
                    sent += bytes.max(1) as f64;
                }
            }
            sleep_until(length);
        }
    }
    Ok(clock.elapsed())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const MILLISECOND: Duration = Duration::from_millis(1);

    /// Goes on only while somebody sleeps or a transfer runs.
    #[derive(Default)]
    struct Fake(Cell<Duration>);

    impl Clock for Fake {
        fn elapsed(&self) -> Duration {
            self.0.get()
        }

        fn sleep(&self, time: Duration) {
            self.0.set(self.0.get() + time);
        }
    }

    /// How many transfers of so many bytes, each of that time, a window runs, and how long it is.
    fn run(pace: Pace, milliseconds: u32, bytes: u64, each: Duration) -> (usize, Duration) {
        let (clock, mut count) = (Fake::default(), 0);
        let took = timed(&clock, pace, milliseconds * MILLISECOND, bytes, || {
            clock.sleep(each);
            count += 1;
            Ok(())
        });
        (count, took.expect("no transfer fails"))
    }

    /// The same of quick ones, with which a window is as long as was asked.
    fn transfers(pace: Pace, milliseconds: u32, bytes: u64) -> usize {
        let (count, took) = run(pace, milliseconds, bytes, MILLISECOND / 10);
        assert_eq!(took, milliseconds * MILLISECOND);
        count
    }

    #[test]
    fn bursts_send_what_the_rate_allows_and_no_more_than_one_transfer_above() {
        // 20 bytes a millisecond: 1000 bytes a burst, 3000 in all.
        let pace = Pace::Bursts { bytes_per_second: 20_000.0 };
        assert_eq!(transfers(pace, 150, 100), 30);
        assert_eq!(transfers(pace, 150, 700), 5);
        let exact = Pace::Bursts { bytes_per_second: 2.5 * f64::from(1 << 30) };
        assert_eq!(transfers(exact, 400, 128 << 20), 8, "one a burst");
        assert_eq!(transfers(pace, 150, 1_000_000), 1, "a large transfer skips bursts");
        assert_eq!(transfers(pace, 10, 100), 2, "a window shorter than a burst");
        assert_eq!(transfers(Pace::Nothing, 10, 100), 0);
        assert_eq!(transfers(Pace::BackToBack, 10, 100), 100);
    }

    #[test]
    fn a_window_begins_no_transfer_after_its_end_and_waits_for_the_last_one() {
        let slow = 40 * MILLISECOND;
        for pace in [Pace::BackToBack, Pace::Bursts { bytes_per_second: 20_000.0 }] {
            assert_eq!(run(pace, 150, 100, slow), (4, 4 * slow), "{pace:?}");
            assert_eq!(run(pace, 10, 100, slow), (1, slow), "{pace:?}");
        }
    }

    #[test]
    fn the_clock_of_a_window_is_the_systems() {
        let start = Instant::now();
        let took = window(Pace::Nothing, 10 * MILLISECOND, 0, || Ok(())).expect("nothing fails");
        assert!(took >= 10 * MILLISECOND && took <= start.elapsed(), "{took:?}");
    }

    #[test]
    fn a_window_ends_with_the_first_transfer_that_fails() {
        for pace in [Pace::BackToBack, Pace::Bursts { bytes_per_second: 1e9 }] {
            let mut count = 0;
            let failed = window(pace, Duration::from_secs(60), 1, || {
                count += 1;
                if count == 3 { Err("lost".into()) } else { Ok(()) }
            });
            assert_eq!((failed.expect_err("it failed").to_string().as_str(), count), ("lost", 3));
        }
    }

    #[test]
    fn a_rate_is_a_positive_number() {
        assert_eq!(rate("2.5"), Ok(2.5));
        for bad in ["0", "-1", "inf", "NaN", "fast", ""] {
            assert!(rate(bad).is_err(), "{bad}");
        }
    }
}
