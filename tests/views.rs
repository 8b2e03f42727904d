//! Views of runs: the page, TensorBoard's events, several runs side by side, and the bill as a picture.

use std::fs;

use crate::run::{Scene, short};
use serde_json::{Value, json};

/// The exact numbers that a page holds for programs.
fn figures(page: &str) -> Value {
    let text = page.split(r#"id="figures">"#).nth(1).and_then(|rest| rest.split("</script>").next());
    serde_json::from_str(text.expect("figures in the page")).expect("JSON")
}

fn page(scene: &Scene, name: &str) -> String {
    String::from_utf8(scene.read(name)).expect("UTF-8")
}

const EVENTS: &str = "run/events.out.tfevents.0.train_low_mem";

#[test]
fn a_run_leaves_a_page_with_the_numbers_of_its_metrics() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    let page = page(&scene, "run/report.html");
    let (steps, evaluations) = (scene.events("run", "step"), scene.events("run", "eval"));
    let figures = figures(&page);
    let last = steps.last().expect("steps");
    assert_eq!(figures["steps"], json!(steps.len()));
    assert_eq!((&figures["last_loss"], &figures["last_lr"]), (&last["loss"], &last["lr"]));
    assert_eq!(figures["predicted_peak_bytes"], last["predicted_peak_bytes"]);
    let losses = |of: &[Value]| of.iter().map(|evaluation| evaluation["loss"].clone()).collect::<Vec<_>>();
    assert_eq!(losses(figures["evaluations"].as_array().expect("a list")), losses(&evaluations));
    let examples = evaluations.last().and_then(|event| event["examples"].as_array()).expect("answers");
    let prompt = examples[0]["prompt"].as_str().expect("a prompt");
    assert!(page.contains(prompt), "the page shows {prompt}");
    for words in ["predicted peak", "<b class=\"s\">done</b>", "key/value cache", "decoder backward", "resolved.toml"] {
        assert!(page.contains(words), "{words}");
    }
    assert!(page.len() < 300_000, "{}", page.len());
}

/// Steps of the records of an event file, found by their length prefixes. `run-report` tests the checksums.
fn recorded_steps(mut file: &[u8]) -> Vec<u64> {
    let mut steps = Vec::new();
    while let Some(length) = file.first_chunk::<8>() {
        let length = u64::from_le_bytes(*length) as usize;
        let record = &file[12..12 + length];
        // The step follows the time, if the record has one.
        if record[9] == 2 << 3 {
            assert!(record[10] < 128, "a short run");
            steps.push(u64::from(record[10]));
        }
        file = &file[16 + length..];
    }
    steps
}

#[test]
fn a_resumed_run_has_no_step_twice_in_its_events_and_pages() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "checkpoint.every_steps=4"])).expect_code(0);
    let whole = recorded_steps(&scene.read(EVENTS));
    // The state after the run was killed after step 6: its newest checkpoint is that of step 4.
    fs::remove_dir_all(scene.path("run/checkpoints/step-00000006")).expect("the last checkpoint");
    fs::remove_dir_all(scene.path("run/model")).expect("the model");
    fs::remove_file(scene.path("run/finished.json")).expect("the end");
    let torn = scene.read(EVENTS);
    fs::write(scene.path(EVENTS), &torn[..torn.len() - 5]).expect("a torn record");
    scene.run(&short(&["--keep-training"])).expect_code(0);
    assert_eq!(scene.events("run", "step").len(), 8, "two steps were written again");
    assert_eq!(recorded_steps(&scene.read(EVENTS)), whole);
    let page = page(&scene, "run/report.html");
    assert_eq!(figures(&page)["steps"], json!(6));
    assert!(page.contains("resumed at step 4"));
    // Made from the files, the page is the same except for the configs' headings.
    scene.run(&["report", "run", "--output", "again.html"]).expect_code(0).expect_words(&["wrote again.html"]);
    assert_eq!(figures(&page), figures(&self::page(&scene, "again.html")));
}

#[test]
fn several_runs_share_a_page_that_replaces_no_other_file() {
    let scene = Scene::new();
    scene.run(&short(&["--output", "a"])).expect_code(0);
    scene.run(&short(&["--output", "b", "--learn-rate", "0.002"])).expect_code(0);
    scene.run(&["report", "a", "b"]).expect_code(0).expect_words(&["wrote report.html"]);
    let both = page(&scene, "report.html");
    let found = figures(&both);
    let runs: Vec<&Value> = found.as_array().expect("a list").iter().map(|run| &run["run"]).collect();
    assert_eq!(runs, ["a", "b"]);
    assert!(both.contains("optimizer.learning_rate") && both.contains("0.002"), "the settings that differ");
    // Only a page of this program is replaced.
    scene.run(&["report", "a", "b"]).expect_code(0);
    scene.write("mine.html", "<p>my only copy</p>");
    scene.run(&["report", "a", "--output", "mine.html"]).expect_code(2).expect_words(&["mine.html", "hint: "]);
    assert_eq!(scene.read("mine.html"), b"<p>my only copy</p>");
    scene.run(&["report", "absent"]).expect_code(4).expect_words(&["absent/metrics.jsonl", "hint: a run is"]);
    let many = vec!["a"; 13];
    scene.run(&[&["report"][..], &many].concat()).expect_code(2).expect_words(&["at most 12 runs, got 13"]);
}

#[test]
fn views_that_cannot_be_written_are_one_warning_and_never_stop_a_run() {
    let scene = Scene::new();
    scene.run(&short(&["--max-steps", "2"])).expect_code(0);
    for view in ["run/report.html", EVENTS] {
        fs::remove_file(scene.path(view)).expect("a view of the run");
        fs::create_dir_all(scene.path(view).join("x")).expect("a directory");
    }
    let ran = scene.run(&short(&["--keep-training"])).expect_code(0);
    let warnings: Vec<&str> = ran.err.lines().filter(|line| line.contains("the run continues")).collect();
    assert!(warnings.len() == 1 && warnings[0].starts_with("warning:"), "{}", ran.err);
}

#[test]
fn the_bill_of_a_plan_is_a_picture_with_the_numbers_of_its_json() {
    let scene = Scene::new();
    let plan = ["plan", "--set", "model.config=t5-small", "--memory-budget", "600MiB", "--max-steps", "10"];
    let printed = scene.run(&[&plan[..], &["--json", "--html", "plan.html"]].concat()).expect_code(0).json();
    let page = page(&scene, "plan.html");
    assert_eq!(figures(&page), printed);
    for phase in printed["bill"]["phases"].as_array().expect("phases") {
        assert!(page.contains(&format!("data-bytes=\"{}\"", phase["bytes"])), "{phase}");
    }
    let moments = printed["timeline"]["moments"].as_array().expect("moments");
    let most = moments
        .iter()
        .map(|moment| moment["bytes"].as_array().expect("bytes").iter().filter_map(Value::as_u64).sum::<u64>());
    assert_eq!(most.max(), printed["predicted_peak"].as_u64());
}

#[test]
fn a_run_that_is_watched_without_a_terminal_is_a_summary() {
    let scene = Scene::new();
    scene.run(&short(&[])).expect_code(0);
    let before = scene.contents("run");
    let watched = scene.run(&["watch", "run"]).expect_code(0);
    watched.expect_words(&["run: done at step 6 of 6", "validation", "peak memory"]);
    assert_eq!(scene.contents("run"), before, "nothing of the run is changed");
    scene.run(&["watch", "absent"]).expect_code(4).expect_words(&["absent/metrics.jsonl", "hint: a run is"]);
}
