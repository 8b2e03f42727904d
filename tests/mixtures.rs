//! `[[data.tasks]]`: several tasks in one run, each with its own files, columns, prefix and scores.

use serde_json::{Value, json};

use crate::files::write_rows;
use crate::run::{Scene, short};

/// Rows of three tasks in three forms, with columns of their own.
fn rows(scene: &Scene) {
    let sums: String = (0..40)
        .map(|n| format!("{}\n", json!({"prompt": format!("{n} + 1"), "response": format!("{}", n + 1)})))
        .collect();
    scene.write("sums.jsonl", sums);
    let names: String = (0..20).map(|n| format!("thing {n},the name {n}\n")).collect();
    scene.write("names.csv", format!("subject,title\n{names}"));
    let small: String =
        (0..5).map(|n| format!("{}\n", json!({"question": format!("q{n}"), "answer": format!("a{n}")}))).collect();
    scene.write("small.jsonl", small);
    scene.write(
        "valid.jsonl",
        "{\"prompt\": \"7 + 1\", \"response\": \"8\"}\n{\"prompt\": \"9 + 1\", \"response\": \"10\"}\n",
    );
    scene.write("valid.csv", "subject,title\nthing 99,the name 99\n");
}

const TASKS: &str = "
[data]
max_source_tokens = 16
max_target_tokens = 16
[[data.tasks]]
name = \"sums\"
train = \"sums.jsonl\"
validation = \"valid.jsonl\"
source_prefix = \"add: \"
[[data.tasks]]
name = \"names\"
train = [\"names.csv\"]
validation = \"valid.csv\"
prompt_column = \"subject\"
response_column = \"title\"
source_prefix = \"name: \"
[[data.tasks]]
name = \"small\"
train = \"small.jsonl\"
";

/// The arguments of a run with this config.
fn arguments(scene: &Scene, config: &str, more: &[&str]) -> Vec<String> {
    let tokenizer = crate::run::sample("data.tokenizer", "sample-tokenizer.json");
    scene.write("mixture.toml", format!("[model]\nconfig = \"tiny\"\n{config}"));
    let base =
        ["--config", "mixture.toml", "--set", &tokenizer, "--set", "train.batch_size=13", "--set", "data.train=[]"];
    let base = [&base[..], &["--set", "data.validation=[]", "--set", "data.source_prefix=auto"], more].concat();
    short(&base)
}

fn counts(steps: &[Value], task: &str) -> Vec<u64> {
    steps.iter().map(|step| step["tasks"][task].as_u64().expect("a count")).collect()
}

#[test]
fn three_tasks_are_mixed_evenly_scored_apart_and_resumed_to_the_same_bits() {
    let scene = Scene::new();
    rows(&scene);
    let of = |more: &[&str]| arguments(&scene, TASKS, more);
    let said = scene.run(&of(&["--max-steps", "7", "--output", "whole"])).expect_code(0);
    let steps = scene.events("whole", "step");
    // An epoch has the rows of all tasks: five batches of 13.
    assert_eq!(counts(&steps, "sums")[..5].iter().sum::<u64>(), 40, "{steps:?}");
    assert_eq!(counts(&steps, "names")[..5].iter().sum::<u64>(), 20);
    assert_eq!(counts(&steps, "small")[..5], [1, 1, 1, 1, 1]);
    assert_eq!((steps[4]["epoch"].as_u64(), steps[5]["epoch"].as_u64()), (Some(0), Some(1)));
    assert!(steps.iter().all(|step| step["bad_rows"].as_u64().unwrap_or(0) == 0));
    let last = scene.events("whole", "eval").pop().expect("an evaluation");
    assert_eq!(
        (last["tasks"]["sums"]["samples"].as_u64(), last["tasks"]["names"]["samples"].as_u64()),
        (Some(2), Some(1))
    );
    assert!(last["tasks"].get("small").is_none(), "it has no rows for validation");
    let figure = |task: &str, name: &str| last["tasks"][task][name].as_f64().expect("a number");
    let tokens = figure("sums", "target_tokens") + figure("names", "target_tokens");
    let loss =
        ["sums", "names"].map(|task| figure(task, "loss") * figure(task, "target_tokens")).iter().sum::<f64>() / tokens;
    assert!((last["loss"].as_f64().expect("a loss") - loss).abs() < 1e-9, "{last}");
    assert!(format!("{}{}", said.out, said.err).contains("  names: loss "), "{}", said.out);
    assert!(
        said.out.contains("task names: 20 rows, 20 samples an epoch, `name: ` before every source"),
        "{}",
        said.out
    );
    // `eval` scores the tasks as the run did, from the run or from its config.
    let kept = scene.run(&["eval", "--model", "whole", "--json"]).expect_code(0).json();
    let scores = |of: &Value| {
        ["sums", "names"].map(|task| {
            let of = &of["tasks"][task];
            (of["samples"].as_u64(), of["target_tokens"].as_u64(), of["loss"].as_f64().expect("a loss"))
        })
    };
    for ((of_run, here), whole) in scores(&last).into_iter().zip(scores(&kept)).zip([&last, &kept]) {
        assert_eq!((of_run.0, of_run.1), (here.0, here.1));
        assert!((of_run.2 - here.2).abs() < 1e-5, "{of_run:?} {here:?}");
        assert_eq!(whole["samples"], 3);
    }
    assert!((kept["loss"].as_f64().expect("a loss") - loss).abs() < 1e-5, "{kept}");
    let eval = ["eval", "--model", "whole", "--config", "mixture.toml"];
    scene.run(&eval).expect_code(0).expect_words(&["  sums: loss ", "  names: loss "]);
    let one = ["eval", "--model", "whole", "--data", "valid.csv", "--prompt-column", "subject"];
    let one = [&one[..], &["--response-column", "title", "--set", "data.source_prefix=name: ", "--json"]].concat();
    let one = scene.run(&one).expect_code(0).json();
    assert!((one["loss"].as_f64().expect("a loss") - figure("names", "loss")).abs() < 1e-5, "{one}");
    // Resuming is a seek.
    scene.run(&of(&["--max-steps", "3", "--output", "again"])).expect_code(0);
    scene.run(&of(&["--max-steps", "7", "--output", "again", "--keep-training"])).expect_code(0);
    assert_eq!(scene.read("again/model/model.safetensors"), scene.read("whole/model/model.safetensors"));
    // Another mixture is another run.
    let other = TASKS.replace("source_prefix = \"name: \"", "source_prefix = \"name: \"\nweight = 2");
    scene
        .run(&arguments(&scene, &other, &["--max-steps", "9", "--output", "again", "--keep-training"]))
        .expect_code(2)
        .expect_words(&["data.tasks"]);
}

#[test]
fn rates_follow_mixing_limits_and_weights() {
    let scene = Scene::new();
    rows(&scene);
    let epoch = |mixing: &str, weight: &str| {
        let config = TASKS.replace("[data]\n", &format!("[data]\n{mixing}\n"));
        let config = format!("{config}{weight}\n");
        std::fs::remove_dir_all(scene.path("mixed")).ok();
        let more = ["--epochs", "1", "--output", "mixed", "--set", "train.max_steps=none"];
        scene.run(&arguments(&scene, &config, &more)).expect_code(0);
        let steps = scene.events("mixed", "step");
        ["sums", "names", "small"].map(|task| counts(&steps, task).iter().sum::<u64>())
    };
    assert_eq!(epoch("mixing_limit = 20", ""), [20, 20, 5]);
    assert_eq!(epoch("mixing = \"equal\"\nmixing_limit = 20", ""), [15, 15, 15]);
    assert_eq!(epoch("mixing_limit = 20", "weight = 0"), [23, 22, 0]);
}

#[test]
fn a_mixture_that_cannot_be_made_names_the_task_and_its_file() {
    let scene = Scene::new();
    rows(&scene);
    scene.write("odd.csv", "alpha,beta,gamma\n1,2,3\n");
    scene.write("empty.jsonl", "{\"prompt\": \"a\", \"response\": \"\"}\n");
    let check = |config: &str, code: i32, words: &[&str]| {
        scene
            .run(&arguments(&scene, config, &["--max-steps", "1", "--output", "refused"]))
            .expect_code(code)
            .expect_words(words);
    };
    let with = |file: &str| TASKS.replace("small.jsonl", file);
    check(&with("odd.csv"), 4, &["task `small`", "odd.csv"]);
    check(&with("nosuch.jsonl"), 4, &["task `small`", "nosuch.jsonl"]);
    check(&with("empty.jsonl"), 4, &["task `small` has no rows", "empty.jsonl"]);
    let nothing = TASKS.replace("name = \"", "weight = 0\nname = \"");
    check(&nothing, 2, &["`data.tasks`", "weights of all tasks are 0"]);
    let twice = TASKS.replace("name = \"small\"", "name = \"sums\"");
    check(&twice, 2, &["task 3", "another task is called `sums`"]);
}

#[test]
fn parquet_of_the_same_columns_is_mixed_where_it_lies() {
    let scene = Scene::new();
    let file = |name: &str, count: usize| {
        let texts: Vec<String> = (0..count).map(|n| format!("{name} {n}")).collect();
        let column: Vec<Option<&str>> = texts.iter().map(|text| Some(text.as_str())).collect();
        write_rows(&scene.path(&format!("{name}.parquet")), &[("prompt", column.clone()), ("response", column)]);
    };
    file("one", 30);
    file("other", 10);
    file("valid", 3);
    let config = "
[data]
mixing = \"equal\"
[[data.tasks]]
name = \"one\"
train = \"one.parquet\"
[[data.tasks]]
name = \"other\"
train = \"other.parquet\"
validation = \"valid.parquet\"
source_prefix = \"other: \"
";
    scene.run(&arguments(&scene, config, &["--max-steps", "2", "--output", "mixed"])).expect_code(0);
    let steps = scene.events("mixed", "step");
    let both: Vec<u64> =
        counts(&steps, "one").into_iter().zip(counts(&steps, "other")).map(|(one, other)| one + other).collect();
    assert_eq!(both, [13, 13]);
    assert_eq!(counts(&steps, "one").iter().sum::<u64>(), 13, "{steps:?}");
    assert!(!scene.path("mixed/data").exists(), "nothing was converted");
    scene.run(&["eval", "--model", "mixed"]).expect_code(0).expect_words(&["  other: loss "]);
    let plain = short(&["--output", "plain"]);
    scene.run(&plain).expect_code(0);
    scene.run(&["eval", "--model", "plain"]).expect_code(2).expect_words(&["`--data` is missing", "hint: "]);
    let eval = scene.events("mixed", "eval").pop().expect("an evaluation");
    assert_eq!(eval["tasks"]["other"]["samples"], 3);
    assert_eq!(eval["samples"], 3);
}
