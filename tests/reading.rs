//! How files are read: the columns of pairs, the splits of a directory, what is left out. Two meanings are refused with a command for each.

use serde_json::json;

use crate::run::{Ran, Scene, repository, short};

fn train(scene: &Scene, data: &str, more: &[&str]) -> Ran {
    let tokenizer = format!("data.tokenizer={}", repository().join("data/sample-tokenizer.json").display());
    let data = format!("data.train={data}");
    let flags = ["--set", &data, "--set", "model.config=tiny", "--set", &tokenizer, "--max-steps", "2", "--output"];
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
    assert_eq!(reading["train"]["files"][0]["texts"], "prompt from `text`, response from `label`");
    let eval = ["eval", "--model", "run/model", "--data", "rows.csv", "--metrics", "accuracy"];
    scene.run(&eval).expect_code(0).expect_words(&["accuracy", "(2 rows, 2 generated)"]);
}

#[test]
fn two_meanings_are_refused_and_each_command_of_the_refusal_works() {
    let scene = Scene::new();
    scene.write("rows.csv", "text,grade\nit was bad,F\nit was good,A\n");
    let refused = train(&scene, "rows.csv", &[]).expect_code(2).expect_words(&["2 meanings"]);
    let commands: Vec<&str> = refused.err.lines().filter_map(|line| line.split('`').rev().nth(1)).collect();
    let commands = commands.into_iter().filter(|command| command.starts_with("--set"));
    for (number, command) in commands.enumerate() {
        let more: Vec<String> =
            [format!("run{number}")].into_iter().chain(command.split(' ').map(str::to_owned)).collect();
        let more: Vec<&str> = more.iter().map(String::as_str).collect();
        train(&scene, "rows.csv", &more).expect_code(0);
    }
    let objective = |run: &str| scene.events(run, "start")[0]["reading"]["objective"]["name"].clone();
    assert_eq!((objective("run0"), objective("run1")), (json!("text-to-text"), json!("span-corruption")));
    scene.run(&["inspect", "rows.csv"]).expect_code(0).expect_words(&["--prompt-column text --response-column grade"]);
    let convert = scene.run(&["convert", "rows.csv", "-o", "out.parquet"]).expect_code(2);
    assert!(convert.err.contains("`--text-column text`"), "{}", convert.err);
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
    let eval = ["eval", "--model", "run/model", "--data", "rows"];
    let refused = scene.run(&eval).expect_code(2).expect_words(&["for validation and for tests"]);
    assert!(refused.err.contains("`--data rows/data/test.jsonl`"), "{}", refused.err);
    // Files that are named are what the user says.
    scene
        .run(&["convert", "rows/data/test.jsonl", "-o", "out.parquet"])
        .expect_code(0)
        .expect_words(&["4  out.parquet"]);
}
