//! Where pieces lie: each takes the smallest free place that holds it, and free places that touch are one.

use std::collections::{BTreeMap, BTreeSet};

/// Free places. They and their sizes are multiples of the caller's alignment.
#[derive(Debug, Default)]
pub(super) struct Places {
    /// The size of each free place.
    free: BTreeMap<u64, u64>,
    /// The same by size: of places of one size the first is taken.
    by_size: BTreeSet<(u64, u64)>,
}

impl Places {
    /// Takes `bytes` bytes that lie together.
    pub(super) fn take(&mut self, bytes: u64) -> Option<u64> {
        let &(size, place) = self.by_size.range((bytes, 0)..).next()?;
        self.remove(place, size);
        if size > bytes {
            self.insert(place + bytes, size - bytes);
        }
        Some(place)
    }

    /// Gives a place back, or a new one.
    pub(super) fn give_back(&mut self, mut place: u64, mut bytes: u64) {
        if let Some(&size) = self.free.get(&(place + bytes)) {
            self.remove(place + bytes, size);
            bytes += size;
        }
        if let Some((&before, &size)) = self.free.range(..place).next_back()
            && before + size == place
        {
            self.remove(before, size);
            (place, bytes) = (before, bytes + size);
        }
        self.insert(place, bytes);
    }

    /// Takes these bytes, which lie in one free place, for good.
    pub(super) fn cut(&mut self, from: u64, bytes: u64) {
        let found = self.free.range(..=from).next_back().map(|(&place, &size)| (place, size));
        let (place, size) = found.filter(|(place, size)| from + bytes <= place + size).expect("free bytes");
        self.remove(place, size);
        if place < from {
            self.insert(place, from - place);
        }
        if from + bytes < place + size {
            self.insert(from + bytes, place + size - (from + bytes));
        }
    }

    /// Whether these bytes lie in one free place.
    pub(super) fn are_free(&self, from: u64, bytes: u64) -> bool {
        self.free.range(..=from).next_back().is_some_and(|(place, size)| from + bytes <= place + size)
    }

    /// Free bytes before a place that end there.
    pub(super) fn free_before(&self, place: u64) -> u64 {
        let before = self.free.range(..place).next_back();
        before.filter(|(from, size)| **from + **size == place).map_or(0, |(_, &size)| size)
    }

    fn insert(&mut self, place: u64, size: u64) {
        self.free.insert(place, size);
        self.by_size.insert((size, place));
    }

    fn remove(&mut self, place: u64, size: u64) {
        self.free.remove(&place);
        self.by_size.remove(&(size, place));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_takes_the_smallest_place_that_holds_it_and_places_that_touch_become_one() {
        let mut places = Places::default();
        assert_eq!(places.take(1), None);
        places.give_back(0, 100);
        let taken: Vec<u64> = [30, 10, 20, 10, 30].map(|bytes| places.take(bytes).unwrap()).to_vec();
        assert_eq!(taken, [0, 30, 40, 60, 70]);
        assert_eq!((places.take(1), places.free_before(100)), (None, 0));
        places.give_back(0, 30);
        places.give_back(40, 20);
        // Fifteen of the smaller place, and not of the first.
        assert_eq!(places.take(15), Some(40));
        assert_eq!(places.take(21), Some(0));
        places.give_back(0, 21);
        places.give_back(40, 15);
        places.give_back(30, 10);
        assert_eq!(places.take(60), Some(0), "three places became one");
        places.give_back(70, 30);
        assert_eq!((places.free_before(100), places.free_before(99)), (30, 0));
        assert!(places.are_free(70, 30) && !places.are_free(70, 31) && !places.are_free(69, 2));
        places.cut(80, 10);
        assert_eq!(
            (places.take(11), places.take(10), places.take(10), places.take(1)),
            (None, Some(70), Some(90), None)
        );
    }

    #[test]
    fn pieces_lie_apart_and_all_bytes_come_back() {
        let (mut places, mut live, mut bits, mut end) = (Places::default(), BTreeMap::new(), 3u64, 0);
        for _ in 0..5000 {
            bits = crate::keys::mix(bits);
            let bytes = 1 + bits % 97;
            if bits % 5 < 3 {
                let place = places.take(bytes).unwrap_or_else(|| {
                    places.give_back(end, bytes);
                    end += bytes;
                    places.take(bytes).expect("there is as much now")
                });
                live.insert(place, bytes);
            } else if let Some(&place) = live.keys().nth(bits as usize % live.len().max(1)) {
                places.give_back(place, live.remove(&place).unwrap());
            }
            let mut all: Vec<(u64, u64)> =
                live.iter().chain(&places.free).map(|(&place, &size)| (place, size)).collect();
            all.sort_unstable();
            let covered = all.iter().fold(0, |covered, (place, size)| {
                assert_eq!(covered, *place, "no byte is lost, and none is had twice");
                place + size
            });
            assert_eq!((covered, places.by_size.len()), (end, places.free.len()));
        }
        for (place, bytes) in live {
            places.give_back(place, bytes);
        }
        assert_eq!(places.free_before(end), end);
    }
}
