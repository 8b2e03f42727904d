//! Steps of AdamW that are compared with numbers from Python.

use std::path::{Path, PathBuf};

use serde_json::Value;
use t5::Levers;
use trainer::TrainerOptions;
use trainer::adamw::AdamwOptions;
use trainer::schedule::Schedule;

pub fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(name)
}

pub fn read(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path(name)).unwrap()).unwrap()
}

/// The options of eight steps with the settings of a golden, without dropout.
pub fn options(golden: &Value) -> TrainerOptions {
    let number = |key: &str| golden["optimizer"][key].as_f64().unwrap();
    TrainerOptions {
        dropout: 0.0,
        grad_clip_norm: golden["grad_clip_norm"].as_f64().unwrap(),
        optimizer: AdamwOptions {
            learning_rate: number("lr"),
            weight_decay: number("weight_decay"),
            eps: number("eps"),
            ..AdamwOptions::default()
        }
        .into(),
        schedule: Schedule::CONSTANT,
        total_steps: 8,
        ..TrainerOptions::default()
    }
}

pub fn micro_batches_of(samples: usize) -> Levers {
    Levers { micro_batch_samples: samples, loss_chunk_rows: 5, ..Levers::default() }
}

/// Compares values with those of a step by their keys, each within a share of the expected value, or of `least` if that is larger.
#[track_caller]
pub fn check(at: &str, expected: &Value, least: f64, values: &[(&str, f64, f64)]) {
    for &(key, got, tolerance) in values {
        let expected = expected[key].as_f64().unwrap();
        let error = (got - expected).abs() / expected.abs().max(least);
        assert!(error <= tolerance, "{at}, {key}: {got}, expected {expected}");
    }
}
