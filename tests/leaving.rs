//! Ends of a run: signals, and output without a reader.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};

use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::{Pid, WaitOptions, waitpid};
use serde_json::Value;

use crate::run::{STATED, Scene, short};

/// A run that neither ends nor saves without a signal.
const ENDLESS: [&str; 4] = ["--set", "train.max_steps=1000000", "--set", "checkpoint.every_steps=1000000"];

/// The command with SIGHUP enabled. If the tests were started with `nohup`, it would inherit that SIGHUP is ignored.
fn command(scene: &Scene, arguments: &[String]) -> Command {
    let mut command = Command::new("env");
    command
        .args(["--default-signal=HUP", env!("CARGO_BIN_EXE_train_low_mem")])
        .args(arguments)
        .current_dir(scene.path(""))
        .envs(STATED);
    command
}

/// Sends signals by name, one right after the other.
fn signal(child: &Child, names: &[&str]) {
    for name in names {
        let status = Command::new("kill").args(["-s", name, &child.id().to_string()]).status().expect("kill");
        assert!(status.success(), "kill -s {name}");
    }
}

/// Stops a process and waits until it is stopped. Signals sent to it then wait until it continues.
fn hold(child: &Child) {
    signal(child, &["STOP"]);
    let held = waitpid(Some(Pid::from_child(child)), WaitOptions::UNTRACED).unwrap();
    assert!(held.is_some_and(|(_, status)| status.stopped()), "{held:?}");
}

/// Reads lines up to one that contains `words`.
#[track_caller]
fn wait_for(lines: &mut impl BufRead, words: &str) {
    let mut line = String::new();
    while lines.read_line(&mut line).expect("a pipe") > 0 {
        if line.contains(words) {
            return;
        }
        line.clear();
    }
    panic!("`{words}` never came");
}

/// Follows the metrics of a run up to the event of a step.
#[track_caller]
fn wait_for_step(scene: &Scene, step: u64) {
    let path = scene.path("run/metrics.jsonl");
    let mut tail = Command::new("tail");
    let mut tail =
        tail.args(["-n", "+1", "-F"]).arg(path).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    wait_for(&mut BufReader::new(tail.stdout.take().unwrap()), &format!("\"step\":{step},\"epoch\""));
    tail.kill().unwrap();
    tail.wait().unwrap();
}

fn last_event(scene: &Scene) -> Value {
    let text = String::from_utf8(scene.read("run/metrics.jsonl")).unwrap();
    serde_json::from_str(text.lines().last().unwrap()).unwrap()
}

#[test]
fn a_pipe_that_nobody_reads_holds_up_neither_the_steps_nor_the_end() {
    let scene = Scene::new();
    let (_nobody_reads, mut full) = std::io::pipe().unwrap();
    fcntl_setfl(&full, OFlags::NONBLOCK).unwrap();
    for bytes in [4096, 1] {
        while full.write(&vec![b'.'; bytes]).is_ok() {}
    }
    fcntl_setfl(&full, OFlags::empty()).unwrap();
    let mut run = command(&scene, &short(&ENDLESS));
    let mut child = run.stdout(full.try_clone().unwrap()).stderr(full).spawn().unwrap();
    wait_for_step(&scene, 30);
    signal(&child, &["TERM"]);
    assert_eq!(child.wait().unwrap().code(), Some(75));
    let end = last_event(&scene);
    assert_eq!((end["event"].as_str(), end["reason"].as_str()), (Some("end"), Some("interrupted")));
    let saved = scene.names("run/checkpoints");
    assert_eq!(saved, [format!("step-{:08}", end["step"].as_u64().unwrap())]);
}

#[test]
fn a_signal_before_the_first_step_leaves_at_once_and_saves_nothing() {
    let scene = Scene::new();
    // A step of all rows, which takes longer than any test, so a signal always comes in time.
    let all_rows = ["--set", "train.batch_size=46017"];
    for (words, step) in [("Output ", "before step 1"), ("evaluating", "before step 1")] {
        let mut running = scene.start(&short(&[&["--set", "train.eval_samples=0"][..], &all_rows].concat()));
        assert!(running.wait_for(words));
        running.signal("TERM");
        running.end().expect_code(75).expect_words(&["interrupted ", step, "nothing to save", "hint: "]);
        assert!(!scene.path("run/checkpoints").exists());
    }
    scene.run(&short(&["--max-steps", "2", "--set", "train.max_steps=2"])).expect_code(0);
    // The same for a resumed run: its checkpoint stays unchanged.
    let goes_on = ["--keep-training", "--allow-changed", "batch-size"];
    let mut running = scene.start(&short(&[&goes_on[..], &all_rows].concat()));
    assert!(running.wait_for("Output "));
    running.signal("INT");
    running.end().expect_code(75).expect_words(&["interrupted before step 3; nothing to save", "--keep-training"]);
    assert_eq!(scene.names("run/checkpoints"), ["step-00000002"]);
}

#[test]
fn the_second_signal_says_what_is_lost_and_has_a_code_of_its_own() {
    let code = |name: &str| [("HUP", 129), ("INT", 130), ("TERM", 143)].into_iter().find(|(known, _)| *known == name);
    for names in [["INT", "TERM"], ["HUP", "INT"]] {
        let scene = Scene::new();
        let mut run = command(&scene, &short(&ENDLESS));
        let mut child = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_for(&mut BufReader::new(child.stdout.take().unwrap()), "step 3/");
        // Both signals are pending when it continues, so the second is not too late. Pending signals have no order.
        hold(&child);
        signal(&child, &[names[0], names[1], "CONT"]);
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        // The setting of the steps takes the place of the flag, with a warning.
        let said: String = said.split_inclusive('\n').filter(|line| !line.starts_with("warning: ")).collect();
        let [first, second] = if said.starts_with(&format!("SIG{}", names[0])) { names } else { [names[1], names[0]] };
        assert_eq!(child.wait().unwrap().code(), code(second).map(|(_, code)| code), "{said}");
        let lines: Vec<&str> = said.lines().collect();
        let [next, lost] = lines[..] else { panic!("{said}") };
        assert!(next.starts_with(&format!("SIG{first}: stopping within this step, then saving step ")), "{said}");
        assert!(next.contains("; a second signal exits at once and loses "), "{said}");
        assert!(lost.starts_with(&format!("SIG{second}: exiting at once; this loses ")), "{said}");
        assert!(lost.ends_with(" steps since the last checkpoint"), "{said}");
    }
}

#[test]
fn a_terminal_that_closes_is_a_signal_unless_nohup_asked_for_more() {
    let scene = Scene::new();
    let mut run = command(&scene, &short(&ENDLESS));
    let mut child = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    wait_for(&mut lines, "step 3/");
    signal(&child, &["HUP"]);
    let mut said = String::new();
    lines.read_to_string(&mut said).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(75), "{said}");
    for words in ["SIGHUP: stopping within this step", "interrupted at step", "saved run"] {
        assert!(said.contains(words), "`{words}` is not in\n{said}");
    }

    let mut run = Command::new("sh");
    run.args(["-c", "trap '' HUP; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_train_low_mem")]);
    run.args(short(&["--output", "other"])).current_dir(scene.path("")).envs(STATED);
    let mut child = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    wait_for(&mut lines, "step 1/6");
    signal(&child, &["HUP"]);
    lines.read_to_string(&mut String::new()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn metrics_that_cannot_be_written_are_a_warning_and_a_count_and_never_stop_a_run() {
    let scene = Scene::new();
    std::fs::create_dir_all(scene.path("run/metrics.jsonl")).unwrap();
    let ran = scene.run(&short(&[])).expect_code(0);
    let warnings: Vec<&str> = ran.err.lines().filter(|line| line.contains("metrics.jsonl")).collect();
    let [first, last] = warnings[..] else { panic!("{}", ran.err) };
    assert!(first.starts_with("warning: run/metrics.jsonl: cannot append: "), "{first}");
    assert!(
        last.starts_with("warning: run/metrics.jsonl: ") && last.ends_with(" lines could not be written"),
        "{last}"
    );
    assert!(scene.path("run/model/model.safetensors").exists());
}

#[test]
fn a_result_is_written_whole_or_is_an_error_and_a_reader_may_go_away() {
    let scene = Scene::new();
    let keys = |stdout: Stdio| {
        let mut run = command(&scene, &["keys".to_string()]);
        run.stdout(stdout).stderr(Stdio::piped()).output().unwrap()
    };
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let refused = keys(full.into());
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.starts_with("error: standard output: cannot write the result: "), "{said}");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let ended = keys(writer.into());
    assert!(ended.stderr.is_empty() && ended.status.code().is_none(), "{ended:?}");
}

/// Runs the command below a limit of the shell. Each of its threads takes address space.
fn limited(scene: &Scene, limit: &str, arguments: &[String]) -> std::process::Output {
    let mut run = Command::new("sh");
    run.args(["-c", &format!("ulimit {limit}; exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_train_low_mem")]);
    run.args(arguments).current_dir(scene.path("")).envs(STATED).output().unwrap()
}

#[test]
fn memory_that_the_system_refuses_is_an_error_with_a_code_and_a_small_stack_is_none() {
    let scene = Scene::new();
    let bench = "bench --model t5-small --batch 1 --source-tokens 8 --target-tokens 8 --steps 1".split(' ');
    let refused = limited(&scene, "-v 200000", &bench.map(str::to_owned).collect::<Vec<_>>());
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(3), "{said}");
    assert!(said.starts_with("error: out of memory: the system refused ") && said.contains("hint: "), "{said}");
    let arguments = short(&["--set", "train.max_steps=1", "--set", "train.eval_samples=1"]);
    let ran = limited(&scene, "-s 128", &arguments);
    assert_eq!(ran.status.code(), Some(0), "{}", String::from_utf8_lossy(&ran.stderr));
}

#[test]
fn sizes_that_no_model_has_are_refused_and_a_deep_model_is_planned_in_little_memory() {
    let scene = Scene::new();
    for (overrides, words) in [
        ("num_layers=4096", "`num_layers` is `4096`, expected a number from 1 to 128"),
        ("relative_attention_num_buckets=16777214", "is `16777214`, expected a number from 4 to 65536"),
    ] {
        let overrides = format!("model.overrides={{{overrides}}}");
        scene.run(&["plan", "--set", &overrides]).expect_code(4).expect_words(&[words, "hint: "]);
    }
    // The rehearsal does not use the model's number of buckets: 65,536 of them for 4 heads would take many times as much memory as
    // everything else.
    let deep =
        "model.overrides={relative_attention_num_buckets=65536,relative_attention_max_distance=65537,num_layers=20}";
    let rss = |more: &[&str]| {
        let plan = [&["plan", "--json", "--memory-budget", "400MiB"], more].concat();
        let plan = scene.run(&plan).expect_code(0).json();
        plan["bill"]["rows"].as_array().unwrap()[0]["bytes"].as_u64().unwrap()
    };
    let (plain, deep) = (rss(&[]), rss(&["--set", deep]));
    assert!(deep < plain + (4 << 20), "{deep} {plain}");
}

#[test]
fn an_evaluation_that_is_interrupted_leaves_neither_its_predictions_nor_its_rows() {
    let scene = Scene::new();
    scene.run(&short(&["--max-steps", "2"])).expect_code(0);
    // Rows that are first converted to parquet: the converted files are removed, too.
    let rows: String = (0..2000).map(|n| format!("{{\"prompt\": \"after {n}\", \"response\": \"{n}\"}}\n")).collect();
    scene.write("rows.jsonl", rows);
    let temporary = scene.path("temporary");
    std::fs::create_dir(&temporary).unwrap();
    for name in ["INT", "TERM", "HUP"] {
        let eval = ["eval", "--model", "run/model", "--data", "rows.jsonl", "--predictions", "answers.jsonl"];
        let mut eval = command(&scene, &eval.map(str::to_owned));
        let mut child = eval.env("TMPDIR", &temporary).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        wait_for(&mut lines, "evaluating 2,000 rows");
        signal(&child, &[name]);
        let mut said = String::new();
        lines.read_to_string(&mut said).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(75), "{said}");
        assert!(said.contains("interrupted; nothing was written"), "{said}");
        assert_eq!(scene.names("temporary"), [""; 0]);
        assert_eq!(scene.names("."), ["rows.jsonl", "run", "temporary"]);
    }
}
