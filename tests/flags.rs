//! Flags do what they say: names of models, lists of files, strings.

use crate::run::{Scene, repository, short};

fn rows(scene: &Scene, name: &str, count: usize) {
    let row = |number: usize| {
        format!("{{\"prompt\":\"how many legs have {number} cats\",\"response\":\"{}\"}}\n", 4 * number)
    };
    scene.write(name, (0..count).map(row).collect::<String>());
}

#[test]
fn the_name_of_a_pretrained_model_is_never_a_shape() {
    let scene = Scene::new();
    rows(&scene, "rows.jsonl", 8);
    let names =
        [&["--model", "t5-small"][..], &["--model_name_or_path", "t5-small"], &["--set", "model.init_from=t5-small"]];
    let train = |name: &[&str], output: &str| {
        let run = ["--data", "rows.jsonl", "--max-steps", "1", "--output", output];
        scene.run_under("env HF_HOME=cache", &[name, &run].concat())
    };
    for name in names {
        train(name, "absent").expect_code(4).expect_words(&[
            "no such model",
            "`hf download t5-small`",
            "`--preset t5-small`",
        ]);
    }
    scene.run(&short(&["--max-steps", "2"])).expect_code(0);
    for (number, repository) in ["models--t5-small", "models--google-t5--t5-small"].into_iter().enumerate() {
        let snapshot = format!("cache/hub/{repository}/snapshots/1");
        for file in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
            scene.write(&format!("{snapshot}/{file}"), scene.read(&format!("run/model/{file}")));
        }
        for (place, name) in names.into_iter().enumerate() {
            let ran = train(name, &format!("run-{number}-{place}")).expect_code(0);
            assert!(ran.out.contains("from t5-small"), "{name:?}: {}", ran.out);
        }
        std::fs::remove_dir_all(scene.path("cache")).expect("the cache");
    }
}

#[test]
fn files_that_are_named_one_after_the_other_add_up() {
    let scene = Scene::new();
    rows(&scene, "a.jsonl", 5);
    rows(&scene, "b.jsonl", 6);
    rows(&scene, "c.jsonl", 7);
    let tokenizer = repository().join("data/sample-tokenizer.json").display().to_string();
    let usual = ["--preset", "tiny", "--tokenizer", &tokenizer, "--max-steps", "1", "--batch-size", "4", "--output"];
    for (number, data) in [
        &["--data", "a.jsonl", "--data", "b.jsonl", "--validation", "c.jsonl"][..],
        &["--data", "a.jsonl", "b.jsonl", "--validation", "c.jsonl"],
        &["--train_file", "a.jsonl", "--data", "b.jsonl", "--validation_file", "c.jsonl"],
        &["--set", "data.train=[\"a.jsonl\", \"b.jsonl\"]", "--set", "data.validation=c.jsonl"],
    ]
    .into_iter()
    .enumerate()
    {
        let output = format!("run-{number}");
        let ran = scene.run(&[&usual[..], &[&output], data].concat()).expect_code(0);
        assert!(ran.out.contains("11 rows, 7 rows for validation"), "{data:?}: {}", ran.out);
    }
    let stray = scene.run(&["--preset", "tiny", "--lr", "1e-3", "b.jsonl", "--data", "a.jsonl"]);
    stray.expect_code(2).expect_words(&["unexpected argument `b.jsonl`", "`--data b.jsonl`"]);
}

#[test]
fn a_prefix_is_kept_to_the_byte_in_every_file_and_when_a_run_is_resumed() {
    let scene = Scene::new();
    rows(&scene, "rows.jsonl", 8);
    scene.write("prefix.toml", "[data]\nsource_prefix = \"summarize: \"\n");
    let check = |run: &str| {
        let config = String::from_utf8(scene.read(&format!("{run}/model/config.json"))).expect("UTF-8");
        let resolved = String::from_utf8(scene.read(&format!("{run}/resolved.toml"))).expect("UTF-8");
        assert!(resolved.contains("source_prefix = \"summarize: \" #"), "{resolved}");
        assert!(config.contains("\"prefix\": \"summarize: \""), "{config}");
    };
    for (number, given) in [
        &["--source_prefix", "summarize: "][..],
        &["--set", "data.source_prefix=summarize: "],
        &["--set", "data.source_prefix = \"summarize: \""],
        &["--config", "prefix.toml"],
    ]
    .into_iter()
    .enumerate()
    {
        let run = format!("run-{number}");
        let tokenizer = repository().join("data/sample-tokenizer.json").display().to_string();
        let usual = ["--preset", "tiny", "--tokenizer", &tokenizer, "--data", "rows.jsonl", "--output", &run];
        scene.run(&[&usual[..], given, &["--max-steps", "2"]].concat()).expect_code(0);
        check(&run);
        scene.run(&["--output", &run, "--keep-training", "--max-steps", "3"]).expect_code(0);
        check(&run);
    }
}
