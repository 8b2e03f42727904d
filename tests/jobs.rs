//! Several runs on one machine: `--wait`, `jobs`, and lists of runs.

use crate::run::{Scene, short};

/// Runs a shell line with a ledger of the scene's own.
pub fn with_ledger(scene: &Scene, line: &str) -> crate::run::Ran {
    std::fs::create_dir_all(scene.path("runtime")).expect("a directory");
    let program = env!("CARGO_BIN_EXE_train_low_mem");
    scene.shell(&format!("export XDG_RUNTIME_DIR=\"$PWD/runtime\"; program={program:?}; {line}"))
}

/// Another process in the ledger of a scene. Killing it frees the memory that it has reserved.
pub struct Other {
    process: std::process::Child,
}

impl Other {
    fn reserves(scene: &Scene, bytes: u64, more: &str) -> Self {
        Self::writes_to(scene, "other", bytes, more)
    }

    /// A process with this output directory.
    pub fn writes_to(scene: &Scene, output: &str, bytes: u64, more: &str) -> Self {
        let process = std::process::Command::new("sleep").arg("3600").spawn().expect("a process");
        let pid = process.id();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("Linux");
        let started = stat.rsplit_once(')').expect("a name").1.split_whitespace().nth(19).expect("a start").to_owned();
        let line = format!(
            "[{{\"pid\":{pid},\"started\":{started},\"number\":0,\"arrived\":0,\"output\":{},\"bytes\":{bytes},\"waits\":false{more}}}]",
            serde_json::json!(output)
        );
        scene.write("runtime/train_low_mem/ledger.json", line);
        Self { process }
    }

    fn pid(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_run_waits_for_memory_that_another_has_reserved_and_starts_when_it_is_free() {
    let scene = Scene::new();
    let other = Other::reserves(&scene, 1 << 50, "");
    let arguments = short(&["--wait"]).join("' '");
    let line = format!(
        "$program '{arguments}' > said 2>&1 & run=$!; \
         while ! grep -q 'waiting for memory' said && kill -0 $run; do sleep 0.1; done; cat said; \
         $program jobs; kill {}; wait $run",
        other.pid()
    );
    let ran = with_ledger(&scene, &line);
    ran.expect_code(0).expect_words(&["waits", "trains", "other"]);
    assert!(scene.path("run/model/model.safetensors").exists());
    with_ledger(&scene, "$program jobs").expect_code(0).expect_words(&["no run waits or trains"]);
}

#[test]
fn a_list_of_runs_is_trained_to_its_end_and_goes_on_where_it_stood() {
    let scene = Scene::new();
    let quoted: Vec<String> = short(&[])[..18].iter().map(|word| format!("{word:?}")).collect();
    let flags = quoted.join(", ");
    scene.write(
        "list.toml",
        format!(
            "at_once = 2\n[[run]]\noutput = \"runs/one\"\nflags = [{flags}]\n\
             [[run]]\noutput = \"runs/sweep\"\nflags = [{flags}]\npriority = 1\nsweep = {{ \"run.seed\" = [1, 2] }}\n"
        ),
    );
    let ran = with_ledger(&scene, "$program jobs run list.toml");
    ran.expect_code(0).expect_words(&["started runs/sweep/seed=1", "(3 of 3)", "runs/sweep/seed=2", "runs/one"]);
    for run in ["one", "sweep/seed=1", "sweep/seed=2"] {
        assert!(scene.path(&format!("runs/{run}/model/model.safetensors")).exists(), "{run}");
    }
    // Finished runs are left as they are.
    let again = with_ledger(&scene, "$program jobs run list.toml --json");
    let results: serde_json::Value = serde_json::from_str(&again.out).expect("JSON");
    assert_eq!(results.as_array().map(Vec::len), Some(3));
    assert!(results.as_array().expect("a list").iter().all(|run| run["exit_code"] == 0 && run["steps"] == 6));
    scene.write("list.toml", "[[run]]\noutput = \"a\"\n[[run]]\noutput = \"a\"\n");
    with_ledger(&scene, "$program jobs run list.toml").expect_code(2).expect_words(&["two runs write to a"]);
}

#[test]
fn a_run_that_a_killed_list_left_behind_is_waited_for() {
    let scene = Scene::new();
    let quoted: Vec<String> = short(&[])[..18].iter().map(|word| format!("{word:?}")).collect();
    scene.write("list.toml", format!("[[run]]\noutput = \"runs/one\"\nflags = [{}]", quoted.join(", ")));
    scene.write("runs/one/.lock", "");
    // The process holds the run's lock, as a run does.
    let line = "flock runs/one/.lock sh -c 'touch held; while [ ! -e free ]; do sleep 0.1; done' & \
                while [ ! -e held ]; do sleep 0.1; done; \
                $program jobs run list.toml > said 2>&1 & run=$!; \
                while ! grep -q 'another process trains it' said && kill -0 $run; do sleep 0.1; done; \
                touch free; wait $run; code=$?; cat said; exit $code";
    let ran = with_ledger(&scene, line);
    ran.expect_code(0).expect_words(&["runs/one: another process trains it", "started runs/one", "(1 of 1)"]);
}

#[test]
fn a_run_that_is_added_to_a_list_is_taken_up_while_the_list_is_trained() {
    let scene = Scene::new();
    let quoted: Vec<String> = short(&[])[..18].iter().map(|word| format!("{word:?}")).collect();
    scene.write("list.toml", format!("# Mine.\n[[run]]\noutput = \"runs/one\"\nflags = [{}]", quoted.join(", ")));
    let flags = short(&[])[..18].iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ");
    // The first run waits for memory that another process has reserved, until a further run has been added.
    let other = Other::reserves(&scene, 1 << 50, "");
    let line = format!(
        "$program jobs run list.toml > said 2>&1 & run=$!; \
         while ! grep -q 'waiting for memory' runs/one.log && kill -0 $run; do sleep 0.1; done; \
         $program jobs add list.toml --output runs/two --priority 1 --sweep 'run.seed=[1, 2]' -- {flags}; \
         while ! grep -q '2 runs more' said && kill -0 $run; do sleep 0.1; done; \
         kill {}; wait $run; code=$?; cat said; exit $code",
        other.pid()
    );
    let ran = with_ledger(&scene, &line);
    ran.expect_code(0).expect_words(&["added 2 runs to list.toml", "(3 of 3)", "runs/two/seed=1", "runs/two/seed=2"]);
    assert!(scene.path("runs/two/seed=2/model/model.safetensors").exists());
    let list = std::fs::read_to_string(scene.path("list.toml")).expect("the list");
    assert!(list.starts_with("# Mine.\n") && list.matches("[[run]]").count() == 2, "{list}");
    let twice = with_ledger(&scene, "$program jobs add list.toml --output runs/one");
    twice.expect_code(2).expect_words(&["a run writes to runs/one already"]);
    with_ledger(&scene, "$program jobs add new.toml --output runs/x --set run.seed=3 && cat new.toml")
        .expect_code(0)
        .expect_words(&["[[run]]", "output = \"runs/x\"", "run.seed=3"]);
}

#[test]
fn a_run_waits_for_disk_space_that_another_has_reserved() {
    let scene = Scene::new();
    let device = std::os::unix::fs::MetadataExt::dev(&std::fs::metadata(scene.path(".")).expect("the scene"));
    let disk = format!(",\"disk\":{{\"device\":{device},\"files\":{},\"kept\":0}}", 1u64 << 60);
    let other = Other::reserves(&scene, 1, &disk);
    let arguments = short(&["--wait"]).join("' '");
    let line = format!(
        "$program '{arguments}' > said 2>&1 & run=$!; \
         while ! grep -q 'waiting for disk space' said && kill -0 $run; do sleep 0.1; done; cat said; \
         $program jobs --json; kill {}; wait $run",
        other.pid()
    );
    let ran = with_ledger(&scene, &line);
    ran.expect_code(0).expect_words(&["\"disk_bytes\": 1152921504606846976", "waits", "0 B left by other runs"]);
    assert!(scene.path("run/model/model.safetensors").exists());
}
