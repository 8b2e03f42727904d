//! Losses of rankings, compared with torch in f64 over eight steps, and their gradients however a batch is cut.

#[path = "support/cuts.rs"]
mod cuts;
#[path = "../../cuda-device/tests/support/device.rs"]
mod device;
#[path = "support/golden.rs"]
mod golden;

use serde_json::Value;
use t5::T5;
use trainer::evaluate::{EvaluateOptions, Evaluation, EvaluationBatch};
use trainer::ranking::{Ranking, RankingLoss};
use trainer::{Batch, Levers, Precision, RowLabels, StepOutcome, StepPlan, StepStats, Trainer, TrainerOptions};

use self::device::device;

const GOLDEN: &str = "ranking/golden.json";

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
    fn parse(case: &Value, step: &Value) -> Self {
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
    let options = TrainerOptions { dropout, precision, ranking: Some(ranking(case)), ..golden::options(golden) };
    let model = T5::load(&golden::path("ranking/model"), options.parameter_dtype(), &device()).unwrap();
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
    let golden = golden::read(GOLDEN);
    for (name, case) in golden["cases"].as_object().unwrap() {
        let mut trainer = trainer(&golden, case, Precision::F32, 0.0);
        for (i, of_step) in case["steps"].as_array().unwrap().iter().enumerate() {
            let lists = Lists::parse(case, of_step);
            let before = evaluated(trainer.model(), case, &lists);
            let stats = step(&mut trainer, &lists, cuts::levers_of_step(i));
            let at = format!("{name}, step {}", i + 1);
            golden::check(&format!("{at}, evaluation"), of_step, 1e-2, &[("loss", before, 1e-5)]);
            let values = [("loss", stats.loss, 1e-5), ("grad_norm", stats.grad_norm, 2e-4)];
            golden::check(&at, of_step, 1e-2, &values);
        }
    }
}

#[test]
fn micro_batches_of_one_three_and_all_texts_have_the_gradient_of_the_uncut_lists_with_dropout_too() {
    let golden = golden::read(GOLDEN);
    for (name, case) in golden["cases"].as_object().unwrap() {
        let lists = Lists::parse(case, &case["steps"][2]);
        cuts::check_cuts(name, |dropout, levers| {
            let mut trainer = trainer(&golden, case, Precision::F64, dropout);
            let stats = step(&mut trainer, &lists, levers);
            (trainer, stats)
        });
    }
}
