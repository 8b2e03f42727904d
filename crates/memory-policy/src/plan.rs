//! A plan: the fastest of the offered choices that fits the budget, and its reasons.
//!
//! [`plan`] is a pure function, and the only place that compares memory with time. It looks at every pair of a step choice and a loader
//! choice whose predicted peak and headroom fit. It takes the pair with the smallest product of relative times, then the pair that holds
//! least, then the faster one, then the pair offered first. All pairs within [`NO_SLOWER_PERCENT`] of the fastest offered pair count as
//! equally fast, so a plan takes no memory that gains no time. Without an explicit budget, the limit is [`SLOWER_WITHOUT_BUDGET_PERCENT`]. Pairs are
//! compared with the fastest offered pair, not with the fastest that fits. For this reason a bigger budget never gives a slower plan.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::budget::{Budget, HEADROOM_PERCENT, MIN_HEADROOM, RESTART_MARGIN, headroom, restart_margin};
use crate::costs::{FEEDING, LOADING, READING, TRAINING, sum, sum_at};
use crate::device::DeviceLimit;
use crate::{
    Bill, Budgets, Bytes, Choice, CostRow, Costs, DeviceBill, MemorySnapshot, MemorySpace, Name, Phase, Setting,
    Traffic,
};

/// A pair that takes at most this much longer than the fastest offer counts as equally fast: less than the noise of a step.
const NO_SLOWER_PERCENT: f64 = 1.5;

/// The same limit without an explicit budget. The process then leaves memory to other programs if that memory would make its
/// step only this much faster. For a T5 step it is often a third of the memory.
const SLOWER_WITHOUT_BUDGET_PERCENT: f64 = 10.0;

/// The source of the limit that a plan had to fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// The budget.
    Budget,
    /// The machine or a control group: it has less memory than the budget.
    Available,
    /// The device's budget.
    DeviceBudget,
    /// The device: its free memory is less than its budget.
    DeviceAvailable,
}

/// The plan until the next one: values of the levers of a step (`S`) and of its loader (`L`), and their memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan<S, L> {
    /// The levers of a step.
    #[serde(flatten)]
    pub step: S,
    /// The levers of its loader.
    #[serde(flatten)]
    pub loader: L,
    /// The budget in bytes, as resolved by the first plan of the run.
    pub budget: Bytes,
    /// The source of the limit that this plan had to fit: the budget, or the available memory if that was less.
    pub limited_by: Limit,
    /// Predicted peak of the process, without headroom. It is at least the peak so far.
    pub predicted_peak: Bytes,
    /// Predicted peak from here on.
    #[serde(default)]
    pub(crate) coming_peak: Bytes,
    /// Bytes kept free beside the predicted peak.
    pub headroom: Bytes,
    /// Time of a step relative to the fastest plan that was offered.
    pub relative_time: f64,
    /// Predicted peak of the device, without headroom; none if tensors are on the host.
    #[serde(default)]
    pub predicted_device_peak: Bytes,
    /// The rows of the predicted peak.
    pub bill: Bill,
    /// Replans in a row in which a faster plan would have fitted; see [`crate::replan`].
    #[serde(skip)]
    pub(crate) calm_replans: u32,
    /// Whether [`crate::replan`] has reported that not even this smallest plan fits.
    #[serde(skip)]
    pub(crate) squeezed: bool,
    /// Replans in a row in which the machine swapped under the smallest plan.
    #[serde(skip)]
    pub(crate) swapping_replans: u32,
    /// The counters of swap and control group at the last replan. Traffic is the difference from them.
    #[serde(skip)]
    pub(crate) seen: Option<Traffic>,
}

impl<S, L> Plan<S, L> {
    /// The smallest budget that this plan fits: the predicted peak and its headroom.
    pub fn required(&self) -> Bytes {
        self.predicted_peak + self.headroom
    }

    /// The smallest budget of the device that this plan fits; zero if no tensor is there.
    pub fn required_on_device(&self) -> Bytes {
        self.bill.device.as_ref().map_or(Bytes::ZERO, |device| device.predicted_peak + device.headroom)
    }

    /// The predicted peak of the memory that tensors are in: the device's, or the process's.
    pub fn peak_of_tensors(&self) -> Bytes {
        match self.place_of_tensors() {
            MemorySpace::Device => self.predicted_device_peak,
            MemorySpace::Host => self.predicted_peak,
        }
    }

    pub(crate) fn place_of_tensors(&self) -> MemorySpace {
        if self.predicted_device_peak > Bytes::ZERO { MemorySpace::Device } else { MemorySpace::Host }
    }
}

/// No offered choice fits.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DoesNotFit<S, L> {
    /// The limit: the budget, or the available memory if that is less.
    pub limit: Bytes,
    /// The source of that limit.
    pub limited_by: Limit,
    /// The smallest budget for which one of the offered choices fits.
    pub smallest_budget: Bytes,
    /// Bytes that a recommended budget has beyond it, because another start may measure a larger process.
    pub restart_margin: Bytes,
    /// The plan that `smallest_budget` would give.
    pub smallest_plan: Box<Plan<S, L>>,
}

impl<S, L> DoesNotFit<S, L> {
    /// Advice for the `hint:` line.
    pub fn hint(&self) -> String {
        let enough = (self.smallest_budget + self.restart_margin).round_up_to_mib().0 >> 20;
        match self.limited_by {
            Limit::Budget => {
                format!("the smallest budget that works: --memory-budget {enough}MiB")
            }
            Limit::DeviceBudget => {
                format!("the smallest budget that works: --device-memory-budget {enough}MiB")
            }
            Limit::DeviceAvailable => format!(
                "free {} on the device, or use another one; `--device cpu` works everywhere",
                self.smallest_budget.saturating_sub(self.limit).round_up_to_mib()
            ),
            Limit::Available => format!(
                "free {} on this machine or raise its limit; then `--memory-budget {enough}MiB` works",
                self.smallest_budget.saturating_sub(self.limit).round_up_to_mib()
            ),
        }
    }
}

impl<S, L> fmt::Display for DoesNotFit<S, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.limited_by {
            Limit::Budget => "memory budget",
            Limit::Available => "available memory",
            Limit::DeviceBudget => "device memory budget",
            Limit::DeviceAvailable => "free device memory",
        };
        write!(f, "{what}: expected at least {} for the smallest plan, got {}", self.smallest_budget, self.limit)
    }
}

impl<S: fmt::Debug, L: fmt::Debug> std::error::Error for DoesNotFit<S, L> {}

/// Returns the fastest offered plan that fits the budget and the memory that this process could hold now. If it holds anything on the
/// device, it must also fit the device's budget and free memory. A single [`Budget`] is the process's.
///
/// # Errors
///
/// [`DoesNotFit`] if no plan fits. It has the smallest budget that would be enough.
///
/// # Panics
///
/// When `costs` offers no step choice or no loader choice.
pub fn plan<S: Setting, L: Setting>(
    now: &MemorySnapshot,
    costs: &Costs<S, L>,
    budgets: impl Into<Budgets>,
) -> Result<Plan<S, L>, DoesNotFit<S, L>> {
    let budgets = budgets.into();
    plan_within(now, costs, budgets.process.resolve(now), budgets)
}

/// [`plan`] with a budget in bytes that the process's budget of `wanted` was resolved to earlier.
pub(crate) fn plan_within<S: Setting, L: Setting>(
    now: &MemorySnapshot,
    costs: &Costs<S, L>,
    budget: Bytes,
    wanted: Budgets,
) -> Result<Plan<S, L>, DoesNotFit<S, L>> {
    plan_of(now, costs, budget, wanted, |_| true)
}

/// [`plan_within`], limited to allowed steps. Whether a plan is fast enough is still decided by comparison with all steps.
pub(crate) fn plan_of<S: Setting, L: Setting>(
    now: &MemorySnapshot,
    costs: &Costs<S, L>,
    budget: Bytes,
    wanted: Budgets,
    is_allowed: impl Fn(&S) -> bool,
) -> Result<Plan<S, L>, DoesNotFit<S, L>> {
    let (limit, limited_by) = limit_of(now, budget);
    let device = DeviceLimit::resolve(now, wanted.device);
    let candidates = candidates(costs);
    let frame = |budget: Bytes| Bill {
        budget,
        budget_source: wanted.process.source(),
        available: now.ceiling(),
        available_set_by: now.usable_is_set_by().to_string(),
        ..Bill::default()
    };
    let fastest = candidates.iter().map(|candidate| candidate.relative_time).fold(f64::INFINITY, f64::min);
    // Without a budget that was named, the plan takes a share of what is available, and may be slower to leave memory to others.
    let lies_on_device = candidates.iter().any(|candidate| candidate.device_peak > Bytes::ZERO);
    let place = if lies_on_device { MemorySpace::Device } else { MemorySpace::Host };
    let percent = match if lies_on_device { wanted.device } else { wanted.process } {
        Budget::Explicit(_) => NO_SLOWER_PERCENT,
        Budget::ShareOfAvailable => SLOWER_WITHOUT_BUDGET_PERCENT,
    };
    let as_fast = fastest * (1.0 + percent / 100.0);
    let fits_host =
        |candidate: &Candidate<'_, S, L>| candidate.required() <= budget && candidate.needs_now() <= now.ceiling();
    let fits = |candidate: &&Candidate<'_, S, L>| {
        fits_host(candidate) && device.admits(candidate.device_peak) && is_allowed(&candidate.step.what)
    };
    let finished = |candidate: &Candidate<'_, S, L>, frame: Bill, limited_by: Limit| {
        let mut plan = candidate.plan(costs, frame, limited_by);
        plan.bill.next = candidate.next(&candidates, as_fast, (place, wanted), budget);
        plan.bill.device = DeviceBill::sum(candidate.device_rows(costs), now, wanted.device);
        plan
    };
    if let Some(best) = candidates.iter().filter(fits).min_by(|a, b| a.compare(b, as_fast)) {
        let is_short = limited_by == Limit::Budget && best.device_peak > Bytes::ZERO && !device.is_budget();
        return Ok(finished(best, frame(budget), if is_short { Limit::DeviceAvailable } else { limited_by }));
    }
    // If the process's own memory would be enough, the device does not fit.
    let by_device = |a: &&Candidate<'_, S, L>, b: &&Candidate<'_, S, L>| a.device_peak.cmp(&b.device_peak);
    if let Some(smallest) = candidates.iter().filter(|candidate| fits_host(candidate)).min_by(by_device) {
        let limited_by = if device.is_budget() { Limit::DeviceBudget } else { Limit::DeviceAvailable };
        let smallest_plan = Box::new(finished(smallest, frame(budget), limited_by));
        let smallest_budget = smallest.device_peak + headroom(smallest.device_peak);
        let restart_margin = RESTART_MARGIN;
        return Err(DoesNotFit { limit: device.bytes(), limited_by, smallest_budget, restart_margin, smallest_plan });
    }
    let smallest = smallest(&candidates);
    let smallest_budget = smallest.required();
    let smallest_plan = Box::new(finished(smallest, frame(smallest_budget), Limit::Budget));
    Err(DoesNotFit { limit, limited_by, smallest_budget, restart_margin: restart_margin(now), smallest_plan })
}

/// The limit that a plan has to fit: the budget, or the ceiling if that is lower.
pub(crate) fn limit_of(now: &MemorySnapshot, budget: Bytes) -> (Bytes, Limit) {
    let ceiling = now.ceiling();
    if ceiling < budget { (ceiling, Limit::Available) } else { (budget, Limit::Budget) }
}

/// One pair of choices, with the numbers that decide.
struct Candidate<'a, S, L> {
    step: &'a Choice<S>,
    loader: &'a Choice<L>,
    /// The peak from here on.
    coming_peak: Bytes,
    /// The peak so far.
    past_peak: Bytes,
    device_peak: Bytes,
    relative_time: f64,
}

/// Every pair of a step choice and a loader choice.
fn candidates<S, L>(costs: &Costs<S, L>) -> Vec<Candidate<'_, S, L>> {
    assert!(!costs.steps.is_empty(), "costs offer no step choice");
    assert!(!costs.loaders.is_empty(), "costs offer no loader choice");
    let (fixed, past_peak) = (sum(&costs.fixed), sum(&costs.past));
    let fixed_on_device = sum_at(MemorySpace::Device, &costs.fixed);
    let loaders: Vec<_> = costs.loaders.iter().map(|loader| (loader, sum(&loader.rows), loader.held())).collect();
    let pairs = costs.steps.iter().flat_map(|step| {
        let of_step = step.held();
        let device_peak = fixed_on_device + sum_at(MemorySpace::Device, step.largest_phase_at(MemorySpace::Device).1);
        loaders.iter().map(move |&(loader, loader_bytes, of_loader)| Candidate {
            step,
            loader,
            coming_peak: fixed + of_step.with_loader(loader_bytes, of_loader),
            past_peak,
            device_peak,
            relative_time: step.relative_time * loader.relative_time,
        })
    });
    pairs.collect()
}

/// The pair that holds least; the fastest of several such pairs.
fn smallest<'c, 'a, S: Setting, L: Setting>(candidates: &'c [Candidate<'a, S, L>]) -> &'c Candidate<'a, S, L> {
    candidates.iter().min_by(|a, b| a.compare_size(b)).expect("there is at least one pair")
}

impl<S: Setting, L: Setting> Candidate<'_, S, L> {
    /// The peak of the whole process.
    fn predicted_peak(&self) -> Bytes {
        self.coming_peak.max(self.past_peak)
    }

    fn required(&self) -> Bytes {
        self.required_at(MemorySpace::Host)
    }

    /// Bytes that must be available at this instant: the coming peak, and the least headroom. The rest of the headroom is for later, and
    /// only the budget must have room for it.
    fn needs_now(&self) -> Bytes {
        self.coming_peak + MIN_HEADROOM
    }

    /// Orders by time, then pairs without files first, then by memory. Times up to `as_fast` count as equal, except between pairs of equal
    /// memory. `min_by` keeps the first of equals: the order of the offer.
    fn compare(&self, other: &Self, as_fast: f64) -> std::cmp::Ordering {
        let [time, other_time] = [self, other].map(|candidate| candidate.relative_time.max(as_fast));
        let bytes = |candidate: &Self| candidate.coming_peak + candidate.device_peak;
        let exactly = self.relative_time.total_cmp(&other.relative_time);
        // If there is enough memory, a disk should not be worn out to save some.
        let files = |candidate: &Self| candidate.step.what.uses_files();
        let files = files(self).cmp(&files(other));
        time.total_cmp(&other_time).then(files).then(bytes(self).cmp(&bytes(other))).then(exactly)
    }

    /// Orders by the process's own memory, and so by the required budget; then by time.
    fn compare_size(&self, other: &Self) -> std::cmp::Ordering {
        self.coming_peak.cmp(&other.coming_peak).then(self.relative_time.total_cmp(&other.relative_time))
    }

    /// The smallest budget at `place` that this pair fits.
    fn required_at(&self, place: MemorySpace) -> Bytes {
        let peak = if place.is_host() { self.predicted_peak() } else { self.device_peak };
        peak + headroom(peak)
    }

    /// The gain of the smallest budget with a faster plan, in words. The budget is that of the memory that tensors are in.
    fn next(
        &self,
        candidates: &[Self],
        as_fast: f64,
        (place, wanted): (MemorySpace, Budgets),
        budget: Bytes,
    ) -> String {
        let (flag, budget_there) = match place {
            MemorySpace::Host => ("--memory-budget", wanted.process),
            MemorySpace::Device => ("--device-memory-budget", wanted.device),
        };
        let by_size = |a: &&Self, b: &&Self| {
            let required = |candidate: &&Self| candidate.required_at(place);
            required(a).cmp(&required(b)).then(a.compare_size(b))
        };
        // Without a named budget, a little time is traded for much memory, and the user should know.
        let (next, than, why) = match budget_there {
            Budget::Explicit(_) => {
                let time = self.relative_time.max(as_fast);
                let is_faster = |other: &&Self| {
                    other.required_at(place) > self.required_at(place) && other.relative_time < 0.98 * time
                };
                (candidates.iter().filter(is_faster).min_by(by_size), time, String::new())
            }
            Budget::ShareOfAvailable => {
                let by_time = |a: &&Self, b: &&Self| a.relative_time.total_cmp(&b.relative_time).then(by_size(a, b));
                let fastest = candidates.iter().min_by(by_time);
                (
                    fastest.filter(|fastest| fastest.relative_time < 0.98 * self.relative_time),
                    self.relative_time,
                    format!("{flag} is not set, so the plan is small and nearly the fastest; "),
                )
            }
        };
        let Some(next) = next else { return "this is the fastest plan".to_string() };
        let percent = 100.0 * (1.0 - next.relative_time / than);
        let named =
            |flag: &str, place: MemorySpace| format!("{flag} {}MiB", next.required_at(place).round_up_to_mib().0 >> 20);
        let mut flags = named(flag, place);
        if !place.is_host() && next.required() > budget {
            flags += &format!(" {}", named("--memory-budget", MemorySpace::Host));
        }
        format!("{why}{percent:.0} % faster with {flags} ({})", next.step.what.in_words())
    }

    /// Rows of the device at its peak.
    fn device_rows(&self, costs: &Costs<S, L>) -> Vec<CostRow> {
        let rows = costs.fixed.iter().chain(self.step.largest_phase_at(MemorySpace::Device).1);
        rows.filter(|row| row.place == MemorySpace::Device).cloned().collect()
    }

    /// A phase with all its rows in the process's own memory. `of_step` are the step's rows.
    fn phase(&self, costs: &Costs<S, L>, name: &Name, of_step: &[CostRow]) -> Phase {
        let of_loader = self.loader.other_phases.iter().filter(|phase| phase.name == *name);
        let rows = costs.fixed.iter().chain(of_step).chain(of_loader.flat_map(|phase| &phase.rows));
        let always = if *name == LOADING { &[] } else { self.loader.rows.as_slice() };
        let rows = rows.chain(always).filter(|row| row.place.is_host());
        Phase { name: name.clone(), rows: rows.cloned().collect() }
    }

    /// The phase that is over, and those in which the step or its loader holds memory. Only some loaders hold any in the feeding phase.
    fn phases(&self, costs: &Costs<S, L>) -> Vec<Phase> {
        let feeds = self.loader.held().feeding > Bytes::ZERO;
        let is_held = |(name, rows): &(&Name, &[CostRow])| !rows.is_empty() && (**name != FEEDING || feeds);
        let phases = self.step.phases().filter(is_held);
        let past = (!costs.past.is_empty()).then(|| Phase { name: READING, rows: costs.past.clone() });
        past.into_iter().chain(phases.map(|(name, rows)| self.phase(costs, name, rows))).collect()
    }

    /// This pair as a plan. `frame` is a bill with the budget, but without rows.
    fn plan(&self, costs: &Costs<S, L>, frame: Bill, limited_by: Limit) -> Plan<S, L> {
        let Self { step, loader, coming_peak, device_peak, relative_time, .. } = *self;
        let predicted_peak = self.predicted_peak();
        let headroom = headroom(predicted_peak);
        let phases = self.phases(costs);
        let bytes = |phase: &Phase| sum(&phase.rows);
        let first = self.phase(costs, &TRAINING, &step.rows);
        let binding = phases.iter().fold(&first, |most, phase| if bytes(phase) > bytes(most) { phase } else { most });
        let bill = Bill {
            rows: binding.rows.clone(),
            headroom,
            headroom_note: match headroom {
                MIN_HEADROOM => "the minimum".to_string(),
                _ => format!("{HEADROOM_PERCENT} % of the predicted peak"),
            },
            predicted_peak,
            phases: phases.iter().map(|phase| CostRow::new(phase.name.clone(), bytes(phase).0, "")).collect(),
            binding: binding.name.clone(),
            conclusion: format!("{}, {}", costs.task, step.what.in_words()),
            phase_rows: phases,
            ..frame
        };
        Plan {
            step: step.what.clone(),
            loader: loader.what.clone(),
            budget: bill.budget,
            limited_by,
            predicted_peak,
            coming_peak,
            headroom,
            relative_time,
            predicted_device_peak: device_peak,
            bill,
            calm_replans: 0,
            squeezed: false,
            swapping_replans: 0,
            seen: None,
        }
    }
}

#[cfg(test)]
mod tests;
