//! A checked list as descriptors of the device that copies it.

use kvferry_device::{CopyDescriptor, CopySource};
use multiversion::multiversion;

use super::{Checked, Limits, Lookup, Op, Range, Window};

/// Which pieces of a list to hand out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Those that the copy kernel takes.
    Small,
    /// Those that DMA takes.
    Large,
    /// All.
    All,
}

/// What to add to an owner's address to get where the device that copies sees it, by window.
#[derive(Clone, Copy, Debug)]
pub struct Relocations<'a> {
    /// Of local windows. Empty where the device that copies owns the local memory, and sees it at
    /// the same addresses.
    pub local: &'a [u64],
    /// Of remote windows.
    pub remote: &'a [u64],
}

/// Hands out a checked list as descriptors of the executing device: merged, relocated, and split
/// into tiles.
#[derive(Debug)]
pub struct Pieces<'a> {
    op: Op,
    ranges: &'a [Range],
    next: usize,
    local: Lookup<'a>,
    remote: Lookup<'a>,
    relocations: Relocations<'a>,
    want: Want,
    plain: bool,
    small_max_bytes: u64,
    tile_bytes: u64,
    /// What is left of the piece that is being handed out.
    rest: CopyDescriptor,
}

impl<'a> Pieces<'a> {
    /// Of a list that [`check_bounds`](super::check_bounds) accepted with the same windows.
    #[expect(clippy::too_many_arguments, reason = "one call, and all of it is the list's")]
    pub fn new(
        op: Op,
        ranges: &'a [Range],
        local: &'a [Window],
        remote: &'a [Window],
        relocations: Relocations<'a>,
        want: Want,
        checked: &Checked,
        limits: &Limits,
    ) -> Self {
        Self {
            op,
            ranges,
            next: 0,
            local: Lookup::new(local),
            remote: Lookup::new(remote),
            relocations,
            want,
            plain: checked.plain && want != Want::Large,
            small_max_bytes: limits.small_max_bytes,
            tile_bytes: if want == Want::Small { limits.tile_bytes } else { u64::MAX },
            rest: CopyDescriptor::default(),
        }
    }

    /// Every range of a plain list is a piece.
    fn fill_plain(&mut self, slot: &mut [CopyDescriptor]) -> usize {
        let Some(first) = self.ranges.get(self.next) else { return 0 };
        if self.remote.at == usize::MAX {
            turn_checked(&mut self.remote, first.remote);
        }
        let to_local = self.local_relocation(first);
        let to_remote = self.relocations.remote[self.remote.at];
        let ranges = &self.ranges[self.next..];
        let count = ranges.len().min(slot.len());
        let (slot, ranges) = (&mut slot[..count], &ranges[..count]);
        match self.op {
            Op::Write => pack_writes(slot, ranges, to_local, to_remote),
            Op::Read => pack_reads(slot, ranges, to_local, to_remote),
        }
        self.next += count;
        count
    }

    /// Takes the next piece into `rest`; `false` at the end of the list.
    #[inline]
    fn advance(&mut self) -> bool {
        while let Some(range) = self.ranges.get(self.next) {
            self.next += 1;
            if range.len == 0 {
                continue;
            }
            if !self.remote.holds(range.remote, range.len) {
                turn_checked(&mut self.remote, range.remote);
            }
            let mut len = range.len;
            while let Some(follower) = self.ranges.get(self.next) {
                let joins =
                    follower.local == range.local + len && follower.remote == range.remote + len;
                if follower.len > 0 && !(joins && self.one_window(range, len + follower.len)) {
                    break;
                }
                len += follower.len;
                self.next += 1;
            }
            let wanted = match self.want {
                Want::Small => len <= self.small_max_bytes,
                Want::Large => len > self.small_max_bytes,
                Want::All => true,
            };
            if wanted {
                let local = range.local.wrapping_add(self.local_relocation(range));
                let remote = range.remote.wrapping_add(self.relocations.remote[self.remote.at]);
                let (src, dst) = match self.op {
                    Op::Write => (local, remote),
                    Op::Read => (remote, local),
                };
                self.rest = CopyDescriptor { src, dst, len };
                return true;
            }
        }
        false
    }

    #[inline]
    fn local_relocation(&mut self, range: &Range) -> u64 {
        if self.relocations.local.is_empty() {
            return 0;
        }
        if !self.local.holds(range.local, range.len) {
            turn_checked(&mut self.local, range.local);
        }
        self.relocations.local[self.local.at]
    }

    /// Whether `len` bytes from the beginning of `range` stay in one window at both ends.
    fn one_window(&mut self, range: &Range, len: u64) -> bool {
        if !self.local.holds(range.local, range.len) {
            turn_checked(&mut self.local, range.local);
        }
        self.local.holds(range.local, len) && self.remote.holds(range.remote, len)
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn pack_writes(slot: &mut [CopyDescriptor], ranges: &[Range], to_local: u64, to_remote: u64) {
    for (place, range) in slot.iter_mut().zip(ranges) {
        place.src = range.local.wrapping_add(to_local);
        place.dst = range.remote.wrapping_add(to_remote);
        place.len = range.len;
    }
}

#[multiversion(targets("x86_64+avx512f+avx512dq+avx512vl+avx512bw", "x86_64+avx2"))]
fn pack_reads(slot: &mut [CopyDescriptor], ranges: &[Range], to_local: u64, to_remote: u64) {
    for (place, range) in slot.iter_mut().zip(ranges) {
        place.src = range.remote.wrapping_add(to_remote);
        place.dst = range.local.wrapping_add(to_local);
        place.len = range.len;
    }
}

/// Moves to the window of an address that was found there before.
#[cold]
#[inline(never)]
fn turn_checked(lookup: &mut Lookup<'_>, addr: u64) {
    let at = lookup.find(addr).expect("the list was checked against the same windows");
    lookup.go(at);
}

impl CopySource for Pieces<'_> {
    fn fill(&mut self, slot: &mut [CopyDescriptor]) -> usize {
        if self.plain {
            return self.fill_plain(slot);
        }
        let mut count = 0;
        while count < slot.len() && (self.rest.len > 0 || self.advance()) {
            let rest = &mut self.rest;
            let tiles =
                rest.len.div_ceil(self.tile_bytes).min((slot.len() - count) as u64) as usize;
            for place in &mut slot[count..count + tiles] {
                let len = rest.len.min(self.tile_bytes);
                *place = CopyDescriptor { len, ..*rest };
                rest.src += len;
                rest.dst += len;
                rest.len -= len;
            }
            count += tiles;
        }
        count
    }
}
