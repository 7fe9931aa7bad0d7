//! Host memory that did not come from kvferry: no other process can map it, so TCP is its only path,
//! between processes of one host, too.

use kvferry::{Copies, Error, FormError, Op, Path, Range, RangeError, State, Strided};
use rand::Rng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

use super::kinds::{LEN, both_ways};
use super::{Pair, lost};
use crate::peer_process::{Image, Kind, Obey, Order, PATIENCE, Side, pattern};

/// The path that moved one batch.
pub(super) fn path<'a>(
    side: &'a Side,
    op: Op,
    copies: impl Into<Copies<'a>>,
) -> Result<Path, Error> {
    let id = side.engine.submit(side.peer().target(), op, copies)?;
    let status = side.engine.wait(id, PATIENCE)?;
    side.engine.release(id)?;
    match status.state {
        State::Completed => Ok(status.path),
        State::Failed(error) => Err(error),
        State::Running => panic!("a batch did not end in {PATIENCE:?}"),
    }
}

/// Host memory, with a GPU of that kind beside if it is one.
fn beside(kind: Kind) -> Kind {
    if kind == Kind::Host { kind } else { kind.behind_host_memory() }
}

pub(crate) fn ordinary_host_memory_of_another_process_is_reached_by_tcp_and_that_is_no_fallback(
    kind: Kind,
    random: &mut SmallRng,
) {
    // A slower path would be refused.
    let mut pair = Pair::of(kind, beside(kind), &[("MC_KVFERRY_STRICT", "1")]);
    for len in [LEN, LEN + 1, 3 * LEN + 4097] {
        let remote = pair.there.address(Order::AllocatePrivate { len });
        both_ways(&mut pair, remote, len - LEN, len, random);
        let local = pair.here.filled(LEN, random.random());
        pair.here.peer().refresh().expect("it answers");
        let all = [Range { local, remote, len: LEN }];
        let by = if kind == Kind::Host { Path::Tcp } else { Path::TcpStaged };
        assert_eq!(path(&pair.here, Op::Read, &all), Ok(by));
        pair.here.done(Order::Free { addr: local });
        pair.there.done(Order::Free { addr: remote });
    }
    let statistics = pair.here.engine.statistics();
    assert_eq!((statistics.fallbacks, statistics.mappings), (0, 0));
}

pub(crate) fn ordinary_host_memory_here_is_copied_to_and_from_memory_that_is_mapped(
    kind: Kind,
    random: &mut SmallRng,
) {
    let mut pair = Pair::of(beside(kind), kind, &[("MC_KVFERRY_STRICT", "1")]);
    let (ours, theirs): (u64, u64) = (random.random(), random.random());
    let local = pair.here.address(Order::AllocatePrivate { len: LEN });
    pair.here.done(Order::Fill { addr: local, seed: ours });
    let remote = pair.there.filled(LEN, theirs);
    pair.here.peer().refresh().expect("it answers");
    let all = [Range { local, remote, len: LEN }];
    let moved = path(&pair.here, Op::Write, &all).expect("writes");
    assert!(!matches!(moved, Path::Tcp | Path::TcpStaged), "{moved}");
    pair.there.verify(remote, Image::untouched(ours));
    pair.there.done(Order::Fill { addr: remote, seed: theirs });
    path(&pair.here, Op::Read, &all).expect("reads");
    pair.here.verify(local, Image::untouched(theirs));
    // Its page-lock, where a GPU copied, ends with the region.
    pair.here.done(Order::Free { addr: local });
}

pub(crate) fn one_batch_reaches_memory_that_is_mapped_and_memory_that_cannot_be(
    kind: Kind,
    random: &mut SmallRng,
) {
    let mut pair = Pair::start(kind);
    let mapped = pair.there.filled(LEN, 0);
    let private = pair.there.address(Order::AllocatePrivate { len: LEN });
    pair.here.peer().refresh().expect("it answers");
    for (op, forms) in [(Op::Write, false), (Op::Read, false), (Op::Write, true), (Op::Read, true)]
    {
        let seeds: [u64; 3] = random.random();
        // Two halves here, one for each of the two there.
        let local = pair.here.filled(2 * LEN, seeds[0]);
        pair.there.done(Order::Fill { addr: mapped, seed: seeds[1] });
        pair.there.done(Order::Fill { addr: private, seed: seeds[2] });
        let piece = LEN / 64;
        let mut ranges: Vec<Range> = (0..64)
            .flat_map(|at| {
                let (near, far) = (at * piece, LEN + at * piece);
                [(local + near, mapped + near), (local + far, private + near)]
            })
            .map(|(local, remote)| Range { local, remote, len: piece })
            .collect();
        ranges.shuffle(random);
        // What is empty is nowhere.
        ranges.insert(17, Range { local: 1, remote: 2, len: 0 });
        let strided = |&Range { local, remote, len }: &Range| Strided {
            local,
            remote,
            len: len / 4,
            count: 4,
            local_stride: len / 4,
            remote_stride: len / 4,
        };
        let strided: Vec<_> = ranges.iter().map(strided).collect();
        let by = match forms {
            false => path(&pair.here, op, &ranges),
            true => path(&pair.here, op, &strided),
        };
        assert_eq!(by, Ok(Path::Mixed), "{op:?}");
        let mut found = vec![0; 2 * LEN as usize];
        match op {
            Op::Read => {
                pair.here.read(local, &mut found);
                let (near, far) = found.split_at(LEN as usize);
                assert_eq!(near, pattern(seeds[1], LEN));
                assert_eq!(far, pattern(seeds[2], LEN));
            }
            Op::Write => {
                let back = pair.here.address(Order::Allocate { len: 2 * LEN });
                let halves = [
                    Range { local: back, remote: mapped, len: LEN },
                    Range { local: back + LEN, remote: private, len: LEN },
                ];
                path(&pair.here, Op::Read, &halves).expect("reads");
                pair.here.read(back, &mut found);
                assert_eq!(found, pattern(seeds[0], 2 * LEN));
                pair.here.done(Order::Free { addr: back });
            }
        }
        pair.here.done(Order::Free { addr: local });
    }
    refusals(&mut pair, mapped, private);
}

/// Errors name positions in the caller's list, however it is taken apart, and nothing is moved.
fn refusals(pair: &mut Pair, mapped: u64, private: u64) {
    let local = pair.here.filled(4096, 0);
    let range = |local, remote, len| Range { local, remote, len };
    let good = [range(local, mapped, 64), range(local + 64, private, 64)];
    let submit = |copies: Copies<'_>| {
        let (engine, target) = (&pair.here.engine, pair.here.peer().target());
        engine.submit(target, Op::Read, copies).expect_err("it is wrong")
    };
    for remote in [mapped + LEN, private + LEN - 1] {
        let list = [good[0], good[1], range(local + 128, remote, 64)];
        match submit((&list).into()) {
            Error::Range(
                RangeError::NotRegistered { index, .. } | RangeError::OutOfBounds { index, .. },
            ) => assert_eq!(index, 2),
            other => panic!("{other:?}"),
        }
        let form = |range: &Range| Strided {
            local: range.local,
            remote: range.remote,
            len: range.len,
            count: 1,
            local_stride: 0,
            remote_stride: 0,
        };
        let list: Vec<_> = list.iter().map(form).collect();
        match submit((&list).into()) {
            Error::Form(
                FormError::NotRegistered { form, .. } | FormError::OutOfBounds { form, .. },
            ) => assert_eq!(form, 2),
            other => panic!("{other:?}"),
        }
    }
    // One of each way writes the same byte here.
    let list = [good[0], good[1], range(local + 100, mapped, 64)];
    match submit((&list).into()) {
        Error::Range(RangeError::DestinationsOverlap { first, second, .. }) => {
            assert_eq!((first.min(second), first.max(second)), (1, 2))
        }
        other => panic!("{other:?}"),
    }
    pair.here.verify(local, Image::untouched(0));
}

pub(crate) fn ordinary_host_memory_that_is_withdrawn_or_whose_owner_dies_ends_batches(
    kind: Kind,
    random: &mut SmallRng,
) {
    let mut pair = Pair::start(kind);
    let local = pair.here.filled(LEN, random.random());
    let first = pair.there.address(Order::AllocatePrivate { len: LEN });
    let second = pair.there.address(Order::AllocatePrivate { len: LEN });
    pair.here.peer().refresh().expect("it answers");
    let all = |remote| [Range { local, remote, len: LEN }];
    path(&pair.here, Op::Write, &all(first)).expect("writes");
    pair.there.done(Order::Free { addr: first });
    // The list that was fetched before still has it; the peer does not.
    let refused = path(&pair.here, Op::Write, &all(first)).expect_err("it is gone there");
    assert!(matches!(refused, Error::Tcp { .. }), "{refused:?}");
    path(&pair.here, Op::Write, &all(second)).expect("others are not touched by it");
    pair.there.kill();
    let ended = loop {
        match path(&pair.here, Op::Write, &all(second)) {
            Ok(_) => {}
            Err(error) if lost(&error) => break error,
            Err(Error::Tcp { .. }) => {}
            Err(other) => panic!("{other:?}"),
        }
    };
    assert!(lost(&ended));
}
