//! Which transport reaches what: mappings reach a peer of this host, and TCP what cannot be mapped. A
//! list that names some of each is taken apart.

use std::borrow::Cow;

use crate::error::Result;
use crate::plan::{Form, Paged, Range, Scratch, Strided, Window, check_form_bounds};
use crate::registry::Table;
use crate::request::{Copies, Part};
use crate::target::RemoteTable;

/// The way of one part.
#[derive(Debug)]
pub(crate) enum Route<'a> {
    /// Through mappings, or memory of this process.
    Near,
    /// By TCP.
    Far,
    /// Some of it each way.
    Both { near: List<'a>, far: List<'a> },
}

/// Some of a part's list.
#[derive(Debug)]
pub(crate) enum List<'a> {
    Ranges(Vec<Range>),
    Strided(Vec<Strided>),
    Paged(Vec<Paged<'a>>),
}

impl List<'_> {
    pub(crate) fn copies(&self) -> Copies<'_> {
        match self {
            Self::Ranges(list) => list.into(),
            Self::Strided(list) => list.into(),
            Self::Paged(list) => list.into(),
        }
    }
}

impl<'a> Route<'a> {
    /// The way of a part. `local` is the registered memory here.
    ///
    /// # Errors
    /// What is wrong with forms; of ranges nothing is checked here.
    pub(crate) fn of(part: &Part<'a>, local: &Table) -> Result<Self> {
        if part.target.is_far() {
            return Ok(Self::Far);
        }
        if part.target.is_near() || part.copies.are_empty() {
            return Ok(Self::Near);
        }
        let remote = part.target.table();
        Ok(match part.copies {
            Copies::Ranges(list) => Self::of_list(list, far_ranges(list, &remote), List::Ranges),
            Copies::Strided(list) => {
                Self::of_list(list, far_forms(list, local, &remote)?.into_iter(), List::Strided)
            }
            Copies::Paged(list) => {
                Self::of_list(list, far_forms(list, local, &remote)?.into_iter(), List::Paged)
            }
        })
    }

    /// What mappings reach of a batch, and what TCP does. Without routes, mappings reach all of it.
    pub(crate) fn divide(
        parts: &'a [Part<'a>],
        routes: &'a [Self],
    ) -> (Cow<'a, [Part<'a>]>, Vec<Part<'a>>) {
        if routes.is_empty() {
            return (Cow::Borrowed(parts), Vec::new());
        }
        let (mut all_near, mut all_far) = (Vec::new(), Vec::new());
        for (&part, route) in parts.iter().zip(routes) {
            match route {
                Route::Near => all_near.push(part),
                Route::Far => all_far.push(part),
                Route::Both { near, far } => {
                    all_near.push(Part { copies: near.copies(), ..part });
                    all_far.push(Part { copies: far.copies(), ..part });
                }
            }
        }
        (Cow::Owned(all_near), all_far)
    }

    /// `is_far` tells it of each item, and none of empty ones.
    fn of_list<T: Copy>(
        list: &[T],
        is_far: impl Iterator<Item = Option<bool>> + Clone,
        some: impl Fn(Vec<T>) -> List<'a>,
    ) -> Self {
        let goes = |far| is_far.clone().any(|it| it == Some(far));
        match (goes(false), goes(true)) {
            (_, false) => Self::Near,
            (false, true) => Self::Far,
            (true, true) => {
                let those = |far| {
                    let items = list.iter().zip(is_far.clone());
                    some(items.filter(|(_, it)| *it == Some(far)).map(|(item, _)| *item).collect())
                };
                Self::Both { near: those(false), far: those(true) }
            }
        }
    }
}

/// Addresses in no window are near: whoever checks them refuses them.
fn far_ranges<'b>(
    ranges: &'b [Range],
    remote: &'b RemoteTable,
) -> impl Iterator<Item = Option<bool>> + Clone + 'b {
    let (mut last, mut far) = (Window { start: 0, len: 0 }, false);
    ranges.iter().map(move |range| {
        if range.len == 0 {
            return None;
        }
        if range.remote.wrapping_sub(last.start) >= last.len {
            let at = remote.window_at(range.remote);
            last = at.map_or(Window { start: 0, len: 0 }, |at| remote.windows[at]);
            far = at.is_some_and(|at| remote.is_private(at));
        }
        Some(far)
    })
}

fn far_forms<F: Form>(
    forms: &[F],
    local: &Table,
    remote: &RemoteTable,
) -> Result<Vec<Option<bool>>> {
    let mut scratch = Scratch::default();
    check_form_bounds(forms, &local.windows, &remote.windows, &mut scratch)?;
    let mut far = vec![None; forms.len()];
    for placed in scratch.forms() {
        far[placed.form] = Some(remote.is_private(placed.remote.window));
    }
    Ok(far)
}
