//! Stores that go past the processor's caches. The device has read what a slot of the ring held
//! before, so the processor has to ask for each of its lines before it can store to it in its cache,
//! and then the slot drives the list that is being packed out of there.

use crate::queue::CopyDescriptor;

/// Copies descriptors to a place of the same length that the processor does not read. The device
/// sees them once [`settle`] has returned.
pub(crate) fn copy(to: &mut [CopyDescriptor], from: &[CopyDescriptor]) {
    assert_eq!(to.len(), from.len());
    #[cfg(target_arch = "x86_64")]
    if to.as_ptr().cast::<std::arch::x86_64::__m128i>().is_aligned() {
        return copy_pairs(to, from);
    }
    to.copy_from_slice(from);
}

/// The same to a place that is aligned to 16 bytes: two descriptors are three times as many.
#[cfg(target_arch = "x86_64")]
fn copy_pairs(to: &mut [CopyDescriptor], from: &[CopyDescriptor]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    let (to, last_to) = to.as_chunks_mut::<2>();
    let (from, last_from) = from.as_chunks::<2>();
    for (to, from) in to.iter_mut().zip(from) {
        let (to, from) = (to.as_mut_ptr().cast::<__m128i>(), from.as_ptr().cast::<__m128i>());
        for at in 0..3 {
            // SAFETY: both are 48 bytes, so three times 16; the caller saw that the place is aligned,
            // and 48 bytes further it is, too.
            unsafe { _mm_stream_si128(to.add(at), _mm_loadu_si128(from.add(at))) };
        }
    }
    last_to.copy_from_slice(last_from);
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
    fn every_descriptor_is_copied_wherever_it_lies_and_nothing_beside_it() {
        let descriptor = |at: u64| CopyDescriptor { src: at, dst: at << 32, len: !at };
        let from: Vec<_> = (0..400).map(descriptor).collect();
        let beside = descriptor(1 << 20);
        for first in 0..4 {
            for count in [0, 1, 2, 3, 8, 191, 192, 193] {
                let mut to = vec![beside; 400];
                copy(&mut to[first..first + count], &from[..count]);
                settle();
                assert!(to[..first].iter().all(|place| *place == beside));
                assert_eq!(to[first..first + count], from[..count]);
                assert!(to[first + count..].iter().all(|place| *place == beside));
            }
        }
    }
}
