//! `train_low_mem bench`: optimizer steps over synthetic full-length samples, timed and measured.
//!
//! A step is what training does: forward, backward, clipping and Adafactor, dropout on, over `batch` samples
//! without padding. The first step is not timed: it allocates.

use std::path::Path;
use std::time::Instant;

use memory_policy::{Budget, Bytes, CostRow, Costs, LoaderChoice, MemorySnapshot, Plan, Probe, SystemProbe};
use serde_json::json;
use t5::{ParameterSpec, T5};
use trainer::{Batch, StepOutcome, Trainer, TrainerOptions};

use crate::bill::{StepCosts, Wanted};
use crate::cli::{self, BenchArgs, Precision, Recompute};
use crate::config::{AccumulationPin, Memory};
use crate::failure::{Failure, Outcome};
use crate::profile::Profiler;
use crate::rehearsal::rehearse;
use crate::{levers, offload, open, options, report};

/// Times steps.
pub fn bench(flags: &BenchArgs) -> Outcome<()> {
    let device = open::device(flags.device.as_deref().unwrap_or("auto"))?;
    let model = open::named_config(&flags.model)?;
    if flags.batch == 0 || flags.source_tokens < 2 || flags.target_tokens < 2 || flags.steps == 0 {
        return Err(Failure::usage("`bench` needs at least 1 sample, 2 source and 2 target tokens and 1 step")
            .hint("for example `--batch 8 --source-tokens 256 --target-tokens 256 --steps 5`"));
    }
    let options = TrainerOptions {
        dropout: model.dropout_rate,
        precision: flags.precision.into(),
        master_weights: flags.master_weights.into(),
        gradient_precision: flags.gradient_precision.into(),
        total_steps: flags.steps as u64 + 1,
        ..TrainerOptions::default()
    };
    let probe = SystemProbe::new();
    rehearse(&model, &options, &device)?;
    let now = probe.snapshot()?;
    let planned = plan(flags, &model, &options, &now)?;
    let (plan, predicted_peak_bytes) = (options::step_plan(&planned, None), planned.predicted_peak.0);
    let parameters: u64 = ParameterSpec::all(&model).iter().map(ParameterSpec::elements).sum();
    let mut profiler = if flags.profile { Some(Profiler::new(options.precision.activations())?) } else { None };
    // The system's own directory for such files lies in memory on many machines.
    let directories = [&flags.offload_gradients, &flags.offload, &flags.offload_weights];
    let directory = directories.into_iter().find_map(Option::as_deref).unwrap_or(Path::new("."));
    let files = offload::files(directory, &now, &planned);
    let weights = offload::has_weights_on_disk(&planned).then_some(&files);
    let mut trainer = Trainer::new(T5::init_in(&model, 0, options.parameter_dtype(), &device, weights)?, options)?;
    trainer.offload_to(files);
    let mut step_ms = Vec::with_capacity(flags.steps);
    for step in 0..=flags.steps as u64 {
        let [sources, targets] =
            [flags.source_tokens, flags.target_tokens].map(|tokens| samples(&model, flags.batch, tokens, step));
        let began = Instant::now();
        let mut one_step = || trainer.step(&Batch { sources: &sources, targets: &targets }, &plan, &|| false);
        let outcome = match profiler.as_mut().filter(|_| step > 0) {
            Some(profiler) => profiler.watch(one_step)?,
            None => one_step()?,
        };
        let StepOutcome::Done(_) = outcome else {
            return Err(Failure::internal(format!("a step failed: {outcome:?}")));
        };
        if step > 0 {
            step_ms.push(began.elapsed().as_secs_f64() * 1e3);
        }
    }
    let median_ms = median(&mut step_ms);
    let tokens = flags.batch * (flags.source_tokens + flags.target_tokens);
    #[expect(clippy::cast_precision_loss, reason = "tokens of a batch are far below 2^53")]
    let tokens_per_second = tokens as f64 * 1e3 / median_ms;
    let peak = probe.snapshot()?.peak_rss;
    let profile = profiler.map(Profiler::finish);
    let precision = if flags.precision == Precision::F32 { "f32" } else { "bf16" };
    if flags.json {
        let mut json = json!({
            "step_ms": median_ms, "tokens_per_second": tokens_per_second, "peak_rss_bytes": peak.0,
            "predicted_peak_bytes": predicted_peak_bytes, "required_bytes": planned.required().0, "parameters": parameters, "precision": precision,
            "threads": t5_ops::threads(), "instruction_set": t5_ops::instruction_set(), "steps": flags.steps, "batch": flags.batch, "source_tokens": flags.source_tokens,
            "target_tokens": flags.target_tokens, "micro_batch_samples": plan.levers.micro_batch_samples,
            "recompute_blocks": plan.levers.recompute_blocks, "relative_time": planned.relative_time, "loss_chunk_rows": plan.levers.loss_chunk_rows,
            "plan": planned.bill.conclusion, "tensor_bytes": heap::held().most_live,
            "accumulation": accumulation(plan.levers.layer_major.as_ref()), "step_ms_each": step_ms,
        });
        if let Some(profile) = &profile {
            json["profile"] = profile.to_json();
        }
        report::result(&format!("{json}\n"))?;
        return Ok(());
    }
    report::result(&format!(
        "{}: {parameters} parameters, {} x ({} + {}) tokens, {precision}, {} threads\n{median_ms:.1} ms a step (median of {}), {tokens_per_second:.0} tokens/s, peak {peak} (predicted {})\n",
        flags.model,
        flags.batch,
        flags.source_tokens,
        flags.target_tokens,
        t5_ops::threads(),
        flags.steps,
        Bytes(predicted_peak_bytes)
    ))?;
    if let Some(profile) = &profile {
        report::result(&profile.to_text())?;
    }
    Ok(())
}

/// The cut that the flags ask for, free where they say nothing, and the peak that is predicted for it.
fn plan(flags: &BenchArgs, model: &t5::Config, options: &TrainerOptions, now: &MemorySnapshot) -> Outcome<Plan> {
    let longest = (flags.source_tokens, flags.target_tokens);
    let budget = flags.memory_budget.map_or(Budget::ShareOfAvailable, Budget::Explicit);
    let step = StepCosts::of_batch(model, options, flags.batch, longest)?.within(budget, now);
    let pins = pins(flags)?;
    let mut fixed = vec![CostRow::new("process", now.rss.0, "measured: program")];
    fixed.extend(step.fixed(options)?);
    let costs = Costs {
        batch_samples: flags.batch,
        fixed,
        steps: Wanted::Undominated(None).of(step.choices(&pins)),
        loaders: vec![LoaderChoice { relative_time: 1.0, ..LoaderChoice::default() }],
    };
    Ok(memory_policy::plan(now, &costs, budget)?)
}

/// The pins of the flags. Without a budget, levers without a flag have fixed defaults, so that a measurement of one
/// lever does not change the others.
fn pins(flags: &BenchArgs) -> Outcome<Memory> {
    fn or_else<T>(named: Option<T>, is_free: bool, default: T) -> Option<T> {
        named.or((!is_free).then_some(default))
    }
    let is_free = flags.memory_budget.is_some();
    let recompute = flags.recompute.map(|recompute| match recompute {
        Recompute::Full => usize::MAX,
        Recompute::Blocks(blocks) => blocks,
    });
    let accumulation = flags.accumulation.map(|accumulation| match accumulation {
        cli::Accumulation::MicroBatchMajor => AccumulationPin::MicroBatchMajor,
        cli::Accumulation::LayerMajor => AccumulationPin::LayerMajor,
    });
    let recomputed = if accumulation == Some(AccumulationPin::LayerMajor) { usize::MAX } else { 0 };
    Ok(Memory {
        micro_batch_samples: flags.micro_batch,
        loss_chunk_rows: or_else(flags.loss_chunk_rows.map(|rows| rows.max(1)), is_free, 256),
        recompute_blocks: or_else(recompute, is_free, recomputed),
        accumulation: or_else(accumulation, is_free, AccumulationPin::MicroBatchMajor),
        kept_gradient_blocks: or_else(flags.kept_gradient_blocks, is_free, 0),
        heads_kept: or_else(flags.keep_heads.then_some(true), is_free, false),
        activation_offload: or_else(flags.offload.is_some().then_some(true), is_free, false),
        blocks_in_memory: or_else(flags.blocks_in_memory, is_free, 0),
        gradient_offload: or_else(flags.offload_gradients.is_some().then_some(true), is_free, false),
        weight_offload: or_else(flags.offload_weights.is_some().then_some(true), is_free, false),
        ..levers::no_pins()?
    })
}

/// The name in `--json` of the order of micro-batches and blocks.
fn accumulation(layer_major: Option<&t5::LayerMajor>) -> String {
    layer_major.map_or("MicroBatchMajor".to_owned(), |layers| format!("LayerMajor({layers:?})"))
}

/// Full-length samples, ended, of tokens that only depend on their place.
fn samples(model: &t5::Config, count: usize, tokens: usize, step: u64) -> Vec<Vec<u32>> {
    let eos = model.eos_token_ids.first().copied().unwrap_or(1);
    let ordinary = (model.vocab_size as u64).saturating_sub(3).max(1);
    let token = |sample: usize, place: usize| {
        let mut bits = (step << 40) ^ ((sample as u64) << 20) ^ place as u64;
        // The finaliser of splitmix64 spreads neighbouring places over the vocabulary.
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        u32::try_from((bits ^ (bits >> 31)) % ordinary).unwrap_or(0) + if ordinary > 3 { 3 } else { 0 }
    };
    (0..count).map(|sample| (0..tokens - 1).map(|place| token(sample, place)).chain([eos]).collect()).collect()
}

/// The median; of an even number the mean of the middle two.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { f64::midpoint(values[middle - 1], values[middle]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), 2.5);
    }

    #[test]
    fn samples_are_full_and_inside_the_vocabulary() {
        let model = t5::Config::preset("tiny").expect("a preset");
        let samples = samples(&model, 3, 10, 1);
        assert!(samples.iter().all(|sample| sample.len() == 10 && sample[9] == 1));
        assert!(samples.iter().flatten().all(|id| (*id as usize) < model.vocab_size));
        assert_ne!(samples[0], samples[1]);
    }
}
