//! A plan in words: its numbers under the names of their pins, and each lever with its other values.

use memory_policy::{Bytes, Explained};
use planner::Plan;

/// The most other values of a lever that are shown. More values are thinned out evenly.
const SHOWN: usize = 8;

/// Every lever with its value, followed by the other offered values.
pub fn explanation(levers: &[Explained], plan: &Plan) -> String {
    let (mut text, peak) = (String::new(), plan.peak_of_tensors());
    for lever in levers {
        text += &format!("{} = {}\n", lever.lever, lever.chosen);
        let shown = || lever.others.iter().step_by(lever.others.len().div_ceil(SHOWN).max(1));
        let width = shown().map(|other| other.value.len()).max().unwrap_or(0);
        for other in shown() {
            let (sign, bytes) = match other.predicted_peak > peak {
                true => ("+", other.predicted_peak.saturating_sub(peak)),
                false => ("-", peak.saturating_sub(other.predicted_peak)),
            };
            let percent = 100.0 * (other.relative_time - 1.0);
            text += &format!("  {:<width$}  {sign}{:<12} {percent:+.1} % time\n", other.value, bytes.to_string());
        }
    }
    text
}

/// The plan's numbers under the names of their pins.
pub fn in_words(plan: &Plan) -> String {
    let (levers, feeding) = (&plan.step.levers, &plan.loader);
    let lines = [
        ("micro_batch_samples", levers.micro_batch_samples.to_string()),
        ("recompute_blocks", levers.recompute_blocks.to_string()),
        ("loss_chunk_rows", levers.loss_chunk_rows.to_string()),
        ("prefetch_batches", feeding.prefetch_batches.to_string()),
        ("decode_threads", feeding.decode_threads.to_string()),
        ("dataset_residency", feeding.residency.to_string()),
        ("smallest budget of this plan", Bytes::to_string(&plan.required())),
    ];
    lines.iter().map(|(name, value)| format!("  {name:<30}{value}\n")).collect()
}
