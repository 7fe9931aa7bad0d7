//! What the copy kernel does to find out whether destinations overlap, for devices whose copies run on
//! one thread of this process.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::kernel::Claims;
use crate::queue::CopyDescriptor;

/// As `claim_block` in `kernels/copy.cu`, for all blocks of a destination.
///
/// # Safety
/// The table and the verdict are there, and only this thread uses the table.
pub(super) unsafe fn claim(claims: &Claims, copy: &CopyDescriptor, index: u32) {
    if copy.len == 0 {
        return;
    }
    let begin = copy.dst - claims.low;
    let (first, last) = (begin >> claims.shift, (begin + copy.len - 1) >> claims.shift);
    for block in first / 32..=last / 32 {
        let mut granules = u32::MAX;
        if block == first / 32 {
            granules &= u32::MAX << (first % 32);
        }
        if block == last / 32 {
            granules &= u32::MAX >> (31 - last % 32);
        }
        let entry = (block + 1) << 32 | u64::from(granules);
        let mut place = (block as u32).wrapping_mul(2_654_435_769) >> (32 - claims.log2);
        loop {
            // SAFETY: the caller's contract; a place is less than the entries of the table.
            let found = unsafe { &mut *(claims.table as *mut u64).add(place as usize) };
            if *found == 0 {
                *found = entry;
                break;
            }
            if *found >> 32 == entry >> 32 {
                if *found as u32 & granules != 0 {
                    // SAFETY: the caller's contract: an aligned u32 that others use as an atomic.
                    let verdict = unsafe { &*(claims.verdict as *const AtomicU32) };
                    verdict.store(index, Ordering::Relaxed);
                }
                *found |= u64::from(granules);
                break;
            }
            place = (place + 1) & ((1 << claims.log2) - 1);
        }
    }
}
