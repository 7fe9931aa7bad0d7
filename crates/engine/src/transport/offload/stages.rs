//! Staged copies as steps: a buffer of device memory holds one run of host memory after the other.

use kvferry_device::{CompactCopy, CopyDescriptor, CopySource, Rows, Stage, StageSource};

use super::SLOT_DESCRIPTORS;
use super::fragments::{Borders, Direction, append};

/// Pieces that are read ahead.
const AHEAD: usize = 256;

/// Bytes that the kernel copies at a time, where both ends are aligned to as many.
const WORD: u64 = 16;

/// How a batch is divided into steps, beyond what its buffers ask for. The link idles while the first
/// step of a store is gathered and while the last of a load is scattered, so these are short; the
/// others are packed and copied beside DMAs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Division {
    /// Bytes of a short step.
    short: u64,
    /// Bytes that are in no step yet.
    left: u64,
    begun: bool,
    ends_short: bool,
}

impl Division {
    /// As few steps as fit.
    pub(super) const NONE: Self =
        Self { short: u64::MAX, left: 0, begun: false, ends_short: false };

    /// Of so many bytes, where a step is `chunk` otherwise.
    pub(super) fn of(bytes: u64, chunk: u64, direction: Direction) -> Self {
        // Of less, another launch and another DMA cost more than the wait.
        if bytes < chunk / 4 {
            return Self::NONE;
        }
        let short = (bytes.min(chunk) / 8).max(1);
        Self { short, left: bytes, begun: false, ends_short: direction == Direction::Load }
    }

    /// Bytes of the next step, about.
    fn next(&mut self) -> u64 {
        let begun = std::mem::replace(&mut self.begun, true);
        match self.left.checked_sub(self.short) {
            _ if !begun => self.short,
            Some(long) if self.ends_short && long > self.short => long,
            _ => u64::MAX,
        }
    }

    /// A step took so many.
    fn take(&mut self, bytes: u64) {
        self.left = self.left.saturating_sub(bytes);
    }
}

/// Fewest pieces of a step that is not the last: a quarter of a slot, behind which the next one begins
/// another.
const LEAST_STEP: u64 = SLOT_DESCRIPTORS as u64 / 4;

/// Where pieces are packed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buffers {
    places: [u64; 2],
    bytes: u64,
    /// All pieces fit, and no step uses bytes of another one.
    whole: bool,
}

impl Buffers {
    /// Of so much memory, for so many bytes in at most so many pieces, which are packed in tiles.
    pub(super) fn of(base: u64, memory: u64, bytes: u64, count: u64, tile_bytes: u64) -> Self {
        // The end of a step cuts a run of host memory, and its alignment with it; so do those of the short
        // ones at both ends.
        let cuts = 4 + count.saturating_add(bytes / tile_bytes) / LEAST_STEP;
        // What alignment takes, at most.
        let slack = count.saturating_add(cuts).saturating_mul(2 * WORD);
        if bytes.saturating_add(slack) <= memory {
            return Self { places: [base; 2], bytes: memory, whole: true };
        }
        let half = memory / 2 / 256 * 256;
        Self { places: [base, base + half], bytes: half, whole: false }
    }
}

/// Packs pieces into one buffer, or into two by turns.
pub(super) struct Packer<'a> {
    source: &'a mut dyn CopySource,
    direction: Direction,
    /// Of host memory, at the end where it is.
    borders: &'a Borders,
    ahead: [CopyDescriptor; AHEAD],
    /// Those of `ahead` that are not packed.
    left: std::ops::Range<usize>,
    buffers: Buffers,
    division: Division,
    turn: usize,
    /// Bytes of the buffer that are in use.
    used: u64,
    tile_bytes: u64,
    blocks: Vec<Rows>,
    dma: Vec<CompactCopy<'static>>,
}

impl<'a> Packer<'a> {
    /// `borders` are those of host memory.
    pub(super) fn new(
        source: &'a mut dyn CopySource,
        direction: Direction,
        borders: &'a Borders,
        buffers: Buffers,
        division: Division,
        tile_bytes: u64,
    ) -> Self {
        let mut packer = Self {
            source,
            direction,
            borders,
            ahead: [CopyDescriptor::default(); AHEAD],
            left: 0..0,
            buffers,
            division,
            turn: 0,
            used: 0,
            tile_bytes,
            blocks: Vec::new(),
            dma: Vec::new(),
        };
        packer.refill();
        packer
    }

    fn refill(&mut self) {
        while self.left.is_empty() {
            match self.source.fill(&mut self.ahead) {
                0 => return,
                count => self.left = 0..count,
            }
        }
    }

    /// What was packed last, if another piece may continue it.
    fn run(&self) -> Option<Run> {
        let last = self.blocks.last()?;
        let (begin, pitch, staged_pitch, windows) = match self.direction {
            Direction::Store => (last.dst, last.dst_pitch, last.src_pitch, &self.borders.dst),
            Direction::Load => (last.src, last.src_pitch, last.dst_pitch, &self.borders.src),
        };
        let (next, row) = match last.count {
            1 => (begin + last.len, None),
            // Side by side in the buffer, with the alignment that the kernel likes.
            count if staged_pitch == last.len && last.len.is_multiple_of(WORD) => {
                (begin + count * pitch, Some(Row { len: last.len, pitch }))
            }
            _ => return None,
        };
        Some(Run { next, border: windows.end_of(begin), row })
    }

    /// Packs the next pieces to `staged`, as long as they are whole and continue what was packed
    /// last; returns how many they are, and how many bytes.
    fn pack_whole(&mut self, staged: u64, room: u64, slot: &mut [CopyDescriptor]) -> (usize, u64) {
        let Some(run) = self.run().filter(|run| run.row.is_none() || staged.is_multiple_of(WORD))
        else {
            return (0, 0);
        };
        let pieces = &self.ahead[self.left.clone()];
        let most = self.tile_bytes;
        let (count, bytes) = match self.direction {
            Direction::Store => pack::<true>(pieces, run, (staged, room), most, slot),
            Direction::Load => pack::<false>(pieces, run, (staged, room), most, slot),
        };
        if let Some(last) = self.blocks.last_mut() {
            match run.row {
                None => last.len += bytes,
                Some(_) => last.count += count as u64,
            }
        }
        self.left.start += count;
        self.refill();
        (count, bytes)
    }
}

/// A run of host memory, or rows of it.
#[derive(Clone, Copy)]
struct Run {
    /// Where what continues it begins.
    next: u64,
    /// Where the window ends that it lies in.
    border: u64,
    row: Option<Row>,
}

#[derive(Clone, Copy)]
struct Row {
    len: u64,
    pitch: u64,
}

impl Run {
    fn continues(&self, host: u64) -> bool {
        host == self.next && host < self.border
    }
}

/// Writes the first pieces to the slot that continue the run, are no longer than `most`, and fit into
/// the room at `staged`; returns how many, and their bytes. Most batches are hardly anything else, so
/// this is what packing costs.
fn pack<const STORE: bool>(
    pieces: &[CopyDescriptor],
    mut run: Run,
    (staged, room): (u64, u64),
    most: u64,
    slot: &mut [CopyDescriptor],
) -> (usize, u64) {
    let (mut count, mut bytes) = (0, 0);
    for (&CopyDescriptor { src, dst, len }, place) in pieces.iter().zip(slot) {
        let (host, device) = if STORE { (dst, src) } else { (src, dst) };
        if !run.continues(host) || len > most || len > room - bytes {
            break;
        }
        match run.row {
            None => run.next += len,
            Some(row) if len == row.len && device.is_multiple_of(WORD) => run.next += row.pitch,
            Some(_) => break,
        }
        let staged = staged + bytes;
        let (src, dst) = if STORE { (src, staged) } else { (staged, dst) };
        *place = CopyDescriptor { src, dst, len };
        bytes += len;
        count += 1;
    }
    (count, bytes)
}

impl StageSource for Packer<'_> {
    fn has_next(&self) -> bool {
        !self.left.is_empty()
    }

    fn next(&mut self, slot: &mut [CopyDescriptor]) -> Stage<'_> {
        let buffer = self.buffers.places[self.turn];
        self.turn ^= 1;
        self.blocks.clear();
        let first = if self.buffers.whole { self.used } else { 0 };
        let end = first.saturating_add(self.division.next()).min(self.buffers.bytes);
        let mut used = first;
        let mut count = 0;
        while count < slot.len() && used < end && self.has_next() {
            let (whole, bytes) = self.pack_whole(buffer + used, end - used, &mut slot[count..]);
            if whole > 0 {
                count += whole;
                used += bytes;
                continue;
            }
            let at_piece = self.left.start;
            let piece = self.ahead[at_piece];
            let (host, device) = (self.direction.host(&piece), self.direction.device(&piece));
            // A run of host memory has no gaps in the buffer; between runs there are, so that the
            // kernel finds both ends of a piece equally aligned.
            let run = self.run().filter(|run| run.row.is_none());
            let continues = run.is_some_and(|run| run.continues(host));
            let at = match continues {
                true => used,
                false => u64::next_multiple_of(used, WORD) + device % WORD,
            };
            let Some(room) = self.buffers.bytes.checked_sub(at).filter(|&room| room > 0) else {
                break;
            };
            let tiles = (slot.len() - count) as u64;
            let len = piece.len.min(room).min(tiles.saturating_mul(self.tile_bytes));
            let staged = buffer + at;
            let mut done = 0;
            while done < len {
                let tile = (len - done).min(self.tile_bytes);
                let (device, staged) = (device + done, staged + done);
                let (src, dst) = match self.direction {
                    Direction::Store => (device, staged),
                    Direction::Load => (staged, device),
                };
                slot[count] = CopyDescriptor { src, dst, len: tile };
                count += 1;
                done += tile;
            }
            let (src, dst) = match self.direction {
                Direction::Store => (staged, host),
                Direction::Load => (host, staged),
            };
            if let (true, Some(last)) = (continues, self.blocks.last_mut()) {
                last.len += len;
            } else {
                append(&mut self.blocks, CopyDescriptor { src, dst, len }, self.borders);
            }
            used = at + len;
            let rest = &mut self.ahead[at_piece];
            *rest =
                CopyDescriptor { src: piece.src + len, dst: piece.dst + len, len: piece.len - len };
            if rest.len == 0 {
                self.left.start += 1;
                self.refill();
            }
        }
        self.used = used;
        self.division.take(used - first);
        self.dma.clear();
        self.dma.extend(self.blocks.iter().map(Rows::compact));
        Stage { pieces: count, dma: &self.dma, dma_first: self.direction == Direction::Load }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use kvferry_device::SliceSource;
    use proptest::prelude::*;

    use super::super::fragments::Windows;
    use super::*;

    const BUFFER: u64 = 1 << 40;
    const TILE: u64 = 64;

    /// One copy by bytes: where each comes from, by where it goes.
    type Bytes = BTreeMap<u64, u64>;

    fn copy(bytes: &mut Bytes, piece: &CopyDescriptor) {
        for at in 0..piece.len {
            bytes.insert(piece.dst + at, piece.src + at);
        }
    }

    /// What all steps do together, and the bytes of each.
    fn run(mut packer: Packer<'_>, slot: usize) -> (Bytes, Vec<u64>) {
        let (mut all, mut steps) = (Bytes::new(), Vec::new());
        let mut slot = vec![CopyDescriptor::default(); slot];
        while packer.has_next() {
            let Stage { pieces, dma, dma_first } = packer.next(&mut slot);
            assert!(slot[..pieces].iter().all(|piece| piece.len <= TILE), "a tile is a warp's");
            let (mut gather, mut dmas) = (Bytes::new(), Bytes::new());
            slot[..pieces].iter().for_each(|piece| copy(&mut gather, piece));
            dma.iter().flat_map(CompactCopy::pieces).for_each(|piece| copy(&mut dmas, &piece));
            let (one, next) = if dma_first { (&dmas, &gather) } else { (&gather, &dmas) };
            steps.push(next.len() as u64);
            for (dst, buffer) in next {
                let src = one.get(buffer).expect("what leaves the buffer came into it");
                assert!(all.insert(*dst, *src).is_none(), "twice");
            }
        }
        (all, steps)
    }

    /// Pieces one behind the other in host memory, but for gaps, and scattered on the device.
    fn list(pieces: &[(u64, u64)], direction: Direction) -> Vec<CopyDescriptor> {
        let mut host = 1 << 20;
        let piece = |(at, &(gap, len)): (u64, &(u64, u64))| {
            let (begin, device) = (host + gap, (1 << 30) + at * 7919 % 4096 * 512);
            host = begin + len;
            match direction {
                Direction::Store => CopyDescriptor { src: device, dst: begin, len },
                Direction::Load => CopyDescriptor { src: begin, dst: device, len },
            }
        };
        (0..).zip(pieces).map(piece).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]
        #[test]
        fn the_steps_together_copy_each_piece_and_nothing_else(
            pieces in prop::collection::vec((prop_oneof![4 => Just(0u64), 1 => 1..40u64], 1..150u64), 1..200),
            memory in prop_oneof![Just(2048u64), Just(1 << 20)], slot in 8..300usize,
            borders in prop::collection::vec(0..15_000u64, 0..3), divided: bool, store: bool,
            rows in prop::option::of((0..3u64, 1..5u64)), odd in any::<prop::sample::Index>(),
        ) {
            let direction = if store { Direction::Store } else { Direction::Load };
            let mut pieces = pieces;
            if let Some((gap, len)) = rows {
                // But for one.
                let other = *odd.get(&pieces);
                pieces.fill((gap * 20, len * 16));
                *odd.get_mut(&mut pieces) = other;
            }
            let pieces = list(&pieces, direction);
            let mut expected = Bytes::new();
            pieces.iter().for_each(|piece| copy(&mut expected, piece));
            let bytes = pieces.iter().map(|piece| piece.len).sum();
            let starts = || borders.iter().map(|at| (1 << 20) + at);
            let borders = match direction {
                Direction::Store => Borders { dst: Windows::new(starts()), ..Borders::default() },
                Direction::Load => Borders { src: Windows::new(starts()), ..Borders::default() },
            };
            let division = if divided { Division::of(bytes, bytes, direction) } else { Division::NONE };
            let buffers = Buffers::of(BUFFER, memory, bytes, pieces.len() as u64, TILE);
            let mut source = SliceSource(&pieces);
            let packer = Packer::new(&mut source, direction, &borders, buffers, division, TILE);
            let (copied, steps) = run(packer, slot);
            prop_assert_eq!(copied, expected);
            prop_assert!(steps.iter().all(|&bytes| bytes > 0), "{:?}", steps);
        }
    }

    #[test]
    fn every_step_moves_something_however_often_slots_cut_a_run() {
        // Odd, so that each step begins with what its alignment takes, in a buffer that the run just fits.
        let tile = 16;
        let bytes = 200 * LEAST_STEP * tile + 1;
        let piece = [CopyDescriptor { src: (1 << 30) + 15, dst: 1 << 20, len: bytes }];
        let memory =
            (bytes..).step_by(16).find(|&memory| Buffers::of(BUFFER, memory, bytes, 1, tile).whole);
        let buffers = Buffers::of(BUFFER, memory.expect("one that is enough"), bytes, 1, tile);
        let (mut source, borders) = (SliceSource(&piece), Borders::default());
        let (direction, division) = (Direction::Store, Division::NONE);
        let mut packer = Packer::new(&mut source, direction, &borders, buffers, division, tile);
        let mut slot = vec![CopyDescriptor::default(); LEAST_STEP as usize];
        let mut moved = 0;
        while packer.has_next() {
            let pieces = packer.next(&mut slot).pieces;
            assert!(pieces > 0, "{moved} of {bytes} moved");
            moved += slot[..pieces].iter().map(|piece| piece.len).sum::<u64>();
        }
        assert_eq!(moved, bytes);
    }

    #[test]
    fn a_store_begins_with_a_short_step_and_a_load_ends_with_one_too() {
        let steps = |direction, bytes: u64, chunk| {
            let pieces = list(&vec![(0, 64); bytes as usize / 64], direction);
            let (division, borders) = (Division::of(bytes, chunk, direction), Borders::default());
            let buffers = Buffers::of(BUFFER, 1 << 20, bytes, pieces.len() as u64, TILE);
            let mut source = SliceSource(&pieces);
            run(Packer::new(&mut source, direction, &borders, buffers, division, TILE), 4096).1
        };
        assert_eq!(steps(Direction::Store, 65_536, 65_536), [8192, 57_344]);
        assert_eq!(steps(Direction::Load, 65_536, 65_536), [8192, 49_152, 8192]);
        assert_eq!(steps(Direction::Load, 65_536, 1 << 20), [65_536], "too little to divide");
    }
}
