//! Prices: measured once on a machine, kept, and written to the file of a run. No test depends on their values.

use crate::run::{Scene, short};

/// Prices are measured, and kept in the scene.
const MEASURED: &str = "unset LOW_MEM_T5_PRICES; export XDG_CACHE_HOME=\"$PWD/cache\"";
const SAID: &str = "measured the speed of this machine in ";

#[test]
fn a_machine_is_measured_once_whatever_becomes_of_the_file_that_keeps_it() {
    let scene = Scene::new();
    scene.write("tiny.toml", "[model]\nconfig = \"tiny\"\n[train]\nmax_steps = 10\n");
    let plan = |setup: &str| scene.run_after(setup, &["plan", "--json", "--config", "tiny.toml"]).expect_code(0);
    let (first, second) = (plan(MEASURED), plan(MEASURED));
    assert!(first.err.contains(SAID) && !second.err.contains(SAID), "{}\n{}", first.err, second.err);
    let [first, second] = [first, second].map(|ran| ran.json());
    assert_eq!(first["prices"], second["prices"]);
    for key in ["step_seconds", "run_seconds", "bf16_over_f32"] {
        assert!(first[key].as_f64().is_some_and(|value| value > 0.0), "{key} in {first:#}");
    }
    assert_eq!(scene.names("cache/train_low_mem"), ["speed.json"]);

    scene.write("cache/train_low_mem/speed.json", "{ not what was written");
    assert!(plan(MEASURED).err.contains(SAID));
    assert!(!plan(MEASURED).err.contains(SAID));
    // There can be no directory below a file.
    let ran = plan("unset LOW_MEM_T5_PRICES; export XDG_CACHE_HOME=\"$PWD/tiny.toml\"");
    assert!(ran.err.contains("not kept"), "{}", ran.err);
}

#[test]
fn the_file_of_a_run_has_the_prices_that_it_was_planned_with() {
    let scene = Scene::new();
    scene.run_after(MEASURED, &short(&["--max-steps", "1"])).expect_code(0).expect_words(&["Time  ", "Disk writes"]);
    let planned = scene.events("run", "plan").remove(0);
    let text = String::from_utf8(scene.read("run/resolved.toml")).unwrap();
    assert!(text.contains("# measured on this machine: speed of this machine"), "{text}");
    // The environment's word applies only to configs without prices.
    let again = scene.run(&["plan", "--json", "--config", "run/resolved.toml"]).expect_code(0).json();
    assert_eq!(again["prices"], planned["prices"]);
}

#[test]
fn a_table_that_lacks_a_price_is_refused() {
    let refused = Scene::new().run(&["plan", "--set", "memory.prices={ again = 1.0 }"]).expect_code(2);
    assert!(refused.err.contains("`memory.prices`: expected a table with every price"), "{}", refused.err);
    assert!(refused.err.contains("hint: "), "{}", refused.err);
}
