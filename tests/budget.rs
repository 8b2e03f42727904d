//! The budget: planned, printed, and refused if nothing fits.

use crate::run::{Ran, Scene, short};

/// The budget that a refusal's hint names.
fn named_in_hint(refused: &Ran) -> String {
    let hint = refused.err.lines().find(|line| line.starts_with("hint: ")).expect("a hint");
    hint.split_whitespace().find(|word| word.ends_with("MiB")).expect("a size").to_string()
}

#[test]
fn a_budget_that_nothing_fits_is_refused_with_the_smallest_that_would_do() {
    let scene = Scene::new();
    let refused = scene.run(&short(&["--memory-budget", "10MiB"])).expect_code(3);
    let smallest = named_in_hint(&refused);
    assert!(!scene.path("run/checkpoints").exists());
    scene.run(&short(&["--memory-budget", &smallest, "--set", "memory.micro_batch_samples=auto"])).expect_code(0);
}

#[test]
fn the_smallest_budget_that_plan_names_is_enough_for_plan_and_for_training() {
    let scene = Scene::new();
    let flags = |budget: &str| short(&["--set", "memory.micro_batch_samples=auto", "--memory-budget", budget]);
    let plan = |budget: &str| scene.run(&[vec!["plan".to_string()], flags(budget)].concat());
    let smallest = named_in_hint(&plan("10MiB").expect_code(3));
    plan(&smallest).expect_code(0);
    scene.run(&flags(&smallest)).expect_code(0);
}

#[test]
fn the_bill_has_what_each_of_many_threads_holds() {
    let scene = Scene::new();
    let ran = scene.run_under("env RAYON_NUM_THREADS=32", &["--max-steps", "20", "--output", "run"]).expect_code(0);
    let peak = scene.events("run", "end")[0]["peak_rss_bytes"].as_u64();
    let predicted = scene.events("run", "step")[0]["predicted_peak_bytes"].as_u64();
    assert!(peak.is_some() && peak <= predicted, "{peak:?} of {predicted:?} bytes\n{}", ran.err);
}

#[test]
fn plan_prints_the_bill_and_writes_nothing() {
    let scene = Scene::new();
    let words = [
        "Memory plan",
        "parameters",
        "gradients",
        "activations",
        "safety margin",
        "predicted peak",
        "micro_batch_samples",
    ];
    scene.run(&["plan", "--memory-budget", "2GiB"]).expect_code(0).expect_words(&words);
    let plan = scene.run(&["plan", "--json", "--memory-budget", "2GiB"]).expect_code(0).json();
    assert_eq!(plan["budget_bytes"], 2u64 << 30);
    for key in ["micro_batch_samples", "recompute_blocks", "predicted_peak_bytes", "smallest_budget_bytes"] {
        assert!(plan[key].is_number(), "{key} in {plan:#}");
    }
    assert!(scene.names(".").is_empty(), "{:?}", scene.names("."));
}

#[test]
fn a_smaller_budget_gives_a_finer_plan_and_never_a_larger_peak() {
    let scene = Scene::new();
    let plan = |budget: &str| {
        let arguments = ["plan", "--json", "--config", "t5.toml", "--memory-budget", budget];
        scene.run(&arguments).expect_code(0).json()
    };
    scene.write("t5.toml", "[model]\nconfig = \"t5-small\"\n[train]\nbatch_size = 64\n");
    let (large, small) = (plan("8GiB"), plan("900MiB"));
    assert!(small["predicted_peak_bytes"].as_u64() < Some(900 << 20));
    assert!(small["predicted_peak_bytes"].as_u64() <= large["predicted_peak_bytes"].as_u64());
    assert!(small["micro_batch_samples"].as_u64() <= large["micro_batch_samples"].as_u64());
}
