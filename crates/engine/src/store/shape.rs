//! How pages lie in the device's memory and in the store, and the forms that copy them.

use super::StoreError;
use crate::mostly_one::MostlyOne;
use crate::plan::{Paged, Pages};

/// Where the device's pages are: of each layer `pages` pages of `page_bytes`.
///
/// Layer `l` of page `p` begins at `addr + l * layer_stride + p * page_stride`. That memory is
/// registered with the engine, as one region or as regions that touch in one allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageShape {
    /// First byte of layer 0 of page 0.
    pub addr: u64,
    /// Pages of the device.
    pub pages: u32,
    /// Bytes of a page in one layer.
    pub page_bytes: u64,
    /// Layers.
    pub layers: u32,
    /// Bytes from a page to the same page of the next layer.
    pub layer_stride: u64,
    /// Bytes from a page to the next page of the same layer.
    pub page_stride: u64,
}

/// Rows in the store begin on borders of so many bytes: reads from elsewhere were 4 to 18 times slower
/// on one family of GPUs (FAILURES.md B52).
const LINE: u64 = 64;

impl PageShape {
    /// Bytes of a page in all layers.
    pub(super) fn bytes(&self) -> u64 {
        self.page_bytes * u64::from(self.layers)
    }

    /// Checks it, and makes layers that lie side by side one.
    pub(super) fn normal(mut self) -> Result<Self, StoreError> {
        let bad = |reason: String| StoreError::BadShape { reason };
        let Self { addr, pages, page_bytes, layers, layer_stride, page_stride } = self;
        if pages == 0 || layers == 0 || page_bytes == 0 {
            return Err(bad(format!(
                "{pages} pages of {layers} layers of {page_bytes} bytes are nothing"
            )));
        }
        let hull = || {
            let of_layers = layer_stride.checked_mul(u64::from(layers - 1))?;
            let of_pages = page_stride.checked_mul(u64::from(pages - 1))?;
            let len = of_layers.checked_add(of_pages)?.checked_add(page_bytes)?;
            addr.checked_add(len)?;
            // What the store makes of a page, with room for its rows' borders.
            page_bytes.checked_add(LINE)?.checked_mul(u64::from(layers))
        };
        if hull().is_none() {
            return Err(bad("its strides pass the end of the address space".into()));
        }
        // Of the two strides the shorter one must step over a page, and the longer one over all
        // that the shorter one steps through: then no two pages share a byte.
        let (short, count, long, others) = match layer_stride <= page_stride {
            true => (layer_stride, layers, page_stride, pages),
            false => (page_stride, pages, layer_stride, layers),
        };
        let apart = (count == 1 || short >= page_bytes)
            && (others == 1 || long >= short * u64::from(count - 1) + page_bytes);
        if !apart {
            return Err(bad(format!(
                "pages of {page_bytes} bytes overlap with a layer stride of {layer_stride} and a page stride of {page_stride} bytes"
            )));
        }
        if layers > 1 && layer_stride == page_bytes {
            self.page_bytes *= u64::from(layers);
            self.layers = 1;
            self.layer_stride = self.page_bytes;
        }
        Ok(self)
    }

    /// Whether a page and the next one are side by side in every layer.
    pub(super) fn has_neighbours(&self) -> bool {
        self.page_stride == self.page_bytes
    }

    /// Bytes from a layer to the next in the store, for a group of `pages` neighbours.
    pub(super) fn pitch(&self, pages: u32) -> u64 {
        (self.page_bytes * u64::from(pages)).next_multiple_of(LINE)
    }

    /// Bytes of the store for one page. A group takes as much for each of its pages, or less.
    pub(super) fn slot_bytes(&self) -> u64 {
        self.pitch(1) * u64::from(self.layers)
    }
}

/// Neighbouring pages of the device, and where in the store they lie or will lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Move {
    pub(super) piece: u32,
    /// Pages of the group that they are of.
    pub(super) group: u32,
    /// The first one's position in the group.
    pub(super) position: u32,
    /// How many they are.
    pub(super) count: u32,
    /// The group's first slot in the piece.
    pub(super) slot: u32,
    /// The first page of the device.
    pub(super) page: u32,
}

/// The lists of page numbers of some forms.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    pages: MostlyOne<u32>,
    slots: MostlyOne<u32>,
}

impl PageShape {
    /// One form for all moves that lie alike. `pieces` are the first bytes of the store's pieces.
    pub(super) fn forms<'a>(
        &self,
        moves: &mut [Move],
        pieces: &[u64],
        numbers: &'a mut Numbers,
    ) -> MostlyOne<Paged<'a>> {
        moves.sort_unstable();
        numbers.pages.extend(moves.iter().map(|it| it.page));
        numbers.slots.extend(moves.iter().map(|it| it.slot));
        let numbers: &'a Numbers = numbers;
        let alike = |one: &Move, other: &Move| {
            (one.piece, one.group, one.position, one.count)
                == (other.piece, other.group, other.position, other.count)
        };
        let mut at = 0;
        let form = |run: &[Move]| {
            let here = at..at + run.len();
            at = here.end;
            let Move { piece, group, position, count, .. } = run[0];
            let stored = pieces[piece as usize] + u64::from(position) * self.page_bytes;
            let device = &numbers.pages[here.clone()];
            Paged::whole_pages(
                Pages::whole(self.addr, device, self.page_stride, self.layer_stride),
                Pages::whole(stored, &numbers.slots[here], self.slot_bytes(), self.pitch(group)),
                self.layers,
                u64::from(count) * self.page_bytes,
            )
        };
        moves.chunk_by(alike).map(form).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: PageShape = PageShape {
        addr: 1 << 20,
        pages: 10,
        page_bytes: 100,
        layers: 3,
        layer_stride: 1000,
        page_stride: 100,
    };

    #[test]
    fn pages_that_share_bytes_or_pass_the_end_of_memory_are_refused() {
        assert_eq!(SHAPE.normal(), Ok(SHAPE));
        let layers_inside = PageShape { layer_stride: 120, page_stride: 340, ..SHAPE };
        assert_eq!(layers_inside.normal(), Ok(layers_inside));
        for bad in [
            PageShape { pages: 0, ..SHAPE },
            PageShape { layers: 0, ..SHAPE },
            PageShape { page_bytes: 0, ..SHAPE },
            PageShape { page_stride: 99, ..SHAPE },
            PageShape { layer_stride: 999, ..SHAPE },
            PageShape { layer_stride: 120, page_stride: 339, ..SHAPE },
            PageShape { addr: u64::MAX - 2000, ..SHAPE },
            PageShape { layer_stride: u64::MAX / 2 + 1, ..SHAPE },
            PageShape { page_bytes: u64::MAX, ..SHAPE },
        ] {
            assert!(matches!(bad.normal(), Err(StoreError::BadShape { .. })), "{bad:?}");
        }
    }

    #[test]
    fn layers_side_by_side_are_one() {
        let beside = PageShape { layer_stride: 100, page_stride: 300, ..SHAPE };
        let normal = beside.normal().expect("good");
        assert_eq!((normal.page_bytes, normal.layers), (300, 1));
        assert!(normal.has_neighbours());
    }

    #[test]
    fn groups_fit_into_the_slots_of_their_pages_with_rows_on_borders_of_64_bytes() {
        for page_bytes in [1, 63, 64, 65, 656, 4096] {
            let shape = PageShape { page_bytes, ..SHAPE };
            for group in 1..=16 {
                assert_eq!(shape.pitch(group) % 64, 0);
                let whole = shape.pitch(group) * u64::from(shape.layers);
                assert!(whole <= u64::from(group) * shape.slot_bytes());
            }
        }
    }
}
