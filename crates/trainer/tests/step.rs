//! Steps on a tiny T5: the memory plan does not change the mathematics, and invalid gradients never reach the parameters.

mod support;

use std::cell::Cell;

use candle_core::{DType, Tensor};
use t5::{Config, T5};
use trainer::adafactor::AdafactorOptions;
use trainer::schedule::{Schedule, ScheduleKind};
use trainer::{Batch, Error, Levers, Precision, StepOutcome, StepPlan, StepStats, Trainer, TrainerOptions, costs};

use self::support::{device, done, state};

const VOCABULARY: u32 = 37;

fn config() -> Config {
    Config {
        vocab_size: VOCABULARY as usize,
        d_model: 12,
        d_kv: 5,
        d_ff: 20,
        num_layers: 2,
        num_decoder_layers: 2,
        num_heads: 2,
        ..Config::default()
    }
}

fn model(dtype: DType) -> T5 {
    T5::init(&config(), 7, dtype, &device()).unwrap()
}

fn options() -> TrainerOptions {
    TrainerOptions {
        seed: 3,
        dropout: 0.1,
        optimizer: AdafactorOptions {
            learning_rate: Some(1e-2),
            relative_step: false,
            scale_parameter: false,
            beta1: Some(0.9),
            ..AdafactorOptions::default()
        }
        .into(),
        schedule: Schedule { kind: ScheduleKind::Linear, warmup_steps: Some(2) },
        total_steps: 50,
        ..TrainerOptions::default()
    }
}

/// Samples of uneven length, a function of `(seed, samples)`.
fn samples(seed: u32, samples: usize) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let mut next = |below: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % below
    };
    let mut ids = |longest: u32| -> Vec<u32> {
        let length = next(longest);
        (0..length).map(|_| 2 + next(VOCABULARY - 2)).chain([1]).collect()
    };
    (0..samples).map(|_| (ids(9), ids(7))).unzip()
}

const PLAN: StepPlan = StepPlan {
    levers: Levers {
        micro_batch_samples: 3,
        recompute_blocks: 0,
        loss_chunk_rows: 8,
        layer_major: None,
        weight_copies: false,
        repeats: false,
    },
    longest: None,
};

fn plan_of(micro_batch_samples: usize) -> StepPlan {
    StepPlan { levers: Levers { micro_batch_samples, ..PLAN.levers }, ..PLAN }
}

fn step(trainer: &mut Trainer, seed: u32, plan: &StepPlan) -> StepOutcome {
    let (sources, targets) = samples(seed, 7);
    trainer.step(&Batch { sources: &sources, targets: &targets }, plan, &|| false).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// Every bit of parameters and optimizer state, by name.
fn everything(trainer: &Trainer) -> Vec<(String, Vec<u32>)> {
    state(trainer).into_iter().map(|(name, tensor)| (name, bits(tensor))).collect()
}

fn gradients_of_cut(dtype: DType, micro_batch_samples: usize, recompute_blocks: usize) -> (StepStats, Vec<Vec<f64>>) {
    let precision = if dtype == DType::F64 { Precision::F64 } else { Precision::F32 };
    let mut trainer = Trainer::new(model(dtype), TrainerOptions { precision, ..options() }).unwrap();
    let plan = StepPlan {
        levers: Levers {
            micro_batch_samples,
            recompute_blocks,
            loss_chunk_rows: 4 + micro_batch_samples,
            layer_major: None,
            ..Levers::default()
        },
        longest: None,
    };
    let stats = done(step(&mut trainer, 1, &plan));
    let gradients = trainer
        .gradients()
        .iter()
        .map(|(_, gradient)| gradient.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap())
        .collect();
    (stats, gradients)
}

fn check_that_cuts_agree(dtype: DType, tolerance: f64) {
    let (whole, expected) = gradients_of_cut(dtype, 7, 0);
    for (micro_batch_samples, recompute_blocks) in [(1, 0), (2, 0), (3, 2), (4, 4), (6, 0), (100, 1)] {
        let (stats, gradients) = gradients_of_cut(dtype, micro_batch_samples, recompute_blocks);
        assert!((stats.loss - whole.loss).abs() <= tolerance * whole.loss, "{} {}", stats.loss, whole.loss);
        assert!((stats.grad_norm - whole.grad_norm).abs() <= tolerance * whole.grad_norm);
        assert_eq!(stats.micro_batches, 7usize.div_ceil(micro_batch_samples));
        for (index, (got, expected)) in gradients.iter().zip(&expected).enumerate() {
            let largest = expected.iter().fold(0f64, |largest, value| largest.max(value.abs()));
            for (got, expected) in got.iter().zip(expected) {
                let error = (got - expected).abs();
                assert!(
                    error <= tolerance * largest,
                    "{dtype:?}, parameter {index}, cut {micro_batch_samples}: {error:e} of {largest:e}"
                );
            }
        }
    }
}

#[test]
fn micro_batching_does_not_change_the_gradient() {
    check_that_cuts_agree(DType::F64, 1e-10);
    check_that_cuts_agree(DType::F32, 1e-5);
}

#[test]
fn a_micro_batch_of_short_samples_takes_more_of_them_and_the_gradient_is_the_same() {
    let run = |longest| {
        let mut trainer = Trainer::new(model(DType::F32), options()).unwrap();
        done(step(&mut trainer, 1, &StepPlan { longest, ..plan_of(2) }))
    };
    let (by_count, by_size, of_long_ones) = (run(None), run(Some((18, 14))), run(Some((2, 2))));
    assert!(by_size.micro_batches < by_count.micro_batches, "{} {}", by_size.micro_batches, by_count.micro_batches);
    assert!(of_long_ones.micro_batches > by_size.micro_batches, "{}", of_long_ones.micro_batches);
    for other in [by_size, of_long_ones] {
        assert!((other.loss - by_count.loss).abs() <= 1e-5 * by_count.loss);
        assert!((other.grad_norm - by_count.grad_norm).abs() <= 1e-5 * by_count.grad_norm);
    }
}

#[test]
fn the_same_plan_gives_the_same_bits() {
    let run = || {
        let mut trainer = Trainer::new(model(DType::F32), options()).unwrap();
        let losses: Vec<_> = (0..5).map(|seed| done(step(&mut trainer, seed, &PLAN)).loss.to_bits()).collect();
        (losses, everything(&trainer))
    };
    assert!(run() == run());
}

#[test]
fn the_loss_falls_on_a_batch_seen_again_and_again() {
    let mut trainer = Trainer::new(model(DType::F32), TrainerOptions { dropout: 0.0, ..options() }).unwrap();
    let losses: Vec<f64> = (0..40).map(|_| done(step(&mut trainer, 5, &PLAN)).loss).collect();
    assert!(losses[39] < losses[0] / 2.0, "{losses:?}");
}

#[test]
fn the_stats_count_tokens_without_padding_and_steps_from_one() {
    let mut trainer = Trainer::new(model(DType::F32), options()).unwrap();
    let sources = vec![vec![5, 1], vec![6, 7, 8, 1], vec![1]];
    let targets = vec![vec![9, 1], vec![1], vec![4, 5, 6, 1]];
    let plan = plan_of(2);
    let stats = done(trainer.step(&Batch { sources: &sources, targets: &targets }, &plan, &|| false).unwrap());
    assert_eq!((stats.step, stats.source_tokens, stats.target_tokens, stats.micro_batches), (1, 7, 7, 2));
    // Samples 1 and 2 first (five tokens each): two sources of 4, two targets of 4. Then sample 0.
    assert_eq!(stats.padded_tokens, 2 * (4 + 4) + 4);
    assert_eq!((stats.lr, trainer.learning_rate()), (0.0, 5e-3));
}

#[test]
fn the_last_smaller_batch_of_an_epoch_is_stepped() {
    let mut trainer = Trainer::new(model(DType::F32), options()).unwrap();
    done(step(&mut trainer, 1, &PLAN));
    let before = everything(&trainer);
    let (sources, targets) = samples(9, 1);
    let stats = done(trainer.step(&Batch { sources: &sources, targets: &targets }, &PLAN, &|| false).unwrap());
    assert_eq!((stats.step, stats.target_tokens), (2, targets[0].len() as u64));
    assert!(everything(&trainer) != before);
}

#[test]
fn an_interrupted_step_changes_nothing_and_can_be_made_again() {
    let mut straight = Trainer::new(model(DType::F32), options()).unwrap();
    let mut stopped = Trainer::new(model(DType::F32), options()).unwrap();
    done(step(&mut straight, 1, &PLAN));
    done(step(&mut stopped, 1, &PLAN));
    let before = everything(&stopped);
    let (sources, targets) = samples(2, 7);
    let batch = Batch { sources: &sources, targets: &targets };
    let mut questions = 0;
    let b = loop {
        let asked = Cell::new(0);
        let interrupted = || asked.replace(asked.get() + 1) == questions;
        match stopped.step(&batch, &PLAN, &interrupted).unwrap() {
            StepOutcome::Interrupted => {}
            outcome => break done(outcome),
        }
        assert_eq!(stopped.step_count(), 1);
        assert!(everything(&stopped) == before, "interrupted at question {questions}");
        questions += 1;
    };
    let a = done(step(&mut straight, 2, &PLAN));
    assert_eq!(a, b);
    assert!(everything(&stopped) == everything(&straight));
    // For each micro-batch: before each block in forward and in backward, the head and the two norms. And once before the
    // update.
    let blocks = straight.model().config().blocks();
    assert_eq!(questions, a.micro_batches * (3 + 2 * blocks) + 1);
}

#[test]
fn a_batch_without_samples_is_a_step_that_changes_nothing() {
    let mut trainer = Trainer::new(model(DType::F32), options()).unwrap();
    done(step(&mut trainer, 1, &PLAN));
    let before = everything(&trainer);
    let outcome = trainer.step(&Batch { sources: &[], targets: &[] }, &PLAN, &|| false).unwrap();
    assert!(matches!(outcome, StepOutcome::Empty(StepStats { step: 2, target_tokens: 0, .. })), "{outcome:?}");
    assert!(everything(&trainer) == before);
    assert_eq!((trainer.step_count(), trainer.optimizer().updates()), (2, 1));
}

/// Makes the model's output non-finite from here on.
fn poison(trainer: &Trainer, value: f32) -> Tensor {
    let norm = trainer.model().parameters().iter().find(|p| p.name == "decoder.final_layer_norm.weight").unwrap();
    let healthy = norm.tensor.copy().unwrap();
    let poisoned = Tensor::full(value, norm.tensor.dims(), &device()).unwrap();
    norm.tensor.slice_set(&poisoned, 0, 0).unwrap();
    healthy
}

#[test]
fn nothing_that_is_not_finite_reaches_the_parameters() {
    for value in [f32::NAN, f32::INFINITY, f32::MAX] {
        let mut trainer = Trainer::new(model(DType::F32), TrainerOptions { max_non_finite: 3, ..options() }).unwrap();
        done(step(&mut trainer, 1, &PLAN));
        let healthy = poison(&trainer, value);
        let before = everything(&trainer);
        for expected_step in [2, 3] {
            let StepOutcome::Skipped(stats) = step(&mut trainer, 1, &PLAN) else { panic!("{value} was stepped") };
            assert_eq!(stats.step, expected_step);
            assert!(!stats.loss.is_finite() || !stats.grad_norm.is_finite(), "the raw values are reported: {stats:?}");
            assert!(everything(&trainer) == before);
        }
        // A finite step in between starts the count again.
        let norm = trainer.model().parameters().iter().find(|p| p.name == "decoder.final_layer_norm.weight").unwrap();
        norm.tensor.slice_set(&healthy, 0, 0).unwrap();
        done(step(&mut trainer, 1, &PLAN));
        poison(&trainer, value);
        let before = everything(&trainer);
        let (sources, targets) = samples(1, 7);
        let batch = Batch { sources: &sources, targets: &targets };
        for _ in 0..2 {
            assert!(matches!(trainer.step(&batch, &PLAN, &|| false), Ok(StepOutcome::Skipped(_))));
        }
        let error = trainer.step(&batch, &PLAN, &|| false).unwrap_err();
        assert!(matches!(&error, Error::Diverged { in_a_row: 3, stats } if stats.step == 7), "{error}");
        assert!(everything(&trainer) == before);
    }
}

#[test]
fn what_is_frozen_has_no_gradient_no_state_and_does_not_change_by_a_bit() {
    let freeze = vec!["encoder".to_owned(), "shared".to_owned()];
    let mut trainer = Trainer::new(model(DType::F32), TrainerOptions { freeze, ..options() }).unwrap();
    let is_frozen = |name: &str| name.starts_with("encoder.") || name.starts_with("shared.");
    let start = everything(&trainer);
    for seed in 0..4 {
        done(step(&mut trainer, seed, &PLAN));
    }
    for ((name, before), (_, after)) in start.iter().zip(everything(&trainer)) {
        assert_eq!(*before == after, is_frozen(name), "{name}");
    }
    for (index, parameter) in trainer.model().parameters().iter().enumerate() {
        assert_eq!(trainer.gradients().get(index).is_none(), is_frozen(&parameter.name), "{}", parameter.name);
    }
    assert!(trainer.optimizer().named_state(trainer.model().parameters()).all(|(name, _)| !is_frozen(&name)));
}

#[test]
fn the_gradient_of_what_trains_does_not_depend_on_what_is_frozen() {
    let gradients = |freeze: &[&str]| {
        let freeze = freeze.iter().map(|&item| item.to_owned()).collect();
        let mut trainer = Trainer::new(model(DType::F32), TrainerOptions { freeze, ..options() }).unwrap();
        done(step(&mut trainer, 1, &PLAN));
        let name = "decoder.block.1.layer.2.DenseReluDense.wo.weight";
        let index = trainer.model().parameters().iter().position(|parameter| parameter.name == name).unwrap();
        bits(trainer.gradients().get(index).unwrap())
    };
    assert!(gradients(&[]) == gradients(&["encoder", "shared", "decoder.block.0"]));
}

#[test]
fn the_stated_cost_of_the_optimizer_is_what_its_state_holds() {
    for freeze in [vec![], vec!["encoder".to_owned()]] {
        let options = TrainerOptions { freeze, ..options() };
        let row = costs::optimizer_state(&config(), &options, DType::F32).unwrap();
        let trainer = Trainer::new(model(DType::F32), options).unwrap();
        let state = trainer.optimizer().named_state(trainer.model().parameters());
        let bytes: usize = state.map(|(_, tensor)| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum();
        assert_eq!(row.bytes, bytes as u64);
    }
}

#[test]
fn a_batch_that_does_not_match_is_refused_before_anything_changes() {
    let mut trainer = Trainer::new(model(DType::F32), options()).unwrap();
    let before = everything(&trainer);
    let one = vec![vec![1]];
    let error = trainer.step(&Batch { sources: &one, targets: &[] }, &PLAN, &|| false).unwrap_err();
    assert!(matches!(error, Error::BatchShape { sources: 1, targets: 0 }), "{error}");
    let outside = vec![vec![VOCABULARY]];
    assert!(trainer.step(&Batch { sources: &outside, targets: &one }, &PLAN, &|| false).is_err());
    assert!(trainer.step(&Batch { sources: &one, targets: &one }, &plan_of(0), &|| false).is_err());
    assert!(everything(&trainer) == before);
    assert_eq!(trainer.step_count(), 0);
}
