//! Converts the config to the options of other crates. This module makes no decisions.

use candle_core::DType;
use planner::RowCounts;
use t5::GenerateOptions;
use trainer::adafactor::AdafactorOptions;
use trainer::adamw::AdamwOptions;
use trainer::schedule::{DEFAULT_PCT_START, Schedule, ScheduleKind};
use trainer::{MasterWeights, Precision, TrainerOptions};

use crate::config::{Config, Optimizer};

/// The trainer's options.
pub fn trainer_options(config: &Config, model: &t5::Config, total_steps: u64) -> TrainerOptions {
    let optimizer = &config.optimizer;
    TrainerOptions {
        seed: config.run.seed,
        dropout: config.train.dropout.unwrap_or(model.dropout_rate),
        precision: if config.train.bf16 { Precision::Bf16 } else { Precision::F32 },
        master_weights: master_weights(config.train.master_weights, config.train.bf16, model.lora.is_some()),
        gradient_precision: config.train.gradient_precision,
        freeze: config.train.freeze.clone(),
        grad_clip_norm: config.train.grad_clip_norm,
        optimizer: if optimizer.is_adamw { adamw(optimizer).into() } else { adafactor(optimizer).into() },
        schedule: schedule(config),
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

fn adafactor(optimizer: &Optimizer) -> AdafactorOptions {
    AdafactorOptions {
        learning_rate: optimizer.learning_rate,
        eps1: optimizer.eps1,
        eps2: optimizer.eps2,
        clip_threshold: optimizer.clip_threshold,
        decay_rate: optimizer.decay_rate,
        beta1: optimizer.beta1,
        weight_decay: optimizer.weight_decay.unwrap_or(0.0),
        scale_parameter: optimizer.scale_parameter,
        relative_step: optimizer.learning_rate.is_none(),
        warmup_init: optimizer.warmup_init,
    }
}

fn adamw(optimizer: &Optimizer) -> AdamwOptions {
    let of_torch = AdamwOptions::default();
    AdamwOptions {
        learning_rate: optimizer.learning_rate.unwrap_or(of_torch.learning_rate),
        beta1: optimizer.beta1.unwrap_or(of_torch.beta1),
        beta2: optimizer.beta2.unwrap_or(of_torch.beta2),
        eps: optimizer.eps.unwrap_or(of_torch.eps),
        weight_decay: optimizer.weight_decay.unwrap_or(of_torch.weight_decay),
    }
}

fn schedule(config: &Config) -> Schedule {
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
    Schedule { kind, warmup_steps: schedule.warmup_steps }
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
