//! An explanation of a plan: for each lever, the chosen value, and the memory and time of the other values.

use crate::costs::{peak_at, sum_at};
use crate::{Bytes, Choice, Costs, Plan, Setting};

/// One lever of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Explained {
    /// The lever's name, which is also its pin's.
    pub lever: &'static str,
    /// The value that the plan has.
    pub chosen: String,
    /// Every other value that was offered, with all other levers unchanged.
    pub others: Vec<Other>,
}

/// Another value of a lever.
#[derive(Clone, Debug, PartialEq)]
pub struct Other {
    /// The value.
    pub value: String,
    /// The predicted peak with this value: of the device if tensors are there, else of the process.
    pub predicted_peak: Bytes,
    /// Time of a step relative to the plan's.
    pub relative_time: f64,
}

/// Explains every lever of `plan`, which was made from `costs`.
pub fn explain<S: Setting, L: Setting>(costs: &Costs<S, L>, plan: &Plan<S, L>) -> Vec<Explained> {
    let step = costs.steps.iter().find(|step| step.what.does_the_same_as(&plan.step));
    let loader = costs.loaders.iter().find(|loader| loader.what.does_the_same_as(&plan.loader));
    let (Some(step), Some(loader)) = (step, loader) else { return Vec::new() };
    let place = plan.place_of_tensors();
    let fixed = sum_at(place, &costs.fixed);
    let mut explained = explained(step, &costs.steps, |other| fixed + peak_at(place, other, loader));
    explained.extend(self::explained(loader, &costs.loaders, |other| fixed + peak_at(place, step, other)));
    explained
}

/// The levers of one choice, with the peak of each other choice.
fn explained<T: Setting>(
    chosen: &Choice<T>,
    offered: &[Choice<T>],
    peak: impl Fn(&Choice<T>) -> Bytes,
) -> Vec<Explained> {
    let value_of = |choice: &Choice<T>, lever: &str| {
        choice.what.levers().into_iter().find(|(name, _)| *name == lever).map(|(_, value)| value)
    };
    let of_lever = |(lever, value): (&'static str, String)| {
        let mut others: Vec<Other> = Vec::new();
        for other in offered.iter().filter(|other| chosen.what.differs_only_in(lever, &other.what)) {
            let Some(other_value) = value_of(other, lever) else { continue };
            if other_value != value && others.iter().all(|seen| seen.value != other_value) {
                let relative_time = other.relative_time / chosen.relative_time;
                others.push(Other { value: other_value, predicted_peak: peak(other), relative_time });
            }
        }
        Explained { lever, chosen: value, others }
    };
    chosen.what.levers().into_iter().map(of_lever).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{ACTIVATIONS, Ahead, Cut, PARAMETERS};
    use crate::{Budget, CostRow, MemorySnapshot, plan};

    #[test]
    fn each_lever_shows_what_its_other_values_would_save_and_cost() {
        let step = |samples: usize, repeated: usize, mib: u64, relative_time: f64| {
            let rows = vec![CostRow::new(ACTIVATIONS, mib << 20, "")];
            Choice::new(Cut { samples, repeated }, rows, relative_time)
        };
        let costs = Costs {
            task: "8 samples a step".into(),
            fixed: vec![CostRow::new(PARAMETERS, 100 << 20, "")],
            past: Vec::new(),
            steps: vec![step(8, 0, 800, 1.0), step(8, 4, 500, 1.3), step(4, 0, 400, 1.1)],
            loaders: vec![Choice::new(Ahead { batches: 1 }, Vec::new(), 1.0)],
        };
        let now = MemorySnapshot { available: Bytes::gib(8), ..Default::default() };
        let plan = plan(&now, &costs, Budget::Explicit(Bytes::gib(1))).unwrap();
        let explained = explain(&costs, &plan);
        let other = |value: &str, mib: u64, relative_time: f64| Other {
            value: value.to_string(),
            predicted_peak: Bytes::mib(mib),
            relative_time,
        };
        assert_eq!((explained[0].lever, explained[0].chosen.as_str()), ("samples", "8"));
        assert_eq!(explained[0].others, [other("4", 500, 1.1)]);
        assert_eq!(explained[1].others, [other("4", 600, 1.3)]);
        assert!(explained.len() == 3 && explained[2].others.is_empty());
    }
}
