//! Files that can no longer be written or read: the error names the file, and the run can be resumed.

#![cfg(unix)]

use crate::run::{Scene, short};

/// The final weights of the short run without a disturbance.
fn undisturbed(scene: &Scene, more: &[&str]) -> Vec<u8> {
    scene.run(&short(&[more, &["--output", "whole"]].concat())).expect_code(0);
    scene.read("whole/model/model.safetensors")
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error_and_no_signal() {
    let scene = Scene::new();
    let expected = undisturbed(&scene, &[]);
    let arguments = || short(scene.resumes("run"));
    // Limits in units of 512 bytes: nothing, less than the sample data, and less than a checkpoint's weights.
    for limit in [0, 100, 2000] {
        let ran = scene.run_after(&format!("ulimit -f {limit}"), &arguments()).expect_code(1);
        ran.expect_words(&["error: ", "File too large", "hint: ", "`ulimit -f`"]);
    }
    scene.run(&arguments()).expect_code(0);
    assert_eq!(scene.read("run/model/model.safetensors"), expected);
}

/// Truncates the files without names that a process has in a directory. Returns their number.
#[cfg(target_os = "linux")]
fn shorten(process: u32, directory: &std::path::Path) -> usize {
    let directory = directory.canonicalize().expect("the output directory");
    let descriptors = std::fs::read_dir(format!("/proc/{process}/fd")).expect("the process runs");
    let files = descriptors.map(|entry| entry.expect("a descriptor").path()).filter(|path| {
        let to = std::fs::read_link(path).unwrap_or_default();
        to.parent() == Some(&directory) && to.to_string_lossy().ends_with(" (deleted)")
    });
    files.map(|path| std::fs::File::options().write(true).open(path).unwrap().set_len(0).unwrap()).count()
}

#[test]
#[cfg(target_os = "linux")]
fn an_offload_file_that_is_shortened_under_a_run_is_named_and_the_run_goes_on_from_its_checkpoint() {
    let scene = Scene::new();
    let on_disk = ["--set", "memory.accumulation=layer-major", "--set", "memory.weight_offload=disk"];
    let more = [&["--max-steps", "40", "--set", "checkpoint.every_steps=4"], &on_disk[..]].concat();
    let mut running = scene.start(&short(&more));
    assert!(running.wait_for("saved run/checkpoints/step-00000004"));
    // The run is stopped while its file is shortened.
    running.signal("STOP");
    let count = shorten(running.id(), &scene.path("run"));
    running.signal("CONT");
    assert!(count > 0, "a file without a name in the output directory");
    let words = ["error: run/<offload file>: ", "shortened", "hint: checkpoints are intact", "--keep-training"];
    running.end().expect_code(1).expect_words(&words);
    assert!(scene.names("run/checkpoints").iter().any(|name| name.starts_with("step-")));
    let again = short(&[&more[..], &["--keep-training"]].concat());
    scene.run(&again).expect_code(0).expect_words(&["resuming from run/checkpoints/step-"]);
    assert!(scene.read("run/model/model.safetensors") == undisturbed(&scene, &more));
}
