//! WRITE and READ requests: which bytes of which segments, in one of three forms.
//!
//! The ranges of a request, in their order, are one run of bytes: its payload. A form stands for many
//! ranges of one length and is expanded page by page, of a page layer by layer, of a layer row by
//! row.

use alloc::vec::Vec;

use super::codec::{Reader, Write};
use super::frame::{HEADER_LENGTH, Kind};
use super::limits::Limits;
use crate::segment::SegmentRef;

/// Bytes of a request's body before its segments.
const FIXED_LENGTH: usize = 32;

/// Bytes of a segment's name.
const SEGMENT_LENGTH: usize = 16;

/// Which way the payload goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// From the initiator to the responder.
    Write,
    /// From the responder to the initiator.
    Read,
}

impl Op {
    pub(super) fn kind(self) -> Kind {
        match self {
            Self::Write => Kind::Write,
            Self::Read => Kind::Read,
        }
    }
}

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
    fn number(self) -> u8 {
        match self {
            Self::Ranges => 0,
            Self::Strided => 1,
            Self::Paged => 2,
        }
    }

    /// Bytes of an entry, without page numbers.
    fn entry_length(self) -> usize {
        match self {
            Self::Ranges => 16,
            Self::Strided => 40,
            Self::Paged => 56,
        }
    }
}

/// Which share of a transfer a request is. The responder only repeats it in what it logs and
/// measures: each request is whole in itself and may come by any lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The initiator's number of the transfer.
    pub transfer: u64,
    /// Which part.
    pub index: u16,
    /// Of how many.
    pub count: u16,
}

impl Part {
    /// All of a transfer.
    pub fn whole(transfer: u64) -> Self {
        Self { transfer, index: 0, count: 1 }
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
pub struct Numbers<'a>(&'a [[u8; 4]]);

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

/// What is wrong with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The frame ends too early, or has bytes left.
    #[error("its frame does not have the length that its counts ask for")]
    Length,
    /// Neither ranges, nor strided, nor paged.
    #[error("form {form} is unknown")]
    UnknownForm {
        /// Its number.
        form: u8,
    },
    /// Bits that have to be zero are not.
    #[error("reserved bits are set")]
    Reserved,
    /// Part `index` of `count` is none.
    #[error("part {index} of {count}")]
    Part {
        /// Which part.
        index: u16,
        /// Of how many.
        count: u16,
    },
    /// More than the responder takes.
    #[error("{count} {what}, the limit is {limit}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many.
        count: u64,
        /// The limit.
        limit: u64,
    },
    /// An entry names a segment that the request does not list.
    #[error("entry {entry} names segment {segment} of a list of {segments}")]
    NoSegment {
        /// Position of the entry.
        entry: u64,
        /// What it names.
        segment: u32,
        /// Segments in the list.
        segments: usize,
    },
    /// An entry of no bytes, whose expansion could be endless.
    #[error("entry {entry} has no bytes")]
    Empty {
        /// Position of the entry.
        entry: u64,
    },
    /// An end that is beyond 64 bits.
    #[error("entry {entry} ends beyond the address space")]
    Overflow {
        /// Position of the entry.
        entry: u64,
    },
    /// The entries have more or fewer bytes than the request says.
    #[error("its entries have {found} bytes, it says {length}")]
    Sum {
        /// What it says.
        length: u64,
        /// Bytes of its entries.
        found: u64,
    },
}

/// A request as it came. All that can be checked without knowing the segments was: counts,
/// overflows, the sum of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Which way the payload goes.
    pub op: Op,
    /// Which share of a transfer it is.
    pub part: Part,
    /// Milliseconds without progress after which the responder's host is told so; 0 for never.
    pub progress_ms: u32,
    /// Bytes of the payload.
    pub length: u64,
    form: Form,
    segments: &'a [[u8; SEGMENT_LENGTH]],
    count: u32,
    entries: &'a [u8],
}

impl<'a> Request<'a> {
    /// Reads a body and checks it against what this side takes.
    ///
    /// # Errors
    /// What is wrong with it. Nothing of it may be done.
    pub fn decode(op: Op, body: &'a [u8], limits: &Limits) -> Result<Self, RequestError> {
        let request = Self::parse(op, body)?;
        at_most("bytes", request.length, limits.request_bytes)?;
        at_most("entries", request.count.into(), limits.ranges.into())?;
        request.check(limits)?;
        Ok(request)
    }

    /// Reads a body whose entries were checked, or will be.
    pub(super) fn parse(op: Op, body: &'a [u8]) -> Result<Self, RequestError> {
        let mut reader = Reader(body);
        let fixed = (|| {
            let part = Part { transfer: reader.u64()?, index: reader.u16()?, count: reader.u16()? };
            let (progress_ms, length) = (reader.u32()?, reader.u64()?);
            let (form, reserved) = (reader.u8()?, reader.u8()?);
            let (segments, count) = (reader.u16()?, reader.u32()?);
            Some((part, progress_ms, length, form, reserved, segments, count))
        })();
        let (part, progress_ms, length, form, reserved, segments, count) =
            fixed.ok_or(RequestError::Length)?;
        let form = match form {
            0 => Form::Ranges,
            1 => Form::Strided,
            2 => Form::Paged,
            form => return Err(RequestError::UnknownForm { form }),
        };
        if reserved != 0 {
            return Err(RequestError::Reserved);
        }
        if part.index >= part.count {
            return Err(RequestError::Part { index: part.index, count: part.count });
        }
        let segments = reader.bytes(usize::from(segments) * SEGMENT_LENGTH);
        let segments = segments.ok_or(RequestError::Length)?.as_chunks().0;
        Ok(Self { op, part, progress_ms, length, form, segments, count, entries: reader.0 })
    }

    /// How its bytes are described.
    pub fn form(&self) -> Form {
        self.form
    }

    /// The segments that its entries name by position.
    pub fn segments(&self) -> impl ExactSizeIterator<Item = SegmentRef> + use<'a> {
        self.segments.iter().map(|bytes| {
            let number =
                |at: usize| u64::from_le_bytes(core::array::from_fn(|byte| bytes[at + byte]));
            SegmentRef { segment: number(0), generation: number(8) }
        })
    }

    /// Its entries, in the order of the payload.
    pub fn entries(&self) -> Entries<'a> {
        Entries { form: self.form, left: self.count, reader: Reader(self.entries) }
    }

    /// Its ranges, in the order of the payload: every form expanded, piece by piece.
    pub fn pieces(&self) -> impl Iterator<Item = Range> + use<'a> {
        self.entries().flat_map(Pieces::new)
    }

    fn check(&self, limits: &Limits) -> Result<(), RequestError> {
        let segments = self.segments.len();
        let mut entries = self.entries();
        let (mut found, mut ranges) = (0u64, u64::from(self.count));
        for entry in 0..u64::from(self.count) {
            let it = entries.read()?;
            if it.segment() as usize >= segments {
                return Err(RequestError::NoSegment { entry, segment: it.segment(), segments });
            }
            if let Entry::Paged(_, numbers) = &it {
                ranges += numbers.len() as u64;
                at_most("entries and page numbers", ranges, limits.ranges.into())?;
            }
            if it.is_empty() {
                return Err(RequestError::Empty { entry });
            }
            let overflow = RequestError::Overflow { entry };
            it.checked_hull().ok_or(overflow)?;
            found = it.bytes().and_then(|bytes| found.checked_add(bytes)).ok_or(overflow)?;
        }
        if !entries.reader.0.is_empty() {
            return Err(RequestError::Length);
        }
        if found != self.length {
            return Err(RequestError::Sum { length: self.length, found });
        }
        Ok(())
    }
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

    fn checked_hull(&self) -> Option<(u64, u64)> {
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
    fn bytes(&self) -> Option<u64> {
        match *self {
            Self::Range(range) => Some(range.length),
            Self::Strided(Strided { length, count, .. }) => length.checked_mul(count),
            Self::Paged(Paged { layers, rows, row_bytes, .. }, numbers) => u64::from(layers)
                .checked_mul(rows.into())?
                .checked_mul(numbers.len() as u64)?
                .checked_mul(row_bytes),
        }
    }

    fn is_empty(&self) -> bool {
        self.bytes() == Some(0)
    }
}

/// Entries of a request.
#[derive(Clone, Debug)]
pub struct Entries<'a> {
    form: Form,
    left: u32,
    reader: Reader<'a>,
}

impl<'a> Entries<'a> {
    fn read(&mut self) -> Result<Entry<'a>, RequestError> {
        self.left = self.left.saturating_sub(1);
        let entry = match self.form {
            Form::Ranges => self.range().map(Entry::Range),
            Form::Strided => self.strided()?.map(Entry::Strided),
            Form::Paged => self.paged()?.map(|(paged, numbers)| Entry::Paged(paged, numbers)),
        };
        entry.ok_or(RequestError::Length)
    }

    fn range(&mut self) -> Option<Range> {
        let reader = &mut self.reader;
        let (offset, length, segment) = (reader.u64()?, reader.u32()?, reader.u32()?);
        Some(Range { segment, offset, length: length.into() })
    }

    fn strided(&mut self) -> Result<Option<Strided>, RequestError> {
        let reader = &mut self.reader;
        let fields = (|| {
            let (segment, reserved, offset) = (reader.u32()?, reader.u32()?, reader.u64()?);
            let (length, count, stride) = (reader.u64()?, reader.u64()?, reader.u64()?);
            Some((reserved, Strided { segment, offset, length, count, stride }))
        })();
        unreserved(fields)
    }

    fn paged(&mut self) -> Result<Option<(Paged, Numbers<'a>)>, RequestError> {
        let reader = &mut self.reader;
        let fields = (|| {
            let (segment, pages) = (reader.u32()?, reader.u32()?);
            let (offset, page_stride) = (reader.u64()?, reader.u64()?);
            let (layer_stride, row_stride, row_bytes) =
                (reader.u64()?, reader.u64()?, reader.u64()?);
            let (layers, rows) = (reader.u32()?, reader.u32()?);
            let numbers = reader.bytes(usize::try_from(pages).ok()?.checked_mul(4)?)?;
            let padding = if pages % 2 == 0 { 0 } else { reader.u32()? };
            let paged = Paged {
                segment,
                offset,
                page_stride,
                layer_stride,
                row_stride,
                row_bytes,
                layers,
                rows,
            };
            Some((padding, (paged, Numbers(numbers.as_chunks().0))))
        })();
        unreserved(fields)
    }
}

impl<'a> Iterator for Entries<'a> {
    type Item = Entry<'a>;

    fn next(&mut self) -> Option<Entry<'a>> {
        // Every entry was read once when the request was.
        (self.left > 0).then(|| self.read().ok()).flatten()
    }
}

fn unreserved<T>(fields: Option<(u32, T)>) -> Result<Option<T>, RequestError> {
    match fields {
        Some((reserved, _)) if reserved != 0 => Err(RequestError::Reserved),
        fields => Ok(fields.map(|(_, value)| value)),
    }
}

fn at_most(what: &'static str, count: u64, limit: u64) -> Result<(), RequestError> {
    if count > limit { Err(RequestError::TooMany { what, count, limit }) } else { Ok(()) }
}

/// Ranges of one entry.
struct Pieces<'a> {
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
    fn new(entry: Entry<'a>) -> Self {
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

/// Writes a request, entry by entry, into one buffer.
///
/// Segments first, then entries. What does not fit is found when it is finished.
#[derive(Debug)]
pub struct Encoder {
    bytes: Vec<u8>,
    op: Op,
    form: Form,
    segments: u16,
    count: u64,
    ranges: u64,
    length: u64,
    error: Option<RequestError>,
}

/// A request that is ready to be submitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    pub(super) bytes: Vec<u8>,
    pub(super) op: Op,
    pub(super) length: u64,
    pub(super) progress_ms: u32,
    ranges: u64,
}

impl Encoder {
    /// Begins a request in `buffer`, whose content goes and whose capacity is used.
    pub fn new(
        mut buffer: Vec<u8>,
        op: Op,
        form: Form,
        part: Part,
        progress_ms: u32,
        segments: &[SegmentRef],
    ) -> Self {
        buffer.clear();
        buffer.resize(HEADER_LENGTH, 0);
        buffer.u64(part.transfer);
        buffer.u16(part.index);
        buffer.u16(part.count);
        buffer.u32(progress_ms);
        buffer.u64(0);
        buffer.u8(form.number());
        buffer.u8(0);
        let count = u16::try_from(segments.len());
        buffer.u16(count.unwrap_or(u16::MAX));
        buffer.u32(0);
        for segment in segments {
            buffer.u64(segment.segment);
            buffer.u64(segment.generation);
        }
        let mut error = None;
        if part.index >= part.count {
            error = Some(RequestError::Part { index: part.index, count: part.count });
        }
        if count.is_err() {
            let (what, count, limit) = ("segments", segments.len() as u64, u16::MAX.into());
            error = Some(RequestError::TooMany { what, count, limit });
        }
        let segments = count.unwrap_or(u16::MAX);
        Self { bytes: buffer, op, form, segments, count: 0, ranges: 0, length: 0, error }
    }

    /// Appends a range. One of no bytes is left out.
    pub fn range(&mut self, range: Range) {
        debug_assert_eq!(self.form, Form::Ranges);
        let Range { segment, mut offset, mut length } = range;
        if length > 0 {
            self.account(&Entry::Range(range), 0);
        }
        while length > 0 && self.error.is_none() {
            // In whole GiB, so that pieces stay as aligned as their range.
            let share = if length > u32::MAX.into() { 3 << 30 } else { length };
            self.bytes.u64(offset);
            self.bytes.u32(share as u32);
            self.bytes.u32(segment);
            (offset, length) = (offset.wrapping_add(share), length - share);
            (self.count, self.ranges) = (self.count + 1, self.ranges + 1);
        }
    }

    /// Appends a strided run. One of no bytes is left out.
    pub fn strided(&mut self, strided: Strided) {
        debug_assert_eq!(self.form, Form::Strided);
        let entry = Entry::Strided(strided);
        if entry.is_empty() {
            return;
        }
        self.account(&entry, 1);
        let Strided { segment, offset, length, count, stride } = strided;
        self.bytes.u32(segment);
        self.bytes.u32(0);
        for number in [offset, length, count, stride] {
            self.bytes.u64(number);
        }
    }

    /// Appends the pages of these numbers. Pages of no bytes are left out.
    pub fn paged(&mut self, paged: Paged, numbers: &[u32]) {
        debug_assert_eq!(self.form, Form::Paged);
        let Paged { segment, offset, page_stride, layer_stride, row_stride, row_bytes, .. } = paged;
        let empty = paged.layers == 0 || paged.rows == 0 || row_bytes == 0 || numbers.is_empty();
        if empty {
            return;
        }
        let start = self.bytes.len();
        self.bytes.u32(segment);
        self.bytes.u32(u32::try_from(numbers.len()).unwrap_or(u32::MAX));
        for number in [offset, page_stride, layer_stride, row_stride, row_bytes] {
            self.bytes.u64(number);
        }
        self.bytes.u32(paged.layers);
        self.bytes.u32(paged.rows);
        numbers.iter().for_each(|&number| self.bytes.u32(number));
        if numbers.len() % 2 == 1 {
            self.bytes.u32(0);
        }
        let bytes = core::mem::take(&mut self.bytes);
        let list = &bytes[start + Form::Paged.entry_length()..][..numbers.len() * 4];
        self.account(&Entry::Paged(paged, Numbers(list.as_chunks().0)), 1 + numbers.len() as u64);
        self.bytes = bytes;
    }

    /// The request, whole.
    ///
    /// # Errors
    /// The first thing that was wrong with it.
    pub fn finish(mut self) -> Result<Encoded, RequestError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let count = u32::try_from(self.count);
        let (what, limit) = ("entries", u32::MAX.into());
        let count = count.map_err(|_| RequestError::TooMany { what, count: self.count, limit })?;
        let body = self.bytes.len() - HEADER_LENGTH;
        let (what, limit) = ("bytes of a frame", u32::MAX.into());
        let body = u32::try_from(body).map_err(|_| RequestError::TooMany {
            what,
            count: body as u64,
            limit,
        })?;
        self.bytes[..4].copy_from_slice(&body.to_le_bytes());
        self.bytes[4] = self.op.kind() as u8;
        let fixed = &mut self.bytes[HEADER_LENGTH..];
        fixed[16..24].copy_from_slice(&self.length.to_le_bytes());
        fixed[FIXED_LENGTH - 4..FIXED_LENGTH].copy_from_slice(&count.to_le_bytes());
        let progress_ms = u32::from_le_bytes(core::array::from_fn(|byte| fixed[12 + byte]));
        let Self { bytes, op, length, ranges, .. } = self;
        Ok(Encoded { bytes, op, length, progress_ms, ranges })
    }

    fn account(&mut self, entry: &Entry<'_>, ranges: u64) {
        let (at, segments) = (self.count, usize::from(self.segments));
        let segment = entry.segment();
        let total = entry.bytes().and_then(|bytes| self.length.checked_add(bytes));
        let error = match (total, entry.checked_hull()) {
            _ if segment as usize >= segments => {
                Some(RequestError::NoSegment { entry: at, segment, segments })
            }
            (Some(total), Some(_)) => {
                self.length = total;
                None
            }
            _ => Some(RequestError::Overflow { entry: at }),
        };
        self.error = self.error.or(error);
        if ranges > 0 {
            (self.count, self.ranges) = (self.count + 1, self.ranges + ranges);
        }
    }
}

impl Encoded {
    /// Which way the payload goes.
    pub fn op(&self) -> Op {
        self.op
    }

    /// Bytes of the payload.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Its frame, whose request number is not set yet.
    pub fn frame(&self) -> &[u8] {
        &self.bytes
    }

    /// Whether a peer of such limits takes it.
    ///
    /// # Errors
    /// Which limit it exceeds: split it.
    pub fn fits(&self, limits: &Limits) -> Result<(), RequestError> {
        at_most("bytes of a frame", self.bytes.len() as u64, limits.frame_bytes.into())?;
        at_most("entries and page numbers", self.ranges, limits.ranges.into())?;
        at_most("bytes", self.length, limits.request_bytes)
    }

    pub(super) fn set_number(&mut self, request: u64) {
        self.bytes[8..16].copy_from_slice(&request.to_le_bytes());
    }
}
