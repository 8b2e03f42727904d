//! `task.name = "embedding"`: an encoder whose vectors bring texts that belong together near each other.

use serde_json::{Value, json};

use crate::run::{Ran, Scene, short};

const ROWS: [[&str; 3]; 4] = [
    ["how many legs has a spider", "a spider has eight legs", "a cat has four legs"],
    ["what do cows eat", "cows eat grass", "lions eat meat"],
    ["where do fish live", "fish live in water", "birds live in trees"],
    ["who bakes bread", "the baker bakes bread", "the smith makes nails"],
];

/// A scene with rows of two texts and of three.
fn scene() -> Scene {
    let scene = Scene::new();
    let lines = |count: usize, row: &dyn Fn(&[String; 3]) -> Value| -> String {
        let rows = (0..count).map(|at| ROWS[at % 4].map(|text| format!("{text} {at}")));
        rows.map(|texts| format!("{}\n", row(&texts))).collect()
    };
    let pair = |[query, positive, _]: &[String; 3]| json!({"query": query, "positive": positive});
    let triple = |[query, positive, negative]: &[String; 3]| json!({"anchor": query, "positive": positive, "negative": negative});
    scene.write("pairs.jsonl", lines(16, &pair));
    scene.write("many.jsonl", lines(512, &pair));
    scene.write("triples.jsonl", lines(16, &triple));
    scene
}

fn train(scene: &Scene, file: &str, more: &[&str]) -> Ran {
    let (train, rows) = (format!("data.train=[\"{file}\"]"), format!("data.validation=[\"{file}\"]"));
    let usual = ["--set", "task.name=embedding", "--set", &train, "--set", &rows, "--set", "train.eval_samples=16"];
    let adamw = ["--set", "optimizer.name=adamw", "--set", "optimizer.learning_rate=0.002"];
    let is_sized = more.iter().any(|word| word.starts_with("train.batch_size="));
    let batch: &[&str] = if is_sized { &[] } else { &["--set", "train.batch_size=8"] };
    let more = [batch, more].concat();
    let more =
        [&["--set", "train.epochs=99", "--max-steps", "6", "--set", "data.max_source_tokens=32"], &more[..]].concat();
    scene.run(&short(&[&usual[..], &adamw, &more].concat()))
}

fn figures(scene: &Scene, run: &str, names: &[&str]) -> Vec<Vec<f64>> {
    let of = |step: &Value| names.iter().map(|name| step[*name].as_f64().expect("a number")).collect();
    scene.events(run, "step").iter().map(of).collect()
}

#[test]
fn texts_that_belong_together_come_near_each_other_and_the_directory_says_how_vectors_are_made() {
    let scene = scene();
    let settings = ["--set", "embedding.normalize=true", "--set", "embedding.pooling=max"];
    let trained = train(&scene, "pairs.jsonl", &[&settings[..], &["--max-steps", "20"]].concat()).expect_code(0);
    let trained = trained.expect_words(&["vectors of `prompt` near", "recall@1", "embed --model run/model"]);
    let evaluations = scene.events("run", "eval");
    let of = |event: &Value, name: &str| event[name].as_f64().expect("a number");
    let (first, last) = (&evaluations[0], evaluations.last().expect("an evaluation"));
    assert!(last["bleu"].is_null() && !trained.out.contains("BLEU"), "{last} {}", trained.out);
    assert!(of(last, "loss") < of(first, "loss") && of(last, "mrr@10") >= of(first, "mrr@10"), "{first} {last}");
    assert!(figures(&scene, "run", &["in_batch_accuracy"]).iter().all(|step| (0.0..=1.0).contains(&step[0])));
    let evaluated = scene.run(&["eval", "--model", "run", "--data", "pairs.jsonl", "--json"]).expect_code(0).json();
    for name in ["loss", "recall@1", "recall@10", "mrr@10", "ndcg@10"] {
        assert!((of(&evaluated, name) - of(last, name)).abs() < 1e-5, "{name}: {evaluated}, {last}");
    }
    let read = |name: &str| serde_json::from_slice::<Value>(&scene.read(name)).expect("JSON");
    assert_eq!(read("run/model/config.json")["architectures"], json!(["T5EncoderModel"]));
    assert_eq!(read("run/model/modules.json")[2]["path"], "2_Normalize");
    assert_eq!(read("run/model/1_Pooling/config.json")["pooling_mode_max_tokens"], true);
    let embed = ["embed", "--model", "run", "--input", "pairs.jsonl", "--text-column", "query", "--output"];
    scene.run(&[&embed[..], &["own.npy"]].concat()).expect_code(0);
    scene.run(&[&embed[..], &["named.npy", "--pooling", "max", "--normalize"]].concat()).expect_code(0);
    scene.run(&[&embed[..], &["other.npy", "--pooling", "mean"]].concat()).expect_code(0);
    assert!(scene.read("own.npy") == scene.read("named.npy") && scene.read("own.npy") != scene.read("other.npy"));
    let generate = ["generate", "--model", "run", "--prompt", "a"];
    scene.run(&generate).expect_code(4).expect_words(&["a model with a decoder", "train_low_mem embed"]);
}

#[test]
fn the_cut_the_budget_and_a_pause_change_no_vector_of_a_run() {
    let scene = scene();
    let three = ["--set", "data.negative_column=negative", "--set", "embedding.sizes=32,8"];
    let run = |more: &[&str], output: &str| {
        train(&scene, "triples.jsonl", &[&three[..], more, &["--output", output]].concat()).expect_code(0);
    };
    run(&["--set", "memory.micro_batch_samples=24"], "whole");
    let whole = figures(&scene, "whole", &["loss", "grad_norm"]);
    for (more, output) in [
        (&["--set", "memory.micro_batch_samples=1"][..], "one"),
        (&["--set", "memory.micro_batch_samples=3", "--set", "memory.recompute_blocks=2"], "three"),
        (&["--set", "memory.weight_offload=disk", "--set", "memory.micro_batch_samples=5"], "disk"),
    ] {
        run(more, output);
        // AdamW's first updates are the gradients' signs, so rounding shows in later steps.
        let one = &figures(&scene, output, &["loss", "grad_norm"])[0];
        for (one, other) in one.iter().zip(&whole[0]) {
            assert!((one - other).abs() < 1e-4 * other.abs().max(0.01), "{output}: {one}, {other}");
        }
        let step = scene.events(output, "step").pop().expect("a step");
        let [peak, predicted] = ["peak_rss_bytes", "predicted_peak_bytes"].map(|name| step[name].as_u64());
        assert!(peak <= predicted, "{output}: {peak:?}, {predicted:?}");
    }
    let constant = ["--set", "schedule.name=constant", "--set", "checkpoint.every_steps=3"];
    run(&[&constant[..], &["--max-steps", "3"]].concat(), "parts");
    run(&[&constant[..], &["--keep-training"]].concat(), "parts");
    run(&constant, "once");
    assert!(scene.read("parts/model/model.safetensors") == scene.read("once/model/model.safetensors"));
}

#[test]
fn a_batch_of_hundreds_takes_the_memory_of_its_micro_batches() {
    let scene = scene();
    let peaks = |batch: &str, output: &str| {
        let batch = format!("train.batch_size={batch}");
        let more = ["--set", &batch, "--set", "memory.micro_batch_samples=8", "--max-steps", "2"];
        train(&scene, "many.jsonl", &[&more[..], &["--output", output]].concat()).expect_code(0);
        let step = scene.events(output, "step").pop().expect("a step");
        assert_eq!(step["samples"].to_string(), batch.trim_start_matches("train.batch_size="));
        ["peak_rss_bytes", "predicted_peak_bytes"].map(|name| step[name].as_u64().expect("bytes"))
    };
    let (few, many) = (peaks("8", "few"), peaks("256", "many"));
    assert!(few[0] <= few[1] && many[0] <= many[1], "{few:?}, {many:?}");
    // The batches themselves, and their vectors.
    assert!(many[1] < few[1] + (8 << 20), "{few:?}, {many:?}");
}

#[test]
fn adapters_of_encoders_are_those_of_peft_and_their_vectors_those_of_the_run() {
    let scene = scene();
    scene.run(&short(&["--max-steps", "1", "--output", "base"])).expect_code(0);
    let beside = ["--set", "model.init_from=base/model", "--lora", "--set", "data.negative_column=negative"];
    train(&scene, "triples.jsonl", &[&beside[..], &["--set", "embedding.loss=triplet"]].concat()).expect_code(0);
    let settings: Value = serde_json::from_slice(&scene.read("run/adapter/adapter_config.json")).expect("JSON");
    assert_eq!(settings["task_type"], "FEATURE_EXTRACTION");
    let losses = figures(&scene, "run", &["loss"]);
    assert!(losses[5][0] < losses[0][0], "{losses:?}");
    let embed = |model: &[&str], output: &str| {
        let input = ["--input", "pairs.jsonl", "--text-column", "query", "--output", output];
        scene.run(&[&["embed"], model, &input].concat()).expect_code(0);
        scene.read(output)
    };
    let [tuned, named, base] = [
        embed(&["--model", "run"], "a.npy"),
        embed(&["--model", "base", "--adapter", "run"], "b.npy"),
        embed(&["--model", "base"], "c.npy"),
    ];
    assert!(tuned == named && tuned != base);
    scene.run(&["merge", "--model", "base/model", "--adapter", "run", "--output", "merged"]).expect_code(0);
    let merged = embed(&["--model", "merged"], "d.npy");
    let values =
        |bytes: &[u8]| -> Vec<f32> { bytes[128..].as_chunks().0.iter().map(|at| f32::from_le_bytes(*at)).collect() };
    for (one, other) in values(&tuned).into_iter().zip(values(&merged)) {
        assert!((one - other).abs() < 1e-4, "{one}, {other}");
    }
}

#[test]
fn settings_that_contradict_a_loss_of_vectors_are_refused_with_a_way_out() {
    let scene = scene();
    let refused = |more: &[&str], code: i32, words: &[&str]| {
        train(&scene, "pairs.jsonl", more).expect_code(code).expect_words(words);
    };
    refused(&["--set", "embedding.loss=triplet"], 2, &["no column has one", "data.negative_column=negative"]);
    refused(&["--set", "train.batch_size=1"], 2, &["`train.batch_size` is 1", "--batch-size 64"]);
    refused(&["--set", "embedding.sizes=many"], 2, &["whole numbers", "embedding.sizes=768,256,64"]);
    refused(&["--set", "train.z_loss=0.1"], 2, &["train.z_loss", "--set train.z_loss=0"]);
    refused(&["--set", "data.negative_column=worse"], 4, &["worse"]);
    let template = ["--set", "data.negative_column=negative", "--set", "data.source_template={query}?"];
    refused(&template, 2, &["`data.source_template`", "three columns", "`data.prompt_column`"]);
    refused(&["--set", "checkpoint.best_metric=rouge1"], 2, &["none of the scores", "checkpoint.best_metric=ndcg@10"]);
    refused(&["--set", "embedding.loss=cosent", "--set", "train.batch_size=1"], 2, &["compares the rows of a step"]);
    let of_three = ["--set", "embedding.loss=cosine", "--set", "data.negative_column=negative"];
    refused(&of_three, 2, &["names a third text", "leave out `data.negative_column`"]);
    train(&scene, "pairs.jsonl", &["--max-steps", "1"]).expect_code(0);
    let without = ["--set", "model.init_from=run/model", "--set", "data.train=[\"pairs.jsonl\"]", "--output", "other"];
    scene.run(&short(&without)).expect_code(4).expect_words(&["--set task.name=embedding"]);
}

/// Rows of two texts with a score from 0 to 5.
fn write_scored(scene: &Scene) {
    let row = |at: usize| {
        let [query, near, far] = ROWS[at % 4].map(|text| format!("{text} {at}"));
        let other = if at.is_multiple_of(2) { near } else { far };
        json!({"sentence1": query, "sentence2": other, "score": if at.is_multiple_of(2) { 4.0 + (at % 3) as f64 / 2.0 } else { 0.5 }})
    };
    scene.write("scored.jsonl", (0..32).map(|at| format!("{}\n", row(at))).collect::<String>());
}

#[test]
fn cosines_come_near_the_scores_of_their_rows_and_rank_checkpoints() {
    let scene = scene();
    write_scored(&scene);
    let best = ["--set", "checkpoint.best_metric=spearman", "--max-steps", "12"];
    for (loss, more) in [("cosine", &["--set", "embedding.largest_score=5"][..]), ("cosent", &[])] {
        let loss_of = format!("embedding.loss={loss}");
        let settings = [&["--set", &loss_of, "--output", loss][..], &best, more].concat();
        let trained = train(&scene, "scored.jsonl", &settings).expect_code(0);
        let trained = trained.expect_words(&["their score from `score`", "Spearman", "embed --model"]);
        assert!(!trained.out.contains("perplexity  ") && !trained.out.contains("recall@1"), "{}", trained.out);
        let evaluations = scene.events(loss, "eval");
        let of = |event: &Value, name: &str| event[name].as_f64().expect("a number");
        let (first, last) = (&evaluations[0], evaluations.last().expect("an evaluation"));
        assert!(of(last, "loss") < of(first, "loss"), "{first} {last}");
        let evaluated = scene
            .run(&["eval", "--model", loss, "--data", "scored.jsonl", "--samples", "16", "--json"])
            .expect_code(0)
            .json();
        // The best by rank may be an earlier one.
        let is_one = |event: &Value| {
            ["loss", "pearson", "spearman"].iter().all(|name| (of(event, name) - of(&evaluated, name)).abs() < 1e-5)
        };
        assert!(evaluations.iter().any(is_one), "{evaluated}");
        assert!(scene.events(loss, "step").iter().all(|step| step["in_batch_accuracy"].is_null()));
    }
    let cosine = ["--set", "embedding.loss=cosine"];
    let refused = |more: &[&str], code: i32, words: &[&str]| {
        train(&scene, "scored.jsonl", &[&cosine, more].concat()).expect_code(code).expect_words(words);
    };
    refused(&[], 2, &["embedding.largest_score", "beside a score of"]);
    refused(&["--set", "data.label_column=sentence2"], 4, &["`sentence2`: expected a number"]);
    refused(&["--set", "checkpoint.best_metric=recall@1"], 2, &["with scores: pearson, spearman"]);
    train(&scene, "pairs.jsonl", &cosine).expect_code(4).expect_words(&["score"]);
}

#[test]
fn micro_batches_do_not_change_a_loss_of_scores() {
    let scene = scene();
    write_scored(&scene);
    let run = |micro_batch: &str, output: &str| {
        let micro_batch = format!("memory.micro_batch_samples={micro_batch}");
        let settings = ["--set", "embedding.loss=cosent", "--set", &micro_batch, "--output", output];
        train(&scene, "scored.jsonl", &[&settings[..], &["--max-steps", "1"]].concat()).expect_code(0);
        figures(&scene, output, &["loss", "grad_norm"]).remove(0)
    };
    for (one, other) in run("16", "whole").iter().zip(run("3", "three")) {
        assert!((one - other).abs() < 1e-4 * other.abs(), "{one}, {other}");
    }
}

#[test]
fn checkpoints_are_ranked_by_what_vectors_find() {
    let scene = scene();
    let settings = ["--set", "checkpoint.best_metric=ndcg@10", "--set", "checkpoint.keep_best=1"];
    let often = ["--set", "train.eval_every_steps=2", "--set", "checkpoint.every_steps=2"];
    train(&scene, "pairs.jsonl", &[settings, often].concat()).expect_code(0).expect_words(&["NDCG@10"]);
    let report = String::from_utf8(scene.read("run/report.html")).expect("UTF-8");
    assert!(report.contains("Recall") && report.contains("NDCG@10"));
    let words = ["is a score of vectors or of rankings", "checkpoint.best_metric=loss"];
    let texts = ["--set", "data.train=[\"pairs.jsonl\"]", "--set", "data.prompt_column=query"];
    let texts = [&texts[..], &["--set", "data.response_column=positive", "--output", "texts"], &settings].concat();
    scene.run(&short(&texts)).expect_code(2).expect_words(&words);
}

/// A run of vectors, and BEIR's files: a corpus in which two texts are equal, queries, and what was judged.
fn searched() -> Scene {
    let scene = scene();
    train(&scene, "pairs.jsonl", &["--max-steps", "2"]).expect_code(0);
    let texts = |at: usize| ROWS[at % 4][1 + at / 4 % 2].to_owned() + if at < 8 { "" } else { " again" };
    let text = |at: usize| json!({"_id": format!("d{at}"), "title": if at.is_multiple_of(3) { "" } else { "a" }, "text": texts(at)});
    let equal = json!({"_id": "d99", "title": "", "text": texts(0)});
    scene.write("corpus.jsonl", (0..16).map(&text).chain([equal]).map(|row| format!("{row}\n")).collect::<String>());
    let query = |at: usize| format!("{}\n", json!({"_id": format!("q{at}"), "text": ROWS[at][0]}));
    scene.write("queries.jsonl", (0..4).map(query).collect::<String>());
    let judged = "query-id\tcorpus-id\tscore\nq0\td0\t2\nq0\td8\t1\nq0\td3\t0\nq1\td1\t1\nq1\td5\t1\nq2\td11\t1\n";
    scene.write("qrels.tsv", judged);
    scene
}

const SEARCH: [&str; 7] = ["--model", "run", "--corpus", "corpus.jsonl", "--queries", "queries.jsonl", "--qrels"];

#[test]
fn searches_of_a_corpus_have_the_scores_of_the_vectors_of_embed() {
    let scene = searched();
    let found = scene.run(&[&["eval"], &SEARCH[..], &["qrels.tsv", "--json"]].concat()).expect_code(0).json();
    assert_eq!((found["queries"].as_u64(), found["texts"].as_u64()), (Some(3), Some(17)));
    let vectors = |input: &str, texts: &[String]| -> Vec<Vec<f64>> {
        scene.write(input, texts.iter().map(|text| text.trim().to_owned() + "\n").collect::<String>());
        let output = format!("{input}.jsonl");
        let most = ["--max-source-tokens", "32", "--normalize"];
        scene
            .run(&[&["embed", "--model", "run", "--input", input, "--output", &output][..], &most].concat())
            .expect_code(0);
        let lines = String::from_utf8(scene.read(&output)).expect("UTF-8");
        let vector = |line: &str| -> Vec<f64> {
            let line: Value = serde_json::from_str(line).expect("JSON");
            line["embedding"].as_array().expect("a list").iter().flat_map(Value::as_f64).collect()
        };
        lines.lines().map(vector).collect()
    };
    let rows = |name: &str| -> Vec<Value> {
        let text = String::from_utf8(scene.read(name)).expect("UTF-8");
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    let text = |row: &Value| {
        format!("{} {}", row["title"].as_str().unwrap_or_default(), row["text"].as_str().expect("a text"))
    };
    let (corpus, queries) = (rows("corpus.jsonl"), rows("queries.jsonl"));
    let of_corpus = vectors("c.txt", &corpus.iter().map(text).collect::<Vec<_>>());
    let of_queries = vectors("q.txt", &queries.iter().map(text).collect::<Vec<_>>());
    let judged: [&[(&str, f64)]; 3] =
        [&[("d0", 2.0), ("d8", 1.0), ("d3", 0.0)], &[("d1", 1.0), ("d5", 1.0)], &[("d11", 1.0)]];
    let mut expected = [0.0; 4]; // recall@1, recall@5, MRR@10, NDCG@10
    for (query, judged) in of_queries.iter().zip(judged) {
        let score = |vector: &Vec<f64>| vector.iter().zip(query).map(|(one, other)| one * other).sum::<f64>();
        #[expect(clippy::cast_possible_truncation, reason = "scores are f32")]
        let mut near: Vec<(f32, &str)> = of_corpus
            .iter()
            .zip(&corpus)
            // Rounded, so that equal texts have equal scores.
            .map(|(vector, row)| ((score(vector) * 1e5).round() as f32, row["_id"].as_str().expect("a name")))
            .collect();
        // Of equal scores, the larger name comes first.
        near.sort_by(|one, other| other.0.total_cmp(&one.0).then(other.1.cmp(one.1)));
        let gain = |name: &str| judged.iter().find(|(of, _)| *of == name).map_or(0.0, |(_, gain)| *gain);
        let gains: Vec<f64> = near.iter().map(|(_, name)| gain(name)).collect();
        let relevant = |gains: &[f64]| gains.iter().filter(|gain| **gain > 0.0).count() as f64;
        let all: Vec<f64> = judged.iter().map(|(_, gain)| *gain).collect();
        let discounted = |gains: &[f64]| -> f64 {
            gains.iter().take(10).enumerate().map(|(place, gain)| gain / (place as f64 + 2.0).log2()).sum()
        };
        let first = gains.iter().take(10).position(|gain| *gain > 0.0);
        let of_query = [
            relevant(&gains[..1]) / relevant(&all),
            relevant(&gains[..5]) / relevant(&all),
            first.map_or(0.0, |place| 1.0 / (place as f64 + 1.0)),
            discounted(&gains) / discounted(&all),
        ];
        expected.iter_mut().zip(of_query).for_each(|(mean, score)| *mean += score / 3.0);
    }
    for (name, expected) in ["recall@1", "recall@5", "mrr@10", "ndcg@10"].into_iter().zip(expected) {
        assert!((found[name].as_f64().expect("a score") - expected).abs() < 1e-12, "{name}: {found}, {expected}");
    }
    let peaks = ["peak_rss_bytes", "predicted_peak_bytes"].map(|name| found[name].as_u64().expect("bytes"));
    assert!(peaks[0] <= peaks[1], "{peaks:?}");
    let prefixed = ["qrels.tsv", "--query-prefix", "query: ", "--passage-prefix", "passage: ", "--batch-samples", "1"];
    let prefixed = scene.run(&[&["eval"], &SEARCH[..], &prefixed].concat()).expect_code(0);
    assert!(prefixed.out.contains("ndcg@10") && prefixed.out.contains("3 queries, 17 texts"), "{}", prefixed.out);
}

#[test]
fn files_of_a_search_that_do_not_fit_together_are_named() {
    let scene = searched();
    let search = |qrels: &str, more: &[&str]| scene.run(&[&["eval"], &SEARCH[..], &[qrels], more].concat());
    scene.write("missing.tsv", "q0 0 d77 1\nq9 0 d1 1\nq1 0 d1 1\n");
    let found = search("missing.tsv", &[]).expect_code(0);
    found.expect_words(&["such as `q9`", "left out", "such as `d77`", "2 queries"]);
    scene.write("none.tsv", "q8\td0\t1\n");
    search("none.tsv", &[]).expect_code(4).expect_words(&["no query has a judgement"]);
    scene.write("bad.tsv", "q0\td0\t1\nq0 d1\n");
    search("bad.tsv", &[]).expect_code(4).expect_words(&["bad.tsv: line 2", "got `q0 d1`", "q1<TAB>d7<TAB>1"]);
    scene.write("empty.tsv", "query-id\tcorpus-id\tscore\n");
    search("empty.tsv", &[]).expect_code(4).expect_words(&["no text is judged"]);
    search("nosuch.tsv", &[]).expect_words(&["nosuch.tsv"]);
    search("qrels.tsv", &["--set", "train.dropout=0"])
        .expect_code(2)
        .expect_words(&["`--set train.dropout` has no effect"]);
    search("qrels.tsv", &["--data", "pairs.jsonl"]).expect_code(2).expect_words(&["--data", "--corpus"]);
    search("qrels.tsv", &["--num-beams", "2"]).expect_code(2).expect_words(&["--corpus"]);
    let other =
        ["eval", "--model", "run", "--corpus", "pairs.jsonl", "--queries", "queries.jsonl", "--qrels", "qrels.tsv"];
    scene
        .run(&other)
        .expect_code(4)
        .expect_words(&["pairs.jsonl: expected the columns `_id` and `text`, got query, positive"]);
    let corpus = String::from_utf8(scene.read("corpus.jsonl")).expect("UTF-8");
    scene.write("corpus.jsonl", corpus.clone() + corpus.lines().next().expect("a row") + "\n");
    search("qrels.tsv", &[]).expect_code(4).expect_words(&["two rows have the `_id` `d0`"]);
}
