//! The presets in `configs/`: each can be planned unchanged.

use crate::run::{Scene, repository};

#[test]
fn every_preset_opens_with_its_command_and_plans() {
    let scene = Scene::new();
    let mut seen = 0;
    for entry in std::fs::read_dir(repository().join("configs")).expect("configs") {
        let path = entry.expect("an entry").path();
        let text = std::fs::read_to_string(&path).expect("a config");
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        assert!(
            text.lines().take(8).any(|line| line.starts_with("#   train_low_mem")),
            "{name} does not open with its command"
        );
        assert!(text.contains("# Needs"), "{name} does not say what it needs");
        let path = path.display().to_string();
        let data = [
            "data.train=[]",
            "data.validation=[]",
            "data.tokenizer=auto",
            "model.init_from=none",
            "run.finetune=false",
        ];
        let sets = data.iter().flat_map(|assignment| ["--set", assignment]);
        let model = if text.contains("config = ") { [].iter() } else { ["--set", "model.config=chatlm-0.2b"].iter() };
        let arguments: Vec<&str> = ["plan", "--config", &path].into_iter().chain(sets).chain(model.copied()).collect();
        scene.run(&arguments).expect_code(0).expect_words(&["predicted peak"]);
        seen += 1;
    }
    assert_eq!(seen, 5);
}

#[test]
fn the_named_config_is_the_embedded_default() {
    let scene = Scene::new();
    let root = repository().display().to_string();
    let config = format!("{root}/configs/tiny.toml");
    let named = ["plan", "--json", "--memory-budget", "1GiB", "--config", &config];
    let paths = [
        format!("data.train={root}/data/sample-train.parquet"),
        format!("data.validation={root}/data/sample-validation.parquet"),
        format!("data.tokenizer={root}/data/sample-tokenizer.json"),
    ];
    let sets = paths.iter().flat_map(|assignment| ["--set", assignment]);
    let named: Vec<&str> = named.into_iter().chain(sets).collect();
    let named = scene.run(&named).expect_code(0).json();
    let embedded = scene.run(&["plan", "--json", "--memory-budget", "1GiB"]).expect_code(0).json();
    for key in ["micro_batch_samples", "recompute_blocks", "loss_chunk_rows", "total_steps", "residency"] {
        assert_eq!(named[key], embedded[key], "{key}");
    }
}
