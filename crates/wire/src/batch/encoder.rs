//! Requests on their way out.

use alloc::vec::Vec;

use super::codec::Write;
use super::entry::{Entry, Form, Numbers, Paged, Range, Strided};
use super::frame::HEADER_LENGTH;
use super::limits::Limits;
use super::request::{FIXED_LENGTH, Op, Part, RequestError, at_most};
use crate::segment::SegmentRef;

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
    #[inline]
    pub fn range(&mut self, range: Range) {
        debug_assert_eq!(self.form, Form::Ranges);
        let total = self.length.checked_add(range.length);
        let ends = range.offset.checked_add(range.length).is_some();
        let listed = range.segment < u32::from(self.segments);
        match total {
            Some(total) if ends && listed && (1..=u32::MAX.into()).contains(&range.length) => {
                self.bytes.extend_from_slice(&range.encode());
                self.length = total;
                (self.count, self.ranges) = (self.count + 1, self.ranges + 1);
            }
            _ => self.unusual_range(range),
        }
    }

    /// A range that is empty, wrong, or several on the wire.
    #[cold]
    fn unusual_range(&mut self, mut range: Range) {
        if range.length > 0 {
            self.account(&Entry::Range(range), 0);
        }
        while range.length > 0 && self.error.is_none() {
            // In whole GiB, so that pieces stay as aligned as their range.
            let share = if range.length > u32::MAX.into() { 3 << 30 } else { range.length };
            self.bytes.extend_from_slice(&Range { length: share, ..range }.encode());
            range.offset = range.offset.wrapping_add(share);
            range.length -= share;
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
