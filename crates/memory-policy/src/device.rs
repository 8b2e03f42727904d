//! Device memory: a second budget. The function that plans the process's own memory plans it, too.
//!
//! A card has its own memory, its own budget and its own rows. A plan must fit both budgets. If a run's tensors are on the host, no row is
//! the device's, and the device's budget limits nothing.

use serde::{Deserialize, Serialize};

use crate::budget::{Budget, DEFAULT_SHARE_PERCENT, headroom};
use crate::layout::{self, Unit};
use crate::{Bytes, CostRow, MemorySnapshot};

/// The memory that bytes are in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemorySpace {
    /// In the process's own memory.
    #[default]
    Host,
    /// In the memory of the device that computes.
    Device,
}

impl MemorySpace {
    pub(crate) fn is_host(&self) -> bool {
        *self == Self::Host
    }
}

/// The memory of a device at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DeviceMemory {
    /// The driver's name for it.
    pub name: String,
    /// Total memory.
    pub total: Bytes,
    /// Free memory.
    pub free: Bytes,
    /// Memory of this process.
    pub used: Bytes,
    /// The most that this process has held.
    #[serde(skip_serializing_if = "is_zero")]
    pub peak: Bytes,
    /// The part of `used` that the allocator holds for tensors, in use or not.
    #[serde(skip_serializing_if = "is_zero")]
    pub pool: Bytes,
    /// The most bytes that the allocator takes beyond a request; zero if unknown.
    #[serde(skip_serializing_if = "is_zero")]
    pub pool_unit: Bytes,
    /// Host memory that the device's libraries take when a step first needs kernels that a small rehearsal did not need. Zero if no library
    /// loads any.
    #[serde(skip_serializing_if = "is_zero")]
    pub kernels_on_host: Bytes,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(bytes: &Bytes) -> bool {
    *bytes == Bytes::ZERO
}

impl DeviceMemory {
    /// The most bytes of it that this process could hold now.
    pub fn ceiling(&self) -> Bytes {
        self.used + self.free
    }
}

/// The budgets of a run. A single [`Budget`] is the process's; the device's is then a share of its free memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budgets {
    /// The budget of the process's own memory.
    pub process: Budget,
    /// The budget of the device's memory.
    pub device: Budget,
}

impl From<Budget> for Budgets {
    fn from(process: Budget) -> Self {
        Self { process, device: Budget::ShareOfAvailable }
    }
}

/// The limit of a plan on the device: unknown if there is neither a budget nor a probe that finds a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceLimit {
    /// The budget in bytes.
    pub budget: Option<Bytes>,
    ceiling: Option<Bytes>,
}

impl DeviceLimit {
    pub fn resolve(now: &MemorySnapshot, budget: Budget) -> Self {
        let ceiling = now.device.as_ref().map(DeviceMemory::ceiling);
        let budget = match budget {
            Budget::Explicit(bytes) => Some(bytes),
            Budget::ShareOfAvailable => ceiling.map(|ceiling| ceiling.percent(DEFAULT_SHARE_PERCENT)),
        };
        Self { budget, ceiling }
    }

    /// Whether a plan with this peak fits. A plan without rows on the device always fits.
    pub fn admits(&self, peak: Bytes) -> bool {
        peak == Bytes::ZERO
            || (self.budget.is_none_or(|budget| peak + headroom(peak) <= budget)
                && self.ceiling.is_none_or(|ceiling| peak <= ceiling))
    }

    /// The limit: the budget, or the free memory of the device if that is less.
    pub fn bytes(&self) -> Bytes {
        [self.budget, self.ceiling].into_iter().flatten().min().unwrap_or_default()
    }

    /// Whether the budget is the limit, not the free memory.
    pub fn is_budget(&self) -> bool {
        self.ceiling.is_none_or(|ceiling| self.budget.is_some_and(|budget| budget <= ceiling))
    }
}

/// The predicted memory of a plan on the device, row by row.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceBill {
    /// The most bytes that may be held there; `None` if unknown.
    pub budget: Option<Bytes>,
    /// The source of the budget, and the device's name.
    pub source: String,
    /// The rows of the peak.
    pub rows: Vec<CostRow>,
    /// The sum of the rows.
    pub predicted_peak: Bytes,
    /// Bytes kept free beside the rows.
    pub headroom: Bytes,
}

impl DeviceBill {
    /// The bill of `rows`; `None` if there are no rows.
    pub(crate) fn sum(rows: Vec<CostRow>, now: &MemorySnapshot, budget: Budget) -> Option<Self> {
        if rows.is_empty() {
            return None;
        }
        let predicted_peak: Bytes = rows.iter().map(|row| row.bytes).sum();
        let found = match &now.device {
            Some(device) => format!("{} of {} free ({})", device.free, device.total, device.name),
            None => "the device's memory is unknown".to_string(),
        };
        let set_by = match budget {
            Budget::Explicit(_) => "--device-memory-budget".to_string(),
            Budget::ShareOfAvailable => format!("{DEFAULT_SHARE_PERCENT} % of the free memory"),
        };
        Some(Self {
            budget: DeviceLimit::resolve(now, budget).budget,
            source: format!("{set_by}; {found}"),
            rows,
            predicted_peak,
            headroom: headroom(predicted_peak),
        })
    }
}

impl DeviceBill {
    /// The device's part of the bill as text.
    pub(crate) fn text(&self, is_full: bool) -> String {
        let unit = Unit::for_largest(self.predicted_peak);
        let budget =
            self.budget.map_or("an unknown budget".to_string(), |budget| Unit::for_largest(budget).show(budget));
        let peak = unit.show(self.predicted_peak);
        layout::labelled("Device memory", &format!("predicted peak {peak} of {budget} ({})", self.source))
            + &layout::rows(&self.rows, unit, is_full)
            + &layout::sum("total", self.predicted_peak, unit, "")
            + &layout::sum("safety margin", self.headroom, unit, "")
    }
}

#[cfg(test)]
mod tests;
