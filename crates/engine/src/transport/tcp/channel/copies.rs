//! The copies between slices and a device's memory, and what is offered to be sent.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_wire::batch::{Code, Landing, Status};
use kvferry_wire::checksum::Checksum;

use super::super::layout::{Cursor, Home, Layout};
use super::end::End;
use super::{Channel, Failure, PIECES, SliceCopy};
use crate::transport::staging::{Side, copy};

/// How long a lane waits for a slice before it takes a slower path.
pub(super) const PATIENCE: Duration = Duration::from_millis(100);

/// Bytes that are gathered, sent and applied at once: these, so that the first leave early and little is
/// left to apply behind the last, or a quarter of a large request, so that submissions are few.
const EXTENT: u64 = 1 << 20;

/// Offers of a request in host memory that wait to be sent. Each costs memory, and the peer says how
/// short they are: of one byte, if it likes.
const OFFERS: usize = 16;

impl Channel {
    /// Payload is whole: applies it.
    pub(in super::super) fn arrived<E: End>(&mut self, end: &mut E, landing: &Landing) {
        let slice = self.landing.take();
        let Some(it) = self.moves.get_mut(&landing.request) else {
            end.grant(1);
            return;
        };
        self.changed.push(landing.request);
        let length = u64::from(landing.length);
        it.begun += length;
        let found = landing.checksum.map(|expected| {
            let mut sum = Checksum::new();
            match &slice {
                Some(slice) => sum.update(&slice.bytes()[..length as usize]),
                None => sum_up(&mut sum, self.landing_from, &it.layout, length),
            }
            (expected, sum.value())
        });
        if let Some((expected, found)) = found.filter(|(expected, found)| expected != found) {
            let reason = format!("checksum {found:#018x} of a payload that has {expected:#018x}");
            let status = Status::new(Code::Corrupt, reason);
            it.failure.get_or_insert(Failure { status, ours: None });
            end.grant(1);
            return;
        }
        let Some(slice) = slice else {
            it.applied += length;
            end.grant(1);
            return;
        };
        let from = it.cursor;
        it.cursor.advance(&it.layout, length);
        it.copies += 1;
        let pieces = from.pieces(Arc::clone(&it.layout), length);
        let hold = Arc::clone(&it.layout) as _;
        // SAFETY: the layout's pieces were checked, and it or the batch keeps them registered.
        let copying = unsafe { copy(&self.staging, slice, pieces, length, 0, hold, &self.wake) };
        let &Landing { request, length, .. } = landing;
        self.scattering.push(SliceCopy { request, length, copying });
    }

    /// Takes note of payload that is where it belongs. Whether there was any.
    pub(super) fn settle_scattered(&mut self, end: &mut impl End) -> bool {
        let (mut at, before) = (0, self.scattering.len());
        while let Some(SliceCopy { request, length, copying }) = self.scattering.get_mut(at) {
            let Some((_, result)) = copying.ended() else {
                at += 1;
                continue;
            };
            let (request, length) = (*request, *length);
            self.scattering.swap_remove(at);
            end.grant(1);
            let Some(it) = self.moves.get_mut(&request) else { continue };
            it.copies -= 1;
            match result {
                Ok(()) => it.applied += u64::from(length),
                Err(error) => it.fail(error),
            }
            self.changed.push(request);
        }
        self.scattering.len() < before
    }

    /// Gathers and offers what can be.
    pub(super) fn prepare(&mut self, end: &mut impl End) {
        self.offer_gathered(end);
        let Some(agreed) = self.agreed else { return };
        let most = u64::from(agreed.extent_bytes).min(self.staging.slice_bytes());
        while let Some(&request) = self.sending.front() {
            let Some(it) = self.moves.get_mut(&request) else {
                self.sending.pop_front();
                continue;
            };
            if it.failure.is_some() || it.left() == 0 {
                self.sending.pop_front();
                continue;
            }
            let length = (it.layout.length / 4).max(EXTENT).min(most).min(it.left());
            let Home::Device(device) = it.layout.home else {
                if it.outstanding >= OFFERS {
                    return;
                }
                let checksum = match agreed.checksums {
                    true => {
                        let (mut sum, mut from) = (Checksum::new(), it.cursor);
                        from.advance(&it.layout, it.begun - it.sent());
                        sum_up(&mut sum, from, &it.layout, length);
                        sum.value()
                    }
                    false => 0,
                };
                match end.offer(request, length as u32, checksum) {
                    Ok(_) => {
                        it.begun += length;
                        it.offered += length;
                        it.outstanding += 1;
                        self.ahead += length;
                        self.changed.push(request);
                    }
                    Err(_) => it.begun = it.layout.length,
                }
                continue;
            };
            let slices = self.gathering.len() + self.slices.len();
            let taken = self.staging.pool(device).and_then(|pool| {
                // Half of the slices at most for one peer, so that a slow one leaves some.
                if slices >= (pool.send_slices / (2 * self.depth)).max(2) {
                    return Ok(None);
                }
                let waited = self.waits[0].is_some_and(|since| since.elapsed() >= PATIENCE);
                let taken = pool.take(Side::Send, &self.peer, waited, &self.wake)?;
                self.waits[0] =
                    taken.is_none().then(|| *self.waits[0].get_or_insert_with(Instant::now));
                Ok(taken)
            });
            let slice = match taken {
                Ok(Some(slice)) => slice,
                Ok(None) => return,
                Err(error) => {
                    it.fail(error);
                    self.changed.push(request);
                    continue;
                }
            };
            it.fell_back |= !slice.is_pinned();
            let from = it.cursor;
            it.cursor.advance(&it.layout, length);
            it.begun += length;
            it.copies += 1;
            let ahead = self.ahead;
            self.ahead += length;
            let pieces = from.pieces(Arc::clone(&it.layout), length);
            let hold = Arc::clone(&it.layout) as _;
            // SAFETY: as in `arrived`; a gather only reads them.
            let copying =
                unsafe { copy(&self.staging, slice, pieces, length, ahead, hold, &self.wake) };
            self.gathering.push_back(SliceCopy { request, length: length as u32, copying });
        }
    }

    /// Offers slices that were filled, in the order of their bytes. Whether there were any.
    pub(super) fn offer_gathered(&mut self, end: &mut impl End) -> bool {
        let mut any = false;
        while let Some(SliceCopy { request, length, copying }) = self.gathering.front_mut() {
            let (request, length) = (*request, *length);
            let Some((slice, result)) = copying.ended() else { break };
            self.gathering.pop_front();
            any = true;
            // Counted again if it is offered.
            self.ahead = self.ahead.saturating_sub(length.into());
            let Some(it) = self.moves.get_mut(&request) else { continue };
            it.copies -= 1;
            self.changed.push(request);
            if let Err(error) = result {
                it.fail(error);
            }
            let Some(slice) = slice.filter(|_| it.failure.is_none()) else { continue };
            let checksum = match self.agreed.is_some_and(|agreed| agreed.checksums) {
                true => kvferry_wire::checksum::of(&slice.bytes()[..length as usize]),
                false => 0,
            };
            // If the request is over, the slice is free.
            if let Ok(offset) = end.offer(request, length, checksum) {
                it.offered += u64::from(length);
                it.outstanding += 1;
                self.ahead += u64::from(length);
                self.slices.insert((request, offset), slice);
            }
        }
        any
    }
}

fn sum_up(sum: &mut Checksum, from: Cursor, layout: &Layout, length: u64) {
    let (mut from, mut left) = (from, length);
    while left > 0 {
        let bytes = from.host_bytes(layout, left, PIECES);
        let count: u64 = bytes.iter().map(|bytes| bytes.len() as u64).sum();
        if count == 0 {
            return;
        }
        bytes.iter().for_each(|bytes| sum.update(&bytes.to_send()));
        from.advance(layout, count);
        left -= count;
    }
}
