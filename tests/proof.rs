//! `train_low_mem proof`: it holds for this program, and fails for a program with a fault in the loss, in the resume or in the bill.
//!
//! A program with a fault is a script that changes the flags of some runs, and then becomes the program. So the fault is real: other
//! losses, another continuation, more memory than the plan says.

use std::os::unix::fs::PermissionsExt;

use crate::run::{Ran, Scene};

/// Tries the program, or another one, with as few steps as a kill and a resume need.
fn prove(scene: &Scene, more: &[&str]) -> (Ran, String) {
    let ran = scene.run(&[&["proof", "--steps", "2", "--seed", "1"][..], more].concat());
    let page = std::fs::read_to_string(scene.path("proof/proof.md")).unwrap_or_default();
    (ran, page)
}

/// A program whose runs have a fault. `$*` are the flags of a run.
fn with_fault(scene: &Scene, fault: &str) -> String {
    let script = format!(
        "#!/bin/sh\ncase \"$1\" in plan) exec {0} \"$@\";; esac\n{fault}\nexec {0} \"$@\"\n",
        env!("CARGO_BIN_EXE_train_low_mem")
    );
    let path = scene.write("faulty", script);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("a script that can run");
    path.display().to_string()
}

/// The promises of the page that hold, and those that fail.
fn verdicts(page: &str) -> (Vec<&str>, Vec<&str>) {
    let rows = |word: &str| -> Vec<&str> {
        page.lines()
            .filter(|line| line.contains(word))
            .filter_map(|line| line.split('|').nth(1))
            .map(str::trim)
            .collect()
    };
    (rows("| holds |"), rows("| **fails** |"))
}

const LOSS: &str = "a quarter of the memory gives the same losses";
const RESUME: &str = "a killed run resumes to the same bytes";
const BILL: &str = "memory stays within the bill and the budget";

#[test]
fn a_proof_holds_and_its_page_has_the_machine_the_version_and_the_numbers() {
    let scene = Scene::new();
    let (ran, page) = prove(&scene, &[]);
    ran.expect_code(0).expect_words(&["3 promises hold; the page is proof/proof.md"]);
    assert_eq!(verdicts(&page), (vec![LOSS, RESUME, BILL], vec![]), "{page}");
    for words in [
        "train_low_mem proof --steps 2 --seed 1",
        "after step 1; weights and optimizer state are equal",
        concat!("| program | train_low_mem ", env!("CARGO_PKG_VERSION")),
        "| processor |",
        "Each run was limited by ",
    ] {
        assert!(page.contains(words), "{words}:\n{page}");
    }
    // Its runs are runs like any other.
    assert_eq!(scene.events("proof/ample", "step").len(), 2);
    let again = scene.run(&["proof", "--output", "proof"]).expect_code(2);
    again.expect_words(&["proof: expected an empty directory", "hint: remove an earlier proof"]);
}

#[test]
fn a_proof_fails_where_a_smaller_budget_changes_the_losses() {
    let scene = Scene::new();
    let fault = "case \"$*\" in *proof/ample*) ;; *) set -- \"$@\" --set train.dropout=0.2;; esac";
    let (ran, page) = prove(&scene, &["--program", &with_fault(&scene, fault)]);
    ran.expect_code(1).expect_words(&["1 of 3 promises did not hold", "*.log"]);
    assert_eq!(verdicts(&page), (vec![RESUME, BILL], vec![LOSS]), "{page}");
}

#[test]
fn a_proof_fails_where_a_resumed_run_goes_on_differently() {
    let scene = Scene::new();
    let fault = "case \"$*\" in *--keep-training*) set -- \"$@\" --set optimizer.beta2=0.99;; esac";
    let (ran, page) = prove(&scene, &["--program", &with_fault(&scene, fault)]);
    ran.expect_code(1);
    assert_eq!(verdicts(&page), (vec![LOSS, BILL], vec![RESUME]), "{page}");
}

#[test]
fn a_proof_fails_where_a_run_takes_more_memory_than_its_bill() {
    let scene = Scene::new();
    // As at ample memory, whatever the budget is. A control group leaves it less than that, and more than its bill.
    let fault = "case \"$*\" in *proof/killed*) set -- \"$@\" --set memory.budget=1GiB;; esac";
    let (ran, page) = prove(&scene, &["--program", &with_fault(&scene, fault)]);
    ran.expect_code(1);
    let (holds, fails) = verdicts(&page);
    assert!(holds.contains(&LOSS) && fails.contains(&BILL), "{page}");
}

#[test]
fn a_program_that_cannot_start_and_a_python_without_torch_are_named_before_anything_is_made() {
    let scene = Scene::new();
    let (ran, _) = prove(&scene, &["--program", "none"]);
    ran.expect_code(2).expect_words(&["none: cannot start it", "hint: `--program` names a program like this one"]);
    let scene = Scene::new();
    let without =
        scene.write("python", "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1\n");
    std::fs::set_permissions(&without, std::fs::Permissions::from_mode(0o755)).expect("a script that can run");
    for (python, words) in
        [(without.display().to_string().as_str(), "No module named 'torch'"), ("no-python", "cannot start it")]
    {
        let (ran, _) = prove(&scene, &["--torch", "--python", python]);
        ran.expect_code(2).expect_words(&["--torch: ", words, "hint: `pip install torch transformers`"]);
        assert!(!scene.path("proof").exists());
    }
    let (ran, _) = prove(&scene, &["--steps", "1"]);
    ran.expect_code(2);
}
