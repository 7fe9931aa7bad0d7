//! The check of a batch for overlaps, made when it holds up the least: at the latest before a byte is
//! written that anybody sees, or by the device beside its copies.

use crate::config::OverlapCheck;
use crate::error::Result;
use crate::mostly_one::MostlyOne;
use crate::plan::{Extent, Scratch, check_form_overlaps, check_overlaps};
use crate::request::{Copies, Part};

/// Ranges of the shortest list that is checked by the device: it costs the host two calls.
const FEWEST_FOR_DEVICE: usize = 4096;

/// A part of a batch whose bounds are checked.
pub(super) struct Bounded<'a> {
    pub(super) part: &'a Part<'a>,
    /// Of a list of ranges.
    pub(super) extent: Option<Extent>,
    /// A piece of it may read what another one writes.
    pub(super) one_space: bool,
    /// What the bounds were checked with.
    pub(super) scratch: &'a mut Scratch,
}

/// The check of one batch.
pub(super) struct Overlaps<'a> {
    when: OverlapCheck,
    parts: MostlyOne<Bounded<'a>>,
    /// Those that are checked before the copies passed.
    passed: bool,
}

impl<'a> Overlaps<'a> {
    pub(super) fn new(when: OverlapCheck, parts: MostlyOne<Bounded<'a>>) -> Self {
        Self { when, parts, passed: false }
    }

    /// Whether the check is for a device that copies all of the batch: it costs more than having the
    /// device make it, and need not be over before the copies.
    pub(super) fn suit_device(&self) -> bool {
        match &self.parts[..] {
            [Bounded { part: Part { copies: Copies::Ranges(ranges), .. }, .. }] => {
                ranges.len() >= FEWEST_FOR_DEVICE
                    && self.when != OverlapCheck::Off
                    && !self.when.is_before(ranges.len())
            }
            _ => false,
        }
    }

    /// The device makes the check.
    pub(super) fn leave_to_device(&mut self) {
        self.parts.clear();
    }

    /// Checks the parts that are to be checked before the copies, unless that was done.
    ///
    /// # Errors
    /// The first overlap's.
    pub(super) fn check_before(&mut self) -> Result<()> {
        if !self.passed {
            self.check(true)?;
            self.passed = true;
        }
        Ok(())
    }

    /// The same where the device works meanwhile, and nothing that anybody sees is written yet: there
    /// all parts are checked, unless the engine was told to do that later.
    ///
    /// # Errors
    /// The first overlap's.
    pub(super) fn check_in_time(&mut self) -> Result<()> {
        self.check_before()?;
        if self.when == OverlapCheck::Auto {
            self.check(false)?;
            self.parts.clear();
        }
        Ok(())
    }

    /// Checks the parts that are to be checked beside the copies.
    ///
    /// # Errors
    /// The first overlap's.
    pub(super) fn check_beside(&mut self) -> Result<()> {
        self.check(false)
    }

    fn check(&mut self, before: bool) -> Result<()> {
        if self.when == OverlapCheck::Off {
            return Ok(());
        }
        let when = self.when;
        for Bounded { part, extent, one_space, scratch } in &mut self.parts {
            // Forms say by their strides that they do not overlap: no piece of them is looked at.
            let ranges = match part.copies {
                Copies::Ranges(ranges) => ranges.len(),
                Copies::Strided(_) | Copies::Paged(_) => 0,
            };
            if when.is_before(ranges) != before {
                continue;
            }
            let (op, one_space) = (part.op, *one_space);
            match (part.copies, extent) {
                (Copies::Ranges(ranges), Some(extent)) => {
                    check_overlaps(op, ranges, extent, one_space, scratch)?
                }
                (Copies::Ranges(_), None) => {}
                (Copies::Strided(forms), _) => check_form_overlaps(op, forms, one_space, scratch)?,
                (Copies::Paged(forms), _) => check_form_overlaps(op, forms, one_space, scratch)?,
            }
        }
        Ok(())
    }
}
