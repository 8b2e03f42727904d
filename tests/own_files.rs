//! Ownership of files: the files that a run writes, finds and removes, and the files that it never touches.

#![cfg(unix)]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use crate::run::{Scene, short};

/// Everything below a directory: contents, and times of the last change.
fn listing(scene: &Scene, name: &str) -> BTreeMap<PathBuf, (Option<Vec<u8>>, SystemTime)> {
    let mut found = BTreeMap::new();
    let mut left = vec![scene.path(name)];
    while let Some(path) = left.pop() {
        let metadata = fs::symlink_metadata(&path).expect("it is there");
        let is_directory = metadata.is_dir();
        if is_directory {
            left.extend(fs::read_dir(&path).expect("a directory").map(|entry| entry.expect("an entry").path()));
        }
        let bytes = metadata.is_file().then(|| fs::read(&path).expect("a file"));
        found.insert(path, (bytes, metadata.modified().expect("a time")));
    }
    found
}

fn make_pipe(path: &Path) {
    let _ = fs::remove_file(path);
    let made = Command::new("mkfifo").arg(path).status().expect("the mkfifo command");
    assert!(made.success(), "mkfifo {}", path.display());
}

#[test]
fn files_of_others_stay_whatever_their_names() {
    let scene = Scene::new();
    let others = [
        "home/.tmp-thesis/chapter1",
        "home/.tmp-notes",
        "home/.train_low_mem-tmp-thesis/chapter1",
        "home/.train_low_mem-tmp-notes",
        "home/.train_low_mem-dry-run-notes/x",
        "home/.offloaded-1",
        "home/checkpoints/.tmp-step-00000001/model.safetensors",
        "home/sample-data/.tmp-rows",
        "home/sample-data/rows.parquet",
        ".tmp-beside",
    ];
    let _ = others.map(|name| scene.write(name, "my only copy"));
    // The run has nothing to overwrite: leftovers of an earlier version's save are no checkpoint.
    scene.run(&short(&["--keep-training", "--output", "home"])).expect_code(0);
    scene.run(&short(&["--keep-training", "--output", "home", "--set", "train.max_steps=8"])).expect_code(0);
    scene.run(&short(&["--dry-run", "--output", "home/other"])).expect_code(0);
    for name in others {
        assert_eq!(scene.read(name), b"my only copy", "{name}");
    }
}

#[test]
fn what_a_killed_run_left_is_removed_by_the_run_that_owns_the_directory() {
    let scene = Scene::new();
    let prefix = ".train_low_mem-tmp-0123456789abcdef";
    scene.write(&format!("run/{prefix}"), "half a file");
    scene.write(&format!("run/{prefix}-part-model/model.safetensors"), "half a model");
    scene.write(&format!("run/checkpoints/{prefix}-part-step-00000001/config.json"), "half a checkpoint");
    scene.write(&format!("run/sample-data/{prefix}"), "half a file");
    scene.run(&short(&["--memory-budget", "20MiB"])).expect_code(3);
    assert!(scene.names("run").contains(&prefix.to_string()), "a refused run removes nothing");
    scene.run(&short(&[])).expect_code(0);
    let left: Vec<PathBuf> = listing(&scene, "run").into_keys().collect();
    assert!(!left.iter().any(|path| path.to_string_lossy().contains("-tmp-")), "{left:#?}");
}

#[test]
fn a_refused_run_changes_nothing() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    // A torn last line, which a resumed run removes.
    let mut metrics = scene.read("run/metrics.jsonl");
    metrics.extend(b"{\"event\":\"st");
    scene.write("run/metrics.jsonl", &metrics);
    scene.write("run/.train_low_mem-tmp-0123456789abcdef", "half a file");
    // A killed run leaves such a lock.
    scene.write("run/.lock", "4000000\n");
    let keep = ["--keep-training", "--set", "train.max_steps=8"];
    let before = listing(&scene, "run");
    let unchanged = |arguments: &[&str], code: i32, words: &[&str]| {
        scene.run(&short(arguments)).expect_code(code).expect_words(words);
        assert!(listing(&scene, "run") == before, "{arguments:?} changed something");
    };
    unchanged(&[], 2, &["never overwritten"]);
    unchanged(&[&keep[..], &["--set", "train.batch_size=5"]].concat(), 2, &["train.batch_size"]);
    unchanged(&[&keep[..], &["--memory-budget", "20MiB"]].concat(), 3, &["budget"]);
    unchanged(&[&keep[..], &["--set", "data.train=absent.parquet"]].concat(), 4, &["absent.parquet"]);
    let lock = fs::File::open(scene.path("run/.lock")).expect("a lock");
    lock.try_lock().expect("nobody has it");
    unchanged(&keep, 2, &["in use by another run", "4000000"]);
    // A child that another test is starting also has the open file, until it executes another program.
    lock.unlock().expect("it was locked");
    scene.run(&short(&keep)).expect_code(0);
    assert_eq!(scene.read("run/.lock"), b"");
}

#[test]
fn a_run_that_never_began_leaves_no_directory_behind() {
    let scene = Scene::new();
    for more in [&["--memory-budget", "20MiB"][..], &["--set", "data.train=absent.parquet"]] {
        let arguments = short(&[&["--output", "runs/a/b"][..], more].concat());
        assert_ne!(scene.run(&arguments).code, Some(0));
        assert!(scene.names(".").is_empty(), "{:?}", scene.names("."));
    }
    // Earlier files stay, and none are added.
    scene.write("runs/notes", "mine");
    scene.run(&short(&["--output", "runs", "--memory-budget", "20MiB"])).expect_code(3);
    assert_eq!(scene.names("runs"), ["notes"]);
}

#[test]
fn sample_data_that_somebody_changed_is_not_replaced() {
    let scene = Scene::new();
    scene.write("run/sample-data/sample-train.parquet", "my own rows");
    let refused = scene.run(&short(&[])).expect_code(2);
    refused.expect_words(&["sample-train.parquet: expected the embedded sample data", "hint: "]);
    assert_eq!(scene.names("run"), ["sample-data"]);
    assert_eq!(scene.read("run/sample-data/sample-train.parquet"), b"my own rows");
}

#[test]
fn a_pipe_or_a_device_in_place_of_a_file_never_makes_the_command_wait() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    let resume_arguments = short(&["--keep-training", "--set", "train.max_steps=8"]);
    let from = |words: &[&str]| {
        scene.run(&[&resume_arguments[..], &["--dry-run".to_string()]].concat()).expect_code(0).expect_words(words);
    };
    let checkpoint = scene.path("run/checkpoints/step-00000006");
    for name in ["manifest.json", "trainer_state.json", "optimizer.safetensors", "model.safetensors"] {
        let path = checkpoint.join(name);
        let whole = fs::read(&path).expect("a file");
        let falls_back = ["could not be read: ", "falling back to run/checkpoints/step-00000004"];
        make_pipe(&path);
        from(&falls_back);
        fs::remove_file(&path).expect("a pipe");
        symlink("/dev/zero", &path).expect("a link");
        from(&falls_back);
        fs::remove_file(&path).expect("a link");
        fs::write(&path, whole).expect("the file as it was");
    }
    from(&["resuming from run/checkpoints/step-00000006"]);

    // Files of the run: the config is required; the others are made again.
    make_pipe(&scene.path("run/finished.json"));
    make_pipe(&scene.path("run/page-map.bin"));
    scene.run(&short(&["--keep-training"])).expect_code(0);
    make_pipe(&scene.path("run/resolved.toml"));
    let ran = scene.run(&["--keep-training", "--output", "run", "--max-steps", "8"]);
    ran.expect_code(1).expect_words(&["run/resolved.toml", "a pipe"]);
    make_pipe(&scene.path("pipe"));
    for pipe in ["pipe", "/dev/zero"] {
        scene.run(&["--config", pipe]).expect_code(2).expect_words(&[pipe, "expected a regular file"]);
        let tokenizer = format!("data.tokenizer={pipe}");
        scene.run(&["--set", &tokenizer]).expect_code(4).expect_words(&[pipe, "expected a regular file"]);
        let prompts = ["generate", "--model", "run/model", "--input", pipe];
        scene.run(&prompts).expect_code(4).expect_words(&[pipe, "expected a regular file", "hint: "]);
    }
    make_pipe(&scene.path("run/model/config.json"));
    let ran = scene.run(&["generate", "--model", "run/model", "--prompt", "1"]);
    ran.expect_code(4).expect_words(&["run/model/config.json", "a pipe"]);
}

#[test]
fn an_unreadable_config_of_the_run_is_an_error_of_the_system() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    let path = scene.path("run/resolved.toml");
    fs::remove_file(&path).expect("the config");
    symlink(&path, &path).expect("a loop of links");
    let ran = scene.run(&["--keep-training", "--output", "run", "--max-steps", "8"]);
    ran.expect_code(1).expect_words(&["run/resolved.toml"]);
    scene.run(&["--config", "run/resolved.toml"]).expect_code(1).expect_words(&["run/resolved.toml"]);
    scene.run(&["--config", "absent.toml"]).expect_code(2);
}

#[test]
fn a_checkpoint_that_cannot_be_read_is_passed_over_and_kept() {
    let scene = Scene::new();
    scene.run(&short(&["--max-steps", "4"])).expect_code(0);
    let manifest = scene.path("run/checkpoints/step-00000004/manifest.json");
    fs::remove_file(&manifest).expect("a manifest");
    symlink(&manifest, &manifest).expect("a loop of links");
    let more = ["--keep-training", "--set", "checkpoint.keep_last=1", "--set", "checkpoint.keep_best=0"];
    scene.run(&short(&[&more[..], &["--max-steps", "8"]].concat())).expect_code(0).expect_words(&[
        "step-00000004/manifest.json: could not be read",
        "falling back to run/checkpoints/step-00000002",
        "moved run/checkpoints/step-00000004 to run/checkpoints/step-00000004.kept-1",
    ]);
    assert_eq!(scene.names("run/checkpoints"), ["step-00000004.kept-1", "step-00000008"]);
}

#[test]
fn a_checkpoint_of_a_newer_version_ends_the_command_and_is_not_called_damaged() {
    let scene = Scene::new();
    scene.run(&short(&["--max-steps", "4"])).expect_code(0);
    let manifest = "run/checkpoints/step-00000004/manifest.json";
    let text = String::from_utf8(scene.read(manifest)).expect("UTF-8");
    scene.write(manifest, text.replacen("\"format\": 1", "\"format\": 2", 1));
    let before = listing(&scene, "run");
    let ran = scene.run(&short(&["--keep-training", "--max-steps", "8"])).expect_code(4);
    ran.expect_words(&["newer version of train_low_mem wrote it", "format 2", "hint: "]);
    assert!(listing(&scene, "run") == before);
}

#[test]
fn a_lock_that_is_a_link_is_refused_and_its_target_untouched() {
    let scene = Scene::new();
    scene.write("precious", "my only copy");
    fs::create_dir(scene.path("run")).expect("a directory");
    symlink(scene.path("precious"), scene.path("run/.lock")).expect("a link");
    scene.run(&short(&[])).expect_code(2).expect_words(&["run/.lock", "symbolic link", "hint: "]);
    assert_eq!(scene.read("precious"), b"my only copy");
    assert_eq!(scene.names("run"), [".lock"]);
}

#[test]
fn a_run_that_lost_its_directory_to_another_one_stops_and_writes_nothing_more() {
    for is_moved in [false, true] {
        let scene = Scene::new();
        // The run is stopped within a step. It saves when it is asked to stop, and never before.
        let rarely = ["--set", "train.max_steps=100000", "--set", "checkpoint.every_steps=100000"];
        let mut first = scene.start(&short(&rarely));
        assert!(first.wait_for("step 3/"));
        first.signal("STOP");
        if is_moved {
            fs::rename(scene.path("run"), scene.path("moved")).expect("a directory");
        } else {
            fs::remove_file(scene.path("run/.lock")).expect("a lock");
        }
        let often = ["--set", "train.max_steps=100000", "--set", "checkpoint.every_steps=1"];
        let mut second = scene.start(&short(&[&often[..], scene.resumes("run")].concat()));
        assert!(second.wait_for("saved run/checkpoints/step-"));
        second.kill();
        let before = listing(&scene, "run");
        ["TERM", "CONT"].into_iter().for_each(|name| first.signal(name));
        let ran = first.end().expect_code(1);
        ran.expect_words(&["run: the lock of this run is gone", "hint: look for another run"]);
        let after = listing(&scene, "run");
        // Lines that the first run still appends go to a file that it has open.
        let but_metrics = |mut found: BTreeMap<PathBuf, _>| {
            found.remove(&scene.path("run/metrics.jsonl"));
            found
        };
        assert!(but_metrics(after) == but_metrics(before), "the first run went on to write");
    }
}

#[test]
fn a_killed_dry_run_is_removed_by_the_next_one_and_by_a_run() {
    let scene = Scene::new();
    for next in [&["--dry-run"][..], &[]] {
        let mut dry = scene.start(&short(&["--dry-run", "--output", "runs/a"]));
        assert!(dry.wait_for("Output "));
        dry.kill();
        // Leftovers of a dry run that was killed later, and of one that is still running.
        let left = ".train_low_mem-tmp-0123456789abcdef-run";
        for file in ["resolved.toml", "sample-data/sample-train.parquet", "checkpoints/step-00000001/model.safetensors"]
        {
            scene.write(&format!("{left}/{file}"), "of a dry run");
        }
        let in_use = ".train_low_mem-tmp-fedcba9876543210-run";
        fs::create_dir_all(scene.path(in_use)).expect("a directory");
        let lock = fs::File::open(scene.path(in_use)).expect("a directory");
        lock.try_lock().expect("nobody has it");
        scene.run(&short(&[&["--output", "runs/a"][..], next].concat())).expect_code(0);
        let expected = if next.is_empty() { vec![in_use, "runs"] } else { vec![in_use] };
        assert_eq!(scene.names("."), expected);
    }
}

#[test]
fn what_killed_commands_left_beside_their_outputs_goes_with_the_next_one() {
    let scene = Scene::new();
    let few = ["--max-steps", "1", "--set", "train.eval_samples=1"];
    scene.run(&short(&few)).expect_code(0);
    scene.write("rows.jsonl", "{\"prompt\": \"a\", \"response\": \"b\"}\n".repeat(20));
    let tuned = ["--lora", "--model", "run", "--data", "rows.jsonl", "--output", "tuned"];
    scene.run(&short(&[&few[..], &tuned].concat())).expect_code(0);
    let left = ".train_low_mem-tmp-0123456789abcdef";
    for command in [
        "convert rows.jsonl --output to/x",
        "merge --adapter tuned --output to/x",
        "convert-base --model run --precision int8 --output to/x",
        "export --model run --format ctranslate2 --output to/x",
        "train-tokenizer --input rows.jsonl --vocab-size 400 --output to/x",
        "eval --model run --data rows.jsonl --samples 2 --generate-samples 0 --predictions to/x",
        "report run --output to/x",
        "jobs add to/x --output next",
        "average run run --output to/x",
        "trim-vocab --model run --keep-used rows.jsonl --output to/x",
        "add-tokens --model run --tokens abc --output to/x",
        "embed --model run --input rows.jsonl --text-column prompt --output to/x.npy",
        "score --model run --pairs rows.jsonl --template {prompt} --answers a,b --output to/x",
    ] {
        let _ = fs::remove_dir_all(scene.path("to"));
        scene.write(&format!("to/{left}"), "half a file");
        for name in ["config.json", "model.safetensors", "model.bin", "shared_vocabulary.json", "tokenizer.json"] {
            scene.write(&format!("to/{left}-part-x/{name}"), "half a file");
        }
        scene.write("to/.train_low_mem-tmp-thesis", "my only copy");
        let words: Vec<&str> = command.split(' ').collect();
        scene.run(&words).expect_code(0);
        let made = command.rsplit('/').next().expect("a name");
        assert_eq!(
            scene.names("to"),
            [".train_low_mem-tmp-thesis", made.split(' ').next().expect("a name")],
            "{command}"
        );
    }
}

#[test]
fn paths_that_are_not_utf8_are_paths_like_any_other() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let scene = Scene::new();
    let name = |bytes: &'static [u8]| OsStr::from_bytes(bytes).to_owned();
    let (output, other, rows) = (name(b"run-\xff"), name(b"other-\xfe"), name(b"rows-\xfd.parquet"));
    fs::copy(crate::run::repository().join("data/sample-train.parquet"), scene.path(".").join(&rows)).expect("rows");
    let mut set = name(b"data.train=").clone();
    set.push(&rows);
    let run = |arguments: &[&OsStr]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_train_low_mem"));
        // Its last two words name a directory.
        let usual = short(&[]);
        command.args(&usual[..usual.len() - 2]).args(arguments).current_dir(scene.path(".")).envs(crate::run::STATED);
        let ran = command.output().expect("the command starts");
        (ran.status.code(), String::from_utf8_lossy(&ran.stderr).into_owned())
    };
    let mut arguments = vec![OsStr::new("--output"), &output, OsStr::new("--set"), &set];
    arguments.extend(["--set", "data.validation=[]", "--set", "model.config=tiny"].map(OsStr::new));
    let tokenizer = format!("data.tokenizer={}", crate::run::repository().join("data/sample-tokenizer.json").display());
    arguments.extend(["--set", &tokenizer].map(OsStr::new));
    let more = [&arguments[..], &["--keep-training", "--set", "train.max_steps=8"].map(OsStr::new)].concat();
    for arguments in [&arguments, &more] {
        let (code, err) = run(arguments);
        assert_eq!(code, Some(0), "{err}");
    }
    let resolved = scene.path(".").join(&output).join("resolved.toml");
    let text = fs::read_to_string(&resolved).expect("the config");
    assert!(text.contains("rows-%FD.parquet") && text.contains("run-%FF"), "{text}");
    assert!(scene.path(".").join(&output).join("checkpoints/step-00000008").is_dir());
    // The config repeats the run. The embedded data is below its own directory.
    let again = [OsStr::new("--config"), resolved.as_os_str(), OsStr::new("--output"), &other];
    assert_eq!(run(&again).0, Some(0));
    assert_eq!(run(&[OsStr::new("--output"), &name(b"embedded-\xfc")]).0, Some(0));
    let (code, err) = run(&[OsStr::new("--set"), &name(b"data.prompt_column=\xff")]);
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("expected UTF-8") && err.contains("hint: "), "{err}");
}
