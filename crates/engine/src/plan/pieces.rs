//! A checked list as descriptors of the device that copies it.

use kvferry_device::{CopyDescriptor, CopySource};

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

/// Hands out a checked list as descriptors of the executing device: merged, relocated, and split
/// into tiles.
#[derive(Debug)]
pub struct Pieces<'a> {
    op: Op,
    ranges: &'a [Range],
    next: usize,
    local: Lookup<'a>,
    remote: Lookup<'a>,
    /// Per remote window: what to add to an address of the target to get ours.
    relocations: &'a [u64],
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
        relocations: &'a [u64],
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
        let relocation = self.relocations[self.remote.at];
        let ranges = &self.ranges[self.next..];
        let count = ranges.len().min(slot.len());
        let pairs = slot[..count].iter_mut().zip(&ranges[..count]);
        match self.op {
            Op::Write => pairs.for_each(|(place, &Range { local, remote, len })| {
                *place = CopyDescriptor { src: local, dst: remote.wrapping_add(relocation), len };
            }),
            Op::Read => pairs.for_each(|(place, &Range { local, remote, len })| {
                *place = CopyDescriptor { src: remote.wrapping_add(relocation), dst: local, len };
            }),
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
                let remote = range.remote.wrapping_add(self.relocations[self.remote.at]);
                let (src, dst) = match self.op {
                    Op::Write => (range.local, remote),
                    Op::Read => (remote, range.local),
                };
                self.rest = CopyDescriptor { src, dst, len };
                return true;
            }
        }
        false
    }

    /// Whether `len` bytes from the beginning of `range` stay in one window at both ends.
    fn one_window(&mut self, range: &Range, len: u64) -> bool {
        if !self.local.holds(range.local, range.len) {
            turn_checked(&mut self.local, range.local);
        }
        self.local.holds(range.local, len) && self.remote.holds(range.remote, len)
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
