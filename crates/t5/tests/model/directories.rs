//! Hugging Face directories: written models are loaded again, and errors name the problem.

use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use serde_json::{Value, json};
use t5::safetensors::{Reader, write};
use t5::{Config, Error, Family, T5};

use crate::support::*;

type Tensors = Vec<(String, Tensor)>;

fn copy(from: &Path) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, directory.path().join(path.file_name().unwrap())).unwrap();
    }
    directory
}

fn load(directory: &Path) -> Result<T5, Error> {
    T5::load(directory, DType::F32, &device())
}

/// Writes the weights again, after `change` changed them.
fn rewrite(directory: &Path, change: impl Fn(&mut Tensors)) {
    let file = directory.join("model.safetensors");
    let reader = Reader::open(&file).unwrap();
    let read = |name: String| {
        let tensor = reader.read(&name, DType::F32, &device()).unwrap();
        (name, tensor)
    };
    let mut tensors: Tensors = reader.names().into_iter().map(read).collect();
    change(&mut tensors);
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    write(&file, &tensors, &[("format", "pt")]).unwrap();
}

fn edit_config(directory: &Path, change: impl Fn(&mut Value)) {
    let file = directory.join("config.json");
    let mut json = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    change(&mut json);
    std::fs::write(&file, json.to_string()).unwrap();
}

fn all_values(model: &T5) -> Vec<(String, Vec<f64>)> {
    model.parameters().iter().map(|p| (p.name.clone(), values(&p.tensor))).collect()
}

#[test]
fn what_is_saved_is_loaded_bit_by_bit_and_saved_again_to_the_same_bytes() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for name in ["v1_0_relu_tied", "v1_1_gated_gelu_untied", "odd_shapes_untied", "gated_silu_tied_unscaled"] {
        let (original, ..) = case(name);
        let model = load(&original).unwrap();
        model.save(one.path()).unwrap();
        let again = load(one.path()).unwrap();
        assert_eq!(all_values(&model), all_values(&again), "{name}");
        assert_eq!(again.config().tie_word_embeddings, model.config().tie_word_embeddings, "{name}");
        assert_eq!(again.config().logit_scale(), model.config().logit_scale(), "{name}");
        again.save(two.path()).unwrap();
        for file in ["config.json", "generation_config.json", "model.safetensors"] {
            let bytes = |directory: &tempfile::TempDir| std::fs::read(directory.path().join(file)).unwrap();
            assert_eq!(bytes(&one), bytes(&two), "{name}: {file}");
        }
    }
}

#[test]
fn a_tied_head_without_scale_is_written_so_that_every_transformers_reads_it() {
    let directory = tempfile::tempdir().unwrap();
    let (original, ..) = case("gated_silu_tied_unscaled");
    load(&original).unwrap().save(directory.path()).unwrap();
    let json: Value = serde_json::from_slice(&std::fs::read(directory.path().join("config.json")).unwrap()).unwrap();
    assert_eq!(json["tie_word_embeddings"], false); // and so, in either version, no scale
    assert_ne!(json["scale_decoder_outputs"], true);
    let names = Reader::open(&directory.path().join("model.safetensors")).unwrap().names();
    assert!(names.iter().any(|name| name == "lm_head.weight"));
    let model = load(directory.path()).unwrap();
    assert!(model.config().tie_word_embeddings && !model.config().scale_decoder_outputs);
}

#[test]
fn a_model_of_any_dtype_is_saved_in_its_own_and_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let (original, ..) = case("v1_0_relu_tied");
    for (dtype, stored) in [(DType::BF16, "bfloat16"), (DType::F32, "float32"), (DType::F64, "float32")] {
        let model = T5::load(&original, dtype, &device()).unwrap();
        // The vectors of a bf16 model are f32.
        let vectors = if dtype == DType::BF16 { DType::F32 } else { dtype };
        let is_its_own = |p: &t5::Parameter| p.tensor.dtype() == if p.tensor.rank() == 1 { vectors } else { dtype };
        assert!(model.parameters().iter().all(is_its_own));
        model.save(directory.path()).unwrap();
        let json: Value =
            serde_json::from_slice(&std::fs::read(directory.path().join("config.json")).unwrap()).unwrap();
        assert_eq!(json["dtype"], stored);
        let back = T5::load(directory.path(), dtype, &device()).unwrap();
        assert_eq!(all_values(&model), all_values(&back));
    }
}

#[test]
fn shards_hold_the_same_model_as_one_file() {
    let (sharded, ..) = case("sharded");
    let (whole, ..) = case("v1_1_gated_gelu_untied");
    assert_eq!(all_values(&load(&sharded).unwrap()), all_values(&load(&whole).unwrap()));
}

#[test]
fn the_shared_table_is_found_under_any_of_its_names() {
    let (original, ..) = case("v1_0_relu_tied");
    let expected = all_values(&load(&original).unwrap());
    for name in ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"] {
        let directory = copy(&original);
        rewrite(directory.path(), |tensors| {
            tensors.iter_mut().find(|(other, _)| other == "shared.weight").unwrap().0 = name.into();
        });
        let model = load(directory.path()).unwrap();
        assert_eq!(all_values(&model), expected, "{name}");
        assert!(model.config().tie_word_embeddings);
    }
}

#[test]
fn wrong_weights_are_refused_by_file_and_tensor() {
    let (original, ..) = case("v1_0_relu_tied");
    let check = |expected: &str, change: &dyn Fn(&mut Tensors)| {
        let directory = copy(&original);
        rewrite(directory.path(), change);
        let error = load(directory.path()).unwrap_err();
        assert!(error.hint().is_some());
        let error = error.to_string();
        let error = error.strip_prefix(&format!("{}", directory.path().display())).unwrap();
        assert_eq!(error, expected);
    };
    check(": tensor `encoder.final_layer_norm.weight` is missing, expected shape [24]", &|tensors| {
        tensors.retain(|(name, _)| name != "encoder.final_layer_norm.weight");
    });
    check(": tensor `shared.weight` is missing, expected shape [67, 24]", &|tensors| {
        tensors.retain(|(name, _)| name != "shared.weight");
    });
    check(
        "/model.safetensors: tensor `encoder.block.9.layer.0.layer_norm.weight` has no place in this model",
        &|tensors| {
            tensors.push(("encoder.block.9.layer.0.layer_norm.weight".into(), tensors[0].1.clone()));
        },
    );
    check(
        "/model.safetensors: tensor `encoder.final_layer_norm.weight`: expected shape [24], got shape [1, 24]",
        &|tensors| {
            let norm = tensors.iter_mut().find(|(name, _)| name == "encoder.final_layer_norm.weight").unwrap();
            norm.1 = norm.1.unsqueeze(0).unwrap();
        },
    );
    check(
        "/model.safetensors: tensor `encoder.embed_tokens.weight`: expected the same values as `shared.weight`, \
         got others (T5 has one embedding table)",
        &|tensors| {
            let shared = &tensors.iter().find(|(name, _)| name == "shared.weight").unwrap().1;
            let other = (shared * 2.0).unwrap();
            tensors.push(("encoder.embed_tokens.weight".into(), other));
        },
    );
    check(
        "/model.safetensors: tensor `encoder.final_layer_norm.weight`: expected values for F32, got U32",
        &|tensors| {
            let norm = tensors.iter_mut().find(|(name, _)| name == "encoder.final_layer_norm.weight").unwrap();
            norm.1 = Tensor::zeros(24, DType::U32, &device()).unwrap();
        },
    );
}

#[test]
fn wrong_directories_are_refused() {
    let (original, ..) = case("sharded");
    let check = |expected: &str, change: &dyn Fn(&Path)| {
        let directory = copy(&original);
        change(directory.path());
        let error = load(directory.path()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{}", directory.path().display())), "{error}");
        assert!(error.contains(expected), "expected `{expected}`, got `{error}`");
    };
    let index = |directory: &Path, change: &dyn Fn(&mut Value)| {
        let file = directory.join("model.safetensors.index.json");
        let mut json = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        change(&mut json);
        std::fs::write(&file, json.to_string()).unwrap();
    };
    let shard = |number: usize| format!("model-0000{number}-of-00006.safetensors");
    check("config.json: No such file", &|d| std::fs::remove_file(d.join("config.json")).unwrap());
    check("config.json: ", &|d| std::fs::write(d.join("config.json"), "{\"d_model\": ").unwrap());
    check("config.json: expected a JSON object", &|d| std::fs::write(d.join("config.json"), "[]").unwrap());
    // Valid JSON, but longer than any T5's: parsed, it takes 50 times as much.
    let lengthen = |directory: &Path, file: &str, to: usize| {
        let mut text = std::fs::read(directory.join(file)).unwrap();
        text.resize(to, b' ');
        std::fs::write(directory.join(file), text).unwrap();
    };
    check("config.json: expected at most 262144 bytes", &|d| lengthen(d, "config.json", 262_145));
    check("model.safetensors.index.json: expected at most 1048576 bytes", &|d| {
        lengthen(d, "model.safetensors.index.json", 1_048_577);
    });
    check("has no weights: expected model.safetensors or pytorch_model.bin", &|d| {
        std::fs::remove_file(d.join("model.safetensors.index.json")).unwrap()
    });
    check("expected an object `weight_map`", &|d| index(d, &|json| json["weight_map"] = json!([1])));
    check("expected the name of a file in the same directory", &|d| {
        index(d, &|json| json["weight_map"]["shared.weight"] = "../model.safetensors".into());
    });
    check("expected the name of a file in the same directory", &|d| {
        index(d, &|json| json["weight_map"]["shared.weight"] = "/etc/passwd".into());
    });
    check("expected the name of a file in the same directory", &|d| {
        index(d, &|json| json["weight_map"]["shared.weight"] = 3.into());
    });
    check("00002-of-00006.safetensors: no such file, though model.safetensors.index.json names it", &|d| {
        std::fs::remove_file(d.join(shard(2))).unwrap()
    });
    check("though the index says so", &|d| {
        index(d, &|json| json["weight_map"]["shared.weight"] = shard(1).into());
    });
    check("not a usable safetensors file", &|d| {
        let bytes = std::fs::read(d.join(shard(3))).unwrap();
        std::fs::write(d.join(shard(3)), &bytes[..bytes.len() - 1]).unwrap();
    });
}

#[test]
fn impossible_configs_are_refused_by_key() {
    let check = |key: &str, value: Value, expected: &str| {
        let mut json = Config::preset("tiny").unwrap().to_json();
        json[key] = value;
        let error = Config::from_json(&json.to_string(), "model/config.json").unwrap_err();
        assert_eq!(error.to_string(), format!("model/config.json: `{key}` is {expected}"));
        assert_eq!(error.hint().unwrap(), format!("set `{key}` in the model's config.json"));
    };
    check("d_model", json!(0), "`0`, expected a number from 1 to 16777216");
    check("d_model", json!(-4), "`-4`, expected a whole number");
    check("d_model", json!("512"), "`\"512\"`, expected a whole number");
    check("d_ff", json!(1u64 << 60), &format!("`{}`, expected a number from 1 to 16777216", 1u64 << 60));
    check("num_layers", json!(1_000_000), "`1000000`, expected a number from 1 to 128");
    check("d_kv", json!(1 << 24), "`16777216`, expected num_heads x d_kv of at most 16777216");
    check("dropout_rate", json!(1.0), "`1`, expected a number from 0 to below 1");
    check("layer_norm_epsilon", json!(0), "`0`, expected a number between 0 and 1");
    check("feed_forward_proj", json!("gated-gelu-tanh"), "`\"gated-gelu-tanh\"`, expected `{ACT}` or `gated-{ACT}`");
    check("dense_act_fn", json!("mish"), "`mish`, expected one of relu, gelu, gelu_new, silu");
    check("relative_attention_num_buckets", json!(3), "`3`, expected a number from 4 to 65536");
    check(
        "relative_attention_max_distance",
        json!(16),
        "`16`, expected more than half of relative_attention_num_buckets (32)",
    );
    check("eos_token_id", json!(4096), "`4096`, expected a token id below vocab_size (4096)");
    check("pad_token_id", json!(-1), "`-1`, expected a token id");
    check("tie_word_embeddings", json!("yes"), "`\"yes\"`, expected true or false");
}

#[test]
fn a_model_of_another_family_is_refused_by_its_name_and_nobody_is_told_to_rename_it() {
    let check = |config: Value, name: &str| {
        let error = Config::from_json(&config.to_string(), "config.json").unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "config.json: the model is `{name}`, expected one of the T5 family (`model_type` t5, mt5, umt5, t5gemma or t5gemma2)"
            )
        );
        assert!(!error.hint().unwrap().contains("set "));
    };
    for name in ["bart", "longt5", "switch_transformers", "t5gemma3", "pegasus"] {
        check(json!({ "model_type": name }), name);
    }
    check(json!({ "architectures": ["BartForConditionalGeneration"] }), "BartForConditionalGeneration");
    check(json!({ "architectures": ["T5Gemma3ForConditionalGeneration"] }), "T5Gemma3ForConditionalGeneration");
    for (config, family) in [
        (json!({}), Family::T5),
        (json!({ "architectures": ["T5WithLMHeadModel"] }), Family::T5),
        (json!({ "architectures": ["UMT5ForConditionalGeneration"] }), Family::Umt5),
        (json!({ "model_type": "mt5", "architectures": ["T5ForConditionalGeneration"] }), Family::Mt5),
    ] {
        let config = Config::from_json(&config.to_string(), "config.json").unwrap();
        let written = config.to_json();
        assert_eq!((config.family, &written["model_type"]), (family, &family.model_type().into()));
        assert_eq!(written["architectures"], json!([t5::Head::Language.architecture(family)]));
    }
}

#[test]
fn what_mt5_and_umt5_leave_out_is_what_transformers_fills_in() {
    for family in [Family::Mt5, Family::Umt5] {
        let config = json!({ "model_type": family.model_type(), "d_model": 768 });
        let config = Config::from_json(&config.to_string(), "config.json").unwrap();
        assert_eq!((config.vocab_size, config.num_layers, config.num_heads, config.d_ff), (250_112, 8, 6, 1024));
        assert_eq!((config.dense_act_fn.as_str(), config.is_gated_act), ("gelu_new", true));
        assert_eq!(config.scale_decoder_outputs, family == Family::Umt5);
    }
}

#[test]
fn files_of_pytorch_are_refused_with_the_command_that_converts_them() {
    let (original, ..) = case("umt5_hub");
    let whole = std::fs::read(original.join("pytorch_model.bin")).unwrap();
    let check = |bytes: &[u8], expected: &str| {
        let directory = copy(&original);
        std::fs::write(directory.path().join("pytorch_model.bin"), bytes).unwrap();
        let error = load(directory.path()).unwrap_err();
        assert!(
            error.to_string().contains(&format!("pytorch_model.bin: not a usable PyTorch file: {expected}")),
            "{error}"
        );
        let hint = error.hint().unwrap();
        assert!(hint.contains("python3 -c") && hint.contains(directory.path().to_str().unwrap()), "{hint}");
    };
    check(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", "it has the format that PyTorch wrote before version 1.6");
    check(b"not a model", "it is no archive of PyTorch's");
    check(&whole[..whole.len() / 2], "it is cut short");
    let without = |name: &[u8]| {
        let mut bytes = whole.clone();
        while let Some(at) = bytes.windows(name.len()).position(|part| part == name) {
            bytes[at] ^= 1;
        }
        bytes
    };
    check(&without(b"data.pkl"), "it is an archive without a `data.pkl`");
    check(&without(b"collections\nOrderedDict"), "its pickle: ");
    check(
        &without(b"torch._utils\n_rebuild_tensor_v2"),
        "its pickle: its entry `shared.weight` is an object that `uorch",
    );
    // Any damage: an error or other weights, never a panic.
    for place in (0..whole.len()).step_by(97) {
        let directory = copy(&original);
        let mut bytes = whole.clone();
        bytes[place] ^= 0x55;
        std::fs::write(directory.path().join("pytorch_model.bin"), bytes).unwrap();
        drop(load(directory.path()));
    }
}

#[test]
fn a_pointer_of_git_lfs_and_an_encoder_alone_are_said_as_what_they_are() {
    let (original, ..) = case("v1_0_relu_tied");
    let directory = copy(&original);
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
    std::fs::write(directory.path().join("model.safetensors"), pointer).unwrap();
    let error = load(directory.path()).unwrap_err();
    assert!(error.to_string().ends_with("model.safetensors: a pointer of Git LFS, not the file itself"), "{error}");
    let directory = copy(&original);
    rewrite(directory.path(), |tensors| tensors.retain(|(name, _)| !name.starts_with("decoder.")));
    let error = load(directory.path()).unwrap_err().to_string();
    assert!(error.ends_with("its weights are those of an encoder, without a decoder"), "{error}");
}

#[test]
fn token_ids_may_live_in_generation_config_alone() {
    let (original, ..) = case("odd_shapes_untied");
    let directory = copy(&original);
    edit_config(directory.path(), |json| {
        json.as_object_mut().unwrap().remove("decoder_start_token_id");
    });
    let generation = json!({ "decoder_start_token_id": 5, "num_beams": 4 });
    std::fs::write(directory.path().join("generation_config.json"), generation.to_string()).unwrap();
    let model = load(directory.path()).unwrap();
    assert_eq!(model.config().decoder_start_token_id, 5);
    let saved: PathBuf = directory.path().join("again");
    model.save(&saved).unwrap();
    let json: Value = serde_json::from_slice(&std::fs::read(saved.join("generation_config.json")).unwrap()).unwrap();
    assert_eq!((&json["decoder_start_token_id"], &json["num_beams"]), (&5.into(), &4.into()));
}

#[test]
fn answers_take_their_tokens_and_settings_from_generation_config_first_and_training_from_config() {
    let (original, ..) = case("odd_shapes_untied");
    let directory = copy(&original);
    let beside = directory.path().join("generation_config.json");
    let of = |generation: Option<Value>, config: &dyn Fn(&mut Value)| {
        edit_config(directory.path(), |json| {
            json["eos_token_id"] = json!(3);
            json["decoder_start_token_id"] = json!(2);
            config(json);
        });
        match generation {
            Some(generation) => std::fs::write(&beside, generation.to_string()).unwrap(),
            None => drop(std::fs::remove_file(&beside)),
        }
        Config::from_file(&directory.path().join("config.json"))
    };
    let same = |_: &mut Value| ();
    // Both files name other tokens.
    let both = of(Some(json!({ "eos_token_id": [4, 5], "decoder_start_token_id": 6 })), &same).unwrap();
    assert_eq!((both.answer_ends(), both.answer_start()), (&[4, 5][..], 6));
    assert_eq!((&both.eos_token_ids[..], both.decoder_start_token_id), (&[3][..], 2));
    let saved = both.generation_json();
    assert_eq!((&saved["eos_token_id"], &saved["decoder_start_token_id"]), (&json!([4, 5]), &json!(6)));
    assert_eq!(both.to_json()["eos_token_id"], json!(3));
    // A setting that the file lacks, or has as null, is that of config.json.
    let one = of(Some(json!({ "eos_token_id": null, "num_beams": 4 })), &|json| json["num_beams"] = json!(2)).unwrap();
    assert_eq!((one.answer_ends(), one.answer_start()), (&[3][..], 2));
    assert_eq!((&one.answer_settings().0["num_beams"], &one.generation_json()["num_beams"]), (&json!(4), &json!(4)));
    // Without a named start, the start of every text is used.
    assert_eq!(of(Some(json!({ "bos_token_id": 7 })), &same).unwrap().answer_start(), 7);
    // An older model has one file, whose settings for answers are saved as those of a newer one.
    let older = of(None, &|json| json["num_beams"] = json!(2)).unwrap();
    assert_eq!((older.answer_ends(), older.answer_start()), (&[3][..], 2));
    assert_eq!(
        older.generation_json(),
        json!({ "num_beams": 2, "decoder_start_token_id": 2, "eos_token_id": 3, "pad_token_id": older.pad_token_id })
    );
    // The error names the file with the mistake.
    let error = of(Some(json!({ "eos_token_id": "end" })), &same).unwrap_err().to_string();
    assert!(error.contains("generation_config.json") && error.contains("eos_token_id"), "{error}");
    let error = of(Some(json!({ "eos_token_id": 1_000_000 })), &same).unwrap_err().to_string();
    assert!(error.contains("eos_token_id") && error.contains("1000000"), "{error}");
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(300))]

    #[test]
    fn no_damage_to_a_file_makes_loading_panic(
        in_config in proptest::bool::ANY,
        position in 0usize..6000,
        bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..4),
        cut in proptest::option::of(0usize..80_000),
    ) {
        let (original, ..) = case("v1_0_relu_tied");
        let directory = copy(&original);
        let file = directory.path().join(if in_config { "config.json" } else { "model.safetensors" });
        let mut content = std::fs::read(&file).unwrap();
        let position = position % content.len();
        let end = (position + bytes.len()).min(content.len());
        content.splice(position..end, bytes);
        content.truncate(cut.unwrap_or(usize::MAX));
        std::fs::write(&file, content).unwrap();
        // Damage may go unnoticed (a weight is a weight). If it is noticed, it is an error with a message.
        if let Err(error) = load(directory.path()) {
            assert!(!error.to_string().is_empty());
        }
    }
}
