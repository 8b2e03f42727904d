//! Files that can be written or read no longer: an error that says which, and a run that goes on.

#![cfg(unix)]

use crate::run::{Scene, short};

/// The final weights of the short run that nothing disturbed.
fn undisturbed(scene: &Scene, more: &[&str]) -> Vec<u8> {
    scene.run(&short(&[more, &["--output", "whole"]].concat())).expect_code(0);
    scene.read("whole/model/model.safetensors")
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error_and_no_signal() {
    let scene = Scene::new();
    let expected = undisturbed(&scene, &[]);
    let arguments = short(&["--keep-training"]);
    // Units of 512 bytes: nothing at all, less than the sample data, less than a checkpoint's weights.
    for limit in [0, 100, 2000] {
        let ran = scene.run_after(&format!("ulimit -f {limit}"), &arguments).expect_code(1);
        ran.expect_words(&["error: ", "File too large", "hint: ", "`ulimit -f`"]);
    }
    scene.run(&arguments).expect_code(0);
    assert_eq!(scene.read("run/model/model.safetensors"), expected);
}
