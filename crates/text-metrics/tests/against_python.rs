//! Compares the metrics with the implementations that they must equal: sacreBLEU, google's rouge-score, scikit-learn and
//! NLTK. The goldens come from `scripts/make_goldens.py`.

use std::path::Path;

use serde_json::Value;
use text_metrics::bleu::{Bleu, Tokenization};
use text_metrics::chrf::{CHRF_PLUS_PLUS, Chrf};
use text_metrics::labels::Labels;
use text_metrics::ranking::Ranking;
use text_metrics::rouge::{Rouge, RougeScore};
use text_metrics::searches::{self, Searches};
use text_metrics::{LabelsInText, Metric, Scores, Settings};

fn goldens(path: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(path);
    serde_json::from_slice(&std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))).unwrap()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

fn strings(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(text).collect()
}

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

fn counts(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
}

/// Checks that two values agree within a relative tolerance, or are both (nearly) 0.
#[track_caller]
fn close(got: f64, expected: f64, tolerance: f64, place: &str) {
    let error = (got - expected).abs();
    assert!(error <= tolerance * expected.abs().max(1e-3), "{place}: {got}, expected {expected}");
}

fn tokens(line: &str) -> Vec<&str> {
    line.split(|c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c))
        .filter(|word| !word.is_empty())
        .collect()
}

#[test]
fn bleu_is_that_of_sacrebleu_token_by_token() {
    let goldens = goldens("bleu/bleu.json");
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

fn values(score: RougeScore) -> [f64; 4] {
    [score.rouge1, score.rouge2, score.rouge_l, score.rouge_l_sum]
}

#[test]
fn chrf_and_rouge_are_those_of_sacrebleu_and_google_on_every_row() {
    let goldens = goldens("metrics/rows.json");
    let rows = goldens["rows"].as_array().unwrap();
    assert!(rows.len() > 200);
    for (number, row) in rows.iter().enumerate() {
        let (hypothesis, reference) = (text(&row["hypothesis"]), text(&row["reference"]));
        let place = format!("row {number}: {hypothesis:?} beside {reference:?}");
        for (name, word_order) in [("chrf", 0), ("chrf++", CHRF_PLUS_PLUS)] {
            let score = Chrf::new(word_order).add(hypothesis, reference);
            close(score, row[name].as_f64().unwrap(), 1e-13, &format!("{name}, {place}"));
        }
        for (name, stems) in [("rouge", false), ("rouge_stemmed", true)] {
            let score = values(Rouge { stems, any_script: false }.score(hypothesis, reference));
            for (got, expected) in score.into_iter().zip(floats(&row[name])) {
                assert_eq!(got, expected, "{name}, {place}");
            }
        }
    }
}

#[test]
fn corpus_scores_and_signatures_are_those_of_the_references() {
    let goldens = goldens("metrics/rows.json");
    let corpus = &goldens["corpus"];
    let all = Metric::list("bleu,chrf,chrf++,rouge").unwrap();
    for (tokenizer, rouge_stems) in [("13a", false), ("zh", true), ("char", false), ("none", true)] {
        let settings = Settings {
            tokenization: Some(tokenizer.parse().unwrap()),
            rouge_stems,
            rouge_any_script: false,
            ..Settings::default()
        };
        let mut scores = Scores::new(&all, settings);
        for row in goldens["rows"].as_array().unwrap() {
            scores.add(text(&row["hypothesis"]), text(&row["reference"]));
        }
        let got = scores.values().unwrap();
        let names = [format!("bleu {tokenizer}"), "chrf".to_owned(), "chrf++".to_owned()];
        for ((name, (_, got)), (_, signature)) in names.iter().zip(&got).zip(scores.signatures()) {
            close(*got, corpus[name]["score"].as_f64().unwrap(), 1e-12, name);
            assert_eq!(signature, corpus[name]["signature"], "{name}");
        }
        let rouge = floats(&corpus[if rouge_stems { "rouge_stemmed" } else { "rouge" }]);
        for ((metric, got), expected) in got[3..].iter().zip(rouge) {
            close(*got, expected, 1e-13, metric.name());
        }
    }
}

#[test]
fn accuracy_and_macro_f1_are_those_of_scikit_learn() {
    for (number, golden) in goldens("metrics/labels.json").as_array().unwrap().iter().enumerate() {
        let mut labels = Labels::default();
        for (hypothesis, reference) in strings(&golden["hypotheses"]).iter().zip(strings(&golden["references"])) {
            labels.add(hypothesis, reference);
        }
        let place = format!("case {number}");
        close(labels.accuracy(), golden["accuracy"].as_f64().unwrap(), 1e-14, &place);
        close(labels.macro_f1().unwrap(), golden["macro_f1"].as_f64().unwrap(), 1e-14, &place);
        let classes = labels.classes().unwrap();
        assert_eq!(classes.iter().map(|class| class.label.as_str()).collect::<Vec<_>>(), strings(&golden["labels"]));
        assert_eq!(classes.iter().map(|class| class.support).collect::<Vec<_>>(), counts(&golden["support"]));
        for (at, class) in classes.iter().enumerate() {
            for (name, value) in [("precision", class.precision), ("recall", class.recall), ("f1", class.f1)] {
                close(value, floats(&golden[name])[at], 1e-14, &format!("{place}, {name} of {}", class.label));
            }
        }
        let confusion = labels.confusion().unwrap();
        let among_labels = confusion.iter().map(|row| row[..classes.len()].to_vec()).collect::<Vec<_>>();
        assert_eq!(among_labels, golden["confusion"].as_array().unwrap().iter().map(counts).collect::<Vec<_>>());
    }
}

#[test]
fn stems_are_those_of_nltk() {
    let goldens = goldens("metrics/stems.json");
    let stems = goldens.as_object().unwrap();
    assert!(stems.len() > 300);
    for (word, stem) in stems {
        assert_eq!(text_metrics::stem(word), text(stem), "{word}");
    }
}

#[test]
fn labels_of_words_sets_of_labels_and_numbers_have_the_scores_of_seqeval_scikit_learn_and_scipy() {
    let goldens = goldens("labels/cases.json");
    let check = |case: &Value, metrics: &str, labels_in_text: LabelsInText| {
        let settings = Settings { labels_in_text, ..Settings::default() };
        let mut scores = Scores::new(&Metric::list(metrics).unwrap(), settings);
        for (answer, reference) in strings(&case["answers"]).iter().zip(strings(&case["references"])) {
            scores.add(answer, reference);
        }
        for (metric, value) in scores.values().unwrap() {
            close(value, case[metric.name()].as_f64().unwrap(), 1e-12, metric.name());
        }
    };
    for case in goldens["words"].as_array().unwrap() {
        check(case, "accuracy,macro_f1,matthews,span_f1", LabelsInText::OfWords);
    }
    for case in goldens["numbers"].as_array().unwrap() {
        check(case, "pearson,spearman", LabelsInText::One);
    }
    for case in goldens["sets"].as_array().unwrap() {
        check(case, "accuracy,micro_f1,macro_f1", LabelsInText::Set);
    }
}

#[test]
fn searches_are_scored_as_by_trec_eval_texts_with_equal_scores_and_texts_that_are_not_found_too() {
    for (number, case) in goldens("ranking/searches.json").as_array().unwrap().iter().enumerate() {
        let mut scores = Searches::default();
        for (query, found) in case["run"].as_object().unwrap() {
            let judged = case["judged"][query].as_object().unwrap();
            let gain = |name: &str| judged.get(name).map_or(0.0, |gain| gain.as_f64().unwrap());
            #[expect(clippy::cast_possible_truncation, reason = "sixteenths")]
            let score = |score: &Value| score.as_f64().unwrap() as f32;
            let mut found: Vec<(f32, &str)> =
                found.as_object().unwrap().iter().map(|(n, s)| (score(s), &**n)).collect();
            found.sort_by(|one, other| searches::order(*one, *other));
            let gains: Vec<f64> = found.iter().map(|(_, name)| gain(name)).collect();
            scores.add(&gains, &judged.values().map(|gain| gain.as_f64().unwrap()).collect::<Vec<_>>());
        }
        let means = scores.means().unwrap();
        for ((cut, got), expected) in searches::CUTS.iter().zip(means.recall).zip(floats(&case["recall"])) {
            close(got, expected, 1e-12, &format!("case {number}, recall@{cut}"));
        }
        close(means.mrr, case["mrr"].as_f64().unwrap(), 1e-12, &format!("case {number}, MRR@10"));
        close(means.ndcg, case["ndcg"].as_f64().unwrap(), 1e-12, &format!("case {number}, NDCG@10"));
    }
}

#[test]
fn rankings_are_scored_as_by_trec_eval() {
    for (number, case) in goldens("ranking/cases.json").as_array().unwrap().iter().enumerate() {
        let mut ranking = Ranking::default();
        for query in case["queries"].as_array().unwrap() {
            let texts = query.as_array().unwrap().iter().map(floats);
            ranking.add(&texts.map(|text| (text[0], text[1])).collect::<Vec<_>>());
        }
        let [mrr, ndcg] = ranking.means().unwrap();
        close(mrr, case["mrr"].as_f64().unwrap(), 1e-12, &format!("case {number}, MRR@10"));
        close(ndcg, case["ndcg"].as_f64().unwrap(), 1e-12, &format!("case {number}, NDCG@10"));
    }
}
