use kvferry_engine::{Op, Range, RangeError, Side};

/// Refuses a list that writes a byte twice: operations on several connections have no order.
pub(super) fn refuse_overlaps(op: Op, ranges: &[Range]) -> Result<(), RangeError> {
    let (side, start): (Side, fn(&Range) -> u64) = match op {
        Op::Write => (Side::Remote, |range| range.remote),
        Op::Read => (Side::Local, |range| range.local),
    };
    let mut order: Vec<usize> = (0..ranges.len()).filter(|&at| ranges[at].len > 0).collect();
    order.sort_unstable_by_key(|&at| start(&ranges[at]));
    let mut last: Option<usize> = None;
    for at in order {
        if let Some(before) = last
            && start(&ranges[at]) - start(&ranges[before]) < ranges[before].len
        {
            let (first, second) = (before.min(at), before.max(at));
            let addr = start(&ranges[at]);
            return Err(RangeError::DestinationsOverlap { first, second, side, addr });
        }
        last = Some(at);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_that_two_ranges_write_is_found_on_the_side_that_is_written() {
        let range = |local, remote, len| Range { local, remote, len };
        let list = [range(0, 100, 10), range(0, 50, 20), range(0, 55, 0), range(0, 70, 30)];
        assert_eq!(refuse_overlaps(Op::Write, &list), Ok(()));
        let overlap = |side, first, second, addr| {
            Err(RangeError::DestinationsOverlap { first, second, side, addr })
        };
        assert_eq!(refuse_overlaps(Op::Read, &list), overlap(Side::Local, 0, 1, 0));
        let list = [range(0, 100, 10), range(50, 50, 51)];
        assert_eq!(refuse_overlaps(Op::Write, &list), overlap(Side::Remote, 0, 1, 100));
        assert_eq!(refuse_overlaps(Op::Read, &list), Ok(()));
    }
}
