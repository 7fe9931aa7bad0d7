//! Stores that go past the processor's caches. The device has read what a slot of the ring held
//! before, so the processor has to ask for each of its lines before it can store to it in its cache,
//! and then the slot drives the list that is being packed out of there. Whole lines at a time: in
//! smaller parts it takes longer than ordinary stores do (H200's Xeon).

use crate::queue::CopyDescriptor;

/// Bytes of a line.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Whether this processor stores whole lines. Where it does not, this module makes ordinary copies.
pub(crate) fn available() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512f");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// Copies to a place of the same length that the processor does not read. The device sees it once
/// [`settle`] has returned.
pub(crate) fn copy(to: &mut [CopyDescriptor], from: &[CopyDescriptor]) {
    assert_eq!(to.len(), from.len());
    // SAFETY: as many bytes as each of the two has, of which one is borrowed alone.
    unsafe { copy_bytes(to.as_mut_ptr().cast(), from.as_ptr().cast(), size_of_val(from)) };
}

/// The same, for bytes of anything.
///
/// # Safety
/// As [`std::ptr::copy_nonoverlapping`].
pub(crate) unsafe fn copy_bytes(to: *mut u8, from: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    if available() {
        // SAFETY: the caller's contract; the processor has what it takes.
        return unsafe { copy_lines(to, from, bytes) };
    }
    // SAFETY: the caller's contract.
    unsafe { to.copy_from_nonoverlapping(from, bytes) };
}

/// # Safety
/// As [`std::ptr::copy_nonoverlapping`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn copy_lines(to: *mut u8, from: *const u8, bytes: usize) {
    use std::arch::x86_64::{_mm512_loadu_si512, _mm512_stream_si512};
    let mut at = to.align_offset(LINE).min(bytes);
    // SAFETY: not more than there are.
    unsafe { to.copy_from_nonoverlapping(from, at) };
    while bytes - at >= LINE {
        // SAFETY: a whole line is left, and its place is aligned.
        unsafe {
            let line = _mm512_loadu_si512(from.add(at).cast());
            _mm512_stream_si512(to.add(at).cast(), line);
        }
        at += LINE;
    }
    // SAFETY: what is left.
    unsafe { to.add(at).copy_from_nonoverlapping(from.add(at), bytes - at) };
}

/// Lets the device see what was copied before it sees what is stored next.
pub(crate) fn settle() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this architecture has the instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence()
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_copied_wherever_it_lies_and_none_beside_them() {
        let from: Vec<u8> = (0..1000).map(|at| (at % 251) as u8).collect();
        for first in 0..65 {
            for count in [0, 1, 3, 63, 64, 65, 127, 128, 129, 500] {
                let mut to = vec![255; 600];
                let place = &mut to[first..first + count];
                // SAFETY: both are that long.
                unsafe { copy_bytes(place.as_mut_ptr(), from[first / 2..].as_ptr(), count) };
                settle();
                assert!(to[..first].iter().all(|byte| *byte == 255));
                assert_eq!(to[first..first + count], from[first / 2..][..count]);
                assert!(to[first + count..].iter().all(|byte| *byte == 255));
            }
        }
    }

    #[test]
    fn descriptors_are_copied_whole() {
        let descriptor = |at: u64| CopyDescriptor { src: at, dst: at << 32, len: !at };
        let from: Vec<_> = (0..193).map(descriptor).collect();
        let mut to = vec![CopyDescriptor::default(); 193];
        copy(&mut to, &from);
        settle();
        assert_eq!(to, from);
    }
}
