//! The command on a card: a real one, or the emulated one (`LOW_MEM_T5_CUDA=emulated`, docs/gpu-testing.md). Needs the feature `cuda`.

mod faster_device;
mod on_a_card;
mod parts_of_tensors;
mod ready_updates;
mod recorded_steps;
#[expect(dead_code, reason = "made for every test of the command")]
mod run;
mod wide_models;

use on_a_card::{arguments, assert_within, emulated_scene, of_steps};
use run::{Ran, Scene};
use serde_json::Value;

/// A launcher that sets variables for a command. Variables of the program have their full names; those of the emulated card come without
/// their prefix.
fn with(variables: &[(&str, &str)]) -> String {
    let set = |&(name, value): &(&str, &str)| match name.starts_with("LOW_MEM_T5_") {
        true => format!("{name}={value}"),
        false => format!("LOW_MEM_T5_EMULATED_{name}={value}"),
    };
    ["env".to_owned()].into_iter().chain(variables.iter().map(set)).collect::<Vec<_>>().join(" ")
}

/// Runs the command on the card, with variables as for [`with`].
fn on_card(scene: &Scene, variables: &[(&str, &str)], more: &[&str]) -> Ran {
    scene.run_under(&with(variables), &arguments(&[&["--device", "cuda"], more].concat()))
}

#[test]
fn a_run_on_a_card_is_that_of_the_cpu_and_the_same_twice() {
    let scene = Scene::new();
    let of_run = "model.init_from=f32-cpu/model";
    let in_codes = |precision| ["--lora", "--set", of_run, "--set", "lora.dropout=0.1", "--set", precision];
    let (int8, nf4) = (in_codes("model.base_precision=int8"), in_codes("model.base_precision=nf4"));
    let ways: [(&str, &[&str], f64); 9] = [
        ("f32", &[], 1e-5),
        ("layer-major", &["--set", "memory.accumulation=layer-major"], 1e-5),
        ("adamw", &["--set", "optimizer.name=adamw", "--set", "optimizer.learning_rate=1e-3"], 1e-5),
        ("adapter", &["--lora", "--set", of_run], 1e-5),
        ("int8", &int8, 1e-5),
        ("nf4", &nf4, 1e-5),
        ("nf4-dora", &[&nf4[..], &["--set", "lora.dora=true"]].concat(), 1e-5),
        ("nf4-bf16", &[&nf4[..], &["--precision", "bf16"]].concat(), 2e-2),
        ("bf16", &["--precision", "bf16", "--set", "train.master_weights=stochastic-rounding"], 2e-2),
    ];
    for (name, way, tolerance) in ways {
        let [cpu, card, again] = ["cpu", "card", "again"].map(|device| format!("{name}-{device}"));
        scene.run(&arguments(&[way, &["--output", &cpu]].concat())).expect_code(0);
        on_card(&scene, &[], &[way, &["--output", &card]].concat()).expect_code(0);
        on_card(&scene, &[("ORDER", "random")], &[way, &["--output", &again]].concat()).expect_code(0);
        let last = &scene.events(&card, "end")[0];
        let [peak, predicted] =
            ["device_peak_bytes", "predicted_device_peak_bytes"].map(|key| last[key].as_u64().expect("bytes"));
        assert!(peak <= predicted, "{name}: {peak} of {predicted} bytes");
        assert!(scene.events(&card, "step")[0].get("copy_wait_ms").is_none(), "{name}: nothing is off the GPU");
        for key in ["loss", "grad_norm"] {
            let of = |run: &str| of_steps(&scene, run, key);
            assert_within(&format!("{name}: {key}"), &of(&card), &of(&cpu), tolerance);
            assert_eq!(of(&card), of(&again), "{name}: {key}");
        }
        let rows = |run: &str| scene.events(run, "step").iter().map(|line| line["rows"].clone()).collect::<Vec<_>>();
        assert_eq!(rows(&card), rows(&cpu), "{name}");
        let loss =
            |run: &str| scene.events(run, "eval").iter().map(|line| line["loss"].as_f64().expect("a loss")).collect();
        let [got, expected]: [Vec<f64>; 2] = [loss(&card), loss(&cpu)];
        assert_within(&format!("{name}: validation loss"), &got, &expected, tolerance);
    }
}

#[test]
fn copies_of_weights_in_bf16_change_no_bit_and_spare_launches() {
    let Some(scene) = emulated_scene() else { return };
    let adamw = ["--set", "optimizer.name=adamw", "--set", "optimizer.learning_rate=1e-3"];
    let layers = ["--set", "memory.accumulation=layer-major", "--set", "memory.gradient_offload=none"];
    for (name, way) in [("adafactor", &[][..]), ("adamw", &adamw), ("layers", &layers)] {
        let run = |copies: &str| {
            let (run, file) = (format!("{name}-{copies}"), format!("{name}-{copies}.json"));
            let copies = format!("memory.weight_copies={copies}");
            let more = ["--precision", "bf16", "--set", &copies, "--output", &run];
            on_card(&scene, &[("REPORT", &file)], &[way, &more].concat()).expect_code(0);
            let last = &scene.events(&run, "end")[0];
            let [peak, predicted] =
                ["device_peak_bytes", "predicted_device_peak_bytes"].map(|key| last[key].as_u64().expect("bytes"));
            assert!(peak <= predicted, "{run}: {peak} of {predicted} bytes");
            let launches = report(&scene, &file)["launches"].as_u64().expect("a count");
            let weights = scene.read(&format!("{run}/model/model.safetensors"));
            let losses = [of_steps(&scene, &run, "loss"), of_steps(&scene, &run, "grad_norm")];
            (losses, weights, launches, scene.events(&run, "plan")[0].to_string().contains("weight copies"))
        };
        let (casts, copies) = (run("none"), run("bf16"));
        assert_eq!(copies.0, casts.0, "{name}");
        assert!(copies.1 == casts.1, "{name}: the model has other bits");
        assert!(copies.2 < casts.2, "{name}: {} launches, {} with casts", copies.2, casts.2);
        assert!(copies.3 && !casts.3, "{name}: the bill has a row");
    }
}

/// The keys that take all possible tensors off the card.
const OFF_THE_CARD: [&str; 10] = [
    "--set",
    "memory.activation_offload=disk",
    "--set",
    "memory.gradient_offload=disk",
    "--set",
    "memory.weight_offload=disk",
    "--set",
    "memory.optimizer_offload=disk",
    "--set",
    "optimizer.learning_rate=1e-3",
];

#[test]
fn what_is_off_the_card_changes_no_bit_and_leaves_room_there() {
    let scene = Scene::new();
    let layers: &[&str] = &["--set", "memory.accumulation=layer-major", "--set", "optimizer.learning_rate=1e-3"];
    for (name, optimizer) in [("adamw", &["--set", "optimizer.name=adamw"][..]), ("adafactor", &[])] {
        let run_with = |variables: &[(&str, &str)], place: &str, more: &[&[&str]]| {
            let run = format!("{name}-{place}");
            on_card(&scene, variables, &[&more.concat()[..], optimizer, &["--output", &run]].concat()).expect_code(0);
            let last = &scene.events(&run, "end")[0];
            let [peak, predicted] =
                ["device_peak_bytes", "predicted_device_peak_bytes"].map(|key| last[key].as_u64().expect("bytes"));
            assert!(peak <= predicted, "{run}: {peak} of {predicted} bytes");
            (of_steps(&scene, &run, "loss"), scene.read(&format!("{run}/model/model.safetensors")), (peak, predicted))
        };
        let run = |place: &str, more: &[&[&str]]| run_with(&[], place, more);
        let on_card = run("card", &[layers]);
        let on_disk = run("disk", &[&OFF_THE_CARD]);
        let on_host = run("host", &[&OFF_THE_CARD, &["--set", "memory.offload_to=host"]]);
        // Copies that overlap computation, on a card whose streams do their work as early, or as late, as their order allows.
        let beside = |place: &str, streams| {
            let of_place = format!("memory.offload_to={place}");
            let more = ["--set", &of_place, "--set", "memory.copy_overlap=block"];
            run_with(&[("STREAMS", streams)], &format!("{place}-{streams}"), &[&OFF_THE_CARD, &more])
        };
        let [early, late] = [beside("disk", "early"), beside("host", "late")];
        for (what, off) in [("disk", on_disk), ("host", on_host), ("disk, early", early), ("host, late", late)] {
            assert_eq!(off.0, on_card.0, "{name}, {what}");
            assert!(off.1 == on_card.1, "{name}, {what}: the model has other bits");
            let ((peak, predicted), (most, all)) = (off.2, on_card.2);
            assert!(peak <= most && predicted < all, "{name}, {what}: {peak}, {predicted} bytes of {most}, {all}");
        }
    }
}

/// Several blocks, and several micro-batches.
const DEEPER: [&str; 4] = [
    "--set",
    "model.overrides={num_layers=2, num_decoder_layers=3, d_model=64, d_ff=96, feed_forward_proj=\"gated-gelu\"}",
    "--set",
    "memory.micro_batch_samples=2",
];

#[test]
fn copies_beside_what_is_computed_change_no_bit_however_early_or_late_they_are() {
    let Some(scene) = emulated_scene() else { return };
    let deeper = [&DEEPER[..], &["--set", "memory.offload_to=host", "--max-steps", "3"]].concat();
    for (name, more) in [("once", &[][..]), ("twice", &["--set", "memory.gradient_offload=none"])] {
        let run = |streams: &str, overlap: &str, lockable: u64| {
            let run = format!("{name}-{overlap}-{streams}-{lockable}");
            let (file, overlap) = (format!("{run}.json"), format!("memory.copy_overlap={overlap}"));
            let way = [&OFF_THE_CARD[..], &deeper, more, &["--set", &overlap, "--output", &run]].concat();
            let variables = [("STREAMS", streams), ("REPORT", &file), ("LOCKABLE", &lockable.to_string())];
            on_card(&scene, &variables, &way).expect_code(0);
            let (last, report) = (&scene.events(&run, "end")[0], report(&scene, &file));
            let [peak, predicted] =
                ["device_peak_bytes", "predicted_device_peak_bytes"].map(|key| last[key].as_u64().expect("bytes"));
            assert!(peak <= predicted, "{run}: {peak} of {predicted} bytes");
            let bill = scene.events(&run, "plan")[0]["bill"]["rows"].clone();
            let off = bill.as_array().expect("rows").iter().find(|row| row["name"] == "off the GPU");
            let off = off.expect("a row")["bytes"].as_u64().expect("bytes");
            let [pinned, locked, left] = ["most_pinned_bytes", "most_locked_bytes", "locked_bytes"]
                .map(|key| report[key].as_u64().expect("bytes"));
            assert!(locked <= lockable, "{run}: {locked} bytes are locked");
            // If only weights are off the card, the bill is that of saving. A step also has gradients of tables.
            let has_all = if name == "once" { locked > off } else { locked >= off };
            assert!(has_all || lockable < u64::MAX, "{run}: {locked} bytes are locked, {off} are off the GPU");
            assert_eq!(left, 0, "{run}: all is unlocked at the end");
            (of_steps(&scene, &run, "loss"), scene.read(&format!("{run}/model/model.safetensors")), (pinned, locked))
        };
        let waits = run("late", "none", u64::MAX);
        assert_eq!(waits.2.0, 0, "{name}: nothing is pinned where nobody needs it");
        // All memory that is locked at a time can be locked, or a part of it, or none.
        let most = waits.2.1;
        for (streams, lockable) in [("early", most), ("late", most), ("late", most / 2), ("late", 0)] {
            let beside = run(streams, "block", lockable);
            assert_eq!(beside.0, waits.0, "{name}, {streams}, {lockable}");
            assert!(beside.1 == waits.1, "{name}, {streams}, {lockable}: the model has other bits");
            assert_eq!(beside.2.0, 16 << 20, "{name}, {streams}, {lockable}");
            assert!(beside.2.1 >= lockable / 4, "{name}, {streams}: {} of {lockable} bytes are locked", beside.2.1);
        }
    }
}

#[test]
fn a_card_is_measured_once_and_the_file_of_a_run_has_its_prices() {
    let Some(scene) = emulated_scene() else { return };
    let measured = "unset LOW_MEM_T5_PRICES; export XDG_CACHE_HOME=\"$PWD/cache\"";
    let run = |run: &str| {
        let arguments = arguments(&["--device", "cuda", "--max-steps", "1", "--output", run]);
        scene.run_after(measured, &arguments).expect_code(0).err
    };
    let (first, second) = (run("first"), run("second"));
    let said = "measured the speed of this GPU in ";
    assert!(first.contains(said) && !second.contains(said), "{first}\n{second}");
    let text = String::from_utf8(scene.read("first/resolved.toml")).unwrap();
    assert!(text.contains("# measured on this GPU: speed of this machine"), "{text}");
    let prices = |run: &str| scene.events(run, "plan")[0]["prices"].clone();
    assert_eq!(prices("first"), prices("second"));
    let of_launches = ["launch", "product_launch", "graph_launch", "graph_node"];
    for key in [&["bus_byte", "overhead_tokens", "multiply_add_ps", "parameter_ps"][..], &of_launches].concat() {
        assert!(prices("first")[key].as_f64().is_some_and(|price| price > 0.0), "{key} in {}", prices("first"));
    }
    println!("{}", prices("first"));
    // A driver that cannot record has no price of graphs.
    let setup = format!("{measured}2; export LOW_MEM_T5_EMULATED_GRAPHS=none").replace("cache\"2", "cache2\"");
    scene.run_after(&setup, &arguments(&["--device", "cuda", "--max-steps", "1", "--output", "each"])).expect_code(0);
    let has_price = of_launches.map(|key| prices("each")[key].as_f64().is_some_and(|price| price > 0.0));
    assert_eq!(has_price, [true, true, false, false], "{}", prices("each"));
    // The card's speed and the processor's are separate entries.
    let on_cpu = arguments(&["--max-steps", "1", "--output", "cpu"]);
    let said = scene.run_after(measured, &on_cpu).expect_code(0).err;
    assert!(said.contains("measured the speed of this machine in "), "{said}");
    assert_ne!(prices("cpu"), prices("first"));
}

#[test]
fn the_bytes_that_cross_the_bus_are_those_that_the_plan_says() {
    let Some(scene) = emulated_scene() else { return };
    for (name, more) in [
        ("adamw", &["--set", "optimizer.name=adamw"][..]),
        ("adafactor", &[]),
        ("once", &["--set", "memory.kept_gradient_blocks=9"]),
        ("twice", &["--set", "memory.gradient_offload=none"]),
        ("beside", &[&DEEPER[..], &["--set", "memory.copy_overlap=block"]].concat()),
    ] {
        let counts = |steps: &str| {
            let (file, run) = (format!("{name}-{steps}.json"), format!("{name}-{steps}"));
            let few = ["--max-steps", steps, "--set", "train.eval_samples=1", "--set", "checkpoint.every_steps=100"];
            on_card(&scene, &[("REPORT", &file)], &[&OFF_THE_CARD, more, &few, &["--output", &run]].concat())
                .expect_code(0);
            let report = report(&scene, &file);
            ["uploaded_bytes", "downloaded_bytes"].map(|key| report[key].as_u64().expect("bytes"))
        };
        let (four, eight) = (counts("4"), counts("8"));
        let counted = (0..2).map(|way| eight[way] - four[way]).sum::<u64>() / 4;
        let planned = scene.events(&format!("{name}-8"), "plan")[0]["step_bus_bytes"].as_u64().expect("bytes");
        println!("{name}: {counted} bytes a step, {planned} predicted");
        let error = (counted as f64 / planned as f64 - 1.0).abs();
        assert!(error < 0.05, "{name}: {counted} bytes a step, {planned} predicted");
        // A run counts the same bytes, and the time that the card waited.
        for event in scene.events(&format!("{name}-8"), "step") {
            let of = |key: &str| event[key].as_f64().expect("a number");
            let error = (of("copied_to_device_bytes") + of("copied_from_device_bytes")) / planned as f64 - 1.0;
            assert!(error.abs() < 0.05, "{name}: {event}, {planned} bytes predicted");
            assert!(of("copy_wait_ms") > 0.0 && of("copy_wait_ms") < of("step_ms"), "{name}: {event}");
        }
    }
}

#[test]
fn an_adapter_learns_beside_a_base_that_waits_in_its_own_files() {
    let scene = Scene::new();
    scene.run(&arguments(&["--output", "base"])).expect_code(0);
    for (name, key) in [("lora", "lora.dora=false"), ("dora", "lora.dora=true"), ("nf4", "model.base_precision=nf4")] {
        let adapter = ["--lora", "--set", key, "--set", "model.init_from=base/model"];
        let layers = ["--set", "memory.accumulation=layer-major"];
        let [on, disk, host] = ["on", "disk", "host"].map(|place| format!("{place}-{name}"));
        on_card(&scene, &[], &[&adapter[..], &layers, &["--output", &on]].concat()).expect_code(0);
        for (place, run) in [("disk", disk), ("host", host)] {
            let place_key = format!("memory.offload_to={place}");
            let off = ["--set", "memory.weight_offload=disk", "--set", &place_key, "--output", &run];
            on_card(&scene, &[], &[&adapter[..], &layers, &off].concat()).expect_code(0);
            assert_eq!(of_steps(&scene, &run, "loss"), of_steps(&scene, &on, "loss"), "{run}");
            let adapter = |run: &str| scene.read(&format!("{run}/adapter/adapter_model.safetensors"));
            assert!(adapter(&run) == adapter(&on), "{run}: the adapter has other bits");
        }
    }
}

#[test]
fn weights_off_the_card_answer_as_those_on_it() {
    let scene = Scene::new();
    scene.run(&arguments(&["--output", "run"])).expect_code(0);
    let rows = run::repository().join("data/sample-validation.parquet").display().to_string();
    let eval = |more: &[&str]| -> Value {
        let flags = ["eval", "--json", "--model", "run/model", "--device", "cuda", "--data", &rows];
        let samples = ["--samples", "4", "--generate-samples", "2"];
        let ran =
            scene.run(&[&flags[..], &samples, more].concat().iter().map(|&flag| flag.to_owned()).collect::<Vec<_>>());
        serde_json::from_str(&ran.expect_code(0).out).expect("JSON")
    };
    let on = eval(&[]);
    let off = eval(&["--set", "memory.weight_offload=disk"]);
    for key in ["loss", "exact_match"] {
        assert_eq!(on[key], off[key], "{key}");
    }
}

#[test]
fn a_killed_run_on_a_card_goes_on_to_the_same_bits() {
    let scene = Scene::new();
    let check = |name: &str, way: &[&str], weights: &str| {
        let [whole, killed] = ["whole", "killed"].map(|run| format!("{name}-{run}"));
        on_card(&scene, &[], &[way, &["--output", &whole]].concat()).expect_code(0);
        let mut running = scene.start(&arguments(&[way, &["--device", "cuda", "--output", &killed]].concat()));
        assert!(running.wait_for("saved"), "a checkpoint");
        running.kill();
        on_card(&scene, &[], &[way, &["--output", &killed, "--keep-training"]].concat()).expect_code(0);
        let of = |run: &str| scene.read(&format!("{run}/{weights}"));
        assert!(of(&killed) == of(&whole), "{name} has other bits after a kill");
    };
    check("all", &[], "model/model.safetensors");
    let adapter = ["--lora", "--set", "model.init_from=all-whole/model", "--set", "model.base_precision=nf4"];
    let off = [&OFF_THE_CARD[..], &["--set", "memory.offload_to=host", "--set", "optimizer.name=adamw"]].concat();
    check("off", &off, "model/model.safetensors");
    check("nf4", &adapter, "adapter/adapter_model.safetensors");
}

/// The counts that an emulated card writes.
fn report(scene: &Scene, name: &str) -> Value {
    serde_json::from_slice(&scene.read(name)).expect("JSON")
}

#[test]
fn a_card_without_memory_is_a_smaller_plan_or_an_error_that_says_so() {
    let Some(scene) = emulated_scene() else { return };
    let free = ["--set", "memory.micro_batch_samples=auto", "--set", "train.batch_size=8"];
    on_card(&scene, &[("REPORT", "counts.json")], &[&free[..], &["--output", "whole"]].concat()).expect_code(0);
    let allocations = report(&scene, "counts.json")["allocations"].as_u64().expect("a count");
    let expected = of_steps(&scene, "whole", "loss");
    let mut replanned = 0;
    let off = [&OFF_THE_CARD[..], &["--set", "memory.offload_to=host"]].concat();
    let rate = ["--set", "optimizer.learning_rate=1e-3"];
    on_card(&scene, &[], &[&free[..], &rate, &["--output", "other"]].concat()).expect_code(0);
    let with_rate = of_steps(&scene, "other", "loss");
    for part in 1..24 {
        // Some runs have everything off the card.
        let (way, expected) = if part < 16 { (&[][..], &expected) } else { (&off[..], &with_rate) };
        let (failing, run) = ((allocations * (part % 15 + 1) / 16).to_string(), format!("run-{part}"));
        let ran = on_card(&scene, &[("FAILURE", &failing)], &[&free[..], way, &["--output", &run]].concat());
        match ran.code {
            // The steps are the same, in smaller pieces.
            Some(0) => {
                replanned += scene.events(&run, "replan").len();
                assert_within(&run, &of_steps(&scene, &run, "loss"), expected, 1e-5);
            }
            Some(3) => assert!(ran.err.contains("error: the device has no memory left\nhint: "), "{}", ran.err),
            other => panic!("allocation {failing}: exit code {other:?}: {}", ran.err),
        }
    }
    assert!(replanned > 0, "no step was made again");
}

#[test]
fn a_budget_of_the_card_is_never_exceeded() {
    let Some(scene) = emulated_scene() else { return };
    let mut budgets = Vec::new();
    for mib in [120, 140, 200] {
        let (budget, run) = (format!("{mib}MiB"), format!("run-{mib}"));
        on_card(&scene, &[], &["--device-memory-budget", &budget, "--output", &run]).expect_code(0);
        let last = &scene.events(&run, "end")[0];
        let [peak, predicted] =
            ["device_peak_bytes", "predicted_device_peak_bytes"].map(|key| last[key].as_u64().expect("bytes"));
        assert!(peak <= predicted && predicted <= mib << 20, "{mib} MiB: {peak} of {predicted} bytes");
        budgets.push(peak);
    }
    let refused = on_card(&scene, &[], &["--device-memory-budget", "70MiB", "--output", "refused"]).expect_code(3);
    assert!(refused.err.contains("--device-memory-budget"), "{}", refused.err);
    // A card of that size, with only this much memory left by another program.
    let ran = on_card(&scene, &[("MEMORY", &(160u64 << 20).to_string())], &["--output", "small-card"]);
    ran.expect_code(0);
}

#[test]
fn the_units_in_which_a_card_gives_memory_are_measured() {
    let Some(scene) = emulated_scene() else { return };
    for unit_mib in [2, 32] {
        let (bytes, run) = ((unit_mib << 20).to_string(), format!("units-of-{unit_mib}"));
        let ran = on_card(&scene, &[("PAGE", &bytes)], &["--output", &run]).expect_code(0);
        // Small tensors have separate units.
        ran.expect_words(&[&format!("{} MiB of units", 2 * unit_mib)]);
        let last = &scene.events(&run, "end")[0];
        let [peak, predicted] =
            ["device_peak_bytes", "predicted_device_peak_bytes"].map(|key| last[key].as_u64().expect("bytes"));
        let most = peak + peak / 20 + (unit_mib << 20);
        assert!(peak <= predicted && predicted <= most, "{unit_mib} MiB: {predicted} bytes predicted, {peak} held");
    }
}

#[test]
fn an_evaluation_on_a_card_stays_in_its_budget_there() {
    let scene = Scene::new();
    on_card(&scene, &[], &["--output", "run"]).expect_code(0);
    let rows = run::repository().join("data/sample-validation.parquet").display().to_string();
    let eval = |budget: &str| {
        let flags = ["eval", "--json", "--model", "run/model", "--device", "cuda", "--device-memory-budget", budget];
        let rows = ["--data", &rows, "--samples", "8", "--generate-samples", "2"];
        scene.run(&[&flags[..], &rows].concat().into_iter().map(str::to_owned).collect::<Vec<_>>())
    };
    let json: Value = serde_json::from_str(&eval("120MiB").expect_code(0).out).expect("JSON");
    let [peak, predicted] =
        ["device_peak_bytes", "predicted_device_peak_bytes"].map(|key| json[key].as_u64().expect("bytes"));
    assert!(peak > 0 && peak <= predicted && predicted <= 120 << 20, "{peak} of {predicted} bytes");
    eval("30MiB").expect_code(3);
}

/// Answers to two prompts on a device, as text and with the counts of an emulated card.
fn answers(scene: &Scene, model: &str, device: &str, longest: usize, way: &[&str]) -> (String, Value) {
    let longest = longest.to_string();
    let usual = ["--model", model, "--device", device, "--max-new-tokens", &longest];
    let (ran, counts) = answered(scene, &[], &[&usual[..], way].concat());
    (ran.out, if device == "cpu" { Value::Null } else { counts.expect("a report") })
}

/// Answers to two prompts. Variables are those of the emulated card, without their prefix.
fn answered(scene: &Scene, variables: &[(&str, &str)], flags: &[&str]) -> (Ran, Option<Value>) {
    let all = [&["generate", "--prompt", "after 75", "--prompt", "before 12"], flags].concat();
    let all: Vec<String> = all.into_iter().map(str::to_owned).collect();
    let ran = scene.run_under(&with(&[variables, &[("REPORT", "counts.json")]].concat()), &all).expect_code(0);
    let counts = scene.path("counts.json").exists().then(|| report(scene, "counts.json"));
    (ran, counts)
}

#[test]
fn answers_on_a_card_are_those_of_the_cpu_and_little_is_copied_for_a_token() {
    let Some(scene) = emulated_scene() else { return };
    scene.run(&arguments(&["--output", "run", "--max-steps", "4"])).expect_code(0);
    let codes = ["convert-base", "--model", "run/model", "--precision", "nf4", "--output", "codes"].map(str::to_owned);
    scene.run(&codes).expect_code(0);
    // If tokens are sampled, the scores of all tokens are copied to the host.
    let ways: [(&str, &[&str], u64); 3] = [
        ("greedy", &[], 8),
        ("beams", &["--num-beams", "4"], 512),
        ("sampled", &["--sample", "--seed", "3"], u64::MAX),
    ];
    for (name, way, max_bytes) in ways {
        for model in ["run/model", "codes"] {
            let expected = answers(&scene, model, "cpu", 24, way).0;
            let (got, long) = answers(&scene, model, "cuda", 24, way);
            assert_eq!(got, expected, "{model} {name}");
            let (_, short) = answers(&scene, model, "cuda", 8, way);
            let count = |counts: &Value, key: &str| counts[key].as_u64().expect("a count");
            let more = |key: &str| (count(&long, key) - count(&short, key)) as f64 / 16.0;
            let (uploads, bytes) = (more("uploads"), more("downloaded_bytes"));
            // One launch of the graph, and launches that choose tokens or copy rows of both caches of a block.
            let (of_graphs, launches) = (more("graph_launches"), more("launches"));
            assert!(of_graphs == 1.0 && launches <= 3.0, "{model} {name}: {of_graphs} of graphs, {launches} others");
            assert_eq!(long["graph_allocations"], 0, "{model} {name}: memory of graphs");
            println!(
                "a token of {model}, {name}: {launches} launches beside one of {} nodes, {} allocations, {uploads} uploads, {} downloads of {bytes} bytes",
                more("graph_nodes"),
                more("allocations"),
                more("downloads")
            );
            // Token ids; with beams also their scores, and the rows to copy.
            assert!(uploads <= 3.0 && bytes <= max_bytes as f64, "{model} {name}: {uploads} uploads, {bytes} bytes");
            assert_eq!(long["left_bytes"], 0, "memory of the GPU is left");
        }
    }
}

#[test]
fn tokens_that_are_one_launch_have_the_bits_of_those_launched_kernel_by_kernel() {
    let Some(scene) = emulated_scene() else { return };
    scene.run(&arguments(&["--output", "run", "--max-steps", "4"])).expect_code(0);
    let shorter = ["--prompt", "1", "--prompt", "before 120", "--prompt", "after 3", "--prompt", "7 8 9 10"];
    // Longer than three capacities of a cache, and with rows that end before the others.
    let ways: [(&str, &[&str]); 4] = [
        ("greedy", &["--max-new-tokens", "70"]),
        ("beams", &["--num-beams", "3", "--num-return-sequences", "2", "--max-new-tokens", "40"]),
        ("sampled", &["--sample", "--seed", "3", "--temperature", "2", "--max-new-tokens", "70"]),
        ("bf16", &["--precision", "bf16", "--num-beams", "2", "--max-new-tokens", "20"]),
    ];
    for (name, way) in ways {
        let usual = ["--model", "run/model", "--device", "cuda", "--scores", "--json"];
        let flags = [&usual[..], way, &shorter].concat();
        let [(one, counts), (each, of_each), (late, _)] = [&[][..], &[("GRAPHS", "none")], &[("STREAMS", "early")]]
            .map(|variables| answered(&scene, variables, &flags));
        assert_eq!(one.out, each.out, "{name}: kernel by kernel");
        assert_eq!(one.out, late.out, "{name}: as late as the order of streams allows");
        let (switched_off, of_none) = answered(&scene, &[("LOW_MEM_T5_GRAPHS", "none")], &flags);
        assert_eq!((&switched_off.out, &of_none.expect("a report")["graphs"]), (&one.out, &0.into()), "{name}");
        assert!(!switched_off.err.contains("kernel by kernel"), "{name}: asked for: {}", switched_off.err);
        let (counts, of_each) = (counts.expect("a report"), of_each.expect("a report"));
        println!("{name}: {} graphs, {} launches of them: {}", counts["graphs"], counts["graph_launches"], one.out);
        assert!(counts["graphs"].as_u64() > Some(0) && of_each["graphs"] == 0, "{name}: {counts} and {of_each}");
        assert!(each.err.contains("kernel by kernel"), "{name}: {}", each.err);
        assert!(!one.err.contains("kernel by kernel"), "{name}: {}", one.err);
        assert_eq!((&counts["left_bytes"], &counts["graph_allocations"]), (&0.into(), &0.into()), "{name}");
    }
}

#[test]
fn steps_on_a_card_use_our_own_kernels_and_wait_for_nothing_else() {
    let Some(scene) = emulated_scene() else { return };
    check_kernels_of_a_step(&scene, "all", &[]);
    let adapter = ["--lora", "--set", "model.init_from=all-8/model", "--set", "lora.dropout=0.1"];
    let in_codes = ["--set", "model.base_precision=nf4"];
    let kernels = check_kernels_of_a_step(&scene, "nf4", &[&adapter[..], &in_codes].concat());
    assert!(kernels["dequantise_nf4_f32"].as_u64() > Some(0), "products take codes");
}

/// Compares runs of four and of eight steps. Returns the kernels of the longer run, by name.
fn check_kernels_of_a_step(scene: &Scene, name: &str, way: &[&str]) -> serde_json::Map<String, Value> {
    let counts = |steps: &str| {
        let run = format!("{name}-{steps}");
        let file = format!("{run}.json");
        let one = ["--max-steps", steps, "--set", "train.eval_samples=1", "--set", "checkpoint.every_steps=100"];
        on_card(scene, &[("REPORT", &file)], &[way, &one, &["--output", &run]].concat()).expect_code(0);
        report(scene, &file)
    };
    let (four, eight) = (counts("4"), counts("8"));
    let more = |key: &str| eight[key].as_u64().expect("a count") - four[key].as_u64().expect("a count");
    let of = |counts: &Value, kernel: &str| counts["kernels"].get(kernel).and_then(Value::as_u64).unwrap_or(0);
    let kernels = eight["kernels"].as_object().expect("kernels");
    // Names of candle's operations that four more steps do not launch.
    let of_candle =
        ["cast_", "badd_", "bsub_", "bmul_", "bdiv_", "ucopy_", "uexp_", "fast_", "is_u32", "ia_u32", "where_"];
    for kernel in kernels.keys().filter(|kernel| of_candle.iter().any(|of_candle| kernel.starts_with(of_candle))) {
        assert_eq!(of(&eight, kernel), of(&four, kernel), "{kernel} in a step of {name}");
    }
    println!(
        "a step of {name}: {} launches, {} allocations, {} uploads, {} downloads",
        more("launches") / 4,
        more("allocations") / 4,
        more("uploads") / 4,
        more("downloads") / 4
    );
    assert_eq!(eight["left_bytes"], 0, "memory of the GPU is left");
    kernels.clone()
}

/// A model of one block a side, with another kind of feed-forward layer and head.
fn shaped(projection: &str, is_tied: bool) -> [String; 2] {
    let shape = "num_layers=1, num_decoder_layers=1, d_model=64, d_ff=96";
    let head = format!("feed_forward_proj=\"{projection}\", tie_word_embeddings={is_tied}");
    ["--set".to_owned(), format!("model.overrides={{{shape}, {head}}}")]
}

#[test]
fn a_step_asks_the_card_for_what_its_plan_says() {
    let Some(scene) = emulated_scene() else { return };
    let [major, minor] = ["layer-major", "micro-batch-major"].map(|order| format!("memory.accumulation={order}"));
    let [major, minor] = [["--set", &major], ["--set", &minor]];
    let adamw = ["--set", "optimizer.name=adamw", "--set", "optimizer.learning_rate=1e-3"];
    let [relu, gated, untied] = [("relu", true), ("gated-gelu", true), ("gated-gelu", false)]
        .map(|(projection, tied)| shaped(projection, tied));
    let [relu, gated, untied] = [&relu, &gated, &untied].map(|shape| shape.each_ref().map(String::as_str));
    let bf16 = ["--precision", "bf16", "--set", "train.master_weights=stochastic-rounding"];
    let adapter = ["--lora", "--set", "model.init_from=adafactor/model"];
    let [copies, casts] = ["bf16", "none"].map(|copies| format!("memory.weight_copies={copies}"));
    let [copies, casts] = [&copies, &casts].map(|copies| ["--precision", "bf16", "--set", copies]);
    let twice = [&copies[..], &["--set", "memory.recompute_blocks=1"]].concat();
    let ways: [(&str, [&[&str]; 3]); 11] = [
        ("adafactor", [&relu, &minor, &[]]),
        ("adamw", [&untied, &minor, &adamw]),
        ("layer-major", [&gated, &major, &["--set", "memory.micro_batch_samples=2"]]),
        ("layer-major-adamw", [&untied, &major, &adamw]),
        ("bf16", [&untied, &minor, &bf16]),
        ("bf16-casts", [&gated, &minor, &casts]),
        ("bf16-copies", [&gated, &minor, &copies]),
        ("bf16-copies-recomputed", [&untied, &minor, &twice]),
        ("bf16-copies-layer-major", [&untied, &major, &copies]),
        ("without-dropout", [&gated, &minor, &["--set", "train.dropout=0"]]),
        ("adapter", [&adapter, &minor, &[]]),
    ];
    // Every sample is cut to the same lengths, as the plan assumes.
    let whole =
        ["--set", "data.max_source_tokens=4", "--set", "data.max_target_tokens=2", "--set", "train.eval_samples=1"];
    let quiet = ["--set", "train.eval_generate_samples=0", "--set", "checkpoint.every_steps=100"];
    for (name, way) in ways {
        let way = way.concat();
        let counts = |steps: &str, run: &str| {
            let one = ["--max-steps", steps, "--output", run, "--set", "memory.micro_batch_samples=4"];
            // `recorded_steps` compares recorded steps.
            let variables = [("REPORT", "counts.json"), ("LOW_MEM_T5_GRAPHS", "none")];
            on_card(&scene, &variables, &[&one[..], &whole, &quiet, &way].concat()).expect_code(0);
            report(&scene, "counts.json")
        };
        let (two, three) = (counts("2", &format!("{name}-two")), counts("3", name));
        let counted = |key: &str| three[key].as_u64().expect("a count") - two[key].as_u64().expect("a count");
        let plan = &scene.events(name, "plan")[0];
        let predicted = |key: &str| plan["device_step"][key].as_u64().expect("a count");
        for key in ["launches", "products", "downloads"] {
            assert_eq!(counted(key), predicted(key), "{name}: {key} of {three}");
        }
        // Lists of lengths and of samples that an earlier step used are not uploaded again.
        let micro_batches = 4 / plan["micro_batch_samples"].as_u64().expect("a count");
        let (uploads, most) = (counted("uploads"), predicted("uploads"));
        assert!(uploads <= most && most <= uploads + 3 * micro_batches, "{name}: {uploads} uploads of {most}");
    }
}
