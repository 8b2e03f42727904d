//! `memory.*`: the budgets, and fixed values of levers.

use planner::{Pins, Prices, Value, Values as Allowed};

use super::pin;
use super::values::{self, Origin, Values};
use crate::failure::{Failure, Outcome};

/// `memory.*`. `None` is `auto`: the planner decides.
#[derive(Clone, Debug)]
pub struct Memory {
    /// Bytes that the process may hold.
    pub budget: Option<u64>,
    /// Bytes of device memory.
    pub device_budget: Option<u64>,
    /// Levers with a fixed value.
    pub pins: Pins,
    /// Bytes that the run may write to files in place of memory, unless a pin asks for files.
    pub disk_writes: u64,
    /// The source of the prices of levers.
    pub prices: PricesFrom,
    /// Steps between two returns of freed memory to the system; 0: never.
    pub clear_cache_every_steps: Option<u64>,
}

/// The source of prices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PricesFrom {
    /// This machine, measured once and kept.
    Measured,
    /// This machine, measured now.
    MeasuredAgain,
    /// The program.
    BuiltIn,
    /// The config.
    Given(Prices),
}

/// The smallest accepted budget: no run fits in less. A smaller number probably lacks its unit.
const MIN_BUDGET: u64 = 1 << 20;

/// The variable that selects the source of prices if the config does not.
const PRICES_VARIABLE: &str = "LOW_MEM_T5_PRICES";

impl PricesFrom {
    /// The source that the environment selects, for use without a config.
    pub fn of_environment() -> PricesFrom {
        PricesFrom::of_word(std::env::var(PRICES_VARIABLE).ok().as_deref())
    }

    fn of_word(word: Option<&str>) -> PricesFrom {
        match word {
            Some("built-in") => PricesFrom::BuiltIn,
            Some("measure-again") => PricesFrom::MeasuredAgain,
            _ => PricesFrom::Measured,
        }
    }

    /// The source in these values; `None` for a table that has no valid prices.
    fn from_values(values: &Values) -> Option<PricesFrom> {
        let setting = values.setting("memory.prices");
        if let toml::Value::Table(table) = &setting.value {
            let prices: Prices = table.clone().try_into().ok()?;
            return prices.are_sound().then_some(PricesFrom::Given(prices));
        }
        Some(match setting.origin {
            Origin::Default => PricesFrom::of_environment(),
            _ => PricesFrom::of_word(setting.value.as_str()),
        })
    }
}

impl Memory {
    /// The settings in these values.
    pub fn from_values(values: &Values) -> Memory {
        let bytes = |name: &str| values.text(name).and_then(|text| values::parse_size(&text));
        let value = |lever: &str, allowed: Allowed| match (format!("memory.{lever}"), allowed) {
            (key, Allowed::Words(_)) => values.text(&key).and_then(|text| allowed.word(&text)),
            (key, Allowed::Count(..) | Allowed::Blocks(_)) => pin(values, &key).map(Value::Count),
        };
        let pins =
            planner::lever_of_a_pin().fold(Pins::default(), |pins, (lever, allowed, _)| match value(lever, allowed) {
                Some(value) => pins.with(lever, value),
                None => pins,
            });
        Memory {
            budget: bytes("memory.budget"),
            device_budget: bytes("memory.device_budget"),
            pins,
            disk_writes: bytes("memory.disk_writes").unwrap_or(0),
            prices: PricesFrom::from_values(values).unwrap_or(PricesFrom::Measured),
            clear_cache_every_steps: values.integer("memory.clear_cache_every_steps"),
        }
    }

    /// Refuses pins that contradict each other, and a table without valid prices.
    pub fn check(&self, values: &Values) -> Outcome<()> {
        if PricesFrom::from_values(values).is_none() {
            let setting = values.setting("memory.prices");
            return Err(Failure::usage(format!(
                "{}: `memory.prices`: expected a table with every price, none of them negative, got {}",
                setting.origin, setting.value
            ))
            .hint("copy the line from the resolved.toml of a run, or use `--set memory.prices=measured`"));
        }
        if let Some(bytes) = self.budget.filter(|bytes| *bytes < MIN_BUDGET) {
            return Err(Failure::usage(format!(
                "{}: `memory.budget`: expected at least 1 MiB, got {bytes} bytes",
                values.origin("memory.budget")
            ))
            .hint(format!("a number without a unit counts bytes; `{bytes}GiB` or `{bytes}MiB` has one")));
        }
        let Some(lever) = self.pins.contradiction() else { return Ok(()) };
        let key = format!("memory.{lever}");
        Err(Failure::usage(format!(
            "`{key}` ({}) works with layer-major accumulation only, but `memory.accumulation` is \"micro-batch-major\"",
            values.origin(&key)
        ))
        .hint("use `--set memory.accumulation=layer-major`, or remove one of the two"))
    }
}
