//! The check of a batch for overlaps, made when it holds up the least: at the latest before a byte is
//! written that anybody sees.

use crate::config::OverlapCheck;
use crate::error::Result;
use crate::plan::{Extent, Scratch, check_form_overlaps, check_overlaps};
use crate::request::{Copies, Part};

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
    parts: Vec<Bounded<'a>>,
    passed: bool,
}

impl<'a> Overlaps<'a> {
    pub(super) fn new(when: OverlapCheck, parts: Vec<Bounded<'a>>) -> Self {
        Self { when, parts, passed: false }
    }

    /// Makes the check, unless it was made or is not to be made before the copies.
    ///
    /// # Errors
    /// The first overlap's.
    pub(super) fn check_before(&mut self) -> Result<()> {
        if self.when == OverlapCheck::Before && !self.passed {
            self.check()?;
            self.passed = true;
        }
        Ok(())
    }

    /// Makes the check, if it is to be made beside the copies.
    ///
    /// # Errors
    /// The first overlap's.
    pub(super) fn check_beside(&mut self) -> Result<()> {
        if self.when == OverlapCheck::Beside { self.check() } else { Ok(()) }
    }

    fn check(&mut self) -> Result<()> {
        for Bounded { part, extent, one_space, scratch } in &mut self.parts {
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
