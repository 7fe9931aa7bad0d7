//! The account of page-locked host memory: no more than the budget, so that a machine is not hurt by
//! memory that its kernel cannot move.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::config::Config;
use crate::error::{Error, Result};

/// Bytes of host memory that are page-locked for transfers, page stores and TCP's staging slots. The
/// rings of the engine's queues, some megabytes a device, are not in it.
#[derive(Debug)]
pub struct PinnedAccount {
    budget: u64,
    used: AtomicU64,
}

/// A part of the account; it is given back when dropped.
#[derive(Debug)]
pub struct PinnedShare {
    account: Arc<PinnedAccount>,
    bytes: u64,
}

impl Config {
    /// Most bytes of host memory that are page-locked for transfers, page stores and TCP's staging
    /// slots: `MC_KVFERRY_PINNED_MB`, or three quarters of this machine's memory.
    pub fn pinned_budget(&self) -> u64 {
        self.pinned_bytes.unwrap_or_else(|| total_memory() / 4 * 3)
    }
}

impl PinnedAccount {
    pub(crate) fn new(config: &Config) -> Arc<Self> {
        Arc::new(Self { budget: config.pinned_budget(), used: AtomicU64::new(0) })
    }

    /// Most bytes that may be locked (`MC_KVFERRY_PINNED_MB`).
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Bytes that are locked.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }

    /// Takes `bytes` from what is left of the budget, before they are locked.
    ///
    /// # Errors
    /// [`Error::PinnedBudget`] if there is less left.
    pub fn take(self: &Arc<Self>, bytes: u64) -> Result<PinnedShare> {
        let more = |used: u64| used.checked_add(bytes).filter(|&all| all <= self.budget);
        match self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, more) {
            Ok(_) => Ok(PinnedShare { account: Arc::clone(self), bytes }),
            Err(used) => Err(Error::PinnedBudget { bytes, used, budget: self.budget }),
        }
    }
}

impl PinnedShare {
    /// Bytes of it.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for PinnedShare {
    fn drop(&mut self) {
        self.account.used.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

/// Bytes of this machine's memory.
fn total_memory() -> u64 {
    let info = rustix::system::sysinfo();
    (info.totalram as u64).saturating_mul(info.mem_unit.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(megabytes: &str) -> Arc<PinnedAccount> {
        let lookup = |name: &str| match name {
            "MC_KVFERRY_PINNED_MB" => Some(megabytes.into()),
            "MC_KVFERRY_CACHE_DIR" => Some("off".into()),
            _ => None,
        };
        PinnedAccount::new(&Config::from_lookup(lookup).expect("good knobs"))
    }

    #[test]
    fn no_more_is_taken_than_the_budget_holds_and_what_is_dropped_is_there_again() {
        let account = account("3");
        let first = account.take(2 << 20).expect("fits");
        let refused = account.take((1 << 20) + 1).expect_err("too much");
        assert_eq!(
            refused,
            Error::PinnedBudget { bytes: (1 << 20) + 1, used: 2 << 20, budget: 3 << 20 }
        );
        assert!(refused.to_string().contains("MC_KVFERRY_PINNED_MB"), "{refused}");
        let second = account.take(1 << 20).expect("exactly the rest");
        assert!(account.take(1).is_err() && account.take(u64::MAX).is_err());
        drop(first);
        assert_eq!(account.used(), second.bytes());
        account.take(2 << 20).expect("there again");
    }

    #[test]
    fn without_the_knob_a_part_of_the_machine_is_the_budget() {
        let account = PinnedAccount::new(&Config::default());
        assert!(account.budget() >= 64 << 20 && account.budget() < total_memory());
    }
}
