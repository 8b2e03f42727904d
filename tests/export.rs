//! `export`: files for other programs, their cards, and refusals.

use crate::run::{Scene, repository, short};

/// A run of two steps with a tokenizer of unigrams.
fn with_unigrams(scene: &Scene, run: &str, more: &[&str]) {
    let spiece = repository().join("crates/dataloader/tests/goldens/sentence_piece/T5/spiece.model");
    let tokenizer = format!("data.tokenizer={}", spiece.display());
    let arguments = ["--set", &tokenizer, "--set", "train.eval_every_steps=2", "--output", run];
    scene.run(&short(&[&arguments[..], more].concat())).expect_code(0);
}

fn length(scene: &Scene, name: &str) -> u64 {
    std::fs::metadata(scene.path(name)).expect("a file").len()
}

#[test]
fn export_writes_gguf_as_a_file_or_a_directory_with_the_scores_of_the_run() {
    let scene = Scene::new();
    with_unigrams(&scene, "run", &[]);
    let export = |more: &[&str]| scene.run(&[&["export", "--model", "run", "--format", "gguf"], more].concat());
    let json = export(&["--output", "deep/model.gguf", "--json"]).expect_code(0).json();
    assert_eq!((json["format"].as_str(), json["dtype"].as_str()), (Some("gguf"), Some("f32")), "{json}");
    assert_eq!(json["bytes"].as_u64(), Some(length(&scene, "deep/model.gguf")));
    assert_eq!(scene.names("deep"), ["model.gguf"]);
    let before = scene.read("deep/model.gguf");
    assert!(before.starts_with(b"GGUF\x03\0\0\0"));
    export(&["--output", "deep/model.gguf"]).expect_code(2).expect_words(&["already exists", "`--force`"]);
    export(&["--output", "deep/model.gguf", "--force"]).expect_code(0).expect_words(&["matrices in f32", "peak"]);
    assert_eq!(scene.read("deep/model.gguf"), before, "the same bytes again");
    for dtype in ["f16", "bf16", "q8_0"] {
        export(&["--output", "narrow", "--dtype", dtype, "--force"]).expect_code(0);
    }
    // A file of a narrower dtype is written beside the first, and keeps the first card.
    assert_eq!(scene.names("narrow"), ["README.md", "model-bf16.gguf", "model-f16.gguf", "model-q8_0.gguf"]);
    assert!(length(&scene, "narrow/model-q8_0.gguf") < length(&scene, "narrow/model-f16.gguf"));
    let card = String::from_utf8(scene.read("narrow/README.md")).expect("text");
    let finished: serde_json::Value = serde_json::from_slice(&scene.read("run/finished.json")).expect("JSON");
    let loss = finished["history"]["last_evaluation"]["loss"].as_f64().expect("a loss");
    for words in [
        "# run\n",
        "library_name: gguf",
        &format!("| loss | {loss:.4} |"),
        "after step 6",
        "llama-completion -m model-f16.gguf",
    ] {
        assert!(card.contains(words), "{words}\n{card}");
    }
}

#[test]
fn export_writes_a_directory_of_ctranslate2_and_leaves_a_card_of_the_user() {
    let scene = Scene::new();
    scene.run(&short(&["--output", "run"])).expect_code(0);
    let export = |more: &[&str]| scene.run(&[&["export", "--model", "run", "--format", "ctranslate2"], more].concat());
    export(&["--output", "served"]).expect_code(0);
    let files = ["README.md", "config.json", "model.bin", "shared_vocabulary.json"];
    assert_eq!(scene.names("served"), files);
    let wide = length(&scene, "served/model.bin");
    let vocabulary: Vec<String> = serde_json::from_slice(&scene.read("served/shared_vocabulary.json")).expect("JSON");
    let config: serde_json::Value = serde_json::from_slice(&scene.read("run/model/config.json")).expect("JSON");
    assert_eq!(config["vocab_size"].as_u64(), Some(vocabulary.len() as u64));
    scene.write("served/README.md", "mine");
    scene.write("served/notes.txt", "mine, too");
    export(&["--output", "served", "--dtype", "int8"]).expect_code(2);
    let ran = export(&["--output", "served", "--dtype", "int8", "--force"]).expect_code(0);
    ran.expect_words(&["README.md stays as it is"]);
    assert_eq!(
        (scene.read("served/README.md"), scene.read("served/notes.txt")),
        (b"mine".to_vec(), b"mine, too".to_vec())
    );
    assert!(length(&scene, "served/model.bin") * 3 < wide);
    assert_eq!(scene.names("."), ["run", "served"], "nothing else is left");
}

#[test]
fn export_merges_an_adapter_on_the_way() {
    let scene = Scene::new();
    with_unigrams(&scene, "first", &[]);
    let rows = format!("data.train={}", repository().join("data/sample-train.parquet").display());
    let tune = ["--lora", "--set", "model.init_from=first", "--set", &rows, "--set", "train.batch_size=4"];
    scene.run(&[&tune[..], &["--max-steps", "2", "--output", "tuned"]].concat()).expect_code(0);
    scene.run(&["merge", "--adapter", "tuned", "--output", "merged"]).expect_code(0);
    let export = |model: &str, output: &str| {
        scene.run(&["export", "--model", model, "--format", "ctranslate2", "--output", output]).expect_code(0);
        scene.read(&format!("{output}/model.bin"))
    };
    let [merged, adapted, base] = [export("merged", "a"), export("tuned", "b"), export("first", "c")];
    assert!(merged == adapted && merged != base);
}

#[test]
fn export_refuses_what_a_format_cannot_hold_and_leaves_nothing() {
    let scene = Scene::new();
    scene.run(&short(&["--output", "run"])).expect_code(0);
    let export = |more: &[&str]| scene.run(&[&["export", "--output", "out"], more].concat());
    let gguf = |more: &[&str]| export(&[&["--model", "run", "--format", "gguf"], more].concat());
    gguf(&[]).expect_code(4).expect_words(&["the tokenizer is byte pairs", "hint:", "--format ctranslate2"]);
    gguf(&["--dtype", "int8"]).expect_code(2).expect_words(&["q8_0"]);
    export(&["--model", "run", "--format", "ctranslate2", "--dtype", "bf16"])
        .expect_code(2)
        .expect_words(&["f32 or int8"]);
    export(&["--model", "run", "--format", "onnx"]).expect_code(2).expect_words(&["gguf, ctranslate2"]);
    gguf(&["--dtype", "fp4"]).expect_code(2);
    export(&["--model", "absent", "--format", "gguf"]).expect_code(4);
    scene.run(&["convert-base", "--model", "run", "--precision", "nf4", "-o", "narrow"]).expect_code(0);
    let narrow = export(&["--model", "narrow", "--format", "ctranslate2"]).expect_code(4);
    narrow.expect_words(&["quantization_config", "the model that these weights were made from"]);
    let onto = scene.run(&["export", "--model", "run", "--format", "ctranslate2", "--force", "--output", "run"]);
    onto.expect_code(2).expect_words(&["has the model or the adapter in it"]);
    std::fs::create_dir(scene.path("mine")).expect("a directory");
    scene.run(&["export", "--model", "run", "--format", "ctranslate2", "--force", "--output", "mine"]).expect_code(2);
    assert_eq!(scene.names("."), ["mine", "narrow", "run"]);
    // Without the tokenizer there is nothing to refuse.
    gguf(&["--gguf-names", "hf"]).expect_code(0);
    assert_eq!(scene.names("out"), ["README.md", "model-f32.gguf"]);
}

/// A directory with a T5 of one block and a table of 128 MiB. All weights are zero, so they take no space on the disk.
fn wide(scene: &Scene) {
    const ROWS: usize = 1 << 16;
    const WIDTH: usize = 512;
    let config = serde_json::json!({
        "model_type": "t5", "vocab_size": ROWS, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_heads": 2,
        "num_layers": 1, "feed_forward_proj": "relu", "tie_word_embeddings": true, "eos_token_id": 1, "pad_token_id": 0,
    });
    let (inner, mut tensors) = (16, vec![("shared.weight".to_owned(), vec![ROWS, WIDTH])]);
    for stack in ["encoder", "decoder"] {
        let block = format!("{stack}.block.0.layer");
        let kinds =
            if stack == "decoder" { vec!["0.SelfAttention", "1.EncDecAttention"] } else { vec!["0.SelfAttention"] };
        for kind in &kinds {
            tensors.extend(["q", "k", "v"].map(|name| (format!("{block}.{kind}.{name}.weight"), vec![inner, WIDTH])));
            tensors.push((format!("{block}.{kind}.o.weight"), vec![WIDTH, inner]));
        }
        let last = kinds.len();
        tensors.push((format!("{block}.0.SelfAttention.relative_attention_bias.weight"), vec![32, 2]));
        tensors.push((format!("{block}.{last}.DenseReluDense.wi.weight"), vec![64, WIDTH]));
        tensors.push((format!("{block}.{last}.DenseReluDense.wo.weight"), vec![WIDTH, 64]));
        tensors.extend((0..=last).map(|layer| (format!("{block}.{layer}.layer_norm.weight"), vec![WIDTH])));
        tensors.push((format!("{stack}.final_layer_norm.weight"), vec![WIDTH]));
    }
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors {
        let start = end;
        end += 4 * shape.iter().product::<usize>();
        header.insert(name, serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [start, end]}));
    }
    let mut header = serde_json::Value::Object(header).to_string();
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    std::fs::create_dir(scene.path("wide")).expect("a directory");
    scene.write("wide/config.json", config.to_string());
    let start = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    let weights = scene.write("wide/model.safetensors", &start);
    let file = std::fs::OpenOptions::new().write(true).open(weights).expect("a file");
    file.set_len((start.len() + end) as u64).expect("zeros");
    let spiece = repository().join("crates/dataloader/tests/goldens/sentence_piece/T5/spiece.model");
    std::fs::copy(spiece, scene.path("wide/spiece.model")).expect("a copy");
}

#[test]
fn export_holds_a_few_rows_of_a_model_that_is_larger() {
    let scene = Scene::new();
    wide(&scene);
    for (format, dtype, output) in [("gguf", "q8_0", "wide.gguf"), ("ctranslate2", "int8", "served")] {
        let arguments =
            ["export", "--model", "wide", "--format", format, "--dtype", dtype, "--output", output, "--json"];
        let json = scene.run(&arguments).expect_code(0).json();
        let peak = json["peak_rss_bytes"].as_u64().expect("bytes");
        assert!(json["bytes"].as_u64() > Some(32 << 20) && peak < 64 << 20, "{json}");
    }
}
