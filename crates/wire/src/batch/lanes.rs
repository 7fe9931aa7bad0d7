//! Which connection a lane is on.

use alloc::collections::BTreeMap;

use super::hello::LaneName;
use crate::Id;

/// The responder's table of lanes: each is on one connection at a time.
///
/// An initiator that connects a lane again relies on this: when the new connection is open, nothing
/// that came by an earlier one moves any more.
#[derive(Debug)]
pub struct Lanes {
    limit: usize,
    lanes: BTreeMap<(Id, u16), Claimed>,
    next: u64,
}

#[derive(Clone, Copy, Debug)]
struct Claimed {
    epoch: u64,
    claim: Claim,
}

/// A connection's hold on a lane. Release it when its copies have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Claim(u64);

/// Whether a connection may have a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It has it: accept.
    Granted(Claim),
    /// An older connection still has it: close that one, and ask again when it is released.
    After(Claim),
    /// A newer connection has it: refuse as stale.
    Stale,
    /// There are as many lanes as may be: refuse as busy.
    Full,
}

impl Lanes {
    /// A table of at most `limit` lanes.
    pub fn new(limit: usize) -> Self {
        Self { limit, lanes: BTreeMap::new(), next: 0 }
    }

    /// Asks for a lane.
    pub fn claim(&mut self, name: &LaneName) -> Answer {
        let key = (name.session, name.lane);
        match self.lanes.get(&key) {
            Some(held) if held.epoch >= name.epoch => return Answer::Stale,
            Some(held) => return Answer::After(held.claim),
            None if self.lanes.len() >= self.limit => return Answer::Full,
            None => {}
        }
        let claim = Claim(self.next);
        self.next += 1;
        self.lanes.insert(key, Claimed { epoch: name.epoch, claim });
        Answer::Granted(claim)
    }

    /// Gives a lane back.
    pub fn release(&mut self, claim: Claim) {
        self.lanes.retain(|_, held| held.claim != claim);
    }

    /// Lanes that are held.
    pub fn len(&self) -> usize {
        self.lanes.len()
    }

    /// Whether none is held.
    pub fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(lane: u16, epoch: u64) -> LaneName {
        LaneName { session: Id([7; 16]), lane, lanes: 4, epoch }
    }

    #[test]
    fn a_lane_is_on_one_connection_at_a_time_and_the_newest_wins() {
        let mut lanes = Lanes::new(2);
        let Answer::Granted(first) = lanes.claim(&name(0, 3)) else { panic!("it is free") };
        assert_eq!(lanes.claim(&name(0, 3)), Answer::Stale);
        assert_eq!(lanes.claim(&name(0, 2)), Answer::Stale);
        assert_eq!(lanes.claim(&name(0, 4)), Answer::After(first));
        assert_eq!(lanes.claim(&name(0, 4)), Answer::After(first), "until it is released");
        lanes.release(first);
        let Answer::Granted(second) = lanes.claim(&name(0, 4)) else { panic!("it is free") };
        lanes.release(first);
        assert_eq!(
            lanes.claim(&name(0, 5)),
            Answer::After(second),
            "an old claim releases nothing"
        );
    }

    #[test]
    fn lanes_are_bounded() {
        let mut lanes = Lanes::new(2);
        let Answer::Granted(first) = lanes.claim(&name(0, 1)) else { panic!("it is free") };
        assert!(matches!(lanes.claim(&name(1, 1)), Answer::Granted(_)));
        assert_eq!(lanes.claim(&name(2, 1)), Answer::Full);
        assert_eq!(lanes.claim(&name(0, 2)), Answer::After(first), "one that is there is not new");
        lanes.release(first);
        assert!(matches!(lanes.claim(&name(2, 1)), Answer::Granted(_)));
        assert_eq!(lanes.len(), 2);
    }
}
