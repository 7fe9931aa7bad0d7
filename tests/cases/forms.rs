//! Requests beyond one list of ranges: compact forms, several peers at once, and order with the
//! application's own streams.

use kvferry::{Copies, Op, Paged, Pages, Part, Producer, Range, State, Strided, SubmitOptions};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, RngCore};

use super::Pair;
use crate::peer_process::{Image, Kind, Layout, Obey, Order, PATIENCE, PeerProcess, Piece};

/// Where pieces lie, by offsets into both ends.
fn layout(op: Op, pieces: impl Iterator<Item = Range>) -> Layout {
    let piece = |Range { local, remote, len }| match op {
        Op::Write => Piece { source: local, destination: remote, len },
        Op::Read => Piece { source: remote, destination: local, len },
    };
    Layout::List(pieces.map(piece).collect())
}

impl Pair {
    /// Moves a form, given at two base addresses, and checks every byte of both ends.
    fn moves_form<'a>(
        &mut self,
        op: Op,
        pieces: impl Iterator<Item = Range>,
        form: impl FnOnce(u64, u64) -> Copies<'a>,
        options: &SubmitOptions,
        random: &mut SmallRng,
    ) {
        let layout = layout(op, pieces);
        let (source_len, destination_len) = layout.extents();
        let (source_seed, guard_seed) = (random.random(), random.random());
        let (here, there) = match op {
            Op::Write => ((source_len, source_seed), (destination_len, guard_seed)),
            Op::Read => ((destination_len, guard_seed), (source_len, source_seed)),
        };
        let local = self.here.filled(here.0, here.1);
        let remote = self.there.filled(there.0, there.1);
        self.here.peer().refresh().expect("it answers");
        let copies = form(local, remote);
        let part = Part { target: self.here.peer().target(), op, copies };
        let id = self.here.engine.submit_parts(&[part], options).expect("submits");
        let status = self.here.engine.wait(id, PATIENCE).expect("known");
        assert_eq!(status.state, State::Completed);
        self.here.engine.release(id).expect("it ended");
        let moved = Image { layout, source_seed, guard_seed };
        let source = Image::untouched(source_seed);
        let (mine, its) = match op {
            Op::Write => (source, moved),
            Op::Read => (moved, source),
        };
        self.there.verify(remote, its);
        self.here.verify(local, mine);
        self.here.done(Order::Free { addr: local });
        self.there.done(Order::Free { addr: remote });
    }
}

pub(crate) fn compact_forms_move_what_their_pieces_would(kind: Kind, random: &mut SmallRng) {
    let mut pair = Pair::start(kind);
    for round in 0..8 {
        // Planes, and rows that are aligned to nothing.
        let align: u64 = [16, 1][round % 2];
        let op = [Op::Write, Op::Read][round / 2 % 2];
        let options = SubmitOptions { without_kernel: round / 4 == 1, ..SubmitOptions::default() };
        let len = random.random_range(1..=40) * align;
        let gap = |random: &mut SmallRng| align * random.random_range(0..5);
        let strided = Strided {
            local: gap(random),
            remote: gap(random),
            len,
            count: random.random_range(1..3000),
            local_stride: len + gap(random),
            remote_stride: len + gap(random),
        };
        let place = |local, remote| Strided {
            local: strided.local + local,
            remote: strided.remote + remote,
            ..strided
        };
        let placed = |local, remote| Copies::from(&*Box::leak(Box::new([place(local, remote)])));
        pair.moves_form(op, strided.pieces(), placed, &options, random);

        let mut numbers = || {
            let mut numbers: Vec<u32> = (0..40).collect();
            numbers.shuffle(random);
            numbers.truncate(25);
            &*numbers.leak()
        };
        let (ours, theirs) = (numbers(), numbers());
        let rows = random.random_range(1..20);
        let mut end = |numbers, row: u64| Pages {
            addr: gap(random),
            numbers,
            row_stride: row,
            page_stride: u64::from(rows) * row,
            layer_stride: 40 * u64::from(rows) * row + align,
        };
        let paged = Paged {
            local: end(ours, len),
            remote: end(theirs, 4 * len),
            layers: 3,
            rows,
            row_bytes: len,
        };
        let place = |local, remote| {
            let mut paged = paged;
            paged.local.addr += local;
            paged.remote.addr += remote;
            paged
        };
        let placed = |local, remote| Copies::from(&*Box::leak(Box::new([place(local, remote)])));
        pair.moves_form(op, paged.pieces(), placed, &options, random);
    }
}

pub(crate) fn one_batch_for_several_peers_reaches_each_whole(kind: Kind, random: &mut SmallRng) {
    let mut pair = Pair::start(kind);
    let mut others: Vec<PeerProcess> = (0..2).map(|_| PeerProcess::start(kind)).collect();
    let opened: Vec<_> =
        others.iter().map(|peer| pair.here.node.open(&peer.name).expect("opens")).collect();
    const LEN: u64 = 1 << 20;
    let source_seed = random.next_u64();
    let local = pair.here.filled(LEN, source_seed);
    let guard_seed = random.next_u64();
    let mut remotes = vec![pair.there.filled(LEN, guard_seed)];
    remotes.extend(others.iter_mut().map(|peer| peer.filled(LEN, guard_seed)));
    pair.here.peer().refresh().expect("it answers");
    opened.iter().for_each(|peer| peer.refresh().expect("it answers"));
    // Each peer gets other pieces, scattered.
    let layouts: Vec<Layout> = (0..3)
        .map(|_| Layout::Scattered { count: 400, len: 2112, seed: random.next_u64() })
        .collect();
    let lists: Vec<Vec<Range>> = layouts
        .iter()
        .zip(&remotes)
        .map(|(layout, remote)| {
            let place = |piece: Piece| Range {
                local: local + piece.source,
                remote: remote + piece.destination,
                len: piece.len,
            };
            layout.pieces().into_iter().map(place).collect()
        })
        .collect();
    let targets = std::iter::once(pair.target()).chain(opened.iter().map(|peer| peer.target()));
    let parts: Vec<_> = targets
        .zip(&lists)
        .map(|(target, list)| Part { target, op: Op::Write, copies: list.into() })
        .collect();
    let engine = &pair.here.engine;
    let id = engine.submit_parts(&parts, &SubmitOptions::default()).expect("submits");
    assert_eq!(engine.wait(id, PATIENCE).expect("known").state, State::Completed);
    let peers = std::iter::once(&mut pair.there).chain(&mut others);
    for ((peer, layout), remote) in peers.zip(layouts).zip(remotes) {
        peer.verify(remote, Image { layout, source_seed, guard_seed });
    }
}

pub(crate) fn a_transfer_waits_for_the_applications_stream(kind: Kind, random: &mut SmallRng) {
    // REQUIREMENTS H9, T7: what the producer writes is what arrives, for the source of a write and
    // the destination of a read.
    const LEN: u64 = 1 << 20;
    let mut pair = Pair::start(kind);
    let stream = pair.here.application_stream();
    for (count, len) in [(1, LEN), (480, 2112), (5, 700)] {
        for write in [true, false] {
            let seeds: (u64, u64) = (random.random(), random.random());
            let local = pair.here.filled(LEN, seeds.0);
            let remote = pair.there.filled(LEN, seeds.1);
            pair.here.peer().refresh().expect("it answers");
            let list: Vec<Range> = (0..count)
                .map(|at| Range { local: local + at * len, remote: remote + at * len, len })
                .collect();
            let op = if write { Op::Write } else { Op::Read };
            // The mapping, before anything is held.
            let first = [Range { len: 1, ..list[0] }];
            pair.here.run(pair.target(), op, &first).expect("moves");
            pair.there.done(Order::Fill { addr: remote, seed: seeds.1 });
            pair.here.done(Order::Fill { addr: local, seed: seeds.0 });
            stream.hold();
            let byte = random.random();
            // SAFETY: nobody else uses these bytes until the transfer, which waits for the stream.
            unsafe { stream.fill(local, byte, count * len) };
            // SAFETY: the stream lives longer than the submission.
            let after = Some(unsafe { Producer::stream(stream.handle()) });
            let options = SubmitOptions { after, ..SubmitOptions::default() };
            let part = Part { target: pair.target(), op, copies: (&list).into() };
            let id = pair.here.engine.submit_parts(&[part], &options).expect("submits");
            // Longer than the transfer takes if it does not wait.
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert_eq!(pair.here.engine.poll(id).expect("known").state, State::Running);
            pair.there.verify(remote, Image::untouched(seeds.1));
            stream.open();
            let status = pair.here.engine.wait(id, PATIENCE).expect("known");
            assert_eq!(status.state, State::Completed);
            pair.here.engine.release(id).expect("it ended");
            let mut found = vec![0; (count * len) as usize];
            if write {
                // Read back by a transfer of its own, from memory that only this one wrote.
                let check = pair.here.filled(LEN, 0);
                let back = [Range { local: check, remote, len: count * len }];
                pair.here.run(pair.target(), Op::Read, &back).expect("moves");
                pair.here.read(check, &mut found);
                assert!(found.iter().all(|found| *found == byte), "written before the producer");
                pair.here.done(Order::Free { addr: check });
            } else {
                // The read came after what filled the same bytes.
                let moved =
                    layout(Op::Read, [Range { local: 0, remote: 0, len: count * len }].into_iter());
                let image = Image { layout: moved, source_seed: seeds.1, guard_seed: seeds.0 };
                pair.here.verify(local, image);
            }
            pair.here.done(Order::Free { addr: local });
            pair.there.done(Order::Free { addr: remote });
        }
    }
}
