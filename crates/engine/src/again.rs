//! What a refused submission may learn, so that trying again is worth it.

use crate::error::{Error, FormError, RangeError, Side};
use crate::request::Part;

/// The attempts of one submission.
pub(crate) struct Attempts<'p> {
    parts: &'p [Part<'p>],
    /// What was known of the targets before the attempt that runs.
    known: u64,
    asked: bool,
}

impl<'p> Attempts<'p> {
    /// Before the first one.
    pub(crate) fn of(parts: &'p [Part<'p>]) -> Self {
        Self { parts, known: known(parts), asked: false }
    }

    /// Whether more is known of the targets now than when the attempt began that ended with this
    /// error. What names memory that no target is known to have makes them ask their peers, once.
    pub(crate) fn learned_from(&mut self, error: &Error) -> bool {
        if names_unknown_memory(error) && !std::mem::replace(&mut self.asked, true) {
            self.parts.iter().for_each(|part| part.target.ask_again());
            if self.parts.iter().any(|part| part.target.lost().is_some()) {
                return true;
            }
        }
        let known = known(self.parts);
        std::mem::replace(&mut self.known, known) < known
    }
}

/// Grows with what is found out of any of the targets.
fn known(parts: &[Part<'_>]) -> u64 {
    parts.iter().map(|part| part.target.changes()).sum()
}

fn names_unknown_memory(error: &Error) -> bool {
    const REMOTE: Side = Side::Remote;
    matches!(
        error,
        Error::Range(
            RangeError::NotRegistered { side: REMOTE, .. }
                | RangeError::OutOfBounds { side: REMOTE, .. }
        ) | Error::Form(
            FormError::NotRegistered { side: REMOTE, .. }
                | FormError::OutOfBounds { side: REMOTE, .. }
        )
    )
}
