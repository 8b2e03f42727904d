//! `metrics.jsonl` is as `docs/metrics.schema.json` describes it. Every run of every test is checked when its scene ends; here are runs
//! with most events, and events that the schema refuses.

use crate::run::{Scene, schema, short};
use serde_json::{Value, json};

fn events(scene: &Scene) -> Vec<Value> {
    scene.text("run/metrics.jsonl").lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn every_event_of_runs_is_described() {
    let scene = Scene::new();
    let rows: String = (0..40).map(|row| format!("{row},{row} and 1\n")).collect();
    scene.write("rows.csv", format!("prompt,response\n{rows}"));
    let data = ["--set", "data.train=rows.csv", "--set", "data.validation_split=8"];
    // A rate at which evaluations do not improve for long.
    let stops = ["--set", "train.eval_every_steps=2", "--set", "train.early_stopping_patience=1"];
    let steep = [
        "--max-steps",
        "40",
        "--set",
        "optimizer.learning_rate=0.5",
        "--set",
        "train.eval_metrics=accuracy,rouge,chrf",
    ];
    scene.run(&short(&[&data[..], &["--max-steps", "2"]].concat())).expect_code(0);
    scene.run(&short(&[&data[..], &stops, &steep, &["--keep-training"]].concat())).expect_code(0);
    let found = events(&scene);
    for name in ["start", "resume", "plan", "data", "step", "eval", "checkpoint", "memory", "end"] {
        assert!(found.iter().any(|event| event["event"] == name), "no {name}");
        assert!(schema::names().contains(&name), "{name}");
    }
    assert_eq!(scene.events("run", "end").last().expect("an end")["reason"], "early_stopping");
    let last = scene.events("run", "eval").pop().expect("an evaluation");
    assert!(last["chrf"].is_number() && last["rougeL"].is_number(), "{last}");
    for event in &found {
        assert_eq!(schema::wrong_with(event), [""; 0], "{event}");
    }
}

#[test]
fn the_schema_refuses_events_that_it_does_not_describe() {
    let scene = Scene::new();
    scene.run(&short(&["--max-steps", "1"])).expect_code(0);
    let step = scene.events("run", "step").swap_remove(0);
    let plan = scene.events("run", "plan").swap_remove(0);
    let check = |event: &Value, pointer: &str, value: Value, expected: &str| {
        let mut changed = event.clone();
        let (parent, name) = pointer.rsplit_once('/').expect("a pointer");
        changed.pointer_mut(parent).expect("an object")[name] = value;
        assert_eq!(schema::wrong_with(&changed), [expected]);
    };
    check(&step, "/gradient", json!(1), "step: `gradient` is not described");
    check(&step, "/step", json!(-1), "step.step: expected at least 0, got -1");
    check(&step, "/step", json!("1"), "step.step: expected \"integer\", got \"1\"");
    check(&step, "/event", json!("stride"), "no event `stride`");
    check(&plan, "/bill/conclusion", Value::Null, "plan.bill.conclusion: expected \"string\", got null");
    check(&plan, "/bill/more", json!(1), "plan.bill: `more` is not described");
    check(
        &plan,
        "/limited_by",
        json!("luck"),
        "plan.limited_by: expected one of [\"budget\",\"available\",\"device_budget\",\"device_available\"], got \"luck\"",
    );
    let mut without = step.clone();
    without.as_object_mut().expect("an object").remove("loss");
    assert_eq!(schema::wrong_with(&without), ["step: no `loss`"]);
    let mut infinite = step;
    infinite["loss"] = json!("inf");
    assert_eq!(schema::wrong_with(&infinite), [""; 0]);
}
