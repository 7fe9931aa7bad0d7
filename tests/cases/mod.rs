//! The cases, and what they share. Each takes the device's kind and its source of randomness.

mod bytes;
mod ends;
mod forms;
mod kinds;
mod mappings;
mod private;
mod proofs;
mod refusals;
mod unmapped;

use std::time::{Duration, Instant};

use kvferry::device::Error as DeviceError;
use kvferry::{Error, Op, Range, Target};
use kvferry_device::sim::SimControl;
use rand::Rng;
use rand::rngs::SmallRng;

use crate::peer_process::{
    Image, Kind, Layout, Move, Obey, Order, PeerProcess, Side, Usage, eventually, within,
};

pub(crate) use bytes::*;
pub(crate) use ends::*;
pub(crate) use forms::*;
pub(crate) use kinds::*;
pub(crate) use mappings::*;
pub(crate) use private::*;
pub(crate) use proofs::*;
pub(crate) use refusals::*;
pub(crate) use unmapped::*;

/// A side here and one in another process, each opened by the other.
struct Pair {
    here: Side,
    there: PeerProcess,
}

impl Pair {
    fn start(kind: Kind) -> Self {
        Self::of(kind, kind, &[])
    }

    /// With these knobs on this side.
    fn start_with(kind: Kind, knobs: &[(&str, &str)]) -> Self {
        Self::of(kind, kind, knobs)
    }

    fn of(here: Kind, there: Kind, knobs: &[(&str, &str)]) -> Self {
        let mut here = Side::start_with(here, None, knobs).expect("a side");
        let mut there = PeerProcess::start(there);
        here.done(Order::Open { name: there.name.clone() });
        there.done(Order::Open { name: here.node.name().to_owned() });
        Self { here, there }
    }

    /// Moves the layout once; `by_peer` says who submits. The receiver verifies every byte, and
    /// the source that it was only read.
    fn moves(&mut self, by_peer: bool, op: Op, layout: &Layout, random: &mut SmallRng) {
        let write = op == Op::Write;
        let (source_seed, guard_seed) = (random.random(), random.random());
        let (source_len, destination_len) = layout.extents();
        let (here, there): (&mut dyn Obey, &mut dyn Obey) = (&mut self.here, &mut self.there);
        let (initiator, other) = if by_peer { (there, here) } else { (here, there) };
        let mine = if write { (source_len, source_seed) } else { (destination_len, guard_seed) };
        let its = if write { (destination_len, guard_seed) } else { (source_len, source_seed) };
        let (local, remote) = (initiator.filled(mine.0, mine.1), other.filled(its.0, its.1));
        let layout = layout.clone();
        let once = Move { write, local, remote, layout: layout.clone(), threads: 1, times: 1 };
        initiator.done(Order::Move(vec![once]));
        let moved = Image { layout, source_seed, guard_seed };
        let source = Image::untouched(source_seed);
        let (mine, its) = if write { (source, moved) } else { (moved, source) };
        other.verify(remote, its);
        initiator.verify(local, mine);
        initiator.done(Order::Free { addr: local });
        other.done(Order::Free { addr: remote });
    }

    fn moves_all_ways(&mut self, layout: &Layout, random: &mut SmallRng) {
        for by_peer in [false, true] {
            for op in [Op::Write, Op::Read] {
                println!("{op:?}, by the peer: {by_peer}");
                self.moves(by_peer, op, layout, random);
            }
        }
    }

    fn target(&self) -> &Target {
        self.here.peer().target()
    }

    /// Lets the devices prove themselves, so that a case may hold this one from now on.
    fn prove(&mut self) {
        let target = self.here.peer().target().clone();
        proves(&mut self.here, &mut self.there, &target);
    }
}

/// Reads a little from the peer and leaves no mapping.
fn proves(here: &mut Side, there: &mut PeerProcess, target: &Target) {
    let (local, remote) = (here.filled(64, 0), there.filled(64, 1));
    let peer = here.node.open(&there.name).expect("opens");
    here.run(peer.target(), Op::Read, &[Range { local, remote, len: 64 }]).expect("reads");
    assert_eq!(peer.target().incarnation(), target.incarnation());
    drop(peer);
    here.done(Order::Free { addr: local });
    there.done(Order::Free { addr: remote });
}

/// Lets this side make what all its proofs use, so that it does not count as a leak later.
fn proves_once(here: &mut Side, kind: Kind) {
    let mut there = PeerProcess::start(kind);
    let peer = here.node.open(&there.name).expect("opens");
    proves(here, &mut there, peer.target());
}

/// Moves bytes over TCP until what that keeps for the next time is there: threads, which sessions take by
/// turns, and a GPU's staging slots.
fn uses_tcp(here: &mut Side) {
    let len = 1 << 20;
    let local = here.address(Order::Allocate { len });
    let mut before = None;
    loop {
        let mut there = PeerProcess::start(Kind::Host);
        let remote = there.address(Order::AllocatePrivate { len });
        let peer = here.node.open(&there.name).expect("opens");
        let range = Range { local, remote, len };
        here.run(peer.target(), Op::Write, &[range]).expect("ordinary memory is reached over TCP");
        drop((peer, there));
        let now = settled(here);
        if before.replace(now) == Some(now) {
            break;
        }
    }
    here.done(Order::Free { addr: local });
}

fn lost(error: &Error) -> bool {
    matches!(error, Error::PeerLost { .. })
}

/// A peer that ended counts as lost after at most this long.
const SOON: Duration = Duration::from_secs(10);

/// Submits until the target counts as lost.
fn submits_until_lost(side: &Side, target: &Target, op: Op, ranges: &[Range]) {
    within(SOON, "submissions end in PeerLost", || match side.run(target, op, ranges) {
        Ok(()) => false,
        Err(error) => {
            assert!(lost(&error) || before_notice(&error), "{error}");
            target.lost().is_some() && lost(&error)
        }
    });
}

/// What a first use may meet between the peer's death and our notice of it: nobody answers, or a
/// handle of a process that is gone.
fn before_notice(error: &Error) -> bool {
    matches!(
        error,
        Error::ExportRefused { .. }
            | Error::ProbeRefused { .. }
            | Error::Device(DeviceError::BadExport { .. } | DeviceError::Call { .. })
    )
}

/// What a side holds once its ended connections are gone: the same for a while.
fn settled(side: &mut Side) -> Usage {
    let mut last = (side.usage(), Instant::now());
    eventually("what is held settles", || {
        let now = side.usage();
        if now != last.0 {
            last = (now, Instant::now());
        }
        last.1.elapsed() > Duration::from_millis(100)
    });
    last.0
}

/// What makes the simulated GPU of this side misbehave.
fn control(side: &Side) -> &SimControl {
    side.control.as_ref().expect("a simulated GPU")
}
