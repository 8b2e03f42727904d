//! The embedded default, for a few steps: its files, its results, and the same results again.

use crate::run::{Scene, short};
use serde_json::Value;

#[test]
fn the_default_run_needs_nothing_and_leaves_what_the_interface_says() {
    let scene = Scene::new();
    let ran = scene.run(&short(&["--set", "schedule.warmup_steps=0"])).expect_code(0).expect_words(&[
        "Memory plan",
        "predicted peak",
        "step 6/6",
        "exact match",
        "before       after",
        "model: saved to run/model",
        "train_low_mem generate --model run/model",
    ]);
    assert_eq!(ran.err, "");
    let files = scene.names("run");
    for name in ["checkpoints", "metrics.jsonl", "model", "resolved.toml"] {
        assert!(files.contains(&name.to_string()), "{name} is not in {files:?}");
    }
    assert_eq!(
        scene.names("run/model"),
        ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    );
    let tokenizer: Value = serde_json::from_slice(&scene.read("run/model/tokenizer_config.json")).expect("JSON");
    let role = |name: &str| tokenizer[name].as_str();
    assert_eq!(role("tokenizer_class"), Some("PreTrainedTokenizerFast"));
    assert_eq!((role("eos_token"), role("pad_token")), (Some("</s>"), Some("<pad>")));
    let checkpoints = scene.names("run/checkpoints");
    assert!(checkpoints.contains(&"step-00000006".to_string()), "{checkpoints:?}");
    for name in [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "trainer_state.json",
    ] {
        assert!(scene.names("run/checkpoints/step-00000006").contains(&name.to_string()), "{name}");
    }
    assert_eq!(
        scene.read("run/model/model.safetensors"),
        scene.read("run/checkpoints/step-00000006/model.safetensors")
    );
}

#[test]
fn metrics_hold_every_key_of_the_interface() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    let steps = scene.events("run", "step");
    assert_eq!(
        steps.iter().map(|line| line["step"].as_u64()).collect::<Vec<_>>(),
        (1..=6).map(Some).collect::<Vec<_>>()
    );
    for key in [
        "step",
        "epoch",
        "loss",
        "lr",
        "grad_norm",
        "target_tokens",
        "source_tokens",
        "tokens_per_second",
        "step_ms",
        "data_wait_ms",
        "micro_batches",
        "rss_bytes",
        "peak_rss_bytes",
        "predicted_peak_bytes",
        "samples",
        "padded_tokens",
    ] {
        assert!(steps.iter().all(|line| line[key].is_number()), "`{key}` is not a number in {:?}", steps[0]);
    }
    assert!(steps.iter().all(|line| line["rows"].is_string()), "{:?}", steps[0]);
    assert!(steps.iter().all(|line| line["micro_batches"] == 2), "6 samples in micro-batches of 4");
    let count = |line: &Value, key: &str| line[key].as_u64().expect("a count");
    let is_padded =
        |line: &Value| count(line, "source_tokens") + count(line, "target_tokens") <= count(line, "padded_tokens");
    assert!(steps.iter().all(is_padded), "{steps:?}");
    assert!(scene.events("run", "start")[0]["threads"].as_u64() > Some(0));
    let evaluations = scene.events("run", "eval");
    assert_eq!(evaluations.iter().map(|line| line["step"].as_u64()).collect::<Vec<_>>(), [Some(0), Some(6)]);
    for key in ["step", "loss", "perplexity", "bleu", "exact_match", "samples"] {
        assert!(evaluations.iter().all(|line| line[key].is_number()), "`{key}`");
    }
    let events: Vec<Value> =
        ["start", "plan", "checkpoint", "end"].iter().flat_map(|event| scene.events("run", event)).collect();
    assert_eq!(events.len(), 1 + 1 + 3 + 1, "{events:?}");
    let loss = |line: &Value| line["loss"].as_f64().expect("a loss");
    assert!(loss(&evaluations[1]) < loss(&evaluations[0]), "{evaluations:?}");
}

#[test]
fn the_same_command_gives_the_same_bits() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    scene.run(&short(&["--output", "again"])).expect_code(0);
    assert_eq!(scene.read("run/model/model.safetensors"), scene.read("again/model/model.safetensors"));
    scene.run(&["--config", "run/resolved.toml", "--output", "third"]).expect_code(0);
    assert_eq!(scene.read("run/model/model.safetensors"), scene.read("third/model/model.safetensors"));
}

#[test]
fn how_the_batch_is_cut_does_not_change_the_losses() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    scene
        .run(&short(&[
            "--output",
            "cut",
            "--set",
            "memory.micro_batch_samples=1",
            "--set",
            "memory.recompute_blocks=3",
        ]))
        .expect_code(0);
    for (whole, cut) in scene.events("run", "step").iter().zip(scene.events("cut", "step")) {
        let (whole, cut) = (whole["loss"].as_f64().expect("a loss"), cut["loss"].as_f64().expect("a loss"));
        assert!((whole - cut).abs() <= 1e-4 * whole, "{whole} and {cut}");
    }
}

#[test]
fn eval_agrees_with_the_evaluation_at_the_end_of_training() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    let last = scene.events("run", "eval").pop().expect("an evaluation");
    let data = ["--data", "run/sample-data/sample-validation.parquet", "--config", "run/resolved.toml"];
    let counts = ["--samples", "12", "--generate-samples", "3", "--batch-samples", "4", "--json"];
    let arguments: Vec<&str> = ["eval", "--model", "run/model"].iter().chain(&data).chain(&counts).copied().collect();
    let evaluated = scene.run(&arguments).expect_code(0).json();
    let (there, here) = (last["loss"].as_f64().expect("a loss"), evaluated["loss"].as_f64().expect("a loss"));
    assert!((there - here).abs() <= 1e-6 * there, "{there} in training, {here} in eval");
    for key in ["bleu", "exact_match", "samples", "target_tokens", "bleu_signature"] {
        assert_eq!(last[key], evaluated[key], "{key}");
    }
}

#[test]
fn the_last_smaller_batch_of_an_epoch_is_a_step_and_epochs_are_counted() {
    let scene = Scene::new();
    let rows = (0..10).map(|row| (format!("say {row}"), format!("{row}"))).collect::<Vec<_>>();
    let column = |of: fn(&(String, String)) -> &str| rows.iter().map(|row| Some(of(row))).collect::<Vec<_>>();
    crate::files::write_rows(
        &scene.path("ten.parquet"),
        &[("prompt", column(|row| &row.0)), ("response", column(|row| &row.1))],
    );
    let arguments = [
        "--set",
        "data.train=ten.parquet",
        "--set",
        "train.max_steps=none",
        "--epochs",
        "2",
        "--set",
        "train.batch_size=4",
    ];
    scene.run(&short(&arguments)).expect_code(0);
    let steps = scene.events("run", "step");
    let samples: Vec<u64> = steps.iter().filter_map(|line| line["samples"].as_u64()).collect();
    let epochs: Vec<u64> = steps.iter().filter_map(|line| line["epoch"].as_u64()).collect();
    assert_eq!((samples, epochs), (vec![4, 4, 2, 4, 4, 2], vec![0, 0, 0, 1, 1, 1]));
}

#[test]
fn rows_that_cannot_be_samples_are_skipped_and_reported_or_refused() {
    let scene = Scene::new();
    crate::files::write_rows(
        &scene.path("holes.parquet"),
        &[
            ("prompt", vec![Some("one"), None, Some("three"), Some("four"), Some("")]),
            ("response", vec![Some("1"), Some("2"), None, Some("4"), Some("5")]),
        ],
    );
    let arguments = [
        "--set",
        "data.train=holes.parquet",
        "--set",
        "data.shuffle=false",
        "--epochs",
        "1",
        "--set",
        "train.max_steps=none",
    ];
    scene.run(&short(&arguments)).expect_code(0).expect_words(&[
        "rows skipped: 3",
        "holes.parquet: row group 0: row 1",
        "null",
    ]);
    let refused =
        scene.run(&short(&[&arguments[..], &["--set", "data.bad_rows=error", "--output", "refused"]].concat()));
    refused.expect_code(4).expect_words(&["holes.parquet: row group 0: row 1: column `prompt` is null", "hint: "]);
}

#[test]
fn a_dry_run_takes_a_step_and_leaves_nothing_behind() {
    let scene = Scene::new();
    scene.run(&short(&["--dry-run"])).expect_code(0).expect_words(&["dry run: loss", "loaded back"]);
    assert!(scene.names(".").is_empty(), "{:?}", scene.names("."));
}

#[test]
fn a_dry_run_of_keep_training_takes_the_step_that_comes_next_and_changes_nothing() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    let before = scene.contents("run");
    let more = short(&["--keep-training", "--set", "train.max_steps=8"]);
    let dry = [&more[..], &["--dry-run".to_string()]].concat();
    let tried = scene.run(&dry).expect_code(0).expect_words(&[
        "resuming from run/checkpoints/step-00000006",
        "dry run: loss",
        "step 7 loaded back",
    ]);
    assert_eq!(scene.names("."), ["run"]);
    assert!(scene.contents("run") == before, "a file of the run was changed");
    // The real run makes the same step that the dry run has tried.
    scene.run(&more).expect_code(0);
    let loss = scene.events("run", "step").iter().find(|line| line["step"] == 7).and_then(|line| line["loss"].as_f64());
    let loss = loss.expect("step 7 has a loss");
    assert!(tried.out.contains(&format!("dry run: loss {loss:.4},")), "{loss}: {}", tried.out);
    // No step is left to try.
    scene.run(&dry).expect_code(0).expect_words(&["this run is finished: 8 steps"]);
    let other = short(&["--keep-training", "--dry-run", "--output", "other"]);
    scene.run(&other).expect_code(2).expect_words(&["other: there is no run to resume"]);
    assert_eq!(scene.names("."), ["run"]);
}

#[test]
fn a_run_is_never_overwritten() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    let before = scene.read("run/metrics.jsonl");
    scene.run(&short(&[])).expect_code(2).expect_words(&[
        "run: ",
        "never overwritten",
        "hint: resume that run with `--keep-training`",
    ]);
    assert_eq!(scene.read("run/metrics.jsonl"), before);
}

#[test]
fn a_diverging_run_stops_with_its_raw_values_and_a_sound_checkpoint() {
    let scene = Scene::new();
    let arguments = [
        "--learn-rate",
        "1e30",
        "--set",
        "schedule.name=constant",
        "--set",
        "schedule.warmup_steps=0",
        "--max-steps",
        "50",
        "--set",
        "train.max_non_finite_steps=2",
    ];
    scene.run(&short(&arguments)).expect_code(5).expect_words(&["not finite", "error: "]);
    let end = scene.events("run", "end").pop().expect("an end");
    assert_eq!(end["reason"], "diverged");
    let warnings = scene.events("run", "warning");
    let is_raw = |line: &Value| line["loss"].is_string() || line["grad_norm"].is_string();
    assert!(warnings.iter().any(|line| line["kind"] == "non_finite" && is_raw(line)), "{warnings:?}");
}
