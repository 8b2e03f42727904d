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
    refused(&["--set", "checkpoint.best_metric=rouge1"], 2, &["a score of answers", "checkpoint.best_metric=loss"]);
    train(&scene, "pairs.jsonl", &["--max-steps", "1"]).expect_code(0);
    let without = ["--set", "model.init_from=run/model", "--set", "data.train=[\"pairs.jsonl\"]", "--output", "other"];
    scene.run(&short(&without)).expect_code(4).expect_words(&["--set task.name=embedding"]);
}
