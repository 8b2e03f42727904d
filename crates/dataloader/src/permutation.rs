//! A keyed pseudo-random permutation of `0..items`, evaluated at any index in O(1) time and memory.
//!
//! A Feistel network permutes the smallest power of two that holds the items. An image outside `0..items` is permuted
//! again until it falls inside ("cycle walking"), which keeps the map a bijection. The domain has less than twice the
//! items (at least four), so less than one further pass is needed on average.
//!
//! Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section 3 (cycle walking) and
//! section 4 (Feistel); Luby and Rackoff, "How to construct pseudorandom permutations", 1988. Only statistical quality
//! is required here, not secrecy.

use crate::random::{Key, mix};

/// Even, so that both halves change equally often. Four rounds would suffice for large domains; small ones need more.
const ROUNDS: usize = 8;

/// The permutation. It is cheap to make, so callers need not keep it.
#[derive(Clone, Debug)]
pub struct Permutation {
    items: u64,
    low_bits: u32,
    low_mask: u64,
    high_mask: u64,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The permutation of `0..items` that `key` names.
    ///
    /// # Panics
    /// If there is nothing to permute or there are more than 2^63 items.
    pub fn new(items: u64, key: Key) -> Self {
        assert!(items > 0 && items <= 1 << 63, "cannot permute {items} items");
        let bits = (u64::BITS - (items - 1).leading_zeros()).max(2);
        let (low_bits, high_bits) = (bits / 2, bits - bits / 2);
        let mut stream = key.stream();
        let keys = std::array::from_fn(|_| stream.bits());
        Self { items, low_bits, low_mask: (1 << low_bits) - 1, high_mask: (1 << high_bits) - 1, keys }
    }

    /// The image of `index`.
    ///
    /// # Panics
    /// If `index` is not below `items`.
    pub fn at(&self, index: u64) -> u64 {
        assert!(index < self.items, "index {index} of {} items", self.items);
        let mut image = self.forward(index);
        while image >= self.items {
            image = self.forward(image);
        }
        image
    }

    /// The index whose image is `image`: the inverse of [`at`](Self::at).
    ///
    /// # Panics
    /// If `image` is not below `items`.
    pub fn index_of(&self, image: u64) -> u64 {
        assert!(image < self.items, "image {image} of {} items", self.items);
        let mut index = self.backward(image);
        while index >= self.items {
            index = self.backward(index);
        }
        index
    }

    fn forward(&self, value: u64) -> u64 {
        let (mut high, mut low) = (value >> self.low_bits, value & self.low_mask);
        for pair in self.keys.chunks_exact(2) {
            high ^= mix(low ^ pair[0]) & self.high_mask;
            low ^= mix(high ^ pair[1]) & self.low_mask;
        }
        (high << self.low_bits) | low
    }

    fn backward(&self, value: u64) -> u64 {
        let (mut high, mut low) = (value >> self.low_bits, value & self.low_mask);
        for pair in self.keys.chunks_exact(2).rev() {
            low ^= mix(high ^ pair[1]) & self.low_mask;
            high ^= mix(low ^ pair[0]) & self.high_mask;
        }
        (high << self.low_bits) | low
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn images(items: u64, key: u64) -> Vec<u64> {
        let permutation = Permutation::new(items, Key::new(key));
        (0..items).map(|index| permutation.at(index)).collect()
    }

    #[test]
    fn every_small_size_is_permuted() {
        for items in 1..=130 {
            let mut images = images(items, items);
            images.sort_unstable();
            assert!(images.into_iter().eq(0..items), "{items} items");
        }
    }

    #[test]
    fn every_order_of_three_items_occurs() {
        let orders: std::collections::HashSet<_> = (0..200).map(|key| images(3, key)).collect();
        assert_eq!(orders.len(), 6);
    }

    #[test]
    fn an_item_goes_everywhere_equally_often() {
        let items = 20;
        let keys = 20_000;
        for index in [0, 7, 19] {
            let mut counts = vec![0_u32; items as usize];
            (0..keys).for_each(|key| counts[Permutation::new(items, Key::new(key)).at(index) as usize] += 1);
            let expected = keys as u32 / items as u32;
            assert!(counts.iter().all(|count| count.abs_diff(expected) < 200), "item {index}: {counts:?}");
        }
    }

    #[test]
    fn neighbours_do_not_stay_neighbours() {
        let images = images(100_000, 3);
        let near = images.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) <= 100).count();
        assert!((100..320).contains(&near), "{near} of 100,000 pairs; about 200 expected");
    }

    proptest! {
        #[test]
        fn any_size_is_permuted_and_the_inverse_inverts(items in 1_u64..20_000, key: u64) {
            let permutation = Permutation::new(items, Key::new(key));
            let mut seen = vec![false; items as usize];
            for index in 0..items {
                let image = permutation.at(index);
                prop_assert!(!std::mem::replace(&mut seen[image as usize], true));
                prop_assert_eq!(permutation.index_of(image), index);
            }
        }

        #[test]
        fn huge_sizes_stay_in_range_and_invert(items in 1_u64..=1 << 63, key: u64, index: u64) {
            let permutation = Permutation::new(items, Key::new(key));
            let image = permutation.at(index % items);
            prop_assert!(image < items);
            prop_assert_eq!(permutation.index_of(image), index % items);
        }
    }
}
