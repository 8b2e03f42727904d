//! Losses of vectors, compared with torch in f64 over eight steps, and their gradients however a batch is cut.

#[path = "support/cuts.rs"]
mod cuts;
#[path = "../../cuda-device/tests/support/device.rs"]
mod device;
#[path = "support/golden.rs"]
mod golden;

use candle_core::{DType, Tensor};
use serde_json::Value;
use t5::{Pooling, T5};
use trainer::contrastive::{Contrastive, ContrastiveLoss};
use trainer::{Batch, Levers, Precision, RowLabels, StepOutcome, StepPlan, StepStats, Trainer, TrainerOptions};

use self::device::device;
use self::golden::micro_batches_of;

const GOLDEN: &str = "encoders/contrastive.json";

fn settings(case: &Value) -> Contrastive {
    let settings = &case["settings"];
    let usual = Contrastive::default();
    let number = |key: &str, usual: f64| settings[key].as_f64().unwrap_or(usual);
    let switch = |key: &str| settings[key].as_bool().unwrap_or(false);
    let sizes = settings["sizes"].as_array().into_iter().flatten();
    Contrastive {
        loss: ContrastiveLoss::named(settings["loss"].as_str().unwrap()).unwrap(),
        temperature: number("temperature", usual.temperature),
        margin: number("margin", usual.margin),
        pooling: Pooling::named(settings["pooling"].as_str().unwrap()).unwrap(),
        normalizes: switch("normalizes"),
        sizes: sizes.map(|size| usize::try_from(size.as_u64().unwrap()).unwrap()).collect(),
        has_negatives: switch("has_negatives"),
        largest_score: number("largest_score", usual.largest_score),
    }
}

/// The samples of a step's rows. A row with a negative makes two.
fn samples(rows: &Value) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let ids = |text: &Value| text.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect::<Vec<_>>();
    let of_row = |row: &Value| {
        let texts: Vec<Vec<u32>> = row.as_array().unwrap().iter().map(ids).collect();
        texts[1..].iter().map(|other| (texts[0].clone(), other.clone())).collect::<Vec<_>>()
    };
    rows.as_array().unwrap().iter().flat_map(of_row).unzip()
}

fn trainer(golden: &Value, contrastive: Contrastive, precision: Precision, dropout: f64) -> Trainer {
    let options = TrainerOptions { dropout, precision, contrastive: Some(contrastive), ..golden::options(golden) };
    let model = T5::load(&golden::path("encoders/encoder"), options.parameter_dtype(), &device()).unwrap();
    Trainer::new(model, options).unwrap()
}

fn step(trainer: &mut Trainer, of_step: &Value, levers: Levers) -> StepStats {
    let (sources, targets) = samples(&of_step["rows"]);
    let plan = StepPlan { levers, longest: None };
    let scores: Vec<f64> = of_step["scores"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
    let labels = RowLabels { gains: &scores, ..RowLabels::default() };
    let batch = Batch { sources: &sources, targets: &targets };
    let outcome = trainer.step_of_labels((&batch, labels), &[sources.len()], &plan, &|| false).unwrap();
    let StepOutcome::Done(stats) = outcome else { panic!("{outcome:?}") };
    stats
}

#[test]
fn eight_steps_of_every_loss_are_those_of_torch_however_they_are_cut() {
    let golden = golden::read(GOLDEN);
    for (name, case) in golden["cases"].as_object().unwrap() {
        let mut trainer = trainer(&golden, settings(case), Precision::F32, 0.0);
        for (i, of_step) in case["steps"].as_array().unwrap().iter().enumerate() {
            let stats = step(&mut trainer, of_step, cuts::levers_of_step(i));
            let values = [("loss", stats.loss, 1e-5), ("grad_norm", stats.grad_norm, 2e-4)];
            golden::check(&format!("{name}, step {}", i + 1), of_step, 1e-3, &values);
            assert_eq!(stats.contrastive.unwrap().loss, stats.loss);
        }
    }
}

#[test]
fn micro_batches_of_one_three_and_all_texts_have_the_gradient_of_the_batch_with_dropout_too() {
    let golden = golden::read(GOLDEN);
    for (name, case) in golden["cases"].as_object().unwrap() {
        cuts::check_cuts(name, |dropout, levers| {
            let mut trainer = trainer(&golden, settings(case), Precision::F64, dropout);
            let stats = step(&mut trainer, &case["steps"][0], levers);
            (trainer, stats)
        });
    }
}

#[test]
fn with_dropout_the_gradient_is_that_of_the_loss_that_a_step_reports() {
    let golden = golden::read(GOLDEN);
    let case = &golden["cases"]["mnr"];
    let rows = &case["steps"][0];
    let loss_at = |by: f64| {
        let mut trainer = trainer(&golden, settings(case), Precision::F64, 0.2);
        let index =
            trainer.model().parameters().iter().position(|of| of.name.ends_with("0.SelfAttention.v.weight")).unwrap();
        let moved = |tensor: &Tensor| -> trainer::Result<()> {
            let values = tensor.copy().unwrap().flatten_all().unwrap();
            let mut values: Vec<f64> = values.to_vec1().unwrap();
            values[7] += by;
            let values = Tensor::from_vec(values, tensor.shape(), tensor.device()).unwrap();
            tensor.slice_set(&values, 0, 0).unwrap();
            Ok(())
        };
        trainer.model().change(index, moved).unwrap();
        let loss = step(&mut trainer, rows, micro_batches_of(3)).loss;
        (loss, index, trainer)
    };
    let (_, index, trainer) = loss_at(0.0);
    let gradient = trainer.gradients().get(index).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap()[7];
    let difference = (loss_at(1e-5).0 - loss_at(-1e-5).0) / 2e-5;
    assert!((difference - gradient).abs() < 1e-7 * gradient.abs().max(1.0), "{difference}, {gradient}");
}

#[test]
fn a_loss_of_vectors_is_for_encoders_alone() {
    let model = T5::load(&golden::path("encoders/sequence"), DType::F32, &device()).unwrap();
    let options = TrainerOptions { contrastive: Some(Contrastive::default()), ..TrainerOptions::default() };
    let error = Trainer::new(model, options).err().unwrap().to_string();
    assert!(error.contains("an encoder"), "{error}");
}
