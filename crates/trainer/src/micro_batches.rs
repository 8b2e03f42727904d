//! Cutting an optimizer batch into micro-batches whose samples have similar lengths.
//!
//! Invariants:
//! * Every sample is in exactly one micro-batch.
//! * The cut is a function of the samples' lengths and of the limits of a micro-batch alone.
//! * Which samples share a micro-batch never changes the mathematics: the loss is divided by the target tokens of the whole
//!   optimizer batch, and dropout is keyed by a sample's index in the uncut batch.
//!
//! The longest samples come first. So a batch that does not fit fails at the start of a step, and later micro-batches reuse the
//! memory of the first.

/// The indices of each micro-batch's samples, `lengths[i]` being (source, target) tokens of sample `i`.
///
/// # Panics
/// If `micro_batch_samples` is 0.
pub fn cut(lengths: &[(usize, usize)], micro_batch_samples: usize) -> Vec<Vec<usize>> {
    assert!(micro_batch_samples > 0, "a micro-batch holds at least one sample");
    longest_first(lengths).chunks(micro_batch_samples).map(<[usize]>::to_vec).collect()
}

/// The indices of each micro-batch's samples. Each has as many as `fits(samples, longest)` admits, and at least one.
///
/// `fits` is given the number of samples and the longest source and target among them. If some samples fit,
/// fewer or shorter ones must fit, too.
pub fn cut_within(lengths: &[(usize, usize)], fits: &dyn Fn(usize, (usize, usize)) -> bool) -> Vec<Vec<usize>> {
    let order = longest_first(lengths);
    let mut left = order.as_slice();
    let mut micro_batches = Vec::new();
    while !left.is_empty() {
        // The longest source and target of the first sample, of the first two, and so on.
        let prefixes: Vec<(usize, (usize, usize))> = (1..)
            .zip(left)
            .scan((0, 0), |longest, (samples, &i)| {
                *longest = (longest.0.max(lengths[i].0), longest.1.max(lengths[i].1));
                Some((samples, *longest))
            })
            .collect();
        let samples = prefixes.partition_point(|&(samples, longest)| fits(samples, longest)).max(1);
        let (micro_batch, rest) = left.split_at(samples);
        micro_batches.push(micro_batch.to_vec());
        left = rest;
    }
    micro_batches
}

fn longest_first(lengths: &[(usize, usize)]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    // Stable: samples of one length stay in the order of the batch.
    order.sort_by_key(|&i| std::cmp::Reverse(lengths[i].0 + lengths[i].1));
    order
}

/// Source and target positions that a micro-batch computes, padding included.
pub fn padded_tokens(lengths: &[(usize, usize)], samples: &[usize]) -> u64 {
    let longest =
        |length: fn(&(usize, usize)) -> usize| samples.iter().map(|&i| length(&lengths[i])).max().unwrap_or(0);
    (samples.len() * (longest(|l| l.0) + longest(|l| l.1))) as u64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn samples_are_sorted_by_length_longest_first_and_ties_keep_their_order() {
        let lengths = [(1, 1), (5, 5), (3, 2), (5, 5), (2, 3)];
        assert_eq!(cut(&lengths, 2), [vec![1, 3], vec![2, 4], vec![0]]);
        assert_eq!(padded_tokens(&lengths, &[2, 4]), 2 * (3 + 3));
    }

    #[test]
    fn a_batch_without_samples_has_no_micro_batches() {
        assert!(cut(&[], 4).is_empty());
        assert!(cut_within(&[], &|_, _| true).is_empty());
    }

    #[test]
    fn short_samples_share_a_micro_batch_and_long_ones_have_their_own() {
        let lengths = [(2, 2), (9, 9), (2, 2), (30, 30), (2, 1), (2, 2), (8, 9)];
        let cut = cut_within(&lengths, &|samples, (source, target)| samples * (source + target) <= 36);
        // 60 tokens fit nowhere and still are a micro-batch; 2 x 18 fit exactly.
        assert_eq!(cut, [vec![3], vec![1, 6], vec![0, 2, 5, 4]]);
    }

    proptest! {
        #[test]
        fn every_sample_is_in_exactly_one_micro_batch(lengths in proptest::collection::vec((0usize..50, 0usize..50), 0..40), size in 1usize..12) {
            let mut seen: Vec<usize> = cut(&lengths, size).into_iter().flatten().collect();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..lengths.len()).collect::<Vec<_>>());
            let fits = |samples: usize, (s, t): (usize, usize)| samples * (s + t) <= 7 * size;
            let cut = cut_within(&lengths, &fits);
            for samples in &cut {
                prop_assert!(samples.len() == 1 || padded_tokens(&lengths, samples) <= 7 * size as u64);
            }
            let mut seen: Vec<usize> = cut.into_iter().flatten().collect();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..lengths.len()).collect::<Vec<_>>());
        }
    }
}
