//! `merge` and `average` with adapters and models of PEFT and transformers.

use crate::files::tensors;
use crate::run::{Scene, repository, short};

#[test]
fn merge_writes_a_model_beside_its_tokenizer_and_replaces_nothing_unasked() {
    let scene = Scene::new();
    let goldens = repository().join("crates/t5/tests/goldens/adapters");
    let copy = |from: &str, to: &str| {
        std::fs::create_dir_all(scene.path(to)).expect("a directory");
        for entry in std::fs::read_dir(goldens.join(from)).expect("goldens") {
            let path = entry.expect("an entry").path();
            std::fs::copy(&path, scene.path(to).join(path.file_name().expect("a name"))).expect("a copy");
        }
    };
    copy("bases/gated_untied", "bases/gated_untied");
    copy("dora/final", "adapter");
    scene.write("bases/gated_untied/spiece.model", "pieces");
    // The base is the one that adapter_config.json names.
    let merge = |more: &[&str]| scene.run(&[&["merge", "--adapter", "adapter", "-o", "merged"], more].concat());
    let json = merge(&["--json"]).expect_code(0).json();
    assert_eq!((json["linears"].as_u64(), json["replaced"].as_u64()), (Some(25), Some(0)), "{json}");
    let files = ["config.json", "generation_config.json", "model.safetensors", "spiece.model"];
    assert_eq!(scene.names("merged"), files);
    merge(&[]).expect_code(2).expect_words(&["merged already exists", "`--force`"]);
    merge(&["--force", "--dtype", "bf16"]).expect_code(0).expect_words(&["25 linear layers merged", "peak"]);
    let onto = |output: &str| scene.run(&["merge", "--adapter", "adapter", "--force", "--output", output]);
    onto("adapter").expect_code(2).expect_words(&["has the model or the adapter in it"]);
    onto("bases").expect_code(2).expect_words(&["has the model or the adapter in it"]);
    merge(&["--force", "--model", "adapter"]).expect_code(4);
    scene
        .run(&["merge", "--adapter", "bases/gated_untied", "-o", "b"])
        .expect_code(4)
        .expect_words(&["not an adapter"]);
    assert_eq!(scene.names("."), ["adapter", "bases", "merged"], "a refusal leaves nothing");
}

#[test]
fn an_average_is_the_mean_of_checkpoints_to_the_bit_and_refuses_other_models() {
    let scene = Scene::new();
    let kept = ["--set", "checkpoint.every_steps=2", "--set", "checkpoint.keep_last=3"];
    scene.run(&short(&kept)).expect_code(0);
    let checkpoints: Vec<String> =
        scene.names("run/checkpoints").into_iter().map(|name| format!("run/checkpoints/{name}")).collect();
    assert_eq!(checkpoints.len(), 3);
    let average =
        |models: &[&str], more: &[&str]| scene.run(&[&["average"], models, &["--output", "mean"], more].concat());
    let models: Vec<&str> = checkpoints.iter().map(String::as_str).collect();
    average(&models, &[]).expect_code(0).expect_words(&["the mean of 3 models", "peak"]);
    let weights = |of: &str| tensors(&scene.read(&format!("{of}/model.safetensors")));
    let (mean, each) = (weights("mean"), models.iter().map(|model| weights(model)).collect::<Vec<_>>());
    assert!(mean.len() > 30 && mean.keys().eq(each[0].keys()));
    let values =
        |bytes: &[u8]| -> Vec<f32> { bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect() };
    for (name, bytes) in &mean {
        let of_each: Vec<Vec<f32>> = each.iter().map(|weights| values(&weights[name])).collect();
        for (index, got) in values(bytes).into_iter().enumerate() {
            let expected = of_each.iter().map(|values| f64::from(values[index])).sum::<f64>() / 3.0;
            assert_eq!(got, expected as f32, "{name}[{index}]");
        }
    }
    let files = scene.names("mean");
    assert!(["config.json", "tokenizer.json"].iter().all(|name| files.iter().any(|file| file == name)), "{files:?}");
    let loss = |model: &str| {
        let data = repository().join("data/sample-validation.parquet");
        let data = data.to_str().expect("a path");
        let eval = ["eval", "--model", model, "--data", data, "--set", "train.eval_samples=20", "--json"];
        scene.run(&eval).expect_code(0).json()["loss"].as_f64().expect("a loss")
    };
    assert!((loss("mean") - loss(models[1])).abs() < 1.0);
    // Twice the same model is that model.
    average(&[models[0], models[0]], &["--force", "--json"]).expect_code(0);
    assert!(weights("mean") == each[0]);

    let refused = |models: &[&str], code: i32, words: &[&str]| {
        let ran = average(models, &["--force"]).expect_code(code);
        assert!(words.iter().all(|word| ran.err.contains(word)), "{}", ran.err);
    };
    average(&models, &[]).expect_code(2).expect_words(&["mean already exists"]);
    refused(&models[..1], 2, &["expected at least two", "hint: "]);
    let overrides = ["--set", "model.config=tiny", "--set", "model.overrides={ d_ff = 96 }", "--output", "other"];
    scene.run(&short(&overrides)).expect_code(0);
    refused(&[models[0], "other/model"], 4, &["other/model: `", "in the first model", "hint: "]);
    let adapter = repository().join("crates/t5/tests/goldens/adapters/q_v/final");
    refused(&[models[0], adapter.to_str().expect("a path")], 2, &["an adapter", "train_low_mem merge"]);
}
