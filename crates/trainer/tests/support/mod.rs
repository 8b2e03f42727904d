//! A small model in any precision, steps over batches that are functions of the step, and every bit of the results.

#![allow(dead_code, reason = "each test takes a part")]

#[path = "../../../cuda-device/tests/support/device.rs"]
pub mod device;

use candle_core::{DType, Tensor};
use t5::{Config, T5};
use trainer::adafactor::AdafactorOptions;
use trainer::{Batch, MasterWeights, Precision, StepOutcome, StepPlan, StepStats, Trainer, TrainerOptions};

pub use self::device::device;

pub fn config() -> Config {
    Config {
        vocab_size: 37,
        d_model: 32,
        d_kv: 8,
        d_ff: 48,
        num_layers: 2,
        num_decoder_layers: 2,
        num_heads: 4,
        ..Config::default()
    }
}

/// A model with tensors that are large enough for a file.
pub fn config_for_files() -> Config {
    Config { vocab_size: 150, d_model: 64, d_kv: 16, d_ff: 160, ..config() }
}

pub fn options() -> TrainerOptions {
    TrainerOptions {
        seed: 3,
        optimizer: AdafactorOptions {
            learning_rate: Some(1e-3),
            relative_step: false,
            scale_parameter: false,
            ..AdafactorOptions::default()
        }
        .into(),
        total_steps: 100,
        ..TrainerOptions::default()
    }
}

/// The same with dropout, and in bf16 with stochastic rounding.
pub fn options_in(precision: Precision) -> TrainerOptions {
    let master_weights = match precision {
        Precision::Bf16 => MasterWeights::StochasticRounding,
        _ => MasterWeights::F32,
    };
    TrainerOptions { dropout: 0.1, precision, master_weights, ..options() }
}

pub fn new(options: TrainerOptions) -> Trainer {
    Trainer::new(T5::init(&config(), 7, options.parameter_dtype(), &device()).unwrap(), options).unwrap()
}

/// Sources and targets of a step's batch.
pub fn batch(step: u32, samples: u32) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let ids = |sample: u32| -> Vec<u32> {
        (0..4 + sample % 5).map(|i| 2 + (step % 3 * 11 + sample * 7 + i * 5) % 35).chain([1]).collect()
    };
    ((0..samples).map(ids).collect(), (1..=samples).map(ids).collect())
}

/// Steps `steps`, of `samples` samples each; the losses.
pub fn run(trainer: &mut Trainer, plan: &StepPlan, samples: u32, steps: std::ops::Range<u32>) -> Vec<f64> {
    steps
        .map(|step| {
            let (sources, targets) = batch(step, samples);
            done(trainer.step(&Batch { sources: &sources, targets: &targets }, plan, &|| false).unwrap()).loss
        })
        .collect()
}

/// A step of 7 samples; its loss.
pub fn step(trainer: &mut Trainer, seed: u32, plan: &StepPlan) -> f64 {
    run(trainer, plan, 7, seed..seed + 1)[0]
}

pub fn done(outcome: StepOutcome) -> StepStats {
    match outcome {
        StepOutcome::Done(stats) => stats,
        other => panic!("expected a finished step, got {other:?}"),
    }
}

pub fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Parameters and optimizer state, by name.
pub fn state(trainer: &Trainer) -> Vec<(String, &Tensor)> {
    let parameters = trainer.model().parameters();
    let own = parameters.iter().map(|parameter| (parameter.name.clone(), &parameter.tensor));
    own.chain(trainer.optimizer().named_state(parameters)).collect()
}

/// Every bit of parameters and optimizer state.
pub fn bits(trainer: &Trainer) -> Vec<Vec<u32>> {
    let of = |(_, tensor): (String, &Tensor)| values(tensor).into_iter().map(f32::to_bits).collect();
    state(trainer).into_iter().map(of).collect()
}
