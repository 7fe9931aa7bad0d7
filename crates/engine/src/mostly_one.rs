//! Lists that nearly always have one item.

use smallvec::SmallVec;

/// The parts of a batch, what is known of each and what each is submitted as: no memory of its own for
/// the one that is the rule, since getting it takes longer than what is done with it.
pub(crate) type MostlyOne<T> = SmallVec<[T; 1]>;
