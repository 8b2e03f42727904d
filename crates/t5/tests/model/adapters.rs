//! Adapters in PEFT's directories, compared with PEFT's own results (`scripts/golden_cases/adapters.py` defines the cases).

use std::fs::File;
use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use serde_json::{Value, json};
use t5::peft::{AdapterConfig, AdapterDirectory};
use t5::safetensors::{Reader, write};
use t5::{Config, Error, MergedAdapter, T5, merge_adapter_with};

use crate::support::*;

const CASES: [&str; 11] = [
    "q_v",
    "all_linear",
    "rslora",
    "dora",
    "patterns",
    "regex_dora_rslora",
    "layers",
    "head",
    "head_tied",
    "head_saved",
    "head_saved_tied",
];

fn adapters() -> PathBuf {
    goldens().join("adapters")
}

fn base(case: &str) -> PathBuf {
    let golden: Value =
        serde_json::from_slice(&std::fs::read(adapters().join(case).join("golden.json")).unwrap()).unwrap();
    adapters().join("bases").join(golden["base"].as_str().unwrap())
}

fn model(directory: &Path) -> Config {
    T5::load(directory, DType::F32, &device()).unwrap().config().clone()
}

fn merge(base: &Path, adapter: &Path, dtype: Option<DType>, target: &Path) -> Result<MergedAdapter, Error> {
    std::fs::create_dir_all(target).unwrap();
    merge_adapter_with(base, adapter, dtype, target, |name, write| write(&mut File::create(target.join(name)).unwrap()))
}

fn copy(from: &Path) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, directory.path().join(path.file_name().unwrap())).unwrap();
    }
    directory
}

#[test]
fn adapters_of_peft_are_read_and_merged_as_peft_does_it() {
    for case in CASES {
        let (base, adapter) = (base(case), adapters().join(case).join("final"));
        let target = tempfile::tempdir().unwrap();
        let merged = merge(&base, &adapter, None, target.path()).unwrap_or_else(|error| panic!("{case}: {error}"));
        let expected = Reader::open(&adapters().join(case).join("merged.safetensors")).unwrap();
        let got = Reader::open(&target.path().join("model.safetensors")).unwrap();
        let before = Reader::open(&base.join("model.safetensors")).unwrap();
        let read = |file: &Reader, name: &str| file.read(name, DType::F32, &device()).unwrap();
        let mut changed = 0;
        for name in got.names() {
            if expected.shape(&name).is_some() {
                let distance = distance(&read(&got, &name), &read(&expected, &name));
                assert!(distance < 1e-6, "{case}: {name}: {distance:e}");
                changed += 1;
            } else {
                assert_eq!(values(&read(&got, &name)), values(&read(&before, &name)), "{case}: {name}");
            }
        }
        assert_eq!(changed, expected.names().len(), "{case}");
        assert_eq!(merged.linears + merged.replaced, changed, "{case}");
        let parts_head = ["head_tied", "head_saved_tied"].contains(&case);
        assert_eq!(merged.parts_head, parts_head, "{case}");
        let loaded = T5::load(target.path(), DType::F32, &device()).unwrap();
        assert_eq!(loaded.config().tie_word_embeddings, model(&base).tie_word_embeddings && !parts_head, "{case}");
        assert_eq!(loaded.config().scale_decoder_outputs, model(&base).scale_decoder_outputs, "{case}");
    }
}

#[test]
fn weights_are_merged_into_the_dtype_that_is_asked_for() {
    let (base, adapter) = (base("dora"), adapters().join("dora/final"));
    let [wide, narrow] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    merge(&base, &adapter, None, wide.path()).unwrap();
    for (dtype, word) in [(DType::BF16, "bfloat16"), (DType::F16, "float16")] {
        merge(&base, &adapter, Some(dtype), narrow.path()).unwrap();
        let config: Value = serde_json::from_slice(&std::fs::read(narrow.path().join("config.json")).unwrap()).unwrap();
        assert_eq!(config["dtype"], word);
        let [wide, narrow] = [&wide, &narrow].map(|at| Reader::open(&at.path().join("model.safetensors")).unwrap());
        for name in wide.names() {
            let exact = wide.read(&name, DType::F32, &device()).unwrap();
            let rounded = if exact.rank() == 1 { exact } else { exact.to_dtype(dtype).unwrap() };
            assert_eq!(values(&narrow.read(&name, DType::F32, &device()).unwrap()), values(&rounded), "{name}");
        }
    }
    // Again from the bf16 one: each weight keeps its dtype.
    let again = tempfile::tempdir().unwrap();
    merge(narrow.path(), &adapter, None, again.path()).unwrap();
    let length = |at: &tempfile::TempDir| std::fs::metadata(at.path().join("model.safetensors")).unwrap().len();
    assert_eq!(length(&again), length(&narrow));
}

#[test]
fn an_adapter_without_safetensors_is_read_alike() {
    let config = model(&base("q_v"));
    let [one, other] =
        ["q_v/final", "unusual/bin"].map(|at| AdapterDirectory::open(&adapters().join(at), &config).unwrap());
    assert_eq!(one.layout(), other.layout());
    for linear in &one.layout().linears {
        for (name, _) in linear.tensors(false) {
            let read = |file: &AdapterDirectory| values(&file.read(&name, DType::F32, &device()).unwrap());
            assert_eq!(read(&one), read(&other), "{name}");
        }
    }
}

/// The layout of q_v's settings with some keys changed.
fn layout_with(changes: Value) -> Result<Vec<(String, usize, f64)>, Error> {
    let directory = copy(&adapters().join("q_v/final"));
    let file = directory.path().join("adapter_config.json");
    let mut settings: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        settings[key] = value.clone();
    }
    std::fs::write(&file, settings.to_string()).unwrap();
    let layout = AdapterConfig::read(directory.path())?.layout(&model(&base("q_v")))?;
    Ok(layout.linears.into_iter().map(|linear| (linear.name, linear.rank, linear.scale)).collect())
}

#[test]
fn settings_that_change_nothing_are_passed_over_and_others_are_refused_by_name() {
    let plain = layout_with(json!({})).unwrap();
    for changes in [
        json!({"a_key_of_tomorrow": null, "another": false, "more": {}, "list": [], "text": ""}),
        json!({"init_lora_weights": false, "peft_version": "0.3.0", "revision": "main", "task_type": null}),
        json!({"init_lora_weights": "gaussian", "qalora_group_size": 32, "inference_mode": false, "auto_mapping": {"a": 1}}),
        json!({"target_modules": null, "exclude_modules": []}),
        json!({"bias": "all"}),
        json!({"bias": "lora_only"}),
        json!({"target_modules": ".*\\.(q|v)"}),
        json!({"target_modules": "(?!lm_head).*\\.[qv]$", "ensure_weight_tying": true}),
    ] {
        assert_eq!(layout_with(changes.clone()).unwrap(), plain, "{changes}");
    }
    for (key, value, got) in [
        ("a_key_of_tomorrow", json!(true), "true"),
        ("a_key_of_tomorrow", json!(0), "0"),
        ("peft_type", json!("LOHA"), "\"LOHA\""),
        ("peft_type", json!(null), "null"),
        ("task_type", json!("CAUSAL_LM"), "\"CAUSAL_LM\""),
        ("bias", json!("some"), "\"some\""),
        ("fan_in_fan_out", json!(true), "true"),
        ("lora_bias", json!(true), "true"),
        ("r", json!(0), "0"),
        ("r", json!(1e9), "1000000000.0"),
        ("lora_alpha", json!("8"), "\"8\""),
        ("lora_dropout", json!(1.0), "1.0"),
        ("use_dora", json!("yes"), "\"yes\""),
        ("init_lora_weights", json!("pissa_niter_16"), "\"pissa_niter_16\""),
        ("init_lora_weights", json!("of tomorrow"), "\"of tomorrow\""),
        ("trainable_token_indices", json!([1]), "[1]"),
        ("target_parameters", json!(["x"]), "[\"x\"]"),
        ("layer_replication", json!([[0, 1]]), "[[0,1]]"),
        ("rank_pattern", json!({"q": 0}), "{\"q\":0}"),
        ("rank_pattern", json!({"(": 2}), "the pattern `(`"),
        ("target_modules", json!(["nothing"]), "a choice without any layer"),
        ("target_modules", json!(["shared"]), "a choice that has the embedding `shared`"),
        ("target_modules", json!(".*relative_attention_bias"), "a choice that has the embedding"),
        ("target_modules", json!("("), "the pattern `(`"),
        ("target_modules", json!(7), "7"),
        ("layers_to_transform", json!("x"), "\"x\""),
        ("modules_to_save", json!(["shared"]), "a list with the shared table"),
        ("modules_to_save", json!(["nothing"]), "a list with `nothing`"),
    ] {
        let error = layout_with(json!({ key: value })).unwrap_err();
        let Error::AdapterConfig { key: at, got: found, .. } = &error else { panic!("{key}: {error}") };
        assert!(at == key && found.starts_with(got), "{key}: {error}");
        assert!(error.to_string().contains("adapter_config.json: `") && error.hint().is_some(), "{error}");
    }
}

#[test]
fn the_first_pattern_in_the_file_decides() {
    let q = |changes: Value| {
        layout_with(changes).unwrap().into_iter().find(|(name, ..)| name.ends_with("SelfAttention.q")).unwrap()
    };
    let [one, other] =
        [r#"{"rank_pattern": {"SelfAttention.q": 2, "q": 3}}"#, r#"{"rank_pattern": {"q": 3, "SelfAttention.q": 2}}"#];
    assert_eq!(q(serde_json::from_str(one).unwrap()).1, 2);
    assert_eq!(q(serde_json::from_str(other).unwrap()).1, 3);
    let (_, rank, scale) = q(json!({"r": 4, "lora_alpha": 6, "use_rslora": true, "alpha_pattern": {".*q": 10}}));
    assert!(rank == 4 && (scale - 5.0).abs() < 1e-12, "{rank} {scale}");
    // An index that no layer has does not affect layers that are named in full.
    let whole = "encoder.block.0.layer.0.SelfAttention.q";
    let named = layout_with(json!({"target_modules": [whole, "v"], "layers_to_transform": 9})).unwrap();
    assert_eq!(named.iter().map(|(name, ..)| name.as_str()).collect::<Vec<_>>(), [whole]);
}

type Tensors = Vec<(String, Tensor)>;
type Change<'a> = &'a dyn Fn(&mut Tensors);

#[test]
fn tensors_that_do_not_belong_to_the_settings_and_the_model_are_refused_by_name() {
    const A: &str = "base_model.model.encoder.block.0.layer.0.SelfAttention.q.lora_A.weight";
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &device()).unwrap();
    let config = model(&base("q_v"));
    let changed = |change: &dyn Fn(&mut Tensors)| {
        let directory = copy(&adapters().join("q_v/final"));
        let file = directory.path().join("adapter_model.safetensors");
        let reader = Reader::open(&file).unwrap();
        let read = |name: String| (name.clone(), reader.read(&name, DType::F32, &device()).unwrap());
        let mut tensors: Tensors = reader.names().into_iter().map(read).collect();
        change(&mut tensors);
        let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        write(&file, &tensors, &[("format", "pt")]).unwrap();
        AdapterDirectory::open(directory.path(), &config).map(drop)
    };
    changed(&|_| {}).unwrap();
    changed(&|tensors| tensors.iter_mut().for_each(|(_, tensor)| *tensor = tensor.to_dtype(DType::BF16).unwrap()))
        .unwrap();
    let set =
        |tensors: &mut Tensors, tensor: Tensor| tensors.iter_mut().find(|(name, _)| name == A).unwrap().1 = tensor;
    let cases: [(Change, &str, &str); 5] = [
        (&|tensors| tensors.retain(|(name, _)| name != A), A, "got no such tensor"),
        (&|tensors| set(tensors, zeros(&[7, 16], DType::F32)), A, "expected shape [8, 16], got shape [7, 16]"),
        (&|tensors| set(tensors, zeros(&[8, 16], DType::U32)), A, "expected values in F32"),
        (&|tensors| tensors.push(("lora.extra".into(), zeros(&[1], DType::F32))), "lora.extra", "no such tensor"),
        (
            &|tensors| {
                tensors.push(("base_model.model.lm_head.base_layer.weight".into(), zeros(&[47, 16], DType::F32)))
            },
            "base_model.model.lm_head.base_layer.weight",
            "no such tensor",
        ),
    ];
    for (change, name, words) in cases {
        let error = changed(change).unwrap_err();
        assert!(matches!(&error, Error::AdapterTensor { tensor, .. } if tensor == name), "{error}");
        assert!(
            error.to_string().contains("adapter_model.safetensors") && error.to_string().contains(words),
            "{error}"
        );
    }
    let error = AdapterDirectory::open(&base("q_v"), &config).unwrap_err();
    assert_eq!(error.hint().as_deref(), Some("this is a model, not an adapter"));
}

#[test]
fn a_head_of_another_model_below_the_adapter_is_refused() {
    let adapter = adapters().join("head/final");
    let other = copy(&base("head"));
    let file = other.path().join("model.safetensors");
    let reader = Reader::open(&file).unwrap();
    let read = |name: String| {
        let tensor = reader.read(&name, DType::F32, &device()).unwrap();
        let changed = if name == "lm_head.weight" { (tensor * 1.001).unwrap() } else { tensor };
        (name, changed)
    };
    let tensors: Tensors = reader.names().into_iter().map(read).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    write(&file, &tensors, &[("format", "pt")]).unwrap();
    let error = merge(other.path(), &adapter, None, &other.path().join("merged")).unwrap_err();
    assert!(error.to_string().contains("lm_head.base_layer.weight"), "{error}");
}
