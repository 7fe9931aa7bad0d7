//! Staged copies as steps: a buffer of device memory holds one run of host memory after the other.

use kvferry_device::{CompactCopy, CopyDescriptor, CopySource, Rows, Stage, StageSource};

use super::fragments::{Borders, Direction, append};

/// Pieces that are read ahead.
const AHEAD: usize = 256;

/// Bytes that the kernel copies at a time, where both ends are aligned to as many.
const WORD: u64 = 16;

/// Where pieces are packed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buffers {
    places: [u64; 2],
    bytes: u64,
    /// All pieces fit, and no step uses bytes of another one.
    whole: bool,
}

impl Buffers {
    /// Of so much memory, for so many bytes in at most so many pieces.
    pub(super) fn of(base: u64, memory: u64, bytes: u64, count: u64) -> Self {
        // What alignment takes, at most.
        let slack = count.saturating_add(1).saturating_mul(2 * WORD);
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
        tile_bytes: u64,
    ) -> Self {
        let mut packer = Self {
            source,
            direction,
            borders,
            ahead: [CopyDescriptor::default(); AHEAD],
            left: 0..0,
            buffers,
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

    /// Whether a piece at `host` continues the run that was packed last.
    fn continues(&self, host: u64) -> bool {
        let windows = match self.direction {
            Direction::Store => &self.borders.dst,
            Direction::Load => &self.borders.src,
        };
        self.blocks.last().is_some_and(|last| {
            let begin = match self.direction {
                Direction::Store => last.dst,
                Direction::Load => last.src,
            };
            last.count == 1 && host == begin + last.len && windows.same(begin, host)
        })
    }
}

impl StageSource for Packer<'_> {
    fn has_next(&self) -> bool {
        !self.left.is_empty()
    }

    fn next(&mut self, slot: &mut [CopyDescriptor]) -> Stage<'_> {
        let buffer = self.buffers.places[self.turn];
        self.turn ^= 1;
        self.blocks.clear();
        let mut used = if self.buffers.whole { self.used } else { 0 };
        let mut count = 0;
        while count < slot.len() && self.has_next() {
            let at_piece = self.left.start;
            let piece = self.ahead[at_piece];
            let (host, device) = (self.direction.host(&piece), self.direction.device(&piece));
            // A run of host memory has no gaps in the buffer; between runs there are, so that the
            // kernel finds both ends of a piece equally aligned.
            let continues = self.continues(host);
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
        self.dma.clear();
        self.dma.extend(self.blocks.iter().map(Rows::compact));
        Stage { pieces: count, dma: &self.dma, dma_first: self.direction == Direction::Load }
    }
}
