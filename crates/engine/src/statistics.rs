//! What an engine has done and holds, as numbers. Metrics are told of the same batches at the same
//! place ([`crate::ended`]), and these are what is left without a recorder: for the C ABI, and for
//! whoever only wants to look.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::batch::Path;
use crate::ended::Ended;
use crate::error::Error;

/// Counts since an engine was made.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// In the order of [`Path::ALL`].
    paths: [PathCounters; Path::ALL.len()],
    fallbacks: AtomicU64,
    refused: AtomicU64,
}

#[derive(Debug, Default)]
struct PathCounters {
    completed: AtomicU64,
    failed: AtomicU64,
    cancelled: AtomicU64,
    bytes: AtomicU64,
}

impl Counters {
    pub(crate) fn ended(&self, ended: &Ended<'_>) {
        let path = &self.paths[ended.path as usize];
        match ended.failure {
            None => {
                path.completed.fetch_add(1, Relaxed);
                path.bytes.fetch_add(ended.bytes, Relaxed);
            }
            Some(Error::Cancelled) => drop(path.cancelled.fetch_add(1, Relaxed)),
            Some(_) => drop(path.failed.fetch_add(1, Relaxed)),
        }
        if ended.facts.fallback.is_some() {
            self.fallbacks.fetch_add(1, Relaxed);
        }
    }

    pub(crate) fn refused(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    /// The counts now; what an engine holds is left at zero.
    pub(crate) fn snapshot(&self) -> Statistics {
        let path = |it: &PathCounters| PathStatistics {
            completed: it.completed.load(Relaxed),
            failed: it.failed.load(Relaxed),
            cancelled: it.cancelled.load(Relaxed),
            bytes: it.bytes.load(Relaxed),
        };
        Statistics {
            paths: std::array::from_fn(|at| path(&self.paths[at])),
            fallbacks: self.fallbacks.load(Relaxed),
            refused: self.refused.load(Relaxed),
            ..Statistics::default()
        }
    }
}

/// An engine's numbers at one moment. Those that count begin with the engine at zero and only grow;
/// they are read one by one, so a batch that ends meanwhile may be in some of them. A batch that anybody
/// saw ended is in all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statistics {
    pub(crate) paths: [PathStatistics; Path::ALL.len()],
    /// Batches that went a slower way than they could have, ended.
    pub fallbacks: u64,
    /// Submissions that were refused: nothing moved.
    pub refused: u64,
    /// Batches that have not ended.
    pub running: u64,
    /// Registered regions.
    pub regions: u64,
    /// Bytes of them.
    pub registered_bytes: u64,
    /// Allocations of other processes that are mapped here and kept.
    pub mappings: u64,
    /// Processes that these are of.
    pub mapped_peers: u64,
    /// As [`Engine::pinned_bytes`](crate::Engine::pinned_bytes).
    pub pinned_bytes: u64,
    /// As [`Engine::staging_bytes`](crate::Engine::staging_bytes).
    pub staging_bytes: u64,
    /// As [`Engine::bounce_bytes`](crate::Engine::bounce_bytes).
    pub bounce_bytes: u64,
    /// Host memory that is page-locked, of the budget `MC_KVFERRY_PINNED_MB`: registered, stored,
    /// and `staging_bytes`.
    pub locked_bytes: u64,
}

/// Batches of one path that have ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathStatistics {
    /// Of which every byte landed.
    pub completed: u64,
    /// That failed, without those that were cancelled.
    pub failed: u64,
    /// That were cancelled before all of them was moved.
    pub cancelled: u64,
    /// Bytes of those that completed.
    pub bytes: u64,
}

impl Statistics {
    /// Of one path.
    pub fn path(&self, path: Path) -> &PathStatistics {
        &self.paths[path as usize]
    }

    /// Of all paths together.
    pub fn all_paths(&self) -> PathStatistics {
        self.paths.iter().fold(PathStatistics::default(), |all, path| PathStatistics {
            completed: all.completed + path.completed,
            failed: all.failed + path.failed,
            cancelled: all.cancelled + path.cancelled,
            bytes: all.bytes + path.bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::ended::{Facts, Fallback, Transport};

    #[test]
    fn a_batch_is_counted_once_under_its_path_and_its_end() {
        let counters = Counters::default();
        let facts = Facts::new(&[], Instant::now(), Transport::Peer);
        let end = |path, failure: Option<&Error>, fallback| {
            let facts = Facts { fallback, ..facts };
            counters.ended(&Ended { facts, path, bytes: 100, time: Duration::ZERO, failure });
        };
        end(Path::Kernel, None, None);
        end(Path::Kernel, None, Some(Fallback::NoKernel));
        end(Path::Kernel, Some(&Error::Stopped), None);
        end(Path::Tcp, Some(&Error::Cancelled), Some(Fallback::NotStaged));
        counters.refused();
        let found = counters.snapshot();
        let kernel = PathStatistics { completed: 2, failed: 1, cancelled: 0, bytes: 200 };
        let tcp = PathStatistics { cancelled: 1, ..PathStatistics::default() };
        assert_eq!((*found.path(Path::Kernel), *found.path(Path::Tcp)), (kernel, tcp));
        assert_eq!(found.all_paths(), PathStatistics { cancelled: 1, ..kernel });
        assert_eq!((found.fallbacks, found.refused), (2, 1));
    }

    #[test]
    fn paths_are_found_where_they_are_counted() {
        for (at, path) in Path::ALL.into_iter().enumerate() {
            assert_eq!(path as usize, at);
        }
    }
}
