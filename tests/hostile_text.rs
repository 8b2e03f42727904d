//! Text of others on the screen: rows, names and answers never control the terminal, in any command.

use serde_json::{Value, json};

use crate::run::{Ran, Scene, repository, short};

/// Sets a terminal's title, erases its screen with C0 and with C1, begins a false link, goes back to the start of the line, and reverses
/// the rest of it.
const HOSTILE: &str =
    "\u{1b}]0;PWNED\u{7}\u{1b}[2J\u{9b}2J\u{1b}]8;;http://evil/\u{1b}\\\r\u{8}\u{202e}\u{200f}\u{e0041}";

/// Whether a terminal would obey this character, or not show it.
fn is_hostile(c: char) -> bool {
    (c.is_control() && c != '\n' && c != '\t')
        || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}' | '\u{e0000}'..='\u{e007f}')
}

/// Checks that the output is safe, and that the text is in it, so that the test shows something.
#[track_caller]
fn expect_safe(ran: Ran) -> Ran {
    for text in [&ran.out, &ran.err] {
        assert!(!text.contains(is_hostile), "{text:?}");
    }
    ran
}

#[track_caller]
fn expect_shown(ran: Ran) -> Ran {
    assert!(ran.out.contains("PWNED") || ran.err.contains("PWNED"), "{}\n{}", ran.out, ran.err);
    expect_safe(ran)
}

/// A scene with hostile rows in JSONL (`rows.jsonl`, 40 rows), and a column with a hostile name in CSV (`columns.csv`).
fn scene() -> Scene {
    let scene = Scene::new();
    let row =
        |number: usize| json!({"prompt": format!("{number} + 1 {HOSTILE}\nhint: a false line"), "response": HOSTILE});
    let rows: String = (0..40).map(|number| format!("{}\n", row(number))).collect();
    scene.write("rows.jsonl", &rows);
    scene.write(&format!("{HOSTILE}.jsonl").replace('/', ""), &rows);
    scene.write("columns.csv", format!("\"{HOSTILE}\nhint: a false line\",b\n1,2\n3,4\n"));
    scene
}

fn hostile_file() -> String {
    format!("{HOSTILE}.jsonl").replace('/', "")
}

/// Trains on the hostile rows into `output`.
fn train(scene: &Scene, output: &str) -> Ran {
    let tokenizer = format!("data.tokenizer={}", repository().join("data/sample-tokenizer.json").display());
    let of_rows = ["--set", "data.train=rows.jsonl", "--set", "data.validation=rows.jsonl", "--set", &tokenizer];
    let of_answers = ["--set", "train.eval_metrics=accuracy", "--output", output];
    scene.run(&short(&[&of_rows[..], &of_answers].concat()))
}

#[test]
fn rows_and_names_of_columns_are_shown_and_never_obeyed() {
    let scene = scene();
    expect_shown(train(&scene, "run").expect_code(0));
    for line in String::from_utf8(scene.read("run/metrics.jsonl")).expect("UTF-8").lines() {
        assert!(!line.contains(is_hostile), "{line:?}");
    }
    let page = String::from_utf8(scene.read("run/report.html")).expect("UTF-8");
    assert!(page.contains("PWNED") && !page.contains(is_hostile));
    let answers = ["--samples", "8", "--max-new-tokens", "2", "--predictions", "p.jsonl"];
    expect_shown(
        scene.run(&[&["eval", "--model", "run", "--data", "rows.jsonl"][..], &answers].concat()).expect_code(0),
    );
    let first: Value =
        serde_json::from_slice(scene.read("p.jsonl").split(|byte| *byte == b'\n').next().expect("a line"))
            .expect("JSON");
    assert_eq!(first["reference"], HOSTILE.trim(), "the file has the text itself");
    expect_shown(scene.run(&["inspect", "rows.jsonl", "columns.csv"]).expect_code(0));
    let json = expect_shown(scene.run(&["inspect", "--json", "rows.jsonl"]).expect_code(0)).json();
    assert!(json["samples"][0]["prompt"].as_str().is_some_and(|prompt| prompt.contains(HOSTILE)), "JSON stays exact");
    expect_safe(scene.run(&["convert", "rows.jsonl", "-o", "rows.parquet"]).expect_code(0));
    expect_shown(scene.run(&["inspect", "rows.parquet"]).expect_code(0));
    let ran = expect_shown(scene.run(&["convert", "columns.csv", "-o", "c.parquet"]).expect_code(4));
    assert!(!ran.err.lines().any(|line| line == "hint: a false line"), "{}", ran.err);
    expect_shown(scene.run(&short(&["--set", "data.train=columns.csv", "--output", "o"])).expect_code(4));
    for command in
        [&["watch", "run"][..], &["report", "run"], &["doctor"], &["jobs"], &["plan", "--set", "data.train=rows.jsonl"]]
    {
        expect_safe(scene.run(command));
    }
}

#[test]
fn names_of_files_models_and_settings_are_shown_and_never_obeyed() {
    let scene = scene();
    let file = hostile_file();
    for command in [
        &["inspect"][..],
        &["convert", "-o", "c.parquet"],
        &["eval", "--model", "none", "--data"],
        &["train", "--data"],
    ] {
        expect_safe(scene.run(&[command, &[&file]].concat()));
    }
    expect_shown(scene.run(&["inspect", &file]).expect_code(0));
    scene.write("odd/config.json", json!({"model_type": HOSTILE, "d_model": 8}).to_string());
    expect_shown(scene.run(&["generate", "--model", "odd", "--prompt", "a"]).expect_code(4));
    for command in [
        &["generate", "--prompt", "a", "--model"][..],
        &["chat"],
        &["serve"],
        &["merge", "--output", "m", "--model", "run", "--adapter"],
        &["convert-base", "--precision", "nf4", "--output", "m", "--model"],
        &["trim-vocab", "--output", "m", "--keep-used", "rows.jsonl", "--model"],
        &["add-tokens", "--output", "m", "--tokens", "a", "--model"],
        &["export", "--format", "gguf", "--output", "m", "--model"],
        &["train-tokenizer", "--vocab-size", "400", "--output", "t.json", "--input"],
        &["watch"],
        &["report"],
        &["jobs", "run"],
        &["plan", "--config"],
        &["--set"],
        &["--learn-rate"],
    ] {
        let ran = expect_shown(scene.run(&[command, &[HOSTILE]].concat()));
        assert_ne!(ran.code, Some(0), "{command:?}");
    }
    // A list of runs with a hostile name, which fails.
    let output = format!("output = {}\n", json!(HOSTILE.replace('/', "")));
    scene.write("list.toml", format!("[[run]]\n{output}set = [\"data.train=none.jsonl\", \"model.config=tiny\"]\n"));
    expect_shown(scene.run(&["jobs", "run", "list.toml"]).expect_code(1));
}

#[test]
fn answers_are_exact_in_a_file_and_safe_on_a_terminal() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "train.eval_samples=1"])).expect_code(0);
    // A tokenizer whose every piece is hostile.
    let mut tokenizer: Value = serde_json::from_slice(&scene.read("run/model/tokenizer.json")).expect("JSON");
    let pieces = tokenizer["model"]["vocab"].as_object().expect("pieces");
    let hostile = |(piece, id): (&String, &Value)| match id.as_u64() {
        Some(0..3) => (piece.clone(), id.clone()),
        _ => (format!("{HOSTILE}{id}"), id.clone()),
    };
    tokenizer["model"]["vocab"] = Value::Object(pieces.iter().map(hostile).collect());
    (tokenizer["model"]["merges"], tokenizer["decoder"]) = (json!([]), Value::Null);
    scene.write("run/model/tokenizer.json", tokenizer.to_string());
    // Drawn tokens: a model of six steps prefers tokens without a text.
    const DRAWN: &str = "--max-new-tokens 4 --min-new-tokens 4 --temperature 3 --top-k 0 --seed 1";
    let drawn: Vec<&str> = DRAWN.split(' ').collect();
    let generate = [&["generate", "--model", "run/model", "--prompt", "after 75"][..], &drawn].concat();
    let exact = scene.run(&generate).expect_code(0).out;
    assert!(exact.contains(HOSTILE), "{exact:?}");
    let streamed = scene.run(&[&generate[..], &["--stream"]].concat()).expect_code(0).out;
    assert_eq!(exact, streamed);
    let json = expect_shown(scene.run(&[&generate[..], &["--json"]].concat()).expect_code(0)).json();
    assert_eq!(json["response"].as_str(), Some(exact.trim_end_matches('\n')));
    if scene.shell("command -v script").code != Some(0) {
        return;
    }
    let program = env!("CARGO_BIN_EXE_train_low_mem");
    for line in [
        format!("{program} generate --model run/model {DRAWN} --prompt a"),
        format!("{program} generate --model run/model {DRAWN} --prompt a --stream"),
        format!("echo after 75 | {program} chat run/model {DRAWN}"),
    ] {
        let ran = scene.shell(&format!("script -qec '{line}' /dev/null < /dev/null")).expect_code(0);
        assert!(ran.out.contains("\\u001b]0;PWNED"), "{:?}", ran.out);
        for sequence in ["\u{1b}]", "\u{9b}", "\u{1b}[2J", "\u{202e}", "\u{8}"] {
            assert!(!ran.out.contains(sequence), "{sequence:?} in {:?}", ran.out);
        }
    }
}
