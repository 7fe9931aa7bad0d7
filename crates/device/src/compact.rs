//! Compact copies: many copies of one length in one descriptor, which the kernel expands.

use crate::queue::CopyDescriptor;

/// One end of a compact copy: where it reads, or where it writes. Strides are bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompactEnd<'a> {
    /// First byte of row 0 of layer 0 of the page with number 0.
    pub addr: u64,
    /// From a row to the next.
    pub row_stride: u64,
    /// From a layer to the next.
    pub layer_stride: u64,
    /// From a page number to the next.
    pub page_stride: u64,
    /// The numbers of the pages; empty if page `p` has number `p`.
    pub pages: &'a [u32],
}

/// `pages` x `layers` x `rows` copies of `len` bytes. Copy (p, l, r) lies at
/// `addr + number(p) * page_stride + l * layer_stride + r * row_stride` of either end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompactCopy<'a> {
    /// What is read.
    pub src: CompactEnd<'a>,
    /// What is written.
    pub dst: CompactEnd<'a>,
    /// Bytes of one copy.
    pub len: u64,
    /// Copies of one layer of one page.
    pub rows: u32,
    /// Layers of one page.
    pub layers: u32,
    /// Pages; a list of numbers, where there is one, has as many.
    pub pages: u32,
}

/// A block of rows that lie a pitch apart at either end, in bytes: what DMA engines copy in one go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// First byte to read.
    pub src: u64,
    /// First byte to write.
    pub dst: u64,
    /// Bytes of a row.
    pub len: u64,
    /// From a row to the next where it is read.
    pub src_pitch: u64,
    /// From a row to the next where it is written.
    pub dst_pitch: u64,
    /// Rows.
    pub count: u64,
}

/// `kernels/copy.cu`'s `CompactDescriptor`, field for field; what each means is told there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct CompactDescriptor {
    pub(crate) src: u64,
    pub(crate) dst: u64,
    pub(crate) len: u64,
    pub(crate) src_row: u64,
    pub(crate) dst_row: u64,
    pub(crate) src_layer: u64,
    pub(crate) dst_layer: u64,
    pub(crate) src_page: u64,
    pub(crate) dst_page: u64,
    pub(crate) src_pages: u64,
    pub(crate) dst_pages: u64,
    pub(crate) rows: u32,
    pub(crate) inner: u32,
    pub(crate) pages_inner: u32,
    pub(crate) tile: u32,
    pub(crate) row_units: u32,
    pub(crate) layer_units: u32,
    pub(crate) end: u32,
    pub(crate) unused: u32,
}

/// In the address of a page list, which is a multiple of 4: its numbers have 16 bits, not 32.
pub(crate) const NARROW: u64 = 1;

const _: () =
    assert!(size_of::<CompactDescriptor>() == 120, "kernels/copy.cu reads 120-byte descriptors");

/// Bytes that one load or store of the kernel moves.
const WORD: u64 = 16;

/// Units of one launch; with all its warps on top they are still a u32 (`copy_compact` in copy.cu).
pub(crate) const MOST_UNITS: u64 = 1 << 31;

/// A warp of a plane moves at least so many words, its loads in flight together: 8 by each of 32
/// lanes.
const LEAST_TILE_WORDS: u64 = 256;

/// How a compact copy is divided among warps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Division {
    tile: u32,
    row_units: u32,
    layer_units: u32,
    /// Units of the whole copy.
    pub(crate) units: u64,
}

impl<'a> CompactCopy<'a> {
    /// How many copies it stands for.
    pub fn count(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.layers) * u64::from(self.pages)
    }

    /// Whether it moves nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.count() == 0 || self.len == 0
    }

    /// The copies, one by one, rows that touch at both ends in one.
    pub fn pieces(&self) -> impl Iterator<Item = CopyDescriptor> + use<'a> {
        self.blocks().flat_map(Rows::descriptors)
    }

    /// Whether the pages of one layer lie closer together than the layers of one page. What runs at
    /// the same time then is of few layers, so that it lies in few of the GPU's memory pages: 9 GB
    /// of it are more than its address translation keeps at hand.
    fn pages_inner(&self) -> bool {
        let layers = self.src.layer_stride.saturating_add(self.dst.layer_stride);
        let pages = self.src.page_stride.saturating_add(self.dst.page_stride);
        self.layers > 1 && self.pages > 1 && layers > pages
    }

    /// The same copies with rows as long as they can be.
    pub(crate) fn normal(mut self) -> Self {
        // Twice, because a page of one row per layer has its layers as rows.
        for _ in 0..2 {
            if self.rows > 1
                && self.src.row_stride == self.len
                && self.dst.row_stride == self.len
                && self.len.checked_mul(u64::from(self.rows)).is_some()
            {
                self.len *= u64::from(self.rows);
                self.rows = 1;
            }
            // Unless such a row keeps a warp busy and its layers are better apart.
            let alone = self.len >= LEAST_TILE_WORDS * WORD && self.pages_inner();
            if self.rows == 1 && !alone {
                self.rows = self.layers;
                self.layers = 1;
                for end in [&mut self.src, &mut self.dst] {
                    end.row_stride = end.layer_stride;
                }
            }
        }
        self
    }

    /// Whether the kernel may count the rows of a layer as one run of aligned words.
    fn is_plane(&self) -> bool {
        let of = |end: &CompactEnd<'_>| {
            let row = if self.rows > 1 { end.row_stride } else { 0 };
            let layer = if self.layers > 1 { end.layer_stride } else { 0 };
            let page = if self.pages > 1 || !end.pages.is_empty() { end.page_stride } else { 0 };
            end.addr | row | layer | page
        };
        let words = (self.len / WORD).checked_mul(u64::from(self.rows));
        (of(&self.src) | of(&self.dst) | self.len).is_multiple_of(WORD)
            && words.is_some_and(|words| words < MOST_UNITS)
    }

    /// How a launch of about `warps` warps shares it, at most `tile_bytes` a unit.
    pub(crate) fn divide(&self, warps: u64, tile_bytes: u64) -> Division {
        let tile_bytes = tile_bytes.clamp(WORD, 1 << 30);
        let layers = u64::from(self.layers) * u64::from(self.pages);
        if self.is_plane() {
            let words = self.len / WORD * u64::from(self.rows);
            // Smaller tiles where there would be too few for all warps, and no smaller than loads
            // that are in flight together.
            let share = (words * layers).div_ceil(warps.max(1)).next_multiple_of(LEAST_TILE_WORDS);
            let most = (tile_bytes / WORD).next_multiple_of(LEAST_TILE_WORDS);
            let tile = share.min(most);
            let layer_units = words.div_ceil(tile);
            return Division {
                tile: tile as u32,
                row_units: 0,
                layer_units: layer_units as u32,
                units: layer_units.saturating_mul(layers),
            };
        }
        let row_units = self.len.div_ceil(tile_bytes);
        let layer_units = row_units.saturating_mul(u64::from(self.rows));
        let units = layer_units.saturating_mul(layers);
        // Cut off where `units` says that the copy has to be split first.
        Division {
            tile: tile_bytes as u32,
            row_units: row_units.min(MOST_UNITS) as u32,
            layer_units: layer_units.min(MOST_UNITS) as u32,
            units,
        }
    }

    /// As the kernel reads it, with its page lists at these device addresses (0 for none, [`NARROW`]
    /// added for numbers of 16 bits), after `before` units of the same launch.
    pub(crate) fn descriptor(
        &self,
        division: &Division,
        [src_pages, dst_pages]: [u64; 2],
        before: u32,
    ) -> CompactDescriptor {
        CompactDescriptor {
            src: self.src.addr,
            dst: self.dst.addr,
            len: self.len,
            src_row: self.src.row_stride,
            dst_row: self.dst.row_stride,
            src_layer: self.src.layer_stride,
            dst_layer: self.dst.layer_stride,
            src_page: self.src.page_stride,
            dst_page: self.dst.page_stride,
            src_pages,
            dst_pages,
            rows: self.rows,
            inner: if self.pages_inner() { self.pages } else { self.layers },
            pages_inner: self.pages_inner().into(),
            tile: division.tile,
            row_units: division.row_units,
            layer_units: division.layer_units,
            end: before + division.units as u32,
            unused: 0,
        }
    }

    /// Two halves, along the largest count; `None` if it is one copy.
    pub(crate) fn split(&self) -> Option<(Self, Self)> {
        let most = self.pages.max(self.layers).max(self.rows);
        if most < 2 {
            return None;
        }
        let half = most / 2;
        let (mut one, mut other) = (*self, *self);
        if most == self.pages {
            (one.pages, other.pages) = (half, most - half);
            for (one, other) in [(&mut one.src, &mut other.src), (&mut one.dst, &mut other.dst)] {
                if one.pages.is_empty() {
                    other.addr = other.addr.wrapping_add(u64::from(half) * other.page_stride);
                } else {
                    (one.pages, other.pages) = one.pages.split_at(half as usize);
                }
            }
        } else if most == self.layers {
            (one.layers, other.layers) = (half, most - half);
            for end in [&mut other.src, &mut other.dst] {
                end.addr = end.addr.wrapping_add(u64::from(half) * end.layer_stride);
            }
        } else {
            (one.rows, other.rows) = (half, most - half);
            for end in [&mut other.src, &mut other.dst] {
                end.addr = end.addr.wrapping_add(u64::from(half) * end.row_stride);
            }
        }
        Some((one, other))
    }

    /// The blocks of rows that it is made of, for DMA engines that copy rows: one for each layer of
    /// each page, or for each row of each page where that is fewer. Those that follow each other may be
    /// one ([`Rows::join`]). None of them is empty.
    pub fn blocks(&self) -> impl Iterator<Item = Rows> + use<'a> {
        let mut copy = if self.is_empty() { Self::default() } else { self.normal() };
        if copy.layers > copy.rows {
            (copy.rows, copy.layers) = (copy.layers, copy.rows);
            for end in [&mut copy.src, &mut copy.dst] {
                (end.row_stride, end.layer_stride) = (end.layer_stride, end.row_stride);
            }
        }
        (0..copy.pages).flat_map(move |page| {
            (0..copy.layers).map(move |layer| Rows {
                src: copy.src.at(page, layer),
                dst: copy.dst.at(page, layer),
                len: copy.len,
                src_pitch: copy.src.row_stride,
                dst_pitch: copy.dst.row_stride,
                count: u64::from(copy.rows),
            })
        })
    }
}

impl CompactEnd<'_> {
    fn at(&self, page: u32, layer: u32) -> u64 {
        let number = self.pages.get(page as usize).copied().unwrap_or(page);
        self.addr
            .wrapping_add(u64::from(number).wrapping_mul(self.page_stride))
            .wrapping_add(u64::from(layer).wrapping_mul(self.layer_stride))
    }
}

impl Rows {
    /// Takes in the block that follows, if the two are one: side by side at both ends, so that the
    /// rows get wider (a row costs a DMA engine about 50 ns beside its bytes, LAB.md), or one below
    /// the other.
    pub fn join(&mut self, next: &Self) -> bool {
        let pitches = (self.src_pitch, self.dst_pitch);
        let same_pitches = pitches == (next.src_pitch, next.dst_pitch);
        let beside = next.src == self.src.wrapping_add(self.len)
            && next.dst == self.dst.wrapping_add(self.len);
        let both = self.len.checked_add(next.len);
        if beside && self.count == next.count {
            let narrow = |both: &u64| *both <= pitches.0.min(pitches.1) && same_pitches;
            if let Some(both) = both.filter(|both| self.count == 1 || narrow(both)) {
                self.len = both;
                return true;
            }
        }
        let down = |at: u64, pitch: u64| at.wrapping_add(pitch.wrapping_mul(self.count));
        let below = next.src == down(self.src, self.src_pitch)
            && next.dst == down(self.dst, self.dst_pitch);
        let rows = self.count.checked_add(next.count);
        match rows {
            Some(rows) if below && same_pitches && self.len == next.len && self.count > 1 => {
                self.count = rows;
                true
            }
            _ => false,
        }
    }

    /// As a compact copy, of at most 2^32 - 1 rows.
    pub fn compact(&self) -> CompactCopy<'static> {
        let end = |addr, row_stride| CompactEnd { addr, row_stride, ..CompactEnd::default() };
        CompactCopy {
            src: end(self.src, self.src_pitch),
            dst: end(self.dst, self.dst_pitch),
            len: self.len,
            rows: self.count.min(u32::MAX.into()) as u32,
            layers: 1,
            pages: 1,
        }
    }

    /// One descriptor a row.
    pub(crate) fn descriptors(self) -> impl Iterator<Item = CopyDescriptor> {
        (0..self.count).map(move |row| CopyDescriptor {
            src: self.src.wrapping_add(row.wrapping_mul(self.src_pitch)),
            dst: self.dst.wrapping_add(row.wrapping_mul(self.dst_pitch)),
            len: self.len,
        })
    }
}

impl CompactDescriptor {
    /// Its bytes, as words.
    #[cfg(feature = "testing")]
    pub(crate) fn words(&self) -> [u64; 15] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let &Self { src, dst, len, rows, inner, pages_inner, .. } = self;
        let &Self { tile, row_units, layer_units, end, .. } = self;
        let &Self { src_row, dst_row, src_layer, dst_layer, src_page, dst_page, .. } = self;
        let lists = [self.src_pages, self.dst_pages];
        let counts =
            [pair(rows, inner), pair(pages_inner, tile), pair(row_units, layer_units), end.into()];
        let mut words = [0; 15];
        words[..9].copy_from_slice(&[
            src, dst, len, src_row, dst_row, src_layer, dst_layer, src_page, dst_page,
        ]);
        words[9..11].copy_from_slice(&lists);
        words[11..].copy_from_slice(&counts);
        words
    }

    /// The copies of one of its units, as the kernel makes them: for devices that are no GPU.
    ///
    /// # Safety
    /// Its page lists, where it has any, are readable at their addresses.
    pub(crate) unsafe fn unit(&self, unit: u32) -> impl Iterator<Item = CopyDescriptor> + use<> {
        let compact = *self;
        let of_all_layers = unit / compact.layer_units;
        let (outer, inner) = (of_all_layers / compact.inner, of_all_layers % compact.inner);
        let (page, layer) = if compact.pages_inner > 0 { (inner, outer) } else { (outer, inner) };
        let number = |list: u64| match list {
            0 => page,
            // SAFETY: the caller's contract; the kernel reads the same entry.
            list if list & NARROW > 0 => unsafe {
                ((list - NARROW) as *const u16).add(page as usize).read().into()
            },
            // SAFETY: likewise.
            list => unsafe { (list as *const u32).add(page as usize).read() },
        };
        let base = |addr: u64, pages, page_stride: u64, layer_stride: u64| {
            addr.wrapping_add(u64::from(number(pages)).wrapping_mul(page_stride))
                .wrapping_add(u64::from(layer).wrapping_mul(layer_stride))
        };
        let src = base(compact.src, compact.src_pages, compact.src_page, compact.src_layer);
        let dst = base(compact.dst, compact.dst_pages, compact.dst_page, compact.dst_layer);
        let unit = u64::from(unit % compact.layer_units);
        let tile = u64::from(compact.tile);
        // Bytes of the layer's rows, counted row after row, from the first to the last of the unit.
        let (mut at, end) = if compact.row_units == 0 {
            let all = compact.len * u64::from(compact.rows);
            (unit * tile * WORD, all.min((unit + 1) * tile * WORD))
        } else {
            let row_units = u64::from(compact.row_units);
            let (row, tile_of_row) = (unit / row_units, unit % row_units);
            let first = row * compact.len + tile_of_row * tile;
            (first, first + tile.min(compact.len - tile_of_row * tile))
        };
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let (row, offset) = (at / compact.len, at % compact.len);
            let len = (compact.len - offset).min(end - at);
            at += len;
            Some(CopyDescriptor {
                src: src.wrapping_add(row.wrapping_mul(compact.src_row)).wrapping_add(offset),
                dst: dst.wrapping_add(row.wrapping_mul(compact.dst_row)).wrapping_add(offset),
                len,
            })
        })
    }
}
