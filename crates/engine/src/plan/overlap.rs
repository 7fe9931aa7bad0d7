//! Whether two ranges of a list touch one byte, at least one of them writing: quickly for lists
//! that are good, exactly for the others.

use multiversion::multiversion;

use super::{Extent, Op, Range, destination};
use crate::error::{RangeError, Side};

/// A bitmap with more words than this per range costs more than sorting.
const BITMAP_WORDS_PER_RANGE: u64 = 24;

/// Whether a byte may be written twice: exact, except that it is `true` also where the tables would
/// be too large to be worth it.
pub(super) fn overlap_is_possible(
    op: Op,
    ranges: &[Range],
    extent: &Extent,
    memory: &mut Vec<u8>,
) -> bool {
    equally_long_overlap(op, ranges, extent, memory)
        .unwrap_or_else(|| bits_overlap(op, ranges, extent, memory))
}

/// A table with more buckets than this per range costs more than the bitmap.
const BUCKETS_PER_RANGE: u64 = 4;

/// For ranges that are equally long: notes in a table where in its bucket each destination begins.
/// A bucket is at most one and more than half a range wide, so two that begin in one bucket
/// overlap, and one reaches into the next two buckets at most. `None` for other lists.
fn equally_long_overlap(
    op: Op,
    ranges: &[Range],
    extent: &Extent,
    table: &mut Vec<u8>,
) -> Option<bool> {
    let (len, count) = (extent.longest, ranges.len() as u64);
    let equal = len > 0 && len.checked_mul(count) == Some(extent.bytes);
    // So that sums of three buckets and the count of places fit into 32 bits.
    if !equal || len >= 1 << 30 || count >= 1 << 28 {
        return None;
    }
    let shift = len.ilog2();
    let buckets = ((extent.high - extent.low) >> shift) + 1;
    if buckets > BUCKETS_PER_RANGE * count {
        return None;
    }
    table.clear();
    // Two more, so that each bucket has two behind it.
    table.resize((buckets as usize + 2) * 4, 0);
    let (places, _) = table.as_chunks_mut::<4>();
    match op {
        Op::Write => note_writes(ranges, extent.low, shift, places),
        Op::Read => note_reads(ranges, extent.low, shift, places),
    }
    Some(!places_are_apart(places, len as u32, count as u32))
}

#[multiversion(targets("x86_64+bmi1+bmi2"))]
fn note_writes(ranges: &[Range], low: u64, shift: u32, places: &mut [[u8; 4]]) {
    note::<true>(ranges, low, shift, places);
}

#[multiversion(targets("x86_64+bmi1+bmi2"))]
fn note_reads(ranges: &[Range], low: u64, shift: u32, places: &mut [[u8; 4]]) {
    note::<false>(ranges, low, shift, places);
}

/// Only stores, where a bitmap must load before: nothing waits for a cache.
#[inline(always)]
fn note<const WRITE: bool>(ranges: &[Range], low: u64, shift: u32, places: &mut [[u8; 4]]) {
    let inside = (1 << shift) - 1;
    for range in ranges {
        let offset = destination::<WRITE>(range) - low;
        // Zero is an empty bucket.
        places[(offset >> shift) as usize] = ((offset & inside) as u32 + 1).to_le_bytes();
    }
}

/// Whether as many buckets are used as there are ranges, and each range ends before those begin
/// that are noted in the two buckets behind its own.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn places_are_apart(places: &[[u8; 4]], len: u32, count: u32) -> bool {
    let width = 1 << len.ilog2();
    let (mut used, mut near) = (0u32, false);
    for ((here, next), third) in places.iter().zip(&places[1..]).zip(&places[2..]) {
        let [here, next, third] = [here, next, third].map(|place| u32::from_le_bytes(*place));
        used += u32::from(here > 0);
        near |= (here > 0) & (next > 0) & (next + width - here < len);
        near |= (here > 0) & (third > 0) & (third + 2 * width - here < len);
    }
    used == count && !near
}

/// Marks every destination in a bitmap whose granule is their common alignment: if fewer bits are
/// set than were marked, a byte is written twice. `true` also when the bitmap would be too large to
/// be worth it.
fn bits_overlap(op: Op, ranges: &[Range], extent: &Extent, bitmap: &mut Vec<u8>) -> bool {
    let granule = extent.union.trailing_zeros();
    // Destinations are multiples of the granule away from each other, so from the lowest, too.
    let words = ((extent.high - extent.low) >> granule).div_ceil(64);
    let worth = words <= BITMAP_WORDS_PER_RANGE * ranges.len() as u64;
    // So that the sum of all lengths, below, is exact.
    let exact = extent.longest.checked_mul(ranges.len() as u64).is_some();
    if !(worth && exact) {
        return true;
    }
    // Two words more, because a range is marked with two at whichever byte it begins.
    bitmap.clear();
    bitmap.resize(words as usize * 8 + 16, 0);
    match op {
        Op::Write => mark_writes(ranges, extent, granule, bitmap),
        Op::Read => mark_reads(ranges, extent, granule, bitmap),
    }
    count_ones(bitmap) != extent.bytes >> granule
}

#[multiversion(targets("x86_64+avx512f+avx512vpopcntdq", "x86_64+popcnt"))]
fn count_ones(bitmap: &[u8]) -> u64 {
    let (words, _) = bitmap.as_chunks::<8>();
    words.iter().map(|word| u64::from(u64::from_le_bytes(*word).count_ones())).sum()
}

// Shifts by a variable are a third of the work and one instruction only with BMI2.
#[multiversion(targets("x86_64+bmi1+bmi2"))]
fn mark_writes(ranges: &[Range], extent: &Extent, granule: u32, bitmap: &mut [u8]) {
    mark::<true>(ranges, extent, granule, bitmap);
}

#[multiversion(targets("x86_64+bmi1+bmi2"))]
fn mark_reads(ranges: &[Range], extent: &Extent, granule: u32, bitmap: &mut [u8]) {
    mark::<false>(ranges, extent, granule, bitmap);
}

/// Bits that surely fit into eight bytes from the byte that the first one is in.
const SHORT: u64 = 57;

/// Ranges between two looks at those that are longer.
const BLOCK: usize = 256;

#[inline(always)]
fn mark<const WRITE: bool>(ranges: &[Range], extent: &Extent, granule: u32, bitmap: &mut [u8]) {
    let mean = (extent.bytes / ranges.len().max(1) as u64) >> granule;
    // Which loop depends on the list alone: a choice for each range would be a coin toss.
    if mean <= SHORT / 2 || extent.longest >> granule <= SHORT {
        mark_short::<WRITE>(ranges, extent.low, granule, bitmap)
    } else {
        mark_long::<WRITE>(ranges, extent.low, granule, bitmap)
    }
}

/// Marks ranges that fit into one word at once, and notes the others to mark them later.
#[inline(always)]
fn mark_short<const WRITE: bool>(ranges: &[Range], low: u64, granule: u32, bitmap: &mut [u8]) {
    let mut long = [0u32; BLOCK];
    for block in ranges.chunks(BLOCK) {
        let mut longs = 0;
        for (index, range) in block.iter().enumerate() {
            let first = destination::<WRITE>(range).wrapping_sub(low) >> granule;
            let count = range.len >> granule;
            long[longs] = index as u32;
            longs += usize::from(count > SHORT);
            let short = if count > SHORT { 0 } else { count };
            // Not `64 - short`, because an empty range shifts by nothing and must have no bits.
            let mask = !(u64::MAX << short) << (first % 8);
            // Where an empty range points is anywhere.
            let byte = if count == 0 { 0 } else { first / 8 };
            mark_word(bitmap, byte, mask);
        }
        for &index in &long[..longs] {
            let range = &block[index as usize];
            let mut first = destination::<WRITE>(range).wrapping_sub(low) >> granule;
            let mut count = range.len >> granule;
            while count > 0 {
                let now = count.min(64 - first % 64);
                mark_word(bitmap, first / 64 * 8, (u64::MAX >> (64 - now)) << (first % 64));
                first += now;
                count -= now;
            }
        }
    }
}

/// Marks with two words of eight bytes from the byte on that the first bit is in, and what is
/// beyond them in a loop.
#[inline(always)]
fn mark_long<const WRITE: bool>(ranges: &[Range], low: u64, granule: u32, bitmap: &mut [u8]) {
    for range in ranges {
        let first = destination::<WRITE>(range).wrapping_sub(low) >> granule;
        let count = range.len >> granule;
        if count == 0 {
            continue;
        }
        // Of the bits from the beginning of the byte: where they end.
        let (byte, shift) = (first / 8, first % 8);
        let end = shift + count;
        let in_first = (u64::MAX >> (64 - end.min(64))) & (u64::MAX << shift);
        mark_word(bitmap, byte, in_first);
        let left = end.saturating_sub(64);
        // All ones for 64, none for 0.
        let in_second = (u64::MAX >> 1) >> (63 - left.min(63)) | (left.min(64) / 64) << 63;
        mark_word(bitmap, byte + 8, in_second);
        let mut left = left.saturating_sub(64);
        let mut byte = byte + 16;
        while left > 0 {
            let now = left.min(64);
            mark_word(bitmap, byte, u64::MAX >> (64 - now));
            left -= now;
            byte += 8;
        }
    }
}

/// Sets the bits of `mask` in the eight bytes at `byte`.
#[inline(always)]
fn mark_word(bitmap: &mut [u8], byte: u64, mask: u64) {
    let Some(place) = bitmap[byte as usize..].first_chunk_mut::<8>() else {
        unreachable!("the bitmap ends two words behind its last bit")
    };
    *place = (u64::from_le_bytes(*place) | mask).to_le_bytes();
}

/// The exact answer, by sorting: only for lists that the quick ways could not clear.
#[cold]
pub(super) fn find_overlap(op: Op, ranges: &[Range]) -> Result<(), RangeError> {
    let (start, side): (fn(&Range) -> u64, _) = match op {
        Op::Write => (destination::<true>, Side::Remote),
        Op::Read => (destination::<false>, Side::Local),
    };
    let order = order_by(ranges, start);
    for pair in order.windows(2) {
        let (low, high) = (&ranges[pair[0]], &ranges[pair[1]]);
        if start(low) + low.len > start(high) {
            let (first, second) = (pair[0].min(pair[1]), pair[0].max(pair[1]));
            return Err(RangeError::DestinationsOverlap { first, second, side, addr: start(high) });
        }
    }
    Ok(())
}

/// Whether any range reads what a range writes; destinations are known not to overlap.
pub(super) fn find_overwritten_source(op: Op, ranges: &[Range]) -> Result<(), RangeError> {
    let (local, remote) =
        (destination::<false> as fn(&Range) -> u64, destination::<true> as fn(&Range) -> u64);
    let (destination, source) = match op {
        Op::Write => (remote, local),
        Op::Read => (local, remote),
    };
    let low = |of: fn(&Range) -> u64| {
        ranges.iter().filter(|range| range.len > 0).map(of).min().unwrap_or(0)
    };
    let high = |of: fn(&Range) -> u64| {
        ranges
            .iter()
            .filter(|range| range.len > 0)
            .map(|range| of(range) + range.len)
            .max()
            .unwrap_or(0)
    };
    if high(source) <= low(destination) || high(destination) <= low(source) {
        return Ok(());
    }
    let writers = order_by(ranges, destination);
    for (reader, range) in ranges.iter().enumerate().filter(|(_, range)| range.len > 0) {
        let end = source(range) + range.len;
        // The last writer that begins before the source ends is the only one that can reach in:
        // writers do not overlap each other.
        let before = writers.partition_point(|&writer| destination(&ranges[writer]) < end);
        let Some(&writer) = writers[..before].last() else { continue };
        let written = &ranges[writer];
        if destination(written) + written.len > source(range) {
            let addr = source(range).max(destination(written));
            return Err(RangeError::SourceOverwritten { reader, writer, addr });
        }
    }
    Ok(())
}

/// Positions of the non-empty ranges, sorted by an address of theirs.
fn order_by(ranges: &[Range], addr: fn(&Range) -> u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..ranges.len()).filter(|&index| ranges[index].len > 0).collect();
    order.sort_unstable_by_key(|&index| addr(&ranges[index]));
    order
}
