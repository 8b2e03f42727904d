//! The processes that train one model together, as the planner counts them.

use trainer::Sharding;

use crate::rounding::significant;

/// One of several processes that train together. The default is a single process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Processes {
    /// The number of processes.
    pub number: usize,
    /// The most shards of a batch that one process has.
    pub max_shards: usize,
    /// The most sums of a gradient that one process sends.
    pub sent_sums: usize,
    /// Bytes that are sent and received at a time in the host's memory.
    pub buffers: u64,
    /// Bytes that each card receives at a time, if cards send tensors to each other directly (NCCL). `None`: tensors go through the host.
    pub between_cards: Option<u64>,
    /// Sums of a gradient that exist at a time. Each is over other shards of the batch.
    pub gradient_sums: usize,
    /// Whether each shard of a batch is summed by itself, so that the bits do not depend on the number of processes.
    pub closes_shards: bool,
    /// The number of processes among which the values of [`Processes::sharding`] are divided.
    pub owners: usize,
    /// The values that are divided among processes.
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
    /// A measured rate, rounded to halves of powers of two. Otherwise the noise of a measurement could change a plan.
    pub fn measured(bits_per_second: f64) -> Self {
        let rounded = ((bits_per_second.max(1.0).log2() * 2.0).round() / 2.0).exp2();
        Self { bits_per_second: significant(rounded) }
    }
}

impl Processes {
    /// Shards whose gradients a process sums one after the other.
    pub(crate) fn shards_of_a_process(&self) -> usize {
        if self.closes_shards { self.max_shards } else { 1 }
    }
}

impl Default for Processes {
    fn default() -> Self {
        Self {
            number: 1,
            max_shards: 1,
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
