//! WRITE and READ requests: which bytes of which segments, in one of three forms.
//!
//! The ranges of a request, in their order, are one run of bytes: its payload. A form stands for many
//! ranges of one length and is expanded page by page, of a page layer by layer, of a layer row by
//! row.

use super::codec::Reader;
use super::entry::{Entry, Form, Numbers, Paged, Pieces, RANGE_LENGTH, Range, Strided};
use super::frame::Kind;
use super::limits::Limits;
use crate::segment::SegmentRef;

/// Bytes of a request's body before its segments.
pub(super) const FIXED_LENGTH: usize = 32;

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
    /// Milliseconds that the responder may wait for the initiator's bytes or credits while nothing
    /// moves; 0, or more than the responder's own, for those of its limits.
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

    /// Its ranges if it has the form of ranges: the quick way to many.
    pub fn ranges(&self) -> Option<impl ExactSizeIterator<Item = Range> + Clone + use<'a>> {
        let ranges = self.entries.as_chunks::<RANGE_LENGTH>().0.iter().map(Range::decode);
        (self.form == Form::Ranges).then_some(ranges)
    }

    /// Its ranges, in the order of the payload: every form expanded, piece by piece.
    pub fn pieces(&self) -> impl Iterator<Item = Range> + use<'a> {
        self.entries().flat_map(Pieces::new)
    }

    fn check(&self, limits: &Limits) -> Result<(), RequestError> {
        let found = match self.ranges() {
            Some(ranges) => self.check_ranges(ranges)?,
            None => self.check_entries(limits)?,
        };
        if found != self.length {
            return Err(RequestError::Sum { length: self.length, found });
        }
        Ok(())
    }

    /// Checks ranges and says how many bytes they have. What is wrong is looked for afterwards.
    fn check_ranges(
        &self,
        ranges: impl Iterator<Item = Range> + Clone,
    ) -> Result<u64, RequestError> {
        if self.entries.len() as u64 != u64::from(self.count) * RANGE_LENGTH as u64 {
            return Err(RequestError::Length);
        }
        let segments = self.segments.len();
        let wrong = |range: &Range| {
            let last = u64::MAX - u64::from(u32::MAX);
            let ends = range.offset <= last || range.offset.checked_add(range.length).is_some();
            range.length == 0 || range.segment as usize >= segments || !ends
        };
        let (mut found, mut any) = (0, false);
        for range in ranges.clone() {
            any |= wrong(&range);
            // Fewer than 2^32 lengths of fewer than 2^32 bytes.
            found += range.length;
        }
        match (0..).zip(ranges).find(|(_, range)| any && wrong(range)) {
            None => Ok(found),
            Some((entry, Range { length: 0, .. })) => Err(RequestError::Empty { entry }),
            Some((entry, Range { segment, .. })) if segment as usize >= segments => {
                Err(RequestError::NoSegment { entry, segment, segments })
            }
            Some((entry, _)) => Err(RequestError::Overflow { entry }),
        }
    }

    /// Checks entries of the other forms and says how many bytes they have.
    fn check_entries(&self, limits: &Limits) -> Result<u64, RequestError> {
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
        Ok(found)
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
            Form::Ranges => self.reader.array().map(|bytes| Entry::Range(Range::decode(&bytes))),
            Form::Strided => self.strided()?.map(Entry::Strided),
            Form::Paged => self.paged()?.map(|(paged, numbers)| Entry::Paged(paged, numbers)),
        };
        entry.ok_or(RequestError::Length)
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

pub(super) fn at_most(what: &'static str, count: u64, limit: u64) -> Result<(), RequestError> {
    if count > limit { Err(RequestError::TooMany { what, count, limit }) } else { Ok(()) }
}
