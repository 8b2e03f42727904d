//! `parallel.*`: several processes that train together.

use planner::Network;
use trainer::Sharding;

use super::{Config, Values};
use crate::failure::{Failure, Outcome};

/// How several processes divide the work.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Division {
    /// Parts of a batch whose gradients are summed separately; `None`: one for each process.
    pub virtual_shards: Option<usize>,
    /// The values that are divided among processes.
    pub sharding: Sharding,
    /// The rate of the network between processes, if known.
    pub network: Option<Network>,
    /// Whether several processes compute on one card. There is no key for it: it is found when devices are opened.
    pub shares_cards: bool,
}

impl Division {
    pub(super) fn from_values(values: &Values) -> Self {
        let sharding = match values.text("parallel.shard").as_deref() {
            Some("optimizer") => Sharding::Optimizer,
            Some("gradients") => Sharding::Gradients,
            Some("weights") => Sharding::Weights,
            _ => Sharding::None,
        };
        let virtual_shards = values.integer("parallel.virtual_shards");
        let network = values.number("parallel.network_mbit").map(|mbit| Network { bits_per_second: 1e6 * mbit });
        let virtual_shards = virtual_shards.and_then(|count| usize::try_from(count).ok());
        Self { virtual_shards, sharding, network, shares_cards: false }
    }
}

/// Rules for a batch that is divided among processes.
pub(super) fn check(config: &Config) -> Outcome<()> {
    let on_disk = config.memory.pins.value("gradient_offload").is_some_and(|value| value.word() == Some("disk"));
    if config.parallel.virtual_shards.is_some_and(|shards| shards > 1) && on_disk {
        return Err(Failure::usage(
            "`parallel.virtual_shards` sums the gradients of each shard by themselves, and `memory.gradient_offload = \"disk\"` those of a layer",
        )
        .hint("leave one of them out; without virtual shards losses agree to rounding"));
    }
    let sharding = config.parallel.sharding;
    if sharding != Sharding::None && config.memory.pins.value("optimizer_offload").is_some() {
        return Err(Failure::usage(format!(
            "`parallel.shard = \"{}\"` keeps each process' share of the state in memory",
            sharding.word()
        ))
        .hint("leave `memory.optimizer_offload` out"));
    }
    if sharding == Sharding::Weights
        && config.memory.pins.value("weight_offload").is_some_and(|value| value.word() == Some("disk"))
    {
        return Err(Failure::usage(
            "`parallel.shard = \"weights\"` keeps weights in the memory of the processes, and `memory.weight_offload = \"disk\"` in files",
        )
        .hint("leave one of them out"));
    }
    let pinned =
        config.memory.pins.value("accumulation").is_some_and(|value| value.word() == Some("micro-batch-major"));
    if sharding == Sharding::Weights && pinned && config.parallel.virtual_shards.is_none() {
        return Err(Failure::usage(
            "`parallel.shard = \"weights\"` brings the weights of a layer once, and `memory.accumulation = \"micro-batch-major\"` for every micro-batch",
        )
        .hint("leave `memory.accumulation` out"));
    }
    Ok(())
}
