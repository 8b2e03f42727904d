//! The processes that train one model together, as a plan counts them.

use trainer::Sharding;

/// One of several processes that train together. The default is one alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Processes {
    /// How many they are.
    pub number: usize,
    /// The most shards of a batch that one of them has.
    pub most_shards: usize,
    /// The most sums of a gradient that one of them sends.
    pub sent_sums: usize,
    /// Bytes that are sent and received at a time.
    pub buffers: u64,
    /// Sums of a gradient that exist at a time, each of other shards of the batch.
    pub gradient_sums: usize,
    /// Whether each shard of a batch is summed by itself, so that the bits do not depend on the number of processes.
    pub closes_shards: bool,
    /// How many deal out among them what [`Processes::sharding`] says.
    pub owners: usize,
    /// What each holds of what all of them need.
    pub sharding: Sharding,
}

impl Default for Processes {
    fn default() -> Self {
        Self {
            number: 1,
            most_shards: 1,
            sent_sums: 1,
            buffers: 0,
            gradient_sums: 1,
            closes_shards: false,
            owners: 1,
            sharding: Sharding::None,
        }
    }
}
