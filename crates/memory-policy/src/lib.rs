//! Memory policy: how much memory there is, what a plan would need, and which plan to follow.
//!
//! Three nouns. A [`MemorySnapshot`] is what the machine and this process hold at one instant; a
//! [`Probe`] takes one. [`Costs`] are what the parts say they would hold, as named rows, for every
//! choice they offer. A [`Plan`] is one choice out of them, with the [`Bill`] that explains it.
//!
//! # Invariants
//!
//! * [`plan`] and [`replan`] are pure: no clock, no `/proc`, no device, no randomness. The same
//!   snapshot, costs and budget give the same plan.
//! * A plan's predicted peak and its headroom together never exceed the budget, nor what this
//!   process could hold at all ([`MemorySnapshot::ceiling`]).
//! * There is no ladder of thresholds. Among the choices that fit, the fastest wins; a bigger budget
//!   therefore never gives a slower plan.
//! * With an explicit budget and enough memory for it, the plan is a function of budget and costs
//!   alone: what else runs on the machine does not change it.
//! * A device has a budget and rows of its own; a plan fits both budgets, or neither is promised.
//! * This crate knows neither parquet nor tensors nor T5, and nothing below the binary knows this
//!   crate: the binary hands plain numbers up as costs and down as limits.
//!
//! # Use
//!
//! ```
//! use memory_policy::*;
//!
//! let costs = Costs {
//!     batch_samples: 128,
//!     fixed: vec![CostRow::new("parameters", 700 << 20, "188 M x f32")],
//!     steps: [16, 8, 4]
//!         .map(|samples| StepChoice {
//!             micro_batch_samples: samples,
//!             recompute_blocks: 0,
//!             loss_chunk_rows: 256,
//!             rows: vec![CostRow::new("activations", (100 << 20) * samples as u64, "")],
//!             relative_time: 1.0 + 1.0 / samples as f64,
//!             ..StepChoice::default()
//!         })
//!         .into(),
//!     loaders: vec![LoaderChoice {
//!         residency: DatasetResidency::RowGroupCache { bytes: Bytes::mib(32) },
//!         decode_threads: 1,
//!         prefetch_batches: 2,
//!         rows: vec![CostRow::new("loader", 40 << 20, "")],
//!         relative_time: 1.0,
//!     }],
//! };
//! let now = SystemProbe::new().snapshot()?;
//! match plan(&now, &costs, Budget::Explicit("2GiB".parse()?)) {
//!     Ok(plan) => print!("{}", plan.bill), // and hand plan.micro_batch_samples and the rest down
//!     Err(refusal) => eprintln!("error: {refusal}\nhint: {}", refusal.hint()),
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bill;
mod bytes;
mod costs;
mod device;
mod explain;
mod plan;
mod probe;
mod replan;
mod snapshot;

pub use bill::Bill;
pub use bytes::{Bytes, ParseBytesError};
pub use costs::{CostRow, Costs, DatasetResidency, LayerMajor, LoaderChoice, Phase, StepChoice, TRAINING, undominated};
pub use device::{Budgets, DeviceBill, DeviceMemory, Place};
pub use explain::{Explained, Other, explain};
pub use plan::{ANOTHER_START, Budget, DEFAULT_SHARE_PERCENT, DoesNotFit, Limit, Plan, headroom, plan};
pub use probe::{PageFaults, Probe, ProbeError, ScriptedProbe, SystemProbe};
pub use replan::{CALM_REPLANS, Change, Replanned, SWAPPING_REPLANS, plan_again, replan};
pub use snapshot::{Group, MemorySnapshot, Pressure, Traffic};
