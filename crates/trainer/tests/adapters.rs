//! Adapters trained by this crate compared with the same adapters trained by PEFT: fifty steps of AdamW from the adapter that PEFT
//! saved, for each case of `scripts/golden_cases/adapters.py`.

#[path = "../../cuda-device/tests/support/device.rs"]
mod device;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use candle_core::DType;
use serde_json::Value;
use t5::T5;
use t5::peft::{AdapterDirectory, save_with};
use t5::safetensors::Reader;
use trainer::adamw::AdamwOptions;
use trainer::{Batch, Levers, StepOutcome, StepPlan, Trainer, TrainerOptions};

use self::device::device;

const STEPS: usize = 50;

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../t5/tests/goldens/adapters")
}

fn golden(case: &str) -> Value {
    serde_json::from_slice(&fs::read(goldens().join(case).join("golden.json")).unwrap()).unwrap()
}

/// A base with an adapter of PEFT.
fn adapted(base: &Path, adapter: &Path) -> T5 {
    let model = T5::load(base, DType::F32, &device()).unwrap();
    let adapter = AdapterDirectory::open(adapter, model.config()).unwrap();
    let lora = adapter.lora(model.config());
    let model = model.with_adapter(lora, 1).unwrap();
    adapter.fill(model.parameters()).unwrap();
    model
}

fn ids(value: &Value) -> Vec<Vec<u32>> {
    let list = |ids: &Value| ids.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    value.as_array().unwrap().iter().map(list).collect()
}

/// The largest difference between two files' tensors.
fn largest_difference(got: &Path, expected: &Path) -> f32 {
    let [got, expected] = [got, expected].map(|path| Reader::open(path).unwrap());
    let mut largest = 0f32;
    for name in got.names() {
        let read = |file: &Reader| file.read(&name, DType::F32, &device()).unwrap().flatten_all().unwrap();
        let [got, expected] = [&got, &expected].map(|file| read(file).to_vec1::<f32>().unwrap());
        assert_eq!(got.len(), expected.len(), "{name}");
        let differences = got.iter().zip(&expected).map(|(got, expected)| (got - expected).abs());
        largest = differences.fold(largest, f32::max);
    }
    largest
}

#[track_caller]
fn check(case: &str) {
    let golden = golden(case);
    let base = goldens().join("bases").join(golden["base"].as_str().unwrap());
    let model = adapted(&base, &goldens().join(case).join("start"));
    let number = |name: &str| golden[name].as_f64().unwrap();
    let (learning_rate, weight_decay) = (number("learning_rate"), number("weight_decay"));
    let options = TrainerOptions {
        dropout: 0.0,
        grad_clip_norm: 1e9,
        optimizer: AdamwOptions { learning_rate, weight_decay, ..AdamwOptions::default() }.into(),
        total_steps: STEPS as u64,
        ..TrainerOptions::default()
    };
    let mut trainer = Trainer::new(model, options).unwrap();
    let batches = golden["batches"].as_array().unwrap();
    for step in 0..STEPS {
        let batch = &batches[step % batches.len()];
        let (sources, targets) = (ids(&batch["sources"]), ids(&batch["targets"]));
        // The memory plan changes nothing: micro-batches, recomputed blocks and rows of logits of every size.
        let levers = Levers {
            micro_batch_samples: 1 + step % 4,
            recompute_blocks: step % 3,
            loss_chunk_rows: 3 + step,
            layer_major: None,
            ..Levers::default()
        };
        let plan = StepPlan { levers, longest: None };
        let outcome = trainer.step(&Batch { sources: &sources, targets: &targets }, &plan, &|| false).unwrap();
        let StepOutcome::Done(stats) = outcome else { panic!("{case}, step {step}: {outcome:?}") };
        let expected = golden["losses"][step].as_f64().unwrap();
        let difference = (stats.loss - expected).abs();
        assert!(difference <= 1e-5, "{case}, step {}: loss {}, expected {expected}", step + 1, stats.loss);
    }
    let directory = tempfile::tempdir().unwrap();
    let model = trainer.model();
    let lora = model.config().lora.as_ref().unwrap();
    save_with(directory.path(), model.config(), lora, Some("base"), model.parameters(), |name, write| {
        write(&mut File::create(directory.path().join(name)).unwrap())
    })
    .unwrap();
    let expected = goldens().join(case).join("final/adapter_model.safetensors");
    let largest = largest_difference(&directory.path().join("adapter_model.safetensors"), &expected);
    assert!(largest <= 1e-5, "{case}: {largest:e}");
    // The directory is an adapter that is loaded again unchanged.
    let again = adapted(&base, directory.path());
    for (one, other) in model.parameters().iter().zip(again.parameters()) {
        let values = |tensor: &candle_core::Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(one.name == other.name && values(&one.tensor) == values(&other.tensor), "{case}: {}", one.name);
    }
}

#[test]
fn lora_trains_as_in_peft() {
    for case in ["q_v", "all_linear", "patterns", "layers"] {
        check(case);
    }
}

#[test]
fn rslora_and_dora_train_as_in_peft() {
    for case in ["rslora", "dora", "regex_dora_rslora"] {
        check(case);
    }
}

#[test]
fn adapters_of_the_head_train_as_in_peft() {
    for case in ["head", "head_tied"] {
        check(case);
    }
}

#[test]
fn a_head_and_norms_that_are_saved_train_as_in_peft() {
    for case in ["head_saved", "head_saved_tied"] {
        check(case);
    }
}
