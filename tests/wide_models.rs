//! Models so wide that their norms and tables of positions are as large as tensors that may lie off a card.

use crate::on_a_card::of_steps;
use crate::run::{Ran, Scene, short};

/// A norm of 4,096 and a table of 32 x 128 numbers have 16 KiB in f32.
const WIDE: &str = "model.overrides={num_layers=1, num_decoder_layers=1, d_model=4096, num_heads=128, d_kv=1, d_ff=16, \
                    feed_forward_proj=\"gated-gelu\"}";

fn wide(scene: &Scene, more: &[&str]) -> Ran {
    // Small enough for an emulated card.
    let keys = [
        "train.batch_size=1",
        "train.eval_samples=1",
        "train.eval_generate_samples=0",
        "data.max_source_tokens=4",
        "data.max_target_tokens=2",
        "memory.accumulation=layer-major",
    ];
    let keys = keys.iter().flat_map(|&key| ["--set", key]).collect::<Vec<_>>();
    scene.run(&short(&[&["--device", "cuda", "--max-steps", "1"], &keys[..], more].concat())).expect_code(0)
}

#[test]
fn norms_and_tables_of_positions_of_wide_models_stay_on_the_card() {
    let scene = Scene::new();
    let of = |kind: &str, weights: &str, model: &[&str], places: &[&str]| {
        let run = |place: &str, more: &[&str]| {
            let run = format!("{kind}-{place}");
            wide(&scene, &[model, more, &["--output", &run]].concat());
            (of_steps(&scene, &run, "loss"), scene.read(&format!("{run}/{weights}")))
        };
        let there = run("card", &["--set", "memory.weight_offload=none"]);
        for &place in places {
            let to = format!("memory.offload_to={place}");
            let off = run(place, &["--set", "memory.weight_offload=disk", "--set", &to]);
            assert_eq!(off.0, there.0, "{kind}, {place}");
            assert!(off.1 == there.1, "{kind}, {place}: other bits");
        }
    };
    of("all", "model/model.safetensors", &["--set", WIDE], &["host", "disk"]);
    let adapter = ["--lora", "--set", "model.init_from=all-card/model", "--set", "train.precision=bf16"];
    of("adapter", "adapter/adapter_model.safetensors", &adapter, &["disk"]);
}
