//! What follows from samples: comparisons of mean times.

use super::{Sample, Way};

/// What differs by less than this is taken as equal.
const NOISE: f64 = 1.02;

/// The values of one knob whose mean time, over all shapes, is about the best one's.
pub(super) fn good_enough<T: Copy + PartialEq>(
    samples: &[Sample],
    knob: impl Fn(&Sample) -> T,
) -> Vec<T> {
    let mut means: Vec<(T, f64)> = Vec::new();
    for value in samples.iter().map(&knob) {
        if means.iter().all(|(known, _)| *known != value) {
            means.push((value, mean(samples.iter().filter(|sample| knob(sample) == value))));
        }
    }
    let best = means.iter().map(|(_, mean)| *mean).fold(f64::INFINITY, f64::min);
    let near = means.into_iter().filter(|(_, mean)| *mean <= best * NOISE);
    near.map(|(value, _)| value).collect()
}

/// The mean times by kernel and by DMA of the samples that count.
pub(super) fn ways(samples: &[Sample], counts: impl Fn(&Sample) -> bool) -> (f64, f64) {
    let of = |way| mean(samples.iter().filter(|sample| sample.way == way && counts(sample)));
    (of(Way::Kernel), of(Way::Dma))
}

/// The geometric mean, in which a short shape counts as much as a long one.
fn mean<'a>(samples: impl Iterator<Item = &'a Sample>) -> f64 {
    let (mut sum, mut count) = (0.0, 0.0f64);
    for sample in samples {
        sum += (sample.nanoseconds.max(1) as f64).ln();
        count += 1.0;
    }
    (sum / count.max(1.0)).exp()
}

/// How many leading items go the first way, all later ones the second, so that the product of all
/// times is least: one odd sample moves no threshold. Of equals the fewest.
pub(super) fn split(times: impl Iterator<Item = (f64, f64)>) -> usize {
    let (mut best, mut least, mut cost) = (0, 0.0, 0.0);
    for (index, (first, second)) in times.enumerate() {
        cost += (first / second).ln();
        if cost < least {
            (best, least) = (index + 1, cost);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::Question;

    fn sample(tile_bytes: u64, grid: u32, nanoseconds: u64) -> Sample {
        Sample {
            question: Question::Grid,
            to: "sim:0".into(),
            way: Way::Kernel,
            pieces: 1,
            piece_bytes: 1,
            tile_bytes,
            max_grid_blocks: grid,
            nanoseconds,
        }
    }

    #[test]
    fn values_within_two_percent_of_the_best_are_good_enough() {
        let samples = [(16, 2000), (32, 1019), (64, 1000), (128, 1021)];
        let samples = samples.map(|(grid, time)| sample(1, grid, time));
        assert_eq!(good_enough(&samples, |sample| sample.max_grid_blocks), [32, 64]);
    }

    #[test]
    fn every_shape_counts_as_much_as_another_however_long_it_takes() {
        // Twice as quick in the short shape outweighs a tenth in the long one.
        let samples = [(4, 100), (8, 200), (4, 110_000), (8, 100_000)];
        let samples = samples.map(|(tile, time)| sample(tile, 1, time));
        assert_eq!(good_enough(&samples, |sample| sample.tile_bytes), [4]);
    }

    #[test]
    fn a_threshold_is_where_the_ways_cross_and_one_odd_sample_does_not_move_it() {
        let at = |times: &[(f64, f64)]| split(times.iter().copied());
        assert_eq!(at(&[(1.0, 9.0), (2.0, 9.0), (9.0, 3.0), (9.0, 1.0)]), 2);
        assert_eq!(at(&[(1.0, 9.0), (9.1, 9.0), (1.0, 3.0), (9.0, 1.0)]), 3, "odd in the middle");
        assert_eq!(at(&[(2.0, 1.0), (3.0, 1.0)]), 0, "never the first way");
        assert_eq!(at(&[(1.0, 2.0), (1.0, 3.0)]), 2, "always the first way");
        assert_eq!(at(&[(1.0, 1.0)]), 0, "equal");
    }
}
