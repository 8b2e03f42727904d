//! `trim-vocab` and `add-tokens`: models with fewer and with more entries, whose other weights and answers are what they were.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::files::tensors;
use crate::run::{Scene, repository, short};

/// A model with T5's pieces and sentinels, trained for a step.
fn model(scene: &Scene) {
    let pieces = repository().join("crates/dataloader/tests/goldens/sentence_piece/T5/spiece.model");
    std::fs::create_dir_all(scene.path("pieces")).expect("a directory");
    std::fs::copy(pieces, scene.path("pieces/spiece.model")).expect("a copy");
    let tokenizer = "data.tokenizer=pieces/spiece.model";
    scene
        .run(&short(&["--max-steps", "1", "--output", "run", "--set", tokenizer, "--set", "model.config=tiny"]))
        .expect_code(0);
    std::fs::rename(scene.path("run/model"), scene.path("model")).expect("a model");
}

/// The ids of the tokenizer's entries, by their names.
fn entries(scene: &Scene, directory: &str) -> Vec<String> {
    let json: Value = serde_json::from_slice(&scene.read(&format!("{directory}/tokenizer.json"))).expect("JSON");
    let pieces = json["model"]["vocab"].as_array().expect("pieces").iter();
    pieces.map(|piece| piece[0].as_str().expect("a name").to_owned()).collect()
}

fn table(scene: &Scene, directory: &str) -> (BTreeMap<String, Vec<u8>>, usize) {
    let config: Value = serde_json::from_slice(&scene.read(&format!("{directory}/config.json"))).expect("JSON");
    let rows = config["vocab_size"].as_u64().expect("a number") as usize;
    (tensors(&scene.read(&format!("{directory}/model.safetensors"))), rows)
}

#[test]
fn a_trimmed_model_has_the_rows_and_the_answers_of_the_whole_one() {
    let scene = Scene::new();
    model(&scene);
    scene.write("rows.jsonl", "{\"prompt\": \"the quick brown fox\", \"response\": \"jumps over\"}\n");
    let trim = |more: &[&str]| {
        scene.run(&[&["trim-vocab", "--model", "model", "--keep-used", "rows.jsonl", "-o", "trimmed"], more].concat())
    };
    let json = trim(&["--json"]).expect_code(0).json();
    let (before, now) = (entries(&scene, "model"), entries(&scene, "trimmed"));
    assert_eq!(json["entries"], json!([before.len(), now.len()]), "{json}");
    assert_eq!(json["share_kept"], 1.0);
    assert!(now.len() < before.len() && now.iter().filter(|name| name.starts_with("<extra_id_")).count() == 100);
    let ((old, _), (new, rows)) = (table(&scene, "model"), table(&scene, "trimmed"));
    assert_eq!(rows, now.len());
    for (name, bytes) in &new {
        if !["shared.weight", "lm_head.weight"].contains(&name.as_str()) {
            assert_eq!(bytes, &old[name], "{name}");
            continue;
        }
        let width = bytes.len() / rows;
        for (entry, row) in now.iter().zip(bytes.chunks_exact(width)) {
            let place = before.iter().position(|name| name == entry).expect("an old entry");
            assert_eq!(row, &old[name][place * width..][..width], "{name}: {entry}");
        }
    }
    // The same loss, and the same answer, on the rows.
    let eval =
        |model: &str| scene.run(&["eval", "--model", model, "--data", "rows.jsonl", "--json"]).expect_code(0).json();
    let (whole, trimmed) = (eval("model"), eval("trimmed"));
    assert_eq!(whole["target_tokens"], trimmed["target_tokens"]);
    assert_eq!(
        scene.names("trimmed").contains(&"spiece.model".to_owned()),
        scene.names("model").contains(&"spiece.model".to_owned())
    );
    trim(&[]).expect_code(2).expect_words(&["already exists", "`--force`"]);
    trim(&["--force", "--keep-top", "110"]).expect_code(0).expect_words(&["110 of", "tokens kept", "parameters"]);
    assert_eq!(entries(&scene, "trimmed").len(), 110);
    trim(&["--force", "--keep-top", "50"]).expect_code(2).expect_words(&["--keep-top 50", "special tokens"]);
    assert_eq!(entries(&scene, "trimmed").len(), 110, "a refusal leaves the output as it was");
    // It trains.
    let rows = ["--set", "data.train=rows.jsonl", "--set", "train.batch_size=1", "--set", "data.validation=rows.jsonl"];
    let train = [&["--max-steps", "1", "--output", "again", "--set", "model.init_from=trimmed"], &rows[..]].concat();
    scene.run(&short(&train)).expect_code(0);
}

#[test]
fn a_trim_keeps_the_entries_of_some_scripts() {
    let scene = Scene::new();
    model(&scene);
    let trim =
        |more: &[&str]| scene.run(&[&["trim-vocab", "--model", "model", "-o", "trimmed", "--force"], more].concat());
    let before = entries(&scene, "model");
    trim(&["--keep-scripts", "Latin"]).expect_code(0).expect_words(&["entries", "parameters"]);
    let latin = entries(&scene, "trimmed");
    // Its pieces are Latin, Arabic, Han and Cyrillic.
    let is_other = |name: &&String| name.chars().any(|letter| ('\u{400}'..'\u{500}').contains(&letter));
    let others = before.iter().filter(is_other).count();
    // The piece of the lowest score always stays.
    assert!(others > 5 && latin.iter().filter(is_other).count() <= 1 && !latin.contains(&"▁我们".to_owned()));
    assert!(latin.iter().filter(|name| name.starts_with("<extra_id_")).count() == 100);
    trim(&["--keep-scripts", "latin,Cyrillic"]).expect_code(0);
    let both = entries(&scene, "trimmed");
    assert_eq!(both.iter().filter(is_other).count(), others);
    assert!(both.iter().all(|name| before.contains(name)) && latin.iter().all(|name| both.contains(name)));
    // Of entries that no row uses, the first ones stay.
    scene.write("rows.jsonl", "{\"prompt\": \"the quick brown fox\", \"response\": \"jumps over\"}\n");
    let json = trim(&["--keep-scripts", "Latin", "--keep-used", "rows.jsonl", "--keep-top", "180", "--json"]);
    let json = json.expect_code(0).json();
    assert_eq!((&json["entries"][1], &json["share_kept"]), (&json!(180), &json!(1.0)), "{json}");
    trim(&["--keep-scripts", "Klingon"]).expect_code(2).expect_words(&["`Klingon`", "--keep-scripts"]);
    trim(&["--keep-scripts", "Latin}x"]).expect_code(2).expect_words(&["--keep-scripts"]);
    trim(&[]).expect_code(2).expect_words(&["--keep-used"]);
}

#[test]
fn a_trim_that_would_remove_an_id_of_the_config_is_refused() {
    let scene = Scene::new();
    model(&scene);
    scene.write("rows.jsonl", "{\"prompt\": \"the\", \"response\": \"fox\"}\n");
    let path = "model/generation_config.json";
    let mut answers: Value = serde_json::from_slice(&scene.read(path)).expect("JSON");
    answers["suppress_tokens"] = json!([entries(&scene, "model").len()]);
    scene.write(path, answers.to_string());
    let trim = ["trim-vocab", "--model", "model", "--keep-used", "rows.jsonl", "-o", "trimmed"];
    scene.run(&trim).expect_code(4).expect_words(&["`suppress_tokens`", "no entry in the vocabulary", "remove it"]);
    assert!(!scene.path("trimmed").exists());
    // An id that has an entry stays, whether a row needs it or not.
    answers["suppress_tokens"] = json!([40]);
    scene.write(path, answers.to_string());
    scene.run(&trim).expect_code(0);
    let trimmed: Value = serde_json::from_slice(&scene.read("trimmed/generation_config.json")).expect("JSON");
    let id = trimmed["suppress_tokens"][0].as_u64().expect("an id") as usize;
    assert_eq!(entries(&scene, "trimmed")[id], entries(&scene, "model")[40]);
}

#[test]
fn what_the_tokenizer_loses_is_added_by_one_command_that_the_run_names() {
    let scene = Scene::new();
    model(&scene);
    let row = json!({"prompt": "the fox", "response": "{the}\n{fox}\n"});
    scene.write("rows.jsonl", format!("{row}\n").repeat(2));
    let train = |model: &str, output: &str| {
        let model = format!("model.init_from={model}");
        let rows =
            ["--set", "data.train=rows.jsonl", "--set", "data.validation=rows.jsonl", "--set", "train.batch_size=1"];
        scene
            .run(&short(&[&["--max-steps", "1", "--output", output, "--set", &model], &rows[..]].concat()))
            .expect_code(0)
    };
    let said = train("model", "first");
    let command = "train_low_mem add-tokens --model model --missing-in rows.jsonl --output with-tokens";
    let said = format!("{}{}", said.out, said.err);
    assert!(said.contains(&format!("`{command}`")), "{said}");
    let arguments: Vec<&str> = command.split(' ').skip(1).collect();
    scene.run(&arguments).expect_code(0).expect_words(&["new token", "`\\n`", "mean of the old rows"]);
    let after = train("with-tokens", "second");
    let after = format!("{}{}", after.out, after.err);
    assert!(!after.contains("add-tokens") && !after.contains("lost:"), "{after}");
    let start = &scene.events("second", "start")[0];
    assert_eq!(start["reading"]["tokenizer"]["changed_targets"], 0, "{start}");
    // Each new row is the mean of the old ones.
    let ((old, old_rows), (new, new_rows)) = (table(&scene, "model"), table(&scene, "with-tokens"));
    assert_eq!(new_rows, entries(&scene, "with-tokens").len());
    let first = entries(&scene, "model").len();
    let values = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().expect("four bytes"))).collect()
    };
    let (old, new) = (values(&old["shared.weight"]), values(&new["shared.weight"]));
    let width = old.len() / old_rows;
    assert_eq!(old[..first * width], new[..first * width]);
    for column in 0..width {
        let mean = old.iter().skip(column).step_by(width).map(|value| f64::from(*value)).sum::<f64>() / old_rows as f64;
        assert!((f64::from(new[first * width + column]) - mean).abs() < 1e-6, "column {column}");
    }
    scene
        .run(&["add-tokens", "--model", "with-tokens", "--missing-in", "rows.jsonl", "-o", "more"])
        .expect_code(2)
        .expect_words(&["no token to add"]);
}

#[test]
fn a_table_grows_when_its_unused_rows_do_not_suffice() {
    let scene = Scene::new();
    model(&scene);
    let (_, rows) = table(&scene, "model");
    let many: Vec<String> = (0..200).map(|number| format!("<name_{number}>")).collect();
    scene.write("tokens.txt", many.join("\n"));
    let json = scene
        .run(&["add-tokens", "--model", "model", "--tokens", "tokens.txt", "<one>", "-o", "more", "--json"])
        .expect_code(0)
        .json();
    let entries = entries(&scene, "more").len();
    assert_eq!(json["table_rows"], json!([rows, rows.max(entries)]), "{json}");
    assert_eq!(json["added"][200]["token"], "<one>");
    assert_eq!(json["added"][200]["id"], entries - 1);
    scene.run(&["generate", "--model", "more", "--prompt", "<one>", "--max-new-tokens", "2"]).expect_code(0);
}

#[test]
fn a_long_row_is_read_within_the_budget_or_named() {
    let scene = Scene::new();
    model(&scene);
    let row = json!({"prompt": "the \u{1f98a} fox ".repeat(280_000), "response": "b"});
    scene.write("rows.jsonl", format!("{}\n{row}\n", json!({"prompt": "the fox", "response": "a"})));
    let within = |command: &str, mib: u64| {
        let words = format!("{command} --memory-budget {mib}MiB");
        scene.run(&words.split(' ').collect::<Vec<_>>())
    };
    let least = |command: &str| -> u64 {
        let refused = within(command, 1).expect_code(3);
        let named = refused.err.split_once("use `--memory-budget ").and_then(|(_, rest)| rest.split_once("MiB"));
        named.and_then(|(number, _)| number.parse().ok()).unwrap_or_else(|| panic!("{}", refused.err))
    };
    for command in [
        "add-tokens --model model --missing-in rows.jsonl --output out --force --json",
        "trim-vocab --model model --keep-used rows.jsonl --output out --force --json",
    ] {
        let within = |mib: u64| within(command, mib);
        let least = least(command);
        let words = ["rows.jsonl:2: the row is longer than", "hint: raise `--memory-budget`"];
        within(least).expect_code(4).expect_words(&words);
        let enough = least + 4;
        let json = within(enough).expect_code(0).json();
        let peak = json["peak_rss_bytes"].as_u64().expect("bytes");
        assert!(peak <= enough << 20, "{peak} bytes of {enough} MiB: {command}");
        match json["added"].as_array() {
            Some(added) => {
                assert_eq!(added.iter().map(|added| &added["token"]).collect::<Vec<_>>(), ["\u{1f98a}"], "{json}");
            }
            None => assert_eq!((&json["rows_read"], &json["share_kept"]), (&json!(2), &json!(1.0)), "{json}"),
        }
    }
    let inspect = "inspect rows.jsonl";
    let words = ["malformed rows", "longer than", "fits the memory budget"];
    within(inspect, least(inspect)).expect_code(0).expect_words(&words);
    assert!(!within(inspect, 1024).expect_code(0).out.contains("malformed"));
}

/// Writes a model with the names of `model`, `width` wide and in three shards, whose values are zeros. Returns its bytes.
fn wide_model(scene: &Scene, directory: &str, width: u64) -> u64 {
    let mut config: Value = serde_json::from_slice(&scene.read("model/config.json")).expect("JSON");
    let number = |config: &Value, key: &str| config[key].as_u64().expect("a number");
    let (inner, feed_forward) = (number(&config, "num_heads") * number(&config, "d_kv"), 4 * width);
    let vocabulary = number(&config, "vocab_size");
    (config["d_model"], config["d_ff"]) = (json!(width), json!(feed_forward));
    let whole = scene.read("model/model.safetensors");
    let length = u64::from_le_bytes(whole[..8].try_into().expect("a length")) as usize;
    let header: Value = serde_json::from_slice(&whole[8..8 + length]).expect("JSON");
    let shape = |name: &str, stored: &Value| match name.rsplit('.').nth(1).expect("a layer") {
        "shared" | "lm_head" | "embed_tokens" => json!([vocabulary, width]),
        "layer_norm" | "final_layer_norm" => json!([width]),
        "q" | "k" | "v" => json!([inner, width]),
        "o" => json!([width, inner]),
        "wo" => json!([width, feed_forward]),
        wi if wi.starts_with("wi") => json!([feed_forward, width]),
        _ => stored.clone(),
    };
    let mut shards = [(); 3].map(|()| (serde_json::Map::new(), 0));
    let mut places = serde_json::Map::new();
    let tensors = header.as_object().expect("an object").iter().filter(|(name, _)| *name != "__metadata__");
    for (number, (name, stored)) in tensors.enumerate() {
        let shard = number % shards.len();
        let (entries, end) = &mut shards[shard];
        let shape = shape(name, &stored["shape"]);
        let elements = shape.as_array().expect("a shape").iter().map(|size| size.as_u64().expect("a size"));
        let begin = *end;
        *end += 4 * elements.product::<u64>();
        entries.insert(name.clone(), json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, *end]}));
        places.insert(name.clone(), json!(format!("model-{shard}.safetensors")));
    }
    for name in ["tokenizer.json", "spiece.model", "generation_config.json"] {
        if scene.path(&format!("model/{name}")).exists() {
            scene.write(&format!("{directory}/{name}"), scene.read(&format!("model/{name}")));
        }
    }
    scene.write(&format!("{directory}/config.json"), config.to_string());
    scene.write(&format!("{directory}/model.safetensors.index.json"), json!({"weight_map": places}).to_string());
    for (number, (entries, end)) in shards.iter().enumerate() {
        let header = Value::from(entries.clone()).to_string();
        let beginning = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
        let path = scene.write(&format!("{directory}/model-{number}.safetensors"), &beginning);
        let file = std::fs::File::options().write(true).open(path).expect("a shard");
        file.set_len(beginning.len() as u64 + end).expect("zeros");
    }
    shards.iter().map(|(_, end)| end).sum()
}

#[test]
fn the_peak_of_a_trim_does_not_depend_on_the_size_of_the_shards() {
    let scene = Scene::new();
    model(&scene);
    scene.write("rows.jsonl", "{\"prompt\": \"the quick brown fox\", \"response\": \"jumps over\"}\n");
    let [small, large] = [32, 1024].map(|width| {
        let (directory, output) = (format!("wide{width}"), format!("trimmed{width}"));
        let bytes = wide_model(&scene, &directory, width);
        let words = ["trim-vocab", "--model", &directory, "--keep-used", "rows.jsonl", "--json", "-o", &output];
        let json = scene.run(&words).expect_code(0).json();
        (bytes, json["peak_rss_bytes"].as_u64().expect("bytes"))
    });
    assert!(large.0 > small.0 + (200 << 20), "{small:?} {large:?}");
    assert!(large.1 < small.1 + (24 << 20), "{small:?} {large:?}");
}
