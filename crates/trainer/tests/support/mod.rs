//! A small model in any precision, steps over batches that are functions of the step, and every bit of the results.

#[path = "../../../cuda-device/tests/support/device.rs"]
pub mod device;

use candle_core::{DType, Tensor};
use t5::{Config, T5};
use trainer::adafactor::AdafactorOptions;
use trainer::{Batch, StepOutcome, StepPlan, Trainer, TrainerOptions};

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
            match trainer.step(&Batch { sources: &sources, targets: &targets }, plan, &|| false).unwrap() {
                StepOutcome::Done(stats) => stats.loss,
                other => panic!("{other:?}"),
            }
        })
        .collect()
}

pub fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Parameters and optimizer state.
pub fn bits(trainer: &Trainer) -> Vec<Vec<u32>> {
    let parameters = trainer.model().parameters();
    let state = trainer.optimizer().named_state(parameters).map(|(_, tensor)| tensor);
    let tensors = parameters.iter().map(|parameter| &parameter.tensor).chain(state);
    tensors.map(|tensor| values(tensor).into_iter().map(f32::to_bits).collect()).collect()
}
