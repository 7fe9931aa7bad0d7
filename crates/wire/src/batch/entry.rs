//! Entries of requests: ranges, and the forms that stand for many.

/// How the bytes of a request are described.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// [`Range`] by range.
    Ranges,
    /// [`Strided`] runs.
    Strided,
    /// [`Paged`] lists.
    Paged,
}

impl Form {
    pub(super) fn number(self) -> u8 {
        match self {
            Self::Ranges => 0,
            Self::Strided => 1,
            Self::Paged => 2,
        }
    }

    /// Bytes of an entry, without page numbers.
    pub(super) fn entry_length(self) -> usize {
        match self {
            Self::Ranges => RANGE_LENGTH,
            Self::Strided => 40,
            Self::Paged => 56,
        }
    }
}

/// Bytes of one segment that lie side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Position of the segment in the request's list.
    pub segment: u32,
    /// First byte, from the beginning of the segment.
    pub offset: u64,
    /// Bytes; not zero. On the wire one range has less than 4 GiB, so a longer one is several.
    pub length: u64,
}

/// Bytes of a range on the wire.
pub(super) const RANGE_LENGTH: usize = 16;

impl Range {
    /// Its bytes; the length is less than 4 GiB.
    #[inline]
    pub(super) fn encode(&self) -> [u8; RANGE_LENGTH] {
        let mut bytes = [0; RANGE_LENGTH];
        bytes[..8].copy_from_slice(&self.offset.to_le_bytes());
        bytes[8..12].copy_from_slice(&(self.length as u32).to_le_bytes());
        bytes[12..].copy_from_slice(&self.segment.to_le_bytes());
        bytes
    }

    #[inline]
    pub(super) fn decode(bytes: &[u8; RANGE_LENGTH]) -> Self {
        let offset = u64::from_le_bytes(core::array::from_fn(|byte| bytes[byte]));
        let number = |at| u32::from_le_bytes(core::array::from_fn(|byte| bytes[at + byte]));
        Self { segment: number(12), offset, length: number(8).into() }
    }
}

/// `count` pieces of `length` bytes, each `stride` bytes after the one before. None of them is zero,
/// except the stride of a single piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strided {
    /// Position of the segment in the request's list.
    pub segment: u32,
    /// First byte of the first piece, from the beginning of the segment.
    pub offset: u64,
    /// Bytes of a piece.
    pub length: u64,
    /// Pieces.
    pub count: u64,
    /// Bytes from the beginning of a piece to the beginning of the next.
    pub stride: u64,
}

/// Pages by their numbers: of each page `layers` layers, of each layer `rows` rows. Row `r` of layer
/// `l` of the page of number `n` begins at
/// `offset + n * page_stride + l * layer_stride + r * row_stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paged {
    /// Position of the segment in the request's list.
    pub segment: u32,
    /// Where page 0 begins, or would begin, from the beginning of the segment.
    pub offset: u64,
    /// Bytes from a page to the page of the next number.
    pub page_stride: u64,
    /// Bytes from a layer of a page to the next layer.
    pub layer_stride: u64,
    /// Bytes from a row of a layer to the next row.
    pub row_stride: u64,
    /// Bytes of a row; not zero.
    pub row_bytes: u64,
    /// Layers; not zero.
    pub layers: u32,
    /// Rows of a layer; not zero.
    pub rows: u32,
}

/// Page numbers as they lie in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers<'a>(pub(super) &'a [[u8; 4]]);

impl<'a> Numbers<'a> {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The numbers, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = u32> + Clone + use<'a> {
        self.0.iter().map(|bytes| u32::from_le_bytes(*bytes))
    }
}

/// One entry of a request, of its form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry<'a> {
    /// Of [`Form::Ranges`].
    Range(Range),
    /// Of [`Form::Strided`].
    Strided(Strided),
    /// Of [`Form::Paged`]: the pages of these numbers, in the order of the payload.
    Paged(Paged, Numbers<'a>),
}

impl Entry<'_> {
    /// Position of its segment in the request's list.
    pub fn segment(&self) -> u32 {
        match self {
            Self::Range(range) => range.segment,
            Self::Strided(strided) => strided.segment,
            Self::Paged(paged, _) => paged.segment,
        }
    }

    /// Offsets of the first byte of its expansion and of the one behind the last: what has to lie
    /// inside the segment.
    pub fn hull(&self) -> (u64, u64) {
        self.checked_hull().unwrap_or((0, u64::MAX))
    }

    pub(super) fn checked_hull(&self) -> Option<(u64, u64)> {
        match *self {
            Self::Range(Range { offset, length, .. }) => {
                Some((offset, offset.checked_add(length)?))
            }
            Self::Strided(Strided { offset, length, count, stride, .. }) => {
                let last = count.checked_sub(1)?.checked_mul(stride)?;
                Some((offset, offset.checked_add(last)?.checked_add(length)?))
            }
            Self::Paged(paged, numbers) => {
                let Paged { offset, page_stride, layer_stride, row_stride, row_bytes, .. } = paged;
                let (layers, rows) = (u64::from(paged.layers), u64::from(paged.rows));
                let (low, high) = (numbers.iter().min()?, numbers.iter().max()?);
                let first = offset.checked_add(page_stride.checked_mul(low.into())?)?;
                let last = offset
                    .checked_add(page_stride.checked_mul(high.into())?)?
                    .checked_add(layer_stride.checked_mul(layers.checked_sub(1)?)?)?
                    .checked_add(row_stride.checked_mul(rows.checked_sub(1)?)?)?;
                Some((first, last.checked_add(row_bytes)?))
            }
        }
    }

    /// Bytes of its expansion; none if they are more than 64 bits can say.
    pub(super) fn bytes(&self) -> Option<u64> {
        match *self {
            Self::Range(range) => Some(range.length),
            Self::Strided(Strided { length, count, .. }) => length.checked_mul(count),
            Self::Paged(Paged { layers, rows, row_bytes, .. }, numbers) => u64::from(layers)
                .checked_mul(rows.into())?
                .checked_mul(numbers.len() as u64)?
                .checked_mul(row_bytes),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes() == Some(0)
    }
}

/// Ranges of one entry.
pub(super) struct Pieces<'a> {
    segment: u32,
    offset: u64,
    length: u64,
    pages: Option<(Numbers<'a>, u64)>,
    /// Strides of layers and rows, and how many there are.
    layers: (u64, u64),
    rows: (u64, u64),
    page: usize,
    layer: u64,
    row: u64,
}

impl<'a> Pieces<'a> {
    pub(super) fn new(entry: Entry<'a>) -> Self {
        let one = |segment, offset, length| Self {
            segment,
            offset,
            length,
            pages: None,
            layers: (0, 1),
            rows: (0, 1),
            page: 0,
            layer: 0,
            row: 0,
        };
        match entry {
            Entry::Range(Range { segment, offset, length }) => one(segment, offset, length),
            Entry::Strided(Strided { segment, offset, length, count, stride }) => {
                Self { rows: (stride, count), ..one(segment, offset, length) }
            }
            Entry::Paged(paged, numbers) => Self {
                pages: Some((numbers, paged.page_stride)),
                layers: (paged.layer_stride, paged.layers.into()),
                rows: (paged.row_stride, paged.rows.into()),
                ..one(paged.segment, paged.offset, paged.row_bytes)
            },
        }
    }
}

impl Iterator for Pieces<'_> {
    type Item = Range;

    fn next(&mut self) -> Option<Range> {
        let page = match &self.pages {
            None => (self.page == 0).then_some(0),
            Some((numbers, stride)) => numbers
                .0
                .get(self.page)
                .map(|number| u64::from(u32::from_le_bytes(*number)) * stride),
        }?;
        let offset = self.offset + page + self.layer * self.layers.0 + self.row * self.rows.0;
        self.row += 1;
        if self.row == self.rows.1 {
            (self.row, self.layer) = (0, self.layer + 1);
        }
        if self.layer == self.layers.1 {
            (self.layer, self.page) = (0, self.page + 1);
        }
        Some(Range { segment: self.segment, offset, length: self.length })
    }
}
