//! Models that make no text, compared with transformers in f64: vectors of an encoder, and training steps of classifiers.

#[path = "../../cuda-device/tests/support/device.rs"]
mod device;
#[path = "support/golden.rs"]
mod golden;

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use t5::peft::AdapterDirectory;
use t5::safetensors::Reader;
use t5::{Head, Labels, ModelDirectory, Pooling, T5};
use t5_ops::IGNORED_LABEL;
use trainer::{Batch, LayerMajor, Levers, StepOutcome, StepPlan, Trainer, TrainerOptions};

use self::device::device;
use self::golden::micro_batches_of;

fn goldens(case: &str) -> PathBuf {
    golden::path("encoders").join(case)
}

fn golden(case: &str) -> Value {
    golden::read(&format!("encoders/{case}/golden.json"))
}

fn ids(lists: &Value) -> Vec<Vec<u32>> {
    let id = |value: &Value| value.as_u64().unwrap() as u32;
    lists.as_array().unwrap().iter().map(|ids| ids.as_array().unwrap().iter().map(id).collect()).collect()
}

#[test]
fn vectors_are_those_of_transformers_encoder_whatever_is_padded() {
    ["encoder", "gemma_encoder"].into_iter().for_each(vectors_are_those_of);
}

#[track_caller]
fn vectors_are_those_of(case: &str) {
    let (golden, model) = (golden(case), T5::load(&goldens(case), DType::F32, &device()).unwrap());
    assert_eq!(model.config().head, Head::Encoder);
    assert!(model.parameters().iter().all(|p| !p.name.contains("decoder") && !p.name.starts_with("lm_head")));
    let sources = ids(&golden["sources"]);
    for (name, pooling) in
        [("mean", Pooling::Mean), ("cls", Pooling::Cls), ("max", Pooling::Max), ("last", Pooling::Last)]
    {
        let expected: Vec<f64> = golden["vectors"][name]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|vector| vector.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()))
            .collect();
        for together in [1, 3, sources.len()] {
            let of = |sources: &[Vec<u32>]| {
                let sources: Vec<&[u32]> = sources.iter().map(Vec::as_slice).collect();
                model.vectors(&sources, pooling, false, DType::F32, &|| ()).unwrap()
            };
            let got: Vec<f32> = sources.chunks(together).flat_map(of).collect();
            assert_eq!(got.len(), expected.len());
            for (got, expected) in got.iter().zip(&expected) {
                assert!((f64::from(*got) - expected).abs() < 1e-5, "{name}, {together}: {got}, expected {expected}");
            }
        }
        let sources: Vec<&[u32]> = sources.iter().map(Vec::as_slice).collect();
        for vector in model.vectors(&sources, pooling, true, DType::F32, &|| ()).unwrap().chunks(16) {
            assert!((vector.iter().map(|value| value * value).sum::<f32>() - 1.0).abs() < 1e-5);
        }
    }
}

/// The labels of a step, as the trainer takes them.
fn labels(lists: &Value, is_number: bool) -> Vec<Vec<u32>> {
    let label = |value: &Value| match value.as_f64() {
        #[expect(clippy::cast_possible_truncation, reason = "quarters")]
        Some(number) if is_number => (number as f32).to_bits(),
        Some(number) => number as u32,
        None => IGNORED_LABEL,
    };
    lists.as_array().unwrap().iter().map(|labels| labels.as_array().unwrap().iter().map(label).collect()).collect()
}

/// The classifier of a case. One that ends with `_adapter` is the classifier of that name with an adapter of PEFT.
fn classifier(case: &str) -> T5 {
    let base = case.trim_end_matches("_adapter");
    let model = T5::load(&goldens(base), DType::F32, &device()).unwrap();
    if base == case {
        return model;
    }
    let adapter = AdapterDirectory::open(&goldens(case).join("start"), model.config()).unwrap();
    let lora = adapter.lora(model.config());
    let model = model.with_adapter(lora, 1).unwrap();
    adapter.fill(model.parameters()).unwrap();
    model
}

/// Trains the steps of a case, each as `levers` says.
fn train(case: &str, levers: impl Fn(usize) -> Levers) -> Trainer {
    let golden = golden(case);
    let mut trainer = Trainer::new(classifier(case), golden::options(&golden)).unwrap();
    train_steps(case, &mut trainer, &golden["steps"], levers);
    trainer
}

fn train_steps(case: &str, trainer: &mut Trainer, steps: &Value, levers: impl Fn(usize) -> Levers) {
    for (i, step) in steps.as_array().unwrap().iter().enumerate() {
        let (sources, targets) = (ids(&step["sources"]), labels(&step["labels"], case == "regression"));
        let plan = StepPlan { levers: levers(i), longest: None };
        let outcome = trainer.step(&Batch { sources: &sources, targets: &targets }, &plan, &|| false).unwrap();
        let StepOutcome::Done(stats) = outcome else { panic!("{case}, step {i}: {outcome:?}") };
        let values = [("loss", stats.objective.unwrap_or(stats.loss), 1e-5), ("grad_norm", stats.grad_norm, 1e-4)];
        golden::check(&format!("{case}, step {}", i + 1), step, 1e-3, &values);
    }
}

#[test]
fn weights_of_classes_are_those_of_torchs_losses_however_a_batch_is_cut() {
    let weighted: Value = serde_json::from_slice(&std::fs::read(goldens("weighted.json")).unwrap()).unwrap();
    for (case, of) in weighted["cases"].as_object().unwrap() {
        let weights: Vec<f64> =
            of["weights"].as_array().unwrap().iter().map(|weight| weight.as_f64().unwrap()).collect();
        for samples in [1, 2, 5] {
            let options = TrainerOptions { class_weights: weights.clone(), ..golden::options(&weighted) };
            let mut trainer = Trainer::new(classifier(case), options).unwrap();
            train_steps(case, &mut trainer, &of["steps"], |_| micro_batches_of(samples));
        }
        let other = TrainerOptions { class_weights: vec![1.0; 9], ..TrainerOptions::default() };
        let error = Trainer::new(classifier(case), other).err().expect("nine classes").to_string();
        assert!(error.contains("task.class_weights"), "{error}");
    }
}

#[test]
fn adapters_beside_classifiers_train_and_are_saved_as_in_peft() {
    for case in ["sequence_adapter", "tokens_adapter"] {
        let trainer = train(case, |i| Levers { recompute_blocks: i % 3, ..micro_batches_of(1 + i % 5) });
        let (model, directory) = (trainer.model(), tempfile::tempdir().unwrap());
        model
            .save_adapter_with(directory.path(), |name, write| {
                write(&mut std::fs::File::create(directory.path().join(name)).unwrap())
            })
            .unwrap();
        let files = [directory.path(), &goldens(case).join("final")].map(|of| of.join("adapter_model.safetensors"));
        let [got, expected] = files.map(|file| Reader::open(&file).unwrap());
        let sorted = |file: &Reader| {
            let mut names = file.names();
            names.sort();
            names
        };
        assert_eq!(sorted(&got), sorted(&expected));
        assert!(got.names().iter().any(|name| name.starts_with("base_model.model.classif")));
        for name in got.names() {
            // The host alone: that is where values are compared.
            let values = |file: &Reader| file.read(&name, DType::F32, &Device::Cpu).unwrap().flatten_all().unwrap();
            let difference = (values(&got) - values(&expected)).unwrap().abs().unwrap().max(0).unwrap();
            let difference = difference.to_scalar::<f32>().unwrap();
            assert!(difference < 2e-5, "{case}, {name}: {difference}");
        }
        // A whole T5 below it takes the classifier from the adapter, with its labels.
        let whole = model.config().clone();
        let bare = t5::Config { head: Head::Language, lora: None, ..whole.clone() };
        let below = AdapterDirectory::model_below(directory.path(), &bare).unwrap();
        assert_eq!(below.head, whole.head, "{case}");
        let error = AdapterDirectory::open(directory.path(), &bare).unwrap_err().to_string();
        assert!(error.contains("an adapter of a T5For"), "{error}");
        let encoder = bare.with_head(Head::Encoder).unwrap();
        let of_encoder = AdapterDirectory::open(directory.path(), &encoder).unwrap().beside(&encoder).unwrap();
        assert!(t5::ParameterSpec::all(&of_encoder).iter().any(t5::ParameterSpec::is_of_adapter));
    }
}

const CASES: [&str; 8] = [
    "sequence",
    "label_sets",
    "regression",
    "tokens",
    "gemma_sequence",
    "gemma_tokens",
    "gemma2_sequence",
    "gemma2_tokens",
];

#[test]
fn eight_steps_of_classifiers_are_those_of_transformers_however_they_are_cut() {
    // AdamW turns the rounding of a gradient near zero, which a card sums in another order, into a part of the learning rate.
    let most = if device().is_cpu() { 2e-5 } else { 5e-4 };
    for case in CASES {
        let trainer = train(case, |i| Levers { recompute_blocks: i % 4, ..micro_batches_of(1 + i % 5) });
        let tensors = Reader::open(&goldens(case).join("golden.safetensors")).unwrap();
        for parameter in trainer.model().parameters() {
            let is_as_here = parameter.name.starts_with("classif") || case.starts_with("gemma");
            let name = if is_as_here { parameter.name.clone() } else { format!("transformer.{}", parameter.name) };
            // The host alone: that is where values are compared.
            let expected = tensors.read(&format!("final.{name}"), DType::F32, &Device::Cpu).unwrap();
            // The host alone: as above.
            let got = parameter.tensor.to_device(&Device::Cpu).unwrap();
            let difference = (&got - &expected).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap();
            let difference = difference.to_scalar::<f32>().unwrap();
            assert!(difference < most, "{case}, {name}: {difference}");
        }
    }
}

#[test]
fn layer_by_layer_and_with_files_the_steps_are_the_same() {
    let files = LayerMajor { boundaries_on_disk: true, gradients_on_disk: true, ..LayerMajor::default() };
    for case in CASES {
        train(case, |_| Levers { layer_major: Some(LayerMajor::default()), ..micro_batches_of(2) });
        train(case, |_| Levers { layer_major: Some(files), ..micro_batches_of(2) });
    }
}

#[test]
fn a_saved_classifier_has_transformers_names_and_loads_to_the_same_bits() {
    for case in CASES {
        let (directory, model) =
            (tempfile::tempdir().unwrap(), T5::load(&goldens(case), DType::F32, &device()).unwrap());
        model.save(directory.path()).unwrap();
        let names = |path: &Path| {
            let mut names = Reader::open(&path.join("model.safetensors")).unwrap().names();
            names.sort();
            names
        };
        assert_eq!(names(directory.path()), names(&goldens(case)), "{case}");
        let config = |path: &Path| -> Value {
            serde_json::from_slice(&std::fs::read(path.join("config.json")).unwrap()).unwrap()
        };
        let (ours, theirs) = (config(directory.path()), config(&goldens(case)));
        for key in ["architectures", "id2label", "label2id", "is_encoder_decoder", "num_decoder_layers"] {
            assert_eq!(ours[key], theirs[key], "{case}, {key}");
        }
        let back = T5::load(directory.path(), DType::F32, &device()).unwrap();
        assert_eq!(back.config().head, model.config().head);
        for (one, other) in model.parameters().iter().zip(back.parameters()) {
            let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(values(&one.tensor), values(&other.tensor), "{case}, {}", one.name);
        }
    }
}

#[test]
fn a_model_gives_its_stacks_to_another_head() {
    let labels = Labels::named(["a", "b", "c", "d"].map(String::from).to_vec());
    for (from, to) in [
        ("sequence", Head::Encoder),
        ("sequence", Head::Tokens(labels.clone())),
        ("encoder", Head::Tokens(labels.clone())),
    ] {
        let model = |seed| {
            let path = goldens(from);
            let directory = ModelDirectory { path: &path, head: Some(&to), seed };
            T5::load(directory, DType::F32, &device()).unwrap()
        };
        let (one, other) = (model(1), model(2));
        for (one, other) in one.parameters().iter().zip(other.parameters()) {
            assert!(!one.name.starts_with("decoder"), "{}", one.name);
            let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let is_new = one.name == "classifier.weight";
            assert_eq!(values(&one.tensor) != values(&other.tensor), is_new, "{}", one.name);
        }
    }
    let path = goldens("encoder");
    let directory = ModelDirectory { path: &path, head: Some(&Head::Sequence(labels)), seed: 0 };
    let error = T5::load(directory, DType::F32, &device()).unwrap_err().to_string();
    assert!(error.contains("T5EncoderModel") && error.contains("a model with a decoder"), "{error}");
}
