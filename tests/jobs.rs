//! Runs beside each other: `--wait`, `jobs`, and lists of runs.

use crate::run::{Scene, short};

/// Runs a shell line with a ledger of the scene's own.
fn with_ledger(scene: &Scene, line: &str) -> crate::run::Ran {
    std::fs::create_dir_all(scene.path("runtime")).expect("a directory");
    let program = env!("CARGO_BIN_EXE_train_low_mem");
    scene.shell(&format!("export XDG_RUNTIME_DIR=\"$PWD/runtime\"; program={program:?}; {line}"))
}

/// A line of the ledger for this test's own process.
fn reserved_by_this_process(bytes: u64) -> String {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux");
    let started = stat.rsplit_once(')').expect("a name").1.split_whitespace().nth(19).expect("a start").to_owned();
    let pid = std::process::id();
    format!(
        "[{{\"pid\":{pid},\"started\":{started},\"number\":0,\"arrived\":0,\"output\":\"other\",\"bytes\":{bytes},\"waits\":false}}]"
    )
}

#[test]
fn a_run_waits_for_memory_that_another_has_reserved_and_starts_when_it_is_free() {
    let scene = Scene::new();
    let ledger = scene.write("runtime/train_low_mem/ledger.json", reserved_by_this_process(1 << 50));
    let arguments = short(&["--wait"]).join("' '");
    let line = format!(
        "$program '{arguments}' > said 2>&1 & run=$!; \
         while ! grep -q 'waiting for memory' said && kill -0 $run; do sleep 0.1; done; cat said; \
         $program jobs; rm '{}'; wait $run",
        ledger.display()
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
