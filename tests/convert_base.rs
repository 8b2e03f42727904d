//! `convert-base`: models with quantised weights, and their permitted uses.

use crate::run::{Scene, repository};

#[test]
fn convert_base_writes_a_model_that_is_used_in_the_place_of_the_one_it_was_made_from() {
    let scene = Scene::new();
    let goldens = repository().join("crates/t5/tests/goldens/models/v1_1_gated_gelu_untied");
    std::fs::create_dir_all(scene.path("model")).expect("a directory");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(goldens.join(name), scene.path("model").join(name)).expect("a copy");
    }
    scene.write("model/spiece.model", "pieces");
    let convert = |more: &[&str]| {
        scene.run(&[&["convert-base", "--model", "model", "--output", "narrow", "--precision"], more].concat())
    };
    let json = convert(&["nf4", "--json"]).expect_code(0).json();
    assert!(json["quantised"].as_u64() > Some(0) && json["precision"] == "nf4", "{json}");
    let files = ["config.json", "generation_config.json", "model.safetensors", "spiece.model"];
    assert_eq!(scene.names("narrow"), files);
    let size = |name: &str| std::fs::metadata(scene.path(name).join("model.safetensors")).expect("weights").len();
    assert!(size("narrow") < size("model"));
    let before = std::fs::read(scene.path("narrow/model.safetensors")).expect("weights");
    convert(&["nf4"]).expect_code(2).expect_words(&["narrow already exists", "`--force`"]);
    convert(&["int8", "--force"]).expect_code(0).expect_words(&["weights in int8", "peak"]);
    assert_ne!(std::fs::read(scene.path("narrow/model.safetensors")).expect("weights"), before);
    // Writes the same bytes again.
    convert(&["nf4", "--force"]).expect_code(0);
    assert_eq!(std::fs::read(scene.path("narrow/model.safetensors")).expect("weights"), before);
    scene
        .run(&["convert-base", "--model", "narrow", "--precision", "nf4", "-o", "again"])
        .expect_code(4)
        .expect_words(&["quantization_config"]);
    convert(&["fp4"]).expect_code(2);
    assert_eq!(scene.names("."), ["model", "narrow"], "a refusal leaves nothing");
}

#[test]
fn an_adapter_is_trained_beside_a_base_that_is_quantised_once_and_resumes_there() {
    let scene = Scene::new();
    scene.run(&["--max-steps", "2", "--set", "train.batch_size=4", "--output", "first"]).expect_code(0);
    let rows = format!("data.train={}", repository().join("data/sample-train.parquet").display());
    let tune = |more: &[&str]| {
        let run =
            ["--lora", "--set", "model.base_precision=nf4", "--set", "model.init_from=first", "--output", "tuned"];
        let batch = ["--set", "train.batch_size=4", "--set", &rows];
        scene.run(&[&run[..], &batch, more].concat())
    };
    tune(&["--max-steps", "2"]).expect_code(0).expect_words(&["base-nf4", "weights in nf4"]);
    let base = || std::fs::metadata(scene.path("tuned/base-nf4/model.safetensors")).expect("a base");
    let made = base().modified().expect("a time");
    tune(&["--max-steps", "3", "--keep-training"]).expect_code(0);
    assert_eq!(base().modified().expect("a time"), made, "it is made once");
    let other = ["--max-steps", "4", "--keep-training", "--set", "model.base_precision=int8"];
    tune(&other).expect_code(2);
    // The run's adapter is evaluated beside the weights that it was trained with.
    let loss = |model: &[&str]| {
        let of_rows = ["--data", &rows["data.train=".len()..], "--samples", "8", "--generate-samples", "0", "--json"];
        let said = scene.run(&[&["eval"], model, &of_rows].concat()).expect_code(0);
        (said.json()["loss"].as_f64().expect("a loss"), said.err)
    };
    let as_trained = loss(&["--model", "tuned"]).0;
    assert_eq!(as_trained, loss(&["--model", "tuned/base-nf4", "--adapter", "tuned"]).0);
    let unquantised = loss(&["--model", "first", "--adapter", "tuned"]).0;
    assert_ne!(as_trained, unquantised);
    std::fs::rename(scene.path("tuned/base-nf4"), scene.path("away")).expect("a base");
    let (without, words) = loss(&["--model", "tuned"]);
    assert_eq!(without, unquantised);
    assert!(words.contains("base-nf4: no such model") && words.contains("not quantised"), "{words}");
    std::fs::rename(scene.path("away"), scene.path("tuned/base-nf4")).expect("a base");
    // A quantised model is a base even without the key, and is not trained itself.
    let beside = |more: &[&str]| {
        let run = ["--set", "model.init_from=tuned/base-nf4", "--output", "again", "--max-steps", "1"];
        scene.run(&[&run[..], &["--set", &rows], more].concat())
    };
    beside(&[]).expect_code(2).expect_words(&["in nf4 and cannot be trained", "--lora"]);
    beside(&["--lora", "--set", "train.batch_size=4"]).expect_code(0);
}
