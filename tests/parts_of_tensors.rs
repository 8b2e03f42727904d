//! If a tensor is processed in parts, each part crosses the bus once and separately.

use serde_json::Value;

use crate::on_a_card::{arguments, emulated_scene};
use crate::run::Scene;
use crate::{on_card, report, with};

/// A table of several parts, in one step without answers.
const LARGE_TABLE: [&str; 8] = [
    "--max-steps",
    "1",
    "--set",
    "train.eval_samples=1",
    "--set",
    "train.eval_generate_samples=0",
    "--set",
    "model.vocab_size=12301",
];

fn counted(scene: &Scene, run: &str, more: &[&str]) -> Value {
    let (file, out) = (format!("{run}.json"), ["--output", run]);
    on_card(scene, &[("REPORT", &file)], &[&LARGE_TABLE[..], more, &out].concat()).expect_code(0);
    report(scene, &file)
}

fn number(counts: &Value, key: &str) -> u64 {
    counts[key].as_u64().expect("a count")
}

#[test]
fn a_save_copies_each_value_from_the_card_once() {
    let Some(scene) = emulated_scene() else { return };
    let counts = counted(&scene, "run", &["--set", "memory.accumulation=micro-batch-major"]);
    let model = scene.read("run/model/model.safetensors").len() as u64;
    let downloaded = number(&counts, "downloaded_bytes");
    println!("{downloaded} bytes are downloaded for a model of {model}");
    // One copy for the checkpoint, and one for the comparison with the existing model.
    assert!(downloaded <= 3 * model, "{downloaded} bytes are downloaded for a model of {model}");
}

#[test]
fn moments_in_the_hosts_memory_take_no_more_of_the_card_than_those_in_a_file() {
    let Some(scene) = emulated_scene() else { return };
    let layers = ["--set", "memory.accumulation=layer-major", "--set", "memory.optimizer_offload=disk"];
    let adamw = ["--set", "optimizer.name=adamw", "--set", "optimizer.learning_rate=1e-3"];
    let wide = "model.overrides={num_layers=1, num_decoder_layers=1, d_model=256, d_ff=32, num_heads=2, d_kv=16, feed_forward_proj=\"gated-gelu\"}";
    let [host, disk] = ["host", "disk"].map(|place| {
        let to = format!("memory.offload_to={place}");
        counted(&scene, place, &[&layers[..], &adamw, &["--set", wide, "--set", &to]].concat())
    });
    for key in ["most_used_bytes", "uploaded_bytes", "downloaded_bytes"] {
        let [host, disk] = [&host, &disk].map(|counts| number(counts, key));
        println!("{key}: {host} in the host's memory, {disk} in a file");
        assert!(host <= disk + disk / 50, "{key}: {host} in the host's memory, {disk} in a file");
    }
}

#[test]
fn a_saved_head_of_an_adapter_is_read_in_its_place() {
    let Some(scene) = emulated_scene() else { return };
    let base = ["--output", "base", "--set", "model.vocab_size=12301", "--max-steps", "1"];
    scene.run(&arguments(&base)).expect_code(0);
    let head = ["--lora", "--set", "model.init_from=base/model", "--set", "lora.modules_to_save=[\"lm_head\"]"];
    scene.run(&arguments(&[&head[..], &["--output", "run", "--max-steps", "1"]].concat())).expect_code(0);
    scene.write("rows.jsonl", "{\"prompt\": \"2\", \"response\": \"3\"}\n");
    let words =
        "eval --model run/adapter --device cuda --data rows.jsonl --generate-samples 1 --max-new-tokens 2 --json";
    let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
    scene.run_under(&with(&[("REPORT", "eval.json")]), &words).expect_code(0);
    let most = number(&report(&scene, "eval.json"), "most_used_bytes");
    // The base's table, and the head that was tied to it. A tensor in transit would be a third copy.
    let table = 12301 * 64 * 4;
    println!("{most} bytes at most, {table} in each table");
    assert!(most < 3 * table, "{most} bytes at most, {table} in each table");
}
