//! Which transport reaches what: mappings reach a peer of this host, and TCP what cannot be mapped, or
//! turned out not to be. A list that names some of each is taken apart.

use std::borrow::Cow;

use crate::error::Result;
use crate::plan::{Form, Paged, Range, Scratch, Strided, Window, check_form_bounds};
use crate::registry::Table;
use crate::request::{Copies, Part};
use crate::target::{RemoteTable, Target};

/// The way of one part.
#[derive(Debug)]
pub(crate) enum Route<'a> {
    /// Through mappings, or memory of this process.
    Near,
    /// By TCP. It is a fallback if any of it should be mapped.
    Far { fallback: bool },
    /// Some of it each way.
    Both { near: List<'a>, far: List<'a>, fallback: bool },
}

/// The way of one item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goes {
    Near,
    /// What cannot be mapped.
    Far,
    /// What should be.
    Left,
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
            let fallback = part.target.is_far_instead() && !part.copies.are_empty();
            return Ok(Self::Far { fallback });
        }
        if part.target.is_near() || part.copies.are_empty() {
            return Ok(Self::Near);
        }
        let (target, remote) = (part.target, part.target.table());
        Ok(match part.copies {
            Copies::Ranges(list) => {
                let first = list.iter().find(|range| range.len > 0).map(|range| range.local);
                let home = local.window_at(first.unwrap_or(0)).map(|at| local.devices[at]);
                let goes = |window| goes(target, home, &remote, window);
                Self::of_list(list, ways_of_ranges(list, &remote, goes), List::Ranges)
            }
            Copies::Strided(list) => {
                let ways = ways_of_forms(list, local, &remote, target)?;
                Self::of_list(list, ways.into_iter(), List::Strided)
            }
            Copies::Paged(list) => {
                let ways = ways_of_forms(list, local, &remote, target)?;
                Self::of_list(list, ways.into_iter(), List::Paged)
            }
        })
    }

    /// Whether some of it goes over TCP that should be mapped.
    pub(crate) fn is_fallback(&self) -> bool {
        matches!(self, Self::Far { fallback: true } | Self::Both { fallback: true, .. })
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
                Route::Far { .. } => all_far.push(part),
                Route::Both { near, far, .. } => {
                    all_near.push(Part { copies: near.copies(), ..part });
                    all_far.push(Part { copies: far.copies(), ..part });
                }
            }
        }
        (Cow::Owned(all_near), all_far)
    }

    /// `ways` tells that of each item, and none of empty ones.
    fn of_list<T: Copy>(
        list: &[T],
        ways: impl Iterator<Item = Option<Goes>> + Clone,
        some: impl Fn(Vec<T>) -> List<'a>,
    ) -> Self {
        let is_near = |way: Option<Goes>| way.map(|way| way == Goes::Near);
        let any = |near| ways.clone().any(|way| is_near(way) == Some(near));
        let fallback = ways.clone().any(|way| way == Some(Goes::Left));
        match (any(true), any(false)) {
            (_, false) => Self::Near,
            (false, true) => Self::Far { fallback },
            (true, true) => {
                let those = |near| {
                    let items = list.iter().zip(ways.clone());
                    let items = items.filter(|(_, way)| is_near(*way) == Some(near));
                    some(items.map(|(item, _)| *item).collect())
                };
                Self::Both { near: those(true), far: those(false), fallback }
            }
        }
    }
}

/// The way of what lies in a window of the peer's, as the device sees it that the local ends lie on.
fn goes(target: &Target, home: Option<usize>, remote: &RemoteTable, window: usize) -> Goes {
    let left = || {
        let key = remote.allocation(window).key;
        home.is_some_and(|home| target.left().count() > 0 && target.left().holds(home, key))
    };
    if remote.is_private(window) {
        Goes::Far
    } else if left() {
        Goes::Left
    } else {
        Goes::Near
    }
}

/// Addresses in no window are near: whoever checks them refuses them.
fn ways_of_ranges<'b>(
    ranges: &'b [Range],
    remote: &'b RemoteTable,
    goes: impl Fn(usize) -> Goes + Clone + 'b,
) -> impl Iterator<Item = Option<Goes>> + Clone + 'b {
    let (mut last, mut way) = (Window { start: 0, len: 0 }, Goes::Near);
    ranges.iter().map(move |range| {
        if range.len == 0 {
            return None;
        }
        if range.remote.wrapping_sub(last.start) >= last.len {
            let at = remote.window_at(range.remote);
            last = at.map_or(Window { start: 0, len: 0 }, |at| remote.windows[at]);
            way = at.map_or(Goes::Near, &goes);
        }
        Some(way)
    })
}

fn ways_of_forms<F: Form>(
    forms: &[F],
    local: &Table,
    remote: &RemoteTable,
    target: &Target,
) -> Result<Vec<Option<Goes>>> {
    let mut scratch = Scratch::default();
    check_form_bounds(forms, &local.windows, &remote.windows, &mut scratch)?;
    let mut ways = vec![None; forms.len()];
    for placed in scratch.forms() {
        let home = local.devices.get(placed.local.window).copied();
        ways[placed.form] = Some(goes(target, home, remote, placed.remote.window));
    }
    Ok(ways)
}
