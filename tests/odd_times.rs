//! Times outside of the expected: of files, of a run's own records, and of other runs.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::jobs::with_ledger;
use crate::run::{Scene, short};

/// Sets the time of every file below a directory.
fn set_times(directory: &Path, time: SystemTime) {
    for entry in std::fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        match path.is_dir() {
            true => set_times(&path, time),
            false => File::options().append(true).open(path).expect("a file").set_modified(time).expect("a time"),
        }
    }
}

#[test]
fn files_from_before_1970_and_from_the_far_future_are_files_like_any_other() {
    let century = Duration::from_secs(100 * 365 * 24 * 3600);
    for time in [SystemTime::UNIX_EPOCH - century / 2, SystemTime::UNIX_EPOCH + 5 * century] {
        let scene = Scene::new();
        let rows = "{\"prompt\": \"a b\", \"response\": \"b\"}\n".repeat(40);
        scene.write("rows.jsonl", rows);
        set_times(&scene.path(""), time);
        let on_rows = |more: &[&str]| {
            let data = ["--set", "data.train=rows.jsonl", "--set", "data.tokenizer=first/model", "--output", "run"];
            short(&[&data[..], more].concat())
        };
        scene.run(&short(&["--max-steps", "1", "--output", "first"])).expect_code(0);
        set_times(&scene.path("first"), time);
        let model = ["--set", "model.config=tiny", "--set", "train.eval_samples=0"];
        scene.run(&on_rows(&model)).expect_code(0);
        set_times(&scene.path("run"), time);
        let ran = scene.run(&on_rows(&[&model[..], &["--keep-training", "--max-steps", "8"]].concat()));
        ran.expect_code(0).expect_words(&["resuming from run/checkpoints/step-00000006"]);
        set_times(&scene.path("run"), time);
        for command in [
            &["inspect", "rows.jsonl"][..],
            &["report", "run"],
            &["watch", "run"],
            &["eval", "--model", "run", "--data", "rows.jsonl", "--samples", "2", "--max-new-tokens", "2"],
        ] {
            scene.run(command).expect_code(0);
        }
    }
}

#[test]
fn odd_times_in_the_records_of_runs_are_shown_and_count_nothing() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "train.eval_samples=1"])).expect_code(0);
    let metrics = scene.text("run/metrics.jsonl");
    for time in ["0001-01-01T00:00:00.000Z", "9999-12-31T23:59:59.999Z", "99999-01-01T00:00:00Z", "-1", ""] {
        let lines = metrics.lines().map(|line| {
            let mut event: serde_json::Value = serde_json::from_str(line).expect("JSON");
            event["time"] = time.into();
            format!("{event}\n")
        });
        scene.write("run/metrics.jsonl", lines.collect::<String>());
        for command in [&["report", "run"][..], &["watch", "run"]] {
            scene.run(command).expect_code(0);
        }
    }
    if !cfg!(target_os = "linux") {
        return;
    }
    let pid = std::process::id();
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux");
    let started = stat.rsplit_once(')').expect("a name").1.split_whitespace().nth(19).expect("a start");
    for arrived in [0, u64::MAX] {
        let line = format!(
            "[{{\"pid\":{pid},\"started\":{started},\"number\":{0},\"arrived\":{arrived},\"output\":\"other\",\"bytes\":{0},\
             \"waits\":false}}]",
            u64::MAX
        );
        scene.write("runtime/train_low_mem/ledger.json", line);
        with_ledger(&scene, "$program jobs").expect_code(0).expect_words(&["trains", "other"]);
    }
}
