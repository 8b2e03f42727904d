//! `distill.*`: a student that learns from a teacher whose weights stay in its files, trained, resumed and refused.

use serde_json::Value;

use crate::run::{Scene, short};

/// A scene with a teacher of another shape than the student.
fn scene() -> Scene {
    let scene = Scene::new();
    let wide = "model.overrides={ d_ff = 96, num_decoder_layers = 3, tie_word_embeddings = false }";
    scene.run(&short(&["--output", "teacher", "--set", wide, "--max-steps", "8", "--lr", "0.01"])).expect_code(0);
    scene
}

fn learn(output: &str, more: &[&str]) -> Vec<String> {
    let settings = ["--set", "distill.teacher=teacher/model", "--lr", "0.003", "--output", output];
    short(&[&settings, more].concat())
}

fn figures(events: &[Value], name: &str) -> Vec<f64> {
    events.iter().map(|event| event[name].as_f64().unwrap_or_else(|| panic!("{name} in {event:#}"))).collect()
}

fn largest_difference(one: &[f64], other: &[f64]) -> f64 {
    assert_eq!(one.len(), other.len());
    one.iter().zip(other).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn a_student_learns_from_a_teacher_and_resumes_to_the_same_bits() {
    let scene = scene();
    let ran = scene.run(&learn("whole", &["--set", "distill.alpha=0.7"])).expect_code(0);
    let screen = ran.out.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in ["learns 0.7 of the loss from a teacher, at temperature 2", "teacher: teacher/model"] {
        assert!(screen.contains(words), "{screen}");
    }
    let steps = scene.events("whole", "step");
    let objectives = figures(&steps, "objective");
    assert!(objectives.iter().zip(figures(&steps, "loss")).all(|(objective, loss)| *objective != loss));
    assert!(objectives[objectives.len() - 1] < objectives[0], "{objectives:?}");
    let bill = scene.run(&[vec!["plan".into()], learn("x", &["--explain"])].concat()).expect_code(0).out;
    assert!(bill.contains("frozen model") && bill.contains("teacher's states"), "{bill}");
    // No plan changes the numbers.
    for (number, pins) in [
        &["memory.micro_batch_samples=1", "memory.loss_chunk_rows=7"][..],
        &["memory.accumulation=layer-major", "memory.micro_batch_samples=3"],
    ]
    .into_iter()
    .enumerate()
    {
        let (output, pins) = (format!("cut{number}"), pins.iter().flat_map(|pin| ["--set", pin]).collect::<Vec<_>>());
        scene.run(&learn(&output, &[&["--set", "distill.alpha=0.7"], &pins[..]].concat())).expect_code(0);
        let cut = scene.events(&output, "step");
        for name in ["objective", "loss", "grad_norm"] {
            let far = largest_difference(&figures(&cut, name), &figures(&steps, name));
            assert!(far < 2e-4, "{pins:?}: {name} {far}");
        }
    }
    let every = ["--set", "distill.alpha=0.7", "--set", "checkpoint.every_steps=2"];
    let mut running = scene.start(&learn("killed", &every));
    assert!(running.wait_for("step 4/6"));
    running.kill();
    let resumed = [learn("killed", &["--set", "distill.alpha=0.7"]), vec!["--keep-training".into()]].concat();
    scene.run(&resumed).expect_code(0);
    let weights = |run: &str| scene.read(&format!("{run}/model/model.safetensors"));
    assert_eq!(weights("killed"), weights("whole"));
    // Without a share of the teacher it is the run without one.
    scene.run(&learn("none", &["--set", "distill.alpha=0"])).expect_code(0);
    scene.run(&short(&["--lr", "0.003", "--output", "plain"])).expect_code(0);
    let [none, plain] = ["none", "plain"].map(|run| figures(&scene.events(run, "step"), "loss"));
    assert!(largest_difference(&none, &plain) < 2e-4, "{none:?} {plain:?}");
    scene.run(&learn("hot", &["--set", "distill.alpha=0.7", "--set", "distill.temperature=6"])).expect_code(0);
    assert!(figures(&scene.events("hot", "step"), "objective")[0] != objectives[0]);
}

#[test]
fn the_peak_beside_a_teacher_is_predicted() {
    let scene = scene();
    scene
        .run(&learn("run", &["--set", "data.max_source_tokens=96", "--set", "data.max_target_tokens=96"]))
        .expect_code(0);
    scene.expect_predicted_peaks("run");
}

#[test]
fn teachers_that_could_not_teach_are_refused() {
    let scene = scene();
    let refused = |more: &[&str], code: i32, words: &[&str]| {
        scene.run(&learn("refused", more)).expect_code(code).expect_words(words);
    };
    let small = short(&["--output", "small", "--set", "model.vocab_size=4200"]);
    scene.run(&small).expect_code(0);
    refused(&["--set", "distill.teacher=small/model"], 4, &["`distill.teacher`", "`vocab_size`", "4200", "hint: "]);
    refused(&["--set", "distill.teacher=nosuch"], 4, &["nosuch"]);
    refused(&["--set", "train.label_smoothing=0.1"], 2, &["`train.label_smoothing`", "`distill.teacher`", "hint: "]);
    refused(&["--set", "distill.alpha=2"], 2, &["distill.alpha"]);
    let alone = scene.run(&short(&["--set", "distill.alpha=0.3", "--output", "alone"])).expect_code(0);
    assert!(alone.err.contains("`distill.alpha`"), "{}", alone.err);
}

#[test]
fn the_largest_logits_of_a_teacher_are_kept_where_rows_come_again() {
    let scene = scene();
    let row = |number: usize| {
        let [prompt, response] = ["one", "two"].map(|word| format!("{word} ").repeat(1 + number % 5));
        format!("{}\n", serde_json::json!({"prompt": format!("{prompt}{number}"), "response": response}))
    };
    scene.write("rows.jsonl", (0..8).map(row).collect::<String>());
    let learn = |output: &str, more: &[&str]| {
        let rows = ["data.train=rows.jsonl", "train.batch_size=4", "train.epochs=9", "distill.top_k=6"];
        learn(output, &[&rows.map(|row| ["--set", row]).concat(), more].concat())
    };
    let ran = scene.run(&learn("whole", &[])).expect_code(0);
    let screen = ran.out.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in ["learns 0.5 of the loss from 6 logits of a teacher", "kept in teacher-logits of"] {
        assert!(screen.contains(words), "{screen}");
    }
    scene.expect_predicted_peaks("whole");
    let kept = scene.read("whole/teacher-logits").len();
    let steps = scene.events("whole", "step");
    // Without the file the teacher reads every batch.
    let none = ["--set", "memory.disk_writes=0"];
    let ran = scene.run(&learn("none", &none)).expect_code(0);
    assert!(!ran.out.contains("teacher-logits") && !scene.path("none/teacher-logits").exists(), "{}", ran.out);
    let none = scene.events("none", "step");
    for name in ["objective", "loss", "grad_norm"] {
        assert!(largest_difference(&figures(&none, name), &figures(&steps, name)) < 2e-4, "{name}");
    }
    let mut running = scene.start(&learn("killed", &["--set", "checkpoint.every_steps=1"]));
    assert!(running.wait_for("step 3/6"));
    running.kill();
    let goes_on = |more: &[&str]| scene.run(&[learn("killed", more), vec!["--keep-training".into()]].concat());
    goes_on(&[]).expect_code(0);
    let weights = |run: &str| scene.read(&format!("{run}/model/model.safetensors"));
    assert_eq!(weights("killed"), weights("whole"));
    assert_eq!(scene.read("killed/teacher-logits").len(), kept);
    // A run whose file is gone says so.
    std::fs::remove_file(scene.path("killed/teacher-logits")).expect("the file");
    let ran = goes_on(&["--max-steps", "8"]).expect_code(0);
    assert!(ran.err.contains("logits of earlier steps are gone"), "{}", ran.err);
    scene
        .run(&learn("x", &["--set", "distill.top_k=100000"]))
        .expect_code(2)
        .expect_words(&["distill.top_k", "hint: "]);
    scene.run(&learn("x", &["--set", "distill.top_k=0"])).expect_code(2).expect_words(&["distill.top_k"]);
    let alone = scene.run(&short(&["--set", "distill.top_k=3", "--output", "alone"])).expect_code(0);
    assert!(alone.err.contains("`distill.top_k`"), "{}", alone.err);
}
