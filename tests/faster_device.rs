//! `--device auto` on a machine with a card: both devices are measured and planned for, and the faster one is taken.

use serde_json::Value;

use crate::on_a_card::{arguments, assert_within, emulated_scene, of_steps};
use crate::run::{Ran, Scene, repository};

/// Prices are measured, and kept in the scene.
const MEASURED: &str = "unset LOW_MEM_T5_PRICES; export XDG_CACHE_HOME=\"$PWD/cache\"";
const KEPT: &str = "cache/train_low_mem/speed.json";

/// A run that names no device. Variables are those of the emulated card, without their prefix.
fn auto(scene: &Scene, variables: &[(&str, &str)], more: &[&str]) -> Ran {
    let set = |(name, value): &(&str, &str)| format!("; export LOW_MEM_T5_EMULATED_{name}={value}");
    let variables: String = variables.iter().map(set).collect();
    let arguments = arguments(&[&["--device", "auto", "--max-steps", "2"], more].concat());
    scene.run_after(&format!("{MEASURED}{variables}"), &arguments)
}

fn resolved(scene: &Scene, run: &str) -> String {
    String::from_utf8(scene.read(&format!("{run}/resolved.toml"))).expect("UTF-8")
}

/// A first screen without its line breaks.
fn in_one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Multiplies the card's kept speed by a factor.
fn speed_up(scene: &Scene, times: f64) {
    fn scale(value: &mut Value, times: f64) {
        for (name, value) in value.as_object_mut().into_iter().flatten() {
            match value.as_f64().filter(|_| name.ends_with("_ps") && name != "file_byte_ps") {
                Some(number) => *value = Value::from(number / times),
                None => scale(value, times),
            }
        }
    }
    let mut kept: Value = serde_json::from_slice(&scene.read(KEPT)).expect("JSON");
    let measured = kept["measured"].as_array_mut().expect("measurements");
    let of_cards = measured.iter_mut().filter(|kept| kept["card"].is_string());
    assert_eq!(of_cards.map(|kept| scale(&mut kept["speed"], times)).count(), 1);
    scene.write(KEPT, kept.to_string());
}

#[test]
fn a_run_that_names_no_device_takes_the_faster_one_and_stays_there() {
    let Some(scene) = emulated_scene() else { return };
    let slow = auto(&scene, &[("REPORT", "slow.json")], &["--output", "slow"]).expect_code(0);
    let screen = in_one_line(&slow.out);
    assert!(screen.contains("Device CPU,") && screen.contains("on the GPU and "), "{}", slow.out);
    assert!(resolved(&scene, "slow").contains("device = \"cpu\""), "{}", resolved(&scene, "slow"));
    assert!(scene.events("slow", "step")[0].get("device_peak_bytes").is_none());
    // The card was measured and then closed, because its context takes memory of the process.
    let report: Value = serde_json::from_slice(&scene.read("slow.json")).expect("JSON");
    assert!(report["launches"].as_u64().is_some_and(|launches| launches > 0), "{report}");
    assert_eq!((&report["open_contexts"], &report["left_bytes"]), (&Value::from(0), &Value::from(0)), "{report}");

    // The emulated card computes on the processor. This changes its recorded speed, not its results.
    speed_up(&scene, 1e6);
    let fast = auto(&scene, &[], &["--output", "fast"]).expect_code(0);
    let screen = in_one_line(&fast.out);
    assert!(screen.contains("Device cuda; a step is predicted to take "), "{}", fast.out);
    assert!(resolved(&scene, "fast").contains("device = \"cuda\" # taken by `auto`"), "{}", resolved(&scene, "fast"));
    let last = &scene.events("fast", "end")[0];
    let [peak, predicted] =
        ["device_peak_bytes", "predicted_device_peak_bytes"].map(|key| last[key].as_u64().expect("bytes"));
    assert!(peak <= predicted, "{peak} of {predicted} bytes");
    assert_within("loss", &of_steps(&scene, "fast", "loss"), &of_steps(&scene, "slow", "loss"), 1e-5);

    // A resumed run stays on its device: by the run's file, by its checkpoint, and with other prices.
    let resume =
        |variables, more: &[&str]| auto(&scene, variables, &[&["--keep-training", "--output", "fast"], more].concat());
    let planned =
        scene.run_after(MEASURED, &["plan", "--json", "--config", "fast/resolved.toml"]).expect_code(0).json();
    assert!(planned["predicted_device_peak_bytes"].is_u64(), "{planned:#}");
    speed_up(&scene, 1e-6);
    let stays = resume(&[], &["--max-steps", "3"]).expect_code(0);
    assert!(in_one_line(&stays.out).contains("Device cuda; the run used a GPU before"), "{}", stays.out);

    // Without the card, a run that names it reports an error. A run that does not name it continues on the CPU.
    let gone: &[(&str, &str)] = &[("CARDS", "0")];
    let refused = resume(gone, &["--max-steps", "4", "--device", "cuda"]).expect_code(2);
    assert!(refused.err.contains("cannot use `cuda`") && refused.err.contains("--device cpu"), "{}", refused.err);
    let falls_back = resume(gone, &["--max-steps", "4"]).expect_code(0);
    assert!(falls_back.err.contains("the run used a GPU before, and continues on the CPU"), "{}", falls_back.err);
}

#[test]
fn a_card_that_is_full_or_absent_or_not_measured_leaves_the_run_on_the_cpu() {
    let Some(scene) = emulated_scene() else { return };
    let full = auto(&scene, &[("MEMORY", "70000000")], &["--output", "full"]).expect_code(0);
    let screen = in_one_line(&full.out);
    assert!(screen.contains("Device CPU,") && screen.contains("the GPU is left alone: "), "{}", full.out);
    let absent = auto(&scene, &[("CARDS", "0")], &["--output", "absent"]).expect_code(0);
    assert!(!absent.out.contains(" GPU"), "{}", absent.out);
    assert!(resolved(&scene, "absent").contains("device = \"auto\""), "{}", resolved(&scene, "absent"));
    let built_in = scene.run(&arguments(&["--max-steps", "1", "--output", "built-in"])).expect_code(0);
    assert!(in_one_line(&built_in.out).contains("`auto` takes a GPU by measured prices alone"), "{}", built_in.out);
    // A plan without data opens no card, and names the device that it is for.
    let planned = scene.run(&["plan", "--json", "--set", "model.config=tiny"]).expect_code(0);
    let reason = planned.json()["device_reason"].as_str().unwrap_or_default().to_owned();
    assert!(reason.contains("planned for the CPU") && planned.err.contains(&reason), "{}", planned.err);
}

/// A command that names no device, with measured prices and these variables.
fn command(scene: &Scene, variables: &str, arguments: &[&str]) -> Ran {
    scene.run_after(&format!("{MEASURED}; export {variables}"), arguments)
}

#[test]
fn answers_are_made_on_the_faster_device_and_are_the_same() {
    let Some(scene) = emulated_scene() else { return };
    scene.run(&arguments(&["--device", "cpu", "--max-steps", "2", "--output", "run"])).expect_code(0);
    let rows = repository().join("data/sample-validation.parquet").display().to_string();
    let (any, full, gone) = ("ANY=1", "LOW_MEM_T5_EMULATED_MEMORY=70000000", "LOW_MEM_T5_EMULATED_CARDS=0");
    let prompts = ["--prompt", "after 75", "--prompt", "before 12", "--max-new-tokens", "4"];
    let usual = ["generate", "--model", "run/model", "--max-source-tokens", "32"];
    let generate = |variables| command(&scene, variables, &[&usual[..], &prompts].concat()).expect_code(0);
    let evaluated = ["eval", "--json", "--model", "run/model", "--data", &rows, "--samples", "4"];
    let eval = || command(&scene, any, &[&evaluated[..], &["--max-new-tokens", "4"]].concat()).expect_code(0).json();
    let sizes = ["--batch", "1", "--source-tokens", "8", "--target-tokens", "8", "--steps", "1"];
    let bench = ["bench", "--json", "--model", "run/model/config.json"];
    let bench = || command(&scene, any, &[&bench[..], &sizes].concat()).expect_code(0).json();

    // Nothing is measured for a card that is absent, or whose prices are not measured.
    let [absent, built_in] = [generate(gone), scene.run(&[&usual[..], &prompts].concat()).expect_code(0)];
    assert_eq!((absent.err.as_str(), scene.path("cache").exists()), ("", false));
    assert!(built_in.err.contains("on the CPU: `auto` takes a GPU by measured prices alone"), "{}", built_in.err);

    let slow = generate(any);
    let words = ["measuring the speed of this machine", "measuring the speed of this GPU"];
    assert!(words.iter().all(|words| slow.err.contains(words)), "{}", slow.err);
    assert!(slow.err.contains("on the CPU: an answer of 4 tokens is predicted to take "), "{}", slow.err);
    let on_cpu = eval();
    assert_eq!((&on_cpu["device"], on_cpu.get("device_peak_bytes")), (&"cpu".into(), None), "{on_cpu:#}");
    let reason = on_cpu["device_reason"].as_str().unwrap_or_default();
    assert!(reason.starts_with("a row is predicted to take ") && reason.contains(" on the GPU and "), "{reason}");
    assert_eq!(bench()["device"], "cpu");
    let full = generate(full);
    assert!(full.err.contains("on the CPU: the GPU is left alone: "), "{}", full.err);

    speed_up(&scene, 1e6);
    let fast = generate(any);
    assert!(fast.err.contains("on the GPU: an answer of 4 tokens is predicted to take "), "{}", fast.err);
    assert!(!fast.err.contains("measur"), "{}", fast.err);
    for other in [&slow, &full, &absent, &built_in] {
        assert_eq!(fast.out, other.out);
    }
    let on_card = eval();
    assert_eq!((&on_card["device"], on_card["device_peak_bytes"].is_u64()), (&"cuda".into(), true), "{on_card:#}");
    let loss = |evaluated: &Value| [evaluated["loss"].as_f64().expect("a loss")];
    assert_within("loss", &loss(&on_card), &loss(&on_cpu), 1e-5);
    assert_eq!((&on_card["bleu"], &on_card["exact_match"]), (&on_cpu["bleu"], &on_cpu["exact_match"]));
    let benched = bench();
    assert_eq!((&benched["device"], benched["device_peak_bytes"].is_u64()), (&"cuda".into(), true), "{benched:#}");
    let reason = benched["device_reason"].as_str().unwrap_or_default();
    assert!(reason.starts_with("a step is predicted to take "), "{reason}");
}
