//! The commands in README, `--help` and the last screen of a run: each works as shown.
//!
//! They run one after the other in one directory, as a reader would type them. Rows exist under every name that they use; earlier commands
//! make everything else.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;

use crate::files::write_rows;
use crate::run::{Ran, Scene, repository};

/// A directory with a few rows under the names that the examples use, and `configs/`.
fn newcomer() -> Scene {
    let scene = Scene::new();
    symlink(repository().join("configs"), scene.path("configs")).expect("a link to the configs");
    std::fs::create_dir(scene.path("rows")).expect("a directory");
    let prompts: Vec<String> = (0..4).map(|row| format!("how many legs have {row} spiders")).collect();
    let prompts: Vec<Option<&str>> = prompts.iter().map(|text| Some(text.as_str())).collect();
    let responses = ["none", "eight", "sixteen", "twenty-four"].map(Some).to_vec();
    for name in ["rows.parquet", "tuning.parquet", "valid.parquet", "rows/a.parquet"] {
        write_rows(&scene.path(name), &[("prompt", prompts.clone()), ("response", responses.clone())]);
    }
    scene.write("tickets.csv", "prompt,response\nMy card was charged twice,billing\nIt does not start,technical\n");
    // What `hf download google/flan-t5-small` makes, with a small model in it.
    scene.run(&crate::run::short(&["--max-steps", "1", "--output", "small"])).expect_code(0);
    let snapshot = "cache/hub/models--google--flan-t5-small/snapshots/1";
    for file in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        scene.write(&format!("{snapshot}/{file}"), scene.read(&format!("small/model/{file}")));
    }
    scene
}

/// The commands of a text: lines that begin with the program's name, and their continuation lines after `\`. Usage lines do not count.
fn commands(text: &str) -> Vec<String> {
    let joined = text.replace("\\\n", " ");
    let lines = joined.lines().map(str::trim).filter(|line| {
        let mut words = line.split_whitespace();
        words.next() == Some("train_low_mem") && !words.next().is_some_and(|word| word.starts_with(['<', '[']))
    });
    lines.map(|line| line.split("  # ").next().unwrap_or(line).trim().to_string()).collect()
}

/// Runs a line as a shell would, with the program on the `PATH`.
fn in_a_shell(scene: &Scene, line: &str) -> Ran {
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_train_low_mem"));
    let directory = program.parent().expect("a directory").display();
    scene.shell(&format!("PATH='{directory}':\"$PATH\"; export HF_HOME=cache; {line}"))
}

#[test]
fn every_command_of_the_readme_and_of_help_runs_as_it_is_shown() {
    let readme = std::fs::read_to_string(repository().join("README.md")).expect("README.md");
    let help = Scene::new().run(&["--help"]).expect_code(0).out;
    for (name, text, least) in [("README.md", readme, 5), ("--help", help, 5)] {
        let scene = newcomer();
        let mut ran = 0;
        for line in commands(&text) {
            // The demo takes a minute; `.ci/run` runs it.
            if line != "train_low_mem" {
                let outcome = in_a_shell(&scene, &line);
                assert_eq!(outcome.code, Some(0), "{name}: {line}\n{}{}", outcome.out, outcome.err);
            }
            ran += 1;
        }
        assert!(ran >= least, "{name} shows {ran} commands");
    }
}

#[test]
fn every_flag_that_a_document_shows_is_in_the_help_of_its_command() {
    let scene = Scene::new();
    let mut helps = BTreeMap::new();
    let mut flags = 0;
    for entry in std::fs::read_dir(repository().join("docs")).expect("docs") {
        let path = entry.expect("an entry").path();
        let text = std::fs::read_to_string(&path).expect("a document");
        for line in commands(&text) {
            let words: Vec<&str> = line.split_whitespace().skip(1).take_while(|word| *word != "--").collect();
            let command: Vec<&str> = match words[..] {
                [outer @ ("jobs" | "bench"), inner @ ("run" | "add" | "serve"), ..] => vec![outer, inner],
                [command, ..] if !command.starts_with('-') => vec![command],
                _ => Vec::new(),
            };
            let help = helps
                .entry(command.join(" "))
                .or_insert_with(|| scene.run(&[&command[..], &["--help"]].concat()).expect_code(0).out);
            for flag in words.iter().filter(|word| word.starts_with("--")) {
                let name = flag.split('=').next().unwrap_or(flag);
                assert!(help.contains(name), "{}: {name} of `{line}`", path.display());
                flags += 1;
            }
        }
    }
    assert!(flags > 60, "{flags}");
}

#[test]
fn the_commands_that_a_finished_run_names_next_run() {
    let scene = newcomer();
    let data = ["--set", "data.train=rows.parquet", "--set", "data.validation=valid.parquet"];
    let arguments = crate::run::short(&[&data[..], &["--output", "first try/run"]].concat());
    let ran = scene.run(&arguments).expect_code(0);
    let next = ran.out.split("next:\n").nth(1).expect("the commands to run next");
    let lines: Vec<&str> = next.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    assert_eq!(lines.len(), 3, "{next}");
    assert!(lines.iter().all(|line| line.contains(env!("CARGO_BIN_EXE_train_low_mem"))), "{next}");
    for line in lines {
        assert_eq!(scene.shell(line).code, Some(0), "{line}");
    }
    assert!(scene.path("first try/tuned/model/model.safetensors").exists());
}

#[test]
fn the_commands_of_a_run_that_read_columns_of_its_own_choice_read_the_same_columns() {
    let scene = newcomer();
    let row =
        |number: usize| format!("{number},card {number},charged twice,{}\n", ["billing", "technical"][number % 2]);
    let mut csv = b"id,subject,body,queue\n".to_vec();
    (0..12).for_each(|number| csv.extend(row(number).replace("card", "caf\u{e9}").chars().map(|c| c as u8)));
    scene.write("own.csv", csv);
    let columns = ["--set", "data.source_template={subject}\\n{body}", "--set", "data.response_column=queue"];
    let data = ["--set", "data.train=own.csv", "--set", "data.validation_split=3", "--set", "data.validation=[]"];
    let text = ["--set", "data.encoding=windows-1252"];
    let ran =
        scene.run(&crate::run::short(&[&columns[..], &data, &text, &["--output", "own"]].concat())).expect_code(0);
    let next = ran.out.split("next:\n").nth(1).expect("the commands to run next");
    for line in next.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let next = scene.shell(line);
        assert_eq!(next.code, Some(0), "{line}\n{}{}", next.out, next.err);
    }
    let reading = scene.text("tuned/resolved.toml");
    assert!(reading.contains("prompt `{subject}\\\\n{body}`, response from `queue`"), "{reading}");
    // The rows that the run set aside have the scores that they had in the run.
    let scored = scene.run(&["eval", "--model", "own", "--data", "own/data/validation-rows.parquet", "--json"]).json();
    let last = scene.events("own", "eval").pop().expect("an evaluation");
    assert_eq!((&scored["loss"], &scored["samples"]), (&last["loss"], &last["samples"]));
}

#[test]
fn rows_for_training_are_never_shown_for_an_evaluation_nor_the_reverse_and_a_prefix_is_shown_once() {
    let scene = newcomer();
    let data = ["--set", "data.train=rows.parquet", "--set", "data.source_prefix=how: "];
    let next = |output: &str, more: &[&str]| {
        let arguments = crate::run::short(&[&data[..], &["--output", output], more].concat());
        let out = scene.run(&arguments).expect_code(0).out;
        out.split("next:\n").nth(1).expect("the commands to run next").to_owned()
    };
    let split = next("split", &["--set", "data.validation_split=2", "--set", "data.validation=[]"]);
    assert!(split.contains("--data split/data/validation-rows.parquet"), "{split}");
    assert!(split.contains("--finetune --model split/model --data rows.parquet"), "{split}");
    assert!(split.contains("--prompt 'how many legs"), "{split}");
    let eval = split.lines().find(|line| line.contains(" eval ")).expect("an evaluation");
    assert_eq!(scene.shell(eval.trim()).code, Some(0), "{eval}");
    let none = next("none", &["--set", "data.validation=[]"]);
    assert!(!none.contains(" eval "), "{none}");
    let given = next("given", &["--set", "data.validation=valid.parquet"]);
    assert!(
        given.contains("--data valid.parquet") && given.contains("--finetune --model given/model --data rows.parquet"),
        "{given}"
    );
}
