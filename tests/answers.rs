//! Answers and their scores: beams, sampling, streaming, files of prompts and of predictions, the best checkpoint by a score, and
//! runs that stop early.

use serde_json::Value;

use crate::run::{Ran, Scene, repository, short};

/// A scene with a short run's model.
fn trained() -> Scene {
    let scene = Scene::new();
    scene.run(&short(&["--set", "train.eval_samples=1"])).expect_code(0);
    scene
}

fn generate(scene: &Scene, more: &[&str]) -> Ran {
    let usual = ["generate", "--model", "run/model", "--max-new-tokens", "6", "after 75", "before 12", "3 + 4"];
    scene.run(&[&usual[..], more].concat())
}

fn lines(ran: &Ran) -> Vec<Value> {
    ran.out.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn beams_give_several_scored_answers_and_the_same_ones_in_any_batch() {
    let scene = trained();
    let beams = ["--json", "--num-beams", "3", "--num-return-sequences", "2"];
    let together = generate(&scene, &beams).expect_code(0);
    let apart = generate(&scene, &[&beams[..], &["--batch-samples", "1"]].concat()).expect_code(0);
    let texts = |ran: &Ran| lines(ran).iter().map(|line| line["sequences"].clone()).collect::<Vec<_>>();
    for (line, apart) in lines(&together).iter().zip(texts(&apart)) {
        let (sequences, apart) = (line["sequences"].as_array().expect("a list"), apart);
        assert_eq!(sequences.len(), 2);
        assert_eq!((&sequences[0]["response"], &sequences[0]["score"]), (&line["response"], &line["score"]));
        assert!(sequences[0]["score"].as_f64() >= sequences[1]["score"].as_f64());
        for (one, other) in sequences.iter().zip(apart.as_array().expect("a list")) {
            assert_eq!(one["response"], other["response"]);
        }
    }
    // A small budget allows fewer samples at a time, and is never exceeded.
    let refused = generate(&scene, &["--num-beams", "8", "--memory-budget", "10MiB"]).expect_code(3);
    let hint = refused.err.lines().find(|line| line.starts_with("hint: ")).expect("a hint");
    let budget = hint.split_whitespace().find(|word| word.ends_with("MiB")).expect("a size");
    let held = generate(&scene, &["--num-beams", "8", "--memory-budget", budget]).expect_code(0);
    let peak = held.err.split_whitespace().nth(1).and_then(|mib| mib.parse::<f64>().ok()).expect("a peak");
    assert!(peak <= budget.trim_end_matches("MiB").parse::<f64>().expect("a number"), "{}", held.err);
}

#[test]
fn drawn_answers_follow_from_the_seed_whatever_the_batch() {
    let scene = trained();
    let drawn = |seed: &str, batch: &str| {
        let flags = ["--temperature", "1.5", "--seed", seed, "--batch-samples", batch, "--num-return-sequences", "2"];
        generate(&scene, &flags).expect_code(0).out
    };
    assert_eq!(drawn("1", "1"), drawn("1", "3"));
    assert_ne!(drawn("1", "3"), drawn("2", "3"));
    let scored = generate(&scene, &["--json", "--scores"]).expect_code(0);
    assert!(lines(&scored).iter().all(|line| line["score"].as_f64().is_some_and(|score| score < 0.0)));
}

#[test]
fn a_streamed_answer_is_the_answer_and_a_stop_text_ends_it() {
    let scene = trained();
    let plain = generate(&scene, &[]).expect_code(0);
    assert_eq!(generate(&scene, &["--stream"]).expect_code(0).out, plain.out);
    let first = plain.out.lines().next().expect("an answer");
    if let Some(letter) = first.chars().find(|letter| !letter.is_whitespace()) {
        let stopped = generate(&scene, &["--stop", &letter.to_string()]).expect_code(0);
        let stopped = stopped.out.lines().next().expect("an answer");
        assert!(first.starts_with(stopped) && stopped.contains(letter), "{first:?} {stopped:?}");
    }
}

#[test]
fn prompts_come_from_rows_and_flags_that_contradict_each_other_are_refused() {
    let scene = trained();
    let rows = "{\"id\": 1, \"question\": \"after 75\"}\n{\"id\": 2, \"question\": \"before 12\"}\n";
    std::fs::write(scene.path("rows.jsonl"), rows).expect("a file");
    let from = ["generate", "--model", "run/model", "--max-new-tokens", "4", "--json", "--input", "rows.jsonl"];
    let asked = scene.run(&[&from[..], &["--prompt-column", "question"]].concat()).expect_code(0);
    assert_eq!(lines(&asked).iter().map(|line| line["prompt"].clone()).collect::<Vec<_>>(), ["after 75", "before 12"]);
    scene.run(&from).expect_code(4).expect_words(&["no column `prompt`", "id, question"]);
    for (flags, words) in [
        (&["--num-return-sequences", "2"][..], "without beams or sampling"),
        (&["--num-beams", "2", "--num-return-sequences", "3"], "the number of beams"),
        (&["--top-p", "1.5"], "a number from 0 to 1"),
        (&["--stream", "--json"], "cannot be used with"),
        (&["--early-stopping", "maybe"], "\"never\""),
    ] {
        generate(&scene, flags).expect_code(2).expect_words(&[words, "hint:"]);
    }
}

#[test]
fn a_file_of_answers_is_the_same_after_a_kill_and_holds_all_of_them_or_the_best() {
    let scene = trained();
    let row = |i: usize| format!("{{\"prompt\":\"after {i}\",\"response\":\"{}\"}}\n", i + 1);
    scene.write("rows.jsonl", (0..40).map(row).collect::<String>());
    let usual = ["generate", "--model", "run/model", "--max-new-tokens", "6", "--input", "rows.jsonl"];
    let drawn = ["--answers", "3", "--temperature", "1.5", "--seed", "4", "--batch-samples", "3"];
    let usual = [&usual[..], &drawn].concat().into_iter().map(str::to_owned).collect::<Vec<_>>();
    let generate =
        |more: &[&str]| usual.iter().cloned().chain(more.iter().map(ToString::to_string)).collect::<Vec<_>>();
    scene.run(&generate(&["--output", "all.jsonl"])).expect_code(0);
    let rows = |name: &str| -> Vec<Value> {
        scene.text(name).lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    let all = rows("all.jsonl");
    assert_eq!(all.len(), 120);
    assert!(all.iter().all(|row| row["score"].as_f64().is_some_and(|score| score < 0.0)));
    // The best by likelihood, or by the score beside the response.
    scene.run(&generate(&["--output", "likeliest.jsonl", "--best-of", "log-probability"])).expect_code(0);
    scene.run(&generate(&["--output", "best.jsonl", "--best-of", "chrf"])).expect_code(0);
    let (likeliest, best) = (rows("likeliest.jsonl"), rows("best.jsonl"));
    let score = |row: &Value| row["score"].as_f64().expect("a score");
    for (number, answers) in all.chunks(3).enumerate() {
        assert!(answers.contains(&likeliest[number]), "{number}");
        assert!(answers.iter().all(|answer| score(answer) <= score(&likeliest[number])));
        let texts: Vec<&Value> = answers.iter().map(|answer| &answer["response"]).collect();
        assert!(texts.contains(&&best[number]["response"]) && best[number]["chrf"].is_f64(), "{number}");
    }
    let other = ["--best-of", "chrf", "--response-column", "prompt", "--output", "other.jsonl"];
    scene.run(&generate(&other)).expect_code(0);
    assert!(rows("other.jsonl").iter().zip(&best).any(|(other, best)| other["chrf"] != best["chrf"]));
    // A killed command left whole batches, and a part of a row.
    let whole = scene.read("all.jsonl");
    let command = generate(&["--output", "again.jsonl"]);
    let running = scene.start(&command);
    let partial =
        || scene.names(".").into_iter().find(|name| name.starts_with("again.jsonl.") && name.ends_with(".partial"));
    let length = |name: &str| std::fs::metadata(scene.path(name)).map_or(0, |file| file.len());
    // The whole file is in place when the command was faster than this look at it.
    let has_rows = || length("again.jsonl") > 0 || partial().is_some_and(|name| length(&name) > 200);
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !has_rows() && std::time::Instant::now() < end {
        std::thread::yield_now();
    }
    running.kill();
    if let Some(name) = partial() {
        let mut left = scene.read(&name);
        left.truncate(left.len() - 7);
        std::fs::write(scene.path(&name), &left).expect("a file");
        scene.run(&command).expect_code(0).expect_words(&["goes on behind"]);
    }
    assert_eq!(scene.read("again.jsonl"), whole);
    assert_eq!(partial(), None);
    // Its rows are those of a task.
    let task = "data.tasks=[{ name = \"own\", train = \"rows.jsonl\" }, { name = \"taught\", train = \"best.jsonl\", weight = 2.0 }]";
    let mixed = ["--set", task, "--set", "model.init_from=run/model", "--set", "data.train=[]", "--output", "mixed"];
    scene.run(&short(&mixed)).expect_code(0).expect_words(&["taught"]);
    scene.run(&generate(&["--best-of", "chrf"])).expect_code(2);
    scene.run(&generate(&["--output", "x.jsonl", "--best-of", "bleu"])).expect_code(2).expect_words(&["chrf"]);
}

#[test]
fn a_file_of_answers_goes_on_only_with_the_prompts_tokens_and_settings_that_it_was_begun_with() {
    let scene = trained();
    let row = |i: usize| format!("{{\"prompt\":\"after {i}\",\"other\":\"before {i}\",\"response\":\"{i}\"}}\n");
    // The last row is broken, so each command ends with answers of the others.
    scene.write("rows.jsonl", (0..20).map(row).chain(["{\"prompt\": 1".to_owned()]).collect::<String>());
    let usual = ["generate", "--model", "run/model", "--max-new-tokens", "2", "--input", "rows.jsonl", "--output", "a"];
    let begun = |more: &[&str]| {
        scene.run(&[&usual[..], more].concat()).expect_code(4);
        scene.names(".").iter().filter(|name| name.ends_with(".partial")).count()
    };
    assert_eq!(begun(&[]), 1);
    assert_eq!(begun(&[]), 1, "the same command goes on");
    let cases: [&[&str]; 6] = [
        &["--prompt-column", "other"],
        &["--source-template", "{prompt}{other}"],
        &["--prompt", "first"],
        &["--keep-special-tokens"],
        &["--best-of", "chrf"],
        &["--best-of", "chrf", "--response-column", "other"],
    ];
    for (number, more) in cases.into_iter().enumerate() {
        assert_eq!(begun(more), number + 2, "{more:?}");
    }
    for (number, (file, from, to)) in [
        ("config.json", "\"dropout_rate\"", "\"n_positions\": 77, \"dropout_rate\""),
        ("tokenizer.json", "{", "{ "),
        ("generation_config.json", "{", "{\"repetition_penalty\": 1.5, "),
    ]
    .into_iter()
    .enumerate()
    {
        let path = scene.path("run/model").join(file);
        let text = std::fs::read_to_string(&path).unwrap_or_else(|_| "{\"_\": 0}".to_owned());
        assert!(text.contains(from), "{file}: {text}");
        std::fs::write(&path, text.replacen(from, to, 1)).expect("a file");
        assert_eq!(begun(&[]), cases.len() + 2 + number, "{file}");
    }
    let weights = scene.path("run/model/model.safetensors");
    let of = |path: &std::path::Path| std::fs::metadata(path).and_then(|file| file.modified()).expect("a time");
    let (before, mut bytes) = (of(&weights), std::fs::read(&weights).expect("weights"));
    *bytes.last_mut().expect("weights") ^= 1;
    std::fs::write(&weights, bytes).expect("a file");
    std::fs::File::options().write(true).open(&weights).and_then(|file| file.set_modified(before)).expect("a time");
    assert_eq!(begun(&[]), cases.len() + 5, "weights of the same length and time");
}

#[test]
fn predictions_hold_each_row_with_its_scores_and_their_mean_is_the_report_s() {
    let scene = trained();
    let rows = repository().join("data/sample-validation.parquet").display().to_string();
    let usual = ["eval", "--model", "run/model", "--data", &rows, "--samples", "12", "--generate-samples", "8"];
    let usual = [&usual[..], &["--set", "train.eval_max_new_tokens=6", "--json"]].concat();
    let metrics = ["--metrics", "chrf,rouge,accuracy,f1", "--predictions", "out.jsonl"];
    let evaluated = scene.run(&[&usual[..], &metrics].concat()).expect_code(0).json();
    let written = std::fs::read_to_string(scene.path("out.jsonl")).expect("predictions");
    let written: Vec<Value> = written.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(written.len(), 8);
    for (number, row) in written.iter().enumerate() {
        assert_eq!(row["row"], number);
        assert!(["prompt", "reference", "prediction"].iter().all(|key| row[key].is_string()), "{row}");
    }
    for key in ["rouge1", "rougeLsum", "exact_match"] {
        let mean = written.iter().map(|row| row[key].as_f64().expect("a score")).sum::<f64>() / 8.0;
        assert!((mean - evaluated[key].as_f64().expect("a score")).abs() < 1e-12, "{key}");
    }
    assert_eq!(evaluated["accuracy"], evaluated["exact_match"]);
    assert!(evaluated["bleu"].is_f64() && evaluated["macro_f1"].is_f64() && evaluated["chrf_signature"].is_string());
    let beams = scene.run(&[&usual[..], &["--num-beams", "2", "--predictions", "out.jsonl"]].concat()).expect_code(0);
    assert_eq!(beams.json()["generated_samples"], 8);
    let replaced = std::fs::read_to_string(scene.path("out.jsonl")).expect("predictions");
    assert!(replaced.lines().next().is_some_and(|line| line.contains("\"score\":-")), "{replaced}");
    let metrics = ["--metrics", "bleu,rogue"];
    scene.run(&[&usual[..], &metrics].concat()).expect_code(2).expect_words(&["--metrics", "rogue", "rougeLsum"]);
}

/// Evaluates after each step, with a score that no evaluation improves enough.
const STALLED: [&str; 10] = [
    "--set",
    "train.eval_every_steps=1",
    "--set",
    "train.early_stopping_patience=3",
    "--set",
    "train.early_stopping_min_delta=200",
    "--set",
    "checkpoint.best_metric=chrf",
    "--set",
    "checkpoint.model=best",
];

fn end(scene: &Scene) -> Value {
    let metrics = std::fs::read_to_string(scene.path("run/metrics.jsonl")).expect("metrics");
    let mut events = metrics.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    events.rfind(|event| event["event"] == "end").expect("an end")
}

#[test]
fn a_run_that_gets_no_better_stops_at_the_same_step_whether_or_not_it_was_interrupted() {
    let whole = Scene::new();
    let ran = whole.run(&short(&STALLED)).expect_code(0);
    let unwrapped = ran.out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(unwrapped.contains("or 3 evaluations without a better chrf"), "{}", ran.out);
    ran.expect_words(&["stopped early at step 3", "chrf has not improved for 3 evaluations"]);
    assert_eq!((&end(&whole)["reason"], &end(&whole)["step"]), (&"early_stopping".into(), &3.into()));
    let again = whole.run(&short(&[&STALLED[..], &["--keep-training"]].concat())).expect_code(0);
    again.expect_words(&["this run stopped early at step 3", "train.early_stopping_patience"]);

    let parts = Scene::new();
    let first = [&STALLED[..], &["--set", "train.max_steps=2"]].concat();
    parts.run(&short(&first)).expect_code(0);
    assert_eq!(end(&parts)["reason"], "done");
    parts.run(&short(&[&STALLED[..], &["--keep-training"]].concat())).expect_code(0);
    assert_eq!((&end(&parts)["reason"], &end(&parts)["step"]), (&"early_stopping".into(), &3.into()));
    // With more patience the run continues.
    let patient = [&STALLED[..], &["--keep-training", "--set", "train.early_stopping_patience=50"]].concat();
    parts.run(&short(&patient)).expect_code(0);
    assert_eq!((&end(&parts)["reason"], &end(&parts)["step"]), (&"done".into(), &6.into()));
}

#[test]
fn stopping_early_without_evaluations_is_refused() {
    let scene = Scene::new();
    let patience = ["--set", "train.early_stopping_patience=2"];
    for (more, words) in [
        (["--set", "train.eval_every_steps=0"], "train.eval_every_steps"),
        (["--set", "data.validation=[]"], "there are no validation rows"),
    ] {
        scene.run(&short(&[&patience[..], &more].concat())).expect_code(2).expect_words(&[words, "hint:"]);
    }
}
