//! Replanning: keeps the plan unless other programs take memory that it needs.
//!
//! [`replan`] is called at every step boundary, and [`plan_for_resume`] when a stopped run is resumed.
//!
//! # Invariants
//!
//! * Without pressure nothing changes: a plan that still fits the available memory is kept.
//! * Hysteresis. A plan shrinks only if its predicted peak itself no longer fits, so the headroom absorbs noise. It grows only after a
//!   faster plan has fitted with a margin in [`GROW_AFTER_REPLANS`] calls in a row; one call without calm restarts the count.
//! * Only a plan that pressure has shrunk grows back: a plan that the budget limits stays as it is.
//! * Shrinking comes before swapping. Little may be left beside the plan while the machine swaps or its tasks wait for memory. Then the
//!   plan shrinks as if a tenth of the memory that it could hold were gone already. It also does so if other programs have left less memory
//!   than the plan's headroom: this process must then give back some of the memory that it holds.
//! * A run never stops here. If not even the smallest plan fits, that plan is followed, and the change reports it once. If the machine then
//!   swaps in [`SWAPPING_REPLANS`] replans in a row, [`Replanned::is_hopeless`] is true. The caller decides whether to continue.

use serde::{Deserialize, Serialize};

use crate::plan::{limit_of, plan, plan_of, plan_within};
use crate::{Budget, Budgets, Bytes, Costs, DeviceMemory, DoesNotFit, Limit, MemorySnapshot, Plan, Setting};

/// Replans in a row in which a faster plan must fit before it is taken.
pub const GROW_AFTER_REPLANS: u32 = 20;

/// Replans in a row in which the machine swaps under the smallest plan before the run counts as hopeless.
pub const SWAPPING_REPLANS: u32 = 5;

/// Pressure counts only if less than this share of the plan's peak is left beside the plan, in percent. Other processes may be stalled on a
/// machine that has plenty of memory left for this one.
const LITTLE_LEFT_PERCENT: u64 = 25;

/// The margin of memory that must be available beyond a faster plan's needs before it counts as fitting, in percent.
const GROWTH_MARGIN_PERCENT: u64 = 10;

/// The plan to follow from here, and the change, if any.
#[derive(Clone, Debug, PartialEq)]
pub struct Replanned<S, L> {
    /// The plan to follow until the next call, which takes it as `previous`.
    pub plan: Plan<S, L>,
    /// The change, for the `replan` event; `None` almost always.
    pub change: Option<Change>,
    /// Whether the machine keeps swapping although the plan is the smallest. Then it is better to stop and resume later.
    pub is_hopeless: bool,
}

/// The reason why a plan was replaced.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// Other programs took memory that the plan needs.
    #[error("memory pressure: the plan needs {needed}, only {available} are available")]
    Shrunk {
        /// The old plan's predicted peak.
        needed: Bytes,
        /// Memory available to this process.
        available: Bytes,
    },
    /// Memory that other programs had taken has been free again for some time.
    #[error("memory is free again: {available} are available, a faster plan needs {needed}")]
    Grown {
        /// Memory that the new plan needs, headroom included.
        needed: Bytes,
        /// Memory available to this process.
        available: Bytes,
    },
    /// The plan is the smallest one, and it does not fit either.
    #[error("memory pressure: even the smallest plan needs {needed}, only {available} are available")]
    DoesNotFit {
        /// The smallest plan's predicted peak.
        needed: Bytes,
        /// Memory available to this process.
        available: Bytes,
    },
}

/// Returns the plan to follow from here, given the plan followed so far.
///
/// An explicit budget in `budgets` is used as given. A share of the available memory was resolved when the run was first planned, and
/// `previous` has the result.
pub fn replan<S: Setting, L: Setting>(
    now: &MemorySnapshot,
    costs: &Costs<S, L>,
    budgets: impl Into<Budgets>,
    previous: &Plan<S, L>,
) -> Replanned<S, L> {
    let budgets = budgets.into();
    let budget = match budgets.process {
        Budget::Explicit(bytes) => (bytes, budgets),
        Budget::ShareOfAvailable => (previous.budget, budgets),
    };
    let is_pressed = is_pressed(now, previous);
    let swapping_replans = if is_pressed && previous.squeezed { previous.swapping_replans + 1 } else { 0 };
    let is_memory_short = is_pressed || is_crowded(now, previous);
    let felt = if is_memory_short { with_margin(now) } else { now.clone() };
    let mut replanned = follow(&felt, costs, budget, previous, is_memory_short);
    replanned.plan.seen = Some(now.traffic);
    replanned.plan.swapping_replans = swapping_replans;
    replanned.is_hopeless = swapping_replans >= SWAPPING_REPLANS;
    replanned
}

/// Whether memory is short here and now. Either the host has little left and swaps or makes tasks wait. Or the control group has little
/// left, and all of its tasks wait, or it reaches its limit while the host swaps.
///
/// A group that reaches its limit is no sign by itself: the limit counts page cache, which can be reclaimed without harm. Together with
/// swapping it shows that this group's pages are swapped, even if the host has much memory left.
fn is_pressed<S, L>(now: &MemorySnapshot, previous: &Plan<S, L>) -> bool {
    let seen = previous.seen.unwrap_or(now.traffic);
    let swaps = now.traffic.swapped_out > seen.swapped_out || now.traffic.swapped_in > seen.swapped_in;
    let waits = now.pressure.is_some_and(|host| host.some_percent >= 10.0 || host.full_percent >= 2.0);
    let group_waits = now.group_pressure.is_some_and(|group| group.full_percent >= 10.0);
    let group_swaps = swaps && now.traffic.group_reclaims > seen.group_reclaims;
    let little = previous.coming_peak.percent(LITTLE_LEFT_PERCENT);
    let is_short = |left: Bytes| (now.rss + left).saturating_sub(previous.coming_peak) < little;
    let group_is_short = now.group.as_ref().is_some_and(|group| is_short(group.available()));
    ((swaps || waits) && is_short(now.available)) || ((group_waits || group_swaps) && group_is_short)
}

/// Whether other programs have taken memory since the plan was made, and have left less than its headroom.
///
/// A process keeps the pages of its last step. So its plan's peak alone may fit for ever while other programs have no memory left.
fn is_crowded<S, L>(now: &MemorySnapshot, previous: &Plan<S, L>) -> bool {
    let taken = previous.bill.available.saturating_sub(now.ceiling());
    now.usable() < previous.headroom && taken > previous.headroom
}

/// Keeps the plan, or replaces it by a plan that fits or is faster.
fn follow<S: Setting, L: Setting>(
    now: &MemorySnapshot,
    costs: &Costs<S, L>,
    (budget, wanted): (Bytes, Budgets),
    previous: &Plan<S, L>,
    is_memory_short: bool,
) -> Replanned<S, L> {
    let available = now.ceiling();
    let (limit, _) = limit_of(now, budget);
    if limit < previous.coming_peak {
        return shrink(now, costs, (budget, wanted), previous, (previous.coming_peak, available));
    }
    let device = now.device.as_ref().map(DeviceMemory::ceiling);
    if let Some(device) = device.filter(|device| *device < previous.predicted_device_peak) {
        return shrink(now, costs, (budget, wanted), previous, (previous.predicted_device_peak, device));
    }
    let faster = || {
        let fitting = plan_within(&with_margin_on_device(with_margin(now)), costs, budget, wanted);
        fitting.ok().filter(|plan| plan.relative_time < previous.relative_time)
    };
    let may_grow = matches!(previous.limited_by, Limit::Available | Limit::DeviceAvailable) && !is_memory_short;
    let keep = |calm_replans| Plan { calm_replans, squeezed: false, ..previous.clone() };
    let unchanged = |plan| Replanned { plan, change: None, is_hopeless: false };
    match if may_grow { faster() } else { None } {
        None => unchanged(keep(0)),
        Some(_) if previous.calm_replans + 1 < GROW_AFTER_REPLANS => unchanged(keep(previous.calm_replans + 1)),
        Some(plan) => {
            let change = Change::Grown { needed: plan.required(), available };
            Replanned { plan, change: Some(change), is_hopeless: false }
        }
    }
}

/// Returns the plan of a resumed run: the `previous` plan, if it is still offered, still fits and was made for the same budget; otherwise a
/// new one.
///
/// The memory of the process itself is measured, so the bill of a second start differs by a few pages. Near a border [`plan()`] could then
/// cut the step in another way: the same mathematics in another order of summation. With the same step settings, a resumed run has exactly
/// the same bits, if the same kernels compute. The loader's settings may change, because no result depends on them.
///
/// # Errors
///
/// [`DoesNotFit`] as [`plan()`].
///
/// # Panics
///
/// As [`plan()`].
pub fn plan_for_resume<S: Setting, L: Setting>(
    now: &MemorySnapshot,
    costs: &Costs<S, L>,
    budgets: impl Into<Budgets>,
    previous: &Plan<S, L>,
) -> Result<Plan<S, L>, DoesNotFit<S, L>> {
    let budgets = budgets.into();
    let budget = budgets.process;
    let is_same_budget = match budget {
        Budget::Explicit(bytes) => bytes == previous.budget,
        Budget::ShareOfAvailable => true,
    };
    let is_same_step = |step: &S| step.does_the_same_as(&previous.step);
    if is_same_budget
        && budget.source() == previous.bill.budget_source
        && let Ok(plan) = plan_of(now, costs, budget.resolve(now), budgets, is_same_step)
    {
        return Ok(Plan { limited_by: previous.limited_by, ..plan });
    }
    plan(now, costs, budgets)
}

/// The fastest plan that still fits, or else the smallest. `needed` are the bytes of the old plan, and `available` the memory that was too
/// small for it.
fn shrink<S: Setting, L: Setting>(
    now: &MemorySnapshot,
    costs: &Costs<S, L>,
    (budget, wanted): (Bytes, Budgets),
    previous: &Plan<S, L>,
    (needed, available): (Bytes, Bytes),
) -> Replanned<S, L> {
    match plan_within(now, costs, budget, wanted) {
        Ok(plan) => {
            let change = Change::Shrunk { needed, available };
            Replanned { plan, change: Some(change), is_hopeless: false }
        }
        Err(refusal) => {
            let mut plan = Plan { budget, squeezed: true, limited_by: refusal.limited_by, ..*refusal.smallest_plan };
            plan.bill.budget = budget;
            let change = Change::DoesNotFit { needed: plan.coming_peak, available };
            Replanned { change: (!previous.squeezed).then_some(change), plan, is_hopeless: false }
        }
    }
}

/// A snapshot of a machine that can hold a tenth less, so that growth needs a margin. Memory that this process holds above that counts as
/// gone, because the process must give it back.
fn with_margin(now: &MemorySnapshot) -> MemorySnapshot {
    let ceiling = now.ceiling().percent(100 - GROWTH_MARGIN_PERCENT);
    let rss = now.rss.min(ceiling);
    MemorySnapshot { rss, available: ceiling.saturating_sub(rss), ..now.clone() }
}

/// A snapshot with a tenth less device memory.
fn with_margin_on_device(now: MemorySnapshot) -> MemorySnapshot {
    let with_margin = |device: DeviceMemory| {
        let ceiling = device.ceiling().percent(100 - GROWTH_MARGIN_PERCENT);
        DeviceMemory { free: ceiling.saturating_sub(device.used), ..device }
    };
    MemorySnapshot { device: now.device.map(with_margin), ..now }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{ACTIVATIONS, Ahead, Cut, PARAMETERS};
    use crate::{Choice, CostRow};

    type Costs = crate::Costs<Cut, Ahead>;
    type Plan = crate::Plan<Cut, Ahead>;

    /// Steps of 1, 2, 4 and 8 samples that hold 100 MiB and 100 MiB a sample.
    fn costs() -> Costs {
        let step = |samples: usize| {
            let rows = vec![CostRow::new(ACTIVATIONS, (100 << 20) * samples as u64, "")];
            Choice::new(Cut { samples, repeated: 0 }, rows, 1.0 + 1.0 / samples as f64)
        };
        let loader = Choice::new(Ahead { batches: 1 }, Vec::new(), 1.0);
        Costs {
            task: "8 samples a step".into(),
            fixed: vec![CostRow::new(PARAMETERS, 100 << 20, "")],
            past: Vec::new(),
            steps: [1, 2, 4, 8].map(step).into(),
            loaders: vec![loader],
        }
    }

    fn with_ceiling(mib: u64) -> MemorySnapshot {
        MemorySnapshot { available: Bytes::mib(mib - 100), rss: Bytes::mib(100), ..Default::default() }
    }

    const BUDGET: Budget = Budget::Explicit(Bytes::gib(1));

    /// Follows a run through the memory that the machine has at each step. Returns samples and changes.
    fn follow(budget: Budget, ceilings_mib: &[u64]) -> (Vec<usize>, Vec<Change>) {
        let mut current = plan(&with_ceiling(ceilings_mib[0]), &costs(), budget).unwrap();
        let (mut samples, mut changes) = (vec![current.step.samples], Vec::new());
        for &ceiling in &ceilings_mib[1..] {
            let replanned = replan(&with_ceiling(ceiling), &costs(), budget, &current);
            changes.extend(replanned.change);
            current = replanned.plan;
            samples.push(current.step.samples);
        }
        (samples, changes)
    }

    #[test]
    fn a_quiet_machine_keeps_the_plan_to_the_byte() {
        let planned = plan(&with_ceiling(4000), &costs(), BUDGET).unwrap();
        let first = Plan { seen: Some(with_ceiling(4000).traffic), ..planned };
        let mut current = first.clone();
        for ceiling in [4000, 2000, 1024, 960, 900, 3000] {
            let replanned = replan(&with_ceiling(ceiling), &costs(), BUDGET, &current);
            assert_eq!((&replanned.plan, &replanned.change), (&first, &None), "at {ceiling} MiB");
            current = replanned.plan;
        }
    }

    #[test]
    fn pressure_shrinks_the_plan_only_when_its_peak_no_longer_fits() {
        // 900 MiB are predicted and 945 required: the headroom may be used.
        let (samples, changes) = follow(BUDGET, &[2000, 920, 900, 899, 530]);
        assert_eq!(samples, [8, 8, 8, 4, 4]);
        let [needed, available] = [900, 899].map(Bytes::mib);
        assert_eq!(changes, [Change::Shrunk { needed, available }]);
        assert_eq!(changes[0].to_string(), "memory pressure: the plan needs 900 MiB, only 899 MiB are available");
    }

    #[test]
    fn a_plan_grows_back_only_after_calm_has_lasted() {
        let calm = GROW_AFTER_REPLANS as usize;
        let mut ceilings = vec![2000, 600];
        ceilings.extend(vec![2000; calm - 1]);
        ceilings.push(600); // one call without calm restarts the count
        ceilings.extend(vec![2000; calm]);
        let (samples, changes) = follow(BUDGET, &ceilings);
        assert_eq!(samples[..2], [8, 4]);
        assert!(samples[2..samples.len() - 1].iter().all(|&samples| samples == 4), "{samples:?}");
        assert_eq!(samples.last(), Some(&8));
        assert!(matches!(changes[..], [Change::Shrunk { .. }, Change::Grown { .. }]), "{changes:?}");
    }

    #[test]
    fn a_machine_at_the_edge_does_not_make_the_plan_swing() {
        // 945 MiB are enough for 8 samples, but without a margin the plan stays as it is.
        let mut ceilings = vec![2000, 600];
        ceilings.extend([1000, 946].repeat(50));
        let (samples, changes) = follow(BUDGET, &ceilings);
        assert!(samples[1..].iter().all(|&samples| samples == 4), "{samples:?}");
        assert_eq!(changes.len(), 1);
    }

    #[test]
    fn what_fits_no_more_follows_the_smallest_plan_and_says_so_once() {
        let mut ceilings = vec![2000, 150, 150, 150, 400];
        let (samples, changes) = follow(BUDGET, &ceilings);
        assert_eq!(samples, [8, 1, 1, 1, 1]);
        let [needed, available] = [200, 150].map(Bytes::mib);
        assert_eq!(changes, [Change::DoesNotFit { needed, available }]);
        // A plan that pressure has shrunk grows back from there, too.
        ceilings.extend([2000; GROW_AFTER_REPLANS as usize]);
        let (samples, changes) = follow(BUDGET, &ceilings);
        assert!(samples.last() == Some(&8) && matches!(changes[..], [_, Change::Grown { .. }]), "{changes:?}");
    }

    #[test]
    fn a_share_of_what_is_available_is_taken_once_and_not_again_at_every_step() {
        let (samples, changes) = follow(Budget::ShareOfAvailable, &[1200, 950, 5000, 5000]);
        assert_eq!((samples, changes), (vec![8, 8, 8, 8], vec![]));
    }

    #[test]
    fn a_plan_that_the_budget_limits_does_not_grow() {
        let tight = Budget::Explicit(Bytes::mib(650));
        let current = plan(&with_ceiling(4000), &costs(), tight).unwrap();
        assert_eq!((current.step.samples, current.limited_by), (4, Limit::Budget));
        let mut smaller_process = costs();
        smaller_process.fixed.clear();
        smaller_process.steps.iter_mut().for_each(|step| step.rows[0].bytes = Bytes::mib(1));
        let mut replanned = replan(&with_ceiling(4000), &smaller_process, tight, &current);
        for _ in 0..2 * GROW_AFTER_REPLANS {
            replanned = replan(&with_ceiling(4000), &smaller_process, tight, &replanned.plan);
            assert_eq!(replanned.change, None);
        }
    }

    /// The costs of a second start, whose process holds a little less or more.
    fn costs_of_second_start(process_mib: u64) -> Costs {
        let mut costs = costs();
        costs.fixed[0].bytes = Bytes::mib(process_mib);
        costs
    }

    #[test]
    fn a_run_that_goes_on_keeps_its_step_although_it_is_measured_anew() {
        let tight = Budget::Explicit(Bytes::mib(940));
        let first = plan(&with_ceiling(4000), &costs(), tight).unwrap();
        assert_eq!(first.step.samples, 4); // 945 MiB would be needed for 8
        let (now, lighter) = (with_ceiling(4000), costs_of_second_start(90));
        assert_eq!(plan(&now, &lighter, tight).unwrap().step.samples, 8);
        let again = plan_for_resume(&now, &lighter, tight, &first).unwrap();
        assert_eq!((again.step.samples, again.predicted_peak), (4, Bytes::mib(490)));
        // The plan of a checkpoint comes back from JSON.
        let read: Plan = serde_json::from_str(&serde_json::to_string(&first).unwrap()).unwrap();
        assert_eq!(plan_for_resume(&now, &lighter, tight, &read).unwrap(), again);
    }

    #[test]
    fn a_run_that_goes_on_is_fed_as_at_its_first_start() {
        let mut costs = costs();
        costs.steps.retain(|step| [4, 8].contains(&step.what.samples) && step.what.repeated == 0);
        let of = |samples: usize| costs.steps.iter().find(|step| step.what.samples == samples).unwrap().relative_time;
        // The kept step is slower than the fastest by almost as much as is accepted without a budget. With a slower loader, the pair is too slow.
        let slower = 1.08 * of(8) / of(4);
        costs.steps.iter_mut().filter(|step| step.what.samples == 4).for_each(|step| step.relative_time *= slower);
        let guest = Budget::ShareOfAvailable;
        let first = plan(&with_ceiling(40_000), &costs, guest).unwrap();
        assert_eq!(first.step.samples, 4, "the smaller one, within a tenth");
        assert_eq!(plan_for_resume(&with_ceiling(40_000), &costs, guest, &first).unwrap().loader, first.loader);
    }

    #[test]
    fn a_run_that_goes_on_plans_anew_where_its_plan_is_out_of_place() {
        let first = plan(&with_ceiling(4000), &costs(), Budget::Explicit(Bytes::mib(650))).unwrap();
        let check = |now: &MemorySnapshot, costs: &Costs, budget: Budget, samples: usize| {
            assert_eq!(plan_for_resume(now, costs, budget, &first).unwrap().step.samples, samples);
        };
        let same = Budget::Explicit(Bytes::mib(650));
        check(&with_ceiling(4000), &costs(), same, 4);
        check(&with_ceiling(4000), &costs(), BUDGET, 8); // another budget
        check(&with_ceiling(4000), &costs(), Budget::ShareOfAvailable, 8);
        check(&with_ceiling(400), &costs(), same, 2); // less is available
        check(&with_ceiling(4000), &costs_of_second_start(300), same, 2); // no longer fits
        let mut pinned = costs();
        pinned.steps.truncate(1);
        check(&with_ceiling(4000), &pinned, same, 1); // no longer offered
        let refusal = plan_for_resume(&with_ceiling(4000), &costs(), Budget::Explicit(Bytes::mib(100)), &first);
        assert!(refusal.is_err());
    }

    /// A host with this much memory left, and with this count of pages swapped out.
    fn swapping(ceiling_mib: u64, swapped_out: u64) -> MemorySnapshot {
        let traffic = crate::Traffic { swapped_out, ..Default::default() };
        MemorySnapshot { traffic, ..with_ceiling(ceiling_mib) }
    }

    #[test]
    fn a_host_that_swaps_with_little_left_shrinks_the_plan_before_its_peak_no_longer_fits() {
        let first = plan(&swapping(2000, 7), &costs(), BUDGET).unwrap();
        assert_eq!(first.predicted_peak, Bytes::mib(900));
        // Swapping before the run began is no pressure now.
        let quiet = replan(&swapping(950, 7), &costs(), BUDGET, &first);
        assert_eq!(quiet.change, None);
        let pressed = replan(&swapping(950, 8), &costs(), BUDGET, &quiet.plan);
        assert!(matches!(pressed.change, Some(Change::Shrunk { .. })), "{:?}", pressed.change);
        assert_eq!(pressed.plan.step.samples, 4);
        // Other processes may swap on a machine that has plenty of memory left for this one.
        let elsewhere = replan(&swapping(5000, 9), &costs(), BUDGET, &quiet.plan);
        assert_eq!(elsewhere.change, None);
    }

    #[test]
    fn a_process_that_holds_its_whole_peak_gives_way_when_others_leave_less_than_its_headroom() {
        let holding = |rss: u64, left: u64| MemorySnapshot {
            available: Bytes::mib(left),
            rss: Bytes::mib(rss),
            ..Default::default()
        };
        let first = plan(&holding(100, 1900), &costs(), BUDGET).unwrap();
        assert_eq!((first.predicted_peak, first.headroom), (Bytes::mib(900), Bytes::mib(45)));
        let samples = |now: &MemorySnapshot| replan(now, &costs(), BUDGET, &first).plan.step.samples;
        assert_eq!(samples(&holding(895, 45)), 8);
        assert_eq!(samples(&holding(895, 44)), 4);
        // A process that holds more than its plan predicts must give way, too.
        assert_eq!(samples(&holding(920, 10)), 4);
        // Other programs did not take memory that was never there.
        let tight = Plan { bill: crate::Bill { available: Bytes::mib(945), ..first.bill.clone() }, ..first.clone() };
        assert_eq!(replan(&holding(895, 30), &costs(), BUDGET, &tight).change, None);
        // The plan grows back when they free memory, and not before.
        let mut current = replan(&holding(895, 10), &costs(), BUDGET, &first).plan;
        for left in std::iter::repeat_n(300, 2 * GROW_AFTER_REPLANS as usize) {
            current = replan(&holding(500, left), &costs(), BUDGET, &current).plan;
        }
        assert_eq!(current.step.samples, 4);
        for _ in 0..GROW_AFTER_REPLANS {
            current = replan(&holding(500, 1500), &costs(), BUDGET, &current).plan;
        }
        assert_eq!(current.step.samples, 8);
    }

    #[test]
    fn a_group_that_meets_its_limit_while_the_host_swaps_is_short_and_one_that_drops_cache_is_not() {
        let limit = Bytes::mib(950);
        let group = crate::Group { path: "/".into(), limit, used: Bytes::mib(100), reclaimable: Bytes::ZERO };
        let within = |swapped_out, group_reclaims| MemorySnapshot {
            traffic: crate::Traffic { swapped_out, group_reclaims, ..Default::default() },
            group: Some(group.clone()),
            ..with_ceiling(8000)
        };
        let first = plan(&within(7, 3), &costs(), BUDGET).unwrap();
        let quiet = replan(&within(7, 3), &costs(), BUDGET, &first).plan;
        assert_eq!(quiet.step.samples, 8);
        let check = |now: &MemorySnapshot, samples: usize| {
            assert_eq!(replan(now, &costs(), BUDGET, &quiet).plan.step.samples, samples, "{now:?}");
        };
        check(&within(7, 900), 8); // page cache was dropped
        check(&within(8, 3), 8); // other groups swap
        check(&within(8, 4), 4); // this group swaps
    }

    #[test]
    fn tasks_that_wait_for_memory_count_like_swapping_and_no_plan_grows_meanwhile() {
        let waiting = |ceiling: u64| MemorySnapshot {
            pressure: Some(crate::Pressure { some_percent: 30.0, full_percent: 0.5 }),
            ..with_ceiling(ceiling)
        };
        let first = plan(&with_ceiling(2000), &costs(), BUDGET).unwrap();
        let mut replanned = replan(&waiting(950), &costs(), BUDGET, &first);
        assert_eq!(replanned.plan.step.samples, 4);
        for _ in 0..2 * GROW_AFTER_REPLANS {
            replanned = replan(&waiting(600), &costs(), BUDGET, &replanned.plan);
            assert_eq!(replanned.change, None);
        }
    }

    #[test]
    fn swapping_under_the_smallest_plan_becomes_hopeless_after_a_while_and_not_before() {
        let mut current = plan(&swapping(2000, 0), &costs(), BUDGET).unwrap();
        current = replan(&swapping(2000, 0), &costs(), BUDGET, &current).plan;
        let mut hopeless = Vec::new();
        for swapped_out in 1..=u64::from(SWAPPING_REPLANS) + 2 {
            let replanned = replan(&swapping(150, swapped_out), &costs(), BUDGET, &current);
            hopeless.push(replanned.is_hopeless);
            current = replanned.plan;
        }
        let first = hopeless.iter().position(|&is_hopeless| is_hopeless);
        assert_eq!(first, Some(SWAPPING_REPLANS as usize), "{hopeless:?}");
        let calm = replan(&swapping(150, 99), &costs(), BUDGET, &Plan { seen: None, ..current });
        assert!(!calm.is_hopeless, "one replan without swapping starts the count again");
    }
}
