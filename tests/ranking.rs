//! `score`: a reranker's score of each pair of a query and a text, and what the order of the scores is worth.

use serde_json::{Value, json};

use crate::run::{Ran, Scene, short};

const ROWS: [(&str, &str, &str, u8); 6] = [
    ("a", "how many legs has a spider", "a spider has eight legs", 1),
    ("a", "how many legs has a spider", "a cat has four legs", 0),
    ("a", "how many legs has a spider", "birds sing", 0),
    ("b", "what do cows eat", "lions eat meat", 0),
    ("b", "what do cows eat", "cows eat grass", 2),
    ("b", "what do cows eat", "cows eat hay", 1),
];

/// A scene with rows, and a model that answers each with `yes` or `no`.
fn scene() -> Scene {
    let scene = Scene::new();
    let rows = ROWS.map(|(id, query, text, gain)| {
        let answer = if gain > 0 { "true" } else { "false" };
        json!({"qid": id, "query": query, "text": text, "relevance": gain, "answer": answer})
    });
    scene.write("pairs.jsonl", rows.map(|row| format!("{row}\n")).concat());
    scene
}

fn scores(text: &str) -> Vec<f64> {
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    lines
        .enumerate()
        .map(|(row, line)| {
            assert_eq!(line["row"], row);
            line["score"].as_f64().expect("a number")
        })
        .collect()
}

#[test]
fn a_model_that_answers_true_or_false_ranks_texts_whatever_the_batch_and_the_budget() {
    let scene = scene();
    let train = [
        "--set",
        "data.train=[\"pairs.jsonl\"]",
        "--set",
        "data.source_template={query} {text}",
        "--set",
        "data.target_template={answer}",
        "--set",
        "train.epochs=99",
        "--max-steps",
        "2",
    ];
    scene.run(&short(&train)).expect_code(0);
    // Its tokenizer has no token for a whole word, so letters stand for them.
    let score =
        ["score", "--model", "run", "--pairs", "pairs.jsonl", "--template", "{query} {text}", "--answers", "7,8"];
    let printed = scene.run(&[&score[..], &["--batch-samples", "1"]].concat()).expect_code(0);
    let one = scores(&printed.out);
    assert!(one.len() == 6 && one.iter().all(|score| *score < 0.0), "{one:?}");
    let graded = ["--label-column", "relevance", "--query-column", "qid", "--output", "scores.jsonl", "--json"];
    let all = scene.run(&[&score[..], &graded].concat()).expect_code(0).json();
    let written = scores(&String::from_utf8(scene.read("scores.jsonl")).expect("UTF-8"));
    for (one, other) in one.iter().zip(&written) {
        assert!((one - other).abs() < 1e-5, "{one}, {other}");
    }
    assert_eq!((&all["rows"], &all["queries"]), (&json!(6), &json!(2)));
    let peaks = ["peak_rss_bytes", "predicted_peak_bytes"].map(|name| all[name].as_u64());
    assert!(peaks[0] <= peaks[1], "{peaks:?}");
    let of_query = |rows: std::ops::Range<usize>| {
        let mut ranked: Vec<usize> = rows.collect();
        ranked.sort_by(|one, other| written[*other].total_cmp(&written[*one]));
        let gains: Vec<f64> = ranked.iter().map(|row| f64::from(ROWS[*row].3)).collect();
        let sum =
            |gains: &[f64]| gains.iter().enumerate().map(|(at, gain)| gain / (at as f64 + 2.0).log2()).sum::<f64>();
        let mut best = gains.clone();
        best.sort_by(|one, other| other.total_cmp(one));
        let first = gains.iter().position(|gain| *gain > 0.0).expect("a relevant text");
        [1.0 / (first as f64 + 1.0), sum(&gains) / sum(&best)]
    };
    let [a, b] = [of_query(0..3), of_query(3..6)];
    for (name, at) in [("mrr@10", 0), ("ndcg@10", 1)] {
        assert!((all[name].as_f64().expect("a number") - (a[at] + b[at]) / 2.0).abs() < 1e-12, "{name}: {all}");
    }
    // The two answers share all of the probability.
    let swapped = ["--model", "run", "--pairs", "pairs.jsonl", "--template", "{query} {text}", "--answers", "8,7"];
    let other = scores(&scene.run(&[&["score"][..], &swapped].concat()).expect_code(0).out);
    for (one, other) in one.iter().zip(other) {
        assert!((one.exp() + other.exp() - 1.0).abs() < 1e-5, "{one}, {other}");
    }
}

#[test]
fn a_model_of_numbers_gives_its_number_and_other_models_say_what_they_are() {
    let scene = scene();
    let numbers = [
        "--set",
        "data.train=[\"pairs.jsonl\"]",
        "--set",
        "data.source_template={query} {text}",
        "--set",
        "task.name=regression",
        "--set",
        "data.target_template={relevance}",
        "--set",
        "train.epochs=99",
        "--max-steps",
        "2",
    ];
    scene.run(&short(&numbers)).expect_code(0);
    let score = ["score", "--model", "run", "--pairs", "pairs.jsonl", "--template", "{query} {text}"];
    let got = scores(&scene.run(&score).expect_code(0).out);
    let eval =
        ["eval", "--model", "run", "--data", "pairs.jsonl", "--predictions", "p.jsonl", "--generate-samples", "0"];
    scene.run(&eval).expect_code(0);
    let predictions = String::from_utf8(scene.read("p.jsonl")).expect("UTF-8");
    for (score, line) in got.iter().zip(predictions.lines()) {
        let line: Value = serde_json::from_str(line).expect("JSON");
        let expected: f64 = line["prediction"].as_str().and_then(|text| text.parse().ok()).expect("a number");
        assert!((score - expected).abs() < 1e-4, "{score}, {line}");
    }
    let missing = ["score", "--model", "run", "--pairs", "pairs.jsonl", "--template", "{question}"];
    scene.run(&missing).expect_code(4).expect_words(&["no column `question`", "qid"]);
    scene
        .run(&[&score[..], &["--label-column", "text", "--query-column", "qid"]].concat())
        .expect_code(4)
        .expect_words(&["row 1: `text` is `a spider has eight legs`", "expected a number"]);
    scene.run(&short(&["--max-steps", "1", "--output", "language"])).expect_code(0);
    let words = ["score", "--model", "language", "--pairs", "pairs.jsonl", "--template", "{text}"];
    scene.run(&[&words[..], &["--answers", "spider,cat"]].concat()).expect_code(2).expect_words(&["one token each"]);
    scene.run(&[&words[..], &["--answers", "7,8,9"]].concat()).expect_code(2).expect_words(&["expected two", "got 3"]);
    let labels = [
        "--set",
        "data.train=[\"pairs.jsonl\"]",
        "--set",
        "task.name=classification",
        "--set",
        "data.prompt_column=text",
        "--set",
        "data.response_column=answer",
        "--max-steps",
        "1",
        "--output",
        "labels",
    ];
    scene.run(&short(&labels)).expect_code(0);
    let classifier = ["score", "--model", "labels", "--pairs", "pairs.jsonl", "--template", "{text}"];
    scene
        .run(&classifier)
        .expect_code(4)
        .expect_words(&["a T5ForSequenceClassification gives a pair of texts no score"]);
}

/// Lists of three texts, of which the first, second or third begins as its query does.
fn lists() -> Scene {
    let scene = Scene::new();
    let (mut grouped, mut lists) = (String::new(), String::new());
    for at in 0..12 {
        let texts: Vec<String> =
            (0..3).map(|of| format!("{} tail {at}", if of == at % 3 { "aaaa" } else { "zz" })).collect();
        let labels: Vec<usize> = (0..3).map(|of| usize::from(of == at % 3)).collect();
        for (text, label) in texts.iter().zip(&labels) {
            grouped += &format!("{}\n", json!({"qid": at, "query": "find aaaa", "text": text, "relevance": label}));
        }
        lists += &format!("{}\n", json!({"query": "find aaaa", "passages": texts, "labels": labels}));
    }
    scene.write("grouped.jsonl", grouped);
    scene.write("lists.jsonl", lists);
    scene
}

fn rank(scene: &Scene, file: &str, loss: &str, more: &[&str]) -> Ran {
    let (train, rows) = (format!("data.train=[\"{file}\"]"), format!("data.validation=[\"{file}\"]"));
    let loss = format!("ranking.loss={loss}");
    let usual =
        ["--set", "task.name=ranking", "--set", &train, "--set", &rows, "--set", "train.epochs=99", "--set", &loss];
    let answers = if loss.ends_with("monot5") { "ranking.answers=7,8" } else { "ranking.answers=7" };
    let adamw = ["--set", "optimizer.name=adamw", "--set", "optimizer.learning_rate=0.003", "--set", answers];
    scene.run(&short(&[&usual[..], &adamw, more].concat()))
}

fn figures(scene: &Scene, run: &str) -> Vec<[f64; 2]> {
    let of = |step: &Value| ["loss", "grad_norm"].map(|name| step[name].as_f64().expect("a number"));
    scene.events(run, "step").iter().map(of).collect()
}

#[test]
fn lists_in_a_row_and_lists_by_query_train_alike_and_are_scored_alike_in_eval_score_and_the_run() {
    let scene = lists();
    let more = ["--max-steps", "4", "--output"];
    let trained = rank(&scene, "grouped.jsonl", "softmax", &[&more[..], &["run"]].concat()).expect_code(0);
    trained.expect_words(&["lists of texts ranked", "MRR@10", "NDCG@10", "score --model run/model"]);
    rank(&scene, "lists.jsonl", "softmax", &[&more[..], &["other"]].concat()).expect_code(0);
    assert_eq!(figures(&scene, "run"), figures(&scene, "other"));
    let evaluations = scene.events("run", "eval");
    let of = |event: &Value, name: &str| event[name].as_f64().expect("a number");
    let (first, last) = (&evaluations[0], evaluations.last().expect("an evaluation"));
    assert!(of(last, "loss") < of(first, "loss") && of(last, "mrr@10") >= of(first, "mrr@10"), "{first} {last}");
    let evaluated = scene.run(&["eval", "--model", "run", "--data", "lists.jsonl", "--json"]).expect_code(0).json();
    let graded = ["--label-column", "relevance", "--query-column", "qid", "--output", "scores.jsonl", "--json"];
    let score = ["score", "--model", "run", "--pairs", "grouped.jsonl"];
    let scored = scene.run(&[&score[..], &graded].concat()).expect_code(0).json();
    for name in ["mrr@10", "ndcg@10"] {
        for other in [&evaluated, &scored] {
            assert!((of(other, name) - of(last, name)).abs() < 1e-6, "{name}: {other}, {last}");
        }
    }
    assert!((of(&evaluated, "loss") - of(last, "loss")).abs() < 1e-5, "{evaluated}, {last}");
}

#[test]
fn the_cut_the_budget_and_a_pause_change_no_rank() {
    let scene = lists();
    let run = |more: &[&str], output: &str| {
        let more = [&["--max-steps", "4", "--output", output], more].concat();
        rank(&scene, "grouped.jsonl", "pairwise", &more).expect_code(0);
    };
    run(&["--set", "memory.micro_batch_samples=24"], "whole");
    let whole = figures(&scene, "whole")[0];
    for (more, output) in [
        (&["--set", "memory.micro_batch_samples=1"][..], "one"),
        (&["--set", "memory.micro_batch_samples=5", "--set", "memory.weight_offload=disk"], "disk"),
    ] {
        run(more, output);
        for (one, other) in figures(&scene, output)[0].iter().zip(&whole) {
            assert!((one - other).abs() < 1e-4 * other.abs().max(0.01), "{output}: {one}, {other}");
        }
        let step = scene.events(output, "step").pop().expect("a step");
        let [peak, predicted] = ["peak_rss_bytes", "predicted_peak_bytes"].map(|name| step[name].as_u64());
        assert!(peak <= predicted, "{output}: {peak:?}, {predicted:?}");
    }
    let constant = ["--set", "schedule.name=constant"];
    run(&[&constant[..], &["--max-steps", "2"]].concat(), "parts");
    run(&[&constant[..], &["--keep-training"]].concat(), "parts");
    run(&constant, "once");
    assert!(scene.read("parts/model/model.safetensors") == scene.read("once/model/model.safetensors"));
}

#[test]
fn answers_with_class_weights_and_short_lists_have_another_loss_and_bad_lists_are_named() {
    let scene = lists();
    let one = |more: &[&str], output: &str| {
        let more = [&["--max-steps", "1", "--output", output], more].concat();
        rank(&scene, "lists.jsonl", "monot5", &more).expect_code(0);
        figures(&scene, output)[0]
    };
    let plain = one(&[], "plain");
    assert!(plain != one(&["--set", "task.class_weights={ true = 3 }"], "weighed"));
    assert!(plain != one(&["--set", "ranking.list_size=2"], "cut"));
    let refused = |file: &str, row: Value, more: &[&str], words: &[&str]| {
        scene.write(file, format!("{row}\n"));
        rank(&scene, file, "softmax", &[&["--output", "no"], more].concat()).expect_code(4).expect_words(words);
    };
    let list = |texts: Value, labels: Value| json!({"query": "q", "passages": texts, "labels": labels});
    refused(
        "short.jsonl",
        list(json!(["a"]), json!([1, 0])),
        &[],
        &["short.jsonl:1", "expected 2 texts", "`labels`, got 1"],
    );
    refused(
        "words.jsonl",
        list(json!(["a"]), json!(["good"])),
        &[],
        &["expected a number, got `good`", "0 stands for"],
    );
    refused("blank.jsonl", list(json!(["a", " "]), json!([1, 0])), &[], &["element 2 is empty"]);
    let rows =
        [("a", 1), ("b", 0), ("a", 0)].map(|(id, label)| json!({"qid": id, "query": "q", "text": "t", "label": label}));
    scene.write("again.jsonl", rows.map(|row| format!("{row}\n")).concat());
    let words = ["3 lists of 3 have one text", "1 list of a query that had one before, such as `a`"];
    rank(&scene, "again.jsonl", "pointwise", &["--max-steps", "1", "--output", "again"])
        .expect_code(0)
        .expect_words(&words);
    let other = ["--set", "data.query_column=query", "--max-steps", "1", "--output", "one"];
    let joined = rank(&scene, "again.jsonl", "pointwise", &other).expect_code(0);
    assert!(!joined.err.contains("one text") && !joined.out.contains("one text"));
    let weighed = ["--set", "task.class_weights={ true = 3 }"];
    rank(&scene, "lists.jsonl", "softmax", &weighed)
        .expect_code(2)
        .expect_words(&["weighs single texts", "ranking.loss=pointwise"]);
}
