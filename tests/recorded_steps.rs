//! Micro-batches that a card launches as graphs: the bits of a run, its memory, its requests, and models and runs without graphs.

use serde_json::Value;

use crate::on_a_card::{arguments, emulated_scene, of_steps};
use crate::run::{Ran, Scene};
use crate::{answers, on_card, report, with};

/// Nine steps, so that graphs are launched: they begin with the fifth or sixth step.
const LONG: [&str; 12] = [
    "--max-steps",
    "9",
    "--set",
    "train.eval_samples=1",
    "--set",
    "train.eval_generate_samples=0",
    "--set",
    "checkpoint.every_steps=100",
    "--set",
    "memory.accumulation=micro-batch-major",
    "--set",
    "memory.loss_chunk_rows=2",
];

/// All samples are cut to the same lengths, so that micro-batches are of one kind.
const WHOLE: [&str; 4] = ["--set", "data.max_source_tokens=4", "--set", "data.max_target_tokens=2"];

const BF16: [&str; 4] = ["--precision", "bf16", "--set", "train.master_weights=stochastic-rounding"];

/// A run, its losses and norms, the bytes of its model's file, and the counts of the card.
fn trained(scene: &Scene, variables: &[(&str, &str)], run: &str, way: &[&str]) -> (Ran, Vec<Vec<f64>>, Vec<u8>, Value) {
    let file = format!("{run}.json");
    let all = [&[("REPORT", file.as_str()), ("LOW_MEM_T5_GRAPHS", "all")], variables].concat();
    let ran = on_card(scene, &all, &[&LONG[..], way, &["--output", run]].concat()).expect_code(0);
    let numbers = ["loss", "grad_norm"].map(|key| of_steps(scene, run, key)).to_vec();
    let is_adapter = scene.path(&format!("{run}/adapter")).exists();
    let model = if is_adapter { "adapter/adapter_model.safetensors" } else { "model/model.safetensors" };
    (ran, numbers, scene.read(&format!("{run}/{model}")), report(scene, &file))
}

#[test]
fn steps_of_few_launches_have_the_bits_of_steps_launched_kernel_by_kernel() {
    let Some(scene) = emulated_scene() else { return };
    scene.run(&arguments(&["--output", "base", "--max-steps", "2"])).expect_code(0);
    let halves = ["--set", "memory.micro_batch_samples=2"];
    let relu = "model.overrides={num_layers=2, num_decoder_layers=1, d_model=64, d_ff=96, feed_forward_proj=\"relu\"}";
    let adapter = ["--lora", "--set", "model.init_from=base/model", "--set", "lora.dropout=0.1"];
    let casts = ["--precision", "bf16", "--set", "memory.weight_copies=none", "--set", "memory.recompute_blocks=1"];
    let ways: [(&str, &[&str]); 7] = [
        ("f32", &[]),
        ("micro-batches", &halves),
        ("without-dropout", &["--set", "train.dropout=0"]),
        ("relu", &["--set", relu, "--set", "optimizer.name=adamw", "--set", "optimizer.learning_rate=1e-3"]),
        ("adapter", &adapter),
        ("bf16", &[&BF16[..], &halves].concat()),
        ("casts", &casts),
    ];
    for (name, way) in ways {
        let way = [&WHOLE[..], way].concat();
        let run =
            |place: &str, variables: &[(&str, &str)]| trained(&scene, variables, &format!("{name}-{place}"), &way);
        let (graphs, numbers, model, counts) = run("graphs", &[]);
        assert!(!graphs.err.contains("kernel by kernel"), "{name}: {}", graphs.err);
        // Without graphs, with a driver that cannot record, and with streams in another order. Cases other than bf16 try only the first.
        let others: [(&str, &[(&str, &str)]); 3] = [
            ("none", &[("LOW_MEM_T5_GRAPHS", "none")]),
            ("refused", &[("GRAPHS", "none")]),
            ("late", &[("STREAMS", "early")]),
        ];
        for (place, variables) in &others[..if name == "bf16" { 3 } else { 1 }] {
            let (ran, of_each, of_model, of_run) = run(place, variables);
            assert_eq!(of_each, numbers, "{name}, {place}");
            assert!(of_model == model, "{name}, {place}: the model has other bits");
            assert_eq!(of_run["graph_launches"] == 0, *place != "late", "{name}, {place}: {of_run}");
            assert_eq!(ran.err.contains("kernel by kernel"), *place == "refused", "{name}, {place}: {}", ran.err);
        }
        println!("{name}: {} graphs, {} launches of them", counts["graphs"], counts["graph_launches"]);
        assert!(counts["graph_launches"].as_u64() > Some(3), "{name}: {counts}");
        assert_eq!((&counts["left_bytes"], &counts["graph_allocations"]), (&0.into(), &0.into()), "{name}");
        let last = &scene.events(&format!("{name}-graphs"), "end")[0];
        let [peak, predicted] =
            ["device_peak_bytes", "predicted_device_peak_bytes"].map(|key| last[key].as_u64().expect("bytes"));
        println!("{name}: {peak} of {predicted} bytes");
        assert!(peak <= predicted, "{name}: {peak} of {predicted} bytes");
    }
}

#[test]
fn a_pin_has_micro_batches_recorded_and_the_variable_wins() {
    let Some(scene) = emulated_scene() else { return };
    let pinned = |run: &str, variables: &[(&str, &str)], pin: &str| {
        let (file, pin) = (format!("{run}.json"), format!("memory.recorded_micro_batches={pin}"));
        let variables = [&[("REPORT", file.as_str())], variables].concat();
        let flags = [&LONG[..], &WHOLE, &["--set", &pin, "--output", run]].concat();
        let ran = on_card(&scene, &variables, &flags).expect_code(0);
        let launches = report(&scene, &file)["graph_launches"].as_u64().expect("a count");
        (launches, ran, of_steps(&scene, run, "loss"), scene.read(&format!("{run}/model/model.safetensors")))
    };
    let says = |ran: &Ran| {
        // Wherever lines are broken.
        let words: Vec<&str> = ran.out.split_whitespace().collect();
        words.join(" ").contains("micro-batches recorded")
    };
    let (recorded, ran, losses, model) = pinned("all", &[], "all");
    assert!(says(&ran), "{recorded}: {}", ran.out);
    let variables = [("LOW_MEM_T5_GRAPHS", "tokens"), ("LOW_MEM_T5_GRAPHS", "all")];
    let others = [("tokens", Some(variables[0]), "all"), ("none", None, "none"), ("asked", Some(variables[1]), "none")];
    // Tokens of the answers at the end are recorded, too.
    let mut of_tokens = None;
    for (run, variable, pin) in others {
        let (launches, ran, of_run, of_model) = pinned(run, variable.as_slice(), pin);
        let expected = if run == "asked" { recorded } else { *of_tokens.get_or_insert(launches) };
        assert_eq!(launches, expected, "{run}");
        assert!(run == "asked" || launches + 3 < recorded, "{run}: {launches} of {recorded}");
        assert_eq!(says(&ran), run == "asked", "{run}: {}", ran.out);
        assert!(of_run == losses && of_model == model, "{run}: other bits");
    }
    // The run's file has the pin.
    let plan = scene.run(&["plan", "--json", "--config", "all/resolved.toml"]).expect_code(0).json();
    assert_eq!(plan["repeats"], true, "{plan}");
}

/// The steps of `bench` over four samples, and the counts of the card.
fn benched(scene: &Scene, variables: &[(&str, &str)], more: &[&str]) -> (Ran, Value) {
    let shape = ["--batch", "4", "--source-tokens", "6", "--target-tokens", "5"];
    let flags = [&["bench", "--device", "cuda", "--model", "tiny"], &shape[..], more].concat();
    let variables = [&[("REPORT", "bench.json"), ("LOW_MEM_T5_GRAPHS", "all")], variables].concat();
    (scene.run_under(&with(&variables), &flags).expect_code(0), report(scene, "bench.json"))
}

#[test]
fn timed_steps_of_a_bench_launch_every_micro_batch_as_graphs() {
    let Some(scene) = emulated_scene() else { return };
    // One, two and four micro-batches a step, of one kind and of two; and three, the last of which is smaller.
    for (samples, micro_batches) in [("4", 1), ("2", 2), ("1", 4), ("3", 2)] {
        let bench = |steps: &str| {
            let (ran, counts) = benched(&scene, &[], &["--json", "--steps", steps, "--micro-batch", samples]);
            (ran.json(), counts["graph_launches"].as_u64().expect("a count"))
        };
        let ((one, before), (three, after)) = (bench("1"), bench("3"));
        println!("{samples}: {} steps of warm-up", one["warm_up_steps"]);
        for said in [&one, &three] {
            assert_eq!(said["micro_batches"], micro_batches, "{said}");
            assert_eq!(said["graph_micro_batches"], micro_batches, "{said}");
        }
        // Forward and backward of each micro-batch.
        assert_eq!(after - before, 2 * 2 * micro_batches, "{samples}");
        assert_eq!(one["warm_up_steps"], three["warm_up_steps"], "{samples}");
    }
    let says = |ran: &Ran, text: &str| ran.out.contains(&format!("micro-batches launched as graphs: {text} a step"));
    let (ran, _) = benched(&scene, &[], &["--steps", "1", "--micro-batch", "2"]);
    assert!(says(&ran, "2 of 2") && !ran.err.contains("kernel by kernel"), "{} {}", ran.out, ran.err);
    // With a driver that cannot record, there is one warning, and no more steps than necessary.
    let (ran, _) = benched(&scene, &[("GRAPHS", "none")], &["--steps", "3", "--micro-batch", "2"]);
    assert!(says(&ran, "0 of 2"), "{}", ran.out);
    assert_eq!(ran.err.matches("kernel by kernel").count(), 1, "{}", ran.err);
    // A plan without recordings does not mention graphs.
    let none = [("LOW_MEM_T5_GRAPHS", "none")];
    let (ran, counts) = benched(&scene, &none, &["--json", "--steps", "1", "--micro-batch", "2"]);
    let said = ran.json();
    assert_eq!((&said["graph_micro_batches"], &said["warm_up_steps"]), (&Value::Null, &1.into()), "{said}");
    assert_eq!(counts["graph_launches"], 0);
}

#[test]
fn steps_of_uneven_rows_that_resume_have_the_same_bits() {
    let Some(scene) = emulated_scene() else { return };
    let way = ["--set", "memory.micro_batch_samples=2", "--set", "train.batch_size=8"];
    let (_, numbers, model, counts) = trained(&scene, &[], "whole", &way);
    let (_, of_each, of_model, _) = trained(&scene, &[("LOW_MEM_T5_GRAPHS", "none")], "each", &way);
    assert!(numbers == of_each && model == of_model, "{numbers:?} and {of_each:?}");
    println!("uneven: {} graphs, {} launches of them", counts["graphs"], counts["graph_launches"]);
    // Saved in its sixth step, and then killed. Graphs existed by then; the resumed run must record its own.
    let saves = ["--set", "checkpoint.every_steps=6", "--output", "part"];
    let part = [&LONG[..], &way, &saves].concat();
    let all = arguments(&[&["--device", "cuda"], &part[..]].concat());
    let mut running = scene.start_under("env LOW_MEM_T5_GRAPHS=all", &all);
    assert!(running.wait_for("step 7/9"), "it was killed too late");
    running.signal("KILL");
    running.end();
    on_card(&scene, &[("LOW_MEM_T5_GRAPHS", "all")], &[&part[..], &["--keep-training"]].concat()).expect_code(0);
    assert!(scene.read("part/model/model.safetensors") == model, "other bits after a resumed run");
}

#[test]
fn a_recorded_step_asks_the_card_for_what_its_plan_says() {
    let Some(scene) = emulated_scene() else { return };
    for (name, way) in [("one", &[][..]), ("two", &["--set", "memory.micro_batch_samples=2"]), ("bf16", &BF16)] {
        let counts = |steps: &str| {
            let run = format!("{name}-{steps}");
            let way = [&WHOLE[..], way, &["--max-steps", steps]].concat();
            (trained(&scene, &[], &run, &way).3, scene.events(&run, "plan")[0]["device_step"].clone())
        };
        let ((eight, predicted), (nine, _)) = (counts("8"), counts("9"));
        let counted = |key: &str| nine[key].as_u64().expect("a count") - eight[key].as_u64().expect("a count");
        let of_plan = |key: &str| predicted[key].as_u64().expect("a count");
        println!("{name}: {predicted}; {} nodes of graphs", counted("graph_nodes"));
        for (key, planned) in [
            ("launches", "launches"),
            ("products", "products"),
            ("downloads", "downloads"),
            ("graph_launches", "graphs"),
        ] {
            assert_eq!(counted(key), of_plan(planned), "{name}: {key} of {nine}");
        }
        assert!(counted("uploads") <= of_plan("uploads"), "{name}: uploads of {predicted}");
        assert_eq!(counted("graphs"), 0, "{name}: nothing is recorded any more");
        // Each micro-batch is a graph of forward and one of backward.
        let step = &scene.events(&format!("{name}-9"), "step")[8];
        let graph_micro_batches = step["graph_micro_batches"].as_u64().expect("a count");
        assert_eq!(
            (graph_micro_batches, Some(2 * graph_micro_batches)),
            (counted("graph_launches") / 2, predicted["graphs"].as_u64())
        );
        assert_eq!(step["micro_batches"], graph_micro_batches, "{step}");
    }
}

#[test]
fn steps_between_saves_have_the_same_bits() {
    let Some(scene) = emulated_scene() else { return };
    // Gradients are freed before a save, and allocated again in the step after it.
    let saves = [&WHOLE[..], &["--set", "checkpoint.every_steps=2"]].concat();
    let of_products = [&BF16[..], &["--set", "train.gradient_precision=bf16"]].concat();
    for (name, way) in [("f32", &[][..]), ("bf16", &of_products)] {
        let way = [&saves[..], way].concat();
        let (ran, numbers, model, counts) = trained(&scene, &[], &format!("{name}-graphs"), &way);
        let none = [("LOW_MEM_T5_GRAPHS", "none")];
        let (_, of_each, of_model, _) = trained(&scene, &none, &format!("{name}-none"), &way);
        assert_eq!(numbers, of_each, "{name}");
        assert!(model == of_model, "{name}: the model has other bits");
        assert!(!ran.err.contains("kernel by kernel"), "{name}: {}", ran.err);
        assert!(counts["graph_launches"].as_u64() > Some(3), "{name}: {counts}");
    }
}

#[test]
fn models_without_a_kernel_for_each_operation_are_not_recorded_and_nobody_is_warned() {
    let Some(scene) = emulated_scene() else { return };
    scene.run(&arguments(&["--output", "base", "--max-steps", "2"])).expect_code(0);
    let large_heads =
        "model.overrides={num_layers=1, num_decoder_layers=1, d_model=64, d_ff=96, num_heads=1, d_kv=136}";
    let dora = ["--lora", "--set", "model.init_from=base/model", "--set", "lora.dora=true"];
    // Tokens are recorded from the third one on.
    let answered = ["--set", "train.eval_generate_samples=2", "--set", "train.eval_max_new_tokens=8"];
    for (name, way) in [("heads", &["--set", large_heads][..]), ("dora", &dora)] {
        let way = [&WHOLE[..], way, &answered, &["--max-steps", "6"]].concat();
        let (ran, .., counts) = trained(&scene, &[], name, &way);
        assert!(!ran.err.contains("kernel by kernel"), "{name}: {}", ran.err);
        assert_eq!((&counts["graphs"], &counts["graph_launches"]), (&0.into(), &0.into()), "{name}: {counts}");
        let rows = scene.events(name, "plan")[0]["bill"]["device"]["rows"].to_string();
        assert!(!rows.contains("graphs"), "{name}: {rows}");
    }
    let [(expected, _), (got, _)] = ["cpu", "cuda"].map(|device| answers(&scene, "heads/model", device, 8, &[]));
    assert_eq!(got, expected);
}
