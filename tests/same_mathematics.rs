//! Memory has no influence on the result of training: the same run at four budgets.

use serde_json::Value;

use crate::run::{Scene, short};

/// The run of the tests: dropout on, any number of samples at a time.
///
/// At a rate of 5e-2 training is chaotic: the same run in two cuts agrees to 1e-8 for 18 steps, and after 50 of them to 1e-1. At 3e-4 the
/// difference caused by summation order does not grow.
fn fifty_steps(more: &[&str]) -> Vec<String> {
    let fifty = [
        "--max-steps",
        "50",
        "--learn-rate",
        "3e-4",
        "--set",
        "train.batch_size=48",
        "--set",
        "memory.micro_batch_samples=auto",
        "--set",
        "train.eval_every_steps=0",
        "--set",
        "checkpoint.every_steps=50",
    ];
    short(&[&fifty[..], more].concat())
}

/// The steps of a run, and the cuts of its batches.
struct Followed {
    steps: Vec<Value>,
}

impl Followed {
    fn run(scene: &Scene, name: &str, more: &[&str]) -> Self {
        scene.run(&fifty_steps(&[&["--output", name], more].concat())).expect_code(0);
        let steps = scene.events(name, "step");
        assert_eq!(steps.len(), 50, "{name}");
        Self { steps }
    }

    fn number(&self, step: usize, key: &str) -> f64 {
        self.steps[step][key].as_f64().unwrap_or_else(|| panic!("{key} in {}", self.steps[step]))
    }

    /// Compares every step with that of the run at an ample budget.
    fn expect_same_as(&self, ample: &Self, name: &str) {
        for step in 0..50 {
            let key = "rows";
            assert_eq!(self.steps[step][key], ample.steps[step][key], "{name}: rows of step {}", step + 1);
            let (got, expected) = (self.number(step, "loss"), ample.number(step, "loss"));
            let error = (got - expected).abs() / expected;
            assert!(error <= 1e-5, "{name}, step {}: {got} and {expected}, {error:e}", step + 1);
        }
    }
}

/// The smallest budget that `plan` names, in MiB.
fn smallest_mib(scene: &Scene) -> u64 {
    let arguments = [vec!["plan".to_string()], fifty_steps(&["--memory-budget", "10MiB"])].concat();
    let refused = scene.run(&arguments).expect_code(3);
    let named = refused.err.split("--memory-budget ").nth(1).and_then(|rest| rest.split("MiB").next());
    named.expect("a budget").parse().expect("a number")
}

#[test]
fn four_budgets_see_the_same_rows_and_lose_the_same_at_every_one_of_fifty_steps() {
    let scene = Scene::new();
    let ample = Followed::run(&scene, "ample", &["--memory-budget", "2GiB"]);
    let plan = scene.events("ample", "plan").remove(0);
    let ample_mib = plan["smallest_budget_bytes"].as_u64().expect("a budget") >> 20;
    let smallest_mib = smallest_mib(&scene);
    let half_mib = (ample_mib / 2).max(smallest_mib.midpoint(ample_mib));
    let mut cuts = vec![ample.number(0, "micro_batches")];
    for (name, mib) in [("half", half_mib), ("smallest", smallest_mib)] {
        let run = Followed::run(&scene, name, &["--memory-budget", &format!("{mib}MiB")]);
        run.expect_same_as(&ample, name);
        cuts.push(run.number(0, "micro_batches"));
    }
    assert!(
        cuts[0] < cuts[1] && cuts[1] <= cuts[2],
        "{ample_mib}, {half_mib} and {smallest_mib} MiB cut into {cuts:?}"
    );
}

#[test]
fn a_run_that_shrinks_and_grows_on_its_way_sees_and_loses_the_same() {
    let scene = Scene::new();
    let ample = Followed::run(&scene, "ample", &["--memory-budget", "2GiB"]);
    // No memory is left beside the process for ten steps, and then there is plenty again.
    let [plenty, nothing] =
        [8u64 << 30, 0].map(|available| format!(r#"{{"total": 17179869184, "available": {available}}}"#));
    let machine: Vec<&str> = [vec![plenty.as_str(); 11], vec![&nothing; 10], vec![&plenty]].concat();
    scene.write("machine.json", format!("[{}]", machine.join(",")));
    let moved = Followed::run(&scene, "moved", &["--memory-budget", "2GiB", "--machine", "machine.json"]);
    moved.expect_same_as(&ample, "moved");
    let replans = scene.events("moved", "replan");
    let steps: Vec<Option<u64>> = replans.iter().map(|event| event["step"].as_u64()).collect();
    assert!(steps[0] == Some(10) && steps.last() == Some(&Some(39)), "{replans:#?}");
    let has_grown: Vec<bool> = replans.iter().map(|event| event["reason"].get("grown").is_some()).collect();
    assert_eq!(has_grown.iter().position(|&grown| grown), Some(replans.len() - 1), "{replans:#?}");
    let cuts = |step| moved.number(step, "micro_batches");
    assert!(cuts(10) > cuts(9) && cuts(38) > cuts(39) && cuts(39) == cuts(9), "{} {} {}", cuts(9), cuts(10), cuts(39));
}
