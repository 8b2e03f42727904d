//! Losses of vectors, compared with torch in f64 over eight steps, and their gradients however a batch is cut.

#[path = "../../cuda-device/tests/support/device.rs"]
mod device;

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use t5::{Pooling, T5};
use trainer::adamw::AdamwOptions;
use trainer::contrastive::{Contrastive, ContrastiveLoss};
use trainer::schedule::Schedule;
use trainer::{Batch, LayerMajor, Levers, Precision, StepOutcome, StepPlan, StepStats, Trainer, TrainerOptions};

use self::device::device;

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/encoders")
}

fn golden() -> Value {
    serde_json::from_slice(&std::fs::read(goldens().join("contrastive.json")).unwrap()).unwrap()
}

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
    let options = TrainerOptions {
        dropout,
        precision,
        contrastive: Some(contrastive),
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
    let model = T5::load(&goldens().join("encoder"), options.parameter_dtype(), &device()).unwrap();
    Trainer::new(model, options).unwrap()
}

fn step(trainer: &mut Trainer, rows: &Value, levers: Levers) -> StepStats {
    let (sources, targets) = samples(rows);
    let plan = StepPlan { levers, longest: None };
    let outcome = trainer.step(&Batch { sources: &sources, targets: &targets }, &plan, &|| false).unwrap();
    let StepOutcome::Done(stats) = outcome else { panic!("{outcome:?}") };
    stats
}

fn micro_batches_of(samples: usize) -> Levers {
    Levers { micro_batch_samples: samples, loss_chunk_rows: 5, ..Levers::default() }
}

#[test]
fn eight_steps_of_every_loss_are_those_of_torch_however_they_are_cut() {
    let golden = golden();
    for (name, case) in golden["cases"].as_object().unwrap() {
        let mut trainer = trainer(&golden, settings(case), Precision::F32, 0.0);
        for (i, of_step) in case["steps"].as_array().unwrap().iter().enumerate() {
            let layers = LayerMajor { boundaries_on_disk: i % 3 == 0, ..LayerMajor::default() };
            let levers = Levers {
                recompute_blocks: i % 3,
                layer_major: (i % 4 == 3).then_some(layers),
                ..micro_batches_of(1 + 3 * (i % 5))
            };
            let stats = step(&mut trainer, &of_step["rows"], levers);
            for (what, got, tolerance) in [("loss", stats.loss, 1e-5), ("grad_norm", stats.grad_norm, 2e-4)] {
                let expected = of_step[what].as_f64().unwrap();
                let error = (got - expected).abs() / expected.abs().max(1e-3);
                assert!(error <= tolerance, "{name}, step {}, {what}: {got}, expected {expected}", i + 1);
            }
            assert_eq!(stats.contrastive.unwrap().loss, stats.loss);
        }
    }
}

/// All gradients of a step, in f64 on the host.
fn gradients(trainer: &Trainer) -> Vec<Vec<f64>> {
    let all = 0..trainer.model().parameters().len();
    // The host alone: that is where values are compared.
    let values = |gradient: &Tensor| gradient.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
    let of = |index| trainer.gradients().get(index).map(|gradient| values(gradient).flatten_all().unwrap());
    all.filter_map(of).map(|gradient| gradient.to_vec1().unwrap()).collect()
}

#[test]
fn micro_batches_of_one_three_and_all_texts_have_the_gradient_of_the_batch_with_dropout_too() {
    let golden = golden();
    for (name, case) in golden["cases"].as_object().unwrap() {
        let rows = &case["steps"][0]["rows"];
        let of_cut = |micro_batch: usize, dropout: f64| {
            let mut trainer = trainer(&golden, settings(case), Precision::F64, dropout);
            let stats = step(&mut trainer, rows, micro_batches_of(micro_batch));
            (stats.loss, gradients(&trainer))
        };
        for dropout in [0.0, 0.2] {
            let (loss, whole) = of_cut(100, dropout);
            let largest = whole.iter().flatten().fold(0.0_f64, |most, value| most.max(value.abs()));
            assert!(largest > 1e-4, "{name}: {largest}");
            for micro_batch in [1, 3] {
                let (of_other, other) = of_cut(micro_batch, dropout);
                assert!((loss - of_other).abs() < 1e-12, "{name}: {loss}, {of_other}");
                for (one, other) in whole.iter().flatten().zip(other.iter().flatten()) {
                    assert!((one - other).abs() < 1e-10 * largest, "{name}, {micro_batch}: {one}, {other}");
                }
            }
        }
    }
}

#[test]
fn with_dropout_the_gradient_is_that_of_the_loss_that_a_step_reports() {
    let golden = golden();
    let case = &golden["cases"]["mnr"];
    let rows = &case["steps"][0]["rows"];
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
    let model = T5::load(&goldens().join("sequence"), DType::F32, &device()).unwrap();
    let options = TrainerOptions { contrastive: Some(Contrastive::default()), ..TrainerOptions::default() };
    let error = Trainer::new(model, options).err().unwrap().to_string();
    assert!(error.contains("an encoder"), "{error}");
}
