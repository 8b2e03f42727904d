//! Several processes make the same step as one: the same losses and parameters; with the same number of shards, to the bit.
//!
//! Processes are threads here. Their messages are those that they would send over MPI.

mod support;

use std::fs;
use std::path::Path;

use collective::{Shards, threads};
use support::device::every;
use t5::{LayerMajor, Levers};
use trainer::adamw::{AdamwOptions, StatePrecision};
use trainer::checkpoint::Checkpoints;
use trainer::{Batch, Parallel, Sharding, StepOutcome, StepPlan, StepStats, Trainer, TrainerOptions};

const STEPS: u32 = 6;

fn plan(micro_batch_samples: usize, layer_major: Option<LayerMajor>) -> StepPlan {
    let levers =
        Levers { micro_batch_samples, recompute_blocks: 0, loss_chunk_rows: 16, layer_major, ..Levers::default() };
    StepPlan { levers, longest: None }
}

/// A trainer's numbers after some steps, and all its bits.
#[derive(PartialEq)]
struct Ended {
    stats: Vec<StepStats>,
    parameters: Vec<Vec<u32>>,
}

impl std::fmt::Debug for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // There are too many values to print.
        let sums = self.parameters.iter().map(|values| values.iter().map(|value| u64::from(*value)).sum::<u64>());
        f.debug_struct("Ended").field("stats", &self.stats).field("sums", &sums.collect::<Vec<_>>()).finish()
    }
}

fn parameters(trainer: &Trainer) -> Vec<Vec<u32>> {
    bits(trainer.model())
}

fn bits(model: &t5::T5) -> Vec<Vec<u32>> {
    let values = model.parameters().iter().map(|parameter| support::values(&parameter.tensor));
    values.map(|values| values.into_iter().map(f32::to_bits).collect()).collect()
}

/// Steps of `samples` samples by so many processes with so many shards. Returns the result of each process.
fn run(
    options: &TrainerOptions,
    of: (usize, Option<usize>),
    sharding: Sharding,
    steps: (&StepPlan, usize),
) -> Vec<Ended> {
    run_from(&|| support::new(options.clone()), of, sharding, steps)
}

/// [`run`] with these trainers.
fn run_from(
    fresh: &(dyn Fn() -> Trainer + Sync),
    (processes, shards): (usize, Option<usize>),
    sharding: Sharding,
    (plan, samples): (&StepPlan, usize),
) -> Vec<Ended> {
    threads::run(processes, |group| {
        let rank = group.rank();
        let mut trainer = fresh();
        let parallel = Parallel::new(group, shards).unwrap();
        let shards: Shards = parallel.shards();
        trainer.join(parallel, sharding).unwrap();
        let steps = 0..STEPS / every(3) as u32;
        let stats = steps.map(|step| make_step(&mut trainer, (shards, rank), step, (plan, samples))).collect();
        if sharding != Sharding::Weights {
            return Ended { stats, parameters: parameters(&trainer) };
        }
        // Each process has its own matrices, and sends them to the one that saves.
        if rank > 0 {
            trainer.model().serve_weights().unwrap();
            return Ended { stats, parameters: Vec::new() };
        }
        let directory = tempfile::tempdir().unwrap();
        trainer.model().save(directory.path()).unwrap();
        let whole = t5::T5::load(directory.path(), trainer.options().parameter_dtype(), &support::device()).unwrap();
        Ended { stats, parameters: bits(&whole) }
    })
}

/// The step of process `rank`, which has its own samples of a step of `samples`.
fn make_step(
    trainer: &mut Trainer,
    (shards, rank): (Shards, usize),
    step: u32,
    (plan, samples): (&StepPlan, usize),
) -> StepStats {
    let (sources, targets) = batch(trainer, step, samples);
    let of_shards: Vec<_> = shards.owned_by(rank).map(|shard| shards.positions(shard, samples)).collect();
    let mine = of_shards[0].start..of_shards[of_shards.len() - 1].end;
    let batch = Batch { sources: &sources[mine.clone()], targets: &targets[mine] };
    let of_shards: Vec<usize> = of_shards.iter().map(ExactSizeIterator::len).collect();
    match trainer.step_of_shards(&batch, &of_shards, plan, &|| false).unwrap() {
        StepOutcome::Done(stats) => stats,
        other => panic!("{other:?}"),
    }
}

/// [`support::batch`] in the last words of the model's vocabulary: the first ones may be special.
fn batch(trainer: &Trainer, step: u32, samples: usize) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let later = (trainer.model().config().vocab_size - support::config().vocab_size) as u32;
    let (mut sources, mut targets) = support::batch(step, samples as u32);
    sources.iter_mut().chain(&mut targets).flatten().filter(|id| **id > 1).for_each(|id| *id += later);
    (sources, targets)
}

fn alone(options: &TrainerOptions, plan: &StepPlan, samples: usize) -> Ended {
    alone_from(&|| support::new(options.clone()), plan, samples)
}

/// [`alone`] with this trainer.
fn alone_from(fresh: &dyn Fn() -> Trainer, plan: &StepPlan, samples: usize) -> Ended {
    let mut trainer = fresh();
    let stats = (0..STEPS / every(3) as u32).map(|step| {
        let (sources, targets) = batch(&trainer, step, samples);
        match trainer.step(&Batch { sources: &sources, targets: &targets }, plan, &|| false).unwrap() {
            StepOutcome::Done(stats) => stats,
            other => panic!("{other:?}"),
        }
    });
    Ended { stats: stats.collect(), parameters: parameters(&trainer) }
}

#[track_caller]
fn assert_close(got: &Ended, expected: &Ended, at_most: f64) {
    for (got, expected) in got.stats.iter().zip(&expected.stats) {
        assert!((got.loss - expected.loss).abs() <= at_most, "loss {} instead of {}", got.loss, expected.loss);
        let off = (got.grad_norm / expected.grad_norm - 1.0).abs();
        assert!(off <= 10.0 * at_most, "norm {} instead of {}", got.grad_norm, expected.grad_norm);
        let tokens = |stats: &StepStats| (stats.source_tokens, stats.target_tokens, stats.lr, stats.step);
        assert_eq!(tokens(got), tokens(expected));
    }
}

fn adamw() -> TrainerOptions {
    let optimizer = AdamwOptions { learning_rate: 1e-3, ..AdamwOptions::default() }.into();
    TrainerOptions { optimizer, ..support::options() }
}

/// A block's gradients and weights have memory of their own while they are sent.
const OVERLAPS: LayerMajor = LayerMajor { overlaps: true, ..LayerMajor::PLAIN };

#[test]
fn several_processes_have_the_losses_of_one() {
    let options = support::options();
    let layers = [
        None,
        Some(LayerMajor::PLAIN),
        Some(LayerMajor { kept_gradient_blocks: 1, ..LayerMajor::PLAIN }),
        Some(LayerMajor { kept_gradient_blocks: 1, ..OVERLAPS }),
    ];
    for layer_major in layers.into_iter().step_by(every(3)) {
        let plan = plan(2, layer_major);
        let expected = alone(&options, &plan, 9);
        for processes in [1, 2, 4] {
            let ended = run(&options, (processes, None), Sharding::None, (&plan, 9));
            assert!(ended.iter().all(|other| *other == ended[0]), "every process has the same bits");
            assert_close(&ended[0], &expected, 1e-5);
        }
    }
}

#[test]
fn with_as_many_shards_any_number_of_processes_has_the_same_bits() {
    let layers = [
        None,
        Some(LayerMajor::PLAIN),
        Some(LayerMajor { kept_gradient_blocks: 1, boundaries_on_disk: true, ..LayerMajor::PLAIN }),
        Some(LayerMajor { kept_gradient_blocks: 99, ..LayerMajor::PLAIN }),
        Some(OVERLAPS),
        Some(LayerMajor { kept_gradient_blocks: 1, ..OVERLAPS }),
    ];
    let cases = layers.map(|layers| (support::options(), layers)).into_iter().chain([(adamw(), layers[2])]);
    for (options, layer_major) in cases.step_by(every(4)) {
        // A single process sends nothing, so the order of events is the plain one.
        let at_once = layer_major.map(|layers| LayerMajor { overlaps: false, ..layers });
        let expected = run(&options, (1, Some(4)), Sharding::None, (&plan(2, at_once), 9)).swap_remove(0);
        let plan = plan(2, layer_major);
        assert_close(&expected, &alone(&options, &plan, 9), 1e-5);
        for (processes, sharding) in [(2, Sharding::None), (4, Sharding::None), (2, Sharding::Gradients)] {
            for ended in run(&options, (processes, Some(4)), sharding, (&plan, 9)) {
                assert_eq!(ended.parameters, expected.parameters, "{processes} processes, {layer_major:?}");
                assert_eq!(ended.stats, expected.stats, "{processes} processes, {layer_major:?}");
            }
        }
        let shared = run(&options, (2, Some(4)), Sharding::Weights, (&plan, 9)).swap_remove(0);
        assert_eq!(shared, expected, "{layer_major:?}");
        let six = run(&options, (1, Some(6)), Sharding::None, (&plan, 7)).swap_remove(0);
        for processes in [2, 3, 6] {
            assert_eq!(run(&options, (processes, Some(6)), Sharding::None, (&plan, 7))[1], six);
        }
    }
}

#[test]
fn models_of_gemmas_blocks_have_the_same_bits_for_any_number_of_processes() {
    // Cards refuse these models.
    if !support::device().is_cpu() {
        return;
    }
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../t5/tests/goldens/gemma");
    for (name, layer_major) in [
        ("t5gemma", None),
        ("t5gemma", Some(OVERLAPS)),
        ("t5gemma_unbalanced", Some(LayerMajor { kept_gradient_blocks: 1, ..OVERLAPS })),
        ("t5gemma2", None),
        ("t5gemma2", Some(LayerMajor { kept_gradient_blocks: 1, ..OVERLAPS })),
        // Stored in bf16 and trained in f32.
        ("t5gemma2_shards", Some(OVERLAPS)),
    ] {
        let what = format!("{name}, {layer_major:?}");
        let options = adamw();
        let fresh = || {
            let model = t5::T5::load(&goldens.join(name), options.parameter_dtype(), &support::device()).unwrap();
            Trainer::new(model, options.clone()).unwrap()
        };
        let at_once = plan(2, layer_major.map(|layers| LayerMajor { overlaps: false, ..layers }));
        let one = run_from(&fresh, (1, Some(4)), Sharding::None, (&at_once, 9)).swap_remove(0);
        assert_close(&one, &alone_from(&fresh, &at_once, 9), 1e-5);
        let plan = plan(2, layer_major);
        for (processes, sharding) in
            [(2, Sharding::None), (4, Sharding::None), (2, Sharding::Optimizer), (4, Sharding::Gradients)]
        {
            for ended in run_from(&fresh, (processes, Some(4)), sharding, (&plan, 9)) {
                assert_eq!(ended, one, "{processes} processes, {sharding:?}, {what}");
            }
        }
        for processes in [2, 4] {
            let shared = run_from(&fresh, (processes, Some(4)), Sharding::Weights, (&plan, 9));
            assert_eq!(shared[0], one, "{processes} processes, {what}");
            assert!(shared.iter().all(|ended| ended.stats == one.stats), "{processes} processes, {what}");
        }
    }
}

#[test]
fn owners_of_optimizer_state_and_gradients_change_no_bit() {
    for options in [support::options(), adamw()] {
        let layers = [
            None,
            Some(LayerMajor::PLAIN),
            Some(LayerMajor { kept_gradient_blocks: 1, ..LayerMajor::PLAIN }),
            Some(LayerMajor { kept_gradient_blocks: 99, ..LayerMajor::PLAIN }),
            Some(LayerMajor { gradients_on_disk: true, weights_on_disk: true, ..LayerMajor::PLAIN }),
            Some(OVERLAPS),
            Some(LayerMajor { kept_gradient_blocks: 1, ..OVERLAPS }),
            Some(LayerMajor { gradients_on_disk: true, weights_on_disk: true, ..OVERLAPS }),
            Some(LayerMajor { weights_on_disk: true, ..OVERLAPS }),
        ];
        for layer_major in layers.into_iter().step_by(every(4)) {
            let at_once = layer_major.map(|layers| LayerMajor { overlaps: false, ..layers });
            let expected = run(&options, (3, None), Sharding::None, (&plan(2, at_once), 8));
            let plan = plan(2, layer_major);
            for sharding in [Sharding::Optimizer, Sharding::Gradients] {
                assert_eq!(run(&options, (3, None), sharding, (&plan, 8)), expected, "{sharding:?} {layer_major:?}");
            }
            if layer_major.is_none_or(|layers| !layers.weights_on_disk) {
                let ended = run(&options, (3, None), Sharding::Weights, (&plan, 8));
                assert_eq!(ended[0], expected[0], "{layer_major:?}");
                assert!(ended.iter().all(|ended| ended.stats == expected[0].stats), "{layer_major:?}");
            }
        }
        // With the same number of shards, the number of processes does not matter either.
        let expected = run(&options, (1, Some(4)), Sharding::None, (&plan(2, None), 9)).swap_remove(0);
        assert_eq!(run(&options, (2, Some(4)), Sharding::Gradients, (&plan(2, None), 9))[1], expected);
    }
}

#[test]
fn moments_in_int8_are_the_same_for_any_number_of_processes_and_come_back_from_a_checkpoint() {
    // Matrices of more than 4096 values, and norms of fewer.
    let config = t5::Config { vocab_size: 150, d_model: 64, d_kv: 16, d_ff: 160, ..support::config() };
    let optimizer = AdamwOptions { state_precision: StatePrecision::Int8, ..AdamwOptions::default() };
    let options = TrainerOptions { optimizer: optimizer.into(), ..support::options() };
    let (dtype, device) = (options.parameter_dtype(), support::device());
    let fresh = || Trainer::new(t5::T5::init(&config, 7, dtype, &device).unwrap(), options.clone()).unwrap();
    // Steps up to the fourth, with a checkpoint after the second.
    let run = |processes, sharding, from: Option<&Path>, saved: &Path| {
        threads::run(processes, |group| {
            let rank = group.rank();
            let found = from.map(|directory| Checkpoints::newest_valid(directory).unwrap().unwrap());
            let first = if found.is_some() { 2 } else { 0 };
            let resumed = found.map(|found| Trainer::resume(&found, options.clone(), dtype, &device).unwrap());
            let mut trainer = resumed.unwrap_or_else(fresh);
            let parallel = Parallel::new(group, Some(4)).unwrap();
            let shards = parallel.shards();
            trainer.join(parallel, sharding).unwrap();
            for step in first..4 {
                if step == 2 && rank == 0 {
                    let mut checkpoints = Checkpoints::new(saved, 1, 0);
                    checkpoints.save(&trainer, &serde_json::Value::Null, None, &|| false).unwrap();
                } else if step == 2 {
                    trainer.serve_state().unwrap();
                }
                make_step(&mut trainer, (shards, rank), step, (&plan(2, None), 9));
            }
            parameters(&trainer)
        })
    };
    let state = |saved: &Path| fs::read(saved.join("step-00000002/optimizer.safetensors")).unwrap();
    let saved = [(); 5].map(|()| tempfile::tempdir().unwrap());
    let one = run(1, Sharding::None, None, saved[0].path()).swap_remove(0);
    // Two bytes a value, and the numbers of blocks: a quarter of f32, and a little more for norms.
    let parameters: u64 = t5::ParameterSpec::all(&config).iter().map(t5::ParameterSpec::elements).sum();
    assert!((state(saved[0].path()).len() as u64) < 4 * parameters);
    for (number, (processes, sharding)) in
        [(2, Sharding::None), (2, Sharding::Optimizer), (4, Sharding::Gradients)].into_iter().enumerate()
    {
        let saved_here = saved[1 + number].path();
        assert!(run(processes, sharding, None, saved_here).iter().all(|other| *other == one), "{sharding:?}");
        assert!(state(saved_here) == state(saved[0].path()), "{sharding:?}");
    }
    assert!(run(2, Sharding::None, Some(saved[0].path()), saved[4].path())[1] == one);
}

#[test]
fn a_process_without_samples_goes_along() {
    let options = support::options();
    for layer_major in [None, Some(LayerMajor::PLAIN), Some(OVERLAPS)] {
        let plan = plan(2, layer_major);
        let ended = run(&options, (4, None), Sharding::None, (&plan, 3));
        assert!(ended.iter().all(|other| *other == ended[0]));
        assert_close(&ended[0], &alone(&options, &plan, 3), 1e-5);
        // Of six shards of three samples, some are empty in each process.
        let expected = run(&options, (1, Some(6)), Sharding::None, (&plan, 3)).swap_remove(0);
        for sharding in [Sharding::None, Sharding::Gradients] {
            assert_eq!(run(&options, (3, Some(6)), sharding, (&plan, 3))[1], expected, "{layer_major:?}");
        }
        assert_eq!(run(&options, (2, Some(6)), Sharding::Weights, (&plan, 3)).swap_remove(0), expected);
    }
}

#[test]
fn whoever_wants_to_stop_stops_all_of_them_before_anything_changes() {
    let options = support::options();
    // Asked at the beginning of the step and at the decision.
    for asked in [0, 1] {
        let ended = threads::run(2, |group| {
            let is_first = group.is_first();
            let mut trainer = support::new(options.clone());
            let before = parameters(&trainer);
            trainer.join(Parallel::new(group, None).unwrap(), Sharding::None).unwrap();
            let (sources, targets) = support::batch(0, 4);
            let batch = Batch { sources: &sources[..2], targets: &targets[..2] };
            let times = std::cell::Cell::new(0);
            let interrupted = || is_first && times.replace(times.get() + 1) == asked;
            let outcome = trainer.step(&batch, &plan(2, None), &interrupted).unwrap();
            (outcome, trainer.step_count(), parameters(&trainer) == before)
        });
        assert_eq!(ended, [(StepOutcome::Interrupted, 0, true), (StepOutcome::Interrupted, 0, true)]);
    }
}

#[test]
fn fewer_shards_than_processes_are_refused() {
    let refused = threads::run(3, |group| Parallel::new(group, Some(2)).map(drop).unwrap_err().to_string());
    assert_eq!(refused[0], "`parallel.virtual_shards`: expected at least the number of processes, 3, got 2");
}
