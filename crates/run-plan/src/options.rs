//! Converts the config to the options of other crates. This module makes no decisions.

use candle_core::DType;
use planner::RowCounts;
use t5::GenerateOptions;
use trainer::schedule::{DEFAULT_PCT_START, Schedule, ScheduleKind};
use trainer::{MasterWeights, Precision, TrainerOptions};

use crate::config::{Config, class_weights};

/// The trainer's options.
pub fn trainer_options(config: &Config, model: &t5::Config, total_steps: u64) -> TrainerOptions {
    TrainerOptions {
        seed: config.run.seed,
        // The pass that weighs pairs of answers has no dropout, so neither has the step.
        dropout: config.train.dropout.unwrap_or(if config.preference.is_some() { 0.0 } else { model.dropout_rate }),
        precision: if config.train.bf16 { Precision::Bf16 } else { Precision::F32 },
        master_weights: master_weights(config.train.master_weights, config.train.bf16, model.lora.is_some()),
        gradient_precision: config.train.gradient_precision,
        freeze: config.train.freeze.clone(),
        grad_clip_norm: config.train.grad_clip_norm,
        z_loss: config.train.z_loss,
        label_smoothing: config.train.label_smoothing,
        class_weights: class_weights::resolve(config, &model.head),
        preference: config.preference,
        distillation: config.distillation,
        contrastive: config.embedding.clone(),
        ranking: config.ranking.as_ref().map(|of| of.of),
        optimizer: config.optimizer.options,
        groups: config.optimizer.groups.clone(),
        schedule: schedule(config, total_steps),
        total_steps,
        max_non_finite: u32::try_from(config.train.max_non_finite_steps).unwrap_or(u32::MAX),
    }
}

/// Beside an adapter, a bf16 run keeps its frozen weights in bf16, because products round them anyway. The few weights that are trained
/// with the adapter are rounded stochastically.
pub fn master_weights(chosen: MasterWeights, is_bf16: bool, has_adapter: bool) -> MasterWeights {
    match chosen {
        MasterWeights::F32 if is_bf16 && has_adapter => MasterWeights::StochasticRounding,
        chosen => chosen,
    }
}

fn schedule(config: &Config, total_steps: u64) -> Schedule {
    let schedule = &config.schedule;
    let kind = match schedule.name.as_str() {
        "one-cycle" => ScheduleKind::OneCycle {
            div_factor: schedule.div_factor,
            pct_start: DEFAULT_PCT_START,
            final_div_factor: schedule.final_div_factor,
        },
        "linear" => ScheduleKind::Linear,
        "cosine" => ScheduleKind::Cosine,
        "inverse-sqrt" => ScheduleKind::InverseSqrt,
        _ => ScheduleKind::Constant,
    };
    // As transformers rounds it.
    let of_all = schedule.warmup_ratio.map(|ratio| (ratio * total_steps as f64).ceil() as u64);
    Schedule { kind, warmup_steps: schedule.warmup_steps.or(of_all) }
}

/// The rows of a validation dataset of `rows` rows that an evaluation takes.
pub fn evaluated(config: &Config, rows: Option<u64>) -> RowCounts {
    RowCounts::new(config.train.eval_samples, config.train.eval_generate_samples, rows)
}

/// The options of generation in an evaluation.
pub fn answers(config: &Config) -> GenerateOptions {
    GenerateOptions {
        max_new_tokens: config.train.eval_max_new_tokens,
        activations: if config.train.bf16 { DType::BF16 } else { DType::F32 },
        ..config.generation.options()
    }
}
