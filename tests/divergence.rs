//! Values that are not finite: they are never saved or served, and a run that meets them leaves a way back.

use serde_json::Value;

use crate::run::{Ran, Scene, sample, short};

/// Settings of a run that saves each step, without validation rows.
const EACH_STEP: [&str; 8] = [
    "--set",
    "data.validation=[]",
    "--set",
    "checkpoint.every_steps=1",
    "--set",
    "schedule.name=constant",
    "--set",
    "schedule.warmup_steps=0",
];

fn each_step(more: &[&str]) -> Vec<String> {
    let rows = sample("data.train", "sample-train.parquet");
    short(&[&["--set", &rows], &EACH_STEP[..], more].concat())
}

/// Overwrites the last value of a file of f32 tensors. Its name is that of the last tensor.
fn spoil(scene: &Scene, name: &str) -> String {
    let mut bytes = scene.read(name);
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    scene.write(name, &bytes);
    let header = usize::try_from(u64::from_le_bytes(*bytes.first_chunk().expect("a length"))).expect("a header");
    let header: Value = serde_json::from_slice(&bytes[8..8 + header]).expect("JSON");
    let tensors = header.as_object().expect("tensors").iter().filter(|(name, _)| *name != "__metadata__");
    tensors.max_by_key(|(_, tensor)| tensor["data_offsets"][1].as_u64()).expect("a tensor").0.clone()
}

#[test]
fn a_run_that_diverges_keeps_the_checkpoint_of_before_and_names_it() {
    let scene = Scene::new();
    scene.run(&each_step(&["--max-steps", "3"])).expect_code(0);
    let on = |more: &[&str]| each_step(&[&["--keep-training", "--max-steps", "20"], more].concat());
    let diverged = scene.run(&on(&["--learn-rate", "1e20"])).expect_code(5);
    // The update of step 4 destroyed the weights; no later step is saved in place of step 3.
    diverged.expect_words(&[
        "training diverged",
        "hint: to go on from before that",
        "`--keep-training --resume-from 3`",
    ]);
    assert_eq!(scene.names("run/checkpoints"), ["step-00000003", "step-00000004"]);
    // A step that is not there is refused, and the others are named.
    scene
        .run(&on(&["--resume-from", "2"]))
        .expect_code(2)
        .expect_words(&["no checkpoint of step 2", "hint: the run has checkpoints of 3, 4"]);
    scene.run(&each_step(&["--resume-from", "3"])).expect_code(2).expect_words(&["add `--keep-training`"]);
    let back = scene.run(&on(&["--resume-from", "3", "--learn-rate", "1e-3", "--max-steps", "6"])).expect_code(0);
    back.expect_words(&[
        "resuming from run/checkpoints/step-00000003",
        "moved aside the later checkpoints: run/checkpoints/step-00000004.kept-1",
        "model: saved to run/model (from run/checkpoints/step-00000006)",
    ]);
    assert_eq!(scene.names("run/checkpoints"), ["step-00000004.kept-1", "step-00000005", "step-00000006"]);
}

#[test]
fn a_run_that_ends_while_updates_are_skipped_leaves_no_finished_model() {
    let scene = Scene::new();
    let arguments = |more: &[&str]| {
        each_step(
            &[&["--learn-rate", "1e20", "--max-steps", "4", "--set", "train.max_non_finite_steps=99"], more].concat(),
        )
    };
    let words = ["updates were skipped as not finite", "the model is not saved as a finished one", "hint: "];
    scene.run(&arguments(&[])).expect_code(5).expect_words(&words);
    assert!(!scene.path("run/model").exists());
    scene.run(&arguments(&["--keep-training"])).expect_code(5).expect_words(&words);
}

#[test]
fn weights_that_are_not_finite_are_named_when_they_are_loaded() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    let tensor = spoil(&scene, "run/model/model.safetensors");
    let expect = |ran: Ran| {
        ran.expect_code(4).expect_words(&[
            "run/model/model.safetensors: tensor ",
            &tensor,
            "values that are not finite",
        ]);
    };
    let rows = scene.path("run/sample-data/sample-validation.parquet").display().to_string();
    expect(scene.run(&["generate", "--model", "run/model", "--prompt", "x"]));
    expect(scene.run(&["eval", "--model", "run/model", "--data", &rows]));
    expect(scene.run(&["serve", "--model", "run/model", "--listen", "127.0.0.1:0"]));
    let from = ["--set", "model.init_from=run/model", "--output", "tuned"];
    expect(scene.run(&short(&from)));
    expect(scene.run(&short(&[&from[..], &["--lora"]].concat())));
    // Weights that are used where they lie are looked at, too.
    let in_files = ["--lora", "--set", "memory.accumulation=layer-major", "--set", "memory.weight_offload=disk"];
    let of_block = ["--set", "memory.weight_blocks_in_memory=0"];
    expect(scene.run(&short(&[&from[..], &in_files, &of_block].concat())));
}

#[test]
fn a_run_in_which_nothing_beats_the_start_says_that_and_not_that_a_checkpoint_is_lost() {
    let scene = Scene::new();
    // With this rate nothing changes, so every score is equal to the first.
    let arguments =
        short(&["--learn-rate", "0", "--set", "checkpoint.model=best", "--set", "train.eval_every_steps=2"]);
    let ran = scene.run(&arguments).expect_code(0).expect_words(&["no evaluation beat the starting model"]);
    assert!(!ran.err.contains("missing or damaged"), "{}", ran.err);
}

#[test]
fn the_last_screen_and_the_report_have_the_scores_of_the_model_that_is_kept_also_if_none_beat_the_start() {
    let scene = Scene::new();
    // Nothing is ever answered right, so all of BLEU is 0, and the first checkpoint is kept. The loss falls all the same.
    let settings =
        ["--metric_for_best_model", "bleu", "--set", "train.eval_max_new_tokens=1", "--set", "checkpoint.model=best"];
    let often = ["--max-steps", "4", "--set", "train.eval_every_steps=1", "--set", "checkpoint.every_steps=1"];
    let ran = scene.run(&short(&[&settings[..], &often].concat())).expect_code(0);
    let kept = scene.events("run", "end")[0]["model_step"].as_u64().expect("the step of the model");
    let evaluation =
        scene.events("run", "eval").into_iter().find(|event| event["step"] == kept).expect("its evaluation");
    assert!(kept < 4, "{}", ran.out);
    let loss = format!("{:.3}\n", evaluation["loss"].as_f64().expect("a loss"));
    let row = ran.out.lines().find(|line| line.starts_with("  loss ")).expect("the last screen");
    assert!(format!("{row}\n").ends_with(&loss), "{row} {loss}");
    assert!(scene.text("run/report.html").contains(&format!("at step {kept}")), "the report");
}
