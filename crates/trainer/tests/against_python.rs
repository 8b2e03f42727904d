//! The trainer beside what it must equal: sacreBLEU, torch's and transformers' schedules, transformers' Adafactor, and
//! whole training steps. The goldens come from `scripts/make_goldens.py`.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use trainer::bleu::{Bleu, Tokenization};
use trainer::schedule::{DEFAULT_FINAL_DIV_FACTOR, DEFAULT_PCT_START, Schedule, ScheduleKind};

fn goldens(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(path)
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))).unwrap()
}

fn strings(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect()
}

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

fn counts(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
}

fn schedule(golden: &Value) -> Schedule {
    let kind =
        match golden["name"].as_str().filter(|_| golden["schedule"].is_null()).or(golden["schedule"].as_str()).unwrap()
        {
            "constant" => ScheduleKind::Constant,
            "linear" => ScheduleKind::Linear,
            "cosine" => ScheduleKind::Cosine,
            "inverse-sqrt" => ScheduleKind::InverseSqrt,
            "one-cycle" => ScheduleKind::OneCycle {
                div_factor: golden["div_factor"].as_f64().unwrap(),
                pct_start: DEFAULT_PCT_START,
                final_div_factor: DEFAULT_FINAL_DIV_FACTOR,
            },
            other => panic!("schedule {other}"),
        };
    Schedule { kind, warmup_steps: golden["warmup_steps"].as_u64() }
}

#[test]
fn schedules_are_those_of_torch_and_transformers() {
    let goldens = json(&goldens("schedules/schedules.json"));
    for golden in goldens.as_array().unwrap() {
        let total_steps = golden["total_steps"].as_u64().unwrap();
        // The goldens give one-cycle's peak; the schedule counts from where the cycle starts.
        let rate = golden["peak"].as_f64().unwrap() / golden["div_factor"].as_f64().unwrap_or(1.0);
        for (step, expected) in floats(&golden["learning_rates"]).into_iter().enumerate() {
            let got = rate * schedule(golden).factor(step as u64, total_steps);
            let scale = golden["peak"].as_f64().unwrap();
            assert!(
                (got - expected).abs() <= 1e-12 * scale,
                "{}, step {step}: {got}, expected {expected}",
                golden["name"]
            );
        }
    }
}

#[test]
fn bleu_is_that_of_sacrebleu_token_by_token() {
    let goldens = json(&goldens("bleu/bleu.json"));
    for golden in goldens.as_array().unwrap() {
        let (hypotheses, references) = (strings(&golden["hypotheses"]), strings(&golden["references"]));
        for (name, expected) in golden["scores"].as_object().unwrap() {
            let place = format!("{}, {name}", golden["name"]);
            let tokenization: Tokenization = name.parse().unwrap();
            let mut bleu = Bleu::new(tokenization);
            for (i, (hypothesis, reference)) in hypotheses.iter().zip(&references).enumerate() {
                assert_eq!(
                    tokens(&tokenization.tokenize(hypothesis)),
                    tokens(strings(&expected["tokenized"]["hypotheses"])[i]),
                    "{place}"
                );
                assert_eq!(
                    tokens(&tokenization.tokenize(reference)),
                    tokens(strings(&expected["tokenized"]["references"])[i]),
                    "{place}"
                );
                bleu.add(hypothesis, reference);
            }
            let score = bleu.score();
            assert_eq!(bleu.signature(), expected["signature"], "{place}");
            assert_eq!(score.matches.to_vec(), counts(&expected["counts"]), "{place}");
            assert_eq!(score.totals.to_vec(), counts(&expected["totals"]), "{place}");
            assert_eq!(score.hypothesis_tokens, expected["hypothesis_length"], "{place}");
            assert_eq!(score.reference_tokens, expected["reference_length"], "{place}");
            close(score.brevity_penalty, expected["brevity_penalty"].as_f64().unwrap(), 1e-12, &place);
            close(score.score, expected["score"].as_f64().unwrap(), 1e-10, &place);
            for (got, expected) in score.precisions.into_iter().zip(floats(&expected["precisions"])) {
                close(got, expected, 1e-12, &place);
            }
        }
    }
}

fn tokens(line: &str) -> Vec<&str> {
    line.split(|c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c))
        .filter(|word| !word.is_empty())
        .collect()
}

/// Within a relative tolerance, or both (nearly) nothing.
fn close(got: f64, expected: f64, tolerance: f64, place: &str) {
    let error = (got - expected).abs();
    assert!(error <= tolerance * expected.abs().max(1e-3), "{place}: {got}, expected {expected}");
}
