//! `--keep-training` after a run was killed, interrupted, damaged or finished.

use crate::run::{ENDLESS, OF_A_STEP, Scene, repository, short};

/// The final weights of the short run without an interruption.
fn uninterrupted(scene: &Scene, more: &[&str]) -> Vec<u8> {
    scene.run(&short(&[more, &["--output", "whole"]].concat())).expect_code(0);
    scene.read("whole/model/model.safetensors")
}

#[test]
fn a_run_killed_at_many_moments_ends_with_the_same_bits() {
    let scene = Scene::new();
    let every_step = ["--set", "checkpoint.every_steps=1", "--set", "train.eval_every_steps=3"];
    let arguments = |more: &[&str]| short(&[&every_step[..], &ENDLESS, scene.resumes("run"), more].concat());
    // Each attempt first prints the memory plan, then evaluations, steps, and saves. Killing it after different numbers of lines ends the
    // run inside each of them. Returns true if the run was killed before its end.
    let killed = |attempt: usize, arguments: &[String]| {
        let mut running = scene.start(arguments);
        let lines = 1 + attempt * 7 % 15;
        let is_there = running.wait_for("Memory plan") && running.wait_for("Step ") && running.wait_for_lines(lines);
        if is_there {
            running.kill()
        } else {
            drop(running.end().expect_code(0))
        }
        is_there
    };
    for attempt in 1..8 {
        assert!(killed(attempt, &arguments(&[])), "it has no end");
    }
    // Also in its last steps, in its last evaluation, and while the model is written to its place.
    let last = scene.two_more_steps("run");
    let mut attempts = 8..60;
    while killed(attempts.next().expect("the run makes progress"), &arguments(&["--set", &last])) {}
    let expected = uninterrupted(&scene, &[&every_step[..], &ENDLESS, &["--set", &last]].concat());
    assert_eq!(scene.read("run/model/model.safetensors"), expected);
    let losses = |run: &str| {
        let mut steps = scene.events(run, "step");
        steps.reverse();
        steps.sort_by_key(|line| line["step"].as_u64());
        steps.dedup_by_key(|line| line["step"].as_u64());
        steps.into_iter().map(|line| line["loss"].as_f64()).collect::<Vec<_>>()
    };
    assert_eq!(losses("run"), losses("whole"), "the later line of a step counts");
}

#[test]
fn validation_rows_that_changed_since_the_checkpoint_are_named() {
    let scene = Scene::new();
    let data = repository().join("data");
    let from = |name: &str| std::fs::copy(data.join(name), scene.path("rows.parquet")).expect("a file");
    let [train, tokenizer] = [("train", "sample-train.parquet"), ("tokenizer", "sample-tokenizer.json")]
        .map(|(key, name)| format!("data.{key}={}", data.join(name).display()));
    let usual = ["--set", &train, "--set", &tokenizer, "--set", "data.validation=rows.parquet"];
    from("sample-validation.parquet");
    scene.run(&short(&[&usual[..], &["--max-steps", "2"]].concat())).expect_code(0);
    let resumed = |steps: &str| {
        let more = ["--keep-training", "--max-steps", steps];
        scene.run(&short(&[&usual[..], &more].concat())).expect_code(0).err.contains("the validation rows; earlier")
    };
    assert!(!resumed("3"));
    from("sample-train.parquet");
    assert!(resumed("4"));
    assert!(!resumed("5"), "the checkpoint of step 4 has the new ones");
}

#[test]
fn a_run_with_adamw_goes_on_to_the_same_bits_and_its_state_is_in_the_plan() {
    let scene = Scene::new();
    let adamw = ["--set", "optimizer.name=adamw", "--learn-rate", "1e-3"];
    let expected = uninterrupted(&scene, &adamw);
    scene.run(&short(&[&adamw[..], &["--set", "train.max_steps=4"]].concat())).expect_code(0);
    let arguments = short(&[&adamw[..], &["--keep-training"]].concat());
    scene.run(&arguments).expect_code(0).expect_words(&["AdamW, learning rate 1.00e-3", "AdamW, two moments"]);
    assert_eq!(scene.read("run/model/model.safetensors"), expected);
    scene.expect_predicted_peaks("run");
    let other = short(&["--keep-training", "--set", "optimizer.name=adafactor", "--set", "train.max_steps=8"]);
    scene.run(&other).expect_code(2).expect_words(&["optimizer.name was \"adamw\"", "--allow-changed model"]);
}

#[test]
fn a_run_with_moments_in_int8_goes_on_to_the_same_bits_within_a_smaller_bill() {
    let scene = Scene::new();
    let int8 = ["--set", "optimizer.name=adamw", "--set", "optimizer.state_precision=int8", "--learn-rate", "1e-3"];
    let expected = uninterrupted(&scene, &int8);
    scene.run(&short(&[&int8[..], &["--set", "train.max_steps=4"]].concat())).expect_code(0);
    let arguments = short(&[&int8[..], &["--keep-training"]].concat());
    scene.run(&arguments).expect_code(0).expect_words(&["AdamW, two moments in int8"]);
    assert_eq!(scene.read("run/model/model.safetensors"), expected);
    let state = |run: &str| {
        let plan = scene.events(run, "plan")[0].clone();
        let rows = plan["bill"]["rows"].as_array().cloned().expect("a bill");
        rows.iter()
            .find(|row| row["name"] == "optimizer state")
            .and_then(|row| row["bytes"].as_u64())
            .expect("its state")
    };
    scene.run(&short(&["--set", "optimizer.name=adamw", "--output", "f32"])).expect_code(0);
    let (int8_bytes, f32_bytes) = (state("run"), state("f32"));
    assert!(4 * int8_bytes < f32_bytes * 11 / 10, "{int8_bytes} instead of {f32_bytes}");
    scene.expect_predicted_peaks("run");
    let f32 = ["--set", "optimizer.state_precision=f32", "--set", "train.max_steps=8"];
    scene
        .run(&short(&[&int8[..2], &f32, &["--keep-training"]].concat()))
        .expect_code(2)
        .expect_words(&["optimizer.state_precision was \"int8\"", "--allow-changed model"]);
}

#[test]
fn a_signal_saves_and_the_run_goes_on_to_the_same_bits() {
    let scene = Scene::new();
    for signal in ["INT", "TERM", "USR1"] {
        let mut running = scene.start(&short(&[&ENDLESS[..], scene.resumes("run")].concat()));
        assert!(running.wait_for(OF_A_STEP), "{signal}");
        running.signal(signal);
        running.end().expect_code(75).expect_words(&[
            "interrupted at step",
            "saved run/checkpoints/step-",
            "hint: ",
            "--keep-training",
        ]);
    }
    let last = scene.two_more_steps("run");
    let whole = [&ENDLESS[..], &["--set", &last]].concat();
    let goes_on = short(&[&whole[..], &["--keep-training"]].concat());
    scene.run(&goes_on).expect_code(0).expect_words(&["resuming from run/checkpoints/step-"]);
    assert_eq!(scene.read("run/model/model.safetensors"), uninterrupted(&scene, &whole));
    assert_eq!(scene.events("run", "end").len(), 4);
    assert_eq!(scene.events("run", "resume").len(), 3);
}

#[test]
fn a_run_without_f32_masters_goes_on_to_the_same_bits_and_its_model_is_of_use() {
    let scene = Scene::new();
    let bf16 = ["--set", "train.precision=bf16", "--set", "train.master_weights=stochastic-rounding"];
    let mut running = scene.start(&short(&[&bf16[..], &ENDLESS].concat()));
    assert!(running.wait_for(OF_A_STEP));
    running.signal("INT");
    running.end().expect_code(75);
    let last = scene.two_more_steps("run");
    let whole = [&bf16[..], &ENDLESS, &["--set", &last]].concat();
    scene.run(&short(&[&whole[..], &["--keep-training"]].concat())).expect_code(0).expect_words(&["M x bf16"]);
    assert_eq!(scene.read("run/model/model.safetensors"), uninterrupted(&scene, &whole));
    let config: serde_json::Value = serde_json::from_slice(&scene.read("run/model/config.json")).unwrap();
    assert_eq!(config["torch_dtype"], "bfloat16");
    scene.run(&["generate", "--model", "run/model", "--prompt", "12 in words"].map(String::from)).expect_code(0);
    let f32_needed = ["--set", "train.master_weights=stochastic-rounding", "--output", "other"];
    scene.run(&short(&f32_needed)).expect_code(2).expect_words(&["train.precision", "hint: "]);
}

#[test]
fn a_signal_during_an_evaluation_is_heeded_too() {
    let scene = Scene::new();
    let slow = [
        "--set",
        "train.eval_samples=0",
        "--set",
        "train.eval_generate_samples=0",
        "--set",
        "train.eval_max_new_tokens=16",
    ];
    let mut running = scene.start(&short(&slow));
    assert!(running.wait_for("evaluating"));
    running.signal("INT");
    running.end().expect_code(75).expect_words(&["interrupted before step 1; nothing to save"]);
    let expected = uninterrupted(&scene, &[]);
    scene.run(&short(&["--keep-training"])).expect_code(0);
    assert_eq!(scene.read("run/model/model.safetensors"), expected);
}

#[test]
fn one_process_writes_to_an_output_directory() {
    let scene = Scene::new();
    let mut first = scene.start(&short(&["--max-steps", "100000", "--set", "train.max_steps=100000"]));
    assert!(first.wait_for("step 1/"));
    let resumes = scene.run(&short(&["--keep-training"])).expect_code(2);
    resumes.expect_words(&["error: run: in use by another run, process ", "hint: "]);
    // A new run may also find the first checkpoint, depending on which of the two is faster.
    let new = scene.run(&short(&[])).expect_code(2).expect_words(&["error: run: ", "hint: "]);
    let words = ["in use by another run, process ", "this directory already has checkpoints of a run"];
    assert!(words.iter().any(|words| new.err.contains(words)), "{}", new.err);
    first.kill();
    // The process's end has released the lock.
    scene.run(&short(&["--keep-training"])).expect_code(0);
}

#[test]
fn a_damaged_newest_checkpoint_is_passed_over_and_that_is_said() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    let name = "run/checkpoints/step-00000006/model.safetensors";
    let mut bytes = scene.read(name);
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    scene.write(name, &bytes);
    let expected = scene.read("run/model/model.safetensors");
    scene.run(&short(&["--keep-training"])).expect_code(0).expect_words(&[
        "warning: ",
        "step-00000006",
        "falling back to run/checkpoints/step-00000004",
    ]);
    assert_eq!(scene.read("run/model/model.safetensors"), expected);
    for name in scene.names("run/checkpoints") {
        scene.write(&format!("run/checkpoints/{name}/manifest.json"), "{}");
    }
    scene
        .run(&short(&["--keep-training"]))
        .expect_code(4)
        .expect_words(&["error: run/checkpoints: none of its", "hint: "]);
}

/// A run of nine steps over 18 rows, three epochs in file order, after two steps. Returns the arguments that resume it.
fn stopped_over_rows(scene: &Scene) -> Vec<String> {
    let texts: Vec<String> = (0..18).map(|row| format!("say number {row}")).collect();
    let column: Vec<Option<&str>> = texts.iter().map(|text| Some(text.as_str())).collect();
    crate::files::write_rows(&scene.path("rows.parquet"), &[("prompt", column.clone()), ("response", column)]);
    let tokenizer = crate::run::sample("data.tokenizer", "sample-tokenizer.json");
    let arguments = short(&[
        "--set",
        "model.config=tiny",
        "--set",
        &tokenizer,
        "--set",
        "data.train=rows.parquet",
        "--set",
        "data.shuffle=false",
        "--epochs",
        "3",
        "--set",
        "train.max_steps=none",
        "--set",
        "train.batch_size=6",
        "--set",
        "checkpoint.every_steps=1",
    ]);
    let two = ["--set", "train.max_steps=2"].map(str::to_owned);
    scene.run(&[&arguments[..], &two].concat()).expect_code(0);
    [&arguments[..], &["--keep-training".to_owned()]].concat()
}

/// Changes one text of the file in place.
fn change(scene: &Scene, from: &str, to: &str) {
    let mut bytes = scene.read("rows.parquet");
    let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).expect("a plain page");
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    scene.write("rows.parquet", bytes);
}

#[test]
fn data_that_changed_behind_its_footer_is_noticed_when_the_run_goes_on() {
    let scene = Scene::new();
    let arguments = stopped_over_rows(&scene);
    change(&scene, "say number 3", "say nothing!");
    scene.run(&arguments).expect_code(4).expect_words(&[
        "warning: rows.parquet: ",
        "error: rows.parquet: row group 0: column `prompt`: rows 0 to 17: page at byte 4: the data changed since this run",
        "hint: ",
        "--allow-changed data",
    ]);
    let allowed = [&arguments[..], &["--allow-changed".into(), "data".into()]].concat();
    scene.run(&allowed).expect_code(0);
}

#[test]
fn data_that_was_only_touched_is_a_warning() {
    let scene = Scene::new();
    let arguments = stopped_over_rows(&scene);
    let bytes = scene.read("rows.parquet");
    scene.write("rows.parquet", bytes);
    let ran = scene.run(&arguments).expect_code(0);
    let warnings = ran.err.lines().filter(|line| line.contains("changed or replaced since this run read it")).count();
    assert_eq!(warnings, 1, "{}", ran.err);
}

#[test]
fn what_a_killed_save_left_is_removed() {
    let scene = Scene::new();
    scene.run(&short(&["--max-steps", "2", "--set", "train.max_steps=2"])).expect_code(0);
    let half = ".train_low_mem-tmp-0123456789abcdef-part-step-00000004";
    scene.write(&format!("run/checkpoints/{half}/model.safetensors"), "half a model");
    scene.run(&short(&["--keep-training"])).expect_code(0);
    assert!(
        scene.names("run/checkpoints").iter().all(|name| name.starts_with("step-")),
        "{:?}",
        scene.names("run/checkpoints")
    );
}

#[test]
fn a_run_that_is_not_there_is_refused_and_one_without_a_checkpoint_starts_from_scratch_and_says_so() {
    let scene = Scene::new();
    for keeps in ["--keep-training", "--is_keep_training=True"] {
        for dry in [&[][..], &["--dry-run"]] {
            let words =
                ["error: run: there is no run to resume", "hint: to start a new run, leave out `--keep-training`"];
            scene.run(&short(&[&[keeps][..], dry].concat())).expect_code(2).expect_words(&words);
        }
    }
    scene.run(&["--output", "run", "--keep-training"]).expect_code(2).expect_words(&["there is no run to resume"]);
    assert!(scene.names(".").is_empty(), "{:?}", scene.names("."));
    scene.run(&short(&[])).expect_code(0);
    std::fs::remove_dir_all(scene.path("run/checkpoints")).expect("the checkpoints");
    scene
        .run(&["--output", "rum", "--keep-training"])
        .expect_code(2)
        .expect_words(&["hint: did you mean `--output run`?"]);
    scene
        .run(&short(&["--keep-training"]))
        .expect_code(0)
        .expect_words(&["no checkpoint yet; training begins with step 1"]);
}

#[test]
fn a_finished_run_says_so_and_more_steps_go_on() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    let before = scene.read("run/metrics.jsonl");
    scene
        .run(&short(&["--keep-training"]))
        .expect_code(0)
        .expect_words(&["this run is finished: 6 steps", "run/model"]);
    assert_eq!(scene.read("run/metrics.jsonl"), before);
    // Without --config, the output directory's own config applies.
    scene.run(&["--output", "run", "--keep-training"]).expect_code(0).expect_words(&["this run is finished: 6 steps"]);
    scene.run(&short(&["--keep-training", "--set", "train.max_steps=8"])).expect_code(0).expect_words(&["step 8/8"]);
    assert_eq!(scene.events("run", "resume")[0]["step"], 6);
}

#[test]
fn another_tokenizer_config_beside_the_same_tokenizer_is_another_tokenizer() {
    let scene = Scene::new();
    let tokenizer = std::fs::read(repository().join("data/sample-tokenizer.json")).expect("a tokenizer");
    scene.write("own/tokenizer.json", tokenizer);
    let run = |more: &[&str]| scene.run(&short(&[&["--set", "data.tokenizer=own/tokenizer.json"], more].concat()));
    run(&["--max-steps", "2"]).expect_code(0);
    // One that was not there, and then one with another end.
    for (config, steps) in [(r#"{"truncation_side": "right"}"#, "3"), (r#"{"eos_token": "</s>"}"#, "4")] {
        scene.write("own/tokenizer_config.json", config);
        let resumed = ["--keep-training", "--max-steps", steps];
        run(&resumed)
            .expect_code(2)
            .expect_words(&["tokenizer_config.json was", "hint: to resume anyway, add `--allow-changed tokenizer`"]);
        run(&[&resumed[..], &["--allow-changed", "tokenizer"]].concat()).expect_code(0);
    }
}

#[test]
fn another_run_is_refused_with_the_difference_unless_allowed() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "train.max_steps=2"])).expect_code(0);
    let tokenizer = String::from_utf8(scene.read("run/model/tokenizer.json")).expect("UTF-8");
    scene.write("other.json", format!("{tokenizer}\n"));
    for (change, difference, part) in [
        ("train.batch_size=5", "train.batch_size was 6, now 5", "batch-size"),
        ("run.seed=7", "run.seed was 42, now 7", "seed"),
        ("data.max_source_tokens=9", "data.max_source_tokens was", "data"),
        ("data.train=run/sample-data/sample-validation.parquet", "data.train was", "data"),
        ("data.tokenizer=other.json", "data.tokenizer was", "tokenizer"),
        ("model.overrides={ num_layers = 2 }", "config.json: num_layers was 3, now 2", "model"),
        ("train.freeze=encoder", "train.freeze was [], now [\"encoder\"]", "model"),
    ] {
        let refused = scene.run(&short(&["--keep-training", "--set", change])).expect_code(2);
        refused.expect_words(&[difference, &format!("hint: to resume anyway, add `--allow-changed {part}`")]);
    }
    let allowed = [
        "--keep-training",
        "--set",
        "train.batch_size=5",
        "--allow-changed",
        "batch-size",
        "--set",
        "train.max_steps=3",
    ];
    scene.run(&short(&allowed)).expect_code(0);
    let last = scene.events("run", "step").pop().expect("a step");
    assert_eq!((last["step"].as_u64(), last["samples"].as_u64()), (Some(3), Some(5)));
}
