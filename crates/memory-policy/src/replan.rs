//! Replanning at a step boundary: the same plan, unless others take the memory that it counts on.
//!
//! # Invariants
//!
//! * Without pressure nothing changes: a plan that still fits what is there is kept.
//! * Hysteresis. A plan shrinks only when its predicted peak itself no longer fits, so that the
//!   headroom absorbs noise; it grows only after a faster plan has fitted with a margin for
//!   [`CALM_REPLANS`] calls in a row, and one call without calm starts the count again.
//! * A run never stops here. When not even the smallest plan fits, that plan is followed and the
//!   change says so once; whether to go on is the caller's decision.

use serde::{Deserialize, Serialize};

use crate::plan::{limit_of, plan_within};
use crate::{Budget, Bytes, Costs, MemorySnapshot, Plan};

/// Replans in a row in which a faster plan must fit before it is taken.
pub const CALM_REPLANS: u32 = 20;

/// How much more than a faster plan needs must be there before it counts as fitting, in percent.
const CALM_MARGIN_PERCENT: u64 = 10;

/// The plan to follow from here, and what changed if anything did.
#[derive(Clone, Debug, PartialEq)]
pub struct Replanned {
    /// Follow this one until the next call, and hand it to the next call.
    pub plan: Plan,
    /// What changed, for the `replan` event; `None` almost always.
    pub change: Option<Change>,
}

/// Why a plan was replaced.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// Others took memory that the plan counted on.
    #[error("memory pressure: the plan's peak is {needed}, only {available} are there")]
    Shrunk {
        /// The old plan's predicted peak.
        needed: Bytes,
        /// What this process could hold.
        available: Bytes,
    },
    /// Memory that had been taken is free again, and has been for a while.
    #[error("memory is free again: {available} are there, a faster plan needs {needed}")]
    Grown {
        /// What the new plan needs, headroom included.
        needed: Bytes,
        /// What this process could hold.
        available: Bytes,
    },
    /// The plan is the smallest one and not even that fits.
    #[error("memory pressure: even the smallest plan's peak is {needed}, only {available} are there")]
    DoesNotFit {
        /// The smallest plan's predicted peak.
        needed: Bytes,
        /// What this process could hold.
        available: Bytes,
    },
}

/// The plan to follow from here, given the one followed so far.
///
/// An explicit `budget` stands as given; a share of what is available was resolved when the run was
/// planned first, and `previous` remembers it.
pub fn replan(now: &MemorySnapshot, costs: &Costs, budget: Budget, previous: &Plan) -> Replanned {
    let budget = match budget {
        Budget::Explicit(bytes) => bytes,
        Budget::ShareOfAvailable => previous.budget,
    };
    let available = now.ceiling();
    let (limit, _) = limit_of(now, budget);
    if limit < previous.predicted_peak {
        return shrink(now, costs, budget, previous);
    }
    let fitting = plan_within(&with_margin(now), costs, budget, &previous.bill.budget_source);
    let faster = fitting.ok().filter(|plan| plan.relative_time < previous.relative_time);
    let keep = |calm_replans| Plan { calm_replans, squeezed: false, ..previous.clone() };
    match faster {
        None => Replanned { plan: keep(0), change: None },
        Some(_) if previous.calm_replans + 1 < CALM_REPLANS => {
            Replanned { plan: keep(previous.calm_replans + 1), change: None }
        }
        Some(plan) => {
            let change = Change::Grown { needed: plan.required(), available };
            Replanned { plan, change: Some(change) }
        }
    }
}

/// The fastest plan that still fits, or the smallest there is.
fn shrink(now: &MemorySnapshot, costs: &Costs, budget: Bytes, previous: &Plan) -> Replanned {
    let available = now.ceiling();
    match plan_within(now, costs, budget, &previous.bill.budget_source) {
        Ok(plan) => {
            let change = Change::Shrunk { needed: previous.predicted_peak, available };
            Replanned { plan, change: Some(change) }
        }
        Err(refusal) => {
            let mut plan = Plan { budget, squeezed: true, ..*refusal.smallest_plan };
            plan.bill.budget = budget;
            let change = Change::DoesNotFit { needed: plan.predicted_peak, available };
            Replanned { change: (!previous.squeezed).then_some(change), plan }
        }
    }
}

/// A snapshot of a machine with a tenth less to hold: growth has to clear a higher bar.
fn with_margin(now: &MemorySnapshot) -> MemorySnapshot {
    let ceiling = now.ceiling().percent(100 - CALM_MARGIN_PERCENT);
    MemorySnapshot { available: ceiling.saturating_sub(now.rss), ..now.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CostRow, DatasetResidency, LoaderChoice, StepChoice, plan};

    /// Steps of 1, 2, 4 and 8 samples that hold 100 MiB and 100 MiB a sample.
    fn costs() -> Costs {
        let step = |samples: usize| StepChoice {
            micro_batch_samples: samples,
            recompute_blocks: 0,
            loss_chunk_rows: 128,
            rows: vec![CostRow::new("activations", (100 << 20) * samples as u64, "")],
            relative_time: 1.0 + 1.0 / samples as f64,
        };
        let loader = LoaderChoice {
            residency: DatasetResidency::UltraLowMem,
            decode_threads: 1,
            prefetch_batches: 1,
            rows: Vec::new(),
            relative_time: 1.0,
        };
        Costs {
            batch_samples: 8,
            fixed: vec![CostRow::new("parameters", 100 << 20, "")],
            steps: [1, 2, 4, 8].map(step).into(),
            loaders: vec![loader],
        }
    }

    fn with_ceiling(mib: u64) -> MemorySnapshot {
        MemorySnapshot { available: Bytes::mib(mib - 100), rss: Bytes::mib(100), ..Default::default() }
    }

    const BUDGET: Budget = Budget::Explicit(Bytes::gib(1));

    /// Follows a run through what the machine has at each step; returns samples and changes.
    fn follow(budget: Budget, ceilings_mib: &[u64]) -> (Vec<usize>, Vec<Change>) {
        let mut current = plan(&with_ceiling(ceilings_mib[0]), &costs(), budget).unwrap();
        let (mut samples, mut changes) = (vec![current.micro_batch_samples], Vec::new());
        for &ceiling in &ceilings_mib[1..] {
            let replanned = replan(&with_ceiling(ceiling), &costs(), budget, &current);
            changes.extend(replanned.change);
            current = replanned.plan;
            samples.push(current.micro_batch_samples);
        }
        (samples, changes)
    }

    #[test]
    fn a_quiet_machine_keeps_the_plan_to_the_byte() {
        let first = plan(&with_ceiling(4000), &costs(), BUDGET).unwrap();
        let mut current = first.clone();
        for ceiling in [4000, 2000, 1024, 960, 900, 3000] {
            let replanned = replan(&with_ceiling(ceiling), &costs(), BUDGET, &current);
            assert_eq!((&replanned.plan, &replanned.change), (&first, &None), "at {ceiling} MiB");
            current = replanned.plan;
        }
    }

    #[test]
    fn pressure_shrinks_the_plan_only_when_its_peak_no_longer_fits() {
        // 900 MiB are predicted and 945 required: the headroom is there to be used.
        let (samples, changes) = follow(BUDGET, &[2000, 920, 900, 899, 530]);
        assert_eq!(samples, [8, 8, 8, 4, 4]);
        let [needed, available] = [900, 899].map(Bytes::mib);
        assert_eq!(changes, [Change::Shrunk { needed, available }]);
        assert_eq!(changes[0].to_string(), "memory pressure: the plan's peak is 900 MiB, only 899 MiB are there");
    }

    #[test]
    fn a_plan_grows_back_only_after_calm_has_lasted() {
        let calm = CALM_REPLANS as usize;
        let mut ceilings = vec![2000, 600];
        ceilings.extend(vec![2000; calm - 1]);
        ceilings.push(600); // one call without calm starts the count again
        ceilings.extend(vec![2000; calm]);
        let (samples, changes) = follow(BUDGET, &ceilings);
        assert_eq!(samples[..2], [8, 4]);
        assert!(samples[2..samples.len() - 1].iter().all(|&samples| samples == 4), "{samples:?}");
        assert_eq!(samples.last(), Some(&8));
        assert!(matches!(changes[..], [Change::Shrunk { .. }, Change::Grown { .. }]), "{changes:?}");
    }

    #[test]
    fn a_machine_at_the_edge_does_not_make_the_plan_swing() {
        // 945 MiB would do for 8 samples; without a margin above it the plan stays where it is.
        let mut ceilings = vec![2000, 600];
        ceilings.extend([1000, 946].repeat(50));
        let (samples, changes) = follow(BUDGET, &ceilings);
        assert!(samples[1..].iter().all(|&samples| samples == 4), "{samples:?}");
        assert_eq!(changes.len(), 1);
    }

    #[test]
    fn what_fits_no_more_follows_the_smallest_plan_and_says_so_once() {
        let (samples, changes) = follow(BUDGET, &[2000, 150, 150, 150, 400]);
        assert_eq!(samples, [8, 1, 1, 1, 1]);
        let [needed, available] = [200, 150].map(Bytes::mib);
        assert_eq!(changes, [Change::DoesNotFit { needed, available }]);
    }

    #[test]
    fn a_share_of_what_is_available_is_taken_once_and_not_again_at_every_step() {
        let (samples, changes) = follow(Budget::ShareOfAvailable, &[1200, 950, 5000, 5000]);
        assert_eq!((samples, changes), (vec![8, 8, 8, 8], vec![]));
    }
}
