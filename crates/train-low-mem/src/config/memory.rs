//! `memory.*`: the budgets, and the values that are not the planner's to choose.

use planner::{Pins, Value, Values as Allowed};

use super::pin;
use super::values::{self, Values};
use crate::failure::{Failure, Outcome};

/// `memory.*`. `None` is `auto`: the planner decides.
#[derive(Clone, Debug)]
pub struct Memory {
    /// Bytes that the process may hold.
    pub budget: Option<u64>,
    /// Bytes of device memory.
    pub device_budget: Option<u64>,
    /// Levers that have a value.
    pub pins: Pins,
    /// Bytes that the run may write to files in place of memory, where no pin says so.
    pub disk_writes: u64,
    /// Steps after which freed memory goes back to the system; 0: never.
    pub clear_cache_every_steps: Option<u64>,
}

impl Memory {
    /// As the values say.
    pub fn of(values: &Values) -> Memory {
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
            clear_cache_every_steps: values.integer("memory.clear_cache_every_steps"),
        }
    }

    /// Refuses pins that contradict each other.
    pub fn check(&self, values: &Values) -> Outcome<()> {
        let Some(lever) = self.pins.contradiction() else { return Ok(()) };
        let key = format!("memory.{lever}");
        Err(Failure::usage(format!(
            "`{key}` ({}) works with layer-major accumulation only, but `memory.accumulation` is \"micro-batch-major\"",
            values.origin(&key)
        ))
        .hint("use `--set memory.accumulation=layer-major`, or remove one of the two"))
    }
}
