//! Which slots of the store are free: runs of a power of two of them, halved and joined again.

use std::collections::BTreeSet;

/// Free slots of several pieces. Slots of a piece are numbered from a multiple of the longest run,
/// so that runs never cross pieces.
#[derive(Debug)]
pub(super) struct Runs {
    /// First slots of free runs, by the binary logarithm of their length.
    free: Vec<BTreeSet<u32>>,
    free_slots: u64,
}

impl Runs {
    /// All free: pieces of so many slots, numbered `stride` apart, and runs of at most
    /// `1 << longest`.
    pub(super) fn new(pieces: impl Iterator<Item = u32>, stride: u32, longest: u32) -> Self {
        let mut runs = Self { free: vec![BTreeSet::new(); longest as usize + 1], free_slots: 0 };
        for (piece, slots) in pieces.enumerate() {
            let (mut at, end) = (piece as u32 * stride, piece as u32 * stride + slots);
            for order in (0..=longest).rev() {
                while end - at >= 1 << order {
                    runs.free[order as usize].insert(at);
                    at += 1 << order;
                }
            }
            runs.free_slots += u64::from(slots);
        }
        runs
    }

    pub(super) fn free_slots(&self) -> u64 {
        self.free_slots
    }

    /// The longest run that there is, of at most `1 << order` slots: its first slot and its order.
    pub(super) fn take(&mut self, order: u32) -> Option<(u32, u32)> {
        let longer = (order as usize..self.free.len()).find(|&at| !self.free[at].is_empty());
        let shorter = || (0..order as usize).rev().find(|&at| !self.free[at].is_empty());
        let found = longer.or_else(shorter)?;
        let first = self.free[found].pop_first()?;
        let order = (found as u32).min(order);
        for half in (order..found as u32).rev() {
            self.free[half as usize].insert(first + (1 << half));
        }
        self.free_slots -= 1 << order;
        Some((first, order))
    }

    /// Frees what `take` gave.
    pub(super) fn give_back(&mut self, mut first: u32, mut order: u32) {
        self.free_slots += 1 << order;
        while (order as usize) < self.free.len() - 1
            && self.free[order as usize].remove(&(first ^ 1 << order))
        {
            first &= !(1 << order);
            order += 1;
        }
        self.free[order as usize].insert(first);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn runs_never_overlap_or_leave_their_piece_and_all_come_together_again(
            pieces in prop::collection::vec(1u32..70, 1..4),
            longest in 0u32..5,
            steps in prop::collection::vec((0u32..5, any::<prop::sample::Index>()), 0..200),
        ) {
            let stride = 128;
            let new = || Runs::new(pieces.iter().copied(), stride, longest);
            let mut runs = new();
            let mut taken: Vec<(u32, u32)> = Vec::new();
            let mut used = HashSet::new();
            for (order, index) in steps {
                if order == 4 && !taken.is_empty() {
                    let (first, order) = taken.swap_remove(index.index(taken.len()));
                    (first..first + (1 << order)).for_each(|slot| assert!(used.remove(&slot)));
                    runs.give_back(first, order);
                } else if let Some((first, got)) = runs.take(order.min(longest)) {
                    prop_assert!(got <= order.min(longest));
                    for slot in first..first + (1 << got) {
                        prop_assert!(used.insert(slot), "slot {slot} twice");
                        prop_assert!(slot % stride < pieces[(slot / stride) as usize]);
                    }
                    taken.push((first, got));
                } else {
                    let slots: u32 = pieces.iter().sum();
                    prop_assert_eq!(used.len() as u32, slots, "refused though slots are free");
                }
                let slots: u32 = pieces.iter().sum();
                prop_assert_eq!(runs.free_slots(), u64::from(slots) - used.len() as u64);
            }
            taken.into_iter().for_each(|(first, order)| runs.give_back(first, order));
            prop_assert_eq!(runs.free, new().free);
        }
    }
}
