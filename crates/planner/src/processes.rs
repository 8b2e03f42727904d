//! The processes that train one model together, as a plan counts them.

use trainer::Sharding;

use crate::rounding::significant;

/// One of several processes that train together. The default is one alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Processes {
    /// How many they are.
    pub number: usize,
    /// The most shards of a batch that one of them has.
    pub most_shards: usize,
    /// The most sums of a gradient that one of them sends.
    pub sent_sums: usize,
    /// Bytes that are sent and received at a time in the host's memory.
    pub buffers: u64,
    /// Where cards send each other tensors themselves (NCCL): the bytes on each of them that are received at a time. None: they go through
    /// the host.
    pub between_cards: Option<u64>,
    /// Sums of a gradient that exist at a time, each of other shards of the batch.
    pub gradient_sums: usize,
    /// Whether each shard of a batch is summed by itself, so that the bits do not depend on the number of processes.
    pub closes_shards: bool,
    /// How many deal out among them what [`Processes::sharding`] says.
    pub owners: usize,
    /// What each holds of what all of them need.
    pub sharding: Sharding,
    /// The network between them.
    pub network: Network,
}

/// A network between processes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// The rate at which a process sends to all others, in each direction.
    pub bits_per_second: f64,
}

impl Default for Network {
    fn default() -> Self {
        Self { bits_per_second: 1e10 }
    }
}

impl Network {
    /// Of a measured rate: rounded to halves of powers of two, because what decides a plan is not to hang on the noise of a measurement.
    pub fn measured(bits_per_second: f64) -> Self {
        let rounded = ((bits_per_second.max(1.0).log2() * 2.0).round() / 2.0).exp2();
        Self { bits_per_second: significant(rounded) }
    }
}

impl Processes {
    /// Shards whose gradients a process sums one after the other.
    pub(crate) fn shards_of_a_process(&self) -> usize {
        if self.closes_shards { self.most_shards } else { 1 }
    }
}

impl Default for Processes {
    fn default() -> Self {
        Self {
            number: 1,
            most_shards: 1,
            sent_sums: 1,
            buffers: 0,
            between_cards: None,
            gradient_sums: 1,
            closes_shards: false,
            owners: 1,
            sharding: Sharding::None,
            network: Network::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_of_a_measurement_rarely_moves_the_rate_of_a_network() {
        let of = |rate| Network::measured(rate).bits_per_second;
        for (rate, rounded) in [(1e8, 9.49e7), (9e7, 9.49e7), (1e9, 1.07e9), (9.4e9, 8.59e9), (0.0, 1.0)] {
            assert_eq!(of(rate), rounded, "{rate}");
        }
    }
}
