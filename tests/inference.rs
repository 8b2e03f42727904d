//! `eval` and `generate` in a budget: weights in the model's files or in memory, with the same results.

use serde_json::Value;

use crate::run::{Ran, Scene, repository, short};

/// A scene with a run of a model whose weights exceed the process's own memory.
fn trained(more: &[&str]) -> Scene {
    let scene = Scene::new();
    let shape = "model.overrides={ d_model = 128, d_kv = 32, d_ff = 8192, num_heads = 4, num_layers = 2 }";
    let wide = ["--set", shape, "--set", "train.max_steps=2", "--set", "train.eval_samples=1"];
    scene.run(&short(&[&wide[..], more].concat())).expect_code(0);
    scene
}

fn eval(scene: &Scene, more: &[&str]) -> Ran {
    let rows = repository().join("data/sample-validation.parquet").display().to_string();
    let usual = ["eval", "--model", "run/model", "--data", &rows, "--samples", "12", "--generate-samples", "4"];
    let lengths = ["--set", "train.eval_max_new_tokens=6", "--batch-samples", "1", "--json"];
    scene.run(&[&usual[..], &lengths, more].concat())
}

fn generate(scene: &Scene, more: &[&str]) -> Ran {
    let usual = ["generate", "--model", "run/model", "--prompt", "after 75", "--prompt", "before 12"];
    scene.run(
        &[&usual[..], &["--max-new-tokens", "6", "--max-source-tokens", "32", "--batch-samples", "1"], more].concat(),
    )
}

/// The budget that a refusal's hint names.
fn smallest(refused: &Ran) -> String {
    let hint = refused.err.lines().find(|line| line.starts_with("hint: ")).expect("a hint");
    hint.split_whitespace().find(|word| word.ends_with("MiB")).expect("a size").to_owned()
}

/// Results without the fields that describe how they were computed.
fn figures(mut evaluated: Value) -> Value {
    let fields = evaluated.as_object_mut().expect("an object");
    for key in ["weights", "copied_weight_bytes", "predicted_peak_bytes", "peak_rss_bytes"] {
        assert!(fields.remove(key).is_some(), "{key}");
    }
    evaluated
}

/// Whether the system can map files.
const MAPS: bool = cfg!(all(target_os = "linux", target_pointer_width = "64"));

#[test]
fn weights_that_stay_in_the_model_s_files_give_the_same_figures_and_answers() {
    let bf16 = ["--set", "train.precision=bf16", "--set", "train.master_weights=stochastic-rounding"];
    for stored in [&[][..], &bf16] {
        let scene = trained(stored);
        for precision in ["f32", "bf16"] {
            let at = |place: &str| {
                let pin = format!("memory.weight_offload={place}");
                let chunk = ["--set", "memory.loss_chunk_rows=64", "--set", &pin, "--precision", precision];
                eval(&scene, &chunk).expect_code(0).json()
            };
            let (memory, disk) = (at("none"), at("disk"));
            assert_eq!((&memory["weights"], &disk["weights"]), (&"memory".into(), &"disk".into()));
            assert_eq!(disk["copied_weight_bytes"], 0, "they are used as they are stored");
            let peak = |evaluated: &Value| evaluated["peak_rss_bytes"].as_u64().expect("bytes");
            assert!(!MAPS || peak(&disk) + (8 << 20) < peak(&memory), "{} of {}", peak(&disk), peak(&memory));
            assert_eq!(figures(memory), figures(disk), "{precision}");
            let budget = smallest(&generate(&scene, &["--memory-budget", "10MiB", "--precision", precision]));
            let small = generate(&scene, &["--memory-budget", &budget, "--precision", precision]).expect_code(0);
            let ample = generate(&scene, &["--memory-budget", "2GiB", "--precision", precision]).expect_code(0);
            assert_eq!(small.out, ample.out, "{precision} in {budget}");
        }
    }
}

#[test]
fn the_smallest_budget_that_a_refusal_names_holds_and_is_less_than_the_weights_would_take() {
    let scene = trained(&[]);
    let budget = smallest(&eval(&scene, &["--memory-budget", "10MiB"]).expect_code(3));
    let evaluated = eval(&scene, &["--memory-budget", &budget]).expect_code(0).json();
    let bytes = budget.trim_end_matches("MiB").parse::<u64>().expect("a number") << 20;
    let peak = evaluated["peak_rss_bytes"].as_u64().expect("bytes");
    let predicted = evaluated["predicted_peak_bytes"].as_u64().expect("bytes");
    assert!(peak <= bytes && predicted <= bytes, "{peak} held, {predicted} predicted, in {budget}");
    assert_eq!(evaluated["weights"], "disk");
    let whole = eval(&scene, &["--memory-budget", "10MiB", "--set", "memory.weight_offload=none"]).expect_code(3);
    let whole = smallest(&whole).trim_end_matches("MiB").parse::<u64>().expect("a number") << 20;
    assert!(bytes + (16 << 20) < whole, "{bytes} with weights in files, {whole} with all in memory");
}

#[test]
fn weights_in_another_precision_than_they_are_stored_in_are_copied_to_a_file_that_leaves_nothing() {
    let scene = trained(&[]);
    let asked = ["--set", "train.precision=bf16", "--set", "train.master_weights=nearest-rounding"];
    let chunk = ["--set", "memory.loss_chunk_rows=64"];
    let at = |place: &str, more: &[&str]| {
        let pin = format!("memory.weight_offload={place}");
        eval(&scene, &[&asked[..], &chunk, &["--set", &pin], more].concat())
    };
    std::fs::create_dir(scene.path("files")).expect("a directory");
    let disk = at("disk", &["--offload-dir", "files"]).expect_code(0);
    assert!(!MAPS || disk.err.contains("of weights are copied to a file in files"), "{}", disk.err);
    assert!(disk.json()["copied_weight_bytes"].as_u64() > Some(0));
    assert!(scene.names("files").is_empty(), "{:?}", scene.names("files"));
    assert_eq!(figures(disk.json()), figures(at("none", &[]).expect_code(0).json()));
    at("disk", &["--offload-dir", "absent"]).expect_code(2).expect_words(&["absent", "--offload-dir"]);
}

#[test]
fn a_dry_run_prints_the_bill_and_computes_nothing() {
    let scene = trained(&[]);
    let words = ["Memory plan", "parameters", "safety margin", "predicted peak"];
    for bill in [eval(&scene, &["--dry-run"]), generate(&scene, &["--dry-run"])] {
        let bill = bill.expect_code(0).expect_words(&words);
        assert!(!bill.out.contains("training"), "{}", bill.out);
    }
}

/// Replaces the model's file of weights by one file a tensor, with an index. Returns the number of files.
#[cfg(target_os = "linux")]
fn write_shards(model: &std::path::Path) -> usize {
    let whole = std::fs::read(model.join("model.safetensors")).expect("weights");
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().expect("eight bytes")) as usize;
    let mut tensors: serde_json::Map<String, Value> = serde_json::from_slice(&whole[8..header]).expect("a header");
    tensors.remove("__metadata__");
    let mut map = serde_json::Map::new();
    for (number, (name, mut tensor)) in tensors.into_iter().enumerate() {
        let [start, end] = [0, 1].map(|at| tensor["data_offsets"][at].as_u64().expect("an offset") as usize);
        tensor["data_offsets"] = serde_json::json!([0, end - start]);
        let text = serde_json::json!({ &name: tensor }).to_string();
        let text = format!("{text:width$}", width = text.len().next_multiple_of(8));
        let bytes =
            [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &whole[header + start..header + end]].concat();
        let file = format!("model-{number:05}.safetensors");
        std::fs::write(model.join(&file), bytes).expect("a shard");
        map.insert(name, file.into());
    }
    let files = map.len();
    let index = serde_json::json!({ "weight_map": map });
    std::fs::write(model.join("model.safetensors.index.json"), index.to_string()).expect("an index");
    std::fs::remove_file(model.join("model.safetensors")).expect("the whole file");
    files
}

#[test]
#[cfg(target_os = "linux")]
fn a_model_in_more_files_than_there_are_slots_answers_the_same_and_names_a_file_that_is_cut() {
    let scene = trained(&[]);
    let budget = smallest(&generate(&scene, &["--memory-budget", "10MiB"]));
    let whole = generate(&scene, &["--memory-budget", &budget]).expect_code(0);
    let files = write_shards(&scene.path("run/model"));
    assert!(files > 32, "{files} files, and slots for 16");
    let budget = smallest(&generate(&scene, &["--memory-budget", "10MiB"]));
    assert_eq!(generate(&scene, &["--memory-budget", &budget]).expect_code(0).out, whole.out);
    // The last file but those of tables: each prompt reads it again.
    let index: Value = serde_json::from_slice(&scene.read("run/model/model.safetensors.index.json")).expect("JSON");
    let cut = index["weight_map"]["encoder.block.1.layer.1.DenseReluDense.wo.weight"].as_str();
    let cut = cut.or(index["weight_map"]["encoder.block.1.layer.1.DenseReluDense.wi_0.weight"].as_str());
    let cut = cut.expect("a weight of the encoder").to_owned();
    scene.write("prompts.txt", "after 75\n".repeat(400));
    let words = ["generate", "--model", "run/model", "--input", "prompts.txt", "--max-new-tokens", "6"];
    let more = ["--max-source-tokens", "32", "--batch-samples", "1", "--memory-budget", &budget];
    let mut running = scene.start(&[&words[..], &more].concat());
    assert!(running.wait_for_lines(2));
    running.signal("STOP");
    std::fs::File::options().write(true).open(scene.path("run/model").join(&cut)).unwrap().set_len(0).unwrap();
    running.signal("CONT");
    let ran = running.end();
    assert!(ran.code.is_some_and(|code| code == 1 || code == 4), "{:?} {}", ran.code, ran.err);
    ran.expect_words(&["error: ", &cut]);
}
