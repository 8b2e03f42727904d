//! `--lora`: trains an adapter beside a frozen model, saves it as PEFT does, resumes it, generates with it and merges it.

use crate::files::tensors;
use crate::run::{ENDLESS, OF_A_STEP, Scene, short};

const FROM: [&str; 3] = ["--lora", "--set", "model.init_from=run/model"];
const ADAPTER: &str = "adapter/adapter_model.safetensors";

/// A model, and the flags of a short run that trains an adapter beside it.
fn scene() -> Scene {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    scene
}

fn strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

fn tune(output: &str, more: &[&str]) -> Vec<String> {
    short(&[&FROM[..], &["--output", output], more].concat())
}

#[test]
fn an_adapter_is_trained_beside_a_model_that_stays_as_it_is_and_no_weight_of_it_is_saved() {
    let scene = scene();
    let before = scene.read("run/model/model.safetensors");
    let words = ["LoRA, rank 16, alpha 32", "AdamW", "adapter: saved to tuned/adapter", "--adapter tuned/adapter"];
    scene.run(&tune("tuned", &[])).expect_code(0).expect_words(&words);
    assert_eq!(scene.read("run/model/model.safetensors"), before);
    for directory in ["tuned/adapter", "tuned/checkpoints/step-00000006"] {
        let saved = tensors(&scene.read(&format!("{directory}/adapter_model.safetensors")));
        assert_eq!(
            saved.len(),
            2 * 48,
            "two for each of 6 and 10 linear layers of three encoder and three decoder blocks"
        );
        assert!(saved.keys().all(|name| name.starts_with("base_model.model.") && name.contains(".lora_")));
        assert!(!scene.path(&format!("{directory}/model.safetensors")).exists());
    }
    scene.expect_predicted_peaks("tuned");
}

#[test]
fn a_run_with_an_adapter_that_was_killed_goes_on_to_the_same_bits() {
    let scene = scene();
    let settings = ["--set", "lora.dora=true", "--set", "lora.dropout=0.1", "--set", "lora.modules_to_save=wo"];
    scene.run(&tune("whole", &settings)).expect_code(0);
    let mut running = scene.start(&tune("killed", &settings));
    assert!(running.wait_for("step 4/6"));
    running.kill();
    let again = |more: &[&str]| tune("killed", &[&settings[..], &["--keep-training"], more].concat());
    scene.run(&again(&["--set", "lora.alpha=8"])).expect_code(2).expect_words(&["lora", "--allow-changed model"]);
    scene.run(&again(&[])).expect_code(0);
    assert_eq!(scene.read(&format!("killed/{ADAPTER}")), scene.read(&format!("whole/{ADAPTER}")));
}

#[test]
fn an_adapter_whose_model_was_changed_since_is_used_with_a_warning() {
    let scene = scene();
    scene.run(&tune("tuned", &[])).expect_code(0);
    scene.run(&tune("coded", &["--set", "model.base_precision=int8"])).expect_code(0);
    let words = |run: &'static str| vec!["generate", "--model", run, "--prompt", "after 75", "--max-new-tokens", "2"];
    let of_adapter = ["--model", "run", "--adapter", "tuned"];
    let uses = [
        words("tuned"),
        words("tuned/checkpoints/step-00000006"),
        [&["generate", "--prompt", "a", "--max-new-tokens", "2"][..], &of_adapter].concat(),
        ["merge", "--adapter", "tuned", "--force", "--output", "merged"].to_vec(),
        [&["export", "--format", "gguf", "--gguf-names", "hf", "--force", "--output", "x.gguf"][..], &of_adapter]
            .concat(),
    ];
    let warned = |words: &[&str]| scene.run(words).expect_code(0).err.contains("has changed since");
    // A copy has other times and the same weights.
    let weights = scene.path("run/model/model.safetensors");
    let mut bytes = std::fs::read(&weights).expect("weights");
    std::fs::write(&weights, &bytes).expect("a file");
    assert!(uses.iter().all(|words| !warned(words)));
    *bytes.last_mut().expect("weights") ^= 1;
    std::fs::write(&weights, bytes).expect("a file");
    assert!(uses.iter().all(|words| warned(words)));
    // The run's own copy is what this adapter was trained beside.
    assert!(!warned(&words("coded")));
    let copy = scene.path("coded/base-int8/model.safetensors");
    let mut bytes = std::fs::read(&copy).expect("weights");
    *bytes.last_mut().expect("weights") ^= 1;
    std::fs::write(&copy, bytes).expect("a file");
    assert!(warned(&words("coded")));
}

#[test]
fn weights_that_stay_in_the_model_s_files_train_the_same_adapter() {
    let scene = scene();
    let layers = ["--set", "memory.accumulation=layer-major", "--set", "memory.micro_batch_samples=2"];
    scene.run(&tune("memory", &[&layers[..], &["--set", "memory.weight_offload=none"]].concat())).expect_code(0);
    // Without this pin, the planner chooses the number of blocks in memory, by measured speeds.
    let none = ["--set", "memory.weight_offload=disk", "--set", "memory.weight_blocks_in_memory=0"];
    scene.run(&tune("files", &[&layers[..], &none].concat())).expect_code(0);
    let losses = |run: &str| {
        let losses = scene.events(run, "step").into_iter().map(|step| step["loss"].as_f64().expect("a loss"));
        losses.collect::<Vec<_>>()
    };
    for (one, other) in losses("memory").into_iter().zip(losses("files")) {
        assert!((one - other).abs() < 1e-4, "{one} {other}");
    }

    // Two of six blocks stay in memory, so a third less is read.
    let some = ["--set", "memory.weight_offload=disk", "--set", "memory.weight_blocks_in_memory=2"];
    let words = ["weights of 2 blocks in memory", "Disk reads", "of weights a step"];
    scene.run(&tune("some", &[&layers[..], &some].concat())).expect_code(0).expect_words(&words);
    assert_eq!(losses("some"), losses("files"));
    let read = |run: &str| scene.events(run, "plan")[0]["step_read_bytes"].as_u64().expect("bytes");
    assert!(read("memory") == 0 && read("some") > 0 && read("some") < read("files"));

    // A matrix at a time: each micro-batch reads the blocks again, and every bit is the same.
    let matrix = [&layers[..], &none, &["--set", "memory.weights_at_a_time=matrix"]].concat();
    let words = ["matrix at a time"];
    scene.run(&tune("matrix", &matrix)).expect_code(0).expect_words(&words);
    assert_eq!(losses("matrix"), losses("files"));
    assert!(read("matrix") > read("files"));
    for run in ["files", "some", "matrix"] {
        let peaks = ["peak_rss_bytes", "predicted_peak_bytes"].map(|name| scene.events(run, "step")[5][name].as_u64());
        assert!(peaks[0] <= peaks[1].map(|predicted| predicted + (4 << 20)), "{run}: {peaks:?}");
        assert!(scene.events(run, "step").iter().all(|step| step["file_wait_ms"].as_f64() > Some(0.0)));
    }
}

#[test]
fn an_adapter_answers_as_the_model_does_that_it_is_merged_into() {
    let scene = scene();
    scene.run(&tune("tuned", &["--set", "lora.rank=4"])).expect_code(0);
    scene
        .run(&["merge", "--model", "run/model", "--adapter", "tuned", "--output", "merged"].map(str::to_owned))
        .expect_code(0);
    let evaluate = |model: &[&str]| {
        let rows = ["--data", "run/sample-data/sample-validation.parquet", "--samples", "16", "--json"];
        let arguments: Vec<String> =
            [&["eval", "--model"], model, &rows].concat().into_iter().map(str::to_owned).collect();
        let ended = scene.run(&arguments).expect_code(0);
        let figures: serde_json::Value = ended.json();
        (figures["loss"].as_f64().expect("a loss"), figures["exact_match"].clone())
    };
    let (merged, named, found) =
        (evaluate(&["merged"]), evaluate(&["run/model", "--adapter", "tuned/adapter"]), evaluate(&["tuned"]));
    assert!((merged.0 - named.0).abs() < 1e-5, "{merged:?} {named:?}");
    assert_eq!((merged.1, &named), (named.1.clone(), &found));
    assert!((evaluate(&["run/model"]).0 - named.0).abs() > 1e-3, "the adapter changes something");
}

/// The prefix is not in PEFT's settings, so it lies in the header of the tensors' file.
#[test]
fn an_adapter_keeps_the_text_before_its_sources_and_the_side_that_is_cut() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "data.source_prefix=base: "])).expect_code(0);
    let side = ["--set", "data.truncation_side=left", "--set", "data.max_source_tokens=12"];
    scene.run(&tune("own", &[&["--set", "data.source_prefix=own: "][..], &side].concat())).expect_code(0);
    scene.run(&tune("none", &["--set", "data.source_prefix="])).expect_code(0);
    scene.run(&tune("kept", &[])).expect_code(0);
    scene
        .run(&short(&["--set", "model.init_from=run/model", "--set", "lora.init_from=own/adapter", "--output", "on"]))
        .expect_code(0);
    let last = |run: &str| scene.events(run, "eval").last().expect("an evaluation").clone();
    for (name, prefix) in [("own", "own: "), ("none", ""), ("kept", "base: "), ("on", "own: ")] {
        let rows = ["--data", "run/sample-data/sample-validation.parquet", "--json"];
        let (expected, samples) = (last(name)["loss"].as_f64().expect("a loss"), last(name)["samples"].to_string());
        let arguments =
            [&["eval", "--model", "run/model", "--adapter", name, "--samples", &samples][..], &rows].concat();
        let figures = scene.run(&strings(&arguments)).expect_code(0).json();
        assert_eq!(figures["reading"]["source_prefix"], prefix, "{name}");
        assert!((figures["loss"].as_f64().expect("a loss") - expected).abs() < 1e-6, "{name}: {figures}");
        let merged = format!("{name}-merged");
        let arguments = ["merge", "--model", "run/model", "--adapter", name, "--output", &merged];
        scene.run(&arguments.map(str::to_owned)).expect_code(0);
        let config: serde_json::Value = serde_json::from_slice(&scene.read(&format!("{merged}/config.json"))).unwrap();
        assert_eq!(config["prefix"].as_str().unwrap_or_default(), prefix, "{name}");
        let answer = |model: &[&str]| {
            let prompt = ["--prompt", "reverse: 3 1 2", "--max-new-tokens", "5"];
            let arguments = [&["generate"][..], model, &prompt].concat();
            scene.run(&strings(&arguments)).expect_code(0).out
        };
        assert_eq!(answer(&["--model", "run/model", "--adapter", name]), answer(&["--model", &merged]), "{name}");
    }
    let config = scene.read("own/adapter/tokenizer_config.json");
    let config: serde_json::Value = serde_json::from_slice(&config).expect("JSON");
    assert_eq!(config["truncation_side"], "left");
}

#[test]
fn an_adapter_goes_on_from_another_and_contradictions_are_named() {
    let scene = scene();
    scene.run(&tune("first", &[])).expect_code(0);
    let model = ["--set", "model.init_from=run/model", "--output", "second"];
    let on = |more: &[&str]| short(&[&model[..], &["--set", "lora.init_from=first/adapter"], more].concat());
    scene.run(&on(&["--set", "lora.dora=true"])).expect_code(2).expect_words(&["`lora.dora`", "hint:"]);
    scene.run(&on(&[])).expect_code(0);
    let first = |run: &str| scene.events(run, "step")[0]["loss"].as_f64().expect("a loss");
    assert!(first("second") < first("first"));
    let targets = ["--set", "lora.targets=query", "--output", "third"];
    scene.run(&short(&[&FROM[..], &targets].concat())).expect_code(4).expect_words(&["query", "linear layers"]);
    scene.run(&short(&["--lora", "--output", "fourth"])).expect_code(2).expect_words(&["`model.init_from`"]);
}

/// Changes the last value of a file of weights a little, and leaves its length and the time of its last write.
fn change_unnoticed(scene: &Scene, name: &str) {
    let path = scene.path(name);
    let modified = std::fs::metadata(&path).expect("a file").modified().expect("a time");
    let mut bytes = scene.read(name);
    let last = bytes.len() - 4;
    bytes[last] ^= 1;
    std::fs::write(&path, bytes).expect("a file");
    std::fs::File::options().write(true).open(&path).expect("a file").set_modified(modified).expect("a time");
}

#[test]
fn an_adapter_goes_on_beside_the_weights_that_it_was_trained_with_and_beside_no_others() {
    let scene = scene();
    scene.run(&tune("tuned", &["--max-steps", "2"])).expect_code(0);
    let on = |more: &[&str]| tune("tuned", &[&["--keep-training"], more].concat());
    // The same bytes elsewhere.
    std::fs::create_dir(scene.path("moved")).expect("a directory");
    for name in scene.names("run/model") {
        scene.write(&format!("moved/{name}"), scene.read(&format!("run/model/{name}")));
    }
    scene.run(&on(&["--max-steps", "3", "--set", "model.init_from=moved"])).expect_code(0);
    change_unnoticed(&scene, "moved/model.safetensors");
    let changed = ["--max-steps", "4", "--set", "model.init_from=moved"];
    let words = ["model.init_from: model.safetensors was ", "hint: to resume anyway, add `--allow-changed base`"];
    scene.run(&on(&changed)).expect_code(2).expect_words(&words);
    scene.run(&on(&["--max-steps", "4"])).expect_code(0);
    scene.run(&on(&[&changed[..], &["--max-steps", "5", "--allow-changed", "base"]].concat())).expect_code(0);
}

#[test]
fn a_quantised_base_that_was_changed_is_refused_and_one_that_was_removed_is_made_again() {
    let scene = scene();
    let nf4 = ["--set", "model.base_precision=nf4"];
    scene.run(&tune("tuned", &[&nf4[..], &["--max-steps", "2"]].concat())).expect_code(0);
    let on = |steps: &str| tune("tuned", &[&nf4[..], &["--keep-training", "--max-steps", steps]].concat());
    let copy = scene.path("tuned/base-nf4");
    std::fs::remove_dir_all(&copy).expect("the copy");
    scene.run(&on("3")).expect_code(0);
    change_unnoticed(&scene, "tuned/base-nf4/model.safetensors");
    let words = ["OUTPUT/base-nf4: model.safetensors was ", "hint: or remove that directory", "--allow-changed base"];
    scene.run(&on("4")).expect_code(2).expect_words(&words);
    std::fs::remove_dir_all(&copy).expect("the copy");
    scene.run(&on("4")).expect_code(0);
}

#[test]
fn weights_that_are_changed_while_an_adapter_is_trained_beside_them_end_the_run() {
    let scene = scene();
    let layers = ["--set", "memory.accumulation=layer-major", "--set", "memory.weight_offload=disk"];
    let in_files = [&layers[..], &["--set", "memory.weight_blocks_in_memory=0"], &ENDLESS].concat();
    let mut running = scene.start(&tune("tuned", &in_files));
    assert!(running.wait_for(OF_A_STEP));
    let weights = scene.path("run/model/model.safetensors");
    let file = std::fs::File::options().write(true).open(weights).expect("the weights");
    file.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(9)).expect("a time");
    running.end().expect_code(4).expect_words(&["model.safetensors: the file was changed or replaced", "hint: "]);
}

#[test]
fn an_adapter_of_a_run_s_model_names_the_directory_of_that_model() {
    let scene = scene();
    scene.run(&short(&["--lora", "--set", "model.init_from=run", "--output", "tuned"])).expect_code(0);
    let config: serde_json::Value =
        serde_json::from_slice(&scene.read("tuned/adapter/adapter_config.json")).expect("JSON");
    let named = std::path::PathBuf::from(config["base_model_name_or_path"].as_str().expect("a name"));
    assert_eq!(named, scene.path("run/model").canonicalize().expect("the model"));
    // PEFT 0.21's class of the task does not load beside transformers 5.24.
    assert_eq!(config["task_type"], serde_json::Value::Null);
    assert_eq!(config["auto_mapping"]["base_model_class"], "T5ForConditionalGeneration");
}
