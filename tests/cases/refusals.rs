//! A range that is not the peer's to give is refused by its index, before anything moves.

use kvferry::{Error, Op, Range, RangeError, Side as End};
use rand::Rng;
use rand::rngs::SmallRng;

use super::Pair;
use crate::peer_process::{Image, Kind, Obey, Order};

pub(crate) fn ranges_that_the_peer_did_not_register_are_refused_by_index(
    kind: Kind,
    random: &mut SmallRng,
) {
    const LEN: u64 = 8 << 20;
    const VIEW: u64 = 1 << 20;
    let mut pair = Pair::start(kind);
    let (ours, theirs) = (random.random(), random.random());
    let views = vec![(VIEW, VIEW), (4 * VIEW + 5, 1001)];
    let memory = pair.there.address(Order::AllocateViews { len: LEN, views });
    pair.there.done(Order::Fill { addr: memory, seed: theirs });
    let local = pair.here.filled(LEN, ours);
    pair.here.peer().refresh().expect("it answers");
    let good = |at: u64| Range { local: local + at, remote: memory + VIEW + at, len: 100 };
    let (side, index) = (End::Remote, 2);
    let not_registered = |addr: u64, len: u64| RangeError::NotRegistered { index, side, addr, len };
    let outside = |addr: u64, len: u64, start: u64, region: u64, beyond: u64| {
        RangeError::OutOfBounds { index, side, addr, len, start, region, beyond }
    };
    let cases = [
        not_registered(memory, 10),
        not_registered(memory + VIEW - 1, 10),
        not_registered(memory + 2 * VIEW, 1),
        not_registered(memory + 4 * VIEW + 4, 1),
        not_registered(memory + LEN, 64),
        outside(memory + 2 * VIEW - 9, 10, memory + VIEW, VIEW, 1),
        outside(memory + VIEW, VIEW + 1, memory + VIEW, VIEW, 1),
        outside(memory + 4 * VIEW + 5, 4096, memory + 4 * VIEW + 5, 1001, 3095),
        RangeError::Overflow { index, side, addr: u64::MAX - 3, len: 8 },
    ];
    for expected in cases {
        let (RangeError::NotRegistered { addr, len, .. }
        | RangeError::OutOfBounds { addr, len, .. }
        | RangeError::Overflow { addr, len, .. }) = expected
        else {
            unreachable!("the list has no other")
        };
        let bad = Range { local: local + VIEW, remote: addr, len };
        for op in [Op::Write, Op::Read] {
            let refused =
                pair.here.engine.submit(pair.target(), op, &[good(0), good(300), bad, good(600)]);
            assert_eq!(refused, Err(Error::Range(expected.clone())), "{op:?}");
        }
    }
    assert_eq!(pair.target().open_count(), 0, "a refused list opens nothing");
    // Nothing of any refused list moved.
    pair.there.verify(memory, Image::untouched(theirs));
    pair.here.verify(local, Image::untouched(ours));
    // The last byte of a region is inside.
    let last = Range { local, remote: memory + 2 * VIEW - 1, len: 1 };
    pair.here.run(pair.target(), Op::Write, &[last, good(100)]).expect("writes");
}

pub(crate) fn memory_that_the_peer_withdrew_is_refused(kind: Kind, random: &mut SmallRng) {
    const LEN: u64 = 4 << 20;
    const VIEW: u64 = 1 << 20;
    let mut pair = Pair::start(kind);
    let theirs = random.random();
    let views = vec![(0, VIEW), (2 * VIEW, VIEW)];
    let memory = pair.there.address(Order::AllocateViews { len: LEN, views });
    let own = pair.there.filled(VIEW, theirs);
    let unused = pair.there.filled(VIEW, theirs);
    let local = pair.here.filled(VIEW, 0);
    let range = |remote| Range { local, remote, len: 64 };
    pair.here.peer().refresh().expect("it answers");
    for remote in [memory, memory + 2 * VIEW, own] {
        pair.here.run(pair.target(), Op::Read, &[range(remote)]).expect("reads");
    }
    assert_eq!(pair.target().open_count(), 2);

    // Gone before we used it or heard of it: the peer itself refuses, and no batch begins.
    pair.there.done(Order::Free { addr: unused });
    let refused = pair.here.engine.submit(pair.target(), Op::Read, &[range(unused)]);
    assert!(matches!(refused, Err(Error::ExportRefused { .. })), "{refused:?}");
    assert!(pair.here.peer().is_alive(), "a refusal is no death");

    pair.there.done(Order::Withdraw { addr: memory });
    pair.there.done(Order::Free { addr: own });
    pair.here.peer().refresh().expect("it answers");
    for addr in [memory, own, unused] {
        let list = [range(memory + 2 * VIEW), Range { local: local + 64, ..range(addr) }];
        let refused = pair.here.engine.submit(pair.target(), Op::Read, &list);
        let expected = RangeError::NotRegistered { index: 1, side: End::Remote, addr, len: 64 };
        assert_eq!(refused, Err(Error::Range(expected)));
    }
    // The other view of that allocation is still there, and so is its mapping.
    pair.here.run(pair.target(), Op::Read, &[range(memory + 2 * VIEW)]).expect("reads");
    assert_eq!(pair.target().open_count(), 1);
}

/// By the device where one copies with a kernel, which looks while it copies.
pub(crate) fn a_long_list_whose_destinations_overlap_fails_by_a_range_that_does(
    kind: Kind,
    random: &mut SmallRng,
) {
    const COUNT: u64 = 6000;
    const SLOT: u64 = 512;
    let mut pair = Pair::start(kind);
    let (ours, theirs) = (random.random(), random.random());
    let memory = pair.there.filled(COUNT * SLOT, theirs);
    let local = pair.here.filled(COUNT * SLOT, ours);
    pair.here.peer().refresh().expect("it answers");
    let good: Vec<_> = (0..COUNT)
        .map(|at| {
            let offset = at * 3659 % COUNT * SLOT;
            Range { local: local + offset, remote: memory + offset, len: (1 + at * 7 % 5) * 64 }
        })
        .collect();
    let mut found_by_device = 0;
    for round in 0..20 {
        let op = if round % 2 == 0 { Op::Write } else { Op::Read };
        pair.here.run(pair.target(), op, &good).expect("its destinations are apart");
        let mut bad = good.clone();
        let [one, other] = [random.random_range(0..3000), random.random_range(3000..6000)];
        let side = match op {
            Op::Write => End::Remote,
            Op::Read => End::Local,
        };
        let step = bad[other].len - 64;
        bad[one] = match op {
            Op::Write => Range { remote: bad[other].remote + step, ..bad[one] },
            Op::Read => Range { local: bad[other].local + step, ..bad[one] },
        };
        let failed = pair.here.run(pair.target(), op, &bad).expect_err("two ranges overlap");
        match failed {
            Error::Range(RangeError::DestinationShared { index, side: end }) => {
                found_by_device += 1;
                assert_eq!(end, side);
                // The one may reach into what comes behind the other, too.
                assert!(index == one || overlaps(op, &bad[one], &bad[index]), "{index}");
            }
            Error::Range(RangeError::DestinationsOverlap { first, second, side: end, .. }) => {
                assert_eq!(end, side);
                assert!(first == one || second == one, "{first} and {second}");
            }
            error => panic!("{error}"),
        }
    }
    match kind {
        Kind::Host => assert_eq!(found_by_device, 0),
        _ => assert!(found_by_device > 10, "{found_by_device} of 20"),
    }
}

fn overlaps(op: Op, one: &Range, other: &Range) -> bool {
    let destination = |range: &Range| match op {
        Op::Write => range.remote,
        Op::Read => range.local,
    };
    let (one_at, other_at) = (destination(one), destination(other));
    one_at < other_at + other.len && other_at < one_at + one.len
}
