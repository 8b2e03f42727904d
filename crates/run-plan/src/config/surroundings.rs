//! [`Surroundings`]: what a run finds out about its machine and its other processes, beside what its config says.

use planner::Network;
use toml::Value;

use super::{Config, Origin};
use crate::failure::Outcome;

/// What a run found out, where the config leaves it open.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// Whether processes compute on the same card.
    pub shares_cards: bool,
    /// The network between its processes.
    pub network: Option<Network>,
    /// This process's share of the memory of its host.
    pub budget: Option<u64>,
    /// The prices of its machine, and who says so.
    pub prices: Option<(Value, &'static str)>,
}

impl Config {
    /// The config of the run: as given, completed by what was found.
    ///
    /// # Errors
    /// The prices are not a table of prices.
    pub fn completed(mut self, found: Surroundings) -> Outcome<Self> {
        self.parallel.shares_cards = found.shares_cards;
        self.parallel.network = self.parallel.network.or(found.network);
        self.memory.budget = self.memory.budget.or(found.budget);
        if let Some((prices, origin)) = found.prices {
            self.values.set("memory.prices", prices, Origin::Run(origin))?;
        }
        Ok(self)
    }
}
