//! The command under `mpirun`: needs an MPI, and the feature `mpi`. `trainer` and `collective` test the sums themselves, without either.

mod launcher;
#[expect(dead_code, reason = "made for every test of the command")]
mod run;

use run::{Ran, Scene, short};
use serde_json::Value;

/// Runs the command as this many processes.
fn together(scene: &Scene, processes: usize, arguments: &[String]) -> Ran {
    // With a measured rate, another plan would be the fastest on a busy machine. And `plan` has no other processes for measuring.
    let network = ["--set", "parallel.network_mbit=10000"].map(str::to_owned);
    measuring(scene, processes, &[&network[..], arguments].concat())
}

/// The same with a measured network.
fn measuring(scene: &Scene, processes: usize, arguments: &[String]) -> Ran {
    scene.run_under(&launcher::mpirun(scene, processes, &[]), arguments)
}

fn losses(scene: &Scene, run: &str) -> Vec<(u64, f64)> {
    let number = |line: &Value, key: &str| line[key].as_f64().expect("a number");
    scene.events(run, "step").iter().map(|line| (number(line, "step") as u64, number(line, "loss"))).collect()
}

#[test]
fn the_losses_of_two_and_four_processes_are_those_of_one() {
    let scene = Scene::new();
    let gelu = ["--set", "model.overrides={feed_forward_proj=\"gated-gelu\"}", "--set", "train.batch_size=7"];
    scene.run(&short(&[&gelu[..], &["--output", "one"]].concat())).expect_code(0);
    let expected = losses(&scene, "one");
    for (processes, run) in [(2, "two"), (4, "four")] {
        measuring(&scene, processes, &short(&[&gelu[..], &["--output", run]].concat())).expect_code(0);
        let got = losses(&scene, run);
        assert_eq!(got.len(), expected.len());
        for ((step, loss), (_, one)) in got.iter().zip(&expected) {
            assert!((loss - one).abs() <= 1e-5, "{processes} processes, step {step}: {loss} instead of {one}");
        }
        for key in ["rows", "samples", "target_tokens", "source_tokens", "epoch", "cut_targets"] {
            let of = |run: &str| scene.events(run, "step").iter().map(|line| line[key].clone()).collect::<Vec<_>>();
            assert_eq!(of(run), of("one"), "{key}");
        }
        let evaluated = |run: &str| scene.events(run, "eval")[0].clone();
        assert_eq!(evaluated(run)["loss"], evaluated("one")["loss"], "rows are shared out, and figures are exact");
    }
}

#[test]
fn virtual_shards_give_the_same_file_for_one_two_and_four_processes_and_after_a_resume_with_another_number() {
    let scene = Scene::new();
    let adamw = ["optimizer.name=adamw", "optimizer.learning_rate=1e-3", "parallel.virtual_shards=4"];
    let shards: Vec<&str> = adamw.iter().flat_map(|setting| ["--set", setting]).collect();
    let arguments = |more: &[&str]| short(&[&shards[..], more].concat());
    scene.run(&arguments(&["--output", "one"])).expect_code(0);
    let expected = scene.read("one/model/model.safetensors");
    for (processes, shard) in [(2, "none"), (4, "optimizer"), (2, "gradients"), (4, "weights")] {
        let (run, sharding) = (format!("{processes}-{shard}"), format!("parallel.shard={shard}"));
        together(&scene, processes, &arguments(&["--set", &sharding, "--output", &run])).expect_code(0);
        assert_eq!(scene.read(&format!("{run}/model/model.safetensors")), expected, "{processes} processes");
        let state = |run: &str| scene.read(&format!("{run}/checkpoints/step-00000006/optimizer.safetensors"));
        assert_eq!(state(&run), state("one"));
    }
    // 1, 4 and 2 processes, two steps each.
    let until = |steps: &str| arguments(&["--keep-training", "--max-steps", steps]);
    scene.run(&arguments(&["--max-steps", "2"])).expect_code(0);
    together(&scene, 4, &until("4")).expect_code(0);
    together(&scene, 2, &[until("6"), vec!["--set".into(), "parallel.shard=weights".into()]].concat()).expect_code(0);
    assert_eq!(scene.read("run/model/model.safetensors"), expected);
}

#[test]
fn a_model_of_gemmas_blocks_is_the_same_file_for_any_number_of_processes_and_sends_what_the_plan_said() {
    let scene = Scene::new();
    let settings = [
        "model.config=tiny-gemma",
        "optimizer.name=adamw",
        "optimizer.learning_rate=1e-3",
        "parallel.virtual_shards=4",
        "train.max_steps=3",
    ];
    let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
    let arguments = |more: &[&str]| short(&[&settings[..], more].concat());
    scene.run(&arguments(&["--output", "one"])).expect_code(0);
    let expected = scene.read("one/model/model.safetensors");
    for (processes, shard) in [(2, "none"), (4, "optimizer"), (2, "gradients"), (2, "weights"), (4, "weights")] {
        let (run, sharding) = (format!("{processes}-{shard}"), format!("parallel.shard={shard}"));
        together(&scene, processes, &arguments(&["--set", &sharding, "--output", &run])).expect_code(0);
        assert!(scene.read(&format!("{run}/model/model.safetensors")) == expected, "{run}");
        let last = &scene.events(&run, "step")[2];
        let [peak, predicted] =
            ["peak_rss_bytes", "predicted_peak_bytes"].map(|key| last[key].as_u64().expect("bytes"));
        assert!(peak <= predicted + (4 << 20), "{run}: {peak} of {predicted} bytes");
        assert_sent_is_planned(&scene, &run);
    }
}

#[test]
fn layer_by_layer_every_stage_of_sharding_has_the_bits_of_none() {
    let scene = Scene::new();
    let settings = ["memory.accumulation=layer-major", "model.overrides={feed_forward_proj=\"gated-gelu\"}"];
    let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
    scene.run(&short(&[&settings[..], &["--output", "one"]].concat())).expect_code(0);
    let expected = losses(&scene, "one");
    let mut files = Vec::new();
    let cases = ["none", "optimizer", "gradients", "weights"].map(|shard| [(shard, "none"), (shard, "block")]);
    for (shard, overlap) in cases.into_iter().flatten() {
        let [sharding, overlapped] =
            [format!("parallel.shard={shard}"), format!("memory.communication_overlap={overlap}")];
        let run = &format!("{shard}-{overlap}");
        let arguments = [&settings[..], &["--set", &sharding, "--set", &overlapped, "--output", run]].concat();
        together(&scene, 2, &short(&arguments)).expect_code(0);
        for ((step, loss), (_, one)) in losses(&scene, run).iter().zip(&expected) {
            assert!((loss - one).abs() <= 1e-5, "{run}, step {step}: {loss} instead of {one}");
        }
        for line in scene.events(run, "step") {
            let of = |key: &str| line[key].as_f64().expect("a number");
            let (all, waited, hidden) =
                (of("communication_ms"), of("communication_wait_ms"), of("communication_hidden"));
            assert!(all > 0.0 && waited >= 0.0 && (0.0..=1.0).contains(&hidden), "{line}");
        }
        // Answers and losses of an evaluation, in which processes receive weights from each other.
        let evaluated = |run: &str| {
            let of = &scene.events(run, "eval")[0];
            [of["loss"].clone(), of["bleu"].clone(), of["exact_match"].clone()]
        };
        assert_eq!(evaluated(run)[1..], evaluated("none-none")[1..], "{run}");
        files.push(scene.read(&format!("{run}/model/model.safetensors")));
    }
    assert!(files.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn an_adapter_beside_a_quantised_base_is_trained_by_two() {
    let scene = Scene::new();
    scene.run(&short(&["--output", "base"])).expect_code(0);
    let settings = ["model.init_from=base/model", "model.base_precision=int8", "parallel.virtual_shards=2"];
    let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
    let arguments = |output: &str| short(&[&settings[..], &["--lora", "--output", output]].concat());
    scene.run(&arguments("one")).expect_code(0);
    together(&scene, 2, &arguments("two")).expect_code(0);
    let adapter = |run: &str| scene.read(&format!("{run}/adapter/adapter_model.safetensors"));
    assert_eq!(adapter("two"), adapter("one"));
}

#[test]
fn beside_a_frozen_model_two_processes_write_the_file_of_one() {
    let scene = Scene::new();
    scene.run(&short(&["--output", "frozen", "--max-steps", "2"])).expect_code(0);
    let row = |number: usize| {
        let [prompt, answer] = ["red", "blue"].map(|word| format!("{word} ").repeat(1 + number % 5));
        let row = serde_json::json!({"prompt": format!("{prompt}{number}"), "response": answer, "chosen": answer, "rejected": prompt});
        format!("{row}\n")
    };
    scene.write("rows.jsonl", (0..8).map(row).collect::<String>());
    let usual = ["data.train=rows.jsonl", "train.batch_size=4", "train.epochs=9", "parallel.virtual_shards=2"];
    let teacher = ["distill.teacher=frozen/model"];
    let largest = ["distill.teacher=frozen/model", "distill.top_k=6"];
    let reference = ["preference.loss=dpo", "preference.reference=frozen/model", "train.dropout=0"];
    for (name, settings) in [("teacher", &teacher[..]), ("largest", &largest), ("reference", &reference)] {
        let settings: Vec<&str> = usual.iter().chain(settings).flat_map(|setting| ["--set", setting]).collect();
        let arguments = |run: &str, more: &[&str]| short(&[&settings[..], &["--output", run], more].concat());
        let [one, two, again] = ["one", "two", "again"].map(|run| format!("{name}-{run}"));
        scene.run(&arguments(&one, &[])).expect_code(0);
        together(&scene, 2, &arguments(&two, &[])).expect_code(0);
        let file = |run: &str| scene.read(&format!("{run}/model/model.safetensors"));
        assert_eq!(file(&two), file(&one), "{name}");
        // One process, then two.
        scene.run(&arguments(&again, &["--max-steps", "3"])).expect_code(0);
        together(&scene, 2, &arguments(&again, &["--keep-training"])).expect_code(0);
        assert_eq!(file(&again), file(&one), "{name}");
        assert_eq!(scene.path(&format!("{two}/teacher-logits")).exists(), name == "largest");
    }
}

#[test]
fn one_process_that_fails_ends_all_and_says_which_it_was() {
    let scene = Scene::new();
    // A single process would accept this budget. The sum for two processes exceeds any machine's memory.
    let ran = together(&scene, 2, &short(&["--memory-budget", "900TiB"]));
    ran.expect_code(3).expect_words(&["2 processes on", "`--memory-budget` is for each process"]);
    let ran = together(&scene, 2, &short(&["--set", "parallel.virtual_shards=1"]));
    ran.expect_code(2)
        .expect_words(&["`parallel.virtual_shards`: expected at least the number of processes, 2, got 1"]);
    assert!(!scene.path("run/model").exists());
}

/// The bytes of the rows that processes divide among them.
fn divided(plan: &Value) -> Vec<(String, u64)> {
    let rows = plan["bill"]["rows"].as_array().expect("rows").iter();
    let row = |row: &Value| Some((row["name"].as_str()?.to_owned(), row["bytes"].as_u64()?));
    let names = ["parameters", "gradients", "optimizer state", "communication"];
    rows.filter_map(row).filter(|(name, _)| names.contains(&name.as_str())).collect()
}

#[test]
fn a_plan_for_two_processes_has_the_bill_of_their_run() {
    let scene = Scene::new();
    let mut seen = Vec::new();
    for shard in ["none", "optimizer", "gradients", "weights"] {
        let sharding = format!("parallel.shard={shard}");
        let set = ["--set", "optimizer.name=adamw", "--set", "optimizer.learning_rate=1e-3", "--set", &sharding];
        let arguments = short(&[&set[..], &["--output", shard]].concat());
        together(&scene, 2, &arguments).expect_code(0);
        let run = divided(&scene.events(shard, "plan")[0]);
        let planned = [&["plan", "--json", "--processes", "2"].map(str::to_owned)[..], &arguments].concat();
        let planned: Value = serde_json::from_str(&scene.run(&planned).expect_code(0).out).expect("JSON");
        assert_eq!(divided(&planned), run, "{shard}");
        assert!(run.iter().any(|(name, _)| name == "communication"), "{run:?}");
        seen.push(run.iter().map(|(_, bytes)| bytes).sum::<u64>());
    }
    assert!(seen[1] < seen[0], "half of the optimizer's state is elsewhere: {seen:?}");
}

#[test]
fn the_bytes_that_a_process_sends_are_those_that_the_plan_said() {
    let scene = Scene::new();
    let twice = ["memory.accumulation=layer-major", "memory.kept_gradient_blocks=0", "memory.gradient_offload=none"];
    for (number, (shard, more)) in [
        ("none", &[][..]),
        ("none", &["parallel.virtual_shards=4"]),
        ("none", &twice),
        ("optimizer", &[]),
        ("gradients", &twice),
        ("weights", &twice),
        (
            "weights",
            &["parallel.virtual_shards=4", "memory.accumulation=micro-batch-major", "memory.micro_batch_samples=1"],
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let sharding = format!("parallel.shard={shard}");
        let set =
            [&["optimizer.name=adamw", "optimizer.learning_rate=1e-3", "train.batch_size=8", &sharding], more].concat();
        let set: Vec<&str> = set.iter().flat_map(|setting| ["--set", setting]).collect();
        let output = number.to_string();
        together(&scene, 2, &short(&[&set[..], &["--output", &output]].concat())).expect_code(0);
        assert_sent_is_planned(&scene, &output);
    }
}

/// Compares the bytes that a step of a run sent with those of its plan.
#[track_caller]
fn assert_sent_is_planned(scene: &Scene, run: &str) {
    let plan = &scene.events(run, "plan")[0];
    let planned = plan["step_sent_bytes"].as_f64().expect("bytes");
    let sent: Vec<f64> =
        scene.events(run, "step").iter().map(|line| line["sent_bytes"].as_f64().expect("bytes")).collect();
    // The count is that of the first process. The plan is that of the process that sends most.
    let counted = sent[1] - sent[0];
    assert!((planned / counted - 1.0).abs() < 0.001, "{run}: {planned} planned, {counted} sent: {plan}");
}
