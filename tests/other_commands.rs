//! `generate`, `inspect`, `train-tokenizer` and `bench`.

use crate::run::{Scene, repository, short};

fn sample_rows() -> String {
    repository().join("data/sample-validation.parquet").display().to_string()
}

#[test]
fn generate_answers_each_prompt() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    scene.write("prompts.txt", "after 75\n日期\n");
    let from = ["generate", "--model", "run/model", "--max-new-tokens", "4"];
    let typed =
        scene.run(&[&from[..], &["--prompt", "after 75", "--prompt", "日期", "--json"]].concat()).expect_code(0);
    let read = scene.run(&[&from[..], &["--input", "prompts.txt", "--json"]].concat()).expect_code(0);
    assert_eq!(typed.out, read.out);
    assert_eq!(typed.out.lines().count(), 2);
    assert!(typed.out.starts_with("{\"prompt\":\"after 75\",\"response\":\""), "{}", typed.out);
}

#[test]
fn inspect_shows_rows_row_groups_and_columns() {
    let scene = Scene::new();
    let rows = sample_rows();
    scene.run(&["inspect", &rows]).expect_code(0).expect_words(&[
        "1,183 rows",
        "row groups",
        "page index",
        "column prompt",
        "column response",
        "to read one row",
    ]);
    let json = scene.run(&["inspect", "--json", &rows]).expect_code(0).json();
    assert_eq!((json["rows"].as_u64(), json["columns"][0]["name"].as_str()), (Some(1183), Some("prompt")));
}

#[test]
fn a_tokenizer_is_trained_from_parquet_or_text_and_never_overwritten() {
    let scene = Scene::new();
    let rows = sample_rows();
    let train = |input: &str, output: &str| {
        scene.run(&["train-tokenizer", "--input", input, "--vocab-size", "400", "--output", output])
    };
    train(&rows, "a.json").expect_code(0).expect_words(&["a.json: 400 entries from 2366 texts"]);
    train(&rows, "b.json").expect_code(0);
    assert_eq!(scene.read("a.json"), scene.read("b.json"));
    train(&rows, "a.json").expect_code(2).expect_words(&["a.json already exists", "hint: `--force`"]);
    scene.write("texts.txt", "one two three\n".repeat(50));
    train("texts.txt", "c.json").expect_code(0).expect_words(&["from 50 texts"]);
    // A new tokenizer, and a preset that takes its size.
    let data = format!("data.train={rows}");
    let arguments = ["--set", &data, "--set", "data.tokenizer=a.json", "--output", "run"];
    scene.run(&short(&arguments)).expect_code(0);
    let config: serde_json::Value = serde_json::from_slice(&scene.read("run/model/config.json")).expect("JSON");
    assert_eq!(config["vocab_size"], 400);
}

#[test]
fn bench_prints_the_keys_of_the_interface() {
    let scene = Scene::new();
    let shape = [
        "bench",
        "--model",
        "tiny",
        "--batch",
        "4",
        "--source-tokens",
        "8",
        "--target-tokens",
        "8",
        "--steps",
        "2",
        "--json",
    ];
    for more in [
        &["--precision", "f32"][..],
        &["--precision", "bf16"],
        &["--recompute", "full"],
        &["--recompute", "2", "--micro-batch", "1"],
    ] {
        let bench = scene.run(&[&shape[..], more].concat()).expect_code(0).json();
        for key in ["step_ms", "tokens_per_second", "peak_rss_bytes", "predicted_peak_bytes", "parameters", "threads"] {
            assert!(bench[key].as_f64() > Some(0.0), "{key} in {bench}");
        }
        assert!(bench["precision"].is_string());
    }
}

#[test]
fn a_profile_says_where_the_time_of_a_step_goes() {
    let scene = Scene::new();
    let shape = ["bench", "--model", "tiny", "--batch", "2", "--source-tokens", "8", "--target-tokens", "8"];
    let profiled = [&shape[..], &["--steps", "2", "--profile"]].concat();
    let bench = scene.run(&[&profiled[..], &["--json"]].concat()).expect_code(0).json();
    let profile = &bench["profile"];
    let number = |of: &serde_json::Value, key: &str| of[key].as_f64().unwrap_or_else(|| panic!("{key} in {of:#}"));
    assert!(number(profile, "peak_gflops_per_second") > 0.0);
    assert!(number(&profile["step"], "allocated_bytes") > 0.0 && number(&profile["step"], "allocations") > 0.0);
    let operations = profile["operations"].as_array().expect("operations");
    let sum: f64 = operations.iter().map(|operation| number(operation, "ms")).sum();
    let step = number(&profile["step"], "ms");
    assert!((sum - step).abs() <= 1e-3 * step, "the parts take {sum} ms and the step {step}");
    for name in ["linear", "linear_backward_input", "linear_backward_weight", "attention", "attention_backward"] {
        let operation = operations.iter().find(|operation| operation["name"] == name).expect(name);
        assert!(number(operation, "calls") > 0.0 && number(operation, "gflops_per_second") > 0.0, "{operation}");
    }
    scene.run(&profiled).expect_code(0).expect_words(&["of peak", "outside of operations", "allocations"]);
    assert!(scene.run(&[&shape[..], &["--steps", "1", "--json"]].concat()).expect_code(0).json()["profile"].is_null());
}

#[test]
fn span_corruption_trains_on_one_text_column() {
    let scene = Scene::new();
    let texts =
        ["the quick brown fox jumps over the lazy dog", "a stitch in time saves nine", "all that glitters is not gold"];
    crate::files::write_rows(
        &scene.path("texts.parquet"),
        &[("text", texts.repeat(4).into_iter().map(Some).collect())],
    );
    let rows = ["--set", "data.train=texts.parquet", "--set", "data.validation=texts.parquet"];
    let usual = [&rows[..], &["--set", "train.max_steps=2", "--set", "train.eval_generate_samples=1"]].concat();
    // The sample tokenizer has sentinels.
    let spans = ["data.objective=span-corruption", "data.noise_density=0.3", "data.mean_span_tokens=2.0"];
    let mixture = ["data.denoisers=[{ noise_density = 0.4 }, { objective = \"prefix-lm\" }]"];
    for (output, settings) in [("spans", &spans[..]), ("mixture", &mixture)] {
        let settings = settings.iter().flat_map(|setting| ["--set", setting]);
        let arguments: Vec<&str> = usual.iter().copied().chain(settings).chain(["--output", output]).collect();
        let evaluates = format!("eval --model {output}/model --data texts.parquet");
        let words = ["step 2/2", "--data pairs.csv", &evaluates];
        let ran = scene.run(&short(&arguments)).expect_code(0).expect_words(&words);
        assert!(!ran.out.contains("generate --model"), "{}", ran.out);
        // `eval` makes the same spans, or cuts the same texts, as the run did.
        let last = scene.events(output, "eval").pop().expect("an evaluation");
        let evaluated =
            scene.run(&["eval", "--model", output, "--data", "texts.parquet", "--json"]).expect_code(0).json();
        let loss = |of: &serde_json::Value| of["loss"].as_f64().expect("a loss");
        assert_eq!(evaluated["target_tokens"], last["target_tokens"]);
        assert!((loss(&evaluated) - loss(&last)).abs() < 1e-5, "{evaluated} {last}");
    }
}

#[test]
fn denoisers_are_drawn_alike_after_a_resume() {
    let scene = Scene::new();
    let text = |row: usize| {
        format!("row {row} of a text with words enough to hide some, such as {} and {}", row * 7, row * 11)
    };
    let texts: Vec<String> = (0..40).map(text).collect();
    crate::files::write_rows(
        &scene.path("texts.parquet"),
        &[("text", texts.iter().map(|text| Some(text.as_str())).collect())],
    );
    let data = ["--set", "data.train=texts.parquet", "--set", "train.batch_size=4", "--set", "train.epochs=1"];
    for (number, (objective, words)) in [
        ("data.objective=ul2", "`text` by 7 denoisers"),
        ("data.objective=prefix-lm", "the beginning of `text` to its"),
        (
            "data.denoisers=[{ noise_density = 0.5, prefix = \"[X] \" }, { objective = \"prefix-lm\", weight = 2 }]",
            "`text` by 2 denoisers",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let run = |output: &str, more: &[&str]| {
            scene.run(&short(&[&data[..], &["--set", objective, "--output", output], more].concat()))
        };
        let (whole, parts) = (format!("whole{number}"), format!("parts{number}"));
        run(&whole, &["--max-steps", "5"]).expect_code(0).expect_words(&[words]);
        run(&parts, &["--max-steps", "2"]).expect_code(0);
        run(&parts, &["--max-steps", "5", "--keep-training"]).expect_code(0);
        let model = |run: &str| scene.read(&format!("{run}/model/model.safetensors"));
        assert_eq!(model(&whole), model(&parts), "{objective}");
        let tokens = |run: &str| -> Vec<u64> {
            scene.events(run, "step").iter().map(|step| step["target_tokens"].as_u64().expect("a count")).collect()
        };
        assert_eq!(tokens(&whole), tokens(&parts));
    }
    let other = ["--set", "data.objective=span-corruption", "--output", "whole0", "--keep-training"];
    scene.run(&short(&[&data[..], &other].concat())).expect_code(2).expect_words(&["data.objective"]);
    let wrong = ["--set", "data.denoisers=[{ mean_span = 3 }]"];
    scene.run(&short(&[&data[..], &wrong].concat())).expect_code(2).expect_words(&["denoiser 1", "mean_span_tokens"]);
}
