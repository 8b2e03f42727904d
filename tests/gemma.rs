//! T5Gemma and T5Gemma 2 by the command: trained as transformers trains them, saved, resumed, answered with, and refused by name.
//!
//! The directories are those of `scripts/golden_cases/gemma.py`, with a tokenizer of words beside them: `w7` is token 7.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::run::{Scene, repository, short};

const CASES: [&str; 4] = ["t5gemma", "t5gemma_unbalanced", "t5gemma2", "t5gemma2_shards"];

fn golden(name: &str) -> Value {
    let path = repository().join("crates/t5/tests/goldens/gemma").join(name).join("golden.json");
    serde_json::from_slice(&std::fs::read(path).expect("a golden")).expect("JSON")
}

/// A scene with the directory of a case as `model`, and the golden's samples as `rows.jsonl`.
fn scene(name: &str) -> Scene {
    let scene = Scene::new();
    let directory = repository().join("crates/t5/tests/goldens/gemma").join(name);
    for file in std::fs::read_dir(&directory).expect("a directory").map(|entry| entry.expect("a file").path()) {
        let name = file.file_name().expect("a name").to_string_lossy().into_owned();
        if !name.starts_with("golden") {
            scene.write(&format!("model/{name}"), std::fs::read(&file).expect("a file"));
        }
    }
    let special = ["<pad>", "<eos>", "<bos>", "<unk>", "<eoi>", "<image>"];
    let words = special.iter().map(ToString::to_string).chain((6..61).map(|id| format!("w{id}")));
    let vocabulary: BTreeMap<String, usize> = words.zip(0..).collect();
    let added = special.iter().zip(0..).map(|(content, id)| {
        json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false})
    });
    let start = json!({"SpecialToken": {"id": "<bos>", "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "decoder": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {"type": "TemplateProcessing", "single": [start, text], "pair": [start, text],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}}},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    });
    scene.write("model/tokenizer.json", tokenizer.to_string());
    let golden = golden(name);
    let lists = |key: &str| golden[key].as_array().expect("lists").iter().map(words_of).collect::<Vec<_>>();
    let rows = lists("sources").into_iter().zip(lists("targets"));
    let rows = rows.map(|(prompt, response)| json!({"prompt": prompt, "response": response}).to_string() + "\n");
    scene.write("rows.jsonl", rows.collect::<String>());
    scene
}

/// The words of some ids, without the end.
fn words_of(ids: &Value) -> String {
    let ids = ids.as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id"));
    ids.filter(|id| *id > 5).map(|id| format!("w{id}")).collect::<Vec<_>>().join(" ")
}

fn train(output: &str, more: &[&str]) -> Vec<String> {
    let settings = [
        "model.init_from=model",
        "data.train=rows.jsonl",
        "data.max_source_tokens=32",
        "data.max_target_tokens=32",
        "train.batch_size=3",
        "train.max_steps=6",
        "train.dropout=0",
        "train.precision=f32",
        "optimizer.name=adamw",
        "optimizer.learning_rate=1e-3",
        "optimizer.weight_decay=1e-2",
        "schedule.name=constant",
        "run.device=cpu",
    ];
    let settings = settings.iter().flat_map(|setting| ["--set", setting]).collect::<Vec<_>>();
    short(&[&settings[..], &["--output", output], more].concat())
}

/// The tensors of a directory's files: their dtype, shape and bytes.
fn tensors(scene: &Scene, directory: &str) -> BTreeMap<String, (Value, Vec<u8>)> {
    let mut tensors = BTreeMap::new();
    for file in scene.names(directory).iter().filter(|name| name.ends_with(".safetensors")) {
        let whole = scene.read(&format!("{directory}/{file}"));
        let length = usize::try_from(u64::from_le_bytes(*whole.first_chunk().expect("a length"))).expect("a header");
        let header: Value = serde_json::from_slice(&whole[8..8 + length]).expect("JSON");
        for (name, entry) in header.as_object().expect("tensors").iter().filter(|(name, _)| *name != "__metadata__") {
            let of = |place: usize| 8 + length + entry["data_offsets"][place].as_u64().expect("an offset") as usize;
            let kind = json!([entry["dtype"], entry["shape"]]);
            tensors.insert(name.clone(), (kind, whole[of(0)..of(1)].to_vec()));
        }
    }
    tensors
}

#[test]
fn six_steps_are_those_of_transformers_and_what_texts_do_not_use_stays_as_it_was() {
    for name in CASES {
        let scene = scene(name);
        scene.run(&train("run", &[])).expect_code(0);
        let steps = scene.events("run", "step");
        let golden = golden(name);
        let expected = golden["steps"].as_array().expect("steps");
        assert_eq!(steps.len(), expected.len(), "{name}");
        for (step, expected) in steps.iter().zip(expected) {
            // AdamW makes much of rounding where gradients are small: torch itself in f32 is 1e-3 away from f64 in a later step.
            let is_early = step["step"].as_u64().expect("a step") <= 2;
            for (key, tolerance) in
                [("loss", if is_early { 1e-5 } else { 1e-3 }), ("grad_norm", if is_early { 1e-4 } else { 2e-2 })]
            {
                let [got, expected] = [step, expected].map(|numbers| numbers[key].as_f64().expect("a number"));
                assert!((got / expected - 1.0).abs() < tolerance, "{name}: {key} {got}, in transformers {expected}");
            }
        }
        let [before, after] = ["model", "run/model"].map(|directory| tensors(&scene, directory));
        assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>(), "{name}");
        let is_of_images = |name: &str| ["vision_tower", "projector", "eoi_embedding"].iter().any(|p| name.contains(p));
        for (tensor, before) in &before {
            let is_equal = before.1 == after[tensor].1;
            assert_eq!(is_equal, is_of_images(tensor), "{name}: {tensor}");
            assert!(!is_of_images(tensor) || before.0 == after[tensor].0, "{name}: {tensor}");
        }
        let config: Value = serde_json::from_slice(&scene.read("run/model/config.json")).expect("JSON");
        let kept: Value = serde_json::from_slice(&scene.read("model/config.json")).expect("JSON");
        assert_eq!(
            (&config["encoder"]["layer_types"], &config["model_type"]),
            (&kept["encoder"]["layer_types"], &kept["model_type"])
        );
    }
}

#[test]
fn answers_are_those_of_transformers() {
    for name in CASES {
        let (scene, golden) = (scene(name), golden(name));
        let prompts = golden["sources"].as_array().expect("sources").iter().map(words_of);
        let mut arguments: Vec<String> =
            ["generate", "--model", "model", "--max-new-tokens", "16", "--json"].map(String::from).into();
        prompts.for_each(|prompt| arguments.extend(["--prompt".to_owned(), prompt]));
        let out = scene.run(&arguments).expect_code(0).out;
        let answers = out.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON")["response"].clone());
        let expected = golden["answers"].as_array().expect("answers").iter().map(|ids| Value::from(words_of(ids)));
        assert_eq!(answers.collect::<Vec<_>>(), expected.collect::<Vec<_>>(), "{name}");
    }
}

#[test]
fn a_run_resumes_to_the_same_bits_and_evaluates_its_model() {
    for name in ["t5gemma", "t5gemma2_shards"] {
        let scene = scene(name);
        let every = ["--set", "checkpoint.every_steps=2"];
        scene.run(&train("whole", &every)).expect_code(0);
        scene.run(&train("cut", &[&every[..], &["--set", "train.max_steps=2"]].concat())).expect_code(0);
        scene.run(&train("cut", &[&every[..], &["--keep-training"]].concat())).expect_code(0);
        assert!(scene.read("cut/model/model.safetensors") == scene.read("whole/model/model.safetensors"), "{name}");
        let evaluated = scene.run(&["eval", "--model", "whole/model", "--data", "rows.jsonl", "--json"]).expect_code(0);
        let loss = evaluated.json()["loss"].as_f64().expect("a loss");
        let last = golden(name)["steps"][5]["loss"].as_f64().expect("a loss");
        assert!(loss < last, "{name}: {loss} after the last step, {last} before it");
    }
}

#[test]
fn an_adapter_has_the_names_of_transformers_modules_and_answers_beside_its_model() {
    for name in CASES {
        let scene = scene(name);
        scene.run(&train("run", &["--lora", "--set", "lora.rank=4", "--lr", "0.02"])).expect_code(0);
        let steps = scene.events("run", "step");
        let losses: Vec<f64> = steps.iter().map(|step| step["loss"].as_f64().expect("a loss")).collect();
        assert!(losses[5] < losses[0], "{name}: {losses:?}");
        let config: Value = serde_json::from_slice(&scene.read("run/adapter/adapter_config.json")).expect("JSON");
        let targets = config["target_modules"].as_array().expect("names");
        let encoder = if name.starts_with("t5gemma2") { "model.encoder.text_model" } else { "model.encoder" };
        assert!(targets.contains(&format!("{encoder}.layers.0.self_attn.q_proj").into()), "{name}: {targets:?}");
        let header = tensors(&scene, "run/adapter");
        let named = format!("base_model.model.{encoder}.layers.0.mlp.down_proj.lora_A.weight");
        assert_eq!(header[&named].0[1][0], 4, "{name}");
        let evaluated = ["eval", "--model", "model", "--adapter", "run/adapter", "--data", "rows.jsonl", "--json"];
        let loss = scene.run(&evaluated).expect_code(0).json()["loss"].as_f64().expect("a loss");
        assert!(loss < losses[5], "{name}: {loss} after the last step, {losses:?} before");
    }
}

fn loss(scene: &Scene, arguments: &[&str]) -> f64 {
    let evaluated = [&["eval", "--json"], arguments, &["--data", "rows.jsonl"]].concat();
    scene.run(&evaluated).expect_code(0).json()["loss"].as_f64().expect("a loss")
}

/// The tensors that no text uses.
fn of_images(scene: &Scene, directory: &str) -> BTreeMap<String, (Value, Vec<u8>)> {
    let mut tensors = tensors(scene, directory);
    tensors.retain(|name, _| ["vision_tower", "projector", "eoi_embedding"].iter().any(|part| name.contains(part)));
    tensors
}

#[test]
fn an_adapter_with_whole_modules_loads_back_trains_on_and_merges_to_the_same_loss() {
    for name in CASES {
        let scene = scene(name);
        let is_second = name.starts_with("t5gemma2");
        let modules = r#"lora.modules_to_save=["pre_self_attn_layernorm", "model.encoder.layers.1.mlp.up_proj"]"#;
        let dora = if is_second { "lora.dora=true" } else { "lora.dora=false" };
        let lora = ["--lora", "--lr", "0.02", "--set", "lora.rank=4", "--set", modules, "--set", dora];
        scene.run(&train("run", &lora)).expect_code(0);
        let read = |run: &str| -> Value {
            serde_json::from_slice(&scene.read(&format!("{run}/adapter/adapter_config.json"))).expect("JSON")
        };
        let mut config = read("run");
        let encoder = if is_second { "model.encoder.text_model" } else { "model.encoder" };
        let saved = config["modules_to_save"].as_array().expect("names");
        assert!(saved.contains(&format!("{encoder}.layers.1.mlp.up_proj").into()), "{name}: {saved:?}");
        let alphas = json!({ format!("{encoder}.layers.0.self_attn.q_proj"): 9 });
        config["alpha_pattern"] = alphas.clone();
        scene.write("run/adapter/adapter_config.json", config.to_string());
        let with_adapter = loss(&scene, &["--model", "model", "--adapter", "run/adapter"]);
        scene.run(&["merge", "--model", "model", "--adapter", "run/adapter", "--output", "merged"]).expect_code(0);
        // Stored in bf16, sums are rounded.
        let tolerance = if name == "t5gemma2_shards" { 2e-2 } else { 1e-5 };
        let merged = loss(&scene, &["--model", "merged"]);
        assert!((merged / with_adapter - 1.0).abs() < tolerance, "{name}: {merged} merged, {with_adapter} beside");
        let wide = ["merge", "--model", "model", "--adapter", "run/adapter", "--dtype", "f32", "--output", "wide"];
        scene.run(&wide).expect_code(0);
        let wide = loss(&scene, &["--model", "wide"]);
        // `eval` holds the matrices of a bf16 model in bf16, also those that the adapter replaces.
        let close = if name == "t5gemma2_shards" { 3e-5 } else { 1e-5 };
        assert!((wide / with_adapter - 1.0).abs() < close, "{name}: {wide} merged in f32, {with_adapter} beside");
        assert_eq!(of_images(&scene, "model"), of_images(&scene, "wide"), "{name}");
        assert!(tensors(&scene, "model").keys().eq(tensors(&scene, "merged").keys()), "{name}");
        scene.run(&["average", "model", "merged", "--output", "mean"]).expect_code(0);
        assert_eq!(of_images(&scene, "model"), of_images(&scene, "mean"), "{name}");
        loss(&scene, &["--model", "mean"]);
        // A run goes on from the adapter's files.
        let more = ["--lora", "--set", "lora.init_from=run/adapter", "--max-steps", "1"];
        scene.run(&train("on", &more)).expect_code(0);
        let first = scene.events("on", "step")[0]["loss"].as_f64().expect("a loss");
        assert!((first / wide - 1.0).abs() < 1e-5, "{name}: {first} at first, {wide} merged");
        assert_eq!(read("on")["alpha_pattern"], alphas, "{name}");
    }
}

#[test]
fn a_vocabulary_is_trimmed_and_grown_in_every_object_of_the_config() {
    for name in CASES {
        let scene = scene(name);
        let is_second = name.starts_with("t5gemma2");
        if is_second {
            let mut config: Value = serde_json::from_slice(&scene.read("model/config.json")).expect("JSON");
            for path in ["/image_token_index", "/encoder/image_token_index"] {
                *config.pointer_mut(path).expect("a key") = json!(60);
            }
            scene.write("model/config.json", config.to_string());
        }
        let names = |directory: &str| {
            let json: Value =
                serde_json::from_slice(&scene.read(&format!("{directory}/tokenizer.json"))).expect("JSON");
            let entries = json["model"]["vocab"].as_object().expect("entries").clone();
            let mut names = vec![String::new(); entries.len()];
            entries.into_iter().for_each(|(name, id)| names[id.as_u64().expect("an id") as usize] = name);
            names
        };
        let row = &String::from_utf8(scene.read("rows.jsonl")).expect("text");
        scene.write("one.jsonl", row.lines().next().expect("a row"));
        scene.run(&["trim-vocab", "--model", "model", "--keep-used", "one.jsonl", "-o", "trimmed"]).expect_code(0);
        let add = ["add-tokens", "--model", "trimmed", "--tokens", "w99", "w98", "-o", "grown"];
        scene.run(&add).expect_code(0);
        let (before, now) = (names("model"), names("trimmed"));
        assert!(now.len() < before.len() && now.len() > 10, "{name}: {now:?}");
        let ([old, new, grown], width) = (["model", "trimmed", "grown"].map(|of| tensors(&scene, of)), 4);
        assert!(old.keys().eq(new.keys()) && old.keys().eq(grown.keys()), "{name}");
        for (tensor, ((kind, bytes), (_, all))) in new.iter().map(|(tensor, new)| (tensor, (new, &old[tensor]))) {
            if !tensor.ends_with("embed_tokens.weight") {
                assert_eq!((kind, bytes), (&old[tensor].0, all), "{name}: {tensor}");
                assert!(grown[tensor] == old[tensor], "{name}: {tensor}");
                continue;
            }
            let row = bytes.len() / now.len();
            assert!(row >= width && grown[tensor].1.len() == (now.len() + 2) * row, "{name}: {tensor}");
            assert!(grown[tensor].1.starts_with(bytes), "{name}: {tensor}");
            for (entry, values) in now.iter().zip(bytes.chunks_exact(row)) {
                let place = before.iter().position(|name| name == entry).expect("an old entry");
                assert_eq!(values, &all[place * row..][..row], "{name}: {tensor}: {entry}");
            }
        }
        for (directory, rows) in [("trimmed", now.len()), ("grown", now.len() + 2)] {
            let config: Value = serde_json::from_slice(&scene.read(&format!("{directory}/config.json"))).expect("JSON");
            let encoder = if is_second { &config["encoder"]["text_config"] } else { &config["encoder"] };
            assert_eq!(
                (&encoder["vocab_size"], &config["decoder"]["vocab_size"]),
                (&json!(rows), &json!(rows)),
                "{name}"
            );
            assert_eq!(
                (&encoder["eos_token_id"], &config["decoder"]["bos_token_id"]),
                (&json!(1), &json!(2)),
                "{name}"
            );
            if is_second {
                for id in [&config["image_token_index"], &config["encoder"]["image_token_index"]] {
                    assert_eq!(now[id.as_u64().expect("an id") as usize], "w60", "{name}");
                }
            }
            scene.run(&["eval", "--json", "--model", directory, "--data", "one.jsonl"]).expect_code(0);
        }
    }
}

#[test]
fn rows_with_images_and_lengths_without_positions_are_named_with_a_way_out() {
    let scene = scene("t5gemma2");
    let rows = String::from_utf8(scene.read("rows.jsonl")).expect("text");
    let with_image =
        |prompt: &str, response: &str| format!("{rows}{}\n", json!({"prompt": prompt, "response": response}));
    scene.write("images.jsonl", with_image("w7 <image> w8", "w9"));
    scene.write("answers.jsonl", with_image("w7 w8", "w9 <eoi>"));
    for (file, column) in [("images", "prompt"), ("answers", "response")] {
        let data = format!("data.train={file}.jsonl");
        let ran = scene.run(&train(file, &["--set", &data, "--set", "train.batch_size=4"]));
        let words = format!("row 3: column `{column}` has a token that stands for an image");
        ran.expect_code(4).expect_words(&[&words, "data.bad_rows = \"skip\""]);
        // The row is named by `eval`, too.
        let data = format!("{file}.jsonl");
        scene.run(&["eval", "--model", "model", "--data", &data]).expect_code(4).expect_words(&[&words]);
    }
    let skip = ["--set", "data.train=images.jsonl", "--set", "data.bad_rows=skip", "--set", "data.shuffle=false"];
    scene.run(&train("skipped", &skip)).expect_code(0).expect_words(&["skipped a row", "stands for an image"]);
    scene.run(&train("plain", &["--set", "data.shuffle=false"])).expect_code(0);
    let first = |run: &str| scene.events(run, "step")[0]["loss"].clone();
    assert_eq!(first("skipped"), first("plain"), "the other rows stay where they are");
    // A length that was chosen is refused before the first step, and one row is told apart from a wrong tokenizer.
    for (key, sources, targets) in [("data.max_source_tokens", 65, 64), ("data.max_target_tokens", 64, 65)] {
        let lengths = [format!("data.max_source_tokens={sources}"), format!("data.max_target_tokens={targets}")];
        let ran = scene.run(&train("long", &["--set", &lengths[0], "--set", &lengths[1]]));
        let refused = format!("`{key}`: expected at most 64, `max_position_embeddings` of the model, got 65");
        ran.expect_code(2).expect_words(&[&refused, &format!("--set {key}=64")]);
    }
    scene.write("long.jsonl", with_image(&"w7 ".repeat(70), "w9"));
    let ran = scene.run(&["eval", "--model", "model", "--data", "long.jsonl"]).expect_code(4);
    ran.expect_words(&["at most max_position_embeddings (64) tokens, got 72", "data.max_source_tokens"]);
    let cut = ["eval", "--model", "model", "--data", "long.jsonl", "--set", "data.max_source_tokens=64"];
    scene.run(&cut).expect_code(0);
}

#[test]
fn what_is_not_there_yet_is_refused_by_its_name() {
    let scene = scene("t5gemma2");
    let check = |arguments: &[&str], words: &[&str]| {
        let ran = scene.run(arguments);
        assert_ne!(ran.code, Some(0), "{arguments:?}");
        assert!(words.iter().all(|word| ran.err.contains(word)), "{arguments:?}: {}", ran.err);
    };
    check(&["generate", "--model", "model", "--prompt", "w7 <image> w8"], &["without images", "token 5"]);
    let of_shape =
        ["--preset", "tiny-gemma", "--data", "rows.jsonl", "--tokenizer", "model/tokenizer.json", "--output", "new"];
    check(
        &[&of_shape[..], &["--set", "model.overrides={num_layers=2}"]].concat(),
        &["model.overrides.num_layers", "no such key"],
    );
    let long = "w7 ".repeat(70);
    check(&["generate", "--model", "model", "--prompt", &long], &["max_position_embeddings (64)"]);
    let export = |format| ["export", "--model", "model", "--format", format, "--output", "out"];
    check(&export("gguf"), &["GGUF cannot hold this model: `model_type` is t5gemma2", "--format ctranslate2"]);
    check(
        &export("ctranslate2"),
        &[
            "does not write a t5gemma2",
            "ct2-transformers-converter --model model",
            "other probabilities",
            "serve --model model",
        ],
    );
    assert!(!scene.path("out").exists());
    let config: Value = serde_json::from_slice(&scene.read("model/config.json")).expect("JSON");
    for (path, value, words) in [
        ("/model_type", json!("t5gemma3"), "the model is `t5gemma3`, expected one of the T5 family"),
        ("/model_type", json!("t5gemma2_encoder"), "save the whole model from transformers"),
        ("/decoder/num_attention_heads", json!(8), "model.decoder.layers.0.self_attn.q_proj.weight"),
        ("/decoder/num_key_value_heads", json!(3), "a divisor of num_attention_heads"),
        (
            "/decoder/head_dim",
            json!(1 << 23),
            "`decoder.head_dim` is `8388608`, expected num_attention_heads x head_dim",
        ),
        ("/decoder/layer_types", json!(["chunked_attention", "full_attention"]), "layer_types"),
        ("/decoder/attention_bias", json!(true), "attention_bias"),
        ("/encoder/text_config/hidden_size", json!(32), "hidden_size"),
        ("/tie_word_embeddings", json!(false), "tie_word_embeddings"),
        (
            "/encoder/text_config/vocab_size",
            json!(62),
            "`encoder.text_config.vocab_size` is `62`, expected that of the decoder, 61",
        ),
        (
            "/encoder/text_config/pad_token_id",
            json!(61),
            "`encoder.text_config.pad_token_id` is `61`, expected a token id below vocab_size (61)",
        ),
        ("/decoder/vocab_size", json!(0), "decoder.vocab_size"),
        ("/decoder/sliding_window", json!(-3), "`decoder.sliding_window` is `-3`, expected a whole number"),
        ("/encoder/text_config", json!(null), "`encoder.text_config` is `null`, expected an object"),
        ("/encoder/text_config/rope_parameters/full_attention/rope_type", json!("yarn"), "rope_type"),
    ] {
        let mut changed = config.clone();
        *changed.pointer_mut(path).expect("a key") = value;
        scene.write("model/config.json", changed.to_string());
        check(&["generate", "--model", "model", "--prompt", "w7"], &[words]);
    }
}
