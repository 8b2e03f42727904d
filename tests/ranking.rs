//! `score`: a reranker's score of each pair of a query and a text, and what the order of the scores is worth.

use serde_json::{Value, json};

use crate::run::{Scene, short};

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
    scene.run(&[&words[..], &["--answers", "7"]].concat()).expect_code(2).expect_words(&["expected two, got 1"]);
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
