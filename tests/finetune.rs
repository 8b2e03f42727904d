//! `--finetune`: frozen parameters keep every bit, and the others learn.

use crate::files::tensors;
use crate::run::{Scene, short};

/// The names of tensors that differ between two runs' models.
fn changed(scene: &Scene, before: &str, after: &str) -> Vec<String> {
    let before = tensors(&scene.read(&format!("{before}/model/model.safetensors")));
    let after = tensors(&scene.read(&format!("{after}/model/model.safetensors")));
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    before.into_iter().filter(|(name, bytes)| after[name] != *bytes).map(|(name, _)| name).collect()
}

#[test]
fn finetuning_leaves_encoder_and_shared_embedding_bit_for_bit() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    let arguments = short(&["--is-finetune=True", "--set", "model.init_from=run/model", "--output", "tuned"]);
    scene.run(&arguments).expect_code(0);
    let changed = changed(&scene, "run", "tuned");
    assert!(!changed.is_empty() && changed.iter().all(|name| name.starts_with("decoder.")), "{changed:?}");
}

#[test]
fn a_finetuning_run_that_was_killed_goes_on_to_the_same_bits() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    let tune = |output| short(&["--finetune", "--set", "model.init_from=run/model", "--output", output]);
    scene.run(&tune("whole")).expect_code(0);
    let mut running = scene.start(&tune("killed"));
    assert!(running.wait_for("step 4/6"));
    running.kill();
    let mut arguments = tune("killed");
    arguments.push("--keep-training".to_string());
    scene.run(&arguments).expect_code(0);
    assert_eq!(scene.read("killed/model/model.safetensors"), scene.read("whole/model/model.safetensors"));
}

#[test]
fn freeze_names_parts_of_its_own() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    let from = ["--set", "model.init_from=run/model", "--output", "tuned"];
    let freeze = ["--finetune", "--set", "train.freeze=decoder.block.0,*.layer_norm.weight"];
    scene.run(&short(&[&from[..], &freeze].concat())).expect_code(0);
    let changed = changed(&scene, "run", "tuned");
    assert!(changed.iter().any(|name| name == "shared.weight"), "{changed:?}");
    assert!(changed.iter().any(|name| name.starts_with("decoder.block.1.")), "{changed:?}");
    assert!(
        !changed.iter().any(|name| name.starts_with("decoder.block.0.") || name.ends_with(".layer_norm.weight")),
        "{changed:?}"
    );
}

#[test]
fn without_finetune_a_first_model_trains_whole() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    scene.run(&short(&["--set", "model.init_from=run/model", "--output", "on"])).expect_code(0);
    let changed = changed(&scene, "run", "on");
    assert!(
        changed.iter().any(|name| name == "shared.weight") && changed.iter().any(|name| name.starts_with("encoder.")),
        "{changed:?}"
    );
}

#[test]
fn what_a_model_directory_says_about_its_tokenizer_is_kept() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    let theirs = r#"{"tokenizer_class": "T5Tokenizer", "extra_ids": 100}"#;
    scene.write("run/model/tokenizer_config.json", theirs);
    let from = ["--finetune", "--set", "model.init_from=run/model", "--set", "data.tokenizer=auto"];
    scene.run(&short(&[&from[..], &["--output", "tuned"]].concat())).expect_code(0);
    for directory in ["tuned/model", "tuned/checkpoints/step-00000006"] {
        assert_eq!(scene.read(&format!("{directory}/tokenizer_config.json")), theirs.as_bytes(), "{directory}");
    }
}

#[test]
fn groups_of_parameters_have_a_line_and_stay_with_the_run() {
    let scene = Scene::new();
    let groups = |list: &str| format!("optimizer.groups={list}");
    let train =
        |list: &str, more: &[&str]| short(&[&["--set", "model.config=tiny", "--set", &groups(list)], more].concat());
    let still = "[{ parameters = [\"encoder\"], learning_rate_factor = 0 }, { parameters = \"norms, biases\", weight_decay = 0 }]";
    let ran = scene.run(&train(still, &[])).expect_code(0);
    ran.expect_words(&["Groups", "encoder, learning rate x 0 (", "biases, weight decay 0"]);
    scene.run(&short(&[
        "--set",
        "model.config=tiny",
        "--epochs",
        "1",
        "--set",
        "optimizer.learning_rate=0",
        "--output",
        "zero",
    ]));
    let moved = changed(&scene, "zero", "run");
    assert!(!moved.is_empty() && !moved.iter().any(|name| name.starts_with("encoder.")), "{moved:?}");
    let again = scene.run(&["--output", "run", "--keep-training", "--set", &groups("[]")]).expect_code(2);
    assert!(again.err.contains("optimizer.groups was ["), "{}", again.err);
    let refused = |list: &str, words: &[&str]| {
        for command in [&[][..], &["plan"]] {
            let arguments =
                [command.iter().map(ToString::to_string).collect(), train(list, &["--output", "x"])].concat();
            let ran = scene.run(&arguments).expect_code(2);
            assert!(words.iter().all(|word| ran.err.contains(word)), "{}", ran.err);
        }
    };
    refused(
        "[{ parameters = [\"*LayrNorm*\"], weight_decay = 0 }]",
        &["`*LayrNorm*` names no parameter", "hint: names with a similar part have layer_norm"],
    );
    refused(
        "[{ parameters = \"*\", weight_decay = 0 }, { parameters = \"norms\", weight_decay = 1 }]",
        &["group 2 (norms): no parameter"],
    );
}
