//! Agreement with transformers, on golden files: reading, results and generation.

use crate::support::*;
use candle_core::{DType, Tensor};
use serde_json::{Map, Value};
use t5::{Config, EvalContext, GenerateOptions, T5};

const CASES: [&str; 23] = [
    "v1_0_relu_tied",
    "v1_1_gated_gelu_untied",
    "odd_shapes_untied",
    "long_positions_gelu",
    "gated_gelu_tied",
    "ragged_padding",
    "gated_silu_tied_unscaled",
    "sharded",
    "bf16_stored",
    "hub_layout",
    // Families, as published.
    "mt5",
    "mt5_hub",
    "umt5",
    "umt5_hub",
    "byt5",
    "codet5",
    "madlad",
    "ul2",
    "flan_f16",
    "t5gemma",
    "t5gemma_unbalanced",
    "t5gemma2",
    "t5gemma2_shards",
];

#[test]
fn every_config_is_read_as_transformers_reads_it() {
    let directory = goldens().join("configs");
    let expected: Map<String, Value> =
        serde_json::from_slice(&std::fs::read(directory.join("expected.json")).unwrap()).unwrap();
    for (file, expected) in &expected {
        let config = Config::from_file(&directory.join(file)).unwrap();
        let mut read = config.to_json();
        read["scale_decoder_outputs"] = config.scale_decoder_outputs.into();
        for (key, expected) in expected.as_object().unwrap() {
            let same = &read[key] == expected || (expected.is_number() && read[key].as_f64() == expected.as_f64());
            assert!(same, "{file}: {key} is {}, expected {expected}", read[key]);
        }
    }
}

#[test]
fn what_a_config_says_that_is_unknown_here_is_written_back() {
    let directory = goldens().join("configs");
    for file in std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()) {
        if file.ends_with("expected.json") {
            continue;
        }
        let text = std::fs::read_to_string(&file).unwrap();
        let before: Map<String, Value> = serde_json::from_str(&text).unwrap();
        let after = Config::from_json(&text, "config.json").unwrap().to_json();
        for (key, value) in &before {
            let changed_on_purpose = key == "architectures" || value.is_null();
            assert!(&after[key] == value || changed_on_purpose, "{}: {key}", file.display());
        }
        let again = Config::from_json(&after.to_string(), "config.json").unwrap();
        assert_eq!(again.to_json(), after, "{}", file.display());
    }
}

#[test]
fn logits_and_loss_agree_with_transformers() {
    for name in CASES {
        let (directory, golden, tensors) = case(name);
        let model = T5::load(&directory, DType::F32, &device()).unwrap();
        assert_eq!(model.config().tie_word_embeddings, golden.tied, "{name}");
        assert!((model.config().logit_scale() - golden.logit_scale).abs() < 1e-12, "{name}");
        let batch = micro_batch(&golden.sources, &golden.targets, model.config());

        let expected = tensors.read("encoder_output", DType::F32, &device()).unwrap();
        let encoded = model.encode(&batch, DType::F32).unwrap();
        let far = real_tokens_distance(&encoded, &expected, &golden.sources);
        assert!(far < 1e-5, "{name}: encoder output differs by {far:e}");

        let expected = tensors.read("logits", DType::F32, &device()).unwrap();
        let far = real_tokens_distance(&model.logits(&batch).unwrap(), &expected, &golden.targets);
        assert!(far < 1e-5, "{name}: logits differ by {far:e}");

        let loss = model.loss(&batch, &EvalContext { loss_chunk_rows: 5, ..Default::default() }).unwrap();
        let far = (loss / golden.loss_sum - 1.0).abs();
        assert!(far < 1e-5, "{name}: loss differs by {far:e}");
    }
}

/// As `distance`, at positions that are not padding.
fn real_tokens_distance(got: &Tensor, expected: &Tensor, lists: &[Vec<u32>]) -> f64 {
    let rows = lists.iter().enumerate().map(|(sample, list)| {
        let pick = |t: &Tensor| t.get(sample).unwrap().narrow(0, 0, list.len()).unwrap();
        (pick(got), pick(expected))
    });
    let (got, expected): (Vec<_>, Vec<_>) = rows.unzip();
    distance(&Tensor::cat(&got, 0).unwrap(), &Tensor::cat(&expected, 0).unwrap())
}

#[test]
fn every_parameters_gradient_agrees_with_transformers() {
    let mut compared = 0;
    for name in CASES {
        let (directory, golden, tensors) = case(name);
        if !tensors.names().iter().any(|tensor| tensor.starts_with("grad.")) {
            continue;
        }
        let model = T5::load(&directory, DType::F32, &device()).unwrap();
        let batch = micro_batch(&golden.sources, &golden.targets, model.config());
        let (loss, grads) = gradients(&model, &batch, &context(golden.target_tokens, DType::F32));
        assert!((loss / golden.loss_sum - 1.0).abs() < 1e-5, "{name}: loss {loss}");
        assert_eq!(grads.len(), model.parameters().len(), "{name}");
        for (parameter, grad) in grads {
            let expected = tensors.read(&format!("grad.{parameter}"), DType::F32, &device()).unwrap();
            let far = distance(&grad, &expected);
            assert!(far < 1e-4, "{name}: gradient of {parameter} differs by {far:e}");
            compared += 1;
        }
    }
    assert!(compared > 200, "only {compared} gradients were compared");
}

#[test]
fn greedy_generation_is_that_of_transformers() {
    for name in CASES {
        let (directory, golden, _) = case(name);
        let model = T5::load(&directory, DType::F32, &device()).unwrap();
        let options = GenerateOptions { max_new_tokens: golden.max_new_tokens, ..Default::default() };
        let generated = model.generate(&slices(&golden.sources), &options).unwrap();
        assert_eq!(generated, golden.generated, "{name}");
    }
}
