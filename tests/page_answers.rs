//! The page "Will it fit?": its answers equal those of `plan`.

use run_plan::Question;
use run_plan::answer::Kernels;
use serde_json::{Value, json};

use crate::run::Scene;

const CASES: &str = include_str!("../crates/will-it-fit/cases.json");

/// The instruction set of a case, or one that every machine has.
fn instruction_set(case: &Value) -> &str {
    let wanted = case["instruction_set"].as_str().expect("a name");
    if t5_ops::has_instruction_set(wanted) { wanted } else { "portable" }
}

/// The question of a case, for a program that holds `rss` bytes at its start.
fn question(case: &Value, rss: u64) -> Question {
    let set =
        case["set"].as_array().expect("a list").iter().map(|one| one.as_str().expect("text").to_owned()).collect();
    let machine = json!({"total": case["available"], "available": case["available"], "rss": rss});
    Question {
        set,
        model: Some(&case["model"]).filter(|model| !model.is_null()).map(Value::to_string),
        machine: serde_json::from_value(machine).expect("a snapshot"),
        processor: Kernels {
            instruction_set: instruction_set(case).to_owned(),
            threads: case["threads"].as_u64().expect("a count") as usize,
            ..Kernels::default()
        },
        explain: true,
        ..Question::default()
    }
}

#[test]
fn the_page_answers_as_plan_does_to_the_byte() {
    let cases: Vec<Value> = serde_json::from_str(CASES).expect("JSON");
    let scene = Scene::new();
    // Every third case: each command plans another model.
    for case in cases.iter().step_by(3) {
        let what = &case["what"];
        if !case["model"].is_null() {
            scene.write("config.json", case["model"].to_string());
            scene.write("MODEL/config.json", case["model"].to_string());
        }
        let machine = json!([{"total": case["available"], "available": case["available"]}]);
        scene.write("machine.json", machine.to_string());
        let threads = case["threads"].to_string();
        let variables = format!("export LOW_MEM_T5_ISA={} RAYON_NUM_THREADS={threads}", instruction_set(case));
        let question = |rss| question(case, rss);
        let mut arguments = vec!["plan", "--machine", "machine.json"];
        let set: Vec<String> = question(0).set;
        set.iter().for_each(|one| arguments.extend(["--set", one]));
        let asked = |flag: &'static str| {
            let arguments: Vec<&str> = arguments.iter().copied().chain([flag]).collect();
            scene.run_after(&variables, &arguments)
        };
        let printed = asked("--json");
        if printed.code != Some(0) {
            let answer = run_plan::answer(&question(20 << 20));
            // The memory of the refused process is unknown, so only the words before the first number are compared.
            let first =
                |text: &str| text.lines().next().map(|line| line.split(char::is_numeric).next().map(str::to_owned));
            assert_eq!(
                (Some(i32::from(answer.exit)), first(&answer.error)),
                (printed.code, first(&printed.err)),
                "{what}"
            );
            continue;
        }
        let bill = printed.json()["bill"]["rows"].clone();
        let held = bill.as_array().expect("rows").iter().find(|row| row["name"] == "process").expect("a process");
        let rss = held["bytes"].as_u64().expect("bytes") - memory_policy::RESTART_MARGIN.0;
        let answer = run_plan::answer(&question(rss));
        assert_eq!((answer.exit, answer.error.as_str()), (0, ""), "{what}");
        assert_eq!(answer.json, printed.out, "{what}");
    }
}

#[test]
fn an_adapter_is_planned_for_without_a_tokenizer() {
    let answer = |more: &[&str]| {
        let set = ["model.init_from=MODEL", "memory.budget=8GiB", "run.device=cpu"].iter().chain(more);
        let machine = json!({"available": 16_u64 << 30, "rss": 20 << 20});
        let question = Question {
            set: set.map(|one| (*one).to_owned()).collect(),
            preset: Some("t5-base".to_owned()),
            machine: serde_json::from_value(machine).expect("a snapshot"),
            ..Question::default()
        };
        let answer = run_plan::answer(&question);
        let json: Value = serde_json::from_str(&answer.json).expect(&answer.error);
        json["checkpoint_bytes"].as_u64().expect("bytes")
    };
    let [all, adapter] = [answer(&[]), answer(&["lora.rank=8"])];
    assert!(adapter < all / 20, "{adapter} of {all}");
}
