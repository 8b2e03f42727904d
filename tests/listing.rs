//! Help, version and listings.

use crate::run::Scene;

#[test]
fn help_shows_examples_files_and_exit_codes() {
    let ran = Scene::new().run(&["--help"]).expect_code(0);
    for expected in
        ["Examples:", "--keep-training", "--memory-budget", "OUTPUT/metrics.jsonl", "75 interrupted (resumable)"]
    {
        assert!(ran.out.contains(expected), "{expected} is not in\n{}", ran.out);
    }
}

#[test]
fn every_key_is_listed_with_its_default_and_meaning() {
    let ran = Scene::new().run(&["keys"]).expect_code(0);
    for expected in ["[optimizer]", "grad_clip_norm = 1.0", "dataset_residency = \"auto\"", "bad_rows = "] {
        assert!(ran.out.contains(expected), "{expected} is not in\n{}", ran.out);
    }
}

#[test]
fn completions_come_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let ran = Scene::new().run(&["completions", shell]).expect_code(0);
        assert!(ran.out.contains("train_low_mem") && ran.out.contains("keep-training"), "{shell}");
    }
}
