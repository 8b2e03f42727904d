//! How files are read: the columns of pairs, the splits of a directory, what is left out. Two meanings are refused with a command for each.

use serde_json::json;

use crate::run::{Ran, Scene, repository, short};

fn train(scene: &Scene, data: &str, more: &[&str]) -> Ran {
    let tokenizer = format!("data.tokenizer={}", repository().join("data/sample-tokenizer.json").display());
    let data = format!("data.train={data}");
    let flags = [
        "--set",
        "train.dropout=0",
        "--set",
        &data,
        "--set",
        "model.config=tiny",
        "--set",
        &tokenizer,
        "--max-steps",
        "2",
        "--output",
    ];
    scene.run(&short(&[&flags[..], if more.is_empty() { &["run"] } else { more }].concat()))
}

/// The pairs that `convert` makes of one file.
fn pairs(scene: &Scene, file: &str, more: &[&str]) -> String {
    let convert = ["convert", file, "-o", "out.parquet", "--force"];
    scene.run(&[&convert[..], more].concat()).expect_code(0);
    scene.run(&["inspect", "out.parquet", "--show", "9", "--json"]).expect_code(0).json()["samples"].to_string()
}

#[test]
fn a_text_with_a_label_is_a_pair_and_never_pretraining() {
    let scene = Scene::new();
    scene.write("rows.csv", "id,text,label\n1,it was bad,negative\n2,it was good,positive\n");
    let ran = train(&scene, "rows.csv", &[]).expect_code(0);
    let words = "prompt from `text`, response from `label`; not used: `id`";
    assert!(ran.out.contains(words), "{}", ran.out);
    let reading = &scene.events("run", "start")[0]["reading"];
    assert_eq!(reading["train"]["files"][0]["not_used"], json!(["id"]));
    let file = &reading["train"]["files"][0];
    assert_eq!(file["texts"], "prompt from `text`, response from `label`");
    let dialect = json!([file["rows"], file["encoding"], file["delimiter"], file["quotes"]]);
    assert_eq!(dialect, json!([2, "utf-8", ",", true]));
    let resolved = String::from_utf8(scene.read("run/resolved.toml")).expect("UTF-8");
    let kept = resolved.lines().find_map(|line| line.strip_prefix("# reading: ")).expect("the reading");
    assert_eq!(serde_json::from_str::<serde_json::Value>(kept).expect("JSON"), *reading);
    let eval = ["eval", "--model", "run/model", "--data", "rows.csv", "--metrics", "accuracy"];
    scene.run(&eval).expect_code(0).expect_words(&["accuracy", "(2 rows, 2 generated)"]);
}

#[test]
fn two_meanings_are_refused_and_each_command_of_the_refusal_works() {
    let scene = Scene::new();
    let answer = |label: bool| json!({"prompt": "a", "completion": "b", "label": label}).to_string();
    for (file, rows, expected) in [
        ("rows.csv", "text,grade\nit was bad,F\nit was good,A\n".to_owned(), ["text-to-text", "span-corruption"]),
        ("answers.jsonl", format!("{}\n{}\n", answer(true), answer(false)), ["labelled", "text-to-text"]),
    ] {
        scene.write(file, rows);
        let refused = train(&scene, file, &[]).expect_code(2).expect_words(&["can be read in 2 ways"]);
        let commands: Vec<&str> = refused.err.lines().filter_map(|line| line.split('`').rev().nth(1)).collect();
        let commands = commands.into_iter().filter(|command| command.starts_with("--set"));
        for (number, command) in commands.enumerate() {
            let run = format!("{file}-{number}");
            let more: Vec<&str> = [run.as_str()].into_iter().chain(command.split(' ')).collect();
            // An adapter needs a model beside it.
            let model = [
                "--model",
                "rows.csv-0/model",
                "--set",
                "train.dropout=0",
                "--data",
                file,
                "--max-steps",
                "2",
                "--output",
            ];
            match command.contains("lora") {
                true => scene.run(&short(&[&model[..], &more].concat())).expect_code(0),
                false => train(&scene, file, &more).expect_code(0),
            };
            let objective = &scene.events(&run, "start")[0]["reading"]["objective"]["name"];
            assert_eq!(*objective, expected[number], "{file}: {command}");
        }
    }
    scene.run(&["inspect", "rows.csv"]).expect_code(0).expect_words(&["--prompt-column text --response-column grade"]);
    let convert = scene.run(&["convert", "rows.csv", "-o", "out.parquet"]).expect_code(2);
    assert!(convert.err.contains("`--text-column text`"), "{}", convert.err);
}

#[test]
fn columns_without_a_known_meaning_are_refused_and_each_command_of_the_refusal_works() {
    let scene = Scene::new();
    let rows = |header: &str, delimiter: &str| -> String {
        let rows = (0..4).map(|row| format!("how many legs have {row}{delimiter}{row} legs\n"));
        [header.to_owned()].into_iter().chain(rows).collect()
    };
    let of_pairs = "{\"prompt\": \"a b\", \"chosen\": \"c\", \"rejected\": \"d\"}\n".to_owned();
    let of_chats = "{\"chosen\": \"Human: a\", \"rejected\": \"Human: b\"}\n".to_owned();
    for (number, (file, text, expected)) in [
        ("Text.csv", rows("Text,Label\n", ","), ["text-to-text", ""]),
        ("enfr.csv", rows("en,fr\n", ","), ["text-to-text", "text-to-text"]),
        ("src.tsv", rows("src\ttgt\n", "\t"), ["text-to-text", "text-to-text"]),
        ("pairs.jsonl", of_pairs, ["text-to-text", "preference"]),
        ("chats.jsonl", of_chats, ["span-corruption", ""]),
    ]
    .into_iter()
    .enumerate()
    {
        scene.write(file, text);
        let refused = train(&scene, file, &[]).expect_code(4).expect_words(&["no column `"]);
        let commands: Vec<&str> = refused.err.lines().filter_map(|line| line.split('`').rev().nth(1)).collect();
        let commands: Vec<&str> = commands.into_iter().filter(|command| command.starts_with("--set")).collect();
        assert_eq!(commands.len(), expected.iter().filter(|name| !name.is_empty()).count(), "{}", refused.err);
        for (at, (command, expected)) in commands.into_iter().zip(expected).enumerate() {
            let run = format!("run{number}-{at}");
            let more: Vec<&str> = [run.as_str()].into_iter().chain(command.split(' ')).collect();
            train(&scene, file, &more).expect_code(0);
            assert_eq!(scene.events(&run, "start")[0]["reading"]["objective"]["name"], expected, "{file}: {command}");
        }
        let shown = scene.run(&["inspect", file]).expect_code(0).out;
        let line = shown.lines().find(|line| line.trim_start().starts_with("texts ")).expect("a line");
        let flags = line.split('`').rev().nth(1).expect("flags").split(' ');
        scene
            .run(&["inspect", file].into_iter().chain(flags).collect::<Vec<_>>())
            .expect_code(0)
            .expect_words(&["from `"]);
    }
    for (file, delimiter) in [("bare.csv", ","), ("bare.tsv", "\t")] {
        scene.write(file, rows("", delimiter));
        let refused = train(&scene, file, &[]).expect_code(4).expect_words(&["no column `prompt`"]);
        let command = refused.err.lines().find_map(|line| line.split_once("name the columns: `")).expect("a command");
        scene.shell(command.1.trim_end_matches('`')).expect_code(0);
        let made = format!("with-header{}", &file[4..]);
        assert_eq!(pairs(&scene, &made, &[]).matches("how many").count(), 4, "{made}");
    }
}

#[test]
fn labels_by_number_and_rows_of_news_without_a_header_have_a_command_for_each_meaning() {
    let scene = Scene::new();
    let row = |row: usize| json!({"text": format!("row {row}"), "labels": [row % 3, 5]}).to_string() + "\n";
    scene.write("emotions.jsonl", (0..8).map(row).collect::<String>());
    let refused = train(&scene, "emotions.jsonl", &[]).expect_code(4).expect_words(&["got a list of numbers"]);
    let hint = refused.err.lines().find(|line| line.contains("numbers of labels")).expect("a hint");
    let commands: Vec<&str> = hint.split('`').skip(1).step_by(2).collect();
    assert_eq!(commands[1], "jq -c '.[\"labels\"] |= map(tostring)' emotions.jsonl > texts.jsonl");
    assert!(!refused.err.contains("bad_rows"), "no row would be left: {}", refused.err);
    let more: Vec<&str> = ["sets"].into_iter().chain(commands[0].split(' ')).collect();
    train(&scene, "emotions.jsonl", &more).expect_code(0);
    let config: serde_json::Value =
        serde_json::from_slice(&scene.read("sets/model/config.json")).expect("the model's config");
    assert_eq!(config["id2label"], json!({"0": "0", "1": "1", "2": "2", "3": "5"}));
    let row = |row: usize| format!("{},\"Title {row}\",\"it is a row of {row}\"\n", row % 4 + 1);
    scene.write("news.csv", (0..8).map(row).collect::<String>());
    let refused = train(&scene, "news.csv", &[]).expect_code(4).expect_words(&["its first line looks like a row"]);
    let hints = refused.err.lines().filter(|line| line.starts_with("hint: "));
    let hints: Vec<&str> = hints.filter_map(|line| Some(line.strip_suffix('`')?.rsplit_once('`')?.1)).collect();
    scene.shell(hints[0]).expect_code(0);
    for (at, texts) in ["prompt `{title}\\n{text}`, response from `label`", "prompt from `text`, response from `label`"]
        .into_iter()
        .enumerate()
    {
        let tokenizer = repository().join("data/sample-tokenizer.json").display().to_string();
        let command = format!(
            "{} --preset tiny --tokenizer {tokenizer} {} --max-steps 1 --output news{at}",
            env!("CARGO_BIN_EXE_train_low_mem"),
            hints[at + 1]
        );
        scene.shell(&command).expect_code(0);
        assert_eq!(scene.events(&format!("news{at}"), "start")[0]["reading"]["train"]["files"][0]["texts"], texts);
    }
}

#[test]
fn the_directory_of_a_run_is_no_rows_and_no_argument_without_its_flag() {
    let scene = Scene::new();
    scene.run(&short(&["--max-steps", "1", "--output", "my/run"])).expect_code(0);
    let refused = train(&scene, "my/run", &["other"]).expect_code(2);
    assert!(refused.err.contains("`my/run`: is the directory of a run, expected files with rows"), "{}", refused.err);
    assert!(refused.err.contains("`--model my/run`"), "{}", refused.err);
    scene.run(&["eval", "my/run"]).expect_code(2).expect_words(&["a run or a model needs a flag: `--model my/run`"]);
    scene.run(&["eval", "my/rows.csv"]).expect_code(2).expect_words(&["`--data my/rows.csv`"]);
}

#[test]
fn rows_that_cannot_be_scored_are_named_with_the_reason() {
    let scene = Scene::new();
    scene.run(&short(&["--max-steps", "1", "--output", "run"])).expect_code(0);
    let files = [("none.parquet", vec![None, None]), ("some.parquet", vec![None, Some("how many legs have 2 cats")])];
    for (file, prompts) in files {
        let responses = vec![Some("8 legs"); prompts.len()];
        crate::files::write_rows(&scene.path(file), &[("prompt", prompts), ("response", responses)]);
    }
    let reason = "were skipped; the first: none.parquet: row group 0: row 0: column `prompt` is null";
    let eval = |file: &str| scene.run(&["eval", "--model", "run", "--data", file]);
    let refused = eval("none.parquet").expect_code(4);
    assert!(refused.err.contains(&format!("no row could be evaluated: 2 of 2 rows {reason}")), "{}", refused.err);
    let warned = eval("some.parquet").expect_code(0);
    assert!(warned.err.contains("warning: 1 of 2 rows were skipped; the first: some.parquet: row"), "{}", warned.err);
    let train = crate::run::sample("data.train", "sample-train.parquet");
    let validate = |file: &str, run: &str| {
        let validation = format!("data.validation={file}");
        scene.run(&short(&["--set", &train, "--set", &validation, "--max-steps", "1", "--output", run]))
    };
    let refused = validate("none.parquet", "none").expect_code(4);
    assert!(refused.err.contains("no row for validation could be used: 2 of 2 rows"), "{}", refused.err);
    let warned = validate("some.parquet", "some").expect_code(0);
    assert_eq!(warned.err.matches("warning: validation rows: 1 of 2 rows were skipped").count(), 1, "{}", warned.err);
    let event = &scene.events("some", "warning")[0];
    assert_eq!((&event["kind"], &event["bad_rows"]), (&json!("bad_validation_rows"), &json!(1)));
}

#[test]
fn a_page_of_parquet_that_does_not_fit_the_budget_is_refused() {
    let scene = Scene::new();
    let long = "x".repeat(24 << 20);
    crate::files::write_packed_numbers(&scene.path("rows.parquet"), &[&long, "a"]);
    let refused = train(&scene, "rows.parquet", &["run", "--memory-budget", "64MiB"]).expect_code(3);
    assert!(refused.err.contains("a page of column `prompt` takes "), "{}", refused.err);
    assert!(refused.err.contains("raise `--memory-budget`"), "{}", refused.err);
}

#[test]
fn answers_and_messages_that_pandas_wrote_into_a_csv_are_read() {
    let scene = Scene::new();
    let check = |header: &str, cell: &str, expected: serde_json::Value| {
        scene.write("cells.csv", format!("{header}\n{}\n", cell));
        assert_eq!(pairs(&scene, "cells.csv", &[]), json!([expected]).to_string(), "{cell}");
    };
    let expected = json!({"prompt": "question: When? context: Then.", "response": "in 1911"});
    for answers in [
        "{'text': ['in 1911', '1911'], 'answer_start': [3, 6]}",
        "{'text': array(['in 1911'], dtype=object), 'answer_start': array([3])}",
        "{\"\"text\"\": [\"\"in 1911\"\"], \"\"answer_start\"\": [3]}",
    ] {
        check("context,question,answers", &format!("Then.,When?,\"{answers}\""), expected.clone());
    }
    let messages = "[{'role': 'user', 'content': \"\"it's\"\"}, {'role': 'assistant', 'content': 'so'}]";
    check("messages", &format!("\"{messages}\""), json!({"prompt": "it's", "response": "so"}));
    scene.write(
        "cells.csv",
        "context,question,answers\nThen.,When?,\"{'text': [], 'answer_start': []}\"\nNow.,Who?,I\n",
    );
    assert_eq!(pairs(&scene, "cells.csv", &["--bad-rows", "skip"]).matches("prompt").count(), 1, "no answer is null");
}

#[test]
fn columns_of_one_name_and_words_for_missing_values_are_said() {
    let scene = Scene::new();
    scene.write("rows.csv", ",text,text,label\n0,a b,x,y\n1,c d,z,NaN\n");
    let ran = train(&scene, "rows.csv", &[]).expect_code(0);
    let words = ["not used: `(no name)`, `text (2)`", "1 row: a field such as `NaN` or `None` is read as this text"];
    let said = format!("{}{}", ran.out, ran.err);
    assert!(words.iter().all(|words| said.contains(words)) && said.contains("rows.csv:3"), "{said}");
    scene.write("columns.json", "{\"prompt\": [\"a\", \"b\"], \"response\": [\"c\", \"d\"]}");
    let refused = train(&scene, "columns.json", &["other"]).expect_code(4);
    assert!(refused.err.contains("a list for each column") && refused.err.contains("orient="), "{}", refused.err);
}

#[test]
fn a_line_of_excel_rows_of_other_splits_and_calls_of_tools_are_said() {
    let scene = Scene::new();
    scene.write("rows.csv", "sep=;\r\nsource;target;split\r\na, b;c;train\r\nd;e;test\r\n");
    let ran = train(&scene, "rows.csv", &[]).expect_code(0);
    let words = "CSV between `;`, prompt from `source`, response from `target`; not used: `split`; rows of every `split` are used";
    assert!(ran.out.contains(words), "{}", ran.out);
    assert!(pairs(&scene, "rows.csv", &[]).contains("a, b"));
    let call = json!({"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f"}}]});
    let messages = json!([{"role": "user", "content": "q"}, call, {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "a"}]);
    let plain = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": []}]);
    scene.write("chats.jsonl", format!("{}\n{}\n", json!({ "messages": messages }), json!({ "messages": plain })));
    let ran = train(&scene, "chats.jsonl", &["chats"]).expect_code(0);
    assert!(ran.err.contains("1 chat with tool calls, images or other parts that are no text"), "{}", ran.err);
    assert_eq!(scene.events("chats", "data")[0]["counts"]["chats_with_more"], 1);
}

#[test]
fn the_columns_that_people_have_become_the_texts_that_they_mean() {
    let scene = Scene::new();
    for (file, rows, expected) in [
        (
            "dolly.jsonl",
            json!({"instruction": "When?", "context": "In 1911.", "response": "1911"}),
            ["When?\nIn 1911.", "1911"],
        ),
        (
            "squad.jsonl",
            json!({"context": "In 1911.", "question": "When?", "answer": "1911"}),
            ["question: When? context: In 1911.", "1911"],
        ),
        ("input.jsonl", json!({"instruction": "", "input": "Haus", "output": "house"}), ["Haus", "house"]),
        (
            "history.jsonl",
            json!({"system": "Be brief.", "instruction": "hi", "input": "", "output": "ho", "history": [["q", "a"]]}),
            ["Be brief.\nuser: q\nassistant: a\nuser: hi", "ho"],
        ),
        (
            "chat.jsonl",
            json!({"system": "Be brief.", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}),
            ["Be brief.\nhi", "ho"],
        ),
        (
            "prefix.jsonl",
            json!({"prefix": "sum", "input_text": "long", "target_text": "short"}),
            ["sum: long", "short"],
        ),
        ("pair.jsonl", json!({"sentence1": "a", "sentence2": "b", "label": 1}), ["sentence1: a sentence2: b", "1"]),
    ] {
        scene.write(file, format!("{rows}\n"));
        let expected = json!([{"prompt": expected[0], "response": expected[1]}]).to_string();
        assert_eq!(pairs(&scene, file, &[]), expected, "{file}");
    }
}

#[test]
fn labels_are_counted_and_those_that_differ_only_by_case_or_blanks_are_named() {
    let scene = Scene::new();
    let rows: String = ["bug", "bug", "bug", "bug", "BUG", " bug ", "hr", "hr"]
        .iter()
        .map(|label| format!("{}\n", json!({"text": "it broke", "label": label})))
        .collect();
    scene.write("rows.jsonl", rows);
    let alike = "differ only by case or blanks: `bug` (4), ` bug ` (1), `BUG` (1)";
    scene.run(&["inspect", "rows.jsonl"]).expect_code(0).expect_words(&["labels            4: `bug` 4, `hr` 2", alike]);
    train(&scene, "rows.jsonl", &[]).expect_code(0).expect_words(&[alike]);
    assert_eq!(scene.events("run", "data")[0]["counts"]["labels"], json!({" bug ": 1, "BUG": 1, "bug": 4, "hr": 2}));
    // Also of parquet, which is read in place.
    let labels = ["bug", "bug", "bug", "bug", "BUG", " bug ", "hr", "hr"];
    let columns = [("text", vec![Some("it broke"); labels.len()]), ("label", labels.map(Some).to_vec())];
    crate::files::write_rows(&scene.path("rows.parquet"), &columns);
    let ran = train(&scene, "rows.parquet", &["other"]).expect_code(0).expect_words(&[alike]);
    assert!(scene.events("other", "data").is_empty(), "{}", ran.out);
}

#[test]
fn numbers_of_classes_become_their_names_and_a_row_of_a_test_file_without_a_class_is_counted() {
    let scene = Scene::new();
    crate::files::write_classes(&scene.path("rows.parquet"), &[1, 0, -1, 1], &["bad", "good"]);
    let ran = train(&scene, "rows.parquet", &[]).expect_code(0);
    ran.expect_words(&["the numbers of `label` are read as `bad`, `good`", "1 of 4 rows were skipped"]);
    let reading = &scene.events("run", "start")[0]["reading"]["train"]["files"][0];
    assert_eq!((&reading["classes"], &reading["rows"]), (&json!({"label": ["bad", "good"]}), &json!(4)));
    assert_eq!(scene.events("run", "data")[0]["counts"]["labels"], json!({}));
    assert!(pairs(&scene, "rows.parquet", &[]).contains(r#"{"prompt":"1","response":"bad"}"#));
}

#[test]
fn templates_join_columns_byte_for_byte() {
    let scene = Scene::new();
    scene.write("rows.csv", "subject,body,queue,id\nHelp,It broke,it,1\n,No subject,hr,2\n,,hr,3\n");
    let template = ["--source-template", " {subject}\\n{body} {{x}}"];
    let more = [&template[..], &["--target-template", "queue: {queue}"]].concat();
    let expected = json!([
        {"prompt": " Help\nIt broke {x}", "response": "queue: it"},
        {"prompt": " \nNo subject {x}", "response": "queue: hr"},
    ]);
    assert_eq!(pairs(&scene, "rows.csv", &more), expected.to_string());
    let set = ["run", "--set", "data.source_template={subject}\\n{body}", "--set", "data.response_column=queue"];
    let ran = train(&scene, "rows.csv", &set).expect_code(0);
    let words = "prompt `{subject}\\n{body}`, response from `queue`; not used: `id`; 2 rows";
    assert!(ran.out.contains(words), "{}", ran.out);
    let wrong = ["other", "--set", "data.source_template={subject"];
    train(&scene, "rows.csv", &wrong).expect_code(2).expect_words(&["`data.source_template`", "is not closed"]);
}

#[test]
fn a_directory_of_splits_trains_on_train_validates_on_validation_and_leaves_test_alone() {
    let scene = Scene::new();
    for (file, rows) in [("train-00000-of-00002", 3), ("train-00001-of-00002", 2), ("validation", 2), ("test", 4)] {
        scene.write(
            &format!("rows/data/{file}.jsonl"),
            format!("{}\n", json!({"prompt": file, "response": file})).repeat(rows),
        );
    }
    let ran = train(&scene, "rows", &[]).expect_code(0);
    assert!(ran.out.contains("left alone, by its name: rows/data/test.jsonl"), "{}", ran.out);
    assert_eq!(scene.events("run", "data")[0]["counts"]["train"], 5);
    assert_eq!(scene.events("run", "eval").last().expect("an evaluation")["samples"], 2);
    let reading = &scene.events("run", "start")[0]["reading"];
    assert_eq!(reading["left_alone"], json!(["rows/data/test.jsonl"]));
    let rows = |part: &str| {
        let files = reading[part]["files"].as_array().expect("files");
        files.iter().map(|file| file["rows"].clone()).collect::<Vec<_>>()
    };
    assert_eq!((rows("train"), rows("validation")), (vec![json!(3), json!(2)], vec![json!(2)]));
    // What is shown next works, and reads the same split of the directory.
    let next: Vec<&str> = ran.out.lines().filter(|line| line.contains(" --data ")).collect();
    assert!(next[0].ends_with("--data rows/data/validation.jsonl"), "{}", ran.out);
    assert!(next[1].contains("--data rows --output"), "{}", ran.out);
    scene.shell(next[0]).expect_code(0);
    let eval = ["eval", "--model", "run/model", "--data", "rows"];
    let refused = scene.run(&eval).expect_code(2).expect_words(&["for validation and for tests"]);
    assert!(refused.err.contains("`--data rows/data/test.jsonl`"), "{}", refused.err);
    // Files that are named are what the user says.
    scene
        .run(&["convert", "rows/data/test.jsonl", "-o", "out.parquet"])
        .expect_code(0)
        .expect_words(&["4  out.parquet"]);
}

#[test]
fn files_that_are_read_in_different_ways_are_all_named() {
    let scene = Scene::new();
    scene.write("rows/a.csv", "text,label\nit was bad,no\n");
    scene.write("rows/b.csv", "text,label\nit was good,yes\n");
    // The content is what counts.
    scene.write("rows/c.csv", "{\"prompt\": \"a\", \"response\": \"b\"}\n");
    scene.write("rows/d.tsv", "prompt;response\na;b,c\n");
    let ran = train(&scene, "rows", &[]).expect_code(0);
    let words = "2 files from rows/a.csv: CSV, prompt from `text`, response from `label`; rows/c.csv: JSONL, prompt from `prompt`, \
                 response from `response`; rows/d.tsv: CSV between `;`, prompt from `prompt`";
    assert!(ran.out.contains(words), "{}", ran.out);
}

#[test]
fn validation_rows_whose_labels_training_lacks_are_named() {
    let scene = Scene::new();
    scene.write("a.csv", format!("text,label\n{}", "good,pos\nbad,neg\n".repeat(2)));
    scene.write("b.csv", format!("text,label\n{}", "good,1\nbad,0\n".repeat(2)));
    scene.write("c.csv", format!("text,label\n{}", "good,pos\n".repeat(2)));
    let ran = |file: &str| train(&scene, "a.csv", &[&format!("run-{file}"), "--validation", file]).expect_code(0).err;
    let named = ran("b.csv");
    assert!(named.contains("none of its labels (2: `0` 2, `1` 2) is one of the training rows"), "{named}");
    let known = ran("c.csv");
    assert!(!known.contains("none of its labels"), "{known}");
}

#[test]
fn a_directory_of_another_layout_gets_the_command_that_makes_rows_of_it() {
    let scene = Scene::new();
    for (path, text) in [
        ("saved/dataset_dict.json", "{}"),
        ("saved/train/state.json", "{}"),
        ("saved/train/data-00000-of-00001.arrow", ""),
        ("reviews/train/neg/0.txt", "bad film"),
        ("reviews/train/pos/0.txt", "good film"),
        ("reviews/train/words.txt", "a"),
    ] {
        scene.write(path, text);
    }
    let refused = |directory: &str| scene.run(&["convert", directory, "-o", "out.parquet"]).expect_code(4).err;
    assert!(refused("saved").contains("load_from_disk") && refused("saved").contains("saved/train rows.parquet"));
    let hint = refused("reviews");
    assert!(hint.contains("for file in reviews/train/*/*.txt; do jq -Rsc"), "{hint}");
}

#[test]
fn predictions_name_the_file_and_line_of_each_row_and_keep_the_other_columns() {
    let scene = Scene::new();
    scene.write("a.csv", "ticket,text,label\nT1,it was bad,no\nT2,,no\nT3,\"it was\ngood\",yes\n");
    scene.write("b.jsonl", "{\"text\": \"so so\", \"label\": \"no\", \"ticket\": 7, \"row\": \"x\"}\n");
    train(&scene, "a.csv", &[]).expect_code(0);
    let eval = ["eval", "--model", "run/model", "--data", "a.csv", "b.jsonl", "--predictions", "p.jsonl"];
    scene.run(&eval).expect_code(0);
    let text = String::from_utf8(scene.read("p.jsonl")).expect("UTF-8");
    let rows: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let of = |row: &serde_json::Value| json!([row["file"], row["line"], row["ticket"], row["row"], row["column.row"]]);
    assert_eq!(of(&rows[0]), json!(["a.csv", 2, "T1", 0, null]));
    assert_eq!(of(&rows[1]), json!(["a.csv", 4, "T3", 1, null]));
    assert_eq!(of(&rows[2]), json!(["b.jsonl", 1, "7", 2, "x"]));
}

#[test]
fn generate_makes_prompts_of_rows_as_the_run_of_the_model_did() {
    let scene = Scene::new();
    scene.write("rows.csv", "subject,body,label\nhello,come soon,yes\nbye,,no\n");
    let more = ["run", "--set", "data.source_template={subject}\\n{body}", "--set", "data.response_column=label"];
    train(&scene, "rows.csv", &more).expect_code(0);
    let generate = ["generate", "--model", "run", "--json", "--max-new-tokens", "2", "--input"];
    let prompts = |ran: Ran| -> Vec<String> {
        let line = |line: &str| serde_json::from_str::<serde_json::Value>(line).expect("JSON");
        ran.out.lines().map(|text| line(text)["prompt"].as_str().expect("a prompt").to_owned()).collect()
    };
    // The columns that have a text, in files with labels and without.
    scene.write("new.csv", "body,subject\nI am late,sorry\n");
    let ran = scene.run(&[&generate[..], &["rows.csv"]].concat()).expect_code(0);
    assert!(ran.err.contains("prompts are `{subject}\\n{body}`, as the run read them"), "{}", ran.err);
    assert_eq!(prompts(ran), ["hello\ncome soon", "bye\n"]);
    assert_eq!(prompts(scene.run(&[&generate[..], &["new.csv"]].concat()).expect_code(0)), ["sorry\nI am late"]);
    // A flag wins, as does the usual column where the run's are not there.
    let other = [&generate[..], &["new.csv", "--source-template", "{body}!"]].concat();
    assert_eq!(prompts(scene.run(&other).expect_code(0)), ["I am late!"]);
    scene.write("usual.csv", "prompt,subject\nwhy,x\n");
    assert_eq!(prompts(scene.run(&[&generate[..], &["usual.csv"]].concat()).expect_code(0)), ["why"]);
    scene.write("lacks.csv", "subject,text\nx,y\n");
    let words = ["no column `body`, which `{subject}\\n{body}` names", "--source-template", "one of: subject, text"];
    scene.run(&[&generate[..], &["lacks.csv"]].concat()).expect_code(4).expect_words(&words);
    let broken = [&generate[..], &["new.csv", "--source-template", "{body"]].concat();
    scene.run(&broken).expect_code(2).expect_words(&["--source-template", "is not closed"]);
}

#[test]
fn what_the_tokenizer_loses_in_rows_beyond_the_sample_is_a_warning_and_in_the_last_table() {
    let scene = Scene::new();
    // The sample has 32 rows at four places: of 400 rows none between 108 and 200.
    let row = |n: usize| {
        let response = if (150..170).contains(&n) { "{a}" } else { "a" };
        format!("{}\n", json!({"prompt": "1 + 1", "response": response}))
    };
    scene.write("rows.jsonl", (0..400).map(row).collect::<String>());
    let lossy = words(&scene);
    let more = ["run", "--set", &lossy, "--epochs", "1", "--max-steps", "1000", "--set", "train.batch_size=8"];
    let ran = train(&scene, "rows.jsonl", &more).expect_code(0);
    assert!(!ran.out.contains("change on the way to tokens"), "{}", ran.out);
    let said = "`{`, `}`: the tokenizer loses characters of a target, which no sampled row has";
    let all = format!("{}{}", ran.out, ran.err);
    assert_eq!(all.matches(said).count(), 1, "{all}");
    assert!(all.contains("train-tokenizer"), "{all}");
    assert!(ran.out.contains("targets with characters that the tokenizer loses: 20 of 400 (5.0 %)"), "{}", ran.out);
    let steps = scene.events("run", "step");
    let of = |name: &str| steps.iter().map(|step| step[name].as_u64().expect("a count")).sum::<u64>();
    assert_eq!([of("lossy_sources"), of("lossy_targets")], [0, 20]);
}

#[test]
fn what_the_tokenizer_does_not_hold_is_counted_at_the_start_and_by_inspect() {
    let scene = Scene::new();
    let rows: String =
        (0..8).map(|n| format!("{}\n", json!({"prompt": format!("{n} + 1"), "response": "{\"a\"}"}))).collect();
    scene.write("rows.jsonl", rows);
    // Byte-level tokenizers hold everything.
    let ran = train(&scene, "rows.jsonl", &[]).expect_code(0);
    assert!(!ran.out.contains("change on the way to tokens"), "{}", ran.out);
    let reading = &scene.events("run", "start")[0]["reading"];
    assert_eq!(reading["tokenizer"]["changed_targets"], 0);
    assert_eq!((&reading["tokenizer"]["targets"], &reading["truncation_side"]), (&json!(8), &json!("right")));
    let lossy = words(&scene);
    let more = ["other", "--set", lossy.as_str()];
    let ran = train(&scene, "rows.jsonl", &more).expect_code(0);
    let reading = &scene.events("other", "start")[0]["reading"]["tokenizer"];
    assert_eq!((&reading["changed_targets"], &reading["changed_sources"]), (&json!(8), &json!(0)), "{}", ran.out);
    assert_eq!(reading["lost"]["{"], 8);
    let inspect = ["inspect", "rows.jsonl", "--tokenizer", "words.json"];
    scene.run(&inspect).expect_code(0).expect_words(&["8 of 8 targets change", "`{`", "of the rows read"]);
    let eval = ["eval", "--model", "other/model", "--data", "rows.jsonl"];
    scene.run(&eval).expect_code(0).expect_words(&["8 of 8 targets change", "`{`"]);
    let reading = scene.run(&[&eval[..], &["--json"]].concat()).expect_code(0).json()["reading"].clone();
    assert_eq!(reading["tokenizer"]["changed_targets"], 8);
}

/// A tokenizer of a few words, which knows no braces. Returns the setting that names it.
fn words(scene: &Scene) -> String {
    let words = ["<pad>", "</s>", "<unk>", "0", "1", "2", "3", "4", "5", "6", "7", "+", "a"];
    let vocab: serde_json::Map<String, serde_json::Value> =
        words.iter().zip(0..).map(|(word, id)| ((*word).to_owned(), json!(id))).collect();
    let special = |id: usize| {
        json!({"id": id, "content": words[id], "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [special(0), special(1), special(2)],
        "pre_tokenizer": {"type": "Whitespace"}, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    });
    scene.write("words.json", tokenizer.to_string());
    "data.tokenizer=words.json".to_owned()
}

#[test]
fn chats_that_are_too_long_lose_their_oldest_turns_and_it_is_said() {
    let scene = Scene::new();
    let turns = |last: &str| {
        let old =
            (0..20).flat_map(|n| [("user", format!("old question {n}")), ("assistant", format!("old answer {n}"))]);
        let new = [("user", last.to_owned()), ("assistant", "yes".to_owned())];
        let turns: Vec<_> = old.chain(new).map(|(role, content)| json!({"role": role, "content": content})).collect();
        json!({ "messages": turns })
    };
    scene.write("chats.jsonl", format!("{}\n{}\n", turns("is it the last question?"), turns("or this?")));
    let ran = train(&scene, "chats.jsonl", &["run", "--set", "data.max_source_tokens=60"]).expect_code(0);
    assert!(ran.err.contains("2 chats of 2 were longer than 60 tokens and lost their oldest turns"), "{}", ran.err);
    let counts = &scene.events("run", "data")[0]["counts"];
    assert!(counts["left_out_turns"].as_u64() > Some(20), "{counts}");
    let shown = scene.run(&["inspect", "run/data/train-rows.parquet", "--json"]).expect_code(0).json();
    let prompt = shown["samples"][0]["prompt"].as_str().expect("a prompt").to_owned();
    assert!(prompt.ends_with("user: is it the last question?") && !prompt.contains("question 0"), "{prompt}");
    assert!(prompt.starts_with("user: old question"), "{prompt}");
}

#[test]
fn a_cut_prompt_keeps_the_side_that_is_wanted_and_generate_says_that_it_cut() {
    let scene = Scene::new();
    scene.write(
        "rows.jsonl",
        format!("{}\n", json!({"prompt": "one two three ".repeat(40), "response": "a"})).repeat(2),
    );
    let cut = ["left", "--set", "data.max_source_tokens=9", "--set", "data.truncation_side=left"];
    let ran = train(&scene, "rows.jsonl", &cut).expect_code(0);
    assert!(ran.out.contains("longer sources lose their beginning"), "{}", ran.out);
    let right = ["right", "--set", "data.max_source_tokens=9"];
    train(&scene, "rows.jsonl", &right).expect_code(0);
    let loss = |run: &str| scene.events(run, "step")[0]["loss"].clone();
    assert_ne!(loss("left"), loss("right"));
    for run in ["left", "right"] {
        assert_eq!(scene.events(run, "step")[0]["cut_sources"], 2, "{run}");
    }
    let long = "one two three ".repeat(40);
    let generate = ["generate", "--model", "right/model", "--prompt", &long, "--max-source-tokens", "9", "--json"];
    let ran =
        scene.run(&generate).expect_code(0).expect_words(&["1 of 1 prompt had more than 9 tokens and lost the end"]);
    assert_eq!(ran.json()["prompt_was_cut"], true);
    let short = scene.run(&["generate", "--model", "right/model", "--prompt", "one", "--json"]).expect_code(0);
    assert_eq!(short.json()["prompt_was_cut"], false);
    assert!(!short.err.contains("tokens"), "{}", short.err);
}

#[test]
fn texts_with_letters_that_the_tokenizer_lacks_are_never_right() {
    let scene = Scene::new();
    // A tokenizer without bytes: it knows the letters of its words alone.
    let model = serde_json::json!({"type": "Unigram", "unk_id": 2, "vocab": [["<pad>", 0.0], ["</s>", 0.0], ["<unk>", -9.0], ["\u{2581}", -1.0],
        ["\u{2581}yes", -1.5], ["y", -3.0], ["e", -3.0], ["s", -3.0]]});
    let added = ["<pad>", "</s>", "<unk>"].iter().enumerate().map(|(id, name)| {
        serde_json::json!({"id": id, "content": name,
        "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
    });
    let prefix =
        serde_json::json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true});
    let tokenizer = serde_json::json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null, "pre_tokenizer": prefix, "post_processor": null, "decoder": prefix, "model": model});
    scene.write("tokenizer.json", tokenizer.to_string());
    scene.write("rows.jsonl", "{\"prompt\":\"yes\",\"response\":\"{yes}\"}\n".repeat(8));
    let run = [
        "--preset",
        "tiny",
        "--tokenizer",
        "tokenizer.json",
        "--data",
        "rows.jsonl",
        "--epochs",
        "40",
        "--batch-size",
        "4",
        "--set",
        "optimizer.name=adamw",
        "--lr",
        "3e-3",
        "--output",
        "run",
    ];
    scene.run(&run).expect_code(0).expect_words(&["8 of 8 targets", "lost: `{`, `}`"]);
    scene
        .run(&["eval", "--model", "run", "--data", "rows.jsonl"])
        .expect_code(0)
        .expect_words(&["exact match 0.0 %", "(expected {yes})"]);
}
