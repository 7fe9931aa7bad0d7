//! A batch whose pieces are all of one length and fill a part of host memory, at a constant pitch and
//! in any order: what a page pool gives out. Where each belongs in the order of host memory follows
//! from its address alone, so one pass sorts them, several times as quick as comparing or counting.

use kvferry_device::CopyDescriptor;

use super::choice::Calls;
use super::fragments::Direction;

/// Pieces of one length, side by side or a pitch apart in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Image {
    low: u64,
    len: u64,
    pitch: u64,
    count: u64,
}

impl Image {
    /// Sorts the pieces by their ends in host memory, if they are such. `sorted` is memory for as
    /// many.
    pub(super) fn sort(
        pieces: &mut Vec<CopyDescriptor>,
        direction: Direction,
        sorted: &mut Vec<CopyDescriptor>,
    ) -> Option<Self> {
        let image = Self::around(pieces, direction)?;
        let at = image.places();
        sorted.clear();
        sorted.resize(pieces.len(), CopyDescriptor::default());
        for piece in &*pieces {
            let offset = direction.host(piece) - image.low;
            let place = at(offset);
            let free = sorted.get_mut(place as usize).filter(|free| free.len == 0)?;
            if place * image.pitch != offset {
                return None;
            }
            *free = *piece;
        }
        // As many places as pieces, and none was taken twice.
        std::mem::swap(pieces, sorted);
        Some(image)
    }

    /// The only one that the pieces can be, by where the first and the last of them are.
    fn around(pieces: &[CopyDescriptor], direction: Direction) -> Option<Self> {
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
        (other == 0 && pitches.contains(&pitch)).then_some(Self { low, len, pitch, count })
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
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(list: &[(u64, u64)]) -> Vec<CopyDescriptor> {
        (1 << 40..).zip(list).map(|(src, &(dst, len))| CopyDescriptor { src, dst, len }).collect()
    }

    fn image(list: &[(u64, u64)]) -> Option<Image> {
        let (mut pieces, expected) = (store(list), store(list));
        let mut memory = expected.clone();
        let image = Image::sort(&mut pieces, Direction::Store, &mut memory);
        let mut by_host = expected.clone();
        if image.is_some() {
            by_host.sort_by_key(|piece| piece.dst);
        }
        assert_eq!(pieces, by_host, "sorted, or left as they were");
        image
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
