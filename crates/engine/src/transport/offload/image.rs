//! A batch whose pieces are all of one length and fill a part of host memory, at a constant pitch and
//! in any order: what a page pool gives out. A buffer in device memory then holds an image of that
//! part, and neither the list's order nor a sort matters: a launch and a DMA for all of it, or for each
//! of two parts.

use std::ops::Range;

use kvferry_device::{CompactCopy, CopyDescriptor, Rows, Stage, StageSource};

use super::choice::Calls;
use super::fragments::Direction;
use super::stages::Division;

/// Pieces of one length, side by side or a pitch apart in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Image {
    low: u64,
    len: u64,
    pitch: u64,
    count: u64,
}

impl Image {
    /// Whether the pieces are such. `seen` is memory for a bit each.
    pub(super) fn of(
        pieces: &[CopyDescriptor],
        direction: Direction,
        seen: &mut Vec<u64>,
    ) -> Option<Self> {
        let &CopyDescriptor { len, .. } = pieces.first()?;
        let (mut low, mut high, mut other) = (u64::MAX, 0, 0);
        for piece in pieces {
            let host = direction.host(piece);
            low = low.min(host);
            high = high.max(host);
            other |= piece.len ^ len;
        }
        let count = pieces.len() as u64;
        let pitch = if count == 1 { len } else { (high - low) / (count - 1) };
        // Gaps cost the link nothing, and a row of a 2-D DMA hardly anything from a KiB on.
        let pitches = len.max(2)..=len.saturating_mul(2);
        if other != 0 || !pitches.contains(&pitch) {
            return None;
        }
        let image = Self { low, len, pitch, count };
        seen.clear();
        seen.resize(pieces.len().div_ceil(64), 0);
        let at = image.places();
        let mut all = true;
        for piece in pieces {
            let offset = direction.host(piece) - low;
            let place = at(offset);
            all &= place < count && place * pitch == offset;
            if let Some(bits) = seen.get_mut(place as usize / 64) {
                *bits |= 1 << (place % 64);
            }
        }
        // Each place has a piece: a DMA that stores the image writes nobody else's bytes.
        let filled: u64 = seen.iter().map(|bits| u64::from(bits.count_ones())).sum();
        (all && filled == count).then_some(image)
    }

    /// The place of an offset in host memory; any place for an offset that is none's.
    fn places(&self) -> impl Fn(u64) -> u64 + use<> {
        // A little more than 2^64 / pitch: exact for every multiple, as the error of the product is
        // less than one, and many times as quick as a division. A pitch is at least 2.
        let inverse = u128::from(u64::MAX / self.pitch + 1);
        move |offset| ((u128::from(offset) * inverse) >> u64::BITS) as u64
    }

    /// The DMAs that it takes.
    pub(super) fn calls(&self) -> Calls {
        let rows = if self.pitch == self.len { 1.0 } else { self.count as f64 };
        Calls { calls: 1.0, rows }
    }

    /// Bytes of the image in the buffer, which has no gaps.
    pub(super) fn bytes(&self) -> u64 {
        self.len * self.count
    }

    /// Descriptors of its launch.
    pub(super) fn descriptors(&self, tile_bytes: u64) -> u64 {
        self.count * self.len.div_ceil(tile_bytes)
    }
}

/// The steps of an image: one, or two of which the second begins at a place.
pub(super) struct ImageStages<'a> {
    image: Image,
    pieces: &'a [CopyDescriptor],
    direction: Direction,
    buffer: u64,
    tile_bytes: u64,
    dma: [CompactCopy<'static>; 1],
    /// Places that are in no step yet.
    left: Range<u64>,
    second: u64,
}

impl<'a> ImageStages<'a> {
    /// `buffer` has room for the image, and the queue's slots for its descriptors.
    pub(super) fn new(
        image: Image,
        pieces: &'a [CopyDescriptor],
        direction: Direction,
        buffer: u64,
        division: Division,
        tile_bytes: u64,
    ) -> Self {
        let count = image.count;
        // The one beside which the link idles is short.
        let short = division.short() / image.len;
        let second = match direction {
            _ if short >= count => count,
            Direction::Store => short,
            Direction::Load => count - short,
        };
        let dma = [CompactCopy::default()];
        Self { image, pieces, direction, buffer, tile_bytes, dma, left: 0..count, second }
    }

    /// The places of the next step.
    fn step(&self) -> Range<u64> {
        let Range { start, end } = self.left;
        start..if start < self.second { self.second } else { end }
    }

    fn place_dma(&mut self) {
        let Image { low, len, pitch, .. } = self.image;
        let Range { start, end } = self.step();
        let (host, buffer) = (low + start * pitch, self.buffer + start * len);
        let (len, count) = if pitch == len { ((end - start) * len, 1) } else { (len, end - start) };
        let (src, dst, src_pitch, dst_pitch) = match self.direction {
            Direction::Store => (buffer, host, len, pitch),
            Direction::Load => (host, buffer, pitch, len),
        };
        self.dma = [Rows { src, dst, len, src_pitch, dst_pitch, count }.compact()];
    }
}

impl StageSource for ImageStages<'_> {
    fn has_next(&self) -> bool {
        !self.left.is_empty()
    }

    fn ahead(&mut self) -> &[CompactCopy<'_>] {
        match self.direction {
            Direction::Store => &[],
            Direction::Load => {
                self.place_dma();
                &self.dma
            }
        }
    }

    fn next(&mut self, slot: &mut [CopyDescriptor]) -> Stage<'_> {
        let Image { low, len, .. } = self.image;
        let (at, step) = (self.image.places(), self.step());
        let mut count = 0;
        for piece in self.pieces {
            let place = at(self.direction.host(piece) - low);
            if !step.contains(&place) {
                continue;
            }
            let (device, staged) = (self.direction.device(piece), self.buffer + place * len);
            let (src, dst) = match self.direction {
                Direction::Store => (device, staged),
                Direction::Load => (staged, device),
            };
            let mut done = 0;
            while done < len {
                let tile = (len - done).min(self.tile_bytes);
                slot[count] = CopyDescriptor { src: src + done, dst: dst + done, len: tile };
                count += 1;
                done += tile;
            }
        }
        if self.direction == Direction::Store {
            self.place_dma();
        }
        self.left.start = step.end;
        let dma = match self.direction {
            Direction::Store => &self.dma[..],
            Direction::Load => &[],
        };
        Stage { pieces: count, dma, dma_first: self.direction == Direction::Load }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(list: &[(u64, u64)]) -> Vec<CopyDescriptor> {
        list.iter().map(|&(dst, len)| CopyDescriptor { src: 1 << 40, dst, len }).collect()
    }

    fn image(list: &[(u64, u64)]) -> Option<Image> {
        Image::of(&store(list), Direction::Store, &mut Vec::new())
    }

    #[test]
    fn equal_pieces_that_fill_their_places_in_any_order_are_an_image_and_others_are_none() {
        let found = |low, len, pitch, count| Some(Image { low, len, pitch, count });
        assert_eq!(image(&[(500, 7)]), found(500, 7, 7, 1));
        assert_eq!(image(&[(120, 10), (100, 10), (110, 10)]), found(100, 10, 10, 3));
        assert_eq!(image(&[(126, 10), (100, 10), (113, 10)]), found(100, 10, 13, 3));
        assert_eq!(image(&[]), None);
        assert_eq!(image(&[(120, 10), (100, 10), (110, 9)]), None, "another length");
        assert_eq!(image(&[(130, 10), (100, 10), (110, 10)]), None, "a place is free");
        assert_eq!(image(&[(120, 10), (100, 10), (100, 10)]), None, "a place is taken twice");
        assert_eq!(image(&[(127, 10), (100, 10), (113, 10)]), None, "not at a pitch");
        assert_eq!(image(&[(100, 10), (105, 10)]), None, "one on the other");
        assert_eq!(image(&[(100, 10), (1000, 10)]), None, "far apart");
        assert_eq!(image(&[(100, 1), (101, 1)]), None, "single bytes");
    }

    #[test]
    fn places_are_exact_up_to_the_largest_memory() {
        for pitch in [2, 97, 4096, 4352, 1_002_240, (1 << 30) + 1] {
            let at = Image { low: 0, len: 1, pitch, count: 0 }.places();
            for place in [0, 1, 2, 3, 1000, 65_535, (1 << 33) - 1] {
                assert_eq!(at(place * pitch), place, "{pitch}");
            }
        }
    }
}
