//! Layer-major steps against ordinary ones: the same training up to rounding, the same bits when repeated, and no partial updates.

mod support;

use std::cell::Cell;

use candle_core::{DType, Tensor};
use t5::{Config, Files, T5};
use trainer::adafactor::AdafactorOptions;
use trainer::{
    Batch, Error, LayerMajor, Levers, MasterWeights, Precision, StepOutcome, StepPlan, StepStats, Trainer,
    TrainerOptions,
};

use self::support::{device, done, state};

const VOCABULARY: u32 = 37;

fn config() -> Config {
    Config {
        vocab_size: VOCABULARY as usize,
        d_model: 12,
        d_kv: 5,
        d_ff: 20,
        num_layers: 2,
        num_decoder_layers: 3,
        num_heads: 2,
        ..Config::default()
    }
}

fn options(precision: Precision) -> TrainerOptions {
    TrainerOptions {
        seed: 3,
        dropout: 0.1,
        precision,
        optimizer: AdafactorOptions {
            learning_rate: Some(1e-2),
            relative_step: false,
            scale_parameter: true,
            beta1: Some(0.9),
            ..AdafactorOptions::default()
        }
        .into(),
        total_steps: 50,
        max_non_finite: 3,
        ..TrainerOptions::default()
    }
}

fn new(options: TrainerOptions) -> Trainer {
    Trainer::new(T5::init(&config(), 7, options.parameter_dtype(), &device()).unwrap(), options).unwrap()
}

/// Seven samples of uneven length.
fn samples(seed: u32) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let ids = |sample: u32, longest: u32| -> Vec<u32> {
        let length = (seed * 5 + sample * 3) % longest;
        (0..length).map(|i| 2 + (seed * 13 + sample * 7 + i * 5) % (VOCABULARY - 2)).chain([1]).collect()
    };
    (0..7).map(|sample| (ids(sample, 9), ids(sample, 7))).unzip()
}

fn plan(layer_major: Option<LayerMajor>) -> StepPlan {
    StepPlan {
        levers: Levers {
            micro_batch_samples: 3,
            recompute_blocks: 1,
            loss_chunk_rows: 8,
            layer_major,
            ..Levers::default()
        },
        longest: None,
    }
}

fn layer_major(kept_gradient_blocks: usize) -> StepPlan {
    plan(Some(LayerMajor { kept_gradient_blocks, ..LayerMajor::default() }))
}

fn step(trainer: &mut Trainer, seed: u32, plan: &StepPlan) -> StepOutcome {
    let (sources, targets) = samples(seed);
    trainer.step(&Batch { sources: &sources, targets: &targets }, plan, &|| false).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Parameters and optimizer state.
fn everything(trainer: &Trainer) -> Vec<(String, Vec<f64>)> {
    state(trainer).into_iter().map(|(name, tensor)| (name, values(tensor))).collect()
}

/// Makes four steps with each of two plans. Losses, norms, parameters and state agree.
fn check(options: &TrainerOptions, other: &StepPlan, tolerance: f64) {
    let (mut ordinary, mut trainer) = (new(options.clone()), new(options.clone()));
    for seed in 0..4 {
        let expected = done(step(&mut ordinary, seed, &plan(None)));
        let got = done(step(&mut trainer, seed, other));
        let close = |a: f64, b: f64| (a - b).abs() <= tolerance * b.abs();
        assert!(close(got.loss, expected.loss) && close(got.grad_norm, expected.grad_norm), "{got:?} {expected:?}");
        let counts = |stats: &StepStats| (stats.step, stats.micro_batches, stats.padded_tokens, stats.target_tokens);
        assert_eq!(counts(&got), counts(&expected));
        assert_eq!(trainer.gradients().bytes(), 0, "gradients do not outlast the step");
    }
    for ((name, got), (_, expected)) in everything(&trainer).iter().zip(everything(&ordinary)) {
        let largest = expected.iter().fold(0f64, |largest, value| largest.max(value.abs()));
        let error = got.iter().zip(&expected).fold(0f64, |error, (a, b)| error.max((a - b).abs()));
        assert!(error <= tolerance * largest, "{name}: {error:e} of {largest:e}, {other:?}");
    }
    assert_eq!(trainer.optimizer().updates(), ordinary.optimizer().updates());
}

#[test]
fn a_layer_major_step_is_an_ordinary_step() {
    for grad_clip_norm in [0.0, 0.5] {
        for kept in [0, 2, 99] {
            check(&TrainerOptions { grad_clip_norm, ..options(Precision::F64) }, &layer_major(kept), 1e-10);
        }
        check(&TrainerOptions { grad_clip_norm, ..options(Precision::F32) }, &layer_major(1), 1e-4);
    }
    let freeze = vec!["encoder".to_owned(), "shared".to_owned()];
    check(&TrainerOptions { freeze, ..options(Precision::F64) }, &layer_major(0), 1e-10);
}

#[test]
fn what_is_kept_and_what_is_on_disk_changes_no_bit_and_leaves_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    let run_with = |heads_kept, boundaries_on_disk, blocks_in_memory, gradients_on_disk, recompute_blocks| {
        let mut trainer =
            new(TrainerOptions { master_weights: MasterWeights::StochasticRounding, ..options(Precision::Bf16) });
        trainer.offload_to(Files::in_directory(directory.path()));
        let layers = LayerMajor {
            kept_gradient_blocks: 1,
            heads_kept,
            boundaries_on_disk,
            blocks_in_memory,
            gradients_on_disk,
            ..LayerMajor::PLAIN
        };
        let mut plan = plan(Some(layers));
        plan.levers.recompute_blocks = recompute_blocks;
        let losses: Vec<f64> = (0..3).map(|seed| done(step(&mut trainer, seed, &plan)).loss).collect();
        (losses, everything(&trainer))
    };
    let run = |heads, boundaries, gradients, blocks| run_with(heads, boundaries, 0, gradients, blocks);
    let in_memory = run(false, false, false, 5);
    assert!(in_memory == run(true, false, false, 5));
    assert!(in_memory == run(false, true, false, 5));
    assert!(in_memory == run(false, false, true, 5));
    assert!(in_memory == run(true, true, true, 5));
    // Nothing is recomputed, or a part. If backward goes through blocks twice, there is no choice.
    assert!(in_memory == run(false, false, false, 0));
    assert!(in_memory == run(false, false, true, 0));
    assert!(in_memory == run(true, true, true, 2));
    assert!(in_memory == run(false, true, true, 0));
    assert!(in_memory == run_with(false, true, 1, true, 0));
    assert!(in_memory == run_with(true, true, 2, false, 5));
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn the_same_plan_gives_the_same_bits_and_plans_may_change_between_steps() {
    let run = |plans: &[StepPlan]| {
        let mut trainer = new(options(Precision::F64));
        let losses: Vec<f64> =
            plans.iter().zip(0..).map(|(plan, seed)| done(step(&mut trainer, seed, plan)).loss).collect();
        (losses, everything(&trainer))
    };
    let ordinary = plan(None);
    let mixed = [ordinary, layer_major(0), ordinary, layer_major(3)];
    assert!(run(&mixed) == run(&mixed));
    let (losses, _) = run(&[ordinary; 4]);
    for (a, b) in run(&mixed).0.iter().zip(losses) {
        assert!((a - b).abs() < 1e-10 * b);
    }
}

#[test]
fn an_interrupted_step_changes_nothing_and_can_be_made_again() {
    let (mut straight, mut stopped) = (new(options(Precision::F32)), new(options(Precision::F32)));
    done(step(&mut straight, 1, &layer_major(0)));
    done(step(&mut stopped, 1, &layer_major(0)));
    let before = everything(&stopped);
    let (sources, targets) = samples(2);
    let batch = Batch { sources: &sources, targets: &targets };
    // Three micro-batches through each of five blocks and the head, then through each of seven units: the first pass asks 39
    // times. The second asks before it begins, and in its first unit, after which parameters change.
    for stop_before in [0, 2, 3, 20, 38, 39, 42] {
        let asked = Cell::new(0);
        let interrupted = || asked.replace(asked.get() + 1) == stop_before;
        assert_eq!(stopped.step(&batch, &layer_major(0), &interrupted).unwrap(), StepOutcome::Interrupted);
        assert!(everything(&stopped) == before);
        assert_eq!((stopped.step_count(), stopped.gradients().bytes()), (1, 0));
    }
    let asked = Cell::new(0);
    let counted = || asked.replace(asked.get() + 1) > 42;
    let outcome = stopped.step(&batch, &layer_major(0), &counted).unwrap();
    assert_eq!(done(outcome), done(step(&mut straight, 2, &layer_major(0))), "parameters are changed without asking");
    assert!(everything(&stopped) == everything(&straight));
}

#[test]
fn nothing_that_is_not_finite_reaches_the_parameters_with_clipping_or_without() {
    for grad_clip_norm in [0.0, 1.0] {
        for value in [f32::NAN, f32::INFINITY, f32::MAX] {
            let mut trainer = new(TrainerOptions { grad_clip_norm, ..options(Precision::F32) });
            done(step(&mut trainer, 1, &layer_major(1)));
            let poisoned = "encoder.block.0.layer.0.layer_norm.weight";
            let norm = trainer.model().parameters().iter().find(|p| p.name == poisoned).unwrap().tensor.clone();
            norm.slice_set(&Tensor::full(value, norm.dims(), &device()).unwrap(), 0, 0).unwrap();
            let before = everything(&trainer);
            let same = |a: &[(String, Vec<f64>)], b: &[(String, Vec<f64>)]| {
                let bits = |values: &[f64]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                a.iter().zip(b).all(|((_, a), (_, b))| bits(a) == bits(b))
            };
            for _ in 0..2 {
                let outcome = step(&mut trainer, 1, &layer_major(1));
                assert!(matches!(outcome, StepOutcome::Skipped(_)), "{outcome:?}");
                assert!(same(&everything(&trainer), &before));
            }
            let (sources, targets) = samples(1);
            let batch = Batch { sources: &sources, targets: &targets };
            let error = trainer.step(&batch, &layer_major(1), &|| false).unwrap_err();
            assert!(matches!(error, Error::Diverged { in_a_row: 3, .. }), "{error}");
            assert!(same(&everything(&trainer), &before));
        }
    }
}
