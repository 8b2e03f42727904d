//! `chat`: reads lines, prints answers and accepts settings in between, with one model or several.

use crate::run::{Ran, Scene, short};

/// Runs `chat` with these lines.
fn chat(scene: &Scene, more: &str, lines: &str) -> Ran {
    scene.write("lines.txt", lines);
    let program = env!("CARGO_BIN_EXE_train_low_mem");
    scene.shell(&format!("'{program}' chat run --max-new-tokens 8 {more} < lines.txt"))
}

/// The answers that `generate` gives to a prompt.
fn generated(scene: &Scene, model: &str, more: &[&str]) -> String {
    let usual = ["generate", "--model", model, "--max-new-tokens", "8", "after 75"];
    scene.run(&[&usual[..], more].concat()).expect_code(0).out
}

#[test]
fn a_prompt_is_answered_as_by_generate_and_settings_change_what_comes_next() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "train.eval_samples=1"])).expect_code(0);
    let greedy = generated(&scene, "run", &[]);
    let beams = generated(&scene, "run", &["--num-beams", "3"]);
    let ran = chat(&scene, "", "after 75\n/set num_beams 3\nafter 75\n").expect_code(0);
    assert_eq!(ran.out, format!("{greedy}{beams}"), "{}", ran.err);
    // Settings beyond the bill are refused, and a wrong line does not end the chat.
    let ran = chat(&scene, "", "/set num_beams 9\n/set max_new_tokens 9\n/nonsense\nafter 75\n/quit\nafter 75\n")
        .expect_code(0);
    assert_eq!(ran.out, greedy);
    for words in ["num_beams: expected at most 4", "max_new_tokens: expected from 1 to 8", "no command `/nonsense`"] {
        assert!(ran.err.contains(words), "{words}\n{}", ran.err);
    }
    let settings = chat(&scene, "--temperature 0.5", "/settings\n").expect_code(0).out;
    assert!(settings.contains("temperature = 0.5") && settings.contains("answers are drawn"), "{settings}");
}

#[test]
fn adapters_answer_side_by_side_within_the_budget() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "train.eval_samples=1"])).expect_code(0);
    let tune = ["--lora", "--set", "model.init_from=run/model", "--learn-rate", "0.5", "--output", "tuned"];
    scene.run(&short(&[&tune[..], &["--set", "train.eval_samples=1"]].concat())).expect_code(0);
    let [base, tuned] = ["run", "tuned"].map(|model| generated(&scene, model, &[]));
    let ran = chat(&scene, "--adapter tuned", "after 75\n/use tuned\nafter 75\n").expect_code(0);
    assert_eq!(ran.out, format!("[run] {base}[tuned] {tuned}{tuned}"), "{}", ran.err);
    chat(&scene, "--adapter a=tuned --adapter a=tuned", "")
        .expect_code(2)
        .expect_words(&["model `a` already", "NAME=DIR"]);
    chat(&scene, "--memory-budget 10MiB", "after 75\n").expect_code(3);
    let held = chat(&scene, "--memory-budget 100MiB", "after 75\n").expect_code(0);
    let numbers: Vec<f64> =
        held.err.lines().last().unwrap_or_default().split(' ').filter_map(|word| word.parse().ok()).collect();
    assert!(matches!(numbers[..], [peak, predicted] if peak <= predicted), "{}", held.err);
}

#[test]
fn settings_of_the_model_that_this_program_lacks_are_named_once() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "train.eval_samples=1"])).expect_code(0);
    scene.write("run/model/generation_config.json", r#"{"suppress_tokens": [35]}"#);
    let ran = chat(&scene, "", "").expect_code(0);
    assert_eq!(ran.err.matches("sets suppress_tokens").count(), 1, "{}", ran.err);
    let ran = scene.run(&["serve", "run", "--dry-run"]).expect_code(0);
    assert_eq!(ran.err.matches("sets suppress_tokens").count(), 1, "{}", ran.err);
    // Answers of evaluations follow no setting of the model that no key asks for.
    scene.write("run/model/generation_config.json", r#"{"suppress_tokens": [35], "num_beams": 2}"#);
    scene.write("rows.jsonl", "{\"prompt\": \"a\", \"response\": \"b\"}\n");
    let eval = ["eval", "--model", "run/model", "--data", "rows.jsonl"];
    for (more, named) in
        [(&[][..], "sets num_beams, suppress_tokens:"), (&["--num-beams", "2"], "sets suppress_tokens:")]
    {
        let ran = scene.run(&[&eval, more].concat()).expect_code(0);
        assert_eq!(ran.err.matches(named).count(), 1, "{}", ran.err);
    }
}
