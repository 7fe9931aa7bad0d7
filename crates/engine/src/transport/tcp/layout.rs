//! Where the payload of a request lies in this process's memory.

use kvferry_device::HostBytes;

use super::super::staging::Piece;
use crate::registry::Pin;

/// The bytes of one end of a request, in the order of its payload.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) runs: Vec<Run>,
    pub(super) home: Home,
    pub(super) length: u64,
    /// What keeps the memory registered, where nothing else does.
    pub(super) pins: Vec<Pin>,
}

impl Layout {
    /// Whether somebody unregisters some of the memory, and waits for whoever uses it.
    pub(super) fn is_withdrawn(&self) -> bool {
        self.pins.iter().any(|pin| pin.region().is_withdrawn())
    }
}

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    /// Sockets read and write it in place.
    Host,
    /// A device, by its position in the engine: it goes through slices.
    Device(usize),
}

/// Some of the bytes. None is empty.
#[derive(Debug)]
pub(super) enum Run {
    Piece { addr: u64, len: u64 },
    Grid(Box<Grid>),
}

/// Pages by their numbers, of each page layers, of each layer rows.
#[derive(Debug)]
pub(super) struct Grid {
    /// Where page 0 begins.
    pub(super) addr: u64,
    /// Bytes of a row.
    pub(super) len: u64,
    /// Stride and count.
    pub(super) rows: (u64, u64),
    /// Stride and count.
    pub(super) layers: (u64, u64),
    pub(super) page_stride: u64,
    pub(super) pages: Vec<u32>,
}

/// A place in a layout.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cursor {
    run: usize,
    page: usize,
    layer: u64,
    row: u64,
    /// Bytes of the piece that are behind.
    within: u64,
}

impl Cursor {
    /// The next bytes that lie side by side, at most `most`.
    pub(super) fn next(&mut self, layout: &Layout, most: u64) -> Option<Piece> {
        let run = layout.runs.get(self.run)?;
        let (addr, len) = match run {
            &Run::Piece { addr, len } => (addr, len),
            Run::Grid(grid) => {
                let page = u64::from(*grid.pages.get(self.page)?);
                let addr = grid.addr.wrapping_add(page.wrapping_mul(grid.page_stride));
                let addr = addr.wrapping_add(self.layer.wrapping_mul(grid.layers.0));
                (addr.wrapping_add(self.row.wrapping_mul(grid.rows.0)), grid.len)
            }
        };
        let count = (len - self.within).min(most);
        let piece = (addr + self.within, count);
        self.within += count;
        if self.within == len {
            self.within = 0;
            self.go_on(run);
        }
        (count > 0).then_some(piece)
    }

    fn go_on(&mut self, run: &Run) {
        if let Run::Grid(grid) = run {
            self.row += 1;
            if self.row < grid.rows.1 {
                return;
            }
            (self.row, self.layer) = (0, self.layer + 1);
            if self.layer < grid.layers.1 {
                return;
            }
            (self.layer, self.page) = (0, self.page + 1);
            if self.page < grid.pages.len() {
                return;
            }
        }
        *self = Self { run: self.run + 1, ..Self::default() };
    }

    /// Goes on by so many bytes.
    pub(super) fn advance(&mut self, layout: &Layout, mut bytes: u64) {
        while bytes > 0 {
            let Some((_, count)) = self.next(layout, bytes) else { return };
            bytes -= count;
        }
    }

    /// The pieces of the next `bytes` bytes.
    pub(super) fn pieces<L: AsRef<Layout>>(self, layout: L, bytes: u64) -> Pieces<L> {
        Pieces { layout, cursor: self, left: bytes }
    }

    /// The next `bytes` bytes of host memory, at most `most` pieces of them.
    pub(super) fn host_bytes(self, layout: &Layout, bytes: u64, most: usize) -> Vec<HostBytes> {
        debug_assert_eq!(layout.home, Home::Host);
        let pieces = self.pieces(layout, bytes).take(most);
        // SAFETY: a layout is made of checked pieces of registered host memory, and whoever holds it
        // keeps that registered.
        pieces.map(|(addr, len)| unsafe { HostBytes::new(addr, len as usize) }).collect()
    }
}

impl AsRef<Layout> for Layout {
    fn as_ref(&self) -> &Layout {
        self
    }
}

pub(super) struct Pieces<L> {
    layout: L,
    cursor: Cursor,
    left: u64,
}

impl<L: AsRef<Layout>> Iterator for Pieces<L> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        if self.left == 0 {
            return None;
        }
        let piece = self.cursor.next(self.layout.as_ref(), self.left)?;
        self.left -= piece.1;
        Some(piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_gives_every_byte_once_in_order_however_it_is_cut() {
        let grid = Grid {
            addr: 10_000,
            len: 7,
            rows: (20, 3),
            layers: (1000, 2),
            page_stride: 100,
            pages: vec![5, 0, 9],
        };
        let runs = vec![
            Run::Piece { addr: 1, len: 13 },
            Run::Grid(Box::new(grid)),
            Run::Piece { addr: 70_000, len: 1 },
        ];
        let length = 13 + 7 * 3 * 2 * 3 + 1;
        let layout = Layout { runs, home: Home::Device(0), length, pins: Vec::new() };
        let bytes = |most: u64| {
            let (mut cursor, mut bytes) = (Cursor::default(), Vec::new());
            while let Some((addr, len)) = cursor.next(&layout, most) {
                bytes.extend(addr..addr + len);
            }
            bytes
        };
        let whole = bytes(u64::MAX);
        assert_eq!(whole.len() as u64, length);
        assert_eq!(whole[13], 10_500);
        assert_eq!(whole[13 + 7], 10_520);
        assert_eq!(whole[13 + 21], 11_500);
        assert_eq!(whole[13 + 42], 10_000);
        for most in [1, 2, 5, 7, 8, 1000] {
            assert_eq!(bytes(most), whole, "{most}");
        }
        for skipped in [0, 1, 13, 14, 20, 56, 139] {
            let mut cursor = Cursor::default();
            cursor.advance(&layout, skipped);
            assert_eq!(
                cursor.next(&layout, 1).map(|piece| piece.0),
                whole.get(skipped as usize).copied()
            );
        }
    }
}
