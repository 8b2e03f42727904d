//! An explanation of a plan: for each lever, what was chosen and what its other values would save or cost.

use crate::costs::sum_at;
use crate::{Bytes, CostRow, Costs, LoaderChoice, Plan, StepChoice};

/// One lever of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Explained {
    /// The lever's name, that of its pin.
    pub lever: &'static str,
    /// The value that the plan has.
    pub chosen: String,
    /// Every other value that was offered, all other levers left as they are.
    pub others: Vec<Other>,
}

/// Another value of a lever.
#[derive(Clone, Debug, PartialEq)]
pub struct Other {
    /// The value.
    pub value: String,
    /// The predicted peak with it, where tensors lie: of the device, or of the process.
    pub predicted_peak: Bytes,
    /// Time of a step over the plan's.
    pub relative_time: f64,
}

/// Every lever of `plan`, which was made from `costs`.
pub fn explain(costs: &Costs, plan: &Plan) -> Vec<Explained> {
    let is_loader = |loader: &&LoaderChoice| {
        loader.residency == plan.residency
            && loader.decode_threads == plan.decode_threads
            && loader.prefetch_batches == plan.prefetch_batches
    };
    let (Some(step), Some(loader)) =
        (costs.steps.iter().find(|step| plan.has_step(step)), costs.loaders.iter().find(is_loader))
    else {
        return Vec::new();
    };
    let place = plan.place_of_tensors();
    let sum = |rows: &[CostRow]| sum_at(place, rows);
    let peak = |step: &StepChoice, loader: &LoaderChoice| {
        sum(&costs.fixed) + sum(step.binding_at(place).1) + sum(&loader.rows)
    };
    let step_lever = |lever, show: &dyn Fn(&StepChoice) -> String, is_same: &dyn Fn(&StepChoice) -> bool| {
        let chosen = show(step);
        let mut others: Vec<Other> = Vec::new();
        for other in costs.steps.iter().filter(|other| is_same(other)) {
            let value = show(other);
            if value != chosen && others.iter().all(|seen| seen.value != value) {
                let relative_time = other.relative_time / step.relative_time;
                others.push(Other { value, predicted_peak: peak(other, loader), relative_time });
            }
        }
        Explained { lever, chosen, others }
    };
    let samples = |other: &StepChoice| other.micro_batch_samples == step.micro_batch_samples;
    let blocks = |other: &StepChoice| other.recompute_blocks == step.recompute_blocks;
    let chunk = |other: &StepChoice| other.loss_chunk_rows == step.loss_chunk_rows;
    let layers = |other: &StepChoice| other.layer_major == step.layer_major;
    let show_layers = |step: &StepChoice| match step.layer_major {
        None => "micro-batch-major".to_string(),
        Some(layers) => {
            let levers: String = layers.in_words(step.recompute_blocks).map(|lever| format!(", {lever}")).collect();
            format!("layer-major, gradients of {} blocks kept{levers}", layers.kept_gradient_blocks)
        }
    };
    let show_loader = |loader: &LoaderChoice| {
        format!("{}, {} ahead, {} threads", loader.residency, loader.prefetch_batches, loader.decode_threads)
    };
    let other_loaders = costs.loaders.iter().filter(|other| show_loader(other) != show_loader(loader));
    vec![
        step_lever("micro_batch_samples", &|step| step.micro_batch_samples.to_string(), &|other| {
            blocks(other) && chunk(other) && layers(other)
        }),
        step_lever("recompute_blocks", &|step| step.recompute_blocks.to_string(), &|other| {
            samples(other) && chunk(other) && layers(other)
        }),
        step_lever("loss_chunk_rows", &|step| step.loss_chunk_rows.to_string(), &|other| {
            samples(other) && blocks(other) && layers(other)
        }),
        // Another way of accumulating computes another number of blocks again.
        step_lever("accumulation", &show_layers, &|other| samples(other) && chunk(other)),
        Explained {
            lever: "loader",
            chosen: show_loader(loader),
            others: other_loaders
                .map(|other| Other {
                    value: show_loader(other),
                    predicted_peak: peak(step, other),
                    relative_time: other.relative_time / loader.relative_time,
                })
                .collect(),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Budget, MemorySnapshot, plan};

    #[test]
    fn each_lever_shows_what_its_other_values_would_save_and_cost() {
        let step = |samples: usize, blocks: usize, mib: u64, relative_time: f64| StepChoice {
            micro_batch_samples: samples,
            recompute_blocks: blocks,
            rows: vec![CostRow::new("activations", mib << 20, "")],
            relative_time,
            ..StepChoice::default()
        };
        let costs = Costs {
            batch_samples: 8,
            fixed: vec![CostRow::new("parameters", 100 << 20, "")],
            steps: vec![step(8, 0, 800, 1.0), step(8, 4, 500, 1.3), step(4, 0, 400, 1.1)],
            loaders: vec![LoaderChoice { relative_time: 1.0, ..LoaderChoice::default() }],
        };
        let now = MemorySnapshot { available: Bytes::gib(8), ..Default::default() };
        let plan = plan(&now, &costs, Budget::Explicit(Bytes::gib(1))).unwrap();
        let explained = explain(&costs, &plan);
        let other = |value: &str, mib: u64, relative_time: f64| Other {
            value: value.to_string(),
            predicted_peak: Bytes::mib(mib),
            relative_time,
        };
        assert_eq!((explained[0].lever, explained[0].chosen.as_str()), ("micro_batch_samples", "8"));
        assert_eq!(explained[0].others, [other("4", 500, 1.1)]);
        assert_eq!(explained[1].others, [other("4", 600, 1.3)]);
        assert!(explained[2].others.is_empty() && explained[4].others.is_empty());
    }
}
