//! The golden files and a few comparisons, shared by the integration tests.

#[path = "../../../cuda-device/tests/support/device.rs"]
mod device;

use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use serde::Deserialize;
use t5::safetensors::Reader;
use t5::{Config, Gradients, MicroBatch, StepContext, T5};

pub use self::device::{device, every};

/// The results of transformers for a directory and a batch (see scripts/README.md).
#[derive(Deserialize)]
pub struct Golden {
    pub sources: Vec<Vec<u32>>,
    pub targets: Vec<Vec<u32>>,
    pub target_tokens: u64,
    pub loss_sum: f64,
    pub tied: bool,
    pub logit_scale: f64,
    pub max_new_tokens: usize,
    pub generated: Vec<Vec<u32>>,
}

/// A small T5 v1.0.
pub fn relu() -> Config {
    Config {
        vocab_size: 37,
        d_model: 20,
        d_ff: 28,
        d_kv: 6,
        num_heads: 3,
        num_layers: 3,
        num_decoder_layers: 2,
        relative_attention_num_buckets: 8,
        relative_attention_max_distance: 16,
        ..Config::default()
    }
}

pub fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens")
}

pub fn case(name: &str) -> (PathBuf, Golden, Reader) {
    let in_group = |group: &str| goldens().join(group).join(name);
    let groups = ["models", "families", "gemma"].map(in_group);
    let directory = groups.into_iter().find(|path| path.is_dir()).expect("a golden of this name");
    let golden = serde_json::from_slice(&std::fs::read(directory.join("golden.json")).unwrap()).unwrap();
    let tensors = Reader::open(&directory.join("golden.safetensors")).unwrap();
    (directory, golden, tensors)
}

pub fn slices(lists: &[Vec<u32>]) -> Vec<&[u32]> {
    lists.iter().map(Vec::as_slice).collect()
}

pub fn micro_batch(sources: &[Vec<u32>], targets: &[Vec<u32>], config: &Config) -> MicroBatch {
    let samples: Vec<u32> = (0..sources.len() as u32).collect();
    MicroBatch::new(&slices(sources), &slices(targets), &samples, config, &device()).unwrap()
}

pub fn context(target_tokens: u64, dtype: DType) -> StepContext {
    StepContext {
        seed: 3,
        step: 5,
        dropout: 0.0,
        adapter_dropout: 0.0,
        activations: dtype,
        recompute_blocks: 0,
        loss_chunk_rows: 7,
        target_tokens,
        token_loss: t5_ops::TokenLoss::default(),
    }
}

pub fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The largest difference over the largest magnitude of `expected`.
pub fn distance(got: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(got.dims(), expected.dims());
    let (got, expected) = (values(got), values(expected));
    assert!(got.iter().all(|v| v.is_finite()));
    let largest = expected.iter().fold(0f64, |m, v| m.max(v.abs()));
    let difference = got.iter().zip(&expected).fold(0f64, |m, (a, b)| m.max((a - b).abs()));
    if largest == 0.0 { difference } else { difference / largest }
}

/// Every gradient by name, in f64; the loss sum.
pub fn gradients(model: &T5, batch: &MicroBatch, cx: &StepContext) -> (f64, Vec<(String, Tensor)>) {
    let mut grads = Gradients::new(model.parameters(), DType::F32, &|_| true);
    let loss = model.forward_backward(batch, cx, &mut grads).unwrap();
    let named = grads.iter().map(|(i, grad)| (model.parameters()[i].name.clone(), grad.copy().unwrap())).collect();
    (loss, named)
}
