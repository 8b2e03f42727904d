//! `eval` and `generate` in a budget: weights in the model's files or in memory, with the same results.

use serde_json::Value;

use crate::run::{Ran, Scene, repository, short};

/// A scene with a run of a model whose weights exceed the process's own memory.
fn trained(more: &[&str]) -> Scene {
    let scene = Scene::new();
    let shape = "model.overrides={ d_model = 128, d_kv = 32, d_ff = 8192, num_heads = 4, num_layers = 2 }";
    let wide = ["--set", shape, "--set", "train.max_steps=2", "--set", "train.eval_samples=1"];
    scene.run(&short(&[&wide[..], more].concat())).expect_code(0);
    scene
}

fn eval(scene: &Scene, more: &[&str]) -> Ran {
    let rows = repository().join("data/sample-validation.parquet").display().to_string();
    let usual = ["eval", "--model", "run/model", "--data", &rows, "--samples", "12", "--generate-samples", "4"];
    let lengths = ["--set", "train.eval_max_new_tokens=6", "--batch-samples", "1", "--json"];
    scene.run(&[&usual[..], &lengths, more].concat())
}

fn generate(scene: &Scene, more: &[&str]) -> Ran {
    let usual = ["generate", "--model", "run/model", "--prompt", "after 75", "--prompt", "before 12"];
    scene.run(
        &[&usual[..], &["--max-new-tokens", "6", "--max-source-tokens", "32", "--batch-samples", "1"], more].concat(),
    )
}

/// The budget that a refusal's hint names.
fn smallest(refused: &Ran) -> String {
    let hint = refused.err.lines().find(|line| line.starts_with("hint: ")).expect("a hint");
    hint.split_whitespace().find(|word| word.ends_with("MiB")).expect("a size").to_owned()
}

/// Results without the fields that describe how they were computed.
fn figures(mut evaluated: Value) -> Value {
    let fields = evaluated.as_object_mut().expect("an object");
    for key in ["weights", "copied_weight_bytes", "predicted_peak_bytes", "peak_rss_bytes"] {
        assert!(fields.remove(key).is_some(), "{key}");
    }
    evaluated
}

/// Whether the system can map files.
const MAPS: bool = cfg!(all(target_os = "linux", target_pointer_width = "64"));

#[test]
fn weights_that_stay_in_the_model_s_files_give_the_same_figures_and_answers() {
    let bf16 = ["--set", "train.precision=bf16", "--set", "train.master_weights=stochastic-rounding"];
    for stored in [&[][..], &bf16] {
        let scene = trained(stored);
        for precision in ["f32", "bf16"] {
            let at = |place: &str| {
                let pin = format!("memory.weight_offload={place}");
                let chunk = ["--set", "memory.loss_chunk_rows=64", "--set", &pin, "--precision", precision];
                eval(&scene, &chunk).expect_code(0).json()
            };
            let (memory, disk) = (at("none"), at("disk"));
            assert_eq!((&memory["weights"], &disk["weights"]), (&"memory".into(), &"disk".into()));
            assert_eq!(disk["copied_weight_bytes"], 0, "they are used as they are stored");
            let peak = |evaluated: &Value| evaluated["peak_rss_bytes"].as_u64().expect("bytes");
            assert!(!MAPS || peak(&disk) + (8 << 20) < peak(&memory), "{} of {}", peak(&disk), peak(&memory));
            assert_eq!(figures(memory), figures(disk), "{precision}");
            let budget = smallest(&generate(&scene, &["--memory-budget", "10MiB", "--precision", precision]));
            let small = generate(&scene, &["--memory-budget", &budget, "--precision", precision]).expect_code(0);
            let ample = generate(&scene, &["--memory-budget", "2GiB", "--precision", precision]).expect_code(0);
            assert_eq!(small.out, ample.out, "{precision} in {budget}");
        }
    }
}

#[test]
fn the_smallest_budget_that_a_refusal_names_holds_and_is_less_than_the_weights_would_take() {
    let scene = trained(&[]);
    let budget = smallest(&eval(&scene, &["--memory-budget", "10MiB"]).expect_code(3));
    let evaluated = eval(&scene, &["--memory-budget", &budget]).expect_code(0).json();
    let bytes = budget.trim_end_matches("MiB").parse::<u64>().expect("a number") << 20;
    let peak = evaluated["peak_rss_bytes"].as_u64().expect("bytes");
    let predicted = evaluated["predicted_peak_bytes"].as_u64().expect("bytes");
    assert!(peak <= bytes && predicted <= bytes, "{peak} held, {predicted} predicted, in {budget}");
    assert_eq!(evaluated["weights"], "disk");
    let whole = eval(&scene, &["--memory-budget", "10MiB", "--set", "memory.weight_offload=none"]).expect_code(3);
    let whole = smallest(&whole).trim_end_matches("MiB").parse::<u64>().expect("a number") << 20;
    assert!(bytes + (16 << 20) < whole, "{bytes} with weights in files, {whole} with all in memory");
}

#[test]
fn weights_in_another_precision_than_they_are_stored_in_are_copied_to_a_file_that_leaves_nothing() {
    let scene = trained(&[]);
    let asked = ["--set", "train.precision=bf16", "--set", "train.master_weights=nearest-rounding"];
    let chunk = ["--set", "memory.loss_chunk_rows=64"];
    let at = |place: &str, more: &[&str]| {
        let pin = format!("memory.weight_offload={place}");
        eval(&scene, &[&asked[..], &chunk, &["--set", &pin], more].concat())
    };
    std::fs::create_dir(scene.path("files")).expect("a directory");
    let disk = at("disk", &["--offload-dir", "files"]).expect_code(0);
    assert!(!MAPS || disk.err.contains("of weights are copied to a file in files"), "{}", disk.err);
    assert!(disk.json()["copied_weight_bytes"].as_u64() > Some(0));
    assert!(scene.names("files").is_empty(), "{:?}", scene.names("files"));
    assert_eq!(figures(disk.json()), figures(at("none", &[]).expect_code(0).json()));
    at("disk", &["--offload-dir", "absent"]).expect_code(2).expect_words(&["absent", "--offload-dir"]);
}

#[test]
fn a_dry_run_prints_the_bill_and_computes_nothing() {
    let scene = trained(&[]);
    let words = ["Memory plan", "parameters", "safety margin", "predicted peak"];
    for bill in [eval(&scene, &["--dry-run"]), generate(&scene, &["--dry-run"])] {
        let bill = bill.expect_code(0).expect_words(&words);
        assert!(!bill.out.contains("training"), "{}", bill.out);
    }
}
