//! Models by their users' names, and the tokenizers that belong to them.

use crate::run::{Ran, Scene, short};

fn answers(scene: &Scene, model: &str) -> Ran {
    let arguments = ["generate", "--model", model, "--prompt", "12 in words", "--max-new-tokens", "4"];
    scene.run_after("export HF_HOME=$PWD/home HF_HUB_CACHE=", &arguments)
}

#[test]
fn a_model_is_found_by_its_run_and_by_its_id_in_the_local_cache_of_the_hub() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "train.max_steps=1"])).expect_code(0);
    let expected = answers(&scene, "run/model").expect_code(0).out;
    assert_eq!(answers(&scene, "run").expect_code(0).out, expected);
    // The layout of `huggingface_hub`: links into a directory of contents.
    let repository = "home/hub/models--org--name";
    for (number, name) in scene.names("run/model").into_iter().enumerate() {
        scene.write(&format!("{repository}/blobs/{number}"), scene.read(&format!("run/model/{name}")));
        scene.shell(&format!(
            "mkdir -p {repository}/snapshots/77 && ln -s ../../blobs/{number} {repository}/snapshots/77/{name}"
        ));
    }
    scene.write(&format!("{repository}/refs/main"), "77");
    assert_eq!(answers(&scene, "org/name").expect_code(0).out, expected);
    // The other files of the tokenizer are copied to the next model.
    scene.write(&format!("{repository}/snapshots/77/special_tokens_map.json"), "{}");
    let tuning = ["--finetune", "--set", "model.init_from=org/name", "--max-steps", "1", "--output", "tuned"];
    scene.run_after("export HF_HOME=$PWD/home HF_HUB_CACHE=", &short(&tuning)).expect_code(0);
    assert!(scene.names("tuned/model").contains(&"special_tokens_map.json".to_owned()));
    let again = ["--finetune", "--set", "model.init_from=tuned", "--max-steps", "1", "--dry-run", "--output", "next"];
    scene.run(&short(&again)).expect_code(0);
    assert!(scene.names(".").iter().all(|name| !name.contains("tmp")), "{:?}", scene.names("."));
}

#[test]
fn a_model_that_is_not_there_is_said_to_be_missing_with_what_would_fetch_it() {
    let scene = Scene::new();
    let check = |model: &str, words: &[&str]| {
        let ran = answers(&scene, model).expect_code(4);
        assert!(words.iter().all(|word| ran.err.contains(word)), "{}", ran.err);
        assert!(!ran.err.contains("train-tokenizer"), "{}", ran.err);
    };
    check("org/absent", &["org/absent: no such directory", "home/hub", "`hf download org/absent`"]);
    scene.write("runs/fine/config.json", "{\"model_type\": \"bart\"}");
    check("runs/fin", &["runs/fin: no such directory", "did you mean `runs/fine`?"]);
    check("runs/fine", &["the model is `bart`, expected one of the T5 family"]);
    check("runs", &["no config.json in it"]);
    scene.write("adapter/adapter_config.json", "{}");
    scene.write("rows.jsonl", "{\"prompt\": \"a\", \"response\": \"b\"}\n");
    let train = scene.run(&["--model", "adapter", "--data", "rows.jsonl", "--output", "next"]).expect_code(4);
    train.expect_words(&["it is an adapter", "--model BASE --set lora.init_from=adapter"]);
    scene.write("runs/fine/config.json", "{\"model_type\": \"t5\"}");
    check("runs/fine", &["no tokenizer in it: expected tokenizer.json, spiece.model, tokenizer.model, or vocab.json"]);
}

#[test]
fn a_tokenizer_that_is_not_the_models_own_is_warned_about() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "train.max_steps=1"])).expect_code(0);
    scene.write("some.txt", "words of another language, and some more of them\n".repeat(50));
    let train = ["train-tokenizer", "--input", "some.txt", "--vocab-size", "400", "--output", "other.json"];
    scene.run(&train).expect_code(0);
    scene.write("same.json", scene.read("run/model/tokenizer.json"));
    // Tokens were added to the tokenizer alone.
    let mut small: serde_json::Value = serde_json::from_slice(&scene.read("run/model/config.json")).expect("JSON");
    let entries = std::mem::replace(&mut small["vocab_size"], 200.into());
    scene.write("small/config.json", small.to_string());
    scene.write("small/tokenizer.json", scene.read("same.json"));
    answers(&scene, "small").expect_code(4).expect_words(&[&format!("model.resize_token_embeddings({entries})")]);
    for (tokenizer, warns) in [("other.json", true), ("same.json", false)] {
        let tokenizer = format!("data.tokenizer={tokenizer}");
        let from = ["--set", "model.init_from=run", "--set", &tokenizer, "--dry-run", "--output", "next"];
        let ran = scene.run(&short(&from)).expect_code(0);
        assert_eq!(ran.err.contains("differs from the model's own tokenizer"), warns, "{}", ran.err);
    }
}

#[test]
fn weights_whose_names_have_the_prefix_of_a_wrapper_are_read_and_that_is_said() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    let answer = |model: &str| scene.run(&["generate", "--model", model, "--prompt", "12 in words"]).expect_code(0);
    let expected = answer("run/model").out;
    let whole = scene.read("run/model/model.safetensors");
    let length = usize::try_from(u64::from_le_bytes(*whole.first_chunk().expect("a length"))).expect("a header");
    let header: serde_json::Value = serde_json::from_slice(&whole[8..8 + length]).expect("JSON");
    for prefix in ["module.", "_orig_mod.", "_orig_mod.module."] {
        let named = |name: &String| if name == "__metadata__" { name.clone() } else { format!("{prefix}{name}") };
        let tensors = header.as_object().expect("tensors").iter();
        let wrapped: serde_json::Map<_, _> = tensors.map(|(name, tensor)| (named(name), tensor.clone())).collect();
        let wrapped = serde_json::to_vec(&wrapped).expect("JSON");
        let bytes = [&(wrapped.len() as u64).to_le_bytes()[..], &wrapped, &whole[8 + length..]].concat();
        for name in scene.names("run/model") {
            scene.write(&format!("wrapped/{name}"), scene.read(&format!("run/model/{name}")));
        }
        scene.write("wrapped/model.safetensors", bytes);
        let ran = answer("wrapped");
        assert_eq!(ran.out, expected, "{prefix}");
        assert!(ran.err.contains(&format!("begin with `{prefix}`")), "{}", ran.err);
    }
}

#[test]
fn a_tokenizer_with_more_entries_than_the_model_has_rows_answers_nothing() {
    let scene = Scene::new();
    scene.run(&short(&["--max-steps", "1"])).expect_code(0);
    let rows = scene.path("run/sample-data/sample-train.parquet").display().to_string();
    let make = ["train-tokenizer", "--input", &rows, "--vocab-size", "400", "--output", "small.json"];
    scene.run(&make).expect_code(0);
    let model =
        ["--preset", "tiny", "--tokenizer", "small.json", "--data", &rows, "--max-steps", "1", "--output", "small"];
    scene.run(&model).expect_code(0);
    scene.write("small/model/tokenizer.json", scene.read("run/model/tokenizer.json"));
    for command in [
        &["generate", "small", "x"][..],
        &["serve", "small", "--dry-run"],
        &["eval", "--model", "small", "--data", &rows],
    ] {
        scene.run(command).expect_code(4).expect_words(&["entries, expected at most the 400 rows", "hint: "]);
    }
}

/// Changes a JSON file of a scene.
fn edit(scene: &Scene, name: &str, change: impl FnOnce(&mut serde_json::Value)) {
    let mut json = serde_json::from_slice(&scene.read(name)).expect("JSON");
    change(&mut json);
    scene.write(name, json.to_string());
}

#[test]
fn what_files_of_a_model_say_against_each_other_is_named_once() {
    let scene = Scene::new();
    scene.run(&short(&["--max-steps", "1"])).expect_code(0);
    let check = |name: &str, expected: &str, change: &dyn Fn(&str)| {
        for file in scene.names("run/model") {
            scene.write(&format!("{name}/{file}"), scene.read(&format!("run/model/{file}")));
        }
        change(name);
        let ran = scene.run(&["generate", "--model", name, "--prompt", "12", "--max-new-tokens", "2"]).expect_code(0);
        let warnings: Vec<&str> = ran.err.lines().filter(|line| line.starts_with("warning: ")).collect();
        let is_expected = warnings.len() == usize::from(!expected.is_empty()) && ran.err.contains(expected);
        assert!(is_expected, "{name}: {}", ran.err);
    };
    check("right", "", &|_| {});
    check("untied", "the shared table is the head, as in transformers 5", &|name| {
        edit(&scene, &format!("{name}/config.json"), |json| json["tie_word_embeddings"] = false.into());
    });
    check("other-head", "`lm_head.weight` has other values: they are the head", &|name| {
        let file = format!("{name}/model.safetensors");
        let whole = scene.read(&file);
        let length = usize::try_from(u64::from_le_bytes(*whole.first_chunk().expect("a length"))).expect("a header");
        let mut header: serde_json::Value = serde_json::from_slice(&whole[8..8 + length]).expect("JSON");
        let mut data = whole[8 + length..].to_vec();
        let mut head = header["shared.weight"].clone();
        let place = |at: usize| usize::try_from(head["data_offsets"][at].as_u64().expect("a number")).expect("a size");
        let (start, size) = (data.len(), place(1) - place(0));
        data.extend(std::iter::repeat_n([0, 0, 0x80, 0x3f], size / 4).flatten()); // ones
        head["data_offsets"] = serde_json::json!([start, start + size]);
        header["lm_head.weight"] = head;
        let header = header.to_string().into_bytes();
        scene.write(&file, [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat());
    });
    check("answers", "answers end with token 5", &|name| {
        edit(&scene, &format!("{name}/generation_config.json"), |json| json["eos_token_id"] = 5.into());
    });
    check("several-ends", "", &|name| {
        edit(&scene, &format!("{name}/generation_config.json"), |json| {
            json["eos_token_id"] = serde_json::json!([5, 1])
        });
    });
    check("template", "its template does not end texts with token 1, `</s>`", &|name| {
        edit(&scene, &format!("{name}/tokenizer.json"), |json| json["post_processor"] = serde_json::Value::Null);
    });
    check("added", "add tokens that it lacks: `<new>`", &|name| {
        drop(scene.write(&format!("{name}/added_tokens.json"), "{\"<new>\": 1024}"));
    });
}
