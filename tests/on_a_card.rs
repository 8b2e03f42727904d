//! Common functions of the tests of the command on cards.

use crate::run::{Scene, short};

/// A step small enough for an emulated card, with gated gelu: a relu's kink would amplify rounding.
const SMALL: [&str; 6] = [
    "--set",
    "model.overrides={num_layers=1, num_decoder_layers=1, d_model=64, d_ff=96, feed_forward_proj=\"gated-gelu\"}",
    "--set",
    "train.batch_size=4",
    "--set",
    "train.eval_generate_samples=1",
];

/// The command's arguments for such a step.
pub fn arguments(more: &[&str]) -> Vec<String> {
    // An existing model has its own shape.
    let is_there = more.iter().any(|argument| argument.starts_with("model.init_from="));
    short(&[&SMALL[if is_there { 2 } else { 0 }..], more].concat())
}

/// A scene whose card is the emulated one, which writes counts. `None` for a real card: it writes no counts and ignores the variables of
/// the emulated one, so a test of these does nothing.
pub fn emulated_scene() -> Option<Scene> {
    // Of the build, as in `crates/cuda-kernels/build.rs`.
    (option_env!("LOW_MEM_T5_CUDA") == Some("emulated")).then(Scene::new)
}

/// A number of each step.
pub fn of_steps(scene: &Scene, run: &str, key: &str) -> Vec<f64> {
    scene.events(run, "step").iter().map(|line| line[key].as_f64().expect("a number")).collect()
}

/// Compares numbers of two runs, with a tolerance relative to the expected ones.
#[track_caller]
pub fn assert_within(what: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (place, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (got - expected).abs() / expected.abs();
        assert!(error <= tolerance, "{what}: number {}: {got} instead of {expected}", place + 1);
    }
}
