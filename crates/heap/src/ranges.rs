//! Free ranges of memory, as numbers: which range to allocate, and which to return.
//!
//! Invariants: ranges neither overlap nor touch (neighbours are one range); the two orders hold the same
//! ranges; `bytes` is their sum.

use std::collections::{BTreeMap, BTreeSet};

/// Ranges by address and by length.
#[derive(Debug, Default)]
pub struct FreeRanges {
    by_address: BTreeMap<usize, usize>,
    by_length: BTreeSet<(usize, usize)>,
    bytes: usize,
}

impl FreeRanges {
    /// An empty set.
    pub const fn new() -> Self {
        Self { by_address: BTreeMap::new(), by_length: BTreeSet::new(), bytes: 0 }
    }

    /// Returns the sum of all ranges.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds a range, joined with the neighbours that it touches.
    pub fn insert(&mut self, mut start: usize, mut length: usize) {
        if let Some((&before, &before_length)) = self.by_address.range(..start).next_back()
            && before + before_length == start
        {
            self.remove(before, before_length);
            (start, length) = (before, before_length + length);
        }
        if let Some(&after_length) = self.by_address.get(&(start + length)) {
            self.remove(start + length, after_length);
            length += after_length;
        }
        self.by_address.insert(start, length);
        self.by_length.insert((length, start));
        self.bytes += length;
    }

    /// Takes `length` bytes from the shortest range that has them, and returns the address of the first.
    pub fn take(&mut self, length: usize) -> Option<usize> {
        let &(found, start) = self.by_length.range((length, 0)..).next()?;
        self.remove(start, found);
        if found > length {
            self.insert(start + length, found - length);
        }
        Some(start)
    }

    /// Returns the length of the shortest range of at least `length` bytes, or of the longest range if none is long enough.
    pub fn closest(&self, length: usize) -> Option<usize> {
        let fits = self.by_length.range((length, 0)..).next();
        fits.or_else(|| self.by_length.last()).map(|&(found, _)| found)
    }

    /// Takes at most `most` bytes from the shortest range, so that fragments are given up first.
    pub(crate) fn give_up(&mut self, most: usize) -> Option<(usize, usize)> {
        let &(found, start) = self.by_length.first()?;
        self.remove(start, found);
        if found > most {
            self.insert(start + most, found - most);
        }
        Some((start, found.min(most)))
    }

    /// Takes these bytes out if they lie in one range; otherwise returns false.
    pub fn cut(&mut self, start: usize, length: usize) -> bool {
        let found = self.by_address.range(..=start).next_back().map(|(&from, &found)| (from, found));
        let Some((from, found)) = found.filter(|(from, found)| start + length <= from + found) else { return false };
        self.remove(from, found);
        for (start, end) in [(from, start), (start + length, from + found)] {
            if start < end {
                self.insert(start, end - start);
            }
        }
        true
    }

    /// Returns the length of the range that ends at `end`: 0 if there is none.
    pub fn before(&self, end: usize) -> usize {
        let last = self.by_address.range(..end).next_back();
        last.filter(|(start, length)| **start + **length == end).map_or(0, |(_, &length)| length)
    }

    fn remove(&mut self, start: usize, length: usize) {
        self.by_address.remove(&start);
        self.by_length.remove(&(length, start));
        self.bytes -= length;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn free(ranges: &[(usize, usize)]) -> FreeRanges {
        let mut free = FreeRanges::new();
        ranges.iter().for_each(|&(start, length)| free.insert(start, length));
        free
    }

    #[test]
    fn neighbours_become_one_range_from_either_side() {
        let mut free = free(&[(0, 10), (20, 10), (10, 10), (40, 5)]);
        assert_eq!((free.take(30), free.bytes()), (Some(0), 5));
    }

    #[test]
    fn the_shortest_range_that_is_long_enough_is_cut() {
        let mut free = free(&[(0, 100), (200, 30), (300, 20)]);
        assert_eq!(free.take(25), Some(200));
        assert_eq!(free.take(5), Some(225), "what was left of it is the shortest now");
        assert_eq!((free.take(101), free.bytes()), (None, 120));
    }

    #[test]
    fn bytes_of_one_range_are_cut_out_of_it() {
        let mut free = free(&[(70, 30), (200, 10)]);
        assert_eq!([100, 99, 200, 210].map(|end| free.before(end)), [30, 0, 0, 10]);
        assert_eq!([1, 10, 11, 31].map(|length| free.closest(length)), [10, 10, 30, 30].map(Some));
        for (start, length) in [(70, 31), (69, 2), (150, 1), (0, 1)] {
            assert!(!free.cut(start, length), "{start}, {length}");
        }
        assert!(free.cut(80, 10));
        assert_eq!((free.bytes(), free.before(100), free.before(80)), (30, 10, 10));
        assert!(free.cut(200, 10));
        assert_eq!((free.take(11), free.take(10), free.take(10), free.take(1)), (None, Some(70), Some(90), None));
    }

    #[test]
    fn fragments_are_given_up_first_and_no_more_than_asked_for() {
        let mut free = free(&[(0, 100), (200, 30)]);
        assert_eq!(free.give_up(50), Some((200, 30)));
        assert_eq!(free.give_up(50), Some((0, 50)));
        assert_eq!(free.take(50), Some(50));
        assert_eq!(free.give_up(1), None);
    }

    proptest! {
        #[test]
        fn no_byte_is_handed_out_twice_or_lost(calls in proptest::collection::vec((1usize..20, any::<bool>()), 1..60)) {
            const ALL: usize = 256;
            let mut free = free(&[(0, ALL)]);
            let mut taken: Vec<(usize, usize)> = Vec::new();
            for (n, take) in calls {
                if take {
                    if let Some(start) = free.take(n) {
                        prop_assert!(taken.iter().all(|&(s, l)| start + n <= s || s + l <= start));
                        taken.push((start, n));
                    }
                } else if !taken.is_empty() {
                    let (start, length) = taken.swap_remove(n % taken.len());
                    free.insert(start, length);
                }
                prop_assert_eq!(free.bytes() + taken.iter().map(|t| t.1).sum::<usize>(), ALL);
                let listed: Vec<_> = free.by_address.iter().map(|(&start, &length)| (start, length)).collect();
                prop_assert!(listed.windows(2).all(|pair| pair[0].0 + pair[0].1 < pair[1].0));
                prop_assert_eq!(listed.len(), free.by_length.len());
            }
        }
    }
}
