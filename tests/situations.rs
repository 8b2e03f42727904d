//! Plans the requirement documents' situations: each is a machine and a budget, and none is a special case.

use crate::run::{Scene, sample};

const GIB: u64 = 1 << 30;

/// Plans t5-small, 64 samples of 256+256 tokens a step, on a machine with this much total and available memory.
fn plan(scene: &Scene, total_gib: u64, available: u64, flags: &[&str]) -> serde_json::Value {
    scene.write("machine.json", format!(r#"[{{"total": {}, "available": {available}}}]"#, total_gib * GIB));
    scene.write("t5.toml", "[model]\nconfig = \"t5-small\"\n[train]\nbatch_size = 64\n");
    let mut arguments = vec!["plan", "--json", "--config", "t5.toml", "--machine", "machine.json"];
    arguments.extend(flags);
    scene.run(&arguments).expect_code(0).json()
}

fn peak(plan: &serde_json::Value) -> u64 {
    plan["predicted_peak_bytes"].as_u64().expect("a peak")
}

#[test]
fn hosts_with_1_4_gigabytes_left_train_the_whole_batch_in_them() {
    let scene = Scene::new();
    let available = 14 * GIB / 10;
    for total_gib in [16, 32] {
        let plan = plan(&scene, total_gib, available, &[]);
        assert!(peak(&plan) < available, "{plan:#}");
        assert!(plan["micro_batch_samples"].as_u64() >= Some(1));
    }
}

#[test]
fn ample_memory_is_not_taken_where_it_buys_no_time() {
    let scene = Scene::new();
    let [four, twenty] = [4, 20].map(|gib| plan(&scene, 32, 30 * GIB, &["--memory-budget", &format!("{gib}GiB")]));
    assert!(peak(&four) < 4 * GIB && peak(&twenty) < 20 * GIB);
    let time = |plan: &serde_json::Value| plan["relative_time"].as_f64().expect("a time");
    assert!(time(&twenty) <= time(&four), "a bigger budget is never slower");
    assert!(peak(&twenty) < 4 * GIB, "{} for the sake of at most 1.5 %", peak(&twenty));
}

#[test]
fn cards_of_4_6_12_and_20_gigabytes_hold_the_tensors_beside_a_host_with_1_4_gigabytes_left() {
    let scene = Scene::new();
    let config =
        "[model]\nconfig = \"chatlm-0.2b\"\nvocab_size = 29298\n[train]\nbatch_size = 128\n[run]\ndevice = \"cuda\"\n";
    scene.write("card.toml", config);
    let mut before = f64::INFINITY;
    for gib in [4, 6, 12, 20] {
        let card = format!(r#"{{"name": "a card", "total": {}, "free": {}}}"#, gib * GIB, gib * GIB - GIB / 4);
        let machine = format!(r#"[{{"total": {}, "available": {}, "device": {card}}}]"#, 16 * GIB, 14 * GIB / 10);
        scene.write("machine.json", machine);
        let budget = format!("{gib}GiB");
        let arguments = ["plan", "--json", "--config", "card.toml", "--machine", "machine.json"];
        let plan = scene.run(&[&arguments[..], &["--device-memory-budget", &budget]].concat()).expect_code(0).json();
        let on_card = plan["predicted_device_peak_bytes"].as_u64().expect("rows on the GPU");
        assert!(on_card < gib * GIB - GIB / 4 && peak(&plan) < 14 * GIB / 10, "{plan:#}");
        let time = plan["relative_time"].as_f64().expect("a time");
        assert!(time <= 1.015 * before, "a bigger GPU is never slower by more than counts as nothing");
        before = time;
    }
    // Tensors off the card take memory beside it, or files, and cross the bus.
    let card = format!(r#"{{"name": "a card", "total": {}, "free": {}}}"#, 20 * GIB, 20 * GIB - GIB / 4);
    let roomy = format!(r#"[{{"total": {}, "available": {}, "device": {card}}}]"#, 16 * GIB, 14 * GIB);
    scene.write("roomy.json", roomy);
    for lever in ["activation_offload", "gradient_offload", "weight_offload"] {
        let pin = format!("memory.{lever}=disk");
        let planned = |place: &str| {
            let place = format!("memory.offload_to={place}");
            let plan = ["plan", "--json", "--config", "card.toml", "--machine", "roomy.json"];
            scene.run(&[&plan[..], &["--set", &pin, "--set", &place]].concat()).expect_code(0).json()
        };
        let (host, disk) = (planned("host"), planned("disk"));
        let number = |plan: &serde_json::Value, key: &str| plan[key].as_u64().expect("a number");
        assert!(number(&host, "step_bus_bytes") > 0 && number(&host, "step_written_bytes") == 0, "{lever}: {host:#}");
        assert!(number(&disk, "step_bus_bytes") > 0 && number(&disk, "step_written_bytes") > 0, "{lever}: {disk:#}");
        let words = |plan: &serde_json::Value| plan["bill"]["conclusion"].as_str().expect("words").to_owned();
        assert!(words(&host).contains(" off the GPU") && words(&disk).contains(" on disk"), "{lever}");
    }
    let beside = ["plan", "--device", "cpu", "--config", "card.toml", "--set", "memory.offload_to=host"];
    scene.run(&beside).expect_code(2).expect_words(&["memory.offload_to", "is for GPUs", "--device cuda"]);
    let arguments = ["plan", "--config", "card.toml", "--machine", "machine.json", "--device-memory-budget", "600MiB"];
    scene.run(&arguments).expect_code(3).expect_words(&["device memory budget", "--device-memory-budget"]);
    let arguments = ["plan", "--explain", "--config", "card.toml", "--machine", "machine.json"];
    scene.run(&arguments).expect_code(0).expect_words(&["Device memory", "a card", "micro_batch_samples"]);
}

#[test]
fn explain_says_what_every_lever_would_save_and_cost() {
    let scene = Scene::new();
    scene.write("t5.toml", "[model]\nconfig = \"t5-small\"\n[train]\nbatch_size = 64\n");
    let levers = ["micro_batch_samples", "recompute_blocks", "loss_chunk_rows", "accumulation", "loader"];
    scene
        .run(&["plan", "--explain", "--config", "t5.toml", "--memory-budget", "900MiB"])
        .expect_code(0)
        .expect_words(&levers);
}

#[test]
fn a_refusal_names_ways_out_that_work() {
    let scene = Scene::new();
    scene.write("machine.json", format!(r#"[{{"total": {}, "available": {}}}]"#, 32 * GIB, 14 * GIB / 10));
    let config = crate::run::repository().join("configs/chatlm-0.2b.toml").display().to_string();
    let (rows, tokenizer) =
        (sample("data.train", "sample-train.parquet"), sample("data.tokenizer", "sample-tokenizer.json"));
    let epoch = [
        "plan",
        "--config",
        &config,
        "--machine",
        "machine.json",
        "--set",
        &rows,
        "--set",
        &tokenizer,
        "--epochs",
        "1",
    ];
    let refused = scene.run(&[&epoch[..], &["--memory-budget", "700MiB"]].concat()).expect_code(3);
    let hint = refused.err.lines().find(|line| line.contains("memory.disk_writes=") && line.ends_with("which fits"));
    let hint = hint.unwrap_or_else(|| panic!("no way out in\n{}", refused.err));
    let setting = hint.split('`').nth(1).and_then(|command| command.strip_prefix("--set ")).expect("a setting");
    scene.run(&[&epoch[..], &["--memory-budget", "700MiB", "--set", setting]].concat()).expect_code(0);
    // Without a known length, the way out is to make it known.
    let unknown = ["plan", "--config", &config, "--memory-budget", "700MiB"];
    let refused = scene.run(&unknown).expect_code(3).expect_words(&["train.master_weights=stochastic-rounding"]);
    let hint = refused.err.lines().find(|line| line.contains("known length")).expect("a way out");
    let steps = hint.split("--max-steps ").nth(1).and_then(|rest| rest.split('`').next()).expect("steps");
    scene.run(&[&unknown[..], &["--max-steps", steps]].concat()).expect_code(0);
}
