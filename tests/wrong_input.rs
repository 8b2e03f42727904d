//! Wrong input of every kind: the exit code, an error that names problem and place, and a hint.

use crate::files;
use crate::run::{Scene, repository, sample, short};

/// Runs the command and checks its exit code, an `error:` line with these words, and a hint.
#[track_caller]
fn check(scene: &Scene, arguments: &[&str], code: i32, words: &[&str]) {
    let ran = scene.run(arguments).expect_code(code);
    let error = ran
        .err
        .lines()
        .find(|line| line.starts_with("error: "))
        .unwrap_or_else(|| panic!("no error line in\n{}", ran.err));
    for word in words {
        assert!(ran.err.contains(word), "{arguments:?}: `{word}` is not in\n{}", ran.err);
    }
    assert!(ran.err.lines().any(|line| line.starts_with("hint: ")), "{arguments:?}: no hint after\n{error}");
    assert!(!ran.err.contains("panicked"), "{}", ran.err);
}

#[test]
fn a_wrong_flag_or_key_is_a_usage_error_that_names_the_nearest() {
    let scene = Scene::new();
    scene.write("bad.toml", "[train]\nepochs = 1\nbatchsize = 3\n");
    scene.write("type.toml", "[train]\nepochs = \"three\"\n");
    scene.write("torn.toml", "[train\nepochs = 1\n");
    for (arguments, words) in [
        (&["--lean-rate", "3"][..], &["--lean-rate", "--learn-rate"][..]),
        (&["--set", "train.batchsize=3"], &["--set", "train.batchsize", "train.batch_size"]),
        (&["--set", "train.epochs"], &["KEY=VALUE"]),
        (&["--epochs", "0"], &["--epochs", "at least 1", "got 0"]),
        (&["--memory-budget", "lots"], &["--memory-budget", "512MiB", "lots"]),
        (&["--config", "bad.toml"], &["bad.toml:3", "train.batchsize", "train.batch_size"]),
        (&["--config", "type.toml"], &["type.toml:2", "whole number", "three"]),
        (&["--config", "torn.toml"], &["torn.toml:1", "not valid TOML"]),
        (&["--config", "absent.toml"], &["absent.toml"]),
        (&["--finetune"], &["model.init_from"]),
        (&["--set", "data.train=[]"], &["data.train"]),
        (&["--set", "data.train=a.parquet"], &["no model", "model.config", "model.init_from"]),
        (&["--set", "data.train=a.parquet", "--set", "model.config=t6-small"], &["t6-small", "t5-small"]),
        (&["--device", "gpu"], &["gpu", "cuda"]),
    ] {
        check(&scene, arguments, 2, words);
    }
}

#[test]
fn unusable_data_names_the_file_and_what_was_expected() {
    let scene = Scene::new();
    let pair = || [("prompt", vec![Some("a"), Some("b")]), ("response", vec![Some("1"), Some("2")])];
    files::write_rows(&scene.path("good.parquet"), &pair());
    files::write_rows(&scene.path("other.parquet"), &[("frage", vec![Some("a")]), ("antwort", vec![Some("1")])]);
    files::write_rows(&scene.path("empty.parquet"), &[("prompt", vec![]), ("response", vec![])]);
    files::write_numbers(&scene.path("numbers.parquet"));
    let good = scene.read("good.parquet");
    scene.write("cut.parquet", &good[..good.len() / 2]);
    scene.write("text.parquet", "not parquet at all");
    scene.write("nothing.parquet", "");
    for (file, words) in [
        ("absent.parquet", &["absent.parquet"][..]),
        ("rows-*.parquet", &["no file matches", "rows-*.parquet"]),
        ("other.parquet", &["other.parquet", "prompt", "frage, antwort"]),
        ("empty.parquet", &["empty.parquet", "rows"]),
        ("cut.parquet", &["cut.parquet"]),
        ("text.parquet", &["text.parquet"]),
        ("nothing.parquet", &["nothing.parquet"]),
    ] {
        let tokenizer = sample("data.tokenizer", "sample-tokenizer.json");
        let data = format!("data.train={file}");
        let settings = ["--set", &data, "--set", "model.config=tiny", "--set", &tokenizer];
        check(&scene, &[&settings[..], &["--output", "run"]].concat(), 4, words);
        check(&scene, &[&["plan"], &settings[..]].concat(), 4, words);
    }
    assert!(!scene.path("run/checkpoints").exists());
    // A column of numbers is read as text.
    let tokenizer = sample("data.tokenizer", "sample-tokenizer.json");
    let numbers = ["plan", "--set", "data.train=numbers.parquet", "--set", "model.config=tiny", "--set", &tokenizer];
    scene.run(&numbers).expect_code(0).expect_words(&["response from `response`; 2 rows"]);
}

#[test]
fn an_unusable_model_or_tokenizer_names_the_file() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "train.max_steps=1"])).expect_code(0);
    let rows = format!("data.train={}", repository().join("data/sample-validation.parquet").display());
    let from = |directory: &str| format!("model.init_from={directory}");
    let copy = |name: &str| {
        for file in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
            scene.write(&format!("{name}/{file}"), scene.read(&format!("run/model/{file}")));
        }
    };
    for (name, file, text, words) in [
        ("no-json", "config.json", &b"{"[..], &["no-json/config.json"][..]),
        ("no-tensors", "model.safetensors", b"short", &["no-tensors/model.safetensors"]),
        ("no-tokenizer", "tokenizer.json", b"[]", &["no-tokenizer/tokenizer.json"]),
    ] {
        copy(name);
        scene.write(&format!("{name}/{file}"), text);
        check(&scene, &["--set", &from(name), "--set", &rows, "--output", "new"], 4, words);
    }
    check(&scene, &["--set", &from("absent"), "--set", &rows, "--output", "new"], 4, &["absent"]);
    check(&scene, &["generate", "--model", "absent", "--prompt", "a"], 4, &["absent"]);
    check(&scene, &["eval", "--model", "absent", "--data", "a.parquet"], 4, &["absent"]);
    check(&scene, &["--set", "model.vocab_size=10", "--output", "new"], 4, &["tokenizer", "10 rows"]);
    check(&scene, &["--set", "model.overrides={ num_heads = 0 }", "--output", "new"], 4, &["num_heads"]);
    check(&scene, &["--set", "train.freeze=encodr", "--output", "new"], 2, &["encodr", "encoder"]);
    check(&scene, &["bench", "--model", "t6"], 2, &["t6", "t5-small"]);
    check(&scene, &["train-tokenizer", "--input", "absent.txt", "--vocab-size", "400"], 4, &["absent.txt"]);
    check(&scene, &["inspect", "absent.parquet"], 4, &["absent.parquet"]);
}

#[test]
fn a_directory_for_the_files_of_bench_that_is_none_is_said_with_its_flag() {
    let scene = Scene::new();
    scene.write("file", "in the way");
    let bench = ["bench", "--model", "tiny", "--accumulation", "layer-major", "--batch", "1", "--steps", "1"];
    for flag in ["--offload", "--offload-gradients", "--offload-weights"] {
        let got = [("absent", "No such file or directory"), ("file", "Not a directory")];
        for (directory, got) in got {
            let words = [flag, directory, "expected a directory", got];
            check(&scene, &[&bench[..], &[flag, directory]].concat(), 2, &words);
        }
    }
    // In any position among other flags.
    let both = ["--offload", ".", "--offload-weights", "absent"];
    check(&scene, &[&bench[..], &both].concat(), 2, &["--offload-weights", "absent"]);
}

#[test]
fn an_output_directory_that_cannot_be_written_is_said() {
    let scene = Scene::new();
    scene.write("file", "in the way");
    let ran = scene.run(&short(&["--output", "file/run"])).expect_code(1);
    assert!(
        ran.err.starts_with("error: file") && ran.err.contains("hint: ") && ran.err.contains("--output DIR"),
        "{}",
        ran.err
    );
}

#[cfg(not(feature = "mpi"))]
#[test]
fn several_copies_of_a_build_without_mpi_are_refused_before_they_train_the_same_run() {
    let scene = Scene::new();
    let launched = scene.run_under("env OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=4", &short(&[]));
    let words = ["`mpirun` started 4 processes, and this build has no MPI", "--features mpi", "docs/processes.md"];
    launched.expect_code(2).expect_words(&words);
    assert!(!scene.path("run").exists());
}
