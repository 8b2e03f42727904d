//! Rows with one enormous word, unusable rows, and files without text: the budget and the exit codes hold.

use std::path::PathBuf;

use crate::files::write_rows;
use crate::run::{Ran, Scene, short};

const MIB: usize = 1 << 20;

/// Letters that no tokenizer has seen in this order.
fn word(letters: &[u8], bytes: usize, seed: u64) -> String {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        letters[(state >> 33) as usize % letters.len()]
    };
    (0..bytes).map(|_| char::from(next())).collect()
}

/// 300 short rows. Every 30th row has a megabyte of DNA, hexadecimal digits or base64 in a single word.
fn enormous_words(scene: &Scene) -> PathBuf {
    let alphabets: [&[u8]; 3] =
        [b"ACGT", b"0123456789abcdef", b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"];
    let prompts: Vec<String> = (0..300)
        .map(|row| if row % 30 == 7 { word(alphabets[row % 3], MIB, row as u64) } else { format!("{row} plus 1") })
        .collect();
    let responses: Vec<String> = (0..300).map(|row| (row + 1).to_string()).collect();
    write(scene, "words.parquet", &prompts, &responses)
}

fn write(scene: &Scene, name: &str, prompts: &[String], responses: &[String]) -> PathBuf {
    let path = scene.path(name);
    let column = |texts: &[String]| -> Vec<Option<String>> { texts.iter().cloned().map(Some).collect() };
    let (prompts, responses) = (column(prompts), column(responses));
    let columns = [
        ("prompt", prompts.iter().map(Option::as_deref).collect()),
        ("response", responses.iter().map(Option::as_deref).collect()),
    ];
    write_rows(&path, &columns);
    path
}

fn train(scene: &Scene, rows: &str, more: &[&str]) -> Ran {
    let data = format!("data.train=['{rows}']");
    let tokenizer = format!("data.tokenizer={}/../../data/sample-tokenizer.json", env!("CARGO_MANIFEST_DIR"));
    let arguments = [
        "--set",
        &data,
        "--set",
        "data.validation=[]",
        "--set",
        &tokenizer,
        "--set",
        "memory.micro_batch_samples=auto",
    ];
    scene.run(&short(&[&arguments, more].concat()))
}

/// The peak in MiB that a command prints if it has a budget.
fn printed_peak(ran: &Ran) -> f64 {
    let line = ran.err.lines().find(|line| line.starts_with("peak ")).expect("a peak");
    let number = line.strip_suffix(" MiB").and_then(|line| line.split_whitespace().nth(1));
    number.and_then(|number| number.parse().ok()).expect("MiB")
}

#[test]
fn rows_that_are_one_enormous_word_stay_within_the_budget() {
    let scene = Scene::new();
    let rows = enormous_words(&scene).display().to_string();
    let budget = 60 * MIB;
    let more = ["--memory-budget", "60MiB", "--set", "train.batch_size=60", "--max-steps", "5"];
    let ran = train(&scene, &rows, &more).expect_code(0);
    let end = &scene.events("run", "end")[0];
    assert!(end["peak_rss_bytes"].as_u64() <= Some(budget as u64), "{end:#}");
    assert!(!ran.err.contains("above the predicted"), "{}", ran.err);
}

#[test]
fn a_run_that_can_use_no_row_ends_with_an_error_and_a_large_share_left_out_is_warned_of() {
    let scene = Scene::new();
    write_rows(&scene.path("nulls.parquet"), &[("prompt", vec![None; 30]), ("response", vec![None; 30])]);
    let expected = ["no usable row in the training data: all 30 are null", "row 0: column `prompt` is null"];
    train(&scene, "nulls.parquet", &["--set", "data.shuffle=false"]).expect_code(4).expect_words(&expected);
    assert!(!scene.path("run/model").exists());

    let texts: Vec<Option<&str>> = (0..30).map(|row| (row % 5 > 0).then_some("2 + 2")).collect();
    write_rows(&scene.path("some.parquet"), &[("prompt", texts.clone()), ("response", texts)]);
    let words = ["6 of the first 30 rows were skipped (20 %): null, empty or not UTF-8"];
    train(&scene, "some.parquet", &["--output", "some", "--epochs", "2"]).expect_code(0).expect_words(&words);
    let warnings = scene.events("some", "warning");
    let warned: Vec<_> = warnings.iter().filter(|warning| warning["kind"] == "bad_rows").collect();
    assert_eq!(warned.len(), 1);
    assert_eq!((warned[0]["bad_rows"].as_u64(), warned[0]["read_rows"].as_u64()), (Some(6), Some(30)));
}

#[test]
fn training_a_tokenizer_keeps_its_budget_on_enormous_values_or_is_refused_before() {
    let scene = Scene::new();
    let words = enormous_words(&scene).display().to_string();
    let long = vec!["a ".repeat(MIB), "b".repeat(4 * MIB)];
    let long = write(&scene, "long.parquet", &long, &long).display().to_string();
    let train = |input: &str, budget: &str| {
        let arguments =
            ["train-tokenizer", "--vocab-size", "500", "--force", "--memory-budget", budget, "--input", input];
        scene.run(&arguments)
    };
    for input in [&words, &long] {
        let ran = train(input, "64MiB").expect_code(0);
        assert!(printed_peak(&ran) <= 64.0, "{}", ran.err);
    }
    train(&words, "9MiB").expect_code(3).expect_words(&["this tokenizer needs at least", "--memory-budget is 9 MiB"]);
}

#[test]
fn what_is_no_text_is_not_learned() {
    let scene = Scene::new();
    let parquet = std::fs::read(enormous_words(&scene)).expect("a file");
    scene.write("half.parquet", &parquet[1..]);
    scene.write("zeros", [0; 4096]);
    let train = |input: &str, vocab_size: &str| {
        let ran = scene.run(&["train-tokenizer", "--vocab-size", vocab_size, "--input", input]);
        assert!(!scene.path("tokenizer.json").exists());
        ran
    };
    train("half.parquet", "400")
        .expect_code(4)
        .expect_words(&["half.parquet: not a text file: it ends like a parquet"]);
    train("zeros", "400").expect_code(4).expect_words(&["zeros: not a text file: 100.0 % of its bytes are zero"]);
    train("zeros", "300").expect_code(2).expect_words(&["a vocabulary of 300 is too small: expected at least 359"]);
}

#[test]
fn a_tokenizer_that_fails_is_an_error_that_names_its_file() {
    let scene = Scene::new();
    let sample =
        std::fs::read(format!("{}/../../data/sample-tokenizer.json", env!("CARGO_MANIFEST_DIR"))).expect("a file");
    let mut file: serde_json::Value = serde_json::from_slice(&sample).expect("JSON");
    file["normalizer"] = serde_json::json!({"type": "Precompiled", "precompiled_charsmap": ""});
    scene.write("bad.json", file.to_string());
    let ran = scene.run(&short(&["--set", "data.tokenizer=bad.json", "--set", "data.train=['x.parquet']"]));
    ran.expect_code(4).expect_words(&["bad.json: not a usable tokenizer: the tokenizers library failed at reading it"]);
}
