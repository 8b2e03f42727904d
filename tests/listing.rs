//! Help, version and listings.

use std::process::Command;

use crate::run::{Scene, repository};

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
        assert!(!["--machine", "-l machine"].iter().any(|flag| ran.out.contains(flag)), "{shell} offers a hidden flag");
    }
}

#[test]
fn bash_completes_flags_and_the_keys_of_set() {
    let scene = Scene::new();
    scene.write("completions.bash", scene.run(&["completions", "bash"]).expect_code(0).out);
    let completed = |words: &[&str]| {
        // As bash calls it when the user presses Tab after the last word.
        let script = "source completions.bash; COMP_WORDS=(\"$@\"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); \
            compopt() { :; }; _train_low_mem \"$1\" \"${COMP_WORDS[COMP_CWORD]}\" \"${COMP_WORDS[COMP_CWORD - 1]}\"; \
            printf '%s\n' \"${COMPREPLY[@]}\"";
        let mut bash = Command::new("bash");
        bash.args(["--norc", "-c", script, "bash", "train_low_mem"]).args(words).current_dir(scene.path(""));
        let output = bash.output().expect("bash");
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    for command in [&["--set"][..], &["train", "--set"], &["eval", "--set"]] {
        let keys = completed(&[command, &["train.batch"]].concat());
        assert_eq!(keys, "train.batch_size=\ntrain.batch_size_per_device=\n", "{command:?}");
    }
    assert_eq!(completed(&["plan", "--expl"]), "--explain\n");
    assert_eq!(completed(&["train-to"]), "train-tokenizer\n");
}

#[test]
fn every_test_that_the_page_of_faults_names_exists() {
    let page = std::fs::read_to_string(repository().join("docs/faults.md")).expect("the page");
    let tables = page.split("## What was meant").nth(1).expect("the section");
    let rows = tables.lines().filter(|line| line.starts_with("| ")).filter_map(|line| line.rsplit('|').nth(1));
    let names: Vec<&str> = rows.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
    assert!(names.len() > 30, "{names:?}");
    let mut directories: Vec<_> = ["tests", "crates", "xtask/src"].map(|name| repository().join(name)).to_vec();
    let mut sources = String::new();
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                sources += &std::fs::read_to_string(&path).expect("a source");
            }
        }
    }
    let missing: Vec<&&str> = names.iter().filter(|name| !sources.contains(&format!("fn {name}("))).collect();
    assert!(missing.is_empty(), "no such tests: {missing:?}");
}
