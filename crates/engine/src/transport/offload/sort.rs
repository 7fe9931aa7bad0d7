//! Pieces in the order of their ends in host memory, so that those that touch there are neighbours.

use kvferry_device::CopyDescriptor;

use super::fragments::Direction;

/// Bits of a digit.
const DIGIT: u32 = 11;

/// Memory that sorting needs, kept from one batch to the next.
#[derive(Debug, Default)]
pub(super) struct Memory {
    keys: Vec<(u32, u32)>,
    other: Vec<(u32, u32)>,
    pub(super) sorted: Vec<CopyDescriptor>,
}

/// The lowest byte of all pieces in host memory, and how many from there to the highest.
fn hull(pieces: &[CopyDescriptor], direction: Direction) -> (u64, u64) {
    let (mut low, mut high) = (u64::MAX, 0);
    for piece in pieces {
        let host = direction.host(piece);
        low = low.min(host);
        high = high.max(host + piece.len);
    }
    (low, high.saturating_sub(low))
}

/// Whether most pieces touch another one in host memory, or would but for small gaps. Looks at a
/// sample where they do not fill what they lie in.
pub(super) fn is_worth_it(pieces: &[CopyDescriptor], direction: Direction, bytes: u64) -> bool {
    const SAMPLE: usize = 64;
    if pieces.len() < 2 {
        return false;
    }
    let (_, hull) = hull(pieces, direction);
    if bytes >= hull / 10 * 9 {
        return true;
    }
    // A bit for each end of a sample, by a hash: pieces that begin there are counted.
    let hash = |addr: u64| (addr.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 52) as usize;
    let mut ends = [0u64; 64];
    let step = pieces.len().div_ceil(SAMPLE);
    let sample = pieces.iter().step_by(step);
    let taken = sample.len();
    for piece in sample {
        let at = hash(direction.host(piece) + piece.len);
        ends[at / 64] |= 1 << (at % 64);
    }
    let may_begin = |piece: &&CopyDescriptor| {
        let at = hash(direction.host(piece));
        ends[at / 64] >> (at % 64) & 1 == 1
    };
    let found = pieces.iter().filter(may_begin).count();
    // By chance one in 64 of all pieces is counted, too.
    found >= pieces.len() / 64 + taken / 2
}

/// Sorts by the ends in host memory.
pub(super) fn by_host(pieces: &mut Vec<CopyDescriptor>, direction: Direction, memory: &mut Memory) {
    let host = |piece: &CopyDescriptor| direction.host(piece);
    if pieces.is_sorted_by_key(host) {
        return;
    }
    let (low, span) = hull(pieces, direction);
    let union = pieces.iter().fold(0, |union, piece| union | (host(piece) - low));
    let shift = union.trailing_zeros();
    let (Ok(count), Ok(most)) = (u32::try_from(pieces.len()), u32::try_from(span >> shift)) else {
        pieces.sort_unstable_by_key(host);
        return;
    };
    let Memory { keys, other, sorted } = memory;
    keys.clear();
    keys.extend(pieces.iter().zip(0..count).map(|(p, at)| (((host(p) - low) >> shift) as u32, at)));
    other.resize(keys.len(), (0, 0));
    for digit in 0..(u32::BITS - most.leading_zeros()).div_ceil(DIGIT) {
        let of = |key: u32| (key >> (digit * DIGIT)) as usize & ((1 << DIGIT) - 1);
        let mut places = [0u32; 1 << DIGIT];
        for &(key, _) in keys.iter() {
            places[of(key)] += 1;
        }
        let mut next = 0;
        for place in &mut places {
            next += std::mem::replace(place, next);
        }
        for &(key, at) in keys.iter() {
            let place = &mut places[of(key)];
            other[*place as usize] = (key, at);
            *place += 1;
        }
        std::mem::swap(keys, other);
        other.resize(keys.len(), (0, 0));
    }
    sorted.clear();
    sorted.extend(keys.iter().map(|&(_, at)| pieces[at as usize]));
    std::mem::swap(pieces, sorted);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_are_in_order_of_host_memory_and_all_there(
            hosts in prop::collection::vec(0u64..1 << 44, 0..300), shift in 0u32..20, store: bool,
        ) {
            let direction = if store { Direction::Store } else { Direction::Load };
            let mut pieces: Vec<_> = hosts.iter().zip(0u64..).map(|(host, at)| {
                let (host, device) = (host >> shift << shift, at);
                let (src, dst) = if store { (device, host) } else { (host, device) };
                CopyDescriptor { src, dst, len: 1 }
            }).collect();
            let mut expected = pieces.clone();
            expected.sort_by_key(|piece| direction.host(piece));
            by_host(&mut pieces, direction, &mut Memory::default());
            let host = |piece: &CopyDescriptor| direction.host(piece);
            prop_assert!(pieces.is_sorted_by_key(host));
            for list in [&mut pieces, &mut expected] {
                list.sort_unstable_by_key(|piece| (piece.src, piece.dst));
            }
            prop_assert_eq!(pieces, expected);
        }
    }

    #[test]
    fn sorting_is_worth_it_where_most_pieces_touch_another_and_only_there() {
        let list = |hosts: &mut dyn Iterator<Item = u64>| -> Vec<CopyDescriptor> {
            hosts.map(|host| CopyDescriptor { src: 0, dst: host, len: 4096 }).collect()
        };
        let worth = |pieces: &[CopyDescriptor]| {
            is_worth_it(pieces, Direction::Store, pieces.len() as u64 * 4096)
        };
        // 7919 is a prime, so each slot comes once.
        assert!(worth(&list(&mut (0..5000).map(|at| at * 7919 % 5000 * 4096))), "dense");
        assert!(worth(&list(&mut (0..5000).map(|at| at * 7919 % 5000 * 4352))), "small gaps");
        // 100 pages of 50 pieces, far apart, layer by layer.
        let pages = (0..5000).map(|at| at % 100 * (1 << 24) + at / 100 * 4096);
        assert!(worth(&list(&mut pages.into_iter())), "pages apart");
        assert!(!worth(&list(&mut (0..5000).map(|at| at * 7919 % 5000 * 9000))), "apart");
        assert!(!worth(&[]));
    }
}
