//! `convert`, `inspect` and `train-tokenizer` on files that are not parquet; `data.source_prefix`.

use std::sync::Arc;

use arrow_array::builder::{ListBuilder, StringBuilder, StructBuilder};
use arrow_array::{ArrayRef, RecordBatch, StringArray};
use arrow_schema::{DataType, Field, Fields};
use parquet::arrow::ArrowWriter;
use serde_json::json;

use crate::run::{Scene, repository, sample, short};

fn rows(scene: &Scene) {
    let rows: String = (0..40)
        .map(|n| json!({"question": format!("what is {} squared?!!", n % 30), "answer": n % 30 * (n % 30), "x": null}))
        .map(|row| format!("{row}\n"))
        .collect();
    scene.write("rows.jsonl", format!("{rows}{{\"question\": \"\"}}\nnot json\n"));
}

#[test]
fn convert_counts_every_step_and_never_overwrites() {
    let scene = Scene::new();
    rows(&scene);
    let convert = |more: &[&str]| scene.run(&[&["convert", "rows.jsonl", "-o", "out.parquet"], more].concat());
    convert(&[]).expect_code(4).expect_words(&["rows.jsonl:42: not valid JSON", "`--bad-rows skip`"]);
    assert_eq!(scene.names("."), ["rows.jsonl"], "a refusal leaves nothing");
    let steps = ["--bad-rows", "skip", "--clean", "--deduplicate", "exact", "--validation-split", "5"];
    let json = convert(&[&steps[..], &["--json"]].concat()).expect_code(0).json();
    let counts = ["read", "malformed", "empty", "cleaned", "duplicates", "train", "validation"].map(|name| &json[name]);
    assert_eq!(counts, [42, 1, 1, 40, 10, 25, 5], "{json}");
    assert_eq!(scene.names("."), ["out-validation.parquet", "out.parquet", "rows.jsonl"]);
    convert(&[]).expect_code(2).expect_words(&["out.parquet already exists", "`--force`"]);
    let tokenizer = repository().join("data/sample-tokenizer.json");
    let tokenizer = tokenizer.to_str().expect("UTF-8");
    let more = ["--force", "--source-prefix", "Q: ", "--tokenizer", tokenizer, "--max-source-tokens", "4"];
    convert(&[&steps[..], &more].concat()).expect_code(0).expect_words(&[
        "prompt from `question`, response from `answer`",
        "malformed                     1",
        "null or empty                 1  skipped; the first: rows.jsonl:41: column `question` is empty",
        "duplicates                   10  left out, the same byte for byte",
        "30 of 30 prompts are cut at 4 tokens (100.0 %)",
    ]);
    scene.run(&["inspect", "out.parquet"]).expect_code(0).expect_words(&["25 rows", "- prompt: Q: what is"]);
}

#[test]
fn inspect_shows_nulls_duplicates_lengths_and_samples_of_any_form() {
    let scene = Scene::new();
    rows(&scene);
    let tokenizer = repository().join("data/sample-tokenizer.json");
    let tokenizer = tokenizer.to_str().expect("UTF-8");
    scene
        .run(&["inspect", "rows.jsonl", "--tokenizer", tokenizer, "--max-target-tokens", "3"])
        .expect_code(0)
        .expect_words(&[
            "rows.jsonl: JSONL, 42 rows",
            "x                                    41        0",
            "duplicate rows    10",
            "malformed rows    1; the first: rows.jsonl:42: not valid JSON",
            "prompt tokens",
            "responses are cut at 3 tokens",
            "- prompt: what is 0 squared?!!",
        ]);
    let json = scene.run(&["inspect", "--json", "--rows", "10", "rows.jsonl"]).expect_code(0).json();
    assert_eq!((&json["rows_read"], &json["lengths"]["prompt"]["characters"]["longest"]), (&json!(10), &json!(20)));
}

#[test]
fn a_tokenizer_learns_the_texts_of_rows_and_not_their_form() {
    let scene = Scene::new();
    rows(&scene);
    let train = ["train-tokenizer", "--input", "rows.jsonl", "--vocab-size", "400", "--output", "t.json"];
    scene.run(&train).expect_code(4).expect_words(&["rows.jsonl:42: not valid JSON"]);
    let text = String::from_utf8(scene.read("rows.jsonl")).expect("UTF-8");
    scene.write("rows.jsonl", text.replace("not json\n", ""));
    scene.run(&train).expect_code(0).expect_words(&["from 80 texts"]);
}

#[test]
fn a_tokenizer_learns_the_messages_of_parquet_and_not_their_ids() {
    let scene = Scene::new();
    chats(&scene.path("chats.parquet"), 80);
    let train = ["train-tokenizer", "--input", "chats.parquet", "--vocab-size", "400", "--output", "t.json"];
    scene.run(&train).expect_code(0).expect_words(&["from 160 texts"]);
    scene
        .run(&["inspect", "chats.parquet"])
        .expect_code(0)
        .expect_words(&["chats from `messages`", "- prompt: what is 0"]);
}

#[test]
fn other_encodings_quotes_and_languages_are_read_as_the_flags_and_keys_say() {
    let scene = Scene::new();
    scene.write("a.csv", b"prompt,response\nJ\xfcrgen kostet 5 \x80,ja\n");
    let hint = "the file seems to be in windows-1252: read it with `--encoding windows-1252`";
    scene
        .run(&["convert", "a.csv", "-o", "a.parquet"])
        .expect_code(4)
        .expect_words(&["a.csv:2: the row is not UTF-8", hint]);
    let with = ["--encoding", "windows-1252", "-o", "a.parquet"];
    scene.run(&[&["convert", "a.csv"], &with[..]].concat()).expect_code(0);
    scene.run(&["inspect", "a.parquet"]).expect_code(0).expect_words(&["- prompt: Jürgen kostet 5 €"]);
    scene.run(&["inspect", "a.csv", "--encoding", "klingon"]).expect_code(2).expect_words(&["no encoding `klingon`"]);

    scene.write("a.tsv", "prompt\tresponse\n\"one\"\tA\ntwo\tB\n");
    let told = "in quotes                     1  quotes around a field are part of its text; the first: a.tsv:2";
    scene.run(&["convert", "a.tsv", "-o", "t.parquet"]).expect_code(0).expect_words(&[told, "`--quoting all`"]);
    let quoted = ["convert", "a.tsv", "-o", "t.parquet", "--quoting", "all", "--force"];
    scene.run(&quoted).expect_code(0);
    scene.run(&["inspect", "t.parquet"]).expect_code(0).expect_words(&["- prompt: one"]);

    scene.write("tr.jsonl", "{\"translation\": {\"en\": \"hello\", \"de\": \"hallo\"}}\n");
    let refused = ["convert", "tr.jsonl", "-o", "tr.parquet"];
    scene.run(&refused).expect_code(2).expect_words(&["--source-lang en --target-lang de"]);
    let languages = ["convert", "tr.jsonl", "-o", "tr.parquet", "--source-lang", "en", "--target-lang", "de_DE"];
    scene
        .run(&languages)
        .expect_code(0)
        .expect_words(&["prompt from `translation.en`, response from `translation.de`"]);
}

/// A parquet file of chats with one question and one answer each, and with ids.
fn chats(path: &std::path::Path, rows: usize) {
    let fields = Fields::from(["role", "content"].map(|name| Field::new(name, DataType::Utf8, true)).to_vec());
    let mut list = ListBuilder::new(StructBuilder::from_fields(fields, 0));
    for row in 0..rows {
        for texts in [["user", &format!("what is {row} squared?")], ["assistant", &(row * row).to_string()]] {
            for (field, text) in texts.into_iter().enumerate() {
                list.values().field_builder::<StringBuilder>(field).expect("a text").append_value(text);
            }
            list.values().append(true);
        }
        list.append(true);
    }
    let ids: ArrayRef = Arc::new((0..rows).map(|id| Some(format!("chat-{id}"))).collect::<StringArray>());
    let batch =
        RecordBatch::try_from_iter([("id", ids), ("messages", Arc::new(list.finish()))]).expect("equal lengths");
    let file = std::fs::File::create(path).expect("a file");
    let mut writer = ArrowWriter::try_new(file, batch.schema(), None).expect("a writer");
    writer.write(&batch).expect("rows");
    writer.close().expect("a footer");
}

#[test]
fn a_source_prefix_is_kept_with_the_model_and_used_by_eval_and_generate() {
    let scene = Scene::new();
    let prefix = ["--set", "data.source_prefix=倒过来："];
    scene.run(&short(&prefix)).expect_code(0);
    let config = String::from_utf8(scene.read("run/model/config.json")).expect("UTF-8");
    assert!(config.contains("\"prefix\": \"倒过来：\""), "{config}");
    let data = sample("data.validation", "sample-validation.parquet");
    let data = data.split_once('=').expect("KEY=VALUE").1;
    let eval = |more: &[&str]| {
        let ran =
            scene.run(&[&["eval", "--model", "run/model", "--data", data, "--samples", "12", "--json"], more].concat());
        ran.expect_code(0).json()["loss"].as_f64().expect("a loss")
    };
    let last = scene.events("run", "eval").pop().expect("an evaluation")["loss"].as_f64().expect("a loss");
    // Sums over other batches differ in the last digits.
    assert!((eval(&[]) - last).abs() < 1e-6, "as the run evaluated itself");
    assert!((eval(&["--set", "data.source_prefix="]) - last).abs() > 1e-6);
    let without =
        scene.run(&["generate", "--model", "run/model", "--prompt", "茶木金心", "--json"]).expect_code(0).json();
    scene.write("run/model/config.json", config.replace("\"prefix\": \"倒过来：\"", "\"x\": 0"));
    let whole = ["generate", "--model", "run/model", "--prompt", "倒过来：茶木金心", "--json"];
    assert_eq!(scene.run(&whole).expect_code(0).json()["response"], without["response"]);
}
