//! The prices of a run, and their source.

use candle_core::DType;
use memory_policy::MemorySpace;
use planner::Prices;

use crate::config::{Config, PricesFrom};
use crate::failure::{Failure, Outcome};

/// The prices of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Priced {
    /// The prices for the planner.
    pub prices: Prices,
    /// The time of a step in bf16 relative to f32 on this machine, if measured.
    pub bf16_over_f32: Option<f64>,
    /// Their origin, for people.
    pub origin: &'static str,
}

impl Priced {
    /// The prices that the config gives, or else the built-in prices.
    pub fn without_measuring(from: PricesFrom, place: MemorySpace, activations: DType) -> Self {
        match from {
            PricesFrom::Given(prices) => Self { prices, bf16_over_f32: None, origin: "given" },
            _ => Self { prices: Prices::at(place, activations), bf16_over_f32: None, origin: "built in" },
        }
    }

    /// The same with prices that another process measured.
    #[must_use]
    pub fn with(self, prices: Prices) -> Self {
        Self { prices, ..self }
    }

    /// These prices for the config, in place of the word that asked for them. So the config's file plans the same run again. `None` if
    /// the config has prices.
    ///
    /// # Errors
    /// TOML cannot represent a price.
    pub fn noted(&self, config: &Config) -> Outcome<Option<(toml::Value, &'static str)>> {
        if matches!(config.memory.prices, PricesFrom::Given(_)) {
            return Ok(None);
        }
        let table = toml::Value::try_from(self.prices);
        let table = table.map_err(|error| Failure::internal(format!("prices: {error}")))?;
        Ok(Some((table, self.origin)))
    }
}
