//! Losses of rankings, compared with torch in f64 over eight steps, and their gradients however a batch is cut.

#[path = "../../cuda-device/tests/support/device.rs"]
mod device;

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use t5::T5;
use trainer::adamw::AdamwOptions;
use trainer::evaluate::{EvaluateOptions, Evaluation, EvaluationBatch};
use trainer::ranking::{Ranking, RankingLoss};
use trainer::schedule::Schedule;
use trainer::{
    Batch, LayerMajor, Levers, Precision, RowLabels, StepOutcome, StepPlan, StepStats, Trainer, TrainerOptions,
};

use self::device::device;

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/ranking")
}

fn golden() -> Value {
    serde_json::from_slice(&std::fs::read(goldens().join("golden.json")).unwrap()).unwrap()
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
}

fn ids(list: &Value) -> Vec<u32> {
    numbers(list).into_iter().map(|id| id as u32).collect()
}

fn ranking(case: &Value) -> Ranking {
    let weights = numbers(&case["settings"]["weights"]);
    Ranking {
        loss: RankingLoss::named(case["settings"]["loss"].as_str().unwrap()).unwrap(),
        weights: weights.try_into().unwrap_or([1.0; 2]),
    }
}

/// The texts of a step's lists.
struct Lists {
    sources: Vec<Vec<u32>>,
    targets: Vec<Vec<u32>>,
    lengths: Vec<usize>,
    gains: Vec<f64>,
}

impl Lists {
    fn of(case: &Value, step: &Value) -> Self {
        let (lists, answers) = (step["lists"].as_array().unwrap(), ids(&case["settings"]["answers"]));
        let texts: Vec<&Value> = lists.iter().flat_map(|list| list.as_array().unwrap()).collect();
        let gains: Vec<f64> = texts.iter().map(|text| text[1].as_f64().unwrap()).collect();
        let answer = |gain: &f64| vec![if *gain > 0.0 { answers[0] } else { answers[answers.len() - 1] }];
        Self {
            sources: texts.iter().map(|text| ids(&text[0])).collect(),
            targets: gains.iter().map(answer).collect(),
            lengths: lists.iter().map(|list| list.as_array().unwrap().len()).collect(),
            gains,
        }
    }

    fn labels(&self) -> RowLabels<'_> {
        RowLabels { lists: &self.lengths, gains: &self.gains, ..RowLabels::default() }
    }
}

fn trainer(golden: &Value, case: &Value, precision: Precision, dropout: f64) -> Trainer {
    let options = TrainerOptions {
        dropout,
        precision,
        ranking: Some(ranking(case)),
        grad_clip_norm: golden["grad_clip_norm"].as_f64().unwrap(),
        optimizer: AdamwOptions {
            learning_rate: golden["optimizer"]["lr"].as_f64().unwrap(),
            weight_decay: golden["optimizer"]["weight_decay"].as_f64().unwrap(),
            ..AdamwOptions::default()
        }
        .into(),
        schedule: Schedule::CONSTANT,
        total_steps: 8,
        ..TrainerOptions::default()
    };
    let model = T5::load(&goldens().join("model"), options.parameter_dtype(), &device()).unwrap();
    Trainer::new(model, options).unwrap()
}

fn step(trainer: &mut Trainer, lists: &Lists, levers: Levers) -> StepStats {
    let batch = Batch { sources: &lists.sources, targets: &lists.targets };
    let plan = StepPlan { levers, longest: None };
    let shards = [lists.sources.len()];
    let outcome = trainer.step_of_labels((&batch, lists.labels()), &shards, &plan, &|| false).unwrap();
    let StepOutcome::Done(stats) = outcome else { panic!("{outcome:?}") };
    stats
}

fn micro_batches_of(samples: usize) -> Levers {
    Levers { micro_batch_samples: samples, loss_chunk_rows: 5, ..Levers::default() }
}

/// The loss that an evaluation of these lists measures.
fn evaluated(model: &T5, case: &Value, lists: &Lists) -> f64 {
    let of = (ranking(case), ids(&case["settings"]["answers"]));
    let options = EvaluateOptions { generate: None, ranking: Some(of), micro_batch_samples: 3, ..Default::default() };
    let mut evaluation = Evaluation::new(options);
    let (sources, targets, labels) = (&lists.sources, &lists.targets, lists.labels());
    let batch = EvaluationBatch { sources, targets, references: None, rejected: &[], labels };
    evaluation.add(model, &batch, &|_| String::new(), &|| false).unwrap();
    ranking(case).stats(&evaluation.finish().unwrap().ranked).loss
}

#[test]
fn eight_steps_of_every_loss_are_those_of_torch_however_they_are_cut() {
    let golden = golden();
    for (name, case) in golden["cases"].as_object().unwrap() {
        let mut trainer = trainer(&golden, case, Precision::F32, 0.0);
        for (i, of_step) in case["steps"].as_array().unwrap().iter().enumerate() {
            let layers = LayerMajor { boundaries_on_disk: i % 3 == 0, ..LayerMajor::default() };
            let levers = Levers {
                recompute_blocks: i % 3,
                layer_major: (i % 4 == 3).then_some(layers),
                ..micro_batches_of(1 + 3 * (i % 5))
            };
            let lists = Lists::of(case, of_step);
            let before = evaluated(trainer.model(), case, &lists);
            let stats = step(&mut trainer, &lists, levers);
            let values = [
                ("evaluation", before, "loss", 1e-5),
                ("loss", stats.loss, "loss", 1e-5),
                ("norm", stats.grad_norm, "grad_norm", 2e-4),
            ];
            for (what, got, key, tolerance) in values {
                let expected = of_step[key].as_f64().unwrap();
                let error = (got - expected).abs() / expected.abs().max(1e-2);
                assert!(error <= tolerance, "{name}, step {}, {what}: {got}, expected {expected}", i + 1);
            }
        }
    }
}

/// All gradients of a step, in f64 on the host.
fn gradients(trainer: &Trainer) -> Vec<f64> {
    let all = 0..trainer.model().parameters().len();
    // The host alone: that is where values are compared.
    let values = |gradient: &Tensor| gradient.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
    let of = |index| trainer.gradients().get(index).map(|gradient| values(gradient).flatten_all().unwrap());
    all.filter_map(of).flat_map(|gradient| gradient.to_vec1::<f64>().unwrap()).collect()
}

#[test]
fn micro_batches_of_one_three_and_all_texts_have_the_gradient_of_the_uncut_lists_with_dropout_too() {
    let golden = golden();
    for (name, case) in golden["cases"].as_object().unwrap() {
        let lists = Lists::of(case, &case["steps"][2]);
        let of_cut = |micro_batch: usize, dropout: f64| {
            let mut trainer = trainer(&golden, case, Precision::F64, dropout);
            let stats = step(&mut trainer, &lists, micro_batches_of(micro_batch));
            (stats.loss, gradients(&trainer))
        };
        for dropout in [0.0, 0.2] {
            let (loss, whole) = of_cut(100, dropout);
            let largest = whole.iter().fold(0.0_f64, |most, value| most.max(value.abs()));
            assert!(largest > 1e-4, "{name}: {largest}");
            for micro_batch in [1, 3] {
                let (of_other, other) = of_cut(micro_batch, dropout);
                assert!((loss - of_other).abs() < 1e-12 * loss.abs().max(1.0), "{name}: {loss}, {of_other}");
                for (one, other) in whole.iter().zip(&other) {
                    assert!((one - other).abs() < 1e-10 * largest, "{name}, {micro_batch}: {one}, {other}");
                }
            }
        }
    }
}
