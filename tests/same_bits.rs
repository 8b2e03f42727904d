//! The bits of a run do not depend on the number of threads. They depend on the cut of a batch and the instruction set, and the run reports
//! these.

use crate::run::{ENDLESS, Ran, Scene, short};

const MODEL: &str = "run/model/model.safetensors";

/// The short run, in which only the budget determines the samples of a micro-batch.
fn unpinned(more: &[&str]) -> Vec<String> {
    let settings = [
        "--set",
        "memory.micro_batch_samples=auto",
        "--set",
        "memory.accumulation=micro-batch-major",
        "--set",
        "train.batch_size=48",
    ];
    short(&[&settings[..], more].concat())
}

/// Makes four steps of the run.
fn four_steps(scene: &Scene, arguments: &[String]) {
    let four = ["--set", "train.max_steps=4"].map(str::to_owned);
    scene.run(&[arguments, &four].concat()).expect_code(0);
}

fn on_threads(scene: &Scene, threads: usize, arguments: &[String]) -> Ran {
    scene.run_after(&format!("export RAYON_NUM_THREADS={threads}"), arguments)
}

#[test]
fn a_run_has_the_same_bits_on_one_two_three_and_four_threads() {
    let scene = Scene::new();
    let f32 = &[][..];
    let bf16 = &["--set", "train.precision=bf16"][..];
    let stochastic = &["--set", "train.precision=bf16", "--set", "train.master_weights=stochastic-rounding"][..];
    for (name, precision) in [("f32", f32), ("bf16", bf16), ("stochastic", stochastic)] {
        for accumulation in ["memory.accumulation=micro-batch-major", "memory.accumulation=layer-major"] {
            let more =
                ["--max-steps", "3", "--set", "train.max_steps=3", "--memory-budget", "200MiB", "--set", accumulation];
            let arguments = |output: &str| short(&[&more[..], precision, &["--output", output]].concat());
            on_threads(&scene, 1, &arguments("run")).expect_code(0);
            let (expected, losses) = (scene.read(MODEL), scene.events("run", "eval"));
            for threads in [2, 3, 4] {
                on_threads(&scene, threads, &arguments("other")).expect_code(0);
                let what = format!("{name}, {accumulation}, {threads} threads");
                assert!(scene.read("other/model/model.safetensors") == expected, "{what}: other weights");
                let of =
                    |events: &[serde_json::Value]| events.iter().map(|event| event["loss"].clone()).collect::<Vec<_>>();
                assert_eq!(of(&scene.events("other", "eval")), of(&losses), "{what}");
                assert_eq!(scene.events("other", "start")[0]["threads"], threads);
                std::fs::remove_dir_all(scene.path("other")).expect("the output of a run");
            }
            std::fs::remove_dir_all(scene.path("run")).expect("the output of a run");
        }
    }
}

#[test]
fn a_run_killed_on_two_threads_goes_on_to_the_same_bits_on_one_without_a_word() {
    let scene = Scene::new();
    let arguments = |more: &[&str]| short(&[&["--memory-budget", "200MiB"][..], &ENDLESS, more].concat());
    let mut running = scene.start_under("env RAYON_NUM_THREADS=2", &arguments(&[]));
    assert!(running.wait_for("saved run/checkpoints/step-"), "a checkpoint");
    running.kill();
    let last = scene.two_more_steps("run");
    on_threads(&scene, 2, &arguments(&["--set", &last, "--output", "whole"])).expect_code(0);
    let ran = on_threads(&scene, 1, &arguments(&["--set", &last, "--keep-training"])).expect_code(0);
    assert!(!ran.err.contains("bits"), "{}", ran.err);
    assert_eq!(scene.read(MODEL), scene.read("whole/model/model.safetensors"));
    let resumed = &scene.events("run", "resume")[0];
    assert_eq!(resumed["threads"], 1);
    assert!(resumed["instruction_set"].is_string() && resumed["kernels"].is_u64(), "{resumed}");
}

#[test]
fn a_smaller_budget_that_cuts_the_batch_otherwise_is_said_in_one_line() {
    let scene = Scene::new();
    four_steps(&scene, &unpinned(&["--memory-budget", "300MiB"]));
    let ran = scene.run(&unpinned(&["--memory-budget", "60MiB", "--keep-training"])).expect_code(0);
    let said: Vec<&str> = ran.err.lines().filter(|line| line.contains("bits")).collect();
    let [line] = said[..] else { panic!("{said:?}") };
    assert!(line.starts_with("warning: from here on the bits differ from those of an uninterrupted run: "), "{line}");
    assert!(
        line.contains("the batch is cut into micro-batches of ") && line.contains(" samples instead of 48"),
        "{line}"
    );
    assert!(line.ends_with("(budget 60 MiB)"), "{line}");
    let warnings = scene.events("run", "warning");
    let event = warnings.iter().find(|event| event["kind"] == "bits").expect("an event");
    assert_eq!(event["differences"][0]["setting"], "memory.micro_batch_samples", "{event}");
    assert_eq!(event["step"], 4);
}

#[test]
fn a_deterministic_run_refuses_another_cut_and_its_hint_leads_to_the_same_bits() {
    let scene = Scene::new();
    let run = |more: &[&str]| unpinned(&[&["--set", "run.deterministic=true"], more].concat());
    scene.run(&run(&["--memory-budget", "300MiB", "--output", "whole"])).expect_code(0);
    four_steps(&scene, &run(&["--memory-budget", "300MiB"]));
    let refused = scene.run(&run(&["--memory-budget", "60MiB", "--keep-training"])).expect_code(2).expect_words(&[
        "error: run/checkpoints/step-00000004: cannot resume with the same bits, and `run.deterministic` is true:",
        "memory.micro_batch_samples: was 48, now ",
        "hint: the smallest budget that works: --memory-budget ",
        "hint: `--set run.deterministic=false`",
    ]);
    let budget = refused.err.split("--memory-budget ").nth(1).and_then(|rest| rest.split_whitespace().next());
    let budget = budget.expect("a budget in the hint");
    assert_ne!(budget, "300MiB");
    let ran = scene.run(&run(&["--memory-budget", budget, "--keep-training"])).expect_code(0);
    assert!(!ran.err.contains("bits"), "{}", ran.err);
    assert_eq!(scene.read(MODEL), scene.read("whole/model/model.safetensors"));
}

#[test]
fn an_instruction_set_that_nobody_has_is_a_warning_and_tiles_in_software_are_one() {
    let scene = Scene::new();
    let bench = ["bench", "--model", "tiny", "--steps", "1", "--json"];
    let ran = scene.run_after("export LOW_MEM_T5_ISA=avx22", &bench).expect_code(0);
    assert!(ran.err.contains("warning: LOW_MEM_T5_ISA: expected one of software-tiles, portable"), "{}", ran.err);
    let ran = scene.run_after("export LOW_MEM_T5_ISA=software-tiles", &bench).expect_code(0);
    assert_eq!((ran.json()["instruction_set"].as_str(), ran.err.as_str()), (Some("software-tiles"), ""));
}

#[test]
fn another_instruction_set_is_said_or_refused() {
    let scene = Scene::new();
    let run = |more: &[&str]| short(&[&["--memory-budget", "200MiB"], more].concat());
    let portable = "export LOW_MEM_T5_ISA=portable";
    scene.run_after(portable, &run(&["--output", "whole"])).expect_code(0);
    if scene.events("whole", "start")[0]["instruction_set"] != "portable" {
        panic!("every machine has portable kernels");
    }
    let stopped = |arguments: &[String]| scene.run_after(portable, arguments).expect_code(0);
    stopped(&run(&["--max-steps", "4", "--set", "train.max_steps=4"]));
    let deterministic = run(&["--keep-training", "--set", "run.deterministic=true"]);
    let plain =
        scene.run(&["bench", "--model", "tiny", "--steps", "1", "--json"].map(String::from)).expect_code(0).json();
    if plain["instruction_set"] == "portable" {
        return;
    }
    scene.run(&deterministic).expect_code(2).expect_words(&[
        "instruction set: was portable, now ",
        "hint: set LOW_MEM_T5_ISA=portable in the environment to compute as before",
    ]);
    scene.run_after(portable, &deterministic).expect_code(0);
    assert_eq!(scene.read(MODEL), scene.read("whole/model/model.safetensors"));
    let on = ["--max-steps", "8", "--set", "train.max_steps=8", "--keep-training", "--set", "run.deterministic=false"];
    let ran = scene.run(&run(&on)).expect_code(0);
    assert!(ran.err.contains("from here on the bits differ") && ran.err.contains("instead of portable"), "{}", ran.err);
}

#[test]
fn a_deterministic_run_under_pressure_stops_instead_of_cutting_otherwise() {
    let scene = Scene::new();
    let run =
        |more: &[&str]| unpinned(&[&["--set", "run.deterministic=true", "--memory-budget", "2GiB"], more].concat());
    scene.run(&run(&["--output", "whole"])).expect_code(0);
    let [plenty, nothing] =
        [8u64 << 30, 0].map(|available| format!(r#"{{"total": 17179869184, "available": {available}}}"#));
    scene.write("machine.json", format!("[{plenty},{plenty},{plenty},{nothing}]"));
    scene.run(&run(&["--machine", "machine.json"])).expect_code(75).expect_words(&[
        "`run.deterministic` does not allow another cut of the batch; the run saves and stops",
        "interrupted at step 2",
    ]);
    assert!(scene.events("run", "replan").iter().all(|event| event["bits"] == serde_json::json!([])));
    scene.run(&run(&["--keep-training"])).expect_code(0);
    assert_eq!(scene.read(MODEL), scene.read("whole/model/model.safetensors"));
}
