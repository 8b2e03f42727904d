//! Everything before a plan is in the bill: tokenizers, files of rows, the measurement of the machine. Prompts are read within a limit.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::run::{Ran, Scene};

/// Letters of words, so that there are 26^3 words of three letters.
fn word(number: usize) -> String {
    let letter = |digit: usize| char::from(b'a' + (number / 26usize.pow(digit as u32) % 26) as u8);
    (0..3).map(letter).collect()
}

/// Writes a tokenizer of some 20,000 pieces, which takes more memory than everything else in a small run, and rows.
fn scene() -> Scene {
    let scene = Scene::new();
    let words = (0..26usize.pow(3)).map(|number| (format!("\u{2581}{}", word(number)), -8.0));
    let letters = ('a'..='z').map(|letter| (letter.to_string(), -12.0));
    let special = ["<pad>", "</s>", "<unk>", "\u{2581}"].map(|name| (name.to_owned(), 0.0));
    let pieces: Vec<(String, f64)> = special.into_iter().chain(letters).chain(words).collect();
    let token = |(id, name): (usize, &str)| {
        json!({"id": id, "content": name, "special": true, "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false})
    };
    let space = json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true});
    let added: Vec<Value> = ["<pad>", "</s>", "<unk>"].into_iter().enumerate().map(token).collect();
    let tokenizer = json!({"version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": added,
        "pre_tokenizer": space, "decoder": space,
        "model": {"type": "Unigram", "unk_id": 2, "vocab": pieces, "byte_fallback": false}});
    scene.write("tokenizer.json", tokenizer.to_string());
    let mut rows = String::new();
    for number in 0..40 {
        writeln!(rows, "{}", json!({"prompt": word(number), "response": word(7 * number)})).expect("a string");
    }
    scene.write("rows.jsonl", rows);
    scene
}

/// The settings of a run that holds little besides its tokenizer.
fn train(more: &[&str]) -> Vec<String> {
    let of_model =
        ["model.config=tiny", "model.overrides={ d_model = 16, d_kv = 8, num_heads = 2, d_ff = 32, num_layers = 1 }"];
    let of_data = [
        "data.tokenizer=tokenizer.json",
        "data.train=rows.jsonl",
        "data.max_source_tokens=8",
        "data.max_target_tokens=8",
    ];
    let of_steps = ["train.batch_size=2", "train.max_steps=2"];
    let settings = of_model.iter().chain(&of_data).chain(&of_steps).flat_map(|setting| ["--set", setting]);
    settings.chain(more.iter().copied()).map(str::to_owned).collect()
}

/// The budget that a refusal names, in MiB.
#[track_caller]
fn least(refused: &Ran) -> u64 {
    let named = refused.err.split_once("--memory-budget ").and_then(|(_, rest)| rest.split_once("MiB"));
    named.and_then(|(number, _)| number.parse().ok()).unwrap_or_else(|| panic!("no budget: {}", refused.err))
}

#[test]
fn loading_a_tokenizer_is_a_phase_of_the_bill_and_the_least_budget_holds_it() {
    let scene = scene();
    let plan = |more: &[&str]| scene.run(&[vec!["plan".to_owned()], train(more)].concat());
    let json = plan(&["--json"]).expect_code(0).json();
    let phases = json["bill"]["phase_rows"].as_array().expect("phases");
    assert_eq!(phases[0]["name"], "reading", "{phases:?}");
    let bytes = |name: &str| {
        let row = phases[0]["rows"].as_array().expect("rows").iter().find(|row| row["name"] == name);
        row.and_then(|row| row["bytes"].as_u64()).unwrap_or_else(|| panic!("no row {name}: {}", phases[0]))
    };
    assert!(bytes("process") > 1 << 20 && bytes("tokenizer") > 4 << 20, "{}", phases[0]);
    let rows = phases[0]["rows"].as_array().expect("rows");
    let of_files = rows.iter().find(|row| row["name"] == "files of rows").and_then(|row| row["note"].as_str());
    assert!(
        of_files.is_some_and(|note| note.contains("; at most ") && note.contains("MiB were predicted")),
        "{rows:?}"
    );
    plan(&["--explain"]).expect_code(0).expect_words(&["reading"]);
    // A second copy of the tokenizer would make the peak so far that of the run.
    assert_ne!(json["bill"]["binding"], "reading", "{}", json["bill"]);

    let budget = least(&scene.run(&train(&["--output", "run", "--memory-budget", "1MiB"])).expect_code(3));
    let within = format!("{budget}MiB");
    scene.run(&train(&["--output", "run", "--memory-budget", &within])).expect_code(0);
    let peak = scene.events("run", "end")[0]["peak_rss_bytes"].as_u64().expect("bytes");
    assert!(peak <= budget << 20, "{peak} of {budget} MiB");
    for command in [
        &["generate", "--model", "run/model", "--prompt", "abc", "--max-new-tokens", "2"][..],
        &[
            "eval",
            "--model",
            "run/model",
            "--data",
            "rows.jsonl",
            "--samples",
            "2",
            "--generate-samples",
            "1",
            "--json",
        ],
    ] {
        let with = |budget: &str| scene.run(&[command, &["--memory-budget", budget]].concat());
        let budget = least(&with("1MiB").expect_code(3));
        let ran = with(&format!("{budget}MiB")).expect_code(0);
        let said = format!("{}{}", ran.out, ran.err);
        let after = ["\"peak_rss_bytes\":", "peak "].into_iter().find_map(|words| said.split_once(words));
        let digits: String =
            after.map(|(_, rest)| rest.chars().take_while(char::is_ascii_digit).collect()).unwrap_or_default();
        let peak: u64 = digits.parse().unwrap_or_else(|_| panic!("no peak: {said}"));
        assert!(peak <= budget << 20, "{peak} of {budget} MiB: {command:?}");
    }
}

#[cfg(unix)]
#[test]
fn a_line_without_an_end_ends_the_command_with_its_place() {
    let scene = scene();
    scene.run(&train(&["--output", "run"])).expect_code(0);
    let program = env!("CARGO_BIN_EXE_train_low_mem");
    let endless = "(echo abc; tr '\\0' a < /dev/zero)";
    let usual = "--max-new-tokens 2";
    scene
        .shell(&format!("{endless} | '{program}' generate --model run/model --input - {usual}"))
        .expect_code(4)
        .expect_words(&["standard input: line 2: expected at most 1 MiB", "hint: "]);
    scene
        .shell(&format!("{endless} | '{program}' chat run {usual}"))
        .expect_code(4)
        .expect_words(&["standard input: line 2: expected at most 256 KiB"]);
    // A line within the limit is a prompt, of which the beginning is read.
    scene.write("long.txt", format!("abc\n{}\n", "abc ".repeat(100_000)));
    let answered =
        scene.run(&["generate", "--model", "run/model", "--input", "long.txt", "--json", "--max-new-tokens", "2"]);
    let lines: Vec<Value> =
        answered.expect_code(0).out.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines[1]["prompt"].as_str().map(str::len), Some(400_000));
}

#[test]
fn a_row_of_prompts_that_does_not_fit_beside_the_plan_is_refused_with_a_budget_that_is_enough() {
    let scene = scene();
    scene.run(&train(&["--output", "run"])).expect_code(0);
    let row = |prompt: &str, other: usize| json!({"prompt": prompt, "notes": "x".repeat(other)}).to_string();
    scene.write("rows.jsonl", format!("{}\n{}\n", row("abc", 10), row("abd", 12 << 20)));
    let with = |budget: &str| {
        let command = ["generate", "--model", "run/model", "--input", "rows.jsonl", "--max-new-tokens", "2"];
        scene.run(&[&command[..], &["--memory-budget", budget]].concat())
    };
    let peak = |ran: &Ran| -> u64 {
        let said = ran.err.split_once("peak ").map(|(_, rest)| rest.split(' ').next().unwrap_or_default());
        let mib: f64 = said.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("no peak: {}", ran.err));
        mib.ceil() as u64
    };
    let budget = least(&with("1MiB").expect_code(3));
    let refused = with(&format!("{budget}MiB")).expect_code(3).expect_words(&["rows.jsonl:2: the row is longer than"]);
    assert!(refused.err.contains("is enough for every row that can be read"), "{}", refused.err);
    let budget = least(&refused);
    let ran = with(&format!("{budget}MiB")).expect_code(0);
    assert_eq!(ran.out.lines().count(), 2);
    assert!(peak(&ran) <= budget, "{} of {budget}: {}", peak(&ran), ran.err);
}

#[test]
fn queries_of_a_ranking_are_not_held_beside_the_rows_that_wait() {
    let scene = scene();
    scene.run(&train(&["--output", "run"])).expect_code(0);
    let row = |number: usize, query: usize| {
        json!({"query": format!("{number} {}", "q".repeat(query)), "text": "abc", "gain": "1"}).to_string() + "\n"
    };
    let with = |rows: usize, query: usize, budget: u64| {
        scene.write("pairs.jsonl", (0..rows).map(|number| row(number, query)).collect::<String>());
        let columns =
            ["--query-column", "query", "--label-column", "gain", "--template", "{text}", "--answers", "abc,abd"];
        let usual =
            ["score", "--model", "run", "--pairs", "pairs.jsonl", "--batch-samples", "32", "--json", "--output", "s"];
        scene.run(&[&usual[..], &columns, &["--memory-budget", &format!("{budget}MiB")]].concat())
    };
    // As many as are sorted together, each of a length that is read within any budget.
    let budget = least(&with(400, 60 << 10, 1).expect_code(3));
    let ran = with(400, 60 << 10, budget).expect_code(0).json();
    assert!(ran["peak_rss_bytes"].as_u64() <= Some(budget << 20), "{budget} MiB, {ran}");
    assert_eq!(ran["queries"], 400);
    // The first row says which columns there are. One that does not fit is refused with a budget that is enough.
    let refused = with(3, 900 << 10, 1).expect_code(3).expect_words(&["pairs.jsonl:1: the row is longer than"]);
    with(3, 900 << 10, least(&refused)).expect_code(0);
}

#[test]
fn a_long_chat_is_read_within_the_budget_that_its_refusal_names() {
    let scene = scene();
    let chat = |text: &str| {
        let turn = |role: &str, content: &str| json!({"role": role, "content": content});
        json!({"messages": [turn("user", "abc"), turn("assistant", "abd"), turn("user", text), turn("assistant", "abe")]})
            .to_string()
    };
    scene.write("chats.jsonl", [chat("abf"), chat(&"abc abd ".repeat(15 << 17)), chat("abg")].join("\n"));
    let with = |budget: u64| {
        let budget = format!("{budget}MiB");
        scene.run(&train(&["--set", "data.train=chats.jsonl", "--output", "run", "--memory-budget", &budget]))
    };
    // Reading the row is the peak. Up to five copies of it were held, and the plan refused the budget that the rows were given.
    let budget = least(&with(1).expect_code(3).expect_words(&["the row is longer than"]));
    with(budget).expect_code(0);
    let end = &scene.events("run", "end")[0];
    assert!(end["peak_rss_bytes"].as_u64() <= Some(budget << 20), "{budget} MiB, {end:#}");
}
