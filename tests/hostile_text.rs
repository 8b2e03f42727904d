//! Text of others on the screen: rows, names and answers never control the terminal, in any command.

use serde_json::{Value, json};

use crate::jobs::{Other, with_ledger};
use crate::run::{Ran, Scene, repository, short};
use crate::serve;

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

/// The commands of the program, as its help lists them.
fn commands(scene: &Scene) -> Vec<String> {
    let help = scene.run(&["--help"]).expect_code(0).out;
    let listed = help.split("Commands:\n").nth(1).and_then(|rest| rest.split("\n\n").next()).expect("commands");
    let names = listed.lines().filter_map(|line| line.strip_prefix("  ").filter(|line| !line.starts_with(' ')));
    names.map(|line| line.split(' ').next().expect("a name").to_owned()).collect()
}

#[test]
fn every_command_is_tried_with_hostile_rows_models_and_names() {
    let scene = scene();
    let (model, file) = (HOSTILE.replace('/', ""), hostile_file());
    let place = |ending: &str| format!("{model}{ending}");
    let (adapter, list) = (place("-adapter"), place(".toml"));
    expect_shown(train(&scene, &model).expect_code(0));
    let tuned = ["--lora", "--model", &model, "--data", &file, "--max-steps", "1", "--output", &adapter];
    expect_shown(scene.run(&short(&[&["--set", "train.eval_samples=0"][..], &tuned].concat())).expect_code(0));
    let config = format!("{model}/model/config.json");
    let train_rows = format!("data.train={file}");
    let (table, merged, base, export, tokenizer, next, vectors) = (
        place(".parquet"),
        place("-merged"),
        place("-base"),
        place("-export"),
        place(".json"),
        place("-next"),
        place(".vectors"),
    );
    let few = ["--samples", "2", "--max-new-tokens", "2"];
    let (trimmed, added) = (place("-trimmed"), place("-added"));
    let mean = place("-mean");
    let of_file = "{prompt} {response}";
    let tried: [(&str, Vec<&str>); 27] = [
        ("train", vec!["--keep-training", "--max-steps", "7", "--output", &model]),
        ("plan", vec!["--model", &model, "--data", &file]),
        ("eval", [&["--model", &model, "--data", &file][..], &few].concat()),
        ("generate", vec!["--model", &model, "--input", &file, "--max-new-tokens", "2", "--json"]),
        ("embed", vec!["--model", &model, "--text-column", "prompt", "--input", &file, "--output", &vectors]),
        ("score", vec!["--model", &model, "--pairs", &file, "--template", of_file, "--answers", "a,b"]),
        ("chat", vec![&model, "--max-new-tokens", "2"]),
        ("serve", vec![&model, "--listen", &model]),
        ("inspect", vec![&file]),
        ("convert", vec![&file, "--output", &table]),
        ("merge", vec!["--adapter", &adapter, "--output", &merged]),
        ("export", vec!["--model", &model, "--format", "ctranslate2", "--output", &export]),
        ("convert-base", vec!["--model", &model, "--precision", "int8", "--output", &base]),
        ("train-tokenizer", vec!["--input", &file, "--vocab-size", "400", "--output", &tokenizer]),
        ("average", vec![&model, &model, "--output", &mean]),
        ("trim-vocab", vec!["--model", &model, "--keep-used", &file, "--output", &trimmed]),
        ("add-tokens", vec!["--model", &model, "--tokens", HOSTILE, "--output", &added]),
        ("bench", vec!["--model", &config, "--batch", "1", "--source-tokens", "4", "--target-tokens", "4"]),
        ("bench", vec!["serve", &model, "--batch", "1", "--source-tokens", "4", "--new-tokens", "2"]),
        ("report", vec![&model]),
        ("doctor", vec!["--output", &model]),
        ("proof", vec!["--output", &model]),
        ("watch", vec![&model]),
        ("jobs", vec!["add", &list, "--output", &next, "--set", &train_rows, "--set", HOSTILE]),
        ("keys", vec![HOSTILE]),
        ("completions", vec![HOSTILE]),
        ("help", vec![HOSTILE]),
    ];
    for (command, arguments) in &tried {
        let ran = expect_safe(scene.run(&[&[*command][..], arguments].concat()));
        let is_documented = ran.code.is_some_and(|code| [0, 2, 4, 6].contains(&code));
        assert!(is_documented && !ran.err.contains("panicked"), "{command}: {:?}: {}", ran.code, ran.err);
    }
    for command in commands(&scene) {
        assert!(tried.iter().any(|(tried, _)| *tried == command), "`{command}` is not tried");
    }
    // The list's run fails, and its setting is shown with the reason.
    expect_safe(scene.run(&["jobs", "run", &list]));
    let other = Other::writes_to(&scene, HOSTILE, 1 << 30, "");
    expect_shown(with_ledger(&scene, "$program jobs").expect_code(0));
    drop(other);
}

#[test]
fn what_clients_send_is_safe_in_the_log_of_a_server() {
    let scene = scene();
    let model = HOSTILE.replace('/', "");
    train(&scene, &model).expect_code(0);
    for log in [&[][..], &["--access-log", "access.jsonl"]] {
        let server = serve::start_with(&scene, &model, log);
        let (status, answer) = server.ask(&json!({"prompt": HOSTILE, "model": HOSTILE}));
        assert_eq!(status, 404, "{answer}");
        assert_eq!(server.ask(&json!({"prompt": HOSTILE, "user": HOSTILE, "max_tokens": 2})).0, 200);
        for path in ["/\u{9b}2J\u{202e}PWNED", "/PWNED\u{1b}]0;x\u{7}", "/%1b]0;PWNED%07"] {
            let asked =
                format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: {model}\r\n\r\n");
            assert!(server.exchange(&asked).0 >= 400);
        }
        let ran = expect_safe(server.end().expect_code(0));
        let lines = if log.is_empty() { ran.out } else { scene.text("access.jsonl") };
        assert!(lines.contains("PWNED") && !lines.contains(is_hostile), "{lines:?}");
        assert!(lines.lines().count() >= 5 && lines.lines().all(|line| line.starts_with('{')), "{lines}");
    }
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
