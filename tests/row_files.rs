//! Training files that are not parquet: converted once beside the run, with the same rows in every format. They are used again, and bound
//! to the run that read them.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::files::write_rows;
use crate::run::{Ran, Scene, short};

const ROWS: usize = 24;

fn rows() -> impl Iterator<Item = (String, String)> {
    (0..ROWS).map(|n| (format!("reverse: {n} \"x\", y"), format!("y ,x\n{n}")))
}

fn lines(row: impl Fn(String, String) -> Value) -> String {
    rows().map(|(prompt, response)| format!("{}\n", row(prompt, response))).collect()
}

fn pairs() -> String {
    lines(|prompt, response| json!({"prompt": prompt, "response": response}))
}

fn csv() -> String {
    rows().fold("id,answer,question\n".to_owned(), |mut text, (prompt, response)| {
        let _ = writeln!(text, "7,\"{response}\",\"{}\"", prompt.replace('"', "\"\""));
        text
    })
}

/// A short run over these files, with the sample's tokenizer.
fn train(scene: &Scene, data: &str, output: &str, more: &[&str]) -> Ran {
    let tokenizer = format!("data.tokenizer={}/data/sample-tokenizer.json", root());
    let (data, model) = (format!("data.train={data}"), "model.config=tiny".to_owned());
    let mut arguments = short(&["--set", &data, "--set", &model, "--set", &tokenizer, "--output", output]);
    arguments.extend(more.iter().map(ToString::to_string));
    scene.run(&arguments)
}

fn root() -> &'static str {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../..")
}

fn losses(scene: &Scene, run: &str) -> Vec<Value> {
    scene.events(run, "step").into_iter().map(|step| step["loss"].clone()).collect()
}

#[test]
fn the_same_rows_in_any_form_train_to_the_same_losses() {
    let scene = Scene::new();
    let owned: Vec<(String, String)> = rows().collect();
    let column = |value: fn(&(String, String)) -> &str| owned.iter().map(|row| Some(value(row))).collect();
    write_rows(&scene.path("rows.parquet"), &[("prompt", column(|row| &row.0)), ("response", column(|row| &row.1))]);
    scene.write("rows.jsonl", pairs());
    scene.write("rows.csv", csv());
    let text = lines(
        |prompt, response| json!({"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]}),
    );
    // A directory stands for its files, except the hidden file and the notes.
    let (first, second) = text.split_at(text.match_indices('\n').nth(9).unwrap().0 + 1);
    for (name, text) in [("a.jsonl", first), ("b.json", second), (".c.jsonl", "x"), ("notes.md", "x")] {
        scene.write(&format!("chats/{name}"), text);
    }
    train(&scene, "rows.parquet", "parquet", &[]).expect_code(0);
    for (data, output) in [("rows.jsonl", "jsonl"), ("rows.csv", "csv"), ("chats", "chats")] {
        let ran = train(&scene, data, output, &[]).expect_code(0);
        assert!(ran.out.contains(&format!("{ROWS} rows (")), "{}", ran.out);
        assert_eq!(losses(&scene, output), losses(&scene, "parquet"), "{data}");
    }
    assert_eq!(scene.names("jsonl/data"), ["train-rows.json", "train-rows.parquet"]);
    assert_eq!(scene.events("csv", "data")[0]["counts"]["train"], ROWS);
}

#[test]
fn turned_rows_are_used_again_until_their_source_changes() {
    let scene = Scene::new();
    scene.write("rows.jsonl", pairs());
    train(&scene, "rows.jsonl", "run", &["--max-steps", "2"]).expect_code(0);
    let turned = scene.read("run/data/train-rows.parquet");
    // The same bytes with other times.
    scene.write("rows.jsonl", pairs());
    let ran = train(&scene, "rows.jsonl", "run", &["--keep-training", "--max-steps", "3"]).expect_code(0);
    assert!(ran.out.contains("turned before into run/data/train-rows.parquet"), "{}", ran.out);
    scene.write("rows.jsonl", pairs().replace("reverse: 3 ", "reverse: 4 "));
    let before = scene.contents("run");
    let refused = train(&scene, "rows.jsonl", "run", &["--keep-training", "--max-steps", "4"]);
    let refused =
        refused.expect_code(2).expect_words(&["rows.jsonl, or how its rows are read, changed since this run"]);
    assert!(refused.err.contains("--allow-changed data"), "{}", refused.err);
    assert_eq!(scene.contents("run"), before);
    train(&scene, "rows.jsonl", "run", &["--keep-training", "--max-steps", "4", "--allow-changed", "data"])
        .expect_code(0);
    assert_ne!(scene.read("run/data/train-rows.parquet"), turned);
}

#[test]
fn a_run_over_more_files_than_are_listed_has_a_short_record_and_resumes() {
    let scene = Scene::new();
    let files = 1010;
    for number in 0..files {
        scene.write(&format!("rows/{number:04}.jsonl"), r#"{"prompt": "2 + 2", "response": "4"}"#);
    }
    train(&scene, "rows", "run", &["--max-steps", "1"]).expect_code(0);
    let reading = &scene.events("run", "start")[0]["reading"]["train"];
    assert_eq!((reading["files"].as_array().map(Vec::len), &reading["more_files"]), (Some(100), &json!(910)));
    let data = &scene.events("run", "data")[0];
    assert_eq!((&data["sources"]["files"], &data["counts"]["train"]), (&json!(files), &json!(files)));
    let ran = train(&scene, "rows", "run", &["--keep-training", "--max-steps", "2"]).expect_code(0);
    assert!(ran.out.contains("1,010 rows, turned before into"), "{}", ran.out);
    scene.write("rows/0700.jsonl", r#"{"prompt": "2 + 2", "response": "5"}"#);
    let refused = train(&scene, "rows", "run", &["--keep-training", "--max-steps", "3"]).expect_code(2);
    assert!(refused.err.contains("changed since this run turned it"), "{}", refused.err);
}

#[test]
fn a_file_in_the_way_of_turned_rows_is_never_replaced() {
    let scene = Scene::new();
    scene.write("rows.jsonl", pairs());
    for name in ["data/train-rows.parquet", "data/train-rows.json"] {
        scene.write(name, "mine");
        let arguments = train(&scene, "rows.jsonl", ".", &[]);
        arguments.expect_code(2).expect_words(&[name, "was not made by a run", "`--output`"]);
        assert_eq!(scene.read(name), b"mine");
        std::fs::remove_file(scene.path(name)).unwrap();
    }
}

#[test]
fn a_split_keeps_rows_for_validation_also_of_parquet() {
    let scene = Scene::new();
    scene.write("rows.jsonl", pairs());
    train(&scene, "rows.jsonl", "a", &["--set", "data.validation_split=0.25"]).expect_code(0);
    let counts = &scene.events("a", "data")[0]["counts"];
    assert_eq!((&counts["train"], &counts["validation"]), (&json!(18), &json!(6)));
    assert_eq!(scene.events("a", "eval").last().unwrap()["samples"], 6);
    train(&scene, "a/data/train-rows.parquet", "b", &["--set", "data.validation_split=5"]).expect_code(0);
    let counts = &scene.events("b", "data")[0]["counts"];
    assert_eq!((&counts["train"], &counts["validation"]), (&json!(13), &json!(5)));
}

#[test]
fn a_row_that_is_broken_is_named_with_its_line_and_the_way_around_it() {
    let scene = Scene::new();
    scene.write("rows.jsonl", format!("{}{{\"prompt\": \"a\"}}\n{{\"prompt\": \n", pairs()));
    let refused = train(&scene, "rows.jsonl", "run", &[]);
    let refused = refused.expect_code(4).expect_words(&["rows.jsonl:26: not valid JSON"]);
    assert!(refused.err.contains("--set data.bad_rows=skip"), "{}", refused.err);
    assert!(!scene.path("run").exists(), "a refused run leaves nothing");
    let ran = train(&scene, "rows.jsonl", "run", &["--set", "data.bad_rows=skip"]).expect_code(0);
    assert!(
        ran.err.contains("2 of 26 rows were skipped; the first: rows.jsonl:25: column `response` is null"),
        "{}",
        ran.err
    );
    scene.write("other.csv", "frage,antwort\n1,2\n");
    let refused = train(&scene, "other.csv", "other", &[]);
    let refused = refused.expect_code(4).expect_words(&["other.csv: no column `prompt`"]);
    assert!(
        refused.err.contains("`data.prompt_column` and `data.response_column` to two of: frage, antwort"),
        "{}",
        refused.err
    );
}

#[test]
fn a_plan_and_a_dry_run_know_the_rows_and_leave_nothing() {
    let scene = Scene::new();
    scene.write("rows.jsonl", pairs());
    train(&scene, "rows.jsonl", "run", &["--dry-run"]).expect_code(0);
    let tokenizer = format!("data.tokenizer={}/data/sample-tokenizer.json", root());
    let plan = scene.run(&[
        "plan",
        "--json",
        "--set",
        "data.train=rows.jsonl",
        "--set",
        "model.config=tiny",
        "--set",
        &tokenizer,
        "--set",
        "train.batch_size=6",
        "--epochs",
        "1",
        "--output",
        "run",
    ]);
    let plan: Value = serde_json::from_str(&plan.expect_code(0).out).expect("JSON alone");
    assert_eq!(plan["total_steps"], 4);
    assert_eq!(scene.names("."), ["rows.jsonl"]);
}
