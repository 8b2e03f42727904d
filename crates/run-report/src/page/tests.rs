use base64::Engine;
use proptest::prelude::*;
use serde_json::json;
use sha2::{Digest, Sha256};

use super::*;
use crate::run::Run;

/// A text for everything that a user or a file can name, with markup in it.
const MARKUP: &str = "</script><img src=x onerror=alert(1)>'\"&";

fn run_of(steps: u64, text: &str) -> Run {
    let mut run = Run::new(text);
    run.set_config(&format!("[run]\noutput_dir = {:?} # {text}: directory\n", text));
    let plan = json!({"budget": 3 << 30, "predicted_peak": 1 << 30, "headroom": 8 << 20, "bill": {"binding": text, "conclusion": text,
        "headroom_note": text, "rows": [{"name": text, "bytes": 1 << 30, "note": text}], "phases": []},
        "timeline": {"rows": [text], "moments": [{"pass": text, "what": text, "bytes": [5]}]}});
    let mut note = |event: serde_json::Value| run.note(&event.to_string());
    note(
        json!({"event": "start", "time": "1970-01-01T00:00:00Z", "step": 0, "total_steps": steps, "screen": format!("Data   {text}\n"), "version": text}),
    );
    let mut of_plan = plan;
    of_plan["event"] = json!("plan");
    note(of_plan);
    for step in 1..=steps {
        note(
            json!({"event": "step", "step": step, "loss": (step % 97) as f64 + 0.123_456, "lr": 1e-3 * step as f64, "grad_norm": 0.7 + (step % 13) as f64,
            "tokens_per_second": 1e4 + (step % 31) as f64, "step_ms": 100.5, "data_wait_ms": (step % 7) as f64, "rss_bytes": (1u64 << 30) + step % 1000 * 4096,
            "available_bytes": 1u64 << 33, "pressure_percent": (step % 5) as f64, "samples": 64, "source_tokens": 400, "target_tokens": 300, "padded_tokens": 900}),
        );
        if step % (steps / 600).max(1) == 0 {
            note(json!({"event": "eval", "step": step, "loss": 2.5, text: 0.5, "samples": 10, "metrics": [text],
                "classes": {"labels": [{"label": text, "precision": 1.0, "recall": 0.25, "f1": 0.4, "support": 12}],
                    "macro": {"f1": 0.4}, "weighted": {"f1": 0.4}, "confusion": [[3, 9]]},
                "examples": (0..8).map(|_| json!({"prompt": format!("{text}{}", "字".repeat(500)), "answer": text.repeat(50), "expected": text})).collect::<Vec<_>>()}));
            note(json!({"event": "warning", "step": step, "message": text.repeat(30)}));
        }
    }
    note(json!({"event": "end", "step": steps, "reason": text}));
    run
}

/// Checks that the page has only our own elements, and that no text of the run became an element.
fn has_no_markup_of(page: &str) {
    for forbidden in ["<img", "onerror=alert(1)>", "<script>alert"] {
        assert!(!page.contains(forbidden), "{forbidden}");
    }
    assert_eq!(page.matches("<script").count(), 2);
    assert_eq!(page.matches("</script").count(), 2);
}

#[test]
fn the_policy_in_the_head_allows_the_script_as_it_is() {
    let digest = base64::engine::general_purpose::STANDARD.encode(Sha256::digest(SCRIPT.as_bytes()));
    assert_eq!(digest, SCRIPT_SHA256);
}

#[test]
fn texts_of_users_are_never_markup() {
    let run = run_of(50, MARKUP);
    let page = of_run(&run);
    has_no_markup_of(&page);
    assert!(page.contains("&lt;img src=x onerror=alert(1)&gt;"), "it is shown as it is");
    has_no_markup_of(&of_runs(&[run_of(20, MARKUP), run]));
    has_no_markup_of(&of_plan(
        &json!({"bill": {"rows": [{"name": MARKUP, "bytes": 7, "note": MARKUP}], "binding": MARKUP}}),
        MARKUP,
    ));
}

#[test]
fn the_labels_of_the_model_that_is_kept_have_their_scores_and_a_confusion_matrix() {
    let mut run = Run::new("labels");
    for (step, f1, confusion) in [(1, 0.25, json!([[1, 3, 0], [0, 4, 2]])), (2, 0.125, json!([[0, 4, 0], [0, 5, 1]]))] {
        let label = |name: &str, support: u64| json!({"label": name, "precision": 0.5, "recall": 0.75, "f1": f1, "support": support});
        let classes = json!({"labels": [label("bug", 4), label("feature", 6)], "macro": {"f1": f1}, "weighted": {"f1": f1},
            "confusion": confusion});
        run.note(&json!({"event": "eval", "step": step, "loss": 1.0, "macro_f1": f1, "metrics": ["macro_f1"], "classes": classes}).to_string());
    }
    run.note(&json!({"event": "end", "step": 2, "reason": "done", "model_step": 1}).to_string());
    let page = of_run(&run);
    for expected in [
        "Labels, after step 1",
        "<td>bug</td><td class=\"n\">50.0 %</td><td class=\"n\">75.0 %</td><td class=\"n\">25.0 %</td><td class=\"n\">4</td>",
        "Confusion matrix",
        "<tr><th>feature</th><td class=\"n mute\">0</td><td class=\"n right\">4</td><td class=\"n wrong\">2</td></tr>",
        "aria-label=\"macro f1\"",
    ] {
        assert!(page.contains(expected), "{expected}\n{page}");
    }
    assert!(of_runs(&[run.clone(), run]).contains("aria-label=\"macro f1\""));
}

#[test]
fn vectors_have_a_curve_of_recall_beside_that_of_the_first_evaluation() {
    let mut run = Run::new("vectors");
    for (step, shares) in [(0, [0.125, 0.25]), (7, [0.5, 0.875])] {
        run.note(
            &json!({"event": "eval", "step": step, "loss": 1.0, "recall@1": shares[0], "recall@10": shares[1],
                "ndcg@10": 0.625, "recall@0": 1.0, "recall@many": 2.0, "metrics": []})
            .to_string(),
        );
    }
    let page = of_run(&run);
    for expected in ["Recall", "first texts", "after step 0", "after step 7", "0.875", "NDCG@10"] {
        assert!(page.contains(expected), "{expected}\n{page}");
    }
    assert_eq!(run.evaluations()[1].recall, [(1.0, 0.5), (10.0, 0.875)]);
}

#[test]
fn the_tasks_of_a_mixture_have_their_samples_and_their_scores() {
    let mut run = Run::new("mixture");
    for step in 1..=3 {
        run.note(&json!({"event": "step", "step": step, "loss": 2.0, "tasks": {"sums": 5, "<names>": 2}}).to_string());
    }
    let scores = |bleu: f64| json!({"loss": 1.5, "bleu": bleu, "samples": 4, "metrics": ["bleu"]});
    let tasks = json!({"sums": scores(30.0), "<names>": scores(12.5)});
    run.note(
        &json!({"event": "eval", "step": 3, "loss": 1.5, "bleu": 21.25, "metrics": ["bleu"], "tasks": tasks})
            .to_string(),
    );
    let page = of_run(&run);
    for expected in [
        "Tasks, scored after step 3",
        "<td>sums</td><td class=\"n\">15</td><td class=\"n\">4</td><td class=\"n\">1.5</td>",
        "<td>&lt;names&gt;</td><td class=\"n\">6</td>",
        "<td class=\"n\">12.5</td></tr>",
    ] {
        assert!(page.contains(expected), "{expected}\n{page}");
    }
}

#[test]
fn a_long_run_with_long_answers_has_a_small_page() {
    let mut run = run_of(20_000, "a run");
    run.set_config(&"key = \"<<<<<<<<<<<<<<<<<<<<<<<<\" # --set: x\n".repeat(2000));
    let page = of_run(&run);
    assert!(page.len() < MAX_BYTES, "{}", page.len());
    let runs: Vec<Run> = (0..MAX_RUNS).map(|_| run_of(1000, "a run")).collect();
    let page = of_runs(&runs);
    assert!(page.len() < MAX_BYTES, "{}", page.len());
}

#[test]
fn texts_that_grow_when_they_are_escaped_make_no_page_too_large() {
    let quotes = "\"'&<>".repeat(400);
    let mut run = run_of(2000, &quotes);
    let keys: String = (0..400).map(|key| format!("key_{key} = {quotes:?} # {quotes}: x\n")).collect();
    run.set_config(&keys);
    let page = of_run(&run);
    assert!(page.len() < MAX_BYTES && page.contains("Resident memory"), "{}", page.len());
    let others = (1..MAX_RUNS).map(|_| run_of(100, &quotes));
    let page = of_runs(&others.chain([run]).collect::<Vec<_>>());
    assert!(page.len() < MAX_BYTES && page.contains("Validation loss"), "{}", page.len());
}

#[test]
fn a_page_asks_no_network_for_anything() {
    let page = of_run(&run_of(10, "a run"));
    for outside in ["http:", "https:", "src=", "href=", "@import", "url("] {
        assert!(!page.contains(outside), "{outside}");
    }
}

#[test]
fn the_numbers_in_a_page_are_those_of_the_run() {
    let page = of_run(&run_of(50, "a run"));
    let text = page.split(r#"id="figures">"#).nth(1).and_then(|rest| rest.split("</script>").next()).expect("figures");
    let figures: serde_json::Value = serde_json::from_str(text).expect("JSON");
    assert_eq!(
        (&figures["steps"], &figures["samples"], &figures["last_loss"]),
        (&json!(50), &json!(3200), &json!(50.123_456))
    );
    assert_eq!(figures["evaluations"].as_array().map(Vec::len), Some(run::MAX_ROWS));
}

#[test]
fn a_run_of_which_nothing_is_known_has_a_page() {
    assert!(of_run(&Run::new("empty")).contains("<h1>empty</h1>"));
    assert!(of_runs(&[Run::new("a"), Run::new("b")]).contains("2 runs"));
    assert!(of_plan(&json!(null), "nothing").contains("<h1>nothing</h1>"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_events_make_a_page(lines in proptest::collection::vec((0..6usize, any::<u64>(), -1e300..1e300f64, ".{0,20}"), 0..40)) {
        let mut run = Run::new("any");
        for (kind, number, value, text) in lines {
            let event = ["step", "eval", "plan", "replan", "memory", "end"][kind];
            run.note(&json!({"event": event, "step": number, "loss": value, "lr": value, "grad_norm": value, "rss_bytes": number,
                "tokens_per_second": value, "data_wait_ms": value, "step_ms": value, "budget": number, "predicted_peak": number, "reason": text,
                "target_tokens": number, "bill": {"rows": [{"name": text, "bytes": number / 2}], "binding": text}}).to_string());
        }
        prop_assert!(of_run(&run).len() < MAX_BYTES);
        prop_assert!(of_runs(&[run.clone(), run]).len() < MAX_BYTES);
    }
}
