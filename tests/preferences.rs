//! `preference.loss`: rows with a chosen and a rejected answer, or with one answer and a label, read in any form, trained, resumed and refused.

use serde_json::{Value, json};

use crate::run::{Scene, short};

const LORA: &[&str] = &["--lora", "--set", "model.init_from=base/model"];
const BY_DPO: &[&str] = &["--set", "preference.loss=dpo", "--set", "train.dropout=0"];

/// A scene with a model and rows of preferences in several forms.
fn scene() -> Scene {
    let scene = Scene::new();
    scene.run(&short(&["--output", "base"])).expect_code(0);
    let words = ["red", "blue", "green", "stone", "river", "tree"];
    let rows = |first: usize, count: usize| {
        let row = |i: usize| {
            let (a, b) = (words[i % 6], words[(i * 5 + 1) % 6]);
            format!(r#"{{"prompt":"join {a} and {b}","chosen":"{a} {b}","rejected":"{b} {b} {a}","id":{i}}}"#) + "\n"
        };
        (first..first + count).map(row).collect::<String>()
    };
    scene.write("pairs.jsonl", rows(0, 24));
    scene.write("valid.jsonl", rows(24, 6));
    let named = rows(0, 24).replace("\"chosen\":", "\"better\":").replace("\"rejected\":", "\"worse\":");
    scene.write("named.jsonl", named);
    let messages = |text: &str| format!(r#"[{{"role":"assistant","content":"{text}"}}]"#);
    let row = |i: usize| {
        format!(
            r#"{{"prompt":[{{"role":"user","content":"join {i}"}}],"chosen":{},"rejected":{}}}"#,
            messages("yes"),
            messages("no")
        ) + "\n"
    };
    scene.write("chats.jsonl", (0..8).map(row).collect::<String>());
    scene
}

fn tune(data: &str, output: &str, more: &[&str]) -> Vec<String> {
    let of_data = format!("data.train={data}");
    let settings = ["data.validation=valid.jsonl", "train.batch_size=4", "train.eval_generate_samples=2", &of_data];
    let settings = settings.iter().flat_map(|setting| ["--set", setting]).collect::<Vec<_>>();
    short(&[LORA, &settings, &["--output", output, "--lr", "0.01"], more].concat())
}

fn figures(events: &[Value], name: &str) -> Vec<f64> {
    events.iter().map(|event| event[name].as_f64().unwrap_or_else(|| panic!("{name} in {event:#}"))).collect()
}

#[test]
fn dpo_learns_from_pairs_and_resumes_to_the_same_bits() {
    let scene = scene();
    let ran = scene.run(&tune("pairs.jsonl", "whole", BY_DPO)).expect_code(0);
    ran.expect_words(&["DPO of pairs", "preference loss"]);
    let steps = scene.events("whole", "step");
    // A new adapter changes nothing, so both sides are alike at first.
    assert!((steps[0]["preference_loss"].as_f64().unwrap() - 2f64.ln()).abs() < 1e-6, "{:#}", steps[0]);
    assert_eq!(steps[0]["rewards/margins"], 0.0);
    assert_eq!(figures(&steps, "objective"), figures(&steps, "preference_loss"));
    let margins = figures(&steps, "rewards/margins");
    assert!(margins[margins.len() - 1] > 0.0, "{margins:?}");
    let evaluated = scene.events("whole", "eval");
    assert_eq!(evaluated[0]["samples"], 6);
    for name in ["rewards/accuracies", "logps/chosen", "logps/rejected", "exact_match"] {
        assert_eq!(figures(&evaluated, name).len(), evaluated.len());
    }

    // `eval` compares as the run did.
    let adapted = ["eval", "--model", "base/model", "--adapter", "whole/adapter", "--data", "valid.jsonl", "--json"];
    let again = scene.run(&adapted).expect_code(0).json();
    let last = &evaluated[evaluated.len() - 1];
    for name in ["preference_loss", "rewards/margins", "rewards/accuracies", "loss"] {
        let [got, expected] = [&again, last].map(|figures| figures[name].as_f64().expect("a number"));
        assert!((got - expected).abs() < 1e-6, "{name}: {got}, not {expected}");
    }
    let one = scene.run(&[&adapted[..], &["--response-column", "chosen"]].concat()).expect_code(0).json();
    assert!(one["preference_loss"].is_null() && one["loss"].is_number(), "{one:#}");

    let mut running =
        scene.start(&tune("pairs.jsonl", "killed", &[BY_DPO, &["--set", "checkpoint.every_steps=2"]].concat()));
    assert!(running.wait_for("step 4/6"));
    running.kill();
    scene.run(&[tune("pairs.jsonl", "killed", BY_DPO), vec!["--keep-training".into()]].concat()).expect_code(0);
    let adapter = |run: &str| scene.read(&format!("{run}/adapter/adapter_model.safetensors"));
    assert_eq!(adapter("killed"), adapter("whole"));
    let other = [
        tune("pairs.jsonl", "killed", &["--set", "preference.loss=simpo", "--set", "train.dropout=0"]),
        vec!["--keep-training".into()],
    ]
    .concat();
    let refused = scene.run(&other).expect_code(2);
    assert!(refused.err.contains("preference.loss"), "{}", refused.err);
}

#[test]
fn pairs_are_read_from_other_columns_and_from_messages() {
    let scene = scene();
    let named = ["--set", "data.chosen_column=better", "--set", "data.rejected_column=worse"];
    let arguments = |output, data: &str, more: &[&str]| {
        let of_data = format!("data.train={data}");
        short(&[LORA, BY_DPO, &["--set", &of_data, "--set", "train.batch_size=4", "--output", output], more].concat())
    };
    scene.run(&arguments("a", "pairs.jsonl", &[])).expect_code(0);
    scene.run(&arguments("b", "named.jsonl", &named)).expect_code(0);
    let of = |run: &str| figures(&scene.events(run, "step"), "preference_loss");
    assert_eq!(of("a"), of("b"));
    scene.run(&arguments("c", "chats.jsonl", &[])).expect_code(0);
    let pairs = scene.text("pairs.jsonl");
    scene.write("half.jsonl", r#"{"prompt":"a","chosen":"b"}"#);
    let half = ["--output", "half", "--set", "data.train=half.jsonl", "--set", "preference.loss=orpo"];
    let half = [&half[..], &["--set", "train.dropout=0"]].concat();
    let words = ["half.jsonl: no column `rejected`", "prompt, chosen", "`data.rejected_column`"];
    scene.run(&short(&half)).expect_code(4).expect_words(&words);
    scene.write("holes.jsonl", pairs.replacen("\"rejected\":\"blue blue red\"", "\"rejected\":null", 1));
    let ran = scene.run(&arguments("d", "holes.jsonl", &[])).expect_code(0);
    assert!(ran.err.contains("skipped") && ran.err.contains("`rejected`"), "{}", ran.err);
    scene.write("plain.jsonl", "{\"prompt\":\"a\",\"response\":\"b\"}\n");
    let refused = scene.run(&arguments("f", "plain.jsonl", &[])).expect_code(4);
    assert!(refused.err.contains("`chosen`") && refused.err.contains("hint: "), "{}", refused.err);
}

#[test]
fn trl_s_forms_of_a_pair_are_the_same_pairs() {
    let scene = scene();
    let chat = |answer: &str, i: usize| json!([{"role": "user", "content": format!("join {i}")}, {"role": "assistant", "content": answer}]);
    let rows = |row: &dyn Fn(usize) -> Value| (0..8).map(|i| format!("{}\n", row(i))).collect::<String>();
    let prompt = |i: usize| format!("join {i}");
    scene.write("plain.jsonl", rows(&|i| json!({"prompt": prompt(i), "chosen": "yes", "rejected": "no"})));
    scene.write(
        "whole.jsonl",
        rows(&|i| json!({"prompt": prompt(i), "chosen": chat("yes", i), "rejected": chat("no", i)})),
    );
    scene.write("implicit.jsonl", rows(&|i| json!({"chosen": chat("yes", i), "rejected": chat("no", i)})));
    let losses = |data: &str, by: &str, loss: &[&str]| {
        let (of_data, output) = (format!("data.train={data}.jsonl"), format!("{data}-{by}"));
        let settings = ["--set", &of_data, "--set", "train.batch_size=4", "--output", &output, "--lr", "0.01"];
        scene.run(&short(&[LORA, loss, &settings].concat())).expect_code(0);
        figures(&scene.events(&output, "step"), "preference_loss")
    };
    for (by, loss) in [("dpo", BY_DPO), ("kto", BY_KTO)] {
        let expected = losses("plain", by, loss);
        assert_eq!(losses("whole", by, loss), expected);
        assert_eq!(losses("implicit", by, loss), expected);
    }
    // Each pair gave one answer of either kind.
    let dry = ["--set", "data.train=plain.jsonl", "--set", "train.batch_size=4", "--output", "x", "--dry-run"];
    scene
        .run(&short(&[LORA, BY_KTO, &dry].concat()))
        .expect_code(0)
        .expect_words(&["16 rows", "is a row with a label"]);
    scene.write("apart.jsonl", "{\"chosen\":\"yes\",\"rejected\":\"no\"}\n");
    let of_data = ["--set", "data.train=apart.jsonl", "--set", "data.bad_rows=error", "--output", "apart"];
    let refused = scene.run(&short(&[LORA, BY_DPO, &of_data].concat())).expect_code(4);
    refused.expect_words(&["apart.jsonl", "`chosen`"]);
}

/// Whole-model DPO beside the model that it starts from.
const BESIDE: &[&str] =
    &["--set", "model.init_from=base/model", "--set", "preference.reference=base/model", "--lr", "0.001"];

#[test]
fn a_whole_model_is_compared_with_a_reference_that_stays_in_its_files() {
    let scene = scene();
    let flags = |output: &str, more: &[&str]| {
        let data = ["--set", "data.train=pairs.jsonl", "--set", "data.validation=valid.jsonl"];
        let rest = ["--set", "train.batch_size=4", "--set", "train.eval_generate_samples=2", "--output", output];
        short(&[BESIDE, BY_DPO, &data, &rest, more].concat())
    };
    let ran = scene.run(&flags("whole", &[])).expect_code(0);
    let screen = ran.out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(screen.contains("DPO of pairs") && screen.contains("reference: base/model"), "{screen}");
    let steps = scene.events("whole", "step");
    assert!((steps[0]["preference_loss"].as_f64().unwrap() - 2f64.ln()).abs() < 1e-6, "{:#}", steps[0]);
    let margins = figures(&steps, "rewards/margins");
    assert!(margins[0].abs() < 1e-6 && margins[margins.len() - 1] > 0.0, "{margins:?}");
    let evaluations = figures(&scene.events("whole", "eval"), "rewards/margins");
    assert!(evaluations[0].abs() < 1e-6 && evaluations[evaluations.len() - 1] > 0.0, "{evaluations:?}");
    // The bill has the reference, and the plans of several budgets agree.
    let bill = scene.run(&[vec!["plan".into()], flags("x", &["--explain"])].concat()).expect_code(0).out;
    assert!(bill.contains("frozen model"), "{bill}");
    for (number, pins) in
        [&["memory.micro_batch_samples=1"][..], &["memory.accumulation=layer-major", "memory.micro_batch_samples=3"]]
            .into_iter()
            .enumerate()
    {
        let output = format!("cut{number}");
        let pins: Vec<&str> = pins.iter().flat_map(|pin| ["--set", pin]).collect();
        scene.run(&flags(&output, &pins)).expect_code(0);
        let far = figures(&scene.events(&output, "step"), "preference_loss");
        let far = far.into_iter().zip(figures(&steps, "preference_loss")).map(|(a, b)| (a - b).abs());
        assert!(far.fold(0.0, f64::max) < 1e-4, "{pins:?}");
    }
    let mut running = scene.start(&flags("killed", &["--set", "checkpoint.every_steps=2"]));
    assert!(running.wait_for("step 4/6"));
    running.kill();
    let resumed = [flags("killed", &[]), vec!["--keep-training".into()]].concat();
    scene.run(&resumed).expect_code(0);
    let weights = |run: &str| scene.read(&format!("{run}/model/model.safetensors"));
    assert_eq!(weights("killed"), weights("whole"));
    // Another reference is another run.
    scene.run(&short(&["--output", "other", "--set", "run.seed=9"])).expect_code(0);
    let other: Vec<String> =
        resumed.iter().map(|flag| flag.replace("preference.reference=base", "preference.reference=other")).collect();
    scene.run(&other).expect_code(2).expect_words(&["preference.reference", "--allow-changed base"]);
    // `eval` has no reference beside the model, and measures what it can.
    let eval = ["eval", "--model", "whole", "--data", "valid.jsonl", "--response-column", "chosen", "--json"];
    let scored = scene.run(&eval).expect_code(0).json();
    assert!(scored["loss"].is_number() && scored["preference_loss"].is_null(), "{scored:#}");

    let refused = |reference: &str, code: i32, words: &[&str]| {
        let setting = format!("preference.reference={reference}");
        scene.run(&flags("refused", &["--set", &setting])).expect_code(code).expect_words(words);
    };
    refused("nosuch", 4, &["nosuch"]);
    let small = short(&["--output", "small", "--set", "model.vocab_size=4200"]);
    scene.run(&small).expect_code(0);
    refused("small/model", 4, &["`preference.reference`", "`vocab_size`", "4200", "hint: "]);
}

#[test]
fn settings_that_would_make_another_loss_are_refused() {
    let scene = scene();
    let refused = |arguments: &[String], words: &str| {
        let ran = scene.run(arguments).expect_code(2);
        assert!(ran.err.contains(words) && ran.err.contains("hint: "), "{}", ran.err);
    };
    let whole = short(&[
        "--set",
        "data.train=pairs.jsonl",
        "--set",
        "preference.loss=dpo",
        "--set",
        "train.dropout=0",
        "--output",
        "x",
    ]);
    refused(&whole, "there is neither an adapter nor `preference.reference`");
    let with = |setting: &'static str| tune("pairs.jsonl", "x", &[BY_DPO, &["--set", setting]].concat());
    refused(&with("train.dropout=0.1"), "`train.dropout`");
    refused(&with("lora.dropout=0.1"), "`lora.dropout`");
    refused(&with("train.label_smoothing=0.1"), "`train.label_smoothing`");
    refused(&with("lora.modules_to_save=wo"), "`lora.modules_to_save`");
    let orpo = short(&[
        "--set",
        "data.train=pairs.jsonl",
        "--set",
        "preference.loss=orpo",
        "--set",
        "train.dropout=0",
        "--output",
        "orpo",
    ]);
    scene.run(&orpo).expect_code(0);
    let unused = scene.run(&short(&["--set", "preference.beta=0.3", "--output", "y"])).expect_code(0);
    assert!(unused.err.contains("`preference.beta`"), "{}", unused.err);
}

#[test]
fn numbers_of_preferences_rank_checkpoints_and_are_in_every_table() {
    let scene = scene();
    let every = ["train.eval_every_steps=2", "checkpoint.every_steps=2", "checkpoint.model=best"];
    let best = "checkpoint.best_metric=rewards/margins";
    let settings = [&["--set", best][..], &every.iter().flat_map(|set| ["--set", set]).collect::<Vec<_>>()].concat();
    let run = tune("pairs.jsonl", "run", &[BY_DPO, &settings, &["--max-steps", "6"]].concat());
    let ran = scene.run(&run).expect_code(0);
    for title in ["preference loss", "chosen preferred", "reward margin"] {
        assert!(ran.out.contains(&format!("\n  {title} ")), "{}", ran.out);
    }
    let evaluations = scene.events("run", "eval");
    let margin = |event: &Value| event["rewards/margins"].as_f64().expect("a margin");
    let best = evaluations.iter().skip(1).max_by(|a, b| margin(a).total_cmp(&margin(b))).expect("evaluations");
    let kept = format!("from run/checkpoints/step-{:08}", best["step"].as_u64().expect("a step"));
    assert!(ran.out.contains(&kept), "{kept}: {}", ran.out);
    let watched = scene.run(&["watch", "run"]).expect_code(0).out;
    assert!(watched.contains("chosen preferred") && watched.contains("reward margin"), "{watched}");
    let at = run.iter().position(|flag| flag == "--output").expect("an output");
    let flags = json!([&run[..at], &run[at + 2..]].concat());
    let sweep = "[run.sweep]\n\"run.seed\" = [1, 2]\n";
    scene.write("list.toml", format!("[[run]]\noutput = \"list\"\nflags = {flags}\n{sweep}"));
    let table = scene.run(&["jobs", "run", "list.toml"]).expect_code(0).out;
    let words = ["preference loss", "chosen preferred", "reward margin", "over 2 seeds"];
    assert!(words.iter().all(|word| table.contains(word)), "{table}");
    // A number that evaluations will not have.
    let plain = short(&["--set", "checkpoint.best_metric=rewards/margins", "--output", "x"]);
    scene.run(&plain).expect_code(2).expect_words(&["`preference.loss` is not set", "hint: "]);
    let kto = tune("pairs.jsonl", "x", &[BY_KTO, &["--set", "checkpoint.best_metric=rewards/accuracies"]].concat());
    scene.run(&kto).expect_code(2).expect_words(&["is a share of pairs", "rewards/margins"]);
}

const BY_KTO: &[&str] = &["--set", "preference.loss=kto", "--set", "train.dropout=0"];

#[test]
fn kto_learns_from_labels_in_any_form_and_resumes_to_the_same_bits() {
    let scene = scene();
    let rows = |yes: &str, no: &str, names: [&str; 2]| -> String {
        let row = |i: usize| {
            let label = if i.is_multiple_of(3) { yes } else { no };
            let [answer, quality] = names;
            format!("{{\"prompt\":\"join {i}\",\"{answer}\":\"word {}\",\"{quality}\":{label}}}\n", i % 5)
        };
        (0..24).map(row).collect()
    };
    scene.write("labels.jsonl", rows("true", "false", ["completion", "label"]));
    scene.write(
        "valid.jsonl",
        rows("true", "false", ["completion", "label"]).lines().take(7).map(|l| format!("{l}\n")).collect::<String>(),
    );
    let ran = scene.run(&tune("labels.jsonl", "whole", BY_KTO)).expect_code(0);
    ran.expect_words(&["KTO of labels", "preference loss"]);
    let steps = scene.events("whole", "step");
    // A new adapter changes nothing: 1 - σ(0) of each answer.
    assert!((steps[0]["preference_loss"].as_f64().unwrap() - 0.5).abs() < 1e-6, "{:#}", steps[0]);
    assert_eq!(steps[0]["kl"], 0.0);
    assert_eq!(figures(&steps, "objective"), figures(&steps, "preference_loss"));
    assert!(steps.iter().all(|step| step["rewards/accuracies"].is_null()));
    let evaluated = scene.events("whole", "eval");
    for name in ["kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen"] {
        assert_eq!(figures(&evaluated, name).len(), evaluated.len());
    }
    let margin = figures(&evaluated, "rewards/margins");
    assert!(margin[margin.len() - 1] > 0.0, "{margin:?}");

    let objectives = |run: &str| figures(&scene.events(run, "step"), "preference_loss");
    let expected = objectives("whole");
    for (number, (yes, no)) in [("1", "0"), ("1", "-1"), ("\"True\"", "\"False\"")].into_iter().enumerate() {
        scene.write("other.jsonl", rows(yes, no, ["answer", "good"]));
        let columns = ["--set", "data.response_column=answer", "--set", "data.label_column=good"];
        let output = format!("other{number}");
        // The rows for validation have columns of the usual names.
        let arguments = tune("other.jsonl", &output, &[BY_KTO, &columns, &["--set", "data.validation=[]"]].concat());
        scene.run(&arguments).expect_code(0);
        assert_eq!(objectives(&output), expected, "{yes}");
    }
    let weighed =
        [BY_KTO, &["--set", "preference.desirable_weight=2", "--set", "preference.undesirable_weight=0.5"]].concat();
    scene.run(&tune("labels.jsonl", "weighed", &weighed)).expect_code(0);
    let objective = objectives("weighed")[0];
    assert!(objective != expected[0] && (0.25..=1.0).contains(&objective), "{objective}");

    let mut running =
        scene.start(&tune("labels.jsonl", "killed", &[BY_KTO, &["--set", "checkpoint.every_steps=2"]].concat()));
    assert!(running.wait_for("step 4/6"));
    running.kill();
    scene.run(&[tune("labels.jsonl", "killed", BY_KTO), vec!["--keep-training".into()]].concat()).expect_code(0);
    let adapter = |run: &str| scene.read(&format!("{run}/adapter/adapter_model.safetensors"));
    assert_eq!(adapter("killed"), adapter("whole"));

    let refused = |data: &str, code: i32, more: &[&str], words: &[&str]| {
        let ran = scene.run(&tune(data, "refused", &[BY_KTO, more].concat())).expect_code(code);
        assert!(words.iter().all(|word| ran.err.contains(word)), "{}", ran.err);
    };
    scene.write("wrong.jsonl", scene.text("labels.jsonl").replacen("\"label\":false", "\"label\":\"good\"", 1));
    refused("wrong.jsonl", 4, &[], &["wrong.jsonl", "`label`: expected a label, which is true or false"]);
    refused("named.jsonl", 4, &[], &["`response`", "hint: "]);
    refused("labels.jsonl", 2, &["--set", "train.batch_size=1"], &["`train.batch_size` is 1", "hint: "]);
}
