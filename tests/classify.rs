//! `task.name`: a label, a number, or a label of each word, from rows to a directory of transformers' class.

use serde_json::{Value, json};

use crate::run::{Ran, Scene, sample, short};

const ROWS: [(&str, &str, f64); 4] = [
    ("it was great", "good", 1.5),
    ("it was bad", "bad", -2.0),
    ("great fun", "good", 1.0),
    ("a bad day", "bad", -1.0),
];

/// A scene with rows of each kind.
fn scene() -> Scene {
    let scene = Scene::new();
    let lines = |row: &dyn Fn(&(&str, &str, f64)) -> Value| -> String {
        (0..4).flat_map(|_| &ROWS).map(|of| format!("{}\n", row(of))).collect()
    };
    scene.write("labels.jsonl", lines(&|(text, label, _)| json!({"text": text, "label": label})));
    scene.write("numbers.jsonl", lines(&|(text, _, number)| json!({"prompt": text, "response": number})));
    let tag = |word: &str| if word == "great" { "B-GOOD" } else { "O" };
    let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let tags = |text: &str| text.split(' ').map(tag).collect::<Vec<_>>();
    scene.write("words.jsonl", lines(&|(text, ..)| json!({"tokens": words(text), "ner_tags": tags(text)})));
    scene
}

fn train(scene: &Scene, task: &str, file: &str, more: &[&str]) -> Ran {
    let (task, train, rows) =
        (format!("task.name={task}"), format!("data.train=[\"{file}\"]"), format!("data.validation=[\"{file}\"]"));
    let usual = ["--set", &task, "--set", &train, "--set", &rows, "--set", "train.eval_samples=4", "--max-steps", "6"];
    let adamw =
        ["--set", "optimizer.name=adamw", "--set", "optimizer.learning_rate=0.003", "--set", "train.batch_size=4"];
    scene.run(&short(&[&usual[..], &adamw, &["--set", "train.epochs=9"], more].concat()))
}

fn config(scene: &Scene, run: &str) -> Value {
    serde_json::from_slice(&scene.read(&format!("{run}/model/config.json"))).expect("JSON")
}

#[test]
fn labels_of_rows_become_a_classifier_that_learns_them_and_resumes_to_the_same_bits() {
    let scene = scene();
    train(&scene, "classification", "labels.jsonl", &["--max-steps", "24", "--output", "whole"]).expect_code(0);
    let written = config(&scene, "whole");
    assert_eq!(written["architectures"], json!(["T5ForSequenceClassification"]));
    assert_eq!(written["id2label"], json!({"0": "bad", "1": "good"}));
    assert_eq!(written["problem_type"], "single_label_classification");
    let evaluated = scene.run(&["eval", "--model", "whole", "--data", "labels.jsonl", "--json"]).expect_code(0).json();
    assert_eq!((&evaluated["accuracy"], &evaluated["macro_f1"]), (&json!(1.0), &json!(1.0)), "{evaluated}");
    assert_eq!(evaluated["target_tokens"], 16);
    let half = ["--set", "checkpoint.every_steps=5", "--max-steps", "24"];
    train(&scene, "classification", "labels.jsonl", &[&half[..], &["--max-steps", "10"]].concat()).expect_code(0);
    train(&scene, "classification", "labels.jsonl", &[&half[..], &["--keep-training"]].concat()).expect_code(0);
    let [one, other] = ["whole", "run"].map(|run| scene.events(run, "step").len());
    assert!(one == 24 && other >= 24, "{one}, {other}");
    assert!(
        scene.run(&["generate", "--model", "whole", "--prompt", "a"]).expect_code(4).err.contains("makes text"),
        "a classifier makes no text"
    );
}

#[test]
fn a_run_of_a_classifier_in_two_parts_ends_with_the_bits_of_one() {
    let scene = scene();
    let settings = ["--set", "schedule.name=constant", "--set", "checkpoint.every_steps=3"];
    train(&scene, "token-classification", "words.jsonl", &[&settings[..], &["--output", "whole"]].concat())
        .expect_code(0);
    train(&scene, "token-classification", "words.jsonl", &[&settings[..], &["--max-steps", "3"]].concat())
        .expect_code(0);
    train(&scene, "token-classification", "words.jsonl", &[&settings[..], &["--keep-training"]].concat())
        .expect_code(0);
    assert!(scene.read("whole/model/model.safetensors") == scene.read("run/model/model.safetensors"));
    let written = config(&scene, "run");
    assert_eq!(written["architectures"], json!(["T5ForTokenClassification"]));
    assert_eq!(written["id2label"], json!({"0": "B-GOOD", "1": "O"}));
    assert_eq!(written["is_encoder_decoder"], false);
}

#[test]
fn the_cut_and_the_budget_change_no_loss_of_a_classifier_and_the_decoder_of_a_tagger_costs_nothing() {
    let scene = scene();
    let steps = |more: &[&str], output: &str| -> Vec<[f64; 2]> {
        train(&scene, "token-classification", "words.jsonl", &[more, &["--output", output]].concat()).expect_code(0);
        let figures = |step: &Value| ["loss", "grad_norm"].map(|name| step[name].as_f64().expect("a number"));
        scene.events(output, "step").iter().map(figures).collect()
    };
    let whole = steps(&[], "a");
    for (more, output) in [
        (&["--set", "memory.micro_batch_samples=1"][..], "b"),
        (&["--set", "memory.micro_batch_samples=2", "--set", "memory.recompute_blocks=1"], "c"),
        (&["--set", "memory.weight_offload=disk", "--set", "memory.micro_batch_samples=2"], "d"),
    ] {
        for (step, (one, other)) in whole.iter().zip(steps(more, output)).enumerate() {
            // Adafactor's first update of an element is its gradient's sign, which rounding decides where the gradient is nearly 0. How
            // often it does depends on the processor.
            let tolerance = if step == 0 { [1e-6, 1e-4] } else { [1e-2, f64::INFINITY] };
            for ((one, other), tolerance) in one.iter().zip(other).zip(tolerance) {
                let far = (one - other).abs() / one.abs().max(0.01);
                assert!(far <= tolerance, "{output}, step {step}: {one}, {other}");
            }
        }
    }
    let peaks = |run: &str| {
        let step = scene.events(run, "step").pop().expect("a step");
        ["peak_rss_bytes", "predicted_peak_bytes"].map(|peak| step[peak].as_u64().expect("bytes"))
    };
    for run in ["a", "b", "c", "d"] {
        assert!(peaks(run)[0] <= peaks(run)[1], "{run}: {:?}", peaks(run));
    }
    let names = String::from_utf8_lossy(&scene.read("a/model/model.safetensors")).into_owned();
    assert!(names.contains("transformer.encoder.block.0") && names.contains("classifier.bias"));
    assert!(!names.contains("decoder") && !names.contains("lm_head"));
}

#[test]
fn labels_that_are_numbers_without_names_are_named_on_the_first_screen() {
    let scene = scene();
    scene.write("tags.jsonl", "{\"tokens\": [\"a\", \"Bern\"], \"ner_tags\": [0, 5]}\n".repeat(4));
    let words = ["to the 2 labels of", "which are numbers: the file has no names", "spans are not scored"];
    let ran = train(&scene, "token-classification", "tags.jsonl", &["--dry-run"]).expect_code(0);
    let screen = ran.out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.iter().all(|words| screen.contains(words)), "{screen}");
}

#[test]
fn numbers_are_learned_and_evaluated_as_numbers() {
    let scene = scene();
    train(&scene, "regression", "numbers.jsonl", &["--max-steps", "24"]).expect_code(0);
    assert_eq!(config(&scene, "run")["problem_type"], "regression");
    let predictions = ["--predictions", "answers.jsonl"];
    scene.run(&[&["eval", "--model", "run", "--data", "numbers.jsonl"][..], &predictions].concat()).expect_code(0);
    let answers = String::from_utf8(scene.read("answers.jsonl")).expect("UTF-8");
    for line in answers.lines() {
        let line: Value = serde_json::from_str(line).expect("JSON");
        let number = |key: &str| line[key].as_str().and_then(|text| text.parse::<f64>().ok()).expect("a number");
        assert!((number("prediction") - number("reference")).abs() < 1.0, "{line}");
    }
}

#[test]
fn rows_without_a_usable_label_are_refused_or_counted() {
    let scene = scene();
    train(&scene, "token-classification", "words.jsonl", &[]).expect_code(0);
    let good = json!({"tokens": ["great"], "ner_tags": ["B-GOOD"]});
    let unequal = json!({"tokens": ["great", "day"], "ner_tags": ["O"]});
    let unknown = json!({"tokens": ["great"], "ner_tags": ["B-BAD"]});
    scene.write("odd.jsonl", format!("{good}\n{unequal}\n{unknown}\n"));
    let evaluated = scene.run(&["eval", "--model", "run", "--data", "odd.jsonl", "--json"]).expect_code(0).json();
    assert_eq!((&evaluated["samples"], &evaluated["bad_rows"]), (&json!(1), &json!(2)));
    let train_on = |rows: &[&Value], name: &str, more: &[&str]| {
        scene.write(name, rows.iter().map(|row| format!("{row}\n")).collect::<String>());
        let data = format!("data.train=[\"{name}\"]");
        let tokenizer = sample("data.tokenizer", "sample-tokenizer.json");
        let usual = ["--set", &data, "--set", &tokenizer, "--set", "model.config=tiny", "--set", "data.bad_rows=error"];
        scene.run(&[&usual[..], &["--max-steps", "1", "--device", "cpu", "--output", "odd"], more].concat())
    };
    let words = ["--set", "task.name=token-classification"];
    train_on(&[&good, &unequal, &unknown], "unequal.jsonl", &words)
        .expect_code(4)
        .expect_words(&["`response` has another number of labels than there are words"]);
    train_on(&[&good, &good], "alone.jsonl", &words).expect_code(4).expect_words(&["every row has the label `B-GOOD`"]);
    let number = json!({"prompt": "a", "response": "many"});
    train_on(&[&number], "no-number.jsonl", &["--set", "task.name=regression"])
        .expect_code(4)
        .expect_words(&["`response` is not a number"]);
}

#[test]
fn sources_with_any_number_of_labels_are_learned_and_scored_label_by_label() {
    let scene = scene();
    let rows = [
        ("it was great", vec!["good", "short"]),
        ("it was bad", vec!["short"]),
        ("great fun", vec!["good"]),
        ("a day", vec![]),
    ];
    let json = rows.iter().map(|(text, labels)| format!("{}\n", json!({"text": text, "labels": labels})));
    scene.write("sets.jsonl", json.collect::<String>().repeat(4));
    let csv = rows.iter().map(|(text, labels)| format!("{text},\"{}\"\n", labels.join(", ")));
    scene.write("sets.csv", format!("text,labels\n{}", csv.collect::<String>().repeat(4)));
    let task = "multi-label-classification";
    let rarely = ["--set", "checkpoint.every_steps=99"];
    let losses = |run: &str| -> Vec<Value> {
        scene.events(run, "step").iter().take(2).map(|step| step["loss"].clone()).collect()
    };
    train(&scene, task, "sets.jsonl", &[&rarely[..], &["--max-steps", "30", "--output", "whole"]].concat())
        .expect_code(0)
        .expect_words(&["` to any"]);
    train(&scene, task, "sets.csv", &[&rarely[..], &["--max-steps", "2", "--output", "csv"]].concat()).expect_code(0);
    assert_eq!(losses("whole"), losses("csv"));
    let written = config(&scene, "whole");
    assert_eq!(written["problem_type"], "multi_label_classification");
    assert_eq!(written["id2label"], json!({"0": "good", "1": "short"}));
    let evaluated = scene.run(&["eval", "--model", "whole", "--data", "sets.jsonl", "--json"]).expect_code(0).json();
    for score in ["accuracy", "micro_f1", "macro_f1"] {
        assert_eq!(evaluated[score], 1.0, "{score}: {evaluated}");
    }
    assert_eq!((&evaluated["samples"], &evaluated["target_tokens"]), (&json!(16), &json!(32)), "{evaluated}");
    let [odd, good] = [vec!["good", "new"], vec!["good"]].map(|labels| json!({"text": "a", "labels": labels}));
    scene.write("odd.jsonl", format!("{odd}\n{good}\n"));
    let evaluated = scene.run(&["eval", "--model", "whole", "--data", "odd.jsonl", "--json"]).expect_code(0).json();
    assert_eq!((&evaluated["samples"], &evaluated["bad_rows"]), (&json!(1), &json!(1)), "{evaluated}");
}

#[test]
fn weights_of_classes_change_what_a_classifier_minimises_and_unknown_classes_are_refused() {
    let scene = scene();
    let run = |file: &str, task: &str, weights: &str, output: &str| {
        let weights = format!("task.class_weights={weights}");
        train(&scene, task, file, &["--set", &weights, "--output", output, "--set", "memory.micro_batch_samples=3"])
    };
    train(&scene, "classification", "labels.jsonl", &["--output", "plain"]).expect_code(0);
    run("labels.jsonl", "classification", "{ good = 3, bad = 0.5 }", "weighted").expect_code(0);
    run("words.jsonl", "token-classification", "{ B-GOOD = 4 }", "words").expect_code(0);
    assert!(scene.events("plain", "step").iter().all(|step| step["objective"].is_null()));
    for run in ["weighted", "words"] {
        let steps = scene.events(run, "step");
        // A batch of one class has the same mean with and without weights.
        assert!(
            steps.iter().any(|step| step["objective"].as_f64().expect("a number") != step["loss"]),
            "{run}: {steps:?}"
        );
        let step = steps.last().expect("a step");
        let [peak, predicted] = ["peak_rss_bytes", "predicted_peak_bytes"].map(|name| step[name].as_u64());
        assert!(peak <= predicted, "{run}: {peak:?}, {predicted:?}");
    }
    run("labels.jsonl", "classification", "{ great = 3 }", "odd")
        .expect_code(2)
        .expect_words(&["no row has the class `great`", "the classes are `bad`, `good`"]);
    run("labels.jsonl", "classification", "{ good = -1 }", "odd")
        .expect_code(2)
        .expect_words(&["expected a number from 0 up"]);
    run("numbers.jsonl", "regression", "{ good = 2 }", "odd")
        .expect_code(2)
        .expect_words(&["the model has no classes"]);
    let smoothed = ["--set", "task.class_weights={ good = 2 }", "--set", "train.label_smoothing=0.1"];
    train(&scene, "classification", "labels.jsonl", &smoothed).expect_code(2).expect_words(&["train.label_smoothing"]);
}

#[test]
fn residues_have_a_label_each_as_a_text_or_as_a_list() {
    let scene = scene();
    let rows = |labels: &dyn Fn(&str) -> Value| -> String {
        let one =
            |(sequence, tags): (&str, &str)| format!("{}\n", json!({"sequence": sequence, "labels": labels(tags)}));
        [("MKUV", "HHCE"), ("VKM", "EHH"), ("MMZ", "HHC")].map(one).concat().repeat(4)
    };
    scene.write("text.jsonl", rows(&|tags| json!(tags)));
    scene.write("list.jsonl", rows(&|tags| tags.chars().map(String::from).collect()));
    scene.write("x.jsonl", rows(&|tags| json!(tags)).replace(['U', 'Z'], "X"));
    let losses = |file: &str| -> Vec<Value> {
        train(&scene, "token-classification", file, &["--output", &file.replace('.', "-")]).expect_code(0);
        scene.events(&file.replace('.', "-"), "step").iter().map(|step| step["loss"].clone()).collect()
    };
    let whole = losses("text.jsonl");
    assert!(whole == losses("list.jsonl") && whole == losses("x.jsonl"));
    assert_eq!(config(&scene, "text-jsonl")["id2label"], json!({"0": "C", "1": "E", "2": "H"}));
    scene.write(
        "short.jsonl",
        format!("{}\n", json!({"sequence": "MKV".repeat(9), "labels": "HH"})).repeat(2) + &rows(&|tags| json!(tags)),
    );
    train(&scene, "token-classification", "short.jsonl", &["--set", "data.bad_rows=error"])
        .expect_code(4)
        .expect_words(&["row 0", "`response` has another number of labels than there are words"]);
}

#[test]
fn an_adapter_beside_a_classifier_holds_its_layers_and_its_labels_and_is_merged_to_the_same_answers() {
    let scene = scene();
    scene.run(&short(&["--max-steps", "1", "--output", "base"])).expect_code(0);
    let beside = &["--set", "model.init_from=base/model", "--lora"];
    let rows = |task: &str| if task == "classification" { "labels.jsonl" } else { "words.jsonl" };
    let figures = |arguments: &[&str], task: &str| {
        let all = [&["eval"], arguments, &["--data", rows(task), "--json"]].concat();
        let json = scene.run(&all).expect_code(0).json();
        (json["loss"].as_f64().expect("a loss"), json["accuracy"].clone())
    };
    for (task, precision) in [("classification", "none"), ("token-classification", "int8"), ("classification", "nf4")] {
        let (whole, merged) = (format!("{task}-{precision}"), format!("{task}-{precision}-merged"));
        let precision = match precision {
            "none" => vec![],
            precision => vec!["--set".to_owned(), format!("model.base_precision={precision}")],
        };
        let precision: Vec<&str> = precision.iter().map(String::as_str).collect();
        let flags =
            [&beside[..], &precision, &["--set", "checkpoint.every_steps=3", "--set", "lora.dropout=0.1"]].concat();
        train(&scene, task, rows(task), &[&flags[..], &["--output", &whole]].concat()).expect_code(0);
        let trained = figures(&["--model", &whole], task);
        let [first, last] = [0, 5].map(|step| scene.events(&whole, "step")[step]["loss"].as_f64().expect("a loss"));
        assert!(last < first, "{whole}: {first}, {last}");
        scene.run(&["embed", "--model", &whole, "--input", "labels.jsonl", "--output", "a.npy"]).expect_code(0);
        if precision.is_empty() {
            scene.run(&["merge", "--model", "base/model", "--adapter", &whole, "--output", &merged]).expect_code(0);
            let of_merged = figures(&["--model", &merged], task);
            assert!((trained.0 - of_merged.0).abs() < 1e-5 && trained.1 == of_merged.1, "{trained:?}, {of_merged:?}");
            train(&scene, task, rows(task), &[&flags[..], &["--output", "parts", "--max-steps", "3"]].concat())
                .expect_code(0);
            let again = ["--output", "parts", "--max-steps", "6", "--keep-training"];
            train(&scene, task, rows(task), &[&flags[..], &again].concat()).expect_code(0);
            let file = "adapter/adapter_model.safetensors";
            assert!(scene.read(&format!("{whole}/{file}")) == scene.read(&format!("parts/{file}")));
            let words = ["an adapter of a T5ForSequenceClassification with 2 outputs"];
            let generate = ["generate", "--model", &whole, "--prompt", "a"];
            scene.run(&generate).expect_code(4).expect_words(&words);
        }
    }
}

#[test]
fn sequences_of_fasta_are_rows_with_labels_of_residues_beside_them_and_of_proteins_in_their_names() {
    let scene = scene();
    let sequences = [("MKUV", "HHCE"), ("VKM", "EHH"), ("MMZ", "HHC")];
    let records = |of: &dyn Fn(usize) -> String| -> String { (0..12).map(of).collect() };
    let title =
        |at: usize| format!(">P{at} TARGET={} SET=train\n", if at.is_multiple_of(3) { "membrane" } else { "other" });
    scene.write("p.fasta", records(&|at| title(at) + sequences[at % 3].0 + "\n"));
    scene.write("p.labels.fasta", records(&|at| format!(">P{at}\n{}\n", sequences[at % 3].1)));
    let rows = |at: usize| {
        let (sequence, labels) = sequences[at % 3];
        format!("{}\n", json!({"sequence": sequence, "labels": labels}))
    };
    scene.write("p.jsonl", records(&rows));
    for (file, output) in [("p.fasta", "fasta"), ("p.jsonl", "rows")] {
        train(&scene, "token-classification", file, &["--output", output]).expect_code(0);
    }
    let [fasta, rows] = ["fasta", "rows"].map(|run| scene.read(&format!("{run}/model/model.safetensors")));
    assert!(fasta == rows, "the same rows in another form");
    let of_proteins =
        ["--set", "data.prompt_column=text", "--set", "data.response_column=target", "--output", "proteins"];
    let trained = train(&scene, "classification", "p.fasta", &of_proteins).expect_code(0);
    trained.expect_words(&["FASTA"]);
    assert_eq!(config(&scene, "proteins")["id2label"], json!({"0": "membrane", "1": "other"}));
    scene.write("long.fasta", records(&|at| format!(">P{at}\n{}\n", "MKV".repeat(9))));
    scene.write("long.labels.fasta", records(&|at| format!(">P{at}\n{}\n", "HEC".repeat(if at == 4 { 8 } else { 9 }))));
    let refuses = ["--set", "data.bad_rows=error", "--output", "again"];
    let again = train(&scene, "token-classification", "long.fasta", &refuses).expect_code(4);
    again.expect_words(&["row 4", "another number of labels"]);
    scene.write("p.labels.fasta", records(&|at| format!(">Q{at}\n{}\n", sequences[at % 3].1)));
    let other = train(&scene, "token-classification", "p.fasta", &["--output", "other"]).expect_code(4);
    other.expect_words(&["p.fasta:1: expected the labels of `P0`", "got `Q0`", "NAME.labels.fasta"]);
}
