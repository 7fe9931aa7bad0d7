//! Ways to move a batch. Each takes checked ranges and returns what the batch waits for.

pub(crate) mod peer;
