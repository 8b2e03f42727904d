//! Losses, optimizers, groups and schedules beside torch in f64: fifty steps of each case of `scripts/golden_cases/recipes.py`, alone and
//! together, with adapters and without.

#[path = "../../cuda-device/tests/support/device.rs"]
mod device;

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use collective::threads;
use serde_json::Value;
use t5::T5;
use t5::peft::AdapterDirectory;
use trainer::adamw::AdamwOptions;
use trainer::distillation::Distillation;
use trainer::groups::Group;
use trainer::lion::LionOptions;
use trainer::preference::{Preference, PreferenceLoss};
use trainer::schedule::{Schedule, ScheduleKind};
use trainer::{
    Batch, KeptLogits, KeptLogitsOf, LayerMajor, Levers, OptimizerOptions, Parallel, Precision, Sharding, StepOutcome,
    StepPlan, Trainer, TrainerOptions,
};

use self::device::device;

const STEPS: u64 = 50;
const RATE: f64 = 2e-3;

fn goldens(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn ids(value: &Value) -> Vec<Vec<u32>> {
    let list = |ids: &Value| ids.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    value.as_array().unwrap().iter().map(list).collect()
}

fn model(base: &Value, adapter: &Value) -> T5 {
    let adapters = goldens("../t5/tests/goldens/adapters");
    let model = T5::load(&adapters.join("bases").join(base.as_str().unwrap()), DType::F64, &device()).unwrap();
    let Some(adapter) = adapter.as_str() else { return model };
    let adapter = AdapterDirectory::open(&adapters.join(adapter), model.config()).unwrap();
    let lora = adapter.lora(model.config());
    let model = model.with_adapter(lora, 1).unwrap();
    adapter.fill(model.parameters()).unwrap();
    model
}

/// The options that a case's keys mean.
fn options(case: &Value) -> TrainerOptions {
    let number = |key: &str| case["recipe"][key].as_f64();
    let learning_rate = number("optimizer.learning_rate").unwrap_or(RATE);
    let optimizer: OptimizerOptions = match case["recipe"]["optimizer.name"].as_str() {
        Some("lion") => {
            let weight_decay = number("optimizer.weight_decay").unwrap_or(0.01);
            LionOptions { learning_rate, weight_decay, ..LionOptions::default() }.into()
        }
        _ => {
            let is_scaled = case["recipe"]["optimizer.scale_parameter"].as_bool().unwrap_or(false);
            let scale_parameter = is_scaled.then(|| number("optimizer.eps2").unwrap_or(1e-3));
            AdamwOptions { learning_rate, scale_parameter, ..AdamwOptions::default() }.into()
        }
    };
    let group = |group: &Value| Group {
        parameters: group[0].as_array().unwrap().iter().map(|item| item.as_str().unwrap().to_owned()).collect(),
        learning_rate_factor: group[1].as_f64().unwrap(),
        weight_decay: group[2].as_f64(),
    };
    let kind = match case["recipe"]["schedule.name"].as_str() {
        Some("cosine") => ScheduleKind::Cosine,
        Some("linear") => ScheduleKind::Linear,
        _ => ScheduleKind::Constant,
    };
    // `schedule.warmup_ratio`, as transformers rounds it.
    let warmup_steps = number("schedule.warmup_ratio").map(|ratio| (ratio * STEPS as f64).ceil() as u64);
    let named = case["recipe"]["preference.loss"].as_str().and_then(PreferenceLoss::named);
    let preference = named.map(|loss| {
        let usual = Preference::usual(loss);
        Preference {
            beta: number("preference.beta").unwrap_or(usual.beta),
            gamma: number("preference.gamma").unwrap_or(usual.gamma),
            weights: ["desirable", "undesirable"]
                .map(|side| number(&format!("preference.{side}_weight")).unwrap_or(1.0)),
            has_reference_model: case["recipe"]["preference.reference"].is_string(),
            ..usual
        }
    });
    let distillation = case["recipe"]["distill.teacher"].as_str().map(|_| Distillation {
        alpha: number("distill.alpha").unwrap(),
        temperature: number("distill.temperature").unwrap(),
        top_k: case["recipe"]["distill.top_k"].as_u64().map(|count| count as usize),
    });
    TrainerOptions {
        distillation,
        dropout: 0.0,
        precision: Precision::F64,
        grad_clip_norm: 1.0,
        z_loss: number("train.z_loss").unwrap_or(0.0),
        label_smoothing: number("train.label_smoothing").unwrap_or(0.0),
        optimizer,
        groups: case["groups"].as_array().unwrap().iter().map(group).collect(),
        preference,
        schedule: Schedule { kind, warmup_steps },
        total_steps: STEPS,
        ..TrainerOptions::default()
    }
}

/// Sources and targets of a step; of pairs, the chosen answer comes before the rejected one.
fn samples(batch: &Value, are_pairs: bool) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let [sources, targets, rejected] = ["sources", "targets", "rejected"].map(|name| ids(&batch[name]));
    if !are_pairs {
        return (sources, targets);
    }
    let twice = sources.into_iter().flat_map(|source| [source.clone(), source]).collect();
    (twice, targets.into_iter().zip(rejected).flat_map(|(chosen, rejected)| [chosen, rejected]).collect())
}

/// The trainer of a case, beside its frozen model.
fn trainer(base: &Value, case: &Value) -> Trainer {
    let mut trainer = Trainer::new(model(base, &case["adapter"]), options(case)).unwrap();
    if case["recipe"]["preference.reference"].is_string() {
        trainer.compare_with(model(base, &Value::Null)).unwrap();
    }
    if case["recipe"]["distill.teacher"].is_string() {
        let teacher = T5::load(&goldens("tests/goldens/recipes/teacher"), DType::F64, &device()).unwrap();
        trainer.compare_with(teacher).unwrap();
    }
    trainer
}

/// Makes a step of case `number` with the rows of a batch that this process's shards have, and compares it with torch's.
fn check_step(
    trainer: &mut Trainer,
    (number, name, case): (usize, &str, &Value),
    step: usize,
    batch: &Value,
    shards: &[Range<usize>],
) {
    let preference = options(case).preference;
    let has_labels = preference.is_some_and(|of| of.loss.has_labels());
    let (sources, targets) = samples(batch, preference.is_some() && !has_labels);
    let samples_of_a_row = sources.len() / batch["sources"].as_array().unwrap().len();
    let rows = shards[0].start..shards[shards.len() - 1].end;
    let mine = rows.start * samples_of_a_row..rows.end * samples_of_a_row;
    let batch_of_rows = Batch { sources: &sources[mine.clone()], targets: &targets[mine] };
    let shards: Vec<usize> = shards.iter().map(|rows| rows.len() * samples_of_a_row).collect();
    let labels = batch["labels"].as_array().into_iter().flatten().filter_map(Value::as_bool);
    let labels: Vec<bool> = labels.filter(|_| has_labels).skip(rows.start).take(rows.len()).collect();
    // No plan changes the numbers: each step has another one.
    let levers = Levers {
        micro_batch_samples: 1 + (step + number) % 5,
        recompute_blocks: step % 3,
        loss_chunk_rows: 3 + step % 7,
        layer_major: ((step + number) % 3 == 2).then_some(LayerMajor::PLAIN),
        ..Levers::default()
    };
    let plan = StepPlan { levers, longest: None };
    let outcome = trainer.step_of_labels((&batch_of_rows, &labels), &shards, &plan, &|| false).unwrap();
    let StepOutcome::Done(stats) = outcome else { panic!("{name}, step {step}: {outcome:?}") };
    let numbers = [
        ("loss", Some(stats.loss)),
        ("grad_norm", Some(stats.grad_norm)),
        ("objective", stats.objective),
        ("kl", stats.preference.and_then(|of| of.kl)),
    ];
    for (key, got) in numbers {
        let expected = case[key].get(step).and_then(Value::as_f64);
        assert_eq!(got.is_some(), expected.is_some(), "{name}: {key}");
        let (Some(got), Some(expected)) = (got, expected) else { continue };
        let far = (got - expected).abs() / expected.abs().max(1e-2);
        assert!(far < 1e-7, "{name}, step {}: {key} is {got}, not {expected} ({far:e})", step + 1);
    }
}

/// Calls `check` with each recipe's number, name and case, and with its first model and its batches.
fn each_recipe(check: impl Fn((usize, &str, &Value), &Value, &[Value])) {
    let golden: Value =
        serde_json::from_slice(&fs::read(goldens("tests/goldens/recipes/recipes.json")).unwrap()).unwrap();
    for (number, (name, case)) in golden["cases"].as_object().unwrap().iter().enumerate() {
        if options(case).has_frozen_model() && !device().is_cpu() {
            // A run on a card is refused such a model: it has no kernel for the loss, and no room in its bill.
            continue;
        }
        check((number, name, case), &golden["base"], golden["batches"].as_array().unwrap());
    }
}

/// Keeps a teacher's largest logits in a file, if the recipe needs no more. One process `writes` it.
fn keep_logits(trainer: &mut Trainer, file: &Path, writes: bool) {
    let Some(count) = trainer.options().distillation.and_then(|of| of.top_k) else { return };
    let of = KeptLogitsOf { count, dtype: DType::F64, depends_on: "teacher".into(), samples: 20 };
    trainer.keep_logits(KeptLogits::open(file, of, writes).unwrap());
}

fn bits(trainer: &Trainer) -> Vec<u64> {
    let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let parameters = trainer.model().parameters().iter();
    parameters.flat_map(|parameter| values(&parameter.tensor)).map(f64::to_bits).collect()
}

/// Makes steps of a recipe by processes, which are threads here, in two shards. Returns the bits of each process's parameters. `kept` is a file
/// for a teacher's logits.
fn steps_in_two_shards(
    processes: usize,
    of: (usize, &str, &Value),
    (base, batches): (&Value, &[Value]),
    (steps, kept): (usize, Option<&Path>),
) -> Vec<Vec<u64>> {
    threads::run(processes, |group| {
        let rank = group.rank();
        let mut trainer = trainer(base, of.2);
        if let Some(kept) = kept {
            keep_logits(&mut trainer, kept, rank == 0);
        }
        let parallel = Parallel::new(group, Some(2)).unwrap();
        let shards = parallel.shards();
        trainer.join(parallel, if processes == 1 { Sharding::None } else { Sharding::Gradients }).unwrap();
        for step in 0..steps {
            let batch = &batches[step % batches.len()];
            let rows = batch["sources"].as_array().unwrap().len();
            let mine: Vec<_> = shards.owned_by(rank).map(|shard| shards.positions(shard, rows)).collect();
            check_step(&mut trainer, of, step, batch, &mine);
        }
        bits(&trainer)
    })
}

#[test]
fn fifty_steps_of_each_recipe_are_those_of_torch() {
    each_recipe(|of, base, batches| {
        let mut trainer = trainer(base, of.2);
        for step in 0..STEPS as usize {
            let batch = &batches[step % batches.len()];
            let rows = batch["sources"].as_array().unwrap().len();
            check_step(&mut trainer, of, step, batch, std::slice::from_ref(&(0..rows)));
        }
    });
}

#[test]
fn two_processes_make_the_steps_of_torch_and_the_bits_of_one() {
    each_recipe(|of, base, batches| {
        let [one, two] = [1, 2].map(|processes| steps_in_two_shards(processes, of, (base, batches), (12, None)));
        // The numbers would be too many to print.
        assert!(two.iter().all(|bits| *bits == one[0]), "{}", of.1);
    });
}

#[test]
fn a_teacher_whose_logits_are_kept_reads_each_sample_once_and_teaches_the_same() {
    each_recipe(|of, base, batches| {
        if options(of.2).distillation.is_none_or(|distillation| distillation.top_k.is_none()) {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("logits");
        let length = || fs::metadata(&file).unwrap().len();
        let step = |trainer: &mut Trainer, step: usize| {
            let batch = &batches[step % batches.len()];
            let rows = batch["sources"].as_array().unwrap().len();
            check_step(trainer, of, step, batch, std::slice::from_ref(&(0..rows)));
        };
        let mut whole = trainer(base, of.2);
        keep_logits(&mut whole, &file, true);
        let lengths: Vec<u64> = (0..STEPS as usize)
            .map(|number| {
                step(&mut whole, number);
                length()
            })
            .collect();
        let epoch = batches.len();
        assert!(lengths[..epoch].is_sorted_by(|a, b| a < b) && lengths[epoch - 1] == *lengths.last().unwrap());
        // A process that was killed between the writes of a step's samples leaves a part of them.
        for left in [0, lengths[1] + 1, lengths[2] - 1, lengths[epoch - 1]] {
            let mut again = trainer(base, of.2);
            fs::File::options().write(true).open(&file).unwrap().set_len(left).unwrap();
            keep_logits(&mut again, &file, true);
            (0..STEPS as usize).for_each(|number| step(&mut again, number));
            assert!(bits(&again) == bits(&whole), "{}: {left}", of.1);
            assert_eq!(length(), lengths[epoch - 1]);
        }
        let [one, two] = [1, 2].map(|processes| {
            let kept = directory.path().join(format!("logits-{processes}"));
            steps_in_two_shards(processes, of, (base, batches), (12, Some(&kept)))
        });
        assert!(two.iter().all(|bits| *bits == one[0]), "{}", of.1);
    });
}
