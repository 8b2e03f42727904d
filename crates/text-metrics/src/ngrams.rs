//! Runs of items, counted.

use std::collections::HashMap;
use std::hash::Hash;

/// How many runs of `n` items each list has, and how many they share, each as often as both have it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Overlap {
    pub(crate) hypothesis: u64,
    pub(crate) reference: u64,
    pub(crate) matches: u64,
}

pub(crate) fn overlap<T: Eq + Hash>(hypothesis: &[T], reference: &[T], n: usize) -> Overlap {
    let mut available: HashMap<&[T], u64> = HashMap::new();
    let mut overlap = Overlap::default();
    for ngram in reference.windows(n) {
        *available.entry(ngram).or_default() += 1;
        overlap.reference += 1;
    }
    for ngram in hypothesis.windows(n) {
        overlap.hypothesis += 1;
        // Each run of the reference can be matched once: the clipped count.
        if let Some(count) = available.get_mut(ngram)
            && *count > 0
        {
            *count -= 1;
            overlap.matches += 1;
        }
    }
    overlap
}
