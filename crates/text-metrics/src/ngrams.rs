//! Counts n-grams.

use std::collections::HashMap;
use std::hash::Hash;

/// The number of n-grams of each list, and of their common n-grams (the smaller count of the two lists).
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
        // Each n-gram of the reference can be matched once: the clipped count.
        if let Some(count) = available.get_mut(ngram)
            && *count > 0
        {
            *count -= 1;
            overlap.matches += 1;
        }
    }
    overlap
}
