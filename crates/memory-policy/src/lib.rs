//! Memory policy: the memory that there is, the memory that a plan would need, and the choice of a plan.
//!
//! Three nouns. A [`MemorySnapshot`] holds the memory of the machine and of this process at one instant; a [`Probe`] takes one. [`Costs`]
//! are the memory of every offered choice, stated by the parts as named rows. A [`Plan`] is one of these choices, with the [`Bill`] that
//! explains it.
//!
//! # Invariants
//!
//! * [`plan`] and [`replan`] are pure: no clock, no `/proc`, no device, no randomness. The same
//!   snapshot, costs and budget give the same plan.
//! * A plan's predicted peak and its headroom together never exceed the budget. Nor do they exceed the most that this process could hold
//!   ([`MemorySnapshot::ceiling`]).
//! * There is no ladder of thresholds. Among the choices that fit, the fastest wins; a bigger budget
//!   therefore never gives a slower plan.
//! * With an explicit budget and enough memory for it, the plan is a function of budget and costs only. Other programs on the machine do
//!   not change it.
//! * A device has a budget and rows of its own; a plan fits both budgets, or neither is promised.
//! * This crate compares bytes and time, and does not know what a setting does. A [`Setting`] describes itself in words, and a plan carries
//!   it.
//!
//! # Use
//!
//! ```
//! use memory_policy::*;
//!
//! /// Samples computed at a time, in a step or in its loader.
//! #[derive(Clone, Debug, PartialEq)]
//! struct AtATime(u64);
//!
//! impl Setting for AtATime {
//!     fn in_words(&self) -> String {
//!         format!("{} samples at a time", self.0)
//!     }
//!     fn levers(&self) -> Vec<(&'static str, String)> {
//!         vec![("samples", self.0.to_string())]
//!     }
//!     fn differs_only_in(&self, _lever: &str, _other: &Self) -> bool {
//!         true
//!     }
//! }
//!
//! const PARAMETERS: Name = Name::new("parameters");
//! const ACTIVATIONS: Name = Name::new("activations");
//! let step = |samples: u64| {
//!     let rows = vec![CostRow::new(ACTIVATIONS, (100 << 20) * samples, "")];
//!     Choice::new(AtATime(samples), rows, 1.0 + 1.0 / samples as f64)
//! };
//! let costs = Costs {
//!     task: "128 samples a step".to_string(),
//!     fixed: vec![CostRow::new(PARAMETERS, 700 << 20, "188 M x f32")],
//!     past: Vec::new(),
//!     steps: [16, 8, 4].map(step).into(),
//!     loaders: vec![Choice::new(AtATime(128), Vec::new(), 1.0)],
//! };
//! let now = SystemProbe::new().snapshot()?;
//! match plan(&now, &costs, Budget::Explicit("2GiB".parse()?)) {
//!     Ok(plan) => print!("{}", plan.bill), // and hand plan.step down
//!     Err(refusal) => eprintln!("error: {refusal}\nhint: {}", refusal.hint()),
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bill;
mod budget;
mod bytes;
mod cards;
mod costs;
mod count;
mod device;
mod enclosure;
mod explain;
mod layout;
mod name;
mod plan;
mod probe;
mod replan;
mod snapshot;
#[cfg(test)]
mod testing;

pub use bill::Bill;
pub use budget::{Budget, DEFAULT_SHARE_PERCENT, RESTART_MARGIN, headroom, restart_margin};
pub use bytes::{Bytes, ParseBytesError};
pub use cards::{Card, Cards, cards};
pub use costs::{Choice, CostRow, Costs, FEEDING, LOADING, Phase, READING, Setting, TRAINING, undominated};
pub use count::{counted, plural};
pub use device::{Budgets, DeviceBill, DeviceMemory, MemorySpace};
pub use enclosure::{Enclosure, peak_of};
pub use explain::{Explained, Other, explain};
pub use layout::labelled;
pub use name::Name;
pub use plan::{DoesNotFit, Limit, Plan, plan};
pub use probe::{DeviceProbe, PageFaults, Probe, ProbeError, ScriptedProbe, SystemProbe};
pub use replan::{Change, GROW_AFTER_REPLANS, Replanned, SWAPPING_REPLANS, plan_for_resume, replan};
pub use snapshot::{Group, MemorySnapshot, Pressure, Traffic};
