//! Keyed randomness: every random choice of the loader is a pure function of the key that names it.
//!
//! A [`Key`] is derived from the run's seed and from words that name the choice (epoch, row, purpose). Nothing
//! here has hidden state, so any choice can be made again at any time, by any thread, in any order.

/// Names one random choice, or the start of one stream of choices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key(u64);

impl Key {
    /// The key of a run.
    pub fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    /// The key for one thing under this key: an epoch of the run, a row of the epoch, a purpose of the row.
    pub fn derive(self, word: u64) -> Self {
        Self(mix(self.0 ^ mix(word.wrapping_add(GOLDEN))))
    }

    /// The stream of numbers that starts here.
    pub fn stream(self) -> Stream {
        Stream { state: self.0 }
    }
}

/// A stream of random numbers: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
/// OOPSLA 2014).
pub struct Stream {
    state: u64,
}

impl Stream {
    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN);
        mix(self.state)
    }

    /// A number in `0..bound`, without bias: Lemire, "Fast random integer generation in an interval", 2019.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "nothing to choose from");
        loop {
            let wide = u128::from(self.bits()) * u128::from(bound);
            if wide as u64 >= bound.wrapping_neg() % bound {
                return (wide >> 64) as u64;
            }
        }
    }
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64's finalizer: a bijection of 64 bits in which every input bit reaches every output bit.
pub(crate) fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_below_a_bound_are_uniform() {
        for bound in [1, 2, 3, 10, 17] {
            let mut counts = vec![0_u32; bound];
            let mut stream = Key::new(7).derive(bound as u64).stream();
            let draws = 20_000 * bound;
            (0..draws).for_each(|_| counts[stream.below(bound as u64) as usize] += 1);
            assert!(counts.iter().all(|&count| count.abs_diff(20_000) < 1000), "{counts:?}");
        }
    }

    #[test]
    fn keys_of_different_things_differ() {
        let mut keys: Vec<u64> =
            (0..100).flat_map(|seed| (0..100).map(move |word| Key::new(seed).derive(word).0)).collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), 10_000);
    }
}
