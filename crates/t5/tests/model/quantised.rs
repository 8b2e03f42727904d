//! Models with quantised weights: the same results as with the values of their codes.

use std::fs::File;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use t5::safetensors::{Reader, write};
use t5::{
    Error, EvalContext, Files, GenerateOptions, Gradients, Lora, MicroBatch, Precision, StepContext, StoredWeights, T5,
    quantise_with,
};
use t5_ops::Quantised;

use crate::support::{case, context, device, distance, micro_batch, slices};

const CASES: [&str; 4] = ["v1_0_relu_tied", "v1_1_gated_gelu_untied", "odd_shapes_untied", "bf16_stored"];
const PRECISIONS: [Precision; 2] = [Precision::Int8, Precision::Nf4];

fn quantise(source: &Path, precision: Precision, target: &Path) -> Result<t5::QuantisedWeights, Error> {
    quantise_with(source, precision, target, &[], |name, write| write(&mut File::create(target.join(name)).unwrap()))
}

/// A directory with the values of another's codes, as f32.
// The host alone: a file is written.
fn dequantised(source: &Path, target: &Path) {
    let model = T5::load(source, DType::F32, &Device::Cpu).unwrap();
    let values = |parameter: &t5::Parameter| match parameter.quantisation {
        Some(codes) => Quantised::new(codes, parameter.tensor.clone()).unwrap().dequantised().unwrap(),
        None => parameter.tensor.clone(),
    };
    let tensors: Vec<(String, Tensor)> = model.parameters().iter().map(|p| (p.name.clone(), values(p))).collect();
    let tensors: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    write(&target.join("model.safetensors"), &tensors, &[("format", "pt")]).unwrap();
    let mut config: Value = serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    assert!(config.as_object_mut().unwrap().remove("quantization_config").is_some());
    std::fs::write(target.join("config.json"), config.to_string()).unwrap();
}

/// The tolerance for codes: 0 on the CPU. On a card products of few rows read the codes themselves, and sum in another order.
fn of_few_rows(most: f64) -> f64 {
    if device().is_cpu() { 0.0 } else { most }
}

#[test]
fn a_quantised_model_has_the_losses_answers_and_gradients_of_the_values_of_its_codes() {
    for (name, precision) in CASES.into_iter().flat_map(|name| PRECISIONS.map(|precision| (name, precision))) {
        let (source, golden, _) = case(name);
        let [codes, values] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let weights = quantise(&source, precision, codes.path()).unwrap();
        dequantised(codes.path(), values.path());
        let files = Files::in_directory(codes.path());
        let load = |path: &Path| T5::load(path, DType::F32, &device()).unwrap();
        let (narrow, wide) = (load(codes.path()), load(values.path()));
        let in_place = T5::load_in_place(codes.path(), DType::F32, &device(), &files).unwrap();
        let quantised = narrow.parameters().iter().filter(|p| p.quantisation.is_some()).count();
        assert_eq!((weights.quantised, weights.quantised + weights.kept), (quantised, narrow.parameters().len()));
        assert_eq!(StoredWeights::read(codes.path(), narrow.config()).unwrap().copied(DType::F32), 0, "{name}");

        let batch = micro_batch(&golden.sources, &golden.targets, wide.config());
        let cx = EvalContext { activations: DType::F32, loss_chunk_rows: 5 };
        let expected = wide.loss(&batch, &cx).unwrap();
        let same_loss = |got: f64, expected: f64| {
            assert!((got / expected - 1.0).abs() <= of_few_rows(1e-6), "{name} {precision:?}: {got} and {expected}");
        };
        same_loss(narrow.loss(&batch, &cx).unwrap(), expected);
        same_loss(in_place.loss(&batch, &cx).unwrap(), expected);
        // The codes are close to the model that was quantised.
        let far = if precision == Precision::Int8 { 0.01 } else { 0.2 };
        assert!((expected / golden.loss_sum - 1.0).abs() < far, "{name} {precision:?}: {expected}");
        let options = GenerateOptions { max_new_tokens: 6, activations: DType::F32, ..Default::default() };
        let answers = |model: &T5| model.generate(&slices(&golden.sources), &options).unwrap();
        assert_eq!(answers(&narrow), answers(&wide), "{name} {precision:?}");

        for dora in [false, true] {
            let lora = Lora { rank: 3, dora, modules_to_save: vec!["wo".into()], ..Lora::default() };
            let trained = |model: T5| {
                let model = model.with_adapter(lora.clone(), 7).unwrap();
                let mut grads = Gradients::new(model.parameters(), DType::F32, &|p| lora.trains(&p.name));
                let loss =
                    model.forward_backward(&batch, &context(golden.target_tokens, DType::F32), &mut grads).unwrap();
                let grads: Vec<Tensor> = grads.iter().map(|(_, grad)| grad.copy().unwrap()).collect();
                (loss, grads)
            };
            let (got, expected) = (trained(load(codes.path())), trained(load(values.path())));
            same_loss(got.0, expected.0);
            assert_eq!(got.1.len(), expected.1.len());
            let most = of_few_rows(1e-5);
            assert!(got.1.iter().zip(&expected.1).all(|(got, expected)| distance(got, expected) <= most));
        }
    }
}

#[test]
fn codes_on_the_device_of_these_tests_have_the_losses_answers_and_gradients_of_the_cpu() {
    for (name, precision) in CASES.into_iter().flat_map(|name| PRECISIONS.map(|precision| (name, precision))) {
        let (source, golden, _) = case(name);
        let codes = tempfile::tempdir().unwrap();
        quantise(&source, precision, codes.path()).unwrap();
        let samples: Vec<u32> = (0..golden.sources.len() as u32).collect();
        let of = |device: &Device| {
            let load = || T5::load(codes.path(), DType::F32, device).unwrap();
            let options = GenerateOptions { max_new_tokens: 6, activations: DType::F32, ..Default::default() };
            let answers = load().generate(&slices(&golden.sources), &options).unwrap();
            let (sources, targets) = (slices(&golden.sources), slices(&golden.targets));
            let batch = MicroBatch::new(&sources, &targets, &samples, load().config(), device).unwrap();
            let (mut losses, mut all) = (Vec::new(), Vec::new());
            for dora in [false, true] {
                let lora = Lora { rank: 3, dora, ..Lora::default() };
                let model = load().with_adapter(lora, 7).unwrap();
                let mut grads = Gradients::new(model.parameters(), DType::F32, &|p| p.name.contains("lora"));
                let cx = StepContext { adapter_dropout: 0.2, ..context(golden.target_tokens, DType::F32) };
                losses.push(model.forward_backward(&batch, &cx, &mut grads).unwrap());
                all.extend(grads.iter().map(|(_, grad)| grad.copy().unwrap()));
            }
            (answers, losses, all)
        };
        // The host alone: the card's test compares with this model.
        let (got, expected) = (of(&device()), of(&Device::Cpu));
        assert_eq!(got.0, expected.0, "{name} {precision:?}");
        for (got, expected) in got.1.iter().zip(&expected.1) {
            assert!((got / expected - 1.0).abs() < 1e-5, "{name} {precision:?}: {got} and {expected}");
        }
        assert!(!got.2.is_empty() && got.2.len() == expected.2.len());
        for (got, expected) in got.2.iter().zip(&expected.2) {
            let far = distance(got, expected);
            assert!(far < 1e-4, "{name} {precision:?}: a gradient differs by {far:e}");
        }
    }
}

#[test]
fn what_needs_values_refuses_a_quantised_model() {
    let (source, ..) = case("v1_1_gated_gelu_untied");
    let [codes, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    quantise(&source, Precision::Nf4, codes.path()).unwrap();
    let model = T5::load(codes.path(), DType::F32, &device()).unwrap();
    let refused = |error: Error| {
        let text = error.to_string();
        assert!(text.contains("quantization_config") && text.contains("nf4"), "{text}");
    };
    refused(model.save(other.path()).unwrap_err());
    refused(quantise(codes.path(), Precision::Int8, other.path()).unwrap_err());
    refused(T5::init(model.config(), 1, DType::F32, &device()).unwrap_err());
}

#[test]
fn quantised_files_that_are_damaged_are_errors_that_name_the_part() {
    let (source, ..) = case("v1_0_relu_tied");
    let codes = tempfile::tempdir().unwrap();
    quantise(&source, Precision::Nf4, codes.path()).unwrap();
    let path = codes.path().join("model.safetensors");
    let reader = Reader::open(&path).unwrap();
    let all: Vec<(String, Tensor)> = reader
        .names()
        .into_iter()
        .map(|name| {
            let dtype = if name.ends_with("codes") || name.ends_with("absmax") { DType::U8 } else { DType::F32 };
            let shape = reader.shape(&name).unwrap().to_vec();
            (name, Tensor::zeros(shape, dtype, &device()).unwrap())
        })
        .collect();
    type Change<'a> = &'a dyn Fn(&mut Vec<(String, Tensor)>);
    let check = |change: Change, words: &str| {
        let mut tensors = all.clone();
        change(&mut tensors);
        let tensors: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        write(&path, &tensors, &[]).unwrap();
        let error = T5::load(codes.path(), DType::F32, &device()).unwrap_err().to_string();
        assert!(error.contains(words), "{words}: {error}");
    };
    let first = "encoder.block.0.layer.0.SelfAttention.q.weight";
    let named = |tensors: &[(String, Tensor)], part: &str| {
        tensors.iter().position(|(name, _)| *name == format!("{first}.{part}")).unwrap()
    };
    // Wider ones first: the parts of a weight are apart.
    check(&|_| (), "does not follow the part before it");
    check(&|all| drop(all.remove(named(all, "codes"))), "q.weight.codes");
    check(&|all| drop(all.remove(named(all, "absmax"))), "q.weight.absmax");
    let longer = |all: &mut Vec<(String, Tensor)>| {
        let at = named(all, "codes");
        all[at].1 = Tensor::zeros(7, DType::U8, &device()).unwrap();
    };
    check(&longer, "got u8 [7]");
    let config = codes.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    for (from, to) in [("train_low_mem", "bitsandbytes"), ("nf4", "nf5")] {
        std::fs::write(&config, text.replace(from, to)).unwrap();
        let error = T5::load(codes.path(), DType::F32, &device()).unwrap_err().to_string();
        assert!(error.contains("quantization_config") && error.contains("convert-base"), "{error}");
    }
}
